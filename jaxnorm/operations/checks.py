"""Checks of the public functions' arguments. Most checks also convert the argument.

Each error says which function and which argument is wrong, what was given, what was expected, and
how to fix it. Two arguments of the checks are texts for these errors: `function` is the name of the
public function, and `name` is the name of the argument.
"""

import contextlib
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls import backends
from jaxnorm.calls.rows import RowView
from jaxnorm_kernels.specs import FLOAT_DTYPES


class StandsForArray(Protocol):
    """An object that jax.numpy accepts as an array, such as an ``nnx.Param``."""

    def __jax_array__(self) -> Any: ...


# With `type` statements, signatures and help() show the short names of these aliases. With plain
# assignments, they would show the long types behind the names.
type ArrayLike = jax.typing.ArrayLike | StandsForArray
type Axis = int | Sequence[int] | None
type DTypeLike = jax.typing.DTypeLike

SAVE_MODES = ("output", "input")

_FLOAT_DTYPES = frozenset(map(jnp.dtype, FLOAT_DTYPES))


class _Kind(NamedTuple):
    """The arrays that an argument accepts.

    Attributes:
      has: function that takes a dtype, and returns True if the dtype is accepted.
      expected: a text that describes the accepted dtypes, for errors.
      numbers: a text that describes the accepted elements, for errors.
      cast: name of an accepted dtype, to which an error suggests a cast.
      lists: True if lists of numbers are accepted.
    """

    has: Callable[[Any], bool]
    expected: str
    numbers: str
    cast: str
    lists: bool = True


_FLOAT = _Kind(
    _FLOAT_DTYPES.__contains__,
    f"one of {', '.join(FLOAT_DTYPES)}",
    "floating-point numbers",
    "float32",
    lists=False,
)
_INTEGER = _Kind(
    lambda dtype: jnp.issubdtype(dtype, jnp.integer),
    "integers",
    "smaller ones, such as -1 for a label that is no class",
    "int32",
)
_BOOLEAN = _Kind(lambda dtype: dtype == np.bool_, "bool (True keeps an entry)", "booleans", "bool_")
_WEIGHTS = _Kind(
    lambda dtype: dtype == np.bool_ or dtype in _FLOAT_DTYPES,
    "bool (True keeps an entry) or a float dtype (weights)",
    "booleans or float weights",
    "bool_",
)
_SCALE = _Kind(
    lambda dtype: jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer),
    "a number or an array of floats",
    "a number",
    "float32",
)
_ANY = _Kind(lambda dtype: True, "numbers", "numbers", "float32", lists=False)


def float_array(function: str, name: str, value: ArrayLike | None) -> jax.Array:
    """Convert `value` to an array; raise TypeError unless its dtype is a supported float dtype."""
    return _array(function, name, value, _FLOAT)


def scale_array(function: str, name: str, value: ArrayLike) -> jax.Array:
    """Convert a scale of logits to an array; raise TypeError unless it has floats or integers."""
    return _array(function, name, value, _SCALE)


def any_array(function: str, name: str, value: ArrayLike) -> jax.Array:
    """Convert `value` to an array; raise TypeError if JAX does not support it."""
    return _array(function, name, value, _ANY)


def _array(function: str, name: str, value: Any, kind: _Kind, also: str = "") -> jax.Array:
    """Convert `value` to an array of the kind `kind`.

    Raise TypeError if JAX cannot convert it, or if its dtype is wrong. Raise ValueError if it has
    an integer that is too large for JAX. If `value` is an array of floats, the text `also` is
    appended to the error: it suggests a second fix.
    """
    if isinstance(value, jax.Array) and kind.has(value.dtype):
        return value
    is_array = isinstance(value, jax.typing.ArrayLike) or hasattr(value, "__jax_array__")
    array, cause = value, None
    try:
        if is_array or kind.lists:
            array = jnp.asarray(value)
            if kind.has(array.dtype):
                return array
    except (TypeError, ValueError, OverflowError) as error:
        cause = error
    is_integer = isinstance(value, int)
    if cause is not None and (is_integer or isinstance(cause, OverflowError)):
        # Do not show JAX's own message: it has every digit of the integer, and Python even refuses
        # to convert thousands of digits to text.
        raise ValueError(
            f"{function}: {name} has an integer that JAX's integers do not hold: "
            f"{_shown(value) if is_integer else cause}; expected {kind.numbers}"
        ) from cause
    given, expected = f"is a {type(value).__name__}", "an array"
    dtype = getattr(array, "dtype", None)
    if dtype is not None and not isinstance(value, np.ma.MaskedArray):
        given, expected = f"has dtype {dtype.name}", kind.expected
        if not getattr(dtype, "isnative", True):
            given = f"has dtype {dtype.str}, in another byte order than this machine's"
    fix = _conversion(name, value, kind.cast) + (also if dtype in _FLOAT_DTYPES else "")
    raise TypeError(f"{function}: {name} {given}; expected {expected}{fix}") from cause


