"""Advice on norms in plain JAX, alone or with an activation of the result.

jaxnorm has functions that compute a norm together with an activation and save a single array. A
norm is recognised by its operations in the traced program, whatever class or function contains
them: x is multiplied by the reciprocal root of a mean of squares. `values` then verifies that these
operations compute a norm.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.tools import kept_arrays, values
from jaxnorm.tools.kept_arrays import NAMING, STACKED, Advice, Program, Value, origin

# Primitives whose derivative does not need the value of their operand.
_LINEAR = {"add", "add_any", "sub", "neg", STACKED, "scan", *kept_arrays.COPYING, *NAMING}

# The activations that jaxnorm's norms support.
_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}

# Elementwise primitives that occur neither in norms nor in activations.
_WAVES = {"cos", "cosh", "sin", "sinh", "tan"}

# The largest epsilon of a norm, the default epsilon of jaxnorm's norms, and the largest number of
# elements for which a norm is evaluated.
_EPSILON, _DEFAULT, _LARGEST = 0.1, 1e-6, 2**23


def norms(program: Program) -> Iterator[Advice]:
    """Recognise a norm, with or without an activation of its result.

    On the left is such code, on the right its replacement.

    ::

        y = x * rsqrt(mean(x ** 2) + epsilon) * scale               jaxnorm.rms_norm: saves y
        y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias   jaxnorm.layer_norm: saves y
        y = silu(norm(x))                                           activation="silu": saves x

    In GroupNorm, x may also be reshaped for the sums.
    """
    verified: dict[Hashable, _Norm | None] = {}  # equal layers are verified once
    found = (_of_norm(root, region, program, verified) for root, region in _regions(program))
    yield from filter(None, found)


def activations(program: Program) -> Iterator[Advice]:
    """Recognise an activation of the result of one of jaxnorm's norms.

    On the left is such code, on the right the option that replaces the activation.

    ::

        y = silu(jaxnorm.layer_norm(x, scale, bias))    activation="silu": saves x, not the norm

    The norm's result may be reshaped before the activation, as in GroupNorm.
    """
    found = (_after_norm(root, region, program) for root, region in _regions(program))
    yield from filter(None, found)


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


def _of_norm(
    root: Value,
    region: Sequence[Value],
    program: Program,
    verified: dict[Hashable, "_Norm | None"],
) -> Advice | None:
    inside = {root, *region}
    # A norm divides x by the root of a mean of squares. The norm's results are the quotient, and
    # the values that are computed from the quotient. Values before the division, such as a cast of
    # x, are not results, even if operations outside the region use them.
    normalised = _computed_from(region, _is_by_a_root)
    out = _leaving(root, region)
    results = [v for v in out if v in normalised]
    key = values.signature([root, *region])
    if results and key not in verified:
        # The norm's x may be the root, or the root plus a linear layer's bias, times a number.
        xs = [v for v in region if v.made_by in ("add", "mul") and v not in normalised]
        found = (_verified(x, inside, results, normalised) for x in (root, *xs))
        verified[key] = next(filter(None, found), None)
    if (norm := verified.get(key)) is None:
        return None
    before = [v for v in normalised if v not in results]
    if norm.activation and not kept_arrays.are_used_only_by(before, inside, program):
        return None  # other code needs the norm's result without the activation
    is_free = all(t.made_by in _LINEAR for t in kept_arrays.users_outside([root], inside))
    again = _cast_again(results)
    # By the definition of a region, its operands from outside are made from arrays with one number
    # per row or one number per column. If such an operand is as large as x, it is a broadcast of
    # one of these arrays, or an outer product of two of them.
    factors = {origin(a): None for v in region for a in v.operands if a not in inside}
    freed = [*[v for v in region if v not in out], *again]
    freed += [a for a in factors if a.size == root.size]
    if norm.activation is None and is_free and root.made_by not in kept_arrays.GIVEN:
        freed.append(root)
    members = program.saved_of(freed)
    if norm.activation == "relu":
        members += program.zeros_like(results[0])[:1]  # JAX saves an array of zeros for relu
    results = [*dict.fromkeys(v for v in map(_narrowest, results) if v not in again)]
    # A norm of jaxnorm saves its result. A norm with an activation saves its input instead. A
    # GroupNorm always saves an additional, reshaped array.
    its = results if norm.activation is None else [root]
    if any(v.made_by == "reshape" for v in region):
        instead = sum(v.bytes * v.layers for v in its)
    else:
        instead = sum(map(program.extra_bytes, its))
    if norm.activation is not None:
        instead += sum(map(program.extra_bytes, results))
    dtypes = {v.dtype for v in results}
    dtype = dtypes.pop().name if len(dtypes) == 1 else ""
    dtype = "" if dtype == _narrowest(root).dtype.name else dtype
    quotient = next(v for v in region if v in normalised)
    function, how = norm.words(dtype)
    return Advice(function, quotient.source, how, members, instead, quotient.layers)


class _Norm(NamedTuple):
    """A norm of jaxnorm, with the options that make it compute what a program computes."""

    name: str
    epsilon: float = _DEFAULT
    axes: tuple[int, ...] = (-1,)
    activation: str | None = None

    def words(self, dtype: str = "") -> tuple[str, str]:
        """Return `Advice.function` and `Advice.template`, for a result of the dtype `dtype`."""
        is_module = self.name == "GroupNorm"
        activation = f'activation="{self.activation}"' if self.activation else ""
        options = (
            activation,
            "" if self.axes == (-1,) or is_module else f"axis={self.axes}",
            f"epsilon={self.epsilon:g}" if abs(self.epsilon / _DEFAULT - 1) > 1e-3 else "",
            f"dtype={dtype}" if dtype else "",
        )
        given = " and ".join(filter(None, options))
        function = f"{self.name}({activation})" if activation else self.name
        modules = "jaxnorm.nnx or linen" if activation else "jaxnorm.nnx, linen or equinox"
        ours = f"the GroupNorm of {modules}" if is_module else f"jaxnorm.{self.name}"
        what = f"the norm {{at}}{f' and the {self.activation} after it' if activation else ''}"
        saved = "only its input and its result are" if activation else "only its result is"
        how = f"replace {what} with {ours}{f', with {given}' if given else ''}: {saved} saved"
        return function, how


def _verified(
    root: Value, inside: Iterable[Value], results: Sequence[Value], normalised: set[Value]
) -> _Norm | None:
    """Return the norm of jaxnorm that computes `results` from `root`, or None if there is none.

    `inside` are the arrays that are computed elementwise from the root, and `normalised` are those
    of them that are computed from the norm's quotient.
    """
    sums = [user for v in inside for user in v.users if user.made_by == "reduce_sum"]
    for shape, axes in {(s.operands[0].shape, tuple(s.equation.params["axes"])) for s in sums}:
        if len(shape) - 1 not in axes or math.prod(shape) != root.size:
            continue
        # The program may reshape x for the sums. Axes that are reshaped or summed over are
        # evaluated in full.
        unequal = (i for i, (m, n) in enumerate(zip(root.shape, shape)) if m != n)
        common = next(unequal, len(root.shape))
        drawn = values.rows_of(root.shape, {*axes, *range(common, len(root.shape))})
        of_rows = kept_arrays.reached(
            [s for s in sums if s.operands[0].shape == shape],
            lambda v: [user for user in v.users if user.size < root.size],
        )
        numbers = {kept_arrays.number(a) or 0 for v in of_rows for a in v.operands}
        epsilons = [n for n in numbers if 0 < n <= _EPSILON] if math.prod(drawn) <= _LARGEST else []
        for epsilon, name in itertools.product(epsilons, ("rms_norm", "layer_norm")):
            # For an x of the size of sqrt(epsilon), it matters where epsilon is added.
            draws = values.draws({root: drawn}, (1.0, 1.0, epsilon**0.5, 10.0))
            quotients, divisors = list[np.ndarray](), [*of_rows]
            for draw in draws:
                x = draw.arrays[root].reshape(drawn[:common] + shape[common:])
                divisor, quotient = _normalised(x, axes, epsilon, name == "layer_norm")
                wide = np.broadcast_to(divisor, x.shape).reshape(drawn)
                divisors = [v for v in divisors if _is_divisor(v, draw, divisor, wide)]
                quotients.append(quotient.reshape(drawn))
                if not divisors:
                    break
            if not divisors:
                continue
            with contextlib.suppress(values.UnknownError):
                if _is_affine(results, draws, quotients):
                    activation = None
                elif (activation := _activation(results, normalised, draws, quotients)) is None:
                    continue
                if shape[-1] != root.shape[-1]:
                    if name == "rms_norm":
                        continue
                    return _Norm("GroupNorm", epsilon, activation=activation)
                axes = (-1,) if axes == (len(shape) - 1,) else axes
                return _Norm(name, epsilon, axes, activation)
    return None


def _normalised(
    x: np.ndarray, axes: tuple[int, ...], epsilon: float, has_mean: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the root by which a norm divides each row, and the quotient."""
    centred = x - x.mean(axes, keepdims=True) if has_mean else x
    root = np.sqrt((centred**2).mean(axes, keepdims=True) + epsilon)
    return root, centred / root


