"""Norms of arrays ``(outer, cols, inner)`` over cols and groups of neighbouring inner elements.

GroupNorm with channels last is such a norm. Its parameters have one element per inner element. A
block of a kernel processes a *strip*: all columns of some inner elements. The references normalise
rows, so the tests transpose arrays for them. The interpreter models neither layouts nor clusters.
Calls in which a cluster of blocks processes a strip are therefore only lowered, compiled, and run
on a GPU.
"""

import functools
import math
from typing import Any

import cases
import contract
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import norms
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from program_error import assert_computes
from programs import text_for_cuda
from specs import BF16, F16, F32, changed

import jaxnorm
from jaxnorm.calls.rows import RowView
from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.mosaic.rows.strips import StripSchedule
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def make_spec(
    direction: str, shape: tuple[int, int, int], group: int, dtype: Any, **changes: Any
) -> Spec:
    """Return the spec of a call on an array of shape ``(outer, cols, inner)``.

    `group` is the number of inner elements that are normalised together.
    """
    outer, cols, inner = shape
    rows = outer * inner // group
    spec = cases.make_spec("layer_norm", direction, rows, cols * group, (dtype, dtype))
    return changed(spec, inner=inner, inner_cols=group, **{"inner_params": True, **changes})


def strided(array: Any, spec: Spec) -> Any:
    """Rearrange an array ``(rows, cols)`` to the shape ``(outer, cols, inner)`` of `spec`."""
    outer, cols, inner = spec.strided
    parts = array.reshape(outer, inner // spec.inner_cols, cols, spec.inner_cols)
    return jnp.moveaxis(parts, 2, 1).reshape(outer, cols, inner)


def in_rows(array: Any, spec: Spec) -> Any:
    """Rearrange an array ``(outer, cols, inner)`` to ``(rows, cols)``: the inverse of `strided`."""
    outer, cols, inner = spec.strided
    parts = array.reshape(outer, cols, inner // spec.inner_cols, spec.inner_cols)
    return jnp.moveaxis(parts, 1, 2).reshape(spec.rows, spec.cols)


def of_xla(spec: Spec) -> Any:
    """Return XLA's code of a pass.

    It computes the same norm of an array in which each normalised row is contiguous. In this array,
    each row has its own row of parameters.
    """
    outer, _, inner = spec.strided
    rows = changed(spec, inner=1, inner_cols=1, inner_params=False)
    rows = changed(rows, scale_groups=spec.rows, bias_groups=spec.rows)

    def wide(parameter: Any) -> Any:
        if parameter is None:
            return None
        of_samples = jnp.repeat(parameter.reshape(-1, 1, inner), outer // spec.groups, axis=0)
        return in_rows(jnp.broadcast_to(of_samples, spec.strided), spec)

    def summed(gradient: Any, parameter: Any) -> Any:
        if parameter is None:
            return None
        by_inner = strided(gradient, spec).sum(axis=1)
        return by_inner.reshape(spec.groups, -1, inner).sum(axis=1).reshape(parameter.shape)

    def forward(x: Any, scale: Any, bias: Any) -> Any:
        y, stats = contract.call(xla, rows, in_rows(x, spec), wide(scale), wide(bias))
        return strided(y, spec), stats

    def backward(saved: Any, stats: Any, scale: Any, bias: Any, *cotangents: Any) -> Any:
        given = [in_rows(a, spec) for a in (saved, *cotangents)]
        parameters = wide(scale), wide(bias)
        dx, *gradients = contract.call(xla, rows, given[0], stats, *parameters, *given[1:])
        return strided(dx, spec), *map(summed, gradients, (scale, bias))

    return forward if spec.direction == "fwd" else backward


def check(spec: Spec, params: Any = None, *, adds_dh: bool = False) -> None:
    """Assert that the results of both passes are those of XLA's code, up to rounding errors."""
    arrays = norms.make_operands(spec)
    # The kernel replaces scales of 0 by a floor, from which it can recover x. Next to a bias, it
    # could not, so these elements have a bias of 0.
    for name in ("scale", "bias"):
        if arrays[name] is not None:
            arrays[name] = arrays[name].at[..., ::7].set(0)
    operands = [arrays[name] for name in norms.names_of(spec)]
    results = cases.run(spec, *operands, params=params)
    assert_computes(results, of_xla(spec), *operands, like=of_xla(spec))
    y, stats = jax.jit(of_xla(spec))(*operands)
    backward = changed(spec, direction="bwd", want_stats=False, adds_dh=adds_dh)
    arrays |= {"saved": arrays["x"] if spec.norm.saved == "input" else y, "stats": stats}
    operands = [arrays[name] for name in norms.names_of(backward)]
    results = cases.run(backward, *operands, params=params)
    assert_computes(results, of_xla(backward), *operands, like=of_xla(backward))


#: A strip is the part of the array that one block processes: all columns, and a range of inner
#: elements. A group is a range of neighbouring inner elements that are normalised together. The
#: cases cover these properties:
#: - Strips overlap in inner elements, or the parts of a strip overlap in columns.
#: - A block processes its columns in a loop, or several warpgroups divide them.
#: - A thread loads a vector of inner elements. A group is smaller than this vector, or equal to it,
#:   or it spans the vectors of several threads.
STRIPS = {
    "a_vector": StripSchedule(1, 37, 32, 4, 8, group=4),
    "part_of_a_vector": StripSchedule(1, 72, 32, 8, 4, warpgroups=2, group=2),
    "several_threads": StripSchedule(2, 16, 48, 4, 8, group=16),
    "no_group": StripSchedule(3, 21, 40, 4, 8),
    "columns_overlap": StripSchedule(1, 37, 32, 4, 8),
    "inner_overlaps": StripSchedule(1, 16, 40, 4, 8),
    "loop": StripSchedule(1, 16 * 9 + 3, 32, 4, 8),
    "two_warpgroups": StripSchedule(1, 72, 32, 4, 8, warpgroups=2),
    "wide": StripSchedule(1, 9, 64, 4, 16),
    "narrow": StripSchedule(1, 64, 16, 4, 4),
    # For the race detector, strips do not overlap. Overlapping strips store equal values twice,
    # which the detector would report.
    "no_overlap": StripSchedule(3, 64, 32, 4, 8, warpgroups=2),
    # Groups whose size is not a power of 2. A strip has 32 inner elements. The next strip begins
    # only 20, 24 or 30 elements later, because this distance must be a multiple of the group size
    # and of a thread's vector. So neighbouring strips overlap.
    "ten": StripSchedule(2, 37, 80, 2, 16, group=10),
    "six": StripSchedule(1, 72, 48, 8, 4, warpgroups=2, group=6),
    "twenty": StripSchedule(3, 21, 40, 4, 8, group=20),
    "three": StripSchedule(1, 72, 72, 8, 4, group=3),
}
NO_PARAMETERS = {"scale_dtype": None, "bias_dtype": None, "inner_params": False}
SILU, GELU = ({"saved": "input", "activation": name} for name in ("silu", "gelu"))


@pytest.fixture
def strips(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StripSchedule:
    chosen = STRIPS[request.param]
    monkeypatch.setattr(strip_schedule, "strips_of", lambda spec: chosen)
    return chosen


def spec_of(strips: StripSchedule, dtype: Any, **changes: Any) -> Spec:
    shape = (strips.outer, strips.cols, strips.inner)
    return make_spec("fwd", shape, strips.group, dtype, **changes)


@pytest.mark.parametrize(
    ("strips", "dtype", "changes"),
    [
        ("a_vector", F32, {}),
        ("a_vector", F32, SILU),
        ("part_of_a_vector", BF16, {"saved": "input"}),
        ("part_of_a_vector", BF16, GELU),
        (
            "several_threads",
            F32,
            {"scale_groups": 2, "bias_groups": 2, "subtract_mean": False},
        ),
        ("several_threads", F32, {**NO_PARAMETERS, **SILU, "adds_dh": True}),
        ("ten", F32, {}),
        ("ten", BF16, {**SILU, "scale_groups": 2, "bias_groups": 2}),
        ("six", BF16, {"subtract_mean": False}),
        ("twenty", F32, {**NO_PARAMETERS, "adds_dh": True}),
        ("three", BF16, {"bias_dtype": None, "scale_offset": 1.0}),
        ("no_group", F32, {"scale_dtype": None}),
        ("no_group", F32, {"bias_dtype": None, "scale_offset": 1.0, **GELU}),
        ("columns_overlap", F32, {"saved": "input"}),
        ("columns_overlap", F32, {**NO_PARAMETERS, "saved": "input", "adds_dh": True}),
        ("inner_overlaps", F32, {"subtract_mean": False, "saved": "input"}),
        ("loop", F32, {}),
        ("loop", F32, {**NO_PARAMETERS, "saved": "input", "subtract_mean": False}),
        ("two_warpgroups", F32, {"y_dtype": F16, "saved": "input"}),
        ("wide", F32, {"bias_dtype": None, "subtract_mean": False}),
        ("narrow", F32, {"saved": "input", "adds_dh": True}),
    ],
    indirect=["strips"],
)
def test_values(strips: StripSchedule, dtype: Any, changes: dict[str, Any]) -> None:
    given = {name: value for name, value in changes.items() if name != "adds_dh"}
    check(spec_of(strips, dtype, **given), adds_dh="adds_dh" in changes)


@pytest.mark.parametrize("strips", ["no_overlap"], indirect=True)
def test_no_races(strips: StripSchedule) -> None:
    check(spec_of(strips, F32), plgpu.InterpretGPUParams(detect_races=True))
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("saved", ["output", "input"])
def test_with_64_bit_types(saved: str) -> None:
    """Kernels use 32-bit integers, even if 64-bit types are enabled."""
    with jax.enable_x64(True):
        check(make_spec("fwd", (1, 37, 40), 1, F32, saved=saved))


# --------------------------------------------------------------------------------------- lowering

#: Each entry: the numbers of samples, positions, channels and groups of channels.
SIZES = [(32, 4096, 256, 32), (8, 16384, 128, 32), (16, 1024, 512, 32), (64, 64, 256, 128)]
#: Entries whose groups have a number of channels that is not a power of 2. The last has groups of 6
#: channels, and the others are from Stable Diffusion's U-Nets.
UNEVEN = [(8, 1024, 320, 32), (8, 1024, 640, 32), (8, 256, 1920, 32), (8, 64, 1280, 32)]
UNEVEN += [(8, 4096, 192, 32)]
#: Shapes (outer, cols, inner), with one channel per group. There is one shape for each rule of the
#: schedule table. In the remaining shapes, `inner` is not a multiple of the strip's width, or
#: `cols` is not a multiple of the number of warps.
SHAPES = [(64, 8, 4096), (16, 32, 256), (16, 64, 3136), (32, 256, 4096), (8, 1000, 784)]
SHAPES += [(8, 4096, 4096), (4, 3001, 144), (2, 12000, 64), (8, 333, 32), (8, 100, 16)]
#: Shapes, each with the number of inner elements that are normalised together.
ALL = [(shape, 1) for shape in SHAPES]
ALL += [((outer, cols, inner), inner // groups) for outer, cols, inner, groups in SIZES + UNEVEN]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("shape", "group"), ALL, ids=str)
def test_lowering(shape: tuple[int, int, int], group: int, dtype: Any, direction: str) -> None:
    cases.assert_lowers(make_spec(direction, shape, group, dtype))


def gradients(x: jax.Array, scale: jax.Array, bias: jax.Array, d: jax.Array, **given: Any) -> Any:
    norm = functools.partial(jaxnorm.layer_norm, axis=(1, 3), **given)
    y, pullback = jax.vjp(norm, x, scale, bias)
    return y, *pullback(d)


@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[2], UNEVEN[0]], ids=str)
def test_programs_hold_no_transpose(sizes: tuple[int, ...]) -> None:
    outer, cols, inner, groups = sizes
    x = jax.ShapeDtypeStruct((outer, cols, groups, inner // groups), BF16)
    param = jax.ShapeDtypeStruct((groups, 1, inner // groups), BF16)
    run = functools.partial(gradients, implementation="mosaic")
    text = text_for_cuda(run, x, param, param, x)
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "stablehlo.transpose" not in text


# --------------------------------------------------------------------------- reshapes and refusals


@pytest.mark.parametrize(
    ("shape", "axes", "strided", "scale", "groups"),
    [
        ((2, 6, 4, 8), (1, 3), (2, 6, 32, 8), (4, 1, 8), 1),
        ((2, 6, 4, 8), (1, 3), (2, 6, 32, 8), (2, 4, 1, 8), 2),
        ((2, 6, 4, 8), (1, 3), (2, 6, 32, 8), (1, 1, 8), None),
        ((2, 6, 4, 8), (1, 3), (2, 6, 32, 8), (6, 8), None),
        ((2, 3, 2, 4, 1, 8), (1, 2, 5), (2, 6, 32, 8), (4, 1, 1, 1, 8), 1),
        ((6, 4, 8), (0, 2), (1, 6, 32, 8), (4, 1, 8), 1),
        ((2, 3, 2, 32), (1, 2), (2, 6, 32, 1), (32, 1, 1), 1),
        ((2, 3, 6, 32), (2,), (6, 6, 32, 1), (2, 1, 32, 1), 2),
        ((8, 16, 32), (0,), (1, 8, 512, 1), (8, 1, 1), None),
        ((2, 3, 1, 5), (0, 1), (1, 6, 5, 1), (2, 3, 1, 1), None),
        ((2, 1, 4, 5), (0, 2), (1, 8, 5, 1), (2, 4, 1), None),
        ((2, 3, 4, 5, 6), (0, 2, 4), None, (3, 5, 1, 1, 1), None),
    ],
    ids=str,
)
def test_views(
    shape: tuple[int, ...], axes: tuple[int, ...], strided: Any, scale: Any, groups: int | None
) -> None:
    """A view has the rows of an x whose normalised axes are moved to the end."""
    view = RowView(shape, axes, scale=scale)
    assert view.strided == strided
    assert view.inner_groups("scale") == groups
    if strided is not None:
        outer, cols, inner, inner_cols = strided
        x = jnp.arange(math.prod(shape)).reshape(shape)
        there = view.to_rows("array", x, strided=True)
        rows = jnp.moveaxis(there.reshape(outer, cols, inner // inner_cols, inner_cols), 2, 1)
        np.testing.assert_array_equal(rows.reshape(view.rows, view.cols), view.to_rows("array", x))
        np.testing.assert_array_equal(view.from_rows("array", there, strided=True), x)
    if groups is not None:
        param = np.random.default_rng(0).normal(size=scale)
        there = view.to_rows("scale", param, strided=True)
        assert there.shape == ((view.inner,) if groups == 1 else (groups, view.inner))
        np.testing.assert_array_equal(view.from_rows("scale", there, strided=True), param)


def test_scales_that_vary_along_normalised_axes_are_refused() -> None:
    x = jnp.ones((8, 1024, 32, 8))
    with pytest.raises(ValueError, match="broadcast along normalised axes"):
        jaxnorm.layer_norm(x, jnp.ones((1, 8)), axis=(1, 3), implementation="mosaic")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"inner": 63, "rows": 63}, "16 bytes, or a multiple"),
        ({"cols": 4}, "too large or too small"),
        ({"cols": 2**20}, "too large or too small"),
        ({"op": "add_norm", "residual_dtype": F32}, "without a residual"),
        ({"inner_params": False}, "parameters that vary along"),
        ({"x_dtype": np.dtype(np.float64)}, "float64"),
    ],
    ids=str,
)
def test_what_needs_a_transpose(change: dict[str, Any], part: str) -> None:
    spec = make_spec("fwd", (2, 64, 64), 1, F32)
    assert mosaic.takes_inner(spec)
    refused = changed(spec, **change)
    assert not mosaic.takes_inner(refused)
    assert part in str(mosaic.why_unsupported(refused))


@pytest.mark.parametrize(
    ("function", "shape", "axis", "params"),
    [("softmax", (8, 1024, 512), -2, 0), ("layer_norm", (32, 256, 64, 64), 1, 2)],
)
def test_calls_left_to_xla(function: str, shape: Any, axis: int, params: int) -> None:
    """XLA's code runs for calls in which a kernel would need transposes before and after it."""
    call = getattr(jaxnorm, function)
    arrays = [jax.ShapeDtypeStruct(s, BF16) for s in (shape, *[(shape[axis],)] * params)]

    def total(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(call(*arrays, axis=axis).astype(jnp.float32))

    assert "mosaic_gpu" not in text_for_cuda(jax.grad(total), *arrays)


# ------------------------------------------------------------------------------------- on a GPU


#: Entries like those of `SIZES`, with one channel per group. A strip is a range of neighbouring
#: channels. In some entries, one block processes a strip. In others, all blocks of a cluster
#: process a strip together. The last strip may overlap the strip before it.
SINGLE = [(64, 96, 3136, 3136), (8, 3001, 784, 784), (256, 32, 1024, 1024), (4, 12000, 512, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    "sizes", [*SIZES, *UNEVEN, *SINGLE, (4, 1000, 96, 24), (3, 333, 64, 64)], ids=str
)
def test_large_arrays(sizes: tuple[int, ...], dtype: Any, save: str) -> None:
    """Results and gradients agree with XLA's up to rounding.

    The kernel and XLA's code each round a result once, and they add sums in different orders.
    """
    outer, cols, inner, groups = sizes
    keys = jax.random.split(jax.random.key(0), 4)
    shape, param = (outer, cols, groups, inner // groups), (groups, 1, inner // groups)
    x, d = (jax.random.normal(key, shape, dtype) for key in keys[:2])
    scale, bias = (jax.random.uniform(key, param, F32, 0.5, 1.5) for key in keys[2:])

    def compiled(implementation: str) -> Any:
        run = jax.jit(functools.partial(gradients, save=save, implementation=implementation))
        return run.lower(x, scale, bias, d).compile()

    expected, call = compiled("xla")(x, scale, bias, d), compiled("mosaic")
    bound = 2**-7 if dtype == BF16 else 8 * math.sqrt(outer * cols + cols * inner) * 2**-24
    for _ in range(3):
        for ours, theirs in zip(call(x, scale, bias, d), expected, strict=True):
            ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
            assert jnp.max(jnp.abs(ours - theirs)) <= bound * jnp.max(jnp.abs(theirs))
