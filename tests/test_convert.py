"""Conversion of existing models by `linen.converted`, `nnx.convert` and `equinox.convert`."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from convert_cases import (
    LOST,
    WIDTH,
    each_library,
    in_double,
    message_of,
    normal,
)
from flax import nnx

import jaxnorm.equinox
import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

# ------------------------------------------------------------------------- each library: its norms


@each_library
def test_norms_that_are_left_and_norms_that_keep_their_input(library, caplog):
    """One line names them, with the reasons."""
    base = library.theirs.RMSNorm

    class Scaled(base):
        def __call__(self, x):
            return 2 * super().__call__(x)

    kinds = {
        "good": ("LayerNorm", {}),
        "half": ("RMSNorm", LOST | {"param_dtype": jnp.float16}),
        "lost": ("LayerNorm", LOST),
        "unbiased": ("LayerNorm", LOST | {"use_bias": False}),
        "unscaled": ("LayerNorm", {"use_scale": False}),
    }
    if library.package == "equinox":
        kinds["integers"] = "LayerNorm", {"param_dtype": int}
    else:
        kinds["half"] = "RMSNorm", {"scale_init": LOST["scale_init"], "dtype": jnp.float16}
        kinds["instance"] = "RMSNorm", {"reduction_axes": (0, 1)}
        kinds["whole"] = "LayerNorm", {"dtype": jnp.complex64}
        kinds["grouped"] = "GroupNorm", LOST | {"num_groups": 4}
    norms = {n: library.make(getattr(library.theirs, k), **f) for n, (k, f) in kinds.items()}
    norms["own"] = library.make(library.ours.RMSNorm, save="input")
    norms["scaled"] = library.make(Scaled)
    if library.name == "nnx":
        norms["synchronised"] = library.make(nnx.LayerNorm, axis_name="batch")
    norms = dict(sorted(norms.items()))
    before = {name: type(norm) for name, norm in norms.items()}
    saves = library.saves(library.model(norms))
    # These are: good, grouped (if the library has it), half, lost, own, unbiased and unscaled.
    grouped = ["input"] * ("grouped" in norms)
    assert saves == ["output", *grouped, "input", "input", "input", "output", "output"]
    left = {
        "equinox": "integers (dtypes int32, int32); ",
        "nnx": "instance (feature_axes=-1 are not reduction_axes=(0, 1)); ",
        "linen": "instance (feature_axes=-1 are not reduction_axes=(0, 1)); ",
    }[library.name]
    left += f"scaled (Scaled is a subclass of {library.package}'s RMSNorm, with code of its own)"
    left += {
        "equinox": "",
        "nnx": "; synchronised (axis_name='batch'); whole (dtypes complex64, float32)",
        "linen": "; whole (dtypes float32, float32, complex64)",
    }[library.name]
    count, total = left.count(" ("), len(norms) - 1
    half = "scales too small for float16"
    if library.package == "equinox":  # its RMSNorm has a bias
        half = "scales of 0, or far below the bias,"
    assert message_of(caplog) == (
        f"jaxnorm.{library.function}: {count} of {total} norms are left to {library.package}: "
        f'{left}. {2 + len(grouped)} of {total} norms keep their input, as with save="input": '
        + "grouped (scales of 0, or far below the bias, in 2 of 16 columns); "
        * len(grouped)
        + f"half ({half} in 2 of 16 columns); "
        "lost (scales of 0, or far below the bias, in 2 of 16 columns). "
        "To convert such classes, pass calls={Scaled: function}"
    )
    if library.name == "nnx":
        untouched = {"instance", "own", "scaled", "synchronised", "whole"}
        assert {name for name, norm in norms.items() if type(norm) is before[name]} == untouched


@each_library
def test_a_model_without_norms_is_told(library, caplog):
    dense = {
        "linen": functools.partial(nn.Dense, 4),
        "nnx": nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        "equinox": eqx.nn.Linear(4, 4, key=jax.random.key(0)),
    }[library.name]
    library.saves(library.model({"dense": dense}))
    said = (
        rf"jaxnorm.{library.function}: .*no \S+LayerNorm.*; norms .* by calls={{class: function}}"
    )
    assert re.fullmatch(said, message_of(caplog))


def test_parameters_without_values_are_not_looked_at(caplog):
    """Abstract and traced parameters have no values."""
    saved = []
    for convert, split, merge, make in (
        (jaxnorm.nnx.convert, nnx.split, nnx.merge, lambda: nnx_lost()),
        (jaxnorm.equinox.convert, lambda a: (None, a), lambda _, a: a, lambda: eqx_lost()),
    ):
        graph, state = split(make())
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
        saved.append(convert(merge(graph, abstract)).save)
        jax.jit(lambda s: saved.append(convert(merge(graph, s)).save))(state)  # noqa: B023
    assert saved == ["output"] * 4
    assert not caplog.records
    stacked = eqx.filter_vmap(lambda _: eqx_lost())(jnp.ones(3))
    for lost, options in (
        (eqx_lost(), {}),
        (stacked, {}),
        (eqx.nn.LayerNorm(4), {"save": "input"}),
    ):
        assert jaxnorm.equinox.convert(lost, **options).save == "input"


def nnx_lost(**fields):
    return nnx.LayerNorm(WIDTH, **LOST, **fields, rngs=nnx.Rngs(0))


def eqx_lost():
    norm = jax.tree.map(jnp.zeros_like, eqx.nn.LayerNorm(WIDTH))
    return eqx.tree_at(lambda norm: norm.bias, norm, jnp.ones(WIDTH))


@each_library
@pytest.mark.parametrize("options", [{"save": "both"}, {"implementation": "cudnn"}])
def test_errors(library, options):
    ((name, value),) = options.items()
    function = library.function.partition(".")[2]
    norm = library.make(library.theirs.LayerNorm)
    with pytest.raises(ValueError, match=f"{function}: {name}='{value}'; expected one of"):
        library.saves(library.model({"a": norm}), **options)


def test_values_that_are_no_models():
    message = "model is a LayerNorm; expected an nnx.Module.*linen"
    with pytest.raises(TypeError, match=message):
        jaxnorm.nnx.convert(nn.LayerNorm())
    with pytest.raises(TypeError, match="convert: model is a dict; expected an equinox"):
        jaxnorm.equinox.convert({"weight": 1.0})
    message = "converted: params is a list; expected a model's variables"
    with pytest.raises(TypeError, match=message), jaxnorm.linen.converted(params=[jnp.ones(3)]):
        pass


# ------------------------------------------------------------------------- each library: its models


class LinenModel(nn.Module):
    """A model of two scanned and rematerialised layers, with a norm at the end."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.RMSNorm(1e-3, name="after")(nn.Dense(16)(nn.LayerNorm()(x))), None

        block = nn.remat(Layer, prevent_cse=False)
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        x, _ = nn.scan(block, **options)(name="layers")(x, None)
        return nn.LayerNorm(scale_init=nn.initializers.normal(1.0))(nn.GroupNorm(4)(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.before = nnx.LayerNorm(16, rngs=rngs)
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.after = nnx.RMSNorm(16, epsilon=1e-3, rngs=rngs)

    def __call__(self, x):
        return x + self.after(self.linear(self.before(x)))


class NnxModel(nnx.Module):
    """A model with norms in every kind of attribute: stacked, in lists, in dicts, and so on."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def stacked(rngs):
            return Block(rngs)

        self.layers = nnx.List([Block(rngs)])
        self.heads = nnx.Dict(
            left=nnx.RMSNorm(16, rngs=rngs), grouped=nnx.GroupNorm(16, 4, rngs=rngs)
        )
        self.plain = nnx.data({"inner": [nnx.LayerNorm(16, use_bias=False, rngs=rngs)]})
        self.chain = nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.RMSNorm(16, rngs=rngs))
        self.shared = self.chain.layers[1]
        self.stacked = stacked(rngs)
        self.unused = nnx.MultiHeadAttention(2, 16, normalize_qk=True, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.stacked
        )
        x = self.heads["grouped"](self.heads["left"](x))
        return self.chain(x) + self.shared(self.plain["inner"][0](x))


class EqxModel(eqx.Module):
    """A model with a stack of equal layers, after which one norm is applied twice."""

    layers: list
    last: eqx.nn.LayerNorm

    def __init__(self, key):
        def layer(key):
            return [eqx.nn.RMSNorm(16), eqx.nn.Linear(16, 16, key=key)]

        self.layers = eqx.filter_vmap(layer)(jax.random.split(key, 2))
        self.last = eqx.nn.LayerNorm(16, 1e-3, use_bias=False)

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def step(x, arrays):
            norm, linear = eqx.combine(arrays, static)
            return x + jnp.tanh(jax.vmap(linear)(jax.vmap(norm)(x))), None

        return jax.vmap(self.last)(jax.lax.scan(step, x, arrays)[0])


def linen_model(options):
    model = LinenModel()
    variables = model.init(jax.random.key(0), normal((5, WIDTH)))

    def run(variables, x):
        if options is None:
            return model.apply(variables, x)
        with jaxnorm.linen.converted(**options):
            return model.apply(variables, x)

    return variables, run


def nnx_model(options):
    model = NnxModel(nnx.Rngs(0))
    model = model if options is None else jaxnorm.nnx.convert(model, **options)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return params, lambda params, x: nnx.merge(graph, params, rest)(x)


def eqx_model(options):
    model = EqxModel(jax.random.key(0))
    model = model if options is None else jaxnorm.equinox.convert(model, **options)
    arrays, static = eqx.partition(model, eqx.is_array)
    return arrays, lambda arrays, x: eqx.combine(arrays, static)(x)


@pytest.mark.parametrize(
    ("make", "norms"),
    [(linen_model, 4), (nnx_model, 9), (eqx_model, 2)],
    ids=["linen", "nnx", "equinox"],
)
def test_a_model_trains_as_before(make, norms, caplog):
    """A converted model with scanned layers has the same parameters, results and gradients."""
    (parameters, plain), (same, converted) = (make(options) for options in (None, {}))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(same), jax.tree.leaves(parameters))
    leaves, structure = jax.tree.flatten(parameters)
    leaves = [a + 0.3 * normal(a.shape, i) for i, a in enumerate(leaves)]
    x = normal((5, WIDTH))

    def results(run, structure):
        def loss(leaves, x):
            y = run(jax.tree.unflatten(structure, leaves), x)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))

    ours = results(converted, jax.tree.structure(same))
    theirs = results(plain, structure)
    exact = in_double(theirs, leaves, x)
    reference.assert_as_accurate(ours(leaves, x), theirs(leaves, x), exact)
    calls = str(jax.make_jaxpr(converted)(same, x))
    assert len(re.findall(r"jaxnorm\.(?:layer|rms)_norm", calls)) == norms
    assert not caplog.records


# ---------------------------------------------------------------------------------------- nnx alone


def norms_of(model):
    kinds = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm)
    return {p: node for p, node in nnx.iter_graph(model, graph=True) if isinstance(node, kinds)}


def test_every_norm_of_an_nnx_model_is_converted(caplog):
    model = NnxModel(nnx.Rngs(0))
    before = norms_of(model)
    paths, leaves = zip(*nnx.to_flat_state(nnx.state(model)))
    assert jaxnorm.nnx.convert(model, save="input", implementation="xla") is model
    after = norms_of(jaxnorm.nnx.convert(model))
    assert len(after) == 10
    assert before.keys() == after.keys()
    for path, norm in after.items():
        assert norm is before[path]
        assert type(norm).__module__ == "jaxnorm.nnx"
        assert (norm.save, norm.implementation, norm.scale_offset) == ("input", "xla", 0.0)
    assert after["layers", 0, "after"].epsilon == 1e-3
    assert model.shared is model.chain.layers[1]
    # Both models have the same variables at the same paths, so checkpoints load.
    new_paths, new_leaves = zip(*nnx.to_flat_state(nnx.state(model)))
    assert new_paths == paths
    assert all(a is b for a, b in zip(new_leaves, leaves))
    assert not caplog.records


def test_an_optimizer_may_be_made_before():
    """An optimizer that was created before the conversion still works.

    The optimizer refers to the parameters, and the conversion does not change them. Only the
    results of an earlier `nnx.split` become invalid.
    """
    x = normal((3, 5, 16))

    def trained(*, convert_first):
        model = Block(nnx.Rngs(0))
        graph, state = nnx.split(model)
        if convert_first:
            jaxnorm.nnx.convert(model)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        jaxnorm.nnx.convert(model)
        gradients = nnx.grad(lambda model: jnp.sum(jnp.sin(model(x))))(model)
        nnx.jit(nnx.Optimizer.update)(optimizer, model, gradients)
        assert isinstance(model.before, jaxnorm.nnx.LayerNorm)
        assert type(nnx.merge(graph, state).before) is nnx.LayerNorm
        return nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(optimizer))

    trees = trained(convert_first=True), trained(convert_first=False)
    jax.tree.map(np.testing.assert_array_equal, *trees)


# ------------------------------------------------------------------------------------ equinox alone


def test_where_norms_of_equinox_are_found(caplog):
    shared = eqx.nn.LayerNorm(4)
    model = {
        "a": [eqx.nn.Sequential([eqx.nn.RMSNorm(4), eqx.nn.Lambda(jnp.tanh)])],
        "b": (shared, shared),
        "c": jaxnorm.equinox.RMSNorm(4, save="input"),
        "d": eqx.filter_eval_shape(eqx.nn.LayerNorm, 4),
    }
    converted = jaxnorm.equinox.convert(model)
    assert type(converted["a"][0].layers[0]) is jaxnorm.equinox.RMSNorm
    assert converted["b"][0] is converted["b"][1]
    assert type(converted["b"][0]) is jaxnorm.equinox.LayerNorm
    assert converted["c"] is model["c"]
    assert isinstance(converted["d"].weight, jax.ShapeDtypeStruct)
    arrays, others = eqx.partition(model, eqx.is_array)
    halves = eqx.combine(jaxnorm.equinox.convert(arrays), jaxnorm.equinox.convert(others))
    assert jax.tree.structure(halves) == jax.tree.structure(converted)
    assert not caplog.records


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(8,), (8, 5), (8, 3, 4)])
def test_equinox_s_group_norm(shape, affine):
    norm = eqx.nn.GroupNorm(4, 8 if affine else None, channelwise_affine=affine)
    if affine:
        norm = jax.tree.map(lambda a: a + normal(a.shape, 1), norm)
    converted = jaxnorm.equinox.convert(norm)
    assert type(converted) is jaxnorm.equinox.GroupNorm
    assert all(a is b for a, b in zip(jax.tree.leaves(converted), jax.tree.leaves(norm)))
    x, d = normal((3, *shape)), normal((3, *shape), 2)

    def results(norm, x, d):
        def loss(norm, x):
            y = jax.vmap(norm)(x)
            return jnp.sum(y * d), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(norm, x)
        return jax.tree.leaves((y, gradients))

    ours, theirs = results(converted, x, d), results(norm, x, d)
    reference.assert_as_accurate(ours, theirs, in_double(results, norm, x, d))
    assert "jaxnorm.layer_norm" in str(jax.make_jaxpr(converted)(x[0]))
