"""The loops over rows of logits in the forward and backward passes of losses and divergences.

The forward pass reads a row once and reduces it to a few numbers. It does so in a loop over
*steps*, each of which loads a few units of columns. In the backward pass, an element of the
gradient does not depend on other elements of the row. So each block processes a part of a row, and
the gradient may overwrite the logits.
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
from jaxnorm_kernels.mosaic.device.launch import BLOCK, WARPGROUP, launch, present, split
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
    """

    units: int
    warpgroups: int = 1

    @classmethod
    def of(cls, units: RowFragments, columns: int, warpgroups: int) -> "LossSchedule":
        """Return a schedule for rows that are divided into `units`.

        `columns` is the number of columns that a thread should process per step.
        """
        step = max(1, columns // units.vector)
        most = max(1, units.count // warpgroups)
        return cls(min(step, most), warpgroups)

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
        return self.units.whole // (self.schedule.units * self.schedule.warpgroups)

    def step(self, index: Any) -> list[Fragment]:
        """Return the units of step number `index`, which must be less than `whole_steps`."""
        return self._of(index, self.schedule.units, whole=True)

    def rest(self) -> list[Fragment]:
        """Return the units that remain after the complete steps; the list may be empty."""
        shares = self.schedule.warpgroups
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
            sums = add(sums, [edge], read, lax.axis_index(WARPGROUP) == 0)
        return sums

    def _of(self, step: Any, count: int, *, whole: bool) -> list[Fragment]:
        shares = self.schedule.warpgroups
        first = step * (self.schedule.units * shares) + lax.axis_index(WARPGROUP)
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


class LossRow(NamedTuple):
    """The row that a block processes.

    Attributes:
      spec: the spec for computations with the row's logits; see `of_row`.
      index: index of the row.
      steps: the steps of this warpgroup.
      gather: a function that exchanges sums between all warps of the block; see `Gather`.
    """

    spec: Spec
    index: Any
    steps: Steps
    gather: Callable[..., list[jax.Array]]


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
    """Launch one block per row. Return arrays with one number per row.

    Args:
      scale: an array with the scale of each row's logits. None if all rows have the same scale.
      operands: all operands except `scale`. x is the first. None stands for an absent operand.
      compute: ``compute(row, operand_refs, result_refs)`` processes a `LossRow`. `operand_refs` is
        a list with a ref for each operand that is present. `result_refs` is a list with a ref for
        each returned array. `compute` may call ``row.gather(...)`` only once.
      results: the number of returned arrays, which are float32.
      sums: the number of sums that each warp contributes to ``row.gather``.
    """
    arrays = present(*operands, scale)
    gather = Gather(schedule.warpgroups, values=sums)

    # JAX caches the traced body, so the body must not refer to traced arrays.
    count = len(arrays)

    def body(*refs: Ref) -> None:
        operand_refs, result_refs, scratch = split(refs, count, results)
        index, of_this_row = lax.axis_index(BLOCK), spec
        if scale is not None:
            *operand_refs, scales = operand_refs
            of_this_row = of_row(spec, load(scales.at[index], None))
        steps = Steps(units_of(spec), schedule, index)
        row = LossRow(of_this_row, index, steps, functools.partial(gather, scratch))
        compute(row, operand_refs, result_refs)

    return launch(
        body,
        arrays,
        name=f"jaxnorm_{spec.op}_fwd",
        outputs=[((spec.rows,), _F32)] * results,
        blocks=spec.rows,
        warpgroups=schedule.warpgroups,
        scratch=gather.scratch(),
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

    def store_all(values: Sequence[Any]) -> None:
        @pl.when(lax.axis_index(WARPGROUP) == 0)
        def _() -> None:
            for ref, value in zip(results, values):
                store(ref.at[row], jnp.float32(value))

    if not positions:
        store_all(reduce())
        return
    counts = load(positions[0].at[row], None).astype(jnp.int8) != 0
    pl.when(counts)(lambda: store_all(reduce()))
    pl.when(jnp.logical_not(counts))(lambda: store_all(otherwise))


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
            shape, layout = of_block[0].shape, of_block[0].layout
            zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
            columns = flat_index(shape, layout)  # indices relative to a unit's first column
            labels_of: list[list[Label]] = [[] for _ in of_block]
            if label is not None:
                labels_of = [[Label(label, unit.has(label))] for unit in of_block]
            for unit, of_label, *elements in zip(of_block, labels_of, *raw):
                wide = [widen(value, layout) for value in elements]
                operands = (scaled, *wide, unit, columns, *of_label, values)
                of_unit = functools.partial(gradient, *operands)
                unit.store(dx, row, lax.cond(has_entry, of_unit, lambda: zero))

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
