"""How a Triton kernel becomes a JAX call."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax_triton
from jax import lax

from jaxnorm_kernels import launching
from jaxnorm_kernels.devices import local_capability
from jaxnorm_kernels.triton import extra

# Triton would write PTX for the newest CUDA that it knows; this is what CUDA 12.8 reads. Fusion
# (x * y + z with one rounding) is its default, which is about to change.
_OPTIONS = {"ptx_version": 87, "enable_fp_fusion": True}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a launch depends on.

    Attributes:
      capability: compute capability, times ten.
      sms: multiprocessors.
      smem: bytes of shared memory that a program may have.
    """

    capability: int
    sms: int
    smem: int


# What is lowered for where no GPU is at hand.
AMPERE = Gpu(capability=80, sms=108, smem=163 * 1024)  # A100

# Of GPUs since Ampere, for one that does not say: that of capability 8.6 and 8.9.
_LEAST_SMEM = 99 * 1024


@functools.cache
def local_gpu() -> Gpu:
    """The GPU at hand; an A100 where there is none."""
    device = jax.local_devices()[0]
    capability = local_capability()
    if capability is None:
        return AMPERE
    return Gpu(
        capability=capability,
        sms=getattr(device, "core_count", AMPERE.sms),
        smem=getattr(device, "shared_memory_per_block_optin", _LEAST_SMEM),
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
    """Runs `kernel` on a grid of programs and returns its outputs, those that are not None.

    Args:
      outputs: by the name of the kernel's parameter; None for one that is not wanted.
      warps: of 32 threads, in a program.
      registers: that a thread may have.
      arguments: arrays, sizes and compile-time constants, by the name of the kernel's parameter.
        An array may be None, and the kernel is compiled without it.
    """
    absent = {key: None for key, out in outputs.items() if out is None}
    results = run(
        kernel=kernel,
        name=name,
        out_type=[out for out in outputs.values() if out is not None],
        grid=grid,
        num_warps=warps,
        compute_capability=local_gpu().capability,
        backend_options={"maxnreg": registers, **_OPTIONS},
        **arguments,
        **absent,
    )
    return [_vary_like(arguments, result) for result in results]


def run(**call: Any) -> list[jax.Array]:
    """The one place that calls jax-triton."""
    extra.check_cuda()
    with launching.settings():
        results: list[jax.Array] = jax_triton.triton_call(**call)
    return results


def _vary_like(arguments: Mapping[str, Any], result: jax.Array) -> jax.Array:
    """Inside `jax.shard_map` an output varies over the mesh axes that the inputs vary over."""
    arrays = [a for a in arguments.values() if isinstance(a, jax.Array)]
    axes = sorted({axis for a in arrays for axis in jax.typeof(a).manual_axis_type.varying})
    return lax.pcast(result, tuple(axes), to="varying") if axes else result
