"""The kernels of kl_divergence: interpreted, lowered, and compiled for an H100."""

import functools
import itertools

import hlo
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from programs import kernels_in
from reference import assert_within, exact, of_roundings, rounding
from specs import BF16, F16, F32, changed
from test_kl_divergence import (
    Divergence,
    check_nearly_impossible,
    check_special_rows,
    masked_rows,
    operands,
    special_rows,
)
from test_losses_mosaic import LossSchedule, check_linear_in_one_kernel

import jaxnorm
from jaxnorm.calls.rows import RowView
from jaxnorm.operations.loss import checked_call
from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.cross_entropy.kl_divergence import choose_both
from jaxnorm_kernels.mosaic.device.gpu import HOPPER, REGISTERS
from jaxnorm_kernels.specs import LossOptions

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SCALED = {"logits_scale": 0.7}
CAPPED = {"logits_scale": 0.7, "logit_softcap": 8.0, "teacher_softcap": 8.0}
OTHER_CAPS = {"logits_scale": 1.5, "logit_softcap": 8.0, "teacher_softcap": 30.0}
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def specs_of(rows, cols, dtype, teacher_dtype, *, has_positions=False, padding=0, **options):
    """Return two specs: of the forward, which also returns statistics, and of the backward."""
    of_teacher = LossOptions(teacher_dtype=np.dtype(teacher_dtype))
    view = RowView.of((rows, cols + padding), (1,))
    call, *_ = checked_call(
        *("kl_divergence", of_teacher, view, np.dtype(dtype)),
        where=None,
        logits_scale=1.0,
        implementation=None,
    )
    call = call.with_stats().replaced(padding=padding, has_positions=has_positions, **options)
    return [c.as_seen_by("mosaic") for c in (call, call.backward(("x",), ("y",)))]


@functools.lru_cache(maxsize=8)
def forward_and_backward(module, specs, schedule=None):
    forward, backward = specs
    scheduled = {} if schedule is None else {"schedule": schedule}

    def both(x, teacher, d, positions=None, **others):
        given = Operands(x, teacher_logits=teacher, positions=positions, **others)
        results = module.forward(given, forward, **scheduled)
        saved = {"teacher_logits": teacher, "logits_scale": given.logits_scale}
        residuals = Residuals(x, stats=results.stats, y=results.y, **saved)
        return results.y, module.backward(residuals, Results(d), backward).x

    return jax.jit(both)


def both_spec(forward, dtype=None):
    """Return the spec of a kernel that computes both passes. `dtype` is the gradient's dtype."""
    return changed(forward, want_stats=False, wrt=("x",), gradient_dtype=np.dtype(dtype or F32))


@functools.lru_cache(maxsize=8)
def in_one_kernel(module, specs, schedule=None, dtype=None):
    """Return a function that runs both passes in one kernel.

    `dtype` is the dtype of the gradient. By default, it is the dtype of the logits, and
    the gradient overwrites the logits.
    """
    spec = both_spec(specs[0], dtype or specs[0].x_dtype)

    def both(x, teacher, d, positions=None, **others):
        given = Operands(x, teacher_logits=teacher, positions=positions, **others)
        results, gradients = module.both(given, Results(d), spec, schedule=schedule)
        return results.y, gradients.x

    return jax.jit(both)


def run(
    module,
    x,
    teacher,
    positions=None,
    schedule=None,
    d=None,
    padding=0,
    program=forward_and_backward,
    scales=None,
    **options,
):
    """Run both passes in the interpreter. Return the divergences and the gradient.

    `scales` has a scale for each row, or is None. ``program(module, specs, schedule)`` returns the
    function that runs both passes.
    """
    specs = specs_of(
        *(len(x), x.shape[1] - padding, x.dtype, teacher.dtype),
        has_positions=positions is not None,
        has_scale=scales is not None,
        padding=padding,
        **options,
    )
    arrays = [x, teacher, jnp.linspace(-1, 2, len(x), dtype=F32) if d is None else d]
    with mosaic.interpreted():
        function = program(module, tuple(specs), schedule)
        others = {"positions": positions, "logits_scale": scales}
        return function(*arrays, **{k: v for k, v in others.items() if v is not None})


