"""What a backward kernel computes, element by element, whatever the kernel that walks the rows."""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device.layouts import Ref

Arrays = Sequence[jax.Array]


class Formula(Protocol):
    """A backward pass, for elements of one row. All arrays are float32.

    `saved` and `d` (the cotangent) are elements, `columns` what belongs to their columns, `stats`
    and `totals` what belongs to their row.
    """

    #: how many sums over the row `finish` needs.
    row_sums: int
    #: how many sums over the rows come out.
    column_sums: int

    def columns(self, params: Arrays) -> list[jax.Array]:
        """What `terms` and `finish` need of the parameters (scale, bias)."""
        ...

    def terms(
        self, saved: jax.Array, d: jax.Array, columns: Arrays, stats: Arrays
    ) -> list[jax.Array]:
        """The terms of the sums over the row."""
        ...

    def finish(
        self, saved: jax.Array, d: jax.Array, columns: Arrays, stats: Arrays, totals: Arrays
    ) -> tuple[jax.Array, list[jax.Array]]:
        """dx, and the terms of the sums over the rows."""
        ...


def prepare(formula: Formula, params: Arrays) -> list[jax.Array]:
    """What a formula needs of the parameters, whatever their dtypes."""
    return formula.columns([p.astype(jnp.float32) for p in params])


def split(refs: Sequence[Ref], *sizes: int) -> tuple[Sequence[Ref], ...]:
    """`refs` in parts of these sizes, and the rest."""
    parts = []
    for size in sizes:
        parts.append(refs[:size])
        refs = refs[size:]
    return (*parts, refs)
