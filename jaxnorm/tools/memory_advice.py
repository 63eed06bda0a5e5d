"""What would not keep an array that a derivative keeps: jaxnorm's functions, `jax.checkpoint`.

Known by how the array is made and what takes it, in the graph of `kept_arrays`; norms by
`norm_advice`, cross-entropies by `loss_advice`:

    gated_linear         between activation(gate) * up and the product with a weight
    activation_linear    between activation(x) and the product with a weight
    rms_norm, layer_norm between x and x times the reciprocal root of a mean of squares
      (activation=)      between x and an activation of that, or of what jaxnorm's norm returns
    rms_norm_rope        between x and a rotation of that result, which is kept
    ..._cross_entropy    logits, their exponentials and casts, of integer labels
    linear_log_prob_...  the logits of log_prob_and_entropy, and casts of them
    softmax              exponentials, beside what they are over their sum
    jax.checkpoint       in a scan: a reshape or a cast of what is kept as well
"""

import functools
from collections.abc import Iterable, Sequence

from jaxnorm.tools import elementwise, loss_advice, norm_advice, rotation_advice
from jaxnorm.tools.kept_arrays import STACKED, Value, origin, reached

#: By an array's id: a sentence, and the bytes that following it saves.
type Advice = dict[int, tuple[str, int]]


def advice(kept: Sequence[Value]) -> Advice:
    """On the arrays of `kept_arrays.of`, where anything is known."""
    try:
        return _advice(kept)
    finally:  # what they remember of this graph
        _sources.cache_clear()
        elementwise.is_spread.cache_clear()


def _advice(kept: Sequence[Value]) -> Advice:
    by_origin = {id(origin(v)): v for v in kept}
    found: Advice = {}
    claimed: set[int] = set()
    for product in _products(kept):
        _of_activation(product, by_origin, claimed, found)
    for members, lacking, sentence in norm_advice.norms(kept, by_origin, found):
        _advise(found, members, lacking, sentence)
    for value in kept:
        norm = origin(value)
        is_norm = norm.made_by == "jaxnorm.rms_norm"
        if is_norm and rotation_advice.is_kept_rotated(norm, by_origin):
            sentence = f"{rotation_advice.FUNCTION}: in place of the norm of "
            _advise(found, [value], 0, sentence + f"{norm.source} and the rotation")
    for members, lacking, sentence in loss_advice.losses(kept, by_origin):
        _advise(found, members, lacking, sentence)
    for value in kept:
        made = origin(value)
        if made.made_by == "exp" and (dtype := _softmax_of(made, by_origin)) is not None:
            sentence = f"softmax: in place of that of {made.source}, it keeps its result alone"
            found.setdefault(id(value), (sentence + dtype, value.bytes))
        if id(value) not in found and made.layers > 1 and made.made_by in elementwise.COPYING:
            before = _copied(made, by_origin)
            if before is not None:
                found[id(value)] = (
                    f"{made.made_by}: kept beside {_shown(before)}, of which it is made; put it "
                    "and what takes it into one jax.checkpoint",
                    value.bytes,
                )
    return found


def _advise(found: Advice, members: Iterable[Value], lacking: int, sentence: str) -> None:
    """`lacking`: bytes that are kept in place of the members."""
    members = sorted(members, key=lambda v: -v.bytes)
    if sum(v.bytes for v in members) <= lacking:
        return
    for value in members:
        in_its_place = min(lacking, value.bytes)
        lacking -= in_its_place
        if value.bytes > in_its_place:
            found[id(value)] = (sentence, value.bytes - in_its_place)


def _copied(value: Value, by_origin: dict[int, Value]) -> Value | None:
    """What is kept, and has the same elements in another shape or dtype; None if nothing is."""
    while value.made_by in elementwise.COPYING:
        value = origin(value.operands[0])
        if id(value) in by_origin:
            return value
    return None


def _shown(value: Value) -> str:
    return f"{value.dtype.name}[{','.join(map(str, value.shape))}] of {value.source}"


# ------------------------------------------------------------------------------- linear layers