# A thread processes a row in steps of 16 bytes. The widths cover four cases: all steps are full;
# the last step is partial; rows are unaligned; a row has less than 16 bytes per thread. The dtypes
# of the logits and of the teacher's logits are equal in some cases and different in others.
@DIRECTIONS
@pytest.mark.parametrize(
    ("cols", "dtype", "teacher_dtype", "schedule"),
    [
        (4096, "bfloat16", "bfloat16", LossSchedule(2)),
        (2056, "float16", "bfloat16", LossSchedule(1, warpgroups=2)),
        (3001, "float32", "float32", LossSchedule(2)),
        (5003, "bfloat16", "float32", LossSchedule(1, warpgroups=2)),
        (301, "float32", "float32", None),
        (516, "bfloat16", "bfloat16", None),
    ],
    ids=str,
)
def test_values(cols, dtype, teacher_dtype, schedule, reverse):
    """Values and gradients are within their bounds.

    If the number of columns is odd, rows start at up to 8 different offsets within a 16-byte word.
    Such a test has 9 rows, so every offset occurs.
    """
    x, teacher = operands((9 if cols % 2 else 2, cols), dtype, teacher_dtype)
    d = jnp.linspace(-1, 2, len(x), dtype=F32)
    y, dx = run(mosaic, x, teacher, schedule=schedule, d=d, reverse=reverse)
    of = Divergence(x, teacher, dtype, reverse=reverse)
    assert_within(y, of.value, of.bound)
    assert_within(dx, *of.gradient(d))


@DIRECTIONS
def test_caps_and_positions(reverse):
    """Results equal XLA's, and are 0 at positions that are masked, even if their logits are NaN."""
    x, teacher = operands((4, 1000), "float32")
    positions = jnp.arange(4) != 1
    x = x.at[1].set(jnp.nan)
    y, dx = run(mosaic, x, teacher, positions, reverse=reverse, **CAPPED)
    expected, of_x = run(xla, x, teacher, positions, reverse=reverse, **CAPPED)
    roundings = 64 * np.finfo(np.float32).eps * np.log(1000)
    assert_within(y, expected, roundings)
    assert_within(dx, of_x, 3 * roundings * np.abs(of_x).max())
    assert (y[1], np.abs(dx[1]).max()) == (0, 0)


@DIRECTIONS
@pytest.mark.parametrize(
    ("cols", "dtype", "program"),
    [
        (4099, "bfloat16", forward_and_backward),
        (4099, "float32", forward_and_backward),
        (1032, "float32", in_one_kernel),
    ],
)
@pytest.mark.parametrize("options", [SCALED, CAPPED], ids=str)
def test_equal_logits(cols, dtype, program, options, reverse):
    x, _ = operands((3, cols), dtype)
    x = x.at[0].multiply(1000)
    y, dx = run(mosaic, x, x, program=program, reverse=reverse, **options)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(dx, 0)


@DIRECTIONS
def test_rows_of_all_kinds(reverse):
    y, dx = run(mosaic, *special_rows(200), reverse=reverse)
    check_special_rows(y, dx, reverse=reverse)


@DIRECTIONS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("program", [forward_and_backward, in_one_kernel])
def test_masks_whose_multiples_overflow(program, dtype, reverse):
    x, teacher, of = masked_rows(1000, dtype, reverse=reverse)
    options = {"d": jnp.ones(4), "program": program, "reverse": reverse, "logits_scale": 2.0}
    y, dx = run(mosaic, x, teacher, **options)
    assert_within(y, of.value, of.bound)
    assert_within(dx, *of.gradient(jnp.ones(4)))


def test_nearly_impossible_classes():
    check_nearly_impossible(lambda x, teacher: run(mosaic, x, teacher)[0], 1000)


@DIRECTIONS
def test_small_divergences(reverse):
    """If the student's and the teacher's logits differ by about 1e-2, errors are small, too.

    The bound on an error is 1e-2 times a few roundoffs.
    """
    x, noise = operands((2, 30000), "float32")
    teacher = x + 1e-2 * noise
    of = Divergence(x, teacher, "float32", reverse=reverse)
    y, _ = run(mosaic, x, teacher, reverse=reverse)
    assert np.all(y >= 0)
    assert_within(y, of.value, 64 * np.finfo(np.float32).eps * 1e-2)


def test_padding():
    """Padding columns are no classes: they do not change the result, and their gradient is 0."""
    x, teacher = operands((3, 1008), "float32")
    big = np.finfo(np.float32).max
    padded = [a.at[:, 1001:].set(big) for a in (x, teacher)]
    y, dx = run(mosaic, *padded, padding=7)
    expected, of_x = run(mosaic, x[:, :1001], teacher[:, :1001])
    roundings = 32 * np.finfo(np.float32).eps
    assert_within(y, expected, roundings * np.abs(expected))
    np.testing.assert_array_equal(dx[:, 1001:], 0)
    assert_within(dx[:, :1001], of_x, roundings * np.abs(of_x).max())


