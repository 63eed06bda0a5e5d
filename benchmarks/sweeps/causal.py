"""Schedules of causal softmaxes that differ in how many columns a row loads at once.

The threads of a row load a block of adjacent columns at once, called a *unit*. A row needs no
columns beyond the diagonal. But it loads the whole unit in which the diagonal lies. On average,
half of this unit is loaded in vain, so small units may be faster. In Triton's kernels, only a part
of a 16-byte vector is loaded in vain.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import contract
from benchmarks.contract import KernelWorkload
from jaxnorm_kernels import xla
from jaxnorm_kernels.mosaic.device.layouts import VECTOR_BYTES, WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.rows.logits import run_of_rows
from jaxnorm_kernels.mosaic.schedules import forward, softmax_backward
from jaxnorm_kernels.specs import Spec

_VALUES = 64  # maximum number of columns per thread


@dataclasses.dataclass(frozen=True)
class CausalWorkload(KernelWorkload):
    """A causal softmax of square matrices of logits."""

    @property
    def spec(self) -> Spec:
        return super().spec.replaced(causal=True, queries=self.cols)

    def function(self, implementation: Any) -> Callable[..., Any]:
        if implementation is not xla:
            return super().function(implementation)
        spec = self.spec.replaced(queries=0)

        def whole(*operands: Any) -> Any:
            matrices = jax.tree.map(lambda a: a.reshape(-1, self.cols, self.cols), operands)
            results = contract.call(xla, spec, *matrices)[:1]
            return jax.tree.map(lambda a: a.reshape(self.shape), results)

        return whole

    def operands(self, seed: int) -> tuple[Any, ...]:
        first, *others = super().operands(seed)
        if self.direction == "fwd":
            return (first,)
        reached = jnp.tril(jnp.ones((self.cols, self.cols), bool))
        y = jnp.where(reached, first.reshape(-1, self.cols, self.cols), 0)
        return y.reshape(self.shape), *others


def workloads() -> Iterator[CausalWorkload]:
    for direction in ("fwd", "bwd"):
        for dtype in ("bfloat16", "float32"):
            for cols in (512, 1024, 2048):
                rows = 2**26 // cols
                yield CausalWorkload("softmax", direction, rows, cols, dtype, dtype)


def schedules(workload: CausalWorkload) -> list[Any]:
    """Return the schedule that the tables choose, then others that load more or fewer columns."""
    spec = workload.spec
    choose = forward.choose if workload.direction == "fwd" else softmax_backward.softmax_schedule
    chosen = choose(spec)
    if chosen is None or chosen.threads is None:
        return []
    tried = [chosen]
    widest = VECTOR_BYTES // spec.y_dtype.itemsize
    for threads in (32, 16, 8):
        for vector in (widest, widest // 2):
            rows = WARPGROUP_THREADS // threads
            fits = math.gcd(run_of_rows(spec), rows) == rows
            if fits and workload.cols <= _VALUES * threads:
                tried.append(dataclasses.replace(chosen, threads=threads, vector=vector, rows=rows))
    return list(dict.fromkeys(tried))
