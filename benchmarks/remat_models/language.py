"""Language models: GPT-2, BERT, Llama, Qwen 3, Gemma 2, Mixtral, Mamba 2, T5, hyper-connections.

Each model is a function of its sizes, which returns a `Program`: a training loss and its arguments.
Layers are scanned, except in BERT, T5 and Mamba 2, whose layers are unrolled. GPT-2, Llama and
Qwen 3 are the models of `language_models`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks import language_models, models
from benchmarks.remat_models import parts
from benchmarks.remat_models.parts import Array, DType, GatedMLP, Program
from benchmarks.variants import VARIANTS


class _Model(language_models.Model):
    """A model of `language_models`, with flash attention."""

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        return parts.flash_attention(True, q, k, v)


def model(dtype: DType, name: str, remat: Any = "none", **sizes: int) -> language_models.Model:
    """Return a model of `models.MODELS`, with the given sizes and rematerialisation."""
    size = dataclasses.replace(models.MODELS[name], **sizes)  # type: ignore[arg-type]
    return _Model(size, VARIANTS["jnp"], remat, dtype)


def of_model(model: language_models.Model) -> Program:
    size = model.size
    batch = parts.tokens(size.batch, size.seq + 1, vocabulary=size.vocabulary)
    return Program(model.loss, model.init, batch, size.batch * size.seq * size.width)


def plain(dtype: DType, name: str, **sizes: int) -> Program:
    """Return the program of GPT-2, Llama or Qwen 3 in plain JAX."""
    return of_model(model(dtype, name, **sizes))


class _Decoder(nn.Module):
    """Embed tokens, apply layers, and compute logits.

    Attributes:
      block: the class of a block of one or more layers. A block is a function of x. In a scan, it
        also takes None, and returns x and None.
      blocks: the number of blocks.
      of_block: arguments of `block`. If `streams` is one of them, x has this number of copies.
      is_scanned: True for a scan over stacked parameters, False for separate blocks.
      is_tied: True if the embedding is also the weight of the last layer.
      cap: a cap of the logits, or None. With a cap, embeddings are multiplied by sqrt(width).
    """

    block: Any
    blocks: int
    of_block: dict[str, Any]
    width: int
    vocabulary: int
    dtype: DType
    is_scanned: bool = True
    is_tied: bool = False
    cap: float | None = None

    @nn.compact
    def __call__(self, batch: Array) -> Array:
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        of_block, streams = {**self.of_block, "dtype": self.dtype}, self.of_block.get("streams")
        x = embed(batch)
        if self.cap is not None:
            x = x * jnp.asarray(self.width**0.5, self.dtype)
        if streams is not None:
            x = jnp.repeat(x[..., None, :], streams, axis=-2)
        if self.is_scanned:
            split: Any = {"params": True}
            axes: Any = {"params": 0}
            scan = nn.scan(self.block, variable_axes=axes, split_rngs=split, length=self.blocks)
            x, _ = scan(**of_block)(x, None)
        else:
            for _ in range(self.blocks):
                x = self.block(**of_block)(x)
        if streams is not None:
            x = jnp.sum(x, axis=-2)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        head = nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)
        logits = embed.attend(x) if self.is_tied else head(x)
        return logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)


def _decoder(
    block: Any, heads: str | None = None, *, layers_per_block: int = 1, **options: Any
) -> Callable[..., Program]:
    """Return a function that returns the program of a `_Decoder`, given its sizes.

    `heads` is the name of the size that is the number of heads. It is None if attention does not
    store its probabilities.
    """

    def program(
        dtype: DType, layers: int, width: int, vocabulary: int, batch: int, seq: int, **sizes: Any
    ) -> Program:
        blocks = layers // layers_per_block
        module = _Decoder(block, blocks, sizes, width, vocabulary, dtype, **options)
        batches = parts.tokens(batch, seq, vocabulary=vocabulary)
        matrix = batch * sizes[heads] * seq * seq if heads else 0
        counts = {"activation": batch * seq * width, "matrix": matrix}
        return parts.of_module(module, parts.next_token, batches, **counts, length=seq)

    return program


class _Attention(nn.Module):
    """Causal self-attention with rotary position embedding."""

    heads: int
    kv_heads: int
    head: int
    dtype: DType
    cap: float | None = None
    window: int | None = None
    is_flash: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        q = parts.rotated(dense((self.heads, self.head), name="q")(x))
        k = parts.rotated(dense((self.kv_heads, self.head), name="k")(x))
        v = dense((self.kv_heads, self.head), name="v")(x)
        if self.is_flash:
            attended = parts.flash_attention(True, q, k, v)
        else:
            k, v = (jnp.repeat(a, self.heads // self.kv_heads, axis=2) for a in (k, v))
            distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
            mask = (distance >= 0) & (distance < (self.window or x.shape[1]))
            q = q * self.head**-0.5
            attended = parts.attention(q, k, v, mask=mask, cap=self.cap)
        return dense(x.shape[-1], axis=(-2, -1), name="out")(attended)


# Gemma 2: capped logits, local and global layers, and norms before and after each part.


class _GemmaPair(nn.Module):
    heads: int
    kv_heads: int
    head: int
    hidden: int
    window: int
    dtype: DType

    @nn.compact
    def __call__(self, x: Array, _: Any) -> tuple[Array, None]:
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        sizes = self.heads, self.kv_heads, self.head, self.dtype
        for window in (self.window, None):
            x = x + norm()(_Attention(*sizes, 50.0, window, False)(norm()(x)))
            x = x + norm()(GatedMLP(self.hidden, self.dtype, nn.gelu)(norm()(x)))
        return x, None


gemma_2 = _decoder(_GemmaPair, "heads", layers_per_block=2, is_tied=True, cap=30.0)


# Mixtral: each token runs through two experts. Tokens are sorted by expert for ragged matmuls.


class _Experts(nn.Module):
    experts: int
    chosen: int
    hidden: int
    dtype: DType

    @nn.compact
    def __call__(self, x: Array) -> Array:
        rows, d = x.reshape(-1, x.shape[-1]), x.shape[-1]
        router = nn.Dense(self.experts, use_bias=False, dtype=self.dtype)(rows)
        weights, chosen = jax.lax.top_k(router, self.chosen)
        weights = jax.nn.softmax(weights.astype(jnp.promote_types(self.dtype, "float32")))
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts)

        def matmul(rows: Array, name: str, cols: int) -> Array:
            shape = (self.experts, rows.shape[-1], cols)
            weight = self.param(name, nn.initializers.lecun_normal(batch_axis=0), shape)
            return jax.lax.ragged_dot(rows, weight.astype(self.dtype), sizes)

        moved = rows[order // self.chosen]
        gate, up = matmul(moved, "gate", self.hidden), matmul(moved, "up", self.hidden)
        results = matmul(nn.silu(gate) * up, "down", d)[jnp.argsort(order)]
        results = results.reshape(-1, self.chosen, d)
        return jnp.einsum("tkd,tk->td", results, weights.astype(self.dtype)).reshape(x.shape)


class _MixtralLayer(nn.Module):
    attention: tuple[int, int, int]
    experts: tuple[int, int, int]
    dtype: DType

    @nn.compact
    def __call__(self, x: Array, _: Any) -> tuple[Array, None]:
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        x = x + _Attention(*self.attention, self.dtype)(norm()(x))
        return x + _Experts(*self.experts, self.dtype)(norm()(x)), None


# `attention` is (heads, kv_heads, head), `experts` (all, chosen, hidden).
mixtral = _decoder(_MixtralLayer)


# Hyper-connections (mHC): several residual streams, which a doubly stochastic matrix mixes.


class _Connected(nn.Module):
    """A part of a layer, with connections to the residual streams x (B, S, streams, d).

    The part gets a weighted sum of the streams. Then the streams are mixed, and a multiple of the
    part's result is added to each.
    """

    part: Any
    iterations: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        n = x.shape[-2]
        wide = jnp.promote_types(x.dtype, "float32")
        flat = nn.RMSNorm(use_scale=False, dtype=wide)(x.reshape(*x.shape[:-2], -1))
        mixes = nn.Dense(n * (n + 2), dtype=wide, kernel_init=nn.initializers.normal(0.02))(flat)
        before, after, mix = jnp.split(mixes, [n, 2 * n], axis=-1)
        mix = jnp.exp(mix.reshape(*mix.shape[:-1], n, n))
        for _ in range(self.iterations):
            mix = mix / jnp.sum(mix, axis=-1, keepdims=True)
            mix = mix / jnp.sum(mix, axis=-2, keepdims=True)
        before, after = jax.nn.sigmoid(before), 2 * jax.nn.sigmoid(after)
        y = self.part(jnp.einsum("bsn,bsnd->bsd", before.astype(x.dtype), x))
        x = jnp.einsum("bsmn,bsnd->bsmd", mix.astype(x.dtype), x)
        return x + after.astype(x.dtype)[..., None] * y[..., None, :]


class _Normalised(nn.Module):
    part: Any
    dtype: DType

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return self.part(nn.RMSNorm(dtype=self.dtype)(x))


class _ConnectedLayer(nn.Module):
    attention: tuple[int, int, int]
    hidden: int
    streams: int
    iterations: int
    dtype: DType

    @nn.compact
    def __call__(self, x: Array, _: Any) -> tuple[Array, None]:
        parts = (_Attention(*self.attention, self.dtype), GatedMLP(self.hidden, self.dtype))
        for part in parts:
            x = _Connected(_Normalised(part, self.dtype), self.iterations)(x)
        return x, None


hyper_connections = _decoder(_ConnectedLayer)


# Mamba 2: a state-space layer, computed in chunks of tokens (SSD).


def _sums_of_segments(x: Array) -> Array:
    """Return the array whose element [..., j, i] is the sum of x[..., t] over i < t <= j.

    It is -inf for i > j.
    """
    sums = jnp.cumsum(x, axis=-1)
    differences = sums[..., :, None] - sums[..., None, :]
    return jnp.where(jnp.tril(jnp.ones(differences.shape[-2:], bool)), differences, -jnp.inf)


def _ssd(x: Array, log_decay: Array, b: Array, c: Array, chunk: int) -> Array:
    """Apply the state-space layer to x (B, S, H, D); b and c are (B, S, state).

    `log_decay` is (B, S, H).
    """
    x, b, c = (a.reshape(a.shape[0], -1, chunk, *a.shape[2:]) for a in (x, b, c))
    log_decay = jnp.moveaxis(log_decay.reshape(*x.shape[:4]), 3, 1)  # (B, H, chunks, chunk)
    sums = jnp.cumsum(log_decay, axis=-1)
    within = jnp.exp(_sums_of_segments(log_decay)).astype(x.dtype)
    y = jnp.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, within, x)
    to_end = jnp.exp(sums[..., -1:] - sums).astype(x.dtype)
    states = jnp.einsum("bcln,bhcl,bclhp->bchpn", b, to_end, x)
    decay = jnp.exp(sums[..., -1]).astype(x.dtype)

    def step(state: Array, of_chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        new, decay = of_chunk
        return state * decay[..., None, None] + new, state

    by_chunk = jnp.moveaxis(states, 1, 0), jnp.moveaxis(decay, 2, 0)
    _, before = jax.lax.scan(step, jnp.zeros_like(states[:, 0]), by_chunk)
    from_start = jnp.exp(sums).astype(x.dtype)
    y = y + jnp.einsum("bcln,cbhpn,bhcl->bclhp", c, before, from_start)
    return y.reshape(y.shape[0], -1, *y.shape[3:])


class _MambaLayer(nn.Module):
    inner: int
    head: int
    state: int
    chunk: int
    dtype: DType

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        heads = self.inner // self.head
        y = nn.RMSNorm(dtype=self.dtype)(x)
        channels = self.inner + 2 * self.state
        z, xbc, dt = jnp.split(
            dense(self.inner + channels + heads)(y), [self.inner, self.inner + channels], axis=-1
        )
        conv = nn.Conv(
            channels, (4,), padding="CAUSAL", feature_group_count=channels, dtype=self.dtype
        )
        inner, b, c = jnp.split(nn.silu(conv(xbc)), [self.inner, self.inner + self.state], axis=-1)
        wide = jnp.promote_types(self.dtype, "float32")
        dt = nn.softplus(dt.astype(wide) + self.param("dt_bias", nn.initializers.ones, (heads,)))
        decay = -jnp.exp(self.param("log_a", nn.initializers.zeros, (heads,)))
        skip = self.param("skip", nn.initializers.ones, (heads, 1)).astype(self.dtype)
        inner = inner.reshape(*inner.shape[:2], heads, self.head)
        scaled = inner * dt[..., None].astype(self.dtype)
        y = _ssd(scaled, dt * decay, b, c, self.chunk) + skip * inner
        y = y.reshape(z.shape) * nn.silu(z)
        return x + dense(x.shape[-1])(nn.RMSNorm(dtype=self.dtype)(y))


mamba_2 = _decoder(_MambaLayer, is_scanned=False, is_tied=True)


# BERT: norms after the residual additions, dropout, and masked tokens.


class _BertLayer(nn.Module):
    heads: int
    hidden: int
    rate: float
    dtype: DType

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        d = x.shape[-1]
        dense = functools.partial(nn.DenseGeneral, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)

        def dropped(y: Array) -> Array:
            return parts.dropout(y, self.rate, self.make_rng("dropout"))

        q, k, v = (dense((self.heads, d // self.heads), name=name)(x) for name in "qkv")
        q = q * (d // self.heads) ** -0.5
        key = self.make_rng("dropout")
        attended = parts.attention(q, k, v, mask=mask, rate=self.rate, key=key)
        x = norm()(x + dropped(dense(d, axis=(-2, -1), name="out")(attended)))
        y = dense(d)(nn.gelu(dense(self.hidden)(x), approximate=False))
        return norm()(x + dropped(y))


class _Bert(nn.Module):
    width: int
    heads: int
    vocabulary: int
    dtype: DType
    layers: int
    hidden: int
    rate: float = 0.1

    @nn.compact
    def __call__(self, batch: dict[str, Array]) -> Array:
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        x = embed(batch["tokens"])
        positions = nn.Embed(x.shape[1], self.width, dtype=self.dtype)(jnp.arange(x.shape[1]))
        x = nn.LayerNorm(dtype=self.dtype)(x + positions)
        mask = batch["mask"][:, None, None, :]
        for _ in range(self.layers):
            x = _BertLayer(self.heads, self.hidden, self.rate, self.dtype)(x, mask)
        x = nn.gelu(nn.Dense(self.width, dtype=self.dtype)(x), approximate=False)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def bert(
    dtype: DType, width: int, heads: int, vocabulary: int, batch: int, seq: int, **sizes: Any
) -> Program:
    module = _Bert(width, heads, vocabulary, dtype, **sizes)

    def batches(key: Array) -> dict[str, Any]:
        given = parts.tokens(batch, seq, vocabulary=vocabulary)(key)
        is_chosen = jax.random.bernoulli(key, jnp.float32(0.15), given.shape)
        lengths = jax.random.randint(key, (batch, 1), seq // 2, seq + 1)
        mask = jnp.arange(seq) < lengths
        return {
            "tokens": jnp.where(is_chosen, 0, given),
            "labels": given,
            "mask": mask,
            "dropout": key,
        }

    def loss(logits: Array, batch: dict[str, Any]) -> Array:
        return parts.cross_entropy(logits, batch["labels"])

    counts = {"activation": batch * seq * width, "matrix": batch * heads * seq * seq}
    return parts.of_module(module, loss, batches, **counts, length=seq)


# T5: an encoder and a decoder with relative position biases.


class _T5Attention(nn.Module):
    heads: int
    head: int
    dtype: DType

    @nn.compact
    def __call__(
        self, x: Array, other: Array, bias: Array | None, mask: Array | None = None
    ) -> Array:
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        q = dense((self.heads, self.head), name="q")(x)
        k, v = (dense((self.heads, self.head), name=name)(other) for name in "kv")
        attended = parts.attention(q * self.head**-0.5, k, v, bias=bias, mask=mask)
        return dense(x.shape[-1], axis=(-2, -1), name="out")(attended)


def _relative_bias(heads: int, length: int, is_causal: bool, dtype: DType) -> Array:
    """Return the bias (1, H, S, S) of the distances between tokens, in 32 buckets."""
    distance = jnp.arange(length)[None] - jnp.arange(length)[:, None]
    buckets = 32 if is_causal else 16
    sign = 0 if is_causal else jnp.where(distance > 0, buckets, 0)
    distance = jnp.maximum(-distance, 0) if is_causal else jnp.abs(distance)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / jnp.log(128 / exact)
    far = jnp.minimum(exact + (ratio * (buckets - exact)).astype("int32"), buckets - 1)
    which = sign + jnp.where(distance < exact, distance, far)
    return jnp.moveaxis(nn.Embed(32, heads, dtype=dtype)(which), -1, 0)[None]


class _T5(nn.Module):
    width: int
    heads: int
    vocabulary: int
    dtype: DType
    layers: int
    head: int
    hidden: int

    @nn.compact
    def __call__(self, batch: dict[str, Array]) -> Array:
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        attend = functools.partial(_T5Attention, self.heads, self.head, self.dtype)
        mlp = functools.partial(GatedMLP, self.hidden, self.dtype, nn.gelu)
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)

        def layers(x: Array, mask: Array | None, encoded: Array | None) -> Array:
            bias = _relative_bias(self.heads, x.shape[1], mask is not None, self.dtype)
            for _ in range(self.layers):
                y = norm()(x)
                x = x + attend()(y, y, bias, mask)
                if encoded is not None:
                    x = x + attend()(norm()(x), encoded, None)
                x = x + mlp()(norm()(x))
            return norm()(x)

        encoded = layers(embed(batch["inputs"]), None, None)
        targets = embed(batch["targets"])
        mask = jnp.tril(jnp.ones(targets.shape[1:2] * 2, bool))
        x = layers(targets, mask, encoded)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


def t5(
    dtype: DType, width: int, heads: int, vocabulary: int, batch: int, seq: int, **sizes: Any
) -> Program:
    module = _T5(width, heads, vocabulary, dtype, **sizes)

    def batches(key: Array) -> dict[str, Array]:
        shape = parts.tokens(batch, seq, vocabulary=vocabulary)
        return {"inputs": shape(key), "targets": shape(key)[:, ::-1]}

    def loss(logits: Array, batch: dict[str, Array]) -> Array:
        return parts.next_token(logits, batch["targets"])

    counts = {"activation": batch * seq * width, "matrix": batch * heads * seq * seq}
    return parts.of_module(module, loss, batches, **counts, length=seq)
