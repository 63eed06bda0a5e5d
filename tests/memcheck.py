"""Run a sample of kernels, forward and backward, under a memory checker.

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform
    compute-sanitizer python tests/memcheck.py mosaic layer_norm float32
    compute-sanitizer python tests/memcheck.py mosaic "logits of softmax" float32
    compute-sanitizer python tests/memcheck.py mosaic "loss" float32
    compute-sanitizer python tests/memcheck.py mosaic "log_prob_and_entropy" float32
    compute-sanitizer python tests/memcheck.py mosaic "kl_divergence" float32
    compute-sanitizer python tests/memcheck.py mosaic "linear loss" float32
    compute-sanitizer python tests/memcheck.py mosaic "linear_kl_divergence" bfloat16
    compute-sanitizer python tests/memcheck.py mosaic "rms_norm_linear" bfloat16
    compute-sanitizer python tests/memcheck.py triton layer_norm float32 FOLDER

The last command runs Triton kernels that `tests/triton_programs.py` compiled on another
machine and wrote to FOLDER.
"""

import functools
import inspect
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton_programs

import jaxnorm
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS

# Numbers of rows and columns: narrow rows, odd and prime widths, widths that fill all registers of
# a warpgroup, and rows that a cluster of blocks processes together. Some shapes have few rows.
SHAPES = [(130, 64), (97, 131), (67, 3000), (66, 4095), (140, 5120), (67, 16384), (5, 50257)]
SHAPES += [(3, 131072)]
# Numbers of rows and columns for calls with two large operands: x and a residual or a gate.
WITH_TWO = [(130, 64), (97, 131), (67, 3000), (140, 5120), (67, 16384), (5, 65536)]
#: The largest odd number of columns with which norms are tested. A shape with a larger odd number
#: of columns is tested with `LONGEST_ODD` columns instead.
LONGEST_ODD = 8191

# Shapes whose middle axis is normalised. A block of a kernel processes a strip, a range of the last
# axis. In some shapes, two strips overlap; in some, a cluster of blocks processes a strip.
STRIDED = [(5, 40, 72), (2, 1000, 784), (3, 3008, 144)]
# Shapes of the logits of losses. The rows are narrow, wide or unaligned.
OF_LOSSES = [(9, 128), (97, 131), (66, 4095), (67, 5120), (9, 50257), (3, 131072)]
# For each case: the shapes of the logits, the mask and the bias (or None), and True if causal.
LOGITS = [
    ((2, 3, 67, 200), (2, 1, 1, 200), (3, 67, 200), False),
    ((3, 130, 131), None, None, True),
    ((2, 2, 40, 3001), (40, 3001), (2, 1, 40, 3001), True),
    ((5, 3, 40, 72), (5, 1, 40, 1), (3, 40, 1), False),
    ((2, 2, 9000), (2, 1, 9000), (2, 9000), False),
]


def strided_or_rows(name: str, dtype: str, implementation: str) -> Iterator[tuple[Any, Any]]:
    """Yield calls of `name` over axis 1, each with its operands' types (shapes and dtypes)."""
    function = FUNCTIONS[name]
    operation = OPERATIONS[function.op]
    kinds = [OPERANDS[operand] for operand in operation.operands]
    taken = ("array", "scale", "bias") if function.subtract_mean else ("array", "scale")
    takes_two = kinds.count("array") > 1
    axis = {"axis": 1} if "axis" in inspect.signature(getattr(jaxnorm, name)).parameters else {}
    longest = LONGEST_ODD if operation.family == "norm" else 50257
    of_rows = WITH_TWO if takes_two else SHAPES
    shapes: list[tuple[int, ...]] = [(r, min(c, longest) if c % 2 else c) for r, c in of_rows]
    if implementation == "mosaic" and operation.family == "norm":
        # Mosaic's backward requires rows that are multiples of 16 bytes.
        shapes = [(r, c // 8 * 8) for r, c in shapes]
    if implementation == "triton" and operation.family == "norm":
        # Triton's forward holds whole rows in registers.
        shapes = [(r, c) for r, c in shapes if c <= 16384]
    for shape in [*shapes, *([] if takes_two else STRIDED)]:
        row, column = (
            jax.ShapeDtypeStruct(shape, dtype),
            jax.ShapeDtypeStruct(shape[1:2], "float32"),
        )
        call = functools.partial(getattr(jaxnorm, name), **axis, implementation=implementation)
        types = [row if kind == "array" else column for kind in kinds if kind in taken]
        yield call, types
        if function.gated is not None:
            yield functools.partial(with_gate, call), [*types, column]


def with_gate(call: Any, *operands: Any) -> Any:
    *others, gate = operands
    return call(*others, gate=gate)


def rotations(name: str, dtype: str, implementation: str) -> Iterator[tuple[Any, Any]]:
    """Yield calls of norms with rotary tables, each with the shapes and dtypes of its operands.

    The heads are wider than the rotated columns in some cases.
    """
    for shape, lead, pairs, interleaved in [
        ((2, 37, 5, 64), (37, 1), 32, False),
        ((3, 33, 1, 128), (3, 33, 1), 32, True),
        ((67, 3, 80), (), 40, False),
        ((130, 256), (130,), 128, True),
        ((5, 9, 2, 512), (1, 1), 256, False),
    ]:

        def call(
            x: jax.Array,
            scale: jax.Array,
            table: tuple[int, ...] = (*lead, pairs),
            interleaved: bool = interleaved,
        ) -> Any:
            angles = jnp.arange(math.prod(table), dtype=jnp.float32).reshape(table)
            return getattr(jaxnorm, name)(
                x,
                scale,
                jnp.cos(angles),
                jnp.sin(angles),
                interleaved=interleaved,
                implementation=implementation,
            )

        yield (
            call,
            [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], "float32")],
        )


