"""All imports of JAX's private modules in jaxnorm; tested with jax 0.11.2 and 0.12.0.1.

Each function's docstring says what happens if JAX lacks the API. Results and gradients are correct
even then.

Other modules of jaxnorm use undocumented attributes of objects that JAX passes to them. If a
version of JAX lacks one of these attributes, the calls that need it raise AttributeError:

- `axis_context` and `lowering_parameters.for_export` of a lowering rule's `module_context`
- `to_concrete_value` of a tracer
- `manual_axis_type` of an array's type
- `val` of a gradient accumulator (see `accumulators`)
- the tables `partial_eval.dce_rules` and `batching.fancy_primitive_batchers` of `jax.interpreters`
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import jax
from jax.extend.core import Primitive


def needs_devices(primitive: Primitive) -> None:
    """Make JAX pass the list of devices to the lowering rule of `primitive`.

    `custom_partitioning` needs this list. The function adds `primitive` to a private set of JAX. If
    JAX has no such set, `auto_axes.can_partition` returns False. Arrays that are sharded over Auto
    mesh axes are then processed by plain JAX instead of kernels.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)


def check_floats(primitive: Primitive) -> None:
    """Make `checkify` check the results of a primitive for NaNs.

    The function adds a check to a private dict of JAX. If JAX has no such dict, `checkify` ignores
    this primitive.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import checkify

        check = functools.partial(checkify.nan_error_check, primitive)
        checkify.error_checks[primitive] = check


@contextlib.contextmanager
def without_unfinished_functions(ctx: Any) -> Iterator[None]:
    """If lowering raises an error in this context, remove the functions that are not finished.

    JAX lowers an inner `jax.jit` to a function of the MLIR module. If an error interrupts the
    lowering, the function has no return operation, and the module is invalid. `ctx` is the context
    of a lowering rule. If it has no table of symbols, nothing is removed, and JAX raises an error
    for the module.
    """
    symbols = getattr(ctx.module_context, "symbol_table", None)

    def functions() -> dict[str, Any]:
        operations = ctx.module_context.module.body.operations
        return {op.name.value: op for op in operations if op.operation.name == "func.func"}

    before = functions()
    try:
        yield
    except Exception:
        for name, function in functions().items():
            if symbols is None or name in before or function.is_external:
                continue
            operations = [operation.operation.name for operation in function.entry_block.operations]
            if operations[-1:] != ["func.return"]:
                symbols.erase(function)
        raise


def accumulators() -> Any:
    """Return JAX's autodiff module if transpose rules can receive gradient accumulators, else None.

    With accumulators, the backward kernel of a norm can add the cotangent of the residual branch to
    x's gradient. Without accumulators, JAX adds this cotangent after the kernel, in a separate pass
    over memory.
    """
    with contextlib.suppress(ImportError):
        from jax._src.interpreters import ad
        from jax._src.interpreters.ad import GradAccum, ValAccum, fancy_transposes  # noqa: F401

        return ad
    return None


def batch_custom_vjps() -> None:
    """Let JAX batch the linearised form of a `jax.custom_vjp` function.

    The linearised form is the primitive `custom_lin`. JAX usually batches such a function first,
    and linearises it afterwards. So JAX's batching rule of `custom_lin` only raises an error. But
    in `jax.grad` of `jax.vmap` of `auto_remat`, the linearised form is batched. If JAX lacks an API
    that jaxnorm's rule needs, JAX's error remains (``can't apply forward-mode autodiff``).
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import core
        from jax._src.interpreters import ad, batching

        def batch(
            axis: Any,
            operands: Any,
            dims: Any,
            *,
            num_res: int,
            bwd: Any,
            out_avals: Any,
            in_zeros: Any,
            **static: Any,
        ) -> Any:
            moving = iter(dims[num_res:])
            targets = [0 if is_zero else next(moving) for is_zero in in_zeros]
            given = [*dims[:num_res], *[0] * len(out_avals)]
            more: Any = () if jax.__version_info__ < (0, 12) else (lambda: num_res, "custom_vjp")
            static |= {"num_res": num_res, "in_zeros": in_zeros}
            static["bwd"] = batching.batch_custom_vjp_bwd(
                bwd, core.TraceTag(), axis, lambda: given, targets, *more
            )
            size, sharding = axis.size, axis.explicit_mesh_axis
            avals = tuple(core.unmapped_aval(size, 0, a, sharding) for a in out_avals)
            results = ad.custom_lin_p.bind(*operands, out_avals=avals, **static)
            return results, [0] * len(results)

        batching.fancy_primitive_batchers[ad.custom_lin_p] = batch


def is_in_a_loop() -> bool:
    """Return True if JAX traces the body of a loop, such as `jax.lax.scan`, at the moment.

    The function searches the call stack for JAX's module of loops. If JAX moves this module, the
    result is always False, and `auto_remat` of a layer in a loop adds an optimization barrier that
    is not needed. This costs time, but changes no result.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "jax._src.lax.control_flow.loops":
            return True
        frame = frame.f_back
    return False


def remat3() -> tuple[dict[Any, Any], Callable[..., Any], Callable[..., Any]] | None:
    """Return three objects of JAX's new rematerialisation (``jax_remat3``), or None.

    - The dict in which primitives register rematerialisation rules.
    - The transform that applies a policy to a function.
    - The function that gives names to arrays inside a rematerialisation rule.

    The result is None in jax 0.11, where rules have another signature. Policies under
    ``jax_remat3`` then do not save the arrays to which jaxnorm's functions give names.
    """
    if jax.__version_info__ < (0, 12):
        return None
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import remat
        from jax.ad_checkpoint import checkpoint_name_fwd

        return remat.rules, remat.remat_transform, checkpoint_name_fwd
    return None


def raw_frames(equation: Any) -> list[tuple[CodeType, int]]:
    """Return the stack frames in which an equation was traced, the innermost frame first.

    A frame is a pair: a code object, and a position in its bytecode. If JAX lacks the method, the
    result is empty, and a printed plan of `remat_plan` has no lines with names of arrays.
    """
    trace = equation.source_info.traceback
    with contextlib.suppress(AttributeError):
        return [*zip(*trace.raw_frames())]
    return []
