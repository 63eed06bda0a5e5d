"""What would not keep logits, their exponentials or a copy of them: jaxnorm's cross-entropies.

A cross-entropy of integer labels is known by the logarithm of a sum of exponentials over a row, and
an element that is picked from that row: by a gather, or a product with a one-hot array.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from jaxnorm.tools import elementwise
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Value, origin, reached

_FUNCTION = "softmax_cross_entropy_with_integer_labels"
# Of a function of logits, that of linear ones.
_LINEAR = {
    _FUNCTION: "linear_softmax_cross_entropy",
    "log_prob_and_entropy": "linear_log_prob_and_entropy",
}

# What a cross-entropy does to each element of a row, by itself and by numbers of the row.
_STEPS = {"convert_element_type", "div", "eq", "exp", "log", "mul", "neg", "stop_gradient", "sub"}

# What takes whole rows, and keeps nothing of their size; the loss of a linear layer has no rows for
# an argmax, either.
_REDUCTIONS = ("gather", "reduce_", STACKED)
_OF_LOGITS = (*_REDUCTIONS, "argmax")


@dataclasses.dataclass(frozen=True)
class Loss:
    """A cross-entropy, or another function of logits and labels.

    Attributes:
      logits: before they are cast.
      inside: what is made of them, in their size, by and for the loss alone.
      source: its line.
      ours: the name of jaxnorm's function, where it is one already.
    """

    logits: Value
    inside: Sequence[Value]
    source: str
    ours: str | None


def losses(
    kept: Sequence[Value], by_origin: Mapping[int, Value]
) -> Iterator[tuple[list[Value], int, str]]:
    """Arrays of cross-entropies, the bytes that jaxnorm's would keep in their place, a sentence."""
    for loss in _found(kept):
        whole, linear = _of_logits(loss, by_origin), _of_linear(loss, by_origin)
        if linear is None or _saves(whole) >= _saves(linear):
            yield whole
        else:
            yield linear


def _saves(advice: tuple[list[Value], int, str]) -> int:
    members, lacking, _ = advice
    return sum(v.bytes for v in members) - lacking


def _of_logits(loss: Loss, by_origin: Mapping[int, Value]) -> tuple[list[Value], int, str]:
    """The loss of logits, which keeps these as they were before a cast."""
    logits = loss.logits
    is_kept = id(logits) in by_origin or logits.made_by in elementwise.GIVEN
    lacking = 0 if is_kept else logits.bytes * logits.layers
    if loss.ours is not None:
        how = f"give the one of {loss.source} its logits before they are cast"
    else:
        how = f"in place of the loss of {loss.source}, it keeps the logits, {logits.dtype.name}"
    return _members(loss, by_origin), lacking, f"{loss.ours or _FUNCTION}: {how}, alone"


def _members(loss: Loss, by_origin: Mapping[int, Value]) -> list[Value]:
    return [by_origin[id(v)] for v in loss.inside if id(v) in by_origin]


# -------------------------------------------------------------------------------- which losses


def _found(kept: Sequence[Value]) -> Iterator[Loss]:
    done: set[int] = set()
    for value in map(origin, kept):
        loss = _ours(value) or _plain(value)
        if loss is not None and id(loss.logits) not in done:
            done.add(id(loss.logits))
            yield loss


def _ours(value: Value) -> Loss | None:
    for taker in elementwise.takers(value):
        name = taker.made_by.removeprefix("jaxnorm.")
        if name in _LINEAR and taker.operands and origin(taker.operands[0]) is value:
            logits = _uncast(value)
            inside = [] if logits is value else [value]
            return Loss(logits, inside, taker.source, name)
    return None


def _plain(value: Value) -> Loss | None:
    """The loss whose exponentials a value is."""
    if value.made_by != "exp":
        return None
    shifted = origin(value.operands[0])
    is_shifted = shifted.made_by == "sub" and elementwise.is_spread(shifted.operands[1])
    logits = _uncast(shifted.operands[0] if is_shifted else shifted)
    inside = _inside(logits)
    if not any(v is value for v in inside) or not _is_logarithm(value, inside):
        return None
    one_hots = _one_hots([logits, *inside])
    if not one_hots and not any(t.made_by == "gather" for v in [logits, *inside] for t in v.takers):
        return None
    if not all(_is_for_the_loss(v, inside, _OF_LOGITS) for v in inside):
        return None
    return Loss(logits, [*inside, *one_hots], value.source, None)


def _uncast(value: Value) -> Value:
    value = origin(value)
    while value.made_by == "convert_element_type":
        value = origin(value.operands[0])
    return value


def _inside(logits: Value) -> list[Value]:
    """What is made of each element of the logits, and of numbers of its row."""

    def is_step(value: Value) -> bool:
        same = [v for v in value.operands if v.size == logits.size]
        rows = [v for v in same if not elementwise.is_spread(v)]
        fits = value.made_by in (*_STEPS, *NAMING) and value.size == logits.size
        return fits and len(rows) == 1

    _, *inside = reached([logits], lambda v: filter(is_step, v.takers)).values()
    return inside


