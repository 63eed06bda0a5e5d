"""Backward passes over rows that stream through a ring of shared memory.

A backward pass reads two arrays, reduces each row to one or two sums, and reads the row again to
write dx. Here a *persistent* block takes every n-th row. Each of its warpgroups owns a slice of the
columns and a ring of stages, which the copy engine (TMA) keeps filled with its slice of the rows to
come. The two reads of a row are both from shared memory, so that few registers live across the
exchange of row sums: the column sums (dscale, dbias), which a thread carries through all its rows,
have room. With `lag`, row k is reduced before row k - 1 is finished, which hides the exchange::

    for row k:   wait for its stages     reduce, publish the sums of each warp     (reduce_row)
                 read the sums of k-1    dx, column sums, refill its stages        (finish_row)

A slice is a number of *chunks*: one vector for each thread of the warpgroup. Where the slices leave
a rest of the row, each slice has one chunk more, its *tail*. Tails end with the row at the latest,
so their first columns may belong to another chunk too: reductions skip those (they are *stale*),
and their results, which are the same in both chunks, are stored twice.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as mosaic_gpu

from jaxnorm_kernels.mosaic.cluster import CLUSTER, cluster_totals, launch_clusters
from jaxnorm_kernels.mosaic.formulas import (
    Arrays,
    Columns,
    Formula,
    Ref,
    held_types,
    keep_columns,
)
from jaxnorm_kernels.mosaic.launch import BLOCK, WARPGROUP, is_interpreted, launch
from jaxnorm_kernels.mosaic.tiles import (
    WARPGROUP_THREADS,
    WARPS,
    columns_layout,
    load,
    store,
    warps_layout,
)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Parameters of the kernel.

    Attributes:
      vector: neighbouring elements that one thread reads and writes at once.
      warpgroups: of a block. They share a row.
      stages: of the ring of each warpgroup; one stage holds one piece of a row of both inputs.
      pieces: into which a slice of a row is cut, where whole slices are too large a unit.
      lag: 1 reduces row k before row k - 1 is finished. Needs stages for two rows.
      blocks_per_sm: that fit a multiprocessor at the same time.
      columns: where what belongs to the columns is kept.
      auto_barriers: leaves the barriers to Pallas, which puts two around each store.
      cluster: blocks that share a row, each with its own ring.
    """

    vector: int
    warpgroups: int = 1
    stages: int = 4
    pieces: int = 1
    lag: int = 0
    blocks_per_sm: int = 1
    columns: Columns = "registers"
    auto_barriers: bool = False
    cluster: int = 1

    @property
    def slices(self) -> int:
        """Slices of a row: the warpgroups that share it."""
        return self.cluster * self.warpgroups

    @property
    def chunk(self) -> int:
        """Columns of a chunk."""
        return WARPGROUP_THREADS * self.vector


