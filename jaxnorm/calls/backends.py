"""The choice of the implementation that runs a call, and its reason."""

import dataclasses
import importlib
import logging
import os
from collections.abc import Callable, Sequence

import jax

from jaxnorm_kernels import devices
from jaxnorm_kernels.implementation import Implementation
from jaxnorm_kernels.linear_spec import LinearSpec
from jaxnorm_kernels.specs import Spec

# Where each implementation lives. Imported on first use: a kernel backend costs nothing until then.
_MODULES = {
    "xla": "jaxnorm_kernels.xla",
    "mosaic": "jaxnorm_kernels.mosaic",
    "triton": "jaxnorm_kernels.triton",
}

# What the default tries on a platform, in this order, before xla. Platforms not named run xla.
_CANDIDATES: dict[str, tuple[str, ...]] = {"cuda": ("mosaic", "triton")}

# NVIDIA GPUs whose default kernels are an implementation's, by compute capability times ten.
_DEFAULT_ON: dict[str, Callable[[int], bool]] = {
    "mosaic": lambda capability: capability in (90, 100),
    "triton": lambda capability: capability >= 80 and capability not in (90, 100),
}

# What is said of a pass.
_PASSES = {"fwd": "forward", "tan": "tangent", "bwd": "backward"}

# Modules that could not be imported, and why; names of implementations that a user was told of.
_failures: dict[str, str] = {}
_told: set[str] = set()

#: Environment variable, read at import: what ``implementation=None`` means.
VARIABLE = "JAXNORM_IMPLEMENTATION"


def _from_environment() -> str | None:
    """The name that the variable holds; None where it is empty or not set."""
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in _MODULES:
        raise ValueError(
            f"jaxnorm: the environment has {VARIABLE}={name!r}; expected one of "
            f"{', '.join(map(repr, _MODULES))}; unset it to let jaxnorm choose"
        )
    return name


_PREFERRED = _from_environment()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that runs one direction of a call, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def names() -> tuple[str, ...]:
    """The valid values of ``implementation=``, besides None."""
    return tuple(_MODULES)


def preferred() -> str | None:
    """The implementation that the environment names: it runs every call that it can."""
    return _PREFERRED


def order(platform: str) -> tuple[str, ...]:
    """All names: in the order in which the default tries them, then those that it does not."""
    return tuple(dict.fromkeys([*_candidates(platform), "xla", *_MODULES]))


def _candidates(platform: str) -> tuple[str, ...]:
    """The implementations that the default tries before xla, from the preferred one on."""
    ordinary = (*_CANDIDATES.get(platform, ()), "xla")
    return ordinary[ordinary.index(_PREFERRED) if _PREFERRED in ordinary else 0 : -1]


def choose(as_seen_by: Callable[[str], Spec], platform: str) -> Choice:
    """The default's choice for a call on `platform` ("cpu", "cuda", "rocm", "tpu").

    `as_seen_by` gives the spec of the view that an implementation gets, by its name. What the
    environment names is the first that is tried, and runs whatever it can.
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
    """Says once that kernels which would be this GPU's default cannot be imported.

    Kernels that are not a GPU's default, such as Triton's on Hopper, need no warning.
    """
    capability = devices.local_capability() if platform == "cuda" else None
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
    """True if an implementation has the default kernels of GPUs of this compute capability."""
    return name in _DEFAULT_ON and _DEFAULT_ON[name](capability)


def forced(function: str, spec: Spec | LinearSpec, name: str) -> Choice:
    """Choose `name`; ValueError with its reason if it cannot run a call of this spec."""
    refusal = implementation(name).why_unsupported(spec)
    if refusal is not None:
        raise ValueError(
            f"{function}: implementation={name!r} cannot run the {_PASSES[spec.direction]} of "
            f"({spec.rows}, {spec.cols}): {refusal}; leave implementation out to let jaxnorm choose"
        )
    return Choice(name, "asked for by name")


def placed(function: str, name: str, platforms: Sequence[str]) -> None:
    """ValueError where a program for these platforms cannot hold `name`, which was asked for."""
    can = implementation(name).platforms()
    cannot = [platform for platform in platforms if can is not None and platform not in can]
    if cannot:
        raise ValueError(
            f"{function}: implementation={name!r} cannot run on {cannot[0]}: its kernels "
            "are for NVIDIA GPUs; leave implementation out to let jaxnorm choose, or place the "
            "arrays on such a GPU"
        )


def importable(platform: str) -> tuple[str, ...]:
    """The implementations besides xla that the default may run on a platform."""
    return tuple(name for name in _candidates(platform) if absence(name, platform) is None)


def absence(name: str, platform: str) -> str | None:
    """Return why the default never runs `name` on a platform; None if it may."""
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
    """Import the implementation `name`; ImportError if that fails; it is tried once."""
    path = _MODULES[name]
    if path in _failures:
        raise ImportError(_failures[path])
    try:
        backend: Implementation = importlib.import_module(path).IMPLEMENTATION
    except Exception as error:  # a JAX that has moved what we import raises many kinds of errors
        is_told = isinstance(error, ImportError)
        _failures[path] = str(error) if is_told else f"{type(error).__name__}: {error}"
        raise ImportError(_failures[path]) from error
    return backend


def local_platform() -> str:
    """The platform of JAX's default device, as lowering rules name it."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def has_kernels(name: str | None, platform: str) -> bool:
    """Whether a call may run a kernel there, named so or by default."""
    if name is None:
        return _PREFERRED != "xla" and platform in _CANDIDATES
    return name != "xla"
