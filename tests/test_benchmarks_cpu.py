"""The benchmark suite `cpu`: its cases (cells), their timing, and its table."""

import dataclasses

import pytest
from benchmark_cases import rows_of_run

from benchmarks.blocks import BLOCKS
from benchmarks.cpu import CPU, CpuCell
from benchmarks.suites import SUITES, Selection

SUITE = SUITES["cpu"]
SHAPES = (("cross_entropy", "2048x1024"), ("linear_cross_entropy", "1024x512x8192"))


def test_cells():
    cells = list(SUITE.cells(Selection()))
    assert {cell.op for cell in cells} == {*CPU}
    assert len(cells) == len(set(cells)) == 88
    # Flax's LayerNorm is measured twice, with both of its ways to compute the variance.
    flax = [c for c in cells if c.op == "layer_norm" and c.shape == "4096x1024"]
    assert {c.provider for c in flax} == {"flax", "flax-two_pass"}
    only = dataclasses.replace(Selection(), providers=("optax",), quick=True, directions=("fwd",))
    assert [(c.op, c.shape) for c in SUITE.cells(only)] == [
        (op, shape) for op, shape in SHAPES for _ in ("float32", "bfloat16")
    ]


def test_shapes_that_are_asked_for():
    shapes = ((8, 32), (8, 16, 32), (2, 4, 2, 32))
    selection = Selection(shapes=shapes, dtypes=(("float32", "float32"),))
    found = {(c.op, c.shape) for c in SUITE.cells(selection)}
    assert ("cross_entropy", "8x32") in found
    assert ("linear_cross_entropy", "8x16x32") in found
    assert ("rms_norm_rope", "2x4x2x32") in found
    assert len(found) == len(CPU)


@pytest.mark.parametrize("op", CPU)
def test_the_workload_of_a_cell(op):
    shape = "x".join(map(str, CPU[op].shapes[0]))
    workload = CpuCell(op, "fwd", shape, "float32", "jnp").workload
    whole = CPU[op].shapes[0]
    assert workload.row_operands[0][0] == (whole if op in BLOCKS else whole[:2])


def test_a_run(tmp_path):
    arguments = ["cpu", "--ops", "cross_entropy", "linear_cross_entropy", "layer_norm"]
    arguments += ["rms_norm_rope", "gated_linear", "activation_linear", "--dtypes", "float32"]
    arguments += ["--shapes", "8x32", "8x16x32", "2x4x2x32", "--directions", "fwd+bwd"]
    rows = rows_of_run(tmp_path, SUITE, arguments)
    assert len(rows) == 7
    assert {row["status"] for row in rows} == {"ok"}
    for row in rows:
        assert all(float(row[name]) > 0 for name in SUITE.figures)
    text = (tmp_path / "report.md").read_text()
    assert "| layer_norm forward and backward, 8x32, f32 | flax-two_pass |" in text
