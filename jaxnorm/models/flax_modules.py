"""Code that the linen and the nnx modules share. It imports neither linen nor nnx.

Import this module before Flax: if Flax is not installed, it raises an error with the command that
installs it.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.operations import checks
from jaxnorm.operations.norm_linear import rms_norm_linear
from jaxnorm.operations.softmax import filled_softmax
from jaxnorm_kernels.specs import FLOAT_DTYPES, LinearActivation, Name, NormActivation, Save

if importlib.util.find_spec("flax") is None:
    raise ImportError(
        "jaxnorm.linen and jaxnorm.nnx need Flax, which is not installed; "
        'install it, from a checkout of jaxnorm, with: pip install -e ".[flax]"'
    )

Axes = int | Sequence[int]

# A function that chooses the `save` mode of a norm. It takes the norm's parameters and the dtype of
# its output. A value of None in place of the function means that the norm module's own `save` mode
# applies.
Judged = Callable[[Mapping[str, Any], np.dtype], Save] | None


class Added(NamedTuple):
    """The fields that jaxnorm's norm modules have and Flax's norm modules do not have."""

    save: Save
    implementation: Name | None
    scale_offset: float = 0.0


def shared_axes(
    module: str, reduction_axes: Axes, feature_axes: Axes, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the axes to normalise; None if the axes of the parameters differ from them."""

    def covered(axes: Axes) -> tuple[int, ...]:
        each = axes if isinstance(axes, Sequence) else (axes,)
        return tuple(sorted({checks.axes(module, a, shape)[0] for a in each}))

    reduced = covered(reduction_axes)
    return reduced if reduced == covered(feature_axes) else None


