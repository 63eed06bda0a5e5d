"""Reference of rms_norm_linear in float64 NumPy, with bounds on a call's rounding errors.

The module also defines the combinations of dtypes that are tested.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from reference import SAFETY, Norm, arithmetic, exact, rounding, unit_roundoff

from jaxnorm import rms_norm_linear

# For each activation: its largest slope, its largest second derivative, and the jump of its slope
# at z = 0. gelu' is at most 1.13, gelu'' at most 0.8 (at 0); silu' is at most 1.1, silu'' at most
# 0.5 (at 0); sigmoid' is at most 0.25 (at 0), sigmoid'' at most 0.0963.
SLOPES = {
    None: (1.0, 0.0, 0.0),
    "relu": (1.0, 0.0, 1.0),
    "leaky_relu": (1.0, 0.0, 0.99),
    "gelu": (1.13, 0.85, 0.0),
    "silu": (1.1, 0.5, 0.0),
    "sigmoid": (0.25, 0.1, 0.0),
}


def operands(rows, cols, features, dtypes="float32", seed=0, lead=()):
    """Return a dict of x, residual, weight, scale and bias.

    `dtypes` is the dtype of all arrays, or a dtype for each. The matmul's result has magnitudes
    around 1.
    """
    rng = np.random.default_rng(seed)
    x, residual, weight, scale, bias = (dtypes,) * 5 if isinstance(dtypes, str) else dtypes
    return {
        "x": jnp.asarray(rng.normal(size=(*lead, rows, cols)), x),
        "residual": jnp.asarray(rng.normal(size=(*lead, rows, cols)), residual),
        "weight": jnp.asarray(rng.normal(size=(cols, features)) / math.sqrt(cols), weight),
        "scale": jnp.asarray(1 + 0.3 * rng.normal(size=cols), scale),
        "bias": jnp.asarray(rng.normal(size=features), bias),
    }


class _Norm(Norm):
    """A norm whose input may differ from x by up to `excess`. The bounds cover this difference."""

    @property
    def r_error(self):
        """The relative error of r, the reciprocal of the root mean square."""
        return self.r * np.mean(np.abs(self.xh) * self.excess, -1, keepdims=True) * (1 + 2**-6)

    def _xh_error(self):
        moved = self.r * self.excess * (1 + 2**-6) + np.abs(self.xh) * self.r_error
        return super()._xh_error() + moved

    def gradient_bounds(self):
        dx, dscale, dbias = super().gradient_bounds()
        return dx + np.abs(self.dx) * self.r_error, dscale, dbias


@dataclasses.dataclass
class NormLinear:
    """``y = activation(rms_norm(x) @ weight + bias)`` and its gradients, with error bounds.

    All inputs are exact. With a residual, x is the stored sum h. The bounds also cover kernels that
    round the normalised x, or ``scale * weight``, to the matmul's dtype.
    """

    x: np.ndarray
    weight: np.ndarray
    gain: np.ndarray
    bias: np.ndarray
    d: np.ndarray
    # A bound for each element of x. With a residual, x is the rounded sum h, but XLA may normalise
    # the sum before it is rounded. The bound is on the difference between these two arrays. Without
    # a residual, it is 0.
    excess: np.ndarray
    x_dtype: str
    weight_dtype: str
    product_dtype: str
    y_dtype: str
    activation: str | None = None
    epsilon: float = 1e-6

    def __post_init__(self):
        self.u = arithmetic(self.x_dtype, self.product_dtype, self.y_dtype)
        self.v = unit_roundoff(self.product_dtype)
        self.norm = self._norm(np.zeros_like(self.x))
        n = self.norm.y
        self.n_error = 2 * self.norm.y_bound()
        is_cast = self.weight_dtype != self.product_dtype
        self.weight_error = is_cast * rounding(self.weight, self.product_dtype)
        size = np.abs(n) @ np.abs(self.weight)
        self.z = n @ self.weight + self.bias
        self.z_error = (
            self.n_error @ (np.abs(self.weight) + self.weight_error)
            + np.abs(n) @ self.weight_error
            + SAFETY * self.u * (math.sqrt(self.x.shape[-1]) + 2) * size
            + 4 * self.u * (np.abs(self.z) + np.abs(self.bias))
        )
        with jax.enable_x64(True):
            z = jnp.asarray(self.z, jnp.float64)
            self.y, self.slope = z, jnp.ones_like(z)
            if self.activation is not None:
                function = getattr(jax.nn, self.activation)
                self.y, self.slope = jax.jvp(function, (z,), (self.slope,))
            self.y, self.slope = exact(self.y), exact(self.slope)

    def _norm(self, d):
        """Return the reference of the norm. `d` is the cotangent of the norm's result."""
        zero = np.zeros(self.x.shape[-1])
        dtypes = self.x_dtype, self.product_dtype
        norm = _Norm(self.x, self.gain, zero, d, False, self.epsilon, "input", *dtypes)
        norm.excess = self.excess
        return norm

    def y_bound(self):
        steepest, *_ = SLOPES[self.activation]
        few = 8 * self.u * (np.abs(self.z) + np.abs(self.y))
        return steepest * self.z_error + few + rounding(self.y, self.y_dtype)

    def gradients(self):
        """Return a dict from each operand's name to its gradient and bound.

        The bound of dx includes the rounding to its dtype. The other bounds do not.
        """
        _, curvature, jump = SLOPES[self.activation]
        saved = self.z_error + rounding(self.z, self.y_dtype)
        slope_error = curvature * saved + jump * (np.abs(self.z) <= saved) + 16 * self.u
        dz = self.d * self.slope
        unrounded = np.abs(self.d) * (slope_error if self.activation else 0) + 4 * self.u * abs(dz)
        error = unrounded + rounding(np.abs(dz) + unrounded, self.product_dtype)
        weight, n, size = np.abs(self.weight), np.abs(self.norm.y), np.abs(dz)
        dn = dz @ self.weight.T
        dn_error = (
            error @ (weight + self.weight_error).T
            + size @ self.weight_error.T
            + self.walk(dz.shape[1]) * (size @ weight.T)
        )
        dn_error = dn_error + rounding(np.abs(dn) + dn_error, self.product_dtype)
        dweight_error = (
            self.n_error.T @ (size + error) + n.T @ error + self.walk(len(dz)) * (n.T @ size)
        )
        dweight = self.norm.y.T @ dz
        dweight_error = dweight_error + rounding(
            np.abs(dweight) + dweight_error, self.product_dtype
        )
        norm = self._norm(dn)
        dx_error, dscale_error, _ = norm.gradient_bounds()
        through = dn_error * np.abs(self.gain)
        mean = np.mean(through * np.abs(norm.xh), -1, keepdims=True)
        dx_error = dx_error + norm.r * (through + np.abs(norm.xh) * mean) * (1 + 2**-6)
        return {
            "x": (norm.dx, dx_error),
            "weight": (dweight, dweight_error),
            "scale": (norm.dscale, dscale_error + np.sum(dn_error * np.abs(norm.xh), 0)),
            "bias": (dz.sum(0), unrounded.sum(0) + self.walk(len(dz)) * size.sum(0)),
        }

    def walk(self, terms):
        """Return a bound on the error of a sum, divided by the sum of its terms' magnitudes."""
        return SAFETY * self.u * (math.sqrt(terms) + 2)


