"""Times calls of jaxnorm against the same computations in plain JAX.

``python -m benchmarks.against_plain`` takes three minutes on an H200. The other suites time each
operation on large arrays whose rows are multiples of 16 bytes. This module times calls where plain
JAX may be faster: rows of odd lengths, arrays as scales, attention over few keys, and calls inside
`jax.vmap` and `jax.lax.scan`. Each call has several variants, such as the default and a given
implementation. A ratio is the time of a variant, divided by the time of plain JAX, so a number
above 1 means that plain JAX is faster.
"""

import argparse
import dataclasses
import functools
import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import jaxnorm
from benchmarks import calls, timing, variants
from jaxnorm.tools.text import table

Function = Callable[..., Any]
Shape = tuple[int, ...]

#: The name of the variant with which all others are compared.
PLAIN = "plain"
# Wall times are medians over batches of calls. Batches of the variants alternate.
_CALLS, _BATCHES = 10, 5


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation in several variants, with equal operands and results.

    Attributes:
      operands: the shape and dtype of each operand. An integer operand is a label below `classes`.
      variants: the functions, by name. The first one must be `PLAIN`.
      gradients: the number of leading operands that are differentiated; 0 times only the forward
        pass.
      has_matmul: True if compilers may time several matmuls on the GPU, to choose the fastest.
    """

    operands: tuple[tuple[Shape, str], ...]
    variants: Mapping[str, Function]
    gradients: int = 1
    classes: int = 0
    has_matmul: bool = False


# ------------------------------------------------------------------------------------ plain JAX


def _plain_divergence(x: Any, teacher: Any, a: Any) -> Any:
    log_q, log_p = (
        jax.nn.log_softmax(v.astype(jnp.float32) * a[..., None], axis=-1) for v in (x, teacher)
    )
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _plain_cross_entropy(x: Any, labels: Any, a: Any) -> Any:
    z = x.astype(jnp.float32) * a[..., None]
    at_label = jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(z, axis=-1) - at_label


def _plain_log_prob_and_entropy(z: Any, labels: Any) -> Any:
    log_p = jax.nn.log_softmax(z, axis=-1)
    at_label = jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
    return at_label, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def _attention(softmax: Function, query: Any, key: Any, value: Any) -> Any:
    """Scale the query and attend, as Flax does."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", query * 64**-0.5, key)
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(logits), value)


def _attention_of_heads(softmax: Function, query: Any, key: Any, value: Any) -> Any:
    """Attend with heads before positions, and scale the logits."""
    logits = jnp.einsum("bhqd,bhkd->bhqk", query, key) * 64**-0.5
    return jnp.einsum("bhqk,bhkd->bhqd", softmax(logits), value)


def _scan_of(add_norm: Function, x: Any, residual: Any, scale: Any, *, steps: int) -> Any:
    """Add the norm of the last step to the residual stream, and normalise the sum."""

    def step(carry: Any, _: Any) -> Any:
        return add_norm(*carry, scale=scale), None

    return jax.lax.scan(step, (x, residual), length=steps)[0]


# ------------------------------------------------------------------------------------ the table


def _implementations(function: Function, *names: str) -> dict[str, Function]:
    """Return the default and the implementations with these names, as variants."""
    given = {name: functools.partial(function, implementation=name) for name in names}
    return {"default": function, **given}


def _norms(dtype: str, rows: int, cols: int) -> Iterator[tuple[str, Case]]:
    x, scale = ((rows, cols), dtype), ((cols,), "float32")
    shape = f"{dtype} {rows}x{cols}"
    # A kernel of the backward pass exists only for rows in multiples of 16 bytes.
    names = ("xla",) if cols * jnp.dtype(dtype).itemsize % 16 else ("xla", "mosaic")
    yield (
        f"rms_norm {shape}",
        Case(
            (x, scale), {PLAIN: variants.rms_norm, **_implementations(jaxnorm.rms_norm, *names)}, 2
        ),
    )
    yield (
        f"layer_norm {shape}",
        Case(
            (x, scale, scale),
            {PLAIN: variants.layer_norm, **_implementations(jaxnorm.layer_norm, *names)},
            3,
        ),
    )
    plain = variants.add_then(variants.rms_norm)
    sums = {PLAIN: plain, **_implementations(jaxnorm.add_rms_norm, *names)}
    yield f"add_rms_norm {shape}", Case((x, scale, x), {n: _sum(f) for n, f in sums.items()}, 2)