class Groups(NamedTuple):
    """The shape and the axes with which a GroupNorm is computed as a LayerNorm.

    Attributes:
      shape: x's shape, but the last axis (channels) is split into two: the groups, and the channels
        of a group.
      axes: the axes of this shape that are normalised.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def of_parameter(self, parameter: Any) -> Any:
        """Reshape a parameter (channels,) to (groups, 1, ..., 1, channels per group)."""
        if parameter is None:
            return None
        *_, groups, size = self.shape
        return jnp.reshape(parameter, (groups, *[1] * (len(self.axes) - 1), size))


def groups_of(module: Any, shape: tuple[int, ...], count: int) -> Groups | None:
    """Return the `Groups` of a GroupNorm with `count` groups.

    The result is None if Flax would raise an error for the call.
    """
    *others, channels = shape or (0,)
    axes = module.reduction_axes
    axes = (*range(1, len(others)), -1) if axes is None else axes
    last = len(others)
    reduced = checks.axes(type(module).__name__, axes, shape)
    if count <= 0 or channels % count or reduced[-1] != last:
        return None
    return Groups((*others, count, channels // count), (*reduced[:-1], last + 1))


def why_flax(norm: Any, dtypes: Iterable[Any], mask: Any = None) -> str | None:
    """Return the reason why a norm runs Flax's code, or None.

    Axes are not examined here. `dtypes` are the dtypes of its operands and results, or None.
    """
    names = [jnp.dtype(dtype).name for dtype in dtypes if dtype is not None]
    reasons = {
        "a mask": mask is not None,
        f"axis_name={norm.axis_name!r}": norm.axis_name is not None,
        "force_float32_reductions=False": not getattr(norm, "force_float32_reductions", True),
        f"dtypes {', '.join(names)}": not is_supported(*names),
    }
    return next((why for why, applies in reasons.items() if applies), None)


def normalised(
    dtypes: Any,
    norm: Any,
    place: tuple[int, ...] | Groups,
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    x: Any,
    parameters: Mapping[str, Any],
    summands: tuple[Any, Any] | None = None,
    added: Added | None = None,
    judged: Judged = None,
) -> Any:
    """Run a norm module with jaxnorm's functions. Return y or, with a residual, (y, h).

    Args:
      dtypes: the Python module `dtypes` of linen or of nnx. It has Flax's rule for the output's
        dtype: the norm's dtype or, if that is None, the common dtype of x and the parameters.
      norm: the norm module.
      place: the axes to normalise, or the `Groups` of a GroupNorm.
      functions: the functions for calls without and with a residual.
      x: the array that is normalised, or the residual.
      parameters: the arguments ``scale`` and ``bias`` of the functions.
      summands: the two arrays whose sum is normalised, or None.
      added: the values of the fields that Flax's norm modules do not have; by default, the values
        of the fields of `norm`, a module of jaxnorm.
      judged: a function that chooses the `save` mode. None to use the mode `added.save`.
    """
    groups = place if isinstance(place, Groups) else None
    dtype = dtypes.canonicalize_dtype(x, *parameters.values(), dtype=norm.dtype)
    options = {
        "axis": groups.axes if groups else place,
        "epsilon": norm.epsilon,
        "dtype": jax.dtypes.canonicalize_dtype(dtype),
        **(added or Added(norm.save, norm.implementation, norm.scale_offset))._asdict(),
    }
    if judged is not None:
        options["save"] = judged(parameters, options["dtype"])
    if groups:
        options |= {name: groups.of_parameter(a) for name, a in parameters.items()}
        options["activation"] = getattr(norm, "activation", None)
        return functions[0](jnp.reshape(x, groups.shape), **options).reshape(x.shape)
    if summands is None:
        return functions[0](x, **parameters, **options)
    return functions[1](*summands, **parameters, **options)


def norm_and_dense(
    dtypes: Any,
    module: Any,
    parameters: Mapping[str, Any],
    x: Any,
    residual: Any,
    activation: LinearActivation | None,
    dtype: Any,
) -> Any:
    """Run RMSNormDense. Return y or, with a residual, (y, h).

    `module` has the fields of the norm. The matmul and its result have the same dtype as in Flax's
    Dense (linen) or Linear (nnx) after a norm.
    """
    normalised = x if residual is None else residual
    promoted = dtypes.canonicalize_dtype(normalised, *parameters.values(), dtype=dtype)
    promoted = jax.dtypes.canonicalize_dtype(promoted)
    return rms_norm_linear(
        x,
        parameters["kernel"].astype(promoted),
        parameters.get("scale"),
        bias=parameters.get("bias"),
        residual=residual,
        activation=activation,
        epsilon=module.epsilon,
        scale_offset=module.scale_offset,
        dtype=promoted,
        implementation=module.implementation,
    )


def by_flax(module: Any, norm: Callable[[Any], Any], x: Any, residual: Any = None) -> Any:
    """Return a norm's result y or, with a residual, (y, h). Flax's code `norm` computes the norm.

    h = x + residual has the residual's dtype, and y is norm(h). An activation of the module is
    applied to y. Flax's norms support no scale_offset: ValueError is raised if the module has one.
    """
    name = type(module).__name__
    if module.scale_offset:
        raise ValueError(
            f"{name}: scale_offset={module.scale_offset} in a call that is left to Flax's own code "
            f"(see jaxnorm's {name}), which adds no offset; leave out what leaves the call to "
            "Flax, or add the offset to the parameter"
        )
    if residual is not None:
        h = (jnp.asarray(x) + residual).astype(jnp.result_type(residual))
        return norm(h), h
    y, activation = norm(x), getattr(module, "activation", None)
    checks.one_of(name, "activation", activation, (None, *get_args(NormActivation)))
    return y if activation is None else getattr(jax.nn, activation)(y)


# --------------------------------------------------------------------------------------- attention


#: A function that applies dropout to attention weights, given the dtype of the computation.
Dropout = Callable[[jax.Array, np.dtype], jax.Array]


def dropout(
    rng: jax.Array | None, rate: float, broadcast: bool, deterministic: bool
) -> Dropout | None:
    """Check Flax's four dropout arguments. Return a `Dropout`, or None for no dropout.

    With `broadcast`, all batch elements and heads share one mask.
    """
    if deterministic or rate == 0.0:
        return None
    if not 0.0 < rate < 1.0:
        raise ValueError(f"dot_product_attention: dropout_rate={rate!r}; expected 0 <= rate < 1")
    if rng is None:
        raise ValueError(
            "dot_product_attention: dropout_rate > 0 and deterministic=False need a dropout_rng"
        )

    def dropped(weights: jax.Array, dtype: np.dtype) -> jax.Array:
        """Multiply each weight by 0 or by 1 / (1 - rate), which is rounded to `dtype`."""
        batch = (1,) * (weights.ndim - 2) if broadcast else weights.shape[:-2]
        keep = jax.random.bernoulli(rng, 1.0 - rate, batch + weights.shape[-2:])
        return weights * (keep.astype(dtype) / jnp.asarray(1.0 - rate, dtype=dtype))

    return dropped


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    weigh: Callable[..., jax.Array],
    einsum: Callable[..., jax.Array],
    sow: Callable[[jax.Array], object] | None,
    dropout: Dropout | None,
) -> jax.Array:
    """Return dot-product attention over ``(batch..., length, heads, depth)``.

    Args:
      query, key, value: arrays of the same dtype, whose shapes `check_shapes` has accepted.
      bias, mask: arrays that broadcast to ``(batch..., heads, q_length, kv_length)``, or None.
      weigh: function of query, key, bias and mask that returns the attention weights.
      einsum: function with the arguments of `jnp.einsum`, for the matmul of weights and values.
      sow: function that is called with the weights before dropout, or None.
      dropout: dropout of the weights, or None.
    """
    weights = weigh(query, key, bias, mask)
    if sow is not None:
        sow(weights)
    if dropout is not None:
        weights = dropout(weights, query.dtype)
    heads, groups = query.shape[-2], value.shape[-2]
    if heads == groups:
        return einsum("...hqk,...khd->...qhd", weights, value)
    # In grouped-query attention, several heads of the query share a head of the values.
    batch, lengths = weights.shape[:-3], weights.shape[-2:]
    split = weights.reshape(*batch, groups, heads // groups, *lengths)
    out = einsum("...hgqk,...khd->...qhgd", split, value)
    return out.reshape(*out.shape[:-3], heads, out.shape[-1])


def check_shapes(query: jax.Array, key: jax.Array, value: jax.Array, *, groups: bool) -> None:
    """Raise ValueError unless the shapes fit together.

    With `groups`, the key and the value may have fewer heads than the query.
    """
    shapes = [a.shape for a in (query, key, value)]
    expected = None
    if len({len(shape) for shape in shapes}) > 1 or query.ndim < 3:
        expected = "three arrays (batch..., length, heads, depth) of equal rank"
    elif len({shape[:-3] for shape in shapes}) > 1:
        expected = "equal batch axes"
    elif key.shape[-3] != value.shape[-3]:
        expected = "key and value of equal length (axis -3)"
    elif query.shape[-1] != key.shape[-1]:
        expected = "query and key of equal depth (axis -1)"
    elif not groups and len({shape[-2] for shape in shapes}) > 1:
        expected = "equal numbers of heads (axis -2)"
    elif any(query.shape[-2] % shape[-2] for shape in shapes):
        expected = "numbers of heads (axis -2) of key and value that divide query's"
    if expected is not None:
        got = "query {}, key {}, value {}".format(*shapes)
        raise ValueError(f"dot_product_attention: got {got}; expected {expected}")


def masked_softmax(
    logits: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    fill: float,
    dtype: np.dtype,
) -> jax.Array:
    """Return the softmax of logits ``(batch..., heads, q_length, kv_length)`` over the last axis.

    `bias` is added to the logits, and `fill` replaces logits where `mask` is False. The result has
    the dtype `dtype`. Plain JAX computes it for inputs that kernels do not support: complex and
    8-bit logits, an integer bias, and a bias or a mask that is larger than the logits.
    """
    supported = is_supported(logits.dtype, dtype)
    if bias is not None and not (supported and fits(bias, logits.shape, FLOAT_DTYPES)):
        logits, bias = logits + bias, None
        supported = is_supported(logits.dtype, dtype)
    if mask is not None and not (supported and fits(mask, logits.shape)):
        logits, mask = jnp.where(mask, logits, fill), None
    if not supported:
        wide = jnp.promote_types(logits.dtype, dtype)
        return jax.nn.softmax(logits.astype(wide)).astype(dtype)
    where = None if mask is None else jnp.asarray(mask, bool)
    return filled_softmax(logits, where, bias, fill=fill, dtype=dtype)


def is_supported(*dtypes: jax.typing.DTypeLike) -> bool:
    """Return True if all of the dtypes are supported by jaxnorm's functions."""
    return all(np.dtype(dtype).name in FLOAT_DTYPES for dtype in dtypes)


def fits(
    a: jax.Array | None, shape: tuple[int, ...], dtypes: Collection[str] | None = None
) -> bool:
    """Return True if `a` is None, or broadcasts to `shape` and has one of `dtypes`.

    If `dtypes` is None, any dtype is allowed.
    """
    return a is None or (
        jnp.broadcast_shapes(a.shape, shape) == shape and (dtypes is None or a.dtype.name in dtypes)
    )
