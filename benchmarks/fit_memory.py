"""Fits a training step into several amounts of memory with `jaxnorm.fit_memory`, and times it.

Usage, from the root of the repository::

    python -m benchmarks.fit_memory [--model llama-1b] [--layers scan] [--temp 10,8,7] [--tiny]

The step is that of `benchmarks.auto_remat`: a plain model with jaxnorm's linear loss, and AdamW
with donated parameters. A limit is the size of its arguments, and gigabytes for temporary
memory. Prints, for each limit: the limit and the memory in gigabytes, the number of compilations,
the seconds of `fit_memory`, and milliseconds of a step (the median).
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax

import jaxnorm
from benchmarks import auto_remat, models, training, variants

_STEPS = 16


def measure(cell: models.TrainingCell, temp: float) -> None:
    """Fit the step of a cell into `temp` bytes beside its arguments, and print a line."""
    step = training.Step(cell, cell.batch)
    given = step.initial(), step.batch(0)
    fixed = sum(a.nbytes for a in jax.tree.leaves(given))
    count = 0
    compile_ = jax.stages.Lowered.compile

    def counted(self: Any) -> Any:
        nonlocal count
        count += 1
        return compile_(self, step.options)

    def train(remat: Any, state: Any, tokens: Any) -> Any:
        return auto_remat._train_step(remat, step.model, state, tokens)

    limit = fixed + temp
    line = f"{cell.model} {cell.layers}: limit {limit / 1e9:.2f} GB, of which {temp / 1e9:.2f} temp"
    start = time.perf_counter()
    jax.stages.Lowered.compile = counted  # type: ignore[method-assign, assignment]
    try:
        compiled = jaxnorm.fit_memory(train, *given, limit=limit, donate_argnums=0)
    except ValueError as error:
        print(f"{line}: {error}", flush=True)
        return
    finally:
        jax.stages.Lowered.compile = compile_  # type: ignore[method-assign]
    seconds = time.perf_counter() - start
    plan: Any = compiled.memory_analysis()
    memory = plan.argument_size_in_bytes + plan.output_size_in_bytes
    memory += plan.temp_size_in_bytes - plan.alias_size_in_bytes
    state, tokens = given
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        state, loss = jax.block_until_ready(compiled(state, tokens))
        times.append(1e3 * (time.perf_counter() - start))
    print(
        f"{line}; needs {memory / 1e9:.2f} GB, of which {plan.temp_size_in_bytes / 1e9:.2f} temp; "
        f"{count} compilations in {seconds:.1f} s; {statistics.median(times):.2f} ms; loss "
        f"{float(loss):.4f}",
        flush=True,
    )


def main() -> None:
    """Measure the limits that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--layers", default="scan")
    parser.add_argument("--temp", default="10,8,7", help="gigabytes, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="a small model, to test this script")
    options = parser.parse_args()
    plain = variants.VARIANTS["jnp"]
    variants.VARIANTS["jnp-linear-loss"] = dataclasses.replace(
        plain, loss=variants.loss_without_logits
    )
    size = models.MODELS[options.model]
    if options.tiny:
        small = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 4, "hidden": 512}
        small |= {"vocabulary": 1024, "seq": 256, "batch": 2}
        size = models.MODELS[options.model] = dataclasses.replace(size, **small)  # type: ignore[arg-type]
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    cell = models.TrainingCell(
        options.model, "none", options.layers, "bfloat16", size.batch, "jnp-linear-loss"
    )
    for temp in map(float, options.temp.split(",")):
        measure(cell, 1e9 * temp)


if __name__ == "__main__":
    main()
