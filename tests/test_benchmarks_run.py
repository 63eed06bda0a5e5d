"""The benchmark harness without a GPU: command lines, failures, and the rows that are written."""

import collections
import csv
import dataclasses
import inspect
import subprocess
import sys

import pytest
from benchmark_cases import rows_of_run

import jaxnorm
from benchmarks import compile_times, first_calls, providers, report_tables, results, run
from benchmarks.bars import BARS
from benchmarks.compile_times import WIDTHS
from benchmarks.models import MODELS, Size
from benchmarks.processes import Outcome
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.results import ROOT, Machine, Table
from benchmarks.suites import SUITES, Selection, TimedCell

KERNELS = SUITES["kernels"]
CELL = TimedCell("rms_norm", "fwd", 4, 32, "float32", "float32", "xla")


# The rows of the CSV files.


def test_rows_survive_the_csv(tmp_path):
    table = Table(tmp_path, KERNELS)
    runs = run.Run(tmp_path, Machine("cpu"), "abc1234", {"xla": "jax 1"})
    figures = {"us": 1.234, "main_us": 1.0, "gbps": 1234.56, "roof": 0.98765, "compile_s": 0.1}
    first = runs.row(KERNELS, Outcome(CELL, figures, "ok"))
    failed = runs.row(KERNELS, Outcome(CELL, {}, "failed: out, of\tmemory"))
    for row in (first, failed):
        table.append(row)
    assert results.read(table.file, KERNELS.columns) == [first, failed]
    assert table.rows() == [failed]  # the newest row of this cell
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
    monkeypatch.setattr(results.shutil, "which", lambda name: None)
    assert results.this_machine() == Machine("cpu")


# Providers that fail, or that are not installed.


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


def test_a_run_on_the_cpu(tmp_path, capfd):
    """A run in two processes writes rows and a report; a second run finds nothing left to do."""
    arguments = ["kernels", "api", "--ops", "rms_norm", "--dtypes", "bfloat16"]
    arguments += ["--shapes", "4x32", "--providers", "xla", "jnp", "--workers", "2"]
    rows = rows_of_run(tmp_path, KERNELS, arguments)
    assert [(r["direction"], r["provider"], r["status"]) for r in rows] == [
        (direction, provider, "ok") for direction in ("fwd", "bwd") for provider in ("xla", "jnp")
    ]
    assert all(float(r["us"]) > 0 and float(r["roof"]) > 0 for r in rows)
    both = Table(tmp_path, SUITES["api"]).rows()
    assert [(r["direction"], r["status"]) for r in both] == [("fwd+bwd", "ok")] * 2
    assert "## kernels" in (tmp_path / "report.md").read_text()
    capfd.readouterr()
    assert rows_of_run(tmp_path, KERNELS, arguments) == rows
    assert "0 cells to measure" in capfd.readouterr().out


def test_a_run_of_blocks(tmp_path):
    arguments = ["blocks", "--ops", "add_rms_norm", "--dtypes", "mixed", "--shapes", "4x32"]
    arguments += ["--providers", "jaxnorm", "jnp", "--workers", "1"]
    rows = rows_of_run(tmp_path, SUITES["blocks"], arguments)
    assert [(r["direction"], r["provider"], r["status"]) for r in rows] == [
        (direction, provider, "ok")
        for direction in ("fwd", "fwd+bwd")
        for provider in ("jaxnorm", "jnp")
    ]
    assert all(float(r["us"]) > 0 and r["shape"] == "4x32" for r in rows)
    assert all(int(r["extra_passes"]) >= 0 and r["kernels"] == "" for r in rows)
    assert "| add_rms_norm, 4 x 32 |" in (tmp_path / "report.md").read_text()


def test_a_run_of_first_calls(tmp_path, capfd):
    """On a CPU, the suite `compile` lowers programs for a GPU but does not compile them."""
    arguments = ["compile", "--ops", "rms_norm", "--dtypes", "bfloat16", "mixed"]
    arguments += ["--shapes", "1x128", "--workers", "1"]
    rows = rows_of_run(tmp_path, SUITES["compile"], arguments)
    assert [(r["shape"], r["dtype"], r["provider"], r["status"]) for r in rows] == [
        ("8192x128", "bfloat16", "jaxnorm", "ok"),
        ("8192x128", "bfloat16", "jnp", "ok"),
        ("8192x128", "mixed", "jaxnorm", "ok"),
        ("8192x128", "float16", "jaxnorm", "ok"),
    ]
    for row in rows:
        assert float(row["total_s"]) >= float(row["trace_s"]) > 0
        assert row["compile_s"] == ""
    table = report_tables.compile_times(rows)
    assert "| jaxnorm: rms_norm |" in table
    assert table in capfd.readouterr().out
    slow = [rows[0] | {"total_s": "4.5"}, *rows[1:]]
    assert "| 4.50 | rms_norm 8192x128 bfloat16 | 1 of 3 |" in report_tables.compile_times(slow)


