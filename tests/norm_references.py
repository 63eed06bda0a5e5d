"""Norms, and operations fused with them, in float64: results, gradients and error bounds.

Each class takes arrays of rows (..., N) and parameters that broadcast to them. These inputs are
taken as exact. `expected` covers every operation with a norm. Three names have the same meaning
everywhere:

- r is the reciprocal of the root mean square or of the standard deviation;
- xh = (x - mean) * r is the normalised row;
- gain is scale + scale_offset.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np
from reference import SAFETY, Norm, TwoNorms, activated, arithmetic, rounding


class _Arithmetic:
    """The dtype of a call's arithmetic, for a class that has the dtypes of the call's arrays."""

    dtypes: tuple[str, str, str]

    @functools.cached_property
    def u(self) -> float:
        """The unit roundoff of the arithmetic."""
        return arithmetic(*self.dtypes)

    @property
    def wide(self) -> str:
        return "float64" if "float64" in self.dtypes else "float32"


@dataclasses.dataclass
class GatedNorm(_Arithmetic):
    """A norm whose input or result is multiplied by a = activation(gate).

    Arrays of rows have the shape (..., N), and parameters broadcast to it.
    """

    x: np.ndarray
    gate: np.ndarray
    gain: np.ndarray  # scale + scale_offset
    d: np.ndarray  # cotangent of y
    norm_before_gate: bool
    activation: str
    dtypes: tuple[str, str, str]  # of x, gate and y
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        self.a, self.slope, self.a_error, self.slope_error = activated(
            self.activation, self.gate, self.u
        )
        before = self.norm_before_gate
        self.norm = Norm(
            self.x if before else self.x * self.a,
            self.gain,
            np.zeros(self.x.shape[-1]),
            self.d * self.a if before else self.d,
            False,
            self.epsilon,
            "input",
            self.wide,  # the norm is not rounded before it is multiplied
            self.wide,
        )
        if before:
            self.y, self.dx = self.norm.y * self.a, self.norm.dx
            self.dgate = self.d * self.norm.y * self.slope
        else:
            self.y, self.dx = self.norm.y, self.norm.dx * self.a
            self.dgate = self.norm.dx * self.x * self.slope
        self.dscale = self.norm.dscale

    def bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return bounds on the errors of y, dx, dgate and dscale.

        The bound of dscale does not include the rounding to the scale's dtype.
        """
        norm, u, few = self.norm, self.u, 8 * self.u
        n, dt, dscale = norm.y_bound(), *norm.gradient_bounds()[:2]
        if self.norm_before_gate:
            y = np.abs(self.a) * n + (np.abs(norm.y) + n) * self.a_error
            # The cotangent of the norm's result is dy * a. The gradients are linear in this
            # cotangent.
            error = np.abs(self.d) * self.a_error + u * np.abs(norm.d)
            dx = dt + self._of_cotangent(error)
            dscale = dscale + np.sum(error * np.abs(norm.xh), 0)
            dgate = n * np.abs(self.slope) + (np.abs(norm.y) + n) * self.slope_error
            dgate = np.abs(self.d) * dgate
        else:
            t = np.abs(self.x) * self.a_error + u * np.abs(norm.x)
            # The norm's input is x * a, and the error of this input is `t`. This error changes r
            # (the row's rstd) by a factor of at most 1 + mean(|x_hat| * r * t). The mean is taken
            # over the row.
            of_r = np.mean(np.abs(norm.xh) * norm.r * t, -1, keepdims=True)
            xh = norm.r * t + np.abs(norm.xh) * of_r
            y = n + np.abs(norm.gain) * xh
            c2 = np.mean(np.abs(self.d * norm.gain) * xh, -1, keepdims=True)
            dt = dt + np.abs(norm.dx) * of_r
            dt = dt + norm.r * (xh * np.abs(norm.c2) + (np.abs(norm.xh) + xh) * c2)
            dscale = dscale + np.sum(np.abs(self.d) * xh, 0)
            dx = np.abs(self.a) * dt + (np.abs(norm.dx) + dt) * self.a_error
            dgate = dt * np.abs(self.slope) + (np.abs(norm.dx) + dt) * self.slope_error
            dgate = np.abs(self.x) * dgate
        exact_of = (self.y, self.dx, self.dgate)
        of_x, of_gate, of_y = self.dtypes
        rows = [
            bound + few * np.abs(value) + rounding(np.abs(value) + bound, dtype)
            for bound, value, dtype in zip((y, dx, dgate), exact_of, (of_y, of_x, of_gate))
        ]
        return *rows, dscale

    def _of_cotangent(self, error: np.ndarray) -> np.ndarray:
        """Return a bound on the error of dx that `error` causes.

        `error` is the error of the cotangent of the norm's result.
        """
        norm, error = self.norm, error * np.abs(self.gain)
        c2 = np.mean(error * np.abs(norm.xh), -1, keepdims=True)
        return norm.r * (error + np.abs(norm.xh) * c2) * (1 + SAFETY * self.u)


