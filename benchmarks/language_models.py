"""GPT-2 and Llama 3.2, and a training step of theirs, as people write them in JAX.

Plain functions over trees of parameters: those are float32, activations bfloat16, layers scanned,
and the embedding is the last layer's weight, too. Norms and loss are what the variants differ in.
In shapes B is sequences, S their length and d the width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import jaxnorm
from benchmarks.models import Remat, Size

Array = jax.Array
Params = dict[str, Any]
State = tuple[Params, optax.OptState]

OPTIMIZER = optax.adamw(3e-4, weight_decay=0.1)


# Norms and losses. The scopes are names in a profile.


@jax.named_scope("norm")
def rms_norm(x: Array, scale: Array) -> Array:
    """As Flax computes it."""
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * (rstd * scale)).astype(x.dtype)


@jax.named_scope("norm")
def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    """As Flax computes it: the variance is a difference of means, which one pass gives."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    mean_of_squares = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    variance = jnp.maximum(0.0, mean_of_squares - jnp.square(mean))
    rstd = jax.lax.rsqrt(variance + 1e-6)
    return ((wide - mean) * (rstd * scale) + bias).astype(x.dtype)


def add_then(norm: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """The residual addition before a norm, as two steps."""

    def add_norm(x: Array, residual: Array, **parameters: Array) -> tuple[Array, Array]:
        h = x + residual
        return norm(h, **parameters), h

    return add_norm


@jax.named_scope("loss")
def loss_of_logits(x: Array, embedding: Array, labels: Array) -> Array:
    logits = (x @ embedding.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.named_scope("loss")
def loss_without_logits(x: Array, embedding: Array, labels: Array) -> Array:
    return jaxnorm.linear_softmax_cross_entropy(x, embedding.T, labels)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Whose norms and loss a model uses.

    Attributes:
      rms_norm, layer_norm: of x and its parameters.
      add_rms_norm, add_layer_norm: of x, residual and parameters; give the norm of their sum, and
        the sum.
      loss: of the last hidden states (B, S, d), the embedding (V, d) and labels (B, S); its mean.
    """

    rms_norm: Callable[..., Array]
    add_rms_norm: Callable[..., tuple[Array, Array]]
    layer_norm: Callable[..., Array]
    add_layer_norm: Callable[..., tuple[Array, Array]]
    loss: Callable[[Array, Array, Array], Array]


_NORMS = Variant(
    jaxnorm.rms_norm,
    add_then(jaxnorm.rms_norm),
    jaxnorm.layer_norm,
    add_then(jaxnorm.layer_norm),
    loss_of_logits,
)
VARIANTS = {
    "jnp": Variant(rms_norm, add_then(rms_norm), layer_norm, add_then(layer_norm), loss_of_logits),
    "jaxnorm-norms": _NORMS,
    "jaxnorm-norms-loss": dataclasses.replace(_NORMS, loss=loss_without_logits),
    "jaxnorm-everything": Variant(
        jaxnorm.rms_norm,
        jaxnorm.add_rms_norm,
        jaxnorm.layer_norm,
        jaxnorm.add_layer_norm,
        loss_without_logits,
    ),
}

REMATS: dict[Remat, Callable[..., Any]] = {
    "none": lambda layer: layer,
    "dots": functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        prevent_cse=False,  # a scan does that
    ),
    "block": functools.partial(jax.checkpoint, prevent_cse=False),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of some size, with the norms and the loss of a variant.

    Attributes:
      attention: whose, of jax.nn.dot_product_attention: "cudnn" on a GPU, else "xla".
    """

    size: Size
    variant: Variant
    remat: Remat = "none"
    dtype: str = "bfloat16"
    attention: Literal["cudnn", "xla"] = "xla"

    def init(self, key: Array) -> Params:
        """Norms are the identity; other parameters normal, with deviation 0.02, but biases 0."""
        shapes, tree = jax.tree.flatten_with_path(
            _SHAPES[self.size.kind](self.size), is_leaf=lambda node: isinstance(node, tuple)
        )
        constants = {"scale": jnp.ones, "bias": jnp.zeros}

        def leaf(path: Any, shape: tuple[int, ...], key: Array) -> Array:
            if path[-1].key in constants:
                return constants[path[-1].key](shape)
            return 0.02 * jax.random.normal(key, shape)

        keys = jax.random.split(key, len(shapes))
        return jax.tree.unflatten(tree, [leaf(*each, key) for each, key in zip(shapes, keys)])

    def loss(self, params: Params, tokens: Array) -> Array:
        """Mean cross-entropy of each token (B, S + 1) but the first, given those before it."""
        embedding = params["embedding"].astype(self.dtype)
        x = _MODELS[self.size.kind](self, params, embedding[tokens[:, :-1]])
        return self.variant.loss(x, embedding, tokens[:, 1:])

    def scan(self, layer: Callable[[Array, Params], Array], x: Array, layers: Params) -> Array:
        layer = REMATS[self.remat](layer)
        return jax.lax.scan(lambda x, p: (layer(x, p), None), x, layers)[0]

    def heads(self, x: Array) -> Array:
        """(B, S, heads * head size) to (B, S, heads, head size)."""
        return x.reshape(*x.shape[:2], -1, self.size.head)

    @jax.named_scope("attention")
    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """Causal attention of (B, S, heads, head size), with the heads side by side again."""
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        return y.reshape(*y.shape[:2], -1)


# GPT-2.


def gpt2_shapes(size: Size) -> Params:
    d, n = size.width, size.layers

    def norm(*lead: int) -> Params:
        return {"scale": (*lead, d), "bias": (*lead, d)}

    def dense(rows: int, cols: int) -> Params:
        return {"kernel": (n, rows, cols), "bias": (n, cols)}

    return {
        "embedding": (size.vocabulary, d),
        "positions": (size.seq, d),
        "layers": {
            "attention_norm": norm(n),
            "qkv": dense(d, 3 * d),
            "attention_out": dense(d, d),
            "mlp_norm": norm(n),
            "mlp_in": dense(d, size.hidden),
            "mlp_out": dense(size.hidden, d),
        },
        "norm": norm(),
    }


def dense(x: Array, p: Params) -> Array:
    return x @ p["kernel"].astype(x.dtype) + p["bias"].astype(x.dtype)


def gpt2(model: Model, params: Params, x: Array) -> Array:
    """The last hidden states of embedded tokens; both (B, S, d)."""
    use = model.variant

    def layer(x: Array, p: Params) -> Array:
        y = use.layer_norm(x, **p["attention_norm"])
        q, k, v = map(model.heads, jnp.split(dense(y, p["qkv"]), 3, axis=-1))
        branch = dense(model.attend(q, k, v), p["attention_out"])
        y, x = use.add_layer_norm(branch, x, **p["mlp_norm"])
        return x + dense(jax.nn.gelu(dense(y, p["mlp_in"])), p["mlp_out"])

    x = x + params["positions"][: x.shape[1]].astype(x.dtype)
    return use.layer_norm(model.scan(layer, x, params["layers"]), **params["norm"])


# Llama.


def llama_shapes(size: Size) -> Params:
    d, n, of_keys = size.width, size.layers, size.kv_heads * size.head
    return {
        "embedding": (size.vocabulary, d),
        "layers": {
            "attention_norm": {"scale": (n, d)},
            "q": (n, d, d),
            "k": (n, d, of_keys),
            "v": (n, d, of_keys),
            "attention_out": (n, d, d),
            "mlp_norm": {"scale": (n, d)},
            "gate": (n, d, size.hidden),
            "up": (n, d, size.hidden),
            "down": (n, size.hidden, d),
        },
        "norm": {"scale": (d,)},
    }


@jax.named_scope("attention")
def rotated(x: Array, base: float = 500_000.0) -> Array:
    """Rotary position embedding of queries or keys (B, S, heads, head size)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def llama(model: Model, params: Params, x: Array) -> Array:
    """The last hidden states of embedded tokens; both (B, S, d)."""
    use = model.variant

    def layer(x: Array, p: Params) -> Array:
        w = {name: p[name].astype(x.dtype) for name in p if not name.endswith("norm")}
        y = use.rms_norm(x, **p["attention_norm"])
        q, k, v = (model.heads(y @ w[name]) for name in "qkv")
        branch = model.attend(rotated(q), rotated(k), v) @ w["attention_out"]
        y, x = use.add_rms_norm(branch, x, **p["mlp_norm"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]

    return use.rms_norm(model.scan(layer, x, params["layers"]), **params["norm"])


_SHAPES = {"gpt2": gpt2_shapes, "llama": llama_shapes}
_MODELS = {"gpt2": gpt2, "llama": llama}


# Training.


def train_step(model: Model, state: State, tokens: Array) -> tuple[State, Array]:
    """AdamW on a batch of tokens (B, S + 1)."""
    params, moments = state
    loss, gradients = jax.value_and_grad(model.loss)(params, tokens)
    with jax.named_scope("optimizer"):
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss
