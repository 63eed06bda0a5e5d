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

import backward_cases
import contract
import forward_cases
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import Compiler
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from programs import kernels_in, text_for_cuda
from specs import BF16, F16, F32, build_spec, changed

import jaxnorm
from jaxnorm.calls.rows import RowView
from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.mosaic.device.gpu import MOST_SHARED_BYTES, REGISTERS
from jaxnorm_kernels.mosaic.rows.strip_exchange import StripExchange
from jaxnorm_kernels.mosaic.rows.strips import StripSchedule
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")

BOTH = ("scale", "bias")


def make_spec(
    direction: str,
    shape: tuple[int, int, int],
    group: int,
    dtype: Any,
    *,
    params: tuple[str, ...] = BOTH,
    param_groups: int = 1,
    **changes: Any,
) -> Spec:
    """Return the spec of a call on an array of shape ``(outer, cols, inner)``."""
    outer, cols, inner = shape
    spec = build_spec(
        "norm",
        direction,  # type: ignore[arg-type]
        outer * inner // group,
        cols * group,
        dtype,
        dtype,
        epsilon=1e-6,
        subtract_mean=True,
        want_stats=True,
        scale_dtype=F32 if "scale" in params else None,
        bias_dtype=F32 if "bias" in params else None,
        scale_groups=param_groups,
        bias_groups=param_groups,
        inner=inner,
        inner_cols=group,
        inner_params=bool(params),
    )
    return changed(spec, **changes)


