"""Which calls run as strips, without a transpose, and how the strips are cut: tables with reasons.

See `rows.strips` for what a strip is. The numbers are those of Hopper (H100, H200).
"""

import dataclasses
import math

import numpy as np

from jaxnorm_kernels.mosaic.backward.schedule import COPY_BYTES, row_dtypes
from jaxnorm_kernels.mosaic.device.gpu import (
    REGISTERS,
    RESERVED_BYTES,
    SHARED_BYTES,
    Gpu,
    local_gpu,
)
from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, WARP, WARPGROUP_THREADS, WARPS
from jaxnorm_kernels.mosaic.rows.strips import Strips
from jaxnorm_kernels.refusals import NO_KERNEL, Table, first
from jaxnorm_kernels.specs import Spec

_KIB = 1024


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table: for blocks that hold up to `kib` KiB of all arrays that are read."""

    threads: int
    kib: int
    cluster: int = 1


# A vector has 16 bytes of the widest array: 8 threads read 128 of them, a whole line of the cache.
TABLE = (
    # Few columns: wider strips, so that a block has something to do.
    Line(threads=16, kib=32),
    # Three blocks of a multiprocessor load, reduce and store in turn.
    Line(threads=8, kib=68),
    # Sectors are still read whole; two blocks.
    Line(threads=4, kib=96),
    # Many columns: several blocks share a strip.
    Line(threads=8, kib=68, cluster=2),
    Line(threads=8, kib=68, cluster=4),
    Line(threads=8, kib=68, cluster=8),
    Line(threads=4, kib=68, cluster=8),
    Line(threads=8, kib=96, cluster=8),
    Line(threads=4, kib=96, cluster=8),
    Line(threads=4, kib=192, cluster=8),
    # Of an inner axis that is no longer, or of more columns still.
    Line(threads=2, kib=96),
    Line(threads=2, kib=192, cluster=8),
)

# Of a block that has two warpgroups. Three blocks of one each hide each other's loads and stores; a
# thread of theirs may have 168 registers, and there are few parts of a strip to exchange.
_TWO_WARPGROUPS_KIB, _MOST_WARPGROUPS = 96, 4

#: Registers of a thread, at most, where a grid is as large as all its blocks run at a time.
MOST_REGISTERS = 128

# Of shared memory: barriers, what Mosaic needs, and what each block has reserved.
_OTHER_SHARED_BYTES = 1024 + RESERVED_BYTES

#: What no kernel of strips can do; the call is then one of rows, with a transpose.
_CANNOT: Table = (
    *NO_KERNEL,
    (
        "its kernels over an axis that is not the last take no mask, scale or bias of a softmax",
        lambda s: s.has_mask or s.causal or s.logits_scale != 1 or s.logits_bias_dtype is not None,
    ),
    (
        "its kernels over an axis that is not the last take no residual",
        lambda s: s.op not in ("softmax", "log_softmax", "norm"),
    ),
    (
        "its kernels over an axis that is not the last take no parameters of groups of rows",
        lambda s: s.groups > 1,
    ),
    (
        f"its kernels need {COPY_BYTES} bytes, or a multiple, behind an axis that is not the last",
        lambda s: any(s.inner * dtype.itemsize % COPY_BYTES for dtype in _held(s)),
    ),
    ("its kernels hold no columns as many, or as few, as these", lambda s: strips_of(s) is None),
)


def refusal(spec: Spec) -> str | None:
    """Why no kernel of strips takes this call, whose ``spec.inner`` is above 1; None for none."""
    return first(_CANNOT, spec)


def strips_of(spec: Spec, gpu: Gpu | None = None) -> Strips | None:
    """Those of the first line of the table that fits; None for no line."""
    gpu = gpu or local_gpu()
    return next((found for line in TABLE if (found := of_line(line, spec, gpu))), None)


def of_line(line: Line, spec: Spec, gpu: Gpu) -> Strips | None:
    """What a line says for `spec`; None where it does not fit."""
    dtypes = [*_held(spec), spec.x_dtype, spec.y_dtype]
    vector = VECTOR_BYTES // max(dtype.itemsize for dtype in dtypes)
    width, chunk = line.threads * vector, WARPS * WARP // line.threads
    block_bytes = -(-spec.cols // line.cluster) * width * sum(d.itemsize for d in _held(spec))
    fits = width <= spec.inner and chunk * line.cluster <= spec.cols
    has_cluster = line.cluster == 1 or line.cluster in gpu.clusters
    if not fits or not has_cluster or block_bytes > line.kib * _KIB:
        return None
    most = min(_MOST_WARPGROUPS, spec.cols // (line.cluster * chunk))
    busy = 2 * block_bytes // (_TWO_WARPGROUPS_KIB * _KIB)
    warpgroups = _power_of_2(max(1, min(most, busy)))
    outer = spec.rows // spec.inner
    count = outer * -(-spec.inner // width)
    strips = Strips(
        outer,
        spec.cols,
        spec.inner,
        vector,
        line.threads,
        warpgroups=warpgroups,
        cluster=line.cluster,
        blocks=count,
    )
    if spec.direction == "fwd" or (spec.scale_dtype is None and spec.bias_dtype is None):
        return strips
    # Gradients of parameters: each block adds up those of many strips, and writes its sums. As many
    # blocks as run at a time, or as few as take as many strips each.
    at_a_time = gpu.at_a_time(line.cluster) * _blocks_per_sm(strips, spec)
    return dataclasses.replace(strips, blocks=math.ceil(count / math.ceil(count / at_a_time)))


def _blocks_per_sm(strips: Strips, spec: Spec) -> int:
    """Of a norm's backward: what registers and shared memory have room for."""
    columns = strips.warpgroups * strips.slice().width
    column_bytes = strips.width * sum(dtype.itemsize for dtype in _held(spec))
    exchanged = WARPS * strips.warpgroups + strips.cluster * (strips.cluster > 1)
    # Two sums are exchanged, in two stages, and two are added up for each column.
    shared = columns * (column_bytes + 8) + 4 * exchanged * strips.width * 4 + _OTHER_SHARED_BYTES
    threads = WARPGROUP_THREADS * strips.warpgroups
    return max(1, min(SHARED_BYTES // shared, REGISTERS // (threads * MOST_REGISTERS)))


def _held(spec: Spec) -> list[np.dtype]:
    """dtypes of the arrays that are read."""
    return [spec.x_dtype] if spec.direction == "fwd" else row_dtypes(spec)


def _power_of_2(n: int) -> int:
    """The largest power of 2 up to `n`, which is at least 1."""
    return 1 << (n.bit_length() - 1)
