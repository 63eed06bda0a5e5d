"""Flax linen modules: drop-in norms and an attention function that save their outputs."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

# First, because it says what to do where Flax is missing.
from jaxnorm.models import conversion, flax_modules

# isort: split
from flax import linen as nn
from flax.linen import dtypes

from jaxnorm.models.linen_attention import dot_product_attention
from jaxnorm.models.linen_calls import called, normalised, why_flax
from jaxnorm.models.linen_conversion import Seen, Stored
from jaxnorm.operations.checks import DTypeLike
from jaxnorm_kernels.linear_spec import Activation
from jaxnorm_kernels.specs import Name, NormActivation, Save

__all__ = [
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "RMSNormDense",
    "converted",
    "dot_product_attention",
]

dot_product_attention.__module__ = __name__  # where users find it


class _Settings(nn.Module):
    """The fields that Flax's norms do not have."""

    save: Save = "output"
    implementation: Name | None = None
    scale_offset: float = 0.0


class LayerNorm(_Settings, nn.LayerNorm):
    """:class:`flax.linen.LayerNorm` that keeps its output, not its input, for the backward pass.

    Every field, default, parameter name and the call are Flax's, so checkpoints load unchanged;
    three fields come on top. ``use_fast_variance`` is accepted, but the variance is always the
    stable two-pass one. A call with ``mask``, ``axis_name``, ``force_float32_reductions=False``,
    ``feature_axes`` other than ``reduction_axes``, or a dtype that is no float of 16 to 64 bits, is
    Flax's own, input-saving computation.

    Attributes:
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.layer_norm`.
      implementation: see :func:`jaxnorm.layer_norm`.
      scale_offset: added to the parameter ``scale``; 0.0 by default.

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
        """Normalise x, as :meth:`flax.linen.LayerNorm.__call__` does.

        With a residual, return (y, h) of h = x + residual: see :func:`jaxnorm.add_layer_norm`.
        """
        return called(self, super().__call__, x, mask, residual)


class RMSNorm(_Settings, nn.RMSNorm):
    """:class:`flax.linen.RMSNorm` that keeps its output, not its input, for the backward pass.

    What :class:`jaxnorm.linen.LayerNorm` says of fields, parameters and Flax's own path holds here.

    Attributes:
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.rms_norm`.
      implementation: see :func:`jaxnorm.rms_norm`.
      scale_offset: added to the parameter ``scale``; 1.0 for Gemma's ``1 + w``, with zeros for
        ``scale_init``.

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
        """Normalise x, as :meth:`flax.linen.RMSNorm.__call__` does.

        With a residual, return (y, h) of h = x + residual: see :func:`jaxnorm.add_rms_norm`.
        """
        return called(self, super().__call__, x, mask, residual)


class GroupNorm(_Settings, nn.GroupNorm):
    """:class:`flax.linen.GroupNorm` that keeps its output, not its input, for the backward pass.

    What :class:`jaxnorm.linen.LayerNorm` says of fields, parameters and Flax's own path holds here;
    channels are the last axis.

    Attributes:
      save: ``"output"`` or ``"input"``; see :func:`jaxnorm.layer_norm`.
      implementation: see :func:`jaxnorm.layer_norm`.
      scale_offset: added to the parameter ``scale``; 0.0 by default.
      activation: ``"silu"``, ``"gelu"`` or ``"relu"``, of the norm, in the same pass; it then keeps
        its input. None for none.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxnorm.linen
      >>> norm, images = jaxnorm.linen.GroupNorm(activation="silu"), jnp.ones((2, 16, 16, 64))
      >>> y, variables = norm.init_with_output(jax.random.key(0), images)
      >>> y.shape, variables["params"]["scale"].shape
      ((2, 16, 16, 64), (64,))
    """

    activation: NormActivation | None = None

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Any:
        """Normalises x, as :meth:`flax.linen.GroupNorm.__call__` does, and activates it."""
        return called(self, super().__call__, x, mask, None)


class RMSNormDense(nn.Module):
    """RMSNorm and the Dense after it, as :func:`jaxnorm.rms_norm_linear`.

    Parameters are those of the two modules, in trees of their names, so that theirs load unchanged,
    in both directions::

        {"norm": {"scale": ...}, "dense": {"kernel": ..., "bias": ...}}

    Attributes:
      features: of the result.
      use_bias, kernel_init, bias_init: as in :class:`flax.linen.Dense`.
      epsilon, use_scale, scale_init: as in :class:`flax.linen.RMSNorm`.
      dtype: of the product and its result; by default that to which what is normalised and the
        parameters promote.
      param_dtype: of all parameters.
      activation: None, or a name; see :func:`jaxnorm.rms_norm_linear`.
      implementation: see :func:`jaxnorm.rms_norm_linear`.
      scale_offset: added to the parameter ``scale``; 1.0 for Gemma's ``1 + w``, with zeros for
        ``scale_init``.

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
        """The result, or (y, h) with a residual, as :func:`jaxnorm.rms_norm_linear` gives them."""
        *_, cols = jnp.shape(x) or (1,)  # rms_norm_linear says what an x without axes lacks
        norm: _Declared = {"scale": (self.scale_init, (cols,))} if self.use_scale else {}
        dense: _Declared = {"kernel": (self.kernel_init, (cols, self.features))}
        if self.use_bias:
            dense["bias"] = (self.bias_init, (self.features,))
        parameters = {
            **_Parameters(self.param_dtype, name="norm")(norm),
            **_Parameters(self.param_dtype, name="dense")(dense),
        }
        return flax_modules.norm_and_dense(
            dtypes, self, parameters, x, residual, self.activation, self.dtype
        )


_Declared = dict[str, tuple[Any, tuple[int, ...]]]  # by name: initialiser and shape


class _Parameters(nn.Module):
    """Parameters that are in a subtree of the module's."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, declared: _Declared) -> dict[str, Any]:
        return {n: self.param(n, init, shape, self.dtype) for n, (init, shape) in declared.items()}


@contextlib.contextmanager
def converted(
    *,
    save: Save = "output",
    implementation: Name | None = None,
    params: Any = None,
    calls: Mapping[type, Callable[..., Any]] | None = None,
) -> Iterator[None]:
    """Inside it, :class:`flax.linen.LayerNorm`, ``RMSNorm`` and ``GroupNorm`` run jaxnorm's code.

    For models that exist, and whose source is not to be changed: parameters have the same names,
    shapes, dtypes and initial values, so checkpoints of either load into the other. ::

        with jaxnorm.linen.converted():
            variables = model.init(key, tokens)
            logits = model.apply(variables, tokens)

    What counts is where a model is *traced*. A function compiled by ``jax.jit`` is traced once
    for inside and once for outside, wherever it was called first, so the context may be around
    calls of compiled functions, or in them. A call with ``mask``, ``axis_name``,
    ``force_float32_reductions=False``, ``feature_axes`` other than ``reduction_axes``, or a
    dtype that is no float of 16 to 64 bits, stays Flax's, and so do subclasses of Flax's
    classes with code of their own. (A subclass whose body is ``pass`` is converted.) Where the
    context ends, one warning of the logger ``"jaxnorm"`` names those that were traced inside,
    with the reasons; another one says so where nothing was converted. Modules that are
    jaxnorm's already keep their own settings. Of nested contexts the innermost counts;
    interceptors (``nn.intercept_methods``) that are entered inside see no calls of converted
    norms.

    From the output of a norm whose scale is 0 beside a bias, or far below it, the gradient of that
    scale cannot be computed (see :func:`jaxnorm.check_params`). Norms that have such columns keep
    their input, and the warning names them. Parameters of a function that is compiled, and those of
    scanned layers, have no values while it is traced: ``params`` is looked at in place of these,
    once, where the context is entered. ::

        with jaxnorm.linen.converted(params=variables):
            variables = train_step(variables, tokens)

    Many models have norm classes of their own. ``calls`` says what to call in their place; here for
    Hugging Face's Llama::

        def rms_norm(norm, x):
            dtype = jnp.promote_types(norm.weight.dtype, norm.dtype)
            return jaxnorm.rms_norm(x, norm.weight, epsilon=norm.epsilon, dtype=dtype)


        with jaxnorm.linen.converted(calls={FlaxLlamaRMSNorm: rms_norm}):
            logits = model(tokens, params=params).logits

    Args:
      save: ``"output"`` or ``"input"``, of all norms but those that have to keep their input; see
        :func:`jaxnorm.layer_norm`.
      implementation: of all norms; see :func:`jaxnorm.layer_norm`.
      params: the parameters of the model that is called, with values: its variables, or those of
        the collection ``"params"``. None where the calls themselves have them, or to look at none.
      calls: ``{class: function(module, *args, **kwargs)}``: what is called in place of the
        ``__call__`` of modules of exactly that class. It may call that ``__call__`` itself and, if
        that is compact, ``module.param``. ``save`` and ``implementation`` do not apply to it. The
        log line names these modules, those of subclasses, which are left as they are, and classes
        that were not called. ``jax.jit`` traces anew for other functions: define them once.

    Raises:
      TypeError: ``params`` is no dictionary, or ``calls`` is not a dictionary of classes and
        functions.
      ValueError: ``save`` or ``implementation`` is wrong, or ``calls`` has a class that is not a
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
    added = flax_modules.given_to("converted", save, implementation)
    stored = Stored(params if save == "output" else None)
    replaced = conversion.Calls("converted", calls, nn.Module, "linen")
    settings = (added, stored, replaced)
    around = _innermost.value
    if around == settings:
        yield
        return
    seen = Seen(replaced)
    running: list[nn.Module] = []  # modules whose function of `calls` may call their own code

    def call(
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        norm = context.module
        is_call = context.method_name == "__call__"
        if _innermost.value != settings or any(norm is one for one in running):
            return call(*arguments, **options)
        seen.modules.add(f"{type(norm).__module__}.{type(norm).__qualname__}")
        path = "/".join(norm.path)
        function = replaced.of(type(norm), path) if is_call else None
        if function is not None:
            running.append(norm)
            try:
                return function(norm, *arguments, **options)
            finally:
                running.pop()
        if replaced.has(path):
            return call(*arguments, **options)
        seen.has_norms |= isinstance(norm, _FLAX)
        is_flax_s = isinstance(norm, _FLAX) and not isinstance(norm, _OURS)
        if not isinstance(norm, _FLAX) and is_call:
            replaced.note(type(norm), path)
        if not (is_flax_s and is_call):
            return call(*arguments, **options)
        x = arguments[0] if arguments else options["x"]
        why = _why_left(norm, x, options.get("mask"))
        seen.norms[path] = seen.norms.get(path) or why
        if why:
            seen.note_left(norm, _FLAX)
            return call(*arguments, **options)
        if save == "input":
            return normalised(norm, added, x)
        return normalised(norm, added, x, judged=functools.partial(seen.judged, stored, path))

    with _innermost(settings), nn.intercept_methods(call):
        yield
    seen.tell(settings, around)


# The settings of the innermost `converted`. They are a part of what jax.jit looks up its traces by.
_innermost = jax.make_user_context()
_FLAX = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_OURS = (LayerNorm, RMSNorm, GroupNorm)


def _why_left(norm: Any, x: Any, mask: jax.Array | None) -> str | None:
    """Why a call of a module of Flax's is not converted; None where it is."""
    if conversion.converted_as(type(norm), _FLAX) is None:
        base = next(kind for kind in _FLAX if isinstance(norm, kind))
        return conversion.subclass(norm, base, "Flax")
    return why_flax(norm, x, mask)
