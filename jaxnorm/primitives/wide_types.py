"""64-bit types while a rule of ours runs on arrays that have them.

A rule is Python that JAX runs later than the call: when it lowers, differentiates or batches. By
then the caller may have left `jax.enable_x64`, and `astype(float64)` would give float32 there.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.interpreters import ad


def enabled_for(arrays: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Turn 64-bit types on if one of the arrays, or of their types, has 64 bits."""
    if jax.config.jax_enable_x64 or not any(map(_is_wide, arrays)):
        return contextlib.nullcontext()
    return jax.enable_x64(True)


def enabled[**P, T](rule: Callable[P, T]) -> Callable[P, T]:
    """Wrap a rule so that it runs with the types of its arguments: arrays and sequences of them."""

    @functools.wraps(rule)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        with enabled_for(jax.tree.leaves(arguments, is_leaf=_is_symbolic)):
            return rule(*arguments, **options)

    return run


def _is_symbolic(a: Any) -> bool:
    return isinstance(a, ad.Zero) or ad.is_undefined_primal(a)


def _is_wide(a: Any) -> bool:
    dtype = getattr(getattr(a, "aval", a), "dtype", None)
    return getattr(dtype, "itemsize", 0) == 8
