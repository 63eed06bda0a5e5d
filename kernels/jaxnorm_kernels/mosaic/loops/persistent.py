"""Stages of shared memory that the copy engine (TMA) keeps filled with a block's next steps."""

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
