"""GroupNorm of jaxnorm.linen and jaxnorm.nnx, compared with Flax's."""

import dataclasses
import inspect

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from convert_cases import assert_same, normal
from flax import nnx
from program_error import assert_computes
from programs import kernels_in

import jaxnorm.linen
import jaxnorm.nnx
from jaxnorm.tools.plan import calls_in

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

CHANNELS = 12
X, D = normal((3, 5, 4, CHANNELS)), normal((3, 5, 4, CHANNELS), 1)
random_init = {"scale_init": nn.initializers.normal(1.0), "bias_init": nn.initializers.normal(1.0)}

# Each entry sets some fields of the tested modules. Every field of Flax's module is set in at least
# one entry. If an entry does not set num_groups, num_groups is 4.
FIELDS = [
    {},
    {"num_groups": 1},
    {"num_groups": 12},
    {"num_groups": None, "group_size": 6},
    {"epsilon": 1e-2},
    {"dtype": jnp.bfloat16},
    {"param_dtype": jnp.bfloat16},
    {"use_bias": False},
    {"use_scale": False},
    {"use_bias": False, "use_scale": False},
    random_init,
    {"reduction_axes": (1, 2, -1)},
    {"reduction_axes": (-3, 2, 3)},
    {"axis_index_groups": [[0, 1], [2, 3]]},  # has an effect only together with axis_name
    {"use_fast_variance": False},
]
OF_LINEN = [
    {"reduction_axes": (2, 3)},  # left out for nnx, which repeats parameters along a wrong axis
    {"reduction_axes": (0, 1, 2, 3)},
    {"force_float32_reductions": False},
    {"axis_name": "batch"},
]


def linen_pair(fields, **added):
    """Return a pair (parameters, function) for our module, and one for Flax's.

    The function calls the module on parameters and x. `added` has fields that only our module has.
    """

    def of(module, **added):
        norm = module(**{"num_groups": 4, **fields, **added})
        variables = norm.init(jax.random.key(1), X)
        return variables.get("params", {}), lambda p, x, **o: norm.apply({"params": p}, x, **o)

    return of(jaxnorm.linen.GroupNorm, **added), of(nn.GroupNorm)


def nnx_pair(fields, **added):
    def of(module, **added):
        norm = module(CHANNELS, **{"num_groups": 4, **fields, **added}, rngs=nnx.Rngs(1))
        graph, state = nnx.split(norm)
        return nnx.to_pure_dict(state), lambda p, x, **o: nnx.merge(graph, with_values(state, p))(
            x, **o
        )

    def with_values(state, values):
        state = jax.tree.map(lambda a: a, state)
        nnx.replace_by_pure_dict(state, values)
        return state

    return of(jaxnorm.nnx.GroupNorm, **added), of(nnx.GroupNorm)


PAIRS = {"linen": linen_pair, "nnx": nnx_pair}
each = pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))


def results(apply, parameters, x):
    y, vjp = jax.vjp(apply, parameters, x)
    return y, vjp(D.astype(y.dtype))


def double(tree):
    return jax.tree.map(lambda a: np.asarray(a, "float64"), tree)


# In float32, each module is tested with each entry of `FIELDS`. In bfloat16, only one of the two
# modules is tested with each entry, and the module changes from entry to entry.
@pytest.mark.parametrize(
    ("pair", "fields", "dtype"),
    [
        pytest.param(pair, fields, dtype, id=f"{'-'.join(fields) or 'default'}-{dtype}-{api}")
        for i, fields in enumerate(FIELDS)
        for j, (api, pair) in enumerate(PAIRS.items())
        for dtype in ("float32", "bfloat16")
        if dtype == "float32" or (i + j) % 2 == 0
    ],
)
def test_every_field(pair, fields, dtype):
    """Parameters equal those of Flax's module. Values and gradients are as accurate as Flax's."""
    check(pair, fields, dtype)


@pytest.mark.parametrize("fields", OF_LINEN[:2], ids=lambda f: "-".join(map(str, f.values())))
def test_axes_of_linen(fields):
    check(linen_pair, fields, "float32")


def check(pair, fields, dtype):
    (parameters, ours), (expected, theirs) = pair(fields, save="input")
    assert_same(parameters, expected)
    x = X.astype(dtype)
    found, of_flax = results(ours, parameters, x), results(theirs, parameters, x)
    with jax.enable_x64(True):
        wide = {**fields, "dtype": jnp.float64, "use_fast_variance": False}
        _, (_, exactly) = pair(wide)
        y, vjp = jax.vjp(exactly, double(parameters), double(x))
        exact = y, vjp(double(D.astype(of_flax[0].dtype)))
    reference.assert_as_accurate(found, of_flax, exact)


