"""gated_linear and activation_linear in float64 NumPy, with bounds on the rounding error."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from reference import SAFETY, arithmetic, exact, rounding, unit_roundoff

import jaxnorm

BF16, F16, F32, F64 = "bfloat16", "float16", "float32", "float64"


@dataclasses.dataclass(frozen=True)
class Mix:
    """Dtypes of the operands, of the elementwise result h, of the matmul (`product`) and of y.

    `dtype` is the option `dtype=` of the call.
    """

    gate: str
    up: str
    weight: str
    bias: str
    h: str
    product: str
    y: str
    dtype: str | None = None


MIXES = [
    Mix(BF16, BF16, BF16, BF16, BF16, BF16, BF16),
    Mix(F32, F32, F32, F32, F32, F32, F32),
    Mix(BF16, BF16, F32, F32, BF16, F32, F32),
    Mix(BF16, BF16, F32, F32, BF16, BF16, BF16, dtype=BF16),
    Mix(F32, F32, F32, F32, F32, BF16, BF16, dtype=BF16),
    Mix(F16, F16, F16, F32, F16, F16, F32, dtype=F32),
    Mix(BF16, F32, BF16, BF16, F32, F32, F32),
    Mix(F16, BF16, BF16, F16, F32, F32, F32),
    Mix(BF16, BF16, BF16, F32, BF16, BF16, F16, dtype=F16),
]
WIDE = [
    Mix(F64, F32, F32, F32, F64, F64, F64),
    Mix(F32, F32, F64, F64, F32, F64, F64),
    Mix(F64, F64, F64, F32, F64, F32, F32, dtype=F32),
    Mix(F32, F32, F32, F64, F32, F32, F64, dtype=F64),
]
ACTIVATIONS = ["silu", "gelu", "relu", "leaky_relu", "sigmoid", jnp.tanh]


def operands(shape, features, mix=MIXES[1], seed=0):
    """Return a dict of the arrays gate, up, weight and bias."""
    rng = np.random.default_rng(seed)
    return {
        "gate": jnp.asarray(rng.normal(size=shape), mix.gate),
        "up": jnp.asarray(rng.normal(size=shape), mix.up),
        "weight": jnp.asarray(
            rng.normal(size=(shape[-1], features)) / math.sqrt(shape[-1]), mix.weight
        ),
        "bias": jnp.asarray(rng.normal(size=features), mix.bias),
    }


def call(arrays, **options):
    """Call gated_linear, or activation_linear if the dict `arrays` has no key "up"."""
    arrays = dict(arrays)
    gate, up, weight = (arrays.pop(name, None) for name in ("gate", "up", "weight"))
    if up is None:
        return jaxnorm.activation_linear(gate, weight, **arrays, **options)
    return jaxnorm.gated_linear(gate, up, weight, **arrays, **options)


class Expected:
    """y and the gradients in float64, and bounds on their errors.

    Attributes:
      y, y_bound: the result and its bound.
      gradients: a dict from each operand's name to its gradient and bound. The bound does not
        cover the last step, in which the gradient is rounded to its dtype.

    The bounds cover the rounding of five things: the elementwise result, the matmul's operands, the
    matmul's sums, the cotangent of the matmul's result, and y. The errors of sums are assumed to
    add up like a random walk.
    """

    def __init__(self, arrays, d, mix, activation):
        gate, weight = (exact(arrays[name]) for name in ("gate", "weight"))
        rows_have_axes = gate.ndim > 2
        gate = gate.reshape(-1, gate.shape[-1])
        up = exact(arrays["up"]).reshape(gate.shape) if "up" in arrays else np.ones(gate.shape)
        bias = exact(arrays["bias"]) if "bias" in arrays else np.zeros(weight.shape[1])
        d = exact(d).reshape(-1, weight.shape[1])
        function = getattr(jax.nn, activation) if isinstance(activation, str) else activation
        with jax.enable_x64(True):
            x = jnp.asarray(gate, jnp.float64)
            of_gate, slope = map(exact, jax.jvp(function, (x,), (jnp.ones_like(x),)))
        elementwise = arithmetic(mix.gate, mix.up)
        self.u = arithmetic(mix.product, mix.y)

        # gelu multiplies x by the factor 1 + tanh(...). Where tanh(...) is near -1, the factor is
        # small, but its rounding error is that of a number near 1.
        of_gate_error = 8 * elementwise * (np.abs(gate) + np.abs(of_gate))
        slope_error = 16 * elementwise * (1 + np.abs(gate))
        h = of_gate * up
        h_error = of_gate_error * np.abs(up) + 2 * elementwise * np.abs(h) + rounding(h, mix.h)
        h_error = h_error + rounding(np.abs(h) + h_error, mix.product) * (mix.h != mix.product)
        w_error = rounding(weight, mix.product) * (mix.weight != mix.product)
        self.y = h @ weight + bias
        size = np.abs(h) @ np.abs(weight)
        error = h_error @ (np.abs(weight) + w_error) + np.abs(h) @ w_error
        error = error + self.walk(h.shape[1]) * size + 4 * self.u * (size + np.abs(bias))
        self.y_bound = error + rounding(np.abs(self.y) + error, mix.y)

        d_error = rounding(d, mix.product) * (mix.y != mix.product)
        dh = d @ weight.T
        error = d_error @ (np.abs(weight) + w_error).T + np.abs(d) @ w_error.T
        error = error + self.walk(d.shape[1]) * (np.abs(d) @ np.abs(weight).T)
        error = error + rounding(np.abs(dh) + error, mix.product)
        dh_error = error + rounding(np.abs(dh) + error, mix.h) * (mix.h != mix.product)
        along = np.abs(up) * (np.abs(slope) + slope_error)
        dgate, dup, dweight = dh * up * slope, dh * of_gate, h.T @ d
        error = h_error.T @ (np.abs(d) + d_error) + np.abs(h).T @ d_error
        error = error + self.walk(len(d)) * (np.abs(h).T @ np.abs(d))
        # On a CPU, XLA accumulates a matmul's sums in 16 bits if its result has 16 bits and its
        # operands have more than two axes.
        if rows_have_axes and mix.product in (BF16, F16) and jax.default_backend() == "cpu":
            in_16_bits = self.walk(len(d)) * unit_roundoff(mix.product) / self.u
            error = error + in_16_bits * (np.abs(h).T @ np.abs(d))
        few = 4 * elementwise
        self.gradients = {
            "gate": (
                dgate,
                dh_error * along + np.abs(dh * up) * slope_error + few * np.abs(dgate),
            ),
            "up": (
                dup,
                dh_error * (np.abs(of_gate) + of_gate_error)
                + np.abs(dh) * of_gate_error
                + few * np.abs(dup),
            ),
            "weight": (dweight, error + rounding(np.abs(dweight) + error, mix.product)),
            "bias": (d.sum(0), self.walk(len(d)) * np.abs(d).sum(0)),
        }

    def walk(self, terms):
        """Return a bound on the error of a sum, divided by the sum of its terms' magnitudes."""
        return SAFETY * self.u * (math.sqrt(terms) + 2)


@functools.partial(jax.jit, static_argnames=("options",))
def value_and_gradients(arrays, d, options=()):
    y, vjp = jax.vjp(lambda arrays: call(arrays, **dict(options)), arrays)
    return y, vjp(d)[0]
