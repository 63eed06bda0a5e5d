"""The Markdown tables of results, and the sentences that go with them."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks import blocks, figures, workloads
from benchmarks.blocks import BLOCKS
from benchmarks.figures import Ahead, Comparison, Figure, Figures
from benchmarks.losses import LossWorkload
from benchmarks.models import LOSS_STEPS, MODELS, PLAIN, VARIANTS
from benchmarks.providers import PROVIDERS
from benchmarks.results import OK, Row

MAIN = [(32768, 1024), (32768, 4096), (8192, 16384), (4096, 65536)]
_SHORT = {"bfloat16": "bf16", "float32": "f32"}
_BLOCK_DTYPES = {**_SHORT, "mixed": "bf16 beside an f32 residual stream"}
_LONG = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
GB = 1e9
MIB = 2**20
LARGE = 100e6  # bytes: twice an H200's cache


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def dtypes(x: str, y: str) -> str:
    return _SHORT[x] if x == y else f"{_SHORT[x]} to {_SHORT[y]}"


def provenance(rows: Sequence[Row]) -> str:
    """Where figures come from: device, software, commits."""

    def values(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows))

    packages = sorted({package for row in rows for package in row["software"].split(" + ")})
    return (
        f"One {values('device')}; {', '.join(packages)}; jaxnorm's kernels of commit "
        f"{values('commit')}."
    )


def who(measured: Figures) -> str:
    """Which providers were measured, and which of them stands for jaxnorm."""
    there = {name for answers in measured.values() for name in answers}
    labels = ", ".join(PROVIDERS[name].label for name in PROVIDERS if name in there)
    if "jaxnorm" in there:
        by_name = any(
            "mosaic" in answers and "jaxnorm" not in answers for answers in measured.values()
        )
        return f"Measured: {labels}. jaxnorm is what a call gets by default" + (
            "; of a forward norm of up to 4 MiB its kernel, for which the default takes XLA's code."
            if by_name
            else "."
        )
    return (
        f"Measured: {labels}. Figures are of the kernels, asked for by name; where they are slower "
        "than XLA the default leaves the call to XLA."
    )


def notes(measured: Figures) -> str:
    """What has to be known of the providers that were measured."""
    there = {name for answers in measured.values() for name in answers}
    return " ".join(p.note for name, p in PROVIDERS.items() if name in there and p.note)


def kernels(measured: Figures) -> str:
    """For each operation and direction: the share of the roof, and how many times XLA's speed."""
    columns = [(dtype, shape) for dtype in _SHORT for shape in MAIN]

    def cell(op: str, direction: str, dtype: str, shape: workloads.Shape) -> str:
        answers = measured.get((op, direction, *shape, dtype, dtype), {})
        mine, faster = figures.own(answers), figures.times_faster(answers, "xla")
        if mine is None:
            return "-"
        return f"{mine.roof:.2f}" if faster is None else f"{mine.roof:.2f} ({faster:.1f}x)"

    header = ["", *(f"{_SHORT[dtype]}, {rows} x {cols}" for dtype, (rows, cols) in columns)]
    return markdown(
        header,
        (
            [f"{op} {_LONG[direction]}", *(cell(op, direction, *column) for column in columns)]
            for op in workloads.OPERATIONS
            for direction in ("fwd", "bwd")
        ),
    )


def speeds(measured: Figures, directions: Sequence[str]) -> str:
    """GB/s of every provider by N: a table for each of the dtypes and directions measured."""
    each = (
        _speeds(measured, direction, x, y) for x, y in workloads.DTYPES for direction in directions
    )
    return "\n\n".join(filter(None, each))


def _speeds(measured: Figures, direction: str, x: str, y: str) -> str:
    by_op = {op: figures.along_n(measured, op, direction, x, y) for op in workloads.OPERATIONS}
    columns = sorted({n for answers in by_op.values() for n in answers})
    if not columns:
        return ""
    rows = []
    for op, answers in by_op.items():
        for provider in PROVIDERS:
            found = [answers.get(n, {}).get(provider) for n in columns]
            if any(found):
                cells = ["-" if f is None else f"{f.speed:.0f}" for f in found]
                rows.append([f"{op}: {PROVIDERS[provider].label}", *cells])
    header = f"GB/s, {dtypes(x, y)}, {_LONG[direction]}"
    return markdown([header, *(f"N={n}" for n in columns)], rows)


def ahead(found: Sequence[Ahead]) -> str:
    """Every cell where a peer is ahead, the widest margins first."""
    rows = []
    for each in sorted(found, key=lambda a: -a.ratio):
        op, direction, m, n, x, y = each.question
        name = f"{op} {_LONG[direction]}, {m} x {n}, {dtypes(x, y)}"
        rows.append([name, PROVIDERS[each.peer].label, f"{each.ratio:.2f}"])
    return markdown(["cell", "ahead", "jaxnorm's time over its"], rows)


