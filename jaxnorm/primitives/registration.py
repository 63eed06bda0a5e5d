"""How an operation becomes a JAX primitive: its rules, in all tables where JAX looks for them."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from jaxnorm.meshes import auto_axes
from jaxnorm.primitives import eager
from jaxnorm.primitives.stack import in_one_chunk

Rule = Callable[..., Any]


def registered(
    name: str,
    *,
    types: Rule,
    run: Rule,
    lower: Rule,
    jvp: Rule,
    batch: Rule,
    transpose: Rule | None = None,
    drop_unused: Rule | None = None,
    partitioned: bool = False,
) -> Primitive:
    """The primitive ``jaxnorm.<name>``, which returns a list of results.

    Args:
      types: the types of its results, of those of its operands.
      run: its results in plain JAX, where nothing is compiled.
      lower: its lowering rule.
      jvp, batch: its rules of differentiation and of `jax.vmap`.
      transpose: likewise; None for one that is not linear.
      drop_unused: what is left of it where not all of its results are used; None for all.
      partitioned: whether XLA may spread its arrays over devices (`auto_axes.needs_devices`).
    """
    primitive = Primitive(f"jaxnorm.{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(types)
    primitive.def_impl(eager.alone(primitive, run))
    # Out of line: the same call of another layer is lowered once. A kernel is lowered in Python.
    mlir.register_lowering(primitive, functools.partial(in_one_chunk, lower), inline=False)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    if drop_unused is not None:
        partial_eval.dce_rules[primitive] = drop_unused
    if partitioned:
        auto_axes.needs_devices(primitive)
    with contextlib.suppress(ImportError, AttributeError):
        # `checkify` has no public table of the primitives that may make a NaN. Without it nothing
        # breaks, but its float checks see none that a call makes.
        from jax._src import checkify

        checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)
    with contextlib.suppress(ImportError, AttributeError):
        # Without it nothing breaks, but the error says no more than the primitive's name.
        from jax.experimental import jet

        jet.jet_rules[primitive] = functools.partial(_no_taylor_series, name)
    return primitive


def _no_taylor_series(name: str, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        f"{name}: jax.experimental.jet has no rule for it; expected jax.jvp, jax.vjp or jax.grad, "
        "which nest to any order; nest jax.jvp for a Taylor series"
    )
