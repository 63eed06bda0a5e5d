"""Kernels for rows whose length is not a multiple of 16 bytes.

Threads load and store such rows element by element. The tests check values, in the interpreter and
on a GPU, and the number of registers of the kernels.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import backward_cases as backward
import forward_cases as forward
import jax
import numpy as np
import pytest
from contract import KernelWorkload
from forward_cases import RESIDUAL_OPS
from h100 import Compiler
from reference import assert_within
from specs import BF16, F32, changed

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.specs import Spec

#: Each entry: the function, the numbers of rows and columns, and the dtype. The widths are such
#: that a row is processed by a part of a warp, by one warpgroup, or by several warpgroups.
FORWARD = (
    ("softmax", 8, 1999, BF16),
    ("log_softmax", 4, 9001, F32),
    ("softmax", 20, 131, F32),
    ("log_softmax", 16, 1031, BF16),
    ("rms_norm", 8, 1999, BF16),
    ("layer_norm", 4, 9001, BF16),
    ("add_layer_norm", 20, 131, F32),
    ("rms_norm_add_rms_norm", 8, 1031, BF16),
)
BACKWARD = (
    ("softmax", 8, 1999, BF16),
    ("log_softmax", 20, 1031, F32),
    ("softmax", 16, 9001, BF16),
)


def check(cases: ModuleType, run: Callable[..., Any], spec: Spec) -> None:
    """Assert that the results of `run(spec, *operands)` are within their error bounds.

    `cases` is the module `forward_cases` or `backward_cases`.
    """
    operands = cases.make_operands(spec)
    outputs = [*map(np.asarray, run(spec, *operands))]
    given = {"outputs": outputs} if cases is forward else {}
    expected, errors = cases.reference(spec, *operands, **given)
    for output, value, error in zip(outputs, expected, errors, strict=True):
        assert_within(output, value, error)


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize(
    ("cases", "op", "rows", "cols", "dtype"),
    [*((forward, *case) for case in FORWARD), *((backward, *case) for case in BACKWARD)],
)
def test_values(cases: ModuleType, op: str, rows: int, cols: int, dtype: np.dtype) -> None:
    check(cases, cases.interpret, cases.make_spec(op, rows, cols, dtype, dtype))


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize(("op", "rows", "cols", "dtype"), [FORWARD[0], FORWARD[2], FORWARD[4]])
def test_what_is_not_finite_stays_in_its_row(
    op: str, rows: int, cols: int, dtype: np.dtype
) -> None:
    spec = forward.make_spec(op, rows, cols, dtype, dtype)
    x, *rest = forward.make_operands(spec)
    spoilt = np.array(x)
    spoilt[1::3] = np.nan
    spoilt[2::6] = np.inf
    got = forward.interpret(spec, spoilt, *rest)
    expected, errors = forward.reference(spec, x, *rest, outputs=got)
    error = np.abs(got[0][::3].astype(np.float64) - expected[0][::3])
    assert (error <= np.broadcast_to(errors[0], expected[0].shape)[::3]).all()
    assert np.isnan(got[0][1::3].astype(np.float32)).all()


@pytest.mark.usefixtures("quick_to_compile")
def test_dx_of_rows_beside_what_is_not_finite() -> None:
    op, _, cols, dtype = BACKWARD[1]
    spec = backward.make_spec(op, 8, cols, dtype, dtype)
    *saved, d = backward.make_operands(spec)
    spoilt = np.array(d)
    spoilt[1::2] = np.nan
    got = backward.interpret(spec, *saved, spoilt)[0]
    (expected, *_), (error, *_) = backward.reference(spec, *saved, d)
    within = np.abs(got.astype(np.float64) - expected) <= np.broadcast_to(error, got.shape)
    assert within[::2].all()


@pytest.mark.parametrize("cols", [1001, 4095, 50257])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", *RESIDUAL_OPS])
def test_norm_backwards_are_refused(op: str, cols: int) -> None:
    """No kernel supports the backward of a norm with unaligned rows, so XLA's code runs.

    Models are not trained with such widths.
    """
    fwd = forward.make_spec(op, 8192, cols, BF16, BF16)
    bwd = changed(fwd, direction="bwd", want_stats=False)
    assert mosaic.why_unsupported(fwd) is None
    assert "multiple of 16 bytes" in str(mosaic.why_unsupported(bwd))
    aligned = changed(bwd, cols=cols // 8 * 8)
    assert mosaic.why_unsupported(aligned) is None


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
@pytest.mark.parametrize("cases", [forward, backward], ids=["forward", "backward"])
def test_on_a_gpu(
    cases: ModuleType, op: str, x: np.dtype, y: np.dtype, rows: int, cols: int
) -> None:
    check(cases, jax.jit(cases.call, static_argnums=0), cases.make_spec(op, rows, cols, x, y))