def comparisons(*suites: Figures) -> str:
    """A row for each peer, and two columns for each of `suites`: how jaxnorm compares with it."""
    rows = []
    for name, provider in PROVIDERS.items():
        compared = [figures.comparison(measured, name) for measured in suites]
        if name not in figures.OWN and any(compared):
            rows.append([provider.label, *(text for it in compared for text in _compared(it))])
    header = [f"{what}: {column}" for what in ("kernels", "calls") for column in ("speed", "ahead")]
    return markdown(["against", *header], rows)


def where_ahead(found: Iterable[Ahead]) -> str:
    """One sentence: on which arrays kernels of other libraries are ahead."""
    by_cell: dict[figures.Question, float] = {}
    for each in found:
        if PROVIDERS[each.peer].adapter != PROVIDERS["jaxnorm"].adapter:
            by_cell[each.question] = max(each.ratio, by_cell.get(each.question, 1.0))
    large = [ratio for cell, ratio in by_cell.items() if figures.bytes_of(cell) >= LARGE]
    most = f", by {100 * (max(large) - 1):.0f} % at most" if large else ""
    return (
        f"Kernels of other libraries are ahead in {len(by_cell)} cells: in "
        f"{len(by_cell) - len(large)} where less than {LARGE / 1e6:.0f} MB move, part of which "
        f"stays in the GPU's cache, and in {len(large)} others{most}."
    )


def _compared(it: Comparison | None) -> tuple[str, str]:
    if it is None:
        return "-", "-"
    speed = f"{it.median:.2f}x ({it.least:.2f} to {it.greatest:.1f})"
    return speed, f"{it.ahead} of {it.cells}"


def training(rows: Sequence[Row]) -> str:
    """Steps of models: times and memory, also over plain jnp's, and losses."""
    measured = {_step(row): row for row in rows}
    body = []
    for (model, remat, dtype, batch, variant), row in measured.items():
        cells = [f"{model}, {batch} x {MODELS[model].seq}", remat, VARIANTS[variant]]
        if row["status"] != OK:
            body.append([*cells, row["status"], *[""] * 7])
            continue
        plain = measured.get((model, remat, dtype, batch, PLAIN), {})
        first_and_last = [float(row[f"loss_{step}"]) for step in (LOSS_STEPS[0], LOSS_STEPS[-1])]
        body.append(
            [
                *cells,
                f"{float(row['ms']):.1f}",
                _ratio(row, plain, "ms"),
                row["kernels_ms"] or "-",
                _ratio(row, plain, "kernels_ms"),
                f"{float(row['temp_bytes']) / GB:.1f}",
                _ratio(row, plain, "temp_bytes"),
                f"{float(row['peak_bytes']) / GB:.1f}",
                " to ".join(f"{loss:.3f}" for loss in first_and_last),
            ]
        )
    header = ["ms/step", "of jnp's", "kernels ms", "of jnp's", "temp GB", "of jnp's", "peak GB"]
    losses = f"loss, step {LOSS_STEPS[0]} to {LOSS_STEPS[-1]}"
    table = markdown(["model, batch x length", "remat", "norms and loss", *header, losses], body)
    said = ", ".join(map(str, LOSS_STEPS))
    return f"{table}\n\nAt steps {said} losses are at most {_apart(measured):.4f} nats from jnp's."


def _apart(measured: Mapping[tuple[str, ...], Row]) -> float:
    """How far losses of a model with jaxnorm's functions are from plain jnp's, at most."""
    pairs = [
        (row, measured.get((*asked, PLAIN)))
        for (*asked, _), row in measured.items()
        if row["status"] == OK
    ]
    return max(
        (
            abs(float(row[name]) - float(plain[name]))
            for row, plain in pairs
            if plain is not None and plain["status"] == OK
            for name in (f"loss_{step}" for step in LOSS_STEPS)
        ),
        default=0.0,
    )


def capacity(rows: Sequence[Row]) -> str:
    """The largest batch of each step that fits: a column for each variant."""
    found = {
        (row["model"], row["remat"], row["provider"]): row["batch_in_80gb"] or row["status"]
        for row in rows
    }
    body = [
        [
            f"{model}, length {MODELS[model].seq}",
            remat,
            *(found.get((model, remat, variant), "-") for variant in VARIANTS),
        ]
        for model, remat in dict.fromkeys(asked[:2] for asked in found)
    ]
    return markdown(["model", "remat", *VARIANTS.values()], body)


def step_times(rows: Sequence[Row]) -> str:
    """Milliseconds of steps: a column for each variant, and how much that is of plain jnp's."""

    def cell(row: Row, plain: Row) -> str:
        time = f"{float(row['ms']):.1f}"
        return time if row is plain else f"{time} ({_ratio(row, plain, 'ms')})"

    return _by_variant(rows, cell)


