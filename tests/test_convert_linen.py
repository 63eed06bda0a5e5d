"""Conversion of existing linen models with `jaxnorm.linen.converted`."""

import functools
import gc
import math
import re
import weakref

import convert_cases
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from convert_cases import each_norm, message_of, normal
from programs import kernels_in
from reference import SAFETY, unit_roundoff

import jaxnorm.linen

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


class LinenModel(nn.Module):
    """A model of two scanned and rematerialised layers, with a norm at the end."""

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
    convert_cases.assert_norm_within_bounds(name, 1e-6, x, d, parameters, y, dx, gradients, save)


def test_compiled_functions_are_traced_for_inside_and_for_outside():
    model, x = nn.RMSNorm(), normal((4, 16))
    variables = model.init(jax.random.key(0), x)
    apply = jax.jit(model.apply)

    def is_converted():
        return "jaxnorm.rms_norm" in apply.lower(variables, x).as_text(debug_info=True)

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
        def __call__(self, x):
            return 2 * super().__call__(x)

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
    size = float(jnp.abs(y).max())
    # Flax's model has six norms, each of which sums over 16 or 64 elements. The bound is the sum of
    # their rounding errors. y is complex, because the last norm has the dtype complex64.
    error = 6 * SAFETY * unit_roundoff("float32") * (math.sqrt(64) + 8) * size
    assert np.abs(y - Several().apply(variables, x)).max() <= error
    norms = [
        "scaled (Scaled is a subclass of Flax's RMSNorm, with code of its own)",
        "masked (a mask)",
        "instance (feature_axes=-1 are not reduction_axes=(0, 1))",
        "half (force_float32_reductions=False)",
        "complex (dtypes float32, float32, complex64)",
    ]
    convert_cases.assert_left_to_flax(caplog, "jaxnorm.linen.converted: 5 of 6", norms)


def test_a_norm_with_a_named_axis_is_left(caplog):
    model, x = nn.LayerNorm(axis_name="batch"), normal((4, 16))

    def init(x):
        return model.init_with_output(jax.random.key(0), x)

    mapped = jax.vmap(init, axis_name="batch")
    with jaxnorm.linen.converted():
        ours = mapped(x)
    jax.tree.map(np.testing.assert_array_equal, ours, mapped(x))
    assert "the module itself (axis_name='batch')" in message_of(caplog)


def lost(variables, *path):
    """Return variables in which one norm has two columns whose scales are 0 or far below the bias.

    In these columns, the norm's input cannot be recovered from its output. `path` has the keys that
    lead to the norm's parameters.
    """
    if not path:
        return convert_cases.with_lost_columns(variables)
    name, *rest = path
    return variables | {name: lost(variables[name], *rest)}


REASON = "(scales of 0, or far below the bias, in 2 of 16 columns)"
KEPT = 'norms keep their input, as with save="input": '


def saves(function, *arguments):
    """Return the ``save`` options of a function's norms, in program order."""
    return re.findall(r"save=(\w+)", str(jax.make_jaxpr(function)(*arguments)))