def _conversion(name: str, value: Any, dtype: str) -> str:
    """Return a text that says how to convert `value` to an array of dtype `dtype`, for an error.

    The text is "" if no conversion works without a warning. (A conversion of complex numbers warns,
    because it drops the imaginary parts.) Each conversion is tried with float32 in place of
    `dtype`: `dtype` may be bool, and a conversion to bool works for any value.
    """
    for text, convert in (
        (f"{name}.astype(jnp.{dtype})", lambda: value.astype(np.float32)),
        (f"{name}.filled(0)", lambda: value.filled(0).astype(np.float32)),
        (f"jnp.asarray({name}, jnp.{dtype})", lambda: jnp.asarray(value, np.float32)),
    ):
        with contextlib.suppress(Exception), warnings.catch_warnings(action="error"):
            jnp.asarray(convert())
            return f"; convert it, e.g. {text}"
    return ""


def output_dtype(function: str, given: DTypeLike | None, default: np.dtype) -> np.dtype:
    """Check the argument ``dtype``, and return the output's dtype.

    `given` is the value of the argument. If it is None, the output's dtype is `default`.
    """
    return default if given is None else dtype(function, "dtype", given)


def dtype(function: str, name: str, given: DTypeLike) -> np.dtype:
    """Convert `given` to a NumPy dtype; raise TypeError unless it is a supported float dtype."""
    try:
        # None must be refused, but np.dtype(None) is float64. So pass the string "None" in place of
        # None: np.dtype("None") raises TypeError.
        resolved = np.dtype(given if given is not None else "None")
    except TypeError as error:
        raise TypeError(
            f"{function}: {name}={given!r} is no dtype; expected one of {', '.join(FLOAT_DTYPES)}"
        ) from error
    if not resolved.isnative:
        raise TypeError(
            f"{function}: {name}={resolved.str} has another byte order than this machine's; "
            f"expected a dtype in the machine's own, e.g. {resolved.name}"
        )
    if resolved.name not in FLOAT_DTYPES:
        raise TypeError(
            f"{function}: {name}={resolved.name}; expected one of {', '.join(FLOAT_DTYPES)}; "
            "cast the result afterwards if you need another"
        )
    if resolved.name == "float64" and not jax.config.jax_enable_x64:
        raise TypeError(
            f"{function}: {name}=float64 while 64-bit types are off; "
            'switch them on with jax.config.update("jax_enable_x64", True), or ask for float32'
        )
    return resolved


def product_dtype(x: np.dtype, weight: np.dtype) -> np.dtype:
    """Return the dtype to which `x` and `weight`, the dtypes of a matmul's operands, promote.

    The promotion follows JAX's standard rules, even if the user has disabled implicit promotion.
    """
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(x, weight))


def arithmetic_dtype(*dtypes: np.dtype) -> np.dtype:
    """Return the dtype of a function's arithmetic; `dtypes` are the dtypes of its arrays.

    The result is float64 if one of the arrays is float64, and otherwise float32.
    """
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


def axes(function: str, axis: Axis, shape: tuple[int, ...], of: str = "x") -> tuple[int, ...]:
    """Convert the argument ``axis`` to a sorted tuple of non-negative axes; None means all axes.

    `shape` is the shape of the array to which ``axis`` refers. `of` is this array's name in errors.
    """
    return tuple(sorted(axes_in_order(function, axis, shape, of)))


