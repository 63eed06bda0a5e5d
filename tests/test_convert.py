"""Models that exist: jaxnorm.nnx.convert and jaxnorm.linen.converted."""

import functools
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx

import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

each_norm = pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def kernels_in(function, *arguments):
    """How many kernels a program for CUDA has."""
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu")


def assert_norm_within_bounds(name, epsilon, x, d, parameters, y, dx, dparameters, saved="output"):
    """Values and gradients of one norm against float64."""
    expected = reference.Norm(
        *(reference.exact(a) for a in (x, parameters["scale"])),
        reference.exact(parameters.get("bias", jnp.zeros(x.shape[-1]))),
        reference.exact(d),
        subtract_mean=name == "LayerNorm",
        epsilon=epsilon,
        saved=saved,
        x_dtype="float32",
        y_dtype="float32",
    )
    of_dx, of_dscale, of_dbias = expected.gradient_bounds()
    reference.assert_within(y, expected.y, expected.y_bound())
    reference.assert_within(dx, expected.dx, of_dx)
    reference.assert_within(dparameters["scale"], expected.dscale, of_dscale)
    if "bias" in parameters:
        reference.assert_within(dparameters["bias"], expected.dbias, of_dbias)


# --- nnx -----------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.before = nnx.LayerNorm(16, rngs=rngs)
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.after = nnx.RMSNorm(16, epsilon=1e-3, rngs=rngs)

    def __call__(self, x):
        return x + self.after(self.linear(self.before(x)))


class Model(nnx.Module):
    """Norms in every kind of place that nnx has."""

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
    # A checkpoint of either is one of the other: the same variables, at the same paths.
    new_paths, new_leaves = zip(*nnx.to_flat_state(nnx.state(model)))
    assert new_paths == paths
    assert all(a is b for a, b in zip(new_leaves, leaves))


def test_a_converted_model_trains_as_before():
    """Under nnx.jit and nnx.grad; scanned layers too."""
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
    assert_norm_within_bounds(name, 1e-6, x, d, parameters, norm(x), dx, gradients)


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
        pass

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
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("jaxnorm", logging.WARNING)
    line = record.getMessage()
    assert line.startswith("jaxnorm.nnx.convert: 4 of 5 norms are left to Flax: ")
    for part in (
        "scaled (Scaled is a subclass of Flax's RMSNorm, with code of its own)",
        "synchronised (axis_name='batch')",
        "instance (feature_axes=-1 are not reduction_axes=(1, 2))",
        "whole (dtypes complex64, float32)",
    ):
        assert part in line


def test_nothing_is_logged_where_all_is_converted(caplog):
    jaxnorm.nnx.convert(jaxnorm.nnx.convert(model_of_flax()))
    assert not caplog.records


