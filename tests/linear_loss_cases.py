"""Losses of logits x @ weight + bias in float64 NumPy, with bounds on the rounding error."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from loss_cases import CrossEntropy
from reference import SAFETY, arithmetic, exact, rounding, unit_roundoff


def operands(rows, d, classes, dtypes="float32", seed=0, lead=()):
    """Return x, weight, bias and labels. The logits have magnitudes around 1.

    `dtypes` is one dtype for x, weight and bias, or a tuple of their three dtypes.
    """
    rng = np.random.default_rng(seed)
    x_dtype, w_dtype, b_dtype = (dtypes,) * 3 if isinstance(dtypes, str) else dtypes
    return (
        jnp.asarray(rng.normal(size=(*lead, rows, d)), x_dtype),
        jnp.asarray(rng.normal(size=(d, classes)) / math.sqrt(d), w_dtype),
        jnp.asarray(rng.normal(size=classes), b_dtype),
        jnp.asarray(rng.integers(0, classes, (*lead, rows)), jnp.int32),
    )


@dataclasses.dataclass
class Linear:
    """The losses of rows of logits ``x @ weight + bias``, and the gradients of sum(d * losses).

    The logits have two errors: the error of the matmul's sums, and the rounding to the matmul's
    dtype. The bounds rely on this fact: the sum of |d loss / d logit| over a row is at most 2.
    """

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logits_scale: float = 1.0
    logit_softcap: float | None = None
    dtype: str | None = None

    of_rows: ClassVar = CrossEntropy
    logits_roundoff: ClassVar = staticmethod(unit_roundoff)
    # The number of roundings of a gradient: one when it is saved, and one when it is multiplied by
    # the loss's cotangent.
    roundings: ClassVar = 2

    def __post_init__(self):
        self.dtypes = [a.dtype.name for a in (self.x, self.weight, self.bias)]
        promoted = jnp.promote_types(self.x.dtype, self.weight.dtype)
        dtype = jnp.dtype(self.dtype or promoted)
        factors = min(promoted, dtype, key=lambda dtype: dtype.itemsize)
        self.u, self.v = arithmetic(dtype.name), self.logits_roundoff(dtype.name)
        # The logits' gradient becomes an operand of a matmul, so it is rounded to the dtype of the
        # matmul's operands.
        self.factor_v = max(self.v, unit_roundoff(factors.name))
        self.x, self.weight = (exact(a.astype(factors)) for a in (self.x, self.weight))
        self.bias = exact(self.bias)
        self.labels = np.asarray(self.labels)
        if self.positions is not None:
            self.x = np.where(self.positions[..., None], self.x, 0)
        product = self.x @ self.weight
        logits = product + self.bias
        self.rows = self.of_rows(
            logits,
            self.labels,
            positions=self.positions,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logits_scale=self.logits_scale,
            logit_softcap=self.logit_softcap,
            dtype="float64" if dtype == "float64" else "float32",
        )
        sums = SAFETY * self.u * math.sqrt(self.x.shape[-1] + 1)
        error = sums * (np.abs(self.x) @ np.abs(self.weight))
        error = error + self.v * (np.abs(product) + np.abs(logits) + np.abs(self.bias))
        # This bound counts rounding errors only to first order; the factor 1.1 covers the rest.
        self.error = 1.1 * error.max(-1)

    @property
    def losses(self):
        return self.rows.loss

    def losses_bound(self):
        slope = 2 * self.logits_scale * (1 + 2 * self.z_loss * (np.abs(self.rows.lse) + self.error))
        return self.rows.loss_bound() + slope * self.error

    def gradients(self, *d):
        """Yield the gradients of x, weight and bias, each with its bound.

        `d` has one cotangent per row for each result.
        """
        dlogits = self.rows.gradient(*d)
        error = self.rows.gradient_bound(*d) + self.factor_v * np.abs(dlogits)
        error = error + self.logits_scale * self.moved(*d)
        flat = [a.reshape(-1, a.shape[-1]) for a in (self.x, dlogits, error)]
        x, g, e = flat
        size = np.abs(g)
        results = (
            (dlogits @ self.weight.T, e @ np.abs(self.weight.T), size @ np.abs(self.weight.T)),
            (x.T @ g, np.abs(x.T) @ e, np.abs(x.T) @ size),
            (g.sum(0), e.sum(0), size.sum(0)),
        )
        for (value, bound, terms), dtype in zip(results, self.dtypes):
            sums = SAFETY * self.u * (math.sqrt(max(g.shape)) + 4) * terms
            stored = self.roundings * rounding(value, dtype)
            yield value, (bound + sums).reshape(value.shape) + stored

    def moved(self, d):
        """Return a bound on how far errors in the logits can change the logits' gradient."""
        p, lse = self.rows.p, np.abs(self.rows.lse[..., None])
        wrong = self.wrong
        moved = np.expm1(2 * wrong) * (1 + 2 * self.z_loss * lse)
        moved = p * (moved + 2 * self.z_loss * wrong)
        if self.logit_softcap is not None:
            # An error e of the logits x changes the softcap's derivative, 1 - tanh(x / cap)^2, by
            # less than 0.77 * e / cap. The softcap's derivative is multiplied by the loss's
            # gradient with respect to the capped logits. That gradient is at most
            # (p + targets) * (1 + 2 * z_loss * lse), where p are the probabilities.
            turned = 2 * (1 + 2 * self.z_loss * lse) * wrong / self.logit_softcap
            moved = moved + turned * (p + self.rows.targets)
        return np.abs(exact(d))[..., None] * moved

    @property
    def wrong(self):
        return self.logits_scale * self.error[..., None]
