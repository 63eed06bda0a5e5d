"""The kernels of a norm followed by rotary embedding: interpreted, and lowered for a GPU."""

import functools
import math
from typing import Any

import contract
import jax
import norms
import numpy as np
import pytest
from h100 import SPILLED, Compiler
from pairs import pairwise
from programs import kernels_in
from specs import BF16, F16, F32, changed

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.device.gpu import REGISTERS
from jaxnorm_kernels.mosaic.device.layouts import WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.norm import rope as rope_backward
from jaxnorm_kernels.mosaic.schedules import heads
from jaxnorm_kernels.mosaic.schedules.heads import Heads
from jaxnorm_kernels.specs import Shared, Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")

QUERIES = {
    each: Shared(((4, False), (2048, True), (each, False)), has_columns=True) for each in (32, 5, 1)
}

# Each entry describes which rows of x use the same row of the rotary tables. A row of x is one head
# at one position. There are four entries:
#
# 1. The heads of a position share a table row. A kernel's tile has the rows of one position.
# 2. The heads of a position share a table row. A tile has the rows of several positions.
# 3. Each row of x has its own table row.
# 4. All rows of x share one table row.
SHARED = {
    "16 heads": Shared(((2, False), (3, True), (16, False)), has_columns=True),
    "3 heads": Shared(((8, True), (4, False), (3, False)), has_columns=True),
    "keys of one head": Shared(((96, True),), has_columns=True),
    "heads alike": Shared(((99, False),), has_columns=True),
}
# Pairs: the number of columns of a head, and the number of rotated columns.
SIZES = [(32, 32), (32, 16), (48, 32)]
MIXES = [(BF16, F32, BF16), (F32, F32, F32), (F32, BF16, BF16), (F16, F32, F16), (BF16, F32, F32)]


def make_spec(
    direction: str,
    shared: Shared,
    size: tuple[int, int] = (32, 32),
    mix: tuple[np.dtype, ...] = (F32, F32, F32),
    **given: Any,
) -> Spec:
    """Return the spec of a pass.

    `size` is a pair: the number of columns of a head, and how many of them are rotated. `mix` has
    the dtypes of x, of the tables and of y.
    """
    (cols, rotated), rows = size, math.prod(n for n, _ in shared.segments)
    given |= {"rotated": rotated, "table_rows": shared}
    spec: Spec = norms.make_spec("norm_rope", direction, rows, cols, mix, **given)
    return spec


def run(spec: Spec, *operands: Any, **schedule: Any) -> Any:
    with mosaic.interpreted():
        return jax.jit(lambda *a: contract.call(mosaic, spec, *a, **schedule))(*operands)


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_backward, "persistent_blocks", lambda spec, schedule: 2)


def check(shared: Shared, *, schedule: Heads | None = None, **given: Any) -> None:
    """Check both passes in the interpreter. The backward reads the forward's saved arrays."""
    forward, backward = (make_spec(direction, shared, **given) for direction in ("fwd", "bwd"))
    arrays, *made = norms.check_forward(run, forward)
    call = functools.partial(run, **({"schedule": schedule} if schedule else {}))
    norms.check_backward(call, backward, arrays, made)


@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize(
    ("shared", "size", "mix", "saved", "interleaved"),
    pairwise([*SHARED], SIZES, MIXES, ["output", "input"], [False, True]),
    ids=str,
)
def test_values(
    shared: str,
    size: tuple[int, int],
    mix: tuple[np.dtype, ...],
    saved: str,
    interleaved: bool,
) -> None:
    given = {"size": size, "mix": mix, "saved": saved, "interleaved": interleaved}
    check(SHARED[shared], **given)


@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize(
    "change", [{"scale_dtype": None}, {"scale_offset": 0.25}, {"scale_dtype": BF16}], ids=str
)
def test_variants(change: dict[str, Any]) -> None:
    check(SHARED["16 heads"], **change)


@pytest.mark.usefixtures("two_blocks")
def test_steps_that_overlap() -> None:
    """If the last tile of rows overlaps the one before, sums count the common rows only once."""
    shared = Shared(((71, True),), has_columns=True)
    check(shared, schedule=Heads(4, 4, 4, 32, rows=32, stages=2))


