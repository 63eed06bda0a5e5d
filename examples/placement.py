"""Places the arrays of a training run on one device, or shards them over a mesh of devices.

Batches are sharded over all mesh axes. Parameters and the optimiser state are sharded over the mesh
axis "fsdp" (fully sharded data parallelism). Each array is split along one axis whose size is a
multiple of the size of "fsdp". If an array has no such axis, it is replicated.
"""

import argparse
import contextlib
import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp")


def mesh_sizes(text: str) -> dict[str, int]:
    """Parse the value of --mesh: "data=2,fsdp=4" becomes {"data": 2, "fsdp": 4}."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        sizes = {name: int(size) for name, size in pairs}
    except ValueError:
        sizes = {}
    unique = len(sizes) == len(text.split(","))
    if not sizes or not unique or set(sizes) - set(AXES) or min(sizes.values()) < 1:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected AXIS=N,... with axes out of {', '.join(AXES)}, "
            "such as data=2,fsdp=2"
        )
    return sizes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Places arrays on the devices of a mesh or, if `mesh` is None, on JAX's default device."""

    mesh: Mesh | None = None

    @classmethod
    def over(cls, sizes: dict[str, int] | None) -> "Placement":
        """Return a placement on a mesh of these sizes.

        Without a GPU, the CPU is split into virtual devices. Raise ValueError if there are too few
        devices.
        """
        if sizes is None:
            return cls()
        count = math.prod(sizes.values())
        with contextlib.suppress(RuntimeError):  # raised if JAX has already initialised its devices
            jax.config.update("jax_num_cpu_devices", count)
        devices = jax.devices()
        if len(devices) < count:
            raise ValueError(
                f"got {len(devices)} {devices[0].platform} devices; expected {count} for this mesh"
            )
        shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
        mesh = jax.make_mesh(shape, tuple(sizes), axis_types=types, devices=devices[:count])
        return cls(mesh)

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def batch(self, batch: np.ndarray) -> Any:
        if self.mesh is None:
            return batch
        return jax.device_put(batch, self._sharding(PartitionSpec(self.mesh.axis_names)))

    def shardings(self, state: Any) -> Any:
        """Return the shardings of parameters or optimiser state, or None without a mesh."""
        if self.mesh is None:
            return None
        return jax.tree.map(lambda a: self._sharding(self._spec(a.shape)), state)

    def _spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        shards = dict(self.mesh.shape).get("fsdp", 1) if self.mesh else 1
        fitting = [axis for axis, size in enumerate(shape) if size % shards == 0]
        if shards == 1 or not fitting:
            return PartitionSpec()
        return PartitionSpec(*[None] * fitting[0], "fsdp")

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, spec)
