"""Bounds on the rounding error of any JAX program, by error analysis of its equations.

`analyse` traces a program and evaluates its jaxpr in float64 NumPy. For each value it computes a
bound on the error of a run in the program's own dtypes: the error that the operands bring in, plus
the rounding of the equation itself. Two compilations of a program (with and without jit, on one
device or on a mesh, with or without rematerialisation) differ in the order of sums and in fusion,
but both are within the bound. So a comparison of the two needs no tolerance. `error_rules` has the
rounding error of each kind of equation.

Where errors may change a comparison, the bound of a choice between arrays (`jax.lax.select_n`)
covers all of them. The analysis assumes that errors change no index and no branch of a program.

Source: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, section 3.3.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from error_rules import RULES, Value, exact, is_uncertain, joined, parts, stored
from jax._src import config
from reference import assert_within


def analyse(program: Callable, *operands: Any) -> Any:
    """Return the results of ``program(*operands)``, with a `Value` in place of each array."""
    with _on_a_cpu(), np.errstate(all="ignore"):
        operands = jax.tree.map(_on_the_host, operands)
        jaxpr, shapes = jax.make_jaxpr(program, return_shape=True)(*operands)
        results = _run(jaxpr.jaxpr, jaxpr.consts, map(exact, jax.tree.leaves(operands)))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def values_of(analysed: Any) -> Any:
    """Return the values of the results of `analyse`, without the errors.

    They are the results of the program's equations in float64. A test of an equation's rule needs
    no more than these, and saves the time to compile the program.
    """
    return jax.tree.map(lambda result: result.value, analysed)


def _on_a_cpu() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which JAX runs on a CPU.

    The default device is a part of the keys of JAX's caches. So it is only set on other platforms:
    on a CPU, `jax.jit` then runs a program that `analyse` has traced without tracing it again.
    """
    if jax.default_backend() == "cpu":
        return contextlib.nullcontext()
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def _on_the_host(array: Any) -> Any:
    is_key = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.extended)
    # `jnp.asarray` would compile a program for each new shape, `jax.device_put` does not.
    return array if is_key else jax.device_put(np.asarray(array))


def assert_analysed(actual: Any, analysed: Any, other: Any = None) -> None:
    """Assert that each array of `actual` is within the error of its `Value` in `analysed`.

    `analysed` has the Values of a program. If another program computed `actual`, pass the Values of
    that program as `other`: its errors are added to the bounds.
    """
    actual, values = jax.tree.leaves(actual), jax.tree.leaves(analysed)
    others = values if other is None else jax.tree.leaves(other)
    for a, value, second in zip(actual, values, others, strict=True):
        bound = value.error if other is None else value.error + second.error
        assert np.all(np.isfinite(bound)), "the analysis gives no bound"
        assert_within(a, value.value.astype(np.float64), bound)


def assert_computes(
    actual: Any,
    program: Callable,
    *operands: Any,
    like: Callable | None = None,
    expected: Any = None,
) -> None:
    """Assert that `actual` is ``program(*operands)`` to within the program's rounding error.

    Args:
      like: the program that computed `actual`, if its equations differ from those of `program`. Its
        error is then added to the bound.
      expected: the exact results, if they are known. `program` then provides only the bounds.
    """
    analysed = analyse(program, *operands)
    if expected is not None:
        values, tree = jax.tree.flatten(analysed)
        known = [np.asarray(e, np.float64) for e in jax.tree.leaves(expected)]
        analysed = tree.unflatten(
            Value(np.broadcast_to(e, v.value.shape), v.error)
            for e, v in zip(known, values, strict=True)
        )
    other = None if like is None else analyse(like, *operands)
    assert_analysed(actual, analysed, other)


