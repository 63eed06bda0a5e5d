"""Linear losses: values and gradients in each dtype, chunk and reduction, against plain JAX.

`FUNCTIONS` lists the losses. The table of functions (`functions.FUNCTIONS`) has them as well; its
tests show their derivatives of each order and mode, batches, and settings of JAX.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_loss_cases import operands
from pairs import pairwise
from program_error import assert_computes

import jaxnorm
from jaxnorm import linear_softmax_cross_entropy as linear_loss
from jaxnorm.operations.linear_loss_call import chunks_of

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


class Of(NamedTuple):
    """A function that takes x and a weight, and computes the logits ``x @ weight`` itself.

    Attributes:
      ours: takes x, the weight, the teacher's logits, a temperature and labels. Only any losses use
        the temperature, and the gradient of a teacher's logits.
      plain: takes logits in place of x and the weight; returns the results of the positions.
      options: all options that change results.
      reductions: the values of ``reduction``; None for a function without it.
      matmuls: the number of matmuls in the program of a value and its gradients. The program has
        the matmuls of a chunk twice: before the loop, for the first chunk, and in the loop.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    options: dict[str, Any]
    reductions: tuple[Any, ...] = ("mean", "sum", "none")
    matmuls: int = 2 * 3


def teacher_layer(teacher):
    """Return a teacher's hidden states and its weight, of which the logits `teacher` result."""
    return teacher, jnp.eye(teacher.shape[-1], dtype=teacher.dtype)


def bounded(cross_entropy, logits, label, teacher, temperature):
    """A function of a cross-entropy, of which it computes the label and the mask."""
    loss = cross_entropy(logits, jnp.maximum(label - 2, 0), label >= 2)
    return teacher[0] * jnp.tanh(temperature * loss / 2)


def of_jaxnorm(logits, label, where):
    return jaxnorm.softmax_cross_entropy_with_integer_labels(logits, label, where=where)


def of_jax(logits, label, where):
    return jnp.where(where, jax.nn.logsumexp(logits) - logits[label], 0)


def of_positions(fun):
    """Return the loss `fun` of one position as a function of all positions."""

    def run(logits, teacher, temperature, labels):
        each = functools.partial(fun, temperature=temperature)
        return jax.vmap(jax.vmap(each))(logits, labels, teacher)

    return run


def any_loss(fun, plain):
    def ours(x, weight, teacher, temperature, labels, **options):
        def of_row(*row):
            return fun(*row, temperature)

        return jaxnorm.linear_loss(of_row, x, weight, labels, teacher, **options)

    return Of(ours, of_positions(plain), {})


SMOOTHED, BENT = {"label_smoothing": 0.1, "z_loss": 1e-2}, {"logit_softcap": 2.0}
SCALES = {"logits_scale": 1.5}
FUNCTIONS = {
    "cross-entropy": Of(
        lambda x, w, teacher, t, labels, **o: linear_loss(x, w, labels, **o),
        lambda z, teacher, t, labels, logits_scale=1, logit_softcap=None, **o: functions.losses(
            logits_scale * z, labels, 1, o.get("label_smoothing", 0), o.get("z_loss", 0),
            logit_softcap,
        ),
        SMOOTHED | BENT | SCALES,
    ),
    "log_prob": Of(
        lambda x, w, teacher, t, labels, **o: jaxnorm.linear_log_prob_and_entropy(
            x, w, labels, **o
        ),
        lambda z, teacher, t, labels, logits_scale=1, logit_softcap=None: (
            functions.log_prob_and_entropy(logits_scale * z, labels, 1, logit_softcap)
        ),
        BENT | SCALES,
        (None,),
        1 + 2 * 3,
    ),
    "divergence": Of(
        lambda x, w, teacher, t, labels, **o: jaxnorm.linear_kl_divergence(
            x, w, *teacher_layer(teacher), **o
        ),
        lambda z, teacher, t, labels, logits_scale=1, **o: functions.divergences(
            logits_scale * z, logits_scale * teacher, reverse=bool(o), cap=o.get("logit_softcap")
        ),
        BENT | SCALES | {"teacher_logit_softcap": 2.0, "reverse": True},
        matmuls=2 * 4,
    ),
    "plain JAX": any_loss(functions.tempered_loss, functions.tempered_loss),
    "a loss of jaxnorm": any_loss(
        functools.partial(bounded, of_jaxnorm), functools.partial(bounded, of_jax)
    ),
}  # fmt: skip
KINDS = [(of, reduction) for of in FUNCTIONS for reduction in FUNCTIONS[of].reductions]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def call_of(kind, labels, **options):
    """Return our function of the floats: x, weight, bias, the teacher's logits, a temperature."""
    of, reduction = kind
    options |= {} if reduction is None else {"reduction": reduction}

    def run(x, weight, bias, teacher, temperature):
        return FUNCTIONS[of].ours(x, weight, teacher, temperature, labels, bias=bias, **options)

    return run


