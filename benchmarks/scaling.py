"""Weak scaling: a training step on 1, 2, 4, ... GPUs, with as many sequences for each.

    python -m benchmarks.scaling --axis fsdp

`tokens/s` is of the median step; `scaling` is that over so many times one GPU's. `norms` is the
time of jaxnorm's kernels in a step on each GPU, by CUPTI: it must not grow.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import training
from benchmarks.models import LOSS_STEPS, MODELS, TrainingCell
from benchmarks.results import ROOT

sys.path.insert(0, str(ROOT / "examples"))  # scripts, not a package

from placement import Placement


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Of a step on some GPUs."""

    gpus: int
    ms: float
    tokens_per_s: float
    norms_us: float


def measured(model: str, axis: str, gpus: int) -> Scaling:
    placement = Placement.over({axis: gpus})
    batch = MODELS[model].batch * gpus
    cell = TrainingCell(model, "none", "bfloat16", batch, "jaxnorm-everything")

    def shardings(state: Any) -> tuple[Any, Any]:
        return placement.shardings(state), NamedSharding(placement.mesh, PartitionSpec(axis))

    step = training.Step(cell, batch, shardings)
    state, times, _ = step.times(LOSS_STEPS[-1])
    norms = sum(us for name, us in step.kernels(state) if "jaxnorm" in name)
    ms = statistics.median(times[training.WARMUP :])
    return Scaling(gpus, ms, 1e3 * step.tokens / ms, norms / training.KERNEL_STEPS / gpus)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="gpt2-small", help="(%(default)s)")
    parser.add_argument(
        "--axis", choices=["data", "fsdp"], default="data", help="what is split (%(default)s)"
    )
    given = parser.parse_args(argv)
    if jax.devices()[0].platform != "gpu":
        print("benchmarks.scaling times GPUs; there is none", file=sys.stderr)
        return 2
    counts = [2**i for i in range(jax.device_count().bit_length())]
    print(f"{given.model}, {given.axis}; jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print(f"{'GPUs':>4}{'ms':>10}{'tokens/s':>12}{'scaling':>9}{'norms us':>10}")
    alone = None
    for gpus in counts:
        it = measured(given.model, given.axis, gpus)
        alone = alone or it.tokens_per_s
        scaling = it.tokens_per_s / alone / gpus
        print(f"{gpus:4}{it.ms:10.2f}{it.tokens_per_s:12.0f}{scaling:9.3f}{it.norms_us:10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
