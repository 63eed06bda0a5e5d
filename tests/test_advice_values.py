"""memory_report gives no advice on code that computes something else than jaxnorm's function.

Each near-miss has the operations of code that gets advice, but returns other numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from advice_cases import assert_all_true, told

import jaxnorm
from jaxnorm import memory_report
from jaxnorm.tools import kept_arrays, values

pytestmark = pytest.mark.oldest_jax

ROWS, WIDTH, CLASSES = 48, 32, 80
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), "float32")
W = jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)), "float32")
HEAD = jnp.asarray(np.random.default_rng(2).normal(size=(WIDTH, CLASSES)), "float32")
LABELS = np.random.default_rng(3).integers(CLASSES, size=ROWS)
MASK = np.arange(WIDTH) % 3 > 0


def mean(a):
    return jnp.mean(a, -1, keepdims=True)


def total(a):
    return jnp.sum(a, -1, keepdims=True)


def unbiased_variance(a):
    return jnp.var(a, -1, ddof=1, keepdims=True)


def rms_norm(z):
    return z * jax.lax.rsqrt(mean(z**2) + 1e-6)


def layer_norm(z, epsilon=1e-6):
    centred = z - mean(z)
    return centred * jax.lax.rsqrt(mean(centred**2) + epsilon)


NORMS = {
    "L2 norm": lambda z: z * jax.lax.rsqrt(total(z**2) + 1e-6),
    "L2 norm without epsilon": lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True),
    "norm of columns": lambda z: z * jax.lax.rsqrt(jnp.mean(z**2, 0) + 1e-6),
    "BatchNorm": lambda z: (z - z.mean(0)) * jax.lax.rsqrt(z.var(0) + 1e-6),
    "partial": lambda z: z * jax.lax.rsqrt(mean(z[:, :8] ** 2) + 1e-6),
    "of another array": lambda z: z * jax.lax.rsqrt(mean((z @ W) ** 2) + 1e-6),
    "unbiased variance": lambda z: (z - mean(z)) / jnp.sqrt(unbiased_variance(z) + 1e-6),
    "variance without the mean": lambda z: z * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-6),
    "the mean without the variance": lambda z: (z - mean(z)) * jax.lax.rsqrt(mean(z**2) + 1e-6),
    "another mean": lambda z: (z - mean(z[:, :8])) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-6),
    "epsilon outside the root": lambda z: z / (jnp.sqrt(mean(z**2)) + 1e-6),
    "epsilon as a minimum": lambda z: z / jnp.sqrt(jnp.maximum(mean(z**2), 1e-6)),
    "scale inside": lambda z: z * W[0] * jax.lax.rsqrt(mean((z * W[0]) ** 2) + 1e-6),
    "clipped statistics": lambda z: z * jax.lax.rsqrt(mean(jnp.clip(z, -1, 1) ** 2) + 1e-6),
    "clipped root": lambda z: z * jnp.minimum(jax.lax.rsqrt(mean(z**2) + 1e-6), 1.0),
    "masked mean": lambda z: z * jax.lax.rsqrt(total(z**2 * MASK) / MASK.sum() + 1e-6),
    "fourth powers": lambda z: z * jnp.sqrt(jax.lax.rsqrt(mean(z**4) + 1e-6)),
    "half of the root": lambda z: z * jnp.sqrt(jax.lax.rsqrt(mean(z**2) + 1e-6)),
    "p-norm of another size": lambda z: z * jax.lax.rsqrt(mean(z**2) * 1.01 + 1e-6),
    "blended": lambda z: 0.9 * rms_norm(z) + 0.1 * z,
}

ACTIVATIONS = {
    "quick gelu": lambda z: z * jax.nn.sigmoid(1.702 * z),
    "exact gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "clipped silu": lambda z: jnp.minimum(jax.nn.silu(z), 1),
    "squared silu": lambda z: jax.nn.silu(z) ** 2,
    "leaky relu": jax.nn.leaky_relu,
}

SOFTMAXES = {
    "sink": lambda z: (
        jnp.exp(z - z.max(-1, keepdims=True))
        / (jnp.exp(-z.max(-1, keepdims=True)) + total(jnp.exp(z - z.max(-1, keepdims=True))))
    ),
    "half of the row": lambda z: jnp.exp(z) / total(jnp.exp(z[:, :8])),
    "cumulative": lambda z: jnp.exp(z) / jnp.cumsum(jnp.exp(z), -1),
    "with epsilon": lambda z: jnp.exp(z) / (total(jnp.exp(z)) + 1e-2),
    "of the whole array": lambda z: jnp.exp(z) / jnp.sum(jnp.exp(z)),
    "mean in place of the sum": lambda z: jnp.exp(z) / mean(jnp.exp(z)),
}

OTHER_MASKS = {
    "zeros": lambda z, mask: jax.nn.softmax(jnp.where(mask, z, 0.0)),
    "a penalty": lambda z, mask: jax.nn.softmax(jnp.where(mask, z, -10.0)),
}


def of_logs(log_p, labels=LABELS):
    return -jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0]


def loss_of(logits, labels=LABELS):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def picked(logits, labels=LABELS):
    return jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def smoothed(logits):
    log_p = jax.nn.log_softmax(logits)
    return 0.9 * of_logs(log_p) - 0.1 * jnp.mean(log_p, -1)


def with_z_loss(logits):
    normaliser = jax.nn.logsumexp(logits, -1)
    return normaliser - picked(logits) + 1e-4 * normaliser**2


def focal(logits):
    log_p = -of_logs(jax.nn.log_softmax(logits))
    return -((1 - jnp.exp(log_p)) ** 2) * log_p


def poly(logits):
    log_p = jax.nn.log_softmax(logits)
    return of_logs(log_p) + 1 - picked(jnp.exp(log_p))


def mixed(logits):
    log_p = jax.nn.log_softmax(logits)
    return 0.7 * of_logs(log_p) + 0.3 * of_logs(log_p, LABELS[::-1])


def with_entropy(logits):
    log_p = jax.nn.log_softmax(logits)
    return of_logs(log_p) + jnp.sum(jnp.exp(log_p) * log_p, -1)


def several(logits):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, np.stack([LABELS, LABELS[::-1]], -1), -1).sum(-1)


LOSSES = {
    "label smoothing": smoothed,
    "z-loss": with_z_loss,
    "poly": poly,
    "two labels": mixed,
    "several labels": several,
    "entropy": with_entropy,
    "labels of other rows": lambda z: -jax.nn.log_softmax(z)[(np.arange(ROWS) + 1) % ROWS, LABELS],
    "margin": lambda z: jax.nn.logsumexp(z, -1) - picked(z) + 0.5,
    "half the label": lambda z: jax.nn.logsumexp(z, -1) - 0.5 * picked(z),
    "of other logits": lambda z: jax.nn.logsumexp(z, -1) - picked(jnp.sin(z)),
    "of some classes": lambda z: jax.nn.logsumexp(z[:, : CLASSES // 2], -1) - picked(z),
    "probability": lambda z: 1 - picked(jax.nn.softmax(z)),
    "soft labels": lambda z: -jnp.sum(jax.nn.softmax(jnp.cos(z)) * jax.nn.log_softmax(z), -1),
    "over the rows": lambda z: jax.nn.logsumexp(z, 0).sum() - picked(z).sum(),
}

GATES = {
    "and the gate": lambda gate, up: jax.nn.silu(gate) * up + gate,
    "of the sum": lambda gate, up: jax.nn.silu(gate + up),
    "clipped": lambda gate, up: jnp.clip(jax.nn.silu(gate) * up, -1, 1),
    "and a bias": lambda gate, up: jax.nn.silu(gate) * up + 0.5,
    "trained slope": lambda gate, up: jnp.where(gate > 0, gate, W[0] * gate) * up,
    "maximum": lambda gate, up: jnp.maximum(jax.nn.silu(gate), up),
}


def layer(function):
    """Return the report of a function between two linear layers."""
    return memory_report(lambda p: jnp.sum((function(X @ p[0]) @ p[1]) ** 2), (W, W))


@pytest.mark.parametrize("name", NORMS)
def test_no_norm(name):
    assert not any("norm" in row.advice for row in told(layer(NORMS[name])))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_no_activation_of_a_norm(norm, name):
    report = layer(lambda z: ACTIVATIONS[name](norm(z)))
    assert not any("norm(activation=" in row.advice for row in told(report))


@pytest.mark.parametrize("epsilon", [1e-6, 1e-5, 1e-12])
def test_epsilon_is_named(epsilon):
    """The advice names epsilon if it is not the default of jaxnorm's function."""
    (advice,) = {row.advice for row in told(layer(lambda z: layer_norm(z, epsilon)))}
    assert f"epsilon={epsilon:g}" in advice or epsilon == 1e-6


