"""Values of a part of a traced program, with which `memory_report` verifies its advice.

A recogniser finds code by its primitives, which do not prove what the code computes. So advice is
given only if the code and its replacement return the same numbers: `Draw` evaluates the code in
float64, with random numbers in place of its inputs.
"""

import functools
import itertools
import math
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.tools.kept_arrays import NAMING, Program, Value, reached

# Number of elements in each axis of the rows of an input. Rows do not depend on one another.
_ROWS = 2

# Number of operations up to which an array is evaluated that is computed from integers alone.
_CONSTANT = 64

# Code and replacement agree up to a multiple of the rounding errors of float32, because literals in
# the program, such as epsilon, are rounded to float32.
_TOLERANCE = 64 * float(np.finfo(np.float32).eps)


class UnknownError(Exception):
    """The code has an operation that cannot be evaluated here."""


def agree(a: Any, b: Any) -> bool:
    """Return True if two arrays have the same finite values up to rounding errors of float32."""
    size = np.max(np.abs(b), initial=0.0)
    with np.errstate(all="ignore"):
        try:
            return bool(np.isfinite(size) and np.all(np.abs(a - b) <= _TOLERANCE * size))
        except ValueError:  # their shapes cannot be broadcast
            return False


def rows_of(shape: tuple[int, ...], axes: Container[int]) -> tuple[int, ...]:
    """Return a shape with fewer elements in all axes but `axes`, which keep their sizes."""
    return tuple(n if i in axes else min(n, _ROWS) for i, n in enumerate(shape))


class Draw:
    """The values of a program's arrays, for given values of some of them.

    Other arrays that the program does not compute from the given ones get random values, unless
    they are computed from literals and integers. An array may have the size 1 where the program has
    more elements, all of which are equal. Dtypes of floats are ignored: all are float64.

    Attributes:
      arrays: the values that are known so far.
      drawn: the arrays that got random values, and these values.
    """

    def __init__(self, given: dict[Value, np.ndarray], first: "Draw | None" = None) -> None:
        """Set the values of some arrays.

        Args:
          given: maps these arrays to their values.
          first: an earlier draw for the same arrays. Its random values are used again.
        """
        self.arrays: dict[Value, np.ndarray] = dict(given)
        self.drawn: dict[Value, np.ndarray] = {} if first is None else first.drawn
        self._dependent: dict[Value, None] = (
            reached(given, _users) if first is None else first._dependent
        )
        self._sizes = {n for a in given.values() for n in np.shape(a) if n > _ROWS}
        self._random = np.random.default_rng(len(self.drawn))

    def __call__(self, value: Value) -> np.ndarray:
        """Return the values of an array; raise `UnknownError` if they cannot be computed."""
        if value not in self.arrays:
            try:
                with np.errstate(all="ignore"):
                    self.arrays[value] = self._computed(value)
            except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
                # For example, sizes that do not fit: the rows depend on one another.
                raise UnknownError(value.made_by) from error
        return self.arrays[value]

    def _computed(self, value: Value) -> np.ndarray:
        if value.made_by == "literal":
            return _widened(np.asarray(value.number))
        function = _FUNCTIONS.get(value.made_by)
        if value not in self._dependent and (function is None or not _is_of_integers(value)):
            return self._leaf(value)
        if function is None:
            raise UnknownError(value.made_by)
        return function(value, *map(self, value.operands))

    def _leaf(self, value: Value) -> np.ndarray:
        if value not in self.drawn:
            shape = tuple(n if n in self._sizes else 1 for n in value.shape)
            if jnp.issubdtype(value.dtype, jnp.inexact):
                # Large numbers, too, for which functions such as relu6 differ from others.
                sizes = 10 ** self._random.uniform(0, 2, shape)
                self.drawn[value] = self._random.normal(size=shape) * sizes
            elif value.dtype == bool:
                self.drawn[value] = self._random.random(shape) < 0.5
            elif np.issubdtype(value.dtype, np.integer):  # an index: of one element of all rows
                index = self._random.integers(min(self._sizes, default=2))
                self.drawn[value] = np.full((1,) * len(value.shape), index)
            else:
                raise UnknownError(value.dtype.name)
        return self.drawn[value]


def _users(value: Value) -> list[Value]:
    return value.users


