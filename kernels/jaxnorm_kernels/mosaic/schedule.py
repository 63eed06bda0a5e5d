"""How a forward pass runs: one table; the first line that fits is taken. The reasons are hardware.

The sizes that matter, and how the lines below use them:

* An SM gives 64 registers to each of 1024 threads, 128 to each of 512. A value of a row costs one
  register, so 32 values for each thread let 8 warpgroups share an SM.
* About 64 KiB of reads under way in each SM keep the memory of an H100 or H200 busy. Rows in
  registers have as many because an SM runs several blocks. A row of 64 KiB and more leaves room
  for one block, which then has to read ahead: the ring.
* A second read from the L2 cache costs no memory bandwidth, but L2 bandwidth, of which there is
  about 1.5 times as much. So it is the last resort.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax

from jaxnorm_kernels.mosaic.queued import QueuedRow
from jaxnorm_kernels.mosaic.streams import ReloadedRow, RingRow, Stream
from jaxnorm_kernels.mosaic.tiles import (
    VECTOR_BYTES,
    WARP,
    WARPGROUP_THREADS,
    RowTile,
    SplitRow,
    Tile,
    WarpgroupRow,
    vector_width,
)
from jaxnorm_kernels.specs import Spec

Kind = Literal["row_tile", "warpgroup_row", "split_row", "queued_row", "streamed_row", "ring_row"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One way to run a forward pass. What each number means is said where `kind` is defined.

    Attributes:
      kind: `RowTile`, `WarpgroupRow`, `SplitRow`, `ReloadedRow` or `RingRow`.
      vector: elements that a thread reads at once; it must divide the row.
      rows: rows of a block (row_tile).
      threads: threads that share a row: 2 to 32, or 128 (row_tile).
      warpgroups: warpgroups that share a row (split_row, streamed_row, ring_row).
      chunk: columns that a warpgroup takes at a time (streamed_row, ring_row).
      slots: chunks that a warpgroup has room for in shared memory (ring_row).
      blocks: blocks that share the rows (ring_row).
      params_first: scale and bias are loaded before the reductions, not after: latency against
        registers (row_tile, warpgroup_row, split_row).
      auto_barriers: Pallas' barriers around each store. The kernels are sound without them: what
        one thread reads of another has a barrier of its own.
      approx_math: Mosaic's approximate exp2, log and rsqrt; for 16-bit outputs.
    """

    kind: Kind
    vector: int
    rows: int = 1
    threads: int = WARP
    warpgroups: int = 1
    chunk: int = 0
    slots: int = 0
    blocks: int = 0
    params_first: bool = False
    auto_barriers: bool = True
    approx_math: bool = False

    def rows_of(self, spec: Spec) -> Tile | Stream:
        """How a block holds, or goes through, its rows."""
        cols = spec.cols
        match self.kind:
            case "row_tile":
                return RowTile(cols, self.vector, self.threads, self.rows)
            case "warpgroup_row":
                return WarpgroupRow(cols, self.vector)
            case "split_row":
                return SplitRow(cols, self.vector, self.warpgroups)
            case "queued_row":
                return QueuedRow(cols, self.vector, self.warpgroups, self.slots, self.blocks)
            case "streamed_row":
                return ReloadedRow(cols, self.vector, self.warpgroups, self.chunk)
            case "ring_row":
                ring = self.slots, self.blocks
                return RingRow(cols, self.vector, self.warpgroups, self.chunk, *ring)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a schedule depends on."""

    sms: int
    smem: int  # bytes of shared memory that a block may have


HOPPER = Gpu(sms=132, smem=227 * 1024)  # H100 SXM, H200


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table: for rows of up to `cols` columns; None is any number.

    Attributes:
      smem: only for GPUs with this much shared memory for a block.
      waves: only for at most this many rows for each SM.
      bulk: only where rows are whole multiples of 16 bytes, which asynchronous copies need.
      row_bytes: only for rows of up to so many bytes.
      heavy_params: only where a column has more bytes of parameters than of x and y.
      biased: only for norms with a bias.
      bare: only without parameters.
      values: row values of a thread: gives the rows of a block (row_tile, warpgroup_row) or the
        warpgroups of a row (the other kinds, up to `warpgroups`).
      chunk: bytes of a chunk.
    """

    kind: Kind
    cols: int | None = None
    smem: int = 0
    waves: int | None = None
    bulk: bool = False
    row_bytes: int | None = None
    heavy_params: bool = False
    biased: bool = False
    bare: bool = False
    values: int = 32
    warpgroups: int = 8
    chunk: int = 0

    def fits(self, spec: Spec, gpu: Gpu) -> bool:
        row_bytes = spec.cols * spec.x_dtype.itemsize
        return (
            (self.cols is None or spec.cols <= self.cols)
            and gpu.smem >= self.smem
            and (self.waves is None or spec.rows <= self.waves * gpu.sms)
            and (not self.bulk or row_bytes % VECTOR_BYTES == 0)
            and (self.row_bytes is None or row_bytes <= self.row_bytes)
            and (not self.heavy_params or _has_heavy_params(spec))
            and (not self.biased or spec.bias_dtype is not None)
            and (not self.bare or (spec.scale_dtype is None and spec.bias_dtype is None))
        )


