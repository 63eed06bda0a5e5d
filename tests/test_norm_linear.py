"""rms_norm_linear: values and gradients against float64 numpy; errors; transformations."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from norm_linear_cases import NormLinear, operands
from pairs import pairwise
from reference import assert_within, exact, rounding
from test_configurations import CONFIGURATIONS
from test_forward_mode import DERIVATIVES, check, transformed

import jaxnorm
from jaxnorm import rms_norm_linear

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

NAME = "rms_norm_linear"
# x, residual, weight, scale, bias; the product's; y's, and whether it is asked for
MIXES = [
    *(((dtype,) * 5, dtype, dtype, False) for dtype in ("bfloat16", "float32")),
    (("bfloat16", "float32", "bfloat16", "float32", "float32"), "bfloat16", "bfloat16", False),
    (("float16", "float16", "float16", "float32", "float16"), "float16", "float32", True),
    (("float32", "float32", "float32", "float32", "float32"), "bfloat16", "bfloat16", True),
    (("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16"), "float32", "float32", False),
]
WIDE = (("float32", "float64", "float64", "float32", "float32"), "float64", "float64", False)


@functools.partial(jax.jit, static_argnames=("options",))
def value_and_gradients(arrays, d, options=()):
    """The results, and gradients for the cotangent d of y and d's cosine of h."""

    def function(arrays):
        arrays = dict(arrays)
        return rms_norm_linear(arrays.pop("x"), arrays.pop("weight"), **arrays, **dict(options))

    results, vjp = jax.vjp(function, arrays)
    if "residual" not in arrays:
        return (results,), vjp(d)[0]
    return results, vjp((d, jnp.cos(arrays["residual"])))[0]


def check_case(arrays, product, y_dtype, *, activation=None, scale_offset=0.0, **options):
    """Every result and gradient within its bound."""
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
    # XLA may take the sum as it was before it was rounded, forward and backward.
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
    # The norm's may be rounded before h's own cotangent is added, and after it.
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
    """Also where the arithmetic leaves the numbers: rows of NaN, of inf, and of 0."""
    a = operands(6, 16, 8)
    x = a["x"].at[1].set(jnp.nan).at[2, 3].set(jnp.inf).at[4].set(0)

    def composed(x, weight, scale, bias):
        return jax.nn.silu(jaxnorm.rms_norm(x, scale, save="input") @ weight + bias)

    def ours(x, weight, scale, bias):
        return rms_norm_linear(x, weight, scale, bias=bias, activation="silu")

    def both(f):
        parameters = a["weight"], a["scale"], a["bias"]
        y, vjp = jax.vjp(f, x, *parameters)
        dx, *_ = vjp(jnp.ones_like(y))
        # Those of parameters are NaN as a whole.
        _, *others = vjp(jnp.where(jnp.isfinite(y), 1.0, 0.0))
        return y, dx, *others

    for p, q in zip(both(ours), both(composed)):
        np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-5)
    assert np.isnan(both(ours)[0]).any(-1).tolist() == [False, True, True, False, False, False]


def test_shapes():
    """No rows, no features, one of each; x of one axis."""
    for shape, features in (((0, 4), 3), ((2, 0, 4), 3), ((4,), 3), ((2, 1), 1), ((2, 4), 0)):
        x, weight = jnp.ones(shape), jnp.ones((shape[-1], features))

        def function(x, weight):
            y, h = rms_norm_linear(x, weight, residual=x, activation="gelu")
            return jnp.sum(y) + jnp.sum(h), y

        gradients, y = jax.jit(jax.grad(function, (0, 1), has_aux=True))(x, weight)
        assert y.shape == (*shape[:-1], features)
        assert [g.shape for g in gradients] == [x.shape, weight.shape]
        assert all(np.isfinite(g).all() for g in gradients)


