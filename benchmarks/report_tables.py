"""The tables of report.md, some of which docs/results.md also shows."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks import blocks, figures, text, workloads
from benchmarks.bars import BARS
from benchmarks.blocks import BLOCKS
from benchmarks.compile_times import LIMIT_S, STEPS
from benchmarks.figures import Ahead, Figure, Figures
from benchmarks.losses import COPY_FACTOR, LossWorkload
from benchmarks.models import LOSS_STEPS, MODELS, PLAIN, VARIANTS
from benchmarks.providers import PROVIDERS
from benchmarks.results import OK, Row

_BLOCK_DTYPES = {**text.DTYPES, "mixed": "bf16 beside an f32 residual stream"}
MIB = 2**20
#: The name of the table row with the time limit for a linear loss. The limit is the time of its
#: matmuls, plus the time to copy its logits (see `losses.COPY_FACTOR`).
_LIMIT = "matrix products and the bytes of the logits"


def speeds(measured: Figures, directions: Sequence[str]) -> str:
    """Return a table of GB/s for each measured dtype and direction.

    It has a row for each operation and provider, and a column for each row length N.
    """
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
    header = f"GB/s, {text.dtypes(x, y)}, {text.DIRECTIONS[direction]}"
    return text.table([header, *(f"N={n}" for n in columns)], rows)


def ahead(found: Sequence[Ahead]) -> str:
    """Return a table of the cells in which another provider is faster.

    The rows are sorted by jaxnorm's time divided by the provider's time, the largest ratio first.
    """
    rows = []
    for each in sorted(found, key=lambda a: -a.ratio):
        op, direction, m, n, x, y = each.question
        name = f"{op} {text.DIRECTIONS[direction]}, {m} x {n}, {text.dtypes(x, y)}"
        rows.append([name, PROVIDERS[each.peer].label, f"{each.ratio:.2f}"])
    return text.table(["cell", "ahead", "jaxnorm's time over its"], rows)


def training(rows: Sequence[Row]) -> str:
    """Return a table of the time, memory and losses of training steps.

    Time and memory are also given relative to plain JAX.
    """
    measured = figures.steps(rows)
    body = []
    for (*asked, variant), row in measured.items():
        cells = [text.model(row), row["remat"], VARIANTS[variant]]
        if row["status"] != OK:
            body.append([*cells, row["status"], *[""] * 7])
            continue
        plain = measured.get((*asked, PLAIN), {})
        first_and_last = [float(row[f"loss_{step}"]) for step in (LOSS_STEPS[0], LOSS_STEPS[-1])]
        body.append(
            [
                *cells,
                f"{float(row['ms']):.1f}",
                text.ratio(row, plain, "ms"),
                row["kernels_ms"] or "-",
                text.ratio(row, plain, "kernels_ms"),
                text.gigabytes(row["temp_bytes"]),
                text.ratio(row, plain, "temp_bytes"),
                text.gigabytes(row["peak_bytes"]),
                " to ".join(f"{loss:.3f}" for loss in first_and_last),
            ]
        )
    header = ["ms/step", "of jnp's", "kernels ms", "of jnp's", "temp GB", "of jnp's", "peak GB"]
    losses = f"loss, step {LOSS_STEPS[0]} to {LOSS_STEPS[-1]}"
    table = text.table(["model, batch x length", "remat", "norms and loss", *header, losses], body)
    said = ", ".join(map(str, LOSS_STEPS))
    return (
        f"{table}\n\nAt steps {said}, losses differ by at most {_apart(measured):.4f} nats from "
        "those of the same step in plain JAX."
    )


def _apart(measured: Mapping[tuple[str, ...], Row]) -> float:
    """Return the largest difference between a loss with jaxnorm and the loss in plain JAX.

    The losses of the same training step are compared.
    """
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


def bars(rows: Sequence[Row]) -> str:
    """Return a table that compares measured training steps with their limits.

    It has a row for each limit in `bars.BARS` whose training step was measured with jaxnorm. If
    there is none, return "".
    """
    steps = figures.steps(row for row in rows if row["status"] == OK)
    body = []
    for bar in BARS:
        ours, plain = (steps.get((*figures.step_of(c).values(),)) for c in bar.cells)
        if ours is not None and plain is not None:
            ratio = float(ours[bar.figure]) / float(plain[bar.figure])
            verdict = "holds" if ratio <= bar.most else "missed"
            body.append([str(bar), f"{ratio:.3f}", f"{bar.most:.2f}", verdict])
        elif ours is not None:
            body.append([str(bar), "-", f"{bar.most:.2f}", "plain JAX was not measured"])
    return text.table(["bar", "measured", "at most", ""], body) if body else ""


def capacity(rows: Sequence[Row]) -> str:
    """Return a table of the largest batch of each training step, with a column for each variant."""
    variants = text.variants(rows)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        name = f"{row['model']}, length {MODELS[row['model']].seq}"
        asked = (name if row["layers"] == "scan" else f"{name}, {row['layers']}", row["remat"])
        answer = row["batch_in_80gb"] or row["status"]
        found.setdefault(asked, {})[row["provider"]] = answer
    return text.table(
        ["model", "remat", *(VARIANTS[variant] for variant in variants)],
        (
            [*asked, *(answers.get(variant, "-") for variant in variants)]
            for asked, answers in found.items()
        ),
    )


def stacks(rows: Sequence[Row]) -> str:
    """Return a table of the times of stacks of layers: jaxnorm's, plain jnp's, and their ratio."""
    body = []
    for row in rows:
        name = f"{row['op']} {text.DIRECTIONS[row['direction']]}, {row['rows']} x {row['cols']}"
        cells = [f"{name}, {text.DTYPES[row['dtype']]}", PROVIDERS[row["provider"]].label]
        if row["status"] != OK:
            body.append([*cells, row["status"], "", "", "", ""])
            continue
        ms, jnp_ms = float(row["ms"]), float(row["jnp_ms"])
        times = [f"{ms:.3f}", f"{jnp_ms:.3f}", f"{ms / jnp_ms:.3f}"]
        body.append([*cells, *times, row["kernels_ms"] or "-", row["jnp_kernels_ms"] or "-"])
    header = ["cell", "provider", "ms", "jnp ms", "ms / jnp ms", "kernels ms", "jnp kernels ms"]
    return text.table(header, body)


def on_cpu(rows: Sequence[Row]) -> str:
    """Return a table of times on a CPU: jaxnorm's and another provider's.

    Some rows time the forward pass, others time forward and backward pass together.
    """
    body = []
    for row in rows:
        cell = f"{row['op']} {text.DIRECTIONS[row['direction']]}, {row['shape']}"
        asked = [f"{cell}, {text.DTYPES[row['dtype']]}", row["provider"]]
        good = row["status"] == OK
        body.append(
            [
                *asked,
                *([row["ms"], row["peer_ms"], row["ratio"]] if good else ["", "", row["status"]]),
            ]
        )
    return text.table(["cell", "peer", "ms", "peer's ms", "ratio"], body)


def compile_times(rows: Sequence[Row]) -> str:
    """Return tables of the seconds to trace, lower and compile operations and training steps."""
    steps = [row for row in rows if row["op"] in STEPS]
    tables = (_of_operations([row for row in rows if row not in steps]), _of_steps(steps))
    return "\n\n".join(filter(None, tables))


def _of_operations(rows: Sequence[Row]) -> str:
    """Return a table of compile times of operations.

    The table has a row for each provider and operation. A row has the median time, the longest
    time, and the cell that took longest.
    """
    body = []
    for provider in dict.fromkeys(row["provider"] for row in rows):
        of_provider = [row for row in rows if row["provider"] == provider]
        label = PROVIDERS[provider].label
        body.append([f"**{label}: all**", *_seconds(of_provider)])
        for op in dict.fromkeys(row["op"] for row in of_provider):
            body.append([f"{label}: {op}", *_seconds([r for r in of_provider if r["op"] == op])])
    over = f"above {LIMIT_S:.0f} s"
    header = ["provider and operation", "median s", "longest s", "of", over]
    return text.table(header, body) if body else ""


def _of_steps(rows: Sequence[Row]) -> str:
    """Return a table of compile times of training steps, with the difference from plain JAX."""
    parts = ("trace", "lower", "compile", "total")
    totals = {row["op"]: float(row["total_s"]) for row in rows if row["provider"] == PLAIN}
    body = [
        [
            f"{row['op']}, {row['shape'].replace('x', ' x ')}",
            VARIANTS[row["provider"]],
            *(row[f"{part}_s"] or "-" for part in parts),
            f"{float(row['total_s']) - totals[row['op']]:+.2f}" if row["op"] in totals else "-",
        ]
        for row in rows
        if row["status"] == OK
    ]
    header = ["training step", "functions", *(f"{part} s" for part in parts), "beyond jnp's"]
    return text.table(header, body) if body else ""


def _seconds(rows: Sequence[Row]) -> list[str]:
    taken = {
        f"{row['op']} {row['shape']} {row['dtype']}": float(row["total_s"])
        for row in rows
        if row["status"] == OK
    }
    if not taken:
        return ["-"] * 4
    longest = max(taken, key=lambda name: taken[name])
    above = sum(value > LIMIT_S for value in taken.values())
    median = statistics.median(taken.values())
    return [f"{median:.2f}", f"{taken[longest]:.2f}", longest, f"{above} of {len(taken)}"]


def by_block(
    measured: Figures, directions: Sequence[str] = blocks.DIRECTIONS, *, medians: bool = False
) -> str:
    """Return tables of jaxnorm's speed in blocks, relative to a copy and to other providers.

    There is a table for each dtype and direction. A block has a row for each shape, and a row for
    their median. With `medians`, only the rows of medians are in the table.
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
    title = f"{_BLOCK_DTYPES[dtype]}, {text.DIRECTIONS[direction]}"
    against = (f"against {PROVIDERS[peer].label}" for peer in peers)
    return text.table([title, "of a copy", *against], body)


