"""What the default leaves to the next implementation, held against the committed figures."""

import pytest
from conftest import load_alone

from benchmarks import report
from benchmarks.contract import KernelWorkload
from jaxnorm_kernels import mosaic

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
    """Microseconds of each workload that both have run: of the kernels, and of XLA's."""
    return {
        KernelWorkload(*question): (answers[name].us, answers["xla"].us)
        for question, answers in report.Results(report.SHOWN).kernels.items()
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
    name, support = support
    figures = timed(name)
    left = [w for w in figures if support.prefers(w.spec)]
    assert left
    # No sentence holds back calls for which the kernels are always faster.
    for reason in {support.prefers(w.spec) for w in left}:
        assert any(
            figures[w][0] > figures[w][1] for w in left if support.prefers(w.spec) == reason
        ), reason


def test_mosaics_forward_passes_are_never_left():
    assert not [w for w in timed("mosaic") if w.direction == "fwd" and mosaic.prefers(w.spec)]
