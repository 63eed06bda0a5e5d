"""Code that the conversions of existing linen, nnx and equinox models share.

A conversion makes the norms of a package (Flax or equinox) run jaxnorm's functions. Some norms keep
the package's code because of their class or their options. Some converted norms must save their
input instead of their output. One log line lists the norms that keep the package's code, and the
norms that save their input.
"""

import collections
import copyreg
import functools
import inspect
import logging
import pickle
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxnorm.operations import checks
from jaxnorm.tools import check_params
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save


def arguments_of[**P](
    base: type, settings: Callable[..., None] | None = None
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that shows the arguments of `base` in the signature of an ``__init__``.

    The decorated ``__init__`` takes them as ``**fields`` and passes them on. `inspect.signature`
    and ``help`` then list all of them, with the defaults of the installed version of the package,
    and the keyword arguments of `settings`, which is the decorated ``__init__`` by default.
    """

    def with_signature(init: Callable[P, None]) -> Callable[P, None]:
        shown = dict(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
        shown = {name: p for name, p in shown.items() if p.kind is not p.VAR_KEYWORD}
        own = inspect.signature(settings or init).parameters
        shown |= {name: p for name, p in own.items() if p.kind is p.KEYWORD_ONLY}
        vars(init)["__signature__"] = inspect.Signature([*shown.values()])
        return init

    return with_signature


def are_known(parameters: Iterable[Any]) -> bool:
    """Return True if the values of all these parameters can be read in this process."""
    return all(_values(parameter) is not None for parameter in parameters)


def why_input(parameters: Collection[Any], y_dtype: Any = None) -> str | None:
    """Return the reason why a norm with these parameters must save its input, not its output.

    The result is None if the norm may save its output, or if the parameters' values are unknown.

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


class Calls(dict[type, Callable[..., Any]]):
    """The argument ``calls`` of a conversion: maps a class to what replaces its ``__call__``.

    Two objects are equal if they have the same functions for the same classes.
    """

    def __init__(self, function: str, calls: Any, base: type, package: str) -> None:
        """Check the argument ``calls``; raise TypeError or ValueError if it is wrong.

        `function` (the name of the public function that converts a model) and `package` (such as
        "equinox") are used in error messages. The keys of ``calls`` must be subclasses of `base`,
        the package's base class of modules.
        """
        expected = (
            f"expected a dictionary {{class of {package}: function(module, *args, **kwargs)}}"
        )
        if not (calls is None or isinstance(calls, Mapping)):
            raise TypeError(f"{function}: calls is a {type(calls).__name__}; {expected}")
        super().__init__(calls or {})
        for kind, replacement in self.items():
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
        self._identities = frozenset((k, identity(f)) for k, f in self.items())

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self._identities)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calls) and self._identities == other._identities


