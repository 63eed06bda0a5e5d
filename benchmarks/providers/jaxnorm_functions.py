"""jaxnorm itself: what it chooses by default, and each implementation by name."""

import functools
from collections.abc import Callable

import jax

import jaxnorm
from benchmarks.workloads import Operation


def function(name: str, op: Operation, y_dtype: str) -> Callable[..., jax.Array]:
    implementation = None if name == "jaxnorm" else name
    return functools.partial(getattr(jaxnorm, op), dtype=y_dtype, implementation=implementation)
