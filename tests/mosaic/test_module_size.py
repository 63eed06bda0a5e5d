"""The number of operations in kernels' MLIR modules, which determines how long a first call takes.

Each operation of a kernel costs time, first when Python lowers it and again when it is compiled. So
a kernel must not emit a separate operation for each row, or for each vector of a thread. Instead,
it must use a loop, or a single Mosaic operation for all rows or all vectors. For example, one
operation copies several rows. An array gets its layout when it is created, because a later
conversion would be an additional operation.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from functions import FUNCTIONS, SHAPES, Sizes, of_floats
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir

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
CAUSAL, SILU = {"causal": True}, {"activation": "silu"}
LOSS = "softmax_cross_entropy_with_integer_labels"
ROPE = "rms_norm_rope of constant tables"

# The calls: a key of `functions.FUNCTIONS`, options, the dtypes of x and y, and numbers of columns.
# Together, these calls use every rule of the schedules. There are also calls whose kernels had too
# many operations in earlier versions: one operation for each row or for each vector. In these
# calls, rows are unaligned, or a row is shorter than the elements that a warp loads at once, or
# some tiles are above a causal diagonal. Others have kernels with the most operations, found by a
# search over many widths and dtypes.
CALLS: list[tuple[str, dict[str, Any], str, str, list[int]]] = [
    ("layer_norm", {}, BF16, BF16, [8, 24, 1016, 1024, 5120, 50256]),
    ("layer_norm", {}, F32, F32, [24, 131072]),
    ("layer_norm", {}, F32, BF16, [50256]),
    ("layer_norm", {}, F16, F16, [200]),
    ("layer_norm", SILU, BF16, BF16, [24, 1016, 4088, 4096, 50256]),
    ("layer_norm of samples", {}, F32, BF16, [4088]),
    ("layer_norm of groups", {}, BF16, BF16, [32]),
    ("layer_norm of groups", SILU, BF16, BF16, [32]),
    ("rms_norm", {}, F32, BF16, [56]),
    ("rms_norm_add_rms_norm", {}, BF16, BF16, [24, 768, 50256, 65536]),
    ("rms_norm_add_rms_norm", {}, F32, F32, [24, 5120]),
    ("rms_norm_add_rms_norm", {}, F16, F16, [120]),
    ("add_layer_norm", {}, BF16, BF16, [40, 4088]),
    ("add_layer_norm", {}, BF16, F32, [57352]),
    ("add_layer_norm with a gate", {}, BF16, BF16, [24, 1152, 4088, 50256]),
    ("add_layer_norm with a gate", {}, F32, BF16, [65536]),
    ("add_rms_norm", {}, BF16, BF16, [12288]),
    ("add_rms_norm", {}, F32, BF16, [1000]),
    ("add_rms_norm", {}, BF16, F32, [50256]),
    ("rms_norm_add", {}, BF16, BF16, [72]),
    ("rms_norm_gated", {}, BF16, BF16, [24, 128, 4088, 4096, 50256]),
    ("rms_norm_gated", {}, F32, BF16, [65536]),
    (ROPE, {}, BF16, BF16, [128]),
    (ROPE, {}, F32, F32, [80]),
    (ROPE, {}, F32, BF16, [512]),
    ("softmax", {}, F32, F32, [8, 50257]),
    ("softmax", CAUSAL, BF16, BF16, [1023, 50257]),
    ("softmax with a mask", {}, BF16, BF16, [4095]),
    ("softmax with a bias", {}, BF16, BF16, [50257]),
    ("log_softmax", {}, F32, F32, [3000]),
    ("log_softmax", CAUSAL, F32, F32, [65535]),
    (LOSS, {}, BF16, BF16, [50257]),
    ("log_prob_and_entropy", {}, BF16, BF16, [50257]),
]


def operations(name: str, options: dict[str, Any], cols: int, x: str, y: str) -> int:
    """Return the number of operations of a function's kernels, forward and backward together."""
    # The last number of rows is that of queries, of heads or of groups.
    rows = (8, 8, 256) if "softmax" in name else (8, 256, 8)
    rows = (8, cols) if name == "softmax" and "causal" in options else rows
    sizes, kinds = Sizes(rows, cols, cols), FUNCTIONS[name].kinds.split()
    dtypes = {"labels": "int32", **dict.fromkeys(("counts", "mask"), "bool")}
    dtypes |= dict.fromkeys(("x", "residual", "gate", "logits", "logits_bias"), x)
    operands = [jax.ShapeDtypeStruct(SHAPES[kind](sizes), dtypes.get(kind, F32)) for kind in kinds]
    options = {**options, "implementation": "mosaic"} | ({} if x == y else {"dtype": y})
    function = functools.partial(FUNCTIONS[name].ours, **options)

    def both(*operands: jax.Array) -> Any:
        floats = [a for a in operands if jnp.issubdtype(a.dtype, jnp.floating)]
        results, pullback = jax.vjp(of_floats(function, operands), *floats)
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


@pytest.mark.parametrize(
    ("name", "options", "x", "y", "cols"),
    [(*call, cols) for *call, widths in CALLS for cols in widths],
)
def test_a_first_call_is_no_long_one(
    name: str, options: dict[str, Any], x: str, y: str, cols: int
) -> None:
    assert operations(name, options, cols, x, y) <= MOST
