"""rms_norm_gated for extreme values, and what a policy saves; `test_norm` tests other values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_references import GatedNorm
from norms import check, normal
from programs import equations
from reference import ACTIVATIONS, DTYPES, exact

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

each_order = pytest.mark.parametrize("before", [True, False], ids=["norm first", "gate first"])


def operands(shape, x_dtype, gate_dtype, scale_dtype):
    x, gate = normal(shape, x_dtype, 0, shift=0.3), normal(shape, gate_dtype, 1, scale=2.0)
    return x, gate, normal(shape[-1:], scale_dtype, 2, 0.3, 1.0)


def checked(x, gate, scale, *, before, **options):
    given = {"gate": gate, "scale": scale, "norm_before_gate": before}
    check("rms_norm_gated", x, **given, **options)


@each_order
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_scale(dtype, before, implementation):
    x, gate, _ = operands((70, 64), dtype, dtype, "float32")
    ones = jaxnorm.rms_norm_gated(
        x, gate, None, norm_before_gate=before, scale_offset=1.0, implementation=implementation
    )
    plain = jaxnorm.rms_norm_gated(x, gate, norm_before_gate=before, implementation=implementation)
    np.testing.assert_array_equal(ones, plain)


def test_one_rounding():
    """bfloat16 results are rounded once: their errors are at most half an ulp.

    If the norm were rounded first, errors would be larger.
    """
    x, gate, scale = operands((64, 256), *["bfloat16"] * 2, "float32")
    for before in (True, False):
        given = {"norm_before_gate": before}
        y = exact(jaxnorm.rms_norm_gated(x, gate, scale, **given))
        gain, types = exact(scale), ("bfloat16",) * 3
        expected = GatedNorm(exact(x), exact(gate), gain, exact(x), before, "silu", types).y
        u = 2.0**-8  # unit roundoff of bfloat16; that of float32 is negligible
        assert np.abs(y / expected - 1).max() < u * (1 + u)
        thrice = exact(jaxnorm.rms_norm(x, scale) * jax.nn.silu(gate))
        assert not before or np.abs(thrice / expected - 1).max() > 1.5 * u


@each_order
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_all_sizes(activation, before, implementation):
    """Results are correct for gates that are 0, and for gates whose exp over- or underflows."""
    sizes = np.concatenate([[0.0], *np.outer([-1, 1], np.geomspace(1e-20, 3e4, 31)), [-0.0]])
    x, _, scale = operands((70, 64), *["float32"] * 3)
    gate = jnp.asarray(np.broadcast_to(sizes, (70, 64)), "float32")
    checked(x, gate, scale, before=before, activation=activation, implementation=implementation)


def test_a_row_of_zeros(implementation):
    """If all elements of a row of x or of the gate are 0, results are correct and not NaN."""
    x, gate, scale = operands((70, 64), *["float32"] * 3)
    x, gate = x.at[3].set(0), gate.at[5].set(0)
    for before in (True, False):
        checked(x, gate, scale, before=before, activation="relu", implementation=implementation)


@each_order
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_zero(dtype, before):
    """If the scale of a column is 0, y is exactly 0 there, and the scale's gradient is correct.

    The input is saved instead of y, so the backward pass need not divide by the scale.
    """
    x, gate, scale = operands((70, 64), dtype, dtype, "float32")
    scale = scale.at[6].set(0).at[9].set(1e-6)
    checked(x, gate, scale, before=before, implementation="xla")
    assert not exact(jaxnorm.rms_norm_gated(x, gate, scale))[:, 6].any()


@pytest.mark.remat
@each_order
def test_what_the_policy_keeps_for_the_next_product(before):
    """With `save_policy`, a rematerialised block saves y and recomputes no norm.

    It recomputes the matmuls before the gate.
    """
    weight = jnp.eye(16)

    gated = functools.partial(jaxnorm.rms_norm_gated, norm_before_gate=before)

    def block(x, gate, scale, weight):
        return gated(x @ weight, gate @ weight, scale) @ weight

    policy = jaxnorm.save_policy

    def loss(*arrays):
        return jnp.sum(jnp.sin(jax.checkpoint(block, policy=policy)(*arrays)))

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(
        *operands((4, 16), *["float32"] * 3), weight
    )
    found = [equation.primitive.name for equation in equations(jaxpr)]
    assert found.count("jaxnorm.rms_norm_gated") == 1
    # The forward runs three matmuls. The backward recomputes the first two of them. It also runs
    # six matmuls for gradients: one for each of the two operands of each of the three matmuls.
    assert found.count("dot_general") == 3 + 2 + 6
