"""Fits a training step into several amounts of memory with `jaxnorm.fit_memory`, and times it.

Usage, from the root of the repository::

    python -m benchmarks.fit_memory [--models llama-1b] [--layers scan] [--temp 10,8,7]

As in `benchmarks.auto_remat`, a step trains a plain model with jaxnorm's linear loss and AdamW, and
its state is donated. A limit is the size of the step's arguments plus a number of gigabytes from
`--temp`. The printed line of a limit has the limit; the memory that the step needs; the number of
compilations; the seconds that `fit_memory` took; the milliseconds of a step; and the first loss.
"""

import argparse
import time
from typing import Any

import jax

import jaxnorm
from benchmarks import auto_remat, language_models, models, training

_STEPS = 16


def measure(cell: models.TrainingCell, temp: float) -> None:
    """Fit a cell's step into `temp` bytes in addition to its arguments, and print a line."""
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
        return language_models.train_step(step.model, state, tokens, remat)

    limit = fixed + temp
    line = f"{cell.model} {cell.layers}: limit {limit / 1e9:.2f} GB, of which {temp / 1e9:.2f} temp"
    start = time.perf_counter()
    jax.stages.Lowered.compile = counted  # type: ignore[method-assign, assignment]
    try:
        step.run = jaxnorm.fit_memory(train, *given, limit=limit, donate_argnums=0)
    except ValueError as error:
        print(f"{line}: {error}", flush=True)
        return
    finally:
        jax.stages.Lowered.compile = compile_  # type: ignore[method-assign]
    seconds = time.perf_counter() - start
    del given
    ms, loss = step.round(_STEPS)
    print(
        f"{line}; needs {step.peak_bytes / 1e9:.2f} GB, of which {step.temp_bytes / 1e9:.2f} temp; "
        f"{count} compilations in {seconds:.1f} s; {ms:.2f} ms; loss {loss:.4f}",
        flush=True,
    )


def main() -> None:
    """Measure the limits that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temp", default="10,8,7", help="gigabytes, separated by commas")
    options = auto_remat.parse(parser, "llama-1b", "scan")
    for model, layers in options.chosen:
        cell = models.cell(model, "none", layers, "jnp-linear-loss")
        for temp in map(float, options.temp.split(",")):
            measure(cell, 1e9 * temp)


if __name__ == "__main__":
    main()
