"""RMSNorm of attention heads, and the rotation of their pairs of columns (RoPE).

For a row of N elements, let G = scale + scale_offset and r = 1 / sqrt(mean(x^2) + epsilon). The
first R columns of the row are rotated. They form pairs (a, b): columns i and i + R / 2, or columns
2i and 2i + 1. The other columns are not rotated:

    n = x r G
    y = (a cos - b sin, b cos + a sin)    for each pair (a, b) of n
    y = n                                 in the other columns

The backward pass uses the transpose of the rotation: back(v) is (a cos + b sin, b cos - a sin) for
each pair (a, b) of v. With d = back(dy):

    from the output     n = back(y) / (cos^2 + sin^2),         xh = n / G,   c2 = mean(d n)
    from the input      xh = x r,                                            c2 = mean(d G xh)
    both                dx = r (d G - xh c2),                                dscale = sum_rows(d xh)

If cos^2 + sin^2 is 0 for a pair, n cannot be recovered, and is taken to be 0. As in other norms,
the forward and the backward pass replace a |G| that is smaller than `Spec.scale_floor` by
`Spec.scale_floor`. |xh| is always clipped to its true bound sqrt(N), because it may have a large
error: back(y) mixes the rounding errors of the two columns of a pair. If one column has a small G,
the division by this G magnifies the error from the other column. |y| is clipped to the largest
finite number (`Spec.y_limit`).

A row is an attention head. Heads are short, so a program holds several whole rows. It holds a row
as two or three arrays, called *parts*: the first columns of all pairs, the second columns of all
pairs, and (if there are any) the columns that are not rotated. The two columns of a pair, and their
cosine and sine, are then in the same thread. In the backward pass, programs loop over the rows and
add up dscale in registers. The sums of the programs are added outside the kernel in a fixed order.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
import triton
import triton.language as tl

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.triton import norm_parameters, tiles
from jaxnorm_kernels.triton import schedule as schedules
from jaxnorm_kernels.triton.norm_backward import parameter_gradients
from jaxnorm_kernels.triton.norm_parameters import (
    Norm,
    gain_and_inverse,
    group_rows,
    of_groups,
)
from jaxnorm_kernels.triton.schedule import Schedule
from jaxnorm_kernels.triton.tiles import Digits, clipped, columns_at, of_rows, renumbered


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The compile-time parameters of a rotation.

    Attributes:
      cols: the number of columns of a row.
      pairs: the number of pairs of columns that are rotated. The pairs are formed from the first 2
        * `pairs` columns of a row.
      interleaved: True if a pair is two adjacent columns. False if it is column i of the first half
        and column i of the second half of the rotated columns.
      table_row: the rule that converts the index of a row of x to the index of a row of the tables;
        see `tiles.Digits`.
      tile_shares: True if all rows of a tile use the same row of the tables.
    """

    cols: int
    pairs: int
    interleaved: bool
    table_row: Digits
    tile_shares: bool

    @classmethod
    def of(cls, spec: Spec, schedule: Schedule) -> "Rotation":
        """Return the compile-time parameters of the rotation in the call `spec`."""
        table = spec.norm.table_rows
        assert table is not None
        # Neighbouring rows, usually the heads of one position, share a row of the tables. If all
        # rows of a tile share a row of the tables, this row is loaded only once for the tile. If
        # groups of rows have separate scales, a tile never spans two groups.
        *_, (run, has_axis) = table.segments or [(0, False)]
        run = math.gcd(run, spec.rows // spec.groups if spec.groups > 1 else 0)
        shares = not has_axis and run % schedule.tile_rows == 0
        return cls(
            cols=spec.cols,
            pairs=spec.norm.rotated // 2,
            interleaved=spec.norm.interleaved,
            table_row=tiles.operand_of(table).row,
            tile_shares=shares or table.rows == 1,
        )

    @functools.cached_property
    def block(self) -> int:
        """The number of pairs of a row, rounded up to a power of two."""
        return triton.next_power_of_2(self.pairs)

    @functools.cached_property
    def spans(self) -> tuple[int, ...]:
        """The *spans* of a row. A span is a range of adjacent columns that is loaded at once.

        The tuple has three consecutive numbers for each span: its first column, its size, and its
        size rounded up to a power of two.
        """
        pairs, block, rest = self.pairs, self.block, self.cols - 2 * self.pairs
        head = (0, pairs, block, pairs, pairs, block)
        if self.interleaved:
            head = (0, 2 * pairs, 2 * block)
        return head + ((2 * pairs, rest, triton.next_power_of_2(rest)) if rest else ())


def norm_rope_fwd(operands: Operands, spec: Spec, *, schedule: Schedule | None = None) -> Results:
    """Run a forward pass; see `Implementation.forward`. `schedule` replaces the default."""
    schedule = schedule or schedules.choose(spec)
    stat = jax.ShapeDtypeStruct((spec.rows,), np.float32) if spec.has_stats else None
    y, *stats = schedule.launch(
        _norm_rope_fwd,
        spec,
        name="jaxnorm_rms_norm_rope_fwd",
        outputs={
            "y_ptr": jax.ShapeDtypeStruct(operands.x.shape, spec.y_dtype),
            "rstd_ptr": stat,
        },
        x_ptr=operands.x,
        scale_ptr=operands.scale,
        cos_ptr=operands.cos,
        sin_ptr=operands.sin,
        scale_rows=group_rows(operands.scale, spec),
        norm=_norm(spec),
        rotation=Rotation.of(spec, schedule),
    )
    return Results(y, stats=tuple(stats))


def norm_rope_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, schedule: Schedule | None = None
) -> Operands:
    """Run a backward pass; see `Implementation.backward`. `schedule` replaces the default."""
    saved, scale = residuals.saved, residuals.scale
    (rstd,) = residuals.stats
    schedule = schedule or schedules.choose(spec)
    _, row_programs = schedule.persistent_grid(spec)
    partial = jax.ShapeDtypeStruct((row_programs * spec.groups, spec.cols), np.float32)
    dx, *partials = schedule.launch(
        _norm_rope_bwd,
        spec,
        name="jaxnorm_rms_norm_rope_bwd",
        outputs={
            "dx_ptr": jax.ShapeDtypeStruct(saved.shape, spec.x_dtype),
            "dscale_ptr": None if scale is None else partial,
        },
        grid=(spec.groups, row_programs),
        saved_ptr=saved,
        dy_ptr=cotangents.y,
        rstd_ptr=rstd,
        scale_ptr=scale,
        cos_ptr=residuals.cos,
        sin_ptr=residuals.sin,
        scale_rows=group_rows(scale, spec),
        norm=_norm(spec),
        rotation=Rotation.of(spec, schedule),
        stages=schedule.stages,
    )
    dscale, _ = parameter_gradients(partials, (scale, None), spec)
    return Operands(dx, scale=dscale)


