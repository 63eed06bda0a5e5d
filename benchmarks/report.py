"""Rebuild the plots, report.md and the two pages README.md and docs/results.md from CSV files.

Only some sections of the two pages are generated.

python -m benchmarks.report                 all folders of benchmarks/results/, and both pages
python -m benchmarks.report some/folder     one folder; also both pages if they show its results
"""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import figures, page_tables, plots, report_tables, text
from benchmarks.blocks import BlockWorkload
from benchmarks.models import LAYERS, PLAIN
from benchmarks.providers import PROVIDERS
from benchmarks.results import OK, PROVIDER_COLUMNS, ROOT, Row, Table, latest, path, read
from benchmarks.suites import SUITES

RESULTS = ROOT / "benchmarks" / "results"
# Folders of the results that README.md and docs/results.md show. The results of a suite are taken
# from the first of these folders that has results of this suite.
SHOWN = (RESULTS / "nvidia_h200", RESULTS / "nvidia_h100_80gb_hbm3")
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
PAGE_WIDTH = 120
PLOT_WIDTH = 125
PLOT_DTYPE = "bfloat16"
REPORT = "report.md"


class Results:
    """The results of each suite: the valid rows of its CSV file, and times and speeds.

    If several folders have results of a suite, the first of these folders is used.
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
        """Return the path of a suite's plot, which is in the folder of its CSV file."""
        return self.folders[suite] / f"{suite}_{PLOT_DTYPE}.png"

    @property
    def missing(self) -> list[str]:
        """Labels of the providers that were not installed, with the reason."""
        file = path(self.folder, "providers")
        rows = latest(read(file, PROVIDER_COLUMNS), ["provider"]).values()
        return [
            f"{PROVIDERS[row['provider']].label} ({row['status']})"
            for row in rows
            if row["status"] != OK
        ]


def readme_section(found: Results) -> str:
    """Return the text between the README's markers: a table of training steps, and notes on it."""
    training, fitting = (
        [row for row in found.rows[suite] if row["provider"] in page_tables.COMPARED]
        for suite in ("training", "capacity")
    )
    steps = [row for row in training if row["layers"] == LAYERS[0]]
    if not steps:
        return ""
    with_jaxnorm = [row for row in fitting if row["provider"] != PLAIN]
    parts = [
        page_tables.steps(steps, fitting),
        paragraph(
            "Remat: `dots` is `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`, `block` "
            'is `jax.checkpoint` of each layer; "-": not measured.',
            "Temp is the step's temporary memory by XLA's memory plan, without arguments and "
            "results.",
            f"Times and temp are from {text.source(steps)}.",
            "The largest batch is the largest whose arguments, results and temp memory fit in "
            "80 GB by XLA's memory plan.",
            "The steps with the largest batches were not run, but only compiled, for "
            f"{text.source(with_jaxnorm)}."
            if with_jaxnorm
            else "",
        ),
    ]
    return "\n\n".join(parts)


def _image(found: Results, suite: str, page: Path) -> str:
    file = os.path.relpath(found.plot(suite), page.parent).replace(os.sep, "/")
    return f"![{_PLOTS[suite][0]}, {PLOT_DTYPE}]({file})"


def page_section(found: Results) -> str:
    """Return the text between the markers of docs/results.md: the main results of all suites."""
    here = os.path.relpath(found.folder, PAGE.parent).replace(os.sep, "/")
    parts = [
        paragraph(
            f"The figures are from {text.source(found.rows['kernels'])}.",
            page_tables.who(found.kernels),
        ),
        _image(found, "kernels", PAGE),
        paragraph(
            _ROOF,
            "The first ratio can be above 1. A copy stores as many bytes as it loads, but a "
            "backward pass loads twice as many bytes as it stores, and loading is a little faster "
            "than storing.",
        ),
        page_tables.kernels(found.kernels),
        paragraph(
            "The next table compares jaxnorm with the others. `speed` is the other library's time "
            "divided by jaxnorm's, as median (least to greatest): above 1, jaxnorm is faster. "
            "`ahead` is the number of cells in which the other library is more than 2 % faster "
            "than jaxnorm. In `kernels`, forward "
            "and backward are timed separately. In `calls`, they are timed in one call, through "
            "the library's own API and compiler."
        ),
        page_tables.comparisons(found.kernels, found.api),
        *([paragraph(notes)] if (notes := text.notes(found.kernels)) else []),
        paragraph(
            page_tables.where_ahead(figures.ahead(found.kernels)),
            f"[{REPORT}]({here}/{REPORT}) lists these cells, and the GB/s of every library; the "
            "CSV files in its folder have all figures.",
        ),
    ]
    for name in _CAPTIONS:
        if found.rows[name]:
            parts += _captioned(found, name)
    return "\n\n".join(parts)


def _captioned(found: Results, name: str) -> list[str]:
    """Return a list of Markdown texts: a suite's caption, its plot (if any), and its table.

    docs/results.md shows the plots of only some suites.
    """
    table = _SHORT_TABLES.get(name, _TABLES[name])
    plot = [_image(found, name, PAGE)] if name == "linear" else []
    source = f"The figures are from {text.source(found.rows[name])}."
    return [paragraph(_CAPTIONS[name], source), *plot, table(found)]


def paragraph(*sentences: str) -> str:
    """Return the sentences as a paragraph with lines of at most `PAGE_WIDTH` characters."""
    return textwrap.fill(
        " ".join(sentences), PAGE_WIDTH, break_long_words=False, break_on_hyphens=False
    )


