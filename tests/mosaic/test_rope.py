"""The kernels of a norm and the rotation after it: interpreted, and lowered for a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import Compiler
from norm_rope_cases import RotatedNorm, tables
from pairs import pairwise
from reference import SAFETY, assert_within, exact, rounding, unit_roundoff
from rope_cases import BF16, F16, F32, QUERIES, make_spec, types_of
from specs import changed

from benchmarks import contract
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.device.gpu import REGISTERS
from jaxnorm_kernels.mosaic.device.layouts import WARPGROUP_THREADS
from jaxnorm_kernels.mosaic.norm import rope as rope_backward
from jaxnorm_kernels.mosaic.schedules import heads
from jaxnorm_kernels.mosaic.schedules.heads import Heads
from jaxnorm_kernels.specs import Shared, Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SPILLED = 32  # bytes of a thread: a few words

# Rows, and where they find theirs in the tables: heads of a position, a tile of which has one
# position, or several, or any; as many positions as rows; one for all.
SHARED = {
    "16 heads": Shared(((2, False), (3, True), (16, False)), has_columns=True),
    "3 heads": Shared(((8, True), (4, False), (3, False)), has_columns=True),
    "keys of one head": Shared(((96, True),), has_columns=True),
    "heads alike": Shared(((99, False),), has_columns=True),
}
# Columns of a head, and those that are rotated.
SIZES = [(32, 32), (32, 16), (48, 32)]
MIXES = [(BF16, F32, BF16), (F32, F32, F32), (F32, BF16, BF16), (F16, F32, F16), (BF16, F32, F32)]


def rows_of(shared: Shared) -> np.ndarray:
    """The row of a table that belongs to each row."""
    sizes = [size for size, _ in shared.segments]
    kept = [size if has_axis else 1 for size, has_axis in shared.segments]
    return np.broadcast_to(np.arange(shared.rows).reshape(kept), sizes).reshape(-1)


def make_operands(spec: Spec) -> tuple[Any, ...]:
    """x, scale, cos, sin and dy."""
    rng = np.random.default_rng(0)
    assert spec.norm.table_rows is not None
    cos, sin = tables(
        (spec.norm.table_rows.rows, spec.norm.rotated // 2), spec.norm.table_dtype, factor=1.2
    )
    x, d = (
        jnp.asarray(rng.normal(size=(spec.rows, spec.cols)), dtype)
        for dtype in (spec.x_dtype, spec.y_dtype)
    )
    scale = None
    if spec.norm.scale_dtype is not None:
        scale = jnp.asarray(1 + 0.3 * rng.normal(size=spec.cols), spec.norm.scale_dtype)
    return x, scale, cos, sin, d


def reference_of(spec: Spec, operands: tuple[Any, ...]) -> RotatedNorm:
    x, scale, cos, sin, d = operands
    assert spec.norm.table_rows is not None
    of_rows = rows_of(spec.norm.table_rows)
    return RotatedNorm(
        x=exact(x),
        gain=np.ones(spec.cols) if scale is None else exact(scale) + spec.norm.scale_offset,
        bias=np.zeros(spec.cols),
        d=exact(d),
        subtract_mean=False,
        epsilon=1e-6,
        saved=spec.norm.saved,
        x_dtype=spec.x_dtype.name,
        y_dtype=spec.y_dtype.name,
        cos=exact(cos)[of_rows],
        sin=exact(sin)[of_rows],
        interleaved=spec.norm.interleaved,
    )


def run(spec: Spec, *operands: Any, **schedule: Any) -> Any:
    with mosaic.interpreted():
        return jax.jit(lambda *a: contract.call(mosaic, spec, *a, **schedule))(*operands)


def rstd_bound(ref: RotatedNorm) -> np.ndarray:
    """The sum of the squares of a row, and a few operations."""
    roundings: np.ndarray = SAFETY * unit_roundoff("float32") * (np.sqrt(ref.n) + 4) * ref.r[:, 0]
    return roundings


def check(
    shared: Shared,
    monkeypatch: pytest.MonkeyPatch,
    *,
    schedule: Heads | None = None,
    **given: Any,
) -> None:
    """Both passes: the backward starts from what the forward has made."""
    monkeypatch.setattr(rope_backward, "persistent_blocks", lambda spec, schedule: 2)
    forward, backward = (make_spec(direction, shared, **given) for direction in ("fwd", "bwd"))
    x, scale, cos, sin, d = operands = make_operands(forward)
    ref = reference_of(forward, operands)
    y, (rstd,) = run(forward, x, scale, cos, sin)
    assert_within(y, ref.y, ref.y_bound())
    assert_within(rstd, ref.r[:, 0], rstd_bound(ref))
    saved = y if forward.norm.saved == "output" else x
    dx, dscale, *_ = run(
        backward, saved, (rstd,), scale, cos, sin, d, **({"schedule": schedule} if schedule else {})
    )
    dx_bound, dscale_bound = ref.gradient_bounds()
    assert_within(dx, ref.dx, dx_bound)
    if scale is None:
        assert dscale is None
    else:
        rounded = rounding(np.abs(ref.dscale) + dscale_bound, scale.dtype.name)
        assert_within(dscale, ref.dscale, dscale_bound + rounded)


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"size": size, "mix": mix, "saved": saved, "interleaved": interleaved}
    check(SHARED[shared], monkeypatch, **given)


@pytest.mark.parametrize(
    "change", [{"scale_dtype": None}, {"scale_offset": 0.25}, {"scale_dtype": BF16}], ids=str
)
def test_variants(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(SHARED["16 heads"], monkeypatch, **change)


def test_steps_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step has rows of the one before it, which count once."""
    shared = Shared(((71, True),), has_columns=True)
    check(shared, monkeypatch, schedule=Heads(4, 4, 4, 32, rows=32, stages=2))


