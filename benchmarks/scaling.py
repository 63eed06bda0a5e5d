"""Weak scaling: the demo's training step on 1, 2, 4, ... GPUs, with as many sequences for each.

    python -m benchmarks.scaling --axis fsdp

`tokens/s` is of the median step; `scaling` is that over so many times one GPU's. `norms` is the
time of jaxnorm's kernels in a step on each GPU, by CUPTI: it must not grow.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from benchmarks import timing, training
from benchmarks.models import MODELS, Size

demo = training.demo
WARMUP, REPEATS = 3, 20


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Of a step on some GPUs."""

    gpus: int
    ms: float
    tokens_per_s: float
    norms_us: float


def measured(size: Size, axis: str, gpus: int) -> Scaling:
    batch = size.batch * gpus
    config = demo.Config(
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        seq=size.seq,
        batch=batch,
        dtype="bfloat16",
    )
    placement = demo.Placement.over({axis: gpus})
    model, optimizer = (
        demo.Transformer(config, demo.VARIANTS[-1]),
        demo.make_optimizer(config),
    )

    def initial():  # type: ignore[no-untyped-def]
        params = model.init(jax.random.key(0), jnp.zeros((1, size.seq), jnp.int32))["params"]
        return params, optimizer.init(params)

    shardings = placement.shardings(jax.eval_shape(initial))
    state = jax.jit(initial, out_shardings=shardings)()
    shape = (batch, size.seq + 1)
    tokens = placement.batch(jax.random.randint(jax.random.key(1), shape, 0, demo.VOCABULARY))
    step = jax.jit(
        functools.partial(demo.train_step, model, optimizer),
        donate_argnums=0,
        out_shardings=(shardings, None),
    )
    program = step.lower(state, tokens).compile()
    times = []
    for _ in range(WARMUP + REPEATS):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(program(state, tokens))
        times.append(time.perf_counter() - start)
    with timing.kernels() as ran:
        for _ in range(REPEATS):
            state, _ = program(state, tokens)
        jax.block_until_ready(state)
    norms = sum(us for name, us in ran if "jaxnorm" in name)
    seconds = statistics.median(times[WARMUP:])
    return Scaling(gpus, 1e3 * seconds, batch * size.seq / seconds, norms / REPEATS / gpus)


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
        it = measured(MODELS[given.model], given.axis, gpus)
        alone = alone or it.tokens_per_s
        scaling = it.tokens_per_s / alone / gpus
        print(f"{gpus:4}{it.ms:10.2f}{it.tokens_per_s:12.0f}{scaling:9.3f}{it.norms_us:10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
