"""Values and gradients of layer_norm and rms_norm against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from program_error import assert_computes
from reference import DTYPES, Norm, assert_within, exact

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

# x, scale and bias, output
MIXES = [
    *((d, d, d) for d in DTYPES),
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "float32", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float16", "bfloat16", "float32"),
]
AXES = [-1, 0, (1, 2), (0, -1)]
PARAMETERS = ["scale and bias", "scale", "bias", "none"]


def normal(shape, dtype, seed, scale=1.0, shift=0.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * scale + shift, dtype)


def to_rows(array, axes):
    """An independent path to (rows, cols): numpy moves the axes one call at a time."""
    array = np.moveaxis(exact(array), axes, range(-len(axes), 0))
    return array.reshape(-1, int(np.prod(array.shape[array.ndim - len(axes) :])))


def check(x, scale, bias, d, *, axis=-1, subtract_mean, save, implementation, y_dtype, **options):
    function = jaxnorm.layer_norm if subtract_mean else jaxnorm.rms_norm

    def call(x, scale, bias):
        return function(
            x,
            scale,
            bias=bias,
            axis=axis,
            save=save,
            dtype=y_dtype,
            implementation=implementation,
            **options,
        )

    y, vjp = jax.vjp(call, x, scale, bias)
    dx, dscale, dbias = vjp(d)

    axes = tuple(sorted(a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,))))
    cols = to_rows(x, axes).shape[1]
    offset = options.get("scale_offset", 0.0)
    ref = Norm(
        x=to_rows(x, axes),
        gain=np.ones(cols) if scale is None else exact(scale).ravel() + offset,
        bias=np.zeros(cols) if bias is None else exact(bias).ravel(),
        d=to_rows(d, axes),
        subtract_mean=subtract_mean,
        epsilon=options.get("epsilon", 1e-6),
        saved=save if options.get("activation") is None else "input",
        x_dtype=x.dtype.name,
        y_dtype=y_dtype,
        activation=options.get("activation"),
    )
    dx_bound, dscale_bound, dbias_bound = ref.gradient_bounds()
    assert (y.dtype, dx.dtype) == (y_dtype, x.dtype)
    assert_within(to_rows(y, axes), ref.y, ref.y_bound())
    assert_within(to_rows(dx, axes), ref.dx, dx_bound)
    for parameter, grad, expected, bound in [
        (scale, dscale, ref.dscale, dscale_bound),
        (bias, dbias, ref.dbias, dbias_bound),
    ]:
        if parameter is None:
            assert grad is None
        else:
            assert (grad.shape, grad.dtype) == (parameter.shape, parameter.dtype)
            stored = float(jnp.finfo(grad.dtype).eps) / 2 * np.abs(expected) + 2.0**-24
            assert_within(exact(grad).ravel(), expected, bound + stored)


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("x_dtype", "p_dtype", "y_dtype"), MIXES)
@pytest.mark.parametrize("subtract_mean", [True, False], ids=["layer_norm", "rms_norm"])
def test_values_and_gradients(subtract_mean, x_dtype, p_dtype, y_dtype, axis, save, implementation):
    shape = (64, 8, 40)  # over any of AXES enough rows for every kernel
    axes = axis if isinstance(axis, tuple) else (axis,)
    normalised = tuple(shape[a] for a in sorted(a % 3 for a in axes))
    check(
        normal(shape, x_dtype, 0, shift=0.5),
        normal(normalised, p_dtype, 1, scale=0.3, shift=1.0),
        normal(normalised, p_dtype, 2, scale=0.3) if subtract_mean else None,
        normal(shape, y_dtype, 3),
        axis=axis,
        subtract_mean=subtract_mean,
        save=save,
        implementation=implementation,
        y_dtype=y_dtype,
    )


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("y_dtype", ["float32", "bfloat16"])
def test_layer_norm_parameters(parameters, save, y_dtype, implementation):
    x = normal((70, 40), "float32", 0)
    check(
        x,
        normal((40,), "float32", 1) if "scale" in parameters else None,
        normal((40,), "float32", 2) if "bias" in parameters else None,
        normal((70, 40), y_dtype, 3),
        subtract_mean=True,
        save=save,
        implementation=implementation,
        y_dtype=y_dtype,
    )


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize(("rows", "cols"), [(70, 40), (70, 1024)])
def test_rms_norm_with_a_bias(rows, cols, save, scale, implementation):
    check(
        normal((rows, cols), "float32", 0),
        normal((cols,), "float32", 1, scale=0.3, shift=1.0) if scale else None,
        normal((cols,), "float32", 2, scale=0.3),
        normal((rows, cols), "bfloat16", 3),
        subtract_mean=False,
        save=save,
        implementation=implementation,
        y_dtype="bfloat16",
    )


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("y_dtype", ["float32", "bfloat16"])
def test_rms_norm_without_scale(save, y_dtype, implementation):
    check(
        normal((70, 40), "float32", 0),
        None,
        None,
        normal((70, 40), y_dtype, 3),
        subtract_mean=False,
        save=save,
        implementation=implementation,
        y_dtype=y_dtype,
    )


@refused.expect(refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("subtract_mean", [True, False], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("options", [{"scale_offset": 1.0}, {"epsilon": 0.0}, {"epsilon": 0.1}])
def test_options(options, subtract_mean, save, implementation):
    check(
        normal((70, 64), "bfloat16", 0),
        normal((64,), "float32", 1, scale=0.1, shift=0.2),
        normal((64,), "float32", 2, scale=0.1) if subtract_mean else None,
        normal((70, 64), "bfloat16", 3),
        subtract_mean=subtract_mean,
        save=save,
        implementation=implementation,
        y_dtype="bfloat16",
        **options,
    )


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS)
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("cols", [2, 3, 127, 1000, 4095])
@pytest.mark.parametrize("subtract_mean", [True, False], ids=["layer_norm", "rms_norm"])
def test_widths(subtract_mean, cols, save, implementation):
    check(
        normal((5, cols), "float32", 0),
        normal((cols,), "float32", 1, shift=2.0),
        normal((cols,), "float32", 2) if subtract_mean else None,
        normal((5, cols), "bfloat16", 3),
        subtract_mean=subtract_mean,
        save=save,
        implementation=implementation,
        y_dtype="bfloat16",
    )


def test_one_column():
    """x_hat of a single value is its sign for RMSNorm and 0 for LayerNorm: no gradient to x."""
    x = normal((5, 1), "float32", 0, shift=3.0)
    signs = exact(x) / np.sqrt(exact(x) ** 2 + 1e-6)
    assert_computes(jaxnorm.rms_norm(x), jaxnorm.rms_norm, x, expected=signs)
    np.testing.assert_array_equal(jaxnorm.layer_norm(x), 0)
    for function in (jaxnorm.rms_norm, jaxnorm.layer_norm):
        gradient = jax.grad(lambda x, f=function: f(x).sum())
        assert_computes(gradient(x), gradient, x)


@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.usefixtures("x64")
def test_float64(save):
    x, d = normal((7, 30), "float64", 0), normal((7, 30), "float64", 3)
    scale, bias = normal((30,), "float64", 1), normal((30,), "float64", 2)
    check(
        x,
        scale,
        bias,
        d,
        subtract_mean=True,
        save=save,
        implementation=None,
        y_dtype="float64",
    )


@pytest.mark.usefixtures("x64")
def test_reference_is_the_derivative():
    """The numpy formulas that the bounds are taken around are what autodiff in float64 gives."""
    x, d = normal((7, 30), "float64", 0), normal((7, 30), "float64", 3)
    scale, bias = normal((30,), "float64", 1), normal((30,), "float64", 2)

    def plain(x, scale, bias):
        mean = x.mean(-1, keepdims=True)
        variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
        return (x - mean) / jnp.sqrt(variance + 1e-6) * scale + bias

    def both(x, scale, bias, d):
        y, vjp = jax.vjp(plain, x, scale, bias)
        return y, *vjp(d)

    ref = Norm(*map(exact, (x, scale, bias, d)), True, 1e-6, "input", "float64", "float64")
    expected = (ref.y, ref.dx, ref.dscale, ref.dbias)
    assert_computes(both(x, scale, bias, d), both, x, scale, bias, d, expected=expected)


def test_epsilon_and_axis_defaults_are_flax_like():
    x = normal((3, 8), "float32", 0, scale=1e-3)
    expected = exact(x) / np.sqrt(np.mean(exact(x) ** 2, -1, keepdims=True) + 1e-6)
    assert_computes(jaxnorm.rms_norm(x), jaxnorm.rms_norm, x, expected=expected)


@refused.expect(refused.EMPTY)
@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3), (0,)])
def test_empty(shape, save, implementation):
    x = jnp.zeros(shape, jnp.float32)
    scale = bias = jnp.ones(shape[-1:], jnp.bfloat16)
    y, vjp = jax.vjp(
        lambda *a: jaxnorm.layer_norm(*a, save=save, implementation=implementation), x, scale, bias
    )
    dx, dscale, dbias = vjp(y)
    assert y.shape == dx.shape == shape
    np.testing.assert_array_equal(dscale, jnp.zeros_like(scale))
    np.testing.assert_array_equal(dbias, jnp.zeros_like(bias))


def test_one_dimensional_input(implementation):
    x, scale = normal((50,), "float32", 0), normal((50,), "float32", 1)
    np.testing.assert_array_equal(
        jaxnorm.rms_norm(x, scale, implementation=implementation),
        jaxnorm.rms_norm(x[None], scale, implementation=implementation)[0],
    )
