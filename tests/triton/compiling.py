"""Compile the kernels of a call with Triton's own compiler, for a GPU that need not be present."""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import contract
import jax
import jax.numpy as jnp
import norms
import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jaxnorm_kernels import triton as implementation
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import launch, schedule
from jaxnorm_kernels.triton.launch import Gpu

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "bool": "*i1"}
_POINTERS |= {f"{sign}int{n}": f"*{sign or 'i'}{n}" for sign in ("", "u") for n in (8, 16, 32, 64)}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
      registers: the number of registers per thread.
      spilled: the number of bytes per thread that did not fit into registers.
      shared: the number of bytes of shared memory per program.
      ptx, ttgir: the assembly (PTX), and Triton's intermediate form before it.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    ptx: str
    ttgir: str


def compile_call(
    spec: Spec, gpu: Gpu, *, label_dtype: Any = jnp.int32, **options: Any
) -> list[Compiled]:
    """Compile the kernels that a call with this spec runs on `gpu`, and return them."""
    compiled = []

    def run(*, kernel: Any, out_type: list[Any], num_warps: int, **call: Any) -> list[jax.Array]:
        compiled.append(_compile(kernel, call, out_type, num_warps, gpu.capability))
        return [jnp.zeros(out.shape, out.dtype) for out in out_type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "run", run)
        patch.setattr(schedule, "local_gpu", lambda: gpu)
        with jax.enable_x64(True):  # because labels may have 64 bits
            operands = norms.types_of(spec, label_dtype)
            jax.eval_shape(lambda *operands: _call(spec, *operands, **options), *operands)
    return compiled


def _call(spec: Spec, *operands: Any, **options: Any) -> Any:
    return contract.call(implementation, spec, *operands, **options)


def _compile(
    kernel: Any, call: dict[str, Any], out_type: list[Any], num_warps: int, capability: int
) -> Compiled:
    outputs = iter(out_type)
    signature, constants = {}, {}
    for param in kernel.params:
        value = call[param.name] if param.name in call else next(outputs)
        if param.is_constexpr or value is None:
            signature[param.name], constants[param.name] = "constexpr", value
        else:
            is_array = hasattr(value, "dtype")
            signature[param.name] = _POINTERS[value.dtype.name] if is_array else "i32"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    made = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, **call["backend_options"]},
    )
    registers, spilled = _resources(made.asm["cubin"])
    return Compiled(
        made.metadata.name,
        registers,
        spilled,
        made.metadata.shared,
        made.asm["ptx"],
        made.asm["ttgir"],
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_CUOBJDUMP, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])
