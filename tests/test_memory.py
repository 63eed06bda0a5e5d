"""Saving the output frees one activation per norm, measured on compiled training steps."""

import functools

import hlo
import jax
import jax.numpy as jnp
import pytest
from functions import divergences
from loss_cases import operands as logits_and_labels
from test_kl_divergence import each_direction
from test_loss import OPTIONS, value_and_gradient

import jaxnorm
from jaxnorm import kl_divergence

pytestmark = pytest.mark.oldest_jax

LAYERS, TOKENS, WIDTH = 12, 512, 256


def stack(norm, x, params):
    """Scan over layers, each of which computes ``x + relu(norm(x) @ w1) @ w2``."""

    def block(x, p):
        scale, bias, w1, w2 = p
        return x + jax.nn.relu(norm(x, scale, bias) @ w1) @ w2, None

    return jnp.sum(jax.lax.scan(block, x, params)[0].astype(jnp.float32) ** 2)


def operands(dtype):
    shapes = [(WIDTH,), (WIDTH,), (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)]
    params = tuple(jax.ShapeDtypeStruct((LAYERS, *shape), dtype) for shape in shapes)
    return jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype), params


def temp_bytes(norm, dtype):
    x, params = operands(dtype)
    step = jax.jit(jax.grad(functools.partial(stack, norm), argnums=1))
    return step.lower(x, params).compile().memory_analysis().temp_size_in_bytes


def layer_norm(save):
    return functools.partial(jaxnorm.layer_norm, save=save)


def rms_norm(save):
    return lambda x, scale, bias: jaxnorm.rms_norm(x, scale, save=save)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.9), ("bfloat16", 0.8)])
def test_scan_saves_one_activation_per_layer(norm, dtype, share):
    activation = TOKENS * WIDTH * jnp.dtype(dtype).itemsize
    saved = temp_bytes(norm("input"), dtype) - temp_bytes(norm("output"), dtype)
    assert saved >= share * activation * LAYERS


def residual_bytes(function, *args):
    """Return the number of bytes of all arrays that the backward needs, except inputs."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(function, *a)[1]))(*args).jaxpr
    inputs = {id(v) for v in (*jaxpr.invars, *jaxpr.constvars)}
    unique = {id(v): v.aval for v in jaxpr.outvars if id(v) not in inputs}
    return sum(a.size * a.dtype.itemsize for a in unique.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_residuals_are_the_output_itself(dtype):
    """A norm before a matmul saves only rstd in addition to y, which the matmul saves anyway."""
    x, w = jnp.ones((TOKENS, WIDTH), dtype), jnp.ones((WIDTH, WIDTH), dtype)
    scale = jnp.ones(WIDTH, dtype)
    y_bytes, rstd_bytes = x.nbytes, 4 * TOKENS

    def kept(save):
        # The norm's input x + 1 is computed inside the function, because `residual_bytes` does not
        # count arguments.
        return residual_bytes(
            lambda x, s, w: jaxnorm.layer_norm(x + 1, s, save=save) @ w, x, scale, w
        )

    assert kept("output") == y_bytes + rstd_bytes
    assert kept("input") == 2 * y_bytes + 2 * rstd_bytes


@pytest.mark.parametrize("custom_jvp", [False, True])
def test_softmax_keeps_one_array_where_jax_keeps_two(custom_jvp):
    """jaxnorm.softmax saves one array, and jax.nn.softmax saves two.

    With `jax_softmax_custom_jvp`, which is off by default, jax.nn.softmax also saves only one.
    """
    assert jax.config.jax_softmax_custom_jvp is False
    x, v = jnp.ones((64, 64)), jnp.ones((64, 64))
    with jax.softmax_custom_jvp(custom_jvp):
        ours, theirs = (
            residual_bytes(lambda x, v, f=f: f(x + x) @ v, x, v)
            for f in (jaxnorm.softmax, jax.nn.softmax)
        )
    assert ours == x.nbytes
    if custom_jvp:
        assert theirs == x.nbytes
    else:
        assert theirs > 1.9 * x.nbytes


def test_masked_softmax_keeps_the_mask_unbroadcast():
    x, mask = jnp.ones((4, 64, 64)), jnp.tril(jnp.ones((64, 64), bool))
    kept = residual_bytes(lambda x: jaxnorm.softmax(x + x, where=mask ^ False), x)
    assert kept <= x.nbytes + mask.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=str)
def test_nothing_else_of_the_logits_size(dtype, options):
    """Besides the logits, a compiled step stores one array of their size, the gradient.

    On a CPU, float32 exponentials are also stored. The gradient later overwrites them.
    """
    x, labels, d = logits_and_labels((64, 4096), dtype)
    step = value_and_gradient.lower(x, labels, d, options=tuple(options.items())).compile()
    assert step.memory_analysis().temp_size_in_bytes < x.nbytes / 4
    shared = dtype == "float32" and jax.default_backend() == "cpu"
    made = hlo.made(step.as_text(), x.size)
    assert set(made) == {"fusion"} if shared else made == ["fusion"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_else_of_the_logits_size_of_an_entropy(dtype):
    """The forward of an entropy stores no array of the logits' size.

    The backward stores only one such array, the gradient.
    """
    x, labels, d = logits_and_labels((64, 4096), dtype)

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


on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU's program")


@on_a_cpu
@pytest.mark.parametrize(("function", "arrays"), [("softmax", 1), ("log_softmax", 0)])
def test_temporaries_of_a_16_bit_softmax_on_a_cpu(function, arrays):
    """On a CPU, the gradient of a softmax stores neither y nor its cotangent in float32.

    The program allocates at most one float32 array of the size of x: the exponentials of the
    forward pass of `softmax`.
    """
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)

    def step(x, cotangent):
        y, vjp = jax.vjp(getattr(jaxnorm, function), x)
        return y, vjp(cotangent)

    compiled = jax.jit(step).lower(x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes / (4 * x.size) < arrays + 0.05


@on_a_cpu
@each_direction
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_temporaries_of_a_divergence_on_a_cpu(dtype, reverse):
    """On a CPU, a divergence allocates at most three float32 arrays of the logits' size.

    They are the exponentials of both logits, and the terms of one sum. The program that also
    computes the gradient allocates less memory than the same program in plain JAX. The difference
    is at least 0.9 times the size of such an array.
    """
    x = jax.ShapeDtypeStruct((64, 4096), dtype)

    def temporaries(function, *, differentiated):
        def step(x, teacher):
            y, vjp = jax.vjp(lambda x: function(x, teacher, reverse=reverse), x)
            return y, vjp(jnp.ones_like(y)) if differentiated else ()

        compiled = jax.jit(step).lower(x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * x.size)

    def plain(x, teacher, *, reverse):
        return divergences(*(a.astype(jnp.float32) for a in (x, teacher)), reverse=reverse)

    forward, both = (temporaries(kl_divergence, differentiated=d) for d in (False, True))
    assert forward < 3.1
    assert both < (2.1 if dtype == "float32" else 3.1)
    assert both <= temporaries(plain, differentiated=True) - 0.9
