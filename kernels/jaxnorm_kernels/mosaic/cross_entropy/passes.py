"""The loops over rows of logits in the forward and backward passes of losses and divergences.

The forward pass reads a row once and reduces it to a few numbers. It does so in a loop over
*steps*, each of which loads a few units of columns. In the backward pass, an element of the
gradient does not depend on other elements of the row. So each block processes a part of a row, and
the gradient may overwrite the logits. The module `both` combines the two passes in one kernel.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands
from jaxnorm_kernels.mosaic.cross_entropy.logits import of_row
from jaxnorm_kernels.mosaic.device.gpu import SCHEDULES_KEPT
from jaxnorm_kernels.mosaic.device.launch import BLOCK, CLUSTER, WARPGROUP, launch, present
from jaxnorm_kernels.mosaic.device.layouts import (
    VECTOR_BYTES,
    Ref,
    flat_index,
    load,
    store,
    widen,
)
from jaxnorm_kernels.mosaic.rows.exchange import Gather
from jaxnorm_kernels.mosaic.rows.partitions import Fragment
from jaxnorm_kernels.mosaic.rows.units import RowFragments, load_units
from jaxnorm_kernels.specs import Spec

_F32 = np.dtype(np.float32)


@functools.lru_cache(maxsize=SCHEDULES_KEPT)
def units_of(spec: Spec, *, padded: bool = False) -> RowFragments:
    """Return how the classes of a row are divided into units; see `RowFragments`.

    If `padded`, the columns of padding, which follow the classes, are included.
    """
    widest = VECTOR_BYTES // max(dtype.itemsize for dtype in spec.operand_dtypes)
    return RowFragments.of(spec.cols, widest, spec.cols if padded else spec.classes)


# -------------------------------------------------------------------------------------- forward


@dataclasses.dataclass(frozen=True)
class LossSchedule:
    """How a pass of a loss divides a row into steps or blocks, and how many threads share a row.

    Attributes:
      units: in the forward pass, the number of units that a warpgroup loads in one step. It loads
        them while it adds the units of the previous step to its sums. In the backward pass, the
        number of units per block. A unit consists of one vector per thread of a warpgroup.
      warpgroups: the number of warpgroups in a block; they share a row. In the backward pass, it
        is 1.
      cluster: the number of blocks that share a row in the forward pass.
    """

    units: int
    warpgroups: int = 1
    cluster: int = 1

    @classmethod
    def of(
        cls, units: RowFragments, columns: int, warpgroups: int, cluster: int = 1
    ) -> "LossSchedule":
        """Return a schedule for rows that are divided into `units`.

        `columns` is the number of columns that a thread should process per step.
        """
        step = max(1, columns // units.vector)
        most = max(1, units.count // (warpgroups * cluster))
        return cls(min(step, most), warpgroups, cluster)

    @property
    def shares(self) -> int:
        """The number of warpgroups that share a row."""
        return self.warpgroups * self.cluster

    def parts(self, spec: Spec) -> int:
        """Return the number of blocks per row in the backward pass."""
        return -(-units_of(spec, padded=True).count // self.units)


#: The schedule of a backward pass. For rows of 32768 bfloat16 elements, a kernel with four units
#: per block reaches 0.98 of a copy's bandwidth, and a kernel with two units 0.97. With a softcap,
#: the two kernels reach 0.90 and 0.86 (H200). More units per block take registers that other blocks
#: of the SM need.
BACKWARD = LossSchedule(units=4)


class Steps(NamedTuple):
    """The units of a row that belong to one warpgroup, grouped into steps.

    If n warpgroups share a row, each of them reads every n-th unit.
    """

    units: RowFragments
    schedule: LossSchedule
    row: Any

    @property
    def whole_steps(self) -> int:
        """The number of complete steps in which no unit has stale columns (see `RowFragments`)."""
        return self.units.whole // (self.schedule.units * self.schedule.shares)

    def step(self, index: Any) -> list[Fragment]:
        """Return the units of step number `index`, which must be less than `whole_steps`."""
        return self._of(index, self.schedule.units, whole=True)

    def rest(self) -> list[Fragment]:
        """Return the units that remain after the complete steps; the list may be empty."""
        shares = self.schedule.shares
        left = self.units.count - self.whole_steps * self.schedule.units * shares
        return self._of(self.whole_steps, -(-left // shares), whole=False)

    def first(self) -> list[Fragment]:
        """Return the units of the first step."""
        return self.step(0) if self.whole_steps else self.rest()

    def reduce[Raw, Sums](
        self,
        load: Callable[[Sequence[Fragment]], Raw],
        add: Callable[[Sums, Sequence[Fragment], Raw, Any], Sums],
        sums: Sums,
        raw: Raw,
    ) -> Sums:
        """Return each thread's sums over its units.

        The elements of a step are loaded while the elements of the previous step are added.

        Args:
          load: ``load(units)`` returns the elements of a list of units.
          add: ``add(sums, units, elements, mine)`` returns `sums` with the elements of `units`
            added. `mine` is None or a scalar bool. If it is False, no element is added, because
            another warpgroup adds them.
          sums: the initial value of the sums.
          raw: ``load(self.first())``, the elements of the first step, which the caller has loaded.
        """

        def advance(i: Any, carry: tuple[Raw, Sums]) -> tuple[Raw, Sums]:
            raw, sums = carry
            coming = load(self.step(i + 1))
            return coming, add(sums, self.step(i), raw, None)

        rest = self.rest()
        if self.whole_steps:
            last = self.whole_steps - 1
            raw, sums = lax.fori_loop(0, last, advance, (raw, sums))
            coming = load(rest) if rest else raw
            sums, raw = add(sums, self.step(last), raw, None), coming
        if rest:
            sums = add(sums, rest, raw, None)
        for edge in self.units.edges(self.row):
            read = load([edge])
            sums = add(sums, [edge], read, self._share == 0)
        return sums

    @property
    def _share(self) -> jax.Array:
        """The index of this warpgroup among all warpgroups that share the row."""
        share = lax.axis_index(WARPGROUP)
        if self.schedule.cluster > 1:
            share = share + self.schedule.warpgroups * lax.axis_index(CLUSTER)
        return share

    def _of(self, step: Any, count: int, *, whole: bool) -> list[Fragment]:
        shares = self.schedule.shares
        first = step * (self.schedule.units * shares) + self._share
        return [self.units.unit(self.row, first + k * shares, whole=whole) for k in range(count)]


def fresh_of(units: Sequence[Fragment], mine: Any) -> list[jax.Array | None]:
    """Return, for each unit, a mask of the elements that are added to the sums.

    A unit's mask is None if all its elements are added. `mine` is a scalar bool. If it is False,
    the masks are False everywhere, because another warpgroup adds the elements. If `mine` is True
    or not given (None), it has no effect.
    """
    fresh = [unit.is_fresh() for unit in units]
    if mine is not None:
        fresh = [jnp.logical_and(f, mine) for f in fresh]
    return fresh


def where(mask: jax.Array | None, value: jax.Array, other: float) -> jax.Array:
    """Return `value` where the mask is True, else `other`. A mask of None is True everywhere."""
    return value if mask is None else jnp.where(mask, value, other)


@dataclasses.dataclass(frozen=True)
class LossRow:
    """The row that a block processes, alone or with the other blocks of its cluster.

    Attributes:
      spec, schedule: the call's spec and schedule.
      index: index of the row.
      exchange: the exchange of sums between all warps that share the row.
      scratch: the shared memory and barriers of the exchange.
      scale: the scale of the row's logits if each row has its own scale, else None.
    """

    spec: Spec
    schedule: LossSchedule
    index: Any
    exchange: Gather
    scratch: Sequence[Any]
    scale: jax.Array | None = None

    @property
    def scaled(self) -> Spec:
        """The spec for the computations with this row's logits; see `of_row`."""
        return of_row(self.spec, self.scale)

    def steps(self, *, padded: bool = False) -> Steps:
        """Return the steps of this warpgroup. If `padded`, they contain the columns of padding."""
        return Steps(units_of(self.spec, padded=padded), self.schedule, self.index)

    def gather(self, *sums: jax.Array) -> list[jax.Array]:
        """Exchange sums; return the sums of all warps that share the row. See `Gather`."""
        self.exchange.ready()
        return self.exchange(self.scratch, *sums)

    def skip(self) -> None:
        """Exchange no sums, because the row is masked; see `gather`.

        The barrier of a cluster has two halves. Each block arrives when it starts
        (``exchange.open``), and waits for the other blocks before it sends sums
        (``exchange.ready``). Every arrival needs its wait, so a block that sends no sums must wait,
        too.
        """
        self.exchange.ready()


