"""Prints the docs' accuracy table: errors of the norms' gradients against float64.

    python -m benchmarks.accuracy

Relative errors ||a - b|| / ||b|| of dx and dscale over 256 rows of 1024. The reference is JAX's
autodiff of the plain formula in float64, at the exact values of the inputs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

ROWS, COLS = 256, 1024


@dataclasses.dataclass(frozen=True)
class Case:
    label: str
    dtype: str
    scale: np.ndarray
    bias: np.ndarray | None = None  # with a bias it is LayerNorm, else RMSNorm


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
        Case("bf16 LayerNorm, bias N(0, 1)", "bfloat16", near_one, rng.normal(size=COLS)),
        Case("bf16 LayerNorm, bias 10", "bfloat16", near_one, np.full(COLS, 10.0)),
        Case(
            "bf16 LayerNorm, scale in ±1e-2, bias N(0, 1)",
            "bfloat16",
            small,
            rng.normal(size=COLS),
        ),
    ]


def plain(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The formula, for autodiff."""
    if bias is not None:
        x = x - jnp.mean(x, -1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return y if bias is None else y + bias


def library(save: str):
    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        if bias is None:
            return jaxnorm.rms_norm(x, scale, save=save)
        return jaxnorm.layer_norm(x, scale, bias, save=save)

    return norm


def gradients(norm, case: Case, dtype: str) -> list[np.ndarray]:
    """(dx, dscale) as float64; x and dy have the case's values, whatever `dtype` computes with."""
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


def main() -> None:
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


if __name__ == "__main__":
    main()
