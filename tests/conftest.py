"""Fixtures that every test file shares."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Pallas' interpreter runs each warpgroup in a thread of XLA's CPU pool. The warpgroups wait for
# each other, so they would hang if the pool had fewer threads than there are warpgroups. NPROC is
# the size of the pool. It must be set before JAX creates its backend.
os.environ.setdefault("NPROC", "16")

# If several test processes share a GPU, each must release the memory of finished tests. Otherwise,
# the processes together would need more than the GPU's 80 GB.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import branches
import jax
import needs
import pytest
import refused
import sample
import triton_programs

from jaxnorm.calls import backends
from jaxnorm.primitives.rules import in_one_chunk

# GPUs multiply float32 matrices in TF32 by default. The tests' bounds do not cover its rounding.
jax.config.update("jax_default_matmul_precision", "highest")

# Tests on meshes need several devices.
jax.config.update("jax_num_cpu_devices", 8)


#: The ids of all cases that can run on this machine, whether they are in the chosen sample or not.
CASES = pytest.StashKey[list[str]]()


def load_alone(implementation: str, name: str) -> Any:
    """Import one module of a kernel implementation without importing the implementation's package.

    The package itself would require an optional dependency (an extra).
    """
    (package,) = importlib.util.find_spec("jaxnorm_kernels").submodule_search_locations
    file = f"{package}/{implementation}/{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def every_kernel_is_lowered() -> Iterator[None]:
    """Fail a test in which XLA's code ran because the default kernel could not be lowered."""
    yield
    reasons = [*backends._unlowered.values()]
    backends._unlowered.clear()
    assert not reasons


@pytest.fixture
def x64() -> Iterator[None]:
    """Enable 64-bit types, for tests that need float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def quick_to_compile() -> Iterator[None]:
    """Compile without LLVM's optimisations, for tests of many programs whose speed does not matter.

    XLA's own passes still run, so fusion and copies are the same as for users.
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
    """Return the name of an implementation. The test runs once with each implementation.

    A test passes the name as `implementation=`. The error bounds are the same for all
    implementations.
    """
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
    """Return the name of a kernel implementation. The test runs once with each of them.

    The arrays of tests with this fixture are too large to run without a GPU.
    """
    return request.param


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a compiler that compiles for an H100. The machine needs no GPU."""
    from h100 import Compiler  # a module in tests/mosaic/

    return Compiler(tmp_path_factory.mktemp("ptxas"))


def pytest_configure(config: pytest.Config) -> None:
    """Handle the two options that move Triton kernels between machines.

    `--export-triton` compiles the Triton kernels that tests launch, for a GPU that need not be
    present, and writes them to a folder. `--exported-triton` runs the kernels of such a folder on a
    machine without Triton.
    """
    if folder := config.getoption("--export-triton"):
        gpu = config.getoption("--triton-gpu")
        programs = contextlib.ExitStack()
        programs.enter_context(triton_programs.recording(folder, gpu))
        config.add_cleanup(programs.close)
    elif folder := config.getoption("--exported-triton"):
        triton_programs.replay(folder)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a test file if a package that it imports is not installed.

    Return None for other files, so that pytest decides.
    """
    return needs.leaves_out_file(config, collection_path) or None


# This hook runs last, so it sees only the cases that -k and -m have selected.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases that cannot run on this machine, and cases outside of the chosen sample."""
    needs.leave_out(config, items)
    cases = config.stash[CASES] = [item.nodeid for item in items]
    every, rest = config.getoption("--every"), config.getoption("--rest")
    if every > 1:
        found = sample.chosen(cases, every, config.getoption("--offset"))
        chosen = [item for item in items if (item.nodeid in found) != rest]
        config.hook.pytest_deselected(items=[i for i in items if (i.nodeid in found) == rest])
        items[:] = chosen
    if _is_worker(config):
        config.workeroutput["left_out"] = dict(needs.left_out(config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Copy the branches and the counts of left-out cases from a worker of pytest-xdist.

    Of the counts, only those of the first worker that ends are taken, because all workers leave out
    the same cases.
    """
    output = getattr(node, "workeroutput", {})
    branches.add(output.get("branches", ()))
    counts = needs.left_out(node.config)
    if not counts:
        counts.update(output.get("left_out", {}))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Allocate a large chunk of memory for Python's stack, and then run a test.

    This makes tracing faster, as `in_one_chunk` explains.
    """
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(in_one_chunk, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test if an implementation refuses its call for an expected reason.

    A test lists the expected reasons with `refused.expect`; any other refusal is a failure. One
    reason is expected in every test: Mosaic refuses the backward of a norm if the length of a row
    is not a multiple of 16 bytes.
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
    parser.addoption("--rest", action="store_true", help="with --every: the cases it leaves out")
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
    """Print which tests were left out, and how many calls each implementation refused."""
    if _is_worker(config):
        return
    if line := needs.summary(config):
        terminalreporter.write_line(line)
    counted = refused.count(terminalreporter.stats)
    for line in (*refused.summary(counted), *branches.report()):
        terminalreporter.write_line(line)
    if config.getoption("--write-refusals"):
        refused.write(counted)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if the numbers of refused calls are not those of `refused.json`.

    The file lists, for each test, how many of its calls each implementation refuses.
    """
    if _is_worker(session.config):
        session.config.workeroutput["branches"] = branches.taken()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or _is_worker(session.config):
        return
    if refused.differences(refused.count(reporter.stats)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_worker(config: pytest.Config) -> bool:
    """Return True in a worker process of pytest-xdist. A worker runs only a part of the tests."""
    return hasattr(config, "workerinput")
