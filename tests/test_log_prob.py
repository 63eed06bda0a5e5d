"""log_prob_and_entropy: values and gradients against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from log_prob_cases import LogProbs
from loss_cases import operands
from program_error import analyse, assert_computes
from reference import assert_within, exact

from jaxnorm import log_prob_and_entropy, softmax_cross_entropy_with_integer_labels

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

NAME = "log_prob_and_entropy"
OPTIONS = [
    {},
    {"logit_softcap": 5.0},
    {"logits_scale": 1.5},
    {"logits_scale": 0.7, "logit_softcap": 10.0},
]
refusable = refused.expect(refused.SHORT_LOGITS, refused.CLASSES, refused.EMPTY)


@functools.partial(jax.jit, static_argnames=("axis", "options"))
def values_and_gradient(x, labels, cotangents, where=None, axis=-1, options=()):
    results, vjp = jax.vjp(
        lambda x: log_prob_and_entropy(x, labels, axis, where, **dict(options)), x
    )
    return results, vjp(cotangents)[0]


def cotangents_of(d):
    """Of both results; they differ from row to row, and from each other."""
    return d, jnp.flip(d) - 0.3


def assert_right(results, dx, expected, cotangents):
    for ours, wanted, bound in zip(results, expected.results, expected.bounds, strict=True):
        assert_within(ours, wanted, bound)
    assert_within(dx, expected.gradient(*cotangents), expected.gradient_bound(*cotangents))
    assert not np.any(exact(results[1]) < 0)


def check(x, labels, d, where=None, *, implementation, **options):
    """Both results and the gradient over the last axis, each within its bound; the results."""
    cotangents = cotangents_of(d)
    static = tuple({**options, "implementation": implementation}.items())
    results, dx = values_and_gradient(x, labels, cotangents, where, options=static)
    masks = {}
    if where is not None:
        of_classes = where.ndim == x.ndim
        name, shape = ("kept", x.shape) if of_classes else ("positions", labels.shape)
        masks = {name: np.broadcast_to(where, shape)}
    expected = LogProbs(x, labels, **masks, **options, dtype=x.dtype.name)
    assert [a.dtype for a in (*results, dx)] == [d.dtype, d.dtype, x.dtype]
    assert_right(results, dx, expected, cotangents)
    return results


@refusable
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_values_and_gradients(dtype, options, implementation):
    check(*operands((3, 8, 1000), dtype), implementation=implementation, **options)


@refusable
@pytest.mark.parametrize("cols", [1, 2, 131, 301, 4099, 50257])
def test_widths(cols, implementation):
    check(*operands((5, cols), "float32"), implementation=implementation)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.usefixtures("x64")
def test_float64(options):
    check(*operands((3, 50), "float64"), implementation="xla", **options)


@refusable
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_log_probabilities_are_losses(dtype, implementation):
    """To the bit: one sum serves both."""
    x, labels, d = operands((9, 1000), dtype)
    log_prob, _ = check(x, labels, d, implementation=implementation)
    loss = softmax_cross_entropy_with_integer_labels(x, labels, implementation=implementation)
    assert_within(log_prob, -exact(loss), 2 * LogProbs(x, labels, dtype=dtype).loss_bound())


@refusable
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_positions_that_do_not_count(dtype, implementation):
    """Both results are 0, and the gradient, whatever label, logits and cotangents are."""
    x, labels, d = operands((6, 300), dtype)
    labels = labels.at[1].set(-100).at[3].set(1000)
    x = x.at[1].set(jnp.inf).at[3, 7].set(jnp.nan)
    where = jnp.arange(6) % 2 == 0
    bad = [jnp.where(where, c, jnp.nan) for c in cotangents_of(d)]
    static = (("implementation", implementation),)
    results, dx = values_and_gradient(x, labels, tuple(bad), where, options=static)
    for a in (*results, dx):
        np.testing.assert_array_equal(a[1::2], 0)
    check(x, labels, d, where, implementation=implementation)
    check(x[None], labels[None], d[None], where[None], implementation=implementation)


@refusable
def test_masks_of_classes(implementation):
    """Rows without a class, of the label alone, and labels that are not among the classes."""
    rng = np.random.default_rng(1)
    x, labels, d = operands((4, 6, 200), "float32")
    where = rng.random((4, 6, 200)) < 0.5
    where[1, 2] = False
    where[3, 1] = np.arange(200) == labels[3, 1]
    where[2, 2] = np.arange(200) != labels[2, 2]
    hidden = ~where & (np.arange(200) != labels[..., None])  # what must not matter
    for bad in (jnp.nan, jnp.inf):
        log_prob, entropy = check(
            jnp.where(hidden, bad, x), labels, d, jnp.asarray(where), implementation=implementation
        )
        assert (log_prob[1, 2], entropy[1, 2], log_prob[3, 1], entropy[3, 1]) == (0, 0, 0, 0)
    check(x, labels, d, jnp.asarray(where[:1, :1]), implementation=implementation, **OPTIONS[3])


@refusable
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_rows_stay_alone(bad, implementation):
    """A label outside, and a logit that is no number: NaN in that row, and no other."""
    x, labels, d = operands((5, 400), "float32")
    labels = labels.at[1].set(400).at[4].set(-1)
    x = x.at[2, 9].set(bad)
    static = (("implementation", implementation),)
    results, dx = values_and_gradient(x, labels, cotangents_of(d), options=static)
    for a in (*results, dx.sum(-1)):
        np.testing.assert_array_equal(np.isnan(a), [False, True, True, False, True])
    rows = jnp.array([0, 3])
    check(x[rows], labels[rows], d[rows], implementation=implementation)


@refusable
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_extremes(dtype, options, implementation):
    """Certain rows and even ones, of 1e4, that differ by 1e4, and with classes at -inf."""
    x, labels, d = operands((7, 300), dtype)
    x = x.at[0].set(0).at[0, labels[0]].set(1e4)  # certain of the label
    x = x.at[1].set(0).at[1, (labels[1] + 1) % 300].set(90)  # certain of another class
    x = x.at[2].set(1e4).at[3].set(-7)  # even
    x = x.at[4].set(jnp.sign(x[4]) * 1e4)
    capped = "logit_softcap" in options
    x = x.at[5, 10:].set(-jnp.inf).at[5, labels[5]].set(1)
    x = x.at[6].set(jnp.where(jnp.arange(300) == labels[6], 3, -jnp.inf))  # one class alone
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
    """Both are right to a few roundings of themselves, for a label that is certain but for 1e-6."""
    gap = np.array([14, 16, 18, 20], np.float32) + np.float32(np.log(999))
    x, labels = jnp.zeros((4, 1000), jnp.float32).at[:, 3].set(gap), jnp.full(4, 3)
    log_prob, entropy = check(x, labels, jnp.ones(4, jnp.float32), implementation=implementation)
    others = 999 * np.exp(-exact(gap))
    of_entropy = np.log1p(others) + others * exact(gap) / (1 + others)
    # The sum of 999 equal exponentials of -gap, each with the rounding of its argument.
    roundings = reference.SAFETY * (np.sqrt(999) + gap + 8) * reference.unit_roundoff("float32")
    assert_within(log_prob, -np.log1p(others), roundings * np.log1p(others))
    assert_within(entropy, of_entropy, roundings * of_entropy)


@refusable
@pytest.mark.parametrize("options", OPTIONS[::2], ids=str)
@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min, -1e37])
def test_logits_that_stand_for_none(lowest, options, implementation):
    """As masks have them: before and behind others, all but one; cotangents above 1."""
    x, labels, d = operands((4, 300), "float32")
    column, labels = jnp.arange(300), labels.at[:].set(299)
    left_out = jnp.stack([column < 200, (column >= 100) & (column < 299), column % 3 == 0])
    x = jnp.where(jnp.stack([*left_out, column < 299]), lowest, x)
    check(x, labels, 8 * jnp.sign(d) + d, implementation=implementation, **options)


@refusable
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_what_is_infinite(options, implementation):
    """A label at -inf; a row of nothing else."""
    x, labels, d = operands((3, 300), "float32")
    x = x.at[0, labels[0]].set(-jnp.inf).at[1].set(-jnp.inf)
    static = tuple({**options, "implementation": implementation}.items())
    (log_prob, entropy), dx = values_and_gradient(x, labels, cotangents_of(d), options=static)
    if options:  # -inf is -softcap
        check(x, labels, d, implementation=implementation, **options)
        return
    assert np.isneginf(log_prob[0])
    assert np.isnan([log_prob[1], entropy[1], dx[1].sum()]).all()
    assert np.isfinite([log_prob[2], *entropy[jnp.array([0, 2])], *dx[0]]).all()
    rest = x[:1].at[0, labels[0]].set(-1e4)
    _, of_rest = log_prob_and_entropy(rest, labels[:1], implementation=implementation)
    np.testing.assert_array_equal(entropy[0], of_rest[0])


@pytest.mark.parametrize("axis", [0, 1, (0, 2), (2, -3), (2, 0, 1), None])
def test_axes(axis):
    """As on the moved and flattened array, in the order of the axes; also with masks."""
    x = operands((4, 5, 6), "float32")[0]
    axes = [a % 3 for a in np.atleast_1d(range(3) if axis is None else axis)]
    others = [a for a in range(3) if a not in axes]

    def moved(a):
        return jnp.transpose(a, [*others, *axes]).reshape(*(x.shape[i] for i in others), -1)

    rows = moved(x)
    labels = jnp.asarray(np.random.default_rng(2).integers(0, rows.shape[-1], rows.shape[:-1]))
    d = cotangents_of(jnp.cos(labels.astype(jnp.float32)))
    for where in (None, labels % 2 == 0, x > 0):
        of_rows = moved(where) if where is not None and where.ndim == 3 else where
        results, dx = values_and_gradient(x, labels, d, where, axis=axis)
        assert_computes((results, moved(dx)), values_and_gradient, rows, labels, d, of_rows)


few = settings(max_examples=25, deadline=None, derandomize=True)
rows = hnp.arrays(np.float32, (3, 5), elements=st.floats(-100, 100, width=32))


@few
@given(rows)
def test_entropies_are_of_no_label_and_between_0_and_that_of_even_rows(x):
    """The mean of -log p over labels drawn from p is the entropy."""

    def of_label(k):
        return lambda x: log_prob_and_entropy(x, np.full(3, k, np.int32))

    def of_all(x):
        log_p = jnp.stack([of_label(k)(x)[0] for k in range(5)], -1)
        return -jnp.sum(jnp.exp(log_p) * log_p, -1)

    entropy = of_label(0)(x)[1]
    error = analyse(of_label(0), x)[1].error
    assert np.all((entropy >= 0) & (entropy <= np.log(5) + error))
    for k in range(1, 5):
        other = functools.partial(lambda f, x: f(x)[1], of_label(k))
        assert_computes(other(x), lambda x: of_label(0)(x)[1], x, like=other)
    assert_computes(entropy, of_all, x, like=lambda x: of_label(0)(x)[1])
