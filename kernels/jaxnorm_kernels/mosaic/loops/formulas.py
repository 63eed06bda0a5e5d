"""The interface between backward kernels and the formulas that they compute, and their launch.

A backward kernel loops over rows. It depends on the number and dtypes of its operands and results,
but not on their meaning. The meaning is in a `Formula`, which computes one row.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm_kernels.mosaic.device.launch import launch, split
from jaxnorm_kernels.mosaic.device.layouts import Ref

Arrays = Sequence[jax.Array]


class BackwardRefs(NamedTuple):
    """The refs that a backward kernel's body gets: operands, results and scratch memory.

    Attributes:
      rows, stats, params: operands, as in `BackwardCall`.
      results: results with a value per element, ``(rows, cols)``, such as dx.
      partials: an array ``(blocks, cols)`` for each column sum, such as the gradient of a scale.
        Each block stores the sums over its own rows of x in one row, and XLA adds these rows.
      scratch: shared memory and barriers.
    """

    rows: Sequence[Ref]
    stats: Sequence[Ref]
    params: Sequence[Ref]
    results: Sequence[Ref]
    partials: Sequence[Ref]
    scratch: Sequence[Any]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("rows", "stats", "params"),
    meta_fields=("groups", "blocks", "results", "name"),
)
@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """A call of a backward kernel in which each block processes many rows.

    Attributes:
      rows: arrays ``(rows, cols)`` such as y and dy, each in its own dtype.
      stats: float32 arrays ``(rows,)`` with a statistic per row, such as the reciprocal standard
        deviation.
      params: parameters such as a norm's scale. Their shape is ``(cols,)``, or ``(groups, cols)``
        if each group of rows has its own parameters.
      groups: number of groups. A group consists of ``rows / groups`` consecutive rows, and has its
        own column sums, such as the gradient of its scale.
      blocks: number of blocks, or of clusters, for each group of rows.
      results: dtypes of the results per element.
      name: the kernel's name.
    """

    rows: Arrays
    stats: Arrays
    params: Arrays
    groups: int
    blocks: int
    results: Sequence[np.dtype]
    name: str

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of each array in `rows`: (number of rows, number of columns)."""
        rows, cols = self.rows[0].shape
        return rows, cols

    def launch(
        self, body: Callable[[BackwardRefs], None], *, column_sums: int, **sizes: Any
    ) -> tuple[jax.Array, ...]:
        """Launch the kernel with this body. `sizes` are further arguments of the function `launch`.

        Returns the results per element, followed by the column sums. Each column sum is returned as
        a float32 array with one row of partial sums per block, which the caller must add. The body
        must not refer to traced arrays, because JAX caches the traced body.
        """
        counts = [len(arrays) for arrays in (self.rows, self.stats, self.params, self.results)]
        blocks = self.groups * self.blocks
        sums = ((blocks, self.shape[1]), np.dtype(np.float32))
        return launch(
            lambda *refs: body(BackwardRefs(*split(refs, *counts, column_sums))),
            [*self.rows, *self.stats, *self.params],
            name=self.name,
            outputs=[*((self.shape, dtype) for dtype in self.results), *[sums] * column_sums],
            blocks=blocks,
            **sizes,
        )


class Formula(Protocol):
    """A backward pass, as functions of the elements of one row. All arrays are float32.

    Arguments of its methods:

    * `elements`: one array per row operand, with the elements of a row.
    * `columns`: values that depend only on the column (computed by the method `columns`).
    * `stats` and `totals`: values that depend only on the row.
    """

    #: Number of row operands that `terms` reads. They precede all other row operands.
    summed: int
    #: Number of sums along a row that `finish` needs.
    row_sums: int
    #: Number of results that are sums over all rows, with a value per column.
    column_sums: int

    def columns(self, params: Arrays) -> list[jax.Array]:
        """Return the values per column that `terms` and `finish` use, such as G and 1 / G."""
        ...

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        """Return the terms of the sums along the row: a list with one array for each sum.

        The kernel adds up the terms. `elements` contains only the first `summed` row operands,
        because the sums do not need the others.
        """
        ...

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return two lists: the results per element, and the values for the column sums.

        The first list has arrays such as dx. The second list has one array for each column sum. It
        contains the values that this row adds to the column sum. `totals` has the row sums. There
        is one sum for each array of the list that `terms` returns: the sum of its elements.
        """
        ...


def prepare(formula: Formula, params: Arrays) -> list[jax.Array]:
    """Return ``formula.columns(params)``, after converting the parameters to float32."""
    return formula.columns([p.astype(jnp.float32) for p in params])
