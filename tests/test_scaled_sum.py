"""add_layer_norm and add_rms_norm with a gate: which programs their calls become."""

import re

import jax
import jax.numpy as jnp
import pytest
from functions import gradients
from programs import equations, results_of_kernels, text_for_cuda

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

FUNCTIONS = {"add_layer_norm": jaxnorm.add_layer_norm, "add_rms_norm": jaxnorm.add_rms_norm}


@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_block_is_a_kernel_each_way(name, groups):
    """Each pass is one kernel.

    The backward stores the gradients of x and the residual, and no other array of their size.
    """
    rows = jax.ShapeDtypeStruct((32, 1024, 1152), "bfloat16")
    vector = jax.ShapeDtypeStruct((groups, 1, 1152) if groups > 1 else (1152,), "float32")

    def both(x, residual, scale, gate, *cotangents):
        results, vjp = jax.vjp(
            lambda x, r, s, g: FUNCTIONS[name](x, r, s, gate=g), x, residual, scale, gate
        )
        return results, vjp(cotangents)

    text = text_for_cuda(both, rows, rows, vector, vector, rows, rows)
    assert [line.count("32768x1152xbf16") for line in results_of_kernels(text)] == [2, 2]
    assert not re.findall(r"stablehlo\.(?:add|convert|multiply|transpose) .*1024x1152", text)


def test_where_the_norm_is_not_used_a_sum_is_left():
    """If only h is used, the forward computes no norm."""
    x, scale = jnp.ones((3, 5, 16)), jnp.ones((3, 1, 16))

    def only_h(x, residual, scale, gate):
        return jaxnorm.add_layer_norm(x, residual, scale, gate / 3, gate=gate)[1]

    operands = x, 2 * x, scale, 3 * scale
    assert jax.jit(only_h).lower(*operands).as_text().count("rsqrt") == 0
    jaxpr = jax.make_jaxpr(gradients(only_h, (0, 1, 2, 3)))(*operands)
    backward = [e for e in equations(jaxpr) if e.primitive.name.endswith("_norm_backward")]
    # The backward's operands are x, y, rstd, scale, bias, gate and dh.
    assert [len(equation.invars) for equation in backward] == [7]
