"""Kernels over an axis that is not the last: values, layouts, registers, refusals, and on a GPU.

The references are those of rows, transposed. Pallas' interpreter knows neither layouts nor
clusters: calls whose strips are shared by clusters are lowered, compiled, and run on a GPU.
"""

import math
from typing import Any

import backward_cases
import forward_cases
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forward_cases import BF16, F16, F32
from h100 import Compiler
from reference import SAFETY, assert_within, rounding
from specs import changed

import jaxnorm
from jaxnorm.calls.rows import RowView
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.device.gpu import (
    MOST_SHARED_BYTES,
    REGISTERS,
    RESERVED_BYTES,
    SHARED_BYTES,
    local_gpu,
)
from jaxnorm_kernels.mosaic.rows.strip_exchange import StripExchange
from jaxnorm_kernels.mosaic.rows.strips import Strips
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.usefixtures("quick_to_compile")

OPS = ("softmax", "log_softmax", "layer_norm", "rms_norm")
#: Of each direction, what makes specs, operands and references of rows.
CASES = {"fwd": forward_cases, "bwd": backward_cases}


def make_spec(
    direction: str, op: str, shape: tuple[int, int, int], x: Any, y: Any, **kwargs: Any
) -> Spec:
    """Of ``(outer, cols, inner)``."""
    outer, cols, inner = shape
    spec = CASES[direction].make_spec(op, outer * inner, cols, x, y, **kwargs)
    return changed(spec, inner=inner)


def strided(rows: Any, spec: Spec) -> Any:
    """``(outer, cols, inner)`` of ``(rows, cols)``; other arrays as they are."""
    if getattr(rows, "shape", None) != (spec.rows, spec.cols):
        return rows
    array = rows.reshape(-1, spec.inner, spec.cols)
    return np.ascontiguousarray(np.swapaxes(array, 1, 2))


def in_rows(array: Any, spec: Spec) -> Any:
    """The inverse of `strided`."""
    if array is None or array.ndim < 3:
        return array
    return np.swapaxes(array, 1, 2).reshape(spec.rows, spec.cols)


def check(spec: Spec, params: Any = None) -> None:
    """Every output against the reference in float64, within its error bound."""
    cases = CASES[spec.direction]
    operands = cases.make_operands(spec)
    given = jax.tree.map(lambda a: strided(a, spec), operands)
    outputs = [in_rows(out, spec) for out in cases.interpret(spec, *given, params=params)]
    for output, value, error in zip(outputs, *cases.reference(spec, *operands), strict=True):
        assert (output is None) == (value is None)
        if value is not None:
            excess = np.abs(output.astype(np.float64) - value) - error
            assert np.max(excess) <= 0, np.max(excess / error)


