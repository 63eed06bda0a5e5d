"""All that the kernels take of JAX's private parts: MLIR's operations, and Mosaic's registers.

Pallas has no operations for single registers, for PTX or for another block's shared memory, so some
functions here and in `rows` write MLIR inside of ``plgpu.inline_mgpu``; and none for a quicker exp2
in one place of a kernel, which has a lowering rule in `numerics`. They take it from this module
alone.

Tried with jax 0.11.2 and 0.12.0.1. JAX may move any of it in a release. Where a module or a class
is gone, importing the kernels fails with the sentence below: ``implementation="mosaic"`` raises it,
and the default runs XLA's code after a warning (`jaxnorm.calls.backends`). Where one of their
functions is gone, or means something else, lowering a kernel fails: run ``tests/mosaic`` on a new
jax before anything else.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

try:
    from jax._src.lib.mlir import ir as ir
    from jax._src.lib.mlir.dialects import arith as arith
    from jax._src.lib.mlir.dialects import builtin as builtin
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

WARP = 32  # threads of a warp
WARPS = 4  # warps of a warpgroup
_GLOBAL, _SHARED = 1, 3  # LLVM's numbers of global and of shared memory.


def i32(value: int) -> Any:
    """A constant of 32 bits."""
    return utils.c(value, ir.IntegerType.get_signless(32))


def _operator(operation: Callable[[Any, Any], Any]) -> Callable[["Word", "Word | int"], "Word"]:
    def apply(a: "Word", b: "Word | int") -> "Word":
        kind = ir.IntegerType.get_signless(32)
        return Word(operation(a.value, b.value if isinstance(b, Word) else utils.c(b, kind)))

    return apply


@dataclasses.dataclass(frozen=True)
class Word:
    """A number of 32 bits, with Python's operators; divided as a number without a sign."""

    value: Any

    __add__ = _operator(arith.addi)
    __sub__ = _operator(arith.subi)
    __mul__ = _operator(arith.muli)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)

    def is_below(self, limit: int) -> Any:
        """Return whether ``0 <= self < limit``: a negative number is a large one without a sign."""
        return arith.cmpi(arith.CmpIPredicate.ult, self.value, i32(limit))

    def is_zero(self) -> Any:
        """Return whether it is 0."""
        return arith.cmpi(arith.CmpIPredicate.eq, self.value, i32(0))


def thread() -> Word:
    """Return the thread's number in its block."""
    return Word(utils.thread_idx())


def load_floats(address: Word, count: int) -> list[Any]:
    """`count` float32 values of shared memory, at an address that is a multiple of their bytes."""
    kind = ir.VectorType.get((count,), ir.F32Type.get())
    return elements_of(llvm.load(kind, in_shared(address), alignment=4 * count))


def is_signed(kind: Any) -> bool | None:
    """What a `FragmentedArray` of this element type says: all integers are signed."""
    return None if isinstance(kind, ir.FloatType) else True


def elements_of(register: Any) -> list[Any]:
    """Of a thread's vector."""
    (count,) = ir.VectorType(register.type).shape
    return [
        vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([k]))
        for k in range(count)
    ]


def in_global(address: Any) -> Any:
    """An address, of which the compiler is to know that it is in global memory."""
    return llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), address)


def address_of(ref: Any) -> Word:
    """Of shared memory, in 32 bits, as PTX takes it."""
    return Word(llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref)))


def in_shared(address: Word) -> Any:
    """The pointer of such an address."""
    return llvm.inttoptr(llvm.PointerType.get(_SHARED), address.value)
