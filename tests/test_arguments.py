"""Arguments of unusual types: accepted types, and error messages for common mistakes."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import OTHERS, options_of, plain_call_of, public_functions
from reference import of_roundings

import jaxnorm

pytestmark = pytest.mark.usefixtures("quick_to_compile")

T = jnp.ones
X = jnp.ones((2, 3, 4))
CAUSED = (TypeError, ValueError)
CE, LINEAR_CE = "softmax_cross_entropy_with_integer_labels", "linear_softmax_cross_entropy"


def test_a_chunk_of_more_rows_than_there_are():
    for name in ("linear_softmax_cross_entropy", "linear_log_prob_and_entropy"):
        called(name, chunk=10**30)


W = jnp.ones((4, 5))
NAMES = sorted(public_functions() - OTHERS)
# Pairs (function, option) for every option whose value is a number.
NUMBERS = [
    *((n, o) for n in NAMES for o, default in options_of(n).items() if type(default) is float),
    *((n, "logit_softcap") for n in NAMES if "logit_softcap" in options_of(n)),
    ("check_params", "scale_offset"),
]
each_number = pytest.mark.parametrize(("name", "option"), NUMBERS)


def called(name, **options):
    if name == "check_params":
        return jaxnorm.check_params({"scale": jnp.ones(4)}, "float32", **options)
    return plain_call_of(name)(**options)


@each_number
def test_a_boolean_is_no_number(name, option):
    called(name, **{option: 1})
    for value in (True, np.True_, np.array(True), jnp.array(True)):
        given = f"(is a {type(value).__name__}|has dtype bool)"
        with pytest.raises(TypeError, match=f"{name}: {option} {given}; expected a number"):
            called(name, **{option: value})


@each_number
@pytest.mark.parametrize("power", [400, 5000])  # Python does not print 10**5000
def test_a_number_that_no_float_holds(name, option, power):
    bits = (10**power).bit_length()
    expected = rf"{name}: {option}=\(an integer of {bits} bits\); expected a (finite )?number"
    for value in (10**power, -(10**power)):
        with pytest.raises(ValueError, match=expected):
            called(name, **{option: value})


def test_a_flag_of_numpy():
    causal = jaxnorm.softmax(X, causal=True)
    np.testing.assert_array_equal(jaxnorm.softmax(X, causal=np.True_), causal)
    np.testing.assert_array_equal(jaxnorm.softmax(X, causal=np.False_), jaxnorm.softmax(X))


@pytest.mark.parametrize("name", [n for n in NAMES if "labels" in plain_call_of(n).keywords])
def test_labels_that_are_lists(name):
    loss = functools.partial(called, name)
    jax.tree.map(
        np.testing.assert_array_equal, loss(labels=[0, 1, 2, 3]), loss(labels=jnp.arange(4))
    )
    for label in (2**40, -(2**40), 2**70, np.int64(2**40)):
        with pytest.raises(
            ValueError, match="labels has an integer that JAX's integers do not hold"
        ):
            loss(labels=[0, 1, label, 0])
    for labels in (["a"], [[0], [1, 2]], "abc"):
        with pytest.raises(TypeError, match=r"labels is a .*; expected an array"):
            loss(labels=labels)
    for labels in ([True] * 4, [0.0] * 4):
        with pytest.raises(TypeError, match=r"labels has dtype .*; expected integers"):
            loss(labels=labels)


def test_a_label_of_64_bits_that_is_numpys():
    """A 64-bit NumPy label that is not a class gives a NaN loss.

    Converting it to 32 bits must not turn it into a valid class.
    """
    loss = jaxnorm.softmax_cross_entropy_with_integer_labels(jnp.ones(4), np.int64(2**40))
    assert np.isnan(loss)


@pytest.mark.parametrize("power", [400, 5000])  # Python does not print 10**5000
@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        *[(jaxnorm.softmax, name, "floating-point numbers") for name in ("x", "bias")],
        (jaxnorm.softmax, "where", "booleans"),
        (jaxnorm.layer_norm, "scale", "floating-point numbers"),
        (jaxnorm.softmax_cross_entropy_with_integer_labels, "labels", "smaller ones"),
    ],
)
def test_an_integer_in_place_of_an_array(function, name, expected, power):
    options = dict(zip(inspect.signature(function).parameters, (X,))) | {name: 10**power}
    bits = (10**power).bit_length()
    found = rf"{name} has an integer that JAX's integers do not hold: \(an integer of {bits} bits\)"
    with pytest.raises(ValueError, match=rf"^{function.__name__}: {found}; expected {expected}"):
        function(**options)


@pytest.mark.parametrize("name", [n for n in NAMES if "implementation" in options_of(n)])
def test_what_a_kernel_refuses_names_the_function(name):
    """An error about a call that kernels do not support names the public function.

    Rows of 4 columns are too short for every kernel.
    """
    sizes = dict.fromkeys(("weight", "teacher_weight"), np.s_[:4])
    sizes |= {"cos": np.s_[..., :2], "sin": np.s_[..., :2], "labels": ...}
    call = plain_call_of(name)
    arrays = {n: a[sizes.get(n, np.s_[..., :4])] for n, a in call.keywords.items()}
    expected = rf"^{name}: implementation='mosaic' cannot run the forward of \(4, [48]\): "
    with pytest.raises(ValueError, match=expected):
        call.func(**arrays, implementation="mosaic")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
@pytest.mark.parametrize("name", [n for n in NAMES if "implementation" in options_of(n)])
def test_a_kernel_on_a_cpu(name):
    """On a CPU, requesting kernels raises an error, even if a kernel would support the shape."""
    arrays = {"labels": jnp.zeros(128, int), "weight": T((256, 256)), "scale": T(256)}
    arrays |= dict.fromkeys(("cos", "sin"), T((128, 128))) | {"teacher_weight": T((256, 256))}
    given = {n: arrays.get(n, T((128, 256))) for n in plain_call_of(name).keywords}
    if name == "rms_norm_linear":
        given = {n: a.astype("bfloat16") for n, a in given.items()}
    call = functools.partial(getattr(jaxnorm, name), **given, implementation="mosaic")
    message = rf"^{name}: implementation='mosaic' cannot run on cpu: its kernels are for NVIDIA"
    for run in (call, lambda: jax.jit(lambda: call())()):
        with pytest.raises(ValueError, match=message):
            run()


# ---------------------------------------------------- messages for mistakes that people make

LOGITS = jnp.ones((2, 3, 5))


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 5)])
def test_a_mask_of_classes_for_the_linear_loss(shape):
    """The error about a mask of classes names a function that supports such a mask."""
    name, labels, weight = "linear_softmax_cross_entropy", jnp.zeros((2, 3), int), jnp.ones((4, 5))
    mask = jnp.ones(shape, bool).at[..., 1].set(False)
    bias = "bias=jnp.where.*" if shape == (1, 1, 5) else ""
    with pytest.raises(ValueError, match=rf"^{name}: .*mask of classes.*{bias}linear_log_prob"):
        jaxnorm.linear_softmax_cross_entropy(X, weight, labels, where=mask)
    log_prob, _ = jaxnorm.linear_log_prob_and_entropy(X, weight, labels, where=mask)
    expected = jaxnorm.softmax_cross_entropy_with_integer_labels(X @ weight, labels, where=mask)
    # A loss has at most 16 roundings. They occur in the logits (sums of 4 products), in the 5
    # exponentials, in the sum of the exponentials, and in its logarithm.
    bound = of_roundings(16, "float32", 1.0)
    np.testing.assert_allclose(-log_prob, expected, rtol=bound)
    if shape == (1, 1, 5):
        bias = jnp.where(mask.reshape(-1), 0, -jnp.inf)
        losses = jaxnorm.linear_softmax_cross_entropy(
            X, weight, labels, bias=bias, reduction="none"
        )
        np.testing.assert_allclose(losses, expected, rtol=bound)


@pytest.mark.parametrize("width", [8, 6])
def test_tables_that_hold_each_angle_twice(width):
    table = jnp.ones((3, 1, width))
    x = jnp.ones((2, 3, 2, 8))
    with pytest.raises(
        ValueError, match=r"^rms_norm_rope: .*4 at most.* first half.*\[\.\.\., ::2"
    ):
        jaxnorm.rms_norm_rope(x, None, table, table)
    half = table[..., : width // 2]
    assert jaxnorm.rms_norm_rope(x, None, half, half).shape == x.shape


def spelled(name: str) -> str:
    """Return the other spelling: ``logit_scale``, or ``logits_softcap``."""
    return name.replace("logits_", "logit_") if "logits_" in name else name.replace("t_", "ts_")


def test_both_spellings_of_the_options_of_logits():
    """Scales and softcaps of logits have two spellings. A call that has both raises an error."""
    weight, labels = jnp.arange(20.0).reshape(4, 5), jnp.zeros((2, 3), int)
    calls = {
        **dict.fromkeys((CE, "log_prob_and_entropy"), (LOGITS, labels)),
        **dict.fromkeys((LINEAR_CE, "linear_log_prob_and_entropy"), (X, weight, labels)),
        "kl_divergence": (LOGITS, 2 * LOGITS),
        "linear_kl_divergence": (X, weight, 2 * X, weight),
    }
    for name, arrays in calls.items():
        function = getattr(jaxnorm, name)
        options = {n for n in inspect.signature(function).parameters if "_s" in n and "logit" in n}
        assert {"logits_scale", "logit_softcap"} <= options
        options = dict.fromkeys(options, 0.5)
        other = {spelled(n): value for n, value in options.items()}
        assert not {*options} & {*other}
        for result, same in zip(
            *(jax.tree.leaves(function(*arrays, **o)) for o in (options, other))
        ):
            np.testing.assert_array_equal(result, same)
        plan = functools.partial(jaxnorm.implementation_for, name, arrays[0].shape, jnp.float32)
        assert str(plan(**options)) == str(plan(**other))
        for n, value in other.items():
            with pytest.raises(TypeError, match=rf"^{name}: got both \w+= and {n}=; expected one"):
                function(*arrays, **options, **{n: value})


# ----------------------------------------------------------------- names and order of arguments

OTHER_NAMES = [
    ("rms_norm", "eps", 1e-5, "use epsilon="),
    ("rms_norm", "weight", T(8), "use scale="),
    ("rms_norm", "dim", -1, "use axis="),
    ("layer_norm", "beta", T(8), "use bias="),
    ("softmax", "mask", T((4, 8), bool), "use where="),
    ("softmax", "is_causal", True, "use causal="),
    ("softmax", "temperature", 2.0, "use scale=1 / temperature"),
    (CE, "mask", T(4, bool), "use where="),
    (CE, "ignore_index", -100, "use where=labels != ignore_index"),
    (CE, "smoothing", 0.1, "use label_smoothing="),
    (CE, "scale", 0.5, "use logits_scale="),
    (LINEAR_CE, "ignore_index", -100, "use where=labels != ignore_index"),
    (LINEAR_CE, "temperature", 2.0, "use logits_scale=1 / temperature"),
    (LINEAR_CE, "chunk_size", 2, "use chunk="),
    (LINEAR_CE, "softcap", 30.0, "use logit_softcap="),
    ("linear_kl_divergence", "reductions", "sum", "use reduction="),
    ("gated_linear", "act_fn", "gelu", "use activation="),
    ("rms_norm", "is_causal", True, "expected one of x, scale, axis"),
    ("rms_norm", "logit_scale", T(8), "use scale="),
]


@pytest.mark.parametrize(("name", "argument", "value", "hint"), OTHER_NAMES)
def test_names_of_other_libraries(name, argument, value, hint):
    call = plain_call_of(name)
    for run in (call, jax.jit(lambda v: call(**{argument: v}))):
        given = {argument: value} if run is call else {"v": 1.0}
        with pytest.raises(TypeError, match=rf"^{name}: .*keyword argument '{argument}'.*{hint}"):
            run(**given)
    if "use" in hint:
        ours, _, text = hint.removeprefix("use ").partition("=")
        call(**{ours: eval(text, {**call.keywords, argument: value}) if text else value})


SWAPPED = {
    "rms_norm_linear": (T((2, 6, 3)), T(3), T((3, 5))),
    "linear_softmax_cross_entropy": (T((2, 6, 3)), jnp.zeros((2, 6), int), T((3, 5))),
    "linear_log_prob_and_entropy": (T((2, 6, 3)), jnp.zeros((2, 6), int), T((3, 5))),
    "linear_kl_divergence": (T((2, 6, 3)), T((2, 6, 4)), T((3, 5)), T((4, 5))),
    CE: (jnp.zeros((2, 6), int), T((2, 6, 3))),
    "log_prob_and_entropy": (jnp.zeros((2, 6), int), T((2, 6, 3))),
    "gated_linear": (T((2, 6, 3)), T((3, 5)), T((2, 6, 3))),
    "activation_linear": (T((5, 3)), T((2, 5))),
    "add_rms_norm": (T((2, 6, 3)), T(3), T((2, 6, 3))),
    "rms_norm": (T(3), T((2, 6, 3))),
    "rms_norm_rope": (T((2, 6, 4)), T((6, 2)), 2 * T((6, 2)), T(4)),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_arguments(name):
    """Arrays that would be valid in another order: the error asks whether they are swapped."""
    function, arguments = getattr(jaxnorm, name), SWAPPED[name]
    what = "in another order" if name == "rms_norm_rope" else "swapped"
    for run in (function, jax.jit(function)):
        with pytest.raises(CAUSED, match=rf"^{name}: .*are .* {what}\?"):
            run(*arguments)


def test_scales_that_are_differentiated():
    with pytest.raises(TypeError, match=r"^kl_divergence: logits_scale is differentiated"):
        jax.grad(lambda s: jaxnorm.kl_divergence(T(3), T(3), logits_scale=s))(0.5)
    layers = T((2, 3)), T((3, 5)), T((2, 4)), T((4, 5))
    with pytest.raises(TypeError, match=r"^linear_kl_divergence: logits_scale is differentiated"):
        jax.grad(lambda s: jaxnorm.linear_kl_divergence(*layers, logits_scale=s))(0.5)


def test_options_of_swapped_arguments():
    """An option that has a shape but no dtype, as a NumPy dtype has, is no array."""
    with pytest.raises(ValueError, match=r"^rms_norm: .* are x and scale swapped\?"):
        jaxnorm.rms_norm(T(3), T((2, 6, 3)), dtype=np.dtype("float32"))
