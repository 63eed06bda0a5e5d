"""Norms with a residual, and parameters of groups of rows, against float64 numpy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from program_error import assert_computes
from reference import DTYPES, Norm, TwoNorms, assert_within, exact, rounding
from test_norm import normal

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

# x, residual, parameters, y
MIXES = [
    *((d, d, d, d) for d in DTYPES),
    ("bfloat16", "float32", "float32", "bfloat16"),
    ("bfloat16", "bfloat16", "float32", "bfloat16"),
    ("float32", "bfloat16", "float32", "bfloat16"),
    ("bfloat16", "float32", "bfloat16", "float32"),
]
SHAPES = [(70, 40), (64, 1024), (130, 768)]
# The arithmetic between two roundings: a few operations in float32.
FEW = 8 * 2.0**-24

each_mix = pytest.mark.parametrize(("x_dtype", "r_dtype", "p_dtype", "y_dtype"), MIXES)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_save = pytest.mark.parametrize("save", ["output", "input"])


def parameter(cols, dtype, seed):
    return normal((cols,), dtype, seed, scale=0.3, shift=1.0)


def reference(x, scale, bias, d, *, subtract_mean, saved, x_dtype, y_dtype):
    cols = x.shape[-1]
    return Norm(
        x=x,
        gain=np.ones(cols) if scale is None else exact(scale),
        bias=np.zeros(cols) if bias is None else exact(bias),
        d=d,
        subtract_mean=subtract_mean,
        epsilon=1e-6,
        saved=saved,
        x_dtype=x_dtype,
        y_dtype=y_dtype,
    )


def check_stored(actual, dtype, expected, error):
    """Within an error of the arithmetic and one rounding to its dtype."""
    assert actual.dtype == dtype
    assert_within(actual, expected, error + rounding(np.abs(expected) + error, dtype))


@refused.expect(refused.FEW_SHORT_ROWS)
@each_save
@each_shape
@each_mix
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_addition_before_a_norm(
    name, x_dtype, r_dtype, p_dtype, y_dtype, shape, save, implementation
):
    x, residual = normal(shape, x_dtype, 0, shift=0.5), normal(shape, r_dtype, 1)
    subtract_mean = name == "add_layer_norm"
    parameters = [parameter(shape[1], p_dtype, seed) for seed in (2, 3)[: 1 + subtract_mean]]
    dy, dh = normal(shape, y_dtype, 4), normal(shape, r_dtype, 5)

    function = functools.partial(
        getattr(jaxnorm, name), save=save, dtype=y_dtype, implementation=implementation
    )
    (y, h), vjp = jax.vjp(function, x, residual, *parameters)
    check_stored(h, r_dtype, exact(x) + exact(residual), FEW * np.abs(exact(h)))
    # y is the norm of h as rounded.
    scale, *bias = parameters
    ref = reference(
        exact(h),
        scale,
        bias[0] if bias else None,
        exact(dy),
        subtract_mean=subtract_mean,
        saved=save,
        x_dtype=r_dtype,
        y_dtype=y_dtype,
    )
    assert y.dtype == y_dtype
    assert_within(y, ref.y, ref.y_bound())

    dx, dresidual, dscale, *dbias = vjp((dy, dh))
    bound, dscale_bound, dbias_bound = ref.gradient_bounds()
    total = ref.dx + exact(dh)
    error = bound + FEW * (np.abs(total) + np.abs(exact(dh)))
    check_stored(dresidual, r_dtype, total, error)
    np.testing.assert_array_equal(dx, dresidual.astype(x_dtype))
    assert dx.dtype == x_dtype
    check_stored(dscale, p_dtype, ref.dscale, dscale_bound)
    if dbias:
        check_stored(dbias[0], p_dtype, ref.dbias, dbias_bound)


@refused.expect(refused.FEW_SHORT_ROWS)
@each_shape
@each_mix
def test_addition_after_a_norm(x_dtype, r_dtype, p_dtype, y_dtype, shape, implementation):
    del y_dtype  # the sum is in the residual's
    x, residual = normal(shape, x_dtype, 0), normal(shape, r_dtype, 1)
    scale, d = parameter(shape[1], p_dtype, 2), normal(shape, r_dtype, 3)
    function = functools.partial(jaxnorm.rms_norm_add, implementation=implementation)
    y, vjp = jax.vjp(function, x, residual, scale)
    ref = reference(
        exact(x),
        scale,
        None,
        exact(d),
        subtract_mean=False,
        saved="input",
        x_dtype=x_dtype,
        y_dtype="float32",  # not rounded before the sum
    )
    total = exact(residual) + ref.y
    check_stored(y, r_dtype, total, ref.y_bound() + FEW * (np.abs(total) + np.abs(ref.y)))
    dx, dresidual, dscale = vjp(d)
    bound, dscale_bound, _ = ref.gradient_bounds()
    check_stored(dx, x_dtype, ref.dx, bound)
    check_stored(dscale, p_dtype, ref.dscale, dscale_bound)
    np.testing.assert_array_equal(dresidual, d)


@refused.expect(refused.FEW_SHORT_ROWS)
@each_save
@each_shape
@each_mix
def test_addition_between_two_norms(
    x_dtype, r_dtype, p_dtype, y_dtype, shape, save, implementation
):
    x, residual = normal(shape, x_dtype, 0), normal(shape, r_dtype, 1)
    scale, next_scale = (parameter(shape[1], p_dtype, seed) for seed in (2, 3))
    dy, dh = normal(shape, y_dtype, 4), normal(shape, r_dtype, 5)
    function = functools.partial(
        jaxnorm.rms_norm_add_rms_norm, save=save, dtype=y_dtype, implementation=implementation
    )
    (y, h), vjp = jax.vjp(function, x, residual, scale, next_scale)
    dx, dresidual, dscale, dnext_scale = vjp((dy, dh))

    ref = TwoNorms(
        *(exact(a) for a in (x, h, scale, next_scale, dy, dh)), save, x_dtype, r_dtype, y_dtype
    )
    assert y.dtype == y_dtype
    assert_within(y, ref.last.y, ref.last.y_bound())
    total, of_norm = exact(residual) + ref.first.y, np.abs(ref.first.y)
    check_stored(h, r_dtype, total, ref.first.y_bound() + FEW * (np.abs(total) + of_norm))
    bounds = ref.gradient_bounds()
    check_stored(dx, x_dtype, ref.first.dx, bounds[0])
    check_stored(dresidual, r_dtype, ref.dresidual, bounds[1])
    check_stored(dscale, p_dtype, ref.first.dscale, bounds[2])
    check_stored(dnext_scale, p_dtype, ref.last.dscale, bounds[3])


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("shared", ["scale", "next_scale"])
def test_gradient_of_the_scale_that_groups_share(shared, mapped, implementation):
    """It is rounded once, in bfloat16, whatever the other one's groups of rows."""
    groups, rows, cols = 64, 4, 1024
    x, residual, dy, dh = (normal((groups, rows, cols), "float32", seed) for seed in range(4))
    scale, next_scale = (
        normal((cols,) if name == shared else (groups, 1, cols), "bfloat16", seed, 0.3, 1.0)
        for seed, name in enumerate(("scale", "next_scale"), start=4)
    )
    function = functools.partial(
        jaxnorm.rms_norm_add_rms_norm, save="input", implementation=implementation
    )
    if mapped:
        function = jax.vmap(
            function, (0, 0, *(None if p.ndim == 1 else 0 for p in (scale, next_scale)))
        )
    (_, h), vjp = jax.vjp(function, x, residual, scale, next_scale)
    gradients = dict(zip(("scale", "next_scale"), vjp((dy, dh))[2:]))
    gains = (np.broadcast_to(exact(p), x.shape) for p in (scale, next_scale))
    arrays = (exact(x), exact(h), *gains, exact(dy), exact(dh))
    ref = TwoNorms(*(a.reshape(-1, cols) for a in arrays), "input", *["float32"] * 3)
    expected = {"scale": ref.first.dscale, "next_scale": ref.last.dscale}[shared]
    bound = dict(zip(("scale", "next_scale"), ref.gradient_bounds()[2:]))[shared]
    check_stored(gradients[shared], "bfloat16", expected, bound)


