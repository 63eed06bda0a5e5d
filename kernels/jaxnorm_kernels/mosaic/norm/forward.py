"""Forward passes of LayerNorm and RMSNorm.

LayerNorm subtracts the mean; in RMSNorm, mean is 0::

    G = scale + scale_offset        r = 1 / sqrt(mean((x - mean)^2) + epsilon)
    y = (x - mean) r G + bias       or activation((x - mean) r G + bias)

Operations with a residual add it before or after the norm. norm_add_norm has two norms with
different scales::

    norm             y = norm(x)
    add_norm         h = x + residual          y = norm(h)
    norm_add         y = residual + norm(x)
    norm_add_norm    h = residual + norm(x)    y = norm(h)
    scaled_add_norm  h = residual + branch_scale * x      y = norm(h)

h has the residual's dtype. In norm_add, y has this dtype, too.
With a gate, y is rounded once, after the multiplication::

    norm_gated       y = norm(x) * activation(gate)    or y = norm(x * activation(gate))

The variance is never computed as E[x^2] - E[x]^2, which suffers from cancellation. Instead, a row
in registers is reduced twice: first for the mean, then for the sum of (x - mean)^2. If several
warps share a row, each of them reduces a part of the row. Part p has n_p elements and the mean
mean_p, and M_p = sum((x - mean_p)^2) over the part. The parts are merged as by Chan, Golub and
LeVeque (1979)::

    mean = sum(n_p mean_p) / n      sum((x - mean)^2) = sum(M_p + n_p (mean_p - mean)^2)
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic.device.launch import present, required, split
from jaxnorm_kernels.mosaic.device.layouts import Ref, widen
from jaxnorm_kernels.mosaic.device.registers import rounded
from jaxnorm_kernels.mosaic.loops.each_row import LoadedRow, Steps, each_row
from jaxnorm_kernels.mosaic.loops.forward import ForwardRefs, param_of_group, run, store_stats
from jaxnorm_kernels.mosaic.norm.elementwise import activation_of, norm_columns, norm_output
from jaxnorm_kernels.mosaic.rows.tiles import Fragments, SplitRow, Stat, Tile
from jaxnorm_kernels.mosaic.schedules import forward as schedules
from jaxnorm_kernels.mosaic.schedules.forward import TileSchedule
from jaxnorm_kernels.specs import Op, Spec


def norm_fwd(operands: Operands, spec: Spec, *, schedule: TileSchedule | None = None) -> Results:
    """Run the forward pass of a norm; see `Implementation.forward`.

    The statistics that it returns are float32.

    Args:
      operands: arrays of 16-bit or 32-bit floats.
      spec: the call's spec.
      schedule: replaces the default schedule.
    """
    schedule = required(schedule or schedules.choose(spec), spec)
    y_dtype = _residual_dtype(spec) if spec.op == "norm_add" else spec.y_dtype
    (y, *h), stats = run(
        functools.partial(_in_registers, spec, schedule.params_first),
        schedule.rows_of(spec),
        spec.rows,
        operands=present(operands.x, operands.residual, operands.gate),
        params=present(operands.scale, operands.bias, operands.next_scale, operands.branch_scale),
        results=[y_dtype, _residual_dtype(spec)] if "h" in spec.outputs else [y_dtype],
        stats=sum(1 + norm.returns_mean for norm in spec.norms) if spec.has_stats else 0,
        exchanged=3,
        name=spec.op.replace("norm", "layer_norm" if spec.norm.subtract_mean else "rms_norm")
        + "_fwd",
    )
    return Results(y, h[0] if h else None, tuple(stats))


def _residual_dtype(spec: Spec) -> np.dtype:
    if spec.norm.residual_dtype is None:
        raise ValueError(f"{spec.op} needs a residual, and {spec} has none")
    return spec.norm.residual_dtype


#: Parameters in registers, such as G = scale + scale_offset and the bias. There is one list for
#: each fragment (range of columns) of a row. Each list contains one array per parameter.
Columns = list[list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class _Params:
    """The parameters of a call: first the parameters of each norm, then branch_scale, if present.

    Attributes:
      tile: how a block distributes its rows over threads.
      rows: number of rows of the call.
      norms: a list with the spec of each norm. If the call has a branch_scale, the list has one
        more entry for it, which is None.
      refs: a list for each entry of `norms`. The list of a norm contains the refs of its scale and
        bias. The list of branch_scale contains one ref.
    """

    tile: Tile
    rows: int
    norms: Sequence[Spec | None]
    refs: Sequence[Sequence[Ref]]

    @classmethod
    def of(cls, tile: Tile, spec: Spec, refs: Sequence[Ref]) -> "_Params":
        norms = [*spec.norms, *[None] * (spec.norm.branch_scale_dtype is not None)]
        counts = [
            1 if n is None else len(present(n.norm.scale_dtype, n.norm.bias_dtype)) for n in norms
        ]
        return cls(tile, spec.rows, norms, split(refs, *counts)[:-1])

    def load(self, k: int, index: Callable[[], Any]) -> Columns:
        """Load the parameters in ``refs[k]``.

        The result has one list per parameter, which contains one array per fragment. (The method
        `columns` returns one list per fragment instead.)

        ``index()`` returns the index of the row (or rows) to which the parameters are applied. If
        each group of rows has its own parameters, the index selects the group (see
        `param_of_group`).
        """
        return [self.tile.load_param(param_of_group(ref, self.rows, index)) for ref in self.refs[k]]

    def load_all(self) -> list[Columns]:
        """Load all parameters. All rows of a block use the same parameters."""
        return [
            self.load(k, lambda: self.tile.first_row(self.rows)) for k in range(len(self.norms))
        ]

    def columns(self, loaded: Columns, k: int) -> Columns:
        """Return the parameters ``refs[k]`` in float32, as they are used in the computation.

        `loaded` is the result of ``load(k, ...)``. If ``norms[k]`` is the spec of a norm, the
        parameters are G = scale + scale_offset and the bias; absent parameters are left out. If
        ``norms[k]`` is None, the only parameter is branch_scale.
        """
        norm = self.norms[k]
        if norm is None:
            return [[p.astype(jnp.float32) for p in fragment] for fragment in zip(*loaded)]
        columns = [norm_columns(fragment, norm) for fragment in zip(*loaded)]
        return columns or [[]] * len(self.tile.fragments())

    def prepare(self, loaded: Sequence[Columns]) -> list[Columns]:
        """Return the float32 parameters (see `columns`) for each entry of `refs`."""
        return [self.columns(params, k) for k, params in enumerate(loaded)]


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row in registers, with methods from which the operations are composed.

    Attributes:
      spec: the call's spec.
      tile: how a block distributes its rows over threads.
      loaded: the row, as a `LoadedRow`.
      scratch: shared memory for the exchange of statistics.
      columns: ``columns(k)`` returns G and the bias of norm number k, counted from 0. In a call
        with a branch_scale, there is only norm 0, and ``columns(1)`` returns the branch_scale.
      stats: statistics of the norms, appended as they are computed.
    """

    spec: Spec
    tile: Tile
    loaded: LoadedRow
    scratch: Sequence[Any]
    columns: Callable[[int], Columns]
    stats: list[Stat] = dataclasses.field(default_factory=list)

    def x(self) -> Fragments:
        """Return the elements to normalise: x, x + residual or x * activation(gate), in float32."""
        return self.loaded.read(0)

    def other(self) -> Fragments:
        """Return the row's second array: h in add_norm, the gate in norm_gated, else the residual.

        The array is not converted to float32.
        """
        return self.loaded.read(1)

    def norm(self, read: Callable[[], Fragments], k: int = 0) -> Fragments:
        """Normalise the values that ``read()`` returns, with norm number `k` of the call."""
        spec, tile = self.spec.norms[k], self.tile
        rstd, mean = _row_statistics(tile, read, self.scratch, spec, self.loaded.step, k)
        self.stats.extend(present(rstd, mean)[: 1 + spec.returns_mean])
        return [
            norm_output(v, tile.broadcast(rstd, v), _broadcast(tile, mean, v), columns, spec)
            for v, columns in zip(read(), self.columns(k))
        ]

    def sum(self, values: Fragments) -> Fragments:
        """Return ``values + residual``, rounded to the residual's dtype."""
        sums = [_plus(self.tile, v, r) for v, r in zip(values, self.other())]
        return [rounded(v, _residual_dtype(self.spec)) for v in sums]

    def scaled_sum(self) -> Fragments:
        """Return ``branch_scale * x + residual``, rounded to the residual's dtype."""
        terms = zip(self.loaded.load(), self.columns(1))
        sums = [_plus(self.tile, x * scale, r) for (x, r), (scale,) in terms]
        return [rounded(v, _residual_dtype(self.spec)) for v in sums]

    def wide(self, h: Fragments) -> Fragments:
        """Convert h to float32."""
        return [_wide(self.tile, v) for v in h]


