"""Measures cells (workloads with a provider) in torch. The processes of `worker.py` import it."""

import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import calls, providers
from benchmarks.calls import Timing
from benchmarks.suites import Timed, provider_of
from benchmarks.workloads import ShapedWorkload, Workload

Figures = dict[str, float | None]
Measure = Callable[[], Figures]
Tensors = tuple[Tensor, ...]
Inputs = tuple[Tensors, Tensors, Tensors]  # operands with rows, parameters, cotangents
Operands = Sequence[tuple[Any, ...]]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THREADS = 1  # torch compiles a single call at a time


def random_inputs(
    workload: Workload | ShapedWorkload, parameter_dtype: str, sets: int
) -> list[Inputs]:
    """Return random operands: normal x and weights, parameters near 1, random masks and labels."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(shape: tuple[int, ...], dtype: str, size: float = 1) -> Tensor:
        wanted = getattr(torch, dtype)
        if dtype == "bool":
            return torch.rand(shape, generator=generator, device=DEVICE) < 0.8
        if dtype == "int32":  # torch's losses require 64-bit labels
            return torch.randint(int(size), shape, generator=generator, device=DEVICE)
        if size != 1:  # a weight, stored transposed as in torch.nn.Linear
            return normal(shape[::-1], dtype).mul_(size).t()
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=wanted)

    def inputs() -> Inputs:
        return (
            tuple(normal(*array) for array in workload.row_operands),
            tuple(1 + 0.1 * normal(s, parameter_dtype) for s in workload.parameter_shapes),
            tuple(normal(*array) for array in workload.cotangents),
        )

    return [inputs() for _ in range(sets)]


@functools.lru_cache(maxsize=1)
def rotating_inputs(workload: Workload | ShapedWorkload, parameter_dtype: str) -> list[Inputs]:
    """Return several sets of inputs.

    Timed calls cycle through the sets, so that no input of a call is in the GPU's cache.
    """
    return random_inputs(workload, parameter_dtype, calls.buffers_for(workload.bytes))


def forward(f: Callable[..., Any], inputs: Inputs) -> Any:
    rows, parameters, _ = inputs
    with torch.no_grad():
        return f(*rows, *parameters)


def backward(results: Any, leaves: Tensors, cotangents: Tensors) -> Tensors:
    return torch.autograd.grad(results, floating(leaves), cotangents, retain_graph=True)


def leaves_of(inputs: Inputs, constants: Sequence[int] = ()) -> Tensors:
    rows, parameters, _ = inputs
    leaves = [a.detach() for a in (*rows, *parameters)]
    for i, a in enumerate(leaves):
        a.requires_grad_(a.is_floating_point() and i not in constants)
    return tuple(leaves)


def floating(leaves: Tensors) -> Tensors:
    return tuple(a for a in leaves if a.requires_grad)


def forward_and_backward(
    f: Callable[..., Any], leaves: Tensors, cotangents: Tensors
) -> tuple[Any, Tensors]:
    results = f(*leaves)
    # A mean loss has no cotangent among the inputs. Use the constant 1, as Tensor.backward does.
    return results, torch.autograd.grad(results, floating(leaves), cotangents or None)


def calls_of(
    cell: Timed, f: Callable[..., Any], sets: Sequence[Inputs]
) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """Return two things: the function to time, which calls `f`, and a list of its operands.

    The list has an entry for each set of inputs.
    """
    if cell.direction == "fwd":
        return functools.partial(forward, f), [(inputs,) for inputs in sets]
    leaves = [(leaves_of(inputs, cell.workload.constants), inputs[-1]) for inputs in sets]
    if cell.direction == "fwd+bwd":
        return functools.partial(forward_and_backward, f), leaves
    return backward, [(f(*each), each, cotangents) for each, cotangents in leaves]


def parameter_dtype(cell: Timed) -> str:
    return provider_of(cell).parameter_dtype(cell.workload.x_dtype)


def compiled(cell: Timed) -> tuple[Callable[..., Any], float]:
    """Return the provider's function, and the seconds of its first call, which compiles it."""
    start = time.perf_counter()
    f = providers.function(cell.provider, cell.op, cell.workload.y_dtype)
    function, operands = calls_of(cell, f, random_inputs(cell.workload, parameter_dtype(cell), 1))
    function(*operands[0])
    synchronize()
    return f, time.perf_counter() - start


# Timing as in timing.py, but with torch's profiler.


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(function: Callable[..., Any], operands: Operands) -> Timing:
    """Return the timing of a function. Successive calls use different sets of operands.

    Without a GPU, this is wall-clock time.
    """
    for operand in operands:
        function(*operand)
    synchronize()
    count = calls.calls_for(operands)
    if DEVICE == "cpu":
        us = wall_us(function, operands, count)
        return Timing(us, us)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(count):
            function(*operands[i % len(operands)])
        synchronize()
    kernels = [
        event
        for event in profiled.events()
        # Skip annotations. An annotation is an event that spans several kernels, so the time of
        # these kernels would be counted twice.
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    kernels.sort(key=lambda event: event.time_range.start)
    return calls.of_kernels([event.time_range.elapsed_us() for event in kernels], count)


def temp_bytes(function: Callable[..., Any], operands: tuple[Any, ...]) -> int | None:
    """Return the temp memory of a call, or None without a GPU.

    It is the peak memory during the call minus the memory of operands and results.
    """
    if DEVICE == "cpu":
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = function(*operands)
    synchronize()
    temp = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    # Delete the results only now. If they were deleted before `memory_allocated` is called, `temp`
    # would include their bytes.
    del results
    return temp


def wall_us(function: Callable[..., Any], operands: Operands, count: int) -> float:
    """Return the median microseconds from a call to its result."""

    def call(i: int) -> None:
        function(*operands[i % len(operands)])
        synchronize()

    return calls.wall_us(call, count)


@functools.lru_cache(maxsize=4)
def copy_roof(size: int) -> Timing:
    """Return the timing of a Tensor.copy_ that loads and stores `size` bytes in all."""
    words, factor = calls.words_for(size)
    pairs = [
        tuple(torch.full((words,), i, dtype=torch.int32, device=DEVICE) for _ in range(2))
        for i in range(calls.buffers_for(size))
    ]
    return timed(lambda source, target: target.copy_(source), pairs).times(factor)


# Measuring cells.


def kernel_time(cell: Timed, f: Callable[..., Any], compile_s: float) -> Figures:
    roof = None if cell.workload.has_matmul else copy_roof(cell.workload.bytes)
    function, operands = calls_of(cell, f, rotating_inputs(cell.workload, parameter_dtype(cell)))
    measured = timed(function, operands)
    temp = temp_bytes(function, operands[0])
    if cell.op in provider_of(cell).overwrites:
        rotating_inputs.cache_clear()  # inputs were overwritten; the next cell makes new ones
    return {**measured.figures(cell.workload, roof), "compile_s": compile_s, "temp_bytes": temp}


def prepare(suite: str, cell: Any) -> Measure:
    """Compile a cell (a workload with a provider), and return a function that measures it.

    The function keeps no reference to operands, so it uses no GPU memory before it is called.
    """
    f, compile_s = compiled(cell)
    return functools.partial(kernel_time, cell, f, compile_s)


def release() -> None:
    """Free GPU memory for the next cells and for other processes."""
    rotating_inputs.cache_clear()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def needs_restart(error: Exception) -> bool:
    """Return True if the process cannot use the GPU any more after this error.

    This is so after most CUDA errors.
    """
    return "CUDA error" in str(error)
