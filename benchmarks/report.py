"""Rebuild plots and tables, and those of README.md and docs/results.md, from committed CSV files.

python -m benchmarks.report                 all of benchmarks/results/, and both pages
python -m benchmarks.report some/folder     one folder of results, and the pages if they show it
"""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import figures, page_tables, plots, report_tables, text
from benchmarks.blocks import BlockWorkload
from benchmarks.models import LAYERS
from benchmarks.providers import PROVIDERS
from benchmarks.results import OK, PROVIDER_COLUMNS, ROOT, Row, Table, latest, path, read
from benchmarks.suites import SUITES

RESULTS = ROOT / "benchmarks" / "results"
# Folders of the results that the README and the docs show. A suite is taken from the first folder
# that has it.
SHOWN = (RESULTS / "nvidia_h200", RESULTS / "nvidia_h100_80gb_hbm3")
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
PAGE_WIDTH = 120
PLOT_WIDTH = 125
PLOT_DTYPE = "bfloat16"
REPORT = "report.md"


class Results:
    """The valid rows of each suite, and the figures of the timed suites.

    If several folders have a suite, the first one counts.
    """

    def __init__(self, folder: Path, *others: Path) -> None:
        self.folder = folder
        self.rows: dict[str, list[Row]] = {}
        self.folders: dict[str, Path] = {}
        for name, suite in SUITES.items():
            found = ((each, Table(each, suite).rows()) for each in (folder, *others))
            self.folders[name], self.rows[name] = next(
                ((each, rows) for each, rows in found if rows), (folder, [])
            )
        self.kernels = figures.of(self.rows["kernels"])
        self.api = figures.of(self.rows["api"])
        self.blocks = figures.of(self.rows["blocks"], BlockWorkload)
        self.linear = figures.of_products(self.rows["linear"])
        self.training = [row for row in self.rows["training"] if row["status"] == OK]
        self.ahead = [*figures.ahead(self.kernels), *figures.ahead(self.api)]

    def plot(self, suite: str) -> Path:
        """Return the file of a suite's plot, beside its CSV."""
        return self.folders[suite] / f"{suite}_{PLOT_DTYPE}.png"

    @property
    def missing(self) -> list[str]:
        """Rows of the providers that were not installed, which give the reason."""
        file = path(self.folder, "providers")
        rows = latest(read(file, PROVIDER_COLUMNS), ["provider"]).values()
        return [
            f"{PROVIDERS[row['provider']].label} ({row['status']})"
            for row in rows
            if row["status"] != OK
        ]


def readme_section(found: Results) -> str:
    """Return the text between the README's markers: a table of training steps, and its source."""
    training, fitting = (
        [row for row in found.rows[suite] if row["provider"] in page_tables.COMPARED]
        for suite in ("training", "capacity")
    )
    steps = [row for row in training if row["layers"] == LAYERS[0]]
    if not steps:
        return ""
    parts = [
        page_tables.steps(steps, fitting),
        paragraph(
            "Remat: `dots` is `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, `block` "
            'is `jax.checkpoint` of each layer; "-": not measured.',
            "Times were measured; temp is XLA's memory plan of the same step, without arguments "
            "and results.",
            text.provenance(steps),
            "The largest batch was not run: it is the largest whose arguments, results and temp "
            "memory fit in 80 GB by XLA's memory plan.",
            text.provenance(fitting) if fitting else "",
        ),
    ]
    return "\n\n".join(parts)


def _image(found: Results, suite: str, page: Path) -> str:
    file = os.path.relpath(found.plot(suite), page.parent).replace(os.sep, "/")
    return f"![{_PLOTS[suite][0]}, {PLOT_DTYPE}]({file})"


def page_section(found: Results) -> str:
    """Return the text between the markers of docs/results.md: all suites, for the main shapes."""
    here = os.path.relpath(found.folder, PAGE.parent).replace(os.sep, "/")
    parts = [
        paragraph(text.provenance(found.rows["kernels"]), page_tables.who(found.kernels)),
        _image(found, "kernels", PAGE),
        paragraph(
            _ROOF,
            "(A backward loads twice as much as it stores, which is a little faster than a copy.)",
        ),
        page_tables.kernels(found.kernels),
        paragraph(
            "jaxnorm compared with the others: its speed over theirs, as median (least to "
            "greatest), and in how many cells they are more than 2 % ahead. Kernels are timed "
            "separately, forward and backward. Calls do both at once, through the library's own "
            "API and compiler."
        ),
        page_tables.comparisons(found.kernels, found.api),
        paragraph(
            text.notes(found.kernels),
            page_tables.where_ahead(figures.ahead(found.kernels)),
            f"[{REPORT}]({here}/{REPORT}) lists them, and every provider's GB/s; the CSV files "
            "beside it have every figure.",
        ),
    ]
    for name in _CAPTIONS:
        if found.rows[name]:
            parts += _captioned(found, name)
    return "\n\n".join(parts)