class Report:
    """The checked arguments of a conversion, and a record of what it does with a model's modules.

    `log` logs the record as one line. The dicts map paths of modules to reasons, or to the names of
    classes.

    Attributes:
      calls: the user's functions.
      modules: full names of the classes of all modules.
      has_norms: True if there is a norm of the package's classes or of jaxnorm's.
      norms: paths of the package's norms.
      left: norms that keep the package's code.
      kept: norms that save their input instead of their output.
      unknown: norms whose parameters were not found in the values that the user has passed.
      applied: modules whose ``__call__`` is replaced by a function of ``calls``.
      subclasses: modules of subclasses of classes in ``calls``. They are not changed.
      others: modules of the user's own norm classes, which are not in ``calls``.
      own: names of the user's norm classes that are not converted.
    """

    def __init__(
        self,
        function: str,
        package: str,
        base: type,
        classes: Mapping[type, type],
        save: Save,
        implementation: Name | None,
        calls: Any,
    ) -> None:
        """Check the arguments of a conversion.

        Args:
          function: name of the conversion, such as "nnx.convert".
          package: name of the package, such as "Flax".
          base: the base class of the package's modules.
          classes: maps the norm classes of the package to jaxnorm's.
          save, implementation, calls: the user's arguments.
        """
        library, _, name = function.partition(".")
        checks.one_of(name, "save", save, checks.SAVE_MODES)
        checks.implementation(name, implementation)
        self.calls = Calls(name, calls, base, library)
        self._function, self._package, self._classes = function, package, classes
        self._save = save
        self.modules: set[str] = set()
        self.has_norms = False
        self.norms: set[str] = set()
        self.left: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self.applied: dict[str, str] = {}
        self.subclasses: dict[str, str] = {}
        self.others: dict[str, str] = {}
        self.own: dict[str, None] = {}

    def function_of(self, kind: type, path: str) -> Callable[..., Any] | None:
        """Record a module of class `kind`; return what replaces its ``__call__``, or None."""
        kind = original(kind)
        self.modules.add(_full_name(kind))
        if kind in self.calls:
            self.applied[path] = kind.__name__
            return self.calls[kind]
        base = next((k for k in self.calls if issubclass(kind, k)), None)
        if base is not None and not kind.__module__.startswith("jaxnorm"):
            why = f"{kind.__name__} is a subclass of {base.__name__}, which calls has"
            self.subclasses[path] = why
        return None

    def is_convertible(self, module: Any, path: str) -> bool:
        """Return True for a norm of the package, unless it is of a subclass of one in ``calls``."""
        is_norm = isinstance(module, tuple(self._classes))
        self.has_norms |= is_norm
        is_ours = isinstance(module, tuple(self._classes.values()))
        return is_norm and not is_ours and path not in self.subclasses

    def is_left(self, norm: Any, path: str, why_left: Callable[[Any], str | None]) -> bool:
        """Record a norm of the package; return True if it is left to the package.

        A subclass may override code, so its norms are left. `why_left` returns the reason to leave
        another norm, or None.
        """
        self.norms.add(path)
        kind = type(norm)
        if kind in self._classes:
            why = why_left(norm)
        else:
            base = next(base for base in self._classes if isinstance(norm, base))
            why = f"{kind.__name__} is a subclass of {self._package}'s {base.__name__}"
            self.own[kind.__name__] = None
        if why is not None:
            self.left[path] = why
        return why is not None

    def change(
        self,
        module: Any,
        path: str,
        why_left: Callable[[Any], str | None],
        why_input: Callable[[Any], str | None],
    ) -> tuple[type, Save | None] | None:
        """Record a module of a model; return its new class, and the `save` mode of a norm.

        The result is None if the module is not changed. The mode is the user's, unless `why_input`
        returns a reason against "output".
        """
        function = self.function_of(type(module), path)
        if function is not None:
            return with_call(type(module), function), None
        if not self.is_convertible(module, path) or self.is_left(module, path, why_left):
            return None
        why = why_input(module) if self._save == "output" else None
        if why is not None:
            self.kept[path] = why
        return self._classes[type(module)], self._save if why is None else "input"

    def note(self, kind: type, path: str, parameters: Iterable[Any]) -> None:
        """Record a module without submodules if it is a norm, and the user defines its class.

        It is a norm if its class's name ends in "norm" and if its parameters are at most a vector
        for each of several stacked layers.
        """
        library, _, _ = kind.__module__.partition(".")
        is_own = library not in ("equinox", "flax", "jaxnorm")
        is_new = path not in self.norms and path not in self.subclasses
        is_named = is_own and is_new and kind.__name__.lower().endswith("norm")
        if is_named and all(np.ndim(a) <= 2 for a in parameters):
            self.others[path] = kind.__name__

    def log(self, none: str) -> None:
        """Log one line: a warning if a module was not converted, or must save its input.

        Without problems, nothing is logged, or a line of the level INFO about the modules that call
        functions of ``calls``. `none` is the text for a model that has no norm of the package.
        """
        of = f"of {len(self.norms)} norms"
        absent = [k.__name__ for k in self.calls if _full_name(k) not in self.modules]
        names = collections.Counter(self.others.values())
        counts = ", ".join(f"{name} ({count})" for name, count in names.items())
        to_convert = ", ".join(f"{n}: function" for n in {**self.own, **names})
        kept = 'keep their input, as with save="input"'
        lists = {
            f"{of} are left to {self._package}": self.left,
            f"{of} {kept}": self.kept,
            f"{of} were not looked at": self.unknown,
            "modules are left as they are": self.subclasses,
        }
        sentences = {
            f"{none}; norms of other classes can call jaxnorm.layer_norm and jaxnorm.rms_norm, by "
            "calls={class: function}": not (self.has_norms or self.applied),
            **{f"{len(paths)} {what}: {listed(paths)}": paths for what, paths in lists.items()},
            f"calls has classes that were not found: {', '.join(absent)}": absent,
            f"norms of other classes are left as they are: {counts}": names,
            f"To convert such classes, pass calls={{{to_convert}}}": to_convert,
        }
        said = [sentence for sentence, applies in sentences.items() if applies]
        level = logging.WARNING if said else logging.INFO
        if self.applied:
            applied = f"{len(self.applied)} modules call functions of calls: {listed(self.applied)}"
            said.insert(0, applied)
        if said:
            _LOGGER.log(level, "jaxnorm.%s: %s", self._function, ". ".join(said))


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def identity(function: Any) -> Any:
    """Return a hashable value that is equal for functions with the same code and the same data.

    So a lambda that a step of training makes anew at each call stays one function. The data are
    the defaults and the variables of enclosing functions; they are compared by identity, unless
    they are numbers or strings.
    """
    if isinstance(function, functools.partial):
        options = tuple(sorted(function.keywords.items()))
        return "partial", identity(function.func), _of_data((function.args, options))
    if isinstance(function, types.MethodType):
        return identity(function.__func__), id(function.__self__)
    if not isinstance(function, types.FunctionType):
        return id(function)
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable of the enclosing function that is not set yet
        return id(function)
    defaults = function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items()))
    return function.__code__, id(function.__globals__), _of_data((*defaults, *cells))


