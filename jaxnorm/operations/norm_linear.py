"""rms_norm_linear: RMSNorm and the linear layer after it.

The function is composed of three steps, of which only the norm is a primitive::

    step                    function                saved for the backward pass
    n = rms_norm(x, scale)  the norm's primitive    x and rstd
    z = n @ weight + bias   `products.product`      weight; n is recomputed from x and rstd
    y = activation(z)       `products.activated`    z, rounded to y's dtype

rstd is an array with one number for each row: 1 / sqrt(mean(x^2) + epsilon).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.sharding import AxisType

from jaxnorm.calls import backends
from jaxnorm.calls.call import Call
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks, products
from jaxnorm.operations.checks import ArrayLike, DTypeLike
from jaxnorm.operations.norm import norm_call
from jaxnorm.primitives import eager, remat, row_operations, rules
from jaxnorm_kernels import launching
from jaxnorm_kernels.specs import Activation, Name, NormOptions

NAME = "rms_norm_linear"

# There was a Triton kernel that fused the norm and the matmul. It was removed, because XLA's code
# for the two steps was faster in every timing (docs/linear.md).
_NO_TRITON = "it has no kernel for a norm and a matmul: XLA's code for them was always faster"


class _Linear(NamedTuple):
    """The static description of the linear layer.

    Attributes:
      dtype: dtype of the matmul's operands.
      wide: dtype in which sums, bias and activation are computed.
      y_dtype: dtype of y, to which the result is rounded once.
      activation: name of a function of `jax.nn`, used with its defaults; None for no activation.
      precision: value of ``jax.default_matmul_precision`` when the user called the function.
    """

    dtype: np.dtype
    wide: np.dtype
    y_dtype: np.dtype
    activation: Activation | None
    precision: str | None


@overload
def rms_norm_linear(
    x: ArrayLike,
    weight: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: None = None,
    activation: Activation | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array: ...


@overload
def rms_norm_linear(
    x: ArrayLike,
    weight: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike,
    activation: Activation | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@eager.compiled("x", "weight", "scale", "bias", "residual")
def rms_norm_linear(
    x: ArrayLike,
    weight: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Root-mean-square normalisation and the linear layer after it.

    .. math::
      y = \mathrm{activation}(\mathrm{rms\_norm}(x, \mathrm{scale}) \, \mathrm{weight} +
      \mathrm{bias})

    For the backward pass, x, weight and one number for each row are saved. The normalised array is
    never saved: the backward pass recomputes it for weight's gradient. With an activation, the
    activation's input is also saved.

    The two operands of the matmul (the normalised array and weight) are cast to the promoted dtype
    of x and weight, or to ``dtype`` if ``dtype`` has fewer bits. Sums, bias and activation are
    computed in float32 (float64 if the norm's input, the matmul's operands or the output is
    float64), and the result is rounded once.

    Args:
      x: array (..., d) with any number of rows; bfloat16, float16, float32 or float64.
      weight: array (d, n); any of these dtypes.
      scale: array (d,); any of these dtypes. None for no scale (``scale_offset`` is then unused).
      bias: array (n,); any of these dtypes. None for no bias.
      residual: array of x's shape; any of these dtypes; or None. If it is given, the function
        computes ``h = x + residual`` in residual's dtype. It normalises h instead of x, and also
        returns h.
      activation: ``"silu"``, ``"gelu"``, ``"relu"``, ``"leaky_relu"`` or ``"sigmoid"``: the
        function of :mod:`jax.nn` with its defaults (gelu is the tanh approximation). None for no
        activation.
      epsilon: added to the mean square, at least 0.
      scale_offset: added to ``scale``; 1.0 for Gemma's ``1 + w``.
      dtype: dtype of y; by default, the dtype to which x and weight promote.
      implementation: with None, jaxnorm chooses an implementation of the norm, and XLA computes the
        matmul. With ``"mosaic"``, one kernel computes the norm and the matmul of the forward pass.
        The derivative is the same as with None. The kernel is not partitioned over a mesh, so call
        it inside `jax.shard_map`. See :func:`jaxnorm.implementation_for`.

    Returns:
      y, array (..., n) in ``dtype``; with ``residual``, the pair (y, h).

    Differentiable in reverse and forward mode, to any order; gradients have the dtypes of their
    arguments.

    On a mesh, the rows and the axes d and n may be sharded. If x's axis d is sharded, the partial
    sums of the matmul are all-reduced. Weight is gathered if its axis d is sharded differently from
    x's axis d. It is also gathered if its axis n is sharded over mesh axes that also shard x. Both
    cases occur with FSDP.

    Raises:
      TypeError: an array does not have a supported float dtype; an option has the wrong type.
      ValueError: the shape of an array is wrong; ``activation``, ``epsilon`` or ``implementation``
        is wrong; the requested implementation cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxnorm
      >>> x, weight = jnp.ones((8, 512), jnp.bfloat16), jnp.zeros((512, 2048), jnp.bfloat16)
      >>> jaxnorm.rms_norm_linear(x, weight, jnp.ones(512), activation="silu").shape
      (8, 2048)
      >>> y, h = jaxnorm.rms_norm_linear(x, weight, jnp.ones(512), residual=x)
      >>> y.shape, h.shape
      ((8, 2048), (8, 512))
    """
    x = checks.float_array(NAME, "x", x)
    others = {"weight": checks.float_array(NAME, "weight", weight)}
    for name, array in (("scale", scale), ("bias", bias), ("residual", residual)):
        if array is not None:
            others[name] = checks.float_array(NAME, name, array)
    _check_shapes(x.shape, {name: a.shape for name, a in others.items()})
    norm, layer = _call_of(x, others, activation, epsilon, scale_offset, dtype, implementation)
    added = others.pop("residual", None)
    h = [] if added is None else [_sum(x, added)]
    operands = dict(zip(("x", *others), sharding.vary_alike([*(h or [x]), *others.values()])))
    with jax.named_scope(f"jaxnorm.{NAME}"):
        if implementation == "mosaic":
            _check_whole([*operands.values()])
            y = _by_kernel(norm, layer, tuple(operands), *operands.values())
        else:
            y = _composed(norm, layer, tuple(operands), *operands.values())
    return (y, h[0]) if h else y


