"""rms_norm_rope: RMSNorm of attention's heads, and then rotary position embedding (RoPE)."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.operations.checks import ArrayLike, DTypeLike
from jaxnorm.operations.norm import norm_call
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.specs import Name, NormOptions, Save

_FUNCTION = "rms_norm_rope"


@eager.compiled("x", "scale", "cos", "sin")
def rms_norm_rope(
    x: ArrayLike,
    scale: ArrayLike | None,
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    interleaved: bool = False,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
) -> jax.Array:
    r"""RMSNorm of each head, and then rotary position embedding (RoPE), in one pass.

    Attention with QK norms (Qwen3, Gemma 3, OLMo 2) applies this function to q and to k. It
    computes RMSNorm as in :func:`jaxnorm.rms_norm`, and then rotates pairs of columns (Su et al.,
    2021, https://arxiv.org/abs/2104.09864). For each pair (i, j) of columns:

    .. math::
      n = \mathrm{rms\_norm}(x), \qquad
      (y_i, y_j) = (n_i \cos - n_j \sin, \; n_j \cos + n_i \sin)

    The result is rounded once.

    Args:
      x: array (..., d), where each row is a head; typically (batch, length, heads, d); bfloat16,
        float16, float32 or float64.
      scale: array (d,); any of these dtypes. None for no scale (``scale_offset`` is then unused).
      cos, sin: the two tables, arrays of the same shape; any of these dtypes. The last axis has
        size r / 2, for an even r <= d. The first r columns of x are rotated; the other columns are
        only normalised. The tables broadcast to shape ``x.shape[:-1] + (r / 2,)``, but the
        broadcast arrays are never stored. For x (batch, length, heads, d), the tables typically
        have shape (length, 1, r / 2). The rotation is computed in float32.

        Two mistakes raise no error if the wrong shape happens to be valid:

        - Tables that have each angle twice, as in Hugging Face's models, have r columns instead of
          r / 2. If 2 r <= d, the function then rotates the first 2 r columns of x instead of r.
          Pass the first half of such tables.
        - Tables (length, d / 2) lack the axis of the heads. If x has equal numbers of heads and
          positions, the angles then depend on the head instead of the position. Pass (length, 1, d
          / 2).
      interleaved: if True, the pairs are columns 2 i and 2 i + 1 (GPT-J, the paper). If False, they
        are columns i and i + r / 2 (GPT-NeoX, Llama in Hugging Face's layout).
      epsilon: added to the mean square, at least 0.
      scale_offset: added to ``scale``; 1.0 for Gemma's ``1 + w``.
      dtype: dtype of the output; by default, x's dtype.
      save: the array that is saved for the backward pass. ``"input"`` saves x. ``"output"`` saves y
        (which attention saves anyway), the tables, and a number for each row.

        With ``"output"``, the backward pass inverts the rotation: it multiplies y by the transposed
        rotation and divides by ``cos^2 + sin^2``. So tables may include a factor (YaRN, LongRoPE).
        If ``cos^2 + sin^2`` is 0 for a pair of columns, use ``"input"``.

        With ``"output"``, column i of a pair (i, j) is recovered inaccurately if ``scale[i]`` is
        far below ``scale[j]``. The rotation mixes the two columns, so both have the roundoff of the
        larger one. The error of column i is then y's roundoff times ``scale[j] / scale[i]``. If
        ``scale[i]`` is 0 and ``scale[j]`` is not, the gradient of ``scale[i]`` is wrong.
        :func:`jaxnorm.check_params` finds such columns if it is given the names of these norms.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. Differentiable like :func:`jaxnorm.rms_norm`, with respect to
      x, scale, cos and sin. The gradients of cos and sin are always computed in plain JAX.

    Raises:
      TypeError: an array does not have a supported float dtype; an option has the wrong type.
      ValueError: the shape of scale is not (d,); the shapes of cos and sin differ; cos and sin do
        not broadcast to the rows of x; r is greater than d; ``epsilon``, ``save`` or
        ``implementation`` is wrong; the requested implementation cannot run this call.

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
    checks.features(_FUNCTION, "x", x.shape, "d")
    if scale is not None:
        scale = checks.float_array(_FUNCTION, "scale", scale)
        why = f"the last axis of x with shape {x.shape}, which all heads share"
        checks.same_shape(_FUNCTION, "scale", scale.shape, x.shape[-1:], why)
    tables = [checks.float_array(_FUNCTION, n, a) for n, a in (("cos", cos), ("sin", sin))]
    _check_tables(tables[0].shape, tables[1].shape, x.shape)
    # Give both tables the same number of axes as x, and cast them to a common dtype.
    table_dtype = checks.product_dtype(*[table.dtype for table in tables])
    lacking = x.ndim - tables[0].ndim
    tables = [jnp.expand_dims(a.astype(table_dtype), range(lacking)) for a in tables]
    options = NormOptions(
        epsilon=epsilon,
        scale_offset=scale_offset,
        saved=save,
        table_dtype=table_dtype,
        rotated=2 * tables[0].shape[-1],
        interleaved=checks.flag(_FUNCTION, "interleaved", interleaved),
    )
    given = {} if scale is None else {"scale": scale}
    call = norm_call(_FUNCTION, options, x, given, -1, dtype, implementation)
    call = call.replaced(view=dataclasses.replace(call.view, table=tables[0].shape))
    tables = [sharding.broadcast_alike(table, x) for table in tables]
    (y,) = row_operations.run(call, x, scale, *tables)
    return y


def _check_tables(cos: tuple[int, ...], sin: tuple[int, ...], x: tuple[int, ...]) -> None:
    """Raise ValueError unless the shapes of the tables fit the shape of x."""
    rows = x[:-1]
    broadcasts = 0 < len(cos) <= len(x) and all(
        size in (1, whole) for size, whole in zip(cos[-2::-1], rows[::-1])
    )
    if cos != sin or not broadcasts:
        expected = ", ".join(map(str, rows))
        raise ValueError(
            f"{_FUNCTION}: cos has shape {cos} and sin {sin}, and x {x}; expected one shape that "
            f"broadcasts to ({expected}{', ' * bool(rows)}r / 2) with r up to {x[-1]}; give an "
            "axis of x that shares them the size 1, as in (length, 1, r / 2) for x (batch, "
            "length, heads, d)"
        )
    if 2 * cos[-1] > x[-1]:
        raise ValueError(
            f"{_FUNCTION}: cos and sin have shape {cos}; expected one column for each pair of "
            f"columns of x {x}, {x[-1] // 2} at most; if the tables hold each angle twice, as "
            "Hugging Face's do, pass their first half, cos[..., : cos.shape[-1] // 2], or "
            "cos[..., ::2] if equal angles are neighbours"
        )
