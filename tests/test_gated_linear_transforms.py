"""gated_linear and activation_linear: derivatives, transformations, and calls outside jax.jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_linear_cases import BF16, MIXES, call, operands, value_and_gradients
from program_error import assert_computes
from reference import assert_within, exact
from test_configurations import CONFIGURATIONS
from test_forward_mode import DERIVATIVES, check, forward_over_reverse

import jaxnorm
from jaxnorm.operations import products

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


def matrix(s, b):
    """A weight that depends on both."""
    return jnp.outer(jnp.sin(s), jnp.cos(b)) / s.size


def plain(x, s, b):
    return (jax.nn.gelu(x) * jnp.sin(x)) @ matrix(s, b) + b


def ours(x, s, b, implementation=None):
    return jaxnorm.gated_linear(x, jnp.sin(x), matrix(s, b), bias=b, activation="gelu")


def plain_closed(x, s, b):
    return jnp.tanh(s * x) @ matrix(s, b) + b


def ours_closed(x, s, b, implementation=None):
    return jaxnorm.activation_linear(
        x, matrix(s, b), bias=b, activation=lambda x: jnp.tanh(s * x), product=lambda h, w: h @ w
    )


PAIRS = {"gated": (plain, ours), "closed": (plain_closed, ours_closed)}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("pair", PAIRS)
def test_derivatives(derivative, pair):
    check(*PAIRS[pair], DERIVATIVES[derivative], None, "xla")


@pytest.mark.remat
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("transformation", ["scan", "checkpoint", "save_policy", "jit", "vmap"])
@pytest.mark.parametrize("pair", PAIRS)
def test_under_transformations(transformation, pair):
    check(*PAIRS[pair], forward_over_reverse, transformation, "xla")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("function", [ours, ours_closed])
def test_outside_jit(function):
    arrays = [exact(operands((3, 4), 4)[name]) for name in ("gate", "bias", "bias")]
    gradients = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1, 2))
    with jax.disable_jit():
        one_by_one = gradients(*arrays)
    for results in (gradients(*arrays), one_by_one, jax.jit(gradients)(*arrays)):
        assert_computes(results, gradients, *arrays)


@pytest.mark.parametrize("in_axes", [(1, 1, None, None), (0, None, 1, None), (None, None, 0, 1)])
def test_vmap(in_axes):
    """Of rows, of weights, of biases."""
    arrays = [
        v if axis is None else jnp.stack([v, jnp.roll(v, 1, 0), jnp.flip(v)], axis)
        for v, axis in zip(operands((5, 8), 6).values(), in_axes)
    ]

    def gradients(*arrays):
        def summed(gate, up, weight, bias):
            return jnp.sum(jnp.sin(jaxnorm.gated_linear(gate, up, weight, bias=bias)))

        return jax.value_and_grad(summed, range(4))(*arrays)

    batched = jax.jit(jax.vmap(gradients, in_axes))(*arrays)
    for i in range(3):
        one = [v if axis is None else jnp.take(v, i, axis) for v, axis in zip(arrays, in_axes)]
        assert_computes(jax.tree.map(lambda a, i=i: a[i], batched), gradients, *one)


@pytest.mark.parametrize(
    "configuration", ["x64", "strict dtype promotion", "rank promotion raises", "leaks raise"]
)
def test_configurations(configuration):
    """Of JAX, that change how code is traced."""
    mix = MIXES[3]
    arrays, d = operands((6, 16), 8, mix), jnp.ones((6, 8), mix.y)

    def run():
        return jax.tree.leaves(value_and_gradients(arrays, d, options=(("dtype", BF16),)))

    expected = run()
    with CONFIGURATIONS[configuration]():
        got = run()
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_within(ours, exact(theirs), 2.0**-6 * np.abs(exact(theirs)).max())


# ------------------------------------------------------------------------------- outside jit


def test_a_call_is_compiled_once(monkeypatch):
    """But one with a function, which may be another each time, is traced each time."""
    traced = []
    plain = products.Dot.__call__

    def counted(self, *arguments):
        traced.append(self)
        return plain(self, *arguments)

    monkeypatch.setattr(products.Dot, "__call__", counted)
    arrays = operands((3, 11), 13)
    named = [call(arrays, activation="silu") for _ in range(3)]
    assert len(traced) == 1
    of_functions = [call(arrays, activation=lambda x: jax.nn.silu(x)) for _ in range(3)]
    assert len(traced) == 4
    for y in named + of_functions:
        assert_computes(y, lambda arrays: call(arrays, activation="silu"), arrays)


def test_a_traced_argument_meets_no_jit():
    arrays = operands((3, 4), 5)
    for name in arrays:
        jaxpr = jax.make_jaxpr(
            lambda a, name=name: call({**arrays, name: a}, activation=lambda x: x)
        )
        assert "jit" not in str(jaxpr(arrays[name]))


def test_matmul_precision():
    arrays = operands((3, 4), 5)
    with jax.default_matmul_precision("bfloat16"):
        lowered = str(jax.make_jaxpr(call)(arrays))
    assert "DEFAULT" in lowered or "bfloat16" in lowered.lower()
