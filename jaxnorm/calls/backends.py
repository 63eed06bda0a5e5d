"""The choice of the implementation that runs a call, and its reason."""

import dataclasses
import importlib
import logging
import os
from collections.abc import Callable, Sequence

import jax

from jaxnorm_kernels import launching
from jaxnorm_kernels.implementation import Implementation
from jaxnorm_kernels.specs import Direction, Spec

#: Module of each implementation, imported on first use: importing a kernel backend takes time.
MODULES = {
    "xla": "jaxnorm_kernels.xla",
    "mosaic": "jaxnorm_kernels.mosaic",
    "triton": "jaxnorm_kernels.triton",
}

# Implementations that the default tries on a platform, in this order, before xla. Other platforms
# run xla.
_CANDIDATES: dict[str, tuple[str, ...]] = {"cuda": ("mosaic", "triton")}

# For each implementation, the NVIDIA GPUs on which it is the default, by compute capability times
# ten.
_DEFAULT_ON: dict[str, Callable[[int], bool]] = {
    "mosaic": lambda capability: capability in (90, 100),
    "triton": lambda capability: capability >= 80 and capability not in (90, 100),
}

# Pass names as errors print them.
_PASSES = {"fwd": "forward", "tan": "tangent", "bwd": "backward"}

# Reasons why modules could not be imported, and the implementations that were warned about.
_failures: dict[str, str] = {}
_told: set[str] = set()

#: The environment variable that sets what ``implementation=None`` means; it is read at import.
VARIABLE = "JAXNORM_IMPLEMENTATION"


def _from_environment() -> str | None:
    """Return the value of the environment variable; None if it is empty or not set."""
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
    """The implementation that runs one pass of a call, and the reason for the choice."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def preferred() -> str | None:
    """Return the implementation named by the environment; it runs every call that it supports."""
    return _PREFERRED


def order(platform: str) -> tuple[str, ...]:
    """Return all implementations: those that the default tries, in order, then the others."""
    return tuple(dict.fromkeys([*_candidates(platform), "xla", *MODULES]))


def _candidates(platform: str) -> tuple[str, ...]:
    """Return the implementations that the default tries before xla, in order.

    If the environment names one of them, those before it are left out.
    """
    ordinary = (*_CANDIDATES.get(platform, ()), "xla")
    return ordinary[ordinary.index(_PREFERRED) if _PREFERRED in ordinary else 0 : -1]


def choose(as_seen_by: Callable[[str], Spec], platform: str) -> Choice:
    """Choose the implementation of a call on `platform` ("cpu", "cuda", "rocm", "tpu").

    `as_seen_by` takes the name of an implementation and returns the spec of the call as that
    implementation gets it. The implementation named by the environment is tried first, and runs
    every call that it supports.
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
            refusal = backend.why_unsupported(spec)
            if refusal is None and not is_preferred:
                refusal = backend.why_not_default(spec)
        except ImportError as error:  # a jaxlib without this kernel backend, or a missing extra
            refusal = f"it cannot be imported: {error}"
            _tell(name, platform, refusal, is_preferred)
        if refusal is None:
            reason = f"the default for {spec.op} {spec.direction} on {platform}"
            if is_preferred:
                reason = f"asked for by {VARIABLE}"
            caveat = backend.caveat(spec)
            return Choice(name, "; ".join([reason, *filter(None, [caveat]), *refusals]))
        asked = f"asked for by {VARIABLE}, " if is_preferred else ""
        refusals.append(f"{name}: {asked}{refusal}")
    return Choice("xla", "; ".join(refusals) or f"the default for {platform}")


def _tell(name: str, platform: str, refusal: str, is_preferred: bool) -> None:
    """Warn once per implementation if kernels that this GPU uses by default cannot be imported.

    Kernels that are not a GPU's default, such as Triton's on Hopper, need no warning.
    """
    capability = launching.local_capability() if platform == "cuda" else None
    if capability is None or name in _told:
        return
    if not (is_default_on(name, capability) or is_preferred):
        return
    _told.add(name)
    on_this_gpu = f"the default on this GPU (compute capability {capability / 10})"
    logging.getLogger("jaxnorm").warning(
        "jaxnorm: implementation %r, %s, never runs here: %s; python -m jaxnorm prints what runs "
        "in its place; with %s=xla, that is XLA's code, without this warning",
        name,
        f"asked for by {VARIABLE}" if is_preferred else on_this_gpu,
        refusal,
        VARIABLE,
    )


def is_default_on(name: str, capability: int) -> bool:
    """Return True if an implementation is the default on GPUs of this compute capability."""
    return name in _DEFAULT_ON and _DEFAULT_ON[name](capability)


def refuse(
    function: str, name: str, direction: Direction, shape: tuple[int, int], refusal: str | None
) -> None:
    """Raise ValueError if there is a reason, `refusal`, why `name` cannot run a pass."""
    if refusal is not None:
        raise ValueError(
            f"{function}: implementation={name!r} cannot run the {_PASSES[direction]} of "
            f"({shape[0]}, {shape[1]}): {refusal}; leave implementation out to let jaxnorm choose"
        )


def placed(function: str, name: str, platforms: Sequence[str]) -> None:
    """Raise ValueError if the implementation `name` cannot run on one of a program's platforms."""
    can = implementation(name).platforms()
    cannot = [platform for platform in platforms if can is not None and platform not in can]
    if cannot:
        raise ValueError(
            f"{function}: implementation={name!r} cannot run on {cannot[0]}: its kernels "
            "are for NVIDIA GPUs; leave implementation out to let jaxnorm choose, or place the "
            "arrays on such a GPU"
        )


def importable(platform: str) -> tuple[str, ...]:
    """Return the kernel implementations that the default may run on a platform, without xla."""
    return tuple(name for name in _candidates(platform) if absence(name, platform) is None)


def absence(name: str, platform: str) -> str | None:
    """Return the reason why the default never runs `name` on a platform; None if it may run it."""
    if name == "xla":
        return None
    if name not in _CANDIDATES.get(platform, ()):
        has_it = [place for place, candidates in _CANDIDATES.items() if name in candidates]
        return f"its kernels are for {' and '.join(has_it)}"
    try:
        implementation(name)
    except ImportError as error:
        return f"it cannot be imported: {error}"
    return None


def implementation(name: str) -> Implementation:
    """Import the implementation `name`. If that fails, this and later calls raise ImportError."""
    path = MODULES[name]
    if path in _failures:
        raise ImportError(_failures[path])
    try:
        backend: Implementation = importlib.import_module(path).IMPLEMENTATION
    except Exception as error:  # any error: JAX may have moved or changed what the module imports
        is_told = isinstance(error, ImportError)
        _failures[path] = str(error) if is_told else f"{type(error).__name__}: {error}"
        raise ImportError(_failures[path]) from error
    return backend


def local_platform() -> str:
    """Return the platform of JAX's default device, as lowering rules name it."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def has_kernels(name: str | None, platform: str) -> bool:
    """Return True if a call may run a kernel on a platform.

    `name` is the implementation that the user requested; for None, the default applies.
    """
    if name is None:
        return _PREFERRED != "xla" and platform in _CANDIDATES
    return name != "xla"
