"""linear_kl_divergence, and the checks of its arguments."""

import jax
import jax.numpy as jnp

from jaxnorm.operations import checks, linear_loss_call, linear_loss_primitive, scales
from jaxnorm.operations.linear_loss import REDUCTIONS, check_shapes
from jaxnorm.operations.linear_loss_call import Function, LinearLossCall, Reduction, chunk_rows
from jaxnorm.operations.loss import softcap
from jaxnorm.primitives import eager
from jaxnorm_kernels.specs import Name

NAME: Function = "linear_kl_divergence"


@eager.compiled(
    *("x", "weight", "teacher_x", "teacher_weight", "bias", "teacher_bias", "where"),
    either=("logits_scale",),
)
def linear_kl_divergence(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    teacher_x: checks.ArrayLike,
    teacher_weight: checks.ArrayLike,
    *,
    bias: checks.ArrayLike | None = None,
    teacher_bias: checks.ArrayLike | None = None,
    where: checks.ArrayLike | None = None,
    reduction: Reduction = "mean",
    reverse: bool = False,
    chunk: int | None = None,
    logits_scale: checks.ArrayLike = 1.0,
    logit_softcap: float | None = None,
    teacher_logit_softcap: float | None = None,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    r"""Divergence of a teacher's and a student's linear layers, without the logits of either.

    The result is a reduction of :func:`kl_divergence` for the logits ``x @ weight + bias`` and
    ``teacher_x @ teacher_weight + teacher_bias``. Only the logits of one chunk of rows are in
    memory at a time, forward and backward. One loop over the chunks computes the divergence and, if
    it is differentiated, the gradients. The gradient of a mean or a sum takes four matmuls (the
    logits of both, and the gradients of x and weight). With ``reduction="none"`` it takes six,
    because the backward pass recomputes the logits. A divergence that is not differentiated takes
    two.

    The dtype of each pair of matmul operands is the one to which they promote, as in
    ``jnp.matmul``. A chunk's logits are the float32 sums of the matmuls, without rounding.

    Args:
      x: the student's array (..., d) of any number of rows; bfloat16, float16, float32 or float64.
      weight: array (d, V), of these dtypes.
      teacher_x: array (..., e) with x's axes except the last one; e may differ from d.
      teacher_weight: array (e, V). The teacher's arrays are constants: their gradient is 0.
      bias, teacher_bias: arrays (V,), of these dtypes; or None.
      where: booleans that say which positions count, or float weights of positions, without a
        gradient. They have as many axes as positions (x without its last axis), and broadcast to
        their shape. Where it is False or 0, x and teacher_x are ignored, even if they are NaN, and
        x's gradient is 0.
      reduction: ``"mean"`` over the positions that count, sum(where * divergence) / sum(where), or
        0 if the denominator is 0; ``"sum"``; or ``"none"`` for each position's divergence times its
        weight.
      reverse: True for KL(q || p) instead of KL(p || q), as in :func:`kl_divergence`.
      chunk: number of rows in a chunk, at least 1; on a mesh, rows of one device. None chooses, as
        in :func:`linear_softmax_cross_entropy`, by the memory of both float32 logits.
      logits_scale, logit_softcap, teacher_logit_softcap: applied to the logits with bias, as in
        :func:`kl_divergence`. A logits_scale may be an array.
      dtype: dtype of the matmuls of each pair that promotes to a wider one: ``jnp.bfloat16`` rounds
        float32 weights, and makes 16-bit matmuls. None for the dtypes to which they promote.
      implementation: implementation of the divergence of a chunk's logits; None chooses, a name
        forces it. ``implementation_for("kl_divergence", (chunk, V), jnp.float32)`` shows the
        choice.

    Returns:
      A scalar, or for ``"none"`` an array of the shape of positions: float32, or float64 if a pair
      of operands promotes to float64.

    Differentiable with respect to x, weight and bias, in reverse and forward mode, to any order;
    gradients have the dtypes of their arguments. What the forward pass saves is as in
    :func:`linear_softmax_cross_entropy`. On a mesh, rows, V and d may be sharded, as there; the
    teacher's features are gathered.

    Raises:
      TypeError: an array or ``dtype`` is not of a supported float dtype, ``where`` is of integers,
        ``chunk`` is not an integer, ``reverse`` is neither True nor False, a softcap is not a
        Python number, or ``logits_scale`` is differentiated.
      ValueError: the shape of an array, ``reduction``, ``chunk``, one of the numbers or
        ``implementation`` is wrong.

    Source: computing the gradients in the forward's loop over chunks is the idea of Liger's
    `fused linear losses <https://arxiv.org/abs/2410.10989>`_.

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
    checks.one_of(NAME, "reduction", reduction, REDUCTIONS)
    x, weight = checks.float_array(NAME, "x", x), checks.float_array(NAME, "weight", weight)
    teacher_x = checks.float_array(NAME, "teacher_x", teacher_x)
    teacher_weight = checks.float_array(NAME, "teacher_weight", teacher_weight)
    check_shapes(NAME, x, weight)
    check_shapes(NAME, teacher_x, teacher_weight, of="teacher_")
    positions = x.shape[:-1]
    if teacher_x.shape[:-1] != positions:
        raise ValueError(
            f"{NAME}: teacher_x has shape {teacher_x.shape}; expected {(*positions, 'e')}, the "
            f"positions of x {x.shape} by any number of features; reshape or slice teacher_x"
        )
    if teacher_weight.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{NAME}: teacher_weight has shape {teacher_weight.shape}; expected "
            f"({teacher_weight.shape[0]}, {weight.shape[1]}), the classes of weight "
            f"{weight.shape}; slice the weight with more classes, or pad the other one and its bias"
        )
    arrays = [x, weight]
    teacher = [jax.lax.stop_gradient(teacher_x), jax.lax.stop_gradient(teacher_weight)]
    for name, value, to in (("bias", bias, arrays), ("teacher_bias", teacher_bias, teacher)):
        if value is not None:
            array = checks.float_array(NAME, name, value)
            checks.vector(
                NAME, name, array.shape, weight.shape[1:], f"class of weight {weight.shape}"
            )
            to.append(array if to is arrays else jax.lax.stop_gradient(array))
    checks.implementation(NAME, implementation)
    head = LinearLossCall(
        NAME,
        chunk=None if chunk is None else checks.integer(NAME, "chunk", chunk, "rows"),
        has_bias=bias is not None,
        has_teacher_bias=teacher_bias is not None,
        logits_scale=1.0,
        has_scale=scales.is_array(logits_scale),
        logit_softcap=softcap(NAME, logit_softcap),
        teacher_softcap=softcap(NAME, teacher_logit_softcap, "teacher_logit_softcap"),
        reverse=checks.flag(NAME, "reverse", reverse),
        dtype=None if dtype is None else checks.dtype(NAME, "dtype", dtype),
        implementation=implementation,
        precision=jax.config.jax_default_matmul_precision,
        reduction=reduction,
        has_where=where is not None,
    )
    types = {"x": x, "weight": weight, "teacher_x": teacher_x, "teacher_weight": teacher_weight}
    wide = head.result_dtype(types)
    scale = scales.of_logits(NAME, logits_scale, positions, wide, of="positions'")
    head = head.replaced(logits_scale=scale.number)
    arrays += teacher
    if where is not None:
        array = checks.weights(NAME, "where", where, wide)
        if not checks.fits(array.shape, positions):
            raise ValueError(
                f"{NAME}: where has shape {array.shape}; expected one that broadcasts to the "
                f"positions' shape {positions}, with {len(positions)} axes: which positions "
                "count, or how much; reshape where, e.g. where[None]"
            )
        arrays.append(jnp.broadcast_to(array, positions))
    if scale.array is not None:
        arrays.append(scale.array)
    _check_call(head, types)
    return linear_loss_primitive.bind(head, *arrays)[0]


def _check_call(head: LinearLossCall, types: dict[str, jax.Array]) -> None:
    """Raise if a number is not finite in the arithmetic dtype, or a kernel cannot run a chunk.

    The kernel is the one that the user requested by name.
    """
    x, weight = types["x"], types["weight"]
    factors, dtype = head.dtypes(x.dtype, weight.dtype)
    _, teacher_dtype = head.dtypes(types["teacher_x"].dtype, types["teacher_weight"].dtype)
    d, classes = weight.shape
    count = x.size // max(d, 1)
    rows = chunk_rows(head.chunk, count, (d, 2 * classes), dtype, factors)
    call = linear_loss_call.call_of(
        head,
        (rows, classes),
        dtype,
        has_positions=head.has_where,
        teacher_dtype=teacher_dtype,
    )
    if head.implementation is not None:
        call.forced(head.implementation)
