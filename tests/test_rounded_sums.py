"""y is the norm of the rounded sum h that is returned, not of the unrounded sum.

XLA may drop a cast of h to 16 bits that is followed by a cast back. The tests ensure that this does
not change y.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnorm

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SHAPE = (64, 256)
NAMES = ["add_rms_norm", "rms_norm_add_rms_norm"]
each_name = pytest.mark.parametrize("name", NAMES)
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
each_platform = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
)


def operands(name, dtype):
    """Return x, the residual and the scale. The dtype cannot represent the exact sum h.

    The squares of the rounded h have an exact sum, so y does not depend on the order of summation.
    """
    rng = np.random.default_rng(0)
    unit = jnp.finfo(dtype).eps
    h = 1 + rng.integers(0, 16, SHAPE) / 16
    addend = rng.uniform(0.2, 0.4, SHAPE) * rng.choice([-1, 1], SHAPE) * unit
    # The test needs an addend that is lost in rounding: h + addend must be rounded to h. The addend
    # is smaller than half the spacing of floats between 1 and 2, so it is lost if h + addend is in
    # this range. Below 1, floats are closer together, and the addend might not be lost.
    #
    # h itself is between 1 and 2. The sum is below 1 only if h is 1 and the addend is negative. In
    # this case, h is increased.
    h = h * (1 + (addend < 0) * (h == 1) / 16)
    if name == "add_rms_norm":
        return jnp.asarray(addend, dtype), jnp.asarray(h, dtype), None
    # x consists of ones, so each row of its norm equals the scale. The function adds this norm to
    # the residual.
    scale = np.abs(addend[0])
    return jnp.ones(SHAPE, dtype), jnp.asarray(h, dtype), jnp.asarray(scale, "float32")


@each_platform
@each_dtype
@each_name
def test_y_is_the_norm_of_h(name, dtype, platform):
    with jax.default_device(jax.devices(platform)[0]):
        x, residual, scale = operands(name, dtype)
        function = functools.partial(getattr(jaxnorm, name), implementation="xla")
        y, h = jax.jit(function)(x, residual, scale)
        rms_norm = jax.jit(functools.partial(jaxnorm.rms_norm, implementation="xla"))
        np.testing.assert_array_equal(h, residual)
        np.testing.assert_array_equal(y, rms_norm(h))
        # The norm of the unrounded sum would differ.
        addend = x.astype("float32") * (1 if scale is None else scale)
        other = rms_norm(residual.astype("float32") + addend).astype(dtype)
        assert np.mean(np.asarray(y != other)) > 0.05


@each_dtype
@pytest.mark.parametrize(
    ("name", "roundings"), [("add_rms_norm", (1, 2)), ("rms_norm_add_rms_norm", (1, 1))]
)
def test_the_rounding_is_in_the_program(name, roundings, dtype):
    """On platforms where XLA may drop casts, the program rounds explicitly.

    On a CPU, XLA never drops casts, and a cast is faster than an explicit rounding. So the program
    has only casts there.
    """
    x, narrow = (jax.ShapeDtypeStruct(SHAPE, each) for each in ("float32", dtype))
    function = functools.partial(getattr(jaxnorm, name), dtype=dtype, implementation="xla")

    def both(x, residual, *cotangents):
        results, vjp = jax.vjp(function, x, residual)
        return results, vjp(cotangents)

    def count(function, platform, operands):
        text = jax.jit(function).trace(x, *operands).lower(lowering_platforms=(platform,)).as_text()
        return text.count("stablehlo.reduce_precision")

    for platform in ("cuda", "tpu", "cpu"):
        found = count(function, platform, [narrow]), count(both, platform, [narrow] * 3)
        assert found == ((0, 0) if platform == "cpu" else roundings)


@pytest.mark.parametrize(("wide", "narrow"), [("float32", "float16"), ("float64", "float32")])
def test_small_sums_are_not_flushed(wide, narrow, x64):
    """Subnormal numbers are rounded like others, and not flushed to 0."""
    from jaxnorm_kernels.xla.norm import _rounded

    least = float(jnp.finfo(narrow).smallest_subnormal)
    v = jnp.asarray(least * np.array([0.4, 0.6, 1.2, 2.5, -3.5, 100.3, 1e4]), wide)
    expected = np.asarray(v).astype(narrow).astype(wide)
    np.testing.assert_array_equal(jax.jit(_rounded, static_argnums=1)(v, narrow), expected)
