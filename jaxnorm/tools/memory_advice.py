"""What would not keep an array that a derivative keeps: jaxnorm's functions, `jax.checkpoint`.

Known by how the array is made and what takes it, in the graph of `kept_arrays`; cross-entropies by
`loss_advice`:

    gated_linear         between activation(gate) * up and the product with a weight
    activation_linear    between activation(x) and the product with a weight
    rms_norm, layer_norm between x and x times the reciprocal root of a mean of squares
    rms_norm_rope        between x and a rotation of that result, which is kept
    ..._cross_entropy    logits, their exponentials and casts, of integer labels
    linear_log_prob_...  the logits of log_prob_and_entropy, and casts of them
    softmax              exponentials, beside what they are over their sum
    jax.checkpoint       in a scan: a reshape or a cast of what is kept as well
"""

import functools
from collections.abc import Iterable, Iterator, Sequence

from jaxnorm.tools import elementwise, loss_advice, rotation_advice
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Value, origin, reached

# What takes an array, and keeps nothing of it.
_LINEAR = {"add", "add_any", "sub", "neg", STACKED, "scan", *elementwise.COPYING, *NAMING}

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
    for root, region in _norms(kept):
        _of_norm(root, region, by_origin, found)
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
    if not (is_nonlinear and is_alone and len(sources) in (1, 2)):
        return
    if not _is_for(product, h, sources):
        return
    lacking = sum(
        s.bytes * s.layers
        for key, s in sources.items()
        if key not in by_origin and s.made_by not in elementwise.GIVEN
    )
    members = [
        v
        for key, v in by_origin.items()
        if key not in (*sources, *claimed) and _is_between(origin(v), sources)
    ]
    # Of each layer one.
    constants = (v for k, v in by_origin.items() if k not in claimed and _is_zeros(origin(v), h))
    members += [*constants][: bool(members)]
    claimed.update(id(origin(v)) for v in members)
    name = "gated_linear" if len(sources) == 2 else "activation_linear"
    lines = " and ".join(dict.fromkeys(s.source for s in sources.values() if s.source))
    sentence = f"{name}: in place of the linear layer of {product.source}, it keeps what is of "
    _advise(found, members, lacking, f"{sentence}{lines or 'arguments'} alone")


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
        made_of = map(origin, value.operands)
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


def _is_zeros(value: Value, h: Value) -> bool:
    """An array of one number, which JAX hands over for a derivative."""
    is_of_literals = all(v.made_by == "literal" for v in value.operands)
    return value.made_by == "broadcast_in_dim" and is_of_literals and value.shape == h.shape


# ---------------------------------------------------------------------------------------- norms


def _norms(kept: Iterable[Value]) -> Iterator[tuple[Value, list[Value]]]:
    """What is normalised, and the arrays of its size that a norm makes of it, in their order."""
    done: set[int] = set()
    for value in kept:
        root = _root(value)
        if id(root) in done:
            continue
        done.add(id(root))
        region = _region(root)
        names = {v.made_by for v in region}
        if any(map(_is_by_a_root, region)) and not names & elementwise.NONLINEAR:
            yield root, region


def _root(value: Value) -> Value:
    """Of what one array of its size a value is made, element by element."""
    while True:
        value = origin(value)
        same = [v for v in value.operands if v.size == value.size and not elementwise.is_spread(v)]
        if (
            value.made_by not in elementwise.ELEMENTWISE
            or elementwise.is_product(value)
            or len({*same}) != 1
        ):
            return value
        value = same[0]


# What a norm is not made of, nor an activation.
_WAVES = {"cos", "cosh", "sin", "sinh", "tan"}


def _region(root: Value) -> list[Value]:
    """What is made of `root`, element by element, and of numbers for each row or column."""
    region = {id(root): root}
    stack = [root]
    while stack:
        for taker in stack.pop().takers:
            same = [
                v for v in taker.operands if v.size == root.size and not elementwise.is_spread(v)
            ]
            of_norm = taker.made_by in elementwise.ELEMENTWISE - _WAVES
            fits = of_norm and taker.size == root.size
            if fits and id(taker) not in region and all(id(v) in region for v in same):
                region[id(taker)] = taker
                stack.append(taker)
    return [v for v in region.values() if v is not root]


