"""Lists the arrays that a layer of Llama 3.2 1B saves for its backward pass.

    python examples/llama_layer.py

The list is from `jaxnorm.memory_report`, which traces the layer. Nothing is executed, and no GPU is
needed. Sizes are per layer of a scan. The unit is the size of one bfloat16 array of tokens x width,
as in the table of docs/memory.md.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxnorm

Array = jax.Array

LAYERS, BATCH, LENGTH = 16, 4, 2048
WIDTH, HEADS, KV_HEADS, HIDDEN = 2048, 32, 8, 8192
HEAD = WIDTH // HEADS
UNIT = BATCH * LENGTH * WIDTH * 2  # bytes of an array of tokens x width


# Attention that saves the same arrays as flash attention. It is traced but not executed, so no
# device needs to support flash attention.


def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return the result of attention, and the log-sum-exp of each row of its logits."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)


@jax.custom_vjp
def flash_attention(q: Array, k: Array, v: Array) -> Array:
    return attend(q, k, v)[0]


def _forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    y, log_sum_exp = attend(q, k, v)
    return y, (q, k, v, y, log_sum_exp)


def _backward(kept: tuple[Array, ...], dy: Array) -> tuple[Array, ...]:
    q, k, v, _, _ = kept
    return jax.vjp(lambda *qkv: attend(*qkv)[0], q, k, v)[1](dy)


flash_attention.defvjp(_forward, _backward)


# The functions of the layer in plain JAX.


def rms_norm(x: Array, scale: Array) -> Array:
    """Compute RMSNorm as Flax does."""
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * (rstd * scale)).astype(x.dtype)


def gated_linear(gate: Array, up: Array, weight: Array) -> Array:
    return (jax.nn.silu(gate) * up) @ weight


def project(heads: Array, weight: Array) -> Array:
    return heads.reshape(*heads.shape[:2], -1) @ weight


def rotated(x: Array, base: float = 500_000.0) -> Array:
    """Apply rotary position embedding to queries or keys (B, S, heads, head size)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A transformer layer.

    The fields are the functions that it calls. They determine which arrays the layer saves for its
    backward pass.
    """

    rms_norm: Callable[..., Array] = rms_norm
    gated_linear: Callable[..., Array] = gated_linear
    project: Callable[..., Array] = project

    def __call__(self, x: Array, w: dict[str, Array]) -> Array:
        y = self.rms_norm(x, w["attention_norm"])
        q, k, v = ((y @ w[name]).reshape(*x.shape[:2], -1, HEAD) for name in ("q", "k", "v"))
        x = x + self.project(flash_attention(rotated(q), rotated(k), v), w["out"])
        y = self.rms_norm(x, w["mlp_norm"])
        return x + self.gated_linear(y @ w["gate"], y @ w["up"], w["down"])


NORMS = Layer(rms_norm=jaxnorm.rms_norm)
MLP = dataclasses.replace(NORMS, gated_linear=jaxnorm.gated_linear)
LAYERS_OF = {
    "plain JAX": Layer(),
    "jaxnorm.rms_norm": NORMS,
    "and jaxnorm.gated_linear": MLP,
    "and attention's output once": dataclasses.replace(MLP, project=jax.checkpoint(project)),
}


def report_of(layer: Layer) -> jaxnorm.MemoryReport:
    """Return the memory report of a scan over layers.

    The gradients are taken with respect to x and to the parameters of the layers.
    """
    shapes = {
        **dict.fromkeys(("q", "out"), (WIDTH, WIDTH)),
        **dict.fromkeys(("k", "v"), (WIDTH, KV_HEADS * HEAD)),
        **dict.fromkeys(("gate", "up"), (WIDTH, HIDDEN)),
        **dict.fromkeys(("attention_norm", "mlp_norm"), (WIDTH,)),
        "down": (HIDDEN, WIDTH),
    }
    w = {n: jax.ShapeDtypeStruct((LAYERS, *shape), "bfloat16") for n, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "bfloat16")

    def loss(w: dict[str, Array], x: Array) -> Array:
        y, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)
        return jnp.sum(y.astype(jnp.float32))

    return jaxnorm.memory_report(loss, w, x, argnums=(0, 1))


@functools.cache
def units() -> dict[str, float]:
    """Return the size of the arrays that each variant saves per layer.

    The unit is the size of one bfloat16 array of tokens x width.
    """
    return {name: report_of(layer).total / LAYERS / UNIT for name, layer in LAYERS_OF.items()}


def main() -> None:
    print(report_of(Layer()), end="\n\n")
    print("| a layer of Llama 3.2 1B, scanned | kept, in arrays of tokens x width |")
    print("|---|---:|")
    for name, number in units().items():
        print(f"| {name} | {number:.1f} |")


if __name__ == "__main__":
    main()
