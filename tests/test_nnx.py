"""jaxnorm.nnx against Flax's own modules: every argument, the state, values, dtypes, gradients."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program_error import assert_computes, assert_same_results

import jaxnorm
import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

PAIRS = {"LayerNorm": (jaxnorm.nnx.LayerNorm, nnx.LayerNorm)}
PAIRS["RMSNorm"] = (jaxnorm.nnx.RMSNorm, nnx.RMSNorm)
each = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=list(PAIRS))
each_save = pytest.mark.parametrize("save", ["output", "input"])


def keep_dtypes(operands, *, dtype):
    """A promote_dtype of the user's own, which leaves everything as it is."""
    del dtype
    return operands


# One entry or more for every argument of Flax's modules.
ARGUMENTS = [
    {},
    {"epsilon": 1e-2},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.float32},
    {"param_dtype": jnp.bfloat16},
    {"use_bias": False},
    {"use_scale": False},
    {"use_bias": False, "use_scale": False},
    {"bias_init": nnx.initializers.normal(1.0)},
    {"scale_init": nnx.initializers.normal(1.0)},
    {"reduction_axes": 1, "feature_axes": 1, "num_features": 5},
    {"reduction_axes": (1, 2), "feature_axes": (1, 2), "num_features": 80},
    {"reduction_axes": (1, 2), "feature_axes": -1},
    {"axis_name": "batch"},
    {"axis_index_groups": [[0, 1], [2, 3]]},  # without axis_name it means nothing
    {"use_fast_variance": False},
    {"promote_dtype": keep_dtypes},
    {"scale_metadata": {"note": "gain"}},
    {"bias_metadata": {"note": "shift"}},
]


def data(dtype="float32", shape=(4, 5, 16)):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def make(module, **arguments):
    arguments = {"num_features": 16, **arguments}
    return module(arguments.pop("num_features"), **arguments, rngs=nnx.Rngs(1))


def run(module, x, **call):
    if module.axis_name is None:
        return module(x, **call)
    return jax.vmap(lambda x: module(x, **call), axis_name=module.axis_name)(x)


def assert_same(a, b):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_array_equal(a, b)


@each
@each_save
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda a: "-".join(a) or "default")
def test_every_argument(ours, theirs, arguments, dtype, save):
    known = inspect.signature(theirs.__init__).parameters
    if not set(arguments) <= set(known):
        return  # RMSNorm has no bias
    x = data(dtype)
    module, reference = make(ours, **arguments, save=save), make(theirs, **arguments)
    state, expected = (nnx.to_pure_dict(nnx.state(m)) for m in (module, reference))
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(a, b)
    if "scale_metadata" in arguments:
        assert module.scale.get_metadata("note") == "gain"
    assert_same_results(lambda: run(module, x), lambda: run(reference, x))


@each
@each_save
def test_gradients(ours, theirs, save):
    x = data()
    arguments = {"scale_init": nnx.initializers.normal(1.0)}

    def grads(module):
        def loss(module, x):
            return jnp.sum(module(x) ** 3)

        by_module, by_x = nnx.grad(loss, argnums=(0, 1))(module, x)
        return [*jax.tree.leaves(by_module), by_x]

    module, reference = make(ours, **arguments, save=save), make(theirs, **arguments)
    # Copies: what is differentiated must have been made by the program itself.
    assert_same_results(lambda: grads(nnx.clone(module)), lambda: grads(nnx.clone(reference)))


def test_mask_is_left_to_flax():
    x, mask = data(), data() > 0
    ours, theirs = make(jaxnorm.nnx.RMSNorm), make(nnx.RMSNorm)
    assert_same(ours(x, mask), theirs(x, mask))  # positional, as in Flax
    ours, theirs = make(jaxnorm.nnx.LayerNorm), make(nnx.LayerNorm)
    assert_same(ours(x, mask=mask), theirs(x, mask=mask))


@each
def test_signature_is_flax_s(ours, theirs):
    def call(module):
        return [(p.name, p.kind) for p in inspect.signature(module.__call__).parameters.values()]

    assert call(ours) == [*call(theirs), ("residual", inspect.Parameter.KEYWORD_ONLY)]
    assert issubclass(ours, theirs)
    with pytest.raises(TypeError, match="rngs"):
        ours(16)


