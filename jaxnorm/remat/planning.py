"""The choice of one price of recomputation for all regions of a function, to meet a budget."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxnorm.remat import costs, cuts
from jaxnorm.remat.cuts import Point
from jaxnorm.remat.programs import variables
from jaxnorm.remat.regions import Linearized, Mask, Pricing, Region, sizes

type Budget = int | float | None


@functools.cache
def unlimited() -> Pricing:
    """Return the pricing without a budget, by which nothing costly runs twice."""
    return Pricing(costs.bytes_per_second())


@dataclasses.dataclass(frozen=True)
class Survey:
    """The choices of saved arrays that a function has, and what each choice costs.

    Attributes:
      default: number of bytes that JAX saves without `auto_remat`.
      seconds: predicted time of the forward and the backward pass.
      regions: pairs (region, derivative), for the regions whose choices the budget decides.
      fixed: number of bytes, 0 or negative, to add to the bytes of each point. It corrects for
        arrays that are counted twice: the graph of a region also has the arrays that regions inside
        this region save without a budget.
      above: the point with the most bytes.
      below: the point with the fewest bytes.
    """

    default: int
    seconds: float
    regions: tuple[tuple[Region, Linearized], ...]
    fixed: int
    above: Point
    below: Point

    @property
    def graphs(self) -> list[tuple[cuts.Graph, int]]:
        return [(linearized.graph, region.runs) for region, linearized in self.regions]

    @property
    def least(self) -> int:
        return self.below.bytes + self.fixed

    def within(self, budget: float) -> Point | None:
        """Return the point with the most bytes within the budget; None if no point is within it."""
        if budget < self.least:
            return None
        return cuts.within(self.graphs, budget - self.fixed, self.above, self.below)

    def chosen(self, function: str, budget: Budget) -> Pricing:
        """Return the pricing for a budget.

        Raises:
          ValueError: the budget is smaller than the least possible number of bytes.
        """
        if budget is None:
            return unlimited()
        limit = budget * self.default if isinstance(budget, float) else budget
        if (point := self.within(limit)) is None:
            share = math.ceil(1e4 * self.least / self.default) / 1e4
            raise ValueError(
                f"{function}: budget={budget!r}; the least possible is {self.least} bytes, or "
                f"{share} of the {self.default} bytes that are saved without auto_remat; give a "
                "larger budget, or wrap a larger part of the program"
            )
        return self.pricing(point)

    def recomputed(self, pricing: Pricing) -> float:
        """Return the predicted time of recomputation, divided by the time of both passes."""
        seconds = math.fsum(runs * pricing.cut(graph).seconds for graph, runs in self.graphs)
        return seconds / (self.seconds or 1.0)

    def frontier(self) -> list[tuple[int, float]]:
        """Return all points, from the default to the least bytes.

        A point is a pair: the saved bytes, and the time of recomputation as a share of the time of
        the forward and the backward pass.
        """
        points = cuts.frontier(self.graphs, self.above, self.below)
        found = [(p.bytes + self.fixed, p.seconds / (self.seconds or 1.0)) for p in points]
        return [(self.default, 0.0), *(p for p in found if p[0] < self.default and p[1] > 0)]

    def pricing(self, point: Point) -> Pricing:
        """Return the pricing by which the regions make the choices of a point."""
        leaves = [not region.parts for region, _ in self.regions]
        graphs = [graph for (graph, _), is_leaf in zip(self.graphs, leaves) if is_leaf]
        chosen = [cut for cut, is_leaf in zip(point.cuts, leaves) if is_leaf]
        return Pricing(point.price, True, dict(zip(graphs, chosen)), unlimited())


def survey(region: Region, mask: Mask, primals: Sequence[Any], tangents: Sequence[Any]) -> Survey:
    """Trace the derivative of a function, and return the choices that the function has.

    Args:
      region: the region of the whole function.
      mask: a bool for each input: True if it is differentiated.
      primals: all inputs: arrays, or types of arrays.
      tangents: the tangents of the differentiated inputs: arrays, or types of arrays.
    """
    default = default_bytes(region, mask, primals)
    linearized = region.linearized(unlimited(), mask, primals, tangents)
    regions = tuple((r, r.latest) for r in region.budgeted() if r.latest is not None)
    # Arrays that inner regions save are also in the graphs of outer regions; see `Survey.fixed`.
    inside = [(r, unlimited().cut(d.graph)) for r, d in regions if r is not region]
    fixed = -sum(r.runs * cut.bytes for r, cut in inside)
    above, below = cuts.ends([(d.graph, r.runs) for r, d in regions])
    return Survey(default, linearized.seconds, regions, fixed, above, below)


def default_bytes(region: Region, mask: Mask, primals: Sequence[Any]) -> int:
    """Return the number of bytes that JAX saves for the backward pass without `auto_remat`."""
    traced = jax.make_jaxpr(lambda primals: region.residuals(mask, primals))(list(primals)).jaxpr
    saved = {*variables(traced.outvars)} - {*traced.invars, *traced.constvars}
    return sum(size for v, size in sizes(traced.eqns).items() if v in saved)
