"""Values in float64, each with a bound on the error of computing it: running error analysis.

An operation's error is what its operands' errors become to first order, and its own rounding: a
few units of the arithmetic's roundoff u, or, for a sum of n terms, some sqrt(n) u of the sum of
their magnitudes (the errors of a random order of sums walk randomly). So a formula that is written
once gives its value and what a computation of it, in whatever order, may be off by.

Source: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, section 3.3.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Union

import numpy as np

Axes = int | Sequence[int]
Operand = Union["Bounded", np.ndarray, float]

# Of a dtype: unit roundoff, and half the spacing of its subnormals.
_STORED = {"bfloat16": (2.0**-8, 2.0**-134), "float32": (2.0**-24, 2.0**-150)}

#: Times the expected error, where a bound has to hold for each of many elements.
_SAFETY = 4.0


@dataclasses.dataclass(frozen=True)
class Bounded:
    """A float64 array, and a bound on the error of each element.

    Attributes:
      unit: roundoff of the arithmetic.
    """

    value: np.ndarray
    error: np.ndarray
    unit: float = 2.0**-24

    __array_ufunc__ = None  # so that an array on the left leaves the operation to this class

    @classmethod
    def exact(cls, array: np.ndarray) -> "Bounded":
        value = np.asarray(array).astype(np.float64)
        return cls(value, np.zeros_like(value))

    def __add__(self, other: Operand) -> "Bounded":
        other = _bounded(other)
        return self._rounded(self.value + other.value, self.error + other.error)

    __radd__ = __add__

    def __neg__(self) -> "Bounded":
        return dataclasses.replace(self, value=-self.value)

    def __sub__(self, other: Operand) -> "Bounded":
        return self + -_bounded(other)

    def __rsub__(self, other: Operand) -> "Bounded":
        return -self + other

    def __mul__(self, other: Operand) -> "Bounded":
        other = _bounded(other)
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error
        return self._rounded(self.value * other.value, error + self.error * other.error)

    __rmul__ = __mul__

    def __truediv__(self, other: "Bounded") -> "Bounded":
        """By what is far from 0, relative to its error."""
        quotient = self.value / other.value
        least = np.abs(other.value) - other.error
        error = (self.error + np.abs(quotient) * other.error) / least
        return self._rounded(quotient, error)

    def __matmul__(self, other: "Bounded") -> "Bounded":
        left, right = np.abs(self.value), np.abs(other.value)
        error = left @ other.error + self.error @ right + self.error @ other.error
        walk = _SAFETY * self.unit * math.sqrt(self.value.shape[-1])
        return self._rounded(self.value @ other.value, error + walk * (left @ right))

    @property
    def transposed(self) -> "Bounded":
        return dataclasses.replace(self, value=self.value.T, error=self.error.T)

    def reshape(self, shape: tuple[int, ...]) -> "Bounded":
        value, error = self.value.reshape(shape), self.error.reshape(shape)
        return dataclasses.replace(self, value=value, error=error)

    def sum(self, axes: Axes = -1) -> "Bounded":
        """With the summed axes as 1."""
        axes = axes if isinstance(axes, int) else tuple(axes)
        value = self.value.sum(axes, keepdims=True)
        walk = _SAFETY * self.unit * math.sqrt(self.value.size / max(value.size, 1))
        magnitude = np.abs(self.value).sum(axes, keepdims=True)
        return self._rounded(value, self.error.sum(axes, keepdims=True) + walk * magnitude)

    def mean(self, axes: Axes = -1) -> "Bounded":
        total = self.sum(axes)
        return total * (total.value.size / self.value.size)

    def exp(self) -> "Bounded":
        # It is taken as a power of 2, whose argument is rounded once more.
        error = self.error + _SAFETY * self.unit * np.abs(self.value)
        value = np.exp(self.value)
        return self._rounded(value, value * np.expm1(error))

    def log(self) -> "Bounded":
        least = self.value - self.error
        return self._rounded(np.log(self.value), self.error / least)

    def rsqrt(self) -> "Bounded":
        value = 1 / np.sqrt(self.value)
        return self._rounded(value, value * self.error / (2 * (self.value - self.error)))

    def kept(self, mask: np.ndarray) -> "Bounded":
        """0 where the mask is False."""
        return dataclasses.replace(
            self, value=np.where(mask, self.value, 0), error=np.where(mask, self.error, 0)
        )

    def at(self, indices: np.ndarray) -> "Bounded":
        """One element along the last axis for each of the others, which stays as 1."""
        value, error = (
            np.take_along_axis(a, indices[..., None], -1) for a in (self.value, self.error)
        )
        return dataclasses.replace(self, value=value, error=error)

    def columns(self, order: np.ndarray) -> "Bounded":
        """Those of the last axis that `order` names."""
        return dataclasses.replace(self, value=self.value[..., order], error=self.error[..., order])

    def stored(self, dtype: str) -> "Bounded":
        """As an array of this dtype has it."""
        roundoff, quantum = _STORED[dtype]
        rounding = roundoff * (np.abs(self.value) + self.error) + quantum
        return dataclasses.replace(self, error=self.error + rounding)

    def _rounded(self, value: np.ndarray, error: np.ndarray) -> "Bounded":
        return dataclasses.replace(
            self, value=value, error=error + _SAFETY * self.unit * np.abs(value)
        )


def _bounded(operand: Operand) -> Bounded:
    return operand if isinstance(operand, Bounded) else Bounded.exact(np.asarray(operand))
