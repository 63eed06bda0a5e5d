"""How a forward pass runs: one table; the first rule that fits is taken. The reasons are hardware.

The sizes that matter, and how the rules use them:

* An SM gives 64 registers to each of 1024 threads, 128 to each of 512. A value of a row costs one
  register, so 32 values for each thread let 8 warpgroups share an SM. A residual that waits to be
  added costs another: rows count as twice as long (`registers`).
* About 64 KiB of reads under way in each SM keep the memory of an H100 or H200 busy. Rows in
  registers have as many because an SM runs several blocks: some load while others reduce or store.
  A row of 32 KiB and more leaves room for one or two, so it is spread over the blocks of a cluster.
* As many blocks as rows reach 0.97 of a copy's bandwidth where a block for each SM, or a few, that
  share the rows evenly reach 0.91: SMs differ, it seems, and all wait for the slowest. So a block
  takes a few rows at most, and only where it then reads its parameters once for all of them; the
  last rows are taken one by one.
* The bytes of a row are those of x and of its residual: both are under way at the same time.
* Groups of rows have parameters of their own, so that a block keeps them for rows of its group.
"""

import dataclasses
import math
from typing import Any, Literal

from jaxnorm_kernels.mosaic.device.gpu import Gpu, kept
from jaxnorm_kernels.mosaic.device.layouts import (
    VECTOR_BYTES,
    WARP,
    WARPGROUP_THREADS,
    fitting_vector,
    power_of_2,
    vector_width,
)
from jaxnorm_kernels.mosaic.rows.logits import (
    causal_unit,
    has_places,
    run_of_rows,
    threads_of_runs,
)
from jaxnorm_kernels.mosaic.rows.pipelined import PipelinedRow, PipelinedTile
from jaxnorm_kernels.mosaic.rows.tiles import RowTile, SplitRow, Tile, WarpgroupRow
from jaxnorm_kernels.mosaic.schedules.columns import (
    column_bytes,
    data_bytes,
    full_bias_dtype,
    is_unaligned,
    param_bytes,
    param_sizes,
    registers,
)
from jaxnorm_kernels.specs import Op, Spec

Kind = Literal["row_tile", "pipelined_tile", "warpgroup_row", "split_row", "pipelined_row"]


@dataclasses.dataclass(frozen=True)
class ForwardSchedule:
    """One way to run a forward pass. What each number means is said where `kind` is defined.

    Attributes:
      kind: `RowTile`, `PipelinedTile`, `WarpgroupRow`, `SplitRow` or `PipelinedRow`.
      vector: elements that a thread reads at once; it must divide the row.
      rows: rows of a block at a time (tiles).
      threads: threads of a warp that share a row (tiles).
      warpgroups: warpgroups of a block that share a row (split_row, pipelined_row).
      cluster: blocks that share a row (split_row, pipelined_row).
      slots: rows, or groups of rows, in the pipeline of a block (pipelined).
      tiles: rows, or groups of rows, that a block takes (pipelined).
      tail: the last of all rows, or groups of them, of which a block takes one (pipelined).
      rereads: a row is read from shared memory for each use, and holds no registers (pipelined).
      params_first: scale and bias are loaded before the reductions, not after: latency against
        registers.
    """

    kind: Kind
    vector: int
    rows: int = 1
    threads: int = WARP
    warpgroups: int = 1
    cluster: int = 1
    slots: int = 0
    tiles: int = 0
    tail: int = 0
    rereads: bool = False
    params_first: bool = False

    def rows_of(self, spec: Spec) -> Tile:
        """How a block holds its rows."""
        if spec.rows // spec.groups % self._rows_of_params and spec.groups > 1:
            raise ValueError(f"{self} has parameters of one group for rows of another")
        cols, vector = spec.cols, self.vector
        apart: dict[str, Any] = {"apart": spec.softmax.causal}
        shares = {
            "warpgroups": self.warpgroups,
            "cluster": self.cluster,
            "exchanges": len(spec.operation.norms) or 1,
        }
        queue = {name: getattr(self, name) for name in ("slots", "tiles", "tail", "rereads")}
        match self.kind:
            case "row_tile":
                return RowTile(cols, vector, self.threads, self.rows, **apart)
            case "pipelined_tile":
                return PipelinedTile(cols, vector, self.threads, self.rows, **queue)
            case "warpgroup_row":
                return WarpgroupRow(cols, vector, **apart)
            case "split_row":
                return SplitRow(cols, vector, **shares, **apart)
            case "pipelined_row":
                return PipelinedRow(cols, vector, **shares, **queue, **apart)

    @property
    def _rows_of_params(self) -> int:
        """How many rows share what is loaded of the parameters."""
        pipelined = self.kind.startswith("pipelined") and self.params_first
        return self.rows * (self.tiles if pipelined else 1)


