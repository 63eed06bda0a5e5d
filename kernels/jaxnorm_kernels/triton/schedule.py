"""Schedules of the Triton kernels: a call uses the first line of its table that applies to it.

A row is split into tiles of adjacent columns. The tiles of a row that a program holds in registers
at the same time are called *pieces*. The tables follow from these hardware limits:

* A multiprocessor (SM) has 64 K registers. With most lines of the tables, an SM runs 1024 threads,
  so a thread has 64 registers. A float32 value of a row takes one register. A thread of a forward
  pass holds up to 32 values. A thread of a backward pass holds up to 24, because it also holds a
  second array and sums over rows.
* A row that is held in registers is split into pieces of 4, 8 or 16 values per thread. The row may
  end inside the last piece. With smaller pieces, fewer threads are then idle. 8 values of 16 bits
  are one 16-byte load. With 4 values, a 16-byte load of 32-bit parameters loads exactly the
  parameters that a thread uses. With 8 or 16 values, threads exchange parameters after the load.
* About 64 KiB of loads in flight in each SM saturate memory bandwidth (measured on an H200). For
  short rows, several programs per SM reach this number. A persistent program has no loads in flight
  while it exchanges sums and stores, unless it prefetches the next rows into shared memory
  (`stages`).
* Rows that do not fit into registers are loaded twice. The second load comes from the L2 cache and
  uses no memory bandwidth. It does use L2 bandwidth, so this is the last resort.

The lines of the tables were chosen from the times of 1,006 kernels: 175 passes with row lengths and
dtypes that occur in models, each pass with several lines. Triton 3.9 compiled the kernels of commit
9edf233 for an A100 (sm_80, 163 KiB of shared memory). One H100 ran them. Persistent programs were
timed twice, with an A100's grid and with an H100's grid. With the present tables, no pass of a
model takes more than 1.03 times as long as with the tables of that commit. A comment above a line
names the passes for which the schedule of a neighbouring line takes over 3 % longer.

These calls were not timed: softmaxes of 5120 to 6144 columns or of 12288 columns; the backward pass
of RMSNorm of 12288 columns; and calls with two norms of more than 5376 columns.

Cross-entropies have no table. Their schedules are computed by a rule, and kernels with these
schedules were timed as well. With 8 warps in all programs, `log_prob_and_entropy` takes 1.04 times
as long for 32000 classes, and 1.05 times as long for 256 rows of 128256 classes.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton.launch import Gpu, launch, local_gpu
from jaxnorm_kernels.triton.support import sums_columns
from jaxnorm_kernels.triton.tiles import Tiling

_WARP = 32  # number of threads in a warp
_REGISTERS = 2**16  # number of registers of an SM
_MOST_REGISTERS = 255  # maximum number of registers of a thread
_VECTOR = 16  # number of bytes of the widest load of a thread
_BYTES_UNDER_WAY = 64 * 1024  # number of bytes in flight per SM that saturates memory (H200)
_EXCHANGE = 5  # bytes of shared memory per element of a tile, for exchanges between threads


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One way to run a kernel.

    Attributes:
      block: the number of columns in a tile, a power of two.
      pieces: the number of tiles that a program holds at once. They are adjacent parts of the same
        rows. If they do not contain the whole rows, the program loops over all tiles of the rows.
      warps: the number of warps (of 32 threads) in a program.
      tile_rows: the number of rows in a tile, a power of two.
      registers: the maximum number of registers of a thread.
      programs: the number of persistent programs in the grid. A persistent program loops over rows.
        Kernels without such a loop ignore this number.
      stages: the number of tiles that a persistent program has in flight. With 1, the program does
        not prefetch.
      hold_params: True if the backward kernel of a norm holds scale and bias in registers, False if
        it loads them for each row.
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
        """Return (number of column blocks, number of persistent programs for each column block).

        In the backward pass of a norm, groups of rows may have separate parameters. Each group is
        then processed by separate programs, and the second number counts the programs of a group.
        """
        groups = spec.groups if spec.direction == "bwd" else 1
        col_blocks = math.ceil(spec.cols / (self.pieces * self.block))
        tiles = math.ceil(spec.rows // groups / self.tile_rows)
        return col_blocks, min(max(1, self.programs // (col_blocks * groups)), tiles)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a schedule table: conditions, and the schedule of the calls that satisfy them.

    Attributes:
      cols: the line is only for rows of up to this many columns; None for any number of columns.
      warps: the number of warps (of 32 threads) in a program.
      per_sm: the number of programs that must fit into an SM at the same time. This limits the
        number of registers per thread.
      values: the maximum number of columns in a tile, divided by the number of threads in a
        program. Longer rows are split into several tiles.
      share: the maximum number of elements in a tile of several rows. Short rows share a tile if at
        least two of them fit into this number of elements. 0 if each tile has a single row.
      stages: the maximum number of tiles that a persistent program has in flight. In a forward
        pass, a line with more than one stage does not apply to norms that have a second operand of
        x's shape, such as a residual.
      hold_params: as in `Schedule`; only for the backward pass of a norm.
      looped: True if a program loads a row tile by tile and never holds all of it.
      mean: True if the line is only for norms that subtract a mean, False if it is only for other
        norms, None if it is for both.
      unaligned: True if the line is only for rows whose length is not a multiple of 16 bytes, False
        if it is only for other rows, None if it is for both.
      itemsize: if not None, the line is only for elements of this many bytes. In a forward pass,
        this is the largest element size of the operands that have x's shape. In a backward pass, it
        is the largest element size of dy and of the arrays in `Spec.also_saved_dtypes`.
    """

    cols: int | None
    warps: int
    per_sm: int
    values: int = 8
    share: int = 0
    stages: int = 1
    hold_params: bool = True
    looped: bool = False
    mean: bool | None = None
    unaligned: bool | None = None
    itemsize: int | None = None

    def fits(self, spec: Spec) -> bool:
        """Return True if this line of a schedule table applies to the call `spec`."""
        read, held = spec.operand_dtypes, spec.cols
        if spec.direction == "bwd":
            read = [spec.y_dtype, *spec.also_saved_dtypes]
            # The tables assume that a backward pass loads two arrays of x's shape. If it loads a
            # third array, a row needs 1.5 times as many registers, as if it were 1.5 times as long.
            held += held // 2 * len(spec.also_saved_dtypes)
        elif len(spec.norms) > 1:
            held += held // 16  # Between two norms, a few more registers are in use.
        itemsize = max(dtype.itemsize for dtype in read)
        return (
            (self.cols is None or held <= self.cols)
            and self.mean in (None, spec.is_norm and spec.norm.subtract_mean)
            and (self.stages == 1 or spec.direction == "bwd" or len(read) == 1)
            and self.unaligned in (None, bool(spec.cols * itemsize % _VECTOR))
            and self.itemsize in (None, itemsize)
        )


