"""Tables and sentences that are in README.md or docs/results.md, but not in report.md."""

from collections.abc import Iterable, Sequence

from benchmarks import figures, text, workloads
from benchmarks.figures import Ahead, Comparison, Figure, Figures
from benchmarks.models import PLAIN
from benchmarks.providers import PROVIDERS
from benchmarks.results import OK, Row

MAIN = [(32768, 1024), (32768, 4096), (8192, 16384), (4096, 65536)]
# The variants of models that the README compares.
COMPARED = (PLAIN, "jaxnorm-products")
# The minimum memory traffic, in bytes, of a workload that counts as large: about twice the L2 cache
# of an H200.
LARGE = 100e6


def who(measured: Figures) -> str:
    """Return sentences that name the measured providers, and jaxnorm's timed implementation."""
    there = {name for answers in measured.values() for name in answers}
    labels = ", ".join(PROVIDERS[name].label for name in PROVIDERS if name in there)
    if "jaxnorm" in there:
        by_name = any(
            "mosaic" in answers and "jaxnorm" not in answers for answers in measured.values()
        )
        return f"Measured: {labels}. `jaxnorm` is the implementation that runs by default" + (
            ". The forward pass of norms of up to 4 MiB is an exception: the default runs XLA's "
            "code, but the kernel's time is shown."
            if by_name
            else "."
        )
    return (
        f"Measured: {labels}. Figures are those of the kernels, requested by name. If they are "
        "slower than XLA, the default leaves the call to XLA."
    )


def kernels(measured: Figures) -> str:
    """Return a table of jaxnorm's fraction of the roofline bound, and its speedup over XLA.

    The table has a row for each operation and direction.
    """
    columns = [(dtype, shape) for dtype in text.DTYPES for shape in MAIN]

    def cell(op: str, direction: str, dtype: str, shape: workloads.Shape) -> str:
        answers = measured.get((op, direction, *shape, dtype, dtype), {})
        mine, faster = figures.own(answers), figures.times_faster(answers, "xla")
        if mine is None:
            return "-"
        return f"{mine.roof:.2f}" if faster is None else f"{mine.roof:.2f} ({faster:.1f}x)"

    header = ["", *(f"{text.DTYPES[dtype]}, {rows} x {cols}" for dtype, (rows, cols) in columns)]
    return text.table(
        header,
        (
            [f"{op} {text.DIRECTIONS[way]}", *(cell(op, way, *column) for column in columns)]
            for op in workloads.OPERATIONS
            for way in ("fwd", "bwd")
        ),
    )


def comparisons(*suites: Figures) -> str:
    """Return a table that compares jaxnorm with every other provider.

    The table has a row for each provider and two columns for each suite.
    """
    rows = []
    for name, provider in PROVIDERS.items():
        compared = [figures.comparison(measured, name) for measured in suites]
        if name not in figures.OWN and any(compared):
            rows.append([provider.label, *(cell for it in compared for cell in _compared(it))])
    header = [f"{what}: {column}" for what in ("kernels", "calls") for column in ("speed", "ahead")]
    return text.table(["against", *header], rows)


def where_ahead(found: Iterable[Ahead]) -> str:
    """Return sentences that say in how many cells other libraries' kernels are faster."""
    by_cell: dict[figures.Question, float] = {}
    for each in found:
        if PROVIDERS[each.peer].adapter != PROVIDERS["jaxnorm"].adapter:
            by_cell[each.question] = max(each.ratio, by_cell.get(each.question, 1.0))
    large = [ratio for cell, ratio in by_cell.items() if figures.bytes_of(cell) >= LARGE]
    most = (
        f", and kernels of other libraries are faster by at most {100 * (max(large) - 1):.0f} %"
        if large
        else ""
    )
    return (
        f"In {len(by_cell)} cells, kernels of other libraries are more than "
        f"{100 * (figures.AHEAD - 1):.0f} % faster than jaxnorm's. "
        f"In {len(by_cell) - len(large)} of these cells, the operation transfers less than "
        f"{LARGE / 1e6:.0f} MB, so a part of its arrays stays in the GPU's cache. In the other "
        f"{len(large)} cells, the operation transfers more{most}."
    )


def _compared(it: Comparison | None) -> tuple[str, str]:
    if it is None:
        return "-", "-"
    speed = f"{it.median:.2f}x ({it.least:.2f} to {it.greatest:.1f})"
    return speed, f"{it.ahead} of {it.cells}"


def steps(rows: Sequence[Row], fitting: Sequence[Row]) -> str:
    """Return a table of the time, temp memory and largest batch of training steps.

    It compares plain JAX with the model variant that uses all of jaxnorm's functions. Steps whose
    largest batch is unknown are left out.
    """
    measured = figures.steps(row for row in rows if row["status"] == OK)
    batches = {asked: row["batch_in_80gb"] for asked, row in figures.steps(fitting).items()}

    def cell(asked: tuple[str, ...], column: str) -> str:
        row = measured.get(asked)
        if column == "batch_in_80gb":
            return batches.get(asked) or "-"
        if row is None:
            return "-"
        return f"{float(row['ms']):.1f}" if column == "ms" else text.gigabytes(row[column])

    body = []
    for step, row in {asked[:-1]: row for asked, row in measured.items()}.items():
        if any((*step, variant) in batches for variant in COMPARED):
            columns = ("ms", "temp_bytes", "batch_in_80gb")
            cells = [cell((*step, variant), c) for c in columns for variant in COMPARED]
            body.append([text.model(row), row["remat"], *cells])
    figures_of_steps = ("ms", "temp GB", "largest batch")
    header = [f"{what}, {which}" for what in figures_of_steps for which in ("without", "jaxnorm")]
    return text.table(["model, batch x length", "remat", *header], body)


def by_product(measured: Figures) -> str:
    """Return a table of TFLOP/s of a norm and the matmul after it, per dtype and direction."""
    asked = dict.fromkeys(
        (direction, dtype) for op, direction, _, dtype in measured if op == "rms_norm_linear"
    )
    return "\n\n".join(_by_product(measured, *each) for each in asked)


def _by_product(measured: Figures, direction: str, dtype: str) -> str:
    found = {
        shape: answers
        for (op, way, shape, its_dtype), answers in measured.items()
        if (op, way, its_dtype) == ("rms_norm_linear", direction, dtype)
    }
    there = [name for name in PROVIDERS if any(name in answers for answers in found.values())]
    body = []
    for shape, answers in found.items():
        alone = measured.get(("product", direction, shape, dtype), {}).get("jnp")
        cells = ["-" if alone is None else text.digits(alone.speed)]
        for figure in map(answers.get, there):
            cells.append("-" if figure is None else _speed_and_share(figure))
        body.append([shape.replace("x", " x "), *cells])
    title = f"M x K x N, {text.DTYPES[dtype]}, {text.DIRECTIONS[direction]}"
    labels = (PROVIDERS[name].label for name in there)
    return text.table([title, "matmul alone", *labels], body)


def _speed_and_share(figure: Figure) -> str:
    return f"{text.digits(figure.speed)} ({text.share(figure)})"
