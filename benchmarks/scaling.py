"""Weak scaling: the demo's training step on 1, 2, 4, ... GPUs, with as many sequences for each.

    python -m benchmarks.scaling --axis fsdp

`tokens/s` is of the median step; `scaling` is that over so many times one GPU's. `norms` is the
time of jaxnorm's kernels in a step on each GPU, by CUPTI: it must not grow.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks import timing, training
from benchmarks.models import MODELS, TrainingCell

demo = training.demo


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Of a step on some GPUs."""

    gpus: int
    ms: float
    tokens_per_s: float
    norms_us: float


def measured(model: str, axis: str, gpus: int) -> Scaling:
    batch = MODELS[model].batch * gpus
    placement = demo.Placement.over({axis: gpus})
    step = training.Step(
        TrainingCell(model, "scan", "bfloat16", batch, "jaxnorm-output"), batch, placement
    )
    state = step.initial()
    random = jax.random.randint(jax.random.key(1), step.batch_shape, 0, demo.VOCABULARY)
    tokens = placement.batch(np.asarray(random))
    times = []
    for _ in range(training.WARMUP + training.REPEATS):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step.run(state, tokens))
        times.append(time.perf_counter() - start)
    with timing.kernels() as ran:
        for _ in range(training.REPEATS):
            state, _ = step.run(state, tokens)
        jax.block_until_ready(state)
    norms = sum(us for name, us in ran if "jaxnorm" in name)
    seconds = statistics.median(times[training.WARMUP :])
    return Scaling(gpus, 1e3 * seconds, step.tokens / seconds, norms / training.REPEATS / gpus)


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
