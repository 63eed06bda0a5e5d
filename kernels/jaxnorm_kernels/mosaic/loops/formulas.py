"""The interface between backward kernels and the formulas that they compute, and the launch.

A backward kernel loops over rows. The loop depends on the number and dtypes of the operands and
results, but not on the operation. The operation's `Formula` computes the results of one row.
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
        Each block stores its sums over its own rows of x in one row of the array. XLA adds these
        rows later.
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
        """Launch a kernel with this body; `sizes` are passed on to the function `launch`.

        Returns the results per element, followed by one array for each of the `column_sums` column
        sums. Such an array is float32 and has one row of partial sums per block. The caller must
        add these rows. The body must not refer to traced arrays, because JAX caches the traced
        body.
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

    * `elements`: one array per row operand (`BackwardCall.rows`), with elements of a row.
    * `columns`: values that depend only on the column: the results of the method `columns`.
    * `stats`: the row's saved statistics (`BackwardCall.stats`).
    * `totals`: the row's sums of the arrays that the method `terms` returns.
    """

    #: Number of row operands that `terms` reads. They are the first entries of `BackwardCall.rows`.
    summed: int
    #: Number of sums along a row that `finish` needs.
    row_sums: int
    #: Number of results that are sums over all rows, with a value per column.
    column_sums: int

    def columns(self, params: Arrays) -> list[jax.Array]:
        """Return the values per column that `terms` and `finish` use, such as 1 / scale."""
        ...

    def terms(self, elements: Arrays, columns: Arrays, stats: Arrays) -> list[jax.Array]:
        """Return the terms of the sums along the row: a list with one array for each sum.

        The kernel adds up the terms. `elements` contains only the first `summed` row operands.
        """
        ...

    def finish(
        self, elements: Arrays, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return two lists: the results per element, and the terms of the column sums.

        The first list has arrays such as dx. The second list has one array for each column sum: the
        terms that this row adds to the sum. `totals` has the sum along the row of each array that
        `terms` returns.
        """
        ...


def prepare(formula: Formula, params: Arrays) -> list[jax.Array]:
    """Return ``formula.columns(params)``, after converting the parameters to float32."""
    return formula.columns([p.astype(jnp.float32) for p in params])
