"""The backward kernel of two norms with a residual between them."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backward_cases import BF16, F16, F32
from h100 import Compiler
from reference import TwoNorms, assert_within, exact, rounding
from specs import build_spec, changed

from benchmarks import contract
from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SPILLED = 32  # bytes of a thread: a few words
MIXES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16), (F32, BF16, BF16)]
each_mix = pytest.mark.parametrize("dtypes", MIXES, ids=str)
CASES = {
    "ring": (7, 1024, PipelinedRows(4, 1, stages=2)),
    "ring_tail": (5, 1504, PipelinedRows(4, 1, stages=2)),
    "ring_rows": (6, 1024, PipelinedRows(4, 1, stages=2, rows=2)),
    "ring_two_warpgroups": (5, 2048, PipelinedRows(4, 2, stages=2)),
    "rows_ring": (9, 440, PipelinedNarrowRows(4, 32, rows=4, stages=2)),
}


def two_mixes_each(cases: Iterable[Any]) -> list[tuple[Any, tuple[np.dtype, ...]]]:
    """Each case with two mixes, in turn."""
    return [
        (case, MIXES[mix % len(MIXES)])
        for i, case in enumerate(cases)
        for mix in (2 * i, 2 * i + 1)
    ]


def make_spec(rows: int, cols: int, dtypes: tuple[np.dtype, ...], saved: str = "output") -> Spec:
    x, residual, y = dtypes
    return build_spec(
        op="norm_add_norm",
        direction="bwd",
        rows=rows,
        cols=cols,
        x_dtype=x,
        y_dtype=y,
        residual_dtype=residual,
        scale_dtype=F32,
        next_scale_dtype=F32,
        epsilon=1e-6,
        saved=saved,
        adds_dh=True,
    )


def make_operands(spec: Spec) -> tuple[Any, ...]:
    """As the forward leaves them; h beside them."""
    rng = np.random.default_rng(0)

    def normal(dtype: np.dtype | None, shape: tuple[int, ...] = (spec.rows, spec.cols)) -> Any:
        return None if dtype is None else jnp.asarray(rng.normal(size=shape).astype(dtype))

    x, residual = normal(spec.x_dtype), normal(spec.norm.residual_dtype)
    shape = (spec.cols,) if spec.groups == 1 else (spec.groups, spec.cols)
    scale, next_scale = (
        None if dtype is None else 1 + 0.3 * normal(dtype, shape)
        for dtype in (spec.norm.scale_dtype, spec.norm.next_scale_dtype)
    )
    forward = changed(spec, direction="fwd", want_stats=True)
    kept = jax.jit(functools.partial(contract.call, xla, forward))
    y, h, stats = kept(x, residual, scale, next_scale)
    dy, dh = normal(spec.y_dtype), normal(spec.norm.residual_dtype) if "h" in spec.outputs else None
    saved = y if spec.norm.saved == "output" else h
    return (x, saved, stats, scale, next_scale, dy, dh), h


def check(spec: Spec, schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "persistent_blocks", lambda spec, schedule: 2)
    operands, h = make_operands(spec)
    with mosaic.interpreted():
        got = jax.jit(lambda *operands: contract.call(mosaic, spec, *operands, schedule=schedule))(
            *operands
        )
    x, _, _, scale, next_scale, dy, dh = operands
    rows = spec.rows // spec.groups
    for group in range(spec.groups):
        at = np.s_[group * rows : (group + 1) * rows]
        gains = [
            np.ones(spec.cols)
            if p is None
            else exact(p).reshape(spec.groups, -1)[group] + spec.norm.scale_offset
            for p in (scale, next_scale)
        ]
        ref = TwoNorms(
            exact(x)[at],
            exact(h)[at],
            *gains,
            exact(dy)[at],
            np.zeros((rows, spec.cols)) if dh is None else exact(dh)[at],
            spec.norm.saved,
            *(dtype.name for dtype in (spec.x_dtype, spec.last.x_dtype, spec.y_dtype)),
        )
        expected = (ref.first.dx, ref.dresidual, ref.first.dscale, ref.last.dscale)
        bounds = ref.gradient_bounds()
        for i, (ours, theirs, bound) in enumerate(zip(got, expected, bounds)):
            if ours is None:
                assert (scale, next_scale)[i - 2] is None
            elif i < 2:
                assert_within(ours[at], theirs, bound)
            else:
                ours = ours.reshape(spec.groups, -1)[group]
                assert_within(ours, theirs, bound + rounding(theirs, "float32"))


# Each schedule with both of what is saved and two mixes; each mix with both, too.
@pytest.mark.parametrize(
    ("name", "dtypes", "saved"),
    [
        (name, mix, ["output", "input"][(i + i // 4) % 2])
        for i, (name, mix) in enumerate(two_mixes_each(CASES))
    ],
    ids=str,
)
def test_values(
    name: str, dtypes: tuple[np.dtype, ...], saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, cols, schedule = CASES[name]
    check(make_spec(rows, cols, dtypes, saved), schedule, monkeypatch)


@pytest.mark.parametrize(
    "change",
    [
        {"adds_dh": False},
        {"scale_dtype": None},
        {"next_scale_dtype": None},
        {"scale_dtype": None, "next_scale_dtype": None},
        {"scale_groups": 2, "rows": 16},
        {"scale_offset": 0.25},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ring", "rows_ring"])
def test_variants(name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cols, schedule = CASES[name]
    spec = changed(make_spec(rows, cols, (F32, F32, F32)), **change)
    check(spec, schedule, monkeypatch)


@pytest.mark.parametrize("name", ["ring_rows", "rows_ring"])
def test_float16_that_overflows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cotangent of 0, as behind a tanh, an infinite y is as good as the largest number."""
    monkeypatch.setattr(schedules, "persistent_blocks", lambda spec, schedule: 2)
    rows, cols, schedule = CASES[name]
    spec = make_spec(rows, cols, (F32, F32, F16))
    (x, saved, *others, dy, dh), _ = make_operands(spec)
    dy = dy.at[1, 5].set(0)

    @jax.jit
    def gradients(saved: jax.Array) -> Any:
        return contract.call(mosaic, spec, x, saved, *others, dy, dh, schedule=schedule)

    with mosaic.interpreted():
        of_inf, of_largest = (gradients(saved.at[1, 5].set(y)) for y in (np.inf, 65504))
    for a, b in zip(of_inf, of_largest):
        np.testing.assert_array_equal(a, b)
        assert np.all(np.isfinite(a))


