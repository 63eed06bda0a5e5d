"""softmax and log_softmax, the checks of their arguments, and the weights of attention.

`attention_weights`, which the Flax modules use, computes the weights from queries and keys::

    weights = softmax(scale * (query @ key^T) + bias)

A mask may exclude logits, or replace them by a number. The logits of 16-bit queries and keys are
float32. In the backward pass, the softmax's kernel writes the logits' cotangent in 16 bits, which
halves its memory. The matmuls that follow would round it to 16 bits anyway.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks, products, scales
from jaxnorm.primitives import eager, row_operations
from jaxnorm_kernels.operations import FUNCTIONS
from jaxnorm_kernels.specs import Name, SoftmaxOptions


@eager.compiled("x", "where", "bias", either=("scale",))
def softmax(
    x: checks.ArrayLike,
    axis: checks.Axis = -1,
    where: checks.ArrayLike | None = None,
    *,
    scale: checks.ArrayLike = 1.0,
    bias: checks.ArrayLike | None = None,
    causal: bool = False,
    dtype: checks.DTypeLike | None = None,
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
      where: boolean mask that broadcasts to x's shape. Entries where it is False are excluded:
        their output and gradient are 0, even if the whole row is False.
      scale: a finite number, or a scalar array, which may be traced. The value of an array is not
        checked, and has no derivative.
      bias: float array that broadcasts to x's shape. An entry of -inf in it has the same effect as
        -inf in x.
      causal: if True, row i includes only the columns j <= i; the others are excluded as by
        ``where``. The columns are the last axis and the rows the axis before it, both counted from
        0.
      dtype: dtype of the output; by default, x's dtype.
      implementation: name of the implementation to use; None lets jaxnorm choose. See
        :func:`jaxnorm.implementation_for`.

    Returns:
      Array of x's shape in ``dtype``. As in :mod:`jax.nn`, a row is NaN if it includes +inf or NaN,
      or if all of its entries are -inf.

    Differentiable in reverse and forward mode, to any order; tangents are also computed from y.

    Raises:
      TypeError: the dtype of x or bias, or ``dtype``, is not a supported float dtype, ``where`` is
        not boolean, ``scale`` is not a number or is differentiated, or ``causal`` is neither True
        nor False.
      ValueError: ``axis``, the shape of ``where`` or ``bias``, ``scale`` or ``implementation`` is
        wrong, or ``causal`` is True although ``axis`` is not the last axis or x has only one axis.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> logits = jnp.zeros((3, 3))
      >>> jaxnorm.softmax(logits, causal=True).round(2).tolist()[:2]
      [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
      >>> jaxnorm.softmax(logits, scale=0.125, where=jnp.array([True, True, False])).shape
      (3, 3)
    """
    return _softmax_of(
        "softmax",
        x,
        axis=axis,
        where=where,
        scale=scale,
        bias=bias,
        causal=causal,
        dtype=dtype,
        implementation=implementation,
    )


