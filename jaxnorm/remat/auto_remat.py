"""auto_remat: change a function's derivative so that it saves as little as possible."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls import private_jax
from jaxnorm.primitives.recomputation import without_constants
from jaxnorm.remat import planning
from jaxnorm.remat.planning import Survey
from jaxnorm.remat.regions import Plan, Pricing, Region

_NAME = "jaxnorm.auto_remat"


def auto_remat[**P, T](
    fun: Callable[P, T],
    *,
    budget: int | float | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Callable[P, T]:
    """Return the same function, with a derivative that saves as few arrays as possible.

    The backward pass of a function needs many of its intermediate arrays. JAX saves all of them.
    With ``auto_remat``, the function saves the smallest set of arrays from which the others can be
    recomputed. A minimum cut of the graph of its operations finds this set. Without a budget,
    nothing costly runs twice: no matmul, convolution, attention, sort, kernel, collective or loop.
    The bodies of scans, branches and ``jax.shard_map`` inside the function also get minimum cuts.

    The result has the values and derivatives of ``fun``, up to rounding. It can be transformed like
    ``fun``: by ``jax.jit``, ``jax.grad``, ``jax.vmap``, forward mode, or ``jax.checkpoint``.

    Args:
      fun: a function of trees of arrays, such as a training loss or a layer of a model. Leaves of
        its arguments and results that are not arrays are passed unchanged.
      budget: None, or a limit for the saved bytes. To meet it, costly operations run again, too:
        first those that free the most bytes for their time. An int is the number of bytes per
        device that the function may save for its backward pass, without its arguments. A float in
        (0, 1] is a share of the bytes that it saves without ``auto_remat``.
      static_argnums: index or indices of arguments that are passed unchanged, and not traced.

    Returns:
      A function with the signature, results, name and docstring of ``fun``.

    Raises:
      TypeError: ``fun`` is not a function; ``budget`` is not None, an int or a float.
      ValueError: ``budget`` is out of range. When the function is differentiated: ``budget`` is
        less than the least possible number of bytes, which the message states.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> def mlp(w, x):
      ...     return jnp.sum((jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"])
      >>> w = {"gate": jnp.ones((8, 16)), "up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
      >>> x = jnp.ones((4, 8))
      >>> jaxnorm.memory_report(mlp, w, x).total, jaxnorm.memory_report(
      ...     jaxnorm.auto_remat(mlp), w, x
      ... ).total
      (1536, 512)
    """
    if not callable(fun):
        raise TypeError(f"{_NAME}: fun is a {type(fun).__name__}; expected a function")
    check_budget(_NAME, budget)

    def plan(region: Region, *derivative: Any) -> Pricing:
        if budget is None:
            return planning.unlimited()
        return planning.survey(region, *derivative).chosen(_NAME, budget)

    return planned(fun, plan, indices(_NAME, "static_argnums", static_argnums))


def planned[**P, T](fun: Callable[P, T], plan: Plan, static: Sequence[int] = ()) -> Callable[P, T]:
    """Return `fun` with a derivative that saves what a plan chooses; see `regions.Plan`."""

    @functools.wraps(fun)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        call = Call(fun, args, kwargs, static)
        region = call.region(in_loop=private_jax.is_in_a_loop())
        return call.results(region(plan, *call.arrays))

    return run


class Call:
    """A traced call of a function.

    Leaves of the arguments and results that are not arrays, such as Python numbers and strings, are
    passed unchanged.

    Attributes:
      traced: a closed jaxpr without constants; arrays that the function closes over are arguments.
      arrays: the arguments of `traced`.
      owners: for each array, the index of the argument that it belongs to; None for arrays of
        keyword arguments and arrays that the function closes over.
    """

    def __init__(
        self, fun: Callable[..., Any], args: Sequence[Any], kwargs: Any, static: Sequence[int]
    ) -> None:
        places = indices(_NAME, "static_argnums", static, len(args))
        dynamic = {i: a for i, a in enumerate(args) if i not in places}
        with_paths, tree = jax.tree_util.tree_flatten_with_path((dynamic, kwargs))
        leaves = [leaf for _, leaf in with_paths]
        arrays = {i: a for i, a in enumerate(leaves) if is_array(a)}

        def flat(arrays: dict[int, Any]) -> list[Any]:
            every = dict(enumerate(leaves)) | arrays
            dynamic, kwargs = jax.tree.unflatten(tree, every.values())
            results = fun(*[dynamic.get(i, a) for i, a in enumerate(args)], **kwargs)
            self._leaves, self._tree = jax.tree.flatten(results)
            self._is_array = [is_array(a) for a in self._leaves]
            found = [a for a, array in zip(self._leaves, self._is_array) if array]
            self._leaves = [None if array else a for a, array in zip(self._leaves, self._is_array)]
            return found

        traced = jax.make_jaxpr(flat)(arrays)
        self.traced = without_constants(traced)
        self.arrays = [*traced.consts, *arrays.values()]
        paths = [with_paths[i][0] for i in arrays]
        owners = [path[1].key if path[0].idx == 0 else None for path in paths]
        self.owners = [*[None] * len(traced.consts), *owners]

    def region(self, in_loop: bool = False) -> Region:
        """Return the region of the whole program. `in_loop` is True if the call is in a loop."""
        return Region(self.traced, [True] * len(self.arrays), in_loop)

    def survey(self, mask: Sequence[bool]) -> Survey:
        """Return the choices of the derivative by the arrays that `mask` selects."""
        tangents = [a for a, is_along in zip(self.arrays, mask) if is_along]
        return planning.survey(self.region(), tuple(mask), self.arrays, tangents)

    def results(self, arrays: Sequence[Any]) -> Any:
        """Return the result of the call, given its arrays."""
        found = iter(arrays)
        pairs = zip(self._leaves, self._is_array)
        return jax.tree.unflatten(self._tree, [next(found) if array else a for a, array in pairs])


def is_array(a: Any) -> bool:
    """Return True for an array or a `jax.ShapeDtypeStruct`; False for a Python number.

    For NumPy arrays of strings, dates or Python objects, the result is False, because JAX has no
    such arrays.
    """
    if isinstance(a, (np.ndarray, np.generic)):
        return jnp.issubdtype(a.dtype, np.number) or a.dtype in (np.bool_, jax.dtypes.float0)
    return isinstance(a, (jax.Array, jax.ShapeDtypeStruct))


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


def indices(
    function: str, name: str, given: int | Sequence[int], count: int | None = None
) -> tuple[int, ...]:
    """Convert an argument such as `static_argnums` to a tuple of integers.

    If `count`, the number of arguments, is given, the integers are made non-negative.
    """
    try:
        found = tuple(map(operator.index, given if isinstance(given, Sequence) else [given]))
    except TypeError as error:
        raise TypeError(
            f"{function}: {name}={given!r}; expected an integer or a sequence of integers"
        ) from error
    if count is None:
        return found
    if wrong := [i for i in found if not -count <= i < count]:
        raise ValueError(
            f"{function}: {name}={given!r} has {wrong[0]}, but {count} arguments are given; "
            f"expected integers from {-count} to {count - 1}"
        )
    return tuple(i % count for i in found)