def test_no_races():
    programs = [
        (2048, "bfloat16", forward_and_backward, None),
        (1031, "float32", forward_and_backward, None),
        (2048, "float32", in_one_kernel, LossSchedule(1, warpgroups=2)),
    ]
    for cols, dtype, program, schedule in programs:
        x, teacher = operands((2, cols), dtype)
        specs = tuple(specs_of(2, cols, dtype, dtype))
        with mosaic.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
            program(mosaic, specs, schedule)(x, teacher, jnp.ones(2, F32))
        assert not interpret_pallas_call.get_races().races_found


# -------------------------------------------------------------------- both passes in one kernel


@DIRECTIONS
@pytest.mark.parametrize(
    ("cols", "padding", "dtype", "of_dx", "schedule", "options"),
    [
        (4096, 0, "float32", "bfloat16", None, {}),
        (16384, 0, "float32", "float16", None, SCALED),
        (4096, 0, "bfloat16", "bfloat16", LossSchedule(2), {}),
        (
            2056,
            0,
            "float16",
            "float16",
            LossSchedule(1, warpgroups=2),
            {"logits_scale": 1.5},
        ),
        (3000, 0, "float32", "float32", LossSchedule(2), CAPPED),
        (2047, 1, "float32", "bfloat16", LossSchedule(1, warpgroups=2), CAPPED),
        (1025, 7, "bfloat16", "bfloat16", LossSchedule(1, warpgroups=2), CAPPED),
        # Some warpgroups have no columns.
        (131, 1, "float32", "float32", LossSchedule(1, warpgroups=4), OTHER_CAPS),
    ],
    ids=str,
)
def test_one_kernel(cols, padding, dtype, of_dx, schedule, options, reverse):
    """The kernel that computes both passes is accurate, and masked rows have results of 0.

    The logits of masked rows are NaN. The padding is filled with the dtype's largest number.
    """
    x, teacher = operands((3, cols), dtype)
    positions, d = jnp.array([True, False, True]), jnp.array([-1.0, jnp.nan, 2.0])
    fill = jnp.full((3, padding), jnp.finfo(dtype).max, dtype)
    wide = [jnp.concatenate([a.at[1].set(jnp.nan), fill], 1) for a in (x, teacher)]
    program = functools.partial(in_one_kernel, dtype=of_dx)
    given = {"padding": padding, "schedule": schedule, "program": program, "reverse": reverse}
    y, dx = run(mosaic, *wide, positions, d=d, **given, **options)
    assert dx.dtype == of_dx
    assert (y[1], np.abs(dx[1]).max(), np.abs(dx[:, cols:]).max(initial=0)) == (0, 0, 0)
    y, dx, d, x, teacher = (a[::2] for a in (y, dx, d, x, teacher))
    of = Divergence(x, teacher, of_dx, reverse=reverse, **options)
    assert_within(y, of.value, of.bound)
    assert_within(dx[:, :cols], *of.gradient(d))


@DIRECTIONS
@pytest.mark.parametrize("program", [forward_and_backward, in_one_kernel])
@pytest.mark.parametrize(
    ("cols", "dtype", "caps"),
    [
        (1032, "bfloat16", {}),
        (301, "float32", {}),
        (516, "bfloat16", {"logit_softcap": 8.0, "teacher_softcap": 8.0}),
        (260, "float32", {"logit_softcap": 8.0, "teacher_softcap": 30.0}),
    ],
    ids=str,
)
def test_a_scale_for_each_row(cols, dtype, caps, program, reverse):
    """Each row may have its own scale, which may be negative, and NaN in masked rows."""
    if program is in_one_kernel and cols == 301:
        cols = 304  # This kernel takes rows in multiples of 16 bytes.
    x, teacher = operands((4, cols), dtype)
    scales, d = jnp.array([0.7, -1.5, jnp.nan, 3.0]), jnp.array([-1.0, 0.5, 1.0, 2.0])
    positions = jnp.arange(4) != 2
    given = {"program": program, "reverse": reverse, "scales": scales, **caps}
    y, dx = run(mosaic, x, teacher, positions, d=d, **given)
    assert (y[2], np.abs(dx[2]).max()) == (0, 0)
    y, dx, d, x, teacher, scales = (a[positions] for a in (y, dx, d, x, teacher, scales))
    column = exact(scales)[:, None]
    of = Divergence(x, teacher, dtype, reverse=reverse, logits_scale=column, **caps)
    assert_within(y, of.value, of.bound)
    assert_within(dx, *of.gradient(d))


