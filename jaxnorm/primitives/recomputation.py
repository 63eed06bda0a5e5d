"""Derivatives that save only a function's arguments, and recompute its intermediates.

`recomputed(f, ...)` evaluates f. The backward pass recomputes f's intermediates from f's arguments.
This needs an optimization barrier: without one, XLA saves the intermediates of the forward pass and
uses them in the backward pass. `jax.checkpoint` puts all arguments behind a barrier. In a loop over
layers, this makes XLA copy the layer's slice of each stacked argument. (`prevent_cse` can exempt
arguments from the barrier, but such a `jax.checkpoint` fails inside another `jax.checkpoint` whose
policy saves an argument: jax 0.11.2 to 0.12.0.1.)

`recomputed` avoids these copies, because only a bool is behind the barrier. The bool is a constant,
but a barrier hides its value from XLA. In f's derivative df, the argument x is replaced by
``select(bool, x, 0)``, which equals x. Everything that df computes from x therefore depends on the
bool. The barrier returns the bool only when the cotangent ct is available, so XLA cannot compute
these arrays earlier::

    y = f(x, ..., *arrays)
    dy = df(select(true, x, 0), ..., *arrays)(tangents)     a primitive, linear in tangents
    df(select(barrier(true, ct), x, 0), ...)^T(ct)          its transpose: the same primitive

`linear_map` binds this primitive. Other JVP rules also call `linear_map`. If a rule computes ``dy =
f(residuals, dx)`` in plain JAX, JAX saves what the transpose of each operation in f needs, such as
a cast copy of a residual. With `linear_map`, JAX saves only `residuals`, and f's intermediates are
recomputed. `jax.checkpoint` around f has the same effect, but under ``jax_remat3`` it has no
transpose (``RematTraced must implement transpose``, jax 0.11.2 to 0.12.0.1).

`with_tangent` replaces the derivative of an array that has been computed before. All derivative
rules for functions in plain JAX use it, instead of a `jax.custom_jvp` around the function, for two
reasons: `jax.checkpoint` policies do not see names and matmuls inside a `jax.custom_jvp`, and
`checkify` cannot be differentiated if it adds a check there (jax 0.11.2 to 0.12.0.1).
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

from jaxnorm.calls import private_jax
from jaxnorm.primitives.rules import jvp, with_wide_types, zero_like

Function = Callable[..., jax.Array]


# ------------------------------------------------------------------ a derivative in place of JAX's


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_tangent(rule: tuple[Any, ...], y: jax.Array, *arrays: Any) -> jax.Array:
    """Return y unchanged, and replace its derivative.

    JAX also traces y's own derivative. Usually nothing uses it, so it is removed from the program.
    But y must be differentiable, because jax 0.11.2 inlines `with_tangent` where it differentiates
    a scan twice.

    Args:
      rule: a function and its first arguments, which are static. The function also takes y, the
        tuple `arrays`, and a tuple of their tangents, in which None stands for a zero. It returns
        y's tangent, or None for a zero. It gets the y that `with_tangent` returns, not the argument
        y: if it used the argument, JAX would save both arrays, although they are equal.
      y: an array.
      arrays: arrays, from whose tangents y's tangent is computed; some may be None.
    """
    del rule, arrays
    return y


@functools.partial(with_tangent.defjvp, symbolic_zeros=True)
def _(rule: tuple[Any, ...], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    (y, *arrays), (_, *along) = primals, tangents
    function, *static = rule
    along = [None if isinstance(t, SymbolicZero) else t for t in along]
    result = with_tangent(rule, y, *arrays)
    dy = function(*static, result, tuple(arrays), tuple(along))
    return result, SymbolicZero(jax.typeof(y).to_tangent_aval()) if dy is None else dy


# ------------------------------------------------------------------------------- functions


def recomputed(f: Function, rows: Sequence[jax.Array], *arrays: jax.Array) -> jax.Array:
    """Return ``f(*rows, *arrays)``; save only `rows`, `arrays` and arrays that f closes over.

    The backward pass recomputes f's intermediates twice: for the gradients of `rows`, and for the
    gradients of `arrays`. Each of the two recomputations has its own bool behind the barrier (see
    the module's docstring). With a single bool, both kinds of gradients would use the same
    intermediates. XLA would then compute expensive intermediates, such as gelu's tanh, in one
    kernel, and store them in float32 for another kernel.

    f's effects, such as `jax.debug.print`, happen once: derivatives leave them out. This is not
    possible for an `io_callback` with a result, for a write to a `Ref`, and for an effect inside of
    a `jax.jit` in f. If f has such an effect, JAX differentiates f and saves its intermediates.

    Args:
      f: function of arrays. XLA recomputes only intermediates that f computes from ``rows[0]``. It
        may save others.
      rows, arrays: arrays of any dtypes.
    """
    traced = jax.make_jaxpr(f)(*rows, *arrays)
    jaxpr = without_constants(traced)
    if _has_effects(jaxpr):
        return f(*rows, *arrays)
    operands = (*traced.consts, *rows, *arrays)
    (y,) = jaxpr_as_fun(jaxpr)(*operands)
    start = len(traced.consts)
    return with_tangent((_tangent, jaxpr, start, start + len(rows)), y, *operands)


def _tangent(
    jaxpr: ClosedJaxpr,
    start: int,
    end: int,
    y: jax.Array,
    arrays: Sequence[Any],
    tangents: Sequence[Any],
) -> jax.Array | None:
    """Return the tangent of a program's result, as a sum of two terms.

    One term is for the tangents of ``arrays[start:end]``, the rows. The other term is for the
    tangents of all other arrays.
    """
    terms = []
    for of_rows in (True, False):
        chosen = [t is not None and (start <= i < end) is of_rows for i, t in enumerate(tangents)]
        if any(chosen):
            f = functools.partial(_tangent_of_some, jaxpr, chosen, start, of_rows)
            # Give the two terms different bools, because XLA merges equal barriers.
            residuals = [*arrays, np.bool_(of_rows)]
            terms.append(linear_map(f, residuals, *_partition(chosen, tangents)[0], waiting=1))
    return functools.reduce(jnp.add, terms) if terms else None


def _tangent_of_some(
    jaxpr: ClosedJaxpr, chosen: Sequence[bool], hidden: int, is_true: bool, *operands: jax.Array
) -> jax.Array:
    """Return the tangent of a program's result along the tangents of some of its arguments.

    The operands are the arguments, a bool, and the tangents of the `chosen` arguments. The value of
    the bool is `is_true`, but a barrier may hide it from XLA. Everything that depends on the
    argument with the index `hidden` also depends on the bool.
    """
    arrays, (value,), tangents = _split(operands, len(chosen), len(chosen) + 1)
    x = arrays[hidden]
    cases = [x, jnp.zeros_like(x)] if is_true else [jnp.zeros_like(x), x]
    # Apply the select outside of the JVP, because it must not be differentiated.
    arrays = (*arrays[:hidden], lax.select(value, *cases), *arrays[hidden + 1 :])
    given, rest = _partition(chosen, arrays)

    def of_given(*given: jax.Array) -> jax.Array:
        (y,) = jaxpr_as_fun(jaxpr)(*_merge(chosen, given, rest))
        return y

    return jax.jvp(of_given, given, tangents)[1]


# ------------------------------------------------------------------ linear functions of tangents


def linear_map(
    f: Function, residuals: Sequence[Any], *tangents: jax.Array, waiting: int = 0
) -> jax.Array:
    """Return ``f(*residuals, *tangents)``; only `residuals` are saved for its transpose.

    The transpose recomputes f's intermediates from `residuals`. f's effects, such as
    `jax.debug.print`, are left out.

    Args:
      f: a function of arrays, linear in `tangents`.
      residuals: arrays of any dtypes.
      tangents: the arrays in which f is linear.
      waiting: the number of residuals, counted from the last one, that are behind a barrier in the
        transpose. Arrays that depend on these residuals are computed after the cotangent is
        available. Arrays that depend only on other residuals are not always recomputed: XLA may
        store and reuse those of the forward pass.
    """
    (result,) = _bind(f, residuals, tangents, waiting, transposed=False)
    return result


def linear_program(
    program: ClosedJaxpr,
    residuals: Sequence[jax.Array],
    tangents: Sequence[jax.Array],
    *,
    waiting: int,
) -> list[jax.Array]:
    """Return the results of a traced program, as `linear_map` does for a function.

    The program's arguments are `residuals` and `tangents`. It has no constants.
    """
    static = {"count": len(tangents), "waiting": waiting, "transposed": False}
    results: list[jax.Array] = _linear_map_p.bind(*residuals, *tangents, jaxpr=program, **static)
    return results


def _bind(
    f: Callable[..., Any],
    residuals: Sequence[Any],
    along: Sequence[Any],
    waiting: int,
    transposed: bool,
) -> list[jax.Array]:
    """Trace f, remove equations and operands that f's results do not need, and bind the primitive.

    `along` are the arrays in which f is linear. If `transposed` is True, f's effects are kept: they
    come from custom backward passes, which run only in a transpose.
    """
    traced = jax.make_jaxpr(f)(*residuals, *along)
    operands = (*traced.consts, *residuals)
    jaxpr = without_constants(traced).jaxpr
    jaxpr = jaxpr if transposed else _without_effects(jaxpr)
    kept = [False] * len(operands) + [True] * len(along)
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=kept)
    of_waiting = used[len(operands) - waiting : len(operands)]
    results: list[jax.Array] = _linear_map_p.bind(
        *itertools.compress(operands, used),
        *along,
        jaxpr=ClosedJaxpr(jaxpr, []),
        count=len(along),
        waiting=sum(of_waiting),
        transposed=transposed,
    )
    return results


def _without_effects(jaxpr: Any) -> Any:
    """Return a jaxpr without the equations that have effects but no results, such as prints.

    Equations that write to a `Ref` stay, because other equations read it. They are recognised by
    the attribute `input_index` of their effect.
    """

    def is_needed(equation: Any) -> bool:
        writes = any(hasattr(effect, "input_index") for effect in equation.effects)
        return bool(equation.outvars) or not equation.effects or writes

    return jaxpr.replace(eqns=[e for e in jaxpr.eqns if is_needed(e)])


def _has_effects(program: ClosedJaxpr) -> bool:
    """Return True if a program has effects that `_without_effects` does not remove.

    JAX also regards the use of an axis name of `jax.vmap` or `jax.shard_map` as an effect. Such an
    effect may be repeated, so it does not count.
    """
    equations = _without_effects(program.jaxpr).eqns
    kinds = {type(effect).__name__ for equation in equations for effect in equation.effects}
    return bool(kinds - {"NamedAxisEffect"})


def without_constants(traced: Any) -> ClosedJaxpr:
    """Return a traced program's jaxpr, in which the constants have become the first arguments."""
    jaxpr = traced.jaxpr
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), [])


