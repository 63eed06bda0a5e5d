"""Minimum cuts: which values of a program to save, and which to recompute.

The derivative of a program needs some of its values, the residuals. Each value is either saved,
which costs its bytes, or recomputed, which costs seconds and needs the operands of its equation.
For a given price of a second in bytes, the cheapest choice is a minimum cut of the graph below.
Values on the source's side of the cut are known to the backward pass::

    source -> equation      price * seconds; infinite if the equation must not run again
    operand -> equation     infinite: an equation that runs again needs its operands
    equation -> value       infinite: the equation computes the value
    value -> value'         bytes of the value: it is saved
    residual' -> sink       infinite: the residual is needed

Each value has two nodes, value and value', joined by an edge that stands for saving the value. The
node "operand" in this list is the node value' of the operand. Consider all choices as points in
the plane of bytes and seconds. The cuts for all prices are the vertices of the lower convex hull of
these points.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

# Capacities are 32-bit integers in scipy. All finite capacities together are at most `_TOTAL`.
_INFINITE, _TOTAL = 2**30, 2**29
#: A point counts as a vertex of the hull only if its distance below the line between its neighbours
#: is more than this fraction of the bytes. Smaller distances are rounding errors of capacities.
PRECISION = 1e-6


@dataclasses.dataclass(frozen=True)
class Cut:
    """A choice of saved values.

    Attributes:
      saved: indices of the saved values, ascending.
      bytes: total size of the saved values.
      seconds: time of the equations that run again.
      again: indices of the equations that run again, ascending.
    """

    saved: tuple[int, ...]
    bytes: int
    seconds: float
    again: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation of a graph.

    Attributes:
      seconds: time to run the equation again; infinite if it must never run again.
      operands: indices of its operands, without values that are always available.
      results: indices of the values that it computes.
      is_costly: if True, the equation may run again only if there is a budget.
      is_anchor: if True, the equation may run again only if there is no budget.
    """

    seconds: float
    operands: tuple[int, ...]
    results: tuple[int, ...]
    is_costly: bool = False
    is_anchor: bool = False


