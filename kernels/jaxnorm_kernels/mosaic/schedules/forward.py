"""Schedules of forward passes: a table of rules. The first rule that applies to a call is used.

The rules follow from these properties of the hardware (H100, H200):

* An SM has 65536 registers: 64 for each of 1024 threads, or 128 for each of 512 threads. Each
  column of a row takes one register. A thread with 32 columns needs at most 64 registers in all, so
  1024 threads (8 warpgroups) fit on an SM. A residual that is added after the norm takes a second
  register per column (see `registers`), so the rules treat a row with such a residual like a row of
  twice the length.
* About 64 KiB of loads in flight per SM saturate the memory bandwidth. A kernel with rows in
  registers reaches this because an SM runs several blocks: some of them load while others reduce or
  store. If rows have 32 KiB or more, an SM has room for only one or two rows, so a cluster of
  blocks shares each row.
* A kernel with one block per row reaches 0.97 of a copy's bandwidth. If the rows are divided evenly
  between a few blocks per SM instead, the kernel reaches 0.91, apparently because it waits for the
  slowest SM. So a block processes several rows only if it can then load its parameters once for all
  of them. Even then it processes only a few rows, and each of the last rows has a separate block.
* The bytes of a row, which a rule may limit, include the row of the residual: both rows are in
  flight at the same time.
* If each group of rows has its own parameters, a block processes rows of one group only.
"""

import dataclasses
import math
from typing import Literal

from jaxnorm_kernels.mosaic.device.gpu import Gpu, cached
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
    depends_on_index,
    run_of_rows,
    threads_of_runs,
)
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

TileKind = Literal["row_tile", "pipelined_tile", "warpgroup_row", "split_row", "pipelined_row"]
_TILES: dict[TileKind, type[Tile]] = {
    "row_tile": RowTile,
    "pipelined_tile": RowTile,
    "warpgroup_row": WarpgroupRow,
    "split_row": SplitRow,
    "pipelined_row": SplitRow,
}


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """The kind and the sizes of a kernel's tile, for kernels that hold rows in registers.

    These kernels are the forward passes of norms and softmax, and the backward passes of softmax.

    If the description of an attribute ends with kinds of tile in parentheses, only these kinds use
    the attribute.

    Attributes:
      kind: the kind of tile: row_tile or pipelined_tile (class `RowTile`), warpgroup_row
        (`WarpgroupRow`), split_row or pipelined_row (`SplitRow`).
      vector: number of elements that a thread loads at once; it must divide the number of columns.
      rows: number of rows of a tile (row_tile, pipelined_tile; otherwise 1).
      threads: number of threads of a warp that share a row (row_tile, pipelined_tile).
      warpgroups: number of warpgroups of a block that share a row (split_row, pipelined_row).
      cluster: number of blocks that share a row (split_row, pipelined_row).
      slots: number of buffers in shared memory, each for one tile (pipelined_tile, pipelined_row).
      tiles: number of tiles that a block processes, one after the other (pipelined_tile,
        pipelined_row).
      tail: number of tiles at the end of the array. Each of them is processed by a block that
        processes no other tile (pipelined_tile, pipelined_row).
      rereads: True if a row is read from shared memory for each use, so that it occupies no
        registers in between (pipelined_tile, pipelined_row).
      params_first: True if scale and bias are loaded before the row is reduced. This hides their
        latency, but takes registers.
      splits: number of blocks (or clusters) that share the work for one row of a bias's gradient,
        which is a sum over rows of x (`BiasSums`).
    """

    kind: TileKind
    vector: int
    rows: int = 1
    threads: int = WARP
    warpgroups: int = 1
    cluster: int = 1
    slots: int = 0
    tiles: int = 1
    tail: int = 0
    rereads: bool = False
    params_first: bool = False
    splits: int = 1

    def rows_of(self, spec: Spec) -> Tile:
        """Return the tile: how a block distributes its rows over its threads."""
        if spec.rows // spec.groups % self._rows_of_params and spec.groups > 1:
            raise ValueError(f"{self} has parameters of one group for rows of another")
        sizes = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("kind", "params_first", "splits")
        }
        norms = len(spec.operation.norms)
        return _TILES[self.kind](spec.cols, exchanges=norms or 1, apart=spec.is_causal, **sizes)

    @property
    def _rows_of_params(self) -> int:
        """Number of consecutive rows for which a block loads the parameters once."""
        pipelined = self.kind.startswith("pipelined") and self.params_first
        return self.rows * (self.tiles if pipelined else 1)


