"""Functions of logits and labels: derivatives, transformations and programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from log_prob_cases import mixed, mixture
from loss_cases import operands
from program_error import assert_computes
from test_loss import NAME, OPTIONS, value_and_gradient

import jaxnorm
from benchmarks import hlo
from jaxnorm import softmax_cross_entropy_with_integer_labels as cross_entropy

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


def capped(x, logits_scale=1.0, logit_softcap=None):
    x = logits_scale * x
    return x if logit_softcap is None else logit_softcap * jnp.tanh(x / logit_softcap)


def plain(x, labels, label_smoothing, z_loss, **options):
    x = capped(x, **options)
    lse = jax.nn.logsumexp(x, axis=-1)
    x_l = jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    return lse - (1 - label_smoothing) * x_l - label_smoothing * x.mean(-1) + z_loss * lse**2


def plain_mixture(x, labels, **options):
    log_p = jax.nn.log_softmax(capped(x, **options))
    log_prob = jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    return mixed(log_prob, -jnp.sum(jnp.exp(log_p) * log_p, -1))


CAPPED = {"logits_scale": 0.7, "logit_softcap": 3.0}
# Of a name and options: what is tested, and the same in plain JAX.
FUNCTIONS = {"loss": (cross_entropy, plain), "log_prob": (mixture, plain_mixture)}
EACH = [("loss", OPTIONS[3]), ("loss", OPTIONS[6]), ("log_prob", {}), ("log_prob", CAPPED)]
each = pytest.mark.parametrize("function", [cross_entropy, mixture], ids=FUNCTIONS)


@pytest.mark.parametrize(("name", "options"), [("loss", {}), *EACH], ids=str)
@pytest.mark.usefixtures("x64")
def test_derivatives_to_second_order(name, options):
    function, _ = FUNCTIONS[name]
    x, labels, _ = operands((3, 7), "float64", scale=1.0)
    check_grads(lambda x: function(x, labels, **options), (x,), order=2)
    where = jnp.arange(21).reshape(3, 7) % 3 > 0
    if not options:
        check_grads(lambda x: function(x, labels, where=where), (x,), order=2)


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


@pytest.mark.parametrize(("name", "options"), EACH, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.usefixtures("x64")
def test_transformations(transform, name, options):
    x, labels, d = operands((3, 5), "float64", scale=1.0)
    ours, theirs = (
        lambda x, d, f=f: TRANSFORMS[transform](lambda x: f(x, labels, **options), x, d)
        for f in FUNCTIONS[name]
    )
    assert_computes(jax.jit(ours)(x, d), theirs, x, d, like=ours)


@each
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (1, 1, None), (None, 0, 0)])
def test_vmap(in_axes, function):
    """Batched logits, labels and masks, with the gradient inside and outside."""
    sizes = {0: (4, 3), 1: (3, 4), None: (3,)}
    x = operands((*sizes[in_axes[0]], 7), "float32")[0]
    labels = operands((*sizes[in_axes[1]], 7), "float32")[1]
    where = operands((*sizes[in_axes[2]], 7), "float32", seed=2)[2] > 0
    whole = [jnp.moveaxis(a, i, 0) if i else a for a, i in zip((x, labels, where), in_axes)]
    whole = [a if i is not None else jnp.stack([a] * 4) for a, i in zip(whole, in_axes)]
    batched = jax.vmap(lambda x, t, w: function(x, t, where=w), in_axes)
    np.testing.assert_array_equal(
        batched(x, labels, where), function(whole[0], whole[1], where=whole[2])
    )
    inside = jax.vmap(jax.grad(lambda x, t, w: function(x, t, where=w).sum()), in_axes)

    def gradient(x):
        return jax.grad(lambda x: function(x, whole[1], where=whole[2]).sum())(x)

    def expected(x):
        of_each = gradient(x)
        return of_each.sum(0) if in_axes[0] is None else jnp.moveaxis(of_each, 0, in_axes[0])

    assert_computes(inside(x, labels, where), gradient, whole[0])
    outside = jax.grad(lambda x: batched(x, labels, where).sum())(x)
    assert_computes(outside, expected, whole[0])


@pytest.mark.remat
@pytest.mark.parametrize(
    ("function", "name", "count"),
    [(cross_entropy, NAME, 2), (mixture, "log_prob_and_entropy", 4)],
    ids=FUNCTIONS,
)
def test_remat_keeps_a_few_numbers_for_each_row(function, name, count):
    """Statistics, and results that the derivative of what follows takes."""
    x, labels, _ = operands((8, 64), "float32")
    w = jnp.ones((64, 200))

    def kept(policy):
        f = jax.checkpoint(lambda x, w: function(x @ w, labels).sum(), policy=policy)
        residuals = jax.vjp(f, x, w)[1]
        return [a.shape for a in jax.tree.leaves(residuals) if a.dtype == jnp.float32]

    assert kept(jaxnorm.save_policy).count((8,)) == count
    assert (8,) not in kept(None)
    assert (8, 200) not in kept(jaxnorm.save_policy)
    step = jax.make_jaxpr(
        jax.grad(jax.checkpoint(lambda x: function(x, labels).sum(), policy=jaxnorm.save_policy))
    )
    # The forward once: what it keeps is not computed again.
    assert str(step(x)).count(f"jaxnorm.{name}[") == 1


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_else_of_the_logits_size_of_an_entropy(dtype):
    """The forward writes no array of that size; of the backward, the gradient is one."""
    x, labels, d = operands((64, 4096), dtype)

    def step(x, labels, *cotangents):
        results, vjp = jax.vjp(lambda x: jaxnorm.log_prob_and_entropy(x, labels), x)
        return results, vjp(cotangents)

    forward = jax.jit(jaxnorm.log_prob_and_entropy).lower(x, labels).compile()
    assert forward.memory_analysis().temp_size_in_bytes < x.nbytes / 4
    both = jax.jit(step).lower(x, labels, d, d).compile()
    assert both.memory_analysis().temp_size_in_bytes < x.nbytes / 4
    kept = jax.tree.leaves(jax.vjp(lambda x: jaxnorm.log_prob_and_entropy(x, labels), x)[1])
    assert sum(a.nbytes for a in kept if a.size >= x.size) == x.nbytes
    assert sum(a.size for a in kept if a.dtype == jnp.float32 and a.ndim == 1) == 3 * 64


@pytest.mark.parametrize("name", [NAME, "log_prob_and_entropy"])
def test_implementation_for(name):
    plan = jaxnorm.implementation_for(name, (64, 4096), "bfloat16", platform="cpu")
    assert (plan.forward.name, plan.backward.name) == ("xla", "xla")
    with pytest.raises(ValueError, match="axis=4 is out of range for logits"):
        jaxnorm.implementation_for(name, (64, 4096), "bfloat16", axis=4)


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("cpu", "cuda", "tpu")], ids=str)
def test_export_with_symbolic_rows(function, platforms, dtype):
    """Of both passes in plain JAX: what kernels refuse, for which no size is known."""
    x, labels, d = operands((2, 3, 128), dtype)

    def step(x, labels, d):
        y, vjp = jax.vjp(lambda x: function(x, labels, implementation="xla"), x)
        return y, vjp(d)

    sizes = jax.export.symbolic_shape("b, s")
    exported = jax.export.export(jax.jit(step), platforms=platforms)(
        *(jax.ShapeDtypeStruct((*sizes, *a.shape[2:]), a.dtype) for a in (x, labels, d))
    )
    if jax.default_backend() in platforms:
        assert_computes(exported.call(x, labels, d), step, x, labels, d)


def test_export_with_symbolic_classes():
    """What is an even share of them is then no number."""

    def step(x, labels, d):
        loss, vjp = jax.vjp(lambda x: cross_entropy(x, labels, label_smoothing=0.1, z_loss=0.1), x)
        return loss, vjp(d)

    rows, classes = jax.export.symbolic_shape("rows, classes")
    x, labels, d = operands((3, 12), "float32")
    shapes = (rows, classes), (rows,), (rows,)
    exported = jax.export.export(jax.jit(step))(
        *(jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, (x, labels, d)))
    )
    assert_computes(exported.call(x, labels % 12, d), step, x, labels % 12, d)
