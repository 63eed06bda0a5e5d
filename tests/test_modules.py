"""The norm modules of jaxnorm.linen, nnx and equinox, compared with the libraries' own."""

import dataclasses
import inspect
import re
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_cases import LIBRARIES, assert_same, normal
from flax import nnx
from program_error import assert_computes, assert_same_results
from programs import kernels_in

import jaxnorm.equinox
import jaxnorm.linen
import jaxnorm.nnx
from jaxnorm.models import conversion
from jaxnorm.tools.plan import calls_in

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

random = nn.initializers.normal(1.0)
random_init = {"scale_init": random, "bias_init": random}
SHAPES = {"GroupNorm": (3, 5, 4, 12), "LayerNorm": (4, 5, 16), "RMSNorm": (4, 5, 16)}


class Module(NamedTuple):
    """A norm class of a library."""

    framework: Any
    name: str

    @property
    def ours(self):
        return getattr(self.framework.ours, self.name)

    @property
    def theirs(self):
        return getattr(self.framework.theirs, self.name)

    def data(self, dtype="float32", seed=0):
        return normal(SHAPES[self.name], seed, dtype)

    def made(self, kind, **fields):
        """Return a norm of jaxnorm's or of the library's class."""
        if self.name == "GroupNorm":
            fields = {"num_groups": 4} | fields
        sizes = {1: 5, (1, 2): 80}
        width = sizes.get(fields.get("feature_axes"), SHAPES[self.name][-1])
        return self.framework.make(kind, width, **fields)

    def run(self, kind, x=None, **fields):
        """Return the parameters of such a norm, and a function of them, x and a call's options."""
        x = self.data() if x is None else x
        return self.framework.functional(self.made(kind, **fields), x=x)

    def both(self, x=None, *, fields=None, **added):
        """Return parameters, and the functions of ours and theirs. `added` are fields of ours."""
        fields = fields or {}
        parameters, ours = self.run(self.ours, x, **fields, **added)
        expected, theirs = self.run(self.theirs, x, **fields)
        assert_same(parameters, expected)
        return parameters, ours, theirs


MODULES = {
    f"{library}-{name}": Module(LIBRARIES[library], name)
    for library in LIBRARIES
    for name in SHAPES
    if (library, name) != ("equinox", "GroupNorm")
}


def each(*libraries, names=tuple(SHAPES)):
    chosen = {n: m for n, m in MODULES.items() if m.framework.name in libraries and m.name in names}
    return pytest.mark.parametrize("module", chosen.values(), ids=list(chosen))


ROWS = ("LayerNorm", "RMSNorm")
each_module, each_of_flax = each(*LIBRARIES), each("linen", "nnx")
each_of_rows = each("linen", "nnx", names=ROWS)
each_save = pytest.mark.parametrize("save", ["output", "input"])


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
    {"num_groups": 1},
    {"num_groups": 12},
    {"num_groups": None, "group_size": 6},
    # The next fields exist only in linen's modules, and the last ones only in nnx's.
    {"reduction_axes": (-1, -2), "feature_axes": (-2, -1), "name": "norm"},
    {"force_float32_reductions": False},
    {"promote_dtype": lambda operands, *, dtype: operands},
    {"scale_metadata": {"note": "gain"}},
    {"bias_metadata": {"note": "shift"}},
]
OF_GROUPS = [
    {"reduction_axes": (1, 2, -1)},
    {"reduction_axes": (-3, 2, 3)},
    # For nnx, these are left out: it repeats parameters along a wrong axis.
    {"reduction_axes": (2, 3), "name": "norm"},
    {"reduction_axes": (0, 1, 2, 3), "name": "norm"},
]
OF_EQUINOX = {"epsilon", "param_dtype", "use_scale", "use_bias", "scale_init", "bias_init"}


def known(module):
    if module.framework.name == "equinox":
        return OF_EQUINOX
    if module.framework.name == "linen":
        return {f.name for f in dataclasses.fields(module.theirs)}
    return {*inspect.signature(module.theirs.__init__).parameters}


