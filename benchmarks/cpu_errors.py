"""Rounding errors of jaxnorm's plain JAX code, of optax and of Flax, relative to float64.

    JAX_PLATFORMS=cpu python -m benchmarks.cpu_errors

This prints the largest error of each of these results:

* cross-entropies, in ulps of float32. There are 64 rows of normally distributed logits with
  standard deviation 3
* log-probabilities of labels, and entropies, in ulps of float32. The labels are drawn from the
  softmax of the logits, whose standard deviation is 1, 3 or 10
* probabilities of labels, as relative errors. The logits are the results of a linear layer
* y of a LayerNorm, as absolute errors. There are 64 rows of 4096 normally distributed numbers, with
  standard deviation 1 and a mean of up to 1e4
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from benchmarks import text
from benchmarks.providers import flax_modules, jaxnorm_functions, optax_functions

CLASSES = (1024, 8192, 50257, 128256)
MEANS = (0.0, 1e2, 1e3, 1e4)
ROWS, COLS = 64, 4096
DEVIATIONS = (1.0, 3.0, 10.0)
DRAWN, WIDTH = 512, 256


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


def log_probs() -> str:
    """Return a table of the errors of log-probabilities and entropies.

    The two columns called "ratio" have the relative error of the probability exp(log_prob). An
    error e of a log-probability causes the relative error exp(e) - 1. In the first of these
    columns, jaxnorm computes the logits in a fused linear layer, and does not round them. In the
    second, the logits are rounded to bfloat16.
    """

    def row(deviation: float) -> list[str]:
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=(DRAWN, WIDTH)), jnp.bfloat16)
        weight = rng.normal(size=(WIDTH, CLASSES[1])) * deviation / WIDTH**0.5
        weight = jnp.asarray(weight, jnp.bfloat16)
        logits = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
        labels = np.argmax(logits + rng.gumbel(size=logits.shape), -1)
        narrow = logits.astype(np.float32)
        of_narrow = jaxnorm.log_prob_and_entropy(narrow, labels, implementation="xla")
        ulps = (
            np.max(np.abs(np.asarray(a, np.float64) - e) / np.spacing(np.abs(e).astype(np.float32)))
            for a, e in zip(of_narrow, _log_prob_and_entropy(narrow.astype(np.float64), labels))
        )
        expected, _ = _log_prob_and_entropy(logits, labels)
        rounded = jnp.asarray(narrow, jnp.bfloat16)
        ratios = (
            np.max(np.abs(np.expm1(np.asarray(log_prob, np.float64) - expected)))
            for log_prob, _ in (
                jaxnorm.linear_log_prob_and_entropy(x, weight, labels, implementation="xla"),
                jaxnorm.log_prob_and_entropy(rounded, labels, implementation="xla"),
            )
        )
        return [f"{deviation:g}", *(f"{u:.1f}" for u in ulps), *(f"{r:.0e}" for r in ratios)]

    header = ["logits' deviation", "log-probability, ulp", "entropy, ulp"]
    header += ["ratio, `linear_log_prob_and_entropy`", "ratio, logits in bfloat16"]
    return text.table(header, map(row, DEVIATIONS))


def _log_prob_and_entropy(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute log-probability and entropy in float64.

    Let m be the largest logit, and s = sum(exp(logits - m)) - 1. The log-probability of a label
    with logit l is l - m - log1p(s). If the label has the largest logit, s is the sum of
    exp(logits - m) over the other classes. This sum may be very small, and log1p(s) is then still
    accurate.
    """
    below = logits.max(-1, keepdims=True) - logits
    exponentials = np.exp(-below)
    own = np.arange(logits.shape[-1]) == labels[:, None]
    below_own = below[own]
    others = np.sum(exponentials, -1, where=~own) + np.expm1(-below_own)
    s = exponentials.sum(-1)
    return -below_own - np.log1p(others), np.log(s) + np.sum(exponentials * below, -1) / s


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
    print(losses(), log_probs(), norms(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
