"""Tests of `jax_side` and `torch_side`, which run the benchmarks' cases in JAX and in torch.

The tests check when the two modules compile programs, and whether they free memory afterwards.
"""

import dataclasses
import gc
import types

import jax
import pytest
from benchmark_cases import eager_torch, results_of_torch

from benchmarks import jax_side
from benchmarks.blocks import BLOCKS
from benchmarks.suites import ShapedCell, TimedCell

pytestmark = pytest.mark.usefixtures("quick_to_compile")

CELL = TimedCell("layer_norm", "fwd", 4, 33, "float32", "bfloat16", "jaxnorm")
BLOCK = ShapedCell("sandwich", "fwd+bwd", "4x36", "float32", "jaxnorm")
CASES = [("kernels", "fwd"), ("kernels", "bwd"), ("api", "fwd+bwd")]


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


@pytest.mark.parametrize(("suite", "direction"), [*CASES, ("blocks", "fwd+bwd")])
def test_jax_compiles_nothing_in_its_turn(suite, direction, compiled):
    cell = BLOCK
    if suite != "blocks":
        cols = 37 + CASES.index((suite, direction))  # a width that no other test compiles
        cell = dataclasses.replace(CELL, direction=direction, cols=cols)
    measure = jax_side.prepare(suite, cell)
    assert compiled
    before = len(compiled)
    assert measure()["us"] > 0
    assert len(compiled) == before


def test_jax_drops_its_operands():
    jax_side.prepare("kernels", CELL)()
    assert jax_side.rotating_inputs.cache_info().currsize == 1
    jax_side.release()
    assert jax_side.rotating_inputs.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("preallocate", "stats", "crowds"),
    [
        ("false", {"peak_bytes_in_use": 50_000_000_000}, True),
        ("false", {"peak_bytes_in_use": 500_000_000}, False),
        ("false", None, False),
        (None, {"peak_bytes_in_use": 50_000_000_000}, False),
    ],
)
def test_only_a_jax_that_shares_its_gpu_can_crowd_others(preallocate, stats, crowds, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    if preallocate is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", preallocate)
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax_side.jax, "local_devices", lambda: [device])
    assert jax_side.crowds_others() is crowds


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def torch_side(torch):
    from benchmarks import torch_side

    return torch_side


@pytest.mark.parametrize(("suite", "direction"), CASES)
def test_torch_cells(suite, direction, torch_side):
    cell = dataclasses.replace(CELL, direction=direction, provider="torch")
    assert torch_side.prepare(suite, cell)()["us"] > 0


@pytest.mark.parametrize("op", BLOCKS)
def test_torch_blocks(op, monkeypatch):
    _, torch_side = eager_torch(monkeypatch)
    shape = {2: "4x32", 3: "2x4x32", 4: "2x3x4x32"}[len(BLOCKS[op].shapes[0])]
    for dtype in ("bfloat16", "mixed") if BLOCKS[op].mixed else ("bfloat16",):
        cell = ShapedCell(op, "fwd+bwd", shape, dtype, "torch.compile")
        operands, results, gradients = results_of_torch(torch_side, cell)
        assert [str(a.dtype) for a in results] == [
            f"torch.{d}" for _, d in cell.workload.cotangents
        ]
        leaves = [
            a
            for i, a in enumerate(operands)
            if a.is_floating_point() and i not in cell.workload.constants
        ]
        assert [g.shape for g in gradients] == [a.shape for a in leaves]
        assert torch_side.prepare("blocks", cell)()["us"] > 0


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_torch_compiles_nothing_in_its_turn(direction, monkeypatch):
    """While the benchmark measures torch, torch compiles nothing.

    This also holds if the benchmark has more shapes than torch's cache of compiled programs.
    """
    torch, torch_side = eager_torch(monkeypatch)
    cell = dataclasses.replace(CELL, direction=direction, provider="torch.compile")
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    shapes = range(40, 52)
    measures = [torch_side.prepare("kernels", dataclasses.replace(cell, cols=n)) for n in shapes]
    assert graphs["unique_graphs"] == before + len(shapes)
    for measure in measures:
        assert measure()["us"] > 0
    assert graphs["unique_graphs"] == before + len(shapes)


def test_torch_keeps_no_operands(torch, torch_side):
    cell = dataclasses.replace(CELL, direction="bwd", cols=61, provider="torch")

    def held():
        gc.collect()
        arrays = (a for a in gc.get_objects() if issubclass(type(a), torch.Tensor))
        return sum(a.shape == (cell.rows, cell.cols) for a in arrays)

    measure = torch_side.prepare("kernels", cell)
    assert held() == 0
    measure()
    assert held() > 0  # arrays that other providers of this workload will use
    torch_side.release()
    assert held() == 0