def _of_activation(
    product: Value, by_origin: dict[int, Value], claimed: set[int], found: Advice
) -> None:
    """`claimed`: arrays that other products have."""
    factors = elementwise.rows_and_weight(product)
    assert factors is not None
    h = origin(factors[0])
    sources, is_nonlinear, is_alone = _sources(h)
    # A mask of dropout is made again of its key.
    arrays = {key: s for key, s in sources.items() if s.made_by != "random_bits"}
    if not (is_nonlinear and is_alone and len(arrays) in (1, 2)):
        return
    if not _is_for(product, h, sources):
        return
    lacking = sum(
        s.bytes * s.layers
        for key, s in arrays.items()
        if key not in by_origin and s.made_by not in elementwise.GIVEN
    )
    members = [
        v
        for key, v in by_origin.items()
        if key not in (*sources, *claimed) and _is_between(origin(v), sources)
    ]
    # Of each layer one.
    constants = (
        v for k, v in by_origin.items() if k not in claimed and elementwise.is_zeros(origin(v), h)
    )
    members += [*constants][: bool(members)]
    claimed.update(id(origin(v)) for v in members)
    name = "gated_linear" if len(arrays) == 2 else "activation_linear"
    lines = " and ".join(dict.fromkeys(s.source for s in arrays.values() if s.source))
    sentence = f"{name}: in place of the linear layer of {product.source}, it keeps what is of "
    sentence += f"{lines or 'arguments'} alone"
    if len(arrays) < len(sources):
        sentence += "; dropout goes into product="
    _advise(found, members, lacking, sentence)


def _products(kept: Iterable[Value]) -> list[Value]:
    """Matrix products of rows with a weight, of what is kept."""
    found: dict[int, Value] = {}
    for value in kept:
        for taker in elementwise.takers(origin(value)):
            if elementwise.rows_and_weight(taker) is not None:
                found[id(taker)] = taker
    return [*found.values()]


@functools.cache
def _sources(h: Value) -> tuple[dict[int, Value], bool, bool]:
    """Arrays of h's size that it is made of, element by element.

    Also whether an activation is on the way, and whether nothing is of other elements: as in a
    norm, or a softmax.
    """
    sources: dict[int, Value] = {}
    is_nonlinear, is_alone = False, True
    stack, seen = [h], set()
    while stack:
        value = origin(stack.pop())
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.size != h.size or elementwise.is_spread(value):
            is_alone &= not elementwise.is_reduced(value, h.size)
        elif value.made_by in elementwise.ELEMENTWISE and not elementwise.is_product(value):
            is_nonlinear |= value.made_by in elementwise.NONLINEAR
            stack += value.operands
        else:
            sources[id(value)] = value
    return sources, is_nonlinear, is_alone


def _is_for(product: Value, h: Value, sources: dict[int, Value]) -> bool:
    """Whether what is made of the sources on the way to h is for this product alone."""

    def before(value: Value) -> list[Value]:
        made_of = (v for v in map(origin, value.operands) if not elementwise.is_spread(v))
        return [v for v in made_of if id(v) not in sources and v.size == h.size]

    def fits(taker: Value) -> bool:
        return taker.made_by in elementwise.ELEMENTWISE and _is_between(taker, sources)

    inside = reached([h], before).values()
    inside_or_after = reached(inside, lambda v: filter(fits, v.takers))
    return all(
        taker is product or taker.made_by == STACKED or id(taker) in inside_or_after
        for value in inside_or_after.values()
        for taker in value.takers
    )


def _is_between(value: Value, sources: dict[int, Value]) -> bool:
    """Whether an array is made of the sources alone."""
    own, _, is_alone = _sources(value)
    return bool(own) and is_alone and own.keys() <= sources.keys()


# ------------------------------------------------------------------------------------- softmaxes


def _softmax_of(exponential: Value, by_origin: dict[int, Value]) -> str | None:
    """Which softmax keeps its result and no exponentials, where that is kept anyway."""
    for taker in exponential.takers:
        if taker.made_by != "div" or taker.operands[0] is not exponential:
            continue
        if all(v is not exponential for v in elementwise.ancestors(taker.operands[1], taker.size)):
            continue
        if id(taker) in by_origin:
            return ""
        casts = [v for v in taker.takers if v.made_by == "convert_element_type"]
        if len(casts) == len(taker.takers) and any(id(v) in by_origin for v in casts):
            return f", with dtype={casts[0].dtype.name}"
    return None
