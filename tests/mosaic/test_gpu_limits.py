"""The choice of schedules: they fit into a GPU's memories, and keep all of its SMs busy."""

import dataclasses
import itertools
import math
import types
from typing import Any

import jax
import numpy as np
import pytest
from cases import FAMILIES, grouped, make_spec, passes
from specs import BF16, F32, changed

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic import support
from jaxnorm_kernels.mosaic.device import gpu as gpu_module
from jaxnorm_kernels.mosaic.device.gpu import (
    B200,
    HOPPER,
    RTX_5090,
    Gpu,
    active_clusters,
    local_gpu,
)
from jaxnorm_kernels.mosaic.device.launch import interpreted
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.rows.strip_exchange import StripExchange
from jaxnorm_kernels.mosaic.rows.tiles import RowTile, SplitRow
from jaxnorm_kernels.mosaic.schedules import norm_backward
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.mosaic.schedules.forward import choose
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule
from jaxnorm_kernels.specs import Spec

SMALL = Gpu(20, 99 * 1024, clusters={2: 10, 4: 5, 8: 2})
each_gpu = pytest.mark.parametrize(
    "gpu", [HOPPER, B200, RTX_5090, SMALL], ids=["Hopper", "B200", "RTX 50", "small"]
)

# ------------------------------------------------------------------------------ shared memory


