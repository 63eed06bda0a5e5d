"""Flax linen modules: drop-in replacements of norms, and an attention function.

Norms, and the softmax of attention, save their outputs for the backward pass, not their inputs.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# This import is first, because it raises a helpful error if Flax is not installed.
from jaxnorm.models import attention, conversion, flax_modules

# isort: split
from flax import linen as nn
from flax.core import lift
from flax.linen import dtypes
from flax.traverse_util import flatten_dict

from jaxnorm.operations.checks import DTypeLike
from jaxnorm.remat.auto_remat import auto_remat as _auto_remat
from jaxnorm_kernels.specs import FLOAT_DTYPES, Activation, Name, Save

__all__ = [
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "RMSNormDense",
    "auto_remat",
    "converted",
    "dot_product_attention",
]


class _Settings(nn.Module):
    """The fields that jaxnorm's norm modules have in addition to the fields of Flax's norms."""

    save: Save = "output"
    implementation: Name | None = None
    scale_offset: float = 0.0


class LayerNorm(_Settings, nn.LayerNorm):
    """:class:`flax.linen.LayerNorm` that saves its output, not its input, for the backward pass.

    Fields, defaults, parameter names and the call are the same as in Flax, so checkpoints load
    unchanged; there are three additional fields. ``use_fast_variance`` is accepted, but the
    variance is always computed in two passes, which is numerically stable. Some calls run Flax's
    code, and need as much memory as in Flax: calls with ``mask``, ``axis_name``,
    ``force_float32_reductions=False``, ``feature_axes`` other than ``reduction_axes``, or a dtype
    that is not a float of 16 to 64 bits.

    Attributes:
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.layer_norm`.
      implementation: name of the implementation to use, or None; see :func:`jaxnorm.layer_norm`.
      scale_offset: number that is added to the parameter ``scale``; 0.0 by default.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.linen
      >>> y, variables = jaxnorm.linen.LayerNorm().init_with_output(
      ...     jax.random.key(0), jnp.ones((8, 512))
      ... )
      >>> y.shape, sorted(variables["params"])
      ((8, 512), ['bias', 'scale'])
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None, residual: Any = None) -> Any:
        """Normalise x like :meth:`flax.linen.LayerNorm.__call__`.

        With a residual, h = x + residual is normalised, and (y, h) is returned; see
        :func:`jaxnorm.add_layer_norm`.
        """
        return _called(self, super().__call__, x, mask, residual)


class RMSNorm(_Settings, nn.RMSNorm):
    """:class:`flax.linen.RMSNorm` that saves its output, not its input, for the backward pass.

    See :class:`jaxnorm.linen.LayerNorm` for the fields and parameters, and for the calls that run
    Flax's code. An RMSNorm has no bias.

    Attributes:
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.rms_norm`.
      implementation: name of the implementation to use, or None; see :func:`jaxnorm.rms_norm`.
      scale_offset: number that is added to the parameter ``scale``; 0.0 by default. For Gemma's
        ``1 + w``, pass ``scale_offset=1.0`` and a ``scale_init`` that returns zeros.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.linen
      >>> norm, x = jaxnorm.linen.RMSNorm(), jnp.ones((8, 512))
      >>> variables = norm.init(jax.random.key(0), x)
      >>> y, h = norm.apply(variables, x, residual=x)
      >>> y.shape, h.shape
      ((8, 512), (8, 512))
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None, residual: Any = None) -> Any:
        """Normalise x like :meth:`flax.linen.RMSNorm.__call__`.

        With a residual, h = x + residual is normalised, and (y, h) is returned; see
        :func:`jaxnorm.add_rms_norm`.
        """
        return _called(self, super().__call__, x, mask, residual)


