"""Softmaxes and special values with every kind of schedule, in the interpreter or on a GPU.

The other tests run the schedules that the tables choose. Here tiles are small, so that small arrays
have every kind of edge: rows that share a tile, rows of several tiles, tiles beyond the last row or
column, and programs with more rows than others.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_logits
import test_softmax
from logits_cases import Case
from needs import INTERPRETED
from norms import check, normal
from program_error import analyse, assert_analysed, assert_computes
from test_softmax import FUNCTIONS, data

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


def make_schedule(name, spec):
    """Return an entry of `SCHEDULES` for the call `spec`.

    If the kernels of the call only support whole rows, the schedule has as many pieces as a row.
    """
    from jaxnorm_kernels.triton.schedule import Schedule
    from jaxnorm_kernels.triton.support import sums_columns

    block, pieces, warps, tile_rows, programs, stages, hold_params = SCHEDULES[name]
    if (spec.is_norm and spec.direction == "fwd") or sums_columns(spec):
        pieces = math.ceil(spec.cols / block)
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

    monkeypatch.setattr(schedule, "choose", functools.partial(make_schedule, request.param))
    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)
    jax.clear_caches()
    yield "triton"
    jax.clear_caches()


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


# --------------------------------------------------------------- masks, biases and causal softmaxes

# Masks and biases that are broadcast to the shape of x, each along different axes. Some of the
# biases are broadcast over many rows.
CASES = [
    Case((2, 3, 5, 100), mask=(2, 1, 1, 100), bias=(3, 5, 100), causal=True),
    Case((2, 3, 5, 100), mask=(5, 1), bias=(2, 1, 1, 100)),
    Case((2, 3, 5, 100), mask=(3, 1, 100), bias=(5, 1), causal=True),
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_masks_and_biases(case, name, scheduled):
    mixes = test_logits.MIXES
    turn = 2 * CASES.index(case) + (name == "softmax")
    x_dtype, bias_dtype, y_dtype = mixes[turn % len(mixes)]
    x, d = data(case.shape, x_dtype), data(case.shape, y_dtype, seed=1, scale=1.0)
    bias, where = data(case.bias, bias_dtype, seed=2), test_logits.mask_of(case.mask)
    options = {"where": where, "causal": case.causal, "implementation": scheduled}
    test_logits.check(name, x, d, bias=bias, scale=test_logits.SCALE, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_takes_no_part_does_not_matter(name, causal, scheduled):
    """Masked elements have no effect, even if they are NaN.

    This also holds if all unmasked elements of the row are -inf.
    """
    x, d = data((7, 100), "float32"), data((7, 100), "float32", seed=1)
    x = x.at[1, 2:].set(-jnp.inf).at[2, 0].set(jnp.inf).at[3].set(-jnp.inf).at[4, 0].set(jnp.nan)
    kept = test_logits.mask_of((7, 100)).at[0].set(False).at[1:, 0].set(True)
    reached = kept & jnp.tril(jnp.ones((7, 100), bool)) if causal else kept
    bias = jnp.zeros(100).at[1].set(-jnp.inf)

    def run(implementation, dropped, of_dropped):
        function = functools.partial(
            FUNCTIONS[name], where=kept, causal=causal, implementation=implementation
        )
        x_, d_ = jnp.where(reached, x, dropped), jnp.where(reached, d, of_dropped)
        y, vjp = jax.vjp(lambda x, bias: function(x, bias=bias), x_, bias)
        return y, *vjp(d_)

    # The kernel must not use masked entries, so they are NaN or infinite in its operands. In the
    # operands of XLA's code, they are 0.
    expected = analyse(lambda: run("xla", 0, 0))
    assert_analysed(run(scheduled, jnp.nan, jnp.inf), expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # raised by the interpreter's `max`
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_multiples_that_overflow(name, dtype, scheduled):
    function = functools.partial(FUNCTIONS[name], scale=2.0, implementation=scheduled)
    test_logits.check_overflowing_rows(name, function, dtype, cols=100)
