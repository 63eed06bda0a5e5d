"""Trains a small transformer without and with jaxnorm, and compares loss and memory.

The model is a pre-LN causal transformer over bytes, in Flax linen and optax. The text is CPython's
documentation, from `pydoc_data.topics`. All runs start from the same parameters and see the same
batches. There are three runs. The first run uses the norms and softmax of Flax and the loss of
optax. The second run uses the norms, softmax and loss of jaxnorm. The third run does the same, and
also uses `jaxnorm.activation_linear` for the second layer of the MLP. `activation_linear` saves the
activation's input instead of the activation's output. The memory that each change frees is printed.
The exit code is 1 if the runs disagree. It is also 1 if the runs have at least the default size,
and the loss of a run is too high.

With --mesh, the same runs are sharded over devices. The printed temp memory is then the memory of
one device.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import pydoc_data.topics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from placement import Placement, mesh_sizes
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformer import (
    LEARNING_RATE_TIMES_WIDTH,
    VARIANTS,
    VOCABULARY,
    Config,
    Transformer,
    Variant,
)

import jaxnorm

DTYPES = ("float32", "bfloat16")
# The maximum loss after training, in nats per held-out byte.
LOSS_BOUND = 2.6
# The number of first steps in which the losses of all runs must agree. Later, rounding differences
# grow.
EARLY_STEPS = 20

Params = Any
State = tuple[Params, optax.OptState]


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays of bytes: the text for training, and the last tenth, which is held out."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    return tuple(np.split(tokens, [len(tokens) * 9 // 10]))


def windows(text: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    """Return sequences of seq + 1 bytes.

    In each sequence, all bytes but the last are inputs, and all bytes but the first are targets.
    """
    return text[starts[:, None] + np.arange(seq + 1)]


def heldout_windows(heldout: np.ndarray, seq: int) -> np.ndarray:
    """Return consecutive windows of the held-out text. Each byte is a target at most once."""
    return windows(heldout, np.arange(0, len(heldout) - seq, seq), seq)


def bigram_loss(text: np.ndarray, evaluated: np.ndarray, alpha: float = 0.1) -> float:
    """Return the loss of a bigram model in nats per byte.

    The model is trained on `text`, and evaluated on the windows `evaluated`. Its counts of byte
    pairs are smoothed by adding `alpha`.
    """
    counts = np.full((VOCABULARY, VOCABULARY), alpha)
    np.add.at(counts, (text[:-1], text[1:]), 1.0)
    log_p = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_p[evaluated[:, :-1], evaluated[:, 1:]].mean())


def loss_fn(model: Transformer, params: Params, batch: jax.Array) -> jax.Array:
    logits = model.apply({"params": params}, batch[:, :-1])
    return model.variant.cross_entropy(logits, batch[:, 1:]).mean()


def early_tolerance(config: Config) -> float:
    """Return the number of nats by which losses of the first steps may differ between runs."""
    if config.dtype == "float32":
        return 1e-4
    # Two ways to compute a norm or softmax may round an element to two neighbouring numbers. In
    # bfloat16, the relative difference of these numbers is about 2**-8. The residual stream is
    # rounded twice per layer, and the errors accumulate like a random walk. So the relative
    # difference of the losses is about 2**-8 times the root of the number of roundings. The loss
    # starts near ln(256), so the absolute difference is about ln(256) times the relative one.
    return 2**-8 * math.sqrt(2 * config.layers + 1) * math.log(VOCABULARY)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    # A high learning rate amplifies rounding differences. So the steps whose losses must agree lie
    # in the first half of the warm-up, where the learning rate is still low.
    warmup = max(2 * EARLY_STEPS, config.steps // 10)
    peak = config.learning_rate
    rate = optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, max(config.steps, warmup + 1), end_value=peak / 20
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


def train_step(
    model: Transformer, optimizer: optax.GradientTransformation, state: State, batch: jax.Array
) -> tuple[State, jax.Array]:
    params, optimizer_state = state
    loss, gradients = jax.value_and_grad(functools.partial(loss_fn, model))(params, batch)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
    return (optax.apply_updates(params, updates), optimizer_state), loss


def train(
    config: Config,
    variant: Variant,
    params: Params,
    batches: Sequence[np.ndarray],
    evaluated: np.ndarray,
    console: Console,
    placement: Placement,
) -> report.Run:
    model, optimizer = Transformer(config, variant), make_optimizer(config)
    saved = jaxnorm.memory_report(functools.partial(loss_fn, model), params, batches[0]).total

    def initial(params: Params) -> State:
        # Copy the parameters: the step donates its state, and other variants use them too.
        return jax.tree.map(jnp.copy, params), optimizer.init(params)

    shardings = placement.shardings(jax.eval_shape(initial, params))
    state = jax.jit(initial, out_shardings=shardings)(params)
    step = jax.jit(
        functools.partial(train_step, model, optimizer),
        donate_argnums=0,
        out_shardings=None if shardings is None else (shardings, None),
    )
    with Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]:<22}"),
        TimeRemainingColumn(compact=True),
        console=console,
    ) as progress:
        task = progress.add_task(variant.label, total=len(batches), status="compiling")
        compiled = step.lower(state, placement.batch(batches[0])).compile()
        losses, times = [], []
        for batch in map(placement.batch, batches):
            start = time.perf_counter()
            state, loss = jax.block_until_ready(compiled(state, batch))
            times.append(1e3 * (time.perf_counter() - start))
            losses.append(float(loss))
            status = f"loss {losses[-1]:.3f}, {np.median(times[-9:]):.0f} ms/step"
            progress.update(task, advance=1, status=status)
    return report.Run(
        label=variant.label,
        losses=np.array(losses),
        final_loss=evaluate(model, state[0], evaluated, config.batch),
        ms_per_step=float(np.median(times[3:] or times)),  # leave out the slower first steps
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        residual_bytes=saved,
    )


def evaluate(model: Transformer, params: Params, evaluated: np.ndarray, batch: int) -> float:
    """Return the mean loss over the windows. An incomplete last batch is left out."""
    loss = jax.jit(functools.partial(loss_fn, model))
    batch = min(batch, len(evaluated))
    full = len(evaluated) // batch
    return float(
        np.mean([loss(params, part) for part in np.split(evaluated[: full * batch], full)])
    )


def setting(config: Config, placement: Placement) -> str:
    device = jax.devices()[0]
    spread = "" if placement.mesh is None else f"{dict(placement.mesh.shape)} of "
    where = f"{spread}{device.platform} ({device.device_kind})"
    return f"jax {jax.__version__} on {where}: {config}"


def plans(config: Config) -> str:
    """Return text that says which implementation runs each jaxnorm call here, and why."""
    tokens = config.batch * config.seq
    column = jax.ShapeDtypeStruct((config.width,), "float32")
    calls = {
        "add_layer_norm": jaxnorm.implementation_for(
            "add_layer_norm", (tokens, config.width), config.dtype, scale=column, bias=column
        ),
        # This is the softmax of attention, with its causal mask.
        "softmax": jaxnorm.implementation_for(
            "softmax",
            (config.batch, config.heads, config.seq, config.seq),
            config.dtype,
            where=jax.ShapeDtypeStruct((1, 1, config.seq, config.seq), bool),
        ),
        "softmax_cross_entropy_with_integer_labels": jaxnorm.implementation_for(
            "softmax_cross_entropy_with_integer_labels", (tokens, VOCABULARY), "float32"
        ),
    }
    return "\n".join(
        f"jaxnorm.{name} {line}" for name, plan in calls.items() for line in str(plan).splitlines()
    )


def activation_bytes(config: Config) -> int:
    return config.batch * config.seq * config.width * jnp.dtype(config.dtype).itemsize


def freed(config: Config, runs: Sequence[report.Run]) -> list[tuple[float, float]]:
    """Return how much less memory each run needs per layer than the run before it.

    The result has a pair of numbers for each run except the first: the temp memory that is freed,
    and the memory of saved arrays that is freed. The unit is one activation (tokens x width).
    """
    unit = activation_bytes(config) * config.layers
    return [
        (
            (before.temp_bytes - run.temp_bytes) / unit,
            (before.residual_bytes - run.residual_bytes) / unit,
        )
        for before, run in itertools.pairwise(runs)
    ]


def caption(config: Config) -> str:
    """Return a Markdown sentence that explains the last two columns of the table."""
    size = activation_bytes(config) / report.MIB
    return (
        "The last two columns say how much less memory a row needs than the row above it. The unit "
        f"is one activation (tokens x width, {size:.2f} MiB) per layer."
    )


def positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected an integer of at least 1")
    return value


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a finite number above 0")
    return value


def output_path(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a file in a folder that exists")
    return path


def parse(argv: Sequence[str] | None, heldout_bytes: int) -> tuple[Config, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "layers": "transformer blocks",
        "width": "features per token, a multiple of --heads",
        "heads": "attention heads",
        "seq": f"context length in bytes, below {heldout_bytes}",
        "batch": "sequences per step",
        "steps": "optimiser steps per run",
    }
    for name, meaning in sizes.items():
        parser.add_argument(
            f"--{name}",
            type=positive_int,
            default=getattr(Config, name),
            metavar="N",
            help=f"{meaning} (default %(default)s)",
        )
    parser.add_argument(
        "--learning-rate",
        type=positive_float,
        metavar="RATE",
        help=f"peak of the schedule (default {LEARNING_RATE_TIMES_WIDTH} / width)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=Config.dtype,
        help="dtype of the activations; parameters and loss are float32 (default %(default)s)",
    )
    parser.add_argument(
        "--scan",
        action=argparse.BooleanOptionalAction,
        default=Config.scan,
        help="scan over the layers, or unroll them; in unrolled layers, XLA may keep the inputs of "
        "norms anyway, and saving outputs then frees no temp memory (default: scan)",
    )
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="AXIS=N,...",
        help="shard the run over devices, such as data=2,fsdp=2: batches over both axes, "
        "parameters over fsdp; a CPU is split into virtual devices (default: one device)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=Config.seed,
        metavar="N",
        help="seed of the initial parameters and the batches (default %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=output_path,
        default=Path("demo.png"),
        metavar="PATH",
        help="file for the plot, a PNG (default %(default)s)",
    )
    parser.add_argument(
        "--markdown", type=output_path, metavar="PATH", help="also write the table as Markdown"
    )
    given = parser.parse_args(argv)
    if given.width % given.heads:
        parser.error(
            f"argument --width: got {given.width}; expected a multiple of --heads {given.heads}"
        )
    if given.seq >= heldout_bytes:
        parser.error(
            f"argument --seq: got {given.seq}; "
            f"expected less than the {heldout_bytes} bytes of the held-out text"
        )
    shards = math.prod((given.mesh or {}).values())
    if given.batch % shards:
        parser.error(
            f"argument --batch: got {given.batch}; expected a multiple of the {shards} devices of "
            "--mesh"
        )
    if given.seed < 0:
        parser.error(f"argument --seed: got {given.seed}; expected an integer of at least 0")
    given.learning_rate = given.learning_rate or LEARNING_RATE_TIMES_WIDTH / given.width
    return Config(**{f.name: getattr(given, f.name) for f in dataclasses.fields(Config)}), given


def main(argv: Sequence[str] | None = None) -> int:
    text, heldout = read_text()
    config, given = parse(argv, len(heldout))
    # With soft_wrap, rich does not wrap lines at 80 columns if the output is not a terminal.
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        placement = Placement.over(given.mesh)
    except ValueError as error:
        console.print(f"--mesh: {error}")
        return 2
    console.print(setting(config, placement))
    console.print(plans(config))
    if config.dtype == "float32":
        # On GPUs, the default precision of matmuls is TF32, whose rounding errors of 2**-11 would
        # hide the differences between the runs.
        jax.config.update("jax_default_matmul_precision", "highest")

    rng = np.random.default_rng(config.seed)
    starts = rng.integers(0, len(text) - config.seq, (config.steps, config.batch))
    batches = [windows(text, row, config.seq) for row in starts]
    evaluated = heldout_windows(heldout, config.seq)
    bigram = bigram_loss(text, evaluated)
    init = jax.jit(Transformer(config, VARIANTS[0]).init)
    params = init(jax.random.key(config.seed), batches[0][:, :-1])["params"]

    runs = [
        train(config, variant, params, batches, evaluated, console, placement)
        for variant in VARIANTS
    ]

    tolerance = early_tolerance(config)
    checks = report.agreement_checks(runs, EARLY_STEPS, tolerance)
    checks += report.learning_checks(runs, bigram, LOSS_BOUND, enough=config.reaches(Config()))
    console.print(report.table(runs))
    for run, (temp, saved) in zip(runs[1:], freed(config, runs)):
        console.print(
            f"{run.label}: memory freed per layer, compared with the row above: {saved:.2f} "
            f"activations (tokens x width) of saved arrays, {temp:.2f} of temp memory"
        )
    for check in checks:
        console.print(str(check))
    report.plot(runs, bigram, (EARLY_STEPS, tolerance), str(config), given.out)
    console.print(f"plot: {given.out.resolve()}")
    if given.markdown:
        given.markdown.write_text(
            report.markdown(
                runs, freed(config, runs), f"{setting(config, placement)}. {caption(config)}"
            ),
            encoding="utf-8",
        )
        console.print(f"table: {given.markdown.resolve()}")
    return int(any(check.passed is False for check in checks))


if __name__ == "__main__":
    sys.exit(main())
