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
each = pytest.mark.parametrize("name", FUNCTIONS)
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


@each
@few
@given(arrays_with_axis())
def test_axis_equals_moveaxis(name, case):
    x, axis = case
    function = FUNCTIONS[name]

    def moved(x):
        return jnp.moveaxis(function(jnp.moveaxis(x, axis, -1)), -1, axis)

    assert_computes(function(x, axis=axis), moved, x)


@each
@few
@given(arrays)
def test_two_axes_equal_one_flattened(name, x):
    function = FUNCTIONS[name]
    x = x.reshape(-1, x.shape[-1])

    def flat(x):
        return function(x.reshape(-1)).reshape(x.shape)

    assert_computes(function(x, axis=(0, 1)), flat, x)


@each
@few
@given(arrays, st.randoms(use_true_random=False))
def test_rows_permute(name, x, random):
    x = x.reshape(-1, x.shape[-1])
    order = list(range(x.shape[0]))
    random.shuffle(order)
    function = FUNCTIONS[name]
    np.testing.assert_array_equal(function(x[np.array(order)]), function(x)[np.array(order)])


@few
@given(arrays, st.integers(-64, 64))
def test_softmax_ignores_a_shift(x, shift):
    x = np.round(x)  # so that x + shift is exact
    np.testing.assert_array_equal(jaxnorm.softmax(x + shift), jaxnorm.softmax(x))
    shifted = jnp.asarray(x + shift)
    y = jaxnorm.log_softmax(shifted)
    assert_computes(y, jaxnorm.log_softmax, x, like=lambda _: jaxnorm.log_softmax(shifted))


@few
@given(arrays)
def test_softmax_is_a_distribution(x):
    y = np.asarray(jaxnorm.softmax(x))
    assert (y >= 0).all()
    error = analyse(jaxnorm.softmax, x).error.sum(-1)
    assert np.all(np.abs(y.astype(np.float64).sum(-1) - 1) <= error)

    def of_log(x):
        return jnp.exp(jaxnorm.log_softmax(x))

    assert_computes(of_log(x), jaxnorm.softmax, x, like=of_log)


@few
@given(arrays, st.integers(-8, 8))
def test_rms_norm_ignores_a_power_of_two(x, exponent):
    scaled = jaxnorm.rms_norm(x * np.float32(2.0**exponent), epsilon=0.0)
    plain = np.asarray(jaxnorm.rms_norm(x, epsilon=0.0))
    ordinary = np.abs(x).max(-1, keepdims=True) > 1e-10  # so that x^2 does not underflow
    np.testing.assert_array_equal(np.where(ordinary, scaled, 0), np.where(ordinary, plain, 0))


@few
@given(arrays, st.integers(-64, 64))
def test_layer_norm_ignores_a_shift(x, shift):
    x = np.round(x)

    def norm(x):
        return jaxnorm.layer_norm(x, epsilon=1.0)

    shifted = jnp.asarray(x + shift)
    assert_computes(norm(shifted), norm, x, like=lambda _: norm(shifted))


@few
@given(arrays, hnp.arrays(bool, (7,)))
def test_where_equals_leaving_out(x, kept):
    row = np.resize(x.reshape(-1), 7)
    y = np.asarray(jaxnorm.softmax(row, where=kept))
    assert (y[~kept] == 0).all()
    if kept.any():
        assert_computes(y[kept], jaxnorm.softmax, row[kept])
