"""Norms with an activation, for extreme values; `test_norm` tests all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norms import check, normal
from reference import ACTIVATIONS, DTYPES, Norm, exact

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


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
