"""fit_memory: a compiled training step that fits into a given memory with little recomputation."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnorm.remat import cuts, planning
from jaxnorm.remat.auto_remat import indices, planned
from jaxnorm.remat.cuts import Point
from jaxnorm.remat.planning import Survey
from jaxnorm.remat.regions import Mask, Pricing, Region

_NAME = "jaxnorm.fit_memory"
# Maximum number of compilations.
_TRIALS = 5


def fit_memory(
    step: Callable[..., Any],
    *args: Any,
    limit: int | float,
    donate_argnums: int | Sequence[int] = (),
) -> jax.stages.Compiled:
    """Compile a training step so that it fits into a given memory with little recomputation.

    The step is not run. It is compiled at most five times: first without recomputation, then with
    :func:`jaxnorm.auto_remat`, then with budgets that are derived from the memory of the previous
    programs. The memory of a program is XLA's plan for one device,
    ``compiled.memory_analysis()``: the bytes of arguments, results and temporary arrays, without
    results that reuse the memory of donated arguments.

    Args:
      step: a function ``step(remat, *args)``. It calls the decorator ``remat`` with the function to
        differentiate, such as the loss, or with parts of it, such as the layers:
        ``jax.grad(remat(loss))(weights, batch)``. The limit applies to the whole step.
      args: the arguments after ``remat``: trees of arrays or of ``jax.ShapeDtypeStruct``.
      limit: the largest memory, in bytes, that the step may need.
      donate_argnums: index or indices of the arguments in ``args`` whose memory the step may reuse,
        as for ``jax.jit``.

    Returns:
      The compiled step, which is called with ``*args``: the program with the least predicted
      recomputation among the compiled programs that need at most ``limit`` bytes.

    Raises:
      TypeError: ``step`` is not a function; ``limit`` is not a number.
      ValueError: ``limit`` is not positive; ``step`` does not call ``remat``; no compiled program
        is within the limit (the message states the least memory that was reached).

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> def loss(w, x):
      ...     return jnp.sum(jnp.tanh(jnp.sin(x @ w)) ** 2)
      >>> def step(remat, w, x):
      ...     return w - 0.1 * jax.grad(remat(loss))(w, x)
      >>> w, x = jnp.ones((64, 64)), jnp.ones((1024, 64))
      >>> compiled = jaxnorm.fit_memory(step, w, x, limit=2**20, donate_argnums=0)
      >>> compiled(w, x).shape
      (64, 64)
    """
    if not callable(step):
        raise TypeError(
            f"{_NAME}: step is a {type(step).__name__}; expected a function step(remat, *args)"
        )
    if isinstance(limit, bool) or not isinstance(limit, (int, float, np.integer, np.floating)):
        raise TypeError(
            f"{_NAME}: limit={limit!r} is a {type(limit).__name__}; expected a number of bytes"
        )
    if not limit > 0:
        raise ValueError(f"{_NAME}: limit={limit!r}; expected a positive number of bytes")
    return _Search(step, args, limit, indices(_NAME, "donate_argnums", donate_argnums, len(args)))()


class _Trial(NamedTuple):
    """A program, its memory in bytes, and the predicted costs of its choices.

    `compiled` is None if the program has not been compiled, or if the compiler refused it.
    """

    compiled: jax.stages.Compiled | None
    memory: float
    point: Point


class _Search:
    """A search for the program with the least recomputation that fits into a given memory.

    For all functions that `remat` wraps, the same number of bytes is worth a second of
    recomputation, so their graphs have one common frontier. The points of the frontier predict only
    by how much the memory of two programs differs. The memory itself is known only for programs
    that have been compiled.
    """

    def __init__(
        self, step: Callable[..., Any], args: Sequence[Any], limit: float, donated: Sequence[int]
    ) -> None:
        self._step, self._args, self._limit, self._donated = step, args, limit, donated
        self._memories: list[float] = []
        self._surveys: dict[Region, Survey] = {}

    def __call__(self) -> jax.stages.Compiled:
        wrapped: list[Callable[..., Any]] = []

        def plainly(fun: Callable[..., Any]) -> Callable[..., Any]:
            wrapped.append(fun)
            return fun

        compiled, memory = self._compiled(plainly)
        if not wrapped:
            raise ValueError(
                f"{_NAME}: step does not call its first argument, remat; expected a function "
                "step(remat, *args) that differentiates remat(loss), or a loss of remat(layer)"
            )
        if compiled is not None and memory <= self._limit:
            return compiled
        auto = self._compiled(lambda fun: planned(fun, self._recorded))
        survey = _joined([*self._surveys.values()])
        plain = _Trial(compiled, memory, survey.above)
        return self._between(survey, plain, _Trial(*auto, _unlimited(survey)))

    def _between(self, survey: Survey, plain: _Trial, auto: _Trial) -> jax.stages.Compiled:
        """Return the best program, given a trial without `auto_remat`, and one without a budget."""
        least = cuts.within(survey.graphs, survey.below.bytes, survey.above, survey.below)
        tried = [auto.point.cuts, plain.point.cuts]
        # `above` is the last program that does not fit, `below` the last program that fits. Until a
        # program fits, `below` is the point with the fewest bytes, without a compiled program.
        before, above, below = plain, auto, _Trial(None, math.nan, least)
        if auto.memory <= self._limit:
            above, below = plain, auto
        for left in reversed(range(_TRIALS - len(self._memories))):
            if below.compiled is not None:
                share = (self._limit - below.memory) / (above.memory - below.memory)
                target = below.point.bytes + share * (above.point.bytes - below.point.bytes)
            elif left == 0:
                target = least.bytes
            else:
                target = above.point.bytes - (above.memory - self._limit) / _slope(before, above)
            point: Point | None
            point = cuts.within(survey.graphs, max(target, least.bytes), above.point, below.point)
            if point.cuts in tried:
                # A program that saves more bytes may nevertheless need less memory in total.
                point = cuts.between(survey.graphs, above.point, below.point)
            if point is None:
                break
            tried.append(point.cuts)
            trial = _Trial(*self._compiled(_priced(survey.pricing(point))), point)
            if trial.memory <= self._limit:
                below = trial
            elif point.bytes > least.bytes:
                before, above = above, trial
        if below.compiled is None:
            reached = min(self._memories)
            raise ValueError(
                f"{_NAME}: limit={self._limit:.0f} bytes; the least that {len(self._memories)} "
                f"compilations reached is {reached} bytes; give a larger limit, wrap a larger part "
                "of the step with remat, or make the batch smaller"
            )
        return below.compiled

    def _compiled(
        self, remat: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> tuple[jax.stages.Compiled | None, float]:
        """Compile the step, and return the program and its memory.

        A compiler may refuse a program that does not fit into the device. The result is then None,
        and the memory is infinite.
        """

        def run(*args: Any) -> Any:
            return self._step(remat, *args)

        run.__name__ = getattr(self._step, "__name__", "step")
        lowered = jax.jit(run, donate_argnums=self._donated).lower(*self._args)
        compiled, memory = None, math.inf
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        else:
            plan: Any = compiled.memory_analysis()
            memory = plan.argument_size_in_bytes + plan.output_size_in_bytes
            memory += plan.temp_size_in_bytes - plan.alias_size_in_bytes
        self._memories.append(memory)
        return compiled, memory

    def _recorded(
        self, region: Region, mask: Mask, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> Pricing:
        """Record the choices of a wrapped function, and return the pricing without a budget."""
        self._surveys[region] = planning.survey(region, mask, primals, tangents)
        return planning.unlimited()


def _priced(pricing: Pricing) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that applies `auto_remat` at a price."""
    return lambda fun: planned(fun, lambda *_: pricing)


def _joined(surveys: Sequence[Survey]) -> Survey:
    """Return one survey of several functions, as if they were one function."""
    regions = tuple(pair for survey in surveys for pair in survey.regions)
    above, below = cuts.ends([pair for survey in surveys for pair in survey.graphs])
    return Survey(
        default=sum(survey.default for survey in surveys),
        seconds=math.fsum(survey.seconds for survey in surveys),
        regions=regions,
        fixed=sum(survey.fixed for survey in surveys),
        above=above,
        below=below,
    )


def _unlimited(survey: Survey) -> Point:
    """Return the choice without a budget."""
    pricing = planning.unlimited()
    chosen = tuple(pricing.cut(graph) for graph, _ in survey.graphs)
    return cuts.point(survey.graphs, pricing.price, chosen)


def _slope(before: _Trial, above: _Trial) -> float:
    """Return the decrease of memory between two trials, divided by the decrease of saved bytes.

    The result is 1 if this quotient is not positive or not finite.
    """
    saved = before.point.bytes - above.point.bytes
    slope = (before.memory - above.memory) / saved if saved > 0 else math.nan
    return slope if 0 < slope < math.inf else 1.0