@dataclasses.dataclass(frozen=True)
class ForwardRule:
    """A line of the table: for rows of up to `cols` columns; None is any number.

    Where a column takes two registers, `cols` and `values` are half as many.

    Attributes:
      waves: only for at most this many rows for each SM.
      row_bytes: only for rows of up to so many bytes, with the residual's.
      params: only where a column has so many bytes of parameters for each byte of rows.
      most_params: only for so many parameters, or fewer.
      op: only for this operation.
      causal: only for softmaxes that are.
      values: columns of a thread, which give the *shares* of a row: how many warpgroups share it
        (split_row, pipelined_row). 0: as many as its parameters leave room for.
      cluster: blocks that may share a row, with a warpgroup in each.
      least: warpgroups of a block.
      warpgroups: of a block, where a row has more shares than `cluster` blocks of the least.
    """

    kind: Kind
    cols: int | None = None
    waves: int | None = None
    row_bytes: int | None = None
    params: float = 0
    most_params: int | None = None
    op: Op | None = None
    causal: bool = False
    values: int = 0
    cluster: int = 1
    least: int = 1
    warpgroups: int = 1

    def fits(self, spec: Spec, gpu: Gpu) -> bool:
        """Whether it is for calls such as this one."""
        return (
            (self.cols is None or spec.cols * registers(spec) <= self.cols)
            and (self.waves is None or spec.rows <= self.waves * gpu.sms)
            and (self.row_bytes is None or spec.cols * column_bytes(spec) <= self.row_bytes)
            # What asynchronous copies can take.
            and (not self.kind.startswith("pipelined") or not is_unaligned(spec))
            and param_bytes(spec) >= self.params * data_bytes(spec)
            and (self.most_params is None or len(param_sizes(spec)) <= self.most_params)
            and self.op in (None, spec.op)
            and spec.softmax.causal >= self.causal
        )


# Bytes of x in a thread of a tile, where one row has no more: what two loads bring. The fewer, the
# more blocks share an SM: with eight, RMSNorm over 64 to 512 columns of float32 took up to 4 % more
# time (H200).
_TILE_BYTES = 2 * VECTOR_BYTES

# Units of a causal row. Softmax over 512 and 1024 columns of bfloat16 took 9 and 3 % less time than
# in units of 32 vectors of 16 bytes, over 512 of float32 4 % less (H100).
_CAUSAL_PARTS = 8

# Of a tile: the threads of a row read up to so much of it, the rest of its last unit twice.
_MOST_READ = 9 / 8

# A pipelined tile has two groups of rows where rows have more than so many columns (of shorter
# ones, many share what is loaded of the parameters in any case) and each SM has at least so many
# groups.
_SHORT_COLS, _GROUPS_OF_SM = 256, 6

# A split row: registers of a thread for its columns and their parameters. Of 8 warpgroups each
# thread has 64, with fewer 128.
_SPLIT_WARPGROUPS, _MANY_WARPGROUPS_ROOM, _ROOM = 8, 48, 128