def _run(
    *operands: jax.Array, jaxpr: ClosedJaxpr, count: int, waiting: int, transposed: bool
) -> list[jax.Array]:
    if transposed and waiting:
        # The results of a barrier are available only when all its operands are.
        start = len(operands) - count - waiting
        operands = (*operands[:start], *lax.optimization_barrier(operands[start:]))
    results: list[jax.Array] = jaxpr_as_fun(jaxpr)(*operands)
    return results


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    jaxpr: ClosedJaxpr,
    count: int,
    waiting: int,
    transposed: bool,
) -> list[jax.Array | None]:
    if all(isinstance(ct, ad.Zero) for ct in cotangents):
        return [None] * len(operands)
    residuals, along = _split(operands, len(operands) - count)
    # JAX may transpose with respect to some tangents only. The other tangents are then known
    # arrays, whose values have no effect on the transpose.
    wanted = [ad.is_undefined_primal(a) for a in along]
    undefined, known = _partition(wanted, along)

    def transpose(*arrays: jax.Array) -> Sequence[jax.Array]:
        residuals, cotangents = _split(arrays, len(operands) - count)
        zeros = [ad.instantiate_zeros(zero_like(a)) for a in known]

        def of_wanted(*tangents: jax.Array) -> list[jax.Array]:
            return jaxpr_as_fun(jaxpr)(*residuals, *_merge(wanted, tangents, zeros))

        return jax.linear_transpose(of_wanted, *[a.aval for a in undefined])([*cotangents])

    arrays = [ad.instantiate_zeros(ct) for ct in cotangents]
    results = _bind(transpose, residuals, arrays, waiting, transposed=not transposed)
    return [*[None] * len(residuals), *_merge(wanted, results, [None] * len(known))]


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    count: int,
    **static: Any,
) -> Any:
    of_residuals, along = _split(tangents, len(tangents) - count)
    if any(not isinstance(t, ad.Zero) for t in of_residuals):
        # For second derivatives, differentiate the program in plain JAX. This saves more residuals.
        return jvp(jaxpr_as_fun(jaxpr), primals, tangents)
    bind = functools.partial(_linear_map_p.bind, jaxpr=jaxpr, count=count, **static)
    return bind(*primals), bind(*primals[: len(of_residuals)], *map(ad.instantiate_zeros, along))