def strided(array: Any, spec: Spec) -> Any:
    """Rearrange an array ``(rows, cols)`` to the shape ``(outer, cols, inner)`` of `spec`."""
    outer, cols, inner = spec.strided
    parts = array.reshape(outer, inner // spec.inner_cols, cols, spec.inner_cols)
    return np.ascontiguousarray(np.moveaxis(parts, 2, 1).reshape(outer, cols, inner))


def in_rows(array: Any, spec: Spec) -> Any:
    """Rearrange an array ``(outer, cols, inner)`` to ``(rows, cols)``: the inverse of `strided`."""
    outer, cols, inner = spec.strided
    parts = array.reshape(outer, cols, inner // spec.inner_cols, spec.inner_cols)
    return np.ascontiguousarray(np.moveaxis(parts, 1, 2).reshape(spec.rows, spec.cols))


def of_rows(spec: Spec) -> Spec:
    """Return the spec of the same norm for an array in which each normalised row is contiguous.

    `in_rows` reshapes arrays to this form. Each row has its own row of parameters.
    """
    plain = changed(spec, inner=1, inner_cols=1, inner_params=False)
    return changed(plain, scale_groups=spec.rows, bias_groups=spec.rows)


def make_params(spec: Spec) -> list[np.ndarray | None]:
    rng = np.random.default_rng(1)
    shape = (spec.inner,) if spec.groups == 1 else (spec.groups, spec.inner)
    scale, bias = rng.normal(1, 0.5, shape).astype(F32), rng.normal(0, 1, shape).astype(F32)
    scale[..., ::7] = 0  # The kernel replaces 0 by a floor.
    bias[..., ::7] *= spec.norm.scale_dtype is None
    dtypes = (spec.norm.scale_dtype, spec.norm.bias_dtype)
    return [None if dtype is None else a for a, dtype in zip((scale, bias), dtypes)]


def summed_like(param: np.ndarray, values: Any, spec: Spec) -> Any:
    """Sum values over all elements of x that use the same element of the parameter."""
    by_inner = strided(values, spec).sum(axis=1)
    return by_inner.reshape(spec.groups, -1, spec.inner).sum(axis=1).reshape(param.shape)


def within(output: Any, value: Any, error: Any) -> None:
    excess = np.abs(np.asarray(output).astype(np.float64) - value) - error
    assert np.max(excess) <= 0, np.max(excess)


def check(spec: Spec, interpreter: Any = None, *, adds_dh: bool = False) -> None:
    """Assert that all outputs of both passes are within their bounds of the float64 reference."""
    rng, params, rows = np.random.default_rng(0), make_params(spec), of_rows(spec)
    outer, _, inner = spec.strided
    wide = [
        None
        if p is None
        else in_rows(
            np.broadcast_to(
                np.repeat(p.reshape(-1, inner), outer // spec.groups, axis=0)[:, None], spec.strided
            ),
            spec,
        )
        for p in params
    ]
    dtypes = (spec.x_dtype, spec.y_dtype, spec.x_dtype)
    x, d, dh = (rng.normal(0.5, 3, (spec.rows, spec.cols)).astype(dtype) for dtype in dtypes)
    interpret = functools.partial(forward_cases.interpret, params=interpreter)
    y, *stats = interpret(spec, strided(x, spec), *params)
    values, errors = forward_cases.norm_reference(rows, x, *wide)
    for output, value, error in zip((in_rows(y, spec), *stats), values, errors, strict=True):
        within(output, value, error)

    # The tested backward takes the arrays that the forward of XLA's code saves.
    y, kept = jax.jit(functools.partial(contract.call, xla, rows))(x, *wide)
    saved, kept = np.asarray(y) if spec.norm.saved == "output" else x, [np.asarray(s) for s in kept]
    backward, rows = (changed(s, direction="bwd", adds_dh=adds_dh) for s in (spec, rows))
    given = (d, dh) if adds_dh else (d,)
    interpret = functools.partial(backward_cases.interpret, params=interpreter)
    dx, *gradients = interpret(
        backward, strided(saved, spec), kept, *params, *(strided(a, spec) for a in given)
    )
    values, errors = backward_cases.norm_reference(rows, saved, kept, *wide, *given)
    within(in_rows(dx, spec), values[0], errors[0])
    for gradient, param, value, error in zip(gradients, params, values[1:], errors[1:]):
        assert (gradient is None) == (param is None)
        if param is not None:
            within(gradient, *(summed_like(param, a, spec) for a in (value, error)))


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
        ("part_of_a_vector", BF16, {"saved": "input"}),
        ("several_threads", F32, {"param_groups": 2, "subtract_mean": False}),
        ("several_threads", F32, {"params": (), "adds_dh": True}),
        ("ten", F32, {}),
        ("ten", BF16, {"saved": "input", "param_groups": 2}),
        ("six", BF16, {"subtract_mean": False}),
        ("twenty", F32, {"params": (), "adds_dh": True}),
        ("three", BF16, {"params": ("scale",), "scale_offset": 1.0}),
        ("no_group", F32, {"params": ("bias",)}),
        ("no_group", F32, {"params": ("scale",), "scale_offset": 1.0}),
        ("columns_overlap", F32, {"saved": "input"}),
        ("columns_overlap", F32, {"params": (), "saved": "input", "adds_dh": True}),
        ("inner_overlaps", F32, {"subtract_mean": False, "saved": "input"}),
        ("loop", F32, {}),
        ("loop", F32, {"params": (), "saved": "input", "subtract_mean": False}),
        ("two_warpgroups", F32, {"param_groups": 1}),
        ("two_warpgroups", F32, {"y_dtype": F16, "saved": "input"}),
        ("wide", F32, {"params": ("scale",), "subtract_mean": False}),
        ("narrow", F32, {"saved": "input", "adds_dh": True}),
    ],
    indirect=["strips"],
)
def test_values(strips: StripSchedule, dtype: Any, changes: dict[str, Any]) -> None:
    check(spec_of(strips, dtype, **changes), adds_dh="adds_dh" in changes)


@pytest.mark.parametrize("strips", ["no_overlap"], indirect=True)
def test_no_races(strips: StripSchedule) -> None:
    check(spec_of(strips, F32), plgpu.InterpretGPUParams(detect_races=True))
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("saved", ["output", "input"])
def test_with_64_bit_types(saved: str) -> None:
    """Kernels use 32-bit integers, even if 64-bit types are enabled.

    If 64-bit types are enabled, JAX traces Python integers as int64 by default.
    """
    with jax.enable_x64(True):
        check(make_spec("fwd", (1, 37, 40), 1, F32, saved=saved))


# ------------------------------------------------------------------------- layouts and registers

#: Each entry: the numbers of samples, positions, channels and groups of channels.
SIZES = [(32, 4096, 256, 32), (8, 16384, 128, 32), (16, 1024, 512, 32), (64, 64, 256, 128)]
#: Entries whose groups have a number of channels that is not a power of 2. The last has groups of 6
#: channels, and the others are from Stable Diffusion's U-Nets.
UNEVEN = [(8, 1024, 320, 32), (8, 1024, 640, 32), (8, 256, 1920, 32), (8, 64, 1280, 32)]
UNEVEN += [(8, 4096, 192, 32)]


def call_of(spec: Spec) -> Any:
    cases = {"fwd": forward_cases, "bwd": backward_cases}[spec.direction]
    return lambda *operands: cases.call(spec, *operands)


def types(spec: Spec) -> list[Any]:
    """Return the shapes and dtypes of the operands."""
    array = jax.ShapeDtypeStruct(spec.strided, spec.x_dtype)
    param = jax.ShapeDtypeStruct((spec.inner,), F32)
    if spec.direction == "fwd":
        return [array, param, param]
    stat = jax.ShapeDtypeStruct((spec.rows,), F32)
    return [array, (stat,) * (1 + spec.returns_mean), param, param, array]


#: Shapes (outer, cols, inner), with one channel per group. There is one shape for each rule of the
#: schedule table. In the remaining shapes, `inner` is not a multiple of the strip's width, or
#: `cols` is not a multiple of the number of warps.
SHAPES = [(64, 8, 4096), (16, 32, 256), (16, 64, 3136), (32, 256, 4096), (8, 1000, 784)]
SHAPES += [(8, 4096, 4096), (4, 3001, 144), (2, 12000, 64), (8, 333, 32), (8, 100, 16)]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lowering(shape: tuple[int, int, int], dtype: Any, direction: str) -> None:
    spec = make_spec(direction, shape, 1, dtype)
    assert mosaic.why_unsupported(spec) is None
    assert kernels_in(call_of(spec), *types(spec))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_shared_memory(dtype: Any, direction: str) -> None:
    """The shared memory that a block uses fits into a multiprocessor."""
    for cols in range(8, 24000, 179):
        for inner in (16, 64, 784, 4096):
            spec = make_spec(direction, (64, cols, inner), 1, dtype)
            if (strips := strip_schedule.strips_of(spec)) is None:
                continue
            scratch = [
                *strips.scratch([dtype] * (1 if direction == "fwd" else 2)),
                *StripExchange(strips, stats=3 if direction == "fwd" else 2).scratch(),
            ]
            used = sum(
                math.prod(s.shape) * s.dtype.itemsize
                for s in scratch
                if hasattr(s, "shape") and s.dtype != np.uint32  # not barriers
            )
            assert used + 1024 <= MOST_SHARED_BYTES  # 1024 bytes for barriers and for Mosaic itself


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("sizes", SIZES + UNEVEN, ids=str)
def test_registers(sizes: tuple[int, ...], dtype: Any, direction: str, compiler: Compiler) -> None:
    outer, cols, inner, groups = sizes
    saved = "input" if groups > 32 else "output"
    spec = make_spec(direction, (outer, cols, inner), inner // groups, dtype, saved=saved)
    (kernel,) = compiler.compile(call_of(spec), types(spec))
    assert kernel.spilled == 0
    # The registers must suffice for two blocks per SM, of up to two warpgroups each.
    assert kernel.registers <= REGISTERS // (4 * 128)


# --------------------------------------------------------------- reshapes, refusals, and programs


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
        ((2, 3, 6, 32), (2,), (6, 6, 32, 1), (3, 32, 1), None),
        ((2, 3, 6, 32), (2,), (6, 6, 32, 1), (2, 1, 32, 1), 2),
        ((2, 3, 4, 5, 6), (0, 2, 4), None, (3, 5, 1, 1, 1), None),
    ],
    ids=str,
)
def test_views(
    shape: tuple[int, ...], axes: tuple[int, ...], strided: Any, scale: Any, groups: int | None
) -> None:
    view = RowView(shape, axes, scale=scale)
    assert view.strided == strided
    assert view.inner_groups("scale") == groups
    if groups is not None:
        param = np.random.default_rng(0).normal(size=scale)
        there = view.to_rows("scale", param, strided=True)
        assert there.shape == ((view.inner,) if groups == 1 else (groups, view.inner))
        np.testing.assert_array_equal(view.from_rows("scale", there, strided=True), param)


