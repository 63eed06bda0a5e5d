"""The benchmarks without a GPU: what is measured, what the providers compute, rows and tables."""

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
from program_error import assert_computes
from reference import SAFETY, assert_within, exact, unit_roundoff

from benchmarks import against_plain, jax_side, providers, results, run, tables
from benchmarks.blocks import BLOCKS, BlockWorkload
from benchmarks.losses import CROSS_ENTROPIES, LOSSES, LossWorkload
from benchmarks.processes import Outcome
from benchmarks.providers import LINEAR_LOSSES, NORMS, PROVIDERS
from benchmarks.providers.jnp_functions import layer_norm, rms_norm
from benchmarks.results import Table
from benchmarks.suites import SUITES, ShapedCell, TimedCell
from benchmarks.workloads import OPERATIONS, Workload

pytestmark = pytest.mark.usefixtures("quick_to_compile")

CELL = TimedCell("rms_norm", "fwd", 4, 32, "float32", "float32", "xla")
KERNELS = SUITES["kernels"]


# What is measured.


@pytest.mark.parametrize(
    ("workload", "size"),
    [
        # The number of bytes counts the arrays that each pass loads and stores. Forward: x and y.
        (Workload("rms_norm", "fwd", 10, 30, "float32", "bfloat16"), 300 * (4 + 2)),
        # Forward: x, residual, y, h. Backward: y, dy, dh, and one gradient of x and residual.
        (BlockWorkload("add_rms_norm", "fwd+bwd", "10x30", "bfloat16"), 300 * 8 * 2),
        # Forward: x, gate, y. Backward: x, gate, dy and two gradients.
        (BlockWorkload("gated_rms_norm", "fwd+bwd", "10x30", "float32"), 300 * 8 * 4),
        # Both passes load logits and labels, and load or store losses; dx is stored.
        (LossWorkload("cross_entropy", "fwd+bwd", "10x30", "bfloat16"), 300 * 3 * 2 + 2 * 10 * 8),
        # The teacher's logits have no gradient.
        (LossWorkload("kl_divergence", "fwd+bwd", "10x30", "float32"), 300 * 5 * 4 + 2 * 10 * 4),
    ],
    ids=lambda value: getattr(value, "op", ""),
)
def test_bytes(workload, size):
    assert workload.bytes == size


def asked(arguments):
    given = run.parse(arguments.split())
    return [c for name in given.suites for c in SUITES[name].cells(run.selected(given))]


def test_selections_of_the_command_line(capsys):
    found = asked("kernels --ops rms_norm --directions bwd --shapes 4x32 --dtypes mixed")
    assert {(c.op, c.direction, c.rows, c.dtype) for c in found} == {
        ("rms_norm", "bwd", 4, "mixed")
    }
    steps = asked("training --ops llama-1b --variants jnp --remats none")
    assert [(c.layers, c.provider) for c in steps] == [("scan", "jnp"), ("unrolled", "jnp")]
    losses = asked("loss linear_loss --shapes 4x32 4x8x32 --providers jnp --dtypes bfloat16")
    assert {c.op for c in losses} == {*LOSSES}
    for cell in losses:
        assert cell.op.startswith(("linear", "capped_linear")) == (cell.shape == "4x8x32")
    assert len(asked("compile --ops gpt2-small --shapes 4x32")) == 0
    assert {c.op[:10] for c in asked("compile --ops gpt2-small")} == {"gpt2-small"}
    for arguments, message in {
        "speed": "got speed; expected some of kernels, api",
        "--shapes 0x4096": "got '0x4096'; expected ROWSxCOLS",
    }.items():
        with pytest.raises(SystemExit):
            asked(arguments)
        assert message in capsys.readouterr().err


# How calls are timed.


@pytest.fixture
def compiled():
    """Return a list that gets a new element whenever XLA compiles a program."""
    found = []

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize(
    ("suite", "cell"),
    [
        ("kernels", dataclasses.replace(CELL, cols=37)),
        ("kernels", dataclasses.replace(CELL, cols=38, direction="bwd")),
        ("blocks", ShapedCell("sandwich", "fwd+bwd", "4x36", "float32", "jaxnorm")),
    ],
)
def test_nothing_compiles_while_a_cell_is_measured(suite, cell, compiled):
    measure = jax_side.prepare(suite, cell)
    assert compiled
    before = len(compiled)
    assert measure()["us"] > 0
    assert len(compiled) == before
    jax_side.release()
    assert jax_side.rotating_inputs.cache_info().currsize == 0


