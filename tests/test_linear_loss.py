"""linear_softmax_cross_entropy: values and gradients against float64 numpy, and its programs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from linear_loss_cases import Linear, operands
from program_error import assert_computes
from reference import assert_within, exact

from jaxnorm import linear_softmax_cross_entropy as linear_loss
from jaxnorm.operations.linear_loss_call import chunk_rows

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

NAME = "linear_softmax_cross_entropy"
REDUCTIONS = ["mean", "sum", "none"]
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2}
OPTIONS = [{}, SMOOTHED, {**SMOOTHED, "logits_scale": 1.5, "logit_softcap": 2.0}]
ALL = (0, 1, 2)


@functools.partial(jax.jit, static_argnames=("options",))
def value_and_gradients(x, weight, bias, labels, where, d, options=()):
    def function(x, weight, bias):
        return linear_loss(x, weight, labels, bias=bias, where=where, **dict(options))

    loss, vjp = jax.vjp(function, x, weight, bias)
    return loss, vjp(d)


def check(x, weight, bias, labels, where=None, *, reduction, chunk=None, **options):
    """The loss and its gradients, each within its bound; they are returned."""
    weights = np.asarray(True if where is None else where, np.float64)
    weights = np.broadcast_to(weights, labels.shape)
    expected = Linear(x, weight, bias, labels, None if where is None else weights != 0, **options)
    count = (weights.sum() or 1) if reduction == "mean" else 1
    wide = expected.losses.dtype if "float64" in expected.dtypes[:2] else np.float32
    losses, bounds = expected.losses * weights, expected.losses_bound() * np.abs(weights)
    bounds = bounds + expected.u * np.abs(losses)
    if reduction == "none":
        d = jnp.cos(jnp.arange(labels.size).reshape(labels.shape)).astype(wide)
        loss, bound, rows = losses, bounds, exact(d) * weights
    else:
        d = jnp.asarray(1.7, wide)
        loss, bound = losses.sum() / count, bounds.sum() / abs(count)
        bound = bound + 4 * expected.u * np.abs(losses).sum() / abs(count)
        # The weights have both signs.
        bound = bound + 4 * expected.u * np.abs(weights).sum() * np.abs(loss / count)
        rows = float(d) / count * weights
    given = {**options, "reduction": reduction, "chunk": chunk}
    results = value_and_gradients(x, weight, bias, labels, where, d, options=tuple(given.items()))
    assert results[0].dtype == wide
    assert_within(results[0], loss, bound)
    for ours, (value, bound), operand in zip(
        results[1], expected.gradients(rows), (x, weight, bias), strict=True
    ):
        assert ours.dtype == operand.dtype
        assert_within(ours, value, bound)
    return results


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_values_and_gradients(dtype, reduction, options):
    check(*operands(7, 48, 300, dtype, lead=(3,)), reduction=reduction, chunk=8, **options)


@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16", "float32"),
        ("float16", "bfloat16", "float16"),
    ],
    ids=str,
)
def test_dtypes_promote_as_in_a_product(dtypes):
    check(*operands(9, 32, 70, dtypes), reduction="mean", chunk=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32", "float32"), ("bfloat16",) * 3], ids=str)
def test_the_dtype_of_products(dtypes, dtype):
    """A dtype that is wider than the operands' promoted one is the logits' only."""
    x, weight, bias, labels = operands(9, 32, 70, dtypes)
    check(x, weight, bias, labels, reduction="mean", chunk=4, dtype=dtype)
    step = jax.grad(lambda *a: linear_loss(*a, labels, dtype=dtype), (0, 1))
    products = re.findall(
        r"stablehlo.dot_general.*\(tensor<[\dx]+(\w+)>, tensor<[\dx]+(\w+)>\)",
        jax.jit(step).lower(x, weight).as_text(),
    )
    narrow = min(jnp.promote_types(*dtypes[:2]), jnp.dtype(dtype), key=lambda d: d.itemsize)
    name = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[narrow.name]
    assert products == [(name, name)] * 3


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2]], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights(reduction, dtype, options):
    """Weights have any sign and size; a weight of 0 excludes even NaN and invalid labels."""
    x, weight, bias, labels = operands(7, 16, 40, dtype)
    weights = jnp.array([0.3, 0, -2, 1, 1e-6, 4, 0])
    x, labels = x.at[1].set(jnp.nan).at[6, 2].set(jnp.inf), labels.at[1].set(-100)
    _, (dx, *_) = check(x, weight, bias, labels, weights, reduction=reduction, chunk=3, **options)
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


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.usefixtures("x64")
def test_float64(reduction):
    check(*operands(9, 8, 30, "float64"), reduction=reduction, chunk=4, **OPTIONS[1])
    check(*operands(9, 8, 30, ("float32", "float64", "float32")), reduction=reduction)


@pytest.mark.parametrize("chunk", [1, 5, 7, 21, 64, None])
def test_chunks(chunk):
    """Chunks may have any size: one that does not divide the rows, one row, or more than all."""
    arrays = operands(21, 16, 40)
    where = arrays[-1] % 3 > 0
    for reduction in ("mean", "none"):
        check(*arrays, where, reduction=reduction, chunk=chunk)


def test_chunks_by_default():
    """A chunk has 2048 rows or 1 GiB of logits. Chunks have equal sizes, in tiles of 128 rows."""
    bf16, f32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    cases = [
        (None, 8192, (2048, 128256), bf16, 2048),
        (None, 8192, (4096, 128256), bf16, 4096),  # as much as weight's gradient
        (None, 8192, (8192, 32000), bf16, 8192),
        (None, 8192, (2048, 256000), f32, 1024),
        (None, 8192, (2048, 2**20), f32, 512),
        (None, 8192, (2048, 32000), bf16, 2048),
        (None, 9000, (2048, 32000), bf16, 1920),  # five, not four and a rest
        (None, 100, (2048, 32000), bf16, 100),
        (4096, 100, (2048, 32000), bf16, 100),
        (None, 0, (2048, 32000), bf16, 1),
    ]
    for chunk, rows, weight, dtype, expected in cases:
        assert chunk_rows(chunk, rows, weight, dtype, dtype) == expected
    # Logits of float32, whose products are of 16 bits.
    assert chunk_rows(None, 8192, (8192, 32000), f32, bf16) == 4096
    check(*operands(3000, 2, 3), reduction="mean")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_positions_that_do_not_count(reduction):
    """Labels and x of these positions do not matter: no NaN of them reaches weight's gradient."""
    x, weight, bias, labels = operands(7, 16, 40)
    labels = labels.at[1].set(-100).at[3].set(1000)
    x = x.at[1].set(jnp.nan).at[3, 2].set(jnp.inf)
    where = jnp.arange(7) % 2 == 0
    _, (dx, *_) = check(x, weight, bias, labels, where, reduction=reduction, chunk=3)
    np.testing.assert_array_equal(dx[1::2], 0)
    loss, gradients = value_and_gradients(
        *(x, weight, bias, labels, jnp.zeros(7, bool)),
        jnp.ones((7,) if reduction == "none" else ()),
        options=(("reduction", reduction),),
    )
    for a in (loss, *gradients):
        np.testing.assert_array_equal(a, 0)


