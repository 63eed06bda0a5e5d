"""Fingerprints of traced programs, by which plans are cached."""

from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend.core import Literal, Var


def fingerprint(traced: Any) -> Hashable:
    """Return a value that two traces of the same program have in common.

    Functions in the parameters of equations, such as custom derivative rules, are compared by
    identity.
    """
    jaxpr = getattr(traced, "jaxpr", traced)
    numbers: dict[Var, int] = {}

    def number(v: Any) -> Hashable:
        if isinstance(v, Literal):
            return np.asarray(v.val).tobytes() if not np.ndim(v.val) else _Same(v.val), v.aval
        return numbers.setdefault(v, len(numbers))

    inputs = tuple((number(v), v.aval) for v in (*jaxpr.invars, *jaxpr.constvars))
    equations = tuple(
        (
            e.primitive,
            tuple(map(number, e.invars)),
            tuple((number(v), v.aval) for v in e.outvars),
            tuple((name, _of_parameter(p)) for name, p in sorted(e.params.items())),
        )
        for e in jaxpr.eqns
    )
    constants = tuple(map(_Same, getattr(traced, "consts", ())))
    return inputs, equations, tuple(map(number, jaxpr.outvars)), constants


def _of_parameter(value: Any) -> Hashable:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return fingerprint(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_of_parameter, value))
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value


class _Same:
    """An object that equals another one if both wrap the same value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value