# What the providers compute.


@pytest.mark.parametrize(
    ("name", "op"),
    [*itertools.product(("jaxnorm", "xla"), OPERATIONS), *itertools.product(("flax",), NORMS)],
)
def test_the_providers_compute_the_operation(name, op):
    """All measured libraries compute the same function, with the same epsilon and dtype of y."""
    workload = Workload(op, "fwd", 4, 32, "float32", "float32")
    (x,), parameters, _ = jax_side.random_arrays(0, *jax_side.arguments_of(workload))
    operands = 1e-3 * x, *parameters  # x^2 is near epsilon, so that epsilon matters.
    plain = {"rms_norm": rms_norm, "layer_norm": layer_norm}.get(op) or getattr(jax.nn, op)
    function = providers.function(name, op, "float32")
    assert_computes(function(*operands), plain, *operands, like=function)


@pytest.mark.parametrize("op", BLOCKS)
def test_the_providers_compute_the_block(op):
    """The results have the dtypes that the benchmark assumes when it counts bytes."""
    shape = {2: "4x32", 3: "2x4x32", 4: "2x3x4x32"}[len(BLOCKS[op].shapes[0])]
    for dtype in ("float32", "mixed"):
        workload = BlockWorkload(op, "fwd", shape, dtype)
        if not PROVIDERS["jaxnorm"].offers(workload):
            continue
        rows, parameters, _ = jax_side.random_arrays(0, *jax_side.arguments_of(workload))
        parameters = [p.astype("bfloat16").astype("float32") for p in parameters]
        expected, ours = (providers.function(n, op, workload.y_dtype) for n in ("jnp", "jaxnorm"))
        actual = jax.tree.leaves(ours(*rows, *parameters))
        assert [a.dtype for a in actual] == [d for _, d in workload.cotangents]
        assert_computes(actual, expected, *rows, *parameters, like=ours)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        *itertools.product(("jaxnorm",), LOSSES),
        *itertools.product(("optax",), CROSS_ENTROPIES),
        *((name, "linear_cross_entropy") for name in LINEAR_LOSSES),
    ],
)
def test_the_providers_compute_the_loss(name, op):
    """All measured implementations compute the same loss and gradients as jnp."""
    is_linear = len(LOSSES[op].shapes[0]) > 2
    shape, dtype = ("6x8x40", "bfloat16") if is_linear else ("6x40", "float32")
    cell = ShapedCell(op, "fwd+bwd", shape, dtype, name)
    inputs = jax_side.random_arrays(0, *jax_side.arguments_of(cell.workload))
    programs = map(jax_side.compile_cell, (dataclasses.replace(cell, provider="jnp"), cell))
    expected, actual = (jax.tree.leaves(p.call(*p.operands(*inputs))) for p in programs)
    counts = len(cell.workload.results), len(cell.workload.gradients)
    assert [a.dtype for a in actual] == ["float32"] * counts[0] + [dtype] * counts[1]
    # The implementations round logits, or gradients of logits, to the cell's dtype at different
    # points. The results are sums of such numbers, so their error grows with the square root of the
    # number of terms, which is at most the length of an operand's last axis.
    walk = 2 * SAFETY * unit_roundoff(dtype) * np.sqrt(max(a.shape[-1] for a in inputs[0]))
    for a, e in zip(actual, expected, strict=True):
        assert_within(a, exact(e), walk * np.abs(exact(e)).max())


# The rows of the CSV files.