WIDTHS = [64, 768, 1000, 1024, 2048, 3000, 4096, 5120, 7168, 8192, 12288, 16384, 32768]


def shapes_of(spec: Spec) -> tuple[Any, ...]:
    def rows(dtype: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((spec.rows, spec.cols), dtype)

    stat, column = (jax.ShapeDtypeStruct((n,), F32) for n in (spec.rows, spec.cols))
    saved = spec.y_dtype if spec.norm.saved == "output" else spec.last.x_dtype
    dh = rows(spec.last.x_dtype)
    return rows(spec.x_dtype), rows(saved), (stat, stat), column, column, rows(spec.y_dtype), dh


@pytest.mark.parametrize(("cols", "dtypes"), two_mixes_each(WIDTHS), ids=str)
def test_lowers_for_a_gpu(cols: int, dtypes: tuple[np.dtype, ...]) -> None:
    """In one kernel, or two where no ring takes the rows."""
    spec = make_spec(8192, cols, dtypes)
    assert mosaic.why_unsupported(spec) is None
    function = jax.jit(lambda *operands: contract.call(mosaic, spec, *operands))
    text = function.trace(*shapes_of(spec)).lower(lowering_platforms=("cuda",)).as_text()
    kernels = text.count("mosaic_gpu_v2")
    in_two = schedules.norm_schedule(spec) is None
    assert kernels == 1 if not in_two else kernels >= 2
    assert in_two == (cols not in WIDTHS)


@pytest.mark.parametrize(
    ("cols", "reason"), [(50257, "multiples of 16 bytes"), (262144, "no rows of this length")]
)
def test_what_neither_norm_s_kernel_holds_is_refused(cols: int, reason: str) -> None:
    assert reason in str(mosaic.why_unsupported(make_spec(8191, cols, MIXES[0])))


@each_mix
@pytest.mark.parametrize("cols", WIDTHS)
def test_registers(cols: int, dtypes: tuple[np.dtype, ...], compiler: Compiler) -> None:
    """Few spills; and the registers of a ring let as many blocks run at a time as it asks for."""
    spec = make_spec(8192, cols, dtypes)
    schedule = schedules.norm_schedule(spec)
    assert schedule is not None
    (kernel,) = compiler.compile(
        lambda *operands: contract.call(mosaic, spec, *operands), shapes_of(spec)
    )
    assert kernel.spilled <= SPILLED
    threads = 128 * getattr(schedule, "warpgroups", 1)
    registers = -(-kernel.registers // 8) * 8  # given to a warp by 8 for each thread
    assert registers * threads * schedule.blocks_per_sm <= schedules.REGISTERS
