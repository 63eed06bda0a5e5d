"""memory_report's advice on DiT's blocks: pass `gate=` to a norm that follows a gated sum."""

import functools

import jax
import jax.numpy as jnp
import pytest
from advice_cases import assert_true, told

import jaxnorm
from jaxnorm import memory_report

pytestmark = pytest.mark.oldest_jax

LAYERS, BATCH, LENGTH, WIDTH = 3, 4, 32, 64


def plain_norm(x, scale, shift):
    """Compute adaLN's norm, whose scale and shift differ by sample."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-6)
    return (centred * rstd * (1 + scale) + shift).astype(jnp.bfloat16)


def norm(x, scale, shift):
    return jaxnorm.layer_norm(x, scale, shift, scale_offset=1.0, dtype=jnp.bfloat16)


def gated_sum(norm, residual, branch, gate, scale, shift):
    h = residual + gate * branch.astype(residual.dtype)
    return norm(h, scale, shift), h


def ours(residual, branch, gate, scale, shift):
    return jaxnorm.add_layer_norm(
        branch, residual, scale, shift, gate=gate, scale_offset=1.0, dtype=jnp.bfloat16
    )


def report_of(sum_and_norm, dtype):
    shapes = {"modulation": (WIDTH, 5 * WIDTH), **dict.fromkeys("abcd", (WIDTH, WIDTH))}
    w = {n: jax.ShapeDtypeStruct((LAYERS, *s), "bfloat16") for n, s in shapes.items()}

    def block(c, x, w):
        modulation = jnp.split((c @ w["modulation"])[:, None], 5, -1)
        gate, scale, shift, scale_1, shift_1 = (m.astype(jnp.float32) for m in modulation)
        y = norm(x, scale_1, shift_1)
        branch = jnp.tanh(y @ w["a"]) @ w["b"]
        y, x = sum_and_norm(x, branch, gate.astype(x.dtype), scale, shift)
        return x + jnp.tanh(y @ w["c"]) @ w["d"]

    def loss(w, x, c):
        x, _ = jax.lax.scan(lambda x, w: (block(c, x, w), None), x, w)
        return jnp.sum(jnp.sin(x))

    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), dtype)
    c = jax.ShapeDtypeStruct((BATCH, WIDTH), "bfloat16")
    return memory_report(loss, w, x, c, argnums=(0, 1, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("own", [plain_norm, norm])
def test_a_gated_sum(own, dtype):
    """Following the advice reduces the saved bytes by the number that it states.

    The advice is to call add_layer_norm with `gate=`. The report has this advice only if the call
    saves fewer bytes for the backward pass. For example, with a float32 residual stream, plain JAX
    saves a float32 copy of each branch. The call with `gate=` does not save it.
    """
    before = report_of(functools.partial(gated_sum, own), dtype)
    after = report_of(ours, dtype)
    rows = told(before, "add_layer_norm")
    # For jaxnorm's norm of 16 bits, gate= makes the function faster, but saves no memory.
    assert bool(rows) == (own is not norm or dtype != "bfloat16")
    assert all("with gate=" in row.advice for row in rows)
    assert before.total - after.total == pytest.approx(sum(row.saves for row in rows), rel=0.1)
    assert not any("layer_norm" in row.advice for row in told(after))


@pytest.mark.parametrize("own", [plain_norm, norm])
def test_a_residual_that_is_multiplied_by_a_number(own):
    """A number is no gate, so the product with a number is the residual, not the branch."""

    def halved(sum_and_norm):
        return lambda residual, *others: sum_and_norm(0.5 * residual, *others)

    before = report_of(halved(functools.partial(gated_sum, own)), "float32")
    after = report_of(halved(ours), "float32")
    assert_true(before, after, "add_layer_norm")
