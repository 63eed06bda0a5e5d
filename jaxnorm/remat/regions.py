"""Regions: parts of a program whose derivative saves the values that a minimum cut chooses.

A region is a whole function, or one of these parts of it: the body of a scan, a branch, or the body
of `jax.shard_map`. Each region is a `jax.custom_jvp` function. The rule of this function linearizes
the program, and separates the equations that depend on tangents from all others::

    forward pass     evaluates the equations that do not depend on tangents, and returns the
                     outputs and the saved values
    derivative       calls `linear_program` for each segment (see `segments`). A call takes saved
                     values, inputs of the region, and tangents. It recomputes the other values that
                     the segment needs, and then computes the segment's tangents

JAX saves the operands of these calls and nothing else. Their transposes are the backward pass.
Because `linear_program` is an ordinary linear primitive, forward mode, higher derivatives,
`jax.vmap` and `jax.shard_map` need no special code, and no policy of `jax.checkpoint` is involved.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal, Var, jaxpr_as_fun

from jaxnorm.primitives.recomputation import linear_program
from jaxnorm.remat import costs, programs, segments
from jaxnorm.remat.cuts import Cut, Graph, Step
from jaxnorm.remat.programs import Program, evaluate, flattened, needed, reached_from, variables

# For each input of a region, True if it is differentiated.
Mask = tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Pricing:
    """The price at which all regions of a function choose what they save.

    Attributes:
      price: number of bytes that are worth one second of recomputation.
      allow_costly: True if costly operations may run again, to meet a budget.
      cuts: a dict that maps graphs to fixed choices. For other graphs, the price decides.
      inside: the pricing of regions inside the body of a scan, such as a scan in a layer; None if
        this pricing applies to them as well. If the layer runs again, arrays that these inner
        regions save are in memory only while the layer runs.
    """

    price: float
    allow_costly: bool = False
    cuts: dict[Graph, Cut] = dataclasses.field(default_factory=dict)

    inside: "Pricing | None" = None

    def cut(self, graph: Graph) -> Cut:
        return self.cuts.get(graph) or graph.cut(self.price, self.allow_costly)


@dataclasses.dataclass(frozen=True)
class Linearized:
    """A program and its derivative along some of the inputs.

    Attributes:
      program: all equations. Its inputs are the inputs of the region, then the tangents, then
        constants: arrays that custom derivative rules close over.
      inputs: the inputs of the region, then the constants.
      tangents: the tangents of the differentiated inputs.
      outputs: results of the region.
      moving: indices of the results whose tangents are not zero.
      along: tangents of the results in `moving`.
      known: equations that do not depend on tangents.
      groups: equations that depend on tangents, in a list for each segment.
      residuals: the values that `linear` uses: results of `known`, and inputs.
      graph: the graph whose cuts are the choices of saved values.
      values: the variable of each value of the graph.
    """

    program: Program
    inputs: tuple[Var, ...]
    tangents: tuple[Var, ...]
    outputs: tuple[Any, ...]
    moving: tuple[int, ...]
    along: tuple[Any, ...]
    known: list[Any]
    groups: list[list[Any]]
    residuals: list[Var]
    graph: Graph
    values: list[Var]

    @property
    def linear(self) -> list[Any]:
        """All equations that depend on tangents."""
        return [e for group in self.groups for e in group]

    @property
    def seconds(self) -> float:
        """Predicted time of the forward and the backward pass."""
        return math.fsum(map(costs.seconds, (*self.known, *self.linear)))


# To break ties, the predicted time to run an equation again is multiplied by a factor. The factor
# grows from 1 for a region's first equation to almost 1 + _TIES for the last; see `Region._graph`.
_TIES = 0.05

# The type of a function that returns a `Pricing`: the price of a second in bytes, and what else
# decides which arrays a region's derivative saves. The arguments are the region, the mask, the
# values of all inputs, and the tangents of the differentiated inputs.
type Plan = Callable[["Region", Mask, Sequence[Any], Sequence[Any]], Pricing]


class Region:
    """A part of a program, which saves what its minimum cut chooses.

    Attributes:
      program: the program as a flat list of equations.
      is_free: a bool for each input: True if the array is in memory anyway, so that saving it costs
        nothing.
      in_loop: True if the region is inside a scan.
      runs: number of times that the region runs.
      parts: the regions inside this one.
      latest: the derivative that was traced last; None before the first one.
    """

    def __init__(
        self,
        traced: Any,
        is_free: Sequence[bool],
        in_loop: bool = False,
        runs: int = 1,
        varies: Sequence[bool] | None = None,
    ) -> None:
        self._traced = traced
        self.program = flattened(traced)
        self.is_free = (*is_free, *[True] * len(self.program.constants))
        self.in_loop, self.runs = in_loop, runs
        self._varies = list(varies if varies is not None else [True] * self._count)
        self.latest: Linearized | None = None
        self._linearized: dict[Any, Linearized] = {}
        self.parts: list[Region] = []
        self._special: dict[int, Callable[..., Any]] = {}
        free = {v for v, is_free in zip(self.program.inputs, self.is_free) if is_free}
        self._has_references = any(map(_refers, self.program.equations))
        for i, equation in enumerate(() if self._has_references else self.program.equations):
            make = _SPECIAL.get(equation.primitive.name)
            if make is not None and _has_derivative(equation):
                self._special[i] = make(self, equation, free)

    def __call__(self, plan: Plan, *arrays: Any) -> list[Any]:
        """Return the outputs of the region.

        When the region is differentiated, `plan` returns the `Pricing` of what is saved.
        """
        if self._has_references:
            return jaxpr_as_fun(self._traced)(*arrays)
        run = jax.custom_jvp(lambda *arrays: jaxpr_as_fun(self._traced)(*arrays[: self._count]))
        run.defjvp(functools.partial(self._jvp, plan), symbolic_zeros=True)
        return run(*arrays, *self.program.constants)

    @property
    def _count(self) -> int:
        return len(self.program.inputs) - len(self.program.constants)

    def budgeted(self) -> Iterator["Region"]:
        """Yield the regions whose choices a budget decides.

        These are this region and the regions inside it. The body of a scan is such a region, but
        the regions inside that body are left out.
        """
        yield self
        for part in () if self.in_loop else self.parts:
            yield from part.budgeted()

    def part(
        self,
        traced: Any,
        is_free: Sequence[bool],
        varies: Sequence[bool] | None = None,
        length: int | None = None,
    ) -> "Region":
        """Add a region inside this one, and return it.

        For the body of a scan, `varies` has a bool for each input (False if the input is the same
        in all iterations), and `length` is the number of iterations. Otherwise, both are None.
        """
        in_loop, runs = self.in_loop or length is not None, self.runs * (length or 1)
        region = Region(traced, is_free, in_loop, runs, varies)
        self.parts.append(region)
        return region

    def _jvp(self, plan: Plan, primals: Any, tangents: Any) -> tuple[Any, Any]:
        mask = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        given = [t for t, is_given in zip(tangents, mask) if is_given]
        pricing = plan(self, mask, primals, given)
        linearized = self.linearized(pricing, mask, primals, given)
        cut = pricing.cut(linearized.graph)
        outputs, along = self.apply(linearized, cut, primals, given)
        zeros = [SymbolicZero(jax.typeof(y).to_tangent_aval()) for y in outputs]
        moved = dict(zip(linearized.moving, along))
        return outputs, [moved.get(i, zero) for i, zero in enumerate(zeros)]

    def linearized(
        self, pricing: Pricing, mask: Mask, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> Linearized:
        """Return the derivative along the inputs that `mask` selects; trace it if it is new."""
        # The derivative includes what the parts save, which depends on the pricing. So with parts,
        # the key includes the pricing.
        key = mask, pricing if self.parts else None
        if key not in self._linearized:
            inside = (pricing.inside or pricing) if self.in_loop else pricing
            special = {i: functools.partial(f, lambda *_: inside) for i, f in self._special.items()}
            program = functools.partial(evaluate, self.program, special=special)

            def both(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
                along, moving = self._along(program, mask, primals)
                some, linear, rest = jax.linearize(along, *moving, has_aux=True)
                found = iter(some)
                return [next(found) if y is None else y for y in rest], linear(*tangents)

            traced = jax.make_jaxpr(both)(list(primals), list(tangents))
            self._linearized[key] = self._split(flattened(traced), len(primals))
        self.latest = self._linearized[key]
        return self.latest

    def residuals(self, mask: Mask, primals: Sequence[Any]) -> list[Any]:
        """Return the residuals that JAX saves to differentiate the inputs that `mask` selects."""
        run = jaxpr_as_fun(self._traced)
        along, moving = self._along(lambda arrays: run(*arrays[: self._count]), mask, primals)
        return jax.tree.leaves(jax.vjp(along, *moving, has_aux=True)[1])

    def _along(
        self, program: Callable[..., Any], mask: Mask, primals: Sequence[Any]
    ) -> tuple[Callable[..., tuple[list[Any], list[Any]]], list[Any]]:
        """Return a function of the inputs that `mask` selects, and the values of these inputs.

        The function returns two lists: the results whose dtype is inexact, and all results with
        None in place of the inexact ones.
        """
        places = [i for i, is_along in enumerate(mask) if is_along]

        def along(*moving: Any) -> tuple[list[Any], list[Any]]:
            arrays = list(primals)
            for i, a in zip(places, moving):
                arrays[i] = a
            outputs = program(arrays)
            rest = [None if i in self._inexact else y for i, y in enumerate(outputs)]
            return [outputs[i] for i in self._inexact], rest

        return along, [primals[i] for i in places]

    @property
    def _inexact(self) -> list[int]:
        return [i for i, v in enumerate(self.program.outputs) if is_inexact(v.aval)]

    def _split(self, program: Program, count: int) -> Linearized:
        """Split a traced derivative into its known and its linear equations."""
        end = len(program.inputs) - len(program.constants)
        tangents, constants = program.inputs[count:end], program.inputs[end:]
        inputs = (*program.inputs[:count], *constants)
        results = len(self.program.outputs)
        outputs, along = program.outputs[:results], program.outputs[results:]
        linear = reached_from(program.equations, tangents)
        pairs = zip(self._inexact, along)
        moves = {i: v for i, v in pairs if not isinstance(v, Literal) and v in linear}
        along = tuple(moves.values())
        is_linear = [any(v in linear for v in variables(e.invars)) for e in program.equations]
        of_linear = [e for e, tangent in zip(program.equations, is_linear) if tangent]
        of_linear = needed(of_linear, along, with_effects=True)
        uses = dict.fromkeys(v for e in of_linear for v in variables(e.invars))
        residuals = [v for v in uses if v not in linear]
        rest = [e for e, tangent in zip(program.equations, is_linear) if not tangent]
        known = needed(rest, [*outputs, *residuals], with_effects=True)
        free = {v for v, is_free in zip(inputs, self.is_free) if is_free} | {*constants}
        segment_of: dict[Var, int] = {}
        anchors: list[Var] = []
        if not self.in_loop:
            segment_of, anchors = segments.split(known, {*residuals})
        groups = segments.group(of_linear, segment_of, tangents)
        graph, values = self._graph(known, inputs, free, residuals, {*anchors})
        return Linearized(
            program,
            inputs,
            tangents,
            outputs,
            tuple(moves),
            along,
            known,
            groups,
            residuals,
            graph,
            values,
        )

    def _graph(
        self,
        known: list[Any],
        inputs: Sequence[Var],
        free: set[Var],
        residuals: list[Var],
        anchors: set[Var],
    ) -> tuple[Graph, list[Var]]:
        """Return the graph of the equations that the residuals depend on, and its variables.

        In the body of a loop, values that are the same in all iterations, such as rotary tables and
        masks, are not in the graph, unless they are costly. They are computed in each iteration.
        """
        constant = {v for v, varies in zip(inputs, self._varies) if not varies}
        equations = []
        for e in needed(known, residuals):
            if constant.issuperset(variables(e.invars)) and not costs.is_costly(e):
                constant.update(e.outvars)
            else:
                equations.append(e)
        made = [v for e in equations for v in e.outvars]
        values = [*(v for v in inputs if v not in free), *made]
        index = {v: i for i, v in enumerate(values)}
        bytes_of = {v: costs.size(v.aval) for v in values} | sizes(equations)
        steps = []
        for i, e in enumerate(equations):
            never = bool(e.effects) or (not self.in_loop and e.primitive.name in _SPECIAL)
            # Later equations cost slightly more. With equal costs, unrolled layers tie, and the
            # frontier has no point at which only some of the layers run again.
            later = 1 + _TIES * i / len(equations)
            steps.append(
                Step(
                    math.inf if never else costs.seconds(e) * later,
                    tuple(index[v] for v in variables(e.invars) if v in index),
                    tuple(index[v] for v in e.outvars),
                    costs.is_costly(e),
                    any(v in anchors for v in e.outvars),
                )
            )
        needs = [index[v] for v in residuals if v in index]
        return Graph([bytes_of[v] for v in values], steps, needs), values

    def apply(
        self, derivative: Linearized, cut: Cut, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the outputs and their tangents. The derivative saves what `cut` has chosen."""
        program, inputs = derivative.program, derivative.inputs
        primals = [*primals, *program.constants]
        saved = [derivative.values[i] for i in cut.saved]
        outputs = [*derivative.outputs, *(v for v in saved if v not in {*inputs})]
        equations = needed(derivative.known, outputs, with_effects=True)
        arrays = jaxpr_as_fun(program.closed(equations, inputs, outputs))(*primals)
        values = dict(zip(inputs, primals))
        values |= {v: a for v, a in zip(outputs, arrays) if not isinstance(v, Literal)}
        along = dict(zip(derivative.tangents, tangents))
        available = {*saved, *inputs}
        last_use = {
            v: i
            for i, group in enumerate(derivative.groups)
            for e in group
            for v in variables(e.invars)
        }
        last_use |= dict.fromkeys(derivative.along, len(derivative.groups))
        for i, linear in enumerate(derivative.groups):
            made = dict.fromkeys(v for e in linear for v in e.outvars)
            used = [*dict.fromkeys(v for e in linear for v in variables(e.invars) if v not in made)]
            moving = [v for v in used if v in along]
            residuals = [v for v in used if v not in along]
            again = needed(derivative.known, residuals, saved)
            recomputing = dict.fromkeys(v for e in again for v in variables(e.invars))
            operands = [v for v in dict.fromkeys([*recomputing, *residuals]) if v in available]
            results = [v for v in made if last_use.get(v, -1) > i]
            moved = linear_program(
                program.closed([*again, *linear], [*operands, *moving], results),
                [values[v] for v in operands],
                [along[v] for v in moving],
                # Without a barrier, XLA merges equal values of the forward and the backward pass,
                # and keeps arrays in memory that the plan does not save. In a loop, no barrier is
                # needed, because the two passes are two loops.
                waiting=0 if self.in_loop else len(operands),
            )
            along.update(zip(results, moved))
        return arrays[: len(derivative.outputs)], [along[v] for v in derivative.along]


