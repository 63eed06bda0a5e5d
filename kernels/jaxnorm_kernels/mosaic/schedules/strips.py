"""Schedules of norms over an axis other than the last: a table of strip sizes.

The kernels split an array into strips (see `rows.strips`), and need no transpose of the array. The
numbers are for Hopper (H100, H200).
"""

import dataclasses
import math

import numpy as np

from jaxnorm_kernels.mosaic.device.gpu import (
    RESERVED_BYTES,
    Gpu,
    local_gpu,
)
from jaxnorm_kernels.mosaic.device.layouts import (
    COPY_BYTES,
    VECTOR_BYTES,
    WARP,
    WARPS,
    power_of_2,
)
from jaxnorm_kernels.mosaic.rows.strips import StripSchedule
from jaxnorm_kernels.mosaic.schedules.norm_backward import row_dtypes
from jaxnorm_kernels.refusals import NO_KERNEL, Table, first
from jaxnorm_kernels.specs import Direction, Spec

_KIB = 1024


@dataclasses.dataclass(frozen=True)
class StripRule:
    """A rule of the table of strip sizes.

    The rule applies if a block loads at most `kib` KiB, from all arrays together.

    Attributes:
      width: number of inner elements of a strip (elements along the last axis).
      kib: the limit in KiB; None stands for the pass's default, `_BLOCK_KIB`.
      cluster: number of blocks that share a strip.
      direction: if given, the rule applies to this pass only.
      itemsize: if given, the rule applies only to arrays with this many bytes per element.
    """

    width: int
    kib: int | None = None
    cluster: int = 1
    direction: Direction | None = None
    itemsize: int | None = None


#: The limit of all rules whose `kib` is None: the maximum number of KiB that a block loads from all
#: arrays together. With a low limit, an SM runs several blocks, which load, reduce and store at
#: different times; but more blocks share a strip and must merge their statistics. Times of
#: GroupNorm followed by silu, over 32x64x64x256 bfloat16 elements, on an H100: the forward pass
#: takes 52 us with 48 KiB, and 55 us with 96 KiB. The backward pass takes 80 us with 96 KiB, and
#: 107 us with 132 KiB.
_BLOCK_KIB: dict[Direction, int] = {"fwd": 48, "bwd": 96}

# Most strips are 32 elements wide. A cache line has 128 bytes: 32 elements of 32 bits, or 64
# elements of 16 bits. So with 16-bit elements, only strips of 64 elements would load entire cache
# lines. But wider strips have more statistics to exchange. This usually takes more time than is
# saved by loading entire cache lines. Only blocks that load few bytes become faster with wider
# strips, so wider strips are used only for such blocks.
TABLE = (
    StripRule(width=128, kib=16, itemsize=2),
    StripRule(width=64, kib=16),
    StripRule(width=64, kib=68, direction="bwd", itemsize=2),
    # If a strip has too many columns for one block, several blocks (a cluster) share the strip.
    # Narrower strips would be another way to reduce the bytes per block. But a strip must be at
    # least as wide as a memory sector (32 bytes).
    *[StripRule(width, cluster=cluster) for width in (32, 16) for cluster in (1, 2, 4, 8, 16)],
    StripRule(width=16, kib=96, cluster=16),
    *[StripRule(width=8, cluster=cluster) for cluster in (1, 2, 4, 8, 16)],
    StripRule(width=16, kib=192, cluster=8),
    StripRule(width=8, kib=192, cluster=8),
    # Wider strips, which are used if no rule above applies. A strip must be at least as wide as the
    # least common multiple of the group size and the number of elements in a thread's vector. This
    # multiple may be above 32, especially if the group size is not a power of 2.
    *[StripRule(width, cluster=cluster) for width in (64, 128) for cluster in (1, 2, 4, 8, 16)],
)

# A block has one warpgroup for each `_WARPGROUP_KIB` KiB that it loads from one array. The number
# of warpgroups is rounded down to a power of 2, and is at least 1.
_WARPGROUP_KIB = 64
# Maps the number of elements in a thread's vector to the maximum number of warpgroups per block.
# The number is limited because every warp takes shared memory for statistics of each inner element.
_MOST_WARPGROUPS = {4: 4, 8: 2}

