"""Tests of kl_divergence with every kind of schedule, like those in `test_schedules`."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_error import assert_computes
from reference import assert_within
from specs import build_spec, changed
from test_kl_divergence import (
    Divergence,
    check_nearly_impossible,
    check_special_rows,
    each_direction,
    masked_rows,
    operands,
    special_rows,
)
from test_schedules import scheduled  # noqa: F401

from jaxnorm import kl_divergence

pytestmark = pytest.mark.triton

CAPPED = {"logits_scale": 0.7, "logit_softcap": 8.0, "teacher_logit_softcap": 8.0}


def with_gradient(x, teacher, d, **options):
    y, vjp = jax.vjp(lambda x: kl_divergence(x, teacher, **options), x)
    return y, *vjp(d)


# A row may start at any of 8 offsets within a 16-byte word. The nine rows of a test together cover
# all offsets.
@each_direction
@pytest.mark.parametrize(
    ("dtype", "teacher_dtype", "cols"),
    [
        ("bfloat16", "bfloat16", 101),
        ("float32", "float32", 101),
        ("float16", "bfloat16", 104),
        ("bfloat16", "float32", 100),
        ("float32", "bfloat16", 37),
    ],
)
def test_values(dtype, teacher_dtype, cols, reverse, scheduled):  # noqa: F811
    x, teacher = operands((9, cols), dtype, teacher_dtype)
    d = jnp.linspace(-1, 2, 9)
    y, dx = with_gradient(x, teacher, d, reverse=reverse, implementation=scheduled)
    of = Divergence(x, teacher, dtype, reverse=reverse)
    assert dx.dtype == dtype
    assert_within(y, of.value, of.bound)
    assert_within(dx, *of.gradient(d))


@each_direction
@pytest.mark.parametrize(
    "options", [{"logits_scale": 0.7}, CAPPED, CAPPED | {"teacher_logit_softcap": None}], ids=str
)
def test_scaled_and_capped(options, reverse, scheduled):  # noqa: F811
    """Results equal those of XLA's code, even with masked and weighted positions."""
    x, teacher = operands((9, 101), "float32")
    x = x.at[4].set(jnp.nan)
    weights = jnp.arange(9) % 4 * 0.5

    def run(x, teacher, implementation="xla"):
        options_of_all = {**options, "reverse": reverse, "where": weights}
        d = jnp.linspace(-1, 2, 9)
        return with_gradient(x, teacher, d, implementation=implementation, **options_of_all)

    y, dx = run(x, teacher, scheduled)
    assert (y[4], np.abs(dx[4]).max()) == (0, 0)
    kept = [a.at[4].set(0) for a in (x, teacher)]
    assert_computes((y, dx), run, *kept)


@each_direction
@pytest.mark.parametrize("options", [{"logits_scale": 0.7}, CAPPED], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equal_logits(dtype, options, reverse, scheduled):  # noqa: F811
    x, _ = operands((9, 101), dtype)
    x = x.at[0].multiply(1000)
    given = {**options, "reverse": reverse, "implementation": scheduled}
    y, dx = with_gradient(x, x, jnp.ones(9), **given)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(dx, 0)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # raised by the interpreter's `max`
@each_direction
def test_rows_of_all_kinds(reverse, scheduled):  # noqa: F811
    x, teacher = special_rows(101, start=30)
    d = jnp.ones(len(x))
    y, dx = with_gradient(x, teacher, d, reverse=reverse, implementation=scheduled)
    check_special_rows(y, dx, reverse=reverse)


@each_direction
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_masks_whose_multiples_overflow(dtype, reverse, scheduled):  # noqa: F811
    x, teacher, of = masked_rows(101, dtype, reverse=reverse)
    options = {"reverse": reverse, "logits_scale": 2.0, "implementation": scheduled}
    y, dx = with_gradient(x, teacher, jnp.ones(4), **options)
    assert_within(y, of.value, of.bound)
    assert_within(dx, *of.gradient(jnp.ones(4)))


def test_nearly_impossible_classes(scheduled):  # noqa: F811
    check_nearly_impossible(lambda x, t: kl_divergence(x, t, implementation=scheduled), 101)


@each_direction
def test_small_divergences(reverse, scheduled):  # noqa: F811
    """The absolute error of a small divergence is at most 64 * eps * 0.01.

    eps is float32's machine epsilon. The logits of student and teacher differ by about 0.01.
    """
    x, noise = operands((5, 1001), "float32")
    teacher = x + 1e-2 * noise
    of = Divergence(x, teacher, "float32", reverse=reverse)
    y = kl_divergence(x, teacher, reverse=reverse, implementation=scheduled)
    assert np.all(y >= 0)
    assert_within(y, of.value, 64 * np.finfo(np.float32).eps * 1e-2)


@each_direction
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dx_where_x_lies(dtype, padding, reverse, scheduled):  # noqa: F811
    """The gradient may overwrite the logits, because each logit is read before it is overwritten.

    Rows may have padding at their end. The padding columns are not classes, and have no effect.
    """
    from jaxnorm_kernels import triton

    del scheduled
    x, teacher = operands((9, 101), dtype)
    wide = [
        jnp.concatenate([a, jnp.full((9, padding), jnp.finfo(a.dtype).max)], 1)
        for a in (x, teacher)
    ]
    forward = build_spec(
        "kl_divergence",
        "fwd",
        9,
        101 + padding,
        x.dtype,
        np.dtype(np.float32),
        want_stats=True,
        padding=padding,
        teacher_dtype=teacher.dtype,
        reverse=reverse,
    )
    backward = changed(forward, direction="bwd", want_stats=False, overwrites_x=True)

    @jax.jit
    def step(x, teacher, d):
        y, stats = contract.call(triton, forward, x, teacher)
        return y, *contract.call(triton, backward, x, stats, teacher, None, y, d)

    d = jnp.linspace(-1, 2, 9)
    y, dx = step(*wide, d)
    of = Divergence(x, teacher, dtype, reverse=reverse)
    assert_within(y, of.value, of.bound)
    assert_within(dx[:, :101], *of.gradient(d))
    assert not dx[:, 101:].any()
