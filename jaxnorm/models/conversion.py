"""Code that the conversions of existing linen, nnx and equinox models share.

In this module, "the package" is Flax or equinox. A conversion makes the package's norms run
jaxnorm's functions. Some norms keep the package's code because of their class or their options.
Some converted norms must save their input instead of their output. One log line lists the norms of
both kinds, with the reasons.
"""

import collections
import contextlib
import copyreg
import functools
import importlib.util
import inspect
import logging
import pickle
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxnorm.operations import checks
from jaxnorm.tools import check_params
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save


@contextlib.contextmanager
def needed(package: str, by: str) -> Iterator[None]:
    """Raise ImportError, with the command that installs a package, if it is not installed.

    Inside this context, a module imports the package. `by` says which modules need it.
    """
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{by}, which is not installed; "
            f'install it, from a checkout of jaxnorm, with: pip install -e ".[{package}]"'
        )
    yield


def are_known(parameters: Iterable[Any]) -> bool:
    """Return True if this process can read the values of all parameters in `parameters`."""
    return all(_values(parameter) is not None for parameter in parameters)


def why_input(parameters: Collection[Any], y_dtype: Any = None) -> str | None:
    """Return the reason why a norm with the given parameters must save its input, not its output.

    The result is None if the norm may save its output, or if a parameter's values are unknown.

    Args:
      parameters: scale and, if the norm has one, bias.
      y_dtype: dtype of the norm's output. None for the common dtype of the parameters.
    """
    if y_dtype is None:
        scale, *bias = parameters
        y_dtype = checks.product_dtype(scale.dtype, (bias or [scale])[0].dtype)
    y_dtype = jax.dtypes.canonicalize_dtype(y_dtype)
    values = [known for known in map(_values, parameters) if known is not None]
    if len(values) < len(parameters) or len({a.shape for a in values}) > 1:
        return None
    scale, *bias = values
    lost = check_params.columns_lost(scale, bias[0] if bias else None, y_dtype)
    if not lost:
        return None
    where = f"in {lost} of {scale.size} columns"
    if not (bias and bias[0].any()):
        return f"scales too small for {y_dtype.name} {where}"
    return f"scales of 0, or far below the bias, {where}"


def _values(parameter: Any) -> np.ndarray | None:
    """Return the values of a float parameter, or None if this process cannot read them.

    A tracer has a value if it comes from `jax.grad` outside `jax.jit`.
    """
    if isinstance(parameter, jax.core.Tracer):
        parameter = parameter.to_concrete_value()
    if isinstance(parameter, jax.Array):
        whole = parameter.is_fully_addressable or parameter.is_fully_replicated
        # `jax.device_get` is an explicit transfer, which `jax.transfer_guard` allows by default.
        parameter = jax.device_get(parameter) if whole and not parameter.is_deleted() else None
    is_known = isinstance(parameter, np.ndarray) and parameter.dtype.name in FLOAT_DTYPES
    return parameter if is_known else None


# The fields that jaxnorm's norm modules have in addition to the fields of Flax or equinox, with
# their defaults.
SETTINGS = {"save": "output", "implementation": None, "scale_offset": 0.0}


def init_of(base: type, **added: Any) -> Any:
    """Return an ``__init__`` with the arguments of `base`, a norm class of Flax or equinox.

    It also has the keyword arguments `SETTINGS` and `added`, which become fields of the module.
    `inspect.signature` and ``help`` list all arguments, with the defaults in the installed version
    of Flax or equinox.
    """
    added = SETTINGS | added

    def __init__(self: Any, *args: Any, **fields: Any) -> None:  # noqa: N807
        for name, default in added.items():
            setattr(self, name, fields.pop(name, default))
        base.__init__(self, *args, **fields)  # type: ignore[misc]

    shown = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    ours = [keyword(name, default=default) for name, default in added.items()]
    theirs = [p for p in shown if p.kind is not p.VAR_KEYWORD]
    vars(__init__)["__signature__"] = inspect.Signature([*theirs, *ours])
    return __init__


def check_offset(norm: Any, call: str, remedy: str) -> None:
    """Raise ValueError if a norm that runs the package's own code has a scale_offset.

    The package's code would ignore the offset. The error says with `call` how the package's code is
    called, and with `remedy` what a user can do instead.
    """
    if norm.scale_offset:
        raise ValueError(
            f"{type(norm).__name__}: scale_offset={norm.scale_offset} {call}, which adds no "
            f"offset; {remedy}, or add the offset to the parameter"
        )