# Shared memory of a block besides its arrays: 1 KiB for barriers and Mosaic itself, plus the part
# that the system reserves.
_OTHER_SHARED_BYTES = 1024 + RESERVED_BYTES

#: Reasons why the strip kernels cannot run a call. The operands of such a call are transposed
#: instead, so that the normalised axis is the last one.
_CANNOT: Table = (
    *NO_KERNEL,
    (
        "only norms without a residual have kernels over an axis that is not the last",
        lambda s: s.op != "norm",
    ),
    (
        "its kernels over an axis that is not the last support only parameters that vary along the "
        "axes behind it, such as GroupNorm's",
        lambda s: (
            not s.norm.inner_params
            and (s.norm.scale_dtype is not None or s.norm.bias_dtype is not None)
        ),
    ),
    (
        f"the axes behind a normalised axis that is not the last need {COPY_BYTES} bytes, or a "
        "multiple",
        lambda s: any(s.inner * dtype.itemsize % COPY_BYTES for dtype in _held(s)),
    ),
    (
        "the number of columns, or of adjacent channels of a group, is too large or too small",
        lambda s: strips_of(s) is None,
    ),
)


def refusal(spec: Spec) -> str | None:
    """Return the reason why the strip kernels cannot run this call, or None if they can."""
    return first(_CANNOT, spec)


def strips_of(spec: Spec, gpu: Gpu | None = None) -> StripSchedule | None:
    """Return the strips that the first applicable rule defines, or None if no rule applies."""
    gpu = gpu or local_gpu()
    return next((found for line in TABLE if (found := schedule_of(line, spec, gpu))), None)


def schedule_of(line: StripRule, spec: Spec, gpu: Gpu) -> StripSchedule | None:
    """Return the strips that one rule defines for a call, or None if the rule does not apply."""
    dtypes = [*_held(spec), spec.x_dtype, spec.y_dtype]
    itemsize = max(dtype.itemsize for dtype in dtypes)
    vector = VECTOR_BYTES // itemsize
    threads = line.width // vector
    outer, cols, inner = spec.strided
    array_bytes = -(-cols // line.cluster) * line.width * itemsize
    block_bytes = array_bytes * sum(d.itemsize for d in _held(spec)) // itemsize
    fits = (
        2 <= threads <= WARP // 2
        and line.width <= inner
        and line.width >= math.lcm(spec.inner_cols, vector)
        and (WARPS * WARP // threads) * line.cluster <= cols
        and block_bytes <= (line.kib or _BLOCK_KIB[spec.direction]) * _KIB
        and line.direction in (None, spec.direction)
        and line.itemsize in (None, itemsize)
        and (line.cluster == 1 or line.cluster in gpu.clusters)
    )
    if not fits:
        return None
    unit = WARPS * WARP // threads  # number of columns that a warpgroup processes at once
    busy = array_bytes // (_WARPGROUP_KIB * _KIB)
    most = min(_MOST_WARPGROUPS[vector], cols // (line.cluster * unit))
    strips = StripSchedule(
        outer,
        cols,
        inner,
        vector,
        threads,
        warpgroups=power_of_2(max(1, min(most, busy))),
        cluster=line.cluster,
        group=spec.inner_cols,
    )
    return None if _shared_bytes(strips, spec) - RESERVED_BYTES > gpu.smem else strips


def _shared_bytes(strips: StripSchedule, spec: Spec) -> int:
    """Return an upper bound of the shared memory that a block needs, in bytes."""
    columns = strips.warpgroups * strips.partition().width
    column_bytes = strips.width * sum(dtype.itemsize for dtype in _held(spec))
    exchanged = WARPS * strips.warpgroups + strips.cluster * (strips.cluster > 1)
    exchanged += WARPS * strips.warpgroups * (strips.group > 1)
    return columns * (column_bytes + 8) + 4 * exchanged * strips.width * 4 + _OTHER_SHARED_BYTES


def _held(spec: Spec) -> list[np.dtype]:
    """Return the dtypes of the arrays that the kernel loads."""
    return [spec.x_dtype] if spec.direction == "fwd" else row_dtypes(spec)
