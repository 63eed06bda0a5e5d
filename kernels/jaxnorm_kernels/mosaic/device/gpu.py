"""Properties of the local GPU that the choice of a schedule depends on."""

import ctypes
import dataclasses
import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxnorm_kernels.launching import local_capability
from jaxnorm_kernels.mosaic.device.launch import is_interpreted

#: Possible sizes of a thread block cluster, in blocks. Every GPU with clusters supports sizes up to
#: 8. Hopper and B200 also support 16.
CLUSTER_SIZES = (2, 4, 8, 16)
PORTABLE_CLUSTER = 8

#: Maximum number of schedules in a cache. `cached` creates one cache for each function that it
#: decorates.
CACHED_SCHEDULES = 1024

# Limits of all GPUs that have clusters: the number of registers of a multiprocessor, and the
# maximum number of registers of a thread.
REGISTERS = 65536
MOST_REGISTERS = 255
# Limits of Hopper and B200, in bytes: shared memory of a multiprocessor, the part of it that the
# system reserves for each block, and the maximum shared memory of a block.
SHARED_BYTES = 228 * 1024
RESERVED_BYTES = 1024
MOST_SHARED_BYTES = SHARED_BYTES - RESERVED_BYTES


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that the choice of a schedule depends on.

    Attributes:
      sms: number of streaming multiprocessors (SMs).
      smem: maximum shared memory of one block, in bytes.
      clusters: maps each cluster size (in blocks) to the maximum number of clusters that run at the
        same time if each SM runs one block. The numbers must be measured: the SMs of a cluster
        belong to one GPC (a group of SMs), and chips of the same model have different numbers of
        working SMs per GPC. If a launch has one cluster more than this maximum, that cluster starts
        only when another has finished.
    """

    sms: int
    smem: int
    clusters: Mapping[int, int] = dataclasses.field(hash=False)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a multiprocessor in bytes, including the system's reserved part."""
        return self.smem + RESERVED_BYTES

    @property
    def portable_cluster(self) -> int:
        """Maximum number of blocks in a cluster on this GPU, but at most 8.

        Every GPU with clusters supports sizes up to 8.
        """
        return max([size for size in self.clusters if size <= PORTABLE_CLUSTER], default=1)

    def at_a_time(self, cluster: int) -> int:
        """Return the maximum number of clusters that run at once, if each SM runs one block.

        `cluster` is the number of blocks in a cluster; 1 means blocks without clusters.
        """
        return self.clusters[cluster] if cluster > 1 else self.sms


#: The numbers of clusters were measured on one H200. On another H100 or H200, each of these numbers
#: may be larger or smaller by one.
HOPPER = Gpu(sms=132, smem=MOST_SHARED_BYTES, clusters={2: 66, 4: 30, 8: 15, 16: 7})
INTERPRETER = dataclasses.replace(HOPPER, clusters={})


def _of_size(sms: int, like: Gpu) -> Gpu:
    """Return a copy of `like` with `sms` multiprocessors and proportionally scaled `clusters`."""
    clusters = {size: max(1, sms * n // like.sms) for size, n in like.clusters.items()}
    return dataclasses.replace(like, sms=sms, clusters=clusters)


#: The numbers of clusters were not measured on a B200, but scaled from an H200's numbers. They are
#: used only if the CUDA driver cannot report the true numbers.
B200 = _of_size(148, HOPPER)
#: The numbers of clusters were not measured on an RTX 5090, but scaled from an H200's numbers.
#: Clusters of 16 blocks are left out, because only Hopper and B200 are known to support them.
RTX_5090 = dataclasses.replace(
    _of_size(170, dataclasses.replace(HOPPER, clusters={2: 66, 4: 30, 8: 15})), smem=99 * 1024
)

#: Maps a compute capability to default properties. The capability is an integer: 90 is 9.0.
GPUS = {90: HOPPER, 100: B200, 120: RTX_5090}


def cached[T](choose: Callable[[Any, Gpu], T]) -> Callable[..., T]:
    """Decorate a function that chooses a schedule: cache its results, and make the GPU optional.

    `choose` maps the spec of a call and a GPU to a schedule. By default, the GPU is the local GPU.
    The cache saves time because each schedule is needed at least twice: to check that the call is
    supported, and to run it.
    """
    once = functools.lru_cache(maxsize=CACHED_SCHEDULES)(choose)

    @functools.wraps(choose)
    def choice(spec: Any, gpu: Gpu | None = None) -> T:
        return once(spec, gpu or local_gpu())

    return choice


def local_gpu() -> Gpu:
    """Return the properties of the local GPU, or `HOPPER` if there is none.

    If there are several local GPUs, each property is the minimum over them, because a program may
    run on any of them. The interpreter is treated as a GPU without clusters.
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
        # The driver cannot report the numbers of clusters, so scale the numbers of a known GPU.
        each = [dict(_of_size(sms, like).clusters)]
    common = [size for size in CLUSTER_SIZES if all(size in clusters for clusters in each)]
    return Gpu(sms, smem, {size: min(clusters[size] for clusters in each) for size in common})


def active_clusters(ordinal: int, smem: int) -> dict[int, int]:
    """Return the value of `Gpu.clusters` for a device, as the CUDA driver reports it.

    `ordinal` is the index of the CUDA device, and `smem` the shared memory of a block in bytes.

    Raises:
      OSError: the CUDA driver is not installed.
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


# Values of the enums CUfunction_attribute and CUlaunchAttributeID, from the driver's header cuda.h.
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
    """The CUDA driver. Each of its functions can be called as a method.

    A method raises RuntimeError if the driver's function is missing or returns an error.
    """

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
    """Return a CUlaunchConfig for a cluster of `cluster` blocks, and its CUlaunchAttribute.

    Both are packed C structs. The config contains a pointer to the attribute, so the caller must
    keep a reference to the attribute while it uses the config.
    """
    attribute = ctypes.create_string_buffer(
        struct.pack("i4x3I52x", _CLUSTER_DIMENSION, cluster, 1, 1)
    )
    grid, block = (cluster, 1, 1), (256, 1, 1)
    sizes = (*grid, *block, shared_bytes)
    packed = struct.pack("7I4x2QI4x", *sizes, 0, ctypes.addressof(attribute), 1)
    return ctypes.create_string_buffer(packed), attribute
