"""The output of a finished comparison: checks, a table for the terminal, Markdown and a plot."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import matplotlib

matplotlib.use("Agg")  # set before pyplot is imported: CI machines have no display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from rich.table import Table

MIB = 2**20
_VERDICTS = {
    True: "ok",
    False: "FAILED",
    None: "not checked (smaller than the default run)",
}
COLUMNS = ("functions", "final loss", "ms/step", "temp MiB", "saved MiB")

# Okabe and Ito's palette, which suits colour-blind readers. The curves of the runs nearly coincide,
# so different widths and dashes make all of them visible.
_COLOURS = ("#E69F00", "#56B4E9", "#0072B2")
_LINES = ({"lw": 5.0, "alpha": 0.6}, {"lw": 2.5}, {"lw": 1.2, "ls": (0, (4, 2))})


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of one training run: losses, time and memory.

    Attributes:
      label: the name of the run.
      losses: an array of shape (steps,): the mean loss of each step's batch, in nats per byte.
      final_loss: the mean loss of the held-out text after training, in nats per byte.
      ms_per_step: the milliseconds per training step.
      temp_bytes: the temp memory that XLA plans for the compiled training step.
      residual_bytes: the bytes of all arrays that are saved for the backward pass, according to
        `jaxnorm.memory_report`.
    """

    label: str
    losses: np.ndarray
    final_loss: float
    ms_per_step: float
    temp_bytes: int
    residual_bytes: int

    def cells(self) -> tuple[str, ...]:
        return (
            self.label,
            f"{self.final_loss:.4f}",
            f"{self.ms_per_step:.1f}",
            f"{self.temp_bytes / MIB:.1f}",
            f"{self.residual_bytes / MIB:.1f}",
        )


@dataclasses.dataclass(frozen=True)
class Check:
    """A claim about the runs. `passed` is None if the runs are too short to check it."""

    claim: str
    passed: bool | None

    def __str__(self) -> str:
        return f"{_VERDICTS[self.passed]}: {self.claim}"


def agreement_checks(runs: Sequence[Run], early_steps: int, tolerance: float) -> list[Check]:
    """Check that the losses of all runs agree.

    The losses of the first `early_steps` steps may differ by at most `tolerance` nats. The losses
    at the end may differ by at most 3 %.
    """
    curves = np.stack([run.losses for run in runs])
    early = float(np.max(np.ptp(curves[:, :early_steps], axis=0)))
    # Check two losses at the end of training: the mean of the last batches' losses, and the
    # held-out loss. Losses of batches are noisy, and the held-out loss is computed only once, so
    # neither is reliable alone.
    ends = np.stack([curves[:, -early_steps:].mean(axis=1), [run.final_loss for run in runs]])
    late = float(np.max(np.ptp(ends, axis=1) / ends.min(axis=1)))
    steps = min(early_steps, curves.shape[1])
    return [
        Check(
            f"first {steps} losses differ by {early:.1e}, allowed {tolerance:.1e}",
            early <= tolerance,
        ),
        Check(
            f"losses at the end differ by {late:.1e} of themselves, allowed 3.0e-02", late <= 0.03
        ),
    ]


def learning_checks(runs: Sequence[Run], bigram: float, bound: float, enough: bool) -> list[Check]:
    """Check that every run has learned: its final loss must be below `bound` and `bigram`.

    Args:
      bigram: the loss of a bigram model on the same text.
      bound: the final loss that the model should reach with the default settings.
      enough: False if training was too short to learn. The result of each check is then None.
    """
    worst = max((run.final_loss for run in runs), key=lambda loss: (np.isnan(loss), loss))
    comparisons = [
        (f"the bound of {bound:.2f}", bound),
        (f"the bigram model's {bigram:.4f}", bigram),
    ]
    return [
        Check(
            f"final loss {worst:.4f} nats per byte, to be below {name}",
            worst < limit if enough else None,
        )
        for name, limit in comparisons
    ]