@pytest.mark.usefixtures("two_blocks")
def test_a_scale_that_y_tells_nothing_of() -> None:
    """Gradients are finite if the scale of one column of a rotated pair is 0.

    A tiny number replaces the scale of 0. The rotation adds the tiny values of this column to the
    values of the other column, and rounding removes them. So x cannot be recovered from y in the
    column with scale 0. Gradients of all other columns are correct.
    """
    spec = make_spec("fwd", SHARED["16 heads"])
    arrays = norms.make_operands(spec)
    arrays["scale"] = arrays["scale"].at[3].set(0)
    _, *made = norms.check_forward(run, spec, arrays)
    spec = changed(spec, direction="bwd", want_stats=False)
    *_, operands = norms.backward_operands(spec, arrays, made)
    dx, dscale, *_ = run(spec, *operands)
    assert np.all(np.isfinite(dx))
    assert np.all(np.isfinite(dscale))
    reference, _, index = norms.expected_of(spec, arrays, None)
    others = np.arange(spec.cols) != 3
    terms = [a[:, others] for a in reference.terms["scale"]]
    shared = index["scale"][:, others] - (index["scale"][:, others] > 3)
    norms.assert_sums(dscale[others], arrays["scale"][others], shared, terms)


def call_of(spec: Spec) -> Any:
    return lambda *a: contract.call(mosaic, spec, *a)[:2]


LARGE = [(128, 128), (64, 64), (256, 256), (512, 512), (16, 16), (80, 32), (96, 96), (128, 64)]


@pytest.mark.oldest_jax
@pytest.mark.parametrize(
    ("queries", "size", "mix", "saved", "interleaved"),
    pairwise([*QUERIES], LARGE, MIXES, ["output", "input"], [False, True]),
    ids=str,
)
def test_lowers_for_a_gpu(
    queries: int, size: tuple[int, int], mix: tuple[np.dtype, ...], saved: str, interleaved: bool
) -> None:
    for direction in ("fwd", "bwd"):
        given = {"saved": saved, "interleaved": interleaved}
        spec = make_spec(direction, QUERIES[queries], size, mix, **given)
        assert mosaic.why_unsupported(spec) is None
        assert kernels_in(call_of(spec), *norms.types_of(spec)) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"size": (520, 64)}, "support no rows of this length"),
        ({"size": (18, 18)}, "among the threads of a row"),
        ({"size": (36, 32), "mix": (BF16, F32, BF16)}, "multiple of 16 bytes"),
        ({"scale_groups": 2}, "groups of rows"),
        ({"wants_tables": True}, "only plain JAX"),
        ({"mix": (np.dtype("float64"), F32, F32)}, "float64"),
    ],
    ids=str,
)
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    assert sentence in (mosaic.why_unsupported(make_spec("bwd", QUERIES[5], **change)) or "")


def test_few_rows_are_refused() -> None:
    few = Shared(((63, True),), has_columns=True)
    for direction in ("fwd", "bwd"):
        assert "at least 64" in (mosaic.why_unsupported(make_spec(direction, few)) or "")


@pytest.mark.parametrize(
    ("size", "mix", "interleaved"), pairwise(LARGE, MIXES[:4], [False, True]), ids=str
)
def test_registers(
    size: tuple[int, int], mix: tuple[np.dtype, ...], interleaved: bool, compiler: Compiler
) -> None:
    """Few registers are spilled, and an SM has registers for the scheduled number of blocks."""
    for direction in ("fwd", "bwd"):
        spec = make_spec(direction, QUERIES[32], size, mix, interleaved=interleaved)
        (kernel,) = compiler.compile(call_of(spec), norms.types_of(spec))
        assert kernel.spilled <= SPILLED
        if direction == "bwd":
            schedule = heads.backward(spec)
            assert schedule is not None
            registers = -(-kernel.registers // 8) * 8  # allocated in groups of 8
            assert registers * WARPGROUP_THREADS * schedule.blocks_per_sm <= REGISTERS
