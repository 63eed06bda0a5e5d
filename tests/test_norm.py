"""Values and gradients of layer_norm and rms_norm against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from norms import check, normal
from pairs import each_pair, on_each_implementation
from program_error import assert_computes
from reference import DTYPES, exact

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

# Dtypes of x, of scale and bias, and of y.
MIXES = [
    *((d, d, d) for d in DTYPES),
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "float32", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float16", "bfloat16", "float32"),
]
AXES = [-1, 0, (1, 2), (0, -1)]
PARAMETERS = ["scale and bias", "scale", "bias", "none"]
SAVES = ["output", "input"]
Y_DTYPES = ["float32", "bfloat16"]
OPTIONS = [{"scale_offset": 1.0}, {"epsilon": 0.0}, {"epsilon": 0.1}]


NAMES = ["layer_norm", "rms_norm"]


def checked(
    name,
    shape,
    dtype="float32",
    *,
    p_dtype="float32",
    parameters=None,
    of_scale=(0.3, 1.0),
    **given,
):
    """Check a norm of random x.

    By default, layer_norm has a scale and a bias, and rms_norm has a scale.
    """
    axes = np.atleast_1d(given.get("axis", -1)) % len(shape)
    normalised = tuple(shape[a] for a in sorted(axes))
    if parameters is None:
        parameters = "scale and bias" if name == "layer_norm" else "scale"
    scale = normal(normalised, p_dtype, 1, *of_scale) if "scale" in parameters else None
    bias = normal(normalised, p_dtype, 2, scale=0.3) if "bias" in parameters else None
    check(name, normal(shape, dtype, 0, shift=0.5), scale=scale, bias=bias, **given)


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS)
@on_each_implementation("name mix axis save", NAMES, MIXES, AXES, SAVES)
def test_values_and_gradients(name, mix, axis, save, implementation):
    x_dtype, p_dtype, y_dtype = mix
    shape = (64, 8, 40)  # With any of `AXES`, there are enough rows for every kernel.
    given = {"p_dtype": p_dtype, "y_dtype": y_dtype, "axis": axis, "save": save}
    checked(name, shape, x_dtype, implementation=implementation, **given)


@refused.expect(refused.FEW_SHORT_ROWS)
@on_each_implementation("parameters save y_dtype", PARAMETERS, SAVES, Y_DTYPES)
def test_layer_norm_parameters(parameters, save, y_dtype, implementation):
    given = {"parameters": parameters, "y_dtype": y_dtype, "save": save, "of_scale": (1.0, 0.0)}
    checked("layer_norm", (70, 40), implementation=implementation, **given)


@refused.expect(refused.FEW_SHORT_ROWS)
@on_each_implementation("scale save cols", [True, False], SAVES, [40, 1024])
def test_rms_norm_with_a_bias(scale, save, cols, implementation):
    parameters = "scale and bias" if scale else "bias"
    given = {"parameters": parameters, "y_dtype": "bfloat16", "save": save}
    checked("rms_norm", (70, cols), implementation=implementation, **given)


@refused.expect(refused.FEW_SHORT_ROWS)
@on_each_implementation("save y_dtype", SAVES, Y_DTYPES)
def test_rms_norm_without_scale(save, y_dtype, implementation):
    given = {"parameters": "none", "y_dtype": y_dtype, "save": save}
    checked("rms_norm", (70, 40), implementation=implementation, **given)


@refused.expect(refused.FEW_SHORT_ROWS)
@on_each_implementation("options name save", OPTIONS, NAMES, SAVES)
def test_options(options, name, save, implementation):
    checked(name, (70, 64), "bfloat16", save=save, implementation=implementation, **options)


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS)
@on_each_implementation("name cols save", NAMES, [2, 3, 127, 1000, 4095], SAVES)
def test_widths(name, cols, save, implementation):
    checked(name, (5, cols), y_dtype="bfloat16", save=save, implementation=implementation)


def test_one_column():
    """If x has a single column, RMSNorm returns the sign of x, and LayerNorm returns 0.

    The gradient of x is (about) 0.
    """
    x = normal((5, 1), "float32", 0, shift=3.0)
    signs = exact(x) / np.sqrt(exact(x) ** 2 + 1e-6)
    assert_computes(jaxnorm.rms_norm(x), jaxnorm.rms_norm, x, expected=signs)
    np.testing.assert_array_equal(jaxnorm.layer_norm(x), 0)
    for function in (jaxnorm.rms_norm, jaxnorm.layer_norm):
        gradient = jax.grad(lambda x, f=function: f(x).sum())
        assert_computes(gradient(x), gradient, x)


@each_pair("name save", NAMES, SAVES)
@pytest.mark.usefixtures("x64")
def test_float64(name, save):
    checked(name, (7, 30), "float64", p_dtype="float64", save=save)


def test_epsilon_and_axis_defaults_are_flax_like():
    x = normal((3, 8), "float32", 0, scale=1e-3)
    expected = exact(x) / np.sqrt(np.mean(exact(x) ** 2, -1, keepdims=True) + 1e-6)
    assert_computes(jaxnorm.rms_norm(x), jaxnorm.rms_norm, x, expected=expected)


@refused.expect(refused.EMPTY)
@on_each_implementation("shape save", [(0, 5), (5, 0), (2, 0, 3), (0,)], SAVES)
def test_empty(shape, save, implementation):
    x = jnp.zeros(shape, jnp.float32)
    scale = bias = jnp.ones(shape[-1:], jnp.bfloat16)
    y, vjp = jax.vjp(
        lambda *a: jaxnorm.layer_norm(*a, save=save, implementation=implementation), x, scale, bias
    )
    dx, dscale, dbias = vjp(y)
    assert y.shape == dx.shape == shape
    np.testing.assert_array_equal(dscale, jnp.zeros_like(scale))
    np.testing.assert_array_equal(dbias, jnp.zeros_like(bias))


def test_one_dimensional_input(implementation):
    x, scale = normal((50,), "float32", 0), normal((50,), "float32", 1)
    np.testing.assert_array_equal(
        jaxnorm.rms_norm(x, scale, implementation=implementation),
        jaxnorm.rms_norm(x[None], scale, implementation=implementation)[0],
    )