def _norm(spec: Spec) -> Norm:
    return dataclasses.replace(norm_parameters.of(spec), x_hat_limit=math.sqrt(spec.cols))


@triton.jit
def _norm_rope_fwd(
    x_ptr,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rstd_ptr,
    rows,
    scale_rows,
    norm: tl.constexpr,
    rotation: tl.constexpr,
    tiling: tl.constexpr,
):
    """Normalise and rotate a tile of rows.

    `scale_rows` is the number of consecutive rows of x that share a row of the scale, or None if
    all rows share the scale.
    """
    first_row = tl.program_id(0) * tiling.tile_rows
    row = first_row + tl.arange(0, tiling.tile_rows)
    start, exists = row.to(tl.int64)[:, None] * tiling.cols, (row < rows)[:, None]
    x = _load_row(x_ptr, start, exists, rotation)
    cos, sin = _load_tables(cos_ptr, sin_ptr, first_row, rotation, tiling)
    scale = of_groups(scale_ptr, row, rows, scale_rows, tiling.cols)
    g, _ = _gains(scale, norm, rotation, 1)
    squares = ()
    for i in tl.static_range(len(x)):
        squares += (x[i] * x[i],)
    rstd = tl.rsqrt(_row_sums(squares) / tiling.cols + norm.epsilon)
    n = ()
    for i in tl.static_range(len(x)):
        n += (x[i] * rstd[:, None] * g[i],)
    _store_row(y_ptr, _rotated(n, cos, sin), start, exists, rotation)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _norm_rope_bwd(
    saved_ptr,
    dy_ptr,
    rstd_ptr,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    dscale_ptr,
    rows,
    scale_rows,
    norm: tl.constexpr,
    rotation: tl.constexpr,
    tiling: tl.constexpr,
    stages: tl.constexpr,
):
    """Store dx, and the sum of d * xh over the program's rows; see the module docstring.

    Groups of rows may have separate scales, so a program processes only rows of one group.
    """
    cols: tl.constexpr = tiling.cols
    tile_rows: tl.constexpr = tiling.tile_rows
    group, groups = tl.program_id(0), tl.num_programs(0)
    program, programs = tl.program_id(1), tl.num_programs(1)
    scale, begin, end = (scale_ptr, None), 0, rows
    if scale_rows is not None:
        scale = (scale_ptr, group.to(tl.int64) * cols)
        begin, end = group * scale_rows, (group + 1) * scale_rows
    g, inverse = _gains(scale, norm, rotation, tile_rows)
    dscale = _zeros(rotation, tile_rows)
    begin += program * tile_rows
    for first_row in tl.range(begin, end, programs * tile_rows, num_stages=stages):
        row = first_row + tl.arange(0, tile_rows)
        start, exists = row.to(tl.int64)[:, None] * cols, (row < end)[:, None]
        rstd = of_rows(rstd_ptr, row, end)
        cos, sin = _load_tables(cos_ptr, sin_ptr, first_row, rotation, tiling)
        d = _rotated(_load_row(dy_ptr, start, exists, rotation), cos, -sin)
        saved = _load_row(saved_ptr, start, exists, rotation)
        if norm.from_output:
            saved = _turned_back(saved, cos, sin, norm)
        dgs, xhs, terms, sums = (), (), (), ()
        for i in tl.static_range(len(d)):
            dg = d[i] * g[i]
            if norm.from_output:
                xh = clipped(saved[i] * inverse[i], norm.x_hat_limit)
                terms += (d[i] * saved[i],)
            else:
                xh = saved[i] * rstd
                terms += (dg * xh,)
            dgs += (dg,)
            xhs += (xh,)
            sums += (dscale[i] + d[i] * xh,)
        dscale = sums
        c2 = _row_sums(terms)[:, None] / cols
        dx = ()
        for i in tl.static_range(len(d)):
            dx += (dgs[i] * rstd - xhs[i] * (c2 * rstd),)
        _store_row(dx_ptr, dx, start, exists, rotation)
    if dscale_ptr is not None:
        totals = ()
        for i in tl.static_range(len(dscale)):
            totals += (tl.sum(dscale[i], axis=0)[None, :],)
        partial_row = (program * groups + group).to(tl.int64)
        whole = tl.full([1, 1], True, tl.int1)
        _store_row(dscale_ptr, totals, partial_row * cols, whole, rotation)