def draws(inputs: dict[Value, tuple[int, ...]], scales: Iterable[float] = (1.0,) * 3) -> list[Draw]:
    """Return draws with normally distributed values for inputs of some shapes.

    There is one draw for each number in `scales`, which multiplies the inputs. All other arrays
    have the same values in all draws.
    """
    random, made = np.random.default_rng(0), list[Draw]()
    for scale in scales:
        given = {value: scale * random.normal(size=shape) for value, shape in inputs.items()}
        made.append(Draw(given, made[0] if made else None))
    return made


def signature(computed: Sequence[Value]) -> Hashable:
    """Return an object that is equal for arrays that are computed by the same operations.

    It includes the arrays that are computed from their sums, up to arrays of the first one's size.
    """
    sums = [user for v in computed for user in v.users if user.made_by == "reduce_sum"]
    after = reached(sums, lambda v: [u for u in v.users if u.size < computed[0].size])
    index = {value: i for i, value in enumerate(dict.fromkeys((*computed, *after)))}

    def of(value: Value) -> Hashable:
        return index.get(value, (value.made_by, value.shape, str(value.number)))

    return tuple(
        (v.made_by, v.shape, v.dtype, str(v.equation and v.equation.params), *map(of, v.operands))
        for v in index
    )


def _is_of_integers(value: Value) -> bool:
    """Return True if an array is computed from literals, integers and booleans in a few operations.

    Examples are masks and one-hot arrays.
    """
    queue = [value]
    for v in queue:  # The list grows during the loop.
        is_known = v.made_by in _FUNCTIONS and not v.is_active
        is_leaf = v.made_by in ("literal", "iota") or not jnp.issubdtype(v.dtype, jnp.inexact)
        if not (is_known or is_leaf) or len(queue) > _CONSTANT:
            return False
        queue += [operand for operand in v.operands if is_known and operand not in queue]
    return True


def computed(function: Callable[..., Any], dtype: np.dtype, x: np.ndarray) -> np.ndarray | None:
    """Return the values of an elementwise function of JAX, with its constants in a dtype.

    Return None if they cannot be computed.
    """
    program = _program(function, np.dtype(dtype))
    (argument,) = [v for v in reached(program.outputs, lambda v: v.operands) if _is_argument(v)]
    try:
        return Draw({argument: x})(program.outputs[0])
    except UnknownError:
        return None


@functools.cache
def _program(function: Callable[..., Any], dtype: np.dtype) -> Program:
    return Program(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((3,), dtype)), 1, [True])


def _is_argument(value: Value) -> bool:
    return value.made_by == "argument"


def name_of(
    functions: dict[str, Callable[..., Any]],
    dtypes: Iterable[np.dtype],
    pairs: Iterable[tuple[np.ndarray, np.ndarray]],
) -> str | None:
    """Return the name of the function that computes y of x, for all pairs (x, y), or None.

    Args:
      functions: maps names to elementwise functions.
      dtypes: the dtypes that the constants of the functions may have.
      pairs: values of x and of y.
    """
    pairs = [*pairs]
    floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    for (name, function), dtype in itertools.product(functions.items(), floats):
        if all((f := computed(function, dtype, x)) is not None and agree(f, y) for x, y in pairs):
            return name
    return None


# --------------------------------------------------------------------------- values of primitives


def _widened(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.inexact) else a


def _whole(a: np.ndarray, shape: tuple[int, ...], axes: Iterable[int]) -> np.ndarray:
    """Return an array that has all elements of some axes; `shape` is its shape in the program."""
    return np.broadcast_to(a, [shape[i] if i in axes else n for i, n in enumerate(a.shape)])


