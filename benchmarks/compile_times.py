"""The suite `compile`: seconds to trace, lower and compile a program.

`jax.jit` does this work at the first call with a new shape. A program is the forward and the
backward pass of one operation. Its x has 8192 rows of the given width, possibly along several axes;
`causal_softmax` has square matrices instead. Many widths are timed, because the width selects
the kernel. Python code generates the kernel, which takes a different time for each kernel.

The operations cover every public function: `post_norm` is `rms_norm_add`, `sandwich` is
`rms_norm_add_rms_norm`, `gated_rms_norm` is `rms_norm_gated`, and `gated_add_layer_norm` is
`add_layer_norm` with a gate. Names such as `gpt2-small scan` stand for whole training steps. Each
step is compiled in three variants: in plain JAX, with jaxnorm's norms, and with all of jaxnorm.

This module defines the cells and, like `workloads`, does not import JAX or torch. `first_calls`
measures them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import workloads
from benchmarks.blocks import BLOCKS, CHANNEL_GROUPS, BlockWorkload
from benchmarks.linear import LINEAR, LinearWorkload
from benchmarks.losses import LOSSES, LossWorkload
from benchmarks.models import MODELS, PLAIN, Layers, TrainingCell
from benchmarks.workloads import Direction, Shape, Workload

#: Numbers of columns. Together they cover all rules of the schedule tables. Some are narrow, and
#: some are no multiple of 16 bytes.
WIDTHS = (
    *(8, 16, 24, 40, 56, 64, 72, 96, 120, 128, 200, 256, 384, 768),
    *(1000, 1023, 1024, 3000, 4095, 4096, 5120, 8192, 12288, 16384),
    *(32768, 50257, 65536, 131072),
)
QUICK = (24, 1024, 4095, 50257)
#: The providers whose programs are timed: jaxnorm with its default implementation, and plain jnp.
PROVIDERS = ("jaxnorm", "jnp")
#: Maximum number of seconds that any program may take.
LIMIT_S = 4.0
ROWS = 8192
#: Training steps: a model, how its layers are stacked, and the number of sequences in a batch.
STEPS: dict[str, tuple[str, Layers, int]] = {
    "gpt2-small scan": ("gpt2-small", "scan", 4),
    "gpt2-small unrolled": ("gpt2-small", "unrolled", 4),
    "llama-1b-qk scan": ("llama-1b-qk", "scan", 4),
}
STEP_VARIANTS = (PLAIN, "jaxnorm-norms", "jaxnorm-products")

# The shape of x as a function of the width. For operations with a matmul, it is (rows, features,
# columns of the weight). Operations that are not listed have (ROWS, width).
_SHAPES: dict[str, Callable[[int], Shape]] = {
    "ada_layer_norm": lambda cols: (16, 512, cols),
    "gated_add_layer_norm": lambda cols: (16, 512, cols),
    "masked_softmax": lambda cols: (4, 4, 512, cols),
    "biased_softmax": lambda cols: (4, 4, 512, cols),
    "causal_softmax": lambda cols: (1, 8, cols, cols),
    "column_softmax": lambda cols: (16, cols, 512),
    "channel_layer_norm": lambda cols: (16, cols, 16, 32),
    "group_norm": lambda cols: (8, 16, 16, cols),
    "group_norm_silu": lambda cols: (8, 16, 16, cols),
    "rms_norm_linear": lambda cols: (ROWS, cols, 512),
    "rms_norm_rope": lambda cols: (4, 512, 8, cols),
    "linear_cross_entropy": lambda cols: (ROWS, 512, cols),
    "capped_linear_cross_entropy": lambda cols: (ROWS, 512, cols),
    "linear_log_prob_and_entropy": lambda cols: (ROWS, 512, cols),
    "linear_kl_divergence": lambda cols: (ROWS, 512, cols),
}
#: Maps an operation to a number that must divide its width: GroupNorm divides the channels into
#: groups, and RoPE rotates columns in pairs.
COLUMNS_ARE_MULTIPLES_OF = {
    "group_norm": CHANNEL_GROUPS,
    "group_norm_silu": CHANNEL_GROUPS,
    "rms_norm_rope": 2,
}
# Operations of other suites that are not compiled here, because they are compositions of operations
# in this suite, or a plain matmul.
_LEFT_OUT = ("residual_rms_norm", "residual_layer_norm", "product")
OPS = tuple(op for op in (*workloads.OPERATIONS, *BLOCKS, *LOSSES, *LINEAR) if op not in _LEFT_OUT)
# Operations that are also compiled with float32 rows, or a float32 residual stream, and a bfloat16
# result.
_MIXED = ("layer_norm", "rms_norm", *(op for op, block in BLOCKS.items() if "h" in block.results))


def shaped_workload(
    op: str, direction: Direction, shape: str, dtype: str
) -> BlockWorkload | LossWorkload | LinearWorkload:
    """Return the workload of a block, a loss or a matmul with the name `op`."""
    if op in BLOCKS:
        return BlockWorkload(op, direction, shape, dtype)
    return (LinearWorkload if op in LINEAR else LossWorkload)(op, direction, shape, dtype)


@dataclasses.dataclass(frozen=True)
class CompileCell:
    """One operation, forward and backward, on one shape of x.

    The dtype "mixed" is explained in `workloads.DTYPES`.

    If `op` is a training step of STEPS, the shape is the shape of its tokens, and the provider is a
    variant of `models.VARIANTS`.
    """

    op: str
    shape: str
    dtype: str
    provider: str

    direction = "fwd+bwd"

    @property
    def step(self) -> TrainingCell | None:
        """The training step, or None for a single operation."""
        if self.op not in STEPS:
            return None
        model, layers, batch = STEPS[self.op]
        return TrainingCell(model, "none", layers, self.dtype, batch, self.provider)

    @property
    def workload(self) -> Any:
        """The workload of a single operation."""
        both: Direction = "fwd+bwd"
        if self.op not in workloads.OPERATIONS:
            return shaped_workload(self.op, both, self.shape, self.dtype)
        rows, cols = map(int, self.shape.split("x"))
        mixed = self.dtype == "mixed"
        x, y = ("float32", "bfloat16") if mixed else (self.dtype, self.dtype)
        return Workload(self.op, both, rows, cols, x, y)


def cells(
    providers: Sequence[str], ops: Sequence[str], dtypes: Sequence[str], widths: Sequence[int]
) -> Iterator[CompileCell]:
    """Yield the selected cells. For the provider jnp, yield only those in bfloat16."""
    for op in (op for op in OPS if op in ops):
        for dtype in (dtype for dtype in dtypes if dtype != "mixed" or op in _MIXED):
            for cols in widths:
                sizes = _SHAPES.get(op, lambda cols: (ROWS, cols))(cols)
                if cols % COLUMNS_ARE_MULTIPLES_OF.get(op, 1):
                    continue
                for name in (name for name in PROVIDERS if name in providers):
                    if name != "jnp" or dtype == "bfloat16":
                        yield CompileCell(op, "x".join(map(str, sizes)), dtype, name)


def steps(providers: Sequence[str], ops: Sequence[str]) -> Iterator[CompileCell]:
    """Yield the training steps of models in `ops`, for each variant of the providers."""
    for name, (model, _, batch) in STEPS.items():
        for variant in STEP_VARIANTS:
            if model in ops and variant.split("-")[0] in providers:
                yield CompileCell(name, f"{batch}x{MODELS[model].seq}", "bfloat16", variant)
