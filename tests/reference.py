"""Bounds on the rounding errors of the functions and their gradients, derived by hand.

The float64 values are computed in NumPy. Inputs are taken as exact, so a bound only covers
arithmetic and storage. In the bounds, u is the unit roundoff of the arithmetic (float32 or
float64), and v is the unit roundoff of the stored output. A sum of n rounded terms has an error of
about ``sqrt(n) * u`` times the sum of their magnitudes (a random walk). The factor ``SAFETY``
covers the largest deviation among all elements that a test checks.
"""

import dataclasses
import functools
import math

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


log_softmax = functools.partial(softmax, log=True)


def softmax_bound(x: np.ndarray, y: np.ndarray, axis, out: str, u: float) -> np.ndarray:
    """Return a bound on the error of a softmax.

    It covers the rounding of x - max(x) (the argument of exp), of the sum, and of the result.
    """
    depth = np.max(x, axis=axis, keepdims=True) - x
    n = y.size / max(1, np.max(y, axis=axis).size)
    return SAFETY * u * y * (depth + np.max(depth) + math.sqrt(n) + 2) + rounding(y, out)


def log_softmax_bound(x: np.ndarray, y: np.ndarray, axis, out: str, u: float) -> np.ndarray:
    n = y.size / max(1, np.max(y, axis=axis).size)
    spread = np.max(x) - np.min(x)
    return SAFETY * u * (np.abs(y) + spread + math.sqrt(n) + 2) + rounding(y, out)


def softmax_gradient(y: np.ndarray, d: np.ndarray, axes=-1, *, log: bool = False) -> np.ndarray:
    """Return the gradient with respect to the logits. `d` is the cotangent of y."""
    total = (d if log else d * y).sum(axes, keepdims=True)
    return d - np.exp(y) * total if log else y * (d - total)


log_softmax_gradient = functools.partial(softmax_gradient, log=True)


def softmax_gradient_bound(
    y: np.ndarray, d: np.ndarray, axis, y_error: np.ndarray, x_dtype: str, y_dtype: str, u: float
) -> np.ndarray:
    """Return a bound on the error of dx, where d is the cotangent of y.

    It covers y's error to first order, the arithmetic of ``d - sum(d * y)``, and the rounding of
    dx.

    If y has 16 bits, the backward divides each row of y by its sum, so that it sums to 1. Adding a
    constant to a row of d then does not change dx. For such y, the bound therefore multiplies y's
    error by ``d - sum(d * y)`` instead of d. ``sum(d * y)`` is the mean of d with the weights y.
    """
    total = np.sum(np.abs(d) * y, axis=axis, keepdims=True)
    n = y.size / max(1, np.max(y, axis=axis).size)
    centred = np.abs(d - np.sum(d * y, axis=axis, keepdims=True))
    counted = centred if y_dtype in ("bfloat16", "float16") else np.abs(d)
    inner = np.sum(counted * y_error, axis=axis, keepdims=True)
    inner = inner + SAFETY * u * ((math.sqrt(n) + 2) * total + np.abs(d))
    dx = softmax_gradient(y, d, axis)
    return (y + y_error) * inner + y_error * centred + rounding(dx, x_dtype) + 4 * u * np.abs(dx)


def log_softmax_gradient_bound(
    y: np.ndarray, d: np.ndarray, axis, y_error: np.ndarray, x_dtype: str, y_dtype: str, u: float
) -> np.ndarray:
    n = y.size / max(1, np.max(y, axis=axis).size)
    total = np.sum(d, axis=axis, keepdims=True)
    magnitude = np.sum(np.abs(d), axis=axis, keepdims=True)
    p = np.exp(y)
    p_error = p * (np.expm1(y_error) + 4 * u * (1 + np.abs(y)))
    dx = log_softmax_gradient(y, d, axis)
    arithmetic_error = (p + p_error) * SAFETY * u * (math.sqrt(n) + 2) * magnitude
    return p_error * np.abs(total) + arithmetic_error + rounding(dx, x_dtype) + 4 * u * np.abs(d)


ACTIVATIONS = ("silu", "gelu", "relu", "leaky_relu", "sigmoid")


# --- norms ---------------------------------------------------------------------------------------


