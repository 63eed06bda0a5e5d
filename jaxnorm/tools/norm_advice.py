"""Advice on norms: jaxnorm's save one array, even with an activation, rotation or gated sum.

A norm is x times the reciprocal root of a mean of squares, whatever class or function computes it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxnorm.tools import kept_arrays
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Advice, Program, Value, origin, reached

# Primitives whose derivative does not use their operand.
_LINEAR = {"add", "add_any", "sub", "neg", STACKED, "scan", *kept_arrays.COPYING, *NAMING}

# Activations that a norm can have. Each is recognised by its one nonlinear primitive, by another of
# its primitives, and by the primitive that makes its result.
_ACTIVATIONS = {
    "silu": ("logistic", "mul", "mul"),
    "gelu": ("tanh", "integer_pow", "mul"),
    "relu": ("max", "gt", "max"),
}

# Primitives that occur in neither norms nor activations.
_WAVES = {"cos", "cosh", "sin", "sinh", "tan"}

#: Primitives that cut rows into pairs, rotate these, and put them together again.
STEPS = {
    "add", "broadcast_in_dim", "concatenate", "convert_element_type", "gather",
    "mul", "neg", "reshape", "slice", "split", "squeeze", "stack", "sub", *NAMING,
}  # fmt: skip

_WITH_GATE = (
    "replace the norm {at} and the gated sum before it with jaxnorm.add_NAME, with gate=: only the "
    "branch and the norm's result are saved"
)


def norms(program: Program) -> Iterator[Advice]:
    """Recognise a norm, optionally with an activation or a rotation of its result.

    ::

        y = x * rsqrt(mean(x ** 2) + epsilon) * scale               jaxnorm.rms_norm: saves y
        y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias   jaxnorm.layer_norm: saves y
        y = silu(norm(x))                                           activation="silu": saves x
        y = norm(residual + gate * branch)                          jaxnorm.add_..., gate=gate
        y = concatenate([a * cos - b * sin, b * cos + a * sin])     jaxnorm.rms_norm_rope: saves y
            where a, b = split(norm(x), 2)

    In GroupNorm, x is reshaped for its sums.
    """
    for root, region in _regions(program):
        advice = _of_norm(root, region, program) if any(map(_is_by_a_root, region)) else None
        if advice is not None:
            yield advice


def gated_sums(program: Program) -> Iterator[Advice]:
    """Recognise one of jaxnorm's norms after a sum whose gate multiplies a cast of the branch.

    ::

        h = residual + gate * branch.astype(float32)    adaLN-zero's gate, or LayerScale's vector
        y = jaxnorm.layer_norm(h, scale, bias)          jaxnorm.add_layer_norm, gate=gate

    The function on the right saves the branch as it is. (For a norm of plain code after a gated
    sum, see `norms`.)
    """
    for norm in program.values:
        name = norm.made_by.removeprefix("jaxnorm.")
        if norm.made_by in ("jaxnorm.layer_norm", "jaxnorm.rms_norm"):
            branch = _gated_branch(kept_arrays.uncast(norm.operands[0]))
            cast = [] if branch is None else program.saved_of([origin(branch)])
            if branch is not None and cast and branch.made_by == "convert_element_type":
                instead = program.extra_bytes(kept_arrays.uncast(branch))
                how = _WITH_GATE.replace("NAME", name)
                yield Advice(f"add_{name}", norm.source, how, cast, instead, norm.layers)


def _gated_branch(h: Value) -> Value | None:
    """Return the branch of ``residual + gate * branch``, if the gate is per row or per column."""
    for operand in h.operands if h.made_by == "add" else ():
        product = kept_arrays.uncast(operand)
        if product.made_by == "mul" and product.size == h.size:
            whole = [v for v in product.operands if v.size == h.size]
            branches = [v for v in whole if not kept_arrays.is_spread(v)]
            is_number = any(v.size == 1 for v in product.operands)
            if (
                len(branches) == 1
                and not is_number
                and not _is_by_a_root(kept_arrays.uncast(branches[0]))
            ):
                return branches[0]
    return None


def activations(program: Program) -> Iterator[Advice]:
    """Recognise an activation of what one of jaxnorm's norms returns.

    ::

        y = silu(jaxnorm.layer_norm(x, scale, bias))    activation="silu": saves x, not the norm

    The norm's result may be reshaped before the activation, as in GroupNorm.
    """
    for root, region in _regions(program):
        advice = _after_norm(root, region, program) if not any(map(_is_by_a_root, region)) else None
        if advice is not None:
            yield advice


def rotations(program: Program) -> Iterator[Advice]:
    """Recognise a rotation of what `jaxnorm.rms_norm` returns.

    ::

        n = jaxnorm.rms_norm(x, scale)    jaxnorm.rms_norm_rope: saves y, not n
        y = n * cos + partner(n) * sin    the elements of n in pairs: halves, or neighbours

    Attention saves y in any case. (For a rotation of a norm of plain code, see `norms`.)
    """
    for value in program.saved:
        norm = origin(value)
        if norm.made_by == "jaxnorm.rms_norm" and _is_saved_rotated(norm, program):
            yield _rotated(norm.source, [value], norm.layers)


def _regions(program: Program) -> Iterator[tuple[Value, list[Value]]]:
    """Yield each array that may be normalised, and the arrays computed elementwise from it."""
    done: set[int] = set()
    for value in program.saved:
        root = _root(value)
        if id(root) in done:
            continue
        done.add(id(root))
        yield root, _region(root)


def _root(value: Value) -> Value:
    """Return the array at the start of a chain of elementwise operations that ends at a value.

    Each step of the chain has a single operand of the value's size.
    """
    while True:
        value = origin(value)
        same = [v for v in value.operands if v.size == value.size and not kept_arrays.is_spread(v)]
        # A matmul's result that is cast to more bits may be cast by several users.
        is_widened = value.made_by == "convert_element_type" and _narrowest(value) is not value
        if (
            value.made_by not in kept_arrays.ELEMENTWISE
            or (kept_arrays.is_product(value) and not is_widened)
            or len({*same}) != 1
        ):
            return value
        value = same[0]


def _nonlinear(region: Iterable[Value]) -> set[str]:
    return {v.made_by for v in region} & kept_arrays.NONLINEAR


def _activation(region: Sequence[Value], results: Sequence[Value]) -> str | None:
    """Return the name of the activation that is applied to a norm, if a norm supports it.

    The result is None if the norm without the activation is among the results.
    """
    names, ends = {v.made_by for v in region}, [*map(_narrowest, results)]
    made_by = {v.made_by for v in ends}
    if made_by == {"mul"} and any(
        o.size < v.size or kept_arrays.is_spread(o) for v in ends for o in v.operands
    ):
        return None  # the result is a multiple of an activation
    if _in_a_row(region):
        return None
    for name, (nonlinear, other, result) in _ACTIVATIONS.items():
        if _nonlinear(region) == {nonlinear} and other in names and made_by == {result}:
            return name
    return None


def _in_a_row(region: Iterable[Value]) -> bool:
    """Return True if an activation is applied to an activation's result."""
    after: set[int] = set()
    for value in region:  # in order of computation
        is_nonlinear = value.made_by in kept_arrays.NONLINEAR
        is_after = any(id(v) in after for v in value.operands)
        if is_nonlinear and is_after:
            return True
        if is_nonlinear or is_after:
            after.add(id(value))
    return False


