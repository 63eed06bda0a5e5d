"""Compiles Triton kernels on one machine, and runs them on another machine without Triton.

A folder has compiled kernels for one GPU: a file for each launch, named after the kernel and a hash
of everything that the launch depends on. `recording` fills the folder on a machine with Triton; no
GPU is needed there. `replay` makes launches use these files on a machine with a GPU; Triton is not
needed there. ``pytest --export-triton`` and ``pytest --exported-triton`` do both for the kernels
of the tests (see docs/testing.md).
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import re
import sys
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm_kernels
from jaxnorm.calls import backends
from jaxnorm.calls.call import Call
from jaxnorm_kernels.specs import Shared

#: GPUs for which kernels can be compiled. Each has three numbers: ten times its compute capability,
#: its number of multiprocessors, and the maximum shared memory of a thread block in bytes.
GPUS = {
    "a100": (80, 108, 163 * 1024),
    "l4": (89, 58, 99 * 1024),
    "h100": (90, 132, 227 * 1024),
}

#: The name of the file that describes a folder's kernels: source, compiler and GPU.
ABOUT = "about.json"

_TARGET = "triton_kernel_call_ffi"  # jax-triton's custom call; JAX's CUDA plugin has it too


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of ``jax_triton.triton_call``.

    Attributes:
      kernel: the kernel's Python function.
      call: the other arguments of the call, by name.
    """

    kernel: Any
    call: Mapping[str, Any]

    @property
    def arrays(self) -> dict[str, Any]:
        """The arguments that are arrays or references, in the order of the kernel's parameters."""
        names = [name for name in self.kernel.arg_names if _is_array(self.call.get(name))]
        return {name: self.call[name] for name in names}

    def __str__(self) -> str:
        arguments = (f"{name}={_text(value)}" for name, value in sorted(self.call.items()))
        function = getattr(self.kernel, "fn", self.kernel)
        return f"{function.__module__}.{function.__name__}({', '.join(arguments)})"

    @property
    def file(self) -> str:
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:24]
        return f"{self.call['name']}-{digest}"


class MissingProgramError(LookupError):
    """The error of a launch whose kernel is not in the folder."""

    def __init__(self, folder: Path, launch: Launch) -> None:
        super().__init__(f"{folder} has no program of {launch}: record it again")
        self.launch = launch


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, jax.Ref))


def _text(value: Any) -> str:
    """Return a text that identifies a value: two values have the same text only if they are equal.

    The text is the same in every process, because the values that are not arrays are numbers,
    strings, dtypes, and records of these.
    """
    if isinstance(value, jax.Ref):
        return f"&{value.dtype.name}{[*value.shape]}"
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return f"{value.dtype.name}{[*value.shape]}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


# ------------------------------------------------------------------------------------- recording


@contextlib.contextmanager
def recording(folder: Path, gpu: tuple[int, int, int]) -> Iterator[None]:
    """Within this context, compile each Triton kernel that is launched, and do not run it.

    Calls return results that XLA computes.

    Args:
      folder: the folder for the compiled kernels. Kernels that it already has are not compiled
        again.
      gpu: the GPU for which kernels are compiled, as in `GPUS`.
    """
    triton = importlib.import_module("jaxnorm_kernels.triton")
    launch = importlib.import_module("jaxnorm_kernels.triton.launch")
    expected = {"gpu": [*gpu], "sources": sources(), "software": _software()}
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), (folder / ABOUT).open("x") as file:
        json.dump(expected, file)
    if about(folder) != expected:
        raise ValueError(
            f"{folder} has kernels of {about(folder)}; expected {expected}: name an empty folder"
        )

    def run(*, kernel: Any, out_type: Sequence[Any], **call: Any) -> list[jax.Array]:
        one = Launch(kernel, {**call, "out_type": out_type})
        if not (folder / one.file).exists():
            part = folder / f".{one.file}.{os.getpid()}"
            part.write_bytes(_compiled(one))
            part.rename(folder / one.file)
        return [jnp.zeros(out.shape, out.dtype) for out in out_type]

    def of_contract(kernel: Any, formula: Any) -> Any:
        """Return a replacement for a forward or backward function of `jaxnorm_kernels.triton`.

        It compiles the Triton kernel, but the results that it returns are XLA's.
        """

        def call(*records: Any, **schedule: Any) -> Any:
            *arrays, spec = records
            if spec.is_softmax and (spec.softmax.mask_rows or spec.softmax.logits_bias_rows):
                # The xla implementation does not support the kernel's two-dimensional mask and
                # bias, so `formula` cannot compute the results. Call `kernel` instead. Its results
                # are not correct, because `run` above launches nothing and returns zeros. The
                # program is only compiled, so the values do not matter.
                return kernel(*arrays, spec, **schedule)
            jax.eval_shape(lambda *arrays: kernel(*arrays, spec, **schedule), *arrays)
            first, *others = arrays
            if spec.is_norm and (shared := spec.norm.table_rows) is not None:
                at = _operand_rows(shared)
                first = first._replace(cos=first.cos[at], sin=first.sin[at])
            return formula(first, *others, spec)

        return call

    def of_call(call: Call, name: str) -> Any:
        """Return a substitute for `Call.kernel` that compiles kernels but returns XLA's results."""
        if name != "triton":
            return kernel_of(call, name)

        def computed(*arrays: jax.Array) -> list[jax.Array]:
            with _patched((triton, "IMPLEMENTATION", of_kernels)):
                jax.eval_shape(kernel_of(call, name), *arrays)
            return call.xla(*arrays)

        return computed

    kernel_of, xla = Call.kernel, backends.implementation("xla")
    of_kernels = triton.IMPLEMENTATION._replace(platforms=lambda: ("cuda", "cpu"))
    of_xla = of_kernels._replace(
        forward=of_contract(triton.forward, xla.forward),
        backward=of_contract(triton.backward, xla.backward),
    )
    with _patched(
        *_scheduled_for(gpu),
        (launch, "run", run),
        (Call, "kernel", of_call),
        (triton, "IMPLEMENTATION", of_xla),
        (triton, "forward", of_xla.forward),
        (triton, "backward", of_xla.backward),
    ):
        yield


