"""Schedules of the Triton kernels: a call uses the first line of its table that fits.

A *piece* is one of several adjacent tiles of a row that a program holds at once. The tables follow
from these hardware limits:

* A multiprocessor (SM) has 64 K registers. Most lines run 1024 threads in an SM, so a thread has 64
  registers. A float32 value of a row takes one register. A thread of a forward pass holds up to 32
  values. A thread of a backward pass holds up to 24, because it has two arrays and their sums over
  rows.
* A row that is held in registers is split into pieces of 4, 8 or 16 values per thread. The smaller
  the pieces, the fewer threads have no columns in the last piece. 8 values of 16 bits are one
  16-byte load. With 4 values, a thread loads the 32-bit parameters that it uses; with 8 or 16, the
  parameters are exchanged between threads after the load.
* About 64 KiB of loads in flight in each SM saturate memory bandwidth (measured on an H200). For
  short rows, several programs per SM reach this number. A persistent program has no loads in flight
  while it exchanges sums and stores, unless it prefetches the next rows into shared memory
  (`stages`).
* Rows that do not fit into registers are loaded twice. The second load comes from the L2 cache and
  uses no memory bandwidth. It does use L2 bandwidth, so this is the last resort.

The lines were chosen from the times of 1,006 kernels: 175 passes with widths and dtypes that occur
in models, each with several lines. Triton 3.9 compiled the kernels of commit 9edf233 for an A100
(sm_80, 163 KiB of shared memory). One H100 ran them. Persistent programs were timed twice, with an
A100's grid and with an H100's grid. Each pass of a model takes at most 1.03 times as long as with
the lines of that commit. The comments beside the lines name passes that take over 3 % longer with a
neighbouring line.

These were not timed: softmaxes of 5120 to 6144 and of 12288 columns, the backward pass of RMSNorm
of 12288 columns, and calls with two norms of more than 5376 columns. Cross-entropies follow a rule
instead of a table, which was timed as well. If all their programs had 8 warps instead,
`log_prob_and_entropy` would take 1.04 times as long for 32000 classes, and 1.05 times as long for
256 rows of 128256 classes.
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

        In the backward pass of a norm, groups of rows may have their own parameters. The second
        number is then the number of programs for each pair of a block of columns and a group.
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
      share: if a row has fewer elements than this number, several rows share a tile of this many
        elements. 0 for tiles of a single row.
      stages: the maximum number of tiles that a persistent program has in flight. In a forward
        pass, a line with more than 1 is only for norms with a single operand of x's shape.
      hold_params: as in `Schedule`; only for the backward pass of a norm.
      looped: True if the row is loaded piece by piece and never held as a whole.
      mean: True if the line is only for norms that subtract a mean, False if it is only for others.
      unaligned: True if the line is only for rows whose length is not a multiple of 16 bytes, False
        if it is only for other rows.
      itemsize: if not None, the line is only for elements of this many bytes. In a forward pass,
        this is the largest element size of the operands that have x's shape. In a backward pass, it
        is the largest element size of dy and `Spec.kept_dtypes`.
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
        """Return True if this line of a table applies to the call `spec`."""
        read, held = spec.operand_dtypes, spec.cols
        if spec.direction == "bwd":
            read = [spec.y_dtype, *spec.kept_dtypes]
            # The tables assume that a backward pass loads two arrays of x's shape. With a third
            # array, a row needs 1.5 times the registers, as if the row were 1.5 times as long.
            held += held // 2 * len(spec.kept_dtypes)
        elif len(spec.norms) > 1:
            held += held // 16  # Between two norms, a few more registers are in use.
        itemsize = max(dtype.itemsize for dtype in read)
        return (
            (self.cols is None or held <= self.cols)
            and self.mean in (None, spec.norm.subtract_mean)
            and (self.stages == 1 or spec.direction == "bwd" or len(read) == 1)
            and self.unaligned in (None, bool(spec.cols * itemsize % _VECTOR))
            and self.itemsize in (None, itemsize)
        )


SOFTMAX_FORWARD = (
    # In this line and the next, a thread has up to 32 values in 64 registers. If float32 rows have
    # a mask, a bias and a diagonal, 40 bytes of a thread spill. Programs of 8 warps take 1.42 times
    # as long for 1024 causal columns, and 1.08 for 4096.
    Line(4096, warps=4, per_sm=8, share=2048),
    # The next line takes 1.20 times as long for 8192 columns of 16 bits.
    Line(8192, warps=8, per_sm=4),
    Line(32768, warps=32, per_sm=1),
    # In the lines below, the second load hits the L2 cache, which has room for all rows in flight.
    # In unaligned rows, each value has a separate address: with 16 values in a thread, registers
    # spill, and 50257 columns (GPT-2) take 1.25 times as long. With 32 warps, they take 1.09.
    Line(None, warps=16, per_sm=1, looped=True, unaligned=True, itemsize=2),
    # The next line takes 1.08 times as long for 128256 columns (Llama 3).
    Line(None, warps=16, per_sm=2, values=16, looped=True, itemsize=2),
    Line(None, warps=32, per_sm=1, looped=True),
)

# Softmax with a mask, a bias or a diagonal. If the row is looped over, a thread has only 8 values,
# because the addresses of the additional arrays take registers. In unaligned rows, each value has a
# separate address in each array. So only one program runs in an SM and has all its registers. With
# 32 warps, 50257 masked columns of 16 bits take 1.18 times as long.
LOGITS_FORWARD = (
    *SOFTMAX_FORWARD[:3],
    Line(None, warps=16, per_sm=1, looped=True, unaligned=True),
    SOFTMAX_FORWARD[-1],
)

SOFTMAX_BACKWARD = (
    # The next line takes 1.18 times as long for 1024 causal columns, and 1.10 for 2048.
    Line(2048, warps=4, per_sm=8, share=1024),
    # The next line takes 1.09 times as long for 4096 causal columns.
    Line(6144, warps=8, per_sm=4),
    # The last line takes 1.22 times as long for 8192 columns of 16 bits.
    Line(8192, warps=16, per_sm=2),
    # The L2 cache has room for one row of two arrays for each SM. In unaligned rows, each value has
    # a separate address. With 16 warps, registers spill, and 50257 columns (GPT-2) take 1.20 to
    # 1.85 times as long. Triton 3.7 spills with 32 warps, too, but 3.9 does not.
    Line(None, warps=32, per_sm=1, looped=True),
)

# The backward pass of a softmax with a bias. Persistent programs loop over the rows of x that share
# a row of the bias, and accumulate its gradient. A thread has 128 registers. They hold
# 16 values of each of three arrays, and the addresses.
SOFTMAX_BIAS_BACKWARD = (
    # The next line takes 1.10 times as long for 1024 columns.
    Line(2048, warps=4, per_sm=4, share=1024, stages=3),
    # The next line takes 1.08 times as long for 4096 columns.
    Line(4096, warps=8, per_sm=2, stages=2),
    # The last line takes 1.32 times as long for 8192 columns.
    Line(8192, warps=16, per_sm=1, stages=2),
    # For longer rows, a program processes only one piece of each row, because its registers hold
    # the sums of one piece. The gradient depends on the totals of whole rows, so an earlier kernel
    # computes the totals.
    Line(None, warps=4, per_sm=8, looped=True),
)

# The forward passes of all norms without a rotation, also with a second norm, a residual or a gate.
NORM_FORWARD = (
    # LayerNorm has two parameters, and its threads exchange sums twice per row. So persistent
    # programs load the parameters once, and prefetch rows during these exchanges. The next line
    # takes 1.10 to 1.14 times as long for 768 and 1280 columns, and 1.04 for 1600 (GPT-2). If
    # groups of rows have their own parameters, this line does not prefetch, and the next one takes
    # 1.21 times as long for 1152 columns (DiT).
    Line(1600, warps=4, per_sm=6, values=4, share=2048, stages=3, mean=True, itemsize=2),
    # A thread has up to 24 values, so that 16-bit elements also keep enough bytes in flight. 8
    # warps take 1.05 times as long for 2304 columns, and 1.15 for LayerNorm of 2048.
    Line(3072, warps=4, per_sm=8, share=2048),
    # The next line takes 1.09 times as long for a gate of 4096 columns, and 1.10 for two norms of
    # 3584, although these spill 28 bytes of a thread. Unaligned rows and float32 would spill more.
    Line(4096, warps=4, per_sm=8, itemsize=2, unaligned=False),
    # With the previous line, two norms of 5120 columns spill 120 bytes of each thread, and take
    # 1.25 times as long. The next line takes 1.13 times as long for two norms of 5376 columns, and
    # 1.47 for LayerNorm of 5120.
    Line(6144, warps=8, per_sm=4, values=4),
    # The last line takes 1.26 times as long for LayerNorm of 12288 columns.
    Line(16384, warps=16, per_sm=2, values=4),
    # A thread has 8 values of a piece. With 16, registers would spill if there is a residual.
    # Without a residual, 16 values would take 0.84 of the time, but no model has norms so wide.
    Line(None, warps=16, per_sm=2, looped=True),
)

NORM_BACKWARD = (
    # Persistent programs loop over the rows and prefetch the next ones, which hides the load
    # latency. A thread has 128 registers. They hold 8 values of each array of x's shape, of each
    # parameter and of each gradient of a parameter.
    Line(1024, warps=4, per_sm=4, share=1024, stages=4),
    # Rows of 1152 and 1280 columns fill few threads of the next line, which takes 1.03 to 1.47
    # times as long. Here LayerNorm spills 16 bytes of a thread. It spills more of float32 elements
    # and of unaligned rows, and is slower.
    Line(1280, warps=4, per_sm=4, stages=4, itemsize=2, unaligned=False),
    # The next line takes 1.12 times as long for LayerNorm of 2560 columns.
    Line(3072, warps=8, per_sm=2, values=4, stages=4),
    # The previous line takes 1.05 to 1.12 times as long for 4096 columns, and 16 warps take 1.15.
    Line(4096, warps=8, per_sm=2, stages=3, itemsize=2),
    # The next line takes 1.09 to 1.15 times as long for 5120 columns.
    Line(5120, warps=8, per_sm=2, values=4, stages=4, mean=False),
    Line(8192, warps=16, per_sm=1, values=16, stages=3),
    # For RMSNorm, registers hold all sums but not the scale, which is loaded from the L1 cache. No
    # width of this line was timed in the comparison.
    Line(12288, warps=16, per_sm=1, hold_params=False, mean=False),
    # With this line, 64 to 128 bytes of each thread spill. The last line loads rows twice instead,
    # and takes 1.33 to 1.52 times as long for 16384 columns.
    Line(16384, warps=32, per_sm=1, values=16, hold_params=False, mean=False),
    # A program processes only one piece of each row, because its registers hold the sums of one
    # piece. dx depends on means of whole rows, so an earlier kernel computes these.
    Line(None, warps=4, per_sm=8, looped=True),
)

# The rows of a norm with a rotation are attention heads. They are short, so each program has
# several.
NORM_ROPE_FORWARD = (
    # A thread has 16 values in two 16-byte loads: the first columns of 8 pairs in one load, and the
    # second columns in the other.
    # The next line takes 1.03 to 1.04 times as long for 64 and 128 columns, and 0.89 for 256.
    Line(128, warps=4, per_sm=8, share=2048, itemsize=2),
    # A thread has 8 values of 32 bits, as many bytes as 16 values of 16 bits. With 16 values of 32
    # bits, some registers spill if only some columns are rotated.
    Line(1024, warps=4, per_sm=8, share=1024),
)

# Persistent programs loop over the rows, as in a norm's backward pass. A thread has 8 values of
# each array. With 16, shared memory has room for 2 tiles instead of 4, and bfloat16 takes 1.06 to
# 1.12 times as long.
NORM_ROPE_BACKWARD = (Line(1024, warps=4, per_sm=4, share=1024, stages=4),)

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


# A cross-entropy holds 16 values of a row per thread, and a divergence 8 of each of its two rows;
# with intermediates these take 64 registers. While the threads of an SM reduce one block, other
# blocks are in flight: 2 of 16-bit elements, 1 of 32-bit elements.
_LOSS_VALUES, _LOSS_REGISTERS = 16, 64
_LOSS_WARPS_OF_AN_SM = _REGISTERS // (_WARP * _LOSS_REGISTERS)
# The default number of warps of a program, the maximum, and a threshold: a program gets more warps
# only if each of them still loads this many bytes of a row. By default programs are small, so that
# some start while others load. If each warp loads enough bytes, the time for starting and for
# merging sums does not matter. Larger programs are then better: fewer rows are in flight, so that
# all SMs finish at about the same time.
_LOSS_WARPS, _MOST_LOSS_WARPS, _LOSS_BYTES_OF_A_WARP = 4, 16, 8192


def _of_loss(spec: Spec, gpu: Gpu) -> Schedule:
    """Return the schedule of a loss or a divergence, which follows a rule instead of a table."""
    warps, values = _LOSS_WARPS, _LOSS_VALUES // len(spec.operand_dtypes)
    itemsize = sum(dtype.itemsize for dtype in spec.operand_dtypes)
    while spec.direction == "fwd" and warps < _MOST_LOSS_WARPS:
        # If there are too few rows to occupy all SMs, use more warps for each row, as long as every
        # thread of a warp has elements to load.
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
    """Return the number of elements of a row that a thread in the kernel of a loss loads at once.

    In the widest dtype of the operands, these elements have at most 16 bytes. If their number does
    not divide the row length, a row may start at an unaligned address. Its first block then begins
    at the last aligned address before the row's first column. Rows that are too short to contain a
    whole block use narrower loads.
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
    return NORM_FORWARD if spec.direction == "fwd" else NORM_BACKWARD


def _tile_rows(most: int, spec: Spec, gpu: Gpu) -> int:
    """Return the number of rows of a tile, a power of two.

    It is at most `most`, and so small that the tiles are spread over all SMs.
    """
    rows = math.ceil(spec.rows / gpu.sms)
    if spec.direction == "bwd":
        rows = min(rows, spec.rows // spec.groups)  # a tile must not span two groups of rows
    return max(1, min(most, _power_of_2_from(rows)))


def _stages(line: Line, tile: int, spec: Spec, gpu: Gpu) -> int:
    """Return how many tiles a program has in flight.

    One of them is in registers. All others must fit into shared memory.
    """
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
