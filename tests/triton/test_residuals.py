"""Norms fused with a residual, and parameters of groups of rows, against float64 numpy.

The functions of the contract are called as they are, under every kind of schedule and under that
of the tables, in Triton's interpreter or on a GPU.
"""

import functools

import numpy as np
import pytest
import reference
from needs import INTERPRETED
from reference import Norm, assert_within, exact, rounding
from specs import build_spec, changed
from test_norm import normal
from test_schedules import SCHEDULES, make_schedule

from benchmarks import contract

pytestmark = pytest.mark.triton

U = reference.unit_roundoff("float32")
SHAPE = (9, 100)
# x, residual, parameters, y; what the second or the only norm keeps
MIXES = [
    ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "output"),
    ("float32", "float32", "float32", "float32", "input"),
    ("bfloat16", "float32", "float32", "bfloat16", "output"),
    ("float16", "bfloat16", "float32", "float32", "input"),
    ("float32", "float16", "bfloat16", "float16", "output"),
]
KINDS = ["layer_norm", "rms_norm"]


@pytest.fixture(params=["of the table", *SCHEDULES])
def call(request, monkeypatch):
    """``call(*operands, spec=spec)`` runs that pass of the implementation."""
    from jaxnorm_kernels import triton

    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)
    options = {"schedule": make_schedule(request.param)} if request.param in SCHEDULES else {}

    def run(*operands, spec):
        assert triton.why_unsupported(spec) is None
        return contract.call(triton, spec, *operands, **options)

    return run


def make_spec(op, x, residual, parameter, y, keeps, kind="rms_norm", **changes):
    x, residual, parameter, y = map(np.dtype, (x, residual, parameter, y))
    layer = {"subtract_mean": True, "bias_dtype": parameter} if kind == "layer_norm" else {}
    both = {"next_scale_dtype": parameter} if op == "norm_add_norm" else {}
    options = {"scale_dtype": parameter, "epsilon": 1e-6, "want_stats": True, "saved": keeps}
    options |= {"residual_dtype": None if op == "norm" else residual, **layer, **both}
    return build_spec(op, "fwd", *SHAPE, x, y, **(options | changes))


def parameters(spec, seed=10):
    """scale and bias of the spec, near 1 and 0."""
    scale, bias = (
        None
        if dtype is None
        else normal((spec.cols,) if n == 1 else (n, spec.cols), dtype, seed + i, 0.3, shift)
        for i, (dtype, n, shift) in enumerate(
            [
                (spec.norm.scale_dtype, spec.norm.scale_groups, 1.0),
                (spec.norm.bias_dtype, spec.norm.bias_groups, 0.0),
            ]
        )
    )
    return scale, bias