@pytest.mark.parametrize("name", SOFTMAXES)
def test_no_softmax(name):
    assert not told(layer(SOFTMAXES[name]), "softmax")


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_no_mask_of_a_softmax(name):
    """The advice is to use jaxnorm's softmax of the same logits, not to pass a mask."""

    def loss(p, mask):
        mask = jnp.broadcast_to(mask[:, None], (ROWS, WIDTH))
        return jnp.sum((OTHER_MASKS[name](X @ p[0], mask) @ p[1]) ** 2)

    report = memory_report(loss, (W, W), np.arange(ROWS) % 2 > 0)
    assert told(report, "softmax")
    assert not any("where=" in row.advice for row in told(report))


@pytest.mark.parametrize("name", LOSSES)
def test_no_cross_entropy(name):
    report = memory_report(lambda w, head: LOSSES[name](X @ w @ head).sum(), W, HEAD)
    is_constant = name == "margin"  # the cross-entropy, and a constant
    assert any("cross_entropy" in row.advice for row in told(report)) == is_constant


def test_losses_that_are_not_summed():
    """The linear loss returns a mean, so it cannot replace a focal loss. Its twin can."""
    report = memory_report(lambda w, head: focal(X @ w @ head).sum(), W, HEAD)
    assert not told(report, "linear_softmax_cross_entropy")
    weighted = memory_report(lambda w, head: (loss_of(X @ w @ head) * MASK[0]).sum(), W, HEAD)
    (advice,) = {row.advice for row in told(weighted)}
    assert "it returns the mean: masks and weights go into where=" in advice