@dataclasses.dataclass(frozen=True)
class ForwardRule:
    """A rule of the table of schedules: its conditions, and the sizes that it sets.

    The limits `cols` and `values` are for columns that need one register each. If a column needs
    two registers (see `registers`), these limits are half as large.

    Attributes:
      kind: the kind of tile that the rule selects.
      cols: the rule applies to rows of at most this many columns (None: any number).
      waves: the rule applies to calls with at most this many rows per SM (None: any number).
      row_bytes: the rule applies to rows of at most this many bytes, including the residual.
      params: the rule applies to calls in which the ratio of parameter bytes to row bytes is at
        least this number. Parameter bytes are the bytes per column, summed over all parameters. Row
        bytes are the bytes per column, summed over all arrays that are loaded or stored row by row.
      most_params: the rule applies to calls with at most this many parameters (None: any number).
      op: the rule applies to this operation only (None: all operations).
      causal: if True, the rule applies to causal softmaxes only.
      values: maximum number of columns per thread (only in the kinds split_row and pipelined_row).
        It determines how many warpgroups share a row. If it is 0, the kind pipelined_row uses the
        number in `_VALUES` instead, which depends on the number of parameters.
      cluster: maximum number of blocks that share a row.
      least: number of warpgroups per block that is tried first.
      warpgroups: number of warpgroups per block for long rows. It is used if a row does not fit in
        `cluster` blocks of `least` warpgroups each.
    """

    kind: TileKind
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
            and spec.is_causal >= self.causal
        )


# Number of bytes that a thread should load for a tile of several rows: two loads of 16 bytes. If a
# thread loaded more, fewer blocks would fit on an SM. RMSNorm over 64 to 512 columns of float32
# took up to 4 % longer with eight loads per thread than with two (H200).
_TILE_BYTES = 2 * VECTOR_BYTES

# Number of units into which a causal row is split. A unit consists of the columns that a row's
# threads load at once. An alternative would be units of a fixed size: 32 vectors of 16 bytes.
# Compared with this alternative, softmax takes less time (H100): 9 % less for rows of 512 bfloat16
# columns, 3 % less for 1024 bfloat16 columns, and 4 % less for 512 float32 columns.
_CAUSAL_PARTS = 8

# Limit for the ratio (number of columns that are loaded) / (number of columns of a row). The
# threads that share a row load one unit of columns after the other; all units have the same size.
# If this size does not divide the row, some columns are loaded twice, and the ratio is above 1.
_MOST_READ = 9 / 8

# A block of the kind pipelined_tile loads its parameters once. Then it processes one or two tiles,
# each of which has several rows. It processes two tiles if rows have more than `_SHORT_COLS`
# columns and there are at least `_GROUPS_OF_SM` tiles per SM. Tiles of shorter rows have more rows,
# so the time to load the parameters matters less, and one tile per block is fast enough.
_SHORT_COLS, _GROUPS_OF_SM = 256, 6

# The kind split_row can load the parameters before it reduces the row. It does so if the parameters
# and the row's columns together take at most `_ROOM` registers per thread. In a block of
# `_SPLIT_WARPGROUPS` warpgroups, a thread has only 64 registers, so the limit is
# `_MANY_WARPGROUPS_ROOM` there.
_SPLIT_WARPGROUPS, _MANY_WARPGROUPS_ROOM, _ROOM = 8, 48, 128

