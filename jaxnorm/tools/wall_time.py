"""Wall times of a few calls, compared with plain JAX, for ``python -m jaxnorm --check`` on a GPU.

Each jitted program is called many times in a row. The measured time of a call includes the launch
by the host. These times are less accurate than the kernel times of the repository's benchmarks. If
a program's kernels run for less than 50 us, the host takes longer to launch the program than the
kernels take to run. The measured time is then the time of the launch.
"""

import functools
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.tools.plan import implementation_for, is_differentiated
from jaxnorm.tools.selfcheck import Case, Operands, Passes, passes
from jaxnorm.tools.text import progress, table
from jaxnorm_kernels import timings

_CALLS, _BATCHES = 20, 7


# The dtypes of some operands. Other operands are bfloat16.
_DTYPES = {"labels": "int32", "cos": "float32", "sin": "float32"}
_ROWS, _COLS = (8192, 4096), (4096,)

#: The calls that are timed. `str` of a call is its key in `jaxnorm_kernels.timings.TIMINGS`.
CALLS = (
    Case("softmax", {"x": _ROWS}),
    Case("log_softmax", {"x": _ROWS}),
    Case("layer_norm", {"x": _ROWS, "scale": _COLS, "bias": _COLS}),
    Case("rms_norm", {"x": _ROWS, "scale": _COLS}),
    Case("add_rms_norm", {"x": _ROWS, "residual": _ROWS, "scale": _COLS}),
    Case(
        "softmax_cross_entropy_with_integer_labels",
        {"logits": (4096, 32768), "labels": (4096,)},
    ),
    Case("softmax", {"x": (4, 16, 1024, 1024)}, {"causal": True}, "with causal"),
    Case(
        "rms_norm_rope",
        {"x": (4, 2048, 32, 128), "scale": (128,), **dict.fromkeys(("cos", "sin"), (2048, 1, 64))},
    ),
)


def types_of(call: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a dict that maps the operands of a call to their shapes and dtypes."""
    return {
        name: jax.ShapeDtypeStruct(shape, _DTYPES.get(name, "bfloat16"))
        for name, shape in call.shapes.items()
    }


def report() -> str:
    """Return a table that compares the times of jaxnorm's default with the times of plain JAX.

    A time includes the forward and the backward pass. If Triton runs a call by default, the last
    column has the speed-up that made Triton the default, as it was measured earlier.
    """
    lines = [("function", "shape", "dtype", "default", "its time", "XLA's", "speed-up", "expected")]
    with ThreadPoolExecutor(len(CALLS)) as pool:  # Compile all programs before the first timing.
        ready = [each for _, each in zip(progress(CALLS), pool.map(_ready, CALLS))]
    for call, (programs, operands) in zip(progress(CALLS, after=2.0), ready):
        ours, xla = _times(programs, operands)
        x = next(iter(types_of(call).values()))
        shape, dtype = " x ".join(map(str, x.shape)), x.dtype.name
        times = f"{ours * 1e6:.0f} us", f"{xla * 1e6:.0f} us", f"{xla / ours:.2f}"
        name = _default(call)
        timing = timings.TIMINGS.get(str(call)) if name == "triton" else None
        expected = "" if timing is None else f"{1 / timing.ratio:.2f}"
        lines.append((str(call), shape, dtype, name, *times, expected))
    return table(lines, left=(0, 1, 2, 3))


def _default(call: Case) -> str:
    """Return the name of the implementation that runs the forward pass of a call by default."""
    (_, x), *others = types_of(call).items()
    arguments: dict[str, Any] = {**dict(others), **call.options}
    return implementation_for(call.function, x.shape, x.dtype, **arguments).forward.name


def _ready(call: Case) -> tuple[list[Passes], Operands]:
    """Compile the two programs of a call by running each once. Return the programs and operands.

    The programs are in this order: jaxnorm's default implementation, plain JAX.
    """
    keys = jax.random.split(jax.random.key(0), len(call.shapes))
    arrays = {
        name: jnp.abs(jax.random.normal(key, a.shape)).astype(a.dtype)  # labels are at least 0
        for key, (name, a) in zip(keys, types_of(call).items())
    }
    floats = {name: a for name, a in arrays.items() if is_differentiated(name, a)}
    constants = {name: a for name, a in arrays.items() if name not in floats}
    # The cotangents are operands. If they were constants of the program, XLA would use their values
    # to simplify the program, and a different program would be timed.
    types = jax.tree.leaves(jax.eval_shape(call.call, **arrays))
    operands = Operands(floats, constants, [jnp.ones(t.shape, t.dtype) for t in types])
    programs: list[Passes] = [
        jax.jit(passes(functools.partial(call.call, implementation=name))) for name in (None, "xla")
    ]
    for program in programs:
        jax.block_until_ready(program(operands))
    return programs, operands


def _times(programs: Sequence[Passes], operands: Operands) -> tuple[float, float]:
    """Return the times of two programs in seconds.

    Each time is a median over batches of runs; batches of the two programs alternate.
    """
    batches = [[_batch(program, operands) for program in programs] for _ in range(_BATCHES)]
    ours, xla = (statistics.median(times) for times in zip(*batches))
    return ours, xla


def _batch(program: Passes, operands: Operands) -> float:
    started = time.perf_counter()
    for _ in range(_CALLS):
        results = program(operands)
    jax.block_until_ready(results)
    return (time.perf_counter() - started) / _CALLS