def test_relu6_is_not_relu():
    report = layer(jax.nn.relu6)
    assert not any('"relu"' in row.advice for row in told(report))
    assert told(report, "activation_linear")


@pytest.mark.parametrize("name", GATES)
def test_no_gate(name):
    report = memory_report(
        lambda p: jnp.sum((GATES[name](X @ p[0], X @ p[1]) @ p[2]) ** 2), (W, W, W)
    )
    assert not told(report, "gated_linear")


def test_a_gate_whose_branch_is_clipped():
    """The product of two functions is advised with the second function's result as ``up``."""

    def act(gate):
        return jnp.minimum(gate, 7) * jax.nn.sigmoid(1.702 * jnp.minimum(gate, 7))

    def plain(p):
        return ((act(X @ p[0]) * (jnp.clip(X @ p[1], -7, 7) + 1)) @ p[2]).sum()

    def followed(p):
        up = jnp.clip(X @ p[1], -7, 7) + 1
        return jaxnorm.gated_linear(X @ p[0], up, p[2], activation=act).sum()

    before, after = (memory_report(f, (W, W, W)) for f in (plain, followed))
    assert_all_true(before, after, "gated_linear")


def evaluated(function, *arrays):
    """Return a function's value for arrays of float64, computed by `values.Draw`."""
    traced = jax.make_jaxpr(function)(*[jnp.asarray(a, "float32") for a in arrays])
    program = kept_arrays.Program(traced, 1, [True] * len(arrays))
    found = kept_arrays.reached(program.outputs, lambda v: v.operands)
    arguments = [v for v in found if v.made_by == "argument"]
    return values.Draw(dict(zip(arguments, arrays)))(program.outputs[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.nn.softmax(x),
        lambda x: jax.nn.gelu(x),
        lambda x: jax.nn.standardize(x, epsilon=1e-6),
        lambda x: jax.nn.logsumexp(jnp.sin(x.reshape(4, 2, 3)), (1, 2)),
        lambda x: jnp.where(jnp.tri(4, 6) > 0, x, -1.0).T,
        lambda x: jax.nn.one_hot(jnp.arange(4), 6) * jnp.square(x),
        lambda x: x[jnp.arange(4), jnp.full(4, 2)],
        lambda x: jnp.concatenate([x, jnp.clip(x, 0, 1)], 1).max(1),
    ],
)
def test_values_are_jax_s(function):
    """An array that is evaluated has the values that JAX computes, up to axes of size 1."""
    x = np.random.default_rng(0).normal(size=(4, 6))
    with jax.enable_x64(True):
        expected = np.asarray(function(jnp.asarray(x)))
    assert values.agree(np.broadcast_to(evaluated(function, x), expected.shape), expected)


@pytest.mark.parametrize("function", [jnp.fft.fft, lambda x: jnp.cumsum(x, -1), lambda x: x @ x.T])
def test_operations_without_values(function):
    with pytest.raises(values.UnknownError):
        evaluated(function, np.ones((4, 6)))
