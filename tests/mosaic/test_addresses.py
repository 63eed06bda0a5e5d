"""The addresses that each thread loads and stores, for all layouts that kernels use."""

import math
from typing import Any

import numpy as np
import pytest

from jaxnorm_kernels.mosaic.device import mgpu
from jaxnorm_kernels.mosaic.device.layouts import (
    WARP,
    WARPGROUP_THREADS,
    columns_layout,
    rows_layout,
    strip_layout,
    warpgroup_layout,
    warps_layout,
)

LAYOUTS = {
    "a warpgroup": (warpgroup_layout(8), (2048,)),
    "a warpgroup, vectors of 1": (warpgroup_layout(1), (128,)),
    "a vector for each thread": (warps_layout(4), (4, 128)),
    "an element for each thread": (warps_layout(1), (4, 32)),
    "a row for each warp": (warps_layout(8), (8, 768)),
    "a row for 8 threads": (rows_layout(4, 8, 16), (32, 64)),
    "a row for 2 threads": (rows_layout(8, 2, 64), (64, 48)),
    "one row for all": (rows_layout(8, 16, 1), (1, 256)),
    "statistics": (rows_layout(8, 8, 16).reduce(1), (32,)),
    "columns of rows": (columns_layout(4, 8), (96,)),
    "columns of a warp": (columns_layout(1, 32), (64,)),
    "a strip": (strip_layout(8, 8), (4, 8, 128)),
}


def tiled(array: np.ndarray, tiles: Any) -> np.ndarray:
    """Return the array reshaped and transposed so that it has the axes of the tiled layout."""
    for tile in tiles:
        lead = array.ndim - len(tile)
        shape = [(size // t, t) for size, t in zip(array.shape[lead:], tile)]
        array = array.reshape(*array.shape[:lead], *(n for pair in shape for n in pair))
        outer = range(lead, array.ndim, 2)
        array = array.transpose(*range(lead), *outer, *(axis + 1 for axis in outer))
    return array


def held(layout: Any, array: np.ndarray) -> np.ndarray:
    """Return the elements that each thread of a warpgroup holds, in the order of its registers."""
    array = tiled(array, layout.tiling.tiles)
    elements = []
    for thread in range(WARPGROUP_THREADS):
        index: list[Any] = [slice(None)] * array.ndim
        for number, dims in (thread // WARP, layout.warp_dims), (thread % WARP, layout.lane_dims):
            sizes = [array.shape[d] if isinstance(d, int) else d.times for d in dims]
            for dim, at in zip(dims, np.unravel_index(number, sizes)):
                if isinstance(dim, int):
                    index[dim % array.ndim] = slice(at, at + 1)
        of_thread = np.moveaxis(array[tuple(index)], layout.vector_dim, -1)
        elements.append(of_thread.reshape(-1, of_thread.shape[-1]))
    return np.stack(elements)


def computed(places: mgpu.Places) -> np.ndarray:
    thread = np.arange(WARPGROUP_THREADS)[:, None, None]
    first = sum(thread // divisor % size * stride for divisor, size, stride in places.terms)
    registers = np.asarray(places.registers)[:, None]
    return first + registers + places.step * np.arange(places.elements)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("row", [0, 24], ids=["dense", "part"])
def test_each_thread_finds_its_elements(name, row):
    """The computed addresses are correct for a dense array, and for columns of a wider array."""
    layout, shape = LAYOUTS[name]
    whole = (*shape[:-1], shape[-1] + row)
    array = np.arange(math.prod(whole)).reshape(whole)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    places = mgpu.places(layout.to_mgpu(), shape, strides)
    expected = held(layout.to_mgpu(), array[..., : shape[-1]])
    assert np.array_equal(computed(places), expected)


def test_axes_that_are_not_counted():
    """If the stride of the last axis is 0, the address depends only on the other axes."""
    layout = strip_layout(8, 8).to_mgpu()
    numbers = np.broadcast_to(np.arange(32).reshape(4, 8, 1), (4, 8, 128))
    places = mgpu.places(layout, (4, 8, 128), (8, 1, 0))
    assert np.array_equal(computed(places), held(layout, numbers))


def test_threads_side_by_side_take_one_term():
    """If the threads load adjacent vectors, the address has one term: ``thread % 128 * vector``.

    The fewer terms an address has, the cheaper it is to compute.
    """
    places = mgpu.places(warps_layout(8).to_mgpu(), (4, 256), (256, 1))
    assert places.terms == ((1, 128, 8),)
    assert places.registers == (0,)
