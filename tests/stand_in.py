"""A stand-in for a kernel: a module that the default takes where there is no GPU."""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxnorm.calls import backends
from jaxnorm_kernels.implementation import Implementation


class StandIn(types.ModuleType):
    """What every stand-in has, besides its functions and `why_unsupported`.

    Attributes:
      shapes: of each launch, which its functions note.
    """

    def __init__(self) -> None:
        super().__init__("jaxnorm_kernels_stand_in")
        self.shapes: list[Any] = []

    @property
    def IMPLEMENTATION(self) -> Implementation:  # noqa: N802
        backward: Any = getattr(self, "backward", None)
        return Implementation(self.forward, backward, self.why_unsupported)


@contextlib.contextmanager
def as_default(module: StandIn) -> Iterator[StandIn]:
    """Makes it the implementation ``"stand_in"``, which is the default on this platform."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setitem(backends._MODULES, "stand_in", module.__name__)
        platform = backends.local_platform()
        patch.setattr(backends, "_CANDIDATES", {platform: ("stand_in",)})
        jax.clear_caches()
        yield module
        jax.clear_caches()
