"""Advice to compute a loss by one of jaxnorm's losses of a linear layer, which save no logits.

The result of a matmul counts as logits if it has more than twice as many classes (result columns)
as features. If the loss of a position (a row of logits) depends only on this row,
`jaxnorm.linear_loss` can compute it. A specific loss, such as
`jaxnorm.linear_softmax_cross_entropy`, is advised instead if it returns the same numbers.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxnorm.tools import values
from jaxnorm.tools.kept_arrays import CUSTOM, NAMING, STACKED, Program, Value, reached
from jaxnorm.tools.loss_values import Loss
from jaxnorm.tools.values import Head, Rows, stored

# Primitives that return the elements of their operand in another shape, order or dtype.
_COPYING = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose", *NAMING}

# Primitives that add or copy elements. A scan may add the results of its iterations.
_SUMS = {"add", "add_any", "neg", "reduce_sum", "scan", "sub", STACKED, *_COPYING}


class Advice(NamedTuple):
    """A change to a line of the user's code that makes the forward pass save fewer bytes.

    Attributes:
      function: name of the function to use.
      place: the file name and the number of the line to change, ``"file.py:12"``.
      template: the instruction, with ``{at}`` in place of "at file.py:12".
      members: the arrays that are no longer saved if the user follows the advice.
      instead: number of bytes of the arrays that are then saved instead of `members`.
      runs: number of times that the line runs.
    """

    function: str
    place: str
    template: str
    members: Sequence[Value]
    instead: int
    runs: int

    @property
    def sentence(self) -> str:
        return f"{self.function}: {self.template.format(at=f'at {self.place}')}"

    @property
    def saves(self) -> int:
        return sum(v.bytes for v in self.members) - self.instead


@np.errstate(all="ignore")
def advice(program: Program, forward: Callable[[], Program]) -> dict[Value, tuple[Advice, int]]:
    """Return a dict that maps saved arrays to pairs: advice not to save the array, and freed bytes.

    `forward` returns the program that is differentiated, in which calls of functions with custom
    derivatives are single equations.

    Arrays without advice are not in the dict. If other arrays are saved instead, their bytes are
    deducted from the freed bytes: first from the largest freed array, then from the next largest
    one, and so on.
    """
    found: dict[Value, tuple[Advice, int]] = {}
    for one in _losses(program, forward):
        instead = one.instead
        for value in sorted(one.members, key=lambda v: -v.bytes):
            in_its_place = min(instead, value.bytes)
            instead -= in_its_place
            if value not in found and value.bytes > in_its_place:
                found[value] = one, value.bytes - in_its_place
    return found


class _Replaced(NamedTuple):
    """A part of the program that a linear loss can compute.

    Attributes:
      function: name of the linear loss.
      head: the linear layer that computes the logits.
      cuts: the results of the part.
      rows: the positions of each array in the part; see `values.positions`.
      options: a dict that maps names of the linear loss's arguments to their source text.
      is_summed: True if the program uses only a sum of the results over the positions.
    """

    function: str
    head: Head
    cuts: Sequence[Value]
    rows: Rows
    options: dict[str, str]
    is_summed: bool

    def is_in_order(self) -> bool:
        """Return True if the results have the logits' positions in order; some may be absent."""
        numbers = [stored(self.rows[v]).ravel() for v in self.cuts]
        return bool(numbers) and all(np.all(np.diff(n) >= 0) for n in numbers)


def _losses(program: Program, forward: Callable[[], Program]) -> Iterator[Advice]:
    """Yield advice for each matmul whose result is not saved if a linear loss is used."""
    heads = [h for v in program.values if v in program.live and (h := _head(v)) is not None]
    for head in heads:
        if head.logits.is_active and head.classes**2 > 2 * head.weight.size:
            parts = filter(_Replaced.is_in_order, _replaced(head, heads, program, forward))
            found = [_advice(part, program) for part in itertools.islice(parts, 1)]
            yield from (one for one in found if one.saves > 0)


def _head(product: Value) -> Head | None:
    """Return the linear layer whose matmul computes an array; None if there is no such layer.

    The matmul must contract one axis and have no batch axes, and its weight must have two axes. The
    weight may be the first operand, as in `jax.vmap` of ``weight @ x``.
    """
    if product.made_by != "dot_general":
        return None
    over, batch = product.equation.params["dimension_numbers"]
    if any(batch) or len(over[0]) != 1:
        return None
    first, second = (len(v.shape) == 2 for v in product.operands)
    if first and second:
        first = _is_given(product.operands[0]) and not _is_given(product.operands[1])
    return Head(product, 0 if first else len(product.shape) - 1) if first or second else None


def _is_given(value: Value) -> bool:
    """Return True for an argument of the program, a literal, or a copy of either."""
    return _copies(value)[-1].made_by in ("argument", "layer's", "literal")


def _copies(value: Value) -> list[Value]:
    """Return a list: a value, the array that it copies or broadcasts, and so on to the original."""
    found = [value]
    while found[-1].made_by in _COPYING:
        found.append(found[-1].operands[0])
    return found


# ----------------------------------------------------------------------- the loss of the logits


