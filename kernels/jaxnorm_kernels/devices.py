"""The GPU at hand."""

import functools

import jax


@functools.cache
def local_capability() -> int | None:
    """Compute capability of the NVIDIA GPU at hand, times ten; None where there is none."""
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "")  # of an AMD GPU a name: "gfx942"
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return None
    return round(10 * float(capability))
