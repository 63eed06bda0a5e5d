"""A traced derivative as a graph of arrays, in which `memory_report` finds the saved arrays.

Each node of the graph is an array. An edge leads from each operand of a primitive to the arrays
that the primitive computes. The body of a called function (`jax.jit`, custom rules,
`jax.checkpoint`) becomes part of the caller's graph. The body of a scan over layers occurs once:
its arrays are the arrays of one layer. If the scan stacks such an array over the layers, the
stacked array is a separate node, whose operand is the array of one layer.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import sysconfig
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

from jaxnorm.remat import costs
from jaxnorm.remat.programs import primitive_name, scan_counts

# Libraries through which models call primitives. `_line` never reports their lines. It reports a
# line of another installed package only if the traceback has no line outside installed packages,
# because such a package may contain the model itself.
_LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "optax", "jaxnorm", "jaxnorm_kernels")

#: Primitives of functions with custom derivatives.
CUSTOM = {"custom_jvp_call", "custom_vjp_call"}

# Primitives that run an inner program once. Their operands are the inner program's arguments.
_CALLS = {"jit", "remat2", "shard_map", *CUSTOM}

#: The value of `Value.made_by` for an array that a scan stacks from its iterations. (It is not
#: "stack", because JAX has a primitive of that name.)
STACKED = "stacked layers"

#: Primitives whose result counts as the same array as their operand. `origin` skips them.
NAMING = {
    "name", "optimization_barrier", "reduce_precision", "copy", "pvary", "stop_gradient",
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Value:
    """An array of the program, a node of the graph.

    Attributes:
      shape, dtype: shape and dtype of the array.
      local: shape of one device's shard if the array's type includes its sharding; otherwise
        `shape`.
      made_by: name of the primitive that computes the array. If no primitive computes it, this is
        one of six texts: ``"argument"`` (a constant or an argument of the program); ``"carry"`` (an
        array in the carry of a scan); ``"layer's"`` (the slice of a stacked operand for one
        iteration of a scan); ``"literal"``; ``"result"`` (see `Program`); or `STACKED` (an array
        that a scan stacks from the results of its iterations).
      operands: the operands of the primitive that computes the array.
      source: the line of the user's code that computes the array, ``"file.py:12 (function)"``; ""
        if it is unknown.
      layers: number of times that the program computes the array: the product of the lengths of the
        scans around it; 1 outside of scans.
      users: the values that have this value among their operands.
      equation: the equation of the jaxpr that computes the array; for a literal, the literal; None
        for other arrays.
      is_active: True if the array depends on an argument that is differentiated.
    """

    aval: Any
    made_by: str
    operands: Sequence["Value"] = ()
    source: str = ""
    layers: int = 1
    equation: Any = None
    is_active: bool = False

    def __post_init__(self) -> None:
        self.shape: tuple[int, ...] = _shape(self)
        self.dtype: np.dtype = getattr(self.aval, "dtype", np.dtype(bool))
        self.size = math.prod(self.shape)
        self.local = costs.local_shape(self.aval)
        self.users: list[Value] = []
        passes_on = self.made_by != "stop_gradient" and any(v.is_active for v in self.operands)
        is_inexact = jnp.issubdtype(self.dtype, jnp.inexact)
        self.is_active = is_inexact and (self.is_active or passes_on)
        for operand in self.operands:
            operand.users.append(self)

    @property
    def bytes(self) -> int:
        """Number of bytes of the array on one device.

        If the array is computed in each iteration of a scan, this is the size for one iteration.
        """
        return math.prod(self.local) * self.dtype.itemsize


class Program:
    """The graph of a traced program whose first results are the arrays that a derivative saves.

    Attributes:
      values: the arrays that equations compute, in order. Instead of a call's or scan's results,
        the arrays that its body computes are listed.
      saved: the saved arrays, each once, without arguments, constants and empty arrays.
      outputs: the results that the derivative saves, in order. An array may occur several times.
      by_origin: a dict that maps ``origin(v)`` to ``v`` for each saved array ``v``; see `origin`.
    """

    def __init__(
        self, traced: Any, count: int, is_active: Sequence[bool], inlines_rules: bool = True
    ) -> None:
        """Build the graph of a closed jaxpr whose first `count` results are the saved arrays.

        For each result after the first `count`, a node is added whose `made_by` is ``"result"``,
        and whose operand is this result. `is_active` has a bool for each argument: True if the
        argument is differentiated. If `inlines_rules` is False, a call of a function with a custom
        derivative stays a single equation, unless the function belongs to one of `_LIBRARIES`.
        """
        jaxpr: Jaxpr = traced.jaxpr
        self._inlines_rules = inlines_rules
        self.values: list[Value] = []
        self._results_of_scans: list[Value] = []
        given = [
            Value(v.aval, "argument", is_active=active)
            for v, active in zip(jaxpr.invars, is_active, strict=True)
        ]
        results = self._results(jaxpr, given, 1)
        self._returned = [
            Value(v.aval, "result", [value])
            for value, v in zip(results[count:], jaxpr.outvars[count:])
        ]
        self.outputs = results[:count]
        computed = [v for v in self.outputs if origin(v).made_by not in ("argument", "literal")]
        # An array may be saved as several copies, which JAX marks as varying over different axes of
        # a mesh. XLA stores the array once.
        self.saved = [*{_unvaried(v): v for v in reversed(computed) if v.bytes}.values()][::-1]
        self.by_origin = {origin(v): v for v in self.saved}

    @functools.cached_property
    def live(self) -> Container[Value]:
        """The arrays on which a ``"result"`` or the final carry of a scan depends."""
        ends = [*self._returned, *self._results_of_scans]
        return reached(ends, lambda value: value.operands)

    def _results(
        self, jaxpr: Jaxpr, given: Sequence[Value], layers: int, source: str = "", around: str = ""
    ) -> list[Value]:
        """Add the arrays of a jaxpr to the graph, and return its results.

        Args:
          jaxpr: the jaxpr of the program, or of an inner call or scan.
          given: the values of its arguments.
          layers: number of times that the jaxpr runs.
          source: for the jaxpr of a library function, the line of the user's code that calls the
            function. All arrays of the jaxpr then get this line. For other jaxprs, "".
          around: the line of the call or scan that contains the jaxpr. An equation that has no line
            gets this line.
        """
        values: dict[Var, Value] = dict(zip(jaxpr.invars, given))
        values.update((v, Value(v.aval, "argument")) for v in jaxpr.constvars)

        def read(v: Any) -> Value:
            if isinstance(v, Literal):
                return Value(v.aval, "literal", equation=v)
            return values[v]

        for equation in jaxpr.eqns:
            name = primitive_name(equation)
            operands = [read(v) for v in equation.invars]
            bodies = costs.bodies(equation)
            # In derivatives, some equations have no source line. They get the line of an operand or
            # of the call around them.
            lines = (source, _line(equation), *(v.source for v in operands), around)
            line = next(filter(None, lines), "")
            is_rule = name in CUSTOM and not self._inlines_rules and not _is_library_s(bodies[0])
            if name == "scan":
                results = self._scan(equation, bodies[0], operands, layers, source)
            elif name in _CALLS and not is_rule:
                of_call = source or line * (name == "jit" and _is_library_s(bodies[0]))
                inside = self._results(bodies[0], operands, layers, of_call, line)
                results = [
                    value if value.shape == _shape(v) else _stacked(value, v.aval, line, 1)
                    for value, v in zip(inside, equation.outvars)
                ]
            else:
                # Each result of a barrier is a copy of one operand.
                several = name == "optimization_barrier"
                made_of = [[v] for v in operands] if several else [operands] * len(equation.outvars)
                results = [
                    Value(v.aval, name, of, line, layers, equation)
                    for v, of in zip(equation.outvars, made_of)
                ]
                self.values += results
            values.update(zip(equation.outvars, results))
        return [read(v) for v in jaxpr.outvars]

    def _scan(
        self, equation: Any, body: Jaxpr, operands: Sequence[Value], layers: int, source: str
    ) -> list[Value]:
        consts, carries = scan_counts(equation, body)
        layers *= equation.params["length"]
        line = source or _line(equation)
        given = [*operands[:consts]]
        for i, (v, outer) in enumerate(zip(body.invars[consts:], operands[consts:])):
            # If any operand of the scan depends on a differentiated argument, the carry may depend
            # on this argument too, after the first iteration.
            is_active = any(w.is_active for w in operands) if i < carries else outer.is_active
            name = "carry" if i < carries else "layer's"
            given.append(Value(v.aval, name, (), line, layers, is_active=is_active))
        results = self._results(body, given, layers, source, line)
        pairs = [*zip(results, equation.outvars)]
        carried_out = [
            Value(v.aval, "scan", [value, *operands], line, layers, equation)
            for value, v in pairs[:carries]
        ]
        self._results_of_scans += carried_out
        stacked = [_stacked(value, v.aval, line, layers) for value, v in pairs[carries:]]
        return [*carried_out, *stacked]


def _stacked(part: Value, aval: Any, line: str, layers: int) -> Value:
    """Return the whole array that a scan or `jax.shard_map` assembles from parts.

    `part` is the array of one iteration of the scan, or of one device.
    """
    stacked = Value(aval, STACKED, [part], line, layers)
    axes = len(stacked.shape) - len(part.shape)
    if stacked.local == stacked.shape:
        stacked.local = (*stacked.shape[:axes], *part.local)
    return stacked


def _unvaried(value: Value) -> tuple[Value, tuple[int, ...]]:
    """Return the array that a saved array copies or stacks, and the saved array's local shape."""
    shape = value.local
    while value.made_by in (STACKED, "pvary"):
        value = value.operands[0]
    return value, shape


