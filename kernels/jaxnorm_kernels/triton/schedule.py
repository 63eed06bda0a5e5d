"""How a kernel runs: tables; the first line that fits is taken. The reasons are hardware.

The sizes that matter, and how the lines below use them:

* A multiprocessor (SM) has 64 K registers: 128 for each of 512 threads, 64 for each of 1024, which
  is the most that a program may have. A float32 value of a row costs one, so that a forward pass
  holds up to 32 values in a thread, and a backward pass, with two arrays, half of it.
* A thread reads 16 bytes at once, 8 values of 16 bits: fewer values than that waste loads.
* About 64 KiB of reads under way in each SM keep the memory busy (measured on an H200). Short rows
  have as many because an SM runs several programs. A row that fills the SM leaves it idle between
  two rows, unless the next one comes through shared memory meanwhile (`stages`).
* A second read from the L2 cache costs no memory bandwidth, but L2 bandwidth: the last resort.
"""

import dataclasses
import math

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton.launch import Gpu, local_gpu


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One way to run a kernel.

    Attributes:
      block: columns of a tile, a power of two. Where it is less than a row, the row is looped over.
      warps: of 32 threads, in a program.
      tile_rows: rows of a tile, a power of two.
      programs: programs that share the rows of a norm's backward.
      stages: rows under way in a norm's backward; 1 for no prefetch.
      hold_params: a norm's backward keeps scale and bias in registers, and does not read them again
        for each row.
    """

    block: int
    warps: int
    tile_rows: int = 1
    programs: int = 1
    stages: int = 1
    hold_params: bool = True

    def is_looped(self, spec: Spec) -> bool:
        """Whether a row is more than one tile."""
        return self.block < spec.cols

    def grid(self, spec: Spec) -> tuple[int, ...]:
        """Programs of a kernel in which each has rows of its own and loops over their columns."""
        return (math.ceil(spec.rows / self.tile_rows),)

    def persistent_grid(self, spec: Spec) -> tuple[int, int]:
        """Programs of a norm's backward: over the rows, and over the blocks of a row."""
        col_blocks = math.ceil(spec.cols / self.block)
        row_programs = min(max(1, self.programs // col_blocks), *self.grid(spec))
        return row_programs, col_blocks


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a table: for rows of up to `cols` columns; None is any number.

    Attributes:
      tile: elements of a tile. Rows of fewer elements share it.
      warps: of 32 threads, in a program.
      row_bytes: only for rows of up to so many bytes, in the wider dtype.
      per_sm, stages, hold_params: for norms' backwards; see `Schedule`.
    """

    cols: int | None
    tile: int
    warps: int
    row_bytes: int | None = None
    per_sm: int = 1
    stages: int = 1
    hold_params: bool = True

    def fits(self, spec: Spec) -> bool:
        return (self.cols is None or spec.cols <= self.cols) and (
            self.row_bytes is None or spec.cols * _itemsize(spec) <= self.row_bytes
        )


FORWARD = (
    # 16 values in a thread: two loads under way, and 4 or more programs in an SM.
    Line(2048, tile=2048, warps=4),
    Line(4096, tile=4096, warps=8),
    Line(8192, tile=8192, warps=16),
    # 32 values: 512 threads have room for them with two programs in an SM, 1024 with one.
    Line(16384, tile=16384, warps=16),
    Line(32768, tile=32768, warps=32),
    # The second read finds the row in the L2 cache: all rows under way are 1/2 of it or less.
    Line(None, tile=8192, warps=16),
)

SOFTMAX_BACKWARD = (
    # As above, with two arrays.
    Line(1024, tile=1024, warps=4),
    Line(2048, tile=2048, warps=8),
    Line(8192, tile=8192, warps=16),
    Line(16384, tile=16384, warps=32),
    # Two values of 16 bits in a register, until they are computed with.
    Line(32768, tile=32768, warps=32, row_bytes=65536),
    Line(None, tile=8192, warps=16),
)

NORM_BACKWARD = (
    # 8 values of each array, of the parameters and of their sums: 64 registers, 1024 threads an SM.
    Line(1024, tile=1024, warps=4, per_sm=8),
    Line(2048, tile=2048, warps=8, per_sm=4),
    Line(4096, tile=4096, warps=16, per_sm=2),
    # 16 values: one program in an SM, which reads ahead.
    Line(8192, tile=8192, warps=16, stages=3),
    # No registers are left for the parameters: they come from the L1 cache. They are loads like
    # any other, so that reading ahead would put them into shared memory.
    Line(16384, tile=16384, warps=32, hold_params=False),
    # The sums fit in registers by blocks of columns alone, so that a row's means come first.
    Line(None, tile=2048, warps=8, per_sm=4),
)


def choose(spec: Spec, gpu: Gpu | None = None) -> Schedule:
    """The schedule for `spec`: that of the first line of its table that fits."""
    gpu = gpu or local_gpu()
    line = next(line for line in _table(spec) if line.fits(spec))
    block = line.tile if line.cols is None else min(line.tile, _power_of_2_from(spec.cols))
    return Schedule(
        block=block,
        warps=line.warps,
        tile_rows=_tile_rows(line.tile // block, spec, gpu),
        programs=line.per_sm * gpu.sms,
        stages=_stages(line, block, spec, gpu),
        hold_params=line.hold_params,
    )


def _table(spec: Spec) -> tuple[Line, ...]:
    if spec.direction == "fwd":
        return FORWARD
    return NORM_BACKWARD if spec.op == "norm" else SOFTMAX_BACKWARD


def _tile_rows(most: int, spec: Spec, gpu: Gpu) -> int:
    """Rows of a tile: few rows are spread over all SMs first."""
    return min(most, _power_of_2_from(math.ceil(spec.rows / gpu.sms)))


def _stages(line: Line, block: int, spec: Spec, gpu: Gpu) -> int:
    """As many rows under way as the shared memory holds; 8 KiB of it are for reductions."""
    saved = spec.y_dtype if spec.saved == "output" else spec.x_dtype
    row = block * (saved.itemsize + spec.y_dtype.itemsize)
    return max(1, min(line.stages, (gpu.smem - 8192) // row))


def _itemsize(spec: Spec) -> int:
    return max(spec.x_dtype.itemsize, spec.y_dtype.itemsize)


def _power_of_2_from(n: int) -> int:
    """The smallest power of two that is `n` or more."""
    return 1 << (n - 1).bit_length()
