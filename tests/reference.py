"""Float64 references in NumPy, the rounding errors of dtypes, and comparisons within bounds.

A sum of n rounded terms has an error of about ``sqrt(n) * u`` times the sum of their magnitudes (a
random walk), where u is the unit roundoff of the arithmetic. The factor ``SAFETY`` covers the
largest deviation among all elements that a test checks.
"""

import jax
import ml_dtypes
import numpy as np

SAFETY = 4.0
DTYPES = ("bfloat16", "float16", "float32")


def unit_roundoff(dtype: str) -> float:
    return float(ml_dtypes.finfo(dtype).eps) / 2


def of_roundings(count: int, dtype: str, size: float | np.ndarray) -> np.ndarray:
    """Return a bound on the error of `count` successive roundings to `dtype`.

    `size` is the largest magnitude of the numbers that are rounded.
    """
    return np.asarray(count * unit_roundoff(dtype) * size)


def tiny(dtype: str) -> float:
    """Return the spacing of the dtype's subnormal numbers."""
    return float(ml_dtypes.finfo(dtype).smallest_subnormal)


def rounding(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return a bound on the error of storing `value` in `dtype`."""
    return unit_roundoff(dtype) * np.abs(value) + tiny(dtype)


def half_unit(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return half an ulp of `dtype` at `value`, slightly enlarged.

    This bound is tighter than `rounding`.
    """
    return 1.01 * np.maximum(unit_roundoff(dtype) * np.abs(value), tiny(dtype) / 2)


def exact(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def arithmetic(*dtypes: str) -> float:
    """Return the unit roundoff of the arithmetic.

    The arithmetic is float64 if any of the arrays' dtypes is float64, and float32 otherwise.
    """
    return unit_roundoff("float64" if "float64" in dtypes else "float32")


# --- softmax -------------------------------------------------------------------------------------


def softmax(x: np.ndarray, axis, where=None, *, log: bool = False) -> np.ndarray:
    mask = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)
    with np.errstate(all="ignore"):  # rows that are fully masked
        largest = x.max(axis, keepdims=True, initial=-np.inf, where=mask)
        shifted = x - np.where(mask.any(axis, keepdims=True), largest, 0)
        exponentials = np.where(mask, np.exp(shifted), 0)
        total = exponentials.sum(axis, keepdims=True)
        y = shifted - np.log(total) if log else exponentials / total
        return np.where(mask, y, -np.inf if log else 0)


def softmax_gradient(y: np.ndarray, d: np.ndarray, axes=-1, *, log: bool = False) -> np.ndarray:
    """Return the gradient with respect to the logits. `d` is the cotangent of y."""
    total = (d if log else d * y).sum(axes, keepdims=True)
    return d - np.exp(y) * total if log else y * (d - total)


ACTIVATIONS = ("silu", "gelu", "relu", "leaky_relu", "sigmoid")


class Norm:
    """A norm of the rows x, and its gradients. `d` is the cotangent of its result.

    Attributes:
      r: the reciprocal of the root mean square or of the standard deviation.
      xh: ``x_hat = (x - mean) * r``.
      c2: the mean of (cotangent of x_hat) * x_hat over a row.
      dx, dscale: the gradients of x and of the scale.
    """

    def __init__(
        self, x: np.ndarray, scale: np.ndarray, d: np.ndarray, subtract_mean: bool
    ) -> None:
        def mean(a: np.ndarray) -> np.ndarray:
            return a.mean(-1, keepdims=True)

        centred = x - mean(x) * subtract_mean
        self.d, self.gain, dg = d, scale, d * scale
        self.r = 1 / np.sqrt(mean(centred**2) + 1e-6)
        self.xh = centred * self.r
        self.c2 = mean(dg * self.xh)
        self.dx = self.r * (dg - mean(dg) * subtract_mean - self.xh * self.c2)
        self.dscale = np.sum(d * self.xh, 0)


def assert_within(actual, expected: np.ndarray, bound: np.ndarray) -> None:
    """Assert that `actual` is within `bound` of `expected`; NaN and infinities must be equal."""
    actual = exact(actual)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    error = np.abs(actual[finite] - expected[finite])
    bound = np.broadcast_to(bound, expected.shape)[finite]
    if error.size and not np.all(error <= bound):
        worst = np.nanargmax(np.where(error <= bound, 0, error / bound))
        raise AssertionError(
            f"{np.sum(~(error <= bound))} of {error.size} elements are out of bounds; the worst is "
            f"{actual[finite][worst]!r} for {expected[finite][worst]!r}: "
            f"error {error[worst]:.3g}, bound {bound[worst]:.3g}"
        )


def relative_error(actual, expected: np.ndarray) -> float:
    """Return ||actual - expected|| / ||expected||."""
    return float(np.linalg.norm(exact(actual) - expected) / np.linalg.norm(expected))


def assert_as_accurate(ours, theirs, expected) -> None:
    """Assert that each leaf of `ours` is as close to the float64 `expected` as `theirs` is.

    Both programs round at the same points, but their rounding errors differ like two samples from
    one distribution. So our error may be ``SAFETY`` times theirs. The roundoff of the dtype is
    added to their error, which may be 0 by chance.
    """
    structure = jax.tree.structure(ours)
    assert structure == jax.tree.structure(theirs) == jax.tree.structure(expected)
    for a, b, wanted in zip(*map(jax.tree.leaves, (ours, theirs, expected))):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        size = np.linalg.norm(exact(wanted))
        of_theirs = np.linalg.norm(exact(b) - exact(wanted)) + unit_roundoff(b.dtype) * size
        assert np.linalg.norm(exact(a) - exact(wanted)) <= SAFETY * of_theirs
