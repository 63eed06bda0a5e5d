"""``calls=``, with which the three `convert` functions convert custom norm classes."""

import logging
import pickle

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from convert_cases import message_of, normal
from flax import nnx

import jaxnorm.equinox
import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

WIDTH = 16


def plain(x, w):
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * w


# -------------------------------------------------------- one model for each supported library


class NnxNorm(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x, *, double=False):
        return plain(x, self.w[...]) * (2 if double else 1)


class NnxSubclass(NnxNorm):
    pass


def of_nnx(norm, x, **options):
    return jaxnorm.rms_norm(x, norm.w[...])


def nnx_model():
    rngs = nnx.Rngs(0)
    return nnx.Dict(a=NnxNorm(rngs), b=NnxSubclass(rngs), c=nnx.RMSNorm(WIDTH, rngs=rngs))


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return plain(x, self.param("w", nn.initializers.ones, (WIDTH,)))


class LinenSubclass(LinenNorm):
    pass


def of_linen(norm, x):
    return jaxnorm.rms_norm(x, norm.param("w", nn.initializers.ones, (WIDTH,)))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RMSNorm(name="c")(LinenSubclass(name="b")(LinenNorm(name="a")(x)))


class EqxNorm(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return plain(x, self.w)


class EqxSubclass(EqxNorm):
    pass


class EqxBlock(eqx.Module):
    """A module that contains a norm.

    A test passes functions in `calls=` for both classes: for this one, and for the norm's class.
    """

    norm: EqxNorm

    def __call__(self, x):
        return self.norm(x)


def of_equinox(norm, x):
    return jaxnorm.rms_norm(x, norm.w)


def equinox_model():
    w = jnp.ones(WIDTH)
    return {"a": EqxNorm(w), "b": EqxSubclass(w), "c": eqx.nn.RMSNorm(WIDTH)}


def assert_as_accurate(ours, theirs, x, times=1):
    """Assert that our result is as accurate as plain JAX's result `theirs`.

    Each result is x after a chain of norms. `times` is the number of norms; their scales are 1.
    """
    with jax.enable_x64(True):
        expected = jnp.asarray(np.asarray(x, "float64"))
        for _ in range(times):
            expected = plain(expected, jnp.ones(WIDTH, "float64"))
    reference.assert_as_accurate(ours, theirs, expected)


def assert_told(caplog, function, kind, subclass):
    """Assert that one warning names the module of class `kind` and the module of its subclass."""
    assert message_of(caplog) == (
        f"jaxnorm.{function}: 1 modules call functions of calls: a ({kind}). 1 modules are left as "
        f"they are: b ({subclass} is a subclass of {kind}, which calls has)"
    )


def norms_in(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("jaxnorm.rms_norm")


# ------------------------------------------------------------------------- results of conversions


def test_nnx(caplog):
    model, x = nnx_model(), normal((4, WIDTH))
    before = {key: node(x) for key, node in model.items()}
    parameter, optimised = model["a"].w, nnx.state(model)
    assert jaxnorm.nnx.convert(model, calls={NnxNorm: of_nnx}) is model
    assert isinstance(model["a"], NnxNorm)
    assert model["a"].w is parameter
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(optimised)
    assert [norms_in(model[key], x) for key in "abc"] == [1, 0, 1]
    for key, node in model.items():
        assert_as_accurate(node(x), before[key], x)
    assert_told(caplog, "nnx.convert", "NnxNorm", "NnxSubclass")


def test_linen(caplog):
    model, x = LinenModel(), normal((4, WIDTH))
    y, variables = model.init_with_output(jax.random.key(0), x)
    calls = {LinenNorm: of_linen}
    with jaxnorm.linen.converted(calls=calls):
        ours, same = model.init_with_output(jax.random.key(0), x)
        assert norms_in(model.apply, variables, x) == 2
    assert_as_accurate(ours, y, x, times=3)
    assert jax.tree.structure(same) == jax.tree.structure(variables)
    assert_told(caplog, "linen.converted", "LinenNorm", "LinenSubclass")
    assert norms_in(model.apply, variables, x) == 0


def test_equinox(caplog):
    model, x = equinox_model(), normal((WIDTH,))
    converted = jaxnorm.equinox.convert(model, calls={EqxNorm: of_equinox})
    assert isinstance(converted["a"], EqxNorm)
    assert converted["a"].w is model["a"].w
    paths, others = (jax.tree_util.tree_leaves_with_path(m) for m in (converted, model))
    assert [path for path, _ in paths] == [path for path, _ in others]
    assert [norms_in(converted[key], x) for key in "abc"] == [1, 0, 1]
    assert norms_in(model["a"], x) == 0
    for key, node in converted.items():
        assert_as_accurate(node(x), model[key](x), x)
    assert_told(caplog, "equinox.convert", "EqxNorm", "EqxSubclass")


def test_equinox_modules_inside_modules():
    shared = EqxNorm(jnp.ones(WIDTH))
    model = [EqxBlock(shared), shared]
    calls = {EqxNorm: of_equinox, EqxBlock: lambda block, x: EqxBlock.__call__(block, 2 * x)}
    converted = jaxnorm.equinox.convert(model, calls=calls)
    assert converted[0].norm is converted[1]
    y = converted[0](normal((WIDTH,)))
    np.testing.assert_array_equal(y, jaxnorm.rms_norm(2 * normal((WIDTH,)), shared.w))
    assert norms_in(converted[0], jnp.ones(WIDTH)) == 1
    assert jax.tree.structure(jaxnorm.equinox.convert(model, calls=calls)) == jax.tree.structure(
        converted
    )


def test_a_function_may_call_the_class_s_own_code():
    x = normal((4, WIDTH))
    model = nnx_model()
    y = model["a"](x)
    jaxnorm.nnx.convert(
        model, calls={NnxNorm: lambda norm, x: NnxNorm.__call__(norm, x, double=True)}
    )
    np.testing.assert_array_equal(model["a"](x), 2 * y)
    model = LinenModel()
    y, variables = model.init_with_output(jax.random.key(0), x)
    with jaxnorm.linen.converted(calls={LinenNorm: lambda norm, x: LinenNorm.__call__(norm, -x)}):
        np.testing.assert_array_equal(model.apply(variables, x), -y)


def test_calls_come_before_the_conversions():
    x = normal((4, WIDTH))
    double = {kind: lambda norm, x: 2 * x for kind in (nnx.RMSNorm, nn.RMSNorm, eqx.nn.RMSNorm)}
    model = jaxnorm.nnx.convert(nnx_model(), calls={nnx.RMSNorm: double[nnx.RMSNorm]})
    np.testing.assert_array_equal(model["c"](x), 2 * x)
    with jaxnorm.linen.converted(calls={nn.RMSNorm: double[nn.RMSNorm]}):
        np.testing.assert_array_equal(nn.RMSNorm().apply({}, x), 2 * x)
    model = jaxnorm.equinox.convert(equinox_model(), calls={eqx.nn.RMSNorm: double[eqx.nn.RMSNorm]})
    np.testing.assert_array_equal(model["c"](x), 2 * x)


def test_a_subclass_of_an_equinox_norm_that_calls_has(caplog):
    """The subclass is not changed, although ``convert`` would convert it without ``calls=``."""

    class Own(eqx.nn.RMSNorm):
        pass

    model = {"a": eqx.nn.RMSNorm(WIDTH), "b": Own(WIDTH)}
    assert type(jaxnorm.equinox.convert(model)["b"]) is jaxnorm.equinox.RMSNorm
    converted = jaxnorm.equinox.convert(model, calls={eqx.nn.RMSNorm: lambda norm, x: 2 * x})
    assert converted["b"] is model["b"]
    x = normal((WIDTH,))
    np.testing.assert_array_equal(converted["a"](x), 2 * x)
    assert_told(caplog, "equinox.convert", "RMSNorm", "Own")


def test_other_calls_are_other_traces():
    x = jnp.ones((4, WIDTH))
    model = LinenModel()
    variables = model.init(jax.random.key(0), x)
    apply = jax.jit(model.apply)
    results = []
    for factor in (2.0, 4.0):
        with jaxnorm.linen.converted(calls={nn.RMSNorm: lambda norm, x, f=factor: f * x}):
            results.append(apply(variables, x))
    np.testing.assert_array_equal(2 * results[0], results[1])
    called = nnx.jit(lambda model, x: model["a"](x))
    for factor in (2.0, 3.0):
        model = jaxnorm.nnx.convert(nnx_model(), calls={NnxNorm: lambda n, x, f=factor: f * x})
        np.testing.assert_array_equal(called(model, x), factor * x)


def test_converted_again(caplog):
    """A model may be converted twice. It then calls the functions of the second conversion.

    Conversions with the same `calls=` give models with equal graph definitions, so `nnx.jit`
    compiles a function only once for both models.
    """
    x, calls = jnp.ones((4, WIDTH)), {NnxNorm: of_nnx}
    graphs = [nnx.graphdef(jaxnorm.nnx.convert(nnx_model(), calls=calls)) for _ in range(2)]
    assert graphs[0] == graphs[1]
    model = jaxnorm.nnx.convert(jaxnorm.nnx.convert(nnx_model(), calls=calls), calls=calls)
    assert nnx.graphdef(model) == graphs[0]
    jaxnorm.nnx.convert(model, calls={NnxNorm: lambda norm, x: 2 * x})
    np.testing.assert_array_equal(model["a"](x), 2 * x)
    caplog.clear()
    jaxnorm.nnx.convert(model)
    assert "a (" not in "".join(record.getMessage() for record in caplog.records)


def test_functions_whose_variables_change():
    """A function of an earlier conversion is not used again if its variables have changed."""
    x = normal((4, WIDTH))

    def converted(factors):
        def call(norm, x):
            return factor * x

        for one in factors:
            factor = one
            yield jaxnorm.nnx.convert(nnx_model(), calls={NnxNorm: call})

    models = [*converted([2.0, 3.0])]
    (model,) = converted([2.0])
    np.testing.assert_array_equal(models[1]["a"](x), 3 * x)
    np.testing.assert_array_equal(model["a"](x), 2 * x)


def test_classes_that_were_not_found(caplog):
    jaxnorm.nnx.convert(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), calls={NnxNorm: of_nnx})
    jaxnorm.equinox.convert(eqx.nn.LayerNorm(4), calls={EqxNorm: of_equinox})
    model, x, calls = nn.LayerNorm(), jnp.ones((2, 4)), {LinenNorm: of_linen}
    apply = jax.jit(model.apply)
    variables = model.init(jax.random.key(0), x)
    for _ in range(2):
        with jaxnorm.linen.converted(calls=calls):
            apply(variables, x)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    for line, name in zip(lines, ("NnxNorm", "EqxNorm", "LinenNorm"), strict=True):
        assert f"calls has classes that were not found: {name}" in line


def test_norm_classes_that_are_left_are_named(caplog):
    """The log names norm classes that are not converted, and what to pass for them."""
    jaxnorm.nnx.convert(nnx_model())
    jaxnorm.equinox.convert({"a": EqxNorm(jnp.ones(4)), "c": eqx.nn.LayerNorm(4)})
    with jaxnorm.linen.converted():
        LinenModel().init(jax.random.key(0), jnp.ones((2, WIDTH)))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"norms of other classes are left as they are: {name} (1). To convert such classes, "
        f"pass calls={{{name}: function}}"
        for name in ("NnxNorm", "EqxNorm", "LinenNorm")
    ]