SOFTMAX_FORWARD = (
    # With this line and the next, a thread holds up to 32 values in 64 registers. For float32 rows
    # with a mask, a bias and a causal mask, 40 bytes per thread spill. Still, 4 warps per program
    # are faster than 8. With 8 warps, a causal softmax takes 1.42 times as long for 1024 columns,
    # and 1.08 times for 4096.
    Line(4096, warps=4, per_sm=8, share=2048),
    # For 8192 columns of 16 bits, the schedule of the next line takes 1.20 times as long.
    Line(8192, warps=8, per_sm=4),
    Line(32768, warps=32, per_sm=1),
    # This line of the table and the two lines after it have `looped=True`: a program loads each row
    # twice. The second load hits the L2 cache, which has room for all rows that are being
    # processed.
    #
    # This line is for unaligned rows, in which each value needs a separate address. For 50257
    # columns (GPT-2), the schedule of the next line takes 1.25 times as long: a thread has 16
    # values instead of 8, and registers spill. 32 warps instead of 16 take 1.09 times as long.
    Line(None, warps=16, per_sm=1, looped=True, unaligned=True, itemsize=2),
    # For 128256 columns (Llama 3), the schedule of the next line takes 1.08 times as long.
    Line(None, warps=16, per_sm=2, values=16, looped=True, itemsize=2),
    Line(None, warps=32, per_sm=1, looped=True),
)

# The forward pass of a softmax with a mask, a bias or a causal mask. If a program loops over the
# tiles of a row, a thread has only 8 values of a tile, because the addresses of the additional
# arrays take registers. In unaligned rows, each value even needs a separate address in each array.
# For these rows, an SM therefore runs only one program of 16 warps at a time, so that each thread
# can have 128 registers. With 32 warps, a thread has only 64 registers, and a masked softmax of
# 50257 columns of 16 bits takes 1.18 times as long.
LOGITS_FORWARD = (
    *SOFTMAX_FORWARD[:3],
    Line(None, warps=16, per_sm=1, looped=True, unaligned=True),
    SOFTMAX_FORWARD[-1],
)

