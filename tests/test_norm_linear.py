"""rms_norm_linear: values and gradients against plain JAX; error messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import scalar
from norm_linear_cases import operands, plain
from pairs import pairwise
from program_error import assert_computes

import jaxnorm
from jaxnorm import rms_norm_linear

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

NAME = "rms_norm_linear"
# Each entry has four items: the dtypes of x, residual, weight, scale and bias; the dtype of the
# matmul; the dtype of y; and a boolean. If it is True, the call passes the dtype of y as `dtype`.
MIXES = [
    *(((dtype,) * 5, dtype, dtype, False) for dtype in ("bfloat16", "float32")),
    (("bfloat16", "float32", "bfloat16", "float32", "float32"), "bfloat16", "bfloat16", False),
    (("float16", "float16", "float16", "float32", "float16"), "float16", "float32", True),
    (("float32", "float32", "float32", "float32", "float32"), "bfloat16", "bfloat16", True),
    (("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16"), "float32", "float32", False),
]
WIDE = (("float32", "float64", "float64", "float32", "float32"), "float64", "float64", False)


def check(mix, shape, present, activation, **options):
    """Assert that values and gradients are those of plain JAX, in the dtypes of `mix`."""
    dtypes, product, y_dtype, is_asked_for = mix
    lead, *sizes = shape
    arrays = operands(*sizes, dtypes, lead=lead)
    arrays = {n: a for n, a in arrays.items() if n in ("x", "weight", *present)}
    options |= {"activation": activation}

    def of(function, **given):
        def run(arrays):
            return function(**arrays, **options, **given)

        return lambda arrays: (run(arrays), jax.grad(scalar(run))(arrays))

    ours = of(rms_norm_linear, **({"dtype": y_dtype} if is_asked_for else {}))
    theirs = of(plain, product=product, dtype=y_dtype)
    results = jax.jit(ours)(arrays)
    assert jax.tree.map(lambda a: a.dtype, results) == jax.tree.map(
        lambda a: a.dtype, jax.eval_shape(theirs, arrays)
    )
    assert_computes(results, theirs, arrays, like=ours)


@pytest.mark.parametrize(
    ("mix", "activation", "present", "shape"),
    pairwise(
        MIXES,
        [None, "sigmoid", "gelu", "silu"],
        [("scale", "bias", "residual"), ("scale",), ("residual",), ("bias",)],
        [((), 70, 48, 24), ((3,), 5, 33, 130)],
    ),
    ids=str,
)
def test_values_and_gradients(mix, activation, present, shape):
    check(mix, shape, present, activation, scale_offset=0.5 * len(shape[0]))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("activation", ["leaky_relu", "relu", None])
def test_float64(activation):
    check(WIDE, ((), 9, 8, 30), ("scale", "bias", "residual"), activation)


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
