"""A sample of an implementation's kernels, forward and backward, to be run under a memory checker.

export XLA_PYTHON_CLIENT_ALLOCATOR=platform
compute-sanitizer python tests/memcheck.py mosaic layer_norm float32
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

# Narrow rows, odd and prime widths (tails), whole units, clusters; some with few rows.
SHAPES = [(130, 64), (97, 131), (131, 1000), (67, 3000), (66, 4095), (299, 4096), (140, 5120)]
SHAPES += [(141, 8192), (67, 16384), (35, 32768), (5, 50257), (5, 65536), (3, 131072)]
LONGEST_ODD = 8191  # of a norm
# Over the axis in the middle: a strip in a block, strips that overlap, clusters.
STRIDED = [(3, 256, 64), (5, 37, 72), (2, 1000, 784), (3, 3001, 144)]
# Rows and parameters that each takes.
OPERANDS = {
    "softmax": (1, 0),
    "log_softmax": (1, 0),
    "layer_norm": (1, 2),
    "rms_norm": (1, 1),
    "add_layer_norm": (2, 2),
    "rms_norm_add": (2, 1),
    "rms_norm_add_rms_norm": (2, 2),
}


def compiled(name: str, shape: tuple[int, ...], dtype: str, implementation: str) -> Any:
    """Forward and backward, over axis 1, and the operands' types."""
    call = functools.partial(getattr(jaxnorm, name), axis=1, implementation=implementation)
    row, column = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:2], jnp.float32)
    rows, parameters = OPERANDS[name]
    operands = [row] * rows + [column] * parameters

    def both(*operands: jax.Array) -> Any:
        results, vjp = jax.vjp(call, *operands)
        return results, vjp(results)

    return jax.jit(both).lower(*operands).compile(), operands


def shapes(name: str) -> list[tuple[int, ...]]:
    longest = 50257 if "softmax" in name else LONGEST_ODD
    two = [(rows, min(cols, longest) if cols % 2 else cols) for rows, cols in SHAPES]
    return two if "add" in name else [*two, *STRIDED]


def main(implementation: str, name: str, dtype: str) -> None:
    cases = [(name, shape, dtype, implementation) for shape in shapes(name)]
    # One compiles after the other, and none while a kernel runs: under the checker, either ended in
    # a crash of this process now and then.
    programs = [compiled(*case) for case in cases]
    for case, (program, operands) in zip(cases, programs):
        ones = [jax.device_put(np.ones(o.shape, o.dtype)) for o in operands]
        results = map(np.asarray, jax.tree.leaves(program(*ones)))
        finite = all(np.isfinite(r.astype(np.float32)).all() for r in results)
        print(*case[:3], "finite" if finite else "NOT FINITE", flush=True)
    print("all", len(cases), "cases")


if __name__ == "__main__":
    main(*sys.argv[1:])
