"""Slices of arrays as operands and results of kernels, compiled for an H100.

XLA passes a contiguous slice to a kernel as an address inside the sliced array (a *dynamic-slice
fusion*), and lets a kernel write into a part of an array. The library allows this only for the
arrays in which a scan stacks each layer's residuals, because their slices are aligned. Any other
slice is copied to a buffer first.
"""

import collections
import re

import jax
import jax.numpy as jnp
import parts
import pytest
import test_merged_matmuls
from h100 import Compiler
from test_parts import CASES, PATTERNS, gradients

import jaxnorm
from jaxnorm.tools import selfcheck
from jaxnorm_kernels import launching, refusals

pytestmark = pytest.mark.compiles

BF16, F32 = jnp.bfloat16, jnp.float32


def shape(*sizes: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def compiled(compiler: Compiler, function, *operands) -> str:
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=compiler.sharding), operands
    )
    # Wrap `function` in a new function each time, so that JAX traces it again. Otherwise, after a
    # test has replaced `own_buffer`, JAX would reuse a trace with the original `own_buffer`.
    return jax.jit(lambda *a: function(*a)).lower(*shapes).compile().as_text()


def norm(x: jax.Array, *scale: jax.Array) -> jax.Array:
    return jaxnorm.rms_norm(x, *scale, implementation="mosaic")


# ------------------------------------------------------------------------------ what is copied


# The least number of kernels in the program of an entry of `FUNCTIONS`. Most have one kernel for
# the forward pass and one for the backward pass. XLA's code runs for several labels.
LEAST_KERNELS = {"log_prob_and_entropy several labels": 0}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_kernel_gets_an_unaligned_address(case, compiler, monkeypatch):
    """For all functions, no kernel reads or writes a slice directly.

    All operands and cotangents are slices here, and all results are written into larger arrays.
    Kernels run here for norms that are so small that XLA's code is the default.
    """
    monkeypatch.setattr(refusals, "_TINY_BYTES", 0)
    operands, *_ = selfcheck.operands_of(case, "bfloat16")
    text = compiled(compiler, parts.of_parts(selfcheck.passes(case.call)), operands)
    assert parts.kernels(text) >= LEAST_KERNELS.get(str(case), 2)
    assert not parts.fused(text)


@pytest.mark.parametrize("direction", [lambda f: f, gradients], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, direction, compiler):
    function, operands = PATTERNS[name]
    text = compiled(compiler, direction(function), *jax.eval_shape(operands))
    assert parts.kernels(text) > 0
    assert not any(map(is_unaligned, parts.addresses(text)))


def is_unaligned(address: parts.Address) -> bool:
    return address.unit % launching.ALIGNMENT != 0


def test_without_barriers_kernels_get_unaligned_addresses(compiler, monkeypatch):
    """If jaxnorm sets no optimization barriers, XLA passes unaligned slices to kernels.

    So the tests above would detect a missing barrier.
    """
    monkeypatch.setattr(launching, "own_buffer", lambda a: a)
    jax.clear_caches()
    text = compiled(compiler, parts.of_parts(norm), shape(256, 1024), shape(1024, dtype=F32))
    jax.clear_caches()
    operations = [address.operation for address in parts.addresses(text)]
    assert sorted(operations) == ["dynamic-update-slice", "slice", "slice"]
    assert all(map(is_unaligned, parts.addresses(text)))


# ------------------------------------------------------------------- slices that are used directly


def layer(x, params):
    scale, weight = params
    return x + norm(x, scale) @ weight, None


LAYERS = shape(5, 1024, dtype=F32), shape(5, 1024, 1024)


def test_residuals_in_a_loop_s_stacks_are_read_and_written_in_place(compiler: Compiler):
    """In a scan, kernels access a layer's residuals directly in the arrays that stack all layers.

    They read y and rstd there, and write rstd.
    """
    text = compiled(
        compiler,
        gradients(lambda x, *layers: jax.lax.scan(layer, x, layers)[0]),
        *(shape(4096, 1024), *LAYERS),
    )
    found = collections.Counter(address.operation for address in parts.addresses(text))
    # The backward kernel reads two slices (of y and of rstd). The forward kernel writes one slice
    # (of rstd).
    assert found == {"dynamic-slice": 2, "dynamic-update-slice": 1}
    assert not any(map(is_unaligned, parts.addresses(text)))


# ------------------------------------------------------------------------ operands overwritten


@pytest.mark.parametrize("case", test_merged_matmuls.MERGED, ids=str)
def test_only_entire_arrays_are_overwritten(case, compiler):
    """A kernel that overwrites logits gets them in a separate buffer, even if XLA merges matmuls.

    XLA merges the matmuls that compute the logits of several chunks or losses. The values of such
    programs are tested on a GPU in `test_merged_matmuls.py`.
    """
    xs = [shape(case.rows, case.d, dtype=case.dtype)] * case.losses
    labels = [shape(case.rows, dtype=jnp.int32)] * case.losses
    weight = shape(case.d, case.classes, dtype=case.dtype)
    text = compiled(compiler, test_merged_matmuls.gradients(case), weight, xs, labels)
    assert "output_to_operand_aliasing" in text
    assert not parts.partly_overwritten(text)


# ----------------------------------------------------------------------- what barriers cost

#: Programs in which no operand and no result of a kernel is a slice of a larger array.
WHOLE = {
    "norm": (lambda x, g: norm(x * 2, g) @ x.T, (shape(512, 1024), shape(1024, dtype=F32))),
    "softmax": (lambda x, v: jaxnorm.softmax(x) @ v, (shape(512, 1024), shape(1024, 128))),
    "layers": (
        lambda x, g, *w: unrolled(x, g, w),
        (shape(512, 1024), shape(1024, dtype=F32), *[shape(1024, 1024)] * 4),
    ),
}


def unrolled(x, scale, weights):
    for weight in weights:
        x, _ = layer(x, (scale, weight))
    return x


def operations(text: str) -> collections.Counter[str]:
    """Return a counter of the names of a program's operations. Fusions are counted by kind."""
    lines = re.findall(r"^ +(?:ROOT )?%[\w.-]+ = .*? ([a-z][\w-]*)\((.*)$", text, re.MULTILINE)
    kinds = (re.search(r"kind=(\w+)", rest) for _, rest in lines)
    return collections.Counter(
        f"{name} {kind[1]}" if kind else name for (name, _), kind in zip(lines, kinds)
    )


@pytest.mark.parametrize("direction", [lambda f: f, gradients], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_arrays_cost_nothing(name, direction, compiler, monkeypatch):
    """If no operand is a slice, the barriers around kernels add no operation to the program.

    They are XLA's optimization barriers. They put operands and results into separate buffers, whose
    addresses are aligned.
    """
    function, shapes = WHOLE[name]
    found = operations(compiled(compiler, direction(function), *shapes))
    jax.clear_caches()
    monkeypatch.setattr(launching, "own_buffer", lambda a: a)
    expected = operations(compiled(compiler, direction(function), *shapes))
    jax.clear_caches()
    assert found == expected