def assert_same_results(ours: Callable, theirs: Callable, *, as_accurate: bool = False) -> None:
    """Assert that two programs without operands have the same results, in the same dtypes.

    `analyse` returns a bound on the rounding error of each program. The results may differ by the
    sum of the two bounds. With `as_accurate`, they may differ by twice the bound for `theirs`.
    """
    results, types = ours(), jax.eval_shape(theirs)
    assert jax.tree.structure(results) == jax.tree.structure(types)
    for a, b in zip(*map(jax.tree.leaves, (results, types)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert_computes(results, theirs, like=theirs if as_accurate else ours)


# ----------------------------------------------------------------------------------- the evaluation


def _run(jaxpr: Any, consts: Any, operands: Any) -> list[Value]:
    known = dict(zip(jaxpr.constvars, map(exact, consts)))
    known |= dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Value:
        return exact(atom.val) if hasattr(atom, "val") else known[atom]

    for equation in jaxpr.eqns:
        results = _equation(equation, [read(a) for a in equation.invars])
        for variable, result in zip(equation.outvars, results, strict=True):
            known[variable] = result
    return [read(a) for a in jaxpr.outvars]


def _equation(equation: Any, operands: list[Value]) -> list[Value]:
    name, params = equation.primitive.name, equation.params
    is_simple = not (name.startswith("jaxnorm.") or name in _LOOPS or {*params} & _INNER)
    if is_simple and not (_has_floats(equation.outvars) and _has_floats(equation.invars)):
        from_floats = name == "convert_element_type" and _has_floats(equation.invars)
        is_key = any(isinstance(o.value, jax.Array) for o in operands)
        if (name in _EXACT or name in _ALSO_EXACT) and not from_floats and not is_key:
            (variable,) = equation.outvars
            arrays = [o.value.astype(a.aval.dtype) for o, a in zip(operands, equation.invars)]
            if name in _ORDERS and _has_floats(equation.invars):
                return [Value(_EXACT[name](*arrays), is_uncertain(*operands))]
            if name in ("eq", "ne") and _has_floats(equation.invars):
                # A test of equality looks for exact values, such as the 0 of masked elements.
                return [exact(_EXACT[name](*arrays))]
            values = [Value(a, o.error) for a, o in zip(arrays, operands)]
            if name in _EXACT:
                error = functools.reduce(np.maximum, [o.error for o in operands])
                result = Value(_EXACT[name](*arrays), error)
            else:
                result, _ = RULES[name](values, **params)
            found = exact(np.asarray(result.value).astype(variable.aval.dtype))
            # Integers count as exact.
            is_exact = jnp.issubdtype(variable.aval.dtype, jnp.integer)
            return [found if is_exact else Value(found.value, result.error)]
        results = equation.primitive.bind(*map(_as_jax, operands, equation.invars), **params)
        results = results if equation.primitive.multiple_results else [results]
        return [*map(exact, results)]
    if name in _CONTROL:
        return _CONTROL[name](operands, **params)
    if name in _IDENTITIES or (name == "reduce_precision" and _keeps_all_bits(equation)):
        return operands
    if name in RULES:
        (variable,) = equation.outvars
        result, rounding = RULES[name](operands, **params)
        return [stored(result, rounding, variable.aval.dtype)]
    if name == "psum":  # from `jax.lax.psum` over the axis of a `jax.vmap`
        return [
            stored(*RULES["reduce_sum"]([o], **params), v.aval.dtype)
            for o, v in zip(operands, equation.outvars, strict=True)
        ]
    if name.startswith("jaxnorm."):
        return _run_plain(equation, operands)
    if name == "call_hi_primitive":  # `jax.checkpoint` and `checkpoint_name` with jax_remat3
        return _run_high_level(params["_prim"], equation.invars, operands)
    for key in {*params} & _INNER:
        if not name.startswith(("pallas", "shard_map")):
            inner = params[key]
            return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
    raise NotImplementedError(f"program_error has no rule for {name}: add one to its tables")


def _keeps_all_bits(equation: Any) -> bool:
    """Return True if a `reduce_precision` keeps all bits of its operand's dtype."""
    dtype = equation.outvars[0].aval.dtype
    return bool(ml_dtypes.finfo(dtype).nmant <= equation.params["mantissa_bits"])


# Operations that only move elements or work on integers and booleans. NumPy runs them, because JAX
# would compile each of them separately. The rules of the operations in `_ALSO_EXACT` compute the
# results of these types, too.
_ORDERS: dict[str, Callable] = {
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal},
}
_EXACT: dict[str, Callable] = {
    **_ORDERS,
    **{"eq": np.equal, "ne": np.not_equal},
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert},
}
_ALSO_EXACT = {"broadcast_in_dim", "iota", "select_n", "reshape", "convert_element_type", "squeeze"}


