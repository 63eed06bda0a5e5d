"""Tests that run kernels on a GPU.

They cover each rule of the forward's schedule table, and arrays that are large enough to fill the
GPU. Tests for which smaller arrays suffice are in `test_kernels`.
"""

import dataclasses
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import check_call, make_spec
from contract import KernelWorkload
from contract import call as call_pass
from specs import BF16, F32

from benchmarks import jax_side
from benchmarks.suites import SUITES, Selection
from benchmarks.workloads import DIRECTIONS, OPERATIONS
from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.mosaic.device.gpu import active_clusters, local_gpu
from jaxnorm_kernels.mosaic.schedules.forward import choose

pytestmark = pytest.mark.gpu

# Shapes of arrays that are at least 64 MiB large in bfloat16. If a kernel lacks a wait, an
# asynchronous copy can overwrite data in shared memory before they are read. This happens only with
# such large arrays.
LARGE = [(32768, 1024), (32768, 2048), (32768, 3000), (16384, 4096), (16384, 5120), (8192, 8192)]
LARGE += [(8192, 12288), (4096, 16384), (2048, 32768), (1024, 65536), (512, 131072)]
UNALIGNED = [(8192, 4095), (1024, 50257), (4096, 9001)]

# With many rows, these widths together use every rule of the forward's schedule table.
FORWARD_COLS = [72, 512, 768, 1000, 1024, 3000, 5120, 8192, 12288, 16384, 32768, 50257, 65536]
FORWARD_COLS += [2**17, 2**18]


@pytest.mark.parametrize("cols", FORWARD_COLS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_forward_kernels(op, cols):
    # Each test uses one of three combinations of dtypes. The combination changes in turn from one
    # width to the next, and from one function to the next. So each width is tested with all three
    # combinations, and so is each function.
    turn = FORWARD_COLS.index(cols) + OPERATIONS.index(op)
    x, y = [(BF16, BF16), (F32, F32), (F32, BF16)][turn % 3]
    cols = cols if "softmax" in op else cols // 8 * 8
    spec = make_spec(op, "fwd", 137 if cols > 8192 else 1001, cols, (x, y))
    check_call(lambda spec, *a: jax.jit(functools.partial(call_pass, mosaic, spec))(*a), spec)


@pytest.mark.parametrize(("rows", "cols"), [(24, 1031), (1056, 4095), (272, 9002), (264, 50257)])
@pytest.mark.parametrize("mix", [(BF16, BF16), (F32, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_unaligned_rows(op, direction, mix, rows, cols):
    spec = make_spec(op, direction, rows, cols, mix)
    check_call(lambda spec, *a: jax.jit(functools.partial(call_pass, mosaic, spec))(*a), spec)


def test_clusters_are_those_of_the_driver():
    gpu = local_gpu()
    each = [active_clusters(d.local_hardware_id, gpu.smem) for d in jax.local_devices()]
    assert gpu.clusters == {size: min(c[size] for c in each) for size in each[0]}
    for size, count in gpu.clusters.items():
        # A cluster runs within one GPC (a group of SMs), so a few SMs may remain unused.
        assert gpu.sms // size / 2 < count <= gpu.sms // size


@jax.jit
def relative_difference(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    """Return the largest difference, relative to the largest element."""
    ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
    return jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs))


def assert_like_xla(workload: KernelWorkload, implementation: Any, calls: int = 3) -> None:
    """Assert that the results agree with XLA's up to rounding.

    The kernel and XLA's code each round a result once, and they add sums in different orders.
    """
    operands = workload.operands(0)
    expected = jax.tree.leaves(jax.jit(workload.function(xla))(*operands))
    function = jax.jit(workload.function(implementation))
    for _ in range(calls):
        for ours, theirs in zip(jax.tree.leaves(function(*operands)), expected, strict=True):
            bound = 2**-7  # each side rounds to bfloat16
            if ours.dtype == jnp.float32:
                bound = 8 * math.sqrt(workload.rows + workload.cols) * 2**-24
            assert relative_difference(ours, theirs) <= bound


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("op", "rows", "cols"),
    [
        (op, *shape)
        for op in OPERATIONS
        for shape in LARGE + (UNALIGNED if op.endswith("softmax") else [])
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS[:2])
def test_large_arrays(op, rows, cols, direction, dtype):
    assert_like_xla(KernelWorkload(op, direction, rows, cols, dtype, dtype), mosaic)


# Each kind of model block in the benchmarks, with its gradients. The block "x + norm(x)" is
# omitted: it runs only the kernels of a single norm, which `test_large_arrays` covers.
BLOCKS = [
    pytest.param(cell, id=f"{cell.op}-{cell.shape}-{cell.dtype}")
    for cell in SUITES["blocks"].cells(
        Selection(
            providers=["mosaic"],
            ops=["add_layer_norm", "post_norm", "sandwich", "ada_layer_norm"],
            directions=["fwd+bwd"],
        )
    )
]


@pytest.mark.parametrize("cell", BLOCKS)
def test_large_blocks(cell):
    """The results and gradients of a block agree with XLA's."""
    workload = cell.workload
    inputs = jax_side.random_arrays(0, *jax_side.arguments_of(workload))

    def compiled(provider: str) -> jax_side.Program:
        return jax_side.compile_cell(dataclasses.replace(cell, provider=provider))

    expected = jax.tree.leaves(compiled("xla").call(*inputs))
    call = compiled("mosaic").call
    # The two programs may round y differently. Gradients are computed from the stored y, so they
    # differ, too.
    bound = 2**-7
    if workload.dtype == "float32":
        bound = 8 * math.sqrt(math.prod(workload.sizes[:-1]) + workload.cols) * 2**-24
    for _ in range(3):
        for ours, theirs in zip(jax.tree.leaves(call(*inputs)), expected, strict=True):
            assert relative_difference(ours, theirs) <= bound


def test_no_copy_overtakes_a_read():
    """An asynchronous copy overwrites a row in shared memory only after all threads have read it.

    This needs a fence. With a barrier instead of the fence, 145 to 191 rows were wrong in each of
    15 calls on an H200. The data of this test are in the L2 cache. Copies from this cache are the
    fastest, so they would overtake reads most often.
    """
    workload = KernelWorkload("layer_norm", "fwd", 32768, 3000, "bfloat16", "bfloat16")
    schedule = dataclasses.replace(choose(workload.spec), slots=1, tiles=2, rereads=False)
    assert schedule.kind == "pipelined_row"
    forward = functools.partial(mosaic.forward, schedule=schedule)
    assert_like_xla(workload, types.SimpleNamespace(forward=forward))
