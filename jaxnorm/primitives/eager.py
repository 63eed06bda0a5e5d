"""Compilation of calls outside `jax.jit`, so that they spend less time in Python.

Checking a call's arguments in Python takes longer than normalising a small array. So each public
function is compiled by `jax.jit`, including its checks, and the compiled function is cached. Inside
the caller's `jax.jit`, arguments are tracers without a value. The public function then runs
uncompiled, so that no inner `jax.jit` separates the caller's code from the primitive.
"""

import contextlib
import contextvars
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxnorm.primitives import mistakes


def compiled[**P, T](
    *arrays: str, functions: Collection[str] = (), either: Collection[str] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that compiles the calls of a function outside `jax.jit`.

    Args:
      arrays: names of the arguments that are arrays or None.
      functions: names of the arguments that may be functions. A call that passes a function is not
        compiled, because each call may pass a new function object.
      either: names of the arguments that may be arrays or numbers. A number becomes a constant of
        the compiled program.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        parameters = dict(inspect.signature(function).parameters)
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        by_position = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        ordered = operator.itemgetter(*parameters)

        def named(types: tuple[Any, ...], *values: Any) -> T:
            del types
            return function(**dict(zip(parameters, values)))  # type: ignore[call-arg]

        named.__name__ = named.__qualname__ = function.__name__  # Profiles show this name.

        @functools.cache
        def forms(others: tuple[str, ...]) -> tuple[Any, Any, Any]:
            """Return three functions for calls whose arguments `others` are arrays.

            `others` is a subset of `either`. The remaining arguments in `either` are numbers in
            these calls. The functions are:

            1. The compiled function.
            2. A function that takes a dict of all arguments and returns the arrays.
            3. A function that takes a dict of all arguments and returns the static arguments.
            """
            taken = (*arrays, *others)
            statics = [name for name in parameters if name not in taken]
            static_argnums = [0, *(1 + [*parameters].index(name) for name in statics)]
            fast = jax.jit(named, static_argnums=static_argnums)
            return fast, operator.itemgetter(*taken), operator.itemgetter(*statics)

        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> T:
            given = dict(zip(by_position, arguments))
            given.update(options)
            is_each_once = len(given) == len(arguments) + len(options)
            given = {**defaults, **given}
            others = tuple([name for name in either if _is_array(given.get(name))])
            fast, arrays_of, statics_of = forms(others)
            # If the arguments do not fit the signature, the uncompiled call below raises the error.
            if (
                is_each_once
                and given.keys() == parameters.keys()
                and all(map(_is_given, arrays_of(given)))
                and not any(map(callable, map(given.get, functions)))
                and _is_constant(constants := statics_of(given))
            ):
                result: T = fast(_types(constants), *ordered(given))
                return result
            return function(*arguments, **options)

        @functools.wraps(function)
        def explained(*arguments: P.args, **options: P.kwargs) -> T:
            spelled: dict[str, Any] = options
            if not options.keys() <= parameters.keys():
                spelled = mistakes.respelled(function.__name__, parameters, options)
            try:
                return call(*arguments, **spelled)
            except (TypeError, ValueError) as error:
                mistakes.explain(call, arguments, spelled, error)
                raise

        return explained

    return decorated


def alone(
    primitive: Primitive, uncompiled: Callable[..., Any], names: Callable[..., Sequence[str]]
) -> Callable[..., Any]:
    """Return the function that evaluates a primitive outside `jax.jit`.

    The returned function compiles a program that consists of this primitive only. Under
    `jax.disable_jit`, which exists to step through code, it runs `uncompiled` instead. If JAX is
    configured to check for NaNs or infinities, such a value in a result raises the same error as
    for JAX's own primitives. The value -inf in the statistic ``log_sum`` is allowed, because a loss
    marks masked rows with it.

    Args:
      primitive: the primitive.
      uncompiled: function of the same arguments that computes the results in plain JAX.
      names: function of the primitive's static arguments that returns the names of its results.
    """

    @functools.lru_cache(maxsize=4096)
    def compiled_alone(**static: Any) -> Callable[..., Any]:
        def run(*arrays: jax.Array) -> Any:
            return primitive.bind(*arrays, **static)

        run.__name__ = run.__qualname__ = primitive.name  # Profiles show this name.
        return jax.jit(run)

    def run(*arrays: jax.Array, **static: Any) -> Any:
        if jax.config.jax_disable_jit:
            return uncompiled(*arrays, **static)
        return compiled_alone(**static)(*arrays)

    def implementation(*arrays: jax.Array, **static: Any) -> Any:
        # JAX's own check is disabled here: if it finds a NaN, jax.jit evaluates the primitive again
        # without compiling it. This calls `implementation` again, which is an endless recursion.
        with unchecked():
            with _disabling((False, False)):  # Primitives inside this one are not checked.
                results = run(*arrays, **static)
            check(primitive.name, names(**static), results)
        return results

    return implementation


# Two bools: True if `unchecked` has disabled JAX's check for NaNs; True if it has disabled JAX's
# check for infinities.
_disabled: contextvars.ContextVar[tuple[bool, bool]] = contextvars.ContextVar(
    "disabled", default=(False, False)
)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Disable JAX's own checks for NaNs and infinities in jaxnorm's rules and plain JAX code.

    A loss saves -inf for masked rows. The rules and the plain JAX code handle this -inf, but JAX's
    checks would raise an error. `check` still checks the results of primitives.
    """
    nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
    if not (nans or infs):
        yield
        return
    with _disabling((nans, infs)), jax.debug_nans(False), jax.debug_infs(False):
        yield


@contextlib.contextmanager
def _disabling(checks: tuple[bool, bool]) -> Iterator[None]:
    token = _disabled.set(checks)
    try:
        yield
    finally:
        _disabled.reset(token)


def check(name: str, names: Sequence[str], results: Sequence[Any]) -> None:
    """Raise FloatingPointError if a result has a NaN or an infinity for which a check is enabled.

    ``jax_debug_nans`` enables the check for NaNs, and ``jax_debug_infs`` the one for infinities.
    This function is called inside `unchecked`. It ignores results that have no value yet, and the
    infinities of the statistic ``log_sum``.

    Args:
      name: name of the primitive.
      names: names of the results.
      results: arrays, tracers or symbolic zeros.
    """
    for found, is_wanted, test in zip(("nan", "inf"), _disabled.get(), (jnp.isnan, jnp.isinf)):
        checked = [a for n, a in zip(names, results) if found == "nan" or n != "log_sum"]
        arrays = [a for a in checked if isinstance(a, jax.Array)]
        if is_wanted and any(test(a).any() for a in arrays if not isinstance(a, jax.core.Tracer)):
            raise FloatingPointError(f"invalid value ({found}) encountered in {name}")


def _is_array(a: Any) -> bool:
    """Return True for an array, and False for a number.

    The result is also False for an array of bools, and for a NumPy array without axes, which counts
    as a number.
    """
    is_array = isinstance(a, jax.Array) or (isinstance(a, np.ndarray) and a.ndim > 0)
    return is_array and a.dtype != bool


def _is_given(a: Any) -> bool:
    """Return True if `a` is None, or a JAX or NumPy array whose value is available.

    If the result is True for all arrays of a call, the call is compiled. A tracer of `jax.grad`
    outside `jax.jit` has an available value. Compiling a call with such a tracer saves time: JAX
    caches the derivative of a compiled function, but traces the derivative of any other function
    again at each call.

    There is one exception. If JAX is configured to check for NaNs or infinities, the result is
    False for all tracers. In a compiled call, this check would raise an error for the -inf that a
    loss saves for masked rows (see `alone`).
    """
    kind: type = type(a)
    if _is_concrete(kind):
        return True
    if kind is np.ndarray:
        return _survives_conversion(a)
    if not issubclass(kind, jax.core.Tracer):
        return False
    is_checked = jax.config.jax_debug_nans or jax.config.jax_debug_infs
    return not is_checked and a.to_concrete_value() is not None


def _survives_conversion(a: np.ndarray) -> bool:
    """Return True if `jax.jit` converts a NumPy array to a JAX array without changing its values.

    A call with any other array is not compiled: the public function converts the array, or raises
    its own error.
    """
    if not a.dtype.isnative or a.dtype.kind not in "biuf" or a.dtype.itemsize > 8:
        return False
    converted = jax.dtypes.canonicalize_dtype(a.dtype)
    if converted == a.dtype:
        return True
    limits = np.iinfo(converted) if a.dtype.kind in "iu" and a.size else None
    return limits is not None and bool(limits.min <= a.min() and a.max() <= limits.max)


@functools.cache
def _is_concrete(kind: type) -> bool:
    is_array = issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)
    return is_array or kind is type(None)


def _types(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the type of each value; for a value that is a tuple, the types of its elements.

    The types are an additional static argument of the compiled function. `jax.jit` compares static
    arguments by ``==``, which does not distinguish False from 0, or 1.0 from 1.
    """
    return tuple([_types(v) if isinstance(v, tuple) else type(v) for v in values])


# The types of arguments that may be constants of a compiled program. All are immutable.
_CONSTANTS = (
    *(type(None), bool, int, float, str, np.number, np.bool_, np.dtype, type),
    *(jax.sharding.Sharding, jax.sharding.PartitionSpec),
)


def _is_constant(value: Any) -> bool:
    """Return True if a value, or each element of a tuple, can be a constant of a program.

    An object of any other type, such as an ``nnx.Param``, may change after the call, but a compiled
    program would still use its first value. So a call with such an object is not compiled.
    """
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)
