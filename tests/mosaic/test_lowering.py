"""Every schedule of the forward kernels lowers for an NVIDIA GPU, in every dtype.

This runs Mosaic's layout inference and lowers to the vector and LLVM dialects, which detects
layouts that do not fit an operation. No GPU is needed. The later steps (LLVM, ptxas) are not tested
here.
"""

import math
from typing import Any

import forward_cases
import jax
import jax.numpy as jnp
import norms
import numpy as np
import pytest
from forward_cases import CASES, CLUSTERED, OPS, RESIDUAL_OPS, Case, call, lower, make_spec
from pairs import pairwise
from specs import BF16, F16, F32

import jaxnorm
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic.device.gpu import HOPPER, Gpu
from jaxnorm_kernels.mosaic.rows.tiles import RowTile, SplitRow
from jaxnorm_kernels.mosaic.schedules.forward import TABLE, TileSchedule, choose
from jaxnorm_kernels.specs import Spec

pytestmark = pytest.mark.oldest_jax

RESIDUAL_MIXES = [(BF16, BF16, BF16), (BF16, F32, F16), (F32, BF16, F32)]
MIXES = [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F32), (F32, F16)]


# Pairwise testing: there are three parameters (schedule, function and dtypes). For any two of them,
# every pair of their values occurs in some case.
@pytest.mark.parametrize(
    ("op", "case", "x", "y"),
    [
        pytest.param(op, case, x, y, id=f"{op}-{case.name}-{x}-{y}")
        for op, case, (x, y) in pairwise(OPS, [*CASES, *CLUSTERED], MIXES)
    ],
)
def test_schedules_lower(op: str, case: Case, x: np.dtype, y: np.dtype) -> None:
    spec = make_spec(
        op, case.rows, case.cols, x, y, **({"scale_dtype": BF16} if "norm" in op else {})
    )
    schedule = case.schedule_for(x, y, spec.dtype("scale"), spec.dtype("bias"))
    assert "mosaic_gpu" in lower(spec, schedule=schedule)


@pytest.mark.parametrize(
    ("op", "case", "dtypes"),
    [
        pytest.param(op, case, RESIDUAL_MIXES[(i + j) % 3], id=f"{op}-{case.name}")
        for i, op in enumerate(RESIDUAL_OPS)
        for j, case in enumerate([*CASES, *CLUSTERED])
    ],
)
def test_residuals_lower(op: str, case: Case, dtypes: tuple[np.dtype, ...]) -> None:
    x, residual, y = dtypes
    spec = make_spec(op, case.rows, case.cols, x, y, residual_dtype=residual)
    schedule = case.schedule_for(x, residual, y)
    assert "mosaic_gpu" in lower(spec, schedule=schedule)


def test_a_layout_that_does_not_fit_is_found() -> None:
    """Lowering rejects a layout that does not fit an operation.

    So the tests that lower kernels fail if a kernel uses a wrong layout.
    """
    spec = make_spec("softmax", 4, 512, BF16, BF16)
    with pytest.raises(ValueError, match="holds rows of"):
        lower(spec, schedule=TileSchedule("warpgroup_row", 8))
    with pytest.raises(ValueError, match="threads of one warp"):
        lower(spec, schedule=TileSchedule("row_tile", 8, rows=2, threads=128))
    with pytest.raises(ValueError, match="height of 1 or"):
        lower(spec, schedule=TileSchedule("row_tile", 8, rows=6))


#: The shapes of the benchmarks, odd shapes, shapes with few rows, and the shape of an array of more
#: than 2^31 elements.
SHAPES = [
    *forward_cases.SHAPES,
    (128, 8192),
    (1, 65536),
    (512, 2**18),
    (3, 7),
    (100, 8),
    (100, 9),
    (1, 100),
    (2, 300),
    (70000, 65536),
]


