"""The kernel that fuses a norm with the next matmul: interpreted, lowered, compiled for an H100."""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from norm_linear_cases import operands, plain
from program_error import analyse, assert_analysed, assert_computes
from programs import kernels_in, text_for_cuda
from reference import exact
from specs import BF16, F16, F32

import jaxnorm
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic import linear as kernel
from jaxnorm_kernels.mosaic.device.gpu import HOPPER
from jaxnorm_kernels.mosaic.linear import ProductSchedule

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SMALL = ProductSchedule(features=128, stages=2, group=2)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A call of the kernel: its sizes, dtypes (None for an absent operand) and options."""

    rows: int
    cols: int
    features: int
    x_dtype: np.dtype
    weight_dtype: np.dtype
    product_dtype: np.dtype
    y_dtype: np.dtype
    scale_dtype: np.dtype | None = None
    bias_dtype: np.dtype | None = None
    epsilon: float = 0.0
    scale_offset: float = 0.0
    activation: str | None = None
    precision: str | None = None

    def __call__(self, *arrays, **schedule):
        options = {n: getattr(self, n) for n in ("epsilon", "scale_offset", "activation")}
        return mosaic.rms_norm_linear_fwd(*arrays, dtype=self.y_dtype, **options, **schedule)

    @property
    def refusal(self):
        names = ("x", "weight", "scale", "bias", "y")
        dtypes = {name: getattr(self, f"{name}_dtype") for name in names}
        present = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
        sizes = self.rows, self.cols, self.features
        return kernel.why_unsupported(sizes, self.product_dtype, present, self.precision)


def make_spec(rows, cols, features, dtype=BF16, **options):
    """Return a spec with one dtype for x, weight and y, unless `options` say otherwise."""
    options = {"weight_dtype": dtype, "y_dtype": dtype, "epsilon": 1e-6, **options}
    return Linear(rows, cols, features, x_dtype=dtype, product_dtype=dtype, **options)


def arrays_of(spec, seed=0):
    """Return x, weight, scale and bias; scale and bias are None if the call does not have them."""
    dtypes = (spec.x_dtype, spec.x_dtype, spec.weight_dtype, spec.scale_dtype, spec.bias_dtype)
    given = operands(spec.rows, spec.cols, spec.features, [d or F32 for d in dtypes], seed)
    scale = None if spec.scale_dtype is None else given["scale"]
    return [given["x"], given["weight"], scale, None if spec.bias_dtype is None else given["bias"]]


def reference(spec, *arrays):
    """Return the same computation in plain JAX, with bounds on its rounding errors."""
    names = "activation", "epsilon", "scale_offset"
    options = {name: getattr(spec, name) for name in names}
    # float16 cannot hold some products of operands, which the kernel computes in float32.
    options["product"] = BF16 if spec.product_dtype == F16 else spec.product_dtype
    return analyse(functools.partial(plain, dtype=spec.y_dtype, **options), *arrays)


def run(spec, *arrays, schedule=None):
    """Run the kernel under `jax.jit` and return y."""

    @jax.jit
    def function(*arrays):
        return spec(*arrays, schedule=schedule)

    return function(*arrays)


def check_result(spec, arrays, y):
    """Assert that the result is within its bound of the float64 reference."""
    assert (y.dtype, y.shape) == (spec.y_dtype, (spec.rows, spec.features))
    assert_analysed(y, reference(spec, *arrays))


def check(spec, schedule=None, params=None):
    """Run the kernel in the interpreter and check its result."""
    arrays = arrays_of(spec)
    with mosaic.interpreted(params):
        check_result(spec, arrays, run(spec, *arrays, schedule=schedule))


# With the sizes for `SMALL`, tiles are partial along the rows, the columns, the features, or all of
# them. The loop over tiles of columns has only one step, or fewer steps than the pipeline has
# stages. Some numbers of columns are not divisible by the width of any swizzle (a layout of shared
# memory), so the kernel copies tiles in another way.
SIZES = [(128, 256, 128), (136, 64, 128), (64, 40, 128), (8, 128, 264), (200, 200, 136)]
SIZES += [(8, 8, 8), (8, 72, 8)]
OPTIONS = [
    (BF16, {"scale_dtype": BF16, "scale_offset": 1.0, "activation": "gelu"}),
    (F16, {"scale_dtype": F16, "scale_offset": 1.0, "bias_dtype": BF16}),
    (F16, {"bias_dtype": F16, "activation": "silu", "y_dtype": F32}),
    (BF16, {"scale_dtype": F16, "weight_dtype": F32, "activation": "relu"}),
    (BF16, {"y_dtype": F16, "activation": "leaky_relu", "epsilon": 0.25}),
]


@pytest.mark.parametrize(
    ("spec", "schedule"),
    [
        *((make_spec(*n, scale_dtype=F32, bias_dtype=F32), SMALL) for n in SIZES[1:-1:2]),
        *((make_spec(*n, bias_dtype=F32), SMALL) for n in SIZES[::2]),
        *((make_spec(72, 136, 144, dtype, **options), None) for dtype, options in OPTIONS),
    ],
    ids=str,
)
def test_values(spec, schedule):
    check(spec, schedule)


@pytest.mark.parametrize(("blocks", "stages"), [(1, 2), (3, 3)])
def test_tiles_in_turn(blocks, stages, monkeypatch):
    """A block may compute several tiles one after the other, without data races."""
    one = dataclasses.replace(HOPPER, sms=blocks)
    monkeypatch.setattr(kernel, "local_gpu", lambda: one)
    spec = make_spec(200, 192, 264, scale_dtype=F32, bias_dtype=F32, activation="silu")
    params = plgpu.InterpretGPUParams(detect_races=True)
    check(spec, ProductSchedule(features=128, stages=stages, group=2), params)
    assert not interpret_pallas_call.get_races().races_found


def special_rows(x):
    """Return x with rows of NaN, infinities, zeros, and numbers whose squares underflow."""
    x = x.at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf).at[3].set(0).at[4].set(-jnp.inf)
    return x.at[6].multiply(jnp.finfo(x.dtype).tiny)


# NumPy warns in the reference, because it computes with NaN and infinities.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("sizes", "dtype", "scale", "context"),
    [
        *(
            ((16, 72, 40), dtype, scale, mosaic.interpreted)
            for dtype, scale in [(BF16, F32), (F16, F32), (BF16, None)]
        ),
        *(
            pytest.param(
                (264, 1024, 520), dtype, F32, contextlib.nullcontext, marks=pytest.mark.gpu
            )
            for dtype in (BF16, F16)
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_rows_keep_to_themselves(sizes, dtype, scale, context):
    """Rows with NaN or infinities have the same result as rms_norm followed by a matmul.

    They do not affect other rows.
    """
    spec = make_spec(*sizes, dtype, scale_dtype=scale, bias_dtype=F32, y_dtype=F32)
    x, *parameters = arrays_of(spec)
    special = special_rows(x)
    with context():
        y = run(spec, x, *parameters)
        changed = run(spec, special, *parameters)
    ordinary = np.array([0, 5, *range(7, spec.rows)])
    np.testing.assert_array_equal(changed[ordinary], y[ordinary])
    assert jnp.isnan(changed[np.array([1, 2, 4])]).all()
    of_zeros = np.broadcast_to(exact(parameters[-1]), (1, spec.features))
    np.testing.assert_array_equal(changed[3:4], of_zeros.astype(np.float32))
    assert_analysed(changed[6:7], reference(spec, special[6:7], *parameters))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("power", [6, -13])
def test_numbers_that_float16_has_not(power, dtype):
    """Results are correct even if ``x * scale`` or ``scale * weight`` leaves float16's range."""
    spec = make_spec(8, 64, 128, dtype, scale_dtype=F32, y_dtype=F32)
    x, weight, scale, _ = arrays_of(spec)
    x = (x / jnp.max(jnp.abs(x), 1, keepdims=True) * 60000).astype(dtype)
    arrays = [x, (weight / 32).astype(dtype), scale * 2.0**power, None]
    with mosaic.interpreted():
        check_result(spec, arrays, run(spec, *arrays))


