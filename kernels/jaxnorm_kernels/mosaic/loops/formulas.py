"""The interface between a backward kernel and the formulas of an operation.

The kernel loops over rows. It depends only on the number and dtypes of operands and results; the
formula gives them meaning.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device.launch import split
from jaxnorm_kernels.mosaic.device.layouts import Ref

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class RowOperands:
    """The operands of a backward kernel.

    Attributes:
      rows: arrays ``(rows, cols)``, each in its own dtype.
      stats: float32 arrays ``(rows,)``, one value per row.
      params: arrays ``(cols,)``, or ``(groups, cols)`` for groups of rows.
      groups: the number of groups of ``rows / groups`` consecutive rows. Each group has its own
        column sums.
    """

    rows: Arrays
    stats: Arrays = ()
    params: Arrays = ()
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        rows, cols = self.rows[0].shape
        return rows, cols

    @property
    def arrays(self) -> list[jax.Array]:
        """All arrays: rows, then statistics, then parameters."""
        return [*self.rows, *self.stats, *self.params]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of arrays of each kind, as arguments of `split`."""
        return len(self.rows), len(self.stats), len(self.params)


class BackwardRefs(NamedTuple):
    """The arguments of a backward kernel's body: operands, results and scratch memory.

    Attributes:
      rows, stats, params: see `RowOperands`.
      results: the row results, ``(rows, cols)``.
      partials: the column sums of each block, ``(blocks, cols)`` each.
    """

    rows: Sequence[Ref]
    stats: Sequence[Ref]
    params: Sequence[Ref]
    results: Sequence[Ref]
    partials: Sequence[Ref]
    scratch: Sequence[Any]

    @classmethod
    def of(
        cls, refs: Sequence[Ref], sizes: tuple[int, int, int], results: int, partials: int
    ) -> "BackwardRefs":
        """Sort the arguments of a kernel's body; for `sizes` see `RowOperands.sizes`."""
        return cls(*split(refs, *sizes, results, partials))


class Formula(Protocol):
    """A backward pass as functions of the elements of one row. All arrays are float32.

    `elements` are the elements of the row operands. `columns` are values for the elements' columns;
    `stats` and `totals` are values for the elements' row.
    """

    #: the number of leading row operands that the sums need, along a row and over the rows.
    summed: int
    #: the number of sums over the row that `finish` needs.
    row_sums: int
    #: the number of sums over the rows that are results.
    column_sums: int

    def columns(self, params: Arrays) -> list[jax.Array]:
        """Derive from the parameters (scale, bias) what `terms` and `finish` need."""
        ...

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        """Return the terms of the sums over the row, from the first `summed` operands."""
        ...

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the row results (dx), and the terms of the sums over the rows."""
        ...


def prepare(formula: Formula, params: Arrays) -> list[jax.Array]:
    """Return ``formula.columns`` of the parameters, converted to float32."""
    return formula.columns([p.astype(jnp.float32) for p in params])
