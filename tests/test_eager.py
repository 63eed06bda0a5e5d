"""Calls outside of `jax.jit`, and the cost of importing the library."""

import operator
import os
import subprocess
import sys
import timeit

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import (
    ARGUMENTS,
    BASIC,
    FUNCTIONS,
    OTHERS,
    VARIANTS,
    floats_in,
    gradients,
    of_floats,
    operands_of,
    options_of,
    plain_call_of,
    public_functions,
)
from programs import primitives

import jaxnorm

PAIRS = {
    "softmax": (jaxnorm.softmax, jax.nn.softmax),
    "log_softmax": (jaxnorm.log_softmax, jax.nn.log_softmax),
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the host's time alone, as on a CPU")
@pytest.mark.parametrize("name", PAIRS)
def test_a_call_costs_about_what_jax_nn_s_does(name):
    """A call outside of `jax.jit` costs the host at most 40 us more than a call of jax.nn's.

    jaxnorm's Python code takes about 10 us; tracing the call again would take several hundred. The
    times do not include the wait for a result. If the dispatch of a call takes longer than about 10
    us, a thread of XLA sleeps between the calls, and on some machines it takes 60 us to wake.

    The test compares the shortest of many timings, because other processes make some timings
    longer.
    """
    x = jnp.ones((8, 128))
    best = dict.fromkeys(PAIRS[name], np.inf)
    for _ in range(200):
        for function in best:
            seconds = timeit.timeit(lambda f=function: f(x), number=20)
            function(x).block_until_ready()
            best[function] = min(best[function], seconds)
        ours, theirs = (seconds / 20 for seconds in best.values())
        if ours <= theirs + 40e-6:
            return
    raise AssertionError(f"{1e6 * ours:.1f} us, {1e6 * theirs:.1f} of jax.nn")


@pytest.mark.oldest_jax
@pytest.mark.parametrize(("order", "constants"), [(1, "JAX"), (2, "JAX"), (1, "NumPy")])
@pytest.mark.parametrize("name", [name for name in BASIC if "linear_loss" not in name])
def test_a_gradient_is_traced_once(name, order, constants):
    """Outside of `jax.jit`, computing a gradient a second time traces nothing again.

    The exception is `linear_loss`, which traces its argument `fun` at each call.

    Tracing would run Python code again: checks of arguments, differentiation rules or formulas.
    Operands without a gradient, such as labels and masks, are JAX arrays or NumPy arrays.
    """
    operands = [*map(jnp.asarray, operands_of(name))]
    arrays = [operands[i] for i in floats_in(operands)]
    if constants == "NumPy":
        operands = [np.asarray(a, "int64" if a.dtype == "int32" else None) for a in operands]
    function = of_floats(FUNCTIONS[name].ours, operands)

    def total(*arrays):
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(function(*arrays)))

    def gradient(*arrays):
        return jax.grad(total, tuple(range(len(arrays))))(*arrays)

    def slope(*arrays):
        return sum(jnp.sum(d**2) for d in gradient(*arrays))

    run = gradient if order == 1 else jax.grad(slope)
    run(*arrays)
    run(*arrays)
    ran = set()

    def note(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and ("/jaxnorm/" in path or "/jaxnorm_kernels/" in path):
            ran.add(path.rsplit("/", 1)[-1])

    sys.setprofile(note)
    try:
        run(*arrays)
    finally:
        sys.setprofile(None)
    assert ran == {"eager.py"}


def test_arguments_that_cannot_be_hashed():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(jaxnorm.softmax(x, [0, 2]), jaxnorm.softmax(x, (0, 2)))
    np.testing.assert_array_equal(
        jaxnorm.rms_norm(x, epsilon=np.asarray(0.1)), jaxnorm.rms_norm(x, epsilon=0.1)
    )


class Changing:
    """An object that stands for a number or an array, as an ``nnx.Param`` does, and may change.

    Two objects are equal only if they are the same object.
    """

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return jnp.asarray(self.value)

    def __float__(self):
        return float(self.value)

    def __index__(self):
        return operator.index(self.value)


class ChangingDtype(Changing):
    dtype = property(lambda self: np.dtype(self.value))


# Maps each argument that may be such an object to two values.
CHANGES = {
    **{
        name: (a, a - (np.arange(a.size) % 3 / 4).astype(a.dtype).reshape(a.shape))
        for name, a in ARGUMENTS.items()
        if name != "labels"
    },
    "labels": (ARGUMENTS["labels"], ARGUMENTS["labels"] + 1),
    **dict.fromkeys(["bias", "teacher_bias", "next_scale"], (np.zeros(8), np.arange(8.0))),
    "where": (np.ones(4, bool), np.arange(4) > 1),
    "axis": (-1, 0),
    "epsilon": (1e-6, 0.5),
    **dict.fromkeys(["scale_offset", "label_smoothing", "z_loss"], (0.0, 0.5)),
    **dict.fromkeys(["logits_scale", "logit_softcap", "teacher_logit_softcap"], (1.0, 0.5)),
    "chunk": (2, 3),
    "dtype": ("float32", "float16"),
}


@pytest.mark.oldest_jax
@pytest.mark.parametrize("name", sorted(public_functions() - OTHERS))
def test_arguments_that_change_between_calls(name):
    """A call uses the present value of an object, not the value that the object had before.

    This also holds for NumPy arrays that change in place. Results of an earlier call do not change.
    """
    call = plain_call_of(name)
    arguments = {*call.keywords, *options_of(name)}
    # The labels would not fit another axis.
    can_change = {*CHANGES} - ({"axis"} if "labels" in arguments else set())
    changed = set()
    for argument in sorted(arguments & can_change):
        before, after = CHANGES[argument]
        if argument == "scale" and name.endswith("softmax"):
            before, after = 1.0, 0.5
        if argument == "where" and name.endswith("softmax"):
            before, after = (a[:, None] for a in (before, after))
        given = (ChangingDtype if argument == "dtype" else Changing)(before)
        try:
            call(**{argument: given})
        except TypeError:  # It must be a Python number.
            continue
        given.value = after
        of_before, of_after = (call(**{argument: value}) for value in (before, after))
        jax.tree.map(np.testing.assert_array_equal, call(**{argument: given}), of_after)
        changed.add(argument)
        if argument in call.keywords:
            array = np.array(before)
            first = jax.block_until_ready(call(**{argument: array}))
            array[...] = after
            jax.tree.map(np.testing.assert_array_equal, call(**{argument: array}), of_after)
            jax.tree.map(np.testing.assert_array_equal, first, of_before)
    expected = {*call.keywords, "epsilon", "logits_scale", "scale"}
    assert expected & arguments <= changed


def test_a_traced_argument_meets_no_jit():
    """If any argument is traced, the caller's jaxpr contains the primitive itself, not a jit."""
    x, scale = jnp.ones((4, 8)), jnp.ones(8)
    for function, operand in (
        (lambda x: jaxnorm.rms_norm(x, scale), x),
        (lambda scale: jaxnorm.rms_norm(x, scale), scale),
        (lambda mask: jaxnorm.softmax(x, where=mask), x > 0),
    ):
        assert "jit" not in primitives(jax.make_jaxpr(function)(operand))


@pytest.mark.oldest_jax
@pytest.mark.parametrize("compiles", [True, False])
def test_debug_nans_names_the_call(compiles):
    """With `jax_debug_nans`, the error for a NaN names jaxnorm's function, in both passes.

    This holds with and without `jax.jit`. For rms_norm_linear, which consists of a norm and a
    matmul, the error names the norm.
    """
    x, weight, labels = jnp.ones((2, 4)), jnp.ones((4, 3)), jnp.zeros(2, jnp.int32)
    bad = x.at[0, 0].set(jnp.nan)
    functions = {
        "softmax": (),
        "rms_norm": (),
        "rms_norm_linear": (weight,),
        "softmax_cross_entropy_with_integer_labels": (labels,),
        "log_prob_and_entropy": (labels,),
        "linear_log_prob_and_entropy": (weight, labels),
        "linear_softmax_cross_entropy": (weight, labels),
    }
    with jax.debug_nans(True), jax.disable_jit(not compiles):
        for name, others in functions.items():
            for run in (getattr(jaxnorm, name), jax.jit(getattr(jaxnorm, name))):
                run(x, *others)
                named = name.removesuffix("_linear")
                with pytest.raises(FloatingPointError, match=rf"\(nan\) .* jaxnorm\.{named}\b"):
                    run(bad, *others)
        _, vjp = jax.vjp(jaxnorm.softmax, x)
        with pytest.raises(FloatingPointError, match=r"\(nan\) .* jaxnorm\.softmax_backward\b"):
            vjp(bad)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) .*softmax\b"):
        jaxnorm.log_softmax(x, where=x < 0)
    loss = jaxnorm.softmax_cross_entropy_with_integer_labels
    gradient, bad = jax.grad(lambda x: loss(x, labels).sum()), x.at[0, 0].set(-jnp.inf)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) .*cross_entropy"):
        gradient(bad)


