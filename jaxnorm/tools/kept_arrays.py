"""A traced derivative as a graph of arrays, through calls and loops, and advice on its arrays.

Calls (`jax.jit`, custom rules, `jax.checkpoint`) become part of the graph of their caller. The body
of a scan is traced once: its values stand for one layer, and what the scan stacks is the value of a
layer, as many times as there are layers.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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

#: Name of the operation that stacks the layers of a scan. (JAX's "stack" is jnp.stack.)
STACKED = "stacked layers"

#: Primitives that return their operand unchanged; they do not count as the maker of an array.
NAMING = {"name", "optimization_barrier", "reduce_precision", "copy", "pvary"}


class Value:
    """An array of the program.

    Attributes:
      shape, dtype: its type.
      local: the shape of one device's part, if the program says how it is sharded.
      made_by: the name of the primitive that makes it. An input of the program, or of the body of a
        scan, is made by ``"argument"``, ``"carry"`` or ``"layer's"``.
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
        """Number of bytes on one device."""
        return math.prod(self.local) * self.dtype.itemsize


def _local_shape(aval: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one device's part of the array, if Explicit mesh axes split it."""
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

        `source` is the line that calls the library function with this jaxpr. `around` is the line
        of the call with this jaxpr, for equations without a line.
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
    """Return the array that a scan stacks from one layer's value.

    For `jax.shard_map`, it is the array that consists of the devices' parts.
    """
    stacked = Value(aval, STACKED, [part], line, layers)
    axes = len(stacked.shape) - len(part.shape)
    if stacked.local == stacked.shape:
        stacked.local = (*stacked.shape[:axes], *part.local)
    return stacked


def origin(value: Value) -> Value:
    """Return the value that made an array, skipping primitives that only name or copy it.

    For a scan's stack, it is one layer's value.
    """
    while value.made_by in (STACKED, *NAMING) and value.operands:
        value = value.operands[0]
    return value


def reached(
    start: Iterable[Value], following: Callable[[Value], Iterable[Value]]
) -> dict[int, Value]:
    """Return all values reached from `start`, by identity, in breadth-first order.

    `following` returns the values that follow a value directly.
    """
    seen = {id(v): v for v in start}
    queue = [*seen.values()]
    for value in queue:  # grows in the loop
        new = {id(v): v for v in following(value) if id(v) not in seen}
        seen |= new
        queue += new.values()
    return seen


def _counts(equation: Any, body: Jaxpr) -> tuple[int, int]:
    """Return the number of a scan's constants, and the number of arrays in its carry.

    Stacked operands have one axis more than their slices. The parameters of the equation that
    contain these counts differ between versions of JAX.
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
    """Return the innermost line of the traceback that is not in a library; "" if unknown."""
    trace = equation.source_info.traceback
    for frame in trace.frames if trace else ():
        if not frame.file_name.startswith((*_folders(), "<")):
            name = os.path.basename(frame.file_name)
            return f"{name}:{frame.line_num} ({frame.function_name})"
    return ""


def _line_of(operands: Sequence[Value]) -> str:
    """Return the line of the first operand that has one: equations of derivatives may have none."""
    return next((v.source for v in operands if v.source), "")


def _is_library_s(body: Jaxpr) -> bool:
    """Return True for a jitted function of a library, whose trace all its callers share."""
    place = getattr(getattr(body, "debug_info", None), "func_src_info", None) or ""
    return any(folder in place for folder in _folders())


# -------------------------------------------------------------------------- elementwise operations


# Primitives that return the same elements in another shape or dtype.
COPYING = {"reshape", "transpose", "squeeze", "convert_element_type"}

ELEMENTWISE = {
    "abs", "add", "add_any", "and", "bitcast_convert_type", "cbrt", "ceil", "clamp",
    "convert_element_type", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "polynomial", "pow",
    "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor", *NAMING,
}  # fmt: skip

# Primitives of activation functions. Products with a gate, and norms, consist of others.
NONLINEAR = {
    "abs", "clamp", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic",
    "max", "min", "select_n", "tanh",
}  # fmt: skip

# Ways to make values that need no computation.
GIVEN = ("argument", "layer's", "literal")


def users(value: Value) -> Iterator[Value]:
    """Yield the users of a value, including users of its casts and of its named copies."""
    for user in value.users:
        yield user
        if user.made_by in NAMING or user.made_by == "convert_element_type":
            yield from users(user)


def uncast(value: Value) -> Value:
    """Return the `origin` of an array, skipping casts."""
    value = origin(value)
    while value.made_by == "convert_element_type":
        value = origin(value.operands[0])
    return value


def number(value: Value) -> float | None:
    """Return the number that all elements of a value have: a literal, or its cast or broadcast."""
    value = origin(value)
    while value.made_by in ("broadcast_in_dim", *COPYING) and value.operands:
        value = origin(value.operands[0])
    return None if value.number is None or np.size(value.number) != 1 else float(value.number)


def rows_and_weight(product: Value) -> tuple[Value, Value] | None:
    """Return the factors of a linear layer's matmul; None for any other value.

    The factors may come in either order, and the matmul may be along any axis of the rows:
    `jax.vmap` of ``weight @ x`` puts the weight first.
    """
    if product.made_by != "dot_general" or product.equation is None:
        return None
    (lhs, rhs), batch = product.equation.params["dimension_numbers"]
    first, second = product.operands
    found = [
        (rows, weight)
        for rows, over, weight in ((first, lhs, second), (second, rhs, first))
        if len(over) == 1 and len(weight.shape) == 2
    ]
    if any(batch) or not found:
        return None
    return next((pair for pair in found if not _is_given(pair[0])), found[0])


def _is_given(value: Value) -> bool:
    """Return True for a value that needs no computation, such as a parameter, or its copy."""
    value = origin(value)
    while value.made_by in COPYING:
        value = origin(value.operands[0])
    return value.made_by in GIVEN


def is_product(value: Value) -> bool:
    """Return True for a matmul. A bias, a cast or a reshape may follow the matmul."""
    value = origin(value)
    if value.made_by == "dot_general":
        return True
    if value.made_by in COPYING:
        return is_product(value.operands[0])
    if value.made_by == "add":
        rest = [v for v in value.operands if v.size == value.size and not is_spread(v)]
        # A number is not a bias: softplus and hard_swish add one to their operand.
        is_number = any(v.made_by == "literal" for v in value.operands)
        return len(rest) == 1 and not is_number and is_product(rest[0])
    return False


@functools.cache
def is_spread(value: Value) -> bool:
    """Return True if a value has one number per row, or per column, of a larger array.

    Such a value is computed elementwise from smaller arrays and their broadcasts.
    """
    value = origin(value)
    if value.made_by == "broadcast_in_dim":
        return True
    return (
        value.made_by in ELEMENTWISE
        and bool(value.operands)
        and all(v.size < value.size or is_spread(v) for v in value.operands)
    )


def is_zeros(value: Value, like: Value) -> bool:
    """Return True for a broadcast constant of the same shape, as some derivatives of JAX save."""
    is_of_literals = all(v.made_by == "literal" for v in value.operands)
    return value.made_by == "broadcast_in_dim" and is_of_literals and value.shape == like.shape


def is_reduced(value: Value, limit: int) -> bool:
    """Return True if an array depends on a sum, or on another reduction; see `ancestors`."""
    return any(
        v.made_by.startswith(("reduce_", "arg", "cum", "dot_")) for v in ancestors(value, limit)
    )


def ancestors(value: Value, limit: int) -> Iterable[Value]:
    """Return a value and the values that it is computed from.

    Arrays of `limit` elements or more are included, but not what these are computed from.
    """

    def made_of(v: Value) -> Sequence[Value]:
        is_copy = v.made_by in NAMING or v.made_by == "convert_element_type"
        return v.operands if v is value or v.size < limit or is_copy or is_spread(v) else ()

    return reached([value], made_of).values()


# ------------------------------------------------------------------------------------------ advice


class Advice(NamedTuple):
    """A change to the user's code that saves fewer bytes, and the line to change.

    Attributes:
      function: the function to use, as the report's summary names it.
      line: the line to change: ``"file.py:12 (function)"``.
      template: an instruction, with ``{at}`` in place of "at file.py:12".
      members: saved arrays that are no longer saved if the advice is followed.
      instead: number of bytes that are saved in place of the members.
      runs: number of times that the line runs.
      label: first words of the sentence, if not the function.
    """

    function: str
    line: str
    template: str
    members: Sequence[Value]
    instead: int
    runs: int
    label: str = ""

    @property
    def place(self) -> str:
        """The file name and line number of the line."""
        return self.line.partition(" ")[0] or "an unknown line"

    @property
    def sentence(self) -> str:
        instruction = self.template.format(at=f"at {self.place}")
        return f"{self.label or self.function}: {instruction}"

    @property
    def saves(self) -> int:
        return sum(v.bytes for v in self.members) - self.instead


class Program:
    """A graph with lookup tables for recognisers.

    Attributes:
      values: all arrays, in the order in which they are made.
      saved: the arrays that the forward pass saves for the backward pass.
      by_origin: a dict from the identity of each saved array's `origin` to the saved array.
      advised: identities of the saved arrays that have advice already.
    """

    def __init__(self, graph: Graph) -> None:
        self.values, self.saved = graph.values, graph.saved
        self.by_origin = {id(origin(v)): v for v in graph.saved}
        self.advised: set[int] = set()

    def saved_of(self, values: Iterable[Value]) -> list[Value]:
        """Return the saved arrays among `values`, each once, without those that have advice."""
        found = {id(v): self.by_origin[id(v)] for v in values if id(v) in self.by_origin}
        return [v for v in found.values() if id(v) not in self.advised]

    def zeros_like(self, value: Value) -> list[Value]:
        """Return the saved constants of a value's shape, without those that have advice."""
        zeros = [v for v in self.saved if is_zeros(origin(v), value)]
        return [v for v in zeros if id(v) not in self.advised]

    def extra_bytes(self, value: Value) -> int:
        """Return the bytes that saving a value in all layers adds; 0 if it exists anyway."""
        is_there = id(value) in self.by_origin or value.made_by in GIVEN
        return 0 if is_there else value.bytes * value.layers


#: A function that finds pieces of advice. Its docstring shows the code that it recognises.
Recogniser = Callable[[Program], Iterator[Advice]]
