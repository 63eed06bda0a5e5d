"""Compile kernels for an H100 that need not be present, and read the compiler's messages.

JAX compiles for a topology that is described to its CUDA plugin, and Mosaic prints the messages of
ptxas. `make compile` installs both.
"""

import contextlib
import ctypes
import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxnorm_kernels.mosaic.device.gpu import B200, HOPPER, RTX_5090, Gpu
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward
from jaxnorm_kernels.specs import Spec

# XLA's description of a GPU, as far as a compilation needs it.
_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: {threads}
  core_count: {sms}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""


def _config(name: str, major: int, gpu: Gpu, memory: int, threads: int = 2048) -> str:
    """Return the description of `gpu`, with its bytes of memory and threads per multiprocessor."""
    optin, shared = gpu.smem, gpu.shared_bytes
    return _CONFIG.format(
        name=name,
        major=major,
        sms=gpu.sms,
        memory=memory,
        threads=threads,
        optin=optin,
        shared=shared,
    )


H100 = _config("NVIDIA H100 80GB HBM3", 9, HOPPER, 84978434048)
CONFIGS = {
    100: _config("NVIDIA B200", 10, B200, 192 * 10**9),
    120: _config("NVIDIA GeForce RTX 5090", 12, RTX_5090, 32 * 10**9, threads=1536),
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The report of ptxas on a kernel: registers per thread, and bytes that were spilled.

    `serialised`: ptxas serialises its matrix instructions.
    """

    name: str
    registers: int
    spilled: int
    serialised: bool


class Compiler:
    """For one GPU. Tests that make it are left out where `needs.cuda_compilers` says why."""

    def __init__(self, folder: Path, config: str = H100) -> None:
        self.folder = folder
        (nvcc,) = importlib.import_module("nvidia.cu13.bin").__path__
        # First: another ptxas of this machine may be older, and spill other registers.
        os.environ["PATH"] = f"{nvcc}{os.pathsep}{os.environ['PATH']}"
        topology = topologies.get_topology_desc(
            "gpu", "cuda", target_config=config, topology="1x1x1"
        )
        self.sharding = NamedSharding(Mesh(np.array(topology.devices), "x"), PartitionSpec())

    def compile(self, function: Callable[..., Any], operands: Sequence[Any]) -> list[Compiled]:
        """The kernels of ``function(*operands)``, in the order of their names."""
        with pytest.MonkeyPatch.context() as patch:
            # No folder is set: with one, the compiler writes the kernel after each pass, which
            # takes longer than the pass.
            patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
            shapes = jax.tree.map(self._on_gpu, tuple(operands))
            with _printed_to(self.folder / "ptxas"):
                jax.jit(function).lower(*shapes).compile()
        return _read((self.folder / "ptxas").read_text())

    def _on_gpu(self, operand: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=self.sharding)


@contextlib.contextmanager
def _printed_to(file: Path) -> Iterator[None]:
    """Redirect the output of this process, including its C++ code, to `file`."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with file.open("w") as to:
            os.dup2(to.fileno(), 1)
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _read(said: str) -> list[Compiled]:
    _, *parts = re.split(r"Compiling entry function '(\w+)'", said)
    found = []
    for name, of_kernel in zip(parts[::2], parts[1::2]):
        (registers,) = re.findall(r"Used (\d+) registers", of_kernel)
        (spilled, *_) = re.findall(r"(\d+) bytes spill stores, \d+ bytes spill loads", of_kernel)
        serialised = re.search(f"wgmma.mma_async instructions are serialized .*'{name}'", said)
        found.append(Compiled(name, int(registers), int(spilled), serialised is not None))
    return sorted(found, key=lambda kernel: kernel.name)


#: Bytes of a thread: a few words of a row that fills the registers of its block, which cost nothing
#: where that was measured (softmax over 32768 columns).
SPILLED = 32


def assert_fits(kernel: Compiled, spec: Spec) -> None:
    """Few spills; and a ring's registers let as many blocks run at a time as it asks for."""
    assert kernel.spilled <= SPILLED
    if spec.direction == "fwd" or not spec.is_norm:
        return
    schedule = norm_backward.norm_schedule(spec)
    if isinstance(schedule, PipelinedRows | PipelinedNarrowRows):
        assert schedule.stages >= 2
        threads = 128 * getattr(schedule, "warpgroups", 1)
        registers = -(-kernel.registers // 8) * 8  # given to a warp by 8 for each thread
        assert registers * threads * schedule.blocks_per_sm <= norm_backward.REGISTERS
