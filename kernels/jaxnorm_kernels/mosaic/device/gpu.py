"""Properties of the local GPU that schedules depend on. Without a GPU, those of an H100."""

import ctypes
import dataclasses
import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxnorm_kernels.launching import local_capability
from jaxnorm_kernels.mosaic.device.launch import is_interpreted

#: Numbers of blocks in a cluster. Not every GPU with clusters supports 16; Hopper and B200 do.
CLUSTER_SIZES = (2, 4, 8, 16)
PORTABLE_CLUSTER = 8

#: The maximum number of schedules in the cache of each function that chooses them.
SCHEDULES_KEPT = 1024

# Limits of all GPUs with clusters:
REGISTERS = 65536  # per multiprocessor
MOST_REGISTERS = 255  # per thread
# Limits of Hopper and B200:
SHARED_BYTES = 228 * 1024  # per multiprocessor
RESERVED_BYTES = 1024  # of shared memory, per block
MOST_SHARED_BYTES = SHARED_BYTES - RESERVED_BYTES  # per block


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that schedules depend on.

    Attributes:
      sms: the number of multiprocessors.
      smem: bytes of shared memory available to a block.
      clusters: for each cluster size, the number of clusters that run at the same time with one
        block per multiprocessor. A cluster must fit in one group of multiprocessors (GPC), and the
        number of working multiprocessors per group varies between chips of the same model. One
        cluster more than this number costs a second round.
    """

    sms: int
    smem: int
    clusters: Mapping[int, int] = dataclasses.field(hash=False)

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a multiprocessor in bytes, including the part reserved per block."""
        return self.smem + RESERVED_BYTES

    @property
    def portable_cluster(self) -> int:
        """The largest cluster size that every GPU with clusters supports."""
        return max([size for size in self.clusters if size <= PORTABLE_CLUSTER], default=1)

    def at_a_time(self, cluster: int) -> int:
        """Return how many clusters of this many blocks run at the same time.

        Each multiprocessor runs one block. A `cluster` of 1 stands for single blocks.
        """
        return self.clusters[cluster] if cluster > 1 else self.sms


#: The numbers of clusters were measured on one H200. On another chip, one more or one less may run
#: at the same time.
HOPPER = Gpu(sms=132, smem=MOST_SHARED_BYTES, clusters={2: 66, 4: 30, 8: 15, 16: 7})
INTERPRETER = dataclasses.replace(HOPPER, clusters={})


def _of_size(sms: int, like: Gpu) -> Gpu:
    """Return `like` with `sms` multiprocessors and its numbers of clusters scaled in proportion."""
    clusters = {size: max(1, sms * n // like.sms) for size, n in like.clusters.items()}
    return dataclasses.replace(like, sms=sms, clusters=clusters)


#: Not measured: the numbers of clusters are scaled from an H200's. If there is a CUDA driver, it
#: gives the true numbers.
B200 = _of_size(148, HOPPER)
#: This GPU was not measured either. Clusters of 16 blocks are left out, because not every GPU
#: supports them.
RTX_5090 = dataclasses.replace(
    _of_size(170, dataclasses.replace(HOPPER, clusters={2: 66, 4: 30, 8: 15})), smem=99 * 1024
)

#: The GPUs, by compute capability times ten.
GPUS = {90: HOPPER, 100: B200, 120: RTX_5090}


def kept[T](choose: Callable[[Any, Gpu], T]) -> Callable[..., T]:
    """Cache `choose`, which returns the schedule of a call on a GPU; the default is the local GPU.

    A schedule is needed at least twice: to check that the call is supported, and to run it.
    """
    once = functools.lru_cache(maxsize=SCHEDULES_KEPT)(choose)

    @functools.wraps(choose)
    def choice(spec: Any, gpu: Gpu | None = None) -> T:
        return once(spec, gpu or local_gpu())

    return choice


def local_gpu() -> Gpu:
    """Return the properties common to all local GPUs, or `HOPPER` without a GPU.

    A program may run on any of the local GPUs.
    """
    return INTERPRETER if is_interpreted() else _local_gpu()


@functools.cache
def _local_gpu() -> Gpu:
    devices = jax.local_devices()
    if devices[0].platform != "gpu" or not hasattr(devices[0], "core_count"):
        return HOPPER
    like = GPUS.get(local_capability() or 0, HOPPER)
    sms = min(device.core_count for device in devices)
    smem = min(getattr(d, "shared_memory_per_block_optin", like.smem) for d in devices)
    try:
        each = [active_clusters(device.local_hardware_id, smem) for device in devices]
    except (OSError, RuntimeError):
        # The CUDA driver cannot report the GPU's clusters: scale the table's numbers.
        each = [dict(_of_size(sms, like).clusters)]
    common = [size for size in CLUSTER_SIZES if all(size in clusters for clusters in each)]
    return Gpu(sms, smem, {size: min(clusters[size] for clusters in each) for size in common})


def active_clusters(ordinal: int, smem: int) -> dict[int, int]:
    """Return `Gpu.clusters` as the driver reports it for a CUDA device and blocks of `smem` bytes.

    Raises:
      OSError: there is no CUDA driver.
      RuntimeError: a call of the driver failed.
    """
    driver = _Driver()
    context, module, kernel = (ctypes.c_void_p() for _ in range(3))
    count = ctypes.c_int()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal)
    driver.cuCtxPushCurrent_v2(context)
    try:
        driver.cuModuleLoadData(ctypes.byref(module), _EMPTY_KERNEL)
        driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"empty")
        driver.cuFuncSetAttribute(kernel, _MAX_DYNAMIC_SHARED_SIZE_BYTES, smem)
        driver.cuFuncSetAttribute(kernel, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        found = {}
        for size in CLUSTER_SIZES:
            launch, _attribute = _launch(size, smem)
            driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), kernel, launch)
            found[size] = count.value
        driver.cuModuleUnload(module)
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(ordinal)
    return {size: n for size, n in found.items() if n}


# From cuda.h of the CUDA driver API: CUfunction_attribute and CUlaunchAttributeID.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_CLUSTER_DIMENSION = 4

_EMPTY_KERNEL = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry empty() { ret; }
"""


class _Driver:
    """The CUDA driver that JAX has loaded. Each call raises RuntimeError if it fails."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            function = getattr(self._library, name, None)
            if function is None:
                raise RuntimeError(f"the CUDA driver is too old: it has no {name}")
            if status := function(*args):
                raise RuntimeError(f"{name}: CUDA error {status}")

        return call


def _launch(cluster: int, shared_bytes: int) -> tuple[Any, Any]:
    """Return a CUlaunchConfig for clusters of this size, and the attribute that it points to.

    The attribute is a CUlaunchAttribute: its id, and the first 3 words of a union. The caller must
    keep a reference to it.
    """
    attribute = ctypes.create_string_buffer(
        struct.pack("i4x3I52x", _CLUSTER_DIMENSION, cluster, 1, 1)
    )
    grid, block = (cluster, 1, 1), (256, 1, 1)
    sizes = (*grid, *block, shared_bytes)
    packed = struct.pack("7I4x2QI4x", *sizes, 0, ctypes.addressof(attribute), 1)
    return ctypes.create_string_buffer(packed), attribute
