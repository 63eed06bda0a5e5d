"""The function that computes any loss of a linear layer's outputs without storing all logits.

The function `fun` that the user passes to `linear_loss` computes the results of one position from
its logits. It is traced once, and the arrays that it closes over become operands. A pass runs it
under `jax.vmap` on the logits of one chunk of rows. If `fun` passes the logits only to a jaxnorm
loss, this loss and its gradient are computed as in the linear version of the loss, such as
`linear_softmax_cross_entropy`. The steps for a chunk are::

    logits = x @ W + b                            for one chunk of rows
    z      = logits, or the results of the loss
    y      = fun(z, *rows)
    dz, drows, dshared = vjp(fun)(dy)             dshared: gradients of closed-over arrays
    dlogits = dz, or the gradient of the loss     in the dtype of the matmul
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr  # type: ignore[attr-defined]

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.operations import checks
from jaxnorm.operations.checks import ArrayLike, DTypeLike
from jaxnorm.operations.linear_loss import bound, layer_of
from jaxnorm.operations.linear_loss_call import Function, Program, Reduction
from jaxnorm.operations.loss import masks

_ANY: Function = "jaxnorm.linear_loss"


def linear_loss(
    fun: Callable[..., Any],
    x: ArrayLike,
    weight: ArrayLike,
    *rows: Any,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    reduction: Reduction = "mean",
    chunk: int | None = None,
    dtype: DTypeLike | None = None,
) -> Any:
    r"""Any loss of the logits ``x @ weight + bias``, without storing all logits.

    The function ``fun(logits, *row)`` computes the loss of one position from its logits, an array
    of shape (V,), and from the position's part of each of ``rows``. It runs under `jax.vmap` on the
    logits of one chunk of positions at a time. If ``fun`` calls a loss of jaxnorm, such as
    :func:`log_prob_and_entropy`, its kernel runs on the chunk. If ``fun`` uses the logits for
    nothing else, the call takes the same memory as the linear version of this loss, here
    :func:`linear_log_prob_and_entropy`.

    With ``reduction="mean"`` or ``"sum"``, one loop over the chunks computes the loss and, if it is
    differentiated, all gradients. This takes three matmuls. ``"none"`` takes four, because the
    backward pass recomputes the logits. A call that is not differentiated takes one.

    Args:
      fun: function of one position's logits, and of one position's part of each of ``rows``. The
        logits are float32 (float64 for float64 matmuls), without rounding. For ``"mean"`` and
        ``"sum"``, it returns a scalar; for ``"none"``, any pytree of arrays. It may close over
        arrays.
      x: array (..., d) with any number of positions; bfloat16, float16, float32 or float64.
      weight: array (d, V); any of these dtypes.
      rows: pytrees of arrays. The leading axes of each array index the positions: they are the axes
        of x without the last one. Examples are labels, advantages and a teacher's hidden states.
      bias: array (V,), any of these dtypes; or None.
      where: None, or a boolean mask of positions, or float weights of positions (which have no
        gradient). It has one axis less than x, and broadcasts to ``x.shape[:-1]``. Where it is
        False or 0, x and rows are ignored, even if they are NaN, and their gradients are 0.
      reduction: ``"mean"``: ``sum(where * loss) / sum(where)``, or 0 if the denominator is 0;
        ``"sum"``: ``sum(where * loss)``; or ``"none"``: the results of all positions. With
        ``"none"``, floats are multiplied by ``where``. Integers and booleans become 0 or False at
        positions where ``where`` is 0.
      chunk: number of positions in a chunk, at least 1; on a mesh, this counts the positions of one
        device. None lets jaxnorm choose as :func:`linear_softmax_cross_entropy` does for float32
        logits. If ``fun`` uses the logits in plain JAX, a chunk has half as many positions, because
        the gradient of the logits is float32 as well.
      dtype: dtype to which x and weight are cast if they promote to a wider dtype. For example,
        ``jnp.bfloat16`` rounds a float32 weight, so that the matmuls run in bfloat16. With None,
        they are cast to the dtype to which they promote.

    Returns:
      For ``"mean"`` and ``"sum"``, a scalar: float32, or float64 if the logits or the results of
      ``fun`` are float64. For ``"none"``, the pytree that ``fun`` returns, with the axes of the
      positions in front of each array's own axes.

    Differentiable with respect to x, weight, bias, floats in ``rows``, and floats that ``fun``
    closes over. Reverse and forward mode are supported, to any order. Gradients have the dtypes of
    their arguments. The gradient of a chunk's logits is rounded to the matmuls' dtype. The
    gradients of weight, bias and closed-over arrays are summed over the chunks in float32. The
    forward pass of a mean or a sum saves only the gradients, as in
    :func:`linear_softmax_cross_entropy`. With ``"none"``, it saves its operands. If a `jax.vmap`
    batches weight or an array that ``fun`` closes over, the elements of the batch are computed one
    after another. To compute them together, pass the closed-over array as one of ``rows`` instead.

    On a mesh, the positions and d may be sharded, as in :func:`linear_softmax_cross_entropy`. A
    weight that is sharded along d or V is gathered once, before the loop, and its gradient is
    reduced over the devices once, after the loop. Arrays that ``fun`` closes over are replicated.

    Outside of `jax.jit`, each call traces and compiles ``fun`` again.

    Raises:
      TypeError: ``fun`` is not callable; the dtype of x, weight or bias is not a supported float
        dtype; ``dtype`` is not one; ``where`` has an integer dtype; ``rows`` or the result of
        ``fun`` has complex numbers; ``chunk`` is not an integer.
      ValueError: the shape of an array or of the result of ``fun`` is wrong; ``reduction`` or
        ``chunk`` is wrong; ``fun`` has side effects, such as `jax.debug.print`.

    Source: Liger's `fused linear losses <https://arxiv.org/abs/2410.10989>`_ introduced the
    computation of gradients in the forward pass's loop over chunks.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, weight = jnp.ones((4, 128, 64)), jnp.zeros((64, 1000))
      >>> labels = jnp.zeros((4, 128), jnp.int32)
      >>> def focal(logits, label):
      ...     loss = jaxnorm.softmax_cross_entropy_with_integer_labels(logits, label)
      ...     return -jnp.expm1(-loss) ** 2 * loss
      >>> gradient = jax.grad(jaxnorm.linear_loss, argnums=(1, 2))
      >>> dx, dweight = gradient(focal, x, weight, labels, where=labels != -100)
      >>> dx.shape, dweight.shape
      ((4, 128, 64), (64, 1000))
    """
    if not callable(fun):
        raise TypeError(
            f"{_ANY}: fun has type {type(fun).__name__}; expected a function of one position's "
            "logits, e.g. lambda logits, label: jax.nn.logsumexp(logits) - logits[label]"
        )
    checks.one_of(_ANY, "reduction", reduction, get_args(Reduction))
    layer = layer_of(_ANY, x, weight, bias, dtype)
    positions, classes = layer[0]["x"].shape[:-1], layer[0]["weight"].shape[1:]
    view = RowView.of((*positions, *classes), (len(positions),))
    wide = checks.arithmetic_dtype(*layer[1])
    _, weights = masks(_ANY, where, view, wide, "the positions'", takes_classes=False)
    leaves, tree = jax.tree.flatten(rows)
    leaves = [*map(functools.partial(_row, positions), leaves)]
    logits = jax.ShapeDtypeStruct(classes, layer[1][1])
    program, shared, results = _traced(fun, logits, leaves, tree, len(positions), reduction)
    others = {"where": weights} | {f"row{i}": a for i, a in enumerate(leaves)}
    others |= {f"shared{i}": a for i, a in enumerate(shared)}
    outputs = bound(_ANY, layer, program, others, reduction, chunk)
    return outputs[0] if reduction != "none" else jax.tree.unflatten(results, outputs)


def _real(name: str, array: Any) -> jax.Array:
    """Convert an array; raise TypeError for complex numbers. `name` names it in errors."""
    if not isinstance(array, jax.Array):
        array = checks.any_array(_ANY, name, array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(
            f"{_ANY}: {name} has dtype {array.dtype}; expected real numbers; split it into "
            "its real and its imaginary part"
        )
    return array


def _row(positions: tuple[int, ...], leaf: Any) -> jax.Array:
    """Convert an array of ``rows``, and check that its leading axes are the positions."""
    array = _real("an array in rows", leaf)
    if array.shape[: len(positions)] != positions:
        raise ValueError(
            f"{_ANY}: an array in rows has shape {array.shape}; expected leading axes {positions}, "
            "the shape of x without its last axis; if all positions share the array, use it in "
            "the function fun as a variable of an enclosing scope"
        )
    return array


def _traced(
    fun: Callable[..., Any],
    logits: Any,
    leaves: Sequence[jax.Array],
    tree: Any,
    lead: int,
    reduction: Reduction,
) -> tuple[Program, list[jax.Array], Any]:
    """Trace `fun` for one position.

    Return the program, the arrays that `fun` closes over, and the tree structure of `fun`'s result.
    `leaves` and `tree` are the arrays in ``rows`` and their tree structure. The first `lead` axes
    of an array in ``rows`` index the positions.
    """
    trees = []

    def run(logits: jax.Array, *leaves: Any) -> list[jax.Array]:
        results, result_tree = jax.tree.flatten(fun(logits, *jax.tree.unflatten(tree, leaves)))
        trees.append(result_tree)
        results = [_real("fun's result", y) for y in results]
        if not results:
            raise ValueError(f"{_ANY}: fun returns no array; expected a pytree of arrays")
        if reduction == "none":
            return results
        if len(results) > 1 or results[0].ndim:
            one = f"an array of shape {results[0].shape}"
            raise ValueError(
                f"{_ANY}: fun returns {one if len(results) == 1 else f'{len(results)} arrays'}; "
                "expected a scalar, the loss of one position, for "
                f'reduction="{reduction}"; pass reduction="none" for other results'
            )
        return [y.astype(checks.arithmetic_dtype(logits.dtype, y.dtype)) for y in results]

    types = [jax.ShapeDtypeStruct(a.shape[lead:], a.dtype) for a in leaves]
    # Trace without a mesh, because the program also runs on shards, for which types that include
    # the user's mesh are wrong.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        traced = jax.make_jaxpr(run)(logits, *types)
    jaxpr = traced.jaxpr
    effects = {type(effect).__name__ for effect in jaxpr.effects} - {"NamedAxisEffect"}
    if effects:
        raise ValueError(
            f"{_ANY}: fun has side effects ({', '.join(sorted(effects))}); expected a function "
            'without any; return the array with reduction="none", and print it after the call'
        )
    shared = [_real("an array that fun closes over", jnp.asarray(a)) for a in traced.consts]
    return _program(jaxpr), shared, trees[0]


def _program(jaxpr: Any) -> Program:
    """Return the `Program` of a traced function.

    If the logits are used only by one jaxnorm loss, this loss becomes the program's `loss`.
    """
    logits, others = jaxpr.invars[0], [*jaxpr.invars[1:], *jaxpr.constvars]
    equations = jaxpr.eqns

    def of(invars: Sequence[Any], outvars: Sequence[Any], equations: Sequence[Any]) -> ClosedJaxpr:
        changes = {"constvars": [], "invars": [*invars], "outvars": [*outvars]}
        return ClosedJaxpr(jaxpr.replace(eqns=[*equations], **changes), [])

    uses = [i for i, equation in enumerate(equations) for v in equation.invars if v is logits]
    if len(uses) == 1 and not any(v is logits for v in jaxpr.outvars):
        before, (equation, *after) = equations[: uses[0]], equations[uses[0] :]
        call = equation.params.get("call")
        is_loss = isinstance(call, Call) and call.spec.is_loss and call.direction == "fwd"
        if is_loss and equation.invars[0] is logits:
            return Program(
                call.replaced(primitives=call.primitives or call.function),
                of(others, equation.invars[1:], before),
                of([*equation.outvars, *others], jaxpr.outvars, [*before, *after]),
            )
    return Program(after=of([logits, *others], jaxpr.outvars, equations))
