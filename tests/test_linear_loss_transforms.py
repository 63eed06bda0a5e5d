"""Functions of linear logits: derivatives and transformations."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.test_util import check_grads
from linear_loss_cases import operands
from log_prob_cases import linear_mixture
from program_error import assert_computes
from test_linear_loss import ALL, OPTIONS
from test_loss_transforms import plain_mixture

import jaxnorm
from jaxnorm import linear_softmax_cross_entropy as linear_loss

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


def plain(
    x,
    weight,
    bias,
    labels,
    where,
    reduction,
    label_smoothing,
    z_loss,
    logits_scale,
    logit_softcap,
):
    logits = logit_softcap * jnp.tanh(logits_scale * (x @ weight + bias) / logit_softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    at_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    even = label_smoothing * logits.mean(-1)
    losses = lse - (1 - label_smoothing) * at_label - even + z_loss * lse**2
    losses = losses * where
    if reduction == "none":
        return losses
    return losses.sum() / (where.sum() if reduction == "mean" else 1)


def gradient(f, *arrays):
    return jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), ALL)(*arrays)


def tangents(arrays):
    return tuple(map(jnp.cos, arrays))


TRANSFORMS = {
    "jvp": lambda f, *a: jax.jvp(f, a, tangents(a)),
    "jvp of weight": lambda f, x, w, b: jax.jvp(lambda w: f(x, w, b), (w,), (jnp.cos(w),)),
    "linearize": lambda f, *a: jax.linearize(f, *a)[1](*tangents(a)),
    "forward over reverse": lambda f, *a: jax.jvp(functools.partial(gradient, f), a, tangents(a)),
    "reverse over reverse": lambda f, *a: jax.grad(
        lambda *a: sum(jnp.sum(g**2) for g in gradient(f, *a)), ALL
    )(*a),
    "reverse over forward": lambda f, *a: jax.grad(
        lambda *a: jnp.sum(jax.jvp(f, a, tangents(a))[1] ** 2), ALL
    )(*a),
    "remat": lambda f, *a: gradient(jax.checkpoint(f, policy=jaxnorm.save_policy), *a),
    "scan": lambda f, *a: jax.grad(
        lambda *a: jax.lax.scan(
            lambda c, r: (c + jnp.sum(f(r * a[0], *a[1:])), None), 0.0, jnp.arange(1.0, 4.0)
        )[0],
        ALL,
    )(*a),
}


CAPPED = {"logits_scale": 1.5, "logit_softcap": 2.0}


def log_prob(x, weight, labels, *, bias=None, where=None, reduction="none", **options):
    where = None if where is None else where != 0
    return linear_mixture(x, weight, labels, bias=bias, where=where, **options)


def plain_log_prob(x, weight, bias, labels, where, _, **options):
    return plain_mixture(x @ weight + bias, labels, **options) * (where != 0)


# Of a name: what is tested, the same in plain JAX, its options.
FUNCTIONS = {
    "loss": (linear_loss, plain, OPTIONS[2]),
    "log_prob": (log_prob, plain_log_prob, CAPPED),
}
each = pytest.mark.parametrize(
    ("name", "reduction"), [("loss", "mean"), ("loss", "none"), ("log_prob", "none")]
)


@pytest.mark.remat
@each
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.usefixtures("x64")
def test_transformations(transform, name, reduction):
    *arrays, labels = operands(5, 3, 7, "float64")
    weights = jnp.array([0.5, 2.0, 0.0, -1.0, 1.0])
    function, expected_of, options = FUNCTIONS[name]

    def ours(x, weight, bias):
        return function(
            x, weight, labels, bias=bias, where=weights, reduction=reduction, chunk=2, **options
        )

    def theirs(x, weight, bias):
        return expected_of(x, weight, bias, labels, weights, reduction, **options)

    found, expected = (functools.partial(TRANSFORMS[transform], f) for f in (ours, theirs))
    assert_computes(jax.jit(found)(*arrays), expected, *arrays, like=found)


@pytest.mark.usefixtures("x64")
def test_outside_jit():
    *arrays, labels = operands(3, 2, 4, "float64")
    check_grads(
        lambda x, w, b: linear_loss(x, w, labels, bias=b, chunk=2), arrays, order=1, modes=["rev"]
    )
    with jax.disable_jit():
        loss = linear_loss(arrays[0], arrays[1], labels, chunk=2)
    assert_computes(loss, linear_loss, arrays[0], arrays[1], labels)


@each
@pytest.mark.parametrize("in_axes", [(0, None, None, 0), (1, 0, None, None), (None, None, 0, 1)])
def test_vmap(in_axes, name, reduction):
    """Of rows, of weights, of masks; the gradient inside and outside."""
    x, weight, _, labels = operands(5, 8, 20)
    where = labels % 3 > 0
    arrays = [
        a if axis is None else jnp.stack([a, jnp.roll(a, 1, 0), jnp.flip(a)], axis)
        for a, axis in zip((x, weight, labels, where), in_axes)
    ]

    def function(x, weight, labels, where):
        of_name, *_ = FUNCTIONS[name]
        return of_name(x, weight, labels, where=where, reduction=reduction, chunk=2)

    def summed(*arrays):
        return jnp.sum(jnp.sin(function(*arrays)))

    gradients = jax.grad(summed, (0, 1))

    @jax.jit
    def both(*arrays):
        def outside(x, w):
            return jnp.sum(jax.vmap(summed, in_axes)(x, w, *arrays[2:]))

        batched = (jax.vmap(f, in_axes)(*arrays) for f in (function, gradients))
        return *batched, jax.grad(outside, (0, 1))(*arrays[:2])

    def one_by_one(*arrays):
        parts = [
            [a if axis is None else jnp.take(a, i, axis) for a, axis in zip(arrays, in_axes)]
            for i in range(3)
        ]
        inside = [jnp.stack(each) for each in zip(*(gradients(*p) for p in parts))]
        outside = [
            each.sum(0) if axis is None else jnp.moveaxis(each, 0, axis)
            for each, axis in zip(inside, in_axes)
        ]
        return jnp.stack([function(*p) for p in parts]), inside, outside

    assert_computes(both(*arrays), one_by_one, *arrays)
