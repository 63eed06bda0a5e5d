"""Two ways to write differentiable functions that save only their arguments for the backward pass.

`recomputed(f, ...)` evaluates f. The backward pass recomputes f's intermediates from f's arguments.
This needs an optimization barrier: otherwise, XLA would save the intermediates of the forward pass
and use them in the backward pass. `jax.checkpoint` puts all arguments behind a barrier. In a loop
over layers, this makes XLA copy the layer's slice of each stacked argument.

`recomputed` avoids these copies, because only a bool is behind the barrier. The bool is always
true, but a barrier hides its value from XLA. In f's derivative df, the argument x is replaced by
``select(bool, x, 0)``, which equals x. Everything that df computes from x therefore depends on the
bool. The barrier returns the bool only when the cotangent ct is available, so XLA cannot compute
these arrays earlier::

    y = f(x, ..., *arrays)                                  a `jax.custom_jvp`
    dy = df(select(true, x, 0), ..., *arrays)(tangents)     a primitive, linear in tangents
    df(select(barrier(true, ct), x, 0), ...)^T(ct)          its transpose: the same primitive

`linear(f, residuals, tangent)` is for JVP rules. If a rule computes `dy = f(residuals, dx)` in
plain JAX, JAX saves the residuals of each operation in f, such as a cast copy of a residual.
`linear` makes f a single primitive, which is linear in dx. JAX then saves only `residuals`, and
f's intermediates are recomputed from them. The transpose of this primitive is the same primitive
with another program as its parameter. `jax.checkpoint` around f has the same effect, but under
``jax_remat3`` it has no transpose (``RematTraced must implement transpose``, jax 0.11.2 to
0.12.0.1).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun  # type: ignore[attr-defined]
from jax.interpreters import ad, batching, mlir, partial_eval

from jaxnorm.primitives.rules import jvp, with_wide_types

Function = Callable[..., jax.Array]


def recomputed(f: Function, rows: Sequence[jax.Array], *arrays: jax.Array) -> jax.Array:
    """Return ``f(*rows, *arrays)``; save only `rows`, `arrays` and arrays that f closes over.

    The backward pass recomputes f's intermediates twice: for the gradients of `rows`, and for the
    gradients of `arrays`. Each of the two recomputations has its own bool behind the barrier (see
    the module's docstring). With a single bool, both kinds of gradients would use the same
    intermediates. XLA would then compute expensive intermediates, such as gelu's tanh, in one
    kernel and store them in float32 for another kernel.

    Args:
      f: function of arrays. XLA recomputes only intermediates that f computes from the first of
        `rows`. It may save others.
      rows, arrays: arrays of any dtypes.
    """
    traced = jax.make_jaxpr(f)(*rows, *arrays)

    def closed(*operands: jax.Array) -> jax.Array:
        of_rows, constants, rest = _split(operands, len(rows), len(rows) + len(traced.consts))
        (y,) = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, constants))(*of_rows, *rest)
        return y

    return _recomputed(closed, len(rows), *rows, *traced.consts, *arrays)


def _of_program(
    name: str, lower: Callable[..., Any], jvp: Callable[..., Any], transpose: Callable[..., Any]
) -> Primitive:
    """Return a new primitive that evaluates its parameter `jaxpr`.

    `lower`, `jvp` and `transpose` are the rules of the primitive.
    """
    primitive = Primitive(name)

    def batch(
        axis: Any, arrays: Sequence[Any], dims: Sequence[Any], *, jaxpr: ClosedJaxpr, **params: Any
    ) -> tuple[list[jax.Array], Sequence[int | None]]:
        if all(dim is None for dim in dims):  # JAX also applies this rule then.
            return primitive.bind(*arrays, jaxpr=jaxpr, **params), [None] * len(jaxpr.out_avals)
        batched = jax.vmap(
            jaxpr_as_fun(jaxpr),
            in_axes=tuple(dims),
            axis_size=axis.size,
            axis_name=axis.name,
            spmd_axis_name=axis.spmd_name,
        )
        traced = jax.make_jaxpr(batched)(*arrays)
        return primitive.bind(*arrays, jaxpr=traced, **params), [0] * len(traced.out_avals)

    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
    primitive.def_impl(lambda *operands, jaxpr, **_: jaxpr_as_fun(jaxpr)(*operands))
    mlir.register_lowering(primitive, mlir.lower_fun(lower))
    # JAX calls this rule before it lowers a program that contains high-level primitives, such as
    # those of ``jax_remat3``.
    primitive.to_lojax = lower  # type: ignore[method-assign]
    ad.primitive_jvps[primitive] = with_wide_types(jvp)
    ad.primitive_transposes[primitive] = with_wide_types(transpose)
    batching.fancy_primitive_batchers[primitive] = with_wide_types(batch)
    return primitive


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    """The JVP rule for second derivatives: differentiate the program in plain JAX.

    This saves more residuals than the primitives' own derivatives.
    """
    return jvp(jaxpr_as_fun(jaxpr), primals, tangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _recomputed(f: Function, rows: int, *arrays: jax.Array) -> jax.Array:
    return f(*arrays)


@functools.partial(_recomputed.defjvp, symbolic_zeros=True)
def _(f: Function, rows: int, arrays: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
    along = [not isinstance(t, SymbolicZero) for t in tangents]

    def tangent(true: jax.Array, _: jax.Array, x: jax.Array, *operands: jax.Array) -> jax.Array:
        arrays, tangents = _split(operands, len(along) - 1)
        # Apply the select outside `_jvp_along`, because it must not be differentiated.
        x = lax.select(true, x, jnp.zeros_like(x))
        return _jvp_along(f, along, (x, *arrays), tangents)[1]

    operands = (np.True_, np.True_, *arrays, *_partition(along, tangents)[0])
    traced = jax.make_jaxpr(tangent)(*operands)
    # Drop the equations that are needed for y only.
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True], instantiate=True)
    traced = ClosedJaxpr(jaxpr, traced.consts)
    groups = tuple(int(i >= rows) for i, is_along in enumerate(along) if is_along)
    (dy,) = _recomputed_p.bind(*operands, jaxpr=traced, groups=groups, awaits=False)
    return f(*arrays), dy


# ------------------------------------------------------------------------------- the tangent


def _lower_recomputed(
    *operands: Any, jaxpr: ClosedJaxpr, groups: tuple[int, ...], awaits: bool
) -> list[jax.Array]:
    if awaits:
        trues, arrays, cotangents = _split(operands, 2, -len(groups))
        # XLA must not compute f's intermediates before the backward pass, because it would have to
        # store them. So the intermediates depend on two bools (see the module's docstring). The
        # bools and the cotangents are operands of one barrier, whose results are available only
        # when all its operands are. The cotangents, and therefore the bools, are available only in
        # the backward pass.
        trues, cotangents = lax.optimization_barrier((trues, cotangents))
        operands = (*trues, *arrays, *cotangents)
    return jaxpr_as_fun(jaxpr)(*operands)


def _transpose_recomputed(
    cotangents: Sequence[Any],
    *operands: Any,
    jaxpr: ClosedJaxpr,
    groups: tuple[int, ...],
    awaits: bool,
) -> list[jax.Array | None]:
    is_linear = [ad.is_undefined_primal(a) for a in operands]
    undefined, known = _partition(is_linear, operands)
    avals = [a.aval for a in undefined]
    # JAX may transpose with respect to some tangents only; the other tangents are known values.
    wanted = [group for group, linear in zip(groups, is_linear[-len(groups) :]) if linear]
    cotangents = [ad.instantiate_zeros(a) for a in cotangents]

    def transposed(*operands: jax.Array) -> Sequence[jax.Array]:
        trues, known, cotangents = _split(operands, 2, -len(jaxpr.out_avals))

        def of_group(group: int) -> Sequence[jax.Array]:
            of_all = (trues[group], trues[group], *known)

            def of_linear(*linear: jax.Array) -> list[jax.Array]:
                return jaxpr_as_fun(jaxpr)(*_merge(is_linear, linear, of_all))

            return jax.linear_transpose(of_linear, *avals)([*cotangents])

        made = {group: of_group(group) for group in {*wanted}}
        return [made[group][i] for i, group in enumerate(wanted)]

    operands = (*known, *cotangents)
    traced = jax.make_jaxpr(transposed)(*operands)
    jaxpr_, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(avals), instantiate=True)
    results = _recomputed_p.bind(
        *operands,
        jaxpr=ClosedJaxpr(jaxpr_, traced.consts),
        groups=(0,) * len(cotangents),
        awaits=True,
    )
    return _merge(is_linear, results, [None] * len(known))


# One primitive for a tangent pass of f and for the transpose of this pass. The parameter `awaits`
# tells the passes apart:
#
#     awaits=False    (true, true, *arrays, *tangents) -> tangent      the tangent pass
#     awaits=True     (true, true, *arrays, cotangent) -> cotangents   the transpose
#
# XLA must not compute f's intermediates before the backward pass. So they depend on the first two
# operands, which are bools that are always true. In the transpose, a barrier makes the bools wait
# for the cotangent, and so the intermediates wait for it, too. There are two bools because the
# gradients of `rows` and of `arrays` use separate intermediates (see `recomputed`). `groups` has a
# number for each tangent: 0 for a tangent of `rows`, which uses the first bool, and 1 for a tangent
# of `arrays`, which uses the second bool.
_recomputed_p = _of_program("jaxnorm.recomputed", _lower_recomputed, _jvp, _transpose_recomputed)


def _jvp_along(
    f: Callable[..., Any], along: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]
) -> Any:
    """Return `jax.jvp` of f with respect to some of the primals; the others are constants.

    `along` has a bool for each primal: True if f is differentiated with respect to it. `tangents`
    has the tangents of these primals only.
    """
    given, rest = _partition(along, primals)
    return jax.jvp(lambda *some: f(*_merge(along, some, rest)), given, tuple(tangents))


# ------------------------------------------------------------------------------- sequences


def _split(arrays: Sequence[Any], *at: int) -> list[tuple[Any, ...]]:
    bounds = [0, *at, len(arrays)]
    return [tuple(arrays[start:end]) for start, end in itertools.pairwise(bounds)]


def _partition(chosen: Sequence[bool], arrays: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Split a sequence into the elements for which `chosen` is True, and the others."""
    return tuple(tuple(a for c, a in zip(chosen, arrays) if c is kind) for kind in (True, False))


def _merge(chosen: Sequence[bool], some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Merge two sequences into one, in the order given by `chosen`: the inverse of `_partition`."""
    sources: dict[bool, Iterator[Any]] = {True: iter(some), False: iter(others)}
    return [next(sources[c]) for c in chosen]


# ------------------------------------------------------------------- linear functions of a tangent


def linear(
    f: Callable[..., jax.Array],
    residuals: Sequence[jax.Array],
    tangent: jax.Array,
    *,
    barrier: bool = False,
) -> jax.Array:
    """Return ``f(*residuals, tangent)``; only `residuals` are saved for its transpose.

    Args:
      f: a function of arrays, linear in the last one.
      residuals: arrays of any dtypes.
      tangent: the array in which f is linear.
      barrier: if True, XLA computes the transpose's intermediates from the residuals, and only
        after the cotangent is available. If False, XLA may reuse arrays that the forward pass has
        computed, which keeps them in memory.
    """
    traced = jax.make_jaxpr(f)(*residuals, tangent)
    residuals = (*traced.consts, *residuals)
    barriers = [barrier] * len(residuals)
    program = without_constants(traced)
    (result,) = linear_program(program, residuals, [tangent], barriers=barriers, awaits=barrier)
    return result


def linear_program(
    jaxpr: ClosedJaxpr,
    residuals: Sequence[jax.Array],
    tangents: Sequence[jax.Array],
    *,
    barriers: Sequence[bool],
    awaits: bool = False,
) -> list[jax.Array]:
    """Return the results of a program that is linear in its last arguments.

    Only `residuals` are saved for the transpose.

    Args:
      jaxpr: a program of `residuals` and `tangents`, without constants.
      residuals: arrays of any dtypes.
      tangents: the arrays in which the program is linear.
      barriers: a bool for each residual. If it is True, an optimization barrier separates the
        residual from the transpose. XLA then cannot use a value of the forward pass in place of one
        that the transpose computes from the residual.
      awaits: if True, the barrier includes the cotangents.
    """
    results: list[jax.Array] = _linear_p.bind(
        *residuals,
        *tangents,
        jaxpr=jaxpr,
        barriers=tuple(barriers),
        awaits=awaits,
        transposed=False,
    )
    return results


def without_constants(traced: Any) -> ClosedJaxpr:
    """Return a traced program's jaxpr, in which the constants have become the first arguments."""
    jaxpr = traced.jaxpr
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), [])


