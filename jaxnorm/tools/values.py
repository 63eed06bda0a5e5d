"""Values of a part of a traced program, with which `memory_report` verifies its advice.

A position is an index into all axes of the logits except the axis of the classes. `positions` finds
the arrays that are computed from logits position by position. `Draw` evaluates such arrays for one
position, in float64, with random numbers in place of the other inputs. In both, a NumPy array of
the same shape stands for an array of the program. Along some axes, this NumPy array does not vary,
and stores one element, with a stride of 0. In `positions`, these are the axes of the classes; in
`Draw`, the axes of the positions.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls.call import Call
from jaxnorm.remat import costs
from jaxnorm.tools.kept_arrays import NAMING, Program, Value, reached

#: Maps an array of the program to an integer NumPy array of the same shape. For each element of the
#: program's array, the NumPy array has the number of the position from whose logits the element is
#: computed.
type Rows = dict[Value, np.ndarray]

# The results of the user's code and of its replacement agree if their difference is at most this
# fraction of the largest number. Small differences arise because literals in the program, such as a
# temperature, are rounded to float32.
_TOLERANCE = 4 * float(np.finfo(np.float32).eps)

# An equation is not evaluated if an operand has more elements than this.
_LARGEST = 2**22

# Random integers are less than this number, so that their exponentials are finite.
_LABELS = 8


class Head(NamedTuple):
    """A linear layer that computes logits: its matmul's result, and the axis of the classes."""

    logits: Value
    axis: int

    @property
    def classes(self) -> int:
        return self.logits.shape[self.axis]

    @property
    def weight(self) -> Value:
        return self.logits.operands[int(self.axis > 0)]

    def row(self) -> list[int]:
        """Return the shape of the logits of one position."""
        return [n if i == self.axis else 1 for i, n in enumerate(self.logits.shape)]


class UnknownError(Exception):
    """The code has an operation that cannot be evaluated here, or that mixes positions."""


# Errors of NumPy and JAX for operations that cannot be evaluated on the stored elements alone.
_ERRORS = (UnknownError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError)


def agree(a: Any, b: Any) -> bool:
    """Return True if two arrays have the same finite values up to rounding errors of float32."""
    size = np.max(np.abs(b), initial=0.0)
    with np.errstate(all="ignore"):
        return bool(np.isfinite(size) and np.all(np.abs(a - b) <= _TOLERANCE * size))


def stored(a: np.ndarray, whole: Collection[int] = ()) -> np.ndarray:
    """Return the stored elements of an array: only one along each axis with a stride of 0.

    The axes in `whole` keep all their elements.
    """
    is_whole = (n > 0 or i in whole for i, n in enumerate(map(abs, a.strides)))
    return a[tuple(slice(None if each else 1) for each in is_whole)]


def positions(program: Program, heads: Sequence[Head]) -> Rows:
    """Return the positions of all arrays that are computed from logits position by position.

    The result includes the logits of all heads. All these logits have the same positions.
    """
    rows: Rows = {}
    for head in heads:
        shape = [1 if i == head.axis else n for i, n in enumerate(head.logits.shape)]
        numbers = np.arange(math.prod(shape)).reshape(shape)
        rows[head.logits] = np.broadcast_to(numbers, head.logits.shape)
    draws = [Draw(rows, {}, {}, seed) for seed in range(2)]
    after = reached(rows, lambda v: v.users)
    for value in program.values:
        # An operand that depends on logits, but is not in `rows`, mixes positions. So does `value`.
        own = [v for v in value.operands if v in after]
        if own and rows.keys() >= {*own} and value in program.live:
            with contextlib.suppress(*_ERRORS):
                rows[value] = _positions(value, rows, draws)
    return rows


def sums_classes(user: Value, rows: np.ndarray) -> bool:
    """Return True if `user` sums an array over its axis of classes.

    `rows` has the position of each element of the array, as in the result of `positions`.
    """
    of_classes = {i for i, n in enumerate(stored(rows).shape) if n == 1}
    return user.made_by == "reduce_sum" and of_classes <= {*user.equation.params["axes"]}


