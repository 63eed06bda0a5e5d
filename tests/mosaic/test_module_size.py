"""The number of operations in kernels' MLIR modules, which determines how long a first call takes.

Each operation of a kernel costs time, first when Python lowers it and again when it is compiled. So
a kernel must not emit a separate operation for each row, or for each vector of a thread. Instead,
it must use a loop, or a single Mosaic operation for all rows or all vectors. For example, one
operation copies several rows. An array gets its layout when it is created, because a later
conversion would be an additional operation.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir

import jaxnorm

# The maximum number of MLIR operations in the kernels of forward and backward together. It is
# chosen such that tracing, lowering and compiling take at most about 4 s in a first call.
#
# Measured with jax 0.12.0 on an idle core of a server (`python -m benchmarks.run compile`): tracing
# and lowering take 0.07 to 0.09 ms per operation. This is about the same for all functions.
# Compiling both passes for an H100 takes another 0.4 to 1 s. If the other cores are busy,
# everything takes up to twice as long.
#
# In jax 0.11.2, calls with unaligned rows take 2 to 2.5 times as long as in 0.12.0. The reason is
# that the layout inference of 0.11.2 prints operations in order to sort constraints.
MOST = 16_000

BF16, F16, F32 = "bfloat16", "float16", "float32"


@dataclasses.dataclass(frozen=True)
class Function:
    """A function whose kernels are measured.

    Attributes:
      call: the function. Its operands are x, then `like_x` arrays with the shape of x, then
        `columns` arrays with one element per column.
      x: a function that maps the number of columns to the shape of x.
      like_x: the number of operands with the shape of x, not counting x itself.
      columns: the number of operands with one element per column.
    """

    call: Callable[..., Any]
    x: Callable[[int], tuple[int, ...]] = lambda cols: (8192, cols)
    like_x: int = 0
    columns: int = 0


def masked(x: jax.Array, **given: Any) -> jax.Array:
    return jaxnorm.softmax(x, where=jnp.ones((1, *x.shape[1:]), bool), **given)


def loss(x: jax.Array, *, dtype: Any = None, implementation: str) -> jax.Array:
    del dtype
    labels = jnp.zeros(x.shape[:1], jnp.int32)
    return jaxnorm.softmax_cross_entropy_with_integer_labels(
        x, labels, implementation=implementation
    )


def log_prob(x: jax.Array, *, dtype: Any = None, implementation: str) -> Any:
    del dtype
    labels = jnp.zeros(x.shape[:1], jnp.int32)
    return jaxnorm.log_prob_and_entropy(x, labels, implementation=implementation)


def of_groups(x: jax.Array, scale: jax.Array, bias: jax.Array, **given: Any) -> jax.Array:
    grouped = x.reshape(*x.shape[:-1], 8, -1)
    parameters = (a.reshape(8, 1, 1, -1) for a in (scale, bias))
    return jaxnorm.layer_norm(grouped, *parameters, axis=(1, 2, 4), **given)


def norm_add(x: jax.Array, residual: jax.Array, scale: jax.Array, **given: Any) -> jax.Array:
    del given["dtype"]  # The result has the residual's dtype.
    return jaxnorm.rms_norm_add(x, residual, scale, **given)


def causal(x: jax.Array, **given: Any) -> jax.Array:
    return jaxnorm.softmax(x, causal=True, **given)


def causal_log(x: jax.Array, **given: Any) -> jax.Array:
    return jaxnorm.log_softmax(x, causal=True, **given)


def biased(x: jax.Array, bias: jax.Array, **given: Any) -> jax.Array:
    """Return a causal softmax with a mask and a bias.

    All heads share the bias, which is differentiated.
    """
    where = jnp.ones((1, *x.shape[1:]), bool)
    return jaxnorm.softmax(x, where=where, bias=bias[:1], causal=True, **given)


def of_samples(x: jax.Array, scale: jax.Array, bias: jax.Array, **given: Any) -> jax.Array:
    parameters = (jnp.broadcast_to(a, (x.shape[0], 1, x.shape[2])) for a in (scale, bias))
    return jaxnorm.layer_norm(x, *parameters, scale_offset=1.0, **given)


def rotated(x: jax.Array, scale: jax.Array, **given: Any) -> jax.Array:
    table = jnp.ones((x.shape[-3], 1, x.shape[-1] // 2))
    return jaxnorm.rms_norm_rope(x, scale, table, table, **given)


def activated(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function, activation="silu")


def gated_sum(x: jax.Array, *operands: jax.Array, **given: Any) -> Any:
    *others, gate = operands
    return jaxnorm.add_layer_norm(x, *others, gate=gate, **given)


FUNCTIONS = {
    "softmax": Function(jaxnorm.softmax),
    "log_softmax": Function(jaxnorm.log_softmax),
    "layer_norm": Function(jaxnorm.layer_norm, columns=2),
    "rms_norm": Function(jaxnorm.rms_norm, columns=1),
    "add_layer_norm": Function(jaxnorm.add_layer_norm, like_x=1, columns=2),
    "add_rms_norm": Function(jaxnorm.add_rms_norm, like_x=1, columns=1),
    "add_layer_norm with a gate": Function(gated_sum, like_x=1, columns=3),
    "rms_norm_add": Function(norm_add, like_x=1, columns=1),
    "rms_norm_add_rms_norm": Function(jaxnorm.rms_norm_add_rms_norm, like_x=1, columns=2),
    "rms_norm_gated": Function(jaxnorm.rms_norm_gated, like_x=1, columns=1),
    "layer_norm silu": Function(activated(jaxnorm.layer_norm), columns=2),
    "silu of groups": Function(activated(of_groups), lambda cols: (8, 16, 16, cols), columns=2),
    "rms_norm_rope": Function(rotated, lambda cols: (4, 512, 8, cols), columns=1),
    "causal_softmax": Function(causal, lambda cols: (8, cols, cols)),
    "causal_log_softmax": Function(causal_log, lambda cols: (8, 512, cols)),
    "masked_softmax": Function(masked, lambda cols: (8, 64, cols)),
    "biased_softmax": Function(biased, lambda cols: (8, 128, cols), like_x=1),
    "cross_entropy": Function(loss),
    "log_prob_and_entropy": Function(log_prob),
    "layer_norm of samples": Function(of_samples, lambda cols: (16, 512, cols), columns=2),
    "layer_norm of groups": Function(of_groups, lambda cols: (8, 16, 16, cols), columns=2),
}

# The numbers of columns of calls, for each function and each pair of dtypes of x and y. Together,
# these calls use every rule of the schedules. There are also calls whose kernels had too many
# operations in earlier versions: one operation for each row or for each vector. In these calls,
# rows are unaligned, or a row is shorter than the elements that a warp loads at once, or some tiles
# are above a causal diagonal. Others have kernels with the most operations, found by a search over
# many widths and dtypes.
COLUMNS = {
    (BF16, BF16): {
        "layer_norm": [8, 24, 1016, 1024, 5120, 50256],
        "rms_norm_add_rms_norm": [24, 768, 50256, 65536],
        "add_layer_norm": [40, 4088],
        "rms_norm_add": [72],
        "causal_softmax": [1023, 50257],
        "masked_softmax": [4095],
        "add_rms_norm": [12288],
        "cross_entropy": [50257],
        "log_prob_and_entropy": [50257],
        "biased_softmax": [50257],
        "layer_norm of groups": [256],
        "rms_norm_gated": [24, 128, 4088, 4096, 50256],
        "layer_norm silu": [24, 1016, 4088, 4096, 50256],
        "silu of groups": [256],
        "add_layer_norm with a gate": [24, 1152, 4088, 50256],
        "rms_norm_rope": [128],
    },
    (F32, F32): {
        "layer_norm": [24, 131072],
        "rms_norm_add_rms_norm": [24, 5120],
        "softmax": [8, 50257],
        "log_softmax": [3000],
        "causal_log_softmax": [65535],
        "rms_norm_rope": [80],
    },
    (F32, BF16): {
        "rms_norm": [56],
        "add_rms_norm": [1000],
        "layer_norm": [50256],
        "layer_norm of samples": [4088],
        "rms_norm_gated": [65536],
        "add_layer_norm with a gate": [65536],
        "rms_norm_rope": [512],
    },
    (F16, F16): {
        "rms_norm_add_rms_norm": [120],
        "layer_norm": [200],
    },
    (BF16, F32): {
        "add_rms_norm": [50256],
        "add_layer_norm": [57352],
    },
}
CASES = [
    (name, cols, *dtypes)
    for dtypes, functions in COLUMNS.items()
    for name, widths in functions.items()
    for cols in widths
]


def operations(name: str, cols: int, x: str, y: str) -> int:
    """Return the number of operations of a function's kernels, forward and backward together."""
    function = FUNCTIONS[name]
    rows = jax.ShapeDtypeStruct(function.x(cols), x)
    column = jax.ShapeDtypeStruct((cols,), F32)
    operands = [*[rows] * (1 + function.like_x), *[column] * function.columns]

    def both(*operands: jax.Array) -> Any:
        def forward(*operands: jax.Array) -> Any:
            return function.call(*operands, dtype=y, implementation="mosaic")

        results, pullback = jax.vjp(forward, *operands)
        return results, pullback(jax.tree.map(jnp.ones_like, results))

    lowered = jax.jit(both).trace(*operands).lower(lowering_platforms=("cuda",))
    modules = _kernels(lowered.compiler_ir().operation)
    assert len(modules) >= 2  # at least one kernel per pass
    return sum(map(_size, modules))


def _kernels(operation: Any) -> list[bytes]:
    """Return the modules of all kernels that a program calls."""
    if operation.name == "stablehlo.custom_call":
        if "mosaic_gpu" not in str(operation.attributes["call_target_name"]):
            return []
        config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
        return [ir.StringAttr(config["module"]).value_bytes]
    blocks = (block for region in operation.regions for block in region)
    return [module for block in blocks for inner in block for module in _kernels(inner.operation)]


def _size(module: bytes) -> int:
    """Return the number of operations of an MLIR module, which is given as bytecode."""
    with ir.Context() as context, ir.Location.unknown():
        mosaic_gpu_dialect.register_dialect(context)
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True
        printed = ir.Module.parse(module).operation.get_asm(print_generic_op_form=True)
    return len(re.findall(r'^ *(?:%\S+(?:, %\S+)* = )?"', printed, re.MULTILINE))


@pytest.mark.parametrize(("name", "cols", "x", "y"), CASES)
def test_a_first_call_is_no_long_one(name: str, cols: int, x: str, y: str) -> None:
    assert operations(name, cols, x, y) <= MOST