@each
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_activation(pair, activation):
    """With `activation=`, the result is that of Flax's module followed by the activation.

    This includes calls for which our module runs Flax's code.
    """
    (parameters, ours), (_, theirs) = pair(random_init, activation=activation)

    def expected(p, x, **options):
        return getattr(jax.nn, activation)(theirs(p, x, **options))

    with jax.enable_x64(True):
        exact = results(expected, double(parameters), double(X))
    reference.assert_as_accurate(
        results(ours, parameters, X), results(expected, parameters, X), exact
    )
    (call,) = calls_in(jax.make_jaxpr(ours)(parameters, X).jaxpr)
    assert call.spec.norm.activation == activation
    mask = X > -1
    np.testing.assert_array_equal(
        ours(parameters, X, mask=mask), expected(parameters, X, mask=mask)
    )


@each
def test_what_is_left_to_flax(pair):
    """Calls with a mask or a dtype that is not floating-point have exactly Flax's results.

    If the module also has a `scale_offset`, such a call raises an error.
    """
    (parameters, ours), (_, theirs) = pair({})
    for x, options in ((X, {"mask": X > 0}), (X.astype("complex64"), {})):
        np.testing.assert_array_equal(
            ours(parameters, x, **options), theirs(parameters, x, **options)
        )
    with pytest.raises(ValueError, match=r"^GroupNorm: scale_offset=1.0 in a call that is left"):
        jaxnorm.linen.GroupNorm(num_groups=4, scale_offset=1.0).init(
            jax.random.key(0), X, mask=X > 0
        )


@pytest.mark.parametrize("fields", OF_LINEN[2:], ids=lambda f: "-".join(f))
def test_what_linen_leaves_to_flax(fields):
    def run(module):
        norm = module(num_groups=4, **fields)
        init = jax.vmap(lambda x: norm.init_with_output(jax.random.key(0), x)[0], axis_name="batch")
        return init(X[:, None])

    np.testing.assert_array_equal(run(jaxnorm.linen.GroupNorm), run(nn.GroupNorm))


@each
@pytest.mark.parametrize(
    "fields",
    [{"num_groups": 5}, {"num_groups": 0}, {"group_size": 3}, {"num_groups": None}],
    ids=str,
)
def test_groups_that_flax_refuses(pair, fields):
    """If Flax refuses `num_groups` or `group_size`, our modules raise Flax's own error."""
    with pytest.raises(ValueError, match=r"^(Number of groups|Either `num_groups`)"):
        pair(fields)


def test_channels_that_a_module_has_not():
    norm = jaxnorm.nnx.GroupNorm(CHANNELS, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^GroupNorm: x has shape \(2, 8\); expected 12 channels"):
        norm(jnp.ones((2, 8)))


def test_an_unknown_activation():
    for options in ({}, {"mask": X > 0}):
        with pytest.raises(ValueError, match="activation='tanh'; expected one of None, 'silu'"):
            jaxnorm.linen.GroupNorm(4, activation="tanh").init(jax.random.key(0), X, **options)


def test_fields_are_those_of_flax():
    """The fields are Flax's, with the same order and defaults, followed by jaxnorm's."""
    ours, theirs = (
        [(f.name, f.default) for f in dataclasses.fields(m) if f.name not in ("parent", "name")]
        for m in (jaxnorm.linen.GroupNorm, nn.GroupNorm)
    )
    assert ours[: len(theirs)] == theirs
    added = ["save", "implementation", "scale_offset", "activation"]
    assert [name for name, _ in ours[len(theirs) :]] == added
    ours, theirs = (
        [(p.name, p.kind) for p in inspect.signature(m.__init__).parameters.values()]
        for m in (jaxnorm.nnx.GroupNorm, nnx.GroupNorm)
    )
    assert ours[: len(theirs)] == theirs
    assert [name for name, _ in ours[len(theirs) :]] == added


def test_checkpoints_of_either_load_into_the_other():
    theirs, ours = nn.GroupNorm(4, **random_init), jaxnorm.linen.GroupNorm(4)
    variables = theirs.init(jax.random.key(1), X)
    stored = flax.serialization.to_bytes(variables)
    loaded = flax.serialization.from_bytes(ours.init(jax.random.key(0), X), stored)
    assert_computes(ours.apply(loaded, X), theirs.apply, variables, X, like=ours.apply)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_one_kernel_each_way(activation):
    """GroupNorm of bfloat16 images with channels last runs one kernel per pass."""
    norm = jaxnorm.linen.GroupNorm(dtype=jnp.bfloat16, activation=activation)
    x = jax.ShapeDtypeStruct((8, 32, 32, 256), jnp.bfloat16)
    variables = jax.eval_shape(norm.init, jax.random.key(0), x)

    def loss(variables, x):
        return jnp.sum(jnp.sin(norm.apply(variables, x).astype(jnp.float32)))

    assert kernels_in(jax.grad(loss, (0, 1)), variables, x) == 2
