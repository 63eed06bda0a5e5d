"""Helpers that the linen, nnx and equinox conversions of existing models share."""

import functools
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxnorm.operations import checks
from jaxnorm.tools import check_params
from jaxnorm.tools.text import progress
from jaxnorm_kernels.specs import FLOAT_DTYPES, Name, Save

#: How a log line describes norms that save their input instead of their output.
KEPT = 'keep their input, as with save="input"'

# Seconds after which a conversion shows a progress bar.
_PATIENCE = 2.0


def check(function: str, save: Save, implementation: Name | None) -> None:
    """Raise ValueError if an argument of a conversion is wrong."""
    checks.one_of(function, "save", save, checks.SAVE_MODES)
    checks.implementation(function, implementation)


def arguments_of[**P](base: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Show the arguments of `base` in the signature of an ``__init__`` that passes them on.

    The decorated method takes arguments of `base` as ``**fields``. `inspect.signature` and ``help``
    then list all of them by name, with the defaults of the package that is installed.
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
    """Return True if the values of all these parameters can be read now."""
    return all(_values(parameter) is not None for parameter in parameters)


def why_input(parameters: Collection[Any], y_dtype: np.dtype) -> str | None:
    """Return the reason why a norm with these parameters must save its input, not its output.

    The result is None if there is no reason, or if the parameters' values are unknown.

    Args:
      parameters: scale and, if there is one, bias.
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

    The value of a tracer is known if `jax.grad` made it outside `jax.jit`.
    """
    if isinstance(parameter, jax.core.Tracer):
        parameter = parameter.to_concrete_value()
    if isinstance(parameter, jax.Array):
        whole = parameter.is_fully_addressable or parameter.is_fully_replicated
        # `jax.transfer_guard` allows this explicit transfer.
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
    """Return the `save` mode of each norm that is converted, by its path; log the other norms.

    Args:
      function: the conversion, such as ``"nnx.convert"``.
      norms: all norms of a model, by path.
      classes: a dict from each of the package's classes to jaxnorm's.
      save: the mode of all norms except those that must save their input.
      calls: the functions that replace classes, for the log line.
      why_left: returns the reason why a norm is left to its package, or None.
      why_input: returns the reason why a norm must save its input, or None.
    """
    ours = tuple(classes.values())
    theirs = {path: norm for path, norm in norms.items() if not isinstance(norm, ours)}
    left, kept, saves = dict[str, str](), dict[str, str](), dict[str, Save]()
    for path in progress([*theirs], after=_PATIENCE):
        if (why := why_left(theirs[path])) is not None:
            left[path] = why
            continue
        why = why_input(theirs[path]) if save == "output" else None
        saves[path] = save if why is None else "input"
        if why is not None:
            kept[path] = why
    package = "equinox" if function.startswith("equinox") else "Flax"
    own = [type(theirs[p]).__name__ for p in left if converted_as(type(theirs[p]), classes) is None]
    outcomes = {f"are left to {package}": left, KEPT: kept}
    log(function, len(theirs), outcomes, calls.sentences(own))
    return saves


def subclass(module: Any, base: type, package: str) -> str:
    """Return the reason why a conversion leaves a module of a subclass of a norm's class."""
    name = type(module).__name__
    return f"{name} is a subclass of {package}'s {base.__name__}, with code of its own"


def converted_as(kind: type, bases: Iterable[type]) -> type | None:
    """Return the norm class as which a class is converted; None if the class overrides code.

    It is the class itself, or a base class to which it adds no code.
    """
    bases = set(bases)
    while kind not in bases:
        if len(kind.__bases__) != 1 or not _adds_nothing(kind):
            return None
        (kind,) = kind.__bases__
    return kind


def _adds_nothing(kind: type) -> bool:
    """Return True if the body of a class is ``pass``: it has only what its metaclass adds."""
    own, empty = (_contents(k) for k in (kind, _empty_subclass(kind.__bases__[0])))
    return own.items() <= empty.items()


@functools.cache
def _empty_subclass(base: type) -> type:
    return type(base)(base.__name__, (base,), {"__module__": __name__})


# Attributes that every class statement sets, whatever its body is.
_OF_STATEMENTS = {
    "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__",
    "__classdictcell__", "__doc__", "__firstlineno__", "__module__", "__qualname__",
    "__static_attributes__",
}  # fmt: skip


def _contents(kind: type) -> dict[str, Any]:
    """Return the attributes that a class defines itself, with the source files of its functions."""
    contents: dict[str, Any] = {"annotations": bool(vars(kind).get("__annotations__"))}
    for name, value in vars(kind).items():
        if name not in _OF_STATEMENTS:
            code = getattr(value, "__code__", None)
            contents[name] = type(value).__name__ if code is None else code.co_filename
    return contents


class Calls:
    """The argument ``calls`` of a conversion, and the modules that it applied to.

    Two `Calls` are equal if they have the same functions for the same classes.

    Attributes:
      functions: the function that replaces the ``__call__`` of each class.
      applied: paths of modules of these classes, with their classes' names.
      left: paths of modules of subclasses, with the reason why they are not changed.
      others: paths of modules of other classes named like norms, with their classes' names.
    """

    def __init__(self, function: str, calls: Any, base: type, package: str) -> None:
        """Raise TypeError or ValueError if ``calls`` is not a mapping of the package's modules."""
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

    def __hash__(self) -> int:
        return hash(frozenset((kind, id(f)) for kind, f in self.functions.items()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Calls)
            and self.functions.keys() == other.functions.keys()
            and all(f is other.functions[kind] for kind, f in self.functions.items())
        )

    def of(self, kind: type, path: str) -> Callable[..., Any] | None:
        """Return the function that replaces ``__call__`` in modules of a class, or None.

        The path is recorded if there is a function, or if the class derives from one that has a
        function.
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
        """Return True if ``calls`` has the class of the module at this path, or its base."""
        return path in self.applied or path in self.left

    def note(self, kind: type, path: str) -> None:
        """Record a module of an unknown class, if the name of the class ends in "norm"."""
        library, _, _ = kind.__module__.partition(".")
        is_own = library not in ("equinox", "flax", "jaxnorm")
        if is_own and kind.__name__.lower().endswith("norm"):
            self.others[path] = kind.__name__

    def sentences(self, left: Iterable[str] = (), seen: Collection[str] = ()) -> Iterator[str]:
        """Yield sentences about these modules for a log line.

        Args:
          left: names of classes that the conversion has left because they override code.
          seen: full names of classes that were found before.
        """
        for what, modules in (
            ("call functions of calls", self.applied),
            ("are left as they are", self.left),
        ):
            if modules:
                listed = [f"{path or 'the module itself'} ({why})" for path, why in modules.items()]
                yield f"{len(modules)} modules {what}: {'; '.join(listed)}"
        absent = [
            kind.__name__
            for kind in self.functions
            if kind.__name__ not in self.applied.values()
            and f"{kind.__module__}.{kind.__qualname__}" not in seen
        ]
        if absent:
            yield f"calls has classes that were not found: {', '.join(absent)}"
        names = [f"{name} ({count})" for name, count in Counter(self.others.values()).items()]
        if names:
            yield f"norms of other classes are left as they are: {', '.join(names)}"
        if to_convert := [*dict.fromkeys((*left, *self.others.values()))]:
            written = ", ".join(f"{name}: function" for name in to_convert)
            yield f"To convert such classes, pass calls={{{written}}}"


def with_call(kind: type, function: Callable[..., Any]) -> type:
    """Return a subclass with `function` as ``__call__``. Equal arguments return the same class."""
    key = kind, id(function)
    made = _WITH_CALLS.get(key)
    if made is None:
        contents = {name: getattr(kind, name) for name in ("__doc__", "__module__", "__qualname__")}

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        made = type(kind)(kind.__name__, (kind,), {**contents, "__call__": call})
        _WITH_CALLS[key], _ORIGINAL[made] = made, kind
    return made


# The classes that `with_call` made, by original class and id() of the function. Each class holds
# its function, so no other function can get the same id.
_WITH_CALLS: weakref.WeakValueDictionary[tuple[type, int], type] = weakref.WeakValueDictionary()
_ORIGINAL: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def original(kind: type) -> type:
    """Return the class from which `with_call` made `kind`; `kind` itself for any other class."""
    return _ORIGINAL.get(kind, kind)


def warn_of_none(function: str, model: Any, norms: str, calls: Calls) -> None:
    """Log that a model has none of the package's `norms`."""
    others = "".join(f". {sentence}" for sentence in calls.sentences())
    warn(
        f"jaxnorm.{function}: %s has no {norms}; norms of other classes can call "
        "jaxnorm.layer_norm and jaxnorm.rms_norm%s",
        type(model).__name__,
        others,
    )


def warn(text: str, *arguments: object) -> None:
    """Log a line to the logger ``"jaxnorm"``.

    Its level is warning, because Python's logging shows no lower level by default.
    """
    logging.getLogger("jaxnorm").warning(text, *arguments)


def log(
    function: str,
    seen: int,
    outcomes: Mapping[str, Mapping[str, str]],
    sentences: Iterable[str] = (),
) -> None:
    """Log one line on norms that were not converted as requested.

    Such norms are slower or save more than intended, and nothing else would show it.

    Args:
      function: the conversion, such as ``"nnx.convert"``.
      seen: number of norms.
      outcomes: for each outcome, a dict from the paths of its norms to the reasons.
      sentences: further sentences.
    """
    parts = [
        f"{len(norms)} of {seen} norms {what}: "
        + "; ".join(f"{path or 'the module itself'} ({why})" for path, why in norms.items())
        for what, norms in outcomes.items()
        if norms
    ] + [*sentences]
    if parts:
        warn("jaxnorm.%s: %s", function, ". ".join(parts))
