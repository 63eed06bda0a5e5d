"""What the kernels need besides JAX: whether it is here, and whether its versions fit.

An unfit pair fails late and in the dark: with a Triton that is too old, jax-triton replaces its
NVIDIA backend by an empty class, which raises when the first kernel is compiled.
"""

import importlib
import inspect
from importlib.metadata import version

import jax
from jax._src.interpreters import partial_eval

_MEND = 'pip install "jaxnorm[triton]"'


def check() -> None:
    """ImportError with the mend where Triton or jax-triton is missing or too old."""
    for name in ("triton", "jax_triton"):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise ImportError(
                f"the triton implementation needs jax-triton and Triton ({error}); {_MEND}"
            ) from error
        if name == "triton" and not _fits_jax_triton():
            raise ImportError(
                f"jax-triton needs Triton 3.7 or newer, and this is {version(name)}; {_MEND}"
            )
    if "out_type" not in inspect.signature(module.triton_call).parameters:
        raise ImportError(
            f"the triton implementation needs jax-triton 0.4.1 or newer, and this is "
            f"{version('jax-triton')}; {_MEND}"
        )
    _mend_dead_code_elimination()


def check_cuda() -> None:
    """ImportError with the mend where JAX cannot make a CUDA program with Triton kernels in it."""
    if not hasattr(importlib.import_module("jaxlib.gpu_triton"), "TritonKernel"):
        raise ImportError(
            "Triton kernels are lowered with JAX's CUDA plugin, which is not installed; "
            'pip install "jax[cuda13]" (or cuda12)'
        )


def _fits_jax_triton() -> bool:
    """Whether jax-triton finds the names that it imports: those of Triton 3.7."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    return all(hasattr(driver, name) for name in ("TMA_TF32", "TMA_DTYPE_DEVICE_TO_HOST"))


def _mend_dead_code_elimination() -> None:
    """Leaves dead calls of jax-triton to JAX's own rule, where JAX cannot call jax-triton's.

    JAX 0.12 gives such a rule three arguments; that of jax-triton 0.4.1 takes two, so that any
    traced kernel raises a TypeError. JAX's own drops calls whose results nobody reads.
    """
    from jax_triton.triton_lib import triton_kernel_call_p

    rule = partial_eval.dce_rules.get(triton_kernel_call_p)
    if rule is None or jax.__version_info__ < (0, 12):
        return
    if len(inspect.signature(rule).parameters) == 2:
        del partial_eval.dce_rules[triton_kernel_call_p]
