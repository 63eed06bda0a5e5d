"""Losses, log-probabilities and divergences with every kind of schedule in `test_schedules`."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_kl_divergence
import test_loss
from loss_cases import CrossEntropy, operands
from program_error import assert_computes
from reference import assert_within
from specs import build_spec, changed
from test_kl_divergence import (
    Divergence,
    check_nearly_impossible,
    check_special_rows,
    each_direction,
    masked_rows,
    special_rows,
)
from test_schedules import scheduled  # noqa: F401

from jaxnorm import kl_divergence, log_prob_and_entropy
from jaxnorm import softmax_cross_entropy_with_integer_labels as cross_entropy

# Raised by the interpreter's `max`.
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore:All-NaN slice")]

# Dtypes and columns. Unaligned rows may start at up to 8 offsets within a 16-byte word. Together,
# the nine rows of a test start at all of these offsets.
CASES = [("bfloat16", 101), ("float32", 101), ("float16", 104), ("float32", 100), ("bfloat16", 37)]
# The teacher's dtype in each of these cases.
TEACHERS = ["bfloat16", "float32", "bfloat16", "bfloat16", "float32"]
CAPPED = {"logits_scale": 0.7, "logit_softcap": 8.0, "teacher_logit_softcap": 8.0}
D = jnp.linspace(-1, 2, 9)


@pytest.mark.parametrize(("dtype", "cols"), CASES)
def test_losses(dtype, cols, scheduled):  # noqa: F811
    options = test_loss.OPTIONS[CASES.index((dtype, cols))]
    test_loss.check(*operands((9, cols), dtype), implementation=scheduled, **options)


@pytest.mark.parametrize("options", test_loss.OPTIONS[5:], ids=str)
def test_scaled_and_capped_losses(options, scheduled):  # noqa: F811
    """Losses of scaled and capped logits are correct, also beside a masked position of NaN."""
    x, labels, d = operands((9, 101), "float32")
    x = x.at[1, :50].set(-jnp.inf) if "logit_softcap" in options else x
    x, labels, where = x.at[4].set(jnp.nan), labels.at[4].set(-100), jnp.arange(9) % 4 != 0
    test_loss.check(x, labels, d, where, implementation=scheduled, **options)


@pytest.mark.parametrize(("dtype", "cols"), CASES)
def test_log_probabilities_and_entropies(dtype, cols, scheduled):  # noqa: F811
    options = test_loss.FUNCTIONS["log_prob"].options[CASES.index((dtype, cols)) % 4]
    x, labels, d = operands((9, cols), dtype)
    # In some rows, the label or another class has a probability of nearly 1. Other rows have equal
    # logits, or logits of -inf.
    x = x.at[1].set(0).at[1, labels[1]].set(90).at[2].set(0).at[2, (labels[2] + 1) % cols].set(90)
    x = x.at[3].set(-7).at[4, : cols // 2].set(-jnp.inf).at[4, labels[4]].set(1)
    x = x.at[5, : cols - 3].set(jnp.finfo(dtype).min).at[5, labels[5]].set(1)
    test_loss.check(x, labels, 3 * d, implementation=scheduled, of="log_prob", **options)


@pytest.mark.parametrize("function", [cross_entropy, log_prob_and_entropy])
def test_rows_of_all_kinds(function, scheduled):  # noqa: F811
    """Rows with bad labels or non-finite logits have the same results as in XLA's code.

    They do not affect other rows.
    """
    x, labels, d = operands((9, 101), "float32")
    labels = labels.at[0].set(-1).at[1].set(101)
    x = x.at[2, 50].set(jnp.nan).at[3].set(-jnp.inf).at[4, 7].set(jnp.inf).at[5, :90].set(-jnp.inf)
    x = x.at[5, labels[5]].set(1.0).at[6, :50].set(-3e38).at[7].set(1e4).at[7, labels[7]].add(14)

    def run(implementation):
        results, vjp = jax.vjp(lambda x: function(x, labels, implementation=implementation), x)
        return results, *vjp(jax.tree.map(lambda _: d, results))

    results, dx = run(scheduled)
    assert np.isnan(jax.tree.leaves(results)[0]).tolist() == [True] * 5 + [False] * 4
    assert_computes((results, dx), lambda: run("xla"))


@each_direction
@pytest.mark.parametrize(("dtype", "cols"), CASES)
def test_divergences(dtype, cols, reverse, scheduled):  # noqa: F811
    teacher_dtype = TEACHERS[CASES.index((dtype, cols))]
    x, teacher = test_kl_divergence.operands((9, cols), dtype, teacher_dtype)
    options = {"reverse": reverse, "implementation": scheduled}
    y, vjp = jax.vjp(lambda x: kl_divergence(x, teacher, **options), x)
    of = Divergence(x, teacher, dtype, reverse=reverse)
    assert_within(y, of.value, of.bound)
    assert_within(*vjp(D), *of.gradient(D))
    # Equal logits have a divergence of exactly 0.
    y, vjp = jax.vjp(lambda x: kl_divergence(x, 1000 * teacher, **options), 1000 * teacher)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(vjp(D)[0], 0)


@each_direction
@pytest.mark.parametrize(
    "options", [{"logits_scale": 0.7}, CAPPED, CAPPED | {"teacher_logit_softcap": None}], ids=str
)
def test_scaled_and_capped_divergences(options, reverse, scheduled):  # noqa: F811
    """Results equal those of XLA's code, even with masked and weighted positions."""
    x, teacher = test_kl_divergence.operands((9, 101), "float32")
    weights = jnp.arange(9) % 4 * 0.5

    def run(x, teacher, implementation="xla"):
        given = {**options, "reverse": reverse, "where": weights, "implementation": implementation}
        y, vjp = jax.vjp(lambda x: kl_divergence(x, teacher, **given), x)
        return y, *vjp(D)

    results = run(x.at[4].set(jnp.nan), teacher, scheduled)
    assert_computes(results, run, x.at[4].set(0), teacher)


