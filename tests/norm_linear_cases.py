"""Operands of rms_norm_linear, and the same computation in plain JAX."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def operands(rows, cols, features, dtypes="float32", seed=0, lead=()):
    """Return a dict of x, residual, weight, scale and bias.

    `dtypes` is the dtype of all arrays, or a dtype for each. The matmul's result has magnitudes
    around 1.
    """
    rng = np.random.default_rng(seed)
    x, residual, weight, scale, bias = (dtypes,) * 5 if isinstance(dtypes, str) else dtypes
    return {
        "x": jnp.asarray(rng.normal(size=(*lead, rows, cols)), x),
        "residual": jnp.asarray(rng.normal(size=(*lead, rows, cols)), residual),
        "weight": jnp.asarray(rng.normal(size=(cols, features)) / math.sqrt(cols), weight),
        "scale": jnp.asarray(1 + 0.3 * rng.normal(size=cols), scale),
        "bias": jnp.asarray(rng.normal(size=features), bias),
    }


def plain(
    x,
    weight,
    scale=None,
    bias=None,
    residual=None,
    *,
    product,
    dtype,
    activation=None,
    epsilon=1e-6,
    scale_offset=0.0,
):
    """Return y in `dtype` and, with a residual, the pair (y, h).

    Both operands of the matmul are rounded to the dtype `product`: the normalised x, and the weight
    after it is multiplied by the scale. Code that rounds only the product of the normalised x and
    the scale has smaller errors.
    """
    wide = jnp.result_type(x, weight, dtype, jnp.float32)
    h = x if residual is None else (x.astype(wide) + residual.astype(wide)).astype(residual.dtype)
    n = h.astype(wide)
    n = n * jax.lax.rsqrt(jnp.mean(n**2, -1, keepdims=True) + epsilon)
    gain = 1 if scale is None else (scale.astype(wide) + scale_offset)[:, None]
    w = (gain * weight.astype(wide)).astype(product)
    z = jnp.matmul(n.astype(product), w, preferred_element_type=wide)
    z = z if bias is None else z + bias.astype(wide)
    y = (z if activation is None else getattr(jax.nn, activation)(z)).astype(dtype)
    return y if residual is None else (y, h)
