"""Everything private in JAX that this package uses; tried on jax 0.11.2 and 0.12.0.1.

Each function says what happens with a JAX that lacks what it looks for. Results and gradients are
right without all of it.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive


def needs_devices(primitive: Primitive) -> None:
    """Let JAX say, when it lowers `primitive`, for which devices it does.

    JAX's own custom_partitioning requests it in this way. Without it, `auto_axes.can_partition` is
    False, and XLA's code runs on arrays that XLA spreads over devices.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)


def check_floats(primitive: Primitive) -> None:
    """Let `checkify` find the NaNs that a primitive makes.

    Without it, the float checks of `checkify` see none of them.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import checkify

        check = functools.partial(checkify.nan_error_check, primitive)
        checkify.error_checks[primitive] = check


def accumulators() -> Any:
    """Return JAX's module of derivatives if its backward passes hand accumulators to transposes.

    Without it (None), the gradient of a residual is added outside the kernel.
    """
    with contextlib.suppress(ImportError):
        from jax._src.interpreters import ad

        if all(hasattr(ad, name) for name in ("fancy_transposes", "GradAccum", "ValAccum")):
            return ad
    return None


def remat3() -> tuple[dict[Any, Any], Callable[..., Any], Callable[..., Any]] | None:
    """Return what JAX has for its next rematerialisation: rules, a transform, names in a rule.

    The rules of jax 0.11 have another form. Without it (None), policies save nothing that our
    functions name under ``jax_remat3``.
    """
    if jax.__version_info__ < (0, 12):
        return None
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import remat
        from jax.ad_checkpoint import checkpoint_name_fwd

        return remat.rules, remat.remat_transform, checkpoint_name_fwd
    return None
