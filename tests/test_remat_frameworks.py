"""auto_remat for Flax's nnx and linen, and for equinox."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from remat_cases import COLS, LAYERS, ROWS, W, X, assert_same

import jaxnorm.equinox
import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.remat,
    pytest.mark.usefixtures("quick_to_compile"),
]


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
    auto = functools.partial(jaxnorm.equinox.auto_remat, budget=budget)

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
    class Layer(eqx.Module):
        w: jax.Array

        @jaxnorm.equinox.auto_remat
        def __call__(self, x):
            return jnp.sum(jax.nn.silu(x @ self.w) * jnp.sin(x))

    gradient = eqx.filter_grad(lambda layer: layer(X))(Layer(W[0]))
    plain = jax.grad(lambda w: jnp.sum(jax.nn.silu(X @ w) * jnp.sin(X)))
    assert_same(lambda: gradient.w, lambda: plain(W[0]))
    with pytest.raises(ValueError, match=r"^jaxnorm.auto_remat: budget=-1"):
        jaxnorm.equinox.auto_remat(Layer(W[0]), budget=-1)
