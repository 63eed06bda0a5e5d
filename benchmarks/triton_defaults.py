"""Times of the Triton kernels relative to XLA, from committed results.

These times decide for which calls the Triton kernels are the default.

python -m benchmarks.triton_defaults          prints the table of docs/platforms.md
python -m benchmarks.triton_defaults --write  writes it to that page, and updates `timings.TIMINGS`
"""

import argparse
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks import text
from benchmarks.report import RESULTS
from benchmarks.results import OK, ROOT, Row, Table
from benchmarks.suites import SUITES
from benchmarks.workloads import ITEMSIZE
from jaxnorm_kernels import timings
from jaxnorm_kernels.timings import LIMIT, Timing

#: The folder of results in which Triton kernels, Mosaic kernels and XLA's code were timed in the
#: same run.
FOLDER = RESULTS / "nvidia_h100_80gb_hbm3_triton"
PAGE = ROOT / "docs/platforms.md"
_MARKS = ("<!-- triton:begin -->", "<!-- triton:end -->")

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

Times = dict[tuple[str, ...], dict[str, float]]


def times(folder: Path) -> Times:
    """Return the microseconds of forward and backward pass together, by workload and provider.

    The result maps (call, workload) to a dict from the provider to its time. For norms and
    softmaxes outside blocks, the time is the sum of two kernels that are timed separately.
    Workloads whose rows are not a multiple of 16 bytes are left out, because XLA runs them by
    default.
    """
    found: Times = defaultdict(dict)
    for suite in ("blocks", "loss"):
        for row in _rows(folder, suite):
            if row["op"] in CALLS and row["direction"] == "fwd+bwd":
                found[CALLS[row["op"]], row["shape"], row["dtype"]][row["provider"]] = float(
                    row["us"]
                )
    passes: dict[tuple[str, ...], dict[str, dict[str, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in _rows(folder, "kernels"):
        if any(int(row["cols"]) * ITEMSIZE[row[dtype]] % 16 for dtype in ("x_dtype", "y_dtype")):
            continue
        workload = (
            CALLS[row["op"]],
            f"{row['rows']}x{row['cols']}",
            row["x_dtype"],
            row["y_dtype"],
        )
        passes[workload][row["provider"]][row["direction"]] = float(row["us"])
    for key, of_provider in passes.items():
        for provider, of_direction in of_provider.items():
            if len(of_direction) == 2:
                found[key][provider] = sum(of_direction.values())
    return found


def ratios(measured: Times, provider: str) -> dict[str, Timing]:
    """Return a dict from each call to statistics of the provider's time divided by XLA's time.

    The statistics are the median, the minimum and the maximum over workloads. Only workloads that
    were measured with the provider `triton_sm80` are included.
    """
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
    """Return the table of docs/platforms.md."""
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


def write() -> None:
    """Write the entries of `timings.TIMINGS`, and the table of docs/platforms.md."""
    entries = "".join(
        f'    "{call}": Timing({timing.ratio}, {timing.least}, {timing.most}),\n'
        for call, timing in ratios(times(FOLDER), "triton_sm80").items()
    )
    code = Path(timings.__file__)
    pattern = re.compile(r"(?<=TIMINGS: dict\[str, Timing\] = \{\n)(?:    .*\n)*")
    code.write_text(pattern.sub(lambda _: entries, code.read_text()))
    before, _, rest = PAGE.read_text().partition(_MARKS[0])
    after = rest.partition(_MARKS[1])[2]
    PAGE.write_text(f"{before}{_MARKS[0]}\n{table()}\n{_MARKS[1]}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the results to the code and the page"
    )
    if parser.parse_args(argv).write:
        write()
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