# Maps the number of parameters to the maximum number of columns per thread of a pipelined row. A
# column takes one register for its value and one for each parameter. The numbers are from a sweep
# over schedules (commit e274726a, `benchmarks/sweeps/forward.py`).
_VALUES = {0: 48, 1: 80, 2: 48, 3: 36}
# Limits for the number of slots in a block of the kind pipelined_row. A slot is a buffer in shared
# memory for the block's columns of one row.
#
# - The maximum is `_MOST_SLOTS`.
# - The minimum is `_LEAST_SLOTS`. In a cluster, it is `_LEAST_SLOTS_OF_CLUSTER`, because the blocks
#   of a cluster wait for each other.
# - All slots of a block together should take at most `_QUEUED_BYTES`. If a block needs more shared
#   memory, fewer blocks fit on an SM. But a block always has the minimum number of slots, even if
#   they take more than `_QUEUED_BYTES`.
_QUEUED_BYTES, _LEAST_SLOTS, _LEAST_SLOTS_OF_CLUSTER, _MOST_SLOTS = 24 * 1024, 2, 3, 3
# Shared memory of a block besides its row buffers, for barriers and exchanged values.
_OTHER_SHARED_BYTES = 8 * 1024
# If a thread has more than `_HELD_VALUES` columns, a row is read from shared memory for each use.
# This frees registers, so that more blocks fit on an SM. There is an exception: the row stays in
# registers if the call has two or more parameters and a thread has more than `_REREAD_VALUES`
# columns. The parameters then take so many registers that only one or two blocks fit on an SM in
# any case.
_HELD_VALUES, _REREAD_VALUES = 32, 48

#: Maps the number of blocks per cluster to the best number of rows per block, as measured on an
#: H200. In the measured calls, the parameters of a column had as many bytes as one element of x and
#: one element of y together. If the ratio of these two numbers of bytes is r instead of 1,
#: `_tiles_of_a_block` multiplies the number of rows per block by r^2.
_START = {1: 1.0, 2: 0.75, 4: 1.0, 8: 1.375}
# Minimum number of blocks per SM, so that all SMs finish at about the same time.
_BLOCKS_OF_SM = 3
# Maximum number of rows per block if each group of rows has its own parameters. LayerNorm over 2048
# columns of bfloat16, with 16 groups of 1024 rows, reaches 1.00 of a copy's bandwidth with two rows
# per block, and 0.97 with four (H100).
_MOST_OF_GROUP = 2
# The last rows of the array are processed by blocks that process only one row each. The number of
# these rows is `_TAIL` times the number of SMs. If a call uses clusters of blocks, it is `_TAIL`
# times the number of clusters that can run at the same time. If all blocks processed several rows,
# the last SM would finish 5 % later than the average SM (measured for LayerNorm over 5120 columns
# of bfloat16, H200).
_TAIL = 2


def schedule_of(line: ForwardRule, spec: Spec, gpu: Gpu) -> TileSchedule:
    """Return the schedule that a rule sets for the call `spec`."""
    dtypes = (*spec.operand_dtypes, spec.y_dtype, full_bias_dtype(spec))
    vector = vector_width(spec.cols, *dtypes)
    # The columns that a row's threads load at once must fit in the row. Short rows use narrower
    # loads.
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
            return TileSchedule("warpgroup_row", vector, params_first=True)
        case "split_row":
            return _split_row(line, spec, vector, gpu)
        case "pipelined_row":
            return _pipelined_row(line, spec, vector, gpu)


