"""Measures training steps with `auto_remat` beside plain JAX, and names placed by hand.

Usage, from the root of the repository::

    python -m benchmarks.auto_remat [--models llama-1b,gpt2-small] [--layers scan,unrolled]
        [--rows "plain;auto*"] [--save FILE.csv] [--fsdp] [--tiny]

Prints the model, how its layers are stacked, the row, milliseconds of a donated AdamW step (the
minimum and the median), XLA's plan of temporary memory, the first loss, and the seconds to trace
and lower the step. All rows run in one process, one after the other, three times. Rows whose names
begin with "maxtext" have MaxText's policies, and the linear loss. With `--fsdp`, the state and the
sequences are sharded over all GPUs, with the same number of sequences on each; temp is per GPU.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import fnmatch
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name as name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm
from benchmarks import language_models, models, results, training, variants
from benchmarks.language_models import Model, Params
from benchmarks.variants import Array, rotated

_STEPS, _ROUNDS = 8, 3
_BUDGETS = (0.2, 0.1, 0.05, 0.03)
_QKV = ("q", "k", "v")
_MLP = ("gate", "up", "mid")  # "mid" is the hidden array of GPT-2
#: For each policy, the names of the arrays that a layer saves. MaxText's policies (version 0.2.5,
#: `maxtext/layers/nnx_decoders.py`) have other names there: query_proj, key_proj, value_proj,
#: context ("attended"), out_proj ("out"), mlpwi_0, mlpwi_1 (_MLP), mlpwo ("down").
NAMES: dict[str, tuple[str, ...]] = {
    "names": (*_QKV, "attended", "h", *_MLP),
    "maxtext minimal_with_context": (*_QKV, "attended", "out", *_MLP, "down"),
    "maxtext minimal": (*_QKV, "out", *_MLP, "down"),
    "maxtext save_dot_with_context_except_mlp": (*_QKV, "attended", "out"),
    "maxtext save_dot_except_mlpwi": (*_QKV, "out", "down"),
    "maxtext save_dot_except_mlp": (*_QKV, "out"),
    "maxtext save_qkv_proj": _QKV,
    "maxtext save_out_proj": ("out",),
    "maxtext full": (),
}


def policy(names: tuple[str, ...]) -> Callable[..., bool]:
    """Return a policy that saves arrays with these names.

    "attended" stands for the results of cuDNN's attention: its output and its statistics. They are
    saved without a name, because a scan would save both the output and its named copy.
    """

    def save(primitive: Any, *_: Any, **params: Any) -> bool:
        if str(primitive) == "name":
            return params["name"] in names
        return "attended" in names and "dot_product_attention_fwd" in str(primitive)

    return save


language_models._POLICIES |= {key: {"policy": policy(names)} for key, names in NAMES.items()}  # type: ignore[misc]


def gpt2(model: Model, params: Params, x: Array) -> Array:
    """GPT-2 as in `language_models`, with names of the arrays that a layer saves."""
    use = model.variant

    def layer(x: Array, p: Params) -> Array:
        y = use.layer_norm(x, **p["attention_norm"])
        qkv = jnp.split(language_models.dense(use.linear, y, p["qkv"]), 3, axis=-1)
        q, k, v = (name(model.heads(a), n) for a, n in zip(qkv, "qkv"))
        attended = model.attend(q, k, v)
        branch = language_models.dense(use.heads_linear, attended, p["attention_out"])
        x = name(x + name(branch, "out"), "h")
        y = use.layer_norm(x, **p["mlp_norm"])
        h = name(language_models.dense(use.linear, y, p["mlp_in"]), "mid")
        down = use.activation_linear(h, p["mlp_out"]["kernel"], p["mlp_out"]["bias"])
        return x + name(down, "down")

    x = x + params["positions"][: x.shape[1]].astype(x.dtype)
    return use.layer_norm(model.stack(layer, x, params["layers"]), **params["norm"])


def llama(model: Model, params: Params, x: Array) -> Array:
    """Llama as in `language_models`, with names of the arrays that a layer saves."""
    use = model.variant
    tables = language_models.rotations(x.shape[1], model.size.head)

    def layer(x: Array, p: Params) -> Array:
        y = use.rms_norm(x, **p["attention_norm"])
        q, k, v = (model.heads(use.linear(y, p[n])) for n in "qkv")
        q, k, v = name(rotated(q, *tables), "q"), name(rotated(k, *tables), "k"), name(v, "v")
        attended = model.attend(q, k, v)
        x = name(x + name(use.heads_linear(attended, p["attention_out"]), "out"), "h")
        y = use.rms_norm(x, **p["mlp_norm"])
        gate, up = (name(use.linear(y, p[n]), n) for n in ("gate", "up"))
        return x + name(use.gated_linear(gate, up, p["down"]), "down")

    return use.rms_norm(model.stack(layer, x, params["layers"]), **params["norm"])


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to train a model.

    Attributes:
      variant: name of a variant of the model's functions.
      remat: the rematerialisation of each layer, as in `models`, or a key of `NAMES`.
      auto: a function that is applied to the loss, or None.
    """

    variant: str
    remat: Any = "none"
    auto: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