def _is_divisor(value: Value, draw: values.Draw, divisor: np.ndarray, wide: np.ndarray) -> bool:
    """Return True if a value is the root by which a norm divides, or its reciprocal.

    The value may have the shape of `divisor`, without axes of size 1, or broadcast to `wide`.
    """
    with contextlib.suppress(values.UnknownError):
        found = draw(value)
        expected = divisor.reshape(found.shape) if divisor.size == found.size else wide
        return found.ndim == expected.ndim and any(
            values.agree(found, a) for a in (expected, 1 / expected)
        )
    return False


def _is_affine(
    results: Iterable[Value], draws: Sequence[values.Draw], quotients: Sequence[np.ndarray]
) -> bool:
    """Return True if results are ``scale * quotient + bias``, with the same numbers in all draws.

    The first two draws determine the scale and the bias of each element.
    """
    for result in results:
        if not jnp.issubdtype(result.dtype, jnp.inexact):
            return False
        first, second, *others = (
            draw(result).reshape(q.shape) for draw, q in zip(draws, quotients)
        )
        scale = (first - second) / (quotients[0] - quotients[1])
        bias = first - scale * quotients[0]
        pairs = zip(others, quotients[2:], strict=True)
        if not all(values.agree(y, scale * quotient + bias) for y, quotient in pairs):
            return False
    return True


