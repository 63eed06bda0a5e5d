"""RMSNorm, the product with a matrix and an activation, in one kernel.

    r = 1 / sqrt(mean(x^2) + epsilon)       G = scale + scale_offset
    z = r (x G) weight + bias               y = activation(z)

r belongs to a row, and so to a row of the product: each program adds up the squares of the rows
whose product it makes, of tiles that it has in hand anyway, and multiplies by r at the end. Nothing
of x's size is written. x G is rounded to the product's dtype, once and as the normalised x would
be: in bfloat16, which has the exponents of float32, it makes no difference how large a row is, up
to squares that float32 does not have, whose r is 0 in any norm here.

float16 has few exponents: there x G may overflow, or lose its last bits, where r x G does not. Only
an x of float16 itself without a scale is in its range as it is. Else a small kernel finds r first,
and the product is that of r x G.

Programs that run at the same time make a piece of y that is about as high as it is wide, and read
few different tiles of x and weight, which the L2 cache has for all of them.
"""

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels.specs import LinearSpec
from jaxnorm_kernels.triton import linear_schedule as schedules
from jaxnorm_kernels.triton.launch import launch
from jaxnorm_kernels.triton.linear_schedule import LinearSchedule
from jaxnorm_kernels.triton.tiles import tile_at


def rms_norm_linear_fwd(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    spec: LinearSpec,
    *,
    schedule: LinearSchedule | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns y and z `(rows, features)` in ``y_dtype``, and rstd `(rows,)` in float32.

    None for a z or an rstd that the spec does not want.

    Args:
      x: `(rows, cols)`.
      weight: `(cols, features)`.
      scale, bias: `(cols,)` and `(features,)`, or None.
    """
    schedule = schedule or schedules.choose(spec)
    rstd = _rstd(x, spec) if schedule.rstd_first or _leaves_range(spec) else None
    of_rows = jax.ShapeDtypeStruct((spec.rows,), np.float32)
    out = jax.ShapeDtypeStruct((spec.rows, spec.features), spec.y_dtype)
    outputs = {
        "y_ptr": out,
        "z_ptr": out if spec.want_z else None,
        "rstd_ptr": of_rows if spec.want_rstd and rstd is None else None,
    }
    results = launch(
        _rms_norm_linear_fwd,
        name="jaxnorm_rms_norm_linear_fwd",
        outputs=outputs,
        grid=schedule.grid(spec),
        warps=schedule.warps,
        registers=schedule.registers,
        x_ptr=x,
        weight_ptr=weight,
        scale_ptr=scale,
        bias_ptr=bias,
        known_rstd_ptr=rstd,
        rows=spec.rows,
        cols=spec.cols,
        features=spec.features,
        product_dtype=spec.product_dtype.name,
        epsilon=spec.epsilon,
        scale_offset=spec.scale_offset,
        activation=spec.activation,
        tile_rows=schedule.tile_rows,
        tile_features=schedule.tile_features,
        block=schedule.block,
        stages=schedule.stages,
        group=schedule.group,
    )
    made = dict(zip((name for name, out in outputs.items() if out is not None), results))
    known = rstd if spec.want_rstd else None
    return made["y_ptr"], made.get("z_ptr"), made.get("rstd_ptr", known)


def _leaves_range(spec: LinearSpec) -> bool:
    """Whether x G, not normalised, may be no number of the product's dtype."""
    is_in_range = spec.x_dtype == spec.product_dtype and spec.scale_dtype is None
    return spec.product_dtype.name == "float16" and not is_in_range


def _rstd(x: jax.Array, spec: LinearSpec) -> jax.Array:
    schedule = schedules.of_rstd(spec)
    (rstd,) = launch(
        _rstd_of_rows,
        name="jaxnorm_rms_norm_linear_rstd",
        outputs={"rstd_ptr": jax.ShapeDtypeStruct((spec.rows,), np.float32)},
        grid=schedule.grid(spec.norm),
        warps=schedule.warps,
        registers=schedule.registers,
        x_ptr=x,
        rows=spec.rows,
        cols=spec.cols,
        epsilon=spec.epsilon,
        tile_rows=schedule.tile_rows,
        block=schedule.block,
    )
    return rstd


@triton.jit
def _rstd_of_rows(
    x_ptr,
    rstd_ptr,
    rows,
    cols: tl.constexpr,
    epsilon: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    first_row = tl.program_id(0) * tile_rows
    squares = tl.zeros([tile_rows, block], tl.float32)
    for first_col in tl.range(0, cols, block):
        _, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        x = tl.load(x_ptr + start + col, mask=exists, other=0.0).to(tl.float32)
        squares += x * x
    row = first_row + tl.arange(0, tile_rows)
    tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(squares, axis=1) / cols + epsilon), row < rows)