TABLE = (
    # A warp reads 4 KiB rows with 4 loads or more: no barrier between warps, several rows at once;
    # more rows where they share more parameters, fewer where there are none to share.
    Line("row_tile", cols=256, bare=True, values=16),
    Line("row_tile", cols=1024, heavy_params=True, values=64),
    Line("row_tile", cols=1024),
    # Few rows: an SM has one of them at most, so that latency decides: many threads for each row.
    Line("split_row", cols=32768, waves=1, values=8),
    # More parameters than data would come from the L2 cache for each row: they stay in registers,
    # and the rows come one after the other.
    Line("queued_row", cols=16384, bulk=True, heavy_params=True, values=16, warpgroups=4),
    # 64 values a thread still let an SM have 4 rows under way; a row needs 2 or 3 barriers.
    Line("warpgroup_row", cols=8192),
    # An SM has one row in registers, and the next one comes while that one is worked on.
    Line("queued_row", bulk=True, row_bytes=65536, values=64),
    # An SM has 1 to 4 rows under way. One exchange through shared memory for each row.
    Line("split_row", cols=32768),
    # The ring would read the parameters behind each chunk's barrier.
    Line("streamed_row", biased=True, chunk=4096),
    # Rows of 64 KiB to 512 KiB: one block for each SM. The ring reads the next row (or the rest of
    # this one) while it works, and holds 192 KiB of it for the second pass.
    Line("ring_row", smem=200 * 1024, bulk=True, warpgroups=4, chunk=8192),
    # Rows that asynchronous copies cannot take, and GPUs with little shared memory.
    Line("streamed_row", chunk=4096),
)


def choose(spec: Spec, gpu: Gpu | None = None) -> Schedule:
    """The schedule for `spec`: that of the first line of the table that fits."""
    gpu = gpu or local_gpu()
    vector = vector_width(spec.cols, spec.x_dtype, spec.y_dtype)
    line = next(line for line in TABLE if line.fits(spec, gpu))
    match line.kind:
        case "row_tile":
            return _row_tile(line, spec, vector)
        case "warpgroup_row":
            return _warpgroup_row(line, spec, vector)
        case "split_row":
            warpgroups = _warpgroups(line, spec, vector)
            if warpgroups == 1:
                return _warpgroup_row(line, spec, vector)
            return Schedule("split_row", vector, warpgroups=warpgroups)
        case "queued_row":
            return _queued_row(line, spec, vector, gpu)
        case "streamed_row":
            return _streamed_row(line, spec, vector)
        case "ring_row":
            return _ring_row(line, spec, vector, gpu)


@functools.cache
def local_gpu() -> Gpu:
    """The GPU at hand; an H100 or H200 where there is none (cross-lowering)."""
    device = jax.local_devices()[0]
    sms = getattr(device, "core_count", None)
    if device.platform != "gpu" or sms is None:
        return HOPPER
    return Gpu(sms, getattr(device, "shared_memory_per_block_optin", HOPPER.smem))


