"""The GPU at hand."""

import functools

import jax


@functools.cache
def local_capability() -> int | None:
    """Compute capability of the GPU at hand, times ten; None where there is none."""
    device = jax.local_devices()[0]
    if device.platform != "gpu" or not hasattr(device, "compute_capability"):
        return None
    return round(10 * float(device.compute_capability))
