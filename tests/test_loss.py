"""Functions of logits and labels: values and gradients against float64 NumPy."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import refused
from loss_cases import CrossEntropy, LogProbs, operands
from pairs import on_each_implementation
from program_error import assert_computes
from reference import assert_within, exact

from jaxnorm import (
    kl_divergence,
    linear_kl_divergence,
    linear_log_prob_and_entropy,
    linear_softmax_cross_entropy,
    log_prob_and_entropy,
)
from jaxnorm import softmax_cross_entropy_with_integer_labels as cross_entropy

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

NAME = "softmax_cross_entropy_with_integer_labels"
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-3},
    {"label_smoothing": 0.2, "z_loss": 1e-2},
    {"label_smoothing": 1.0},
    {"logit_softcap": 5.0},
    {"logits_scale": 0.7, "logit_softcap": 10.0, "label_smoothing": 0.1, "z_loss": 1e-3},
    {"logits_scale": 1.5, "label_smoothing": 0.1},
]
refusable = refused.expect(refused.SHORT_LOGITS, refused.CLASSES, refused.EMPTY)


class Of(NamedTuple):
    """A function of logits and labels.

    Attributes:
      function: the public function.
      reference: the class that computes its results in float64, with bounds.
      cotangents: returns cotangents that differ between rows and between results.
      options: the options with which it is tested.
    """

    function: Callable[..., Any]
    reference: type[CrossEntropy]
    cotangents: Callable[[Any], tuple[Any, ...]]
    options: list[dict[str, Any]]


FUNCTIONS = {
    "loss": Of(cross_entropy, CrossEntropy, lambda d: (d,), OPTIONS),
    "log_prob": Of(
        log_prob_and_entropy,
        LogProbs,
        lambda d: (d, jnp.flip(d) - 0.3),
        [{}, OPTIONS[5], {"logits_scale": 1.5}, {"logits_scale": 0.7, "logit_softcap": 10.0}],
    ),
}
each = pytest.mark.parametrize("of", FUNCTIONS)
each_option = pytest.mark.parametrize(
    ("of", "options"), [(of, o) for of in FUNCTIONS for o in FUNCTIONS[of].options], ids=str
)


@functools.partial(jax.jit, static_argnames=("axis", "options", "of"))
def values_and_gradient(x, labels, cotangents, where=None, axis=-1, options=(), of="loss"):
    def function(x):
        results = FUNCTIONS[of].function(x, labels, axis, where, **dict(options))
        return results if isinstance(results, tuple) else (results,)

    results, vjp = jax.vjp(function, x)
    return results, vjp(cotangents)[0]


@functools.partial(jax.jit, static_argnames=("axis", "options"))
def value_and_gradient(x, labels, d, where=None, axis=-1, options=()):
    (loss,), dx = values_and_gradient(x, labels, (d,), where, axis, options)
    return loss, dx


def check(x, labels, d, where=None, *, implementation, of="loss", **options):
    """Assert that all results and the gradient are within their bounds, and return the results."""
    given = {**options, "implementation": implementation}
    cotangents = FUNCTIONS[of].cotangents(d)
    results, dx = values_and_gradient(
        x, labels, cotangents, where, options=tuple(given.items()), of=of
    )
    masks, weights = {}, 1.0
    if where is not None and where.ndim == x.ndim:
        masks = {"kept": np.broadcast_to(where, x.shape)}
    elif where is not None:
        weights = np.broadcast_to(where, labels.shape).astype(d.dtype)
        masks = {"positions": weights != 0}
    expected = FUNCTIONS[of].reference(x, labels, **masks, **options, dtype=x.dtype.name)
    assert [a.dtype for a in (*results, dx)] == [*[d.dtype] * len(results), x.dtype]
    for ours, value, bound in zip(results, expected.results, expected.bounds, strict=True):
        wanted = value * weights
        assert_within(ours, wanted, bound * np.abs(weights) + expected.u * np.abs(wanted))
    cotangents = [exact(c) * weights for c in cotangents]
    assert_within(dx, expected.gradient(*cotangents), expected.gradient_bound(*cotangents))
    assert of == "loss" or not np.any(exact(results[1]) < 0)
    return results[0] if of == "loss" else results


@refusable
@each_option
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_values_and_gradients(dtype, of, options, implementation):
    check(*operands((3, 8, 1000), dtype), implementation=implementation, of=of, **options)


@refusable
@each
@pytest.mark.parametrize("cols", [1, 2, 131, 301, 4099, 50257])
def test_widths(cols, of, implementation):
    options = {"label_smoothing": 0.1} if of == "loss" else {}
    check(*operands((5, cols), "float32"), implementation=implementation, of=of, **options)


@each_option
@pytest.mark.usefixtures("x64")
def test_float64(of, options):
    check(*operands((3, 50), "float64"), implementation="xla", of=of, **options)


@refusable
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_labels_of_any_integer_dtype(dtype, implementation):
    """Labels of any integer dtype have correct losses, even if they are out of range.

    Without 64-bit types, JAX converts them to 32 bits first.
    """
    values = [0, 1, 126, 199, 200, 255, -1, -128, 2**15, 2**32 + 5, -(2**33)]
    info = np.iinfo(dtype)
    labels = np.array([v for v in values if info.min <= v <= info.max], dtype)
    x, _, d = operands((len(labels), 200), "bfloat16")
    expected = CrossEntropy(x, labels, dtype="bfloat16")
    for wide in (False, True):
        with jax.enable_x64(wide):
            if wide:
                assert jnp.asarray(labels).dtype == dtype
            loss, vjp = jax.vjp(
                lambda x: cross_entropy(x, labels, implementation=implementation), x
            )
            assert_within(loss, expected.loss, expected.loss_bound())
            assert_within(vjp(d)[0], expected.gradient(d), expected.gradient_bound(d))
    assert np.isnan(loss[~expected.is_class]).all()


@refusable
@each
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_positions_that_do_not_count(dtype, of, implementation):
    """Results and gradients of masked positions are 0 for any labels, logits and cotangents."""
    x, labels, d = operands((6, 300), dtype)
    labels = labels.at[1].set(-100).at[3].set(1000)
    x = x.at[1].set(jnp.inf).at[3, 7].set(jnp.nan)
    where = jnp.arange(6) % 2 == 0
    given = {"implementation": implementation, **({"z_loss": 0.1} if of == "loss" else {})}
    bad = tuple(jnp.where(where, c, jnp.nan) for c in FUNCTIONS[of].cotangents(d))
    results, dx = values_and_gradient(x, labels, bad, where, options=tuple(given.items()), of=of)
    for a in (*results, dx):
        np.testing.assert_array_equal(a[1::2], 0)
    check(x, labels, d, where, of=of, **given)
    check(x[None], labels[None], d[None], where[None], of=of, **given)


@refusable
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("options", [{}, OPTIONS[6]], ids=str)
def test_weights(options, dtype, implementation):
    """Weights may have any sign, and are cast to float32. A weight of 0 excludes its row.

    The excluded row has no effect, even if it has NaN logits or an invalid label.
    """
    x, labels, d = operands((6, 300), "bfloat16")
    weights = jnp.asarray([[0.3, 0, -2, 1, 0, 1e-3]], dtype)
    bad = x.at[1].set(jnp.nan).at[4, 3].set(jnp.inf)
    labels = labels.at[1].set(-100)
    x, bad, labels, d = (a[None] for a in (x, bad, labels, d))
    check(bad, labels, d, weights, implementation=implementation, **options)
    given = {"implementation": implementation, **options}

    @jax.jit
    def derivatives(x, weights):
        loss = functools.partial(cross_entropy, labels=labels, **given)
        tangent = jax.jvp(lambda x: loss(x, where=weights), (bad,), (x,))[1]
        return tangent, jax.grad(lambda w: loss(x, where=w).sum())(weights)

    tangent, of_weights = derivatives(x, weights)
    assert np.isfinite(tangent).all()
    assert not tangent[weights == 0].any()
    assert not of_weights.any()


@refusable
@pytest.mark.parametrize("cols", [301, 50257])
def test_infinite_logits_under_a_cap(cols, implementation):
    """With a softcap, a logit of -inf becomes -softcap, so its class is not excluded.

    A kernel pads rows with extra columns. These must have no effect, with or without a softcap.
    """
    x, labels, d = operands((3, cols), "bfloat16")
    x = x.at[0, 7].set(-jnp.inf).at[1, : cols // 2].set(-jnp.inf).at[2].set(jnp.inf)
    check(x, labels, d, implementation=implementation, logit_softcap=3.0)


@refusable
@each
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_rows_stay_alone(bad, of, implementation):
    """A label out of range or a NaN in the logits makes only that row NaN.

    The entropy of the row is not affected by the label.
    """
    x, labels, d = operands((5, 400), "float32")
    labels = labels.at[1].set(400).at[4].set(-1)
    x = x.at[2, 9].set(bad)
    given = {"implementation": implementation}
    cotangents = FUNCTIONS[of].cotangents(d)
    results, dx = values_and_gradient(x, labels, cotangents, options=tuple(given.items()), of=of)
    for a in (results[0], dx.sum(-1)):
        np.testing.assert_array_equal(np.isnan(a), [False, True, True, False, True])
    for entropy in results[1:]:
        np.testing.assert_array_equal(np.isnan(entropy), [False, False, True, False, False])
    assert np.isnan(dx[jnp.array([1, 2, 4])]).all()
    rows = jnp.array([0, 3])
    check(x[rows], labels[rows], d[rows], of=of, **given)


@refusable
@each
def test_masks_of_classes(of, implementation):
    """A mask of classes may exclude all classes of a row, all but its label, or only its label."""
    rng = np.random.default_rng(1)
    x, labels, d = operands((4, 6, 200), "float32")
    where = rng.random((4, 6, 200)) < 0.5
    where[1, 2] = False
    where[3, 1] = np.arange(200) == labels[3, 1]
    where[2, 2] = np.arange(200) != labels[2, 2]
    hidden = ~where & (np.arange(200) != labels[..., None])  # masked classes, except labels
    given = {"implementation": implementation, "of": of}
    for bad in (jnp.nan, jnp.inf):
        results = check(jnp.where(hidden, bad, x), labels, d, jnp.asarray(where), **given)
        for a in results if of == "log_prob" else (results,):
            assert (a[1, 2], a[3, 1]) == (0, 0)
    broadcast = jnp.asarray(where[:1, :1])
    options = FUNCTIONS[of].options[2]
    results = check(x, labels, d, broadcast, **given, **options)
    if of == "loss":
        one = functools.partial(
            cross_entropy, labels=labels[0, 0], where=broadcast[0, 0], **options
        )
        assert_computes(results[0, 0], one, x[0, 0])


# A class whose logit is -inf has an infinite loss with label smoothing.
each_unsmoothed = pytest.mark.parametrize(
    ("of", "options"),
    [(of, o) for of in FUNCTIONS for o in FUNCTIONS[of].options if "label_smoothing" not in o],
    ids=str,
)


@refusable
@each_option
def test_confident_labels(of, options, implementation):
    """Small losses and entropies (about 1e-6) have relative errors of a few roundings."""
    gap = jnp.array([14, 16, 18, 20], jnp.float32) + np.float32(np.log(999))
    x, labels = jnp.zeros((4, 1000), jnp.float32).at[:, 3].set(gap), jnp.full(4, 3)
    results = check(x, labels, jnp.ones(4), implementation=implementation, of=of, **options)
    if not options:
        others = 999 * np.exp(-exact(gap))
        loss, entropy = np.log1p(others), np.log1p(others) + others * exact(gap) / (1 + others)
        # All results depend on a sum of 999 equal exponentials. The arguments of the exponentials
        # have the same rounding error, so the errors do not cancel in the sum.
        roundings = reference.SAFETY * (np.sqrt(999) + exact(gap) + 8) * 2.0**-24
        results = (results,) if of == "loss" else results
        for ours, expected in zip(results, [loss] if of == "loss" else [-loss, entropy]):
            assert_within(ours, expected, roundings * np.abs(expected))


@refusable
@each_unsmoothed
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_extreme_logits(dtype, of, options, implementation):
    """Results are correct for rows with extreme logits.

    In such a row, one class has a probability of nearly 1, all classes have the same probability,
    logits are large, or some logits are -inf.
    """
    x, labels, d = operands((7, 300), dtype)
    x = x.at[0].set(0).at[0, labels[0]].set(1e4)  # almost all probability on the label
    x = x.at[1].set(0).at[1, (labels[1] + 1) % 300].set(90)  # on another class
    x = x.at[2].set(1e4).at[3].set(-7)  # two uniform rows
    x = x.at[4].set(jnp.sign(x[4]) * 1e4)
    x = x.at[5, 10:].set(-jnp.inf).at[5, labels[5]].set(1)
    x = x.at[6].set(jnp.where(jnp.arange(300) == labels[6], 3, -jnp.inf))  # only one class
    results = check(x, labels, d, implementation=implementation, of=of, **options)
    if not options:
        for a in results if of == "log_prob" else (results,):
            assert (a[0], a[6]) == (0, 0)


@refusable
@each_unsmoothed
@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min, -1e37])
def test_logits_that_stand_for_none(lowest, of, options, implementation):
    """A logit of -inf, or a very low finite logit, excludes its class.

    Each of the four rows of x excludes different classes: the first 200, the last ones except the
    label, every third, or all but the label.
    """
    x, labels, d = operands((4, 300), "float32")
    column, labels = jnp.arange(300), labels.at[:].set(299)
    left_out = jnp.stack([column < 200, (column >= 100) & (column < 299), column % 3 == 0])
    x = jnp.where(jnp.stack([*left_out, column < 299]), lowest, x)
    d = 8 * jnp.sign(d) + d
    check(x, labels, d, implementation=implementation, of=of, **options)


@refusable
@each
def test_what_is_infinite(of, implementation):
    """Results are correct if the label's logit is -inf, or if all logits of the row are -inf."""
    x, labels, d = operands((3, 300), "float32")
    x = x.at[0, labels[0]].set(-jnp.inf).at[1].set(-jnp.inf)
    given, cotangents = (("implementation", implementation),), FUNCTIONS[of].cotangents(d)
    results, dx = values_and_gradient(x, labels, cotangents, options=given, of=of)
    assert np.isinf(results[0][0])
    for a in (*results, dx):
        assert np.isnan(a[1]).any()
        assert np.isfinite(a[2]).all()
    assert np.isfinite(dx[0]).all()
    for entropy in results[1:]:
        lower = x[:1].at[0, labels[0]].set(-1e4)
        np.testing.assert_array_equal(
            entropy[0], log_prob_and_entropy(lower, labels[:1], implementation=implementation)[1][0]
        )


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
@on_each_implementation("dtype options", ["bfloat16", "float32"], FUNCTIONS["log_prob"].options)
def test_labels_that_are_no_classes(dtype, options, implementation):
    """A label that is not a class makes its log-probability NaN, but not the entropy.

    The gradient of the row is NaN, unless the cotangent of the log-probability is 0.
    """
    x, labels, d = operands((6, 300), dtype)
    x = x.at[2].set(0).at[2, 7].set(90).at[4, 0].set(90)
    labels, d = labels.at[1:5].set(jnp.array([300, -1, -100, 2**20])), d.at[2:5].set(0)
    log_prob, entropy = check(x, labels, d, implementation=implementation, of="log_prob", **options)
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