def _sum(x: jax.Array, residual: jax.Array) -> jax.Array:
    """Return ``h = x + residual``, rounded once to residual's dtype.

    h gets a name, to which `jax.checkpoint` policies can refer.
    """
    wide = checks.arithmetic_dtype(x.dtype, residual.dtype)
    residual = sharding.lie_alike(residual, x)
    x, other = sharding.vary_alike([x.astype(wide), residual.astype(wide)])
    h = remat.name_of_linear("h", (x + other).astype(residual.dtype))
    # Do not return the named h itself: a `jax.checkpoint` policy may save it, and the result of
    # this function may be an argument of a later `jax.checkpoint`. JAX saves arguments, so it would
    # save h twice. If the result is another array, computed from h, JAX recomputes it from the
    # saved h. So apply an operation that changes no value: reduce_precision rounds h to h's own
    # dtype. XLA removes this operation.
    info = jnp.finfo(h.dtype)
    return lax.reduce_precision(h, info.nexp, info.nmant)


def _call_of(
    x: jax.Array,
    others: dict[str, jax.Array],
    activation: Activation | None,
    epsilon: float,
    scale_offset: float,
    dtype: DTypeLike | None,
    implementation: Name | None,
) -> tuple[Call, _Linear]:
    """Check the options; return the norm's call, and the description of the linear layer.

    `others` is a dict from names to arrays. It has weight and, if the user has passed them, scale,
    bias and residual.
    """
    shape, weight = x.shape, others["weight"]
    names = [*products.ACTIVATIONS]
    if not isinstance(activation, str | None) or activation not in (None, *names):
        raise ValueError(
            f"{NAME}: activation={activation!r}; expected one of "
            f"{', '.join(map(repr, names))}, or None; apply another one to the result"
        )
    checks.implementation(NAME, implementation)
    promoted = checks.product_dtype(x.dtype, weight.dtype)
    y_dtype = checks.output_dtype(NAME, dtype, promoted)
    product_dtype = min(promoted, y_dtype, key=lambda dtype: dtype.itemsize)
    h = others.get("residual", x)
    wide = checks.arithmetic_dtype(h.dtype, product_dtype, y_dtype)
    epsilon = checks.number(NAME, "epsilon", epsilon, minimum=0.0)
    scale_offset = checks.number(NAME, "scale_offset", scale_offset)
    checks.finite_in(NAME, wide, {"epsilon": epsilon, "scale_offset": scale_offset})
    layer = _Linear(
        product_dtype, wide, y_dtype, activation, jax.config.jax_default_matmul_precision
    )
    if implementation in ("mosaic", "triton"):
        refusal: str | None = _NO_TRITON
        if implementation == "mosaic":
            from jaxnorm_kernels.mosaic import linear

            sizes = math.prod(shape[:-1]), shape[-1], weight.shape[1]
            arrays = {"x": h, **{n: a for n, a in others.items() if n != "residual"}}
            dtypes = {"y": y_dtype, **{name: a.dtype for name, a in arrays.items()}}
            refusal = linear.why_unsupported(sizes, layer.dtype, dtypes, layer.precision)
        backends.refuse(NAME, implementation, "fwd", (math.prod(shape[:-1]), shape[-1]), refusal)
    norm = norm_call(
        "rms_norm",
        NormOptions(epsilon=epsilon, scale_offset=scale_offset, saved="input"),
        jax.ShapeDtypeStruct(shape, h.dtype),
        {name: a for name, a in others.items() if name == "scale"},
        -1,
        layer.dtype,
        None if implementation == "mosaic" else implementation,
    )
    # With `primitives` set, the norm counts as a step of another function, so its output gets no
    # name for `jax.checkpoint` policies (see `remat.names`).
    return norm.replaced(function=NAME, primitives=norm.function), layer