#: Shapes of calls with a residual: the shapes in `SHAPES` that such calls support, and five more.
#: Widths in `SHAPES` are limits at which a schedule table changes from one rule to the next. The
#: widths of the five other shapes lie between two limits.
RESIDUAL_SHAPES = [(rows, cols) for rows, cols in SHAPES if 8 <= cols <= 2**17]
RESIDUAL_SHAPES += [(4096, 2048), (8192, 3000), (8192, 5000), (8192, 7168), (1024, 100000)]


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_default_schedules_lower(rows: int, cols: int) -> None:
    for op, dtype in (("softmax", BF16), ("layer_norm", BF16), ("log_softmax", F32)):
        spec = make_spec(op, rows, cols, dtype, dtype)
        assert "mosaic_gpu" in lower(spec)


# Pairwise testing: there are three parameters (shape, function and dtypes). For any two of them,
# every pair of their values occurs in some case.
@pytest.mark.parametrize(
    ("rows", "cols", "op", "dtypes"),
    [
        pytest.param(rows, cols, op, dtypes, id=f"{rows}-{cols}-{op}-{'-'.join(map(str, dtypes))}")
        for (rows, cols), op, dtypes in pairwise(
            RESIDUAL_SHAPES,
            RESIDUAL_OPS,
            [(BF16, BF16, BF16), (BF16, F32, BF16), (F32, F32, F32)],
        )
    ],
)
def test_default_schedules_of_residuals_lower(
    rows: int, cols: int, op: str, dtypes: tuple[np.dtype, ...]
) -> None:
    x, residual, y = dtypes
    spec = make_spec(op, rows, cols, x, y, residual_dtype=residual, scale_dtype=BF16)
    assert mosaic.why_unsupported(spec) is None
    assert "mosaic_gpu" in lower(spec)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", *RESIDUAL_OPS])
@pytest.mark.parametrize(
    ("groups", "rows", "cols"),
    [(8, 8192, 128), (16, 4096, 768), (16, 16 * 197, 768), (8, 8192, 4096), (3, 3 * 77, 50257)],
)
def test_groups_of_rows_lower(groups: int, rows: int, cols: int, op: str) -> None:
    for bias_groups in {1, groups} if op.endswith("layer_norm") else {groups}:
        spec = make_spec(op, rows, cols, BF16, BF16, scale_groups=groups, bias_groups=bias_groups)
        assert mosaic.why_unsupported(spec) is None
        assert "mosaic_gpu" in lower(spec)


def test_large_arrays_are_addressed_with_64_bits() -> None:
    """Arrays of more than 2^31 elements are supported, because offsets are computed in 64 bits."""
    spec = make_spec("softmax", 70000, 65536, BF16, BF16)
    assert spec.rows * spec.cols > 2**31
    assert mosaic.why_unsupported(spec) is None


