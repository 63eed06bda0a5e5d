"""Plots of results.

* Norms and softmaxes: GB/s against the row length N. There is a panel for each operation and
  direction, and a line for each provider. If the length of a row is not a multiple of 16 bytes, the
  marker is hollow, and no line connects it with others.
* Matmuls: one panel shows TFLOP/s against the size of square matmuls, another panel shows TFLOP/s
  of the matmuls that occur in models.
* Training steps: for each model, bars of time, bars of memory, and curves of the loss.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # set before pyplot is imported: CI machines have no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks import figures, text, workloads
from benchmarks.figures import Figure, Figures
from benchmarks.linear import LINEAR, TOKENS
from benchmarks.models import LAYERS, LOSS_STEPS, MODELS, REMATS, VARIANTS
from benchmarks.providers import PROVIDERS
from benchmarks.results import Row

# The colour and the marker of each provider. The colours are Okabe and Ito's palette, which suits
# colour-blind readers; the markers help in black and white prints.
STYLES = {
    "jaxnorm": ("#000000", "o"),
    "mosaic": ("#0072B2", "s"),
    "triton": ("#332288", "d"),
    "triton_sm80": ("#6699CC", "<"),
    "triton_sm90": ("#AA4499", "X"),
    "xla": ("#56B4E9", "v"),
    "composed": ("#882255", "p"),
    "jnp": ("#E69F00", "^"),
    "flax": ("#F0E442", "D"),
    "optax": ("#44AA99", "h"),
    "products": ("#661100", "+"),
    "chunk_1024": ("#C5B0D5", "."),
    "chunk_2048": ("#8C6BB1", "."),
    "chunk_4096": ("#6A51A3", "."),
    "chunk_8192": ("#3F007D", "."),
    "tokamax": ("#CC79A7", "P"),
    "quack": ("#D55E00", "X"),
    "quack_chunks": ("#994F00", "x"),
    "liger": ("#009E73", "*"),
    "liger_cute": ("#5DBB63", "H"),
    "liger_sm90": ("#00441B", "8"),
    "cce": ("#4B0092", "2"),
    "cce_unfiltered": ("#9467BD", "3"),
    "fla": ("#117733", "1"),
    "torch": ("#999999", "<"),
    "torch.compile": ("#666666", ">"),
}
_OF_VARIANTS = dict(
    zip(VARIANTS, ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#000000", "#999999"))
)
COPY = "a copy of as many bytes"
MATMUL = "the matmul alone, by XLA"
# Labels of the rematerialisation policies. They are printed below the bars.
_REMATS = {"none": "no remat", "dots": "remat,\nmatmuls\nsaved", "block": "remat\nof layers"}
_OPS = {"product": "matmul"}
_MODELS = {
    "gpt2-small": "GPT-2 small",
    "llama-1b": "Llama 3.2 1B",
    "llama-1b-qk": "Llama 3.2 1B, QK norms",
}

Answers = dict[Any, dict[str, Figure]]  # maps N or a name to {provider: figure}


def kernels(measured: Figures, dtype: str, title: str, path: Path) -> None:
    """Write a PNG of kernel times in one dtype."""
    panels = [
        [
            (f"{op}, {text.DIRECTIONS[way]}", figures.along_n(measured, op, way, dtype, dtype))
            for way in ("fwd", "bwd")
        ]
        for op in workloads.OPERATIONS
    ]
    x_label = "columns per row (hollow markers: 1000, 3000, 4095, 50257)"
    _plot(panels, [x_label] * 2, title, path)


def linear(measured: Figures, dtype: str, title: str, path: Path) -> None:
    """Write a PNG of matmuls in one dtype, with panels of square matmuls and of models' matmuls."""
    panels = [
        [
            (f"{_OPS.get(op, op)}, {text.DIRECTIONS[way]}", along(measured, op, way, dtype))
            for along in (figures.along_squares, figures.along_projections)
        ]
        for op, asked in LINEAR.items()
        for way in asked.directions
    ]
    x_labels = [
        "rows and columns of both matrices",
        f"matmuls of Llama models: inputs x outputs, {TOKENS} tokens",
    ]
    _plot(panels, x_labels, title, path, y_label="speed [TFLOP/s]", roof=MATMUL)


