"""Schedules, calls and float64 references for the tests of the forward kernels."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import norms
import numpy as np
from reference import Norm, after_norm, exact, half_unit, log_softmax, softmax
from specs import build_spec, changed

from benchmarks import contract
from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.mosaic.schedules.forward import ForwardSchedule
from jaxnorm_kernels.specs import Spec

OPS = ("softmax", "log_softmax", "rms_norm", "layer_norm")
RESIDUAL_OPS = ("add_rms_norm", "add_layer_norm", "rms_norm_add", "rms_norm_add_rms_norm")
BF16, F16, F32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule, with numbers of rows and columns for which it has a special case.

    `schedule` is for a vector of 8 elements (for 16 bits), or of 1.
    """

    name: str
    rows: int
    cols: int
    schedule: Any

    def schedule_for(self, *dtypes: np.dtype | None) -> Any:
        """The schedule with the vector that these dtypes allow."""
        if self.schedule.vector == 1:
            return self.schedule
        widest = max(dtype.itemsize for dtype in dtypes if dtype is not None)
        return dataclasses.replace(self.schedule, vector=16 // widest)


# Each kind with rows that are whole units, and with rows (and blocks) that overlap.
CASES = (
    Case("rows_in_warps", 9, 512, ForwardSchedule("row_tile", 8, rows=4)),
    Case("rows_in_warps_tail", 9, 440, ForwardSchedule("row_tile", 8, rows=8)),
    Case("rows_in_parts_of_warps", 35, 72, ForwardSchedule("row_tile", 8, rows=32, threads=4)),
    Case("same_row_in_all_warps", 3, 24, ForwardSchedule("row_tile", 8, rows=1, threads=2)),
    Case("warpgroup_row", 2, 2048, ForwardSchedule("warpgroup_row", 8)),
    Case("warpgroup_row_tail", 2, 3000, ForwardSchedule("warpgroup_row", 8)),
    Case("split_row", 2, 4096, ForwardSchedule("split_row", 8, warpgroups=2)),
    Case("split_row_tail", 2, 2571, ForwardSchedule("split_row", 1, warpgroups=4)),
    Case(
        "pipelined_tile",
        11,  # 3 groups of 4 rows, which overlap: 2 for the first block, 1 for the second
        512,
        ForwardSchedule("pipelined_tile", 8, rows=4, slots=2, tiles=2, params_first=True),
    ),
    Case(
        "pipelined_tile_tail",
        17,
        440,
        ForwardSchedule("pipelined_tile", 8, rows=8, slots=1, tiles=3, rereads=True),
    ),
    Case(
        "pipelined_row",
        5,
        4096,
        ForwardSchedule("pipelined_row", 8, warpgroups=2, slots=2, tiles=3),
    ),
    Case(
        "pipelined_row_that_ends_in_single_rows",
        6,
        4096,
        ForwardSchedule("pipelined_row", 8, warpgroups=2, slots=1, tiles=2, tail=3),
    ),
    Case(
        "pipelined_row_tail",
        4,
        3000,
        ForwardSchedule("pipelined_row", 8, slots=3, tiles=4, params_first=True),
    ),
    Case(
        "pipelined_row_that_rereads",
        3,
        3000,
        ForwardSchedule("pipelined_row", 8, slots=2, tiles=3, rereads=True),
    ),
)

#: Rows that the blocks of a cluster share; the interpreter cannot run clusters.
CLUSTERED = (
    Case("split_row", 2, 16384, ForwardSchedule("split_row", 8, cluster=4)),
    Case("split_row_tail", 2, 5571, ForwardSchedule("split_row", 1, warpgroups=2, cluster=8)),
    Case(
        "pipelined_row",
        5,
        16384,
        ForwardSchedule("pipelined_row", 8, warpgroups=2, cluster=2, slots=2, tiles=3),
    ),
    Case(
        "pipelined_row_tail",
        5,
        9000,
        ForwardSchedule("pipelined_row", 8, cluster=8, slots=2, tiles=3, rereads=True),
    ),
)


def make_spec(op: str, rows: int, cols: int, x: np.dtype, y: np.dtype, **kwargs: Any) -> Spec:
    """An operation of `OPS`, or a norm with a residual, by default of x's dtype."""
    if op in ("softmax", "log_softmax"):
        return build_spec(op, "fwd", rows, cols, x, y)  # type: ignore[arg-type]
    parameters: dict[str, Any] = {"scale_dtype": F32, "epsilon": 1e-6, "want_stats": True}
    if "layer_norm" in op:
        parameters["subtract_mean"] = True
    if op.endswith("layer_norm") and "norm_add" not in op:
        parameters["bias_dtype"] = F32
    op = op.replace("layer_norm", "norm").replace("rms_norm", "norm")
    if op != "norm":
        parameters["residual_dtype"] = x
    if op == "norm_add_norm":
        parameters["next_scale_dtype"] = F32
    parameters |= kwargs
    if op == "norm_add":
        y = parameters["residual_dtype"]
    return build_spec(op, "fwd", rows, cols, x, y, **parameters)  # type: ignore[arg-type]


#: The mean and the standard deviation of the elements of each operand here.
_NORMAL = {"x": (0.5, 3), "residual": (-1, 2), "bias": (0, 1), "scale": (1, 0.5)}
_NORMAL["next_scale"] = _NORMAL["scale"]


def make_operands(spec: Spec, seed: int = 0) -> tuple[np.ndarray | None, ...]:
    rng = np.random.default_rng(seed)
    names = norms.names_of(spec)
    return tuple(
        None if a is None else rng.normal(*_NORMAL[name], a.shape).astype(a.dtype)
        for name, a in zip(names, norms.types_of(spec))
        if name in _NORMAL
    )


def call(spec: Spec, *operands: Any, module: Any = mosaic, **kwargs: Any) -> tuple[Any, ...]:
    """The outputs, then the statistics."""
    outputs = contract.call(module, spec, *operands, **kwargs)
    return (*outputs[:-1], *outputs[-1]) if spec.is_norm else outputs


def interpret(spec: Spec, *operands: Any, params: Any = None, **kwargs: Any) -> list[np.ndarray]:
    """`call` in the interpreter, in the dtypes of the spec."""
    with mosaic.interpreted(params):
        outputs = program(spec, **kwargs)(*operands)
    return [np.asarray(out) for out in outputs]


def program(spec: Spec, schedule: ForwardSchedule | None = None, **kwargs: Any) -> Any:
    """`call` under `jax.jit`; of a given schedule the same each time, so that it compiles once.

    Without one the program depends on tables, which a test may replace.
    """
    if schedule is not None:
        return _program_of(spec, schedule, **kwargs)
    return jax.jit(lambda *args: call(spec, *args, **kwargs))


@functools.lru_cache(maxsize=64)
def _program_of(spec: Spec, schedule: ForwardSchedule, **kwargs: Any) -> Any:
    return jax.jit(lambda *args: call(spec, *args, schedule=schedule, **kwargs))


def lower(spec: Spec, schedule: Any = None) -> str:
    """The module that XLA gets for an NVIDIA GPU; Mosaic's layouts are inferred on the way."""
    run = jax.jit(functools.partial(contract.call, mosaic, spec, schedule=schedule))
    return run.trace(*norms.types_of(spec)).lower(lowering_platforms=("cuda",)).as_text()


def xla_call(spec: Spec, *operands: Any) -> list[np.ndarray]:
    return [np.asarray(out) for out in call(spec, *operands, module=xla)]


# -------------------------------------------------------------------------------- error bounds
#
# Values are those of `reference`, the bounds of the order in which these kernels add. u = 2^-24 is
# the unit roundoff of float32. A sum of n terms in the kernels is one of at most _TERMS in sequence
# and then a tree, so its relative error (against the sum of magnitudes) is below _TERMS u.
# Everything else adds a few roundings.

_U = 2.0**-24
_TERMS = 128


def softmax_reference(spec: Spec, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y in float64, and the error that a kernel may make."""
    x = exact(x)
    shifted, p = x - x.max(axis=1, keepdims=True), softmax(x, 1)
    # The error of exp(t): the rounding of t and, for 16 bits, of t log2(e); 4 u for the function
    # itself. Parts of a row have their own maxima, which doubles the first.
    exp_error = (4 * np.abs(shifted) + 4) * _U
    total_error = (p * exp_error).sum(axis=1, keepdims=True) + (_TERMS + 8) * _U
    if spec.op == "softmax":
        return p, p * (exp_error + total_error) + half_unit(p, spec.y_dtype)
    y = log_softmax(x, 1)
    error = total_error + 4 * _U * (np.abs(shifted) + np.abs(shifted - y))
    return y, error + half_unit(y, spec.y_dtype)


def norm_reference(
    spec: Spec, x: np.ndarray, scale: np.ndarray | None, bias: np.ndarray | None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """y, rstd and mean in float64, and the errors that a kernel may make."""
    x = exact(x)
    scale, bias = (of_rows(param, spec.rows) for param in (scale, bias))
    g = 1.0 if scale is None else exact(scale) + spec.norm.scale_offset
    if scale is not None and (floor := spec.scale_floor) is not None:
        g = np.where(np.abs(g) < floor, np.where(g < 0, -floor, floor), g)
    b = 0.0 if bias is None else exact(bias)
    options = (
        spec.norm.subtract_mean,
        spec.norm.epsilon,
        spec.norm.saved,
        str(spec.x_dtype),
        str(spec.y_dtype),
    )
    norm = Norm(x, np.asarray(g), np.asarray(b), np.zeros_like(x), *options)
    mean, rstd = np.broadcast_to(norm.mean, (spec.rows, 1)), norm.r
    mean_error = _TERMS * _U * np.abs(x).mean(axis=1, keepdims=True) * spec.norm.subtract_mean
    # A wrong mean adds its square; the magnitudes of the sum are the sum.
    rstd_error = rstd * ((_TERMS + 8) * _U + np.square(mean_error * rstd))
    error = np.abs(x - mean) * rstd_error + rstd * (mean_error + _U * np.abs(x))
    error = (error + 4 * _U * np.abs(norm.xh)) * np.abs(g)
    if bias is not None:
        # XLA on CPU may leave out a rounding to y's dtype.
        error = error + half_unit(b, spec.y_dtype) + 4 * _U * np.abs(b)
    error = error + 4 * _U * np.abs(norm.normal)
    y, _, error, _ = after_norm(spec.norm.activation, norm.normal, error, _U)
    outputs, errors = [y], [error + half_unit(y, spec.y_dtype)]
    if spec.has_stats:
        outputs.append(rstd[:, 0])
        errors.append(rstd_error[:, 0])
        if spec.returns_mean:
            outputs.append(mean[:, 0])
            errors.append(mean_error[:, 0] + 4 * _U * np.abs(mean[:, 0]))
    return outputs, errors


def residual_reference(
    spec: Spec, outputs: Sequence[np.ndarray], x: Any, residual: Any, *params: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return `norm_reference` for all outputs; y is compared with the norm of the given h."""
    if spec.op == "add_norm":
        h = (x.astype(F32) + residual.astype(F32)).astype(spec.norm.residual_dtype)
        (y, *stats), (error, *stat_errors) = norm_reference(spec.last, outputs[1], *params)
        return [y, h, *stats], [error, np.zeros_like(y), *stat_errors]
    scale, *next_scale = params
    first = changed(spec.first, y_dtype=F32)
    (normal, *stats), (error, *stat_errors) = norm_reference(first, x, scale, None)
    h = residual.astype(np.float64) + normal
    error = error + 4 * _U * np.abs(h) + half_unit(h, spec.norm.residual_dtype)
    if not next_scale:
        return [h, *stats], [error, *stat_errors]
    (y, *last), (y_error, *last_errors) = norm_reference(spec.last, outputs[1], *next_scale, None)
    return [y, h, *stats, *last], [y_error, error, *stat_errors, *last_errors]


def of_rows(param: np.ndarray | None, rows: int) -> np.ndarray | None:
    """A parameter of groups of rows, for each row."""
    if param is None or param.ndim == 1:
        return param
    return np.repeat(param, rows // len(param), axis=0)


def reference(
    spec: Spec, *operands: Any, outputs: Sequence[np.ndarray] = ()
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The outputs in float64 and the errors that a kernel may make, which gave these `outputs`."""
    if spec.norm.residual_dtype is not None:
        return residual_reference(spec, outputs, *operands)
    if spec.op == "norm":
        return norm_reference(spec, *operands)
    y, error = softmax_reference(spec, *operands)
    return [y], [error]