def _row_tile(spec: Spec, vector: int, gpu: Gpu) -> TileSchedule:
    threads = _threads(spec.cols, vector)
    if depends_on_index(spec):
        threads, vector = causal_unit(spec, threads, vector, _CAUSAL_PARTS)
        threads, vector = threads_of_runs(spec, threads, vector)
    step = WARPGROUP_THREADS // threads
    row_bytes = spec.cols * column_bytes(spec)
    rows = max(1, _TILE_BYTES * WARPGROUP_THREADS // (row_bytes * step)) * step
    rows = min(rows, spec.rows // step * step)
    if spec.groups > 1 or depends_on_index(spec):
        # All rows of a tile must use the same parameters. If the softmax has a mask or a bias, or
        # is causal, the rows must also belong to one run (see `run_of_rows`).
        group = math.gcd(spec.rows // spec.groups, run_of_rows(spec))
        rows = next((n for n in range(rows, 0, -step) if group % n == 0), 0)
    # `rows` is 0 if no tile size divides the number of rows in a group, or if x has fewer rows than
    # the smallest tile. Then a warpgroup processes one row.
    if not rows and spec.cols >= WARPGROUP_THREADS:
        return schedule_of(ForwardRule("warpgroup_row"), spec, gpu)
    return TileSchedule(
        "row_tile",
        vector,
        rows=rows or 1,
        threads=threads,
        params_first=True,
    )


def _threads(cols: int, vector: int) -> int:
    """Return the number of threads per row.

    The threads of a row together load a range of columns at once, one vector of `vector` columns
    per thread. If the size of this range does not divide the row, some columns are loaded twice.
    The result is the largest number of threads for which few enough columns are loaded twice (see
    `_MOST_READ`). If this is impossible, the result is the number for which the fewest columns are
    loaded.
    """
    fitting = [n for n in (32, 16, 8, 4, 2) if n * vector <= cols]
    read = {n: math.ceil(cols / (n * vector)) * n * vector for n in fitting}
    least = min(fitting, key=read.__getitem__)
    return next((n for n in fitting if read[n] <= cols * _MOST_READ), least)


def _pipelined_tile(spec: Spec, vector: int, gpu: Gpu) -> TileSchedule:
    tile = _row_tile(spec, vector, gpu)
    if tile.rows == 1:
        return tile
    many = spec.cols > _SHORT_COLS and spec.rows >= _GROUPS_OF_SM * gpu.sms * tile.rows
    tiles = 2 if many and param_bytes(spec) > data_bytes(spec) else 1
    tiles = _of_a_group(spec, tiles, tile.rows)
    tail = _tail(tiles, gpu, cluster=1)
    return dataclasses.replace(tile, kind="pipelined_tile", slots=tiles, tiles=tiles, tail=tail)


def _split_row(line: ForwardRule, spec: Spec, vector: int, gpu: Gpu) -> TileSchedule:
    shares = _shares(spec.cols, vector, line.values // registers(spec))
    cluster = min(line.cluster, gpu.sms // spec.rows) if line.waves else line.cluster
    warpgroups, cluster = _distribute(shares, line, gpu, cluster)
    values = spec.cols / (cluster * warpgroups * WARPGROUP_THREADS)
    room = _ROOM if warpgroups < _SPLIT_WARPGROUPS else _MANY_WARPGROUPS_ROOM
    return TileSchedule(
        "split_row",
        vector,
        cluster=cluster,
        warpgroups=warpgroups,
        params_first=values * (registers(spec) + len(param_sizes(spec))) <= room,
    )


def _pipelined_row(line: ForwardRule, spec: Spec, vector: int, gpu: Gpu) -> TileSchedule:
    params = len(param_sizes(spec))
    values = line.values or _VALUES[params]
    shares = _shares(spec.cols, vector, values // registers(spec))
    warpgroups, cluster = _distribute(shares, line, gpu, line.cluster)
    unit = warpgroups * WARPGROUP_THREADS * vector
    part = math.ceil(spec.cols / (cluster * unit)) * unit
    part_bytes, columns = part * column_bytes(spec), part // (warpgroups * WARPGROUP_THREADS)
    # If a call with two parameters needs a large cluster, a block occupies an entire SM, and takes
    # long to load its parameters. So launch only as many blocks as can run at the same time. Each
    # of them processes several rows, but loads its parameters only once.
    alone = 1 < line.cluster < shares and params == 2 and spec.groups == 1
    tiles = _tiles_of_a_block(spec, cluster, gpu)
    if alone:
        tiles = math.ceil(spec.rows / gpu.at_a_time(cluster))
    least = _LEAST_SLOTS if cluster == 1 or alone else _LEAST_SLOTS_OF_CLUSTER
    room = (gpu.smem - _OTHER_SHARED_BYTES) // part_bytes
    slots = min(max(least, _QUEUED_BYTES // part_bytes), tiles, room, _MOST_SLOTS)
    return TileSchedule(
        "pipelined_row",
        vector,
        cluster=cluster,
        warpgroups=warpgroups,
        slots=max(1, slots),
        tiles=tiles,
        tail=0 if alone else _tail(tiles, gpu, cluster),
        rereads=columns > _HELD_VALUES and (params < 2 or columns <= _REREAD_VALUES),
        params_first=True,
    )


def _tiles_of_a_block(spec: Spec, cluster: int, gpu: Gpu) -> int:
    """Return the number of rows per block.

    With many rows per block, starting a block and loading its parameters takes less time per row.
    With few rows per block, all SMs finish at about the same time. The best number of rows grows
    with the bytes of the parameters. This function assumes that it grows with their square: with
    twice the parameter bytes per column, a block processes four times as many rows.
    """
    if not param_sizes(spec):
        return 1
    tiles = round(_START[cluster] * (param_bytes(spec) / data_bytes(spec)) ** 2)
    least = 1 if cluster == 1 else 2
    tiles = max(1, min(max(least, tiles), spec.rows * cluster // (_BLOCKS_OF_SM * gpu.sms)))
    return _of_a_group(spec, tiles, 1)


def _of_a_group(spec: Spec, tiles: int, rows: int) -> int:
    """Return the number of tiles that a block processes.

    A tile has `rows` rows. If all rows of the call have the same parameters, the result is `tiles`.
    Otherwise, each group of rows has its own parameters, and all rows of a block must belong to the
    same group. So the result must divide the number of tiles in a group. It is the largest such
    number that is at most `tiles` and at most `_MOST_OF_GROUP`.
    """
    if spec.groups == 1:
        return tiles
    tiles_of_group = spec.rows // spec.groups // rows
    return next(n for n in range(min(tiles, _MOST_OF_GROUP), 0, -1) if tiles_of_group % n == 0)


def _tail(tiles: int, gpu: Gpu, cluster: int) -> int:
    """Return the number of tiles in the tail, the end of the array.

    A block that processes a tile of the tail processes no other tile. Each of the other blocks
    processes `tiles` tiles. If `tiles` is 1, no tail is needed.
    """
    return _TAIL * gpu.at_a_time(cluster) if tiles > 1 else 0


def _shares(cols: int, vector: int, values: int) -> int:
    """Return the number of warpgroups that share a row, a power of 2.

    It is large enough that each thread has at most `values` columns. But if each thread would then
    have less than one vector of columns, the number is smaller.
    """
    wanted = math.ceil(cols / (WARPGROUP_THREADS * values))
    most = max(1, cols // (WARPGROUP_THREADS * vector))
    return min(2 ** math.ceil(math.log2(wanted)), power_of_2(most))


def _distribute(shares: int, line: ForwardRule, gpu: Gpu, cluster: int) -> tuple[int, int]:
    """Return (warpgroups per block, blocks per cluster).

    `shares` is the number of warpgroups that share a row.
    """
    for warpgroups in (line.least, line.warpgroups):
        warpgroups = min(warpgroups, shares)
        if shares // warpgroups <= min(cluster, gpu.portable_cluster):
            break
    return warpgroups, min(gpu.portable_cluster, shares // warpgroups)


TABLE = (
    # Rules for calls with large parameters (`params=1`): the parameters have at least as many bytes
    # as one row of x, y and all other row arrays together. Loading the parameters from the L1 or L2
    # cache for each row would take too much of the caches' bandwidth. So the parameters stay in
    # registers for all rows of a block.
    ForwardRule("pipelined_tile", cols=1536, params=1, most_params=2),
    ForwardRule("pipelined_tile", cols=1152, params=1),
    # A warp loads a row of 2 KiB with at most 4 loads per thread, and reduces it without a barrier.
    ForwardRule("row_tile", row_bytes=2048),
    # A rule for calls with at most as many rows as the GPU has SMs. The time of such a call is the
    # latency of one row, so each row is distributed over many threads. If some SMs would be idle,
    # several SMs share a row.
    ForwardRule("split_row", cols=2**18, waves=1, values=16, cluster=8, warpgroups=4),
    # More rules for calls with large parameters. The parameters stay in registers, as in the first
    # rules of this table. In the next rule, rows are so short that a block needs few registers, and
    # several blocks fit on an SM.
    ForwardRule("pipelined_row", cols=2**15, params=1, cluster=8),
    # In the next two rules, rows are longer, so each thread has more columns, and only one or two
    # blocks fit on an SM.
    ForwardRule(
        "pipelined_row", cols=2**17, params=1, most_params=2, values=64, cluster=8, warpgroups=2
    ),
    ForwardRule("pipelined_row", cols=2**16, params=1, values=36, cluster=8, warpgroups=2),
    # A thread has up to 64 columns in its registers, so 4 warpgroups fit on an SM. Each of them
    # processes a different row.
    ForwardRule("warpgroup_row", cols=8192),
    # log_softmax needs x again after it has computed the exponentials. The exponentials take as
    # many registers as x, so x stays in shared memory in the meantime. Each block has two
    # warpgroups instead of one, so a row needs only half as many blocks. In this kernel, the blocks
    # of a row then wait less for each other. (In the backward pass of norms, it is the opposite:
    # the waits are shorter with more blocks of one warpgroup each.)
    ForwardRule("pipelined_row", row_bytes=2**18, op="log_softmax", values=64, cluster=8, least=2),
    # As in `warpgroup_row`, a thread has up to 64 columns. A block has only one or two warpgroups,
    # so that an SM runs several blocks: some load while others reduce.
    ForwardRule("split_row", row_bytes=2**18, values=64, cluster=8, warpgroups=2),
    # Rows of 256 KiB and more fill the registers of several SMs. A row is split into a few large
    # blocks instead of many small ones. All blocks of a cluster must start at the same time, so a
    # cluster of many blocks waits longer until there is room for all of them.
    ForwardRule("split_row", cols=2**18, values=32, cluster=8, warpgroups=8),
)


#: Rules for softmaxes that are causal or have a mask or a bias. No rule selects a pipelined tile,
#: because its asynchronous copies load complete rows. They cannot load a broadcast mask or bias,
#: and cannot leave out columns above the diagonal. Causal rows of up to 2048 columns use the kind
#: row_tile, because its units are small. (A unit is the range of columns that a row's threads load
#: at once.) A unit is not loaded if all of its columns are above the diagonal. The smaller the
#: units are, the more columns are skipped.
PLACED = (
    ForwardRule("row_tile", row_bytes=2048),
    ForwardRule("row_tile", cols=2048, causal=True),
    *(line for line in TABLE if line.kind in ("split_row", "warpgroup_row") and line.waves is None),
)


@cached
def choose(spec: Spec, gpu: Gpu) -> TileSchedule | None:
    """Return the schedule of the first rule that applies, or None if no rule applies."""
    table = PLACED if depends_on_index(spec) else TABLE
    line = next((line for line in table if line.fits(spec, gpu)), None)
    return None if line is None else schedule_of(line, spec, gpu)
