"""add_layer_norm and add_rms_norm with a gate: other axes and programs."""

import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from functions import gradients, layer_norm
from norms import normal
from program_error import assert_computes
from programs import equations, results_of_kernels, text_for_cuda

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

FUNCTIONS = {"add_layer_norm": jaxnorm.add_layer_norm, "add_rms_norm": jaxnorm.add_rms_norm}


def test_a_gate_of_ones_is_none_and_of_zeros_the_residual():
    x, residual = normal((70, 64), "bfloat16", 0), normal((70, 64), "float32", 1)
    for function in FUNCTIONS.values():
        ours, plain = function(x, residual, gate=jnp.ones(64)), function(x, residual)
        for a, b in zip(ours, plain):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(function(x, residual, gate=jnp.zeros(64))[1], residual)


# ------------------------------------------------------------------- programs, and saved arrays

SHAPE = (3, 5, 16)
X, RESIDUAL = (np.random.default_rng(i).normal(size=SHAPE) for i in range(2))
SCALE, GATE = (np.random.default_rng(i).uniform(0.5, 2, size=(3, 1, 16)) for i in (2, 3))
ALL = X, RESIDUAL, SCALE, GATE


def ours(x, residual, scale, gate):
    return jaxnorm.add_layer_norm(x, residual, scale, gate / 3, gate=gate)


def test_over_other_axes(x64):
    x, residual = jnp.asarray(X), jnp.asarray(RESIDUAL)
    gate = jnp.asarray(np.random.default_rng(5).normal(size=(3, 1, 5)))
    results = jaxnorm.add_layer_norm(x, residual, gate=gate, axis=1)

    def turned(x, residual, gate):
        h = residual.swapaxes(1, 2) + gate * x.swapaxes(1, 2)
        return layer_norm(h).swapaxes(1, 2), h.swapaxes(1, 2)

    assert_computes(results, turned, x, residual, gate)


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
    operands = [jnp.asarray(a, jnp.float32) for a in ALL]
    forward = jax.jit(lambda *a: ours(*a)[1])
    assert forward.lower(*operands).as_text().count("rsqrt") == 0
    jaxpr = jax.make_jaxpr(gradients(lambda *a: ours(*a)[1], (0, 1, 2, 3)))(*operands)
    backward = [e for e in equations(jaxpr) if e.primitive.name.endswith("_norm_backward")]
    # The backward's operands are x, y, rstd, scale, bias, gate and dh.
    assert [len(equation.invars) for equation in backward] == [7]
