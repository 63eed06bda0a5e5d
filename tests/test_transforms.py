"""jit, vmap, scan, checkpoint, export: the functions behave like any JAX function under each."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_error import assert_computes

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


FUNCTIONS = {
    "softmax": jaxnorm.softmax,
    "log_softmax": jaxnorm.log_softmax,
    "layer_norm": lambda x, **options: jaxnorm.layer_norm(x, SCALE, BIAS, **options),
    "rms_norm": lambda x, **options: jaxnorm.rms_norm(x, SCALE, **options),
    "layer_norm from input": lambda x, **options: jaxnorm.layer_norm(
        x, SCALE, BIAS, save="input", **options
    ),
    "layer_norm silu": lambda x, **options: jaxnorm.layer_norm(
        x, SCALE, BIAS, activation="silu", **options
    ),
    "rms_norm_rope": lambda x, **options: jaxnorm.rms_norm_rope(x, SCALE, *TABLES, **options),
    "rms_norm_gated": lambda x, **options: jaxnorm.rms_norm_gated(x, 1 - x, SCALE, **options),
}
TABLES = jnp.cos(jnp.arange(8.0)), jnp.sin(jnp.arange(8.0))
SCALE, BIAS = 1 + 0.1 * normal(16, seed=1), normal(16, seed=2)

each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))


def weighted(function):
    """A scalar loss with a different cotangent everywhere."""
    return lambda x: jnp.sum(function(x) * jnp.cos(jnp.arange(x.size).reshape(x.shape)))


@each_function
def test_jit_changes_nothing(function):
    x = normal(6, 16)
    np.testing.assert_array_equal(jax.jit(function)(x), function(x))
    loss = weighted(function)
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        assert_computes(gradient(x), jax.grad(loss), x)


@each_function
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_with_and_without_a_gradient(function, dtype, implementation):
    """Of an implementation; the default may take another where no backward is to come."""
    x = normal(70, 16, dtype=dtype)
    function = functools.partial(function, implementation=implementation)
    y, _ = jax.jit(lambda x: jax.vjp(function, x))(x)
    np.testing.assert_array_equal(y, jax.jit(function)(x))


def one_by_one(function, axis=0):
    """What `jax.vmap` of the function computes, in a loop."""
    return lambda x: jnp.stack([function(a) for a in jnp.moveaxis(x, axis, 0)])


@each_function
@pytest.mark.parametrize("in_axes", [0, 1, 2])
def test_vmap(function, in_axes):
    x = normal(3, 4, 16) if in_axes < 2 else normal(4, 16, 3)
    batched = jax.vmap(function, in_axes)(x)
    assert_computes(batched, one_by_one(function, in_axes), x)


@each_function
def test_grad_of_vmap_and_vmap_of_grad(function):
    x = normal(3, 4, 16)
    loss = weighted(function)
    batched = jax.vmap(jax.grad(loss))(x)
    summed = jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x)))(x)
    for gradient in (batched, summed):
        assert_computes(gradient, one_by_one(jax.grad(loss)), x)


def test_vmap_over_parameters_and_mask():
    x, scales = normal(4, 16), normal(3, 16, seed=3)
    batched = jax.vmap(jaxnorm.rms_norm, (None, 0))(x, scales)
    assert_computes(batched, one_by_one(lambda s: jaxnorm.rms_norm(x, s)), scales)
    masks = normal(3, 4, 16, seed=4) > 0

    def masked(mask):
        return jaxnorm.softmax(x, where=mask)

    assert_computes(jax.vmap(masked)(masks), one_by_one(masked), masks)


@each_function
def test_scan(function):
    x = normal(4, 16)

    def scanned(x):
        return jax.lax.scan(lambda c, _: (function(c) + c, None), x, None, length=3)[0]

    def unrolled(x):
        for _ in range(3):
            x = function(x) + x
        return x

    assert_computes(scanned(x), unrolled, x)
    assert_computes(jax.grad(weighted(scanned))(x), jax.grad(weighted(unrolled)), x)


def stack_of_blocks(block, x, weights):
    for w in weights:
        x = block(x, w)
    return jnp.sum(x**2)


def norms_in(function, *operands):
    """Forward norms in the program as lowered: what XLA may still merge is no policy's doing."""
    # For a CPU: kernels on a GPU are counted elsewhere.
    lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cpu",)).as_text()
    return len(re.findall(r"call @jaxnorm\.rms_norm(_\d+)?\(", lowered))


