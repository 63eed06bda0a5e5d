"""Schedules of the Triton kernels: a call uses the first line of its table that fits.

A *piece* is one of several adjacent tiles of a row that a program holds at once. The hardware
limits behind the tables, and how the lines of the tables use them:

* A multiprocessor (SM) has 64 K registers. Most lines run 1024 threads in an SM, so each thread has
  64 registers. A float32 value of a row takes one register. A thread of a forward pass holds up to
  48 values of a row; a thread of a backward pass, which also needs registers for a second array and
  for sums over rows, holds up to 16.
* A row that is held in registers is split into several small pieces rather than one large piece, so
  that few threads are left without columns. A thread has 4, 8 or 16 values of a piece. 8 values of
  16 bits are one 16-byte load. With 4 values, each thread loads the 32-bit parameters that it uses;
  with 8 or 16, the parameters are first exchanged between threads.
* About 64 KiB of loads in flight in each SM saturate memory bandwidth (measured on an H200). For
  short rows, several programs per SM reach this number. A persistent program has no loads in flight
  while it exchanges sums and stores, unless it prefetches the next rows into shared memory
  (`stages`).
* Rows that do not fit into registers are loaded twice. The second load comes from the L2 cache and
  costs no memory bandwidth, but L2 bandwidth, so this is the last resort.

The lines were chosen from schedules that were timed on one H200 with Triton 3.6
(`benchmarks.sweep benchmarks/sweeps/triton.py`). The chosen lines were timed again with Triton 3.9
(`benchmarks.run`). Other schedules were compiled but not timed: those of norms with a residual and
of softmaxes with a mask, a bias or causal=True, which use the lines of the plain operations with
fewer values in a thread where registers would spill; those of kernels that compute the gradient of
a bias; those of norms with a rotation; and the rule for cross-entropies.
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

_WARP = 32  # threads in a warp
_REGISTERS = 2**16  # registers of an SM
_MOST_REGISTERS = 255  # maximum registers of a thread
_VECTOR = 16  # bytes of a thread's widest load
_BYTES_UNDER_WAY = 64 * 1024  # loads in flight per SM that saturate memory, timed on an H200
_EXCHANGE = 5  # bytes of shared memory per element of a tile, for exchanges between threads


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One way to run a kernel.

    Attributes:
      block: the number of columns in a tile, a power of two.
      pieces: the number of adjacent tiles of a row that a program holds at once. If they cover less
        than the row, the program loops over the row, tile by tile.
      warps: the number of warps (of 32 threads) in a program.
      tile_rows: the number of rows in a tile, a power of two.
      registers: the maximum number of registers of a thread.
      programs: the number of persistent programs, each of which loops over rows. Kernels without
        such a loop ignore it.
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
        """Return True if a program cannot hold a whole row at once, and so loops over its tiles."""
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
        """Return (number of blocks of columns, number of persistent programs for each block).

        In the backward pass of a norm whose parameters differ between groups of rows, the second
        number is for each block of a group.
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
      per_sm: the number of programs that must fit into an SM at once, which limits the registers of
        a thread.
      values: the number of elements of a piece of a row that each thread holds.
      share: the number of elements of a tile with several rows, for rows that are shorter than
        this; 0 for tiles of a single row.
      stages: the maximum number of tiles that a persistent program has in flight.
      hold_params: as in `Schedule`; only for the backward pass of a norm.
      looped: True if the row is loaded piece by piece and never held as a whole.
      mean: True if the line is only for norms that subtract a mean.
      unaligned: True if the line is only for rows whose length is not a multiple of 16 bytes.
      itemsize: if not None, the line is only for elements of this many bytes. In a forward pass,
        this is the largest element size of all operands of x's shape; in a backward pass, of dy and
        the arrays of x's shape that are saved besides x or y.
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
        """Return True if this line of a table applies to the call `spec`."""
        read, held = spec.operand_dtypes, spec.cols
        if spec.direction == "bwd":
            read = [spec.y_dtype, *spec.kept_dtypes]
            # The tables assume that a backward pass loads two arrays of x's shape. A further array
            # takes registers as if rows were longer by half.
            held += held // 2 * len(spec.kept_dtypes)
        itemsize = max(dtype.itemsize for dtype in read)
        return (
            (self.cols is None or held <= self.cols)
            and (not self.mean or spec.norm.subtract_mean)
            and (not self.unaligned or bool(spec.cols * itemsize % _VECTOR))
            and self.itemsize in (None, itemsize)
        )


