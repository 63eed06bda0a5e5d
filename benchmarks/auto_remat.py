"""Compares training steps with `auto_remat`, in plain JAX, and with names placed by hand.

Usage, from the root of the repository::

    python -m benchmarks.auto_remat [--models llama-1b,gpt2-small] [--layers scan,unrolled]
        [--rows "plain;auto*"] [--save FILE.csv] [--fsdp]

A row is a way to train a model. Its printed line has the model; how its layers are stacked; the
row's name; the milliseconds of an AdamW step whose state is donated (minimum, its ratio to the row
"plain", and median); the temporary memory that XLA plans; the first loss; and the seconds to trace
and lower the step. All rows run in one process, one after the other, three times. Rows whose names
begin with "maxtext" use MaxText's policies and jaxnorm's linear loss.

With `--fsdp`, the state and the sequences are sharded over all GPUs. Each GPU then has the number
of sequences that a single GPU has without `--fsdp`, and the memory is per GPU.
"""

import argparse
import dataclasses
import fnmatch
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm
from benchmarks import models, results, tables, training
from benchmarks.language_models import NAMES, Model, Params
from benchmarks.variants import Array

_STEPS, _ROUNDS = 8, 3
_BUDGETS = (0.2, 0.1, 0.05, 0.03)
#: The columns of the CSV file.
COLUMNS = ("device", "jax", "commit", "model", "layers", "row", "ms", "temp_gb")


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to train a model.

    Attributes:
      variant: name of a variant of the model's functions.
      remat: the rematerialisation of each layer: one of `models.REMATS`, or a key of `NAMES`.
      auto: a function that is applied to the loss, such as `auto_remat`.
    """

    variant: str
    remat: Any = "none"
    auto: Callable[..., Any] = lambda loss: loss


_LINEAR, _NORMS = "jnp-linear-loss", "jaxnorm-everything"
ROWS = {
    "plain": Row("jnp"),
    "dots": Row("jnp", "dots"),
    "names": Row("jnp", "names"),
    "names, linear loss": Row(_LINEAR, "names"),
    "block, linear loss": Row(_LINEAR, "block"),
    "all of jaxnorm": Row("jaxnorm-products"),
    "auto": Row("jnp", auto=jaxnorm.auto_remat),
    "auto, linear loss": Row(_LINEAR, auto=jaxnorm.auto_remat),
    "auto, norms, linear loss": Row(_NORMS, auto=jaxnorm.auto_remat),
    **{
        f"auto, {of}linear loss, budget {b}": Row(
            variant, auto=functools.partial(jaxnorm.auto_remat, budget=b)
        )
        for of, variant in {"": _LINEAR, "norms, ": _NORMS}.items()
        for b in _BUDGETS
    },
    **{key: Row(_LINEAR, key) for key in NAMES if key != "names"},
}


class FsdpModel(Model):
    """A model with sharded weights, which each layer gathers, and with sharded sequences (FSDP)."""

    def stack(self, layer: Callable[[Array, Params], Array], x: Array, layers: Any) -> Array:
        def gathered(x: Array, p: Params) -> Array:
            p = jax.tree.map(lambda w: placed(w.astype(x.dtype), P()) if w.ndim == 2 else w, p)
            return layer(placed(x, P("data")), p)

        return super().stack(gathered, x, layers)


def placed(x: Array, spec: P) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(_mesh(), spec))


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def sharded(state: Any) -> tuple[Any, Any]:
    """Return the shardings of the state (a tree) and of the tokens, over all GPUs.

    Arrays that are small, or that cannot be split evenly, are replicated.
    """

    def of(array: Any) -> NamedSharding:
        axes = [i for i, size in enumerate(array.shape) if size % jax.device_count() == 0]
        whole = array.size < 1e5 or not axes
        return NamedSharding(_mesh(), P() if whole else P(*[None] * axes[-1], "data"))

    return jax.tree.map(of, state), NamedSharding(_mesh(), P("data"))


def measure(
    model: str, layers: Any, rows: list[str], save: Path | None = None, fsdp: bool = False
) -> None:
    """Compile and time the rows, and print a line for each of them.

    If `save` is given, also append the results to this CSV file.
    """
    steps: dict[str, training.Step] = {}
    seconds: dict[str, tuple[float, float]] = {}
    mesh: dict[str, Any] = {"shardings": sharded} if fsdp else {}
    devices = jax.device_count() if fsdp else 1
    for row in rows:
        start = time.perf_counter()
        cell: Any = models.cell(model, ROWS[row].remat, layers, ROWS[row].variant)
        try:
            step = training.Step(cell, devices * cell.batch, remat=ROWS[row].auto, **mesh)
            if fsdp:
                step.model = FsdpModel(**vars(step.model))
            _, lowered = step.lowered, time.perf_counter()
            _, compiled = step.run, time.perf_counter()
            steps[row], seconds[row] = step, (lowered - start, compiled - lowered)
            _ = step.initial, step.batch
        except Exception as error:  # A row that fails must not hide the others.
            print(f"{model} {layers} {row}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    rounds: dict[str, list[float]] = {row: [] for row in steps}
    losses: dict[str, float] = {}
    for _ in range(_ROUNDS):
        for row, each in steps.items():
            ms, losses[row] = each.round(_STEPS)
            rounds[row].append(ms)
    layers += f", {jax.device_count()} GPUs" if fsdp else ""
    best = min(rounds.get("plain", [float("nan")]))
    for row, each in steps.items():
        ms, gb = statistics.median(rounds[row]), each.temp_bytes / 1e9
        traced, compiled = seconds[row]
        print(
            f"{model:11} {layers:9} {row:41} {min(rounds[row]):8.2f} ms "
            f"({min(rounds[row]) / best:.3f})  median {ms:8.2f}  temp {gb:6.2f} GB  loss "
            f"{losses[row]:.4f}  traced in {traced:.1f} s, compiled in {compiled:.1f} s",
            flush=True,
        )
        if save is not None:
            origin = jax.devices()[0].device_kind, jax.__version__, results.commit()
            figures = (*origin, model, layers, row, f"{ms:.2f}", f"{gb:.2f}")
            results.append(save, COLUMNS, dict(zip(COLUMNS, figures, strict=True)))


_TITLES = {"llama-1b": "Llama 3.2 1B, 4 x 2048", "gpt2-small": "GPT-2 small, 16 x 1024"}


def table(layers: str) -> str:
    """Return a Markdown table of the committed results: the time and memory of each model."""
    found = results.read(results.RESULTS / "nvidia_h200" / "auto_remat.csv", COLUMNS)
    found = [row for row in found if row["layers"] == layers]
    cells = {(row["row"], row["model"]): (row["ms"], row["temp_gb"]) for row in found}
    titles = {model: title for model, title in _TITLES.items() if any(model in c for c in cells)}
    header = itertools.chain(*((f"{title}: ms", "temp GB") for title in titles.values()))
    body = [
        [row, *itertools.chain(*(cells.get((row, model), ("-", "-")) for model in titles))]
        for row in dict.fromkeys(row["row"] for row in found)
    ]
    return tables.table(["", *header], body)


def parse(parser: argparse.ArgumentParser, names: str, layers: str) -> argparse.Namespace:
    """Add the options that choose models to a parser, and parse the command line.

    By default, the models are `names`, and `layers` says how their layers are stacked.
    """
    parser.add_argument("--models", default=names)
    parser.add_argument("--layers", default=layers)
    options = parser.parse_args()
    options.chosen = [*itertools.product(options.models.split(","), options.layers.split(","))]
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    return options


def main() -> None:
    """Measure the rows that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="*", help='such as "plain;auto*"')
    parser.add_argument("--save", type=Path, help="a CSV file, to which the results are appended")
    parser.add_argument("--fsdp", action="store_true", help="shard over all GPUs")
    options = parse(parser, "llama-1b,gpt2-small", "scan,unrolled")
    patterns = options.rows.split(";")
    rows = [row for row in ROWS if any(fnmatch.fnmatch(row, pattern) for pattern in patterns)]
    for model, layers in options.chosen:
        measure(model, layers, rows, options.save, options.fsdp)


if __name__ == "__main__":
    main()