def _auto(budget: int | float | None = None) -> Callable[..., Any]:
    return functools.partial(jaxnorm.auto_remat, budget=budget)


_LINEAR, _NORMS = "jnp-linear-loss", "jaxnorm-everything"
ROWS = {
    "plain": Row("jnp"),
    "dots": Row("jnp", "dots"),
    "names": Row("jnp", "names"),
    "names, linear loss": Row(_LINEAR, "names"),
    "block, linear loss": Row(_LINEAR, "block"),
    "all of jaxnorm": Row("jaxnorm-products"),
    "auto": Row("jnp", auto=_auto()),
    "auto, linear loss": Row(_LINEAR, auto=_auto()),
    "auto, norms, linear loss": Row(_NORMS, auto=_auto()),
    **{f"auto, linear loss, budget {b}": Row(_LINEAR, auto=_auto(b)) for b in _BUDGETS},
    **{f"auto, norms, linear loss, budget {b}": Row(_NORMS, auto=_auto(b)) for b in _BUDGETS},
    **{key: Row(_LINEAR, key) for key in NAMES if key != "names"},
}


class FsdpModel(Model):
    """A model whose layers gather their weights. Activations are sharded by sequences."""

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
    """Return shardings over all GPUs: of the state's large arrays, and of the tokens."""

    def of(array: Any) -> NamedSharding:
        axes = [i for i, size in enumerate(array.shape) if size % jax.device_count() == 0]
        whole = array.size < 1e5 or not axes
        return NamedSharding(_mesh(), P() if whole else P(*[None] * axes[-1], "data"))

    return jax.tree.map(of, state), NamedSharding(_mesh(), P("data"))


def step(model: str, layers: Any, row: Row, fsdp: bool = False) -> training.Step:
    """Return a training step, lowered."""
    size = models.MODELS[model]
    of_names = {"gpt2": gpt2, "llama": llama} if row.remat in NAMES else _PLAIN_MODELS
    language_models._MODELS.update(of_names)
    language_models.train_step = functools.partial(_train_step, row.auto or (lambda f: f))
    batch, mesh = (size.batch * jax.device_count(), (sharded,)) if fsdp else (size.batch, ())
    cell = models.TrainingCell(model, row.remat, layers, "bfloat16", batch, row.variant)
    lowered = training.Step(cell, batch, *mesh)
    if fsdp:
        lowered.model = FsdpModel(**vars(lowered.model))
    _ = lowered.lowered
    return lowered


_PLAIN_MODELS = dict(language_models._MODELS)


