"""Every schedule of the backward kernels lowers for an NVIDIA GPU, in every dtype.

Like `test_lowering` for the forward, this runs Mosaic's layout inference and lowers to the vector
and LLVM dialects. No GPU is needed. The later steps (LLVM, ptxas) are not tested here.
"""

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import forward_cases
import jax
import numpy as np
import pytest
from backward_cases import (
    CLUSTER_CASES,
    NORM_CASES,
    SOFTMAX_CASES,
    SOFTMAX_CLUSTER_CASES,
    make_spec,
)
from forward_cases import Case, lower
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import BF16, F16, F32, changed

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.device import gpu as gpu_module
from jaxnorm_kernels.mosaic.device.gpu import HOPPER, Gpu, active_clusters, local_gpu
from jaxnorm_kernels.mosaic.device.launch import interpreted
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule

MIXES = [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F32), (F32, F16)]


def mixed(cases: Sequence[Case]) -> list[Any]:
    """Return triples of a case, the dtype of x and the dtype of y.

    The first case of each type of schedule occurs with all combinations of dtypes in `MIXES`. Every
    other case occurs with two of them.
    """
    kinds: set[type] = set()
    found = []
    for i, case in enumerate(cases):
        kind = type(case.schedule_for(BF16))
        mixes = MIXES if kind not in kinds else [MIXES[j % len(MIXES)] for j in (2 * i, 2 * i + 1)]
        kinds.add(kind)
        found += [(case, x, y) for x, y in mixes]
    return found


def in_turn(ops: Sequence[str], cases: Sequence[Any]) -> list[Any]:
    """Return test parameters that alternate between two functions from case to case."""
    return [
        pytest.param(ops[i % 2], case, x, y, id=f"{ops[i % 2]}-{case.name}-{x}-{y}")
        for i, (case, x, y) in enumerate(cases)
    ]


@pytest.mark.parametrize(
    ("op", "case", "x", "y"),
    in_turn(["rms_norm", "layer_norm"], mixed([*NORM_CASES, *CLUSTER_CASES])),
)
def test_norm_schedules_lower(op: str, case: Case, x: np.dtype, y: np.dtype) -> None:
    saved = "input" if x == F32 else "output"
    spec = make_spec(op, case.rows, case.cols, x, y, saved=saved, scale_dtype=BF16)
    assert "mosaic_gpu" in lower(spec, case.schedule_for(x, y))


@pytest.mark.parametrize(
    ("op", "case", "x", "y"),
    in_turn(["softmax", "log_softmax"], mixed([*SOFTMAX_CASES, *SOFTMAX_CLUSTER_CASES])),
)
def test_softmax_schedules_lower(op: str, case: Case, x: np.dtype, y: np.dtype) -> None:
    spec = make_spec(op, case.rows, case.cols, x, y)
    assert "mosaic_gpu" in lower(spec, case.schedule_for(x, y))


#: The shapes of the benchmarks, odd shapes, and shapes with few rows.
SHAPES = [
    *forward_cases.SHAPES,
    (32768, 64),
    (32768, 2048),
    (8192, 3000),
    (64, 262144),
    (3, 1024),
    (256, 8),
]


@pytest.mark.oldest_jax
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_default_schedules_lower(rows: int, cols: int, dtype: np.dtype) -> None:
    for op in ("softmax", "rms_norm" if dtype == BF16 else "layer_norm"):
        spec = make_spec(op, rows, cols, dtype, dtype)
        if op != "softmax" and cols * dtype.itemsize % 16:
            assert "multiple of 16 bytes" in str(mosaic.why_unsupported(spec))
        elif cols in TOO_LONG and op != "softmax":
            assert "no rows of this length" in str(mosaic.why_unsupported(spec))
        else:
            assert "mosaic_gpu" in lower(spec)


#: Widths that the backward of a norm does not support.
TOO_LONG = (262144,)

#: Widths at which a schedule table changes to another rule, and some other widths.
WIDTHS = [64, 768, 1000, 1024, 2048, 3000, 4096, 5000, 5120, 7168, 8192, 12288, 16384, 32768]