def along_rows(parameter, spec, absent):
    """(rows, cols) of what each row has."""
    if parameter is None:
        return np.full((spec.rows, spec.cols), absent)
    groups = exact(parameter).reshape(-1, spec.cols)
    return np.repeat(groups, spec.rows // len(groups), axis=0)


def expected(spec, x, scale, bias=None, d=None, rows=slice(None)):
    """The plain norm `spec` of `x` in float64; of some of its rows."""
    x = exact(x)
    return Norm(
        x=x[rows],
        gain=(along_rows(scale, spec, 1.0) + (spec.norm.scale_offset if scale is not None else 0))[
            rows
        ],
        bias=along_rows(bias, spec, 0.0)[rows],
        d=(np.zeros_like(x) if d is None else exact(d))[rows],
        subtract_mean=spec.norm.subtract_mean,
        epsilon=spec.norm.epsilon,
        saved=spec.norm.saved,
        x_dtype=spec.x_dtype.name,
        y_dtype=spec.y_dtype.name,
        activation=spec.norm.activation,
    )


def check_statistics(stats, spec, ref):
    """rstd, and the mean where the norm `spec` returns it."""
    walk = reference.SAFETY * U * (np.sqrt(spec.cols) + 4)
    biggest = np.max(np.abs(ref.x), -1, keepdims=True) * walk if spec.norm.subtract_mean else 0.0
    assert len(stats) == 1 + spec.returns_mean
    wanted = [(ref.r, ref.r * (walk + (biggest * ref.r) ** 2)), (ref.mean, biggest)]
    for stat, (value, bound) in zip(stats, wanted):
        assert stat.dtype == "float32"
        assert_within(stat, value[:, 0], bound[:, 0])


def check_sum(h, spec, residual, normed, error):
    """h is residual + normed, of which that error is known, rounded once to be stored."""
    total = exact(residual) + normed
    stored = rounding(np.abs(total) + error, spec.norm.residual_dtype.name)
    assert h.dtype == spec.norm.residual_dtype
    assert_within(h, total, error + 4 * U * (np.abs(total) + error) + stored)


def check_norm(y, stats, spec, x, scale, bias):
    ref = expected(spec, x, scale, bias)
    assert y.dtype == spec.y_dtype
    assert_within(y, ref.y, ref.y_bound())
    check_statistics(stats, spec, ref)


def check_add_norm(call, spec):
    x = normal((spec.rows, spec.cols), spec.x_dtype, 0, shift=0.3)
    residual = normal(x.shape, spec.norm.residual_dtype, 1, scale=3.0)
    params = parameters(spec)
    y, h, stats = call(x, residual, *params, spec=spec)
    check_sum(h, spec, residual, exact(x), 0.0)
    check_norm(y, stats, spec.last, h, *params)


def check_norm_add(call, spec):
    x = normal((spec.rows, spec.cols), spec.x_dtype, 0, shift=0.3)
    residual = normal(x.shape, spec.norm.residual_dtype, 1, scale=3.0)
    scale, _ = parameters(spec)
    y, stats = call(x, residual, scale, spec=spec)
    first = changed(spec.first, y_dtype=np.dtype("float32"))
    ref = expected(first, x, scale)
    check_sum(y, spec, residual, ref.y, ref.y_bound())
    check_statistics(stats, first, ref)


def check_norm_add_norm(call, spec):
    x = normal((spec.rows, spec.cols), spec.x_dtype, 0, shift=0.3)
    residual = normal(x.shape, spec.norm.residual_dtype, 1, scale=3.0)
    (scale, _), (next_scale, _) = parameters(spec), parameters(spec.last, seed=20)
    y, h, (rstd, *stats) = call(x, residual, scale, next_scale, spec=spec)
    first = changed(spec.first, y_dtype=np.dtype("float32"))
    ref = expected(first, x, scale)
    check_sum(h, spec, residual, ref.y, ref.y_bound())
    check_statistics([rstd], first, ref)
    check_norm(y, stats, spec.last, h, next_scale, None)


CHECKS = {
    "add_norm": check_add_norm,
    "norm_add": check_norm_add,
    "norm_add_norm": check_norm_add_norm,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", MIXES, ids=" ".join)
def test_add_norm(mix, kind, call):
    check_add_norm(call, make_spec("add_norm", *mix, kind))


@pytest.mark.parametrize("mix", MIXES, ids=" ".join)
def test_norm_add(mix, call):
    check_norm_add(call, make_spec("norm_add", *mix))


@pytest.mark.parametrize("mix", MIXES, ids=" ".join)
def test_norm_add_norm(mix, call):
    check_norm_add_norm(call, make_spec("norm_add_norm", *mix))


@pytest.mark.parametrize("op", CHECKS)
@pytest.mark.parametrize(
    "change",
    [
        {"scale_dtype": None, "next_scale_dtype": None},
        {"scale_offset": 1.0},
        {"scale_groups": 3},
        {"scale_groups": 9},
    ],
    ids=str,
)
def test_parameters(op, change, call):
    CHECKS[op](call, make_spec(op, *MIXES[2], **change))


def test_statistics_that_nobody_wants(call):
    x, residual = normal(SHAPE, "float32", 0), normal(SHAPE, "float32", 1)
    for op in CHECKS:
        spec = make_spec(op, *MIXES[1], want_stats=False, scale_dtype=None, next_scale_dtype=None)
        params = (None,) if op == "norm_add" else (None, None)
        assert call(x, residual, *params, spec=spec)[-1] == ()


@pytest.mark.parametrize("op", CHECKS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_row(op, bad, call):
    spec = make_spec(op, *MIXES[1], scale_dtype=None, next_scale_dtype=None)
    x, residual = normal(SHAPE, "float32", 0), normal(SHAPE, "float32", 1)
    params = (None,) if op == "norm_add" else (None, None)
    results = [call(x, residual, *params, spec=spec)[0] for x in (x.at[4, 7].set(bad), x)]
    others = np.arange(len(x)) != 4
    assert np.isnan(exact(results[0])[4]).any()
    np.testing.assert_array_equal(*(exact(y)[others] for y in results))


# -------------------------------------------------------------------------------------- backward


def gradients(call, spec, adds_dh=False):
    """A function of dh; and the float64 norm of some of its rows."""
    x = normal((spec.rows, spec.cols), spec.x_dtype, 0, shift=0.3)
    d = normal(x.shape, spec.y_dtype, 3)
    params = parameters(spec)
    y, stats = call(x, *params, spec=spec)
    saved = y if spec.norm.saved == "output" else x
    backward = changed(spec, direction="bwd", adds_dh=adds_dh)

    def run(dh=None):
        return call(saved, stats, *params, d, dh, spec=backward)

    return run, functools.partial(expected, spec, x, *params, d)


def check_backward(call, spec, adds_dh=False):
    run, ref = gradients(call, spec, adds_dh)
    dh = normal((spec.rows, spec.cols), spec.x_dtype, 4, 5.0) if adds_dh else None
    dx, *grads = run(dh)
    whole = ref()
    bound, *_ = whole.gradient_bounds()
    more = exact(dh) if adds_dh else 0.0
    total = whole.dx + more
    stored = rounding(np.abs(total) + bound, spec.x_dtype.name)
    assert dx.dtype == spec.x_dtype
    assert_within(dx, total, bound + stored + 2 * U * (np.abs(whole.dx) + np.abs(more)))
    dtypes, groups = (
        (spec.norm.scale_dtype, spec.norm.bias_dtype),
        (spec.norm.scale_groups, spec.norm.bias_groups),
    )
    for i, (grad, dtype, n) in enumerate(zip(grads, dtypes, groups)):
        if dtype is None:
            assert grad is None
            continue
        size = spec.rows // n
        parts = [ref(rows=slice(g * size, (g + 1) * size)) for g in range(n)]
        value = np.stack([(part.dscale, part.dbias)[i] for part in parts])
        error = np.stack([part.gradient_bounds()[1 + i] for part in parts])
        assert (grad.shape, grad.dtype) == ((spec.cols,) if n == 1 else value.shape, dtype)
        error += rounding(np.abs(value) + error, dtype.name)
        assert_within(exact(grad).reshape(value.shape), value, error)


@pytest.mark.parametrize("saved", ["output", "input"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", [MIXES[2], MIXES[4]], ids=" ".join)
def test_backward_adds_dh(mix, kind, saved, call):
    check_backward(call, make_spec("norm", *mix, kind, saved=saved), adds_dh=True)


@pytest.mark.parametrize(
    ("kind", "scale_groups", "bias_groups", "saved"),
    [
        ("layer_norm", 3, 3, "output"),
        ("layer_norm", 3, 1, "input"),
        ("layer_norm", 1, 3, "output"),
        ("layer_norm", 9, 9, "input"),
        ("rms_norm", 3, 1, "output"),
        ("rms_norm", 3, 1, "input"),
        ("rms_norm", 9, 1, "output"),
    ],
)
def test_groups(kind, scale_groups, bias_groups, saved, call):
    """A row of a parameter belongs to three rows, or to one; the other parameter may be shared."""
    changes = {"scale_groups": scale_groups, "bias_groups": bias_groups, "saved": saved}
    spec = make_spec("norm", *MIXES[2], kind, **changes)
    x = normal(SHAPE, spec.x_dtype, 0)
    params = parameters(spec)
    check_norm(*call(x, *params, spec=spec), spec, x, *params)
    check_backward(call, spec)
    check_backward(call, spec, adds_dh=True)


@pytest.mark.parametrize("scale_groups", [1, 3])
def test_gradients_of_groups_have_the_same_bits(scale_groups, call):
    changes = {"scale_groups": scale_groups, "bias_groups": 3}
    run, _ = gradients(call, make_spec("norm", *MIXES[2], "layer_norm", **changes))
    for a, b in zip(run(), run()):
        np.testing.assert_array_equal(exact(a), exact(b))
