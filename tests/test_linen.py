"""jaxnorm.linen against Flax's own modules: fields, parameters, values, dtypes, gradients."""

import dataclasses
import inspect

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_error import assert_computes, assert_same_results
from reference import Norm, assert_within, exact

import jaxnorm.linen

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

PAIRS = {"LayerNorm": (jaxnorm.linen.LayerNorm, nn.LayerNorm)}
PAIRS["RMSNorm"] = (jaxnorm.linen.RMSNorm, nn.RMSNorm)
each = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=list(PAIRS))
each_save = pytest.mark.parametrize("save", ["output", "input"])

# One entry or more for every field of Flax's modules.
FIELDS = [
    {},
    {"epsilon": 1e-2},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.float32},
    {"param_dtype": jnp.bfloat16},
    {"use_bias": False},
    {"use_scale": False},
    {"use_bias": False, "use_scale": False},
    {"bias_init": nn.initializers.normal(1.0)},
    {"scale_init": nn.initializers.normal(1.0)},
    {"reduction_axes": (1, 2), "feature_axes": (1, 2)},
    {"reduction_axes": (-1, -2), "feature_axes": (-2, -1)},
    {"reduction_axes": 1, "feature_axes": 1},
    {"reduction_axes": (1, 2), "feature_axes": -1},
    {"axis_name": "batch"},
    {"axis_index_groups": [[0, 1], [2, 3]]},  # without axis_name it means nothing
    {"use_fast_variance": False},
    {"force_float32_reductions": False},
    {"name": "norm"},
]


def data(dtype="float32", shape=(4, 5, 16)):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def accepted(module, fields):
    return set(fields) <= {f.name for f in dataclasses.fields(module)}


def run(module, x, **call):
    """(variables, output); batched where a named axis is asked for."""
    if module.axis_name is None:
        return module.init_with_output(jax.random.key(1), x, **call)[::-1]
    variables = jax.vmap(
        lambda x: module.init(jax.random.key(1), x, **call), axis_name=module.axis_name
    )(x)
    return variables, applied(module, variables, x, **call)


def applied(module, variables, x, **call):
    if module.axis_name is None:
        return module.apply(variables, x, **call)
    return jax.vmap(lambda v, x: module.apply(v, x, **call), axis_name=module.axis_name)(
        variables, x
    )


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


@each
@each_save
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fields", FIELDS, ids=lambda f: "-".join(f) or "default")
def test_every_field(ours, theirs, fields, dtype, save):
    if not accepted(theirs, fields):
        return  # RMSNorm has no bias
    x = data(dtype)
    ours, theirs = ours(**fields, save=save), theirs(**fields)
    variables, _ = run(ours, x)
    assert_same(variables, run(theirs, x)[0])
    assert_same_results(lambda: applied(ours, variables, x), lambda: applied(theirs, variables, x))


@each
@each_save
def test_gradients(ours, theirs, save):
    x = data()
    fields = {"scale_init": nn.initializers.normal(1.0)}
    variables = theirs(**fields).init(jax.random.key(1), x)

    def grads(module):
        def loss(variables, x):
            return jnp.sum(module.apply(variables, x) ** 3)

        return jax.grad(loss, argnums=(0, 1))(variables, x)

    assert_same_results(lambda: grads(ours(**fields, save=save)), lambda: grads(theirs(**fields)))


@each
def test_mask_is_left_to_flax(ours, theirs):
    x, mask = data(), data() > 0
    variables = theirs().init(jax.random.key(0), x)
    assert_same(ours().apply(variables, x, mask=mask), theirs().apply(variables, x, mask=mask))
    assert_same(ours().init(jax.random.key(0), x, mask=mask), variables)


@each
@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_other_dtypes_are_left_to_flax(ours, theirs, dtype):
    x = data().astype(dtype)
    variables = theirs().init(jax.random.key(0), x)
    y, expected = ours().apply(variables, x), theirs().apply(variables, x)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)


@each
def test_fields_and_signature_are_flax_s(ours, theirs):
    def described(module):
        return {f.name: (f.default, f.init) for f in dataclasses.fields(module)}

    extra = {
        "save": ("output", True),
        "implementation": (None, True),
        "scale_offset": (0.0, True),
    }
    assert described(ours) == {**described(theirs), **extra}

    def parameters(module):
        return [(p.name, p.kind, p.default) for p in inspect.signature(module).parameters.values()]

    def call(module):
        return [(p.name, p.kind) for p in inspect.signature(module.__call__).parameters.values()]

    assert call(ours) == [*call(theirs), ("residual", inspect.Parameter.KEYWORD_ONLY)]
    positional = [p for p in parameters(theirs) if p[0] not in ("parent", "name")]
    assert parameters(ours)[: len(positional)] == positional