def test_a_model_without_such_norms_is_told(caplog):
    jaxnorm.nnx.convert(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    (record,) = caplog.records
    assert "Linear has no nnx.LayerNorm and no nnx.RMSNorm" in record.getMessage()


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
    """Of an abstract model, so that it may be of a size for which the default is a kernel."""

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


# --- linen ---------------------------------------------------------------------------------------


class LinenModel(nn.Module):
    """Two scanned and rematerialised layers, and a norm at the end."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + nn.RMSNorm(name="after")(nn.Dense(16)(nn.LayerNorm()(x))), None

        block = nn.remat(Layer, prevent_cse=False)
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        x, _ = nn.scan(block, **options)(name="layers")(x, None)
        return nn.LayerNorm(scale_init=nn.initializers.normal(1.0))(x)


def linen_results(model, variables, x):
    def loss(variables, x):
        y = model.apply(variables, x)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, x)


def test_a_converted_linen_model(caplog):
    model, x = LinenModel(), normal((3, 5, 16))
    variables = model.init(jax.random.key(0), x)
    theirs = linen_results(model, variables, x)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: np.asarray(a, "float64"), (variables, x))
        expected = linen_results(model, *double)
    with jaxnorm.linen.converted():
        made = model.init(jax.random.key(0), x)
        ours = linen_results(model, variables, x)
        calls = str(jax.make_jaxpr(model.apply)(variables, x)).count("jaxnorm.")
    assert calls == 3
    assert jax.tree.structure(made) == jax.tree.structure(variables)
    jax.tree.map(np.testing.assert_array_equal, made, variables)
    reference.assert_as_accurate(ours, theirs, expected)
    assert not caplog.records


@each_norm
@pytest.mark.parametrize("save", ["output", "input"])
def test_a_linen_norm_within_converted(name, save):
    x, d = normal((6, 16)), normal((6, 16), 1)
    module = getattr(nn, name)(scale_init=nn.initializers.normal(1.0))
    with jaxnorm.linen.converted(save=save, implementation="xla"):
        variables = module.init(jax.random.key(0), x)
        y, vjp = jax.vjp(module.apply, variables, x)
        gradients, dx = vjp(d)
    jax.tree.map(np.testing.assert_array_equal, variables, module.init(jax.random.key(0), x))
    parameters, gradients = variables["params"], gradients["params"]
    assert_norm_within_bounds(name, 1e-6, x, d, parameters, y, dx, gradients, save)


def test_compiled_functions_are_traced_for_inside_and_for_outside():
    model, x = nn.RMSNorm(), normal((4, 16))
    variables = model.init(jax.random.key(0), x)
    apply = jax.jit(model.apply)

    def is_converted():
        return "jaxnorm" in apply.lower(variables, x).as_text(debug_info=True)

    apply(variables, x)
    assert not is_converted()
    with jaxnorm.linen.converted():
        apply(variables, x)
        assert is_converted()
    assert not is_converted()


def test_of_nested_contexts_the_innermost_counts():
    model, x = nn.RMSNorm(use_scale=False), normal((4, 16))

    def program():
        return str(jax.make_jaxpr(functools.partial(model.apply, {}))(x))

    with jaxnorm.linen.converted(save="input"):
        with jaxnorm.linen.converted(save="output"):
            assert "save=output" in program()
        assert "save=input" in program()


def test_intermediates_are_those_of_flax():
    model, x = nn.Sequential([nn.RMSNorm(), nn.LayerNorm()]), normal((3, 5, 16))
    apply = functools.partial(model.init_with_output, jax.random.key(0), x)
    theirs = apply(capture_intermediates=True)
    with jaxnorm.linen.converted():
        ours = apply(capture_intermediates=True)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


def test_calls_that_are_left_are_named_in_one_line(caplog):
    class Scaled(nn.RMSNorm):
        pass

    class Several(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm(name="taken")(x)
            x = jaxnorm.linen.RMSNorm(name="own", save="input")(x)
            x = Scaled(name="scaled")(x)
            x = nn.LayerNorm(name="masked")(x, mask=x > -9)
            x = nn.RMSNorm(name="instance", reduction_axes=(0, 1))(x)
            x = nn.RMSNorm(name="half", force_float32_reductions=False)(x)
            return nn.LayerNorm(name="complex", dtype=jnp.complex64)(x)

    x = normal((4, 16))
    with jaxnorm.linen.converted():
        y, variables = Several().init_with_output(jax.random.key(0), x)
    np.testing.assert_allclose(y, Several().apply(variables, x), rtol=1e-4, atol=1e-5)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("jaxnorm", logging.WARNING)
    line = record.getMessage()
    assert line.startswith("jaxnorm.linen.converted: 5 of 6 norms are left to Flax: ")
    for part in (
        "scaled (Scaled is a subclass of Flax's RMSNorm, with code of its own)",
        "masked (a mask)",
        "instance (feature_axes=-1 are not reduction_axes=(0, 1))",
        "half (force_float32_reductions=False)",
        "complex (dtypes float32, float32, complex64)",
    ):
        assert part in line


def test_a_norm_with_a_named_axis_is_left(caplog):
    model, x = nn.LayerNorm(axis_name="batch"), normal((4, 16))

    def init(x):
        return model.init_with_output(jax.random.key(0), x)

    mapped = jax.vmap(init, axis_name="batch")
    with jaxnorm.linen.converted():
        ours = mapped(x)
    jax.tree.map(np.testing.assert_array_equal, ours, mapped(x))
    (record,) = caplog.records
    assert "the module itself (axis_name='batch')" in record.getMessage()


@pytest.mark.parametrize("options", [{"save": "both"}, {"implementation": "cudnn"}])
def test_errors_of_converted(options):
    ((name, value),) = options.items()
    with (
        pytest.raises(ValueError, match=f"converted: {name}='{value}'; expected one of"),
        jaxnorm.linen.converted(**options),
    ):
        pass


def test_kernels_of_a_linen_model():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.RMSNorm()(nn.LayerNorm()(x))

    x = jax.ShapeDtypeStruct((1024, 4096), "float32")
    variables = jax.eval_shape(Wide().init, jax.random.key(0), x)

    def loss(variables, x):
        return jnp.sum(Wide().apply(variables, x))

    gradient = jax.grad(loss, (0, 1))
    assert kernels_in(gradient, variables, x) == 0
    with jaxnorm.linen.converted():
        assert kernels_in(gradient, variables, x) == 4