def _positions(value: Value, rows: Rows, draws: Sequence["Draw"]) -> np.ndarray:
    """Return the positions of an array; raise an error if it mixes positions."""
    first, *others = value.operands
    if value.made_by in _VIEWS:
        return _VIEWS[value.made_by](value, rows[first])
    if value.made_by == "gather":
        picked, same = (_gathered(value, rows[first], draw(others[0])) for draw in draws)
        if np.any(picked != same):  # which positions are picked depends on the inputs
            raise UnknownError(value.made_by)
        return picked
    own, axes = [stored(rows[v]) for v in value.operands if v in rows], _combined(value)
    is_mixed = any(own[0].shape[i] > 1 for i in axes)
    if is_mixed or not all(np.array_equal(own[0], a) for a in own[1:]):
        raise UnknownError(value.made_by)
    one = own[0]
    if value.made_by == "stack":
        one = np.expand_dims(one, value.equation.params["axis"])
    elif one.ndim > len(value.shape):
        one = one.squeeze(axes)
    return np.broadcast_to(one, value.shape)


def _combined(value: Value) -> tuple[int, ...]:
    """Return the axes of the operands along which an equation combines elements."""
    if value.made_by in costs.ELEMENTWISE or value.made_by == "stack":
        return ()
    if value.made_by in _ALONG:
        (name,) = _AXES & value.equation.params.keys()
        return tuple(np.atleast_1d(value.equation.params[name]).tolist())
    if value.made_by == "dot_general":  # an inner product of rows: the positions are batch axes
        (axes, others), (batch, of_others) = value.equation.params["dimension_numbers"]
        if (axes, batch) == (others, of_others) and {*axes, *batch} == {*range(len(batch) + 1)}:
            return axes
    call = value.equation and value.equation.params.get("call")
    if not isinstance(call, Call):
        raise UnknownError(value.made_by)
    return tuple(axis % len(call.view.shape) for axis in call.spec.axes)


class Draw:
    """The values of a program's arrays at one position, for given logits.

    Arrays that do not depend on the logits are evaluated as far as possible. If this fails, because
    the array is an argument, or because its operation mixes positions, the array is treated as an
    input and gets random values. All floats are float64.

    Attributes:
      rows: the result of `positions`.
      given: a dict that maps the logits, and perhaps other arrays, to their given values.
      arrays: a dict that maps arrays to their values, as far as they are known.
      drawn: a dict that maps inputs to their random values. Several draws may share this dict.
    """

    def __init__(
        self,
        rows: Rows,
        given: dict[Value, np.ndarray],
        drawn: dict[Value, np.ndarray],
        seed: int = 0,
    ) -> None:
        self.rows, self.given, self.drawn = rows, given, drawn
        self.arrays = {v: np.broadcast_to(a, v.shape) for v, a in given.items()}
        self._sizes = {n for a in given.values() for n in stored(a).shape if n > 1}
        self._random = np.random.default_rng([seed, len(drawn)])

    def __call__(self, value: Value) -> np.ndarray:
        """Return the values of an array; raise `UnknownError` if they cannot be computed."""
        if value not in self.arrays:
            try:
                with np.errstate(all="ignore"):
                    found = self._applied(value)
            except _ERRORS as error:
                if value in self.rows:
                    raise UnknownError(value.made_by) from error
                found = self._leaf(value)
            self.arrays[value] = np.broadcast_to(found, value.shape)
        return self.arrays[value]

    def row(self, value: Value) -> np.ndarray:
        """Return the values of an array at one position, as a vector."""
        return stored(self(value)).ravel()

    def _applied(self, value: Value) -> np.ndarray:
        name, is_row = value.made_by, value in self.rows
        if name == "literal":
            return np.asarray(value.equation.val, _wide(value.dtype))
        if name == "iota":
            axis = value.equation.params["dimension"]
            column = np.arange(value.shape[axis], dtype=_wide(value.dtype))
            return column.reshape([-1 if i == axis else 1 for i in range(len(value.shape))])
        if name in _VIEWS:
            a = self(value.operands[0])
            is_cut = any(m != n and s == 0 for m, n, s in zip(a.shape, value.shape, a.strides))
            if name == "slice" and is_cut and not is_row:  # it may pick some of the positions
                raise UnknownError(name)
            return _VIEWS[name](value, a)
        if name == "gather" and is_row:
            a, indices = map(self, value.operands)
            return _gathered(value, a, indices, is_one=True)
        axes = _combined(value)
        arrays = [self(v) for v in value.operands]
        if not is_row and any(a.strides[i] == 0 < a.shape[i] - 1 for a in arrays for i in axes):
            raise UnknownError(name)  # it may combine several positions
        varying = {*axes, *(i for a in arrays for i, stride in enumerate(a.strides) if stride)}
        return _result(value, [stored(a, varying) for a in arrays])

    def _leaf(self, value: Value) -> np.ndarray:
        if value not in self.drawn:
            dtype = _wide(value.dtype)
            shape = tuple(n if n in self._sizes else 1 for n in value.shape)
            if np.issubdtype(dtype, np.integer):  # A label, or a small number.
                index = self._random.integers(min(self._sizes | {_LABELS}))
                self.drawn[value] = np.full((1,) * len(shape), index, dtype)
            else:
                normal = 3 * self._random.normal(size=shape)
                self.drawn[value] = normal > 0 if dtype is np.dtype(bool) else normal
        return self.drawn[value]


