"""Norms with an activation against float64 NumPy: values, gradients, dtypes, extreme values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from norms import check, normal
from pairs import pairwise
from program_error import assert_computes
from reference import ACTIVATIONS, DTYPES, Norm, exact
from test_norm import AXES, MIXES, NAMES, PARAMETERS, checked

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

each_norm = pytest.mark.parametrize("name", NAMES)


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize(
    ("name", "mix", "axis", "save", "activation"),
    pairwise(NAMES, MIXES, AXES, ["output", "input"], ACTIVATIONS),
    ids=str,
)
def test_values_and_gradients(name, mix, axis, save, activation, implementation):
    x_dtype, p_dtype, y_dtype = mix
    given = {"p_dtype": p_dtype, "y_dtype": y_dtype, "axis": axis, "save": save}
    given |= {"activation": activation, "parameters": "scale and bias"}
    checked(name, (64, 8, 40), x_dtype, implementation=implementation, **given)


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("parameters", PARAMETERS)
@each_norm
def test_parameters(name, parameters, implementation):
    given = {"activation": "silu", "implementation": implementation}
    checked(name, (70, 40), parameters=parameters, **given)


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("options", [{"scale_offset": 1.0}, {"epsilon": 0.0}, {"epsilon": 0.1}])
def test_options(options, implementation):
    given = {"activation": "gelu", "implementation": implementation}
    checked("layer_norm", (70, 64), "bfloat16", **given, **options)


# Shapes for each kind of kernel. A row is processed by a part of a warp, by a warpgroup or by a
# cluster. In some shapes, the last fragments of a row overlap.
@pytest.mark.parametrize(
    ("shape", "dtype", "name", "activation"),
    pairwise(
        [(131, 128), (97, 1000), (66, 4088), (140, 5120), (67, 16384)],
        ["bfloat16", "float32"],
        NAMES,
        ACTIVATIONS,
    ),
    ids=str,
)
def test_kernels(shape, dtype, name, activation, kernels):
    given = {"activation": activation, "parameters": "scale and bias"}
    checked(name, shape, dtype, implementation=kernels, **given)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@each_norm
@pytest.mark.usefixtures("x64")
def test_float64(name, activation):
    checked(name, (7, 30), "float64", activation=activation, parameters="scale and bias")


def test_one_rounding():
    """bfloat16 results are rounded once, at the end: their errors are at most half an ulp.

    The activation of a rounded norm would have larger errors.
    """
    x = normal((64, 256), "bfloat16", 0)
    plain = np.ones(256), np.zeros(256), exact(x), True, 1e-6, "input", "float32", "float32"
    ref = Norm(exact(x), *plain, activation="silu")
    u = 2.0**-8  # unit roundoff of bfloat16; that of float32 is negligible
    y = exact(jaxnorm.layer_norm(x, activation="silu"))
    assert np.abs(y / ref.y - 1).max() < u * (1 + u)
    assert np.abs(exact(jax.nn.silu(jaxnorm.layer_norm(x))) / ref.y - 1).max() > 1.5 * u


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_norms_of_all_sizes(activation, implementation):
    """Activations of a norm's result y are correct if y is 0, or if exp(y) over- or underflows."""
    scale = jnp.asarray(np.append(np.geomspace(1e-20, 1e4, 63), 0), "float32")
    given = {"scale": scale, "activation": activation, "implementation": implementation}
    check("rms_norm", normal((70, 64), "float32", 0), **given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_zero_beside_a_bias(dtype):
    """With a bias and an activation, gradients are accurate even for scales that are near 0.

    A norm with an activation saves its input. So the backward does not recover x_hat from y. To
    recover it, the backward would divide by the scale, and a small scale would magnify rounding
    errors.
    """
    x = normal((70, 64), dtype, 0)
    scale = normal((64,), "float32", 1, 0.3, 1.0).at[6].set(0).at[9].set(1e-6)
    bias = normal((64,), "float32", 2)
    check("layer_norm", x, scale=scale, bias=bias, activation="silu", implementation="xla")
    y = exact(jaxnorm.layer_norm(x, scale, bias, activation="relu"))
    np.testing.assert_array_equal(y[:, 6], max(exact(bias.astype(dtype))[6], 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@each_norm
def test_it_is_jax_s_activation_of_the_norm(name, activation):
    norm = getattr(jaxnorm, name)
    x, scale, bias = (normal(s, "float32", i) for i, s in enumerate([(8, 64), (64,), (64,)]))

    def composed(x, scale, bias):
        return getattr(jax.nn, activation)(norm(x, scale, bias=bias, save="input"))

    def ours(x, scale, bias):
        return norm(x, scale, bias=bias, activation=activation)

    assert_computes(ours(x, scale, bias), composed, x, scale, bias, like=ours)
    plain = norm(x, scale, bias=bias)
    np.testing.assert_array_equal(norm(x, scale, bias=bias, activation=None), plain)
