"""RMSNorm and the linear layer after it: rms_norm_linear, a composition.

Of these only the norm is a primitive, and this is what each keeps:

    n = rms_norm(x, scale)  its primitive           x and rstd
    z = n weight + bias     `products.product`      weight, and nothing to make n again of but those
    y = activation(z)       `products.activated`    z, rounded to y's dtype
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType

from jaxnorm.calls import backends
from jaxnorm.calls.call import Call
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks, products
from jaxnorm.operations.norm import norm_call
from jaxnorm.primitives import eager, remat, row_operations
from jaxnorm_kernels import launching
from jaxnorm_kernels.linear_spec import Activation, LinearSpec
from jaxnorm_kernels.specs import Name

NAME = "rms_norm_linear"

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    name: products.ACTIVATIONS[name] for name in get_args(Activation)
}


@overload
def rms_norm_linear(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    bias: checks.ArrayLike | None = None,
    residual: None = None,
    activation: Activation | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array: ...


@overload
def rms_norm_linear(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    bias: checks.ArrayLike | None = None,
    residual: checks.ArrayLike,
    activation: Activation | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@eager.compiled("x", "weight", "scale", "bias", "residual")
def rms_norm_linear(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    scale: checks.ArrayLike | None = None,
    *,
    bias: checks.ArrayLike | None = None,
    residual: checks.ArrayLike | None = None,
    activation: Activation | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: checks.DTypeLike | None = None,
    implementation: Name | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Root-mean-square normalisation and the linear layer after it.

    .. math::
      y = \mathrm{activation}(\mathrm{rms\_norm}(x, \mathrm{scale}) \, \mathrm{weight} +
      \mathrm{bias})

    The backward starts from x and a number for each row, and never keeps the normalised array: it
    is made again for weight's gradient. With an activation, it keeps what that is of, too.

    The product is of the dtype to which x and weight promote, or of ``dtype`` where that has fewer
    bits: the normalised array is rounded to it. Sums, bias and activation are float32 (float64
    where x, weight or the output is), and rounded once.

    Args:
      x: array (..., d) of any number of rows; bfloat16, float16, float32 or float64.
      weight: array (d, n), of these dtypes.
      scale: array (d,), of these dtypes. None multiplies by 1 (``scale_offset`` is then unused).
      bias: array (n,), of these dtypes. None adds nothing.
      residual: array of x's shape, of these dtypes: h = x + residual, in residual's dtype, is
        normalised in place of x, and returned.
      activation: ``"relu"``, ``"leaky_relu"``, ``"gelu"`` or ``"silu"``: that of :mod:`jax.nn` with
        its defaults (gelu is the approximation by tanh). None for none.
      epsilon: added to the mean square, at least 0.
      scale_offset: added to ``scale``; 1.0 for Gemma's ``1 + w``.
      dtype: dtype of y; by default that to which x and weight promote.
      implementation: None chooses, for the norm; the product is XLA's. ``"mosaic"`` is a kernel of
        both, a forward alone: its derivative is that of None. It is not partitioned over a mesh:
        call it inside `jax.shard_map`. See :func:`jaxnorm.implementation_for`.

    Returns:
      y, array (..., n) in ``dtype``; with a residual (y, h).

    Differentiable in reverse and forward mode, to any order; gradients have the dtypes of what they
    are of.

    On a mesh, rows and n may be split; a weight that is stored in shards of d (FSDP), or of n over
    axes that split x, is gathered. Where x's own last axis is split, its shards add up the product.

    Raises:
      TypeError: an array is not of a supported float dtype, or an option is of the wrong type.
      ValueError: the shape of an array, ``activation``, ``epsilon`` or ``implementation`` is wrong,
        or the implementation asked for cannot run this call.

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
    norm, spec = _call_of(x, others, activation, epsilon, scale_offset, dtype, implementation)
    if implementation is not None:
        backends.forced(NAME, spec, implementation)
    added = others.pop("residual", None)
    h = [] if added is None else [_sum(x, added)]
    operands = dict(zip(("x", *others), sharding.vary_alike([*(h or [x]), *others.values()])))
    with jax.named_scope(f"jaxnorm.{NAME}"):
        if implementation == "mosaic":
            _check_whole([*operands.values()])
            y = _by_kernel(norm, spec, tuple(operands), *operands.values())
        else:
            y = _composed(norm, spec, tuple(operands), *operands.values())
    return (y, h[0]) if h else y


def _sum(x: jax.Array, residual: jax.Array) -> jax.Array:
    """h = x + residual in residual's dtype, rounded once, under its name."""
    wide = checks.arithmetic_dtype(x.dtype, residual.dtype)
    residual = sharding.lie_alike(residual, x)
    x, other = sharding.vary_alike([x.astype(wide), residual.astype(wide)])
    h = remat.name_of_linear("h", (x + other).astype(residual.dtype))
    # Nothing, to XLA. But what a policy keeps by its name it would keep once more for each
    # `jax.checkpoint` that takes it; the result of this it makes again of what it keeps.
    info = jnp.finfo(h.dtype)
    return lax.reduce_precision(h, info.nexp, info.nmant)