def step_memory(rows: Sequence[Row], fitting: Sequence[Row]) -> str:
    """Temp gigabytes of steps and the largest batch that fits: a column for each variant."""
    batches = {(r["model"], r["remat"], r["provider"]): r["batch_in_80gb"] for r in fitting}

    def cell(row: Row, plain: Row) -> str:
        del plain
        batch = batches.get((row["model"], row["remat"], row["provider"]), "-")
        return f"{float(row['temp_bytes']) / GB:.1f} ({batch})"

    return _by_variant(rows, cell)


def _by_variant(rows: Sequence[Row], cell: Callable[[Row, Row], str]) -> str:
    measured = {_step(row): row for row in rows if row["status"] == OK}
    body = []
    for asked in dict.fromkeys(tuple(step[:-1]) for step in measured):
        model, remat, _, batch = asked
        plain = measured.get((*asked, PLAIN))
        found = [measured.get((*asked, variant)) for variant in VARIANTS]
        cells = [cell(row, plain) if row and plain else "-" for row in found]
        body.append([f"{model}, {batch} x {MODELS[model].seq}", remat, *cells])
    return markdown(["model, batch x length", "remat", *VARIANTS.values()], body)


def _step(row: Row) -> tuple[str, str, str, str, str]:
    return row["model"], row["remat"], row["dtype"], row["batch"], row["provider"]


def _ratio(row: Row, plain: Mapping[str, str], column: str) -> str:
    """Of a column, over plain jnp's."""
    if not row[column] or not plain.get(column):
        return "-"
    return f"{float(row[column]) / float(plain[column]):.2f}"


def stacks(rows: Sequence[Row]) -> str:
    """Times of stacks of layers: jaxnorm's, plain jnp's, and one over the other."""
    body = []
    for row in rows:
        name = f"{row['op']} {_LONG[row['direction']]}, {row['rows']} x {row['cols']}"
        cells = [f"{name}, {_SHORT[row['dtype']]}", PROVIDERS[row["provider"]].label]
        if row["status"] != OK:
            body.append([*cells, row["status"], "", "", "", ""])
            continue
        ms, jnp_ms = float(row["ms"]), float(row["jnp_ms"])
        times = [f"{ms:.3f}", f"{jnp_ms:.3f}", f"{ms / jnp_ms:.3f}"]
        body.append([*cells, *times, row["kernels_ms"] or "-", row["jnp_kernels_ms"] or "-"])
    header = ["cell", "provider", "ms", "jnp ms", "ms / jnp ms", "kernels ms", "jnp kernels ms"]
    return markdown(header, body)


def by_block(
    measured: Figures, directions: Sequence[str] = blocks.DIRECTIONS, *, medians: bool = False
) -> str:
    """A table for each dtype and direction: jaxnorm's share of a copy, and its speed over others.

    Block by block the shapes, then their median; with `medians` that alone.
    """
    each = (
        _by_block(measured, direction, dtype, medians)
        for dtype in blocks.DTYPES
        for direction in directions
    )
    return "\n\n".join(filter(None, each))


def _by_block(measured: Figures, direction: str, dtype: str, medians: bool) -> str:
    found = {op: figures.along_shapes(measured, op, direction, dtype) for op in BLOCKS}
    there = {name for shapes in found.values() for answers in shapes.values() for name in answers}
    peers = [name for name in PROVIDERS if name in there and name not in figures.OWN]
    body = []
    for op, shapes in found.items():
        rows = [
            (shape, answers, mine)
            for shape, answers in shapes.items()
            if (mine := figures.own(answers)) is not None
        ]
        for shape, answers, mine in rows if not medians else ():
            speeds = [_speed(mine, answers.get(peer)) for peer in peers]
            body.append(
                [f"{op}, {shape.replace('x', ' x ')}", f"{mine.roof:.2f}{_star(mine)}", *speeds]
            )
        if rows:
            roof = statistics.median(mine.roof for _, _, mine in rows)
            ratios = [
                [answers[peer].us / mine.us for _, answers, mine in rows if peer in answers]
                for peer in peers
            ]
            speeds = [f"{statistics.median(r):.2f}x" if r else "-" for r in ratios]
            body.append([f"{op}, median", f"{roof:.2f}", *speeds])
    if not body:
        return ""
    title = f"{_BLOCK_DTYPES[dtype]}, {_LONG[direction]}"
    against = (f"against {PROVIDERS[peer].label}" for peer in peers)
    return markdown([title, "of a copy", *against], body)


def _speed(mine: Figure, other: Figure | None) -> str:
    return "-" if other is None else f"{other.us / mine.us:.2f}x{_star(other)}"


def _star(figure: Figure) -> str:
    """Where the program also passes over whole arrays without computing."""
    return "*" if figure.extra_passes else ""


