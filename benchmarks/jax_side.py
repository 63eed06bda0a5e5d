"""Measures the providers that use JAX, in separate processes."""

import dataclasses
import functools
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import calls, first_calls, hlo, providers, stacks, timing
from benchmarks.losses import LossWorkload
from benchmarks.suites import Timed
from benchmarks.workloads import Array, Shape, ShapedWorkload, Workload

Figures = dict[str, float | None]
Measure = Callable[[], Figures]
Arrays = tuple[jax.Array, ...]
Inputs = tuple[Arrays, Arrays, Arrays]  # row operands, parameters, cotangents

THREADS = 16  # maximum number of threads that prepare cells
KEPT_BYTES = 5e9  # the most that a waiting process may hold; JAX's pool may be twice its peak


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_arrays(
    seed: int,
    row_operands: tuple[Array, ...],
    parameter_shapes: tuple[Shape, ...],
    cotangents: tuple[Array, ...],
) -> Inputs:
    """Return normal rows and weights, parameters near 1, masks that are mostly True, random labels.

    Constants would be compressed.
    """
    count = len(row_operands) + len(parameter_shapes) + len(cotangents)
    keys = iter(jax.random.split(jax.random.key(seed), count))

    def rows(shape: Shape, dtype: str, size: float = 1) -> jax.Array:
        if dtype == "bool":
            return jax.random.bernoulli(next(keys), 0.8, shape)
        if dtype == "int32":
            return jax.random.randint(next(keys), shape, 0, int(size), dtype)
        normal = jax.random.normal(next(keys), shape, dtype)
        return normal if size == 1 else size * normal

    return (
        tuple(rows(*array) for array in row_operands),
        tuple(
            1 + 0.1 * jax.random.normal(next(keys), shape, "float32") for shape in parameter_shapes
        ),
        tuple(rows(*array) for array in cotangents),
    )


def arguments_of(
    w: Workload | ShapedWorkload,
) -> tuple[tuple[Array, ...], tuple[Shape, ...], tuple[Array, ...]]:
    """Return the arguments of `random_arrays`, without the seed."""
    return w.row_operands, w.parameter_shapes, w.cotangents


@functools.cache
def inputs_program(*arguments: Any) -> Callable[[int], Inputs]:
    """Return the compiled `random_arrays` for these arguments, as a function of the seed."""
    return random_arrays.lower(0, *arguments).compile()


@functools.lru_cache(maxsize=1)
def rotating_inputs(workload: Workload | ShapedWorkload) -> list[Inputs]:
    """Return enough inputs to keep calls out of the cache; a workload's providers share them."""
    make = inputs_program(*arguments_of(workload))
    return [make(seed) for seed in range(calls.buffers_for(workload.bytes))]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled call, and a function that computes the call's operands from inputs."""

    call: Callable[..., Any]
    operands: Callable[..., tuple[Any, ...]]
    compile_s: float
    extra_passes: int  # over arrays of x's size
    temp_bytes: int  # XLA's plan for intermediates


