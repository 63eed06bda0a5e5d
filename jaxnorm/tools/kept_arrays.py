"""A traced derivative as a graph of arrays, through calls and loops.

Calls (`jax.jit`, custom rules, `jax.checkpoint`) become part of the graph of their caller. The body
of a scan is traced once: its values stand for one layer, and what the scan stacks is the value of a
layer, as many times as there are layers.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

# Library packages whose frames are skipped when a source line is looked up.
_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "optax", "jaxnorm", "jaxnorm_kernels")

# Primitives whose body runs once, on their operands in order.
_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", "shard_map",
}  # fmt: skip

# JAX's next rematerialisation (``jax_remat3``) has primitives of these classes. They are treated
# like the present primitives of these names.
_HIGH_LEVEL = {
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "RematTraced": "checkpoint",
}

#: The name of what a scan stacks. (jnp.stack is JAX's "stack".)
STACKED = "stacked layers"

#: Primitives that return their operand's elements; none of them counts as what made an array.
NAMING = {"name", "optimization_barrier", "reduce_precision", "copy", "pvary"}


class Value:
    """An array of the program.

    Attributes:
      shape, dtype: its type.
      local: the shape of one device's part, if the program says how it is sharded.
      made_by: the name of the primitive that makes it. What the program, or the body of a scan, is
        given is made by ``"argument"``, ``"carry"`` or ``"layer's"``.
      operands: the values that it is made of.
      source: the user's line.
      layers: how often the scans around it run.
      users: the values that are made of it.
      equation: the equation that makes it; None if it is given.
      is_active: True if it depends on an argument that is differentiated.
      number: the value of a literal.
    """

    def __init__(
        self,
        aval: Any,
        made_by: str,
        operands: Sequence["Value"] = (),
        source: str = "",
        layers: int = 1,
        equation: Any = None,
        is_active: bool = False,
        number: Any = None,
    ) -> None:
        self.shape: tuple[int, ...] = tuple(getattr(aval, "shape", ()))
        self.dtype: np.dtype = getattr(aval, "dtype", np.dtype(bool))
        self.made_by, self.operands, self.source = made_by, tuple(operands), source
        self.layers, self.equation, self.number = layers, equation, number
        self.size = math.prod(self.shape)
        self.local = _local_shape(aval, self.shape)
        self.users: list[Value] = []
        is_inexact = jnp.issubdtype(self.dtype, jnp.inexact)
        passes_on = made_by != "stop_gradient" and any(v.is_active for v in self.operands)
        self.is_active: bool = is_inexact and (is_active or passes_on)
        for operand in self.operands:
            operand.users.append(self)

    @property
    def bytes(self) -> int:
        """Bytes on one device."""
        return math.prod(self.local) * self.dtype.itemsize


def _local_shape(aval: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape on one device: of an Explicit mesh axis, a device has its part."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or all(axes is None for axes in getattr(sharding, "spec", ())):
        return shape
    return tuple(sharding.shard_shape(shape))


class Graph:
    """All values of a program, in the order in which they are made.

    Attributes:
      values: the arrays.
      saved: the first results of the program, each once, without arguments and constants.
      outputs: the value of each of these results, in order, by its identity.
    """

    def __init__(self, traced: Any, count: int, is_active: Sequence[bool] = ()) -> None:
        """Build the graph of a closed jaxpr whose first `count` results are saved.

        Its other results are users in the graph, made by ``"result"``.
        """
        jaxpr: Jaxpr = traced.jaxpr
        self.values: list[Value] = []
        constants = [Value(v.aval, "argument") for v in jaxpr.constvars]
        given = [
            Value(v.aval, "argument", is_active=active)
            for v, active in zip(jaxpr.invars, [*is_active, *[False] * len(jaxpr.invars)])
        ]
        results = self._results(jaxpr, [*constants, *given], 1)
        for value, v in zip(results[count:], jaxpr.outvars[count:]):
            Value(v.aval, "result", [value])
        self.outputs = results[:count]
        found = {id(v): v for v in self.outputs if origin(v).made_by not in ("argument", "literal")}
        self.saved = [v for v in found.values() if v.bytes]

    def _results(
        self,
        jaxpr: Jaxpr,
        given: Sequence[Value],
        layers: int,
        source: str = "",
        around: str = "",
    ) -> list[Value]:
        """Return the results of a jaxpr, given its constants and arguments.

        `source` is the line that calls the library function around it, `around` that of any call.
        """
        values: dict[Var, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), given))

        def read(v: Any) -> Value:
            if isinstance(v, Literal):
                return Value(v.aval, "literal", number=v.val)
            return values[v]

        for equation in jaxpr.eqns:
            name = _name(equation)
            operands = [read(v) for v in equation.invars]
            body = _body(equation)
            line = source or _line(equation) or _line_of(operands) or around
            if name == "scan" and body is not None:
                results = self._scan(equation, body, operands, layers, source)
            elif name in _CALLS and body is not None and len(body.invars) == len(operands):
                is_library_s = name in ("jit", "pjit") and _is_library_s(body)
                constants = [Value(v.aval, "argument") for v in body.constvars]
                inside = self._results(
                    body, [*constants, *operands], layers, source or line * is_library_s, line
                )
                results = [
                    value if value.shape == _shape(v) else _stacked(value, v.aval, line, 1)
                    for value, v in zip(inside, equation.outvars)
                ]
            else:
                results = [
                    Value(v.aval, name, operands, line, layers, equation) for v in equation.outvars
                ]
                self.values += results
            values.update(zip(equation.outvars, results))
        return [read(v) for v in jaxpr.outvars]

    def _scan(
        self, equation: Any, body: Jaxpr, operands: Sequence[Value], layers: int, source: str
    ) -> list[Value]:
        consts, carries = _counts(equation, body)
        layers *= equation.params["length"]
        line = source or _line(equation)
        # A carry is active after the first layer if anything in the loop is.
        is_active = any(v.is_active for v in operands)
        carried, sliced = body.invars[consts:][:carries], body.invars[consts + carries :]
        given = [
            *operands[:consts],
            *[Value(v.aval, "carry", (), line, layers, is_active=is_active) for v in carried],
            *[
                Value(v.aval, "layer's", (), line, layers, is_active=whole.is_active)
                for v, whole in zip(sliced, operands[consts + carries :])
            ],
        ]
        constants = [Value(v.aval, "argument") for v in body.constvars]
        results = self._results(body, [*constants, *given], layers, source, line)
        return [
            Value(v.aval, "scan", [value, *operands], line, layers, equation)
            if i < carries
            else _stacked(value, v.aval, line, layers)
            for i, (value, v) in enumerate(zip(results, equation.outvars))
        ]


def _stacked(part: Value, aval: Any, line: str, layers: int) -> Value:
    """Return what a scan stacks of a layer's value, or `jax.shard_map` of a device's part."""
    stacked = Value(aval, STACKED, [part], line, layers)
    axes = len(stacked.shape) - len(part.shape)
    if stacked.local == stacked.shape:
        stacked.local = (*stacked.shape[:axes], *part.local)
    return stacked


def origin(value: Value) -> Value:
    """Return what made an array: behind names, and for what a scan stacks, a layer's value."""
    while value.made_by in (STACKED, *NAMING) and value.operands:
        value = value.operands[0]
    return value