SOFTMAX_BACKWARD = (
    # For a causal softmax, the schedule of the next line takes 1.18 times as long with 1024
    # columns, and 1.10 times with 2048.
    Line(2048, warps=4, per_sm=8, share=1024),
    # For a causal softmax of 4096 columns, the schedule of the next line takes 1.09 times as long.
    Line(6144, warps=8, per_sm=4),
    # For 8192 columns of 16 bits, the schedule of the next line takes 1.22 times as long.
    Line(8192, warps=16, per_sm=2),
    # An SM runs one program at a time, so that the second load of y and dy hits the L2 cache: it
    # has room for one row of each array per SM. The program has 32 warps. With 16, registers spill
    # in unaligned rows, where each value needs a separate address, and 50257 columns (GPT-2) take
    # 1.20 to 1.85 times as long. With Triton 3.7, registers spill even with 32 warps; with 3.9,
    # they do not.
    Line(None, warps=32, per_sm=1, looped=True),
)

# The backward pass of a softmax with a bias. Persistent programs loop over the rows of x that use
# the same row of the bias, and accumulate the gradient of the bias. A thread has 128 registers.
# They hold 16 values of each of three arrays, and the addresses. Rows have at most
# `support.MOST_SUMMED` columns.
SOFTMAX_BIAS_BACKWARD = (
    # For 1024 columns, the schedule of the next line takes 1.10 times as long.
    Line(2048, warps=4, per_sm=4, share=1024, stages=3),
    # For 4096 columns, the schedule of the next line takes 1.08 times as long.
    Line(4096, warps=8, per_sm=2, stages=2),
    # For 8192 columns, the schedule of the next line takes 1.32 times as long.
    Line(None, warps=16, per_sm=1, stages=2),
)

# The forward passes of all norms without a rotation. A call may have a second norm, a residual or a
# gate. Rows have at most `support.MOST_NORMALISED` columns, so that registers hold whole rows.
NORM_FORWARD = (
    # LayerNorm has two parameters, and its threads exchange sums twice per row. This makes
    # persistent programs faster: they load the parameters only once, and prefetch rows during the
    # exchanges. The schedule of the next line takes 1.10 to 1.14 times as long for 768 and for 1280
    # columns, and 1.04 times for 1600 columns (GPT-2). If groups of rows have separate parameters,
    # programs cannot prefetch. Still, the schedule of the next line takes 1.21 times as long for
    # 1152 columns (DiT).
    Line(1600, warps=4, per_sm=6, values=4, share=2048, stages=3, mean=True, itemsize=2),
    # A thread has up to 24 values, so that enough bytes are in flight even if the elements have
    # only 16 bits. 8 warps instead of 4 take 1.05 times as long for 2304 columns, and 1.15 times
    # for LayerNorm of 2048 columns.
    Line(3072, warps=4, per_sm=8, share=2048),
    # The schedule of the next line takes 1.09 times as long for a norm of 4096 columns with a gate.
    # It takes 1.10 times as long for a call with two norms of 3584 columns, although 28 bytes per
    # thread spill with this line. Float32 or unaligned rows spill more, so this line is not for
    # them.
    Line(4096, warps=4, per_sm=8, itemsize=2, unaligned=False),
    # For a call with two norms of 5120 columns, the schedule of the previous line takes 1.25 times
    # as long, because 120 bytes per thread spill. The schedule of the next line takes 1.13 times as
    # long for a call with two norms of 5376 columns, and 1.47 times for LayerNorm of 5120 columns.
    Line(6144, warps=8, per_sm=4, values=4),
    # For LayerNorm of 12288 columns, the schedule of the next line takes 1.26 times as long.
    Line(None, warps=16, per_sm=2, values=4),
)

