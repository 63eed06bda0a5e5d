"""rms_norm_rope in float64 numpy, with derived bounds, and in plain jnp; what its tests share."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from reference import SAFETY, Norm, exact, rounding
from test_norm import normal

from jaxnorm.tools import references


def tables(shape, dtype="float32", *, factor=1.0, seed=0):
    """cos and sin of any angles, times a factor, as YaRN's are."""
    angle = np.random.default_rng(seed).uniform(-np.pi, np.pi, size=shape)
    return jnp.asarray(factor * np.cos(angle), dtype), jnp.asarray(factor * np.sin(angle), dtype)


def pairs_of(cols, *, interleaved):
    """Columns of the first and of the second of each pair, of `cols` columns that are rotated."""
    columns = np.arange(cols)
    if interleaved:
        return columns[::2], columns[1::2]
    return columns[: cols // 2], columns[cols // 2 :]


def plain(x, scale, cos, sin, *, interleaved=False, epsilon=1e-6):
    """In jnp, in x's dtype."""
    n = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    n = n if scale is None else n * scale
    first, second = pairs_of(2 * cos.shape[-1], interleaved=interleaved)
    a, b = n[..., first], n[..., second]
    n = n.at[..., first].set(a * cos - b * sin)
    return n.at[..., second].set(b * cos + a * sin)


SHAPE = BATCH, LENGTH, HEADS, COLS = 4, 8, 2, 16
X, SCALE = normal(SHAPE, "float32", 0), normal((COLS,), "float32", 1, scale=0.3, shift=1.0)
COS, SIN = tables((LENGTH, 1, COLS // 2))
ALL = X, SCALE, COS, SIN


@dataclasses.dataclass
class RotatedNorm(Norm):
    """y = R n with n the RMSNorm of rows, and R the rotation of pairs of its columns.

    Attributes:
      cos, sin: (M, r / 2), of each row.
      dcos, dsin: what each row adds to their gradients.
    """

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool

    def __post_init__(self):
        rotation = references.Rotation(
            self.cos, self.sin, self.x.shape[-1], interleaved=self.interleaved
        )
        self.first, self.second, self.partner = rotation.first, rotation.second, rotation.partner
        # Of each column: y = c n + s (n of its partner).
        self.c, self.s = rotation.cos, rotation.sin
        self.dy = self.d
        self.d = rotation.transposed(self.dy)
        super().__post_init__()
        self.normalised = self.y
        self.y = rotation(self.normalised)
        na, nb = self.normalised[:, self.first], self.normalised[:, self.second]
        da, db = self.dy[:, self.first], self.dy[:, self.second]
        self.dcos, self.dsin = da * na + db * nb, db * na - da * nb

    def _of_pairs(self, v):
        """The sum of magnitudes in what a rotation, or its transpose, makes of v."""
        return np.abs(self.c * v) + np.abs(self.s * v[:, self.partner])

    def _normalised_error(self):
        """Of n as the forward computes it."""
        floor = 2.0**-60
        error = self._xh_error() * (np.abs(self.gain) + floor) + floor * np.abs(self.xh)
        return error + 4 * self.u * np.abs(self.normalised)

    def _stored_error(self):
        """Of y, beside what n's error makes of it: the rotation's roundings, and that of y."""
        # A table of another dtype than the arithmetic's is rounded, too.
        error = 6 * self.u * self._of_pairs(self.normalised)
        return error + rounding(np.abs(self.y) + error, self.y_dtype)

    def y_bound(self):
        return 1.01 * self._of_pairs(self._normalised_error()) + self._stored_error()

    def _undone_error(self):
        """Of R' y / (cos^2 + sin^2), beside n's."""
        error = self._of_pairs(self._stored_error()) + 8 * self.u * self._of_pairs(np.abs(self.y))
        square = self.c**2 + self.s**2
        return error / square + 8 * self.u * np.abs(self.normalised)

    def _recovered_error(self):
        if self.saved == "input":
            return self._xh_error()
        recovered = self._undone_error() / np.maximum(np.abs(self.gain), 2.0**-60)
        recovered = recovered + 4 * self.u * np.abs(self.xh)
        return self._xh_error() + np.minimum(recovered, 2 * math.sqrt(self.n))

    def _product_error(self):
        if self.saved == "input":
            return self._xh_error()
        return self._xh_error() + self._undone_error() / np.maximum(np.abs(self.gain), 2.0**-60)

    def gradient_bounds(self):
        """Of dx and dscale; the cotangent of n is rounded in float32 before it is the norm's."""
        dx, dscale, _ = super().gradient_bounds()
        error = 4 * self.u * self._of_pairs(self.dy)
        c2_error = np.mean(error * np.abs(self.normalised), -1, keepdims=True)
        dx = dx + 1.01 * self.r * (error * np.abs(self.gain) + np.abs(self.xh) * c2_error)
        return dx, dscale + 1.01 * np.sum(error * np.abs(self.xh), 0)

    def table_bounds(self, shape, shared):
        """Of the sums of dcos and dsin over the rows that share a table, as `summed` makes them."""
        error = self._normalised_error()
        error = error + (self._undone_error() if self.saved == "output" else 0)
        da, db = np.abs(self.dy[:, self.first]), np.abs(self.dy[:, self.second])
        bounds = []
        for of_a, of_b in ((da, db), (db, da)):
            na, nb = (np.abs(self.normalised[:, at]) for at in (self.first, self.second))
            ea, eb = (error[:, at] for at in (self.first, self.second))
            walk = SAFETY * self.u * (math.sqrt(self.dcos.size / max(1, math.prod(shared))) + 4)
            each = of_a * ea + of_b * eb + walk * (of_a * na + of_b * nb)
            bounds.append(summed(each, shape, shared))
        return bounds


def summed(of_rows, rows, shape):
    """(M, r / 2) of rows of this shape, over those that share an element of a table of `shape`."""
    array = of_rows.reshape(*rows, of_rows.shape[-1])
    shape = (1,) * (array.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(shape[:-1]) if size == 1)
    return array.sum(axes, keepdims=True).reshape(shape)


def reference_of(x, scale, cos, sin, d, *, save, y_dtype, interleaved=False, scale_offset=0.0):
    """Of arrays as `jaxnorm.rms_norm_rope` takes them."""
    cols = x.shape[-1]
    gain = np.ones(cols) if scale is None else exact(scale) + scale_offset

    def of_rows(table):
        return np.broadcast_to(exact(table), (*x.shape[:-1], table.shape[-1])).reshape(
            -1, table.shape[-1]
        )

    return RotatedNorm(
        x=exact(x).reshape(-1, cols),
        gain=gain,
        bias=np.zeros(cols),
        d=exact(d).reshape(-1, cols),
        subtract_mean=False,
        epsilon=1e-6,
        saved=save,
        x_dtype=x.dtype.name,
        y_dtype=y_dtype,
        cos=of_rows(cos),
        sin=of_rows(sin),
        interleaved=interleaved,
    )
