"""A norm and the rotation after it against float64 numpy, in every kind of schedule.

The functions of the contract are called as they are, in Triton's interpreter or on a GPU.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from needs import INTERPRETED
from program_error import assert_computes
from reference import Norm, assert_within, exact, rounding
from specs import build_spec, changed
from test_norm import normal

import jaxnorm
from benchmarks import contract
from jaxnorm.calls.rows import RowView

pytestmark = pytest.mark.triton

U = reference.unit_roundoff("float32")
# YaRN's tables have a factor like this one.
FACTOR = 1.2

# warps, rows of a tile, programs, stages
SCHEDULES = {
    "a row in a tile": (1, 1, 3, 1),
    "rows share a tile": (2, 4, 2, 1),
    "the next rows come meanwhile": (1, 2, 2, 3),
}

# Shape of x, columns that are rotated, axes of the tables before their columns
SHAPES = {
    "heads share a position": ((2, 3, 4, 16), 16, (1, 3, 1)),
    "rows with tables of their own": ((9, 24), 24, (9,)),
    "one row of tables": ((9, 16), 8, (1,)),
    "tables of the first and the last axis": ((2, 3, 4, 20), 12, (2, 1, 4)),
    "nothing is a power of two": ((3, 5, 13), 6, (1, 5)),
    "one pair": ((2, 5, 2), 2, (1, 5)),
    "long": ((3, 300), 300, (3,)),
}

# x, tables, scale, y
MIXES = [
    ("bfloat16", "float32", "float32", "bfloat16"),
    ("float32", "float32", "float32", "float32"),
    ("float16", "float16", "float32", "float16"),
    ("bfloat16", "bfloat16", "bfloat16", "float32"),
    ("float32", "float32", "bfloat16", "bfloat16"),
    ("float16", "bfloat16", "float16", "float32"),
]


@pytest.fixture
def interpreted(monkeypatch):
    """Has the interpreter run the kernels, where there is no GPU for them."""
    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)


@pytest.fixture(params=["of the table", *SCHEDULES])
def call(request, interpreted):
    """``call(*operands, spec=spec)`` runs that pass of the implementation."""
    return functools.partial(run, request.param)


def run(schedule, *operands, spec):
    from jaxnorm_kernels import triton
    from jaxnorm_kernels.triton.schedule import Schedule

    options = {}
    if schedule in SCHEDULES:
        warps, tile_rows, programs, stages = SCHEDULES[schedule]
        options["schedule"] = Schedule(512, warps, tile_rows, programs=programs, stages=stages)
    assert triton.why_unsupported(spec) is None
    return contract.call(triton, spec, *operands, **options)


def make_spec(shape, mix=MIXES[1], **changes):
    """A forward pass of one of SHAPES."""
    (*lead, cols), rotated, table = SHAPES[shape]
    view = RowView((*lead, cols), (len(lead),), table=(*table, rotated // 2))
    x, table_dtype, scale, y = map(np.dtype, mix)
    options = {"epsilon": 1e-6, "want_stats": True, "scale_dtype": scale, **changes}
    return build_spec(
        "norm_rope",
        "fwd",
        math.prod(lead),
        cols,
        x,
        y,
        table_dtype=table_dtype,
        rotated=rotated,
        table_rows=view.shared("table"),
        **options,
    )


@dataclasses.dataclass
class Arrays:
    """Operands of a call."""

    x: jax.Array
    scale: jax.Array | None
    cos: jax.Array
    sin: jax.Array
    d: jax.Array

    @classmethod
    def of(cls, shape, spec):
        angles = np.random.default_rng(1).uniform(
            0, 7, (spec.norm.table_rows.rows, spec.norm.rotated // 2)
        )
        groups = () if spec.norm.scale_groups == 1 else (spec.norm.scale_groups,)
        scale = None
        if spec.norm.scale_dtype is not None:
            scale = normal((*groups, spec.cols), spec.norm.scale_dtype, 2, 0.3, 1.0)
        return cls(
            normal((spec.rows, spec.cols), spec.x_dtype, 0, shift=0.3),
            scale,
            jnp.asarray(FACTOR * np.cos(angles), spec.norm.table_dtype),
            jnp.asarray(FACTOR * np.sin(angles), spec.norm.table_dtype),
            normal((spec.rows, spec.cols), spec.y_dtype, 3),
        )

    @property
    def operands(self):
        return self.x, self.scale, self.cos, self.sin

    def residuals(self, y, stats, spec):
        """Of the backward, with the cotangent."""
        saved = y if spec.norm.saved == "output" else self.x
        return saved, stats, self.scale, self.cos, self.sin, self.d


class Rotated:
    """The float64 reference of some rows, and bounds of what rounding may add.

    The scale is floored as the call's is: y carries x_hat that way, and is moved by nothing else.
    """

    def __init__(self, shape, spec, arrays, rows=slice(None)):
        (*lead, _), rotated, table = SHAPES[shape]
        self.spec, pairs = spec, rotated // 2

        def along_rows(a):
            a = np.broadcast_to(exact(a).reshape(*table, pairs), (*lead, pairs))
            return a.reshape(-1, pairs)[rows]

        self.cos, self.sin = along_rows(arrays.cos), along_rows(arrays.sin)
        self.square = self.cos**2 + self.sin**2
        if spec.norm.interleaved:
            self.first, self.second = np.arange(0, rotated, 2), np.arange(1, rotated, 2)
        else:
            self.first, self.second = np.arange(pairs), np.arange(pairs, rotated)
        gain = np.ones((spec.rows, spec.cols))
        if arrays.scale is not None:
            groups = exact(arrays.scale).reshape(-1, spec.cols) + spec.norm.scale_offset
            if spec.scale_floor is not None:
                low = np.abs(groups) < spec.scale_floor
                groups = np.where(low, np.where(groups < 0, -1, 1) * spec.scale_floor, groups)
            gain = np.repeat(groups, spec.rows // len(groups), axis=0)
        self.gain = gain[rows]
        self.abs_d = self.turned(np.abs(exact(arrays.d)[rows]), np.abs(self.cos), np.abs(self.sin))
        self.norm = Norm(
            x=exact(arrays.x)[rows],
            gain=self.gain,
            bias=np.zeros(spec.cols),
            d=self.turned(exact(arrays.d)[rows], self.cos, -self.sin),
            subtract_mean=False,
            epsilon=spec.norm.epsilon,
            saved="input",
            x_dtype=spec.x_dtype.name,
            y_dtype="float32",
        )
        self.n = self.norm.y
        self.y = self.turned(self.n, self.cos, self.sin)

    def turned(self, v, cos, sin):
        result = v.copy()
        a, b = v[:, self.first], v[:, self.second]
        result[:, self.first], result[:, self.second] = a * cos - b * sin, b * cos + a * sin
        return result

    def magnitudes(self, v):
        """Of the terms of a rotation of v, or of what its errors come to."""
        result = v.copy()
        cos, sin = np.abs(self.cos), np.abs(self.sin)
        a, b = np.abs(v[:, self.first]), np.abs(v[:, self.second])
        result[:, self.first], result[:, self.second] = a * cos + b * sin, b * cos + a * sin
        return np.abs(result)

    def y_bound(self):
        error = self.magnitudes(self.norm.y_bound()) + 4 * U * self.magnitudes(self.n)
        return error + rounding(np.abs(self.y) + error, self.spec.y_dtype.name)

    def n_error(self):
        """Of n as the backward has it, recovered from the stored y."""
        error = self.magnitudes(self.y_bound()) + 4 * U * self.magnitudes(self.y)
        for columns in (self.first, self.second):
            error[:, columns] /= self.square
        return error + 8 * U * np.abs(self.n)

    def gradients_and_bounds(self):
        """dx and dscale, each with its bound; dx is stored, dscale is not yet."""
        norm, g = self.norm, np.abs(self.gain)
        xh, d, dg = np.abs(norm.xh), np.abs(norm.d), np.abs(norm.d) * g
        d_error = 4 * U * self.magnitudes(self.abs_d)
        if self.spec.norm.saved == "output":
            # The clip at sqrt(N) holds x_hat where its column's gain is small beside its partner's.
            recovered = self.n_error() / g + 4 * U * xh
            xh_error = np.minimum(recovered, 2 * math.sqrt(self.spec.cols))
            terms = d * self.n_error() + d_error * np.abs(self.n)
        else:
            xh_error = norm._xh_error()
            terms = g * (d * xh_error + d_error * xh)
        mean = functools.partial(np.mean, axis=-1, keepdims=True)
        c2_error = mean(terms) + norm._walk * mean(d * np.abs(self.n))
        c2 = np.abs(norm.c2)
        error = xh_error * c2 + (xh + xh_error) * c2_error + d_error * g + 6 * U * (dg + xh * c2)
        error = norm.r * error + np.abs(norm.dx) * norm._walk
        error = error + rounding(np.abs(norm.dx) + error, self.spec.x_dtype.name)
        walk = reference.SAFETY * U * (math.sqrt(len(xh)) + 2)
        of_scale = np.sum(d * xh_error + d_error * (xh + xh_error), 0) + walk * np.sum(d * xh, 0)
        return (norm.dx, error), (norm.dscale, of_scale)


def check(call, shape, spec, arrays=None):
    """Values and gradients; returns the gradients."""
    arrays = arrays or Arrays.of(shape, spec)
    y, stats = call(*arrays.operands, spec=spec)
    expected = Rotated(shape, spec, arrays)
    assert y.dtype == spec.y_dtype
    assert_within(y, expected.y, expected.y_bound())
    (rstd,) = stats
    assert rstd.dtype == "float32"
    r = expected.norm.r[:, 0]
    assert_within(rstd, r, r * expected.norm._walk)

    backward = changed(spec, direction="bwd", want_stats=False)
    dx, dscale, *tables = call(*arrays.residuals(y, stats, spec), spec=backward)
    assert tables == [None, None]
    assert dx.dtype == spec.x_dtype
    assert_within(dx, *expected.gradients_and_bounds()[0])
    if arrays.scale is None:
        assert dscale is None
        return dx, dscale
    assert (dscale.shape, dscale.dtype) == (arrays.scale.shape, spec.norm.scale_dtype)
    size = spec.rows // spec.norm.scale_groups
    for i, row in enumerate(exact(dscale).reshape(-1, spec.cols)):
        of_group = Rotated(shape, spec, arrays, slice(i * size, (i + 1) * size))
        value, error = of_group.gradients_and_bounds()[1]
        assert_within(
            row, value, error + rounding(np.abs(value) + error, spec.norm.scale_dtype.name)
        )
    return dx, dscale


@pytest.mark.parametrize("saved", ["output", "input"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, interleaved, saved, call):
    mix = MIXES[[*SHAPES].index(shape) % 2]
    check(call, shape, make_spec(shape, mix, interleaved=interleaved, saved=saved))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("saved", ["output", "input"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("mix", MIXES, ids=" ".join)
def test_dtypes(mix, interleaved, saved):
    shape = "tables of the first and the last axis"
    spec = make_spec(shape, mix, interleaved=interleaved, saved=saved)
    check(functools.partial(run, "rows share a tile"), shape, spec)


@pytest.mark.parametrize("saved", ["output", "input"])
@pytest.mark.parametrize(
    "change",
    [{"scale_dtype": None}, {"scale_offset": 1.0}, {"scale_groups": 3}, {"scale_groups": 24}],
    ids=str,
)
def test_scales(change, saved, call):
    for shape in ("heads share a position", "tables of the first and the last axis"):
        check(call, shape, make_spec(shape, MIXES[4], saved=saved, **change))


def with_scale(shape, spec, columns, value):
    arrays = Arrays.of(shape, spec)
    return dataclasses.replace(arrays, scale=arrays.scale.at[columns].set(value))


@pytest.mark.parametrize("value", [0.0, -1e-30])
def test_pairs_of_vanishing_scales(value, call):
    """The floor carries x_hat of a pair whose scales both vanish."""
    shape = "heads share a position"
    spec = make_spec(shape, MIXES[4])
    _, dscale = check(call, shape, spec, with_scale(shape, spec, np.array([2, 5, 10, 13]), value))
    assert np.all(exact(dscale)[2::8] != 0)


@pytest.mark.parametrize("y_dtype", ["bfloat16", "float16"])
def test_a_scale_that_is_small_beside_its_partner_s(y_dtype, call):
    """What y tells of such a column is its partner's roundoff: x_hat is held to its true bound."""
    shape = "heads share a position"
    spec = make_spec(shape, ("float32", "float32", "float32", y_dtype))
    arrays = with_scale(shape, spec, np.array([2, 5]), 2.0**-40)
    _, dscale = check(call, shape, spec, arrays)
    most = np.sum(np.abs(Rotated(shape, spec, arrays).norm.d), 0) * math.sqrt(spec.cols)
    assert np.all(np.abs(exact(dscale)) <= most * (1 + 16 * U))


