"""The function linear_loss: any loss of a linear layer's outputs, without storing all logits.

The user's function `fun` computes the results of one position from its logits. It is traced once,
and the arrays that it closes over become operands. A pass runs it under `jax.vmap` on the logits of
one chunk of rows::

    logits = x @ W + b                          for one chunk of rows
    y      = fun(logits, *rows)
    dlogits, drows, dshared = vjp(fun)(dy)      dshared: gradients of what `fun` closes over
    dx     = dlogits @ W^T
    dW    += x^T @ dlogits                      in float32; also db, dshared

`LinearProgram` is the static description of a pass. It has the operands `row0`, `row1`, ... (the
leaves of `rows`) and `shared0`, `shared1`, ... (what `fun` closes over), and the results `y0`,
`y1`, ... (the leaves of `fun`'s result).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal  # type: ignore[attr-defined]
from jax.sharding import NamedSharding

from jaxnorm.meshes import sharding
from jaxnorm.meshes.sharding import Factors
from jaxnorm.operations import checks, linear_loss_chunks
from jaxnorm.operations.checks import ArrayLike, DTypeLike
from jaxnorm.operations.linear_loss import bias_array, check_shapes, of_positions
from jaxnorm.operations.linear_loss_call import Kind, LinearLossCall, Over, Reduction, chunk_rows
from jaxnorm.operations.linear_loss_chunks import Carry, Chunks, Rows
from jaxnorm.operations.linear_loss_primitive import LossRules
from jaxnorm.operations.loss import counted
from jaxnorm.primitives.rules import zero_like

NAME = "jaxnorm.linear_loss"

# ------------------------------------------------------------------------------- the traced `fun`


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function of the logits, the row's arrays and the shared arrays of one position."""

    jaxpr: ClosedJaxpr
    rows: int

    def __repr__(self) -> str:
        return f"{self.rows} {self.jaxpr}"

    @property
    def results(self) -> Sequence[Any]:
        """The types of the results of one position."""
        return self.jaxpr.out_avals

    def on_rows(self, logits: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Run the function on the logits of several positions."""
        axes = [0] * (1 + self.rows) + [None] * (len(arrays) - self.rows)
        run = functools.partial(_evaluated, self.jaxpr)
        results: list[jax.Array] = jax.vmap(run, axes)(logits, *arrays)
        return results


def _evaluated(program: ClosedJaxpr, *arrays: jax.Array) -> list[jax.Array]:
    """Evaluate a program that was traced outside of the `jax.shard_map` in which it may run.

    Inside `jax.shard_map`, the operands of an equation must vary over the same mesh axes. The
    types of an inner `jax.jit` do not say over which, so its equations are evaluated inline. The
    shardings that equations name are those of arrays that the function closes over; they are
    dropped, because shards have none.
    """
    jaxpr = program.jaxpr
    values: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *arrays])
    )

    def value(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for equation in jaxpr.eqns:
        operands = [*map(value, equation.invars)]
        if equation.primitive.name in ("jit", "pjit"):
            results: Any = _evaluated(equation.params["jaxpr"], *operands)
        elif equation.primitive.name == "reshard":
            results = operands
        else:
            params = {
                key: None if isinstance(param, NamedSharding) else param
                for key, param in equation.primitive.get_bind_params(equation.params).items()
            }
            operands = [jnp.asarray(a) if isinstance(a, np.generic) else a for a in operands]
            results = equation.primitive.bind(*sharding.vary_alike(operands), **params)
            results = results if equation.primitive.multiple_results else [results]
        values |= zip(equation.outvars, results)
    return [*map(value, jaxpr.outvars)]


def _is_inexact(a: Any) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.inexact))


# ------------------------------------------------------------------------------- the static call


@dataclasses.dataclass(frozen=True)
class LinearProgram(LinearLossCall):
    """The static description of one pass of `linear_loss`."""

    program: Program | None = None
    kept = ()
    has_teacher = False
    splits_classes = False

    @property
    def traced(self) -> Program:
        assert self.program is not None
        return self.program

    def differentiable(self, names: Sequence[str]) -> tuple[str, ...]:
        types = dict(zip(self.of_program, self.traced.jaxpr.in_avals[1:]))
        return tuple(name for name in names if name not in types or _is_inexact(types[name]))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the results. Integers have no tangents or cotangents."""
        is_forward = self.direction == "fwd"
        types = enumerate(self.traced.results)
        return tuple(f"y{i}" for i, type_ in types if is_forward or _is_inexact(type_))

    @property
    def of_program(self) -> tuple[str, ...]:
        """Names of the operands that the traced function takes in addition to the logits."""
        count, rows = len(self.traced.jaxpr.in_avals) - 1, self.traced.rows
        return tuple(f"row{i}" if i < rows else f"shared{i - rows}" for i in range(count))

    @property
    def primals(self) -> tuple[str, ...]:
        bias, where = ["bias"] * self.has_bias, ["where"] * self.has_where
        return ("x", "weight", *bias, *where, *self.of_program)

    def _kind(self, name: str) -> Kind:
        kinds: dict[str, Kind] = {"x": "x", "weight": "weight", "bias": "bias"}
        return "shared" if name.startswith("shared") else kinds.get(name, "row")

    def result_dtype(self, types: dict[str, Any]) -> np.dtype:
        dtypes = self.dtypes(types["x"].dtype, types["weight"].dtype)
        return checks.arithmetic_dtype(*dtypes, *[a.dtype for a in self.traced.results])


# ------------------------------------------------------------------------------- the passes


class _ProgramChunks(Chunks):
    """The arrays of a call, with a method for each pass: `forward`, `tangent` and `backward`."""

    head: LinearProgram

    def __init__(
        self, head: LinearProgram, arrays: Sequence[jax.Array], over: Over, recompute: bool
    ):
        self.head, self.over, self.recompute = head, over, recompute
        self.primals = by_name = dict(zip(head.primals, arrays))
        self.linear = [*arrays[head.residuals :]]
        self.x, self.weight = by_name["x"], by_name["weight"]
        self.bias, self.where = by_name.get("bias"), by_name.get("where")
        self.counted = None if self.where is None else counted(self.where)
        self.dtype, self.logits_dtype = head.dtypes(self.x.dtype, self.weight.dtype)
        self.wide = head.result_dtype(by_name)
        self.rows, self.classes = len(self.x), self.weight.shape[1]
        self.padding = -self.classes % linear_loss_chunks.COLUMNS
        self.factor = self.padded(self.weight, self.dtype)
        self.given = by_name | {"weight": self.factor}
        dtypes = self.logits_dtype, self.dtype
        self.chunk = chunk_rows(
            head.chunk, self.rows, self.weight.shape, *dtypes, accumulator=self.accumulator
        )

    @property
    def operands(self) -> Sequence[jax.Array]:
        return [*self.primals.values(), *self.linear]

    def gradient_dtype(self, name: str, operand: jax.Array) -> np.dtype:
        """Return the dtype of a device's part of the gradient of an operand."""
        if name in ("x", "weight", "bias"):
            return super().gradient_dtype(name, operand)
        is_summed = name.startswith("shared") and self.over.rows
        dtype = self.head.gradient_dtype(operand.dtype)
        return np.dtype(jnp.promote_types(self.wide, dtype)) if is_summed else dtype

    def forward(self) -> list[jax.Array]:
        head = self.head
        if head.reduction != "none" and head.wrt:
            weights = self.scale() * self.masked(jnp.ones(self.rows, self.wide))
            losses, *gradients = self.gradients([weights])
            return [self.total(self.masked(losses)), *gradients]

        def step(rows: Rows, carry: Carry) -> Carry:
            results = self.results(*self.of_chunk(rows, self.given))
            return {name: rows.put(carry[name], y) for name, y in zip(carry, results)}

        by_name = self.loop(step, self.empty_results())
        results = [self.masked(by_name[name]) for name in head.outputs]
        return [self.total(results[0])] if head.reduction != "none" else results

    def backward(self) -> list[jax.Array]:
        return self.gradients([*map(self.masked, self.linear)])

    def tangent(self) -> list[jax.Array]:
        along = dict(zip(self.head.wrt, self.linear))
        if "weight" in along:
            along["weight"] = self.padded(along["weight"], self.dtype)

        def step(rows: Rows, carry: Carry) -> Carry:
            def run(*arrays: jax.Array) -> list[jax.Array]:
                return self.inexact_results(
                    *self.of_chunk(rows, self.given | dict(zip(along, arrays)))
                )

            _, results = jax.jvp(run, [self.given[name] for name in along], [*along.values()])
            return {name: rows.put(carry[name], y) for name, y in zip(carry, results)}

        results = self.loop(step, self.empty_results())
        return [self.masked(results[name]) for name in self.head.outputs]

    def gradients(self, cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the gradients of ``sum(cotangents * results)``.

        In a forward pass, the list starts with an array of the losses of all rows.
        """
        head, makes_losses = self.head, self.head.direction == "fwd"
        wanted = [name for name in head.of_program if name in head.wrt]
        dtypes = {name: self.gradient_dtype(name, self.primals[name]) for name in head.wrt}
        is_narrow = self.dtype.name == "float16"
        in_one = self.chunk == self.rows and not is_narrow
        sum_dtype = dtypes["weight"] if in_one and "weight" in dtypes else self.wide

        def step(rows: Rows, carry: Carry) -> Carry:
            logits, arrays = self.of_chunk(rows, self.given)

            def run(logits: jax.Array, *values: jax.Array) -> list[jax.Array]:
                return self.inexact_results(logits, arrays | dict(zip(wanted, values)))

            ys, pullback = jax.vjp(run, logits, *(arrays[name] for name in wanted))
            # Rows that also belong to the next chunk count there.
            cts = [rows.unmasked(rows.of(ct)).astype(y.dtype) for ct, y in zip(cotangents, ys)]
            dlogits, *others = pullback([*sharding.vary_alike([*ys, *cts])[len(ys) :]])
            dlogits, x = rows.unmasked(dlogits), rows.of_x(self.x)
            carried = {"y0": rows.put(carry["y0"], ys[0])} if makes_losses else {}
            sums: Carry = {}
            for name, gradient in zip(wanted, others):
                if name.startswith("row"):
                    gradient = rows.unmasked(gradient).astype(dtypes[name])
                    carried[name] = rows.put(carry[name], gradient)
                else:
                    wide = jnp.promote_types(self.wide, gradient.dtype)
                    sums[name] = rows.if_any(gradient).astype(wide)
            if "bias" in head.wrt:
                sums["bias"] = jnp.sum(dlogits, 0, dtype=self.wide)
            sizes = largest = None
            if is_narrow:
                # Divide each row by a power of two, so that small gradients do not underflow.
                sizes, largest = _powers_of_two(jnp.max(jnp.abs(dlogits), -1, initial=0))
                dlogits = dlogits / sizes[:, None]
            dlogits = self.padded(dlogits, self.dtype)
            if "x" in head.wrt:
                dx = self.dot(dlogits, self.factor, (1, 1), self.wide if is_narrow else dtypes["x"])
                dx = dx if sizes is None else sizes[:, None] * dx
                carried["x"] = rows.put(carry["x"], dx.astype(dtypes["x"]))
            if "weight" in head.wrt:
                if sizes is not None and largest is not None:
                    x = (sizes / largest)[:, None] * x.astype(self.wide)
                dw = self.dot(x.astype(self.dtype), dlogits, (0, 0), sum_dtype)
                sums["weight"] = dw if largest is None else largest * dw
            return carried | {n: carry[n] + a if n in carry else a for n, a in sums.items()}

        carry = self.empty_results() if makes_losses else {}
        of_rows = [name for name in head.wrt if name == "x" or name.startswith("row")]
        carry |= {name: jnp.zeros(self.primals[name].shape, dtypes[name]) for name in of_rows}
        results = self.loop(step, carry, starts_sums={*of_rows} != {*head.wrt})

        def finished(name: str) -> jax.Array:
            if name not in results:  # There are no rows.
                return jnp.zeros(self.primals[name].shape, dtypes[name])
            a = results[name]
            return (a[:, : self.classes] if name == "weight" else a).astype(dtypes[name])

        losses = [results["y0"]] if makes_losses else []
        return [*losses, *map(finished, head.wrt)]

    # ------------------------------------------------------------------------------- one chunk

    def of_chunk(
        self, rows: Rows, given: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the logits of a chunk, and the other operands of the traced function.

        A masked row has the arrays of a row that counts. So `fun` has no NaN in a masked row that
        it does not have in other rows: the gradients of shared arrays are sums over all rows.

        Args:
          rows: the rows of the chunk.
          given: the operands; the weight is cast and padded.
        """
        logits = self.product(rows.filled(rows.of(given["x"])), given["weight"])[:, : self.classes]
        if "bias" in given:
            logits = logits + given["bias"].astype(logits.dtype)[None]
        arrays = [
            rows.filled(rows.of(given[name])) if name.startswith("row") else given[name]
            for name in self.head.of_program
        ]
        logits, *arrays = sharding.vary_alike([logits, *arrays])
        return logits, dict(zip(self.head.of_program, arrays))

    def results(self, logits: jax.Array, arrays: dict[str, jax.Array]) -> list[jax.Array]:
        """Return the results of a chunk's rows."""
        return self.head.traced.on_rows(logits, [*arrays.values()])

    def inexact_results(self, logits: jax.Array, arrays: dict[str, jax.Array]) -> list[jax.Array]:
        return [y for y in self.results(logits, arrays) if _is_inexact(y)]

    def empty_results(self) -> Carry:
        types = {f"y{i}": type_ for i, type_ in enumerate(self.head.traced.results)}
        return {
            name: jnp.zeros((self.rows, *types[name].shape), types[name].dtype)
            for name in self.head.outputs
        }

    def masked(self, y: jax.Array) -> jax.Array:
        """Multiply an array with an element for each row by ``where``."""
        if self.where is None:
            return y
        where, is_counted = (
            a.reshape(-1, *[1] * (y.ndim - 1)) for a in (self.where, counted(self.where))
        )
        if where.dtype != bool and _is_inexact(y):
            y = (where * y).astype(y.dtype)
        return jnp.where(is_counted, y, jnp.zeros_like(y))

    def total(self, losses: jax.Array) -> jax.Array:
        """Return the sum or the mean of losses that are already multiplied by their weights."""
        total = jnp.sum(losses)
        return self.scale() * (lax.psum(total, self.over.rows) if self.over.rows else total)


def _powers_of_two(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round positive numbers down to powers of two, and return them and the largest of them.

    Zeros, infinities and NaNs become the largest.
    """
    counts = jnp.isfinite(sizes) & (sizes > 0)
    info = jnp.finfo(sizes.dtype)
    sizes = jnp.clip(jnp.where(counts, sizes, 1), info.smallest_normal, info.max / 2)
    sizes = lax.reduce_precision(sizes, info.nexp, mantissa_bits=0)
    largest = jnp.max(jnp.where(counts, sizes, 0), initial=0)
    largest = jnp.where(largest > 0, largest, 1)
    return jnp.where(counts, sizes, largest), largest


# ------------------------------------------------------------------------------- the rules


class _ProgramRules(LossRules):
    """The JAX rules of `linear_loss`."""

    chunks: type[Chunks] = _ProgramChunks
    # The equations of a traced function do not say over which mesh axes arrays vary.
    check_vma = False

    def lower(self, head: LinearProgram, ctx: Any, *arrays: Any) -> Any:  # type: ignore[override]
        """Lower a pass; inside the user's `jax.shard_map`, without the mesh axes of types."""
        plain = [jax.core.ShapedArray(a.shape, a.dtype, sharding=a.sharding) for a in ctx.avals_in]
        return super().lower(head, ctx.replace(avals_in=plain), *arrays)

    def types(self, head: LinearProgram, *avals: Any) -> list[Any]:  # type: ignore[override]
        by_name, mesh = dict(zip(head.primals, avals)), sharding.mesh_of(avals)
        results = {f"y{i}": type_ for i, type_ in enumerate(head.traced.results)}
        x, types = by_name["x"], []
        for name, kind in zip(head.returns, head.kinds_returned):
            if name in by_name:
                dtype = head.gradient_dtype(by_name[name].dtype)
                types.append(by_name[name].update(dtype=dtype, weak_type=False))
                continue
            of_row, axes = results[name], 0 if kind == "total" else x.ndim - 1
            split = (*x.sharding.spec[:axes], *[None] * len(of_row.shape))
            shape = (*x.shape[:axes], *of_row.shape)
            types.append(sharding.type_like(x, mesh, shape, of_row.dtype, split))
        return types

    def forward_jvp(  # type: ignore[override]
        self, head: LinearProgram, primals: Any, tangents: Any
    ) -> tuple[Any, Any]:
        tangents = _of_inexact(primals, tangents)
        results, along = super().forward_jvp(head, primals, tangents)
        remaining = iter(along)
        return results, [next(remaining) if _is_inexact(y) else zero_like(y) for y in results]

    def with_residuals(  # type: ignore[override]
        self, head: LinearProgram
    ) -> LinearProgram | None:
        if head.wrt or head.reduction == "none":
            return None
        return head.with_gradients(head.differentiable(head.primals))

    def derived(  # type: ignore[override]
        self, head: LinearProgram, outputs: Any, primals: Any, tangents: Any
    ) -> tuple[Any, Any]:
        return super().derived(head, outputs, primals, _of_inexact(primals, tangents))

    def factors(self, head: LinearProgram, arrays: Any) -> Factors:  # type: ignore[override]
        lead, names = arrays[0].ndim - 1, (f"t{i}" for i in itertools.count())
        rows = [f"r{axis}" for axis in range(lead)]
        shapes = dict(zip(head.takes, (a.shape for a in arrays)))
        shapes |= {f"y{i}": (0,) * lead + y.shape for i, y in enumerate(head.traced.results)}
        whole: list[str] = []

        def factors(name: str, kind: Kind) -> str:
            known = {"x": [*rows, "d"], "weight": ["k", "v"], "bias": ["v"], "total": []}
            if kind in known:
                return " ".join(known[kind])
            own = rows if kind == "row" else []
            return " ".join([*own, *itertools.islice(names, len(shapes[name]) - len(own))])

        operands = [*map(factors, head.takes, head.kinds_taken)]
        whole = [n for n in dict.fromkeys(" ".join(operands).split()) if n.startswith("t")]
        return Factors(
            operands, [*map(factors, head.returns, head.kinds_returned)], whole=(*whole,)
        )


def _of_inexact(primals: Any, tangents: Any) -> list[Any]:
    """Return the tangents, with symbolic zeros for integers, which have no derivative."""
    return [t if _is_inexact(a) else zero_like(a) for a, t in zip(primals, tangents)]


_RULES = _ProgramRules()


# ------------------------------------------------------------------------------- the function


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
    :func:`log_prob_and_entropy`, its kernel runs on the chunk.

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
      rows: pytrees of arrays whose leading axes are the positions, the axes of x without the last.
        Arrays of labels, advantages, or a teacher's hidden states are examples.
      bias: array (V,), any of these dtypes; or None.
      where: None, or a boolean mask of positions, or float weights of positions (which have no
        gradient). It has one axis less than x, and broadcasts to ``x.shape[:-1]``. Where it is
        False or 0, x and rows are ignored, even if they are NaN, and their gradients are 0.
      reduction: ``"mean"``: ``sum(where * loss) / sum(where)``, or 0 if the denominator is 0;
        ``"sum"``: ``sum(where * loss)``; or ``"none"``: the results of all positions. Floats are
        multiplied by ``where``. Integers and booleans are 0 or False where ``where`` is 0.
      chunk: number of positions in a chunk, at least 1; on a mesh, this counts the positions of one
        device. None lets jaxnorm choose as :func:`linear_softmax_cross_entropy` does for float32
        logits.
      dtype: dtype to which x and weight are cast if they promote to a wider dtype. For example,
        ``jnp.bfloat16`` rounds a float32 weight, so that the matmuls run in bfloat16. With None,
        they are cast to the dtype to which they promote.

    Returns:
      For ``"mean"`` and ``"sum"``, a scalar: float32, or float64 if the logits or the results of
      ``fun`` are float64. For ``"none"``, the pytree of ``fun``, with the axes of the positions in
      front of each array's own axes.

    Differentiable with respect to x, weight, bias, floats in ``rows``, and floats that ``fun``
    closes over, in reverse and forward mode, to any order; gradients have the dtypes of their
    arguments. The gradient of a chunk's logits is rounded to the matmuls' dtype. The gradients of
    weight, bias and closed-over arrays are summed over the chunks in float32. The forward pass of a
    mean or a sum saves only the gradients, as in :func:`linear_softmax_cross_entropy`. With
    ``"none"``, it saves its operands. If a `jax.vmap` batches weight or an array that ``fun``
    closes over, the elements of the batch are computed one after another; pass an array as one of
    ``rows`` to compute them together.

    On a mesh, the positions and d may be sharded, as in :func:`linear_softmax_cross_entropy`. A
    weight that is sharded along d or V is gathered once, before the loop, and its gradient is
    reduced over the devices once, after the loop. Arrays that ``fun`` closes over are replicated.

    Outside of `jax.jit`, each call traces and compiles ``fun`` again.

    Raises:
      TypeError: ``fun`` is not callable, the dtype of x, weight or bias, or ``dtype``, is not a
        supported float dtype, ``where`` has an integer dtype, ``rows`` or ``fun``'s result have
        complex numbers, or ``chunk`` is not an integer.
      ValueError: the shape of an array or of ``fun``'s result, ``reduction`` or ``chunk`` is wrong,
        or ``fun`` has side effects, such as `jax.debug.print`.

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
            f"{NAME}: fun has type {type(fun).__name__}; expected a function of one position's "
            "logits, e.g. lambda logits, label: jax.nn.logsumexp(logits) - logits[label]"
        )
    checks.one_of(NAME, "reduction", reduction, get_args(Reduction))
    x = checks.float_array(NAME, "x", x)
    weight = checks.float_array(NAME, "weight", weight)
    check_shapes(NAME, x, weight)
    positions = x.shape[:-1]
    leaves, tree = jax.tree.flatten(rows)
    leaves = [*map(functools.partial(_row, positions), leaves)]
    head = LinearProgram(
        "linear_loss",
        chunk=None if chunk is None else checks.integer(NAME, "chunk", chunk, "rows"),
        has_bias=bias is not None,
        logits_scale=1.0,
        logit_softcap=None,
        implementation=None,
        precision=jax.config.jax_default_matmul_precision,
        reduction=reduction,
        has_where=where is not None,
        dtype=None if dtype is None else checks.dtype(NAME, "dtype", dtype),
    )
    logits = jax.ShapeDtypeStruct(weight.shape[1:], head.dtypes(x.dtype, weight.dtype)[1])
    program, shared, results = _traced(fun, logits, leaves, tree, len(positions), reduction)
    head = head.replaced(program=program)
    arrays = [x, weight]
    if bias is not None:
        arrays.append(bias_array(NAME, "bias", bias, weight))
    if where is not None:
        wide = checks.arithmetic_dtype(x.dtype, weight.dtype)
        arrays.append(of_positions(NAME, where, positions, wide))
    outputs = _RULES.bind(head, *arrays, *leaves, *shared)
    return outputs[0] if reduction != "none" else jax.tree.unflatten(results, outputs)


def _row(positions: tuple[int, ...], leaf: Any) -> jax.Array:
    """Convert an array of ``rows``, and check that its leading axes are the positions."""
    array = (
        leaf if isinstance(leaf, jax.Array) else checks.any_array(NAME, "an array in rows", leaf)
    )
    if array.shape[: len(positions)] != positions:
        raise ValueError(
            f"{NAME}: an array in rows has shape {array.shape}; expected leading axes {positions}, "
            "the shape of x without its last axis; if all positions share the array, let fun close "
            "over it"
        )
    _refuse_complex("an array in rows", array)
    return array


def _refuse_complex(name: str, array: Any) -> None:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(
            f"{NAME}: {name} has dtype {array.dtype}; expected real numbers; split it into "
            "its real and its imaginary part"
        )


def _traced(
    fun: Callable[..., Any],
    logits: Any,
    leaves: Sequence[jax.Array],
    tree: Any,
    lead: int,
    reduction: Reduction,
) -> tuple[Program, list[jax.Array], Any]:
    """Trace `fun` for one position. Return the program, what `fun` closes over, and its tree."""
    trees = []

    def run(logits: jax.Array, *leaves: Any) -> list[jax.Array]:
        results, result_tree = jax.tree.flatten(fun(logits, *jax.tree.unflatten(tree, leaves)))
        trees.append(result_tree)
        results = [checks.any_array(NAME, "fun's result", y) for y in results]
        shapes = [y.shape for y in results]
        if reduction != "none" and shapes != [()]:
            given = (
                f"an array of shape {shapes[0]}" if len(shapes) == 1 else f"{len(shapes)} arrays"
            )
            raise ValueError(
                f"{NAME}: fun returns {given}; expected a scalar, the loss of one position, for "
                f'reduction="{reduction}"; pass reduction="none" for other results'
            )
        if not results:
            raise ValueError(f"{NAME}: fun returns no array; expected a pytree of arrays")
        for y in results:
            _refuse_complex("fun's result", y)
        if reduction != "none":
            results = [y.astype(checks.arithmetic_dtype(logits.dtype, y.dtype)) for y in results]
        return results

    types = [jax.ShapeDtypeStruct(a.shape[lead:], a.dtype) for a in leaves]
    # Trace without a mesh: types of one position with a mesh would be wrong on a shard.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        traced = jax.make_jaxpr(run)(logits, *types)
    jaxpr = traced.jaxpr
    effects = {type(effect).__name__ for effect in jaxpr.effects} - {"NamedAxisEffect"}
    if effects:
        raise ValueError(
            f"{NAME}: fun has side effects ({', '.join(sorted(effects))}); expected a function "
            'without any; return the array with reduction="none", and print it after the call'
        )
    invars = [*jaxpr.invars, *jaxpr.constvars]
    program = Program(ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars), []), len(leaves))
    shared = [*map(jnp.asarray, traced.consts)]
    for array in shared:
        _refuse_complex("an array that fun closes over", array)
    return program, shared, trees[0]
