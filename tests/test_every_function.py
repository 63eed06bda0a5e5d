"""Tests of every public function in unusual calls. Results are compared in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import (
    BASIC,
    FUNCTIONS,
    OTHERS,
    call_of,
    options_of,
    plain_call_of,
    public_functions,
    scalar,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import eight_devices
from programs import primitives
from reference import of_roundings

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

NAMES = [
    *BASIC,
    *("softmax with a bias", "rms_norm from input", "rms_norm_linear silu", "rms_norm_rope"),
]
each = pytest.mark.parametrize("name", NAMES)


def assert_close(results, expected):
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype == np.float64
        # At most some hundred roundings follow one another, and the bound allows 1024.
        bound = of_roundings(1024, "float64", np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)


def cosines(arrays):
    return jax.tree.map(jnp.cos, arrays)


def test_every_public_function_has_a_call():
    assert {name.split()[0] for name in FUNCTIONS} | OTHERS == public_functions()


@each
def test_a_result_without_effect_on_the_loss(x64, name):
    """The gradient of a result is 0 if the only use of the result has no effect on the loss.

    Here, the result is the scale of a norm of which only h is used. No backward pass runs.
    """
    function, operands = call_of(name, "float64")
    x = jnp.arange(8.0)

    def loss(*operands):
        scale = jnp.full(8, scalar(function)(*operands))
        return jnp.sum(jaxnorm.add_rms_norm(x, x, scale)[1]) + jnp.sum(operands[0] ** 2)

    gradient = jax.jit(jax.grad(loss, tuple(range(len(operands)))))
    found = primitives(jax.make_jaxpr(gradient)(*operands))
    assert not [primitive for primitive in found if primitive.endswith("_backward")]
    of_first, *gradients = gradient(*operands)
    np.testing.assert_array_equal(of_first, 2 * operands[0])
    for gradient, operand in zip(gradients, operands[1:], strict=True):
        np.testing.assert_array_equal(gradient, jnp.zeros_like(operand))


# ------------------------------- programs traced with 64-bit types and run without, and vice versa


# rms_norm_linear is left out, because its backward uses JAX's own transpose of a matmul. If a
# program is traced with 64-bit types but runs without them, this transpose computes its sums in
# float32. Its results are then not as accurate as these tests require.
each_with_rules = pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.startswith("rms_norm_linear")]
)


def derivatives(function, operands):
    """Compute derivatives, and return a function that evaluates them."""
    y, pullback = jax.vjp(function, *operands)
    _, pushforward = jax.linearize(function, *operands)
    tangents, cotangents = cosines(operands), cosines(y)
    batch = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), cotangents)
    return lambda: [
        pullback(cotangents),
        jax.jit(pullback)(cotangents),
        pushforward(*tangents),
        jax.vmap(pullback)(batch),
        jax.linear_transpose(pullback, cotangents)(tangents),
    ]


def second_derivatives(function, operands):
    """Trace the function, and return a function that differentiates the traced program."""
    program, tangents = jax.make_jaxpr(scalar(function))(*operands), cosines(operands)

    def run():
        evaluated = jax.extend.core.jaxpr_as_fun(program)
        gradient = jax.grad(lambda *a: evaluated(*a)[0], tuple(range(len(operands))))
        return jax.jvp(gradient, operands, tangents)

    return run


@each_with_rules
@pytest.mark.parametrize("of", [derivatives, second_derivatives])
def test_derivatives_made_with_64_bit_types_and_used_without(of, name):
    with jax.enable_x64(True):
        run = of(*call_of(name, "float64"))
        expected = run()
    assert_close(run(), expected)


@each
def test_traced_without_64_bit_types_and_lowered_with(name):
    function, operands = call_of(name)
    run = jax.jit(jax.value_and_grad(scalar(function), tuple(range(len(operands)))))
    expected, traced = run(*operands), run.trace(*operands)
    with jax.enable_x64(True):
        compiled = traced.lower().compile()
    for ours, theirs in zip(*map(jax.tree.leaves, (compiled(*operands), expected)), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@eight_devices
@each
def test_partitioned_without_64_bit_types(name):
    """A program that was traced with 64-bit types can be lowered and partitioned without them.

    The code of a shard is lowered later, when XLA's partitioner calls back into Python.
    """
    with jax.enable_x64(True):
        function, operands = call_of(name, "float64")
        mesh = jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:2])
        lies = [P("rows") if a.ndim == 3 and len(a) % 2 == 0 else P() for a in operands]
        sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, lies)]
        run = jax.jit(jax.value_and_grad(scalar(function), tuple(range(len(operands)))))
        expected, traced = run(*operands), run.trace(*sharded)
    assert_close(traced.lower().compile()(*sharded), expected)


# --------------------------------------------------------- static arguments outside of `jax.jit`

# Pairs of values that are equal in Python, such as True and 1. An option accepts only the first
# value of each pair and raises an error for the second. A key is an option's name, or the type of
# its default.
EQUAL = {
    bool: [(True, 1), (False, 0)],
    float: [(1.0, True), (0.0, False)],
    "axis": [(0, False), (1, True), ((0, 1), (False, True)), ((1, 0), (1, False))],
    "chunk": [(1, True)],
    "logit_softcap": [(1.0, True)],
}


def equal_options():
    for name in sorted(public_functions() - OTHERS):
        for option, default in options_of(name).items():
            for good, bad in EQUAL.get(option, EQUAL.get(type(default), [])):
                yield pytest.param(name, option, good, bad, id=f"{name}-{option}-{bad}")


@pytest.mark.parametrize(("name", "option", "good", "bad"), [*equal_options()])
def test_static_arguments_that_are_equal_but_differ(name, option, good, bad):
    """Two equal static arguments of different types, such as 1 and True, are not confused.

    They have separate entries in the cache of compiled calls. So a bad argument raises an error
    even after a call with an equal good argument.
    """
    call = plain_call_of(name)
    with pytest.raises(TypeError, match=f"{name}: {option}") as first:
        call(**{option: bad})
    accepted = True
    try:
        call(**{option: good})
    except ValueError:  # Some functions do not accept a scale of 0, or these axes.
        accepted = False
    with pytest.raises(TypeError) as then:
        call(**{option: bad})
    assert str(then.value) == str(first.value)
    assert accepted or (good in (0.0, 0) or option == "axis")


def test_numbers_of_several_types_are_taken():
    call = plain_call_of("rms_norm")
    for value in (1, 1.0, np.float32(1), np.int8(1)):
        np.testing.assert_array_equal(call(epsilon=value), call(epsilon=1.0))


@pytest.mark.parametrize("name", sorted(public_functions() - OTHERS))
def test_names_of_unexpected_types(name):
    """An array, a list or bytes that contain a valid name are not accepted as an option's name."""
    call = plain_call_of(name)
    names = {"implementation": "xla", "save": "input", "activation": "silu", "reduction": "sum"}
    for option in names.keys() & options_of(name).keys():
        good = names[option]
        call(**{option: good})
        for bad in (np.array(good), np.array([good, good]), [good], (good,), good.encode(), 1):
            with pytest.raises(ValueError, match=f"{name}: {option}=.*expected one of"):
                call(**{option: bad})


# Options and numbers for them that float64 represents, but not float32.
WIDE = [
    *((o, 1e39) for o in ("scale", "epsilon", "scale_offset", "z_loss")),
    *((o, value) for o in ("logits_scale", "logit_softcap") for value in (1e39, 1e-50)),
]


@pytest.mark.parametrize("name", sorted(public_functions() - OTHERS))
def test_numbers_that_are_finite_in_float64_alone(name):
    call, options = plain_call_of(name), options_of(name)
    for option, value in WIDE:
        # The `scale` of a norm is an array, which is None by default.
        if option not in options or (option == "scale" and options[option] is None):
            continue
        with pytest.raises(ValueError, match=rf"{name}: {option}=.* in float32.*float64 arrays"):
            call(**{option: value})
        with jax.enable_x64(True):
            wide = {n: a.astype(float) for n, a in call.keywords.items() if a.dtype == jnp.float32}
            call(**wide, **{option: value})
