"""linear_log_prob_and_entropy: values and gradients against float64 numpy, and its programs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from linear_loss_cases import operands
from log_prob_cases import Linear
from program_error import assert_computes
from reference import assert_within, exact

from jaxnorm import linear_log_prob_and_entropy, log_prob_and_entropy

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

NAME = "linear_log_prob_and_entropy"
OPTIONS = [{}, {"logits_scale": 1.5}, {"logits_scale": 1.5, "logit_softcap": 2.0}]


@functools.partial(jax.jit, static_argnames=("options",))
def values_and_gradients(x, weight, bias, labels, where, cotangents, options=()):
    def function(x, weight, bias):
        return linear_log_prob_and_entropy(
            x, weight, labels, bias=bias, where=where, **dict(options)
        )

    results, vjp = jax.vjp(function, x, weight, bias)
    return results, vjp(cotangents)


def cotangents_of(labels, dtype=np.float32):
    along = jnp.arange(labels.size).reshape(labels.shape)
    return jnp.cos(along).astype(dtype), jnp.sin(3 * along + 1).astype(dtype)


def check(x, weight, bias, labels, where=None, *, chunk=None, **options):
    """Both results and all gradients, each within its bound; they are returned."""
    positions = None if where is None else np.broadcast_to(where, labels.shape)
    expected = Linear(x, weight, bias, labels, positions, **options)
    wide = "float64" if "float64" in expected.dtypes[:2] else "float32"
    d = cotangents_of(labels, wide)
    static = tuple({**options, "chunk": chunk}.items())
    results, gradients = values_and_gradients(x, weight, bias, labels, where, d, options=static)
    for ours, value, bound in zip(results, expected.results, expected.bounds, strict=True):
        assert ours.dtype == wide
        assert_within(ours, value, bound)
    assert not np.any(exact(results[1]) < 0)
    for ours, (value, bound), of in zip(
        gradients, expected.gradients(*d), (x, weight, bias), strict=True
    ):
        assert ours.dtype == of.dtype
        assert_within(ours, value, bound)
    return results, gradients


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_values_and_gradients(dtype, options):
    check(*operands(7, 48, 300, dtype, lead=(3,)), chunk=8, **options)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("float16", "bfloat16", "float16"),
    ],
    ids=str,
)
def test_dtypes(dtypes, dtype):
    """Matmuls have the promoted dtype of the operands, or the requested one; logits are float32."""
    x, weight, bias, labels = operands(9, 32, 70, dtypes)
    options = {} if dtype is None else {"dtype": dtype}
    check(x, weight, bias, labels, chunk=4, **options)
    products = re.findall(
        r"stablehlo.dot_general.*\(tensor<[\dx]+(\w+)>, tensor<[\dx]+(\w+)>\) -> "
        r"tensor<[\dx]+(\w+)>",
        step_of(labels, chunk=4, **options).lower(x, weight).as_text(),
    )
    promoted = jnp.promote_types(*dtypes[:2])
    narrow = min(promoted, jnp.dtype(dtype or promoted), key=lambda d: d.itemsize)
    name = {"bfloat16": "bf16", "float32": "f32"}[narrow.name]
    assert [p[:2] for p in products] == [(name, name)] * 4
    assert products[0][2] == "f32"


@pytest.mark.usefixtures("x64")
def test_float64():
    check(*operands(9, 8, 30, "float64"), chunk=4, **OPTIONS[2])
    check(*operands(9, 8, 30, ("float32", "float64", "float32")))


def test_logits_are_never_rounded():
    """Results of 16-bit operands are within float32's bounds, which rounded logits would exceed."""
    x, weight, _, labels = operands(64, 512, 4096, "bfloat16")
    weight = 4 * weight  # logits of a trained model's size
    log_prob, entropy = jax.jit(functools.partial(linear_log_prob_and_entropy, chunk=24))(
        x, weight, labels
    )
    zero = np.zeros(4096)
    of_exact = Linear(x, weight, jnp.asarray(zero, jnp.float32), labels)
    for ours, wanted, bound in zip((log_prob, entropy), of_exact.results, of_exact.bounds):
        assert_within(ours, wanted, bound)
    rounded, _ = log_prob_and_entropy(x @ weight, labels)
    assert np.abs(exact(rounded) - of_exact.results[0]).max() > np.max(of_exact.bounds[0])


@pytest.mark.parametrize("chunk", [1, 5, 7, 21, 64, None])
def test_chunks(chunk):
    arrays = operands(21, 16, 40)
    check(*arrays, arrays[-1] % 3 > 0, chunk=chunk)


def test_positions_that_do_not_count():
    """Labels and x of these positions do not matter: no NaN of them reaches weight's gradient."""
    x, weight, bias, labels = operands(7, 16, 40)
    labels = labels.at[1].set(-100).at[3].set(1000)
    x = x.at[1].set(jnp.nan).at[3, 2].set(jnp.inf)
    where = jnp.arange(7) % 2 == 0
    results, (dx, *_) = check(x, weight, bias, labels, where, chunk=3)
    for a in (*results, dx):
        np.testing.assert_array_equal(a[1::2], 0)
    nothing = jnp.zeros(7, bool)
    everything = values_and_gradients(
        x, weight, bias, labels, nothing, cotangents_of(labels), options=(("chunk", 3),)
    )
    for a in jax.tree.leaves(everything):
        np.testing.assert_array_equal(a, 0)


