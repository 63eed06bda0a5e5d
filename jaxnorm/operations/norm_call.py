"""What the norms' functions share: their checks, and the call that their arguments make."""

from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.calls import backends
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
    shape: tuple[int, ...],
    x_dtype: np.dtype,
    given: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    *,
    axis: checks.Axis,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    save: Save,
    implementation: Name | None,
    activation: Activation | None = None,
    **options: Any,
) -> Call:
    """The forward of a call with these arguments, after the checks.

    `given`: shape and dtype of residual and parameters, those that there are; `options`: as in
    `normalise`.
    """
    axes = checks.axes(function, axis, shape)
    view = RowView(shape, axes)
    shapes = {name: own for name, (own, _) in given.items() if OPERANDS[name] in PARAMETERS}
    for name, own in shapes.items():
        checks.check_parameter(function, _PUBLIC_NAMES.get(name, name), own, view)
    by_kind = {
        kind: np.broadcast_shapes(*(own for name, own in shapes.items() if OPERANDS[name] == kind))
        for kind in PARAMETERS
    }
    # Of the sizes of the normalised axes, a view needs no word.
    view = RowView(
        shape, axes, **{k: () if own == view.normalised else own for k, own in by_kind.items()}
    )
    checks.one_of(function, "save", save, checks.SAVE_MODES)
    checks.implementation(function, implementation)
    dtypes = {name: own for name, (_, own) in given.items()}
    entry = FUNCTIONS[function]
    default = given["residual"][1] if OPERATIONS[entry.op].y_is_sum else x_dtype
    op = entry.gated if "branch_scale" in given else entry.op
    assert op is not None
    spec = Spec(
        op=op,
        direction="fwd",
        rows=view.rows,
        cols=view.cols,
        x_dtype=x_dtype,
        y_dtype=checks.output_dtype(function, dtype, default),
        epsilon=checks.number(function, "epsilon", epsilon, minimum=0.0),
        scale_offset=checks.number(function, "scale_offset", scale_offset),
        subtract_mean=entry.subtract_mean,
        saved=save if activation is None else "input",  # an activation cannot be undone
        scale_dtype=dtypes.get("scale"),
        bias_dtype=dtypes.get("bias"),
        residual_dtype=dtypes.get("residual"),
        next_scale_dtype=dtypes.get("next_scale"),
        branch_scale_dtype=dtypes.get("branch_scale"),
        activation=activation,
        **options,
    )
    return Call(function, spec, view, implementation).on(view)


def normalise(
    function: str,
    x: checks.ArrayLike,
    residual: checks.ArrayLike | None = None,
    scale: checks.ArrayLike | None = None,
    bias: checks.ArrayLike | None = None,
    next_scale: checks.ArrayLike | None = None,
    gate: checks.ArrayLike | None = None,
    axis: checks.Axis = -1,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    save: Save = "output",
    implementation: Name | None = None,
    activation: NormActivation | None = None,
    **options: Any,
) -> list[jax.Array]:
    """The results of a function of the table, after the checks.

    `gate`: of a sum; in the table it is its branch_scale.
    `options`: fields of `Spec` that this operation alone has, checked.
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
        given["residual"] = checks.float_array(function, "residual", residual)
    if "residual" in given:
        checks.same_shape(function, "residual", given["residual"].shape, x.shape)
        given["residual"] = sharding.lie_alike(given["residual"], x)
    call = norm_call(
        function,
        x.shape,
        x.dtype,
        {name: (a.shape, a.dtype) for name, a in given.items()},
        axis=axis,
        epsilon=epsilon,
        scale_offset=scale_offset,
        dtype=dtype,
        save=save,
        implementation=implementation,
        activation=activation,
        **options,
    )
    if "next_scale" in given and "scale" in given:
        shape = call.view.shape_of("scale")
        for name in ("scale", "next_scale"):
            if given[name].shape != shape:
                call, wide = call.widened(name, given[name])
                given[name] = jnp.broadcast_to(wide, shape)
    if implementation is not None:
        backends.forced(call, implementation)
    return row_operations.bind(call, x, *[given[name] for name in call.primals[1:]])