# ---------------------------------------------------------------------------------- the function


def by_name(x, weight, scale, bias):
    return jaxnorm.rms_norm_linear(
        x, weight, scale, bias=bias, activation="gelu", implementation="mosaic"
    )


GELU = make_spec(24, 64, 136, scale_dtype=F32, bias_dtype=F32, activation="gelu")


@pytest.mark.parametrize("in_axes", [(1, None, None, None), (0, None, 0, None)], ids=str)
def test_vmap(in_axes):
    """`jax.vmap` over x, or over a parameter, gives a loop over the batch elements."""
    x, *parameters = arrays_of(dataclasses.replace(GELU, rows=8))
    x = x.reshape(2, 4, 64)
    arrays = [
        a if axis is None else jnp.stack([a, a[::-1]], axis)
        for a, axis in zip([x, *parameters], in_axes)
    ]
    with mosaic.interpreted():
        batched = jax.jit(jax.vmap(by_name, in_axes))(*arrays)
        one = jax.jit(by_name)
        for i, y in enumerate(batched):
            of_one = [a if n is None else jnp.take(a, i, n) for a, n in zip(arrays, in_axes)]
            np.testing.assert_array_equal(y, one(*of_one))
            flat = one(of_one[0].reshape(8, 64), *of_one[1:])
            np.testing.assert_array_equal(y.reshape(8, 136), flat)