@triton.jit
def _rms_norm_linear_fwd(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    known_rstd_ptr,
    y_ptr,
    z_ptr,
    rstd_ptr,
    rows,
    cols: tl.constexpr,
    features: tl.constexpr,
    product_dtype: tl.constexpr,
    epsilon: tl.constexpr,
    scale_offset: tl.constexpr,
    activation: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_features: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    group: tl.constexpr,
):
    """A tile (tile_rows, tile_features) of y, z and, of the first features, rstd."""
    dtype: tl.constexpr = tl.bfloat16 if product_dtype == "bfloat16" else tl.float16
    row_tile, feature_tile = _tile_of_program(rows, features, tile_rows, tile_features, group)
    row = row_tile * tile_rows + tl.arange(0, tile_rows)
    feature = feature_tile * tile_features + tl.arange(0, tile_features)[None, :]
    is_feature = feature < features
    # Beyond the last row is the last one again, whose product is not stored.
    existing = tl.minimum(row, rows - 1)
    k = tl.arange(0, block)
    x_offset = existing.to(tl.int64)[:, None] * cols + k[None, :]
    weight_offset = k.to(tl.int64)[:, None] * features + feature
    if known_rstd_ptr is not None:
        rstd = tl.load(known_rstd_ptr + existing)

    squares = tl.zeros([tile_rows], tl.float32)
    total = tl.zeros([tile_rows, tile_features], tl.float32)
    for first in tl.range(0, cols, block, num_stages=stages):
        col = first + k
        x_at = x_ptr + first + x_offset
        weight_at = weight_ptr + weight_offset
        weight_ptr += block * features  # A number of 64 bits where it takes them.
        x = _load(x_at, (col < cols)[None, :], cols % block == 0)
        if cols % block == 0:
            weight = _load(weight_at, is_feature, features % tile_features == 0)
        else:
            weight = _load(weight_at, (col < cols)[:, None] & is_feature, False)
        wide = x.to(tl.float32)
        factor = wide
        if known_rstd_ptr is not None:
            factor *= rstd[:, None]
        else:
            squares += tl.sum(wide * wide, axis=1)
        if scale_ptr is not None:
            scale = _load(scale_ptr + col, col < cols, cols % block == 0)
            factor *= (scale.to(tl.float32) + scale_offset)[None, :]
        if weight.dtype != dtype:
            weight = weight.to(tl.float32).to(dtype)
        total = tl.dot(factor.to(dtype), weight, total)

    if known_rstd_ptr is None:
        rstd = tl.rsqrt(squares / cols + epsilon)
        total *= rstd[:, None]
    # By quarters: the addresses of a whole tile, and y beside z, are more than registers hold.
    width: tl.constexpr = tile_features // 4
    halves = _halves(total)
    for i in tl.static_range(2):
        quarters = _halves(halves[i])
        for j in tl.static_range(2):
            first = feature_tile * tile_features + (2 * i + j) * width
            _store(quarters[j], bias_ptr, y_ptr, z_ptr, row, first, rows, features, activation)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, row < tl.where(feature_tile == 0, rows, 0))


@triton.jit
def _load(pointer, mask, is_whole: tl.constexpr):
    """What is there, and 0 elsewhere; of a whole tile without the mask."""
    return tl.load(pointer) if is_whole else tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _tile_of_program(
    rows,
    features: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_features: tl.constexpr,
    group: tl.constexpr,
):
    """Which tile of rows and which of features: down `group` tiles of rows, then to the right."""
    row_tiles = tl.cdiv(rows, tile_rows)
    feature_tiles = tl.cdiv(features, tile_features)
    program = tl.program_id(0)
    in_group = program % (group * feature_tiles)
    first = program // (group * feature_tiles) * group
    height = tl.minimum(row_tiles - first, group)  # The last group may have fewer.
    return first + in_group % height, in_group // height


@triton.jit
def _halves(tile):
    """The left half of a tile, and the right one."""
    tile_rows: tl.constexpr = tile.shape[0]
    half: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, [tile_rows, 2, half]), [0, 2, 1]))


@triton.jit
def _store(
    z,
    bias_ptr,
    y_ptr,
    z_ptr,
    row,
    first_feature,
    rows,
    features: tl.constexpr,
    activation: tl.constexpr,
):
    """Adds the bias to z, and writes y and, where it is wanted, z."""
    feature = first_feature + tl.arange(0, z.shape[1])[None, :]
    is_feature = feature < features
    if bias_ptr is not None:
        z += tl.load(bias_ptr + feature, mask=is_feature, other=0.0).to(tl.float32)
    offset = row.to(tl.int64)[:, None] * features + feature
    exists = (row < rows)[:, None] & is_feature
    if z_ptr is not None:
        tl.store(z_ptr + offset, z, exists)
    tl.store(y_ptr + offset, _activated(z, activation), exists)


@triton.jit
def _activated(z, activation: tl.constexpr):
    """`jax.nn`'s; NaN stays NaN."""
    if activation is None:
        y = z
    elif activation == "relu":
        y = tl.where(z <= 0.0, 0.0, z)
    elif activation == "leaky_relu":
        y = tl.where(z >= 0.0, z, 0.01 * z)
    elif activation == "silu":
        y = z / (1.0 + tl.exp(-z))
    else:
        tl.static_assert(activation == "gelu")
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (z + 0.044715 z^3).
        y = z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    return y
