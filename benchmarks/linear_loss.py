"""Times `linear_loss` beside the named linear losses, and beside optax with all logits.

Usage, from the root of the repository: ``python -m benchmarks.linear_loss``. It prints rows,
features and classes, what is computed, milliseconds of the loss and its gradients (wall clock, the
median of ten calls), and GB of temporary memory.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxnorm

Array = jax.Array

SHAPES = ((8192, 2048, 128256), (8192, 4096, 128256), (16384, 2048, 50257))


def of_jaxnorm(logits: Array, label: Array) -> Array:
    return jaxnorm.softmax_cross_entropy_with_integer_labels(logits, label)


def focal(logits: Array, label: Array) -> Array:
    loss = of_jaxnorm(logits, label)
    return (1 - jnp.exp(-loss)) ** 2 * loss


def plain(logits: Array, label: Array) -> Array:
    return jax.nn.logsumexp(logits) - logits[label]


def functions(labels: Array) -> dict[str, Callable[[Array, Array], Array]]:
    """Return losses of x (rows, features) and weight (features, classes)."""
    return {
        "linear_softmax_cross_entropy": lambda x, w: jaxnorm.linear_softmax_cross_entropy(
            x, w, labels
        ),
        "linear_log_prob_and_entropy": lambda x, w: jnp.mean(
            jaxnorm.linear_log_prob_and_entropy(x, w, labels)[0]
        ),
        "linear_loss, jaxnorm's": lambda x, w: jaxnorm.linear_loss(of_jaxnorm, x, w, labels),
        "linear_loss, focal": lambda x, w: jaxnorm.linear_loss(focal, x, w, labels),
        "linear_loss, plain JAX": lambda x, w: jaxnorm.linear_loss(plain, x, w, labels),
        "linear_loss, plain JAX, chunk=2048": lambda x, w: jaxnorm.linear_loss(
            plain, x, w, labels, chunk=2048
        ),
        "optax, all logits": lambda x, w: jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels((x @ w).astype(jnp.float32), labels)
        ),
    }


def measure(f: Callable[..., Any], *args: Array) -> str:
    compiled = jax.jit(f).lower(*args).compile()
    plan: Any = compiled.memory_analysis()
    times = []
    for _ in range(13):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    ms = 1e3 * statistics.median(times[3:])
    return f"{ms:.2f} ms {plan.temp_size_in_bytes / 1e9:.2f} GB"


def main() -> None:
    for rows, features, classes in SHAPES:
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (rows, features), jnp.bfloat16)
        weight = jax.random.normal(keys[1], (features, classes)) * features**-0.5
        labels = jax.random.randint(keys[2], (rows,), 0, classes)
        for name, f in functions(labels).items():
            figures = measure(jax.value_and_grad(f, (0, 1)), x, weight.astype(jnp.bfloat16))
            print(f"{rows} x {features} x {classes}: {name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
