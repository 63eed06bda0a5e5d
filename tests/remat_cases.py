"""Layers and checks that the tests of `auto_remat` and `remat_plan` share."""

import collections
import functools
import html

import jax
import jax.numpy as jnp
import pytest
from program_error import assert_same_results
from programs import primitives

from jaxnorm import auto_remat

#: Assert that two programs have the same results, up to the rounding of the second one.
assert_same = functools.partial(assert_same_results, as_accurate=True)
LAYERS, ROWS, COLS = 3, 8, 16
KEYS = jax.random.split(jax.random.key(0), 2)
W = jax.random.normal(KEYS[0], (LAYERS, COLS, COLS)) / 4
X = jax.random.normal(KEYS[1], (ROWS, COLS))


def layer(x, w):
    h = jax.nn.silu(x @ w)
    return x + jnp.tanh(h) * h


def scanned(w, x, layer=layer):
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)


def unrolled(w, x, layer=layer):
    for i in range(len(w)):
        x = layer(x, w[i])
    return jnp.sum(x**2)


#: The mark of tests of layers in a scan and of unrolled layers.
each = pytest.mark.parametrize("f", [scanned, unrolled])


def counts(f, *args):
    """Count the primitives of a traced program, including those of inner programs."""
    return collections.Counter(primitives(jax.make_jaxpr(f)(*args)))


def assert_same_gradients(f, *args, argnums=(0, 1), remat=auto_remat):
    """Assert that values and gradients are those of f, compiled and not compiled."""
    ours, plain = (jax.value_and_grad(g, argnums) for g in (remat(f), f))
    for run in (ours, jax.jit(ours)):
        assert_same(lambda run=run: run(*args), lambda: plain(*args))


def assert_fits(plan):
    """Assert that a plan is printed in 45 lines of 100 characters, also in notebooks."""
    lines = str(plan).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    shown = plan._repr_html_()
    assert shown.startswith("<pre>")
    assert html.unescape(shown.removeprefix("<pre>").removesuffix("</pre>")) == str(plan)
