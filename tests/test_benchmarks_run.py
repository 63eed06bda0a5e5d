"""The benchmark harness, without a GPU: how it is run, what fails, and what is kept."""

import csv
import dataclasses
import importlib
import io
import json
import subprocess
import sys
import time

import pytest

from benchmarks import machine, models, processes, results, run, worker
from benchmarks.machine import ROOT, Machine
from benchmarks.processes import Outcome
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.results import Table
from benchmarks.suites import SUITES, TimedCell

KERNELS = SUITES["kernels"]
CELL = TimedCell("rms_norm", "fwd", 4, 32, "float32", "float32", "xla")


# Rows.


def test_rows_survive_the_csv(tmp_path):
    table = Table(tmp_path, KERNELS)
    runs = run.Run(tmp_path, Machine("cpu"), "abc1234", {"xla": "jax 1"})
    figures = {"us": 1.234, "main_us": 1.0, "gbps": 1234.56, "roof": 0.98765, "compile_s": 0.1}
    first = runs.row(KERNELS, Outcome(CELL, figures, "ok"))
    failed = runs.row(KERNELS, Outcome(CELL, {}, "failed: out, of\tmemory"))
    for row in (first, failed):
        table.append(row)
    assert results.read(table.file, KERNELS.columns) == [first, failed]
    assert table.rows() == [failed]  # the last one counts
    assert first["roof"] == "0.9877"
    assert failed["us"] == ""


def test_what_has_a_row_is_not_measured_again(tmp_path):
    runs = run.Run(tmp_path, Machine("cpu"), "abc1234", {"xla": "jax 1"})
    other = dataclasses.replace(CELL, cols=64)
    missing = dataclasses.replace(CELL, provider="quack")
    asked = [CELL, other, missing]
    assert runs.todo(KERNELS, asked, again=False) == [CELL, other]
    Table(tmp_path, KERNELS).append(runs.row(KERNELS, Outcome(CELL, {}, "failed: no")))
    assert runs.todo(KERNELS, asked, again=False) == [other]
    assert runs.todo(KERNELS, asked, again=True) == [CELL, other]
    newer = dataclasses.replace(runs, software={"xla": "jax 2"})
    assert newer.todo(KERNELS, asked, again=False) == [CELL, other]


def test_a_csv_of_other_columns_is_refused(tmp_path):
    (tmp_path / "kernels.csv").write_text("device,us\ncpu,1\n")
    with pytest.raises(ValueError, match="got columns device,us; expected device,software"):
        Table(tmp_path, KERNELS).rows()
    assert run.main(["kernels", "--providers", "xla", "--out", str(tmp_path)]) == 2


def test_the_machine(monkeypatch):
    assert Machine("NVIDIA H200").folder == "nvidia_h200"
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.here() == Machine("cpu")


# Providers that fail, or are not there.


def test_a_provider_that_is_not_installed_is_a_row(tmp_path):
    absent = Provider("?", "torch", "nothing", ("no-such-distribution",))
    with pytest.raises(ModuleNotFoundError, match="pip install no-such-distribution"):
        assert absent.software
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROVIDERS, "quack", absent)
        assert run.main(["kernels", "--providers", "quack", "--out", str(tmp_path)]) == 0
    with (tmp_path / "providers.csv").open() as lines:
        (row,) = csv.DictReader(lines)
    assert row["provider"] == "quack"
    assert row["status"] == (
        "missing: no-such-distribution is not installed: pip install no-such-distribution"
    )


