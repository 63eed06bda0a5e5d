"""Kernels with default schedules, compiled for an H100: their registers and spills.

These tests need JAX's CUDA plugin, but no GPU. Most do not run in CI, so run them by hand::

    make compile SELECTED=tests/mosaic/test_registers.py
"""

import functools
import re

import contract
import jax
import norms
import pytest
import test_group_norm
import test_rope
from h100 import SPILLED, assert_fits
from logits_cases import KINDS, of_width, operand_types
from specs import BF16, F32
from test_lowering import each_shape

import jaxnorm
from jaxnorm_kernels import mosaic


def each_strip():
    """Yield norms over a middle axis, without and with an activation."""
    for (shape, group), dtype, direction in [
        (a, d, p) for a in test_group_norm.ALL[-9:] for d in (BF16, F32) for p in ("fwd", "bwd")
    ]:
        for given in ({}, test_group_norm.GELU):
            spec = test_group_norm.make_spec(direction, shape, group, dtype, **given)
            yield pytest.param(spec, id=f"{shape}-{group}-{dtype}-{direction}-{len(given)}")


@pytest.mark.parametrize("spec", [*each_shape(), *each_strip(), *test_rope.each_size()])
def test_registers(spec, compiler):
    """Kernels hardly spill, and an SM has registers for the scheduled number of blocks."""
    if mosaic.why_not_default(spec) is not None:
        return  # The default for this call is XLA's code.
    results = slice(2 if spec.op == "norm_rope" else None)
    call = functools.partial(contract.call, mosaic, spec)
    kernels = compiler.compile(lambda *a: call(*a)[results], norms.types_of(spec))
    assert kernels
    for kernel in kernels:
        assert_fits(kernel, spec)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
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
