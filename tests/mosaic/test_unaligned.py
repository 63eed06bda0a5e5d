"""Rows that are no multiple of 16 bytes: values in the interpreter, on a GPU, and registers.

Of a period, each row begins at another place between two multiples of 16 bytes.
"""

import dataclasses
from typing import Any

import backward_cases as backward
import forward_cases as forward
import jax
import numpy as np
import pytest
from forward_cases import BF16, F32, RESIDUAL_OPS
from h100 import Compiler
from reference import assert_within
from specs import changed

from benchmarks.contract import KernelWorkload
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.loops.in_registers import InRegisters
from jaxnorm_kernels.mosaic.rows.partitions import (
    AlignmentView,
    alignment_view,
    tail_vector,
    widest_vector,
)
from jaxnorm_kernels.mosaic.schedules import forward as forward_schedules
from jaxnorm_kernels.mosaic.schedules.forward import ForwardSchedule
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule
from jaxnorm_kernels.specs import Spec


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("cols", [1001, 1018, 4095, 50257])
def test_windows(cols: int, itemsize: int) -> None:
    """Each has its row, begins and ends with 16 bytes, and lies within the array."""
    step = 16 // itemsize
    window = AlignmentView(cols, step)
    width, period = window.width, window.period
    assert width % step == 0
    assert period * cols % step == 0
    for row_start in range(0, period * cols, cols):
        start = min(row_start // step * step, period * cols - width)
        assert start % step == 0
        assert 0 <= row_start - start < window.edge
        assert 0 <= start + width - (row_start + cols) < window.edge


def test_rows_that_have_no_windows() -> None:
    assert alignment_view(64, 4095, [BF16]) == AlignmentView(4095, 8)
    assert alignment_view(64, 4094, [F32, BF16]) == AlignmentView(4094, 8)
    assert alignment_view(63, 4095, [BF16]) is None
    assert alignment_view(64, 4096, [BF16, F32]) is None
    assert alignment_view(64, 4092, [F32]) is None


def test_vectors_of_windows() -> None:
    assert [tail_vector(rest, 8, 128) for rest in (8, 128, 129, 500, 1016)] == [1, 1, 2, 4, 8]
    assert widest_vector(4104, 8, 128) == 8
    assert widest_vector(50264, 8, 32 * 128) == 4  # 13 columns of a thread, and not 16
    assert widest_vector(1008, 8, 128) == 4  # a warpgroup has something to do for all its threads


FORWARD = (
    ("softmax", 8, 1999, BF16, ForwardSchedule("warpgroup_row", 8)),
    ("log_softmax", 4, 2571, F32, ForwardSchedule("split_row", 4, warpgroups=2)),
    ("softmax", 20, 1031, F32, ForwardSchedule("pipelined_row", 4, slots=1, tiles=1)),
    (
        "log_softmax",
        16,
        1031,
        BF16,
        ForwardSchedule("pipelined_row", 8, slots=1, tiles=1, rereads=True),
    ),
)
BACKWARD = (
    ("softmax", 8, 1999, BF16, InRegisters(8)),
    ("log_softmax", 20, 1031, F32, InRegisters(4)),
    ("softmax", 16, 2571, BF16, InRegisters(4, 2)),
)


def with_window(schedule: Any, spec: Spec) -> Any:
    return dataclasses.replace(
        schedule, window=alignment_view(spec.rows, spec.cols, [spec.x_dtype])
    )


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize(("op", "rows", "cols", "dtype", "schedule"), FORWARD)
def test_forward_values(
    op: str, rows: int, cols: int, dtype: np.dtype, schedule: ForwardSchedule
) -> None:
    spec = forward.make_spec(op, rows, cols, dtype, dtype)
    operands = forward.make_operands(spec)
    outputs = forward.interpret(spec, *operands, schedule=with_window(schedule, spec))
    expected, errors = forward.reference(spec, *operands, outputs=outputs)
    for output, value, error in zip(outputs, expected, errors, strict=True):
        assert np.max(np.abs(output.astype(np.float64) - value) - error) <= 0


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize(("op", "rows", "cols", "dtype", "schedule"), BACKWARD)
def test_backward_values(op: str, rows: int, cols: int, dtype: np.dtype, schedule: Any) -> None:
    spec = backward.make_spec(op, rows, cols, dtype, dtype)
    operands = backward.make_operands(spec)
    outputs = backward.interpret(spec, *operands, schedule=with_window(schedule, spec))
    for output, value, error in zip(outputs, *backward.reference(spec, *operands)):
        if value is not None:
            assert np.max(np.abs(output.astype(np.float64) - value) - error) <= 0


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize(("op", "rows", "cols", "dtype", "schedule"), [FORWARD[0], FORWARD[2]])
def test_what_is_not_finite_stays_in_its_row(
    op: str, rows: int, cols: int, dtype: np.dtype, schedule: ForwardSchedule
) -> None:
    spec = forward.make_spec(op, rows, cols, dtype, dtype)
    x, *rest = forward.make_operands(spec)
    spoilt = np.array(x)
    spoilt[1::3] = np.nan
    spoilt[2::6] = np.inf
    got = forward.interpret(spec, spoilt, *rest, schedule=with_window(schedule, spec))
    expected, errors = forward.reference(spec, x, *rest, outputs=got)
    error = np.abs(got[0][::3].astype(np.float64) - expected[0][::3])
    assert (error <= np.broadcast_to(errors[0], expected[0].shape)[::3]).all()
    assert np.isnan(got[0][1::3].astype(np.float32)).all()


@pytest.mark.usefixtures("quick_to_compile")
def test_dx_of_rows_beside_what_is_not_finite() -> None:
    op, _, cols, dtype, schedule = BACKWARD[1]
    spec = backward.make_spec(op, 8, cols, dtype, dtype)
    *saved, d = backward.make_operands(spec)
    spoilt = np.array(d)
    spoilt[1::2] = np.nan
    got = backward.interpret(spec, *saved, spoilt, schedule=with_window(schedule, spec))[0]
    (expected, *_), (error, *_) = backward.reference(spec, *saved, d)
    within = np.abs(got.astype(np.float64) - expected) <= np.broadcast_to(error, got.shape)
    assert within[::2].all()


@pytest.mark.parametrize("cols", [1001, 4095, 50257])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_what_has_windows(dtype: np.dtype, cols: int) -> None:
    """Softmax rows of more than 1024 columns, or 2 KiB; none in periods that are not whole."""
    fwd = forward.make_spec("softmax", 8192, cols, dtype, dtype)
    bwd = backward.make_spec("softmax", 8192, cols, dtype, dtype)
    assert (forward_schedules.choose(fwd).window is not None) == (cols > 1024)
    assert (softmax_schedule(bwd).window is not None) == (cols * dtype.itemsize > 2048)
    fwd, bwd = (changed(spec, rows=8191) for spec in (fwd, bwd))
    for found in (forward_schedules.choose(fwd), softmax_schedule(bwd)):
        assert getattr(found, "window", None) is None


@pytest.mark.parametrize("cols", [1001, 4095, 50257])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", *RESIDUAL_OPS])
def test_norms_are_refused(op: str, cols: int) -> None:
    """No model has norms of such widths: XLA runs them."""
    fwd = forward.make_spec(op, 8192, cols, BF16, BF16)
    for spec in (fwd, changed(fwd, direction="bwd", want_stats=False)):
        assert "multiples of 16 bytes" in str(mosaic.why_unsupported(spec))
    assert mosaic.why_unsupported(forward.make_spec(op, 8192, cols // 8 * 8, BF16, BF16)) is None


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("op", ["log_softmax", "softmax"])
@pytest.mark.parametrize(("x", "y"), [(BF16, BF16), (F32, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("cols", [1001, 4095, 50257])
def test_registers(
    cols: int, x: np.dtype, y: np.dtype, op: str, direction: Any, compiler: Compiler
) -> None:
    workload = KernelWorkload(op, direction, 8192, cols, str(x), str(y))  # type: ignore[arg-type]
    operands = jax.eval_shape(lambda: workload.operands(0))
    (kernel,) = compiler.compile(workload.function(mosaic), operands)
    assert kernel.spilled <= 32


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(24, 1031), (1056, 4095), (272, 9002), (264, 50257)])
@pytest.mark.parametrize(("x", "y"), [(BF16, BF16), (F32, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_forward_on_a_gpu(op: str, x: np.dtype, y: np.dtype, rows: int, cols: int) -> None:
    spec = forward.make_spec(op, rows, cols, x, y)
    operands = forward.make_operands(spec)
    outputs = [np.asarray(v) for v in jax.jit(lambda *a: forward.call(spec, *a))(*operands)]
    expected = forward.reference(spec, *operands, outputs=outputs)
    for output, value, error in zip(outputs, *expected, strict=True):
        assert_within(output, value, error)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(24, 1031), (1056, 4095), (272, 9002), (264, 50257)])
@pytest.mark.parametrize(("x", "y"), [(BF16, BF16), (F32, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_backward_on_a_gpu(op: str, x: np.dtype, y: np.dtype, rows: int, cols: int) -> None:
    spec = backward.make_spec(op, rows, cols, x, y)
    operands = backward.make_operands(spec)
    outputs = jax.jit(lambda *a: backward.call(spec, *a))(*operands)
    for output, value, error in zip(outputs, *backward.reference(spec, *operands)):
        if value is not None:
            assert_within(np.asarray(output), value, error)