def _captioned(found: Results, name: str) -> list[str]:
    """Return a suite's caption, its table and, if the page shows it, its plot."""
    table = _SHORT_TABLES.get(name, _TABLES[name])
    plot = [_image(found, name, PAGE)] if name == "linear" else []
    return [paragraph(_CAPTIONS[name], text.provenance(found.rows[name])), *plot, table(found)]


def paragraph(*sentences: str) -> str:
    """Wrap sentences to a page's width."""
    return textwrap.fill(
        " ".join(sentences), PAGE_WIDTH, break_long_words=False, break_on_hyphens=False
    )


def full_report(found: Results) -> str:
    """Return the report as Markdown: all figures, and cells where a peer is faster or failed."""
    parts = ["# Benchmark results", "Made by `python -m benchmarks.report`."]
    if found.missing:
        parts.append(f"Not measured, as not installed: {'; '.join(found.missing)}.")
    for name, rows in found.rows.items():
        if rows:
            parts += [f"## {name}", text.provenance(rows), _TABLES[name](found)]
            parts += [_FOOTNOTES[name]] if name in _FOOTNOTES else []
    if notes := text.notes(found.kernels | found.blocks):
        parts.append(notes)
    if found.ahead:
        parts += ["## Where a peer is more than 2 % ahead", report_tables.ahead(found.ahead)]
    suites = ("kernels", "api", "blocks", "loss", "linear")
    timed = [row for name in suites for row in found.rows[name]]
    if any(row["status"] != OK for row in timed):
        parts += ["## What failed", report_tables.failed(timed)]
    return "\n\n".join(parts) + "\n"


_ROOF = (
    "The dashed line is a copy of as many bytes (the median of all copies). The table has the "
    "copy's time over the kernel's and, in brackets, the time of jaxnorm's plain JAX code over the "
    "kernel's."
)
_CAPTIONS = {
    "blocks": "Blocks: norms with the elementwise code around them, forward and backward in one "
    "call. jaxnorm's share of the speed of a copy of the least bytes, and its speed over others; "
    "medians over the shapes.",
    "linear": "A norm and the matmul after it: TFLOP/s, and in brackets the time of the matmul "
    "alone, which XLA tunes, over the provider's time.",
    "training": "A training step of models as people write them (benchmarks/language_models.py): "
    "AdamW, float32 parameters, bfloat16 activations, layers scanned (unless the row "
    "says unrolled), cuDNN's attention. Remat: a layer saves everything its backward needs "
    "(none), its matmuls (dots), or only its input (block). Matmuls are cuBLAS's own choice.",
    "capacity": "The largest batch whose step fits in 80 GB, by XLA's memory plan.",
    "stacks": "Many small norms: 24 pre-norm residual layers, from a call to its results, timed "
    "alternately with plain jnp. By default, XLA runs a small norm without a backward.",
}
_OF_STEPS = (report_tables.training, report_tables.bars)
_TABLES: dict[str, Callable[[Results], str]] = {
    "kernels": lambda found: report_tables.speeds(found.kernels, ("fwd", "bwd")),
    "api": lambda found: report_tables.speeds(found.api, ("fwd+bwd",)),
    "blocks": lambda found: report_tables.by_block(found.blocks),
    "loss": lambda found: report_tables.losses(found.rows["loss"]),
    "linear": lambda found: report_tables.linear(found.rows["linear"]),
    "training": lambda found: "\n\n".join(
        filter(None, (table(found.rows["training"]) for table in _OF_STEPS))
    ),
    "capacity": lambda found: report_tables.capacity(found.rows["capacity"]),
    "stacks": lambda found: report_tables.stacks(found.rows["stacks"]),
    "compile": lambda found: report_tables.compile_times(found.rows["compile"]),
    "cpu": lambda found: report_tables.on_cpu(found.rows["cpu"]),
}

