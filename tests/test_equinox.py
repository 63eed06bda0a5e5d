"""jaxnorm.equinox compared with equinox's own modules, and conversion of models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from convert_cases import (
    assert_arguments_and_three_more,
    assert_norm_within_bounds,
    message_of,
    normal,
)
from program_error import assert_computes
from programs import kernels_in

eqx = pytest.importorskip("equinox")

import jaxnorm.equinox  # noqa: E402

pytestmark = pytest.mark.oldest_jax

PAIRS = {
    "LayerNorm": (jaxnorm.equinox.LayerNorm, eqx.nn.LayerNorm),
    "RMSNorm": (jaxnorm.equinox.RMSNorm, eqx.nn.RMSNorm),
}
each = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=list(PAIRS))
ARGUMENTS = [
    {},
    {"eps": 1e-2},
    {"use_weight": False},
    {"use_bias": False},
    {"use_weight": False, "use_bias": False},
    {"dtype": jnp.bfloat16},
]


def with_parameters(norm):
    """Return `norm` with weight and bias changed to random values."""
    return jax.tree.map(lambda a: a + normal(a.shape, 1, a.dtype), norm)


@pytest.mark.usefixtures("quick_to_compile")
@each
@pytest.mark.parametrize(("save", "dtype"), [("output", "bfloat16"), ("input", "float32")])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: "-".join(a) or "default")
def test_values_and_gradients(ours, theirs, arguments, dtype, save):
    """Under jax.vmap over rows, values and gradients are as accurate as equinox's.

    Both are compared with a float64 reference.
    """
    norm = with_parameters(ours(16, **arguments, save=save))
    fields = ("shape", "eps", "use_weight", "use_bias")
    equinox_s = theirs(16, **arguments)
    assert [getattr(norm, f) for f in fields] == [getattr(equinox_s, f) for f in fields]
    x, d = normal((6, 16), 2, dtype), normal((6, 16), 3, dtype)
    y, vjp = jax.vjp(lambda norm, x: jax.vmap(norm)(x), norm, x)
    gradients, dx = vjp(d)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    parameters = {"scale": norm.weight, "bias": norm.bias}
    assert_norm_within_bounds(
        *(theirs.__name__, norm.eps, x, d),
        {name: a for name, a in parameters.items() if a is not None},
        *(y, dx, {"scale": gradients.weight, "bias": gradients.bias}),
        saved=save,
    )


@each
@pytest.mark.parametrize("shape", [(), (3, 4), (0,)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_shapes_and_dtypes_are_equinox_s(ours, theirs, shape, dtype):
    x = (9 * normal(shape)).astype(dtype)
    y, expected = ours(shape)(x), theirs(shape)(x)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    assert_computes(y, theirs(shape), x, like=ours(shape))


@each
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # equinox's own warning
def test_numpy_s_float64_becomes_jax_s_float(ours, theirs):
    x = np.random.default_rng(0).normal(size=16)
    y, expected = ours(16)(x), theirs(16)(x)
    assert y.dtype == expected.dtype
    x = x.astype(np.float32)
    assert_computes(y, theirs(16), x, like=ours(16))


@each
def test_state_passes_through(ours, theirs):
    state = object()
    y, same = ours(4)(jnp.ones(4), state, key=jax.random.key(0))
    assert same is state
    assert y.shape == (4,)


@each
def test_arguments_are_equinox_s_and_three_more(ours, theirs):
    assert_arguments_and_three_more(ours, theirs)


@each
def test_scale_offset(ours, theirs):
    x, plain = normal(16), ours(16)
    offset = eqx.tree_at(lambda norm: norm.weight, ours(16, scale_offset=1.0), jnp.zeros(16))
    assert_computes(offset(x), plain, x, like=offset)
    with pytest.raises(ValueError, match=r"scale_offset=1\.0 with an x of shape \(16,\) and dtype"):
        offset(x.astype(int))


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_a_group_norm_that_is_left_to_equinox(dtype):
    """If x has no supported float dtype, GroupNorm runs equinox's own code."""
    x = (9 * normal((8, 3))).astype(dtype)
    ours, theirs = (
        with_parameters(kind(4, 8)) for kind in (jaxnorm.equinox.GroupNorm, eqx.nn.GroupNorm)
    )
    y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype
    assert np.any(expected)
    np.testing.assert_array_equal(y, expected)
    with pytest.raises(
        ValueError, match=r"^GroupNorm: scale_offset=1\.0 with an x of shape \(8, 3"
    ):
        jaxnorm.equinox.GroupNorm(4, 8, scale_offset=1.0)(x)