def _speed(mine: Figure, other: Figure | None) -> str:
    return "-" if other is None else f"{other.us / mine.us:.2f}x{_star(other)}"


def _star(figure: Figure) -> str:
    """Return "*" if the program also copies, casts or transposes whole arrays, otherwise ""."""
    return "*" if figure.extra_passes else ""


def losses(rows: Sequence[Row]) -> str:
    """Return a table of losses, with a row for each cell and provider.

    A row has the provider's time, the fraction of the roofline bound that it reaches, its time
    divided by jaxnorm's, and its temp memory. A linear loss also has a row with its time limit; the
    name of this row is `_LIMIT`. jaxnorm meets the limit if jaxnorm's time is at most the limit.
    """
    rows = [*rows, *map(_limit_of, (row for row in rows if row["provider"] == "products"))]
    of_copies = figures.of((row for row in rows if row["roof"]), LossWorkload)

    def roof(cell: figures.Question, answers: Mapping[str, Row], name: str) -> str:
        if cell in of_copies:
            return f"{of_copies[cell][name].roof:.2f}"
        if "products" not in answers:
            return "-"
        return f"{float(answers['products']['us']) / float(answers[name]['us']):.2f}"

    return _by_shape(rows, {"of the roof": roof})


def _limit_of(row: Row) -> Row:
    """Return a row of results whose time is the time limit for a linear loss (see `_LIMIT`).

    Args:
      row: a row of results of the provider `products`, which measures only the matmuls of the loss.
    """
    if row["status"] != OK or not row["gbps"]:
        return row
    workload = LossWorkload(row["op"], "fwd+bwd", row["shape"], row["dtype"])
    us = float(row["us"]) + COPY_FACTOR * workload.logits_bytes / float(row["gbps"]) / 1e3
    return {**row, "provider": _LIMIT, "us": str(us), "temp_bytes": ""}


