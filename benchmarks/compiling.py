"""How long a kernel takes to compile: one after the other, as a user's first call has it.

    python -m benchmarks.compiling --cols 1024 3000 8192

Seconds from a traced call to a program that runs. (`compile_s` of `benchmarks.run` is of a call
that is compiled beside others.)
"""

import argparse
import sys
import time
from collections.abc import Sequence

import jax

from benchmarks.contract import OPS, KernelWorkload
from benchmarks.workloads import DIRECTIONS
from jaxnorm_kernels import mosaic

COLS = [64, 768, 1000, 1024, 2048, 3000, 4096, 5120, 8192, 12288, 16384, 32768, 65536, 131072]


def seconds(workload: KernelWorkload) -> float:
    shapes = jax.eval_shape(lambda: workload.operands(0))
    traced = jax.jit(workload.function(mosaic)).trace(*shapes)
    start = time.perf_counter()
    traced.lower().compile()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cols", type=int, nargs="+", default=COLS, metavar="N")
    parser.add_argument("--ops", nargs="+", default=tuple(OPS), choices=OPS, metavar="NAME")
    given = parser.parse_args(argv)
    if jax.devices()[0].platform != "gpu":
        print("benchmarks.compiling compiles GPU kernels; there is no GPU", file=sys.stderr)
        return 2
    seconds(KernelWorkload("softmax", "fwd", 4096, 512, "bfloat16", "bfloat16"))  # starts compilers
    longest = 0.0
    for op in given.ops:
        # The backward of a sum is the norm's.
        for direction in DIRECTIONS[: 1 if op == "rms_norm_add" else 2]:
            for dtype in ("bfloat16", "float32"):
                took = [
                    seconds(KernelWorkload(op, direction, 8192, cols, dtype, dtype))
                    for cols in given.cols
                ]
                longest = max(longest, *took)
                by_cols = "  ".join(f"{n}: {s:.2f}" for n, s in zip(given.cols, took))
                print(f"{op} {direction} {dtype}: {by_cols}", flush=True)
    print(f"longest: {longest:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