def settings_of(norm: Any) -> dict[str, Any]:
    """Return the values of the fields `SETTINGS` of one of jaxnorm's norm modules."""
    return {name: getattr(norm, name) for name in SETTINGS}


def _checked(function: str, calls: Any, base: type, package: str) -> dict[type, Callable[..., Any]]:
    """Return the argument ``calls`` of a conversion; raise TypeError or ValueError if it is wrong.

    `function` is the name of the public function that converts a model, and `package` is the name
    of a package, such as "equinox". Both are used in error messages. The keys of ``calls`` must be
    subclasses of `base`, the package's base class of modules.
    """
    expected = f"expected a dictionary {{class of {package}: function(module, *args, **kwargs)}}"
    if not (calls is None or isinstance(calls, Mapping)):
        raise TypeError(f"{function}: calls is a {type(calls).__name__}; {expected}")
    for kind, replacement in (calls or {}).items():
        if not isinstance(kind, type):
            raise TypeError(f"{function}: calls has the key {kind!r}, not a class; {expected}")
        if not issubclass(kind, base):
            raise ValueError(
                f"{function}: calls has {kind.__module__}.{kind.__qualname__}, which is not a "
                f"{package} module; {expected}"
            )
        if not callable(replacement):
            raise TypeError(
                f"{function}: calls[{kind.__name__}] is a {type(replacement).__name__}; "
                "expected a function(module, *args, **kwargs)"
            )
    return dict(calls or {})


# A function whose argument is a norm, and whose result is a reason (as text) or None.
Why = Callable[[Any], str | None]


