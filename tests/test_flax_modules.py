"""LayerNorm and RMSNorm of jaxnorm.linen and jaxnorm.nnx, compared with Flax's own.

The tests cover fields, parameters, values, dtypes and gradients. GroupNorm is in
`test_group_norm_modules`.
"""

import dataclasses
import inspect
from typing import Any, NamedTuple

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_cases import EXTRA, assert_arguments_and_three_more, assert_same
from flax import nnx
from program_error import assert_computes, assert_same_results
from programs import names as names_in
from reference import Norm, assert_within, exact

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

random = nn.initializers.normal(1.0)


def data(dtype="float32", shape=(4, 5, 16)):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def keep_dtypes(operands, *, dtype):
    """A user-defined `promote_dtype` that leaves all dtypes unchanged."""
    del dtype
    return operands


# Each entry sets some fields of the tested modules. Every field of Flax's modules is set in at
# least one entry.
FIELDS = [
    {},
    {"epsilon": 1e-2},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.float32},
    {"param_dtype": jnp.bfloat16},
    {"use_bias": False},
    {"use_scale": False},
    {"use_bias": False, "use_scale": False},
    {"bias_init": random},
    {"scale_init": random},
    {"reduction_axes": 1, "feature_axes": 1},
    {"reduction_axes": (1, 2), "feature_axes": (1, 2)},
    {"reduction_axes": (1, 2), "feature_axes": -1},
    {"axis_name": "batch"},
    {"axis_index_groups": [[0, 1], [2, 3]]},  # has an effect only together with axis_name
    {"use_fast_variance": False},
    # The next fields exist only in linen's modules, and the last ones only in nnx's.
    {"reduction_axes": (-1, -2), "feature_axes": (-2, -1), "name": "norm"},
    {"force_float32_reductions": False},
    {"promote_dtype": keep_dtypes},
    {"scale_metadata": {"note": "gain"}},
    {"bias_metadata": {"note": "shift"}},
]


class Module(NamedTuple):
    """A module, its parameters (a tree), and `apply`, which calls it on parameters and x."""

    module: Any
    parameters: Any
    apply: Any

    def __call__(self, x, **call):
        return self.apply(self.parameters, x, **call)


def mapped(norm, function):
    """Return `function`, under `jax.vmap` if the norm has an `axis_name`."""
    return function if norm.axis_name is None else jax.vmap(function, axis_name=norm.axis_name)


def linen(module, x=None, **fields):
    norm = module(**fields)
    init = mapped(norm, lambda x: norm.init(jax.random.key(1), x))

    def apply(variables, x, **call):
        return mapped(norm, lambda v, x: norm.apply(v, x, **call))(variables, x)

    return Module(norm, init(data() if x is None else x), apply)


def of_nnx(module, x=None, **fields):
    del x
    sizes = {1: 5, (1, 2): 80}
    norm = module(sizes.get(fields.get("feature_axes"), 16), **fields, rngs=nnx.Rngs(1))
    graph, state = nnx.split(norm)

    def apply(state, x, **call):
        merged = nnx.merge(graph, state)
        return mapped(norm, lambda x: merged(x, **call))(x)

    return Module(norm, state, apply)


MODULES = {
    f"{api}-{name}": (make, getattr(ours, name), getattr(theirs, name))
    for api, make, ours, theirs in (
        ("linen", linen, jaxnorm.linen, nn),
        ("nnx", of_nnx, jaxnorm.nnx, nnx),
    )
    for name in ("LayerNorm", "RMSNorm")
}
each = pytest.mark.parametrize(("make", "ours", "theirs"), MODULES.values(), ids=list(MODULES))
each_of_nnx = pytest.mark.parametrize(
    ("ours", "theirs"), [m[1:] for n, m in MODULES.items() if "nnx" in n]
)
each_save = pytest.mark.parametrize("save", ["output", "input"])


def known(make, module):
    if make is linen:
        return {f.name for f in dataclasses.fields(module)}
    return {*inspect.signature(module.__init__).parameters}


def values_of(parameters):
    return nnx.to_pure_dict(parameters) if isinstance(parameters, nnx.State) else parameters


