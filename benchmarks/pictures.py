"""Draws the README's picture: time and memory of training steps, from committed results.

Usage, from the root of the repository, with matplotlib::

    python -m benchmarks.pictures

The picture's metadata contain a digest of this script and the results. A test compares it with the
current files.
"""

import csv
import hashlib
from pathlib import Path

from benchmarks.results import RESULTS

FOLDER = RESULTS / "nvidia_h200"
DATA = FOLDER / "auto_remat.csv"
PICTURE = FOLDER / "frontier.svg"
_LAYERS = {"scan": "scanned", "unrolled": "unrolled"}
_MODELS = {"llama-1b": "Llama 3.2 1B, 4 x 2048", "gpt2-small": "GPT-2 small, 16 x 1024"}
_AUTO, _NORMS = "auto, linear loss", "auto, norms, linear loss"
_BUDGETS = ("", *(f", budget {budget}" for budget in ("0.2", "0.1", "0.05", "0.03")))
# For each series: its legend, the marker and line, the colour, and its rows with their labels.
# Rows without a measurement are left out.
_SERIES: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("plain JAX", "s", "#555555", {"plain": "plain", "dots": "dots"}),
    (
        "names placed by hand, or block; linear loss",
        "D",
        "#d55e00",
        {"names, linear loss": "names", "block, linear loss": "block"},
    ),
    (
        "auto_remat without and with budgets; linear loss",
        "o-",
        "#0072b2",
        {_AUTO + budget: "" for budget in _BUDGETS},
    ),
    (
        "the same, with jaxnorm's norms",
        "^--",
        "#56b4e9",
        {_NORMS + budget: budget.removeprefix(", budget ") for budget in _BUDGETS},
    ),
)


def measured() -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return a dict from (model, layers, row) to GB and ms, for all steps on one GPU."""
    with DATA.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["layers"] in _LAYERS]
    return {
        (row["model"], row["layers"], row["row"]): (float(row["temp_gb"]), float(row["ms"]))
        for row in rows
    }


def digest() -> str:
    """Return a hexadecimal digest of this script and of the results that it draws."""
    return hashlib.sha256(Path(__file__).read_bytes() + repr(measured()).encode()).hexdigest()


def draw() -> None:
    """Write the picture: a panel for each model with its layers scanned and unrolled."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxnorm"  # equal results give equal files
    import matplotlib.pyplot as plt

    steps = measured()
    figure, grid = plt.subplots(len(_LAYERS), len(_MODELS), figsize=(10, 7), layout="constrained")
    for panels, (layers, name) in zip(grid, _LAYERS.items()):
        for axes, (model, title) in zip(panels, _MODELS.items()):
            for legend, style, colour, labels in _SERIES:
                size = 8 if style == "D" else 5  # visible behind the circles
                rows = [row for row in labels if (model, layers, row) in steps]
                points = [steps[model, layers, row] for row in rows]
                axes.plot(*zip(*points), style, color=colour, label=legend, markersize=size)
                for row, point in zip(rows, points):
                    offset = {"xytext": (5, 3), "textcoords": "offset points"}
                    axes.annotate(labels[row], point, fontsize=8, **offset)
            axes.set_title(f"{title} tokens, {name} layers")
            axes.margins(x=0.12, y=0.1)
            axes.set_xlim(left=0)
            axes.grid(alpha=0.25)
    figure.supxlabel("temporary memory of a training step [GB], lower is better")
    figure.supylabel("time of a training step [ms], lower is better")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.savefig(PICTURE, metadata={"Description": digest(), "Date": None})


if __name__ == "__main__":
    draw()
