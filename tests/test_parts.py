"""Operands and results that are slices of other arrays: each function's values and gradients.

The cases are those of the self-check, with its references and bounds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import parts
import pytest
import refused
from functions import floats_in

import jaxnorm
from jaxnorm.tools import selfcheck


def with_fused_sizes(case, **options):
    """Return the case with sizes of 1024 instead of 1000.

    The length of each array is then a multiple of 256 bytes. XLA passes a slice to a kernel
    directly, without a copy, only in this case.
    """
    shapes = {
        name: tuple(1024 if size == 1000 else size for size in shape)
        for name, shape in case.shapes.items()
    }
    return dataclasses.replace(case, shapes=shapes, options={**case.options, **options})


# Functions without kernels have no `implementation=`.
XLA_ONLY = ("gated_linear", "activation_linear")
CASES = [with_fused_sizes(c) for c in selfcheck.CASES if c.function not in XLA_ONLY]


@refused.expect("its matmul supports only bfloat16 and float16", refused.NO_KERNEL)
@pytest.mark.parametrize("dtype", selfcheck.DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, dtype, implementation):
    """Values and gradients are correct if all operands, cotangents and results are slices."""
    if case.function == "rms_norm_linear" and implementation == "triton":
        pytest.skip("a kernel of Mosaic's alone")
    outcome = selfcheck.check(
        with_fused_sizes(case, implementation=implementation), dtype, parts.of_parts, parts.read
    )
    assert outcome.is_right, outcome


# ------------------------------------------------------------------------- slices in typical
# programs


def gradients(function):
    """Return a function that computes gradients of all floating-point arguments."""

    def total(*operands):
        results = jax.tree.leaves(function(*operands))
        return sum(jnp.sum(jnp.sin(a.astype("float32"))) for a in results)

    return lambda *operands: jax.grad(total, floats_in(operands))(*operands)


def normal(*sizes: int, dtype="bfloat16", seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), sizes, jnp.float32).astype(dtype)


def tokens(*sizes: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), sizes, 0, 4096)


def ones(*sizes: int, dtype="float32") -> jax.Array:
    return 1 + normal(*sizes, dtype=dtype, seed=2) / 8


rms_norm = functools.partial(jaxnorm.rms_norm, implementation="mosaic")
loss = jaxnorm.softmax_cross_entropy_with_integer_labels


def windows(x, scale):
    """In a loop, replace 256 rows of x by their norms. Each step begins one row later."""

    def step(i, x):
        window = jax.lax.dynamic_slice(x, (i, 0), (256, 1000))
        return jax.lax.dynamic_update_slice(x, rms_norm(window, scale), (i, 0))

    return jax.lax.fori_loop(0, 3, step, x)


def layers(x, scales, unroll=1):
    """Apply one norm per layer.

    `scales` is a flat array. Without its first element, it is a stack of scales, one for each
    layer. So each scale is a slice of an array, and does not start at a multiple of 16 bytes.
    """
    stack = scales[1:].reshape(-1, 1024)
    return jax.lax.scan(lambda x, scale: (x + rms_norm(x, scale), None), x, stack, unroll=unroll)[0]


@jax.custom_vjp
def with_own_rule(x, scale):
    return rms_norm(x, scale)


with_own_rule.defvjp(
    lambda x, scale: (rms_norm(x, scale), (x, scale)),
    lambda saved, dy: jax.vjp(rms_norm, *saved)[1](dy),
)

checkpointed = jax.checkpoint(rms_norm)

#: Maps a name to two functions. The first function passes slices of arrays to jaxnorm. The second
#: function creates the arguments of the first. Most of the slices start at an address that is not
#: aligned as kernels require. So the compiled program must copy them before it runs a kernel.
PATTERNS = {
    "labels tokens[1:]": (
        lambda x, t: loss(x, t[1:]),
        lambda: (normal(512, 4096), tokens(513)),
    ),
    "linear loss of tokens[1:]": (
        lambda x, w, t: jaxnorm.linear_softmax_cross_entropy(x, w, t[1:]),
        lambda: (normal(512, 256), normal(256, 4096), tokens(513)),
    ),
    "x[1:]": (lambda x, g: rms_norm(x[1:], g), lambda: (normal(8193, 1000), ones(1000))),
    "softmax of x[1:]": (
        lambda x: jaxnorm.softmax(x[1:]),
        lambda: (normal(4097, 4095, dtype="float32"),),
    ),
    "scale[1:]": (lambda x, g: rms_norm(x, g[1:]), lambda: (normal(512, 1024), ones(1025))),
    "scales of groups": (
        lambda x, s: jaxnorm.layer_norm(x, s[1:], s[:-1]),
        lambda: (normal(32, 256, 1000), ones(33, 1, 1000)),
    ),
    "tables[1:]": (
        lambda x, c: jaxnorm.rms_norm_rope(x, None, c[1:], c[1:], implementation="mosaic"),
        lambda: (normal(4, 1024, 8, 64), normal(1025, 1, 20, dtype="float32")),
    ),
    "flat slice": (
        lambda x, g: rms_norm(x[1:].reshape(4096, 1024), g),
        lambda: (normal(4096 * 1024 + 1), ones(1024)),
    ),
    "out.at[1:].set": (
        lambda out, x, g: out.at[1:].set(rms_norm(x, g)),
        lambda: (normal(8193, 1000), normal(8192, 1000), ones(1000)),
    ),
    "concatenated": (
        lambda row, x, g: jnp.concatenate([row, rms_norm(x, g)]),
        lambda: (normal(1, 1000), normal(8192, 1000), ones(1000)),
    ),
    "windows in a loop": (windows, lambda: (normal(300, 1000), ones(1000))),
    "slices in a loop": (
        lambda x, g: jax.lax.scan(lambda c, v: (c, rms_norm(v[1:], g)), 0.0, x)[1],
        lambda: (normal(4, 257, 1000), ones(1000)),
    ),
    "a stack in the middle of an array": (layers, lambda: (normal(256, 1024), ones(5121))),
    "custom_vjp of aligned and unaligned slices": (
        lambda x, g: with_own_rule(with_own_rule(x, g[:1024]), g[1025:]),
        lambda: (normal(256, 1024), ones(2049)),
    ),
    "checkpoint of aligned and unaligned slices": (
        lambda x, g: checkpointed(checkpointed(x, g[:1024]), g[1025:]),
        lambda: (normal(256, 1024), ones(2049)),
    ),
    "jit in jit": (
        lambda x, g: jax.jit(lambda x, g: rms_norm(x[1], g[1]))(
            x[1:].reshape(2, 256, 1024), g[1:].reshape(2, 1024)
        ),
        lambda: (normal(512 * 1024 + 1), ones(2049)),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    """Results are bitwise the same with and without `jax.jit`. Without it, each slice is a copy.

    The gradients need only be finite here, because the tests above check their values.
    """
    function, make = PATTERNS[name]
    operands = make()
    ours, expected = jax.jit(function)(*operands), function(*operands)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    for gradient in jax.jit(gradients(function))(*operands):
        assert jnp.isfinite(gradient).all()