def full_report(found: Results) -> str:
    """Return report.md: all speeds, and the cells in which another provider is faster or failed."""
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
    "In the plot, the dashed line is the median bandwidth of copies that transfer the same number "
    "of bytes as the kernels. Each cell of the table has two ratios. The first is the time of such "
    "a copy divided by the time of jaxnorm's kernel. The second, in brackets, is the time of "
    "jaxnorm's plain JAX code divided by the time of jaxnorm's kernel."
)
_CAPTIONS = {
    "blocks": "Blocks are norms and softmaxes with the elementwise operations of a model before or "
    "after them, forward and backward in one call. `of a copy` is t_copy / t_jaxnorm, where "
    "t_copy is the time of a copy that transfers the smallest number of bytes that the function "
    "has to load and store. `against` is the other library's time divided by jaxnorm's. Both are "
    "medians over the shapes.",
    "linear": "A norm and the matmul after it, in TFLOP/s. In brackets: the time of XLA's matmul "
    "without a norm, divided by the time of norm and matmul.",
    "training": "Training steps of models (benchmarks/language_models.py) with AdamW, float32 "
    "parameters, bfloat16 activations and cuDNN's attention. Layers are scanned, except in rows "
    'with the word "unrolled". The column "remat" shows what a layer saves for its backward pass: '
    'with "none", all that its backward pass needs; with "dots", the results of its matmuls; with '
    '"block", only its input. '
    "cuBLAS chooses the algorithms of matmuls.",
    "capacity": "The largest batch for which a training step fits in 80 GB, by XLA's memory plan. "
    "The steps were compiled, not run.",
    "stacks": "Programs with many small norms: 24 pre-norm residual layers. A time is measured "
    "from the call of the program until its results are ready. Calls of the program alternate "
    "with calls of the same program in plain jnp. By default, jaxnorm runs XLA's code for norms "
    "that are not differentiated, and for both passes of norms of at most 256 KiB.",
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

# Maps each suite that has a plot to two things: the title of the plot, and the function that draws
# the plot.
_PLOTS: dict[str, tuple[str, Callable[..., None]]] = {
    "kernels": ("Bandwidth against the length of a row", plots.kernels),
    "linear": ("Speed of matmuls, alone and with a norm, against their size", plots.linear),
    "training": ("Time, temporary memory and losses of training steps", plots.training),
}
_SHORT_TABLES: dict[str, Callable[[Results], str]] = {  # used in docs/results.md
    "blocks": lambda found: report_tables.by_block(found.blocks, ("fwd+bwd",), medians=True),
    "linear": lambda found: page_tables.by_product(found.linear),
    "training": lambda found: report_tables.training(found.rows["training"]),
}
_FOOTNOTES = {
    "blocks": "`of a copy` is t_copy / t_jaxnorm, where t_copy is the time of a copy that "
    "transfers the smallest number of bytes that the function has to load and store. The other "
    "columns have the other library's time divided by jaxnorm's. *: the program also copies, "
    "converts or transposes whole arrays (`extra_passes`); its time does not include copies that "
    "are not kernels.",
    "cpu": "jaxnorm's plain JAX code and each other library, timed alternately in one process. "
    "`ratio` is the median over the turns of jaxnorm's time divided by the other's. jnp's "
    "softmaxes are those of jax.nn. Flax's LayerNorm computes the variance as E[x^2] - E[x]^2, "
    "except in two_pass. Losses are means.",
    "loss": "The roof of a function of logits is a copy of the least bytes. The roof of "
    "linear_cross_entropy (the mean and the gradients of x and weight) is its three matmuls alone, "
    "that of linear_kl_divergence and linear_log_prob_and_entropy (one result per position) four; "
    "for the latter, a provider that stores the logits needs three. The row `matrix products and "
    "the bytes of the logits` has the time limit for a linear function. It is the time of its "
    "matmuls alone, plus 1.15 times the time in which a copy transfers the bytes of the logits "
    "that are loaded and stored between the matmuls: 6 bytes per logit for linear_cross_entropy, "
    "10 for the others. "
    "`jaxnorm's speed` is over the provider's. `temp` is memory beside operands and results. Liger "
    "overwrites the logits with their gradient, and sums weight's gradient in weight's dtype; "
    "optax rounds the loss to the logits' dtype.",
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
    """Return the text of `file` with `section` between its markers.

    Raise ValueError if the file does not have the markers.
    """
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file.name}: expected the markers {BEGIN} and {END} in it; add them")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def committed() -> list[Path]:
    """Return the folders of committed results."""
    return sorted({file.parent for file in RESULTS.glob("*/*.csv")})


def write(*folders: Path) -> list[Path]:
    """Write the report of each folder, and update the pages that show one of the folders."""
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
    """Write the plot of each suite that was measured, in the folder of its CSV file."""
    files = []
    for suite, (shows, plot) in _PLOTS.items():
        if measured := getattr(found, suite):
            files.append(found.plot(suite))
            source = text.provenance(found.rows[suite])
            title = textwrap.fill(f"{shows}, {PLOT_DTYPE}. {source}", PLOT_WIDTH)
            plot(measured, PLOT_DTYPE, title, files[-1])
    return files


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="FOLDER",
        help="folder of results (default: all committed folders)",
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
