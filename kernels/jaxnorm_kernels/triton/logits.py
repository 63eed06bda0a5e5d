"""What a softmax reads of its rows beside, or instead of, all their columns.

A mask and a bias are broadcast among the rows; `Shared` says how. A kernel reads their rows as they
are: the number of a row of x has a digit for each axis, and the operand's rows have some of them.
Above the diagonal of a causal softmax, nothing is read but the rest of a vector.
"""

import dataclasses

import triton
import triton.language as tl

from jaxnorm_kernels.specs import Shared, Spec
from jaxnorm_kernels.triton.tiles import tile_at

# With a predicate for each element, each would be read alone. As many as these have one: they are
# 16 bytes of the narrowest, a mask's.
_VECTOR = tl.constexpr(16)

#: How to renumber: for each axis the divisor that its digit has in one number, its size, and the
#: factor that it has in another.
Digits = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Where the rows of x find theirs in a mask or a bias.

    Attributes:
      has_columns: it is ``(n, cols)``; else ``(n, 1)``.
      row: from a row of x to its row.
      own, nth: from its row, and from a number among the rows of x that share that one, to what
        they add to the number of a row of x.
    """

    has_columns: bool
    row: Digits
    own: Digits
    nth: Digits


@dataclasses.dataclass(frozen=True)
class Logits:
    """What a kernel is compiled for, beside x.

    Attributes:
      scale: of x.
      queries: rows of a matrix; 0 without `causal`.
      mask, bias: None for one that the kernel does not have.
      drops: some elements take no part, as the mask or `queries` say.
      drops_zeros: so do others, whose output is 0.
    """

    scale: float = 1.0
    queries: int = 0
    mask: Operand | None = None
    bias: Operand | None = None
    drops: bool = False
    drops_zeros: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but x."""
        return self == Logits()


def of(spec: Spec) -> Logits:
    """That of a call."""
    has_bias = spec.logits_bias_dtype is not None
    return Logits(
        scale=spec.logits_scale,
        queries=spec.queries if spec.causal else 0,
        mask=_operand(spec.mask_rows) if spec.reads_mask else None,
        bias=_operand(spec.logits_bias_rows) if has_bias else None,
        drops=spec.causal or spec.reads_mask,
        drops_zeros=spec.has_mask and not spec.reads_mask,
    )


def sums_columns(spec: Spec) -> bool:
    """Whether a backward returns the gradient of a bias that has columns."""
    shared = None if spec.logits_bias_dtype is None else spec.logits_bias_rows
    return spec.direction == "bwd" and shared is not None and shared.has_columns


def _operand(shared: Shared | None) -> Operand:
    assert shared is not None  # or `supports` refuses it
    row: Digits = ()
    parts: dict[bool, Digits] = {True: (), False: ()}
    of_x, inside = 1, {True: 1, False: 1}
    for size, own in reversed(shared.segments):
        row += (of_x, size, inside[True]) if own else ()
        parts[own] += (inside[own], size, of_x)
        of_x, inside[own] = of_x * size, inside[own] * size
    return Operand(shared.has_columns, row, own=parts[True], nth=parts[False])