def whole(shape: tuple[int, int, int], vector: int, threads: int, **kwargs: Any) -> Strips:
    """A block for each strip."""
    count = shape[0] * -(-shape[2] // (vector * threads))
    return Strips(*shape, vector, threads, **({"blocks": count} | kwargs))


#: Shapes of which strips make something special, with those strips for a vector of 4.
STRIPS = {
    "one": whole((2, 16, 32), 4, 8),
    "columns_overlap": whole((1, 37, 32), 4, 8),
    "inner_overlaps": whole((1, 16, 40), 4, 8),
    "loop": whole((1, 16 * 9 + 3, 32), 4, 8),
    "two_warpgroups": whole((1, 72, 32), 4, 8, warpgroups=2),
    "wide": whole((1, 9, 64), 4, 16),
    "narrow": whole((1, 64, 16), 4, 4),
    "several_of_a_block": whole((3, 21, 40), 4, 8, blocks=4),
    "several_in_two_warpgroups": whole((3, 37, 32), 4, 8, warpgroups=2, blocks=2),
    # Overlaps would be races, of stores of the same values.
    "no_overlap": whole((3, 64, 32), 4, 8, warpgroups=2, blocks=2),
}


@pytest.fixture
def strips(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Strips:
    chosen = STRIPS[request.param]
    monkeypatch.setattr(strip_schedule, "strips_of", lambda spec: chosen)
    return chosen


# Of strips, each kind with one operation in each direction.
@pytest.mark.parametrize(
    ("op", "direction", "saved", "strips"),
    [
        (op, direction, saved, strips)
        for turn, strips in enumerate(STRIPS)
        for op, direction, saved in (
            [("softmax", "fwd", "output"), ("layer_norm", "bwd", "output")],
            [("layer_norm", "fwd", "input"), ("softmax", "bwd", "output")],
        )[turn % 2]
    ],
    indirect=["strips"],
)
def test_values(op: str, direction: str, saved: str, strips: Strips) -> None:
    kwargs = {"saved": saved} if op == "layer_norm" else {}
    shape = strips.outer, strips.cols, strips.inner
    check(make_spec(direction, op, shape, F32, F32, **kwargs))


@pytest.mark.parametrize("strips", ["two_warpgroups"], indirect=True)
@pytest.mark.parametrize(
    ("op", "direction", "x", "y", "kwargs"),
    [
        ("log_softmax", "fwd", F32, BF16, {}),
        ("log_softmax", "bwd", BF16, F32, {}),
        ("rms_norm", "fwd", BF16, F32, {"saved": "output", "scale_offset": 1.0}),
        ("rms_norm", "fwd", F32, F32, {"scale_dtype": None, "want_stats": False}),
        ("layer_norm", "fwd", F32, F16, {"scale_dtype": BF16, "bias_dtype": None}),
        ("rms_norm", "bwd", F32, F16, {}),
        ("rms_norm", "bwd", F32, F32, {"adds_dh": True, "saved": "input"}),
        ("layer_norm", "bwd", F32, BF16, {"saved": "input", "scale_dtype": BF16}),
        ("layer_norm", "bwd", F32, F32, {"scale_dtype": None, "bias_dtype": None}),
    ],
)
def test_mixes(
    op: str, direction: str, x: Any, y: Any, kwargs: dict[str, Any], strips: Strips
) -> None:
    check(make_spec(direction, op, (1, strips.cols, strips.inner), x, y, **kwargs))


@pytest.mark.parametrize("direction", CASES)
@pytest.mark.parametrize("op", OPS)
def test_values_by_default(op: str, direction: str) -> None:
    check(make_spec(direction, op, (2, 24, 64), BF16, BF16))


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_scale(op: str) -> None:
    """A power of two, so that nothing is rounded: that of x, and of its gradient."""
    spec = make_spec("fwd", op, (1, 37, 32), F32, F32)
    scaled = changed(spec, logits_scale=0.25)
    (x,) = (strided(a, spec) for a in forward_cases.make_operands(spec))
    (y,), (expected,) = forward_cases.interpret(scaled, x), forward_cases.interpret(spec, x / 4)
    np.testing.assert_array_equal(y, expected)
    spec = make_spec("bwd", op, (1, 37, 32), F32, F32)
    scaled = changed(spec, logits_scale=0.25)
    operands = [strided(a, spec) for a in backward_cases.make_operands(spec)]
    dx, expected = (backward_cases.interpret(s, *operands)[0] for s in (scaled, spec))
    np.testing.assert_array_equal(dx, expected / 4)


@pytest.mark.parametrize("strips", ["no_overlap"], indirect=True)
@pytest.mark.parametrize("direction", CASES)
def test_no_races(direction: str, strips: Strips) -> None:
    spec = make_spec(direction, "layer_norm", (3, 64, 32), F32, F32)
    check(spec, plgpu.InterpretGPUParams(detect_races=True))


@pytest.mark.parametrize("direction", CASES)
def test_with_64_bit_types(direction: str) -> None:
    """Kernels count in 32 bits, whatever a Python integer is traced as."""
    with jax.enable_x64(True):
        check(make_spec(direction, "layer_norm", (1, 37, 40), F32, F32))


def test_columns_of_infinities() -> None:
    """A part of the columns may hold nothing but -inf; where all do, the result is NaN."""
    spec = make_spec("fwd", "softmax", (1, 72, 32), F32, F32)
    x = np.zeros((1, 72, 32), F32)
    x[:, :40] = -np.inf
    x[..., 3] = -np.inf
    (y,) = forward_cases.interpret(spec, x)
    assert np.isnan(y[..., 3]).all()
    expected = np.where(np.isinf(x), 0, 1 / 32)
    y, expected = (np.delete(a, 3, -1) for a in (y, expected))
    # Exponentials of 0 and their sum are exact.
    assert_within(y, expected, SAFETY * rounding(expected, "float32"))


# ------------------------------------------------------------------------- layouts and registers

#: Each line of the table, and sizes that no width and no number of warps divides.
SHAPES = [
    *[(64, 8, 4096), (16, 32, 256), (16, 64, 3136), (32, 256, 4096), (8, 768, 1024)],
    *[(8, 1000, 784), (8, 4096, 4096), (4, 3001, 144), (2, 12000, 64), (8, 333, 32)],
    *[(8, 100, 16), (4, 20000, 16)],
]


def lowered(spec: Spec) -> str:
    return str(
        jax.jit(call_of(spec)).trace(*types(spec)).lower(lowering_platforms=("cuda",)).as_text()
    )


def types(spec: Spec) -> Any:
    """Shapes and dtypes of the operands."""
    if spec.direction == "fwd":
        operands: Any = tuple(forward_cases.operand_types(spec).values())
    else:
        operands = backward_cases.abstract_operands(spec)
    array = (spec.rows // spec.inner, spec.cols, spec.inner)
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(array, a.dtype) if len(a.shape) == 2 else a, operands
    )


def call_of(spec: Spec) -> Any:
    return lambda *operands: CASES[spec.direction].call(spec, *operands)


@pytest.mark.parametrize("direction", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lowering(shape: tuple[int, int, int], direction: str) -> None:
    turn = SHAPES.index(shape)
    x, y = [(BF16, BF16), (F32, F32), (F32, BF16)][turn % 3]
    spec = make_spec(direction, OPS[(turn + (direction == "bwd")) % 4], shape, x, y)
    assert mosaic.why_unsupported(spec) is None
    assert "mosaic_gpu" in lowered(spec)


@pytest.mark.parametrize("direction", CASES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        *[(op, (8, 4096, 4096)) for op in ("softmax", "log_softmax")],
        *[(op, (32, 256, 4096)) for op in ("layer_norm", "rms_norm")],
        *[("layer_norm", shape) for shape in ((8, 768, 1024), (8, 1000, 784), (8, 4096, 4096))],
    ],
    ids=str,
)
def test_registers(
    op: str, shape: tuple[int, int, int], dtype: Any, direction: str, compiler: Compiler
) -> None:
    spec = make_spec(direction, op, shape, dtype, dtype)
    (kernel,) = compiler.compile(call_of(spec), types(spec))
    assert kernel.spilled == 0
    strips = strip_schedule.strips_of(spec)
    if strips.blocks < strips.count:
        assert kernel.registers <= strip_schedule.MOST_REGISTERS
    elif strips.warpgroups == 1:  # three blocks at a time
        assert kernel.registers <= REGISTERS // (3 * 128)


@pytest.mark.parametrize("direction", CASES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_shared_memory(dtype: Any, direction: str) -> None:
    """Blocks fit a multiprocessor: as many as a grid takes for granted, and one in any case."""
    for cols in range(8, 24000, 179):
        for inner in (16, 64, 784, 4096):
            spec = make_spec(direction, "layer_norm", (64, cols, inner), dtype, dtype)
            strips = strip_schedule.strips_of(spec)
            if strips is None:
                continue
            held = strips.scratch([dtype] * (1 if direction == "fwd" else 2))
            scratch = [
                *held,
                *StripExchange(strips, stats=3 if direction == "fwd" else 2).scratch(),
            ]
            used = sum(
                math.prod(s.shape) * s.dtype.itemsize
                for s in scratch
                if hasattr(s, "shape") and s.dtype != np.uint32  # a cluster's barriers: below
            )
            if direction == "bwd":
                used += 2 * 4 * strips.warpgroups * strips.slice().width
            used += 1024  # barriers, and Mosaic's own
            assert used <= MOST_SHARED_BYTES
            at_a_time = local_gpu().at_a_time(strips.cluster)
            blocks = -(-strips.blocks // at_a_time) if strips.blocks < strips.count else 1
            assert blocks * (used + RESERVED_BYTES) <= SHARED_BYTES


# ----------------------------------------------------------------------- refusals, and the choice


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"inner": 63, "rows": 63}, "16 bytes, or a multiple"),
        ({"cols": 4}, "as many, or as few"),
        ({"cols": 2**20}, "as many, or as few"),
        ({"op": "add_norm", "residual_dtype": F32}, "no residual"),
        ({"scale_groups": 2}, "groups of rows"),
        ({"op": "softmax", "has_mask": True}, "mask"),
        ({"x_dtype": np.dtype(np.float64)}, "float64"),
    ],
)
def test_refusals(change: dict[str, Any], part: str) -> None:
    op = "softmax" if change.get("op") == "softmax" else "rms_norm"
    spec = make_spec("fwd", op, (2, 64, 64), F32, F32)
    assert mosaic.takes_inner(spec)
    refused = changed(spec, **change)
    assert not mosaic.takes_inner(refused)
    assert part in str(mosaic.why_unsupported(refused))


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
def test_views(shape: tuple[int, ...], axes: tuple[int, ...], inner: int) -> None:
    view = RowView(shape, axes)
    assert view.inner == inner
    if inner == 1:
        return
    x = np.arange(math.prod(shape)).reshape(shape)
    there = view.to_rows("array", jnp.asarray(x), strided=True)
    rows = view.to_rows("array", jnp.asarray(x))
    np.testing.assert_array_equal(jnp.swapaxes(there, 1, 2).reshape(rows.shape), rows)
    np.testing.assert_array_equal(view.from_rows("array", there, strided=True), x)