class Slicing(Protocol):
    """How rows are cut: see `Ring`."""

    @property
    def slices(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def pieces(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Columns ``[start, start + width)``; those before `fresh` belong to another chunk too.

    `stage_start` is where they lie in their stage.
    """

    start: Any
    width: int
    stage_start: int
    fresh: Any = None


@dataclasses.dataclass(frozen=True)
class Slice:
    """The columns of one warpgroup: `index` of all slices, which are as many as `ring` says."""

    cols: int
    ring: Slicing
    index: Any

    def __post_init__(self) -> None:
        if not self.chunks:
            raise ValueError(
                f"{self.ring} needs rows of {self.ring.slices * self.ring.chunk} columns"
            )
        if self.chunks % self.ring.pieces or (self.has_tail and self.ring.pieces > 1):
            raise ValueError(f"{self.ring} does not cut {self.cols} columns into equal pieces")

    @property
    def chunks(self) -> int:
        """Chunks of the slice, without the tail."""
        return self.cols // (self.ring.slices * self.ring.chunk)

    @property
    def has_tail(self) -> bool:
        return self.cols % (self.ring.slices * self.ring.chunk) != 0

    @property
    def stage_cols(self) -> int:
        return (self.chunks // self.ring.pieces + self.has_tail) * self.ring.chunk

    def runs(self, piece: int) -> list[Chunk]:
        """The columns of a piece, as few chunks of any width: what is copied at once."""
        width = self.chunks // self.ring.pieces * self.ring.chunk
        start = (self.index * self.ring.pieces + piece) * width
        return [Chunk(start, width, 0), *self._tail(width)]

    def piece(self, piece: int) -> list[Chunk]:
        """The columns of a piece, in chunks that fill the warpgroup once."""
        body, *tail = self.runs(piece)
        return [
            Chunk(body.start + at, self.ring.chunk, at)
            for at in range(0, body.width, self.ring.chunk)
        ] + tail

    def _tail(self, stage_start: int) -> list[Chunk]:
        if not self.has_tail:
            return []
        width = self.ring.chunk
        fresh = (self.ring.slices * self.chunks + self.index) * width
        return [Chunk(jnp.minimum(fresh, self.cols - width), width, stage_start, fresh)]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the warps of a block add up the sums of a row, of which each warp has its part.

    Not by Mosaic's reduction over warps: its scratch is at one place for all warpgroups of a block,
    which is a race. With `depth` 2, a row may be published while the one before is not collected.
    """

    warpgroups: int
    sums: int
    depth: int = 1
    cluster: int = 1

    def scratch(self) -> list[Any]:
        # The fastest warp publishes row k + 2 depth - 1 while the slowest may still collect row k.
        slots = (2 * self.depth, self.sums, WARPS * self.warpgroups)
        counts = {"num_arrivals": self.warpgroups, "num_barriers": self.depth}
        barrier = plgpu.Barrier(**counts)
        if self.cluster > 1:
            barrier = plgpu.ClusterBarrier(collective_axes=(CLUSTER,), **counts)
        return [plgpu.SMEM(slots, jnp.float32), barrier]

    def publish(self, scratch: Sequence[Ref], sums: Arrays, k: Any = 0) -> None:
        """`sums`: for each sum a ``(4,)`` array over the warps of this warpgroup."""
        shared, _ = scratch
        mine = pl.ds(WARPS * lax.axis_index(WARPGROUP), WARPS)
        for j, value in enumerate(sums):
            store(shared.at[lax.rem(k, 2 * self.depth), j, mine], value)
        if self.cluster > 1:
            warpgroup_barrier()  # One thread arrives for all.
        plgpu.barrier_arrive(self._barrier(scratch, k))

    def collect(self, scratch: Sequence[Ref], k: Any = 0) -> list[jax.Array]:
        """The totals of row `k`. Each warp adds up all parts, in the same order."""
        shared, _ = scratch
        plgpu.barrier_wait(self._barrier(scratch, k))
        if self.cluster > 1:
            place = lax.rem(k, 2 * self.depth)
            return cluster_totals(shared, place, self.sums, self.warpgroups, self.cluster)
        layout = columns_layout(1, WARPS * self.warpgroups)
        slot = shared.at[lax.rem(k, 2 * self.depth)]
        return [jnp.sum(load(slot.at[j], layout)) for j in range(self.sums)]

    def leave(self, scratch: Sequence[Ref], k: Any) -> None:
        """After `k` rows: waits until no other block reads this one's shared memory."""
        if self.cluster > 1:
            warpgroup_barrier()
            plgpu.barrier_arrive(self._barrier(scratch, k))
            plgpu.barrier_wait(self._barrier(scratch, k))

    def _barrier(self, scratch: Sequence[Ref], k: Any) -> Ref:
        return scratch[1].at[lax.rem(k, self.depth)] if self.depth > 1 else scratch[1]


def ring_backward(
    formula: Formula,
    saved: jax.Array,
    dy: jax.Array,
    stats: Arrays,
    params: Arrays,
    *,
    schedule: Ring,
    blocks: int,
    dx_dtype: np.dtype,
    name: str,
) -> tuple[jax.Array, ...]:
    """dx, then for each column sum of the formula its partial sums, one row for each block.

    With a cluster, `blocks` are clusters.
    """
    ring, (rows, cols) = schedule, saved.shape
    layout, shape = warps_layout(ring.vector), (WARPS, ring.chunk // WARPS)
    pieces = range(ring.pieces)
    exchange = Exchange(ring.warpgroups, formula.row_sums, 1 + ring.lag, ring.cluster)

    def body(saved_ref: Ref, dy_ref: Ref, *refs: Ref) -> None:
        stat_refs, param_refs, refs = split(refs, len(stats), len(params))
        dx_ref, partial_refs, scratch = refs[0], refs[1 : 1 + formula.column_sums], refs[1:]
        saved_ring, dy_ring, full, *scratch = scratch[formula.column_sums :]
        exchanged, held = scratch[:2], scratch[2:]
        block = lax.axis_index(BLOCK)
        warpgroup = lax.axis_index(WARPGROUP)
        rank = lax.axis_index(CLUSTER) if ring.cluster > 1 else 0
        own = Slice(cols, ring, rank * ring.warpgroups + warpgroup)
        count = lax.div(rows - block + blocks - 1, blocks)  # rows of this block

        def row(k: Any) -> Any:
            return block + k * blocks

        def stage(k: Any, piece: int) -> Any:
            return warpgroup * ring.stages + lax.rem(k * ring.pieces + piece, ring.stages)

        def fill(k: Any, piece: int) -> None:
            at = stage(k, piece)
            for run in own.runs(piece):
                here, there = pl.ds(run.start, run.width), pl.ds(run.stage_start, run.width)
                for source, target in ((saved_ref, saved_ring), (dy_ref, dy_ring)):
                    plgpu.copy_gmem_to_smem(
                        source.at[row(k), here],
                        target.at[at, there],
                        full.at[at],
                        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                    )

        for step in range(ring.stages):
            k, piece = divmod(step, ring.pieces)
            pl.when(k < count)(functools.partial(fill, k, piece))

        def read_param(ref: Ref, chunk: Chunk) -> jax.Array:
            return load(ref.at[pl.ds(chunk.start, chunk.width)], layout, shape)

        def read(ref: Ref, at: Any, chunk: Chunk) -> jax.Array:
            here = pl.ds(chunk.stage_start, chunk.width)
            return load(ref.at[at, here], layout, shape).astype(jnp.float32)

        chunks = [chunk for piece in pieces for chunk in own.piece(piece)]
        given = keep_columns(
            formula,
            ring.columns,
            [[read_param(ref, chunk) for ref in param_refs] for chunk in chunks],
            [[ref.at[warpgroup, at] for ref in held] for at in range(len(chunks))],
            layout,
        )

        def kept(piece: int) -> Iterator[tuple[Chunk, Callable[[], Arrays]]]:
            """The chunks of a piece, each with what belongs to its columns."""
            each = len(chunks) // ring.pieces
            return zip(chunks[piece * each :][:each], given[piece * each :])

        def reduce_row(k: Any) -> list[jax.Array]:
            """Publishes the row's sums, each warp those of its columns. Returns the statistics."""
            row_stats = [ref[row(k)] for ref in stat_refs]
            total: list[jax.Array] = []
            for piece in pieces:
                at = stage(k, piece)
                plgpu.barrier_wait(full.at[at])
                for chunk, columns in kept(piece):
                    x, d = read(saved_ring, at, chunk), read(dy_ring, at, chunk)
                    terms = formula.terms(x, d, columns(), row_stats)
                    terms = [skip_stale(term, chunk) for term in terms]
                    total = [a + b for a, b in zip(total, terms)] if total else terms
            exchange.publish(exchanged, [jnp.sum(v, axis=1) for v in total], k)
            return row_stats

        def finish_row(k: Any, row_stats: Arrays, carried: Arrays) -> list[jax.Array]:
            totals = exchange.collect(exchanged, k)
            added: list[jax.Array] = []
            for piece in pieces:
                at = stage(k, piece)
                for chunk, columns in kept(piece):
                    x, d = read(saved_ring, at, chunk), read(dy_ring, at, chunk)
                    dx, terms = formula.finish(x, d, columns(), row_stats, totals)
                    store(dx_ref.at[row(k), pl.ds(chunk.start, chunk.width)], dx)
                    added += terms
                # The rest of the pieces may be read while this stage is filled again.
                refill(k, piece)
            return [a + b for a, b in zip(carried, added)]

        def refill(k: Any, piece: int) -> None:
            step = k * ring.pieces + piece + ring.stages
            if not ring.auto_barriers:
                warpgroup_barrier()  # Every warp has read the stage.

            @pl.when(step < count * ring.pieces)
            def _() -> None:
                # `stages` further on in the sequence of pieces; the same stage again.
                ahead, there = divmod(piece + ring.stages, ring.pieces)
                fill(k + ahead, there)

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        carried = [zero] * (len(chunks) * formula.column_sums)
        if ring.lag:

            def step_(k: Any, carry: Any) -> Any:
                before, carried = carry
                now = reduce_row(k)
                return now, finish_row(k - 1, before, carried)

            last, carried = lax.fori_loop(1, count, step_, (reduce_row(jnp.int32(0)), carried))
            carried = finish_row(count - 1, last, carried)
        else:
            carried = lax.fori_loop(
                0, count, lambda k, carried: finish_row(k, reduce_row(k), carried), carried
            )
        for j, ref in enumerate(partial_refs):
            for chunk, value in zip(chunks, carried[j :: formula.column_sums]):
                store(ref.at[block, pl.ds(chunk.start, chunk.width)], value)
        exchange.leave(exchanged, count)

    sketch = Slice(cols, ring, 0)
    copies = 2 * len(sketch.runs(0))
    held_shape = (ring.warpgroups, ring.pieces * len(sketch.piece(0)), *shape)
    stages = ring.warpgroups * ring.stages
    if ring.stages < ring.pieces * (1 + ring.lag):
        raise ValueError(f"{ring} holds less than {1 + ring.lag} rows")
    run = functools.partial(launch, blocks=blocks)
    if ring.cluster > 1:
        run = functools.partial(launch_clusters, clusters=blocks, cluster=ring.cluster)
    return run(
        body,
        [saved, dy, *stats, *params],
        name=name,
        outputs=[
            ((rows, cols), dx_dtype),
            *[((blocks, cols), np.dtype(np.float32))] * formula.column_sums,
        ],
        warpgroups=ring.warpgroups,
        scratch=[
            plgpu.SMEM((stages, sketch.stage_cols), saved.dtype),
            plgpu.SMEM((stages, sketch.stage_cols), dy.dtype),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            *exchange.scratch(),
            *held_types(formula, ring.columns, params, held_shape),
        ],
        auto_barriers=ring.auto_barriers,
    )


def warpgroup_barrier() -> None:
    """Waits for the warps of the warpgroup, where the kernel has no automatic barriers."""
    if is_interpreted():
        return  # There, a warpgroup is one thread.

    @plgpu.inline_mgpu()
    def barrier(context: Any) -> None:
        del context
        mosaic_gpu.warpgroup_barrier()

    barrier()


def in_plain_order(*refs: Ref) -> None:
    """Keeps Mosaic from choosing a swizzle for these refs: a bulk copy fills them as they are.

    The search for one also fails on some shapes (jax 0.11.2: an IndexError).
    """
    if is_interpreted():
        return

    @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
    def use(context: Any, *refs: Any) -> None:
        del context, refs

    use(*refs)


def skip_stale(term: jax.Array, chunk: Chunk) -> jax.Array:
    """`term`, and 0 where another chunk has the same column."""
    if chunk.fresh is None:
        return term
    warp, lane = (lax.broadcasted_iota(jnp.int32, term.shape, axis) for axis in (0, 1))
    stale = warp * term.shape[1] + lane < chunk.fresh - chunk.start
    return jnp.where(stale, jnp.float32(0), term)


def split(refs: Sequence[Ref], *sizes: int) -> tuple[Sequence[Ref], ...]:
    parts = []
    for size in sizes:
        parts.append(refs[:size])
        refs = refs[size:]
    return (*parts, refs)