class TwoNorms(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(name="second")(nn.LayerNorm(name="first")(x))


def test_norms_whose_output_lacks_columns_keep_their_input(caplog):
    """Outside of `jax.jit`, a norm saves its input if x cannot be recovered from its output.

    This also holds under jax.grad, and for parameters that the model closes over. In all these
    cases, the values of the parameters are known.
    """
    model, x = TwoNorms(), normal((6, 16))
    variables = lost(model.init(jax.random.key(0), x), "params", "first")

    def loss(variables):
        return jnp.sum(jnp.sin(model.apply(variables, x)))

    theirs = jax.grad(loss)(variables)
    with jaxnorm.linen.converted():
        ours = jax.grad(loss)(variables)
    reference.assert_as_accurate(ours, theirs, in_double(jax.grad(loss), variables))
    assert message_of(caplog) == f"jaxnorm.linen.converted: 1 of 2 {KEPT}first {REASON}"
    assert ours["params"]["first"]["scale"][1] != 0
    with jaxnorm.linen.converted():
        assert saves(functools.partial(model.apply, variables), x) == ["input", "output"]
        assert saves(lambda v, x: model.apply(v, x), variables, x) == ["output"] * 2
    with jaxnorm.linen.converted(save="input"):
        assert saves(functools.partial(model.apply, variables), x) == ["input"] * 2


def in_double(function, *arguments):
    with jax.enable_x64(True):
        return function(*jax.tree.map(lambda a: np.asarray(a, "float64"), arguments))


@pytest.mark.parametrize("given", ["variables", "params", "boxed"])
def test_of_parameters_that_are_traced_others_are_looked_at(given, caplog):
    """The argument `params=` tells `converted` the values of the parameters.

    `converted` needs the values to decide which norms must save their input. In scanned or compiled
    layers, the model's own parameters are tracers, which have no values.
    """
    model, x = LinenModel(), normal((3, 5, 16))
    variables = model.init(jax.random.key(0), x)
    variables = lost(variables, "params", "layers", "LayerNorm_0")
    params = variables if given == "variables" else variables["params"]
    if given == "boxed":
        params = jax.tree.map(lambda a: nn.Partitioned(a, (None,) * a.ndim), params)
    apply = jax.jit(model.apply)

    def programs():
        return re.findall(r"save=(\w+)", str(apply.trace(variables, x).jaxpr))

    with jaxnorm.linen.converted(params=params):
        assert programs() == ["input", "output", "output"]
    of_two = REASON.replace("2 of 16", "4 of 32")
    message = f"jaxnorm.linen.converted: 1 of 3 {KEPT}layers/LayerNorm_0 {of_two}"
    assert message_of(caplog) == message
    # JAX traces the model again only if the set of norms that save their input has changed.
    with jaxnorm.linen.converted():
        assert programs() == ["output"] * 3
    with jaxnorm.linen.converted(params=jax.tree.map(jnp.copy, params)):
        assert programs() == ["input", "output", "output"]
    assert len(caplog.records) == 1


def test_norms_that_params_lack_are_named(caplog):
    model, x = TwoNorms(), normal((6, 16))
    variables = model.init(jax.random.key(0), x)
    params = {"first": variables["params"]["first"]}
    with jaxnorm.linen.converted(params=params):
        jax.eval_shape(model.apply, variables, x)
    assert message_of(caplog) == (
        "jaxnorm.linen.converted: 1 of 2 norms were not looked at: second (params has no such norm)"
    )


def test_where_nothing_is_converted_it_says_so(caplog):
    model, x = nn.Sequential([nn.Dense(4), nn.BatchNorm(True)]), normal((6, 16))
    with jaxnorm.linen.converted():
        model.init(jax.random.key(0), x)
    assert message_of(caplog).startswith(
        "jaxnorm.linen.converted: no linen.LayerNorm, RMSNorm or GroupNorm was called inside it, "
        "only BatchNorm, Dense, Sequential; norms of other classes can call jaxnorm.layer_norm"
    )


def test_calls_of_what_is_compiled_are_no_reason_to_say_so(caplog):
    model, x = TwoNorms(), normal((6, 16))
    variables = model.init(jax.random.key(0), x)
    apply = jax.jit(model.apply)
    for _ in range(2):
        with jaxnorm.linen.converted():
            apply(variables, x)
    with jaxnorm.linen.converted(save="input"), jaxnorm.linen.converted():
        apply(variables, x)
    with jaxnorm.linen.converted(), jaxnorm.linen.converted():
        assert saves(lambda v, x: TwoNorms().apply(v, x), variables, x) == ["output"] * 2
    own = jaxnorm.linen.RMSNorm()
    with jaxnorm.linen.converted(implementation="xla"):
        own.init(jax.random.key(0), x)
    assert not caplog.records


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("w", nn.initializers.ones, (x.shape[-1],))


@pytest.mark.parametrize("has_closure", [True, False])
def test_functions_of_calls_that_are_made_in_each_step(has_closure):
    """Functions with the same code and data are one function: `jax.jit` traces only once.

    The functions are not kept in memory either.
    """
    x, traced, factor = normal((6, 16)), [], 2.0
    variables = Scale().init(jax.random.key(0), x)

    @jax.jit
    def apply(variables, x):
        traced.append(1)
        return Scale().apply(variables, x)

    made = []

    def step(factor):
        of_closure, alone = (lambda norm, x: factor * x), (lambda norm, x: 2.0 * x)
        function = of_closure if has_closure else alone
        made.append(weakref.ref(function))
        with jaxnorm.linen.converted(calls={Scale: function}):
            return apply(variables, x)

    for _ in range(4):
        np.testing.assert_array_equal(step(factor), 2 * x)
    gc.collect()
    assert len(traced) == 1
    assert sum(one() is not None for one in made) <= 1
    if has_closure:
        np.testing.assert_array_equal(step(3.0), 3 * x)


@pytest.mark.parametrize("options", [{"save": "both"}, {"implementation": "cudnn"}])
def test_errors_of_converted(options):
    ((name, value),) = options.items()
    with (
        pytest.raises(ValueError, match=f"converted: {name}='{value}'; expected one of"),
        jaxnorm.linen.converted(**options),
    ):
        pass


def test_params_that_are_no_tree_of_names():
    with (
        pytest.raises(TypeError, match="converted: params is a list; expected a model's variables"),
        jaxnorm.linen.converted(params=[jnp.ones(3)]),
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
