"""The costs of an equation: bytes of its results, and seconds to recompute them.

The seconds are predicted by a roofline: the larger of the time for arithmetic and the time for
memory. They depend on the kind of device, but not on measurements, so all hosts of a job make the
same plan.
"""

import functools
import math
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from jaxnorm.remat.programs import primitive_name

# (operations per second of a 16-bit matmul, bytes of memory per second), for the kinds of devices
# whose name contains the key. Only the ratio of the two numbers matters for a plan.
_RATES = {
    "B200": (2000e12, 7.0e12),
    "H200": (700e12, 4.2e12),
    "H100": (700e12, 3.0e12),
    "A100": (280e12, 1.8e12),
    "TPU v5p": (459e12, 2.8e12),
    "TPU v6": (918e12, 1.6e12),
}
_OTHER_RATES = (600e12, 3.0e12)

# Costs assume that fusion leaves only one in _FUSED operations to access memory. This applies to
# elementwise operations, reductions, and jaxnorm's norms, softmaxes and losses without matmuls.
_FUSED = 8
# If there is no budget, an array is saved only if its recomputation, unfused, moves more than this
# many bytes for each byte of the array.
_TRAFFIC_PER_BYTE = 500
# Assumed time to generate random bits, relative to an elementwise operation of the same size. It is
# so long that, without a budget, a mask of one byte per element is saved: computing its 32 random
# bits per element again is assumed to cost more.
_RANDOM = 150

