"""softmax_cross_entropy_with_integer_labels: derivatives, transformations and programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from loss_cases import operands
from test_loss import NAME, OPTIONS, value_and_gradient

import jaxnorm
from benchmarks import hlo
from jaxnorm import softmax_cross_entropy_with_integer_labels as cross_entropy

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


def plain(x, labels, label_smoothing, z_loss, logits_scale=1.0, logit_softcap=None):
    x = logits_scale * x
    if logit_softcap is not None:
        x = logit_softcap * jnp.tanh(x / logit_softcap)
    lse = jax.nn.logsumexp(x, axis=-1)
    x_l = jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    return lse - (1 - label_smoothing) * x_l - label_smoothing * x.mean(-1) + z_loss * lse**2


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3], OPTIONS[6]], ids=str)
@pytest.mark.usefixtures("x64")
def test_derivatives_to_second_order(options):
    x, labels, _ = operands((3, 7), "float64", scale=1.0)
    check_grads(lambda x: cross_entropy(x, labels, **options), (x,), order=2)
    where = jnp.arange(21).reshape(3, 7) % 3 > 0
    if not options:
        check_grads(lambda x: cross_entropy(x, labels, where=where), (x,), order=2)


TRANSFORMS = {
    "jvp": lambda f, x, d: jax.jvp(f, (x,), (jnp.cos(x),)),
    "linearize": lambda f, x, d: jax.linearize(f, x)[1](jnp.cos(x)),
    "hessian": lambda f, x, d: jax.hessian(lambda x: jnp.sum(f(x) * d))(x),
    "forward over reverse": lambda f, x, d: jax.jvp(
        jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))), (x,), (jnp.cos(x),)
    ),
    "reverse over reverse": lambda f, x, d: jax.grad(
        lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x) ** 2)
    )(x),
    "remat": lambda f, x, d: jax.vjp(jax.checkpoint(f, policy=jaxnorm.save_policy), x)[1](d),
    "scan": lambda f, x, d: jax.grad(
        lambda x: jax.lax.scan(
            lambda c, r: (c + jnp.sum(f(r * x)), None), 0.0, jnp.ones((2, 3, 1))
        )[0]
    )(x),
}


@pytest.mark.parametrize("options", [OPTIONS[3], OPTIONS[6]], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.usefixtures("x64")
def test_transformations(transform, options):
    x, labels, d = operands((3, 5), "float64", scale=1.0)
    ours, theirs = (
        jax.jit(lambda x, d, f=f: TRANSFORMS[transform](lambda x: f(x, labels, **options), x, d))
        for f in (cross_entropy, plain)
    )
    for a, b in zip(jax.tree.leaves(ours(x, d)), jax.tree.leaves(theirs(x, d)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (1, 1, None), (None, 0, 0)])
def test_vmap(in_axes):
    """Batched logits, labels and masks, with the gradient inside and outside."""
    sizes = {0: (4, 3), 1: (3, 4), None: (3,)}
    x = operands((*sizes[in_axes[0]], 7), "float32")[0]
    labels = operands((*sizes[in_axes[1]], 7), "float32")[1]
    where = operands((*sizes[in_axes[2]], 7), "float32", seed=2)[2] > 0
    whole = [jnp.moveaxis(a, i, 0) if i else a for a, i in zip((x, labels, where), in_axes)]
    whole = [a if i is not None else jnp.stack([a] * 4) for a, i in zip(whole, in_axes)]
    batched = jax.vmap(lambda x, t, w: cross_entropy(x, t, where=w), in_axes)
    np.testing.assert_array_equal(
        batched(x, labels, where), cross_entropy(whole[0], whole[1], where=whole[2])
    )
    inside = jax.vmap(jax.grad(lambda x, t, w: cross_entropy(x, t, where=w).sum()), in_axes)
    gradient = jax.grad(lambda x: cross_entropy(x, whole[1], where=whole[2]).sum())(whole[0])
    np.testing.assert_allclose(inside(x, labels, where), gradient, rtol=1e-6, atol=1e-7)
    outside = jax.grad(lambda x: batched(x, labels, where).sum())(x)
    expected = gradient.sum(0) if in_axes[0] is None else jnp.moveaxis(gradient, 0, in_axes[0])
    np.testing.assert_allclose(outside, expected, rtol=1e-6, atol=1e-7)


def test_remat_keeps_two_numbers_for_each_row():
    x, labels, _ = operands((8, 64), "float32")
    w = jnp.ones((64, 200))

    def kept(policy):
        f = jax.checkpoint(lambda x, w: cross_entropy(x @ w, labels).sum(), policy=policy)
        residuals = jax.vjp(f, x, w)[1]
        return [a.shape for a in jax.tree.leaves(residuals) if a.dtype == jnp.float32]

    assert kept(jaxnorm.save_policy).count((8,)) == 2
    assert (8,) not in kept(None)
    assert (8, 200) not in kept(jaxnorm.save_policy)
    step = jax.make_jaxpr(
        jax.grad(
            jax.checkpoint(lambda x: cross_entropy(x, labels).sum(), policy=jaxnorm.save_policy)
        )
    )
    # The forward once: what it keeps is not computed again.
    assert str(step(x)).count(f"jaxnorm.{NAME}[") == 1


# ------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=str)
def test_nothing_else_of_the_logits_size(dtype, options):
    """The compiled step makes the gradient, and no other array as large beside it.

    On a CPU float32's exponentials are made once, in the gradient's memory.
    """
    x, labels, d = operands((64, 4096), dtype)
    step = value_and_gradient.lower(x, labels, d, options=tuple(options.items())).compile()
    assert step.memory_analysis().temp_size_in_bytes < x.nbytes / 4
    shared = dtype == "float32" and jax.default_backend() == "cpu"
    made = hlo.made(step.as_text(), x.size)
    assert set(made) == {"fusion"} if shared else made == ["fusion"]


def test_implementation_for():
    plan = jaxnorm.implementation_for(NAME, (64, 4096), "bfloat16", platform="cpu")
    assert (plan.forward.name, plan.backward.name) == ("xla", "xla")
    with pytest.raises(ValueError, match="axis=4 is out of range for logits"):
        jaxnorm.implementation_for(NAME, (64, 4096), "bfloat16", axis=4)
