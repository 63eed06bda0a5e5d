"""Advice on norms in plain JAX, alone or with an activation, a rotation or a residual addition.

jaxnorm has functions that compute a norm together with these operations and save a single array. In
a residual addition, one addend may be multiplied by a gate. A norm is recognised by its operations
in the traced program, whatever class or function contains them: x is multiplied by the reciprocal
root of a mean of squares.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxnorm.tools import kept_arrays
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Advice, Program, Value, origin, reached

# Primitives whose derivative does not need the value of their operand.
_LINEAR = {"add", "add_any", "sub", "neg", STACKED, "scan", *kept_arrays.COPYING, *NAMING}

# The activations that jaxnorm's norms support. An activation is recognised by three primitives: its
# only nonlinear primitive, a second primitive that must occur in it, and the primitive that
# computes its result.
_ACTIVATIONS = {
    "silu": ("logistic", "mul", "mul"),
    "gelu": ("tanh", "integer_pow", "mul"),
    "relu": ("max", "gt", "max"),
}

# Elementwise primitives that occur neither in norms nor in activations.
_WAVES = {"cos", "cosh", "sin", "sinh", "tan"}

#: The primitives of a rotation: they split a row into pairs of columns, rotate the pairs, and join
#: them again.
STEPS = {
    "add", "broadcast_in_dim", "concatenate", "convert_element_type", "gather",
    "mul", "neg", "reshape", "slice", "split", "squeeze", "stack", "sub", *NAMING,
}  # fmt: skip

_WITH_GATE = (
    "replace the norm {at} and the gated sum before it with jaxnorm.add_NAME, with gate=: only the "
    "branch and the norm's result are saved"
)


def norms(program: Program) -> Iterator[Advice]:
    """Recognise a norm, with or without an activation or a rotation of its result.

    On the left is such code, on the right its replacement.

    ::

        y = x * rsqrt(mean(x ** 2) + epsilon) * scale               jaxnorm.rms_norm: saves y
        y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias   jaxnorm.layer_norm: saves y
        y = silu(norm(x))                                           activation="silu": saves x
        y = norm(residual + gate * branch)                          jaxnorm.add_..., gate=gate
        y = concatenate([a * cos - b * sin, b * cos + a * sin])     jaxnorm.rms_norm_rope: saves y
            where a, b = split(norm(x), 2)

    In GroupNorm, x may also be reshaped for the sums.
    """
    found = (_of_norm(root, region, program) for root, region in _regions(program))
    yield from filter(None, found)


def gated_sums(program: Program) -> Iterator[Advice]:
    """Recognise a norm of jaxnorm whose operand is ``residual + gate * branch``.

    On the left is such code, on the right its replacement.

    ::

        h = residual + gate * branch.astype(float32)    adaLN-zero's gate, or LayerScale's vector
        y = jaxnorm.layer_norm(h, scale, bias)          jaxnorm.add_layer_norm, gate=gate

    The code on the left saves the result of the cast. The replacement saves `branch` itself, which
    has fewer bytes. (`norms` recognises a norm in plain JAX after such a sum.)
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
    """Return the branch if h is ``residual + gate * branch``, otherwise None.

    The gate must have one number per row or per column.
    """
    for operand in h.operands if h.made_by == "add" else ():
        product = kept_arrays.uncast(operand)
        if product.made_by == "mul" and product.size == h.size:
            branches = product.whole_operands
            is_number = any(v.size == 1 for v in product.operands)
            is_branch = len(branches) == 1 and not is_number
            if is_branch and not _is_by_a_root(kept_arrays.uncast(branches[0])):
                return branches[0]
    return None


def activations(program: Program) -> Iterator[Advice]:
    """Recognise an activation of the result of one of jaxnorm's norms.

    On the left is such code, on the right the option that replaces the activation.

    ::

        y = silu(jaxnorm.layer_norm(x, scale, bias))    activation="silu": saves x, not the norm

    The norm's result may be reshaped before the activation, as in GroupNorm.
    """
    found = (_after_norm(root, region, program) for root, region in _regions(program))
    yield from filter(None, found)


