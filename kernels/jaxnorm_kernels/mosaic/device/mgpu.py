"""All uses of JAX's private API by the kernels: MLIR operations and Mosaic's registers.

Pallas has no operations for single registers, for PTX or for another block's shared memory. Some
functions here, in `registers` and in `rows` therefore write MLIR inside ``plgpu.inline_mgpu``.
Pallas has no faster exp2 for single uses either; `numerics` registers a lowering rule for one. All
of them import MLIR from this module only.

Tested with jax 0.11.2 and 0.12.0.1. A JAX release may move any of it. If a module or class is gone,
importing the kernels fails with the error below: ``implementation="mosaic"`` raises it, and the
default runs XLA's code after a warning (`jaxnorm.calls.backends`). If a function is gone or has
changed, lowering a kernel fails. So run ``tests/mosaic`` first on a new version of JAX.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

try:
    from jax._src.lib.mlir import ir as ir
    from jax._src.lib.mlir.dialects import arith as arith
    from jax._src.lib.mlir.dialects import builtin as builtin
    from jax._src.lib.mlir.dialects import gpu as gpu
    from jax._src.lib.mlir.dialects import llvm as llvm
    from jax._src.lib.mlir.dialects import math as math
    from jax._src.lib.mlir.dialects import nvvm as nvvm
    from jax._src.lib.mlir.dialects import vector as vector
    from jax._src.pallas.mosaic_gpu.lowering import register_lowering_rule as register_lowering_rule
    from jax.experimental.mosaic.gpu import FragmentedArray as FragmentedArray
    from jax.experimental.mosaic.gpu import utils as utils
except ImportError as error:
    raise ImportError(
        f"jax {jax.__version__} lacks a private part of it that the Mosaic GPU kernels are made "
        f"with; they were tried with jax 0.11.2 and 0.12.0.1: {error}"
    ) from error

WARP = 32  # threads per warp
WARPS = 4  # warps per warpgroup
_GLOBAL, _SHARED = 1, 3  # LLVM's address spaces of global and of shared memory


def i32(value: int) -> Any:
    """Return a constant of 32 bits."""
    return utils.c(value, ir.IntegerType.get_signless(32))


def _operator(operation: Callable[[Any, Any], Any]) -> Callable[["Word", "Word | int"], "Word"]:
    def apply(a: "Word", b: "Word | int") -> "Word":
        kind = ir.IntegerType.get_signless(32)
        return Word(operation(a.value, b.value if isinstance(b, Word) else utils.c(b, kind)))

    return apply


@dataclasses.dataclass(frozen=True)
class Word:
    """An integer of 32 bits with Python's operators; division and remainder are unsigned."""

    value: Any

    __add__ = _operator(arith.addi)
    __sub__ = _operator(arith.subi)
    __mul__ = _operator(arith.muli)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)

    def is_below(self, limit: int) -> Any:
        """Return whether ``0 <= self < limit``; the comparison is unsigned."""
        return arith.cmpi(arith.CmpIPredicate.ult, self.value, i32(limit))

    def is_zero(self) -> Any:
        """Return whether the number is 0."""
        return arith.cmpi(arith.CmpIPredicate.eq, self.value, i32(0))


def thread() -> Word:
    """Return the index of the thread in its block."""
    return Word(arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x)))


def load_floats(address: Word, count: int) -> list[Any]:
    """Load `count` float32 values from shared memory, at an address aligned to their total size."""
    kind = ir.VectorType.get((count,), ir.F32Type.get())
    return elements_of(llvm.load(kind, in_shared(address), alignment=4 * count))


def is_signed(kind: Any) -> bool | None:
    """Return the `is_signed` argument of a `FragmentedArray`: True for all integer types."""
    return None if isinstance(kind, ir.FloatType) else True


def elements_of(register: Any) -> list[Any]:
    """Return the elements of a register, which is a thread's vector."""
    (count,) = ir.VectorType(register.type).shape
    return [
        vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([k]))
        for k in range(count)
    ]


def in_global(address: Any) -> Any:
    """Mark an address as global memory, so that the compiler uses global loads and stores."""
    return llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), address)


def address_of(ref: Any) -> Word:
    """Return the address of a ref in shared memory as 32 bits, the form that PTX takes."""
    return Word(llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref)))


def in_shared(address: Word) -> Any:
    """Return the pointer to an address in shared memory."""
    return llvm.inttoptr(llvm.PointerType.get(_SHARED), address.value)
