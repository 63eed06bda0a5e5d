"""rms_norm_linear: the public function, and its checks."""

import math
from typing import get_args, overload

import jax
import numpy as np

from jaxnorm.calls import backends
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks, norm_linear_primitive
from jaxnorm.operations.norm_linear_call import NAME, Linear
from jaxnorm.primitives import eager, remat
from jaxnorm_kernels.specs import Activation, LinearSpec, Name

_ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


@overload
def rms_norm_linear(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    bias: checks.ArrayLike | None = None,
    residual: None = None,
    activation: Activation | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array: ...


@overload
def rms_norm_linear(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    bias: checks.ArrayLike | None = None,
    residual: checks.ArrayLike,
    activation: Activation | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def rms_norm_linear(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    bias: checks.ArrayLike | None = None,
    residual: checks.ArrayLike | None = None,
    activation: Activation | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Root-mean-square normalisation and the linear layer after it.

    .. math::
      y = \mathrm{activation}(\mathrm{rms\_norm}(x, \mathrm{scale}) \, \mathrm{weight} +
      \mathrm{bias})

    The backward starts from x and a number for each row, and never keeps the normalised array: it
    is made again for weight's gradient. With an activation, it keeps what that is of, too.

    The product is of the dtype to which x and weight promote, or of ``dtype`` where that has fewer
    bits: the normalised array is rounded to it. Sums, bias and activation are float32 (float64
    where x, weight or the output is), and rounded once.

    Args:
      x: array (..., d) of any number of rows; bfloat16, float16, float32 or float64.
      weight: array (d, n), of these dtypes.
      scale: array (d,), of these dtypes. None multiplies by 1 (``scale_offset`` is then unused).
      bias: array (n,), of these dtypes. None adds nothing.
      residual: array of x's shape, of these dtypes: h = x + residual, in residual's dtype, is
        normalised in place of x, and returned.
      activation: ``"relu"``, ``"leaky_relu"``, ``"gelu"`` or ``"silu"``: that of :mod:`jax.nn` with
        its defaults (gelu is the approximation by tanh). None for none.
      epsilon: added to the mean square, at least 0.
      scale_offset: added to ``scale``; 1.0 for Gemma's ``1 + w``.
      dtype: dtype of y; by default that to which x and weight promote.
      implementation: None chooses; a name forces it. See :func:`jaxnorm.implementation_for`.

    Returns:
      y, array (..., n) in ``dtype``; with a residual (y, h).

    Differentiable in reverse and forward mode, to any order; gradients have the dtypes of what they
    are of. ``jax.vmap`` of x is more rows; of a batch of parameters it is a loop.

    On a mesh, rows and n may be split; a weight that is stored in shards of d (FSDP), or of n over
    axes that split x, is gathered. Where x's own last axis is split, its shards add up the product.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: the shape of an array, ``activation``, ``epsilon`` or ``implementation`` is wrong,
        or the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, weight = jnp.ones((8, 512), jnp.bfloat16), jnp.zeros((512, 2048), jnp.bfloat16)
      >>> jaxnorm.rms_norm_linear(x, weight, jnp.ones(512), activation="silu").shape
      (8, 2048)
      >>> y, h = jaxnorm.rms_norm_linear(x, weight, jnp.ones(512), residual=x)
      >>> y.shape, h.shape
      ((8, 2048), (8, 512))
    """
    y, *h = _rms_norm_linear(
        x,
        weight,
        scale,
        bias,
        residual,
        activation,
        epsilon,
        scale_offset,
        dtype,
        implementation,
        jax.config.jax_default_matmul_precision,
    )
    return (y, h[0]) if h else y


def _rms_norm_linear_of(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    scale: checks.ArrayLike | None,
    bias: checks.ArrayLike | None,
    residual: checks.ArrayLike | None,
    activation: Activation | None,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    implementation: Name | None,
    precision: str | None,
) -> list[jax.Array]:
    x = checks.float_array(NAME, "x", x)
    given = {"weight": checks.float_array(NAME, "weight", weight)}
    for name, array in (("scale", scale), ("bias", bias), ("residual", residual)):
        if array is not None:
            given[name] = checks.float_array(NAME, name, array)
    call = linear_call(
        x.shape,
        x.dtype,
        {name: (a.shape, a.dtype) for name, a in given.items()},
        activation=activation,
        epsilon=epsilon,
        scale_offset=scale_offset,
        dtype=dtype,
        implementation=implementation,
        precision=precision,
    )
    if implementation is not None:
        backends.forced(call, implementation)
    other = given.pop("residual", None)
    if other is None:
        return norm_linear_primitive.bind(call, x, *given.values())
    h = remat.name_of_linear("h", _sum(x, sharding.lie_alike(other, x)))
    return [*norm_linear_primitive.bind(call, h, *given.values()), h]


def _sum(x: jax.Array, residual: jax.Array) -> jax.Array:
    """In the residual's dtype, rounded once."""
    is_wide = "float64" in (x.dtype.name, residual.dtype.name)
    wide = np.float64 if is_wide else np.float32
    x, other = sharding.vary_alike([x.astype(wide), residual.astype(wide)])
    return (x + other).astype(residual.dtype)


_rms_norm_linear = eager.compiled(_rms_norm_linear_of, name=NAME, arrays=range(5))


def linear_call(
    shape: tuple[int, ...],
    x_dtype: np.dtype,
    given: dict[str, tuple[tuple[int, ...], np.dtype]],
    *,
    activation: Activation | None,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    implementation: Name | None,
    precision: str | None,
) -> Linear:
    """The forward of a call with these arguments, after the checks.

    `given`: shape and dtype of weight, scale, bias and residual, those that there are.
    """
    shapes = {name: own for name, (own, _) in given.items()}
    dtypes = {name: own for name, (_, own) in given.items()}
    _check_shapes(shape, shapes)
    if activation is not None and activation not in _ACTIVATIONS:
        raise ValueError(
            f"{NAME}: activation={activation!r}; expected one of "
            f"{', '.join(map(repr, _ACTIVATIONS))}, or None; apply another one to the result"
        )
    checks.implementation(NAME, implementation)
    promoted = checks.product_dtype(x_dtype, dtypes["weight"])
    y_dtype = checks.output_dtype(NAME, dtype, promoted)
    rows, cols = shape[:-1], shape[-1]
    spec = LinearSpec(
        rows=math.prod(rows),
        cols=cols,
        features=shapes["weight"][1],
        x_dtype=dtypes.get("residual", x_dtype),
        weight_dtype=dtypes["weight"],
        product_dtype=min(promoted, y_dtype, key=lambda dtype: dtype.itemsize),
        y_dtype=y_dtype,
        scale_dtype=dtypes.get("scale"),
        bias_dtype=dtypes.get("bias"),
        epsilon=checks.number(NAME, "epsilon", epsilon, minimum=0.0),
        scale_offset=checks.number(NAME, "scale_offset", scale_offset),
        activation=activation,
        precision=precision,
    )
    return Linear(spec, implementation)


def _check_shapes(shape: tuple[int, ...], given: dict[str, tuple[int, ...]]) -> None:
    if not shape:
        raise ValueError(
            f"{NAME}: x has shape (); expected (..., d), a vector of features for each position; "
            "give x an axis, e.g. x[None]"
        )
    cols, weight = shape[-1], given["weight"]
    if len(weight) != 2 or weight[0] != cols:
        raise ValueError(
            f"{NAME}: weight has shape {weight}; expected ({cols}, n), the last axis of x {shape} "
            "by any number of features; transpose or reshape weight, e.g. weight.T"
        )
    for name, expected, meaning in (
        ("scale", (cols,), f"a number for each element of the last axis of x {shape}"),
        ("bias", weight[1:], f"a number for each column of weight {weight}"),
    ):
        if given.get(name, expected) != expected:
            raise ValueError(
                f"{NAME}: {name} has shape {given[name]}; expected {expected}, {meaning}; reshape "
                f"{name} to that shape"
            )
    checks.same_shape(NAME, "residual", given.get("residual", shape), shape)