ERRORS = [
    ({"x": [1.0]}, TypeError, r"x is a list; expected an array"),
    ({"x": jnp.ones((2, 3), int)}, TypeError, r"x has dtype int32.*astype"),
    ({"x": jnp.ones(())}, ValueError, r"x has shape \(\); expected \(..., d\).*x\[None\]"),
    ({"weight": jnp.ones((4, 5))}, ValueError, r"\(4, 5\); expected \(3, n\).*weight.T"),
    ({"weight": jnp.ones(3)}, ValueError, r"weight has shape \(3,\); expected \(3, n\)"),
    ({"scale": jnp.ones((1, 3))}, ValueError, r"\(1, 3\); expected \(3,\).*last axis of x"),
    ({"bias": jnp.ones(3)}, ValueError, r"bias has shape \(3,\); expected \(5,\), a number for"),
    ({"residual": jnp.ones(3)}, ValueError, r"residual has shape \(3,\); expected \(2, 3\)"),
    ({"activation": "tanh"}, ValueError, r"'tanh'; expected one of 'relu', .* or None; apply"),
    ({"activation": jnp.tanh}, ValueError, r"activation=.*; expected one of 'relu'"),
    ({"epsilon": -1.0}, ValueError, r"epsilon=-1.0; expected a finite number of at least 0"),
    ({"scale_offset": "one"}, TypeError, r"scale_offset is a str; expected a number"),
    ({"dtype": "int8"}, TypeError, r"dtype=int8; expected one of bfloat16"),
    ({"implementation": "cuda"}, ValueError, r"expected one of 'xla'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), ERRORS, ids=lambda v: str(v)[:20])
def test_errors(arguments, error, message):
    given = {"x": jnp.ones((2, 3)), "weight": jnp.ones((3, 5))}
    with pytest.raises(error, match=f"^{NAME}: .*{message}"):
        rms_norm_linear(**{**given, **arguments})


def test_which_implementation_runs():
    """That of its norm, forward and backward; a kernel of norm and product is asked for by name."""
    plan = jaxnorm.implementation_for(
        NAME,
        (8192, 4096),
        "bfloat16",
        weight=jax.ShapeDtypeStruct((4096, 1024), "bfloat16"),
        activation="gelu",
        platform="cuda",
    )
    assert (plan.forward.name, plan.backward.name) == ("mosaic", "mosaic")
    assert plan == jaxnorm.implementation_for("rms_norm", (8192, 4096), "bfloat16", platform="cuda")
    named = functools.partial(jaxnorm.implementation_for, NAME, (8192, 4096), platform="cuda")
    by_name = named("bfloat16", implementation="mosaic")
    assert (by_name.forward.name, by_name.forward.reason) == ("mosaic", "asked for by name")
    assert by_name.backward == plan.backward
    assert named("bfloat16", implementation="xla").backward.name == "xla"
    with pytest.raises(
        ValueError,
        match=r"rms_norm_linear: .* cannot run the forward of \(2, 8\): its products",
    ):
        rms_norm_linear(jnp.ones((2, 8)), jnp.ones((8, 4)), implementation="mosaic")
    with pytest.raises(ValueError, match=f"{NAME}: .*its products are of bfloat16 or float16"):
        named("float32", implementation="mosaic")
    with pytest.raises(ValueError, match=f"{NAME}: activation='tanh'"):
        jaxnorm.implementation_for(NAME, (8, 8), "float32", activation="tanh")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
@pytest.mark.parametrize("around", ["nothing", "jit", "grad", "vmap", "disable_jit"])
def test_the_kernel_on_a_cpu(around):
    """The sentence of other kernels, before Pallas has one."""
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


# ---------------------------------------------------------------------------------- derivatives


def matrix(s, b):
    """A weight that depends on both."""
    return jnp.outer(jnp.sin(s), jnp.cos(b)) / s.size


def plain(x, s, b):
    h = x + jnp.sin(x) / 2
    n = h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-6) * s
    return jax.nn.gelu(n @ matrix(s, b) + b) + h / 4


def ours(x, s, b, **options):
    y, h = rms_norm_linear(
        x, matrix(s, b), s, bias=b, residual=jnp.sin(x) / 2, activation="gelu", **options
    )
    return y + h / 4


MIXTURES = [
    *("jvp", "transpose of linearize", "transpose of vjp", "forward over reverse"),
    *("reverse over reverse", "frozen parameters", "per-example gradients"),
    "forward over reverse of a batch of parameters",
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("derivative", MIXTURES)
def test_derivatives(derivative):
    check(DERIVATIVES[derivative], plain, ours, "xla")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("transformation", ["scan", "save_policy", "vmap"])
def test_under_transformations(transformation):
    check(transformed("forward over reverse", transformation), plain, ours, "xla")


@pytest.mark.usefixtures("x64")
def test_outside_jit():
    arrays = operands(3, 4, 5, "float64")
    x, weight = arrays["x"], arrays["weight"]

    def function(x, weight):
        return jnp.sum(jnp.sin(rms_norm_linear(x, weight, activation="relu")))

    eager = jax.value_and_grad(function, (0, 1))(x, weight)
    with jax.disable_jit():
        one_by_one = jax.value_and_grad(function, (0, 1))(x, weight)
    compiled = jax.jit(jax.value_and_grad(function, (0, 1)))(x, weight)
    for a, b, c in zip(*map(jax.tree.leaves, (eager, one_by_one, compiled))):
        np.testing.assert_allclose(a, c, rtol=1e-12)
        np.testing.assert_allclose(b, c, rtol=1e-12)


@pytest.mark.parametrize(
    "configuration", ["x64", "strict dtype promotion", "rank promotion raises", "leaks raise"]
)
def test_configurations(configuration):
    """Of JAX, that change how code is traced."""
    dtypes, _, y_dtype, _ = MIXES[2]
    arrays = operands(6, 16, 8, dtypes)
    d = jnp.ones((6, 8), y_dtype)

    def run():
        return jax.tree.leaves(value_and_gradients(arrays, d, options=(("activation", "silu"),)))

    expected = run()
    with CONFIGURATIONS[configuration]():
        got = run()
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert_within(ours, exact(theirs), 2.0**-6 * np.abs(exact(theirs)).max())


def test_a_program_for_cuda():
    """Its norm is a kernel there: forward, again backward for the product, and its backward.

    16-bit operands make 16-bit products, whose results are rounded where their cotangents are.
    """
    shapes = {"x": (8192, 4096), "weight": (4096, 1024), "scale": (4096,), "bias": (1024,)}
    arrays = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}

    def loss(arrays):
        arrays = dict(arrays)
        y = rms_norm_linear(arrays.pop("x"), arrays.pop("weight"), **arrays, activation="silu")
        return jnp.sum(y.astype("float32") ** 2)

    traced = jax.jit(jax.grad(loss)).trace(arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
    products = [line.rpartition(" : ")[2] for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all(line.partition("->")[0].count("bf16") == 2 for line in products)


@pytest.mark.parametrize("bias", [None, "bfloat16"])
def test_the_product_rounds_its_sums_to_y(bias):
    """Itself, in no pass of its own; with a bias the sums stay float32."""
    shapes = {"x": (8, 64), "weight": (64, 32), **({"bias": (32,)} if bias else {})}
    arrays = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    text = jax.jit(lambda arrays: rms_norm_linear(**arrays)).trace(arrays).lower().as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert product.rpartition("tensor<8x32x")[2].startswith("f32" if bias else "bf16")


def test_checkify_sees_a_nan():
    x, weight = jnp.full((2, 4), jnp.nan), jnp.ones((4, 3))
    error, _ = checkify.checkify(rms_norm_linear, errors=checkify.float_checks)(x, weight)
    assert "nan generated by primitive: jaxnorm.rms_norm" in error.get()


def test_an_exported_program_takes_any_number_of_rows():
    (rows,) = jax.export.symbolic_shape("rows")
    x, weight = jnp.ones((3, 16)), jnp.ones((16, 8))
    x_type = jax.ShapeDtypeStruct((rows, 16), "float32")
    exported = jax.export.export(jax.jit(rms_norm_linear))(x_type, weight)
    np.testing.assert_allclose(exported.call(x, weight), rms_norm_linear(x, weight), rtol=1e-6)


@pytest.mark.parametrize("in_axes", [(1, None, None), (0, 1, None), (None, None, 0)])
def test_vmap(in_axes):
    """Of rows, of weights, of scales; gradients inside and outside."""
    a = operands(5, 8, 6)
    arrays = [
        v if axis is None else jnp.stack([v, jnp.roll(v, 1, 0), jnp.flip(v)], axis)
        for v, axis in zip((a["x"], a["weight"], a["scale"]), in_axes)
    ]

    def function(x, weight, scale):
        return rms_norm_linear(x, weight, scale, activation="gelu")

    def summed(*arrays):
        return jnp.sum(jnp.sin(function(*arrays)))

    gradients = jax.grad(summed, (0, 1, 2))

    @jax.jit
    def both(*arrays):
        def outside(*arrays):
            return jnp.sum(jax.vmap(summed, in_axes)(*arrays))

        batched = (jax.vmap(f, in_axes)(*arrays) for f in (function, gradients))
        return *batched, jax.grad(outside, (0, 1, 2))(*arrays)

    @jax.jit
    def one_by_one(*arrays):
        parts = [
            [v if axis is None else jnp.take(v, i, axis) for v, axis in zip(arrays, in_axes)]
            for i in range(3)
        ]
        return [function(*p) for p in parts], [gradients(*p) for p in parts]

    batched, inside, outside = both(*arrays)
    each, each_gradient = one_by_one(*arrays)
    np.testing.assert_allclose(batched, jnp.stack(each), rtol=1e-5, atol=1e-5)
    for k, axis in enumerate(in_axes):
        parts = jnp.stack([g[k] for g in each_gradient])
        np.testing.assert_allclose(inside[k], parts, rtol=1e-4, atol=1e-4)
        whole = parts.sum(0) if axis is None else jnp.moveaxis(parts, 0, axis)
        np.testing.assert_allclose(outside[k], whole, rtol=1e-4, atol=1e-4)


def test_a_batch_of_x_is_more_rows():
    x, weight = jnp.ones((3, 4, 8)), jnp.ones((8, 6))
    jaxpr = jax.make_jaxpr(jax.vmap(lambda x: rms_norm_linear(x, weight)))(x)
    (call,) = jaxpr.eqns
    norm, product = call.params["call_jaxpr"].eqns
    assert product.primitive.name == "dot_general"
    assert norm.outvars[0].aval.shape == (3, 4, 8)
