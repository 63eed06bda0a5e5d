"""Values of a part of a traced program, with which `memory_report` verifies its advice.

`positions` finds the arrays that are computed from logits position by position. `Draw` evaluates
such arrays for one position, in float64, with random numbers in place of the other inputs. In both,
an array may have the size 1 in an axis where the program has more elements: in an axis of classes
in `positions`, and in an axis of positions in `Draw`.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.operations import loss
from jaxnorm.tools.kept_arrays import NAMING, Program, Value, reached

#: Maps an array to the positions of the logits from which its elements are computed.
type Rows = dict[Value, np.ndarray]

# Code and replacement agree up to a multiple of the rounding errors of float32, because literals in
# the program, such as a temperature, are rounded to float32.
_TOLERANCE = 4 * float(np.finfo(np.float32).eps)

# Maximum number of elements of an array that is evaluated.
_LARGEST = 2**22


class Head(NamedTuple):
    """A linear layer that computes logits: its matmul, and the axis of the classes."""

    logits: Value
    axis: int

    @property
    def classes(self) -> int:
        return self.logits.shape[self.axis]

    @property
    def weight(self) -> Value:
        return self.logits.operands[int(self.axis > 0)]


class UnknownError(Exception):
    """The code has an operation that cannot be evaluated here, or that mixes positions."""


def agree(a: Any, b: Any) -> bool:
    """Return True if two arrays have the same finite values up to rounding errors of float32."""
    size = np.max(np.abs(b), initial=0.0)
    with np.errstate(all="ignore"):
        try:
            return bool(np.isfinite(size) and np.all(np.abs(a - b) <= _TOLERANCE * size))
        except ValueError:  # their shapes cannot be broadcast
            return False


def positions(program: Program, heads: Sequence[Head]) -> Rows:
    """Return the arrays that are computed from logits, each position from its own logits alone.

    The logits of all heads have the same positions, and are among these arrays.
    """
    rows: Rows = {}
    for value, axis in heads:
        shape = [1 if i == axis else n for i, n in enumerate(value.shape)]
        rows[value] = np.arange(math.prod(shape)).reshape(shape)
    draw, after = Draw(rows, {}, {}), reached(rows, lambda v: v.users)
    for value in program.values:
        own = [rows[v] for v in value.operands if v in rows]
        # An operand that is computed from the logits of several positions is no input.
        is_own = own and all(v in rows or v not in after for v in value.operands)
        if is_own and value not in rows and value in program.live:
            found = _rows(value, own, draw)
            if found is not None:
                rows[value] = found
    return rows


def sums_classes(user: Value, rows: np.ndarray) -> bool:
    """Return True if a user of an array with the positions `rows` sums it over its classes."""
    of_classes = {i for i, n in enumerate(rows.shape) if n == 1}
    return user.made_by == "reduce_sum" and of_classes <= {*user.equation.params["axes"]}


def _rows(value: Value, own: list[np.ndarray], draw: "Draw") -> np.ndarray | None:
    """Return the positions of an array, of which some operands have the positions `own`.

    Return None if the array is not computed position by position.
    """
    rows, name, params = own[0], value.made_by, value.equation.params
    if name == "dot_general":
        # For example, the inner products of rows: the positions are batch axes.
        own = _batches(value, draw.rows)
        rows = own[0] if own else rows
    if not all(np.array_equal(rows, other) for other in own[1:]):
        return None
    try:
        if name in _SHAPED:
            return _SHAPED[name](value, rows)
        if name == "gather" and value.operands[1] not in draw.rows:
            return _picked(value, rows, draw(value.operands[1]))
    except UnknownError:
        return None
    if name in _ELEMENTWISE or name in _OF_PARAMS or (name == "dot_general" and own):
        return rows
    of_classes = [i for i, n in enumerate(rows.shape) if n == 1]
    if name in _REDUCED and {*params["axes"]} <= {*of_classes}:
        return rows.squeeze(tuple(params["axes"]))
    if name in _OURS and value.operands[0] in draw.rows and rows.shape[-1:] == (1,):
        of_rows = rows if len(value.shape) == rows.ndim else rows[..., 0]
        return of_rows if value.shape[: rows.ndim - 1] == rows.shape[:-1] else None
    return None


class Draw:
    """The values of a program's arrays at one position, for given logits.

    Other inputs get random values: the arrays that are not computed from the logits, from which an
    array is computed by operations that mix no positions. All floats are float64.

    Attributes:
      rows: the result of `positions`.
      arrays: the values that are known so far.
      drawn: the inputs that got random values, and these values. Several draws may share them.
    """

    def __init__(
        self,
        rows: Rows,
        given: dict[Value, np.ndarray],
        drawn: dict[Value, np.ndarray],
        seed: int = 0,
    ) -> None:
        self.rows, self.arrays, self.drawn = rows, dict(given), drawn
        self._sizes = {n for a in given.values() for n in a.shape if n > 1}
        self._random = np.random.default_rng([seed, len(drawn)])

    def __call__(self, value: Value) -> np.ndarray:
        """Return the values of an array; raise `UnknownError` if they cannot be computed."""
        if value not in self.arrays:
            try:
                with np.errstate(all="ignore"):
                    self.arrays[value] = self._computed(value)
            except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
                raise UnknownError(value.made_by) from error
        return self.arrays[value]

    def _computed(self, value: Value) -> np.ndarray:
        if value.made_by == "literal":
            number = np.asarray(value.number)
            return number.astype(float) if jnp.issubdtype(number.dtype, jnp.inexact) else number
        if value in self.rows:
            return self._applied(value)
        try:
            return self._applied(value)
        except UnknownError:
            return self._leaf(value)

    def _applied(self, value: Value) -> np.ndarray:
        name, is_row = value.made_by, value in self.rows
        if name in _OURS:
            return _of_jaxnorm(value, *map(self, value.operands))
        if name == "iota":
            axis = value.equation.params["dimension"]
            shape = [-1 if i == axis else 1 for i in range(len(value.shape))]
            return np.arange(value.shape[axis]).reshape(shape)
        others = {"concatenate", "dot_general", "gather"} if is_row else {"concatenate"}
        if name not in {*_ELEMENTWISE, *_OF_PARAMS, *_SHAPED, *_REDUCED, *others}:
            raise UnknownError(name)
        arrays = [self(v) for v in value.operands]
        if name in _ELEMENTWISE:
            if math.prod(np.broadcast_shapes(*(a.shape for a in arrays))) > _LARGEST:
                raise UnknownError(name)
            return np.asarray(_ELEMENTWISE[name](*arrays))
        if name in _OF_PARAMS:
            return _OF_PARAMS[name](value, arrays[0])
        if name in _SHAPED:
            return _SHAPED[name](value, arrays[0], is_row)
        if name in _REDUCED:
            axes = value.equation.params["axes"]
            return _REDUCED[name](_whole(arrays[0], value.operands[0], axes, is_row), tuple(axes))
        if name == "concatenate":
            return _joined(value, *arrays)
        return _picked(value, *arrays) if name == "gather" else _multiplied(value, *arrays)

    def _leaf(self, value: Value) -> np.ndarray:
        if value not in self.drawn:
            shape = tuple(n if n in self._sizes else 1 for n in value.shape)
            if jnp.issubdtype(value.dtype, jnp.inexact):
                self.drawn[value] = self._random.normal(size=shape) * 3
            elif value.dtype == bool:
                self.drawn[value] = self._random.random(shape) < 0.5
            elif np.issubdtype(value.dtype, np.integer):  # an index: of one class
                index = self._random.integers(min(self._sizes, default=2))
                self.drawn[value] = np.full((1,) * len(shape), index)
            else:
                raise UnknownError(value.dtype.name)
        return self.drawn[value]


# --------------------------------------------------------------------------- values of primitives


def _whole(a: np.ndarray, value: Value, axes: Iterable[int], is_row: bool = True) -> np.ndarray:
    """Return an array that has all elements of some axes.

    Raise `UnknownError` if an axis has only one of the program's elements, unless `is_row`.
    """
    shape = [value.shape[i] if i in axes else n for i, n in enumerate(a.shape)]
    if math.prod(shape) > _LARGEST or not (is_row or tuple(shape) == a.shape):
        raise UnknownError(value.made_by)
    return np.broadcast_to(a, shape)


def _broadcast(value: Value, a: np.ndarray, is_row: bool = True) -> np.ndarray:
    """Insert axes of size 1, which stand for any number of equal elements."""
    shape = [1] * len(value.shape)
    for size, axis in zip(a.shape, value.equation.params["broadcast_dimensions"]):
        shape[axis] = size
    return a.reshape(shape)


def _reshaped(value: Value, a: np.ndarray, is_row: bool = True) -> np.ndarray:
    old, new = value.operands[0].shape, value.shape
    equal = [m == n for m, n in zip(old, new)]
    first = equal.index(False) if False in equal else len(equal)
    equal = [m == n for m, n in zip(old[first:][::-1], new[first:][::-1])]
    last = equal.index(False) if False in equal else len(equal)
    inside, middle = range(first, len(old) - last), new[first : len(new) - last]
    if all(a.shape[i] == 1 for i in inside):
        middle = (1,) * len(middle)
    else:
        a = _whole(a, value.operands[0], inside)
    return a.reshape(a.shape[:first] + middle + a.shape[len(old) - last :])


def _sliced(value: Value, a: np.ndarray, is_row: bool = True) -> np.ndarray:
    params, old = value.equation.params, value.operands[0].shape
    if not is_row and a.shape != old:
        raise UnknownError("slice")
    strides = params["strides"] or (1,) * len(old)
    bounds = zip(params["start_indices"], params["limit_indices"], strides)
    cuts = [slice(*b) if m == n else slice(None) for m, n, b in zip(a.shape, old, bounds)]
    return a[tuple(cuts)]


def _batches(value: Value, rows: Rows) -> list[np.ndarray]:
    """Return, for each operand of a matmul, the positions of the result; [] if they are mixed."""
    found, (_, batches) = list[np.ndarray](), value.equation.params["dimension_numbers"]
    for v, batch in zip(value.operands, batches):
        if v in rows:
            rest = [i for i in range(len(v.shape)) if i not in batch]
            moved = rows[v].transpose([*batch, *rest])
            if any(n > 1 for n in moved.shape[len(batch) :]):
                return []
            ones = [1] * (len(value.shape) - len(batch))
            found.append(moved.reshape([*moved.shape[: len(batch)], *ones]))
    return found


def _multiplied(value: Value, *factors: np.ndarray) -> np.ndarray:
    (over, over2), (batch, batch2) = value.equation.params["dimension_numbers"]
    a, b = (_whole(f, v, i) for f, v, i in zip(factors, value.operands, (over, over2)))
    of_a = [*range(a.ndim)]
    pairs = dict(zip([*over2, *batch2], [*over, *batch]))
    of_b = [pairs.get(i, a.ndim + i) for i in range(b.ndim)]
    free = [i for i in (*of_a, *of_b) if i not in (*over, *batch)]
    return np.einsum(a, of_a, b, of_b, [*batch, *free])


def _joined(value: Value, *arrays: np.ndarray) -> np.ndarray:
    axis = value.equation.params["dimension"]
    whole = [_whole(a, v, [axis], is_row=False) for a, v in zip(arrays, value.operands)]
    others = np.broadcast_shapes(*[(*a.shape[:axis], 1, *a.shape[axis + 1 :]) for a in whole])
    shapes = [(*others[:axis], a.shape[axis], *others[axis + 1 :]) for a in whole]
    return np.concatenate([np.broadcast_to(a, s) for a, s in zip(whole, shapes)], axis)


def _picked(value: Value, a: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the element of the last axis that a gather picks at each position."""
    of, sizes = (value.equation.params[name] for name in ("dimension_numbers", "slice_sizes"))
    *rows, _ = shape = value.operands[0].shape
    batching = dict(zip(of.operand_batching_dims, of.start_indices_batching_dims))
    columns = {axis: indices[..., i] for i, axis in enumerate(of.start_index_map)}

    def is_own(axis: int, n: int) -> bool:
        """Return True if each row of the result is picked from the same row of `a`."""
        if axis not in columns:
            return batching.get(axis) == axis
        own = np.arange(n).reshape([-1 if i == axis else 1 for i in range(indices.ndim - 1)])
        return bool(np.all(columns[axis] == own))

    is_sliced = list(sizes) == [*rows, 1] and not batching and len(columns) == 1
    fits = is_sliced or ({*sizes} == {1} and all(is_own(i, n) for i, n in enumerate(rows)))
    picked = {*columns.get(len(rows), np.arange(2)).flat}
    if not fits or len(picked) != 1 or value.shape[: len(rows)] != tuple(rows):
        raise UnknownError("gather")
    ones = (1,) * (len(value.shape) - len(rows))
    column = int(picked.pop()) % shape[-1]  # a negative index counts from the end
    one = np.broadcast_to(a, a.shape[:-1] + shape[-1:])[..., column]
    return one.reshape(a.shape[:-1] + ones)


