"""Measures training steps of the models in language_models.py: time, memory and losses."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import language_models, timing
from benchmarks.language_models import Model, State
from benchmarks.models import LOSS_STEPS, TrainingCell
from benchmarks.variants import VARIANTS

Figures = dict[str, float | None]
WARMUP = 3


class Step:
    """A training step and its inputs. Its programs are compiled when they are first used.

    Attributes:
      run: the compiled step. It takes a state, which it overwrites, and tokens, and returns the new
        state and the loss.
      options: compiler options for XLA.
      initial: a function that returns the initial state.
      batch: a function that returns the tokens of step number i.

    The constructor's argument `shardings` is a function of the state. It returns the shardings of
    the state and of the tokens; by default, both are None. `remat` is applied to the loss.
    """

    def __init__(
        self,
        cell: TrainingCell,
        batch: int,
        shardings: Callable[[State], tuple[Any, Any]] = lambda state: (None, None),
        remat: Callable[..., Any] = lambda loss: loss,
    ) -> None:
        self.remat = remat
        self.model = Model(
            cell.size,
            VARIANTS[cell.provider],
            cell.remat,
            cell.dtype,
            cell.layers,
            "cudnn" if jax.default_backend() == "gpu" else "xla",
        )
        self.tokens = batch * cell.size.seq
        self.options = timing.matmul_options()
        self._batch_shape = (batch, cell.size.seq + 1)
        self._types = jax.eval_shape(lambda: (self._initial(), self._batch(0)))
        self._state_shardings, self._batch_shardings = shardings(self._types[0])

    def trace(self) -> Any:
        step = functools.partial(language_models.train_step, self.model, remat=self.remat)
        jitted = jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(self._state_shardings, self._batch_shardings),
            out_shardings=(self._state_shardings, None),
        )
        return jitted.trace(*self._types)

    @functools.cached_property
    def lowered(self) -> Any:
        return self.trace().lower()

    @functools.cached_property
    def run(self) -> Any:
        return self.lowered.compile(self.options)

    @functools.cached_property
    def initial(self) -> Callable[[], State]:
        lowered = jax.jit(self._initial, out_shardings=self._state_shardings).lower()
        return lowered.compile(self.options)

    @functools.cached_property
    def batch(self) -> Callable[[int], jax.Array]:
        return jax.jit(self._batch, out_shardings=self._batch_shardings).lower(0).compile()

    def _initial(self) -> State:
        params = self.model.init(jax.random.key(0))
        return params, language_models.OPTIMIZER.init(params)

    def _batch(self, step: int) -> jax.Array:
        """Return random tokens. Their frequencies are proportional to 1 / (1 + token).

        A model can learn these frequencies, so the loss decreases.
        """
        uniform = jax.random.uniform(jax.random.key(step), self._batch_shape)
        vocabulary = self.model.size.vocabulary
        tokens = jnp.exp(uniform * jnp.log(vocabulary + 1.0)).astype(jnp.int32) - 1
        return jnp.clip(tokens, 0, vocabulary - 1)

    @property
    def temp_bytes(self) -> int:
        """Number of bytes that XLA plans for intermediates."""
        return int(self.run.memory_analysis().temp_size_in_bytes)

    @property
    def peak_bytes(self) -> int:
        """Number of bytes that a step needs: arguments, temp memory, and results in new buffers."""
        m = self.run.memory_analysis()
        results = m.output_size_in_bytes - m.alias_size_in_bytes
        return int(m.argument_size_in_bytes + results + m.temp_size_in_bytes)

    def times(self, steps: int) -> tuple[list[float], list[float]]:
        """Run steps. Return the milliseconds and the loss of each step."""
        state, times, losses = self.initial(), [], []
        for i in range(steps):
            tokens = jax.block_until_ready(self.batch(i))
            start = time.perf_counter()
            state, loss = jax.block_until_ready(self.run(state, tokens))
            times.append(1e3 * (time.perf_counter() - start))
            losses.append(float(loss))
        return times, losses

    def round(self, steps: int) -> tuple[float, float]:
        """Return the mean milliseconds of `steps` steps that run back to back, and the first loss.

        Two steps before them, the first of which has the initial state, are not timed.
        """
        tokens = self.batch(0)
        state, first = self.run(self.initial(), tokens)
        state, _ = self.run(state, tokens)
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(steps):
            state, _ = self.run(state, tokens)
        jax.block_until_ready(state)
        return 1e3 * (time.perf_counter() - start) / steps, float(first)


def speed(step: Step) -> Figures:
    """Return the results of the suite `training`: median time, memory and losses."""
    times, losses = step.times(LOSS_STEPS[-1])
    ms = statistics.median(times[WARMUP:])
    return {
        "ms": ms,
        "tokens_per_s": step.tokens / ms * 1e3,
        "temp_bytes": step.temp_bytes,
        "peak_bytes": step.peak_bytes,
        **{f"loss_{n}": losses[n - 1] for n in LOSS_STEPS},
    }


def compile_seconds(cell: TrainingCell) -> Figures:
    """Return the results of the suite `compile`: the seconds to trace, lower and compile a step.

    Without a GPU, the step is lowered for a GPU but not compiled.
    """
    jax.config.update("jax_enable_compilation_cache", False)  # do not load programs from a cache
    on_gpu = jax.default_backend() == "gpu"
    step = Step(cell, cell.batch)
    jax.clear_caches()
    times = [time.perf_counter()]
    traced = step.trace()
    times.append(time.perf_counter())
    lowered = traced.lower() if on_gpu else traced.lower(lowering_platforms=("cuda",))
    times.append(time.perf_counter())
    if on_gpu:
        lowered.compile(step.options)
    times.append(time.perf_counter())
    trace_s, lower_s, compile_s = (b - a for a, b in itertools.pairwise(times))
    return {
        "trace_s": trace_s,
        "lower_s": lower_s,
        "compile_s": compile_s if on_gpu else None,
        "total_s": times[-1] - times[0],
    }


@functools.cache
def _warm_up(variant: str) -> None:
    """Compile another step, so that modules are imported and compilers are initialised."""
    compile_seconds(TrainingCell("gpt2-small", "none", "scan", "bfloat16", 1, variant))


def prepare(suite: str, cell: Any) -> Callable[[], Figures]:
    """Compile a cell of the suite "training" or "compile", and return a function that measures it.

    The suite "compile" measures the compilation itself.
    """
    if suite == "compile":
        _warm_up(cell.provider)
        figures = compile_seconds(cell.step)
        return lambda: figures
    step = Step(cell, cell.batch)
    _ = step.run, step.initial, step.batch
    return functools.partial(speed, step)