def _replaced(
    head: Head, heads: Sequence[Head], program: Program, forward: Callable[[], Program]
) -> Iterator[_Replaced]:
    """Yield parts of the program that a linear loss can compute from a head's logits."""
    teachers = [h for h in heads if h.logits.shape == head.logits.shape and not h.logits.is_active]
    for pair in ([head], *([head, teacher] for teacher in teachers)):
        loss = Loss(pair, values.positions(program, pair))
        for function, found, entropies, options in loss.found():
            inside = _inside(head, found | entropies, lambda v: _live(v, program))
            cuts = [v for v in inside if v in found or v in entropies]
            is_whole = not found.isdisjoint(cuts) and inside.keys() <= loss.rows.keys()
            if is_whole and not _has_custom_derivative(head.logits, forward()):
                is_summed = entropies.isdisjoint(cuts) and _are_summed(cuts, loss.rows, program)
                if is_summed and "log_prob" in function:
                    function = "linear_softmax_cross_entropy"
                yield _Replaced(function, head, cuts, loss.rows, options, is_summed)
    # linear_loss can compute everything that is computed position by position.
    rows = values.positions(program, [head])
    after = {v: [u for u in _live(v, program) if u not in rows] for v in rows}
    cuts = [v for v in rows if after[v]]
    wide = [v for v in cuts if 4 * v.size > head.logits.size]
    if all(values.sums_classes(u, rows[v]) for v in wide for u in after[v]):
        yield _Replaced("linear_loss", head, cuts, rows, {}, _are_summed(cuts, rows, program))


def _has_custom_derivative(logits: Value, forward: Program) -> bool:
    """Return True if the argument of a function with a custom derivative depends on the logits.

    A specific loss returns the same numbers as this function, but may have other gradients.
    """
    before = reached([v for v in forward.values if v.made_by in CUSTOM], lambda v: v.operands)
    key = logits.source, logits.shape
    return any((v.source, v.shape) == key for v in before if v.made_by == logits.made_by)


def _inside(
    head: Head, cuts: Collection[Value], users: Callable[[Value], Sequence[Value]]
) -> dict[Value, None]:
    """Return the logits and the arrays computed from them, up to and including `cuts`."""
    return reached([head.logits], lambda v: () if v in cuts else users(v))


def _live(value: Value, program: Program) -> list[Value]:
    return [v for v in value.users if v in program.live]


def _are_summed(losses: Sequence[Value], rows: Rows, program: Program) -> bool:
    """Return True if each position has one loss, and only a weighted sum of the losses is used."""

    def is_linear(value: Value) -> bool:
        of_losses = [v.is_active for v in value.operands]
        if value.made_by == "div":
            return of_losses == [True, False]
        is_product = value.made_by in ("mul", "select_n")
        return value.made_by in _SUMS or (is_product and sum(of_losses) == 1)

    after = reached(losses, lambda v: _live(v, program) if v.size > 1 else [])
    is_one = len(losses) == 1 and bool(np.all(np.diff(stored(rows[losses[0]]).ravel()) > 0))
    return is_one and all(v in losses or is_linear(v) for v in after)


# ----------------------------------------------------------------------------- what it saves


def _advice(part: _Replaced, program: Program) -> Advice:
    """Return the advice to compute a part of the program by a linear loss.

    If a linear loss returns a sum or a mean over positions, it saves the gradients of its operands.
    Otherwise, it saves the operands.
    """
    function, head, cuts, rows, options, is_summed = part
    inside = _inside(head, cuts, lambda v: v.users)
    shapes = {v.shape for v in inside if 4 * v.size > head.logits.size}
    for value in reversed(program.values):
        users = {v for v in value.users if v.made_by != STACKED or v in program.live}
        is_own = users <= inside.keys() if users else value.shape in shapes
        if is_own and not value.is_active and (is_summed or _is_of_integers(value)):
            inside[value] = None
    operands = [v for a in inside if a in rows for v in a.operands if v not in inside]
    instead = 0
    for copies in {_copies(v)[-1]: _copies(v) for v in operands}.values():
        operand = copies[0]
        saved = [v for v in copies if v in program.by_origin]
        if is_summed:
            users = {u for v in saved for u in v.users if u.made_by != STACKED}
            # A saved result of a jaxnorm function is ignored, because it may be saved only for that
            # function's own derivative.
            own = [v for v in saved if not v.made_by.startswith("jaxnorm.")]
            is_free = not operand.is_active or (bool(own) and users <= {*inside, *copies})
        else:
            is_free = bool(saved) or _is_given(operand) or _is_of_integers(operand)
        instead += 0 if is_free else min(v.bytes for v in copies) * head.logits.layers
    members = dict.fromkeys(program.by_origin[v] for v in inside if v in program.by_origin)
    if _copies(head.weight)[-1].dtype.itemsize > head.weight.dtype.itemsize:
        options = options | {"dtype": head.weight.dtype.name}
    if not is_summed and function != "linear_log_prob_and_entropy":
        options = options | {"reduction": '"none"'}
    is_any, text = function == "linear_loss", [f"{name}={text}" for name, text in options.items()]
    is_sliced = any(stored(rows[v]).size * head.classes < head.logits.size for v in cuts)
    how = (
        f"replace the loss {{at}} and the matmul before it with jaxnorm.{function}"
        + "(fun, x, weight, *rows)" * is_any
        + f", with {' and '.join(text)}" * bool(text)
        + ", and slice the matmul's input" * is_sliced
        + " (it returns the mean: masks and weights go into where=)" * is_summed
        + "; fun(logits, *row) computes the same for one position" * is_any
        + f": only {'gradients' if is_summed else 'its operands'} are saved, and no logits"
    )
    place = cuts[-1].source.partition(" ")[0] or "an unknown line"
    return Advice(function, place, how, [*members], instead, head.logits.layers)


def _is_of_integers(value: Value) -> bool:
    """Return True if an array is computed from integers and literals alone."""
    sources = (v for v in reached([value], lambda v: v.operands) if not v.operands)
    return all(v.made_by == "literal" or not jnp.issubdtype(v.dtype, jnp.inexact) for v in sources)
