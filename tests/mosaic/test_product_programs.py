"""rms_norm_linear as XLA compiles it for an H100 by default: its fusions and its saved arrays."""

import jax
import jax.numpy as jnp
import pytest
from h100 import Compiler

import jaxnorm

pytestmark = pytest.mark.compiles

ROWS, COLS, FEATURES = 8192, 2048, 8192
BF16, F32 = jnp.bfloat16, jnp.float32
# Without a GPU, XLA cannot time matmuls. So these options select cuBLAS without autotuning.
OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "0"}


def compiled(compiler: Compiler, function, *types):
    operands = [jax.ShapeDtypeStruct(*each, sharding=compiler.sharding) for each in types]
    return jax.jit(function).lower(*operands).compile(compiler_options=OPTIONS)


def test_a_gated_block_is_one_pass_between_its_products(compiler: Compiler):
    """Between the matmuls, one fusion computes the gated result and the elementwise gradients.

    The elementwise gradients are those of the gate, the activation and the bias.
    """

    def step(x, weight, scale, bias, up, d):
        def block(*operands):
            *operands, bias, up = operands
            return jaxnorm.rms_norm_linear(*operands, bias=bias, activation="silu") * up

        y, vjp = jax.vjp(block, x, weight, scale, bias, up)
        return y, *vjp(d)

    wide = ((ROWS, FEATURES), BF16)
    program = compiled(
        *(compiler, step, ((ROWS, COLS), BF16), ((COLS, FEATURES), BF16), ((COLS,), F32)),
        *(((FEATURES,), F32), wide, wide),
    )
    entry = program.as_text().partition("ENTRY")[2].splitlines()
    made = [line.partition(" fusion(")[0] for line in entry if " fusion(" in line]
    assert sum(f"[{ROWS},{FEATURES}]" in results for results in made) == 1
    assert sum("__cublas" in line for line in entry if "custom-call(" in line) == 3


def test_unrolled_layers_keep_as_much_as_from_their_output(compiler: Compiler):
    """Unrolled layers with rms_norm_linear need no more memory than layers with norm and matmul.

    The separate norm saves its output, which is the matmul's input. With rms_norm_linear, XLA
    recomputes the normalised array in the backward.
    """

    def of_a_layer(block):
        def loss(scales, weights, x):
            for scale, weight in zip(scales, weights):
                x = x + jnp.sin(block(x, weight, scale))
            return jnp.sum(x.astype(F32) ** 2)

        def temp_bytes(layers):
            def step(x, *parameters):
                scales, weights = parameters[:layers], parameters[layers:]
                return jax.value_and_grad(loss, (0, 1))(scales, weights, x)

            parameters = [((COLS,), F32)] * layers + [((COLS, COLS), BF16)] * layers
            program = compiled(compiler, step, ((ROWS, COLS), BF16), *parameters)
            return program.memory_analysis().temp_size_in_bytes

        return (temp_bytes(6) - temp_bytes(3)) / 3

    ours = of_a_layer(jaxnorm.rms_norm_linear)
    composed = of_a_layer(lambda x, weight, scale: jaxnorm.rms_norm(x, scale) @ weight)
    activation = 2 * ROWS * COLS
    assert ours < composed + 0.1 * activation