def plain_of(kind, labels, where=None, **options):
    """Return the same function in plain JAX, in float32 or float64."""
    of, reduction = kind
    weights = jnp.ones(labels.shape) if where is None else where.astype(jnp.float32)

    def run(x, weight, bias, teacher, temperature):
        wide = jnp.result_type(x, weight, jnp.float32)
        logits = x.astype(wide) @ weight.astype(wide) + bias.astype(wide)
        results = FUNCTIONS[of].plain(logits, teacher, temperature, labels, **options)
        results = jax.tree.map(lambda y: y * weights.astype(y.dtype), results)
        if reduction in (None, "none"):
            return results
        return results.sum() / (weights.sum() if reduction == "mean" else 1)

    return run


def total(function):
    """Return a function that computes one number, in which the results have fixed cotangents."""

    def of_result(y):
        return jnp.sum(1.7 * y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return lambda *a: sum(map(of_result, jax.tree.leaves(function(*a))))


def with_gradients(function):
    return jax.value_and_grad(total(function), (0, 1, 2, 3, 4))


def floats_and_labels(dtypes="float32", classes=21, shape=(3, 7)):
    """Return the float operands of a function, and labels."""
    x, weight, bias, labels = operands(shape[1], 16, classes, dtypes, lead=shape[:1])
    teacher = jnp.asarray(np.random.default_rng(5).normal(size=(*shape, classes)), jnp.float32)
    return (x, weight, bias, teacher, jnp.float32(0.7)), labels


def check(kind, arrays, labels, **options):
    """Assert that the value and all gradients are those of plain JAX, in the operands' dtypes."""
    others = {name: a for name, a in options.items() if name not in ("chunk", "dtype")}
    program = with_gradients(call_of(kind, labels, **options))
    theirs = with_gradients(plain_of(kind, labels, **others))
    value, gradients = jax.jit(program)(*arrays)
    assert_computes((value, gradients), theirs, *arrays, like=program)
    assert [g.dtype for g in gradients] == [a.dtype for a in arrays]
    results = jax.eval_shape(call_of(kind, labels, **options), *arrays)
    wide = jnp.result_type(*arrays[:2], jnp.float32)
    assert {a.dtype for a in jax.tree.leaves(results)} == {wide}


LABELS = floats_and_labels()[1]
WHERE = {
    "all": None,
    "mask": LABELS % 3 > 0,
    # Weights may have any sign and size. The positions with a weight of 0 do not count.
    "weights": jnp.asarray([0.3, 0, -2, 1, 1e-6, 4, 0.5] * 3, jnp.float32).reshape(3, 7),
}
MIXES = [
    *("float32", "bfloat16", "float16"),
    ("bfloat16", "float32", "float32"),
    ("float32", "bfloat16", "bfloat16"),
    ("float16", "bfloat16", "float16"),
]


@pytest.mark.parametrize(
    ("kind", "dtypes", "chunk", "where", "all_options"),
    pairwise(KINDS, MIXES, [5, 1, 7, 64, None], [*WHERE], [False, True]),
    ids=str,
)
def test_values_and_gradients(kind, dtypes, chunk, where, all_options):
    """A chunk may have 1 row, a number that does not divide the 21 rows, or more rows than x."""
    arrays, labels = floats_and_labels(dtypes)
    options = FUNCTIONS[kind[0]].options if all_options else {}
    given = {} if WHERE[where] is None else {"where": WHERE[where]}
    check(kind, arrays, labels, chunk=chunk, **given, **options)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("of", FUNCTIONS)
@pytest.mark.parametrize("dtypes", ["float64", ("float32", "float64", "float32")], ids=str)
def test_float64(dtypes, of):
    kind = of, FUNCTIONS[of].reductions[0]
    check(kind, *floats_and_labels(dtypes, classes=24), chunk=8, **FUNCTIONS[of].options)


@pytest.mark.parametrize(
    ("dtypes", "dtype", "of"),
    pairwise(MIXES[1:], [None, "bfloat16", "float16", "float32"], ["cross-entropy", "log_prob"]),
    ids=str,
)
def test_dtypes_of_products(dtypes, dtype, of):
    """Matmuls run in the operands' promoted dtype or in `dtype=`, whichever is narrower.

    Only the logits may have a wider dtype.
    """
    arrays, labels = floats_and_labels(dtypes, classes=70)
    options = {"chunk": 4} | ({} if dtype is None else {"dtype": dtype})
    kind = of, FUNCTIONS[of].reductions[0]
    if dtype is not None:
        check(kind, arrays, labels, **options)
    products = re.findall(
        r"stablehlo.dot_general.*\(tensor<[\dx]+(\w+)>, tensor<[\dx]+(\w+)>\) -> "
        r"tensor<[\dx]+(\w+)>",
        jax.jit(with_gradients(call_of(kind, labels, **options))).lower(*arrays).as_text(),
    )
    promoted = jnp.promote_types(*(a.dtype for a in arrays[:2]))
    narrow = min(promoted, jnp.dtype(dtype or promoted), key=lambda d: d.itemsize)
    name = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[narrow.name]
    assert [p[:2] for p in products] == [(name, name)] * FUNCTIONS[of].matmuls
    assert of != "log_prob" or products[0][2] == "f32"


@each_kind
def test_positions_that_do_not_count(kind):
    """Masked positions have no effect, even if x, a row or a label is invalid there.

    The weight's gradient is a sum over all positions. A NaN of a masked position must not reach it.
    If no position counts, the results and the gradients are 0.
    """
    (x, weight, bias, teacher, temperature), labels = floats_and_labels()
    where = WHERE["mask"]
    valid = x, weight, bias, teacher, temperature, labels, where
    invalid = (
        *(jnp.where(where[..., None], x, jnp.nan), weight, bias),
        *(jnp.where(where[..., None], teacher, jnp.nan), temperature),
        *(jnp.where(where, labels, -100), where),
    )

    @jax.jit
    def run(*arrays):
        function = call_of(kind, arrays[5], where=arrays[6], chunk=5)
        return function(*arrays[:5]), with_gradients(function)(*arrays[:5])

    for a, b in zip(*map(jax.tree.leaves, (run(*invalid), run(*valid))), strict=True):
        np.testing.assert_array_equal(a, b)
    for a in jax.tree.leaves(run(*invalid[:-1], jnp.zeros_like(where))):
        np.testing.assert_array_equal(a, 0)


def test_weights_that_cancel():
    """If the weights add up to 0, the mean is 0. Weights have no gradient, and masks broadcast."""
    (x, weight, *_), labels = floats_and_labels()
    cancelling = jnp.array([1.0, -1, 2, -2, 0, 0, 0])[None]
    run = jax.value_and_grad(lambda x, where: linear_loss(x, weight, labels, where=where), (0, 1))
    for a in jax.tree.leaves(run(x, cancelling)):
        np.testing.assert_array_equal(a, 0)
    where = jnp.arange(7)[None] < 4
    ours = linear_loss(x, weight, labels, where=where)
    assert_computes(ours, linear_loss, x[:, :4], weight, labels[:, :4])


def test_chunks_by_default():
    """By default, a chunk has at most 1 GiB of logits and at most 2048 rows.

    All chunks have nearly equal sizes, which are multiples of 128 rows. A chunk may have more than
    2048 rows if its logits are not larger than the weight's gradient.
    """
    bf16, f32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    cases = [
        (None, 8192, (2048, 128256), bf16, 2048),
        (None, 8192, (4096, 128256), bf16, 4096),  # as large as the weight's gradient
        (None, 8192, (2048, 256000), f32, 1024),
        (None, 8192, (2048, 2**20), f32, 512),
        (None, 9000, (2048, 32000), bf16, 1920),  # five nearly equal chunks
        (None, 100, (2048, 32000), bf16, 100),
        (4096, 100, (2048, 32000), bf16, 100),
        (None, 0, (2048, 32000), bf16, 1),
    ]
    for chunk, rows, weight, dtype, expected in cases:
        assert chunks_of(chunk, rows, weight, (dtype, dtype)) == (expected, False)
    # All rows form one chunk if its logits and their gradient take no more memory than the
    # accumulator. This is the float32 array in which smaller chunks would add up the gradient of
    # the weight.
    for rows, weight, logits, expected in (
        (8192, (4096, 128256), bf16, 8192),
        (8320, (4096, 128256), bf16, 2816),
        (8192, (2048, 128256), bf16, 2048),
        (5376, (8192, 32000), f32, 5376),
    ):
        given, accumulator = (rows, weight, (logits, bf16)), 4 * weight[0] * weight[1]
        assert chunks_of(None, *given, accumulator=accumulator) == (expected, False)
        assert chunks_of(64, *given, accumulator=accumulator) == (64, False)
    # A call may store the gradient of all logits. It then needs no accumulator, but it must not use
    # more memory than a call with an accumulator. If it would, chunks of half as many rows are
    # tried, because their logits take less memory. If this is not enough, the gradient of all
    # logits is not stored.
    for rows, weight, expected in (
        (8192, (4096, 128256), (2048, True)),
        (8192, (2048, 128256), (1024, True)),
        (16384, (2048, 50257), (2048, False)),
    ):
        accumulator = 4 * weight[0] * weight[1]
        assert chunks_of(None, rows, weight, (f32, bf16), accumulator=accumulator) == expected
    # The logits are float32. The matmul that computes them has operands of 16 bits.
    assert chunks_of(None, 8192, (8192, 32000), (f32, bf16)) == (4096, False)


@pytest.mark.parametrize("shape", [(1, 40), (7, 40), (7, 1)], ids=str)
def test_masks_of_classes(shape):
    """Masks of classes have the same effect as in `log_prob_and_entropy`, which takes logits.

    The last chunk is partial.
    """
    x, weight, bias, labels = operands(7, 16, 40)
    where = jnp.asarray(np.random.default_rng(3).random(shape) < 0.6)

    def of_logits(x, weight, bias):
        whole = jnp.broadcast_to(where, (7, 40))
        return jaxnorm.log_prob_and_entropy(x @ weight + bias, labels, where=whole)

    def in_chunks(x, weight, bias):
        given = {"bias": bias, "where": where, "chunk": 3}
        return jaxnorm.linear_log_prob_and_entropy(x, weight, labels, **given)

    ours, theirs = (jax.value_and_grad(total(f), (0, 1, 2)) for f in (in_chunks, of_logits))
    assert_computes(jax.jit(ours)(x, weight, bias), theirs, x, weight, bias, like=ours)


@pytest.mark.parametrize("of", ["cross-entropy", "log_prob"])
def test_labels_outside(of):
    """A label out of range makes its loss or log-probability and the gradient of its row NaN.

    The weight's gradient is a sum over rows, so it is also NaN. The entropy and its gradient do not
    depend on the label.
    """
    (x, weight, bias, *rest), labels = floats_and_labels()
    bad = jnp.zeros_like(labels, bool).at[1, 3].set(True).at[2, 0].set(True)
    outside = labels.at[1, 3].set(21).at[2, 0].set(-1)

    def run(labels, at=0):
        def function(x, weight):
            kind = of, FUNCTIONS[of].reductions[-1]
            results = call_of(kind, labels, chunk=2)(x, weight, bias, *rest)
            return jax.tree.leaves(results)[at]

        results, vjp = jax.vjp(function, x, weight)
        return results, *vjp(jnp.cos(jnp.arange(21.0)).reshape(3, 7))

    results, dx, dw = run(outside)
    np.testing.assert_array_equal(np.isnan(results), bad)
    np.testing.assert_array_equal(np.isnan(dx).all(-1), bad)
    np.testing.assert_array_equal(np.isnan(dx).any(-1), bad)
    assert np.isnan(dw).all()
    if of == "log_prob":
        for a, b in zip(run(outside, 1), run(jnp.where(bad, 0, labels), 1), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", [("cross-entropy", "mean"), ("cross-entropy", "none"), KINDS[3]])
def test_shapes(kind):
    """Arrays may have no rows or only one class; x may have a single axis."""
    for lead, classes in (((0,), 5), ((2, 0), 5), ((), 5), ((3,), 1)):
        x, weight = jnp.ones((*lead, 4), jnp.bfloat16), jnp.ones((4, classes), jnp.bfloat16)
        run = call_of(kind, jnp.zeros(lead, jnp.int32), chunk=2)

        def program(x, weight, run=run):
            return run(x, weight, None, None, None)

        results = program(x, weight)
        assert {a.shape for a in jax.tree.leaves(results)} == {() if "mean" in kind else lead}
        gradients = jax.jit(jax.grad(total(program), (0, 1)))(x, weight)
        assert [g.shape for g in gradients] == [x.shape, weight.shape]
        even = 0 if 0 in lead else np.log(classes)
        expected = (-even, even) if kind[0] == "log_prob" else even
        assert_computes(results, program, x, weight, expected=expected)


def test_logits_are_never_rounded():
    """Logits that are computed from 16-bit operands are not rounded to 16 bits.

    So the results are within the error bounds for float32 logits. Results that are computed from
    rounded logits would exceed these bounds.
    """
    x, weight, _, labels = operands(64, 512, 4096, "bfloat16")
    weight = 4 * weight  # so that logits are as large as a trained model's
    ours = functools.partial(jaxnorm.linear_log_prob_and_entropy, chunk=24)

    def plain(x, weight, labels):
        logits = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
        return functions.log_prob_and_entropy(logits, labels, 1)

    assert_computes(jax.jit(ours)(x, weight, labels), plain, x, weight, labels)
    rounded = jaxnorm.log_prob_and_entropy(x @ weight, labels)
    with pytest.raises(AssertionError):
        assert_computes(rounded, plain, x, weight, labels)


# Maps a dtype to the cotangents or weights of the rows. They have very different magnitudes, but
# the gradients of all rows are in the dtype's range.
SIZES = {
    "float32": [1e15, -1e-20, 1, 1e-25, 0, 3e7, -1e-3],
    "bfloat16": [1e15, -1e-20, 1, 1e-25, 0, 3e7, -1e-3],
    "float16": [2000, -1e-3, 1, 1e-3, 0, 100, -0.01],
}


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *((dtype, None) for dtype in SIZES),
        *(("float16", scale) for scale in (2.0**-12, 1e-3, 64)),
        *((dtype, scale) for dtype in ("bfloat16", "float32") for scale in (1e-30, 1e30)),
    ],
)
@pytest.mark.parametrize("of", ["cotangents", "weights"])
def test_rows_of_different_sizes(of, dtype, scale):
    """The gradients of rows with small cotangents or small weights are accurate, too.

    `logits_scale` may have any size. The gradient of the logits is proportional to this scale. With
    a large scale, it could overflow in float16. So the gradient of the logits is divided by a power
    of two near the scale. Later results in float32 are multiplied by this power.
    """
    x, weight, bias, labels = operands(7, 16, 64, dtype)
    d = jnp.float32(SIZES[dtype] if scale is None else [2.0**10] * 7)
    size = max(1, scale or 1) ** 0.5
    arrays = x / size, weight / size, bias / size**2
    options = {"chunk": 3} | ({} if scale is None else {"logits_scale": scale})

    def ours(x, weight, bias):
        loss = functools.partial(linear_loss, x, weight, labels, bias=bias, **options)
        if of == "weights":
            return loss(where=d, reduction="sum")
        return jnp.sum(d * loss(reduction="none"))

    def plain(x, weight, bias):
        x, weight, bias = (a.astype(jnp.float32) for a in (x, weight, bias))
        return jnp.sum(d * functions.losses((scale or 1) * (x @ weight + bias), labels, 1))

    gradients, expected = (jax.grad(f, (0, 1, 2)) for f in (ours, plain))
    got = jax.jit(gradients)(*arrays)
    assert_computes(got, expected, *arrays, like=gradients)
    assert all(np.any(g != 0) for g in got)


