"""The accuracy of ``save="output"`` and the memory it frees: tables of numerics.md and memory.md.

    python -m benchmarks.save errors
    python -m benchmarks.save memory

`errors`: relative errors ||a - b|| / ||b|| of the gradients dx and dscale, for 256 rows of 1024
elements. a is jaxnorm's gradient, and b is the reference: JAX's autodiff of the plain formula in
float64, at the exact values of the inputs.

`memory`: temp memory that XLA plans for the gradients of 12 layers with RMSNorms. The program is
compiled but not executed. The memory is given per layer, in multiples of one activation, which has
tokens x width (T*d) elements. In a pre-norm block, the norm's output is saved anyway, because it is
the input of the next matmul. With ``save="output"``, the norm's backward pass reads this array, so
the norm's input need not be saved. This frees one activation. If no other operation saves the
output, no memory is freed: the output is saved instead of the input.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from benchmarks.providers import jnp_functions
from jaxnorm_kernels.specs import Save

Array = jax.Array
Norm = Callable[..., Array]

# Table `errors`.

ROWS, COLS = 256, 1024


@dataclasses.dataclass(frozen=True)
class Case:
    label: str
    dtype: str
    scale: np.ndarray
    bias: np.ndarray | None = None  # LayerNorm if there is a bias, else RMSNorm


def cases() -> list[Case]:
    rng = np.random.default_rng(0)
    near_one = 1 + 0.1 * rng.normal(size=COLS)
    small = rng.uniform(-1e-2, 1e-2, COLS)
    some_zeros = np.where(rng.random(COLS) < 0.05, 0, near_one)
    return [
        Case("bf16 RMSNorm, scale near 1", "bfloat16", near_one),
        Case("bf16 RMSNorm, 5 % of the scales 0", "bfloat16", some_zeros),
        Case("bf16 RMSNorm, all scales 0", "bfloat16", np.zeros(COLS)),
        Case("f16 RMSNorm, scale near 1", "float16", near_one),
        Case("f32 RMSNorm, scale in ±1e-2", "float32", small),
        Case("f32 RMSNorm, scale 1e-6", "float32", np.full(COLS, 1e-6)),
        Case("f32 LayerNorm, bias N(0, 1)", "float32", near_one, rng.normal(size=COLS)),
        Case(
            "f32 LayerNorm, 5 % of the scales 0, bias 1e-6",
            "float32",
            some_zeros,
            np.full(COLS, 1e-6),
        ),
        Case("bf16 LayerNorm, bias N(0, 1)", "bfloat16", near_one, rng.normal(size=COLS)),
        Case("bf16 LayerNorm, bias 10", "bfloat16", near_one, np.full(COLS, 10.0)),
        Case(
            "bf16 LayerNorm, scale in ±1e-2, bias N(0, 1)",
            "bfloat16",
            small,
            rng.normal(size=COLS),
        ),
    ]


def plain(x: Array, scale: Array, bias: Array | None) -> Array:
    """Compute the norm by its plain formula, for differentiation by JAX."""
    if bias is not None:
        x = x - jnp.mean(x, -1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return y if bias is None else y + bias


def library(save: Save) -> Norm:
    def norm(x: Array, scale: Array, bias: Array | None) -> Array:
        if bias is None:
            return jaxnorm.rms_norm(x, scale, save=save)
        return jaxnorm.layer_norm(x, scale, bias, save=save)

    return norm


def gradients(norm: Norm, case: Case, dtype: str) -> list[np.ndarray]:
    """Return (dx, dscale) of a case. They are computed in `dtype`, and returned as float64.

    x and dy are first rounded to the dtype of the case. So their values do not depend on `dtype`.
    """
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.normal(size=(ROWS, COLS)), case.dtype).astype(dtype) for _ in "xd")
    p_dtype = "float64" if dtype == "float64" else "float32"
    scale, bias = (
        None if p is None else jnp.asarray(p, "float32").astype(p_dtype)
        for p in (case.scale, case.bias)
    )
    _, vjp = jax.vjp(lambda x, scale: norm(x, scale, bias), x, scale)
    return [np.asarray(g).astype(np.float64) for g in vjp(dy)]


def error(actual: np.ndarray, expected: np.ndarray) -> str:
    size = np.linalg.norm(expected)
    if size == 0:
        return f"≤ {np.max(np.abs(actual)):.0e} abs." if actual.any() else "0"
    return f"{np.linalg.norm(actual - expected) / size:.1e}"


def print_errors() -> None:
    print('| dx / dscale | `save="input"` | `save="output"` | `check_params` |')
    print("|---|---|---|---|")
    for case in cases():
        with jax.enable_x64(True):
            expected = gradients(plain, case, "float64")
        cells = []
        for save in ("input", "output"):
            actual = gradients(library(save), case, case.dtype)
            cells.append(" / ".join(error(a, e) for a, e in zip(actual, expected)))
        params = {"scale": case.scale} | ({} if case.bias is None else {"bias": case.bias})
        (norm,) = jaxnorm.check_params(params, case.dtype)
        print(f"| {case.label} | {' | '.join(cells)} | {norm.verdict} |")


# Table `memory`.

LAYERS, TOKENS, WIDTH = 12, 2048, 512
HEADS, BATCH = 8, 4

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
    """Apply a block as in Gemma: a norm before the MLP, and a norm after it."""
    return x + norm(mlp(norm(x, s1), w1, w2), s2)


def qk_norm(norm: Norm, x: Array, s1: Array, s2: Array, w1: Array, w2: Array) -> Array:
    """Apply attention with QK norms. w1 projects x to queries and keys; the values are x itself."""
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
    """Return the temp bytes that XLA plans for the gradients of the layers.

    The parameters of a scan are stacked; unrolled layers have separate parameters.
    """
    shapes = [(width,), (width,), (width, 2 * width), (2 * width, width)]
    if scan:
        params: Any = [jax.ShapeDtypeStruct((LAYERS, *shape), dtype) for shape in shapes]
    else:
        params = [[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes] for _ in range(LAYERS)]
    x = jax.ShapeDtypeStruct((rows, width), dtype)
    step = jax.jit(jax.grad(functools.partial(scanned if scan else unrolled, layer)))
    # Switch off XLA's autotuning, which may choose a matmul whose workspace has the size of an
    # activation.
    options = {"xla_gpu_autotune_level": "0"} if jax.default_backend() == "gpu" else None
    program = step.lower(params, x).compile(options)
    memory: Any = program.memory_analysis()  # None if the backend does not report it
    return int(memory.temp_size_in_bytes)


def print_memory() -> None:
    print(f"temp memory in T*d per layer; jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print(f"{'block':16}{'layers':10}{'dtype':10}" + "".join(f"{name:>20}" for name in NORMS))
    for block, layer in BLOCKS.items():
        for scan in (True, False):
            for dtype in ("bfloat16", "float32"):
                activation = TOKENS * WIDTH * jnp.dtype(dtype).itemsize * LAYERS
                layers = [functools.partial(layer, norm) for norm in NORMS.values()]
                used = [temp_bytes(each, dtype, TOKENS, WIDTH, scan=scan) for each in layers]
                kind = "scan" if scan else "unrolled"
                cells = "".join(f"{size / activation:20.2f}" for size in used)
                print(f"{block:16}{kind:10}{dtype:10}{cells}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = {"errors": print_errors, "memory": print_memory}
    parser.add_argument("table", choices=tables)
    tables[parser.parse_args(argv).table]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
