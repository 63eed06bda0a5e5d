"""Wall times of a few calls, compared with plain JAX, for ``python -m jaxnorm --check`` on a GPU.

Each jitted program is called many times in a row. The measured time of a call includes the launch
by the host. These times are less accurate than the kernel times of the repository's benchmarks. If
a program's kernels run for less than 50 us, the host takes longer to launch the program than the
kernels take to run. The measured time is then the time of the launch.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import jaxnorm
from jaxnorm.tools.plan import implementation_for, is_differentiated
from jaxnorm.tools.selfcheck import Operands, Passes, passes
from jaxnorm.tools.text import progress, table
from jaxnorm_kernels import timings

_CALLS, _BATCHES = 20, 7


@dataclasses.dataclass(frozen=True)
class Timed:
    """A call of a public function that is timed, forward and backward.

    Attributes:
      function: name of the public function.
      shapes: shapes of the operands, which have random values.
      dtype: dtype of the operands. Labels are always int32, and cos and sin are always float32.
      options: the other arguments of the function.
    """

    function: str
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str = "bfloat16"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Return the key of this call in the table `jaxnorm_kernels.timings.TIMINGS`."""
        return " with ".join([self.function, *self.options])

    def dtype_of(self, operand: str) -> str:
        return {"labels": "int32", "cos": "float32", "sin": "float32"}.get(operand, self.dtype)

    @property
    def call(self) -> Callable[..., Any]:
        return functools.partial(getattr(jaxnorm, self.function), **self.options)


_ROWS = (8192, 4096)
_PARAMETERS = {"scale": _ROWS[-1:], "bias": _ROWS[-1:]}

CALLS = (
    Timed("softmax", {"x": _ROWS}),
    Timed("log_softmax", {"x": _ROWS}),
    Timed("layer_norm", {"x": _ROWS, **_PARAMETERS}),
    Timed("rms_norm", {"x": _ROWS, "scale": _ROWS[-1:]}),
    Timed("add_rms_norm", {"x": _ROWS, "residual": _ROWS, "scale": _ROWS[-1:]}),
    Timed(
        "softmax_cross_entropy_with_integer_labels", {"logits": (4096, 32768), "labels": (4096,)}
    ),
    Timed("softmax", {"x": (4, 16, 1024, 1024)}, options={"causal": True}),
    Timed(
        "rms_norm_rope",
        {"x": (4, 2048, 32, 128), "scale": (128,), **dict.fromkeys(("cos", "sin"), (2048, 1, 64))},
    ),
)


def report() -> str:
    """Return a table that compares the times of jaxnorm's default and of plain JAX.

    A time includes the forward and the backward pass. If Triton runs a call by default, the last
    column has the speed-up that made Triton the default, as it was measured earlier.
    """
    lines = [("function", "shape", "dtype", "default", "its time", "XLA's", "speed-up", "expected")]
    with ThreadPoolExecutor(len(CALLS)) as pool:  # Compile all programs before the first timing.
        ready = [each for _, each in zip(progress(CALLS), pool.map(_ready, CALLS))]
    for call, (programs, operands) in zip(progress(CALLS, after=2.0), ready):
        ours, xla = _times(programs, operands)
        shape = " x ".join(map(str, next(iter(call.shapes.values()))))
        times = f"{ours * 1e6:.0f} us", f"{xla * 1e6:.0f} us", f"{xla / ours:.2f}"
        name = _default(call)
        timing = timings.TIMINGS.get(str(call)) if name == "triton" else None
        expected = "" if timing is None else f"{1 / timing.ratio:.2f}"
        lines.append((str(call), shape, call.dtype, name, *times, expected))
    return table(lines, left=(0, 1, 2, 3))


def _default(call: Timed) -> str:
    """Return the name of the implementation that runs the forward pass of a call by default."""
    x, *others = call.shapes.items()
    arguments: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, call.dtype_of(name)) for name, shape in others
    }
    plan = implementation_for(call.function, x[1], call.dtype, **arguments, **call.options)
    return plan.forward.name


def _ready(call: Timed) -> tuple[list[Passes], Operands]:
    """Compile the two programs of a call by running them once. Return them and their operands.

    The first program uses jaxnorm's default implementation, the second one plain JAX.
    """
    keys = jax.random.split(jax.random.key(0), len(call.shapes))
    arrays = {}
    for key, (name, shape) in zip(keys, call.shapes.items()):
        dtype = call.dtype_of(name)
        if name == "labels":
            arrays[name] = jax.random.randint(key, shape, 0, call.shapes["logits"][-1], dtype)
        else:
            arrays[name] = jax.random.normal(key, shape, dtype)
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

    Each is a median over batches of runs; batches of the two programs alternate.
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
