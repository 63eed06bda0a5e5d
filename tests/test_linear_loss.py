"""Losses, log-probabilities and entropies of logits ``x @ weight``: values, gradients, programs.

Values are compared with float64 NumPy. `FUNCTIONS` lists how the functions differ.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import linear_loss_cases
import log_prob_cases
import numpy as np
import pytest
import reference
from linear_loss_cases import operands
from pairs import each_pair, pairwise
from program_error import assert_computes
from reference import assert_within, exact

from jaxnorm import linear_log_prob_and_entropy, log_prob_and_entropy
from jaxnorm import linear_softmax_cross_entropy as linear_loss
from jaxnorm.operations.linear_loss_call import chunks_of

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

REDUCTIONS = ["mean", "sum", "none"]
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2}
OPTIONS = [{}, SMOOTHED, {**SMOOTHED, "logits_scale": 1.5, "logit_softcap": 2.0}]


class Of(NamedTuple):
    """A function that takes x and a weight, and computes the logits ``x @ weight`` itself.

    Attributes:
      function: the public function.
      reference: the class that computes it in float64.
      options: the options with which it is tested.
      matmuls: the number of matmuls in the program of a value and its gradients. The program has
        the matmuls of a chunk twice: before the loop, for the first chunk, and in the loop.
    """

    function: Callable[..., Any]
    reference: type[linear_loss_cases.Linear]
    options: list[dict[str, Any]]
    matmuls: int


LOSS = Of(linear_loss, linear_loss_cases.Linear, OPTIONS, 2 * 3)
LOG_PROB = Of(
    linear_log_prob_and_entropy,
    log_prob_cases.Linear,
    [{}, {"logits_scale": 1.5}, {"logits_scale": 1.5, "logit_softcap": 2.0}],
    1 + 2 * 3,
)
# The loss is tested with each reduction. Log-probabilities have no reduction.
FUNCTIONS = {**dict.fromkeys(REDUCTIONS, LOSS), "log_prob": LOG_PROB}
each = pytest.mark.parametrize("of", FUNCTIONS)


@functools.partial(jax.jit, static_argnames=("of", "options"))
def values_and_gradients(of, x, weight, bias, labels, where, cotangents, options=()):
    given = dict(options) | ({} if of == "log_prob" else {"reduction": of})

    def function(x, weight, bias):
        results = FUNCTIONS[of].function(x, weight, labels, bias=bias, where=where, **given)
        return results if isinstance(results, tuple) else (results,)

    results, vjp = jax.vjp(function, x, weight, bias)
    return results, vjp(cotangents)


def cotangents_of(of, labels, dtype=np.float32):
    along = jnp.arange(labels.size).reshape(labels.shape)
    if of in ("mean", "sum"):
        return (jnp.asarray(1.7, dtype),)
    return (jnp.cos(along).astype(dtype), jnp.sin(3 * along + 1).astype(dtype))[
        : 1 + (of == "log_prob")
    ]


def check(of, x, weight, bias, labels, where=None, *, chunk=None, **options):
    """Return all results and gradients, after asserting that each is within its bound."""
    weights = np.asarray(True if where is None else where, np.float64)
    weights = np.broadcast_to(weights, labels.shape)
    positions = None if where is None else weights != 0
    expected = FUNCTIONS[of].reference(x, weight, bias, labels, positions, **options)
    wide = "float64" if "float64" in expected.dtypes[:2] else "float32"
    d = cotangents_of(of, labels, wide)
    if of == "log_prob":
        values, bounds, rows = expected.results, expected.bounds, d
    else:
        values, bounds = expected.losses * weights, expected.losses_bound() * np.abs(weights)
        bounds = bounds + expected.u * np.abs(values)
        count = (weights.sum() or 1) if of == "mean" else 1
        rows = (exact(d[0]) / count * weights,)
        if of != "none":
            terms = np.abs(values).sum()
            values, bounds = values.sum() / count, bounds.sum() / abs(count)
            # The mean divides by the sum of the weights. Some weights are positive and some are
            # negative, so the sum may be small. Its rounding error is proportional to the sum of
            # the weights' magnitudes.
            for size in (terms, np.abs(weights).sum() * np.abs(values)):
                bounds = bounds + 4 * expected.u * size / abs(count)
        values, bounds = (values,), (bounds,)
    given = tuple({**options, "chunk": chunk}.items())
    results, gradients = values_and_gradients(of, x, weight, bias, labels, where, d, options=given)
    for ours, value, bound in zip(results, values, bounds, strict=True):
        assert ours.dtype == wide
        assert_within(ours, value, bound)
    assert not any(np.any(exact(entropy) < 0) for entropy in results[1:])
    for ours, (value, bound), operand in zip(
        gradients, expected.gradients(*rows), (x, weight, bias), strict=True
    ):
        assert ours.dtype == operand.dtype
        assert_within(ours, value, bound)
    return results, gradients


@pytest.mark.parametrize(
    ("of", "options"), [(of, o) for of in FUNCTIONS for o in FUNCTIONS[of].options], ids=str
)
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_values_and_gradients(dtype, of, options):
    check(of, *operands(7, 48, 300, dtype, lead=(3,)), chunk=8, **options)


@pytest.mark.parametrize(
    ("dtypes", "dtype", "of"),
    pairwise(
        [
            ("bfloat16", "float32", "float32"),
            ("float32", "bfloat16", "bfloat16"),
            ("bfloat16", "bfloat16", "float32"),
            ("bfloat16",) * 3,
            ("float16", "bfloat16", "float16"),
        ],
        [None, "bfloat16", "float16", "float32"],
        ["mean", "log_prob"],
    ),
    ids=str,
)
def test_dtypes_of_products(dtypes, dtype, of):
    """Matmuls run in the operands' promoted dtype or in `dtype=`, whichever is narrower.

    Only the logits may have a wider dtype.
    """
    x, weight, bias, labels = operands(9, 32, 70, dtypes)
    options = {} if dtype is None else {"dtype": dtype}
    check(of, x, weight, bias, labels, chunk=4, **options)
    products = re.findall(
        r"stablehlo.dot_general.*\(tensor<[\dx]+(\w+)>, tensor<[\dx]+(\w+)>\) -> "
        r"tensor<[\dx]+(\w+)>",
        step_of(labels, of=of, chunk=4, **options).lower(x, weight).as_text(),
    )
    promoted = jnp.promote_types(*dtypes[:2])
    narrow = min(promoted, jnp.dtype(dtype or promoted), key=lambda d: d.itemsize)
    name = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[narrow.name]
    assert [p[:2] for p in products] == [(name, name)] * FUNCTIONS[of].matmuls
    assert of != "log_prob" or products[0][2] == "f32"


@each_pair("reduction dtype options", REDUCTIONS, ["bfloat16", "float32"], OPTIONS[0:3:2])
def test_weights(reduction, dtype, options):
    """Weights may have any sign and size. A weight of 0 excludes its row.

    The excluded row has no effect, even if it has NaN or an invalid label.
    """
    x, weight, bias, labels = operands(7, 16, 40, dtype)
    weights = jnp.array([0.3, 0, -2, 1, 1e-6, 4, 0])
    x, labels = x.at[1].set(jnp.nan).at[6, 2].set(jnp.inf), labels.at[1].set(-100)
    _, (dx, *_) = check(reduction, x, weight, bias, labels, weights, chunk=3, **options)
    assert not dx[weights == 0].any()
    x, labels = jnp.nan_to_num(x, posinf=0), jnp.abs(labels) % 40
    of_weights = jax.grad(lambda w: jnp.sum(linear_loss(x, weight, labels, where=w)))(weights)
    assert not of_weights.any()
    cancelling = jnp.array([1.0, -1, 2, -2, 0, 0, 0])
    loss, gradient = jax.value_and_grad(lambda x: linear_loss(x, weight, labels, where=cancelling))(
        x
    )
    assert not loss
    assert not gradient.any()


@each
@pytest.mark.usefixtures("x64")
def test_float64(of):
    check(of, *operands(9, 8, 30, "float64"), chunk=4, **FUNCTIONS[of].options[-1])
    check(of, *operands(9, 8, 30, ("float32", "float64", "float32")))


@pytest.mark.parametrize("chunk", [1, 5, 7, 21, 64, None])
def test_chunks(chunk):
    """The chunk size may be 1, a number that is not a divisor of the 21 rows, or more than 21."""
    arrays = operands(21, 16, 40)
    where = arrays[-1] % 3 > 0
    for of in ("mean", "none", "log_prob"):
        check(of, *arrays, where, chunk=chunk)


def test_chunks_by_default():
    """By default, a chunk has at most 1 GiB of logits and at most 2048 rows.

    All chunks have nearly equal sizes, which are multiples of 128 rows. A chunk may have more than
    2048 rows if its logits are not larger than the weight's gradient.
    """
    bf16, f32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    cases = [
        (None, 8192, (2048, 128256), bf16, 2048),
        (None, 8192, (4096, 128256), bf16, 4096),  # as large as the weight's gradient
        (None, 8192, (8192, 32000), bf16, 8192),
        (None, 8192, (2048, 256000), f32, 1024),
        (None, 8192, (2048, 2**20), f32, 512),
        (None, 8192, (2048, 32000), bf16, 2048),
        (None, 9000, (2048, 32000), bf16, 1920),  # five nearly equal chunks
        (None, 100, (2048, 32000), bf16, 100),
        (4096, 100, (2048, 32000), bf16, 100),
        (None, 0, (2048, 32000), bf16, 1),
    ]
    for chunk, rows, weight, dtype, expected in cases:
        assert chunks_of(chunk, rows, weight, (dtype, dtype)) == (expected, False)
    # All rows form one chunk if its logits and their gradient take no more memory than the
    # accumulator. This is the float32 array in which smaller chunks would add up the gradient of
    # the weight.
    for rows, weight, logits, expected in (
        (8192, (4096, 128256), bf16, 8192),
        (8320, (4096, 128256), bf16, 2816),
        (8192, (2048, 128256), bf16, 2048),
        (5376, (8192, 32000), f32, 5376),
    ):
        given, accumulator = (rows, weight, (logits, bf16)), 4 * weight[0] * weight[1]
        assert chunks_of(None, *given, accumulator=accumulator) == (expected, False)
        assert chunks_of(64, *given, accumulator=accumulator) == (64, False)
    # A call may store the gradient of all logits. It then needs no accumulator, but it must not use
    # more memory than a call with an accumulator. If it would, chunks of half as many rows are
    # tried, because their logits take less memory. If this is not enough, the gradient of all
    # logits is not stored.
    for rows, weight, expected in (
        (8192, (4096, 128256), (2048, True)),
        (8192, (2048, 128256), (1024, True)),
        (16384, (2048, 50257), (2048, False)),
    ):
        accumulator = 4 * weight[0] * weight[1]
        assert chunks_of(None, rows, weight, (f32, bf16), accumulator=accumulator) == expected
    # The logits are float32. The matmul that computes them has operands of 16 bits.
    assert chunks_of(None, 8192, (8192, 32000), (f32, bf16)) == (4096, False)
    check("mean", *operands(3000, 2, 3))


@each
def test_positions_that_do_not_count(of):
    """Masked positions have no effect, even if their x is NaN.

    The weight's gradient is a sum over all positions. A NaN of a masked position must not reach it.
    """
    x, weight, bias, labels = operands(7, 16, 40)
    labels = labels.at[1].set(-100).at[3].set(1000)
    x = x.at[1].set(jnp.nan).at[3, 2].set(jnp.inf)
    where = jnp.arange(7) % 2 == 0
    results, (dx, *_) = check(of, x, weight, bias, labels, where, chunk=3)
    for a in (dx, *(results if of in ("none", "log_prob") else ())):
        np.testing.assert_array_equal(a[1::2], 0)
    d = cotangents_of(of, labels)
    for a in jax.tree.leaves(
        values_and_gradients(of, x, weight, bias, labels, jnp.zeros(7, bool), d)
    ):
        np.testing.assert_array_equal(a, 0)


def test_masks_broadcast():
    x, weight, _, labels = operands(6, 16, 40, lead=(4,))
    where = jnp.arange(6)[None] < 4
    ours = linear_loss(x, weight, labels, where=where)
    assert_computes(ours, linear_loss, x[:, :4], weight, labels[:, :4])


@pytest.mark.parametrize("shape", [(1, 40), (7, 40), (7, 1)], ids=str)
def test_masks_of_classes(shape):
    """Masks of classes have the same effect as in `log_prob_and_entropy`, which takes logits.

    The last chunk is partial.
    """
    x, weight, bias, labels = operands(7, 16, 40)
    where = jnp.asarray(np.random.default_rng(3).random(shape) < 0.6)
    d = cotangents_of("log_prob", labels)

    def of_logits(x, weight, bias):
        return log_prob_and_entropy(
            x @ weight + bias, labels, where=jnp.broadcast_to(where, (7, 40))
        )

    def both(x, weight, bias):
        results, vjp = jax.vjp(of_logits, x, weight, bias)
        return results, vjp(d)

    def in_chunks(x, weight, bias):
        return values_and_gradients(
            "log_prob", x, weight, bias, labels, where, d, options=(("chunk", 3),)
        )

    assert_computes(in_chunks(x, weight, bias), both, x, weight, bias, like=in_chunks)


@pytest.mark.parametrize("of", ["none", "log_prob"])
def test_labels_outside(of):
    """A label out of range makes its loss or log-probability and the gradient of its row NaN.

    The weight's gradient is a sum over rows, so it is also NaN. The entropy and its gradient do not
    depend on the label.
    """
    x, weight, bias, labels = operands(5, 16, 40)
    labels = labels.at[1].set(40).at[3].set(-1)
    d = cotangents_of(of, labels)
    results, (dx, dw, _) = values_and_gradients(
        of, x, weight, bias, labels, None, d, options=(("chunk", 2),)
    )
    bad = np.isin(np.arange(5), [1, 3])
    np.testing.assert_array_equal(np.isnan(results[0]), bad)
    np.testing.assert_array_equal(np.isnan(dx), bad[:, None] & np.ones((5, 16), bool))
    assert np.isnan(dw).all()
    assert np.isnan(linear_loss(x, weight, labels))
    if of == "log_prob":
        entropy = functools.partial(values_and_gradients, of, x, weight, bias)
        of_entropy = (jnp.zeros(5), d[1])
        ours, valid = (
            entropy(labels, None, of_entropy, options=(("chunk", 2),))
            for labels in (labels, jnp.where(bad, 0, labels))
        )
        for a, b in zip(*map(jax.tree.leaves, ((ours[0][1], ours[1]), (valid[0][1], valid[1])))):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("of", ["mean", "none", "log_prob"])
def test_shapes(of):
    """Arrays may have no rows or only one class.

    x may have a single axis, and the bias is optional.
    """
    for lead, classes in (((0,), 5), ((2, 0), 5), ((), 5), ((3,), 1)):
        x, weight = jnp.ones((*lead, 4), jnp.bfloat16), jnp.ones((4, classes), jnp.bfloat16)
        labels = jnp.zeros(lead, jnp.int32)
        given = {} if of == "log_prob" else {"reduction": of}
        program = functools.partial(FUNCTIONS[of].function, labels=labels, chunk=2, **given)
        results = program(x, weight)
        assert {a.shape for a in jax.tree.leaves(results)} == {() if of == "mean" else lead}
        gradients = step_of(labels, of=of, chunk=2)(x, weight)
        assert [g.shape for g in gradients] == [x.shape, weight.shape]
        if 0 in lead or classes == 1:
            for a in (*jax.tree.leaves(results), *gradients):
                np.testing.assert_array_equal(a, 0)
        else:
            even = np.log(classes)
            expected = (-even, even) if of == "log_prob" else even
            assert_computes(results, program, x, weight, expected=expected)


def test_logits_are_never_rounded():
    """Logits that are computed from 16-bit operands are not rounded to 16 bits.

    So the results are within the error bounds for float32 logits. Results that are computed from
    rounded logits would exceed these bounds.
    """
    x, weight, _, labels = operands(64, 512, 4096, "bfloat16")
    weight = 4 * weight  # so that logits are as large as a trained model's
    log_prob, entropy = jax.jit(functools.partial(linear_log_prob_and_entropy, chunk=24))(
        x, weight, labels
    )
    zero = np.zeros(4096)
    of_exact = LOG_PROB.reference(x, weight, jnp.asarray(zero, jnp.float32), labels)
    for ours, wanted, bound in zip((log_prob, entropy), of_exact.results, of_exact.bounds):
        assert_within(ours, wanted, bound)
    rounded, _ = log_prob_and_entropy(x @ weight, labels)
    assert np.abs(exact(rounded) - of_exact.results[0]).max() > np.max(of_exact.bounds[0])


def test_small_gradients_in_float16():
    """Gradients are rounded only after all multiplications.

    They are multiplied by the loss scale and, if the loss is a mean, by 1 / (number of rows).
    """
    x, weight, _, labels = operands(64, 8, 2048, "float16")
    x, scale = x * 2**-6, 2.0**12

    def function(x, weight):
        return scale * linear_loss(x, weight, labels, chunk=16)

    def plain(x, weight, factors=1.0):
        logits = x.astype(jnp.float32) @ weight.astype(jnp.float32)
        of_labels = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return scale * jnp.mean(factors * (jax.nn.logsumexp(logits, -1) - of_labels))

    def gradients(f):
        return jax.jit(jax.grad(f, (0, 1)))

    assert_computes(
        gradients(function)(x, weight), gradients(plain), x, weight, like=gradients(function)
    )

    # A row whose cotangent is 0 does not make the gradients of the other rows less accurate.
    factors = jnp.where(jnp.arange(64) == 5, 0, 2.0**-4)

    def rows(x, weight):
        return jnp.mean(factors * linear_loss(x, weight, labels, reduction="none", chunk=16))

    def small(x, weight):
        return plain(x, weight, factors) * 2.0**-12

    # Small values are only lost when the returned array is rounded to float16, not before.
    ours = gradients(rows)
    assert_computes(ours(x, weight), gradients(small), x, weight, like=ours)


def check_gradients(function, arrays, d, **options):
    """Assert that every gradient of sum(d * losses) is within its bound."""
    expected = LOSS.reference(*arrays, **options)
    gradients = jax.jit(jax.grad(function, (0, 1, 2)))(*arrays[:3])
    for gradient, (value, bound) in zip(gradients, expected.gradients(np.float64(d)), strict=True):
        reference.assert_within(gradient, value, bound)


# Maps a dtype to the cotangents or weights of the rows. They have very different magnitudes, but
# the gradients of all rows are in the dtype's range.
SIZES = {
    "float32": [1e15, -1e-20, 1, 1e-25, 0, 3e7, -1e-3],
    "bfloat16": [1e15, -1e-20, 1, 1e-25, 0, 3e7, -1e-3],
    "float16": [2000, -1e-3, 1, 1e-3, 0, 100, -0.01],
}


@pytest.mark.parametrize("dtype", SIZES)
def test_rows_of_different_sizes(dtype):
    """The gradients of rows with small cotangents or small weights are accurate, too."""
    arrays = operands(7, 16, 64, dtype)
    d, labels = np.float32(SIZES[dtype]), arrays[-1]

    def of_cotangents(x, weight, bias):
        losses = linear_loss(x, weight, labels, bias=bias, reduction="none", chunk=3)
        return jnp.sum(d * losses)

    def of_weights(x, weight, bias):
        return linear_loss(x, weight, labels, bias=bias, where=d, reduction="sum", chunk=3)

    for function in (of_cotangents, of_weights):
        check_gradients(function, arrays, d)


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("of", ["sum", "log_prob"])
def test_a_scale_for_each_row(dtype, of):
    """A scale of a row that is a power of two has the effect of a row of x that is scaled by it."""
    x, weight, _, labels = operands(7, 16, 64, dtype)
    scales = jnp.asarray([1, 0.5, 2, 4, 0.25, 1, 2], jnp.float32)
    d = cotangents_of(of, labels)

    def gradients(x, weight, **options):
        options |= {"chunk": 3} | ({} if of == "log_prob" else {"reduction": of})
        function = FUNCTIONS[of].function
        results, vjp = jax.vjp(lambda *a: function(*a, labels, **options), x, weight)
        return results, vjp(d if of == "log_prob" else d[0])

    results, (dx, dweight) = gradients(x, weight, logits_scale=scales)
    of_row = scales[:, None].astype(dtype)
    expected, (scaled, other) = gradients(x * of_row, weight)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(dx, scaled * of_row)
    np.testing.assert_array_equal(dweight, other)


SCALES = {"float16": [2.0**-12, 1e-3, 64], "bfloat16": [1e-30, 1e30], "float32": [1e-30, 1e30]}


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(dtype, scale) for dtype in SCALES for scale in SCALES[dtype]]
)
def test_logits_scale_of_any_size(dtype, scale, reduction):
    """`logits_scale` may have any size.

    The gradient of the logits is proportional to this scale. With a large scale, it could overflow
    in float16. So the gradient of the logits is divided by a power of two near the scale. Later
    results in float32 are multiplied by this power.
    """
    # The logits have magnitudes around 1, and the loss is multiplied by 2**10.
    x, weight, bias, labels = operands(7, 16, 64, dtype)
    x, weight, bias = (a / max(1, scale**0.5) for a in (x, weight, bias / max(1, scale**0.5)))
    arrays, d = (x, weight, bias, labels), 2.0**10

    def function(x, weight, bias):
        options = {"logits_scale": scale, "reduction": reduction, "chunk": 3}
        return d * jnp.sum(linear_loss(x, weight, labels, bias=bias, **options))

    check_gradients(function, arrays, np.full(7, d), logits_scale=scale)


def step_of(labels, *, of="log_prob", **options):
    given = options | ({} if of == "log_prob" else {"reduction": of})

    def total(x, weight):
        results = FUNCTIONS[of].function(x, weight, labels, **given)
        if of != "log_prob":
            return jnp.sum(results)
        log_prob, entropy = results
        return jnp.sum(jnp.sin(log_prob) - entropy**2)

    return jax.jit(jax.grad(total, (0, 1)))


@pytest.mark.parametrize("rows", [4096, 5000])
def test_dlogits_of_all_rows(rows):
    """The loop of the backward pass computes only dlogits. One matmul for each gradient follows."""
    x, weight, bias, labels = operands(rows, 2048, 9, "bfloat16")
    where = labels != 3
    x = x.at[jnp.argmin(where)].set(jnp.nan)
    check("log_prob", x, weight, bias, labels, where)
    text = step_of(labels).lower(x, weight).as_text()
    assert text.count("stablehlo.dot_general") == 4
    assert re.search(rf"dot_general.*\(tensor<{rows}x2048xbf16>, tensor<{rows}x16xbf16>\)", text)