SOFTMAX_FORWARD = (
    # An SM runs many programs, so that some load while others exchange sums between threads.
    Line(3072, warps=4, per_sm=8, share=2048),
    # A thread holds up to 24 values and needs 40 registers, so that an SM can run three quarters of
    # its maximum number of threads.
    Line(6144, warps=8, per_sm=6),
    Line(12288, warps=16, per_sm=3),
    # In this and the next line, a thread holds up to 32 values and has 64 registers.
    Line(16384, warps=16, per_sm=2),
    Line(32768, warps=32, per_sm=1),
    # Rows are loaded twice. The second load hits the L2 cache, which has room for all rows that the
    # SMs process at one time.
    Line(None, warps=16, per_sm=2, values=16, looped=True),
)

# Softmax with a mask, a bias or causal=True. If a program loops over a row, a thread has only 8
# values, because the addresses of the additional arrays take registers. In unaligned rows, each
# value has a separate address in each array. A program then gets all registers of an SM.
LOGITS_FORWARD = (
    *SOFTMAX_FORWARD[:-1],
    Line(None, warps=16, per_sm=1, looped=True, unaligned=True),
    Line(None, warps=16, per_sm=2, looped=True),
)

SOFTMAX_BACKWARD = (
    Line(1024, warps=4, per_sm=8, share=1024),
    Line(6144, warps=8, per_sm=4),
    Line(8192, warps=16, per_sm=2),
    # If a thread holds 16 values of two arrays, only one program fits into an SM. With 16-bit
    # elements, it has too few bytes in flight, and loading rows twice is faster.
    Line(16384, warps=16, per_sm=2, looped=True, itemsize=2),
    Line(16384, warps=32, per_sm=1),
    # In unaligned rows, each value has a separate address, for which Triton 3.7 has too few
    # registers with 32 warps.
    Line(None, warps=16, per_sm=2, looped=True, unaligned=True),
    # Rows are loaded twice. Between the two loads, the L2 cache holds one row of two arrays for
    # each SM.
    Line(None, warps=32, per_sm=1, looped=True),
)

# The backward pass of a softmax with a bias. Persistent programs loop over the rows of x that share
# a row of the bias, and accumulate its gradient. The 128 registers of a thread hold 16 values of
# each of three arrays, and addresses.
SOFTMAX_BIAS_BACKWARD = (
    Line(1024, warps=4, per_sm=4, share=1024, stages=3),
    Line(2048, warps=8, per_sm=2, stages=3),
    Line(4096, warps=8, per_sm=2, stages=2),
    Line(8192, warps=16, per_sm=1, stages=2),
    # For longer rows, registers hold the sums of one piece only, so an earlier kernel computes the
    # totals of rows, on which all elements of the gradient depend.
    Line(None, warps=4, per_sm=8, looped=True),
)

NORM_FORWARD = (
    # LayerNorm exchanges sums between threads twice before it stores, and has two parameters.
    # Persistent programs load the parameters once, and prefetch the next rows.
    Line(1024, warps=4, per_sm=6, share=2048, stages=3, mean=True, itemsize=2),
    Line(2048, warps=4, per_sm=6, values=4, share=2048, stages=3, mean=True, itemsize=2),
    Line(2048, warps=4, per_sm=8, share=2048),
    # A thread has up to 48 values, so that enough bytes are in flight also for 16-bit elements.
    Line(5120, warps=4, per_sm=8, itemsize=2),
    Line(12288, warps=8, per_sm=4, values=4, itemsize=2),
    Line(5120, warps=8, per_sm=4, values=4),
    Line(16384, warps=16, per_sm=2, values=4),
    Line(32768, warps=32, per_sm=1, values=4),
    Line(None, warps=16, per_sm=2, values=16, looped=True),
)

