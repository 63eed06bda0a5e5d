"""Plans of `auto_remat`: saved bytes, budgets, the frontier, the printed lines, and models."""

import functools
import html
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import remat_models
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from remat_cases import (
    COLS,
    KEYS,
    LAYERS,
    ROWS,
    W,
    X,
    assert_same,
    assert_same_gradients,
    counts,
    each,
    layer,
    scanned,
    unrolled,
)
from remat_models import loss_of

import jaxnorm
from jaxnorm import auto_remat
from jaxnorm.remat import costs, cuts
from jaxnorm.remat.cuts import Graph, Step

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.remat,
    pytest.mark.usefixtures("quick_to_compile"),
]


@each
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


# ----------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", remat_models.LAYERS)
@pytest.mark.parametrize("is_scan", [True, False], ids=["scan", "unrolled"])
def test_saved_arrays_of_models(name, is_scan):
    """A layer saves what an expert would save, and no costly operation runs twice."""
    params, x = remat_models.arguments(LAYERS)
    loss = loss_of(name, is_scan)
    saved = jaxnorm.memory_report(auto_remat(loss), params, x).total
    # What is left once outside of the layers: the last hidden states in 16 or 32 bits.
    assert saved <= (remat_models.LAYERS[name][1] * LAYERS + 2) * x.nbytes
    plain, ours = (counts(jax.grad(f), params, x) for f in (loss, auto_remat(loss)))
    for costly in ("dot_general", "scan", "top_k", "sort"):
        assert ours[costly] <= plain[costly]


@pytest.mark.parametrize("name", sorted(remat_models.LAYERS.keys() - {"moe"}))
@pytest.mark.parametrize("budget", [None, 0.3])
def test_gradients_of_models(name, budget):
    params, x = remat_models.small_arguments()
    loss = loss_of(name, True)
    ours = jax.jit(jax.grad(auto_remat(loss, budget=budget)))
    assert_same(lambda: ours(params, x), lambda: jax.grad(loss)(params, x))


@pytest.mark.parametrize("budget", [None, 0.3])
def test_gradients_of_experts(budget):
    """Outside of `jax.jit`, each operation runs alone, so that recomputed values are the same."""
    params, x = remat_models.small_arguments()
    loss = loss_of("moe", False)
    ours, plain = (jax.grad(f)(params, x) for f in (auto_remat(loss, budget=budget), loss))
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


# ----------------------------------------------------------------------------------- cuts


def test_the_seconds_of_a_loop_are_those_of_its_iterations():
    def body(x, _):
        return jnp.tanh(x @ W[0]), None

    def seconds(f):
        return sum(costs.seconds(e) for e in jax.make_jaxpr(f)(X).eqns)

    once = seconds(lambda x: body(x, None)[0])
    for length in (1, 5):
        loop = seconds(lambda x: jax.lax.scan(body, x, length=length)[0])  # noqa: B023
        assert loop == length * once > 0


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


# ----------------------------------------------------------------------------------- printed plans


def assert_fits(plan):
    """Assert that a plan is printed in 45 lines of 100 characters, also in notebooks."""
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
        loss_of(name, is_scan), *remat_models.arguments(LAYERS), budget=budget
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
def test_unrolled_layers_need_less_memory(name):
    """XLA neither merges the passes of unrolled layers, nor recomputes all layers at once."""
    params, x = remat_models.arguments(6)  # so that one layer is a small part
    loss = loss_of(name, False)
    plan = jaxnorm.remat_plan(loss, params, x)

    def temp(f):
        return jax.jit(jax.grad(f)).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    assert temp(auto_remat(loss)) <= temp(loss) - (plan.default - plan.total)
    least = auto_remat(loss, budget=plan.frontier[-1].bytes)
    assert temp(least) < temp(auto_remat(loss))


def test_a_budget_recomputes_one_layer_after_the_other():
    """Equal layers tie. The frontier has a point for each of them, and no operation runs thrice.

    Fewer saved bytes do not need more memory, but for the arrays of the layer that runs again.
    """
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
    assert len(w) // 2 < max(again) <= len(w)
    assert all(below <= above + X.nbytes for above, below in itertools.pairwise(temps))


def test_the_logits_of_a_linear_loss_are_computed_again_last():
    head = jax.random.normal(KEYS[0], (COLS, 4 * COLS))
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
    params, x = remat_models.small_arguments()
    loss = loss_of("llama", False)
    assert jaxnorm.remat_plan(loss, params, x).frontier[-1].bytes == 0
    ours = jax.jit(jax.grad(auto_remat(loss, budget=0)))
    assert_same(lambda: ours(params, x), lambda: jax.grad(loss)(params, x))