class GroupNorm(_Settings, nn.GroupNorm):
    """:class:`flax.linen.GroupNorm` that saves its output, not its input, for the backward pass.

    See :class:`jaxnorm.linen.LayerNorm` for the fields and parameters, and for the calls that run
    Flax's code. Channels are the last axis of x.

    Attributes:
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.layer_norm`.
      implementation: name of the implementation to use, or None; see :func:`jaxnorm.layer_norm`.
      scale_offset: number that is added to the parameter ``scale``; 0.0 by default.
      activation: name of an activation, or None; see :func:`jaxnorm.layer_norm`. The activation is
        applied to the norm's result in the same pass over memory. With an activation, the module
        saves its input x instead of its output.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.linen
      >>> norm, images = jaxnorm.linen.GroupNorm(activation="silu"), jnp.ones((2, 16, 16, 64))
      >>> y, variables = norm.init_with_output(jax.random.key(0), images)
      >>> y.shape, variables["params"]["scale"].shape
      ((2, 16, 16, 64), (64,))
    """

    activation: Activation | None = None

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Any:
        """Normalise x like :meth:`flax.linen.GroupNorm.__call__`, and apply the activation."""
        return _called(self, super().__call__, x, mask, None)


class RMSNormDense(nn.Module):
    """RMSNorm and the Dense after it, computed by :func:`jaxnorm.rms_norm_linear`.

    The parameters have the same names as in an RMSNorm named ``norm`` and a Dense named ``dense``,
    so checkpoints can be exchanged with a model that has these two modules::

        {"norm": {"scale": ...}, "dense": {"kernel": ..., "bias": ...}}

    Attributes:
      features: number of features of the result.
      use_bias, kernel_init, bias_init: as in :class:`flax.linen.Dense`.
      epsilon, use_scale, scale_init: as in :class:`flax.linen.RMSNorm`.
      dtype: dtype of the matmul and its result. By default, this is the common dtype of x (or the
        residual) and the parameters.
      param_dtype: dtype of all parameters.
      activation: name of an activation, or None; see :func:`jaxnorm.rms_norm_linear`.
      implementation: name of the implementation to use, or None; see
        :func:`jaxnorm.rms_norm_linear`.
      scale_offset: number that is added to the parameter ``scale``; 0.0 by default. For Gemma's
        ``1 + w``, pass ``scale_offset=1.0`` and a ``scale_init`` that returns zeros.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.linen
      >>> module = jaxnorm.linen.RMSNormDense(2048, activation="silu")
      >>> y, variables = module.init_with_output(jax.random.key(0), jnp.ones((8, 512)))
      >>> y.shape, sorted(variables["params"])
      ((8, 2048), ['dense', 'norm'])
    """

    features: int
    use_bias: bool = True
    use_scale: bool = True
    epsilon: float = 1e-6
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    scale_init: nn.initializers.Initializer = nn.initializers.ones_init()
    activation: Activation | None = None
    implementation: Name | None = None
    scale_offset: float = 0.0

    @nn.compact
    def __call__(self, x: Any, *, residual: Any = None) -> Any:
        """Return y or, with a residual, (y, h), like :func:`jaxnorm.rms_norm_linear`."""
        *_, cols = jnp.shape(x) or (1,)  # rms_norm_linear will reject an x without axes
        norm: _Declared = {"scale": (self.scale_init, (cols,))} if self.use_scale else {}
        dense: _Declared = {"kernel": (self.kernel_init, (cols, self.features))}
        if self.use_bias:
            dense["bias"] = (self.bias_init, (self.features,))
        parameters = {
            **_Parameters(self.param_dtype, name="norm")(norm),
            **_Parameters(self.param_dtype, name="dense")(dense),
        }
        return flax_modules.norm_and_dense(
            self, parameters, x, residual, self.activation, self.dtype
        )


_Declared = dict[str, tuple[Any, tuple[int, ...]]]  # Maps names to (initialiser, shape).