def answers(side, suite, cells):
    out = io.StringIO()
    code = worker.work(side, suite, cells, out)
    return code, [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_absent_side_is_named_for_every_cell(monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmarks.torch_side", None)
    code, got = answers("torch", "kernels", [CELL, CELL])
    assert code == 0
    assert len(got) == 2
    assert all(a["status"].startswith("missing: ModuleNotFoundError") for a in got)


class Side:
    """Cells that fail in several ways."""

    def __init__(self, *errors):
        self.errors = errors

    def measures(self, suite, cells):
        def measure(error):
            if error is not None:
                raise error
            return {"us": 1.0}

        return (lambda error=error: measure(error) for error in self.errors)

    def needs_restart(self, error):
        return "illegal address" in str(error)


def test_failures_are_answers(monkeypatch):
    group = ExceptionGroup("all failed", [NotImplementedError("only f32\nand more")])
    memory = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    side = Side(None, memory, group, ImportError("no"), RuntimeError("illegal address"), None)
    monkeypatch.setitem(sys.modules, "benchmarks.jax_side", side)
    code, got = answers("jax", "kernels", [CELL] * 6)
    assert code == worker.RESTART  # before the last cell
    assert [a["status"] for a in got] == [
        "ok",
        "failed: RuntimeError: RESOURCE_EXHAUSTED: out of memory",
        "failed: NotImplementedError: only f32",
        "missing: ImportError: no",
        "failed: RuntimeError: illegal address",
    ]


WORKER = """
import json, os, sys, time
request = json.load(sys.stdin)
for cell in request["cells"]:
    if cell["cols"] == 1: print("segmentation fault", file=sys.stderr); os._exit(139)
    if cell["cols"] == 2: time.sleep(60)
    print(json.dumps({"figures": {"us": cell["cols"]}, "status": "ok"}), flush=True)
    if cell["cols"] == 3: sys.exit(75)
"""


@pytest.fixture
def started(monkeypatch):
    """Workers are WORKER; the list has the commands that would have started them."""
    commands = []

    def popen(command, *, real=subprocess.Popen, **options):
        commands.append(command)
        return real([sys.executable, "-c", WORKER], **options)

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    return commands


def test_a_process_that_dies_or_hangs_costs_one_cell(started):
    cells = [dataclasses.replace(CELL, cols=n) for n in (8, 1, 9, 3, 2, 7)]
    got = list(processes.outcomes("jax", KERNELS, cells, limit_s=3))
    assert [o.cell for o in got] == cells
    assert [o.figures.get("us") for o in got] == [8, None, 9, 3, None, 7]
    assert got[1].status == "failed: its process ended with code 139: segmentation fault"
    assert got[4].status.endswith("no answer in 3 s")
    assert len(started) == 4
    assert started[0][1:] == ["-m", "benchmarks.worker", "jax"]


@pytest.mark.usefixtures("started")
def test_an_interrupted_run_leaves_no_process():
    cells = [dataclasses.replace(CELL, cols=n) for n in (8, 2)]
    one = processes.outcomes("jax", KERNELS, cells)
    assert next(one).status == "ok"
    start = time.monotonic()
    one.close()  # while the worker sleeps over its second cell, for a minute
    assert time.monotonic() - start < 30


def test_a_run_on_the_cpu(tmp_path, capfd):
    """The whole way, in a process of its own: cells, rows, report; then nothing is left to do."""
    arguments = ["kernels", "accuracy", "--ops", "rms_norm", "--dtypes", "bfloat16"]
    arguments += ["--shapes", "4x32", "--providers", "xla", "jnp", "--out", str(tmp_path)]
    if machine.here() != Machine("cpu"):
        pytest.skip("takes the GPU's memory from the tests")
    assert run.main(arguments) == 0
    rows = Table(tmp_path, KERNELS).rows()
    assert [(r["direction"], r["provider"], r["status"]) for r in rows] == [
        (direction, provider, "ok") for direction in ("fwd", "bwd") for provider in ("xla", "jnp")
    ]
    assert all(float(r["us"]) > 0 and float(r["roof"]) > 0 for r in rows)
    accurate = Table(tmp_path, SUITES["accuracy"]).rows()
    assert all(float(r["dx_error"]) < 1e-2 and float(r["dscale_error"]) < 1e-2 for r in accurate)
    assert "xla" in (tmp_path / "report.md").read_text()
    capfd.readouterr()
    assert run.main(arguments) == 0
    assert "0 cells to measure" in capfd.readouterr().out


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_torch_cells(direction):
    pytest.importorskip("torch")
    side = importlib.import_module("benchmarks.torch_side")
    cell = dataclasses.replace(CELL, direction=direction, provider="torch")
    (measure,) = side.measures("kernels", [cell])
    assert measure()["us"] > 0
    (measure,) = side.measures("accuracy", [dataclasses.replace(cell, direction="bwd")])
    assert measure()["dx_error"] < 1e-6


def test_neither_side_is_needed_to_plan():
    """The parent takes no GPU memory: it imports neither JAX nor torch."""
    program = "import sys, benchmarks.run; print([m for m in ('jax', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_training_step(monkeypatch):
    training = importlib.import_module("benchmarks.training")
    monkeypatch.setitem(models.MODELS, "tiny", models.Size(2, 32, 2, 16, 4))
    cell = models.TrainingCell("tiny", "scan", "float32", 4, "jaxnorm-output")
    small, large = (training.Step(cell, batch) for batch in (4, 8))
    state, _ = training.jax.tree.flatten(training.jax.eval_shape(small.state))
    state_bytes = sum(a.size * a.dtype.itemsize for a in state)
    assert small.peak_bytes >= state_bytes + small.temp_bytes
    assert large.temp_bytes > small.temp_bytes
    figures = training.speed(small)
    assert figures["tokens_per_s"] == pytest.approx(4 * 16 / figures["ms"] * 1e3)


def test_the_variants_are_the_demos():
    training = importlib.import_module("benchmarks.training")
    assert [v.label for v in training.VARIANTS] == list(models.VARIANTS.values())