def losses(rows: Sequence[Row]) -> str:
    """Time, share of the roof, jaxnorm's speed over it, and memory of each provider, by cell."""
    of_copies = figures.of((row for row in rows if row["roof"]), LossWorkload)

    def roof(cell: figures.Question, answers: Mapping[str, Row], name: str) -> str:
        if cell in of_copies:
            return f"{of_copies[cell][name].roof:.2f}"
        if "products" not in answers:
            return "-"
        return f"{float(answers['products']['us']) / float(answers[name]['us']):.2f}"

    return _by_shape(rows, {"of the roof": roof})


def linear(rows: Sequence[Row]) -> str:
    """As `losses`, with TFLOP/s, and the share of the product alone."""
    found = figures.of_products(rows)

    def tflops(cell: figures.Question, answers: Mapping[str, Row], name: str) -> str:
        return _digits(found[cell][name].speed)

    def of_product(cell: figures.Question, answers: Mapping[str, Row], name: str) -> str:
        return _share(found[cell][name])

    return _by_shape(rows, {"TFLOP/s": tflops, "of the product": of_product})


def _digits(value: float) -> str:
    """With as many decimals, two at most, as make three digits."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _share(figure: Figure) -> str:
    return "-" if math.isnan(figure.roof) else f"{figure.roof:.2f}"


def _by_shape(rows: Sequence[Row], columns: Mapping[str, Callable[..., str]]) -> str:
    """The providers of a cell one after the other; `columns` beside time, speed and memory.

    A column is a function of the cell, the rows of its providers, and a provider.
    """
    by_cell: dict[figures.Question, dict[str, Row]] = {}
    for row in rows:
        if row["status"] == OK:
            cell = (row["op"], row["direction"], row["shape"], row["dtype"])
            by_cell.setdefault(cell, {})[row["provider"]] = row
    body = []
    for cell, answers in by_cell.items():
        op, direction, shape, dtype = cell
        us = {name: float(row["us"]) for name, row in answers.items()}
        mine = next((us[name] for name in figures.OWN if name in us), None)
        for name in (name for name in PROVIDERS if name in answers):
            temp = answers[name]["temp_bytes"]
            body.append(
                [
                    f"{op} {_LONG[direction]}, {shape.replace('x', ' x ')}, {_SHORT[dtype]}",
                    PROVIDERS[name].label,
                    _digits(us[name]),
                    *(column(cell, answers, name) for column in columns.values()),
                    "-" if mine is None else f"{us[name] / mine:.2f}x",
                    f"{int(temp) / MIB:.0f}" if temp else "-",
                ]
            )
    return markdown(["cell", "provider", "us", *columns, "jaxnorm's speed", "temp MiB"], body)


def by_product(measured: Figures) -> str:
    """TFLOP/s of a norm with its product: a table for each dtype and direction."""
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
        cells = ["-" if alone is None else _digits(alone.speed)]
        for figure in map(answers.get, there):
            cells.append("-" if figure is None else f"{_digits(figure.speed)} ({_share(figure)})")
        body.append([shape.replace("x", " x "), *cells])
    title = f"M x K x N, {_SHORT[dtype]}, {_LONG[direction]}"
    labels = (PROVIDERS[name].label for name in there)
    return markdown([title, "product alone", *labels], body)


def _by_cell(rows: Sequence[Row], header: Sequence[str], columns: Sequence[str]) -> str:
    """Rows of a timed suite, the providers of a cell one after the other."""
    order = list(PROVIDERS)
    body = [
        [
            f"{row['op']} {_LONG[row['direction']]}, {row['rows']} x {row['cols']}, "
            f"{dtypes(row['x_dtype'], row['y_dtype'])}",
            PROVIDERS[row["provider"]].label,
            *(row[column] or "-" for column in columns),
        ]
        for row in sorted(rows, key=lambda row: order.index(row["provider"]))
        if row["status"] == OK
    ]
    return markdown(["cell", "provider", *header], sorted(body, key=lambda cells: cells[0]))


def latency(rows: Sequence[Row]) -> str:
    """Microseconds: of the kernels, and from the host."""
    return _by_cell(rows, ["kernels us", "from the host us"], ["us", "wall_us"])


def accuracy(rows: Sequence[Row]) -> str:
    """Relative errors of the gradients against float64."""
    names = ("dx", "dscale", "dbias")
    return _by_cell(rows, names, [f"{name}_error" for name in names])


def failed(rows: Iterable[Row]) -> str:
    """What providers could not do: how many cells for each reason."""
    return markdown(
        ["provider: reason", "cells"],
        (
            [f"{PROVIDERS[provider].label}: {status.replace('|', '/')}", str(count)]
            for (provider, status), count in figures.failures(rows).items()
        ),
    )
