"""Values and gradients of every norm against float64: shapes, dtypes, options, parameters."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refused
from norms import check, expected_of, normal, tables
from pairs import KERNELS, on_each_implementation, pairwise
from reference import ACTIVATIONS, assert_within, exact, half_unit, of_roundings

import jaxnorm
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.implementation import takes_no_inner

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

NAMES, SUMS = ["layer_norm", "rms_norm"], ["add_layer_norm", "add_rms_norm"]
DTYPES = {"b": "bfloat16", "h": "float16", "f": "float32", "d": "float64"}
# The operands that a call has unless a case leaves them out.
OPERANDS = {
    "layer_norm": "scale bias",
    "rms_norm": "scale",
    "add_layer_norm": "residual scale bias",
    "add_rms_norm": "residual scale",
    "rms_norm_add": "residual scale",
    "rms_norm_add_rms_norm": "residual scale next_scale",
    "rms_norm_gated": "gate scale",
    "rms_norm_rope": "scale",
}
# The spread and the mean of each parameter.
PARAMETERS = {"scale": (0.3, 1.0), "next_scale": (0.3, 1.0), "bias": (0.3, 0.0), "gate": (0.3, 0.5)}


def checked(name, shape, x_dtype="float32", second="float32", p_dtype="float32", **given):
    """Check a norm of random x.

    Args:
      second: the dtype of the residual, the gate or the rotary tables.
      given: options, and the shapes of parameters without the normalised axes (None leaves a
        parameter out). A rotary norm also has the shape of its tables without their last axis
        (`tables`), the number of rotated columns (`rotated`) and a `factor` of the tables. With
        `scale_near_0`, some scales are near 0.
    """
    axes = np.atleast_1d(given.get("axis", -1)) % len(shape)
    normalised = tuple(shape[a] for a in sorted(axes))
    takes, operands = OPERANDS[name].split(), {}
    spreads = PARAMETERS | ({"scale": (1.0, 0.0)} if given.pop("scale_near_0", False) else {})
    if name == "rms_norm_rope":
        size = (*given.pop("tables", ()), given.pop("rotated", shape[-1]) // 2)
        operands |= zip(("cos", "sin"), tables(size, second, factor=given.pop("factor", 1.0)))
    if "residual" in takes:
        operands["residual"] = normal(shape, second, 1)
    if name == "rms_norm_gated":
        operands["gate"] = normal(shape, second, 1, scale=2.0)
    for seed, (parameter, spread) in enumerate(spreads.items(), 2):
        lead = given.pop(parameter, () if parameter in takes else None)
        if lead is not None and parameter not in operands:
            operands[parameter] = normal((*lead, *normalised), p_dtype, seed, *spread)
    return check(name, normal(shape, x_dtype, 0, shift=0.5), **operands, **given)


def grid(**axes):
    """Return the names and the values of the axes of a group of cases. A list is an axis.

    The values of the axis `of` are dicts: several options together. In a `mix` such as "bffh", each
    letter is a dtype: of x, of the second array (residual, gate or tables), of parameters and of y.
    """
    return [*axes], [value if isinstance(value, list) else [value] for value in axes.values()]


def cases(groups, combine=pairwise):
    """Yield the cases of groups, and their names, with the combinations of values of `combine`."""
    for names, axes in groups:
        for values in combine(*axes):
            options = dict(zip(names, values))
            options |= options.pop("of", {})
            varied = [str(v) for v, axis in zip(values, axes) if len(axis) > 1]
            name = options["name"]
            yield options, "-".join([name, *(v for v in varied if v != name)])


def run(options, implementation):
    given = dict(options)
    *dtypes, y_dtype = (DTYPES[letter] for letter in given.pop("mix", "ffff"))
    if given["name"] != "rms_norm_add":  # its result has the residual's dtype
        given["y_dtype"] = y_dtype
    given["implementation"] = implementation
    return checked(given.pop("name"), given.pop("shape"), *dtypes, **given)


SAVES, BEFORE, ORDERS = ["output", "input"], [True, False], [False, True]
# Mixes with one dtype, and mixes with several.
ALIKE = ["bbbb", "hhhh", "ffff"]
OF_SUMS = [*ALIKE, "bffb", "bbfb", "fbfb", "bfbf"]
OPTIONS = [{"scale_offset": 1.0}, {"epsilon": 0.0}, {"epsilon": 0.1}]
WITHOUT = [{}, {"bias": None}, {"scale": None}, {"scale": None, "bias": None}]
WIDE = [(70, 40), (64, 1024), (130, 768)]
POSITIONS = [(4, 33, 64), (4, 33, 1024)]
HEADS = (2, 8, 4, 64)
# Shapes of the parameters of x of (4, 33, columns).
GROUPS = [
    {"scale": (4, 1), "bias": (4, 1)},
    {"scale": (4, 1)},
    {"bias": (4, 1)},
    {"scale": (4, 33), "bias": (4, 33)},
    {"scale": (1, 1), "bias": (1,)},
]
ADALN_ZERO = {"scale": (4, 1), "gate": (4, 1)}
GATES = [
    {"mix": "ffff", **ADALN_ZERO},
    {"mix": "bbbb", "gate": ()},  # LayerScale
    {"mix": "bffb", "gate": (4, 1)},
    {"mix": "fbfh", "scale": (4, 1), "gate": ()},
    {"mix": "ffff", "scale": (4, 33), "gate": (4, 33)},
    {"mix": "bbbb", "gate": (33,)},  # groups of rows that are not consecutive
]
TABLES = [(8, 1), (), (1,), (2, 8, 1), (1, 1, 1), (1, 8, 1), (2, 1, 4), (4,), (8, 4), (2, 8, 4)]
GATED, ROPE = {"name": "rms_norm_gated"}, {"name": "rms_norm_rope", "tables": (8, 1)}

# Kernels run with all combinations of the values in a group. XLA's code runs with combinations that
# cover all pairs of values.
IN_FULL = [
    grid(
        name=NAMES, shape=(64, 8, 40), mix=[*ALIKE, "bffb", "fffb", "bfff", "hfbf"],
        axis=[-1, 0, (1, 2), (0, -1)], save=SAVES,
    ),
    grid(
        name="layer_norm", shape=(70, 40), mix=["ffff", "fffb"], of=WITHOUT, save=SAVES,
        scale_near_0=True,
    ),
    grid(name="rms_norm", shape=WIDE[:2], mix="fffb", bias=(), scale=[(), None], save=SAVES),
    grid(name="rms_norm", shape=(70, 40), mix=["ffff", "fffb"], scale=None, save=SAVES),
    grid(name=NAMES, shape=(70, 64), mix="bffb", of=OPTIONS, save=SAVES),
    grid(name=NAMES, shape=[(5, n) for n in (2, 3, 127, 1000, 4095)], mix="fffb", save=SAVES),
    grid(name=SUMS, shape=WIDE, mix=OF_SUMS, save=SAVES),
    grid(name="rms_norm_add", shape=WIDE, mix=OF_SUMS),
    grid(name="rms_norm_add_rms_norm", shape=WIDE, mix=OF_SUMS, save=SAVES),
    grid(name="layer_norm", shape=POSITIONS, mix=["ffff", "bffb"], of=GROUPS, save=SAVES),
    grid(name="add_layer_norm", shape=POSITIONS, of=GATES, bias=[(), (4, 1)], save=SAVES),
    grid(name="add_rms_norm", shape=POSITIONS, of=GATES, save=SAVES),
    grid(
        name=SUMS, shape=(4, 33, 768), mix=["ffff", "bbbb", "bffb", "fbfh"], of=[ADALN_ZERO],
        save=SAVES,
    ),
    grid(name="rms_norm_rope", shape=HEADS, tables=TABLES, save=SAVES),
    # Tables may be multiplied by a factor, as in YaRN and LongRoPE. To invert the rotation, the
    # backward divides by cos^2 + sin^2, which is factor^2.
    grid(**ROPE, shape=HEADS, factor=[1.2, 0.7], mix=["bffb", "hffh", "ffff"], save=SAVES),
    # With scale_offset=1, as in Gemma, x_hat is multiplied by 1 + scale.
    grid(
        **ROPE, shape=HEADS, mix=["bffb", "ffff"], scale_offset=1.0, save=SAVES,
        of=[{}, {"scale": None, "rotated": 32}],
    ),
    grid(**GATED, shape=(70, 64), of=OPTIONS, norm_before_gate=BEFORE),
    grid(
        **GATED, shape=(70, 64), mix=["ffff", "bbbb"], scale=None, scale_offset=1.0,
        norm_before_gate=BEFORE,
    ),
    # Scales may belong to groups, as in Mamba 2; each gradient is a sum over the group's rows.
    grid(
        **GATED, shape=HEADS, mix="fbff", norm_before_gate=BEFORE,
        scale=[(4,), (8, 4), (2, 1, 1), (2, 8, 1), (2, 8, 4)],
    ),
]  # fmt: skip
# All implementations run with combinations that cover all pairs of values.
IN_PAIRS = [
    grid(
        name=NAMES, shape=(64, 8, 40), mix=[*ALIKE, "bffb", "fffb", "bfff", "hfbf"],
        axis=[-1, 0, (1, 2), (0, -1)], save=SAVES, activation=[*ACTIVATIONS[:3]], bias=(),
    ),
    grid(name=NAMES, shape=(70, 40), of=[{"bias": ()} | of for of in WITHOUT], activation="silu"),
    grid(name="layer_norm", shape=(70, 64), mix="bffb", of=OPTIONS, activation="gelu"),
    grid(
        **GATED, shape=[HEADS, (70, 40), (65, 128), (3, 30, 1000)], norm_before_gate=BEFORE,
        mix=[*ALIKE, "bbfb", "bffb", "fbhf", "hfbb", "bhff"], activation=[*ACTIVATIONS],
    ),
    grid(
        name="rms_norm_rope", mix=[*ALIKE, "bffb", "fbff", "bfbf", "fhbb"], save=SAVES,
        interleaved=ORDERS, of=[
            {"shape": HEADS, "tables": (8, 1)},
            {"shape": (3, 16, 2, 16), "tables": (16, 1), "rotated": 8},
            {"shape": (2, 5, 3, 128), "tables": (5, 1), "rotated": 96},
            {"shape": (1, 8, 4, 512), "tables": (8, 1)},
        ],
    ),
]  # fmt: skip
IN_FLOAT64 = [
    grid(name=NAMES, shape=(7, 30), mix="dddd", save=SAVES),
    grid(name=NAMES, shape=(7, 30), mix="dddd", activation=[*ACTIVATIONS[:3]], bias=()),
    # The arithmetic is float64 if the dtype of x, of the gate or of y is float64.
    grid(
        **GATED, shape=(4, 5, 24), mix=["dddd", "fddf", "ffdd"], activation=[*ACTIVATIONS],
        norm_before_gate=BEFORE,
    ),
    grid(
        **ROPE, shape=HEADS, rotated=48, mix=["dddd", "dfdd", "fddd", "ffdd"], save=SAVES,
        interleaved=ORDERS,
    ),
    grid(
        name=[*SUMS, "rms_norm_add_rms_norm"], shape=(5, 16), save=SAVES,
        mix=["dddd", "dfff", "fdff", "fffd", "dbfh", "hdfb", "bhfd", "ddfb", "bdfd"],
    ),
]  # fmt: skip
# Arrays with few axes, rows or columns, which are too small for a kernel.
SMALL = [
    grid(name=NAMES, shape=[(50,), (5, 1)], save=SAVES),
    grid(**GATED, shape=[(64,), (7, 64), (3, 0, 64), (1, 5)], norm_before_gate=BEFORE),
    grid(name="rms_norm_rope", shape=[(64,), (7, 64), (3, 0, 64)], save=SAVES),
]
# Shapes for each kind of kernel. A row is processed by a part of a warp, by a warpgroup or by a
# cluster. In some shapes, the last fragments of a row overlap.
LARGE = [(131, 128), (97, 1000), (66, 4088), (140, 5120), (67, 16384)]
OF_KERNELS = [
    grid(
        name=NAMES, shape=LARGE, mix=["bffb", "ffff"], activation=[*ACTIVATIONS[:3]], bias=()
    ),
    grid(**GATED, shape=LARGE, mix=["bbfb", "ffff"], norm_before_gate=BEFORE),
]  # fmt: skip


def each(groups, combine=pairwise):
    return pytest.mark.parametrize(
        "options", [pytest.param(options, id=name) for options, name in cases(groups, combine)]
    )


@refused.expect(refused.NARROW, refused.FEW_SHORT_ROWS, refused.GROUPS)
@pytest.mark.parametrize(
    ("options", "implementation"),
    [
        pytest.param(of, code, id=f"{name}-{code}", marks=KERNELS.get(code, ()))
        for code in ("xla", *KERNELS)
        for groups, combine in ((IN_FULL, itertools.product), (IN_PAIRS, pairwise))
        for of, name in cases(groups, combine if code in KERNELS else pairwise)
    ],
    indirect=["implementation"],
)
def test_values_and_gradients(options, implementation):
    _, gradients = run(options, implementation)
    if options["name"] in SUMS and "gate" not in options:  # x's and the residual's are the same.
        of_x = gradients["residual"].astype(gradients["x"].dtype)
        np.testing.assert_array_equal(gradients["x"], of_x)


@each(IN_FLOAT64, itertools.product)
def test_float64(x64, options):
    run(options, "xla")


@each(SMALL, itertools.product)
def test_small_arrays(options):
    run(options, "xla")


@each(OF_KERNELS)
def test_kernels(options, kernels):
    run(options, kernels)


# ------------------------------------------------- parameters that broadcast along normalised axes

# Maps names of cases to the shape of x, the normalised axes, and the shapes of scale and bias.
GROUP_NORMS = {
    "group norm": ((2, 37, 4, 8), (1, 3), (4, 1, 8), (4, 1, 8)),
    "images": ((2, 5, 8, 4, 8), (1, 2, 4), (4, 1, 1, 8), (4, 1, 1, 8)),
    "one bias of a sample": ((2, 37, 4, 8), (1, 3), (4, 1, 8), (2, 4, 1, 8)),
    "parameters of each sample": ((2, 37, 4, 8), (1, 3), (2, 4, 1, 8), (2, 4, 1, 8)),
    "instance norm": ((2, 5, 8, 32), (1, 2), (32, 1, 1), (32, 1, 1)),
    "channels first": ((2, 4, 8, 3, 5), (2, 3, 4), (4, 8, 1, 1), (4, 8, 1, 1)),
    "unlike each other": ((2, 37, 4, 8), (1, 3), (37, 1), (4, 1, 1)),
    "one number": ((5, 16), -1, (1,), (1, 16)),
    # The last axis of the parameters is C, although x is NCHW.
    "samples over channels": ((2, 16, 3, 5), 1, (2, 1, 1, 16), (2, 1, 1, 16)),
}


@refused.expect(refused.FEW_SHORT_ROWS, refused.GROUPS, refused.NARROW)
@pytest.mark.parametrize(
    ("dtype", "p_dtype", "save", "activation"),
    [
        ("float32", "bfloat16", "input", None),
        ("bfloat16", "float32", "output", None),
        ("float32", "float32", "input", "silu"),
        ("bfloat16", "float32", "input", "gelu"),
    ],
)
@pytest.mark.parametrize("case", GROUP_NORMS)
def test_group_norms(case, dtype, p_dtype, save, activation, implementation):
    shape, axis, *sizes = GROUP_NORMS[case]
    x = normal(shape, dtype, 0, shift=0.5)
    scale, bias = (normal(size, p_dtype, seed, 0.3, 1.0) for seed, size in zip((2, 3), sizes))
    scale = scale.at[..., 0].set(0) if scale.shape[-1] > 1 else scale
    bias = jnp.where(scale == 0, 0, bias) if bias.shape == scale.shape else bias
    given = {"axis": axis, "save": save, "activation": activation, "scale": scale, "bias": bias}
    check("layer_norm", x, implementation=implementation, **given)


@pytest.mark.parametrize("name", [n for n, of in OPERANDS.items() if "residual" in of])
def test_groups_of_sums(name):
    """Parameters of norms with a residual may also broadcast along normalised axes."""
    x, scale = normal((2, 6, 4, 8), "float32", 0), normal((4, 1, 8), "float32", 1)
    more = {"next_scale": {"next_scale": scale[..., :1]}, "bias": {"bias": 2 * scale}}
    given = {"residual": 2 * x, "scale": scale, "axis": (1, 3), "scale_offset": 1.0}
    for option in OPERANDS[name].split():
        given |= more.get(option, {})
    given |= {} if name == "rms_norm_add" else {"save": "output"}
    check(name, x, **given, **({"gate": scale} if name in SUMS else {}))


def test_groups_of_rows_that_are_not_consecutive(monkeypatch):
    """Kernels refuse calls in which rows with the same parameters are not consecutive.

    They also refuse groups of rows of an axis that is not the last, if they have no strided loads.
    """
    scale = jnp.ones((3, 16))
    plan = jaxnorm.implementation_for("rms_norm", (4, 3, 16), "float32", scale=scale,
                                      platform="cuda")  # fmt: skip
    assert "not consecutive" in plan.forward.reason
    without = mosaic.IMPLEMENTATION._replace(takes_inner=takes_no_inner)
    monkeypatch.setattr(mosaic, "IMPLEMENTATION", without)
    x, scale = jnp.ones((2, 39, 4, 8)), jnp.ones((4, 1, 8))
    with pytest.raises(ValueError, match="groups of rows that are not consecutive"):
        jaxnorm.layer_norm(x, scale, axis=(1, 3), implementation="mosaic")


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("shared", ["scale", "next_scale"])
def test_gradient_of_the_scale_that_groups_share(shared, mapped, implementation):
    """The gradient of a scale that all groups of rows share is rounded to bfloat16 only once.

    The function has two scales. One is shared by all groups, and the other differs between groups.
    A kernel then computes the gradient of the shared scale separately for each group. These
    gradients must be added in float32, so that only their sum is rounded.
    """
    groups, cols = 64, 1024
    x, residual, *cotangents = (normal((groups, 4, cols), "float32", seed) for seed in range(4))
    operands = {"x": x, "residual": residual} | {
        name: normal((cols,) if name == shared else (groups, 1, cols), "bfloat16", seed, 0.3, 1.0)
        for seed, name in enumerate(("scale", "next_scale"), start=4)
    }
    function = functools.partial(
        jaxnorm.rms_norm_add_rms_norm, save="input", implementation=implementation
    )
    if mapped:
        function = jax.vmap(function, [None if a.ndim == 1 else 0 for a in operands.values()])
    _, vjp = jax.vjp(function, *operands.values())
    gradient = dict(zip(operands, vjp(tuple(cotangents))))[shared]
    expected = expected_of("rms_norm_add_rms_norm", operands, cotangents)[1][shared]
    assert gradient.dtype == "bfloat16"
    sums = of_roundings(groups * 4, "float32", np.abs(expected).max())
    assert_within(gradient, expected, half_unit(expected, "bfloat16") + sums)


# ---------------------------------------------------------------------------------- extreme values

each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.mark.parametrize("before", BEFORE)
@each_activation
def test_gates_of_all_sizes(activation, before, implementation):
    """Results are correct for gates that are 0, and for gates whose exp over- or underflows.

    All elements of a row of x and of a row of the gate are 0.
    """
    sizes = np.concatenate([[0.0], *np.outer([-1, 1], np.geomspace(1e-20, 3e4, 31)), [-0.0]])
    gate = jnp.asarray(np.broadcast_to(sizes, (70, 64)), "float32").at[5].set(0)
    x, scale = normal((70, 64), "float32", 0).at[3].set(0), normal((64,), "float32", 2, 0.3, 1.0)
    given = {"activation": activation, "norm_before_gate": before, "gate": gate, "scale": scale}
    check("rms_norm_gated", x, implementation=implementation, **given)


@each_activation
def test_norms_of_all_sizes(activation, implementation):
    """Activations of a norm's result y are correct if y is 0, or if exp(y) over- or underflows."""
    scale = jnp.asarray(np.append(np.geomspace(1e-20, 1e4, 63), 0), "float32")
    given = {"scale": scale, "activation": activation, "implementation": implementation}
    check("rms_norm", normal((70, 64), "float32", 0), **given)


@pytest.mark.parametrize("dtype", list(DTYPES.values())[:3])
def test_scales_of_zero_beside_a_bias(dtype):
    """With an activation or a gate, gradients are accurate even for scales that are near 0.

    These norms save their input. So the backward does not recover x_hat from y. To recover it, the
    backward would divide by the scale, and a small scale would magnify rounding errors.
    """
    x, gate, bias = (normal((70, 64), dtype, seed) for seed in range(3))
    scale = normal((64,), "float32", 1, 0.3, 1.0).at[6].set(0).at[9].set(1e-6)
    (y,), _ = check("layer_norm", x, scale=scale, bias=bias[0], activation="relu")
    np.testing.assert_array_equal(exact(y)[:, 6], max(exact(bias)[0, 6], 0))
    for before in BEFORE:
        (y,), _ = check("rms_norm_gated", x, scale=scale, gate=gate, norm_before_gate=before)
        assert not exact(y)[:, 6].any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layer_norm", {"save": "input"}),
        ("layer_norm", {"activation": "silu"}),
        ("add_rms_norm", {"save": "input"}),
        ("rms_norm_add", {}),
        ("rms_norm_add_rms_norm", {"save": "input"}),
        ("rms_norm_gated", {}),
        ("rms_norm_gated", {"norm_before_gate": False}),
        ("rms_norm_rope", {"save": "input"}),
    ],
)
def test_one_rounding(name, options):
    """If x has 16 bits, y and the gradient of x are rounded once: errors are at most half an ulp.

    If an intermediate result were rounded, too, errors would be larger.
    """
    x, *others = (
        normal((64, 256), dtype, i) for i, dtype in enumerate(["bfloat16", *["float32"] * 2])
    )
    operands = {"x": x, "scale": 1 + others[0][0] / 4}
    operands |= {n: others[1] for n in ("residual", "gate") if n in OPERANDS[name].split()}
    operands |= dict(zip(("cos", "sin"), tables((64, 128)))) if name == "rms_norm_rope" else {}
    results, vjp = jax.vjp(
        lambda operands: jax.tree.leaves(getattr(jaxnorm, name)(**operands, **options)), operands
    )
    cotangents = [normal(a.shape, a.dtype, 9 + i) for i, a in enumerate(results)]
    expected = expected_of(name, operands, cotangents, **options)
    for a, e in ((results[0], expected[0][0]), (vjp(cotangents)[0]["x"], expected[1]["x"])):
        in_float32 = of_roundings(256, "float32", np.abs(e).max())
        assert_within(a, e, half_unit(e, a.dtype.name) + in_float32)


@refused.expect(refused.EMPTY)
@on_each_implementation("shape save", [(0, 5), (5, 0), (2, 0, 3), (0,)], SAVES)
def test_empty(shape, save, implementation):
    x = jnp.zeros(shape, jnp.float32)
    scale = bias = jnp.ones(shape[-1:], jnp.bfloat16)
    y, vjp = jax.vjp(
        lambda *a: jaxnorm.layer_norm(*a, save=save, implementation=implementation), x, scale, bias
    )
    dx, dscale, dbias = vjp(y)
    assert y.shape == dx.shape == shape
    np.testing.assert_array_equal(dscale, jnp.zeros_like(scale))
    np.testing.assert_array_equal(dbias, jnp.zeros_like(bias))
