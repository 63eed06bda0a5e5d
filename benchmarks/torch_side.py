"""Measures cells (workloads with a provider) in torch. The processes of `worker.py` import it."""

import dataclasses
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
from benchmarks.suites import Timeable, Timed, provider_of

Figures = dict[str, float | None]
Measure = Callable[[], Figures]
Tensors = tuple[Tensor, ...]
Inputs = tuple[Tensors, Tensors, Tensors]  # operands with rows, parameters, cotangents
Call = Callable[[], Any]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
THREADS = 1  # torch compiles a single call at a time


@functools.lru_cache(maxsize=1)
def random_inputs(workload: Timeable, parameter_dtype: str, sets: int) -> list[Inputs]:
    """Return sets of random inputs: operands that have rows, parameters near 1, and cotangents."""
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


def call_of(cell: Timed, f: Callable[..., Any], inputs: Inputs) -> Call:
    """Return the function to time, which calls `f` with the inputs."""
    rows, parameters, cotangents = inputs
    if cell.direction == "fwd":

        def forward() -> Any:
            with torch.no_grad():
                return f(*rows, *parameters)

        return forward
    leaves = [a.detach() for a in (*rows, *parameters)]
    for i, a in enumerate(leaves):
        a.requires_grad_(a.is_floating_point() and i not in cell.workload.constants)
    given = [a for a in leaves if a.requires_grad]
    if cell.direction == "fwd+bwd":

        def forward_and_backward() -> Any:
            results = f(*leaves)
            # A mean loss has no cotangent among the inputs. Use 1, as Tensor.backward does.
            return results, torch.autograd.grad(results, given, cotangents or None)

        return forward_and_backward
    saved = f(*leaves)
    return lambda: torch.autograd.grad(saved, given, cotangents, retain_graph=True)


def parameter_dtype(cell: Timed) -> str:
    return provider_of(cell).parameter_dtype(cell.workload.x_dtype)


def compiled(cell: Timed) -> tuple[Callable[..., Any], float]:
    """Return the provider's function, and the seconds of its first call, which compiles it."""
    start = time.perf_counter()
    f = providers.function(cell.provider, cell.op, cell.workload.y_dtype)
    call_of(cell, f, random_inputs(cell.workload, parameter_dtype(cell), 1)[0])()
    synchronize()
    return f, time.perf_counter() - start


# Timing as in timing.py, but with torch's profiler.


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(several: Sequence[Call]) -> Timing:
    """Return the timing of one call, from several calls that differ only in their inputs.

    Without a GPU, this is wall-clock time.
    """
    for call in several:
        call()
    synchronize()
    count = max(calls.REPEATS, len(several))
    if DEVICE == "cpu":
        return Timing(calls.wall_us(lambda i: several[i % len(several)](), count))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(count):
            several[i % len(several)]()
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


def temp_bytes(call: Call) -> int | None:
    """Return the temp memory of a call, or None without a GPU.

    It is the peak memory during the call minus the memory of operands and results.
    """
    if DEVICE == "cpu":
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    synchronize()
    temp = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    # Delete the results only now. If they were deleted before `memory_allocated` is called, `temp`
    # would include their bytes.
    del results
    return temp


# Measuring cells.


def kernel_time(cell: Timed, f: Callable[..., Any], compile_s: float) -> Figures:
    sets = calls.buffers_for(cell.workload.bytes)
    inputs = random_inputs(cell.workload, parameter_dtype(cell), sets)
    several = [call_of(cell, f, each) for each in inputs]
    figures = dataclasses.asdict(timed(several))
    temp = temp_bytes(several[0])
    if cell.op in provider_of(cell).overwrites:
        random_inputs.cache_clear()  # inputs were overwritten; the next cell makes new ones
    return {**figures, "compile_s": compile_s, "temp_bytes": temp}


def prepare(suite: str, cell: Any) -> Measure:
    """Compile a cell (a workload with a provider), and return a function that measures it.

    The function keeps no reference to operands, so it uses no GPU memory before it is called.
    """
    f, compile_s = compiled(cell)
    return functools.partial(kernel_time, cell, f, compile_s)


def release() -> None:
    """Free GPU memory for the next cells and for other processes."""
    random_inputs.cache_clear()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def needs_restart(error: Exception) -> bool:
    """Return True if the process cannot use the GPU any more after this error.

    This is so after most CUDA errors.
    """
    return "CUDA error" in str(error)
