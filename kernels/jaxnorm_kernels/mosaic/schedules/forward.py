"""How a forward pass runs: a table whose first matching rule is used, with its hardware reasons.

These sizes matter, and the rules use them as follows:

* An SM has 64 registers for each of 1024 threads, or 128 for each of 512. A value of a row takes
  one register, so with 32 values per thread, 8 warpgroups share an SM. A residual that is added
  later takes another register: such rows count as twice as long (`registers`).
* About 64 KiB of loads in flight per SM saturate the memory of an H100 or H200. Rows in registers
  reach this because an SM runs several blocks: some load while others reduce or store. With rows
  of 32 KiB and more, an SM has room for only one or two, so a cluster shares such a row.
* One block per row reaches 0.97 of a copy's bandwidth; one or a few blocks per SM that share the
  rows evenly reach 0.91, apparently because the kernel waits for the slowest SM. So a block
  processes few rows, and more than one only if it then loads its parameters once for all of them.
  Each of the last rows has a block of its own.
* The bytes of a row include its residual, because both are in flight at the same time.
* Each group of rows has its own parameters, so a block only processes rows of one group.
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
    """One way to run a forward pass. Each `kind` uses the numbers that name it.

    Attributes:
      kind: `RowTile`, `PipelinedTile`, `WarpgroupRow`, `SplitRow` or `PipelinedRow`.
      vector: the number of elements that a thread loads at once; it must divide the row.
      rows: the number of rows that a block holds at a time (tiles).
      threads: the number of threads of a warp that share a row (tiles).
      warpgroups: the number of warpgroups of a block that share a row (split_row, pipelined_row).
      cluster: the number of blocks that share a row (split_row, pipelined_row).
      slots: the number of rows, or groups of rows, in the pipeline of a block (pipelined).
      tiles: the number of rows, or groups of rows, that a block processes (pipelined).
      tail: the number of last rows, or groups of rows, that have a block each (pipelined).
      rereads: True if each use of a row reads it from shared memory, so that it takes no registers
        (pipelined).
      params_first: True if scale and bias are loaded before the reductions, which hides their
        latency but takes registers.
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
        """Return how a block holds its rows."""
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
        """The number of consecutive rows for which a block loads the parameters once."""
        pipelined = self.kind.startswith("pipelined") and self.params_first
        return self.rows * (self.tiles if pipelined else 1)