def compile_cell(cell: Timed) -> Program:
    """Compile the call as a user would make it; errors of the library are raised.

    A gradient that equals an existing array is not returned, because XLA would have to copy it.
    """
    f = providers.function(cell.provider, cell.op, cell.workload.y_dtype)
    prepared = providers.operands(cell.provider)
    rows, parameters, cotangents = jax.eval_shape(
        lambda: random_arrays(0, *arguments_of(cell.workload))
    )
    rows = jax.eval_shape(prepared, *rows)
    start = time.perf_counter()

    def compiled(step: Callable[..., Any], *shapes: Any) -> Callable[..., Any]:
        return jax.jit(step).lower(*shapes).compile()

    def timed(call: Any, operands: Callable[..., tuple[Any, ...]]) -> Program:
        took = time.perf_counter() - start
        passes = hlo.extra_passes(call.as_text(), rows[0].size)
        temp_bytes = int(call.memory_analysis().temp_size_in_bytes)
        return Program(call, operands, took, passes, temp_bytes)

    def forward(rows: Any, parameters: Any) -> Any:
        results = f(*rows, *parameters)
        return results if isinstance(results, tuple) else (results,)

    def forward_and_backward(rows: Any, parameters: Any, cotangents: Any) -> Any:
        results, pullback = jax.vjp(forward, rows, parameters)
        # A mean has no cotangent: use a constant 1, as jax.grad does.
        of_rows, of_parameters = pullback(cotangents or jax.tree.map(jnp.ones_like, results))
        return results, [of_rows[i] for i in cell.workload.gradients], of_parameters

    if cell.direction == "fwd":
        call = compiled(forward, rows, parameters)
        return timed(call, lambda rows, parameters, cotangents: (prepared(*rows), parameters))
    if cell.direction == "fwd+bwd":
        call = compiled(forward_and_backward, rows, parameters, cotangents)
        return timed(
            call,
            lambda rows, parameters, cotangents: (prepared(*rows), parameters, cotangents),
        )
    # The operands of a backward pass are what the library's own rule saves: the leaves of its
    # pullback.
    save = jax.jit(lambda *primals: jax.vjp(forward, *primals)[1]).lower(rows, parameters)
    saved, tree = jax.tree.flatten(save.out_info)
    saved = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in saved]
    keep = save.compile()
    start = time.perf_counter()
    call = compiled(
        lambda saved, cotangents: jax.tree.unflatten(tree, saved)(cotangents), saved, cotangents
    )
    return timed(
        call,
        lambda rows, parameters, cotangents: (
            jax.tree.leaves(keep(prepared(*rows), parameters)),
            cotangents,
        ),
    )


def operands_of(cell: Timed, program: Program) -> list[tuple[Any, ...]]:
    return [program.operands(*inputs) for inputs in rotating_inputs(cell.workload)]


def kernel_time(cell: Timed, program: Program) -> Figures:
    roof = None if cell.workload.flops else timing.copy_roof(cell.workload.bytes)
    measured = timing.measure(program.call, operands_of(cell, program))
    bar = {}
    if size := _logits_bytes(cell):  # The bar of a linear loss also has these bytes.
        bar["gbps"] = timing.copy_roof(size).gbps(size)
    return {
        **measured.figures(cell.workload, roof),
        **bar,
        "compile_s": program.compile_s,
        "extra_passes": program.extra_passes,
        "temp_bytes": program.temp_bytes,
    }


def _logits_bytes(cell: Timed) -> int:
    """Return the bytes whose copy is part of a linear loss's bar; 0 if the cell has no bar."""
    workload = cell.workload
    if cell.provider != "products" or not isinstance(workload, LossWorkload):
        return 0
    return workload.logits_bytes


def prepare(suite: str, cell: Any) -> Measure:
    """Compile all programs of a cell, in a thread, and return a function that measures the cell."""
    if suite == "stacks":
        return stacks.prepare(cell)
    if suite == "cpu":
        cpu_times = importlib.import_module("benchmarks.cpu_times")  # it needs Flax
        return cpu_times.prepare(cell)
    if suite == "compile":
        return first_calls.prepare(cell)
    if suite in ("training", "capacity"):
        training = importlib.import_module("benchmarks.training")  # it needs optax
        return training.prepare(suite, cell)
    program = compile_cell(cell)
    inputs_program(*arguments_of(cell.workload))
    if not cell.workload.flops:
        timing.copy_programs(cell.workload.bytes)
    if size := _logits_bytes(cell):
        timing.copy_programs(size)
    return functools.partial(kernel_time, cell, program)


def release() -> None:
    """Delete the arrays that the cells of a workload share."""
    rotating_inputs.cache_clear()


def crowds_others() -> bool:
    """Return True if this process holds so much GPU memory that others may lack it.

    JAX frees that memory only when the process ends. With this limit, seven of eight waiting
    processes leave half of an H200 to the eighth.
    """
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") != "false":
        return False
    used = jax.local_devices()[0].memory_stats() or {}  # None on a CPU
    return used.get("peak_bytes_in_use", 0) > KEPT_BYTES


def needs_restart(error: Exception) -> bool:
    """Return True if the process cannot use the GPU any more: CUDA's errors are permanent."""
    return "CUDA_ERROR" in str(error) and "OUT_OF_MEMORY" not in str(error)
