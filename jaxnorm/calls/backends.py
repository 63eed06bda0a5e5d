"""The choice of the implementation (mosaic, triton or xla) that runs a call, and the reason for it.

The user may request an implementation by ``implementation=`` or by an environment variable.
Otherwise, the default applies: the first kernel implementation of the platform that supports the
call and is not known to be slower than XLA. If there is none, the default is xla (plain JAX).
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import logging
import os
import traceback
import types
from collections.abc import Callable, Sequence

import jax

from jaxnorm_kernels import launching
from jaxnorm_kernels.implementation import Implementation
from jaxnorm_kernels.specs import Direction, Spec

#: The module of each implementation. It is imported on first use, because the import is slow.
MODULES = {
    "xla": "jaxnorm_kernels.xla",
    "mosaic": "jaxnorm_kernels.mosaic",
    "triton": "jaxnorm_kernels.triton",
}

# For each platform, the kernel implementations that the default tries, in this order, before xla.
# Platforms that are not in this dict use xla.
_CANDIDATES: dict[str, tuple[str, ...]] = {"cuda": ("mosaic", "triton")}

# For each kernel implementation, a function that takes ten times the compute capability of an
# NVIDIA GPU, and returns True if the implementation is the default there.
_DEFAULT_ON: dict[str, Callable[[int], bool]] = {
    "mosaic": lambda capability: capability == 90,
    "triton": lambda capability: capability >= 80 and capability != 90,
}

# Maps a direction to the word that error messages use for the pass.
_PASSES = {"fwd": "forward", "tan": "tangent", "bwd": "backward"}

# Maps an implementation to the packages on whose versions the lowering of its kernels depends.
_PACKAGES = {"mosaic": ("jax", "jaxlib"), "triton": ("jax", "jaxlib", "jax-triton", "triton")}

# `_failures` maps a module that could not be imported to the text of the error. `_unlowered` maps
# an implementation and a call to the reason why the kernel could not be lowered. `_warned` has the
# implementations for which a warning was already logged.
_failures: dict[str, str] = {}
_unlowered: dict[tuple[str, Spec], str] = {}
_warned: set[str] = set()

#: Name of an environment variable. Its value is the name of the implementation to try first for
#: calls with ``implementation=None``. It is read once, when this module is imported.
VARIABLE = "JAXNORM_IMPLEMENTATION"


def _from_environment() -> str | None:
    """Return the value of the environment variable `VARIABLE`; None if it is empty or not set."""
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in MODULES:
        raise ValueError(
            f"jaxnorm: the environment has {VARIABLE}={name!r}; expected one of "
            f"{', '.join(map(repr, MODULES))}; unset it to let jaxnorm choose"
        )
    return name


_PREFERRED = _from_environment()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The name of the implementation that runs one pass of a call, and why it was chosen."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def preferred() -> str | None:
    """Return the value of ``JAXNORM_IMPLEMENTATION``, the name of an implementation, or None.

    The result is None if this environment variable is empty or not set. The named implementation
    runs all calls with ``implementation=None`` that it supports.
    """
    return _PREFERRED


def _candidates(platform: str) -> tuple[str, ...]:
    """Return the names of the kernel implementations to try, in order, for ``implementation=None``.

    xla is tried after them and is not included. If the environment variable
    ``JAXNORM_IMPLEMENTATION`` is set to one of the platform's kernel implementations, the result
    starts with this implementation, and omits the implementations that usually precede it.
    """
    ordinary = (*_CANDIDATES.get(platform, ()), "xla")
    return ordinary[ordinary.index(_PREFERRED) if _PREFERRED in ordinary else 0 : -1]


def choose(as_seen_by: Callable[[str], Spec], platform: str) -> Choice:
    """Choose the implementation of a call on `platform` ("cpu", "cuda", "rocm", "tpu").

    `as_seen_by` takes the name of an implementation, and returns the call's `Spec` for this
    implementation. (The spec includes the shapes of the arrays, which are reshaped differently for
    different implementations.) If the environment variable ``JAXNORM_IMPLEMENTATION`` is set, the
    implementation that it names is tried first. This implementation is chosen if it supports the
    call, even if it is not the default for such a call.
    """
    if _PREFERRED == "xla":
        return Choice("xla", f"asked for by {VARIABLE}")
    refusals: list[str] = []
    candidates = _candidates(platform)
    if _PREFERRED is not None and _PREFERRED not in candidates:
        refusals.append(f"{_PREFERRED}: asked for by {VARIABLE}, it has no kernels for {platform}")
    for name in candidates:
        is_preferred = name == _PREFERRED
        try:
            backend, spec = implementation(name), as_seen_by(name)
            refusal = _unlowered.get((name, spec)) or backend.why_unsupported(spec)
            if refusal is None and not is_preferred:
                refusal = backend.why_not_default(spec)
        except ImportError as error:  # jaxlib lacks this kernel backend, or jax_triton is missing
            refusal = f"it cannot be imported: {error}"
            _warn_once(name, platform, refusal, is_preferred)
        if refusal is None:
            reason = f"the default for {spec.op} {spec.direction} on {platform}"
            if is_preferred:
                reason = f"asked for by {VARIABLE}"
            caveat = backend.caveat(spec)
            return Choice(name, "; ".join([reason, *filter(None, [caveat]), *refusals]))
        asked = f"asked for by {VARIABLE}, " if is_preferred else ""
        refusals.append(f"{name}: {asked}{refusal}")
    return Choice("xla", "; ".join(refusals) or f"the default for {platform}")


def _warn_once(name: str, platform: str, refusal: str, is_preferred: bool) -> None:
    """Log a warning that an implementation cannot be imported, at most once per implementation.

    The warning is logged only if the implementation is the default on this GPU or was requested by
    the environment variable. Triton on a Hopper GPU, for example, gets no warning, because Mosaic
    is the default there.
    """
    capability = launching.local_capability() if platform == "cuda" else None
    if capability is None or name in _warned:
        return
    is_default = name in _DEFAULT_ON and _DEFAULT_ON[name](capability)
    if not (is_default or is_preferred):
        return
    _warned.add(name)
    on_this_gpu = f"the default on this GPU (compute capability {capability / 10})"
    logging.getLogger("jaxnorm").warning(
        "jaxnorm: implementation %r, %s, never runs here: %s; python -m jaxnorm prints what runs "
        "in its place; with %s=xla, that is XLA's code, without this warning",
        name,
        f"asked for by {VARIABLE}" if is_preferred else on_this_gpu,
        refusal,
        VARIABLE,
    )


def lowering_failed(
    function: str, requested: str | None, name: str, spec: Spec, error: Exception
) -> None:
    """Record that the kernel of a pass cannot be lowered, so that `choose` leaves it out.

    Lowering fails if a new version of JAX has changed the private API that kernels use. A warning
    is logged, at most once per implementation. If the user requested the implementation by
    ``implementation=``, ValueError is raised instead.
    """
    reason = f"its kernel cannot be lowered: {_described(error, name)}"
    if requested is not None:
        raise ValueError(
            f"{function}: implementation={name!r}: {reason}; leave implementation out to let "
            "jaxnorm choose"
        ) from error
    _unlowered[name, spec] = reason
    if name not in _warned:
        _warned.add(name)
        logging.getLogger("jaxnorm").warning(
            "jaxnorm: %s runs without the default implementation %r: %s; implementation_for says "
            "what runs in its place; with %s=xla, that is XLA's code, without this warning",
            *(function, name, reason, VARIABLE),
        )


def _described(error: Exception, name: str) -> str:
    """Return the text of an error of an implementation, with the versions of its packages."""
    versions = []
    for package in _PACKAGES.get(name, ("jax",)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
    return (
        f"{kind}{error} (with {', '.join(versions)}; the kernels were tested with jax "
        f"{' and '.join(launching.TESTED)})"
    )


def refuse(
    function: str, name: str, direction: Direction, shape: tuple[int, int], refusal: str | None
) -> None:
    """Raise ValueError if the implementation `name` cannot run a pass.

    `refusal` is the reason, or None if the implementation can run the pass.
    """
    if refusal is not None:
        raise ValueError(
            f"{function}: implementation={name!r} cannot run the {_PASSES[direction]} of "
            f"({shape[0]}, {shape[1]}): {refusal}; leave implementation out to let jaxnorm choose"
        )


def check_platforms(function: str, name: str, platforms: Sequence[str]) -> None:
    """Raise ValueError if the implementation `name` cannot run on one of the platforms.

    `name` is the implementation that the user requested. `platforms` are the platforms for which
    the program is lowered.
    """
    can = implementation(name).platforms()
    cannot = [platform for platform in platforms if can is not None and platform not in can]
    if cannot:
        raise ValueError(
            f"{function}: implementation={name!r} cannot run on {cannot[0]}: its kernels "
            "are for NVIDIA GPUs; leave implementation out to let jaxnorm choose, or place the "
            "arrays on such a GPU"
        )


def importable(platform: str) -> tuple[str, ...]:
    """Return the names of the kernel implementations that can be imported and run on a platform."""
    found = []
    for name in _candidates(platform):
        with contextlib.suppress(ImportError):
            implementation(name)
            found.append(name)
    return tuple(found)


def implementation(name: str) -> Implementation:
    """Import and return the implementation `name`.

    If the import fails because a package is missing or has changed, ImportError is raised. Such an
    import is not repeated: later calls raise the same error. If the import fails because of a bug
    of jaxnorm, RuntimeError is raised, which no caller treats as a missing package.
    """
    path = MODULES[name]
    if path in _failures:
        raise ImportError(_failures[path])
    try:
        backend: Implementation = importlib.import_module(path).IMPLEMENTATION
    except Exception as error:
        if _is_own_bug(error, path):
            raise RuntimeError(
                f"jaxnorm: the import of {path} failed because of a bug of jaxnorm, which should "
                f"be reported: {_described(error, name)}"
            ) from error
        is_explained = isinstance(error, ImportError) and error.name is None  # by jaxnorm's code
        _failures[path] = str(error) if is_explained else _described(error, name)
        raise ImportError(_failures[path]) from error
    return backend


def _is_own_bug(error: Exception, path: str) -> bool:
    """Return True if the import of the module `path` failed because of a bug of jaxnorm.

    The import may also fail because a package is missing, or because JAX's private API has changed.
    A missing name or module of jaxnorm is a bug, but the module `path` itself may be missing. Any
    other error that jaxnorm's code raises is a bug if jaxnorm was tested with this version of JAX.
    With an untested version, the cause may be a change in JAX.
    """
    if isinstance(error, ImportError):
        place = error.name if error.name != path else None
    elif isinstance(error, AttributeError):
        owner = error.obj
        is_module = isinstance(owner, types.ModuleType)
        place = getattr(owner, "__name__" if is_module else "__module__", None)
    elif jax.__version__ in launching.TESTED:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        place = frame.f_globals["__name__"]
    else:
        place = None
    return (place or "").startswith("jaxnorm")


def local_platform() -> str:
    """Return the platform of JAX's first local device; for a GPU, this is "cuda" or "rocm"."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def has_kernels(name: str | None, platform: str) -> bool:
    """Return True if a call may run a kernel on a platform, rather than plain JAX.

    `name` is the implementation that the user requested, or None for the default.
    """
    if name is None:
        return _PREFERRED != "xla" and platform in _CANDIDATES
    return name != "xla"
