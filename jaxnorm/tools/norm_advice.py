"""What would not keep what norms make of their input: jaxnorm's, with an activation where one is.

A norm is known by x times the reciprocal root of a mean of squares, or as jaxnorm's, whose results
an activation is of.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from jaxnorm.tools import elementwise, rotation_advice
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Value, origin

# What takes an array, and keeps nothing of it.
_LINEAR = {"add", "add_any", "sub", "neg", STACKED, "scan", *elementwise.COPYING, *NAMING}

# Activations that a norm can have: what they alone have of all that is nonlinear, what else is
# there, and what makes their results.
_ACTIVATIONS = {
    "silu": ("logistic", "mul", "mul"),
    "gelu": ("tanh", "integer_pow", "mul"),
    "relu": ("max", "gt", "max"),
}

# What a norm is not made of, nor an activation.
_WAVES = {"cos", "cosh", "sin", "sinh", "tan"}

# Arrays, the bytes that are kept in their place, a sentence.
type Advice = tuple[list[Value], int, str]


def norms(
    kept: Sequence[Value], by_origin: Mapping[int, Value], told: Container[int]
) -> Iterator[Advice]:
    """Of each norm what jaxnorm's would not keep, less what has advice already, which is `told`."""
    for root, region in _regions(kept):
        is_norm = any(map(_is_by_a_root, region))
        advice = (_of_norm if is_norm else _after_norm)(root, region, by_origin, told)
        if advice is not None:
            yield advice


def _regions(kept: Sequence[Value]) -> Iterator[tuple[Value, list[Value]]]:
    """What may be normalised, and the arrays of its size that are made of it, in their order."""
    done: set[int] = set()
    for value in kept:
        root = _root(value)
        if id(root) in done:
            continue
        done.add(id(root))
        yield root, _region(root)


def _root(value: Value) -> Value:
    """Of what one array of its size a value is made, element by element."""
    while True:
        value = origin(value)
        same = [v for v in value.operands if v.size == value.size and not elementwise.is_spread(v)]
        # A product that is cast to more bits may be so more than once.
        is_widened = value.made_by == "convert_element_type" and _narrowest(value) is not value
        if (
            value.made_by not in elementwise.ELEMENTWISE
            or (elementwise.is_product(value) and not is_widened)
            or len({*same}) != 1
        ):
            return value
        value = same[0]


def _nonlinear(region: Iterable[Value]) -> set[str]:
    return {v.made_by for v in region} & elementwise.NONLINEAR


def _activation(region: Sequence[Value], results: Sequence[Value]) -> str | None:
    """Which a norm could have, if that is all that is made of its result."""
    names, ends = {v.made_by for v in region}, [*map(_narrowest, results)]
    made_by = {v.made_by for v in ends}
    if made_by == {"mul"} and any(
        o.size < v.size or elementwise.is_spread(o) for v in ends for o in v.operands
    ):
        return None  # a multiple of one
    if _in_a_row(region):
        return None
    for name, (nonlinear, other, result) in _ACTIVATIONS.items():
        if _nonlinear(region) == {nonlinear} and other in names and made_by == {result}:
            return name
    return None


def _in_a_row(region: Iterable[Value]) -> bool:
    """Whether an activation is of an activation's result."""
    after: set[int] = set()
    for value in region:  # in their order
        is_nonlinear = value.made_by in elementwise.NONLINEAR
        is_after = any(id(v) in after for v in value.operands)
        if is_nonlinear and is_after:
            return True
        if is_nonlinear or is_after:
            after.add(id(value))
    return False


def _region(root: Value) -> list[Value]:
    """What is made of `root`, element by element, and of numbers for each row or column.

    In GroupNorm x is reshaped for its sums alone.
    """
    region = {id(root): root}
    stack = [root]
    while stack:
        for taker in stack.pop().takers:
            same = [
                v for v in taker.operands if v.size == root.size and not elementwise.is_spread(v)
            ]
            of_norm = taker.made_by in elementwise.ELEMENTWISE - _WAVES
            fits = (of_norm and taker.size == root.size) or _is_for_sums(taker)
            if fits and id(taker) not in region and all(id(v) in region for v in same):
                region[id(taker)] = taker
                stack.append(taker)
    return [v for v in region.values() if v is not root]


def _leaving(root: Value, region: Sequence[Value]) -> list[Value]:
    """What of a region is taken by anything else."""
    inside = {id(root), *map(id, region)}

    def leaves(value: Value) -> bool:
        rest = [t for t in value.takers if id(t) not in inside]
        return any(t.made_by not in (STACKED, "reduce_sum", "scan") for t in rest)

    return [v for v in region if leaves(v)]


def _is_for_sums(reshaped: Value) -> bool:
    if reshaped.made_by != "reshape":
        return False
    inside = [reshaped, *_region(reshaped)]
    takers = [t for v in inside for t in v.takers if t not in inside]
    return bool(takers) and all(t.made_by in ("reduce_sum", STACKED) for t in takers)


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


