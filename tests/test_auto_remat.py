"""auto_remat and remat_plan: values, derivatives, saved bytes, and operations that run twice."""

import collections
import functools
import html
import importlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import remat_models
from flax import linen, nnx
from jax.experimental import io_callback
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from program_error import assert_same_results

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx
from jaxnorm import auto_remat
from jaxnorm.remat import cuts
from jaxnorm.remat.cuts import Graph, Step

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.remat,
    pytest.mark.usefixtures("quick_to_compile"),
]

#: Assert that two programs have the same results, up to the rounding of the second one.
assert_same = functools.partial(assert_same_results, as_accurate=True)
LAYERS, ROWS, COLS = 3, 8, 16
_KEYS = jax.random.split(jax.random.key(0), 2)
W = jax.random.normal(_KEYS[0], (LAYERS, COLS, COLS)) / 4
X = jax.random.normal(_KEYS[1], (ROWS, COLS))


def layer(x, w):
    h = jax.nn.silu(x @ w)
    return x + jnp.tanh(h) * h


def scanned(w, x, layer=layer):
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)


def unrolled(w, x, layer=layer):
    for i in range(LAYERS):
        x = layer(x, w[i])
    return jnp.sum(x**2)


def counts(f, *args):
    """Count the primitives of a traced program, including those of inner programs."""
    found = collections.Counter()

    def visit(jaxpr):
        for e in jaxpr.eqns:
            found[e.primitive.name] += 1
            for inner in jaxprs_in_params(e.params):
                visit(getattr(inner, "jaxpr", inner))

    visit(jax.make_jaxpr(f)(*args).jaxpr)
    return found


def assert_same_gradients(f, *args, argnums=(0, 1), remat=auto_remat):
    """Assert that values and gradients are those of f, compiled and not compiled."""
    ours, plain = (jax.value_and_grad(g, argnums) for g in (remat(f), f))
    for run in (ours, jax.jit(ours)):
        assert_same(lambda run=run: run(*args), lambda: plain(*args))


@pytest.mark.parametrize("f", [scanned, unrolled])
def test_gradients(f):
    assert_same_gradients(f, W, X)


@pytest.mark.parametrize("f", [scanned, unrolled])
@pytest.mark.parametrize("budget", [0.6, 0.3, 8 * 4 * ROWS * COLS])
def test_gradients_within_a_budget(f, budget):
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
@pytest.mark.parametrize("f", [scanned, unrolled])
def test_transformations(f, name):
    of = TRANSFORMATIONS[name]
    assert_same(lambda: jax.jit(of, static_argnums=0)(auto_remat(f)), lambda: of(f))


@pytest.mark.parametrize("f", [scanned, unrolled])
def test_a_layer_inside_another_loop(f):
    ours = functools.partial(f, layer=auto_remat(layer))
    assert_same(lambda: jax.grad(ours)(W, X), lambda: jax.grad(f)(W, X))


def test_no_matmul_runs_twice():
    for f in (scanned, unrolled):
        plain, ours = (counts(jax.grad(g, (0, 1)), W, X) for g in (f, auto_remat(f)))
        assert ours["dot_general"] == plain["dot_general"]
        assert ours["scan"] == plain["scan"]
        compiled = jax.jit(jax.grad(auto_remat(f), (0, 1))).lower(W, X).compile().as_text()
        plain = jax.jit(jax.grad(f, (0, 1))).lower(W, X).compile().as_text()
        assert compiled.count(" dot(") == plain.count(" dot(")


def test_barriers_are_outside_of_loops():
    """A barrier in a loop would only prevent fusion. Unrolled code needs one for each segment."""
    for f, expected in ((scanned, False), (unrolled, True)):
        ours = functools.partial(f, layer=auto_remat(layer))
        lowered = jax.jit(jax.grad(ours)).lower(W, X).as_text()
        assert ("optimization_barrier" in lowered) == expected