@each
def test_errors(ours, theirs):
    with pytest.raises(ValueError, match=r"Norm: x has shape \(2, 4\); expected \(4,\).*jax\.vmap"):
        ours(4)(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="save='both'; expected one of"):
        ours(4, save="both")(jnp.ones(4))


@each
def test_one_kernel_each_way_over_all_rows(ours, theirs):
    x = jax.ShapeDtypeStruct((8, 128, 4096), "bfloat16")
    norm = eqx.filter_eval_shape(ours, 4096)

    def loss(norm, x):
        return jnp.sum(jax.vmap(jax.vmap(norm))(x).astype("float32"))

    assert kernels_in(jax.grad(loss, (0, 1)), norm, x) == 2


class Model(eqx.Module):
    """A model with a stack of equal layers, after which one norm is applied twice."""

    layers: list
    last: eqx.nn.LayerNorm

    def __init__(self, key):
        def layer(key):
            return [eqx.nn.RMSNorm(16), eqx.nn.Linear(16, 16, key=key)]

        self.layers = eqx.filter_vmap(layer)(jax.random.split(key, 2))
        self.last = eqx.nn.LayerNorm(16, use_bias=False)

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def step(x, arrays):
            norm, linear = eqx.combine(arrays, static)
            return x + jnp.tanh(jax.vmap(linear)(jax.vmap(norm)(x))), None

        return jax.vmap(self.last)(jax.lax.scan(step, x, arrays)[0])


@pytest.mark.usefixtures("quick_to_compile")
def test_a_converted_model(tmp_path, caplog):
    model, x = with_parameters(Model(jax.random.key(0))), normal((5, 16), 4)
    converted = jaxnorm.equinox.convert(model)
    assert type(model.last) is eqx.nn.LayerNorm
    assert type(converted) is Model
    assert type(converted.layers[0]) is jaxnorm.equinox.RMSNorm
    assert type(converted.last) is jaxnorm.equinox.LayerNorm
    assert (converted.last.save, converted.last.implementation) == ("output", None)
    assert all(a is b for a, b in zip(jax.tree.leaves(converted), jax.tree.leaves(model)))
    assert not caplog.records
    # A checkpoint of equinox's model can be loaded into the converted model.
    paths, others = (jax.tree_util.tree_leaves_with_path(m) for m in (converted, model))
    assert [path for path, _ in paths] == [path for path, _ in others]
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", converted)
    jax.tree.map(np.testing.assert_array_equal, loaded, converted)

    @jax.jit
    def results(model, x):
        def loss(model, x):
            return jnp.sum(jnp.sin(model(x)))

        return jax.tree.leaves(jax.value_and_grad(loss, (0, 1))(model, x))

    ours, theirs = results(converted, x), results(model, x)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: np.asarray(a, "float64"), (model, x))
        expected = results(*jax.tree.map(jnp.asarray, double))
    reference.assert_as_accurate(ours, theirs, expected)


@each
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: "-".join(a) or "default")
def test_a_converted_norm_is_one_that_was_made(ours, theirs, arguments):
    norm = theirs((3, 4), **arguments)
    converted = jaxnorm.equinox.convert(norm, save="input", implementation="xla")
    made = ours((3, 4), **arguments, save="input", implementation="xla")
    assert jax.tree.structure(converted) == jax.tree.structure(made)
    assert all(a is b for a, b in zip(jax.tree.leaves(converted), jax.tree.leaves(norm)))


