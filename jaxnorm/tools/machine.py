"""The report of ``python -m jaxnorm``: versions, devices, implementations, missing extras."""

import ctypes
import inspect
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any

import jax

import jaxnorm
from jaxnorm.calls import backends
from jaxnorm.tools.plan import functions, implementation_for
from jaxnorm.tools.text import table
from jaxnorm_kernels import launching, timings

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "equinox", "jax-triton", "triton")
# Shapes of x for which the report lists implementations. `_SHAPE` is the shape of a transformer's
# activations. `_HEADS` is (batch, length, heads, columns), for functions that process each
# attention head.
_SHAPE, _HEADS, _DTYPE = (8192, 4096), (4, 2048, 32, 128), "bfloat16"


def report() -> str:
    """Return the report as text: a title and an indented paragraph for each subject."""
    parts = {
        "versions": _columns(_versions()),
        "devices": "\n".join(map(_device, jax.local_devices())),
        "implementations, in the order in which calls try them": _columns(_implementations()),
        f"what runs here, for {_DTYPE} {_SHAPE}, and heads {_HEADS}": _columns(_choices()),
        "extras that are not installed (commands are for a checkout of jaxnorm)": (
            _columns(_missing_extras()) or "none"
        ),
    }
    if advice := _advice():
        parts["kernels for this GPU"] = advice
    return "\n\n".join(f"{title}\n{_indented(text)}" for title, text in parts.items())


def _columns(lines: Iterable[Sequence[str]]) -> str:
    lines = list(lines)
    return table(lines, left=range(len(lines[0]))) if lines else ""


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _versions() -> Iterator[tuple[str, str]]:
    yield "jaxnorm", jaxnorm.__version__
    yield "python", platform.python_version()
    for name in _PACKAGES:
        yield name, _version_of(name) or "not installed"
    yield from _cuda_versions()


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cuda_versions() -> Iterator[tuple[str, str]]:
    """Yield the newest CUDA version that the driver supports, and the CUDA runtime's version."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return
    if not failed:
        yield "CUDA driver", f"up to CUDA {_cuda_version(number.value)}"
    client: Any = jax.local_devices()[0].client
    found = re.search(r"cuda (\d+)", client.platform_version)
    if found:
        yield "CUDA runtime", _cuda_version(int(found[1]))


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _device(device: Any) -> str:
    text = f"{device} ({device.device_kind})"
    capability = getattr(device, "compute_capability", None)
    if capability is not None:
        text += f", compute capability {capability}"
    memory = (device.memory_stats() or {}).get("bytes_limit")
    if memory:
        text += f", {memory / 2**30:.1f} GiB of memory for JAX"
    return text


def _implementations() -> Iterator[tuple[str, str]]:
    here = backends.local_platform()
    for name in backends.order(here):
        absence = backends.absence(name, here)
        yield name, f"can run on {here}" if absence is None else f"not on {here}: {absence}"


# Public objects without an implementation of their own, with a description of each.
_TOOLS = {
    "auto_remat": "plans on the host, when a function is differentiated",
    "check_params": "judges a model's parameters on the host",
    "fit_memory": "compiles a training step that fits into a given memory",
    "implementation_for": "traces a call on the host, and runs nothing",
    "linear_loss": "runs a given function, and the calls in it, on each chunk of rows",
    "memory_report": "traces a derivative on the host, and runs nothing",
    "remat_plan": "traces a derivative on the host, and runs nothing",
    "save_policy": "a policy of jax.checkpoint: which residuals it saves",
}


def _choices() -> Iterator[tuple[str, str, str]]:
    """Yield lines with the implementation of each function and pass, and the reason for it.

    If both passes have the same implementation and reason, they share a line.
    """
    for function in functions():
        is_rotation = "cos" in inspect.signature(getattr(jaxnorm, function)).parameters
        plan = implementation_for(function, _HEADS if is_rotation else _SHAPE, _DTYPE)
        if plan.forward == plan.backward:
            yield function, "", str(plan.forward)
            continue
        yield function, "forward", str(plan.forward)
        yield "", "backward", str(plan.backward)
    for tool, what in _TOOLS.items():
        yield tool, "", what


def _advice() -> str | None:
    """Return advice to install the extra `triton`, or None.

    The advice is given if Triton's kernels are the default on this GPU but cannot be imported.
    """
    capability = launching.local_capability()
    if capability is None or not backends.is_default_on("triton", capability):
        return None
    if (absence := backends.absence("triton", backends.local_platform())) is None:
        return None
    ratios = [t.ratio for t in timings.TIMINGS.values() if t.ratio <= timings.LIMIT]
    if not ratios:
        return None
    return (
        f'pip install -e ".[triton]" gives this GPU kernels for {len(ratios)} kinds of calls, '
        f"which took {min(ratios):.2f} to {max(ratios):.2f} of XLA's time on {timings.TIMED_ON}; "
        f"now they run XLA's code ({absence})"
    )


def _missing_extras() -> Iterator[tuple[str, str]]:
    """Yield optional extras with packages that are not installed, and commands to install them."""
    needed: dict[str, list[str]] = {}
    try:
        requirements = metadata.requires("jaxnorm") or []
    except metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        of_extra = re.search(r"extra == ['\"](.+?)['\"]", requirement)
        if of_extra:
            needed.setdefault(of_extra[1], []).append(_package_of(requirement))
    has_cuda = any(_version_of(f"jax-{name}-plugin") for name in needed if name.startswith("cuda"))
    for extra, packages in sorted(needed.items()):
        is_other_cuda = extra.startswith("cuda") and has_cuda
        if not is_other_cuda and not all(map(_version_of, packages)):
            yield extra, f'pip install -e ".[{extra}]"'


def _package_of(requirement: str) -> str:
    """Return the name of the package whose presence shows that a requirement is installed.

    For the requirement ``jax[cuda13]``, this is the package of JAX's CUDA plugin.
    """
    name, of_jax = re.findall(r"^([\w.-]+)(?:\[(\w+)\])?", requirement)[0]
    return f"{name}-{of_jax}-plugin" if of_jax else name