def rotations(program: Program) -> Iterator[Advice]:
    """Recognise a rotation of the result of `jaxnorm.rms_norm`.

    On the left is such code, on the right its replacement.

    ::

        n = jaxnorm.rms_norm(x, scale)    jaxnorm.rms_norm_rope: saves y, not n
        y = n * cos + partner(n) * sin

    partner(n) swaps the columns of each pair, up to signs. Attention saves y anyway. (`norms`
    recognises the rotation of a norm in plain JAX.)
    """
    for value in program.saved:
        norm = origin(value)
        if norm.made_by == "jaxnorm.rms_norm" and _is_saved_rotated(norm, program):
            yield _rotated(norm.source, [value], norm.layers)


def _regions(program: Program) -> Iterator[tuple[Value, list[Value]]]:
    """Yield each array that may be the operand of a norm, and its region (see `_region`)."""
    done: set[Value] = set()
    for value in program.saved:
        root = _root(value)
        if root in done:
            continue
        done.add(root)
        yield root, _region(root)


def _root(value: Value) -> Value:
    """Follow elementwise operations back from a value, and return the array that they start from.

    An operation with several operands of the value's size is not followed.
    """
    while True:
        value = origin(value)
        same = value.whole_operands
        # The search goes backwards, and ends when it reaches a matmul. If the program casts the
        # matmul's result to the same number of bits or fewer, the result of the cast is returned.
        # Otherwise, the matmul's result is returned: the program may repeat a cast to more bits for
        # each use, and only the matmul's result is common to all uses.
        is_widened = value.made_by == "convert_element_type" and _narrowest(value) is not value
        if (
            value.made_by not in kept_arrays.ELEMENTWISE
            or (kept_arrays.is_product(value) and not is_widened)
            or len({*same}) != 1
        ):
            return value
        value = same[0]


def _nonlinear(region: Iterable[Value]) -> list[Value]:
    return [v for v in region if v.made_by in kept_arrays.NONLINEAR]


def _activation(region: Sequence[Value], results: Sequence[Value]) -> str | None:
    """Return the name of the activation that computes `results`, or None.

    `region` are the arrays that are computed elementwise from one array. `results` are the arrays
    in `region` that are used outside of it. The function returns None in two cases:

    * jaxnorm's norms do not support the activation;
    * an array other than the activation's result is used outside, such as the norm before the
      activation.
    """
    names, ends = {v.made_by for v in region}, [*map(_narrowest, results)]
    made_by = {v.made_by for v in ends}
    if made_by == {"mul"} and any(o.size < v.size or o.is_spread for v in ends for o in v.operands):
        return None  # The result is an activation, multiplied by another array.
    nonlinear = _nonlinear(region)
    after = _computed_from(region, lambda v: v in nonlinear)
    if any(after.intersection(v.operands) for v in nonlinear):
        return None  # A nonlinear primitive is applied to the result of another one.
    for name, (only, other, result) in _ACTIVATIONS.items():
        is_only = {v.made_by for v in nonlinear} == {only}
        if is_only and other in names and made_by == {result}:
            return name
    return None


def _computed_from(region: Iterable[Value], is_first: Callable[[Value], bool]) -> set[Value]:
    """Return the values for which `is_first` returns True, and all that are computed from them."""
    found: set[Value] = set()
    for value in region:  # The values are in the order of computation.
        if is_first(value) or found.intersection(value.operands):
            found.add(value)
    return found