def test_first_calls_of_training_steps(monkeypatch):
    """Training steps can be lowered for a GPU, in three variants.

    The variants use plain JAX, only jaxnorm's norms, or all of jaxnorm.
    """
    tiny = Size("gpt2", 2, 64, 2, 2, 128, 96, seq=16, batch=2)
    monkeypatch.setitem(MODELS, "tiny", tiny)
    monkeypatch.setitem(compile_times.STEPS, "tiny scan", ("tiny", "scan", 2))
    cells = list(compile_times.steps(["jaxnorm", "jnp"], ["tiny"]))
    assert [(c.op, c.shape) for c in cells] == [("tiny scan", "2x16")] * 3
    rows = []
    for cell in cells:
        figures = first_calls.seconds(cell)
        assert figures["total_s"] >= figures["trace_s"] > 0
        figures = results.rounded(SUITES["compile"], figures)
        rows.append(dataclasses.asdict(cell) | figures | {"status": "ok"})
    assert [row["provider"] for row in rows] == ["jnp", "jaxnorm-norms", "jaxnorm-products"]
    rows[0]["total_s"], rows[1]["total_s"] = "1.500", "2.250"
    table = report_tables.compile_times(rows).splitlines()
    assert table[0].startswith("| training step | functions | trace s |")
    assert table[2].startswith("| tiny scan, 2 x 16 | plain JAX and optax |")
    assert table[3].endswith("| 2.250 | +0.75 |")


def test_first_calls_are_of_every_public_function():
    """The suite `compile` covers every public function that has kernels."""
    cells = list(SUITES["compile"].cells(Selection()))
    ours = {
        providers.function("jaxnorm", cell.op, cell.workload.y_dtype).func
        for cell in cells
        if cell.provider == "jaxnorm"
    }
    # Functions that have no kernels of their own, or that do not compute arrays.
    none = {
        "auto_remat",
        "fit_memory",
        "linear_loss",
        "remat_plan",
        "gated_linear",
        "activation_linear",
        "check_params",
        "memory_report",
        "implementation_for",
        "save_policy",
    }
    assert "rms_norm_rope" in compile_times.OPS  # not in `ours`: called by a lambda
    none.add("rms_norm_rope")
    functions = {f for f in map(vars(jaxnorm).get, jaxnorm.__all__) if inspect.isfunction(f)}
    assert len(functions) >= 14
    assert functions - {getattr(jaxnorm, name) for name in none} <= ours
    for op in compile_times.OPS:
        dtypes = collections.Counter(
            cell.dtype for cell in cells if cell.op == op and cell.provider == "jaxnorm"
        )
        multiple = compile_times.COLUMNS_ARE_MULTIPLES_OF.get(op, 1)
        assert {*dtypes.values()} == {sum(cols % multiple == 0 for cols in WIDTHS)}
        assert {"bfloat16", "float16", "float32"} <= {*dtypes}


def asked(*arguments):
    """Return the selected cells of the suite `training`."""
    selection = run.selected(run.parse(["training", *arguments]))
    return list(SUITES["training"].cells(selection))


def test_training_steps_are_selected():
    every = asked()
    assert len({*every}) == len(every)
    assert {cell.layers for cell in every} == {"scan", "unrolled"}
    arguments = (
        "--ops llama-1b-qk --variants jnp jaxnorm-products --remats none --layers scan --devices 1"
    )
    found = [(c.model, c.remat, c.layers, c.provider) for c in asked(*arguments.split())]
    assert found == [
        ("llama-1b-qk", "none", "scan", "jnp"),
        ("llama-1b-qk", "none", "scan", "jaxnorm-products"),
    ]
    assert {c.provider for c in asked("--providers", "jnp")} == {"jnp"}
    assert [c.layers for c in asked("--quick", "--variants", "jnp", "--devices", "1")] == ["scan"]


def test_training_steps_on_a_mesh():
    """On a mesh, the batch size is multiplied by the number of devices.

    The benchmark's cell (one row of its results) has the name of the mesh.
    """
    found = asked("--ops", "llama-1b", "--quick", "--variants", "jnp", "--devices", "1", "2")
    assert [(c.batch, c.mesh, c.devices) for c in found] == [(4, "", 1), (8, "fsdp=2", 2)]


def test_steps_that_bars_compare():
    """`--bars` selects the two training steps that each bar compares.

    A bar is an upper limit for the ratio of two measured numbers (times or memory). One is of a
    step with jaxnorm, and the other is of a step in plain JAX. A step that occurs in several bars
    is selected once.
    """
    every = asked("--bars")
    assert len({*every}) == len(every)
    assert {cell for bar in BARS for cell in bar.cells} == {*every} <= {*asked()}
    only = asked("--bars", "--ops", "gpt2-small", "--remats", "none", "dots")
    assert [(c.remat, c.provider) for c in only] == [
        ("none", "jaxnorm-products"),
        ("none", "jnp"),
        ("dots", "jnp"),
    ]


def test_neither_side_is_needed_to_plan():
    """The parent process imports neither JAX nor torch, so it takes no GPU memory."""
    program = "import sys, benchmarks.run; print([m for m in ('jax', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