@pytest.mark.remat
@pytest.mark.parametrize(
    ("policy", "per_block"),
    [(None, 2), (jaxnorm.save_policy, 1)],
    ids=["everything recomputed", "save_policy"],
)
@pytest.mark.parametrize("save", ["output", "input"])
def test_save_policy_computes_each_norm_once(policy, per_block, save):
    """Without the policy the backward of a rematerialised block computes its norm a second time."""

    def block(x, w):
        return x + jnp.tanh(jaxnorm.rms_norm(x, SCALE, save=save) @ w)

    x, weights = normal(8, 16), normal(4, 16, 16, seed=5)
    rematerialised = functools.partial(stack_of_blocks, jax.checkpoint(block, policy=policy))
    assert norms_in(jax.grad(rematerialised), x, weights) == per_block * len(weights)
    gradient = jax.jit(jax.grad(rematerialised))(x, weights)
    assert_computes(gradient, jax.grad(functools.partial(stack_of_blocks, block)), x, weights)


@pytest.mark.remat
def test_without_checkpoint_each_norm_runs_once():
    def block(x, w):
        return x + jnp.tanh(jaxnorm.rms_norm(x, SCALE) @ w)

    x, weights = normal(8, 16), normal(4, 16, 16, seed=5)
    blocks = functools.partial(stack_of_blocks, block)
    assert norms_in(jax.grad(blocks), x, weights) == len(weights)


def saved_names(function, *operands):
    """Names of the residuals that the policy keeps."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.vjp(function, *a)[0])(*operands)
    return set(re.findall(r"\[name=(jaxnorm_\w+)", str(jaxpr)))


@pytest.mark.remat
def test_residual_names():
    x = normal(4, 16)
    norm_names = {"jaxnorm_out", "jaxnorm_rstd"}
    assert saved_names(jaxnorm.rms_norm, x) == norm_names
    assert saved_names(jaxnorm.layer_norm, x) == norm_names
    assert saved_names(functools.partial(jaxnorm.layer_norm, save="input"), x) == norm_names
    assert saved_names(jaxnorm.softmax, x) == {"jaxnorm_softmax_out"}


@each_function
@pytest.mark.parametrize("platforms", [None, ("cpu", "cuda", "tpu")], ids=["here", "all"])
def test_export_round_trip(function, platforms):
    x = normal(4, 16)
    for f in (jax.jit(function), jax.jit(jax.grad(weighted(function)))):
        exported = jax.export.export(f, platforms=platforms)(jax.ShapeDtypeStruct(x.shape, x.dtype))
        restored = jax.export.deserialize(exported.serialize())
        assert_computes(restored.call(x), f, x)


@each_function
def test_export_with_a_symbolic_batch(function):
    rows = jax.export.symbolic_shape("rows")[0]
    exported = jax.export.export(jax.jit(lambda x: function(x, implementation="xla")))(
        jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    )
    for size in (1, 5):
        x = normal(size, 16)
        assert_computes(exported.call(x), function, x)


SYMBOLIC = {
    # adaLN's parameters of each sample; GroupNorm, whose positions are a part of its rows.
    "samples": lambda x, s: jaxnorm.layer_norm(x, s[:, :1], s[:, 1:2], scale_offset=1.0),
    "gate": lambda x, s: jaxnorm.add_layer_norm(x, x, gate=s[:, :1])[0],
    "groups": lambda x, s: jaxnorm.layer_norm(x.reshape(*x.shape[:2], 4, 4), axis=(1, 3)),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_export_with_symbolic_samples_and_positions(name):
    function = SYMBOLIC[name]

    def step(x, s):
        y, vjp = jax.vjp(function, x, s)
        return y, vjp(jnp.cos(y))

    batch, length = jax.export.symbolic_shape("batch, length")
    arrays = (
        jax.ShapeDtypeStruct((batch, length, 16), jnp.float32),
        jax.ShapeDtypeStruct((batch, 2, 16), jnp.float32),
    )
    exported = jax.export.export(jax.jit(step))(*arrays)
    for sizes in ((2, 3), (1, 6)):
        operands = normal(*sizes, 16), normal(sizes[0], 2, 16, seed=3)
        assert_computes(exported.call(*operands), step, *operands)


@each_function
def test_cross_lowering_for_a_gpu_from_any_host(function):
    for f in (function, jax.grad(weighted(function))):
        lowered = (
            jax.jit(f)
            .trace(jax.ShapeDtypeStruct((64, 16), jnp.float32))
            .lower(lowering_platforms=("cuda",))
        )
        assert "func.func public @main" in lowered.as_text()


@each_function
def test_work_placed_on_the_cpu(function):
    """On a GPU host too: the choice of implementation follows the placement, not the backend."""
    x = jax.device_put(normal(4, 16), jax.devices("cpu")[0])
    y = jax.jit(function)(x)
    assert y.devices() == {jax.devices("cpu")[0]}
    assert_computes(y, function, x)


@each_function
def test_debug_nans_stays_silent_on_ordinary_data(function):
    with jax.debug_nans(True):
        jax.grad(weighted(function))(normal(4, 16))


def test_donated_input():
    x = normal(4, 16)
    y = jax.jit(jaxnorm.rms_norm, donate_argnums=0)(x, SCALE)
    assert_computes(y, jaxnorm.rms_norm, normal(4, 16), SCALE)
