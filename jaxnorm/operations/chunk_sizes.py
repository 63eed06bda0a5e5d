"""How many rows a chunk of a function of linear logits has."""

import math

import numpy as np

# Rows of x at a time. The fewer, the more often dW is read and written, which its product does not
# hide: with chunks of 4096, 2048 and 1024 rows it takes 1.05, 1.14 and 1.49 of its time (H100,
# bfloat16). A chunk is in memory before dW in its dtype is, so one of d rows takes no more: over
# 8192 x 4096 x 128256, 4096 and 2048 rows take 39.9 and 41.1 ms, 2100 and 2068 MiB (H200).
_LEAST, _MOST = 512, 2048
_BYTES = 2**30
# Tiles of a product have 128 rows.
_TILE = 128


def chunk_rows(
    chunk: int | None,
    rows: int,
    weight: tuple[int, ...],
    logits: np.dtype,
    factors: np.dtype,
    shards: int = 1,
) -> int:
    """How many rows a chunk has: all chunks as many, the first may overlap the second.

    Args:
      weight: its shape (d, classes).
      logits, factors: dtypes of a chunk's logits, and of the products.
      shards: of how many shards of the classes `weight` is one. Devices exchange statistics in each
        chunk; with as many times the rows a chunk's logits are no larger, and there are fewer.
    """
    if chunk is not None or not rows:
        return min(chunk or 1, max(rows, 1))
    d, classes = weight
    fitting = _BYTES // (max(classes, 1) * logits.itemsize) // _TILE * _TILE
    as_weight = d * factors.itemsize // logits.itemsize
    most = min(max(fitting, _LEAST), shards * max(_MOST, as_weight))
    even = math.ceil(rows / math.ceil(rows / most))
    return min(math.ceil(even / _TILE) * _TILE, rows)
