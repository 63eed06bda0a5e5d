"""First and second derivatives, forward and reverse, against finite differences, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from jax.test_util import check_grads
from program_error import assert_computes
from reference import assert_within, exact, unit_roundoff

import jaxnorm

pytestmark = pytest.mark.usefixtures("x64", "quick_to_compile")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def check(function, *operands):
    check_grads(function, operands, order=2)


@refused.expect(refused.FLOAT64)
@pytest.mark.parametrize("where", [None, "some"])
@pytest.mark.parametrize("axis", [-1, (0, 2)])
def test_softmax(axis, where, implementation):
    x = normal(3, 4, 5)
    mask = None if where is None else x > -0.5
    check(lambda x: jaxnorm.softmax(x, axis, mask, implementation=implementation), x)


@refused.expect(refused.FLOAT64)
@pytest.mark.parametrize("where", [None, "some"])
@pytest.mark.parametrize("axis", [-1, (0, 2)])
def test_log_softmax(axis, where, implementation):
    x = normal(3, 4, 5)
    mask = None if where is None else x > -0.5
    kept = True if mask is None else mask

    def finite(x):
        y = jaxnorm.log_softmax(x, axis, mask, implementation=implementation)
        return jnp.where(kept, y, 0)

    check(finite, x)


@refused.expect(refused.FLOAT64)
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("axis", [-1, (0, 2)])
def test_layer_norm(axis, save, implementation):
    x = normal(3, 4, 5)
    shape = (5,) if axis == -1 else (3, 5)
    scale, bias = normal(*shape, seed=1), normal(*shape, seed=2)

    def function(x, scale, bias):
        return jaxnorm.layer_norm(
            x, scale, bias, axis=axis, save=save, implementation=implementation
        )

    check(function, x, scale, bias)
    check(lambda x: function(x, None, None), x)
    check(lambda x, scale: function(x, scale, None), x, scale)


@refused.expect(refused.FLOAT64)
@pytest.mark.parametrize(
    ("save", "scale"),
    [("output", "ordinary"), ("input", "ordinary"), ("input", "zeros"), ("input", "some zeros")],
)
def test_rms_norm(scale, save, implementation):
    x, w = normal(4, 6), normal(6, seed=1)
    w = {"ordinary": w, "zeros": 0 * w, "some zeros": w.at[::2].set(0)}[scale]
    check(lambda x, w: jaxnorm.rms_norm(x, w, save=save, implementation=implementation), x, w)
    check(
        lambda x, w: jaxnorm.rms_norm(
            x, w, scale_offset=1.0, save=save, implementation=implementation
        ),
        x,
        w,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_second_derivative_at_a_floored_scale_is_loud(dtype):
    """First derivatives are right at scale 0; second ones are not in y, and say so with NaN."""
    x, w = normal(4, 6).astype(dtype), normal(6, seed=1).at[2].set(0)

    def loss(w, save):
        return jnp.sum(jaxnorm.rms_norm(x, w, save=save).astype("float64") ** 3)

    ours, theirs = (lambda w, save=save: jax.grad(loss)(w, save) for save in ("output", "input"))
    others = np.arange(6) != 2
    assert_computes(ours(w)[others], lambda w: theirs(w)[others], w, like=lambda w: ours(w)[others])
    # 3 y^2 x_hat of four rows, where |x_hat| <= sqrt(6) and y = 2^-60 x_hat.
    assert np.abs(ours(w)[2]) <= 3 * 4 * 6**1.5 * 2.0**-120
    penalty = jax.grad(lambda w, save: jnp.sum(jax.grad(loss)(w, save) ** 2))
    np.testing.assert_array_equal(np.isnan(penalty(w, "output")), np.arange(6) == 2)
    assert np.isfinite(penalty(w, "input")).all()


@pytest.mark.parametrize("save", ["output", "input"])
def test_one_hot_rows(save):
    """|x_hat| sits on its bound sqrt(N) there, where the clip must not cut derivatives."""
    x = jnp.eye(4) * 3
    check(lambda x: jaxnorm.rms_norm(x, jnp.full(4, 0.7), save=save, epsilon=1e-3), x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_second_derivative_through_a_rounded_bias(dtype):
    """The bias is rounded to the output's dtype, yet its derivative is that of the identity."""
    x, d = normal(3, 8).astype(jnp.float32), normal(3, 8, seed=1).astype(jnp.float32)
    for bias in (jnp.full(8, 1e-5, jnp.float32), jnp.full(8, 1.001, jnp.float32)):

        def loss(b):
            y = jaxnorm.layer_norm(x, None, b, dtype=dtype).astype(jnp.float32)
            return jnp.sum(d * y**2)

        hessian = jax.jacrev(jax.grad(loss))(bias)
        # The cotangent 2 d of y is stored in y's dtype before the rows are summed.
        bound = unit_roundoff(dtype) * np.sum(2 * np.abs(d), 0).max()
        assert_within(hessian, np.diag(2 * exact(d).sum(0)), bound)


@refused.expect(refused.FLOAT64)
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rms_norm_rope(interleaved, save, implementation):
    """Of the tables, too: any numbers, of which no pair is near 0."""
    x, scale = normal(3, 2, 6), 1 + 0.3 * normal(6, seed=1)
    cos, sin = 1.5 + 0.3 * normal(3, 1, 2, seed=2), normal(3, 1, 2, seed=3)
    options = {"interleaved": interleaved, "save": save, "implementation": implementation}
    check(lambda *a: jaxnorm.rms_norm_rope(*a, **options), x, scale, cos, sin)


@refused.expect(refused.FLOAT64)
@pytest.mark.parametrize("save", ["output", "input"])
def test_add_layer_norm_with_a_gate(save, implementation):
    x, residual = normal(3, 2, 6), normal(3, 2, 6, seed=1)
    scale, bias, gate = 1 + 0.3 * normal(6, seed=2), normal(6, seed=3), normal(3, 1, 6, seed=4)
    options = {"save": save, "implementation": implementation}

    def function(*operands):
        *others, gate = operands
        return jaxnorm.add_layer_norm(*others, gate=gate, **options)

    for used in (0, 1):
        check(lambda *a, used=used: function(*a)[used], x, residual, scale, bias, gate)


@refused.expect(refused.FLOAT64)
@pytest.mark.parametrize("activation", ["silu", "gelu", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_rms_norm_gated(norm_before_gate, activation, implementation):
    """Of the activations that have two derivatives everywhere."""
    x, gate, scale = normal(3, 2, 6), normal(3, 2, 6, seed=1), 1 + 0.3 * normal(6, seed=2)
    options = {"norm_before_gate": norm_before_gate, "activation": activation}
    options["implementation"] = implementation
    check(lambda *a: jaxnorm.rms_norm_gated(*a, **options), x, gate, scale)