# Each module is tested with all fields that it has, and each field with all dtypes. Both values of
# `save` occur with every field, with every dtype, and with every module.
@pytest.mark.parametrize(
    ("name", "fields", "dtype", "save"),
    [
        pytest.param(
            *(name, fields, dtype, save),
            id=f"{name}-{'-'.join(fields) or 'default'}-{j}-{dtype}-{save}",
        )
        for i, (name, module) in enumerate(MODULES.items())
        for j, fields in enumerate(FIELDS + OF_GROUPS * (module.name == "GroupNorm"))
        if {*fields} <= known(module)
        for k, dtype in enumerate(["float32", "bfloat16", "float16"])
        for save in [("output", "input")[(i + j + k) % 2]]
    ],
)
def test_every_field(name, fields, dtype, save):
    module = MODULES[name]
    x = module.data(dtype)
    parameters, ours, theirs = module.both(x, fields=fields, save=save)
    if "scale_metadata" in fields:
        assert module.made(module.ours, **fields).scale.get_metadata("note") == "gain"
    assert_same_results(lambda: ours(parameters, x), lambda: theirs(parameters, x))
    # Derivatives are those of the function that the module calls.
    is_left = "axis_name" in fields or "force_float32_reductions" in fields
    is_left |= fields.get("feature_axes") == -1
    saved = re.findall(r"save=(\w+)", str(jax.make_jaxpr(ours)(parameters, x)))
    assert saved == ([] if is_left else [save])


@each_of_flax
def test_what_is_left_to_flax(module):
    """Calls with a mask or a dtype that is not floating-point have exactly Flax's results.

    With a residual, they also return h. If the module has a `scale_offset`, such a call raises an
    error.
    """
    parameters, ours, theirs = module.both()
    x = module.data()
    # The nnx modules cast integers to floats and run our code.
    dtypes = ["complex64", *(["int32"] if module.framework.name == "linen" else [])]
    for a, options in ((x, {"mask": x > 0}), *((x.astype(dtype), {}) for dtype in dtypes)):
        assert_same(ours(parameters, a, **options), theirs(parameters, a, **options))
    if module.framework.name == "linen":
        made, expected = (
            module.made(kind)().init(jax.random.key(1), x, mask=x > 0)
            for kind in (module.ours, module.theirs)
        )
        assert_same(made, expected)
    elif module.name == "RMSNorm":  # The mask may be positional, as in Flax.
        results = [module.made(kind)(x, x > 0) for kind in (module.ours, module.theirs)]
        assert_same(*results)
    if module.name != "GroupNorm":
        residual, mask = jnp.sin(module.data("bfloat16")), x > -1
        y, h = ours(parameters, x, mask=mask, residual=residual)
        assert h.dtype == residual.dtype
        assert_same(y, theirs(parameters, h, mask=mask))
    _, offset = module.run(module.ours, scale_offset=1.0)
    with pytest.raises(ValueError, match=r"Norm: scale_offset=1\.0 in a call that is left to Flax"):
        offset(parameters, x, mask=x > 0)


@each_module
def test_signatures_are_the_library_s_and_jaxnorm_s(module):
    """Constructors and calls have the same parameters as the library's, followed by jaxnorm's own.

    So `help` and editors show correct signatures.
    """
    ours, theirs = module.ours, module.theirs
    extra = {"save": "output", "implementation": None, "scale_offset": 0.0}
    is_group = module.name == "GroupNorm"
    added = extra | ({"activation": None} if is_group else {})
    assert issubclass(ours, theirs)

    def parameters(function):
        found = inspect.signature(function).parameters.values()
        return {p.name: (p.kind, p.default) for p in found}

    keyword = inspect.Parameter.KEYWORD_ONLY
    if module.framework.name != "equinox":
        residual = {} if is_group else {"residual": keyword}
        ours_call, theirs_call = (parameters(kind.__call__) for kind in (ours, theirs))
        kinds = {name: kind for name, (kind, _) in theirs_call.items()}
        assert {name: kind for name, (kind, _) in ours_call.items()} == kinds | residual
    if module.framework.name == "linen":
        expected = {n: p for n, p in parameters(theirs).items() if n not in ("parent", "name")}
        assert [*parameters(ours).items()][: len(expected)] == [*expected.items()]
        fields = {f.name: f.default for f in dataclasses.fields(ours)}
        assert added.items() <= fields.items()
        return
    expected = parameters(theirs.__init__) | {n: (keyword, v) for n, v in added.items()}
    assert [*parameters(ours.__init__).items()] == [*expected.items()]
    with pytest.raises(TypeError, match="unexpected keyword argument 'eps_'"):
        module.made(ours, eps_=1e-3)


