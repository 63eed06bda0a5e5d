"""Times of the Triton kernels over XLA's, from committed results: they choose the defaults.

    python -m benchmarks.triton_defaults [FOLDER]

prints the entries of `jaxnorm_kernels.timings.TIMINGS`, and the table of docs/platforms.md.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks import text
from benchmarks.report import RESULTS
from benchmarks.results import OK, Row, Table
from benchmarks.suites import SUITES
from jaxnorm_kernels.timings import LIMIT, TIMINGS, Timing

FOLDER = RESULTS / "nvidia_h100_80gb_hbm3"

#: The calls of `jaxnorm_kernels.timings` that the operations, blocks and losses are made of.
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
}

Times = dict[tuple[str, ...], dict[str, float]]


def times(folder: Path) -> Times:
    """Microseconds, forward and backward together, by call and workload, and by provider.

    Of plain functions they are the sum of two kernels' times, which are timed one by one.
    """
    found: Times = defaultdict(dict)
    for suite in ("blocks", "loss"):
        for row in _rows(folder, suite):
            if row["op"] in CALLS and row["direction"] == "fwd+bwd":
                workload = (CALLS[row["op"]], row["shape"], row["dtype"])
                found[workload][row["provider"]] = float(row["us"])
    passes: dict[tuple[str, ...], dict[str, dict[str, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in _rows(folder, "kernels"):
        workload = (
            CALLS[row["op"]],
            f"{row['rows']}x{row['cols']}",
            row["x_dtype"],
            row["y_dtype"],
        )
        passes[workload][row["provider"]][row["direction"]] = float(row["us"])
    for workload, of_provider in passes.items():
        for provider, of_direction in of_provider.items():
            if len(of_direction) == 2:
                found[workload][provider] = sum(of_direction.values())
    return found


def ratios(measured: Times, provider: str) -> dict[str, Timing]:
    """The provider's time over XLA's, by call, where `triton_sm80` was timed."""
    found = defaultdict(list)
    for (call, *_), us in measured.items():
        if {provider, "triton_sm80", "xla"} <= us.keys():
            found[call].append(us[provider] / us["xla"])
    return {
        call: Timing(*(round(of(found[call]), 2) for of in (statistics.median, min, max)))
        for call in CALLS.values()
        if call in found
    }


def table(folder: Path = FOLDER) -> str:
    """The table of docs/platforms.md."""
    measured = times(folder)
    columns = [ratios(measured, name) for name in ("triton_sm80", "triton_sm90", "mosaic")]

    def cell(timing: Timing | None) -> str:
        return (
            "-"
            if timing is None
            else f"{timing.ratio:.2f} ({timing.least:.2f} to {timing.most:.2f})"
        )

    header = ["call", "Triton for an A100", "Triton for an H100", "Mosaic", "default on Ampere"]
    return text.table(
        header,
        (
            [
                f"`{call}`",
                *(cell(column.get(call)) for column in columns),
                "Triton" if timing.ratio <= LIMIT else "XLA",
            ]
            for call, timing in columns[0].items()
        ),
    )


def _rows(folder: Path, suite: str) -> list[Row]:
    return [row for row in Table(folder, SUITES[suite]).rows() if row["status"] == OK]


def main(argv: Sequence[str] | None = None) -> int:
    (folder,) = map(Path, (sys.argv[1:] if argv is None else argv) or [FOLDER])
    for call, timing in ratios(times(folder), "triton_sm80").items():
        print(f'    "{call}": Timing({timing.ratio}, {timing.least}, {timing.most}),')
    print(table(folder))
    return 0 if ratios(times(folder), "triton_sm80") == TIMINGS else 1


if __name__ == "__main__":
    sys.exit(main())
