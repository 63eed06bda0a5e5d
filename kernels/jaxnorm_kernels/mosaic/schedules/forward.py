"""How a forward pass runs: one table; the first line that fits is taken. The reasons are hardware.

The sizes that matter, and how the lines below use them:

* An SM gives 64 registers to each of 1024 threads, 128 to each of 512. A value of a row costs one
  register, so 32 values for each thread let 8 warpgroups share an SM. A residual that waits to be
  added costs another: rows count as twice as long (`registers`).
* About 64 KiB of reads under way in each SM keep the memory of an H100 or H200 busy. Rows in
  registers have as many because an SM runs several blocks: some load while others reduce or store.
  A row of 32 KiB and more leaves room for one or two, so it is spread over the blocks of a cluster.
* As many blocks as rows reach 0.97 of a copy's bandwidth where a block for each SM, or a few, that
  share the rows evenly reach 0.91: SMs differ, it seems, and all wait for the slowest. So a block
  takes a few rows at most, and only where it then reads its parameters once for all of them; the
  last rows are taken one by one.
* The bytes of a row are those of x and of its residual: both are under way at the same time.
* Groups of rows have parameters of their own, so that a block keeps them for rows of its group.
"""

import dataclasses
from collections.abc import Sequence

from jaxnorm_kernels.mosaic.device.gpu import Gpu, kept
from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.rows.logits import has_places
from jaxnorm_kernels.mosaic.rows.pieces import widest_vector, window_of
from jaxnorm_kernels.mosaic.schedules.columns import is_unaligned
from jaxnorm_kernels.mosaic.schedules.forward_lines import Line, Schedule, of_line
from jaxnorm_kernels.specs import Spec

TABLE = (
    # As many parameters as data, or more, would come from the L1 or L2 cache for each row, and do
    # not leave enough of their bandwidth. In registers they serve rows that a queue brings: 48
    # columns of a thread with two parameters, 36 with three: 144 registers, beside others.
    Line("queued_tile", cols=1536, params=1, most_params=2),
    Line("queued_tile", cols=1152, params=1),
    # A warp reads a row of 2 KiB with 4 loads or fewer, and needs no barrier.
    Line("row_tile", row_bytes=2048),
    # Few rows: an SM has one of them at most, so that latency decides. Many threads for each row,
    # in as many SMs as there are for it.
    Line("split_row", cols=2**18, waves=1, values=16, cluster=8, warpgroups=4),
    # As many parameters as data: in registers, too. So far an SM has room for several blocks.
    Line("queued_row", cols=2**15, params=1, cluster=8),
    # Longer rows leave an SM room for a block or two, and a thread has more of a row.
    Line("queued_row", cols=2**17, params=1, most_params=2, values=64, cluster=8, warpgroups=2),
    Line("queued_row", cols=2**16, params=1, values=36, cluster=8, warpgroups=2),
    # 64 values a thread still let an SM have 4 rows under way; a row needs 2 or 3 barriers.
    Line("warpgroup_row", cols=8192),
    # log_softmax needs x again after its exponentials, which take as many registers: x stays in
    # shared memory. The fewer blocks share a row, the less a block waits for the others.
    Line("queued_row", row_bytes=2**18, op="log_softmax", values=64, cluster=8, least=2),
    # The same of each part of a row. Small blocks load while others reduce.
    Line("split_row", row_bytes=2**18, values=64, cluster=8, warpgroups=2),
    # Rows of half a MiB and more fill the registers of several SMs. Few large blocks share one,
    # because the blocks of a cluster have to start at the same time.
    Line("split_row", cols=2**18, values=32, cluster=8, warpgroups=8),
)


#: For softmaxes with a mask or a bias, or causal ones: a queue brings x alone. The smaller a unit,
#: the more of a row lies in units above the diagonal.
PLACED = (
    Line("row_tile", row_bytes=2048),
    Line("row_tile", cols=2048, causal=True),
    *(line for line in TABLE if line.kind in ("split_row", "warpgroup_row") and line.waves is None),
)


#: For unaligned rows of softmaxes, in `Window`s. Short rows would be masked in each unit.
UNALIGNED = (
    *(line for line in TABLE if line.waves is not None),
    Line("warpgroup_row", cols=8192),
    # In registers, the parts of a row would wait for each other's windows: softmax of 16 bits over
    # 50257 columns reached 0.56 of a copy (H100).
    Line("queued_row", row_bytes=2**18, values=64, cluster=8, least=2),
    Line("split_row", cols=2**18, values=32, cluster=8, warpgroups=8),
)


# Unaligned rows of no more columns are read element by element.
_LEAST_WINDOW_COLS = 1024


@kept
def choose(spec: Spec, gpu: Gpu) -> Schedule | None:
    """The schedule for `spec`: that of the first line of the table that fits; None for no line."""
    return _in_windows(spec, gpu) or _of_table(PLACED if has_places(spec) else TABLE, spec, gpu)


def _of_table(table: Sequence[Line], spec: Spec, gpu: Gpu) -> Schedule | None:
    line = next((line for line in table if line.fits(spec, gpu)), None)
    return None if line is None else of_line(line, spec, gpu)


def _in_windows(spec: Spec, gpu: Gpu) -> Schedule | None:
    """That of rows as long as the windows; None where rows are aligned, or are not held in them."""
    dtypes = [*spec.operand_dtypes, spec.y_dtype]
    window = window_of(spec.rows, spec.cols, dtypes)
    if window is None or not is_unaligned(spec) or has_places(spec):
        return None
    if spec.cols <= _LEAST_WINDOW_COLS:
        return None
    of_windows = dataclasses.replace(spec, cols=window.width)
    schedule = _of_table(UNALIGNED, of_windows, gpu)
    if schedule is None:
        return None
    threads = schedule.cluster * schedule.warpgroups * WARPGROUP_THREADS
    vector = widest_vector(window.width, VECTOR_BYTES // max(d.itemsize for d in dtypes), threads)
    return dataclasses.replace(schedule, vector=vector, window=window)
