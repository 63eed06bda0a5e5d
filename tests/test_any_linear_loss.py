"""`linear_loss`: values, gradients, memory, transformations, meshes and errors.

`test_programs`, `test_batches`, `test_set_mesh` and `test_every_function` also test it, by its
entries in the table of functions.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import eight_devices, in_shards
from program_error import assert_computes
from programs import kernels_in

import jaxnorm
from jaxnorm import linear_loss

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

ROWS, WIDTH, CLASSES = (4, 8), 16, 24


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def operands(dtype="float32", classes=CLASSES):
    """Return x, weight, bias, logits of a teacher, a temperature, labels and a mask."""
    x, weight = normal(0, *ROWS, WIDTH, dtype=dtype), normal(1, WIDTH, classes, dtype=dtype)
    labels = jnp.asarray(np.random.default_rng(3).integers(classes, size=ROWS))
    floats = x, weight, normal(2, classes), normal(4, *ROWS, classes), jnp.float32(0.7)
    return *floats, labels, normal(5, *ROWS) > 0


def in_plain_jax(logits, label, teacher, temperature):
    """A cross-entropy with a penalty for a teacher's classes."""
    z = logits / temperature
    return jax.nn.logsumexp(z) - z[label] + jnp.sum(jax.nn.softmax(teacher) * z)


def bounded(cross_entropy, logits, label, teacher, temperature):
    """A function of a cross-entropy, of which it computes the label and the mask."""
    loss = cross_entropy(logits, jnp.maximum(label - 2, 0), label >= 2)
    return teacher[0] * jnp.tanh(temperature * loss / 2)


def of_jaxnorm(logits, label, where):
    return jaxnorm.softmax_cross_entropy_with_integer_labels(logits, label, where=where)


def of_jax(logits, label, where):
    return jnp.where(where, jax.nn.logsumexp(logits) - logits[label], 0)


# Maps the kind of a loss to the loss of one position, and to the same loss in plain JAX.
LOSSES = {
    "plain JAX": (in_plain_jax, in_plain_jax),
    "a loss of jaxnorm": (
        functools.partial(bounded, of_jaxnorm),
        functools.partial(bounded, of_jax),
    ),
}
each_loss = pytest.mark.parametrize("loss", LOSSES)


def ours(x, weight, bias, teacher, temperature, labels, where, loss="plain JAX", **options):
    """Return linear_loss of a function that closes over the temperature."""
    return linear_loss(
        *(lambda *of_row: LOSSES[loss][0](*of_row, temperature), x, weight, labels, teacher),
        **{"bias": bias, "where": where, "chunk": 5} | options,
    )


def plain(x, weight, bias, teacher, temperature, labels, where, loss="plain JAX", reduction="mean"):
    def of_row(*of_row):
        return LOSSES[loss][1](*of_row, temperature)

    logits = jnp.matmul(x, weight, preferred_element_type=jnp.float32) + bias
    losses = jnp.where(where, jax.vmap(jax.vmap(of_row))(logits, labels, teacher), 0)
    if reduction == "none":
        return losses
    return losses.sum() / (where.sum() if reduction == "mean" else 1)


def gradients(function, **options):
    def scalar(*arrays):
        return jnp.sum(jnp.sin(function(*arrays, **options)))

    return jax.value_and_grad(scalar, (0, 1, 2, 3, 4))


each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@each_reduction
@each_loss
@pytest.mark.parametrize(("chunk", "classes"), [(5, CLASSES), (7, 21), (8, 21), (None, CLASSES)])
def test_values_and_gradients(loss, reduction, chunk, classes):
    """The teacher's logits, and the temperature, over which `fun` closes, also have gradients."""
    arrays, given = operands(classes=classes), {"loss": loss, "reduction": reduction}
    theirs, program = gradients(plain, **given), gradients(ours, **given, chunk=chunk)
    assert_computes(jax.jit(program)(*arrays), theirs, *arrays, like=program)


