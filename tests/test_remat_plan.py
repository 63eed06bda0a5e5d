"""Plans of `auto_remat`: saved bytes, budgets, the frontier, cuts, and the printed lines."""

import functools
import itertools
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from remat_cases import (
    COLS,
    KEYS,
    ROWS,
    W,
    X,
    assert_fits,
    assert_same,
    assert_same_gradients,
    counts,
    each,
    layer,
    scanned,
    unrolled,
)

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


# ----------------------------------------------------------------------------------- cuts


def test_the_seconds_of_a_loop_are_those_of_its_iterations():
    def body(x, _):
        return jnp.tanh(x @ W[0]), None

    def seconds(f):
        return sum(costs.seconds(e) for e in jax.make_jaxpr(f)(X).eqns)

    once = seconds(lambda x: body(x, None)[0])
    assert seconds(jax.jit(lambda x: body(x, None)[0])) == once
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
    for v in range(2, count + 1):  # The first two values can only be saved.
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


def test_a_plot_of_the_frontier(monkeypatch):
    plan, axes, matplotlib = jaxnorm.remat_plan(scanned, W, X), mock.Mock(), mock.Mock()
    matplotlib.pyplot.subplots.return_value = None, axes
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", matplotlib.pyplot)
    assert plan.plot(axes) is plan.plot() is axes
    (sizes, shares), *_ = (call.args[:2] for call in axes.plot.call_args_list)
    assert [p.bytes for p in plan.frontier] == [2**20 * mib for mib in sizes]
    np.testing.assert_array_equal(shares, [100 * p.recompute for p in plan.frontier])


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
    def f(w, x):
        return jnp.sum(layer(x, w) ** 2)

    assert jaxnorm.remat_plan(f, W[0], X).frontier[-1].bytes == 0
    assert_same_gradients(f, W[0], X, remat=functools.partial(auto_remat, budget=0))
