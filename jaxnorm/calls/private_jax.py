"""All uses of JAX's private API in this package; tested with jax 0.11.2 and 0.12.0.1.

Each function's docstring says what happens if JAX lacks the API. Results and gradients are correct
even then.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive


def needs_devices(primitive: Primitive) -> None:
    """Make JAX pass the list of devices to the lowering rule of `primitive`.

    `custom_partitioning` needs this list. If JAX does not have the set of primitives that is used
    here, `auto_axes.can_partition` returns False. Arrays that are sharded over Auto mesh axes are
    then processed by plain JAX instead of kernels.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)


def check_floats(primitive: Primitive) -> None:
    """Make `checkify` check the results of a primitive for NaNs.

    If JAX does not have the table of checks that is used here, `checkify` ignores this primitive.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import checkify

        check = functools.partial(checkify.nan_error_check, primitive)
        checkify.error_checks[primitive] = check


def accumulators() -> Any:
    """Return JAX's autodiff module if its transpose rules can receive gradient accumulators.

    With accumulators, the backward kernel of a norm itself adds the cotangent of the residual
    branch to x's gradient. If JAX has no accumulators, the result is None. The addition is then a
    separate pass over memory, after the kernel.
    """
    with contextlib.suppress(ImportError):
        from jax._src.interpreters import ad

        if all(hasattr(ad, name) for name in ("fancy_transposes", "GradAccum", "ValAccum")):
            return ad
    return None


def remat3() -> tuple[dict[Any, Any], Callable[..., Any], Callable[..., Any]] | None:
    """Return three objects of JAX's new rematerialisation (``jax_remat3``).

    These are the dict in which primitives register rematerialisation rules, the transform that
    applies a policy to a function, and the function that names arrays inside such a rule. In jax
    0.11, rules have another signature, and the result is None. Policies under ``jax_remat3`` then
    do not save the arrays that jaxnorm's functions name.
    """
    if jax.__version_info__ < (0, 12):
        return None
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import remat
        from jax.ad_checkpoint import checkpoint_name_fwd

        return remat.rules, remat.remat_transform, checkpoint_name_fwd
    return None
