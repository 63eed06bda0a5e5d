"""Conversion of existing nnx models with `jaxnorm.nnx.convert`."""

import convert_cases
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from convert_cases import each_norm, message_of, normal
from flax import nnx
from program_error import analyse, assert_analysed
from programs import kernels_in

import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.before = nnx.LayerNorm(16, rngs=rngs)
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.after = nnx.RMSNorm(16, epsilon=1e-3, rngs=rngs)

    def __call__(self, x):
        return x + self.after(self.linear(self.before(x)))


class Model(nnx.Module):
    """A model with norms in every kind of attribute: stacked, in lists, in dicts, and so on."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def stacked(rngs):
            return Block(rngs)

        self.layers = nnx.List([Block(rngs)])
        self.heads = nnx.Dict(left=nnx.RMSNorm(16, rngs=rngs))
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
        return self.chain(self.heads["left"](x)) + self.shared(self.plain["inner"][0](x))


def model_of_flax():
    return Model(nnx.Rngs(0))


def norms_of(model):
    kinds = (nnx.LayerNorm, nnx.RMSNorm)
    return {p: node for p, node in nnx.iter_graph(model, graph=True) if isinstance(node, kinds)}


def in_float64(model):
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda a: np.asarray(a, _double(a.dtype)), state))


def _double(dtype):
    return "float64" if dtype == "float32" else dtype


def test_every_norm_of_a_model_is_converted():
    model = model_of_flax()
    before = norms_of(model)
    paths, leaves = zip(*nnx.to_flat_state(nnx.state(model)))
    assert jaxnorm.nnx.convert(model, save="input", implementation="xla") is model
    after = norms_of(model)
    assert len(after) == 9
    assert before.keys() == after.keys()
    for path, norm in after.items():
        assert norm is before[path]
        assert type(norm).__module__ == "jaxnorm.nnx"
        assert (norm.save, norm.implementation, norm.scale_offset) == ("input", "xla", 0.0)
    assert after["layers", 0, "after"].epsilon == 1e-3
    assert model.shared is model.chain.layers[1]
    # A checkpoint of either model can be loaded into the other one, because both models have the
    # same variables at the same paths.
    new_paths, new_leaves = zip(*nnx.to_flat_state(nnx.state(model)))
    assert new_paths == paths
    assert all(a is b for a, b in zip(new_leaves, leaves))


def test_a_converted_model_trains_as_before():
    """Under nnx.jit, a converted model (with scanned layers) has the same results and gradients."""
    x = normal((3, 5, 16))
    model = model_of_flax()
    for i, norm in enumerate(norms_of(model).values()):
        norm.scale[...] += 0.3 * normal(norm.scale.shape, i)

    @nnx.jit
    def results(model, x):
        def loss(model, x):
            y = model(x)
            return jnp.sum(jnp.sin(y)), y

        gradients, y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(model, x)
        return jax.tree.map(jnp.asarray, nnx.to_pure_dict(gradients[0])), gradients[1], y

    theirs = results(model, x)
    with jax.enable_x64(True):
        expected = results(in_float64(model), np.asarray(x, "float64"))
    ours = results(jaxnorm.nnx.convert(model), x)
    reference.assert_as_accurate(ours, theirs, expected)


def test_an_optimizer_may_be_made_before():
    """An optimizer that was created before the conversion still works.

    The optimizer refers to the parameters, and the conversion does not change them. Only the
    results of an earlier `nnx.split` become invalid.
    """
    optax = pytest.importorskip("optax")
    x = normal((3, 5, 16))

    @nnx.jit
    def step(model, optimizer):
        gradients = nnx.grad(lambda model: jnp.sum(jnp.sin(model(x))))(model)
        optimizer.update(model, gradients)

    def trained(*, convert_first):
        model = Block(nnx.Rngs(0))
        if convert_first:
            jaxnorm.nnx.convert(model)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        jaxnorm.nnx.convert(model)
        for _ in range(2):
            step(model, optimizer)
        assert isinstance(model.before, jaxnorm.nnx.LayerNorm)
        return nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(optimizer))

    trees = trained(convert_first=True), trained(convert_first=False)
    jax.tree.map(np.testing.assert_array_equal, *trees)
    model = Block(nnx.Rngs(0))
    graph, state = nnx.split(model)
    jaxnorm.nnx.convert(model)
    assert type(nnx.merge(graph, state).before) is nnx.LayerNorm


@each_norm
def test_a_bare_nnx_norm(name):
    x, d = normal((6, 16)), normal((6, 16), 1)
    theirs = getattr(nnx, name)(16, rngs=nnx.Rngs(0))
    theirs.scale[...] = normal(16, 2)
    scale = theirs.scale
    norm = jaxnorm.nnx.convert(theirs)
    assert type(norm) is getattr(jaxnorm.nnx, name)
    assert norm.scale is scale
    constructed = getattr(jaxnorm.nnx, name)(16, rngs=nnx.Rngs(0))
    assert nnx.graphdef(norm) == nnx.graphdef(constructed)

    def loss(norm, x):
        return jnp.sum(norm(x) * d)

    gradients, dx = nnx.grad(loss, argnums=(0, 1))(norm, x)
    parameters, gradients = (nnx.to_pure_dict(s) for s in (nnx.state(norm), gradients))
    convert_cases.assert_norm_within_bounds(name, 1e-6, x, d, parameters, norm(x), dx, gradients)


def test_state_of_the_model_before_loads():
    trained, model = (model_of_flax() for _ in range(2))
    trained.heads["left"].scale[...] = normal(16)
    stored = nnx.to_pure_dict(nnx.state(trained))
    jaxnorm.nnx.convert(model)
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, stored)
    nnx.update(model, state)
    np.testing.assert_array_equal(model.heads["left"].scale[...], normal(16))


def test_norms_that_are_left_are_named_in_one_line(caplog):
    class Scaled(nnx.RMSNorm):
        def __call__(self, x):
            return 2 * super().__call__(x)

    rngs = nnx.Rngs(0)
    own = jaxnorm.nnx.RMSNorm(16, save="input", rngs=rngs)
    model = nnx.Dict(
        taken=nnx.LayerNorm(16, rngs=rngs),
        scaled=Scaled(16, rngs=rngs),
        synchronised=nnx.LayerNorm(16, axis_name="batch", rngs=rngs),
        instance=nnx.LayerNorm(16, reduction_axes=(1, 2), rngs=rngs),
        whole=nnx.RMSNorm(16, dtype=jnp.complex64, rngs=rngs),
        own=own,
    )
    kinds = {key: type(norm) for key, norm in model.items()}
    jaxnorm.nnx.convert(model)
    assert type(model["taken"]) is jaxnorm.nnx.LayerNorm
    for key, norm in model.items():
        if key != "taken":
            assert type(norm) is kinds[key]
    assert own.save == "input"
    norms = [
        "scaled (Scaled is a subclass of Flax's RMSNorm, with code of its own)",
        "synchronised (axis_name='batch')",
        "instance (feature_axes=-1 are not reduction_axes=(1, 2))",
        "whole (dtypes complex64, float32)",
    ]
    convert_cases.assert_left_to_flax(caplog, "jaxnorm.nnx.convert: 4 of 5", norms)


def test_nothing_is_logged_where_all_is_converted(caplog):
    jaxnorm.nnx.convert(jaxnorm.nnx.convert(model_of_flax()))
    assert not caplog.records


def test_a_model_without_such_norms_is_told(caplog):
    jaxnorm.nnx.convert(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    assert "Linear has no nnx.LayerNorm, RMSNorm or GroupNorm" in message_of(caplog)


def lost(norm):
    """Change two columns of the norm's parameters in place, and return the norm.

    In these columns, x cannot be recovered from the norm's output.
    """
    for name, value in convert_cases.with_lost_columns({"scale": norm.scale[...]}).items():
        if getattr(norm, name, None) is not None:
            getattr(norm, name)[...] = value
    return norm


def test_norms_whose_output_lacks_columns_keep_their_input(caplog):
    rngs = nnx.Rngs(0)

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stacked(rngs):
        return nnx.LayerNorm(16, rngs=rngs)

    options = {"use_bias": False, "rngs": rngs}
    model = nnx.Dict(
        good=nnx.LayerNorm(16, rngs=rngs),
        lost=lost(nnx.LayerNorm(16, rngs=rngs)),
        unbiased=lost(nnx.LayerNorm(16, **options)),
        half=lost(nnx.LayerNorm(16, dtype=jnp.float16, **options)),
        rms=lost(nnx.RMSNorm(16, rngs=rngs, param_dtype=jnp.float16)),
        stacked=lost(stacked(rngs)),
        unscaled=nnx.LayerNorm(16, use_scale=False, rngs=rngs),
    )
    jaxnorm.nnx.convert(model)
    kept = {name for name, norm in model.items() if norm.save == "input"}
    assert kept == {"lost", "half", "rms", "stacked"}
    assert message_of(caplog) == (
        'jaxnorm.nnx.convert: 4 of 7 norms keep their input, as with save="input": '
        "half (scales too small for float16 in 2 of 16 columns); "
        "lost (scales of 0, or far below the bias, in 2 of 16 columns); "
        "rms (scales too small for float16 in 2 of 16 columns); "
        "stacked (scales of 0, or far below the bias, in 6 of 48 columns)"
    )


def test_what_is_left_and_what_keeps_its_input_are_one_line(caplog):
    model = [
        lost(nnx.LayerNorm(16, rngs=nnx.Rngs(0))),
        nnx.LayerNorm(16, axis_name="batch", rngs=nnx.Rngs(0)),
    ]
    jaxnorm.nnx.convert(model)
    assert message_of(caplog) == (
        "jaxnorm.nnx.convert: 1 of 2 norms are left to Flax: 1 (axis_name='batch'). 1 of 2 norms "
        'keep their input, as with save="input": 0 (scales of 0, or far below the bias, in 2 of 16 '
        "columns)"
    )


def test_a_norm_that_keeps_its_input_has_every_gradient():
    """If a norm has a bias and some of its scales are 0, the converted norm saves its input.

    The gradients of these scales are then correct. If the norm saved its output, these gradients
    would be 0, and the scales could not be trained.
    """
    x, d = normal((6, 16)), normal((6, 16), 1)

    def loss(norm):
        return jnp.sum(norm(x) * d)

    norm = lost(nnx.LayerNorm(16, rngs=nnx.Rngs(0)))
    theirs = analyse(lambda: nnx.grad(loss)(nnx.clone(norm)).scale[...])
    forced = jaxnorm.nnx.LayerNorm(16, rngs=nnx.Rngs(0))
    nnx.update(forced, nnx.state(norm))
    assert nnx.grad(loss)(forced).scale[1] == 0
    converted = jaxnorm.nnx.convert(norm)

    def ours():
        return nnx.grad(loss)(nnx.clone(converted)).scale[...]

    assert_analysed(ours(), theirs, analyse(ours))


def test_parameters_without_values_are_not_looked_at(caplog):
    norm = nnx.eval_shape(lambda: nnx.LayerNorm(16, rngs=nnx.Rngs(0)))
    assert jaxnorm.nnx.convert(norm).save == "output"

    saved = []

    @jax.jit
    def traced(state):
        norm = nnx.merge(graph, state)
        saved.append(jaxnorm.nnx.convert(norm).save)

    graph, state = nnx.split(lost(nnx.LayerNorm(16, rngs=nnx.Rngs(0))))
    traced(state)
    assert saved == ["output"]
    assert not caplog.records


def test_input_of_all_norms_asks_no_parameters(caplog):
    jaxnorm.nnx.convert(lost(nnx.LayerNorm(16, rngs=nnx.Rngs(0))), save="input")
    assert not caplog.records


def test_models_in_containers():
    pair = (nnx.LayerNorm(4, rngs=nnx.Rngs(0)), {"b": nnx.RMSNorm(4, rngs=nnx.Rngs(0))})
    jaxnorm.nnx.convert(pair)
    assert type(pair[0]) is jaxnorm.nnx.LayerNorm
    assert type(pair[1]["b"]) is jaxnorm.nnx.RMSNorm


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (nn.LayerNorm(), {}, TypeError, "model is a LayerNorm; expected an nnx.Module.*linen"),
        (nnx.Dict(), {"save": "both"}, ValueError, "convert: save='both'; expected one of"),
        (nnx.Dict(), {"implementation": "cudnn"}, ValueError, "convert: implementation='cudnn'"),
    ],
)
def test_errors_of_convert(model, options, error, message):
    with pytest.raises(error, match=message):
        jaxnorm.nnx.convert(model, **options)


def test_kernels_of_a_converted_nnx_model():
    """A converted model runs kernels.

    The model is traced with abstract arrays, which take no memory. So it can be large enough for
    kernels to be the default.
    """

    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.layer, self.rms = nnx.LayerNorm(4096, rngs=rngs), nnx.RMSNorm(4096, rngs=rngs)

        def __call__(self, x):
            return self.rms(self.layer(x))

    def programs(model):
        graph, state = nnx.split(model)

        def loss(state, x):
            return jnp.sum(nnx.merge(graph, state)(x))

        return kernels_in(
            jax.grad(loss, (0, 1)), state, jax.ShapeDtypeStruct((1024, 4096), "float32")
        )

    model = nnx.eval_shape(lambda: Wide(nnx.Rngs(0)))
    assert programs(model) == 0
    assert programs(jaxnorm.nnx.convert(model)) == 4