def linear(rows: Sequence[Row]) -> str:
    """Return a table of matmuls, with a row for each cell and provider.

    A row has the same columns as in `losses`, with one difference: in place of the fraction of the
    roofline bound, it has two columns. The first is the speed in TFLOP/s. The second is a ratio of
    two times: XLA's time for the matmul alone (without a norm), divided by the provider's time.
    """
    found = figures.of_products(rows)

    def tflops(cell: figures.Question, answers: Mapping[str, Row], name: str) -> str:
        return text.digits(found[cell][name].speed)

    def of_product(cell: figures.Question, answers: Mapping[str, Row], name: str) -> str:
        return text.share(found[cell][name])

    return _by_shape(rows, {"TFLOP/s": tflops, "of the product": of_product})


def _by_shape(rows: Sequence[Row], columns: Mapping[str, Callable[..., str]]) -> str:
    """Return a table with a row for each cell and provider: time, speed and memory.

    `columns` maps the title of each extra column to a function that returns the text of a row. The
    function has three arguments: the cell, a dict from each provider to its results for the cell,
    and the provider of the row.
    """
    by_cell: dict[figures.Question, dict[str, Row]] = {}
    for row in rows:
        if row["status"] == OK:
            cell = (row["op"], row["direction"], row["shape"], row["dtype"])
            by_cell.setdefault(cell, {})[row["provider"]] = row
    labels = {name: provider.label for name, provider in PROVIDERS.items()} | {_LIMIT: _LIMIT}
    body = []
    for cell, answers in by_cell.items():
        op, direction, shape, dtype = cell
        us = {name: float(row["us"]) for name, row in answers.items()}
        mine = next((us[name] for name in figures.OWN if name in us), None)
        for name in (name for name in labels if name in answers):
            temp = answers[name]["temp_bytes"]
            body.append(
                [
                    f"{op} {text.DIRECTIONS[direction]}, {shape.replace('x', ' x ')}, "
                    f"{text.DTYPES[dtype]}",
                    labels[name],
                    text.digits(us[name]),
                    *(column(cell, answers, name) for column in columns.values()),
                    "-" if mine is None else f"{us[name] / mine:.2f}x",
                    f"{int(temp) / MIB:.0f}" if temp else "-",
                ]
            )
    return text.table(["cell", "provider", "us", *columns, "jaxnorm's speed", "temp MiB"], body)


def failed(rows: Iterable[Row]) -> str:
    """Return a table of the number of failed cells for each provider and reason."""
    return text.table(
        ["provider: reason", "cells"],
        (
            [f"{PROVIDERS[provider].label}: {status.replace('|', '/')}", str(count)]
            for (provider, status), count in figures.failures(rows).items()
        ),
    )
