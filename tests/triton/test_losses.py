"""Tests of losses and log-probabilities with every kind of schedule in `test_schedules`."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_log_prob
import test_loss
from loss_cases import CrossEntropy, operands
from program_error import assert_computes
from reference import assert_within
from specs import build_spec, changed
from test_schedules import scheduled  # noqa: F401

from jaxnorm import log_prob_and_entropy
from jaxnorm import softmax_cross_entropy_with_integer_labels as cross_entropy

pytestmark = pytest.mark.triton

# Dtypes and columns. Unaligned rows may start at up to 8 offsets within a 16-byte word. Together,
# the nine rows of a test start at all of these offsets.
CASES = [("bfloat16", 101), ("float32", 101), ("float16", 104), ("float32", 100), ("bfloat16", 37)]


@pytest.mark.parametrize(("dtype", "cols"), CASES)
def test_values(dtype, cols, scheduled):  # noqa: F811
    options = test_loss.OPTIONS[CASES.index((dtype, cols))]
    test_loss.check(*operands((9, cols), dtype), implementation=scheduled, **options)


@pytest.mark.parametrize("options", test_loss.OPTIONS[5:], ids=str)
def test_scaled_and_capped(options, scheduled):  # noqa: F811
    x, labels, d = operands((9, 101), "float32")
    x = x.at[1, :50].set(-jnp.inf) if "logit_softcap" in options else x
    test_loss.check(x, labels, d, implementation=scheduled, **options)


def test_positions(scheduled):  # noqa: F811
    x, labels, d = operands((9, 101), "bfloat16")
    x = x.at[4].set(jnp.nan)
    labels = labels.at[4].set(-100)
    where = jnp.arange(9) % 4 != 0
    test_loss.check(x, labels, d, where, implementation=scheduled, label_smoothing=0.1)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # from the interpreter
def test_rows_of_all_kinds(scheduled):  # noqa: F811
    """Rows with bad labels or non-finite logits have the same results as in XLA's code.

    They do not affect other rows.
    """
    x, labels, d = operands((9, 101), "float32")
    options = {"label_smoothing": 0.1, "z_loss": 1e-3}
    labels = labels.at[0].set(-1).at[1].set(101)
    x = x.at[2, 50].set(jnp.nan).at[3].set(-jnp.inf).at[4, 7].set(jnp.inf).at[5, :90].set(-jnp.inf)
    x = x.at[5, labels[5]].set(1.0).at[6, :50].set(-3e38).at[7].set(1e4).at[7, labels[7]].add(14)

    def run(implementation):
        loss, vjp = jax.vjp(
            lambda x: cross_entropy(x, labels, implementation=implementation, **options), x
        )
        return loss, *vjp(d)

    loss, dx = run(scheduled)
    assert np.isnan(loss).tolist() == [True] * 5 + [False] * 4
    assert_computes((loss, dx), lambda: run("xla"))


@pytest.mark.parametrize(("dtype", "cols"), CASES)
def test_log_probabilities_and_entropies(dtype, cols, scheduled):  # noqa: F811
    options = test_log_prob.OPTIONS[CASES.index((dtype, cols)) % 4]
    x, labels, d = operands((9, cols), dtype)
    # In some rows, the label or another class has a probability of nearly 1. Other rows have equal
    # logits, or logits of -inf.
    x = x.at[1].set(0).at[1, labels[1]].set(90).at[2].set(0).at[2, (labels[2] + 1) % cols].set(90)
    x = x.at[3].set(-7).at[4, : cols // 2].set(-jnp.inf).at[4, labels[4]].set(1)
    x = x.at[5, : cols - 3].set(jnp.finfo(dtype).min).at[5, labels[5]].set(1)
    test_log_prob.check(x, labels, 3 * d, implementation=scheduled, **options)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_entropies_of_rows_of_all_kinds(scheduled):  # noqa: F811
    """Rows with bad labels, non-finite logits or masked positions have the correct results."""
    x, labels, d = operands((9, 101), "float32")
    labels = labels.at[0].set(-1).at[1].set(101).at[8].set(-100)
    x = x.at[2, 50].set(jnp.nan).at[3].set(-jnp.inf).at[4, 7].set(jnp.inf).at[8].set(jnp.nan)
    x = x.at[5].set(-jnp.inf).at[5, labels[5]].set(2)
    where = jnp.arange(9) < 8

    @jax.jit
    def run(x):
        results, vjp = jax.vjp(
            lambda x: log_prob_and_entropy(x, labels, where=where, implementation=scheduled), x
        )
        return *results, vjp((d, 1 - d))[0].sum(-1)

    log_prob, entropy, dx = run(x)
    for a in (log_prob, dx):
        assert np.isnan(a).tolist() == [True] * 5 + [False] * 4
    assert np.isnan(entropy).tolist() == [False] * 2 + [True] * 3 + [False] * 4
    assert (log_prob[5], entropy[5]) == (0, 0)
    assert (log_prob[8], entropy[8], dx[8]) == (0, 0, 0)
    # A log-probability whose cotangent is 0 has no gradient, even if its label is not a class.
    rows = jnp.array([0, 1, 5, 6, 7])
    given = x[rows], labels[rows], d.at[0].set(0)[rows]
    test_log_prob.check(*given, implementation=scheduled)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("dtype", "cols"), CASES[:2])
def test_dx_where_x_lies(dtype, cols, padding, scheduled):  # noqa: F811
    """The gradient may overwrite the logits, because each logit is read before it is overwritten.

    Rows may have padding at their end. The padding columns are not classes, and have no effect.
    """
    from jaxnorm_kernels import triton

    del scheduled
    x, labels, d = operands((9, cols), dtype)
    wide = jnp.concatenate([x, jnp.full((9, padding), jnp.finfo(x.dtype).max)], 1)
    forward = build_spec(
        "cross_entropy",
        "fwd",
        9,
        cols + padding,
        x.dtype,
        d.dtype,
        want_stats=True,
        padding=padding,
    )
    backward = changed(forward, direction="bwd", want_stats=False, overwrites_x=True)

    @jax.jit
    def step(x, labels, d):
        loss, stats = contract.call(triton, forward, x, labels)
        return loss, *contract.call(triton, backward, x, stats, labels, None, d)

    loss, dx = step(wide, labels, d)
    expected = CrossEntropy(x, labels, dtype=dtype)
    assert_within(loss, expected.loss, expected.loss_bound())
    assert_within(dx[:, :cols], expected.gradient(d), expected.gradient_bound(d))
    assert not dx[:, cols:].any()
