"""The modules of jaxnorm.equinox compared with equinox's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_cases import assert_arguments_and_three_more, assert_norm_within_bounds, normal
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


@each
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: "-".join(a) or "default")
def test_a_converted_norm_is_one_that_was_made(ours, theirs, arguments):
    norm = theirs((3, 4), **arguments)
    converted = jaxnorm.equinox.convert(norm, save="input", implementation="xla")
    made = ours((3, 4), **arguments, save="input", implementation="xla")
    assert jax.tree.structure(converted) == jax.tree.structure(made)
    assert all(a is b for a, b in zip(jax.tree.leaves(converted), jax.tree.leaves(norm)))