def _sum(add_norm: Function) -> Function:
    # The residual comes last. Its gradient is the gradient of x, and would be copied.
    return lambda x, scale, residual: add_norm(x, residual, scale=scale)


def _softmaxes(dtype: str, rows: int, cols: int, to: str = "") -> Iterator[tuple[str, Case]]:
    softmax = functools.partial(jaxnorm.softmax, dtype=to or dtype)
    found = {
        PLAIN: lambda x: jax.nn.softmax(x).astype(to or dtype),
        **_implementations(softmax, "xla", "mosaic"),
    }
    name = f"softmax {dtype} {rows}x{cols}" + f" to {to}" * bool(to)
    yield name, Case((((rows, cols), dtype),), found)


def _attentions(batch: int, heads: int, length: int) -> Iterator[tuple[str, Case]]:
    """Attention of a vision transformer, whose number of keys is a square plus 1."""
    softmaxes = {PLAIN: jax.nn.softmax, **_implementations(jaxnorm.softmax, "xla")}
    found = {name: functools.partial(_attention, f) for name, f in softmaxes.items()}
    flax = importlib.import_module("flax.nnx")
    ours = importlib.import_module("jaxnorm.nnx")
    found |= {"flax.nnx": flax.dot_product_attention, "jaxnorm.nnx": ours.dot_product_attention}
    operand = ((batch, length, heads, 64), "bfloat16")
    yield f"attention {batch}x{length}x{heads}", Case((operand,) * 3, found, 3, has_matmul=True)
    found = {name: functools.partial(_attention_of_heads, f) for name, f in softmaxes.items()}
    operand = ((batch, heads, length, 64), "bfloat16")
    yield f"attention {batch}x{heads}x{length}", Case((operand,) * 3, found, 3, has_matmul=True)


def _scaled_losses(dtype: str, rows: int, classes: int) -> Iterator[tuple[str, Case]]:
    logits, labels = ((rows, classes), dtype), ((rows,), "int32")
    losses: dict[str, tuple[Function, Function, Any]] = {
        "kl_divergence": (jaxnorm.kl_divergence, _plain_divergence, logits),
        "cross_entropy": (
            jaxnorm.softmax_cross_entropy_with_integer_labels,
            _plain_cross_entropy,
            labels,
        ),
    }

    def of_array(loss: Function) -> Function:
        return lambda x, other, a: loss(x, other, logits_scale=a)

    def of_number(loss: Function) -> Function:
        return lambda x, other, a: loss(x, other, logits_scale=0.5)

    for name, (loss, plain, other) in losses.items():
        for form, of_scale in {"scalar": (), "per position": (rows,)}.items():
            found = {n: of_array(f) for n, f in _implementations(loss, "xla").items()}
            yield (
                f"{name}, {form} scale, {dtype} {rows}x{classes}",
                Case(
                    (logits, other, (of_scale, "float32")),
                    {PLAIN: plain, "number": of_number(loss), **found},
                    classes=classes,
                ),
            )


def _linear_losses(dtype: str, rows: int, width: int, classes: int) -> Iterator[tuple[str, Case]]:
    loss = jaxnorm.linear_log_prob_and_entropy
    found: dict[str, Function] = {
        PLAIN: lambda x, w, labels: _plain_log_prob_and_entropy(
            jnp.matmul(x, w, preferred_element_type=jnp.float32), labels
        ),
        "default": loss,
        "one chunk": functools.partial(loss, chunk=rows),
        "whole logits": lambda x, w, labels: jaxnorm.log_prob_and_entropy(
            jnp.matmul(x, w, preferred_element_type=jnp.float32), labels
        ),
    }
    operands = (((rows, width), dtype), ((width, classes), dtype), ((rows,), "int32"))
    yield (
        f"linear_log_prob_and_entropy {dtype} {rows}x{width}x{classes}",
        Case(operands, found, 2, classes, has_matmul=True),
    )


def _activations(rows: int, hidden: int, width: int) -> Iterator[tuple[str, Case]]:
    def plain(x: Any, w: Any) -> Any:
        return jax.nn.gelu(x) @ w

    found: dict[str, Function] = {
        PLAIN: plain,
        "default": jaxnorm.activation_linear,
        "checkpoint": jax.checkpoint(plain),
    }
    operands = (((rows, hidden), "bfloat16"), ((hidden, width), "bfloat16"))
    yield (
        f"activation_linear bfloat16 {rows}x{hidden}x{width}",
        Case(operands, found, 2, has_matmul=True),
    )