# A pipelined row, from the sweep (`benchmarks/sweeps/forward.py`). Columns of a thread, each of
# which costs a register for each of its parameters and one for its value; by how many parameters
# it has.
_VALUES = {0: 48, 1: 80, 2: 48, 3: 36}
# Bytes of its slots, or else 2 parts of rows: more room for them would leave fewer blocks to an SM.
# In a cluster the third part pays: its blocks wait for each other.
_QUEUED_BYTES, _LEAST_SLOTS, _LEAST_SLOTS_OF_CLUSTER, _MOST_SLOTS = 24 * 1024, 2, 3, 3
# Of a block's shared memory, what is not for slots: barriers, and what is exchanged.
_OTHER_SHARED_BYTES = 8 * 1024
# Columns of a thread above which a row is read again for each use, and holds no registers. Not so
# above the second number with two parameters: these fill the registers, and leave an SM room for
# one or two blocks anyway.
_HELD_VALUES, _REREAD_VALUES = 32, 48

#: Rows for a block of a cluster of so many, where parameters are as many bytes as x and y (H200).
_START = {1: 1.0, 2: 0.75, 4: 1.0, 8: 1.375}
# Blocks for each SM, at least, so that all SMs end at about the same time.
_BLOCKS_OF_SM = 3
# Rows of a block that share the parameters of their group: LayerNorm over 2048 columns of bfloat16,
# 16 groups of 1024 rows, reaches 1.00 of copy bandwidth with two, and 0.97 with four (H100).
_MOST_OF_GROUP = 2
# For each SM, or cluster, the rows that are taken one by one at the end. Without them, LayerNorm
# over 5120 columns of bfloat16 kept the last SM busy for 5 % longer than the average one (H200).
_TAIL = 2


