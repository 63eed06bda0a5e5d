"""Stacks of small pre-norm layers: programs whose time depends on the host, not on the GPU.

A layer is ``x + gelu(norm(x) @ w) @ v`` with square matrices w and v. The host needs more time to
launch a jaxnorm kernel than to launch a kernel of XLA. This matters if arrays are small and a
program has many kernels. jaxnorm and plain jnp run alternately in one process, under the same
conditions.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import providers, timing
from benchmarks.models import STACK_LAYERS, StackCell
from benchmarks.workloads import PARAMETERS

REPEATS, WARMUP = 200, 20

# XLA's autotuning may choose different matmuls for the two programs. With these options, both
# programs use the matmuls that cuBLAS chooses.
_OPTIONS = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}

Figures = dict[str, float | None]


def stack(norm: Callable[..., jax.Array], x: jax.Array, layers: Sequence[Any]) -> jax.Array:
    for (w, v), parameters in layers:
        x = x + jax.nn.gelu(norm(x, *parameters) @ w) @ v
    return x


def operands(cell: StackCell) -> tuple[jax.Array, list[Any]]:
    """Return x, and a list with the matrices and norm parameters of each layer."""

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, cell.dtype) / shape[0] ** 0.5

    keys = jax.random.split(jax.random.key(0), 1 + STACK_LAYERS)
    parameters = (jnp.ones(cell.cols), jnp.zeros(cell.cols))[: PARAMETERS[cell.op]]
    square = (cell.cols, cell.cols)
    layers = [
        (tuple(normal(k, *square) for k in jax.random.split(key)), tuple(map(jnp.copy, parameters)))
        for key in keys[1:]
    ]
    return jax.random.normal(keys[0], (cell.rows, cell.cols), cell.dtype), layers


def program(cell: StackCell, name: str) -> Callable[..., Any]:
    """Compile a stack with a provider's norm: the forward pass, or a loss and its gradients."""
    norm = providers.function(name, cell.op, cell.dtype)
    step: Callable[..., Any] = functools.partial(stack, norm)
    if cell.direction != "fwd":
        forward = step
        step = jax.value_and_grad(
            lambda x, layers: jnp.sum(forward(x, layers).astype(jnp.float32) ** 2), argnums=(0, 1)
        )
    shapes = jax.eval_shape(lambda: operands(cell))
    options = _OPTIONS if jax.default_backend() == "gpu" else None
    return jax.jit(step).lower(*shapes).compile(options)


def in_turn(programs: Sequence[Callable[..., Any]], arguments: Sequence[Any]) -> list[float]:
    """Run the programs alternately, and return the median time of each program in milliseconds.

    A time is measured from the call of the program until its results are ready.
    """
    times: list[list[float]] = [[] for _ in programs]
    turns = list(zip(programs, times))
    for _ in range(WARMUP + REPEATS):
        turns.reverse()  # alternate the order, so that both programs run second equally often
        for run, taken in turns:
            start = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken[WARMUP:]) for taken in times]


def kernels_of(run: Callable[..., Any], arguments: Sequence[Any]) -> float | None:
    """Return the milliseconds of all GPU kernels of a call, or None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    return timing.measure(run, [tuple(arguments)]).us / 1e3


def prepare(cell: StackCell) -> Callable[[], Figures]:
    """Compile a cell and the same stack in plain jnp, and return a function that measures both."""
    programs = [program(cell, name) for name in (cell.provider, "jnp")]

    def figures() -> Figures:
        arguments = operands(cell)
        ms, jnp_ms = in_turn(programs, arguments)
        kernels_ms, jnp_kernels_ms = (kernels_of(run, arguments) for run in programs)
        return {
            "ms": ms,
            "jnp_ms": jnp_ms,
            "kernels_ms": kernels_ms,
            "jnp_kernels_ms": jnp_kernels_ms,
        }

    return figures
