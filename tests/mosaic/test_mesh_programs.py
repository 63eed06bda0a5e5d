"""The arrays that two H100s exchange for a linear loss and its gradients, in a compiled program."""

import math

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import H100
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm

BATCH, LENGTH, D, CLASSES = 8, 512, 1024, 32768


@pytest.fixture(scope="module")
def mesh(compiler):
    """Return a mesh of two H100s. They need not be present, because programs are only compiled.

    The fixture `compiler` prepares compilation for a GPU that is absent.
    """
    del compiler
    topology = topologies.get_topology_desc("gpu", "cuda", target_config=H100, topology="1x1x2")
    return Mesh(np.array(topology.devices), "data")


ROWS = BATCH * LENGTH
# For each layout: the sharding of x, the sharding of the head (the weight of the logits), and a
# dict from each collective to the shapes of the arrays that it exchanges.
LAYOUTS = {
    # FSDP: x is split over the batch, and the head along d.
    "d of the head": (
        P("data"),
        P("data"),
        {"all-gather": [(D, CLASSES)], "reduce-scatter": [(D // 2, CLASSES)]},
    ),
    # There are fewer rows than classes, so x is gathered instead of the head.
    "classes": (
        P("data"),
        P(None, "data"),
        {"all-gather": [(BATCH, LENGTH, D)], "reduce-scatter": [(BATCH // 2, LENGTH, D)]},
    ),
    # If embedding tables are split along d, so is x: each device has half of each row.
    "d of x and of the head": (
        P(None, None, "data"),
        P("data"),
        {
            "all-gather": [(D, CLASSES)],
            "all-to-all": [(BATCH // 2, LENGTH, D), (BATCH, LENGTH, D // 2)],
            "reduce-scatter": [(D // 2, CLASSES)],
        },
    ),
}


@pytest.mark.compiles
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_bits_are_exchanged(layout, mesh):
    """With a bfloat16 x and a float32 head, matmuls run in bfloat16.

    The arrays that the devices exchange are bfloat16, too.
    """
    x_spec, head_spec, expected = LAYOUTS[layout]

    def operand(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    x = operand((BATCH, LENGTH, D), jnp.bfloat16, x_spec)
    head = operand((D, CLASSES), jnp.float32, head_spec)
    labels = operand((BATCH, LENGTH), jnp.int32, P("data"))

    def loss(x, head, labels):
        return jaxnorm.linear_softmax_cross_entropy(x, head, labels, dtype=x.dtype)

    step = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(x.sharding, head.sharding))
    text = step.lower(x, head, labels).compile().as_text()
    found = {}
    for each in hlo.collectives(text, mesh.size):
        dtype, sizes = each.array.rstrip("]").split("[")
        elements = math.prod(map(int, filter(None, sizes.split(","))))
        if elements >= ROWS * D // 4:
            assert dtype == "bf16", each
            assert each.runs == 1, each
            found.setdefault(each.name, []).append(elements)
    # XLA may reshape an exchanged array, so only the numbers of elements are compared.
    assert {name: sorted(sizes) for name, sizes in found.items()} == {
        name: sorted(map(math.prod, shapes)) for name, shapes in expected.items()
    }