def program(function: Any, *shapes: tuple[int, ...], dtype: Any = BF16) -> str:
    """A gradient, lowered for an NVIDIA GPU."""

    def total(*args: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(function(*args).astype(jnp.float32)))

    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    traced = jax.jit(jax.grad(total, tuple(range(len(args))))).trace(*args)
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def test_programs_hold_no_transpose() -> None:
    by_name: Any = {"implementation": "mosaic"}
    softmax = program(lambda x: jaxnorm.softmax(x, axis=-2, **by_name), (8, 1024, 512))
    norm = program(
        lambda x, s, b: jaxnorm.layer_norm(x, s, b, axis=1, **by_name),
        *((8, 256, 32, 64), (256,), (256,)),
    )
    batched = program(
        jax.vmap(lambda x, s: jaxnorm.rms_norm(x, s, axis=0, **by_name), (1, None)),
        *((256, 8, 2048), (256,)),
    )
    for text, transposes in ((softmax, 0), (norm, 0), (batched, 2)):
        assert text.count("custom_call @mosaic_gpu") == 2
        # Of vmap's own axis: it is moved to the front, and the gradient's back.
        assert text.count("stablehlo.transpose") <= transposes


@pytest.mark.parametrize(("shape", "axis"), [((64, 256, 7, 7), 1), ((64, 16, 64, 64), (0, 2))])
def test_calls_left_to_xla(shape: tuple[int, ...], axis: Any) -> None:
    """An inner axis of 98 bytes, and axes that are not adjacent."""
    for direction in ("forward", "backward"):
        plan = jaxnorm.implementation_for("softmax", shape, BF16, axis=axis, platform="cuda")
        assert getattr(plan, direction).name == "xla"