def _of_norm(
    root: Value, region: Sequence[Value], by_origin: Mapping[int, Value], told: Container[int]
) -> Advice | None:
    inside = {id(root), *map(id, region)}
    # A cast of x may leave it, too, and is no result: it is kept, or not, for what takes it.
    normalised: set[int] = set()
    for value in region:  # in their order
        if _is_by_a_root(value) or any(id(v) in normalised for v in value.operands):
            normalised.add(id(value))
    out = _leaving(root, region)
    results = [v for v in out if id(v) in normalised]
    activation = _activation(region, results)
    if activation is None and _nonlinear(region):
        return None
    is_free = all(id(t) in inside or t.made_by in _LINEAR for t in root.takers)
    again = _cast_again(results)
    members = [by_origin[id(v)] for v in region if id(v) in by_origin and v not in out]
    members += [by_origin[id(v)] for v in again if id(v) in by_origin]
    # Factors of x's size, of rows times columns.
    factors = {id(origin(a)): a for v in region for a in v.operands if id(a) not in inside}
    members += [by_origin[k] for k, a in factors.items() if k in by_origin and a.size == root.size]
    if activation is not None:
        members += _zeros_of(activation, results[0], by_origin, told)
    elif is_free and id(root) in by_origin and root.made_by not in elementwise.GIVEN:
        members.append(by_origin[id(root)])
    results = [*{id(v): v for v in map(_narrowest, results) if v not in again}.values()]
    # It keeps what it takes or returns as it is, beside what comes of its reshape.
    is_grouped = any(v.made_by == "reshape" for v in region)
    its = results if activation is None else [root]
    lacking = sum(_bytes_beside(v, {} if is_grouped else by_origin) for v in its)
    if activation is not None:
        lacking += sum(_bytes_beside(v, by_origin) for v in results)
    centred = [v for v in region if v.made_by == "sub"]
    subtracted = [a for v in centred for a in v.operands if id(a) not in inside]
    has_mean = any(elementwise.is_reduced(a, root.size) for a in subtracted)
    name = "layer_norm" if has_mean else "rms_norm"
    members = [v for v in members if id(v) not in told]
    line = next((v.source for v in region if v.source), root.source)
    sentence = f"{name}: in place of the norm of {line}, it keeps its result"
    if activation is not None:
        sentence = _with_activation(name, activation, line)
    dtypes = {v.dtype for v in results}
    if len(dtypes) == 1 and dtypes != {_narrowest(root).dtype}:
        sentence += f", with dtype={dtypes.pop().name}"
    first = next(v for v in region if id(v) in normalised)
    if name == "rms_norm" and rotation_advice.is_kept_rotated(first, by_origin):
        sentence = f"{rotation_advice.FUNCTION}: in place of the norm of {line} and the rotation"
        lacking = 0
    return members, lacking, sentence


def _after_norm(
    root: Value, region: Sequence[Value], by_origin: Mapping[int, Value], told: Container[int]
) -> Advice | None:
    """An activation of what jaxnorm's norm returns: as it is, or reshaped, as of groups."""
    way = [root]
    while way[-1].made_by in NAMING or way[-1].made_by == "reshape":
        way.append(way[-1].operands[0])
    norm, out = way[-1], _leaving(root, region)
    activation = _activation(region, out)
    if norm.made_by not in ("jaxnorm.layer_norm", "jaxnorm.rms_norm") or activation is None:
        return None
    if norm.equation.params["call"].spec.norm.activation is not None:
        return None  # it has one
    inside = {*map(id, region), *map(id, way)}
    is_free = all(id(t) in inside or t.made_by == STACKED for v in way for t in v.takers)
    if any(id(by_origin[id(v)]) in told for v in region if id(v) in by_origin):
        return None  # of a linear layer's advice, which keeps less
    freed = [v for v in region if v not in out] + (way if is_free else [])
    members = [by_origin[id(v)] for v in freed if id(v) in by_origin]
    members += _zeros_of(activation, out[0], by_origin, told)
    lacking = sum(_bytes_beside(v, by_origin) for v in (origin(norm.operands[0]), *out))
    name = norm.made_by.removeprefix("jaxnorm.")
    return members, lacking, _with_activation(name, activation, norm.source)


def _zeros_of(
    activation: str, result: Value, by_origin: Mapping[int, Value], told: Container[int]
) -> list[Value]:
    """Of one layer, which JAX keeps for relu's derivative."""
    zeros = [
        v
        for v in by_origin.values()
        if elementwise.is_zeros(origin(v), result) and id(v) not in told
    ]
    return zeros[:1] if activation == "relu" else []


def _bytes_beside(value: Value, by_origin: Mapping[int, Value]) -> int:
    """Of all layers, if it is not kept anyway."""
    is_there = id(value) in by_origin or (value.made_by in elementwise.GIVEN and by_origin)
    return 0 if is_there else value.bytes * value.layers


def _with_activation(name: str, activation: str, line: str) -> str:
    call = f'{name}(activation="{activation}")'
    return f"{call}: in place of the norm of {line} and its {activation}, it keeps x and the result"


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