#: The results of an operation as pairs (name, values), in the order in which they are stored.
NamedResults = Iterator[tuple[str, Fragments]]


def _norm(row: _Row) -> NamedResults:
    yield "y", row.norm(row.x)


def _add_norm(row: _Row) -> NamedResults:
    yield "h", row.other()
    yield "y", row.norm(row.x)


def _norm_add(row: _Row) -> NamedResults:
    y = row.norm(row.x)
    yield "y", [_plus(row.tile, v, r) for v, r in zip(y, row.other())]


def _norm_add_norm(row: _Row) -> NamedResults:
    h = row.sum(row.norm(row.x))
    yield "h", h
    yield "y", row.norm(lambda: row.wide(h), 1)


def _scaled_add_norm(row: _Row) -> NamedResults:
    h = row.scaled_sum()
    yield "h", h
    # The norm uses h several times. Some tiles have too few registers for entire rows, and read x
    # again from shared memory for each use (`rereads`). Such a tile has no registers for h either,
    # so h is recomputed for each use.
    yield "y", row.norm(lambda: row.wide(row.scaled_sum() if row.tile.rereads else h))


def _norm_gated(row: _Row) -> NamedResults:
    y = row.norm(row.x)
    if row.spec.norm.norm_before_gate:
        y = [_gated(row.tile, v, gate, row.spec) for v, gate in zip(y, row.other())]
    yield "y", y


