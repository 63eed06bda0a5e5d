"""Norms with an activation against float64 numpy: values, gradients, dtypes, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from pairs import pairwise
from program_error import assert_computes
from reference import DTYPES, Norm, exact
from test_norm import AXES, MIXES, PARAMETERS, check, normal

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

ACTIVATIONS = ("silu", "gelu", "relu")
BOTH = [True, False]  # LayerNorm and RMSNorm


def checked(shape, dtype="float32", *, has_mean=True, parameters="scale and bias", **given):
    """Of rows, with parameters of columns."""
    check(
        normal(shape, dtype, 0, shift=0.5),
        normal(shape[-1:], "float32", 1, scale=0.3, shift=1.0) if "scale" in parameters else None,
        normal(shape[-1:], "float32", 2, scale=0.3) if "bias" in parameters else None,
        normal(shape, dtype, 3),
        subtract_mean=has_mean,
        **{"save": "output", "y_dtype": dtype, **given},
    )


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize(
    ("has_mean", "mix", "axis", "save", "activation"),
    pairwise(BOTH, MIXES, AXES, ["output", "input"], ACTIVATIONS),
    ids=str,
)
def test_values_and_gradients(has_mean, mix, axis, save, activation, implementation):
    shape, (x_dtype, p_dtype, y_dtype) = (64, 8, 40), mix
    axes = axis if isinstance(axis, tuple) else (axis,)
    normalised = tuple(shape[a] for a in sorted(a % 3 for a in axes))
    check(
        normal(shape, x_dtype, 0, shift=0.5),
        normal(normalised, p_dtype, 1, scale=0.3, shift=1.0),
        normal(normalised, p_dtype, 2, scale=0.3),
        normal(shape, y_dtype, 3),
        axis=axis,
        subtract_mean=has_mean,
        save=save,
        implementation=implementation,
        y_dtype=y_dtype,
        activation=activation,
    )


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("has_mean", BOTH, ids=["layer_norm", "rms_norm"])
def test_parameters(has_mean, parameters, implementation):
    given = {"activation": "silu", "implementation": implementation}
    checked((70, 40), has_mean=has_mean, parameters=parameters, **given)


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("options", [{"scale_offset": 1.0}, {"epsilon": 0.0}, {"epsilon": 0.1}])
def test_options(options, implementation):
    checked((70, 64), "bfloat16", activation="gelu", implementation=implementation, **options)


# A kind of kernel each: rows in parts of warps, in warpgroups, in clusters; overlapping tails.
@pytest.mark.parametrize(
    ("shape", "dtype", "has_mean", "activation"),
    pairwise(
        [(131, 128), (97, 1000), (66, 4088), (140, 5120), (67, 16384)],
        ["bfloat16", "float32"],
        BOTH,
        ACTIVATIONS,
    ),
    ids=str,
)
def test_kernels(shape, dtype, has_mean, activation, kernels):
    given = {"activation": activation, "implementation": kernels}
    checked(shape, dtype, has_mean=has_mean, **given)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_mean", BOTH, ids=["layer_norm", "rms_norm"])
@pytest.mark.usefixtures("x64")
def test_float64(has_mean, activation):
    given = {"activation": activation, "implementation": None}
    checked((7, 30), "float64", has_mean=has_mean, **given)


def test_one_rounding():
    """Of bfloat16 no more than half a unit is lost, of a rounded norm's activation more."""
    x = normal((64, 256), "bfloat16", 0)
    plain = np.ones(256), np.zeros(256), exact(x), True, 1e-6, "input", "float32", "float32"
    ref = Norm(exact(x), *plain, activation="silu")
    u = 2.0**-8  # of bfloat16; beside it, arithmetic in float32 is nothing
    y = exact(jaxnorm.layer_norm(x, activation="silu"))
    assert np.abs(y / ref.y - 1).max() < u * (1 + u)
    assert np.abs(exact(jax.nn.silu(jaxnorm.layer_norm(x))) / ref.y - 1).max() > 1.5 * u


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_norms_of_all_sizes(activation, implementation):
    """Where exponentials overflow or vanish; and 0."""
    x, d = normal((70, 64), "float32", 0), normal((70, 64), "float32", 3)
    scale = jnp.asarray(np.append(np.geomspace(1e-20, 1e4, 63), 0), "float32")
    check(x, scale, None, d, subtract_mean=False, save="output", y_dtype="float32",
          activation=activation, implementation=implementation)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_zero_beside_a_bias(dtype):
    """From the input their gradients are as exact as others: no floor, no rounded bias."""
    x, d = normal((70, 64), dtype, 0), normal((70, 64), dtype, 3)
    scale = normal((64,), "float32", 1, 0.3, 1.0).at[6].set(0).at[9].set(1e-6)
    bias = normal((64,), "float32", 2)
    check(x, scale, bias, d, subtract_mean=True, save="output", y_dtype=dtype, activation="silu",
          implementation="xla")  # fmt: skip
    y = exact(jaxnorm.layer_norm(x, scale, bias, activation="relu"))
    np.testing.assert_array_equal(y[:, 6], max(exact(bias.astype(dtype))[6], 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_mean", BOTH, ids=["layer_norm", "rms_norm"])
def test_it_is_jax_s_activation_of_the_norm(has_mean, activation):
    norm = jaxnorm.layer_norm if has_mean else jaxnorm.rms_norm
    x, scale, bias = (normal(s, "float32", i) for i, s in enumerate([(8, 64), (64,), (64,)]))

    def composed(x, scale, bias):
        return getattr(jax.nn, activation)(norm(x, scale, bias=bias, save="input"))

    def ours(x, scale, bias):
        return norm(x, scale, bias=bias, activation=activation)

    assert_computes(ours(x, scale, bias), composed, x, scale, bias, like=ours)
    plain = norm(x, scale, bias=bias)
    np.testing.assert_array_equal(norm(x, scale, bias=bias, activation=None), plain)