def random_specs(count: int, direction: str) -> list[Spec]:
    """Return the specs of random passes, of which few are unsupported."""
    rng = np.random.default_rng(0)
    families = [family for family in FAMILIES if direction in passes(family)]
    found = []
    for _ in range(count):
        of = FAMILIES[families[rng.integers(len(families))]]
        options = {"function": of.functions, "mix": of.mixes, **of.options}
        given = {name: values[rng.integers(len(values))] for name, values in options.items()}
        rows, cols = int(2 ** rng.uniform(0, 22)), int(2 ** rng.uniform(3, 17))
        if rng.random() < 0.5 or direction == "bwd":
            cols = -(-cols // 8) * 8
        groups = int(2 ** rng.uniform(1, 8)) if rng.random() < 0.3 else 1
        rows = min(-(-rows // groups), 2**13) * groups
        spec = of.spec(direction, rows, cols, **given)
        found.append(changed(spec, **grouped(spec, groups)) if spec.is_norm else spec)
    return found


def held_bytes(arrays: Any) -> int:
    """Return the number of bytes of the arrays in a kernel's scratch, without its barriers."""
    arrays = [a for a in arrays if hasattr(a, "dtype") and a.dtype != np.uint32]
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in arrays)


@each_gpu
def test_schedules_of_forwards_fit_the_gpu(gpu: Gpu) -> None:
    for spec in random_specs(5000, "fwd"):
        assert mosaic.why_unsupported(spec) is None
        schedule = choose(spec, gpu)
        held = schedule.rows_of(spec)
        inputs = [d for d in (spec.x_dtype, *map(spec.dtype, ("residual", "gate"))) if d]
        assert spec.cols % schedule.vector == 0
        assert schedule.vector * max(d.itemsize for d in (*inputs, spec.y_dtype)) <= 16
        assert schedule.rows <= spec.rows
        assert held.warpgroups <= 8
        assert held.cluster <= 8
        if isinstance(held, RowTile):
            assert held.fragments()
        elif isinstance(held, SplitRow):
            assert held.partition().units > 0
        assert held_bytes(held.scratch(3, inputs)) <= gpu.smem
        if held.slots:
            assert held.warpgroups * held.slots <= 32  # the maximum number of barriers in an array
            assert not any(spec.cols * dtype.itemsize % 16 for dtype in inputs)


@each_gpu
def test_schedules_of_backwards_fit_the_gpu(gpu: Gpu) -> None:
    """The scheduled number of blocks per SM fits into the SM's shared memory."""
    for spec in random_specs(5000, "bwd"):
        if mosaic.why_unsupported(spec) is not None:
            continue
        if not spec.is_norm:
            assert softmax_schedule(spec, gpu).rows <= spec.rows
            continue
        schedule = norm_backward.norm_schedule(spec, gpu)
        if not isinstance(schedule, PipelinedRows | PipelinedNarrowRows):
            # If rows are too long, two kernels run two norms. On a small GPU, XLA's code runs.
            assert spec.op == "norm_add_norm" or gpu.smem < HOPPER.smem
            continue
        columns = spec.cols
        if isinstance(schedule, PipelinedRows):
            assert schedule.cluster == 1 or schedule.cluster in gpu.clusters
            assert schedule.warpgroups * schedule.stages <= 32
            columns = schedule.warpgroups * schedule.partition(spec.cols).width
        held = sum(dtype.itemsize for dtype in norm_backward.row_dtypes(spec))
        used = schedule.stages * schedule.rows * columns * held + 1024
        assert schedule.stages >= 2
        assert used <= gpu.smem
        assert schedule.blocks_per_sm * (used + 1024) <= gpu.shared_bytes
        assert schedule.rows <= spec.rows // spec.groups
        assert 1 <= norm_backward.persistent_blocks(spec, schedule, gpu) <= spec.rows // spec.groups


@each_gpu
def test_strips_fit_the_gpu(gpu: Gpu) -> None:
    refused = 0
    for direction, cols, inner, x in itertools.product(
        ("fwd", "bwd"), range(8, 24000, 179), (16, 64, 784, 4096), (BF16, F32)
    ):
        spec = make_spec("layer_norm", direction, 64 * inner, cols, (x, x))
        strips = strip_schedule.strips_of(changed(spec, inner=inner, inner_params=True), gpu)
        refused += strips is None
        if strips is not None:
            arrays = strips.scratch([x] * (1 if direction == "fwd" else 2))
            others = StripExchange(strips, stats=3 if direction == "fwd" else 2).scratch()
            # 1024 bytes are for barriers and for Mosaic itself.
            assert held_bytes([*arrays, *others]) + 1024 <= gpu.smem
            assert strips.cluster <= max(gpu.clusters)
    assert refused < 1400  # The loop above has 2160 calls.


# ------------------------------------------------------------------------------ rounds of blocks


def test_one_round_takes_all_rows_where_clusters_have_their_sms_to_themselves() -> None:
    def tiles(rows: int, cols: int) -> tuple[int, int]:
        schedule = choose(make_spec("layer_norm", "fwd", rows, cols, (BF16, BF16)), HOPPER)
        return schedule.tiles, schedule.cluster

    widest, cluster = tiles(1024, 131072)
    assert widest == math.ceil(1024 / HOPPER.clusters[cluster])
    # For these shapes, measurements showed that blocks that process a few rows each are faster than
    # persistent blocks that share all rows.
    for rows, cols in ((16384, 8192), (2048, 8192), (8192, 16384), (4096, 65536)):
        assert tiles(rows, cols)[0] <= 8


@pytest.mark.parametrize(
    ("groups", "rows"), [(2, 5000), (8, 1024), (100, 512), (133, 77), (3000, 9)]
)
def test_blocks_of_groups_have_no_idle_round(groups: int, rows: int) -> None:
    """The number of blocks per group is chosen such that all blocks end at nearly the same time."""
    spec = make_spec("rms_norm", "bwd", groups * rows, 4096, (BF16, BF16), scale_groups=groups)
    schedule = norm_backward.norm_schedule(spec, HOPPER)
    assert isinstance(schedule, PipelinedRows)
    blocks = norm_backward.persistent_blocks(spec, schedule, HOPPER)
    at_a_time = HOPPER.at_a_time(schedule.cluster) * schedule.blocks_per_sm
    steps = -(-rows // schedule.rows)
    rounds = -(-groups * blocks // at_a_time)
    best = -(-groups * steps // at_a_time)
    assert rounds * -(-steps // blocks) <= 1.25 * best + 4
    if groups * 2 <= at_a_time:
        assert groups * blocks <= at_a_time


def test_persistent_blocks_run_in_one_round() -> None:
    spec = make_spec("layer_norm", "bwd", 4096, 32768, (BF16, BF16))
    schedule = norm_backward.norm_schedule(spec, HOPPER)
    assert isinstance(schedule, PipelinedRows)
    assert schedule.cluster == 16
    for clusters in (7, 8, 6):
        gpu = dataclasses.replace(HOPPER, clusters={16: clusters})
        most = clusters * schedule.blocks_per_sm
        assert most - 1 <= norm_backward.persistent_blocks(spec, schedule, gpu) <= most


@pytest.mark.parametrize("x", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", [768, 1152, 2056, 4096, 5120, 24576, 32768])
def test_without_large_clusters_rows_are_held_by_more_warpgroups(cols: int, x: np.dtype) -> None:
    spec = make_spec("rms_norm", "bwd", 8192, cols, (x, x))
    for clusters in ({}, {2: 66}, {2: 66, 4: 30, 8: 15}):
        gpu = dataclasses.replace(HOPPER, clusters=clusters)
        schedule = norm_backward.norm_schedule(spec, gpu)
        if isinstance(schedule, PipelinedRows):
            assert schedule.cluster == 1 or schedule.cluster in clusters
        else:
            assert cols > 8192 * max(clusters, default=1)


# --------------------------------------------------------------------------------- the local GPU


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


# ----------------------------------------------------------------------------- the default's GPUs


@pytest.mark.parametrize("capability", [90, 100, 103, 120, None])
def test_where_they_are_the_default(capability: int | None, monkeypatch) -> None:
    monkeypatch.setattr(support, "local_capability", lambda: capability)
    spec = make_spec("layer_norm", "fwd", 8192, 4096, (BF16, BF16))
    assert (support.why_not_default(spec) is None) == (capability in (90, None))


def test_older_gpus_are_refused(monkeypatch) -> None:
    """On older GPUs, the kernels are unsupported, even if they are requested explicitly."""
    monkeypatch.setattr(support, "local_capability", lambda: 89)
    rows = make_spec("layer_norm", "fwd", 8192, 512, (BF16, BF16))
    for spec in (rows, changed(rows, inner=32, inner_params=True)):
        assert "9.0 (Hopper) or newer" in (support.why_unsupported(spec) or "")