def training(rows: Sequence[Row], dtype: str, title: str, path: Path) -> None:
    """Write a PNG of training steps in one dtype."""
    models = [name for name in MODELS if any(row["model"] == name for row in rows)]
    figure, grid = plt.subplots(
        len(models), 3, figsize=(13, 3.4 * len(models)), layout="constrained", squeeze=False
    )
    figure.suptitle(title, fontsize=11)
    for name, (times, memory, curves) in zip(models, grid):
        its = [row for row in rows if row["model"] == name and row["dtype"] == dtype]
        its = [row for row in its if not row["mesh"]]
        title = _MODELS.get(name, name)
        times.set_title(f"{title}: time of a step", fontsize=10)
        times.set_ylabel("time of a step [ms]")
        _bars(times, its, "ms", 1.0)
        memory.set_title(f"{title}: temporary memory", fontsize=10)
        memory.set_ylabel("temporary memory [GB]")
        _bars(memory, its, "temp_bytes", 1e9)
        curves.set_title(f"{title}: losses, one line per bar", fontsize=10)
        curves.set_ylabel("loss [nats per token]")
        curves.set_xlabel("step")
        for row in its:
            losses = [float(row[f"loss_{step}"]) for step in LOSS_STEPS]
            curves.plot(LOSS_STEPS, losses, color=_OF_VARIANTS[row["provider"]], lw=1.0)
    for axes in grid.flat:
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def _bars(axes: Axes, rows: Sequence[Row], column: str, unit: float) -> None:
    """Draw groups of bars. A group has a bar for each variant of the model.

    The variants in a group stack their layers in the same way (scanned or unrolled), and use the
    same rematerialisation.
    """
    variants = text.variants(rows)
    there = {(row["layers"], row["remat"]) for row in rows}
    groups = [group for group in itertools.product(LAYERS, REMATS) if group in there]
    width = 0.8 / len(variants)
    for index, variant in enumerate(variants):
        heights = {
            (row["layers"], row["remat"]): float(row[column]) / unit
            for row in rows
            if row["provider"] == variant
        }
        left = (index - (len(variants) - 1) / 2) * width
        places = [i + left for i, group in enumerate(groups) if group in heights]
        values = [heights[group] for group in groups if group in heights]
        colour, label = _OF_VARIANTS[variant], VARIANTS[variant]
        bars = axes.bar(places, values, 0.9 * width, color=colour, label=label)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, rotation=90, padding=2)
        for i in (i for i, group in enumerate(groups) if group not in heights):
            axes.text(
                i + left, 0, " not measured", fontsize=7, rotation=90, ha="center", va="bottom"
            )
    axes.margins(y=0.15)
    names = [_REMATS[remat] + "\n(unrolled)" * (way != "scan") for way, remat in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=8)


def _plot(
    panels: Sequence[Sequence[tuple[str, Answers]]],
    x_labels: Sequence[str],
    title: str,
    path: Path,
    *,
    y_label: str = "bandwidth [GB/s]",
    roof: str = COPY,
) -> None:
    """Draw panels with titles. The panels of a column share the x axis; all share the y axis."""
    figure, grid = plt.subplots(
        len(panels),
        len(panels[0]),
        figsize=(11, 3.0 * len(panels)),
        sharex="col",
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    figure.suptitle(title, fontsize=11)
    for axes_row, panel_row in zip(grid, panels):
        for axes, (name, answers) in zip(axes_row, panel_row):
            axes.set_title(name, fontsize=10)
            _panel(axes, answers, roof)
    grid.flat[0].set_ylim(bottom=0)  # sets the limit of all panels, which share the y axis
    for axes, x_label in zip(grid[-1], x_labels):
        axes.set_xlabel(x_label)
    for axes in grid[:, 0]:
        axes.set_ylabel(y_label)
    drawn = (line for axes in grid.flat for line in axes.get_lines() if line.get_ls() != "None")
    lines = {line.get_label(): line for line in drawn}
    labels = [*(PROVIDERS[name].label for name in STYLES), roof]
    handles = [lines[label] for label in labels if label in lines]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panel(axes: Axes, answers: Answers, roof: str) -> None:
    if names := [n for n in answers if isinstance(n, str)]:
        axes.xaxis.update_units(names)  # fix the order of names: a provider may lack some of them
        axes.tick_params(axis="x", labelsize=7)
    elif answers:
        axes.set_xscale("log", base=2)
    for provider, (colour, marker) in reversed(STYLES.items()):  # jaxnorm is drawn last, on top
        style = {"color": colour, "marker": marker, "ms": 4, "label": PROVIDERS[provider].label}
        points = [(n, each[provider].speed) for n, each in answers.items() if provider in each]
        _draw(axes, [p for p in points if p[0] not in figures.ODD], style | {"lw": 1.3})
        _draw(axes, [p for p in points if p[0] in figures.ODD], style | {"ls": "", "mfc": "none"})
    at_roof = [
        (n, next(iter(each.values())).roof_speed)
        for n, each in answers.items()
        if n not in figures.ODD
    ]
    _draw(axes, at_roof, {"color": "0.35", "ls": "--", "lw": 1.0, "label": roof})
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(axes: Axes, points: list[tuple[int, float]], style: dict[str, Any]) -> None:
    if points:
        axes.plot(*zip(*points), **style)