@pytest.mark.parametrize(
    ("shape", "axis", "param", "part"),
    [
        ((8, 1024, 4, 256), (1, 3), (4, 1, 256), "too large or too small"),
        ((8, 1024, 32, 21), (1, 3), (32, 1, 21), "too large or too small"),
        ((8, 4, 32, 8), (1, 3), (32, 1, 8), "too large or too small"),
        ((8, 1024, 1, 3), (1,), (3, 1), "16 bytes, or a multiple"),
        ((8, 1024, 32, 8), (1, 3), (8,), "broadcast along normalised axes"),
        ((8, 32, 8, 1024), (2, 3), (32, 8, 1), "broadcast along normalised axes"),
    ],
    ids=str,
)
def test_refusals(shape: Any, axis: Any, param: Any, part: str) -> None:
    scale = jnp.ones((1, *param) if len(param) == 1 else param)
    with pytest.raises(ValueError, match=part):
        jaxnorm.layer_norm(jnp.ones(shape), scale, axis=axis, implementation="mosaic")


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


def test_softmaxes_are_refused() -> None:
    spec = build_spec("softmax", "fwd", 64, 512, F32, F32, inner=32)
    assert "only norms without a residual" in str(mosaic.why_unsupported(spec))


@pytest.mark.parametrize(
    ("function", "shape", "axis", "params"),
    [
        ("softmax", (8, 1024, 512), -2, 0),
        ("softmax", (64, 256, 7, 7), 1, 0),
        ("layer_norm", (32, 256, 64, 64), 1, 2),
    ],
)
def test_calls_left_to_xla(function: str, shape: Any, axis: int, params: int) -> None:
    """XLA's code runs for calls in which a kernel would need transposes before and after it."""
    call = getattr(jaxnorm, function)
    arrays = [jax.ShapeDtypeStruct(s, BF16) for s in (shape, *[(shape[axis],)] * params)]

    def total(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(call(*arrays, axis=axis).astype(jnp.float32))

    assert "mosaic_gpu" not in text_for_cuda(jax.grad(total), *arrays)


@pytest.mark.parametrize(
    ("shape", "axes", "inner"),
    [
        ((8, 16, 32), (1,), 32),
        ((8, 16, 32), (2,), 1),
        ((8, 16, 32), (0,), 512),
        ((2, 3, 4, 5), (1, 2), 5),
        ((2, 3, 4, 5), (0, 2), 1),
        ((2, 3, 1, 5), (0, 1), 5),
        ((2, 3, 4, 1), (2,), 1),
        ((2, 3, 1, 5), (2,), 1),
        ((2, 1, 4, 5), (0, 2), 5),
    ],
)
def test_views_of_x(shape: tuple[int, ...], axes: tuple[int, ...], inner: int) -> None:
    view = RowView(shape, axes)
    assert view.inner == inner
    if inner == 1:
        return
    x = np.arange(math.prod(shape)).reshape(shape)
    there = view.to_rows("array", jnp.asarray(x), strided=True)
    rows = view.to_rows("array", jnp.asarray(x))
    np.testing.assert_array_equal(jnp.swapaxes(there, 1, 2).reshape(rows.shape), rows)
    np.testing.assert_array_equal(view.from_rows("array", there, strided=True), x)


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