def axes_in_order(
    function: str, axis: Axis, shape: tuple[int, ...], of: str = "x"
) -> tuple[int, ...]:
    """Convert the argument ``axis`` to a tuple of non-negative axes, in the order given.

    None means all axes. The function `axes` describes the arguments.
    """
    ndim = len(shape)
    if axis is None:
        given: Sequence[int] = range(ndim)
    else:
        given = axis if isinstance(axis, Sequence) else (axis,)
    try:
        indices = [_index(a) for a in given]
    except TypeError as error:
        raise TypeError(
            f"{function}: axis={axis!r}; expected an integer or a tuple of integers"
        ) from error
    if not indices or not all(-ndim <= a < ndim for a in indices):
        wrong = "is out of range for" if indices else "names no axis of"
        # An array without axes, such as a single logit, needs an axis of size 1.
        works = not ndim and (axis is None or {*indices} in ({0}, {-1}))
        fix = f"; give {of} an axis, e.g. {of}[None]" if works else ""
        expected = f"axes from {-ndim} to {ndim - 1}" if indices and ndim else "at least one axis"
        raise ValueError(
            f"{function}: axis={_shown(axis)} {wrong} {of} with shape {shape}; expected {expected}"
            f"{fix}"
        )
    canonical = tuple(a % ndim for a in indices)
    if len(set(canonical)) != len(canonical):
        raise ValueError(
            f"{function}: axis={axis!r} names an axis of {of} with shape {shape} twice; "
            "name each axis once"
        )
    return canonical


def check_parameter(function: str, name: str, shape: tuple[int, ...], view: RowView) -> None:
    """Raise ValueError unless a parameter's shape fits x.

    The parameter must have an axis for each normalised axis of x, and may have other axes before
    these. It must broadcast to x's shape with the normalised axes moved to the end. `shape` is the
    parameter's shape, and `view` describes x.
    """
    expected = [view.shape[axis] for axis in view.others + view.axes]
    covered = tuple(expected[len(expected) - len(shape) :])
    if len(view.axes) <= len(shape) <= len(expected) and fits(shape, covered):
        return
    others = tuple(expected[: len(view.others)])
    groups = f", after axes that broadcast to {others}, or none" if others else ""
    raise ValueError(
        f"{function}: {name} has shape {shape}; expected {view.normalised}, the sizes of the "
        "normalised axes in the order of x (or 1, where it is the same along an axis)"
        f"{groups}{reshaping(name, shape, view.normalised, tuple(expected))}"
    )


def same_shape(
    function: str,
    name: str,
    shape: tuple[int, ...],
    expected: tuple[int, ...],
    why: str = "the shape of x",
    also: str = "",
) -> None:
    """Raise ValueError unless an array has the shape `expected`.

    In the error, the text `why` describes the expected shape. The text `also` suggests a fix for an
    array that can be neither broadcast nor reshaped to this shape.
    """
    if shape == expected:
        return
    array = _array_named(name)
    fix = f"; broadcast {name}, e.g. jnp.broadcast_to({array}, {expected})"
    if not fits((1,) * (len(expected) - len(shape)) + shape, expected):
        fix = f"; reshape {name}, e.g. {array}.reshape({expected})"
        fix = fix if math.prod(shape) == math.prod(expected) else also
    has = "have" if name == "labels" else "has"
    raise ValueError(f"{function}: {name} {has} shape {shape}; expected {expected}, {why}{fix}")


def reshaping(name: str, shape: tuple[int, ...], *targets: tuple[int, ...]) -> str:
    """Return a text for an error: how to reshape an array so that it broadcasts to a shape.

    `shape` is the array's shape. The reshaped array must broadcast to one of the shapes `targets`
    without new axes. If inserting and removing axes of size 1 is not enough, the text is "".
    """
    sizes = [size for size in shape if size != 1]
    for target in targets:
        for places in reversed([*itertools.combinations(range(len(target)), len(sizes))]):
            by_place = dict(zip(places, sizes))
            new = tuple(by_place.get(i, 1) for i in range(len(target)))
            if fits(new, target):
                return f"; reshape {name}, e.g. {_array_named(name)}.reshape({new})"
    return ""


def _array_named(name: str) -> str:
    """Return code for an error: the argument `name`, as an array if the user may pass a list."""
    return f"jnp.asarray({name})" if name in ("labels", "where") else name


def features(function: str, name: str, shape: tuple[int, ...], size: str) -> None:
    """Raise ValueError if the first operand of a matmul has no axes.

    `shape` is the shape of this operand. `size` is a symbol, such as "d", which stands for the size
    of the operand's last axis in the error.
    """
    if not shape:
        raise ValueError(
            f"{function}: {name} has shape (); expected (..., {size}), a vector of features for "
            "each position"
        )


