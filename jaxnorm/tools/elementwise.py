"""Questions about elementwise operations in the graph of `kept_arrays`."""

import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxnorm.tools.kept_arrays import NAMING, Value, origin, reached

# Primitives that return the same elements in another shape or dtype.
COPYING = {"reshape", "transpose", "squeeze", "convert_element_type"}

ELEMENTWISE = {
    "abs", "add", "add_any", "and", "bitcast_convert_type", "cbrt", "ceil", "clamp",
    "convert_element_type", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "polynomial", "pow",
    "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor", *NAMING,
}  # fmt: skip

# Primitives of activations. A product with a gate, or a norm, uses others.
NONLINEAR = {
    "abs", "clamp", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic",
    "max", "min", "select_n", "tanh",
}  # fmt: skip

# Values that are there without being computed.
GIVEN = ("argument", "layer's", "literal")


def users(value: Value) -> Iterator[Value]:
    """Yield the users of a value, including the users of its casts and renamed copies."""
    for user in value.users:
        yield user
        if user.made_by in NAMING or user.made_by == "convert_element_type":
            yield from users(user)


def uncast(value: Value) -> Value:
    """Return what made an array, before it was cast."""
    value = origin(value)
    while value.made_by == "convert_element_type":
        value = origin(value.operands[0])
    return value


def number(value: Value) -> float | None:
    """Return the number that a literal, or a cast or broadcast of one, consists of."""
    value = origin(value)
    while value.made_by in ("broadcast_in_dim", *COPYING) and value.operands:
        value = origin(value.operands[0])
    return None if value.number is None or np.size(value.number) != 1 else float(value.number)


def rows_and_weight(product: Value) -> tuple[Value, Value] | None:
    """Return the factors of a linear layer's matmul; None for any other value.

    The factors may come in either order, and the matmul may be along any axis of the rows:
    `jax.vmap` of ``weight @ x`` puts the weight first.
    """
    if product.made_by != "dot_general" or product.equation is None:
        return None
    (lhs, rhs), batch = product.equation.params["dimension_numbers"]
    first, second = product.operands
    found = [
        (rows, weight)
        for rows, over, weight in ((first, lhs, second), (second, rhs, first))
        if len(over) == 1 and len(weight.shape) == 2
    ]
    if any(batch) or not found:
        return None
    return next((pair for pair in found if not _is_given(pair[0])), found[0])


def _is_given(value: Value) -> bool:
    """Return True for a parameter, or a copy of one."""
    value = origin(value)
    while value.made_by in COPYING:
        value = origin(value.operands[0])
    return value.made_by in GIVEN


def is_product(value: Value) -> bool:
    """Return True for a matmul, also with a linear layer's bias, a cast or a reshape after it."""
    value = origin(value)
    if value.made_by == "dot_general":
        return True
    if value.made_by in COPYING:
        return is_product(value.operands[0])
    if value.made_by == "add":
        rest = [v for v in value.operands if v.size == value.size and not is_spread(v)]
        # A number is not a bias: softplus and hard_swish add one to their operand.
        is_number = any(v.made_by == "literal" for v in value.operands)
        return len(rest) == 1 and not is_number and is_product(rest[0])
    return False


@functools.cache
def is_spread(value: Value) -> bool:
    """Return True if a value is broadcast from smaller arrays, such as a number per row."""
    value = origin(value)
    if value.made_by == "broadcast_in_dim":
        return True
    return (
        value.made_by in ELEMENTWISE
        and bool(value.operands)
        and all(v.size < value.size or is_spread(v) for v in value.operands)
    )


def is_zeros(value: Value, like: Value) -> bool:
    """Return True for an array of one number, which JAX saves for some derivatives."""
    is_of_literals = all(v.made_by == "literal" for v in value.operands)
    return value.made_by == "broadcast_in_dim" and is_of_literals and value.shape == like.shape


def is_reduced(value: Value, limit: int) -> bool:
    """Return True if a small array depends on a sum, or on another reduction."""
    return any(
        v.made_by.startswith(("reduce_", "arg", "cum", "dot_")) for v in ancestors(value, limit)
    )


def ancestors(value: Value, limit: int) -> Iterable[Value]:
    """Return a value and its ancestors, not following arrays of `limit` elements or more."""

    def made_of(v: Value) -> Sequence[Value]:
        is_copy = v.made_by in NAMING or v.made_by == "convert_element_type"
        return v.operands if v is value or v.size < limit or is_copy or is_spread(v) else ()

    return reached([value], made_of).values()
