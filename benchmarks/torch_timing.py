"""Kernel time of torch calls, by its profiler's CUPTI: timing.py's method on the other side."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import calls
from benchmarks.calls import Timing

Operands = Sequence[tuple[Any, ...]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(function: Callable[..., Any], operands: Operands) -> Timing:
    """Times a function on each of `operands` in turn; wall-clock time on a CPU."""
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
        # Annotations span the kernels they name: counting both would count twice.
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    kernels.sort(key=lambda event: event.time_range.start)
    return calls.of_kernels([event.time_range.elapsed_us() for event in kernels], count)


def temp_bytes(function: Callable[..., Any], operands: tuple[Any, ...]) -> int | None:
    """What a call takes at its peak beside its operands and results; None on a CPU."""
    if DEVICE == "cpu":
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = function(*operands)
    synchronize()
    temp = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del results  # until here: they are no temporaries
    return temp


def wall_us(function: Callable[..., Any], operands: Operands, count: int) -> float:
    """Median microseconds from a call to its result, on operands that are warm."""

    def call(i: int) -> None:
        function(*operands[i % len(operands)])
        synchronize()

    return calls.wall_us(call, count)


@functools.lru_cache(maxsize=4)
def copy_roof(size: int) -> Timing:
    """A copy that reads and writes `size` bytes in all, by Tensor.copy_."""
    words, factor = calls.words_for(size)
    pairs = [
        tuple(torch.full((words,), i, dtype=torch.int32, device=DEVICE) for _ in range(2))
        for i in range(calls.buffers_for(size))
    ]
    return measure(lambda source, target: target.copy_(source), pairs).times(factor)