def _region(root: Value) -> list[Value]:
    """Return the arrays computed elementwise from `root` (and numbers per row or column)."""
    region = {id(root): root}
    stack = [root]
    while stack:
        for user in stack.pop().users:
            same = [
                v for v in user.operands if v.size == root.size and not kept_arrays.is_spread(v)
            ]
            of_norm = user.made_by in kept_arrays.ELEMENTWISE - _WAVES
            fits = (of_norm and user.size == root.size) or _is_for_sums(user)
            if fits and id(user) not in region and all(id(v) in region for v in same):
                region[id(user)] = user
                stack.append(user)
    return [v for v in region.values() if v is not root]


def _leaving(root: Value, region: Sequence[Value]) -> list[Value]:
    """Return the values of a region that have users outside of it."""
    inside = {id(root), *map(id, region)}

    def leaves(value: Value) -> bool:
        rest = [t for t in value.users if id(t) not in inside]
        return any(t.made_by not in (STACKED, "reduce_sum", "scan") for t in rest)

    return [v for v in region if leaves(v)]


def _is_for_sums(reshaped: Value) -> bool:
    if reshaped.made_by != "reshape":
        return False
    inside = [reshaped, *_region(reshaped)]
    users = [t for v in inside for t in v.users if t not in inside]
    return bool(users) and all(t.made_by in ("reduce_sum", STACKED) for t in users)