def _train_step(remat: Callable[..., Any], model: Model, state: Any, tokens: Array) -> Any:
    """Take a step of AdamW, as `language_models.train_step`, with the loss under `remat`."""
    params, moments = state
    loss, gradients = jax.value_and_grad(remat(model.loss))(params, tokens)
    updates, moments = language_models.OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def measure(
    model: str, layers: str, rows: list[str], save: Path | None = None, fsdp: bool = False
) -> None:
    """Compile and time the rows, and print a line for each of them, or append it to a CSV file."""
    steps: dict[str, training.Step] = {}
    seconds: dict[str, float] = {}
    for row in rows:
        start = time.perf_counter()
        try:
            steps[row] = step(model, layers, ROWS[row], fsdp)
        except Exception as error:  # A row that fails must not hide the others.
            print(f"{model} {layers} {row}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        seconds[row] = time.perf_counter() - start
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda step: (step.run, step.initial, step.batch), steps.values()))
    for row, run in steps.items():
        print(f"traced {row}: {seconds[row]:.1f} s, temp {run.temp_bytes / 1e9:.2f} GB", flush=True)
    times: dict[str, list[float]] = {row: [] for row in steps}
    losses: dict[str, float] = {}
    for _ in range(_ROUNDS):
        for row, run in steps.items():
            state, tokens = run.initial(), run.batch(0)
            state, loss = run.run(state, tokens)
            losses.setdefault(row, float(loss))
            for i in range(_STEPS + 2):
                if i == 2:
                    jax.block_until_ready(state)
                    start = time.perf_counter()
                state, loss = run.run(state, tokens)
            jax.block_until_ready(state)
            times[row].append(1e3 * (time.perf_counter() - start) / _STEPS)
            del state
    best = min(times.get("plain", [float("nan")]))
    for row, run in steps.items():
        ms = times[row]
        print(
            f"{model:11} {layers:9} {row:41} {min(ms):8.2f} ms ({min(ms) / best:.3f})  median "
            f"{statistics.median(ms):8.2f}  temp {run.temp_bytes / 1e9:6.2f} GB  loss "
            f"{losses[row]:.4f}  traced in {seconds[row]:.1f} s",
            flush=True,
        )
    if save is not None:
        device, commit = jax.devices()[0].device_kind, results.commit()
        layers += f", {jax.device_count()} GPUs" if fsdp else ""
        with save.open("a") as file:
            for row, run in steps.items():
                figures = f"{statistics.median(times[row]):.2f}", f"{run.temp_bytes / 1e9:.2f}"
                origin = device, jax.__version__, commit
                csv.writer(file).writerow([*origin, model, layers, row, *figures])


_TITLES = {"llama-1b": "Llama 3.2 1B, 4 x 2048", "gpt2-small": "GPT-2 small, 16 x 1024"}


def table(layers: str) -> str:
    """Return a Markdown table of the committed results, with two columns for each model in them."""
    with (results.RESULTS / "nvidia_h200" / "auto_remat.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["layers"] == layers]
    cells = {(row["row"], row["model"]): (row["ms"], row["temp_gb"]) for row in found}
    titles = {model: title for model, title in _TITLES.items() if any(model in c for c in cells)}
    header = ["", *(f"{title}: ms | temp GB" for title in titles.values())]
    lines = [header, ["---", *["---: | ---:"] * len(titles)]]
    for row in dict.fromkeys(row["row"] for row in found):
        figures = (cells.get((row, model), ("-", "-")) for model in titles)
        lines.append([row, *(" | ".join(pair) for pair in figures)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure the rows that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-1b,gpt2-small")
    parser.add_argument("--layers", default="scan,unrolled")
    parser.add_argument("--rows", default="*", help='such as "plain;auto*"')
    parser.add_argument("--save", type=Path, help="a CSV file, to which the results are appended")
    parser.add_argument("--fsdp", action="store_true", help="shard over all GPUs")
    parser.add_argument("--tiny", action="store_true", help="small models, to test this script")
    options = parser.parse_args()
    plain = variants.VARIANTS["jnp"]
    variants.VARIANTS[_LINEAR] = dataclasses.replace(plain, loss=variants.loss_without_logits)
    if options.tiny:
        small: dict[str, Any] = {
            "layers": 4,
            "width": 256,
            "heads": 4,
            "hidden": 512,
            "vocabulary": 1024,
        }
        for key, size in models.MODELS.items():
            kv_heads = 4 if size.kind == "gpt2" else 2
            tiny = dataclasses.replace(size, kv_heads=kv_heads, seq=256, batch=2, **small)
            models.MODELS[key] = tiny
    patterns = options.rows.split(";")
    rows = [row for row in ROWS if any(fnmatch.fnmatch(row, pattern) for pattern in patterns)]
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    for model in options.models.split(","):
        for layers in options.layers.split(","):
            measure(model, layers, rows, options.save, options.fsdp)


if __name__ == "__main__":
    main()