def test_more_than_float32_halves():
    x = jnp.array([[3e38, 3e38, -3e38], [3e38, 0.0, -3e38]])
    loss, dx = value_and_gradient(x, jnp.array([0, 0]), jnp.ones(2))
    # Exponentials of 0 and of -inf are exact, and so is their sum.
    for actual, expected in ((loss, [np.log(2), 0]), (dx, [[-0.5, 0.5, 0], [0, 0, 0]])):
        expected = np.array(expected)
        assert_within(actual, expected, reference.SAFETY * reference.rounding(expected, "float32"))
    nothing = jnp.full((1, 3), -jnp.inf)
    assert np.isnan(cross_entropy(nothing, jnp.array([0]))).all()
    np.testing.assert_array_equal(cross_entropy(nothing, [0], where=nothing > 0), 0)


@each
@pytest.mark.parametrize("axis", [0, 1, (0, 2), (2, -3), (2, 0, 1), None])
def test_axes(axis, of):
    """Passing several class axes gives the same loss as flattening them into one axis.

    This also holds with masks.
    """
    x = operands((4, 5, 6), "float32")[0]
    axes = [a % 3 for a in np.atleast_1d(range(3) if axis is None else axis)]
    others = [a for a in range(3) if a not in axes]

    def moved(a):
        return jnp.transpose(a, [*others, *axes]).reshape(*(x.shape[i] for i in others), -1)

    rows = moved(x)
    labels = jnp.asarray(np.random.default_rng(2).integers(0, rows.shape[-1], rows.shape[:-1]))
    d = FUNCTIONS[of].cotangents(jnp.cos(labels.astype(jnp.float32)))
    function = functools.partial(values_and_gradient, of=of)
    for where in (None, labels % 2 == 0, x > 0):
        of_rows = moved(where) if where is not None and where.ndim == 3 else where
        results, dx = function(x, labels, d, where, axis=axis)
        assert_computes((results, moved(dx)), function, rows, labels, d, of_rows)


