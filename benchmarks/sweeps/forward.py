"""Forward schedules that queue rows: norms with their parameters in registers, and log_softmax.

Of norms, grids that take all rows in a single round of blocks.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.mosaic.device.gpu import local_gpu
from jaxnorm_kernels.mosaic.forward.schedule import Schedule, choose

_SHAPES = [(32768, 1024), (32768, 2048), (32768, 4096), (8192, 5120), (2048, 8192), (16384, 8192)]
_SHAPES += [(8192, 12288), (8192, 16384), (4096, 32768), (4096, 65536), (1024, 131072)]
_CALLS = [("layer_norm", "bfloat16"), ("rms_norm", "bfloat16"), ("layer_norm", "float32")]
_CALLS += [("log_softmax", "bfloat16"), ("log_softmax", "float32")]
_ROUNDS = (1, 2, 3)  # blocks on a multiprocessor, each of which takes its share of all rows
_VALUES = (16, 64)  # columns of a thread
_QUEUED_BYTES = 72 * 1024  # of a block, at most


def workloads() -> Iterator[KernelWorkload]:
    for (op, dtype), shape in itertools.product(_CALLS, _SHAPES):
        yield KernelWorkload(op, "fwd", *shape, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Schedule]:
    """The table's first; then others of its kind."""
    chosen = choose(workload.spec)
    tried = [chosen]
    if chosen.kind == "queued_tile":
        for rows, rounds in itertools.product((4, 8), _ROUNDS):
            turns = -(-workload.rows // (rows * rounds * local_gpu().sms))
            tried.append(dataclasses.replace(chosen, rows=rows, turns=turns, slots=2))
    if chosen.kind == "queued_row":
        tried += _queues(workload, chosen)
    return list(dict.fromkeys(tried))


def _queues(workload: KernelWorkload, chosen: Schedule) -> Iterator[Schedule]:
    gpu = local_gpu()
    row_bytes = workload.cols * workload.spec.x_dtype.itemsize
    for cluster, warpgroups in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        values = workload.cols // (128 * cluster * warpgroups)
        if not _VALUES[0] <= values <= _VALUES[1]:
            continue
        spread = dataclasses.replace(chosen, cluster=cluster, warpgroups=warpgroups)
        if not workload.is_norm:
            yield spread
            continue
        for rereads, rounds, slots in itertools.product((False, True), _ROUNDS, (2, 3)):
            at_a_time = rounds * (gpu.clusters[cluster] if cluster > 1 else gpu.sms)
            turns = -(-workload.rows // at_a_time)
            if slots * row_bytes // cluster <= _QUEUED_BYTES:
                yield dataclasses.replace(spread, rereads=rereads, turns=turns, slots=slots)
