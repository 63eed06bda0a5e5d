"""RMSNorm and a following matmul in one kernel, with Hopper's matrix instructions (wgmma).

With G = scale + scale_offset, row by row::

    w = G * weight                       rounded to the matmul's dtype, before the kernel
    z = rstd * (x @ w) + bias            rstd = 1 / sqrt(mean(x^2) + epsilon)
    y = activation(z)

The kernel computes the sum of squares from the tiles of x that it multiplies, so rstd is available
when the matmul is finished. The normalised array is never stored. In float16, G * weight might
overflow, so w is c * G * weight. The factor c is a power of 2 with c * |G| < 1. The result of the
matmul is multiplied by 1 / c.

In this module, a *tile* is a rectangular part of a matrix. Each block computes several tiles of y,
one after the other. The first two of its three warpgroups multiply; each of them computes half of
the rows of a tile of y. The third warpgroup copies tiles of x and weight to a ring of buffers in
shared memory. A multiplying warpgroup has up to two matmul instructions in flight, and adds the
squares of x while they run.

The kernel could multiply x by G, instead of using a weight that was multiplied by G before. This
takes more time. The table has times for 8192 rows of bfloat16 on an H100. They are relative to the
time of cuBLAS for the matmul without the norm::

    weight                               2048 x 3072    4096 x 6144    4096 x 14336
    this kernel, without G                   1.04           1.06           1.09
    with a pass that computes G * weight     1.12           1.13           1.16
    x multiplied by G in registers           1.16           1.17           1.27
    x multiplied by G in shared memory       1.30           1.32           1.39
    XLA's norm, then cuBLAS                  1.18           1.09           1.05

If x is multiplied in registers, no matmul may be in flight while x is written to the registers.
Otherwise, ptxas serialises all matmuls. If x is multiplied in shared memory, the loads and stores
of x compete with the loads of the matrix instructions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.launching import local_capability
from jaxnorm_kernels.mosaic.device.gpu import Gpu, local_gpu
from jaxnorm_kernels.mosaic.device.launch import (
    BLOCK,
    WARPGROUP,
    is_interpreted,
    launch,
    release_used,
)
from jaxnorm_kernels.mosaic.device.layouts import Ref, load
from jaxnorm_kernels.mosaic.norm.elementwise import ACTIVATIONS
from jaxnorm_kernels.specs import Activation

# -------------------------------------------------------------------------------------------------
# The schedule: sizes of the tiles of y, and of the buffers of a block.
#
# The sizes were chosen with a sweep on an H100 (commit e274726a), which timed ten matmuls with
# different tiles, stages and groups.


#: Number of multiplying warpgroups in a block. The block has one more warpgroup, which copies tiles
#: to shared memory.
MULTIPLY = 2
#: Number of rows of y that a warpgroup computes at the same time. A wgmma instruction computes 64
#: rows.
ROWS = 64
#: Number of columns of a tile of x. 64 values of 16 bits fill a row of the widest swizzle, which
#: has 128 bytes. (A swizzle is an order of elements in shared memory that avoids bank conflicts.)
DEPTH = 64
#: `STORED_BYTES`: number of neighbouring bytes that a store writes in each row of y.
#: `STORES`: number of stores that a warpgroup may have in flight.
STORED_BYTES, STORES = 64, 2


@dataclasses.dataclass(frozen=True)
class ProductSchedule:
    """Schedule of the kernel.

    Attributes:
      features: number of columns of a tile of y. A tile has 128 rows.
      stages: number of buffers for tiles of x and weight in shared memory.
      group: width of a band, in tiles. y is computed in vertical bands, and within a band, tiles
        are computed row by row. Two tiles, one above the other, need the same columns of weight. In
        a narrow band, one is computed soon after the other, so these columns are still in the L2
        cache.
    """

    features: int
    stages: int
    group: int

    @property
    def rows(self) -> int:
        """Number of rows of a tile of y."""
        return MULTIPLY * ROWS

    def tiles(self, rows: int, features: int) -> tuple[int, int]:
        """Return how many tiles y has along its first axis (rows) and along its second axis."""
        return -(-rows // self.rows), -(-features // self.features)


# The larger the tiles are, the fewer bytes a matmul loads in total. So a tile has 256 columns, the
# maximum of a wgmma instruction. A kernel with tiles of 192 columns takes 1.09 times as long. If
# weight does not fit in the L2 cache, a kernel with a `group` of 4, 16 or 32 takes up to 1.11 times
# as long as with 8.
_WIDE = ProductSchedule(features=256, stages=4, group=8)
# Narrow tiles are half as large as wide tiles. They are used if y has fewer wide tiles than the GPU
# has SMs. With wide tiles, some SMs would have no tile to compute.
_NARROW = ProductSchedule(features=128, stages=6, group=8)


def choose(rows: int, features: int, gpu: Gpu | None = None) -> ProductSchedule:
    """Choose the schedule for an array y of this shape."""
    return _WIDE if math.prod(_WIDE.tiles(rows, features)) >= (gpu or local_gpu()).sms else _NARROW


_F32 = np.dtype(np.float32)

# x and weight are padded with zeros. The number of columns of x, and the numbers of rows and
# columns of weight, become multiples of this number: 16 values of 16 bits, which fill a row (32
# bytes) of the narrowest swizzle. A bias is padded to complete tiles, because a load must not leave
# the array.
_SWIZZLED = 16

# Number of registers per thread in the warpgroups that multiply, and in the warpgroup that copies.
# The three warpgroups of a block share 65536 registers. Copying needs only few registers, so the
# two multiplying warpgroups get most of the registers.
_REGISTERS, _REGISTERS_TO_COPY = 232, 40


# The kernel requires that the numbers of rows and columns of x, and the number of columns of
# weight, are multiples of this number, because of the asynchronous copies.
_MULTIPLE = 8
# Row indices are int32. The limit is below 2^31, because the last tile may extend beyond the last
# row, and its indices must not overflow either.
_MAX_ROWS = 2**31 - 2**16

# Maps each dtype to the only matmul algorithm that the kernel implements for it. If the setting
# ``jax.default_matmul_precision`` names an algorithm (in upper case), it must be the algorithm in
# this table; otherwise, the kernel does not support the call. If the setting names a precision,
# such as "float32", every precision is supported: the kernel adds in float32, and products of
# 16-bit numbers are exact in float32.
_ALGORITHMS = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}


def why_unsupported(
    sizes: tuple[int, int, int],
    dtype: np.dtype,
    dtypes: Mapping[str, np.dtype],
    precision: str | None = None,
) -> str | None:
    """Return the reason why the kernel cannot run a call, or None if it can.

    Args:
      sizes: number of rows of x, columns of x, and columns of weight.
      dtype: dtype of the matmul's operands.
      dtypes: maps the names x, weight, y, scale and bias to dtypes. scale and bias are optional.
      precision: the value of ``jax.default_matmul_precision``.
    """
    if local_capability() not in (90, None):
        return "its kernel needs the matrix instructions of compute capability 9.0 (Hopper)"
    if not all(isinstance(size, int) for size in sizes):
        return (
            "kernels need sizes that are known when the call is traced, and x has a symbolic size"
        )
    reasons = {
        "an array is float64, and kernels compute in float32": any(
            each.itemsize > 4 for each in dtypes.values()
        ),
        "its matmul supports only bfloat16 and float16; cast weight, or give dtype= one of them": (
            dtype.name not in _ALGORITHMS
        ),
        "its kernel does not cast x, so x needs the dtype of the matmul": (dtypes["x"] != dtype),
        "an array has size 0, so there is nothing to compute": 0 in sizes,
        "its matmul multiplies 16-bit numbers and adds them in float32, and "
        "jax_default_matmul_precision names another algorithm": (
            (precision or "").isupper() and precision != _ALGORITHMS.get(dtype.name)
        ),
        f"its kernel needs numbers of rows and columns that are multiples of {_MULTIPLE}": any(
            size % _MULTIPLE for size in sizes
        ),
        f"x has more rows than the {_MAX_ROWS} that 32-bit indices allow": sizes[0] > _MAX_ROWS,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def rms_norm_linear_fwd(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    dtype: np.dtype,
    epsilon: float,
    scale_offset: float = 0.0,
    activation: Activation | None = None,
    schedule: ProductSchedule | None = None,
) -> jax.Array:
    """Return ``activation(rms_norm(x) @ weight + bias)`` in `dtype`.

    x is ``(rows, cols)`` in the dtype of the matmul, weight is ``(cols, features)``, scale
    ``(cols,)`` and bias ``(features,)``. `schedule` replaces the default schedule.
    """
    sizes = *x.shape, weight.shape[1]
    rows, _, features = sizes
    schedule = schedule or choose(rows, features)
    weight, power = _scaled_weight(weight, scale, scale_offset, x.dtype)
    multiples = {"x": (1, _SWIZZLED), "weight": (_SWIZZLED,) * 2, "bias": (schedule.features,)}
    by_name = {"x": x, "weight": weight, "bias": bias, "power": power}
    operands = {
        name: _padded(a, multiples.get(name, (1,))) for name, a in by_name.items() if a is not None
    }
    output = jax.ShapeDtypeStruct((rows, operands["weight"].shape[1]), dtype)
    shared = _shared(schedule, operands, output)
    # JAX caches the traced body, so the body must not refer to traced arrays.
    names = (*operands, "y")

    def body(*refs: Ref) -> None:
        arrays = dict(zip(names, refs))
        scratch = dict(zip(shared, refs[len(arrays) :]))
        kernel = _ProductKernel(sizes, epsilon, activation, schedule, arrays, scratch)
        index = lax.axis_index(WARPGROUP)
        pl.when(index == MULTIPLY)(kernel.copy)
        pl.when(index < MULTIPLY)(kernel.multiply)

    (y,) = launch(
        body,
        [*operands.values()],
        name="jaxnorm_rms_norm_linear_fwd",
        outputs=[(output.shape, output.dtype)],
        blocks=min(math.prod(schedule.tiles(rows, features)), local_gpu().sms),
        warpgroups=MULTIPLY + 1,
        scratch=[*shared.values()],
    )
    return y[:, :features]


def _scaled_weight(
    weight: jax.Array, scale: jax.Array | None, scale_offset: float, dtype: np.dtype
) -> tuple[jax.Array, jax.Array | None]:
    """Return two arrays: c * G * weight in `dtype`, and the number 1 / c as a ``(1,)`` array.

    G is scale + scale_offset. In float16, G * weight might overflow. The factor c prevents this: it
    is a power of 2, and c * |G| is below 1 for every column. In bfloat16, or without a scale, c is
    1, and None is returned instead of 1 / c.
    """
    if scale is None:
        return weight.astype(dtype), None
    g, power = scale.astype(_F32) + scale_offset, None
    if dtype == np.float16:
        _, exponent = jnp.frexp(jnp.max(jnp.abs(g), keepdims=True))
        g, power = jnp.ldexp(g, -exponent), jnp.ldexp(jnp.ones((), g.dtype), exponent)
    return (weight.astype(g.dtype) * g[:, None]).astype(dtype), power


def _padded(array: jax.Array, multiples: Sequence[int]) -> jax.Array:
    """Pad an array with zeros, so that the sizes of its axes are multiples of these numbers."""
    widths = [(0, -size % multiple) for size, multiple in zip(array.shape, multiples)]
    return jnp.pad(array, widths) if any(after for _, after in widths) else array


def _shared(
    schedule: ProductSchedule, operands: dict[str, jax.Array], y: jax.ShapeDtypeStruct
) -> dict[str, Any]:
    """Return a dict that maps names to the shared memory and the barriers of a block."""
    stages = schedule.stages
    return {
        # The matrix instructions require the same swizzle for x and weight.
        "x": _swizzled((stages, schedule.rows, DEPTH), operands["x"], operands["weight"]),
        "weight": _swizzled((stages, DEPTH, schedule.features), operands["weight"], operands["x"]),
        "stored": _swizzled((MULTIPLY, STORES, ROWS, STORED_BYTES // y.dtype.itemsize), y),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=MULTIPLY, num_barriers=stages),
    }


def _swizzled(shape: tuple[int, ...], *arrays: Any) -> Any:
    """Return shared memory for tiles of ``arrays[0]``, in the layout of the matrix instructions.

    `shape` is the shape of the returned memory. Its layout has the widest swizzle that fits, up to
    128 bytes. A swizzle of n bytes fits if n divides the size in bytes of the last axis of `shape`,
    and of the last axis of each of `arrays`. `arrays` also has the other operand of the matmul,
    whose memory needs the same swizzle. Another call, with this operand first, makes that memory.
    """
    dtype = arrays[0].dtype
    swizzle = math.gcd(
        128, *(n * dtype.itemsize for n in (shape[-1], *(a.shape[-1] for a in arrays)))
    )
    transforms: Any = plgpu  # mypy considers these classes abstract
    tiled = transforms.TilingTransform((8, swizzle // dtype.itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiled, transforms.SwizzleTransform(swizzle)))


@dataclasses.dataclass(frozen=True)
class _ProductKernel:
    """The program that each block runs: two warpgroups run `multiply`, and one runs `copy`.

    Attributes:
      sizes: number of rows of x, columns of x, and columns of weight.
      epsilon, activation: as in `rms_norm_linear_fwd`.
      schedule: the schedule.
      arrays: maps names to the refs of the operands and of y, in global memory.
      shared: maps names to shared memory and barriers.
    """

    sizes: tuple[int, int, int]
    epsilon: float
    activation: Activation | None
    schedule: ProductSchedule
    arrays: dict[str, Ref]
    shared: dict[str, Any]

    @property
    def steps(self) -> int:
        """Number of steps for a tile of y. A step multiplies a tile of x with a tile of weight."""
        return -(-self.sizes[1] // DEPTH)

    def each_tile(self, body: Callable[[Any, Any, Any], None]) -> None:
        """Call ``body(t, row, column)`` for each of the block's tiles of y.

        `t` is the number of tiles that the block has processed before. `row` and `column` are the
        indices of the tile's first row and first column in y.
        """
        rows, columns = self.schedule.tiles(self.sizes[0], self.sizes[2])
        first, blocks = lax.axis_index(BLOCK), lax.axis_size(BLOCK)
        mine = lax.div(rows * columns - first + blocks - 1, blocks)

        @pl.loop(0, mine)
        def _(t: Any) -> None:
            place = first + t * blocks
            i, j = plgpu.planar_snake(place, (rows, columns), 1, self.schedule.group)
            body(t, i * self.schedule.rows, j * self.schedule.features)

    # -------------------------------------------------------------------------------------- copies

    def copy(self) -> None:
        """Copy the tiles of x and weight that this block multiplies to the ring of buffers."""
        plgpu.set_max_registers(_REGISTERS_TO_COPY, action="decrease")
        self.each_tile(self._copy_tile)

    def _copy_tile(self, t: Any, row: Any, column: Any) -> None:
        shared, stages = self.shared, self.schedule.stages

        @pl.loop(0, self.steps)
        def _(i: Any) -> None:
            step = t * self.steps + i
            stage = lax.rem(step, stages)

            @pl.when(step >= stages)
            def _() -> None:
                plgpu.barrier_wait(shared["empty"].at[stage])

            rows, depth = pl.ds(row, self.schedule.rows), pl.ds(i * DEPTH, DEPTH)
            columns = pl.ds(column, self.schedule.features)
            for name, place in (("x", (rows, depth)), ("weight", (depth, columns))):
                source = self.arrays[name].at[place]
                plgpu.copy_gmem_to_smem(source, shared[name].at[stage], shared["full"].at[stage])

    # -------------------------------------------------------------------------------------- matmul

    def multiply(self) -> None:
        """Compute this warpgroup's half of the rows of each of the block's tiles of y."""
        plgpu.set_max_registers(_REGISTERS, action="increase")
        self.each_tile(self._multiply_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _multiply_tile(self, t: Any, row: Any, column: Any) -> None:
        first = t * self.steps

        def with_sums(sums: Ref) -> None:
            def step(i: Any, squares: jax.Array) -> jax.Array:
                self._product(first + i, sums)
                squares = squares + self._squares(first + i)
                plgpu.wgmma_wait(1)
                self._release(first + i - 1)
                return squares

            self._product(first, sums)
            squares = lax.fori_loop(1, self.steps, step, self._squares(first))
            plgpu.wgmma_wait(0)
            self._release(first + self.steps - 1)
            mean = jnp.sum(squares, axis=1) * (1 / self.sizes[1])
            self._finish(row, column, lax.rsqrt(mean + self.epsilon), sums[...])

        accumulator = plgpu.ACC((ROWS, self.schedule.features), jnp.float32)
        pl.run_scoped(with_sums, accumulator)

    def _stage(self, step: Any) -> Any:
        return lax.rem(step, self.schedule.stages)

    def _product(self, step: Any, sums: Ref) -> None:
        """Start the matmul of a tile of x with a tile of weight, and add its result to `sums`."""
        plgpu.barrier_wait(self.shared["full"].at[self._stage(step)])
        weight = self.shared["weight"].at[self._stage(step)]
        plgpu.wgmma(sums, self._rows_of_x(step), weight)

    def _squares(self, step: Any) -> jax.Array:
        """Return partial sums of x^2 for this warpgroup's rows in a tile of x: ``(64, 8)``.

        Each of the 64 rows has 8 partial sums. Each partial sum adds the squares of 8 of the tile's
        64 columns. The caller accumulates the partial sums over all steps, and adds the 8 sums of a
        row after the last step.
        """
        x = self._rows_of_x(step)[...].astype(jnp.float32)
        parts = [x[:, j : j + 8] for j in range(0, DEPTH, 8)]
        return functools.reduce(jnp.add, [part * part for part in parts])

    def _rows_of_x(self, step: Any) -> Ref:
        """Return this warpgroup's rows of the tile of x that belongs to a step."""
        rows = pl.ds(lax.axis_index(WARPGROUP) * ROWS, ROWS)
        return self.shared["x"].at[self._stage(step)].at[rows]

    def _release(self, step: Any) -> None:
        """Release a step's buffers of x and weight. The step's matmul must be finished."""
        if is_interpreted():
            release_used()
        plgpu.barrier_arrive(self.shared["empty"].at[self._stage(step)])

    # ------------------------------------------------------------------------------------- results

    def _finish(self, row: Any, column: Any, rstd: jax.Array, sums: jax.Array) -> None:
        """Compute y from the sums of the matmul and rstd, and store it."""
        shared, index = self.shared, lax.axis_index(WARPGROUP)
        rows = pl.ds(row + index * ROWS, ROWS)
        if "power" in self.arrays:
            rstd = rstd * load(self.arrays["power"].at[0], None)
        *_, width = shared["stored"].shape
        for i, start in enumerate(range(0, self.schedule.features, width)):
            part = sums[:, start : start + width]
            z = part * lax.broadcast_in_dim(rstd, part.shape, (0,))
            if "bias" in self.arrays:
                layout = plgpu.Layout.WGMMA.reduce(0)
                bias = load(self.arrays["bias"].at[pl.ds(column + start, width)], layout)
                bias = bias.astype(jnp.float32)
                z = z + lax.broadcast_in_dim(bias, z.shape, (1,))
            # Asynchronous stores alternate between two buffers. Wait until the buffer of this store
            # is free. The previous store may still be in flight: it reads from the other buffer.
            plgpu.wait_smem_to_gmem(STORES - 1, wait_read_only=True)
            part = shared["stored"].at[index, i % STORES]
            y = z if self.activation is None else ACTIVATIONS[self.activation](z)[0]
            part[...] = y.astype(part.dtype)
            plgpu.commit_smem()
            place = (rows, pl.ds(column + start, width))
            plgpu.copy_smem_to_gmem(part, self.arrays["y"].at[place])
