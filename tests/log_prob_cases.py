"""Log-probabilities and entropies over the last axis in float64 NumPy, with error bounds."""

import functools
import math

import numpy as np
from loss_cases import CrossEntropy
from reference import SAFETY, exact


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