def test_effects_happen_as_often():
    calls = []

    def f(w, x):
        jax.debug.callback(lambda _: calls.append("debug"), x)
        stopped = jax.lax.stop_gradient(x)
        x = x + io_callback(lambda x: (calls.append("io"), x)[1], stopped, stopped, ordered=True)

        def body(x, w):
            jax.debug.callback(lambda _: calls.append("scan"), x)
            return layer(x, w), None

        return jnp.sum(jax.lax.scan(body, x, w)[0])

    def calls_of(f):
        calls.clear()
        jax.block_until_ready(f(W, X))
        jax.effects_barrier()
        return sorted(calls)

    expected = ["debug", "io", *["scan"] * LAYERS]
    for run in (lambda f: f, jax.jit):
        for ours in (auto_remat(f), auto_remat(f, budget=0.8)):
            assert calls_of(run(ours)) == expected
            assert calls_of(run(jax.grad(ours))) == expected


@pytest.mark.parametrize("f", [scanned, unrolled])
def test_effects_of_a_backward_pass_happen_as_often(f):
    calls = []

    @jax.custom_vjp
    def watched(x):
        return x

    def backward(x, dx):
        jax.debug.callback(lambda _: calls.append("backward"), dx)
        return (dx * jnp.cos(x),)

    watched.defvjp(lambda x: (x, x), backward)
    ours = auto_remat(functools.partial(f, layer=lambda x, w: watched(layer(x, w))))
    for run in (jax.grad(ours), jax.jit(jax.grad(ours))):
        calls.clear()
        jax.block_until_ready(run(W, X))
        jax.effects_barrier()
        assert calls == ["backward"] * LAYERS


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
        aux = {"labels": batch["labels"] + 1, "positive": y > 0, "key": second, "none": None}
        return jnp.sum(y), aux | {"name": name, "number": 2, "y": y}

    params = {"w": W[0], "b": X}
    batch = {"x": X, "labels": jnp.arange(ROWS) % 3}
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        for train in (True, False):
            run = [
                jax.value_and_grad(g, has_aux=True)(params, batch, key, train=train, name="text")
                for g in (auto_remat(f), f)
            ]
            aux, expected = (r[0][1] for r in run)
            assert jax.tree.structure(run[0]) == jax.tree.structure(run[1])
            assert (aux["name"], aux["none"], aux["number"]) == ("text", None, 2)
            assert jax.random.uniform(aux["key"]) == jax.random.uniform(expected["key"])
            for name in ("labels", "positive", "y"):
                np.testing.assert_array_equal(aux[name], expected[name])
            for a, b in zip(*(jax.tree.leaves(r[1]) for r in run), strict=True):
                np.testing.assert_array_equal(a, b)


def test_leaves_that_are_no_arrays():
    """Strings and objects of NumPy are passed unchanged."""
    names = np.array(["name", None], object)
    f = auto_remat(lambda x, text, names: (jnp.sum(x**2), (text, names)))
    gradient, (text, found) = jax.grad(f, has_aux=True)(X, np.str_("text"), names)
    np.testing.assert_array_equal(gradient, 2 * X)
    assert text == "text"
    assert found is names


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("f", [scanned, unrolled])
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


@pytest.mark.parametrize("f", [scanned, unrolled])
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


def test_name_and_signature_stay():
    assert auto_remat(layer).__name__ == "layer"
    assert auto_remat(scanned).__wrapped__ is scanned


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


def test_outer_products_run_again():
    """`jnp.einsum` computes an outer product by a matmul, which XLA fuses as a product."""

    def f(w, x):
        return jnp.sum(jnp.sin(jnp.einsum("ab,ac->abc", x @ w, x)))

    assert jaxnorm.remat_plan(f, W[0], X).total == X.nbytes
    assert_same_gradients(f, W[0], X)


# ----------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("f", [scanned, unrolled])
def test_each_point_of_the_frontier_is_reached(f):
    plan = jaxnorm.remat_plan(f, W, X)
    assert plan.frontier[0] == (plan.default, 0.0)
    assert plan.default == jaxnorm.memory_report(f, W, X).total
    reached = jaxnorm.remat_plan(f, W, X, budget=plan.default)
    assert (reached.total <= plan.default, reached.recompute) == (True, 0.0)
    sizes, shares = zip(*plan.frontier)
    assert all(a > b for a, b in itertools.pairwise(sizes))
    assert all(a < b for a, b in itertools.pairwise(shares))
    for point in plan.frontier[1:]:
        reached = jaxnorm.remat_plan(f, W, X, budget=point.bytes)
        assert reached.total == point.bytes
        assert reached.recompute == point.recompute
        remat = auto_remat(f, budget=point.bytes)
        assert jaxnorm.memory_report(remat, W, X).total == point.bytes