NORM_BACKWARD = (
    # Persistent programs loop over the rows and prefetch the next rows, which hides the load
    # latency. A thread has 128 registers. They hold 8 values of each array of x's shape, of each
    # parameter and of each parameter's gradient.
    Line(1024, warps=4, per_sm=4, share=1024, stages=4),
    # This line is for rows of up to 1280 columns, such as 1152 or 1280. The schedule of the next
    # line has tiles of 1024 columns. The second tile of such a row leaves most threads idle, so the
    # row takes 1.03 to 1.47 times as long. However, LayerNorm spills 16 bytes per thread with this
    # line. Float32 or unaligned rows spill more, and are slower than with the next line. Therefore
    # this line is not for them.
    Line(1280, warps=4, per_sm=4, stages=4, itemsize=2, unaligned=False),
    # For LayerNorm of 2560 columns, the schedule of the next line takes 1.12 times as long.
    Line(3072, warps=8, per_sm=2, values=4, stages=4),
    # For 4096 columns, the schedule of the previous line takes 1.05 to 1.12 times as long. 16 warps
    # instead of 8 take 1.15 times as long.
    Line(4096, warps=8, per_sm=2, stages=3, itemsize=2),
    # For 5120 columns, the schedule of the next line takes 1.09 to 1.15 times as long.
    Line(5120, warps=8, per_sm=2, values=4, stages=4, mean=False),
    Line(8192, warps=16, per_sm=1, values=16, stages=3),
    # This line is only for RMSNorm. Registers hold all sums but not the scale, which is loaded from
    # the L1 cache. Rows of 8193 to 12288 columns, to which this line applies, were not timed.
    Line(12288, warps=16, per_sm=1, hold_params=False, mean=False),
    # With this line, 64 to 128 bytes per thread spill. The schedule of the next line loads rows
    # twice, and takes 1.33 to 1.52 times as long for 16384 columns.
    Line(16384, warps=32, per_sm=1, values=16, hold_params=False, mean=False),
    # A program processes only one piece (a range of columns) of each row. Its registers have room
    # for the parameters' gradients of only one piece. Such a program cannot compute the means over
    # whole rows, on which dx depends. So an earlier kernel computes these means.
    Line(None, warps=4, per_sm=8, looped=True),
)

# The rows of a norm with a rotation are attention heads. Heads are short, so each program processes
# several rows at once.
NORM_ROPE_FORWARD = (
    # A thread has 16 values in two 16-byte loads: the first columns of 8 pairs in one load, and the
    # second columns of these pairs in the other. The schedule of the next line takes 1.03 to 1.04
    # times as long for 64 and for 128 columns, but only 0.89 times as long for 256 columns.
    Line(128, warps=4, per_sm=8, share=2048, itemsize=2),
    # A thread has 16 values if they have 16 bits, but only 8 if they have 32 bits: the number of
    # bytes is the same. With 16 values of 32 bits, registers spill if only some of the columns are
    # rotated.
    Line(1024, warps=4, per_sm=8, share=1024),
)

# Persistent programs loop over the rows, as in the backward pass of other norms. A thread has 8
# values of each array. With 16, shared memory has room for only 2 tiles instead of 4, and bfloat16
# takes 1.06 to 1.12 times as long.
NORM_ROPE_BACKWARD = (Line(1024, warps=4, per_sm=4, share=1024, stages=4),)


def choose(spec: Spec, gpu: Gpu | None = None) -> Schedule:
    """Return the schedule for `spec` on `gpu`, which is the local GPU by default."""
    gpu = gpu or local_gpu()
    if spec.is_loss:
        return _of_loss(spec, gpu)
    line = next(line for line in _table(spec) if line.fits(spec))
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


# A thread of a cross-entropy holds 16 values of a row. In the backward pass of a divergence, a
# thread holds 8 values of the teacher's row and 8 of the student's. With all intermediate results,
# a thread needs 64 registers. A program reduces a row in blocks. In a cross-entropy, it also loads
# the next blocks at the same time: 2 blocks of 16-bit elements, or 1 block of 32-bit elements.
_LOSS_VALUES, _LOSS_REGISTERS = 16, 64
_LOSS_WARPS_OF_AN_SM = _REGISTERS // (_WARP * _LOSS_REGISTERS)
# A program has _LOSS_WARPS warps by default, and at most _MOST_LOSS_WARPS. By default, programs are
# small, so that some programs start while others load. A program gets more warps in two cases. In
# the first case, rows are so long that each warp still loads at least _LOSS_BYTES_OF_A_WARP bytes.
# The time for starting a program and for merging its sums then does not matter, and large programs
# have an advantage: fewer rows are in flight, so all SMs finish at about the same time. In the
# second case, there are too few rows to occupy all SMs.
#
# The forward pass of a divergence computes more for each element. So its programs stay small unless
# there are few rows. A thread holds 32 bytes of each of the two rows, and does not load ahead. With
# the rules of a cross-entropy, 16-bit logits take longer on an H100: 1.18 times as long with 32768
# or 50257 columns, and 1.08 times with 128256. 32-bit logits take 0.98 times as long.
_LOSS_WARPS, _MOST_LOSS_WARPS, _LOSS_BYTES_OF_A_WARP = 4, 16, 8192
_DIVERGENCE_BYTES_OF_A_THREAD = 32