@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=str)
def test_no_classes(rows, options):
    """Without classes, a loss is NaN, and its gradient is empty."""
    x, labels = jnp.ones((rows, 0)), jnp.zeros(rows, int)
    losses, pullback = jax.vjp(lambda x: cross_entropy(x, labels, **options), x)
    assert jnp.isnan(losses).all()
    assert pullback(losses)[0].shape == x.shape


# ----------------------------------------------------------------- scales that are not above 0


def scaled_losses(z):
    """Return losses of the logits z, as functions of `logits_scale`.

    The linear losses take z as the activations, and a weight that is half of the identity matrix.
    """
    labels, classes = np.arange(7), np.arange(64) % 7 <= np.arange(7)[:, None]
    flipped, half = jnp.flip(z, 0), jnp.eye(64, dtype=z.dtype) / 2
    divergence = functools.partial(kl_divergence, z, flipped)
    losses = {
        "loss": (cross_entropy, {}),
        "loss of classes": (cross_entropy, {"where": classes}),
        "smoothed": (cross_entropy, {"label_smoothing": 0.1, "z_loss": 1e-3}),
        "capped": (cross_entropy, {"logit_softcap": 8.0}),
        "log_prob": (log_prob_and_entropy, {}),
        "several": (log_prob_and_entropy, {"labels": labels[:, None] + np.arange(3)}),
        "linear": (linear_softmax_cross_entropy, {"weight": half}),
        "linear of rows": (linear_softmax_cross_entropy, {"weight": half, "reduction": "none"}),
        "linear log_prob": (linear_log_prob_and_entropy, {"weight": half}),
    }
    return {
        name: functools.partial(function, z, **{"labels": labels, **options})
        for name, (function, options) in losses.items()
    } | {
        "divergence": divergence,
        "divergence of classes": functools.partial(divergence, where=classes),
        "divergence reverse": functools.partial(divergence, reverse=True),
        "linear divergence": functools.partial(linear_kl_divergence, z, half, flipped, half),
    }


