"""What the arrays of a traced derivative are made of, through calls and loops.

A program becomes a graph of values. Calls (`jax.jit`, custom rules, `jax.checkpoint`) are parts of
it; the body of a scan is traced once, and what it stacks is the value of a layer, times its layers.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

# Whose lines are nobody's own: what a model is made with.
_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "optax", "jaxnorm", "jaxnorm_kernels")

# Calls whose body is computed once, of the operands in their order.
_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", "shard_map",
}  # fmt: skip

# JAX's next rematerialisation (``jax_remat3``) has primitives of its own, of these classes; the
# names are those of the present one.
_HIGH_LEVEL = {
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "RematTraced": "checkpoint",
}

# By which a scan makes one array of what it keeps of each layer. (jnp.stack is JAX's "stack".)
STACKED = "stacked layers"

# What changes no element, and is not what made an array.
NAMING = {"name", "optimization_barrier", "reduce_precision", "copy", "pvary", "pcast", "copy_p"}


class Value:
    """An array of the program.

    Attributes:
      shape, dtype: its type.
      made_by: name of what makes it; ``"argument"``, ``"carry"`` and ``"slice"`` of what is given
        to the program or to the body of a scan.
      operands: what it is made of.
      source: the user's line.
      layers: how often the scans that it is in run.
      takers: what is made of it.
      equation: what makes it; None of what is given.
    """

    def __init__(
        self,
        aval: Any,
        made_by: str,
        operands: Sequence["Value"] = (),
        source: str = "",
        layers: int = 1,
        equation: Any = None,
    ) -> None:
        self.shape: tuple[int, ...] = tuple(getattr(aval, "shape", ()))
        self.dtype: np.dtype = getattr(aval, "dtype", np.dtype(bool))
        self.made_by, self.operands, self.source = made_by, tuple(operands), source
        self.layers, self.equation = layers, equation
        self.size = math.prod(self.shape)
        self.takers: list[Value] = []
        for operand in self.operands:
            operand.takers.append(self)

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


def of(traced: Any, count: int) -> list[Value]:
    """The first arrays that a program returns, each once; no arguments, and no constants.

    What else it returns takes its place in the graph, as ``"result"``.
    """
    jaxpr: Any = traced.jaxpr
    given = [Value(v.aval, "argument") for v in (*jaxpr.constvars, *jaxpr.invars)]
    results = _graph(jaxpr, given, 1)
    for value, v in zip(results[count:], jaxpr.outvars[count:]):
        Value(v.aval, "result", [value])
    found = {id(v): v for v in results[:count] if origin(v).made_by not in ("argument", "literal")}
    return [v for v in found.values() if v.bytes]


def origin(value: Value) -> Value:
    """What made an array: the value of a layer of what a scan stacks, before it had a name."""
    while value.made_by in (STACKED, *NAMING) and value.operands:
        value = value.operands[0]
    return value


def reached(
    start: Iterable[Value], following: Callable[[Value], Iterable[Value]]
) -> dict[int, Value]:
    """By id, in their order: those of `start`, and all that follows from each."""
    seen = {id(v): v for v in start}
    queue = [*seen.values()]
    for value in queue:  # which grows
        new = {id(v): v for v in following(value) if id(v) not in seen}
        seen |= new
        queue += new.values()
    return seen


def _graph(
    jaxpr: Jaxpr, given: Sequence[Value], layers: int, source: str = "", around: str = ""
) -> list[Value]:
    """Results of a program, of values of its constants and arguments.

    `source` is the line of the call of a library's function that it is in, `around` that of any.
    """
    values: dict[Var, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), given))

    def read(v: Any) -> Value:
        return Value(v.aval, "literal") if isinstance(v, Literal) else values[v]

    for equation in jaxpr.eqns:
        name = _name(equation)
        operands = [read(v) for v in equation.invars]
        body = _body(equation)
        line = source or _line(equation) or _line_of(operands) or around
        if name == "scan" and body is not None:
            results = _scan(equation, body, operands, layers, source)
        elif name in _CALLS and body is not None and len(body.invars) == len(operands):
            is_library_s = name in ("jit", "pjit") and _is_library_s(body)
            constants = [Value(v.aval, "argument") for v in body.constvars]
            given = [*constants, *operands]
            of_body = _graph(body, given, layers, source or line * is_library_s, line)
            results = [
                value if value.shape == _shape(v) else Value(v.aval, STACKED, [value], line)
                for value, v in zip(of_body, equation.outvars)
            ]
        else:
            results = [
                Value(v.aval, name, operands, line, layers, equation) for v in equation.outvars
            ]
        values.update(zip(equation.outvars, results))
    return [read(v) for v in jaxpr.outvars]


def _scan(
    equation: Any, body: Jaxpr, operands: Sequence[Value], layers: int, source: str
) -> list[Value]:
    consts, carries = _counts(equation, body)
    layers *= equation.params["length"]
    line = source or _line(equation)
    given = [
        *operands[:consts],
        *[Value(v.aval, "carry", (), line, layers) for v in body.invars[consts:][:carries]],
        *[Value(v.aval, "slice", (), line, layers) for v in body.invars[consts + carries :]],
    ]
    constants = [Value(v.aval, "argument") for v in body.constvars]
    results = _graph(body, [*constants, *given], layers, source, line)
    return [
        Value(v.aval, "scan", [value, *operands], line, layers, equation)
        if i < carries
        else Value(v.aval, STACKED, [value], line, layers)
        for i, (value, v) in enumerate(zip(results, equation.outvars))
    ]


def _counts(equation: Any, body: Jaxpr) -> tuple[int, int]:
    """How many operands are constants of a loop, and how many its carry.

    By their axes, of which stacked ones have one more: parameters differ by the version of JAX.
    """
    carries = _whole(equation.outvars, body.outvars)
    return _whole(equation.invars, body.invars) - carries, carries


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _whole(outer: Sequence[Any], inner: Sequence[Any]) -> int:
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
    """The innermost line that is not a library's; "" where none is known."""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace else ():
        if not frame.file_name.startswith((*_folders(), "<")):
            name = os.path.basename(frame.file_name)
            return f"{name}:{frame.line_num} ({frame.function_name})"
    return ""


def _line_of(operands: Sequence[Value]) -> str:
    """That of what an equation takes, which has none: JAX's own, of a derivative."""
    return next((v.source for v in operands if v.source), "")


def _is_library_s(body: Jaxpr) -> bool:
    """Whether a function that is compiled by itself is of a library: its trace is one for all."""
    place = getattr(getattr(body, "debug_info", None), "func_src_info", None) or ""
    return any(folder in place for folder in _folders())
