"""Second derivatives in three special cases.

The first is a scale of 0: x cannot be recovered from y then. The second is a row with a single
nonzero element. The third is a bias that the forward pass rounds. `test_every_derivative` tests
all other second derivatives.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from program_error import assert_computes
from reference import assert_within, exact, unit_roundoff

import jaxnorm

pytestmark = pytest.mark.usefixtures("x64", "quick_to_compile")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_second_derivative_at_a_floored_scale_is_loud(dtype):
    """At a scale of 0, second derivatives are NaN if y is saved, and correct if the input is saved.

    A saved y does not determine these second derivatives. First derivatives are correct in both
    cases.
    """
    x, w = normal(4, 6).astype(dtype), normal(6, seed=1).at[2].set(0)

    def loss(w, save):
        return jnp.sum(jaxnorm.rms_norm(x, w, save=save).astype("float64") ** 3)

    ours, theirs = (lambda w, save=save: jax.grad(loss)(w, save) for save in ("output", "input"))
    others = np.arange(6) != 2
    assert_computes(ours(w)[others], lambda w: theirs(w)[others], w, like=lambda w: ours(w)[others])
    # The scale of 0 is replaced by 2^-60, so y = 2^-60 * x_hat in this column. The loss is the sum
    # of y^3, so the gradient of this scale is the sum of 3 * y^2 * x_hat over four rows. Because
    # |x_hat| <= sqrt(6), the gradient is at most the following tiny number.
    assert np.abs(ours(w)[2]) <= 3 * 4 * 6**1.5 * 2.0**-120
    penalty = jax.grad(lambda w, save: jnp.sum(jax.grad(loss)(w, save) ** 2))
    np.testing.assert_array_equal(np.isnan(penalty(w, "output")), np.arange(6) == 2)
    assert np.isfinite(penalty(w, "input")).all()


@pytest.mark.parametrize("save", ["output", "input"])
def test_one_hot_rows(save):
    """Second derivatives are correct for one-hot rows, where |x_hat| is at its bound sqrt(N).

    x_hat is clipped to this bound, and the clip must not set derivatives to 0.
    """
    x = jnp.eye(4) * 3
    norm = functools.partial(jaxnorm.rms_norm, save=save, epsilon=1e-3)
    check_grads(lambda x: norm(x, jnp.full(4, 0.7)), (x,), order=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_second_derivative_through_a_rounded_bias(dtype):
    """A norm rounds its bias to the output's dtype. The derivatives ignore this rounding.

    So the derivatives with respect to the bias are the same as without the rounding.
    """
    x, d = normal(3, 8).astype(jnp.float32), normal(3, 8, seed=1).astype(jnp.float32)
    for bias in (jnp.full(8, 1e-5, jnp.float32), jnp.full(8, 1.001, jnp.float32)):

        def loss(b):
            y = jaxnorm.layer_norm(x, None, b, dtype=dtype).astype(jnp.float32)
            return jnp.sum(d * y**2)

        hessian = jax.jacrev(jax.grad(loss))(bias)
        # In the second derivative, y has the cotangent 2 * d. This cotangent is rounded to y's
        # dtype before it is summed over the rows.
        bound = unit_roundoff(dtype) * np.sum(2 * np.abs(d), 0).max()
        assert_within(hessian, np.diag(2 * exact(d).sum(0)), bound)
