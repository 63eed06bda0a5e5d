"""Cross-entropy, log-probability and divergence of a linear layer, without storing all logits.

The module `linear_loss_any` computes any other loss. The public functions of both modules share
`layer_of`, which checks the operands of the matmul, and `bound`, which binds the primitives.
"""

from typing import Any, get_args

import jax
import numpy as np

from jaxnorm.calls.rows import RowView
from jaxnorm.operations import checks, linear_loss_primitive
from jaxnorm.operations.checks import ArrayLike, DTypeLike
from jaxnorm.operations.linear_loss_call import (
    OF_LOGITS,
    Function,
    LinearLossCall,
    Program,
    Reduction,
    chunks_of,
    is_inexact,
    loss_of_rows,
    matmul_dtypes,
)
from jaxnorm.operations.loss import checked_call, weighted
from jaxnorm.primitives import eager
from jaxnorm_kernels.specs import LossOptions, Name

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
    :func:`softmax_cross_entropy_with_integer_labels` computes. By default, it is the mean. Pass
    masks and weights as ``where``: the mean is a scalar, so multiplying it by a mask excludes no
    position. One loop over the chunks computes the loss and, if it is differentiated, the
    gradients.

    A loss that is not differentiated takes one matmul, which computes the logits. If it is
    differentiated, two more matmuls compute the gradients of x and weight, so a mean or a sum takes
    three matmuls. ``reduction="none"`` takes four, because the backward pass recomputes the logits.

    The dtype of the matmuls' operands is the one to which x and weight promote, as in
    ``jnp.matmul``. With a float32 weight, all three matmuls are therefore in float32, unless
    ``dtype=jnp.bfloat16`` rounds the weight. A chunk's logits are rounded to ``dtype`` (by default,
    to the dtype of the operands, like the result of ``x @ weight``). bias is added to the rounded
    logits. The gradient of the logits is rounded to the dtype of the matmuls' operands. Sums over
    classes and row statistics are float32 (float64 for float64 logits). The gradient of weight is
    summed over the chunks in float32 as well. For a mean, the gradient of the logits is divided by
    the denominator before it is rounded: by ``sum(where)``, or without ``where`` by the number of
    rows. In float16, small quotients would underflow. Therefore, a power of two is factored out of
    each row before it is rounded, and is applied in float32 to the gradients of x and weight.

    Args:
      x: array (..., d) with any number of rows; bfloat16, float16, float32 or float64. Each row is
        a position.
      weight: array (d, V); any of these dtypes.
      labels: class indices from 0 to V - 1, integers of any dtype, of x's shape without its last
        axis. A label out of range, such as a negative one, makes the loss and the gradients NaN.
      bias: array (V,), any of these dtypes; or None.
      where: None, or a boolean mask of positions (such as ``labels != -100``), or float weights of
        positions (which may be negative, and have no gradient). This array has the same number of
        axes as labels, and broadcasts to their shape. Where it is False or 0, label and x are
        ignored, even if x is NaN, and x's gradient is 0.
      reduction: ``"mean"``: ``sum(where * loss) / sum(where)``, or 0 if the denominator is 0;
        ``"sum"``: ``sum(where * loss)``; or ``"none"``: ``where * loss``, for each position.
      chunk: number of rows in a chunk, at least 1; on a mesh, this counts the rows of one device.
        None lets jaxnorm choose. For a bfloat16 weight, a chunk has all rows if their logits take
        no more memory than a float32 array of weight's shape. Otherwise, a chunk has at most
        max(2048, d) rows. If the logits of such a chunk take more than 1 GiB, it has fewer rows,
        but at least 512. Besides the gradients, the function allocates two arrays: a chunk's
        logits, which are overwritten by their gradient, and the float32 array in which weight's
        gradient is summed over several chunks. With larger chunks, the float32 array is loaded and
        stored less often.
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
    the dtypes of their arguments. For a mean or a sum, the forward pass computes the gradients, and
    saves only the gradients, in these dtypes. float16 gradients are saved in float32 instead: the
    loss scale multiplies them only in the backward pass, and before that, small ones would
    underflow in float16. For policies of :func:`jax.checkpoint`, the gradients are named
    ``jaxnorm_linear_gradient``. :func:`save_policy` does not save them, because weight's gradient
    is as large as weight. With ``"none"``, the forward pass saves its operands.

    Three cases are supported, but take more matmuls: second-order derivatives, a `jax.vmap` over
    several weights, and a `jax.vmap` that returns a separate gradient of weight for each batch
    element.

    On a mesh, the rows, V and d may be sharded. If V is sharded, devices exchange row statistics in
    the loop. A weight that is sharded along d (FSDP) is gathered once, before the loop. If a mesh
    axis shards the rows of x and also V of weight, the smaller one of x and weight is gathered over
    this mesh axis. If x is sharded along d, an all-to-all before the loop gives each device
    complete rows. The gradients of x and weight are reduced over the devices once, after the loop.
    This reduction is done in the dtype of the matmuls, as in plain JAX (for float16, in float32).

    Raises:
      TypeError: the dtype of x, weight or bias is not a supported float dtype; ``dtype`` is not
        one; labels are not integers; ``where`` has an integer dtype; ``chunk`` is not an integer;
        ``label_smoothing``, ``z_loss`` or ``logit_softcap`` is not a Python number;
        ``logits_scale`` is differentiated.
      ValueError: the shape of an array is wrong; ``reduction``, ``chunk``, ``label_smoothing``,
        ``z_loss``, ``logits_scale``, ``logit_softcap`` or ``implementation`` is wrong.

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
    layer, others = layer_of(NAME, x, weight, bias, dtype), (where, logits_scale, reduction, chunk)
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    options |= {"logit_softcap": logit_softcap, "implementation": implementation}
    return _of_loss(NAME, layer, {"labels": labels}, others, **options)[0]


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
        - Float weights of positions. The rule for their shape is the same as for a mask of
          positions. Both results are multiplied by the weights. A weight of 0 has the same effect
          as False in a mask.
        - A boolean mask of classes. It has the same number of axes as x, and broadcasts to ``(...,
          V)``. Its effect is the same as in :func:`log_prob_and_entropy`.
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
      TypeError: the dtype of x, weight or bias is not a supported float dtype; ``dtype`` is not
        one; labels are not integers; ``where`` has an integer dtype; a mask of classes is not
        boolean; ``chunk`` is not an integer; ``logit_softcap`` is not a Python number;
        ``logits_scale`` is differentiated.
      ValueError: the shape of an array is wrong; ``chunk``, ``logits_scale``, ``logit_softcap`` or
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
    layer, others = (
        layer_of(_LOG_PROB, x, weight, bias, dtype),
        (where, logits_scale, "none", chunk),
    )
    options: dict[str, Any] = {"logit_softcap": logit_softcap, "implementation": implementation}
    log_prob, entropy = _of_loss(_LOG_PROB, layer, {"labels": labels}, others, **options)
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
    that :func:`kl_divergence` computes. By default, it is the mean. Pass masks and weights as
    ``where``: the mean is a scalar, so multiplying it by a mask excludes no position. Only the
    logits of one chunk of rows are in memory at a time, in the forward and in the backward pass.
    One loop over the chunks computes the divergence and, if it is differentiated, the gradients.

    A divergence that is not differentiated takes two matmuls: one for the student's logits, and one
    for the teacher's. If it is differentiated, two more matmuls compute the gradients of x and
    weight, so a mean or a sum takes four matmuls. ``reduction="none"`` takes six, because the
    backward pass recomputes both arrays of logits.

    The two operands of each matmul are cast to the dtype to which they promote, as in
    ``jnp.matmul``. A chunk's logits are the float32 sums of the matmuls, without rounding.

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
    gradients have the dtypes of their arguments. The forward pass saves the same arrays as in
    :func:`linear_softmax_cross_entropy`. As in that function, the rows and the axes V and d may be
    sharded over a mesh. If the axis e is sharded, teacher_x and teacher_weight are gathered along
    it.

    Raises:
      TypeError: the dtype of an array is not a supported float dtype; ``dtype`` is not one;
        ``where`` has an integer dtype; ``chunk`` is not an integer; ``reverse`` is neither True nor
        False; a softcap is not a Python number; ``logits_scale`` is differentiated.
      ValueError: the shape of an array is wrong; ``reduction``, ``chunk``, ``logits_scale``, a
        softcap or ``implementation`` is wrong.

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
    layer = layer_of(_KL, x, weight, bias, dtype)
    teacher, dtypes = layer_of(_KL, teacher_x, teacher_weight, teacher_bias, dtype, of="teacher_")
    (*positions, _), (*given, e) = layer[0]["x"].shape, teacher["teacher_x"].shape
    if given != positions:
        why = f"the positions of x {layer[0]['x'].shape} by its own number of features"
        checks.same_shape(_KL, "teacher_x", (*given, e), (*positions, e), why)
    of_teacher, of_weight = teacher["teacher_weight"].shape, layer[0]["weight"].shape
    if of_teacher[1] != of_weight[1]:
        raise ValueError(
            f"{_KL}: teacher_weight has shape {of_teacher}; expected ({e}, {of_weight[1]}), the "
            f"classes of weight {of_weight}; slice the weight with more classes, or pad the other "
            "one and its bias"
        )
    others = where, logits_scale, reduction, chunk
    options: dict[str, Any] = {"logit_softcap": logit_softcap, "implementation": implementation}
    options |= {"teacher_softcap": teacher_logit_softcap, "reverse": reverse}
    return _of_loss(_KL, layer, jax.lax.stop_gradient(teacher), others, dtypes, **options)[0]