def _region(root: Value) -> list[Value]:
    """Return the region of `root`: all arrays that are computed elementwise from it.

    Other operands of these computations have one number per row or per column.
    """
    region = {root: None}
    stack = [root]
    while stack:
        for user in stack.pop().users:
            of_norm = user.made_by in kept_arrays.ELEMENTWISE - _WAVES
            fits = (of_norm and user.size == root.size) or _is_for_sums(user)
            is_new = user not in region
            if fits and is_new and all(v in region for v in user.whole_operands):
                region[user] = None
                stack.append(user)
    return [v for v in region if v is not root]


def _leaving(root: Value, region: Sequence[Value]) -> list[Value]:
    """Return the arrays in `region` that are used outside of it.

    Uses by sums and by scans do not count.
    """
    inside = {root, *region}

    def leaves(value: Value) -> bool:
        users = kept_arrays.users_outside([value], inside)
        return any(t.made_by not in (STACKED, "reduce_sum", "scan") for t in users)

    return [v for v in region if leaves(v)]


def _is_for_sums(reshaped: Value) -> bool:
    if reshaped.made_by != "reshape":
        return False
    inside = {reshaped, *_region(reshaped)}
    users = kept_arrays.users_outside(inside, inside)
    return bool(users) and all(t.made_by in ("reduce_sum", STACKED) for t in users)


def _is_by_a_root(value: Value) -> bool:
    """Return True for a division of each row by the root of a sum over the row, as in a norm."""
    for operand in value.operands:
        operand = origin(operand)
        if operand.size == value.size and not operand.is_spread:
            continue
        made_of = kept_arrays.ancestors(operand, value.size)
        is_of_rows = any(v.made_by == "reduce_sum" and v.size < value.size for v in made_of)
        if is_of_rows and any(v.made_by in ("rsqrt", "sqrt") for v in made_of):
            return value.made_by in ("mul", "div")
    return False


def _of_norm(root: Value, region: Sequence[Value], program: Program) -> Advice | None:
    inside = {root, *region}
    # A norm divides x by the root of a mean of squares. The norm's results are the quotient, and
    # the values that are computed from the quotient. Values before the division, such as a cast of
    # x, are not results, even if operations outside the region use them.
    normalised = _computed_from(region, _is_by_a_root)
    out = _leaving(root, region)
    results = [v for v in out if v in normalised]
    if not results:
        return None
    activation = _activation(region, results)
    if activation is None and _nonlinear(region):
        return None
    is_free = all(t.made_by in _LINEAR for t in kept_arrays.users_outside([root], inside))
    again = _cast_again(results)
    # By the definition of a region, its operands from outside are made from arrays with one number
    # per row or one number per column. If such an operand is as large as x, it is a broadcast of
    # one of these arrays, or an outer product of two of them.
    factors = {origin(a): None for v in region for a in v.operands if a not in inside}
    freed = [*[v for v in region if v not in out], *again]
    freed += [a for a in factors if a.size == root.size]
    if activation is None and is_free and root.made_by not in kept_arrays.GIVEN:
        freed.append(root)
    members = program.saved_of(freed)
    if activation == "relu":
        members += program.zeros_like(results[0])[:1]  # JAX saves an array of zeros for relu
    results = [*dict.fromkeys(v for v in map(_narrowest, results) if v not in again)]
    # A norm of jaxnorm saves its result. A norm with an activation saves its input instead. A
    # GroupNorm always saves an additional, reshaped array.
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
    first = next(v for v in region if v in normalised)
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


def _subtracts_mean(root: Value, region: Sequence[Value], inside: set[Value]) -> bool:
    centred = [v for v in region if v.made_by == "sub"]
    subtracted = [a for v in centred for a in v.operands if a not in inside]
    return any(kept_arrays.is_reduced(a, root.size) for a in subtracted)