@each_reduction
@each_loss
def test_other_derivatives(loss, reduction):
    """Forward mode, second order and `jax.checkpoint` have the results of plain JAX."""
    arrays, given = operands(classes=21), {"loss": loss, "reduction": reduction}
    floats, others = arrays[:5], arrays[5:]
    along = tuple(jnp.cos(a) for a in floats)

    def of(function):
        function = functools.partial(function, **given)

        def tangent(*floats):
            return jax.jvp(lambda *a: function(*a, *others), floats, along)[1]

        def second(*floats):
            first = jax.grad(lambda *a: jnp.sum(jnp.sin(tangent(*a))), (0, 1, 2, 3, 4))
            return tangent(*floats), first(*floats)

        return second

    assert_computes(jax.jit(of(ours))(*floats), of(plain), *floats, like=of(ours))
    if reduction == "mean":
        again = gradients(jax.checkpoint(functools.partial(ours, **given)))
        got = jax.jit(again)(*arrays)
        assert_computes(got, gradients(plain, **given), *arrays, like=gradients(ours, **given))


@each_reduction
@pytest.mark.parametrize(
    ("loss", "batched"),
    [*((loss, "rows") for loss in LOSSES), ("plain JAX", "weight"), ("plain JAX", "temperature")],
)
def test_vmap(loss, batched, reduction):
    """A `jax.vmap` inside or outside the gradient, over rows, a weight or a closed-over array."""
    arrays = operands()
    which = {"rows": (0, 3, 5, 6), "weight": (1,), "temperature": (4,)}[batched]
    axes = tuple(0 if i in which else None for i in range(len(arrays)))
    arrays = tuple(jnp.stack([a, a[::-1] if a.ndim else 2 * a]) if i in which else a
                   for i, a in enumerate(arrays))  # fmt: skip

    def of(function):
        function = functools.partial(function, loss=loss, reduction=reduction)
        outside = gradients(lambda *a: jax.vmap(function, axes)(*a))
        inside = jax.vmap(gradients(function), axes)
        return lambda *a: (outside(*a), inside(*a))

    assert_computes(jax.jit(of(ours))(*arrays), of(plain), *arrays, like=of(ours))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each_reduction
@each_loss
def test_sixteen_bits(loss, dtype, reduction):
    arrays, given = operands(dtype), {"loss": loss, "reduction": reduction}
    program, theirs = gradients(ours, **given), gradients(plain, **given)
    got = jax.jit(program)(*arrays)
    assert_computes(got, theirs, *arrays, like=program)
    assert [a.dtype for a in got[1]] == [a.dtype for a in arrays[:5]]


def test_small_gradients_in_float16():
    """Gradients of logits that would underflow in float16 give the gradients of float32."""
    x, weight, *rest, labels, where = operands("float16")
    small = 2.0**-20

    def program(x, weight):
        total = ours(x, weight, *rest, labels, where * small, reduction="sum")
        return total / small  # after the gradients of the logits are rounded

    def theirs(x, weight):
        return plain(x, weight, *rest, labels, where, reduction="sum")

    got, like, expected = (jax.grad(f, (0, 1)) for f in (jax.jit(program), program, theirs))
    assert_computes(got(x, weight), expected, x, weight, like=like)
    dx, dweight = got(x, weight)
    assert np.all((np.asarray(dx) != 0).any(-1) == np.asarray(where))
    assert np.all(np.asarray(dweight) != 0)


@each_reduction
def test_masked_rows_may_be_nan(reduction):
    """Masked rows have no effect, even if x, the rows or the labels are invalid there."""
    x, weight, bias, teacher, temperature, labels, where = arrays = operands()
    invalid = (
        *(jnp.where(where[..., None], x, jnp.nan), weight, bias),
        *(jnp.where(where[..., None], teacher, jnp.nan), temperature),
        *(jnp.where(where, labels, -100), where),
    )
    program = jax.jit(gradients(ours, reduction=reduction))
    for a, b in zip(*map(jax.tree.leaves, (program(*invalid), program(*arrays))), strict=True):
        np.testing.assert_array_equal(a, b)
    nothing = program(*invalid[:-1], jnp.zeros_like(where))
    for a in jax.tree.leaves(nothing):
        np.testing.assert_array_equal(a, 0)


