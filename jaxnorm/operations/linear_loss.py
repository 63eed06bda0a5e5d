"""linear_softmax_cross_entropy and linear_log_prob_and_entropy: public functions, and checks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.calls import backends
from jaxnorm.operations import checks, linear_loss_call, linear_loss_primitive
from jaxnorm.operations.linear_loss_call import Function, LinearLossCall, Reduction, chunk_rows
from jaxnorm.operations.loss import check_numbers, softcap
from jaxnorm.primitives import eager
from jaxnorm_kernels.specs import Name

NAME: Function = "linear_softmax_cross_entropy"

_REDUCTIONS = ("mean", "sum", "none")


@eager.compiled("x", "weight", "labels", "bias", "where")
def linear_softmax_cross_entropy(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    labels: checks.ArrayLike,
    *,
    bias: checks.ArrayLike | None = None,
    where: checks.ArrayLike | None = None,
    reduction: Reduction = "mean",
    chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_scale: float = 1.0,
    logit_softcap: float | None = None,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Cross-entropy of the logits ``x @ weight + bias`` and integer labels, without these logits.

    They exist for a chunk of rows at a time. It is
    :func:`softmax_cross_entropy_with_integer_labels` of the logits, reduced. One loop over the
    chunks makes the loss and, where it is differentiated, the gradients: a mean or a sum takes
    three matrix products (logits, and the gradients of x and weight), ``reduction="none"`` four,
    because its backward makes the logits again. What is not differentiated takes one.

    Products are of the dtype to which x and weight promote, as in ``jnp.matmul``: a float32 weight
    makes three products in float32, unless ``dtype=jnp.bfloat16`` rounds it. A chunk's logits are
    rounded to that dtype, as those of ``x @ weight`` are, with bias added in it; sums and
    statistics are float32 (float64 for float64), and so is the one array in which weight's gradient
    is accumulated over all chunks. Gradients are divided by the number of rows in float32, too.

    Args:
      x: array (..., d) of any number of rows; bfloat16, float16, float32 or float64.
      weight: array (d, V), of these dtypes.
      labels: integers of any dtype, of x's shape without its last axis: which of the V classes. One
        that is none, a negative one too, makes the loss NaN, and gradients.
      bias: array (V,), of these dtypes; or None.
      where: booleans or float weights that broadcast to labels' shape, with as many axes: which
        positions count, for example ``labels != -100``, or how much, of any sign, without a
        gradient. Where it is False or 0 neither label nor x matters, not even NaN, and x's gradient
        is 0.
      reduction: ``"mean"`` over the positions that count, or sum(where * loss) / sum(where), 0 if
        that is 0; ``"sum"``; or ``"none"`` for the loss of each position, times its weight.
      chunk: rows of x at a time, at least 1; on a mesh, of a device's rows. None chooses: 2048, or
        d where that is more, or fewer, down to 512, where the logits of as many take more than
        1 GiB. Beside weight's gradient, memory is the float32 array for its sum, and a chunk's
        logits, whose place their gradient takes. A larger chunk reads and writes that array less
        often.
      label_smoothing: a Python number from 0 to 1, the share of the targets that is spread evenly
        over all classes.
      z_loss: a finite Python number of at least 0: z_loss times the square of the log of the sum of
        the exponentials is added.
      logits_scale, logit_softcap: of logits with bias, as in
        :func:`softmax_cross_entropy_with_integer_labels`.
      dtype: of the logits, and of the factors of all products where those promote to a wider one.
        None for what they promote to.
      implementation: of the loss of a chunk's logits; None chooses, a name forces it. What is
        chosen, ``implementation_for("softmax_cross_entropy_with_integer_labels", (chunk, V),
        dtype)`` says.

    Returns:
      A scalar, or for ``"none"`` an array of labels' shape: float32, or float64 where the logits
      are.

    Differentiable with respect to x, weight and bias, in reverse and forward mode; gradients have
    the dtypes of what they are of. The forward pass of a mean or a sum keeps the gradients, in
    these dtypes, but those of float16 in float32, because only the backward knows by what loss
    scaling multiplies them. They are named ``jaxnorm_linear_gradient`` for policies of
    :func:`jax.checkpoint` (:func:`save_policy` does not keep them: they are of weight's size), and
    nothing else is kept; that of ``"none"`` keeps its operands.
    Derivatives of second order, and what `jax.vmap` makes of a batch of weights or of gradients
    of weight inside it, are right, but are made by more products.

    On a mesh rows, V and d may be split. Devices with shards of V exchange statistics of rows in
    the loop. A weight in shards of d (FSDP) is gathered once, before the loop. Over mesh axes that
    split both rows and V, weight or x is gathered, whichever is smaller. Devices with shards of x
    along d share the rows out. Gradients of x and weight are summed over devices once, after the
    loop, and in the dtype of the products, as in plain JAX (float16: in float32).

    Raises:
      TypeError: x, weight or bias is not of a supported float dtype, or ``dtype`` is none, labels
        are no integers, ``where`` is of integers, ``chunk`` is no integer, or ``label_smoothing``,
        ``z_loss``, ``logits_scale`` or ``logit_softcap`` is no Python number.
      ValueError: the shape of an array, ``reduction``, ``chunk``, one of these numbers or
        ``implementation`` is wrong.

    Source: gradients made in the forward's loop over chunks are the idea of Liger's
    `fused linear cross-entropy <https://arxiv.org/abs/2410.10989>`_.

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
    checks.one_of(NAME, "reduction", reduction, _REDUCTIONS)
    return of_linear_logits(
        NAME,
        x,
        weight,
        labels,
        bias,
        where,
        chunk,
        dtype,
        logits_scale,
        logit_softcap,
        implementation,
        reduction=reduction,
        label_smoothing=checks.number(
            NAME, "label_smoothing", label_smoothing, minimum=0, maximum=1
        ),
        z_loss=checks.number(NAME, "z_loss", z_loss, minimum=0),
    )[0]


def of_linear_logits(
    function: Function,
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    labels: checks.ArrayLike,
    bias: checks.ArrayLike | None,
    where: checks.ArrayLike | None,
    chunk: int | None,
    dtype: checks.DTypeLike | None,
    logits_scale: float,
    logit_softcap: float | None,
    implementation: Name | None,
    **options: Any,
) -> list[jax.Array]:
    """The results of a function of linear logits, after the checks.

    `options`: fields of `LinearLossCall`.
    """
    x = checks.float_array(function, "x", x)
    weight = checks.float_array(function, "weight", weight)
    if x.ndim and weight.ndim == 2:
        logits = (*x.shape[:-1], weight.shape[1])
        checks.not_one_hot(function, labels, logits, (len(logits) - 1,))
    labels = checks.integer_array(function, "labels", labels)
    _check_shapes(function, x, weight, labels)
    arrays = [x, weight]
    if bias is not None:
        bias = checks.float_array(function, "bias", bias)
        of = f"class of weight {weight.shape}"
        checks.vector(function, "bias", bias.shape, weight.shape[1:], of)
        arrays.append(bias)
    arrays.append(labels)
    checks.implementation(function, implementation)
    head = LinearLossCall(
        function,
        chunk=None if chunk is None else checks.integer(function, "chunk", chunk, "rows"),
        has_bias=bias is not None,
        logits_scale=checks.positive(function, "logits_scale", logits_scale),
        logit_softcap=softcap(function, logit_softcap),
        dtype=None if dtype is None else checks.dtype(function, "dtype", dtype),
        implementation=implementation,
        precision=jax.config.jax_default_matmul_precision,
        **options,
    )
    wide = checks.arithmetic_dtype(*head.dtypes(x.dtype, weight.dtype))
    check_numbers(function, wide, head.logits_scale, head.logit_softcap, head.z_loss)
    if where is not None:
        array, of_classes = _where(head, where, x, weight)
        head = dataclasses.replace(head, has_where=not of_classes, has_mask=of_classes)
        arrays.append(array)
    if implementation is not None:
        _check_implementation(head, x, weight, implementation)
    return linear_loss_primitive.bind(head, *arrays)


def _where(
    head: LinearLossCall, where: checks.ArrayLike, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, bool]:
    """Weights of positions, of labels' shape, or a mask of classes; and whether it is that."""
    function, of_labels = head.function, x.shape[:-1]
    if function == NAME:
        _refuse_classes(where, x.shape, weight.shape[1])
        loss_dtype = checks.arithmetic_dtype(*head.dtypes(x.dtype, weight.dtype))
        array = checks.weights(function, "where", where, loss_dtype)
    else:
        array = checks.boolean(function, "where", where)
        if array.ndim == x.ndim:
            shape = (*of_labels, weight.shape[1])
            return checks.broadcastable(function, "where", array, shape, "logits'"), True
    if not checks.fits(array.shape, of_labels):
        classes = "" if function == NAME else f", or {x.ndim} axes: which classes there are"
        raise ValueError(
            f"{function}: where has shape {array.shape}; expected one that broadcasts to labels' "
            f"shape {of_labels}, with {len(of_labels)} axes: which positions count"
            f"{', or how much' if function == NAME else classes}; reshape where, e.g. where[None]"
        )
    return jnp.broadcast_to(array, of_labels), False


