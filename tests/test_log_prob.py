"""Tests of the entropies of log_prob_and_entropy. Its other tests are in `test_loss`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from loss_cases import operands
from pairs import on_each_implementation
from program_error import assert_computes
from reference import assert_within, exact
from test_loss import FUNCTIONS, refusable
from test_loss import check as check_values
from test_loss import values_and_gradient as of_function

from jaxnorm import log_prob_and_entropy

OPTIONS = FUNCTIONS["log_prob"].options
cotangents_of = FUNCTIONS["log_prob"].cotangents
check = functools.partial(check_values, of="log_prob")
values_and_gradient = functools.partial(of_function, of="log_prob")

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


@pytest.mark.parametrize(("count", "axis"), [(3, -1), (40, -1), (3, 0), (40, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_several_labels(count, axis, masked):
    """Each label of a position has its log-probability, even if the label's class is masked."""
    rng = np.random.default_rng(count)
    x = jnp.asarray(3 * rng.normal(size=(5, 64)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 64, (5, count)), jnp.int32)
    d = tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, count), (5,)))
    where = jnp.asarray(rng.random((5, 64)) < 0.7) if masked else None

    def plain(x):
        lse = jax.nn.logsumexp(x, -1, keepdims=True, where=where)
        log_p = x - lse
        terms = jnp.exp(log_p) * log_p
        return jnp.take_along_axis(log_p, labels, -1), -jnp.sum(terms, -1, where=where)

    def derivatives(function):
        def total(x):
            return sum(jnp.sum(a * jnp.sin(y)) for a, y in zip(d, function(x)))

        gradient = jax.grad(total)
        return lambda x: (function(x), jax.jvp(gradient, (x,), (jnp.cos(x),)))

    def several(x):
        x, mask = (None if a is None else jnp.moveaxis(a, -1, axis) for a in (x, where))
        return log_prob_and_entropy(x, labels, axis, mask)

    ours = derivatives(several)
    assert_computes(ours(x), derivatives(plain), x, like=ours)


@refusable
@on_each_implementation("dtype options", ["bfloat16", "float32"], OPTIONS)
def test_labels_that_are_no_classes(dtype, options, implementation):
    """A label that is not a class makes its log-probability NaN, but not the entropy.

    The gradient of the row is NaN, unless the cotangent of the log-probability is 0.
    """
    x, labels, d = operands((6, 300), dtype)
    x = x.at[2].set(0).at[2, 7].set(90).at[4, 0].set(90)
    labels, d = labels.at[1:5].set(jnp.array([300, -1, -100, 2**20])), d.at[2:5].set(0)
    log_prob, entropy = check(x, labels, d, implementation=implementation, **options)
    np.testing.assert_array_equal(np.isnan(log_prob), [False, *[True] * 4, False])
    assert np.isfinite(entropy).all()


@pytest.mark.parametrize("count", [None, 3, 40])
def test_derivatives_of_labels_that_are_no_classes(count):
    """In forward and reverse mode, the entropy does not depend on the labels.

    The tangent of a label's log-probability is NaN if the label is not a class, except at masked
    positions, where it is 0.
    """
    x, labels, d = operands((5, 64), "float32")
    labels = labels if count is None else jnp.repeat(labels[:, None], count, 1)
    bad = labels.at[1].set(64).at[3].set(-100)
    where = jnp.arange(5) != 3

    def both(labels):
        function = functools.partial(log_prob_and_entropy, labels=labels, where=where)
        tangents = jax.jvp(function, (x,), (jnp.sin(x),))[1]
        return *tangents, jax.grad(lambda x: jnp.sum(d * function(x)[1]))(x)

    valid = jnp.where((bad < 0) | (bad >= 64), 0, bad)
    (of_label, *of_entropy), (of_valid, *expected) = both(bad), both(valid)
    is_bad = np.arange(5).reshape(5, *[1] * (labels.ndim - 1)) == 1
    np.testing.assert_array_equal(of_label, np.where(is_bad, np.nan, of_valid))
    for a, b in zip(of_entropy, expected):
        np.testing.assert_array_equal(a, b)