@each_module
def test_scale_offset(module):
    """With scale_offset=1, as in Gemma, the normalised x is multiplied by 1 + scale."""
    x = module.data()
    parameters, plain = module.run(module.ours)
    zeros, offset = module.run(module.ours, scale_offset=1.0, scale_init=nn.initializers.zeros)
    np.testing.assert_array_equal(zeros["scale"], 0)
    y = offset(zeros, x)
    assert_computes(y, lambda: plain(parameters, x), like=lambda: offset(zeros, x))


@each_of_rows
@each_save
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"dtype": jnp.bfloat16}, {"use_scale": False}, {"reduction_axes": 1, "feature_axes": 1}],
    ids=lambda f: "-".join(f) or "default",
)
def test_residual(module, fields, x_dtype, save):
    """With a residual, a module returns two results, y and h.

    h is x + residual in the residual's dtype, and y is the result of Flax's norm for h.
    """
    x, residual = module.data(x_dtype), jnp.sin(module.data())
    parameters, ours, theirs = module.both(residual, fields=fields, save=save)

    def plain():
        h = x + residual
        return theirs(parameters, h), h

    assert_same_results(lambda: ours(parameters, x, residual=residual), plain)


# ------------------------------------------------------------------------------------- group norms


@each("linen", "nnx", names=["GroupNorm"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_activation(module, activation):
    """With `activation=`, the result is that of Flax's module followed by the activation.

    This includes calls for which our module runs Flax's code.
    """
    parameters, ours, theirs = module.both(fields=random_init, activation=activation)
    x = module.data()

    def expected(p, x, **options):
        return getattr(jax.nn, activation)(theirs(p, x, **options))

    assert_same_results(lambda: ours(parameters, x), lambda: expected(parameters, x))
    (call,) = calls_in(jax.make_jaxpr(ours)(parameters, x).jaxpr)
    assert call.spec.norm.activation == activation
    mask = x > -1
    assert_same(ours(parameters, x, mask=mask), expected(parameters, x, mask=mask))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_one_kernel_each_way(activation):
    """GroupNorm of bfloat16 images with channels last runs one kernel per pass."""
    norm = jaxnorm.linen.GroupNorm(dtype=jnp.bfloat16, activation=activation)
    x = jax.ShapeDtypeStruct((8, 32, 32, 256), jnp.bfloat16)
    variables = jax.eval_shape(norm.init, jax.random.key(0), x)

    def loss(variables, x):
        return jnp.sum(jnp.sin(norm.apply(variables, x).astype(jnp.float32)))

    assert kernels_in(jax.grad(loss, (0, 1)), variables, x) == 2


# ------------------------------------------------------------------------------- linen or nnx alone


def test_parameters_are_cast_to_dtype_first():
    """The option dtype=bfloat16 rounds a float32 x before its statistics, as in Flax."""
    x, rngs = 100 + normal((4, 5, 16)), nnx.Rngs(0)
    options = {"dtype": jnp.bfloat16, "use_fast_variance": False, "rngs": rngs}
    ours, theirs = (module.LayerNorm(16, **options) for module in (jaxnorm.nnx, nnx))
    rounded = x.astype(jnp.bfloat16)
    assert_same(ours(x), ours(rounded))
    assert_same_results(lambda: ours(rounded), lambda: theirs(rounded))
    # bfloat16's spacing near 100 is half the standard deviation of x.
    assert np.abs(ours(x) - jaxnorm.nnx.LayerNorm(16, rngs=rngs)(x)).max() > 0.1


def test_nnx_modules_in_functions():
    """A parameter is an array to jaxnorm's functions, and a module an argument of nnx.jit."""
    x, norm = normal((4, 16)), nnx.RMSNorm(16, rngs=nnx.Rngs(0))
    y = jaxnorm.rms_norm(x, norm.scale)
    assert_computes(y, norm, x, like=lambda x: jaxnorm.rms_norm(x, norm.scale))
    ours = jaxnorm.nnx.convert(norm)
    assert_computes(nnx.jit(lambda m, x: m(x))(ours, x), ours, x)


# ------------------------------------------------------------------------------------------ equinox


@pytest.mark.parametrize("dtype", ["float32", "int32", "complex64", "NumPy's float64"])
@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        *((name, (shape,), shape) for name in ROWS for shape in [(), (3, 4), (0,)]),
        ("GroupNorm", (4, 8), (8, 3)),
    ],
)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # equinox's own warning
def test_shapes_and_dtypes_are_equinox_s(name, arguments, shape, dtype):
    """If x has no supported float dtype, no axes or no elements, equinox's own code runs."""
    x = 9 * normal(shape)
    x = np.asarray(x, "float64") if dtype == "NumPy's float64" else x.astype(dtype)
    ours, theirs = (
        jax.tree.map(lambda a: a + normal(a.shape, 1, a.dtype), kind(*arguments))
        for kind in (getattr(jaxnorm.equinox, name), getattr(eqx.nn, name))
    )
    y, expected = ours(x), theirs(x)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    if x.dtype in ("int32", "complex64") or not shape or not x.size:
        np.testing.assert_array_equal(y, expected)
    else:
        assert_computes(y, theirs, x.astype("float32"), like=ours)
    state = object()
    y, same = ours(x, state, key=jax.random.key(0))
    assert same is state
    assert y.shape == x.shape


