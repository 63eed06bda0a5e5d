"""What a schedule depends on: the GPU at hand, or an H100 or H200 where there is none."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxnorm_kernels.devices import local_capability
from jaxnorm_kernels.mosaic.device.launch import is_interpreted

#: Blocks of a cluster. 16 is more than every GPU with clusters promises, and what Hopper and B200
#: have.
CLUSTER_SIZES = (2, 4, 8, 16)
PORTABLE_CLUSTER = 8

#: Choices of a schedule that are kept.
SCHEDULES_KEPT = 1024

# Of all GPUs with clusters.
REGISTERS = 65536  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread
# Of Hopper, and of B200.
SHARED_BYTES = 228 * 1024  # of a multiprocessor
RESERVED_BYTES = 1024  # of shared memory, in each block
MOST_SHARED_BYTES = SHARED_BYTES - RESERVED_BYTES  # of a block


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What schedules go by.

    Attributes:
      sms: multiprocessors.
      smem: bytes of shared memory that a block may have.
      clusters: for each size of a cluster, how many with a block on a multiprocessor run at a time.
        A cluster stays within a group of multiprocessors (GPC), and chips of one kind differ in how
        many of each group work. One cluster too many is a second round for all.
    """

    sms: int
    smem: int
    clusters: Mapping[int, int] = dataclasses.field(hash=False)

    @property
    def shared_bytes(self) -> int:
        """Of a multiprocessor: what one block may have, and what is reserved in it."""
        return self.smem + RESERVED_BYTES

    @property
    def portable_cluster(self) -> int:
        """The largest cluster that every GPU with clusters runs."""
        return max([size for size in self.clusters if size <= PORTABLE_CLUSTER], default=1)

    def at_a_time(self, cluster: int) -> int:
        """Clusters of so many blocks, or single blocks, that run with an SM for each block."""
        return self.clusters[cluster] if cluster > 1 else self.sms


#: Clusters as one H200 has them; another chip may have room for one less of a size, or more.
HOPPER = Gpu(sms=132, smem=MOST_SHARED_BYTES, clusters={2: 66, 4: 30, 8: 15, 16: 7})
INTERPRETER = dataclasses.replace(HOPPER, clusters={})


def _of_size(sms: int, like: Gpu) -> Gpu:
    """`like`, with so many multiprocessors, and clusters in proportion."""
    clusters = {size: max(1, sms * n // like.sms) for size, n in like.clusters.items()}
    return dataclasses.replace(like, sms=sms, clusters=clusters)


#: Not measured: clusters are in proportion to an H200's.
B200 = _of_size(148, HOPPER)
#: The same, with no clusters but those that every GPU with clusters has.
RTX_5090 = dataclasses.replace(
    _of_size(170, dataclasses.replace(HOPPER, clusters={2: 66, 4: 30, 8: 15})), smem=99 * 1024
)

#: By compute capability, times ten.
GPUS = {90: HOPPER, 100: B200, 120: RTX_5090}


def kept[T](choose: Callable[[Any, Gpu], T]) -> Callable[..., T]:
    """What chooses a schedule, by a call and a GPU, by default the one at hand; once for each.

    A call is first asked whether it can run, and then run.
    """
    once = functools.lru_cache(maxsize=SCHEDULES_KEPT)(choose)

    @functools.wraps(choose)
    def choice(spec: Any, gpu: Gpu | None = None) -> T:
        return once(spec, gpu or local_gpu())

    return choice


def local_gpu() -> Gpu:
    """What all GPUs of this process have, since a program may run on any; `HOPPER` for none."""
    return INTERPRETER if is_interpreted() else _local_gpu()


@functools.cache
def _local_gpu() -> Gpu:
    devices = jax.local_devices()
    if devices[0].platform != "gpu" or not hasattr(devices[0], "core_count"):
        return HOPPER
    like = GPUS.get(local_capability() or 0, HOPPER)
    sms = min(device.core_count for device in devices)
    smem = min(getattr(d, "shared_memory_per_block_optin", like.smem) for d in devices)
    return dataclasses.replace(_of_size(sms, like), smem=smem)
