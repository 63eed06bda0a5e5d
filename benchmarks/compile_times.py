"""Seconds from a call to a program that runs: to trace, to lower and to compile it.

What `jax.jit` does at the first call of a width: forward and backward in one program, of 8192 rows
(of blocks as many, of `causal_softmax` a square). Kernels are lowered in Python, so that widths
differ more than their GPU times do.

Free of JAX and torch, as `workloads` is: `first_calls` measures.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import workloads
from benchmarks.blocks import BLOCKS, CHANNEL_GROUPS, BlockWorkload
from benchmarks.losses import LossWorkload
from benchmarks.workloads import Direction, Shape, Workload

#: A width for each line of the schedules' tables and the ends of it: narrow, aligned and not.
WIDTHS = (
    *(8, 16, 24, 40, 56, 64, 72, 96, 120, 128, 200, 256, 384, 768),
    *(1000, 1023, 1024, 3000, 4095, 4096, 5120, 8192, 12288, 16384),
    *(32768, 50257, 65536, 131072),
)
QUICK = (24, 1024, 4095, 50257)
#: Providers whose programs are timed: what a call gets by default, and plain jnp.
PROVIDERS = ("jaxnorm", "jnp")
#: Seconds that no program is to take.
LIMIT_S = 4.0
ROWS = 8192

# Of x, by the width. Blocks that are not here are (ROWS, width).
_SHAPES: dict[str, Callable[[int], Shape]] = {
    "ada_layer_norm": lambda cols: (16, 512, cols),
    "masked_softmax": lambda cols: (4, 4, 512, cols),
    "biased_softmax": lambda cols: (4, 4, 512, cols),
    "causal_softmax": lambda cols: (1, 8, cols, cols),
    "column_softmax": lambda cols: (16, cols, 512),
    "channel_layer_norm": lambda cols: (16, cols, 16, 32),
    "group_norm": lambda cols: (8, 16, 16, cols),
}
# Compositions of other functions here.
_LEFT_OUT = ("residual_rms_norm", "residual_layer_norm")
OPS = (
    *workloads.OPERATIONS,
    *(op for op in BLOCKS if op not in _LEFT_OUT),
    "cross_entropy",
)


@dataclasses.dataclass(frozen=True)
class CompileCell:
    """One operation, forward and backward, on x of one shape; "mixed" as in `workloads.DTYPES`."""

    op: str
    shape: str
    dtype: str
    provider: str

    direction = "fwd+bwd"

    @property
    def workload(self) -> Any:
        """What is computed."""
        both: Direction = "fwd+bwd"
        if self.op in BLOCKS:
            return BlockWorkload(self.op, both, self.shape, self.dtype)
        if self.op in workloads.OPERATIONS:
            rows, cols = map(int, self.shape.split("x"))
            mixed = self.dtype == "mixed"
            x, y = ("float32", "bfloat16") if mixed else (self.dtype, self.dtype)
            return Workload(self.op, both, rows, cols, x, y)  # type: ignore[arg-type]
        return LossWorkload(self.op, both, self.shape, self.dtype)


def cells(
    providers: Sequence[str],
    ops: Sequence[str],
    dtypes: Sequence[str],
    widths: Sequence[int],
    offers: Callable[[str, Any], bool],
) -> Iterator[CompileCell]:
    """Those asked for that a provider offers; plain jnp in bfloat16 alone."""
    for op in (op for op in OPS if op in ops):
        for dtype in dtypes:
            for cols in widths:
                sizes = _SHAPES.get(op, lambda cols: (ROWS, cols))(cols)
                if op == "group_norm" and cols % CHANNEL_GROUPS:
                    continue
                for name in (name for name in PROVIDERS if name in providers):
                    cell = CompileCell(op, "x".join(map(str, sizes)), dtype, name)
                    if name == "jnp" and dtype != "bfloat16":
                        continue
                    work = cell.workload
                    if work.mixed == (dtype == "mixed") and offers(name, work):
                        yield cell