@pytest.mark.parametrize("budget", [True, "1", 1.5, -1, float("nan"), 0.0, 1j, np.array(1)])
def test_budgets_that_are_no_budgets(budget):
    for call in (
        lambda: auto_remat(scanned, budget=budget),
        lambda: jaxnorm.remat_plan(scanned, W, X, budget=budget),
    ):
        with pytest.raises(
            (TypeError, ValueError), match=r"^jaxnorm\.(auto_remat|remat_plan): budget"
        ):
            call()


def test_a_budget_below_the_least_possible():
    least = jaxnorm.remat_plan(scanned, W, X).frontier[-1].bytes
    jax.grad(auto_remat(scanned, budget=least))(W, X)
    with pytest.raises(ValueError, match=rf"^jaxnorm.auto_remat: budget.*{least} bytes"):
        jax.grad(auto_remat(scanned, budget=least - 1))(W, X)


# ----------------------------------------------------------------------------------- models


def model(layer, is_scan):
    """Return the mean square of the last hidden states, as a function of parameters and x."""

    def loss(params, x):
        if is_scan:
            x = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0]
        else:
            for i in range(LAYERS):
                x = layer(x, jax.tree.map(lambda a: a[i], params))  # noqa: B023, called here
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def arguments_of_models():
    shape = (remat_models.B, remat_models.S, remat_models.WIDTH)
    x = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
    return remat_models.parameters(LAYERS, jax.random.key(3)), x


@pytest.mark.parametrize("name", remat_models.LAYERS)
@pytest.mark.parametrize("is_scan", [True, False], ids=["scan", "unrolled"])
def test_saved_arrays_of_models(name, is_scan):
    """A layer saves what an expert would save, and no costly operation runs twice."""
    layer, most = remat_models.LAYERS[name]
    params, x = arguments_of_models()
    loss = model(layer, is_scan)
    saved = jaxnorm.memory_report(auto_remat(loss), params, x).total
    # What is left once outside of the layers: the last hidden states in 16 or 32 bits.
    assert saved <= (most * LAYERS + 2) * x.nbytes
    plain, ours = (counts(jax.grad(f), params, x) for f in (loss, auto_remat(loss)))
    for costly in ("dot_general", "scan", "top_k", "sort"):
        assert ours[costly] <= plain[costly]


@pytest.mark.parametrize("name", sorted(remat_models.LAYERS.keys() - {"moe"}))
@pytest.mark.parametrize("budget", [None, 0.3])
def test_gradients_of_models(name, budget):
    layer, _ = remat_models.LAYERS[name]
    params, x = arguments_of_models()
    params, x = jax.tree.map(lambda a: a[:1].astype(jnp.float32), (params, x[:, :4]))
    loss = model(layer, True)
    ours = jax.jit(jax.grad(auto_remat(loss, budget=budget)))
    assert_same(lambda: ours(params, x), lambda: jax.grad(loss)(params, x))


@pytest.mark.parametrize("budget", [None, 0.3])
def test_gradients_of_experts(budget):
    """Outside of `jax.jit`, each operation runs alone, so that recomputed values are the same."""
    params, x = arguments_of_models()
    params, x = jax.tree.map(lambda a: a[:1].astype(jnp.float32), (params, x[:, :4]))

    def loss(params, x):
        return jnp.sum(remat_models.moe(x, jax.tree.map(lambda a: a[0], params)) ** 2)

    ours, plain = (jax.grad(f)(params, x) for f in (auto_remat(loss, budget=budget), loss))
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


# ----------------------------------------------------------------------------------- cuts


