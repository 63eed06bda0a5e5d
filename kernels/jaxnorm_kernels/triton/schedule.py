"""How a kernel runs: tables; the first line that fits is taken. The reasons are hardware.

The sizes that matter, and how the lines below use them:

* A multiprocessor (SM) has 64 K registers: 64 for each of 1024 threads, which most lines have in an
  SM. A float32 value of a row costs one, so that a thread of a forward pass holds up to 48 values,
  and one of a backward pass, with two arrays and their sums over the rows, up to 16.
* A row that is held is as many pieces as it takes, so that few threads are left without columns; of
  a piece a thread has 4, 8 or 16 values. 8 are a read of 16 bytes where values have 16 bits. With 4
  the parameters, which have 32, lie in the same threads; with 8 or 16 they are first sent around.
* About 64 KiB of reads under way in each SM keep the memory busy (measured on an H200). Short rows
  have as many because an SM runs several programs. Programs that take turns over the rows wait for
  a row, exchange sums and write, unless the next rows come through shared memory meanwhile
  (`stages`).
* A second read from the L2 cache costs no memory bandwidth, but L2 bandwidth: the last resort.

Chosen out of schedules timed on one H200 with Triton 3.6 (`benchmarks.sweep
benchmarks/sweeps/triton.py`); what was chosen was timed again with Triton 3.9 (`benchmarks.run`).
Norms with a residual, and softmaxes with a mask, a bias or a diagonal, have the lines of plain
ones, with fewer values in a thread where some would spill; those, those that add up the gradient of
a bias, norms with a rotation, and the rule for cross-entropies were compiled, not timed.
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
_REGISTERS = 2**16  # of an SM
_MOST_REGISTERS = 255  # that a thread can have
_VECTOR = 16  # bytes that a thread reads at once, at most
_BYTES_UNDER_WAY = 64 * 1024  # of each SM, that keep the memory busy: measured on an H200
_EXCHANGE = 5  # bytes of shared memory for each element, for exchanges between threads


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One way to run a kernel.

    Attributes:
      block: columns of a tile, a power of two.
      pieces: tiles, side by side, that a program holds at once. Where they are less than a row, the
        row is looped over, tile by tile.
      warps: of 32 threads, in a program.
      tile_rows: rows of a tile, a power of two.
      registers: that a thread may have.
      programs: that take turns over the rows of a norm: in its backward, and where stages > 1.
      stages: tiles that such a program has under way; 1 for no prefetch.
      hold_params: a norm's backward keeps scale and bias in registers, and does not read them again
        for each row.
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
        """Whether a row is more than a program holds."""
        return self.pieces * self.block < spec.cols

    def tiling(self, spec: Spec) -> Tiling:
        """What a kernel is compiled for."""
        return Tiling(spec.cols, self.tile_rows, self.block, self.pieces)

    def grid(self, spec: Spec) -> tuple[int, ...]:
        """Programs of a kernel in which each has a tile of rows."""
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
        """Runs a kernel on the rows of `spec`; by default, each program has a tile of them."""
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
        """Programs that take turns over the rows of a group: over the blocks of a row, and those.

        In a forward pass, and where the rows share their parameters, all rows are one group.
        """
        groups = spec.groups if spec.direction == "bwd" else 1
        col_blocks = math.ceil(spec.cols / (self.pieces * self.block))
        tiles = math.ceil(spec.rows // groups / self.tile_rows)
        return col_blocks, min(max(1, self.programs // (col_blocks * groups)), tiles)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a table: for rows of up to `cols` columns; None is any number.

    Attributes:
      warps: of 32 threads, in a program.
      per_sm: programs that an SM has registers for.
      values: of a piece of a row in a thread.
      share: elements of the rows that share a tile, where they are short.
      stages: rows that a program reads at once; for norms.
      hold_params: for norms' backwards; see `Schedule`.
      looped: a row is read piece after piece, and never held.
      mean: only where a mean is subtracted.
      unaligned: only for rows that are no multiple of 16 bytes.
      itemsize: only for elements of so many bytes: of x or what is beside it, whichever is wider,
        in a forward pass; of dy, or what is kept beside x, in a backward one.
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
        """Whether it is for calls such as this one."""
        read, held = spec.operand_dtypes, spec.cols
        if spec.direction == "bwd":
            read = [spec.y_dtype, *spec.kept_dtypes]
            # Lines are for two arrays of rows: a third one's elements take registers, too.
            held += held // 2 * len(spec.kept_dtypes)
        itemsize = max(dtype.itemsize for dtype in read)
        return (
            (self.cols is None or held <= self.cols)
            and (not self.mean or spec.norm.subtract_mean)
            and (not self.unaligned or bool(spec.cols * itemsize % _VECTOR))
            and self.itemsize in (None, itemsize)
        )


SOFTMAX_FORWARD = (
    # Many programs in an SM: one reads while others exchange sums.
    Line(3072, warps=4, per_sm=8, share=2048),
    # 24 values in 40 registers, so that all threads of an SM but a quarter have some.
    Line(6144, warps=8, per_sm=6),
    Line(12288, warps=16, per_sm=3),
    # Then 32 values in 64 registers.
    Line(16384, warps=16, per_sm=2),
    Line(32768, warps=32, per_sm=1),
    # The second read finds the row in the L2 cache, which has room for all rows under way.
    Line(None, warps=16, per_sm=2, values=16, looped=True),
)

# With a mask, a bias or a diagonal. Of a looped row a thread has 8 values, for the sake of the
# addresses of more arrays; of unaligned rows each value has one in each, and registers for them.
LOGITS_FORWARD = (
    *SOFTMAX_FORWARD[:-1],
    Line(None, warps=16, per_sm=1, looped=True, unaligned=True),
    Line(None, warps=16, per_sm=2, looped=True),
)

SOFTMAX_BACKWARD = (
    Line(1024, warps=4, per_sm=8, share=1024),
    Line(6144, warps=8, per_sm=4),
    Line(8192, warps=16, per_sm=2),
    # 16 values of two arrays are all that a thread has registers for, and one program is alone in
    # its SM: in 16 bits, where there are fewer bytes to wait for, reading twice is faster.
    Line(16384, warps=16, per_sm=2, looped=True, itemsize=2),
    Line(16384, warps=32, per_sm=1),
    # Where each value has an address of its own, Triton 3.7 has too few registers in 32 warps.
    Line(None, warps=16, per_sm=2, looped=True, unaligned=True),
    # One row of two arrays for each SM is what the L2 cache has room for.
    Line(None, warps=32, per_sm=1, looped=True),
)

# Programs take turns over the rows of x that share a row of a bias, and keep the sum of what they
# give. Of 16 values of three arrays, 128 registers have room for all, and for addresses.
SOFTMAX_BIAS_BACKWARD = (
    Line(1024, warps=4, per_sm=4, share=1024, stages=3),
    Line(2048, warps=8, per_sm=2, stages=3),
    Line(4096, warps=8, per_sm=2, stages=2),
    Line(8192, warps=16, per_sm=1, stages=2),
    # Then the sums fit by pieces alone, so that a row's total comes first.
    Line(None, warps=4, per_sm=8, looped=True),
)

NORM_FORWARD = (
    # LayerNorm exchanges sums twice before it writes, and has twice the parameters: programs keep
    # those, and read the next rows meanwhile.
    Line(1024, warps=4, per_sm=6, share=2048, stages=3, mean=True, itemsize=2),
    Line(2048, warps=4, per_sm=6, values=4, share=2048, stages=3, mean=True, itemsize=2),
    Line(2048, warps=4, per_sm=8, share=2048),
    # Up to 48 values in a thread: the bytes under way count, and in 16 bits they are few.
    Line(5120, warps=4, per_sm=8, itemsize=2),
    Line(12288, warps=8, per_sm=4, values=4, itemsize=2),
    Line(5120, warps=8, per_sm=4, values=4),
    Line(16384, warps=16, per_sm=2, values=4),
    Line(32768, warps=32, per_sm=1, values=4),
    Line(None, warps=16, per_sm=2, values=16, looped=True),
)

# A residual is read where it is added, and rows that are held have registers enough for it. Of a
# looped row a thread has 8 values, for the sake of one more array's addresses.
RESIDUAL_FORWARD = (
    *NORM_FORWARD[:-1],
    Line(None, warps=16, per_sm=2, looped=True),
)

# Of 24 values in a thread or fewer, none spill between the two norms.
TWO_NORMS_FORWARD = (
    Line(2048, warps=4, per_sm=8, share=2048),
    Line(5120, warps=8, per_sm=4, values=4),
    Line(12288, warps=16, per_sm=2, values=4),
    # Of 32 some do, which costs less than to read a row three times.
    Line(32768, warps=32, per_sm=1, values=4),
    Line(None, warps=8, per_sm=4, looped=True),
)

NORM_BACKWARD = (
    # Programs take turns over the rows. 128 registers hold 8 values of each array, of the
    # parameters and of their sums; what reading costs in time, the rows under way make up for.
    Line(1024, warps=4, per_sm=4, share=1024, stages=4),
    Line(2048, warps=8, per_sm=2, stages=4),
    # Then 12 and 16 values.
    Line(3072, warps=8, per_sm=2, values=4, stages=4, itemsize=2),
    Line(4096, warps=8, per_sm=2, stages=3, itemsize=2),
    Line(4096, warps=8, per_sm=2, values=4),
    Line(6144, warps=16, per_sm=1, values=4, stages=3, mean=True),
    Line(5120, warps=8, per_sm=2, values=4, stages=3),
    Line(8192, warps=16, per_sm=1, values=16, stages=3),
    # The sums of LayerNorm fit in registers by pieces alone, so that a row's means come first.
    Line(None, warps=4, per_sm=8, looped=True, mean=True),
    # RMSNorm's, but then no registers are left for the scale: it comes from the L1 cache.
    Line(12288, warps=16, per_sm=1, hold_params=False, itemsize=2),
    Line(12288, warps=32, per_sm=1, values=4, hold_params=False),
    # What spills costs less than the second read of the last line.
    Line(16384, warps=32, per_sm=1, values=16, hold_params=False, itemsize=2),
    Line(16384, warps=32, per_sm=1, values=16),
    Line(None, warps=4, per_sm=8, looped=True),
)

# Heads are short, and programs have several.
NORM_ROPE_FORWARD = (
    # Of 16 values in a thread 8 are the first of a pair and 8 the second, each a read of 16 bytes.
    Line(1024, warps=4, per_sm=8, share=2048, itemsize=2),
    # 8 are as many bytes in 32 bits. Of 16 some spill where a part of the columns is not rotated.
    Line(1024, warps=4, per_sm=8, share=1024),
)

# Programs take turns over the rows, as in a norm's backward; 128 registers hold 16 values of all.
NORM_ROPE_BACKWARD = (Line(1024, warps=4, per_sm=4, share=2048, stages=4),)

#: Of other norms, by how many arrays of rows they read, and how many norms they are.
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
    """The schedule for `spec` on `gpu`, or the one at hand."""
    if spec.is_loss:
        return _of_loss(spec, gpu or local_gpu())
    return of_line(choose_line(spec), spec, gpu or local_gpu())


def choose_line(spec: Spec) -> Line:
    """The first line of its table that fits `spec`."""
    return next(line for line in _table(spec) if line.fits(spec))


def of_line(line: Line, spec: Spec, gpu: Gpu) -> Schedule:
    """What a line of a table means for the rows of `spec`."""
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


# Of a cross-entropy. 16 values of a row, and what is made of them, take 64 registers. The threads
# that an SM has those for add up one block while others are under way: 2 in 16 bits, 1 in 32.
_LOSS_VALUES, _LOSS_REGISTERS = 16, 64
_LOSS_WARPS_OF_AN_SM = _REGISTERS // (_WARP * _LOSS_REGISTERS)
# Small programs, because some begin while others read. But where each warp has so much of a row to
# read, how long it takes to begin and to merge does not matter, and of fewer rows under way less is
# left at the end.
_LOSS_WARPS, _MOST_LOSS_WARPS, _LOSS_BYTES_OF_A_WARP = 4, 16, 8192


def _of_loss(spec: Spec, gpu: Gpu) -> Schedule:
    """By a rule, not by a table."""
    warps, itemsize = _LOSS_WARPS, spec.x_dtype.itemsize
    while spec.direction == "fwd" and warps < _MOST_LOSS_WARPS:
        # Few rows are spread over all warps, as far as there is something to read for each.
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
    """Elements that a thread of a cross-entropy reads at once, of 16 bytes at most.

    Where rows are no multiple of them, the blocks of a row begin before its first column; but not
    those of rows so short that they have no block inside.
    """
    most = min(_VECTOR // spec.x_dtype.itemsize, schedule.block)
    return most if spec.cols >= 2 * schedule.block else math.gcd(most, spec.cols)


def loss_blocks(spec: Spec, schedule: Schedule) -> int:
    """Of a row of a cross-entropy."""
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
    """Rows of a tile, a power of two: few rows are spread over all SMs first."""
    rows = math.ceil(spec.rows / gpu.sms)
    if spec.direction == "bwd":
        rows = min(rows, spec.rows // spec.groups)  # A tile of it has rows of one group alone.
    return max(1, min(most, _power_of_2_from(rows)))


def _stages(line: Line, tile: int, spec: Spec, gpu: Gpu) -> int:
    """As many tiles under way as there is shared memory for: it holds all but the first."""
    saved = spec.y_dtype if spec.norm.saved == "output" else spec.last.x_dtype
    read: list[np.dtype | None] = [*spec.operand_dtypes]
    if spec.direction == "bwd":
        # Of tables two values for each pair of columns: as many as of an array.
        dh = spec.last.x_dtype if "h" in spec.outputs else None
        read = [saved, *spec.kept_dtypes, spec.y_dtype, dh, spec.norm.table_dtype]
    room = gpu.smem // line.per_sm - _EXCHANGE * tile
    return min(line.stages, 1 + max(0, room) // (tile * sum(t.itemsize for t in read if t)))


def _power_of_2_from(n: int) -> int:
    """The smallest power of two that is `n` or more."""
    return 1 << (n - 1).bit_length()
