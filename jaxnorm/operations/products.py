"""Matrix products with what precedes and follows them, as compositions: rms_norm_linear.

Nothing here is a primitive. A norm has its rules; `product` and `activated` are a `jax.custom_jvp`
each, whose rule says what is kept, and in which dtype cotangents are, by `jax.checkpoint`:

    h = f(x)                the norm                     keeps x and rstd
    z = h weight + bias     `product`                    keeps x and weight, and makes h again
    y = activation(z)       `activated`                  keeps z, rounded to y's dtype

So forward mode, `jax.vmap`, meshes and policies of rematerialisation are JAX's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxnorm.calls import backends
from jaxnorm.calls.call import Call
from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.operations.norm import norm_call
from jaxnorm.primitives import eager, remat, row_operations
from jaxnorm_kernels.specs import Activation, LinearSpec, Name

Function = Literal["rms_norm_linear"]
NAME: Function = "rms_norm_linear"

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}
assert {*_ACTIVATIONS} == {*get_args(Activation)}


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
    y, *h = _rms_norm_linear(
        x,
        weight,
        scale,
        bias,
        residual,
        activation,
        epsilon,
        scale_offset,
        dtype,
        implementation,
        jax.config.jax_default_matmul_precision,
    )
    return (y, h[0]) if h else y


def _rms_norm_linear_of(
    x: checks.ArrayLike,
    weight: checks.ArrayLike,
    scale: checks.ArrayLike | None,
    bias: checks.ArrayLike | None,
    residual: checks.ArrayLike | None,
    activation: Activation | None,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    implementation: Name | None,
    precision: str | None,
) -> list[jax.Array]:
    x = checks.float_array(NAME, "x", x)
    others = {"weight": checks.float_array(NAME, "weight", weight)}
    for name, array in (("scale", scale), ("bias", bias), ("residual", residual)):
        if array is not None:
            others[name] = checks.float_array(NAME, name, array)
    call = linear_call(
        x.shape,
        x.dtype,
        {name: (a.shape, a.dtype) for name, a in others.items()},
        activation=activation,
        epsilon=epsilon,
        scale_offset=scale_offset,
        dtype=dtype,
        implementation=implementation,
        precision=precision,
    )
    if implementation is not None:
        backends.forced(call, implementation)
    added = others.pop("residual", None)
    h = [] if added is None else [_sum(x, added)]
    operands = dict(zip(("x", *others), sharding.vary_alike([*(h or [x]), *others.values()])))
    with jax.named_scope(f"jaxnorm.{NAME}"):
        if implementation == "mosaic":
            _check_whole(call, operands)
            return [_by_kernel(call, tuple(operands), *operands.values()), *h]
        return [_composed(call, tuple(operands), *operands.values()), *h]


_rms_norm_linear = eager.compiled(_rms_norm_linear_of, name=NAME, arrays=range(5))


def _sum(x: jax.Array, residual: jax.Array) -> jax.Array:
    """h = x + residual in residual's dtype, rounded once, under its name."""
    is_wide = "float64" in (x.dtype.name, residual.dtype.name)
    wide = np.float64 if is_wide else np.float32
    residual = sharding.lie_alike(residual, x)
    x, other = sharding.vary_alike([x.astype(wide), residual.astype(wide)])
    h = remat.name_of_linear("h", (x + other).astype(residual.dtype))
    # Nothing, to XLA. But what a policy keeps by its name it would keep once more for each
    # `jax.checkpoint` that takes it; the result of this it makes again of what it keeps.
    info = jnp.finfo(h.dtype)
    return lax.reduce_precision(h, info.nexp, info.nmant)


# ----------------------------------------------------------------------------- what a call is


@dataclasses.dataclass(frozen=True)
class Linear:
    """The static part of a call.

    Attributes:
      norm: the norm of x, or of h, whose result is the product's operand.
      spec: the whole call, as a kernel of it sees it.
    """

    function: ClassVar[Function] = NAME

    norm: Call
    spec: LinearSpec
    implementation: Name | None

    def as_seen_by(self, name: str) -> LinearSpec:
        """The spec that the implementation `name` gets."""
        del name
        return self.spec


