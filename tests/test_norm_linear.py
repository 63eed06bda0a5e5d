"""rms_norm_linear: values and gradients against float64 NumPy; error messages."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from norm_linear_cases import MIXES, WIDE, NormLinear, operands, value_and_gradients
from pairs import pairwise
from program_error import assert_computes
from reference import assert_within, exact, rounding

import jaxnorm
from jaxnorm import rms_norm_linear

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

NAME = "rms_norm_linear"


def check_case(arrays, product, y_dtype, *, activation=None, scale_offset=0.0, **options):
    """Assert that every result and every gradient is within its bound."""
    x, cols = arrays["x"], arrays["x"].shape[-1]
    features = arrays["weight"].shape[1]
    rng = np.random.default_rng(1)
    d = jnp.asarray(rng.normal(size=(*x.shape[:-1], features)), y_dtype)
    given = {"activation": activation, "scale_offset": scale_offset, **options}
    results, gradients = value_and_gradients(arrays, d, options=tuple(given.items()))
    h, dh = x, 0.0
    if "residual" in arrays:
        h, dh = results[1], exact(jnp.cos(arrays["residual"])).reshape(-1, cols)
        assert h.dtype == arrays["residual"].dtype
        total = exact(x) + exact(arrays["residual"])
        assert_within(h, total, rounding(total, h.dtype) + 2.0**-24 * np.abs(total))
    # In both passes, XLA may use the sum h before h is rounded.
    excess = rounding(exact(h), h.dtype) if "residual" in arrays else np.zeros(h.shape)
    expected = NormLinear(
        excess=excess.reshape(-1, cols),
        x=exact(h).reshape(-1, cols),
        weight=exact(arrays["weight"]),
        gain=exact(arrays["scale"]) + scale_offset if "scale" in arrays else np.ones(cols),
        bias=exact(arrays["bias"]) if "bias" in arrays else np.zeros(features),
        d=exact(d).reshape(-1, features),
        x_dtype=h.dtype.name,
        weight_dtype=arrays["weight"].dtype.name,
        product_dtype=product,
        y_dtype=y_dtype,
        activation=activation,
    )
    assert results[0].dtype == y_dtype
    assert results[0].shape == d.shape
    assert_within(np.reshape(exact(results[0]), expected.y.shape), expected.y, expected.y_bound())
    bounds = expected.gradients()
    dx, dx_error = bounds.pop("x")
    # The norm's gradient may be rounded before or after h's cotangent is added.
    total = dx + dh
    error = dx_error + rounding(np.abs(total) + dx_error, h.dtype) * ("residual" in arrays)
    bounds["x"] = bounds["residual"] = total, error
    for name, gradient in gradients.items():
        value, error = bounds[name]
        assert gradient.dtype == arrays[name].dtype
        assert gradient.shape == arrays[name].shape
        error = error + rounding(np.abs(value) + error, gradient.dtype)
        assert_within(np.reshape(exact(gradient), value.shape), value, error)


@pytest.mark.parametrize(
    ("mix", "activation", "present", "shape"),
    pairwise(
        MIXES,
        [None, "relu", "gelu", "silu"],
        [("scale", "bias", "residual"), ("scale",), ("residual",), ("bias",)],
        [((), 70, 48, 24), ((3,), 5, 33, 130)],
    ),
    ids=str,
)
def test_values_and_gradients(mix, activation, present, shape):
    dtypes, product, y_dtype, is_asked_for = mix
    lead, rows, cols, features = shape
    arrays = operands(rows, cols, features, dtypes, lead=lead)
    arrays = {n: a for n, a in arrays.items() if n in ("x", "weight", *present)}
    options = {"dtype": y_dtype} if is_asked_for else {}
    check_case(
        arrays, product, y_dtype, activation=activation, scale_offset=0.5 * len(lead), **options
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("activation", ["leaky_relu", "gelu", None])
def test_float64(activation):
    dtypes, product, y_dtype, _ = WIDE
    check_case(operands(9, 8, 30, dtypes), product, y_dtype, activation=activation)


def test_it_is_the_composition():
    """Results and gradients are those of rms_norm followed by a matmul.

    This also holds for rows with NaN or infinity, and for rows of zeros.
    """
    a = operands(6, 16, 8)
    x = a["x"].at[1].set(jnp.nan).at[2, 3].set(jnp.inf).at[4].set(0)

    def composed(x, weight, scale, bias):
        return jax.nn.silu(jaxnorm.rms_norm(x, scale, save="input") @ weight + bias)

    def ours(x, weight, scale, bias):
        return rms_norm_linear(x, weight, scale, bias=bias, activation="silu")

    def both(f):
        def run(x, *parameters):
            y, vjp = jax.vjp(f, x, *parameters)
            dx, *_ = vjp(jnp.ones_like(y))
            # Parameters' gradients sum over rows with NaN, so all their elements are NaN.
            _, *others = vjp(jnp.where(jnp.isfinite(y), 1.0, 0.0))
            return y, dx, *others

        return run

    operands_of = x, a["weight"], a["scale"], a["bias"]
    results = both(ours)(*operands_of)
    assert_computes(results, both(composed), *operands_of, like=both(ours))
    assert np.isnan(results[0]).any(-1).tolist() == [False, True, True, False, False, False]


def test_shapes():
    """The operands may have 0 rows, 0 or 1 features, or only one axis."""
    for shape, features in (((0, 4), 3), ((2, 0, 4), 3), ((4,), 3), ((2, 1), 1), ((2, 4), 0)):
        x, weight = jnp.ones(shape), jnp.ones((shape[-1], features))

        def function(x, weight):
            y, h = rms_norm_linear(x, weight, residual=x, activation="gelu")
            return jnp.sum(y) + jnp.sum(h), y

        gradients, y = jax.jit(jax.grad(function, (0, 1), has_aux=True))(x, weight)
        assert y.shape == (*shape[:-1], features)
        assert [g.shape for g in gradients] == [x.shape, weight.shape]
        assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
@pytest.mark.parametrize("around", ["nothing", "jit", "grad", "vmap", "disable_jit"])
def test_the_kernel_on_a_cpu(around):
    """On a CPU, requesting the kernel raises the same error as for other kernels.

    The error is raised before Pallas could raise its own.
    """
    x, weight = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)

    def call(x):
        return rms_norm_linear(x, weight, jnp.ones(64), implementation="mosaic")

    functions = {
        "jit": jax.jit(call),
        "grad": jax.grad(lambda x: jnp.sum(call(x).astype(jnp.float32))),
        "vmap": jax.vmap(call),
    }
    message = (
        f"^{NAME}: implementation='mosaic' cannot run on cpu: its kernels are for NVIDIA GPUs; "
        "leave implementation out"
    )
    with jax.disable_jit(around == "disable_jit"), pytest.raises(ValueError, match=message):
        functions.get(around, call)(x)
