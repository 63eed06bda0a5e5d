"""rms_norm_rope: RMSNorm of attention's heads, and then rotary position embedding (RoPE)."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.operations.norm import common_options, norm_call
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.specs import Name, Save

_FUNCTION = "rms_norm_rope"


@eager.compiled("x", "scale", "cos", "sin")
def rms_norm_rope(
    x: checks.ArrayLike,
    scale: checks.ArrayLike | None,
    cos: checks.ArrayLike,
    sin: checks.ArrayLike,
    *,
    interleaved: bool = False,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
) -> jax.Array:
    r"""RMSNorm of each head, and then rotary position embedding (RoPE), in one pass.

    Attention with QK norms (Qwen3, Gemma 3, OLMo 2) applies this to q and to k: RMSNorm as in
    :func:`jaxnorm.rms_norm`, then the rotation of pairs of columns by Su et al. (2021,
    https://arxiv.org/abs/2104.09864). The result is rounded once:

    .. math::
      n = \mathrm{rms\_norm}(x), \qquad
      (y_i, y_j) = (n_i \cos - n_j \sin, \; n_j \cos + n_i \sin)

    Args:
      x: array (..., d), where each row is a head; typically (batch, length, heads, d); bfloat16,
        float16, float32 or float64.
      scale: array (d,); any of these dtypes. None for no scale (``scale_offset`` is then unused).
      cos, sin: arrays of the same shape, which broadcasts to x.shape[:-1] + (r / 2,) for an even
        r <= d; any of these dtypes. The first r columns are rotated; the others are only
        normalised. For x (batch, length, heads, d), the shape is typically (length, 1, r / 2); the
        broadcast arrays are never stored. The rotation is computed in float32.

        Two mistakes give valid shapes and raise no error. First, tables with each angle twice, as
        in Hugging Face's models, have r instead of r / 2 columns. If r is at most d / 2, the wrong
        columns are rotated: pass the first half of such tables. Second, tables (length, d / 2) lack
        the axis of the heads. If there are as many heads as positions, the angles then depend on
        the head instead of the position: pass (length, 1, d / 2).
      interleaved: if True, pairs are columns 2i and 2i + 1 (GPT-J, the paper); if False, columns i
        and i + r / 2 (GPT-NeoX, Llama in Hugging Face's layout).
      epsilon: added to the mean square, at least 0.
      scale_offset: added to ``scale``; 1.0 for Gemma's ``1 + w``.
      dtype: dtype of the output; by default, x's dtype.
      save: the array that is saved for the backward pass. ``"output"`` saves y (which attention
        saves anyway), the tables, and a number for each row. The backward pass inverts the
        rotation: it multiplies by the transpose and divides by ``cos^2 + sin^2``, so tables may
        include a factor (YaRN, LongRoPE). If the sum is 0 for a pair of columns, use ``"input"``,
        which saves x. When column i of a pair (i, j) is recovered from y, its error is y's roundoff
        times ``scale[j] / scale[i]``. If ``scale[i]`` is 0 and ``scale[j]`` is not, the gradient of
        ``scale[i]`` is wrong. :func:`jaxnorm.check_params` finds such columns if it is given the
        names of these norms.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. Differentiable like :func:`jaxnorm.rms_norm`, with respect to
      x, scale, cos and sin. The gradients of cos and sin are always computed in plain JAX.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: scale is not (d,), the shapes of cos and sin differ or do not broadcast, r is more
        than d, ``epsilon``, ``save`` or ``implementation`` is wrong, or the requested
        implementation cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> q = jnp.ones((2, 16, 8, 64), jnp.bfloat16)  # (batch, length, heads, d)
      >>> angles = jnp.arange(16)[:, None, None] / 10000 ** (jnp.arange(32) / 32)
      >>> cos, sin = jnp.cos(angles), jnp.sin(angles)  # (length, 1, d / 2)
      >>> y = jaxnorm.rms_norm_rope(q, jnp.ones(64), cos, sin)
      >>> y.shape, y.dtype.name
      ((2, 16, 8, 64), 'bfloat16')
    """
    x = checks.float_array(_FUNCTION, "x", x)
    checks.axes(_FUNCTION, -1, x.shape)
    if scale is not None:
        scale = checks.float_array(_FUNCTION, "scale", scale)
        _check_scale(scale.shape, x.shape)
    tables = [checks.float_array(_FUNCTION, n, a) for n, a in (("cos", cos), ("sin", sin))]
    _check_tables(tables[0].shape, tables[1].shape, x.shape)
    # Give both tables x's rank and a common dtype.
    table_dtype = checks.product_dtype(*[table.dtype for table in tables])
    lacking = x.ndim - tables[0].ndim
    tables = [jnp.expand_dims(a.astype(table_dtype), range(lacking)) for a in tables]
    call = norm_call(
        _FUNCTION,
        x,
        {} if scale is None else {"scale": scale},
        **common_options(-1, epsilon, scale_offset, dtype, save, implementation),
        table_dtype=table_dtype,
        rotated=2 * tables[0].shape[-1],
        interleaved=checks.flag(_FUNCTION, "interleaved", interleaved),
    )
    call = call.replaced(view=dataclasses.replace(call.view, table=tables[0].shape))
    tables = [sharding.broadcast_alike(table, x) for table in tables]
    (y,) = row_operations.run(call, x, scale, *tables)
    return y


def _check_scale(scale: tuple[int, ...], x: tuple[int, ...]) -> None:
    if scale != x[-1:]:
        raise ValueError(
            f"{_FUNCTION}: scale has shape {scale}; expected {x[-1:]}, the last axis of x with "
            f"shape {x}; all heads share it"
        )


def _check_tables(cos: tuple[int, ...], sin: tuple[int, ...], x: tuple[int, ...]) -> None:
    """Raise ValueError unless the tables' shapes fit x's shape."""
    rows = x[:-1]
    broadcasts = 0 < len(cos) <= len(x) and all(
        size in (1, whole) for size, whole in zip(cos[-2::-1], rows[::-1])
    )
    if cos == sin and broadcasts and 2 * cos[-1] <= x[-1]:
        return
    if cos == sin and broadcasts and cos[-1] <= x[-1]:
        raise ValueError(
            f"{_FUNCTION}: cos and sin have shape {cos}; expected one column for each pair of "
            f"columns of x {x}, {x[-1] // 2} at most; if the tables hold each angle twice, as "
            "Hugging Face's do, pass their first half, cos[..., : cos.shape[-1] // 2], or "
            "cos[..., ::2] if equal angles are neighbours"
        )
    expected = ", ".join(map(str, rows))
    raise ValueError(
        f"{_FUNCTION}: cos has shape {cos} and sin {sin}, and x {x}; expected one shape that "
        f"broadcasts to ({expected}{', ' * bool(rows)}r / 2) with r up to {x[-1]}; give an axis of "
        "x that shares them the size 1, as in (length, 1, r / 2) for x (batch, length, heads, d)"
    )
