"""Operands of losses of logits x @ weight + bias."""

import math

import jax.numpy as jnp
import numpy as np


def operands(rows, d, classes, dtypes="float32", seed=0, lead=()):
    """Return x, weight, bias and labels. The logits have magnitudes around 1.

    `dtypes` is one dtype for x, weight and bias, or a tuple of their three dtypes.
    """
    rng = np.random.default_rng(seed)
    x_dtype, w_dtype, b_dtype = (dtypes,) * 3 if isinstance(dtypes, str) else dtypes
    return (
        jnp.asarray(rng.normal(size=(*lead, rows, d)), x_dtype),
        jnp.asarray(rng.normal(size=(d, classes)) / math.sqrt(d), w_dtype),
        jnp.asarray(rng.normal(size=classes), b_dtype),
        jnp.asarray(rng.integers(0, classes, (*lead, rows)), jnp.int32),
    )
