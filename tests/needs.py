"""Requirements of tests that not every machine meets.

A case that cannot run on this machine is deselected at collection. The summary gives the number of
such cases and their requirements, so there are no skips in the output. If a run selects only such
cases, such as ``-m gpu`` without a GPU, no case is left. pytest then exits with status 5, so a run
that tested nothing does not look like a success.
"""

import collections
import dataclasses
import functools
import importlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pytest
import triton_programs

from jaxnorm.calls import backends

# True if Triton interprets its kernels on the CPU. In this mode it cannot compile them.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Counts the left-out cases by reason.
LEFT_OUT = pytest.StashKey[collections.Counter[str]]()


def capability() -> float:
    """Return the compute capability of the local GPU, or 0 without a GPU."""
    device = jax.devices()[0]
    return float(getattr(device, "compute_capability", 0)) if device.platform == "gpu" else 0.0


# Requirements. Each function returns a text that says what is missing, or None if the requirement
# is met.


def hopper() -> str | None:
    return None if capability() >= 9.0 else "needs an NVIDIA GPU of capability 9.0 or newer"


def second_gpu() -> str | None:
    return None if jax.device_count() >= 2 else "needs two GPUs or more"


def triton() -> str | None:
    if missing := _triton_extra():
        return missing
    if INTERPRETED or triton_programs.are_recorded() or capability() >= 8.0:
        return None
    return "needs an NVIDIA GPU of capability 8.0 or newer, TRITON_INTERPRET=1 or --export-triton"


def speed() -> str | None:
    return "an interpreter is too slow for these, and runs in order" if INTERPRETED else None


def compute_sanitizer() -> str | None:
    if shutil.which("compute-sanitizer") or triton_programs.are_recorded():
        return None
    return "needs compute-sanitizer, of the CUDA toolkit, on PATH"


@functools.cache
def cuda_compilers() -> str | None:
    try:
        for module in ("jax_plugins.xla_cuda13", "nvidia.cu13.bin"):
            importlib.import_module(module)
    except ImportError as error:
        return f"needs JAX's CUDA plugin and ptxas, which `make compile` installs: {error}"
    if jax.config.jax_platforms != "cpu":
        return "needs JAX_PLATFORMS=cpu: it compiles for GPUs that are not here"
    return None


def triton_compiler() -> str | None:
    if INTERPRETED:
        return "TRITON_INTERPRET=1 leaves nothing to compile"
    if triton_programs.replayed():
        return "--exported-triton runs kernels that are compiled already"
    return _triton_extra()


def triton_for_cuda() -> str | None:
    try:
        importlib.import_module("jaxnorm_kernels.triton.extra").check_cuda()
    except ImportError as error:
        return str(error)
    return None


@functools.cache
def _triton_extra() -> str | None:
    try:
        backends.implementation("triton")
    except ImportError as error:
        return str(error).partition(";")[0]
    return None


# ------------------------------------------------------------------ tests that have a requirement


@dataclasses.dataclass(frozen=True)
class Need:
    """A requirement, and the tests that have it.

    Attributes:
      missing: a function that returns what is missing, or None if the requirement is met.
      marks: a test has the requirement if it has one of these pytest marks.
      fixtures: a test also has the requirement if it uses one of these fixtures.
    """

    missing: Callable[[], str | None]
    marks: Sequence[str] = ()
    fixtures: Sequence[str] = ()

    def is_of(self, item: pytest.Item) -> bool:
        fixtures = getattr(item, "fixturenames", ())
        return any(item.get_closest_marker(mark) for mark in self.marks) or any(
            name in fixtures for name in self.fixtures
        )


# A test case is left out if one of its requirements is not met. If several are not met, the case is
# counted only under the first of them.
NEEDS = (
    Need(hopper, marks=["gpu"]),
    Need(second_gpu, marks=["multigpu"]),
    Need(triton, marks=["triton"]),
    Need(speed, marks=["uninterpreted"]),
    Need(compute_sanitizer, marks=["memcheck"]),
    Need(cuda_compilers, marks=["compiles"], fixtures=["compiler"]),
    Need(triton_for_cuda, marks=["cuda_plugin"]),
)

# Maps test files to the requirement without which they cannot even be imported.
FILES = {"triton/test_compile*.py": triton_compiler}


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the cases that cannot run on this machine from `items`."""
    here, others = [], []
    for item in items:
        reasons = (need.missing() for need in NEEDS if need.is_of(item))
        reason = next(filter(None, reasons), None)
        if reason is not None:
            left_out(config)[f"cases ({reason})"] += 1
        (here if reason is None else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = here


def leaves_out_file(config: pytest.Config, path: Path) -> bool:
    for pattern, missing in FILES.items():
        if path.match(pattern) and (reason := missing()):
            left_out(config)[f"files ({reason})"] += 1
            return True
    return False


def left_out(config: pytest.Config) -> collections.Counter[str]:
    return config.stash.setdefault(LEFT_OUT, collections.Counter())


def summary(config: pytest.Config) -> str | None:
    counts = left_out(config)
    return "left out: " + "; ".join(f"{n} {what}" for what, n in counts.items()) if counts else None