@eager.compiled("x", "where", "bias", either=("scale",))
def log_softmax(
    x: checks.ArrayLike,
    axis: checks.Axis = -1,
    where: checks.ArrayLike | None = None,
    *,
    scale: checks.ArrayLike = 1.0,
    bias: checks.ArrayLike | None = None,
    causal: bool = False,
    dtype: checks.DTypeLike | None = None,
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
      where: boolean mask that broadcasts to x's shape. Entries where it is False are excluded:
        their output is -inf and their gradient 0.
      scale, bias, causal: as in :func:`jaxnorm.softmax`. With ``causal``, the output is -inf above
        the diagonal.
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
    return _softmax_of(
        "log_softmax",
        x,
        axis=axis,
        where=where,
        scale=scale,
        bias=bias,
        causal=causal,
        dtype=dtype,
        implementation=implementation,
    )


@eager.compiled("x", "where", "bias")
def filled_softmax(
    x: jax.Array,
    where: jax.Array | None,
    bias: jax.Array | None,
    *,
    fill: float,
    dtype: checks.DTypeLike,
) -> jax.Array:
    """Replace masked entries of x + bias by `fill`; return the softmax over the last axis.

    An entry is masked where `where` is False. Flax masks the logits of attention in this way.
    `fill` is finite, so the weights of a row are equal if all of its entries are masked.
    """
    return _softmax_of("softmax", x, where=where, bias=bias, dtype=dtype, masked_logit=fill)


def _softmax_of(function: str, x: checks.ArrayLike, **options: Any) -> jax.Array:
    """Check the arguments of a softmax, run it, and return its result.

    `options` are further arguments of `softmax_call`.
    """
    x = checks.float_array(function, "x", x)
    call, mask, bias = softmax_call(function, x, **options)
    scale = None
    if call.spec.logits.has_scale:
        rows, dtype = call.view.shape_of("stat"), call.spec.compute_dtype
        scale = scales.of_softmax(function, options["scale"], rows, dtype)
    return row_operations.run(call, x, mask, bias, scale)[0]


def softmax_call(
    function: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    *,
    where: checks.ArrayLike | None,
    bias: checks.ArrayLike | None,
    dtype: checks.DTypeLike | None,
    axis: checks.Axis = -1,
    scale: checks.ArrayLike = 1.0,
    causal: bool = False,
    masked_logit: float = -math.inf,
    implementation: Name | None = None,
) -> tuple[Call, jax.Array | None, jax.Array | None]:
    """Check the arguments of a softmax, and return its forward call, its mask and its bias.

    The mask and the bias have as many axes as x, or are None.

    Args:
      function: name of the public function.
      x: the logits, or their shape and dtype.
      where, bias, dtype, axis, scale, causal, implementation: the public function's arguments.
      masked_logit: the value that replaces masked logits; -inf excludes them.
    """
    mask = None if where is None else checks.mask(function, where, x.shape)
    if bias is not None:
        bias = checks.float_array(function, "bias", bias)
        bias = checks.broadcastable(function, "bias", bias, x.shape)
    axes = checks.axes(function, axis, x.shape)
    mask_shape, bias_shape = (() if a is None else a.shape for a in (mask, bias))
    view = RowView.of(x.shape, axes, logits_bias=bias_shape, mask=mask_shape)
    checks.implementation(function, implementation)
    causal = checks.flag(function, "causal", causal)
    if causal:
        checks.matrix(function, "causal", view)
    has_scale = scales.is_array(scale)
    number = 1.0 if has_scale else checks.number(function, "scale", cast(float, scale))
    op = FUNCTIONS[function].op
    dtypes = np.dtype(x.dtype), checks.output_dtype(function, dtype, x.dtype)
    options = SoftmaxOptions(
        has_mask=mask is not None,
        masked_logit=masked_logit,
        logits_scale=number,
        has_scale=has_scale,
        logits_bias_dtype=None if bias is None else bias.dtype,
        causal=causal,
    )
    call = Call.forward(function, op, view, dtypes, options, implementation)
    checks.finite_in(function, call.spec.compute_dtype, {"scale": call.spec.logits.logits_scale})
    if bias is not None:
        bias = sharding.broadcast_alike(bias, x)
    return call, mask, bias


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
      key: array ``(batch..., kv_length, kv_heads, depth)`` of the same dtype, where heads is a
        multiple of kv_heads.
      where: boolean mask that broadcasts to the logits, or None. Logits are replaced by `fill`
        where it is False.
      bias: float array that broadcasts to the logits, or None.
      scale: factor of the logits, applied without rounding.
      fill: a finite number, or -inf to exclude masked entries.
      causal: True to exclude the keys after the query's position; only with a `fill` of -inf.
      precision: precision of the matmuls, as in `jax.numpy.einsum`.

    Returns:
      Array ``(batch..., heads, q_length, kv_length)``.
    """
    logits = jax.eval_shape(functools.partial(logits_of, precision), query, key)
    call, mask, bias = softmax_call(
        "softmax", logits, where=where, scale=scale, bias=bias, causal=causal, dtype=query.dtype,
        masked_logit=fill,
    )  # fmt: skip
    (y,) = row_operations.bind(call, logits_of(precision, query, key), mask, bias)
    return _with_narrow_derivative(call, precision, y, query, key, mask, bias)


def logits_of(
    precision: Any, query: jax.Array, key: jax.Array, dtype: np.dtype | None = None
) -> jax.Array:
    """Return ``query @ key^T`` in `dtype`; by default, in float32 (float64 for float64 arrays)."""
    einsum = functools.partial(
        jnp.einsum,
        precision=precision,
        preferred_element_type=dtype or jnp.promote_types(query.dtype, jnp.float32),
    )
    size = query.shape[-2] // key.shape[-2]
    if size == 1:
        return einsum("...qhd,...khd->...hqk", query, key)
    # In grouped-query attention, `size` heads of the query share a head of the keys.
    split = query.reshape(*query.shape[:-2], key.shape[-2], size, query.shape[-1])
    logits = einsum("...qhgd,...khd->...hgqk", split, key)
    return logits.reshape(*logits.shape[:-4], query.shape[-2], *logits.shape[-2:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _with_narrow_derivative(
    call: Call,
    precision: Any,
    y: jax.Array,
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Return the argument y, the attention weights, with a derivative that needs less memory.

    The caller computes y from the other arguments outside this function, so that rematerialisation
    policies see its name. The JVP rule below computes y's tangent from the tangents of query, key
    and bias. It ignores the tangent of the argument y, so JAX does not compute that tangent. The
    transpose of the rule computes the logits' cotangent in the dtype of the query instead of
    float32.
    """
    del call, precision, query, key, mask, bias
    return y


@functools.partial(_with_narrow_derivative.defjvp, symbolic_zeros=True)
def _(call: Call, precision: Any, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    y, query, key, mask, bias = primals
    _, dquery, dkey, _, dbias = tangents
    terms = []
    if products.nonzero(dquery) is not None:
        terms.append(logits_of(precision, dquery, key, query.dtype))
    if products.nonzero(dkey) is not None:
        terms.append(logits_of(precision, query, dkey, query.dtype))
    along = {} if bias is None else {"logits_bias": products.nonzero(dbias)}
    if terms:
        along = {"x": functools.reduce(jnp.add, terms), **along}
    narrow = call.replaced(x_dtype=np.dtype(query.dtype))
    residuals = [y] if mask is None else [y, mask]
    (dy,) = row_operations.tangents_of(narrow, residuals, along)
    return y, SymbolicZero(jax.typeof(y).to_tangent_aval()) if dy is None else dy