@pytest.mark.oldest_jax
@pytest.mark.parametrize(
    ("op", "x", "y", "saved"),
    [
        ("layer_norm", BF16, BF16, "output"),
        ("rms_norm", F32, F32, "output"),
        ("layer_norm", F32, BF16, "input"),
    ],
    ids=str,
)
@pytest.mark.parametrize("cols", [*WIDTHS, 65536])
def test_default_schedules_with_dh_lower(
    cols: int, op: str, x: np.dtype, y: np.dtype, saved: str
) -> None:
    spec = make_spec(op, 4096, cols, x, y, saved=saved, adds_dh=True)
    assert mosaic.why_unsupported(spec) is None
    assert "mosaic_gpu" in lower(spec)
    schedule = schedules.norm_schedule(spec)
    if cols in WIDTHS:
        assert isinstance(schedule, PipelinedRows | PipelinedNarrowRows)
        assert schedule.stages >= 2


def test_rows_of_dh_decide_whether_they_can_be_copied() -> None:
    """A backward that takes dh is refused if the length of dh's rows is not a multiple of 16 bytes.

    The rows of its other arrays are multiples of 16 bytes here.
    """
    spec = make_spec("rms_norm", 4096, 4100, BF16, F32, adds_dh=True)
    assert schedules.norm_schedule(spec) is None
    assert "multiple of 16 bytes" in str(mosaic.why_unsupported(spec))
    assert isinstance(schedules.norm_schedule(changed(spec, adds_dh=False)), PipelinedRows)


@pytest.mark.parametrize("rows", [7, 64, 100])
@pytest.mark.parametrize("cols", [256, 768, 1000, 4088, 4096, 32768])
def test_groups_of_rows_lower(cols: int, rows: int) -> None:
    for change in ({"scale_groups": 6}, {"scale_groups": 6, "bias_groups": 6, "adds_dh": True}):
        spec = make_spec("layer_norm", 6 * rows, cols, BF16, BF16, **change)
        if (reason := mosaic.why_unsupported(spec)) is not None:
            assert "in each of the groups" in reason
            assert cols < 512
            assert rows < 64
        else:
            assert "mosaic_gpu" in lower(spec)


