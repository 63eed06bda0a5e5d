"""The logits in the softmax kernels: loading x, masks and biases, and excluding elements.

A mask or a bias that is broadcast to x's rows is not expanded in memory: its rows are loaded where
they are needed (see `tiles.Operand`).

A causal softmax loads vectors of 16 elements. It does not load a vector that lies entirely above
the diagonal. It loads all elements of a vector that crosses the diagonal.
"""

import dataclasses

import triton
import triton.language as tl

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import tiles
from jaxnorm_kernels.triton.tiles import LOWEST, Operand, renumbered, tile_at, zeros

# A causal softmax loads or skips elements in groups of this many consecutive elements. If each
# element were loaded or skipped separately, the elements would be loaded one by one. With groups of
# 16, even the narrowest array, a mask with one byte per element, is loaded 16 bytes at a time.
_VECTOR = tl.constexpr(16)


@dataclasses.dataclass(frozen=True)
class Logits:
    """The compile-time parameters of a softmax kernel, apart from the tile sizes.

    Attributes:
      log: True for log_softmax, False for softmax.
      scale: the number by which x is multiplied in the logits z = scale * x + bias.
      queries: for a causal softmax, the number of rows of each matrix; 0 for other softmaxes.
      mask: how rows of x map to rows of the mask; None if the kernel does not take a mask.
      bias: how rows of x map to rows of the bias; None if the kernel does not take a bias.
      drops: True if a mask or causal mask may exclude elements.
      drops_zeros: True if the kernel does not read the mask, but treats elements with y = 0 as
        excluded.
      renormalises: True if the backward pass divides by sum(y).
    """

    log: bool = False
    scale: float = 1.0
    queries: int = 0
    mask: Operand | None = None
    bias: Operand | None = None
    drops: bool = False
    drops_zeros: bool = False
    renormalises: bool = False

    @property
    def is_plain(self) -> bool:
        """True if the logits are x itself, without scale, bias, mask or causal mask."""
        return self == Logits(log=self.log, renormalises=self.renormalises)


def of(spec: Spec) -> Logits:
    """Return the compile-time parameters of the call `spec`."""
    has_bias = spec.softmax.logits_bias_dtype is not None
    return Logits(
        log=spec.op == "log_softmax",
        scale=spec.logits.logits_scale,
        queries=spec.softmax.queries if spec.softmax.causal else 0,
        mask=tiles.operand_of(spec.logits.mask_rows) if spec.reads_mask else None,
        bias=tiles.operand_of(spec.softmax.logits_bias_rows) if has_bias else None,
        drops=spec.softmax.causal or spec.reads_mask,
        drops_zeros=spec.logits.has_mask and not spec.reads_mask,
        renormalises=spec.direction == "bwd" and spec.renormalises,
    )


@triton.jit
def load_logits(
    x_ptr,
    mask_ptr,
    bias_ptr,
    tile,
    logits: tl.constexpr,
    cols: tl.constexpr,
    eviction: tl.constexpr = "",
):
    """Load a tile of x, and return two tiles: the logits z, and a mask of the included elements.

    z = scale * x + bias is computed in float32. If x is finite, scale * x is clipped to the finite
    numbers. Excluded elements have z = -inf.
    """
    row, start, col, exists = tile
    read = _read(row, col, exists, logits)
    z = tl.load(x_ptr + start + col, read, float("-inf"), eviction_policy=eviction).to(tl.float32)
    takes_part = exists
    if not logits.is_plain:
        if logits.scale != 1.0:
            x = z
            z *= logits.scale
            if logits.scale > 1.0 or logits.scale < -1.0:
                # Users may set all elements of a row to the lowest finite number to mask them. z
                # must stay finite there: if all elements were -inf, the row's softmax would be NaN.
                z = tl.where(tl.abs(x) < float("inf"), tl.clamp(z, LOWEST, -LOWEST), z)
        if bias_ptr is not None:
            z += _load_shared(bias_ptr, row, col, read, cols, logits.bias).to(tl.float32)
        takes_part = _takes_part(mask_ptr, row, col, read, cols, logits)
        z = tl.where(takes_part, z, float("-inf"))
    return z, takes_part


@triton.jit
def load_output(y_ptr, tile, logits: tl.constexpr, eviction: tl.constexpr = ""):
    """Load a tile of y, and return it in float32.

    Elements that are not loaded become 0. They become -inf for a log_softmax with a scale, a bias,
    a mask or a causal mask.
    """
    row, start, col, exists = tile
    read = _read(row, col, exists, logits)
    nothing: tl.constexpr = float("-inf") if logits.log and not logits.is_plain else 0.0
    return tl.load(y_ptr + start + col, read, nothing, eviction_policy=eviction).to(tl.float32)


@triton.jit
def load_cotangent(
    dy_ptr, mask_ptr, tile, logits: tl.constexpr, cols: tl.constexpr, eviction: tl.constexpr = ""
):
    """Load a tile of dy, and return it in float32. Excluded elements become 0."""
    row, start, col, exists = tile
    read = _read(row, col, exists, logits)
    d = tl.load(dy_ptr + start + col, read, 0.0, eviction_policy=eviction).to(tl.float32)
    if logits.drops:
        d = tl.where(_takes_part(mask_ptr, row, col, read, cols, logits), d, 0.0)
    return d


@triton.jit
def drop_zeros(d, y, logits: tl.constexpr):
    """Return the cotangent d. If `drops_zeros` is set, d is 0 in elements with y = 0."""
    if logits.drops_zeros:
        d = tl.where(y == 0.0, 0.0, d)
    return d