def _row_tile(line: Line, spec: Spec, vector: int) -> Schedule:
    # A unit must fit in the row: short rows take narrower loads.
    vector = min(vector, _power_of_2(spec.cols // 2))
    threads = _threads(spec.cols, vector)
    step = WARPGROUP_THREADS // threads
    rows = max(1, line.values * WARPGROUP_THREADS // (spec.cols * step)) * step
    rows = min(rows, spec.rows // step * step)
    if rows:
        return Schedule("row_tile", vector, rows=rows, threads=threads)
    # Fewer rows than the warps of a block hold.
    if spec.cols >= WARPGROUP_THREADS:
        return _warpgroup_row(line, spec, vector)
    return Schedule("row_tile", vector, rows=1, threads=threads)


def _threads(cols: int, vector: int) -> int:
    """Threads for a row: as many of a warp as possible while they read no more than 1/8 twice."""
    fitting = [n for n in (32, 16, 8, 4, 2) if n * vector <= cols]
    read = {n: math.ceil(cols / (n * vector)) * n * vector for n in fitting}
    return next((n for n in fitting if read[n] <= cols * 9 / 8), min(fitting, key=read.__getitem__))


def _warpgroup_row(line: Line, spec: Spec, vector: int) -> Schedule:
    vector = min(vector, _power_of_2(spec.cols // WARPGROUP_THREADS))
    rows = min(line.values * WARPGROUP_THREADS // spec.cols, spec.rows, 4)
    if rows < 2:
        return Schedule("warpgroup_row", vector, params_first=True, auto_barriers=False)
    # Up to 4 rows share the barriers of a reduction: that many fit in its scratch.
    return Schedule("row_tile", vector, rows=rows, threads=WARPGROUP_THREADS)


def _queued_row(line: Line, spec: Spec, vector: int, gpu: Gpu) -> Schedule:
    warpgroups = _warpgroups(line, spec, vector)
    if line.heavy_params:
        while spec.cols % (warpgroups * WARPGROUP_THREADS * vector) and warpgroups > 1:
            warpgroups //= 2  # An overlapping tail would take parameters of its own.
    # Registers: 512 threads of an SM have 128 each, enough for 16 values and their parameters, or
    # for 64 values.
    values = math.ceil(spec.cols / (warpgroups * WARPGROUP_THREADS))
    per_sm = max(1, (64 if line.heavy_params else 256) // (values * warpgroups))
    slots = (gpu.smem - 8192) // (per_sm * spec.cols * spec.x_dtype.itemsize)
    return Schedule(
        "queued_row",
        vector,
        warpgroups=warpgroups,
        slots=max(1, min(slots, 6)) if line.heavy_params else 1,
        blocks=per_sm * gpu.sms,
        params_first=line.heavy_params,
        auto_barriers=False,
    )


def _has_heavy_params(spec: Spec) -> bool:
    params = sum(d.itemsize for d in (spec.scale_dtype, spec.bias_dtype) if d is not None)
    return params > spec.x_dtype.itemsize + spec.y_dtype.itemsize


def _streamed_row(line: Line, spec: Spec, vector: int) -> Schedule:
    warpgroups = _warpgroups(line, spec, vector)
    unit = WARPGROUP_THREADS * vector
    units = max(1, line.chunk // (spec.x_dtype.itemsize * unit))
    units = min(units, spec.cols // (warpgroups * unit))
    return Schedule("streamed_row", vector, warpgroups=warpgroups, chunk=units * unit)


def _ring_row(line: Line, spec: Spec, vector: int, gpu: Gpu) -> Schedule:
    streamed = _streamed_row(line, spec, vector)
    slot = streamed.warpgroups * streamed.chunk * spec.x_dtype.itemsize
    # 8 KiB for the exchange and for what Mosaic reserves; at most 32 barriers in an array.
    slots = min((gpu.smem - 8192) // slot, 32 // streamed.warpgroups)
    return dataclasses.replace(streamed, kind="ring_row", slots=slots, blocks=gpu.sms)


def _warpgroups(line: Line, spec: Spec, vector: int) -> int:
    """Warpgroups for a row: a power of 2, as many as leave `values` for each thread."""
    wanted = math.ceil(spec.cols / (WARPGROUP_THREADS * line.values))
    most = min(line.warpgroups, max(1, spec.cols // (WARPGROUP_THREADS * vector)))
    return min(2 ** math.ceil(math.log2(wanted)), _power_of_2(most))


def _power_of_2(n: int) -> int:
    """The largest power of 2 up to `n`, which is at least 1."""
    return 1 << (n.bit_length() - 1)