def random_spec(rng: np.random.Generator) -> Spec:
    """Return the spec of a random supported forward call."""
    rows, cols = int(2 ** rng.uniform(0, 22)), int(2 ** rng.uniform(3, 18))
    if rng.random() < 0.5:
        cols = -(-cols // 8) * 8
    x, y, scale, bias, residual = (np.dtype(d) for d in rng.choice([BF16, F16, F32], 5))
    op = str(rng.choice([*OPS, *RESIDUAL_OPS]))
    if "softmax" in op:
        return make_spec(op, rows, cols, x, y)
    given: dict[str, Any] = {"scale_dtype": scale if rng.random() < 0.8 else None}
    if op.endswith("layer_norm"):
        given["bias_dtype"] = bias if rng.random() < 0.8 else None
    if op in RESIDUAL_OPS:
        given["residual_dtype"], cols = residual, min(cols, 2**17)
    if rng.random() < 0.3:
        groups = int(2 ** rng.uniform(1, 8))
        rows = min(max(1, rows // groups), 2**13) * groups
        given["scale_groups"] = groups
    return make_spec(op, rows, cols, x, y, **given)


@pytest.mark.parametrize("gpu", [HOPPER, Gpu(20, 99 * 1024, clusters={2: 10, 4: 5, 8: 2})], ids=str)
def test_schedules_fit_the_gpu(gpu: Gpu) -> None:
    rng = np.random.default_rng(0)
    for spec in [random_spec(rng) for _ in range(20_000)]:
        assert mosaic.why_unsupported(spec) is None
        schedule = choose(spec, gpu)
        held = schedule.rows_of(spec)
        inputs = [d for d in (spec.x_dtype, spec.dtype("residual")) if d is not None]
        assert spec.cols % schedule.vector == 0
        assert schedule.vector * max(d.itemsize for d in (*inputs, spec.y_dtype)) <= 16
        assert schedule.rows <= spec.rows
        assert held.warpgroups <= 8
        assert held.cluster <= 8
        if isinstance(held, RowTile):
            assert held.fragments()
        elif isinstance(held, SplitRow):
            assert held.partition().units > 0
        scratch = held.scratch(3, inputs)
        arrays = [s for s in scratch if hasattr(s, "dtype")]
        assert sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in arrays) <= gpu.smem
        if held.slots:
            assert held.warpgroups * held.slots <= 32  # the maximum number of barriers in an array
            assert not any(spec.cols * dtype.itemsize % 16 for dtype in inputs)


def test_every_line_of_the_table_is_used() -> None:
    specs = [
        make_spec(op, rows, cols, x, x)
        for rows, cols in SHAPES
        for op in ("softmax", "log_softmax", "layer_norm")
        for x in (BF16, F32)
    ]
    # Calls with three parameters: scale, bias and gate.
    specs += [
        norms.make_spec("scaled_add_norm", "fwd", 8192, cols, (BF16,) * 3, "layer_norm")
        for cols in (1152, 65536)
    ]
    used = {next(line for line in TABLE if line.fits(spec, HOPPER)) for spec in specs}
    assert used == set(TABLE)


def test_shard_map_with_explicit_axes() -> None:
    """In `shard_map` with Explicit axes, the outputs vary over the same mesh axes as the input."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = make_spec("rms_norm", 8, 512, BF16, BF16)
    sharded = jax.P("rows", None)

    def local(x: jax.Array, scale: jax.Array) -> jax.Array:
        return call(spec, x, scale, None)[0]

    with jax.set_mesh(mesh):
        function = jax.shard_map(local, out_specs=sharded)
        rows = jax.NamedSharding(mesh, sharded)
        x = jax.ShapeDtypeStruct((8, 512), BF16, sharding=rows)
        scale = jax.ShapeDtypeStruct((512,), F32)
        jax.jit(function).trace(x, scale).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("rows", [("data",), ()], ids=["varying", "alike"])
@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        ("softmax_cross_entropy", "jaxnorm_cross_entropy_bwd"),
        ("log_prob_and_entropy", "jaxnorm_log_prob_and_entropy_bwd"),
        ("kl_divergence", "jaxnorm_kl_divergence_bwd"),
    ],
)
def test_logits_give_way_to_their_gradient_on_explicit_axes(
    rows: tuple[str, ...], function: str, kernel: str
) -> None:
    """A linear loss lowers on a mesh, with sharded rows and without.

    If rows are not sharded, the logits' gradient overwrites the logits. If rows are sharded, the
    logits vary over a mesh axis. Pallas cannot write to such an array, so the gradient is a new
    array.
    """
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))

    def loss(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        of = getattr(jaxnorm, f"linear_{function}")
        targets = (2 * x, weight) if function == "kl_divergence" else (labels,)
        results = of(x, weight, *targets, chunk=96, implementation="mosaic")
        return sum(map(jnp.sum, jax.tree.leaves(results)), jnp.float32(0))

    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.P(*rows))
        x = jax.ShapeDtypeStruct((512, 256), F32, sharding=sharding)
        labels = jax.ShapeDtypeStruct((512,), np.int32, sharding=sharding)
        weight = jax.ShapeDtypeStruct((256, 4096), F32)
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(x, weight, labels)
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert kernel in text


def test_one_round_takes_all_rows_where_clusters_have_their_sms_to_themselves() -> None:
    def layer_norm(rows: int, cols: int) -> TileSchedule:
        return choose(make_spec("layer_norm", rows, cols, BF16, BF16), HOPPER)

    widest = layer_norm(1024, 131072)
    assert widest.tiles == math.ceil(1024 / HOPPER.clusters[widest.cluster])
    # For these shapes, measurements showed that blocks that process a few rows each are faster than
    # persistent blocks that share all rows.
    for rows, cols in ((16384, 8192), (2048, 8192), (8192, 16384), (4096, 65536)):
        assert layer_norm(rows, cols).tiles <= 8