@pytest.mark.parametrize("seed", range(20))
def test_cuts_of_random_graphs(seed):
    """The frontier of a small graph is the convex hull of all of its choices."""
    rng = np.random.default_rng(seed)
    count = 8
    sizes = rng.integers(1, 50, count + 1).tolist()
    steps = []
    for v in range(1, count + 1):  # Value 0 can only be saved.
        operands = rng.choice(v, min(v, int(rng.integers(1, 3))), replace=False)
        steps.append(Step(float(rng.integers(1, 20)), tuple(map(int, operands)), (v,)))
    residuals = rng.choice(count + 1, 4, replace=False).tolist()
    graph = Graph(sizes, steps, residuals)
    subsets = itertools.product([False, True], repeat=count + 1)
    choices = [graph.choice([v for v in range(count + 1) if s[v]]) for s in subsets]
    above, below = cuts.ends([(graph, 1)])
    points = cuts.frontier([(graph, 1)], above, below)
    assert points[0].seconds == 0
    assert points[-1].bytes == min(c.bytes for c in choices)
    for p, q in itertools.pairwise(points):
        assert p.bytes > q.bytes
        assert p.seconds < q.seconds
        # No choice lies below the line through two neighbours.
        price = (p.bytes - q.bytes) / (q.seconds - p.seconds)
        least = min(c.bytes + price * c.seconds for c in choices)
        assert p.bytes + price * p.seconds <= least * (1 + cuts.PRECISION)
    for price in (0.1, 1.0, 10.0):
        found, best = graph.cut(price), min(c.bytes + price * c.seconds for c in choices)
        assert found.bytes + price * found.seconds <= best * (1 + cuts.PRECISION)


# ----------------------------------------------------------------------------------- frameworks


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(COLS, COLS, rngs=rngs)
        self.norm = nnx.BatchNorm(COLS, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x, scale=1.0, name="text"):
        self.calls[...] += 1
        assert name == "text"
        return x + scale * self.dropout(jax.nn.silu(self.norm(self.linear(x))))


def nnx_loss(remat, block):
    loss = remat(lambda block, x, scale, name: jnp.sum(block(x, scale, name) ** 2))
    return nnx.grad(loss)(block, X, scale=2.0, name="text")


def nnx_method(remat, block):
    return nnx.grad(lambda block: jnp.sum(remat(block.__call__)(X, name="text") ** 2))(block)


def nnx_module(remat, block):
    return nnx.grad(lambda block: jnp.sum(remat(block)(X) ** 2))(block)


def nnx_shared(remat, block):
    """The block occurs twice in the arguments, inside of a dict and a list."""
    loss = remat(lambda blocks, x: jnp.sum(blocks["b"][0](blocks["a"](x)) ** 2))
    return nnx.grad(lambda block: loss({"a": block, "b": [block]}, X))(block)


def nnx_rngs(remat, block):
    """The state of random numbers and variables outside of modules also are propagated."""
    rngs, factor, count = nnx.Rngs(1), nnx.Param(jnp.ones_like(X)), nnx.Variable(jnp.array(1))

    def loss(factor, count, rngs, block):
        count[...] += 1
        return jnp.sum(block(factor[...] + X) * jax.random.bernoulli(rngs(), 0.5, X.shape))

    gradient = nnx.grad(remat(loss))(factor, count, rngs, block)
    return gradient, count[...], jax.random.uniform(rngs())


