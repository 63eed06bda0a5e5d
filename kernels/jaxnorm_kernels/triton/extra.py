"""Checks that compatible versions of Triton and jax-triton are installed.

Without these checks, incompatible versions fail late and with obscure errors. If Triton is too old,
jax-triton replaces Triton's NVIDIA backend by an empty class, which raises an error when the first
kernel is compiled.
"""

import importlib
import inspect
import re
from importlib.metadata import version

import jax
from jax.interpreters import partial_eval

from jaxnorm_kernels.triton import support

_MEND = 'from a checkout of jaxnorm: pip install -e ".[triton]"'

# The first version of jax-triton that accepts None in place of an absent array.
_JAX_TRITON = (0, 4, 1)

# Names that exist in Triton's NVIDIA driver from version 3.7 on. If jax-triton cannot import these
# names, it assumes that Triton has no NVIDIA backend.
_NAMES_OF_3_7 = ("TMA_TF32", "TMA_DTYPE_DEVICE_TO_HOST")


def check() -> None:
    """Raise ImportError if a package is missing or too old. The error says what to install."""
    try:
        driver = importlib.import_module("triton.backends.nvidia.driver")
    except ImportError as error:
        raise ImportError(f"the triton implementation needs Triton ({error}); {_MEND}") from error
    if not all(hasattr(driver, name) for name in _NAMES_OF_3_7):
        raise ImportError(
            f"the triton implementation needs Triton 3.7 or newer, not {version('triton')}; {_MEND}"
        )
    try:
        importlib.import_module("jax_triton")
    except ImportError as error:
        raise ImportError(
            f"the triton implementation needs jax-triton ({error}); {_MEND}"
        ) from error
    if _release("jax-triton") < _JAX_TRITON:
        raise ImportError(
            f"the triton implementation needs jax-triton {'.'.join(map(str, _JAX_TRITON))} or "
            f"newer, not {version('jax-triton')}; {_MEND}"
        )
    _mend_dead_code_elimination()


def check_cuda() -> None:
    """Raise ImportError if JAX cannot lower Triton kernels. The error says what to install."""
    if not support.can_lower():
        raise ImportError(
            "Triton kernels are lowered with JAX's CUDA plugin, which is not installed; "
            'pip install "jax[cuda13]" (or cuda12)'
        )


def _release(package: str) -> tuple[int, ...]:
    """Return the version of a package as numbers, such as (0, 4, 2) for "0.4.2rc1"."""
    numbers = re.match(r"[\d.]*\d", version(package))
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _mend_dead_code_elimination() -> None:
    """Remove jax-triton's rule for dead-code elimination if JAX cannot call the rule.

    JAX 0.12 calls such rules with three arguments, but the rule of jax-triton 0.4.1 takes only two,
    so every traced kernel raises a TypeError. Without the rule, JAX's default rule applies: it
    removes calls whose results are unused.
    """
    from jax_triton.triton_lib import triton_kernel_call_p

    rule = partial_eval.dce_rules.get(triton_kernel_call_p)
    if rule is None or jax.__version_info__ < (0, 12):
        return
    if len(inspect.signature(rule).parameters) == 2:
        del partial_eval.dce_rules[triton_kernel_call_p]