def _check_shapes(shape: tuple[int, ...], others: dict[str, tuple[int, ...]]) -> None:
    checks.features(NAME, "x", shape, "d")
    weight = others["weight"]
    checks.weight(NAME, weight, shape)
    for name, expected, why in (
        ("scale", shape[-1:], f"a number for each element of the last axis of x {shape}"),
        ("bias", weight[1:], f"a number for each column of weight {weight}"),
        ("residual", shape, "the shape of x"),
    ):
        checks.same_shape(NAME, name, others.get(name, expected), expected, why)


# ----------------------------------------------------------------------------- the composition


def _composed(norm: Call, layer: _Linear, names: tuple[str, ...], *arrays: jax.Array) -> jax.Array:
    """Return y, computed in the three steps that the module's docstring lists.

    `names` are the names of `arrays`: x, weight and, if the user has passed them, scale and bias.
    """
    operands = dict(zip(names, arrays))
    layout = products.layout_of(operands["x"], operands["weight"])
    for name in ("scale", "bias"):
        # Gather scale and bias here if FSDP has sharded them: they are small. `products.product`
        # gathers weight.
        if layout is not None and name in operands:
            operands[name] = sharding.reshard(operands[name], layout.mesh, layout.spec(name))
    normalised = [operands[name] for name in ("x", "scale") if name in operands]
    # If no bias or activation follows, the matmul itself rounds its sums to y's dtype. This avoids
    # a separate pass over memory.
    #
    # If x's last axis is sharded, the matmul computes partial sums on each device, and an
    # all-reduce adds them. As in plain JAX, the partial sums are rounded before the all-reduce:
    # float32 sums have twice the bytes of 16-bit sums.
    is_split = layout is not None and bool(layout.cols)
    is_alone = is_split or ("bias" not in operands and layer.activation is None)
    z = products.product(
        functools.partial(_normalised, norm),
        normalised,
        operands["weight"],
        dtype=layer.dtype,
        result=layer.y_dtype if is_alone else layer.wide,
        precision=layer.precision,
        weight_sharding=None if layout is None else layout.sharding("weight"),
        out_sharding=None if layout is None else layout.sharding("z"),
    )
    if "bias" in operands:
        bias = operands["bias"].astype(z.dtype)
        z = z + jnp.expand_dims(bias, range(z.ndim - 1))
    if layer.activation is None:
        return z.astype(layer.y_dtype)
    rounded = remat.name_of_linear("z", z.astype(layer.y_dtype))
    activation = products.ACTIVATIONS[layer.activation]
    return products.activated(activation, z, rounded).astype(layer.y_dtype)


