"""Schedules, calls and float64 references for the tests of the backward kernels.

In names of cases, "ring" stands for the schedule `PipelinedRows`, and "rows_ring" for
`PipelinedNarrowRows`. In both, rows pass through a ring of stages in shared memory.
"""

import functools
import math
from typing import Any

import contract
import jax
import numpy as np
from forward_cases import Case
from reference import after_norm, exact, half_unit, log_softmax_gradient
from specs import F32, build_spec

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.mosaic import interpreted
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import norm_backward as schedules
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.specs import Spec

#: Cases whose names end in "tail" have widths at which the last fragment (range of columns) of a
#: row overlaps the previous one. Each case has so many rows that two persistent blocks reuse the
#: stages of their rings. One of the two blocks has more rows than the other.
NORM_CASES = (
    Case("ring", 11, 2048, PipelinedRows(8, 1, stages=3)),
    Case("ring_two_stages", 7, 2048, PipelinedRows(8, 1, stages=2)),
    Case("ring_tail", 7, 1504, PipelinedRows(8, 1, stages=2)),
    Case("ring_two_warpgroups", 9, 4096, PipelinedRows(8, 2, stages=3)),
    Case("ring_two_warpgroups_tail", 5, 3000, PipelinedRows(8, 2, stages=3)),
    Case("ring_rows", 11, 1024, PipelinedRows(8, 1, stages=2, rows=4)),
    Case("ring_rows_tail", 14, 3000, PipelinedRows(8, 2, stages=2, rows=2)),
    Case("ring_more_stages", 9, 1024, PipelinedRows(8, 1, stages=4)),
    Case("ring_three_warpgroups", 5, 6144, PipelinedRows(8, 3, stages=2)),
    Case("ring_four_warpgroups", 5, 8192, PipelinedRows(8, 4, stages=3)),
    Case("rows_ring", 23, 512, PipelinedNarrowRows(8, 32, rows=8, stages=2)),
    Case("rows_ring_tail", 13, 440, PipelinedNarrowRows(8, 32, rows=4, stages=3)),
    Case("rows_ring_parts_of_warps", 70, 64, PipelinedNarrowRows(8, 4, rows=32, stages=2)),
)

SOFTMAX_CASES = (
    Case("rows_in_warps", 9, 512, TileSchedule("row_tile", 8, rows=4)),
    Case("rows_in_warps_tail", 9, 440, TileSchedule("row_tile", 8, rows=8)),
    Case("rows_in_parts_of_warps", 35, 72, TileSchedule("row_tile", 8, rows=32, threads=4)),
    Case("same_row_in_all_warps", 3, 24, TileSchedule("row_tile", 8, threads=2)),
    Case("warpgroup_row", 2, 2048, TileSchedule("warpgroup_row", 8)),
    Case("warpgroup_row_tail", 2, 2999, TileSchedule("warpgroup_row", 1)),
    Case("split_row", 2, 4096, TileSchedule("split_row", 8, warpgroups=2)),
    Case("split_row_tail", 2, 2571, TileSchedule("split_row", 1, warpgroups=4)),
)

#: Schedules in which the blocks of a cluster process a row together. The interpreter has no
#: clusters, so the tests lower these kernels without running them.
CLUSTER_CASES = (
    Case("cluster_of_2", 9, 16384, PipelinedRows(8, 2, stages=3, cluster=2)),
    Case("cluster_of_2_rows", 9, 8192, PipelinedRows(8, 2, stages=3, rows=2, cluster=2)),
    Case("cluster_of_4_tail", 9, 9000, PipelinedRows(8, 1, stages=3, cluster=4)),
    Case("cluster_of_8", 9, 65536, PipelinedRows(8, 4, stages=3, cluster=8)),
    Case("cluster_of_16", 9, 131072, PipelinedRows(8, 2, stages=3, cluster=16)),
)
SOFTMAX_CLUSTER_CASES = (
    Case("row_in_2_blocks", 3, 16384, TileSchedule("split_row", 8, warpgroups=2, cluster=2)),
    Case("row_in_4_blocks_tail", 3, 9001, TileSchedule("split_row", 1, cluster=4)),
    Case("row_in_16_blocks", 3, 131072, TileSchedule("split_row", 8, warpgroups=2, cluster=16)),
)


def make_spec(op: str, rows: int, cols: int, x: np.dtype, y: np.dtype, **kwargs: Any) -> Spec:
    if op in ("softmax", "log_softmax"):
        return build_spec(op, "bwd", rows, cols, x, y)  # type: ignore[arg-type]
    parameters: dict[str, Any] = {"scale_dtype": F32, "epsilon": 1e-6, "want_stats": True}
    if op == "layer_norm":
        parameters |= {"subtract_mean": True, "bias_dtype": F32}
    return build_spec("norm", "bwd", rows, cols, x, y, **(parameters | kwargs))


def floored(gain: np.ndarray, spec: Spec) -> np.ndarray:
    floor = spec.scale_floor
    return gain if floor is None else np.where(np.abs(gain) < floor, math.copysign(floor, 1), gain)