@pytest.mark.oldest_jax
@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in VARIANTS])
def test_no_false_alarms_outside_of_jit(name):
    """Finite results and derivatives raise no error, although a loss marks masked rows by -inf.

    Some rows of the losses are masked, because their operand `counts` has False.
    """
    operands = [*map(jnp.asarray, operands_of(name))]
    floats = [operands[i] for i in floats_in(operands)]
    gradient = gradients(of_floats(FUNCTIONS[name].ours, operands), (*range(len(floats)),))
    with jax.debug_nans(True), jax.debug_infs(True):
        jax.jvp(gradient, floats, floats)
        jax.vmap(gradient)(*[a[None] for a in floats])


def test_a_nan_in_a_second_derivative():
    x, labels = jnp.ones((2, 4)), jnp.zeros(2, jnp.int32)
    loss = jaxnorm.softmax_cross_entropy_with_integer_labels
    gradient = jax.grad(lambda x: loss(x, labels).sum())
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\)"):
        jax.jvp(gradient, (x,), (x.at[0, 0].set(jnp.nan),))


NO_KERNELS = ("jaxnorm_kernels.mosaic", "jaxnorm_kernels.triton", "jax.experimental.pallas")
A_CALL = (
    "import jax, jaxnorm\njax.grad(lambda x: jaxnorm.rms_norm(x).sum())(jax.numpy.ones((8, 16)))"
)


@pytest.mark.oldest_jax
@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import jaxnorm", ("flax", "jaxnorm_kernels.xla")),
        ("import jaxnorm.linen", ("flax.nnx",)),
        ("import jaxnorm.nnx", ()),
        (A_CALL, ("flax",)),
    ],
    ids=["jaxnorm", "linen", "nnx", "a call"],
)
def test_what_an_import_brings(program, absent):
    """Importing a module imports only the Flax API (linen or nnx) that it needs, and no kernels.

    A call on a CPU imports no kernels either.
    """
    program = f"import sys\nbefore = set(sys.modules)\n{program}\nprint(*set(sys.modules) - before)"
    run = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert not {*absent, *NO_KERNELS} & {*run.stdout.split()}
