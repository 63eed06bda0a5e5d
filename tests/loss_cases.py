"""Cross-entropies, log-probabilities and entropies of rows in float64 NumPy, with error bounds."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from reference import SAFETY, arithmetic, exact, rounding


def operands(shape, dtype, seed=0, scale=3.0, label_dtype="int32"):
    """Return logits, labels and a cotangent of the loss."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=shape) * scale, dtype)
    labels = jnp.asarray(rng.integers(0, min(shape[-1], 127), shape[:-1]), label_dtype)
    d_dtype = "float64" if dtype == "float64" else "float32"
    return x, labels, jnp.asarray(rng.normal(size=shape[:-1]), d_dtype)


@dataclasses.dataclass
class CrossEntropy:
    """Cross-entropies of rows of logits ``(..., V)``. A label that is not a class gives NaN.

    The bounds follow the computation: m = max(x), s = sum(exp(x - m)), lse = m + log(s), and loss =
    m - x_l + log(s). Here x_l is the label's logit; if it is the largest, its exponential is
    exactly 1.

    With a scale or a cap, `x` is the transformed logit. A capped logit has an error of at most
    `x_error`, which is the sum of two parts:

    - the error of tanh: 2 ulps of the cap (8 ulps for 16-bit logits);
    - the effect of rounding tanh's argument: if its relative error is e, the capped logit changes
      by at most 0.45 * e * cap.

    Without z_loss, the sum of |d loss / d logit| over a row is at most 2. So if each logit has an
    error of at most `x_error`, the loss changes by at most 2 * x_error.
    """

    x: np.ndarray
    labels: np.ndarray
    kept: np.ndarray | None = None  # the mask of classes, of x's shape
    positions: np.ndarray | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logits_scale: float = 1.0
    logit_softcap: float | None = None
    dtype: str = "float32"

    def __post_init__(self):
        x, labels = exact(self.x), np.asarray(self.labels)
        if self.positions is not None:
            x = np.where(self.positions[..., None], x, 0)
        self.x = self.logits_scale * x
        self.slope, self.x_error = np.full_like(self.x, self.logits_scale), 0.0
        if self.logit_softcap is not None:
            t = np.tanh(self.x / self.logit_softcap)
            self.x = self.logit_softcap * t
            self.slope = self.logits_scale * (1 - t**2)
            of_tanh = 4 if np.dtype(self.dtype).itemsize > 2 else 16
            self.x_error = (of_tanh + SAFETY) * self.u * self.logit_softcap
        a, self.cols = self.label_smoothing, self.x.shape[-1]
        kept = np.ones(self.x.shape, bool) if self.kept is None else self.kept
        self.has_entry = kept.any(-1)
        if self.positions is not None:
            self.has_entry = self.has_entry & self.positions
        self.is_class = (labels >= 0) & (labels < self.cols)
        one_hot = np.arange(self.cols) == labels[..., None].astype(np.float64)
        self.targets = (1 - a) * one_hot + a / self.cols
        x = np.where(self.has_entry[..., None], self.x, 0.0)
        logits = np.where(kept, x, -np.inf)
        self.m = np.where(self.has_entry, logits.max(-1), 0.0)
        self.e = np.exp(logits - self.m[..., None])
        others = np.where(one_hot, 0, self.e).sum(-1)
        self.x_l = np.where(self.is_class, np.where(one_hot, x, 0).sum(-1), 0.0)
        self.d = self.m - self.x_l
        own = np.where((kept & one_hot).any(-1), np.expm1(-self.d), -1)
        self.log_s = np.log1p(np.where(self.has_entry, others + own, 0))
        self.lse = self.m + self.log_s
        loss = self.d + self.log_s
        if a:
            self.mean = np.mean(x - self.m[..., None], -1)
            loss = (1 - a) * loss + a * (self.log_s - self.mean)
        loss = loss + self.z_loss * self.lse**2
        self.loss = np.where(self.has_entry, np.where(self.is_class, loss, np.nan), 0)
        self.p = np.where(self.has_entry[..., None], np.exp(logits - self.lse[..., None]), 0)

    @property
    def results(self):
        return (self.loss,)

    @property
    def bounds(self):
        return (self.loss_bound(),)

    def gradient(self, *d):
        """Return the gradient of sum(d * result) with respect to the original logits.

        There is one cotangent d for each result.
        """
        return np.where(self.has_entry[..., None], self._of_x(*d) * self.slope, 0)

    def _of_x(self, d):
        slope = self.p * (1 + 2 * self.z_loss * self.lse[..., None]) - self.targets
        return np.where(self.is_class[..., None], exact(d)[..., None] * slope, np.nan)

    @functools.cached_property
    def u(self):
        return arithmetic(self.dtype)

    @functools.cached_property
    def _sum_error(self):
        """A bound on the part of log(s)'s error that is due to errors of the exponentials.

        s is the sum of the exponentials exp(x - m). An exponential is inexact because its argument
        is rounded. If the label's logit is the largest of the row, the argument of its exponential
        is 0, and the exponential is exact.
        """
        terms = np.where((self.d == 0)[..., None] & (self.targets > self.targets.min()), 0, self.e)
        if self.label_smoothing == 1:
            terms = self.e
        x = np.where(self.has_entry[..., None] & (self.e > 0), self.x, self.m[..., None])
        depth = self.m[..., None] - x
        error = np.sum(terms * (np.abs(depth) + math.sqrt(self.cols) + 4), -1)
        return SAFETY * self.u * error / np.maximum(self.e.sum(-1), 1e-300)

    @property
    def _log_s_error(self):
        return self._sum_error + 2 * self.x_error + SAFETY * self.u * np.abs(self.log_s)

    def loss_bound(self):
        a, b, few = self.label_smoothing, self.z_loss, SAFETY * self.u
        error = self._sum_error + few * (np.abs(self.d) + np.abs(self.log_s))
        if a:
            x = np.where(self.has_entry[..., None], self.x, 0)
            # The mean is computed relative to the maximum, or, in other code, relative to the
            # label's logit. The bound covers both.
            spread = np.mean(np.abs(x - self.m[..., None]), -1) + np.abs(self.d)
            error = error + a * few * (math.sqrt(self.cols) + 2) * spread
        error = error + 2 * b * np.abs(self.lse) * self._log_s_error + few * b * self.lse**2
        error = error + 2 * (1 + 2 * b * np.abs(self.lse)) * self.x_error
        return error + few * np.abs(self.loss) + 1e-37

    def gradient_bound(self, *d):
        dx, of_x = (np.nan_to_num(g, nan=0) for g in (self.gradient(*d), self._of_x(*d)))
        bound, few = self._of_x_bound(*d), SAFETY * self.u
        if self.logit_softcap is not None:
            # The softcap's derivative is 1 - t^2, where t = tanh(x / cap). `wrong` is the error of
            # this derivative. It comes from the error of t, which is x_error / cap.
            wrong = np.abs(self.logits_scale) * (2 * self.x_error / self.logit_softcap + few)
            bound = bound * (np.abs(self.slope) + wrong) + np.abs(of_x) * wrong
        elif np.any(self.logits_scale != 1):
            bound = bound * np.abs(self.slope) + few * np.abs(dx)
        return bound + rounding(dx, self.dtype)

    @functools.cached_property
    def _depth(self):
        """For each logit, the maximum of its row minus the logit; 0 for masked classes."""
        x = np.where(self.has_entry[..., None] & (self.p > 0), self.x, self.m[..., None])
        return np.abs(x - self.m[..., None])

    @functools.cached_property
    def _p_error(self):
        error = self._log_s_error[..., None] + 2 * self.x_error
        # An exponential below the smallest normal number may be flushed to 0.
        return self.p * np.expm1(error + SAFETY * self.u * (self._depth + 2)) + 2.0**-126

    def _of_x_bound(self, d):
        d, few, b = np.abs(exact(d))[..., None], SAFETY * self.u, self.z_loss
        lse, error = np.abs(self.lse[..., None]), self._log_s_error[..., None]
        slope = self._p_error * (1 + 2 * b * lse) + 2 * b * self.p * (error + few * lse)
        return d * (slope + few * (self.p + self.targets))