def _is_by_a_root(value: Value) -> bool:
    """Return True for a product with the reciprocal root of a sum over rows, as in a norm."""
    for operand in value.operands:
        operand = origin(operand)
        if operand.size == value.size and not kept_arrays.is_spread(operand):
            continue
        made_of = [*kept_arrays.ancestors(operand, value.size)]
        is_of_rows = any(v.made_by == "reduce_sum" and v.size < value.size for v in made_of)
        if is_of_rows and any(v.made_by in ("rsqrt", "sqrt") for v in made_of):
            return value.made_by in ("mul", "div")
    return False


def _of_norm(root: Value, region: Sequence[Value], program: Program) -> Advice | None:
    inside = {id(root), *map(id, region)}
    # A cast of x with users outside the region is not a result of the norm.
    normalised: set[int] = set()
    for value in region:  # in order of computation
        if _is_by_a_root(value) or any(id(v) in normalised for v in value.operands):
            normalised.add(id(value))
    out = _leaving(root, region)
    results = [v for v in out if id(v) in normalised]
    activation = _activation(region, results)
    if not results or (activation is None and _nonlinear(region)):
        return None
    is_free = all(id(t) in inside or t.made_by in _LINEAR for t in root.users)
    again = _cast_again(results)
    # Operands of full size that are not in the region: numbers per row times numbers per column.
    factors = {id(origin(a)): origin(a) for v in region for a in v.operands if id(a) not in inside}
    freed = [*[v for v in region if v not in out], *again]
    freed += [a for a in factors.values() if a.size == root.size]
    if activation is None and is_free and root.made_by not in kept_arrays.GIVEN:
        freed.append(root)
    members = program.saved_of(freed)
    if activation == "relu":
        members += program.zeros_like(results[0])[:1]  # of one layer
    results = [*{id(v): v for v in map(_narrowest, results) if v not in again}.values()]
    # The function's operands and results are saved. A grouped norm also saves a reshaped array.
    its = results if activation is None else [root]
    if any(v.made_by == "reshape" for v in region):
        instead = sum(v.bytes * v.layers for v in its)
    else:
        instead = sum(map(program.extra_bytes, its))
    if activation is not None:
        instead += sum(map(program.extra_bytes, results))
    name = "layer_norm" if _subtracts_mean(root, region, inside) else "rms_norm"
    line = next((v.source for v in region if v.source), root.source)
    dtypes = {v.dtype for v in results}
    cast = ""
    if len(dtypes) == 1 and dtypes != {_narrowest(root).dtype}:
        cast = f", with dtype={dtypes.pop().name}"
    first = next(v for v in region if id(v) in normalised)
    if name == "rms_norm" and _is_saved_rotated(first, program):
        return _rotated(line, members, root.layers)
    how = f"replace the norm {{at}} with jaxnorm.{name}{cast}: only its result is saved"
    branch = _gated_branch(root) if activation is None else None
    if branch is not None:
        how = _WITH_GATE.replace("NAME", name)
        name = f"add_{name}"
        if branch.made_by == "convert_element_type":
            cast_branch = program.saved_of([branch])
            members += cast_branch
            instead += program.extra_bytes(kept_arrays.uncast(branch)) if cast_branch else 0
    if activation is not None:
        name, how = _with_activation(name, activation, cast)
    return Advice(name, line, how, members, instead, root.layers)


