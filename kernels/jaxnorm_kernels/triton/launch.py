"""Launch Triton kernels from JAX."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax_triton
from jax import lax

from jaxnorm_kernels import launching
from jaxnorm_kernels.launching import local_capability
from jaxnorm_kernels.triton import extra

# Emit PTX 8.7, which CUDA 12.8 accepts. By default, Triton emits PTX for the newest CUDA version
# that Triton supports. Also request FP fusion (x * y + z with one rounding) explicitly, because
# Triton's default is about to change.
_OPTIONS = {"ptx_version": 87, "enable_fp_fusion": True}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that determine how kernels are compiled and launched.

    Attributes:
      capability: ten times the compute capability (80 for 8.0).
      sms: the number of multiprocessors (SMs).
      smem: the number of bytes of shared memory that a program can use.
    """

    capability: int
    sms: int
    smem: int


# If there is no local GPU, kernels are lowered for an A100.
AMPERE = Gpu(capability=80, sms=108, smem=163 * 1024)

# If a GPU does not report its shared memory, this number of bytes per program is assumed. It is the
# smallest number of all GPUs since Ampere (compute capability 8.6 and 8.9).
_LEAST_SMEM = 99 * 1024


@functools.cache
def local_gpu() -> Gpu:
    """Return the properties of the local GPU, or of an A100 if there is no GPU.

    If there are several local GPUs, each property is the minimum over them, because a program may
    run on any of them.
    """
    devices, capability = jax.local_devices(), local_capability()
    if capability is None:
        return AMPERE
    return Gpu(
        capability=capability,
        sms=min(getattr(device, "core_count", AMPERE.sms) for device in devices),
        smem=min(getattr(d, "shared_memory_per_block_optin", _LEAST_SMEM) for d in devices),
    )


def launch(
    kernel: Any,
    *,
    name: str,
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    grid: tuple[int, ...],
    warps: int,
    registers: int,
    **arguments: Any,
) -> list[jax.Array]:
    """Launch `kernel` on a grid of programs, and return the outputs that are not None.

    Args:
      outputs: maps the name of each output parameter of the kernel to the shape and dtype of the
        output. None means that the kernel is compiled without this output.
      warps: the number of warps (of 32 threads) in a program.
      registers: the maximum number of registers of a thread.
      arguments: maps the names of the kernel's other parameters to arrays, sizes and compile-time
        constants. An array may be None. The kernel is then compiled without this array, and need
        not have the parameter.
    """
    absent = {key: None for key, out in outputs.items() if out is None}
    given = {
        key: value
        for key, value in (arguments | absent).items()
        if value is not None or key in kernel.arg_names
    }
    results = run(
        kernel=kernel,
        name=name,
        out_type=[out for out in outputs.values() if out is not None],
        grid=grid,
        num_warps=warps,
        compute_capability=local_gpu().capability,
        backend_options={"maxnreg": registers, **_OPTIONS},
        **given,
    )
    return [_vary_like(arguments, result) for result in results]


def run(**call: Any) -> list[jax.Array]:
    """Call jax-triton's `triton_call` under the JAX settings that are needed to trace kernels."""
    extra.check_cuda()
    with launching.settings():
        results: list[jax.Array] = jax_triton.triton_call(**call)
    return results


def _vary_like(arguments: Mapping[str, Any], result: jax.Array) -> jax.Array:
    """Make `result` vary over all mesh axes over which the arrays in `arguments` vary.

    Inside `jax.shard_map`, JAX tracks these axes as part of an array's type.
    """
    arrays = [a for a in arguments.values() if isinstance(a, jax.Array)]
    axes = sorted({axis for a in arrays for axis in jax.typeof(a).manual_axis_type.varying})
    return lax.pcast(result, tuple(axes), to="varying") if axes else result
