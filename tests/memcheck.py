"""Run a sample of kernels, forward and backward, under a memory checker.

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform
    compute-sanitizer python tests/memcheck.py mosaic layer_norm float32
    compute-sanitizer python tests/memcheck.py mosaic "logits of softmax" float32
    compute-sanitizer python tests/memcheck.py mosaic linear_kl_divergence bfloat16
    compute-sanitizer python tests/memcheck.py triton layer_norm float32 FOLDER

The second argument is a name in `NAMES`, or "rms_norm_linear" for Mosaic. The last command runs
Triton kernels that `tests/triton_programs.py` compiled on another machine and wrote to FOLDER.
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton_programs

import jaxnorm
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS

LINEAR_LOSSES = ("softmax_cross_entropy", "log_prob_and_entropy", "kl_divergence")
NAMES = [*FUNCTIONS, *(f"linear_{name}" for name in LINEAR_LOSSES)]
NAMES += [f"logits of {name}" for name in ("softmax", "log_softmax")]

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
# For each case: the shape of x, the leading sizes of the rotary tables, the number of rotated pairs
# of columns, and True if the columns of a pair are neighbours.
ROTATED = [
    ((2, 37, 5, 64), (37, 1), 32, False),
    ((3, 33, 1, 128), (3, 33, 1), 32, True),
    ((67, 3, 80), (), 40, False),
    ((130, 256), (130,), 128, True),
    ((5, 9, 2, 512), (1, 1), 256, False),
]
# For each case: the shapes of the logits, the mask and the bias (or None), and True if causal.
LOGITS = [
    ((2, 3, 67, 200), (2, 1, 1, 200), (3, 67, 200), False),
    ((3, 130, 131), None, None, True),
    ((2, 2, 40, 3001), (40, 3001), (2, 1, 40, 3001), True),
    ((5, 3, 40, 72), (5, 1, 40, 1), (3, 40, 1), False),
    ((2, 2, 9000), (2, 1, 9000), (2, 9000), False),
]
# Shapes of the logits of losses. The rows are narrow, wide or unaligned.
OF_LOSSES = [(9, 128), (97, 131), (66, 4095), (67, 5120), (9, 50257), (3, 131072)]
# Numbers of rows, features and classes of linear losses. On Hopper, a cluster of blocks processes
# each row of 128256 logits.
OF_LINEAR = [(18, 8, 131), (66, 64, 4095), (20, 16, 50257), (6, 8, 128256)]

#: A call, and the shapes and dtypes of its operands.
Case = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]


def typed(dtype: str, *shapes: tuple[int, ...] | None) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes if shape is not None]


def strided_or_rows(name: str, dtype: str, implementation: str) -> Iterator[Case]:
    """Yield calls of `name` over axis 1."""
    entry, function = FUNCTIONS[name], getattr(jaxnorm, name)
    operation = OPERATIONS[entry.op]
    kinds = [OPERANDS[operand] for operand in operation.operands]
    taken = ("array", "scale", "bias") if entry.subtract_mean else ("array", "scale")
    takes_two, is_norm = kinds.count("array") > 1, operation.family == "norm"
    axis = {"axis": 1} if "axis" in inspect.signature(function).parameters else {}
    shapes: list[tuple[int, ...]] = []
    for rows, cols in WITH_TWO if takes_two else SHAPES:
        cols = min(cols, LONGEST_ODD) if is_norm and cols % 2 else cols
        # Mosaic's backward requires rows that are multiples of 16 bytes.
        shapes.append((rows, cols // 8 * 8 if is_norm and implementation == "mosaic" else cols))
    if is_norm and implementation == "triton":
        # Triton's forward holds whole rows in registers.
        shapes = [(rows, cols) for rows, cols in shapes if cols <= 16384]
    for shape in [*shapes, *([] if takes_two else STRIDED)]:
        (row,), (column,) = typed(dtype, shape), typed("float32", shape[1:2])
        call = functools.partial(function, **axis, implementation=implementation)
        types = [row if kind == "array" else column for kind in kinds if kind in taken]
        yield call, types
        if entry.gated is not None:
            yield lambda *a, call=call: call(*a[:-1], gate=a[-1]), [*types, column]


def rotations(name: str, dtype: str, implementation: str) -> Iterator[Case]:
    """Yield calls of norms with rotary tables."""
    for shape, lead, pairs, interleaved in ROTATED:
        angles = np.arange(np.prod((*lead, pairs)), dtype=np.float32).reshape(*lead, pairs)
        call = functools.partial(
            getattr(jaxnorm, name), cos=np.cos(angles), sin=np.sin(angles),
            interleaved=interleaved, implementation=implementation,
        )  # fmt: skip
        yield call, [*typed(dtype, shape), *typed("float32", shape[-1:])]


def logits(name: str, dtype: str, implementation: str) -> Iterator[Case]:
    """Yield calls of softmaxes with biases, and with masks that are True everywhere."""
    for shape, mask, bias, causal in LOGITS:

        def call(x: Any, bias: Any = None, mask: Any = mask, causal: bool = causal) -> Any:
            where = None if mask is None else jnp.full(mask, True)
            function = getattr(jaxnorm, name)
            return function(x, -1, where, bias=bias, causal=causal, implementation=implementation)

        yield call, typed(dtype, shape, bias)


def losses(name: str, dtype: str, implementation: str) -> Iterator[Case]:
    """Yield calls of a loss.

    A linear loss has two chunks. In each, the gradient of the logits overwrites the logits. Two
    labels of the other losses are out of range. KL(teacher || x) and the reverse divergence
    alternate.
    """
    is_linear, is_divergence = name.startswith("linear"), name.endswith("divergence")

    def loss(*operands: Any, reverse: bool) -> Any:
        rows, classes = len(operands[0]), operands[-1].shape[1]
        function = functools.partial(
            getattr(jaxnorm, name),
            where=jnp.arange(rows) % 7 != 3,
            implementation=implementation,
            **({"chunk": rows // 2} if is_linear else {}),
            **({"reverse": reverse} if is_divergence else {}),
        )
        labels = (jnp.arange(rows) * 7919 % classes).at[0].set(classes - 1)
        if is_linear or is_divergence:
            return function(*operands, *([] if is_divergence else [labels]))
        # The loss and the gradient of a label out of range are NaN. They are replaced by 0, because
        # `main` reports every NaN as wrong.
        outside = jnp.isin(jnp.arange(rows), jnp.array([1, 2]))
        (x,) = operands
        x = jnp.where(outside[:, None], jax.lax.stop_gradient(x), x)
        results = function(x, labels.at[1].set(2**31 - 1).at[2].set(-1))
        return jax.tree.map(lambda a: jnp.where(outside, 0, a), results)

    reversed_too = itertools.cycle([False, True])
    for sizes, reverse in zip(OF_LINEAR if is_linear else OF_LOSSES, reversed_too):
        shapes = [sizes[:2], sizes[1:]] if is_linear else [sizes]
        types = typed(dtype, *shapes) * (1 + is_divergence)
        yield functools.partial(loss, reverse=reverse), types


def products(name: str, dtype: str, implementation: str) -> Iterator[Case]:
    """Yield calls of a norm that is followed by a matmul.

    No size is a multiple of the tile size.
    """

    def call(x: Any, weight: Any, scale: Any, bias: Any) -> Any:
        options = {"bias": bias, "activation": "silu", "implementation": implementation}
        # The weight is all ones. It is divided so that the result does not overflow float16.
        return getattr(jaxnorm, name)(x, weight / len(weight), scale, **options)

    for rows, cols, features in [(72, 8, 8), (136, 72, 264), (200, 1000, 520)]:
        yield call, typed(dtype, (rows, cols), (cols, features), (cols,), (features,))


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


def cases_of(implementation: str, name: str, dtype: str) -> list[Case]:
    """Return the calls of `name`, each with the types of its operands."""
    _, _, function = name.rpartition(" ")
    operation = OPERATIONS[FUNCTIONS[function].op] if function in FUNCTIONS else None
    if name == "rms_norm_linear":
        make = products
    elif operation is None or operation.family == "loss":
        make = losses
    elif function != name:
        make = logits
    else:
        make = rotations if "cos" in operation.operands else strided_or_rows
    return list(make(function, dtype, implementation))


def main(implementation: str, name: str, dtype: str, programs: str | None = None) -> None:
    if programs is not None:
        triton_programs.replay(Path(programs))
    cases = cases_of(implementation, name, dtype)
    # All programs are compiled before the first one runs: under the checker, this process sometimes
    # crashed when it compiled while a kernel ran.
    executables = [compiled(*case) for case in cases]
    for executable, (_, operands) in zip(executables, cases):
        ones = [jax.device_put(np.ones(o.shape, o.dtype)) for o in operands]
        results = [np.asarray(a).astype(np.float32) for a in jax.tree.leaves(executable(*ones))]
        # -inf is correct for log_softmax above the diagonal of a causal mask.
        wrong = any(np.isnan(r).any() or np.isposinf(r).any() for r in results)
        print(name, operands[0].shape, dtype, "WRONG" if wrong else "right", flush=True)
    print("all", len(cases), "cases")


if __name__ == "__main__":
    main(*sys.argv[1:])
