"""auto_remat: values, derivatives, effects, meshes, and operations that run twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from remat_cases import (
    COLS,
    LAYERS,
    ROWS,
    W,
    X,
    assert_same,
    assert_same_gradients,
    each,
    layer,
    scanned,
    unrolled,
)

import jaxnorm
from jaxnorm import auto_remat

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.remat,
    pytest.mark.usefixtures("quick_to_compile"),
]


@each
@pytest.mark.parametrize("budget", [None, 0.6, 0.3, 8 * 4 * ROWS * COLS])
def test_gradients(f, budget):
    assert_same_gradients(f, W, X, remat=functools.partial(auto_remat, budget=budget))


TRANSFORMATIONS = {
    "grad of grad": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) ** 2))(W),
    "jvp": lambda f: jax.jvp(f, (W, X), (W, X)),
    "linearize": lambda f: jax.linearize(f, W, X)[1](W, X),
    "hessian": lambda f: jax.hessian(lambda x: f(W, x))(X[:2]),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0))(W, jnp.stack([X, 2 * X])),
    "grad of vmap": lambda f: jax.grad(
        lambda w: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([w, 2 * w]), X))
    )(W),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(W, X),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@each
def test_transformations(f, name):
    of = TRANSFORMATIONS[name]
    assert_same(lambda: jax.jit(of, static_argnums=0)(auto_remat(f)), lambda: of(f))


@each
def test_a_layer_inside_another_loop(f):
    ours = functools.partial(f, layer=auto_remat(layer))
    assert_same(lambda: jax.grad(ours)(W, X), lambda: jax.grad(f)(W, X))


def test_barriers_are_outside_of_loops():
    """A barrier in a loop would only prevent fusion. Unrolled code needs one for each segment."""
    for f, expected in ((scanned, False), (unrolled, True)):
        ours = functools.partial(f, layer=auto_remat(layer))
        lowered = jax.jit(jax.grad(ours)).lower(W, X).as_text()
        assert ("optimization_barrier" in lowered) == expected


@each
def test_effects_happen_as_often(f):
    """Effects of both passes, and in layers, happen as often as without `auto_remat`."""
    calls = []
    watched = jax.custom_vjp(lambda x: x)

    def note(name, x):
        jax.debug.callback(lambda _: calls.append(name), x)
        return x

    watched.defvjp(lambda x: (x, x), lambda x, dx: (note("backward", dx) * jnp.cos(x),))

    def whole(w, x):
        stopped = jax.lax.stop_gradient(note("debug", x))
        x = x + io_callback(lambda x: (calls.append("io"), x)[1], stopped, stopped, ordered=True)
        return f(w, x, layer=lambda x, w: watched(layer(note("layer", x), w)))

    def calls_of(f):
        calls.clear()
        jax.block_until_ready(f(W, X))
        jax.effects_barrier()
        return sorted(calls)

    expected = ["debug", "io", *["layer"] * LAYERS]
    for run in (lambda f: f, jax.jit):
        for ours in (auto_remat(whole), auto_remat(whole, budget=0.8)):
            assert calls_of(run(ours)) == expected
            assert calls_of(run(jax.grad(ours))) == ["backward"] * LAYERS + expected


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes(kind):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    w = jax.device_put(W, NamedSharding(mesh, P(None, None, "b")))
    x = jax.device_put(X, NamedSharding(mesh, P("a")))
    sharding = {"out_sharding": P("a", None)} if kind == AxisType.Explicit else {}

    def layer(x, w):
        h = jax.nn.silu(jnp.einsum("ab,bc->ac", x, w, **sharding))
        return x + jnp.tanh(h) * h

    f = functools.partial(scanned, layer=layer)
    with jax.set_mesh(mesh):
        gradients = jax.jit(jax.grad(auto_remat(f)))(w, x)
    assert_same(lambda: np.asarray(gradients), lambda: jax.grad(scanned)(W, X))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("place", ["inside", "outside", "both"])
def test_shard_map(check_vma, place):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def loss(inner, outer):
        mapped = jax.shard_map(
            inner(lambda w, x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]),
            mesh=mesh,
            in_specs=(P(), P("d")),
            out_specs=P("d"),
            check_vma=check_vma,
        )
        return outer(lambda w, x: jnp.sum(mapped(w, x) ** 2))

    remat = {True: auto_remat, False: lambda f: f}
    ours = loss(remat[place != "outside"], remat[place != "inside"])
    gradients = jax.jit(jax.grad(ours))(W, X)
    assert_same(lambda: np.asarray(gradients), lambda: jax.grad(scanned)(W, X))


def test_arguments_and_results_of_all_kinds():
    def f(params, batch, key, *, train, name=None):
        y = layer(batch["x"], params["w"])
        first, second = jax.random.split(key)
        if train:
            y = y * jax.random.bernoulli(first, 0.5, y.shape)
        y = y + params["b"][batch["labels"]]
        labels = jax.lax.fori_loop(0, 3, lambda k, n: n + k, batch["labels"])
        aux = {"labels": labels, "positive": y > 0, "key": second, "none": None}
        return jnp.sum(y), aux | {"name": name, "number": 2, "y": y, "words": batch["words"]}

    params = {"w": W[0], "b": X}
    words = np.array(["word", None], object), np.str_("text")
    batch = {"x": X, "labels": jnp.arange(ROWS) % 3, "words": words}
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        for train in (True, False):
            run = [
                jax.value_and_grad(g, has_aux=True)(params, batch, key, train=train, name="text")
                for g in (auto_remat(f), f)
            ]
            aux, expected = (r[0][1] for r in run)
            assert jax.tree.structure(run[0]) == jax.tree.structure(run[1])
            assert (aux["name"], aux["none"], aux["number"]) == ("text", None, 2)
            assert aux["words"] == words
            assert jax.random.uniform(aux["key"]) == jax.random.uniform(expected["key"])
            for name in ("labels", "positive", "y"):
                np.testing.assert_array_equal(aux[name], expected[name])
            for a, b in zip(*(jax.tree.leaves(r[1]) for r in run), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@each
def test_arrays_that_custom_rules_close_over(f, kind):
    """The derivative has inputs that the function lacks."""
    table = jnp.arange(1.0, COLS + 1) / COLS
    if kind == "jvp":
        rule = jax.custom_jvp(jnp.tanh)
        rule.defjvp(lambda x, dx: (rule(*x), dx[0] * table * jnp.cos(x[0])))
    else:
        rule = jax.custom_vjp(jnp.tanh)
        rule.defvjp(lambda x: (rule(x), table * jnp.sin(x)), lambda y, dy: (dy * y * table,))
    assert_same_gradients(functools.partial(f, layer=lambda x, w: rule(layer(x, w))), W, X)


@each
def test_vmaps_of_custom_rules(f):
    """JAX has no batching rule for the linearised form of a `jax.custom_vjp` function."""
    rule = jax.custom_vjp(lambda x, w: jnp.tanh(x @ w))
    rule.defvjp(lambda x, w: (rule(x, w), (x, w)), lambda xw, dy: (dy @ xw[1].T, xw[0].T @ dy))

    def loss(remat, w, x):
        of_rows = remat(functools.partial(f, layer=rule))
        return jnp.sum(jax.vmap(of_rows, (None, 0))(w, jnp.stack([x, 2 * x])))

    ours, plain = (jax.grad(functools.partial(loss, r), (0, 1)) for r in (auto_remat, lambda f: f))
    assert_same(lambda: ours(W, X), lambda: plain(W, X))


def test_results_that_are_constants():
    """A branch that returns a Python number has a literal among its results."""

    def f(is_first, w, x):
        return jax.lax.cond(
            is_first, lambda: (jnp.sum(layer(x, w[0])), 1), lambda: (jnp.sum(jnp.sin(x)), 2)
        )

    for is_first, number in ((True, 1), (False, 2)):
        ours, plain = (jax.grad(g, 1, has_aux=True) for g in (auto_remat(f), f))
        assert ours(is_first, W, X)[1] == number
        assert_same(lambda: ours(is_first, W, X)[0], lambda: plain(is_first, W, X)[0])  # noqa: B023


def test_exported_programs():
    """The number of rows of an exported program may be symbolic."""
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("rows"), COLS), X.dtype)
    exported = jax.export.export(jax.jit(jax.grad(auto_remat(scanned), (0, 1))))(W, rows)
    assert_same(lambda: exported.call(W, X), lambda: jax.grad(scanned, (0, 1))(W, X))


def test_static_arguments():
    f = auto_remat(
        lambda n, x, kind: jnp.sum(x**n if kind == "power" else x), static_argnums=(0, -1)
    )
    np.testing.assert_array_equal(jax.grad(f, 1)(2, X, "power"), 2 * X)
    assert auto_remat(lambda n: n * X, static_argnums=0)(2).shape == X.shape


def test_names_and_errors():
    assert auto_remat(layer).__name__ == "layer"
    assert auto_remat(scanned).__wrapped__ is scanned
    for function in (auto_remat, jaxnorm.remat_plan):
        with pytest.raises(TypeError, match=r"^jaxnorm\.\w+: fun is a int; expected a function"):
            function(1)


def test_while_loops():
    """A loop of unknown length has only forward derivatives, as in JAX."""

    def f(w, x):
        is_small = lambda y: jnp.sum(jnp.abs(y)) < 1e3  # noqa: E731
        return jnp.sum(jnp.tanh(jax.lax.while_loop(is_small, lambda y: 2 * y, x @ w)))

    of = lambda f: jax.jit(lambda w, x: jax.jvp(f, (w, x), (w, x)))(W[0], X)  # noqa: E731
    for ours, plain in zip(of(auto_remat(f)), of(f)):
        assert ours == plain
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(auto_remat(f))(W[0], X)


def test_closed_over_tracers():
    def f(w, x, remat):
        return jnp.sum(remat(lambda y: layer(y, 2 * w[0]) * jnp.sin(x))(jnp.tanh(x)))

    ours = functools.partial(f, remat=auto_remat)
    plain = functools.partial(f, remat=lambda g: g)
    assert_same(
        lambda: jax.grad(ours, (0, 1))(W, X),
        lambda: jax.grad(plain, (0, 1))(W, X),
        as_accurate=True,
    )


@each
def test_references(f):
    """Layers may write to references."""

    def writing(x, w):
        y = jax.new_ref(jnp.sin(x))
        jax.ref.addupdate(y, ..., layer(x, w))
        return jax.freeze(y)

    def plain(x, w):
        return jnp.sin(x) + layer(x, w)

    ours = auto_remat(functools.partial(f, layer=writing))
    ours, plain = (jax.grad(g, (0, 1)) for g in (ours, functools.partial(f, layer=plain)))
    for run in (ours, jax.jit(ours)):
        assert_same(lambda run=run: run(W, X), lambda: plain(W, X))


def test_outer_products_run_again():
    """`jnp.einsum` computes an outer product by a matmul, which XLA fuses as a product."""

    def f(w, x):
        return jnp.sum(jnp.sin(jnp.einsum("ab,ac->abc", x @ w, x)))

    assert jaxnorm.remat_plan(f, W[0], X).total == X.nbytes
    assert_same_gradients(f, W[0], X)
