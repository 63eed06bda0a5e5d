"""Errors of plain JAX against float64: jaxnorm's, optax's and Flax's.

    JAX_PLATFORMS=cpu python -m benchmarks.cpu_errors

The loss: units in the last place of float32, the most of 64 rows of normal logits of deviation 3.
LayerNorm: the largest error of y over 64 rows of 4096, of deviation 1 around a mean.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import text
from benchmarks.providers import flax_modules, jaxnorm_functions, optax_functions

CLASSES = (1024, 8192, 50257, 128256)
MEANS = (0.0, 1e2, 1e3, 1e4)
ROWS, COLS = 64, 4096


def losses() -> str:
    def ulps(function: Callable[..., jax.Array], classes: int) -> str:
        rng = np.random.default_rng(0)
        x = (3 * rng.normal(size=(ROWS, classes))).astype(np.float32)
        labels = rng.integers(0, classes, ROWS)
        wide = x.astype(np.float64)
        m = wide.max(-1)
        s = np.exp(wide - m[:, None]).sum(-1)
        expected = m - wide[np.arange(ROWS), labels] + np.log(s)
        error = np.asarray(jax.jit(function)(x, labels), np.float64) - expected
        return f"{np.max(np.abs(error) / np.spacing(expected.astype(np.float32))):.1f}"

    functions = {
        "jaxnorm": jaxnorm_functions.function("xla", "cross_entropy", "float32"),
        "optax": optax_functions.cross_entropy,
    }
    rows = [[str(n), *(ulps(f, n) for f in functions.values())] for n in CLASSES]
    return text.table(["classes", *functions], rows)


def norms() -> str:
    def error(function: Callable[..., jax.Array], mean: float) -> str:
        x = (mean + np.random.default_rng(0).normal(size=(ROWS, COLS))).astype(np.float32)
        wide = x.astype(np.float64)
        centred = wide - wide.mean(-1, keepdims=True)
        expected = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-6)
        y = jax.jit(function)(x, jnp.ones(COLS), jnp.zeros(COLS))
        return f"{np.max(np.abs(np.asarray(y, np.float64) - expected)):.0e}"

    functions = {
        "jaxnorm": jaxnorm_functions.function("xla", "layer_norm", "float32"),
        "Flax": flax_modules.layer_norm("float32"),
        "Flax, two passes": flax_modules.layer_norm("float32", use_fast_variance=False),
    }
    rows = [[f"{mean:g}", *(error(f, mean) for f in functions.values())] for mean in MEANS]
    return text.table(["mean", *functions], rows)


def main() -> int:
    print(losses(), norms(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
