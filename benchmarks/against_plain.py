"""Times calls of jaxnorm against the same computations in plain JAX.

``python -m benchmarks.against_plain`` takes three minutes on an H200. The other suites time each
operation on large arrays whose rows are multiples of 16 bytes. This module times calls where plain
JAX may be faster: rows of odd lengths, attention over few keys, an activation and its matmul, and
calls inside `jax.lax.scan`. Each call has several variants, such as jaxnorm's default and a given
implementation. A ratio is the time of a variant, divided by the time of plain JAX, so a number
above 1 means that plain JAX is faster.
"""

import argparse
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import jaxnorm
from benchmarks import calls, jax_side, tables, timing, variants
from benchmarks.workloads import ITEMSIZE, Array, Shape

Function = Callable[..., Any]

#: The name of the variant with which all others are compared.
PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation in several variants, with equal operands and results.

    Attributes:
      arrays: the shapes and dtypes of the first operands; see `workloads.Array`.
      variants: maps the name of each variant to a function of all operands. The first name must be
        `PLAIN`.
      parameters: the shapes of the last operands, which are float32 and near 1.
      gradients: the indices of the operands that are differentiated. If there are none, only the
        forward pass is timed.
      has_matmul: True if the computation has matmuls. Its variants are then compiled one by one,
        because a compiler may time several matmuls on the GPU, to choose the fastest.
    """

    arrays: tuple[Array, ...]
    variants: Mapping[str, Function]
    parameters: tuple[Shape, ...] = ()
    gradients: tuple[int, ...] = (0,)
    has_matmul: bool = False

    def inputs(self, seed: int) -> jax_side.Inputs:
        """Return random operands and cotangents."""
        made = functools.partial(jax_side.random_arrays, seed, self.arrays, self.parameters)
        rows, parameters, _ = jax.eval_shape(lambda: made(()))
        results = jax.tree.leaves(jax.eval_shape(self.variants[PLAIN], *rows, *parameters))
        return made(tuple((a.shape, a.dtype.name) for a in results))


Cases = dict[str, Case]

# ------------------------------------------------------------------------------------ the table


def _attention(softmax: Function, query: Any, key: Any, value: Any) -> Any:
    """Scale the query and compute attention with the given softmax, as Flax does."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", query * 64**-0.5, key)
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(logits), value)


def _scan_of(add_norm: Function, x: Any, residual: Any, scale: Any, *, steps: int) -> Any:
    """Run steps that add x to the residual. The norm of the sum is the x of the next step."""

    def step(carry: Any, _: Any) -> Any:
        return add_norm(*carry, scale=scale), None

    return jax.lax.scan(step, (x, residual), length=steps)[0]


def _with(plain: Function, function: Function, *names: str) -> dict[str, Function]:
    """Return variants: plain JAX, jaxnorm's default, and the implementations with these names."""
    given = {name: functools.partial(function, implementation=name) for name in names}
    return {PLAIN: plain, "default": function, **given}


_PLAIN_ADD_NORM = variants.add_then(variants.rms_norm)


def _sum(add_norm: Function, x: Any, residual: Any, scale: Any) -> Any:
    return add_norm(x, residual, scale=scale)


def _norms(dtype: str, rows: int, cols: int) -> Cases:
    x, shape = ((rows, cols), dtype), f"{dtype} {rows}x{cols}"
    # The kernels of the backward pass need rows whose length is a multiple of 16 bytes.
    names = ("xla",) if cols * ITEMSIZE[dtype] % 16 else ("xla", "mosaic")
    rms = _with(variants.rms_norm, jaxnorm.rms_norm, *names)
    layer = _with(variants.layer_norm, jaxnorm.layer_norm, *names)
    sums = {
        name: functools.partial(_sum, add_norm)
        for name, add_norm in _with(_PLAIN_ADD_NORM, jaxnorm.add_rms_norm, *names).items()
    }
    return {
        f"rms_norm {shape}": Case((x,), rms, ((cols,),), (0, 1)),
        f"layer_norm {shape}": Case((x,), layer, ((cols,),) * 2, (0, 1, 2)),
        # The gradient of the residual is the same array as the gradient of x. It is not returned,
        # because XLA would copy the array.
        f"add_rms_norm {shape}": Case((x, x), sums, ((cols,),), (0, 2)),
    }


def _attentions(batch: int, heads: int, length: int) -> Cases:
    """Return attention of a vision transformer. The number of its keys is a square plus 1."""

    softmaxes = _with(jax.nn.softmax, jaxnorm.softmax, "xla")
    found = {name: functools.partial(_attention, f) for name, f in softmaxes.items()}
    for name in ("flax.nnx", "jaxnorm.nnx"):
        found[name] = importlib.import_module(name).dot_product_attention
    arrays = (((batch, length, heads, 64), "bfloat16"),) * 3
    name = f"attention {batch}x{length}x{heads}"
    return {name: Case(arrays, found, (), (0, 1, 2), has_matmul=True)}


