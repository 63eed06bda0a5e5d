"""How the kernel of a norm with a product runs: a table; the first line that fits is taken.

The sizes that matter, and how the lines below use them:

* For each element of the tile's inner axis, a tile (m, n) of y reads m + n numbers and multiplies
  m n pairs. An A100's multiprocessor multiplies 1024 pairs in a cycle and reads 32 numbers of 16
  bits from the L2 cache: a tile of 128 by 128 takes 16 cycles and 8, one of 64 by 64 takes 4 and 4.
  So the largest tile whose sums the registers hold is best, where there are enough of them.
* Tiles are fewer than multiprocessors where y is small. Then smaller tiles keep all of them busy.
  But where no more than 1 in 8 would be idle, the larger tile is better: 128 of them on the 132 of
  an H100 took 0.82 (1024 x 1024 x 1024) to 0.97 (2048 x 2048 x 2048) of the time of smaller ones.
* Of few rows the product costs what reading weight does, and about 64 KiB of reads under way in
  each multiprocessor keep the memory busy.
* What is read ahead lies in shared memory, of which GPUs have 99 to 227 KiB for a program: the
  tiles' inner axis is halved until at least three of them fit, for one is being multiplied.

Timed on an H100 (`benchmarks/sweeps/triton_linear.py`); what is said of other GPUs is from these
sizes, and compiled.
"""

import dataclasses
import math

from jaxnorm_kernels.specs import LinearSpec
from jaxnorm_kernels.triton.launch import Gpu, local_gpu

_REGISTERS = 2**16  # of a multiprocessor

# Rows of tiles of y that programs go down before they go right. 100 to 216 programs run at a time:
# of 16 by 7 tiles of 128 by 256, or of 16 by 13 of 128 by 128, they read the fewest different ones.
_GROUP = 16

# Of all multiprocessors.
_BUSY = 7 / 8

# Of a tile of a tensor core's.
_LEAST_ROWS = 16
# The shortest inner axis: two steps of a tensor core, and 64 bytes of a row of x at once.
_LEAST_BLOCK = 32
# A tile is multiplied, another one waits, and a third one is on its way.
_LEAST_STAGES = 3
# Of each program's shared memory, by CUDA; what a program may have is all but that of one.
_RESERVED_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class LinearSchedule:
    """One way to run the kernel.

    Attributes:
      tile_rows, tile_features: of a tile of y; powers of two, 16 or more.
      block: columns of x that are multiplied at a time, a power of two, 16 or more.
      warps: of 32 threads, in a program.
      stages: tiles of x and weight that a program has under way.
      group: tiles of rows that programs go down before they go right.
      registers: that a thread may have.
    """

    tile_rows: int
    tile_features: int
    block: int
    warps: int
    stages: int
    group: int = _GROUP
    registers: int = 255

    def grid(self, spec: LinearSpec) -> tuple[int]:
        """A program for each tile of y."""
        return (_tiles(self.tile_rows, self.tile_features, spec),)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
      tile_rows, tile_features, block, stages: as of `LinearSchedule`; at most, the last two.
      warps: of 32 threads, in a program.
      per_sm: programs that a multiprocessor has registers and shared memory for.
      unaligned: only where rows of x or weight are no multiple of 8 bytes.
    """

    tile_rows: int
    tile_features: int
    block: int
    warps: int
    per_sm: int
    stages: int
    unaligned: bool = False

    def fits(self, spec: LinearSpec, gpu: Gpu) -> bool:
        """Whether no smaller tile has all rows, and nearly every multiprocessor has a tile."""
        return (
            (not self.unaligned or _is_unaligned(spec))
            and (spec.rows > self.tile_rows // 2 or self.tile_rows == _LEAST_ROWS)
            and _tiles(self.tile_rows, self.tile_features, spec) >= _BUSY * gpu.sms
        )


LINES = (
    # Elements are read one by one, each at an address of its own and through a register, or by two:
    # there are no registers to read ahead.
    Line(128, 128, block=32, warps=8, per_sm=1, stages=1, unaligned=True),
    Line(32, 64, block=32, warps=4, per_sm=4, stages=2, unaligned=True),
    # 128 sums in each of 256 threads: the most that leave room for addresses.
    Line(128, 256, block=64, warps=8, per_sm=1, stages=4),
    # As many in 128 threads, twice in a multiprocessor: one multiplies while another one begins.
    Line(128, 128, block=64, warps=4, per_sm=2, stages=4),
    # Then fewer sums, and more programs that begin while others multiply.
    Line(64, 128, block=64, warps=4, per_sm=2, stages=4),
    Line(64, 64, block=64, warps=4, per_sm=3, stages=4),
    # Few rows: reads of weight by 128 bytes and more, 16 KiB at a time.
    Line(32, 64, block=128, warps=4, per_sm=2, stages=4),
    Line(16, 64, block=128, warps=4, per_sm=2, stages=4),
    # And few features: programs with less to read, but more of them.
    Line(16, 32, block=128, warps=4, per_sm=2, stages=4),
)


def choose(spec: LinearSpec, gpu: Gpu | None = None) -> LinearSchedule:
    """The schedule for `spec` on `gpu`, or the one at hand."""
    gpu = gpu or local_gpu()
    return of_line(choose_line(spec, gpu), spec, gpu)


def choose_line(spec: LinearSpec, gpu: Gpu) -> Line:
    """The first line that fits; the last one, of the smallest tiles, where none does."""
    return next((line for line in LINES if line.fits(spec, gpu)), LINES[-1])


def of_line(line: Line, spec: LinearSpec, gpu: Gpu) -> LinearSchedule:
    """What a line means for the dtypes of `spec` and the shared memory of `gpu`."""
    room = (gpu.smem + _RESERVED_BYTES) // line.per_sm - _RESERVED_BYTES
    block = line.block
    while block > _LEAST_BLOCK and _stages(line, block, room, spec, gpu) < _LEAST_STAGES:
        block //= 2
    registers = _REGISTERS // (32 * line.warps * line.per_sm)
    return LinearSchedule(
        line.tile_rows,
        line.tile_features,
        block,
        line.warps,
        min(line.stages, max(2, _stages(line, block, room, spec, gpu))),
        registers=min(255, registers // 8 * 8),  # They are given out by 8.
    )


def _stages(line: Line, block: int, room: int, spec: LinearSpec, gpu: Gpu) -> int:
    """As many as there is shared memory for: it holds the tiles of all but one.

    Hopper's tensor cores read from there, and one more tile is kept meanwhile.
    """
    of_all = block * (line.tile_rows + line.tile_features) * spec.product_dtype.itemsize
    return room // of_all + (gpu.capability < 90)


def _is_unaligned(spec: LinearSpec) -> bool:
    return any(size * spec.product_dtype.itemsize % 8 for size in (spec.cols, spec.features))


def _tiles(tile_rows: int, tile_features: int, spec: LinearSpec) -> int:
    return math.ceil(spec.rows / tile_rows) * math.ceil(spec.features / tile_features)
