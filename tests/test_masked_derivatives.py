"""A NaN or infinity in an unmasked entry does not reach masked entries, nor the other way round.

Cotangents and tangents of masked entries are set to 0. Without this, the sums over a row in a
softmax's derivative would spread a NaN to all entries of the row.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from test_softmax import data

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

SHAPE = (4, 32, 32)
LOWER = np.tril(np.ones(SHAPE[1:], bool))
MASK = np.random.default_rng(0).random(SHAPE) < 0.6
MASK[:, 3], MASK[:, :, 0] = False, True  # row 3 has one unmasked entry

# Row 5 of each matrix has one broken entry (NaN or infinite). No mask masks this entry. BROKEN is
# the index of these rows, and AT is the index of the entries.
BROKEN, AT = (slice(None), 5), (slice(None), 5, 0)
BIAS = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)

MASKS = {
    "where": ({"where": MASK}, MASK),
    "where of keys": ({"where": MASK[:1, 7:8]}, MASK[:1, 7:8]),
    "causal": ({"causal": True}, LOWER),
    "causal and where": ({"causal": True, "where": MASK}, MASK & LOWER),
    "bias of all": ({"where": MASK, "bias": BIAS}, MASK),
    "bias of columns": ({"causal": True, "bias": BIAS[:1, :1]}, LOWER),
    "bias of rows": ({"where": MASK, "bias": BIAS[:, :, :1]}, MASK),
}
FUNCTIONS = {"softmax": jaxnorm.softmax, "log_softmax": jaxnorm.log_softmax}
BAD = [np.nan, np.inf]

softmaxes = pytest.mark.parametrize(
    ("name", "kind", "bad", "dtype"),
    [
        (name, kind, BAD[i % 2], ("float32", "bfloat16")[i // 2 % 2])
        for i, (name, kind) in enumerate(itertools.product(FUNCTIONS, MASKS))
    ],
)


def with_bias(name, kind, dtype, **more):
    """Return three things: a function, its operands, and an array of booleans.

    The booleans are True for unmasked entries. `kind` is a key of `MASKS`, and `dtype` is the dtype
    of x. If the entry of `MASKS` has a bias, the operands are x and the bias. Otherwise, x is the
    only operand.
    """
    options, kept = MASKS[kind]
    bias = [jnp.asarray(options["bias"])] if "bias" in options else []
    rest = {k: v for k, v in options.items() if k != "bias"} | more

    def function(x, *bias):
        return FUNCTIONS[name](x, **rest, **({"bias": bias[0]} if bias else {}))

    return function, (data(SHAPE, dtype), *bias), np.broadcast_to(kept, SHAPE)


def assert_masked(values, clean, kept):
    """Assert that masked entries are 0, and that a broken entry affected no other row.

    `values` was computed from an array with one broken entry (NaN or infinite) in some rows.
    `clean` was computed from the same array without broken entries.
    """
    values, clean = (np.asarray(a, np.float32) for a in (values, clean))
    np.testing.assert_array_equal(values[~kept], 0)
    others = np.delete(np.arange(SHAPE[1]), BROKEN[1])
    np.testing.assert_array_equal(values[:, others], clean[:, others])


@refused.expect(refused.SOME_COLUMNS)
@softmaxes
def test_cotangents_of_a_softmax(name, kind, bad, dtype, implementation):
    function, operands, kept = with_bias(name, kind, dtype, implementation=implementation)
    d = data(SHAPE, dtype, seed=1)
    (dx, *dbias), (clean, *_), (same, *_) = (
        jax.jit(lambda d: jax.vjp(function, *operands)[1](d))(d)
        for d in (d.at[AT].set(bad), d, jnp.where(kept, d, bad))
    )
    assert_masked(dx, clean, kept)
    np.testing.assert_array_equal(same, clean)
    if dbias and dbias[0].shape[-1] > 1:
        # In the rows `BROKEN`, the cotangent is not finite. An entry of the bias may have a
        # non-finite gradient only if it is added to an unmasked entry of these rows.
        over = tuple(a for a, size in enumerate(dbias[0].shape) if size == 1)
        in_row = np.zeros(SHAPE, bool)
        in_row[BROKEN] = kept[BROKEN]
        assert np.isfinite(np.asarray(dbias[0])[~in_row.any(over, keepdims=True)]).all()


@softmaxes
@pytest.mark.parametrize("order", ["forward", "forward over reverse", "reverse over reverse"])
def test_tangents_and_second_derivatives_of_a_softmax(name, kind, bad, dtype, order):
    function, operands, kept = with_bias(name, kind, dtype)
    t = tuple(map(jnp.cos, operands))

    def derivative(a):
        """Return the tangent for the tangent `a` of x, or a second derivative for a cotangent."""
        if order == "forward":
            return jax.jvp(function, operands, (a, *t[1:]))[1]

        def gradient(*operands):
            return jax.vjp(function, *operands)[1](a)

        if order == "forward over reverse":
            return jax.jvp(gradient, operands, t)[1][0]
        return jax.vjp(gradient, *operands)[1](t)[0]

    a = t[0] if order == "forward" else data(SHAPE, dtype, seed=1)
    values, clean = (jax.jit(derivative)(v) for v in (a.at[AT].set(bad), a))
    assert_masked(values, clean, kept)


# ------------------------------------------------------------------------------------- losses

CLASSES = 256
ROWS = 8
CLASS_MASK = np.random.default_rng(2).random((ROWS, CLASSES)) < 0.6
CLASS_MASK[:, 0] = True
LABELS = np.arange(ROWS, dtype=np.int32) * 3
OF_CLASSES = CLASS_MASK | (np.arange(CLASSES) == LABELS[:, None])  # labels are never masked
POSITIONS = np.arange(ROWS) % 2 == 0
OF_POSITIONS = np.broadcast_to(POSITIONS[:, None], CLASS_MASK.shape)

cross_entropy = jaxnorm.softmax_cross_entropy_with_integer_labels
LOSSES = {
    "cross_entropy": functools.partial(cross_entropy, z_loss=0.1),
    "capped cross_entropy": functools.partial(cross_entropy, logit_softcap=2.0),
    "log_prob_and_entropy": jaxnorm.log_prob_and_entropy,
}
losses = pytest.mark.parametrize("name", LOSSES)
where_of_losses = pytest.mark.parametrize(
    ("where", "kept"),
    [(CLASS_MASK, OF_CLASSES), (POSITIONS, OF_POSITIONS)],
    ids=["classes", "positions"],
)


@refused.expect(refused.CLASSES)
@losses
@where_of_losses
@pytest.mark.parametrize("bad", BAD)
def test_cotangents_of_a_loss(name, where, kept, bad, implementation):
    """If a loss's cotangents are NaN or infinite, the gradients of masked classes are still 0.

    The gradients of all classes of a masked position are 0, too.
    """
    x = data((ROWS, CLASSES), "float32")
    given = {"where": where, "implementation": implementation}
    y, pullback = jax.vjp(lambda x: LOSSES[name](x, LABELS, **given), x)
    (dx,) = pullback(jax.tree.map(lambda a: jnp.full_like(a, bad), y))
    np.testing.assert_array_equal(np.asarray(dx)[~kept], 0)


@losses
@where_of_losses
@pytest.mark.parametrize("bad", BAD)
def test_tangents_of_a_loss(name, where, kept, bad):
    """Tangents of masked elements have no effect, even if they are NaN or infinite."""
    x = data((ROWS, CLASSES), "float32")

    def function(x):
        return LOSSES[name](x, LABELS, where=where)

    t = jnp.cos(x)
    along, clean = (
        jax.tree.leaves(jax.jvp(function, (x,), (jnp.where(kept, t, other),))[1])
        for other in (bad, 0)
    )
    for ours, theirs in zip(along, clean, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()


REDUCTIONS = ["mean", "sum", "none"]
LINEAR = {
    **{
        reduction: functools.partial(jaxnorm.linear_softmax_cross_entropy, reduction=reduction)
        for reduction in REDUCTIONS
    },
    "log_prob": jaxnorm.linear_log_prob_and_entropy,
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("name", "weighs"),
    [*itertools.product(LINEAR, [False]), *itertools.product(REDUCTIONS, [True])],
)
def test_rows_that_a_linear_loss_leaves_out(name, bad, weighs):
    """Masked rows of a linear loss have no effect, whatever their x and (co)tangents are."""
    where = jnp.asarray(POSITIONS * 0.5, jnp.float32) if weighs else POSITIONS
    w = data((16, CLASSES), "float32", scale=0.1)
    x, counts = data((ROWS, 16), "float32", seed=1), POSITIONS[:, None]

    function = functools.partial(LINEAR[name], labels=LABELS, where=where, chunk=3)

    def run(other):
        x_, tx = (jnp.where(counts, a, other) for a in (x, jnp.cos(x)))
        y, along = jax.jvp(function, (x_, w), (tx, jnp.sin(w)))
        _, pullback = jax.vjp(function, x_, w)
        d = jax.tree.map(lambda a: jnp.where(POSITIONS, 1, other) if a.ndim else a, y)
        return jax.tree.leaves((y, along, pullback(jax.tree.map(jnp.float32, d))))

    for ours, theirs in zip(run(bad), run(0), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_array_equal(ours, theirs)
