"""What a persistent block works on: the rows that it takes, and the stages that bring them."""

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
    """A ring of stages: step k is in stage ``k % count`` until that of step ``k + count`` is.

    Attributes:
      count: of the stages.
      steps: of the block.
      full: a barrier for each stage, which its copies arrive at.
      copies: of a step and its stage, sources and targets, each of consecutive bytes.
      ring: which one of the block's rings, where each warpgroup has one; None for one of all.
    """

    count: int
    steps: Any
    full: Ref
    copies: Callable[[Any, Any], Iterable[tuple[Ref, Ref]]]
    ring: Any = None

    def start(self) -> None:
        """Starts to fill all stages."""
        pl.loop(0, jnp.minimum(self.count, self.steps))(self._fill)

    def at(self, k: Any) -> Any:
        """The stage of step `k`."""
        if self.ring is None:
            return lax.rem(k, self.count)
        return self.ring * self.count + lax.rem(k, self.count)

    def wait(self, k: Any) -> Any:
        """The stage of step `k`, once all of it has arrived."""
        at = self.at(k)
        plgpu.barrier_wait(self.full.at[at])
        return at

    def refill(self, k: Any) -> None:
        """After the last use of step `k`: starts to fill its stage with a later step."""
        release_used()
        pl.when(k + self.count < self.steps)(functools.partial(self._fill, k + self.count))

    def _fill(self, k: Any) -> None:
        at = self.at(k)
        for source, target in self.copies(k, at):
            plgpu.copy_gmem_to_smem(
                source,
                target,
                self.full.at[at],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # of any length
            )


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of one block: every n-th step of a group of rows, which n blocks share.

    Of all steps of a group, the last one overlaps the one before it where the rows do not divide.

    Attributes:
      rows: of a group.
      height: rows of a step.
      blocks: that share a group.
      place: of this block among them.
      group: that it works on; None where there is one alone.
    """

    rows: int
    height: int
    blocks: int
    place: Any
    group: Any = None

    @classmethod
    def of(cls, block: Any, *, rows: int, groups: int, blocks: int, height: int = 1) -> "Share":
        """The rows of block number `block`; `rows` of all groups, `blocks` of each."""
        if groups == 1:
            return cls(rows, height, blocks, block)
        place, group = lax.rem(block, blocks), lax.div(block, blocks)
        return cls(rows // groups, height, blocks, place, group)

    def count(self) -> Any:
        """Steps of this block."""
        steps = -(-self.rows // self.height)
        return lax.div(steps - self.place + self.blocks - 1, self.blocks)

    def first_row(self, k: Any) -> Any:
        """The first row of step `k`."""
        start = jnp.minimum(self._step(k) * self.height, self.rows - self.height)
        return self._of_all(start)

    @functools.cached_property
    def has_stale_rows(self) -> bool:
        """Whether a step has rows that belong to another one too."""
        return self.rows % self.height != 0

    def is_new(self, row: Any, k: Any) -> Any:
        """Whether a row of step `k` is in no step before it."""
        return row >= self._of_all(self._step(k) * self.height)

    def param(self, ref: Ref) -> Ref:
        """The ``(cols,)`` of a parameter of all rows or, one for each, of groups."""
        return ref if len(ref.shape) == 1 else ref.at[self.group]

    def _step(self, k: Any) -> Any:
        """Step `k` of this block, counted in the group."""
        return self.place + k * self.blocks

    def _of_all(self, row: Any) -> Any:
        """A row of the group, counted in all rows."""
        return row if self.group is None else self.group * self.rows + row