def table(runs: Sequence[Run]) -> Table:
    result = Table(*COLUMNS[:1], title="same seed, same batches", title_justify="left")
    for name in COLUMNS[1:]:
        result.add_column(name, justify="right")
    for run in runs:
        result.add_row(*run.cells())
    return result


def markdown(runs: Sequence[Run], freed: Sequence[tuple[float, float]], caption: str) -> str:
    """Return a Markdown table of the runs.

    `freed` has a pair of numbers for each run after the first. A run is compared with the run
    before it. The first number is the temp memory that the run frees, the second number is the
    memory of saved arrays that it frees. They are the last two columns of the table.
    """
    header = (*COLUMNS, "temp freed", "saved freed")
    last = [("-", "-"), *((f"{temp:.2f}", f"{saved:.2f}") for temp, saved in freed)]
    body = [(*run.cells(), *cells) for run, cells in zip(runs, last, strict=True)]
    rows = [header, ("---", *["---:"] * (len(header) - 1)), *body]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", caption, ""])


def plot(
    runs: Sequence[Run], bigram: float, early: tuple[int, float], title: str, path: Path
) -> None:
    """Plot the losses and the memory of the runs, and write the plot to a PNG file.

    `early` is a pair (n, tolerance). In the first n steps, the losses of the runs may differ by at
    most `tolerance`. The plot shows this limit, but this function does not check it.
    """
    figure = plt.figure(figsize=(12, 6.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1.2), width_ratios=(1.25, 1))
    curves = figure.add_subplot(grid[0, 0])
    _plot_curves(curves, runs, bigram)
    _plot_differences(figure.add_subplot(grid[1, 0], sharex=curves), runs, *early)
    _plot_memory(figure.add_subplot(grid[:, 1]), runs)
    figure.savefig(path, format="png", dpi=150)
    plt.close(figure)


def _plot_curves(axes: Axes, runs: Sequence[Run], bigram: float) -> None:
    for run, colour, line in zip(runs, _COLOURS, _LINES):
        label = f"{run.label}: held-out loss {run.final_loss:.3f}"
        axes.plot(np.arange(1, len(run.losses) + 1), run.losses, color=colour, label=label, **line)
    axes.axhline(bigram, color="0.35", ls=":", label=f"bigram model: held-out loss {bigram:.3f}")
    axes.set_ylabel("training loss [nats per byte], lower is better")
    axes.tick_params(labelbottom=False)
    _finish(axes)
    axes.legend(frameon=False)


def _plot_differences(axes: Axes, runs: Sequence[Run], early_steps: int, tolerance: float) -> None:
    reference, *others = runs
    for run, colour, marker in zip(others, _COLOURS[1:], ("s", ".")):
        difference = np.abs(run.losses - reference.losses)
        steps = np.flatnonzero(difference)  # leave out differences of 0: the axis is logarithmic
        axes.plot(steps + 1, difference[steps], color=colour, ls="", marker=marker, ms=3)
    axes.hlines(tolerance, 1, early_steps, color="black", lw=2)
    note = f"most that is allowed in the first {early_steps} steps"
    axes.annotate(note, (early_steps, tolerance), (5, 0), textcoords="offset points", va="center")
    axes.set_yscale("log")
    axes.set_ylabel(f"difference from\n{reference.label} [nats]")
    axes.set_xlabel("step")
    axes.margins(y=0.15)
    _finish(axes)


def _plot_memory(axes: Axes, runs: Sequence[Run]) -> None:
    groups = ("temporary memory of\nthe training step", "arrays saved for\nthe backward pass")
    height = 0.8 / len(runs)
    for index, (run, colour) in enumerate(zip(runs, _COLOURS)):
        sizes = [run.temp_bytes / MIB, run.residual_bytes / MIB]
        places = np.arange(len(groups)) + (index - (len(runs) - 1) / 2) * height
        bars = axes.barh(places, sizes, 0.92 * height, color=colour, label=run.label)
        axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.set_yticks(np.arange(len(groups)), groups)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("memory [MiB], lower is better")
    _finish(axes, grid="x")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=len(runs))


def _finish(axes: Axes, grid: Literal["both", "x"] = "both") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