def _of_data(data: Any) -> Any:
    if isinstance(data, tuple):
        return tuple(map(_of_data, data))
    is_plain = data is None or isinstance(data, (bool, int, float, str))
    return (type(data), data) if is_plain else id(data)


def with_call(kind: type, function: Callable[..., Any]) -> type:
    """Return a subclass of `kind` whose ``__call__`` is `function`.

    If `kind` is such a subclass itself, its base class is used instead. Equal arguments return the
    same class.
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
    """Return the class from which `with_call` has derived `kind`; other classes are returned."""
    return vars(kind).get(_MADE_OF, (kind,))[0]


@functools.cache
def _metaclass(kind: type) -> type:
    """Return a subclass of a metaclass, for classes of `with_call`, which pickle by `_reduced`."""
    made = type(kind.__name__, (kind,), {})
    copyreg.pickle(made, _reduced)
    return made


def _reduced(made: type) -> tuple[Callable[..., type], tuple[Any, ...]]:
    """Return how `pickle` makes a class of `with_call` again.

    If its function cannot be pickled (a lambda, for example), the class is loaded as the class from
    which it was derived.
    """
    kind, function = vars(made)[_MADE_OF]
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        text = "a %s is pickled without its function of calls, %r"
        _LOGGER.warning(text, kind.__name__, function)
        return original, (kind,)
    return with_call, (kind, function)


# The name of an attribute of a class of `with_call`: the original class, and the function.
_MADE_OF = "_jaxnorm_made_of"
# A cache, so that equal models have equal classes, and `jax.jit` traces once. A key is the original
# class and the identity of the function. A class refers to its function, and so to all objects
# whose id() is in the identity.
_WITH_CALLS: weakref.WeakValueDictionary[tuple[type, Any], type] = weakref.WeakValueDictionary()

_LOGGER = logging.getLogger("jaxnorm")
if _LOGGER.level == logging.NOTSET:
    # Python's default level would drop the lines of the level INFO before any handler gets them.
    # Without a handler, Python prints warnings only.
    _LOGGER.setLevel(logging.INFO)


def listed(modules: Mapping[str, str]) -> str:
    """Return a text with the paths of modules, each with the reason why it is listed.

    Modules whose paths and reasons differ only in numbers share an entry, so that the text has one
    entry for each kind of module in a model of many layers.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for path, why in modules.items():
        pattern = tuple(re.sub(r"\d+", "*", text) for text in (path, why))
        groups.setdefault(pattern, {})[path] = why
    entries = []
    for (path, why), members in groups.items():
        if len(members) == 1:
            ((path, why),) = members.items()
            entries.append(f"{path or 'the module itself'} ({why})")
        else:
            same = {*members.values()}
            why = same.pop() if len(same) == 1 else why
            entries.append(f"{path} ({why}, {len(members)} times)")
    return "; ".join(entries)
