"""implementation_for: tells which implementation a call gets, and why, without running it."""

import dataclasses
from typing import cast

import jax

from jaxnorm import _arguments, _implementation
from jaxnorm._norm import NormCall
from jaxnorm._rows import RowView
from jaxnorm._softmax import Op, SoftmaxCall
from jaxnorm_kernels.specs import Save, Spec

_NORMS = ("layer_norm", "rms_norm")
_SOFTMAXES = ("softmax", "log_softmax")
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which implementation runs each direction of a call: a name and a reason."""

    forward: _implementation.Choice
    backward: _implementation.Choice

    def __str__(self) -> str:
        return f"forward:  {self.forward}\nbackward: {self.backward}"


def implementation_for(
    function: str,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    *,
    axis: _arguments.Axis = -1,
    where: bool = False,
    use_scale: bool = True,
    use_bias: bool = True,
    param_dtype: jax.typing.DTypeLike | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    save: Save = "output",
    implementation: str | None = None,
    platform: str | None = None,
) -> Plan:
    """Which implementation runs a call of `function`, forward and backward, and why.

    Args:
      function: ``"softmax"``, ``"log_softmax"``, ``"layer_norm"`` or ``"rms_norm"``.
      shape, dtype: of x. Inside ``jax.vmap`` or ``jax.shard_map``, of what one call sees.
      axis: as in the call.
      where: whether the call has a ``where`` mask (softmaxes).
      use_scale, use_bias: whether the call has these parameters (norms; rms_norm has no bias).
      param_dtype: dtype of the parameters; ``dtype`` by default.
      out_dtype: dtype of the output; ``dtype`` by default.
      save, implementation: as in the call.
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``; by default that of JAX's default
        device. (Calls themselves never look at it: they decide when they are lowered.)

    Returns:
      A :class:`Plan`: ``forward`` and ``backward``, each with ``name`` and ``reason``; its ``str``
      is two lines to print.

    Raises:
      TypeError, ValueError: as the function itself would; also for an unknown function or platform.
    """
    me = "implementation_for"
    _arguments.one_of(me, "function", function, _SOFTMAXES + _NORMS)
    platform = _implementation.local_platform() if platform is None else platform
    _arguments.one_of(me, "platform", platform, _PLATFORMS)
    _arguments.one_of(me, "save", save, _arguments.SAVE_MODES)
    _arguments.implementation(me, implementation)
    x_dtype = _arguments.dtype(me, "dtype", dtype)
    y_dtype = _arguments.output_dtype(me, out_dtype, x_dtype)
    shape = tuple(shape)
    view = RowView(shape, _arguments.axes(me, axis, shape))

    call: NormCall | SoftmaxCall
    if function in _SOFTMAXES:
        call = SoftmaxCall(cast(Op, function), view, x_dtype, y_dtype, where, implementation)
    else:
        parameter = _arguments.output_dtype(me, param_dtype, x_dtype)
        call = NormCall(
            view=view,
            x_dtype=x_dtype,
            y_dtype=y_dtype,
            scale_dtype=parameter if use_scale else None,
            bias_dtype=parameter if use_bias and function == "layer_norm" else None,
            epsilon=1e-6,
            scale_offset=0.0,
            subtract_mean=function == "layer_norm",
            save=save,
            implementation=implementation,
        )

    def choice(spec: Spec) -> _implementation.Choice:
        if implementation is not None:
            return _implementation.forced(spec, implementation)
        return _implementation.choose(spec, platform)

    return Plan(choice(call.spec("fwd")), choice(call.spec("bwd")))
