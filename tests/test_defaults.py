"""The default choice between kernels and XLA's code is right according to the committed timings."""

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
    """Return the name of an implementation and its module `support`.

    For "triton", `load_alone` imports only the module `support`, which does not import Triton. So
    Triton need not be installed.
    """
    if request.param == "mosaic":
        return request.param, mosaic
    support = load_alone("triton", "support")
    monkeypatch.setattr(support, "can_lower", lambda: True)
    return request.param, support


H200, H100 = (folder.name for folder in report.SHOWN)
MEASURED = {"mosaic": (H200, H100), "triton": (H200,)}

# Kernels are the default for these two calls, although they are 5 % and 2 % slower than XLA's code
# on an H100. These arrays are small (16 MiB), so a part of them stays in the H100's cache.
#
# For RMSNorm, a schedule with two tiles of 16 rows per block would be as fast as XLA's code, but
# only at this size. For log_softmax, nine schedules were measured, and none is as fast as XLA's
# code.
SLOWER_ON_H100 = {
    KernelWorkload("rms_norm", "fwd", 32768, 256, "bfloat16", "bfloat16"),
    KernelWorkload("log_softmax", "fwd", 32768, 128, "float32", "float32"),
}


def replaced(device, workload):
    """Return True if the committed timing of this call was measured with an older kernel.

    On the H200, this is the case for backward passes over rows of length 50257.
    """
    return device == H200 and (workload.direction, workload.cols) == ("bwd", 50257)


def timed(name):
    """Return a dict from (device, workload) to two measured times in microseconds.

    The first is the time of the kernels of the implementation `name`, the second that of XLA's
    code.
    """
    return {
        (folder.name, KernelWorkload(*question)): (answers[name].us, answers["xla"].us)
        for folder in report.SHOWN
        for question, answers in report.Results(folder).kernels.items()
        if {name, "xla"} <= {*answers}
    }


def test_no_default_is_slower_than_xla(support):
    name, support = support
    everywhere = timed(name)
    for device in MEASURED[name]:
        figures = {w: times for (where, w), times in everywhere.items() if where == device}
        assert len(figures) > 500
        slower = {
            workload: f"{ours:.2f} us against {theirs:.2f}"
            for workload, (ours, theirs) in figures.items()
            if support.why_unsupported(workload.spec) is None
            and support.why_not_default(workload.spec) is None
            and not (name == "mosaic" and replaced(device, workload))
            and ours > NOISE * theirs
        }
        assert {*slower} == (SLOWER_ON_H100 if device == H100 else set()), slower


def test_no_call_as_in_training_is_slower_than_plain_jax():
    for folder in report.SHOWN:
        figures = report.Results(folder).api
        assert len(figures) > 100
        ratios = {w: each["jaxnorm"].us / each["jnp"].us for w, each in figures.items()}
        assert not {w: round(ratio, 3) for w, ratio in ratios.items() if ratio > NOISE}


def test_a_call_that_is_left_has_a_reason(support):
    """Every reason for not using kernels by default is confirmed by a measurement.

    That is, the reason applies to a measured call, and this call's kernels were slower than XLA.
    The reason that XLA can fuse a call with other operations is left out: other tests check it.
    """
    name, support = support
    left = [
        (support.why_not_default(w.spec), ours > theirs)
        for (_, w), (ours, theirs) in timed(name).items()
        if support.why_not_default(w.spec) and not first(BETTER_FUSED, w.spec)
    ]
    assert left
    # `why_not_default` returns different reasons for different calls. For each of these reasons,
    # there is at least one call whose kernels were slower than XLA's code.
    assert {reason for reason, is_slower in left if is_slower} == {reason for reason, _ in left}


def test_mosaics_forward_passes_are_left_for_the_program_s_sake_alone():
    for _, w in timed("mosaic"):
        if w.direction == "fwd":
            assert mosaic.why_not_default(w.spec) == first(BETTER_FUSED, w.spec)


def stacks():
    """Return the times of stacks of small layers, divided by the times of plain JAX ("jnp").

    The result is a nested dict: ``ratios[provider, direction][workload]`` is the time with the
    provider, divided by the time of plain JAX. A provider is one of the compared implementations. A
    workload is a tuple (op, direction, rows, cols, dtype).
    """
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