@DIRECTIONS
def test_one_kernel_is_both_passes(reverse):
    """The kernel that computes both passes returns the same results as two separate kernels.

    Some of the rows have infinite or NaN logits.
    """
    rows = special_rows(200)
    given = {"reverse": reverse, "schedule": LossSchedule(1, warpgroups=2)}
    y, dx = run(mosaic, *rows, program=in_one_kernel, **given)
    check_special_rows(y, dx, reverse=reverse)
    expected, gradient = run(mosaic, *rows, **given)
    np.testing.assert_array_equal(y, expected)
    # The backward kernel may round the statistics, and the arithmetic after them, in another way
    # than the kernel that computes both passes.
    assert_within(dx, exact(gradient), of_roundings(16, "float32", np.abs(exact(gradient))))
    narrow = functools.partial(in_one_kernel, dtype="bfloat16")
    _, other = run(mosaic, *rows, program=narrow, **given)
    kinds = np.isfinite(exact(dx)).all(-1)
    assert_within(other[kinds], exact(dx)[kinds], rounding(exact(dx)[kinds], "bfloat16"))
    assert not np.isfinite(exact(other)[~kinds]).all(-1).any()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_divergence_in_one_kernel(reduction, sharded):
    """One kernel computes the divergences and the gradient of a chunk's logits."""
    shapes = [(6, 16), (16, 1001), (6, 24), (24, 1001)]
    function = jaxnorm.linear_kl_divergence
    check_linear_in_one_kernel("kl_divergence", function, shapes, reduction, sharded)


def test_schedules_of_one_kernel():
    """The longer a row is, the more warpgroups process it. The longest rows have several blocks.

    Rows are refused if their size is not a multiple of 16 bytes, or if they do not fit into the L2
    cache.
    """
    # For each number of columns, the expected pair (warpgroups per block, blocks per row).
    expected = {1000: (1, 1), 4096: (2, 1), 8192: (2, 1), 32000: (4, 1)}
    expected |= {50264: (4, 2), 128256: (4, 4), 262144: (4, 8)}
    for cols, shares in expected.items():
        schedule = choose_both(both_spec(specs_of(8192, cols, F32, F32)[0], BF16), HOPPER)
        assert (schedule.warpgroups, schedule.cluster) == shares
    for cols, words in {1001: "multiple of 16 bytes", 2**19: "L2 cache"}.items():
        assert words in mosaic.why_unsupported(both_spec(specs_of(8192, cols, F32, F32)[0], BF16))
    for cols in expected:
        assert mosaic.why_unsupported(both_spec(specs_of(8192, cols, F32, F32)[0])) is None


# -------------------------------------------------------------- lowered, or compiled for an H100


def types(rows, cols, dtype, teacher_dtype):
    arrays = [((rows, cols), dtype), ((rows, cols), teacher_dtype), ((rows,), F32), ((rows,), bool)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]


@pytest.mark.oldest_jax
@DIRECTIONS
@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "teacher_dtype"),
    [(5, 128256, BF16, BF16), (512, 50257, F32, BF16), (512, 4096, F16, F16)],
    ids=str,
)
def test_lowers(rows, cols, dtype, teacher_dtype, reverse):
    specs = specs_of(
        rows, cols, dtype, teacher_dtype, has_positions=True, reverse=reverse, **CAPPED
    )
    program = forward_and_backward(mosaic, tuple(specs))
    assert kernels_in(program, *types(rows, cols, dtype, teacher_dtype)) == 2


@pytest.mark.parametrize("options", [{}, {"reverse": True}, CAPPED], ids=str)
@pytest.mark.parametrize(
    ("cols", "dtype"), [*itertools.product((1000, 32768, 50257), (BF16, F32))], ids=str
)
def test_registers(cols, dtype, options, compiler):
    """No registers are spilled, and the registers allow at least four blocks per SM."""
    specs = specs_of(8192, cols, dtype, dtype, **options)
    backward, forward = compiler.compile(
        forward_and_backward(mosaic, tuple(specs)), types(8192, cols, dtype, dtype)[:3]
    )
    assert (forward.spilled, backward.spilled) == (0, 0)
    assert forward.registers <= 128
    assert backward.registers <= 128


@pytest.mark.oldest_jax
@DIRECTIONS
@pytest.mark.parametrize(("cols", "cluster"), [(4096, 1), (50264, 2), (128256, 4), (262144, 8)])
def test_one_kernel_lowers(cols, cluster, reverse):
    """One kernel is lowered, with as many blocks per row as the schedule has."""
    forward, _ = specs_of(512, cols, F32, F32, has_positions=True, reverse=reverse, **CAPPED)
    program = in_one_kernel(mosaic, (forward, None), dtype=BF16)
    assert kernels_in(program, *types(512, cols, F32, F32)) == 1
    assert choose_both(both_spec(forward, BF16), HOPPER).cluster == cluster


