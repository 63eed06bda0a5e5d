"""Forms of a call that every public function is tested with.

Results are compared in float64. No more than some hundred roundings follow each other there, so
10 bits of the 53 are theirs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_function import CALLS, OTHERS, call_of, public_functions, scalar
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

each = pytest.mark.parametrize("name", CALLS)


def assert_close(results, expected):
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype == np.float64
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2.0**-43 * np.abs(theirs).max())


def cosines(arrays):
    return jax.tree.map(jnp.cos, arrays)


def test_every_public_function_has_a_call():
    assert {name.split()[0] for name in CALLS} | OTHERS == public_functions()


# ------------------------------------------------------------------------- partial transposes


@each
def test_a_custom_jvp_with_frozen_arguments(x64, name):
    """JAX instantiates zeros for the tangents of arguments that are not differentiated."""
    function, operands = call_of(name, "float64")

    @jax.custom_jvp
    def wrapped(*operands):
        return function(*operands)

    wrapped.defjvp(functools.partial(jax.jvp, function))
    run = jax.jit(jax.grad(scalar(function), tuple(range(len(operands)))))
    for i, expected in enumerate(run(*operands)):
        assert_close(jax.jit(jax.grad(scalar(wrapped), i))(*operands), expected)


@each
def test_the_transpose_of_one_tangent(x64, name):
    """The other tangents are known, and are not 0."""
    function, operands = call_of(name, "float64")
    y, pullback = jax.vjp(function, *operands)
    cotangents = cosines(y)
    tangents = [*cosines(operands)]
    for i, expected in enumerate(pullback(cotangents)):

        def along(t, i=i):
            return jax.jvp(function, operands, (*tangents[:i], t, *tangents[i + 1 :]))[1]

        (got,) = jax.linear_transpose(along, operands[i])(cotangents)
        assert_close(got, expected)


# ------------------------------------------------- 64-bit types in a part of a program's life


# The backward of rms_norm_linear is JAX's own transpose of a matmul, which sums in float32 there.
each_with_rules = pytest.mark.parametrize(
    "name", [name for name in CALLS if not name.startswith("rms_norm_linear")]
)


@each_with_rules
def test_derivatives_made_with_64_bit_types_and_used_without(name):
    with jax.enable_x64(True):
        function, operands = call_of(name, "float64")
        y, pullback = jax.vjp(function, *operands)
        _, pushforward = jax.linearize(function, *operands)
        tangents, cotangents = cosines(operands), cosines(y)
        batch = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), cotangents)

        def run():
            return [
                pullback(cotangents),
                jax.jit(pullback)(cotangents),
                pushforward(*tangents),
                jax.vmap(pullback)(batch),
                jax.linear_transpose(pullback, cotangents)(tangents),
            ]

        expected = run()
    assert_close(run(), expected)


@each_with_rules
def test_second_derivatives_of_what_was_made_with_64_bit_types(name):
    """Rules of differentiation, too, run outside."""
    with jax.enable_x64(True):
        function, operands = call_of(name, "float64")
        program = jax.make_jaxpr(scalar(function))(*operands)

        def run():
            evaluated = jax.extend.core.jaxpr_as_fun(program)
            gradient = jax.grad(lambda *a: evaluated(*a)[0], tuple(range(len(operands))))
            return jax.jvp(gradient, operands, tangents)

        tangents = cosines(operands)
        expected = run()
    assert_close(run(), expected)


@each
def test_traced_with_64_bit_types_and_lowered_without(name):
    with jax.enable_x64(True):
        function, operands = call_of(name, "float64")
        run = jax.jit(jax.value_and_grad(scalar(function), tuple(range(len(operands)))))
        expected, traced = run(*operands), run.trace(*operands)
    assert_close(traced.lower().compile()(*operands), expected)


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


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="for eight CPU devices")
@each
def test_partitioned_without_64_bit_types(name):
    """XLA's partitioner asks for the code of a shard while it compiles."""
    with jax.enable_x64(True):
        function, operands = call_of(name, "float64")
        mesh = jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:2])
        lies = [P("rows") if a.ndim == 3 and len(a) % 2 == 0 else P() for a in operands]
        sharded = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, lies)]
        run = jax.jit(jax.value_and_grad(scalar(function), tuple(range(len(operands)))))
        expected, traced = run(*operands), run.trace(*sharded)
    assert_close(traced.lower().compile()(*sharded), expected)