class WithWeight(nn.Module):
    """A module whose name ends in "Norm", but which is a linear layer."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.ones, (WIDTH, WIDTH, WIDTH))[0]


class PreNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.LayerNorm()(x))


def test_only_norms_are_named(caplog):
    with_weight = type("WithNorm", (WithWeight,), {})
    with jaxnorm.linen.converted():
        nn.Sequential([PreNorm(), with_weight()]).init(jax.random.key(0), jnp.ones((2, WIDTH)))
    assert not caplog.records


def test_layers_share_an_entry_of_the_log(caplog):
    """If nothing is wrong, the line has the level INFO, and one entry for each kind of module."""
    layers = nnx.List([nnx.Dict(norm=NnxNorm(nnx.Rngs(0))) for _ in range(12)])
    jaxnorm.nnx.convert(layers, calls={NnxNorm: of_nnx})
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "jaxnorm.nnx.convert: 12 modules call functions of calls: *.norm (NnxNorm, 12 times)"
    )


def pickled(a):
    return pickle.loads(pickle.dumps(a))


def test_pickled_models():
    """A converted model, and its graph definition, can be pickled."""
    x = normal((4, WIDTH))
    model = jaxnorm.nnx.convert(nnx_model(), calls={NnxNorm: of_nnx})
    graph, state = nnx.split(model)
    assert pickled(graph) == graph
    for loaded in (pickled(model), nnx.merge(pickled(graph), state)):
        assert norms_in(loaded["a"], x) == 1
        assert type(loaded["a"]) is type(model["a"])
    x = normal((WIDTH,))
    model = pickled(jaxnorm.equinox.convert(equinox_model(), calls={EqxNorm: of_equinox}))
    assert norms_in(model["a"], x) == 1


def test_pickled_models_whose_functions_cannot_be_pickled(caplog):
    """A module whose function is a lambda is loaded as a module of its own class."""
    model = jaxnorm.nnx.convert(nnx_model(), calls={NnxNorm: lambda n, x: of_nnx(n, x)})
    caplog.clear()
    loaded = pickled(model)
    assert type(loaded["a"]) is NnxNorm
    assert "NnxNorm is pickled without its function of calls" in message_of(caplog)
    model = jaxnorm.equinox.convert(equinox_model(), calls={EqxNorm: lambda n, x: x})
    assert type(pickled(model)["a"]) is EqxNorm


@pytest.mark.parametrize("place", ["a judgement", "a change"])
def test_an_error_leaves_the_model_unconverted(place):
    """If a module cannot be converted, all modules keep their classes and their attributes."""
    model = nnx_model()
    model["d"] = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
    before = {key: (type(node), dict(vars(node))) for key, node in model.items()}

    class Fixed(nnx.LayerNorm):
        def __setattr__(self, name, value):
            if name == "__class__":
                raise AttributeError("fixed")
            super().__setattr__(name, value)

    if place == "a judgement":
        model["d"].dtype = "no dtype"
    else:
        model["d"].__class__ = Fixed
    before["d"] = type(model["d"]), dict(vars(model["d"]))
    with pytest.raises((TypeError, AttributeError)):
        jaxnorm.nnx.convert(model, calls={NnxNorm: of_nnx, Fixed: of_nnx})
    assert {key: (type(node), vars(node)) for key, node in model.items()} == before


def subclasses(base):
    """Return subclasses of a norm class whose bodies add nothing, and some that add something."""

    class Documented(base):
        """A class with nothing but a docstring."""

    class Again(Documented):
        pass

    class Mixin:
        pass

    class Mixed(Mixin, base):
        pass

    class WithMethod(base):
        def features(self):
            return 0

    class WithField(base):
        epsilon: float = 1e-3

    class WithHook(base):
        def __init_subclass__(cls, *, option, **options):
            super().__init_subclass__(**options)

    class OfHook(WithHook, option=1):
        pass

    # Python 3.14 has such attributes instead of `__annotations__`.
    body = {"__module__": __name__, "__annotate_func__": None, "__annotations_cache__": {}}
    made = type(base)("Made", (base,), {}), type(base)("Annotated", (base,), body)
    empty, others = (Documented, Again, *made), (Mixed, WithMethod, WithField, OfHook)
    return ({kind.__name__: kind for kind in kinds} for kinds in (empty, others))


@pytest.mark.parametrize("library", ["nnx", "linen", "equinox"])
def test_subclasses(library, caplog):
    """Norms of subclasses with an empty body are converted; others may override code."""
    base = {"nnx": nnx.LayerNorm, "linen": nn.LayerNorm, "equinox": eqx.nn.LayerNorm}[library]
    empty, others = subclasses(base)
    x = normal((4, WIDTH))
    for name, kind in (empty | others).items():
        caplog.clear()
        if library == "linen":
            with jaxnorm.linen.converted():
                program = jax.make_jaxpr(kind().init_with_output)(jax.random.key(0), x)
            is_converted = "jaxnorm.layer_norm" in str(program)
        else:
            norm = kind(WIDTH, rngs=nnx.Rngs(0)) if library == "nnx" else kind(WIDTH)
            convert = getattr(jaxnorm, library).convert
            is_converted = type(convert(norm)).__module__ == f"jaxnorm.{library}"
        assert is_converted == (name in empty), name
        package = "equinox" if library == "equinox" else "Flax"
        assert is_converted or message_of(caplog).endswith(
            f"the module itself ({name} is a subclass of {package}'s LayerNorm, with code of its "
            f"own). To convert such classes, pass calls={{{name}: function}}"
        )
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def convert(library, calls):
    if library == "nnx":
        jaxnorm.nnx.convert(nnx_model(), calls=calls)
    elif library == "equinox":
        jaxnorm.equinox.convert(equinox_model(), calls=calls)
    else:
        with jaxnorm.linen.converted(calls=calls):
            pass


@pytest.mark.parametrize(
    ("calls", "error", "message"),
    [
        ([NnxNorm], TypeError, "calls is a list; expected"),
        ({"RMSNorm": of_nnx}, TypeError, "calls has the key 'RMSNorm', not a class"),
        ({dict: of_nnx}, ValueError, "calls has builtins.dict, which is not a"),
        (None, ValueError, "calls has .*, which is not a"),
        (3, TypeError, "calls.* is a int; expected a function"),
    ],
)
@pytest.mark.parametrize("library", ["nnx", "linen", "equinox"])
def test_errors(library, calls, error, message):
    own, other = {
        "nnx": (NnxNorm, LinenNorm),
        "linen": (LinenNorm, EqxNorm),
        "equinox": (EqxNorm, NnxNorm),
    }[library]
    if calls is None:
        calls = {other: of_nnx}
    if calls == 3:
        calls = {own: 3}
    with pytest.raises(error, match=message):
        convert(library, calls)