def linear_call(
    shape: tuple[int, ...],
    x_dtype: np.dtype,
    others: dict[str, tuple[tuple[int, ...], np.dtype]],
    *,
    activation: Activation | None,
    epsilon: float,
    scale_offset: float,
    dtype: checks.DTypeLike | None,
    implementation: Name | None,
    precision: str | None,
) -> Linear:
    """A call with these arguments, after the checks.

    `others`: shape and dtype of weight, scale, bias and residual, those that there are.
    """
    shapes = {name: its_shape for name, (its_shape, _) in others.items()}
    dtypes = {name: its_dtype for name, (_, its_dtype) in others.items()}
    _check_shapes(shape, shapes)
    if activation is not None and activation not in _ACTIVATIONS:
        raise ValueError(
            f"{NAME}: activation={activation!r}; expected one of "
            f"{', '.join(map(repr, _ACTIVATIONS))}, or None; apply another one to the result"
        )
    checks.implementation(NAME, implementation)
    promoted = checks.product_dtype(x_dtype, dtypes["weight"])
    y_dtype = checks.output_dtype(NAME, dtype, promoted)
    spec = LinearSpec(
        rows=math.prod(shape[:-1]),
        cols=shape[-1],
        features=shapes["weight"][1],
        x_dtype=dtypes.get("residual", x_dtype),
        weight_dtype=dtypes["weight"],
        product_dtype=min(promoted, y_dtype, key=lambda dtype: dtype.itemsize),
        y_dtype=y_dtype,
        scale_dtype=dtypes.get("scale"),
        bias_dtype=dtypes.get("bias"),
        epsilon=checks.number(NAME, "epsilon", epsilon, minimum=0.0),
        scale_offset=checks.number(NAME, "scale_offset", scale_offset),
        activation=activation,
        precision=precision,
    )
    norm = norm_call(
        "rms_norm",
        shape,
        spec.x_dtype,
        {name: others[name] for name in ("scale",) if name in others},
        axis=-1,
        epsilon=spec.epsilon,
        scale_offset=spec.scale_offset,
        dtype=spec.product_dtype,
        save="input",
        implementation=None if implementation == "mosaic" else implementation,
    )
    return Linear(norm, spec, implementation)


def _check_shapes(shape: tuple[int, ...], others: dict[str, tuple[int, ...]]) -> None:
    if not shape:
        raise ValueError(
            f"{NAME}: x has shape (); expected (..., d), a vector of features for each position; "
            "give x an axis, e.g. x[None]"
        )
    cols, weight = shape[-1], others["weight"]
    if len(weight) != 2 or weight[0] != cols:
        raise ValueError(
            f"{NAME}: weight has shape {weight}; expected ({cols}, n), the last axis of x {shape} "
            "by any number of features; transpose or reshape weight, e.g. weight.T"
        )
    for name, expected, meaning in (
        ("scale", (cols,), f"a number for each element of the last axis of x {shape}"),
        ("bias", weight[1:], f"a number for each column of weight {weight}"),
    ):
        if others.get(name, expected) != expected:
            raise ValueError(
                f"{NAME}: {name} has shape {others[name]}; expected {expected}, {meaning}; reshape "
                f"{name} to that shape"
            )
    checks.same_shape(NAME, "residual", others.get("residual", shape), shape)


# ----------------------------------------------------------------------------- the composition