@each
def test_scale_offset(ours, theirs):
    """Parameters stored as w, where the norm multiplies by 1 + w: Gemma's."""
    x = data()
    plain, offset = ours(), ours(scale_offset=1.0, scale_init=nn.initializers.zeros)
    variables = plain.init(jax.random.key(0), x)
    shifted = jax.tree.map(jnp.copy, variables)
    shifted["params"]["scale"] = variables["params"]["scale"] - 1
    np.testing.assert_array_equal(offset.init(jax.random.key(0), x)["params"]["scale"], 0)
    assert_computes(
        offset.apply(shifted, x),
        plain.apply,
        variables,
        x,
        like=lambda *_: offset.apply(shifted, x),
    )
    # Flax's own code, which runs such a call, has no offset.
    with pytest.raises(ValueError, match=r"scale_offset=1\.0 in a call that is left to Flax's own"):
        offset.apply(shifted, x, mask=jnp.ones(x.shape, bool))


@each
def test_flax_checkpoint_loads(ours, theirs):
    x = data()
    fields = {"scale_init": nn.initializers.normal(1.0)}
    stored = flax.serialization.to_bytes(theirs(**fields).init(jax.random.key(3), x))
    variables = flax.serialization.from_bytes(ours().init(jax.random.key(0), x), stored)
    assert_same_results(lambda: ours().apply(variables, x), lambda: theirs().apply(variables, x))


def test_bfloat16_input_with_float32_parameters_gives_float32():
    x = data("bfloat16")
    assert run(jaxnorm.linen.LayerNorm(), x)[1].dtype == "float32"
    assert run(jaxnorm.linen.LayerNorm(dtype=jnp.bfloat16), x)[1].dtype == "bfloat16"


def test_variance_is_stable_whatever_use_fast_variance_says():
    x = 1e4 + data()
    rows = exact(x).reshape(-1, x.shape[-1])
    zeros = np.zeros_like(rows)
    expected = Norm(rows, 1 + zeros[0], zeros[0], zeros, True, 1e-6, "input", "float32", "float32")
    for fast in (True, False):
        y = run(jaxnorm.linen.LayerNorm(use_fast_variance=fast), x)[1]
        assert_within(np.reshape(y, rows.shape), expected.y, expected.y_bound())


@each
def test_the_saving_rule_is_used(ours, theirs):
    """The norm's own residuals are named; Flax's paths have no names."""
    x = data()
    variables = theirs().init(jax.random.key(0), x)

    def names(module, **call):
        return "jaxnorm_out" in str(
            jax.make_jaxpr(lambda v: jax.vjp(lambda v: module.apply(v, x, **call), v)[0])(variables)
        )

    assert names(ours())
    assert not names(ours(), mask=x > 0)
    assert not names(theirs())


@each
def test_errors_reach_the_user(ours, theirs):
    with pytest.raises(ValueError, match="save='both'; expected one of"):
        ours(save="both").init(jax.random.key(0), data())


@each
def test_axis_out_of_range(ours, theirs):
    with pytest.raises(ValueError, match=r"Norm: axis=3 is out of range for x with shape"):
        ours(reduction_axes=3, feature_axes=3).init(jax.random.key(0), data())


def test_scan_and_remat_over_layers():
    class Block(nn.Module):
        norm: type[nn.Module]

        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(16)(self.norm()(x)), None

    def model(norm):
        block = nn.remat(Block, prevent_cse=False)
        return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(
            norm
        )

    x = data()
    variables = model(nn.LayerNorm).init(jax.random.key(0), x, None)

    def grads(norm):
        return jax.grad(lambda v: jnp.sum(model(norm).apply(v, x, None)[0] ** 2))(variables)

    assert_same_results(lambda: grads(jaxnorm.linen.LayerNorm), lambda: grads(nn.LayerNorm))


@each
@each_save
@pytest.mark.parametrize(("x_dtype", "dtype"), [("float32", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize(
    "fields",
    [{}, {"dtype": jnp.bfloat16}, {"use_scale": False}, {"reduction_axes": 1, "feature_axes": 1}],
    ids=lambda f: "-".join(f) or "default",
)
def test_residual(ours, theirs, fields, x_dtype, dtype, save):
    """(y, h): h = x + residual in the residual's dtype, and Flax's norm of h."""
    x, residual = data(x_dtype), jnp.sin(data(dtype))
    module = ours(**fields, save=save)
    variables = module.init(jax.random.key(1), x, residual=residual)
    assert_same(variables, theirs(**fields).init(jax.random.key(1), residual))

    def plain():
        h = x + residual
        return theirs(**fields).apply(variables, h), h

    assert_same_results(lambda: module.apply(variables, x, residual=residual), plain)


@each
def test_residual_of_a_call_that_is_left_to_flax(ours, theirs):
    x, residual = data(), jnp.sin(data("bfloat16"))
    mask = data() > -1
    y, h = ours().apply(ours().init(jax.random.key(1), x), x, mask=mask, residual=residual)
    assert h.dtype == residual.dtype
    expected = theirs().apply(theirs().init(jax.random.key(1), x), h, mask=mask)
    assert_same(y, expected)