class Report:
    """The checked arguments of a conversion, and a record of what it does with a model's modules.

    `log` logs the record as one line.

    Attributes:
      save: the user's argument ``save``.
      calls: the user's argument ``calls``.
      kinds: the classes of all modules that were recorded.
      norms: paths of the norms whose class is a norm class of the package, or the user's subclass
        of such a class.

    The other attributes are dicts. Their keys are the paths of modules of one kind, and their
    values are texts:

      kept: norms that save their input instead of their output, with the reason.
      left: norms that keep the package's code, with the reason.
      unknown: norms whose parameters are not in the values that the user has passed, with a text
        that says so.
      applied: modules whose ``__call__`` a function of ``calls`` replaces, with the name of their
        class.
      subclasses: modules whose class is a subclass of a class in ``calls``. They are not changed,
        and the text says so.
      own: norms whose class is the user's subclass of a norm of the package, with the name of this
        class. They are not converted.
      others: norms of the user's other classes, with the name of their class.
    """

    def __init__(
        self,
        function: str,
        base: type,
        classes: Mapping[Any, type],
        save: Save,
        implementation: Name | None,
        calls: Any,
    ) -> None:
        """Check the arguments of a conversion.

        Args:
          function: name of the conversion, such as "nnx.convert".
          base: the base class of the package's modules.
          classes: maps the norm classes of the package to jaxnorm's norm classes.
          save, implementation, calls: the user's arguments.
        """
        library, _, name = function.partition(".")
        checks.one_of(name, "save", save, checks.SAVE_MODES)
        checks.implementation(name, implementation)
        self.calls = _checked(name, calls, base, library)
        self._function, self._classes = function, classes
        self._package = "equinox" if library == "equinox" else "Flax"
        self.save, self._implementation = save, implementation
        self.kinds: set[type] = set()
        self.norms: set[str] = set()
        self.left, self.kept, self.unknown = dict[str, str](), dict[str, str](), dict[str, str]()
        self.applied, self.subclasses = dict[str, str](), dict[str, str]()
        self.own, self.others = dict[str, str](), dict[str, str]()

    def function_of(self, kind: type, path: str) -> Callable[..., Any] | None:
        """Record a module of class `kind`; return the function to replace ``__call__``, or None."""
        kind = original(kind)
        self.kinds.add(kind)
        base = next((k for k in self.calls if issubclass(kind, k)), None)
        if kind in self.calls:
            self.applied[path] = kind.__name__
        elif base is not None and not kind.__module__.startswith("jaxnorm"):
            why = f"{kind.__name__} is a subclass of {base.__name__}, which calls has"
            self.subclasses[path] = why
        return self.calls.get(kind)

    def converted_class(self, module: Any, path: str, why_left: Why) -> type | None:
        """Record a module if it is a norm of the package; return its new class, or None.

        A subclass of a norm class may override code. So its norms are not converted, unless the
        body of the subclass is empty. For all other norms of the package, `why_left` decides: it
        returns the reason not to convert a norm, or None.
        """
        base = next((base for base in self._classes if isinstance(module, base)), None)
        if base is None or isinstance(module, self._classes[base]) or path in self.subclasses:
            return None
        self.norms.add(path)
        kind = type(module)
        if all(map(_adds_nothing, reversed(kind.__mro__[: kind.__mro__.index(base)]))):
            why = why_left(module)
        else:
            self.own[path] = kind.__name__
            why = f"{kind.__name__} is a subclass of {self._package}'s {base.__name__}, with code"
            why += " of its own"
        if why is None:
            return self._classes[base]
        self.left[path] = why
        return None

    def change(
        self, module: Any, path: str, why_left: Why, why_input: Why
    ) -> tuple[type, dict[str, Any]] | None:
        """Record a module of a model; return its new class and the fields to add to it.

        The result is None if the module is not changed. `why_input` returns the reason why a norm
        must save its input, or None.
        """
        function = self.function_of(type(module), path)
        if function is not None:
            return with_call(type(module), function), {}
        kind = self.converted_class(module, path, why_left)
        if kind is None:
            return None
        return kind, self.settings(path, why_input(module) if self.save == "output" else None)

    def settings(self, path: str, why_input: str | None) -> dict[str, Any]:
        """Return the fields `SETTINGS` of a converted norm; record it if it must save its input.

        `why_input` is the reason why the norm must save its input, or None.
        """
        if why_input is not None:
            self.kept[path] = why_input
        save = self.save if why_input is None else "input"
        return dict(zip(SETTINGS, (save, self._implementation, 0.0)))

    def note(self, kind: type, path: str, parameters: Iterable[Any]) -> None:
        """Record a module without submodules if it is a norm, and the user defines its class.

        The module counts as a norm if the name of its class ends in "norm", and if no parameter has
        more than two axes: one of stacked layers, and one of columns.
        """
        library, _, _ = kind.__module__.partition(".")
        is_own = library not in ("equinox", "flax", "jaxnorm")
        is_new = path not in self.subclasses and not issubclass(kind, tuple(self._classes))
        is_named = kind.__name__.lower().endswith("norm")
        if is_own and is_new and is_named and all(np.ndim(a) <= 2 for a in parameters):
            self.others[path] = kind.__name__

    def log(self, none: str) -> None:
        """Log one line: a warning if a module was not converted, or must save its input.

        If there is no reason for a warning, a line of the level INFO lists the modules that call
        functions of ``calls``. If there are no such modules either, nothing is logged. `none` is
        the text for a model that has no norm of the package.
        """
        of = f"of {len(self.norms)} norms"
        has_norms = any(issubclass(kind, tuple(self._classes)) for kind in self.kinds)
        absent = [k.__name__ for k in self.calls if k not in self.kinds]
        names = collections.Counter(self.others.values())
        counts = ", ".join(f"{name} ({count})" for name, count in names.items())
        to_convert = [f"{n}: function" for n in dict.fromkeys((*self.own.values(), *names))]
        lists = {
            f"{of} are left to {self._package}": self.left,
            f'{of} keep their input, as with save="input"': self.kept,
            f"{of} were not looked at": self.unknown,
            "modules are left as they are": self.subclasses,
        }
        sentences = {
            f"{none}; norms of other classes can call jaxnorm.layer_norm and jaxnorm.rms_norm, by "
            "calls={class: function}": not (has_norms or self.applied),
            **{f"{len(paths)} {what}: {listed(paths)}": paths for what, paths in lists.items()},
            f"calls has classes that were not found: {', '.join(absent)}": absent,
            f"norms of other classes are left as they are: {counts}": names,
            f"To convert such classes, pass calls={{{', '.join(to_convert)}}}": to_convert,
        }
        said = [sentence for sentence, applies in sentences.items() if applies]
        level = logging.WARNING if said else logging.INFO
        if self.applied:
            applied = f"{len(self.applied)} modules call functions of calls: {listed(self.applied)}"
            said.insert(0, applied)
        if said:
            _LOGGER.log(level, "jaxnorm.%s: %s", self._function, ". ".join(said))


def _adds_nothing(kind: type) -> bool:
    """Return True if a class has one base class, and an empty body: neither methods nor fields."""
    base, *others = kind.__bases__
    names = vars(kind).keys() - vars(_empty_subclass(base)).keys()
    # Annotations alone have no effect, because no code of the subclass reads new fields.
    return not others and all(name.startswith("__annot") for name in names)


