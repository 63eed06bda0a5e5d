"""Softmaxes with a mask, a bias or `causal`, with every kind of schedule in `test_schedules`."""

import functools

import jax
import jax.numpy as jnp
import pytest
import test_logits
from logits_cases import Case
from program_error import analyse, assert_analysed
from test_schedules import scheduled  # noqa: F401
from test_softmax import FUNCTIONS, data

pytestmark = pytest.mark.triton

# Masks and biases that are broadcast to the shape of x, each along different axes. Some of the
# biases are broadcast over many rows.
CASES = [
    Case((2, 3, 5, 100), mask=(2, 1, 1, 100), bias=(3, 5, 100), causal=True),
    Case((2, 3, 5, 100), mask=(5, 1), bias=(2, 1, 1, 100)),
    Case((2, 3, 5, 100), mask=(3, 1, 100), bias=(5, 1), causal=True),
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case, name, scheduled):  # noqa: F811
    mixes = test_logits.MIXES
    turn = 2 * CASES.index(case) + (name == "softmax")
    x_dtype, bias_dtype, y_dtype = mixes[turn % len(mixes)]
    x, d = data(case.shape, x_dtype), data(case.shape, y_dtype, seed=1, scale=1.0)
    bias, where = data(case.bias, bias_dtype, seed=2), test_logits.mask_of(case.mask)
    options = {"where": where, "causal": case.causal, "implementation": scheduled}
    test_logits.check(name, x, d, bias=bias, scale=test_logits.SCALE, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_takes_no_part_does_not_matter(name, causal, scheduled):  # noqa: F811
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
def test_multiples_that_overflow(name, dtype, scheduled):  # noqa: F811
    function = functools.partial(FUNCTIONS[name], scale=2.0, implementation=scheduled)
    test_logits.check_overflowing_rows(name, function, dtype, cols=100)