@triton.jit
def _rotated(parts, cos, sin):
    """Rotate rows, given as a tuple of parts (see the module docstring).

    With -sin in place of sin, this is the transpose of the rotation.
    """
    a, b = parts[0], parts[1]
    rotated = (a * cos - b * sin, b * cos + a * sin)
    rotated += parts[2:]
    return rotated


@triton.jit
def _turned_back(y, cos, sin, norm: tl.constexpr):
    """Recover the norm's result n from y: rotate y back, and divide by cos^2 + sin^2.

    If cos^2 + sin^2 is 0 for a pair, n is taken to be 0 there.
    """
    parts = ()
    for i in tl.static_range(len(y)):
        parts += (clipped(y[i], norm.y_limit),)
    parts = _rotated(parts, cos, -sin)
    square = cos * cos + sin * sin
    is_zero = square == 0.0
    divisor = tl.where(is_zero, 1.0, square)
    a = tl.where(is_zero, 0.0, parts[0] / divisor)
    b = tl.where(is_zero, 0.0, parts[1] / divisor)
    n = (a, b)
    n += parts[2:]
    return n


@triton.jit
def _row_sums(parts):
    """Return each row's sum. `parts` is a tuple of the rows' parts (see the module docstring)."""
    sums = tl.sum(parts[0] + parts[1], axis=1)
    if len(parts) > 2:
        sums += tl.sum(parts[2], axis=1)
    return sums