def _reduced(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def reduce(value: Value, a: np.ndarray) -> np.ndarray:
        axes = value.equation.params["axes"]
        return function(_whole(a, value.operands[0].shape, axes), axis=tuple(axes))

    return reduce


def _cast(value: Value, a: np.ndarray) -> np.ndarray:
    return a.astype(float if jnp.issubdtype(value.dtype, jnp.inexact) else value.dtype)


def _broadcast(value: Value, a: np.ndarray) -> np.ndarray:
    """Insert axes of size 1, which stand for any number of equal elements."""
    shape = [1] * len(value.shape)
    for size, axis in zip(a.shape, value.equation.params["broadcast_dimensions"]):
        shape[axis] = size
    return a.reshape(shape)


def _reshaped(value: Value, a: np.ndarray) -> np.ndarray:
    old, new = value.operands[0].shape, value.shape
    equal = [m == n for m, n in zip(old, new)]
    first = equal.index(False) if False in equal else len(equal)
    equal = [m == n for m, n in zip(old[first:][::-1], new[first:][::-1])]
    last = equal.index(False) if False in equal else len(equal)
    inside = range(first, len(old) - last)
    middle = new[first : len(new) - last]
    if all(a.shape[i] == 1 for i in inside):
        middle = (1,) * len(middle)
    else:
        a = _whole(a, old, inside)
    return a.reshape(a.shape[:first] + middle + a.shape[len(old) - last :])


def _iota(value: Value) -> np.ndarray:
    axis = value.equation.params["dimension"]
    return np.arange(value.shape[axis]).reshape(
        [-1 if i == axis else 1 for i in range(len(value.shape))]
    )


def _joined(value: Value, *arrays: np.ndarray) -> np.ndarray:
    axis = value.equation.params["dimension"]
    whole = [_whole(a, v.shape, [axis]) for a, v in zip(arrays, value.operands)]
    others = np.broadcast_shapes(*[(*a.shape[:axis], 1, *a.shape[axis + 1 :]) for a in whole])
    shapes = [(*others[:axis], a.shape[axis], *others[axis + 1 :]) for a in whole]
    return np.concatenate([np.broadcast_to(a, s) for a, s in zip(whole, shapes)], axis)


def _picked(value: Value, a: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the elements of a row that a gather picks, if it picks one of each row."""
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
    ones = value.shape[len(rows) :]
    if not fits or len(picked) != 1 or value.shape != (*rows, *ones) or {*ones} - {1}:
        raise UnknownError("gather")
    one = np.broadcast_to(a, a.shape[:-1] + shape[-1:])[..., int(picked.pop())]
    return one.reshape(a.shape[:-1] + ones)


def _elementwise(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    return lambda value, *operands: np.asarray(function(*operands))


def _selected(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if len(cases) == 2:
        return np.where(which, *cases[::-1])
    return np.choose(which.astype(int), np.broadcast_arrays(*cases))


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and,
    "cbrt": np.cbrt, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh,
    "clamp": lambda low, a, high: np.minimum(np.maximum(a, low), high),
    "div": np.divide, "eq": np.equal, "erf": np.vectorize(math.erf),
    "erfc": np.vectorize(math.erfc), "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "floor": np.floor, "ge": np.greater_equal, "gt": np.greater, "is_finite": np.isfinite,
    "le": np.less_equal, "log": np.log, "log1p": np.log1p, "lt": np.less,
    "logistic": lambda a: 1 / (1 + np.exp(-a)),
    "max": np.maximum, "min": np.minimum, "mul": np.multiply,
    "ne": np.not_equal, "neg": np.negative, "not": np.invert,
    "one_minus_square": lambda a: 1 - a * a, "or": np.bitwise_or, "pow": np.power,
    "rsqrt": lambda a: 1 / np.sqrt(a), "select_n": _selected, "sign": np.sign,
    "sin": np.sin, "sinh": np.sinh, "sqrt": np.sqrt, "square": np.square,
    "sub": np.subtract, "tan": np.tan, "tanh": np.tanh, "xor": np.bitwise_xor,
}  # fmt: skip

# Maps the name of a primitive to a function that takes the value, and the values of its operands.
_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    **dict.fromkeys(NAMING, lambda value, a, *_: a),
    **{name: _elementwise(function) for name, function in _ELEMENTWISE.items()},
    "broadcast_in_dim": _broadcast,
    "concatenate": _joined,
    "convert_element_type": _cast,
    "gather": _picked,
    "integer_pow": lambda value, a: a ** float(value.equation.params["y"]),
    "iota": _iota,
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_sum": _reduced(np.sum),
    "reshape": _reshaped,
    "squeeze": lambda value, a: np.squeeze(a, value.equation.params["dimensions"]),
    "transpose": lambda value, a: np.transpose(a, value.equation.params["permutation"]),
}