def of_rows(parameter: np.ndarray, spec: Spec) -> np.ndarray:
    """Return a parameter with one row per row of x, or with a single row if all rows share it."""
    if parameter.ndim == 1:
        return parameter[None]
    return np.repeat(parameter, spec.rows // len(parameter), axis=0)


def parameter_shape(groups: int, spec: Spec) -> tuple[int, ...]:
    return (spec.cols,) if groups == 1 else (groups, spec.cols)


def make_operands(spec: Spec, seed: int = 0) -> tuple[Any, ...]:
    """Return the backward's arguments: the arrays that the forward saves, and cotangents."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0.5, 3, (spec.rows, spec.cols))
    d = rng.normal(0, 1, (spec.rows, spec.cols)).astype(spec.y_dtype)
    if spec.op != "norm":
        e = np.exp(x - x.max(axis=1, keepdims=True))
        y = e / e.sum(axis=1, keepdims=True)
        return (y if spec.op == "softmax" else np.log(y)).astype(spec.y_dtype), d
    scale = bias = None
    mean = x.mean(axis=1, keepdims=True) if spec.norm.subtract_mean else np.zeros((spec.rows, 1))
    rstd = 1 / np.sqrt(np.square(x - mean).mean(axis=1, keepdims=True) + spec.norm.epsilon)
    y = (x - mean) * rstd
    if spec.norm.scale_dtype is not None:
        shape = parameter_shape(spec.norm.scale_groups, spec)
        scale = rng.normal(1, 0.5, shape).astype(spec.norm.scale_dtype)
        # If y's dtype has enough range, the forward replaces scales of 0 by a tiny number, the
        # floor.
        scale[..., ::7] = 0
        y = y * of_rows(floored(scale.astype(np.float64) + spec.norm.scale_offset, spec), spec)
    if spec.norm.bias_dtype is not None:
        bias = rng.normal(0, 1, parameter_shape(spec.norm.bias_groups, spec)).astype(
            spec.norm.bias_dtype
        )
        if spec.norm.scale_dtype is not None:
            # Where the floor replaces a scale of 0, this code sets the bias to 0. Next to any other
            # bias, floor * x_hat would be lost when y = floor * x_hat + bias is rounded.
            bias[..., ::7] = 0
        y = y + of_rows(effective_bias(bias, spec), spec)
    stats = tuple(
        s[:, 0].astype(np.float32) for s in ((rstd, mean) if spec.returns_mean else (rstd,))
    )
    saved = x.astype(spec.x_dtype) if spec.norm.saved == "input" else y.astype(spec.y_dtype)
    if "h" not in spec.outputs:
        return saved, stats, scale, bias, d
    return saved, stats, scale, bias, d, rng.normal(0, 1, x.shape).astype(spec.x_dtype)


def effective_bias(bias: np.ndarray, spec: Spec) -> np.ndarray:
    if spec.norm.saved == "output":
        bias = bias.astype(spec.y_dtype)
    return bias.astype(np.float64)


def call(spec: Spec, *operands: Any, schedule: Any = None) -> tuple[Any, ...]:
    """Run the backward and return dx; for a norm also dscale and dbias."""
    if spec.is_norm:
        return contract.call(mosaic, spec, *operands, schedule=schedule)
    y, dy = operands
    return contract.call(mosaic, spec, y, None, dy, schedule=schedule)[:1]


def interpret(spec: Spec, *operands: Any, params: Any = None, schedule: Any = None) -> list[Any]:
    """Run `call` in the interpreter."""
    program = _program if schedule is None else _program_once
    with interpreted(params):
        outputs = program(spec, schedule, schedules.persistent_blocks)(*operands)
    return [None if out is None else np.asarray(out) for out in outputs]


def _program(spec: Spec, schedule: Any, blocks: Any) -> Any:
    """Return `call` under `jax.jit`.

    `blocks` is not called here. It is an argument only so that it is part of the keys of
    `_program_once`'s cache, because the compiled program depends on it. `blocks` is the function
    `schedules.persistent_blocks`, which returns the number of blocks of a kernel, and which a test
    may replace. Kernels call it through the module `schedules`.
    """
    del blocks
    return jax.jit(lambda *args: call(spec, *args, schedule=schedule))


# Programs with a given schedule are cached. Programs without a schedule are not cached, because
# they depend on tables that a test may replace.
_program_once = functools.lru_cache(maxsize=64)(_program)


# References and error bounds.
#
# They start from the arrays that the kernel reads, including the statistics. The formulas of the
# module `reference` start from x, so they cannot be used here. u = 2^-24 is the unit roundoff of
# float32. A kernel adds at most _TERMS terms one after the other, and then adds these partial sums
# as a tree. So the error of a sum, divided by the sum of its terms' magnitudes, is below _TERMS *
# u. All other steps add a few roundings.

_U = 2.0**-24
_TERMS = 128


def reference(spec: Spec, *operands: Any) -> tuple[list[Any], list[Any]]:
    """Return the outputs in float64 and their error bounds. Absent outputs are None."""
    if spec.op == "norm":
        return norm_reference(spec, *operands)
    y, d = map(exact, operands)
    log = spec.op == "log_softmax"
    terms = d if log else d * y
    total = terms.sum(axis=1, keepdims=True)
    total_error = _TERMS * _U * np.abs(terms).sum(axis=1, keepdims=True)
    if spec.renormalises:
        # The elements of y are not negative, so their sum has a small relative error. The division
        # by this sum adds this relative error and a few roundings.
        total, total_error = (a / y.sum(axis=1, keepdims=True) for a in (total, total_error))
        total_error += (_TERMS + 4) * _U * np.abs(total)
    # The kernel may compute exp(y) as 2^(y * log2(e)), which rounds the exponent once more.
    weight, weight_error = (np.exp(y), 4 * (1 + np.abs(y)) * _U) if log else (y, 0)
    dx = log_softmax_gradient(y, d, 1) if log else y * (d - total)
    error = np.abs(weight) * (total_error + weight_error * np.abs(total))
    error += 4 * _U * (np.abs(d) * (1 if log else np.abs(y)) + np.abs(weight * total))
    return [dx], [error + half_unit(dx, spec.x_dtype)]


def norm_reference(
    spec: Spec, saved: Any, stats: Any, scale: Any, bias: Any, dy: Any, dh: Any = None
) -> tuple[list[Any], list[Any]]:
    saved, d = saved.astype(np.float64), dy.astype(np.float64)
    r = stats[0].astype(np.float64)[:, None]
    g = np.ones((1, spec.cols))
    if scale is not None:
        g = of_rows(floored(scale.astype(np.float64) + spec.norm.scale_offset, spec), spec)
    # A bound on the error of d, the product of the cotangent and the activation's derivative.
    d_error = np.zeros_like(d)
    if spec.norm.saved == "input":
        mean = stats[1].astype(np.float64)[:, None] if spec.norm.subtract_mean else 0.0
        xh = (saved - mean) * r
        xh_error = 4 * _U * (np.abs(xh) + np.abs(mean * r))
        if spec.norm.activation is not None:
            b = np.zeros((1, 1)) if bias is None else of_rows(bias.astype(np.float64), spec)
            n_error = np.abs(g) * xh_error + 4 * _U * (np.abs(xh * g) + np.abs(b))
            _, slope, _, slope_error = after_norm(spec.norm.activation, xh * g + b, n_error, _U)
            d, d_error = d * slope, np.abs(d) * slope_error + _U * np.abs(d * slope)
        dg = d * g
        terms, terms_error = dg * xh, np.abs(dg) * xh_error + np.abs(g * xh) * d_error
    else:
        dg = d * g
        if spec.y_limit is not None:
            saved = np.clip(saved, -spec.y_limit, spec.y_limit)
        z = saved if bias is None else saved - of_rows(effective_bias(bias, spec), spec)
        bound = math.sqrt(spec.cols)
        xh = np.clip(np.divide(z, g, out=np.zeros_like(z), where=g != 0), -bound, bound)
        xh_error = 4 * _U * np.abs(xh)
        terms, terms_error = d * z, 2 * _U * np.abs(d * z)
    sum_error = _TERMS * _U
    c2 = terms.mean(axis=1, keepdims=True)
    c2_error = (terms_error + sum_error * np.abs(terms)).mean(axis=1, keepdims=True)
    c1 = c1_error = np.zeros((spec.rows, 1))
    if spec.norm.subtract_mean:
        c1 = dg.mean(axis=1, keepdims=True)
        c1_error = (sum_error * np.abs(dg) + np.abs(g) * d_error).mean(axis=1, keepdims=True)
    dx = r * (dg - c1 - xh * c2)
    error = np.abs(xh) * c2_error + np.abs(c2) * xh_error + c1_error + np.abs(g) * d_error
    error += 4 * _U * (np.abs(dg) + np.abs(c1) + np.abs(xh * c2))
    error = r * error
    if dh is not None:
        dx = dx + dh.astype(np.float64)
        error += _U * np.abs(dx)
    outputs: list[Any] = [dx]
    errors: list[Any] = [error + half_unit(dx, spec.x_dtype)]
    parameters = (
        (spec.norm.scale_dtype, spec.norm.scale_groups),
        (spec.norm.bias_dtype, spec.norm.bias_groups),
    )
    column_terms = (d * xh, np.abs(d) * xh_error + np.abs(xh) * d_error), (d, d_error)
    for (dtype, groups), (terms, terms_error) in zip(parameters, column_terms):

        def summed(v: np.ndarray, groups: int = groups) -> np.ndarray:
            total = v.reshape(groups, -1, spec.cols).sum(axis=1)
            return total.reshape(parameter_shape(groups, spec))

        total = summed(terms)
        total_error = summed(terms_error + sum_error * np.abs(terms))
        outputs.append(None if dtype is None else total)
        errors.append(None if dtype is None else total_error + half_unit(total, dtype))
    return outputs, errors
