"""Helpers for tests of meshes: shardings of arrays, and what runs on a shard."""

import math

import pytest
from jax.sharding import PartitionSpec as P
from meshes import Case, collectives
from stand_in import StandIn, as_default

from jaxnorm_kernels import xla


class Kernels(StandIn):
    """The stand-in. It counts its launches, and refuses what a kernel would refuse."""

    def __getattr__(self, name):
        function = getattr(xla, name)

        def launch(operands, *rest):
            (x, *_), spec = operands, rest[-1]
            assert x.shape == (spec.rows, spec.cols), "not seen as rows"
            assert spec.axes == (-1,)
            assert not spec.cols_over
            self.shapes.append(x.shape)
            return function(operands, *rest)

        return launch

    def why_unsupported(self, spec):
        return "it has no masked kernel" if spec.logits.has_mask else None


@pytest.fixture(name="kernels", params=["xla", "kernel"])
def which_kernels(request):
    """The default implementation here: xla (None), or the stand-in for a kernel."""
    if request.param == "xla":
        yield None
        return
    with as_default(Kernels()) as module:
        yield module


CASES = [
    Case("data", {"data": 8}, P("data")),
    Case("data x sequence", {"data": 4, "seq": 2}, P("data", "seq")),
    Case("one axis over two", {"data": 2, "fsdp": 4}, P(("data", "fsdp"))),
    Case("fsdp", {"data": 2, "fsdp": 4}, P(("data", "fsdp")), P("fsdp")),
    Case("three axes", {"data": 2, "seq": 2, "model": 2}, P("data", "seq")),
    Case("replicated", {"data": 8}, P()),
]


def moved(compiled):
    """Return the shapes of collectives with arrays at least as large as a shard of x."""
    found = collectives(compiled)
    return [s for v in found.values() for s in v if s and math.prod(map(int, s.split(","))) >= 512]