def launch_forward(
    spec: Spec,
    schedule: LossSchedule,
    scale: jax.Array | None,
    operands: Sequence[jax.Array | None],
    compute: Callable[[LossRow, Sequence[Ref], Sequence[Ref]], None],
    *,
    results: int,
    sums: int,
) -> tuple[jax.Array, ...]:
    """Launch one block, or one cluster of blocks, per row. Return arrays with one number per row.

    If the backward pass is part of the kernel, the gradient of x precedes these arrays.

    Args:
      scale: an array with the scale of each row's logits. None if all rows have the same scale.
      operands: all operands except `scale`. x is the first. None stands for an absent operand.
      compute: ``compute(row, operand_refs, result_refs)`` processes a `LossRow`. `operand_refs` is
        a list with a ref for each operand that is present. `result_refs` is a list with a ref for
        each returned array. `compute` must call either ``row.gather(...)`` or ``row.skip()``, and
        only once.
      results: the number of returned arrays that have one float32 number per row.
      sums: the number of sums that each warp contributes to ``row.gather``.
    """
    arrays = present(*operands, scale)
    gather = Gather(schedule.warpgroups, schedule.cluster, values=sums)
    scratch_types = gather.scratch()
    outputs: list[tuple[tuple[int, ...], np.dtype]] = [((spec.rows,), _F32)] * results
    overwritten = int(spec.returns_both and spec.overwrites_x)
    if spec.returns_both and not overwritten:
        outputs = [((spec.rows, spec.cols), spec.dx_dtype), *outputs]

    # JAX caches the traced body, so the body must not refer to traced arrays.
    count = len(arrays)

    def body(*refs: Ref) -> None:
        last = len(refs) - len(scratch_types)
        operand_refs, scratch = refs[:count], refs[last:]
        result_refs = refs[count:last]
        if len(result_refs) < results + spec.returns_both:  # The gradient overwrites x.
            result_refs = (operand_refs[0], *result_refs)
        row = LossRow(spec, schedule, lax.axis_index(BLOCK), gather, scratch)
        if scale is not None:
            *operand_refs, scales = operand_refs
            row = dataclasses.replace(row, scale=load(scales.at[row.index], None))
        gather.open(scratch)
        compute(row, operand_refs, result_refs)

    return launch(
        body,
        arrays,
        name=f"jaxnorm_{spec.op}_{'both' if spec.returns_both else 'fwd'}",
        outputs=outputs,
        overwritten=overwritten,
        blocks=spec.rows,
        cluster=schedule.cluster,
        warpgroups=schedule.warpgroups,
        scratch=scratch_types,
    )


