"""Fixtures that every test file shares."""

import contextlib
import functools
import importlib.util
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Pallas' interpreter runs each warpgroup in a thread of XLA's CPU pool, and they wait for each
# other: with fewer threads than warpgroups they would hang. To be set before JAX makes its backend.
os.environ.setdefault("NPROC", "16")

# Processes that share a GPU must not each keep the memory of their largest test: 80 GB are too few.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax
import needs
import pytest
import refused

from benchmarks import triton_programs
from jaxnorm.primitives.rules import in_one_chunk

# GPUs multiply float32 matrices in TF32 by default: its roundings are not what these tests look at.
jax.config.update("jax_default_matmul_precision", "highest")

# Virtual devices, for the tests on a mesh.
jax.config.update("jax_num_cpu_devices", 8)


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
    """Compile tests of many programs without LLVM's optimisations: they do not look at speed.

    XLA's own passes run as ever, so fusion, sharing and copies are what users get.
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
    """Run a test with each implementation, forced by name: all of them meet the same bounds."""
    if request.param == "triton" and needs.INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)
    return request.param


@pytest.fixture(
    params=[
        pytest.param("mosaic", marks=pytest.mark.gpu),
        pytest.param("triton", marks=[pytest.mark.triton, pytest.mark.uninterpreted]),
    ]
)
def kernels(request: pytest.FixtureRequest) -> str:
    """Each implementation that is kernels, for tests of a size that takes a GPU."""
    return request.param


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A compiler for an H100, which need not be present."""
    from h100 import Compiler  # of tests/mosaic, whose tests use it

    return Compiler(tmp_path_factory.mktemp("ptxas"))


def pytest_configure(config: pytest.Config) -> None:
    """Triton's kernels are compiled for a GPU that is not here, or were compiled elsewhere."""
    if folder := config.getoption("--export-triton"):
        gpu = config.getoption("--triton-gpu")
        programs = contextlib.ExitStack()
        programs.enter_context(triton_programs.recording(folder, gpu))
        config.add_cleanup(programs.close)
    elif folder := config.getoption("--exported-triton"):
        triton_programs.replay(folder)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files are left out whose imports are not here; None leaves it to pytest."""
    return needs.leaves_out_file(config, collection_path) or None


# Last: of what -k and -m have selected.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases are left out that cannot run here, and by ``--every`` others."""
    needs.leave_out(config, items)
    every = config.getoption("--every")
    if every > 1:
        seen: set[str] = set()
        chosen, others = [], []
        for item in items:
            test = item.nodeid.partition("[")[0]
            # The choice uses a hash, because a stride could select one value of a parameter each
            # time.
            at = zlib.crc32(item.nodeid.encode()) % every
            is_chosen = test not in seen or at == config.getoption("--offset") % every
            (chosen if is_chosen else others).append(item)
            seen.add(test)
        config.hook.pytest_deselected(items=others)
        items[:] = chosen
    if _is_worker(config):
        config.workeroutput["left_out"] = dict(needs.left_out(config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Record the cases that were left out, from the first process to end: all have the same."""
    counts = needs.left_out(node.config)
    if not counts:
        counts.update(getattr(node, "workeroutput", {}).get("left_out", {}))


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

    It names those reasons by `refused.expect`; any other refusal is a failure. Mosaic
    refuses the backward of a norm whose rows are no multiple of 16 bytes, in every test.
    """
    try:
        return (yield)
    except ValueError as error:
        refusal = refused.reason(error)
        mark = item.get_closest_marker("refused")
        expected = (refused.UNALIGNED, *(mark.args if mark is not None else ()))
        if refusal is None or not any(part in refusal for part in expected):
            raise
        pytest.skip(str(error))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="of each test, one case of N or so"
    )
    parser.addoption(
        "--offset", type=int, default=0, metavar="K", help="with --every: another choice for each K"
    )
    parser.addoption(
        "--export-triton",
        type=Path,
        metavar="FOLDER",
        help="without a GPU: compile the Triton kernels that tests launch, and use XLA's values",
    )
    parser.addoption(
        "--triton-gpu",
        type=triton_programs.gpu_of,
        default="h100",
        metavar="GPU",
        help="which GPU these are compiled for (default: %(default)s)",
    )
    parser.addoption(
        "--exported-triton",
        type=Path,
        metavar="FOLDER",
        help="without Triton: run kernels that --export-triton has compiled",
    )
    parser.addoption(
        "--write-refusals",
        action="store_true",
        help=f"write how many calls were refused to {refused.COUNTS.name}",
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints what was left out, and how many calls each implementation refused."""
    if _is_worker(config):
        return
    if line := needs.summary(config):
        terminalreporter.write_line(line)
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
    """Return True in one of several processes, which has seen only a part of the run."""
    return hasattr(config, "workerinput")
