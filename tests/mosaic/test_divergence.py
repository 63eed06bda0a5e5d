"""The kernels of kl_divergence: interpreted, lowered, and compiled for an H100."""

import functools
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forward_cases import BF16, F16, F32
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from reference import assert_within
from test_kl_divergence import Divergence, check_special_rows, operands, special_rows
from test_losses_mosaic import LossForwardSchedule

import jaxnorm
from jaxnorm.operations.kl_divergence import divergence_call
from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.implementation import Operands, Residuals, Results

pytestmark = pytest.mark.usefixtures("quick_to_compile")

CAPPED = {"scale": 0.7, "logit_softcap": 8.0, "teacher_logit_softcap": 8.0}
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def specs_of(rows, cols, dtype, teacher_dtype, *, has_positions=False, padding=0, **options):
    """Return two specs: of the forward, which also returns statistics, and of the backward."""
    given = {"scale": 1.0, "reverse": False, "logit_softcap": None, "teacher_logit_softcap": None}
    call = divergence_call(
        "kl_divergence",
        (rows, cols + padding),
        np.dtype(dtype),
        np.dtype(teacher_dtype),
        axis=-1,
        mask=None,
        has_positions=has_positions,
        has_scale=False,
        implementation=None,
        **{**given, **options},
    ).with_stats()
    call = call.replaced(padding=padding)
    return [c.as_seen_by("mosaic") for c in (call, call.backward(("x",), ("y",)))]


@functools.lru_cache(maxsize=8)
def forward_and_backward(module, specs, schedule=None):
    forward, backward = specs
    scheduled = {} if schedule is None else {"schedule": schedule}

    def both(x, teacher, d, positions=None):
        given = Operands(x, teacher_logits=teacher, positions=positions)
        results = module.forward(given, forward, **scheduled)
        residuals = Residuals(x, stats=results.stats, teacher_logits=teacher, y=results.y)
        return results.y, module.backward(residuals, Results(d), backward).x

    return jax.jit(both)


def run(module, x, teacher, positions=None, schedule=None, d=None, padding=0, **options):
    specs = specs_of(
        *(len(x), x.shape[1] - padding, x.dtype, teacher.dtype),
        has_positions=positions is not None,
        padding=padding,
        **options,
    )
    arrays = [x, teacher, jnp.linspace(-1, 2, len(x)) if d is None else d]
    with mosaic.interpreted():
        function = forward_and_backward(module, tuple(specs), schedule)
        return function(*arrays, *([] if positions is None else [positions]))


# A thread processes a row in steps of 16 bytes. The widths cover four cases: all steps are full;
# the last step is partial; rows are unaligned; a row has less than 16 bytes per thread. The dtypes
# of the logits and of the teacher's logits are equal in some cases and different in others.
@DIRECTIONS
@pytest.mark.parametrize(
    ("cols", "dtype", "teacher_dtype", "schedule"),
    [
        (4096, "bfloat16", "bfloat16", LossForwardSchedule(2)),
        (2056, "float16", "bfloat16", LossForwardSchedule(1, warpgroups=2)),
        (3001, "float32", "float32", LossForwardSchedule(2)),
        (5003, "bfloat16", "float32", LossForwardSchedule(1, warpgroups=2)),
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
    d = jnp.linspace(-1, 2, len(x))
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
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{"scale": 0.7}, CAPPED], ids=str)
def test_equal_logits(dtype, options, reverse):
    x, _ = operands((3, 4099), dtype)
    x = x.at[0].multiply(1000)
    y, dx = run(mosaic, x, x, reverse=reverse, **options)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(dx, 0)


@DIRECTIONS
def test_rows_of_all_kinds(reverse):
    y, dx = run(mosaic, *special_rows(200), reverse=reverse)
    check_special_rows(y, dx, reverse=reverse)


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
    for cols, dtype in ((2048, "bfloat16"), (1031, "float32")):
        x, teacher = operands((2, cols), dtype)
        specs = tuple(specs_of(2, cols, dtype, dtype))
        with mosaic.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
            forward_and_backward(mosaic, specs)(x, teacher, jnp.ones(2))
        assert not interpret_pallas_call.get_races().races_found


def test_which_calls_have_kernels():
    x = jnp.ones((8, 1000))
    for words, options in {
        "mask of classes": {"where": jnp.ones((8, 1000), bool)},
        "scale of logits that is a number": {"logits_scale": jnp.ones(8)},
    }.items():
        with pytest.raises(ValueError, match=words):
            jaxnorm.kl_divergence(x, x, implementation="mosaic", **options)


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
    traced = forward_and_backward(mosaic, tuple(specs)).trace(
        *types(rows, cols, dtype, teacher_dtype)
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


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
