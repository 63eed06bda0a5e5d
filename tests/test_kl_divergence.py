"""kl_divergence: values and gradients in each dtype, special values, scales, and saved arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import capped, divergences
from program_error import analyse, assert_computes
from reference import SAFETY, assert_within, exact, rounding, unit_roundoff

from jaxnorm import kl_divergence

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

DTYPES = ["bfloat16", "float16", "float32", "float64"]
DIRECTIONS = {"forward": False, "reverse": True}
each_direction = pytest.mark.parametrize("reverse", DIRECTIONS.values(), ids=[*DIRECTIONS])


def operands(shape, dtype, teacher_dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(2 * rng.normal(size=shape), d) for d in (dtype, teacher_dtype or dtype)]


class Divergence:
    """The divergence of each row and its gradient in float64, with bounds on their errors.

    The values are those of a formula in plain JAX, and the bounds are those of XLA's code.
    `logits_scale` is a number, or an array with one number for each row. `dtype` is the dtype of
    the gradient.
    """

    def __init__(self, x, teacher, dtype, *, reverse, logits_scale=1.0, **softcaps):
        self.arrays, self.dtype = (x, teacher), dtype
        self.wide = jnp.result_type(x, teacher, jnp.float32)
        self.reverse, self.scale = reverse, logits_scale
        self.caps = [softcaps.get(name) for name in ("logit_softcap", "teacher_softcap")]
        self.value, self.bound = self._analysed(lambda divergence, x: divergence(x))

    def gradient(self, d):
        dx, error = self._analysed(lambda divergence, x: jax.vjp(divergence, x)[1](d)[0])
        return dx, error + rounding(dx, self.dtype)

    def _analysed(self, run):
        """Return ``run(divergence, x)`` in float64 and its bound, for a function of the logits."""
        options = {"reverse": self.reverse, "logits_scale": self.scale, "implementation": "xla"}
        options |= dict(zip(("logit_softcap", "teacher_logit_softcap"), self.caps))

        def ours(x, teacher):
            return kl_divergence(x, teacher, **options)

        def plain(x, teacher):
            factor = jnp.reshape(self.scale, (-1, 1)).astype(self.wide)
            scaled = (capped(factor * z, cap) for z, cap in zip((x, teacher), self.caps))
            return divergences(*scaled, reverse=self.reverse)

        ours, plain = (
            analyse(
                lambda x, teacher, f=f: run(
                    lambda x: f(x, teacher.astype(self.wide)), x.astype(self.wide)
                ),
                *self.arrays,
            )
            for f in (ours, plain)
        )
        return plain.value, ours.error


@each_direction
@pytest.mark.parametrize("teacher_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(x64, dtype, teacher_dtype, reverse):
    x, teacher = operands((5, 1000), dtype, teacher_dtype)
    y, vjp = jax.vjp(lambda x: kl_divergence(x, teacher, reverse=reverse), x)
    assert y.dtype == ("float64" if dtype == "float64" else "float32")
    of = Divergence(x, teacher, dtype, reverse=reverse)
    assert_within(y, of.value, of.bound)
    d = jnp.linspace(-1, 2, 5, dtype=y.dtype)
    (dx,) = vjp(d)
    assert dx.dtype == x.dtype
    assert_within(dx, *of.gradient(d))


@each_direction
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, {"logit_softcap": 3.0, "teacher_logit_softcap": 3.0}])
def test_equal_logits_have_a_divergence_of_exactly_0(dtype, reverse, options):
    x, _ = operands((5, 1000), dtype)
    x = x.at[0].multiply(1000).at[1].set(0)

    def function(x):
        return kl_divergence(x, teacher, reverse=reverse, logits_scale=0.7, **options)

    teacher = x
    y, vjp = jax.jit(lambda x: jax.vjp(function, x))(x)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(vjp(jnp.ones_like(y))[0], 0)


@each_direction
@pytest.mark.parametrize(("gap", "cols"), [(1e-1, 30000), (1e-3, 30000), (1e-3, 8), (1e-7, 50)])
def test_small_divergences(x64, reverse, gap, cols):
    """The absolute error of a small divergence is at most proportional to `gap`.

    The logits of student and teacher differ by about `gap`. The divergence is about gap^2 / 2, so
    its relative error is proportional to 1 / gap: the smaller the gap, the larger this error.
    """
    x, noise = operands((4, cols), "float32")
    teacher = x + gap * noise
    of = Divergence(x, teacher, "float32", reverse=reverse)
    y = kl_divergence(x, teacher, reverse=reverse)
    assert np.all(y >= 0)
    assert_within(y, of.value, SAFETY * unit_roundoff("float32") * 16 * gap)


INF, NAN = np.inf, np.nan
# Each entry has the student's logits, the teacher's logits, and the expected divergences in both
# directions. "finite" means any finite divergence.
SPECIAL = [
    ([0, 1, 2], [0, -INF, 2], "finite", INF),
    ([0, -INF, 1], [0, 0, 1], INF, "finite"),
    ([0, -INF, 1], [0, -INF, 3], "finite", "finite"),
    ([-200, 0, -INF], [0, -200, -INF], "finite", "finite"),
    ([0, -INF, 1], [0, -200, 1], INF, "finite"),
    ([-INF, -INF, -INF], [0, 1, 2], NAN, NAN),
    ([0, 1, 2], [-INF, -INF, -INF], NAN, NAN),
    ([0, INF, 0], [0, 1, 2], NAN, NAN),
    ([0, 1, 2], [0, INF, 0], NAN, NAN),
    ([0, NAN, 0], [0, -INF, 2], NAN, NAN),
]


def special_rows(cols, start=0):
    """Return the student's and the teacher's logits for the rows of `SPECIAL`.

    The three classes from index `start` on have the logits in `SPECIAL`. All other logits are -inf.
    """
    arrays = np.full((2, len(SPECIAL), cols), -INF, np.float32)
    arrays[..., start : start + 3] = [[row[i] for row in SPECIAL] for i in (0, 1)]
    return [*map(jnp.asarray, arrays)]


def check_special_rows(y, dx, *, reverse):
    """Check the divergences `y` of `special_rows`, and the gradients `dx` if they are not None."""
    for i, row in enumerate(SPECIAL):
        outcome, gradient = row[2 + reverse], None if dx is None else dx[i]
        if outcome == "finite":
            assert 0 <= y[i] < INF
            assert gradient is None or np.isfinite(gradient).all()
        else:
            np.testing.assert_array_equal(y[i], outcome)
            assert gradient is None or not np.isnan(outcome) or np.isnan(gradient).any()


@each_direction
def test_special_values(reverse):
    x, teacher = special_rows(3)
    y, vjp = jax.vjp(lambda x: kl_divergence(x, teacher, reverse=reverse), x)
    check_special_rows(y, *vjp(jnp.ones_like(y)), reverse=reverse)


def masked_rows(cols, dtype, *, reverse):
    """Return logits that are masked by low finite numbers, and their divergences for a scale of 2.

    The result is (x, teacher, `Divergence`). The columns of the four rows are masked as follows:
    only in P; in P by a moderate number and in Q by the lowest one; the other way round; in both by
    the lowest one. The divergences are computed with -1000 in place of these numbers. With a scale
    of 2, they give the same probabilities: 0.
    """
    column, lowest = np.arange(cols), float(jnp.finfo(dtype).min)
    moderate = max(-1e9, lowest / 2)
    in_p = np.stack([column % 3 == 0, column < cols // 2, column >= cols // 3, column % 7 > 0])
    in_q = in_p & (np.arange(4) > 0)[:, None]
    of_p, of_q = np.array([[lowest, moderate, lowest, lowest], [0, lowest, moderate, lowest]])
    p, q = operands((4, cols), dtype)

    def ordered(p, q):
        return (p, q) if reverse else (q, p)

    pairs = [
        ((p, in_p, of_p), (q, in_q, of_q)),
        ((p, in_p, np.full(4, -1000.0)), (q, in_q, np.full(4, -1000.0))),
    ]
    masked, equivalent = (
        [jnp.where(m, jnp.asarray(low, a.dtype)[:, None], a) for a, m, low in ordered(*pair)]
        for pair in pairs
    )
    return *masked, Divergence(*equivalent, dtype, reverse=reverse, logits_scale=2.0)


@each_direction
@pytest.mark.parametrize(
    "scale", [2.0, np.float32(2), np.full(4, 2.0)], ids=["number", "traced", "array"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_whose_multiples_overflow(x64, dtype, scale, reverse):
    """A masked logit that becomes infinite when it is scaled has no effect on the results."""
    x, teacher, of = masked_rows(60, dtype, reverse=reverse)
    scale = scale if isinstance(scale, float) else jnp.asarray(scale)
    function = functools.partial(kl_divergence, reverse=reverse, logits_scale=scale)
    y, vjp = jax.vjp(lambda x: function(x, teacher), x)
    assert_within(y, of.value, of.bound)
    assert_within(*vjp(jnp.ones_like(y)), *of.gradient(jnp.ones_like(y)))


def check_nearly_impossible(run, cols):
    """Check the divergences of rows in which Q is masked by the lowest number and P is not.

    ``run(x, teacher)`` returns the divergences KL(teacher || x). They are at least P's share of the
    masked columns times the magnitude of the lowest number. They may overflow.
    """
    _, teacher = operands((2, cols), "float32")
    column, lowest = np.arange(cols), np.finfo(np.float32).min
    is_masked = np.stack([column < cols // 2, column % 3 == 0])
    p, depth = np.exp(exact(teacher)), np.ptp(exact(teacher))
    expected = -float(lowest) * np.where(is_masked, p, 0).sum(-1) / p.sum(-1)
    y = run(jnp.where(is_masked, lowest, 0), teacher)
    error = SAFETY * (np.sqrt(cols) + depth + 4) * unit_roundoff("float32")
    assert np.all(exact(y) >= (1 - error) * expected)


def test_nearly_impossible_classes():
    check_nearly_impossible(kl_divergence, 300)


@each_direction
def test_what_is_left_out(reverse):
    """Masked positions and classes have no effect, whatever their logits are."""
    x, teacher = operands((4, 6), "float32")
    wrong = x.at[1].set(NAN).at[2].set(INF)
    counts = jnp.array([True, False, False, True])
    function = functools.partial(kl_divergence, reverse=reverse)
    y, vjp = jax.vjp(lambda x: function(x, teacher, where=counts), wrong)
    np.testing.assert_array_equal(y, jnp.where(counts, function(x, teacher), 0))
    assert np.isfinite(vjp(jnp.ones(4))[0]).all()
    classes = jnp.arange(6) % 3 > 0
    x, teacher = x.at[:, 0].set(NAN), teacher.at[:, 3].set(INF)
    y, vjp = jax.vjp(lambda x: function(x, teacher, where=classes[None]), x)
    kept = np.flatnonzero(classes)
    assert_computes(
        y, lambda x, t: divergences(x, t, reverse=reverse), x[:, kept], teacher[:, kept]
    )
    np.testing.assert_array_equal(vjp(jnp.ones(4))[0][:, ~classes], 0)
    for none in (jnp.zeros((4, 6), bool), jnp.zeros(4, bool)):
        y, vjp = jax.vjp(lambda x: function(x, teacher, where=none), x)  # noqa: B023
        np.testing.assert_array_equal(y, 0)
        np.testing.assert_array_equal(vjp(jnp.ones(4))[0], 0)
    np.testing.assert_array_equal(function(x[:, :0], teacher[:, :0]), 0)


@each_direction
@pytest.mark.parametrize("axis", [1, (0, 2), None, (-1, 1)])
def test_other_axes(x64, axis, reverse):
    x, teacher = operands((3, 4, 5), "float64")
    axes = range(3) if axis is None else np.atleast_1d(axis) % 3
    moved = [jnp.moveaxis(a, tuple(axes), range(-len(axes), 0)) for a in (x, teacher)]
    moved = [a.reshape(*a.shape[: 3 - len(axes)], -1) for a in moved]
    y = kl_divergence(x, teacher, axis, reverse=reverse)
    assert_computes(y, lambda x, t: divergences(x, t, reverse=reverse), *moved)


@each_direction
def test_scales_and_caps(x64, reverse):
    """`logits_scale` may be a number, a traced scalar, or an array with one value per position."""
    x, teacher = operands((3, 4, 5), "float64")
    options = {"reverse": reverse, "logit_softcap": 2.0, "teacher_logit_softcap": 3.0}

    def plain(x, teacher, scale):
        z, zt = (c * jnp.tanh(scale * v / c) for v, c in ((x, 2.0), (teacher, 3.0)))
        return divergences(z, zt, reverse=reverse)

    def ours(x, teacher, scale):
        return kl_divergence(x, teacher, logits_scale=scale, **options)

    def sines(function, scale):
        return lambda x, teacher: jnp.sin(function(x, teacher, scale)).sum()

    of_rows = jnp.linspace(0.5, 2, 12).reshape(3, 4)
    for scale in (0.7, np.float32(0.7), of_rows, of_rows[:, :1], np.asarray(of_rows)):
        array = np.asarray(scale, np.float64)
        array = array[..., None] if array.ndim else array
        both = jax.value_and_grad(sines(ours, scale))(x, teacher)
        assert_computes(both, jax.value_and_grad(sines(plain, array)), x, teacher)
    step = jax.jit(ours)
    step(x, teacher, 0.5), step(x, teacher, 0.7)
    assert step._cache_size() == 1
    bf16 = ours(x.astype("bfloat16"), teacher.astype("float16"), jnp.float64(0.7))
    assert bf16.dtype == "float32"


def test_the_teacher_is_a_constant(x64):
    x, teacher = operands((3, 4), "float64")
    gradient = jax.grad(lambda x, t: kl_divergence(x, t, reverse=True).sum(), (0, 1))
    np.testing.assert_array_equal(gradient(x, teacher)[1], 0)
    second = jax.jacobian(gradient, 1)(x, teacher)
    np.testing.assert_array_equal(second[0], 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_saved(dtype):
    """The derivative saves both inputs and five numbers for each row."""
    x, teacher = operands((64, 1024), dtype)
    saved = jax.tree.leaves(jax.vjp(lambda x: kl_divergence(x, teacher), x)[1])
    assert sum(a.nbytes for a in saved) == 2 * x.nbytes + 5 * 64 * 4
