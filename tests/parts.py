"""Operands and results that are slices of other arrays, at unaligned addresses.

XLA passes a contiguous slice to a kernel as an address inside the sliced array, and lets a kernel
write into a part of a larger array. `of_parts` gives any function such operands and results.
`fused` finds the addresses that a compiled program passes to kernels.
"""

import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Targets of the custom calls that launch this library's kernels.
TARGETS = ("mosaic_gpu", "triton_kernel_call")
# The sizes in bytes of HLO types whose names do not contain their numbers of bits.
_ITEMSIZE = {"pred": 1}


def around(a: jax.Array) -> jax.Array:
    """Return a flat array that consists of a 1 and the elements of `a`."""
    return jnp.concatenate([jnp.ones(1, a.dtype), a.ravel()])


def of_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` on slices and stores its results in larger arrays.

    The new function copies each of its operands into a larger flat array, and calls `function` on
    slices of these arrays. It stores each result in another larger flat array, and returns these
    arrays. `read` extracts the results from them.

    Each slice and each result starts at the second element of its flat array, so no address is a
    multiple of 16 bytes.
    """

    def of_slices(*operands: Any) -> Any:
        wholes = jax.tree.map(lambda a: jax.lax.optimization_barrier(around(a)), operands)
        slices = jax.tree.map(lambda a, whole: whole[1:].reshape(a.shape), operands, wholes)
        return jax.tree.map(_stored, function(*slices))

    return of_slices


def _stored(a: jax.Array) -> jax.Array:
    # Without the barrier, XLA would pad `a` instead of updating a slice of `whole`.
    whole = jax.lax.optimization_barrier(jnp.zeros(1 + a.size, a.dtype))
    return whole.at[1:].set(a.ravel())


def read(whole: jax.Array) -> jax.Array:
    """Return the elements of a result as a flat array.

    `whole` is a flat array that a function made by `of_parts` has returned. The first element of
    `whole` does not belong to the result.
    """
    return whole[1:]


class Address(NamedTuple):
    """The address of a slice of an array.

    XLA passes this address to a kernel, instead of first copying the slice to a new array.

    Attributes:
      operation: the kind of operation that XLA fused with the kernel's call: "slice",
        "dynamic-slice" or "dynamic-update-slice".
      unit: the address's offset from the start of the array is a multiple of this number of bytes.
    """

    operation: str
    unit: int


def fused(text: str) -> list[str]:
    """Find the slicing operations that XLA fused with a kernel's call, and return their lines.

    `text` is a compiled program. Each returned line contains one operation: "slice",
    "dynamic-slice" or "dynamic-update-slice". Because of the fusion, the slice is not copied: the
    kernel gets an address inside the larger array.
    """
    return [line for body in _bodies(text) for line in _slices(body)]


def addresses(text: str) -> list[Address]:
    """Return an `Address` for each line that `fused` finds."""
    return [_address(line, body) for body in _bodies(text) for line in _slices(body)]


def partly_overwritten(text: str) -> list[str]:
    """Find kernels that overwrite an operand that is not an entire array, and return their lines.

    Such a kernel reads the operand at the address of its result. XLA copies an entire array to this
    address if necessary. It copies nothing if the operand is a slice inside the kernel's fusion, or
    if the fusion stores the result in a part of another array.
    """
    lines = []
    for body in _bodies(text):
        entire = re.findall(r"(%[\w.-]+) = [^\n]* parameter\(", body)
        updates = "".join(line for line in _slices(body) if "dynamic-update-slice(" in line)
        for call in re.finditer(
            r"(%[\w.-]+) = [^\n]* custom-call\(([^)]*)\)[^\n]*"
            r"output_to_operand_aliasing=\{\{(\d*)\}: \((\d+)",
            body,
        ):
            name, operands, result, operand = call.groups()
            results = re.findall(
                rf"(%[\w.-]+) = [^\n]* get-tuple-element\({re.escape(name)}\), index={result}\b",
                body,
            )
            is_stored = any(re.search(rf"{re.escape(r)}\b", updates) for r in (name, *results))
            if is_stored or re.findall(r"%[\w.-]+", operands)[int(operand)] not in entire:
                lines.append(call.group())
    return lines


def _bodies(text: str) -> list[str]:
    """Return the fusions that consist of a kernel's call and slices of its operands or results."""
    bodies = re.findall(r"^%?dynamic-slice-fusion[\w.]* \(.*?^\}", text, re.DOTALL | re.MULTILINE)
    return [b for b in bodies if any(f'custom_call_target="{target}' in b for target in TARGETS)]


def _slices(body: str) -> list[str]:
    lines = body.splitlines()
    return [line.strip() for line in lines if re.search(r" [a-z-]*slice\(", line)]


def _address(line: str, body: str) -> Address:
    (operation,) = re.findall(r" ([a-z-]*slice)\(", line)
    if operation != "slice":
        offsets = re.findall(r'"byte_(?:offset|stride)":"(-?\d+)"', line)
        return Address(operation, math.gcd(*map(int, offsets)))
    (operand,) = re.findall(r" slice\(%([\w.-]+)\)", line)
    dtype, sizes = re.findall(rf"{re.escape(operand)} ?[:=] (\w+)\[([\d,]*)\]", body)[0]
    starts = [int(start) for start in re.findall(r"\[(\d+):", line)]
    strides = [math.prod(map(int, sizes.split(",")[i + 1 :])) for i in range(len(starts))]
    itemsize = _ITEMSIZE.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8
    return Address(operation, itemsize * sum(map(operator.mul, starts, strides)))


def kernels(text: str) -> int:
    """Return the number of calls of kernels in a compiled program."""
    return sum(text.count(f'custom_call_target="{target}') for target in TARGETS)