_OPERATIONS: dict[Op, Callable[[_Row], NamedResults]] = {
    "norm": _norm,
    "add_norm": _add_norm,
    "norm_add": _norm_add,
    "norm_add_norm": _norm_add_norm,
    "scaled_add_norm": _scaled_add_norm,
    "norm_gated": _norm_gated,
}


def _in_registers(spec: Spec, params_first: bool, tile: Tile, refs: ForwardRefs) -> None:
    """The kernel's body: load, normalise and store each row of the block."""

    def load(x: jax.Array, *other: jax.Array) -> tuple[jax.Array, ...]:
        """Return the arrays that the operation needs; `x` and `other` are the row operands.

        The first array contains the elements to normalise. Some operations need a second array for
        the steps after the norm, or as a result:

        * h in add_norm;
        * the gate in norm_gated, if the gate follows the norm;
        * the residual in other operations with a residual.
        """
        x = _wide(tile, x)
        if spec.op == "norm_gated" and not spec.norm.norm_before_gate:
            return (_gated(tile, x, *other, spec),)
        if spec.op != "add_norm":
            return x, *other
        h = rounded(_plus(tile, x, *other), _residual_dtype(spec))
        return _wide(tile, h), h

    params = _Params.of(tile, spec, refs.params)

    def finish(loaded: LoadedRow, ready: list[Columns] | None) -> None:
        def columns(k: int) -> Columns:
            return ready[k] if ready else params.columns(params.load(k, lambda: loaded.index), k)

        row = _Row(spec, tile, loaded, refs.scratch, columns)
        results = dict(zip("yh", refs.results))
        for name, values in _OPERATIONS[spec.op](row):
            if name in results:
                tile.store(results[name], loaded.index, values)
        store_stats(refs.stats, loaded.index, row.stats)

    first = (params.load_all, params.prepare) if params_first else ()
    each_row(tile, refs.operands, spec.rows, refs.scratch, Steps(load, finish, *first))


def _wide(tile: Tile, value: jax.Array) -> jax.Array:
    return widen(value, tile.layout)


def _plus(tile: Tile, x: jax.Array, residual: jax.Array) -> jax.Array:
    return x + _wide(tile, residual)


def _gated(tile: Tile, value: jax.Array, gate: jax.Array, spec: Spec) -> jax.Array:
    return value * activation_of(spec)(_wide(tile, gate))[0]


def _row_statistics(
    tile: Tile,
    read: Callable[[], Fragments],
    scratch: Sequence[Any],
    spec: Spec,
    step: Any,
    nth: int,
) -> tuple[Stat, Stat | None]:
    """Return r (rstd) and the mean of a row, for norm number `nth` of the call."""
    size = tile.part_sizes() if isinstance(tile, SplitRow) else float(spec.cols)
    mean = tile.sum(read()) / size if spec.norm.subtract_mean else None
    centred = read() if mean is None else [v - tile.broadcast(mean, v) for v in read()]
    square = tile.sum([jnp.square(v) for v in centred])
    if isinstance(tile, SplitRow):
        gather = functools.partial(tile.gather, scratch, step=step, nth=nth)
        mean, square = _merge(gather, size, mean, square, spec)
    return lax.rsqrt(square / spec.cols + spec.norm.epsilon), mean


def _merge(
    gather: Callable[..., list[jax.Array]],
    size: jax.Array | float,
    mean: Stat | None,
    square: Stat,
    spec: Spec,
) -> tuple[Stat | None, Stat]:
    """Merge the statistics of a row's parts. Return the row's mean and its sum of (x - mean)^2.

    Each warp has a part of the row, and `size` is the number of columns of this part. `mean` is the
    mean of this part, and `square` is the sum of (x - mean)^2 over the part. `gather` returns the
    values of all parts to every warp (`rows.exchange.Gather`).
    """
    if mean is None:
        (part_square,) = gather(square)
        return None, jnp.sum(part_square)
    if isinstance(size, float):
        part_mean, part_square = gather(mean, square)
    else:
        part_mean, part_square, size = gather(mean, square, size)
    mean = jnp.sum(size * part_mean) / spec.cols
    return mean, jnp.sum(part_square + size * jnp.square(part_mean - mean))


def _broadcast(tile: Tile, stat: Stat | None, like: jax.Array) -> jax.Array | None:
    return None if stat is None else tile.broadcast(stat, like)