# Forward passes that also load a residual or a gate. If a program holds the whole row, the same
# registers suffice, because each element of the second array is loaded just before it is used. If a
# program loops over the row, a thread has only 8 values, because the second array needs addresses.
RESIDUAL_FORWARD = (
    *NORM_FORWARD[:-1],
    Line(None, warps=16, per_sm=2, looped=True),
)

# The forward pass of two norms with a residual between them. In the first three lines, a thread
# holds at most 24 values, and no registers spill.
TWO_NORMS_FORWARD = (
    Line(2048, warps=4, per_sm=8, share=2048),
    Line(5120, warps=8, per_sm=4, values=4),
    Line(12288, warps=16, per_sm=2, values=4),
    # A thread holds up to 32 values. Some registers spill, which costs less than loading a row
    # three times.
    Line(32768, warps=32, per_sm=1, values=4),
    Line(None, warps=8, per_sm=4, looped=True),
)

NORM_BACKWARD = (
    # Persistent programs loop over the rows and prefetch the next ones, which hides the load
    # latency. The 128 registers of a thread hold 8 values of each array of rows, of each parameter
    # and of each parameter's gradient.
    Line(1024, warps=4, per_sm=4, share=1024, stages=4),
    Line(2048, warps=8, per_sm=2, stages=4),
    # In the next two lines, a thread holds 12 and 16 values of each array.
    Line(3072, warps=8, per_sm=2, values=4, stages=4, itemsize=2),
    Line(4096, warps=8, per_sm=2, stages=3, itemsize=2),
    Line(4096, warps=8, per_sm=2, values=4),
    Line(6144, warps=16, per_sm=1, values=4, stages=3, mean=True),
    Line(5120, warps=8, per_sm=2, values=4, stages=3),
    Line(8192, warps=16, per_sm=1, values=16, stages=3),
    # Longer rows of a LayerNorm: registers hold the parameters' gradients for one piece of a row
    # only, so an earlier kernel computes the means of rows, on which all elements of dx depend.
    Line(None, warps=4, per_sm=8, looped=True, mean=True),
    # Longer rows of an RMSNorm: registers hold the gradient of scale for the whole row, but not
    # scale itself, which is loaded from the L1 cache for each row.
    Line(12288, warps=16, per_sm=1, hold_params=False, itemsize=2),
    Line(12288, warps=32, per_sm=1, values=4, hold_params=False),
    # Some registers spill, which costs less than loading rows twice, as the last line does.
    Line(16384, warps=32, per_sm=1, values=16, hold_params=False, itemsize=2),
    Line(16384, warps=32, per_sm=1, values=16),
    Line(None, warps=4, per_sm=8, looped=True),
)

# The rows of a norm with a rotation are attention heads. They are short, so each program has
# several.
NORM_ROPE_FORWARD = (
    # A thread has 16 values: the first columns of 8 pairs and their second columns, in two 16-byte
    # loads.
    Line(1024, warps=4, per_sm=8, share=2048, itemsize=2),
    # A thread has 8 values of 32 bits, also in two 16-byte loads. With 16 values, some registers
    # would spill if only some of the columns are rotated.
    Line(1024, warps=4, per_sm=8, share=1024),
)

# Persistent programs loop over the rows, as in a norm's backward pass. The 128 registers of a
# thread hold 16 values of each array.
NORM_ROPE_BACKWARD = (Line(1024, warps=4, per_sm=4, share=2048, stages=4),)

#: The tables of the other norms' forward passes. The key is the number of operands of x's shape,
#: and the number of norms in the call.
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
    """Return the first line that fits `spec` in the table of its operation."""
    return next(line for line in _table(spec) if line.fits(spec))


def of_line(line: Line, spec: Spec, gpu: Gpu) -> Schedule:
    """Return the schedule that a line of a table gives for the call `spec` on `gpu`."""
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


