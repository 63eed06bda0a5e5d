"""Linear functions in the rules of differentiation, which save exactly the arrays they are given.

A rule `dy = f(residuals, dx)` written in plain JAX saves whatever its operations save: a cast copy
of a residual, or an array that is computed from residuals. Here f is one primitive, linear in dx,
and f's transpose is the same primitive. Both compute what they need from the residuals.

`jax.checkpoint` around f has the same effect, but under ``jax_remat3`` it has no transpose
(``RematTraced must implement transpose``, jax 0.11.2 to 0.12.0.1).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun  # type: ignore[attr-defined]
from jax.interpreters import ad, batching, mlir


def linear(
    f: Callable[..., jax.Array],
    residuals: Sequence[jax.Array],
    tangent: jax.Array,
    *,
    barrier: bool = False,
) -> jax.Array:
    """Return ``f(*residuals, tangent)``; its transpose saves `residuals` and nothing else.

    Args:
      f: a function of arrays, linear in the last one.
      residuals: arrays of any dtypes.
      tangent: the array in which f is linear.
      barrier: if True, XLA computes the transpose's intermediates from the residuals, after the
        cotangent is there. If False, it may reuse arrays that the forward pass has computed.
    """
    traced = jax.make_jaxpr(f)(*residuals, tangent)
    operands = (*traced.consts, *residuals, tangent)
    jaxpr = _without_constants(traced)
    (result,) = _linear.bind(*operands, jaxpr=jaxpr, barrier=barrier, transposed=False)
    return result


def _without_constants(traced: Any) -> ClosedJaxpr:
    """Return the program with its constants as its first arguments."""
    jaxpr = traced.jaxpr
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), [])


def _run(
    *operands: jax.Array, jaxpr: ClosedJaxpr, barrier: bool, transposed: bool
) -> list[jax.Array]:
    if barrier and transposed:
        operands = lax.optimization_barrier(operands)
    results: list[jax.Array] = jaxpr_as_fun(jaxpr)(*operands)
    return results


def _transpose(
    cotangents: Sequence[Any], *operands: Any, jaxpr: ClosedJaxpr, barrier: bool, transposed: bool
) -> list[jax.Array | None]:
    *residuals, tangent = operands
    none = [None] * len(residuals)
    (cotangent,) = cotangents
    if isinstance(cotangent, ad.Zero):
        return [*none, None]

    def transpose(*arrays: jax.Array) -> jax.Array:
        *residuals, cotangent = arrays
        of_tangent = functools.partial(jaxpr_as_fun(jaxpr), *residuals)
        (result,) = jax.linear_transpose(of_tangent, tangent.aval)([cotangent])
        return result

    jaxpr = _without_constants(traced := jax.make_jaxpr(transpose)(*residuals, cotangent))
    operands = (*traced.consts, *residuals, cotangent)
    return [
        *none,
        *_linear.bind(*operands, jaxpr=jaxpr, barrier=barrier, transposed=not transposed),
    ]


def _jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    barrier: bool,
    transposed: bool,
) -> Any:
    """Differentiate along residuals, which second order needs, as plain JAX does."""
    static = {"jaxpr": jaxpr, "barrier": barrier, "transposed": transposed}
    along = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    if along == [len(primals) - 1]:
        return _linear.bind(*primals, **static), _linear.bind(*primals[:-1], tangents[-1], **static)

    def function(*arrays: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, a in zip(along, arrays):
            operands[i] = a
        results: list[jax.Array] = jaxpr_as_fun(jaxpr)(*operands)
        return results

    return jax.jvp(function, [primals[i] for i in along], [tangents[i] for i in along])


def _batch(
    axis: Any,
    arrays: Sequence[jax.Array],
    dims: Sequence[Any],
    *,
    jaxpr: ClosedJaxpr,
    **static: Any,
) -> tuple[list[jax.Array], list[int]]:
    batched = jax.vmap(
        jaxpr_as_fun(jaxpr),
        in_axes=tuple(dims),
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name,
    )
    traced = jax.make_jaxpr(batched)(*arrays)
    operands = (*traced.consts, *arrays)
    return _linear.bind(*operands, jaxpr=_without_constants(traced), **static), [0]


# (*residuals, tangent) -> result, or, `transposed`, (*residuals, cotangent) -> the tangent's
# cotangent.
_linear = Primitive("jaxnorm.linear")
_linear.multiple_results = True
_linear.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
_linear.def_impl(_run)
mlir.register_lowering(_linear, mlir.lower_fun(_run))
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.fancy_primitive_batchers[_linear] = _batch
