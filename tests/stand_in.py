"""A stand-in for kernels: an implementation that is the default in tests without a GPU."""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxnorm.calls import backends
from jaxnorm_kernels import xla
from jaxnorm_kernels.implementation import Implementation
from jaxnorm_kernels.specs import LogitsOptions, NormOptions, SoftmaxOptions


class StandIn(types.ModuleType):
    """The base class of modules that replace the kernels of an implementation in tests.

    Subclasses define the functions of the kernels and `why_unsupported`.

    Attributes:
      shapes: a list that a subclass may fill with the shape of x in each call.
    """

    def __init__(self) -> None:
        super().__init__("jaxnorm_kernels_stand_in")
        self.shapes: list[Any] = []

    @property
    def IMPLEMENTATION(self) -> Implementation:  # noqa: N802
        backward: Any = getattr(self, "backward", None)
        return Implementation(self.forward, backward, self.why_unsupported)


class Kernels(StandIn):
    """A stand-in for kernels that runs XLA's code.

    Like kernels, its functions take two-dimensional arrays of rows and run on a single shard.

    Attributes:
      tables: a list with the shape of the rotary tables of each call that has them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(xla, name)

        def launch(operands: Any, *rest: Any) -> Any:
            (x, *_), spec = operands, rest[-1]
            assert x.shape == (spec.rows, spec.cols), "not seen as rows"
            assert AxisType.Explicit not in jax.typeof(x).sharding.mesh.axis_types
            self.shapes.append(x.shape)
            if isinstance(spec.options, NormOptions) and spec.norm.rotated:
                shared = spec.norm.table_rows
                assert operands.cos.shape == (shared.rows, spec.norm.rotated // 2)
                self.tables.append(operands.cos.shape)
                tables = (_of_rows(t, shared) for t in (operands.cos, operands.sin))
                operands = operands._replace(**dict(zip(("cos", "sin"), tables)))
            return function(operands, *rest)

        return launch

    def why_unsupported(self, spec: Any) -> str | None:
        if getattr(spec, "plain", not spec.cols) or spec.cols_over:
            return "only plain JAX"
        options = getattr(spec, "options", None)
        has_mask = isinstance(options, LogitsOptions) and options.has_mask
        has_bias = isinstance(options, SoftmaxOptions) and options.logits_bias_dtype is not None
        return "it has no masked kernel" if has_mask or has_bias else None


def _of_rows(table: jax.Array, shared: Any) -> jax.Array:
    """Return a rotary table, expanded to one row for each row of x.

    `shared` describes which rows of x share a row of the table.
    """
    sizes = [size if has_axis else 1 for size, has_axis in shared.segments]
    whole = [size for size, _ in shared.segments]
    table = jnp.broadcast_to(table.reshape(*sizes, -1), (*whole, table.shape[-1]))
    return table.reshape(int(np.prod(whole)), table.shape[-1])


@contextlib.contextmanager
def as_default(module: StandIn) -> Iterator[StandIn]:
    """Register `module` as ``"stand_in"`` and make it the default implementation.

    On leaving the ``with`` block, the registration and the default are undone.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setitem(backends.MODULES, "stand_in", module.__name__)
        platform = backends.local_platform()
        patch.setattr(backends, "_CANDIDATES", {platform: ("stand_in",)})
        jax.clear_caches()
        yield module
        jax.clear_caches()
