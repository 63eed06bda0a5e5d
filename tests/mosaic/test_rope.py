"""The kernels of a norm followed by rotary embedding: interpreted, and lowered for a GPU.

`test_every_gpu` compiles some of them.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import cases
import contract
import norms
import numpy as np
import pytest
from cases import run
from pairs import pairwise
from programs import kernels_in
from specs import BF16, F16, F32, changed

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.mosaic.norm import rope as rope_backward
from jaxnorm_kernels.mosaic.schedules.heads import Heads
from jaxnorm_kernels.specs import Spec

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
    return cases.make_spec("rms_norm_rope", direction, rows, cols, mix, **given)


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run backward kernels in the interpreter with two persistent blocks."""
    monkeypatch.setattr(rope_backward, "persistent_blocks", lambda spec, schedule: 2)


def check(shared: Shared, *, schedule: Heads | None = None, **given: Any) -> None:
    """Check both passes in the interpreter. The backward reads the forward's saved arrays."""
    forward, backward = (make_spec(direction, shared, **given) for direction in ("fwd", "bwd"))
    arrays, *made = norms.check_forward(run, forward)
    norms.check_backward(functools.partial(run, schedule=schedule), backward, arrays, made)


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


@pytest.mark.parametrize(
    "change", [{"scale_dtype": None}, {"scale_offset": 0.25}, {"scale_dtype": BF16}], ids=str
)
def test_variants(change: dict[str, Any]) -> None:
    check(SHARED["16 heads"], **change)


def test_steps_that_overlap() -> None:
    """If the last tile of rows overlaps the one before, sums count the common rows only once."""
    shared = Shared(((71, True),), has_columns=True)
    check(shared, schedule=Heads(4, 4, 4, 32, rows=32, stages=2))


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
    gradients = norms.check_backward(run, spec, arrays, made)
    assert all(np.all(np.isfinite(gradients[name])) for name in ("x", "scale"))


LARGE = [(128, 128), (64, 64), (256, 256), (512, 512), (16, 16), (80, 32), (96, 96), (128, 64)]


def each_size() -> Iterator[Any]:
    """Yield both passes for combinations of sizes, dtypes and options."""
    for queries, size, *values in pairwise(
        [*QUERIES], LARGE, MIXES, ["output", "input"], [False, True]
    ):
        mix, saved, interleaved = values
        for direction in ("fwd", "bwd"):
            given = {"saved": saved, "interleaved": interleaved}
            spec = make_spec(direction, QUERIES[queries], size, mix, **given)
            name = "-".join(map(str, (direction, queries, size, *mix, saved, interleaved)))
            yield pytest.param(spec, id=name)


@pytest.mark.oldest_jax
@pytest.mark.parametrize("spec", [*each_size()])
def test_lowers_for_a_gpu(spec: Spec) -> None:
    assert mosaic.why_unsupported(spec) is None
    call = functools.partial(contract.call, mosaic, spec)
    assert kernels_in(lambda *a: call(*a)[:2], *norms.types_of(spec)) == 1


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
