"""remat_plan: the arrays that a function saves with `auto_remat`, and the cost of saving fewer."""

import dataclasses
import html
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxnorm.remat import costs
from jaxnorm.remat.auto_remat import Call, auto_remat, check_budget, indices
from jaxnorm.remat.regions import Linearized, Pricing, is_inexact
from jaxnorm.tools import saved_names
from jaxnorm.tools.memory_report import KeptArray, MemoryReport, report_of
from jaxnorm.tools.saved_names import Line, Saved
from jaxnorm.tools.text import mib, short, table

_NAME = "jaxnorm.remat_plan"
# Limits of the printed plan: characters in a line, rows of arrays, points of the frontier, and
# lines with `checkpoint_name`.
_WIDTH, _ROWS, _POINTS, _NAMES = 100, 12, 8, 12
_BY_HAND = (
    "the same by hand: jax.checkpoint(f, policy=policy), for a function or a loop's body, and"
)


class RematPoint(NamedTuple):
    """A point of a plan's frontier.

    Attributes:
      bytes: number of bytes that the function saves for its backward pass.
      recompute: predicted time of recomputation, divided by the time of both passes.
    """

    bytes: int
    recompute: float


@dataclasses.dataclass(frozen=True)
class RematPlan:
    """The arrays that a function saves with `auto_remat`. `str` returns a summary.

    Attributes:
      saved: groups of similar arrays, the largest first, as in `MemoryReport.rows`.
      total: number of bytes of all saved arrays, without arguments.
      default: number of bytes that JAX saves without `auto_remat`.
      recompute: predicted time of recomputation, divided by the time of both passes.
      frontier: points with falling bytes, from ``(default, 0)`` to the least possible bytes. Each
        point is an optimum: no plan has fewer bytes at the same recomputation.
        ``auto_remat(fun, budget=point.bytes)`` reaches it.
    """

    saved: tuple[KeptArray, ...]
    total: int
    default: int
    recompute: float
    frontier: tuple[RematPoint, ...]
    _lines: Sequence[Line] = dataclasses.field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        rows = MemoryReport(self.total, self.saved).table(_ROWS) if self.saved else ""
        parts = (rows or "no array is saved", self._summary(), self._names())
        return "\n\n".join(part for part in parts if part)

    def _summary(self) -> str:
        lines = [
            f"saved: {mib(self.total)} MiB; without auto_remat {mib(self.default)} MiB",
            f"recomputation: {self.recompute:.1%} of the predicted time of the two passes",
            "frontier (MiB: recomputation)",
        ]
        points = self.frontier
        step = max(1, -(-len(points) // _POINTS))
        some = dict.fromkeys([*points[::step], points[-1]])
        return "\n".join([*lines, *(f"  {mib(p.bytes)}: {p.recompute:.1%}" for p in some)])

    def _names(self) -> str:
        """Return the `checkpoint_name` calls and the policy that save these arrays, as text."""
        if not self._lines:
            return ""
        names = ", ".join(f'"{line.name}"' for line in self._lines)
        policy = f"policy = jax.checkpoint_policies.save_only_these_names({names})"
        rows = [(line.place, line.text) for line in self._lines[:_NAMES]]
        named = [short(f"  {row}", _WIDTH) for row in table(rows, left=(0, 1)).splitlines()]
        more = [f"  {len(self._lines) - _NAMES} more lines"] * (len(self._lines) > _NAMES)
        return "\n".join([_BY_HAND, *named, *more, *textwrap.wrap(policy, _WIDTH)])

    def plot(self, ax: Any = None) -> Any:
        """Plot the frontier with matplotlib, and return the axes.

        Args:
          ax: axes of matplotlib; None for new ones.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots()
        ax.plot(
            [point.bytes / 2**20 for point in self.frontier],
            [100 * point.recompute for point in self.frontier],
            marker=".",
        )
        ax.plot([self.total / 2**20], [100 * self.recompute], "o", label="this plan")
        ax.set_xlabel("saved MiB")
        ax.set_ylabel("recomputation, % of both passes")
        ax.legend()
        return ax

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def remat_plan(
    fun: Callable[..., Any],
    *args: Any,
    budget: int | float | None = None,
    argnums: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> RematPlan:
    """Return the arrays that a function saves with `auto_remat`. The function is not run.

    Args:
      fun: the function to differentiate, as for ``jax.grad`` or ``jax.vjp``.
      args: the function's arguments: trees of arrays or of ``jax.ShapeDtypeStruct``. Other leaves
        are passed unchanged.
      budget: the budget, as for :func:`jaxnorm.auto_remat`.
      argnums: index or indices of the arguments whose floating-point arrays are differentiated.
      static_argnums: index or indices of arguments that are passed unchanged.
      kwargs: the function's keyword arguments, which are not differentiated.

    Returns:
      A :class:`RematPlan`; ``print`` it for a summary.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the budget is out of range, or less than the least possible number of bytes; an
        index is not the index of an argument.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> def mlp(w, x):
      ...     return jnp.sum((jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"])
      >>> shapes = {"gate": (64, 256), "up": (64, 256), "down": (256, 64)}
      >>> w = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
      >>> x = jax.ShapeDtypeStruct((1024, 64), "float32")
      >>> plan = jaxnorm.remat_plan(mlp, w, x)
      >>> plan.total / 2**20, plan.default / 2**20
      (2.0, 6.0)
    """
    if not callable(fun):
        raise TypeError(f"{_NAME}: fun is a {type(fun).__name__}; expected a function")
    check_budget(_NAME, budget)
    chosen = indices(_NAME, "argnums", argnums, len(args))
    fixed = indices(_NAME, "static_argnums", static_argnums, len(args))

    def of_arrays(*given: Any) -> Any:
        *dynamic, keywords = given
        found = iter(dynamic)
        every = [a if i in fixed else next(found) for i, a in enumerate(args)]
        return fun(*every, **keywords)

    dynamic = [i for i in range(len(args)) if i not in fixed]
    arguments = [*(args[i] for i in dynamic), kwargs]
    along = [k for k, i in enumerate(dynamic) if i in chosen]
    call = Call(of_arrays, arguments, {}, ())
    found = call.survey([i in along and is_inexact(a) for i, a in zip(call.owners, call.arrays)])
    pricing = found.chosen(_NAME, budget)
    report = report_of(
        auto_remat(of_arrays, budget=budget), arguments, argnums=along, has_advice=False
    )
    points = tuple(RematPoint(*point) for point in found.frontier())
    lines = saved_names.lines([_saved(derivative, pricing) for _, derivative in found.regions])
    recompute = found.recomputed(pricing)
    return RematPlan(report.rows, report.total, found.default, recompute, points, lines)


def _saved(derivative: Linearized, pricing: Pricing) -> Saved:
    """Return the arrays that a region saves, except its inputs and results of scans."""
    simple = [e for e in derivative.known if not costs.contains(e, "scan")]
    made = {v for e in simple for v in e.outvars}
    chosen = [derivative.values[i] for i in pricing.cut(derivative.graph).saved]
    return Saved(derivative.known, derivative.outputs, [v for v in chosen if v in made])
