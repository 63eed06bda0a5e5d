"""Blocks of a transformer, forward and backward, with jaxnorm and in plain jnp.

    python -m benchmarks.blocks

A kernel is opaque to XLA, which can no longer fuse a norm or a softmax with its neighbours; blocks
show what that costs and what the kernels gain. `us` is the time of all GPU kernels of one step by
CUPTI, on rotating operands; `gain` is plain jnp's time over it. Also runs on a CPU with --compile,
which prints compiled temp memory alone.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxnorm
from benchmarks import timing
from benchmarks.providers import jnp_functions
from jaxnorm._attention import attention_weights

Array = jax.Array


def add_norm(norm: Callable[..., Array], x: Array, r: Array, *params: Array) -> tuple[Array, Array]:
    """Residual addition and norm: what the kernels can be fused into least."""
    x = x + r
    return x, norm(x, *params)


def mlp(norm: Callable[..., Array], x: Array, w1: Array, w2: Array, *params: Array) -> Array:
    """Pre-norm residual MLP."""
    return x + jax.nn.gelu(norm(x, *params) @ w1) @ w2


def attention(weigh: Callable[..., Array], q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    """Attention over ``(batch, heads, length, depth)`` whose logits are materialised."""
    logits = jnp.einsum("bhqd,bhkd->bhqk", q / q.shape[-1] ** 0.5, k)
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool)) if causal else None
    return jnp.einsum("bhqk,bhkd->bhqd", weigh(logits, mask), v)


def weigh_by(softmax: Callable[..., Array]) -> Callable[..., Array]:
    """Attention weights of masked logits, by a softmax."""

    def weigh(logits: Array, mask: Array | None) -> Array:
        if mask is not None:
            logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
        return softmax(logits)

    return weigh


def weigh_by_default(logits: Array, mask: Array | None) -> Array:
    """What jaxnorm's attention functions do."""
    return attention_weights(logits, None, mask, logits.dtype, logits.dtype)


def softmax_over_rows(softmax: Callable[..., Array], x: Array) -> Array:
    """Over an axis that is not the last one: a kernel needs it transposed."""
    return softmax(x, axis=-2)


def jaxnorm_by(name: str | None) -> dict[str, Callable[..., Array]]:
    """jaxnorm's functions with this `implementation`."""
    functions = {
        function: functools.partial(getattr(jaxnorm, function), implementation=name)
        for function in ("softmax", "layer_norm", "rms_norm")
    }
    weigh = weigh_by_default if name is None else weigh_by(functions["softmax"])
    return {**functions, "weigh": weigh}


PROVIDERS: dict[str, dict[str, Callable[..., Array]]] = {
    "plain jnp": {
        "softmax": jax.nn.softmax,
        "weigh": weigh_by(jax.nn.softmax),
        "layer_norm": jnp_functions.layer_norm,
        "rms_norm": jnp_functions.rms_norm,
    },
    **{f"jaxnorm {name or 'default'}": jaxnorm_by(name) for name in ("xla", "mosaic", None)},
}


def training_step(block: Callable[..., Any]) -> Callable[..., Any]:
    """The block's output and its gradients, for a given cotangent."""

    def step(cotangent: Any, *operands: Array) -> Any:
        out, vjp = jax.vjp(block, *operands)
        return out, vjp(cotangent)

    return jax.jit(step)


def cases() -> dict[str, tuple[Callable[..., Any], str, list[tuple[int, ...]]]]:
    """Name -> block, the function it is given, shapes of the operands (vectors are float32)."""
    rows, width = 8192, 4096
    params = [(width,), (width,)]
    matrices = [(width, 4 * width), (4 * width, width)]
    residual = [(rows, width), (rows, width)]
    heads = [(4, 16, 2048, 128)] * 3
    causal, full = (functools.partial(attention, causal=flag) for flag in (True, False))
    return {
        "add + RMSNorm 8192x4096": (add_norm, "rms_norm", [*residual, *params[:1]]),
        "add + LayerNorm 8192x4096": (add_norm, "layer_norm", [*residual, *params]),
        "RMSNorm MLP 8192x4096": (mlp, "rms_norm", [residual[0], *matrices, *params[:1]]),
        "LayerNorm MLP 8192x4096": (mlp, "layer_norm", [residual[0], *matrices, *params]),
        "attention 4x16x2048x128": (full, "weigh", heads),
        "causal attention 4x16x2048x128": (causal, "weigh", heads),
        "softmax over axis 1 of 8x4096x4096": (softmax_over_rows, "softmax", [(8, 4096, 4096)]),
    }


def random_operands(shapes: Sequence[tuple[int, ...]], dtype: str, seed: int) -> list[Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        1 + 0.1 * jax.random.normal(key, shape)
        if len(shape) == 1
        else jax.random.normal(key, shape, dtype) / (shape[0] ** 0.5 if len(shape) == 2 else 1)
        for key, shape in zip(keys, shapes)
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", metavar="NAME", default=["bfloat16", "float32"])
    parser.add_argument("--compile", action="store_true", help="print compiled memory alone")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    if not given.compile and jax.devices()[0].platform != "gpu":
        print("benchmarks.blocks times GPU kernels; --compile runs without one", file=sys.stderr)
        return 2
    for dtype in given.dtypes:
        for case, (block, function, shapes) in cases().items():
            plain_us = float("nan")
            for provider, functions in PROVIDERS.items():
                bound = functools.partial(block, functions[function])
                step = training_step(bound)
                example = random_operands(shapes, dtype, 0)
                out = jax.eval_shape(bound, *example)
                program = step.lower(out, *example).compile()
                temp = program.memory_analysis().temp_size_in_bytes / 2**20
                line = f"{case:36}{dtype:10}{provider:17}temp {temp:8.1f} MiB"
                if not given.compile:
                    operands = []
                    for seed in range(2):
                        operand = random_operands(shapes, dtype, seed)
                        operands.append((jax.jit(bound)(*operand), *operand))
                    us = timing.measure(program, operands).us
                    plain_us = us if provider == "plain jnp" else plain_us
                    line += f"{us:10.1f} us  gain {plain_us / us:5.2f}"
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