def test_its_derivative_is_the_composition_s():
    """Derivatives are bitwise equal to the derivatives of rms_norm followed by a matmul.

    This is tested in forward mode and in reverse mode.
    """
    spec = dataclasses.replace(GELU, rows=8)
    arrays = arrays_of(spec)
    d = jnp.asarray(np.random.default_rng(1).normal(size=(8, 136)), BF16)
    composed = functools.partial(jaxnorm.rms_norm_linear, activation="gelu")

    def of_composition(x, weight, scale, bias):
        return composed(x, weight, scale, bias=bias)

    def derivatives(f):
        @jax.jit
        def both(*arrays):
            y, vjp = jax.vjp(f, *arrays)
            _, of_x = jax.vjp(lambda x: f(x, *arrays[1:]), arrays[0])
            return y, vjp(d), of_x(d), jax.jvp(f, arrays, arrays)[1]

        return both(*arrays)

    with mosaic.interpreted():
        y, *ours = derivatives(by_name)
        np.testing.assert_array_equal(y, jax.jit(by_name)(*arrays))
    _, *expected = derivatives(of_composition)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.oldest_jax
@pytest.mark.parametrize("scale", [None, "float32"])
def test_program(scale):
    """The program runs one kernel. Before the kernel, it multiplies the weight by the scale.

    No other operation has an operand or a result of x's size.
    """
    shapes = {"x": (8192, 4096), "weight": (4096, 6144), "bias": (6144,)}
    types = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    if scale is not None:
        types["scale"] = jax.ShapeDtypeStruct((4096,), scale)

    def call(arrays):
        return jaxnorm.rms_norm_linear(**arrays, activation="silu", implementation="mosaic")

    text = text_for_cuda(call, types)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "dot_general" not in text
    products = [line for line in text.splitlines() if "stablehlo.multiply" in line]
    assert len(products) == (scale is not None)
    assert all("tensor<4096x6144xf32>" in line for line in products)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 12}, "multiples of 8"),
        ({"cols": 60}, "multiples of 8"),
        ({"features": 100}, "multiples of 8"),
        ({"x_dtype": F32}, "dtype of the matmul"),
        ({"product_dtype": F32, "x_dtype": F32}, "only bfloat16 and float16"),
        ({"precision": "TF32_TF32_F32"}, "names another"),
        ({"scale_dtype": np.dtype(np.float64)}, "an array is float64"),
        ({"rows": 0}, "an array has size 0"),
        ({"rows": 2**31}, "32-bit indices"),
    ],
    ids=str,
)
def test_what_it_cannot_do(change, reason):
    spec = make_spec(16, 64, 128, scale_dtype=F32)
    assert spec.refusal is None
    assert reason in dataclasses.replace(spec, **change).refusal


@pytest.mark.parametrize("capability", [80, 100, 120])
def test_gpus_without_its_instructions(capability, monkeypatch):
    monkeypatch.setattr(kernel, "local_capability", lambda: capability)
    assert "compute capability 9.0 (Hopper)" in make_spec(16, 64, 128).refusal


