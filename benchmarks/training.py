"""A training step of the demo's transformer (examples/), at the sizes of models.py."""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import models
from benchmarks.machine import ROOT
from benchmarks.models import TrainingCell

sys.path.insert(0, str(ROOT / "examples"))  # scripts, not a package

import train_transformer as demo
from transformer import VARIANTS, VOCABULARY, Config, Transformer

Figures = dict[str, float | None]
WARMUP, REPEATS = 3, 20
_GUESSES = 8  # along the line; after them the interval is halved
_ONE_DEVICE = demo.Placement()

# XLA times matrix products in many forms before it takes one. Memory needs no times, and the form
# taken may come with a workspace of an activation's size. Steps take what cuBLAS takes by itself:
# it is the same for every variant.
_OPTIONS = {
    "memory": {"xla_gpu_autotune_level": "0"},
    "steps": {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False},
}


class Step:
    """A compiled training step, which is not run, and what it takes; on one device, or a mesh."""

    def __init__(
        self,
        cell: TrainingCell,
        batch: int,
        placement: demo.Placement = _ONE_DEVICE,
        suite: Literal["memory", "steps"] = "steps",
    ) -> None:
        size = cell.size
        config = Config(
            layers=size.layers,
            width=size.width,
            heads=size.heads,
            seq=size.seq,
            batch=batch,
            dtype=cell.dtype,
            scan=cell.stack == "scan",
        )
        label = models.VARIANTS[cell.provider]
        (variant,) = (v for v in VARIANTS if v.label == label)
        self.batch_shape = (batch, size.seq + 1)
        self.tokens = batch * size.seq
        self.model, self.optimizer = Transformer(config, variant), demo.make_optimizer(config)
        state = jax.eval_shape(self.state)
        self.shardings = placement.shardings(state)
        step = jax.jit(
            functools.partial(demo.train_step, self.model, self.optimizer),
            donate_argnums=0,
            in_shardings=None if self.shardings is None else (self.shardings, None),
            out_shardings=None if self.shardings is None else (self.shardings, None),
        )
        tokens = placement.batch(np.zeros(self.batch_shape, np.int32))
        self.options = _OPTIONS[suite]
        self.run = step.lower(state, tokens).compile(self.options)

    def state(self) -> Any:
        """Initial parameters and optimiser state. The parameters' shapes need one sequence.

        Of unrolled layers with Threefry's random bits, XLA had not compiled it in two minutes.
        """
        tokens = jnp.zeros((1, self.batch_shape[1] - 1), jnp.int32)
        params = self.model.init(jax.random.key(0, impl="rbg"), tokens)["params"]
        return params, self.optimizer.init(params)

    @functools.cached_property
    def initial(self) -> Callable[[], Any]:
        """state, compiled."""
        return jax.jit(self.state, out_shardings=self.shardings).lower().compile(self.options)

    @property
    def temp_bytes(self) -> int:
        """What XLA plans for intermediates."""
        return int(self.run.memory_analysis().temp_size_in_bytes)

    @property
    def peak_bytes(self) -> int:
        """Arguments, results that are not written over them, and temp: what has to fit."""
        m = self.run.memory_analysis()
        results = m.output_size_in_bytes - m.alias_size_in_bytes
        return int(m.argument_size_in_bytes + results + m.temp_size_in_bytes)


def memory(cell: TrainingCell) -> Figures:
    fixed = Step(cell, cell.batch, suite="memory")
    return {
        "temp_bytes": fixed.temp_bytes,
        "peak_bytes": fixed.peak_bytes,
        "batch_in_80gb": largest(
            lambda batch: Step(cell, batch, suite="memory").peak_bytes,
            models.BUDGET_BYTES,
            {cell.batch: fixed.peak_bytes},
        ),
    }


def speed(step: Step) -> Figures:
    """Median time of a step, from its call to its result."""
    state = step.initial()
    tokens = jax.random.randint(jax.random.key(1), step.batch_shape, 0, VOCABULARY, jnp.int32)
    times = []
    for _ in range(WARMUP + REPEATS):
        start = time.perf_counter()
        state, loss = step.run(state, tokens)
        jax.block_until_ready((state, loss))
        times.append(1e3 * (time.perf_counter() - start))
    ms = statistics.median(times[WARMUP:])
    return {"ms": ms, "tokens_per_s": step.tokens / ms * 1e3}


def prepare(suite: str, cell: TrainingCell) -> Callable[[], Figures]:
    """What measures a cell of "memory", which runs nothing, or of "steps"; compiles it."""
    if suite == "memory":
        figures = memory(cell)
        return lambda: figures
    step = Step(cell, cell.batch)
    _ = step.initial
    return functools.partial(speed, step)


def largest(used: Callable[[int], int], limit: int, known: Mapping[int, int]) -> int:
    """The largest n with ``used(n) <= limit``, or 0; `used` grows, more or less along a line.

    For where asking is dear; ``known`` holds at least one value of ``used``. The answer is exact
    however `used` bends: n was asked and fits, n + 1 was asked and does not.
    """
    values = dict(known)
    while True:
        below = max((n for n, value in values.items() if value <= limit), default=0)
        above = min((n for n, value in values.items() if value > limit), default=None)
        if above == below + 1:
            return below
        if len(values) - len(known) >= _GUESSES or len(values) == 1:
            n = 2 * below if above is None else (below + above) // 2
        else:
            n = max(_on_the_line(values, limit), below + 1)
            n = n if above is None else min(n, above - 1)
        values[n] = used(n)


def _on_the_line(values: Mapping[int, int], limit: int) -> int:
    """Where the line through the two values next to the limit reaches it."""
    (a, low), (b, high) = sorted(sorted(values.items(), key=lambda item: abs(item[1] - limit))[:2])
    return b if high <= low else int(a + (limit - low) * (b - a) / (high - low))
