"""The function linear_kl_divergence, and the checks of its arguments."""

import jax
import jax.numpy as jnp

from jaxnorm.operations import checks, linear_loss_primitive, scales
from jaxnorm.operations.checks import ArrayLike, DTypeLike
from jaxnorm.operations.linear_loss import REDUCTIONS, check_shapes
from jaxnorm.operations.linear_loss_call import (
    Function,
    LinearLossCall,
    Reduction,
    check_implementation,
)
from jaxnorm.operations.loss import check_numbers, softcap
from jaxnorm.primitives import eager
from jaxnorm_kernels.specs import Name

NAME: Function = "linear_kl_divergence"


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
    that :func:`kl_divergence` computes. Only the logits of one chunk of rows are in memory at a
    time, in the forward and in the backward pass. One loop over the chunks computes the divergence
    and, if it is differentiated, the gradients.

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
      A scalar, or for ``"none"`` an array of the shape of x without the last axis: float32, or
      float64 if the operands of a matmul promote to float64.

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
    check_numbers(NAME, wide, head)
    teacher_dtype = head.dtypes(teacher_x.dtype, teacher_weight.dtype)[1]
    check_implementation(head, x, weight, teacher_dtype)
    return linear_loss_primitive.bind(head, *arrays)[0]