@dataclasses.dataclass(frozen=True)
class ForwardRule:
    """A rule of the table, for rows of up to `cols` columns; None means any number.

    If a column takes two registers, half of `cols` and `values` applies.

    Attributes:
      waves: only for at most this many rows per SM.
      row_bytes: only for rows of at most this many bytes, including the residual.
      params: only if a column has at least this many bytes of parameters per byte of rows.
      most_params: only for at most this many parameters.
      op: only for this operation.
      causal: only for causal softmaxes.
      values: the maximum number of columns per thread. This determines the *shares* of a row: how
        many warpgroups share it (split_row, pipelined_row). 0 means as many columns as the
        parameters leave registers for.
      cluster: the maximum number of blocks that share a row.
      least: the smallest number of warpgroups per block.
      warpgroups: the number of warpgroups per block, if a row has more shares than `cluster` blocks
        with `least` warpgroups each.
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
        """Return True if the rule applies to this call."""
        return (
            (self.cols is None or spec.cols * registers(spec) <= self.cols)
            and (self.waves is None or spec.rows <= self.waves * gpu.sms)
            and (self.row_bytes is None or spec.cols * column_bytes(spec) <= self.row_bytes)
            # Asynchronous copies need aligned rows.
            and (not self.kind.startswith("pipelined") or not is_unaligned(spec))
            and param_bytes(spec) >= self.params * data_bytes(spec)
            and (self.most_params is None or len(param_sizes(spec)) <= self.most_params)
            and self.op in (None, spec.op)
            and spec.softmax.causal >= self.causal
        )


# The bytes of x that a thread holds in a tile of several rows: two loads. The fewer bytes, the more
# blocks share an SM: with eight loads, RMSNorm over 64 to 512 columns of float32 took up to 4 %
# longer (H200).
_TILE_BYTES = 2 * VECTOR_BYTES

# The number of units of a causal row. Softmax over 512 and 1024 columns of bfloat16 took 9 and 3 %
# less time than with units of 32 vectors of 16 bytes, and over 512 of float32 4 % less (H100).
_CAUSAL_PARTS = 8

# In a tile, the threads of a row may load up to this multiple of its columns in total. Some columns
# are then loaded twice.
_MOST_READ = 9 / 8

# A pipelined tile processes two groups of rows if rows have more columns than the first number and
# each SM has at least the second number of groups. With shorter rows, many rows share the loaded
# parameters anyway.
_SHORT_COLS, _GROUPS_OF_SM = 256, 6

# The registers of a thread that a split row may use for columns and their parameters. With 8
# warpgroups, a thread has 64 registers; with fewer, 128.
_SPLIT_WARPGROUPS, _MANY_WARPGROUPS_ROOM, _ROOM = 8, 48, 128

# The maximum number of columns that a thread holds of a pipelined row, by the number of parameters.
# Each column takes a register for its value and for each parameter. From the sweep
# `benchmarks/sweeps/forward.py`.
_VALUES = {0: 48, 1: 80, 2: 48, 3: 36}
# The maximum bytes of all slots of a warpgroup: more would leave fewer blocks per SM. At least 2
# slots are used even if they take more, and 3 in a cluster, whose blocks wait for each other.
_QUEUED_BYTES, _LEAST_SLOTS, _LEAST_SLOTS_OF_CLUSTER, _MOST_SLOTS = 24 * 1024, 2, 3, 3
# The shared memory that a block needs besides its slots: barriers and exchanged values.
_OTHER_SHARED_BYTES = 8 * 1024
# If a thread has more columns than the first number, a row is read again for each use instead of
# being held in registers. With two parameters and more columns than the second number, it is held
# after all: the parameters fill the registers, and an SM has room for only one or two blocks
# anyway.
_HELD_VALUES, _REREAD_VALUES = 32, 48

#: Rows per block, by the size of the cluster, if parameters have as many bytes as x and y (H200).
_START = {1: 1.0, 2: 0.75, 4: 1.0, 8: 1.375}
# The minimum number of blocks per SM, so that all SMs finish at about the same time.
_BLOCKS_OF_SM = 3
# The maximum number of rows per block if each group of rows has its own parameters. LayerNorm over
# 2048 columns of bfloat16 with 16 groups of 1024 rows reaches 1.00 of copy bandwidth with two, and
# 0.97 with four (H100).
_MOST_OF_GROUP = 2
# The number of last rows per SM, or per cluster, that have a block each. Without them, LayerNorm
# over 5120 columns of bfloat16 kept the last SM busy for 5 % longer than the average one (H200).
_TAIL = 2


def of_line(line: ForwardRule, spec: Spec, gpu: Gpu) -> ForwardSchedule:
    """Return the schedule with which a rule runs `spec`."""
    dtypes = (*spec.operand_dtypes, spec.y_dtype, full_bias_dtype(spec))
    vector = vector_width(spec.cols, *dtypes)
    # A unit must fit in the row, so short rows use narrower loads.
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
        # All rows of a tile must use the same parameters, or be part of one run (`rows.logits`).
        group = math.gcd(spec.rows // spec.groups, run_of_rows(spec))
        rows = next((n for n in range(rows, 0, -step) if group % n == 0), 0)
    # The group has fewer rows than a block has warps.
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
    """Return the threads per row: as many as possible without loading much of the row twice."""
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
    # Blocks of a cluster have an SM to themselves and many parameters to load, so one round of
    # blocks processes all rows.
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
    """Return the number of rows per block.

    More rows amortise the start of a block or cluster and the loads of its parameters: four times
    as many rows if the parameters have twice the bytes. With fewer rows, the SMs finish more
    evenly.
    """
    if not param_sizes(spec):
        return 1
    tiles = round(_START[cluster] * (param_bytes(spec) / data_bytes(spec)) ** 2)
    least = 1 if cluster == 1 else 2
    tiles = max(1, min(max(least, tiles), spec.rows * cluster // (_BLOCKS_OF_SM * gpu.sms)))
    return _of_a_group(spec, tiles, 1)


def _of_a_group(spec: Spec, tiles: int, rows: int) -> int:
    """Return the number of tiles, at most `tiles`, of `rows` rows each that a block processes.

    All of a block's rows must share their parameters.
    """
    if spec.groups == 1:
        return tiles
    of_group = spec.rows // spec.groups // rows
    return next(n for n in range(min(tiles, _MOST_OF_GROUP), 0, -1) if of_group % n == 0)


def _tail(tiles: int, gpu: Gpu, cluster: int) -> int:
    """Return the number of last rows, or groups of rows, that have a block each."""
    return _TAIL * gpu.at_a_time(cluster) if tiles > 1 else 0


def _shares(cols: int, vector: int, values: int) -> int:
    """Return the warpgroups per row: a power of 2. A thread holds at most `values` columns."""
    wanted = math.ceil(cols / (WARPGROUP_THREADS * values))
    most = max(1, cols // (WARPGROUP_THREADS * vector))
    return min(2 ** math.ceil(math.log2(wanted)), power_of_2(most))


def _distribute(shares: int, line: ForwardRule, gpu: Gpu, cluster: int) -> tuple[int, int]:
    """Return (warpgroups per block, blocks per cluster) for a row with this number of shares."""
    for warpgroups in (line.least, line.warpgroups):
        warpgroups = min(warpgroups, shares)
        if shares // warpgroups <= min(cluster, gpu.portable_cluster):
            break
    return warpgroups, min(gpu.portable_cluster, shares // warpgroups)


TABLE = (
    # If parameters have as many bytes as data or more, loading them from the L1 or L2 cache for
    # each row would take too much of the caches' bandwidth. They stay in registers for all rows of
    # a block: 48 columns per thread with two parameters, 36 with three, which makes 144 registers
    # beside others.
    ForwardRule("pipelined_tile", cols=1536, params=1, most_params=2),
    ForwardRule("pipelined_tile", cols=1152, params=1),
    # A warp loads a row of 2 KiB with 4 loads or fewer, and needs no barrier.
    ForwardRule("row_tile", row_bytes=2048),
    # There are few rows, at most one per SM, so latency decides: each row gets many threads, in as
    # many SMs as are free.
    ForwardRule("split_row", cols=2**18, waves=1, values=16, cluster=8, warpgroups=4),
    # Parameters have as many bytes as data, and stay in registers. For rows of up to this length,
    # several blocks fit on an SM.
    ForwardRule("pipelined_row", cols=2**15, params=1, cluster=8),
    # For longer rows, only one or two blocks fit on an SM, and a thread has more columns of a row.
    ForwardRule(
        "pipelined_row", cols=2**17, params=1, most_params=2, values=64, cluster=8, warpgroups=2
    ),
    ForwardRule("pipelined_row", cols=2**16, params=1, values=36, cluster=8, warpgroups=2),
    # With 64 values per thread, an SM still has 4 rows in flight; a row needs 2 or 3 barriers.
    ForwardRule("warpgroup_row", cols=8192),
    # log_softmax needs x again after its exponentials, which take as many registers, so x stays in
    # shared memory. The fewer blocks share a row, the less time each spends waiting for the others.
    ForwardRule("pipelined_row", row_bytes=2**18, op="log_softmax", values=64, cluster=8, least=2),
    # Each part of a row is held like the rows above, with 64 values per thread. Small blocks are
    # better: some load while others reduce.
    ForwardRule("split_row", row_bytes=2**18, values=64, cluster=8, warpgroups=2),
    # Rows of half a MiB and more fill the registers of several SMs. Each row is shared by a small
    # number of large blocks, because all blocks of a cluster must start at the same time.
    ForwardRule("split_row", cols=2**18, values=32, cluster=8, warpgroups=8),
)


#: The rules for causal softmaxes, and for those with a mask or a bias. Pipelined rules are left
#: out, because their copies load x alone. The smaller a unit, the more units are above the
#: diagonal.
PLACED = (
    ForwardRule("row_tile", row_bytes=2048),
    ForwardRule("row_tile", cols=2048, causal=True),
    *(line for line in TABLE if line.kind in ("split_row", "warpgroup_row") and line.waves is None),
)


@kept
def choose(spec: Spec, gpu: Gpu) -> ForwardSchedule | None:
    """Return the schedule of the first rule that applies to `spec`, or None."""
    table = PLACED if has_places(spec) else TABLE
    line = next((line for line in table if line.fits(spec, gpu)), None)
    return None if line is None else of_line(line, spec, gpu)