@pytest.mark.parametrize("options", [{}, {"reverse": True}, CAPPED], ids=str)
@pytest.mark.parametrize(
    ("cols", "dtype"),
    [
        *itertools.product((128256, 50264, 32000), (BF16,)),
        *itertools.product((128256, 32000), (F16, F32)),
        *itertools.product((4096, 10240), (BF16,)),
    ],
    ids=str,
)
def test_registers_of_one_kernel(cols, dtype, options, compiler):
    """No registers are spilled, and all rows in progress fit into the L2 cache.

    `dtype` is the gradient's dtype. `linear_kl_divergence` has float32 logits for all dtypes.
    """
    specs = tuple(specs_of(8192, cols, F32, F32, **options))
    program = in_one_kernel(mosaic, specs, dtype=dtype)
    (kernel,) = compiler.compile(program, types(8192, cols, F32, F32)[:3])
    assert (kernel.spilled, kernel.registers <= 128) == (0, True)
    schedule = choose_both(both_spec(specs[0], dtype), HOPPER)
    blocks = REGISTERS // (128 * schedule.warpgroups * kernel.registers)
    rows = blocks * HOPPER.at_a_time(schedule.cluster)
    assert rows * cols * 8 <= 45 * 2**20


# ------------------------------------------------------------------------------------ on a GPU


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("implementation", "has_scales"), [(None, False), (None, True), ("xla", False)]
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_nothing_else_of_the_logits_size(dtype, implementation, has_scales, compiler):
    """On a GPU, a program allocates only one array of the logits' size: the student's gradient.

    With a kernel, this also holds if each position has its own scale.
    """
    x = jax.ShapeDtypeStruct((4096, 50257), dtype, sharding=compiler.sharding)
    scales = jax.ShapeDtypeStruct((4096,), F32, sharding=compiler.sharding)

    def step(x, teacher, scales):
        options = {"logits_scale": scales} if has_scales else {}
        divergence = functools.partial(jaxnorm.kl_divergence, implementation=implementation)
        y, vjp = jax.vjp(lambda x: divergence(x, teacher, **options), x)
        return y, *vjp(y)

    made = hlo.made(jax.jit(step).lower(x, x, scales).compile().as_text(), x.size)
    assert made == (["custom-call"] if implementation is None else ["fusion"])


@pytest.mark.gpu
@DIRECTIONS
@pytest.mark.parametrize("options", [{}, SCALED, CAPPED], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "cols", "padding", "schedule", "cluster"),
    [
        (512, 50257, 7, None, 2),
        (1024, 128256, 0, None, 4),
        (130, 262144, 0, None, 8),
        (3000, 4096, 0, None, 1),
        (300, 131, 1, None, 1),
        # Some blocks of a cluster have no columns.
        (300, 4095, 1, LossSchedule(1, warpgroups=4, cluster=8), 8),
        (300, 131, 1, LossSchedule(1, warpgroups=1, cluster=4), 4),
    ],
)
def test_one_kernel_on_a_gpu(rows, cols, padding, schedule, cluster, dtype, options, reverse):
    """One kernel returns the divergence and the gradient of float32 logits.

    `dtype` is the gradient's dtype. The results of 16 rows are compared with float64.
    """
    x, teacher = 2 * jax.random.normal(jax.random.key(cols), (2, rows, cols), F32)
    d, positions = jnp.linspace(-1, 2, rows, dtype=F32), jnp.arange(rows) % 7 != 3
    largest = np.finfo(np.float32).max
    wide = [jnp.pad(a, ((0, 0), (0, padding)), constant_values=largest) for a in (x, teacher)]
    has = {"has_positions": True, "padding": padding, "reverse": reverse, **options}
    specs = tuple(specs_of(rows, cols, F32, F32, **has))
    schedule = schedule or choose_both(both_spec(specs[0], dtype))
    assert schedule.cluster == cluster
    y, dx = in_one_kernel(mosaic, specs, schedule, dtype)(*wide, d, positions)
    assert not y[3::7].any()
    assert not dx[3::7].any()
    assert not dx[:, cols:].any()
    some = np.linspace(0, rows - 1, 16).astype(int)
    some = some[some % 7 != 3]
    x, teacher, d, y, dx = (a[some] for a in (x, teacher, d, y, dx))
    of = Divergence(x, teacher, dtype, reverse=reverse, **options)
    assert_within(y, of.value, of.bound)
    assert_within(dx[:, :cols], *of.gradient(d))