def reached(
    start: Iterable[Value], following: Callable[[Value], Iterable[Value]]
) -> dict[int, Value]:
    """Return `start` and everything that follows from it, by identity, breadth first."""
    seen = {id(v): v for v in start}
    queue = [*seen.values()]
    for value in queue:  # grows in the loop
        new = {id(v): v for v in following(value) if id(v) not in seen}
        seen |= new
        queue += new.values()
    return seen


def _counts(equation: Any, body: Jaxpr) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many its carry.

    Stacked operands have one axis more than their slices. The parameters of the equation that say
    so differ between versions of JAX.
    """
    carries = _unstacked(equation.outvars, body.outvars)
    return _unstacked(equation.invars, body.invars) - carries, carries


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _unstacked(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(len(v.aval.shape) == len(w.aval.shape) for v, w in zip(outer, inner))


def _name(equation: Any) -> str:
    high_level = type(equation.params.get("_prim")).__name__
    return _HIGH_LEVEL.get(high_level, equation.primitive.name)


def _body(equation: Any) -> Jaxpr | None:
    high_level = equation.params.get("_prim")
    given = equation.params if high_level is None else vars(high_level)
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in given:
            body = given[name]
            return getattr(body, "jaxpr", body)
    return None


# --------------------------------------------------------------------------------- lines of users


@functools.cache
def _folders() -> tuple[str, ...]:
    specs = [importlib.util.find_spec(name) for name in _LIBRARIES]
    folders = [f for spec in specs if spec for f in spec.submodule_search_locations or ()]
    return tuple(os.path.join(folder, "") for folder in folders)


def _line(equation: Any) -> str:
    """Return the innermost line outside of libraries; "" if it is unknown."""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace else ():
        if not frame.file_name.startswith((*_folders(), "<")):
            name = os.path.basename(frame.file_name)
            return f"{name}:{frame.line_num} ({frame.function_name})"
    return ""


def _line_of(operands: Sequence[Value]) -> str:
    """Return an operand's line, for an equation of JAX's derivatives without a line."""
    return next((v.source for v in operands if v.source), "")


def _is_library_s(body: Jaxpr) -> bool:
    """Return True for a jitted function of a library: all its callers share one trace."""
    place = getattr(getattr(body, "debug_info", None), "func_src_info", None) or ""
    return any(folder in place for folder in _folders())