def test_float_weights_of_positions():
    *arrays, labels, where = operands()
    weights = normal(7, *ROWS) * where

    def weighted(*floats):
        losses = plain(*floats, labels, jnp.ones(ROWS, bool), reduction="none")
        return (losses * weights).sum() / weights.sum()

    def program(*floats):
        return ours(*floats, labels, weights)

    results = jax.value_and_grad(program, (0, 1, 4))(*arrays)
    assert_computes(
        results,
        jax.value_and_grad(weighted, (0, 1, 4)),
        *arrays,
        like=jax.value_and_grad(program, (0, 1, 4)),
    )


def test_any_pytree_of_results():
    """With ``"none"``, `fun` may return arrays of any shapes, also integers, for any positions."""
    x, weight, *_, where = operands()

    def fun(logits, row):
        top, index = jax.lax.top_k(logits, 3)
        return {"top": top * row["scale"], "index": index, "is_large": logits.max() > 1}

    def run(x, weight):
        rows = {"scale": jnp.ones(x.shape[:-1])}
        counts = where if x.ndim == 3 else None
        return linear_loss(fun, x, weight, rows, where=counts, reduction="none", chunk=3)

    results, pullback = jax.vjp(lambda *a: run(*a)["top"], x, weight)
    assert results.shape == (*ROWS, 3)
    assert pullback(results)[1].shape == weight.shape
    got, logits = jax.jit(run)(x, weight), np.asarray(x @ weight)
    assert got["index"].dtype == jnp.int32
    order = np.argsort(-logits, -1)[..., :3]
    np.testing.assert_array_equal(got["index"], np.where(where[..., None], order, 0))
    np.testing.assert_array_equal(got["is_large"], (logits.max(-1) > 1) & where)
    assert run(x[0, 0], weight)["top"].shape == (3,)
    assert run(x[:0, 0], weight)["top"].shape == (0, 3)


def of_a_scan(logits, shift):
    return jax.lax.scan(lambda total, z: (total + (z - shift) ** 2, None), 0.0, logits)[0]


def of_a_condition(logits, shift):
    return jax.lax.cond(logits[0] > 0, jnp.sum, lambda z: jnp.sum((z - shift) ** 2), logits)


def of_a_custom_derivative(logits, shift):
    return jnp.sum(jax.nn.relu(logits - shift)) + jnp.logaddexp(logits[0], logits[1])


@eight_devices
@pytest.mark.parametrize("fun", [of_a_scan, of_a_condition, of_a_custom_derivative])
def test_functions_with_inner_programs(fun):
    """`fun` may have loops, conditions and custom derivatives, even inside of `jax.shard_map`."""
    x, weight, *_ = operands()

    def mean(x, weight):
        return linear_loss(lambda z: fun(z, 0.5), x, weight, chunk=3)

    def theirs(x, weight):
        return jnp.mean(jax.vmap(jax.vmap(lambda z: fun(z, 0.5)))(x @ weight))

    def on_mesh(x, weight):
        return jax.lax.pmean(mean(x, weight), ("a", "b"))

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = jax.shard_map(on_mesh, mesh=mesh, in_specs=(P("a", "b"), P()), out_specs=P())
    expected = jax.value_and_grad(theirs, (0, 1))
    like = jax.value_and_grad(mean, (0, 1))
    for function in (mean, sharded):
        got = jax.jit(jax.value_and_grad(function, (0, 1)))(x, weight)
        assert_computes(jax.tree.map(np.asarray, got), expected, x, weight, like=like)


def test_kernels_run_on_chunks():
    """One kernel call per chunk computes the losses, and one their gradient."""
    x, weight = normal(0, 256, 64, dtype="bfloat16"), normal(1, 64, 1024, dtype="bfloat16")
    labels = jnp.zeros(256, jnp.int32)

    def loss(x, weight):
        fun = jaxnorm.softmax_cross_entropy_with_integer_labels
        return linear_loss(fun, x, weight, labels, chunk=256)

    assert kernels_in(loss, x, weight) == 1
    assert kernels_in(jax.grad(loss, (0, 1)), x, weight) in (1, 2)


