"""XLA's programs of gated_linear for an H100: the saved arrays, and the fusions of the backward."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from h100 import Compiler

import jaxnorm

pytestmark = pytest.mark.compiles

# Sizes at which XLA does not merge the two matmuls that compute gate and up. XLA merges smaller
# matmuls, and then copies both halves of the result.
TOKENS, WIDTH, INNER, LAYERS = 8192, 2048, 8192, 3

# Use cuBLAS for matmuls. On a real GPU, XLA times cuBLAS and Triton, and chooses cuBLAS. Without a
# GPU, XLA cannot time them and would choose Triton. XLA fuses a Triton matmul with the elementwise
# operations that use its result, so these tests would find other fusions than on a real GPU.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def mlp(x: jax.Array, weights: Any, activation: str, *, plain: bool) -> jax.Array:
    to_gate, to_up, down = weights
    gate, up = x @ to_gate, x @ to_up
    if plain:
        return (getattr(jax.nn, activation)(gate) * up) @ down
    return jaxnorm.gated_linear(gate, up, down, activation=activation)


def compiled(compiler: Compiler, activation: str, layers: str, *, plain: bool = False) -> Any:
    """Return the compiled gradient of a stack of gated MLPs."""

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        return mlp(x, weights, activation, plain=plain)

    return gradient(compiler, layer, [(WIDTH, INNER)] * 2 + [(INNER, WIDTH)], layers)


def gradient(compiler: Compiler, layer: Any, shapes: Any, layers: str) -> Any:
    """Return the compiled gradient of a stack of residual layers, x = x + layer(x, weights)."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        if layers == "scan":
            x, _ = jax.lax.scan(lambda x, of_layer: (x + layer(x, of_layer), None), x, weights)
        else:
            for i in range(LAYERS):
                x = x + layer(x, [w[i] for w in weights])
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=compiler.sharding)

    weights = [array(LAYERS, *shape) for shape in shapes]
    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return step.lower(weights, array(TOKENS, WIDTH)).compile(OPTIONS)


def elementwise(program: Any) -> list[int]:
    """Return, for each elementwise kernel, the number of (TOKENS, INNER) arrays that it stores."""
    array = rf"bf16\[{TOKENS},{INNER}\]"
    written = []
    for results in re.findall(r"= (\S.*?) fusion\(.*kind=kLoop", program.as_text()):
        if count := len(re.findall(array, results)):
            written.append(count)
    return sorted(written)


@pytest.mark.parametrize("layers", ["scan", "unrolled"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_one_pass_backward(activation: str, layers: str, compiler: Compiler) -> None:
    """One kernel computes the gradients of gate and up, and recomputes the matmul's operand."""
    each = 1 if layers == "scan" else LAYERS
    program = compiled(compiler, activation, layers)
    assert elementwise(program) == [1] * each + [3] * each


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_kept_for_the_backward(activation: str, compiler: Compiler) -> None:
    """Each layer saves only gate and up. Plain JAX saves 5 or 6 arrays of their size."""
    ours, plain = (
        compiled(compiler, activation, "scan", plain=plain).memory_analysis().temp_size_in_bytes
        for plain in (False, True)
    )
    array = TOKENS * INNER * 2
    kept = LAYERS * 2 * array
    # The remaining memory is for the residual stream of each layer, and for the arrays of one
    # layer's backward.
    assert kept <= ours <= kept + LAYERS * TOKENS * WIDTH * 2 + 8 * array
    assert plain >= ours + LAYERS * 3 * array


@pytest.mark.parametrize("layers", ["scan", "unrolled"])
def test_no_part_of_gelu_is_an_array(layers: str, compiler: Compiler) -> None:
    """In GPT-2's MLP, no float32 array is stored: each fusion recomputes the tanh."""

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        to_inner, bias, down = weights
        return jaxnorm.activation_linear(x @ to_inner + bias, down, activation="gelu")

    program = gradient(compiler, layer, [(WIDTH, INNER), (INNER,), (INNER, WIDTH)], layers)
    written = re.findall(r"= (\S.*?) fusion\(", program.as_text())
    assert not [results for results in written if f"f32[{TOKENS},{INNER}]" in results]
