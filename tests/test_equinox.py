"""jaxnorm.equinox against equinox's own modules, and converted models."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

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


def normal(shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def with_parameters(norm):
    """`norm` with weight and bias of no special values."""
    return jax.tree.map(lambda a: a + normal(a.shape, 1, a.dtype), norm)


@pytest.mark.usefixtures("quick_to_compile")
@each
@pytest.mark.parametrize(("save", "dtype"), [("output", "bfloat16"), ("input", "float32")])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: "-".join(a) or "default")
def test_values_and_gradients(ours, theirs, arguments, dtype, save):
    """Of rows under jax.vmap, against float64."""
    norm = with_parameters(ours(16, **arguments, save=save))
    fields = ("shape", "eps", "use_weight", "use_bias")
    equinox_s = theirs(16, **arguments)
    assert [getattr(norm, f) for f in fields] == [getattr(equinox_s, f) for f in fields]
    x, d = normal((6, 16), 2, dtype), normal((6, 16), 3, dtype)
    y, vjp = jax.vjp(lambda norm, x: jax.vmap(norm)(x), norm, x)
    gradients, dx = vjp(d)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    expected = reference.Norm(
        x=reference.exact(x),
        gain=np.ones(16) if norm.weight is None else reference.exact(norm.weight),
        bias=np.zeros(16) if norm.bias is None else reference.exact(norm.bias),
        d=reference.exact(d),
        subtract_mean=ours is jaxnorm.equinox.LayerNorm,
        epsilon=norm.eps,
        saved=save,
        x_dtype=dtype,
        y_dtype=dtype,
    )
    of_dx, of_dweight, of_dbias = expected.gradient_bounds()
    reference.assert_within(y, expected.y, expected.y_bound())
    reference.assert_within(dx, expected.dx, of_dx)
    for got, wanted, bound in (
        (gradients.weight, expected.dscale, of_dweight),
        (gradients.bias, expected.dbias, of_dbias),
    ):
        if got is not None:
            bound = bound + reference.rounding(wanted, got.dtype.name)
            reference.assert_within(got, wanted, bound)


@each
@pytest.mark.parametrize("shape", [(), (3, 4), (0,)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_shapes_and_dtypes_are_equinox_s(ours, theirs, shape, dtype):
    x = (9 * normal(shape)).astype(dtype)
    y, expected = ours(shape)(x), theirs(shape)(x)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@each
def test_state_passes_through(ours, theirs):
    state = object()
    y, same = ours(4)(jnp.ones(4), state, key=jax.random.key(0))
    assert same is state
    assert y.shape == (4,)


@each
def test_arguments_are_equinox_s_and_three_more(ours, theirs):
    def parameters(module):
        return {
            p.name: (p.kind, p.default)
            for p in inspect.signature(module.__init__).parameters.values()
        }

    keyword = inspect.Parameter.KEYWORD_ONLY
    extra = {"save": "output", "implementation": None, "scale_offset": 0.0}
    known = parameters(theirs)
    assert parameters(ours) == known | {name: (keyword, value) for name, value in extra.items()}
    assert issubclass(ours, theirs)


@each
def test_scale_offset(ours, theirs):
    x, plain = normal(16), ours(16)
    offset = eqx.tree_at(lambda norm: norm.weight, ours(16, scale_offset=1.0), jnp.zeros(16))
    np.testing.assert_allclose(offset(x), plain(x), rtol=1e-6)
    with pytest.raises(ValueError, match=r"scale_offset=1\.0 with an x of shape \(16,\) and dtype"):
        offset(x.astype(int))


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

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(norm, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2


class Model(eqx.Module):
    """Layers of one structure, stacked, and a norm after them, which is in two places."""

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


def converted_as_documented(model):
    """By the code of the module's docstring."""
    block = inspect.cleandoc(jaxnorm.equinox.__doc__.partition("::")[2].partition("The arrays")[0])
    namespace = {"model": model}
    exec(compile(block, "jaxnorm.equinox", "exec"), namespace)
    return namespace["model"]


@pytest.mark.usefixtures("quick_to_compile")
def test_the_documented_conversion(tmp_path):
    model, x = with_parameters(Model(jax.random.key(0))), normal((5, 16), 4)
    converted = converted_as_documented(model)
    assert type(converted.layers[0]) is jaxnorm.equinox.RMSNorm
    assert type(converted.last) is jaxnorm.equinox.LayerNorm
    assert all(a is b for a, b in zip(jax.tree.leaves(converted), jax.tree.leaves(model)))
    # A checkpoint of either is one of the other.
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