@pytest.mark.parametrize("kind", [k for k in KINDS if k[1] != "mean"], ids=str)
def test_small_gradients_in_float16(kind):
    """Gradients of logits that would underflow in float16 give the gradients of float32.

    Gradients are rounded only after all multiplications, such as by the loss scale. A row whose
    weight is 0 does not make the gradients of the other rows less accurate.
    """
    (x, weight, *rest), labels = floats_and_labels("float16")
    small, where = 2.0**-20, WHERE["mask"].astype(jnp.float32)

    def sums(function):
        return lambda *a: sum(map(jnp.sum, jax.tree.leaves(function(*a, *rest))))

    scaled = sums(call_of(kind, labels, where=where * small, chunk=5))

    def program(x, weight):
        return scaled(x, weight) / small  # after the gradients of the logits are rounded

    plain = sums(plain_of(kind, labels, where=where))
    got, like, expected = (jax.grad(f, (0, 1)) for f in (jax.jit(program), program, plain))
    dx, dweight = got(x, weight)
    assert_computes((dx, dweight), expected, x, weight, like=like)
    assert np.all(np.asarray(dweight) != 0)
    assert np.all((np.asarray(dx) != 0).any(-1) <= np.asarray(WHERE["mask"]))


@pytest.mark.parametrize(
    "kind", [("log_prob", None), ("divergence", "mean"), ("divergence", "none")], ids=str
)
@pytest.mark.parametrize("rows", [2304, 2100])
def test_dlogits_of_all_rows(rows, kind):
    """The loop of the backward pass computes only dlogits. One matmul for each gradient follows."""
    x, weight, bias, labels = operands(rows, 640, 9, "bfloat16", lead=(1,))
    arrays = x, weight, bias, jnp.cos(jnp.arange(rows * 9.0)).reshape(1, rows, 9), None
    where = labels != 3
    ours, theirs = (
        jax.grad(total(lambda *a, of=of: of(*a, *arrays[2:])), (0, 1))
        for of in (call_of(kind, labels, where=where), plain_of(kind, labels, where))
    )
    invalid = x.at[0, jnp.argmin(where)].set(jnp.nan)
    assert_computes(jax.jit(ours)(invalid, weight), theirs, x, weight, like=ours)
    text = jax.jit(ours).lower(x, weight).as_text()
    assert text.count("stablehlo.dot_general") == 4
    assert re.search(rf"dot_general.*\(tensor<{rows}x640xbf16>, tensor<{rows}x16xbf16>\)", text)