# ----------------------------------------------------------------------- values of primitives


def _broadcast(value: Value, a: np.ndarray) -> np.ndarray:
    axes = value.equation.params["broadcast_dimensions"]
    others = tuple(i for i in range(len(value.shape)) if i not in axes)
    return np.broadcast_to(np.expand_dims(a, others), value.shape)


def _reshaped(value: Value, a: np.ndarray) -> np.ndarray:
    """Reshape an array; raise ValueError if elements that are stored once would be copied."""
    whole = np.broadcast_to(np.array(stored(a), order="C"), a.shape)
    return np.reshape(whole, value.shape, copy=False)


def _sliced(value: Value, a: np.ndarray) -> np.ndarray:
    params = value.equation.params
    strides = params["strides"] or (1,) * a.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides)
    return a[tuple(slice(*each) for each in bounds)]


def _gathered(value: Value, a: np.ndarray, indices: np.ndarray, is_one: bool = False) -> np.ndarray:
    """Return the elements that a gather picks.

    If `is_one` is True, `a` has the values at a single position, and all indices must pick the same
    element.
    """
    params, a = value.equation.params, stored(a)
    axes = params["dimension_numbers"].start_index_map
    picked = np.stack([indices[..., i] * (a.shape[axis] > 1) for i, axis in enumerate(axes)], -1)
    if is_one:
        first = picked[(slice(1),) * (picked.ndim - 1)]
        if np.any(picked != first):
            raise UnknownError("gather")
        picked = first
    return _result(value, [a, picked], slice_sizes=tuple(map(min, params["slice_sizes"], a.shape)))


def _result(value: Value, arrays: Sequence[Any], **changes: Any) -> np.ndarray:
    """Return an equation's result, computed in float64 from stored elements of the operands."""
    if max(a.size for a in arrays) > _LARGEST:
        raise UnknownError(value.made_by)
    params = value.equation.params
    params = {n: _wide(p) if isinstance(p, np.dtype) else p for n, p in params.items()} | changes
    call = params.get("call")
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        if isinstance(call, Call):
            spec = call.spec.replaced(x_dtype=np.dtype(float), y_dtype=np.dtype(float))
            results = Call.of(call.function, spec, call.view, None).xla(*arrays)
        else:
            results = value.equation.primitive.bind(*arrays, **params)
        siblings = [v for v in value.operands[0].users if v.equation is value.equation]
        several = value.equation.primitive.multiple_results
        one = results[siblings.index(value)] if several else results
        return np.broadcast_to(np.asarray(one), value.shape)


def _wide(dtype: np.dtype) -> np.dtype:
    """Return float64 for a dtype of floats, and other dtypes unchanged."""
    return np.dtype(float) if jnp.issubdtype(dtype, jnp.inexact) else dtype


# `_AXES`: equation parameters that contain axes. `_ALONG`: primitives that combine or reorder the
# elements along these axes.
_AXES = {"axes", "axis", "dimension", "dimensions"}
_ALONG = {
    "concatenate", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "rev", "sort", "top_k",
    *costs.REDUCTIONS,
}  # fmt: skip

# Primitives that return the elements of their operand in another shape or order.
_VIEWS: dict[str, Callable[[Value, np.ndarray], np.ndarray]] = {
    **dict.fromkeys(NAMING, lambda value, a: a),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "slice": _sliced,
    "squeeze": lambda value, a: a.squeeze(value.equation.params["dimensions"]),
    "transpose": lambda value, a: a.transpose(value.equation.params["permutation"]),
}
