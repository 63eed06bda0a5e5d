"""A row's results are the same bits whatever is in the other rows (docs/determinism.md).

So a NaN stays in its row, in the results and in the gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnorm

ROWS = 70
KEPT = [0, 33, ROWS - 1]  # among others; the last rows of an array may be a tile's rest


def norm(function, **options):
    """y, and h where there is one, of a norm whose parameters are not those of the data."""

    def call(x, implementation):
        scale = jnp.linspace(-1, 2, x.shape[1], dtype=jnp.float32)
        operands = (x,) if function in (jaxnorm.rms_norm, jaxnorm.layer_norm) else (x, x[:, ::-1])
        return function(*operands, scale, implementation=implementation, **options)

    return call


def gated(function):
    """The same with a gate of the sum."""
    return lambda x, implementation: norm(
        lambda *operands, **options: function(*operands, gate=operands[2] / 2, **options)
    )(x, implementation)


def rotated_heads(x, implementation):
    # Sizes whose pairs Mosaic divides among threads.
    heads = x.reshape(len(x), -1, 40 if x.shape[1] % 40 == 0 else 64)
    scale = jnp.linspace(-1, 2, heads.shape[-1], dtype=jnp.float32)
    angles = jnp.linspace(0, 3, heads.shape[-1] // 2, dtype=jnp.float32)
    return jaxnorm.rms_norm_rope(
        heads, scale, jnp.cos(angles), jnp.sin(angles), implementation=implementation
    )


def softmax(function, **options):
    return lambda x, implementation: function(x, implementation=implementation, **options)


def labels_of(x):
    return jnp.arange(x.shape[0]) % x.shape[1]


def cross_entropy(x, implementation):
    return jaxnorm.softmax_cross_entropy_with_integer_labels(
        x, labels_of(x), z_loss=1e-3, implementation=implementation
    )


def log_prob(x, implementation):
    return jaxnorm.log_prob_and_entropy(x, labels_of(x), implementation=implementation)


CALLS = {
    "rms_norm": norm(jaxnorm.rms_norm),
    "layer_norm": norm(jaxnorm.layer_norm),
    "layer_norm from input": norm(jaxnorm.layer_norm, save="input"),
    "layer_norm silu": norm(jaxnorm.layer_norm, activation="silu"),
    "add_rms_norm": norm(jaxnorm.add_rms_norm),
    "add_layer_norm": norm(jaxnorm.add_layer_norm),
    "add_layer_norm with a gate": gated(jaxnorm.add_layer_norm),
    "rms_norm_add": norm(jaxnorm.rms_norm_add),
    "rms_norm_add_rms_norm": norm(jaxnorm.rms_norm_add_rms_norm),
    "rms_norm_rope": rotated_heads,
    "rms_norm_gated": norm(jaxnorm.rms_norm_gated),
    "softmax": softmax(jaxnorm.softmax),
    "causal softmax": softmax(jaxnorm.softmax, causal=True),
    "log_softmax": softmax(jaxnorm.log_softmax),
    "cross_entropy": cross_entropy,
    "log_prob_and_entropy": log_prob,
}


def linear_loss(x, implementation):
    weight = jnp.linspace(-1, 1, x.shape[1] * 256, dtype=x.dtype).reshape(-1, 256)
    return jaxnorm.linear_softmax_cross_entropy(
        x, weight, labels_of(x) % 256, reduction="none", chunk=32, implementation=implementation
    )


def linear_log_prob(x, implementation):
    weight = jnp.linspace(-1, 1, x.shape[1] * 256, dtype=x.dtype).reshape(-1, 256)
    return jaxnorm.linear_log_prob_and_entropy(
        x, weight, labels_of(x) % 256, chunk=32, implementation=implementation
    )


def norm_linear(x, implementation):
    weight = jnp.linspace(-1, 1, x.shape[1] * 256, dtype=x.dtype).reshape(-1, 256)
    scale = jnp.linspace(-1, 2, x.shape[1], dtype=jnp.float32)
    return jaxnorm.rms_norm_linear(
        x, weight, scale, activation="silu", implementation=implementation
    )


LINEAR_CALLS = {
    "linear_softmax_cross_entropy": linear_loss,
    "linear_log_prob_and_entropy": linear_log_prob,
    "rms_norm_linear": norm_linear,
}


def check(call, cols, dtype, implementation):
    @jax.jit
    def results(x):
        y, vjp = jax.vjp(lambda x: call(x, implementation), x)
        d = jax.tree.map(lambda a: jnp.sin(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), y)
        return *jax.tree.leaves(y), *vjp(d)

    def rows_kept(value=0.0):
        """The bits of the kept rows, in all results and in the gradient of x.

        The other rows have a NaN where those of x have nothing else.
        """
        found = [np.asarray(a) for a in results(jnp.asarray(x, dtype))]
        if np.isnan(value).all():
            of_rows = [
                np.isnan(a[others].astype("float32").reshape(len(others), -1)) for a in found
            ]
            assert all(a.any(-1).all() for a in of_rows)
        return [a[KEPT].tobytes() for a in found]

    x = np.random.default_rng(0).normal(size=(ROWS, cols))
    others = np.setdiff1d(np.arange(ROWS), KEPT)
    expected = rows_kept()
    for value in (np.nan, np.inf, 1e4, np.random.default_rng(1).normal(size=(len(others), cols))):
        x[others] = value
        assert rows_kept(value) == expected


@pytest.mark.parametrize("cols", [256, 1000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CALLS)
def test_other_rows_do_not_matter(name, dtype, cols, implementation):
    check(CALLS[name], cols, dtype, implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LINEAR_CALLS)
def test_other_rows_do_not_matter_to_linear_layers(name, dtype):
    """By the implementation that is the default: their products are XLA's."""
    check(LINEAR_CALLS[name], 128, dtype, None)