# Each module is tested with all fields that it has (RMSNorm has no bias), and each field with all
# dtypes. Each case has one of the two values of `save`. Both values occur with every field, with
# every dtype, and with every module.
@pytest.mark.parametrize(
    ("name", "fields", "dtype", "save"),
    [
        pytest.param(
            *(name, fields, dtype, save),
            id=f"{name}-{'-'.join(fields) or 'default'}-{dtype}-{save}",
        )
        for i, (name, (make, _, theirs)) in enumerate(MODULES.items())
        for j, fields in enumerate(FIELDS)
        if {*fields} <= known(make, theirs)
        for k, dtype in enumerate(["float32", "bfloat16", "float16"])
        for save in [("output", "input")[(i + j + k) % 2]]
    ],
)
def test_every_field(name, fields, dtype, save):
    make, ours, theirs = MODULES[name]
    x = data(dtype)
    ours, theirs = make(ours, x, **fields, save=save), make(theirs, x, **fields)
    assert_same(values_of(ours.parameters), values_of(theirs.parameters))
    if "scale_metadata" in fields:
        assert ours.module.scale.get_metadata("note") == "gain"
    assert_same_results(lambda: ours(x), lambda: theirs(x))


@each
@each_save
def test_gradients(make, ours, theirs, save):
    x, fields = data(), {"scale_init": random}

    def gradients(module):
        def loss(parameters, x):
            return jnp.sum(module.apply(parameters, x) ** 3)

        return jax.tree.leaves(jax.grad(loss, (0, 1))(module.parameters, x))

    ours, theirs = make(ours, **fields, save=save), make(theirs, **fields)
    assert_same_results(lambda: gradients(ours), lambda: gradients(theirs))


@each
def test_a_mask_is_left_to_flax(make, ours, theirs):
    x, mask = data(), data() > 0
    ours, theirs = make(ours), make(theirs)
    assert_same(ours(x, mask=mask), theirs(x, mask=mask))
    if make is linen:
        made = ours.module.init(jax.random.key(1), x, mask=mask)
        assert_same(made, theirs.parameters)
    elif type(theirs.module) is nnx.RMSNorm:
        assert_same(ours.module(x, mask), theirs.module(x, mask))  # positional, as in Flax


@each
def test_other_dtypes_are_left_to_flax(make, ours, theirs):
    # For complex arrays, our modules run Flax's code. For integers, only our linen modules do. The
    # nnx modules cast integers to floats and run our code, so they are not tested with integers
    # here.
    for dtype in ("complex64", *(["int32"] if make is linen else [])):
        x = data().astype(dtype)
        assert_same(make(ours)(x), make(theirs)(x))


@each
def test_signatures_are_flax_s_and_three_more(make, ours, theirs):
    """Constructors and calls have the same parameters as in Flax, followed by jaxnorm's own.

    So type checkers and editors show correct signatures.
    """

    def call(module):
        return [(p.name, p.kind) for p in inspect.signature(module.__call__).parameters.values()]

    assert call(ours) == [*call(theirs), ("residual", inspect.Parameter.KEYWORD_ONLY)]
    if make is linen:

        def described(module):
            return {f.name: (f.default, f.init) for f in dataclasses.fields(module)}

        def parameters(module):
            found = inspect.signature(module).parameters.values()
            return [(p.name, p.kind, p.default) for p in found]

        assert described(ours) == described(theirs) | {n: (v, True) for n, v in EXTRA.items()}
        positional = [p for p in parameters(theirs) if p[0] not in ("parent", "name")]
        assert parameters(ours)[: len(positional)] == positional
        return

    assert_arguments_and_three_more(ours, theirs)
    with pytest.raises(TypeError, match="rngs"):
        ours(16)


@each
def test_scale_offset(make, ours, theirs):
    """With scale_offset=1, as in Gemma, the normalised x is multiplied by 1 + scale."""
    x, plain = data(), make(ours)
    offset = make(ours, scale_offset=1.0, scale_init=nn.initializers.zeros)
    scales = values_of(offset.parameters)
    np.testing.assert_array_equal(scales.get("params", scales)["scale"], 0)
    assert_computes(offset(x), plain, x, like=offset)
    # A call with a mask runs Flax's code, which does not support `scale_offset`.
    with pytest.raises(ValueError, match=r"scale_offset=1\.0 in a call that is left to Flax's own"):
        offset(x, mask=jnp.ones(x.shape, bool))


@each
def test_parameters_of_flax_load(make, ours, theirs):
    x, trained, norm = data(), make(theirs, scale_init=random), make(ours)
    if make is linen:
        stored = flax.serialization.to_bytes(trained.parameters)
        loaded = flax.serialization.from_bytes(norm.parameters, stored)
        assert_same_results(lambda: norm.apply(loaded, x), lambda: trained(x))
    else:
        nnx.update(norm.module, nnx.state(trained.module))
        assert_same_results(lambda: norm.module(x), lambda: trained(x))


