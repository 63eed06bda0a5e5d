"""JAX's settings while a kernel is traced, whatever the caller's are."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """For all that traces a kernel, and for no more.

    Kernels count in 32 bits: with 64-bit types on, Python's integers would not meet theirs in one
    operation. And Pallas keeps tracers of every kernel, of one that copies a vector, too (jax
    0.11.2 and 0.12.0), for which ``jax_check_tracer_leaks`` would raise.
    """
    with jax.enable_x64(False), jax.check_tracer_leaks(False):
        yield