# ------------------------------------------------------------------------------- meshes

LAYOUTS = [
    (P("a"), P()),
    (P("a"), P(None, "b")),
    (P("a", None, "b"), P("b")),
    (P("b"), P("a", "b")),
    (P(None, "b"), P("b", "a")),
]


@eight_devices
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize(
    ("loss", "layout", "reduction"),
    [
        *(("plain JAX", layout, reduction) for layout in LAYOUTS for reduction in ("mean", "none")),
        *(("a loss of jaxnorm", layout, "mean") for layout in LAYOUTS[2:4]),
    ],
    ids=str,
)
def test_meshes(kind, loss, layout, reduction):
    """Rows, features and classes may be sharded, in any combination."""
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    of_x, of_weight = layout
    rows, given = P(*of_x[:2]), {"loss": loss, "reduction": reduction}
    arrays, program = operands(), gradients(ours, **given, chunk=3)
    specs = of_x, of_weight, P(*of_weight[1:]), rows, P(), rows, rows
    with jax.set_mesh(mesh):
        sharded = in_shards(arrays, mesh, specs)
        got = jax.jit(program)(*sharded)
    assert got[1][1].sharding.is_equivalent_to(sharded[1].sharding, 2)
    got = jax.tree.map(np.asarray, got)
    assert_computes(got, gradients(plain, **given), *arrays, like=program)


@eight_devices
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    """Inside `jax.shard_map`, gradients of replicated arrays are summed over the mesh."""
    arrays, rows = operands(), P("a", "b")
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = rows, P(), P(), rows, P(), rows, rows

    def on_shard(*shards):
        return jax.lax.psum(ours(*shards, chunk=3, reduction="sum"), ("a", "b"))

    run = jax.shard_map(on_shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    got = jax.tree.map(np.asarray, jax.jit(gradients(run))(*arrays))
    theirs = gradients(plain, reduction="sum")
    assert_computes(got, theirs, *arrays, like=gradients(ours, reduction="sum"))


# ------------------------------------------------------------------------------- errors

X, W, LABELS = jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.zeros(4, jnp.int32)


def label_logit(logits, label):
    return logits[label]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear_loss(X, X, W), TypeError, "fun has type .*; expected a function"),
        (
            lambda: linear_loss(lambda z: z, X, W),
            ValueError,
            r"fun returns an array of shape \(6,\)",
        ),
        (lambda: linear_loss(lambda z: (z[0], z[1]), X, W), ValueError, "fun returns 2 arrays"),
        (
            lambda: linear_loss(lambda z: None, X, W, reduction="none"),
            ValueError,
            "fun returns no array",
        ),
        (
            lambda: linear_loss(label_logit, X, W, LABELS[:3]),
            ValueError,
            r"an array in rows has shape \(3,\); expected leading axes \(4,\)",
        ),
        (
            lambda: linear_loss(lambda z: (jax.debug.print("{}", z), z[0])[1], X, W),
            ValueError,
            "fun has side effects",
        ),
        (lambda: linear_loss(jnp.sum, X, W[:7]), ValueError, r"weight has shape \(7, 6\)"),
        (lambda: linear_loss(jnp.sum, X, W, bias=X[0]), ValueError, "bias has shape"),
        (lambda: linear_loss(jnp.sum, X, W, where=X > 0), ValueError, "where has shape"),
        (lambda: linear_loss(jnp.sum, X, W, where=LABELS), TypeError, "where has dtype"),
        (lambda: linear_loss(jnp.sum, X, W, reduction="max"), ValueError, "reduction='max'"),
        (lambda: linear_loss(jnp.sum, X, W, chunk=0), ValueError, "chunk=0"),
        (lambda: linear_loss(jnp.sum, X, W, dtype="int8"), TypeError, "dtype="),
        (
            lambda: linear_loss(lambda z, c: z[0], X, W, jnp.ones(4, "complex64")),
            TypeError,
            "an array in rows has dtype complex64",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=f"^jaxnorm.linear_loss: {message}"):
        call()
