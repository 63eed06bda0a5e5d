"""What a backward kernel computes, element by element, whatever the kernel that walks the rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxnorm_kernels.mosaic.device.layouts import Ref, load, store

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


#: Where a kernel keeps what belongs to the columns: in registers; or the bare parameters in shared
#: memory, and the rest recomputed for each row.
Columns = Literal["registers", "recomputed"]


def keep_columns(
    formula: Formula,
    where: Columns,
    params: Sequence[Arrays],
    held: Sequence[Sequence[Ref]],
    layout: Any,
) -> list[Callable[[], list[jax.Array]]]:
    """For each set of columns a function that gives what the formula needs of them.

    Args:
      params: for each set of columns the parameters.
      held: for each set of columns the shared memory, of `held_types`.
      layout: of the parameters. A thread reads what it wrote itself, so that there is no barrier.
    """

    def reread(refs: Sequence[Ref]) -> list[jax.Array]:
        return prepare(formula, [load(ref, layout) for ref in refs])

    def keep(params: Arrays, refs: Sequence[Ref]) -> Callable[[], list[jax.Array]]:
        if where == "registers":
            columns = prepare(formula, params)
            return lambda: columns
        for ref, value in zip(refs, params):
            store(ref, value)
        return functools.partial(reread, refs)

    return [keep(p, refs) for p, refs in zip(params, held)]


def held_types(where: Columns, params: Arrays, shape: tuple[int, ...]) -> list[Any]:
    """Shared memory for `keep_columns`, each of `shape`."""
    return [] if where == "registers" else [plgpu.SMEM(shape, p.dtype) for p in params]


def split(refs: Sequence[Ref], *sizes: int) -> tuple[Sequence[Ref], ...]:
    """`refs` in parts of these sizes, and the rest."""
    parts = []
    for size in sizes:
        parts.append(refs[:size])
        refs = refs[size:]
    return (*parts, refs)