@triton.jit
def masked(y, takes_part, logits: tl.constexpr):
    """Return y with excluded elements set to 0 (-inf for log_softmax).

    They would otherwise be NaN if other elements of their row are NaN.
    """
    if logits.drops:
        y = tl.where(takes_part, y, float("-inf") if logits.log else 0.0)
    return y


@triton.jit
def scaled(dz, logits: tl.constexpr):
    """Return the gradient of x, given the gradient dz of the logits z = scale * x + bias."""
    if logits.scale != 1.0:
        dz *= logits.scale
    return dz


@triton.jit
def columns_of(first_row, rows, logits: tl.constexpr, tiling: tl.constexpr):
    """Return the number of columns that must be loaded for a tile of rows.

    In a causal softmax, a row needs only the columns up to the diagonal. The result is then the
    largest number of columns that a row of the tile needs. In other softmaxes, the result is the
    number of all columns.
    """
    end = tiling.cols
    if logits.queries > 0:
        row = tl.minimum(first_row + tl.arange(0, tiling.tile_rows), rows - 1)
        end = tl.minimum(tl.max(row % logits.queries, axis=0) + 1, tiling.cols)
    return end


@triton.jit
def term_of_total(y, d, logits: tl.constexpr):
    """Return the terms that are added up for each row's *total*: d for log_softmax, else d * y.

    The total of a row is sum(d) for log_softmax, and sum(d * y) / sum(y) for softmax. The division
    is needed only if y is rounded to 16 bits. Otherwise, sum(y) is taken to be 1.
    """
    return d if logits.log else d * y


@triton.jit
def total_of(terms, weights, logits: tl.constexpr):
    """Return each row's total (see `term_of_total`), an array `(tile_rows, 1)`.

    `terms` is a tile. It is the elementwise sum of the results of `term_of_total` for all blocks of
    columns of these rows. `weights` is the elementwise sum of the tiles of y for the same blocks.
    This function adds up the columns of `terms` and, if it needs sum(y), the columns of `weights`.
    """
    total = tl.sum(terms, axis=1)[:, None]
    if logits.renormalises:
        weight = tl.sum(weights, axis=1)[:, None]
        total /= tl.where(weight == 0.0, 1.0, weight)
    return total


@triton.jit
def cotangent_of_logits(y, d, total, logits: tl.constexpr):
    """Return dz, the gradient of the logits, for the elements of a tile.

    dz is y * (d - total) for softmax, and d - exp(y) * total for log_softmax. `total` has the total
    of each row, as computed by `total_of`. Excluded elements have y = 0, or exp(y) = 0 for
    log_softmax. For excluded elements, the product of this 0 and the total is not computed but set
    to 0: the total may be NaN, and 0 * NaN would be NaN.
    """
    multiple = tl.exp(y) * total if logits.log else y * (d - total)
    if logits.drops or logits.drops_zeros:
        multiple = tl.where(y == (float("-inf") if logits.log else 0.0), 0.0, multiple)
    return d - multiple if logits.log else multiple


@triton.jit
def looped_total(
    y_ptr, dy_ptr, mask_ptr, first_row, rows, logits: tl.constexpr, tiling: tl.constexpr
):
    """Load the rows block after block, and return each row's total, an array `(tile_rows, 1)`."""
    # If rows are unaligned, each value needs a separate address. In a causal softmax, the end of
    # this loop is unknown at compile time. The compiler then computes all addresses before the
    # loop, and registers spill. `disable_licm` prevents this.
    is_causal: tl.constexpr = logits.queries > 0
    terms, weights = zeros(tiling), zeros(tiling)
    end = columns_of(first_row, rows, logits, tiling)
    for first_col in tl.range(0, end, tiling.block, disable_licm=is_causal):
        tile = tile_at(first_row, first_col, rows, tiling)
        d = load_cotangent(dy_ptr, mask_ptr, tile, logits, tiling.cols, "evict_last")
        if logits.log:
            terms += d
        else:
            y = load_output(y_ptr, tile, logits, "evict_last")
            terms += drop_zeros(d, y, logits) * y
            if logits.renormalises:
                weights += y
    return total_of(terms, weights, logits)


@triton.jit
def _read(row, col, exists, logits: tl.constexpr):
    """Return a mask of the elements of a tile that are loaded.

    `exists` is a mask of the elements that are inside the array. In a causal softmax, a vector of
    16 elements is not loaded if its first element is above the diagonal.
    """
    if logits.queries > 0:
        exists = exists & (col // _VECTOR * _VECTOR <= (row % logits.queries)[:, None])
    return exists


@triton.jit
def _takes_part(mask_ptr, row, col, read, cols: tl.constexpr, logits: tl.constexpr):
    """Return a mask of the included elements of a tile.

    An element is included if it is loaded, if the mask (if any) is True for it, and if it is not
    above the diagonal of a causal softmax.
    """
    takes_part = read
    if logits.queries > 0:
        takes_part = takes_part & (col <= (row % logits.queries)[:, None])
    if mask_ptr is not None:
        takes_part = takes_part & _load_shared(mask_ptr, row, col, read, cols, logits.mask)
    return takes_part


@triton.jit
def _load_shared(ptr, row, col, read, cols: tl.constexpr, operand: tl.constexpr):
    """Load the values of a mask or bias for a tile of x.

    A mask or bias with columns has one value per element of the tile. A mask or bias without
    columns has one value per row.
    """
    start = renumbered(row, operand.row).to(tl.int64)[:, None]
    if operand.has_columns:
        value = tl.load(ptr + (start * cols + col), read, 0)
    else:
        value = tl.load(ptr + start)
    return value
