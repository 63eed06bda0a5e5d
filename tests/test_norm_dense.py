"""RMSNormDense of linen and nnx compared with Flax's RMSNorm followed by Dense."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_cases import assert_same
from flax import nnx
from program_error import assert_same_results

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

FIELDS = [
    {},
    {"param_dtype": jnp.bfloat16},
    {"dtype": jnp.bfloat16},
    {"use_scale": False},
    {"epsilon": 1e-2},
    {"use_bias": False},
    {"bias_init": nn.initializers.normal(1.0), "scale_init": nn.initializers.normal(1.0)},
    {"kernel_init": nn.initializers.normal(1.0)},
]
NORM = {"epsilon", "dtype", "param_dtype", "use_scale", "scale_init"}
DENSE = {"dtype", "param_dtype", "use_bias", "kernel_init", "bias_init"}
each_field = pytest.mark.parametrize(
    ("fields", "dtype"),
    [*zip(FIELDS, itertools.cycle(["float32", "bfloat16"])), ({}, "bfloat16")],
    ids=lambda case: " ".join(case) or "default" if isinstance(case, dict) else case,
)


def data(dtype="float32", shape=(4, 5, 16), seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def some(fields, names):
    return {name: value for name, value in fields.items() if name in names}


class Composed(nn.Module):
    """Flax's two modules, with the names that our module gives them."""

    fields: dict

    @nn.compact
    def __call__(self, x):
        n = nn.RMSNorm(**some(self.fields, NORM), name="norm")(x)
        return nn.Dense(24, **some(self.fields, DENSE), name="dense")(n)


@each_field
def test_linen(fields, dtype):
    """The initial parameters equal those of Flax's two modules, and so do results and dtypes."""
    x, key = data(dtype), jax.random.key(1)
    ours, theirs = jaxnorm.linen.RMSNormDense(24, **fields), Composed(fields)
    variables, expected = ours.init(key, x), theirs.init(key, x)
    assert_same(variables, expected)
    assert_same_results(lambda: ours.apply(variables, x), lambda: theirs.apply(variables, x))


@each_field
def test_nnx(fields, dtype):
    x = data(dtype)
    ours = jaxnorm.nnx.RMSNormDense(16, 24, **fields, rngs=nnx.Rngs(1))
    rngs = nnx.Rngs(1)
    norm = nnx.RMSNorm(16, **some(fields, NORM), rngs=rngs)
    dense = nnx.Linear(16, 24, **some(fields, DENSE), rngs=rngs)
    assert_same(nnx.state(ours.norm), nnx.state(norm))
    assert_same(nnx.state(ours.dense), nnx.state(dense))
    assert_same_results(lambda: ours(x), lambda: dense(norm(x)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_residuals_and_activations(dtype):
    """With a residual, RMSNormDense equals RMSNorm followed by Dense and an activation.

    The results y and h also have the same dtypes.
    """
    x, r = data(dtype), data("float32", seed=1)
    linen = jaxnorm.linen.RMSNormDense(24, activation="gelu", scale_offset=0.5)
    variables = linen.init(jax.random.key(0), x)
    ours = jaxnorm.nnx.RMSNormDense(16, 24, activation="gelu", scale_offset=0.5, rngs=nnx.Rngs(0))
    ours.dense.kernel[...] = variables["params"]["dense"]["kernel"]
    y, h = linen.apply(variables, x, residual=r)
    assert_same(ours(x, residual=r), (y, h))
    norm = jaxnorm.linen.RMSNorm(scale_offset=0.5)

    def composed(params, x):
        n, h = norm.apply({"params": params["norm"]}, x, residual=r)
        return nn.gelu(nn.Dense(24).apply({"params": params["dense"]}, n)), h

    def module(params, x):
        return linen.apply({"params": params}, x, residual=r)

    params = variables["params"]
    assert_same_results(lambda: module(params, x), lambda: composed(params, x))


def test_converted_models_keep_it():
    model = nnx.List([jaxnorm.nnx.RMSNormDense(16, 24, rngs=nnx.Rngs(0))])
    before = model[0](data())
    assert type(jaxnorm.nnx.convert(model)[0]) is jaxnorm.nnx.RMSNormDense
    np.testing.assert_array_equal(model[0](data()), before)
    with pytest.raises(ValueError, match=r"rms_norm_linear: activation='tanh'"):
        jaxnorm.linen.RMSNormDense(24, activation="tanh").init(jax.random.key(0), data())


def test_an_input_without_axes():
    linen = jaxnorm.linen.RMSNormDense(3)
    dense = jaxnorm.nnx.RMSNormDense(4, 3, rngs=nnx.Rngs(0))
    for call in (lambda x: linen.init(jax.random.key(0), x), dense):
        with pytest.raises(ValueError, match=r"x has shape \(\); expected \(\.\.\., d\)"):
            call(jnp.float32(1))
