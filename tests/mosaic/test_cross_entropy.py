"""The cross-entropy's kernels: interpreted, lowered, and compiled for an H100."""

import functools
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forward_cases import BF16, F16, F32
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from loss_cases import CrossEntropy, operands
from reference import assert_within
from specs import build_spec, changed

import jaxnorm
from benchmarks import contract, hlo
from jaxnorm import softmax_cross_entropy_with_integer_labels as cross_entropy
from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.mosaic.cross_entropy.backward import LossBackwardSchedule as Parts
from jaxnorm_kernels.mosaic.cross_entropy.forward import LossForwardSchedule, choose
from jaxnorm_kernels.mosaic.device.gpu import HOPPER
from jaxnorm_kernels.mosaic.rows.units import Units

pytestmark = pytest.mark.usefixtures("quick_to_compile")

PARTS = Parts(2)
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2}
CAPPED = {"logits_scale": 0.7, "logit_softcap": 8.0, **SMOOTHED}


def make_spec(rows, cols, dtype, **options):
    options = {"want_stats": True, **options}
    return build_spec("cross_entropy", "fwd", rows, cols, np.dtype(dtype), F32, **options)


def forward_and_backward(spec, schedule=None, parts=PARTS, **backward_options):
    """A function of logits, labels, dloss and, if there are any, positions.

    The same one for the same arguments, so that it compiles once.
    """
    return _forward_and_backward(spec, schedule, parts, **backward_options)


@functools.lru_cache(maxsize=8)
def _forward_and_backward(spec, schedule, parts, **backward_options):
    backward = changed(spec, direction="bwd", want_stats=False, **backward_options)

    def both(x, labels, d, positions=None):
        operands = (x, labels, None, positions)
        loss, stats = contract.call(mosaic, spec, *operands, schedule=schedule)
        (dx,) = contract.call(mosaic, backward, x, stats, labels, None, d, schedule=parts)
        return loss, dx

    return jax.jit(both)


def check(x, labels, d, positions=None, *, schedule=None, params=None, padding=0, **options):
    """Both passes in the interpreter, within the bounds of the reference in float64."""
    rows, classes = x.shape
    options = {"has_positions": positions is not None, **options}
    spec = make_spec(rows, classes + padding, x.dtype, padding=padding, **options)
    # The padding must not enter a sum, and its gradient must not be NaN in the matmuls that follow.
    wide = jnp.concatenate([x, jnp.full((rows, padding), jnp.finfo(x.dtype).max)], 1)
    arrays = [a for a in (wide, labels, d, positions) if a is not None]
    with mosaic.interpreted(params):
        loss, dx = forward_and_backward(spec, schedule)(*arrays)
    assert not dx[:, classes:].any()
    dx = dx[:, :classes]
    options.pop("has_positions")
    expected = CrossEntropy(x, labels, positions=positions, dtype=x.dtype.name, **options)
    assert_within(loss, expected.loss, expected.loss_bound())
    assert_within(dx, expected.gradient(d), expected.gradient_bound(d))


# Whole units and steps; a rest of a step; rows that begin between multiples of 16 bytes; rows
# shorter than a unit of 16 bytes for each thread.
@pytest.mark.parametrize(
    ("cols", "dtype", "schedule", "options"),
    [
        (4096, "bfloat16", LossForwardSchedule(2), {}),
        (4096, "bfloat16", LossForwardSchedule(1, warpgroups=2), SMOOTHED),
        (2056, "float16", LossForwardSchedule(1, warpgroups=2), {"z_loss": 0.1}),
        (3000, "float32", LossForwardSchedule(2), SMOOTHED),
        (3001, "float32", LossForwardSchedule(2), {}),
        (5003, "bfloat16", LossForwardSchedule(1, warpgroups=2), SMOOTHED),
        (131, "float32", None, {}),
        (516, "bfloat16", None, {"label_smoothing": 1.0}),
        (1031, "bfloat16", None, {}),
        (2056, "bfloat16", LossForwardSchedule(1, warpgroups=2), {"logit_softcap": 5.0}),
        (301, "float32", None, CAPPED),
        (515, "bfloat16", None, {"logits_scale": 1.5, "z_loss": 1e-2}),
    ],
    ids=str,
)
def test_values(cols, dtype, schedule, options):
    """More rows than there are places where one may begin."""
    check(*operands((9 if cols % 2 else 2, cols), dtype), schedule=schedule, **options)