def of_line(line: ForwardRule, spec: Spec, gpu: Gpu) -> ForwardSchedule:
    """What a line says for `spec`."""
    dtypes = (*spec.operand_dtypes, spec.y_dtype, full_bias_dtype(spec))
    vector = vector_width(spec.cols, *dtypes)
    # A unit must fit in the row: short rows take narrower loads.
    least, most = (2, WARP) if line.kind.endswith("tile") else (WARPGROUP_THREADS,) * 2
    vector = min(vector, power_of_2(spec.cols // least))
    if spec.cols >= most * vector:
        vector = fitting_vector(spec.cols, vector, most)
    match line.kind:
        case "row_tile":
            return _row_tile(spec, vector, gpu)
        case "pipelined_tile":
            return _pipelined_tile(spec, vector, gpu)
        case "warpgroup_row":
            return ForwardSchedule("warpgroup_row", vector, params_first=True)
        case "split_row":
            return _split_row(line, spec, vector, gpu)
        case "pipelined_row":
            return _pipelined_row(line, spec, vector, gpu)


def _row_tile(spec: Spec, vector: int, gpu: Gpu) -> ForwardSchedule:
    threads = _threads(spec.cols, vector)
    if has_places(spec):
        threads, vector = causal_unit(spec, threads, vector, _CAUSAL_PARTS)
        threads, vector = threads_of_runs(spec, threads, vector)
    step = WARPGROUP_THREADS // threads
    row_bytes = spec.cols * column_bytes(spec)
    rows = max(1, _TILE_BYTES * WARPGROUP_THREADS // (row_bytes * step)) * step
    rows = min(rows, spec.rows // step * step)
    if spec.groups > 1 or has_places(spec):
        # The rows of a tile share its parameters, or lie in one run.
        group = math.gcd(spec.rows // spec.groups, run_of_rows(spec))
        rows = next((n for n in range(rows, 0, -step) if group % n == 0), 0)
    # Fewer rows than the warps of a block hold.
    if not rows and spec.cols >= WARPGROUP_THREADS:
        return of_line(ForwardRule("warpgroup_row"), spec, gpu)
    return ForwardSchedule(
        "row_tile",
        vector,
        rows=rows or 1,
        threads=threads,
        params_first=True,
    )


def _threads(cols: int, vector: int) -> int:
    """Threads for a row: as many of a warp as possible while they read little twice."""
    fitting = [n for n in (32, 16, 8, 4, 2) if n * vector <= cols]
    read = {n: math.ceil(cols / (n * vector)) * n * vector for n in fitting}
    least = min(fitting, key=read.__getitem__)
    return next((n for n in fitting if read[n] <= cols * _MOST_READ), least)


def _pipelined_tile(spec: Spec, vector: int, gpu: Gpu) -> ForwardSchedule:
    tile = _row_tile(spec, vector, gpu)
    if tile.rows == 1:
        return tile
    many = spec.cols > _SHORT_COLS and spec.rows >= _GROUPS_OF_SM * gpu.sms * tile.rows
    tiles = 2 if many and param_bytes(spec) > data_bytes(spec) else 1
    tiles = _of_a_group(spec, tiles, tile.rows)
    tail = _tail(tiles, gpu, cluster=1)
    return dataclasses.replace(tile, kind="pipelined_tile", slots=tiles, tiles=tiles, tail=tail)


def _split_row(line: ForwardRule, spec: Spec, vector: int, gpu: Gpu) -> ForwardSchedule:
    shares = _shares(spec.cols, vector, line.values // registers(spec))
    cluster = min(line.cluster, gpu.sms // spec.rows) if line.waves else line.cluster
    warpgroups, cluster = _distribute(shares, line, gpu, cluster)
    values = spec.cols / (cluster * warpgroups * WARPGROUP_THREADS)
    room = _ROOM if warpgroups < _SPLIT_WARPGROUPS else _MANY_WARPGROUPS_ROOM
    return ForwardSchedule(
        "split_row",
        vector,
        cluster=cluster,
        warpgroups=warpgroups,
        params_first=values * (registers(spec) + len(param_sizes(spec))) <= room,
    )


def _pipelined_row(line: ForwardRule, spec: Spec, vector: int, gpu: Gpu) -> ForwardSchedule:
    params = len(param_sizes(spec))
    values = line.values or _VALUES[params]
    shares = _shares(spec.cols, vector, values // registers(spec))
    warpgroups, cluster = _distribute(shares, line, gpu, line.cluster)
    unit = warpgroups * WARPGROUP_THREADS * vector
    part = math.ceil(spec.cols / (cluster * unit)) * unit
    part_bytes, of_thread = part * column_bytes(spec), part // (warpgroups * WARPGROUP_THREADS)
    # Blocks of a cluster that have an SM to themselves, and many parameters to read: one round
    # takes all rows.
    alone = 1 < line.cluster < shares and params == 2 and spec.groups == 1
    tiles = _tiles_of_a_block(spec, cluster, gpu)
    if alone:
        tiles = math.ceil(spec.rows / gpu.at_a_time(cluster))
    least = _LEAST_SLOTS if cluster == 1 or alone else _LEAST_SLOTS_OF_CLUSTER
    room = (gpu.smem - _OTHER_SHARED_BYTES) // part_bytes
    slots = min(max(least, _QUEUED_BYTES // part_bytes), tiles, room, _MOST_SLOTS)
    return ForwardSchedule(
        "pipelined_row",
        vector,
        cluster=cluster,
        warpgroups=warpgroups,
        slots=max(1, slots),
        tiles=tiles,
        tail=0 if alone else _tail(tiles, gpu, cluster),
        rereads=of_thread > _HELD_VALUES and (params < 2 or of_thread <= _REREAD_VALUES),
        params_first=True,
    )


def _tiles_of_a_block(spec: Spec, cluster: int, gpu: Gpu) -> int:
    """How many rows a block takes.

    The more, the less it matters that a block has to start, with a cluster of others, and to read
    its parameters: four times as many where these are twice the bytes. The fewer, the more evenly
    the SMs end.
    """
    if not param_sizes(spec):
        return 1
    tiles = round(_START[cluster] * (param_bytes(spec) / data_bytes(spec)) ** 2)
    least = 1 if cluster == 1 else 2
    tiles = max(1, min(max(least, tiles), spec.rows * cluster // (_BLOCKS_OF_SM * gpu.sms)))
    return _of_a_group(spec, tiles, 1)


def _of_a_group(spec: Spec, tiles: int, rows: int) -> int:
    """`tiles` of `rows` rows each, or as many as share their parameters."""
    if spec.groups == 1:
        return tiles
    of_group = spec.rows // spec.groups // rows
    return next(n for n in range(min(tiles, _MOST_OF_GROUP), 0, -1) if of_group % n == 0)


def _tail(tiles: int, gpu: Gpu, cluster: int) -> int:
    """Rows, or groups of them, that are taken one by one at the end."""
    return _TAIL * gpu.at_a_time(cluster) if tiles > 1 else 0


def _shares(cols: int, vector: int, values: int) -> int:
    """Warpgroups for a row: a power of 2, enough to leave each thread up to `values`."""
    wanted = math.ceil(cols / (WARPGROUP_THREADS * values))
    most = max(1, cols // (WARPGROUP_THREADS * vector))
    return min(2 ** math.ceil(math.log2(wanted)), power_of_2(most))


def _distribute(shares: int, line: ForwardRule, gpu: Gpu, cluster: int) -> tuple[int, int]:
    """Warpgroups of a block and blocks of a cluster, for a row of so many shares."""
    for warpgroups in (line.least, line.warpgroups):
        warpgroups = min(warpgroups, shares)
        if shares // warpgroups <= min(cluster, gpu.portable_cluster):
            break
    return warpgroups, min(gpu.portable_cluster, shares // warpgroups)


TABLE = (
    # As many parameters as data, or more, would come from the L1 or L2 cache for each row, and do
    # not leave enough of their bandwidth. In registers they serve rows that a queue brings: 48
    # columns of a thread with two parameters, 36 with three: 144 registers, beside others.
    ForwardRule("pipelined_tile", cols=1536, params=1, most_params=2),
    ForwardRule("pipelined_tile", cols=1152, params=1),
    # A warp reads a row of 2 KiB with 4 loads or fewer, and needs no barrier.
    ForwardRule("row_tile", row_bytes=2048),
    # Few rows: an SM has one of them at most, so that latency decides. Many threads for each row,
    # in as many SMs as there are for it.
    ForwardRule("split_row", cols=2**18, waves=1, values=16, cluster=8, warpgroups=4),
    # As many parameters as data: in registers, too. So far an SM has room for several blocks.
    ForwardRule("pipelined_row", cols=2**15, params=1, cluster=8),
    # Longer rows leave an SM room for a block or two, and a thread has more of a row.
    ForwardRule(
        "pipelined_row", cols=2**17, params=1, most_params=2, values=64, cluster=8, warpgroups=2
    ),
    ForwardRule("pipelined_row", cols=2**16, params=1, values=36, cluster=8, warpgroups=2),
    # 64 values a thread still let an SM have 4 rows under way; a row needs 2 or 3 barriers.
    ForwardRule("warpgroup_row", cols=8192),
    # log_softmax needs x again after its exponentials, which take as many registers: x stays in
    # shared memory. The fewer blocks share a row, the less a block waits for the others.
    ForwardRule("pipelined_row", row_bytes=2**18, op="log_softmax", values=64, cluster=8, least=2),
    # The same of each part of a row. Small blocks load while others reduce.
    ForwardRule("split_row", row_bytes=2**18, values=64, cluster=8, warpgroups=2),
    # Rows of half a MiB and more fill the registers of several SMs. Few large blocks share one,
    # because the blocks of a cluster have to start at the same time.
    ForwardRule("split_row", cols=2**18, values=32, cluster=8, warpgroups=8),
)


#: For softmaxes with a mask or a bias, or causal ones: a queue brings x alone. The smaller a unit,
#: the more of a row lies in units above the diagonal.
PLACED = (
    ForwardRule("row_tile", row_bytes=2048),
    ForwardRule("row_tile", cols=2048, causal=True),
    *(line for line in TABLE if line.kind in ("split_row", "warpgroup_row") and line.waves is None),
)


@kept
def choose(spec: Spec, gpu: Gpu) -> ForwardSchedule | None:
    """The schedule for `spec`: that of the first rule of the table that fits; None for no rule."""
    table = PLACED if has_places(spec) else TABLE
    line = next((line for line in table if line.fits(spec, gpu)), None)
    return None if line is None else of_line(line, spec, gpu)
