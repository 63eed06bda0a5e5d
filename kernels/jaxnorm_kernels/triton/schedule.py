"""How a kernel runs: tables; the first line that fits is taken. The reasons are hardware.

The sizes that matter, and how the lines below use them:

* A multiprocessor (SM) has 64 K registers: 64 for each of 1024 threads, which most lines have in an
  SM. A float32 value of a row costs one, so that a thread of a forward pass holds up to 32 values,
  and one of a backward pass, with two arrays and their sums over the rows, 8 or 16.
* A thread reads 16 bytes at once, 8 values of 16 bits: fewer values than that waste loads.
* About 64 KiB of reads under way in each SM keep the memory busy (measured on an H200). Short rows
  have as many because an SM runs several programs. A row that fills the SM leaves the memory idle
  between two rows, unless the next one comes through shared memory meanwhile (`stages`).
* A second read from the L2 cache costs no memory bandwidth, but L2 bandwidth: the last resort.

Timed on one H200, with Triton 3.6: softmax and LayerNorm as they are here; of RMSNorm, the forward
in 16 bits and the backward as they were before their present lines.
"""

import dataclasses
import math

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton.launch import Gpu, local_gpu

_REGISTERS = 2**16  # of an SM


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
      programs: programs that share the rows of a norm's backward.
      stages: tiles under way in a norm's backward; 1 for no prefetch.
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

    def tiles(self, spec: Spec) -> dict[str, int]:
        """What a kernel is compiled for."""
        held = {} if self.is_looped(spec) else {"pieces": self.pieces}
        return {"tile_rows": self.tile_rows, "block": self.block, **held}

    def grid(self, spec: Spec) -> tuple[int, ...]:
        """Programs of a kernel in which each has a tile of rows."""
        return (math.ceil(spec.rows / self.tile_rows),)

    def grid_in_turns(self, spec: Spec) -> tuple[int, ...]:
        """Programs of a kernel in which each has several tiles of rows, in turn, if it reads ahead."""
        (tiles,) = self.grid(spec)
        return (min(self.programs, tiles) if self.stages > 1 else tiles,)

    def persistent_grid(self, spec: Spec) -> tuple[int, int]:
        """Programs of a norm's backward: over the blocks of a row, and over the rows."""
        col_blocks = math.ceil(spec.cols / (self.pieces * self.block))
        row_programs = min(max(1, self.programs // col_blocks), *self.grid(spec))
        return col_blocks, row_programs


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a table: for rows of up to `cols` columns; None is any number.

    Attributes:
      tile: elements of a tile. Rows of fewer elements share it.
      warps: of 32 threads, in a program.
      per_sm: programs that an SM has registers for.
      stages, hold_params: for norms' backwards; see `Schedule`.
      bias: only with a bias.
      itemsize: only for x of so many bytes.
    """

    cols: int | None
    tile: int
    warps: int
    per_sm: int
    stages: int = 1
    hold_params: bool = True
    bias: bool = False
    itemsize: int | None = None

    def fits(self, spec: Spec) -> bool:
        return (
            (self.cols is None or spec.cols <= self.cols)
            and (not self.bias or spec.bias_dtype is not None)
            and self.itemsize in (None, spec.x_dtype.itemsize)
        )


SOFTMAX_FORWARD = (
    # 16 values in a thread: two loads under way, and many programs in an SM.
    Line(2048, tile=2048, warps=4, per_sm=8),
    Line(4096, tile=4096, warps=8, per_sm=4),
    Line(8192, tile=8192, warps=16, per_sm=2),
    # 32 values, in 64 registers.
    Line(16384, tile=16384, warps=16, per_sm=2),
    Line(32768, tile=32768, warps=32, per_sm=1),
    # The second read finds the row in the L2 cache, which has room for all rows under way.
    Line(None, tile=8192, warps=16, per_sm=2),
)

SOFTMAX_BACKWARD = (
    # 8 values of two arrays, then 16.
    Line(1024, tile=1024, warps=4, per_sm=8),
    Line(2048, tile=2048, warps=8, per_sm=4),
    Line(4096, tile=4096, warps=8, per_sm=4),
    Line(8192, tile=8192, warps=16, per_sm=2),
    Line(16384, tile=16384, warps=32, per_sm=1),
    # 8 values again: each has an address of its own where a row's length is odd.
    Line(None, tile=4096, warps=16, per_sm=2),
)

NORM_FORWARD = (
    # A row takes longer than softmax's: its parameters come after its sums. So more is under way,
    # 64 bytes in a thread.
    Line(2048, tile=2048, warps=4, per_sm=8),
    Line(4096, tile=4096, warps=4, per_sm=8, itemsize=2),
    Line(8192, tile=8192, warps=8, per_sm=4, itemsize=2),
    Line(4096, tile=4096, warps=8, per_sm=4),
    Line(8192, tile=8192, warps=16, per_sm=2),
    Line(16384, tile=16384, warps=16, per_sm=2),
    Line(None, tile=8192, warps=16, per_sm=2),
)

NORM_BACKWARD = (
    # 8 values of each array, of the parameters and of their sums: with those of a bias more than
    # fit in 64 registers.
    Line(1024, tile=1024, warps=4, per_sm=6, bias=True),
    Line(2048, tile=2048, warps=8, per_sm=3, bias=True),
    Line(1024, tile=1024, warps=4, per_sm=8),
    Line(2048, tile=2048, warps=8, per_sm=4),
    Line(4096, tile=4096, warps=16, per_sm=2),
    # 16 values: one program in an SM, which reads ahead.
    Line(8192, tile=8192, warps=16, per_sm=1, stages=3),
    # No registers are left for the parameters: they come from the L1 cache. They are loads like
    # any other, so that reading ahead would put them into shared memory. What spills costs less
    # than the second read of the line below.
    Line(16384, tile=16384, warps=32, per_sm=1, hold_params=False),
    # The sums fit in registers by blocks of columns alone, so that a row's means come first.
    Line(None, tile=2048, warps=8, per_sm=4),
)

_TABLES = {
    ("softmax", "fwd"): SOFTMAX_FORWARD,
    ("softmax", "bwd"): SOFTMAX_BACKWARD,
    ("log_softmax", "fwd"): SOFTMAX_FORWARD,
    ("log_softmax", "bwd"): SOFTMAX_BACKWARD,
    ("norm", "fwd"): NORM_FORWARD,
    ("norm", "bwd"): NORM_BACKWARD,
}


def choose(spec: Spec, gpu: Gpu | None = None) -> Schedule:
    """The schedule for `spec` on `gpu`, or the one at hand."""
    return of_line(choose_line(spec), spec, gpu or local_gpu())


def choose_line(spec: Spec) -> Line:
    """The first line of its table that fits `spec`."""
    return next(line for line in _TABLES[spec.op, spec.direction] if line.fits(spec))


def of_line(line: Line, spec: Spec, gpu: Gpu) -> Schedule:
    """What a line of a table means for the rows of `spec`."""
    block, pieces = (line.tile, 1) if line.cols is None else _held(line, spec)
    tile_rows = _tile_rows(line.tile // (pieces * block), spec, gpu)
    return Schedule(
        block=block,
        pieces=pieces,
        warps=line.warps,
        tile_rows=tile_rows,
        registers=min(255, _REGISTERS // (32 * line.warps * line.per_sm)),
        programs=line.per_sm * gpu.sms,
        stages=_stages(line, pieces * block * tile_rows, spec, gpu),
        hold_params=line.hold_params,
    )


def _held(line: Line, spec: Spec) -> tuple[int, int]:
    """Block and pieces that hold a row: as little beyond its end as up to seven pieces allow.

    A piece is 16 bytes for each thread at least; what is shorter is one piece.
    """
    vectors = 32 * line.warps * (16 // min(spec.x_dtype.itemsize, spec.y_dtype.itemsize))
    block = _power_of_2_from(spec.cols)
    least = max(block // 8, vectors)
    if block <= least:
        return block, 1
    pieces = math.ceil(spec.cols / least)
    while pieces % 2 == 0:
        least, pieces = 2 * least, pieces // 2
    return least, pieces


def _tile_rows(most: int, spec: Spec, gpu: Gpu) -> int:
    """Rows of a tile: few rows are spread over all SMs first."""
    return min(most, _power_of_2_from(math.ceil(spec.rows / gpu.sms)))


def _stages(line: Line, tile: int, spec: Spec, gpu: Gpu) -> int:
    """As many tiles under way as there is shared memory for: it holds all but the first.

    5 bytes of it for each element are for exchanges between threads.
    """
    saved = spec.y_dtype if spec.saved == "output" else spec.x_dtype
    read = (spec.x_dtype,) if spec.direction == "fwd" else (saved, spec.y_dtype)
    room = gpu.smem // line.per_sm - 5 * tile
    return min(line.stages, 1 + max(0, room) // (tile * sum(t.itemsize for t in read)))


def _power_of_2_from(n: int) -> int:
    """The smallest power of two that is `n` or more."""
    return 1 << (n - 1).bit_length()
