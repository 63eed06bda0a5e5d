"""Calls outside `jax.jit`: compiled as a whole, so that Python no more than looks one up.

The checks of a call alone take longer than to normalise a small array. Where an argument is traced
the function itself runs: no `jax.jit` of ours stands between the caller's code and a primitive.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive


def compiled[T](
    function: Callable[..., T], *, name: str, arrays: Sequence[int]
) -> Callable[..., T]:
    """`function`, of positional arguments of which `arrays` are arrays or None."""
    parameters = inspect.signature(function).parameters.values()
    count = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    static = [i for i in range(count) if i not in arrays]
    arrays_of, statics_of = operator.itemgetter(*arrays), operator.itemgetter(*static)

    def named(*arguments: Any) -> T:
        return function(*arguments)

    named.__name__ = named.__qualname__ = name  # what profiles show
    fast = jax.jit(named, static_argnums=static)

    def call(*arguments: Any) -> T:
        can_be_compiled = all(map(_is_concrete, map(type, arrays_of(arguments))))
        if can_be_compiled and _is_hashable(statics_of(arguments)):
            result: T = fast(*arguments)
            return result
        return function(*arguments)

    return call


def alone(primitive: Primitive, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A primitive's implementation outside `jax.jit`: it is compiled alone.

    Where JAX compiles nothing, which is there to see each step, `plain` runs. Where it looks for
    NaNs or infinities, one in a result is the error that it is of JAX's own primitives.
    """

    @functools.lru_cache(maxsize=4096)
    def compiled_alone(**static: Any) -> Callable[..., Any]:
        def run(*arrays: jax.Array) -> Any:
            return primitive.bind(*arrays, **static)

        run.__name__ = run.__qualname__ = primitive.name  # what profiles show
        return jax.jit(run)

    def run(*arrays: jax.Array, **static: Any) -> Any:
        if jax.config.jax_disable_jit:
            return plain(*arrays, **static)
        return compiled_alone(**static)(*arrays)

    def implementation(*arrays: jax.Array, **static: Any) -> Any:
        checks_nans, checks_infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
        if not (checks_nans or checks_infs):
            return run(*arrays, **static)
        # At a NaN, jax.jit calls its function once more, uncompiled: that were this one, for ever.
        with jax.debug_nans(False), jax.debug_infs(False):
            results = run(*arrays, **static)
            for found, is_checked, test in (
                ("nan", checks_nans, jnp.isnan),
                ("inf", checks_infs, jnp.isinf),
            ):
                if is_checked and any(test(a).any() for a in results):
                    raise FloatingPointError(
                        f"invalid value ({found}) encountered in {primitive.name}"
                    )
        return results

    return implementation


@functools.cache
def _is_concrete(kind: type) -> bool:
    is_array = issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)
    return is_array or kind is type(None)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
