"""Query the local GPU."""

import functools

import jax


@functools.cache
def local_capability() -> int | None:
    """Return the compute capability of the local NVIDIA GPU, times ten; None if there is none."""
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "")  # for AMD GPUs, a name: "gfx942"
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return None
    return round(10 * float(capability))
