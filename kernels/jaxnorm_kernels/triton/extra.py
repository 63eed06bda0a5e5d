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

# Maps a package to the first version that works. jax-triton expects names in Triton's NVIDIA driver
# that exist from version 3.7 on. jax-triton 0.4.1 is the first version that accepts None in place
# of an absent array.
_NEEDS = {"triton": (3, 7), "jax_triton": (0, 4, 1)}


def check() -> None:
    """Raise ImportError if a package is missing or too old. The error says what to install."""
    for package, least in _NEEDS.items():
        name = "Triton" if package == "triton" else "jax-triton"
        try:
            importlib.import_module(package)
            found = version(package)
        except ImportError as error:
            raise ImportError(
                f"the triton implementation needs {name} ({error}); {_MEND}"
            ) from error
        numbers = re.match(r"[\d.]*\d", found)  # of "0.4.2rc1", these are "0.4.2"
        if numbers is None or tuple(map(int, numbers[0].split("."))) < least:
            raise ImportError(
                f"the triton implementation needs {name} {'.'.join(map(str, least))} or newer, "
                f"not {found}; {_MEND}"
            )
    _mend_dead_code_elimination()


def check_cuda() -> None:
    """Raise ImportError if JAX cannot lower Triton kernels. The error says what to install."""
    if not support.can_lower():
        raise ImportError(
            "Triton kernels are lowered with JAX's CUDA plugin, which is not installed; "
            'pip install "jax[cuda13]" (or cuda12)'
        )


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