def _refuse_classes(where: checks.ArrayLike, x: tuple[int, ...], classes: int) -> None:
    """Raises where the loss is given a mask of classes."""
    shape: tuple[int, ...] = getattr(where, "shape", ())
    if len(shape) != len(x) or shape[-1] not in (1, classes):
        return
    raise ValueError(
        f"{NAME}: where has shape {shape}, with the axis of the classes, as a mask of classes has; "
        f"expected one that broadcasts to labels' shape {x[:-1]}, for positions, because this "
        "function takes no mask of classes. If all positions share the mask, add it to the bias, "
        "e.g. bias=jnp.where(mask, 0, -jnp.inf); else use "
        "-jaxnorm.linear_log_prob_and_entropy(x, weight, labels, where=mask)[0], which takes one"
    )


def _check_shapes(function: Function, x: jax.Array, weight: jax.Array, labels: jax.Array) -> None:
    checks.features(function, "x", x.shape, "d")
    if not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):
        raise ValueError(
            f"{function}: x has shape {x.shape} and weight {weight.shape}; expected sizes that are "
            "numbers, because chunks of rows are cut when the call is traced; export one program "
            "for each size"
        )
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1] or not weight.shape[1]:
        raise ValueError(
            f"{function}: weight has shape {weight.shape}; expected ({x.shape[-1]}, V), the last "
            f"axis of x {x.shape} by one class or more; transpose an embedding table, e.g. weight.T"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{function}: labels have shape {labels.shape}; expected {x.shape[:-1]}, the shape of "
            f"x {x.shape} without its last axis; reshape or broadcast labels to that shape"
        )


