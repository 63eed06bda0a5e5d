"""Which operands of a call are slices that a kernel can read where they are.

A kernel gets a copy of a slice, unless the slice is known to start at an aligned address
(`jaxnorm_kernels.buffers`). A scan passes slices of what it stacks, such as a layer's residuals and
parameters, and ``qkv[0]`` is a slice, too. Copying these would be a pass over memory for nothing.

While a call is lowered, the program that computes its operands is at hand in MLIR. An operand is
read in place if it is a slice of one array, and the program shows where in that array it starts.
An argument of a function (`jax.jit` inside `jax.jit`) may be any slice of the caller's: it is
copied if it is one.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

from jaxnorm_kernels.buffers import ALIGNMENT

# Operations whose results have buffers of their own.
_BUFFERS = frozenset(
    f"stablehlo.{name}"
    for name in ("convolution", "custom_call", "dot_general", "optimization_barrier", "reduce")
)
# XLA makes no slice of a result of these, unless it does so of an operand.
_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("add", "broadcast_in_dim", "constant", "convert", "divide", "logistic", "maximum"),
        *("multiply", "negate", "reshape", "rsqrt", "subtract", "tanh", "transpose"),
    )
)
# Operations whose results are views of their operands.
_VIEWS = frozenset(("stablehlo.reshape", "sdy.sharding_constraint"))
# How far back a program is followed.
_DEPTH = 12


def indices(ctx: Any, values: Sequence[Any], *, whole: bool) -> list[int]:
    """Indices of the operands of a call that are slices at aligned addresses.

    Args:
      ctx: the context of the lowering rule.
      values: the operands in MLIR.
      whole: True if a device has all of the arrays. If it has shards, its offsets are others, and
        known to be aligned only if they are multiples of the size of the slice.
    """
    try:
        program = _Program(ctx.module_context.symbol_table, whole)
        return [i for i, value in enumerate(values) if program.is_aligned_slice(value)]
    except (AttributeError, KeyError, ValueError):  # MLIR as another version of JAX writes it.
        return []


class _Program:
    """Follows values of a program in MLIR back to where they are computed.

    A value is followed into a function that is called, where the arguments of the function stand
    for the operands of the call. `calls` are those that were entered, the innermost one first.
    """

    def __init__(self, functions: Any, whole: bool) -> None:
        self.functions = functions
        self.whole = whole

    def is_aligned_slice(self, value: Any) -> bool:
        argument = _argument_of_body(value)
        value, calls = self.origin(value if argument is None else argument, ())
        if not _is_result(value):
            return False
        operation = _operation(value.owner)
        if operation.name not in ("stablehlo.slice", "stablehlo.dynamic_slice"):
            return False
        if argument is not None:
            # JAX may share the lowering of a body with other code that is no loop. So only what a
            # loop makes of its own stack counts.
            stack, _ = self.origin(operation.operands[0], calls)
            if _is_result(stack) or _operation(stack.owner.owner).name != "stablehlo.while":
                return False
        unit = _offset_unit(operation)
        is_multiple = unit % _bytes(value.type) == 0
        is_aligned = is_multiple or (self.whole and unit % ALIGNMENT == 0)
        return is_aligned and self.is_buffer(operation.operands[0], calls, _DEPTH)

    def origin(self, value: Any, calls: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return the value that this one is a view of, and the calls that compute it."""
        while True:
            if not _is_result(value):
                if calls and value.owner == calls[0].callee:
                    value, calls = calls[0].operands[value.arg_number], calls[1:]
                    continue
                return value, calls
            operation = _operation(value.owner)
            if operation.name in _VIEWS:
                value = operation.operands[0]
            elif operation.name == "func.call":
                name = operation.attributes["callee"].value
                (callee,) = self.functions[name].operation.regions[0].blocks
                *_, last = callee.operations
                calls = (_Call(callee, operation.operands), *calls)
                value = _operation(last).operands[value.result_number]
            else:
                return value, calls

    def is_buffer(self, value: Any, calls: tuple[Any, ...], depth: int) -> bool:
        """True if an array is known to be no part of another one."""
        value, calls = self.origin(value, calls)
        if depth == 0:
            return False
        if not _is_result(value):
            parent = _operation(value.owner.owner)
            if parent.name == "func.func":
                return str(parent.attributes["sym_visibility"]) == '"public"'
            if parent.name != "stablehlo.while":
                return False
            # XLA drops a loop of one step. A stack of several arrays is made by one of several.
            shape = value.type.shape
            initial = parent.operands[value.arg_number]
            return (bool(shape) and shape[0] > 1) or self.is_buffer(initial, calls, depth - 1)
        operation = _operation(value.owner)
        if operation.name in _BUFFERS or operation.name == "stablehlo.while":
            return True
        return operation.name in _ELEMENTWISE and all(
            self.is_buffer(operand, calls, depth - 1) for operand in operation.operands
        )


class _Call:
    """A call: the block of the function that is called, and the operands."""

    def __init__(self, callee: Any, operands: Any) -> None:
        self.callee = callee
        self.operands = operands


def _argument_of_body(value: Any) -> Any:
    """Return what a loop passes to its body as this block argument; None if it is unknown.

    JAX lowers the body of a loop to a function that is in no module yet, and calls it afterwards.
    Until then, only frames on Python's stack have the arguments. If a version of JAX has other
    frames, nothing breaks, but slices of what a scan stacks are copied.
    """
    if _is_result(value):
        return None
    function, place = _operation(value.owner.owner), value.arg_number
    if function.name != "func.func" or "sym_visibility" in function.attributes:
        return None
    name, types = function.attributes["sym_name"].value, [a.type for a in value.owner.arguments]
    frame: Any = sys._getframe()
    while frame is not None:
        local = frame.f_locals if frame.f_code.co_name == "call_lowering" else {}
        if local.get("inline_jax_late") and local.get("fn_name") == name:
            arguments = local.get("args", ())
            if types == [getattr(a, "type", None) for a in arguments]:
                return arguments[place]
            return None
        frame = frame.f_back
    return None


def _is_result(value: Any) -> bool:
    """True if an operation returns the value; otherwise, it is an argument of a block."""
    return hasattr(value, "result_number")


def _operation(owner: Any) -> Any:
    """Return the operation itself where MLIR's Python API wraps it in a class of its own."""
    return getattr(owner, "operation", owner)


def _offset_unit(operation: Any) -> int:
    """A number of bytes of which the offset of a slice is a multiple, whatever its indices are."""
    whole, part = operation.operands[0].type, operation.results[0].type
    strides = [*itertools.accumulate(whole.shape[:0:-1], int.__mul__, initial=_itemsize(whole))]
    strides.reverse()
    if operation.name == "stablehlo.slice":
        starts = [*operation.attributes["start_indices"]]
        return math.gcd(*(start * stride for start, stride in zip(starts, strides)))
    sizes = zip(whole.shape, part.shape, strides)
    return math.gcd(*(stride for size, taken, stride in sizes if taken < size))


def _bytes(kind: Any) -> int:
    return math.prod(kind.shape) * _itemsize(kind)


def _itemsize(kind: Any) -> int:
    return max(1, kind.element_type.width // 8)