def store_row(
    row: Any,
    results: Sequence[Ref],
    positions: Sequence[Ref],
    reduce: Callable[[], Sequence[Any]],
    otherwise: Sequence[float],
) -> None:
    """Store the results of a row: ``reduce()``, or `otherwise` if the row's position is masked.

    `positions` is a list with one ref: the mask of positions, which is False for masked rows. The
    list is empty if there is no mask.
    """
    run_unmasked(
        row,
        positions,
        lambda: store_results(row, results, reduce()),
        lambda: store_results(row, results, otherwise),
    )


def run_unmasked(
    row: Any,
    positions: Sequence[Ref],
    run: Callable[[], None],
    otherwise: Callable[[], None],
) -> None:
    """Call `run`, or `otherwise` if the row's position is masked; see `store_row`."""
    if not positions:
        run()
        return
    counts = load(positions[0].at[row], None).astype(jnp.int8) != 0
    pl.when(counts)(run)
    pl.when(jnp.logical_not(counts))(otherwise)


def store_results(row: Any, results: Sequence[Ref], values: Sequence[Any]) -> None:
    """Store a number in each of `results`, at the index of the row.

    If a cluster of blocks shares the row, each block stores the same numbers.
    """

    @pl.when(lax.axis_index(WARPGROUP) == 0)
    def _() -> None:
        for ref, value in zip(results, values):
            store(ref.at[row], jnp.float32(value))


def read_label(labels: Ref, row: Any) -> jax.Array:
    """Load a label as int32. A label out of int32's range becomes -1, which is not a class."""
    label = load(labels.at[row], None)
    if label.dtype.itemsize < 8:
        return label.astype(jnp.int32)
    # Kernels are traced without 64-bit types, so 2^31 cannot be represented as an integer. Compare
    # in float32 instead.
    fits = jnp.abs(label.astype(jnp.float32)) < 2.0**31
    return jnp.where(fits, label.astype(jnp.int32), -1)


def is_class(label: jax.Array, spec: Spec) -> jax.Array:
    """Return a scalar bool: True if the label is the index of a class."""
    return jnp.logical_and(label >= 0, label < spec.classes)


# ------------------------------------------------------------------------------------- backward


