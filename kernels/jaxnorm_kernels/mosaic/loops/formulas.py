"""What a backward kernel computes, element by element, whatever the kernel that walks the rows.

A kernel knows how many row operands and row results there are, and their dtypes; a formula alone
knows what they mean.
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
    """What a backward kernel reads.

    Attributes:
      rows: ``(rows, cols)`` each, every one in a dtype of its own.
      stats: ``(rows,)`` float32 each: what belongs to a row.
      params: ``(cols,)`` or ``(groups, cols)`` each: what belongs to a column, or to a column of a
        group of rows.
      groups: of ``rows / groups`` consecutive rows, each with column sums of its own.
    """

    rows: Arrays
    stats: Arrays = ()
    params: Arrays = ()
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, cols = self.rows[0].shape
        return rows, cols

    @property
    def arrays(self) -> list[jax.Array]:
        """All of them: of rows, of single rows, of columns."""
        return [*self.rows, *self.stats, *self.params]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many there are of each kind: what `split` takes."""
        return len(self.rows), len(self.stats), len(self.params)


class BackwardRefs(NamedTuple):
    """What the body of a backward kernel gets: operands, results, and the scratch of a block.

    Attributes:
      rows, stats, params: see `RowOperands`.
      results: of rows, ``(rows, cols)``.
      partials: a row of column sums for each block, ``(blocks, cols)`` each.
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
        """Those of a body's arguments; `sizes` as `RowOperands.sizes`."""
        return cls(*split(refs, *sizes, results, partials))


class Formula(Protocol):
    """A backward pass, for elements of one row. All arrays are float32.

    `elements` are those of the row operands, `columns` what belongs to their columns, `stats` and
    `totals` what belongs to their row.
    """

    #: how many row operands the sums need, over the row and over the rows: the first ones.
    summed: int
    #: how many sums over the row `finish` needs.
    row_sums: int
    #: how many sums over the rows come out.
    column_sums: int

    def columns(self, params: Arrays) -> list[jax.Array]:
        """What `terms` and `finish` need of the parameters (scale, bias)."""
        ...

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        """The terms of the sums over the row, from the first `summed` operands."""
        ...

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The row results (dx), and the terms of the sums over the rows."""
        ...


def prepare(formula: Formula, params: Arrays) -> list[jax.Array]:
    """What a formula needs of the parameters, whatever their dtypes."""
    return formula.columns([p.astype(jnp.float32) for p in params])