# For each suite with plots: what they show, and the function that draws them.
_PLOTS: dict[str, tuple[str, Callable[..., None]]] = {
    "kernels": ("Bandwidth against the length of a row", plots.kernels),
    "linear": ("Speed of matmuls, alone and with a norm, against their size", plots.linear),
    "training": ("Time, temporary memory and losses of training steps", plots.training),
}
_SHORT_TABLES: dict[str, Callable[[Results], str]] = {  # for the docs' page
    "blocks": lambda found: report_tables.by_block(found.blocks, ("fwd+bwd",), medians=True),
    "linear": lambda found: page_tables.by_product(found.linear),
    "training": lambda found: report_tables.training(found.rows["training"]),
}
_FOOTNOTES = {
    "blocks": "`of a copy` is jaxnorm's share of the speed of a copy of the least bytes; the "
    "others are its speed over theirs. *: the program also copies, converts or transposes whole "
    "arrays (`extra_passes`); its time does not include copies that are not kernels.",
    "cpu": "jaxnorm's plain JAX and each peer, timed alternately in one process; `ratio` is the "
    "median of its time over the peer's in each turn. jnp's softmaxes are jax.nn's. Flax's "
    "LayerNorm computes E[x^2] - E[x]^2 unless it is two_pass. Losses are means.",
    "loss": "The roof of cross_entropy and of log_prob_and_entropy is a copy of the least bytes. "
    "The roof of linear_cross_entropy (the mean and the gradients of x and weight) is its three "
    "matmuls alone, that of linear_log_prob_and_entropy (one result per position) four; a provider "
    "that stores the logits needs three. The bar of these two is the time of the matmuls alone and "
    "1.15 times the time in which a copy moves 6 or 10 bytes per logit. `jaxnorm's speed` is over "
    "the provider's. `temp` is memory beside operands and results. Liger overwrites the logits "
    "with their gradient, and sums weight's gradient in weight's dtype; optax rounds the loss to "
    "the logits' dtype.",
    "compile": "The first call, forward and backward in one program, in --workers processes at the "
    "same time. Training steps use cuBLAS's own choice of matmuls. Without a GPU, programs are "
    "lowered for one but not compiled.",
    "linear": "M x K x N: x is (M, K), weight (K, N), which torch and QuACK store transposed, as "
    "torch.nn.Linear does. `of the product` is the time of jnp's matmul alone, in the same "
    "direction, over the provider's; `jaxnorm's speed` is over the provider's. XLA and QuACK tune "
    "the matmul; torch and torch.compile leave it to cuBLAS. `temp` is memory beside operands and "
    "results. The arrays of 256 x 256 x 256 stay in the GPU's cache.",
}


def with_section(file: Path, section: str) -> str:
    """Return the text of `file` with a new section between its markers, or raise ValueError."""
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file.name}: expected the markers {BEGIN} and {END} in it; add them")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def committed() -> list[Path]:
    """Return the folders of committed results."""
    return sorted({file.parent for file in RESULTS.glob("*/*.csv")})


def write(*folders: Path) -> list[Path]:
    """Write the report of each folder, and update the pages that show one of them."""
    written = []
    for folder in folders:
        found = Results(folder)
        written.append(folder / REPORT)
        written[-1].write_text(full_report(found), encoding="utf-8")
    if not {folder.resolve() for folder in folders}.isdisjoint(SHOWN):
        found = Results(*SHOWN)
        written += draw(found)
        for file, section in ((README, readme_section), (PAGE, page_section)):
            file.write_text(with_section(file, section(found)), encoding="utf-8")
            written.append(file)
    return written


def draw(found: Results) -> list[Path]:
    """Draw the plot of each suite that was measured, beside its CSV."""
    files = []
    for suite, (_, plot) in _PLOTS.items():
        if measured := getattr(found, suite):
            files.append(found.plot(suite))
            source = text.provenance(found.rows[suite])
            title = textwrap.fill(f"{PLOT_DTYPE}. {source}", PLOT_WIDTH)
            plot(measured, PLOT_DTYPE, title, files[-1])
    return files


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="(default: all that are committed)"
    )
    folders = parser.parse_args(argv).folders or committed()
    for folder in folders:
        if not folder.is_dir():
            parser.error(f"argument FOLDER: got {str(folder)!r}; expected a folder with CSV files")
    for file in write(*folders):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
