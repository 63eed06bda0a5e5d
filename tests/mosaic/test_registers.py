"""Kernels with default schedules, compiled for an H100: their registers and spills.

These tests need JAX's CUDA plugin, but no GPU. They do not run in CI, so run them by hand::

    make compile SELECTED=tests/mosaic/test_registers.py
"""

import functools
import re

import backward_cases
import contract
import jax
import norms
import pytest
from contract import KernelWorkload
from forward_cases import RESIDUAL_OPS, make_spec
from h100 import SPILLED, assert_fits
from logits_cases import KINDS, of_width, operand_types
from specs import BF16, F32

import jaxnorm
from benchmarks.workloads import GRID
from jaxnorm_kernels import mosaic

# Shapes that cover every rule of the schedule tables.
_GROUPS = ("narrow rows", "powers of two", "model widths", "odd rows")
SHAPES = [shape for group in _GROUPS for shape in GRID[group]]
WIDTHS = [768, 1024, 2048, 4096, 5120, 8192, 12288, 16384, 32768]
each_dtype = pytest.mark.parametrize("dtype", [BF16, F32], ids=str)


def check(spec, compiler):
    call = functools.partial(contract.call, mosaic, spec)
    kernels = compiler.compile(call, norms.types_of(spec))
    assert kernels
    for kernel in kernels:
        assert_fits(kernel, spec)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
@each_dtype
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_registers(rows, cols, dtype, op, direction, compiler):
    workload = KernelWorkload(op, direction, rows, cols, str(dtype), str(dtype))
    spec = workload.spec
    if (mosaic.why_unsupported(spec) or mosaic.why_not_default(spec)) is not None:
        return  # The default for this call is XLA's code.
    operands = jax.eval_shape(lambda: workload.operands(0))
    kernels = compiler.compile(workload.function(mosaic), operands)
    assert kernels
    for kernel in kernels:
        assert_fits(kernel, spec)


@pytest.mark.parametrize("op", RESIDUAL_OPS)
@pytest.mark.parametrize(
    ("x", "residual", "y"), [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16)], ids=str
)
@pytest.mark.parametrize("cols", [768, 1024, 2048, 4096, 5120, 8192, 12288, 16384, 50257, 2**17])
def test_registers_of_residuals(cols, x, residual, y, op, compiler):
    check(make_spec(op, 8192, cols, x, y, residual_dtype=residual), compiler)


@pytest.mark.parametrize(("op", "saved"), [("layer_norm", "output"), ("rms_norm", "input")])
@pytest.mark.parametrize(("x", "y"), [(BF16, BF16), (F32, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
def test_with_dh(cols, x, y, op, saved, compiler):
    check(backward_cases.make_spec(op, 8192, cols, x, y, saved=saved, adds_dh=True), compiler)


@each_dtype
@pytest.mark.parametrize(("rows", "cols"), [(8192, 1000), (8192, 2992), (8191, 2992), (8191, 4088)])
def test_tails_with_dh(rows, cols, dtype, compiler):
    spec = backward_cases.make_spec("layer_norm", rows, cols, dtype, dtype, adds_dh=True)
    check(spec, compiler)


@each_dtype
@pytest.mark.parametrize("cols", [768, 1024, 3000, 4096, 8192, 16384])
def test_groups_of_rows(cols, dtype, compiler):
    change = {"scale_groups": 16, "bias_groups": 16}
    check(backward_cases.make_spec("layer_norm", 8192, cols, dtype, dtype, **change), compiler)


# ------------------------------------------------------- softmaxes with a mask, a bias or `causal`


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [1024, 2048, 4096, 8192, 16384])
def test_registers_of_logits(cols, kind, dtype, compiler):
    case = of_width(kind, 2048, cols)
    for op in ("softmax", "log_softmax"):
        for call in (case.call(op, dtype), case.backward(op, dtype)):
            (kernel, *_) = compiler.compile(call.kernel("mosaic"), operand_types(call))
            assert kernel.spilled <= SPILLED


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ["mask", "bias", "causal"])
def test_a_program_holds_two_kernels_and_nothing_else(kind, compiler):
    """A softmax with a mask, a bias or `causal` is one kernel per pass, and nothing else.

    The backward kernel also computes the bias's gradient.
    """
    case = KINDS[kind]

    def typed(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=compiler.sharding)

    def run(x, mask, bias, d):
        def softmax(x, bias):
            return jaxnorm.softmax(
                x, -1, mask, bias=bias, causal=case.causal, implementation="mosaic"
            )

        y, vjp = jax.vjp(softmax, x, bias)
        return y, vjp(d)

    x = typed(case.shape, BF16)
    mask = None if case.mask is None else typed(case.mask, bool)
    bias = None if case.bias is None else typed(case.bias, BF16)
    text = jax.jit(run).lower(x, mask, bias, x).compile().as_text()
    ops = re.findall(r" = (?:\(.*?\)|\S+) ([a-z-]+)\(", text[text.index("ENTRY") :])
    free = {"parameter", "bitcast", "get-tuple-element", "tuple"}
    assert [op for op in ops if op not in free] == ["custom-call"] * 2