# ----------------------------------------------------------------------------- lowered, compiled

# The specs cover both tile sizes, every operand, dtypes of 2 and 4 bytes, columns that no swizzle
# divides, and a single row of tiles.
COMPILED = [
    make_spec(8192, 2048, 3072, scale_dtype=F32),
    make_spec(8192, 4096, 6144),
    make_spec(8192, 4096, 14336, scale_dtype=BF16, bias_dtype=F32, activation="gelu"),
    make_spec(8192, 4096, 6144, F16, scale_dtype=F32, activation="silu"),
    make_spec(8192, 4096, 6144, scale_dtype=F32, y_dtype=F32, bias_dtype=BF16),
    make_spec(8192, 4096, 6144, scale_dtype=F32, activation="relu"),
    make_spec(8192, 4096, 6144, scale_dtype=F32, scale_offset=1.0, activation="leaky_relu"),
    make_spec(64, 4096, 6144, scale_dtype=BF16, bias_dtype=BF16, activation="silu"),
    make_spec(1000, 1000, 1000, scale_dtype=F32),
    make_spec(8, 8, 8, scale_dtype=F32),
    make_spec(128, 1024, 4360, bias_dtype=F32),
]


def types_of(spec):
    parameters = [((spec.cols,), spec.scale_dtype), ((spec.features,), spec.bias_dtype)]
    arrays = [((spec.rows, spec.cols), spec.x_dtype)]
    arrays += [((spec.cols, spec.features), spec.weight_dtype), *parameters]
    return [None if dtype is None else jax.ShapeDtypeStruct(*a) for a in arrays for dtype in a[1:]]


@pytest.mark.oldest_jax
@pytest.mark.parametrize("spec", COMPILED, ids=str)
def test_lowering(spec):
    assert kernels_in(spec.__call__, *types_of(spec)) == 1


@pytest.mark.compiles
@pytest.mark.parametrize("spec", COMPILED, ids=str)
def test_registers(spec, compiler):
    """No registers are spilled, and the matmul instructions are not serialised.

    Serialised instructions could not overlap with the preparation of the next operands.
    """
    (kernel,) = compiler.compile(spec.__call__, types_of(spec))
    assert not kernel.spilled
    assert not kernel.serialised


# --------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec",
    [
        make_spec(*sizes, dtype, scale_dtype=scale, bias_dtype=F32, activation=activation)
        for sizes, dtype, (scale, activation) in itertools.product(
            [(1024, 512, 768), (264, 1000, 520), (8, 8, 8), (2048, 1024, 4360)],
            (BF16, F16),
            [(None, "relu"), (F32, "gelu"), (BF16, "silu"), (F32, "leaky_relu")],
        )
    ],
    ids=str,
)
def test_values_on_a_gpu(spec):
    arrays = arrays_of(spec)
    y = run(spec, *arrays)
    check_result(spec, arrays, y)
    np.testing.assert_array_equal(y, run(spec, *arrays))


@pytest.mark.gpu
def test_gradients_on_a_gpu():
    """With implementation="mosaic", values and gradients on a GPU are within their bounds.

    The kernel computes the forward. The derivative is that of rms_norm followed by a matmul.
    """
    spec = make_spec(1024, 512, 776, scale_dtype=F32, bias_dtype=F32, activation="gelu")
    x, weight, scale, bias = arrays_of(spec)
    d = jnp.asarray(np.random.default_rng(1).normal(size=(1024, 776)), BF16)

    def both(function, *arrays):
        y, vjp = jax.vjp(function, *arrays)
        return y, vjp(d)

    # Differentiate the function without the kernel for the bounds.
    of_xla = functools.partial(jaxnorm.rms_norm_linear, activation="gelu")
    like = functools.partial(both, lambda x, w, s, b: of_xla(x, w, s, bias=b))
    expected = functools.partial(plain, product=BF16, dtype=BF16, activation="gelu")
    results = jax.jit(functools.partial(both, by_name))(x, weight, scale, bias)
    theirs = functools.partial(both, expected)
    assert_computes(results, theirs, x, weight, scale, bias, like=like)
