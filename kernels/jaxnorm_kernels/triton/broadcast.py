"""Operands that are broadcast over the rows of x: a mask or bias of logits, tables of a rotation.

A kernel loads their rows without expanding them; `Shared` describes the broadcast. The index of a
row of x has a digit for each axis, and the index of the operand's row has a subset of these digits.
"""

import dataclasses

import triton
import triton.language as tl

from jaxnorm_kernels.specs import Shared

#: How to convert an index: for each axis, the divisor of its digit in the given index, its size,
#: and the factor of the digit in the result.
Digits = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """How to find the row of such an operand that belongs to a row of x.

    Attributes:
      has_columns: True if the operand is ``(n, cols)``, False if it is ``(n, 1)``.
      row: converts a row of x to the operand's row.
      of_row, of_nth: the inverse. The row of x is the sum of the converted row of the operand and
        the converted number of x's row among those that share it.
    """

    has_columns: bool
    row: Digits
    of_row: Digits
    of_nth: Digits


def of(shared: Shared | None) -> Operand:
    """Return the description of an operand of a call."""
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
    """Return the number that consists of these digits of `number`."""
    result = number * 0
    for i in tl.static_range(len(digits) // 3):
        result += number // digits[3 * i] % digits[3 * i + 1] * digits[3 * i + 2]
    return result
