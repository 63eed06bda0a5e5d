"""implementation_for: tells which implementation a call gets, and why, without running it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxnorm import _arguments, _implementation
from jaxnorm._call import Call
from jaxnorm._loss import NAME as CROSS_ENTROPY
from jaxnorm._loss import Function as Loss
from jaxnorm._loss import cross_entropy_call
from jaxnorm._norm import OPS, norm_call
from jaxnorm._norm import Function as Norm
from jaxnorm._products import NAME as LINEAR
from jaxnorm._products import Function as WithLinear
from jaxnorm._products import linear_call
from jaxnorm._rows import RowView
from jaxnorm._softmax import Function as Softmax
from jaxnorm._softmax import softmax_call
from jaxnorm_kernels.specs import Activation, Name, Save

#: What `implementation_for` knows.
FUNCTIONS: tuple[Softmax | Loss | Norm | WithLinear, ...] = (
    *("softmax", "log_softmax", CROSS_ENTROPY),
    *OPS,
    LINEAR,
)
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which implementation runs each direction of a call: a name and a reason."""

    forward: _implementation.Choice
    backward: _implementation.Choice

    def __str__(self) -> str:
        return f"forward:  {self.forward}\nbackward: {self.backward}"


def implementation_for(
    function: Softmax | Loss | Norm | WithLinear,
    shape: tuple[int, ...],
    dtype: _arguments.DTypeLike,
    *,
    axis: _arguments.Axis = -1,
    where: bool = False,
    scale: float = 1.0,
    causal: bool = False,
    use_scale: bool = True,
    use_bias: bool | None = None,
    param_dtype: _arguments.DTypeLike | None = None,
    param_axes: Sequence[int] = (),
    param_shape: Sequence[int] | None = None,
    residual_dtype: _arguments.DTypeLike | None = None,
    out_dtype: _arguments.DTypeLike | None = None,
    save: Save = "output",
    features: int | None = None,
    activation: Activation | None = None,
    implementation: Name | None = None,
    platform: str | None = None,
) -> Plan:
    """Which implementation runs a call of `function`, forward and backward, and why.

    A cross-entropy's labels, ``label_smoothing``, ``z_loss`` and a mask of positions make no
    difference. Those of ``"rms_norm_linear"`` are of its norm; products are XLA's, but for the
    kernel of both that ``implementation="mosaic"`` asks for, forward.

    Args:
      function: name of a function of this package, such as ``"add_rms_norm"``.
      shape, dtype: of x, or of logits; inside ``jax.shard_map``, of a shard. Under ``jax.vmap`` a
        batch of x is more rows: put its size in front. A batch of parameters, and gradients of
        parameters that are taken inside ``jax.vmap`` (one for each example), are parameters of
        groups of rows: ``param_axes`` begins with its size.
      axis: as in the call.
      where: whether the call has a ``where`` mask (softmaxes), of classes (cross-entropy).
      scale, causal: as in the call (softmaxes).
      use_scale, use_bias: whether the call has these parameters. By default norms have both, but
        rms_norm and rms_norm_linear no bias, and softmaxes none.
      param_dtype: dtype of the parameters, weight among them; ``dtype`` by default.
      param_axes: sizes of the parameters' axes before the normalised ones.
      param_shape: the whole shape of a norm's parameters, where they are broadcast along normalised
        axes; by default ``param_axes`` and the sizes of the normalised axes.
      residual_dtype: of the residual, where the function takes one; ``dtype`` by default, and None
        for no residual of rms_norm_linear.
      out_dtype: dtype of the output; ``dtype`` by default.
      save, activation, implementation: as in the call.
      features: columns of weight (rms_norm_linear); by default as many as x has.
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``; by default that of JAX's default
        device. (Calls themselves never look at it: they decide when they are lowered.)

    Returns:
      A :class:`Plan`: ``forward`` and ``backward``, each with ``name`` and ``reason``; its ``str``
      is two lines to print.

    Raises:
      TypeError, ValueError: as the function itself would; also for an unknown function or platform.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> plan = jaxnorm.implementation_for("rms_norm", (8192, 4096), jnp.bfloat16, platform="tpu")
      >>> plan.forward.name, plan.backward.name
      ('xla', 'xla')
    """
    caller = "implementation_for"
    _arguments.one_of(caller, "function", function, FUNCTIONS)
    platform = _implementation.local_platform() if platform is None else platform
    _arguments.one_of(caller, "platform", platform, _PLATFORMS)
    _arguments.one_of(caller, "save", save, _arguments.SAVE_MODES)
    _arguments.implementation(caller, implementation)
    _arguments.flag(caller, "where", where)
    _arguments.flag(caller, "use_scale", use_scale)
    if use_bias is not None:
        _arguments.flag(caller, "use_bias", use_bias)
    if features is not None:
        features = _arguments.integer(caller, "features", features, "columns")
    x_dtype = _arguments.dtype(caller, "dtype", dtype)
    try:
        shape = tuple(shape)
    except TypeError as error:
        raise TypeError(
            f"{caller}: shape={shape!r}; expected a tuple of sizes, e.g. x.shape"
        ) from error
    if function == "softmax" or function == "log_softmax":
        bias_dtype = _arguments.output_dtype(caller, param_dtype, x_dtype)
        forward = softmax_call(
            function,
            shape,
            x_dtype,
            (_bias_shape(shape, axis, param_axes), bias_dtype) if use_bias else None,
            axis=axis,
            mask=shape if where else None,
            scale=scale,
            causal=causal,
            dtype=out_dtype,
            implementation=implementation,
        )
    elif function == CROSS_ENTROPY:
        forward = cross_entropy_call(
            shape,
            x_dtype,
            axis=axis,
            mask=shape if where else None,
            has_positions=False,
            label_smoothing=0.0,
            z_loss=0.0,
            implementation=implementation,
        ).with_stats()
    elif function == LINEAR:
        return _plan_of_linear(
            shape,
            x_dtype,
            features=features,
            parameters=_arguments.output_dtype(caller, param_dtype, x_dtype),
            use_scale=use_scale,
            use_bias=bool(use_bias),
            residual_dtype=residual_dtype,
            out_dtype=out_dtype,
            activation=activation,
            implementation=implementation,
            platform=platform,
        )
    else:
        use_bias = function.endswith("layer_norm") if use_bias is None else use_bias
        normalised = tuple(shape[a] for a in _arguments.axes(caller, axis, shape))
        shape_of_parameter = (*param_axes, *normalised)
        if param_shape is not None:
            shape_of_parameter = tuple(param_shape)
        parameter = shape_of_parameter, _arguments.output_dtype(caller, param_dtype, x_dtype)
        residual = shape, _arguments.output_dtype(caller, residual_dtype, x_dtype)
        given: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            name: array
            for name, array, is_given in (
                ("residual", residual, OPS[function] != "norm"),
                ("scale", parameter, use_scale),
                ("bias", parameter, use_bias),
                ("next_scale", parameter, use_scale and OPS[function] == "norm_add_norm"),
            )
            if is_given
        }
        forward = norm_call(
            function,
            shape,
            x_dtype,
            given,
            axis=axis,
            epsilon=1e-6,
            scale_offset=0.0,
            dtype=out_dtype,
            save=save,
            implementation=implementation,
        )

    return _plan(forward, forward.gradient(), implementation, platform)