def test_where_norms_are_found():
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


def test_norms_that_are_left_and_norms_that_keep_their_input(caplog):
    class Scaled(eqx.nn.RMSNorm):
        def __call__(self, x):
            return 2 * super().__call__(x)

    def lost(norm):
        weight = norm.weight.at[..., 1].set(0)
        norm = eqx.tree_at(lambda norm: norm.weight, norm, weight)
        return norm if norm.bias is None else eqx.tree_at(lambda n: n.bias, norm, weight + 1)

    model = {
        "good": eqx.nn.LayerNorm(4),
        "half": lost(eqx.nn.RMSNorm(4, use_bias=False, dtype=jnp.float16)),
        "integers": eqx.nn.LayerNorm(4, dtype=int),
        "lost": [lost(eqx.nn.LayerNorm(4)), lost(eqx.nn.RMSNorm(4))],
        "scaled": Scaled(4),
        "stacked": lost(eqx.filter_vmap(lambda _: eqx.nn.LayerNorm(4))(jnp.ones(3))),
        "unbiased": lost(eqx.nn.RMSNorm(4, use_bias=False)),
        "unscaled": eqx.nn.LayerNorm(4, use_weight=False),
    }
    converted = jaxnorm.equinox.convert(model)
    for key in ("integers", "scaled"):
        assert converted[key] is model[key]
    del converted["integers"], converted["scaled"]
    is_norm = lambda node: isinstance(node, tuple(theirs for _, theirs in PAIRS.values()))  # noqa: E731
    saved = [norm.save for norm in jax.tree.leaves(converted, is_leaf=is_norm)]
    assert saved == ["output", "input", "input", "input", "input", "output", "output"]
    assert message_of(caplog) == (
        "jaxnorm.equinox.convert: 2 of 9 norms are left to equinox: "
        "integers (dtypes int32, int32); "
        "scaled (Scaled is a subclass of equinox's RMSNorm, with code of its own). "
        '4 of 9 norms keep their input, as with save="input": '
        "half (scales too small for float16 in 1 of 4 columns); "
        "lost.* (scales of 0, or far below the bias, in 1 of 4 columns, 2 times); "
        "stacked (scales of 0, or far below the bias, in 3 of 12 columns). "
        "To convert such classes, pass calls={Scaled: function}"
    )


def test_parameters_without_values_are_not_looked_at(caplog):
    norm = jax.tree.map(jnp.zeros_like, eqx.nn.LayerNorm(4))
    norm = eqx.tree_at(lambda norm: norm.bias, norm, jnp.ones(4))
    saved = []
    jax.jit(lambda norm: saved.append(jaxnorm.equinox.convert(norm).save))(norm)
    saved.append(jaxnorm.equinox.convert(jax.eval_shape(lambda: norm)).save)
    assert saved == ["output", "output"]
    assert not caplog.records
    assert jaxnorm.equinox.convert(norm).save == "input"


def test_a_model_without_such_norms_is_told(caplog):
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    assert jaxnorm.equinox.convert(linear).weight is linear.weight
    assert "Linear has no equinox.nn.LayerNorm and no equinox.nn.RMSNorm" in message_of(caplog)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ({"weight": 1.0}, {}, TypeError, "convert: model is a dict; expected an equinox.Module"),
        (eqx.nn.RMSNorm(4), {"save": "both"}, ValueError, "convert: save='both'; expected one of"),
        (eqx.nn.RMSNorm(4), {"implementation": "cudnn"}, ValueError, "implementation='cudnn'"),
    ],
)
def test_errors_of_convert(model, options, error, message):
    with pytest.raises(error, match=message):
        jaxnorm.equinox.convert(model, **options)
