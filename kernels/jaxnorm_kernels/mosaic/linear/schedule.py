"""How the kernel of a norm with a product runs: how y is cut in tiles, and what a block holds.

Measured on an H100 (`benchmarks/sweeps/linear.py`: tiles, stages and groups of ten products).
"""

import dataclasses

from jaxnorm_kernels.linear_spec import LinearSpec
from jaxnorm_kernels.mosaic.device.gpu import Gpu, local_gpu

#: Warpgroups that multiply. Another one copies.
MULTIPLY = 2
#: Rows of a tile of y that one of them multiplies at a time: a wgmma's.
ROWS = 64
#: Columns of a tile of x: those of 16 bits fill a row of the widest swizzle.
DEPTH = 64
#: Bytes of y's rows in one store, and how many stores of a warpgroup are under way.
STORED_BYTES, STORES = 64, 2


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One way to run the kernel.

    Attributes:
      features: columns of a tile of y. It has 128 rows.
      stages: tiles of x and weight in shared memory.
      group: columns of tiles that follow each other before the next rows do: as many read the same
        rows of x, and the next rows the same columns of weight, while both are in the L2 cache.
    """

    features: int
    stages: int
    group: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return MULTIPLY * ROWS

    def tiles(self, spec: LinearSpec) -> tuple[int, int]:
        """Tiles of y: of rows, of columns."""
        return -(-spec.rows // self.rows), -(-spec.features // self.features)


# The larger a tile, the less is read for a product, and a wgmma has 256 columns at most: 192 take
# 1.09 times as long. Groups of 4, 16 or 32 take up to 1.11 times as long where weight exceeds L2.
_WIDE = Schedule(features=256, stages=4, group=8)
# Half of it, where there are not enough of the others for all multiprocessors.
_NARROW = Schedule(features=128, stages=6, group=8)


def choose(spec: LinearSpec, gpu: Gpu | None = None) -> Schedule:
    """The schedule for a call."""
    rows, columns = _WIDE.tiles(spec)
    return _WIDE if rows * columns >= (gpu or local_gpu()).sms else _NARROW


def stored_columns(spec: LinearSpec) -> int:
    """Of y, in one store."""
    return STORED_BYTES // spec.y_dtype.itemsize