def _of_jaxnorm(value: Value, z: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return a result of jaxnorm's loss of logits z and labels, or a teacher's logits."""
    call = value.equation.params["call"]
    if call.spec.loss.teacher_softcap is not None:
        raise UnknownError(value.made_by)
    names = inspect.signature(function := getattr(loss, call.function)).parameters
    options = {name: getattr(call.spec.loss, name) for name in _OPTIONS if name in names}
    with jax.enable_x64(True):
        results = jax.tree.leaves(function(z, other, **options))
    siblings = [v for v in value.operands[0].users if v.equation is value.equation]
    return np.asarray(results[siblings.index(value)], float)


def _selected(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if len(cases) == 2:
        return np.where(which, *cases[::-1])
    return np.choose(which.astype(int), np.broadcast_arrays(*cases))


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and,
    "clamp": lambda low, a, high: np.minimum(np.maximum(a, low), high),
    "div": np.divide, "eq": np.equal, "erf": np.vectorize(math.erf, otypes=[float]),
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite,
    "le": np.less_equal, "log": np.log, "log1p": np.log1p, "lt": np.less,
    "logistic": lambda a: 1 / (1 + np.exp(-a)),
    "max": np.maximum, "min": np.minimum, "mul": np.multiply,
    "ne": np.not_equal, "neg": np.negative, "not": np.invert,
    "or": np.bitwise_or, "pow": np.power, "rsqrt": lambda a: 1 / np.sqrt(a),
    "select_n": _selected, "sign": np.sign, "sin": np.sin, "cos": np.cos, "sqrt": np.sqrt,
    "square": np.square, "sub": np.subtract, "tanh": np.tanh, "xor": np.bitwise_xor,
}  # fmt: skip

# Losses of jaxnorm that take logits, and their options.
_OURS = {
    "jaxnorm.kl_divergence",
    "jaxnorm.log_prob_and_entropy",
    "jaxnorm.softmax_cross_entropy_with_integer_labels",
}
_OPTIONS = ("label_smoothing", "z_loss", "logits_scale", "logit_softcap", "reverse")

# Elementwise primitives whose values depend on their parameters.
_OF_PARAMS: dict[str, Callable[[Value, np.ndarray], np.ndarray]] = {
    "convert_element_type": lambda value, a: (
        a.astype(float) if jnp.issubdtype(value.dtype, jnp.inexact) else a.astype(value.dtype)
    ),
    "integer_pow": lambda value, a: a ** float(value.equation.params["y"]),
}

# Primitives that return the elements of their first operand, in another shape or order.
_SHAPED: dict[str, Callable[..., np.ndarray]] = {
    **dict.fromkeys(NAMING, lambda value, a, is_row=True: a),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "slice": _sliced,
    "squeeze": lambda value, a, is_row=True: a.squeeze(value.equation.params["dimensions"]),
    "transpose": lambda value, a, is_row=True: a.transpose(value.equation.params["permutation"]),
}

# Reductions over the axes in the parameter "axes".
_REDUCED: dict[str, Callable[..., np.ndarray]] = {
    "argmax": lambda a, axes: np.argmax(a, axes[0]),
    "argmin": lambda a, axes: np.argmin(a, axes[0]),
    "reduce_and": np.all,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_or": np.any,
    "reduce_sum": np.sum,
}