def activated(
    name: str, g: np.ndarray, u: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the activation of g, its derivative, and bounds on the errors of both.

    `u` is the unit roundoff. The bounds cover these errors:

    - exp(-z) has a relative error of a few u plus ``u * |z|``, because z is a rounded product.
    - The relative error of s = 1 / (1 + exp(-z)) is ``1 - s`` times the relative error of exp(-z).
    - Results below the smallest normal number may be flushed to 0.
    - In gelu, 1 + tanh(...) has an absolute error of u, even where the sum is small.
    """
    few, tiny = 8 * u, 2.0**-126 if u > 2.0**-50 else 2.0**-1022
    if name in ("relu", "leaky_relu"):
        least = 0.01 * (name == "leaky_relu")
        slope = np.where((g > 0) if name == "relu" else (g >= 0), 1.0, least)
        return g * slope, slope, few * np.abs(g * slope), few * slope
    z, dz = g, np.ones_like(g)
    lost = 0.0
    if name == "gelu":
        c = math.sqrt(8 / math.pi)
        z, dz, lost = c * (g + 0.044715 * g**3), c * (1 + 3 * 0.044715 * g**2), few
    with np.errstate(over="ignore"):
        s, other = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
    s_error = s * (other * few * (np.abs(z) + 1) + few) + tiny + lost
    if name == "sigmoid":
        return s, s * other, s_error, s_error * other + s * (s_error + u) + few * s * other
    a, a_error = g * s, np.abs(g) * s_error + few * np.abs(g * s)
    product = np.abs(a) * other * dz
    error = s_error + dz * (a_error * other + np.abs(a) * (s_error + u)) + few * (s + product)
    # 1 - tanh^2 also has an absolute error of u.
    return a, s + a * other * dz, a_error, error + lost * np.abs(g) * dz


def after_norm(
    name: str | None, n: np.ndarray, error: np.ndarray, u: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the activation of n, its derivative, and bounds on the errors of both.

    n is a norm's result with the error `error`. `name` is None without an activation. The error of
    n changes the derivatives of silu and gelu by less than `error`. It changes the derivative of
    relu only if it may change the sign of n.
    """
    if name is None:
        return n, np.ones_like(n), error, np.zeros_like(n)
    y, slope, y_error, slope_error = activated(name, n, u)
    turned = (np.abs(n) <= error) * 1.0 if name == "relu" else error
    return y, slope, y_error + (np.abs(slope) + turned) * error, slope_error + turned


@dataclasses.dataclass
class Norm:
    """A norm of an array (M, N) of rows, and its gradients, with bounds on their errors.

    The inputs are taken as exact.

    Attributes:
      r: the reciprocal of the root mean square or of the standard deviation.
      xh: ``x_hat = (x - mean) * r``.
      c1, c2: the means over a row in ``dx = r * (d * gain - c1 - xh * c2)``.
    """

    x: np.ndarray
    gain: np.ndarray  # scale + scale_offset, (N,)
    bias: np.ndarray  # (N,)
    d: np.ndarray  # cotangent of y, (M, N)
    subtract_mean: bool
    epsilon: float
    saved: str
    x_dtype: str
    y_dtype: str
    #: The name of the activation after the norm, or None. With an activation, the input is saved.
    activation: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.u = arithmetic(self.x_dtype, self.y_dtype)
        self.n = self.x.shape[-1]
        self.mean = self.x.mean(-1, keepdims=True) * self.subtract_mean
        centred = self.x - self.mean
        self.r = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + self.epsilon)
        self.xh = centred * self.r
        self.normal = self.xh * self.gain + self.bias
        exactly = np.zeros_like(self.normal)
        self.y, slope, *_ = after_norm(self.activation, self.normal, exactly, self.u)
        self.dn = self.d * slope  # cotangent of the norm's result
        dg = self.dn * self.gain
        self.c1 = dg.mean(-1, keepdims=True) * self.subtract_mean
        self.c2 = (dg * self.xh).mean(-1, keepdims=True)
        self.dx = self.r * (dg - self.c1 - self.xh * self.c2)
        self.dscale, self.dbias = np.sum(self.dn * self.xh, 0), np.sum(self.dn, 0)

    @property
    def _walk(self) -> float:
        return SAFETY * self.u * (math.sqrt(self.n) + 4)

    def _xh_error(self) -> np.ndarray:
        """Return the error of x_hat in the forward. It comes from errors of the mean and of r."""
        biggest = np.max(np.abs(self.x), -1, keepdims=True) if self.subtract_mean else 0.0
        mean_error = self._walk * biggest
        # If the mean has an error e, the variance has an error of e^2. `variance_error` is
        # relative, so e^2 is divided by the variance.
        variance_error = self._walk + (mean_error * self.r) ** 2
        return mean_error * self.r + np.abs(self.xh) * variance_error

    def _normal_error(self) -> np.ndarray:
        """Return the error of the activation's argument, which is the norm's unrounded result."""
        v = unit_roundoff(self.y_dtype)
        bias_rounding = v * np.abs(self.bias) + tiny(self.y_dtype) * (self.bias != 0)
        floor = 2.0**-60  # A kernel may replace a scale near 0 by a number of at most this size.
        return (
            self._xh_error() * (np.abs(self.gain) + floor)
            + floor * np.abs(self.xh)
            + 4 * self.u * (np.abs(self.normal) + np.abs(self.bias))
            + (bias_rounding if self.saved == "output" else 0)
        )

    def _after_norm(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return after_norm(self.activation, self.normal, self._normal_error(), self.u)

    def y_bound(self) -> np.ndarray:
        _, _, error, _ = self._after_norm()
        return error + rounding(self.y, self.y_dtype)

    def _recovered_error(self) -> np.ndarray:
        """Return the error of the backward's x_hat, recomputed from x or recovered from y."""
        if self.saved == "input":
            return self._xh_error()
        gain = np.maximum(np.abs(self.gain), 2.0**-60)
        stored = np.abs(self.xh) * gain + np.abs(self.bias)
        recovered = (rounding(stored, self.y_dtype) + 4 * self.u * stored) / gain
        # |x_hat| is clipped to sqrt(N), so the error is at most 2 * sqrt(N).
        return self._xh_error() + np.minimum(recovered, 2 * math.sqrt(self.n))

    def _product_error(self) -> np.ndarray:
        """Return the error of x_hat in the sum from which the mean c2 is computed.

        If the output y is saved, the backward uses ``y - bias`` in this sum. This difference equals
        ``x_hat * scale`` up to rounding. It is not clipped, so its error has no upper limit. In all
        other formulas, the backward uses an x_hat that it recovers from y and clips. Clipping
        limits the error there.
        """
        if self.saved == "input":
            return self._recovered_error()
        stored = np.abs(self.xh * self.gain) + np.abs(self.bias)
        gain = np.maximum(np.abs(self.gain), 2.0**-60)
        return self._xh_error() + (rounding(stored, self.y_dtype) / gain)

    def gradient_bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        error = self._recovered_error()
        dg = np.abs(self.dn * self.gain)
        z_error = self._product_error()
        weights = np.abs(self.dn) * np.maximum(np.abs(self.gain), 2.0**-60)
        c2_error = np.mean(weights * z_error, -1, keepdims=True) + self._walk * np.mean(
            dg * np.abs(self.xh), -1, keepdims=True
        )
        c1_error = self._walk * np.mean(dg, -1, keepdims=True)
        inner = dg + np.abs(self.c1) + np.abs(self.xh * self.c2)
        dx = (
            self.r
            * (
                error * np.abs(self.c2)
                + (np.abs(self.xh) + error) * c2_error
                + c1_error
                + 6 * self.u * inner
            )
            + np.abs(self.dx) * self._walk
            + rounding(self.dx, self.x_dtype)
            + 2.0**-60 * self.r * np.abs(self.dn)
        )
        # The cotangent of the norm is the cotangent of y, multiplied by the activation's
        # derivative. So an error of this derivative causes an error of the norm's cotangent. The
        # gradients are linear in the norm's cotangent. So the formulas of the gradients, with the
        # cotangent's error in place of the cotangent, give the errors of the gradients.
        _, _, _, slope_error = self._after_norm()
        d_error = np.abs(self.d) * slope_error + self.u * np.abs(self.dn)
        d_error = d_error * (self.activation is not None)
        of_g = np.abs(self.gain) * d_error
        c2_error = np.mean(of_g * (np.abs(self.xh) + error), -1, keepdims=True)
        c1_error = np.mean(of_g, -1, keepdims=True) * self.subtract_mean
        dx = dx + self.r * (of_g + c1_error + (np.abs(self.xh) + error) * c2_error)
        m = self.x.shape[0]
        walk = SAFETY * self.u * (math.sqrt(m) + 2)
        dscale = np.sum(np.abs(self.dn) * error, 0) + walk * np.sum(np.abs(self.dn * self.xh), 0)
        dscale = dscale + np.sum(d_error * (np.abs(self.xh) + error), 0)
        dbias = walk * np.sum(np.abs(self.dn), 0) + np.sum(d_error, 0)
        return dx, dscale, dbias


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
