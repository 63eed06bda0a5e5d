"""What saving the output frees, block by block: compiled temp memory of 12 layers, per layer.

    python -m benchmarks.block_memory

The table counts activations of rows x width, T*d. In a pre-norm block the norm's output is kept
anyway, for the next product; saving it instead of the input frees one of them. Where the output is
not kept anyway, it is one array for another. Nothing runs; the figures are those of the device's
compiler, of the gradient with respect to the parameters of RMSNorms and matrices.
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
HEADS, BATCH = 8, 4
Array = jax.Array
Norm = Callable[[Array, Array], Array]

NORMS: dict[str, Norm] = {
    "plain jnp": jnp_functions.rms_norm,
    "save='input'": functools.partial(jaxnorm.rms_norm, save="input"),
    "save='output'": jaxnorm.rms_norm,
    "save='output', xla": functools.partial(jaxnorm.rms_norm, implementation="xla"),
}


def mlp(x: Array, w1: Array, w2: Array) -> Array:
    return jax.nn.relu(x @ w1) @ w2


def pre_norm(norm: Norm, x: Array, s1: Array, s2: Array, w1: Array, w2: Array) -> Array:
    return x + mlp(norm(x, s1), w1, w2)


def post_norm(norm: Norm, x: Array, s1: Array, s2: Array, w1: Array, w2: Array) -> Array:
    return norm(x + mlp(x, w1, w2), s1)


def sandwich(norm: Norm, x: Array, s1: Array, s2: Array, w1: Array, w2: Array) -> Array:
    """Gemma's: a norm before a branch, and one after it."""
    return x + norm(mlp(norm(x, s1), w1, w2), s2)


def qk_norm(norm: Norm, x: Array, s1: Array, s2: Array, w1: Array, w2: Array) -> Array:
    """Attention with norms of the queries and keys of each head; w1 makes both, x is the values."""
    width = x.shape[-1]
    q, k = jnp.split((x @ w1).reshape(BATCH, -1, HEADS, 2 * width // HEADS), 2, axis=-1)
    q, k = norm(q, s1[: width // HEADS]), norm(k, s2[: width // HEADS])
    v = x.reshape(*q.shape)
    return x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape)


BLOCKS: dict[str, Callable[..., Array]] = {
    "pre-norm": pre_norm,
    "post-norm": post_norm,
    "sandwich norms": sandwich,
    "QK norms": qk_norm,
}


def scanned(layer: Callable[..., Array], params: Any, x: Array) -> Array:
    out, _ = jax.lax.scan(lambda x, p: (layer(x, *p), None), x, params)
    return jnp.sum(out.astype(jnp.float32) ** 2)


def unrolled(layer: Callable[..., Array], params: Any, x: Array) -> Array:
    for p in params:
        x = layer(x, *p)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def temp_bytes(
    layer: Callable[..., Array], dtype: str, rows: int, width: int, *, scan: bool
) -> int:
    """Parameters are stacked for a scan, else apart."""
    shapes = [(width,), (width,), (width, 2 * width), (2 * width, width)]
    if scan:
        params: Any = [jax.ShapeDtypeStruct((LAYERS, *shape), dtype) for shape in shapes]
    else:
        params = [[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes] for _ in range(LAYERS)]
    x = jax.ShapeDtypeStruct((rows, width), dtype)
    step = jax.jit(jax.grad(functools.partial(scanned if scan else unrolled, layer)))
    # XLA times matrix products and takes the fastest, whose workspace may be an activation's size.
    options = {"xla_gpu_autotune_level": "0"} if jax.default_backend() == "gpu" else None
    program = step.lower(params, x).compile(options)
    return int(program.memory_analysis().temp_size_in_bytes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048, help="T (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="d (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], metavar="NAME")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    print(f"temp memory in T*d per layer; jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print(f"{'block':16}{'layers':10}{'dtype':10}" + "".join(f"{name:>20}" for name in NORMS))
    for block, layer in BLOCKS.items():
        for scan in (True, False):
            for dtype in given.dtypes:
                activation = given.rows * given.width * jnp.dtype(dtype).itemsize * LAYERS
                used = [
                    temp_bytes(
                        functools.partial(layer, norm), dtype, given.rows, given.width, scan=scan
                    )
                    for norm in NORMS.values()
                ]
                kind = "scan" if scan else "unrolled"
                cells = "".join(f"{size / activation:20.2f}" for size in used)
                print(f"{block:16}{kind:10}{dtype:10}{cells}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