def _composed(call: Linear, names: tuple[str, ...], *arrays: jax.Array) -> jax.Array:
    """y, of x, weight, scale and bias, those that `names` names."""
    operands, spec = dict(zip(names, arrays)), call.spec
    layout = _layout_of(operands["x"], operands["weight"])
    for name in ("scale", "bias"):
        # They may be sharded for storage (FSDP), and are small; weight is gathered by the product.
        if layout is not None and name in operands:
            operands[name] = sharding.reshard(operands[name], layout.mesh, layout.spec(name))
    normalised = [operands[name] for name in ("x", "scale") if name in operands]
    # Nothing but the sums is rounded to y: the product does that itself, in no pass of its own. But
    # sums over shards of x's columns are added up before they are rounded.
    is_split = layout is not None and bool(layout.cols)
    is_alone = "bias" not in operands and spec.activation is None and not is_split
    z = product(
        functools.partial(_normalised, call.norm),
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
    return activated(_ACTIVATIONS[spec.activation], z, kept).astype(spec.y_dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _normalised(norm: Call, x: jax.Array, *scale: jax.Array) -> jax.Array:
    """The norm, of which x and rstd are kept; its result has no name that a policy would keep."""
    (n,) = row_operations.bind(norm, x, *scale)
    return n


@functools.partial(_normalised.defjvp, symbolic_zeros=True)
def _(norm: Call, primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
    x, *scale = primals
    n, rstd = row_operations.bind(norm.with_stats(), x, *scale)
    rstd = remat.name_of_linear("rstd", rstd)
    along = {name: _nonzero(t) for name, t in zip(("x", "scale"), tangents)}
    (dn,) = row_operations.tangents_of(norm, [x, rstd, *scale], along)
    return n, SymbolicZero(jax.typeof(n).to_tangent_aval()) if dn is None else dn


def product(
    f: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    weight: jax.Array,
    *,
    dtype: np.dtype,
    result: np.dtype,
    precision: str | None = None,
    weight_sharding: NamedSharding | None = None,
    out_sharding: NamedSharding | None = None,
) -> jax.Array:
    """``f(*arrays) @ weight``, which keeps `arrays` and `weight` for its derivative, and not f's.

    Its cotangent is rounded to `dtype`: a 16-bit product has 16-bit products behind it, also where
    its result is float32, as bias and activation take it.

    Args:
      f: makes the first factor, (..., d), of arrays; hashable, and the same for the same call.
      arrays: what it is of.
      weight: (d, n), of any dtype.
      dtype: of both factors: f's result and weight are rounded to it.
      result: of the result, to which the sums are rounded.
      precision: as ``jax.default_matmul_precision``.
      weight_sharding: what weight is gathered to (Explicit axes), forward and once more backward.
      out_sharding: the result's (Explicit axes).

    Returns:
      Array (..., n) in `result`.
    """
    dot = _Dot(dtype, precision, weight_sharding, out_sharding)
    return _product((f, dot, result), weight, *arrays)


@dataclasses.dataclass(frozen=True)
class _Dot:
    """A product of rows with a weight: the options of `product`."""

    dtype: np.dtype
    precision: str | None
    weight_sharding: NamedSharding | None
    out_sharding: NamedSharding | None

    def __call__(self, a: jax.Array, weight: jax.Array, result: np.dtype) -> jax.Array:
        weight = weight.astype(self.dtype)
        if self.weight_sharding is not None:
            weight = jax.reshard(weight, self.weight_sharding)
        return lax.dot_general(
            a.astype(self.dtype),
            weight,
            (((a.ndim - 1,), (0,)), ((), ())),
            precision=self.precision,
            preferred_element_type=result,
            out_sharding=self.out_sharding,
        )


_Static = tuple[Callable[..., jax.Array], _Dot, np.dtype]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(static: _Static, weight: jax.Array, *arrays: jax.Array) -> jax.Array:
    f, dot, result = static
    return dot(f(*arrays), weight, result)


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _(static: _Static, primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
    """dz = dh weight + h dweight, of h made again.

    `jax.checkpoint` keeps what it is applied to from forward to backward: no h, and no copy of
    weight that is cast or gathered.
    """
    f, dot, result = static
    (weight, *arrays), (dweight, *moved) = primals, tangents
    h, dh = _jvp(f, arrays, moved)
    z = dot(h, weight, result)
    terms = []
    if dh is not None:
        # XLA may take the forward's copy of weight, as it does in plain JAX.
        along_h = jax.checkpoint(lambda weight, dh: dot(dh, weight, dot.dtype), prevent_cse=False)
        terms.append(along_h(weight, dh))
    if _nonzero(dweight) is not None:
        # It waits for the product's cotangent: XLA would make h beside the forward's, and keep it.
        along_weight = jax.checkpoint(lambda arrays, dw: dot(f(*arrays), dw, dot.dtype))
        terms.append(along_weight(arrays, dweight))
    # Added up in the arithmetic dtype; rounded here, so that cotangents are, before they come in.
    wide = np.float64 if "float64" in (dot.dtype.name, np.dtype(result).name) else np.float32
    return z, functools.reduce(jnp.add, [t.astype(wide) for t in terms]).astype(result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def activated(
    activation: Callable[[jax.Array], jax.Array], z: jax.Array, kept: jax.Array
) -> jax.Array:
    """``activation(z)``, whose derivative is taken at `kept`: z, rounded to what is kept of it."""
    del kept
    return activation(z)


@activated.defjvp
def _(
    activation: Callable[[jax.Array], jax.Array],
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (z, kept), (dz, _) = primals, tangents

    # No barrier: what makes dz is fused with this. One for `kept` alone costs unrolled layers of a
    # gated MLP an array each (the gate, which XLA makes again), and saves one without a gate.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def tangent(kept: jax.Array, dz: jax.Array) -> jax.Array:
        return jax.jvp(activation, (kept.astype(z.dtype),), (dz,))[1]

    return activated(activation, z, kept), tangent(kept, dz)


def _nonzero(tangent: Any) -> jax.Array | None:
    return None if isinstance(tangent, SymbolicZero) else tangent


def _jvp(
    f: Callable[..., jax.Array], primals: Sequence[jax.Array], tangents: Sequence[Any]
) -> tuple[jax.Array, jax.Array | None]:
    """`jax.jvp` along the tangents that are not 0; None for a tangent that is."""
    along = [i for i, t in enumerate(tangents) if _nonzero(t) is not None]
    if not along:
        return f(*primals), None

    def function(*moving: jax.Array) -> jax.Array:
        operands = list(primals)
        for i, a in zip(along, moving):
            operands[i] = a
        return f(*operands)

    return jax.jvp(function, [primals[i] for i in along], [tangents[i] for i in along])


# ------------------------------------------------------------------------------- the mesh


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Over which axes of a mesh with Explicit axes rows, columns and features are split.

    Weight is split along its columns as x is, and gathered where it is stored otherwise (FSDP), or
    where features are split over axes that split x.
    """

    mesh: Any
    rows: tuple[tuple[str, ...], ...]
    cols: tuple[str, ...]
    features: tuple[str, ...]

    def spec(self, name: str) -> PartitionSpec:
        cols, features = self.cols or None, self.features or None
        specs: dict[str, tuple[Any, ...]] = {
            "weight": (cols, features),
            "scale": (cols,),
            "bias": (features,),
            "z": (*[names or None for names in self.rows], features),
        }
        return PartitionSpec(*specs[name])

    def sharding(self, name: str) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(name))


def _layout_of(x: jax.Array, weight: jax.Array) -> _Layout | None:
    """By types; None without Explicit axes. What does not divide an axis does not split it."""
    x_type, weight_type = jax.typeof(x), jax.typeof(weight)
    mesh = sharding.explicit_mesh([x_type, weight_type])
    if mesh is None:
        return None
    *rows, cols = (sharding.axes_over(x_type, axis, mesh) for axis in range(x.ndim))
    features = sharding.axes_over(weight_type, 1, mesh)
    split = {*sum(rows, ()), *cols}
    return _Layout(mesh, tuple(rows), cols, () if split & {*features} else features)


# ------------------------------------------------------------------------------- the kernel


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _by_kernel(call: Linear, names: tuple[str, ...], *arrays: jax.Array) -> jax.Array:
    """`_composed` by Mosaic's kernel, and differentiated as `_composed` is."""
    return _kernel(call, names)(*arrays)


@functools.partial(_by_kernel.defjvp, symbolic_zeros=True)
def _(
    call: Linear, names: tuple[str, ...], primals: Sequence[jax.Array], tangents: Sequence[Any]
) -> Any:
    _, dy = _jvp(functools.partial(_composed, call, names), primals, tangents)
    return _by_kernel(call, names, *primals), dy


def _kernel(call: Linear, names: tuple[str, ...]) -> Callable[..., jax.Array]:
    """The kernel: a batch of x is more rows, one of parameters a loop."""

    @custom_vmap
    def run(*arrays: jax.Array) -> jax.Array:
        operands = dict(zip(names, arrays))
        x, weight = operands["x"], operands["weight"]
        *lead, cols = x.shape
        spec = dataclasses.replace(call.spec, rows=math.prod(lead))
        y = backends.module("mosaic").rms_norm_linear_fwd(  # type: ignore[attr-defined]
            x.reshape(spec.rows, cols), weight, operands.get("scale"), operands.get("bias"), spec
        )
        return y.reshape(*lead, weight.shape[1])

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


def _check_whole(call: Linear, operands: dict[str, jax.Array]) -> None:
    """ValueError where arrays may be spread over devices: the kernel is not partitioned."""
    mesh = sharding.mesh_of([jax.typeof(a) for a in operands.values()])
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    spread = {
        axis: mesh.shape[axis]
        for axis, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind != AxisType.Manual and mesh.shape[axis] > 1
    }
    if spread:
        raise ValueError(
            f"{NAME}: implementation={call.implementation!r} is a kernel of whole arrays, and the "
            f"arrays lie on a mesh with axes {spread}; expected one device, or shards; call it "
            "inside jax.shard_map over these axes, or leave implementation out"
        )
