"""Values of the kernels of kl_divergence, in the interpreter.

The file `test_losses_mosaic.py` lowers these kernels, compiles them for an H100, and looks for
races.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_within
from specs import F32
from test_kl_divergence import (
    Divergence,
    check_nearly_impossible,
    check_special_rows,
    each_direction,
    masked_rows,
    operands,
    special_rows,
)
from test_losses_mosaic import CAPS, KL, LossSchedule, both_passes, make_spec

from jaxnorm_kernels import mosaic

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SCALED = {"logits_scale": 0.7}
OTHER_CAPS = {"logits_scale": 1.5, "logit_softcap": 8.0, "teacher_softcap": 30.0}


def run(x, teacher, d, positions=None, scales=None, schedule=None, of_dx=None, **options):
    """Run both passes. Return the divergences and the gradient, whose dtype is `of_dx`.

    `scales` has a scale for each row, or is None.
    """
    has = {"has_positions": positions is not None, "has_scale": scales is not None}
    spec = make_spec(KL, *x.shape, x.dtype, teacher_dtype=teacher.dtype, **has, **options)
    program = both_passes(spec, schedule, gradient_dtype=of_dx and np.dtype(of_dx))
    with mosaic.interpreted():
        return program(x, teacher, (d,), positions, scales)


# A thread processes a row in steps of 16 bytes. The widths cover four cases: all steps are full;
# the last step is partial; rows are unaligned; a row has less than 16 bytes per thread. The dtypes
# of the logits and of the teacher's logits are equal in some cases and different in others. The
# gradient overwrites the logits if it has the same dtype.
@each_direction
@pytest.mark.parametrize(
    ("cols", "padding", "dtype", "teacher_dtype", "of_dx", "schedule", "options"),
    [
        (4096, 0, "bfloat16", "bfloat16", None, LossSchedule(2), {}),
        (4096, 0, "float32", "float32", "bfloat16", None, {}),
        (2056, 0, "float16", "bfloat16", "float16", LossSchedule(1, warpgroups=2), SCALED),
        (3001, 0, "float32", "float32", "float16", LossSchedule(2), {}),
        (5003, 0, "bfloat16", "float32", "bfloat16", LossSchedule(1, warpgroups=2), {}),
        (301, 0, "float32", "float32", None, None, OTHER_CAPS),
        (516, 0, "bfloat16", "bfloat16", None, None, CAPS),
        (2047, 1, "float32", "float32", "bfloat16", LossSchedule(1, warpgroups=2), CAPS),
        (1001, 7, "float32", "float32", None, None, {}),
    ],
    ids=str,
)
def test_values(cols, padding, dtype, teacher_dtype, of_dx, schedule, options, reverse):
    """Values and gradients are within their bounds.

    If the number of columns is odd, rows start at up to 8 different offsets within a 16-byte word.
    Such a test has 9 rows, so every offset occurs. Padding columns are no classes: they do not
    change the results, and their gradient is 0.
    """
    x, teacher = operands((9 if cols % 2 else 2, cols), dtype, teacher_dtype)
    d = jnp.linspace(-1, 2, len(x), dtype=F32)
    wide = [
        jnp.pad(a, ((0, 0), (0, padding)), constant_values=jnp.finfo(a.dtype).max)
        for a in (x, teacher)
    ]
    given = {"schedule": schedule, "of_dx": of_dx, "padding": padding, "reverse": reverse}
    y, dx = run(*wide, d, **given, **options)
    assert dx.dtype == (of_dx or dtype)
    assert not dx[:, cols:].any()
    of = Divergence(x, teacher, of_dx or dtype, reverse=reverse, **options)
    assert_within(y, of.value, of.bound)
    assert_within(dx[:, :cols], *of.gradient(d))


@each_direction
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
def test_a_scale_for_each_row(cols, dtype, caps, reverse):
    """Each row may have its own scale, which may be negative. Masked rows may contain NaN."""
    x, teacher = operands((4, cols), dtype)
    scales, d = jnp.array([0.7, -1.5, jnp.nan, 3.0]), jnp.array([-1.0, 0.5, jnp.nan, 2.0])
    positions = jnp.arange(4) != 2
    y, dx = run(x.at[2].set(jnp.nan), teacher, d, positions, scales, reverse=reverse, **caps)
    assert (y[2], np.abs(dx[2]).max()) == (0, 0)
    y, dx, d, x, teacher, scales = (a[positions] for a in (y, dx, d, x, teacher, scales))
    of = Divergence(x, teacher, dtype, reverse=reverse, logits_scale=scales, **caps)
    assert_within(y, of.value, of.bound)
    assert_within(dx, *of.gradient(d))


@each_direction
@pytest.mark.parametrize(("dtype", "of_dx"), [("bfloat16", None), ("float32", "bfloat16")])
@pytest.mark.parametrize("options", [SCALED, CAPS], ids=str)
def test_equal_logits(dtype, of_dx, options, reverse):
    x, _ = operands((3, 4099), dtype)
    x = x.at[0].multiply(1000)
    y, dx = run(x, x, jnp.ones(3), of_dx=of_dx, reverse=reverse, **options)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(dx, 0)


@each_direction
def test_rows_of_all_kinds(reverse):
    rows = special_rows(200)
    check_special_rows(
        *run(*rows, jnp.linspace(-1, 2, len(rows[0])), reverse=reverse), reverse=reverse
    )


@each_direction
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_masks_whose_multiples_overflow(dtype, reverse):
    x, teacher, of = masked_rows(1000, dtype, reverse=reverse)
    y, dx = run(x, teacher, jnp.ones(4), reverse=reverse, logits_scale=2.0)
    assert_within(y, of.value, of.bound)
    assert_within(dx, *of.gradient(jnp.ones(4)))


def test_nearly_impossible_classes():
    check_nearly_impossible(lambda x, teacher: run(x, teacher, jnp.ones(2))[0], 1000)


@each_direction
def test_small_divergences(reverse):
    """Errors are small if the student's and the teacher's logits differ by about 1e-2.

    The bound on an error is then 1e-2 times a few unit roundoffs.
    """
    x, noise = operands((2, 30000), "float32")
    teacher = x + 1e-2 * noise
    of = Divergence(x, teacher, "float32", reverse=reverse)
    y, _ = run(x, teacher, jnp.ones(2), reverse=reverse)
    assert np.all(y >= 0)
    assert_within(y, of.value, 64 * np.finfo(np.float32).eps * 1e-2)