def test_masks_broadcast():
    x, weight, _, labels = operands(6, 16, 40, lead=(4,))
    where = jnp.arange(6)[None] < 4
    ours = linear_loss(x, weight, labels, where=where)
    assert_computes(ours, linear_loss, x[:, :4], weight, labels[:, :4])


def test_labels_outside():
    """The row's loss, its gradient of x, and weight's whole gradient are NaN."""
    x, weight, bias, labels = operands(5, 16, 40)
    labels = labels.at[1].set(40).at[3].set(-1)
    d = jnp.ones(5)
    loss, (dx, dw, _) = value_and_gradients(
        x, weight, bias, labels, None, d, options=(("reduction", "none"), ("chunk", 2))
    )
    bad = np.isin(np.arange(5), [1, 3])
    np.testing.assert_array_equal(np.isnan(loss), bad)
    np.testing.assert_array_equal(np.isnan(dx), bad[:, None] & np.ones((5, 16), bool))
    assert np.isnan(dw).all()
    assert np.isnan(linear_loss(x, weight, labels))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shapes(reduction):
    """Arrays without rows, with one class, with one axis of x, and without a bias."""
    for lead, classes in (((0,), 5), ((2, 0), 5), ((), 5), ((3,), 1)):
        x, weight = jnp.ones((*lead, 4), jnp.bfloat16), jnp.ones((4, classes), jnp.bfloat16)
        labels = jnp.zeros(lead, jnp.int32)

        def function(x, weight, labels=labels):
            return jnp.sum(linear_loss(x, weight, labels, reduction=reduction, chunk=2))

        loss = linear_loss(x, weight, labels, reduction=reduction)
        assert loss.shape == (lead if reduction == "none" else ())
        value, (dx, dw) = jax.value_and_grad(function, (0, 1))(x, weight)
        assert (dx.shape, dw.shape) == (x.shape, weight.shape)
        if 0 in lead or classes == 1:
            for a in (value, dx, dw):
                np.testing.assert_array_equal(a, 0)
        else:
            count = np.prod(lead) if reduction == "none" else 1
            assert_computes(value, function, x, weight, expected=np.log(5) * count)