def _is_by_a_root(value: Value) -> bool:
    """Whether it is something times the reciprocal root of a sum over its row."""
    for operand in value.operands:
        operand = origin(operand)
        if operand.size == value.size and not elementwise.is_spread(operand):
            continue
        made_of = [*elementwise.ancestors(operand, value.size)]
        is_of_rows = any(v.made_by == "reduce_sum" and v.size < value.size for v in made_of)
        if is_of_rows and any(v.made_by in ("rsqrt", "sqrt") for v in made_of):
            return value.made_by in ("mul", "div")
    return False


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


def _of_norm(
    root: Value, region: Sequence[Value], by_origin: dict[int, Value], found: Advice
) -> None:
    inside = {id(root), *map(id, region)}

    def leaves(value: Value) -> bool:
        """Whether it is the norm's result: what else takes it."""
        rest = [t for t in value.takers if id(t) not in inside]
        return any(t.made_by not in (STACKED, "reduce_sum", "scan") for t in rest)

    # A cast of x may leave it, too, and is no result: it is kept, or not, for what takes it.
    normalised: set[int] = set()
    for value in region:  # in their order
        if _is_by_a_root(value) or any(id(v) in normalised for v in value.operands):
            normalised.add(id(value))
    out = [v for v in region if leaves(v)]
    results = [v for v in out if id(v) in normalised]
    is_free = all(id(t) in inside or t.made_by in _LINEAR for t in root.takers)
    again = _cast_again(results)
    members = [by_origin[id(v)] for v in region if id(v) in by_origin and v not in out]
    members += [by_origin[id(v)] for v in again if id(v) in by_origin]
    # Factors of x's size, of rows times columns.
    factors = {id(origin(a)): a for v in region for a in v.operands if id(a) not in inside}
    members += [by_origin[k] for k, a in factors.items() if k in by_origin and a.size == root.size]
    if is_free and id(root) in by_origin and root.made_by not in elementwise.GIVEN:
        members.append(by_origin[id(root)])
    results = [*{id(v): v for v in map(_narrowest, results) if v not in again}.values()]
    lacking = sum(v.bytes * v.layers for v in results if id(v) not in by_origin)
    centred = [v for v in region if v.made_by == "sub"]
    subtracted = [a for v in centred for a in v.operands if id(a) not in inside]
    has_mean = any(elementwise.is_reduced(a, root.size) for a in subtracted)
    name = "layer_norm" if has_mean else "rms_norm"
    members = [v for v in members if id(v) not in found]
    line = next((v.source for v in region if v.source), root.source)
    sentence = f"{name}: in place of the norm of {line}, it keeps its result"
    dtypes = {v.dtype for v in results}
    if len(dtypes) == 1 and dtypes != {_narrowest(root).dtype}:
        sentence += f", with dtype={dtypes.pop().name}"
    first = next(v for v in region if id(v) in normalised)
    if name == "rms_norm" and rotation_advice.is_kept_rotated(first, by_origin):
        sentence = f"{rotation_advice.FUNCTION}: in place of the norm of {line} and the rotation"
        lacking = 0
    _advise(found, members, lacking, sentence)


def _narrowest(result: Value) -> Value:
    """An array before it is cast to more bits."""
    value = result
    while value.made_by == "convert_element_type" or value.made_by in NAMING:
        value = value.operands[0]
        if value.dtype.itemsize < result.dtype.itemsize:
            result = value
    return result


def _cast_again(results: Sequence[Value]) -> list[Value]:
    """Results that are casts as another one is: of the norm's own dtype there is one array."""
    seen: set[tuple[int, str]] = set()
    again = []
    for value in results:
        if value.made_by == "convert_element_type":
            cast = (id(origin(value.operands[0])), value.dtype.name)
            if cast in seen:
                again.append(value)
            seen.add(cast)
    return again