# A thread of a cross-entropy's kernel holds 16 values of a row, which take 64 registers together
# with intermediate values. While the threads of an SM reduce one block, the loads of the next 2
# blocks (of 16-bit elements) or the next block (of 32-bit elements) are in flight.
_LOSS_VALUES, _LOSS_REGISTERS = 16, 64
_LOSS_WARPS_OF_AN_SM = _REGISTERS // (_WARP * _LOSS_REGISTERS)
# Number of warps of a program by default, its maximum, and the bytes of a row that each warp must
# load to justify more warps. Programs are small, so that some start while others load. If each warp
# loads enough bytes, the time for starting and for merging sums does not matter, and larger
# programs are better: fewer rows are in flight, so that all SMs finish at about the same time.
_LOSS_WARPS, _MOST_LOSS_WARPS, _LOSS_BYTES_OF_A_WARP = 4, 16, 8192


def _of_loss(spec: Spec, gpu: Gpu) -> Schedule:
    """Return the schedule of a cross-entropy. It follows from a rule instead of a table."""
    warps, itemsize = _LOSS_WARPS, spec.x_dtype.itemsize
    while spec.direction == "fwd" and warps < _MOST_LOSS_WARPS:
        # If there are too few rows to occupy all SMs, use more warps for each row, as long as every
        # thread of a warp has elements to load.
        is_few = 2 * warps * spec.rows <= _LOSS_WARPS_OF_AN_SM * gpu.sms
        least = _WARP * _LOSS_VALUES * itemsize if is_few else _LOSS_BYTES_OF_A_WARP
        if spec.cols * itemsize < 2 * warps * least:
            break
        warps *= 2
    share = _WARP * warps * _LOSS_VALUES
    block = min(share, _power_of_2_from(spec.cols))
    blocks_ahead = _BYTES_UNDER_WAY // (_WARP * _LOSS_WARPS_OF_AN_SM * _LOSS_VALUES * itemsize)
    stages = min(1 + blocks_ahead, max(1, spec.cols // block))
    return Schedule(
        block=block,
        warps=warps,
        tile_rows=_tile_rows(share // block, spec, gpu),
        registers=_LOSS_REGISTERS,
        stages=stages if spec.direction == "fwd" else 1,
    )


def loss_vector(spec: Spec, schedule: Schedule) -> int:
    """Return the number of elements that a thread of a cross-entropy's kernel loads at once.

    A load has at most 16 bytes. If the length of rows is not a multiple of 16 bytes, the first
    block of a row begins at the multiple of 16 bytes before its first column. Rows too short to
    contain a whole block use narrower loads instead.
    """
    most = min(_VECTOR // spec.x_dtype.itemsize, schedule.block)
    return most if spec.cols >= 2 * schedule.block else math.gcd(most, spec.cols)


def loss_blocks(spec: Spec, schedule: Schedule) -> int:
    """Return the number of blocks that cover a row of a cross-entropy.

    The first block may begin before the first column; see `loss_vector`.
    """
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
    """Return the number of rows of a tile, a power of two.

    It is at most `most`, and so small that the tiles are spread over all SMs.
    """
    rows = math.ceil(spec.rows / gpu.sms)
    if spec.direction == "bwd":
        rows = min(rows, spec.rows // spec.groups)  # a tile must not span two groups of rows
    return max(1, min(most, _power_of_2_from(rows)))


def _stages(line: Line, tile: int, spec: Spec, gpu: Gpu) -> int:
    """Return how many tiles a program has in flight. All but one must fit into shared memory."""
    saved = spec.y_dtype if spec.norm.saved == "output" else spec.last.x_dtype
    read: list[np.dtype | None] = [*spec.operand_dtypes]
    if spec.direction == "bwd":
        # Together, cos and sin have as many values as an array of x's shape: two for each pair of
        # columns.
        dh = spec.last.x_dtype if "h" in spec.outputs else None
        read = [saved, *spec.kept_dtypes, spec.y_dtype, dh, spec.norm.table_dtype]
    room = gpu.smem // line.per_sm - _EXCHANGE * tile
    return min(line.stages, 1 + max(0, room) // (tile * sum(t.itemsize for t in read if t)))


def _power_of_2_from(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