class Graph:
    """The equations of a program, the sizes of its values, and the residuals of its derivative.

    Values that no equation computes, such as the carry of a scan, can only be saved.
    """

    def __init__(
        self, sizes: Sequence[int], steps: Sequence[Step], residuals: Sequence[int]
    ) -> None:
        self.sizes, self.steps = tuple(sizes), tuple(steps)
        self.residuals = tuple(dict.fromkeys(residuals))
        self._maker = {v: i for i, step in enumerate(self.steps) for v in step.results}
        self._tails, self._heads = self._edges()
        self._key = self.sizes, self.steps, self.residuals
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def choice(self, saved: Sequence[int]) -> Cut:
        """Return the choice that saves those of the given values that are needed.

        Needed values that no equation computes are saved as well.
        """
        given, used, again = {*saved}, set(), set()
        stack = [*self.residuals]
        seen = set(stack)
        while stack:
            v = stack.pop()
            step = self._maker.get(v)
            if v in given or step is None:
                used.add(v)
            elif step not in again:
                again.add(step)
                new = [u for u in self.steps[step].operands if u not in seen]
                seen.update(new)
                stack += new
        seconds = math.fsum(self.steps[i].seconds for i in again)
        size = sum(self.sizes[v] for v in used)
        return Cut(tuple(sorted(used)), size, seconds, tuple(sorted(again)))

    def cut(self, price: float, allow_costly: bool = True) -> Cut:
        """Return the choice with the least ``bytes + price * seconds``.

        Args:
          price: number of bytes that are worth one second.
          allow_costly: True if costly equations may run again.
        """
        return _cut(self, price, allow_costly)

    def minimum(self, price: float, allow_costly: bool) -> Cut:
        """Compute the result of `cut`, without a cache."""
        if price == math.inf or not any(self.sizes):
            return self.choice(self.residuals)
        values, steps = len(self.sizes), len(self.steps)
        never = [
            step.seconds == math.inf or (step.is_anchor if allow_costly else step.is_costly)
            for step in self.steps
        ]
        prices = [0.0 if n else price * s.seconds for n, s in zip(never, self.steps)]
        finite = np.array([*self.sizes, *prices])
        capacities = np.full(len(self._tails), _INFINITE, np.int32)
        capacities[: values + steps] = np.ceil(finite / (finite.sum() / _TOTAL))
        capacities[values : values + steps][never] = _INFINITE
        shape = (2 + steps + 2 * values,) * 2
        graph = csr_array((capacities, (self._tails, self._heads)), shape=shape)
        rest = graph - maximum_flow(graph, 0, 1, method="dinic").flow
        rest.data[rest.data < 0] = 0
        rest.eliminate_zeros()
        known = np.zeros(shape[0], bool)
        known[breadth_first_order(rest, 0, return_predecessors=False)] = True
        before, after = known[2 + steps :: 2], known[3 + steps :: 2]
        return self.choice(np.flatnonzero(before & ~after).tolist())

    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tails and the heads of all edges.

        The edges of values come first, then those of steps, then edges of infinite capacity. Node 0
        is the source, and node 1 the sink. A node for each step follows, then two for each value.
        """
        first = 2 + len(self.steps)
        edges = [(first + 2 * v, first + 2 * v + 1) for v in range(len(self.sizes))]
        edges += [(0, 2 + i) for i in range(len(self.steps))]
        given = set(range(len(self.sizes))) - self._maker.keys()
        edges += [(0, first + 2 * v) for v in sorted(given)]
        for i, step in enumerate(self.steps):
            edges += [(first + 2 * v + 1, 2 + i) for v in dict.fromkeys(step.operands)]
            edges += [(2 + i, first + 2 * v) for v in step.results]
        edges += [(first + 2 * v + 1, 1) for v in self.residuals]
        tails, heads = np.array(edges, np.int32).reshape(-1, 2).T
        return tails, heads


@functools.lru_cache(maxsize=1024)
def _cut(graph: Graph, price: float, allow_costly: bool) -> Cut:
    """Return `Graph.cut` from a cache.

    Outside of `jax.jit`, each call of the same function builds a new, but equal, graph.
    """
    return graph.minimum(price, allow_costly)


# Graphs, each with the number of times that it runs.
type Weighted = Sequence[tuple[Graph, int]]


@dataclasses.dataclass(frozen=True)
class Point:
    """A choice for several graphs, each of which runs a number of times.

    Attributes:
      bytes, seconds: totals of all runs of all graphs.
      price: a price of a second in bytes at which the choice is the cheapest.
      cuts: the choice for each graph.
    """

    bytes: int
    seconds: float
    price: float
    cuts: tuple[Cut, ...]


def point(graphs: Weighted, price: float, cuts: Sequence[Cut]) -> Point:
    """Return the `Point` whose `cuts` has one choice per graph, in the order of `graphs`."""
    size = sum(runs * cut.bytes for (_, runs), cut in zip(graphs, cuts))
    seconds = math.fsum(runs * cut.seconds for (_, runs), cut in zip(graphs, cuts))
    return Point(size, seconds, price, tuple(cuts))


def ends(graphs: Weighted) -> tuple[Point, Point]:
    """Return a pair: the point that recomputes nothing, and the point with the fewest bytes."""
    nothing_again = point(graphs, math.inf, [g.choice(g.residuals) for g, _ in graphs])
    return nothing_again, point(graphs, 0.0, [g.cut(0.0) for g, _ in graphs])


def between(graphs: Weighted, above: Point, below: Point) -> Point | None:
    """Return a vertex of the convex hull between two of the hull's points; None if none exists."""
    if above.bytes <= below.bytes or above.seconds >= below.seconds:
        return None
    slope = (above.bytes - below.bytes) / (below.seconds - above.seconds)
    found = point(graphs, slope, [g.cut(slope) for g, _ in graphs])
    gain = above.bytes + slope * (above.seconds - found.seconds) - found.bytes
    is_vertex = gain > PRECISION * above.bytes
    return found if is_vertex and below.bytes <= found.bytes < above.bytes else None


def frontier(graphs: Weighted, above: Point, below: Point) -> list[Point]:
    """Return the vertices of the convex hull from `above` to `below`, with falling bytes."""
    if (middle := between(graphs, above, below)) is None:
        return [above, below] if below.bytes < above.bytes else [above]
    if middle.bytes == below.bytes:  # For the same bytes, `below` recomputes more than `middle`.
        return frontier(graphs, above, middle)
    first, second = frontier(graphs, above, middle), frontier(graphs, middle, below)
    return [*first[:-1], *second]


def within(graphs: Weighted, budget: float, above: Point, below: Point) -> Point:
    """Return, of all vertices of the hull within the budget, the one with the most bytes.

    `below` must be within the budget.
    """
    if above.bytes <= budget:
        return above
    while (middle := between(graphs, above, below)) is not None:
        above, below = (middle, below) if middle.bytes > budget else (above, middle)
    return below
