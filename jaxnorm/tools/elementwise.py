"""What the arrays of a program are made of, element by element, in the graph of `kept_arrays`."""

import functools
from collections.abc import Iterable, Iterator, Sequence

from jaxnorm.tools.kept_arrays import NAMING, Value, origin, reached

# What makes the same elements again, in another shape or dtype.
COPYING = {"reshape", "transpose", "squeeze", "expand_dims", "convert_element_type"}

ELEMENTWISE = {
    "abs", "add", "add_any", "and", "bitcast_convert_type", "cbrt", "ceil", "clamp",
    "convert_element_type", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "polynomial", "pow",
    "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor", *NAMING,
}  # fmt: skip

# Of which an activation has one; the product with a gate alone, or a norm, has none.
NONLINEAR = {
    "abs", "clamp", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic",
    "max", "min", "select_n", "tanh",
}  # fmt: skip

# What is there without being computed.
GIVEN = ("argument", "slice", "literal")


def takers(value: Value) -> Iterator[Value]:
    """What takes a value, also by another name or in another dtype."""
    for taker in value.takers:
        yield taker
        if taker.made_by in NAMING or taker.made_by == "convert_element_type":
            yield from takers(taker)


def rows_and_weight(product: Value) -> tuple[Value, Value] | None:
    """The factors of a linear layer; None for any other value.

    In both orders, and along any axis of the rows: `jax.vmap` of ``weight @ x`` puts the weight
    first, and the axis of its result, too.
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
    """Whether an array is a parameter, or a copy of one."""
    value = origin(value)
    while value.made_by in COPYING:
        value = origin(value.operands[0])
    return value.made_by in GIVEN


def is_product(value: Value) -> bool:
    """A matrix product, with what a linear layer does to it: a bias, a cast."""
    value = origin(value)
    if value.made_by == "dot_general":
        return True
    if value.made_by in COPYING:
        return is_product(value.operands[0])
    if value.made_by == "add":
        rest = [v for v in value.operands if v.size == value.size and not is_spread(v)]
        # A number is no bias: softplus and hard_swish add one to what they are of.
        is_number = any(v.made_by == "literal" for v in value.operands)
        return len(rest) == 1 and not is_number and is_product(rest[0])
    return False


@functools.cache
def is_spread(value: Value) -> bool:
    """Whether it is made of smaller arrays alone: numbers for rows, for columns."""
    value = origin(value)
    if value.made_by == "broadcast_in_dim":
        return True
    return (
        value.made_by in ELEMENTWISE
        and bool(value.operands)
        and all(v.size < value.size or is_spread(v) for v in value.operands)
    )


def is_zeros(value: Value, like: Value) -> bool:
    """An array of one number, which JAX hands over for a derivative."""
    is_of_literals = all(v.made_by == "literal" for v in value.operands)
    return value.made_by == "broadcast_in_dim" and is_of_literals and value.shape == like.shape


def is_reduced(value: Value, limit: int) -> bool:
    """Whether a small array is of a sum, or of another reduction."""
    return any(
        v.made_by.startswith(("reduce_", "arg", "cum", "dot_")) for v in ancestors(value, limit)
    )


def ancestors(value: Value, limit: int) -> Iterable[Value]:
    """What it is made of, itself included; of an array of `limit` elements nothing more."""

    def made_of(v: Value) -> Sequence[Value]:
        is_copy = v.made_by in NAMING or v.made_by == "convert_element_type"
        return v.operands if v is value or v.size < limit or is_copy or is_spread(v) else ()

    return reached([value], made_of).values()
