"""What the norms' functions share: their checks, and the call that their arguments make."""

from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.primitives import row_operations
from jaxnorm_kernels.operations import FUNCTIONS, OPERANDS, OPERATIONS, PARAMETERS
from jaxnorm_kernels.specs import Activation, Name, NormActivation, Save, Spec

# What errors call an operand of the table.
_PUBLIC_NAMES = {"branch_scale": "gate"}


def norm_call(
    function: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    given: Mapping[str, jax.Array],
    *,
    axis: checks.Axis,
    epsilon: float,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save,
    implementation: Name | None,
    activation: Activation | None = None,
    **options: Any,
) -> Call:
    """The forward of a call with these arguments, after the checks.

    `given`: residual and parameters, those that there are. `options`: fields of `Spec` that this
    operation alone has, checked.
    """
    axes = checks.axes(function, axis, x.shape)
    view = RowView(x.shape, axes)
    shapes = {name: a.shape for name, a in given.items() if OPERANDS[name] in PARAMETERS}
    for name, own in shapes.items():
        checks.check_parameter(function, _PUBLIC_NAMES.get(name, name), own, view)
    by_kind = {
        kind: jnp.broadcast_shapes(*(own for name, own in shapes.items() if OPERANDS[name] == kind))
        for kind in PARAMETERS
    }
    # Of the sizes of the normalised axes, a view needs no word.
    view = RowView(
        x.shape, axes, **{k: () if own == view.normalised else own for k, own in by_kind.items()}
    )
    checks.one_of(function, "save", save, checks.SAVE_MODES)
    checks.implementation(function, implementation)
    entry = FUNCTIONS[function]
    default = given["residual"].dtype if OPERATIONS[entry.op].y_is_sum else x.dtype
    op = entry.gated if "branch_scale" in given else entry.op
    assert op is not None
    dtypes: dict[str, Any] = {f"{name}_dtype": a.dtype for name, a in given.items()}
    spec = Spec(
        op=op,
        direction="fwd",
        rows=view.rows,
        cols=view.cols,
        x_dtype=x.dtype,
        y_dtype=checks.output_dtype(function, dtype, default),
        epsilon=checks.number(function, "epsilon", epsilon, minimum=0.0),
        scale_offset=checks.number(function, "scale_offset", scale_offset),
        subtract_mean=entry.subtract_mean,
        saved=save if activation is None else "input",  # an activation cannot be undone
        activation=activation,
        **dtypes,
        **options,
    )
    numbers = {"epsilon": spec.epsilon, "scale_offset": spec.scale_offset}
    checks.finite_in(function, spec.compute_dtype, numbers)
    return Call.of(function, spec, view, implementation).on(view)


def options(
    axis: checks.Axis,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    save: Save,
    implementation: Name | None,
) -> dict[str, Any]:
    """The options that all norms have, by name, from arguments in the order of their signatures."""
    return {
        "axis": axis,
        "epsilon": epsilon,
        "scale_offset": scale_offset,
        "dtype": dtype,
        "save": save,
        "implementation": implementation,
    }


def normalise(
    function: str,
    x: checks.ArrayLike,
    residual: checks.ArrayLike | None = None,
    scale: checks.ArrayLike | None = None,
    bias: checks.ArrayLike | None = None,
    next_scale: checks.ArrayLike | None = None,
    gate: checks.ArrayLike | None = None,
    activation: NormActivation | None = None,
    **options: Any,
) -> list[jax.Array]:
    """The results of a function of the table, after the checks.

    `gate`: of a sum; in the table it is its branch_scale. `options`: of `norm_call`.
    """
    checks.one_of(function, "activation", activation, (None, *get_args(NormActivation)))
    x = checks.float_array(function, "x", x)
    given: dict[str, jax.Array] = {}
    for name, array in (("scale", scale), ("bias", bias), ("next_scale", next_scale)):
        if array is not None:
            given[name] = checks.float_array(function, name, array)
    if gate is not None:
        given["branch_scale"] = checks.float_array(function, "gate", gate)
    if "residual" in OPERATIONS[FUNCTIONS[function].op].operands:
        # None is no residual: the check says so.
        residual = checks.float_array(function, "residual", residual)
        checks.same_shape(function, "residual", residual.shape, x.shape)
        given["residual"] = sharding.lie_alike(residual, x)
    call = norm_call(function, x, given, activation=activation, **options)
    if "next_scale" in given and "scale" in given:
        shape = call.view.shape_of("scale")
        for name in ("scale", "next_scale"):
            if given[name].shape != shape:
                call, wide = call.widened(name, given[name])
                given[name] = jnp.broadcast_to(wide, shape)
    return row_operations.run(call, x, *[given[name] for name in call.primals[1:]])
