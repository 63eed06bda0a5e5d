"""The programs of rms_norm_linear.

The tests check which arrays a program saves, in its jaxpr and after compilation, and how many
matmuls it has.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from norm_linear_cases import operands
from programs import primitives, text_for_cuda

import jaxnorm
from jaxnorm import rms_norm_linear

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]

POLICY = functools.partial(jax.checkpoint, policy=jaxnorm.save_policy)
WITH_Z = functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_from_both_policies(
        jaxnorm.save_policy,
        jax.checkpoint_policies.save_only_these_names("jaxnorm_preactivation"),
    ),
)


@pytest.mark.remat
@pytest.mark.parametrize(
    ("around", "activation", "residual", "kept"),
    [
        (lambda f: f, None, False, {(4, 16): 1, (4,): 1}),  # saves x and rstd
        (lambda f: f, None, True, {(4, 16): 1, (4,): 1}),  # saves h and rstd
        (lambda f: f, "gelu", True, {(4, 16): 1, (4,): 1, (4, 24): 1}),  # and z = h @ weight
        (POLICY, "gelu", True, {(4, 16): 1, (4,): 1}),  # z is recomputed
        (WITH_Z, "gelu", True, {(4, 16): 1, (4,): 1, (4, 24): 1}),
        (jax.checkpoint, "gelu", True, {}),
    ],
    ids=["plain", "residual", "activation", "save_policy", "a policy for z", "checkpoint"],
)
def test_what_is_kept(around, activation, residual, kept):
    """Besides the operands, only one array of x's size is saved. It is not the normalised x."""
    arrays = operands(4, 16, 24)

    def block(x, residual_, weight, scale, bias):
        given = {"residual": 3 * residual_} if residual else {}
        return rms_norm_linear(3 * x, weight, scale, bias=bias, activation=activation, **given)

    order = [arrays[n] for n in ("x", "residual", "weight", "scale", "bias")]

    def residuals(*a):
        return jax.tree.leaves(jax.vjp(around(block), *a)[1])

    jaxpr = jax.make_jaxpr(residuals)(*order).jaxpr
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    made = [v for v in jaxpr.outvars if v.aval.ndim and v not in inputs]
    shapes = [v.aval.shape for v in made]
    assert len({*made}) == len(made)
    assert {shape: shapes.count(shape) for shape in shapes} == kept


def test_the_residual_s_gradient_is_added_in_the_norm_s_backward():
    """The norm's backward kernel adds h's cotangent, as in add_rms_norm."""
    arrays = operands(4, 16, 16)

    def loss(x, residual, weight):
        y, h = rms_norm_linear(x, weight, residual=residual)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(h))

    order = [arrays[n] for n in ("x", "residual", "weight")]
    found = primitives(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*order))
    assert found.count("jaxnorm.rms_norm_backward") == 1
    assert "add_any" not in found


TOKENS, WIDTH = 512, 128


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_unrolled_layers(dtype):
    """Unrolled layers do not save the normalised x.

    XLA compiles all passes of unrolled layers together. It must not save the normalised x of a
    forward for the backward, which recomputes it.
    """

    def stack(block, parameters, x):
        for scale, weight in parameters:
            x = x + jnp.sin(block(x, scale, weight))
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def ours(x, scale, weight):
        return rms_norm_linear(x, weight, scale)

    def composed(x, scale, weight):
        return jaxnorm.rms_norm(x, scale, save="input") @ weight

    def of_a_layer(block):
        def temp_bytes(layers):
            shapes = [((WIDTH,), "float32"), ((WIDTH, WIDTH), dtype)]
            parameters = [[jax.ShapeDtypeStruct(*shape) for shape in shapes]] * layers
            step = jax.jit(jax.value_and_grad(functools.partial(stack, block)))
            x = jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype)
            memory = step.lower(parameters, x).compile().memory_analysis()
            return memory.temp_size_in_bytes

        return (temp_bytes(4) - temp_bytes(2)) / 2

    activation = TOKENS * WIDTH * jnp.dtype(dtype).itemsize
    assert of_a_layer(composed) - of_a_layer(ours) >= 0.9 * activation


