"""The linear losses and the linear divergence, and the checks of their arguments."""

import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.operations import checks, linear_loss_primitive, scales
from jaxnorm.operations.checks import ArrayLike, DTypeLike
from jaxnorm.operations.linear_loss_call import (
    OF_LOGITS,
    Function,
    LinearLossCall,
    Program,
    Reduction,
    chunk_rows,
    loss_of_rows,
    matmul_dtypes,
)
from jaxnorm.operations.loss import counted, loss_call, weighted
from jaxnorm.primitives import eager
from jaxnorm_kernels.specs import Name

NAME: Function = "linear_softmax_cross_entropy"


@eager.compiled("x", "weight", "labels", "bias", "where", either=("logits_scale",))
def linear_softmax_cross_entropy(
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    reduction: Reduction = "mean",
    chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_scale: ArrayLike = 1.0,
    logit_softcap: float | None = None,
    dtype: DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Cross-entropy of ``x @ weight + bias`` and integer labels, without storing all logits.

    The logits are ``x @ weight + bias``. Only the logits of one chunk of rows are in memory at a
    time. The result is the mean, the sum or the array of the losses that
    :func:`softmax_cross_entropy_with_integer_labels` computes. By default, the function returns the
    mean; masks and weights go into ``where``, because a mask that multiplies the mean cancels out.
    One loop over the chunks computes the loss and, if it is differentiated, the gradients.

    A loss that is not differentiated takes one matmul, which computes the logits. If it is
    differentiated, two more matmuls compute the gradients of x and weight, so a mean or a sum takes
    three matmuls. ``reduction="none"`` takes four, because the backward pass recomputes the logits.

    The dtype of the matmuls' operands is the one to which x and weight promote, as in
    ``jnp.matmul``. With a float32 weight, all three matmuls are therefore in float32, unless
    ``dtype=jnp.bfloat16`` rounds the weight. A chunk's logits are rounded to that dtype, like the
    result of ``x @ weight``, and bias is added to the rounded logits. The gradient of the logits is
    rounded to the dtype of the matmuls' operands. Sums over classes and row statistics are float32
    (float64 for float64 logits). The gradient of weight is summed over the chunks in float32 as
    well. For a mean, the gradient of the logits is divided by the number of rows before it is
    rounded; in float16, the gradients of x and weight are divided instead, in float32.

    Args:
      x: array (..., d) with any number of rows; bfloat16, float16, float32 or float64. Each row is
        a position.
      weight: array (d, V); any of these dtypes.
      labels: class indices from 0 to V - 1, integers of any dtype, of x's shape without its last
        axis. A label out of range, such as a negative one, makes the loss and the gradients NaN.
      bias: array (V,), any of these dtypes; or None.
      where: None, or a boolean mask of positions (such as ``labels != -100``), or float weights of
        positions (which may be negative, and have no gradient). It has as many axes as labels, and
        broadcasts to their shape. Where it is False or 0, label and x are ignored, even if x is
        NaN, and x's gradient is 0.
      reduction: ``"mean"``: ``sum(where * loss) / sum(where)``, or 0 if the denominator is 0;
        ``"sum"``: ``sum(where * loss)``; or ``"none"``: ``where * loss``, for each position.
      chunk: number of rows in a chunk, at least 1; on a mesh, this counts the rows of one device.
        None lets jaxnorm choose: all rows, if their logits take no more memory than a float32 array
        of weight's shape. Otherwise, a chunk has at most max(2048, d) rows. If the logits of such a
        chunk take more than 1 GiB, it has fewer rows, but at least 512. Besides the gradients, the
        function allocates two arrays: a chunk's logits, which are overwritten by their gradient,
        and the float32 array in which weight's gradient is summed over several chunks. With larger
        chunks, the float32 array is loaded and stored less often.
      label_smoothing: a Python number from 0 to 1: the fraction of the target probability that is
        spread evenly over all classes.
      z_loss: a finite Python number of at least 0. The loss gets an additional term: ``z_loss``
        times the square of the log-sum-exp of the logits.
      logits_scale, logit_softcap: applied to the logits after the bias is added, as in
        :func:`softmax_cross_entropy_with_integer_labels`. logits_scale may be an array.
      dtype: dtype of the logits; by default, the dtype to which x and weight promote. If ``dtype``
        has fewer bits than that, the operands of the matmuls are also cast to ``dtype``.
      implementation: name of the implementation that computes the loss of a chunk's logits; None
        lets jaxnorm choose. ``implementation_for("softmax_cross_entropy_with_integer_labels",
        (chunk, V), dtype)`` shows the choice.

    Returns:
      A scalar (by default the mean), or for ``"none"`` an array of labels' shape: float32, or
      float64 if the logits are float64.

    Differentiable with respect to x, weight and bias, in reverse and forward mode; gradients have
    the dtypes of their arguments. For a mean or a sum, the forward pass computes the gradients and
    saves only them, in these dtypes. float16 gradients are saved in float32 instead. The loss scale
    multiplies them only in the backward pass, and until then small gradients would underflow in
    float16. For policies of :func:`jax.checkpoint`, the gradients are named
    ``jaxnorm_linear_gradient``. :func:`save_policy` does not save them, because weight's gradient
    is as large as weight. With ``"none"``, the forward pass saves its operands.

    Three further cases are supported but take more matmuls: second-order derivatives, a `jax.vmap`
    over several weights, and a `jax.vmap` that returns a separate gradient of weight for each batch
    element.

    On a mesh, the rows, V and d may be sharded. If V is sharded, devices exchange row statistics in
    the loop. A weight that is sharded along d (FSDP) is gathered once, before the loop. If a mesh
    axis shards the rows of x and also V of weight, the smaller one of x and weight is gathered over
    this mesh axis. If x is sharded along d, an all-to-all before the loop gives each device
    complete rows. The gradients of x and weight are reduced over the devices once, after the loop.
    This is done in the dtype of the matmuls, as in plain JAX (for float16, in float32).

    Raises:
      TypeError: the dtype of x, weight or bias, or ``dtype``, is not a supported float dtype,
        labels are not integers, ``where`` has an integer dtype, ``chunk`` is not an integer,
        ``label_smoothing``, ``z_loss`` or ``logit_softcap`` is not a Python number, or
        ``logits_scale`` is differentiated.
      ValueError: the shape of an array, ``reduction``, ``chunk``, ``label_smoothing``, ``z_loss``,
        ``logits_scale``, ``logit_softcap`` or ``implementation`` is wrong.

    Source: Liger's `fused linear cross-entropy <https://arxiv.org/abs/2410.10989>`_ introduced the
    computation of gradients in the forward pass's loop over chunks.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, weight = jnp.ones((4, 128, 64), jnp.bfloat16), jnp.zeros((64, 1000), jnp.bfloat16)
      >>> labels = jnp.zeros((4, 128), jnp.int32)
      >>> gradient = jax.grad(jaxnorm.linear_softmax_cross_entropy, argnums=(0, 1))
      >>> dx, dweight = gradient(x, weight, labels, where=labels != -100)
      >>> dx.shape, dweight.shape
      ((4, 128, 64), (64, 1000))
    """
    return _of_labels(
        NAME,
        (x, weight, labels, bias, where, logits_scale, chunk, dtype),
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_softcap=logit_softcap,
        implementation=implementation,
    )[0]


def _of_labels(function: Function, arguments: tuple[Any, ...], **options: Any) -> list[jax.Array]:
    """Check the arguments of a public function that takes labels, and return its results.

    `arguments` are those that `_bound` takes, with labels. `options` are further arguments of
    `_bound`.
    """
    x, weight, labels, bias, where, *others = arguments
    x = checks.float_array(function, "x", x)
    weight = checks.float_array(function, "weight", weight)
    if x.ndim and weight.ndim == 2:
        logits = (*x.shape[:-1], weight.shape[1])
        checks.not_one_hot(function, labels, logits, (len(logits) - 1,))
    labels = checks.integer_array(function, "labels", labels)
    check_shapes(function, x, weight)
    is_several = function == _LOG_PROB and labels.ndim == x.ndim
    _check_labels(function, x, weight, labels, is_several=is_several)
    weights = None
    if where is not None:
        where = _where(function, where, x, weight, others[-1])
        if function == _LOG_PROB and where.dtype != bool:
            # The primitive's results are also residuals, and the derivative needs them before they
            # are multiplied by the weights. So the primitive does not take the weights, but a mask
            # of the positions with a nonzero weight. The code below multiplies the results of the
            # primitive by the weights.
            weights, where = where, counted(where)
    operands = {"candidates" if is_several else "labels": labels}
    candidates = labels.shape[-1] if is_several else None
    arguments = x, weight, bias, where, *others
    results = _bound(function, arguments, operands, candidates=candidates, **options)
    if weights is None:
        return results
    of_labels = weights[..., None] if is_several else weights
    return [weighted(results[0], of_labels), *(weighted(a, weights) for a in results[1:])]


def _bound(
    function: Function,
    arguments: tuple[Any, ...],
    operands: dict[str, jax.Array],
    *,
    reduction: Reduction = "none",
    teacher: tuple[np.dtype, np.dtype] | None = None,
    **options: Any,
) -> list[jax.Array]:
    """Check the remaining arguments of a public function, and return its results.

    Args:
      function: name of the public function.
      arguments: x, weight, bias, where, logits_scale, chunk and dtype. All but the last four are
        arrays that have been checked.
      operands: further operands of the loss of logits.
      reduction: the public function's argument.
      teacher: the dtypes of the teacher's matmul: of its operands and of its logits.
      options: further arguments of `loss_call`.
    """
    x, weight, bias, where, logits_scale, chunk, dtype = arguments
    checks.one_of(function, "reduction", reduction, get_args(Reduction))
    arrays = {"x": x, "weight": weight}
    if bias is not None:
        arrays["bias"] = bias_array(function, "bias", bias, weight)
    positions, classes = x.shape[:-1], weight.shape[1]
    dtypes = matmul_dtypes(function, asked_dtype(function, dtype), x.dtype, weight.dtype)
    wide = checks.arithmetic_dtype(*dtypes, *(teacher or ()))
    if where is not None and where.ndim < x.ndim:
        arrays["where"] = where
    arrays |= operands
    if where is not None and where.ndim == x.ndim:
        arrays["mask"] = where
    of = "labels'" if teacher is None else "positions'"
    scale = scales.of_logits(function, logits_scale, positions, wide, of=of)
    if scale.array is not None:
        arrays["logits_scale"] = scale.array
    loss = loss_call(
        function,
        (classes,),
        dtypes[1],
        of=OF_LOGITS[function],
        axis=-1,
        mask=(classes,) if "mask" in arrays else None,
        has_positions=False,
        teacher_dtype=None if teacher is None else teacher[1],
        logits_scale=scale.number,
        has_scale=scale.array is not None,
        **options,
    )
    head = LinearLossCall(
        function,
        Program(loss),
        tuple(arrays)[2:],
        tuple(name for name in ("x", "weight", "bias") if name in arrays),
        chunk=None if chunk is None else checks.integer(function, "chunk", chunk, "rows"),
        dtypes=dtypes,
        teacher=None if teacher is None else teacher[0],
        precision=jax.config.jax_default_matmul_precision,
        reduction=reduction,
    )
    if loss.implementation is not None:
        columns = classes if teacher is None else 2 * classes
        of_weight = weight.shape[0], columns
        rows = chunk_rows(head.chunk, math.prod(positions), of_weight, dtypes[1], dtypes[0])
        options = {"mask": 1, "has_positions": "where" in arrays}
        loss_of_rows(loss, (rows, classes), **options).forced(loss.implementation)
    return linear_loss_primitive.bind(head, *arrays.values())


def asked_dtype(function: str, dtype: DTypeLike | None) -> np.dtype | None:
    """Check the argument ``dtype``."""
    return None if dtype is None else checks.dtype(function, "dtype", dtype)


def bias_array(function: str, name: str, value: ArrayLike, weight: jax.Array) -> jax.Array:
    """Convert a bias to an array, and check that it has an element for each class of `weight`."""
    bias = checks.float_array(function, name, value)
    why = f"a number for each class of weight {weight.shape}"
    checks.same_shape(function, name, bias.shape, weight.shape[1:], why)
    return bias


def _where(
    function: Function, where: ArrayLike, x: jax.Array, weight: jax.Array, dtype: DTypeLike | None
) -> jax.Array:
    """Check the argument ``where`` of a function that takes labels.

    The result has the axes of x if it is a mask of classes. Otherwise, it is a boolean mask of
    positions or float weights of positions, broadcast to ``x.shape[:-1]``.
    """
    of_labels = x.shape[:-1]
    if function == NAME:
        _refuse_classes(where, x.shape, weight.shape[1])
    dtypes = matmul_dtypes(function, asked_dtype(function, dtype), x.dtype, weight.dtype)
    array = checks.weights(function, "where", where, checks.arithmetic_dtype(*dtypes))
    if function != NAME and array.ndim == x.ndim:
        also = ", or give weights of positions the axes of x without the last one"
        array = checks.boolean(function, "where", where, also)
        shape = (*of_labels, weight.shape[1])
        return checks.broadcastable(function, "where", array, shape, "logits'")
    if not checks.fits(array.shape, of_labels):
        takes_mask = function != NAME and array.dtype == bool
        logits = [(*of_labels, weight.shape[1])] if takes_mask else []
        classes = "" if function == NAME else f", or {x.ndim} axes: which classes there are"
        raise ValueError(
            f"{function}: where has shape {array.shape}; expected one that broadcasts to labels' "
            f"shape {of_labels}, with {len(of_labels)} axes: which positions count"
            f"{', or how much' if function == NAME else classes}"
            f"{checks.reshaping('where', array.shape, of_labels, *logits)}"
        )
    return jnp.broadcast_to(array, of_labels)


def _refuse_classes(where: ArrayLike, x: tuple[int, ...], classes: int) -> None:
    """Raise ValueError if `where` has the shape of a mask of classes.

    linear_softmax_cross_entropy does not support such a mask.
    """
    shape: tuple[int, ...] = getattr(where, "shape", ())
    if len(shape) != len(x) or shape[-1] != classes or classes == 1:
        return
    of_all = math.prod(shape) == classes
    bias = "add it to the bias, e.g. bias=jnp.where(where.reshape(-1), 0, -jnp.inf), or "
    raise ValueError(
        f"{NAME}: where has shape {shape}, with the axis of the classes, as a mask of classes has; "
        f"expected one that broadcasts to labels' shape {x[:-1]}, for positions, because this "
        f"function takes no mask of classes; {bias if of_all else ''}use "
        "-jaxnorm.linear_log_prob_and_entropy(x, weight, labels, where=where)[0], which takes one"
    )


def of_positions(
    function: str, where: ArrayLike, positions: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """Check ``where``, a mask or weights of positions, and broadcast it to their shape.

    Weights are cast to `dtype`.
    """
    array = checks.weights(function, "where", where, dtype)
    if not checks.fits(array.shape, positions):
        raise ValueError(
            f"{function}: where has shape {array.shape}; expected one that broadcasts to the "
            f"positions' shape {positions}, with {len(positions)} axes: which positions "
            f"count, or how much{checks.reshaping('where', array.shape, positions)}"
        )
    return jnp.broadcast_to(array, positions)


def check_shapes(function: str, x: jax.Array, weight: jax.Array, of: str = "") -> None:
    """Raise ValueError unless x and weight have the shapes of a matmul's operands.

    `of` is a prefix, such as "teacher_", of both arrays' names in errors.
    """
    checks.features(function, f"{of}x", x.shape, "d")
    if not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):
        raise ValueError(
            f"{function}: {of}x has shape {x.shape} and {of}weight {weight.shape}; expected sizes "
            "that are numbers, because chunks of rows are cut when the call is traced; export one "
            "program for each size"
        )
    checks.weight(function, weight.shape, x.shape, of=f"{of}x", classes=True)


def _check_labels(
    function: Function, x: jax.Array, weight: jax.Array, labels: jax.Array, *, is_several: bool
) -> None:
    positions = x.shape[:-1]
    if labels.shape[: len(positions)] != positions or labels.ndim > len(positions) + is_several:
        several = f", or {positions} and an axis of several labels" if function == _LOG_PROB else ""
        why = f"the shape of x {x.shape} without its last axis{several}"
        checks.same_shape(function, "labels", labels.shape, positions, why)
    if is_several:
        checks.fewer_than_classes(function, labels.shape, weight.shape[1])


_LOG_PROB: Function = "linear_log_prob_and_entropy"


@eager.compiled("x", "weight", "labels", "bias", "where", either=("logits_scale",))
def linear_log_prob_and_entropy(
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    logits_scale: ArrayLike = 1.0,
    logit_softcap: float | None = None,
    chunk: int | None = None,
    dtype: DTypeLike | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Log-probabilities and entropies of ``x @ weight + bias``, without storing all logits.

    The logits are ``x @ weight + bias``. Only the logits of one chunk of rows are in memory at a
    time. The results are the same as for :func:`log_prob_and_entropy`, with one difference: a
    chunk's logits are the float32 sums of the matmul, without rounding. If they were rounded to
    bfloat16, probability ratios :math:`e^{\log p' - \log p}` would have errors of several percent.

    The forward pass takes one matmul. The backward pass takes three: one recomputes the logits, and
    two compute the gradients of x and weight. The residuals are x, weight and three numbers for
    each position.

    Args:
      x: array (..., d) with any number of rows; bfloat16, float16, float32 or float64. Each row is
        a position.
      weight: array (d, V); any of these dtypes.
      labels: class indices from 0 to V - 1, integers of any dtype, of x's shape without its last
        axis. If a label is out of range, such as a negative one, its log-probability is NaN, but
        the entropy is not affected. The gradients are then NaN, unless the cotangent of this
        log-probability is 0. Labels may have one more axis at the end, for k labels of each
        position, as in :func:`log_prob_and_entropy`.
      bias: array (V,), any of these dtypes; or None.
      where: None, or one of three kinds of arrays:

        - A boolean mask of positions, such as ``labels != -100``. It has one axis less than x, and
          broadcasts to ``x.shape[:-1]``. Where it is False, label and x are ignored, and both
          results and x's gradient are 0.
        - Float weights of positions. The rule for their shape is the same as for such a mask. Both
          results are multiplied by the weights. A weight of 0 has the same effect as False in a
          mask.
        - A boolean mask of classes. It has as many axes as x, and broadcasts to ``(..., V)``. Its
          effect is the same as in :func:`log_prob_and_entropy`.
      logits_scale, logit_softcap: applied to the logits after the bias is added, as in
        :func:`softmax_cross_entropy_with_integer_labels`.
      chunk: number of rows in a chunk, at least 1; on a mesh, this counts the rows of one device.
        None lets jaxnorm choose as :func:`linear_softmax_cross_entropy` does for float32 logits.
      dtype: dtype to which x and weight are cast if they promote to a wider dtype. For example,
        ``jnp.bfloat16`` rounds a float32 weight, so that the matmuls run in bfloat16. With None,
        they are cast to the dtype to which they promote.
      implementation: name of the implementation that computes log_prob and entropy from a chunk's
        logits; None lets jaxnorm choose. ``implementation_for("log_prob_and_entropy", (chunk, V),
        jnp.float32)`` shows the choice.

    Returns:
      (log_prob, entropy): log_prob has labels' shape, and entropy the shape of x without its last
      axis. Both are float32, or float64 for float64 matmuls.

    Differentiable with respect to x, weight and bias, in reverse and forward mode, to any order;
    gradients have the dtypes of their arguments. The gradient of a chunk's logits is rounded to the
    matmuls' dtype; the gradient of weight is summed in float32 over all chunks.

    On a mesh, the rows, V and d may be sharded, as in :func:`linear_softmax_cross_entropy`.

    Raises:
      TypeError: the dtype of x, weight or bias, or ``dtype``, is not a supported float dtype,
        labels are not integers, ``where`` has an integer dtype or is a mask of classes that is not
        boolean, ``chunk`` is not an integer, ``logit_softcap`` is not a Python number, or
        ``logits_scale`` is differentiated.
      ValueError: the shape of an array, ``chunk``, ``logits_scale``, ``logit_softcap`` or
        ``implementation`` is wrong.

    Use: the losses of `GRPO <https://arxiv.org/abs/2402.03300>`_, `PPO
    <https://arxiv.org/abs/1707.06347>`_ and `DPO <https://arxiv.org/abs/2305.18290>`_ are computed
    from log-probabilities, and some of these losses also use entropies.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, weight = jnp.ones((4, 128, 64), jnp.bfloat16), jnp.zeros((64, 1000), jnp.bfloat16)
      >>> tokens = jnp.zeros((4, 128), jnp.int32)
      >>> log_prob, entropy = jaxnorm.linear_log_prob_and_entropy(x, weight, tokens)
      >>> log_prob.shape, log_prob.dtype.name, round(float(entropy[0, 0]), 2)
      ((4, 128), 'float32', 6.91)
    """
    log_prob, entropy = _of_labels(
        _LOG_PROB,
        (x, weight, labels, bias, where, logits_scale, chunk, dtype),
        logit_softcap=logit_softcap,
        implementation=implementation,
    )
    return log_prob, entropy


_KL: Function = "linear_kl_divergence"


@eager.compiled(
    *("x", "weight", "teacher_x", "teacher_weight", "bias", "teacher_bias", "where"),
    either=("logits_scale",),
)
def linear_kl_divergence(
    x: ArrayLike,
    weight: ArrayLike,
    teacher_x: ArrayLike,
    teacher_weight: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    teacher_bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    reduction: Reduction = "mean",
    reverse: bool = False,
    chunk: int | None = None,
    logits_scale: ArrayLike = 1.0,
    logit_softcap: float | None = None,
    teacher_logit_softcap: float | None = None,
    dtype: DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Kullback-Leibler divergence of two linear layers' outputs, without storing all logits.

    The student's logits are ``x @ weight + bias``, and the teacher's logits are ``teacher_x @
    teacher_weight + teacher_bias``. The result is the mean, the sum or the array of the divergences
    that :func:`kl_divergence` computes. By default, the function returns the mean; masks and
    weights go into ``where``, because a mask that multiplies the mean cancels out. Only the logits
    of one chunk of rows are in memory at a time, in the forward and in the backward pass. One loop
    over the chunks computes the divergence and, if it is differentiated, the gradients.

    A divergence that is not differentiated takes two matmuls: one for the student's logits, and one
    for the teacher's. If it is differentiated, two more matmuls compute the gradients of x and
    weight, so a mean or a sum takes four matmuls. ``reduction="none"`` takes six, because the
    backward pass recomputes both arrays of logits.

    The operands of a matmul are cast to the dtype to which they promote, as in ``jnp.matmul``. A
    chunk's logits are the float32 sums of the matmuls, without rounding.

    Args:
      x: the student's activations, (..., d) with any number of rows; bfloat16, float16, float32 or
        float64. Each row is a position.
      weight: array (d, V); any of these dtypes.
      teacher_x: the teacher's activations, (..., e). All axes but the last have the same sizes as
        in x; e may differ from d.
      teacher_weight: array (e, V). The teacher's arrays are constants: their gradient is 0.
      bias, teacher_bias: arrays (V,), any of these dtypes; or None.
      where: None, or a boolean mask of positions, or float weights of positions (which have no
        gradient). The array has one axis less than x, and broadcasts to ``x.shape[:-1]``. Where it
        is False or 0, x and teacher_x are ignored, even if they are NaN, and x's gradient is 0.
      reduction: ``"mean"``: ``sum(where * divergence) / sum(where)``, or 0 if the denominator is 0;
        ``"sum"``: ``sum(where * divergence)``; or ``"none"``: ``where * divergence``, for each
        position.
      reverse: True for KL(q || p) instead of KL(p || q), as in :func:`kl_divergence`.
      chunk: number of rows in a chunk, at least 1; on a mesh, this counts the rows of one device.
        None lets jaxnorm choose, with the same limits as in :func:`linear_softmax_cross_entropy`.
        Its limit of 1 GiB applies here to the float32 logits of the student and the teacher
        together.
      logits_scale, logit_softcap, teacher_logit_softcap: applied to the logits after the bias is
        added, as in :func:`kl_divergence`. logits_scale may be an array.
      dtype: dtype to which the operands of a matmul are cast if they promote to a wider dtype. For
        example, ``jnp.bfloat16`` rounds float32 weights, so that the matmuls run in bfloat16. With
        None, the operands have the dtype to which they promote.
      implementation: name of the implementation that computes the divergence of a chunk's logits;
        None lets jaxnorm choose. ``implementation_for("kl_divergence", (chunk, V), jnp.float32)``
        shows the choice.

    Returns:
      A scalar (by default the mean), or for ``"none"`` an array of the shape of x without the last
      axis: float32, or float64 if the operands of a matmul promote to float64.

    Differentiable with respect to x, weight and bias, in reverse and forward mode, to any order;
    gradients have the dtypes of their arguments. The forward pass saves the same arrays as that of
    :func:`linear_softmax_cross_entropy`. As in that function, the rows and the axes V and d may be
    sharded over a mesh. If the axis e is sharded, teacher_x and teacher_weight are gathered along
    it.

    Raises:
      TypeError: the dtype of an array, or ``dtype``, is not a supported float dtype, ``where`` has
        an integer dtype, ``chunk`` is not an integer, ``reverse`` is neither True nor False, a
        softcap is not a Python number, or ``logits_scale`` is differentiated.
      ValueError: the shape of an array, ``reduction``, ``chunk``, ``logits_scale``, a softcap, or
        ``implementation`` is wrong.

    Source: Liger's `fused linear losses <https://arxiv.org/abs/2410.10989>`_ introduced the
    computation of gradients in the forward pass's loop over chunks.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, weight = jnp.ones((4, 128, 64)), jnp.zeros((64, 1000))
      >>> teacher_x, teacher_weight = jnp.ones((4, 128, 96)), jnp.zeros((96, 1000))
      >>> gradient = jax.grad(jaxnorm.linear_kl_divergence, argnums=(0, 1))
      >>> dx, dweight = gradient(x, weight, teacher_x, teacher_weight, logits_scale=1 / 2)
      >>> dx.shape, dweight.shape
      ((4, 128, 64), (64, 1000))
    """
    x = checks.float_array(_KL, "x", x)
    weight = checks.float_array(_KL, "weight", weight)
    teacher_x = checks.float_array(_KL, "teacher_x", teacher_x)
    teacher_weight = checks.float_array(_KL, "teacher_weight", teacher_weight)
    check_shapes(_KL, x, weight)
    check_shapes(_KL, teacher_x, teacher_weight, of="teacher_")
    positions = x.shape[:-1]
    if teacher_x.shape[:-1] != positions:
        expected = (*positions, teacher_x.shape[-1])
        why = f"the positions of x {x.shape} by its own number of features"
        checks.same_shape(_KL, "teacher_x", teacher_x.shape, expected, why)
    if teacher_weight.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{_KL}: teacher_weight has shape {teacher_weight.shape}; expected "
            f"({teacher_weight.shape[0]}, {weight.shape[1]}), the classes of weight "
            f"{weight.shape}; slice the weight with more classes, or pad the other one and its bias"
        )
    operands = {"teacher_x": teacher_x, "teacher_weight": teacher_weight}
    if teacher_bias is not None:
        operands["teacher_bias"] = bias_array(_KL, "teacher_bias", teacher_bias, weight)
    asked = asked_dtype(_KL, dtype)
    teacher = matmul_dtypes(_KL, asked, teacher_x.dtype, teacher_weight.dtype)
    if where is not None:
        student = matmul_dtypes(_KL, asked, x.dtype, weight.dtype)
        wide = checks.arithmetic_dtype(*student, *teacher)
        where = of_positions(_KL, where, positions, wide)
    return _bound(
        _KL,
        (x, weight, bias, where, logits_scale, chunk, dtype),
        jax.lax.stop_gradient(operands),
        reduction=reduction,
        teacher=teacher,
        logit_softcap=logit_softcap,
        teacher_softcap=teacher_logit_softcap,
        reverse=reverse,
        implementation=implementation,
    )[0]