# An operation in none of the next five tables is costly, unless `is_costly` makes an exception.
#: Operations that compute each element of their result from one element of each operand.
ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "cos",
    "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log",
    "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "ne", "neg", "nextafter",
    "not", "one_minus_square", "or", "polynomial", "population_count", "pow", "real",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "sub", "tan", "tanh", "xor",
}  # fmt: skip
# Operations that move elements, or repeat them.
_MOVING = {
    "bitcast_convert_type", "broadcast_in_dim", "concatenate", "dynamic_slice",
    "dynamic_update_slice", "empty2", "gather", "iota", "pad", "rev", "slice", "split", "stack",
    "tile", "unstack",
}  # fmt: skip
#: Operations that combine all elements along some axes.
REDUCTIONS = {
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
    "reduce_sum", "reduce_xor",
}  # fmt: skip
# Operations that move no data.
_FREE = {
    "axis_index", "name", "optimization_barrier", "pcast", "pvary", "random_unwrap", "random_wrap",
    "reshape", "sharding_constraint", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip
_RANDOM_BITS = {
    "random_bits", "random_fold_in", "random_seed", "random_split", "rng_bit_generator",
    "rng_uniform", "threefry2x32",
}  # fmt: skip
# The assumed size of an axis whose size is symbolic (`jax.export.symbolic_shape`).
_SYMBOLIC = 1024
# Operations that run an inner program once.
_CALLS = {"jit", "closed_call", "core_call", "custom_jvp_call", "remat2"}


@functools.cache
def _rates() -> tuple[float, float]:
    kind = jax.local_devices()[0].device_kind
    return next((rates for name, rates in _RATES.items() if name in kind), _OTHER_RATES)


def bytes_per_second() -> float:
    """Return the price without a budget: the number of bytes that are worth one second."""
    return _rates()[1] * _FUSED / _TRAFFIC_PER_BYTE


def size(aval: Any) -> int:
    """Return the number of bytes of an array on one device; 0 for other types, such as tokens."""
    return math.prod(local_shape(aval)) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def local_shape(aval: Any) -> tuple[int, ...]:
    """Return the shape of one device's shard if Explicit axes shard an array, else its shape."""
    sharding: Any = getattr(aval, "sharding", None)
    is_sharded = any(getattr(sharding, "spec", ()))
    return tuple(sharding.shard_shape(_shape(aval))) if is_sharded else _shape(aval)


def _shape(aval: Any) -> tuple[int, ...]:
    return tuple(n if isinstance(n, int) else _SYMBOLIC for n in getattr(aval, "shape", ()))


def is_costly(equation: Any) -> bool:
    """Return True for an equation that may run twice only to meet a budget, such as a matmul."""
    name = primitive_name(equation)
    if equation.effects:
        return True
    if name in _CALLS:
        return any(is_costly(e) for body in bodies(equation) for e in body.eqns)
    if name == "dot_general" and _terms(equation) == 1:
        return False  # `jnp.einsum` lowers outer and elementwise products to such matmuls
    tables = ELEMENTWISE, _MOVING, REDUCTIONS, _FREE, _RANDOM_BITS
    return not any(name in table for table in tables) and not _is_row_function(name)


def _is_row_function(name: str) -> bool:
    """Return True if a primitive is a norm, a softmax or a loss of jaxnorm that runs no matmul.

    The primitives of jaxnorm that run matmuls have "linear" in their names.
    """
    return name.startswith("jaxnorm.") and "linear" not in name


def seconds(equation: Any) -> float:
    """Return the predicted time of an equation on one device."""
    name = primitive_name(equation)
    operations, bandwidth = _rates()
    if name in _FREE:
        return 0.0
    if name != "pallas_call" and (inner := bodies(equation)):
        runs = equation.params["length"] if name == "scan" else 1
        return runs * sum(seconds(e) for body in inner for e in body.eqns)
    read, written = (sum(size(v.aval) for v in vs) for vs in (equation.invars, equation.outvars))
    if name in ELEMENTWISE or name in _MOVING:
        return written / bandwidth / _FUSED
    if name in _RANDOM_BITS:
        return written / bandwidth / _FUSED * _RANDOM
    if name in REDUCTIONS:
        return max(read, written) / bandwidth / _FUSED
    if _is_row_function(name):
        return (read + written) / bandwidth / _FUSED
    return max(_flops(equation, name) / operations, (read + written) / bandwidth)


def contains(equation: Any, primitive: str) -> bool:
    """Return True if an equation, or one inside its inner programs, has the given primitive."""
    inner = (e for body in bodies(equation) for e in body.eqns)
    return equation.primitive.name == primitive or any(contains(e, primitive) for e in inner)


def bodies(equation: Any) -> list[Any]:
    """Return the inner programs of an equation, without their constants."""
    high_level = equation.params.get("_prim")
    params = equation.params if high_level is None else vars(high_level)
    return [getattr(j, "jaxpr", j) for j in jaxprs_in_params(params)]


def _flops(equation: Any, name: str) -> float:
    """Return the number of operations of a matmul, a convolution, an attention or a kernel."""
    shapes = [_shape(v.aval) for v in equation.invars]
    outputs = sum(math.prod(_shape(v.aval)) for v in equation.outvars[:1])
    if name == "dot_general":
        flops = 2 * outputs * _terms(equation)
    elif name.startswith("ragged_dot"):
        flops = 2 * outputs * shapes[0][-1]
    elif name == "conv_general_dilated":
        features = equation.params["dimension_numbers"].rhs_spec[0]
        flops = 2 * outputs * math.prod(shapes[1]) // max(shapes[1][features], 1)
    elif "dot_product_attention" in name and len(shapes[0]) == 4:
        flops = 4 * math.prod(shapes[0]) * shapes[1][1]
    elif name == "pallas_call":
        return float(getattr(equation.params["cost_estimate"], "flops", 0))
    elif name.startswith("jaxnorm.linear_"):
        # If a linear loss runs again, its forward pass computes the logits, but no gradients.
        flops = 2 * math.prod(shapes[0]) * math.prod(shapes[1]) // max(shapes[0][-1], 1)
    else:
        return 0.0
    # A matmul of 32-bit numbers takes about twice as long as one of 16 bits.
    return flops * max(1, equation.invars[0].aval.dtype.itemsize / 2)


def _terms(matmul: Any) -> int:
    """Return the number of products whose sum is an element of a matmul's result."""
    (contracted, _), _ = matmul.params["dimension_numbers"]
    return math.prod(matmul.invars[0].aval.shape[i] for i in contracted)