class Label(NamedTuple):
    """The label of a row, for the computation of the gradient in one unit of the row.

    Attributes:
      label: the label, which is the index of a column.
      is_in_unit: a scalar bool, True if the label is one of the unit's columns.
    """

    label: jax.Array
    is_in_unit: jax.Array


def launch_backward(
    spec: Spec,
    schedule: LossSchedule,
    logits: Sequence[jax.Array],
    labels: jax.Array | None,
    numbers: Sequence[jax.Array],
    gradient: Callable[..., jax.Array],
    scale: jax.Array | None,
) -> Operands:
    """Return the gradient of x.

    Args:
      logits: x and, for a divergence, the teacher's logits.
      labels: a label for each row, or None.
      numbers: arrays with a number for each row. The second array must be the saved statistic
        log(s) of x. In masked rows, it is -inf, and dx is 0.
      gradient: a function that computes a part of a row of dx, in float32. The part is a unit, a
        range of columns (see `Fragment`). The function is not called for masked rows. It is called
        with these positional arguments, in this order:

        * the spec of the row (see `of_row`);
        * the elements of x in this unit, in float32;
        * the elements of the teacher's logits in this unit, in float32, only for a divergence;
        * the unit, as a `Fragment`;
        * the index of each element's column, relative to the unit's first column;
        * the row's `Label`, only if there are labels;
        * a list with the row's value of each array in `numbers`.
      scale: an array with the scale of each row's logits. None if all rows have the same scale.
    """
    of_rows = units_of(spec, padded=True)
    parts, units = schedule.parts(spec), min(schedule.units, of_rows.count)
    arrays = present(*logits, labels, *numbers, scale)

    # JAX caches the traced body, so the body must not refer to traced arrays.
    count, of_logits, has_label = len(arrays), len(logits), labels is not None

    def body(*refs: Ref) -> None:
        operand_refs, (dx,) = refs[:count], refs[count:] or refs[:1]
        logit_refs, others = operand_refs[:of_logits], operand_refs[of_logits:]
        block = lax.axis_index(BLOCK)
        row, part = lax.div(block, parts), lax.rem(block, parts)

        def write(of_block: Sequence[Fragment]) -> None:
            # Start the loads of the logits first, and then the loads of the row's few other numbers
            # (statistics, cotangents). All these loads are then in flight at the same time.
            raw = [load_units(of_block, ref, row) for ref in logit_refs]
            label = read_label(others[0], row) if has_label else None
            values = [load(ref.at[row], None) for ref in others[has_label:]]
            has_entry = values[1] != -jnp.inf
            scaled = of_row(spec, None if scale is None else values.pop())
            store_gradient(scaled, of_block, raw, dx, row, label, values, gradient, has_entry)

        write([of_rows.unit(row, part * units + k) for k in range(units)])
        if of_rows.has_edges:
            pl.when(part == 0)(lambda: write(of_rows.edges(row)))

    (dx,) = launch(
        body,
        arrays,
        name=f"jaxnorm_{spec.op}_bwd",
        outputs=[] if spec.overwrites_x else [((spec.rows, spec.cols), spec.dx_dtype)],
        overwritten=int(spec.overwrites_x),
        blocks=spec.rows * parts,
    )
    return Operands(dx)


def store_gradient(
    spec: Spec,
    units: Sequence[Fragment],
    raw: Sequence[Sequence[jax.Array]],
    dx: Ref,
    row: Any,
    label: jax.Array | None,
    numbers: Sequence[jax.Array],
    gradient: Callable[..., jax.Array],
    has_entry: jax.Array | None,
) -> None:
    """Store dx of some units of a row.

    Args:
      raw: for each array of logits, a list with the elements of each unit.
      dx: ref of the gradient of all rows.
      label: the row's label, or None if there are no labels.
      numbers, gradient: see `launch_backward`. `numbers` has the values of this row.
      has_entry: a traced bool. It is True if the row is not masked, and False if it is masked, so
        that its dx is 0. None means that the caller has already checked that the row is not masked.
    """
    shape, layout = units[0].shape, units[0].layout
    zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    columns = flat_index(shape, layout)  # indices relative to a unit's first column
    of_units: list[list[Label]] = [[] for _ in units]
    if label is not None:
        of_units = [[Label(label, unit.has(label))] for unit in units]
    for unit, of_label, *elements in zip(units, of_units, *raw):
        wide = [widen(value, layout) for value in elements]
        of_unit = functools.partial(gradient, spec, *wide, unit, columns, *of_label, numbers)
        unit.store(
            dx, row, of_unit() if has_entry is None else lax.cond(has_entry, of_unit, lambda: zero)
        )