def weight(
    function: str,
    shape: tuple[int, ...],
    x_shape: tuple[int, ...],
    *,
    of: str = "x",
    also: str = "",
    classes: bool = False,
) -> None:
    """Raise ValueError unless a weight's shape fits the first operand of the matmul.

    `shape` is the weight's shape. `x_shape` is the shape of the first operand, and `of` is its name
    in the error. The text `also` is appended to the error: it suggests a second fix. If `classes`
    is True, the columns of the weight are classes, and there must be at least one.
    """
    features, least = x_shape[-1], int(classes)
    if len(shape) == 2 and shape[0] == features and shape[1] >= least:
        return
    name = "teacher_weight" if of == "teacher_x" else "weight"
    fix = ""
    if len(shape) == 2 and shape[1] == features and shape[0] >= least:
        fix = f"; transpose it, e.g. {name}.T"
    elif len(shape) > 2 and shape[0] == features and 0 not in shape:
        fix = f"; reshape it, e.g. {name}.reshape({features}, -1)"
    columns, number = ("V", "one class or more") if classes else ("n", "any number of features")
    raise ValueError(
        f"{function}: {name} has shape {shape}; expected ({features}, {columns}), the last axis of "
        f"{of} {x_shape} by {number}{fix}{also}"
    )


def boolean(function: str, name: str, value: ArrayLike, also: str = "") -> jax.Array:
    """Convert `value` to an array; raise TypeError unless it is boolean.

    If `value` has floats, the text `also` is appended to the error: it suggests a second fix.
    """
    return _array(function, name, value, _BOOLEAN, also)


def weights(function: str, name: str, value: ArrayLike, dtype: np.dtype) -> jax.Array:
    """Convert `value` to an array: a boolean mask, or float weights.

    Float weights are cast to `dtype`, and their gradient is 0. Raise TypeError for other dtypes,
    such as integers.
    """
    array = _array(function, name, value, _WEIGHTS)
    return array if array.dtype == bool else jax.lax.stop_gradient(array).astype(dtype)


def integer_array(function: str, name: str, value: Any) -> jax.Array:
    """Convert `value` to an array; raise TypeError unless its dtype is an integer dtype."""
    if isinstance(value, (np.ndarray, np.generic)) and not jax.config.jax_enable_x64:
        value = _in_32_bits(value)
    return _array(function, name, value, _INTEGER)


def not_one_hot(
    function: str, labels: ArrayLike, logits: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Raise ValueError if labels have the shape of the logits, as one-hot labels do.

    `logits` is the shape of the logits. `axes` are the axes of the logits that index the classes.
    """
    shape = getattr(labels, "shape", None)
    if shape != logits:
        return
    expected = tuple(size for axis, size in enumerate(logits) if axis not in axes)
    axis = axes[0] if len(axes) == 1 else axes
    fix = f"jnp.argmax(labels, axis={axis})"
    if len(axes) > 1:
        fix = f"jnp.argmax of labels with their axes {axes} reshaped to one"
    raise ValueError(
        f"{function}: labels have the shape {shape} of the logits, as one-hot labels have; "
        f"expected {expected}, the number of a class for each position; convert them, e.g. {fix}"
    )


def _in_32_bits(value: np.ndarray | np.generic) -> np.ndarray | np.generic:
    """Clip 64-bit labels to the range from -1 to the largest 32-bit integer.

    If 64-bit types are disabled, JAX converts labels to 32 bits. An integer that is too large then
    wraps around, and may become a valid label. The clip prevents this.
    """
    if value.dtype.name not in ("int64", "uint64") or isinstance(value, np.ma.MaskedArray):
        return value
    return np.clip(value, -1 if value.dtype.kind == "i" else 0, 2**31 - 1)


def broadcastable(
    function: str, name: str, array: jax.Array, shape: tuple[int, ...], of: str = "x's"
) -> jax.Array:
    """Prepend axes of size 1 to `array`, until it has one axis for each size in `shape`.

    Raise ValueError if the array does not broadcast to `shape`. In the error, `of` says whose shape
    `shape` is, such as "x's".
    """
    padded = (1,) * (len(shape) - array.ndim) + array.shape
    if not fits(padded, shape):
        raise ValueError(
            f"{function}: {name} has shape {array.shape}; expected a shape that broadcasts to "
            f"{of} shape {shape} without enlarging it{reshaping(name, array.shape, shape)}"
        )
    return array.reshape(padded)


def fits(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Return True if an array of shape `shape` broadcasts to the shape `into` without new axes.

    The two shapes then have the same number of axes, and each axis in `shape` has the same size as
    in `into`, or size 1.
    """
    return len(shape) == len(into) and all(own in (1, n) for own, n in zip(shape, into))


def number(
    function: str,
    name: str,
    value: float,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
) -> float:
    """Convert `value` to a Python float; raise an error unless it is finite and within limits."""
    _refuse_traced(function, name, value, "number")
    try:
        if _is_boolean(value):
            raise TypeError("a boolean is no number")
        given = math.ldexp(value, 0)  # Unlike float(), ldexp rejects strings.
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{function}: {name} is a {type(value).__name__}; expected a number"
        ) from error
    except OverflowError:
        given = math.inf
    if not (math.isfinite(given) and minimum <= given <= maximum):
        limits = f" of at least {minimum:g}" if minimum > -math.inf else ""
        if maximum < math.inf:
            limits = f" from {minimum:g} to {maximum:g}"
        raise ValueError(f"{function}: {name}={_shown(value)}; expected a finite number{limits}")
    return given


