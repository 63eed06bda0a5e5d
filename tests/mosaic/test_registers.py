"""The kernels that the default chooses, compiled for an H100: registers, and what has no room.

Needs JAX's CUDA plugin, and no GPU. Not in CI, of which `test_blackwell` is enough::

    make compile SELECTED=tests/mosaic/test_registers.py
"""

import jax
import pytest
from forward_cases import BF16, F32, RESIDUAL_OPS, call, make_spec, operand_types

from benchmarks.contract import KernelWorkload
from benchmarks.workloads import GRID
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward

# A shape for each line of the tables.
_GROUPS = ("narrow rows", "powers of two", "model widths", "odd rows")
SHAPES = [shape for group in _GROUPS for shape in GRID[group]]
# A few words of a row that fills the registers of its block (softmax over 32768 columns): measured
# to cost nothing.
SPILLED = 32


def threads_and_blocks(workload):
    """Threads of a block, and how many blocks the schedule wants on a multiprocessor."""
    spec = workload.spec
    if workload.direction == "fwd" or spec.op != "norm":
        return None
    schedule = norm_backward.norm_schedule(spec)
    assert isinstance(schedule, PipelinedRows | PipelinedNarrowRows)
    return 128 * getattr(schedule, "warpgroups", 1), schedule.blocks_per_sm


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_registers(rows, cols, dtype, op, direction, compiler):
    workload = KernelWorkload(op, direction, rows, cols, str(dtype), str(dtype))
    if (mosaic.why_unsupported(workload.spec) or mosaic.why_not_default(workload.spec)) is not None:
        return  # the default leaves it to XLA
    operands = jax.eval_shape(lambda: workload.operands(0))
    kernels = compiler.compile(workload.function(mosaic), operands)
    assert kernels
    assert max(k.spilled for k in kernels) <= SPILLED
    wanted = threads_and_blocks(workload)
    if wanted is not None:
        threads, blocks = wanted
        (kernel,) = kernels
        # Registers are given to a warp by 8 for each thread.
        assert -(-kernel.registers // 8) * 8 * threads * blocks <= norm_backward.REGISTERS


@pytest.mark.parametrize("op", RESIDUAL_OPS)
@pytest.mark.parametrize(
    ("x", "residual", "y"), [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16)], ids=str
)
@pytest.mark.parametrize("cols", [768, 1024, 2048, 4096, 5120, 8192, 12288, 16384, 50257, 2**17])
def test_registers_of_residuals(cols, x, residual, y, op, compiler):
    spec = make_spec(op, 8192, cols, x, y, residual_dtype=residual)
    operands = list(operand_types(spec).values())
    (kernel,) = compiler.compile(lambda *args: call(spec, *args), operands)
    assert kernel.spilled <= SPILLED