@pytest.mark.remat
def test_what_is_not_used_is_not_made():
    """`jax.checkpoint` recomputes only what the backward of rms_norm_linear needs.

    With an activation, the backward needs the matmul's result z, so the norm and the matmul are
    recomputed. Without an activation, only the norm is recomputed. If `save_policy` is used in
    addition, nothing is recomputed. The activation itself is never recomputed.
    """
    x, weight = jnp.ones((4, 8)), jnp.ones((8, 6))

    def calls(activation, policy=None):
        @functools.partial(jax.checkpoint, policy=policy)
        def block(x, weight):
            return rms_norm_linear(x, weight, activation=activation)

        def loss(x, weight):
            return jnp.sum(block(jnp.sin(x), weight))

        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, weight)
        counted = ("jaxnorm.rms_norm", "dot_general", "erf", "tanh")
        found = [name for name in primitives(jaxpr) if name in counted]
        return {name: found.count(name) for name in found}

    # Each count is a sum of up to three numbers. The first is for the forward: one norm, one matmul
    # and one activation. The second is for the backward of rms_norm_linear: two matmuls, the
    # derivative of the activation, and one norm. The norm is computed again because the matmul for
    # the gradient of the weight takes the normalised x. The third is for the operations that
    # `jax.checkpoint` recomputes.
    norm, product, tanh = "jaxnorm.rms_norm", "dot_general", "tanh"
    assert calls("gelu") == {norm: 1 + 1 + 1, product: 1 + 2 + 1, tanh: 1 + 1}
    assert calls("gelu", jaxnorm.save_policy) == {norm: 1 + 1 + 1, product: 1 + 2 + 1, tanh: 1 + 1}
    assert calls(None) == {norm: 1 + 1 + 1, product: 1 + 2}
    assert calls(None, jaxnorm.save_policy) == {norm: 1 + 1, product: 1 + 2}


@pytest.mark.remat
@pytest.mark.parametrize("around", [lambda f: f, POLICY], ids=["plain", "save_policy"])
def test_a_scan_keeps_h_once(around):
    """A scan saves h once, even if a policy also saves it by its name."""
    arrays = operands(4, 16, 24)

    def layers(x, weights):
        def layer(carry, weight):
            x, h = carry
            y, h = rms_norm_linear(x, weight, residual=h, activation="silu")
            return (y @ weight.T, h), None

        return jax.lax.scan(around(layer), (x, x), weights)[0]

    weights = jnp.stack([arrays["weight"]] * 3)
    kept = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(layers, *a)[1]))(arrays["x"], weights)
    stacked = [v.aval.shape for v in kept.jaxpr.outvars if v.aval.shape[1:] == (4, 16)]
    assert len(stacked) == 1


def test_a_program_for_cuda():
    """A program for CUDA has three kernel calls of the norm, and three matmuls.

    The kernel calls are the norm's forward, the same forward again in the backward pass, and the
    norm's backward. If the program's arguments are bfloat16, all matmuls have bfloat16 operands:
    none of them is computed in float32.
    """
    shapes = {"x": (8192, 4096), "weight": (4096, 1024), "scale": (4096,), "bias": (1024,)}
    arrays = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}

    def loss(arrays):
        arrays = dict(arrays)
        y = rms_norm_linear(arrays.pop("x"), arrays.pop("weight"), **arrays, activation="silu")
        return jnp.sum(y.astype("float32") ** 2)

    text = text_for_cuda(jax.grad(loss), arrays)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
    products = [line.rpartition(" : ")[2] for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all(line.partition("->")[0].count("bf16") == 2 for line in products)


@pytest.mark.parametrize("bias", [None, "bfloat16"])
def test_the_product_rounds_its_sums_to_y(bias):
    """Without a bias, the result of the matmul has y's dtype.

    With a bias, the result of the matmul is float32. It is rounded after the bias is added.
    """
    shapes = {"x": (8, 64), "weight": (64, 32), **({"bias": (32,)} if bias else {})}
    arrays = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    text = jax.jit(lambda arrays: rms_norm_linear(**arrays)).trace(arrays).lower().as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert product.rpartition("tensor<8x32x")[2].startswith("f32" if bias else "bf16")
