"""Softmaxes with a mask, a bias or `causal` compile for every GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from logits_cases import KINDS, Case, of_width
from specs import BF16, F32
from test_compile import COLS, GPUS, check, compile_call, kernels_in

import jaxnorm
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.schedule import choose_line

# Widths of short rows, of unaligned rows, of rows held in registers, and of rows that need a loop.
WIDTHS = [64, 1000, 4095, 4096, 16384, 32768, 50257]


def specs(kind, cols, dtype):
    """Return two specs, of the forward and of the backward.

    They belong to softmax or log_softmax, depending on the width and the kind.
    """
    op = ["softmax", "log_softmax"][(WIDTHS.index(cols) + list(KINDS).index(kind)) % 2]
    case = of_width(kind, cols, cols)
    return [call.as_seen_by("triton") for call in (case.call(op, dtype), case.backward(op, dtype))]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_compile(kind, cols, dtype):
    # The cases take the GPUs in turn. Together, they compile each width for every GPU, and each
    # kind of mask or bias for every GPU.
    gpu = [*GPUS][(WIDTHS.index(cols) + list(KINDS).index(kind)) % len(GPUS)]
    for spec in specs(kind, cols, dtype):
        check(spec, GPUS[gpu])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("kind", ["causal", "bias"])
def test_vectors_are_read_up_to_the_diagonal(kind, dtype):
    """Loads near a causal diagonal are 16 bytes wide, even if this loads some masked elements."""
    for spec in specs(kind, 4096, dtype):
        for kernel in compile_call(spec, GPUS["sm_80"]):
            of_rows = re.findall(r"(?:ld|st)\.global[\w.:]*|cp\.async\.\w+\.shared", kernel.ptx)
            assert of_rows
            assert all(".v4.b32" in one or "cp.async.cg" in one for one in of_rows)


def test_every_line_of_a_table_is_used():
    cases = [Case((4, 64, cols), bias=(64, cols)) for cols in COLS]
    for table, call in (("LOGITS_FORWARD", Case.call), ("SOFTMAX_BIAS_BACKWARD", Case.backward)):
        lines = {choose_line(call(case, "softmax", BF16).as_seen_by("triton")) for case in cases}
        assert lines == {*getattr(schedules, table)}


# ------------------------------------------------------------------------------ programs in JAX


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("setting", [jax.enable_x64, jax.check_tracer_leaks])
@pytest.mark.parametrize(("cols", "backward"), [(300, 1), (16384, 2)])
def test_calls_lower(cols, backward, setting):
    x = jax.ShapeDtypeStruct((2, 6, cols), F32)
    bias, mask = jax.ShapeDtypeStruct((6, cols), BF16), jax.ShapeDtypeStruct((2, 1, 1), jnp.bool_)

    def step(x, bias, mask):
        def loss(x, bias):
            y = jaxnorm.softmax(
                x, where=mask, bias=bias, scale=0.5, causal=True, implementation="triton"
            )
            return jnp.sum(jnp.sin(y))

        return jax.value_and_grad(loss, argnums=(0, 1))(x, bias)

    with setting(True):
        assert kernels_in(step, x, bias, mask) == 1 + backward
        batch = jax.ShapeDtypeStruct((3, *x.shape), F32)
        assert kernels_in(jax.vmap(step, (0, None, None)), batch, bias, mask) == 1 + backward