def logits(name: str, dtype: str, implementation: str) -> Iterator[tuple[Any, Any]]:
    """Yield calls of softmaxes with biases and masks (all True), each with its operands' types."""
    for shape, mask, bias, causal in LOGITS:

        def call(x: jax.Array, *given: jax.Array, mask: Any = mask, causal: bool = causal) -> Any:
            where = None if mask is None else jnp.full(mask, True)
            bias = given[0] if given else None
            function = getattr(jaxnorm, name)
            return function(x, -1, where, bias=bias, causal=causal, implementation=implementation)

        yield call, [jax.ShapeDtypeStruct(a, dtype) for a in (shape, bias) if a is not None]


def losses(name: str, dtype: str, implementation: str) -> Iterator[tuple[Any, Any]]:
    """Yield calls of the function `name`, each with its operands' types.

    If `name` is not the name of a public function (e.g. "loss"), the calls are of
    softmax_cross_entropy_with_integer_labels. Two of the labels are out of range.
    """
    function = getattr(jaxnorm, name, jaxnorm.softmax_cross_entropy_with_integer_labels)
    for shape in OF_LOSSES:

        def call(x: jax.Array) -> Any:
            rows, cols = x.shape
            labels = (jnp.arange(rows) * 7919 % cols).at[0].set(cols - 1)
            labels = labels.at[1].set(2**31 - 1).at[2].set(-1)
            outside = jnp.isin(jnp.arange(rows), jnp.array([1, 2]))
            # The loss and the gradient of a label out of range are NaN. They are replaced by 0,
            # because `main` reports every NaN as wrong.
            x = jnp.where(outside[:, None], jax.lax.stop_gradient(x), x)
            results = function(
                x, labels, where=jnp.arange(rows) % 7 != 3, implementation=implementation
            )
            return jax.tree.map(lambda a: jnp.where(outside, 0, a), results)

        yield call, [jax.ShapeDtypeStruct(shape, dtype)]


def divergences(name: str, dtype: str, implementation: str) -> Iterator[tuple[Any, Any]]:
    """Yield calls of a divergence, each with its operands' types.

    The forward divergence KL(teacher || x) and the reverse one alternate.
    """
    for shape, reverse in zip(OF_LOSSES, itertools.cycle([False, True])):

        def call(x: jax.Array, teacher: jax.Array, reverse: bool = reverse) -> Any:
            where = jnp.arange(len(x)) % 7 != 3
            function = getattr(jaxnorm, name)
            return function(x, teacher, where=where, reverse=reverse, implementation=implementation)

        yield call, [jax.ShapeDtypeStruct(shape, dtype)] * 2


