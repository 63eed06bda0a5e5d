"""Models of images: ViT in equinox, DiT in Flax nnx and a U-Net in Flax linen.

Layers are unrolled. In shapes, B is the number of images, S the number of patches and d the width.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from benchmarks.remat_models import parts
from benchmarks.remat_models.parts import Array, DType, Program


def _patches(images: Array, patch: int) -> Array:
    """Split images (B, size, size, channels) into patches (B, S, patch * patch * channels)."""
    b, size, _, channels = images.shape
    split = images.reshape(b, size // patch, patch, size // patch, patch, channels)
    return split.swapaxes(2, 3).reshape(b, -1, patch * patch * channels)


# ViT: equinox's attention and MLP. The model takes one image, and `jax.vmap` adds the batch.


class _ViTLayer(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: list[eqx.nn.Linear]

    def __init__(self, width: int, heads: int, hidden: int, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.mlp = [
            eqx.nn.Linear(width, hidden, key=keys[1]),
            eqx.nn.Linear(hidden, width, key=keys[2]),
        ]

    def __call__(self, x: Array) -> Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        y = jax.nn.gelu(jax.vmap(self.mlp[0])(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.mlp[1])(y)


class _ViT(eqx.Module):
    embed: eqx.nn.Linear
    positions: Array
    layers: list[_ViTLayer]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __call__(self, image: Array) -> Array:
        x = jax.vmap(self.embed)(_patches(image[None], self.patch)[0]) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(jnp.mean(x, axis=0)))


def vit(
    dtype: DType,
    layers: int,
    width: int,
    heads: int,
    hidden: int,
    classes: int,
    patch: int,
    batch: int,
    size: int,
) -> Program:
    count = (size // patch) ** 2

    def create(key: Array) -> _ViT:
        keys = jax.random.split(key, layers + 3)
        return _ViT(
            eqx.nn.Linear(3 * patch**2, width, key=keys[0]),
            0.02 * jax.random.normal(keys[1], (count, width)),
            [_ViTLayer(width, heads, hidden, k) for k in keys[3:]],
            eqx.nn.LayerNorm(width),
            eqx.nn.Linear(width, classes, key=keys[2]),
            patch,
        )

    def init(key: Array) -> Any:
        return eqx.filter(create(key), eqx.is_array)

    shapes = eqx.filter_eval_shape(create, jax.random.key(0))
    static = eqx.partition(shapes, lambda a: isinstance(a, jax.ShapeDtypeStruct))[1]

    def batches(key: Array) -> dict[str, Array]:
        images = jax.random.normal(key, (batch, size, size, 3))
        return {"images": images, "labels": jax.random.randint(key, (batch,), 0, classes)}

    def loss(params: Any, batch: dict[str, Array]) -> Array:
        model = eqx.combine(jax.tree.map(lambda a: a.astype(dtype), params), static)
        logits = jax.vmap(model)(batch["images"].astype(dtype))
        return parts.cross_entropy(logits, batch["labels"])

    activation, matrix = batch * count * width, batch * heads * count * count
    return Program(loss, init, batches, activation, matrix, count)


# DiT: each layer's norms and branches are scaled by the embedding of the time and the class.


class _DiTLayer(nnx.Module):
    def __init__(self, width: int, heads: int, hidden: int, dtype: DType, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        norm = functools.partial(
            nnx.LayerNorm, width, use_scale=False, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.heads = heads
        self.modulation = linear(width, 6 * width)
        self.norm_1, self.norm_2 = norm(), norm()
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.mlp_in, self.mlp_out = linear(width, hidden), linear(hidden, width)

    def __call__(self, x: Array, condition: Array) -> Array:
        modulation = self.modulation(nnx.silu(condition))[:, None]
        shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split(modulation, 6, axis=-1)
        y = self.qkv(self.norm_1(x) * (1 + scale) + shift)
        q, k, v = (a.reshape(*x.shape[:2], self.heads, -1) for a in jnp.split(y, 3, axis=-1))
        attended = parts.flash_attention(False, q, k, v).reshape(x.shape)
        x = x + gate * self.out(attended)
        y = self.norm_2(x) * (1 + scale_2) + shift_2
        return x + gate_2 * self.mlp_out(nnx.gelu(self.mlp_in(y)))


class _DiT(nnx.Module):
    def __init__(
        self,
        width: int,
        channels: int,
        count: int,
        dtype: DType,
        rngs: nnx.Rngs,
        layers: int,
        **of_layer: int,
    ) -> None:
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.width, self.dtype = width, dtype
        self.embed = linear(channels, width)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, width)))
        self.classes = nnx.Embed(1000, width, dtype=dtype, rngs=rngs)
        self.time = linear(width, width)
        layer = functools.partial(_DiTLayer, width, dtype=dtype, rngs=rngs, **of_layer)
        self.layers = nnx.List([layer() for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = linear(width, channels)

    def __call__(self, x: Array, time: Array, label: Array) -> Array:
        condition = self.time(_waves(time, self.width).astype(self.dtype)) + self.classes(label)
        x = self.embed(x) + self.positions[...].astype(self.dtype)
        for layer in self.layers:
            x = layer(x, condition)
        return self.head(self.norm(x))


def _waves(time: Array, width: int) -> Array:
    """Return the sinusoidal embedding (B, width) of times (B,) in [0, 1]."""
    rates = 1e3 * 1e4 ** (-jnp.arange(width // 2) / (width // 2))
    angle = time[:, None] * rates
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def _noisy(key: Array, *shape: int) -> dict[str, Array]:
    """Return a training batch: images, noise, times and labels."""
    images, noise = jax.random.normal(key, (2, *shape))
    time = jax.random.uniform(key, shape[:1])
    return {
        "images": images,
        "noise": noise,
        "time": time,
        "labels": jax.random.randint(key, shape[:1], 0, 1000),
    }


def _blend(batch: dict[str, Array], dtype: DType) -> Array:
    share = batch["time"][:, None, None, None]
    return ((1 - share) * batch["images"] + share * batch["noise"]).astype(dtype)


def dit(
    dtype: DType, width: int, channels: int, patch: int, batch: int, size: int, **sizes: int
) -> Program:
    count = (size // patch) ** 2

    def create(key: Array) -> _DiT:
        rngs = nnx.Rngs(key)
        return _DiT(width, channels * patch**2, count, dtype, rngs, **sizes)

    graph, _ = nnx.split(nnx.eval_shape(lambda: create(jax.random.key(0))), nnx.Param)

    def loss(params: Any, batch: dict[str, Array]) -> Array:
        model = nnx.merge(graph, params)
        x = _patches(_blend(batch, dtype), patch)
        predicted = model(x, batch["time"], batch["labels"])
        return parts.squared_error(predicted, _patches(batch["noise"] - batch["images"], patch))

    def init(key: Array) -> Any:
        return nnx.state(create(key), nnx.Param)

    def batches(key: Array) -> dict[str, Array]:
        return _noisy(key, batch, size, size, channels)

    return Program(loss, init, batches, batch * count * width)


# A U-Net: residual blocks of convolutions, with attention at low resolutions.


class _ResidualBlock(nn.Module):
    channels: int
    groups: int
    dtype: DType

    @nn.compact
    def __call__(self, x: Array, time: Array) -> Array:
        norm = functools.partial(nn.GroupNorm, self.groups, dtype=self.dtype)
        conv = functools.partial(nn.Conv, self.channels, dtype=self.dtype)
        y = conv((3, 3))(nn.silu(norm()(x)))
        y = y + nn.Dense(self.channels, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = conv((3, 3))(nn.silu(norm()(y)))
        return y + (x if x.shape[-1] == self.channels else conv((1, 1))(x))


class _UNet(nn.Module):
    channels: tuple[int, ...]
    blocks: int
    groups: int
    heads: int
    dtype: DType

    @nn.compact
    def __call__(self, batch: dict[str, Array]) -> Array:
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        last = len(self.channels) - 1
        time = dense(4 * self.channels[0])(_waves(batch["time"], self.channels[0]))
        time = dense(4 * self.channels[0])(nn.silu(time))
        x = conv(self.channels[0], (3, 3))(_blend(batch, self.dtype))

        def block(x: Array, level: int) -> Array:
            x = _ResidualBlock(self.channels[level], self.groups, self.dtype)(x, time)
            if level < last:
                return x
            y = nn.GroupNorm(self.groups, dtype=self.dtype)(x).reshape(x.shape[0], -1, x.shape[-1])
            attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)
            return x + attention(y).reshape(x.shape)

        skips = [x]
        for level, channels in enumerate(self.channels):
            for _ in range(self.blocks):
                x = block(x, level)
                skips.append(x)
            if level < last:
                x = conv(channels, (3, 3), strides=2)(x)
                skips.append(x)
        x = block(x, last)
        for level, channels in reversed([*enumerate(self.channels)]):
            for _ in range(self.blocks + 1):
                x = block(jnp.concatenate([x, skips.pop()], axis=-1), level)
            if level:
                b, height, width, _ = x.shape
                x = jax.image.resize(x, (b, 2 * height, 2 * width, channels), "nearest")
                x = conv(channels, (3, 3))(x)
        x = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
        return conv(batch["images"].shape[-1], (3, 3))(x)


def u_net(dtype: DType, batch: int, size: int, **sizes: Any) -> Program:
    module = _UNet(**sizes, dtype=dtype)

    def loss(predicted: Array, batch: dict[str, Array]) -> Array:
        return parts.squared_error(predicted, batch["noise"] - batch["images"])

    return parts.of_module(module, loss, lambda key: _noisy(key, batch, size, size, 3))