def _call_of(
    x: jax.Array,
    others: dict[str, jax.Array],
    activation: Activation | None,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    implementation: Name | None,
) -> tuple[Call, LinearSpec]:
    """The norm, whose result the matmul takes, and the whole call, after the checks.

    `others`: weight, scale, bias, residual.
    """
    shape, weight = x.shape, others["weight"]
    dtypes = {name: a.dtype for name, a in others.items()}
    if not isinstance(activation, str | None) or activation not in (None, *_ACTIVATIONS):
        raise ValueError(
            f"{NAME}: activation={activation!r}; expected one of "
            f"{', '.join(map(repr, _ACTIVATIONS))}, or None; apply another one to the result"
        )
    checks.implementation(NAME, implementation)
    promoted = checks.product_dtype(x.dtype, weight.dtype)
    y_dtype = checks.output_dtype(NAME, dtype, promoted)
    spec = LinearSpec(
        rows=math.prod(shape[:-1]),
        cols=shape[-1],
        features=weight.shape[1],
        x_dtype=dtypes.get("residual", x.dtype),
        weight_dtype=weight.dtype,
        product_dtype=min(promoted, y_dtype, key=lambda dtype: dtype.itemsize),
        y_dtype=y_dtype,
        scale_dtype=dtypes.get("scale"),
        bias_dtype=dtypes.get("bias"),
        epsilon=checks.number(NAME, "epsilon", epsilon, minimum=0.0),
        scale_offset=checks.number(NAME, "scale_offset", scale_offset),
        activation=activation,
        precision=jax.config.jax_default_matmul_precision,
    )
    numbers = {"epsilon": spec.epsilon, "scale_offset": spec.scale_offset}
    checks.finite_in(NAME, spec.compute_dtype, numbers)
    norm = norm_call(
        "rms_norm",
        jax.ShapeDtypeStruct(shape, spec.x_dtype),
        {name: a for name, a in others.items() if name == "scale"},
        axis=-1,
        epsilon=spec.epsilon,
        scale_offset=spec.scale_offset,
        dtype=spec.product_dtype,
        save="input",
        implementation=None if implementation == "mosaic" else implementation,
    )
    # Another function's call: policies do not save its result (`remat.name`).
    norm = norm.replaced(function=NAME, primitives=norm.function)
    return norm, spec


def _check_shapes(shape: tuple[int, ...], others: dict[str, tuple[int, ...]]) -> None:
    checks.features(NAME, "x", shape, "d")
    weight = others["weight"]
    checks.weight(NAME, weight, shape)
    for name, expected, of in (
        ("scale", shape[-1:], f"element of the last axis of x {shape}"),
        ("bias", weight[1:], f"column of weight {weight}"),
    ):
        checks.vector(NAME, name, others.get(name, expected), expected, of)
    checks.same_shape(NAME, "residual", others.get("residual", shape), shape)


# ----------------------------------------------------------------------------- the composition