def _norm_linears(rows: int, width: int, features: int) -> Iterator[tuple[str, Case]]:
    """RMSNorm and the matmul after it."""

    def plain(x: Any, w: Any, scale: Any) -> Any:
        return variants.rms_norm(x, scale) @ w

    operands = (((rows, width), "bfloat16"), ((width, features), "bfloat16"), ((width,), "float32"))
    found = {PLAIN: plain, **_implementations(jaxnorm.rms_norm_linear, "xla", "mosaic")}
    yield (
        f"rms_norm_linear bfloat16 {rows}x{width}x{features}",
        Case(operands, found, 3, has_matmul=True),
    )


def _vmapped(rows: int, cols: int, count: int) -> Iterator[tuple[str, Case]]:
    def over_scales(norm: Function) -> Function:
        return jax.vmap(norm, (None, 0))

    norms = {PLAIN: variants.rms_norm, **_implementations(jaxnorm.rms_norm, "xla", "mosaic")}
    found = {name: over_scales(norm) for name, norm in norms.items()}
    found["norm without scale"] = lambda x, s: (jaxnorm.rms_norm(x) * s[:, None]).astype(x.dtype)
    operands = (((rows, cols), "bfloat16"), ((count, cols), "float32"))
    yield f"vmap over {count} scales, rms_norm bfloat16 {rows}x{cols}", Case(operands, found, 2)


def _scans(rows: int, cols: int, steps: int) -> Iterator[tuple[str, Case]]:
    norms = {
        PLAIN: variants.add_then(variants.rms_norm),
        **_implementations(jaxnorm.add_rms_norm, "xla", "mosaic"),
    }
    norms["rms_norm"] = variants.add_then(jaxnorm.rms_norm)
    found = {name: functools.partial(_scan_of, f, steps=steps) for name, f in norms.items()}
    x = ((rows, cols), "bfloat16")
    name = f"scan of {steps} steps, add_rms_norm bfloat16 {rows}x{cols}"
    yield name, Case((x, x, ((cols,), "float32")), found, 0)


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    found: list[Iterator[tuple[str, Case]]] = []
    for dtype in ("bfloat16", "float32"):
        found += [_scaled_losses(dtype, 8192, 32000)]
    for batch, length in ((64, 197), (8, 197), (16, 577), (4, 577)):
        found += [_attentions(batch, 12, length)]
    for dtype in ("bfloat16", "float32"):
        found += [_norms(dtype, *s) for s in ((65536, 197), (16384, 1025), (8192, 4097))]
        found += [_softmaxes(dtype, *s) for s in ((151296, 197), (110784, 577), (8192, 4097))]
        found += [_softmaxes(dtype, *s) for s in ((151296, 192), (110784, 576))]
    for cols in (192, 197, 577):
        found += [_softmaxes("float32", 131072, cols, "bfloat16")]
    found += [_linear_losses("float32", 4096, 1024, 32000), _activations(8192, 8192, 2048)]
    found += [_norm_linears(8192, 4096, 6144), _activations(16384, 3072, 768)]
    found += [_vmapped(8192, 4096, 8), _scans(8192, 4096, 16)]
    return {name: case for each in found for name, case in each}


# ------------------------------------------------------------------------------------ measurement


#: The programs of a variant: the forward pass; both passes; and both passes, in which the backward
#: pass starts after the forward pass, as in a training step. Without this order, XLA may merge the
#: passes of plain JAX, and load each operand once for both.
DIRECTIONS = ("fwd", "f+b", "apart")


def _program(case: Case, function: Function, direction: str) -> Function:
    """Return a function of the operands and of the cotangents of the results."""

    def run(operands: Any, cotangents: Any) -> Any:
        if direction == "fwd":
            return function(*operands)
        given, constants = operands[: case.gradients], operands[case.gradients :]
        results, pullback = jax.vjp(lambda *given: function(*given, *constants), *given)
        if direction == "apart":
            results, cotangents = jax.lax.optimization_barrier((results, cotangents))
        return results, pullback(cotangents)

    return run


@functools.partial(jax.jit, static_argnums=(1, 2))
def _arrays(seed: int, types: tuple[tuple[Shape, str], ...], classes: int = 0) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(seed), max(1, len(types)))

    def array(key: Any, shape: Shape, dtype: str) -> Any:
        if dtype == "int32":
            return jax.random.randint(key, shape, 0, classes, dtype)
        normal = jax.random.normal(key, shape, dtype)
        return normal if len(shape) > 1 else 1 + 0.1 * jnp.abs(normal)  # A scale is positive.

    return tuple(array(key, *each) for key, each in zip(keys, types))


