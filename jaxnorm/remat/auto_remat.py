"""auto_remat: a function with a derivative that saves as little as possible."""

import functools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from jaxnorm.primitives.recomputation import without_constants
from jaxnorm.remat import planning
from jaxnorm.remat.fingerprints import fingerprint
from jaxnorm.remat.planning import Budget
from jaxnorm.remat.regions import Mask, Pricing, Region

_NAME = "jaxnorm.auto_remat"
# Number of traced programs of a function whose plans are cached.
_CACHED = 32


def auto_remat[**P, T](
    fun: Callable[P, T],
    *,
    budget: int | float | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Callable[P, T]:
    """Return the same function, with a derivative that saves as few arrays as possible."""
    if not callable(fun):
        raise TypeError(f"{_NAME}: fun is a {type(fun).__name__}; expected a function")
    check_budget(_NAME, budget)
    places = static_places(_NAME, static_argnums)
    cache: dict[Hashable, tuple[Region, Planner]] = {}

    @functools.wraps(fun)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        call = Call(fun, args, kwargs, places)
        key = fingerprint(call.traced)
        if key not in cache:
            if len(cache) >= _CACHED:
                cache.pop(next(iter(cache)))
            cache[key] = call.region(), Planner(budget)
        region, planner = cache[key]
        return call.results(region(planner, *call.arrays))

    return run


class Planner:
    """The function that chooses the pricing for the derivative of a whole function."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._found: dict[Mask, Pricing | None] = {}

    def __call__(
        self, region: Region, mask: Mask, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> Pricing | None:
        if self._budget is None:
            return planning.unlimited()
        if mask not in self._found:
            found = planning.survey(region, mask, primals, tangents)
            self._found[mask] = priced(_NAME, found, self._budget)
        return self._found[mask]


def priced(function: str, found: planning.Survey, budget: int | float) -> Pricing | None:
    """Return the pricing within a budget; None if plain JAX is within it.

    Raises:
      ValueError: the budget is smaller than the least possible number of bytes.
    """
    limit = budget * found.default if isinstance(budget, float) else budget
    if limit >= found.default:
        return None
    if (point := found.within(limit)) is None:
        share = math.ceil(1e4 * found.least / found.default) / 1e4
        raise ValueError(
            f"{function}: budget={budget!r}; the least possible is {found.least} bytes, or "
            f"{share} of the {found.default} bytes that are saved without auto_remat; give a "
            "larger budget, or wrap a larger part of the program"
        )
    return found.pricing(point)


class Call:
    """A call of a function, traced.

    Leaves of the arguments and results that are not arrays, such as Python numbers and strings, are
    passed unchanged.

    Attributes:
      traced: a closed jaxpr without constants; arrays that the function closes over are arguments.
      arrays: its arguments.
    """

    def __init__(
        self, fun: Callable[..., Any], args: Sequence[Any], kwargs: Any, static: Sequence[int]
    ) -> None:
        places = {i % len(args) if -len(args) <= i < len(args) else i for i in static}
        dynamic = {i: a for i, a in enumerate(args) if i not in places}
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        arrays = {i: a for i, a in enumerate(leaves) if is_array(a)}

        def flat(arrays: dict[int, Any]) -> list[Any]:
            dynamic, kwargs = jax.tree.unflatten(tree, ({**dict(enumerate(leaves)), **arrays}).values())
            results = fun(*[dynamic.get(i, a) for i, a in enumerate(args)], **kwargs)
            self._leaves, self._tree = jax.tree.flatten(results)
            of_arrays = [a for a in self._leaves if is_array(a)]
            self._leaves = [None if is_array(a) else a for a in self._leaves]
            self._is_array = [a is None for a in self._leaves]
            return of_arrays

        traced = jax.make_jaxpr(flat)(arrays)
        self.traced = without_constants(traced)
        self.arrays = [*traced.consts, *arrays.values()]

    def region(self) -> Region:
        return Region(self.traced, [True] * len(self.arrays))

    def results(self, arrays: Sequence[Any]) -> Any:
        """Return the result of the call, given its arrays."""
        found = iter(arrays)
        leaves = [next(found) if is_array else a for a, is_array in zip(self._leaves, self._is_array)]
        return jax.tree.unflatten(self._tree, leaves)


def is_array(a: Any) -> bool:
    """Return True for an array or a `jax.ShapeDtypeStruct`; False for numbers of Python."""
    return isinstance(a, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def check_budget(function: str, budget: Any) -> None:
    """Raise an error unless the budget is None, a number of bytes, or a share."""
    expected = (
        "expected None, a number of bytes (an int of at least 0) or a share of the bytes that are "
        "saved without auto_remat (a float above 0, at most 1)"
    )
    if budget is None:
        return
    is_share = isinstance(budget, (float, np.floating))
    if isinstance(budget, (bool, np.bool_)) or not (is_share or _is_index(budget)):
        kind = type(budget).__name__
        raise TypeError(f"{function}: budget={budget!r} is a {kind}; {expected}")
    if not (0 < budget <= 1 if is_share else budget >= 0):
        raise ValueError(f"{function}: budget={budget!r}; {expected}")


def _is_index(value: Any) -> bool:
    return isinstance(value, (int, np.integer))


def static_places(function: str, static_argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Convert `static_argnums` to a tuple of integers."""
    given = static_argnums if isinstance(static_argnums, Sequence) else [static_argnums]
    try:
        return tuple(map(operator.index, given))
    except TypeError as error:
        raise TypeError(
            f"{function}: static_argnums={static_argnums!r}; expected an integer or a sequence of "
            "integers"
        ) from error
