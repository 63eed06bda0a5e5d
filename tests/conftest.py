"""Fixtures that every test file shares."""

import functools
import importlib.util
import os
import zlib
from collections.abc import Iterator
from typing import Any

# Pallas' interpreter runs each warpgroup in a thread of XLA's CPU pool, and they wait for each
# other: with fewer threads than warpgroups they would hang. To be set before JAX makes its backend.
os.environ.setdefault("NPROC", "16")

# Processes that share a GPU must not each keep the memory of their largest test: 80 GB are too few.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax
import pytest
import refused

from jaxnorm.calls import backends
from jaxnorm.primitives.stack import in_one_chunk

# GPUs multiply float32 matrices in TF32 by default: its roundings are not what these tests look at.
jax.config.update("jax_default_matmul_precision", "highest")

# Virtual devices, for the tests on a mesh.
jax.config.update("jax_num_cpu_devices", 8)


# Whether Triton interprets its kernels on the CPU: it then cannot compile them.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def load_alone(implementation: str, name: str) -> Any:
    """A module of an implementation, without its package, which checks for an extra."""
    (package,) = importlib.util.find_spec("jaxnorm_kernels").submodule_search_locations
    file = f"{package}/{implementation}/{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types, for the tests that need float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def quick_to_compile() -> Iterator[None]:
    """LLVM optimises nothing, for tests of many programs that look at no speed.

    XLA's own passes run as ever: what is fused, shared and moved is what users get.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(
    params=[
        "xla",
        pytest.param("mosaic", marks=pytest.mark.gpu),
        pytest.param("triton", marks=pytest.mark.triton),
    ]
)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each implementation in turn, forced by name: they all meet the same bounds."""
    if request.param == "triton" and INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)
    return request.param


@pytest.fixture(
    params=[
        pytest.param("mosaic", marks=pytest.mark.gpu),
        pytest.param("triton", marks=pytest.mark.triton),
    ]
)
def kernels(request: pytest.FixtureRequest) -> str:
    """Each implementation that is kernels, for tests of a size that takes a GPU."""
    if INTERPRETED:
        pytest.skip("an interpreter is too slow for arrays of this size")
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests are skipped that need what is not here, and say what that is."""
    every = config.getoption("--every")
    if every > 1:
        seen: set[str] = set()
        chosen, others = [], []
        for item in items:
            test = item.nodeid.partition("[")[0]
            # By a hash: a stride could meet the same value of a parameter each time.
            is_chosen = test not in seen or zlib.crc32(item.nodeid.encode()) % every == 0
            (chosen if is_chosen else others).append(item)
            seen.add(test)
        config.hook.pytest_deselected(items=others)
        items[:] = chosen
    for mark, reason in (
        ("gpu", _no_hopper),
        ("multigpu", _no_second_gpu),
        ("triton", _no_triton),
    ):
        marked = [item for item in items if item.get_closest_marker(mark)]
        why = reason() if marked else None
        for item in marked if why else []:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A test and all that it calls are in one chunk of Python's stack."""
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(in_one_chunk, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test is skipped where an implementation refuses its call for a reason that it expects.

    It names those reasons by `refused.expect`; any other refusal is a failure.
    """
    try:
        return (yield)
    except ValueError as error:
        refusal = refused.reason(error)
        mark = item.get_closest_marker("refused")
        if refusal is None or mark is None or not any(part in refusal for part in mark.args):
            raise
        pytest.skip(str(error))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="of each test, one case of N or so"
    )
    parser.addoption(
        "--write-refusals",
        action="store_true",
        help=f"write how many calls were refused to {refused.COUNTS.name}",
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints how many calls each implementation refused, beside the committed numbers."""
    if _is_worker(config):
        return
    counted = refused.count(terminalreporter.stats)
    for line in refused.summary(counted):
        terminalreporter.write_line(line)
    if config.getoption("--write-refusals"):
        refused.write(counted)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A number of refusals that is not the committed one fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or _is_worker(session.config):
        return
    if refused.differences(refused.count(reporter.stats)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is one process of several, which has seen a part of the run."""
    return hasattr(config, "workerinput")


def _no_hopper() -> str | None:
    return None if _capability() >= 9.0 else "needs an NVIDIA GPU of capability 9.0 or newer"


def _no_second_gpu() -> str | None:
    return None if jax.device_count() >= 2 else "needs two GPUs or more"


def _no_triton() -> str | None:
    try:
        backends.module("triton")
    except ImportError as error:
        return str(error)
    if INTERPRETED or _capability() >= 8.0:
        return None
    return "needs an NVIDIA GPU of capability 8.0 or newer, or TRITON_INTERPRET=1"


def _capability() -> float:
    """Compute capability of the GPU at hand; 0 where there is none."""
    device = jax.devices()[0]
    return float(getattr(device, "compute_capability", 0)) if device.platform == "gpu" else 0.0
