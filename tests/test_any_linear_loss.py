"""`linear_loss`: results, functions with inner programs, kernels and errors.

`test_linear_loss` has its values and gradients, and the tests of the table of functions have its
other derivatives and batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import eight_devices
from program_error import assert_computes
from programs import kernels_in

import jaxnorm
from jaxnorm import linear_loss

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

ROWS, WIDTH, CLASSES = (4, 8), 16, 24


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_any_pytree_of_results():
    """With ``"none"``, `fun` may return arrays of any shapes, also integers, for any positions."""
    x, weight, where = normal(0, *ROWS, WIDTH), normal(1, WIDTH, CLASSES), normal(5, *ROWS) > 0

    def fun(logits, row):
        top, index = jax.lax.top_k(logits, 3)
        return {"top": top * row["scale"], "index": index, "is_large": logits.max() > 1}

    def run(x, weight):
        rows = {"scale": jnp.ones(x.shape[:-1])}
        counts = where if x.ndim == 3 else None
        return linear_loss(fun, x, weight, rows, where=counts, reduction="none", chunk=3)

    results, pullback = jax.vjp(lambda *a: run(*a)["top"], x, weight)
    assert results.shape == (*ROWS, 3)
    assert pullback(results)[1].shape == weight.shape
    got, logits = jax.jit(run)(x, weight), np.asarray(x @ weight)
    assert got["index"].dtype == jnp.int32
    order = np.argsort(-logits, -1)[..., :3]
    np.testing.assert_array_equal(got["index"], np.where(where[..., None], order, 0))
    np.testing.assert_array_equal(got["is_large"], (logits.max(-1) > 1) & where)
    assert run(x[0, 0], weight)["top"].shape == (3,)
    assert run(x[:0, 0], weight)["top"].shape == (0, 3)


def of_a_scan(logits, shift):
    return jax.lax.scan(lambda total, z: (total + (z - shift) ** 2, None), 0.0, logits)[0]


def of_a_condition(logits, shift):
    return jax.lax.cond(logits[0] > 0, jnp.sum, lambda z: jnp.sum((z - shift) ** 2), logits)


def of_a_custom_derivative(logits, shift):
    return jnp.sum(jax.nn.relu(logits - shift)) + jnp.logaddexp(logits[0], logits[1])


@eight_devices
@pytest.mark.parametrize("fun", [of_a_scan, of_a_condition, of_a_custom_derivative])
def test_functions_with_inner_programs(fun):
    """`fun` may have loops, conditions and custom derivatives, even inside of `jax.shard_map`."""
    x, weight = normal(0, *ROWS, WIDTH), normal(1, WIDTH, CLASSES)

    def mean(x, weight):
        return linear_loss(lambda z: fun(z, 0.5), x, weight, chunk=3)

    def theirs(x, weight):
        return jnp.mean(jax.vmap(jax.vmap(lambda z: fun(z, 0.5)))(x @ weight))

    def on_mesh(x, weight):
        return jax.lax.pmean(mean(x, weight), ("a", "b"))

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = jax.shard_map(on_mesh, mesh=mesh, in_specs=(P("a", "b"), P()), out_specs=P())
    expected = jax.value_and_grad(theirs, (0, 1))
    like = jax.value_and_grad(mean, (0, 1))
    for function in (mean, sharded):
        got = jax.jit(jax.value_and_grad(function, (0, 1)))(x, weight)
        assert_computes(jax.tree.map(np.asarray, got), expected, x, weight, like=like)


def test_kernels_run_on_chunks():
    """One kernel call per chunk computes the losses, and one their gradient."""
    x, weight = normal(0, 256, 64, dtype="bfloat16"), normal(1, 64, 1024, dtype="bfloat16")
    labels = jnp.zeros(256, jnp.int32)

    def loss(x, weight):
        fun = jaxnorm.softmax_cross_entropy_with_integer_labels
        return linear_loss(fun, x, weight, labels, chunk=256)

    assert kernels_in(loss, x, weight) == 1
    assert kernels_in(jax.grad(loss, (0, 1)), x, weight) in (1, 2)


# ------------------------------------------------------------------------------- errors

X, W, LABELS = jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.zeros(4, jnp.int32)


def label_logit(logits, label):
    return logits[label]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear_loss(X, X, W), TypeError, "fun has type .*; expected a function"),
        (
            lambda: linear_loss(lambda z: z, X, W),
            ValueError,
            r"fun returns an array of shape \(6,\)",
        ),
        (lambda: linear_loss(lambda z: (z[0], z[1]), X, W), ValueError, "fun returns 2 arrays"),
        (
            lambda: linear_loss(lambda z: None, X, W, reduction="none"),
            ValueError,
            "fun returns no array",
        ),
        (
            lambda: linear_loss(label_logit, X, W, LABELS[:3]),
            ValueError,
            r"an array in rows has shape \(3,\); expected leading axes \(4,\)",
        ),
        (
            lambda: linear_loss(lambda z: (jax.debug.print("{}", z), z[0])[1], X, W),
            ValueError,
            "fun has side effects",
        ),
        (lambda: linear_loss(jnp.sum, X, W[:7]), ValueError, r"weight has shape \(7, 6\)"),
        (lambda: linear_loss(jnp.sum, X, W, bias=X[0]), ValueError, "bias has shape"),
        (lambda: linear_loss(jnp.sum, X, W, where=X > 0), ValueError, "where has shape"),
        (lambda: linear_loss(jnp.sum, X, W, where=LABELS), TypeError, "where has dtype"),
        (lambda: linear_loss(jnp.sum, X, W, reduction="max"), ValueError, "reduction='max'"),
        (lambda: linear_loss(jnp.sum, X, W, chunk=0), ValueError, "chunk=0"),
        (lambda: linear_loss(jnp.sum, X, W, dtype="int8"), TypeError, "dtype="),
        (
            lambda: linear_loss(lambda z, c: z[0], X, W, jnp.ones(4, "complex64")),
            TypeError,
            "an array in rows has dtype complex64",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=f"^jaxnorm.linear_loss: {message}"):
        call()
