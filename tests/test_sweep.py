"""The schedules that a sweep times are distinct and compute XLA's results."""

import pickle
import types
from concurrent.futures import Future

import jax
import pytest
from program_error import assert_computes

from benchmarks import sweep
from benchmarks.contract import KernelWorkload
from benchmarks.sweeps import backward
from jaxnorm_kernels import xla
from jaxnorm_kernels.mosaic import interpreted


def test_every_wide_backward_has_several_schedules():
    jobs = {w: backward.schedules(w) for w in backward.workloads()}
    assert all(len(set(schedules)) == len(schedules) for schedules in jobs.values())
    wide = [len(s) for w, s in jobs.items() if w.is_norm and 1024 <= w.cols <= 32768]
    assert min(wide) > 2


def test_a_given_schedule_replaces_the_table():
    """If a schedule is given, it replaces the schedule of the table, and results are correct.

    The given schedule has no clusters, because the interpreter cannot run them.
    """
    workload = KernelWorkload("rms_norm", "bwd", 4, 2048, "float32", "float32")
    given = next(s for s in backward.schedules(workload) if s.cluster == 1)
    operands = workload.operands(0)
    with interpreted():
        ours = workload.function(sweep.with_schedule(given))(*operands)
    assert_computes(ours, workload.function(xla), *operands)


def test_a_schedule_is_lowered_without_a_gpu():
    workload = KernelWorkload("rms_norm", "bwd", 256, 2048, "bfloat16", "bfloat16")
    given, *_ = backward.schedules(workload)
    exported = jax.export.deserialize(sweep.lowered(workload, given))
    assert exported.platforms == ("cuda",)
    assert "mosaic_gpu" in exported.mlir_module()
    assert [a.shape for a in exported.out_avals] == [(256, 2048), (2048,)]


def test_needs_a_gpu(capsys):
    if jax.devices()[0].platform == "gpu":
        pytest.skip("there is one")
    assert sweep.main(["benchmarks/sweeps/backward.py"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_schedules_rank_by_time(monkeypatch):
    """The fastest schedules are printed, and the reason of the first failure."""

    class Workload(KernelWorkload):
        bytes = 1

    def done(us):
        one = Future()
        if us is None:
            one.set_exception(ValueError("spilled"))
        else:
            one.set_result(lambda *operands: us + 0.0 * operands[0])
        return one

    def measure(program, operands):
        return types.SimpleNamespace(us=float(program(0.0)))

    monkeypatch.setattr(sweep.timing, "measure", measure)
    monkeypatch.setattr(sweep.timing, "copy_roof", lambda size: types.SimpleNamespace(us=4.5))
    programs = {"xla": done(9.0), "slow": done(8.0), "fast": done(2.0), "bad": done(None)}
    workload = Workload("softmax", "fwd", 8, 64, "float32", "float32")
    title, *lines = sweep.measured(workload, programs).splitlines()
    assert title == "softmax fwd 8x64 float32: xla 0.500, 2 of 3 ran"
    assert [line.split()[-1] for line in lines] == ["fast", "slow", "spilled"]
    assert lines[-1] == "  failed: bad: ValueError: spilled"


@pytest.mark.parametrize("name", ["backward", "forward"])
def test_other_processes_can_take_workloads(name):
    """Workloads and schedules can be pickled, to be lowered in other processes."""
    chosen = sweep.definitions(sweep.ROOT / f"benchmarks/sweeps/{name}.py")
    workload = next(chosen["workloads"]())
    sent = workload, chosen["schedules"](workload)
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_a_file_elsewhere_may_define_workloads(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def workloads():\n    return [1]\n")
    assert sweep.definitions(file)["workloads"]() == [1]