class LogProbs(CrossEntropy):
    """Log-probabilities and entropies of rows of logits.

    A log-probability is the negative of a cross-entropy. If a label is not a class, only its
    log-probability is NaN, and the gradient of its row unless the log-probability's cotangent is 0.

    The bound of the entropy follows its computation as log(s) - sum(e * t) / s. Here t <= 0 is a
    logit minus the row's maximum, e = exp(t) and s = sum(e).
    """

    @functools.cached_property
    def entropy(self):
        return np.where(self.has_entry, self.log_s - self._mean_depth, 0)

    @property
    def results(self):
        return -self.loss, self.entropy

    @property
    def bounds(self):
        return self.loss_bound(), self._entropy_bound

    @functools.cached_property
    def _mean_depth(self):
        """The mean of (logit - maximum), weighted by the probabilities p. It is at most 0."""
        return -np.sum(self.p * self._depth, -1)

    @functools.cached_property
    def _entropy_bound(self):
        few, depth, log_s = SAFETY * self.u, self._depth, np.abs(self.log_s)
        # A term of the sum is e * t. Its error has two parts: the error of the exponential e, which
        # comes from its argument t, and the error of the factor t.
        terms = few * depth * (depth + math.sqrt(self.cols) + 4) + 2 * self.x_error * (1 + depth)
        of_sum = self._log_s_error + few * (1 + log_s)
        # An exponential below the smallest normal number may be flushed to 0.
        error = np.sum(self.p * terms + 2.0**-126 * depth, -1)
        error = error + np.abs(self._mean_depth) * of_sum
        return error + self._log_s_error + few * np.abs(np.nan_to_num(self.entropy)) + 1e-37

    @functools.cached_property
    def above_mean(self):
        """For each class, log p + H, where H is the row's entropy; 0 for masked classes."""
        log_p = -self._depth - self.log_s[..., None]
        return np.where(self.p > 0, log_p + np.nan_to_num(self.entropy)[..., None], 0)

    def _of_x(self, a, b):
        a = np.where(self.is_class | (exact(a) == 0), exact(a), np.nan)[..., None]
        return a * (self.targets - self.p) - exact(b)[..., None] * self.p * self.above_mean

    def _of_x_bound(self, a, b):
        few, size = SAFETY * self.u, np.abs(self.above_mean)
        log_s, entropy = (np.abs(v)[..., None] for v in (self.log_s, np.nan_to_num(self.entropy)))
        wrong = few * (self._depth + log_s + entropy) + 2 * self.x_error
        wrong = wrong + (self._log_s_error + self._entropy_bound)[..., None]
        error = self._p_error * size + (self.p + self._p_error) * wrong + few * self.p * size
        return super()._of_x_bound(a) + np.abs(exact(b))[..., None] * error