def origin(value: Value) -> Value:
    """Return the array from which primitives in `NAMING` make `value`; it may be `value` itself.

    There may be several such primitives in a row. If a scan stacks the array, the search continues
    with the array of one iteration.
    """
    while value.made_by in (STACKED, *NAMING):
        value = value.operands[0]
    return value


def reached(
    start: Iterable[Value], following: Callable[[Value], Iterable[Value]]
) -> dict[Value, None]:
    """Return all values that can be reached from `start`, as an ordered set in breadth-first order.

    The set is a dict whose keys are the values. `following` returns the next values after a value.
    """
    seen = dict.fromkeys(start)
    queue = [*seen]
    for value in queue:  # The list grows during the loop.
        new = dict.fromkeys(v for v in following(value) if v not in seen)
        seen |= new
        queue += new
    return seen


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


# --------------------------------------------------------------------------------- lines of users


@functools.cache
def _folder(library: str) -> str:
    """Return the folder of a package, with a slash at the end; "?/" for an absent package."""
    spec = importlib.util.find_spec(library)
    return os.path.join(next(iter(spec.submodule_search_locations or ["?"])) if spec else "?", "")


@functools.cache
def _folders() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages, and of the libraries `_LIBRARIES`."""
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return (*(os.path.join(folder, "") for folder in installed), *map(_folder, _LIBRARIES))


def is_installed(file: str) -> bool:
    """Return True for a file of an installed package, or of Python."""
    packages = ("site-packages", "dist-packages")
    return file.startswith((*_folders(), "<")) or not {*file.split(os.sep)}.isdisjoint(packages)


def _line(equation: Any) -> str:
    """Return the line of the user's code that creates an equation; "" if it is unknown.

    This is the innermost line of the equation's traceback that is outside installed packages. If
    all lines are in packages, it is the innermost line of a package that is not in `_LIBRARIES`,
    with the name of the package: ``"keras/numpy.py:182 (matmul)"``.
    """
    package = ""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace else ():
        folder, name = os.path.split(frame.file_name)
        line = f"{name}:{frame.line_num} ({frame.function_name})"
        if not is_installed(frame.file_name):
            return line
        is_other = not frame.file_name.startswith(("<", *map(_folder, _LIBRARIES)))
        parts = folder.split(os.sep)
        for packages in ("site-packages", "dist-packages"):
            if not package and is_other and packages in parts[:-1]:
                package = f"{parts[parts.index(packages) + 1]}/{line}"
    return package


def _is_library_s(body: Any) -> bool:
    """Return True if a jaxpr is the trace of a library's jitted function.

    All calls of such a function share one trace. The source lines recorded in the trace may
    therefore belong to another call.
    """
    return any(folder in body.debug_info.func_src_info for folder in map(_folder, _LIBRARIES))
