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
from jax.ad_checkpoint import checkpoint_name

from benchmarks.models import Layers, Remat, Size
from benchmarks.variants import Variant, add_then, rotated

Array = jax.Array
Params = dict[str, Any]
State = tuple[Params, optax.OptState]

OPTIMIZER = optax.adamw(3e-4, weight_decay=0.1)

_QKV = ("q", "k", "v")
_MLP = ("gate", "up", "mid")  # "mid" is the hidden array of GPT-2
#: Policies of rematerialisation by names: maps the name of a policy to the names of the arrays that
#: a layer saves. MaxText (version 0.2.5, `maxtext/layers/nnx_decoders.py`) calls these arrays
#: query_proj, key_proj and value_proj (_QKV), context ("attended"), out_proj ("out"), mlpwi_0 and
#: mlpwi_1 (_MLP), and mlpwo ("down").
NAMES: dict[str, tuple[str, ...]] = {
    "names": (*_QKV, "attended", "h", *_MLP),
    "maxtext minimal_with_context": (*_QKV, "attended", "out", *_MLP, "down"),
    "maxtext minimal": (*_QKV, "out", *_MLP, "down"),
    "maxtext save_dot_with_context_except_mlp": (*_QKV, "attended", "out"),
    "maxtext save_dot_except_mlpwi": (*_QKV, "out", "down"),
    "maxtext save_dot_except_mlp": (*_QKV, "out"),
    "maxtext save_qkv_proj": _QKV,
    "maxtext save_out_proj": ("out",),
    "maxtext full": (),
}


def _saving(names: tuple[str, ...]) -> Callable[..., bool]:
    """Return a policy that saves arrays with these names.

    "attended" stands for the results of cuDNN's attention: its output and its statistics. They are
    saved without a name, because a scan would save both the output and its named copy.
    """

    def save(primitive: Any, *_: Any, **params: Any) -> bool:
        if str(primitive) == "name":
            return params["name"] in names
        return "attended" in names and "dot_product_attention_fwd" in str(primitive)

    return save


# The arguments of jax.checkpoint for a layer, for each kind of rematerialisation.
_POLICIES: dict[str, dict[str, Any]] = {
    "dots": {"policy": jax.checkpoint_policies.dots_with_no_batch_dims_saveable},
    "block": {},
    **{key: {"policy": _saving(names)} for key, names in NAMES.items()},
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of a given size, with the functions of a variant.

    Attributes:
      remat: the rematerialisation of each layer: one of `models.REMATS`, or a key of `NAMES`.
      layers: "scan" for a scan over stacked parameters, "unrolled" for layers with separate
        parameters.
      attention: the argument `implementation` of jax.nn.dot_product_attention: "cudnn" on a GPU,
        else "xla".
    """

    size: Size
    variant: Variant
    remat: Remat | str = "none"
    dtype: str = "bfloat16"
    layers: Layers = "scan"
    attention: Literal["cudnn", "xla"] = "xla"

    def init(self, key: Array) -> Params:
        """Return initial parameters.

        Scales are 1, and biases are 0. All other parameters are normally distributed, with a
        standard deviation of 0.02.
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
            # values of the forward pass.
            layer = jax.checkpoint(layer, prevent_cse=not is_scan, **_POLICIES[self.remat])
        if is_scan:
            return jax.lax.scan(lambda x, p: (layer(x, p), None), x, layers)[0]
        return functools.reduce(layer, layers, x)

    def name(self, x: Array, name: str) -> Array:
        """Name an array of a layer for `jax.checkpoint`, if the rematerialisation is by names."""
        return checkpoint_name(x, name) if self.remat in NAMES else x

    @property
    def functions(self) -> Variant:
        """The variant's functions. If arrays have names, norms are not fused with additions."""
        if self.remat not in NAMES:
            return self.variant
        return dataclasses.replace(
            self.variant,
            add_rms_norm=add_then(self.variant.rms_norm, self._named_sum),
            add_layer_norm=add_then(self.variant.layer_norm, self._named_sum),
        )

    def _named_sum(self, h: Array) -> Array:
        return self.name(h, "h")

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
    use = model.functions

    def layer(x: Array, p: Params) -> Array:
        y = use.layer_norm(x, **p["attention_norm"])
        qkv = jnp.split(dense(use.linear, y, p["qkv"]), 3, axis=-1)
        q, k, v = (model.name(model.heads(a), name) for a, name in zip(qkv, _QKV))
        branch = dense(use.heads_linear, model.attend(q, k, v), p["attention_out"])
        y, x = use.add_layer_norm(model.name(branch, "out"), x, **p["mlp_norm"])
        h = model.name(dense(use.linear, y, p["mlp_in"]), "mid")
        down = use.activation_linear(h, p["mlp_out"]["kernel"], p["mlp_out"]["bias"])
        return x + model.name(down, "down")

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
    use = model.functions
    tables = rotations(x.shape[1], model.size.head)

    def rotate(x: Array, norm: Params | None) -> Array:
        return rotated(x, *tables) if norm is None else use.rms_norm_rope(x, norm["scale"], *tables)

    def layer(x: Array, p: Params) -> Array:
        y = use.rms_norm(x, **p["attention_norm"])
        q, k, v = (model.heads(use.linear(y, p[name])) for name in _QKV)
        q, k = rotate(q, p.get("q_norm")), rotate(k, p.get("k_norm"))
        attended = model.attend(*(model.name(a, name) for a, name in zip((q, k, v), _QKV)))
        branch = use.heads_linear(attended, p["attention_out"])
        y, x = use.add_rms_norm(model.name(branch, "out"), x, **p["mlp_norm"])
        gate, up = (model.name(use.linear(y, p[name]), name) for name in ("gate", "up"))
        return x + model.name(use.gated_linear(gate, up, p["down"]), "down")

    return use.rms_norm(model.stack(layer, x, params["layers"]), **params["norm"])


_SHAPES = {"gpt2": gpt2_shapes, "llama": llama_shapes}
_MODELS = {"gpt2": gpt2, "llama": llama}


# Training.


def train_step(
    model: Model,
    state: State,
    tokens: Array,
    remat: Callable[..., Callable[..., Any]] = lambda loss: loss,
) -> tuple[State, Array]:
    """Take a step of AdamW on tokens (B, S + 1), and return the new state and the loss.

    `remat` is applied to the loss before it is differentiated.
    """
    params, moments = state
    loss, gradients = jax.value_and_grad(remat(model.loss))(params, tokens)
    with jax.named_scope("optimizer"):
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss
