"""Bad input: every error names what was given, what was expected, and the fix."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_error import assert_computes
from reference import of_roundings

import jaxnorm

pytestmark = pytest.mark.usefixtures("quick_to_compile")

X = jnp.ones((2, 3, 4))
SOFTMAXES = [jaxnorm.softmax, jaxnorm.log_softmax]
NORMS = [jaxnorm.layer_norm, jaxnorm.rms_norm]
each = pytest.mark.parametrize("function", SOFTMAXES + NORMS, ids=lambda f: f.__name__)
each_norm = pytest.mark.parametrize("function", NORMS, ids=lambda f: f.__name__)
each_softmax = pytest.mark.parametrize("function", SOFTMAXES, ids=lambda f: f.__name__)


@each
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
def test_dtype_of_x(function, dtype):
    with pytest.raises(TypeError, match=rf"{function.__name__}: x has dtype {dtype}.*cast it"):
        function(jnp.ones((2, 3), dtype))


@each
@pytest.mark.parametrize("x", [[1.0, 2.0], None, "abc"])
def test_x_is_no_array(function, x):
    with pytest.raises(TypeError, match=rf"x is a {type(x).__name__}; expected an array; convert"):
        function(x)


@each
@pytest.mark.parametrize("axis", [3, -4, (0, 5)])
def test_axis_out_of_range(function, axis):
    with pytest.raises(ValueError, match=r"out of range for x with shape \(2, 3, 4\).*-3 to 2"):
        function(X, axis=axis)


@each
def test_axis_twice(function):
    with pytest.raises(ValueError, match="twice; name each axis once"):
        function(X, axis=(1, -2))


@each
def test_no_axis(function):
    with pytest.raises(ValueError, match="names no axis"):
        function(X, axis=())
    with pytest.raises(ValueError, match="out of range"):
        function(jnp.float32(1.0))


@each
@pytest.mark.parametrize("axis", [-1, 0, None])
def test_an_array_without_axes(function, axis):
    with pytest.raises(ValueError, match=r"x with shape \(\).*x\[None\]"):
        function(jnp.float32(1.0), axis=axis)


@each
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
def test_a_kernel_on_a_cpu(function):
    x = jnp.ones((128, 256))
    for call in (function, jax.jit(function, static_argnames="implementation")):
        with pytest.raises(ValueError, match="on cpu: its kernels are for NVIDIA GPUs; leave"):
            call(x, implementation="mosaic")


@each
@pytest.mark.parametrize("axis", [1.0, "last", (0, None)])
def test_axis_of_wrong_type(function, axis):
    with pytest.raises(TypeError, match="expected an integer or a tuple of integers"):
        function(X, axis=axis)


@each
@pytest.mark.parametrize("dtype", ["int8", "complex64", "float8_e4m3fn"])
def test_output_dtype(function, dtype):
    with pytest.raises(TypeError, match=rf"dtype={dtype}; expected one of bfloat16"):
        function(X, dtype=dtype)


@each
def test_output_dtype_is_no_dtype(function):
    with pytest.raises(TypeError, match="is no dtype; expected one of bfloat16"):
        function(X, dtype="half precision")


@each
def test_float64_needs_x64(function):
    with pytest.raises(TypeError, match="jax_enable_x64"):
        function(X, dtype="float64")


@each
def test_unknown_implementation(function):
    with pytest.raises(ValueError, match=r"implementation='cudnn'; expected one of 'xla'"):
        function(X, implementation="cudnn")


@each_softmax
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_where_is_not_boolean(function, dtype):
    with pytest.raises(TypeError, match=rf"where has dtype {dtype}.*additive mask to x"):
        function(X, where=jnp.zeros((2, 3, 4), dtype))


@each_softmax
@pytest.mark.parametrize("shape", [(3,), (2, 3, 5), (1, 2, 3, 4), (4, 1)])
def test_where_does_not_broadcast(function, shape):
    with pytest.raises(ValueError, match=r"broadcasts to x's shape \(2, 3, 4\)"):
        function(X, where=jnp.ones(shape, bool))


@each_norm
@pytest.mark.parametrize("shape", [(3,), (), (2, 4), (3, 3, 4), (1, 2, 3, 4), (2, 3), (3, 1, 1)])
def test_shape_of_scale(function, shape):
    expected = (
        r"scale has shape .*; expected \(4,\).* after axes that broadcast to \(2, 3\).*reshape"
    )
    with pytest.raises(ValueError, match=expected):
        function(X, jnp.ones(shape))


@each_norm
@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 4), (2, 1, 4), (2, 3, 4), (1,), (2, 1, 1)])
def test_scale_of_groups(function, shape):
    assert function(X, jnp.ones(shape)).shape == X.shape


@each_norm
def test_shape_of_scale_over_several_axes(function):
    with pytest.raises(ValueError, match=r"scale has shape \(4, 2\); expected \(2, 4\)"):
        function(X, jnp.ones((4, 2)), axis=(2, 0))
    for shape in [(2, 4), (1, 4), (2, 1), (3, 2, 1), (1, 1)]:
        assert function(X, jnp.ones(shape), axis=(2, 0)).shape == X.shape


@each_norm
def test_bias_by_keyword(function):
    bias = jnp.arange(4.0)
    np.testing.assert_allclose(function(X * 0, bias=bias), jnp.broadcast_to(bias, X.shape))
    with pytest.raises(ValueError, match=rf"{function.__name__}: bias has shape \(3,\); expected"):
        function(X, bias=jnp.ones(3))


def test_bias():
    with pytest.raises(ValueError, match=r"layer_norm: bias has shape \(3,\); expected \(4,\)"):
        jaxnorm.layer_norm(X, None, jnp.ones(3))
    with pytest.raises(TypeError, match="bias has dtype int32"):
        jaxnorm.layer_norm(X, None, jnp.ones(4, int))


@each_norm
def test_dtype_of_scale(function):
    with pytest.raises(TypeError, match="scale has dtype int32"):
        function(X, jnp.ones(4, int))


@each_norm
@pytest.mark.parametrize("epsilon", [-1e-6, float("nan"), float("inf")])
def test_epsilon(function, epsilon):
    with pytest.raises(ValueError, match=r"epsilon=.*; expected a finite number of at least 0"):
        function(X, epsilon=epsilon)


@each_norm
@pytest.mark.parametrize("name", ["epsilon", "scale_offset"])
def test_traced_or_odd_numbers(function, name):
    with pytest.raises(TypeError, match=f"{name} is a traced value"):
        jax.jit(lambda v: function(X, **{name: v}))(1.0)
    for text in ("small", "0.1"):
        with pytest.raises(TypeError, match=f"{name} is a str; expected a number"):
            function(X, **{name: text})


@each_norm
def test_save(function):
    with pytest.raises(ValueError, match=r"save='both'; expected one of 'output', 'input'"):
        function(X, save="both")


@each
def test_errors_come_before_tracing(function):
    """Under jit the error is the library's own, raised while the caller's code is traced."""
    with pytest.raises(ValueError, match=r"out of range for x with shape \(2, 3, 4\)"):
        jax.jit(lambda x: function(x, axis=7))(X)


@each
def test_numpy_input(function):
    assert function(np.ones((2, 3), np.float32)).dtype == "float32"


def test_axis_none_means_all():

    def total(x):
        return jaxnorm.softmax(x, None).sum()

    assert_computes(total(X), total, X, expected=1.0)
    np.testing.assert_array_equal(
        jaxnorm.rms_norm(X, axis=None), jaxnorm.rms_norm(X, axis=(0, 1, 2))
    )


LABELS = jnp.zeros((2, 3), int)
W = jnp.ones((4, 5))
# Every option that is a number, of every function.
NUMBERS = [
    *[(f, name) for f in (*NORMS, jaxnorm.rms_norm_add) for name in ("epsilon", "scale_offset")],
    *[
        (f, name)
        for f in (jaxnorm.add_layer_norm, jaxnorm.add_rms_norm, jaxnorm.rms_norm_add_rms_norm)
        for name in ("epsilon", "scale_offset")
    ],
    *[
        (f, name)
        for f in (jaxnorm.rms_norm_linear, jaxnorm.rms_norm_rope, jaxnorm.rms_norm_gated)
        for name in ("epsilon", "scale_offset")
    ],
    *[(f, "scale") for f in SOFTMAXES],
    *[
        (f, name)
        for f in (
            jaxnorm.softmax_cross_entropy_with_integer_labels,
            jaxnorm.linear_softmax_cross_entropy,
        )
        for name in ("label_smoothing", "z_loss")
    ],
    *[
        (f, name)
        for f in (jaxnorm.log_prob_and_entropy, jaxnorm.linear_log_prob_and_entropy)
        for name in ("logits_scale", "logit_softcap")
    ],
    (jaxnorm.check_params, "scale_offset"),
]
each_number = pytest.mark.parametrize(
    ("function", "name"), NUMBERS, ids=lambda v: v if isinstance(v, str) else v.__name__
)


def called(function, **options):
    """The function with arrays of the shapes that it takes."""
    arrays = {
        "add_layer_norm": (X, X),
        "add_rms_norm": (X, X),
        "rms_norm_add": (X, X),
        "rms_norm_add_rms_norm": (X, X),
        "rms_norm_linear": (X, W),
        "rms_norm_rope": (X, None, jnp.ones(2), jnp.ones(2)),
        "rms_norm_gated": (X, X),
        "softmax_cross_entropy_with_integer_labels": (X, LABELS),
        "linear_softmax_cross_entropy": (X, W, LABELS),
        "log_prob_and_entropy": (X, LABELS),
        "linear_log_prob_and_entropy": (X, W, LABELS),
        "check_params": ({"scale": jnp.ones(4)}, "float32"),
    }
    return function(*arrays.get(function.__name__, (X,)), **options)


@each_number
def test_a_boolean_is_no_number(function, name):
    called(function, **{name: 1})
    for value in (True, np.True_, np.array(True), jnp.array(True)):
        expected = f"{function.__name__}: {name} is a {type(value).__name__}; expected a number"
        with pytest.raises(TypeError, match=expected):
            called(function, **{name: value})


@each_number
@pytest.mark.parametrize("power", [400, 5000])  # the second has no decimal text in Python
def test_a_number_that_no_float_holds(function, name, power):
    bits = (10**power).bit_length()
    expected = (
        rf"{function.__name__}: {name}=\(an integer of {bits} bits\); expected a finite number"
    )
    for value in (10**power, -(10**power)):
        with pytest.raises(ValueError, match=expected):
            called(function, **{name: value})


@each
@pytest.mark.parametrize("axis", [True, np.True_, (False, 1), [False]])
def test_a_boolean_is_no_axis(function, axis):
    function(X, axis=1)  # which compares equal to True, wherever calls are looked up
    with pytest.raises(TypeError, match="expected an integer or a tuple of integers"):
        function(X, axis=axis)


@each
def test_an_axis_that_is_very_large(function):
    expected = rf"{function.__name__}: axis=\(an integer of {(10**5000).bit_length()} bits\) is out"
    with pytest.raises(ValueError, match=expected):
        function(X, axis=10**5000)


@each_softmax
def test_causal_is_true_or_false(function):
    causal = function(X, causal=True)
    np.testing.assert_array_equal(function(X, causal=np.True_), causal)
    np.testing.assert_array_equal(function(X, causal=np.False_), function(X))
    for value in ("no", "", 0, 1, None, 1.0, jnp.array(True)):
        expected = rf"{function.__name__}: causal=.* is a {type(value).__name__}; expected True or"
        with pytest.raises(TypeError, match=expected):
            function(X, causal=value)
    with pytest.raises(TypeError, match="causal is a traced value; expected a Python boolean"):
        jax.jit(lambda causal: function(X, causal=causal))(True)


@pytest.mark.parametrize(
    "loss", [jaxnorm.linear_softmax_cross_entropy, jaxnorm.linear_log_prob_and_entropy]
)
def test_chunk(loss):
    called(loss, chunk=10**30)  # of more rows than there are
    for value in (True, np.True_, 1.0, "8"):
        with pytest.raises(TypeError, match=r"chunk=.*; expected a number of rows, a Python int"):
            called(loss, chunk=value)
    for value in (0, -(10**5000)):
        with pytest.raises(ValueError, match=r"chunk=.*; expected a number of rows of at least 1"):
            called(loss, chunk=value)
    with pytest.raises(TypeError, match="chunk is a traced value; expected a Python integer"):
        jax.jit(lambda chunk: called(loss, chunk=chunk))(2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda labels: jaxnorm.softmax_cross_entropy_with_integer_labels(X, labels),
        lambda labels: jaxnorm.linear_softmax_cross_entropy(X, W, labels),
        lambda labels: jaxnorm.log_prob_and_entropy(X, labels),
        lambda labels: jaxnorm.linear_log_prob_and_entropy(X, W, labels),
    ],
    ids=["logits", "linear", "log_prob", "linear log_prob"],
)
class TestLabels:
    @pytest.mark.parametrize("label", [2**40, -(2**40), 2**70, np.int64(2**40)])
    def test_of_lists_that_no_integer_of_jax_holds(self, loss, label):
        with pytest.raises(
            ValueError, match="labels has an integer that JAX's integers do not hold"
        ):
            loss([[0, 1, label], [0, 0, 0]])

    def test_of_lists(self, loss):
        np.testing.assert_array_equal(
            loss([[0, 1, 2], [3, 2, 1]]), loss(jnp.array([[0, 1, 2], [3, 2, 1]]))
        )

    @pytest.mark.parametrize("labels", [["a"], [[0], [1, 2]], None, "abc"])
    def test_that_are_no_array(self, loss, labels):
        with pytest.raises(TypeError, match=r"labels is a .*; expected an array"):
            loss(labels)

    @pytest.mark.parametrize("labels", [[[True] * 3] * 2, [[0.0] * 3] * 2])
    def test_that_are_no_integers(self, loss, labels):
        with pytest.raises(TypeError, match=r"labels has dtype .*; expected integers"):
            loss(labels)


def test_a_label_of_64_bits_that_is_numpys():
    """One that is no class makes a loss of NaN, as in an array: it is not wrapped into one."""
    loss = jaxnorm.softmax_cross_entropy_with_integer_labels(jnp.ones(4), np.int64(2**40))
    assert np.isnan(loss)


@pytest.mark.parametrize("power", [400, 5000])  # the second has no decimal text in Python
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


@pytest.mark.parametrize(
    ("function", "arguments", "error"),
    [
        ("layer_norm", {"epsilon": -1.0}, "layer_norm: epsilon=-1.0"),
        ("rms_norm", {"save": "both"}, "rms_norm: save='both'"),
        ("softmax", {"where": "no"}, "softmax: where is a str"),
        ("softmax", {"causal": "no"}, "softmax: causal='no'"),
        ("rms_norm_linear", {"activation": "tanh"}, "rms_norm_linear: activation='tanh'"),
    ],
)
def test_implementation_for_refuses_as_the_function_does(function, arguments, error):
    with pytest.raises((TypeError, ValueError), match=f"^{error}"):
        jaxnorm.implementation_for(function, (4, 8), "float32", **arguments)


@pytest.mark.parametrize("name", sorted({f.__name__ for f, _ in NUMBERS} - {"check_params"}))
def test_what_a_kernel_refuses_names_the_function(name):
    """Rows of 4 columns are too short for each of them."""
    expected = rf"^{name}: implementation='mosaic' cannot run the forward of \(6, [45]\): "
    with pytest.raises(ValueError, match=expected):
        called(getattr(jaxnorm, name), implementation="mosaic")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a machine without a GPU says")
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (jaxnorm.linear_softmax_cross_entropy, {"reduction": "mean"}),
        (jaxnorm.linear_softmax_cross_entropy, {"reduction": "none"}),
        (jaxnorm.linear_log_prob_and_entropy, {}),
    ],
)
def test_what_is_refused_of_a_linear_loss_names_it(function, options):
    """Known when it is lowered, where the call of a chunk is one of its logits."""
    x, weight, labels = jnp.ones((128, 256)), jnp.ones((256, 1024)), jnp.zeros(128, int)
    loss = functools.partial(function, implementation="mosaic", **options)
    gradient = jax.jit(jax.grad(lambda *arrays: sum(map(jnp.sum, jax.tree.leaves(loss(*arrays))))))
    for call in (loss, jax.jit(loss), gradient):
        with pytest.raises(ValueError, match=f"^{loss.func.__name__}: .* cannot run on cpu"):
            call(x, weight, labels)


# ---------------------------------------------------- messages for mistakes that people make

LOGITS, ONE_HOT = jnp.ones((2, 3, 5)), jnp.ones((2, 3, 5), int)
LOSSES = {
    "softmax_cross_entropy_with_integer_labels": jaxnorm.softmax_cross_entropy_with_integer_labels,
    "log_prob_and_entropy": jaxnorm.log_prob_and_entropy,
}
LINEAR_LOSSES = {
    "linear_softmax_cross_entropy": jaxnorm.linear_softmax_cross_entropy,
    "linear_log_prob_and_entropy": jaxnorm.linear_log_prob_and_entropy,
}


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool"])
def test_one_hot_labels(dtype):
    """Of any dtype: to cast them, as the message for other floats says, would not help."""
    labels = ONE_HOT.astype(dtype)
    for name, function in LOSSES.items():
        with pytest.raises(ValueError, match=rf"^{name}: .*one-hot.* jnp.argmax\(labels, axis=2\)"):
            function(LOGITS, labels)
        with pytest.raises(ValueError, match=r"expected \(3, 5\).* jnp.argmax\(labels, axis=0\)"):
            function(LOGITS, labels, axis=0)
        with pytest.raises(ValueError, match=r"expected \(2,\).*jnp.argmax of labels with their"):
            function(LOGITS, labels, axis=(1, 2))
    for name, function in LINEAR_LOSSES.items():
        with pytest.raises(ValueError, match=rf"^{name}: .*one-hot.* jnp.argmax\(labels, axis=2\)"):
            function(X[..., :4], jnp.ones((4, 5)), labels)


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 5), (2, 3, 1)])
def test_a_mask_of_classes_for_the_linear_loss(shape):
    """What the message names is the loss with this mask."""
    name, labels, weight = "linear_softmax_cross_entropy", jnp.zeros((2, 3), int), jnp.ones((4, 5))
    mask = jnp.ones(shape, bool).at[..., 1:2].set(shape[-1] == 1)
    with pytest.raises(ValueError, match=rf"^{name}: .*mask of classes.*bias=.*linear_log_prob"):
        LINEAR_LOSSES[name](X, weight, labels, where=mask)
    log_prob, _ = jaxnorm.linear_log_prob_and_entropy(X, weight, labels, where=mask)
    expected = jaxnorm.softmax_cross_entropy_with_integer_labels(X @ weight, labels, where=mask)
    # The matmul's sums of 4 terms, 5 exponentials and their sum, the logarithm: 16 roundings.
    bound = of_roundings(16, "float32", 1.0)
    np.testing.assert_allclose(-log_prob, expected, rtol=bound)
    if shape == (1, 1, 5):
        bias = jnp.where(mask[0, 0], 0, -jnp.inf)
        losses = LINEAR_LOSSES[name](X, weight, labels, bias=bias, reduction="none")
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