@refusable
@on_each_implementation("dtype options", ["bfloat16", "float32"], OPTIONS)
def test_extremes(dtype, options, implementation):
    """Results are correct for rows with extreme logits.

    In such a row, one class has a probability of nearly 1, all classes have the same probability,
    logits are large, or some logits are -inf.
    """
    x, labels, d = operands((7, 300), dtype)
    x = x.at[0].set(0).at[0, labels[0]].set(1e4)  # almost all probability on the label
    x = x.at[1].set(0).at[1, (labels[1] + 1) % 300].set(90)  # on another class
    x = x.at[2].set(1e4).at[3].set(-7)  # two uniform rows
    x = x.at[4].set(jnp.sign(x[4]) * 1e4)
    capped = "logit_softcap" in options
    x = x.at[5, 10:].set(-jnp.inf).at[5, labels[5]].set(1)
    x = x.at[6].set(jnp.where(jnp.arange(300) == labels[6], 3, -jnp.inf))  # only one class
    log_prob, entropy = check(x, labels, d, implementation=implementation, **options)
    if not capped:
        assert (log_prob[0], entropy[0], log_prob[6], entropy[6]) == (0, 0, 0, 0)
    even, of_even = x[2:4], labels[2:4]
    assert_computes(
        entropy[2:4],
        lambda x: log_prob_and_entropy(x, of_even, **options)[1],
        even,
        expected=np.log(300),
    )


@refusable
def test_small_entropies(implementation):
    """Small entropies and losses have relative errors of a few roundings.

    The probability of the label is about 1 - 1e-6.
    """
    gap = np.array([14, 16, 18, 20], np.float32) + np.float32(np.log(999))
    x, labels = jnp.zeros((4, 1000), jnp.float32).at[:, 3].set(gap), jnp.full(4, 3)
    log_prob, entropy = check(x, labels, jnp.ones(4, jnp.float32), implementation=implementation)
    others = 999 * np.exp(-exact(gap))
    of_entropy = np.log1p(others) + others * exact(gap) / (1 + others)
    # The entropy and the log-probability both depend on a sum of 999 exponentials exp(-gap). Each
    # exponential is inexact, because its argument is rounded.
    roundings = reference.SAFETY * (np.sqrt(999) + gap + 8) * reference.unit_roundoff("float32")
    assert_within(log_prob, -np.log1p(others), roundings * np.log1p(others))
    assert_within(entropy, of_entropy, roundings * of_entropy)


@refusable
@on_each_implementation("lowest options", [-np.inf, np.finfo(np.float32).min, -1e37], OPTIONS[::2])
def test_logits_that_stand_for_none(lowest, options, implementation):
    """A logit of -inf, or a very low finite logit, excludes its class.

    Each of the four rows of x excludes different classes: the first 200, the last ones except the
    label, every third, or all but the label.
    """
    x, labels, d = operands((4, 300), "float32")
    column, labels = jnp.arange(300), labels.at[:].set(299)
    left_out = jnp.stack([column < 200, (column >= 100) & (column < 299), column % 3 == 0])
    x = jnp.where(jnp.stack([*left_out, column < 299]), lowest, x)
    check(x, labels, 8 * jnp.sign(d) + d, implementation=implementation, **options)


@refusable
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_what_is_infinite(options, implementation):
    """Results are correct if the label's logit is -inf, or if all logits of the row are -inf."""
    x, labels, d = operands((3, 300), "float32")
    x = x.at[0, labels[0]].set(-jnp.inf).at[1].set(-jnp.inf)
    static = tuple({**options, "implementation": implementation}.items())
    (log_prob, entropy), dx = values_and_gradient(x, labels, cotangents_of(d), options=static)
    if options:  # with a softcap, a logit of -inf becomes -softcap
        check(x, labels, d, implementation=implementation, **options)
        return
    assert np.isneginf(log_prob[0])
    assert np.isnan([log_prob[1], entropy[1], dx[1].sum()]).all()
    assert np.isfinite([log_prob[2], *entropy[jnp.array([0, 2])], *dx[0]]).all()
    rest = x[:1].at[0, labels[0]].set(-1e4)
    _, of_rest = log_prob_and_entropy(rest, labels[:1], implementation=implementation)
    np.testing.assert_array_equal(entropy[0], of_rest[0])
