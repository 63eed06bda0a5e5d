"""The steps of a persistent block: which rows it processes, and the stages that hold them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.mosaic.device.barriers import release_used
from jaxnorm_kernels.mosaic.device.layouts import Ref


@dataclasses.dataclass(frozen=True)
class Stages:
    """A ring of stages: step k uses stage ``k % count`` until step ``k + count`` reuses it.

    Attributes:
      count: the number of stages.
      steps: the number of steps of the block.
      full: a barrier for each stage, at which its copies arrive.
      copies: returns the sources and targets of the copies of a step into a stage; each copies
        consecutive bytes.
      ring: the index of this ring if each warpgroup has its own, or None.
    """

    count: int
    steps: Any
    full: Ref
    copies: Callable[[Any, Any], Iterable[tuple[Ref, Ref]]]
    ring: Any = None

    def start(self) -> None:
        """Start to fill all stages."""
        pl.loop(0, jnp.minimum(self.count, self.steps))(self._fill)

    def at(self, k: Any) -> Any:
        """Return the stage of step `k`."""
        if self.ring is None:
            return lax.rem(k, self.count)
        return self.ring * self.count + lax.rem(k, self.count)

    def wait(self, k: Any) -> Any:
        """Wait until the stage of step `k` has arrived, and return it."""
        at = self.at(k)
        plgpu.barrier_wait(self.full.at[at])
        return at

    def refill(self, k: Any) -> None:
        """Start to fill the stage of step `k` with a later step, after its last use."""
        release_used()
        pl.when(k + self.count < self.steps)(functools.partial(self._fill, k + self.count))

    def _fill(self, k: Any) -> None:
        at = self.at(k)
        for source, target in self.copies(k, at):
            plgpu.copy_gmem_to_smem(
                source,
                target,
                self.full.at[at],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # rows of any length
            )


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of one block: every n-th step of a group of rows, which n blocks share.

    If the rows are not a multiple of a step's, the last step of the group overlaps the previous
    one.

    Attributes:
      rows: rows of a group.
      height: rows of a step.
      blocks: blocks that share a group.
      place: the index of this block among them.
      group: the group of this block, or None if there is only one.
    """

    rows: int
    height: int
    blocks: int
    place: Any
    group: Any = None

    @classmethod
    def of(cls, block: Any, *, rows: int, groups: int, blocks: int, height: int = 1) -> "Share":
        """Return the rows of a block; `rows` counts all groups, `blocks` those of one group."""
        if groups == 1:
            return cls(rows, height, blocks, block)
        place, group = lax.rem(block, blocks), lax.div(block, blocks)
        return cls(rows // groups, height, blocks, place, group)

    def count(self) -> Any:
        """Return the number of steps of this block."""
        steps = -(-self.rows // self.height)
        return lax.div(steps - self.place + self.blocks - 1, self.blocks)

    def first_row(self, k: Any) -> Any:
        """Return the first row of step `k`."""
        start = jnp.minimum(self._step(k) * self.height, self.rows - self.height)
        return self._of_all(start)

    @functools.cached_property
    def has_stale_rows(self) -> bool:
        """True if a step contains rows that also belong to another step."""
        return self.rows % self.height != 0

    def is_new(self, row: Any, k: Any) -> Any:
        """Return whether a row of step `k` is in no earlier step."""
        return row >= self._of_all(self._step(k) * self.height)

    def param(self, ref: Ref) -> Ref:
        """Return the part ``(cols,)`` of a parameter for this block's group of rows."""
        return ref if len(ref.shape) == 1 else ref.at[self.group]

    def _step(self, k: Any) -> Any:
        """Return the index of this block's step `k` within the group."""
        return self.place + k * self.blocks

    def _of_all(self, row: Any) -> Any:
        """Convert a row index of the group to one of the whole array."""
        return row if self.group is None else self.group * self.rows + row