def test_rows_survive_the_csv(tmp_path):
    """What has a row is not measured again, and the newest row of a cell is the valid one."""
    table = Table(tmp_path, KERNELS)
    runs = run.Run(tmp_path, "cpu", "abc1234", {"xla": "jax 1"})
    other = dataclasses.replace(CELL, cols=64)
    cells = [CELL, other, dataclasses.replace(CELL, provider="optax")]
    assert runs.todo(KERNELS, cells) == [CELL, other]
    first = runs.row(KERNELS, Outcome(CELL, {"us": 1.234, "roof": 0.98765}, "ok"))
    failed = runs.row(KERNELS, Outcome(CELL, {}, "failed: out, of\tmemory"))
    for row in (first, failed):
        table.append(row)
    assert results.read(table.file, KERNELS.columns) == [first, failed]
    assert table.rows() == [failed]
    assert (first["roof"], failed["us"]) == ("0.9877", "")
    assert runs.todo(KERNELS, cells) == [other]


@pytest.mark.parametrize(
    ("suite", "arguments", "count"),
    [
        ("kernels", "--ops rms_norm --dtypes bfloat16 --shapes 4x32 --providers xla jaxnorm", 4),
        ("blocks", "--ops add_rms_norm --dtypes mixed --shapes 4x32 --providers jaxnorm jnp", 4),
        ("loss", "--ops cross_entropy --dtypes float32 --shapes 4x32 --providers jaxnorm", 2),
        ("linear_loss", "--shapes 4x8x32 --providers linear_loss jaxnorm_2048", 2),
    ],
)
def test_a_run_on_the_cpu(suite, arguments, count, tmp_path, capfd):
    """A run in two processes writes rows; a second run finds nothing left to do."""
    if results.device() != "cpu":
        pytest.skip("takes the GPU's memory from the tests")
    given = [suite, *arguments.split(), "--workers", "2", "--out", str(tmp_path)]
    assert run.main(given) == 0
    rows = Table(tmp_path, SUITES[suite]).rows()
    assert [r["status"] for r in rows] == ["ok"] * count
    assert len({(r["direction"], r["provider"]) for r in rows}) == count
    assert all(float(r["us"]) > 0 and float(r.get("roof", 1)) > 0 for r in rows)
    assert tables.main([suite, "--results", str(tmp_path)]) == 0
    assert f"| {rows[0]['op']} " in capfd.readouterr().out
    assert run.main(given) == 0
    assert "0 cells to measure" in capfd.readouterr().out
    assert rows == Table(tmp_path, SUITES[suite]).rows()


# Tables.


def test_the_committed_results_have_tables(capsys):
    assert tables.main([]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"(?:^\|.*\n)+", printed, re.MULTILINE)) >= 5
    assert "| llama-1b none scan bfloat16 4 jaxnorm-products | " in printed
    assert "| gpt2-small scan 4x1024 bfloat16 jnp | " in printed


def test_a_ratio_is_above_1_where_jaxnorm_is_faster(tmp_path):
    table = Table(tmp_path, KERNELS)
    runs = run.Run(tmp_path, "a GPU", "abc1234", {"jaxnorm": "jax 1", "jnp": "jax 1"})
    for cols, ratio in ((32, 2.0), (64, 3.0), (128, 0.5)):
        for name, us in (("jaxnorm", 10.0), ("jnp", 10 * ratio)):
            cell = dataclasses.replace(CELL, cols=cols, provider=name)
            table.append(runs.row(KERNELS, Outcome(cell, {"us": us, "roof": 8 / us}, "ok")))
    assert tables.speeds("kernels", [tmp_path]).splitlines()[0::2] == [
        "| time / jaxnorm's time | copy | jnp |",
        "| rms_norm fwd, float32 | 0.80 (0.80) | 2.00 (0.50) |",
    ]


def test_against_plain_jax():
    """All variants of a case return arrays of the same shapes and dtypes."""
    cases = {
        **against_plain._norms("float32", 8, 32),
        **against_plain._activations(8, 16, 32),
        **against_plain._attentions(1, 2, 8),
        **against_plain._scans(8, 32, 2),
    }
    for case in cases.values():
        rows, parameters, _ = case.inputs(0)
        shapes = (jax.eval_shape(f, *rows, *parameters) for f in case.variants.values())
        plain, *others = ([(a.shape, a.dtype) for a in jax.tree.leaves(each)] for each in shapes)
        assert others == [plain] * len(others)
