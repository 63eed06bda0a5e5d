"""softmax and log_softmax, the checks of their arguments, and attention weights.

`attention_weights`, which the Flax modules use, computes the weights from queries and keys::

    weights = softmax(scale * (query @ key^T) + bias)

A mask may exclude logits, or replace them by a number. If queries and keys have 16 bits, the logits
are float32, but the backward pass computes their cotangent in 16 bits. This halves the memory of
the cotangent, which the matmuls that follow round to 16 bits anyway.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks, scales
from jaxnorm.operations.checks import ArrayLike, Axis, DTypeLike
from jaxnorm.primitives import eager, row_operations
from jaxnorm.primitives.recomputation import with_tangent
from jaxnorm_kernels.operations import FUNCTIONS
from jaxnorm_kernels.specs import Name, SoftmaxOptions


@eager.compiled("x", "where", "bias", either=("scale",))
def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    causal: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Softmax that saves only its output; it replaces :func:`jax.nn.softmax`.

    .. math::
      y_i = \frac{\exp(z_i)}{\sum_j \exp(z_j)} \qquad z = \mathrm{scale} \cdot x + \mathrm{bias}

    The arithmetic is float32 (float64 if x, the bias or the output is float64) for every dtype, and
    z is not rounded.

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      axis: axis or axes over which the output sums to 1; None for all.
      where: boolean mask that broadcasts to x's shape, or None. Entries where it is False are
        excluded: their output and gradient are 0, even if all entries of a row are excluded.
      scale: a finite number, or a scalar array (which may be traced). The value of an array is not
        checked, and has no derivative.
      bias: float array that broadcasts to x's shape, or None. -inf in the bias has the same effect
        as -inf in x.
      causal: if True, row i includes only the columns j <= i. The other columns are excluded as by
        ``where``. x's last axis has the columns, and the axis before it has the rows. Both are
        counted from 0.
      dtype: dtype of the output; by default, x's dtype.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. As in :mod:`jax.nn`, a row is NaN if it includes +inf or NaN,
      or if all of its entries are -inf.

    Differentiable in reverse and forward mode, to any order. Both modes compute
    derivatives from y.

    Raises:
      TypeError: the dtype of x or bias is not a supported float dtype; ``dtype`` is not one;
        ``where`` is not boolean; ``scale`` is not a number; ``scale`` is differentiated; ``causal``
        is neither True nor False.
      ValueError: ``axis``, ``scale`` or ``implementation`` is wrong; ``where`` or ``bias`` has a
        wrong shape; ``causal`` is True although ``axis`` is not the last axis; ``causal`` is True
        although x has only one axis.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> logits = jnp.zeros((3, 3))
      >>> jaxnorm.softmax(logits, causal=True).round(2).tolist()[:2]
      [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
      >>> jaxnorm.softmax(logits, scale=0.125, where=jnp.array([True, True, False])).shape
      (3, 3)
    """
    options = SoftmaxOptions(causal=causal)
    return _softmax_of("softmax", options, x, axis, where, scale, bias, dtype, implementation)


