"""Operands that are broadcast among the rows of x: a mask or a bias of logits, a rotation's tables.

A kernel reads their rows as they are, where `Shared` says: the number of a row of x has a digit for
each axis, and the operand's rows have some of them.
"""

import dataclasses

import triton
import triton.language as tl

from jaxnorm_kernels.specs import Shared

#: How to renumber: for each axis the divisor that its digit has in one number, its size, and the
#: factor that it has in another.
Digits = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Where the rows of x find theirs in such an operand.

    Attributes:
      has_columns: it is ``(n, cols)``; else ``(n, 1)``.
      row: from a row of x to its row.
      of_row, of_nth: from its row, and from a number among the rows of x that share that one, to
        what they add to the number of a row of x.
    """

    has_columns: bool
    row: Digits
    of_row: Digits
    of_nth: Digits


def of(shared: Shared | None) -> Operand:
    """That of a call."""
    assert shared is not None  # or `why_unsupported` refuses it
    row: Digits = ()
    parts: dict[bool, Digits] = {True: (), False: ()}
    of_x, inside = 1, {True: 1, False: 1}
    for size, has_axis in reversed(shared.segments):
        row += (of_x, size, inside[True]) if has_axis else ()
        parts[has_axis] += (inside[has_axis], size, of_x)
        of_x, inside[has_axis] = of_x * size, inside[has_axis] * size
    return Operand(shared.has_columns, row, of_row=parts[True], of_nth=parts[False])


@triton.jit
def renumbered(number, digits: tl.constexpr):
    """The number that has these digits of `number`."""
    result = number * 0
    for i in tl.static_range(len(digits) // 3):
        result += number // digits[3 * i] % digits[3 * i + 1] * digits[3 * i + 2]
    return result