def _run_linear(
    *operands: jax.Array,
    jaxpr: ClosedJaxpr,
    barriers: tuple[bool, ...],
    awaits: bool,
    transposed: bool,
) -> list[jax.Array]:
    if transposed:
        chosen = [*barriers, *[awaits] * (len(operands) - len(barriers))]
        through, rest = _partition(chosen, operands)
        if through:
            operands = tuple(_merge(chosen, lax.optimization_barrier(through), rest))
    results: list[jax.Array] = jaxpr_as_fun(jaxpr)(*operands)
    return results


def _transpose_linear(
    cotangents: Sequence[Any],
    *operands: Any,
    jaxpr: ClosedJaxpr,
    barriers: tuple[bool, ...],
    awaits: bool,
    transposed: bool,
) -> list[jax.Array | None]:
    is_linear = [ad.is_undefined_primal(a) for a in operands]
    undefined, known = _partition(is_linear, operands)
    given = [not isinstance(ct, ad.Zero) for ct in cotangents]
    if not any(given):
        return [None] * len(operands)
    nonzero, zeros = _partition(given, cotangents)
    avals = [a.aval for a in undefined]

    def transpose(*arrays: jax.Array) -> Sequence[jax.Array]:
        known, some = _split(arrays, len(arrays) - len(nonzero))
        cotangents = _merge(given, some, [ad.instantiate_zeros(ct) for ct in zeros])

        def of_linear(*linear: jax.Array) -> list[jax.Array]:
            return jaxpr_as_fun(jaxpr)(*_merge(is_linear, linear, known))

        return jax.linear_transpose(of_linear, *avals)(cotangents)

    traced = jax.make_jaxpr(transpose)(*known, *nonzero)
    # A tangent that is not differentiated is a known operand, and has no barrier.
    every = [*barriers, *[False] * (len(operands) - len(barriers))]
    known_barriers = tuple(b for b, linear in zip(every, is_linear) if not linear)
    results = _linear_p.bind(
        *traced.consts,
        *known,
        *nonzero,
        jaxpr=without_constants(traced),
        barriers=(False,) * len(traced.consts) + known_barriers,
        awaits=awaits,
        transposed=not transposed,
    )
    return _merge(is_linear, results, [None] * len(known))


def _jvp_linear(primals: Sequence[Any], tangents: Sequence[Any], **static: Any) -> Any:
    residuals = len(static["barriers"])
    if not all(isinstance(t, ad.Zero) for t in tangents[:residuals]):
        return _jvp(primals, tangents, **static)
    along = map(ad.instantiate_zeros, tangents[residuals:])
    of = (*primals[:residuals], *along)
    return _linear_p.bind(*primals, **static), _linear_p.bind(*of, **static)


# A primitive that computes (*residuals, *tangents) -> results. If its parameter `transposed` is
# True, it computes (*residuals, *cotangents of the results) -> cotangents of the tangents.
_linear_p = _of_program("jaxnorm.linear", _run_linear, _jvp_linear, _transpose_linear)
