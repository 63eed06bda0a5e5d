"""Backward passes over rows that stream through a ring of buffers in shared memory.

A backward pass loads two or more arrays, reduces each row to a few sums, and needs the row again to
compute dx. Here, a *persistent* block processes many rows in *steps*: one row per step, or a few
short rows. If there are n blocks, each of them processes every n-th step. Each warpgroup of the
block processes a partition of the columns, and has a ring of buffers, called *stages*. Asynchronous
copies (TMA) fill the stages with the warpgroup's columns of the next rows.

A row is read from shared memory twice: for its sums, and for dx. So it occupies no registers while
warps exchange the sums. This leaves registers for the column sums (dscale, dbias), which each
thread accumulates over all rows. To hide the time of the exchange, warps write the sums of step k
to shared memory (publish) before they read the sums of step k - 1::

    for step k:   wait for its stage      add up each warp's columns, publish the sums   (reduce)
                  read the sums of k-1    store dx, add to column sums, refill the stage (finish)
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.launch import (
    BLOCK,
    CLUSTER,
    WARPGROUP,
    release_used,
    split,
)
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    WARPS,
    Layout,
    Ref,
    load,
    load_scalars,
    load_wide,
    warps_layout,
)
from jaxnorm_kernels.mosaic.loops.formulas import (
    Arrays,
    BackwardCall,
    BackwardRefs,
    Formula,
    prepare,
)
from jaxnorm_kernels.mosaic.rows.exchange import RowSums
from jaxnorm_kernels.mosaic.rows.partitions import Fragment, Partition


@dataclasses.dataclass(frozen=True)
class Stages:
    """A ring of stages (buffers in shared memory): step k uses stage ``k % count``.

    When step k is finished, its stage is refilled for step ``k + count``.

    Attributes:
      count: number of stages.
      steps: number of steps of the block.
      full: a barrier per stage. The stage's copies signal this barrier when their data have
        arrived.
      copies: ``copies(k, stage)`` returns a pair (source, target) for each copy that loads the rows
        of step k into stage number `stage`. Each copy moves consecutive bytes.
      ring: index of this ring of stages if each warpgroup of the block has its own ring. None if
        the block has a single ring.
    """

    count: int
    steps: Any
    full: Ref
    copies: Callable[[Any, Any], Iterable[tuple[Ref, Ref]]]
    ring: Any = None

    def start(self) -> None:
        """Start the copies that fill all buffers of the ring for the first time."""
        pl.loop(0, jnp.minimum(self.count, self.steps))(self._fill)

    def at(self, k: Any) -> Any:
        """Return the index of the buffer (stage) of step `k`."""
        if self.ring is None:
            return lax.rem(k, self.count)
        return self.ring * self.count + lax.rem(k, self.count)

    def wait(self, k: Any) -> Any:
        """Wait until the data of step `k` have arrived, and return the index of their buffer."""
        at = self.at(k)
        plgpu.barrier_wait(self.full.at[at])
        return at

    def refill(self, k: Any) -> None:
        """Start to load step ``k + count`` into the buffer that step `k` has used.

        The block must have processed step `k`.
        """
        release_used()
        pl.when(k + self.count < self.steps)(functools.partial(self._fill, k + self.count))

    def _fill(self, k: Any) -> None:
        at = self.at(k)
        for source, target in self.copies(k, at):
            plgpu.copy_gmem_to_smem(
                source,
                target,
                self.full.at[at],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # allows any length of rows
            )


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows that one block processes, divided into steps.

    The rows of the array form groups: consecutive rows with the same parameters. The rows of a
    group are divided into steps of `height` neighbouring rows. If n blocks share a group, each of
    them processes every n-th step. If `height` does not divide the number of rows of a group, the
    group's last step overlaps the previous one.

    Attributes:
      rows: number of rows of a group.
      height: number of rows of a step.
      blocks: number of blocks that share a group.
      place: index of this block among the blocks of its group.
      group: index of the group, or None if there is only one group.
    """

    rows: int
    height: int
    blocks: int
    place: Any
    group: Any = None

    @classmethod
    def of(cls, block: Any, *, rows: int, groups: int, blocks: int, height: int = 1) -> "Share":
        """Return the rows that block number `block` processes.

        `rows` is the total number of rows in all groups, and `blocks` the number of blocks per
        group.
        """
        if groups == 1:
            return cls(rows, height, blocks, block)
        place, group = lax.rem(block, blocks), lax.div(block, blocks)
        return cls(rows // groups, height, blocks, place, group)

    def count(self) -> Any:
        """Return the number of steps that this block processes."""
        steps = -(-self.rows // self.height)
        return lax.div(steps - self.place + self.blocks - 1, self.blocks)

    def first_row(self, k: Any) -> Any:
        """Return the index of the first row of this block's step `k`.

        The index is relative to the start of the array, not of the group of rows.
        """
        start = jnp.minimum(self._step(k) * self.height, self.rows - self.height)
        return self._of_all(start)

    @functools.cached_property
    def has_stale_rows(self) -> bool:
        """True if the group's last step contains rows that also belong to the previous step."""
        return self.rows % self.height != 0

    def is_new(self, row: Any, k: Any) -> Any:
        """Return True if no earlier step of the group contains `row`.

        `row` must be a row of this block's step `k`. The last step of a group may overlap the
        previous step, so a row may belong to both.
        """
        return row >= self._of_all(self._step(k) * self.height)

    def param(self, ref: Ref) -> Ref:
        """Return the ``(cols,)`` part of a parameter for this block's group of rows."""
        return ref if len(ref.shape) == 1 else ref.at[self.group]

    def _step(self, k: Any) -> Any:
        """Return the index of this block's step `k` among all steps of its group of rows.

        This block processes only some steps of the group.
        """
        return self.place + k * self.blocks

    def _of_all(self, row: Any) -> Any:
        """Convert the index of a row in its group of rows to its index in the array."""
        return row if self.group is None else self.group * self.rows + row


@dataclasses.dataclass(frozen=True)
class PipelinedRows:
    """Schedule of `pipelined_backward`.

    Attributes:
      vector: number of neighbouring elements that one thread loads and stores at once.
      warpgroups: number of warpgroups (of 128 threads) per block. They share each row.
      stages: number of stages in each warpgroup's ring. A stage contains the rows of one step.
      rows: number of rows per step. Their sums are exchanged at the same time.
      blocks_per_sm: number of blocks that fit on an SM at the same time.
      cluster: number of blocks that share each row.
    """

    vector: int
    warpgroups: int = 1
    stages: int = 4
    rows: int = 1
    blocks_per_sm: int = 1
    cluster: int = 1

    @property
    def layout(self) -> Layout:
        """Register layout of a unit, which consists of one vector per thread of a warpgroup."""
        return warps_layout(self.vector)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape in registers of a unit, which consists of one vector per thread.

        The first axis has an index for each warp.
        """
        return WARPS, WARP * self.vector

    def partition(self, cols: int, warpgroup: Any = 0) -> Partition:
        """Return the columns of warpgroup number `warpgroup` of the block or cluster."""
        unit = WARPGROUP_THREADS * self.vector
        return Partition(cols, self.cluster * self.warpgroups, unit, self.vector, warpgroup)


@dataclasses.dataclass(frozen=True)
class _PipelinedKernel:
    """One warpgroup's loop over rows. The warpgroup processes its partition of the columns.

    Attributes:
      formula: the computation for each row.
      ring: the schedule of the kernel.
      refs: the kernel's operands and results.
      stages: the ring of stages.
      held: the ring's memory for each row operand, ``(stages, rows, columns)``.
      share: which rows the block processes.
      sums: the object that exchanges row sums between warps.
      exchanged: the scratch memory of `sums`.
      units: the columns of the partition, split into units of one vector per thread.
      columns: for each unit, the results of `Formula.columns`.
    """

    formula: Formula
    ring: PipelinedRows
    refs: BackwardRefs
    stages: Stages
    held: Sequence[Ref]
    share: Share
    sums: RowSums
    exchanged: Sequence[Ref]
    units: Sequence[Fragment]
    columns: Sequence[Arrays]

    def run(self, block: Any) -> None:
        """Process all steps, then store the block's column sums.

        An iteration calls `reduce` for one step and `finish` for the previous step. So `reduce` is
        called for the first step before the loop. With a loop that skips `finish` in its first
        iteration instead, RMSNorm's backward pass over 4096 columns was 15 % slower (H100).
        """
        carried, steps = self.no_sums(), self.stages.steps
        first, second = (self.statistics(jnp.int32(k)) for k in range(2))
        self.sums.ready()
        pl.when(steps > 0)(functools.partial(self.reduce, jnp.int32(0), first))
        *_, carried = lax.fori_loop(1, steps + 1, self.step, (first, second, carried))
        for j, ref in enumerate(self.refs.partials):
            for unit, value in zip(self.units, carried[j :: self.formula.column_sums]):
                unit.store(ref, block, value)

    def step(self, k: Any, carry: Any) -> Any:
        """Run one iteration of the loop over steps. A step consists of one row or a few rows.

        The iteration computes the row sums of step `k`, stores the results of step ``k - 1``, and
        loads the statistics of step ``k + 1``.
        """
        before, now, carried = carry
        ahead = self.statistics(k + 1)
        pl.when(k < self.stages.steps)(functools.partial(self.reduce, k, now))
        return now, ahead, self.finish(k - 1, before, carried)

    def statistics(self, k: Any) -> list[list[jax.Array]]:
        """Load the statistics of each row of step `k`."""
        first = self.share.first_row(jnp.minimum(k, self.stages.steps - 1))
        return load_scalars(self.refs.stats, first, self.ring.rows)

    def reduce(self, k: Any, stats: list[list[jax.Array]]) -> None:
        """Add up each warp's columns of each row of step `k`, and publish the sums to all warps."""
        at, rows, formula = self.stages.wait(k), range(self.ring.rows), self.formula
        totals: list[Arrays] = [[] for _ in rows]
        for unit, columns in zip(self.units, self.columns):
            fresh = unit.is_fresh()
            for row in rows:
                elements = self.read(at, row, unit, formula.summed)
                terms = formula.terms(elements, columns, stats[row])
                if fresh is not None:
                    terms = [jnp.where(fresh, term, jnp.float32(0)) for term in terms]
                totals[row] = [a + b for a, b in zip(totals[row], terms)] if totals[row] else terms
        # Annotate the layout of the results only. Annotating all loads would slow down Mosaic's
        # layout inference.
        layout = self.ring.layout
        of_steps = [total for row in totals for total in row]
        parts = [jnp.sum(plgpu.layout_cast(total, layout), axis=1) for total in of_steps]
        self.sums.publish(self.exchanged, parts, k)

    def finish(self, k: Any, stats: list[list[jax.Array]], carried: Arrays) -> Arrays:
        """Store the results of step `k`, update the column sums, and refill the step's buffer."""
        totals, sums = self.sums.collect(self.exchanged, k), self.formula.row_sums
        at, first = self.stages.at(k), self.share.first_row(k)
        for row in range(self.ring.rows):
            of_row = totals[row * sums : (row + 1) * sums]
            added = self.finish_row(at, row, first + row, stats[row], of_row)
            if self.share.has_stale_rows and added:
                is_new = self.share.is_new(first + row, k)
                is_new = lax.broadcast_in_dim(is_new, self.ring.shape, ())
                added = [jnp.where(is_new, a, jnp.float32(0)) for a in added]
            carried = [a + b for a, b in zip(carried, added)]
        self.stages.refill(k)
        return carried

    def finish_row(self, at: Any, row: int, index: Any, stats: Arrays, totals: Arrays) -> Arrays:
        """Store the results of one row, and return the terms that it adds to the column sums.

        `index` is the index of the row in the array. `at` and `row` are its position in the ring:
        the index of the stage, and the index of the row within the stage.
        """
        added: list[jax.Array] = []
        for unit, columns in zip(self.units, self.columns):
            elements = self.read(at, row, unit, len(self.held))
            values, terms = self.formula.finish(elements, columns, stats, totals)
            for ref, value in zip(self.refs.results, values):
                unit.store(ref, index, value)
            added += terms
        return added

    def read(self, at: Any, row: int, unit: Fragment, count: int) -> list[jax.Array]:
        """Load one unit of a row in float32: row number `row` of the stage with index `at`.

        A unit consists of one vector per thread. The result is a list with an array for each of the
        first `count` operands.
        """
        place = (at, row, unit.stage_start)
        return load_wide(self.held[:count], self.ring.layout, self.ring.shape, place)

    def no_sums(self) -> list[jax.Array]:
        """Return the initial column sums: arrays of zeros, one for each unit and column sum.

        A unit consists of one vector per thread.
        """
        zeros = plgpu.layout_cast(jnp.zeros(self.ring.shape, jnp.float32), self.ring.layout)
        return [zeros] * (len(self.units) * self.formula.column_sums)


def pipelined_backward(
    formula: Formula, call: BackwardCall, ring: PipelinedRows
) -> tuple[jax.Array, ...]:
    """Run a pipelined kernel with a formula, and return the results of `BackwardCall.launch`."""
    (rows, cols), groups, blocks = call.shape, call.groups, call.blocks
    if ring.stages < 2 or rows // groups < ring.rows:
        raise ValueError(f"{ring} holds less than 2 steps, or too many rows")
    sums = RowSums(ring.warpgroups, ring.cluster, ring.rows * formula.row_sums, depth=2, stages=4)
    whole = ring.cluster * ring.warpgroups == 1

    def body(refs: BackwardRefs) -> None:
        held, (full, *exchanged) = split(refs.scratch, len(refs.rows))
        sums.open(exchanged)
        block, warpgroup = lax.axis_index(BLOCK), lax.axis_index(WARPGROUP)
        rank = lax.axis_index(CLUSTER) if ring.cluster > 1 else 0
        index = 0 if whole else rank * ring.warpgroups + warpgroup
        partition = ring.partition(cols, index)
        share = Share.of(block, rows=rows, groups=groups, blocks=blocks, height=ring.rows)
        steps, fragments = share.count(), partition.fragments()
        if whole:  # Buffers contain entire rows, so columns have the same index as in the array.
            fragments = [dataclasses.replace(f, stage_start=f.start) for f in fragments]
        places = [fragment.columns() for fragment in fragments]

        def copies(k: Any, at: Any) -> Iterable[tuple[Ref, Ref]]:
            first = share.first_row(k)
            if whole:  # The rows of a step are adjacent in memory, so one copy loads all of them.
                for source, stages in zip(refs.rows, held):
                    yield source.at[pl.ds(first, ring.rows)], stages.at[at]
                return
            for row in range(ring.rows):
                for fragment, columns in zip(fragments, places):
                    target = pl.ds(fragment.stage_start, fragment.width)
                    for source, stages in zip(refs.rows, held):
                        yield source.at[first + row, columns], stages.at[at, row, target]

        stages = Stages(ring.stages, steps, full, copies, None if whole else warpgroup)
        stages.start()
        first, *tail = fragments
        units = [*partition.cut(first), *tail]
        params = [share.param(ref) for ref in refs.params]
        columns = [
            prepare(
                formula, [load(ref.at[unit.columns()], ring.layout, ring.shape) for ref in params]
            )
            for unit in units
        ]
        kernel = _PipelinedKernel(
            formula, ring, refs, stages, held, share, sums, exchanged, units, columns
        )
        kernel.run(block)

    part = ring.partition(cols)
    width = cols if whole else part.width
    # number of copies that fill a stage
    copies = len(call.rows) * (1 if whole else ring.rows * len(part.fragments()))
    stages = ring.warpgroups * ring.stages
    return call.launch(
        body,
        column_sums=formula.column_sums,
        cluster=ring.cluster,
        warpgroups=ring.warpgroups,
        scratch=[
            *[plgpu.SMEM((stages, ring.rows, width), v.dtype) for v in call.rows],
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            *sums.scratch(),
        ],
    )
