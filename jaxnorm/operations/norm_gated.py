"""RMSNorm and a gate of each element, after it or before it."""

from typing import get_args

import jax

from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.operations.norm import common_options, norm_call
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.specs import Activation, Name

_FUNCTION = "rms_norm_gated"


@eager.compiled("x", "gate", "scale")
def rms_norm_gated(
    x: checks.ArrayLike,
    gate: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    norm_before_gate: bool = True,
    activation: Activation = "silu",
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""RMSNorm over the last axis and a gate, in one pass: of Mamba 2, of gated delta nets.

    .. math::
      y = \mathrm{rms\_norm}(x) \cdot \mathrm{activation}(\mathrm{gate})
      \qquad \text{or} \qquad
      y = \mathrm{rms\_norm}(x \cdot \mathrm{activation}(\mathrm{gate}))

    The first is the gated delta net's (Yang, Kautz and Hatamizadeh, 2024,
    https://arxiv.org/abs/2412.06464; Qwen3-Next, Kimi Linear), over the columns of each head; the
    second Mamba 2's (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060). Arithmetic is float32
    (float64 where x, gate or the output is), rounded once. The backward keeps x, gate and a number
    for each row, and makes all else again: never the normalised x, or what the gate becomes.

    Args:
      x: array (..., d); bfloat16, float16, float32 or float64.
      gate: array of x's shape; any of these dtypes.
      scale: (d,), as in :func:`jaxnorm.rms_norm`, or with axes before that, which broadcast to x's
        other axes: (groups, d) where x is (..., groups, d), as in Mamba 2 with groups. None
        multiplies by 1 (``scale_offset`` is then unused).
      norm_before_gate: what is normalised: x, or, with False, its product with the gate.
      activation: ``"silu"``, ``"gelu"``, ``"relu"``, ``"leaky_relu"`` or ``"sigmoid"``: that of
        :mod:`jax.nn` with its defaults (gelu is the approximation by tanh).
      epsilon: added to the mean square, at least 0.
      scale_offset: added to ``scale``; 1.0 for parameters stored as ``1 + w``.
      dtype: dtype of the output; x's by default.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. Differentiable in reverse and forward mode, to any order;
      gradients have the dtypes of what they are of.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: x and gate differ in shape, scale's shape, ``activation``, ``epsilon`` or
        ``implementation`` is wrong, or the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x = gate = jnp.ones((2, 16, 8, 128), jnp.bfloat16)  # (batch, length, heads, d)
      >>> y = jaxnorm.rms_norm_gated(x, gate, jnp.ones(128))  # a gated delta net's
      >>> y.shape, y.dtype.name
      ((2, 16, 8, 128), 'bfloat16')
      >>> scale = jnp.ones((8, 128))  # Mamba 2's, in 8 groups
      >>> jaxnorm.rms_norm_gated(x, gate, scale, norm_before_gate=False).shape
      (2, 16, 8, 128)
    """
    x, gate = (checks.float_array(_FUNCTION, n, a) for n, a in (("x", x), ("gate", gate)))
    checks.same_shape(_FUNCTION, "gate", gate.shape, x.shape)
    if scale is not None:
        scale = checks.float_array(_FUNCTION, "scale", scale)
    checks.one_of(_FUNCTION, "activation", activation, get_args(Activation))
    call = norm_call(
        _FUNCTION,
        x,
        {} if scale is None else {"scale": scale},
        **common_options(-1, epsilon, scale_offset, dtype, "input", implementation),
        gate_dtype=gate.dtype,
        norm_before_gate=checks.flag(_FUNCTION, "norm_before_gate", norm_before_gate),
        activation=activation,
    )
    (y,) = row_operations.run(call, x, sharding.lie_alike(gate, x), scale)
    return y
