"""Forward schedules that queue rows: norms with their parameters in registers, and log_softmax."""

import dataclasses
import itertools
from collections.abc import Iterator

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels.mosaic.forward.schedule import Schedule, choose

_SHAPES = [(32768, 1024), (32768, 2048), (32768, 4096), (8192, 5120), (16384, 8192), (8192, 12288)]
_SHAPES += [(8192, 16384), (4096, 32768), (4096, 65536), (1024, 131072)]
_CALLS = [("layer_norm", "bfloat16"), ("rms_norm", "bfloat16"), ("layer_norm", "float32")]
_CALLS += [("log_softmax", "bfloat16"), ("log_softmax", "float32")]
_TILES = itertools.product((4, 8), (1, 2, 4, 8), (2, 3))  # rows, turns, slots
# Of norms: turns by clusters of up to 2, 4, 8, for a byte of parameters for each of x and y.
_TURNS = {1: (1, 2), 2: (1, 2), 4: (2, 4), 8: (2, 4)}
_VALUES = (16, 64)  # columns of a thread


def workloads() -> Iterator[KernelWorkload]:
    for (op, dtype), shape in itertools.product(_CALLS, _SHAPES):
        yield KernelWorkload(op, "fwd", *shape, dtype, dtype)  # type: ignore[arg-type]


def schedules(workload: KernelWorkload) -> list[Schedule]:
    """The table's first; then others of its kind."""
    chosen = choose(workload.spec)
    tried = [chosen]
    if chosen.kind == "queued_tile":
        for rows, turns, slots in _TILES:
            tried.append(dataclasses.replace(chosen, rows=rows, turns=turns, slots=slots))
    if chosen.kind == "queued_row":
        tried += _queues(workload, chosen)
    return list(dict.fromkeys(tried))


def _queues(workload: KernelWorkload, chosen: Schedule) -> Iterator[Schedule]:
    wide = workload.op == "layer_norm" and workload.x_dtype == "bfloat16"
    for cluster, warpgroups in itertools.product(_TURNS, (1, 2, 4)):
        values = workload.cols // (128 * cluster * warpgroups)
        if not _VALUES[0] <= values <= _VALUES[1]:
            continue
        spread = dataclasses.replace(chosen, cluster=cluster, warpgroups=warpgroups)
        if not workload.is_norm:
            yield spread
            continue
        for rereads, turns in itertools.product((False, True), _TURNS[cluster]):
            turns *= 4 if wide else 1
            queue = dataclasses.replace(spread, rereads=rereads, turns=turns)
            slots = 3 if cluster > 2 and wide else 2
            if slots * workload.cols * workload.spec.x_dtype.itemsize // cluster < 2**17:
                yield dataclasses.replace(queue, slots=slots)
