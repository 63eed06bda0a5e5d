"""Traced programs as flat lists of equations, which can be split and evaluated in parts."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import (  # type: ignore[attr-defined]
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Var,
    jaxpr_as_fun,
)

# Primitives that run an inner program once. The inner program becomes part of the flat list.
_CALLS = ("jit", "closed_call", "core_call")
# Parameters of `jit` that restrict the placement of its arrays. A call that sets one of them, or
# that sets compiler options, stays a single equation.
_PLACEMENTS = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")


# Maps the classes of primitives of `jax_remat3` to the names of the older primitives.
_HIGH_LEVEL = {"CheckpointName": "name", "CheckpointNameFwd": "name", "RematTraced": "remat2"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program without constants or nested calls.

    Attributes:
      inputs: variables of the arguments, then of the traced program's constants.
      outputs: the results: variables or literals.
      equations: the equations, in an order in which they can be evaluated.
      constants: values of the traced program's constants.
      template: the traced jaxpr, from which `closed` copies all other fields of a jaxpr.
    """

    inputs: tuple[Var, ...]
    outputs: tuple[Any, ...]
    equations: tuple[Any, ...]
    constants: tuple[Any, ...]
    template: Jaxpr

    def closed(
        self, equations: Sequence[Any], inputs: Sequence[Var], outputs: Sequence[Any]
    ) -> Any:
        """Return a closed jaxpr of some of the equations, with other inputs and outputs."""
        jaxpr = self.template.replace(
            constvars=[],
            invars=list(inputs),
            outvars=list(outputs),
            eqns=list(equations),
            effects=frozenset().union(*(e.effects for e in equations)),
            debug_info=self.template.debug_info.with_unknown_names(),
        )
        return ClosedJaxpr(jaxpr, [])


def flattened(traced: Any) -> Program:
    """Return the program of a closed jaxpr, with nested calls of `jax.jit` inlined."""
    equations: list[Any] = []
    constants: dict[Var, Any] = {}

    def inline(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], stack: Any) -> list[Any]:
        """Append the equations of a jaxpr with new variables, and return its results."""
        known: dict[Var, Any] = dict(zip(jaxpr.invars, given))
        for v, value in zip(jaxpr.constvars, consts):
            known[v] = new = Var(v.aval)
            constants[new] = value

        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else known[v]

        for e in jaxpr.eqns:
            operands = [read(v) for v in e.invars]
            source = e.source_info
            if stack is not None:
                source = source.replace(name_stack=stack + source.name_stack)
            if _is_inlined(e):
                body = e.params["jaxpr"]
                inner = getattr(body, "jaxpr", body)
                results = inline(inner, getattr(body, "consts", ()), operands, source.name_stack)
            else:
                results = [Var(v.aval) for v in e.outvars]
                equations.append(e.replace(invars=operands, outvars=results, source_info=source))
            known.update(zip(e.outvars, results))
        return [read(v) for v in jaxpr.outvars]

    jaxpr = traced.jaxpr
    inputs = [Var(v.aval) for v in jaxpr.invars]
    outputs = inline(jaxpr, traced.consts, inputs, None)
    return Program(
        (*inputs, *constants), tuple(outputs), tuple(equations), tuple(constants.values()), jaxpr
    )


def _is_inlined(equation: Any) -> bool:
    if equation.primitive.name not in _CALLS:
        return False
    params = equation.params
    places = [p for name in _PLACEMENTS for p in params.get(name, ())]
    is_free = all(p is None or type(p).__name__ == "UnspecifiedValue" for p in places)
    return is_free and not params.get("compiler_options_kvs")


def primitive_name(equation: Any) -> str:
    """Return the name of an equation's primitive; for a primitive of `jax_remat3`, the older name.

    JAX's new rematerialisation has its own primitives for `checkpoint_name` and `jax.checkpoint`.
    """
    high_level = type(equation.params.get("_prim")).__name__
    return _HIGH_LEVEL.get(high_level, equation.primitive.name)


def variables(atoms: Iterable[Any]) -> Iterator[Var]:
    """Yield the atoms that are variables, and skip literals."""
    return (v for v in atoms if not isinstance(v, Literal))


def scan_counts(equation: Any, body: Any) -> tuple[int, int]:
    """Return the number of a scan's constants, and the number of arrays in its carry.

    Both are derived from the arrays: a constant or an array of the carry has the same number of
    axes outside and inside the body, and a stacked array has one more axis outside. The equation
    has parameters with the two numbers, but these parameters differ between versions of JAX.
    """
    given, carries = (
        sum(len(v.aval.shape) == len(w.aval.shape) for v, w in zip(outer, inner))
        for outer, inner in ((equation.invars, body.invars), (equation.outvars, body.outvars))
    )
    return given - carries, carries


def needed(
    equations: Sequence[Any],
    outputs: Iterable[Any],
    given: Iterable[Var] = (),
    *,
    with_effects: bool = False,
) -> list[Any]:
    """Return the equations from which `outputs` can be computed, if the values `given` are known.

    If `with_effects` is True, the result includes equations with effects, and all equations that
    their operands depend on.
    """
    stop = {*given}
    wanted = {*variables(outputs)} - stop
    kept = []
    for e in reversed(equations):
        if (with_effects and e.effects) or any(v in wanted for v in e.outvars):
            kept.append(e)
            wanted |= {v for v in variables(e.invars) if v not in stop}
    return kept[::-1]


def reached_from(equations: Iterable[Any], start: Iterable[Var]) -> set[Var]:
    """Return all variables that depend on the variables in `start`, which are included."""
    found = {*start}
    for e in equations:
        if any(v in found for v in variables(e.invars)):
            found.update(e.outvars)
    return found


def evaluate(
    program: Program,
    arrays: Sequence[Any],
    special: Mapping[int, Callable[..., Sequence[Any]]],
) -> list[Any]:
    """Return the outputs of a program for the given inputs.

    Args:
      program: the program.
      arrays: values of `program.inputs`.
      special: functions that are called in place of some equations. The keys are the indices of
        these equations. Each function gets the values of the equation's operands.
    """
    values: dict[Any, Any] = dict(zip(program.inputs, arrays))
    last_use = {v: i for i, e in enumerate(program.equations) for v in variables(e.invars)}
    last_use |= dict.fromkeys(variables(program.outputs), len(program.equations))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    # Evaluate the equations between two special ones as one jaxpr.
    for start, end in itertools.pairwise([-1, *sorted(special), len(program.equations)]):
        run = program.equations[start + 1 : end]
        if run:
            operands = dict.fromkeys(v for e in run for v in variables(e.invars))
            inputs = [v for v in operands if v in values]
            outputs = [v for e in run for v in e.outvars if last_use.get(v, -1) >= end]
            results = jaxpr_as_fun(program.closed(run, inputs, outputs))(*map(read, inputs))
            values.update(zip(outputs, results))
        if end in special:
            e = program.equations[end]
            values.update(zip(e.outvars, special[end](*map(read, e.invars))))
    return [read(v) for v in program.outputs]