def _subtracts_mean(root: Value, region: Sequence[Value], inside: set[int]) -> bool:
    centred = [v for v in region if v.made_by == "sub"]
    subtracted = [a for v in centred for a in v.operands if id(a) not in inside]
    return any(kept_arrays.is_reduced(a, root.size) for a in subtracted)


def _after_norm(root: Value, region: Sequence[Value], program: Program) -> Advice | None:
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
    is_free = all(id(t) in inside or t.made_by == STACKED for v in way for t in v.users)
    saved = [program.by_origin[id(v)] for v in region if id(v) in program.by_origin]
    if any(id(v) in program.advised for v in saved):
        return None  # a linear layer's advice saves less
    freed = [v for v in region if v not in out] + (way if is_free else [])
    members = program.saved_of(freed)
    members += program.zeros_like(out[0])[: activation == "relu"]
    instead = sum(map(program.extra_bytes, (origin(norm.operands[0]), *out)))
    name = norm.made_by.removeprefix("jaxnorm.")
    name, how = _with_activation(name, activation, "")
    return Advice(name, norm.source, how, members, instead, norm.layers)


def _with_activation(name: str, activation: str, cast: str) -> tuple[str, str]:
    """Return the name of the function with its option, and the instruction."""
    how = (
        f"replace the norm {{at}} and the {activation} after it with jaxnorm.{name}, with "
        f'activation="{activation}"{cast}: only its input and its result are saved'
    )
    return f'{name}(activation="{activation}")', how


def _narrowest(result: Value) -> Value:
    """Return an array as it was before it was cast to more bits."""
    value = result
    while value.made_by == "convert_element_type" or value.made_by in NAMING:
        value = value.operands[0]
        if value.dtype.itemsize < result.dtype.itemsize:
            result = value
    return result


def _cast_again(results: Sequence[Value]) -> list[Value]:
    """Return repeated casts among the results, because a norm returns a single array."""
    seen: set[tuple[int, str]] = set()
    again = []
    for value in results:
        if value.made_by == "convert_element_type":
            cast = (id(origin(value.operands[0])), value.dtype.name)
            if cast in seen:
                again.append(value)
            seen.add(cast)
    return again


# -------------------------------------------------------------------------------- and rotations


def _rotated(line: str, members: Sequence[Value], runs: int) -> Advice:
    """Return advice for a norm whose result is rotated, where the rotated array is saved anyway."""
    template = (
        "replace the norm {at} and the rotation after it with jaxnorm.rms_norm_rope: only the "
        "rotated result is saved"
    )
    return Advice("rms_norm_rope", line, template, members, 0, runs)


def _is_saved_rotated(result: Value, program: Program) -> bool:
    """Return True if a norm's result is used by a rotation only, whose result is saved."""
    inside = _made_of(result)
    for value in inside.values():
        if value.size != result.size or value.made_by not in ("add", "concatenate", "reshape"):
            continue
        way = _way(result, value, inside)
        names = {v.made_by for v in way}
        if "mul" in names and names & {"concatenate", "stack"} and names & {"add", "sub"}:
            casts = [t for t in kept_arrays.users(value) if t.size == value.size]
            is_saved = any(id(origin(v)) in program.by_origin for v in (value, *casts))
            before = [result, *[v for v in way if v is not value]]
            if is_saved and _is_for_it(before, inside):
                return True
    return False


def _made_of(result: Value) -> dict[int, Value]:
    """Return a norm's result and the arrays that a rotation computes from it, by identity."""

    def steps(value: Value) -> list[Value]:
        return [t for t in value.users if t.made_by in STEPS and t.size <= result.size]

    return reached([result], steps)


def _way(result: Value, value: Value, inside: Mapping[int, Value]) -> list[Value]:
    """Return the steps between a norm's result and `value`, a later step, including `value`."""

    def before(value: Value) -> list[Value]:
        return [v for v in value.operands if id(v) in inside and v is not result]

    return [*reached([value], before).values()]


def _is_for_it(values: list[Value], inside: Mapping[int, Value]) -> bool:
    """Return True if `values` are used by steps of the rotation only."""
    users = (user for value in values for user in value.users)
    return all(id(user) in inside or user.made_by == STACKED for user in users)
