"""Helpers for tests of the benchmarks: short runs on a CPU, and cells that torch computes."""

import functools

import pytest

from benchmarks import results, run
from benchmarks.results import Machine, Table


def rows_of_run(folder, suite, arguments):
    """Run the benchmarks with these arguments, and return the suite's rows in `folder`.

    The test is skipped on a machine with a GPU, where a run would take memory from other tests.
    """
    if results.this_machine() != Machine("cpu"):
        pytest.skip("takes the GPU's memory from the tests")
    assert run.main([*arguments, "--out", str(folder)]) == 0
    return Table(folder, suite).rows()


def eager_torch(monkeypatch):
    """Return torch and `torch_side`, with `torch.compile` changed to run its graphs eagerly.

    Its default backend, Inductor, needs a C++ compiler.
    """
    torch = pytest.importorskip("torch")
    from benchmarks import torch_side

    eager = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", eager)
    return torch, torch_side


def results_of_torch(torch_side, cell):
    """Return three things: the operands of a cell in torch, its results, and its gradients."""
    f, _ = torch_side.compiled(cell)
    inputs = torch_side.random_inputs(cell.workload, torch_side.parameter_dtype(cell), 1)
    function, (operands,) = torch_side.calls_of(cell, f, inputs)
    found, gradients = function(*operands)
    return operands[0], found if isinstance(found, tuple) else (found,), gradients