@pytest.mark.parametrize(
    ("groups", "rows"), [(2, 5000), (8, 1024), (100, 512), (133, 77), (3000, 9)]
)
def test_blocks_of_groups_have_no_idle_round(groups: int, rows: int) -> None:
    """The number of blocks per group is chosen such that all blocks end at nearly the same time."""
    spec = make_spec("rms_norm", groups * rows, 4096, BF16, BF16, scale_groups=groups)
    schedule = schedules.norm_schedule(spec, HOPPER)
    assert isinstance(schedule, PipelinedRows)
    blocks = schedules.persistent_blocks(spec, schedule, HOPPER)
    at_a_time = HOPPER.at_a_time(schedule.cluster) * schedule.blocks_per_sm
    steps = -(-rows // schedule.rows)
    rounds = -(-groups * blocks // at_a_time)
    best = -(-groups * steps // at_a_time)
    assert rounds * -(-steps // blocks) <= 1.25 * best + 4
    if groups * 2 <= at_a_time:
        assert groups * blocks <= at_a_time


DTYPES = st.sampled_from([BF16, F16, F32])


@settings(max_examples=2000, deadline=None)
@given(
    op=st.sampled_from(["softmax", "log_softmax", "rms_norm", "layer_norm"]),
    rows=st.integers(1, 2**20),
    cols=st.integers(8, 10**6) | st.integers(1, 16384).map(lambda n: 8 * n),
    x=DTYPES,
    y=DTYPES,
    scale=DTYPES | st.none(),
    saved=st.sampled_from(["output", "input"]),
    adds_dh=st.booleans(),
    groups=st.sampled_from([1, 1, 2, 50, 1000]),
)
def test_every_call_has_a_schedule_that_fits(
    op: str,
    rows: int,
    cols: int,
    x: np.dtype,
    y: np.dtype,
    scale: np.dtype | None,
    saved: str,
    adds_dh: bool,
    groups: int,
) -> None:
    """Each supported call has a schedule whose blocks fit into the memory of an SM.

    `rows` is the number of rows per group.
    """
    softmax = "softmax" in op
    change = {"scale_dtype": scale, "saved": saved, "adds_dh": adds_dh, "bias_groups": groups}
    if op != "layer_norm":
        change["bias_groups"] = groups = 1
    spec = make_spec(op, groups * rows, cols, x, y, **change)
    if mosaic.why_unsupported(spec) is not None:
        return
    choose = softmax_schedule if softmax else schedules.norm_schedule
    schedule = choose(spec)
    itemsizes = (y if softmax or saved == "output" else x).itemsize + y.itemsize
    itemsizes += x.itemsize * (adds_dh and not softmax)
    if isinstance(schedule, PipelinedRows):
        width = schedule.warpgroups * schedule.partition(cols).width
        ring = schedule.stages * schedule.rows * width * itemsizes
        assert schedule.blocks_per_sm * ring <= HOPPER.smem
        assert schedule.stages >= 2
        assert schedule.warpgroups * schedule.stages <= 32
        assert schedule.rows <= rows
    elif isinstance(schedule, PipelinedNarrowRows):
        ring = schedule.stages * schedule.rows * cols * itemsizes
        assert schedule.blocks_per_sm * ring <= HOPPER.smem
        assert schedule.stages >= 2
        assert schedule.rows <= rows
    if not softmax:
        assert 1 <= schedules.persistent_blocks(spec, schedule) <= rows


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a CUDA driver")
def test_without_a_driver_the_clusters_are_those_of_an_h200() -> None:
    with pytest.raises(OSError, match="libcuda"):
        active_clusters(0, HOPPER.smem)
    assert local_gpu() == HOPPER
    with interpreted():
        assert not local_gpu().clusters


@dataclasses.dataclass
class Device:
    """A fake JAX device. It has only the attributes that the library reads."""

    local_hardware_id: int
    core_count: int = 132
    platform: str = "gpu"
    shared_memory_per_block_optin: int = HOPPER.smem


# For each of two GPUs, a dict from the cluster size to the number of clusters that run at once.
CLUSTERS = ({2: 66, 4: 30, 8: 15, 16: 7}, {2: 66, 4: 32, 8: 14})


def test_clusters_are_those_that_all_gpus_of_the_process_run(monkeypatch) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(0), Device(1)])
    monkeypatch.setattr(gpu_module, "active_clusters", lambda ordinal, smem: CLUSTERS[ordinal])
    found = gpu_module._local_gpu.__wrapped__()
    assert found == Gpu(132, HOPPER.smem, {2: 66, 4: 30, 8: 14})


@pytest.mark.parametrize("status", [None, 801], ids=["no such call", "an error"])
def test_a_driver_that_cannot_tell_is_no_failure(monkeypatch, status) -> None:
    calls = {} if status is None else {"cuDevicePrimaryCtxRetain": lambda *args: status}
    monkeypatch.setattr(gpu_module.ctypes, "CDLL", lambda name: types.SimpleNamespace(**calls))
    with pytest.raises(RuntimeError, match="too old" if status is None else "CUDA error 801"):
        active_clusters(0, HOPPER.smem)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(0, core_count=66)])
    assert gpu_module._local_gpu.__wrapped__().clusters == {2: 33, 4: 15, 8: 7, 16: 3}


def test_persistent_blocks_run_in_one_round() -> None:
    spec = make_spec("layer_norm", 4096, 32768, BF16, BF16)
    schedule = schedules.norm_schedule(spec, HOPPER)
    assert isinstance(schedule, PipelinedRows)
    assert schedule.cluster == 16
    for clusters in (7, 8, 6):
        gpu = dataclasses.replace(HOPPER, clusters={16: clusters})
        most = clusters * schedule.blocks_per_sm
        assert most - 1 <= schedules.persistent_blocks(spec, schedule, gpu) <= most


@pytest.mark.parametrize("x", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", [768, 1152, 2056, 4096, 5120, 24576, 32768])
def test_without_large_clusters_rows_are_held_by_more_warpgroups(cols: int, x: np.dtype) -> None:
    spec = make_spec("rms_norm", 8192, cols, x, x)
    for clusters in ({}, {2: 66}, {2: 66, 4: 30, 8: 15}):
        gpu = dataclasses.replace(HOPPER, clusters=clusters)
        schedule = schedules.norm_schedule(spec, gpu)
        if isinstance(schedule, PipelinedRows):
            assert schedule.cluster == 1 or schedule.cluster in clusters
        else:
            assert cols > 8192 * max(clusters, default=1)