def is_inexact(a: Any) -> bool:
    """Return True for an array of floating-point or complex numbers, or a type of such an array."""
    dtype = getattr(a, "dtype", None)
    return dtype is None or jnp.issubdtype(dtype, jnp.inexact)


def sizes(equations: Iterable[Any]) -> dict[Var, int]:
    """Return the number of bytes of each result of some equations, on one device."""
    found: dict[Var, int] = {}
    for e in equations:
        is_mapped = e.primitive.name == "shard_map"
        local = e.params["jaxpr"].outvars if is_mapped else e.outvars
        found |= {v: costs.size(w.aval) for v, w in zip(e.outvars, local)}
    return found


def _refers(equation: Any) -> bool:
    """Return True if an equation reads or writes a mutable array (``jax.new_ref``).

    A program with such an equation cannot be split, so plain JAX differentiates the region.
    """
    kinds = {kind.__name__ for effect in equation.effects for kind in type(effect).__mro__}
    return not kinds.isdisjoint({"RefEffect", "InternalMutableArrayEffect"})


def _has_derivative(equation: Any) -> bool:
    """Return True if an equation may be differentiated: it has inexact arguments and results."""
    arrays = [v.aval for v in variables(equation.invars)], [v.aval for v in equation.outvars]
    return all(any(map(is_inexact, avals)) for avals in arrays)


