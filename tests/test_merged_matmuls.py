"""Linear losses in programs whose matmuls XLA merges, on a GPU: gradients against float64.

XLA merges matmuls that have a common operand, such as the weight of several chunks or of several
losses. The kernels of the loss overwrite the logits with their gradients, so each kernel needs the
logits of its chunk in a separate buffer. `mosaic/test_slices.py` shows without a GPU that they
have one.
"""

import itertools
from typing import Any, NamedTuple

import functions
import jax
import jax.numpy as jnp
import pytest
from linear_loss_cases import operands
from program_error import analyse, assert_analysed
from reference import DTYPES

from benchmarks.timing import GPU_OPTIONS
from jaxnorm import (
    linear_kl_divergence,
    linear_log_prob_and_entropy,
    linear_softmax_cross_entropy,
)

#: How often each program runs.
RUNS = 5


class Case(NamedTuple):
    """One or several losses that share a weight.

    Attributes:
      rows: the number of rows of each loss.
      chunks: the number of chunks of each loss; None stands for the default size of a chunk.
      losses: the number of losses.
      reduction: the losses' reduction, "log_prob" for a log-probability and an entropy, or
        "divergence" for a divergence from a teacher of logits -x @ weight (in float32, because
        the gradient of 16-bit logits is rounded to 16 bits).
      mode: "eager", "jit", or "options" (jit with the compiler options of the benchmarks).
    """

    rows: int
    chunks: int | None
    d: int
    classes: int
    dtype: str
    losses: int
    reduction: str
    mode: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


MODES = ["jit", "eager", "options"]
REDUCTIONS = ["mean", "sum", "none", "log_prob"]
SMALL = [
    Case(rows, chunks, d, classes, dtype, losses, reduction, mode)
    for (chunks, losses, reduction), rows, d, classes, dtype, mode in zip(
        itertools.product([1, 2, 3, 4], [1, 2, 3], REDUCTIONS),
        itertools.cycle([48, 96, 144, 1032, 32]),
        itertools.cycle([16, 64]),
        itertools.cycle([4096, 12288, 32000, 4100, 8192, 4096, 16384]),
        itertools.cycle(DTYPES),
        itertools.cycle(MODES[:1] + MODES + MODES[:1]),
    )
]
#: Programs that are also compiled without a GPU. With the default size of a chunk, the rows of the
#: first six are two chunks, and the rows of each loss of the next four are one.
MERGED = [
    Case(4096, None, 64, 4096, "bfloat16", 1, "mean", "jit"),
    Case(4096, None, 256, 4096, "bfloat16", 1, "mean", "options"),
    Case(3000, None, 256, 1024, "bfloat16", 1, "mean", "jit"),
    Case(2560, None, 1024, 1000, "bfloat16", 1, "mean", "eager"),
    Case(4096, None, 64, 4096, "float32", 1, "mean", "jit"),
    Case(4096, None, 128, 4096, "float16", 1, "mean", "jit"),
    Case(256, None, 64, 32000, "bfloat16", 2, "mean", "jit"),
    Case(512, None, 64, 32000, "bfloat16", 2, "none", "options"),
    Case(128, None, 64, 128256, "bfloat16", 2, "mean", "jit"),
    Case(256, None, 64, 50257, "bfloat16", 3, "mean", "jit"),
    Case(32, 2, 16, 12288, "float16", 1, "mean", "jit"),
    Case(96, 2, 64, 12288, "float32", 1, "none", "jit"),
    Case(256, None, 64, 8192, "float32", 2, "log_prob", "jit"),
    Case(1024, 2, 64, 8192, "float32", 1, "log_prob", "jit"),
    Case(256, None, 64, 8192, "float32", 2, "divergence", "jit"),
]


def gradients(case: Case, *, plain: bool = False):
    """Return a function of the weight, and of each loss's x and labels: the gradients.

    If `plain` is True, plain JAX computes them, and rounds the logits to the dtype of the matmuls.
    """
    chunk = None if case.chunks is None else -(-case.rows // case.chunks)

    def results(x, weight, labels) -> Any:
        if case.reduction == "divergence" and not plain:
            return linear_kl_divergence(x, weight, -x, weight, chunk=chunk)
        if case.reduction == "log_prob" and not plain:
            return linear_log_prob_and_entropy(x, weight, labels, chunk=chunk)
        if not plain:
            options = {"chunk": chunk, "reduction": case.reduction}
            return linear_softmax_cross_entropy(x, weight, labels, **options)
        product = jnp.matmul(x, weight, preferred_element_type="float32")
        if case.reduction == "divergence":
            return jnp.mean(functions.divergences(product, -product))
        logits = product.astype(case.dtype).astype("float32")
        if case.reduction == "log_prob":
            return functions.log_prob_and_entropy(logits, labels, 1)
        losses = functions.losses(logits, labels, 1)
        return {"mean": jnp.mean, "sum": jnp.sum, "none": jnp.asarray}[case.reduction](losses)

    def total(weight, xs, labels):
        found = [a for x, y in zip(xs, labels) for a in jax.tree.leaves(results(x, weight, y))]
        return sum((jnp.cos(jnp.arange(a.size) + i) * a).sum() for i, a in enumerate(found))

    return jax.grad(total, (0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL, *MERGED], ids=str)
def test_gradients(case):
    made = [operands(case.rows, case.d, case.classes, case.dtype, i) for i in range(case.losses)]
    arguments = made[0][1], [m[0] for m in made], [m[3] for m in made]
    expected = analyse(gradients(case, plain=True), *arguments)
    run = function = gradients(case)
    if case.mode != "eager":
        options = GPU_OPTIONS if case.mode == "options" else None
        run = jax.jit(function).lower(*arguments).compile(options)
    for _ in range(RUNS):
        assert_analysed(run(*arguments), expected)