@triton.jit
def _zeros(rotation: tl.constexpr, tile_rows: tl.constexpr):
    """Return rows of zeros, as a tuple of parts (see the module docstring)."""
    zeros = ()
    for i in tl.static_range(len(rotation.spans) // 3):
        zeros += (tl.full([tile_rows, rotation.spans[3 * i + 2]], 0.0, tl.float32),)
    return _parts(zeros, rotation)


@triton.jit
def _gains(scale, norm: tl.constexpr, rotation: tl.constexpr, tile_rows: tl.constexpr):
    """Return two tuples: one of G = scale + scale_offset, and one of 1 / G.

    Each tuple has an array for each part of a row (see the module docstring). An array has
    `tile_rows` equal rows. Without a scale, the tuples have the number 1 instead of arrays.
    """
    g, inverse = (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)
    if scale[0] is not None:
        g, inverse = (), ()
        for i in tl.static_range(len(rotation.spans) // 3):
            col = columns_at(rotation.spans[3 * i], rotation.spans[3 * i + 2], tile_rows)
            of_span = gain_and_inverse(scale, col, rotation.cols, norm)
            g += (of_span[0],)
            inverse += (of_span[1],)
        g, inverse = _parts(g, rotation), _parts(inverse, rotation)
    return g, inverse


@triton.jit
def _load_tables(cos_ptr, sin_ptr, first_row, rotation: tl.constexpr, tiling: tl.constexpr):
    """Load cos and sin of all pairs, and return them in float32.

    Each array has one row if all rows of the tile use the same row of the tables. Otherwise, it has
    one row for each row of the tile.
    """
    rows: tl.constexpr = 1 if rotation.tile_shares else tiling.tile_rows
    # A tile may have rows beyond the last row of x. Even for these rows, `renumbered` returns an
    # index inside the tables: it splits an index into positions on several axes, and takes each
    # position modulo the size of its axis.
    row = renumbered(first_row + tl.arange(0, rows), rotation.table_row)
    pair = tl.arange(0, rotation.block)[None, :]
    at = row.to(tl.int64)[:, None] * rotation.pairs + pair
    cos = tl.load(cos_ptr + at, pair < rotation.pairs, 0.0, eviction_policy="evict_last")
    sin = tl.load(sin_ptr + at, pair < rotation.pairs, 0.0, eviction_policy="evict_last")
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _load_row(ptr, start, exists, rotation: tl.constexpr):
    """Load rows, and return a tuple of float32 parts. Elements outside the array are 0."""
    spans = ()
    for i in tl.static_range(len(rotation.spans) // 3):
        col, is_there = _span(i, exists, rotation)
        spans += (tl.load(ptr + start + col, is_there, 0.0).to(tl.float32),)
    return _parts(spans, rotation)


@triton.jit
def _store_row(ptr, parts, start, exists, rotation: tl.constexpr):
    """Store rows, given as a tuple of parts. Elements outside the array are not stored."""
    spans = parts
    if rotation.interleaved:
        a, b = parts[0], parts[1]
        spans = (tl.reshape(tl.join(a, b), [a.shape[0], 2 * a.shape[1]]),)
        spans += parts[2:]
    for i in tl.static_range(len(spans)):
        col, is_there = _span(i, exists, rotation)
        tl.store(ptr + start + col, spans[i], mask=is_there)


@triton.jit
def _parts(spans, rotation: tl.constexpr):
    """Convert a tuple of spans to a tuple of parts.

    A span is a range of columns that is loaded at once (see `Rotation.spans`). The parts are the
    first columns of all pairs, the second columns of all pairs, and the columns that are not
    rotated.
    """
    if rotation.interleaved:
        head = spans[0]
        a, b = tl.split(tl.reshape(head, [head.shape[0], head.shape[1] // 2, 2]))
        parts = (a, b)
        parts += spans[1:]
    else:
        parts = spans
    return parts


@triton.jit
def _span(i: tl.constexpr, exists, rotation: tl.constexpr):
    """Return the columns of span number `i`, and a mask of the elements inside the array.

    A span is a range of columns that is loaded at once (see `Rotation.spans`).
    """
    first: tl.constexpr = rotation.spans[3 * i]
    size: tl.constexpr = rotation.spans[3 * i + 1]
    block: tl.constexpr = rotation.spans[3 * i + 2]
    col = columns_at(first, block)
    if size != block:
        exists = exists & (col < first + size)
    return col, exists
