"""Which calls run as strips, without a transpose, and how the strips are cut: tables with reasons.

See `rows.strips` for what a strip is. The numbers are those of Hopper (H100, H200).
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
from jaxnorm_kernels.mosaic.rows.strips import Strips
from jaxnorm_kernels.mosaic.schedules.norm_backward import row_dtypes
from jaxnorm_kernels.refusals import NO_KERNEL, Table, first
from jaxnorm_kernels.specs import Direction, Spec

_KIB = 1024


@dataclasses.dataclass(frozen=True)
class StripRule:
    """A line of the table: for blocks that hold up to `kib` KiB of all arrays that are read.

    Attributes:
      width: inner elements of a strip.
      kib: None for as much as a direction is to hold.
      direction: only for this pass.
      itemsize: only for arrays of so many bytes an element.
    """

    width: int
    kib: int | None = None
    cluster: int = 1
    direction: Direction | None = None
    itemsize: int | None = None


#: KiB of all arrays that are read. Blocks of a multiprocessor load, reduce and store in turn, so
#: several small ones; but each block merges the statistics of all parts. us on an H100, with this
#: much and another: GroupNorm with silu of 32x64x64x256 bfloat16, forward 52, 55 with 96 KiB;
#: backward 80, 107 with 132.
_BLOCK_KIB: dict[Direction, int] = {"fwd": 48, "bwd": 96}

# A strip of 32 elements is 128 bytes of 32 bits, a whole line of the cache, or 64 bytes of 16 bits.
# Wider ones have more statistics to exchange, which takes longer than whole lines gain, but for
# blocks that have little else to do.
TABLE = (
    StripRule(width=128, kib=16, itemsize=2),
    StripRule(width=64, kib=16),
    StripRule(width=64, kib=68, direction="bwd", itemsize=2),
    # Many columns: several blocks share a strip. Sectors are still read whole.
    *[StripRule(width, cluster=cluster) for width in (32, 16) for cluster in (1, 2, 4, 8, 16)],
    StripRule(width=16, kib=96, cluster=16),
    *[StripRule(width=8, cluster=cluster) for cluster in (1, 2, 4, 8, 16)],
    StripRule(width=16, kib=192, cluster=8),
    StripRule(width=8, kib=192, cluster=8),
    # Groups that are no power of 2, of which a vector and another one are the least that fits.
    *[StripRule(width, cluster=cluster) for width in (64, 128) for cluster in (1, 2, 4, 8, 16)],
)

# Of one array, for each warpgroup of a block.
_WARPGROUP_KIB = 64
# Of a block, with vectors of so many elements: each part has a statistic for every inner element.
_MOST_WARPGROUPS = {4: 4, 8: 2}

# Of shared memory: barriers, what Mosaic needs, and what each block has reserved.
_OTHER_SHARED_BYTES = 1024 + RESERVED_BYTES

#: What no kernel of strips can do; the call is then one of rows, with a transpose.
_CANNOT: Table = (
    *NO_KERNEL,
    (
        "its kernels over an axis that is not the last are those of norms without a residual",
        lambda s: s.op != "norm",
    ),
    (
        "its kernels over an axis that is not the last take parameters of what lies behind that "
        "axis, such as GroupNorm's, and no others",
        lambda s: (
            not s.norm.inner_params
            and (s.norm.scale_dtype is not None or s.norm.bias_dtype is not None)
        ),
    ),
    (
        f"its kernels need {COPY_BYTES} bytes, or a multiple, behind an axis that is not the last",
        lambda s: any(s.inner * dtype.itemsize % COPY_BYTES for dtype in _held(s)),
    ),
    (
        "its kernels hold no columns as many, or as few, as these, or no neighbours as many",
        lambda s: strips_of(s) is None,
    ),
)


def refusal(spec: Spec) -> str | None:
    """Why no kernel of strips takes this call, whose ``spec.inner`` is above 1; None for none."""
    return first(_CANNOT, spec)


def strips_of(spec: Spec, gpu: Gpu | None = None) -> Strips | None:
    """Those of the first line of the table that fits; None for no line."""
    gpu = gpu or local_gpu()
    return next((found for line in TABLE if (found := of_line(line, spec, gpu))), None)


def of_line(line: StripRule, spec: Spec, gpu: Gpu) -> Strips | None:
    """What a line says for `spec`; None where it does not fit."""
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
    unit = WARPS * WARP // threads  # columns
    busy = array_bytes // (_WARPGROUP_KIB * _KIB)
    most = min(_MOST_WARPGROUPS[vector], cols // (line.cluster * unit))
    strips = Strips(
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


def _shared_bytes(strips: Strips, spec: Spec) -> int:
    """Of a block, at most."""
    columns = strips.warpgroups * strips.partition().width
    column_bytes = strips.width * sum(dtype.itemsize for dtype in _held(spec))
    exchanged = WARPS * strips.warpgroups + strips.cluster * (strips.cluster > 1)
    exchanged += 0 if strips.holds_groups else WARPS * strips.warpgroups
    return columns * (column_bytes + 8) + 4 * exchanged * strips.width * 4 + _OTHER_SHARED_BYTES


def _held(spec: Spec) -> list[np.dtype]:
    """dtypes of the arrays that are read."""
    return [spec.x_dtype] if spec.direction == "fwd" else row_dtypes(spec)