@functools.cache
def _empty_subclass(base: type) -> type:
    """Return a subclass of `base` with an empty body, as an example of such a class.

    Its attributes are those that Python and `base` add to every subclass.
    """

    class Empty(base):  # type: ignore[misc]
        """A class with nothing but a docstring."""

    return Empty


def identity(function: Any) -> Any:
    """Return a hashable value that is equal for functions with the same code and the same data.

    So a lambda that is evaluated again in each training step counts as one function. The data are
    the default values of arguments, and variables of enclosing functions. Numbers, strings, None
    and tuples of these are compared by value, other data by identity.
    """
    if isinstance(function, functools.partial):
        options = tuple(sorted(function.keywords.items()))
        return "partial", identity(function.func), _of_data((function.args, options))
    if isinstance(function, types.MethodType):  # Methods of one object are equal.
        return function
    if not isinstance(function, types.FunctionType):
        return _Same(function)
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable of the enclosing function that is not set yet
        return _Same(function)
    defaults = function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items()))
    return function.__code__, _Same(function.__globals__), _of_data((*defaults, *cells))


def _of_data(data: Any) -> Any:
    if isinstance(data, tuple):
        return tuple(map(_of_data, data))
    is_plain = data is None or isinstance(data, (bool, int, float, str))
    return (type(data), data) if is_plain else _Same(data)


class _Same:
    """An object that is compared by identity. It is kept alive, so that its id is not reused."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.of is other.of


def with_call(kind: type, function: Callable[..., Any]) -> type:
    """Return a subclass of `kind` whose ``__call__`` is `function`.

    If `kind` is itself a result of this function, the class from which it was derived is used
    instead. For equal arguments, the same class is returned.
    """
    kind = original(kind)
    key = kind, identity(function)
    made = _WITH_CALLS.get(key)
    # Variables of the enclosing function may have changed since the class was made.
    if made is None or identity(vars(made)[_MADE_OF][1]) != key[1]:
        contents = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        contents |= {"__call__": call, _MADE_OF: (kind, function)}
        made = _metaclass(type(kind))(kind.__name__, (kind,), contents)
        _WITH_CALLS[key] = made
    return made


def original(kind: type) -> type:
    """Return the class from which `with_call` derived `kind`; return other classes unchanged."""
    return vars(kind).get(_MADE_OF, (kind,))[0]


@functools.cache
def _metaclass(kind: type) -> type:
    """Return a subclass of the metaclass `kind` whose classes are pickled by `_reduced`."""
    made = type(kind.__name__, (kind,), {})
    copyreg.pickle(made, _reduced)
    return made


def _reduced(made: type) -> tuple[Callable[..., type], tuple[Any, ...]]:
    """Return a function and its arguments, with which `pickle` restores a class of `with_call`.

    If the function that replaces ``__call__`` cannot be pickled (a lambda, for example), `pickle`
    restores the original class instead.
    """
    kind, function = vars(made)[_MADE_OF]
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        text = "a %s is pickled without its function of calls, %r"
        _LOGGER.warning(text, kind.__name__, function)
        return original, (kind,)
    return with_call, (kind, function)


# Name of the attribute in which a class made by `with_call` stores a pair: the class from which it
# was derived, and the function that is called.
_MADE_OF = "_jaxnorm_made_of"
# A cache, so that equal models have equal classes, and `jax.jit` traces once. A key is a pair: the
# original class, and the `identity` of the function.
_WITH_CALLS: weakref.WeakValueDictionary[tuple[type, Any], type] = weakref.WeakValueDictionary()

_LOGGER = logging.getLogger("jaxnorm")
# Enable the lines of the level INFO. By default, the logger uses the root logger's level, WARNING,
# and drops these lines. (If the user adds no handler, Python still prints only warnings.)
_LOGGER.setLevel(_LOGGER.level or logging.INFO)


def listed(modules: Mapping[str, str]) -> str:
    """Return a text with the paths of modules, each with the reason why it is listed.

    Modules whose paths and reasons differ only in numbers share an entry, so that the text has one
    entry for each kind of module in a model of many layers.
    """
    groups = collections.defaultdict[tuple[str, ...], list[tuple[str, str]]](list)
    for module in modules.items():
        groups[tuple(re.sub(r"\d+", "*", text) for text in module)].append(module)
    entries = []
    for pattern, members in groups.items():
        same = ({*texts} for texts in zip(*members))
        path, why = (t.pop() if len(t) == 1 else p for t, p in zip(same, pattern))
        times = f", {len(members)} times" if len(members) > 1 else ""
        entries.append(f"{path or 'the module itself'} ({why}{times})")
    return "; ".join(entries)
