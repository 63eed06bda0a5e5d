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
import numpy as np
import pytest
from linear_loss_cases import operands
from program_error import analyse, assert_analysed
from reference import DTYPES

from benchmarks.timing import GPU_OPTIONS
from jaxnorm import linear_log_prob_and_entropy, linear_softmax_cross_entropy

#: How often each program runs.
RUNS = 5


class Case(NamedTuple):
    """One or several losses that share a weight.

    Attributes:
      rows: the number of rows of each loss.
      chunks: the number of chunks of each loss; None stands for the default size of a chunk.
      losses: the number of losses.
      reduction: the losses' reduction, or "log_prob" for a log-probability and an entropy.
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
# With the default size of a chunk, these rows are two chunks.
DEFAULTS = [
    Case(rows, None, d, classes, dtype, 1, "mean", mode)
    for rows, d, classes, dtype, mode in [
        (4096, 64, 4096, "bfloat16", "jit"),
        (4096, 256, 4096, "bfloat16", "options"),
        (3000, 256, 1024, "bfloat16", "jit"),
        (2560, 1024, 1000, "bfloat16", "eager"),
        (4096, 64, 4096, "float32", "jit"),
        (4096, 128, 4096, "float16", "jit"),
    ]
]
# Heads of language models. The rows of each loss are a single chunk.
HEADS = [
    Case(rows, None, 64, classes, "bfloat16", losses, "mean", mode)
    for rows, classes, losses, mode in [
        (256, 32000, 2, "jit"),
        (512, 32000, 2, "options"),
        (128, 128256, 2, "jit"),
        (256, 50257, 3, "jit"),
    ]
]


def gradients(case: Case):
    """Return a function of the weight, and of each loss's x and labels: the gradients."""
    chunk = None if case.chunks is None else -(-case.rows // case.chunks)

    def results(x, weight, labels, cotangents) -> Any:
        if case.reduction == "log_prob":
            of_rows = linear_log_prob_and_entropy(x, weight, labels, chunk=chunk)
            return sum((a * d).sum() for a, d in zip(of_rows, cotangents))
        loss = linear_softmax_cross_entropy(
            x, weight, labels, chunk=chunk, reduction=case.reduction
        )
        return (loss * cotangents[0]).sum()

    def total(weight, xs, labels, cotangents):
        return sum(results(x, weight, *given) for x, *given in zip(xs, labels, cotangents))

    return jax.grad(total, (0, 1))


def cotangents_of(case: Case, loss: int) -> list[np.ndarray]:
    along = np.arange(case.rows, dtype=np.float32) + loss
    if case.reduction in ("mean", "sum"):
        return [np.float32(1 + loss)]
    return [np.cos(along), np.sin(3 * along + 1)][: 1 + (case.reduction == "log_prob")]


def plain_gradients(case: Case):
    """Return the same function as `gradients` in plain JAX, in the dtype of the matmuls."""

    def results(x, weight, labels, cotangents) -> Any:
        product = jax.numpy.matmul(x, weight, preferred_element_type="float32")
        logits = product.astype(case.dtype).astype("float32")
        if case.reduction == "log_prob":
            of_rows = functions.log_prob_and_entropy(logits, labels, 1)
            return sum((a * d).sum() for a, d in zip(of_rows, cotangents))
        losses = functions.losses(logits, labels, 1) * cotangents[0]
        return losses.mean() if case.reduction == "mean" else losses.sum()

    def total(weight, xs, labels, cotangents):
        return sum(results(x, weight, *given) for x, *given in zip(xs, labels, cotangents))

    return jax.grad(total, (0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SMALL, *DEFAULTS, *HEADS], ids=str)
def test_gradients(case):
    made = [operands(case.rows, case.d, case.classes, case.dtype, i) for i in range(case.losses)]
    weight, xs, labels = made[0][1], [m[0] for m in made], [m[3] for m in made]
    arguments = weight, xs, labels, [cotangents_of(case, i) for i in range(case.losses)]
    expected = analyse(plain_gradients(case), *arguments)
    run = function = gradients(case)
    if case.mode != "eager":
        options = GPU_OPTIONS if case.mode == "options" else None
        run = jax.jit(function).lower(*arguments).compile(options)
    for _ in range(RUNS):
        assert_analysed(run(*arguments), expected)
