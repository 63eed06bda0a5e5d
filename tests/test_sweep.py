"""The schedules that a sweep times are distinct and compute XLA's results."""

import pickle

import jax
import pytest
from program_error import assert_computes

from benchmarks import sweep
from benchmarks.contract import KernelWorkload, LinearKernelWorkload
from benchmarks.sweeps import backward, linear
from jaxnorm_kernels import xla
from jaxnorm_kernels.mosaic import interpreted
from jaxnorm_kernels.mosaic import linear as linear_schedule


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


def test_schedules_of_a_product():
    *_, workload = products = [*linear.workloads()]
    tables, *others = linear.schedules(workload)
    assert tables == linear_schedule.choose(workload.sizes[0], workload.sizes[2])
    assert len({tables, *others}) == len(others) + 1 > 10
    assert {w.op for w in products} == {"product", "rms_norm_linear"}
    exported = jax.export.deserialize(sweep.lowered(workload, others[0]))
    assert "mosaic_gpu" in exported.mlir_module()
    small = LinearKernelWorkload("rms_norm_linear", "fwd", "16x64x128", "bfloat16")
    y = small.function(xla)(*small.operands(0))
    assert (y.shape, y.dtype) == ((16, 128), "bfloat16")


def test_needs_a_gpu(capsys):
    if jax.devices()[0].platform == "gpu":
        pytest.skip("there is one")
    assert sweep.main(["benchmarks/sweeps/backward.py"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_rows_rank_by_time():
    def row(schedule, us, status="ok"):
        return sweep.Row("softmax", "bwd", "8x64", "f", "f", schedule, us, us, 0.5, 1, 0, status)

    nan = float("nan")
    text = sweep.show([row("xla", 9), row("slow", 8), row("fast", 2), row("bad", nan, "spilled")])
    assert text.splitlines()[0].endswith("xla 0.5, 2 of 3 ran")
    assert [line.split()[-1] for line in text.splitlines()[1:3]] == ["fast", "slow"]
    assert text.splitlines()[3] == "  failed: bad: spilled"


@pytest.mark.parametrize("name", ["backward", "causal", "forward", "heads", "linear"])
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
