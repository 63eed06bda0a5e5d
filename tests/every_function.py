"""A call of every public function, for forms that all of them are tested with."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

ROWS, HEADS, COLS, CLASSES = 4, 2, 8, 24


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


X, R, SCALE = normal(ROWS, HEADS, COLS), normal(ROWS, HEADS, COLS, seed=1), 1 + normal(COLS) / 10
LOGITS, WEIGHT, BIAS = normal(ROWS, HEADS, CLASSES), normal(COLS, CLASSES), normal(CLASSES)
ANGLES = normal(ROWS, 1, COLS // 2)
# NumPy's own, so that they have no 64-bit types of a test's.
LABELS = (np.arange(ROWS * HEADS) % CLASSES).reshape(ROWS, HEADS).astype(np.int32)
COUNTS = LABELS % 3 > 0

linear_loss = jaxnorm.linear_softmax_cross_entropy

# Each function with its operands, all of which are differentiated. The first word of a name is the
# function's.
CALLS = {
    "softmax": (jaxnorm.softmax, (X,)),
    "softmax with a bias": (
        lambda x, bias: jaxnorm.softmax(x, bias=bias, scale=0.5, causal=True),
        (X, R[:1]),
    ),
    "log_softmax": (jaxnorm.log_softmax, (X,)),
    "layer_norm": (jaxnorm.layer_norm, (X, SCALE, SCALE)),
    "layer_norm silu": (
        functools.partial(jaxnorm.layer_norm, activation="silu"),
        (X, SCALE, SCALE),
    ),
    "rms_norm": (jaxnorm.rms_norm, (X, SCALE)),
    "rms_norm from input": (functools.partial(jaxnorm.rms_norm, save="input"), (X, SCALE)),
    "add_layer_norm": (jaxnorm.add_layer_norm, (X, R, SCALE, SCALE)),
    "add_rms_norm": (
        lambda x, residual, scale, gate: jaxnorm.add_rms_norm(x, residual, scale, gate=gate),
        (X, R, SCALE, SCALE),
    ),
    "rms_norm_add": (jaxnorm.rms_norm_add, (X, R, SCALE)),
    "rms_norm_add_rms_norm": (jaxnorm.rms_norm_add_rms_norm, (X, R, SCALE, SCALE)),
    "rms_norm_gated": (jaxnorm.rms_norm_gated, (X, R, SCALE)),
    "rms_norm_rope": (jaxnorm.rms_norm_rope, (X, SCALE, np.cos(ANGLES), np.sin(ANGLES))),
    "rms_norm_linear": (jaxnorm.rms_norm_linear, (X, WEIGHT, SCALE)),
    "rms_norm_linear silu": (
        functools.partial(jaxnorm.rms_norm_linear, activation="silu"),
        (X, WEIGHT, SCALE),
    ),
    "gated_linear": (
        lambda gate, up, weight, bias: jaxnorm.gated_linear(gate, up, weight, bias=bias),
        (X, R, WEIGHT, BIAS),
    ),
    "activation_linear": (
        lambda x, weight, bias: jaxnorm.activation_linear(x, weight, bias=bias),
        (X, WEIGHT, BIAS),
    ),
    "softmax_cross_entropy_with_integer_labels": (
        lambda logits: jaxnorm.softmax_cross_entropy_with_integer_labels(
            logits, LABELS, where=COUNTS, z_loss=0.1
        ),
        (LOGITS,),
    ),
    "log_prob_and_entropy": (
        lambda logits: jaxnorm.log_prob_and_entropy(logits, LABELS, where=COUNTS),
        (LOGITS,),
    ),
    "linear_softmax_cross_entropy": (
        lambda x, weight, bias: linear_loss(x, weight, LABELS, bias=bias, where=COUNTS, chunk=3),
        (X, WEIGHT, BIAS),
    ),
    "linear_softmax_cross_entropy of rows": (
        lambda x, weight: linear_loss(x, weight, LABELS, reduction="none"),
        (X, WEIGHT),
    ),
    "linear_log_prob_and_entropy": (
        lambda x, weight, bias: jaxnorm.linear_log_prob_and_entropy(x, weight, LABELS, bias=bias),
        (X, WEIGHT, BIAS),
    ),
}

#: Public functions of which there is nothing to differentiate.
OTHERS = {"check_params", "implementation_for", "memory_report"}


def public_functions():
    functions = {n for n in jaxnorm.__all__ if inspect.isfunction(getattr(jaxnorm, n))}
    return functions - {"save_policy"}


def call_of(name, dtype="float32"):
    """Return a function and its operands as JAX arrays."""
    function, operands = CALLS[name]
    return function, tuple(jnp.asarray(a, dtype) for a in operands)


def scalar(function):
    """Return a function whose result is one number, made of all its results."""
    return lambda *a: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(function(*a)))


#: Arguments without a default, by their names, which mean the same in every function.
ARGUMENTS = {
    **dict.fromkeys(["x", "logits", "residual", "gate", "up"], np.ones((4, 8), np.float32)),
    "weight": np.ones((8, 8), np.float32),
    "scale": np.ones(8, np.float32),
    **dict.fromkeys(["cos", "sin"], np.ones((4, 4), np.float32)),
    "labels": np.zeros(4, np.int32),
}


def plain_call_of(name):
    """Return a public function with JAX arrays for the arguments that it must have."""
    function = getattr(jaxnorm, name)
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    return functools.partial(function, **{n: jnp.asarray(ARGUMENTS[n]) for n in needed})


def options_of(name):
    """Return the names and defaults of a public function's arguments that have one."""
    parameters = inspect.signature(getattr(jaxnorm, name)).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
