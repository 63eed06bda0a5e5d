"""Running error analysis: float64 arrays with a bound on the error of each element.

The evaluation of a formula with such arrays gives its value in float64, and an error bound. The
bound holds for another evaluation of the same formula, in a less precise arithmetic with roundoff
u, with the terms of sums in any order. The error of an operation is the sum of two errors. One is
the error of its operands, propagated to first order. The other is its own rounding error: a few u,
relative to the result. For a sum of n terms, the rounding error is about sqrt(n) u times the sum of
the terms' magnitudes, because rounding errors add up like a random walk.

Source: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, section 3.3.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Union

import numpy as np

Axes = int | Sequence[int] | None
Operand = Union["Bounded", np.ndarray, float]

# For each dtype, its unit roundoff, and half the spacing of its subnormal numbers.
_STORED = {"bfloat16": (2.0**-8, 2.0**-134), "float32": (2.0**-24, 2.0**-150)}

# The unit roundoff of float32 (the arithmetic that is analysed), multiplied by a safety factor. The
# safety factor makes a bound larger than the expected error, so that no error in a large array
# exceeds its bound by chance.
_ROUNDOFF = 4.0 * 2.0**-24


@dataclasses.dataclass(frozen=True)
class Bounded:
    """A float64 array, and a bound on the error of each element.

    Attributes:
      value: the array.
      error: the bounds, an array of the same shape.
    """

    value: np.ndarray
    error: np.ndarray

    __array_ufunc__ = None  # makes ``array * bounded`` call `Bounded.__rmul__`

    @classmethod
    def exact(cls, array: np.ndarray) -> "Bounded":
        value = np.asarray(array).astype(np.float64)
        return cls(value, np.zeros_like(value))

    def __add__(self, other: Operand) -> "Bounded":
        other = _bounded(other)
        return _rounded(self.value + other.value, self.error + other.error)

    __radd__ = __add__

    def __neg__(self) -> "Bounded":
        return Bounded(-self.value, self.error)

    def __sub__(self, other: Operand) -> "Bounded":
        return self + -_bounded(other)

    def __rsub__(self, other: Operand) -> "Bounded":
        return -self + other

    def __mul__(self, other: Operand) -> "Bounded":
        other = _bounded(other)
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error
        return _rounded(self.value * other.value, error + self.error * other.error)

    __rmul__ = __mul__

    def __truediv__(self, other: "Bounded") -> "Bounded":
        """Divide by `other`, whose elements must be much larger than their error bounds."""
        quotient = self.value / other.value
        least = np.abs(other.value) - other.error
        error = (self.error + np.abs(quotient) * other.error) / least
        return _rounded(quotient, error)

    def __matmul__(self, other: "Bounded") -> "Bounded":
        left, right = np.abs(self.value), np.abs(other.value)
        error = left @ other.error + self.error @ right + self.error @ other.error
        walk = _ROUNDOFF * math.sqrt(self.value.shape[-1])
        return _rounded(self.value @ other.value, error + walk * (left @ right))

    def __getitem__(self, at: Any) -> "Bounded":
        return Bounded(self.value[at], self.error[at])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def transposed(self) -> "Bounded":
        return Bounded(self.value.T, self.error.T)

    def reshape(self, shape: tuple[int, ...]) -> "Bounded":
        return Bounded(self.value.reshape(shape), self.error.reshape(shape))

    def sum(self, axes: Axes = -1) -> "Bounded":
        """Return the sum over some axes, which have size 1 in the result."""
        axes = _axes(axes)
        value = self.value.sum(axes, keepdims=True)
        walk = _ROUNDOFF * math.sqrt(self.value.size / max(value.size, 1))
        magnitude = np.abs(self.value).sum(axes, keepdims=True)
        return _rounded(value, self.error.sum(axes, keepdims=True) + walk * magnitude)

    def mean(self, axes: Axes = -1) -> "Bounded":
        total = self.sum(axes)
        return total * (total.value.size / self.value.size)

    def exp(self) -> "Bounded":
        # exp(x) is computed as 2^(x / log 2), so the quotient is rounded as well.
        error = self.error + _ROUNDOFF * np.abs(self.value)
        value = np.exp(self.value)
        return _rounded(value, value * np.expm1(error))

    def log(self) -> "Bounded":
        least = self.value - self.error
        return _rounded(np.log(self.value), self.error / least)

    def rsqrt(self) -> "Bounded":
        value = 1 / np.sqrt(self.value)
        return _rounded(value, value * self.error / (2 * (self.value - self.error)))

    def kept(self, mask: np.ndarray, fill: float = 0) -> "Bounded":
        """Replace elements where the mask is False by `fill`, with an error bound of 0."""
        return Bounded(np.where(mask, self.value, fill), np.where(mask, self.error, 0))

    def at(self, indices: np.ndarray) -> "Bounded":
        """Select one element from each row. The last axis of the result has size 1.

        `indices` has, for each row, the index of the element along the last axis.
        """
        at = indices[..., None]
        value, error = (np.take_along_axis(a, at, -1) for a in (self.value, self.error))
        return Bounded(value, error)

    def stored(self, dtype: str) -> "Bounded":
        """Return the array with its bounds widened by the error of rounding to `dtype`."""
        roundoff, quantum = _STORED[dtype]
        rounding = roundoff * (np.abs(self.value) + self.error) + quantum
        return Bounded(self.value, self.error + rounding)


def _rounded(value: np.ndarray, error: np.ndarray) -> Bounded:
    return Bounded(value, error + _ROUNDOFF * np.abs(value))


# ------------------------------------------------- functions of a Bounded, or of a plain array


def exp(x: Any) -> Any:
    """Return the exponentials of the elements."""
    return x.exp() if isinstance(x, Bounded) else np.exp(x)


def log(x: Any) -> Any:
    """Return the logarithms of the elements."""
    return x.log() if isinstance(x, Bounded) else np.log(x)


def rsqrt(x: Any) -> Any:
    """Return the reciprocal square roots of the elements."""
    return x.rsqrt() if isinstance(x, Bounded) else 1 / np.sqrt(x)


def total(x: Any, axes: Axes = -1) -> Any:
    """Return the sum over some axes, which have size 1 in the result."""
    if isinstance(x, Bounded):
        return x.sum(axes)
    return x.sum(_axes(axes), keepdims=True)


def mean(x: Any, axes: Axes = -1) -> Any:
    """Return the mean over some axes, which have size 1 in the result."""
    if isinstance(x, Bounded):
        return x.mean(axes)
    return x.mean(_axes(axes), keepdims=True)


def kept(x: Any, mask: np.ndarray, fill: float = 0) -> Any:
    """Return x with elements replaced by `fill` where the mask is False."""
    return x.kept(mask, fill) if isinstance(x, Bounded) else np.where(mask, x, fill)


def largest(x: Any, mask: np.ndarray, axes: Axes = -1) -> Any:
    """Return the maximum over some axes, which have size 1 in the result.

    Elements where the mask is False are ignored. If all elements are ignored, the result is 0.
    """
    axes = _axes(axes)
    among = np.where(mask, x.value if isinstance(x, Bounded) else x, -np.inf)
    found = among.max(axes, keepdims=True, initial=-np.inf)
    found = np.where(mask.any(axes, keepdims=True), found, 0)
    if not isinstance(x, Bounded):
        return found
    # The maximum is one of the elements, so it has that element's error.
    error = np.where(among == found, x.error, 0).max(axes, keepdims=True)
    return Bounded(found, error)


def _axes(axes: Axes) -> int | tuple[int, ...] | None:
    return tuple(axes) if isinstance(axes, Sequence) else axes


def _bounded(operand: Operand) -> Bounded:
    return operand if isinstance(operand, Bounded) else Bounded.exact(np.asarray(operand))