@eager.compiled("x", "where", "bias", either=("scale",))
def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    causal: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Log-softmax that saves only its output; it replaces :func:`jax.nn.log_softmax`.

    .. math::
      y_i = z_i - \log \sum_j \exp(z_j) \qquad z = \mathrm{scale} \cdot x + \mathrm{bias}

    The backward pass recomputes the probabilities as ``exp(y)``, so the output should be float32
    for a large vocabulary: with bfloat16 logits, pass ``dtype=jnp.float32``.

    Args:
      x: array of any shape; bfloat16, float16, float32 or float64.
      axis: axis or axes over which ``exp`` of the output sums to 1; None for all.
      where: boolean mask that broadcasts to x's shape, or None. Entries where it is False are
        excluded: their output is -inf, and their gradient is 0.
      scale, bias, causal: as in :func:`jaxnorm.softmax`. With ``causal``, the output is -inf in
        the excluded columns of each row.
      dtype: dtype of the output; by default, x's dtype.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. Differentiable like :func:`jaxnorm.softmax`.

    Raises:
      TypeError, ValueError: as for :func:`jaxnorm.softmax`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> logits = jnp.ones((8, 50257), jnp.bfloat16)
      >>> jaxnorm.log_softmax(logits, dtype=jnp.float32).dtype.name
      'float32'
    """
    options = SoftmaxOptions(causal=causal)
    return _softmax_of("log_softmax", options, x, axis, where, scale, bias, dtype, implementation)


@eager.compiled("x", "where", "bias")
def filled_softmax(
    x: jax.Array,
    where: jax.Array | None,
    bias: jax.Array | None,
    *,
    fill: float,
    dtype: DTypeLike,
) -> jax.Array:
    """Compute the logits x + bias, set masked logits to `fill`, and return the softmax of each row.

    A row lies along the last axis. Logits where `where` is False are masked. Flax masks the logits
    of attention in this way. If all logits of a row are masked, all results of the row are equal,
    because `fill` is finite.
    """
    options = SoftmaxOptions(masked_logit=fill)
    return _softmax_of("softmax", options, x, -1, where, 1.0, bias, dtype, None)


def _softmax_of(function: str, options: SoftmaxOptions, x: ArrayLike, *arguments: Any) -> jax.Array:
    """Check the arguments of a softmax, run it, and return its result.

    `arguments` are the arguments of `softmax_call` after x, in order.
    """
    x = checks.float_array(function, "x", x)
    call, *others = softmax_call(function, options, x, *arguments)
    return row_operations.run(call, x, *others)[0]


def softmax_call(
    function: str,
    options: SoftmaxOptions,
    x: jax.Array | jax.ShapeDtypeStruct,
    axis: Axis,
    where: ArrayLike | None,
    scale: ArrayLike,
    bias: ArrayLike | None,
    dtype: DTypeLike | None,
    implementation: Name | None,
) -> tuple[Call, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Check a softmax's arguments; return four values: forward call, mask, bias and scale.

    The mask and the bias are arrays with the same number of axes as x, or None. The scale is an
    array with one number for each row, or None if the user has passed a number.

    Args:
      function: name of the public function.
      options: the public function's argument `causal`, and the number that replaces masked logits.
        This function adds the other fields.
      x: the logits, or their shape and dtype.
      axis, where, scale, bias, dtype, implementation: the public function's arguments.
    """
    mask = None
    if where is not None:
        also = ", or add an additive mask to x with bias="
        mask = checks.boolean(function, "where", where, also)
        mask = checks.broadcastable(function, "where", mask, x.shape)
    if bias is not None:
        bias = checks.float_array(function, "bias", bias)
        bias = checks.broadcastable(function, "bias", bias, x.shape)
    axes = checks.axes(function, axis, x.shape)
    mask_shape, bias_shape = (() if a is None else a.shape for a in (mask, bias))
    view = RowView.of(x.shape, axes, logits_bias=bias_shape, mask=mask_shape)
    checks.implementation(function, implementation)
    is_matrix = view.axes == (len(view.shape) - 1,) and len(view.shape) >= 2
    if checks.flag(function, "causal", options.causal) and not is_matrix:
        raise ValueError(
            f"{function}: causal=True for axis={view.axes} of x with shape {view.shape}; expected "
            "the last axis, of two or more axes: row i uses the columns j <= i; pass where= for "
            "another mask"
        )
    has_scale = scales.is_array(scale)
    number = 1.0 if has_scale else checks.number(function, "scale", cast(float, scale))
    options = dataclasses.replace(
        options,
        causal=bool(options.causal),
        has_mask=mask is not None,
        logits_scale=number,
        has_scale=has_scale,
        logits_bias_dtype=None if bias is None else bias.dtype,
    )
    dtypes = np.dtype(x.dtype), checks.output_dtype(function, dtype, x.dtype)
    call = Call.forward(function, FUNCTIONS[function].op, view, dtypes, options, implementation)
    wide = call.spec.compute_dtype
    checks.finite_in(function, wide, {"scale": number})
    if bias is not None:
        bias = sharding.broadcast_alike(bias, x)
    array = scales.of_softmax(function, scale, view.shape_of("stat"), wide) if has_scale else None
    return call, mask, bias, array


