"""Bad arguments: every error names the function, what was given, what was expected, and the fix.

`OPTIONS` maps the name of each option to wrong values for it. They are tested with every function
that has this option. `FLOATS` lists the names of array arguments. Wrong arrays are tested with
every function that has an argument of such a name. `ARGUMENTS` lists, for each function, further
wrong arguments.
"""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import OTHERS, options_of, plain_call_of, public_functions

import jaxnorm

NAMES = sorted(public_functions() - OTHERS)
SOFTMAXES, CAUSED = ("softmax", "log_softmax"), (TypeError, ValueError)
T, SWAPPED = jnp.ones, np.dtype(np.float32).newbyteorder("S")

# Maps an option to values that no function accepts, each with its error message.
OPTIONS = {
    "epsilon": [
        (-1.0, "epsilon=-1.0; expected a finite number of at least 0"),
        (float("nan"), "epsilon=nan; expected a finite number of at least 0"),
        (float("inf"), "epsilon=inf; expected a finite number of at least 0"),
        ("0.1", "epsilon is a str; expected a number"),
    ],
    "scale_offset": [("1", "scale_offset is a str; expected a number")],
    "causal": [
        *((c, "causal=.*; expected True or False") for c in ("no", "", 0, 1, None, jnp.array(True)))
    ],
    "save": [("both", "save='both'; expected one of 'output', 'input'")],
    "dtype": [
        *((t, f"dtype={t}; expected one of bfloat16") for t in ("int8", "complex64")),
        ("float8_e4m3fn", "dtype=float8_e4m3fn; expected one of bfloat16"),
        ("half precision", "is no dtype; expected one of bfloat16"),
        ("float64", "jax_enable_x64"),
        *((t, "dtype=.*byte order.* e.g. float32") for t in (SWAPPED, SWAPPED.str)),
    ],
    "implementation": [("cudnn", "implementation='cudnn'; expected one of 'xla'")],
    "interleaved": [("no", "interleaved='no' is a str; expected True or False")],
    "norm_before_gate": [("no", "norm_before_gate='no' is a str; expected True or False")],
    "axis": [
        (7, "axis=7 is out of range for (?:x|logits) with shape"),
        (-8, "axis=-8 is out of range"),
        ((0, 5), "out of range"),
        ((1, -1), "twice; name each axis once"),
        ((), "names no axis"),
        *((a, "expected an integer or a tuple of integers") for a in (1.0, "last", (0, None))),
        *((a, "expected an integer or a tuple of integers") for a in (True, (False, 1), [False])),
        (10**5000, rf"axis=\(an integer of {(10**5000).bit_length()} bits\) is out"),
    ],
    "activation": [
        *((a, f"activation='{a}'; expected one of") for a in ("tanh", "SiLU", "")),
        (1, "activation=1; expected one of"),
        (["gelu"], r"activation=\['gelu'\]; expected one of"),
    ],
    "logits_scale": [
        (float("inf"), "logits_scale=inf; expected a finite number"),
    ],
    "logit_softcap": [
        (0, "logit_softcap=0; expected a number above 0"),
        (-1, "logit_softcap=-1; expected a number above 0"),
        ("30", "logit_softcap is a str"),
    ],
    "teacher_logit_softcap": [
        (0, "teacher_logit_softcap=0; expected a number above 0"),
        ("30", "teacher_logit_softcap is a str"),
    ],
    "reverse": [("no", "reverse='no' is a str; expected True or False")],
    "label_smoothing": [(1.5, "label_smoothing=1.5; .*from 0 to 1")],
    "z_loss": [(-1.0, "z_loss=-1.0; .*of at least 0"), ("a", "z_loss is a str")],
    "reduction": [("max", "reduction='max'; expected one of 'mean', 'sum', 'none'")],
    "chunk": [
        *((c, "chunk=.*; expected a number of rows of at least 1") for c in (0, -(10**5000))),
        *((c, "chunk=.*; expected a number of rows, a Python int") for c in (True, 1.5, "8")),
    ],
    "product": [("ragged", r"product is a str; expected a function of \(h, weight\)")],
    "out_sharding": [
        ("data", "out_sharding is a str; expected a NamedSharding"),
        (jax.P("data"), "lie on no mesh with Explicit axes; expected None; leave it out"),
    ],
}
TRACED = (
    "epsilon",
    "reverse",
    "scale_offset",
    "interleaved",
    "norm_before_gate",
    "causal",
    "chunk",
)
WRONG = [
    pytest.param(name, {option: value}, message, id=f"{name}-{option}-{i}")
    for name in NAMES
    for option in options_of(name)
    for i, (value, message) in enumerate(OPTIONS.get(option, []))
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_options(name, options, message):
    """Bad options raise the same error outside and inside of `jax.jit`."""
    call = functools.partial(plain_call_of(name), **options)
    for run in (call, lambda: jax.jit(lambda: call())()):
        with pytest.raises(CAUSED, match=f"^{name}: .*{message}"):
            run()


@pytest.mark.parametrize("name", NAMES)
def test_traced_options(name):
    for option in {*TRACED} & {*options_of(name)}:
        call = plain_call_of(name)
        with pytest.raises(TypeError, match=f"^{name}: {option} is a traced value"):
            jax.jit(lambda v: call(**{option: v}))(1.0)  # noqa: B023


# Names of the arguments that must be floating-point arrays.
FLOATS = (
    "x",
    "logits",
    "teacher_logits",
    "residual",
    "gate",
    "up",
    "weight",
    "bias",
    "next_scale",
    "cos",
    "sin",
)


def arrays_of(name):
    parameters = inspect.signature(getattr(jaxnorm, name)).parameters
    scale = ["scale"] if name not in SOFTMAXES else []
    return [p for p in (*FLOATS, *scale) if p in parameters]


# ---------------------------------------------------------------------- errors of single functions

ROPE = {"x": T((4, 8, 2, 16)), "scale": T(16), **dict.fromkeys(("cos", "sin"), T((8, 1, 8)))}
GATED = {"x": T((4, 6, 16)), "gate": T((4, 6, 16))}
LINEAR = {"x": T((2, 3)), "weight": T((3, 5))}
LOGITS = {"logits": T((2, 3)), "labels": jnp.zeros(2, int)}
PRODUCT = {"gate": T((2, 3)), "up": T((2, 3)), "weight": T((3, 5))}
ROWS = {"x": T((3, 5, 16)), "residual": T((3, 5, 16))}
LOSS = {**LINEAR, "labels": jnp.zeros(2, int)}
OF_NORM_LINEAR = [
    ({"x": T(())}, r"x has shape \(\); expected \(..., d\), a vector of features"),
    ({"weight": T((5, 3))}, r"\(5, 3\); expected \(3, n\).*weight.T"),
    ({"weight": T(3)}, r"weight has shape \(3,\); expected \(3, n\)"),
    ({"bias": T(3)}, r"bias has shape \(3,\); expected \(5,\), a number for"),
]
OF_LINEAR_LOSS = [
    ({"weight": T((5, 3))}, r"\(5, 3\); expected \(3, V\).*weight.T"),
    ({"weight": T(3)}, r"weight has shape \(3,\); expected \(3, V\)"),
    *(({"weight": T(s)}, "one class or more") for s in [(3, 0), (0, 3), (3, 0, 2), (4, 3, 3)]),
    ({"x": T(())}, r"x has shape \(\); expected \(..., d\), a vector of features"),
    ({"bias": T((1, 5))}, r"bias has shape \(1, 5\); expected \(5,\)"),
    ({"labels": T((2, 1, 1), int)}, r"\(2, 1, 1\); expected \(2,\).*reshape"),
    ({"labels": T(3, int)}, r"\(3,\); expected \(2,\), the shape of x"),
    ({"logits_scale": T(3)}, r"\(3,\); expected .* labels' shape \(2,\), with 1 axes"),
]
OF_TEACHER = {"teacher_x": T((2, 4)), "teacher_weight": T((4, 5))}
OF_SEVERAL = [
    ({"labels": jnp.zeros((2, k), int)}, f"{k} labels for each.*one-hot labels, use jnp.argmax")
    for k in (6, 7)
]
# One-hot labels of any dtype raise the error about one-hot labels, not one about the dtype.
OF_ONE_HOT = [
    ({"labels": T((2, 5), dtype)}, r"one-hot.* jnp.argmax\(labels, axis=1\)")
    for dtype in ("int32", "float32", "bool")
]
OF_ONE_HOT_LOGITS = [
    (
        {"logits": T((2, 3, 5)), "labels": T((2, 3, 5), dtype), "axis": axis},
        rf"one-hot.*expected {shape}.* jnp.argmax{of}",
    )
    for dtype in ("int32", "float32", "bool")
    for axis, shape, of in (
        (-1, r"\(2, 3\)", r"\(labels, axis=2\)"),
        (0, r"\(3, 5\)", r"\(labels, axis=0\)"),
        ((1, 2), r"\(2,\)", " of labels with their"),
    )
]
OF_SOFTMAX = [
    ({"where": T((2, 3), "float32")}, "where has dtype float32.*additive mask to x"),
    ({"where": T((2, 3), "int32")}, r"where has dtype int32.*where.astype\(jnp.bool_\)"),
    *(({"where": T(s, bool)}, r"broadcasts to x's shape \(2, 3\)") for s in [(2,), (2, 5), (4, 1)]),
    ({"bias": T((3, 1, 1))}, r"bias has shape \(3, 1, 1\)"),
    ({"bias": T(5)}, r"broadcasts to x's shape \(2, 3\) without enlarging"),
    ({"scale": float("inf")}, "scale=inf; expected a finite number"),
    ({"scale": "x"}, "scale is a str; expected a number"),
    ({"causal": True, "axis": 0}, r"causal=True for axis=\(0,\) of x with shape \(2, 3\)"),
    ({"x": T(6), "causal": True}, r"shape \(6,\); expected the last axis, of two or more"),
    ({"x": T(())}, r"x with shape \(\).*x\[None\]"),
]
OF_NORM = [
    *(
        (
            {"scale": T(shape)},
            r"scale has shape .*; expected \(4,\).* after axes that broadcast to \(2, 3\)",
        )
        for shape in [(3,), (), (2, 4), (3, 3, 4), (1, 2, 3, 4), (2, 3), (3, 1, 1)]
    ),
    ({"scale": T((4, 2)), "axis": (2, 0)}, r"scale has shape \(4, 2\); expected \(2, 4\)"),
    ({"bias": T(3)}, r"bias has shape \(3,\); expected \(4,\)"),
    ({"activation": "silu", "save": "x"}, "save='x'; expected one of"),
    ({"x": T(())}, r"x with shape \(\).*x\[None\]"),
]
OF_RESIDUAL = [
    ({"residual": T(16)}, r"residual has shape \(16,\); expected \(3, 5, 16\)"),
    ({"scale": T(3)}, r"scale has shape \(3,\)"),
]
OF_GATE = [
    ({"gate": T(8)}, r"gate has shape \(8,\); expected \(16,\)"),
    ({"gate": T((3, 5))}, r"gate has shape \(3, 5\); .*gate.reshape\(\(3, 5, 1\)\)"),
    ({"gate": T((1, 3, 1, 16))}, r"gate has shape \(1, 3, 1, 16\)"),
]
OF_POSITIONS = [
    ({"labels": None}, "labels is a NoneType; expected an array"),
    ({"labels": T((2, 1, 1), int)}, r"labels have shape \(2, 1, 1\); expected \(2,\)"),
    ({"labels": T(3, int)}, r"labels have shape \(3,\); expected \(2,\)"),
    ({"where": T((2, 3))}, "float32; expected bool"),
    ({"where": T(3, bool)}, r"\(2,\), with 1 axes"),
    ({"where": T((2, 2), bool)}, r"where has shape \(2, 2\); expected .* broadcasts to logits' sh"),
    ({"where": np.ones(2, int)}, r"where has dtype int\d\d"),
    ({"logits_scale": T(3)}, r"\(3,\); expected .* labels' shape \(2,\), with 1 axes"),
    ({"logits_scale": T(2, bool)}, "logits_scale has dtype bool; expected a number or an"),
]

# Maps a function to a pair: valid arguments, and a list of (changed arguments, error message). Each
# change makes the arguments invalid.
ARGUMENTS = {
    **dict.fromkeys(SOFTMAXES, ({"x": T((2, 3))}, OF_SOFTMAX)),
    **dict.fromkeys(("layer_norm", "rms_norm"), ({"x": T((2, 3, 4))}, OF_NORM)),
    **dict.fromkeys(("rms_norm_add", "rms_norm_add_rms_norm"), (ROWS, OF_RESIDUAL)),
    **dict.fromkeys(("add_layer_norm", "add_rms_norm"), (ROWS, OF_RESIDUAL + OF_GATE)),
    "rms_norm_gated": (
        GATED,
        [
            ({"gate": T((4, 6, 8))}, r"gate has shape \(4, 6, 8\); expected \(4, 6, 16\), the sh"),
            ({"gate": T(16)}, r"gate has shape \(16,\); .*broadcast gate, e.g."),
            ({"scale": T(8)}, r"scale has shape \(8,\); expected \(16,\)"),
            ({"scale": T((3, 16))}, r"scale has shape \(3, 16\); expected \(16,\).*or none"),
            ({"x": T(()), "gate": T(())}, r"x has shape \(\); expected \(..., d\), a vector"),
            ({"activation": jax.nn.silu}, "activation=.*silu.*; expected one of 'silu', 'gelu', "),
            ({"activation": None}, "activation=None; expected one of 'silu', 'gelu', 'relu', 'l"),
        ],
    ),
    "rms_norm_rope": (
        ROPE,
        [
            ({"scale": T((2, 16))}, r"scale has shape \(2, 16\); expected \(16,\), the"),
            ({"scale": T(8)}, r"scale has shape \(8,\); expected \(16,\)"),
            ({"sin": T((8, 1, 4))}, r"cos has shape \(8, 1, 8\) and sin \(8, 1, 4\), and"),
            ({"cos": T(9), "sin": T(9)}, r"one column for each pair .* 8 at most"),
            (
                dict.fromkeys(("cos", "sin"), T((7, 1, 8))),
                r"broadcasts to \(4, 8, 2, r / 2\).*give an axis of x that shares them the size 1",
            ),
            (dict.fromkeys(("cos", "sin"), T((1, 4, 8, 2, 8))), "one shape that"),
            ({"cos": T(()), "sin": T(())}, r"cos has shape \(\) and sin \(\)"),
            ({"x": T(())}, r"x has shape \(\); expected \(..., d\), a vector"),
        ],
    ),
    "rms_norm_linear": (
        LINEAR,
        [
            *OF_NORM_LINEAR,
            ({"scale": T((1, 3))}, r"\(1, 3\); expected \(3,\).*last axis of x"),
            ({"residual": T(3)}, r"residual has shape \(3,\); expected \(2, 3\)"),
            ({"activation": "tanh"}, "'tanh'; expected one of 'relu', .* or None; apply"),
            ({"activation": jnp.tanh}, "activation=.*; expected one of 'relu'"),
        ],
    ),
    "softmax_cross_entropy_with_integer_labels": (
        LOGITS,
        [
            *OF_POSITIONS,
            *OF_ONE_HOT_LOGITS,
            ({"logits": T((2, 3), int)}, "logits has dtype int32.*astype"),
            ({"where": "all"}, "where is a str; expected an array"),
            (
                {"where": T((2, 3), bool), "label_smoothing": 0.1},
                "label_smoothing=0.1 with a mask of classes.*leave one of both out",
            ),
        ],
    ),
    "log_prob_and_entropy": (
        LOGITS,
        [*OF_POSITIONS, *OF_ONE_HOT_LOGITS, *OF_SEVERAL],
    ),
    "kl_divergence": (
        {"logits": T((2, 3)), "teacher_logits": T((2, 3))},
        [
            ({"logits": T((2, 3), int)}, "logits has dtype int32.*astype"),
            ({"teacher_logits": T((2, 3), int)}, "teacher_logits has dtype int32.*astype"),
            (
                {"teacher_logits": T((2, 4))},
                r"teacher_logits has shape \(2, 4\); expected \(2, 3\), the shape of logits",
            ),
            ({"where": T(2, int)}, "where has dtype int32; expected bool .*or a float"),
            ({"where": T(3)}, r"where has shape \(3,\); .* positions' shape \(2,\), with 1 axes"),
            ({"where": T((2, 3))}, "where has dtype float32; expected bool"),
            ({"where": "all"}, "where is a str; expected an array"),
            ({"logits_scale": T(3)}, r"\(3,\); expected .* positions' shape \(2,\), with 1 axes"),
            ({"logits_scale": T((2, 3))}, r"logits_scale has shape \(2, 3\); expected a number"),
            ({"logits_scale": T(2, bool)}, "logits_scale has dtype bool; expected a number or an"),
            ({"logits_scale": 1e-30, "teacher_logit_softcap": 1e30}, "scale / teacher_logit_soft"),
        ],
    ),
    "linear_softmax_cross_entropy": (
        LOSS,
        [
            *OF_LINEAR_LOSS,
            *OF_ONE_HOT,
            ({"where": np.ones(2, int)}, "where has dtype int32; expected bool .*or a float"),
            ({"where": T((1, 2), bool)}, r"labels' shape \(2,\), with 1 axes.*reshape"),
            ({"labels": T((2, 1), int)}, r"\(2, 1\); expected \(2,\).*reshape"),
        ],
    ),
    "linear_kl_divergence": (
        {**LINEAR, **OF_TEACHER},
        [
            *(({**case, **OF_TEACHER}, message) for case, message in OF_LINEAR_LOSS[:8]),
            (
                {"teacher_weight": T((3, 5))},
                r"teacher_weight has shape \(3, 5\); expected \(4, V\)",
            ),
            (
                {"teacher_x": T((3, 4))},
                r"teacher_x has shape \(3, 4\); expected \(2, 4\), the positions",
            ),
            ({"teacher_weight": T((4, 6))}, r"expected \(4, 5\), the classes of weight \(3, 5\)"),
            ({"teacher_bias": T(4)}, r"teacher_bias has shape \(4,\); expected \(5,\)"),
            ({"where": np.ones(2, int)}, "where has dtype int32; expected bool .*or a float"),
            ({"where": T((2, 5), bool)}, r"where has shape \(2, 5\); .* positions' shape \(2,\)"),
            ({"logits_scale": T(3)}, r"\(3,\); expected .* positions' shape \(2,\), with 1 axes"),
        ],
    ),
    "linear_log_prob_and_entropy": (
        LOSS,
        [
            *OF_LINEAR_LOSS,
            *OF_ONE_HOT,
            ({"where": np.ones(2, int)}, r"where has dtype int\d\d; expected bool"),
            ({"where": T((2, 5))}, "where has dtype float32; expected bool"),
            *OF_SEVERAL,
            ({"where": T(3, bool)}, r"\(2,\), with 1 axes.*2 axes: which classes"),
            ({"where": T((2, 3), bool)}, r"\(2, 3\).* logits' shape \(2, 5\)"),
        ],
    ),
}
OF_PRODUCT = [
    *(({"weight": a["weight"]}, m) for a, m in OF_NORM_LINEAR[1:3]),
    OF_NORM_LINEAR[3],
    ({"activation": "tanh"}, "'tanh'; expected one of 'relu', .* or an elementwise"),
    ({"activation": None}, "activation=None; expected .* for none, lambda x: x"),
    ({"activation": jnp.sum}, r"activation returned shape \(\) .* expected its shape"),
    ({"activation": lambda x: None}, "activation returned a NoneType; expected an"),
    ({"activation": lambda x: x + 1j}, "activation returned dtype complex64; expec"),
    ({"product": lambda h, w: None}, "product returned a NoneType; expected an array"),
    ({"product": lambda h, w: h > 0}, "product returned dtype bool; expected"),
    ({"product": jnp.matmul, "bias": T(3)}, r"bias has shape \(3,\); expected \(5,\)"),
    (
        {"product": lambda h, w: h.sum(), "bias": T(5)},
        r"bias has shape \(5,\); expected \(\)",
    ),
    ({"product": jnp.matmul, "weight": "w"}, "weight has a str; expected an array"),
    (
        {"out_sharding": jax.P("data"), "product": jnp.matmul},
        "and product=; expected one of them; give it to the product",
    ),
]
ARGUMENTS["activation_linear"] = (
    {"x": T((2, 3)), "weight": T((3, 5))},
    [*OF_PRODUCT, ({"x": T(())}, r"x has shape \(\); expected \(..., f\), a vector")],
)
ARGUMENTS["gated_linear"] = (
    PRODUCT,
    [
        *OF_PRODUCT,
        ({"up": T(3)}, r"up has shape \(3,\); expected \(2, 3\), the shape of gate"),
        ({"gate": T(())}, r"gate has shape \(\); expected \(..., f\), a vector"),
    ],
)


def test_every_function_has_errors_of_its_own():
    assert {*ARGUMENTS} == {*NAMES}


@pytest.mark.parametrize(
    ("name", "i"), [(name, i) for name in ARGUMENTS for i in range(len(ARGUMENTS[name][1]))]
)
def test_arguments(name, i):
    given, cases = ARGUMENTS[name]
    arguments, message = cases[i]
    call = functools.partial(getattr(jaxnorm, name), **{**given, **arguments})
    for run in (call, lambda: jax.jit(lambda: call())()):
        with pytest.raises(CAUSED, match=f"^{name}: .*{message}"):
            run()


@pytest.mark.parametrize("name", NAMES)
def test_options_are_named(name):
    parameters = inspect.signature(getattr(jaxnorm, name)).parameters
    for option in {*OPTIONS} & {*parameters} - {"axis"}:
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY


# ------------------------------------------------------------------------------ hints of errors

LOGITS_3D, POSITIONS = (
    {"logits": T((4, 6, 9)), "labels": jnp.zeros((4, 6), int)},
    {"x": T((4, 6, 3))},
)
HEADS = {**POSITIONS, "weight": T((3, 9)), "labels": jnp.zeros((4, 6), int)}
TEACHER = {**POSITIONS, "weight": T((3, 9)), "teacher_x": T((4, 6, 5)), "teacher_weight": T((5, 9))}
KL, CE = "kl_divergence", "softmax_cross_entropy_with_integer_labels"
LINEAR_CE, LINEAR_KL = "linear_softmax_cross_entropy", "linear_kl_divergence"
# Calls with an array of a wrong shape, and a part of the hint, or None for errors without a hint.
HINTS = [
    *(
        (name, {**given, argument: T(shape, dtype)}, hint)
        for name, given in ((CE, LOGITS_3D), (LINEAR_CE, HEADS), (LINEAR_KL, TEACHER))
        for argument, dtype in (("where", bool), ("where", "float32"), ("logits_scale", "float32"))
        for shape, hint in (((4,), "(4, 1)"), ((6,), "(1, 6)"), ((4, 5), None))
    ),
    *(
        (name, {**given, argument: T((4, 6, 1))}, "(4, 6)")
        for name, given in ((CE, LOGITS_3D), (LINEAR_CE, HEADS), (LINEAR_KL, TEACHER))
        for argument in ("where", "logits_scale")
        if (name, argument) != (CE, "where")  # weights of classes
    ),
    (CE, {**LOGITS_3D, "where": T(9, bool)}, "(1, 1, 9)"),
    (CE, {**LOGITS_3D, "where": [[True]] * 6}, "(1, 6)"),
    (CE, {**LOGITS_3D, "where": T(9)}, None),
    (CE, {**LOGITS_3D, "labels": [[[0]] * 6] * 4}, "(4, 6)"),
    (CE, {**LOGITS_3D, "labels": T(6, int)}, "broadcast_to"),
    (LINEAR_CE, {**HEADS, "weight": T((3, 3, 3))}, "reshape(3, -1)"),
    (LINEAR_CE, {**HEADS, "bias": T((1, 9))}, "bias.reshape((9,))"),
    (LINEAR_CE, {**HEADS, "bias": T(8)}, None),
    (LINEAR_CE, {**HEADS, "where": T((4, 6, 9), bool)}, None),
    (LINEAR_CE, {**HEADS, "where": T((1, 1, 9), bool)}, "bias=jnp.where"),
    (LINEAR_KL, {**TEACHER, "teacher_weight": T((9, 5))}, "teacher_weight.T"),
    (LINEAR_KL, {**TEACHER, "teacher_x": T((24, 5))}, "(4, 6, 5)"),
    (LINEAR_KL, {**TEACHER, "teacher_x": T((4, 5, 5))}, None),
    (KL, {"logits": T((2, 3)), "teacher_logits": T(3)}, "broadcast_to"),
    ("add_rms_norm", {**ROWS, "residual": T((15, 16))}, "(3, 5, 16)"),
    ("add_rms_norm", {**ROWS, "residual": T((3, 1, 16))}, "broadcast_to"),
    ("layer_norm", {"x": T((3, 5, 16)), "scale": T((3, 16))}, "(3, 1, 16)"),
    ("layer_norm", {"x": T((3, 5, 16)), "scale": T(())}, "(1,)"),
    ("layer_norm", {"x": T((3, 5, 16)), "bias": T(15)}, None),
    ("softmax", {"x": T((2, 3)), "where": T(2, bool)}, "(2, 1)"),
    ("softmax", {"x": T((2, 3)), "where": [1.0, 0, 1]}, "jnp.asarray(where, jnp.bool_)"),
    ("softmax", {"x": T((2, 3)), "bias": T((1, 2, 3))}, "bias.reshape((2, 3))"),
    ("softmax", {"x": T(())}, "x[None]"),
    ("softmax", {"x": T(()), "axis": None}, "x[None]"),
    ("softmax", {"x": T(()), "axis": 3}, None),
    ("softmax", {"x": [1.0, 2.0]}, "jnp.asarray(x, jnp.float32)"),
    ("softmax", {"x": None}, None),
]
HINT = re.compile(r"(?:e\.g\.|use) (?:(\w+)=)?(\S.*?)(?=, or |, which |; |\n|$)")


def followed(call, arguments, message):
    """Follow the first hint of an error. Return True if it has a hint."""
    names = rf"\b(?:{'|'.join(arguments)})\b"
    hints = [m.groups() for m in HINT.finditer(message) if re.search(names, m.group(2))]
    if (
        not hints
        or "..." in hints[0][1]
        or " of " in hints[0][1]
        or hints[0][1].startswith("-jaxnorm")
    ):
        return False
    target, expression = hints[0]
    name = re.search(names, expression).group()
    changed = eval(expression, {"jnp": jnp, **arguments})
    kept = {n: a for n, a in arguments.items() if n != name or not target}
    call(**{**kept, target or name: changed})
    return True


def error_of(call, **arguments):
    with pytest.raises(CAUSED) as caught:
        call(**arguments)
    return str(caught.value)


@pytest.mark.parametrize("i", range(len(HINTS)))
def test_hints(i):
    """A call works after the hint of its error is followed."""
    name, arguments, hint = HINTS[i]
    call = getattr(jaxnorm, name)
    message = error_of(call, **arguments)
    assert hint is None or hint in message, message
    assert followed(call, arguments, message) == (hint is not None), message


@pytest.mark.parametrize("name", NAMES)
def test_hints_of_other_errors(name):
    """No hint of an error that `ARGUMENTS` expects fails."""
    given, cases = ARGUMENTS[name]
    for changed, _ in cases:
        arguments = {**given, **changed}
        followed(getattr(jaxnorm, name), arguments, error_of(getattr(jaxnorm, name), **arguments))


# Maps what replaces an array to three things: a function that makes it from the array, whether a
# hint can say how to convert it, and the error message, or None for any. Labels, masks and scales
# of logits may be lists, and of other dtypes. So the entries with a message are tested only in
# place of floating-point arrays.
UNSUPPORTED = {
    "swapped": (lambda a: a.astype(a.dtype.newbyteorder("S")), True, None),
    "long": (lambda a: a.astype(np.longdouble), True, None),
    "masked": (np.ma.masked_array, True, None),
    "text": (lambda a: np.full(a.shape, "a"), False, None),
    "objects": (lambda a: np.full(a.shape, object()), False, None),
    "dates": (lambda a: np.zeros(a.shape, "datetime64[s]"), True, None),
    "keys": (lambda a: jax.random.split(jax.random.key(0), a.shape), False, None),
    "complex": (lambda a: a.astype(complex), False, None),
    "a list": (lambda a: a.tolist(), True, "is a list; expected an array"),
    "a string": (lambda a: "abc", False, "is a str; expected an array"),
    "None": (lambda a: None, False, "is a NoneType; expected an array"),
    "int32": (lambda a: jnp.ones(a.shape, "int32"), True, "has dtype int32"),
    "bool": (lambda a: jnp.ones(a.shape, "bool"), True, "has dtype bool"),
    "complex64": (lambda a: jnp.ones(a.shape, "complex64"), False, "has dtype complex64"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_arrays(name, kind):
    """Anything else than an array of JAX raises an error of the function, for each argument."""
    make, has_hint, expected = UNSUPPORTED[kind]
    call = plain_call_of(name)
    parameters = inspect.signature(call.func).parameters
    scales = [p for p in ("scale", "logits_scale") if p in parameters]
    others = [p for p in ("labels", "where", *scales) if p in parameters]
    for argument in dict.fromkeys([*arrays_of(name), *others]):
        is_optional = argument not in call.keywords or (name, argument) == (
            "rms_norm_rope",
            "scale",
        )
        if (expected and argument not in arrays_of(name)) or (kind == "None" and is_optional):
            continue
        default = np.zeros(4, bool) if argument == "where" else np.ones(8, np.float32)
        shapes = {"logits_scale": 4, "residual": (4, 8)}
        if argument in shapes:
            default = np.ones(shapes[argument], np.float32)
        value = np.asarray(call.keywords.get(argument, default))
        if kind == "swapped" and value.itemsize == 1:
            continue
        wrong = {argument: make(value)}
        message = error_of(call, **wrong)
        assert message.startswith(f"{name}: {argument} {expected or ''}"), message
        arguments = {**call.keywords, **wrong}
        if name in SOFTMAXES and argument == "scale":
            continue  # A scale with an axis is wrong in any dtype.
        if argument == "where" and name in SOFTMAXES:
            arguments["x"] = T((4, 4))
        assert followed(call.func, arguments, message) == has_hint, message
