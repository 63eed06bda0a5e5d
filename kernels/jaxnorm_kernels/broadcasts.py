"""How rows of x map to rows of an operand that is broadcast to x."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Shared:
    """How rows of x map to rows of an operand that is broadcast to x: a mask, a bias or a table.

    Attributes:
      segments: a pair (size, has_axis) for each axis of x that is not normalised. has_axis is False
        if the operand is broadcast along this axis. Adjacent axes with equal has_axis are merged
        into one segment, whose size is the product of their sizes. The rows of the operand are
        numbered in row-major order of the axes for which has_axis is True.
      has_columns: True if the operand has the shape ``(n, cols)``, False if it has the shape ``(n,
        1)``.
    """

    segments: tuple[tuple[int, bool], ...]
    has_columns: bool

    @property
    def rows(self) -> int:
        """Number of rows of the operand."""
        return math.prod(size for size, has_axis in self.segments if has_axis)

    @property
    def sharing(self) -> int:
        """Number of rows of x that use the same row of the operand."""
        return math.prod(size for size, has_axis in self.segments if not has_axis)

    @property
    def run(self) -> int:
        """Number of consecutive rows of x that form a *run*: the size of the last segment.

        If the operand is broadcast along this segment, all rows of a run use the same row of the
        operand. Otherwise, the rows of a run use consecutive rows of the operand.
        """
        return self.segments[-1][0] if self.segments else 1