def _operand_rows(shared: Shared) -> np.ndarray:
    """Return an integer array with an index for each row of x.

    Row i of x uses row ``result[i]`` of the operand.
    """
    own = np.arange(shared.rows).reshape([size if has else 1 for size, has in shared.segments])
    return np.broadcast_to(own, [size for size, _ in shared.segments]).ravel()


def are_recorded() -> bool:
    """Return True inside the context `recording`."""
    launch = sys.modules.get("jaxnorm_kernels.triton.launch")
    return launch is not None and launch.run.__module__ == __name__


def _compiled(one: Launch) -> bytes:
    """Compile a launch. Return what its custom call needs: code, grid and integer arguments."""
    jax_triton = importlib.import_module("jax_triton")
    types_of = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in one.arrays.items()
    }
    refs = {name for name, array in one.arrays.items() if isinstance(array, jax.Ref)}

    def launched(*arrays: jax.Array) -> Any:
        given: dict[str, Any] = dict(zip(types_of, arrays))
        given |= {name: jax.new_ref(given[name]) for name in refs}
        results = jax_triton.triton_call(kernel=one.kernel, **{**one.call, **given})
        return results, [jax.freeze(given[name]) for name in refs]

    with jax.core.eval_context(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        traced = jax.jit(launched).trace(*types_of.values())
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    call = _only_call(module)
    assert call.attributes["call_target_name"].value == _TARGET, call
    assert [*call.operands] == [*call.operation.block.arguments], f"another order: {one}"
    return zlib.decompress(opaque(call))


def _only_call(module: Any) -> Any:
    """Return the custom call of a StableHLO module that has exactly one custom call."""
    (call,) = (
        op
        for function in module.body.operations
        for op in function.regions[0].blocks[0].operations
        if op.operation.name == "stablehlo.custom_call"
    )
    return call


def opaque(call: Any) -> bytes:
    """Return the attribute of jax-triton's custom call: a compressed description of the launch."""
    code: bytes = call.attributes["mhlo.backend_config"]["opaque"].value_bytes
    return code


# -------------------------------------------------------------------------------------- replaying


def replay(folder: Path) -> None:
    """Make all later launches of Triton kernels use the compiled kernels in `folder`.

    Stand-ins replace the modules `triton` and `jax_triton`, so the Triton kernels must not have
    been imported before. The rest of `jaxnorm_kernels.triton` works as usual, including the
    choice of schedules and the check that a kernel supports a call.
    """
    if "jaxnorm_kernels.triton" in sys.modules:
        raise RuntimeError("the Triton kernels are imported already; replay the programs before")
    found = about(folder)
    if found["sources"] != sources():
        raise ValueError(f"{folder} was made from other sources than these: make it again")
    extra = types.ModuleType("jaxnorm_kernels.triton.extra")
    extra.__dict__.update(check=lambda: None, check_cuda=lambda: None)
    jax_triton = types.ModuleType("jax_triton")
    jax_triton.__dict__.update(triton_call=_Replay(folder))
    triton, language = types.ModuleType("triton"), _Language("triton.language")
    triton.__dict__.update(
        jit=_Kernel, next_power_of_2=lambda n: 1 << (n - 1).bit_length(), language=language
    )
    stand_ins = (triton, language, jax_triton, extra)
    others = {module.__name__: sys.modules.get(module.__name__) for module in stand_ins}
    sys.modules.update({module.__name__: module for module in stand_ins})
    importlib.import_module("jaxnorm_kernels.triton")
    # Later imports of Triton in this process get the real module.
    for name in ("triton", "triton.language"):
        sys.modules.pop(name)
        if (other := others[name]) is not None:
            sys.modules[name] = other
    for module, name, local_gpu in _scheduled_for(found["gpu"]):
        setattr(module, name, local_gpu)


def replayed() -> list[Path]:
    """Return a list with the folder that `replay` was called with, or an empty list."""
    call = getattr(sys.modules.get("jax_triton"), "triton_call", None)
    return [call.folder] if isinstance(call, _Replay) else []


@dataclasses.dataclass(frozen=True)
class _Replay:
    """A replacement for ``jax_triton.triton_call`` that launches compiled kernels from a folder."""

    folder: Path

    def __call__(self, *, kernel: Any, out_type: Sequence[Any], **call: Any) -> list[jax.Array]:
        one = Launch(kernel, {**call, "out_type": out_type})
        try:
            program = (self.folder / one.file).read_bytes()
        except FileNotFoundError as error:
            raise MissingProgramError(self.folder, one) from error
        arrays = one.arrays
        refs = {i: a for i, a in enumerate(arrays.values()) if isinstance(a, jax.Ref)}
        results = jax.ffi.ffi_call(
            _TARGET,
            [*out_type, *(jax.ShapeDtypeStruct(ref.shape, ref.dtype) for ref in refs.values())],
            input_output_aliases={i: len(out_type) + n for n, i in enumerate(refs)},
        )(
            *(a[...] if isinstance(a, jax.Ref) else a for a in arrays.values()),
            opaque=zlib.compress(program, 1),
        )
        for ref, result in zip(refs.values(), results[len(out_type) :]):
            ref[...] = result
        return list(results[: len(out_type)])


class _Kernel:
    """A replacement for `triton.jit` that does not compile kernels."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.arg_names = [*fn.__code__.co_varnames[: fn.__code__.co_argcount]]


class _Language(types.ModuleType):
    """A stand-in for `triton.language`.

    Modules with kernels use `triton.language` in annotations and constants. With the stand-in, they
    can be imported without Triton.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda value=None: value


# ----------------------------------------------------------------------------------- the folder


def about(folder: Path) -> dict[str, Any]:
    """Return the description of a folder's kernels, as in the file `ABOUT`."""
    read: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    return read


def _software() -> str:
    return " + ".join(
        f"{name} {metadata.version(name)}" for name in ("jax", "jax-triton", "triton")
    )


def sources() -> str:
    """Return a hash of the source files of the Triton kernels.

    A folder of compiled kernels contains this hash, so that outdated kernels are detected. The hash
    is needed because the names of the files in the folder do not depend on the sources.
    """
    (root,) = map(Path, jaxnorm_kernels.__path__)
    texts = (file.read_bytes() for file in sorted(root.glob("triton/*.py")))
    return hashlib.sha256(b"".join(t for t in texts if b"@triton.jit" in t)).hexdigest()


def _scheduled_for(gpu: Sequence[int]) -> list[tuple[Any, str, Any]]:
    """Return changes for `_patched` that choose schedules for a GPU of `GPUS`."""
    launch = importlib.import_module("jaxnorm_kernels.triton.launch")
    schedule = importlib.import_module("jaxnorm_kernels.triton.schedule")
    one = launch.Gpu(*gpu)
    return [(module, "local_gpu", lambda: one) for module in (launch, schedule)]


@contextlib.contextmanager
def _patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def gpu_of(text: str) -> tuple[int, int, int]:
    """Return the GPU that a command-line argument names, or describes by three numbers."""
    if text in GPUS:
        return GPUS[text]
    if re.fullmatch(r"\d+,\d+,\d+", text):
        capability, sms, smem = map(int, text.split(","))
        return capability, sms, smem
    raise argparse.ArgumentTypeError(
        f"got {text!r}; expected one of {', '.join(GPUS)}, or compute capability times ten, "
        "multiprocessors and bytes of shared memory: 80,108,166912"
    )
