"""Schedules of the losses' kernels.

Forward, how many warpgroups share a row and how many units a thread has under way; backward, how
many units a block has.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.contract_losses import LossKernelWorkload
from jaxnorm_kernels.mosaic.cross_entropy import backward, forward

_FUNCTIONS = (
    ("softmax_cross_entropy_with_integer_labels", None),
    ("softmax_cross_entropy_with_integer_labels", 30.0),
    ("log_prob_and_entropy", None),
)
_UNITS, _WARPGROUPS = (1, 2, 3, 4), (1, 2, 4)


def workloads() -> Iterator[LossKernelWorkload]:
    for (op, softcap), dtype in itertools.product(_FUNCTIONS, ("bfloat16", "float32")):
        for direction in ("fwd", "bwd"):
            yield LossKernelWorkload(op, direction, (8192, 32768), dtype, softcap)


def schedules(workload: LossKernelWorkload) -> list[Any]:
    """The table's first; then others."""
    if workload.direction == "bwd":
        return list(
            dict.fromkeys(
                [backward.LossBackwardSchedule(), *map(backward.LossBackwardSchedule, _UNITS)]
            )
        )
    vectors = (1, 2) if workload.x_dtype == "bfloat16" else (2, 4)
    others = itertools.starmap(forward.LossForwardSchedule, itertools.product(vectors, _WARPGROUPS))
    return list(dict.fromkeys([forward.choose(workload.spec), *others]))
