"""Flax nnx modules: drop-in replacements of norms, and an attention function.

For the backward pass, the norms, and the softmax in the attention function, save their outputs
instead of their inputs.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

# This import is first, because it raises a helpful error if Flax is not installed.
from jaxnorm.models import flax_modules

# isort: split
from flax import nnx

from jaxnorm.models import conversion
from jaxnorm.models.nnx_attention import dot_product_attention
from jaxnorm.operations.checks import DTypeLike
from jaxnorm.remat.auto_remat import auto_remat as _auto_remat
from jaxnorm_kernels.specs import Activation, Name, Save

__all__ = [
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "RMSNormDense",
    "auto_remat",
    "convert",
    "dot_product_attention",
]

dot_product_attention.__module__ = __name__  # Users import it from this module.


class _Norm(nnx.Module):
    """A base class with the fields that jaxnorm's norm modules have in addition to Flax's."""

    save: Save
    implementation: Name | None
    scale_offset: float


class LayerNorm(_Norm, nnx.LayerNorm):
    """:class:`flax.nnx.LayerNorm` that saves its output, not its input, for the backward pass.

    Arguments, defaults, parameter names and the call are the same as in Flax, so states load
    unchanged; there are three additional arguments. As in Flax, x and the parameters are first
    promoted to one dtype (``promote_dtype``). ``use_fast_variance`` is accepted, but the variance
    is always computed in two passes, which is numerically stable. Some calls run Flax's code, and
    need as much memory as in Flax: calls with ``mask``, ``axis_name``, ``feature_axes`` other than
    ``reduction_axes``, or a dtype that is not a float of 16 to 64 bits.

    Args:
      num_features: number of elements of scale and of bias.
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.layer_norm`.
      implementation: name of the implementation to use, or None; see :func:`jaxnorm.layer_norm`.
      scale_offset: number that is added to the parameter ``scale``; 0.0 by default.

    The other arguments are those of :class:`flax.nnx.LayerNorm`; ``rngs`` is required.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> norm = jaxnorm.nnx.LayerNorm(512, rngs=nnx.Rngs(0))
      >>> norm(jnp.ones((8, 512))).shape
      (8, 512)
    """

    __init__ = conversion.init_of(nnx.LayerNorm)

    def __call__(self, x: Any, *, mask: jax.Array | None = None, residual: Any = None) -> Any:
        """Normalise x like :meth:`flax.nnx.LayerNorm.__call__`.

        With a residual, h = x + residual is normalised, and (y, h) is returned; see
        :func:`jaxnorm.add_layer_norm`.
        """
        return _called(self, super().__call__, x, mask, residual)


class RMSNorm(_Norm, nnx.RMSNorm):
    """:class:`flax.nnx.RMSNorm` that saves its output, not its input, for the backward pass.

    See :class:`jaxnorm.nnx.LayerNorm` for the arguments and parameters, and for the calls that run
    Flax's code. An RMSNorm has no bias.

    Args:
      num_features: number of elements of scale.
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.rms_norm`.
      implementation: name of the implementation to use, or None; see :func:`jaxnorm.rms_norm`.
      scale_offset: number that is added to the parameter ``scale``; 0.0 by default. For Gemma's
        ``1 + w``, pass ``scale_offset=1.0`` and a ``scale_init`` that returns zeros.

    The other arguments are those of :class:`flax.nnx.RMSNorm`; ``rngs`` is required.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> norm, x = jaxnorm.nnx.RMSNorm(512, rngs=nnx.Rngs(0)), jnp.ones((8, 512))
      >>> y, h = norm(x, residual=x)
      >>> y.shape, h.shape
      ((8, 512), (8, 512))
    """

    __init__ = conversion.init_of(nnx.RMSNorm)

    def __call__(self, x: Any, mask: jax.Array | None = None, *, residual: Any = None) -> Any:
        """Normalise x like :meth:`flax.nnx.RMSNorm.__call__`.

        With a residual, h = x + residual is normalised, and (y, h) is returned; see
        :func:`jaxnorm.add_rms_norm`.
        """
        return _called(self, super().__call__, x, mask, residual)


class GroupNorm(_Norm, nnx.GroupNorm):
    """:class:`flax.nnx.GroupNorm` that saves its output, not its input, for the backward pass.

    See :class:`jaxnorm.nnx.LayerNorm` for the parameters, and for the calls that run Flax's code.
    Channels are the last axis of x.

    Args:
      num_features: number of channels.
      num_groups, group_size: number of groups, and number of channels in a group; one of them must
        be None.
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.layer_norm`.
      implementation: name of the implementation to use, or None; see :func:`jaxnorm.layer_norm`.
      scale_offset: number that is added to the parameter ``scale``; 0.0 by default.
      activation: name of an activation, or None; see :func:`jaxnorm.layer_norm`. The activation is
        applied to the norm's result in the same pass over memory. With an activation, the module
        saves its input x instead of its output.

    The other arguments are those of :class:`flax.nnx.GroupNorm`; ``rngs`` is required.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> norm = jaxnorm.nnx.GroupNorm(64, activation="silu", rngs=nnx.Rngs(0))
      >>> norm(jnp.ones((2, 16, 16, 64))).shape
      (2, 16, 16, 64)
    """

    # `convert` sets no activation in converted modules, so they have this default.
    activation: Activation | None = None

    __init__ = conversion.init_of(nnx.GroupNorm, activation=None)

    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> Any:
        """Normalise x like :meth:`flax.nnx.GroupNorm.__call__`, and apply the activation."""
        if jnp.shape(x)[-1:] != (self.num_groups * self.group_size,):
            raise ValueError(
                f"{type(self).__name__}: x has shape {jnp.shape(x)}; expected "
                f"{self.num_groups * self.group_size} channels, the module's num_features, on its "
                "last axis; transpose x, or make the module of as many as x has"
            )
        return _called(self, super().__call__, x, mask, None)


class RMSNormDense(nnx.Module):
    """RMSNorm and the linear layer after it, computed by :func:`jaxnorm.rms_norm_linear`.

    It has two submodules: ``norm``, an RMSNorm, and ``dense``, a :class:`flax.nnx.Linear`. So
    states can be exchanged with a model that has these two modules.

    Args:
      in_features, out_features: number of features of x, and number of features of the result.
      use_bias, kernel_init, bias_init: as in :class:`flax.nnx.Linear`.
      epsilon, use_scale, scale_init: as in :class:`flax.nnx.RMSNorm`.
      dtype: dtype of the matmul and its result. By default, this is the common dtype of x (or the
        residual) and the parameters.
      param_dtype: dtype of all parameters.
      rngs: random keys for the initial parameters.
      kernel_metadata, bias_metadata, scale_metadata: metadata of the parameters, as in Flax.
      activation: name of an activation, or None; see :func:`jaxnorm.rms_norm_linear`.
      implementation: name of the implementation to use, or None; see
        :func:`jaxnorm.rms_norm_linear`.
      scale_offset: number that is added to the parameter ``scale``; 0.0 by default. For Gemma's
        ``1 + w``, pass ``scale_offset=1.0`` and a ``scale_init`` that returns zeros.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> module = jaxnorm.nnx.RMSNormDense(512, 2048, activation="silu", rngs=nnx.Rngs(0))
      >>> module(jnp.ones((8, 512))).shape
      (8, 2048)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        use_scale: bool = True,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = nnx.initializers.lecun_normal(),
        bias_init: nnx.Initializer = nnx.initializers.zeros_init(),
        scale_init: nnx.Initializer = nnx.initializers.ones_init(),
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        activation: Activation | None = None,
        implementation: Name | None = None,
        scale_offset: float = 0.0,
    ) -> None:
        self.norm = RMSNorm(
            in_features,
            epsilon=epsilon,
            param_dtype=param_dtype,
            use_scale=use_scale,
            scale_init=scale_init,
            rngs=rngs,
            scale_metadata=scale_metadata,
            implementation=implementation,
            scale_offset=scale_offset,
        )
        self.dense = nnx.Linear(
            in_features,
            out_features,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.activation = activation

    def __call__(self, x: Any, *, residual: Any = None) -> Any:
        """Return y or, with a residual, (y, h), like :func:`jaxnorm.rms_norm_linear`."""
        parameters = _values(self.norm, "scale") | _values(self.dense, "kernel", "bias")
        return flax_modules.norm_and_dense(
            self.norm, parameters, x, residual, self.activation, self.dense.dtype
        )


def convert[Model](
    model: Model,
    *,
    save: Save = "output",
    implementation: Name | None = None,
    calls: Mapping[type, Callable[..., Any]] | None = None,
) -> Model:
    """Replace each :class:`flax.nnx.LayerNorm`, ``RMSNorm`` and ``GroupNorm`` in a model, in place.

    A norm stays the same object, with the same ``nnx.Param`` objects, and gets jaxnorm's class. So
    shared modules stay shared, optimisers keep their parameters, and the paths, shapes and dtypes
    of the state do not change: checkpoints load in both directions. An ``nnx.Optimizer`` may be
    created before or after the conversion. A graph definition from an ``nnx.split`` before the
    conversion still describes the old model, so split the model after the conversion. ::

        model = jaxnorm.nnx.convert(Transformer(config, rngs=nnx.Rngs(0)))

    Norms are found wherever nnx finds modules: attributes, ``nnx.List``, ``nnx.Dict``,
    ``nnx.Sequential``, lists and dictionaries. This includes stacked norms for ``nnx.vmap`` and
    ``nnx.scan``, the norms of ``nnx.MultiHeadAttention(normalize_qk=True)``, and abstract norms
    (``nnx.eval_shape``). A converted norm always computes the variance in two passes, whatever
    ``use_fast_variance`` is, and runs Flax's code for a call with ``mask``.

    If a scale is 0, or much smaller than the bias in the same column, its gradient cannot be
    computed from the norm's output (see :func:`jaxnorm.check_params`). The conversion therefore
    examines the values of parameters, and norms with such columns get ``save="input"``. Abstract
    and traced parameters have no values, so convert a model after its checkpoint is loaded. If a
    norm has no ``dtype``, its output is assumed to have the parameters' dtype.

    Norms are not converted if they have an ``axis_name``, ``feature_axes`` that are not
    ``reduction_axes``, or dtypes that are not floats of 16 to 64 bits. Norms whose class is a
    subclass of one of Flax's classes are not converted if the subclass overrides code. (A subclass
    whose body is ``pass`` is converted.) The logger ``"jaxnorm"`` logs one warning, which lists
    these norms and the norms that save their input, with the reasons. If the model has no norms,
    the warning says so. If there is nothing to list, nothing is logged. Modules of jaxnorm's
    classes keep their own settings. If an error is raised, no module has been changed.

    Many models define their own norm classes. The argument ``calls`` replaces the ``__call__`` of
    such classes. For Tunix's Qwen 3::

        def rms_norm(norm, x):
            return jaxnorm.rms_norm(x, norm.w[...], epsilon=norm.norm_eps, dtype=norm.dtype)


        model = jaxnorm.nnx.convert(model, calls={tunix.models.qwen3.model.RMSNorm: rms_norm})

    Args:
      model: an ``nnx.Module``, or a list, tuple or dictionary of modules.
      save: which array is saved for the backward pass, ``"output"`` or ``"input"``; see
        :func:`jaxnorm.layer_norm`. Norms whose gradients would otherwise be wrong always save their
        input.
      implementation: name of the implementation of all norms, or None; see
        :func:`jaxnorm.layer_norm`.
      calls: a dictionary ``{class: function(module, *args, **kwargs)}``. In modules of exactly such
        a class, the function replaces ``__call__``. It may call the original ``__call__``. The
        modules stay the same objects, keep their parameters, and remain instances of the class.
        ``save`` and ``implementation`` do not apply to them. Modules of subclasses are not changed.
        One log line lists the changed modules. If it also lists modules of subclasses, or classes
        in ``calls`` that the model does not use, its level is WARNING instead of INFO. If the
        function cannot be pickled (a lambda, for example), a pickled model is loaded with modules
        of the original class.

    Returns:
      ``model``, the same object.

    Raises:
      TypeError: ``model`` has no ``nnx.Module`` in it; ``calls`` is not a dictionary of classes
        and functions.
      ValueError: ``save`` or ``implementation`` is wrong; ``calls`` has a class that is not an
        ``nnx.Module``.

    Example:
      >>> import jaxnorm.nnx
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.LayerNorm(512, rngs=nnx.Rngs(0)))
      >>> model = jaxnorm.nnx.convert(model)
      >>> type(model.layers[0]).__module__
      'jaxnorm.nnx'
    """
    report = conversion.Report("nnx.convert", nnx.Module, _CLASSES, save, implementation, calls)
    # Every decision is made before the first module is changed, so an error leaves all unchanged.
    changes: list[tuple[Any, type, dict[str, Any]]] = []
    for keys, node in nnx.iter_graph(model, graph=True):
        if not isinstance(node, nnx.Module):
            continue
        path = ".".join(map(str, keys))
        change = report.change(node, path, _why_left, _why_input)
        if change is not None:
            changes.append((node, *change))
        elif not any(isinstance(child, nnx.Module) for child in vars(node).values()):
            parameters = [v.get_value() for v in vars(node).values() if isinstance(v, nnx.Param)]
            report.note(type(node), path, parameters)
    if not report.kinds:
        raise TypeError(
            f"convert: model is a {type(model).__name__}; expected an nnx.Module, or a list, tuple "
            "or dictionary of them; call linen modules inside jaxnorm.linen.converted()"
        )
    _apply(changes)
    report.log(f"{type(model).__name__} has no nnx.LayerNorm, RMSNorm or GroupNorm")
    return model


_CLASSES = {nnx.LayerNorm: LayerNorm, nnx.RMSNorm: RMSNorm, nnx.GroupNorm: GroupNorm}


def _apply(changes: Sequence[tuple[Any, type, Mapping[str, Any]]]) -> None:
    """Change the classes and set attributes of modules. If one module cannot be changed, none is.

    For example, nnx raises an error for a module that was created outside the traced function.
    """
    before = [(node, type(node), dict(vars(node))) for node, _, _ in changes]
    try:
        for node, kind, attributes in changes:
            for name, value in attributes.items():
                setattr(node, name, value)
            node.__class__ = kind
    except BaseException:
        for node, kind, attributes in before:
            object.__setattr__(node, "__class__", kind)
            vars(node).clear()
            vars(node).update(attributes)
        raise


def _why_left(norm: Any) -> str | None:
    """Return the reason why a norm is left to Flax; None if it is converted."""
    why = flax_modules.why_flax(norm, (norm.dtype, norm.param_dtype))
    # A GroupNorm has no `feature_axes`, because its features are always the last axis.
    reduced, features = norm.reduction_axes, getattr(norm, "feature_axes", norm.reduction_axes)
    if why is not None or reduced == features:
        return why
    is_same = {*flax_modules.each(reduced)} == {*flax_modules.each(features)}
    return None if is_same else f"feature_axes={features} are not reduction_axes={reduced}"


def _why_input(norm: Any) -> str | None:
    """Return the reason why a norm must save its input instead of its output, or None."""
    if norm.scale is None:
        return None
    stored = norm.scale, getattr(norm, "bias", None)
    return conversion.why_input([p.get_value() for p in stored if p is not None], norm.dtype)


def _called(
    norm: Any, flax_norm: Callable[..., Any], x: Any, mask: jax.Array | None, residual: Any
) -> Any:
    """Run a call of a norm. Return y or, with a residual, (y, h).

    `flax_norm` is the ``__call__`` of Flax's class, which runs calls that jaxnorm does not support.
    """
    normal, stored = x if residual is None else residual, _values(norm, "scale", "bias")
    promoted, *arrays = norm.promote_dtype((normal, *stored.values()), dtype=norm.dtype)
    why = flax_modules.why_flax(norm, [a.dtype for a in (promoted, *arrays)], mask)
    place = why or flax_modules.place_of(norm, promoted.shape)
    if isinstance(place, str):
        return flax_modules.by_flax(norm, functools.partial(flax_norm, mask=mask), x, residual)
    features = math.prod(place.parameter)
    if any(a.size != features for a in arrays):
        name = type(norm).__name__
        raise ValueError(
            f"{name}: x has shape {promoted.shape}, with {features} features on its axes "
            f"{place.axes}; expected {norm.num_features}, the module's num_features; make it "
            f"{name}({features}, ...)"
        )
    x = promoted if residual is None else x
    dtype = flax_modules.result_dtype(norm.dtype, promoted, *arrays)
    parameters = dict(zip(stored, arrays))
    return flax_modules.normalised(norm, place, x, residual, parameters, dtype)


def _values(module: Any, *names: str) -> dict[str, jax.Array]:
    """Return the arrays of the named parameters, without parameters that the module lacks."""
    parameters = {name: getattr(module, name, None) for name in names}
    return {name: parameter[...] for name, parameter in parameters.items() if parameter is not None}


def auto_remat[**P, T](f: Callable[P, T], *, budget: int | float | None = None) -> Callable[P, T]:
    """Return a function of modules with a derivative that saves as few arrays as possible.

    This function applies :func:`jaxnorm.auto_remat` to functions whose arguments contain nnx
    modules, as ``nnx.remat`` applies ``jax.checkpoint``. Updates of the modules' variables, such as
    batch statistics and the state of random numbers, are written back to the modules.

    Args:
      f: a function whose arguments contain modules, variables, ``nnx.Rngs``, arrays and other
        leaves; or a module; or a method of a module. If f is a module or a method of a module, the
        variables of this module are also differentiated.
      budget: None, a number of bytes per device, or a share, as for :func:`jaxnorm.auto_remat`.

    Returns:
      A function with the signature and the results of ``f``. Results may not contain modules.

    Raises:
      TypeError, ValueError: ``budget`` is not valid, as for :func:`jaxnorm.auto_remat`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxnorm.nnx
      >>> def loss(model, x):
      ...     return jnp.sum(jax.nn.silu(model(x)) ** 2)
      >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> nnx.grad(jaxnorm.nnx.auto_remat(loss))(model, jnp.ones((2, 4))).kernel.shape
      (4, 8)
    """
    of: Any = f
    bound: list[Any] = []
    if _is_module(f):
        of, bound = type(f).__call__, [f]
    elif _is_module(getattr(f, "__self__", None)):
        of, bound = of.__func__, [of.__self__]

    def of_state(graph: Any, state: Any, leaves: list[Any], tree: Any) -> tuple[T, Any]:
        modules = nnx.merge(graph, state)
        found = iter(modules)
        every = [next(found) if leaf is None else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, every)
        return of(*args, **kwargs), nnx.state(modules)

    remat = _auto_remat(of_state, budget=budget, static_argnums=3)

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        leaves, tree = jax.tree.flatten(((*bound, *args), kwargs), is_leaf=_is_module)
        modules = [leaf for leaf in leaves if _is_module(leaf)]
        graph, state = nnx.split(modules)
        rest = [None if _is_module(leaf) else leaf for leaf in leaves]
        results, state = remat(graph, state, rest, tree)
        nnx.update(modules, state)
        return results

    return run


def _is_module(value: Any) -> bool:
    """Return True for a module, a variable, or another object with variables, such as `Rngs`."""
    return isinstance(value, (nnx.Pytree, nnx.Variable))
