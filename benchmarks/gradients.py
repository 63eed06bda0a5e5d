"""Gradients to be right about: one random problem for all providers, and its answer in float64.

Free of JAX and torch. Every input is representable in x's dtype, so that all providers see the
same numbers, and what differs is their arithmetic and what they saved.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from benchmarks.workloads import PARAMETERS, Workload

Array = np.ndarray
EPSILON = 1e-6
NAMES = ("dx_error", "dscale_error", "dbias_error")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Float32 arrays with values of x's dtype, and the gradients of x and the parameters."""

    x: Array
    parameters: tuple[Array, ...]
    dy: Array
    gradients: tuple[Array, ...]


@functools.lru_cache(maxsize=1)
def problem(workload: Workload) -> Problem:
    rng = np.random.default_rng(0)
    rows, cols = workload.rows, workload.cols
    dtype = ml_dtypes.bfloat16 if workload.x_dtype == "bfloat16" else workload.x_dtype

    def representable(values: Array) -> Array:
        return values.astype(dtype).astype(np.float32)

    x, dy = (representable(rng.normal(size=(rows, cols))) for _ in range(2))
    scale = representable(1 + 0.1 * rng.normal(size=cols))
    bias = representable(rng.normal(size=cols))
    parameters = (scale, bias)[: PARAMETERS[workload.op]]
    wide = [a.astype(np.float64) for a in (x, dy, *parameters)]
    return Problem(x, parameters, dy, _FORMULAS[workload.op](*wide))


def _softmax(x: Array, dy: Array) -> tuple[Array, ...]:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    y = e / e.sum(axis=-1, keepdims=True)
    return (y * (dy - np.sum(dy * y, axis=-1, keepdims=True)),)


def _log_softmax(x: Array, dy: Array) -> tuple[Array, ...]:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return (dy - e / e.sum(axis=-1, keepdims=True) * dy.sum(axis=-1, keepdims=True),)


def _rms_norm(x: Array, dy: Array, scale: Array) -> tuple[Array, ...]:
    rstd = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    x_hat, dx_hat = x * rstd, dy * scale
    dx = rstd * (dx_hat - x_hat * np.mean(dx_hat * x_hat, axis=-1, keepdims=True))
    return dx, np.sum(dy * x_hat, axis=0)


def _layer_norm(x: Array, dy: Array, scale: Array, bias: Array) -> tuple[Array, ...]:
    dx, dscale = _rms_norm(x - x.mean(axis=-1, keepdims=True), dy, scale)
    return dx - dx.mean(axis=-1, keepdims=True), dscale, dy.sum(axis=0)


_FORMULAS: dict[str, Callable[..., tuple[Array, ...]]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
}


def errors(expected: Problem, actual: Sequence[Array]) -> dict[str, float | None]:
    """Relative errors ||a - b|| / ||b|| of each gradient (float64 arrays)."""
    return {
        name: float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for name, a, b in zip(NAMES, actual, expected.gradients)
    }
