"""Masks, biases and causal masks of a softmax, and the part of a row that it loads.

A mask and a bias are broadcast over the rows (`broadcast`), and loaded without expanding them. A
causal softmax loads nothing above the diagonal except the rest of a vector.
"""

import dataclasses

import triton
import triton.language as tl

from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import tiles
from jaxnorm_kernels.triton.tiles import Operand, renumbered, tile_at, zeros

# If each element had its own predicate, each would be loaded separately. So this many elements
# share a predicate: 16 bytes of the narrowest array, a mask.
_VECTOR = tl.constexpr(16)


@dataclasses.dataclass(frozen=True)
class Logits:
    """The compile-time parameters of a kernel, besides the tile sizes.

    Attributes:
      log: True for log_softmax, False for softmax.
      scale: the scale of x.
      queries: the number of rows of a matrix; 0 without `causal`.
      mask, bias: how the array is broadcast, or None if the kernel does not take it.
      drops: True if elements may be excluded by the mask or by `queries`.
      drops_zeros: True if elements whose output is 0 count as excluded too.
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
        """True if the logits are x itself."""
        return self == Logits(log=self.log, renormalises=self.renormalises)


def of(spec: Spec) -> Logits:
    """Return the compile-time parameters of a call."""
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


def sums_columns(spec: Spec) -> bool:
    """Return True if a backward pass computes the gradient of a bias that has columns."""
    shared = None if spec.softmax.logits_bias_dtype is None else spec.softmax.logits_bias_rows
    return spec.direction == "bwd" and shared is not None and shared.has_columns


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
    """Return scale x + bias of a tile in float32 (-inf if excluded), and which are included."""
    row, start, col, exists = tile
    read = _read(row, col, exists, logits)
    z = tl.load(x_ptr + start + col, read, float("-inf"), eviction_policy=eviction).to(tl.float32)
    takes_part = exists
    if not logits.is_plain:
        if logits.scale != 1.0:
            z *= logits.scale
        if bias_ptr is not None:
            z += _load_shared(bias_ptr, row, col, read, cols, logits.bias).to(tl.float32)
        takes_part = _takes_part(mask_ptr, row, col, read, cols, logits)
        z = tl.where(takes_part, z, float("-inf"))
    return z, takes_part


@triton.jit
def load_output(y_ptr, tile, logits: tl.constexpr, eviction: tl.constexpr = ""):
    """Load y of a tile in float32. Excluded elements that are not loaded become 0, or -inf."""
    row, start, col, exists = tile
    read = _read(row, col, exists, logits)
    nothing: tl.constexpr = float("-inf") if logits.log and not logits.is_plain else 0.0
    return tl.load(y_ptr + start + col, read, nothing, eviction_policy=eviction).to(tl.float32)


@triton.jit
def load_cotangent(
    dy_ptr, mask_ptr, tile, logits: tl.constexpr, cols: tl.constexpr, eviction: tl.constexpr = ""
):
    """Load d of a tile in float32. Excluded elements become 0."""
    row, start, col, exists = tile
    read = _read(row, col, exists, logits)
    d = tl.load(dy_ptr + start + col, read, 0.0, eviction_policy=eviction).to(tl.float32)
    if logits.drops:
        d = tl.where(_takes_part(mask_ptr, row, col, read, cols, logits), d, 0.0)
    return d


@triton.jit
def drop_zeros(d, y, logits: tl.constexpr):
    """Return d, with 0 where y is 0 if `drops_zeros` is set."""
    if logits.drops_zeros:
        d = tl.where(y == 0.0, 0.0, d)
    return d


@triton.jit
def masked(y, takes_part, logits: tl.constexpr):
    """Return y with excluded elements replaced by 0 (or -inf), even in a row of NaN."""
    if logits.drops:
        y = tl.where(takes_part, y, float("-inf") if logits.log else 0.0)
    return y


@triton.jit
def scaled(dz, logits: tl.constexpr):
    """Return dx, given dz."""
    if logits.scale != 1.0:
        dz *= logits.scale
    return dz


@triton.jit
def columns_of(first_row, rows, logits: tl.constexpr, tiling: tl.constexpr):
    """Return the number of columns that the tile's rows have up to the diagonal, at most."""
    end = tiling.cols
    if logits.queries > 0:
        row = tl.minimum(first_row + tl.arange(0, tiling.tile_rows), rows - 1)
        end = tl.minimum(tl.max(row % logits.queries, axis=0) + 1, tiling.cols)
    return end


@triton.jit
def term_of_total(y, d, logits: tl.constexpr):
    """Return the terms whose sum over a row is the *total*, before a division by sum(y).

    The total is sum(d y) / sum(y) for softmax, and sum(d) for log_softmax.
    """
    return d if logits.log else d * y


@triton.jit
def total_of(terms, weights, logits: tl.constexpr):
    """Return each row's total, ``(tile_rows, 1)``, from the terms and y added up over blocks."""
    total = tl.sum(terms, axis=1)[:, None]
    if logits.renormalises:
        weight = tl.sum(weights, axis=1)[:, None]
        total /= tl.where(weight == 0.0, 1.0, weight)
    return total


@triton.jit
def cotangent_of_logits(y, d, total, logits: tl.constexpr):
    """Return dz = y (d - total), or d - exp(y) total for log_softmax.

    A total of NaN must not reach excluded elements, whose y or exp(y) is 0.
    """
    multiple = tl.exp(y) * total if logits.log else y * (d - total)
    if logits.drops or logits.drops_zeros:
        multiple = tl.where(y == (float("-inf") if logits.log else 0.0), 0.0, multiple)
    return d - multiple if logits.log else multiple


@triton.jit
def looped_total(
    y_ptr, dy_ptr, mask_ptr, first_row, rows, logits: tl.constexpr, tiling: tl.constexpr
):
    """Return each row's total, `(tile_rows, 1)`, by loading the rows block after block."""
    # In unaligned rows, each value has a separate address. If the compiler computes them before a
    # loop whose end it does not know, registers spill.
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
    """Return True for existing elements that are loaded: vectors that begin up to the diagonal."""
    if logits.queries > 0:
        exists = exists & (col // _VECTOR * _VECTOR <= (row % logits.queries)[:, None])
    return exists


@triton.jit
def _takes_part(mask_ptr, row, col, read, cols: tl.constexpr, logits: tl.constexpr):
    """Return True for elements that the softmax includes."""
    takes_part = read
    if logits.queries > 0:
        takes_part = takes_part & (col <= (row % logits.queries)[:, None])
    if mask_ptr is not None:
        takes_part = takes_part & _load_shared(mask_ptr, row, col, read, cols, logits.mask)
    return takes_part


@triton.jit
def _load_shared(ptr, row, col, read, cols: tl.constexpr, operand: tl.constexpr):
    """Load an operand that is broadcast over the rows: a value for each element, or each row."""
    start = renumbered(row, operand.row).to(tl.int64)[:, None]
    if operand.has_columns:
        value = tl.load(ptr + (start * cols + col), read, 0)
    else:
        value = tl.load(ptr + start)
    return value