def test_small_gradients_in_float16():
    """1 / n and the factor of loss scaling multiply float32 gradients."""
    x, weight, _, labels = operands(64, 8, 2048, "float16")
    x, scale = x * 2**-6, 2.0**12

    def function(x, weight):
        return scale * linear_loss(x, weight, labels, chunk=16)

    def plain(x, weight):
        logits = x.astype(jnp.float32) @ weight.astype(jnp.float32)
        return scale * jnp.mean(
            jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        )

    def gradients(f):
        return jax.jit(jax.grad(f, (0, 1)))

    assert_computes(
        gradients(function)(x, weight), gradients(plain), x, weight, like=gradients(function)
    )

    def rows(x, weight):
        return jnp.mean(linear_loss(x, weight, labels, reduction="none", chunk=16)) * 2.0**-4

    def small(x, weight):
        return plain(x, weight) * 2.0**-16

    # Values below the smallest float16 are lost in the returned array, not before.
    ours = gradients(rows)
    assert_computes(ours(x, weight), gradients(small), x, weight, like=ours)


def check_gradients(function, arrays, d, **options):
    """Check every gradient of sum(d * losses), with the bound of its row or sum over rows."""
    expected = Linear(*arrays, **options)
    gradients = jax.jit(jax.grad(function, (0, 1, 2)))(*arrays[:3])
    for gradient, (value, bound) in zip(gradients, expected.gradients(np.float64(d)), strict=True):
        reference.assert_within(gradient, value, bound)


# Sizes of rows' cotangents and weights: in float16 those that its gradients hold.
SIZES = {
    "float32": [1e15, -1e-20, 1, 1e-25, 0, 3e7, -1e-3],
    "bfloat16": [1e15, -1e-20, 1, 1e-25, 0, 3e7, -1e-3],
    "float16": [2000, -1e-3, 1, 1e-3, 0, 100, -0.01],
}


@pytest.mark.parametrize("dtype", SIZES)
def test_rows_of_different_sizes(dtype):
    """A row's cotangent, or weight, multiplies its part of dx in float32."""
    arrays = operands(7, 16, 64, dtype)
    d, labels = np.float32(SIZES[dtype]), arrays[-1]

    def of_cotangents(x, weight, bias):
        losses = linear_loss(x, weight, labels, bias=bias, reduction="none", chunk=3)
        return jnp.sum(d * losses)

    def of_weights(x, weight, bias):
        return linear_loss(x, weight, labels, bias=bias, where=d, reduction="sum", chunk=3)

    for function in (of_cotangents, of_weights):
        check_gradients(function, arrays, d)


SCALES = {"float16": [2.0**-12, 1e-3, 64], "bfloat16": [1e-30, 1e30], "float32": [1e-30, 1e30]}


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(dtype, scale) for dtype in SCALES for scale in SCALES[dtype]]
)
def test_logits_scale_of_any_size(dtype, scale, reduction):
    """It multiplies float32 products, not the gradient of logits, which float16 may not hold."""
    # Logits of size 1, and gradients of a loss that is scaled by 2**10.
    x, weight, bias, labels = operands(7, 16, 64, dtype)
    x, weight, bias = (a / max(1, scale**0.5) for a in (x, weight, bias / max(1, scale**0.5)))
    arrays, d = (x, weight, bias, labels), 2.0**10

    def function(x, weight, bias):
        options = {"logits_scale": scale, "reduction": reduction, "chunk": 3}
        return d * jnp.sum(linear_loss(x, weight, labels, bias=bias, **options))

    check_gradients(function, arrays, np.full(7, d), logits_scale=scale)
