"""The arrays that the derivative of rms_norm_rope saves, in particular the tables cos and sin."""

import functools
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from functions import scalar
from norms import normal, tables
from programs import equations

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


SHAPE = BATCH, LENGTH, HEADS, COLS = 4, 8, 2, 16
X, SCALE = normal(SHAPE, "float32", 0), normal((COLS,), "float32", 1, scale=0.3, shift=1.0)
COS, SIN = tables((LENGTH, 1, COLS // 2))
ALL = X, SCALE, COS, SIN


def test_scan_keeps_the_tables_once():
    """A scan over layers saves the shared tables once, not per layer."""
    layers = 3

    def residuals(x, scales, cos, sin):
        def layer(x, scale):
            return jnp.sin(jaxnorm.rms_norm_rope(x, scale, cos, sin)), None

        def scanned(x, scales):
            return jax.lax.scan(layer, x, scales)[0]

        return jax.tree.leaves(jax.vjp(scanned, x, scales)[1])

    kept = [a.shape for a in jax.eval_shape(residuals, X, jnp.stack([SCALE] * layers), COS, SIN)]
    assert kept.count((layers, *SHAPE)) == 2  # y and its cosine
    assert kept.count((1, *COS.shape)) == 2
    assert not [shape for shape in kept if shape[-1] == COLS // 2 and layers in shape]


WRAPPED = {
    "plain": lambda block: block,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "save_policy": functools.partial(jax.checkpoint, policy=jaxnorm.save_policy),
}


@pytest.mark.remat
@pytest.mark.parametrize(
    ("around", "save"),
    [*((around, "output") for around in WRAPPED), ("plain", "input"), ("jit", "input")],
)
def test_what_is_kept(around, save):
    """The derivative saves y (or x), one number per row, and no other array of x's size.

    Saved arguments are not counted. So the test computes x = 3 * u inside the function. The tables
    cos and sin are arguments, but copies of them are counted: a table that has fewer axes than x is
    reshaped, and the reshaped table is saved. It is much smaller than x.
    """
    block = WRAPPED[around](lambda u, *others: jaxnorm.rms_norm_rope(3 * u, *others, save=save))

    def kept(u, scale, cos, sin):
        y, vjp = jax.vjp(lambda u, scale: block(u, scale, cos, sin), u, scale)
        return y, jax.tree.leaves(vjp)

    jaxpr = jax.make_jaxpr(kept)(*ALL).jaxpr
    y, *residuals = jaxpr.outvars
    residuals = {id(v): v for v in residuals if isinstance(v, jax.extend.core.Var)}
    shapes = sorted(v.aval.shape for v in residuals.values() if v not in jaxpr.invars)
    if around == "remat":
        assert shapes == []  # All residuals are recomputed.
        return
    # With `jax.checkpoint`, the expanded tables are recomputed from the arguments.
    views = [] if around == "save_policy" else [(1, *COS.shape)] * 2
    assert shapes == sorted([SHAPE, SHAPE[:-1], *views])
    assert (id(y) in residuals) == (save == "output"), "y is kept as it is returned"
    of_arguments = {v.aval.shape for v in residuals.values() if v in jaxpr.invars}
    assert of_arguments == {SCALE.shape, *([] if views else [COS.shape])}


@pytest.mark.remat
def test_tables_are_not_broadcast():
    """Tables are not expanded to the rows of x, in either pass."""
    text = jax.jit(jax.grad(scalar(jaxnorm.rms_norm_rope), (0, 1))).lower(*ALL).as_text()
    arguments = re.search(r"func\.func public @main\((.*?)\) ->", text).group(1)
    assert arguments.count(f"tensor<{LENGTH}x1x{COLS // 2}xf32>") == 2
    jaxpr = jax.make_jaxpr(jax.grad(scalar(jaxnorm.rms_norm_rope), (0, 1)))(*ALL)
    made = {v.aval.shape for equation in equations(jaxpr) for v in equation.outvars}
    assert (BATCH, LENGTH, HEADS, COLS // 2) not in made