def _has_floats(atoms: Any) -> bool:
    return any(jnp.issubdtype(a.aval.dtype, jnp.inexact) for a in atoms)


def _as_jax(operand: Value, atom: Any) -> Any:
    is_key = isinstance(operand.value, jax.Array)
    return operand.value if is_key else jax.device_put(operand.value.astype(atom.aval.dtype))


def _run_plain(equation: Any, operands: list[Value]) -> list[Value]:
    """Analyse one of jaxnorm's primitives by its JAX program.

    This is the program that JAX runs under `jax.disable_jit`. The same call occurs in many
    programs, so its jaxpr is cached. JAX's settings are a part of the cache's key.
    """
    types = tuple((v.aval.shape, v.aval.dtype) for v in equation.invars)
    static = tuple(equation.params.items())
    jaxpr = _traced_plain(equation.primitive, static, types, config.trace_context())
    return _run(jaxpr.jaxpr, jaxpr.consts, operands)


@functools.lru_cache(maxsize=4096)
def _traced_plain(primitive: Any, static: Any, types: Any, context: Any) -> Any:
    del context
    with jax.disable_jit():
        run = functools.partial(primitive.impl, **dict(static))
        return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*of) for of in types))


def _run_high_level(primitive: Any, variables: Any, operands: list[Value]) -> list[Value]:
    """Analyse one of JAX's high-level primitives by the JAX program to which it expands."""

    def run(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, arrays)))

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
    jaxpr = jax.make_jaxpr(run)(*avals)
    return _run(jaxpr.jaxpr, jaxpr.consts, operands)


# The names of the parameters in which JAX's call-like primitives have their jaxpr.
_INNER = {"jaxpr", "call_jaxpr", "fun_jaxpr", "callee"}
_IDENTITIES = {
    "mesh_cast",
    "optimization_barrier",
    "pcast",
    "pvary",
    "reshard",
    "sharding_constraint",
    "stop_gradient",
}


# ---------------------------------------------------- control flow, and equations with several
# results


def _scan(operands, *, length, reverse, jaxpr, ft_in, **_):
    consts, carry, stacked = map(list, ft_in.update(operands).unpack())
    each: list[list[Value]] = []
    order = range(length)[::-1] if reverse else range(length)
    for i in order:
        step = [Value(o.value[i], o.error[i]) for o in stacked]
        results = _run(jaxpr.jaxpr, jaxpr.consts, [*consts, *carry, *step])
        carry, rest = results[: len(carry)], results[len(carry) :]
        each.append(rest)
    each = each[::-1] if reverse else each
    return [*carry, *(joined(np.stack, results) for results in zip(*each))]


def _while(operands, *, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts, **_):
    split = cond_nconsts + body_nconsts
    of_cond, of_body, state = (
        operands[:cond_nconsts],
        operands[cond_nconsts:split],
        operands[split:],
    )
    while _run(cond_jaxpr.jaxpr, cond_jaxpr.consts, [*of_cond, *state])[0].value:
        state = _run(body_jaxpr.jaxpr, body_jaxpr.consts, [*of_body, *state])
    return state


def _cond(operands, *, branches, **_):
    index, *rest = operands
    branch = branches[int(np.clip(int(index.value), 0, len(branches) - 1))]
    return _run(branch.jaxpr, branch.consts, rest)


_LOOPS = {"scan", "while", "cond"}
_CONTROL: dict[str, Callable] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "split": lambda operands, *, sizes, axis, **_: parts(
        np.split, operands[0], np.cumsum(sizes)[:-1], axis
    ),
    "unstack": lambda operands, *, axis, **_: parts(np.moveaxis, operands[0], axis, 0),
}