# --- parameters of groups of rows

LEADS = {
    "sample": ((4, 1), (4, 1)),
    "scale alone": ((4, 1), ()),
    "bias alone": ((), (4, 1)),
    "each row": ((4, 33), (4, 33)),
    "one group": ((1, 1), (1,)),
}


@refused.expect(refused.FEW_SHORT_ROWS, refused.GROUPS)
@each_save
@pytest.mark.parametrize("cols", [64, 1024])
@pytest.mark.parametrize(("dtype", "p_dtype"), [("float32", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("lead", LEADS)
def test_parameters_of_groups_of_rows(lead, dtype, p_dtype, cols, save, implementation):
    shape, leads = (4, 33, cols), LEADS[lead]
    x, d = normal(shape, dtype, 0, shift=0.5), normal(shape, dtype, 1)
    scale, bias = (
        normal((*lead, cols), p_dtype, seed, scale=0.3, shift=1.0)
        for seed, lead in zip((2, 3), leads)
    )
    function = functools.partial(jaxnorm.layer_norm, save=save, implementation=implementation)
    y, vjp = jax.vjp(function, x, scale, bias)
    dx, dscale, dbias = vjp(d)
    # Norms of one row each, beside each other: sums over the first axis are those of a row.
    ref = reference(
        exact(x)[None],
        np.broadcast_to(exact(scale), shape),
        np.broadcast_to(exact(bias), shape),
        exact(d)[None],
        subtract_mean=True,
        saved=save,
        x_dtype=dtype,
        y_dtype=dtype,
    )
    dx_bound, *bounds_of_rows = ref.gradient_bounds()
    assert_within(y, ref.y[0], ref.y_bound()[0])
    assert_within(dx, ref.dx[0], dx_bound[0])
    sums = zip((ref.dscale, ref.dbias), bounds_of_rows)
    for grad, p, (values, bounds) in zip((dscale, dbias), (scale, bias), sums):
        assert grad.shape == p.shape
        over = tuple(i for i, size in enumerate((*(1,) * (3 - p.ndim), *p.shape)) if size == 1)
        expected, bound, magnitude = (
            a.sum(over, keepdims=True).reshape(p.shape) for a in (values, bounds, np.abs(values))
        )
        walk = 4 * 2.0**-24 * (math.sqrt(4 * 33) + 2) * magnitude
        check_stored(grad, p_dtype, expected, bound + walk)


def test_groups_whose_rows_are_not_consecutive():
    """What numpy broadcasts; XLA's code, whatever the platform."""
    x = normal((4, 3, 16), "float32", 0)
    scale = normal((3, 16), "float32", 1)
    expected = jaxnorm.rms_norm(x, jnp.broadcast_to(scale, x.shape))
    np.testing.assert_array_equal(jaxnorm.rms_norm(x, scale), expected)
    plan = jaxnorm.implementation_for("rms_norm", x.shape, "float32", scale=scale, platform="cuda")
    assert "not consecutive" in plan.forward.reason


def test_groups_over_channels():
    """NCHW, normalised over C, with parameters of each sample: axes in x's order."""
    x = normal((2, 16, 3, 5), "float32", 0)
    scale, bias = (normal((2, 1, 1, 16), "float32", seed) for seed in (1, 2))

    def moved(x, scale, bias):
        return jnp.moveaxis(jaxnorm.layer_norm(jnp.moveaxis(x, 1, -1), scale, bias), -1, 1)

    assert_computes(jaxnorm.layer_norm(x, scale, bias, axis=1), moved, x, scale, bias)