def test_rows_of_all_kinds():
    """Bad labels, logits that are no numbers, and positions that do not count."""
    x, labels, d = operands((8, 515), "float32")
    labels = labels.at[0].set(-1).at[1].set(515).at[2].set(-100)
    x = x.at[2].set(jnp.nan).at[3].set(-jnp.inf).at[4, 7].set(jnp.inf).at[5, :-3].set(-jnp.inf)
    x = x.at[5, labels[5]].set(1.0).at[6].set(1e4).at[6, labels[6]].add(14)
    positions = jnp.arange(8) != 2
    with np.errstate(invalid="ignore"):
        expected = CrossEntropy(x, labels, positions=positions)
    spec = make_spec(8, 515, "float32", has_positions=True)
    with mosaic.interpreted():
        loss, dx = forward_and_backward(spec)(x, labels, d.at[2].set(jnp.nan), positions)
    assert np.isnan(loss).tolist() == [True, True, False, True, True, False, False, False]
    assert np.isnan(dx).all(-1).tolist() == np.isnan(loss).tolist()
    assert (loss[2], np.abs(dx[2]).max()) == (0, 0)
    with np.errstate(invalid="ignore"):
        bounds = expected.loss_bound(), expected.gradient_bound(d)
    for a, value, bound in zip((loss, dx), (expected.loss, expected.gradient(d)), bounds):
        assert_within(a[5:], value[5:], bound[5:])


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint32", "int64", "uint64"])
def test_labels(dtype):
    """Labels may have other dtypes, and be inside or outside the classes."""
    values = [0, 5, 127, 2**15, 2**31 + 5, 2**32 + 5, -(2**33) + 5]
    info = np.iinfo(dtype)
    x, _, d = operands((3, 256), "bfloat16")
    labels = np.array([v for v in values if info.min <= v <= info.max][-3:], dtype)
    with jax.enable_x64(True):
        check(x, jnp.asarray(labels), d)


@pytest.mark.parametrize(
    ("classes", "padding", "dtype", "options"),
    [
        (4089, 7, "bfloat16", {}),
        (2047, 1, "float32", SMOOTHED),
        (127, 1, "float32", {}),
        (1001, 30, "bfloat16", SMOOTHED),
        (301, 3, "float32", CAPPED),
    ],
    ids=str,
)
def test_padding(classes, padding, dtype, options):
    """The last columns are no classes, and no label is one of them."""
    x, labels, d = operands((3, classes), dtype)
    labels = labels.at[0].set(classes - 1)
    check(x, labels, d, padding=padding, **options)
    with mosaic.interpreted():
        spec = make_spec(3, classes + padding, dtype, padding=padding, **options)
        wide = jnp.concatenate([x, x[:, :padding]], 1)
        loss, dx = forward_and_backward(spec)(wide, labels.at[1].set(classes), d)
    assert np.isnan(loss).tolist() == [False, True, False]
    assert np.isnan(dx).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("cols", "dtype"), [(5003, "bfloat16"), (3000, "float32"), (131, "float32")]
)
def test_gradient_in_the_logits_place(cols, dtype):
    """Results have the same bits if dx overwrites x, including overlapping units and edges."""
    x, labels, d = operands((9, cols), dtype)
    spec = make_spec(9, cols, dtype, **SMOOTHED)
    _, stats = jax.jit(functools.partial(contract.call, xla, spec))(x, labels, None, None)
    spec = changed(spec, direction="bwd", want_stats=False)
    results = []
    for overwrites in (False, True):
        call = functools.partial(
            contract.call,
            mosaic,
            changed(spec, overwrites_x=overwrites),
            schedule=PARTS,
        )
        with mosaic.interpreted():
            (dx,) = jax.jit(call)(x, stats, labels, None, d)
        results.append(np.asarray(dx).view(np.uint8))
    np.testing.assert_array_equal(*results)


def test_no_races():
    for cols, dtype in ((2048, "bfloat16"), (1031, "float32")):
        arrays = operands((2, cols), dtype)
        with mosaic.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
            forward_and_backward(make_spec(2, cols, dtype))(*arrays)
        assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("cols", [128, 131, 1000, 4099, 32768, 50257, 128256])
@pytest.mark.parametrize("vector", [4, 8])
def test_units_cover_a_row(cols, vector):
    units = Units.of(cols, vector)
    for row in range(vector + 1):
        first = int(units.first(jnp.int32(row)))
        assert (row * cols + first) % units.vector == 0
        assert 0 <= first <= first + units.body <= cols
        assert units.body >= units.width
        # The edges have what the body has not.
        assert units.has_edges == (units.body < cols)
        assert first < 128
        assert cols - first - units.body < 128


