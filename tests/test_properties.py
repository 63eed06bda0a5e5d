"""Properties that hold for every input, tested over generated shapes, axes and values."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from program_error import analyse, assert_computes

import jaxnorm

pytestmark = pytest.mark.usefixtures("quick_to_compile")

FUNCTIONS = {
    "softmax": jaxnorm.softmax,
    "log_softmax": jaxnorm.log_softmax,
    "layer_norm": jaxnorm.layer_norm,
    "rms_norm": jaxnorm.rms_norm,
}
# Every new shape is compiled, so there are few examples and no deadline.
few = settings(max_examples=25, deadline=None, derandomize=True)

values = st.floats(-30, 30, width=32, allow_subnormal=False)
arrays = st.sampled_from([(2, 3), (4, 1, 5), (3, 4, 2), (7,)]).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=values)
)


@st.composite
def arrays_with_axis(draw):
    x = draw(arrays)
    return x, draw(st.integers(-x.ndim, x.ndim - 1))


@pytest.mark.parametrize("name", FUNCTIONS)
@few
@given(arrays_with_axis())
def test_axes(name, case):
    """An axis may be moved to the end, and two axes may be flattened to one."""
    x, axis = case
    function = FUNCTIONS[name]

    def moved(x):
        return jnp.moveaxis(function(jnp.moveaxis(x, axis, -1)), -1, axis)

    assert_computes(function(x, axis=axis), moved, x)
    rows = x.reshape(-1, x.shape[-1])

    def flat(x):
        return function(x.reshape(-1)).reshape(x.shape)

    assert_computes(function(rows, axis=(0, 1)), flat, rows)


@few
@given(arrays, st.integers(-64, 64), st.integers(-8, 8))
def test_functions_that_ignore_a_shift_or_a_power_of_two(x, shift, exponent):
    whole = np.round(x)  # so that whole + shift is exact
    np.testing.assert_array_equal(jaxnorm.softmax(whole + shift), jaxnorm.softmax(whole))
    shifted = jnp.asarray(whole + shift)
    for norm in (jaxnorm.log_softmax, lambda x: jaxnorm.layer_norm(x, epsilon=1.0)):
        assert_computes(norm(shifted), norm, whole, like=lambda _, f=norm: f(shifted))
    scaled = jaxnorm.rms_norm(x * np.float32(2.0**exponent), epsilon=0.0)
    plain = np.asarray(jaxnorm.rms_norm(x, epsilon=0.0))
    ordinary = np.abs(x).max(-1, keepdims=True) > 1e-10  # so that x^2 does not underflow
    np.testing.assert_array_equal(np.where(ordinary, scaled, 0), np.where(ordinary, plain, 0))


@few
@given(arrays, hnp.arrays(bool, (7,)))
def test_softmax_is_a_distribution(x, kept):
    """Elements where the mask is False have the probability 0, as if they were left out."""
    y = np.asarray(jaxnorm.softmax(x))
    assert (y >= 0).all()
    error = analyse(jaxnorm.softmax, x).error.sum(-1)
    assert np.all(np.abs(y.astype(np.float64).sum(-1) - 1) <= error)
    row = np.resize(x.reshape(-1), 7)
    y = np.asarray(jaxnorm.softmax(row, where=kept))
    assert (y[~kept] == 0).all()
    if kept.any():
        assert_computes(y[kept], jaxnorm.softmax, row[kept])