@eager.compiled("query", "key", "where", "bias")
def attention_weights(
    query: jax.Array,
    key: jax.Array,
    where: jax.Array | None,
    bias: jax.Array | None,
    *,
    scale: float,
    fill: float,
    causal: bool,
    precision: Any,
) -> jax.Array:
    """Return attention weights: the softmax of ``scale * (query @ key^T) + bias`` over the keys.

    The result has the dtype of the query.

    Args:
      query: array ``(batch..., q_length, heads, depth)``.
      key: array ``(batch..., kv_length, kv_heads, depth)`` of the query's dtype; heads is a
        multiple of kv_heads.
      where: boolean mask that broadcasts to the logits, or None. Logits where it is False are
        replaced by `fill`.
      bias: float array that broadcasts to the logits, or None.
      scale: number by which the logits are multiplied. The products are not rounded.
      fill: a finite number, or -inf to exclude masked logits.
      causal: True to exclude, for each query, the keys at later positions. `fill` must then be
        -inf.
      precision: precision of the matmuls, as in `jax.numpy.einsum`.

    Returns:
      Array ``(batch..., heads, q_length, kv_length)``.
    """
    logits = jax.eval_shape(functools.partial(logits_of, precision), query, key)
    options = SoftmaxOptions(causal=causal, masked_logit=fill)
    call, mask, bias, _ = softmax_call(
        "softmax", options, logits, -1, where, scale, bias, query.dtype, None
    )
    (y,) = row_operations.bind(call, logits_of(precision, query, key), mask, bias)
    # `with_tangent` replaces y's derivative. JAX also traces y's own JVP rule, which names y for
    # `jax.checkpoint` policies.
    return with_tangent((_narrow_tangent, call, precision), y, query, key, mask, bias)


def logits_of(
    precision: Any, query: jax.Array, key: jax.Array, dtype: np.dtype | None = None
) -> jax.Array:
    """Return ``query @ key^T`` in the dtype `dtype`.

    If `dtype` is None, the result is float32, or float64 for a float64 query.
    """
    einsum = functools.partial(
        jnp.einsum,
        precision=precision,
        preferred_element_type=dtype or jnp.promote_types(query.dtype, jnp.float32),
    )
    size = query.shape[-2] // key.shape[-2]
    if size == 1:
        return einsum("...qhd,...khd->...hqk", query, key)
    # This is grouped-query attention: `size` heads of the query use the same head of the keys.
    split = query.reshape(*query.shape[:-2], key.shape[-2], size, query.shape[-1])
    logits = einsum("...qhgd,...khd->...hgqk", split, key)
    return logits.reshape(*logits.shape[:-4], query.shape[-2], *logits.shape[-2:])


def _narrow_tangent(
    call: Call, precision: Any, y: jax.Array, arrays: Sequence[Any], tangents: Sequence[Any]
) -> jax.Array | None:
    """Return the tangent of attention weights, given the tangents of query, key and bias.

    The transpose of this function computes the logits' cotangent in the dtype of the query. With
    JAX's own derivative of the matmul, this cotangent would be float32.
    """
    (query, key, mask, bias), (dquery, dkey, _, dbias) = arrays, tangents
    terms = []
    if dquery is not None:
        terms.append(logits_of(precision, dquery, key, query.dtype))
    if dkey is not None:
        terms.append(logits_of(precision, query, dkey, query.dtype))
    along = {} if bias is None else {"logits_bias": dbias}
    if terms:
        along = {"x": functools.reduce(jnp.add, terms), **along}
    narrow = call.replaced(x_dtype=np.dtype(query.dtype))
    residuals = [y] if mask is None else [y, mask]
    (dy,) = row_operations.tangents_of(narrow, residuals, along)
    return dy
