"""The report of ``python -m jaxnorm``: versions, devices, and implementations of functions."""

import ctypes
import inspect
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax

import jaxnorm
from jaxnorm.tools.plan import functions, implementation_for
from jaxnorm.tools.text import table

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "equinox", "jax-triton", "triton")
# Shapes of x for which the report lists implementations. `_SHAPE` is the shape of a transformer's
# activations. `_HEADS` is (batch, length, heads, columns), for functions that process each
# attention head.
_SHAPE, _HEADS, _DTYPE = (8192, 4096), (4, 2048, 32, 128), "bfloat16"


def report() -> str:
    """Return the report as text: a title and an indented paragraph for each subject."""
    parts = {
        "versions": table([*_versions()], left=(0, 1)),
        "devices": "\n".join(map(_device, jax.local_devices())),
        f"what runs here, for {_DTYPE} {_SHAPE}, and heads {_HEADS}": table(
            [*_choices()], left=(0, 1, 2)
        ),
    }
    return "\n\n".join(f"{title}\n{_indented(text)}" for title, text in parts.items())


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


def _choices() -> Iterator[tuple[str, str, str]]:
    """Yield lines of a table: function, pass, and the implementation with the reason for it.

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