def linear_losses(name: str, dtype: str, implementation: str) -> Iterator[tuple[Any, Any]]:
    """Yield calls of a loss of linear logits, each with its operands' types.

    The loss is computed in two chunks. In each, the gradient of the logits overwrites the logits.
    """
    function = getattr(jaxnorm, name, jaxnorm.linear_softmax_cross_entropy)
    for rows, features, classes in [(18, 8, 131), (66, 64, 4095), (20, 16, 50257)]:

        def linear(x: jax.Array, weight: jax.Array) -> Any:
            rows, classes = len(x), weight.shape[1]
            labels = (jnp.arange(rows) * 7919 % classes).at[0].set(classes - 1)
            return function(x, weight, labels, chunk=rows // 2, implementation=implementation)

        shapes = [(rows, features), (features, classes)]
        yield linear, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def linear_divergences(name: str, dtype: str, implementation: str) -> Iterator[tuple[Any, Any]]:
    """Yield calls of a divergence of linear logits, each with its operands' types.

    The divergence is computed in two chunks. If dtype is float32, the gradient of the logits
    overwrites them. On Hopper, a cluster of blocks processes each row of 128256 logits.
    """
    function = getattr(jaxnorm, name)
    for rows, features, classes, reverse in [
        (18, 8, 131, False),
        (66, 64, 4095, True),
        (20, 16, 50257, False),
        (6, 8, 128256, True),
    ]:

        def linear(*operands: jax.Array, reverse: bool = reverse) -> Any:
            rows = len(operands[0])
            where = jnp.arange(rows) % 7 != 3
            options = {"chunk": rows // 2, "reverse": reverse, "implementation": implementation}
            return function(*operands, where=where, **options)

        shapes = [(rows, features), (features, classes)] * 2
        yield linear, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def products(name: str, dtype: str, implementation: str) -> Iterator[tuple[Any, Any]]:
    """Yield calls of a norm that is followed by a matmul, each with its operands' types.

    No size is a multiple of the tile size.
    """
    for rows, cols, features in [(72, 8, 8), (136, 72, 264), (200, 1000, 520)]:

        def call(x: jax.Array, weight: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
            function = getattr(jaxnorm, name)
            weight = weight / len(weight)  # avoids float16 overflow: weight is all ones
            return function(
                x, weight, scale, bias=bias, activation="silu", implementation=implementation
            )

        shapes = [(rows, cols), (cols, features), (cols,), (features,)]
        yield call, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def lowered(call: Any, operands: Any) -> Any:
    """Lower a call and its backward as one program."""

    def both(*operands: jax.Array) -> Any:
        results, vjp = jax.vjp(call, *operands)
        return results, vjp(results)

    return jax.jit(both).lower(*operands)


def compiled(call: Any, operands: Any) -> Any:
    # Autotuning cuBLAS's and Triton's algorithms takes minutes under the checker, and any algorithm
    # will do here.
    options = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
    on_gpu = jax.default_backend() == "gpu"
    return lowered(call, operands).compile(options if on_gpu else None)


def cases_of(implementation: str, name: str, dtype: str) -> list[tuple[Any, Any]]:
    """Return the calls of the case `name`, each with the types of its operands.

    `name` is one of these: the name of a function; "loss"; "linear loss"; "logits of NAME", where
    NAME is the name of a softmax.
    """
    kind, _, op = name.rpartition(" ")
    of_names = {"loss": losses, "linear loss": linear_losses, "rms_norm_linear": products}
    of_names |= {
        "log_prob_and_entropy": losses,
        "kl_divergence": divergences,
        "linear_log_prob_and_entropy": linear_losses,
        "linear_kl_divergence": linear_divergences,
    }
    of_names |= {
        name: rotations
        for name, function in FUNCTIONS.items()
        if "cos" in OPERATIONS[function.op].operands
    }
    make = of_names.get(name, logits if kind else strided_or_rows)
    return list(make(op, dtype, implementation))


def main(implementation: str, name: str, dtype: str, programs: str | None = None) -> None:
    if programs is not None:
        triton_programs.replay(Path(programs))
    cases = cases_of(implementation, name, dtype)
    # All programs are compiled before the first one runs: under the checker, this process sometimes
    # crashed when it compiled while a kernel ran.
    programs = [compiled(*case) for case in cases]
    for program, (_, operands) in zip(programs, cases):
        ones = [jax.device_put(np.ones(o.shape, o.dtype)) for o in operands]
        results = [np.asarray(a).astype(np.float32) for a in jax.tree.leaves(program(*ones))]
        # -inf is correct for log_softmax above the diagonal of a causal mask.
        wrong = any(np.isnan(r).any() or np.isposinf(r).any() for r in results)
        print(name, operands[0].shape, dtype, "WRONG" if wrong else "right", flush=True)
    print("all", len(cases), "cases")


if __name__ == "__main__":
    main(*sys.argv[1:])
