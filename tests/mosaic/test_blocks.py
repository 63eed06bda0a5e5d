"""Blocks of models that use the kernels, compiled by XLA for an H100 that need not be present."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from h100 import Compiler

import jaxnorm

ROWS, COLS = 8192, 4096


def unchanged(x: Any, residual: Any, scale: Any) -> Any:
    """Compute the block as models write it, with a separate addition."""
    h = x + residual
    return jaxnorm.rms_norm(h, scale), h


def adaptive(x: Any, scale: Any, bias: Any) -> Any:
    return jaxnorm.layer_norm(x, scale, bias, scale_offset=1.0)


def two_norms(x: Any, residual: Any, scale: Any) -> Any:
    return jaxnorm.rms_norm_add_rms_norm(x, residual, scale, scale)


def gate_first(x: Any, gate: Any, scale: Any) -> Any:
    return jaxnorm.rms_norm_gated(x, gate, scale, norm_before_gate=False)


def silu(x: Any, scale: Any, bias: Any) -> Any:
    return jaxnorm.layer_norm(x, scale, bias, activation="silu")


def images(x: Any, scale: Any, bias: Any) -> Any:
    """Compute GroupNorm and SiLU with channels last."""
    return jaxnorm.layer_norm(x, scale, bias, axis=(1, 3), activation="silu")


def gated_sum(x: Any, residual: Any, scale: Any, bias: Any, gate: Any) -> Any:
    return jaxnorm.add_layer_norm(x, residual, scale, bias, scale_offset=1.0, gate=gate)


ROW, WIDE, COLUMN = ((ROWS, COLS), "bfloat16"), ((ROWS, COLS), "float32"), ((COLS,), "float32")
SAMPLES, OF_SAMPLE = ((8, ROWS // 8, COLS), "bfloat16"), ((8, 1, COLS), "float32")
IMAGES, CHANNEL = ((32, 1024, 32, 8), "bfloat16"), ((32, 1, 8), "float32")

# Each value has four items:
#
# - the function;
# - the types of its operands;
# - the indices of the gradients that the program computes (a gradient that equals another one is
#   computed only once);
# - how many fusions over arrays of x's size XLA may add to the kernels. It is 1 for "unchanged
#   code", which adds the residual outside of the kernel, in plain JAX.
BLOCKS: dict[str, tuple[Callable[..., Any], list[Any], list[int], int]] = {
    "add_rms_norm": (jaxnorm.add_rms_norm, [ROW, ROW, COLUMN], [0, 2], 0),
    "add_layer_norm": (jaxnorm.add_layer_norm, [ROW, ROW, COLUMN, COLUMN], [0, 2, 3], 0),
    "float32 residual": (jaxnorm.add_rms_norm, [ROW, WIDE, COLUMN], [0, 1, 2], 0),
    "unchanged code": (unchanged, [ROW, ROW, COLUMN], [0, 2], 1),
    "post-norm": (jaxnorm.rms_norm_add, [ROW, ROW, COLUMN], [0, 2], 0),
    "two norms": (two_norms, [ROW, ROW, COLUMN], [0, 1, 2], 0),
    "gate": (jaxnorm.rms_norm_gated, [ROW, ROW, COLUMN], [0, 1, 2], 0),
    "gate first": (gate_first, [ROW, WIDE, COLUMN], [0, 1, 2], 0),
    "activation": (silu, [ROW, COLUMN, COLUMN], [0, 1, 2], 0),
    "groups and activation": (images, [IMAGES, CHANNEL, CHANNEL], [0, 1, 2], 0),
    "adaLN": (adaptive, [SAMPLES, OF_SAMPLE, OF_SAMPLE], [0, 1, 2], 0),
    "adaLN-zero": (gated_sum, [SAMPLES, SAMPLES, *[OF_SAMPLE] * 3], [0, 1, 2, 3, 4], 0),
    "LayerScale": (gated_sum, [ROW, WIDE, *[COLUMN] * 3], [0, 1, 2, 3, 4], 0),
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_a_kernel_each_way(name: str, compiler: Compiler) -> None:
    """A block is one kernel in the forward pass and one in the backward pass.

    There is no other pass over an array of x's size, and no copy.
    """
    block, operands, own, additions = BLOCKS[name]

    def step(cotangents: Any, *operands: Any) -> Any:
        results, vjp = jax.vjp(block, *operands)
        gradients = vjp(cotangents)
        return results, [gradients[i] for i in own]

    shapes = [
        jax.ShapeDtypeStruct(s, jnp.dtype(d), sharding=compiler.sharding) for s, d in operands
    ]
    results = jax.eval_shape(block, *shapes)
    cotangents = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=compiler.sharding), results
    )
    text = jax.jit(step).lower(cotangents, *shapes).compile().as_text()
    entry = text[text.index("ENTRY") :]
    instructions = re.findall(r"= (.+?) ([a-z][\w-]*)\(", entry)
    assert entry.count('custom_call_target="mosaic_gpu_v2"') == 2
    others = [
        opcode
        for kind, opcode in instructions
        if opcode not in ("custom-call", "parameter", "tuple", "get-tuple-element", "bitcast")
        and any(
            math.prod(map(int, filter(None, sizes.split(",")))) >= ROWS * COLS
            for sizes in re.findall(r"\[([\d,]*)\]", kind)
        )
    ]
    assert others == ["fusion"] * additions


def separate(norm: Any, x: Any, branch: Any, *parameters: Any) -> Any:
    h = x + branch
    return norm(h, *parameters), h


@pytest.mark.compiles
@pytest.mark.parametrize(("name", "parameters"), [("layer_norm", 2), ("rms_norm", 1)])
@pytest.mark.parametrize(("fused", "most"), [(False, 6), (True, 9)])
def test_a_layer_reads_the_gradient_that_the_next_layer_stored(
    name: str, parameters: int, fused: bool, most: int, compiler: Compiler
) -> None:
    """XLA's backward code does not compute the gradient of a residual stream twice.

    Each layer stores this 16-bit gradient, because a matmul reads it. The preceding layer must read
    the stored gradient, too. Otherwise, XLA would compute the gradient again, in float32. The
    fusions that do so read arrays of all later layers: 9 to 18 arrays instead of at most `most`.
    """
    layers = 8
    own: Any = getattr(jaxnorm, f"add_{name}" if fused else name)
    own = functools.partial(own, implementation="xla")
    add_norm = own if fused else functools.partial(separate, own)

    def loss(x: Any, weights: Any, *parameters: Any) -> Any:
        branch = x
        for up, down in weights:
            y, x = add_norm(x, branch, *parameters)
            branch = jax.nn.gelu(y @ up) @ down
        return jnp.sum((x + branch).astype("float32") ** 2)

    array = functools.partial(jax.ShapeDtypeStruct, sharding=compiler.sharding)
    square, row = array((256, 256), "bfloat16"), array((256,), "float32")
    operands = (array((64, 256), "bfloat16"), [(square, square)] * layers, *[row] * parameters)
    gradients = jax.grad(loss, argnums=tuple(range(len(operands))))
    options = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
    text = jax.jit(gradients).lower(*operands).compile(options).as_text()
    fusions = re.findall(r"= [^=]*\[64,256\][^=]* fusion\((.*?)\)", text.partition("ENTRY")[2])
    assert len(fusions) > 4 * layers
    assert max(len(re.findall(r"%[\w.-]+", operands)) for operands in fusions) <= most