#: The description of a linear layer: a dict from names to operands, and a pair of dtypes. The first
#: is the dtype of the matmul's operands, and the second is the dtype of the logits.
Layer = tuple[dict[str, jax.Array], tuple[np.dtype, np.dtype]]


def layer_of(
    function: Function, x: Any, weight: Any, bias: Any, dtype: DTypeLike | None, of: str = ""
) -> Layer:
    """Check the operands of a linear layer, and return the `Layer`.

    `of` is the prefix of the operands' names: "teacher_" or "". `dtype` is the public function's
    argument.
    """
    x = checks.float_array(function, f"{of}x", x)
    weight = checks.float_array(function, f"{of}weight", weight)
    checks.features(function, f"{of}x", x.shape, "d")
    if not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):
        raise ValueError(
            f"{function}: {of}x has shape {x.shape} and {of}weight {weight.shape}; expected sizes "
            "that are numbers, because chunks of rows are cut when the call is traced; export one "
            "program for each size"
        )
    checks.weight(function, weight.shape, x.shape, of=f"{of}x", classes=True)
    arrays = {f"{of}x": x, f"{of}weight": weight}
    if bias is not None:
        arrays[f"{of}bias"] = bias = checks.float_array(function, f"{of}bias", bias)
        why = f"a number for each class of {of}weight {weight.shape}"
        checks.same_shape(function, f"{of}bias", bias.shape, weight.shape[1:], why)
    asked = None if dtype is None else checks.dtype(function, "dtype", dtype)
    return arrays, matmul_dtypes(function, asked, x.dtype, weight.dtype)