class _Parameters(nn.Module):
    """A submodule that creates and returns parameters, in a subtree of its parent's parameters."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, declared: _Declared) -> dict[str, Any]:
        return {n: self.param(n, init, shape, self.dtype) for n, (init, shape) in declared.items()}


def _called(
    norm: Any, flax_norm: Callable[..., Any], x: Any, mask: jax.Array | None, residual: Any
) -> Any:
    """Run a call of one of jaxnorm's norm modules. Return y or, with a residual, (y, h).

    `flax_norm` is the ``__call__`` of Flax's class, which runs calls that jaxnorm does not support.
    """
    normal = x if residual is None else residual
    if _why_flax(norm, normal, mask):
        return flax_modules.by_flax(norm, functools.partial(flax_norm, mask=mask), x, residual)
    place, parameters, dtype = _operands(norm, normal)
    return flax_modules.normalised(norm, place, x, residual, parameters, dtype)


def _operands(norm: Any, x: Any) -> tuple[flax_modules.Place, dict[str, Any], np.dtype]:
    """Return the `Place` of a norm, a dict of its parameters, and the dtype of its result.

    The parameters are created in the scope of the module, according to the module's fields.
    """
    place: Any = flax_modules.place_of(norm, jnp.shape(x))
    shape = [x.shape[-1]] if flax_modules.is_group_norm(norm) else [*place.parameter]
    parameters = {
        name: norm.param(name, getattr(norm, f"{name}_init"), shape, norm.param_dtype)
        for name in ("scale", "bias")
        if getattr(norm, f"use_{name}", False)
    }
    return place, parameters, flax_modules.result_dtype(norm.dtype, x, *parameters.values())


def _why_flax(norm: Any, x: Any, mask: jax.Array | None) -> str | None:
    """Return the reason why a call of a norm runs Flax's code; None if it runs jaxnorm's code."""
    dtypes = jnp.result_type(x), norm.param_dtype, norm.dtype
    why = flax_modules.why_flax(norm, dtypes, mask) or flax_modules.place_of(norm, jnp.shape(x))
    return why if isinstance(why, str) else None


@contextlib.contextmanager
def converted(
    *,
    save: Save = "output",
    implementation: Name | None = None,
    params: Any = None,
    calls: Mapping[type, Callable[..., Any]] | None = None,
) -> Iterator[None]:
    """Make Flax's LayerNorm, RMSNorm and GroupNorm run jaxnorm's functions inside the context.

    This context manager converts existing models with :class:`flax.linen.LayerNorm`, ``RMSNorm``
    and ``GroupNorm`` without changing their source. Parameters have the same names, shapes, dtypes
    and initial values, so checkpoints load in both directions. ::

        with jaxnorm.linen.converted():
            variables = model.init(key, tokens)
            logits = model.apply(variables, tokens)

    A model is converted if it is *traced* inside the context. ``jax.jit`` traces a function
    separately for calls inside and outside the context. So you may enter the context around a call
    of a compiled function, or inside the function.

    Flax's code still runs for calls with ``mask``, ``axis_name``,
    ``force_float32_reductions=False``, ``feature_axes`` other than ``reduction_axes``, or a dtype
    that is not a float of 16 to 64 bits. It also runs for norms whose class is a subclass of one of
    Flax's classes and overrides code. (A subclass whose body is ``pass`` is converted.)

    When the context ends, the logger ``"jaxnorm"`` logs a warning if no norms were called inside
    it, or if called norms were left to Flax. The warning lists these norms, with the reasons.
    Modules of jaxnorm's classes keep their own settings. If contexts are nested, the innermost one
    applies. Interceptors (``nn.intercept_methods``) that are entered inside the context do not see
    calls of converted norms.

    If a scale is 0, or much smaller than the bias in the same column, its gradient cannot be
    computed from the norm's output (see :func:`jaxnorm.check_params`). Norms with such columns save
    their input, and the warning lists them. To find such columns, the values of the parameters are
    examined. The values are unknown while a compiled function or a scan over layers is traced. For
    such programs, pass them as ``params``. They are examined once, when the context is entered. ::

        with jaxnorm.linen.converted(params=variables):
            variables = train_step(variables, tokens)

    Many models define their own norm classes. The argument ``calls`` replaces the ``__call__`` of
    such classes. For Hugging Face's Llama::

        def rms_norm(norm, x):
            dtype = jnp.promote_types(norm.weight.dtype, norm.dtype)
            return jaxnorm.rms_norm(x, norm.weight, epsilon=norm.epsilon, dtype=dtype)


        with jaxnorm.linen.converted(calls={FlaxLlamaRMSNorm: rms_norm}):
            logits = model(tokens, params=params).logits

    Args:
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.layer_norm`. Norms whose gradients would otherwise be wrong always save their
        input.
      implementation: name of the implementation of all norms, or None; see
        :func:`jaxnorm.layer_norm`.
      params: the parameters of the model, with their values: a dictionary of all variables, or only
        of the collection ``"params"``. Without ``params``, values are examined only in calls
        outside `jax.jit`, where they are known.
      calls: a dictionary ``{class: function(module, *args, **kwargs)}``. In modules of exactly such
        a class, the function replaces ``__call__``. It may call the original ``__call__``. If the
        original is decorated with ``nn.compact``, the function may also call ``module.param``.
        ``save`` and ``implementation`` do not apply to these modules. Modules of subclasses are not
        changed. A log line lists the modules that use such a function (level INFO), the modules of
        subclasses, and the classes in ``calls`` whose modules were not called (a warning).
        ``jax.jit`` retraces if a function has other code, or refers to other objects.

    Raises:
      TypeError: ``params`` is not a dictionary; ``calls`` is not a dictionary of classes and
        functions.
      ValueError: ``save`` or ``implementation`` is wrong; ``calls`` has a class that is not a
        ``flax.linen.Module``.

    Example:
      >>> import flax.linen as nn
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.linen
      >>> model, x = nn.Sequential([nn.LayerNorm(), nn.Dense(8)]), jnp.ones((2, 512))
      >>> with jaxnorm.linen.converted():
      ...     y, variables = model.init_with_output(jax.random.key(0), x)
      >>> y.shape
      (2, 8)
    """
    report = conversion.Report("linen.converted", nn.Module, _CLASSES, save, implementation, calls)
    reasons = _reasons_in(params) if save == "output" and params is not None else None
    # `jax.jit` retraces only if the set of norms that save their input changes.
    kept = frozenset(at for at, why in (reasons or {}).items() if why)
    functions = frozenset((k, conversion.identity(f)) for k, f in report.calls.items())
    settings = (save, implementation, kept, functions)
    if _innermost.value == settings:
        yield
        return
    running: list[nn.Module] = []  # modules for which a function of `calls` is running now

    def call(call: Any, arguments: Any, options: Any, context: Any) -> Any:
        module = context.module
        is_active = context.method_name == "__call__" and _innermost.value == settings
        if not is_active or any(module is one for one in running):
            return call(*arguments, **options)
        path = "/".join(module.path)
        function = report.function_of(type(module), path)
        if function is not None:
            running.append(module)
            try:
                return function(module, *arguments, **options)
            finally:
                running.pop()
        x = arguments[0] if arguments else options.get("x")
        mask = options.get("mask")
        if report.converted_class(module, path, lambda norm: _why_flax(norm, x, mask)) is not None:
            return _converted_call(report, reasons, module, path, x)
        result = call(*arguments, **options)
        parameters = module.variables.get("params", {}).values()
        if not any(isinstance(one, Mapping) for one in parameters):  # no submodules
            report.note(type(module), path, map(nn.unbox, parameters))
        return result

    with _innermost(settings), nn.intercept_methods(call):
        yield
    # `jax.jit` may have reused compiled programs, which do not call modules again.
    if report.kinds:
        names = ", ".join(sorted({kind.__name__ for kind in report.kinds}))
        classes = "linen.LayerNorm, RMSNorm or GroupNorm"
        report.log(f"no {classes} was called inside it, only {names}")


# The settings of the innermost context of `converted`. They are part of the key of jax.jit's cache.
_innermost = jax.make_user_context()
_CLASSES = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm, nn.GroupNorm: GroupNorm}


def _reasons_in(params: Any) -> dict[tuple[str, str], str | None]:
    """Return the reasons why norms must save their input, by the values in the argument ``params``.

    The result is a dict. A key is a pair: the path of a norm, and the name of a dtype that its
    output may have. The value is the reason why the norm must then save its input, or None.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"converted: params is a {type(params).__name__}; expected a model's "
            'variables, or those of the collection "params": a dictionary'
        )
    arrays = flatten_dict(nn.unbox(params.get("params", params)))
    reasons = {}
    for *path, name in arrays:
        if name == "scale":
            parameters = [arrays[*path, n] for n in ("scale", "bias") if (*path, n) in arrays]
            for dtype in FLOAT_DTYPES:
                key = "/".join(path), dtype
                reasons[key] = conversion.why_input(parameters, np.dtype(dtype))
    return reasons


def _converted_call(
    report: conversion.Report, reasons: Mapping[Any, Any] | None, norm: Any, path: str, x: Any
) -> Any:
    """Return the result of one of Flax's norms that is called inside `converted`, by jaxnorm.

    Record the norm if the values of its parameters require that it saves its input. For traced
    parameters, which have no values, the decision is looked up in `reasons`: the result of
    `_reasons_in` for the user's argument ``params``, or None if ``params`` was not passed.
    """
    place, parameters, dtype = _operands(norm, x)
    why = None
    if report.save == "output" and "scale" in parameters:
        if conversion.are_known(parameters.values()):
            why = conversion.why_input(parameters.values(), dtype)
        elif reasons is not None:
            why = reasons.get((path, dtype.name))
            if (path, dtype.name) not in reasons:
                report.unknown[path] = "params has no such norm"
    settings = report.settings(path, why)
    return flax_modules.normalised(norm, place, x, None, parameters, dtype, settings)


# --------------------------------------------------------------------------------------- attention


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Compute :func:`flax.linen.dot_product_attention` with :func:`jaxnorm.softmax`.

    Pass it to ``linen.MultiHeadDotProductAttention`` as ``attention_fn``. The arguments, the rule
    for masked logits and the dtype of the logits are the same as in Flax. The softmax is computed
    in float32 (float64 for float64 logits). For the backward pass of the softmax, only the
    attention weights are saved, while :func:`jax.nn.softmax` saves two arrays of their size (unless
    ``jax_softmax_custom_jvp`` is set).

    Args:
      query, key, value: arrays ``(batch..., length, heads, depth)``.
      bias, mask: arrays that broadcast to ``(batch..., heads, q_length, kv_length)``, or None.
        Logits are masked where ``mask`` is False.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: options of the dropout of
        attention weights, as in Flax.
      dtype: dtype of the computation; inferred from the inputs by default.
      precision: precision of the two matmuls.
      module: module in which the weights are sown, as ``attention_weights`` in ``intermediates``,
        or None.
      force_fp32_for_softmax: True for attention weights in float32.
      einsum_dot_general: replacement of `jax.lax.dot_general` in both matmuls.
      qk_attn_weights_einsum, attn_weights_value_einsum: replacements of `jnp.einsum` in the first
        and the second matmul. Pass both or neither. If they are passed, ``precision`` and
        ``einsum_dot_general`` must not be.

    Returns:
      Array ``(batch..., q_length, heads, v_depth)``.

    Raises:
      ValueError: the shapes do not fit together; options exclude each other.

    Example:
      >>> import flax.linen as nn
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.linen
      >>> attention = nn.MultiHeadDotProductAttention(
      ...     8, attention_fn=jaxnorm.linen.dot_product_attention
      ... )
      >>> x, mask = jnp.ones((2, 16, 64)), nn.make_causal_mask(jnp.ones((2, 16)))
      >>> attention.init_with_output(jax.random.key(0), x, mask=mask)[0].shape
      (2, 16, 64)
    """
    if (qk_attn_weights_einsum is None) != (attn_weights_value_einsum is None):
        raise ValueError(
            "dot_product_attention: got one of qk_attn_weights_einsum and "
            "attn_weights_value_einsum; give both or neither"
        )
    if qk_attn_weights_einsum is not None and (precision or einsum_dot_general):
        raise ValueError(
            "dot_product_attention: qk_attn_weights_einsum replaces what precision and "
            "einsum_dot_general configure; give one or the other"
        )
    query, key, value = dtypes.promote_dtype(query, key, value, dtype=dtype)
    attention.check_shapes(query, key, value, groups=False)
    dot_general = einsum_dot_general or jax.lax.dot_general
    einsum = functools.partial(jnp.einsum, precision=precision, _dot_general=dot_general)
    scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    weights = attention.masked_softmax(
        (qk_attn_weights_einsum or einsum)("...qhd,...khd->...hqk", scaled, key),
        bias,
        mask,
        fill=float(jnp.finfo(query.dtype).min),
        dtype=np.dtype(jnp.float32) if force_fp32_for_softmax else query.dtype,
    )
    return attention.attend(
        weights,
        value,
        (dropout_rng, dropout_rate, broadcast_dropout, deterministic),
        einsum=attn_weights_value_einsum or einsum,
        sow=module and functools.partial(module.sow, "intermediates", "attention_weights"),
    )


def auto_remat(
    target: Any,
    *,
    budget: int | float | None = None,
    static_argnums: int | Sequence[int] = (),
    methods: Sequence[str] | None = None,
) -> Any:
    """Return a module class, or a function of a module, that saves as few arrays as possible.

    This function applies :func:`jaxnorm.auto_remat` to linen modules, as ``nn.remat`` applies
    ``jax.checkpoint``. All variables and random numbers of the module are lifted. Modules without a
    ``name`` are named as with ``nn.remat``, for example ``"CheckpointDense_0"``.

    Args:
      target: a module class, or a function whose first argument is a module.
      budget: None, a number of bytes per device, or a share, as for :func:`jaxnorm.auto_remat`.
      static_argnums: indices of arguments that are passed unchanged; the module has index 0.
      methods: names of the methods to which it is applied; by default, only ``__call__``.

    Returns:
      A module class, or a function, with the same parameters and results.

    Raises:
      TypeError, ValueError: ``budget`` is not valid, as for :func:`jaxnorm.auto_remat`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> import jaxnorm.linen
      >>> layer = jaxnorm.linen.auto_remat(nn.Dense)(8)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 4)))[0].shape
      (2, 8)
    """
    static = [static_argnums] if isinstance(static_argnums, int) else static_argnums
    # linen does not pass the module to the lifted function, so the indices are smaller by 1.
    return nn.transforms.lift_transform(
        _lifted, target, budget=budget, static_argnums=[i - 1 for i in static], methods=methods
    )


def _lifted(
    function: Callable[..., Any], *, budget: int | float | None, static_argnums: Sequence[int]
) -> Callable[..., Any]:
    """Lift `auto_remat` for a function of a scope, as `lift.checkpoint` does `jax.checkpoint`."""

    def inner(
        scope_of: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        @functools.wraps(function)
        def run(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            scope = scope_of(variables, rngs)
            return function(scope, *args, **kwargs), repack(scope)

        static = [i + 2 for i in static_argnums]
        remat = _auto_remat(run, budget=budget, static_argnums=static)
        return remat(variables, rngs, *args, **kwargs)

    return lift.pack(inner, (True,), (True,), (True,), name="auto_remat", enable_kwargs=True)


# linen derives names of modules from this name, such as "CheckpointDense_0". `nn.remat` uses the
# same name, so checkpoints of a model that uses `nn.remat` load unchanged.
_lifted.__name__ = "checkpoint"
