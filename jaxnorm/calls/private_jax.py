"""All uses of JAX's private API in this package; tested with jax 0.11.2 and 0.12.0.1.

Each docstring says what happens if JAX lacks the API. Results and gradients are correct without any
of it.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive


def needs_devices(primitive: Primitive) -> None:
    """Make JAX pass the devices when it lowers `primitive`, as it does for custom_partitioning.

    Without it, `auto_axes.can_partition` is False, and XLA's code runs on arrays that are sharded
    over Auto axes.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)


def check_floats(primitive: Primitive) -> None:
    """Make `checkify` check the results of a primitive for NaNs.

    Without it, the float checks of `checkify` ignore this primitive.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import checkify

        check = functools.partial(checkify.nan_error_check, primitive)
        checkify.error_checks[primitive] = check


def accumulators() -> Any:
    """Return JAX's autodiff module if its transpose rules can receive gradient accumulators.

    Otherwise, return None: the gradient of a residual is then added outside the kernel.
    """
    with contextlib.suppress(ImportError):
        from jax._src.interpreters import ad

        if all(hasattr(ad, name) for name in ("fancy_transposes", "GradAccum", "ValAccum")):
            return ad
    return None


def remat3() -> tuple[dict[Any, Any], Callable[..., Any], Callable[..., Any]] | None:
    """Return the parts of JAX's new rematerialisation: rules, a transform, names in a rule.

    In jax 0.11, rules have another form. If the result is None, policies under ``jax_remat3`` do
    not save the arrays that our functions name.
    """
    if jax.__version_info__ < (0, 12):
        return None
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import remat
        from jax.ad_checkpoint import checkpoint_name_fwd

        return remat.rules, remat.remat_transform, checkpoint_name_fwd
    return None
