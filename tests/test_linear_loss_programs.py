"""Programs of linear losses: numbers of matmuls and loops, memory, and saved arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_loss_cases import operands

import jaxnorm
from jaxnorm import linear_kl_divergence, linear_log_prob_and_entropy
from jaxnorm import linear_softmax_cross_entropy as linear_loss

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]
of_the_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="of a GPU's program: mosaic/test_linear_products.py"
)

ROWS, WIDTH, CLASSES, CHUNK = 512, 32, 1000, 96


def program(function):
    """Return the lowered program of a function of x and weight."""
    shapes = (ROWS, WIDTH), (WIDTH, CLASSES)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(function).trace(*given).lower(lowering_platforms=("cpu",))


LABELS = np.zeros(ROWS, np.int32)


def unchanged(f):
    return f


def of(reduction, wrap=unchanged):
    options = {"reduction": reduction, "chunk": CHUNK}
    return wrap(lambda x, weight: jnp.sum(linear_loss(x, weight, LABELS, **options)))


def of_a_teacher(reduction, wrap=unchanged):
    def function(x, weight):
        teacher = jnp.flip(x), jnp.flip(weight)
        return jnp.sum(linear_kl_divergence(x, weight, *teacher, reduction=reduction, chunk=CHUNK))

    return wrap(function)


def of_log_prob(wrap=unchanged):
    def function(x, weight):
        results = linear_log_prob_and_entropy(x, weight, LABELS, chunk=CHUNK)
        return sum(jnp.sum(jnp.sin(result)) for result in results)

    return wrap(function)


def loss_of_one(logits, label):
    return jax.nn.logsumexp(logits) - logits[label]


def of_any(reduction, wrap=unchanged):
    run = functools.partial(jaxnorm.linear_loss, loss_of_one, reduction=reduction, chunk=CHUNK)
    return wrap(lambda x, weight: jnp.sum(jnp.sin(run(x, weight, LABELS))))


def gradient(f):
    return jax.value_and_grad(f, (0, 1))


def checkpoint(policy=None):
    return lambda f: jax.grad(lambda *a: jnp.sin(jax.checkpoint(f, policy=policy)(*a)), (0, 1))


KEPT = jax.checkpoint_policies.save_only_these_names("jaxnorm_linear_gradient")
# Maps a program's name to its function, its number of matmuls, and its number of loops. If weight
# has a gradient, the first chunk is computed before the loop. The program then has the matmuls of a
# chunk twice: before the loop and in the loop.
PROGRAMS = {
    "the loss": (of("mean"), 1, 1),
    "losses": (of("none"), 1, 1),
    "the divergence": (of_a_teacher("mean"), 2, 1),
    "gradient of a divergence": (of_a_teacher("mean", gradient), 2 * 4, 1),
    "gradient of divergences": (of_a_teacher("none", gradient), 2 + 2 * 4, 2),
    "gradient of a mean": (of("mean", gradient), 2 * 3, 1),
    "gradient of losses": (of("none", gradient), 1 + 2 * 3, 2),
    "frozen weight": (of("mean", jax.grad), 2, 1),
    "x alone without a gradient": (of("mean", lambda f: jax.grad(f, 1)), 2 * 2, 1),
    "linearize": (of("sum", lambda f: lambda *a: jax.linearize(f, *a)[1](*a)), 2 * 3, 1),
    "remat": (of("mean", checkpoint()), 1 + 2 * 3, 2),
    "remat that keeps gradients": (of("mean", checkpoint(KEPT)), 2 * 3, 1),
    "log-probabilities": (of_log_prob(), 1, 1),
    "gradient of log-probabilities": (of_log_prob(gradient), 1 + 2 * 3, 2),
    "log-probabilities, frozen weight": (of_log_prob(jax.grad), 3, 2),
    "log-probabilities, x alone without": (of_log_prob(lambda f: jax.grad(f, 1)), 1 + 2 * 2, 2),
    "any loss": (of_any("mean"), 1, 1),
    "any losses": (of_any("none"), 1, 1),
    "gradient of any loss": (of_any("mean", gradient), 2 * 3, 1),
    "gradient of any losses": (of_any("none", gradient), 1 + 2 * 3, 2),
    "remat of any loss": (of_any("sum", checkpoint()), 1 + 2 * 3, 2),
    "tangent of any losses": (of_any("none", lambda f: lambda *a: jax.jvp(f, a, a)[1]), 1 + 3, 2),
    "vmap": (
        lambda x, w: jax.grad(
            lambda w: jnp.mean(
                jax.vmap(lambda x, t: linear_loss(x, w, t, chunk=CHUNK))(
                    x.reshape(4, ROWS // 4, WIDTH), jnp.zeros((4, ROWS // 4), jnp.int32)
                )
            )
        )(w),
        2 * 2,
        1,
    ),
}


@pytest.mark.remat
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_and_loops(name):
    function, products, loops = PROGRAMS[name]
    text = program(function).as_text()
    assert text.count("stablehlo.dot_general") == products
    assert text.count("stablehlo.while") == loops


@of_the_cpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_logits_of_all_rows(name):
    """No array is larger than a chunk's logits.

    So no array has the logits of all rows. And no array has a separate gradient of the weight for
    each entry of a batch, or for each iteration of a loop.
    """
    compiled = program(PROGRAMS[name][0]).compile()
    # A CPU computes everything in float32. There are a chunk's logits, those of a teacher, their
    # gradients, and the weight's gradient in float32.
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert temp < 3 * 4 * WIDTH * CLASSES + 5 * 4 * CHUNK * CLASSES
    sizes = {
        np.prod([int(n) for n in shape.split(",") if n])
        for shape in re.findall(r"\w+\[([\d,]*)\]", compiled.as_text())
    }
    assert max(sizes) <= CHUNK * CLASSES
    assert CHUNK * CLASSES in sizes


def saved(function, *arrays):
    """Return the shapes and dtypes of the arrays that the derivative saves, without scalars."""
    vjp = jax.vjp(function, *arrays)[1]
    return sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(vjp) if a.ndim)


def test_three_numbers_for_each_row_are_kept():
    """Besides the operands, log-probabilities save only three numbers per row."""
    x, weight, bias, labels = operands(6, 4, 9, "bfloat16")

    def function(x, w, b):
        return linear_log_prob_and_entropy(x, w, labels, bias=b, chunk=2)

    of_rows = [((6,), "float32")] * 3 + [((6,), "int32")]
    of_operands = [((4, 9), "bfloat16"), ((6, 4), "bfloat16"), ((9,), "bfloat16")]
    assert saved(function, x, weight, bias) == sorted(of_rows + of_operands)


@pytest.mark.remat
@pytest.mark.parametrize(
    ("dtype", "kept_in"),
    [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_but_gradients_is_kept(compiled, dtype, kept_in):
    """In a differentiated call, the forward pass computes the gradients and saves nothing else.

    This holds with and without `jax.jit`. Gradients of float16 operands are saved in float32: small
    gradients would underflow, because only the backward multiplies them by the loss scale.
    """
    x, weight, bias, labels = operands(6, 4, 9, dtype)

    def function(x, w, b):
        return linear_loss(x, w, labels, bias=b, chunk=2)

    kept = saved(jax.jit(function) if compiled else function, x, weight, bias)
    assert kept == [((4, 9), kept_in), ((6, 4), kept_in), ((9,), kept_in)]
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: linear_loss(x, weight, labels)))(x)
    assert "[name=jaxnorm_linear_gradient" in str(jaxpr)


each_function = pytest.mark.parametrize("function", [linear_loss, linear_log_prob_and_entropy])


@each_function
def test_the_precision_of_products_is_that_of_the_call(function):
    x, weight, _, labels = operands(6, 4, 9)
    with jax.default_matmul_precision("tensorfloat32"):
        traced = jax.jit(lambda x, w: function(x, w, labels)).trace(x, weight)
    assert "precision = [HIGH, HIGH]" in traced.lower().as_text()
