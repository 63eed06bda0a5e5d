"""Schedules, calls and float64 references for the tests of the forward kernels."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import contract
import jax
import norms
import numpy as np
from programs import text_for_cuda
from reference import Norm, after_norm, exact, half_unit, log_softmax, softmax
from specs import F32, build_spec, changed

from jaxnorm_kernels import mosaic, xla
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.specs import Spec

OPS = ("softmax", "log_softmax", "rms_norm", "layer_norm")
#: Shapes of the benchmarks, odd shapes, and a single row.
SHAPES = [
    (32768, 128),
    (32768, 768),
    (32768, 1024),
    (32768, 4096),
    (8192, 5120),
    (16384, 8192),
    (8192, 12288),
    (8192, 16384),
    (4096, 32768),
    (4096, 65536),
    (1024, 131072),
    (8192, 1000),
    (8192, 4095),
    (8192, 50257),
    (1, 4096),
]
RESIDUAL_OPS = ("add_rms_norm", "add_layer_norm", "rms_norm_add", "rms_norm_add_rms_norm")


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule, with numbers of rows and columns that exercise its special cases.

    `schedule.vector`, the number of elements that a thread loads at once, is 8 (for 16-bit arrays)
    or 1.
    """

    name: str
    rows: int
    cols: int
    schedule: Any

    def schedule_for(self, *dtypes: np.dtype | None) -> Any:
        """Return the schedule with a `vector` that is 16 bytes long in the widest dtype.

        A schedule whose vector is 1 is returned unchanged.
        """
        if self.schedule.vector == 1:
            return self.schedule
        widest = max(dtype.itemsize for dtype in dtypes if dtype is not None)
        return dataclasses.replace(self.schedule, vector=16 // widest)


# Each kind of schedule has two cases. A row is processed in fragments (ranges of columns). In one
# case, the fragments are disjoint. In the other ("tail"), the last fragment overlaps the previous
# one.
CASES = (
    Case("rows_in_warps", 9, 512, TileSchedule("row_tile", 8, rows=4)),
    Case("rows_in_warps_tail", 9, 440, TileSchedule("row_tile", 8, rows=8)),
    Case("rows_in_parts_of_warps", 35, 72, TileSchedule("row_tile", 8, rows=32, threads=4)),
    Case("same_row_in_all_warps", 3, 24, TileSchedule("row_tile", 8, rows=1, threads=2)),
    Case("warpgroup_row", 2, 2048, TileSchedule("warpgroup_row", 8)),
    Case("warpgroup_row_tail", 2, 3000, TileSchedule("warpgroup_row", 8)),
    Case("split_row", 2, 4096, TileSchedule("split_row", 8, warpgroups=2)),
    Case("split_row_tail", 2, 2571, TileSchedule("split_row", 1, warpgroups=4)),
    Case(
        "pipelined_tile",
        # Three tiles of 4 rows. The third overlaps the second. The first block has two tiles.
        11,
        512,
        TileSchedule("pipelined_tile", 8, rows=4, slots=2, tiles=2, params_first=True),
    ),
    Case(
        "pipelined_tile_tail",
        17,
        440,
        TileSchedule("pipelined_tile", 8, rows=8, slots=1, tiles=3, rereads=True),
    ),
    Case(
        "pipelined_row",
        5,
        4096,
        TileSchedule("pipelined_row", 8, warpgroups=2, slots=2, tiles=3),
    ),
    Case(
        "pipelined_row_that_ends_in_single_rows",
        6,
        4096,
        TileSchedule("pipelined_row", 8, warpgroups=2, slots=1, tiles=2, tail=3),
    ),
    Case(
        "pipelined_row_tail",
        4,
        3000,
        TileSchedule("pipelined_row", 8, slots=3, tiles=4, params_first=True),
    ),
    Case(
        "pipelined_row_that_rereads",
        3,
        3000,
        TileSchedule("pipelined_row", 8, slots=2, tiles=3, rereads=True),
    ),
)

#: Schedules in which the blocks of a cluster process a row together. The interpreter has no
#: clusters, so it cannot run them.
CLUSTERED = (
    Case("split_row", 2, 16384, TileSchedule("split_row", 8, cluster=4)),
    Case("split_row_tail", 2, 5571, TileSchedule("split_row", 1, warpgroups=2, cluster=8)),
    Case(
        "pipelined_row",
        5,
        16384,
        TileSchedule("pipelined_row", 8, warpgroups=2, cluster=2, slots=2, tiles=3),
    ),
    Case(
        "pipelined_row_tail",
        5,
        9000,
        TileSchedule("pipelined_row", 8, cluster=8, slots=2, tiles=3, rereads=True),
    ),
)


def make_spec(op: str, rows: int, cols: int, x: np.dtype, y: np.dtype, **kwargs: Any) -> Spec:
    """Return the forward spec of `op`. A residual has the dtype of x unless `kwargs` change it."""
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


#: The mean and the standard deviation of each random operand.
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
    """Run the forward and return its outputs, then the statistics."""
    outputs = contract.call(module, spec, *operands, **kwargs)
    return (*outputs[:-1], *outputs[-1]) if spec.is_norm else outputs


def interpret(spec: Spec, *operands: Any, params: Any = None, **kwargs: Any) -> list[np.ndarray]:
    """Run `call` in the interpreter."""
    with mosaic.interpreted(params):
        outputs = program(spec, **kwargs)(*operands)
    return [np.asarray(out) for out in outputs]


def program(spec: Spec, schedule: TileSchedule | None = None, **kwargs: Any) -> Any:
    """Return `call` under `jax.jit`.

    If a schedule is given, the jitted function is cached, so it compiles only once. Functions
    without a schedule are not cached, because they depend on tables that a test may replace.
    """
    if schedule is not None:
        return _program_of(spec, schedule, **kwargs)
    return jax.jit(lambda *args: call(spec, *args, **kwargs))


@functools.lru_cache(maxsize=64)
def _program_of(spec: Spec, schedule: TileSchedule, **kwargs: Any) -> Any:
    return jax.jit(lambda *args: call(spec, *args, schedule=schedule, **kwargs))


def lower(spec: Spec, schedule: Any = None) -> str:
    """Return the module that XLA receives for an NVIDIA GPU.

    Lowering includes Mosaic's layout inference, so this also tests that the inference succeeds.
    """
    run = functools.partial(contract.call, mosaic, spec, schedule=schedule)
    return text_for_cuda(run, *norms.types_of(spec))


def xla_call(spec: Spec, *operands: Any) -> list[np.ndarray]:
    return [np.asarray(out) for out in call(spec, *operands, module=xla)]


# -------------------------------------------------------------------------------- error bounds
#
# The values are computed by the module `reference`. The bounds follow the order in which the
# kernels add. u = 2^-24 is the unit roundoff of float32. A kernel adds at most _TERMS terms one
# after the other, and then adds these partial sums as a tree. So the error of a sum, divided by the
# sum of its terms' magnitudes, is below _TERMS * u. All other steps add a few roundings.

_U = 2.0**-24
_TERMS = 128


def softmax_reference(spec: Spec, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return y in float64, and a bound on the error of a kernel's y."""
    x = exact(x)
    shifted, p = x - x.max(axis=1, keepdims=True), softmax(x, 1)
    # The relative error of exp(t), where t = x - max(x). It is the sum of three terms: the rounding
    # of t, the rounding of t * log2(e) for 16-bit outputs, and 4 * u for exp itself, where u is the
    # unit roundoff. If a row is split among threads, each thread first subtracts the maximum of its
    # own elements, and its sum is rescaled later. So t is rounded twice, and the first two terms
    # double.
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
    """Return y, rstd and mean in float64, and bounds on the errors of a kernel's results."""
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
    # The variance has two errors. First, an error d of the mean increases it by d^2. Second, the
    # sum of squares is rounded. Its terms are not negative, so they do not cancel, and this error
    # is relative to the variance.
    rstd_error = rstd * ((_TERMS + 8) * _U + np.square(mean_error * rstd))
    error = np.abs(x - mean) * rstd_error + rstd * (mean_error + _U * np.abs(x))
    error = (error + 4 * _U * np.abs(norm.xh)) * np.abs(g)
    if bias is not None:
        # XLA on a CPU may omit rounding the bias to y's dtype.
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
    """Return all outputs and their error bounds for a norm with a residual.

    y is compared with the norm of the h that the kernel returned.
    """
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
    """Expand a parameter of shape (groups, columns) to (rows, columns), or return it unchanged.

    A vector is shared by all rows, and None is an absent parameter. Both are returned unchanged.
    """
    if param is None or param.ndim == 1:
        return param
    return np.repeat(param, rows // len(param), axis=0)


def reference(
    spec: Spec, *operands: Any, outputs: Sequence[np.ndarray] = ()
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the results in float64, and bounds on the errors of a kernel's results.

    `outputs` are the kernel's results. Only norms with a residual need them: their reference starts
    from the kernel's rounded h.
    """
    if spec.has("residual"):
        return residual_reference(spec, outputs, *operands)
    if spec.op == "norm":
        return norm_reference(spec, *operands)
    y, error = softmax_reference(spec, *operands)
    return [y], [error]
