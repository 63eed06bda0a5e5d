"""RMSNorm, the product with a matrix and an activation; the product in one kernel.

With G = scale + scale_offset, row by row:

    r = 1 / sqrt(mean(x^2) + epsilon)       w = G weight, rounded to the product's dtype
    z = r (x w) + bias                      y = activation(z)

r and w are XLA's passes; the kernel multiplies x as it is, and r belongs to a row of the product.
So no normalised array is written, and x goes from memory to tensor cores by no register but theirs.
In float16 w is c G weight, with a power of 2 that makes c G 1 at most, and r / c takes it back.

Squares and G in the product's loop cost more than these passes. Times of 8192 rows of bfloat16 on
an H100, over those of cuBLAS' product alone:

    weight                                            2048 x 3072    4096 x 6144
    this kernel alone                                     1.15           1.12
    with the pass that finds r                            1.28           1.17
    and the one that gives weight G                       1.37           1.25
    instead, G to x in the loop                           1.53           1.43
    and squares there, too                                2.30           2.27

Programs that run at the same time make a piece of y that is about as high as it is wide, and read
few different tiles of x and weight, which the L2 cache has for all of them.
"""

import jax
import triton
import triton.language as tl

from jaxnorm_kernels.implementation import Operands
from jaxnorm_kernels.specs import LinearSpec
from jaxnorm_kernels.triton import linear_schedule as schedules
from jaxnorm_kernels.triton.launch import launch
from jaxnorm_kernels.triton.linear_schedule import LinearSchedule
from jaxnorm_kernels.xla.linear import scaled_weight
from jaxnorm_kernels.xla.norm import norm_fwd


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
    _, _, (rstd,) = norm_fwd(Operands(x, scale=scale), spec.norm)
    weight, power = scaled_weight(weight, scale, spec)
    out = jax.ShapeDtypeStruct((spec.rows, spec.features), spec.y_dtype)
    y, *z = launch(
        _rms_norm_linear_fwd,
        name="jaxnorm_rms_norm_linear_fwd",
        outputs={"y_ptr": out, "z_ptr": out if spec.want_z else None},
        grid=schedule.grid(spec),
        warps=schedule.warps,
        registers=schedule.registers,
        x_ptr=x,
        weight_ptr=weight,
        factor_ptr=rstd if power is None else rstd * power,
        bias_ptr=bias,
        rows=spec.rows,
        cols=spec.cols,
        features=spec.features,
        activation=spec.activation,
        tile_rows=schedule.tile_rows,
        tile_features=schedule.tile_features,
        block=schedule.block,
        stages=schedule.stages,
        group=schedule.group,
    )
    return y, z[0] if z else None, rstd if spec.want_rstd else None


@triton.jit
def _rms_norm_linear_fwd(
    x_ptr,
    weight_ptr,
    factor_ptr,
    bias_ptr,
    y_ptr,
    z_ptr,
    rows,
    cols: tl.constexpr,
    features: tl.constexpr,
    activation: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_features: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    group: tl.constexpr,
):
    """A tile (tile_rows, tile_features) of y and z; `factor` (rows,) is that of the product."""
    row_tile, feature_tile = _tile_of_program(rows, features, tile_rows, tile_features, group)
    row = row_tile * tile_rows + tl.arange(0, tile_rows)
    feature = feature_tile * tile_features + tl.arange(0, tile_features)[None, :]
    is_feature = feature < features
    # Beyond the last row is the last one again, whose product is not stored.
    existing = tl.minimum(row, rows - 1)
    k = tl.arange(0, block)
    x_offset = existing.to(tl.int64)[:, None] * cols + k[None, :]
    weight_offset = k.to(tl.int64)[:, None] * features + feature

    total = tl.zeros([tile_rows, tile_features], tl.float32)
    for first in tl.range(0, cols, block, num_stages=stages):
        is_col = first + k < cols
        x_at = x_ptr + first + x_offset
        weight_at = weight_ptr + weight_offset
        weight_ptr += block * features  # A number of 64 bits where it takes them.
        x = _load(x_at, is_col[None, :], cols % block == 0)
        if cols % block == 0:
            weight = _load(weight_at, is_feature, features % tile_features == 0)
        else:
            weight = _load(weight_at, is_col[:, None] & is_feature, False)
        total = tl.dot(x, weight, total)

    total *= tl.load(factor_ptr + existing)[:, None]
    # By quarters: the addresses of a whole tile, and y beside z, are more than registers hold.
    width: tl.constexpr = tile_features // 4
    halves = _halves(total)
    for i in tl.static_range(2):
        quarters = _halves(halves[i])
        for j in tl.static_range(2):
            first_feature = feature_tile * tile_features + (2 * i + j) * width
            _store(
                quarters[j], bias_ptr, y_ptr, z_ptr, row, first_feature, rows, features, activation
            )


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