def nnx_scanned(remat, _):
    """The blocks are the layers of a scan."""
    make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxBlock))
    blocks = make(nnx.Rngs(0))
    scan = nnx.scan(remat(lambda block, x: block(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    gradient = nnx.grad(lambda blocks: jnp.sum(scan(blocks, X) ** 2))(blocks)
    return gradient, nnx.state(blocks, nnx.Not(nnx.RngState))


@pytest.mark.parametrize(
    "of", [nnx_loss, nnx_method, nnx_module, nnx_shared, nnx_rngs, nnx_scanned]
)
@pytest.mark.parametrize("budget", [None, 0.9])
def test_nnx(of, budget):
    """Gradients, statistics, counts and random numbers are those without `auto_remat`."""

    def run(remat):
        block = NnxBlock(nnx.Rngs(0))
        gradients = of(remat, block)
        state = nnx.state(block, nnx.Not(nnx.RngState))
        return jax.tree.leaves((gradients, state, jax.random.uniform(block.dropout.rngs())))

    # Outside of `jax.jit`, each operation runs alone, so that recomputed values are the same.
    ours = run(functools.partial(jaxnorm.nnx.auto_remat, budget=budget))
    for a, b in zip(ours, run(lambda f: f), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nnx_in_a_training_step():
    graph, state = nnx.split(NnxBlock(nnx.Rngs(0)))

    def run(remat):
        block = nnx.merge(graph, jax.tree.map(jnp.asarray, state))

        @nnx.jit
        def step(block, x):
            loss, gradients = nnx.value_and_grad(remat(lambda b, x: jnp.sum(b(x) ** 2)))(block, x)
            weights = nnx.state(block, nnx.Param)
            nnx.update(block, jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients))
            return loss

        losses = [step(block, X) for _ in range(2)]
        return [*losses, block.norm.mean[...], block.calls[...]]

    assert_same(lambda: run(jaxnorm.nnx.auto_remat), lambda: run(lambda f: f))


class LinenBlock(linen.Module):
    def setup(self):
        self.dense = linen.Dense(COLS)
        self.norm = linen.BatchNorm()
        self.dropout = linen.Dropout(0.5)

    def __call__(self, x, train=True):
        y = jax.nn.silu(self.norm(self.dense(x), use_running_average=not train))
        return x + self.dropout(y, deterministic=not train)

    def embed(self, x, train):
        self.sow("intermediates", "x", x)
        return jnp.tanh(self.dense(x)) if train else x


def of_class(remat):
    return remat(LinenBlock, static_argnums=2)(), {}


def of_methods(remat):
    block = remat(LinenBlock, static_argnums=(2,), methods=["__call__", "embed"])
    return block(), {"method": "embed"}


def of_function(remat):
    class Net(linen.Module):
        def setup(self):
            self.block = LinenBlock()

        def __call__(self, x, train):
            def run(net, x, train):
                return jnp.sin(net.block(x, train)) * net.block.embed(x, train)

            return remat(run, static_argnums=2)(self, x, train)

    return Net(), {}


def of_scan(remat, is_inside=True):
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            return LinenBlock()(x, train), None

    def scan(layer):
        axes = {"params": 0, "batch_stats": 0}
        split = {"params": True, "dropout": True}
        return linen.scan(layer, axes, split_rngs=split, in_axes=linen.broadcast, length=LAYERS)

    def both(target, **_):
        return remat(target, static_argnums=2)

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            layers = scan(both(Layer)) if is_inside else both(scan(Layer))
            return layers(name="layers")(x, train)[0]

    return Net(), {}


def of_the_whole_scan(remat):
    return of_scan(remat, is_inside=False)


@pytest.mark.parametrize("of", [of_class, of_methods, of_function, of_scan, of_the_whole_scan])
@pytest.mark.parametrize("budget", [None, 0.9])
def test_linen(of, budget):
    """Gradients, statistics, sown arrays and random numbers are those without `auto_remat`."""

    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = of(lambda target, **_: target)[0].init(rngs, X, True)

    def run(remat):
        module, options = of(remat)

        def loss(params):
            given = {**variables, "params": params}
            collections = ["batch_stats", "intermediates"]
            y, state = module.apply(given, X, True, mutable=collections, rngs=rngs, **options)
            return jnp.sum(y**2), state

        return jax.tree.leaves(jax.grad(loss, has_aux=True)(variables["params"]))

    ours = run(functools.partial(jaxnorm.linen.auto_remat, budget=budget))
    for a, b in zip(ours, run(lambda target, **_: target), strict=True):
        np.testing.assert_array_equal(a, b)


def test_linen_parameters_are_those_of_nn_remat():
    def variables(remat):
        block = linen.Sequential([remat(linen.Dense)(COLS, name="first"), remat(LinenBlock)()])
        return block.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    ours, theirs = variables(jaxnorm.linen.auto_remat), variables(linen.remat)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert jaxnorm.linen.auto_remat(linen.Dense).__name__ == linen.remat(linen.Dense).__name__


@pytest.mark.parametrize("budget", [None, 0.9])
@pytest.mark.parametrize("place", ["model", "loss", "layers"])
def test_equinox(place, budget):
    """Gradients and statistics are those without `auto_remat`, even if the layers are wrapped."""
    eqx = pytest.importorskip("equinox")
    auto = functools.partial(importlib.import_module("jaxnorm.equinox").auto_remat, budget=budget)

    class Block(eqx.Module):
        linear: eqx.Module
        norm: eqx.nn.BatchNorm
        dropout: eqx.nn.Dropout

        def __init__(self, remat):
            self.linear = remat(eqx.nn.Linear(COLS, COLS, key=jax.random.key(0)))
            self.norm = eqx.nn.BatchNorm(COLS, axis_name="batch", mode="batch")
            self.dropout = eqx.nn.Dropout(0.5)

        def __call__(self, x, state, key):
            y, state = self.norm(jnp.sin(self.linear(x)), state)
            return x + self.dropout(jax.nn.silu(y), key=key), state

    def run(remat):
        of = {p: remat if p == place else lambda f: f for p in ("model", "loss", "layers")}

        @of["loss"]
        def loss(model, state, x, keys):
            mapped = jax.vmap(of["model"](model), (0, None, 0), (0, None), axis_name="batch")
            y, state = mapped(x, state, keys)
            return jnp.sum(y**2), state

        model, state = eqx.nn.make_with_state(Block)(of["layers"])
        keys = jax.random.split(jax.random.key(1), ROWS)
        gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))
        return jax.tree.leaves(gradients(model, state, X, keys))

    assert_same(lambda: run(auto), lambda: run(lambda f: f))


def test_equinox_methods():
    eqx = pytest.importorskip("equinox")
    auto = importlib.import_module("jaxnorm.equinox").auto_remat

    class Layer(eqx.Module):
        w: jax.Array

        @auto
        def __call__(self, x):
            return jnp.sum(jax.nn.silu(x @ self.w) * jnp.sin(x))

    gradient = eqx.filter_grad(lambda layer: layer(X))(Layer(W[0]))
    plain = jax.grad(lambda w: jnp.sum(jax.nn.silu(X @ w) * jnp.sin(X)))
    assert_same(lambda: gradient.w, lambda: plain(W[0]))
    with pytest.raises(ValueError, match=r"^jaxnorm.auto_remat: budget=-1"):
        auto(Layer(W[0]), budget=-1)


# ----------------------------------------------------------------------------------- more plans


def test_calls_outside_of_jit_plan_once(monkeypatch):
    planned = []
    minimum = Graph.minimum
    monkeypatch.setattr(Graph, "minimum", lambda *a: (planned.append(1), minimum(*a))[1])
    f = auto_remat(lambda x: jnp.sum(jax.nn.relu(jax.nn.gelu(jnp.sin(3 * x)))), budget=0.7)
    jax.grad(f)(X)
    count = len(planned)
    assert count
    jax.grad(f)(X)
    assert len(planned) == count


def test_bytes_are_those_of_one_device():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def f(w, x, layer=layer):
        loop = lambda w, x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]  # noqa: E731
        mapped = jax.shard_map(loop, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
        return jnp.sum(mapped(w, x) ** 2)

    plan = jaxnorm.remat_plan(f, W, X)
    assert plan.default == jaxnorm.memory_report(f, W, X).total
    for point in plan.frontier[1:]:
        remat = auto_remat(f, budget=point.bytes)
        assert jaxnorm.memory_report(remat, W, X).total == point.bytes


def test_a_loop_inside_of_a_layer():
    """A budget may run the inner loop again. Its result and bytes stay within the budget."""

    def recurrent(x, w):
        def step(h, gate):
            h = jnp.tanh(h @ w) * gate
            return h, h

        return x + jax.lax.scan(step, x[0], jax.nn.sigmoid(x @ w))[1]

    f = functools.partial(scanned, layer=recurrent)
    assert_same_gradients(f, W, X)
    plan = jaxnorm.remat_plan(f, W, X)
    assert plan.frontier[-1].bytes < plan.total < plan.default
    for point in plan.frontier:
        remat = functools.partial(auto_remat, budget=point.bytes)
        assert jaxnorm.memory_report(remat(f), W, X).total <= point.bytes
    assert_same_gradients(f, W, X, remat=remat)


def assert_fits(plan):
    """Assert that a plan is printed in 45 lines of 100 characters, even in notebooks."""
    lines = str(plan).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    shown = plan._repr_html_()
    assert shown.startswith("<pre>")
    assert html.unescape(shown.removeprefix("<pre>").removesuffix("</pre>")) == str(plan)


@pytest.mark.parametrize("budget", [None, 0.2])
@pytest.mark.parametrize("is_scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("name", remat_models.LAYERS)
def test_printed_plans_of_models(name, is_scan, budget):
    plan = jaxnorm.remat_plan(
        model(remat_models.LAYERS[name][0], is_scan), *arguments_of_models(), budget=budget
    )
    assert_fits(plan)
    if name == "llama" and budget is None:
        _, by_hand = str(plan).split("the same by hand: ")
        text = re.sub(r" +remat_models.py:\d+ +", "", by_hand)
        for line in (
            'q = checkpoint_name(q, "q")',
            'k = checkpoint_name(k, "k")',
            'checkpoint_name(attention(q, k, v), "attention")',
            'checkpoint_name(dense(y, p["gate"]), "gate")',
            'checkpoint_name(dense(y, p["up"]), "up")',
        ):
            assert line in text.splitlines()
        assert "save_only_these_names(" in text


_LOSS = """
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

def dense(x, w):
    return x @ w

def normed(x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))

def loss(w, x):
    h = dense(normed(x), w[0])
    a, b = dense(jnp.sin(h), w[1]), h[:, :4] @ w[0][:4]
    y = jax.nn.silu(a) * jnp.tanh(b)
    y += dense(normed(y), w[2])
    return jnp.sum(dense(jnp.cos(y), w[0]) ** 2)
"""


def test_lines_of_a_plan_save_the_same_arrays(tmp_path):
    """The source code with the lines of a plan saves the same bytes, and has the same gradient."""
    file = tmp_path / "loss.py"

    def loss_of(text):
        file.write_text(text)
        scope = {}
        exec(compile(text, file, "exec"), scope)
        return scope["loss"]

    plan = jaxnorm.remat_plan(loss_of(_LOSS), W, X)
    assert_fits(plan)
    by_hand = str(plan).split("the same by hand: ")[1]
    changed = _LOSS.splitlines()
    names = []
    for number, target, inner, name in re.findall(
        r"loss\.py:(\d+) +(?:(\w+) = )?checkpoint_name\((.+), \"(\w+)\"\)", by_hand
    ):
        line = int(number) - 1
        names.append(name)
        if target:
            assert inner == target
            indent = len(changed[line]) - len(changed[line].lstrip())
            changed[line] += f"\n{' ' * indent}{target} = checkpoint_name({inner}, {name!r})"
        else:
            place = f"checkpoint_name({inner}, {name!r})"
            assert inner in changed[line]
            changed[line] = changed[line].replace(inner, place)
    assert len({*names}) == len(names) == 5
    assert all(f'"{name}"' in by_hand.split("policy = ")[1] for name in names)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    f = jax.checkpoint(loss_of("\n".join(changed)), policy=policy)
    assert jaxnorm.memory_report(f, W, X).total == plan.total
    assert_same(lambda: jax.grad(f)(W, X), lambda: jax.grad(loss_of(_LOSS))(W, X))


class Axes:
    """Axes of matplotlib, which record their curves and labels."""

    def __init__(self):
        self.curves, self.labels, self.has_legend = [], [], False

    def plot(self, x, y, *args, **kwargs):
        self.curves.append((x, y))

    def set_xlabel(self, label):
        self.labels.append(label)

    set_ylabel = set_xlabel

    def legend(self):
        self.has_legend = True


def test_a_plot_of_the_frontier():
    plan = jaxnorm.remat_plan(scanned, W, X)
    axes = Axes()
    assert plan.plot(axes) is axes
    (sizes, shares), ((size,), (share,)) = axes.curves
    assert [p.bytes for p in plan.frontier] == [2**20 * mib for mib in sizes]
    np.testing.assert_array_equal(shares, [100 * p.recompute for p in plan.frontier])
    assert (size, share) == (plan.total / 2**20, 100 * plan.recompute)
    assert axes.labels == ["saved MiB", "recomputation, % of both passes"]
    assert axes.has_legend


def test_a_plot_with_matplotlib():
    pytest.importorskip("matplotlib").use("Agg")
    axes = jaxnorm.remat_plan(scanned, W, X).plot()
    assert len(axes.lines) == 2
    assert axes.get_xlabel() == "saved MiB"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_unrolled_layers_need_less_memory(name, monkeypatch):
    """XLA neither merges the passes of unrolled layers, nor recomputes all layers at once."""
    monkeypatch.setitem(globals(), "LAYERS", 6)  # so that one layer is a small part
    params, x = arguments_of_models()
    loss = model(remat_models.LAYERS[name][0], False)
    plan = jaxnorm.remat_plan(loss, params, x)

    def temp(f):
        return jax.jit(jax.grad(f)).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    assert temp(auto_remat(loss)) <= temp(loss) - (plan.default - plan.total)
    least = auto_remat(loss, budget=plan.frontier[-1].bytes)
    assert temp(least) < temp(auto_remat(loss))


def test_a_budget_recomputes_one_layer_after_the_other(monkeypatch):
    """Equal layers tie. The frontier has a point for each of them, and no operation runs thrice.

    Fewer saved bytes do not need more memory, but for the arrays of the layer that runs again.
    """
    monkeypatch.setitem(globals(), "LAYERS", 4)
    w = jnp.concatenate([W, W[:1]])
    plan = jaxnorm.remat_plan(unrolled, w, X)
    dots, temps = [], []
    for point in plan.frontier:
        gradient = jax.grad(auto_remat(unrolled, budget=point.bytes))
        dots.append(counts(gradient, w, X)["dot_general"])
    for point in plan.frontier[::4]:
        compiled = jax.jit(jax.grad(auto_remat(unrolled, budget=point.bytes))).lower(w, X).compile()
        temps.append(compiled.memory_analysis().temp_size_in_bytes)
    plain = counts(jax.grad(unrolled), w, X)["dot_general"]
    again = [n - plain for n in dots]
    assert again == sorted(again)
    assert {*again} == {*range(max(again) + 1)}
    assert LAYERS // 2 < max(again) <= LAYERS
    assert all(below <= above + X.nbytes for above, below in itertools.pairwise(temps))


def test_the_logits_of_a_linear_loss_are_computed_again_last():
    head = jax.random.normal(_KEYS[0], (COLS, 4 * COLS))
    labels = jnp.arange(ROWS)

    def loss(w, x, head):
        y = jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]
        return jaxnorm.linear_softmax_cross_entropy(y, head, labels)

    plan = jaxnorm.remat_plan(loss, W, X, head)
    runs = []
    for point in plan.frontier:
        gradient = jax.grad(auto_remat(loss, budget=point.bytes))
        found = counts(gradient, W, X, head)
        runs.append((found["jaxnorm.linear_softmax_cross_entropy"], found["dot_general"]))
    assert runs[0][0] == 1
    most = max(dots for _, dots in runs)
    assert all(dots == most for losses, dots in runs if losses > 1)


def test_a_single_layer_need_not_save_anything():
    params, x = arguments_of_models()
    params, x = jax.tree.map(lambda a: a[0].astype(jnp.float32), (params, x[None, :, :4]))

    def loss(params, x):
        return jnp.sum(remat_models.LAYERS["llama"][0](x, params) ** 2)

    assert jaxnorm.remat_plan(loss, params, x).frontier[-1].bytes == 0
    ours = jax.jit(jax.grad(auto_remat(loss, budget=0)))
    assert_same(lambda: ours(params, x), lambda: jax.grad(loss)(params, x))
