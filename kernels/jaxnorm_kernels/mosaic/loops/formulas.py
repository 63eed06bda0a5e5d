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
        """(number of rows, number of columns)."""
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
      results: the results that have rows, ``(rows, cols)``, such as dx.
      partials: for each column sum, an array ``(blocks, cols)`` with the sums of each block.
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
        """Split a body's arguments by kind. `sizes` is `RowOperands.sizes`; the rest are counts."""
        return cls(*split(refs, *sizes, results, partials))


class Formula(Protocol):
    """A backward pass as functions of the elements of one row. All arrays are float32.

    `elements` has an array for each row operand. `columns` has values that depend on the column
    only; `stats` and `totals` have values that depend on the row only.
    """

    #: the number of leading row operands from which `terms` computes the terms of the row sums.
    summed: int
    #: the number of sums along a row that `finish` needs.
    row_sums: int
    #: the number of results that are sums over the rows, one for each column.
    column_sums: int

    def columns(self, params: Arrays) -> list[jax.Array]:
        """Compute the values per column that `terms` and `finish` need from the parameters."""
        ...

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        """Return the terms of each row sum. `elements` has the first `summed` operands only."""
        ...

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the row results (dx), and the terms of each column sum."""
        ...


def prepare(formula: Formula, params: Arrays) -> list[jax.Array]:
    """Return ``formula.columns(params)``, with the parameters converted to float32."""
    return formula.columns([p.astype(jnp.float32) for p in params])
