"""Tests of the cross-entropy that jaxnorm computes with XLA, without kernels, on a CPU.

The code reshapes a row to a matrix, whose columns are called lanes. It computes two sums of
exponentials. The first sum is over all lanes but the label's lane. The second sum is over all
elements of the label's lane but the label. Together, they are the sum over all classes but the
label.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from loss_cases import CrossEntropy, operands
from reference import SAFETY, assert_within, exact, unit_roundoff
from specs import build_spec

from jaxnorm import softmax_cross_entropy_with_integer_labels as cross_entropy
from jaxnorm_kernels.xla.label_sums import label_sums, lane_size

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA's code of a CPU"),
    pytest.mark.usefixtures("quick_to_compile"),
]

PRIME = 8209


@pytest.mark.parametrize("deviation", [0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("cols", [1024, PRIME, 50257, 128256])
def test_ulps(cols, deviation):
    """Losses have errors of at most 2 ulps.

    The loss is (m - x_l) + log(s), a sum of two terms that are at least 0. In units of an ulp of
    the loss, its errors are at most:

    * 1/2, because the sum is rounded;
    * 1.25 for the two terms. m - x_l has an error of 1/2 of its own ulp, and log(s) an error of one
      ulp of log(s). The larger term's ulp is at most the loss's ulp, and the smaller term's ulp is
      at most half of that. The worst case is that log(s) is the larger term: 1 + 1/2 * 1/2;
    * 1/8, because s has a relative error of about 2^-24. This becomes an absolute error of log(s).
      The losses here are above 4, so their ulp is at least 2^-21.
    """
    x, _, _ = operands((32, cols), "float32", seed=cols, scale=deviation)
    labels = jnp.asarray(np.random.default_rng(1).integers(0, cols, 32))
    expected = CrossEntropy(x, labels).loss
    ulps = np.abs(exact(cross_entropy(x, labels)) - expected) / np.spacing(np.float32(expected))
    assert ulps.max() <= 2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_certain_label_in_every_column(dtype, masked):
    """A loss of about 1e-7 is accurate, in whatever column the label is.

    The loss is about the sum of the exponentials of all classes but the label, and these are tiny.
    The label's exponential is 1, because its logit is the largest. If it were added to this sum,
    rounding would lose the tiny exponentials.
    """
    cols = 256
    assert lane_size(cols) == 8
    x, _, d = operands((cols, cols), dtype, scale=1.0)
    labels = jnp.arange(cols)
    x = x.at[labels, labels].set(24)
    where = np.random.default_rng(2).random(x.shape) < 0.7
    where[labels, labels] = True
    given = {"where": jnp.asarray(where)} if masked else {}
    loss, vjp = jax.vjp(lambda x: cross_entropy(x, labels, **given), x)
    expected = CrossEntropy(x, labels, **({"kept": where} if masked else {}), dtype=dtype)
    assert expected.loss.max() < 4 * cols * np.exp(-24.0)  # would be lost in a sum with 1
    # The bound covers the errors of the exponentials and of their sum. The arguments of the
    # exponentials are at most 30 and have errors of half an ulp.
    u = unit_roundoff("float32")
    roundings = SAFETY * u * (30 + np.sqrt(cols))
    assert_within(loss, expected.loss, roundings * expected.loss)
    assert_within(vjp(d)[0], expected.gradient(d), expected.gradient_bound(d))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_exponentials_are_made_once(z_loss, masked):
    """In float32, the exponentials of all logits are computed once, for both passes."""
    x, labels, _ = operands((64, 4096), "float32")
    where = {"where": jnp.broadcast_to(jnp.arange(4096) % 3 > 0, x.shape)} if masked else {}
    step = jax.jit(jax.grad(lambda x: cross_entropy(x, labels, z_loss=z_loss, **where).mean()))
    text = step.lower(x).compile().as_text()
    assert len(re.findall(r"= f32\[64,4096\]\S* exponential\(", text)) == 1


def test_positions_left_out_have_no_second_derivatives():
    """Second derivatives at masked positions are 0, even for NaN logits."""
    x = jnp.ones((3, 256)).at[1].set(jnp.nan).at[0, 3].set(2.0)
    labels, kept = jnp.array([3, 0, 1]), jnp.array([True, False, True])
    loss = functools.partial(cross_entropy, labels=labels, where=kept[:, None])

    def slope(x):
        return (jax.grad(lambda x: loss(x).sum())(x) * jnp.arange(256.0)).sum()

    for derivative in (jax.grad(slope)(x), jax.jvp(jax.grad(slope), (x,), (jnp.ones_like(x),))[1]):
        assert jnp.isfinite(derivative[jnp.array([0, 2])]).all()
        np.testing.assert_array_equal(derivative[1], 0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cols", [1024, 1031])
def test_other_devices_make_the_same_sums_in_one_reduction(cols, masked, monkeypatch):
    x, label, _ = operands((6, cols), "float32")
    label, at_label = label[:, None], jnp.arange(cols) == label[:, None]
    where = np.random.default_rng(3).random(x.shape) < 0.5
    kept = jnp.where(where, x, -jnp.inf) if masked else x
    m = kept.max(-1, keepdims=True)
    float32 = np.dtype("float32")
    spec = build_spec("cross_entropy", "fwd", *x.shape, float32, float32, label_smoothing=0.1)
    here = label_sums(x, kept, m, label, at_label, spec)
    monkeypatch.setattr(lax, "platform_dependent", lambda *, cpu, default: default())
    elsewhere = label_sums(x, kept, m, label, at_label, spec)
    assert len(here) == len(elsewhere) == 4
    for a, b in zip(here, elsewhere):
        # The same terms are added in another order. All have the same sign, so each addition
        # contributes an error of at most one rounding of the sum.
        assert_within(a, exact(b), cols * unit_roundoff("float32") * np.abs(exact(b)))
