"""Measures cells (workloads with a provider) in JAX. The processes of `worker.py` import it."""

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import calls, providers, timing
from benchmarks.suites import Timeable, Timed
from benchmarks.workloads import Array, Shape

Figures = dict[str, float | None]
Measure = Callable[[], Figures]
Arrays = tuple[jax.Array, ...]
# Three tuples of arrays: the operands that have rows (such as x), the parameters (scale and bias),
# and the cotangents of the results.
Inputs = tuple[Arrays, Arrays, Arrays]

# The maximum number of threads that compile cells at the same time.
THREADS = 16


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_arrays(
    seed: int,
    row_operands: tuple[Array, ...],
    parameter_shapes: tuple[Shape, ...],
    cotangents: tuple[Array, ...],
) -> Inputs:
    """Return random inputs: operands that have rows, parameters near 1, and cotangents.

    Float operands are normally distributed. Values are random because a GPU would compress constant
    arrays in memory.
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
    w: Timeable,
) -> tuple[tuple[Array, ...], tuple[Shape, ...], tuple[Array, ...]]:
    """Return the arguments of `random_arrays` for a workload. The seed is not included."""
    return w.row_operands, w.parameter_shapes, w.cotangents


@functools.cache
def inputs_program(*arguments: Any) -> Callable[[int], Inputs]:
    """Compile `random_arrays` for these arguments, and return it as a function of the seed."""
    return random_arrays.lower(0, *arguments).compile()


@functools.lru_cache(maxsize=1)
def rotating_inputs(workload: Timeable) -> list[Inputs]:
    """Return several sets of inputs.

    Timed calls cycle through the sets, so that no input of a call is in the GPU's cache. All cells
    with the same workload share the sets.
    """
    make = inputs_program(*arguments_of(workload))
    return [make(seed) for seed in range(calls.buffers_for(workload.bytes))]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled call.

    Attributes:
      call: the compiled function.
      operands: a function that returns the operands of the call, given the inputs of the workload.
      compile_s: the seconds that tracing and compiling took.
      temp_bytes: the memory that XLA plans for intermediates.
    """

    call: Callable[..., Any]
    operands: Callable[..., tuple[Any, ...]]
    compile_s: float
    temp_bytes: int


def passes(
    f: Callable[..., Any], gradients: Sequence[int]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions: the forward pass of a provider's function, and both passes together.

    `gradients` are indices of the row operands whose gradients are returned.
    """

    def forward(rows: Any, parameters: Any) -> Any:
        results = f(*rows, *parameters)
        return results if isinstance(results, tuple) else (results,)

    def forward_and_backward(rows: Any, parameters: Any, cotangents: Any) -> Any:
        results, pullback = jax.vjp(forward, rows, parameters)
        # A mean loss has no cotangent among the inputs. Use the constant 1, as jax.grad does.
        of_rows, of_parameters = pullback(cotangents or jax.tree.map(jnp.ones_like, results))
        return results, [of_rows[i] for i in gradients], of_parameters

    return forward, forward_and_backward


def _backward(forward: Callable[..., Any], rows: Any, parameters: Any, cotangents: Any) -> Any:
    """Return three things: the backward pass, a function that computes its operands, and types.

    The operands of the backward pass are the cotangents and the residuals that the library saves.
    The residuals are the leaves of the pullback that jax.vjp returns. The types are the shapes and
    dtypes of the operands.
    """
    save = jax.jit(lambda *primals: jax.vjp(forward, *primals)[1]).lower(rows, parameters)
    saved, tree = jax.tree.flatten(save.out_info)
    keep = save.compile()

    def backward(saved: Any, cotangents: Any) -> Any:
        return jax.tree.unflatten(tree, saved)(cotangents)

    def operands(rows: Any, parameters: Any, cotangents: Any) -> tuple[Any, ...]:
        return jax.tree.leaves(keep(rows, parameters)), cotangents

    types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in saved]
    return backward, operands, (types, cotangents)


def compile_cell(cell: Timed) -> Program:
    """Compile the call of a cell, under `jax.jit` as in a user's program.

    If two gradients are the same array, the compiled call returns only one of them. If it returned
    both, XLA would add a copy. Errors of the library are not caught.
    """
    f = providers.function(cell.provider, cell.op, cell.workload.y_dtype)
    forward, forward_and_backward = passes(f, cell.workload.gradients)
    rows, parameters, cotangents = jax.eval_shape(
        lambda: random_arrays(0, *arguments_of(cell.workload))
    )
    step, operands, types = {
        "fwd": (forward, lambda *inputs: inputs[:2], (rows, parameters)),
        "fwd+bwd": (forward_and_backward, lambda *inputs: inputs, (rows, parameters, cotangents)),
    }.get(cell.direction) or _backward(forward, rows, parameters, cotangents)
    options = timing.matmul_options() if cell.workload.has_matmul else None
    start = time.perf_counter()
    call: Any = jax.jit(step).lower(*types).compile(options)
    took = time.perf_counter() - start
    return Program(call, operands, took, int(call.memory_analysis().temp_size_in_bytes))


def kernel_time(cell: Timed, program: Program) -> Figures:
    copy_us = None if cell.workload.has_matmul else timing.copy_us(cell.workload.bytes)
    operands = [program.operands(*inputs) for inputs in rotating_inputs(cell.workload)]
    measured = timing.measure(program.call, operands)
    return {
        **dataclasses.asdict(measured),
        "roof": copy_us and copy_us / measured.us,
        "compile_s": program.compile_s,
        "temp_bytes": program.temp_bytes,
    }


def prepare(suite: str, cell: Any) -> Measure:
    """Compile all programs of a cell, and return a function that measures the cell.

    Several threads call this function at the same time.
    """
    if suite in ("training", "compile"):
        training = importlib.import_module("benchmarks.training")  # imported here: needs optax
        return training.prepare(suite, cell)
    program = compile_cell(cell)
    inputs_program(*arguments_of(cell.workload))
    if not cell.workload.has_matmul:
        timing.copy_programs(cell.workload.bytes)
    return functools.partial(kernel_time, cell, program)


def release() -> None:
    """Delete the inputs that the cells of a workload share."""
    rotating_inputs.cache_clear()


def needs_restart(error: Exception) -> bool:
    """Return True if the process cannot use the GPU any more after this error.

    This is so after most CUDA errors.
    """
    return "CUDA_ERROR" in str(error) and "OUT_OF_MEMORY" not in str(error)
