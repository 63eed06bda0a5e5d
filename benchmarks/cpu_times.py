"""Time jaxnorm's plain JAX code and another library's code alternately, on a CPU."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import jax_side, providers
from benchmarks.cpu import CPU, CpuCell, ProductWorkload
from benchmarks.losses import LOSSES
from benchmarks.providers import flax_modules
from benchmarks.variants import VARIANTS

SECONDS, LEAST, MOST, WARMUP = 4.0, 15, 200, 2

Figures = dict[str, float | None]


def step(cell: CpuCell, name: str) -> Callable[..., Any]:
    """Return the function that is timed for the provider called `name`.

    The function takes operands, parameters and cotangents. It returns the result and, for the
    direction "fwd+bwd", also the gradients.
    """
    if name == "flax-two_pass":
        f = flax_modules.layer_norm(cell.dtype, use_fast_variance=False)
    elif isinstance(cell.workload, ProductWorkload):
        f = getattr(VARIANTS["jaxnorm-products" if name == "xla" else "jnp"], cell.op)
    else:
        f = providers.function(name, cell.op, cell.dtype)
    is_loss, differentiated = cell.op in LOSSES, cell.workload.gradients

    def forward(rows: Any, parameters: Any) -> jax.Array:
        y = f(*rows, *parameters)
        return jnp.mean(y) if is_loss else y

    def forward_and_backward(rows: Any, parameters: Any, cotangents: Any) -> Any:
        def of_gradients(some: Any, parameters: Any) -> jax.Array:
            given = dict(zip(differentiated, some))
            return forward([given.get(i, a) for i, a in enumerate(rows)], parameters)

        y, pullback = jax.vjp(of_gradients, [rows[i] for i in differentiated], parameters)
        return y, pullback(jnp.ones_like(y) if is_loss else cotangents[0])

    if cell.direction == "fwd":
        return lambda rows, parameters, cotangents: forward(rows, parameters)
    return forward_and_backward


def prepare(cell: CpuCell) -> Callable[[], Figures]:
    """Compile the calls of jaxnorm and of the provider, and return a function that times both."""
    on_cpu = functools.partial(jax.default_device, jax.local_devices(backend="cpu")[0])
    with on_cpu():
        arrays = jax_side.random_arrays(0, *jax_side.arguments_of(cell.workload))
        both = [step(cell, name) for name in ("xla", cell.provider)]
        if not CPU[cell.op].is_eager:
            both = [jax.jit(f).lower(*arrays).compile() for f in both]

    def seconds(call: Callable[..., Any]) -> float:
        with on_cpu():
            start = time.perf_counter()
            jax.block_until_ready(call(*arrays))
            return time.perf_counter() - start

    def figures() -> Figures:
        start = time.perf_counter()
        turns: list[list[float]] = []
        while len(turns) < WARMUP + MOST:
            # Alternate which call runs first, because the second call may find a warm cache or
            # another clock frequency.
            order = (0, 1) if len(turns) % 2 else (1, 0)
            taken = {i: seconds(both[i]) for i in order}
            turns.append([taken[0], taken[1]])
            if len(turns) >= WARMUP + LEAST and time.perf_counter() - start > SECONDS:
                break
        ours, theirs = zip(*turns[WARMUP:])
        return {
            "ms": 1e3 * statistics.median(ours),
            "peer_ms": 1e3 * statistics.median(theirs),
            # Compare calls that ran directly after each other, because other load on the machine
            # then slows both calls.
            "ratio": statistics.median(a / b for a, b in zip(ours, theirs)),
        }

    return figures
