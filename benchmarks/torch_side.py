"""Measures the providers on torch, in a process of their own."""

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import calls, gradients, providers, torch_timing
from benchmarks.suites import TimedCell, provider_of
from benchmarks.torch_timing import DEVICE
from benchmarks.workloads import PARAMETERS, Workload

Figures = dict[str, float | None]
Measure = Callable[[], Figures]
Inputs = tuple[Tensor, tuple[Tensor, ...], Tensor]  # x, parameters, dy


@functools.lru_cache(maxsize=1)
def rotating_inputs(workload: Workload, parameter_dtype: str) -> list[Inputs]:
    """Normal x and dy, scale near 1, in as many sets as keep calls out of the cache."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, dtype: str) -> Tensor:
        wanted = getattr(torch, dtype)
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=wanted)

    def inputs() -> Inputs:
        scale = 1 + 0.1 * normal(workload.cols, dtype=parameter_dtype)
        bias = normal(workload.cols, dtype=parameter_dtype)
        shape = (workload.rows, workload.cols)
        x, dy = (normal(*shape, dtype=d) for d in (workload.x_dtype, workload.y_dtype))
        return x, (scale, bias)[: PARAMETERS[workload.op]], dy

    return [inputs() for _ in range(calls.buffers_for(workload.bytes))]


def forward(f: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    x, parameters, _ = inputs
    with torch.no_grad():
        return f(x, *parameters)


def backward(y: Tensor, leaves: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, leaves, dy, retain_graph=True)


def leaves_of(inputs: Inputs) -> tuple[Tensor, ...]:
    x, parameters, _ = inputs
    return tuple(a.detach().requires_grad_() for a in (x, *parameters))


def forward_and_backward(
    f: Callable[..., Tensor], leaves: tuple[Tensor, ...], dy: Tensor
) -> tuple[Tensor, ...]:
    y = f(*leaves)
    return y, *torch.autograd.grad(y, leaves, dy)


def calls_of(cell: TimedCell) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """The function to time and its operands."""
    f = providers.function(cell.provider, cell.op, cell.y_dtype)
    sets = rotating_inputs(cell.workload, provider_of(cell).parameter_dtype(cell.x_dtype))
    if cell.direction == "fwd":
        return functools.partial(forward, f), [(inputs,) for inputs in sets]
    leaves = [(leaves_of(inputs), inputs[-1]) for inputs in sets]
    if cell.direction == "fwd+bwd":
        return functools.partial(forward_and_backward, f), leaves
    return backward, [(f(*each), each, dy) for each, dy in leaves]


def compiled(cell: TimedCell) -> tuple[Callable[..., Any], list[tuple[Any, ...]], float]:
    """The function, its operands, and seconds until its first result: torch compiles on call."""
    start = time.perf_counter()
    function, operands = calls_of(cell)
    function(*operands[0])
    torch_timing.synchronize()
    return function, operands, time.perf_counter() - start


def kernel_time(cell: TimedCell) -> Figures:
    roof = torch_timing.copy_roof(cell.bytes)
    function, operands, compile_s = compiled(cell)
    measured = torch_timing.measure(function, operands)
    return {
        "us": measured.us,
        "main_us": measured.main_us,
        "gbps": measured.gbps(cell.bytes),
        "roof": roof.us / measured.us,
        "compile_s": compile_s,
    }


def latency(cell: TimedCell) -> Figures:
    function, operands, _ = compiled(cell)
    return {
        "us": torch_timing.measure(function, operands[:1]).us,
        "wall_us": torch_timing.wall_us(function, operands[:1], calls.LATENCY_REPEATS),
    }


def accuracy(cell: TimedCell) -> Figures:
    problem = gradients.problem(cell.workload)
    parameter_dtype = getattr(torch, provider_of(cell).parameter_dtype(cell.x_dtype))

    def tensor(array: Any, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(DEVICE, dtype)

    x, dy = (tensor(a, getattr(torch, cell.x_dtype)) for a in (problem.x, problem.dy))
    leaves = leaves_of((x, tuple(tensor(p, parameter_dtype) for p in problem.parameters), dy))
    y = providers.function(cell.provider, cell.op, cell.y_dtype)(*leaves)
    actual = torch.autograd.grad(y, leaves, dy)
    return gradients.errors(problem, [g.double().cpu().numpy() for g in actual])


MEASURES: dict[str, Callable[[TimedCell], Figures]] = {
    "kernels": kernel_time,
    "api": kernel_time,
    "latency": latency,
    "accuracy": accuracy,
}


def measured(suite: str, cell: TimedCell) -> Figures:
    """Measures; what a cell that failed held is given back before the next one."""
    try:
        return MEASURES[suite](cell)
    except Exception:
        rotating_inputs.cache_clear()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        raise


def measures(suite: str, cells: Sequence[TimedCell]) -> Iterator[Measure]:
    """What measures each cell, in order; a cell's errors are raised by its own measure."""
    return (functools.partial(measured, suite, cell) for cell in cells)


def needs_restart(error: Exception) -> bool:
    """Whether the process cannot use the GPU any more: CUDA's errors stick to their context."""
    return "CUDA error" in str(error)