def _after_norm(root: Value, region: Sequence[Value], program: Program) -> Advice | None:
    way = [root]
    while way[-1].made_by in NAMING or way[-1].made_by == "reshape":
        way.append(way[-1].operands[0])
    norm, out = way[-1], _leaving(root, region)
    if norm.made_by not in ("jaxnorm.layer_norm", "jaxnorm.rms_norm"):
        return None
    if any(map(_is_by_a_root, region)):
        return None  # A norm in plain JAX follows; see `_of_norm`.
    activation = _activation(region, out)
    if activation is None or norm.equation.params["call"].spec.norm.activation is not None:
        return None  # There is no activation, or the norm already has one.
    users = kept_arrays.users_outside(way, {*region, *way})
    is_free = all(user.made_by == STACKED for user in users)
    if any(program.by_origin.get(v) in program.advised for v in region):
        return None  # the advice found earlier, for a linear layer, frees more memory
    freed = [v for v in region if v not in out] + (way if is_free else [])
    members = program.saved_of(freed)
    members += program.zeros_like(out[0])[: activation == "relu"]
    instead = sum(map(program.extra_bytes, (origin(norm.operands[0]), *out)))
    name = norm.made_by.removeprefix("jaxnorm.")
    name, how = _with_activation(name, activation, "")
    return Advice(name, norm.source, how, members, instead, norm.layers)


def _with_activation(name: str, activation: str, cast: str) -> tuple[str, str]:
    """Return `Advice.function` and `Advice.template` for the option ``activation`` of a norm."""
    how = (
        f"replace the norm {{at}} and the {activation} after it with jaxnorm.{name}, with "
        f'activation="{activation}"{cast}: only its input and its result are saved'
    )
    return f'{name}(activation="{activation}")', how


def _narrowest(result: Value) -> Value:
    """Follow a result back through casts and copies; return the array of the narrowest dtype.

    Return the result itself if no array on the way has fewer bits per element.
    """
    value = result
    while value.made_by == "convert_element_type" or value.made_by in NAMING:
        value = value.operands[0]
        if value.dtype.itemsize < result.dtype.itemsize:
            result = value
    return result


def _cast_again(results: Sequence[Value]) -> list[Value]:
    """Return the duplicates among the results of a norm.

    A result is a duplicate if it is a cast of the same array to the same dtype as an earlier
    result.

    jaxnorm's norm returns a single array for all of these casts.
    """
    seen: set[tuple[Value, str]] = set()
    again = []
    for value in results:
        if value.made_by == "convert_element_type":
            cast = (origin(value.operands[0]), value.dtype.name)
            if cast in seen:
                again.append(value)
            seen.add(cast)
    return again


# -------------------------------------------------------------------------------- and rotations


def _rotated(line: str, members: Sequence[Value], runs: int) -> Advice:
    """Return advice to use rms_norm_rope, for a norm whose result is rotated.

    `members` are the arrays that are then not saved. The rotated array is saved in any case.
    """
    template = (
        "replace the norm {at} and the rotation after it with jaxnorm.rms_norm_rope: only the "
        "rotated result is saved"
    )
    return Advice("rms_norm_rope", line, template, members, 0, runs)


def _is_saved_rotated(result: Value, program: Program) -> bool:
    """Return True if a norm's result is used only by a rotation, and the rotated array is saved."""

    def steps(value: Value) -> list[Value]:
        return [t for t in value.users if t.made_by in STEPS and t.size <= result.size]

    def before(value: Value) -> list[Value]:
        return [v for v in value.operands if v in inside and v is not result]

    inside = reached([result], steps)
    for value in inside:
        if value.size != result.size or value.made_by not in ("add", "concatenate", "reshape"):
            continue
        way = [*reached([value], before)]  # from the norm's result to `value`
        names = {v.made_by for v in way}
        if "mul" in names and names & {"concatenate", "stack"} and names & {"add", "sub"}:
            casts = [t for t in kept_arrays.users(value) if t.size == value.size]
            is_saved = any(origin(v) in program.by_origin for v in (value, *casts))
            users = kept_arrays.users_outside([result, *way[1:]], inside)
            if is_saved and all(user.made_by == STACKED for user in users):
                return True
    return False