def _normalised(norm: Call, x: jax.Array, *scale: jax.Array) -> jax.Array:
    """Return the norm of x. The residuals are x and the row statistics.

    The result has no name, so a `jax.checkpoint` policy cannot save it.
    """
    (n,) = row_operations.bind(norm, x, *scale)
    return n


# --------------------------------------------------------------------------- the Mosaic kernel


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _by_kernel(norm: Call, layer: _Linear, names: tuple[str, ...], *arrays: jax.Array) -> jax.Array:
    """Return y, computed by the Mosaic kernel that fuses the norm and the matmul.

    This function is used only if the user requests the implementation "mosaic". Its derivative is
    the derivative of `_composed`. Lowering the function for a platform without the kernel raises
    ValueError.
    """
    return _kernel(norm, layer, names)(*arrays)


@functools.partial(_by_kernel.defjvp, symbolic_zeros=True)
def _(
    norm: Call,
    layer: _Linear,
    names: tuple[str, ...],
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
) -> Any:
    _, dy = rules.jvp(functools.partial(_composed, norm, layer, names), primals, tangents)
    return _by_kernel(norm, layer, names, *primals), dy


def _kernel(norm: Call, layer: _Linear, names: tuple[str, ...]) -> Callable[..., jax.Array]:
    """Return a function that runs the Mosaic kernel of the norm and the matmul.

    Under `jax.vmap`, a loop runs the kernel for one batch element at a time.
    """
    from jaxnorm_kernels import mosaic

    def kernel(*arrays: jax.Array) -> jax.Array:
        operands = dict(zip(names, map(launching.own_buffer, arrays)))
        x, weight = operands["x"], operands["weight"]
        y = mosaic.rms_norm_linear_fwd(
            x.reshape(-1, x.shape[-1]),
            weight,
            operands.get("scale"),
            operands.get("bias"),
            dtype=layer.y_dtype,
            epsilon=norm.spec.norm.epsilon,
            scale_offset=norm.spec.norm.scale_offset,
            activation=layer.activation,
        )
        y = launching.own_buffer(y).reshape(*x.shape[:-1], weight.shape[1])
        # Inside `jax.shard_map`, an array's type says over which mesh axes the array varies. The
        # type of a kernel's result has no such axes, so cast the result to vary over the same axes
        # as x.
        return sharding.vary_alike([y, x])[0]

    # The branch for platforms without Mosaic kernels. Its norm has ``implementation="mosaic"``, so
    # that lowering this branch raises jaxnorm's usual ValueError.
    refused = functools.partial(_composed, norm.replaced(implementation="mosaic"), layer, names)
    platforms = mosaic.IMPLEMENTATION.platforms() or ()
    if jax.config.jax_disable_jit:
        backends.check_platforms(NAME, "mosaic", (backends.local_platform(),))
    # Trace one branch for each platform. JAX chooses among them when the call is lowered, because
    # the platform is unknown until then.
    branches = dict.fromkeys(platforms, kernel)
    return sequential_vmap(functools.partial(lax.platform_dependent, **branches, default=refused))


def _check_whole(arrays: Sequence[jax.Array]) -> None:
    """Raise ValueError if the arrays may be sharded over devices.

    The kernel has no partitioning rule, so all its arrays must be on one device. Inside
    `jax.shard_map`, they are, because they are the shards of one device.
    """
    mesh = sharding.mesh_of([jax.typeof(a) for a in arrays])
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    spread = {
        axis: mesh.shape[axis]
        for axis, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind != AxisType.Manual and mesh.shape[axis] > 1
    }
    if spread:
        raise ValueError(
            f"{NAME}: implementation='mosaic' is a kernel of whole "
            f"arrays, and the arrays lie on a mesh with axes {spread}; expected one device, or "
            "shards; call it inside jax.shard_map over these axes, or leave implementation out"
        )