def _composed(
    norm: Call, spec: LinearSpec, names: tuple[str, ...], *arrays: jax.Array
) -> jax.Array:
    """y, of x, weight, scale and bias, those that `names` names."""
    operands = dict(zip(names, arrays))
    layout = products.layout_of(operands["x"], operands["weight"])
    for name in ("scale", "bias"):
        # They may be sharded for storage (FSDP), and are small; weight is gathered by the product.
        if layout is not None and name in operands:
            operands[name] = sharding.reshard(operands[name], layout.mesh, layout.spec(name))
    normalised = [operands[name] for name in ("x", "scale") if name in operands]
    # If nothing follows the matmul, it rounds its sums to y itself, in no pass of its own. Sums
    # over shards of x's columns are rounded before devices add them up, as in plain JAX: in float32
    # the devices would exchange twice the bytes.
    is_split = layout is not None and bool(layout.cols)
    is_alone = is_split or ("bias" not in operands and spec.activation is None)
    z = products.product(
        functools.partial(_normalised, norm),
        normalised,
        operands["weight"],
        dtype=spec.product_dtype,
        result=spec.y_dtype if is_alone else spec.compute_dtype,
        precision=spec.precision,
        weight_sharding=None if layout is None else layout.sharding("weight"),
        out_sharding=None if layout is None else layout.sharding("z"),
    )
    if "bias" in operands:
        bias = operands["bias"].astype(z.dtype)
        z = z + jnp.expand_dims(bias, range(z.ndim - 1))
    if spec.activation is None:
        return z.astype(spec.y_dtype)
    kept = remat.name_of_linear("z", z.astype(spec.y_dtype))
    return products.activated(_ACTIVATIONS[spec.activation], z, kept).astype(spec.y_dtype)


def _normalised(norm: Call, x: jax.Array, *scale: jax.Array) -> jax.Array:
    """The norm. x and its statistics are saved; the result has no name that a policy may save."""
    (n,) = row_operations.bind(norm, x, *scale)
    return n


# ------------------------------------------------------------------------- the kernel, by name


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _by_kernel(
    norm: Call, spec: LinearSpec, names: tuple[str, ...], *arrays: jax.Array
) -> jax.Array:
    """y by Mosaic's kernel of the norm and the matmul, with the derivative of `_composed`.

    ValueError when the call is lowered for a platform without the kernel.
    """
    return _kernel(spec, names)(*arrays)


@functools.partial(_by_kernel.defjvp, symbolic_zeros=True)
def _(
    norm: Call,
    spec: LinearSpec,
    names: tuple[str, ...],
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
) -> Any:
    _, dy = products.jvp(functools.partial(_composed, norm, spec, names), primals, tangents)
    return _by_kernel(norm, spec, names, *primals), dy


def _kernel(spec: LinearSpec, names: tuple[str, ...]) -> Callable[..., jax.Array]:
    """The kernel: a batch of x is more rows, one of parameters a loop."""
    from jaxnorm_kernels import mosaic

    @custom_vmap
    def run(*arrays: jax.Array) -> jax.Array:
        operands = dict(zip(names, map(launching.own_buffer, arrays)))
        x, weight = _placed.bind(operands["x"]), operands["weight"]
        *lead, cols = x.shape
        rows = dataclasses.replace(spec, rows=math.prod(lead))
        y = mosaic.rms_norm_linear_fwd(
            x.reshape(rows.rows, cols), weight, operands.get("scale"), operands.get("bias"), rows
        )
        return launching.own_buffer(y).reshape(*lead, weight.shape[1])

    @run.def_vmap
    def _(size: int, is_batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        del size
        if not any(is_batched[1:]):
            return run(*arrays), True
        batched = [a for a, is_one in zip(arrays, is_batched) if is_one]

        def one(batch: list[jax.Array]) -> jax.Array:
            rest = iter(batch)
            return run(*[next(rest) if is_one else a for a, is_one in zip(arrays, is_batched)])

        return lax.map(one, batched), True

    return run


def _lower(ctx: Any, x: Any) -> list[Any]:
    """Return x. The platform of a program is known when it is lowered, and not before."""
    backends.placed(NAME, "mosaic", ctx.platforms or ctx.module_context.platforms)
    return [x]


def _run(x: jax.Array) -> jax.Array:
    backends.placed(NAME, "mosaic", (backends.local_platform(),))
    return x


# x, on a platform that has the kernel; ValueError on another. Inside a `custom_vmap`, and a
# `custom_jvp`: it meets no transformation.
_placed = Primitive("jaxnorm.placed")
_placed.def_abstract_eval(lambda x: x)
_placed.def_impl(_run)
mlir.register_lowering(_placed, _lower)


def _check_whole(arrays: Sequence[jax.Array]) -> None:
    """ValueError where arrays may be spread over devices: the kernel is not partitioned."""
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