# ------------------------------------------------------------------------------------------- errors

NO_MODE, NO_AXIS = "save='both'; expected one of", r"Norm: axis=3 is out of range for x with"
NO_ACTIVATION = "activation='tanh'; expected one of None, 'silu'"
OFFSET = r"Norm: scale_offset=1\.0 with an x of shape \(16,.*\) and dtype int32"
CHANNELS = "^GroupNorm: x has shape .* channels on its first axis"
FLAX_S_OWN = "^(Number of groups|Either `num_groups`)"
OUT_OF_RANGE = {"reduction_axes": 3, "feature_axes": 3}


@pytest.mark.parametrize(
    ("library", "name", "arguments", "fields", "shape", "message"),
    [
        ("linen", "LayerNorm", [], {"save": "both"}, (4, 16), NO_MODE),
        ("nnx", "RMSNorm", [16], {"save": "both"}, (4, 16), NO_MODE),
        ("equinox", "RMSNorm", [16], {"save": "both"}, (16,), NO_MODE),
        ("linen", "RMSNorm", [], OUT_OF_RANGE, (2, 3, 4), NO_AXIS),
        ("nnx", "LayerNorm", [4], OUT_OF_RANGE, (2, 3, 4), NO_AXIS),
        *(
            ("nnx", name, [16], {}, (5, 32), r"32 features .* \(1,\); expected 16.*\(32, \.\.\.")
            for name in ROWS
        ),
        ("nnx", "GroupNorm", [12, 4], {}, (2, 8), r"x has shape \(2, 8\); expected 12 channels"),
        ("linen", "GroupNorm", [4], {"reduction_axes": 1}, (2, 3, 8), "include the final dimens"),
        *(
            (library, "GroupNorm", sizes, fields, (3, 12), FLAX_S_OWN)
            for library, sizes in (("linen", []), ("nnx", [12]))
            for fields in ({"num_groups": 5}, {"num_groups": 0}, {"group_size": 3})
        ),
        ("linen", "GroupNorm", [4], {"activation": "tanh"}, (2, 8), NO_ACTIVATION),
        ("linen", "GroupNorm", [4], {"activation": "tanh", "mask": True}, (2, 8), NO_ACTIVATION),
        *(
            ("equinox", name, [4], {}, (2, 4), r"shape \(2, 4\); expected \(4,\).*jax\.vmap")
            for name in ROWS
        ),
        ("equinox", "LayerNorm", [16], {"scale_offset": 1.0, "x": int}, (16,), OFFSET),
        ("equinox", "GroupNorm", [4, 16], {"scale_offset": 1.0, "x": int}, (16, 3), OFFSET),
        ("equinox", "GroupNorm", [4, 8], {}, (12,), CHANNELS),
        ("equinox", "GroupNorm", [4], {"channelwise_affine": False}, (6,), CHANNELS),
        ("equinox", "GroupNorm", [4, 8], {}, (), CHANNELS),
    ],
)
def test_errors(library, name, arguments, fields, shape, message):
    fields = dict(fields)
    x, options = jnp.ones(shape, fields.pop("x", None)), {}
    if fields.pop("mask", False):
        options["mask"] = x > 0
    if library == "nnx":
        fields["rngs"] = nnx.Rngs(0)

    def call():
        norm = getattr(LIBRARIES[library].ours, name)(*arguments, **fields)
        return norm.init(jax.random.key(0), x, **options) if library == "linen" else norm(x)

    with pytest.raises(ValueError, match=message):
        call()


def test_a_package_that_is_not_installed():
    command = r'with: pip install -e "\.\[no_package\]"$'
    with (
        pytest.raises(ImportError, match=f"^jaxnorm.x needs x, which is not installed.*{command}"),
        conversion.needed("no_package", "jaxnorm.x needs x"),
    ):
        pass