def test_schedules():
    for dtype in (BF16, F32):
        for cols in (131, 1000, 32768, 50257, 128256, 262144):
            for rows in (1, 5, 66, 8192):
                schedule = choose(make_spec(rows, cols, dtype), HOPPER)
                units = Units.of(cols, 16 // dtype.itemsize)
                assert schedule.warpgroups * schedule.units <= max(units.count, 1)
    assert choose(make_spec(5, 128256, BF16), HOPPER) == LossForwardSchedule(2, 4)


def test_what_the_kernels_refuse():
    refusals = {
        "128 columns": make_spec(8, 127, BF16),
        "mask of classes": make_spec(8, 1000, BF16, has_mask=True),
        "float64": make_spec(8, 1000, np.float64),
        "size 0": make_spec(0, 1000, BF16),
        "number blocks": changed(make_spec(2**26, 2**18, BF16), direction="bwd"),
    }
    for words, spec in refusals.items():
        assert words in mosaic.why_unsupported(spec)
    assert mosaic.why_unsupported(make_spec(8, 1000, BF16)) is None
    for dtype in ("bfloat16", "float32"):
        plan = jaxnorm.implementation_for(
            "softmax_cross_entropy_with_integer_labels", (8192, 50257), dtype, platform="cuda"
        )
        assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")


# ------------------------------------------------------------------------ lowered and compiled


def types(rows, cols, dtype, label_dtype="int32"):
    of_rows = [(label_dtype), F32, bool]
    x = jax.ShapeDtypeStruct((rows, cols), dtype)
    return x, *[jax.ShapeDtypeStruct((rows,), t) for t in of_rows]


@pytest.mark.oldest_jax
@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "label_dtype"),
    [
        (5, 128256, BF16, "int32"),
        (512, 50257, F32, "int8"),
        (512, 4096, F16, "uint64"),
        (5, 50257, F16, "uint8"),
        (512, 50257, BF16, "int64"),
    ],
    ids=str,
)
def test_lowers(rows, cols, dtype, label_dtype):
    with jax.enable_x64(True):
        spec = make_spec(rows, cols, dtype, has_positions=True, **SMOOTHED)
        traced = forward_and_backward(spec).trace(*types(rows, cols, dtype, label_dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


def test_programs():
    """There is one kernel each way, also under `jax.vmap` and with `save_policy`."""
    x, labels, where = (types(8 * 512, 32768, BF16)[i] for i in (0, 1, 3))
    x, labels, where = (
        jax.ShapeDtypeStruct((8, 512, *a.shape[1:]), a.dtype) for a in (x, labels, where)
    )

    def loss(x, labels, where):
        return jnp.sum(cross_entropy(x, labels, where=where, implementation="mosaic"))

    for function in (
        loss,
        lambda *arrays: jnp.sum(jax.vmap(loss)(*arrays)),
        jax.checkpoint(loss, policy=jaxnorm.save_policy),
    ):
        lowered = jax.jit(jax.grad(function)).trace(x, labels, where)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


# With smoothed labels or a cap a block shares an SM with one other or more; else with three.
@pytest.mark.parametrize(
    ("options", "registers"),
    [({}, 64), (SMOOTHED, 96), ({"logit_softcap": 30.0}, 80), (CAPPED, 96)],
    ids=str,
)
@pytest.mark.parametrize(
    ("cols", "dtype"),
    [*itertools.product((1000, 50257, 128256), (BF16, F32)), (50257, F16), (262144, F32)],
    ids=str,
)
def test_registers(cols, dtype, options, registers, compiler):
    spec = make_spec(8192, cols, dtype, has_positions=bool(options), **options)
    arrays = types(8192, cols, dtype)
    backward, forward = compiler.compile(
        forward_and_backward(spec, parts=Parts(4)), arrays if options else arrays[:3]
    )
    assert (forward.spilled, backward.spilled) == (0, 0)
    assert forward.registers <= registers
    assert backward.registers <= 96


@pytest.mark.compiles
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_nothing_else_of_the_logits_size(dtype, implementation, compiler):
    """Loss and gradient on a GPU: by default two kernels; no array is made but the gradient."""

    def step(x, labels, d):
        loss, vjp = jax.vjp(
            lambda x: cross_entropy(x, labels, implementation=implementation, **SMOOTHED), x
        )
        return loss, *vjp(d)

    shapes = [((8, 512, 50257), dtype), ((8, 512), np.int32), ((8, 512), F32)]
    arrays = [jax.ShapeDtypeStruct(s, t, sharding=compiler.sharding) for s, t in shapes]
    text = jax.jit(step).lower(*arrays).compile().as_text()
    made = hlo.made(text, 8 * 512 * 50257)
    assert made == (["custom-call"] if implementation is None else ["fusion"])


@pytest.mark.compiles
def test_a_slice_that_begins_anywhere_is_copied(compiler):
    """The kernels take arrays to begin with 16 bytes; XLA hands them no others."""
    rows, cols = 255, 50257
    x = jax.ShapeDtypeStruct((3, rows, cols), BF16, sharding=compiler.sharding)
    labels = jax.ShapeDtypeStruct((rows,), np.int32, sharding=compiler.sharding)

    def static(x, labels):
        return cross_entropy(x[1], labels)

    def scanned(x, labels):
        return jax.lax.map(lambda x: cross_entropy(x, labels), x)

    for function in (static, scanned):
        text = jax.jit(function).lower(x, labels).compile().as_text()
        assert "mosaic_gpu" in text
        assert "dynamic-slice-fusion" not in text


# ------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("label_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), [(512, 50257), (2048, 128256), (300, 131)])
def test_gradient_in_the_logits_place_on_a_gpu(rows, cols, dtype, label_dtype):
    with jax.enable_x64(True):
        x, labels, d = operands((rows, cols), dtype)
        labels = labels.astype(label_dtype)
        spec = make_spec(rows, cols, dtype)
        (loss, dx), (loss_in_place, dx_in_place) = (
            forward_and_backward(spec, overwrites_x=overwrites)(x, labels, d)
            for overwrites in (False, True)
        )
        assert jnp.array_equal(loss, loss_in_place)
        assert jnp.array_equal(dx, dx_in_place)
        assert not jnp.isnan(dx).any()
