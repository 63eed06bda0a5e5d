"""The measured times that decide where Triton's kernels are the default."""

import re

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import load_alone
from specs import build_spec
from test_adding_an_operation import ROOT

from benchmarks import triton_defaults
from benchmarks.blocks import BLOCKS
from benchmarks.losses import LOSSES
from benchmarks.workloads import OPERATIONS
from jaxnorm.calls import backends
from jaxnorm.tools import machine, wall_time
from jaxnorm_kernels import launching, timings
from jaxnorm_kernels.operations import FUNCTIONS
from jaxnorm_kernels.timings import TIMINGS, Timing

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def spec(op, **changes):
    norm = {"scale_dtype": F32} if "norm" in op else {}
    return build_spec(op, "bwd", 8192, 4096, BF16, BF16, **{**norm, **changes})


CALLS = [
    (spec("softmax"), "softmax"),
    (spec("log_softmax", has_mask=True), "log_softmax with where"),
    (spec("softmax", has_mask=True, logits_bias_dtype=F32), "softmax with a bias"),
    (spec("softmax", has_mask=True, causal=True), "softmax with causal"),
    (spec("norm", subtract_mean=True, outputs=("y", "h")), "layer_norm"),
    (spec("add_norm", residual_dtype=BF16), "add_rms_norm"),
    (
        spec("scaled_add_norm", residual_dtype=BF16, subtract_mean=True),
        "add_layer_norm with a gate",
    ),
    (spec("norm_gated", gate_dtype=BF16, norm_before_gate=True), "rms_norm_gated"),
    (spec("norm_gated", gate_dtype=BF16), "rms_norm_gated with norm_before_gate=False"),
    (spec("cross_entropy"), "softmax_cross_entropy_with_integer_labels"),
    (
        spec("log_prob_and_entropy", logit_softcap=30.0),
        "log_prob_and_entropy with logit_softcap",
    ),
    (spec("kl_divergence", teacher_dtype=BF16), "kl_divergence"),
    (spec("kl_divergence", teacher_dtype=BF16, reverse=True), "kl_divergence with reverse"),
]


@pytest.mark.parametrize(("call", "name"), CALLS, ids=[name for _, name in CALLS])
def test_names_of_calls(call, name):
    assert timings.name_of(call) == name


def test_every_timing_is_of_a_function_and_every_block_has_a_call():
    assert {name.partition(" with ")[0] for name in TIMINGS} <= {*FUNCTIONS}
    assert {*triton_defaults.CALLS} <= {*OPERATIONS, *BLOCKS, *LOSSES}
    assert {*TIMINGS} <= {*triton_defaults.CALLS.values()}


def test_the_table_is_what_was_measured():
    """The table in the code and the docs page have the numbers of the committed results."""
    measured = triton_defaults.times(triton_defaults.FOLDER)
    assert triton_defaults.ratios(measured, "triton_sm80") == TIMINGS
    assert triton_defaults.table() in (ROOT / "docs/platforms.md").read_text()


@pytest.mark.parametrize(
    ("timing", "reason"),
    [
        (Timing(0.8, 0.7, 0.9), None),
        (Timing(0.81, 0.7, 0.9), "took 0.81 of XLA's time (0.70 to 0.90) on an H100, with"),
        (None, "its kernel of softmax is not timed"),
    ],
)
def test_the_default_is_what_was_fast_enough(timing, reason, monkeypatch):
    monkeypatch.setattr(timings, "TIMINGS", {} if timing is None else {"softmax": timing})
    support = load_alone("triton", "support")
    monkeypatch.setattr(support, "can_lower", lambda: True)
    said = support.why_not_default(spec("softmax"))
    assert said is None if reason is None else reason in said
    # If the kernel is requested by name, it runs anyway.
    assert support.why_unsupported(spec("softmax")) is None
    assert ("not timed on this GPU" in (support.caveat(spec("softmax")) or "")) == bool(timing)


@pytest.mark.parametrize(
    ("capability", "absence", "says"),
    [(80, "no Triton", True), (80, None, False), (90, "no Triton", False), (None, "", False)],
)
def test_the_report_says_what_the_extra_would_give(capability, absence, says, monkeypatch):
    monkeypatch.setattr(launching, "local_capability", lambda: capability)
    monkeypatch.setattr(backends, "absence", lambda name, platform: absence)
    said = machine._advice()
    assert (said is not None) == says
    if says:
        fast = [t.ratio for t in TIMINGS.values() if t.ratio <= timings.LIMIT]
        assert f"took {min(fast):.2f} to {max(fast):.2f} of XLA's time on an H100" in said
        assert 'pip install -e ".[triton]"' in said


def test_the_check_times_what_has_a_timing():
    """All calls timed by ``--check`` can be traced, and are named as in the timings."""
    timed = {str(call) for call in wall_time.CALLS}
    assert {name.partition(" with ")[0] for name in timed} <= {*FUNCTIONS}
    assert timed & {*TIMINGS}
    for call in wall_time.CALLS:
        types = {
            name: jax.ShapeDtypeStruct(shape, call.dtype_of(name))
            for name, shape in call.shapes.items()
        }
        y = jax.tree.leaves(jax.eval_shape(call.call, **types))[0]
        assert y.shape[0] == next(iter(call.shapes.values()))[0]
        assert re.fullmatch(r"mosaic|triton|xla", wall_time._default(call))