@dataclasses.dataclass
class ScaledSum(_Arithmetic):
    """``h = residual + branch_scale * x`` and ``y = norm(h)``.

    y and the gradients are computed from `h`, the sum that the tested call has stored and rounded.
    `sum_and_bound` computes the exact sum, with which the stored one is compared.
    """

    x: np.ndarray
    residual: np.ndarray
    h: np.ndarray
    gain: np.ndarray  # scale + scale_offset
    bias: np.ndarray
    branch_scale: np.ndarray
    dy: np.ndarray
    dh: np.ndarray
    subtract_mean: bool
    saved: str
    dtypes: tuple[str, str, str]  # of x, residual and y
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        # The norm's gradient is rounded only to the dtype of the arithmetic. dx and dresidual are
        # computed from it, and then rounded to their own dtypes.
        options = self.subtract_mean, self.epsilon, self.saved, self.wide, self.dtypes[2]
        self.norm = Norm(self.h, self.gain, self.bias, self.dy, *options)
        self.norm.u = self.u
        self.dresidual = self.norm.dx + self.dh
        self.dx = self.branch_scale * self.dresidual
        self.dbranch_scale = np.sum(self.dresidual * self.x, 0)

    def sum_and_bound(self) -> tuple[np.ndarray, np.ndarray]:
        """Return h and a bound on its error.

        The bound covers three roundings. The product ``branch_scale * x`` and the sum are rounded
        to the dtype of the arithmetic, and h is rounded to its own dtype.
        """
        product = self.branch_scale * self.x
        total = self.residual + product
        error = 2 * self.u * (np.abs(product) * (self.branch_scale != 1) + np.abs(total))
        return total, error + rounding(np.abs(total) + error, self.dtypes[1])

    def bound(self) -> np.ndarray:
        """Return a bound on the error of dresidual before it is rounded to its dtype."""
        few = 8 * self.u * (np.abs(self.dresidual) + np.abs(self.dh))
        return self.norm.gradient_bounds()[0] + few

    def gradients(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return a dict from each operand's name to its gradient and the bound of its error.

        The bounds of parameters' gradients exclude the final rounding.
        """
        bound, (_, dscale, dbias) = self.bound(), self.norm.gradient_bounds()
        of_x = np.abs(self.branch_scale) * bound + 2 * self.u * np.abs(self.dx)
        rows = {"x": (self.dx, of_x), "residual": (self.dresidual, bound)}
        walk = SAFETY * self.u * (math.sqrt(len(self.x)) + 2)
        of_branch = np.sum(bound * np.abs(self.x), 0)
        of_branch = of_branch + walk * np.sum(np.abs(self.dresidual * self.x), 0)
        return {
            name: (value, error + rounding(np.abs(value) + error, dtype))
            for (name, (value, error)), dtype in zip(rows.items(), self.dtypes)
        } | {
            "scale": (self.norm.dscale, dscale),
            "bias": (self.norm.dbias, dbias),
            "branch_scale": (self.dbranch_scale, of_branch),
        }


@dataclasses.dataclass
class RotatedNorm(Norm):
    """``y = R @ n``, where n is the RMSNorm of a row, and the matrix R rotates pairs of columns.

    Attributes:
      cos, sin: the rotary tables, with one row for each row of x and one column for each pair.
      dcos, dsin: the contribution of each row of x to the gradients of the tables.
    """

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool

    def __post_init__(self):
        cols, pairs = self.x.shape[-1], self.cos.shape[-1]
        columns = np.arange(2 * pairs).reshape((pairs, 2) if self.interleaved else (2, pairs))
        self.first, self.second = columns.T if self.interleaved else columns
        self.partner = np.arange(cols)
        self.partner[self.first], self.partner[self.second] = self.second, self.first
        # In each column, y = c * n + s * n', where n' is n in the other column of the pair.
        self.c, self.s = (
            np.ones((*self.cos.shape[:-1], cols)),
            np.zeros((*self.sin.shape[:-1], cols)),
        )
        self.c[..., self.first] = self.c[..., self.second] = self.cos
        self.s[..., self.first], self.s[..., self.second] = -self.sin, self.sin
        self.dy = self.d
        self.d = self.dy * self.c - self.dy[..., self.partner] * self.s
        super().__post_init__()
        self.normalised = self.y
        self.y = self.normalised * self.c + self.normalised[..., self.partner] * self.s
        (na, nb), (da, db) = map(self._pairs, (self.normalised, self.dy))
        self.dcos, self.dsin = da * na + db * nb, db * na - da * nb

    def _pairs(self, v):
        return v[..., self.first], v[..., self.second]

    def _of_pairs(self, v):
        """Return |cos * v| + |sin * v'|, where v' has the columns of each pair exchanged.

        This is the sum of the terms' magnitudes in ``R @ v``, and also in ``R.T @ v``.
        """
        return np.abs(self.c * v) + np.abs(self.s * v[..., self.partner])

    def _normalised_error(self):
        """Return a bound on the error of the norm n in the forward."""
        floor = 2.0**-60
        error = self._xh_error() * (np.abs(self.gain) + floor) + floor * np.abs(self.xh)
        return error + 4 * self.u * np.abs(self.normalised)

    def _stored_error(self):
        """Return a bound on a part of y's error.

        This part comes from the arithmetic of the rotation and from the rounding of y.
        """
        # This includes the rounding of the tables to the dtype of the arithmetic.
        error = 6 * self.u * self._of_pairs(self.normalised)
        return error + rounding(np.abs(self.y) + error, self.y_dtype)

    def y_bound(self):
        return 1.01 * self._of_pairs(self._normalised_error()) + self._stored_error()

    def _undone_error(self):
        """Return the error of the norm n if the backward recovers it from y.

        The backward computes ``R.T @ y / (cos^2 + sin^2)``. The error that n already had in the
        forward is not included.
        """
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
        """Return bounds on the errors of dx and dscale.

        Let n be the norm's result and R the matrix of the rotation, so y = R @ n. The cotangent of
        n, ``R.T @ dy``, is rounded to float32 before the norm's backward pass uses it.
        """
        dx, dscale, _ = super().gradient_bounds()
        error = 4 * self.u * self._of_pairs(self.dy)
        c2_error = np.mean(error * np.abs(self.normalised), -1, keepdims=True)
        dx = dx + 1.01 * self.r * (error * np.abs(self.gain) + np.abs(self.xh) * c2_error)
        return dx, dscale + 1.01 * np.sum(error * np.abs(self.xh), 0)

    def table_terms(self):
        """Yield dcos and then dsin, each as three arrays.

        The arrays are the values, their error bounds, and the sums of their terms' magnitudes.
        """
        error = self._normalised_error()
        error = error + (self._undone_error() if self.saved == "output" else 0)
        (da, db), (na, nb), (ea, eb) = (
            self._pairs(np.abs(a)) for a in (self.dy, self.normalised, error)
        )
        for value, of_a, of_b in ((self.dcos, da, db), (self.dsin, db, da)):
            magnitude = of_a * na + of_b * nb
            walk = 5 * SAFETY * self.u * magnitude
            yield value, of_a * ea + of_b * eb + walk, magnitude


class Expected(NamedTuple):
    """Expected values of a call, each with a bound on its error.

    Attributes:
      rows: a dict of the arrays with rows: results, and gradients of operands. The bounds include
        the rounding to the array's dtype.
      stats: a list of the statistics of rows.
      terms: a dict from the name of each parameter or table to three arrays. The gradient of a
        parameter or table is a sum of terms, one for each element of x. The three arrays are the
        terms, the bounds on their errors, and their magnitudes.
    """

    rows: dict[str, tuple[Any, Any]]
    stats: list[tuple[Any, Any]]
    terms: dict[str, tuple[Any, Any, Any]]


def expected(
    op, given, h, dtypes, *, saved, subtract_mean=False, epsilon=1e-6, activation=None,
    norm_before_gate=True, interleaved=False,
):  # fmt: skip
    """Return the expected values of a call, whose x has the shape (M, N).

    Args:
      given: the operands and the cotangents dy and dh in float64, broadcast to the shape of x.
      h: the sum that the call stored.
      dtypes: the dtypes of x, of the residual or the gate, and of y.
    """
    # The classes above return gradients of parameters as sums over the first axis. This function
    # needs the terms of these sums, not the sums. So all arrays get a new first axis of size 1: the
    # sum over this axis has a single term.
    a = {name: array[None] for name, array in given.items()}
    x, scale, bias, dy, dh = (a[name] for name in ("x", "scale", "bias", "dy", "dh"))
    of_x, of_second, of_y = dtypes
    wide = "float64" if "float64" in dtypes else "float32"
    terms: dict[str, Any] = {}
    if op in ("add_norm", "scaled_add_norm"):
        ref = ScaledSum(
            x, a["residual"], h[None], scale, bias, a["branch_scale"], dy, dh,
            subtract_mean, saved, dtypes, epsilon,
        )  # fmt: skip
        rows = {"y": (ref.norm.y, ref.norm.y_bound()), "h": ref.sum_and_bound()}
        gradients = ref.gradients()
        rows |= {name: gradients.pop(name) for name in ("x", "residual")}
        if op == "add_norm":  # x and the residual have the same gradient, apart from rounding.
            value, error = rows["residual"]
            rows["x"] = value, error + rounding(np.abs(value) + error, of_x)
        terms, norms = gradients, [ref.norm]
    elif op == "norm_gated":
        gated = GatedNorm(x, a["gate"], scale, dy, norm_before_gate, activation, dtypes, epsilon)
        *bounds, of_scale = gated.bounds()
        rows = dict(zip(("y", "x", "gate"), zip((gated.y, gated.dx, gated.dgate), bounds)))
        terms, norms = {"scale": (gated.dscale, of_scale)}, [gated.norm]
    elif op == "norm_rope":
        rope = RotatedNorm(
            x, scale, np.zeros(x.shape[-1]), dy, False, epsilon, saved, of_x, of_y,
            a["cos"], a["sin"], interleaved,
        )  # fmt: skip
        of_dx, of_scale = rope.gradient_bounds()
        rows = {"y": (rope.y, rope.y_bound()), "x": (rope.dx, of_dx)}
        of_tables = ([part[0] for part in term] for term in rope.table_terms())
        terms = {"scale": (rope.dscale, of_scale), **dict(zip(("cos", "sin"), of_tables))}
        norms = [rope]
    elif op in ("norm_add", "norm_add_norm"):
        if op == "norm_add":
            first = Norm(x, scale, np.zeros(1), dy, False, epsilon, "input", of_x, wide)
            of_dx, of_scale, _ = first.gradient_bounds()
            rows, norms = {"residual": (dy, 0.0)}, [first]
        else:
            both = TwoNorms(
                x,
                h[None],
                scale,
                a["next_scale"],
                dy,
                dh,
                saved,
                of_x,
                of_second,
                of_y,
                wide,
                epsilon,
            )
            first, last = norms = both.first, both.last
            of_dx, of_residual, of_scale, of_next = both.gradient_bounds()
            rows = {"y": (last.y, last.y_bound()), "residual": (both.dresidual, of_residual)}
            terms = {"next_scale": (last.dscale, of_next)}
        total, error = a["residual"] + first.y, first.y_bound()
        error = error + 8 * first.u * (np.abs(total) + np.abs(first.y))
        rows["y" if op == "norm_add" else "h"] = (
            total,
            error + rounding(np.abs(total) + error, of_second),
        )
        rows["x"], terms["scale"] = (first.dx, of_dx), (first.dscale, of_scale)
    else:
        plain = Norm(
            x, scale, bias, dy, subtract_mean, epsilon, saved, of_x, of_y, activation=activation
        )
        of_dx, of_scale, of_bias = plain.gradient_bounds()
        rows = {"y": (plain.y, plain.y_bound()), "x": (plain.dx, of_dx)}
        if np.any(dh):
            total = plain.dx + dh
            of_dx = of_dx + rounding(np.abs(total) + of_dx, of_x)
            rows["x"] = total, of_dx + 2 * plain.u * (np.abs(plain.dx) + np.abs(dh))
        terms = {"scale": (plain.dscale, of_scale), "bias": (plain.dbias, of_bias)}
        norms = [plain]
    stats = []
    for i, norm in enumerate(norms):
        walk = SAFETY * norm.u * (math.sqrt(x.shape[-1]) + 4)
        # An error of the mean adds its square to the variance.
        mean = np.max(np.abs(norm.x), -1, keepdims=True) * walk * norm.subtract_mean
        stats.append((norm.r, norm.r * (walk + (mean * norm.r) ** 2)))
        if i == len(norms) - 1 and subtract_mean and saved == "input":
            stats.append((norm.mean, mean))
    flat = [tuple(np.reshape(part, -1) for part in pair) for pair in stats]
    rows = {n: (v[0], np.broadcast_to(b, v.shape)[0]) for n, (v, b) in rows.items()}
    each = {n: (*t, np.abs(t[0])) if len(t) == 2 else tuple(t) for n, t in terms.items()}
    return Expected(rows, flat, each)