def gradients_of(implementation, spec, arrays, call=contract.call):
    y, stats = call(implementation, spec, *arrays.operands)
    backward = changed(spec, direction="bwd", want_stats=False)
    dx, dscale, *_ = call(implementation, backward, *arrays.residuals(y, stats, spec))
    return y, dx, dscale


def as_called(call):
    """`call` in the form of `contract.call`."""
    return lambda implementation, spec, *operands: call(*operands, spec=spec)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_tables_of_zero_tell_nothing(interleaved, call):
    """Of such pairs x_hat is taken for 0; the others are as in plain JAX."""
    from jaxnorm_kernels import xla

    shape = "rows with tables of their own"
    spec = make_spec(shape, interleaved=interleaved)
    arrays = Arrays.of(shape, spec)
    arrays.cos, arrays.sin = arrays.cos.at[:, 1::4].set(0), arrays.sin.at[:, 1::4].set(0)
    ours = gradients_of(None, spec, arrays, as_called(call))
    assert_computes(ours, lambda: gradients_of(xla, spec, arrays))
    lost = Rotated(shape, spec, arrays).first[1::4]
    for a in ours:
        assert np.all(exact(a)[..., lost] == 0)


def test_an_output_that_overflows(call):
    """float16 ends at 65504. Whatever is done with an infinity, its cotangent is 0 or no number."""
    shape = "heads share a position"
    spec = make_spec(shape, ("float32", "float32", "float32", "float16"))
    arrays = with_scale(shape, spec, np.array([2, 10]), 1e6)
    y, _ = call(*arrays.operands, spec=spec)
    assert np.isinf(exact(y)).any()
    arrays.d = jnp.where(jnp.isinf(y), 0, arrays.d).at[:, 2::8].set(0)
    _, dx, dscale = gradients_of(None, spec, arrays, as_called(call))
    assert np.isfinite(exact(dx)).all()
    assert np.isfinite(exact(dscale)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_row(bad, call):
    shape = "nothing is a power of two"
    spec = make_spec(shape)
    arrays = Arrays.of(shape, spec)
    of_bad = dataclasses.replace(arrays, x=arrays.x.at[4, 7].set(bad))
    results = [gradients_of(None, spec, a, as_called(call))[:2] for a in (of_bad, arrays)]
    others = np.arange(spec.rows) != 4
    for a, b in zip(*results):
        assert np.isnan(exact(a)[4]).any()
        np.testing.assert_array_equal(exact(a)[others], exact(b)[others])


def test_statistics_that_nobody_wants(call):
    shape = "one pair"
    spec = make_spec(shape, want_stats=False)
    assert call(*Arrays.of(shape, spec).operands, spec=spec)[-1] == ()


def test_gradients_have_the_same_bits(call):
    shape = "heads share a position"
    spec = make_spec(shape, MIXES[0], scale_groups=3)
    arrays = Arrays.of(shape, spec)
    runs = [gradients_of(None, spec, arrays, as_called(call)) for _ in range(2)]
    for a, b in zip(*runs):
        np.testing.assert_array_equal(exact(a), exact(b))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("batched", ["x", "x and scale", "x and tables", "scale"])
def test_as_users_call_it(batched):
    """Under vmap a scale belongs to groups of rows, and tables have an axis more."""
    x, scale = normal((3, 2, 5, 4, 16), "float32", 0), normal((3, 16), "float32", 1, 0.3, 1.0)
    angles = np.random.default_rng(2).uniform(0, 7, (3, 5, 1, 4))
    operands = [x, scale, jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))]
    axes = [0 if name in batched else None for name in ("x", "scale", "tables", "tables")]
    operands = [a if axis == 0 else a[0] for a, axis in zip(operands, axes)]

    def loss(x, scale, cos, sin, implementation):
        function = functools.partial(jaxnorm.rms_norm_rope, implementation=implementation)
        return jnp.sum(jnp.sin(3 * function(x, scale, cos, sin)))

    ours, theirs = (
        jax.vmap(
            functools.partial(jax.value_and_grad(loss, argnums=(0, 1)), implementation=name), axes
        )
        for name in ("triton", "xla")
    )
    assert_computes(ours(*operands), theirs, *operands)
