"""Times how long JAX traces, lowers and compiles the programs of `compile_times`."""

import functools
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import providers
from benchmarks.compile_times import PROVIDERS, CompileCell

Figures = dict[str, float | None]


def prepare(cell: CompileCell) -> Callable[[], Figures]:
    """Measure the compile time of a cell, and return a function that returns this time.

    Every suite has a function `prepare`. In other suites, `prepare` compiles a cell, and the
    function that it returns measures the cell. In this suite, the compilation itself is measured.
    So the measurement is complete when `prepare` returns.
    """
    _warm_up()
    figures = seconds(cell)
    return lambda: figures


@functools.cache
def _warm_up() -> None:
    """Compile a few programs, so that modules are imported and compilers are initialised.

    JAX and jaxnorm import modules when a program is first compiled. Without this function, the time
    of these imports would be part of the compile time of the first cell.
    """
    jax.config.update("jax_enable_compilation_cache", False)  # do not load programs from a cache
    for provider in PROVIDERS:
        for op in ("layer_norm", "softmax", "cross_entropy"):
            seconds(CompileCell(op, "8192x1152", "bfloat16", provider))


def passes(
    f: Callable[..., Any], gradients: Sequence[int]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward pass of a provider's function, and both passes as one function.

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


def seconds(cell: CompileCell) -> Figures:
    """Return the seconds that JAX takes to trace, lower and compile a cell's program.

    Without a local GPU, the program is lowered for a GPU but not compiled.
    """
    if cell.step is not None:
        training = importlib.import_module("benchmarks.training")  # imported here: needs optax
        whole = training.Step(cell.step, cell.step.batch)
        return _seconds(whole.trace, whole.options)
    work = cell.workload
    f = providers.function(cell.provider, cell.op, work.y_dtype)

    def shapes(arrays: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, *_ in arrays)

    operands = (
        shapes(work.row_operands),
        shapes([(shape, "float32") for shape in work.parameter_shapes]),
        shapes(work.cotangents),
    )

    _, step = passes(f, work.gradients)
    return _seconds(lambda: jax.jit(step).trace(*operands))


def _seconds(trace: Callable[[], Any], options: Any = None) -> Figures:
    on_gpu = jax.default_backend() == "gpu"
    jax.clear_caches()
    start = time.perf_counter()
    traced = trace()
    at_traced = time.perf_counter()
    lowered = traced.lower() if on_gpu else traced.lower(lowering_platforms=("cuda",))
    at_lowered = time.perf_counter()
    if on_gpu:
        lowered.compile(options)
    end = time.perf_counter()
    return {
        "trace_s": at_traced - start,
        "lower_s": at_lowered - at_traced,
        "compile_s": end - at_lowered if on_gpu else None,
        "total_s": end - start,
    }
