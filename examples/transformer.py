"""The model of train_transformer.py: a pre-LN causal transformer over bytes, in three variants."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxnorm.linen

# Each token is a byte, which has 256 possible values.
VOCABULARY = 256
# A step of Adam changes the output of a layer by about the learning rate times the width. The
# learning rate is `LEARNING_RATE_TIMES_WIDTH` divided by the width, so that this change does not
# depend on the width.
LEARNING_RATE_TIMES_WIDTH = 0.5


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 4
    width: int = 128
    heads: int = 4
    seq: int = 128
    batch: int = 16
    steps: int = 450
    learning_rate: float = LEARNING_RATE_TIMES_WIDTH / 128
    dtype: str = "float32"
    scan: bool = True
    seed: int = 0

    def __str__(self) -> str:
        stack = "scan over layers" if self.scan else "layers unrolled"
        return (
            f"{self.layers} layers, width {self.width}, {self.batch} x {self.seq} bytes per step, "
            f"{self.steps} steps, {self.dtype}, {stack}"
        )

    def reaches(self, other: "Config") -> bool:
        """Return True if this run is at least as large as the run `other`.

        This compares the model, the batch and the number of steps.
        """
        return (
            self.layers >= other.layers
            and self.width >= other.width
            and self.steps >= other.steps
            and self.batch * self.seq >= other.batch * other.seq
        )


class AddLayerNorm(nn.LayerNorm):
    """Adds the residual and applies Flax's norm. It has the arguments of jaxnorm's fused norm."""

    @nn.compact
    def __call__(self, x: jax.Array, *, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x + residual
        return super().__call__(h), h


class GeluDense(nn.Dense):
    """Applies gelu and Flax's linear layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(nn.gelu(x))


def gelu_dot(x: jax.Array, kernel: jax.Array, dimensions: Any, precision: Any) -> jax.Array:
    """Apply gelu and a matmul. A `Dense` can use this function in place of its matmul."""
    return jaxnorm.activation_linear(x, kernel)


@dataclasses.dataclass(frozen=True)
class Variant:
    """The functions in which the variants of the model differ.

    Attributes:
      label: the variant's name in tables.
      norm: the class of the norms.
      attention_fn: the attention function.
      cross_entropy: the loss function of optax or of jaxnorm. Both take the same arguments.
      gelu_dense: the class of the MLP's activation and second layer.
    """

    label: str
    norm: Callable[..., nn.Module]
    attention_fn: Callable[..., jax.Array]
    cross_entropy: Callable[..., jax.Array]
    gelu_dense: Callable[..., nn.Module] = GeluDense


FLAX = Variant(
    "Flax",
    AddLayerNorm,
    nn.dot_product_attention,
    optax.softmax_cross_entropy_with_integer_labels,
)
NORMS_AND_LOSS = Variant(
    "jaxnorm's norms and loss",
    jaxnorm.linen.LayerNorm,
    jaxnorm.linen.dot_product_attention,
    jaxnorm.softmax_cross_entropy_with_integer_labels,
)
PRODUCTS_INPUTS = dataclasses.replace(
    NORMS_AND_LOSS,
    label="and activation_linear",
    gelu_dense=functools.partial(nn.Dense, dot_general=gelu_dot),
)
# The variants. Each uses more of jaxnorm's functions than the one before it.
VARIANTS = (FLAX, NORMS_AND_LOSS, PRODUCTS_INPUTS)


class Block(nn.Module):
    """A transformer block. It takes and returns two arrays: a branch, and the residual stream.

    The branch that a block returns is the output of its MLP. The first norm of the next block adds
    this branch to the residual stream. So a norm follows every addition, and jaxnorm's norm does
    both in one pass.
    """

    config: Config
    variant: Variant

    @nn.compact
    def __call__(
        self, carry: tuple[jax.Array, jax.Array], mask: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        branch, x = carry
        width, dtype = self.config.width, self.config.dtype
        attention = nn.MultiHeadDotProductAttention(
            num_heads=self.config.heads,
            dtype=dtype,
            attention_fn=self.variant.attention_fn,
            name="attention",
        )
        y, x = self.variant.norm(dtype=dtype, name="attention_norm")(branch, residual=x)
        branch = attention(y, mask=mask)
        y, x = self.variant.norm(dtype=dtype, name="mlp_norm")(branch, residual=x)
        y = nn.Dense(4 * width, dtype=dtype, name="mlp_in")(y)
        return (self.variant.gelu_dense(width, dtype=dtype, name="mlp_out")(y), x), None


class Transformer(nn.Module):
    """The model, from bytes ``(batch, seq)`` to float32 logits ``(batch, seq, 256)``."""

    config: Config
    variant: Variant

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        positions = jnp.arange(tokens.shape[1])
        embed = functools.partial(nn.Embed, features=config.width, dtype=config.dtype)
        x = embed(VOCABULARY, name="bytes")(tokens)
        places = embed(config.seq, name="places")(positions)
        carry = jnp.broadcast_to(places, x.shape), x
        mask = nn.make_causal_mask(tokens[:1], dtype=bool)
        if config.scan:
            stack = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=config.layers,
            )
            carry, _ = stack(config, self.variant, name="blocks")(carry, mask)
        else:
            for layer in range(config.layers):
                carry, _ = Block(config, self.variant, name=f"block_{layer}")(carry, mask)
        branch, x = carry
        y, _ = self.variant.norm(dtype=config.dtype, name="final_norm")(branch, residual=x)
        return nn.Dense(VOCABULARY, dtype=jnp.float32, name="head")(y)