def positive(function: str, name: str, value: float) -> float:
    """Convert `value` to a Python float; raise an error unless it is finite and above 0."""
    given = number(function, name, value)
    if given <= 0:
        raise ValueError(f"{function}: {name}={_shown(value)}; expected a number above 0")
    return given


def finite_in(
    function: str,
    dtype: np.dtype,
    numbers: Mapping[str, float],
    *,
    underflow: bool = True,
) -> None:
    """Raise ValueError unless all numbers are finite after a cast to `dtype`.

    If `underflow` is False, also raise ValueError for a nonzero number that the cast rounds to 0.
    `dtype` is the dtype of the arithmetic. `numbers` maps the names of options to their values.
    """
    for name, value in numbers.items():
        with np.errstate(over="ignore", under="ignore"):
            rounded = dtype.type(value)
        if not np.isfinite(rounded) or (value and not rounded and not underflow):
            info = np.finfo(dtype)
            least = "" if underflow else f"from {info.smallest_subnormal:.2g} "
            raise ValueError(
                f"{function}: {name}={value!r} is {rounded} in {dtype.name}, the dtype of the "
                f"arithmetic; expected a magnitude {least}up to {info.max:.2g}, or float64 arrays"
            )


def integer(function: str, name: str, value: int, unit: str) -> int:
    """Convert `value` to a Python integer; raise an error unless it is at least 1.

    `unit` names what the integer counts, such as "rows". It is used in the error message.
    """
    _refuse_traced(function, name, value, "integer")
    try:
        given = _index(value)
    except TypeError as error:
        raise TypeError(
            f"{function}: {name}={value!r}; expected a number of {unit}, a Python integer, or None"
        ) from error
    if given < 1:
        raise ValueError(
            f"{function}: {name}={_shown(value)}; expected a number of {unit} of at least 1; leave "
            f"{name} out to let jaxnorm choose"
        )
    return given


def flag(function: str, name: str, value: bool) -> bool:
    """Convert `value` to a Python boolean; raise TypeError unless it is True or False."""
    _refuse_traced(function, name, value, "boolean")
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{function}: {name}={value!r} is a {type(value).__name__}; expected True or False"
        )
    return bool(value)


def _refuse_traced(function: str, name: str, value: object, kind: str) -> None:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{function}: {name} is a traced value; expected a Python {kind}, because it is part "
            "of the compiled program; mark it static in jax.jit"
        )


def _index(value: int) -> int:
    """Convert `value` to a Python integer; raise TypeError unless it is an integer.

    A boolean raises TypeError too, although Python accepts booleans as indices.
    """
    if _is_boolean(value):
        raise TypeError("a boolean is no index")
    return operator.index(value)


def _is_boolean(value: object) -> bool:
    return isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_


def _shown(value: object) -> str:
    """Return the `repr` of a value, for an error.

    For an integer of more than 64 bits, return a text with its number of bits instead.
    """
    if isinstance(value, int) and value.bit_length() > 64:
        return f"(an integer of {value.bit_length()} bits)"
    return repr(value)


def one_of(function: str, name: str, value: str | None, valid: Sequence[str | None]) -> None:
    """Raise ValueError unless `value` is an element of `valid`."""
    # Check the type first: if `value` were an array, `in` would compare each of its elements with
    # the strings.
    if not isinstance(value, str | None) or value not in valid:
        raise ValueError(
            f"{function}: {name}={value!r}; expected one of {', '.join(map(repr, valid))}"
        )


def implementation(function: str, name: str | None) -> None:
    """Raise ValueError unless `name` is None or the name of an implementation.

    Also raise ValueError if the implementation cannot be imported.
    """
    if name is None:
        return
    one_of(function, "implementation", name, (*backends.MODULES,))
    try:
        backends.implementation(name)
    except ImportError as error:
        raise ValueError(
            f"{function}: implementation={name!r} cannot be imported: {error}; leave "
            "implementation out to let jaxnorm choose"
        ) from error
