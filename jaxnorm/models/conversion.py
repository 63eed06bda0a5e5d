"""Code that the conversions of existing linen, nnx and equinox models share.

A conversion makes the norms of a package (Flax or equinox) run jaxnorm's functions. Some norms keep
the package's code because of their class or their options. Some converted norms must save their
input instead of their output. One log line lists the norms that keep the package's code, and the
norms that save their input.
"""

import copyreg
import dataclasses
import functools
import inspect
import logging
import pickle
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import jax
import numpy as np

from jaxnorm.operations import checks
from jaxnorm.tools import check_params
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save

#: The words of the log line for norms that save their input instead of their output.
KEPT = 'keep their input, as with save="input"'


def check(function: str, save: Save, implementation: Name | None) -> None:
    """Raise ValueError if ``save`` or ``implementation`` of a conversion is wrong."""
    checks.one_of(function, "save", save, checks.SAVE_MODES)
    checks.implementation(function, implementation)


def arguments_of[**P](base: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that shows the arguments of `base` in the signature of an ``__init__``.

    The decorated ``__init__`` takes them as ``**fields`` and passes them on. `inspect.signature`
    and ``help`` then list all of them, with the defaults of the installed version of the package.
    """

    def with_signature(init: Callable[P, None]) -> Callable[P, None]:
        shown = dict(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
        shown = {name: p for name, p in shown.items() if p.kind is not p.VAR_KEYWORD}
        own = inspect.signature(init).parameters
        shown |= {name: p for name, p in own.items() if p.kind is p.KEYWORD_ONLY}
        vars(init)["__signature__"] = inspect.Signature([*shown.values()])
        return init

    return with_signature


def are_known(parameters: Iterable[Any]) -> bool:
    """Return True if the values of all these parameters can be read in this process."""
    return all(_values(parameter) is not None for parameter in parameters)


def why_input(parameters: Collection[Any], y_dtype: np.dtype) -> str | None:
    """Return the reason why a norm with these parameters must save its input, not its output.

    The result is None if the norm may save its output, or if the parameters' values are unknown.

    Args:
      parameters: scale and, if the norm has one, bias.
      y_dtype: dtype of the norm's output.
    """
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


def decided(
    function: str,
    norms: Mapping[str, Any],
    classes: Mapping[type, type],
    save: Save,
    calls: "Calls",
    why_left: Callable[[Any], str | None],
    why_input: Callable[[Any], str | None],
) -> dict[str, Save]:
    """Choose which norms are converted, and return a dict from their paths to their `save` modes.

    Log which norms are not converted.

    Args:
      function: name of the conversion, such as ``"nnx.convert"``.
      norms: a dict from paths to norms, with all norms of a model.
      classes: a dict from the package's norm classes to jaxnorm's.
      save: the mode that the user requested. Norms that must save their input get "input" instead.
      calls: the argument ``calls`` of the conversion. It has recorded to which modules it applies.
        The log line also gets sentences about these modules.
      why_left: function that takes a norm. It returns the reason why the norm is left to its
        package, or None.
      why_input: function that takes a norm. It returns the reason why the norm must save its input,
        or None.
    """
    ours = tuple(classes.values())
    theirs = {path: norm for path, norm in norms.items() if not isinstance(norm, ours)}
    left, kept, saves = dict[str, str](), dict[str, str](), dict[str, Save]()
    for path in theirs:
        if (why := why_left(theirs[path])) is not None:
            left[path] = why
            continue
        if save == "output" and (why := why_input(theirs[path])) is not None:
            kept[path] = why
        saves[path] = "input" if path in kept else save
    package = "equinox" if function.startswith("equinox") else "Flax"
    own = [type(theirs[p]).__name__ for p in left if converted_as(type(theirs[p]), classes) is None]
    log(function, len(theirs), {f"are left to {package}": left, KEPT: kept}, calls, own)
    return saves


def why_subclass(norm: Any, bases: Collection[type], package: str) -> str | None:
    """Return the reason why a norm whose class overrides code is not converted.

    The result is None for other norms. `bases` are the norm classes of the package.
    """
    if converted_as(type(norm), bases) is not None:
        return None
    base = next(base for base in bases if isinstance(norm, base))
    name = type(norm).__name__
    return f"{name} is a subclass of {package}'s {base.__name__}, with code of its own"


def converted_as(kind: type, bases: Iterable[type]) -> type | None:
    """Return the class in `bases` that decides how a module of class `kind` is converted, or None.

    The result is `kind` itself if it is in `bases`. If `kind` is a subclass with an empty body, its
    base class is examined in the same way. If `kind` overrides code, the result is None.
    """
    bases = set(bases)
    while kind not in bases:
        if len(kind.__bases__) != 1 or not _adds_nothing(kind):
            return None
        (kind,) = kind.__bases__
    return kind


def _adds_nothing(kind: type) -> bool:
    """Return True if the body of a class is empty: it has only what its metaclass adds."""
    (base,) = kind.__bases__
    own = vars(kind).keys() - vars(_empty_subclass(base)).keys() - _OF_STATEMENTS
    return not own and _fields(kind) == _fields(base)


@functools.cache
def _empty_subclass(base: type) -> type:
    return type(base)(base.__name__, (base,), {"__module__": __name__})


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)] if is_dataclass(kind) else []


# Attributes that a class statement may set, even with an empty body. Annotations are not compared
# here: an annotation in the body of a dataclass is a field.
_OF_STATEMENTS = {
    "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__",
    "__classdictcell__", "__doc__", "__firstlineno__", "__module__", "__qualname__",
    "__static_attributes__",
}  # fmt: skip


class Calls:
    """The argument ``calls`` of a conversion, and a record of the modules that it has affected.

    Two objects are equal if they have the same functions for the same classes.

    Attributes:
      functions: maps a class to the function that replaces its ``__call__``.
      applied: maps the path of each module whose ``__call__`` is replaced to the name of its class.
      left: maps module paths to the reasons why these modules are not changed. The class of each
        of these modules is a subclass of a class in `functions`, but is not itself in `functions`.
      others: maps module paths to the names of the modules' classes. Such a class is defined by the
        user, and its name ends in "norm". Neither this class nor a base class of it is in
        `functions`.
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
        self.functions: dict[type, Callable[..., Any]] = dict(calls or {})
        for kind, replacement in self.functions.items():
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
        self.applied: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.others: dict[str, str] = {}

        self._identities = frozenset((k, identity(f)) for k, f in self.functions.items())

    def __hash__(self) -> int:
        return hash(self._identities)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calls) and self._identities == other._identities

    def of(self, kind: type, path: str) -> Callable[..., Any] | None:
        """Return the function that replaces the ``__call__`` of a module, or None.

        `kind` is the module's class. The module's path is recorded if there is a function for this
        class or for a base class of it.
        """
        kind = _ORIGINAL.get(kind, kind)
        if kind in self.functions:
            self.applied[path] = kind.__name__
            return self.functions[kind]
        base = next((k for k in self.functions if issubclass(kind, k)), None)
        if base is not None and not kind.__module__.startswith("jaxnorm"):
            self.left[path] = f"{kind.__name__} is a subclass of {base.__name__}, which calls has"
        return None

    def has(self, path: str) -> bool:
        """Return True if ``calls`` has a function for the module at this path.

        The function may be for the module's class, or for a base class of it.
        """
        return path in self.applied or path in self.left

    def note(self, kind: type, path: str, parameters: Iterable[Any]) -> None:
        """Record a module if it is a norm, and the user defines its class.

        It is a norm if its class's name ends in "norm" and if its parameters are at most a vector
        for each of several stacked layers. Call this function for modules without submodules only.
        """
        library, _, _ = kind.__module__.partition(".")
        is_own = library not in ("equinox", "flax", "jaxnorm")
        is_named = is_own and kind.__name__.lower().endswith("norm")
        if is_named and all(np.ndim(a) <= 2 for a in parameters):
            self.others[path] = kind.__name__

    def problems(self, left: Iterable[str] = (), seen: Collection[str] = ()) -> list[str]:
        """Return sentences about modules that are not changed, and about classes without modules.

        Args:
          left: names of norm classes that are not converted because they override code.
          seen: full names of other classes whose modules occur in the model. A class in ``calls``
            is reported as not found if no module of this class was recorded and its full name is
            not in `seen`.
        """
        found = {*seen, *self.applied.values()}
        absent = [
            kind.__name__
            for kind in self.functions
            if not found & {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
        ]
        names = {name: [*self.others.values()].count(name) for name in self.others.values()}
        to_convert = ", ".join(f"{n}: function" for n in dict.fromkeys((*left, *names)))
        counts = ", ".join(f"{name} ({count})" for name, count in names.items())
        sentences = {
            f"{len(self.left)} modules are left as they are: {listed(self.left)}": self.left,
            f"calls has classes that were not found: {', '.join(absent)}": absent,
            f"norms of other classes are left as they are: {counts}": names,
            f"To convert such classes, pass calls={{{to_convert}}}": to_convert,
        }
        return [sentence for sentence, applies in sentences.items() if applies]


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
    kind = _ORIGINAL.get(kind, kind)
    key = kind, identity(function)
    made = _WITH_CALLS.get(key)
    # Variables of the enclosing function may have changed since the class was made.
    if made is None or identity(_FUNCTION[made]) != key[1]:
        contents = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        made = _metaclass(type(kind))(kind.__name__, (kind,), {**contents, "__call__": call})
        _FUNCTION[made] = function
        _WITH_CALLS[key], _ORIGINAL[made] = made, kind
    return made


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
    kind, function = _ORIGINAL[made], _FUNCTION[made]
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        warn("a %s is pickled without its function of calls, %r", kind.__name__, function)
        return _same, (kind,)
    return with_call, (kind, function)


def _same(kind: type) -> type:
    return kind


# The classes that `with_call` has made. A key is the original class and the identity of the
# function. A class refers to its function, and so to all objects whose id() is in the identity.
_WITH_CALLS: weakref.WeakValueDictionary[tuple[type, Any], type] = weakref.WeakValueDictionary()
# Maps each of these classes to the class from which it was derived, and to its function.
_ORIGINAL: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()
_FUNCTION: weakref.WeakKeyDictionary[type, Callable[..., Any]] = weakref.WeakKeyDictionary()


def warn_of_none(function: str, model: Any, norms: str, calls: Calls) -> None:
    """Log a warning that a model has no norm of the package.

    `norms` is a text with the names of the package's norm classes.
    """
    warn(
        f"jaxnorm.{function}: %s has no {norms}; norms of other classes can call "
        "jaxnorm.layer_norm and jaxnorm.rms_norm%s",
        type(model).__name__,
        "".join(f". {sentence}" for sentence in calls.problems()),
    )


def warn(text: str, *arguments: object) -> None:
    """Log a warning with the logger ``"jaxnorm"``."""
    _LOGGER.warning(text, *arguments)


_LOGGER = logging.getLogger("jaxnorm")
if _LOGGER.level == logging.NOTSET:
    # Python's default level would drop the lines of the level INFO before any handler gets them.
    # Without a handler, Python prints warnings only.
    _LOGGER.setLevel(logging.INFO)


def log(
    function: str,
    seen: int,
    outcomes: Mapping[str, Mapping[str, str]],
    calls: Calls,
    own: Iterable[str] = (),
    found: Collection[str] = (),
) -> None:
    """Log one line about the modules that call functions of `calls`, and about all problems.

    Problems are norms that were not converted, or that must save their input. Without the line, the
    user would not notice that these norms are slower than intended, or that they save more. The
    line is a warning if there are problems. Otherwise, it has the level INFO.

    Args:
      function: name of the conversion, such as ``"nnx.convert"``.
      seen: number of all norms.
      outcomes: a nested dict, ``{outcome: {path: reason}}``. An outcome is a text, such as "are
        left to Flax". The inner dict has an entry for each norm with this outcome.
      calls: the argument ``calls`` of the conversion.
      own, found: the arguments of `Calls.problems`.
    """
    lists = {f"of {seen} norms {what}": norms for what, norms in outcomes.items()}
    problems = [f"{len(norms)} {what}: {listed(norms)}" for what, norms in lists.items() if norms]
    problems += calls.problems(own, found)
    parts = problems
    if calls.applied:
        changed = f"{len(calls.applied)} modules call functions of calls: {listed(calls.applied)}"
        parts = [changed, *problems]
    if parts:
        level = logging.WARNING if problems else logging.INFO
        _LOGGER.log(level, "jaxnorm.%s: %s", function, ". ".join(parts))


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