@each
def test_arguments_are_flax_s_and_three_more(ours, theirs):
    """Each by name, so that type checkers and editors know them."""

    def parameters(module):
        return {
            p.name: (p.kind, p.default)
            for p in inspect.signature(module.__init__).parameters.values()
        }

    extra = {"save": "output", "implementation": None, "scale_offset": 0.0}
    keyword = inspect.Parameter.KEYWORD_ONLY
    known = parameters(theirs)
    assert parameters(ours) == known | {name: (keyword, value) for name, value in extra.items()}


@each
def test_scale_offset(ours, theirs):
    """Parameters stored as w, where the norm multiplies by 1 + w: Gemma's."""
    x = data()
    plain = make(ours)
    offset = make(ours, scale_offset=1.0, scale_init=nnx.initializers.zeros_init())
    assert_computes(offset(x), plain, x, like=offset)
    with pytest.raises(ValueError, match=r"scale_offset=1\.0 in a call that is left to Flax's own"):
        offset(x, mask=jnp.ones(x.shape, bool))


@each
def test_a_wrong_width(ours, theirs):
    with pytest.raises(
        ValueError, match=r"32 features on its axes \(2,\); expected 16.*\(32, \.\.\."
    ):
        make(ours)(data(shape=(4, 5, 32)))


@each
def test_flax_state_loads(ours, theirs):
    x = data()
    trained = make(theirs, scale_init=nnx.initializers.normal(1.0))
    module = make(ours)
    nnx.update(module, nnx.state(trained))
    assert_same_results(lambda: module(x), lambda: trained(x))


def test_parameters_are_cast_to_dtype_first():
    """As in Flax: with dtype=bfloat16 the float32 x is rounded before its statistics are taken."""
    x = 100 + data()
    module, reference = (
        make(m, dtype=jnp.bfloat16) for m in (jaxnorm.nnx.LayerNorm, nnx.LayerNorm)
    )
    reference.use_fast_variance = False
    rounded = x.astype(jnp.bfloat16)
    assert_same(module(x), module(rounded))
    assert_same_results(lambda: module(rounded), lambda: reference(rounded))
    # The spacing of bfloat16 at 100 is half of the standard deviation of x.
    assert np.abs(module(x) - make(jaxnorm.nnx.LayerNorm)(x)).max() > 0.1


def test_a_param_is_an_array_to_the_functions():
    module = make(nnx.RMSNorm)
    y = jaxnorm.rms_norm(data(), module.scale)
    assert_computes(y, module, data(), like=lambda x: jaxnorm.rms_norm(x, module.scale))


@each
def test_axis_out_of_range(ours, theirs):
    with pytest.raises(ValueError, match=r"Norm: axis=3 is out of range for x with shape"):
        make(ours, reduction_axes=3, feature_axes=3)(data())


def test_under_nnx_jit():
    x = data()
    module = make(jaxnorm.nnx.LayerNorm)
    assert_computes(nnx.jit(lambda m, x: m(x))(module, x), module, x)


@each
@pytest.mark.parametrize(("x_dtype", "dtype"), [("float32", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("options", [{}, {"dtype": jnp.bfloat16}, {"save": "input"}], ids=str)
def test_residual(ours, theirs, options, x_dtype, dtype):
    """(y, h): h = x + residual in the residual's dtype, and Flax's norm of h."""
    x, residual = data(x_dtype), jnp.sin(data(dtype))
    _, h = make(ours, **options)(x, residual=residual)
    assert h.dtype == residual.dtype
    assert_computes(h, jnp.add, x, residual)
    module, reference = make(ours, **options), make(theirs, dtype=options.get("dtype"))
    assert_same_results(lambda: module(x, residual=residual)[0], lambda: reference(x + residual))


@each
def test_residual_of_a_call_that_is_left_to_flax(ours, theirs):
    x, residual = data(), jnp.sin(data())
    mask = data() > -1
    y, h = make(ours)(x, mask=mask, residual=residual)
    assert_computes(h, jnp.add, x, residual)
    assert_same(y, make(theirs)(h, mask=mask))
