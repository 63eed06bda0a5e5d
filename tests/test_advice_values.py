"""The values with which memory_report verifies its advice: those of JAX, for one position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnorm
from jaxnorm.tools import kept_arrays, values

pytestmark = pytest.mark.oldest_jax

ROWS, CLASSES = 4, 6
LABELS = np.full(ROWS, 2)


def of_rows(function, z):
    """Return the rows of `values.positions` and the value of a function of logits."""
    traced = jax.make_jaxpr(lambda z: (z, function(z)))(jnp.asarray(z, "float32"))
    program = kept_arrays.Program(traced, 1, [True])
    (logits,) = program.outputs
    with np.errstate(all="ignore"):
        rows = values.positions(program, [values.Head(logits, 1)])
    (result,) = program._returned[0].operands
    return rows, logits, result


@pytest.mark.parametrize(
    "function",
    [
        lambda z: jax.nn.softmax(z),
        lambda z: jax.nn.gelu(z),
        lambda z: jax.nn.standardize(z, epsilon=1e-6),
        lambda z: jax.nn.logsumexp(jnp.sin(z.reshape(2, 2, CLASSES)), -1).ravel(),
        lambda z: jnp.where(jnp.arange(CLASSES) > 1, z, -1.0),
        lambda z: jax.nn.one_hot(LABELS, CLASSES) * jnp.square(z),
        lambda z: z[jnp.arange(ROWS), LABELS],
        lambda z: jnp.take_along_axis(z, LABELS[:, None], 1),
        lambda z: jnp.clip(z, 0, 1).max(1),
        lambda z: jnp.einsum("nv,nv->n", jax.nn.one_hot(LABELS, CLASSES), z),
        lambda z: jnp.einsum("abv,abv->ab", z.reshape(2, 2, -1), z.reshape(2, 2, -1)).ravel(),
        lambda z: z.T[1:3].sum(0) * jnp.argmax(z, 1),
        lambda z: jaxnorm.log_prob_and_entropy(z, LABELS, logits_scale=0.5)[1],
        lambda z: jaxnorm.softmax_cross_entropy_with_integer_labels(z, LABELS, label_smoothing=0.1),
        lambda z: jaxnorm.softmax_cross_entropy_with_integer_labels(
            z, jnp.asarray(LABELS), where=jnp.asarray(LABELS)[:, None] > jnp.arange(CLASSES) - 1
        ),
        lambda z: jaxnorm.kl_divergence(z, jnp.cos(z), logit_softcap=3.0, reverse=True),
    ],
)
def test_values_are_jax_s(function):
    z = np.random.default_rng(0).normal(size=(ROWS, CLASSES))
    with jax.enable_x64(True):
        expected = np.asarray(function(jnp.asarray(z)))
    rows, logits, result = of_rows(function, z)
    np.testing.assert_array_equal(np.ravel(values.stored(rows[result])), np.arange(ROWS))
    inputs = [v for v in kept_arrays.reached([result], lambda v: v.operands) if not v.operands]
    labels = {v: np.full((1,) * len(v.shape), 2, v.dtype) for v in inputs if v.dtype == np.int32}
    for row in range(ROWS):
        draw = values.Draw(rows, {logits: z[row : row + 1]}, labels)
        assert values.agree(draw.row(result), expected[row].ravel())


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z - jnp.max(z, 0),
        lambda z: z @ z.T,
        lambda z: jnp.cumsum(z, 0),
        lambda z: z.ravel(),
        lambda z: z[:-1] + z[1:],
        lambda z: z[::-1] + z,
        lambda z: z[(jnp.arange(ROWS) + 1) % ROWS, LABELS],
        lambda z: jax.nn.softmax(z.reshape(2, -1)),
    ],
)
def test_what_mixes_positions(function):
    rows, _, result = of_rows(function, np.ones((ROWS, CLASSES)))
    own = values.stored(rows[result]).ravel().tolist() if result in rows else []
    assert own != [*range(ROWS)]