def _batch(
    axis: Any, arrays: Sequence[Any], dims: Sequence[Any], *, jaxpr: ClosedJaxpr, **static: Any
) -> tuple[list[jax.Array], list[int | None]]:
    """Batch the program. Results that depend on no batched operand are not batched.

    JAX calls this rule even if no operand is batched.
    """
    to = [batching.zero_if_mapped] * len(jaxpr.out_avals)
    batched, has_batch = batching.batch_jaxpr_axes(jaxpr, axis, dims, to)
    results = _linear_map_p.bind(*arrays, jaxpr=batched, **static)
    return results, [0 if is_batched else None for is_batched in has_batch]


# A primitive that evaluates the program `jaxpr`, which is linear in its last `count` operands. The
# transpose of the primitive is the same primitive with another program:
#
#     transposed=False    (*residuals, *tangents) -> result
#     transposed=True     (*residuals, *results' cotangents) -> tangents' cotangents
#
# If `transposed` is True, the last `waiting` residuals are behind a barrier (see `linear_map`).
_linear_map_p = Primitive("jaxnorm.linear_map")
_linear_map_p.multiple_results = True
_linear_map_p.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
_linear_map_p.def_impl(lambda *operands, jaxpr, **_: jaxpr_as_fun(jaxpr)(*operands))
mlir.register_lowering(_linear_map_p, mlir.lower_fun(_run))
# JAX calls this rule before it lowers a program with high-level primitives, as with ``jax_remat3``.
_linear_map_p.to_lojax = _run  # type: ignore[method-assign]
ad.primitive_jvps[_linear_map_p] = with_wide_types(_jvp)
ad.primitive_transposes[_linear_map_p] = with_wide_types(_transpose)
batching.fancy_primitive_batchers[_linear_map_p] = with_wide_types(_batch)
private_jax.batch_custom_vjps()


# ------------------------------------------------------------------------------- sequences


def _split(arrays: Sequence[Any], *at: int) -> list[tuple[Any, ...]]:
    bounds = [0, *at, len(arrays)]
    return [tuple(arrays[start:end]) for start, end in itertools.pairwise(bounds)]


def _partition(chosen: Sequence[bool], arrays: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Return two tuples: the elements for which `chosen` is True, and the other elements."""
    return tuple(tuple(a for c, a in zip(chosen, arrays) if c is kind) for kind in (True, False))


def _merge(chosen: Sequence[bool], some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Merge two sequences into one, in the order of `chosen`: the inverse of `_partition`."""
    sources: dict[bool, Iterator[Any]] = {True: iter(some), False: iter(others)}
    return [next(sources[c]) for c in chosen]