def _is_logarithm(exponential: Value, inside: Sequence[Value]) -> bool:
    """Whether a logarithm is taken of their sum over the last axis, or of their share of it."""
    last = len(exponential.shape) - 1
    sums = [t for t in elementwise.takers(exponential) if t.made_by == "reduce_sum"]
    if not any(
        s.equation is not None and tuple(s.equation.params["axes"]) == (last,) for s in sums
    ):
        return False
    picked = [t for v in inside for t in v.takers if t.made_by == "gather"]
    if any(v.made_by == "log" for v in inside) or (picked and all(map(_is_logged, picked))):
        return True
    names = (*elementwise.ELEMENTWISE, *elementwise.COPYING, "broadcast_in_dim")

    def made_of_rows(value: Value) -> list[Value]:
        is_of_row = value.size < exponential.size
        return [t for t in value.takers if is_of_row and t.made_by in names]

    return any(v.made_by == "log" for v in reached(sums, made_of_rows).values())


def _is_logged(value: Value) -> bool:
    """Whether the logarithm, and nothing else, takes a probability."""
    takers = [t for t in value.takers if t.made_by != STACKED]
    names = (*elementwise.COPYING, *NAMING)
    of_it = [t.made_by == "log" or (t.made_by in names and _is_logged(t)) for t in takers]
    return bool(of_it) and all(of_it)


def _one_hots(values: Sequence[Value]) -> list[Value]:
    """One-hot arrays that rows are multiplied by, in the dtypes that they have on the way."""
    found: dict[int, Value] = {}
    for value in values:
        for taker in value.takers:
            if taker.made_by == "mul":
                for other in map(origin, taker.operands):
                    if other is not value and _is_one_hot(other):
                        found[id(other)] = other
    return [*found.values()]


def _is_one_hot(value: Value) -> bool:
    """Labels that are compared with the numbers of the classes."""
    compared = _uncast(value)
    if compared.made_by != "eq":
        return False
    return any(v.made_by == "iota" for v in elementwise.ancestors(compared, compared.size))


def _is_for_the_loss(value: Value, inside: Collection[Value], others: tuple[str, ...]) -> bool:
    """Whether nothing but the loss takes a value, and `others`, which keep nothing of it."""
    members = {*map(id, inside)}
    for taker in value.takers:
        is_pick = taker.made_by == "mul" and any(map(_is_one_hot, map(origin, taker.operands)))
        if id(taker) not in members and not is_pick and not taker.made_by.startswith(others):
            return False
    return True


# ------------------------------------------------------------------- of which a product is part


def _of_linear(loss: Loss, by_origin: Mapping[int, Value]) -> tuple[list[Value], int, str] | None:
    """The loss of the linear layer, where nothing else takes its logits.

    It keeps the gradients of x and weight, in the place of x and weight where these are kept for
    the product alone; that of log-probabilities keeps x and weight.
    """
    path = _from_product(loss.logits)
    if path is None:
        return None
    product = path[-1]
    inside = [*path, *loss.inside]
    function = loss.ours or _FUNCTION
    if loss.ours is None and not all(_is_for_the_loss(v, inside, _REDUCTIONS) for v in inside):
        return None
    if loss.ours is not None and not all(_is_for(function, v, inside) for v in inside):
        return None
    members = [*_members(loss, by_origin), *[by_origin[id(v)] for v in path if id(v) in by_origin]]
    keeps_gradients = function == _FUNCTION
    lacking = sum(
        v.bytes * product.layers
        for v in product.operands
        if not (_goes(v, product, by_origin) if keeps_gradients else _is_kept(v, by_origin))
    )
    how = f"in place of the {'loss' if keeps_gradients else 'call'} of {loss.source} and of"
    what = "their gradients" if keeps_gradients else "that one's operands"
    sentence = f"{_LINEAR[function]}: {how} the product before it, it keeps {what}, and no logits"
    return members, lacking, sentence


def _from_product(logits: Value) -> list[Value] | None:
    """The logits, and what they are made of, to the product of rows with a weight."""
    path, value = [], logits
    while value.made_by != "dot_general":
        path.append(value)
        if value.made_by in elementwise.COPYING or value.made_by in NAMING:
            value = origin(value.operands[0])
        elif value.made_by == "add":
            rest = [v for v in value.operands if not elementwise.is_spread(v)]
            if len(rest) != 1:
                return None
            value = origin(rest[0])
        else:
            return None
    factors = elementwise.rows_and_weight(value)
    if factors is None or logits.shape[-1] not in factors[1].shape:
        return None
    return [*path, value]


def _is_for(function: str, value: Value, inside: Collection[Value]) -> bool:
    members = {*map(id, inside)}
    names = (f"jaxnorm.{function}", STACKED, *NAMING)
    return all(id(t) in members or t.made_by.startswith(names) for t in value.takers)


def _is_kept(operand: Value, by_origin: Mapping[int, Value]) -> bool:
    """Whether an operand is there for the backward, or what it is a copy of."""
    value = origin(operand)
    while id(value) not in by_origin and value.made_by in elementwise.COPYING:
        value = origin(value.operands[0])
    return id(value) in by_origin or value.made_by in elementwise.GIVEN


def _goes(operand: Value, product: Value, by_origin: Mapping[int, Value]) -> bool:
    """Whether an operand is kept, and no longer without its product."""
    value, taker = origin(operand), product
    while True:
        others = [t for t in value.takers if t is not taker and t.made_by != STACKED]
        if id(value) in by_origin:
            return not others and not value.made_by.startswith("jaxnorm.")
        if value.made_by not in elementwise.COPYING or others:
            return False
        value, taker = origin(value.operands[0]), value
