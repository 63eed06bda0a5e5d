"""What the default leaves to the next implementation, held against the committed figures."""

import collections
import statistics

import pytest
from conftest import load_alone

from benchmarks import report
from benchmarks.contract import KernelWorkload
from benchmarks.results import OK, Table
from benchmarks.suites import SUITES
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.refusals import BETTER_FUSED, first

NOISE = 1.02


@pytest.fixture(params=["mosaic", "triton"])
def support(request, monkeypatch):
    """What an implementation supports and prefers; Triton's without Triton."""
    if request.param == "mosaic":
        return request.param, mosaic
    support = load_alone("triton", "support")
    monkeypatch.setattr(support, "can_lower", lambda: True)
    return request.param, support


def timed(name):
    """Microseconds of each workload that both have run: of the kernels, and of XLA's.

    Of the whole grid on an H200, and of what came later on an H100.
    """
    return {
        KernelWorkload(*question): (answers[name].us, answers["xla"].us)
        for folder in report.SHOWN
        for question, answers in report.Results(folder).kernels.items()
        if {name, "xla"} <= {*answers}
    }


def test_no_default_is_slower_than_xla(support):
    name, support = support
    figures = timed(name)
    assert len(figures) > 500
    slower = {
        workload: f"{ours:.2f} us against {theirs:.2f}"
        for workload, (ours, theirs) in figures.items()
        if support.supports(workload.spec) is None
        and support.prefers(workload.spec) is None
        and ours > NOISE * theirs
    }
    assert not slower


def test_a_call_that_is_left_has_a_reason(support):
    """Alone; what is left for the sake of the program that it is in has other figures, below."""
    name, support = support
    figures = timed(name)
    left = [w for w in figures if support.prefers(w.spec) and not first(BETTER_FUSED, w.spec)]
    assert left
    # No sentence holds back calls for which the kernels are always faster.
    for reason in {support.prefers(w.spec) for w in left}:
        assert any(
            figures[w][0] > figures[w][1] for w in left if support.prefers(w.spec) == reason
        ), reason


def test_mosaics_forward_passes_are_left_for_the_program_s_sake_alone():
    for w in timed("mosaic"):
        if w.direction == "fwd":
            assert mosaic.prefers(w.spec) == first(BETTER_FUSED, w.spec)


def stacks():
    """Milliseconds over plain jnp's, of each provider and direction, by cell."""
    (rows,) = [
        table.rows()
        for folder in sorted(report.RESULTS.iterdir())
        if (table := Table(folder, SUITES["stacks"])).file.exists()
    ]
    assert all(row["status"] == OK for row in rows)
    ratios = collections.defaultdict(dict)
    for row in rows:
        cell = tuple(row[name] for name in ("op", "direction", "rows", "cols", "dtype"))
        ratios[row["provider"], row["direction"]][cell] = float(row["ms"]) / float(row["jnp_ms"])
    return ratios


def test_no_stack_of_small_layers_is_slower_by_default():
    ratios = stacks()
    for direction in ("fwd", "fwd+bwd"):
        cells = ratios["jaxnorm", direction]
        assert len(cells) == 30
        assert not {cell: round(ratio, 3) for cell, ratio in cells.items() if ratio > 1.03}


def test_small_forward_norms_are_left_for_a_reason():
    assert statistics.median(stacks()["mosaic", "fwd"].values()) > 1.03