# ------------------------------------------------------------- loops, branches and manual meshes


def _scan(outer: Region, equation: Any, free: set[Var]) -> Callable[..., list[Any]]:
    """Return a function of a scan's operands that runs the scan with its body as a region."""
    params = equation.params
    body = params["jaxpr"]
    inner = getattr(body, "jaxpr", body)
    constants, carries = programs.scan_counts(equation, inner)
    slices = len(inner.invars) - constants - carries
    is_free = [True] * constants + [False] * carries + [True] * slices
    varies = [False] * constants + [True] * (carries + slices)
    region = outer.part(body, is_free, varies, params["length"])

    def run(plan: Plan, *operands: Any) -> list[Any]:
        fixed, rest = operands[:constants], operands[constants:]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = region(plan, *fixed, *carry, *xs)
            return results[:carries], results[carries:]

        carry, ys = jax.lax.scan(
            step,
            list(rest[:carries]),
            list(rest[carries:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]

    return run


def _cond(outer: Region, equation: Any, free: set[Var]) -> Callable[..., list[Any]]:
    """Return a function of a cond's operands that runs the cond with its branches as regions."""
    is_free = [v in free for v in equation.invars[1:]]
    regions = [outer.part(branch, is_free) for branch in equation.params["branches"]]

    def run(plan: Plan, index: Any, *operands: Any) -> list[Any]:
        branches = [functools.partial(region, plan) for region in regions]
        return jax.lax.switch(index, branches, *operands)

    return run


def _shard_map(outer: Region, equation: Any, free: set[Var]) -> Callable[..., list[Any]]:
    """Return a function that runs a call of `jax.shard_map` with its body as a region."""
    params = equation.params
    body = params["jaxpr"]
    region = outer.part(body, [v in free for v in equation.invars])

    def run(plan: Plan, *operands: Any) -> list[Any]:
        mapped = jax.shard_map(
            functools.partial(region, plan),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=params["newly_manual_axes"],
            check_vma=params["check_vma"],
        )
        return mapped(*operands)

    return run


_SPECIAL = {"scan": _scan, "cond": _cond, "shard_map": _shard_map}