def _of_loss(
    function: Function,
    layer: Layer,
    operands: dict[str, Any],
    arguments: tuple[Any, ...],
    teacher: tuple[np.dtype, ...] = (),
    *,
    implementation: Name | None,
    **options: Any,
) -> list[jax.Array]:
    """Return the results of a linear loss: any of the public functions except `linear_loss`.

    The arguments in `layer` and `teacher` are already checked. This function checks the other
    arguments.

    Args:
      function: name of the public function.
      layer: the linear layer.
      operands: a dict of the operands that not all functions have: labels, or the teacher's layer.
      arguments: the public function's ``where``, ``logits_scale``, ``reduction`` and ``chunk``, in
        this order.
      teacher: the dtype of the operands of the teacher's matmul, and the dtype of its result; `()`
        without a teacher.
      implementation: the public function's argument.
      options: fields of `LossOptions`.
    """
    (arrays, dtypes), (where, logits_scale, reduction, chunk) = layer, arguments
    x, classes, is_log_prob = arrays["x"], arrays["weight"].shape[1], function == _LOG_PROB
    loss, checked, weights = checked_call(
        function,
        LossOptions(**options, teacher_dtype=teacher[1] if teacher else None),
        RowView.of((*x.shape[:-1], classes), (x.ndim - 1,)),
        dtypes[1],
        *(where, logits_scale, implementation),
        labels=operands.pop("labels", None),
        why=f"the shape of x {x.shape} without its last axis",
        of=OF_LOGITS[function],
        takes_classes=is_log_prob,
    )
    of_mask = (classes,) if loss.view.mask else ()
    of_one = RowView.of((classes,), (0,), mask=of_mask, candidates=loss.view.candidates)
    # The primitive's log-probabilities are also residuals, and the derivative needs them before
    # they are multiplied by the weights. So the primitive takes a mask of the positions with a
    # nonzero weight, and the weights multiply the primitive's results below.
    positions = checked.pop("positions")
    operands = {"where": positions if is_log_prob else weights} | operands | checked
    program = Program(loss.with_view(of_one))
    results = bound(function, layer, program, operands, reduction, chunk, *teacher[:1])
    return [weighted(a, weights) for a in results] if is_log_prob else results


def bound(
    function: Function,
    layer: Layer,
    program: Program,
    others: dict[str, jax.Array | None],
    reduction: Reduction,
    chunk: int | None,
    teacher: np.dtype | None = None,
) -> list[jax.Array]:
    """Bind the primitive of a linear loss, and return its results.

    `others` maps names to the operands that are not in `layer`; absent ones are None. `teacher` is
    the dtype of the operands of the teacher's matmul, if there is a teacher.
    """
    checks.one_of(function, "reduction", reduction, get_args(Reduction))
    arrays = layer[0] | {name: a for name, a in others.items() if a is not None}
    traced = [n for n in arrays if n.startswith(("row", "shared")) and is_inexact(arrays[n])]
    head = LinearLossCall(
        function,
        program,
        tuple(arrays),
        (*layer[0], *traced),
        chunk=None if chunk is None else checks.integer(function, "chunk", chunk, "rows"),
        dtypes=layer[1],
        teacher=teacher,
        precision=jax.config.jax_default_matmul_precision,
        reduction=reduction,
    )
    loss = program.loss
    if loss is not None and loss.implementation is not None:
        d, classes = arrays["weight"].shape
        copies = 1 if loss.spec.loss.teacher_dtype is None else 2
        sizes = arrays["x"].size // max(d, 1), (d, classes), head.dtypes[::-1]
        rows, _ = chunks_of(head.chunk, *sizes, copies=copies)
        call = loss_of_rows(loss, (rows, classes), 1, has_positions="where" in arrays)
        call.check_implementation()
    return linear_loss_primitive.bind(head, *arrays.values())