def _check_implementation(
    head: LinearLossCall, x: jax.Array, weight: jax.Array, name: Name
) -> None:
    """Raises where `name` cannot run a chunk of these arrays."""
    (factors, dtype), classes = head.dtypes(x.dtype, weight.dtype), weight.shape[1]
    count = x.size // max(x.shape[-1], 1)
    rows = chunk_rows(head.chunk, count, weight.shape, dtype, factors)
    mask = (1, classes) if head.has_mask else None
    call = linear_loss_call.call_of(
        head, (rows, classes), dtype, has_positions=head.has_where, mask=mask
    )
    backends.forced(call.function, call.as_seen_by(name), name)


_LOG_PROB: Function = "linear_log_prob_and_entropy"


@eager.compiled("x", "weight", "labels", "bias", "where")
def linear_log_prob_and_entropy(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    labels: checks.ArrayLike,
    *,
    bias: checks.ArrayLike | None = None,
    where: checks.ArrayLike | None = None,
    logits_scale: float = 1.0,
    logit_softcap: float | None = None,
    chunk: int | None = None,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Log-probabilities and entropies of the logits ``x @ weight + bias``, without these logits.

    They exist for a chunk of rows at a time. It is :func:`log_prob_and_entropy` of the logits, with
    one difference: a chunk's logits are the float32 sums of the product, and are never rounded.
    Rounded to bfloat16, ratios of probabilities :math:`e^{\log p' - \log p}` err by percents.

    Forward it takes one matrix product; the backward makes the logits again, and takes three. It
    keeps x, weight and three numbers for each position.

    Args:
      x: array (..., d) of any number of rows; bfloat16, float16, float32 or float64.
      weight: array (d, V), of these dtypes.
      labels: integers of any dtype, of x's shape without its last axis: which of the V classes. A
        position with one that is none, a negative one too, has NaN for both results, and gradients.
      bias: array (V,), of these dtypes; or None.
      where: booleans that broadcast to labels' shape, with as many axes: which positions count, for
        example ``labels != -100``. Where it is False, both results are 0, neither label nor x
        matters, and x's gradient is 0. With as many axes as x, booleans that broadcast to
        ``(..., V)``: which classes there are, as in :func:`log_prob_and_entropy`.
      logits_scale, logit_softcap: of logits with bias, as in
        :func:`softmax_cross_entropy_with_integer_labels`.
      chunk: rows of x at a time, at least 1; on a mesh, of a device's rows. None chooses, as in
        :func:`linear_softmax_cross_entropy`, by the memory of float32 logits.
      dtype: of the products, where x and weight promote to a wider one: ``jnp.bfloat16`` rounds a
        float32 weight, and makes products of 16 bits. None for what they promote to.
      implementation: of a chunk's results; None chooses, a name forces it. What is chosen,
        ``implementation_for("log_prob_and_entropy", (chunk, V), jnp.float32)`` says.

    Returns:
      (log_prob, entropy), arrays of labels' shape: float32, or float64 for float64 products.

    Differentiable with respect to x, weight and bias, in reverse and forward mode, to any order;
    gradients have the dtypes of what they are of. The gradient of a chunk's logits is rounded to
    the products' dtype; weight's is summed in float32 over all chunks.

    On a mesh rows, V and d may be split, as in :func:`linear_softmax_cross_entropy`.

    Raises:
      TypeError: x, weight or bias is not of a supported float dtype, or ``dtype`` is none, labels
        are no integers, ``where`` is not boolean, ``chunk`` is no integer, or ``logits_scale`` or
        ``logit_softcap`` is no Python number.
      ValueError: the shape of an array, ``chunk``, one of these numbers or ``implementation`` is
        wrong.

    Source: what the losses of `GRPO <https://arxiv.org/abs/2402.03300>`_, `PPO
    <https://arxiv.org/abs/1707.06347>`_ and `DPO <https://arxiv.org/abs/2305.18290>`_ take of a
    model.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, weight = jnp.ones((4, 128, 64), jnp.bfloat16), jnp.zeros((64, 1000), jnp.bfloat16)
      >>> tokens = jnp.zeros((4, 128), jnp.int32)
      >>> log_prob, entropy = jaxnorm.linear_log_prob_and_entropy(x, weight, tokens)
      >>> log_prob.shape, log_prob.dtype.name, round(float(entropy[0, 0]), 2)
      ((4, 128), 'float32', 6.91)
    """
    log_prob, entropy = of_linear_logits(
        _LOG_PROB,
        x,
        weight,
        labels,
        bias,
        where,
        chunk,
        dtype,
        logits_scale,
        logit_softcap,
        implementation,
    )
    return log_prob, entropy
