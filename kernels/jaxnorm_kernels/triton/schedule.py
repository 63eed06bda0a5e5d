"""Schedule tables of the Triton kernels: for each call, the first line that fits is used.

The hardware limits behind the tables, and how the lines below use them:

* A multiprocessor (SM) has 64 K registers: 64 for each of 1024 threads, the number that most lines
  run in an SM. A float32 value of a row takes one register. A thread of a forward pass holds up to
  48 values; a thread of a backward pass, with two arrays and their sums over rows, up to 16.
* A row that is held in registers is split into as many pieces as it takes, so that few threads
  have no columns. A thread has 4, 8 or 16 values of a piece. 8 values of 16 bits are one 16-byte
  load. With 4 values, the threads that use 32-bit parameters also load them; with 8 or 16, the
  parameters are first exchanged between threads.
* About 64 KiB of loads in flight in each SM saturate memory bandwidth (measured on an H200). For
  short rows, several programs per SM reach that. A persistent program waits for a row, exchanges
  sums and stores, unless it prefetches the next rows into shared memory meanwhile (`stages`).
* A second load from the L2 cache costs no memory bandwidth, but L2 bandwidth: the last resort.

The lines were chosen from schedules timed on one H200 with Triton 3.6 (`benchmarks.sweep
benchmarks/sweeps/triton.py`); the chosen ones were timed again with Triton 3.9 (`benchmarks.run`).
Norms with a residual, and softmaxes with a mask, a bias or a diagonal, use the lines of the plain
operations, with fewer values in a thread where some would spill. These kernels were compiled, but
not timed. The same holds for kernels that sum the gradient of a bias, for norms with a rotation,
and for the rule for cross-entropies.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton.launch import Gpu, launch, local_gpu
from jaxnorm_kernels.triton.logits import sums_columns
from jaxnorm_kernels.triton.tiles import Tiling

_WARP = 32  # threads
_REGISTERS = 2**16  # per SM
_MOST_REGISTERS = 255  # per thread
_VECTOR = 16  # bytes of a thread's widest load
_BYTES_UNDER_WAY = 64 * 1024  # loads in flight per SM that saturate memory: measured on an H200
_EXCHANGE = 5  # bytes of shared memory per element, for exchanges between threads


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One way to run a kernel.

    Attributes:
      block: the number of columns in a tile, a power of two.
      pieces: the number of adjacent tiles that a program holds at once. If they cover less than a
        row, the program loops over the row, tile by tile.
      warps: the number of warps (of 32 threads) in a program.
      tile_rows: the number of rows in a tile, a power of two.
      registers: the maximum number of registers of a thread.
      programs: the number of persistent programs, each of which loops over rows. It is used by a
        norm's backward pass, and if stages > 1.
      stages: the number of tiles that a persistent program has in flight; 1 for no prefetch.
      hold_params: True if a norm's backward pass holds scale and bias in registers instead of
        loading them for each row.
    """

    block: int
    warps: int
    tile_rows: int = 1
    registers: int = 255
    programs: int = 1
    stages: int = 1
    hold_params: bool = True
    pieces: int = 1

    def is_looped(self, spec: Spec) -> bool:
        """True if a row is longer than the columns that a program holds at once."""
        return self.pieces * self.block < spec.cols

    def tiling(self, spec: Spec) -> Tiling:
        """Return the tile sizes that a kernel is compiled for."""
        return Tiling(spec.cols, self.tile_rows, self.block, self.pieces)

    def grid(self, spec: Spec) -> tuple[int, ...]:
        """Return the grid of a kernel in which each program has one tile of rows."""
        return (math.ceil(spec.rows / self.tile_rows),)

    def launch(
        self,
        kernel: Any,
        spec: Spec,
        *,
        name: str,
        outputs: Mapping[str, jax.ShapeDtypeStruct | None],
        grid: tuple[int, ...] | None = None,
        **arguments: Any,
    ) -> list[jax.Array]:
        """Launch a kernel on the rows of `spec`. By default, each program has one tile of rows."""
        return launch(
            kernel,
            name=name,
            outputs=outputs,
            grid=grid or self.grid(spec),
            warps=self.warps,
            registers=self.registers,
            rows=spec.rows,
            tiling=self.tiling(spec),
            **arguments,
        )

    def persistent_grid(self, spec: Spec) -> tuple[int, int]:
        """Return (blocks of a row, persistent programs per block) for a group of rows.

        In a forward pass, or if all rows share their parameters, all rows are one group.
        """
        groups = spec.groups if spec.direction == "bwd" else 1
        col_blocks = math.ceil(spec.cols / (self.pieces * self.block))
        tiles = math.ceil(spec.rows // groups / self.tile_rows)
        return col_blocks, min(max(1, self.programs // (col_blocks * groups)), tiles)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a schedule table, for rows of up to `cols` columns (None: any number).

    Attributes:
      warps: the number of warps (of 32 threads) in a program.
      per_sm: the number of programs that the registers of an SM must hold.
      values: the number of values that each thread holds of a piece of a row.
      share: the number of elements in a tile that several short rows share.
      stages: the maximum number of tiles that a program has in flight; for norms.
      hold_params: for a norm's backward pass; see `Schedule`.
      looped: True if the row is loaded piece by piece and never held as a whole.
      mean: True if the line is only for norms that subtract a mean.
      unaligned: True if the line is only for rows whose length is not a multiple of 16 bytes.
      itemsize: the line is only for elements of this many bytes. In a forward pass, they are the
        widest of x and the arrays beside it; in a backward pass, of dy and the saved arrays beside
        x.
    """

    cols: int | None
    warps: int
    per_sm: int
    values: int = 8
    share: int = 0
    stages: int = 1
    hold_params: bool = True
    looped: bool = False
    mean: bool = False
    unaligned: bool = False
    itemsize: int | None = None

    def fits(self, spec: Spec) -> bool:
        """Return True if this line applies to the call `spec`."""
        read, held = spec.operand_dtypes, spec.cols
        if spec.direction == "bwd":
            read = [spec.y_dtype, *spec.kept_dtypes]
            # Lines assume two arrays of rows; a third array takes additional registers.
            held += held // 2 * len(spec.kept_dtypes)
        itemsize = max(dtype.itemsize for dtype in read)
        return (
            (self.cols is None or held <= self.cols)
            and (not self.mean or spec.norm.subtract_mean)
            and (not self.unaligned or bool(spec.cols * itemsize % _VECTOR))
            and self.itemsize in (None, itemsize)
        )


SOFTMAX_FORWARD = (
    # An SM runs many programs: one loads while others exchange sums.
    Line(3072, warps=4, per_sm=8, share=2048),
    # 24 values in 40 registers keep three quarters of an SM's threads resident.
    Line(6144, warps=8, per_sm=6),
    Line(12288, warps=16, per_sm=3),
    # From here on, a thread has up to 32 values in 64 registers.
    Line(16384, warps=16, per_sm=2),
    Line(32768, warps=32, per_sm=1),
    # The second load hits the L2 cache, which has room for all rows in flight.
    Line(None, warps=16, per_sm=2, values=16, looped=True),
)

# Softmax with a mask, a bias or a diagonal. If the row is looped over, a thread has only 8 values,
# because the addresses of the additional arrays take registers. In unaligned rows, each value has a
# separate address in each array, so that one program has all registers of an SM.
LOGITS_FORWARD = (
    *SOFTMAX_FORWARD[:-1],
    Line(None, warps=16, per_sm=1, looped=True, unaligned=True),
    Line(None, warps=16, per_sm=2, looped=True),
)

SOFTMAX_BACKWARD = (
    Line(1024, warps=4, per_sm=8, share=1024),
    Line(6144, warps=8, per_sm=4),
    Line(8192, warps=16, per_sm=2),
    # Holding 16 values of two arrays takes all registers of a thread, so that an SM runs a single
    # program. With 16-bit elements, this leaves too few bytes in flight, and loading rows twice is
    # faster.
    Line(16384, warps=16, per_sm=2, looped=True, itemsize=2),
    Line(16384, warps=32, per_sm=1),
    # If each value has a separate address, Triton 3.7 runs out of registers with 32 warps.
    Line(None, warps=16, per_sm=2, looped=True, unaligned=True),
    # The L2 cache has room for one row of two arrays for each SM.
    Line(None, warps=32, per_sm=1, looped=True),
)

# Persistent programs loop over the rows of x that share a row of a bias and accumulate its
# gradient. 128 registers hold 16 values of three arrays, and the addresses.
SOFTMAX_BIAS_BACKWARD = (
    Line(1024, warps=4, per_sm=4, share=1024, stages=3),
    Line(2048, warps=8, per_sm=2, stages=3),
    Line(4096, warps=8, per_sm=2, stages=2),
    Line(8192, warps=16, per_sm=1, stages=2),
    # For longer rows, registers hold the sums of one piece only, so a row's total is computed
    # first.
    Line(None, warps=4, per_sm=8, looped=True),
)

NORM_FORWARD = (
    # LayerNorm exchanges sums twice before it stores, and has twice the parameters: persistent
    # programs hold the parameters and prefetch the next rows.
    Line(1024, warps=4, per_sm=6, share=2048, stages=3, mean=True, itemsize=2),
    Line(2048, warps=4, per_sm=6, values=4, share=2048, stages=3, mean=True, itemsize=2),
    Line(2048, warps=4, per_sm=8, share=2048),
    # A thread has up to 48 values, so that 16-bit elements also keep enough bytes in flight.
    Line(5120, warps=4, per_sm=8, itemsize=2),
    Line(12288, warps=8, per_sm=4, values=4, itemsize=2),
    Line(5120, warps=8, per_sm=4, values=4),
    Line(16384, warps=16, per_sm=2, values=4),
    Line(32768, warps=32, per_sm=1, values=4),
    Line(None, warps=16, per_sm=2, values=16, looped=True),
)

# A residual is loaded only where it is added. If the row is held, registers suffice for the
# residual. If the row is looped over, a thread has only 8 values, because one more array needs
# addresses.
RESIDUAL_FORWARD = (
    *NORM_FORWARD[:-1],
    Line(None, warps=16, per_sm=2, looped=True),
)

# With up to 24 values in a thread, no register is spilled between the two norms.
TWO_NORMS_FORWARD = (
    Line(2048, warps=4, per_sm=8, share=2048),
    Line(5120, warps=8, per_sm=4, values=4),
    Line(12288, warps=16, per_sm=2, values=4),
    # With 32 values, some registers spill, which costs less than loading a row three times.
    Line(32768, warps=32, per_sm=1, values=4),
    Line(None, warps=8, per_sm=4, looped=True),
)

NORM_BACKWARD = (
    # Persistent programs loop over the rows. 128 registers hold 8 values of each array, of the
    # parameters and of their sums. The rows in flight hide the load latency.
    Line(1024, warps=4, per_sm=4, share=1024, stages=4),
    Line(2048, warps=8, per_sm=2, stages=4),
    # These lines hold 12 and 16 values.
    Line(3072, warps=8, per_sm=2, values=4, stages=4, itemsize=2),
    Line(4096, warps=8, per_sm=2, stages=3, itemsize=2),
    Line(4096, warps=8, per_sm=2, values=4),
    Line(6144, warps=16, per_sm=1, values=4, stages=3, mean=True),
    Line(5120, warps=8, per_sm=2, values=4, stages=3),
    Line(8192, warps=16, per_sm=1, values=16, stages=3),
    # For LayerNorm, registers hold the sums of one piece only, so a row's means are computed first.
    Line(None, warps=4, per_sm=8, looped=True, mean=True),
    # For RMSNorm, registers hold all sums but not the scale, which is loaded from the L1 cache.
    Line(12288, warps=16, per_sm=1, hold_params=False, itemsize=2),
    Line(12288, warps=32, per_sm=1, values=4, hold_params=False),
    # Spilling costs less than the second load of the last line.
    Line(16384, warps=32, per_sm=1, values=16, hold_params=False, itemsize=2),
    Line(16384, warps=32, per_sm=1, values=16),
    Line(None, warps=4, per_sm=8, looped=True),
)

# Heads are short, so each program has several.
NORM_ROPE_FORWARD = (
    # A thread has 16 values: 8 first columns of pairs and 8 second columns, in two 16-byte loads.
    Line(1024, warps=4, per_sm=8, share=2048, itemsize=2),
    # 8 values of 32 bits take as many bytes. With 16 values, some registers spill if only some
    # columns are rotated.
    Line(1024, warps=4, per_sm=8, share=1024),
)

# Persistent programs loop over the rows, as in a norm's backward pass. 128 registers hold 16 values
# of each array.
NORM_ROPE_BACKWARD = (Line(1024, warps=4, per_sm=4, share=2048, stages=4),)

#: The tables of the other norms. The key is (number of arrays of rows that they load, number of
#: norms).
_NORM_FORWARD = {(1, 1): NORM_FORWARD, (2, 1): RESIDUAL_FORWARD, (2, 2): TWO_NORMS_FORWARD}
_TABLES = {
    ("softmax", "fwd"): SOFTMAX_FORWARD,
    ("softmax", "bwd"): SOFTMAX_BACKWARD,
    ("log_softmax", "fwd"): SOFTMAX_FORWARD,
    ("log_softmax", "bwd"): SOFTMAX_BACKWARD,
    ("norm_rope", "fwd"): NORM_ROPE_FORWARD,
    ("norm_rope", "bwd"): NORM_ROPE_BACKWARD,
}


def choose(spec: Spec, gpu: Gpu | None = None) -> Schedule:
    """Return the schedule for `spec` on `gpu`; by default, on the local GPU."""
    if spec.is_loss:
        return _of_loss(spec, gpu or local_gpu())
    return of_line(choose_line(spec), spec, gpu or local_gpu())


def choose_line(spec: Spec) -> Line:
    """Return the first line of the table that fits `spec`."""
    return next(line for line in _table(spec) if line.fits(spec))


def of_line(line: Line, spec: Spec, gpu: Gpu) -> Schedule:
    """Return the schedule with which a table's line runs the rows of `spec`."""
    threads, pieces = _WARP * line.warps, 1
    block = threads * line.values
    if not line.looped:
        block = min(block, _power_of_2_from(spec.cols))
        pieces = math.ceil(spec.cols / block)
    tile_rows = _tile_rows(line.share // (pieces * block), spec, gpu)
    return Schedule(
        block=block,
        pieces=pieces,
        warps=line.warps,
        tile_rows=tile_rows,
        registers=min(_MOST_REGISTERS, _REGISTERS // (threads * line.per_sm)),
        programs=line.per_sm * gpu.sms,
        stages=_stages(line, pieces * block * tile_rows, spec, gpu),
        hold_params=line.hold_params,
    )


# A cross-entropy holds 16 values of a row per thread, and a divergence 8 of each of its two rows;
# with intermediates these take 64 registers. While the threads of an SM reduce one block, other
# blocks are in flight: 2 of 16-bit elements, 1 of 32-bit elements.
_LOSS_VALUES, _LOSS_REGISTERS = 16, 64
_LOSS_WARPS_OF_AN_SM = _REGISTERS // (_WARP * _LOSS_REGISTERS)
# Programs are small, so that some start while others load. If each warp loads at least the third
# number of bytes of a row, start-up and merging do not matter. Programs may then be larger: fewer
# rows are in flight, which shortens the tail of the launch.
_LOSS_WARPS, _MOST_LOSS_WARPS, _LOSS_BYTES_OF_A_WARP = 4, 16, 8192


def _of_loss(spec: Spec, gpu: Gpu) -> Schedule:
    """Return the schedule of a loss or a divergence, which follows a rule instead of a table."""
    warps, values = _LOSS_WARPS, _LOSS_VALUES // len(spec.operand_dtypes)
    itemsize = sum(dtype.itemsize for dtype in spec.operand_dtypes)
    while spec.direction == "fwd" and warps < _MOST_LOSS_WARPS:
        # If there are few rows, they are spread over all warps, as long as each warp has elements
        # to load.
        is_few = 2 * warps * spec.rows <= _LOSS_WARPS_OF_AN_SM * gpu.sms
        least = _WARP * values * itemsize if is_few else _LOSS_BYTES_OF_A_WARP
        if spec.cols * itemsize < 2 * warps * least:
            break
        warps *= 2
    share = _WARP * warps * values
    block = min(share, _power_of_2_from(spec.cols))
    blocks_ahead = _BYTES_UNDER_WAY // (_WARP * _LOSS_WARPS_OF_AN_SM * values * itemsize)
    stages = min(1 + blocks_ahead, max(1, spec.cols // block))
    return Schedule(
        block=block,
        warps=warps,
        tile_rows=_tile_rows(share // block, spec, gpu),
        registers=_LOSS_REGISTERS,
        stages=stages if spec.direction == "fwd" else 1,
    )


def loss_vector(spec: Spec, schedule: Schedule) -> int:
    """Return the number of elements of a row that a loss's thread loads at once.

    These are at most 16 bytes of the widest dtype. If rows are not a multiple of that, the blocks
    of a row begin before its first column. Rows too short to have a whole block inside use narrower
    loads instead.
    """
    widest = max(dtype.itemsize for dtype in spec.operand_dtypes)
    most = min(_VECTOR // widest, schedule.block)
    return most if spec.cols >= 2 * schedule.block else math.gcd(most, spec.cols)


def loss_blocks(spec: Spec, schedule: Schedule) -> int:
    """Return the number of blocks in a row of a loss."""
    vector = loss_vector(spec, schedule)
    lead = vector - 1 if spec.cols % vector else 0
    return math.ceil((spec.cols + lead) / schedule.block)


def _table(spec: Spec) -> tuple[Line, ...]:
    if sums_columns(spec):
        return SOFTMAX_BIAS_BACKWARD
    has_bias = spec.softmax.logits_bias_dtype is not None
    if spec.direction == "fwd" and (spec.logits.has_mask or has_bias or spec.softmax.causal):
        return LOGITS_FORWARD
    if (spec.op, spec.direction) in _TABLES or not spec.is_norm:
        return _TABLES[spec.op, spec.direction]
    if spec.direction == "bwd":
        return NORM_BACKWARD
    return _NORM_FORWARD[len(spec.operand_dtypes), len(spec.operation.norms)]


def _tile_rows(most: int, spec: Spec, gpu: Gpu) -> int:
    """Return the number of rows in a tile, a power of two. Few rows are spread over all SMs."""
    rows = math.ceil(spec.rows / gpu.sms)
    if spec.direction == "bwd":
        rows = min(rows, spec.rows // spec.groups)  # A tile must not span two groups.
    return max(1, min(most, _power_of_2_from(rows)))


def _stages(line: Line, tile: int, spec: Spec, gpu: Gpu) -> int:
    """Return how many tiles to keep in flight. Shared memory must hold all but the first one."""
    saved = spec.y_dtype if spec.norm.saved == "output" else spec.last.x_dtype
    read: list[np.dtype | None] = [*spec.operand_dtypes]
    if spec.direction == "bwd":
        # Together, cos and sin have two values for each pair of columns: as many as an array of
        # rows.
        dh = spec.last.x_dtype if "h" in spec.outputs else None
        read = [saved, *spec.kept_dtypes, spec.y_dtype, dh, spec.norm.table_dtype]
    room = gpu.smem // line.per_sm - _EXCHANGE * tile
    return min(line.stages, 1 + max(0, room) // (tile * sum(t.itemsize for t in read if t)))


def _power_of_2_from(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
