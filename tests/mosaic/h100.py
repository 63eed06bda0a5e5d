"""Compile kernels for an H100 that need not be present, and read the messages of ptxas.

JAX's CUDA plugin compiles for a GPU that exists only as a text description, and Mosaic prints the
messages of ptxas. `make compile` installs the plugin and ptxas.
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

from jaxnorm_kernels.mosaic.device.gpu import B200, HOPPER, REGISTERS, RTX_5090, Gpu
from jaxnorm_kernels.mosaic.device.layouts import WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.schedules import heads
from jaxnorm_kernels.mosaic.schedules.norm_backward import norm_schedule
from jaxnorm_kernels.mosaic.schedules.strips import strips_of
from jaxnorm_kernels.specs import Spec

# The text that describes a GPU to XLA, with the fields that compilation needs.
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
    """Return the description of `gpu`.

    `memory` is in bytes. `threads` is the maximum number of threads per multiprocessor.
    """
    of_gpu = {"sms": gpu.sms, "optin": gpu.smem, "shared": gpu.shared_bytes}
    return _CONFIG.format(name=name, major=major, memory=memory, threads=threads, **of_gpu)


H100 = _config("NVIDIA H100 80GB HBM3", 9, HOPPER, 84978434048)
CONFIGS = {
    90: H100,
    100: _config("NVIDIA B200", 10, B200, 192 * 10**9),
    120: _config("NVIDIA GeForce RTX 5090", 12, RTX_5090, 32 * 10**9, threads=1536),
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The report of ptxas about a kernel.

    Attributes:
      registers: the number of registers per thread.
      spilled: the number of bytes per thread that are spilled to memory.
      serialised: True if ptxas serialises the kernel's matrix instructions (wgmma).
    """

    name: str
    registers: int
    spilled: int
    serialised: bool


class Compiler:
    """Compiles kernels for one GPU. `needs.cuda_compilers` checks that this is possible."""

    def __init__(self, folder: Path, config: str = H100) -> None:
        self.folder = folder
        (nvcc,) = importlib.import_module("nvidia.cu13.bin").__path__
        # Put this ptxas first: another one on this machine may be older and spill different
        # registers.
        os.environ["PATH"] = f"{nvcc}{os.pathsep}{os.environ['PATH']}"
        topology = topologies.get_topology_desc(
            "gpu", "cuda", target_config=config, topology="1x1x1"
        )
        self.sharding = NamedSharding(Mesh(np.array(topology.devices), "x"), PartitionSpec())

    def compile(self, function: Callable[..., Any], operands: Sequence[Any]) -> list[Compiled]:
        """Compile ``function(*operands)`` and return its kernels, sorted by name."""
        with pytest.MonkeyPatch.context() as patch:
            # No dump folder is set. With a dump folder, the compiler would write the kernel to a
            # file after each pass, which takes longer than the pass.
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


#: The maximum number of bytes per thread that a kernel may spill. Rows that fill all registers of a
#: block spill a few words. In the case that was measured (softmax over 32768 columns), this cost no
#: time.
SPILLED = 32


def assert_fits(kernel: Compiled, spec: Spec) -> None:
    """Assert that a kernel hardly spills, and that an SM has registers for the scheduled blocks."""
    assert kernel.spilled <= SPILLED
    registers = -(-kernel.registers // 8) * 8  # allocated in groups of 8
    if spec.inner > 1:
        # The registers must suffice for two blocks per SM.
        assert kernel.spilled == 0
        threads = WARPGROUP_THREADS * strips_of(spec).warpgroups
        assert registers * threads * 2 <= REGISTERS
    elif spec.direction == "bwd" and spec.is_norm:
        schedule: Any = heads.backward(spec) if spec.op == "norm_rope" else norm_schedule(spec)
        if schedule is not None:
            assert schedule.stages >= 2
            threads = WARPGROUP_THREADS * getattr(schedule, "warpgroups", 1)
            assert registers * threads * schedule.blocks_per_sm <= REGISTERS
