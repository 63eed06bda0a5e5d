"""Lists the GPU time of a training step in milliseconds, for each class of kernels.

    python -m benchmarks.profile llama-1b --remat none

There is a column for each variant of the model. Matmuls, attention and jaxnorm's kernels are
recognised by their names. XLA's fusions are recognised by the JAX name scope of the code from which
they were compiled. The row `step` is the median time from the call of a step to its results. The
sum of all kernels may be longer, because a GPU may run kernels at the same time. `--kernels` also
lists the longest kernels of each column.
"""

import argparse
import collections
import re
import statistics
import sys
from collections.abc import Mapping, Sequence

import jax

from benchmarks import hlo, models, training
from benchmarks.models import LAYERS, LOSS_STEPS, MODELS, REMATS, VARIANTS, TrainingCell

# Patterns that determine the class of a kernel. The first pattern that matches decides. The
# patterns are tried in this order: _BY_NAME on the kernel's name, _BY_SCOPE on its JAX name scope,
# _MOVES on the kernel's name again.
_BY_NAME = {
    "matrix products": r"gemm|nvjet|xmma|cutlass|cublas|splitk",
    "attention": r"sdpa|fmha|flash|cudnn",
    "loss": r"jaxnorm\w*(cross_entropy|softmax)",
    "norms": r"jaxnorm",
}
_BY_SCOPE = {
    "loss": r"\bloss\b",
    "norms": r"\bnorm\b|_norm\b|_norm_backward\b",
    "optimiser": r"\boptimizer\b",
    "attention": r"\battention\b",
    "mlp": r"\bmlp\b",
}
_MOVES = {"copies and slices": r"copy|memcpy|slice|transpose|concatenate|broadcast|pad"}
OTHER = "other fusions"
CLASSES = (
    *("matrix products", "attention", "norms", "mlp", "loss", "optimiser"),
    *(*_MOVES, OTHER),
)


def kernel_class(name: str, scopes: Mapping[str, str]) -> str:
    """Return the class of a kernel. `scopes` maps names of kernels to JAX name scopes."""
    scope = scopes.get(name, "")
    for table, text in ((_BY_NAME, name), (_BY_SCOPE, scope), (_MOVES, name)):
        for found, pattern in table.items():
            if re.search(pattern, text, re.IGNORECASE):
                return found
    return OTHER


def by_class(
    ran: Sequence[tuple[str, float]], scopes: Mapping[str, str], steps: int
) -> dict[str, float]:
    """Return a dict from each class of kernels to its milliseconds per training step.

    `ran` lists all kernels that ran in `steps` training steps: the name and the microseconds of
    each.
    """
    ms = dict.fromkeys(CLASSES, 0.0)
    for name, us in ran:
        ms[kernel_class(name, scopes)] += us / 1e3 / steps
    return ms


def longest(
    ran: Sequence[tuple[str, float]], scopes: Mapping[str, str], steps: int, count: int = 15
) -> list[str]:
    """Return a line of text for each of the `count` kernels that take most time.

    A line has the milliseconds and the number of runs per step, the class, the name and the scope.
    `ran` and `steps` are as in `by_class`.
    """
    times, calls = collections.defaultdict[str, float](float), collections.Counter[str]()
    for name, us in ran:
        times[name] += us / 1e3 / steps
        calls[name] += 1
    return [
        f"{ms:9.3f} {calls[name] // steps:5} {kernel_class(name, scopes):18} {name[:60]} "
        f"{scopes.get(name, '')}"
        for name, ms in sorted(times.items(), key=lambda each: -each[1])[:count]
    ]


def column(cell: TrainingCell, *, list_kernels: bool) -> dict[str, float]:
    """Return a column of the table, as a dict that maps the names of its rows to numbers.

    All rows but the last are times in milliseconds: one row for each class of kernels, one for all
    kernels together, and one for the whole step. The last row is the number of tokens per second.
    """
    step = training.Step(cell, cell.batch)
    state, times, _ = step.times(LOSS_STEPS[-1])
    ran, scopes = step.kernels(state), hlo.scopes(step.run.as_text() or "")
    steps = training.KERNEL_STEPS
    if list_kernels:
        print(*longest(ran, scopes, steps), sep="\n")
    ms = by_class(ran, scopes, steps)
    step_ms = statistics.median(times[training.WARMUP :])
    return {**ms, "all": sum(ms.values()), "step": step_ms, "tokens/s": 1e3 * step.tokens / step_ms}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--remat", choices=REMATS, default="none", help="(default: %(default)s)")
    parser.add_argument("--layers", choices=LAYERS, default="scan", help="(default: %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--kernels", action="store_true", help="list the longest kernels, too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    if jax.default_backend() != "gpu":
        print("benchmarks.profile times GPU kernels; there is no GPU", file=sys.stderr)
        return 2
    columns = {}
    for variant in given.variants:
        if given.kernels:
            print(variant)
        cell = models.cell(given.model, given.remat, given.layers, variant)
        columns[variant] = column(cell, list_kernels=given.kernels)
    kind = jax.devices()[0].device_kind
    print(f"{given.model}, {given.layers}, remat {given.remat}: ms of a step on one {kind}")
    print(f"{'':18}" + "".join(f"{name:>20}" for name in columns))
    for row in (*CLASSES, "all", "step", "tokens/s"):
        print(f"{row:18}" + "".join(f"{figures[row]:20.2f}" for figures in columns.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
