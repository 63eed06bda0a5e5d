"""The measured times that decide where Triton's kernels are the default."""

import collections
import dataclasses
import re
import statistics

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import load_alone
from specs import build_spec
from test_adding_an_operation import ROOT

from benchmarks import tables
from benchmarks.blocks import BLOCKS
from benchmarks.losses import LOSSES
from benchmarks.results import RESULTS
from benchmarks.workloads import ITEMSIZE, OPERATIONS, Workload
from jaxnorm.tools import wall_time
from jaxnorm_kernels import timings
from jaxnorm_kernels.operations import FUNCTIONS
from jaxnorm_kernels.timings import TIMINGS, Timing

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def spec(op, **changes):
    norm = {"scale_dtype": F32} if "norm" in op else {}
    return build_spec(op, "bwd", 8192, 4096, BF16, BF16, **{**norm, **changes})


def test_every_timing_is_of_a_function_and_every_block_has_a_call():
    assert {name.partition(" with ")[0] for name in TIMINGS} <= {*FUNCTIONS}
    assert {*CALLS} <= {*OPERATIONS, *BLOCKS, *LOSSES}
    assert {*TIMINGS} <= {*CALLS.values()}


#: The results in which Triton kernels, Mosaic kernels and XLA's code were timed in the same run.
#: The providers `triton_sm80` and `triton_sm90` ran kernels compiled for an A100 and an H100.
MEASURED = RESULTS / "nvidia_h100_80gb_hbm3_triton"
#: Maps each operation, block and loss to its key in `jaxnorm_kernels.timings.TIMINGS`.
CALLS = {
    "softmax": "softmax",
    "log_softmax": "log_softmax",
    "causal_softmax": "softmax with causal",
    "biased_softmax": "softmax with a bias",
    "masked_softmax": "softmax with where",
    "layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "add_layer_norm": "add_layer_norm",
    "add_rms_norm": "add_rms_norm",
    "gated_add_layer_norm": "add_layer_norm with a gate",
    "post_norm": "rms_norm_add",
    "sandwich": "rms_norm_add_rms_norm",
    "rms_norm_rope": "rms_norm_rope",
    "gated_rms_norm": "rms_norm_gated",
    "gate_first_rms_norm": "rms_norm_gated with norm_before_gate=False",
    "cross_entropy": "softmax_cross_entropy_with_integer_labels",
    "capped_cross_entropy": "softmax_cross_entropy_with_integer_labels with logit_softcap",
    "log_prob_and_entropy": "log_prob_and_entropy",
    "kl_divergence": "kl_divergence",
    "reverse_kl_divergence": "kl_divergence with reverse",
}


def ratios(provider):
    """Return statistics of a provider's time divided by XLA's time, for each call in `CALLS`.

    The statistics are the median, the minimum and the maximum over workloads, of forward and
    backward pass together. For norms and softmaxes outside blocks, the two passes are timed
    separately. Their rows that are not a multiple of 16 bytes are left out, because XLA runs them
    by default. Only workloads that were measured with the provider `triton_sm80` count.
    """
    times = collections.defaultdict(lambda: collections.defaultdict(list))
    for suite in ("kernels", "blocks", "loss"):
        for workload, answers in tables.figures(suite, [MEASURED]).items():
            sizes = (ITEMSIZE[dtype] for dtype in (workload.x_dtype, workload.y_dtype))
            if suite == "kernels" and any(workload.cols * size % 16 for size in sizes):
                continue
            if suite == "kernels" or (workload.direction == "fwd+bwd" and workload.op in CALLS):
                both = dataclasses.replace(workload, direction="fwd+bwd")
                for name, figure in answers.items():
                    times[both][name].append(figure.us)
    found = collections.defaultdict(list)
    for workload, us in times.items():
        passes = 2 if isinstance(workload, Workload) else 1
        whole = {name: sum(each) for name, each in us.items() if len(each) == passes}
        if {provider, "triton_sm80", "xla"} <= whole.keys():
            found[CALLS[workload.op]].append(whole[provider] / whole["xla"])
    return {
        call: Timing(*(round(of(found[call]), 2) for of in (statistics.median, min, max)))
        for call in CALLS.values()
        if call in found
    }


def test_the_table_is_what_was_measured():
    """The table in the code and the docs page have the numbers of the committed results."""
    columns = [ratios(name) for name in ("triton_sm80", "triton_sm90", "mosaic")]
    assert columns[0] == TIMINGS
    page = (ROOT / "docs/platforms.md").read_text()
    for call, timing in TIMINGS.items():
        found = (each.get(call) for each in columns)
        cells = (f"{t.ratio:.2f} ({t.least:.2f} to {t.most:.2f})" if t else "-" for t in found)
        default = "Triton" if timing.ratio <= timings.LIMIT else "XLA"
        assert f"| `{call}` | {' | '.join(cells)} | {default} |\n" in page


@pytest.mark.parametrize(
    ("timing", "reason"),
    [
        (Timing(0.8, 0.7, 0.9), None),
        (Timing(0.81, 0.7, 0.9), "took 0.81 of XLA's time (0.70 to 0.90) on an H100, with"),
        (None, "its kernel for softmax was not timed"),
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


def test_the_check_times_what_has_a_timing():
    """All calls timed by ``--check`` can be traced, and are named as in the timings."""
    timed = {str(call) for call in wall_time.CALLS}
    assert {name.partition(" with ")[0] for name in timed} <= {*FUNCTIONS}
    assert timed & {*TIMINGS}
    for call in wall_time.CALLS:
        types = wall_time.types_of(call)
        y = jax.tree.leaves(jax.eval_shape(call.call, **types))[0]
        assert y.shape[0] == next(iter(call.shapes.values()))[0]
        assert re.fullmatch(r"mosaic|triton|xla", wall_time._default(call))
