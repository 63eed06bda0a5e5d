"""``python -m jaxnorm``: its output, the errors that its check finds, and its exit status."""

import ast
import ctypes
import io
import runpy
import sys
import types
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxnorm
from jaxnorm.__main__ import main
from jaxnorm.calls import backends
from jaxnorm.tools import machine, references, selfcheck, text, wall_time
from jaxnorm.tools.plan import functions
from jaxnorm_kernels import xla
from jaxnorm_kernels.implementation import Implementation

pytestmark = pytest.mark.usefixtures("quick_to_compile")

HERE = backends.local_platform()
on_a_cpu = pytest.mark.skipif(HERE != "cpu", reason="kernels run here")


# ------------------------------------------------------------------- the report of this machine


def test_report(monkeypatch, capsys):
    """Run in this process, ``python -m jaxnorm`` prints the versions and the functions."""
    monkeypatch.setattr(sys, "argv", ["jaxnorm"])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # restored after the test
    monkeypatch.delitem(sys.modules, "jaxnorm.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("jaxnorm", run_name="__main__")
    out, err = capsys.readouterr()
    assert not ended.value.code
    assert HERE != "cpu" or not err
    words = out.split()
    for package in ("jax", "jaxlib", "numpy"):
        assert words[words.index(package) + 1] == metadata.version(package)
    assert words[words.index("jaxnorm") + 1] == jaxnorm.__version__
    for name in functions():
        assert f"\n  {name} " in out
    assert str(jax.local_devices()[0].device_kind) in out


def test_what_runs_names_the_reasons(monkeypatch):
    monkeypatch.setattr(backends, "local_platform", lambda: "cuda")
    lines = list(machine._choices())
    at = [line[0] for line in lines].index("layer_norm")
    scale = jax.ShapeDtypeStruct((4096,), "float32")
    plan = jaxnorm.implementation_for("layer_norm", (8192, 4096), "bfloat16", scale=scale)
    assert lines[at : at + 2] == [
        ("layer_norm", "forward", str(plan.forward)),
        ("", "backward", str(plan.backward)),
    ]
    monkeypatch.setattr(backends, "local_platform", lambda: "tpu")
    # The report has one line for both passes of layer_norm if they have the same implementation.
    assert ("layer_norm", "", "xla (the default for tpu)") in list(machine._choices())


@pytest.mark.parametrize(
    ("failed", "client", "expected"),
    [
        (0, "PJRT C API\ncuda 13000", {"CUDA driver": "up to CUDA 12.8", "CUDA runtime": "13.0"}),
        (1, "another runtime", {}),
    ],
)
def test_devices_and_cuda(failed, client, expected, monkeypatch):
    device = types.SimpleNamespace(
        device_kind="NVIDIA H100",
        compute_capability="9.0",
        memory_stats=lambda: {"bytes_limit": 60 * 2**30},
        client=types.SimpleNamespace(platform_version=client),
    )
    said = machine._device(device)
    assert said.endswith("(NVIDIA H100), compute capability 9.0, 60.0 GiB of memory for JAX")

    def version(pointer):
        pointer._obj.value = 12080
        return failed

    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    driver = types.SimpleNamespace(cuDriverGetVersion=version)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert dict(machine._cuda_versions()) == expected


# -------------------------------------------------------------------------------------- the check


def shifted(function, factor):
    """Return a function whose results are those of `function`, multiplied by `factor`."""
    return lambda **operands: jax.tree.map(lambda a: a * factor, function(**operands))


@pytest.mark.parametrize("case", selfcheck.CASES, ids=str)
def test_right_and_wrong_values(case, monkeypatch):
    """The check accepts correct values, and rejects values that have a relative error of 2**-12."""
    right = selfcheck.check(case, "bfloat16")
    assert right.is_right, right
    assert HERE != "cpu" or not right.has_kernel
    function = getattr(jaxnorm, case.function)
    monkeypatch.setattr(jaxnorm, case.function, shifted(function, 1 + 2**-12))
    wrong = selfcheck.check(case, "float32")
    assert min(wrong.value, wrong.gradient) > 1, wrong
    assert not wrong.is_right


@pytest.mark.parametrize("name", ["softmax causal", "rms_norm", "linear_kl_divergence"])
def test_wrong_values_of_bfloat16(name, monkeypatch):
    """The bounds of bfloat16 are larger; with them, the check finds a relative error of 2**-4."""
    (case,) = [case for case in selfcheck.CASES if str(case) == name]
    function = getattr(jaxnorm, case.function)
    monkeypatch.setattr(jaxnorm, case.function, shifted(function, 1 + 2**-4))
    wrong = selfcheck.check(case, "bfloat16")
    assert min(wrong.value, wrong.gradient) > 1, wrong


def test_the_references_share_nothing_with_what_they_check():
    """The references import only JAX, NumPy and the standard library."""
    tree = ast.parse(Path(references.__file__).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or alias.name for node in nodes for alias in node.names]
    allowed = {"collections", "functools", "jax", "math", "numpy", "typing"}
    assert {name.partition(".")[0] for name in names} <= allowed


def few_cases(monkeypatch):
    cases = [case for case in selfcheck.CASES if str(case) in ("softmax", "rms_norm")]
    monkeypatch.setattr(selfcheck, "CASES", cases)


@on_a_cpu
def test_exit_status_of_what_is_right(monkeypatch, capsys):
    few_cases(monkeypatch)
    assert main(["--check"]) == 0
    out, err = capsys.readouterr()
    assert not err  # no progress bar without a terminal
    assert "4 of 4 are right" in out
    assert "No kernel was checked: on cpu" in out
    assert out.count("xla, xla") == 4


@on_a_cpu
def test_processes_find_what_threads_find(monkeypatch):
    """The self-check has the same outcomes in processes as in threads.

    By default, it runs in processes on a GPU, and in threads otherwise.
    """
    few_cases(monkeypatch)
    in_threads = selfcheck.run()
    monkeypatch.setattr(selfcheck, "_IN_PROCESSES", {HERE})
    in_processes = selfcheck.run()
    for here, there in zip(in_threads, in_processes, strict=True):
        assert (str(here.case), here.dtype) == (str(there.case), there.dtype)
        assert here.implementations == there.implementations
        assert there.is_right


class Kernels(types.ModuleType):
    """A module of stand-in kernels that run XLA's code."""

    forward, backward = staticmethod(xla.forward), staticmethod(xla.backward)

    @property
    def IMPLEMENTATION(self):  # noqa: N802
        return Implementation(self.forward, self.backward)


@pytest.fixture
def kernels(monkeypatch):
    """Make `Kernels` the default on this platform, and make ``--check`` fast.

    ``--check`` then has only a few cases and times only one call, on small arrays.
    """
    module = Kernels("kernels_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(backends.MODULES, "kernels", module.__name__)
    monkeypatch.setattr(backends, "_CANDIDATES", {HERE: ("kernels",)})
    few_cases(monkeypatch)
    monkeypatch.setattr(selfcheck, "_IN_PROCESSES", set())  # other processes cannot import it
    small = selfcheck.Case("rms_norm", {"x": (4, 8), "scale": (8,)})
    monkeypatch.setattr(wall_time, "CALLS", (small,))
    jax.clear_caches()
    yield module
    jax.clear_caches()


def test_kernels_are_timed_against_xla(kernels, capsys):
    assert main(["--check"]) == 0
    out = capsys.readouterr().out
    assert out.count("kernels, kernels") == 4
    assert "No kernel was checked" not in out
    (line,) = [line for line in out.splitlines() if line.startswith("rms_norm  4 x 8  bfloat16")]
    assert line.count(" us") == 2
    assert float(line.split()[-1]) > 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_kernel_is_an_exit_status(direction, kernels, capsys):
    def wrong(*operands):
        first, *others = right = getattr(xla, direction)(*operands)
        is_norm = operands[-1].is_norm
        return type(right)(first + 0.1, *others) if is_norm else right

    setattr(kernels, direction, wrong)
    assert main(["--check"]) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG") == 2
    assert "2 of 4 are right" in out
    assert "wall time" not in out


def test_a_kernel_that_does_not_run_is_wrong(kernels, capsys, monkeypatch):
    def fails(*operands):
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr(backends, "_unlowered", {})
    kernels.backward = fails
    assert main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "its kernel cannot be lowered: RuntimeError: no such instruction\n" in out


# ----------------------------------------------------------------------- error bounds, and messages


@pytest.mark.parametrize(
    ("expected", "computed", "is_right"),
    [
        (np.inf, np.inf, True),
        (np.inf, -np.inf, False),
        (np.inf, 1.0, False),
        (np.inf, np.nan, False),
        (1.0, 1.0, True),
        (1.0, np.inf, False),
        (1.0, np.nan, False),
    ],
)
def test_values_that_are_not_finite(expected, computed, is_right):
    """A value is infinite exactly where the reference is, with the same sign."""
    value = np.array([[expected, 2.0]])
    worst = selfcheck._worst(np.array([[computed, 2.0]]), value, np.zeros_like(value))
    assert worst == (0 if is_right else np.inf)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_terminals(terminal, monkeypatch):
    written = io.StringIO()
    written.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", written)
    assert list(text.progress(["a", "b"], after=60.0)) == ["a", "b"]
    assert not written.getvalue()
    assert list(text.progress(["a", "b"])) == ["a", "b"]
    assert ("1/2 b" in written.getvalue()) == bool(written.getvalue()) == terminal
