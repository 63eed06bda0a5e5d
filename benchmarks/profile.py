"""Where the time of a training step goes: milliseconds of its GPU kernels, by what they do.

    python -m benchmarks.profile llama-1b --remat none

A column for each variant. Matrix products, attention and jaxnorm's kernels are told by their names;
XLA's fusions by the scope of the instruction that they are made of, in the compiled program.
`--kernels` also lists the longest kernels of each variant.
"""

import argparse
import collections
import re
import sys
from collections.abc import Mapping, Sequence

import jax

from benchmarks import hlo, models, training
from benchmarks.models import MODELS, REMATS, VARIANTS, TrainingCell

# The first that is found decides: in the kernel's name, then in its scope, then in its name again.
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
}
_MOVES = {"copies and slices": r"copy|memcpy|slice|transpose|concatenate|broadcast|pad"}
OTHER = "other fusions"
CLASSES = ("matrix products", "attention", "norms", "loss", "optimiser", *_MOVES, OTHER)


def kernel_class(name: str, scopes: Mapping[str, str]) -> str:
    """The class of a kernel; `scopes` are those of the program's instructions, by kernel name."""
    scope = scopes.get(name, "")
    for table, text in ((_BY_NAME, name), (_BY_SCOPE, scope), (_MOVES, name)):
        for found, pattern in table.items():
            if re.search(pattern, text, re.IGNORECASE):
                return found
    return OTHER


def by_class(
    ran: Sequence[tuple[str, float]], scopes: Mapping[str, str], steps: int
) -> dict[str, float]:
    """Milliseconds of a step in each class, from names and microseconds of kernels."""
    ms = dict.fromkeys(CLASSES, 0.0)
    for name, us in ran:
        ms[kernel_class(name, scopes)] += us / 1e3 / steps
    return ms


def longest(
    ran: Sequence[tuple[str, float]], scopes: Mapping[str, str], steps: int, count: int = 15
) -> list[str]:
    """Lines: milliseconds of a step, how often it ran, class, name and scope."""
    times, calls = collections.Counter[str](), collections.Counter[str]()
    for name, us in ran:
        times[name] += us / 1e3 / steps
        calls[name] += 1
    return [
        f"{ms:9.3f} {calls[name] // steps:5} {kernel_class(name, scopes):18} {name[:60]} "
        f"{scopes.get(name, '')}"
        for name, ms in times.most_common(count)
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--remat", choices=REMATS, default="none", help="(default: %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--kernels", action="store_true", help="list the longest kernels, too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    if jax.default_backend() != "gpu":
        print("benchmarks.profile times GPU kernels; there is no GPU", file=sys.stderr)
        return 2
    batch = MODELS[given.model].batch
    columns, steps = {}, training.KERNEL_STEPS
    for variant in given.variants:
        step = training.Step(
            TrainingCell(given.model, given.remat, "bfloat16", batch, variant), batch
        )
        state, *_ = step.times(models.LOSS_STEPS[0])
        ran, scopes = step.kernels(state), hlo.scopes(step.run.as_text())
        del state
        columns[variant] = by_class(ran, scopes, steps)
        if given.kernels:
            print(variant, *longest(ran, scopes, steps), sep="\n")
    print(f"{given.model}, remat {given.remat}: ms of a step on one {jax.devices()[0].device_kind}")
    print(f"{'':18}" + "".join(f"{variant:>20}" for variant in columns))
    for kind in CLASSES:
        print(f"{kind:18}" + "".join(f"{ms[kind]:20.2f}" for ms in columns.values()))
    print(f"{'all':18}" + "".join(f"{sum(ms.values()):20.2f}" for ms in columns.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
