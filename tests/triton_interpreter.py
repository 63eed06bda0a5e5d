"""Run the Triton kernels on the CPU, in Triton's interpreter, wherever JAX calls them.

Run pytest with TRITON_INTERPRET=1, which Triton reads when it is imported. The interpreter checks
values; `triton/test_compile.py` tests the kernels compiled for a GPU.
"""

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from jaxnorm_kernels.triton import launch


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A NumPy array that looks like a device tensor to the interpreter.

    It has the attributes and methods that the interpreter needs.
    """

    array: np.ndarray

    @property
    def dtype(self) -> str:
        return self.array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Buffer":
        return self

    def cpu(self) -> "Buffer":
        return self

    def new_empty(self, size: int, device: str) -> "Buffer":
        del size, device
        return self

    def set_(self, *view: Any) -> None: ...

    def copy_(self, other: "Buffer") -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all kernels in the interpreter until `monkeypatch` is undone."""
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", _cast)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)


def run(*, kernel: Any, out_type: list[jax.ShapeDtypeStruct], grid: tuple[int, ...], **call: Any):
    """Run a kernel in the interpreter; this function replaces `launch.run`."""
    arguments = {key: value for key, value in call.items() if key in kernel.arg_names}
    refs = {key: value for key, value in arguments.items() if isinstance(value, jax.Ref)}
    arrays = {key: value for key, value in arguments.items() if isinstance(value, jax.Array)}
    arrays |= {key: ref[...] for key, ref in refs.items()}
    static = {key: value for key, value in arguments.items() if key not in arrays}
    outputs = [key for key in kernel.arg_names if key not in arguments]

    def interpret(arrays: dict[str, Any]) -> list[np.ndarray]:
        given = {key: Buffer(np.array(value)) for key, value in arrays.items()}
        made = {key: Buffer(np.empty(t.shape, t.dtype)) for key, t in zip(outputs, out_type)}
        with np.errstate(all="ignore"):
            kernel[grid](**given, **made, **static)
        return [given[key].array for key in refs] + [buffer.array for buffer in made.values()]

    assert len(outputs) == len(out_type)
    overwritten = [jax.ShapeDtypeStruct.like(arrays[key]) for key in refs]
    results = jax.pure_callback(interpret, [*overwritten, *out_type], arrays)
    for ref, result in zip(refs.values(), results):
        ref[...] = result
    return results[len(refs) :]


_cast_of_interpreter = InterpreterBuilder.cast_impl


def _cast(self: Any, source: Any, to: Any) -> Any:
    """Round float32 to the nearest bfloat16, as GPUs do; the interpreter's own cast truncates."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    match source.dtype.scalar, to.scalar:
        case tl.float32, tl.bfloat16:
            return TensorHandle(source.data.astype(bfloat16).view(np.uint16), tl.bfloat16)
        case tl.bfloat16, tl.float32:
            return TensorHandle(source.data.view(bfloat16).astype(np.float32), tl.float32)
    return _cast_of_interpreter(self, source, to)


def _dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """Multiply bfloat16 values. The interpreter itself would multiply their bits as integers."""
    del options
    a, b = (_cast(self, factor, tl.float32).data for factor in (a, b))
    return TensorHandle(a @ b + total.data, total.dtype.scalar)