# ------------------------------------------------------------------------------------- on a GPU

LARGE = [(8, 4096, 4096), (32, 256, 4096), (16, 768, 1024), (64, 96, 3136), (8, 3001, 784)]
LARGE += [(256, 32, 1024), (4, 12000, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_large_arrays(op: str, shape: tuple[int, int, int], dtype: Any) -> None:
    """Forward and gradients beside XLA's: two roundings of each, and the order of sums, apart."""
    outer, cols, inner = shape
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], shape, dtype)
    d = jax.random.normal(keys[1], shape, dtype)
    params = [jax.random.uniform(key, (cols,), F32, 0.5, 1.5) for key in keys[2:]]
    params = params[: {"layer_norm": 2, "rms_norm": 1}.get(op, 0)]

    def both(implementation: str) -> Any:
        def function(x: jax.Array, *params: jax.Array) -> jax.Array:
            return getattr(jaxnorm, op)(x, *params, axis=1, implementation=implementation)

        def run(d: jax.Array, *operands: jax.Array) -> Any:
            y, pullback = jax.vjp(function, *operands)
            return y, *pullback(d)

        return jax.jit(run).lower(d, x, *params)

    expected = both("xla").compile()(d, x, *params)
    lowered = both("mosaic")
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2
    assert "stablehlo.transpose" not in lowered.as_text()
    call = lowered.compile()
    bound = 2**-7 if dtype == BF16 else 8 * math.sqrt(outer * inner + cols) * 2**-24
    for _ in range(3):
        for ours, theirs in zip(call(d, x, *params), expected, strict=True):
            ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
            assert jnp.max(jnp.abs(ours - theirs)) <= bound * jnp.max(jnp.abs(theirs))