@pytest.mark.parametrize("name", scaled_losses(np.ones((7, 64), "float32")))
def test_scales_that_are_not_above_0(name):
    """A scale of -s gives exactly the results of s for -logits, if it is a number or an array.

    The logits are so large that their exponentials overflow. A scale of 0 makes all logits 0.
    """
    dtype = "float16" if "linear" in name else "float32"
    z = jnp.asarray(300 * np.random.default_rng(0).normal(size=(7, 64)), dtype)

    def results(sign, scale):
        y, pullback = jax.vjp(
            lambda z: jax.tree.leaves(scaled_losses(sign * z)[name](logits_scale=scale)), z
        )
        return [*y, *pullback([jnp.cos(a) * 2.0**-10 for a in y])]

    for scale in (0.5, jnp.array([0.5, 2.0**-12, 1, 3, 0.5, 2.0**-12, 1])):
        expected = results(-1.0, scale)
        assert all(jnp.isfinite(a).all() for a in expected)
        for result, of_minus in zip(results(1.0, -scale), expected, strict=True):
            np.testing.assert_array_equal(result, of_minus)
    *y, dz = results(1.0, jnp.zeros(7))
    np.testing.assert_array_equal(dz, 0)
    for result, of_zeros in zip(y, jax.tree.leaves(scaled_losses(0 * z)[name]()), strict=True):
        tiny = 64 * jnp.finfo("float32").tiny if "divergence" in name else 0
        assert (abs(result - of_zeros) <= tiny).all()
