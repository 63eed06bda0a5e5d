"""rms_norm_linear of small tiles, against float64, in Triton's interpreter or on a GPU.

Arrays of few elements then have every kind of edge: tiles that reach over the last row, feature
and column, and groups of tiles that are not whole.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import test_norm_linear
from conftest import INTERPRETED
from norm_linear_cases import NormLinear, operands
from pairs import pairwise
from reference import assert_within, exact, rounding

from jaxnorm_kernels.specs import LinearSpec

pytestmark = pytest.mark.triton

U = reference.unit_roundoff("float32")
# rows, cols, features; rows and features of a tile, columns at a time, warps, stages, group
SCHEDULES = {
    "edges everywhere": ((37, 100, 90), (16, 32, 32, 1, 2, 2)),
    "whole tiles": ((32, 64, 128), (16, 64, 32, 4, 3, 16)),
    "one stage": ((37, 100, 90), (32, 32, 64, 2, 1, 1)),
    "less than a tile": ((1, 5, 3), (16, 16, 16, 1, 2, 16)),
    "whole columns alone": ((17, 32, 20), (16, 32, 16, 2, 4, 16)),
}
# x, weight, scale, bias; the product's, y's
MIXES = [
    (("bfloat16", "bfloat16", "float32", "float32"), "bfloat16", "bfloat16"),
    (("float16", "float16", "float16", "float16"), "float16", "float16"),
    (("bfloat16", "float32", "float32", "bfloat16"), "bfloat16", "float32"),
    (("float16", "float32", "float32", "float32"), "float16", "float16"),
    (("bfloat16", "float16", "bfloat16", "float16"), "bfloat16", "float32"),
    (("float16", "bfloat16", "float16", "bfloat16"), "float16", "bfloat16"),
]
ACTIVATIONS = [None, "relu", "leaky_relu", "gelu", "silu"]


@pytest.fixture
def call(monkeypatch):
    """``call(arrays, spec, schedule)``: the kernel's y, z and rstd, by the schedule of that name.

    `arrays`: x, weight, and those of scale and bias that there are.
    """
    from jaxnorm_kernels import triton
    from jaxnorm_kernels.triton.linear_schedule import LinearSchedule

    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)

    def run(arrays, spec, schedule="edges everywhere"):
        assert triton.supports(spec) is None
        *tiles, group = SCHEDULES[schedule][1]
        return triton.rms_norm_linear_fwd(
            arrays["x"],
            arrays["weight"],
            arrays.get("scale"),
            arrays.get("bias"),
            spec,
            schedule=LinearSchedule(*tiles, group=group),
        )

    return run


def make_arrays(shape, dtypes, present=("scale", "bias"), seed=0):
    x, weight, scale, bias = dtypes
    arrays = operands(*shape, (x, x, weight, scale, bias), seed)
    return {name: a for name, a in arrays.items() if name in ("x", "weight", *present)}


def make_spec(arrays, product, y_dtype, **options):
    (rows, cols), features = arrays["x"].shape, arrays["weight"].shape[1]
    dtypes = {f"{n}_dtype": np.dtype(arrays[n].dtype) for n in ("scale", "bias") if n in arrays}
    return LinearSpec(
        rows,
        cols,
        features,
        np.dtype(arrays["x"].dtype),
        np.dtype(arrays["weight"].dtype),
        np.dtype(product),
        np.dtype(y_dtype),
        **dtypes,
        **{"epsilon": 1e-6, "want_rstd": True, **options},
    )


def expected(arrays, spec):
    x, weight = exact(arrays["x"]), exact(arrays["weight"])
    has_scale, has_bias = ("scale" in arrays), ("bias" in arrays)
    return NormLinear(
        x=x,
        weight=weight,
        gain=exact(arrays["scale"]) + spec.scale_offset if has_scale else np.ones(spec.cols),
        bias=exact(arrays["bias"]) if has_bias else np.zeros(spec.features),
        d=np.zeros((spec.rows, spec.features)),
        excess=np.zeros_like(x),
        x_dtype=spec.x_dtype.name,
        weight_dtype=spec.weight_dtype.name,
        product_dtype=spec.product_dtype.name,
        y_dtype=spec.y_dtype.name,
        activation=spec.activation,
        epsilon=spec.epsilon,
    )


def check(call, arrays, spec, schedule):
    y, z, rstd = call(arrays, spec, schedule)
    ref = expected(arrays, spec)
    assert y.dtype == spec.y_dtype
    assert_within(y, ref.y, ref.y_bound())
    assert (z is not None) == spec.want_z
    if z is not None:
        assert z.dtype == spec.y_dtype
        assert_within(z, ref.z, ref.z_error + rounding(ref.z, spec.y_dtype.name))
    assert (rstd is not None) == spec.want_rstd
    if rstd is not None:
        assert rstd.dtype == "float32"
        walk = reference.SAFETY * U * (np.sqrt(spec.cols) + 4)
        assert_within(rstd, ref.norm.r[:, 0], walk * ref.norm.r[:, 0])


@pytest.mark.parametrize(
    ("mix", "activation", "present", "schedule"),
    pairwise(MIXES, ACTIVATIONS, [("scale", "bias"), ("scale",), ("bias",), ()], list(SCHEDULES)),
    ids=str,
)
def test_values(mix, activation, present, schedule, call):
    dtypes, product, y_dtype = mix
    arrays = make_arrays(SCHEDULES[schedule][0], dtypes, present)
    options = {"activation": activation, "want_z": activation is not None}
    options["scale_offset"] = 1.0 if present == ("scale",) else 0.0
    options["want_rstd"] = present != ("bias",)
    check(call, arrays, make_spec(arrays, product, y_dtype, **options), schedule)


@pytest.mark.parametrize("schedule", ["edges everywhere", "one stage"])
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1], MIXES[3]], ids=str)
def test_rows_of_any_size(mix, schedule, call):
    """Up to the largest whose squares float32 has, with gains that take x beyond its dtype."""
    dtypes, product, _ = mix
    arrays = make_arrays((37, 100, 90), dtypes)
    largest = 13 if dtypes[0] == "float16" else 55
    sizes = 2.0 ** np.linspace(-largest, largest, 37).round()
    x, weight = (exact(arrays[name]) for name in ("x", "weight"))
    x = np.clip(x, -3.5, 3.5) * sizes[:, None]
    arrays["x"] = jnp.asarray(x, dtypes[0])
    # The normalised x is within float16, even where x G is not.
    arrays["scale"] = arrays["scale"].at[::7].multiply(300).at[1::7].multiply(2.0**-6)
    arrays["weight"] = jnp.asarray(weight, dtypes[1])
    assert np.abs(exact(arrays["x"])).max() < np.inf
    check(call, arrays, make_spec(arrays, product, "float32", epsilon=0.0), schedule)


@pytest.mark.parametrize("schedule", ["edges everywhere", "one stage"])
def test_what_is_no_number_stays_in_its_row(schedule, call):
    """NaN, infinities and zeros come out as xla has them."""
    from jaxnorm_kernels import xla

    arrays = make_arrays((37, 100, 90), MIXES[0][0])
    x = arrays["x"].at[3, 99].set(jnp.nan).at[5, 0].set(jnp.inf).at[9, 50].set(-jnp.inf)
    arrays["x"] = x.at[11].set(0).at[36, 98].set(jnp.nan)
    for epsilon, zeros in ((1e-6, False), (0.0, True)):
        spec = make_spec(arrays, "bfloat16", "float32", epsilon=epsilon)
        ours = call(arrays, spec, schedule)
        names = ("x", "weight", "scale", "bias")
        theirs = xla.rms_norm_linear_fwd(*(arrays[n] for n in names), spec)
        is_nan = np.isin(np.arange(37), [3, 5, 9, 36, *([11] if zeros else [])])
        np.testing.assert_array_equal(np.isnan(ours[0]).all(1), is_nan)
        np.testing.assert_array_equal(np.isnan(ours[0]).any(1), is_nan)
        np.testing.assert_allclose(ours[0], theirs[0], rtol=2.0**-6, atol=2.0**-5)
        np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_their_edges(activation, call):
    """Those of `jax.nn`: of rows of 0, z is the bias."""
    z = [-np.inf, -3e38, -1e13, -1e4, -100, -88, -20, -5, -1e-30, -0.0, 0, 1e-30, 0.75, 5, 90]
    z = np.array([*z, 1e13, 3e38, np.inf, np.nan], np.float32)
    x, weight = (jnp.full(shape, i, "bfloat16") for i, shape in enumerate([(2, 16), (16, z.size)]))
    arrays = {"x": x, "weight": weight, "bias": jnp.asarray(z)}
    spec = make_spec(arrays, "bfloat16", "float32", activation=activation, want_z=True)
    y, found, _ = call(arrays, spec)
    np.testing.assert_array_equal(found, np.stack([z, z]))
    expected = z if activation is None else getattr(jax.nn, activation)(z)
    # Where exp(-z) is infinite, and just before, `jax.nn` may have a subnormal number, or 0.
    tail = 16 * U if activation == "gelu" else 1e-36
    np.testing.assert_allclose(y, np.stack([expected, expected]), rtol=1e-5, atol=tail)


def test_two_runs_give_the_same_bits(call):
    arrays = make_arrays((37, 100, 90), MIXES[0][0])
    spec = make_spec(arrays, "bfloat16", "float32", activation="silu", want_z=True)
    for a, b in zip(call(arrays, spec), call(arrays, spec), strict=True):
        np.testing.assert_array_equal(exact(a), exact(b))


def test_a_weight_that_is_nan_in_a_column_spoils_that_column(call):
    """And no tile's edge brings it into another one."""
    arrays = make_arrays((37, 100, 90), MIXES[0][0])
    arrays["weight"] = arrays["weight"].at[99, 31].set(jnp.nan)
    arrays["bias"] = arrays["bias"].at[89].set(jnp.inf)
    y, *_ = call(arrays, make_spec(arrays, "bfloat16", "float32"))
    assert np.flatnonzero(np.isnan(y).any(0)).tolist() == [31]
    assert np.flatnonzero(np.isinf(y).any(0)).tolist() == [89]


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1]], ids=str)
def test_gradients(mix, monkeypatch):
    """Through the public function: the kernel, by its table, and its norm's backward."""
    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)
    (x, weight, scale, bias), product, y_dtype = mix
    arrays = operands(37, 100, 40, (x, x, weight, scale, bias))
    test_norm_linear.check_case(
        arrays, product, y_dtype, activation="gelu", scale_offset=0.5, implementation="triton"
    )