def _plan(forward: Call, backward: Call, implementation: Name | None, platform: str) -> Plan:
    def choice(call: Call) -> _implementation.Choice:
        if implementation is not None:
            return _implementation.forced(call, implementation)
        return _implementation.choose(call.as_seen_by, platform)

    return Plan(choice(forward), choice(backward))


def _plan_of_linear(
    shape: tuple[int, ...],
    x_dtype: np.dtype,
    *,
    features: int | None,
    parameters: np.dtype,
    use_scale: bool,
    use_bias: bool,
    residual_dtype: _arguments.DTypeLike | None,
    out_dtype: _arguments.DTypeLike | None,
    activation: Activation | None,
    implementation: Name | None,
    platform: str,
) -> Plan:
    cols = shape[-1:]
    columns = cols if features is None else (features,)
    given = {"weight": ((*cols, *columns), parameters)}
    if use_scale:
        given["scale"] = cols, parameters
    if use_bias:
        given["bias"] = columns, parameters
    if residual_dtype is not None:
        given["residual"] = shape, _arguments.dtype("implementation_for", "dtype", residual_dtype)
    call = linear_call(
        shape,
        x_dtype,
        given,
        activation=activation,
        epsilon=1e-6,
        scale_offset=0.0,
        dtype=out_dtype,
        implementation=implementation,
        precision=None,
    )
    plan = _plan(call.norm, call.norm.gradient(), call.norm.implementation, platform)
    if implementation is None:
        return plan
    return Plan(_implementation.forced(call, implementation), plan.backward)


def _bias_shape(
    shape: tuple[int, ...], axis: _arguments.Axis, param_axes: Sequence[int]
) -> tuple[int, ...]:
    """Of a softmax's bias: with the sizes of the normalised axes, and `param_axes` before them."""
    view = RowView(shape, _arguments.axes("implementation_for", axis, shape))
    sizes = [1] * len(shape)
    for a in view.axes:
        sizes[a] = shape[a]
    for a, size in zip(reversed(view.others), reversed(param_axes)):
        sizes[a] = size
    return tuple(sizes)
