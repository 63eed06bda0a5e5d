"""What the default leaves to XLA, held against the committed figures."""

import csv
from pathlib import Path

import pytest

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels import mosaic

FIGURES = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia_h200" / "kernels.csv"
NOISE = 1.02


def timed():
    """Microseconds of each workload that both have timed: the kernels', XLA's."""
    found = {}
    with FIGURES.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["status"] == "ok":
                shape = (int(row["rows"]), int(row["cols"]))
                dtypes = (row["x_dtype"], row["y_dtype"])
                workload = KernelWorkload(row["op"], row["direction"], *shape, *dtypes)
                found.setdefault(workload, {})[row["provider"]] = float(row["us"])
    return {
        w: (us["mosaic"], us["xla"]) for w, us in found.items() if {"mosaic", "xla"} <= us.keys()
    }


def test_no_default_is_slower_than_xla():
    figures = timed()
    assert len(figures) > 500
    slower = {
        workload: f"{ours} us against {theirs}"
        for workload, (ours, theirs) in figures.items()
        if mosaic.supports(workload.spec) is None
        and mosaic.prefers(workload.spec) is None
        and ours > NOISE * theirs
    }
    assert not slower


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_call_left_to_xla_has_a_reason(direction):
    figures = timed()
    left = [w for w in figures if mosaic.prefers(w.spec) and w.direction == direction]
    assert bool(left) == (direction == "bwd")
    # No sentence holds back calls for which the kernels are always faster.
    for reason in {mosaic.prefers(w.spec) for w in left}:
        assert any(figures[w][0] > figures[w][1] for w in left if mosaic.prefers(w.spec) == reason)