def test_a_scale_that_y_tells_nothing_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 beside a partner that is not: the column is lost, and its gradient finite."""
    monkeypatch.setattr(rope_backward, "persistent_blocks", lambda spec, schedule: 2)
    spec = make_spec("fwd", SHARED["16 heads"])
    x, scale, cos, sin, d = make_operands(spec)
    scale = scale.at[3].set(0)
    y, stats = run(spec, x, scale, cos, sin)
    spec = changed(spec, direction="bwd", want_stats=False)
    dx, dscale, *_ = run(spec, y, stats, scale, cos, sin, d)
    assert np.all(np.isfinite(dx))
    assert np.all(np.isfinite(dscale))
    ref = reference_of(spec, (x, scale, cos, sin, d))
    others = np.arange(spec.cols) != 3
    _, bound = ref.gradient_bounds()
    bound = bound + rounding(np.abs(ref.dscale) + bound, dscale.dtype.name)
    assert_within(exact(dscale)[others], ref.dscale[others], bound[others])


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
        call = jax.jit(lambda *a, spec=spec: contract.call(mosaic, spec, *a)[:2])
        program = call.trace(*types_of(spec)).lower(lowering_platforms=("cuda",)).as_text()
        assert program.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"size": (520, 64)}, "hold no rows of this length"),
        ({"size": (18, 18)}, "among the threads of a row"),
        ({"size": (36, 32), "mix": (BF16, F32, BF16)}, "multiples of 16 bytes"),
        ({"scale_groups": 2}, "groups of rows"),
        ({"wants_tables": True}, "plain JAX's"),
        ({"mix": (np.dtype("float64"), F32, F32)}, "float64"),
    ],
    ids=str,
)
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    assert sentence in (mosaic.why_unsupported(make_spec("bwd", QUERIES[5], **change)) or "")


def test_few_rows_are_refused() -> None:
    few = Shared(((63, True),), has_columns=True)
    for direction in ("fwd", "bwd"):
        assert "by 64 and more" in (mosaic.why_unsupported(make_spec(direction, few)) or "")


@pytest.mark.parametrize(
    ("size", "mix", "interleaved"), pairwise(LARGE, MIXES[:4], [False, True]), ids=str
)
def test_registers(
    size: tuple[int, int], mix: tuple[np.dtype, ...], interleaved: bool, compiler: Compiler
) -> None:
    """Few spills; and the registers of a ring let as many blocks run at a time as it asks for."""
    for direction in ("fwd", "bwd"):
        spec = make_spec(direction, QUERIES[32], size, mix, interleaved=interleaved)
        (kernel,) = compiler.compile(
            lambda *a, spec=spec: contract.call(mosaic, spec, *a)[:2], types_of(spec)
        )
        assert kernel.spilled <= SPILLED
        if direction == "bwd":
            schedule = heads.backward(spec)
            assert schedule is not None
            registers = -(-kernel.registers // 8) * 8  # given to a warp by 8 for each thread
            assert registers * WARPGROUP_THREADS * schedule.blocks_per_sm <= REGISTERS
