"""The rounding error of each kind of JAX equation, for `program_error`.

`RULES` maps the name of a primitive to the rule of its equations.

The rounding error of one equation, where u is the unit roundoff of its result's dtype:

- Additions, products and conversions are correctly rounded. Their error is at most u times the
  result.
- Other elementwise functions (exp, rsqrt, tanh, quotients) have an error of ``FEW`` roundoffs. Code
  for exp or a power first multiplies the argument x by a constant, which adds ``x * u``.
- A sum of n terms, in any order, has an error of at most ``SAFETY * sqrt(n) * u`` times the sum of
  the terms' magnitudes (a random walk, as in `reference`).
- Results below the smallest normal number may be flushed to zero.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from reference import SAFETY, unit_roundoff

FEW = 8.0


@dataclasses.dataclass(frozen=True)
class Value:
    """An array of the program, and a bound on the error of each element.

    Floating-point values are stored in float64. Booleans and integers have their own dtype.
    Integers are exact. The error of a boolean is 1 if rounding errors may change it, and 0 if not.
    """

    value: np.ndarray
    error: np.ndarray

    def map(self, function: Callable) -> "Value":
        """Apply a reshape, or a linear map with weights 0 and 1, to both values and errors."""
        return Value(function(self.value), function(self.error))


def exact(array: Any) -> Value:
    if jnp.issubdtype(getattr(array, "dtype", type(array)), jax.dtypes.extended):
        return Value(array, np.zeros(()))  # a random key
    array = np.asarray(array)
    value = array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.inexact) else array
    return Value(value, np.zeros(array.shape))


def stored(result: Value, rounding: Any, dtype: Any) -> Value:
    """Return the result of a jaxpr equation. Its error includes the rounding of the result.

    The rounding error is `rounding` (a number for each element) times the dtype's unit roundoff.
    """
    dtype = np.dtype(dtype)
    value = np.asarray(result.value, np.float64)
    largest = float(ml_dtypes.finfo(dtype).max)
    value = np.where(
        np.abs(value) > largest * (1 + unit_roundoff(dtype)), np.copysign(np.inf, value), value
    )
    # Programs may replace subnormal numbers by 0, except in float16, to which they only cast.
    kind = "smallest_subnormal" if dtype == np.float16 else "smallest_normal"
    least = float(getattr(ml_dtypes.finfo(dtype), kind)) if np.any(rounding) else 0.0
    # The analysis itself computes in float64. If the program computes in float64, too, the analysis
    # makes rounding errors as large as those of the program, so the bound is doubled.
    own = unit_roundoff(dtype) * (2 if dtype == np.float64 else 1) * np.asarray(rounding) + least
    error = np.broadcast_to(result.error, value.shape) + np.where(np.isfinite(value), own, 0)
    # Infinities and NaN must be reproduced exactly.
    return Value(value, np.where(np.isfinite(value), error, 0))


# Each rule below computes one kind of jaxpr equation and returns two things. The first is the
# result, with the error that comes from the errors of the operands. The second is the rounding
# error of the equation itself: a number for each element, in units of the unit roundoff.


def _product(a: Value, b: Value) -> Value:
    error = np.abs(a.value) * b.error + np.abs(b.value) * a.error + a.error * b.error
    # 0 * infinity is NaN. The analysis continues with this NaN instead of raising an error, because
    # the program may discard the product in a later `select`.
    return Value(a.value * b.value, error)


def _quotient(a: Value, b: Value) -> Value:
    value = a.value / b.value
    least = np.maximum(np.abs(b.value) - b.error, 0)
    error = a.error + np.abs(value) * b.error
    return Value(value, np.divide(error, least, out=np.zeros_like(error), where=error != 0))


def _elementwise(function: Callable) -> Callable:
    """Return the rule of an elementwise function of x.

    The rule evaluates the function at both ends of the interval [x - error, x + error]. It may only
    be used for functions whose largest change in this interval is at one of the ends.
    """

    def rule(operands, **params):
        (x,) = operands
        value = function(x.value, **params)
        changes = [np.abs(function(x.value + sign * x.error, **params) - value) for sign in (-1, 1)]
        error = np.where(x.error == 0, 0, np.maximum(*changes))
        error = np.where(np.isnan(error), np.inf, error)
        return Value(value, error), FEW * np.abs(value)

    return rule


def _lipschitz(function: Callable, rounded: bool = True) -> Callable:
    def rule(operands, **_):
        (x,) = operands
        value = function(x.value)
        return Value(value, x.error), FEW * np.maximum(np.abs(value), 1) * rounded

    return rule


def _power_of(base: Callable) -> Callable:
    def rule(operands, **_):
        result, rounding = _elementwise(base)(operands)
        x = operands[0].value
        return result, rounding + SAFETY * np.abs(np.where(result.value == 0, 0, x * result.value))

    return rule


def _power(operands, **_):
    x, y = operands
    value = np.power(x.value, y.value)
    ends = [
        np.abs(np.power(x.value + i * x.error, y.value + j * y.error) - value)
        for i in (-1, 1)
        for j in (-1, 1)
    ]
    exponent = np.abs(y.value * np.log(np.abs(x.value)))
    exponent = np.where(np.isfinite(exponent), exponent, 0)
    return Value(value, np.max(ends, 0)), (FEW + SAFETY * exponent) * np.abs(value)


def _sum(operands, axes, **_):
    (x,) = operands
    result = x.map(lambda a: a.sum(tuple(axes)))
    n = x.value.size / max(result.value.size, 1)
    walk = SAFETY * math.sqrt(n) * np.abs(x.value).sum(tuple(axes)) * (n > 1)
    return result, walk


def _cumulative_sum(operands, axis, reverse, **_):
    def cumulative(a):
        return np.flip(np.cumsum(np.flip(a, axis), axis), axis) if reverse else np.cumsum(a, axis)

    (x,) = operands
    n = x.value.shape[axis]
    return x.map(cumulative), SAFETY * math.sqrt(n) * cumulative(np.abs(x.value))


def _extreme(function: Callable) -> Callable:
    def rule(operands, axes, **_):
        (x,) = operands
        axes = tuple(axes)
        return Value(function(x.value, axis=axes), x.error.max(axis=axes)), 0

    return rule


def _choice(function: Callable) -> Callable:
    """Return the rule of a function that does not decrease with any operand, such as `maximum`."""

    def rule(operands, **_):
        value = function(*[o.value for o in operands])
        ends = [function(*[o.value + sign * o.error for o in operands]) for sign in (-1, 1)]
        error = np.maximum(*(np.where(end == value, 0, np.abs(end - value)) for end in ends))
        return Value(value, error), 0

    return rule


def is_uncertain(a: Value, b: Value) -> np.ndarray:
    """Return 1 where rounding errors may change the result of a comparison of a and b, else 0.

    Equal values count as certain: they are, for example, zeros of masked elements, or the maximum
    of a row and the element that it comes from.
    """
    is_near = np.abs(a.value - b.value) <= a.error + b.error
    return np.where(is_near & (a.value != b.value), 1.0, 0.0)


def _select(operands, **_):
    """The error covers all cases of an element if rounding errors may change its choice.

    Cases for which there is no bound are left out: a program chooses between two formulas where
    both are accurate, although the analysis may find a bound for one of them only.
    """
    which, *cases = operands
    index = np.broadcast_to(np.asarray(which.value, np.int64), cases[0].value.shape)
    chosen = joined(lambda arrays: np.choose(index, arrays), cases)
    if not np.any(which.error):
        return chosen, 0
    furthest = chosen.error
    for case in cases:
        distance = np.abs(np.asarray(case.value, float) - np.asarray(chosen.value, float))
        distance = np.where(case.value == chosen.value, 0, distance)
        reach = distance + case.error
        furthest = np.maximum(furthest, np.where(np.isfinite(reach), reach, 0))
    return Value(chosen.value, np.where(which.error > 0, furthest, chosen.error)), 0


def _matmul(operands, dimension_numbers, **_):
    a, b = operands
    (of_a, of_b), (batch_a, batch_b) = dimension_numbers

    def matrices(x, contracted, batch, last):
        free = [i for i in range(x.ndim) if i not in {*contracted, *batch}]
        order = [*batch, *free, *contracted] if last else [*batch, *contracted, *free]
        lead, inner = [x.shape[i] for i in batch], math.prod(x.shape[i] for i in contracted)
        rest = math.prod(x.shape[i] for i in free)
        shape = [*lead, rest, inner] if last else [*lead, inner, rest]
        return x.transpose(order).reshape(shape), [x.shape[i] for i in free]

    def product(x, y):
        left, rows = matrices(x, of_a, batch_a, True)
        right, columns = matrices(y, of_b, batch_b, False)
        return (left @ right).reshape([x.shape[i] for i in batch_a] + rows + columns)

    n = math.prod(a.value.shape[i] for i in of_a)
    magnitude = product(np.abs(a.value), np.abs(b.value))
    error = product(np.abs(a.value), b.error) + product(a.error, np.abs(b.value))
    error = error + product(a.error, b.error)
    return Value(product(a.value, b.value), error), SAFETY * math.sqrt(n) * magnitude


def _bilinear(function: Callable, terms: Callable) -> Callable:
    """Return the rule that computes the rounding error of a bilinear operation.

    A bilinear operation, such as a convolution, is linear in each of its two operands a and b. Each
    element of the result is a sum of products. ``terms(b, params)`` is the number of products in
    such a sum.
    """

    def rule(operands, **params):
        (a, b), rest = operands[:2], [jnp.asarray(o.value) for o in operands[2:]]

        def product(x, y):
            with jax.enable_x64(True):
                given = params | {"preferred_element_type": np.dtype("float64")}
                return np.asarray(function(jnp.asarray(x), jnp.asarray(y), *rest, **given))

        sizes, n = (np.abs(a.value), np.abs(b.value)), terms(b.value, params)
        error = product(sizes[0], b.error) + product(a.error, sizes[1]) + product(a.error, b.error)
        return Value(product(a.value, b.value), error), SAFETY * math.sqrt(n) * product(*sizes)

    return rule


def _convolved(b: np.ndarray, params: dict[str, Any]) -> float:
    return b.size / b.shape[params["dimension_numbers"].rhs_spec[0]]


def _convert(operands, new_dtype, **_):
    (x,) = operands
    # Values that the new dtype can represent are not rounded.
    is_rounded = (x.error > 0) | (x.value.astype(new_dtype).astype(np.float64) != x.value)
    return Value(x.value, x.error), np.abs(x.value) * is_rounded


def _added(sign: int) -> Callable:
    def rule(operands, **_):
        a, b = operands
        value = a.value + sign * b.value
        # Adding an exact zero causes no rounding error.
        is_rounded = np.logical_and(*(np.abs(o.value) + o.error > 0 for o in operands))
        return Value(value, a.error + b.error), np.abs(value) * is_rounded

    return rule


def _by_jax(primitive: Any, adds: bool = False) -> Callable:
    """Return a rule that applies JAX's primitive to the values and to their errors.

    The primitive only moves elements or, with `adds`, adds some of them.
    """

    def rule(operands, **params):
        # A scatter's `params` contain the addition as a jaxpr in the program's dtype. Replace it
        # with an addition in float64.
        if adds:
            with jax.enable_x64(True):
                params |= {"update_jaxpr": jax.make_jaxpr(jax.lax.add)(0.0, 0.0).jaxpr}

        def run(field):
            with jax.enable_x64(True):
                arrays = [
                    getattr(o, field) if o.value.dtype == np.float64 else o.value for o in operands
                ]
                return np.asarray(primitive.bind(*map(jax.device_put, arrays), **params))

        result = Value(run("value"), run("error"))
        if not adds:
            return result, 0
        terms = [np.abs(o.value) if o.value.dtype == np.float64 else o.value for o in operands]
        with jax.enable_x64(True):
            magnitude = np.asarray(primitive.bind(*map(jax.device_put, terms), **params))
        return result, SAFETY * math.sqrt(operands[-1].value.size) * magnitude

    return rule


def _view(function: Callable) -> Callable:
    def rule(operands, **params):
        return operands[0].map(lambda a: function(a, **params)), 0

    return rule


def _broadcast(a, shape, broadcast_dimensions, **_):
    kept = dict(zip(broadcast_dimensions, a.shape))
    return np.broadcast_to(a.reshape([kept.get(i, 1) for i in range(len(shape))]), shape)


def _iota(_, *, shape, dimension, **_params):
    return exact(np.indices(shape, sparse=True)[dimension] + np.zeros(shape, np.int64)), 0


def _slice(a, start_indices, limit_indices, strides, **_):
    strides = strides or [1] * a.ndim
    return a[tuple(map(slice, start_indices, limit_indices, strides))]


def joined(function: Callable, values: Any, *arguments: Any) -> Value:
    """Return the Value of an array that `function` makes of a list of arrays."""
    fields = ([getattr(value, f) for value in values] for f in ("value", "error"))
    return Value(*(function(arrays, *arguments) for arrays in fields))


def parts(function: Callable, operand: Value, *arguments: Any) -> list[Value]:
    """Return the Values of the arrays into which `function` splits an array."""
    fields = (function(getattr(operand, f), *arguments) for f in ("value", "error"))
    return [Value(*of_part) for of_part in zip(*fields)]


def _multiply(operands, **_):
    result = _product(*operands)
    return result, np.abs(result.value)


def _divide(operands, **_):
    result = _quotient(*operands)
    return result, FEW * np.abs(result.value)


def _one_minus_square(operands, **_):
    """Analyse 1 - x * x, where x is a value of tanh. This is the derivative of tanh.

    The product and the difference are both rounded.
    """
    result, rounding = _elementwise(lambda x: 1 - x * x)(operands)
    return result, rounding + operands[0].value ** 2


def _logistic(x, **_):
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-np.abs(x)))


_erf = np.vectorize(math.erf, otypes=[float])

RULES: dict[str, Callable] = {
    "add": _added(1),
    "add_any": _added(1),
    "sub": _added(-1),
    "mul": _multiply,
    "div": _divide,
    "neg": _lipschitz(np.negative, rounded=False),
    "abs": _lipschitz(np.abs, rounded=False),
    **{
        name: lambda operands, _function=function, **_: (exact(_function(operands[0].value)), 0)
        for name, function in {"sign": np.sign, "floor": np.floor, "round": np.round}.items()
    },
    "sin": _lipschitz(np.sin),
    "cos": _lipschitz(np.cos),
    "exp": _power_of(lambda x, **_: np.exp(x)),
    "exp2": _power_of(lambda x, **_: np.exp2(x)),
    **{
        name: _elementwise(lambda x, _function=function, **_: _function(x))
        for name, function in {
            **{"expm1": np.expm1, "log": np.log, "log1p": np.log1p, "tanh": np.tanh},
            **{"erf": _erf, "erfc": lambda x: 1 - _erf(x), "square": np.square},
            **{"sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt},
        }.items()
    },
    "logistic": _power_of(_logistic),
    "one_minus_square": _one_minus_square,
    "integer_pow": _elementwise(lambda x, y, **_: x ** float(y)),
    "pow": _power,
    "reduce_sum": _sum,
    "cumsum": _cumulative_sum,
    "reduce_max": _extreme(np.max),
    "reduce_min": _extreme(np.min),
    "max": _choice(np.maximum),
    "min": _choice(np.minimum),
    "clamp": _choice(lambda least, x, most: np.clip(x, least, most)),
    "select_n": _select,
    "dot_general": _matmul,
    "conv_general_dilated": _bilinear(jax.lax.conv_general_dilated_p.bind, _convolved),
    # b is the weight, or the activations when the weight's gradient is computed. Each sum runs over
    # one of b's axes, so it has at most max(b.shape) terms.
    "ragged_dot_general": _bilinear(jax.lax.ragged_dot_general, lambda b, _: max(b.shape)),
    "convert_element_type": _convert,
    # The error depends on the bits of the format. The array's dtype may have more bits.
    "reduce_precision": lambda operands, exponent_bits, mantissa_bits: (
        Value(
            operands[0].value,
            operands[0].error + np.abs(operands[0].value) * 2.0 ** -(mantissa_bits + 1),
        ),
        0,
    ),
    "iota": _iota,
    "broadcast_in_dim": _view(_broadcast),
    "reshape": _view(lambda a, new_sizes, **_: a.reshape(new_sizes)),
    "squeeze": _view(lambda a, dimensions, **_: a.squeeze(tuple(dimensions))),
    "expand_dims": _view(lambda a, dimensions, **_: np.expand_dims(a, tuple(dimensions))),
    "transpose": _view(lambda a, permutation, **_: a.transpose(permutation)),
    "rev": _view(lambda a, dimensions, **_: np.flip(a, tuple(dimensions))),
    "slice": _view(_slice),
    "concatenate": lambda operands, dimension, **_: (
        joined(np.concatenate, operands, dimension),
        0,
    ),
    "stack": lambda operands, axis, **_: (joined(np.stack, operands, axis), 0),
    **dict.fromkeys(("copy", "copy_p", "name"), _view(lambda a, **_: a)),
    "reduce_and": _view(lambda a, axes, **_: a.all(tuple(axes))),
    **{
        primitive.name: _by_jax(primitive)
        for primitive in (
            *(jax.lax.gather_p, jax.lax.dynamic_slice_p, jax.lax.dynamic_update_slice_p),
            *(jax.lax.pad_p, jax.lax.scatter_p),
        )
    },
    **dict.fromkeys(("scatter-add", "scatter_add"), _by_jax(jax.lax.scatter_add_p, adds=True)),
}