def _of_loss(spec: Spec, gpu: Gpu) -> Schedule:
    """Return the schedule of a loss or divergence. A rule computes it; there is no table."""
    is_forward, is_divergence = spec.direction == "fwd", len(spec.operand_dtypes) > 1
    warps, values = _LOSS_WARPS, _LOSS_VALUES // len(spec.operand_dtypes)
    if is_forward and is_divergence:
        widest = max(dtype.itemsize for dtype in spec.operand_dtypes)
        values = _DIVERGENCE_BYTES_OF_A_THREAD // widest
    itemsize = sum(dtype.itemsize for dtype in spec.operand_dtypes)
    while is_forward and warps < _MOST_LOSS_WARPS:
        # If there are too few rows to occupy all SMs, use more warps for each row, as long as every
        # thread of a warp has elements to load.
        is_few = 2 * warps * spec.rows <= _LOSS_WARPS_OF_AN_SM * gpu.sms
        least = _WARP * values * itemsize if is_few else _LOSS_BYTES_OF_A_WARP
        if spec.cols * itemsize < 2 * warps * least or (is_divergence and not is_few):
            break
        warps *= 2
    share = _WARP * warps * values
    block = min(share, _power_of_2_from(spec.cols))
    stages = 1
    if is_forward and not is_divergence:
        blocks_ahead = _BYTES_UNDER_WAY // (_WARP * _LOSS_WARPS_OF_AN_SM * values * itemsize)
        stages = min(1 + blocks_ahead, max(1, spec.cols // block))
    return Schedule(
        block=block,
        warps=warps,
        tile_rows=_tile_rows(share // block, spec, gpu),
        registers=_LOSS_REGISTERS,
        stages=stages,
    )


def loss_vector(spec: Spec, schedule: Schedule) -> int:
    """Return the number of adjacent elements of a row that a thread of a loss kernel loads at once.

    In the widest dtype of the operands, these elements have at most 16 bytes. If their number does
    not divide the row length, a row may start at an unaligned address. The kernel then starts to
    load the row at the last aligned address before the row. Rows that are shorter than two blocks
    of `schedule.block` columns are loaded from their start. For these short rows, the number of
    elements always divides the row length.
    """
    widest = max(dtype.itemsize for dtype in spec.operand_dtypes)
    most = min(_VECTOR // widest, schedule.block)
    return most if spec.cols >= 2 * schedule.block else math.gcd(most, spec.cols)


def loss_blocks(spec: Spec, schedule: Schedule) -> int:
    """Return the number of blocks of columns into which a loss kernel splits each row of x."""
    vector = loss_vector(spec, schedule)
    lead = vector - 1 if spec.cols % vector else 0
    return math.ceil((spec.cols + lead) / schedule.block)


def _table(spec: Spec) -> tuple[Line, ...]:
    is_forward = spec.direction == "fwd"
    if spec.op == "norm_rope":
        return NORM_ROPE_FORWARD if is_forward else NORM_ROPE_BACKWARD
    if spec.is_norm:
        return NORM_FORWARD if is_forward else NORM_BACKWARD
    if not is_forward:
        return SOFTMAX_BIAS_BACKWARD if sums_columns(spec) else SOFTMAX_BACKWARD
    has_more = spec.has("mask") or spec.has("logits_bias") or spec.is_causal
    return LOGITS_FORWARD if has_more else SOFTMAX_FORWARD


def _tile_rows(most: int, spec: Spec, gpu: Gpu) -> int:
    """Return the number of rows of a tile: a power of two, which is at most `most`.

    If there are few rows, the number is smaller, so that the tiles are spread over all SMs.
    """
    rows = math.ceil(spec.rows / gpu.sms)
    if spec.direction == "bwd":
        rows = min(rows, spec.rows // spec.groups)  # a tile must not span two groups of rows
    return max(1, min(most, _power_of_2_from(rows)))


def _stages(line: Line, tile: int, spec: Spec, gpu: Gpu) -> int:
    """Return the number of tiles that a persistent program has in flight.

    One of these tiles is in registers. All others must fit into shared memory.
    """
    saved = spec.last.x_dtype if spec.saves_input else spec.y_dtype
    read: list[np.dtype | None] = [*spec.operand_dtypes]
    if spec.direction == "bwd":
        # cos and sin together have as many values as an array of x's shape, because each of them
        # has one value for each pair of columns.
        dh = spec.last.x_dtype if "h" in spec.outputs else None
        read = [saved, *spec.also_saved_dtypes, spec.y_dtype, dh, spec.dtype("cos")]
    room = gpu.smem // line.per_sm - _EXCHANGE * tile
    return min(line.stages, 1 + max(0, room) // (tile * sum(t.itemsize for t in read if t)))


def _power_of_2_from(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