@pytest.mark.parametrize("shape", [(1, 40), (7, 40), (7, 1)], ids=str)
def test_masks_of_classes(shape):
    """Results match those of the logits, for masks that broadcast and an incomplete last chunk."""
    x, weight, bias, labels = operands(7, 16, 40)
    where = jnp.asarray(np.random.default_rng(3).random(shape) < 0.6)
    d = cotangents_of(labels)

    def of_logits(x, weight, bias):
        return log_prob_and_entropy(
            x @ weight + bias, labels, where=jnp.broadcast_to(where, (7, 40))
        )

    def both(x, weight, bias):
        results, vjp = jax.vjp(of_logits, x, weight, bias)
        return results, vjp(d)

    def in_chunks(x, weight, bias):
        return values_and_gradients(x, weight, bias, labels, where, d, options=(("chunk", 3),))

    assert_computes(in_chunks(x, weight, bias), both, x, weight, bias, like=in_chunks)


def test_labels_outside():
    """Both results, the row's gradient of x, and weight's whole gradient are NaN."""
    x, weight, bias, labels = operands(5, 16, 40)
    labels = labels.at[1].set(40).at[3].set(-1)
    results, (dx, dw, _) = values_and_gradients(
        x, weight, bias, labels, None, cotangents_of(labels), options=(("chunk", 2),)
    )
    bad = np.isin(np.arange(5), [1, 3])
    for a in (*results, dx.sum(-1)):
        np.testing.assert_array_equal(np.isnan(a), bad)
    assert np.isnan(dw).all()


def test_shapes():
    """Arrays without rows, with one class, with one axis of x, and without a bias."""
    for lead, classes in (((0,), 5), ((2, 0), 5), ((), 5), ((3,), 1)):
        x, weight = jnp.ones((*lead, 4), jnp.bfloat16), jnp.ones((4, classes), jnp.bfloat16)
        labels = jnp.zeros(lead, jnp.int32)
        results = linear_log_prob_and_entropy(x, weight, labels)
        assert [a.shape for a in results] == [lead, lead]
        gradients = step_of(labels, chunk=2)(x, weight)
        assert [g.shape for g in gradients] == [x.shape, weight.shape]
        program = functools.partial(linear_log_prob_and_entropy, labels=labels)
        expected = -np.log(classes), np.log(classes)
        assert_computes(results, program, x, weight, expected=expected)


# ------------------------------------------------------------------------------------- programs

ROWS, WIDTH, CLASSES, CHUNK = 512, 32, 1000, 96
GIVEN = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((ROWS, WIDTH), (WIDTH, CLASSES))]


def step_of(labels, *, wrt=(0, 1), **options):
    def total(x, weight):
        log_prob, entropy = linear_log_prob_and_entropy(x, weight, labels, **options)
        return jnp.sum(jnp.sin(log_prob) - entropy**2)

    return jax.jit(jax.grad(total, wrt) if wrt else total)


# The arguments to differentiate, and the numbers of matmuls and loops.
@pytest.mark.parametrize(
    ("wrt", "products", "loops"), [((), 1, 1), ((0, 1), 4, 2), ((0,), 3, 2), ((1,), 3, 2)], ids=str
)
def test_products_and_loops(wrt, products, loops):
    step = step_of(jnp.zeros(ROWS, jnp.int32), wrt=wrt, chunk=CHUNK)
    text = step.trace(*GIVEN).lower(lowering_platforms=("cpu",)).as_text()
    assert text.count("stablehlo.dot_general") == products
    assert text.count("stablehlo.while") == loops


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the memory of a CPU's program")
def test_memory():
    """Memory holds a chunk's logits and gradient, and one float32 array of weight's size."""
    compiled = step_of(jnp.zeros(ROWS, jnp.int32), chunk=CHUNK).lower(*GIVEN).compile()
    accumulator, chunk = 4 * WIDTH * CLASSES, 4 * CHUNK * CLASSES
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * accumulator + 3 * chunk
    sizes = {
        np.prod([int(n) for n in shape.split(",") if n])
        for shape in re.findall(r"\w+\[([\d,]*)\]", compiled.as_text())
    }
    assert max(sizes) == CHUNK * CLASSES


def test_three_numbers_for_each_row_are_kept():
    """Beside the operands, only three numbers for each row are saved."""
    x, weight, bias, labels = operands(6, 4, 9, "bfloat16")

    def function(x, w, b):
        return linear_log_prob_and_entropy(x, w, labels, bias=b, chunk=2)

    vjp = jax.vjp(function, x, weight, bias)[1]
    kept = sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(vjp))
    of_rows = [((6,), "float32")] * 3 + [((6,), "int32")]
    of_operands = [((4, 9), "bfloat16"), ((6, 4), "bfloat16"), ((9,), "bfloat16")]
    assert kept == sorted(of_rows + of_operands)