def _compiled(case: Case, name: str, direction: str) -> Function | None:
    """Compile a variant. Return None if its implementation does not support the call."""
    operands = jax.eval_shape(lambda: _arrays(0, case.operands, case.classes))
    results = jax.eval_shape(case.variants[PLAIN], *operands)
    program = _program(case, case.variants[name], direction)
    try:
        return jax.jit(program).lower(operands, results).compile()
    except ValueError:
        return None


def _wall_us(programs: Mapping[str, Function], inputs: list[Any]) -> dict[str, float]:
    """Return the median wall time of each program in microseconds. Batches alternate."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(_BATCHES):
        for name, run in programs.items():
            start = time.perf_counter()
            for i in range(_CALLS):
                out = run(*inputs[i % len(inputs)])
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    return {name: statistics.median(taken) for name, taken in times.items()}


@dataclasses.dataclass(frozen=True)
class Figures:
    """Kernel time and wall time in microseconds, number of kernels, and temporary memory."""

    us: float
    wall_us: float
    kernels: int | None
    temp: int


def _measured(case: Case, programs: Mapping[str, Function]) -> dict[str, Figures]:
    """Return the figures of the programs (the variants of one case, in one direction)."""
    size = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in case.operands)
    shapes = jax.eval_shape(case.variants[PLAIN], *_arrays(0, case.operands, case.classes))
    leaves, tree = jax.tree.flatten(shapes)
    types = tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
    inputs = []
    for seed in range(min(4, calls.buffers_for(2 * size))):
        cotangents = jax.tree.unflatten(tree, _arrays(seed + 100, types))
        inputs.append((_arrays(seed, case.operands, case.classes), cotangents))
    kernels = {name: timing.measure(run, inputs) for name, run in programs.items()}
    wall = _wall_us(programs, inputs)
    return {
        name: Figures(
            kernels[name].us,
            wall[name],
            kernels[name].kernels,
            int(run.memory_analysis().temp_size_in_bytes),  # type: ignore[attr-defined]
        )
        for name, run in programs.items()
    }


Key = tuple[str, str]


def _all_compiled(chosen: Mapping[str, Case], threads: int) -> dict[str, dict[Key, Any]]:
    """Compile the programs of all cases. Their keys are pairs (variant, direction)."""
    keys = [
        (name, (variant, direction))
        for name, case in chosen.items()
        for direction in DIRECTIONS[: None if case.gradients else 1]
        for variant in case.variants
    ]
    programs: dict[str, dict[Key, Any]] = {}
    with ThreadPoolExecutor(threads) as pool:
        compiled = pool.map(lambda key: _compiled(chosen[key[0]], *key[1]), keys)
        for (name, key), program in zip(keys, compiled):
            programs.setdefault(name, {})[key] = program
    return programs


def rows(case: Case, programs: Mapping[Key, Function | None]) -> list[tuple[str, ...]]:
    """Measure a case. Return the table's rows, one for each variant."""
    figures: dict[Key, Figures] = {}
    for direction in DIRECTIONS:
        ready = {v: p for (v, d), p in programs.items() if d == direction and p is not None}
        if ready:
            figures |= {(v, direction): f for v, f in _measured(case, ready).items()}

    def cells(variant: str, direction: str) -> tuple[str, ...]:
        f, plain = figures.get((variant, direction)), figures.get((PLAIN, direction))
        if f is None or plain is None:
            return ("-",) * len(_COLUMNS)
        ratios = f"{f.us / plain.us:.2f}", f"{f.wall_us / plain.wall_us:.2f}"
        return f"{f.us:.0f}", *ratios, str(f.kernels), f"{f.temp / 1e6:.0f}"

    return [(v, *(cell for d in DIRECTIONS for cell in cells(v, d))) for v in case.variants]


_COLUMNS = ("us", "ratio", "wall", "kernels", "MB")
_HEADER = ("variant", *(f"{d} {column}" for d in DIRECTIONS for column in _COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="run only the cases whose names have a word")
    words = parser.parse_args().words
    found = {n: c for n, c in cases().items() if not words or any(w in n for w in words)}
    print(jax.devices()[0].device_kind, jax.__version__, flush=True)
    for has_matmul in (False, True):
        chosen = {name: case for name, case in found.items() if case.has_matmul is has_matmul}
        programs = _all_compiled(chosen, threads=1 if has_matmul else 12)
        for name, case in chosen.items():
            print(f"\n{name}\n{table([_HEADER, *rows(case, programs[name])])}", flush=True)


if __name__ == "__main__":
    main()
