"""Values and gradients with every kind of schedule, in Triton's interpreter or on a GPU.

The other tests run the schedules that the tables choose. Here tiles are small, so that small arrays
have every kind of edge: rows that share a tile, rows of several tiles, tiles beyond the last row or
column, and programs with more rows than others.
"""

import functools

import jax
import numpy as np
import pytest
import test_softmax
from needs import INTERPRETED
from norms import check, normal
from program_error import assert_computes
from reference import exact
from test_norm import checked

import jaxnorm

pytestmark = pytest.mark.triton

# The fields of a schedule: block (columns), pieces (blocks per row), warps, rows of a tile,
# programs, stages, and whether parameters are held in registers.
SCHEDULES = {
    "a row in a tile": (128, 1, 1, 1, 3, 1, True),
    "rows share a tile": (128, 1, 2, 4, 2, 1, True),
    "a row in pieces": (16, 7, 1, 1, 3, 1, True),
    "rows share pieces, parameters are read again": (64, 2, 1, 2, 2, 1, False),
    "the next row comes meanwhile": (128, 1, 1, 1, 2, 3, True),
    "a row is looped over": (32, 1, 1, 1, 6, 1, True),
    "rows of a tile are looped over": (16, 1, 1, 2, 20, 1, True),
}
MIXES = [("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")]
MIXES += [("float16", "float16"), ("bfloat16", "float32")]


def make_schedule(name):
    from jaxnorm_kernels.triton.schedule import Schedule

    block, pieces, warps, tile_rows, programs, stages, hold_params = SCHEDULES[name]
    return Schedule(
        block,
        warps,
        tile_rows,
        pieces=pieces,
        programs=programs,
        stages=stages,
        hold_params=hold_params,
    )


@pytest.fixture(params=SCHEDULES)
def scheduled(request, monkeypatch):
    """Use one schedule for all calls, and return the name of the implementation."""
    from jaxnorm_kernels.triton import schedule

    chosen = make_schedule(request.param)
    monkeypatch.setattr(schedule, "choose", lambda spec: chosen)
    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)
    jax.clear_caches()
    yield "triton"
    jax.clear_caches()


@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("x_dtype", "y_dtype"), MIXES)
def test_norms(x_dtype, y_dtype, name, save, scheduled):
    checked(name, (7, 100), x_dtype, y_dtype=y_dtype, save=save, implementation=scheduled)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("x_dtype", "y_dtype"), MIXES)
def test_softmaxes(x_dtype, y_dtype, name, scheduled):
    x, d = normal((7, 100), x_dtype, 0, scale=3.0), normal((7, 100), y_dtype, 1)
    test_softmax.check(name, x, d, implementation=scheduled)


def test_variance_of_large_means(scheduled):
    """The variance is accurate for a mean of 1e4 and a standard deviation of 1.

    Computed as E[x^2] - E[x]^2 in float32, it would be wrong.
    """
    x = normal((5, 100), "float32", 0, shift=1e4)
    # In one row, the first block of 16 columns has another mean than the others.
    x = x.at[1, :16].add(-100)
    check("layer_norm", x, save="input", implementation=scheduled)


@pytest.mark.parametrize("y_dtype", ["bfloat16", "float16", "float32"])
def test_scales_of_zero(y_dtype, scheduled):
    """A scale of 0 is replaced by a floor, so that x_hat can be recovered from y.

    For a float16 y there is no floor, because float16's range is too small. The scale's gradient is
    then 0.
    """
    scale = normal((100,), "float32", 1, shift=1.0).at[::3].set(0).at[1::3].set(-1e-30)
    arguments = normal((7, 100), "float32", 0), scale, normal((7, 100), y_dtype, 2)

    def run(implementation):
        x, scale, d = arguments
        y, vjp = jax.vjp(
            lambda *a: jaxnorm.rms_norm(*a, dtype=y_dtype, implementation=implementation), x, scale
        )
        return y, *vjp(d)

    v = float(np.finfo(np.float16).eps if y_dtype == "float16" else 2.0**-7)
    for ours, theirs in zip(run(scheduled), run("xla")):
        bound = 4 * v * np.max(np.abs(exact(theirs)))
        np.testing.assert_allclose(exact(ours), exact(theirs), rtol=v, atol=bound)
    y, _, dscale = run(scheduled)
    assert np.all((exact(y) == 0)[:, ::3] == (y_dtype == "float16"))
    assert np.all((exact(dscale) == 0)[::3] == (y_dtype == "float16"))


SPECIAL = {
    "nan": (7, np.nan),
    "inf": (7, np.inf),
    "-inf": (7, -np.inf),
    "all -inf": (slice(None), -np.inf),
    "first half -inf": (slice(50), -np.inf),
    "one finite": (slice(1, None), -np.inf),
    "lowest": (slice(None), np.finfo(np.float32).min),
}


# A norm of a row whose squares overflow has no defined result, so this case is left out.
@pytest.mark.parametrize(
    ("name", "special"),
    [
        (name, special)
        for name in ("softmax", "log_softmax", "layer_norm")
        for special in SPECIAL
        if (name, special) != ("layer_norm", "lowest")
    ],
)
def test_special_values_stay_in_their_row(name, special, scheduled):
    """Rows with NaN or infinities have the same results as in XLA's code.

    They do not affect other rows.
    """
    columns, value = SPECIAL[special]
    x = normal((3, 100), "float32", 0).at[1, columns].set(value)
    d = normal((3, 100), "float32", 1)

    def run(implementation):
        function = functools.partial(getattr(jaxnorm, name), implementation=implementation)
        y, vjp = jax.vjp(function, x)
        return y, *vjp(d)

    assert_computes(run(scheduled), lambda: run("xla"))


def test_two_runs_give_the_same_bits(scheduled):
    x, d = normal((50, 100), "bfloat16", 0), normal((50, 100), "bfloat16", 1)
    scale, bias = normal((100,), "float32", 2, shift=1.0), normal((100,), "float32", 3)

    @jax.jit
    def run(x, scale, bias, d):
        y, vjp = jax.vjp(
            lambda *a: jaxnorm.layer_norm(*a, implementation=scheduled), x, scale, bias
        )
        return y, *vjp(d)

    for a, b in zip(run(x, scale, bias, d), run(x, scale, bias, d)):
        np.testing.assert_array_equal(exact(a), exact(b))