@each
def test_errors_reach_the_user(make, ours, theirs):
    with pytest.raises(ValueError, match="save='both'; expected one of"):
        make(ours, save="both")(data())
    with pytest.raises(ValueError, match=r"Norm: axis=3 is out of range for x with shape"):
        make(ours, reduction_axes=3, feature_axes=3)(data())


@each
@each_save
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"dtype": jnp.bfloat16}, {"use_scale": False}, {"reduction_axes": 1, "feature_axes": 1}],
    ids=lambda f: "-".join(f) or "default",
)
def test_residual(make, ours, theirs, fields, x_dtype, save):
    """With a residual, a module returns two results, y and h.

    h is x + residual in the residual's dtype, and y is the result of Flax's norm for h.
    """
    x, residual = data(x_dtype), jnp.sin(data())
    ours, theirs = make(ours, residual, **fields, save=save), make(theirs, residual, **fields)
    assert_same(values_of(ours.parameters), values_of(theirs.parameters))

    def plain():
        h = x + residual
        return theirs(h), h

    assert_same_results(lambda: ours(x, residual=residual), plain)


@each
def test_residual_of_a_call_that_is_left_to_flax(make, ours, theirs):
    x, residual, mask = data(), jnp.sin(data("bfloat16")), data() > -1
    y, h = make(ours)(x, mask=mask, residual=residual)
    assert h.dtype == residual.dtype
    assert_same(y, make(theirs)(h, mask=mask))


@each
def test_the_saving_rule_is_used(make, ours, theirs):
    """The arrays that a norm saves have names, so policies can refer to them.

    Calls that run Flax's code have no such names.
    """
    x = data()

    def names(module, **call):
        def forward(parameters):
            return jax.vjp(lambda p: module.apply(p, x, **call), parameters)[0]

        return "jaxnorm_out" in names_in(jax.make_jaxpr(forward)(module.parameters))

    ours = make(ours)
    assert names(ours)
    assert not names(ours, mask=x > 0)
    assert not names(make(theirs))


# ------------------------------------------------------------- tests of linen alone, and of nnx
# alone


def test_bfloat16_input_with_float32_parameters_gives_float32():
    x = data("bfloat16")
    assert linen(jaxnorm.linen.LayerNorm)(x).dtype == "float32"
    assert linen(jaxnorm.linen.LayerNorm, dtype=jnp.bfloat16)(x).dtype == "bfloat16"


def test_variance_is_stable_whatever_use_fast_variance_says():
    x = 1e4 + data()
    rows = exact(x).reshape(-1, x.shape[-1])
    zeros = np.zeros_like(rows)
    expected = Norm(rows, 1 + zeros[0], zeros[0], zeros, True, 1e-6, "input", "float32", "float32")
    for fast in (True, False):
        y = linen(jaxnorm.linen.LayerNorm, use_fast_variance=fast)(x)
        assert_within(np.reshape(y, rows.shape), expected.y, expected.y_bound())


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


@each_of_nnx
def test_a_wrong_width(ours, theirs):
    message = r"32 features on its axes \(2,\); expected 16.*\(32, \.\.\."
    with pytest.raises(ValueError, match=message):
        of_nnx(ours)(data(shape=(4, 5, 32)))


def test_parameters_are_cast_to_dtype_first():
    """As in Flax, dtype=bfloat16 rounds the float32 x before its statistics are computed."""
    x = 100 + data()
    ours, theirs = (
        of_nnx(m, dtype=jnp.bfloat16).module for m in (jaxnorm.nnx.LayerNorm, nnx.LayerNorm)
    )
    theirs.use_fast_variance = False
    rounded = x.astype(jnp.bfloat16)
    assert_same(ours(x), ours(rounded))
    assert_same_results(lambda: ours(rounded), lambda: theirs(rounded))
    # bfloat16's spacing near 100 is half the standard deviation of x.
    assert np.abs(ours(x) - of_nnx(jaxnorm.nnx.LayerNorm)(x)).max() > 0.1


def test_a_param_is_an_array_to_the_functions():
    module = of_nnx(nnx.RMSNorm).module
    y = jaxnorm.rms_norm(data(), module.scale)
    assert_computes(y, module, data(), like=lambda x: jaxnorm.rms_norm(x, module.scale))


def test_under_nnx_jit():
    x, module = data(), of_nnx(jaxnorm.nnx.LayerNorm).module
    assert_computes(nnx.jit(lambda m, x: m(x))(module, x), module, x)
