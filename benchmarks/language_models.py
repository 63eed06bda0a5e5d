"""GPT-2, Llama 3.2 and their training step, as people write them in plain JAX.

The models are plain functions of trees of parameters. Parameters are float32 and activations
bfloat16. Layers are scanned or unrolled. The embedding is also the weight of the last layer. The
variants of a model (with or without jaxnorm) differ in a few functions, which are in `variants`. In
shapes, B is the number of sequences, S their length and d the width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import Layers, Remat, Size
from benchmarks.variants import Variant, rotated

Array = jax.Array
Params = dict[str, Any]
State = tuple[Params, optax.OptState]

OPTIMIZER = optax.adamw(3e-4, weight_decay=0.1)

# The arguments of jax.checkpoint for a layer, for each kind of rematerialisation.
_POLICIES: dict[Remat, dict[str, Any]] = {
    "dots": {"policy": jax.checkpoint_policies.dots_with_no_batch_dims_saveable},
    "block": {},
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of a given size, with the functions of a variant.

    Attributes:
      layers: "scan" for a scan over stacked parameters, "unrolled" for layers with separate
        parameters.
      attention: the argument `implementation` of jax.nn.dot_product_attention: "cudnn" on a GPU,
        else "xla".
    """

    size: Size
    variant: Variant
    remat: Remat = "none"
    dtype: str = "bfloat16"
    layers: Layers = "scan"
    attention: Literal["cudnn", "xla"] = "xla"

    def init(self, key: Array) -> Params:
        """Return initial parameters.

        Scales are 1, and biases are 0. Others are normally distributed with deviation 0.02.
        """
        shapes, tree = jax.tree.flatten_with_path(
            _SHAPES[self.size.kind](self.size), is_leaf=lambda node: isinstance(node, tuple)
        )
        constants = {"scale": jnp.ones, "bias": jnp.zeros}

        def leaf(path: Any, shape: tuple[int, ...], key: Array) -> Array:
            if path[-1].key in constants:
                return constants[path[-1].key](shape)
            return 0.02 * jax.random.normal(key, shape)

        keys = jax.random.split(key, len(shapes))
        params = jax.tree.unflatten(tree, [leaf(*each, key) for each, key in zip(shapes, keys)])
        return params if self.layers == "scan" else params | {"layers": self._each(params)}

    def _each(self, params: Params) -> list[Params]:
        """Split the stacked parameters into a list with the parameters of each layer."""
        return [
            jax.tree.map(lambda a: a[i], params["layers"])  # noqa: B023, it is called here
            for i in range(self.size.layers)
        ]

    def loss(self, params: Params, tokens: Array) -> Array:
        """Return the mean cross-entropy of the model's predictions of the next token."""
        embedding = params["embedding"].astype(self.dtype)
        x = _MODELS[self.size.kind](self, params, embedding[tokens[:, :-1]])
        return self.variant.loss(x, embedding, tokens[:, 1:])

    def stack(self, layer: Callable[[Array, Params], Array], x: Array, layers: Any) -> Array:
        """Apply the layers one after the other, as a scan or unrolled."""
        is_scan = self.layers == "scan"
        if self.remat != "none":
            # prevent_cse is not needed in a scan, where XLA cannot merge recomputed values with
            # those of the forward pass.
            layer = jax.checkpoint(layer, prevent_cse=not is_scan, **_POLICIES[self.remat])
        if is_scan:
            return jax.lax.scan(lambda x, p: (layer(x, p), None), x, layers)[0]
        return functools.reduce(layer, layers, x)

    def heads(self, x: Array) -> Array:
        """Reshape (B, S, heads * head size) to (B, S, heads, head size)."""
        return x.reshape(*x.shape[:2], -1, self.size.head)

    @jax.named_scope("attention")
    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """Compute causal attention. The arguments are (B, S, heads, head size)."""
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)


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


def dense(linear: Callable[[Array, Array], Array], x: Array, p: Params) -> Array:
    return linear(x, p["kernel"]) + p["bias"].astype(x.dtype)


def gpt2(model: Model, params: Params, x: Array) -> Array:
    """Return the last hidden states of GPT-2, given embedded tokens; both are (B, S, d)."""
    use = model.variant

    def layer(x: Array, p: Params) -> Array:
        y = use.layer_norm(x, **p["attention_norm"])
        q, k, v = map(model.heads, jnp.split(dense(use.linear, y, p["qkv"]), 3, axis=-1))
        branch = dense(use.heads_linear, model.attend(q, k, v), p["attention_out"])
        y, x = use.add_layer_norm(branch, x, **p["mlp_norm"])
        h = dense(use.linear, y, p["mlp_in"])
        return x + use.activation_linear(h, p["mlp_out"]["kernel"], p["mlp_out"]["bias"])

    x = x + params["positions"][: x.shape[1]].astype(x.dtype)
    return use.layer_norm(model.stack(layer, x, params["layers"]), **params["norm"])


# Llama.


def llama_shapes(size: Size) -> Params:
    d, n, of_keys = size.width, size.layers, size.kv_heads * size.head
    of_heads = {"scale": (n, size.head)}
    return {
        "embedding": (size.vocabulary, d),
        "layers": {
            "attention_norm": {"scale": (n, d)},
            "q": (n, d, d),
            "k": (n, d, of_keys),
            "v": (n, d, of_keys),
            **({"q_norm": of_heads, "k_norm": of_heads} if size.qk_norm else {}),
            "attention_out": (n, d, d),
            "mlp_norm": {"scale": (n, d)},
            "gate": (n, d, size.hidden),
            "up": (n, d, size.hidden),
            "down": (n, size.hidden, d),
        },
        "norm": {"scale": (d,)},
    }


def rotations(length: int, head: int, base: float = 500_000.0) -> tuple[Array, Array]:
    """Return the rotary embedding's cos and sin tables, each (length, 1, head / 2)."""
    half = head // 2
    angle = jnp.arange(length)[:, None] * base ** (-jnp.arange(half) / half)
    return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def llama(model: Model, params: Params, x: Array) -> Array:
    """Return the last hidden states of Llama, given embedded tokens; both are (B, S, d)."""
    use = model.variant
    tables = rotations(x.shape[1], model.size.head)

    def rotate(x: Array, norm: Params | None) -> Array:
        return rotated(x, *tables) if norm is None else use.rms_norm_rope(x, norm["scale"], *tables)

    def layer(x: Array, p: Params) -> Array:
        y = use.rms_norm(x, **p["attention_norm"])
        q, k, v = (model.heads(use.linear(y, p[name])) for name in "qkv")
        attended = model.attend(rotate(q, p.get("q_norm")), rotate(k, p.get("k_norm")), v)
        branch = use.heads_linear(attended, p["attention_out"])
        y, x = use.add_rms_norm(branch, x, **p["mlp_norm"])
        return x + use.gated_linear(use.linear(y, p["gate"]), use.linear(y, p["up"]), p["down"])

    return use.rms_norm(model.stack(layer, x, params["layers"]), **params["norm"])


_SHAPES = {"gpt2": gpt2_shapes, "llama": llama_shapes}
_MODELS = {"gpt2": gpt2, "llama": llama}


# Training.


def train_step(model: Model, state: State, tokens: Array) -> tuple[State, Array]:
    """Take a step of AdamW on tokens (B, S + 1), and return the new state and the loss."""
    params, moments = state
    loss, gradients = jax.value_and_grad(model.loss)(params, tokens)
    with jax.named_scope("optimizer"):
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss
