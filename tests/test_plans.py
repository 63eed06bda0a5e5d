"""Tests of `jaxnorm.implementation_for`.

For arrays of the sizes of real models, they check which implementation it returns for each
function, and with which reason.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from functions import FUNCTIONS, options_of, plain_call_of

import jaxnorm
from jaxnorm.tools.plan import functions
from jaxnorm_kernels import operations

MOSAIC, XLA = ("mosaic", "mosaic"), ("xla", "xla")
ROWS, SAMPLES = (8192, 4096), (32, 1024, 1152)
HEADS, IMAGES = (4, 2048, 32, 128), (32, 64, 64, 32, 8)
NOT_CONSECUTIVE = "groups of rows that are not consecutive"
TABLE = jax.ShapeDtypeStruct((2048, 1, 64), "float32")


def vector(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def asked(name, shape, dtype="bfloat16", platform="cuda", **options):
    return jaxnorm.implementation_for(name, shape, dtype, platform=platform, **options)


def names(plan):
    return plan.forward.name, plan.backward.name


@pytest.mark.parametrize("name", operations.FUNCTIONS)
def test_a_cpu_runs_xla_s_code(name):
    assert names(asked(name, (64, 128), platform="cpu")) == XLA


def grouped(*shape, axis=(1, 3), dtype="float32"):
    """Return the options of a LayerNorm that normalises groups: its axes and two parameters."""
    return {**dict.fromkeys(("scale", "bias"), vector(*shape, dtype=dtype)), "axis": axis}


GATE, WEIGHT = vector(32, 1, 1152), vector(4096, 1024, dtype="bfloat16")
# Each entry has five items: a function, the shape of a bfloat16 x, options, the implementation that
# must be chosen (None for any), and a part of the text that says why it is chosen.
PLANS = [
    *(
        (name, ROWS, {"scale": vector(4096)}, MOSAIC, "")
        for name in ("add_rms_norm", "rms_norm_add", "rms_norm_add_rms_norm")
    ),
    ("layer_norm", (8192, 1024), {"scale": vector(1024), "activation": "silu"}, MOSAIC, ""),
    ("layer_norm", IMAGES, grouped(32, 1, 1, 8, axis=(1, 2, 4)), MOSAIC, ""),
    ("layer_norm", (32, 4096, 32, 8), grouped(32, 1, 8, dtype="bfloat16"), MOSAIC, ""),
    ("layer_norm", (32, 4096, 32, 10), grouped(32, 1, 10), MOSAIC, ""),
    ("layer_norm", (8, 1024, 32, 21), grouped(32, 1, 21), None, "too large or too small"),
    ("layer_norm", (8, 1024, 32, 8), grouped(1, 8), None, "broadcast along"),
    ("rms_norm_gated", HEADS, {"scale": vector(128)}, MOSAIC, ""),
    ("rms_norm_gated", HEADS, {"scale": vector(32, 128)}, XLA, NOT_CONSECUTIVE),
    *(
        (name, SAMPLES, {"gate": gate}, MOSAIC, "scaled_add_norm")
        for name in ("add_layer_norm", "add_rms_norm")
        for gate in (GATE, vector(1152))
    ),
    *(
        (name, SAMPLES, {"gate": vector(1024, 1152)}, XLA, "not consecutive")
        for name in ("add_layer_norm", "add_rms_norm")
    ),
    *(
        (
            name,
            SAMPLES,
            {"scale": vector(*SAMPLES), "gate": GATE},
            None,
            "groups of different sizes",
        )
        for name in ("add_layer_norm", "add_rms_norm")
    ),
    ("rms_norm_linear", ROWS, {"weight": WEIGHT, "activation": "gelu"}, MOSAIC, ""),
    ("gated_linear", ROWS, {}, XLA, ""),
    *(
        (f"linear_{of_logits}", ROWS, {"weight": WEIGHT}, MOSAIC, "for each chunk of rows")
        for of_logits in ("softmax_cross_entropy", "log_prob_and_entropy")
    ),
]


@pytest.mark.parametrize("i", range(len(PLANS)))
def test_plans_for_a_gpu(i):
    name, shape, options, expected, reason = PLANS[i]
    plan = asked(name, shape, **options)
    assert expected is None or names(plan) == expected
    assert reason in plan.forward.reason + plan.backward.reason
    if expected == XLA:
        assert reason in plan.forward.reason
        assert reason in plan.backward.reason


def test_arrays_that_are_not_given():
    """A plan assumes defaults for arrays that are not given.

    The gate has x's shape and dtype. Rotary tables are float32 and rotate all columns.
    """
    scale = {"scale": vector(128)}
    plan = asked("rms_norm_gated", HEADS, **scale)
    gate = vector(*HEADS, dtype="bfloat16")
    assert plan == asked("rms_norm_gated", HEADS, **scale, gate=gate, norm_before_gate=False)
    for platform in ("cpu", "cuda"):
        of_heads = functools.partial(asked, "rms_norm_rope", HEADS, platform=platform, **scale)
        assert of_heads() == of_heads(cos=TABLE) == of_heads(cos=TABLE, sin=TABLE)
    for few in ((64,), (8, 64)):
        asked("rms_norm_rope", few, "float32")


def test_a_wide_gate_has_no_kernel(x64):
    plan = asked(
        "rms_norm_gated", (8192, 1024), "float32", gate=vector(8192, 1024, dtype="float64")
    )
    assert names(plan) == XLA
    assert "an array is float64" in plan.forward.reason


def test_the_kernel_of_a_norm_and_a_product_is_asked_for_by_name():
    """By default, rms_norm_linear runs the kernels of rms_norm.

    The kernel that fuses the norm and the matmul runs only on request.
    """
    named = functools.partial(asked, "rms_norm_linear", ROWS)
    plan = named()
    assert plan == asked("rms_norm", ROWS)
    by_name = named(implementation="mosaic")
    assert (by_name.forward.name, by_name.forward.reason) == ("mosaic", "asked for by name")
    assert by_name.backward == plan.backward
    assert named(implementation="xla").backward.name == "xla"
    with pytest.raises(ValueError, match=r"^rms_norm_linear: .*its matmul supports"):
        named("float32", implementation="mosaic")
    message = r"^rms_norm_linear: .* cannot run the forward of \(2, 8\): its matmul"
    with pytest.raises(ValueError, match=message):
        jaxnorm.rms_norm_linear(jnp.ones((2, 8)), jnp.ones((8, 4)), implementation="mosaic")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rms_norm_rope", {"cos": vector(5, 1, 64)}, "cos has shape"),
        ("rms_norm_gated", {"activation": "tanh"}, "activation='tanh'"),
        ("rms_norm_linear", {"activation": "tanh"}, "activation='tanh'"),
        ("layer_norm", {"activation": "tanh"}, "activation='tanh'"),
        ("add_rms_norm", {"gate": vector(127)}, "gate has shape"),
        ("layer_norm", {"epsilon": -1.0}, "epsilon=-1.0"),
        ("rms_norm", {"save": "both"}, "save='both'"),
        ("softmax", {"where": "no"}, "where is a str"),
        ("softmax", {"causal": "no"}, "causal='no'"),
        ("softmax_cross_entropy_with_integer_labels", {"axis": 4}, "axis=4 is out of range for lo"),
        ("log_prob_and_entropy", {"axis": 4}, "axis=4 is out of range for logits"),
    ],
)
def test_it_refuses_as_the_function_does(name, options, message):
    assert name in {entry.split()[0] for entry in FUNCTIONS}
    with pytest.raises((TypeError, ValueError), match=f"^{name}: {message}"):
        asked(name, HEADS, **options)


SCALED = {
    **dict.fromkeys(("softmax", "log_softmax"), "scale"),
    **dict.fromkeys((n for n in functions() if "logits_scale" in options_of(n)), "logits_scale"),
}


@pytest.mark.parametrize("name", SCALED)
def test_scales_of_logits(name):
    """A scale may be an array, which has no derivative. Loss kernels take numbers above 0 only."""
    weights = dict.fromkeys(("weight", "teacher_weight"), vector(4096, 4096, dtype="bfloat16"))
    given = {n: a for n, a in weights.items() if n in plain_call_of(name).keywords}
    shapes = [()] if SCALED[name] == "scale" else [(), (8192,)]
    for shape in shapes:
        assert asked(name, ROWS, **given, **{SCALED[name]: vector(*shape)})
    plan = asked(name, ROWS, **given, **{SCALED[name]: -0.5})
    assert names(plan) == (MOSAIC if SCALED[name] == "scale" else XLA), plan


def test_a_mask_of_classes_of_a_linear_loss():
    options = {"weight": vector(4096, 4096, dtype="bfloat16"), "chunk": 1024}
    for where, expected in (((8192,), MOSAIC), ((1, 4096), XLA)):
        where = jax.ShapeDtypeStruct(where, bool)
        plan = asked("linear_log_prob_and_entropy", ROWS, where=where, **options)
        assert names(plan) == expected, plan
