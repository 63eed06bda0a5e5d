"""Layers of language models in plain JAX, for the tests of `auto_remat`.

In shapes, B is the number of sequences, S their length, d the width, H the number of heads and D
their size. Weights are float32, activations bfloat16. `attention` stands for a flash attention: it
saves its arguments and its result.
"""

import jax
import jax.numpy as jnp

B, S, HEADS, KV_HEADS, HEAD, HIDDEN = 2, 128, 4, 1, 16, 256
WIDTH = HEADS * HEAD
EXPERTS, CHOSEN = 4, 2


def _attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@jax.custom_vjp
def attention(q, k, v):
    return _attend(q, k, v)


attention.defvjp(
    lambda q, k, v: (y := attention(q, k, v), (q, k, v, y)),
    lambda saved, dy: jax.vjp(_attend, *saved[:3])[1](dy),
)


def dense(x, weight):
    return x @ weight.astype(x.dtype)


def heads(x):
    return x.reshape(*x.shape[:2], -1, HEAD)


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(x.dtype)


def layer_norm(x, scale=None):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.var(wide, axis=-1, keepdims=True) + 1e-6)
    y = (wide - mean) * rstd
    return (y if scale is None else y * scale).astype(x.dtype)


def rotated(x):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _gated(y, p):
    return dense(jax.nn.silu(dense(y, p["gate"])) * dense(y, p["up"]), p["down"])


def _attended(y, p, norm=lambda x, scale: x):
    q, k, v = (heads(dense(y, p[name])) for name in "qkv")
    q, k = rotated(norm(q, p["q_norm"])), rotated(norm(k, p["k_norm"]))
    return dense(attention(q, k, v).reshape(y.shape), p["out"])


def llama(x, p):
    x = x + _attended(rms_norm(x, p["norm"]), p)
    return x + _gated(rms_norm(x, p["norm_2"]), p)


def qk_norms(x, p):
    x = x + _attended(rms_norm(x, p["norm"]), p, rms_norm)
    return x + _gated(rms_norm(x, p["norm_2"]), p)


def gemma(x, p):
    x = x + rms_norm(_attended(rms_norm(x, p["norm"]), p), p["norm_3"])
    return x + rms_norm(_gated(rms_norm(x, p["norm_2"]), p), p["norm_4"])


def gpt2(x, p):
    y = layer_norm(x, p["norm"])
    q, k, v = (heads(a) for a in jnp.split(dense(y, p["qkv"]), 3, axis=-1))
    x = x + dense(attention(q, k, v).reshape(x.shape), p["out"])
    return x + dense(jax.nn.gelu(dense(layer_norm(x, p["norm_2"]), p["gate"])), p["down"])


def dit(x, p):
    condition = jax.nn.silu(x[:, :1]) @ p["modulation"].astype(x.dtype)
    shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split(condition, 6, axis=-1)
    y = layer_norm(x) * (1 + scale) + shift
    q, k, v = (heads(a) for a in jnp.split(dense(y, p["qkv"]), 3, axis=-1))
    x = x + gate * dense(attention(q, k, v).reshape(x.shape), p["out"])
    y = layer_norm(x) * (1 + scale_2) + shift_2
    return x + gate_2 * dense(jax.nn.gelu(dense(y, p["gate"])), p["down"])


def moe(x, p):
    """Each token runs through CHOSEN of EXPERTS experts, as one masked sum of all experts."""
    x = x + _attended(rms_norm(x, p["norm"]), p)
    y = rms_norm(x, p["norm_2"])
    weights, chosen = jax.lax.top_k(jax.nn.softmax(dense(y, p["router"])), CHOSEN)
    share = jnp.sum(jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype) * weights[..., None], axis=-2)
    gate, up = (jnp.einsum("bsd,edf->ebsf", y, p[n].astype(x.dtype)) for n in ("gates", "ups"))
    parts = jnp.einsum("ebsf,efd->ebsd", jax.nn.silu(gate) * up, p["downs"].astype(x.dtype))
    return x + jnp.einsum("ebsd,bse->bsd", parts, share)


_SMALL = HIDDEN // EXPERTS
SHAPES = {
    "norm": (WIDTH,),
    "norm_2": (WIDTH,),
    "norm_3": (WIDTH,),
    "norm_4": (WIDTH,),
    "q_norm": (HEAD,),
    "k_norm": (HEAD,),
    "q": (WIDTH, WIDTH),
    "k": (WIDTH, KV_HEADS * HEAD),
    "v": (WIDTH, KV_HEADS * HEAD),
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "gate": (WIDTH, HIDDEN),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
    "modulation": (WIDTH, 6 * WIDTH),
    "router": (WIDTH, EXPERTS),
    "gates": (EXPERTS, WIDTH, _SMALL),
    "ups": (EXPERTS, WIDTH, _SMALL),
    "downs": (EXPERTS, _SMALL, WIDTH),
}

#: For each layer, the number of saved arrays of B x S x d in 16 bits that `auto_remat` may save.
LAYERS = {
    "llama": (llama, 12.6),
    "qk_norms": (qk_norms, 12.8),
    "gemma": (gemma, 13.6),
    "gpt2": (gpt2, 10.1),
    "dit": (dit, 11.4),
    "moe": (moe, 16.8),
}


def parameters(layers, key):
    """Return random parameters of `layers` layers, stacked."""
    keys = jax.random.split(key, len(SHAPES))
    return {
        name: jax.random.normal(k, (layers, *shape)) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, SHAPES.items())
    }


def loss_of(name, is_scan):
    """Return the mean square of the last hidden states, as a function of parameters and x."""
    layer, _ = LAYERS[name]

    def loss(params, x):
        if is_scan:
            x = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0]
        else:
            for i in range(len(params["norm"])):
                x = layer(x, jax.tree.map(lambda a: a[i], params))  # noqa: B023, called here
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def arguments(layers):
    """Return the arguments of `loss_of`."""
    x = jax.random.normal(jax.random.key(2), (B, S, WIDTH), jnp.bfloat16)
    return parameters(layers, jax.random.key(3)), x


def small_arguments():
    """Return the arguments of a loss of one layer and of four positions, in float32."""
    params, x = arguments(1)
    return params, x[:1, :4].astype(jnp.float32)