def _activation(
    results: Sequence[Value],
    normalised: Iterable[Value],
    draws: Sequence[values.Draw],
    quotients: Sequence[np.ndarray],
) -> str | None:
    """Return the name of the activation of a norm's result that computes all of `results`."""
    dtypes = [v.dtype for v in normalised]
    for norm in normalised:
        if _is_affine([norm], draws, quotients):
            pairs = [(draw(norm), draw(y)) for draw in draws for y in results]
            name = values.name_of(_ACTIVATIONS, dtypes, pairs)
            if name is not None:
                return name
    return None


def _after_norm(root: Value, region: Sequence[Value], program: Program) -> Advice | None:
    way = [root]
    while way[-1].made_by in NAMING or way[-1].made_by == "reshape":
        way.append(way[-1].operands[0])
    norm, out = way[-1], _leaving(root, region)
    if norm.made_by not in ("jaxnorm.layer_norm", "jaxnorm.rms_norm") or not out:
        return None
    if norm.equation.params["call"].spec.norm.activation is not None:
        return None  # the norm has an activation already
    draws = values.draws({root: values.rows_of(root.shape, [len(root.shape) - 1])})
    try:
        pairs = [(draw.arrays[root], draw(y)) for draw in draws for y in out]
    except values.UnknownError:
        return None
    activation = values.name_of(_ACTIVATIONS, [root.dtype, *[v.dtype for v in region]], pairs)
    inside = {*way, *region}
    before = [v for v in inside if v not in out]
    if activation is None or not kept_arrays.are_used_only_by(before, inside, program):
        return None
    is_free = all(user.made_by == STACKED for user in kept_arrays.users_outside(way, inside))
    if any(program.by_origin.get(v) in program.advised for v in region):
        return None  # the advice found earlier, for a linear layer, frees more memory
    freed = [v for v in region if v not in out] + (way if is_free else [])
    members = program.saved_of(freed)
    members += program.zeros_like(out[0])[: activation == "relu"]
    instead = sum(map(program.extra_bytes, (origin(norm.operands[0]), *out)))
    name = "GroupNorm" if root is not norm else norm.made_by.removeprefix("jaxnorm.")
    function, how = _Norm(name, activation=activation).words()
    return Advice(function, norm.source, how, members, instead, norm.layers)


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
