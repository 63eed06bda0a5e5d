"""Norms with a residual where some array is float64: then all arithmetic is float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norms import check, normal
from reference import DTYPES, assert_as_accurate, exact
from specs import build_spec

import jaxnorm
from jaxnorm_kernels import mosaic

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("x64", "quick_to_compile")]

SHAPE = (5, 16)
# Dtypes of x, residual and y: all combinations with a float64.
MIXES = [
    mix for mix in itertools.product((*DTYPES, "float64"), repeat=3) if mix.count("float64") > 0
]
each_mix = pytest.mark.parametrize("mix", MIXES, ids=" ".join)
each_save = pytest.mark.parametrize("save", ["output", "input"])


def operands(mix):
    x_dtype, r_dtype, _ = mix
    scale, next_scale = (normal(SHAPE[1:], "float32", seed, 0.2, 1.0) for seed in (2, 3))
    return normal(SHAPE, x_dtype, 0), normal(SHAPE, r_dtype, 1), scale, next_scale


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def plain(name, r_dtype, y_dtype, *operands):
    """Compute y and h in float64 arithmetic, and round each to its dtype."""
    x, residual, scale, next_scale = (a if a is None else a.astype("float64") for a in operands)
    if name == "add_rms_norm":
        h = (x + residual).astype(r_dtype)
        return rms_norm(h.astype("float64"), scale).astype(y_dtype), h
    h = (residual + rms_norm(x, scale)).astype(r_dtype)
    return rms_norm(h.astype("float64"), next_scale).astype(y_dtype), h


def ours(name, save, y_dtype, x, residual, scale, next_scale):
    scales = (scale,) if name == "add_rms_norm" else (scale, next_scale)
    return getattr(jaxnorm, name)(x, residual, *scales, dtype=y_dtype, save=save)


def derivatives(function, operands, along):
    """Return a dict of first and second derivatives, in forward and in reverse mode.

    Gradients are with respect to every operand. Derivatives in forward mode are along the tangents
    `along`.
    """

    def loss(*operands):
        y, h = (a.astype("float64") for a in function(*operands))
        weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        return jnp.sum(weights * jnp.sin(y)) + jnp.sum(jnp.cos(h))

    gradient = jax.grad(loss, range(len(operands)))

    def slope(*operands):
        pairs = zip(gradient(*operands), along)
        return sum(jnp.sum(g.astype("float64") * t.astype("float64")) for g, t in pairs)

    return {
        "jvp": jax.jvp(function, operands, along)[1],
        "gradient": gradient(*operands),
        "forward over reverse": jax.jvp(gradient, operands, along)[1],
        "reverse over reverse": jax.grad(slope, range(len(operands)))(*operands),
    }


def of_given(function, *options):
    """Return a function ``call(operands, along)`` that computes `derivatives` of `function`.

    `function` has four operands. If `operands` has fewer, the last ones are None.
    """

    def call(operands, along):
        missing = [None] * (4 - len(operands))
        return derivatives(lambda *given: function(*options, *given, *missing), operands, along)

    return call


@functools.cache
def exact_derivatives(name):
    return jax.jit(of_given(plain, name, "float64", "float64"))


@each_save
@each_mix
def test_two_norms(mix, save):
    """Errors are at most as large as if each result and each gradient is rounded once."""
    x, residual, scale, next_scale = operands(mix)
    given = {"residual": residual, "scale": scale, "next_scale": next_scale}
    check("rms_norm_add_rms_norm", x, **given, save=save, y_dtype=mix[2])


# Combinations of dtypes in which one of x, the residual and y is float64, or all are. They have
# every pair of dtypes of two of these arrays. A function with a single norm has fewer.
PAIRS = [mix for mix in MIXES if mix.count("float64") != 2]
ALONE = [mix for mix in PAIRS if mix.count("float64") == 1 and "float16" not in mix]


@pytest.mark.parametrize(
    ("name", "mix", "save"),
    [
        pytest.param(name, mix, ("output", "input")[i % 2], id=f"{name}-{' '.join(mix)}")
        for name, mixes in (("rms_norm_add_rms_norm", PAIRS), ("add_rms_norm", ALONE))
        for i, mix in enumerate(mixes)
    ],
)
def test_derivatives(name, mix, save):
    """Derivatives are as accurate as plain JAX's, which rounds at the same points."""
    _, r_dtype, y_dtype = mix
    arrays = operands(mix)
    if name == "add_rms_norm":
        arrays = arrays[:3]
    along = tuple(normal(a.shape, a.dtype, 10 + i) for i, a in enumerate(arrays))

    theirs = jax.jit(of_given(plain, name, r_dtype, y_dtype))(arrays, along)
    expected = exact_derivatives(name)(*jax.tree.map(exact, (arrays, along)))
    got = jax.jit(of_given(ours, name, save, y_dtype))(arrays, along)
    assert_as_accurate(got, theirs, expected)


def test_no_kernel_takes_a_norm_of_such_a_call():
    """The norms inside a float64 call run no kernel, even if their own arrays are float32.

    The reason is that the norms compute their statistics in float64.
    """
    float32, float64 = np.dtype("float32"), np.dtype("float64")
    spec = build_spec("norm_add_norm", "bwd", 256, 1024, float32, float64, residual_dtype=float32)
    assert spec.first.x_dtype == spec.first.y_dtype == float32
    assert spec.first.compute_dtype == spec.last.compute_dtype == float64
    assert "an array is float64" in str(mosaic.why_unsupported(spec.first))