@triton.jit
def renumbered(number, digits: tl.constexpr):
    """The number that has these digits of `number`."""
    result = number * 0
    for i in tl.static_range(len(digits) // 3):
        result += number // digits[3 * i] % digits[3 * i + 1] * digits[3 * i + 2]
    return result


@triton.jit
def load_logits(
    x_ptr,
    mask_ptr,
    bias_ptr,
    first_row,
    first_col,
    rows,
    cols: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    logits: tl.constexpr,
    eviction: tl.constexpr = "",
):
    """z = scale x + bias of a tile in float32, -inf where it takes no part; and where it does."""
    row, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
    read = _read(row, col, exists, logits)
    z = tl.load(x_ptr + start + col, read, float("-inf"), eviction_policy=eviction).to(tl.float32)
    kept = exists
    if not logits.is_plain:
        if logits.scale != 1.0:
            z *= logits.scale
        if bias_ptr is not None:
            z += _load_shared(bias_ptr, row, col, read, cols, logits.bias).to(tl.float32)
        kept = _kept(mask_ptr, row, col, read, cols, logits)
        z = tl.where(kept, z, float("-inf"))
    return z, kept


@triton.jit
def load_rows_of_logits(
    x_ptr,
    mask_ptr,
    bias_ptr,
    first_row,
    rows,
    cols: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    pieces: tl.constexpr,
    logits: tl.constexpr,
):
    """Of whole rows: a tuple of `pieces` tiles, side by side, for each result."""
    zs, keeps = (), ()
    for i in tl.static_range(pieces):
        z, kept = load_logits(
            x_ptr, mask_ptr, bias_ptr, first_row, i * block, rows, cols, tile_rows, block, logits
        )
        zs += (z,)
        keeps += (kept,)
    return zs, keeps


@triton.jit
def load_output(
    y_ptr, row, start, col, exists, log: tl.constexpr, logits: tl.constexpr, eviction: tl.constexpr
):
    """y of a tile in float32, and that of what takes no part where it is not read."""
    read = _read(row, col, exists, logits)
    nothing: tl.constexpr = float("-inf") if log and not logits.is_plain else 0.0
    return tl.load(y_ptr + start + col, read, nothing, eviction_policy=eviction).to(tl.float32)


@triton.jit
def load_cotangent(
    dy_ptr,
    mask_ptr,
    row,
    start,
    col,
    exists,
    cols: tl.constexpr,
    logits: tl.constexpr,
    eviction: tl.constexpr,
):
    """dy of a tile in float32, 0 where it takes no part."""
    read = _read(row, col, exists, logits)
    d = tl.load(dy_ptr + start + col, read, 0.0, eviction_policy=eviction).to(tl.float32)
    if logits.drops:
        d = tl.where(_kept(mask_ptr, row, col, read, cols, logits), d, 0.0)
    return d


@triton.jit
def drop_zeros(d, y, logits: tl.constexpr):
    """d, and 0 where y is 0, if that says what takes no part."""
    if logits.drops_zeros:
        d = tl.where(y == 0.0, 0.0, d)
    return d


@triton.jit
def only_kept(y, kept, log: tl.constexpr, logits: tl.constexpr):
    """y, and 0 (or -inf) for what takes no part, in a row of NaN, too."""
    if logits.drops:
        y = tl.where(kept, y, float("-inf") if log else 0.0)
    return y


@triton.jit
def scaled(dz, logits: tl.constexpr):
    """dx."""
    if logits.scale != 1.0:
        dz *= logits.scale
    return dz


@triton.jit
def columns_of(first_row, rows, cols: tl.constexpr, tile_rows: tl.constexpr, logits: tl.constexpr):
    """How many columns there are up to the diagonal in the rows of a tile."""
    end = cols
    if logits.queries > 0:
        row = tl.minimum(first_row + tl.arange(0, tile_rows), rows - 1)
        end = tl.minimum(tl.max(row % logits.queries, axis=0) + 1, cols)
    return end


@triton.jit
def looped_total(
    y_ptr,
    dy_ptr,
    mask_ptr,
    first_row,
    rows,
    cols: tl.constexpr,
    log: tl.constexpr,
    logits: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    """sum(d y) or sum(d) of rows that are read block after block: `(tile_rows, 1)`."""
    terms = tl.zeros([tile_rows, block], tl.float32)
    for first_col in tl.range(0, columns_of(first_row, rows, cols, tile_rows, logits), block):
        row, start, col, exists = tile_at(first_row, first_col, rows, cols, tile_rows, block)
        d = load_cotangent(dy_ptr, mask_ptr, row, start, col, exists, cols, logits, "evict_last")
        if log:
            terms += d
        else:
            y = load_output(y_ptr, row, start, col, exists, log, logits, "evict_last")
            terms += drop_zeros(d, y, logits) * y
    return tl.sum(terms, axis=1)[:, None]


@triton.jit
def _read(row, col, exists, logits: tl.constexpr):
    """Of the elements that exist, those that are read: vectors that begin up to the diagonal."""
    if logits.queries > 0:
        exists = exists & (col // _VECTOR * _VECTOR <= (row % logits.queries)[:, None])
    return exists


@triton.jit
def _kept(mask_ptr, row, col, read, cols: tl.constexpr, logits: tl.constexpr):
    """Which elements take part."""
    kept = read
    if logits.queries > 0:
        kept = kept & (col <= (row % logits.queries)[:, None])
    if mask_ptr is not None:
        kept = kept & _load_shared(mask_ptr, row, col, read, cols, logits.mask)
    return kept


@triton.jit
def _load_shared(ptr, row, col, read, cols: tl.constexpr, operand: tl.constexpr):
    """Of an operand that is broadcast among the rows: of each element, or of each row."""
    own = renumbered(row, operand.row).to(tl.int64)[:, None]
    offset = own * cols + col
    return tl.load(ptr + offset, read, 0) if operand.has_columns else tl.load(ptr + own)