@each_direction
def test_divergences_of_special_rows(reverse, scheduled):  # noqa: F811
    """Divergences are right for infinite, NaN and masked logits, and if they are small."""

    def run(x, teacher, **options):
        given = {"reverse": reverse, "implementation": scheduled, **options}
        y, vjp = jax.vjp(lambda x: kl_divergence(x, teacher, **given), x)
        return y, *vjp(jnp.ones(len(x)))

    check_special_rows(*run(*special_rows(101, start=30)), reverse=reverse)
    for dtype in ("bfloat16", "float32"):
        x, teacher, of = masked_rows(101, dtype, reverse=reverse)
        y, dx = run(x, teacher, logits_scale=2.0)
        assert_within(y, of.value, of.bound)
        assert_within(dx, *of.gradient(jnp.ones(4)))
    if not reverse:
        check_nearly_impossible(lambda x, teacher: run(x, teacher)[0], 101)
    x, noise = test_kl_divergence.operands((5, 1001), "float32")
    of = Divergence(x, x + 1e-2 * noise, "float32", reverse=reverse)
    y, _ = run(x, x + 1e-2 * noise)
    assert np.all(y >= 0)
    # The absolute error of a small divergence is proportional to the difference of the logits.
    assert_within(y, of.value, 64 * np.finfo(np.float32).eps * 1e-2)


@pytest.mark.parametrize("op", ["cross_entropy", "kl_divergence"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dx_where_x_lies(dtype, padding, op, scheduled):  # noqa: F811
    """The gradient may overwrite the logits, because each logit is read before it is overwritten.

    Rows may have padding at their end. The padding columns are not classes, and have no effect.
    """
    from jaxnorm_kernels import triton

    del scheduled
    x, labels, _ = operands((9, 101), dtype)
    second, options = labels, {}
    if op == "kl_divergence":
        second, options = jnp.flip(x, 0), {"teacher_dtype": x.dtype, "reverse": True}

    def padded(a):
        lowest = jnp.full((9, padding), jnp.finfo(x.dtype).max)
        return jnp.concatenate([a, lowest], 1) if a.ndim == 2 else a

    sizes = 9, 101 + padding, x.dtype, np.dtype(np.float32)
    forward = build_spec(op, "fwd", *sizes, want_stats=True, padding=padding, **options)
    backward = changed(forward, direction="bwd", want_stats=False, overwrites_x=True)

    @jax.jit
    def step(x, second, d):
        y, stats = contract.call(triton, forward, x, second)
        residuals = (x, stats, second, None, *([y] if op == "kl_divergence" else []))
        return y, *contract.call(triton, backward, *residuals, d)

    y, dx = step(padded(x), padded(second), D)
    if op == "kl_divergence":
        of = Divergence(x, second, dtype, reverse=True)
        expected = (of.value, of.bound), of.gradient(D)
    else:
        of = CrossEntropy(x, second, dtype=dtype)
        expected = (of.loss, of.loss_bound()), (of.gradient(D), of.gradient_bound(D))
    assert_within(y, *expected[0])
    assert_within(dx[:, :101], *expected[1])
    assert not dx[:, 101:].any()