# Each entry has four items: the dtypes of x, residual, weight, scale and bias; the dtype of the
# matmul; the dtype of y; and a boolean. If it is True, the call passes the dtype of y as `dtype`.
MIXES = [
    *(((dtype,) * 5, dtype, dtype, False) for dtype in ("bfloat16", "float32")),
    (("bfloat16", "float32", "bfloat16", "float32", "float32"), "bfloat16", "bfloat16", False),
    (("float16", "float16", "float16", "float32", "float16"), "float16", "float32", True),
    (("float32", "float32", "float32", "float32", "float32"), "bfloat16", "bfloat16", True),
    (("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16"), "float32", "float32", False),
]
WIDE = (("float32", "float64", "float64", "float32", "float32"), "float64", "float64", False)


@functools.partial(jax.jit, static_argnames=("options",))
def value_and_gradients(arrays, d, options=()):
    """Return the results and the gradients. The cotangents are d for y and cos(residual) for h."""

    def function(arrays):
        arrays = dict(arrays)
        return rms_norm_linear(arrays.pop("x"), arrays.pop("weight"), **arrays, **dict(options))

    results, vjp = jax.vjp(function, arrays)
    if "residual" not in arrays:
        return (results,), vjp(d)[0]
    return results, vjp((d, jnp.cos(arrays["residual"])))[0]
