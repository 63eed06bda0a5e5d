"""``calls=``, with which the three `convert` functions convert custom norm classes."""

import pickle

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_cases import LIBRARIES, WIDTH, each_library, message_of, normal
from flax import nnx

import jaxnorm.equinox
import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

X = normal((WIDTH,))


def plain(x, w):
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * w


class NnxNorm(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return plain(x, self.w[...])


class NnxSubclass(NnxNorm):
    pass


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return plain(x, self.param("w", nn.initializers.ones, (WIDTH,)))


class LinenSubclass(LinenNorm):
    pass


class EqxNorm(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return plain(x, self.w)


class EqxSubclass(EqxNorm):
    pass


class EqxBlock(eqx.Module):
    """A module that contains a norm; a test passes functions in `calls=` for both classes."""

    norm: EqxNorm

    def __call__(self, x):
        return self.norm(x)


def of_nnx(norm, x):
    return jaxnorm.rms_norm(x, norm.w[...])


def of_linen(norm, x):
    return jaxnorm.rms_norm(x, norm.param("w", nn.initializers.ones, (WIDTH,)))


def of_equinox(norm, x):
    return jaxnorm.rms_norm(x, norm.w)


# The norm class of a user, a subclass of it, and a function for `calls=`.
OWN = {
    "linen": (LinenNorm, LinenSubclass, of_linen),
    "nnx": (NnxNorm, NnxSubclass, of_nnx),
    "equinox": (EqxNorm, EqxSubclass, of_equinox),
}


def made(library, kind):
    """Return a norm of any class; for linen, the class."""
    if library.name == "linen":
        return kind
    if issubclass(kind, (library.theirs.LayerNorm, library.theirs.RMSNorm)):
        return library.make(kind)
    return kind(nnx.Rngs(0)) if library.name == "nnx" else kind(jnp.ones(WIDTH))


def model_of(library, **kinds):
    return library.model({name: made(library, kind) for name, kind in kinds.items()})


def converted(library, model, **options):
    """Convert a model with these options; return a function that calls all its norms."""
    if library.name != "linen":
        norms = library.ours.convert(model, **options).values()
        return lambda: [norm(X) for norm in norms]
    variables = model.init(jax.random.key(0), X)

    def run():
        with jaxnorm.linen.converted(**options):
            return model.apply(variables, X)

    return run


def norms_in(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("jaxnorm.rms_norm")


# ------------------------------------------------------------------------- results of conversions


@each_library
def test_the_function_replaces_the_call(library, caplog):
    """It may call the class's own code. Modules of subclasses keep theirs.

    Functions for norm classes of the package come before the conversion of these classes. Modules
    of jaxnorm's classes are not converted.
    """
    kind, subclass, _ = OWN[library.name]
    base, ours = library.theirs.RMSNorm, library.ours.RMSNorm

    class Empty(base):
        pass

    model = model_of(library, a=kind, b=subclass, c=base, d=Empty, e=ours)
    calls = {kind: lambda norm, x: 2 * kind.__call__(norm, x), base: lambda norm, x: 3 * x}
    a, b, c, _, _ = converted(library, model, calls=calls)()
    np.testing.assert_array_equal(a, 2 * b)
    np.testing.assert_array_equal(c, 3 * X)
    assert message_of(caplog) == (
        f"jaxnorm.{library.function}: 2 modules call functions of calls: a ({kind.__name__}); "
        f"c (RMSNorm). 2 modules are left as they are: b ({subclass.__name__} is a subclass of "
        f"{kind.__name__}, which calls has); d (Empty is a subclass of RMSNorm, which calls has)"
    )


@each_library
def test_parameters_and_programs(library):
    """The parameters stay the same objects, and the norms are jaxnorm's."""
    kind, _, function = OWN[library.name]
    model, calls = model_of(library, a=kind, c=library.theirs.RMSNorm), {kind: function}
    before = None if library.name == "linen" else jax.tree.leaves(model)
    assert norms_in(converted(library, model, calls=calls)) == 2
    if library.name == "linen":
        variables = model.init(jax.random.key(0), X)
        with jaxnorm.linen.converted(calls=calls):
            same = model.init(jax.random.key(0), X)
        assert jax.tree.structure(same) == jax.tree.structure(variables)
        return
    after = library.ours.convert(model, calls=calls)
    assert (after is model) == (library.name == "nnx")
    assert isinstance(after["a"], kind)
    assert all(a is b for a, b in zip(jax.tree.leaves(after), before, strict=True))


def test_equinox_modules_inside_modules():
    shared = EqxNorm(jnp.ones(WIDTH))
    model = [EqxBlock(shared), shared]
    calls = {EqxNorm: of_equinox, EqxBlock: lambda block, x: EqxBlock.__call__(block, 2 * x)}
    after = jaxnorm.equinox.convert(model, calls=calls)
    assert after[0].norm is after[1]
    np.testing.assert_array_equal(after[0](X), jaxnorm.rms_norm(2 * X, shared.w))
    again = jaxnorm.equinox.convert(model, calls=calls)
    assert jax.tree.structure(again) == jax.tree.structure(after)


# ------------------------------------------------------------------------- functions and traces


def nnx_norms(function):
    return jaxnorm.nnx.convert(model_of(LIBRARIES["nnx"], a=NnxNorm), calls={NnxNorm: function})


def test_other_functions_are_other_traces():
    """A function counts by its code and its data, even if its variables change later."""
    model = LinenNorm()
    variables = model.init(jax.random.key(0), X)
    apply, called = jax.jit(model.apply), nnx.jit(lambda model, x: model["a"](x))

    def scaled(factors):
        def call(norm, x):
            return factor * x

        for one in factors:
            factor = one
            yield call

    models = []
    for call in scaled([2.0, 3.0]):
        models.append(nnx_norms(call))
        factor = float(len(models) + 1)
        with jaxnorm.linen.converted(calls={LinenNorm: call}):
            np.testing.assert_array_equal(apply(variables, X), factor * X)
        np.testing.assert_array_equal(called(models[-1], X), factor * X)
    (call,) = scaled([2.0])
    np.testing.assert_array_equal(nnx_norms(call)["a"](X), 2 * X)
    np.testing.assert_array_equal(models[1]["a"](X), 3 * X)


def test_converted_again(caplog):
    """A model may be converted twice. It then calls the functions of the second conversion.

    Conversions with the same `calls=` give models with equal graph definitions, so `nnx.jit`
    compiles a function only once for both models.
    """
    graph = nnx.graphdef(nnx_norms(of_nnx))
    model = jaxnorm.nnx.convert(nnx_norms(of_nnx), calls={NnxNorm: of_nnx})
    assert nnx.graphdef(model) == graph
    jaxnorm.nnx.convert(model, calls={NnxNorm: lambda norm, x: 2 * x})
    np.testing.assert_array_equal(model["a"](X), 2 * X)
    caplog.clear()
    jaxnorm.nnx.convert(model)
    assert "a (" not in "".join(record.getMessage() for record in caplog.records)


def test_pickled_models(caplog):
    """A pickled model loses functions that are not defined at module level, such as lambdas."""
    model = nnx_norms(of_nnx)
    graph, state = nnx.split(model)
    equinox = jaxnorm.equinox.convert([EqxNorm(jnp.ones(WIDTH))], calls={EqxNorm: of_equinox})
    loaded_graph, loaded = pickle.loads(pickle.dumps((graph, [*model.values(), *equinox])))
    assert loaded_graph == graph
    for norm in (nnx.merge(loaded_graph, state)["a"], *loaded):
        assert norms_in(norm, X) == 1
    caplog.clear()
    of_lambda = nnx_norms(lambda norm, x: of_nnx(norm, x))["a"]
    assert type(pickle.loads(pickle.dumps(of_lambda))) is NnxNorm
    assert "NnxNorm is pickled without its function of calls" in caplog.records[-1].getMessage()


# ------------------------------------------------------------------------------- lines of the log


@each_library
def test_classes_that_are_not_found_and_classes_that_are_left(library, caplog):
    """The log names norm classes that are not converted, and what to pass for them."""
    kind, _, function = OWN[library.name]
    converted(library, model_of(library, c=library.theirs.RMSNorm), calls={kind: function})()
    assert message_of(caplog).endswith(f"calls has classes that were not found: {kind.__name__}")
    caplog.clear()
    converted(library, model_of(library, a=kind, c=library.theirs.RMSNorm))()
    assert message_of(caplog) == (
        f"jaxnorm.{library.function}: norms of other classes are left as they are: "
        f"{kind.__name__} (1). To convert such classes, pass calls={{{kind.__name__}: function}}"
    )


# ------------------------------------------------------------------------- errors, and subclasses


@pytest.mark.parametrize("place", ["a judgement", "a change"])
def test_an_error_leaves_the_model_unconverted(place):
    """If a module cannot be converted, all modules keep their classes and their attributes."""
    model = model_of(LIBRARIES["nnx"], a=NnxNorm, c=nnx.RMSNorm, d=nnx.LayerNorm)

    class Fixed(nnx.LayerNorm):
        def __setattr__(self, name, value):
            if name == "__class__":
                raise AttributeError("fixed")
            super().__setattr__(name, value)

    if place == "a judgement":
        model["d"].dtype = "no dtype"
    else:
        model["d"].__class__ = Fixed
    before = {key: (type(node), dict(vars(node))) for key, node in model.items()}
    with pytest.raises((TypeError, AttributeError)):
        jaxnorm.nnx.convert(model, calls={NnxNorm: of_nnx, Fixed: of_nnx})
    assert {key: (type(node), vars(node)) for key, node in model.items()} == before


def subclasses(base):
    """Return subclasses of a norm class whose bodies add nothing, and some that add something."""

    class Documented(base):
        """A class with nothing but a docstring."""

    class Mixin:
        pass

    class Mixed(Mixin, base):
        pass

    class WithMethod(base):
        def features(self):
            return 0

    class WithField(base):
        epsilon: float = 1e-3

    # Python 3.14 has such attributes instead of `__annotations__`.
    body = {"__module__": __name__, "__annotate_func__": None, "__annotations_cache__": {}}
    made = type(base)("Made", (Documented,), {}), type(base)("Annotated", (base,), body)
    empty, others = (
        (Documented, type(base)("Again", (Documented,), {}), *made),
        (Mixed, WithMethod, WithField),
    )
    return ({kind.__name__: kind for kind in kinds} for kinds in (empty, others))


@each_library
def test_subclasses(library, caplog):
    """Norms of subclasses with an empty body are converted; others may override code."""
    empty, others = subclasses(library.theirs.LayerNorm)
    for name, kind in (empty | others).items():
        caplog.clear()
        model = model_of(library, a=kind)
        program = str(jax.make_jaxpr(converted(library, model))())
        is_converted = "jaxnorm.layer_norm" in program
        assert is_converted == (name in empty), name
        assert is_converted or message_of(caplog).endswith(
            f"a ({name} is a subclass of {library.package}'s LayerNorm, with code of its own). "
            f"To convert such classes, pass calls={{{name}: function}}"
        )
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (None, None, TypeError, "calls is a list; expected"),
        ("RMSNorm", of_nnx, TypeError, "calls has the key 'RMSNorm', not a class"),
        (dict, of_nnx, ValueError, "calls has builtins.dict, which is not a"),
        ("another library", of_nnx, ValueError, "calls has .*Norm, which is not a"),
        ("own", 3, TypeError, r"calls\[.*Norm\] is a int; expected a function"),
    ],
)
@each_library
def test_errors(library, key, value, error, message):
    others = {"nnx": "linen", "linen": "equinox", "equinox": "nnx"}
    kinds = {"own": OWN[library.name][0], "another library": OWN[others[library.name]][0]}
    calls = [] if key is None else {kinds.get(key, key): value}
    model = model_of(library, c=library.theirs.RMSNorm)
    with pytest.raises(error, match=message):
        converted(library, model, calls=calls)()
