"""Compiles kernels for a GPU that need not be here, an H100, and reads what the compiler says.

JAX compiles for a topology that its CUDA plugin is told of; Mosaic then writes the messages of
ptxas to a folder.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxnorm_kernels.mosaic.device.gpu import B200, HOPPER, RTX_5090, Gpu

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
    """Of `gpu`; bytes of memory, and threads of a multiprocessor."""
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
    """What ptxas says of a kernel: registers of a thread, and bytes of it that did not fit.

    `serialised`: that it has matrix products wait for each other.
    """

    name: str
    registers: int
    spilled: int
    serialised: bool


class Compiler:
    """For one GPU. A test that makes it is skipped where JAX's CUDA plugin is not installed."""

    def __init__(self, folder: Path, config: str = H100) -> None:
        self.folder = folder
        nvcc = pytest.importorskip("nvidia.cu13", reason="needs nvidia-cuda-nvcc").__path__[0]
        os.environ["PATH"] += f"{os.pathsep}{nvcc}/bin"
        try:
            topology = topologies.get_topology_desc(
                "gpu", "cuda", target_config=config, topology="1x1x1"
            )
        except (NotImplementedError, RuntimeError) as error:
            pytest.skip(f"needs jax[cuda13] and JAX_PLATFORMS=cpu: {error}")
        self.sharding = NamedSharding(Mesh(np.array(topology.devices), "x"), PartitionSpec())

    def compile(self, function: Callable[..., Any], operands: Sequence[Any]) -> list[Compiled]:
        """The kernels of ``function(*operands)``, in the order of their names."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
            patch.setenv("MOSAIC_GPU_DUMP_TO", str(self.folder))
            shapes = jax.tree.map(self._on_gpu, tuple(operands))
            jax.jit(function).lower(*shapes).compile()
        found = [_read(file) for file in sorted(self.folder.glob("*.ptxas"))]
        for file in self.folder.iterdir():
            file.unlink()
        return found

    def _on_gpu(self, operand: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=self.sharding)


def _read(file: Path) -> Compiled:
    said = file.read_text()
    (registers,) = re.findall(r"Used (\d+) registers", said)
    (spilled, *_) = re.findall(r"(\d+) bytes spill stores, \d+ bytes spill loads", said)
    serialised = "wgmma.mma_async instructions are serialized" in said
    return Compiled(file.stem, int(registers), int(spilled), serialised)