def _activations(rows: int, hidden: int, width: int) -> Cases:
    def plain(x: Any, w: Any) -> Any:
        return jax.nn.gelu(x) @ w

    found = _with(plain, jaxnorm.activation_linear) | {"checkpoint": jax.checkpoint(plain)}
    arrays = (((rows, hidden), "bfloat16"), ((hidden, width), "bfloat16"))
    name = f"activation_linear bfloat16 {rows}x{hidden}x{width}"
    return {name: Case(arrays, found, (), (0, 1), has_matmul=True)}


def _scans(rows: int, cols: int, steps: int) -> Cases:
    norms = _with(_PLAIN_ADD_NORM, jaxnorm.add_rms_norm, "xla", "mosaic")
    norms["rms_norm"] = variants.add_then(jaxnorm.rms_norm)
    found = {name: functools.partial(_scan_of, f, steps=steps) for name, f in norms.items()}
    name = f"scan of {steps} steps, add_rms_norm bfloat16 {rows}x{cols}"
    return {name: Case((((rows, cols), "bfloat16"),) * 2, found, ((cols,),), ())}


def cases() -> Cases:
    """Return all cases by name."""
    found: Cases = {}
    for batch, length in ((64, 197), (8, 197), (16, 577), (4, 577)):
        found |= _attentions(batch, 12, length)
    for dtype in ("bfloat16", "float32"):
        for shape in ((65536, 197), (16384, 1025), (8192, 4097)):
            found |= _norms(dtype, *shape)
    found |= _activations(8192, 8192, 2048) | _activations(16384, 3072, 768)
    return found | _scans(8192, 4096, 16)


# ------------------------------------------------------------------------------------ measurement


#: The programs of a variant: "fwd" is the forward pass, and "f+b" is both passes. In "apart", which
#: is also both passes, the backward pass starts after the forward pass, as in a training step.
#: Without this order, XLA may merge the passes of plain JAX, and load each operand once for both.
DIRECTIONS = ("fwd", "f+b", "apart")


def _compiled(case: Case, name: str, direction: str) -> Any:
    """Compile a variant. Return None if its implementation does not support the call."""

    def run(rows: Any, parameters: Any, cotangents: Any) -> Any:
        operands = [*rows, *parameters]

        def forward(*given: Any) -> Any:
            chosen = dict(zip(case.gradients, given))
            results = case.variants[name](*(chosen.get(i, a) for i, a in enumerate(operands)))
            return jax.tree.leaves(results)

        given = [operands[i] for i in case.gradients]
        if direction == "fwd":
            return forward(*given)
        results, pullback = jax.vjp(forward, *given)
        if direction == "apart":
            results, cotangents = jax.lax.optimization_barrier((results, cotangents))
        return results, pullback([*cotangents])

    try:
        return jax.jit(run).lower(*jax.eval_shape(lambda: case.inputs(0))).compile()
    except ValueError:
        return None


def rows(case: Case, threads: int) -> list[tuple[str, ...]]:
    """Compile and measure a case. Return the table's rows, one for each variant."""
    directions = DIRECTIONS if case.gradients else DIRECTIONS[:1]
    keys = [(name, direction) for direction in directions for name in case.variants]
    with ThreadPoolExecutor(threads) as pool:
        programs = dict(zip(keys, pool.map(lambda key: _compiled(case, *key), keys)))
    size = sum(math.prod(shape) * ITEMSIZE[dtype] for shape, dtype, *_ in case.arrays)
    inputs = [case.inputs(seed) for seed in range(min(4, calls.buffers_for(2 * size)))]
    found = {key: timing.measure(run, inputs) for key, run in programs.items() if run}
    wall = {key: timing.wall_us(programs[key], inputs, 4 * calls.REPEATS) for key in found}

    def cells(name: str, direction: str) -> tuple[str, ...]:
        key, plain = (name, direction), (PLAIN, direction)
        if key not in found:
            return ("-",) * len(_COLUMNS)
        us, temp = found[key].us, programs[key].memory_analysis().temp_size_in_bytes
        ratios = us / found[plain].us, wall[key] / wall[plain]
        ratio, of_wall = (f"{ratio:.2f}" for ratio in ratios)
        return f"{us:.0f}", ratio, of_wall, str(found[key].kernels), f"{temp / 1e6:.0f}"

    return [(name, *(c for d in DIRECTIONS for c in cells(name, d))) for name in case.variants]


_COLUMNS = ("us", "ratio", "wall", "kernels", "MB")
_HEADER = ("variant", *(f"{d} {column}" for d in DIRECTIONS for column in _COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="run only the cases whose names have a word")
    words = parser.parse_args().words
    print(jax.devices()[0].device_kind, jax.__version__, flush=True)
    for name, case in cases().items():
        if not words or any(word in name for word in words):
            body = rows(case, threads=1 if case.has_matmul else 12)
            print(f"\n{name}\n{tables.table(_HEADER, body)}", flush=True)


if __name__ == "__main__":
    main()
