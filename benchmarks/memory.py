"""What saving the output frees: compiled temp memory of a 12-layer pre-norm stack, per layer.

    python -m benchmarks.memory

The table counts activations of rows x width, T*d. One of them per layer is what saving the output
instead of the input can free. Nothing runs; the figures are those of the device's compiler.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxnorm
from benchmarks.providers import jnp_functions

LAYERS = 12
# XLA times matrix products and takes the fastest, whose workspace may be an activation's size.
_OPTIONS = {"xla_gpu_autotune_level": "0"}
NORMS: dict[str, Callable[..., jax.Array]] = {
    "plain jnp": jnp_functions.layer_norm,
    "save='input'": functools.partial(jaxnorm.layer_norm, save="input"),
    "save='output'": jaxnorm.layer_norm,
    "save='output', xla": functools.partial(jaxnorm.layer_norm, implementation="xla"),
}


def block(norm: Callable[..., jax.Array], x: jax.Array, params: Sequence[jax.Array]) -> jax.Array:
    """x + relu(norm(x) w1) w2."""
    scale, bias, w1, w2 = params
    return x + jax.nn.relu(norm(x, scale, bias) @ w1) @ w2


def scanned(norm: Callable[..., jax.Array], params: Any, x: jax.Array) -> jax.Array:
    out, _ = jax.lax.scan(lambda x, p: (block(norm, x, p), None), x, params)
    return jnp.sum(out.astype(jnp.float32) ** 2)


def unrolled(norm: Callable[..., jax.Array], params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = block(norm, x, layer)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def temp_bytes(
    norm: Callable[..., jax.Array], dtype: str, rows: int, width: int, *, scan: bool
) -> int:
    """Of the gradient with respect to the parameters: stacked for a scan, else apart."""
    shapes = [(width,), (width,), (width, 2 * width), (2 * width, width)]
    if scan:
        params: Any = [jax.ShapeDtypeStruct((LAYERS, *shape), dtype) for shape in shapes]
    else:
        params = [[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes] for _ in range(LAYERS)]
    x = jax.ShapeDtypeStruct((rows, width), dtype)
    step = jax.jit(jax.grad(functools.partial(scanned if scan else unrolled, norm)))
    program = step.lower(params, x).compile(_OPTIONS)
    return int(program.memory_analysis().temp_size_in_bytes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192, help="T (default: %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="d (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    print(f"temp memory in T*d per layer; jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print(f"{'layers':10}{'dtype':10}" + "".join(f"{name:>20}" for name in NORMS) + f"{'freed':>8}")
    for scan in (True, False):
        for dtype in ("bfloat16", "float32"):
            activation = given.rows * given.width * jnp.dtype(dtype).itemsize
            used = {
                name: temp_bytes(norm, dtype, given.rows, given.width, scan=scan)
                / activation
                / LAYERS
                for name, norm in NORMS.items()
            }
            freed = used["save='input'"] - used["save='output'"]
            print(
                f"{'scan' if scan else 'unrolled':10}{dtype:10}"
                + "".join(f"{value:20.2f}" for value in used.values())
                + f"{freed:8.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
