"""Matmuls fused with a function before or after them: their residuals and cotangents' dtypes.

`dot`, `product` and `activated` are each a `jax.custom_jvp`, whose rule determines the residuals
and the dtype of cotangents:

    z = h weight            `dot`                        saves h and weight, as any matmul
    z = f(x) weight         `product`                    saves x, weight and the residuals of f's
                                                         own rule; recomputes f(x)
    y = activation(z)       `activated`                  saves z, rounded to y's dtype

None of them is a primitive, so forward mode, `jax.vmap`, meshes and rematerialisation policies are
JAX's own.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.primitives.recomputation import linear

#: Elementwise functions of `jax.nn`, with their defaults, by name.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


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
    """Return ``f(*arrays) @ weight``; save `arrays` and `weight`, but not f's result.

    The cotangent is rounded to `dtype`: the backward pass of a 16-bit matmul uses 16-bit matmuls,
    even if its result is float32 because a bias or an activation follows.

    Args:
      f: function of `arrays` that returns the first operand, (..., d). It must be hashable, and
        equal for equal calls.
      arrays: arguments of f.
      weight: array (d, n) of any dtype.
      dtype: dtype of both operands, to which f's result and weight are rounded.
      result: dtype of the result, to which the sums are rounded.
      precision: as ``jax.default_matmul_precision``.
      weight_sharding: sharding to which weight is gathered (Explicit axes), in the forward pass and
        again in the backward pass.
      out_sharding: sharding of the result (Explicit axes).

    Returns:
      Array (..., n) in `result`.
    """
    options = Dot(dtype, precision, weight_sharding, out_sharding)
    h = f(*arrays)
    return _product((f, options, result), options(h, weight, result), h, weight, *arrays)


@dataclasses.dataclass(frozen=True)
class Dot:
    """The options of `product`, for the matmul of rows and a weight."""

    dtype: np.dtype
    precision: str | None = None
    weight_sharding: NamedSharding | None = None
    out_sharding: NamedSharding | None = None

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

    def tangent(self, terms: Sequence[jax.Array], result: np.dtype) -> jax.Array:
        """Return the sum of `terms`, added in the arithmetic dtype and cast to `result`.

        The terms have the matmuls' dtype, so that their cotangents are rounded to it.
        """
        wide = checks.arithmetic_dtype(self.dtype, np.dtype(result))
        return functools.reduce(jnp.add, [t.astype(wide) for t in terms]).astype(result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def dot(options: Dot, result: np.dtype, h: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``h @ weight`` in dtype `result`. Its cotangent is rounded to the matmul's dtype."""
    return options(h, weight, result)


@functools.partial(dot.defjvp, symbolic_zeros=True)
def _(options: Dot, result: np.dtype, primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
    (h, weight), (dh, dweight) = primals, tangents
    terms = []
    if nonzero(dh) is not None:
        terms.append(options(dh, weight, options.dtype))
    if nonzero(dweight) is not None:
        terms.append(options(h, dweight, options.dtype))
    return dot(options, result, h, weight), options.tangent(terms, result)


_Static = tuple[Callable[..., jax.Array], Dot, np.dtype]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(
    static: _Static, z: jax.Array, h: jax.Array, weight: jax.Array, *arrays: jax.Array
) -> jax.Array:
    """Return z, which equals h weight for h = f(*arrays), with a derivative that does not save h.

    The caller computes h and z, so that rematerialisation policies see the matmul and the names in
    f. The rule below computes z's tangent from `arrays`. It ignores the incoming tangents of h and
    z, so JAX does not compute them.
    """
    del static, h, weight, arrays
    return z


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _(static: _Static, primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
    """Return z and dz = dh weight + h dweight, with h recomputed from `arrays`.

    The tangent of h includes those of `arrays`. `linear` saves the arguments that it is given, so
    that neither h nor a cast or gathered copy of weight is saved.
    """
    f, options, result = static
    (z, _, weight, *arrays), (_, dh, dweight, *_) = primals, tangents
    terms = []
    if nonzero(dh) is not None:
        # XLA may reuse the forward's copy of weight, as it does in plain JAX.
        along_h = linear(lambda weight, dh: options(dh, weight, options.dtype), [weight], dh)
        terms.append(along_h)
    if nonzero(dweight) is not None:

        def times_h(*operands: jax.Array) -> jax.Array:
            *arrays, dweight = operands
            return options(f(*arrays), dweight, options.dtype)

        # Without the barrier, XLA would compute h together with the forward pass's, and save it.
        terms.append(linear(times_h, arrays, dweight, barrier=True))
    return z, options.tangent(terms, result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def activated(
    activation: Callable[[jax.Array], jax.Array], z: jax.Array, kept: jax.Array
) -> jax.Array:
    """Return ``activation(z)``. Its derivative is evaluated at `kept`: z, rounded to be saved."""
    del kept
    return activation(z)


@activated.defjvp
def _(
    activation: Callable[[jax.Array], jax.Array],
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (z, kept), (dz, _) = primals, tangents

    def tangent(kept: jax.Array, dz: jax.Array) -> jax.Array:
        return jax.jvp(activation, (kept.astype(z.dtype),), (dz,))[1]

    # There is no barrier: XLA fuses this with the computation of dz. In unrolled layers, a
    # barrier around `kept` alone costs a gated MLP one more array per layer: the gate, which XLA
    # otherwise recomputes. Without a gate, it saves one array per layer.
    return activated(activation, z, kept), linear(tangent, [kept], dz)


def nonzero(tangent: Any) -> jax.Array | None:
    """Return a tangent, or None if it is a symbolic zero."""
    return None if isinstance(tangent, SymbolicZero) else tangent


# ------------------------------------------------------------------------------- the mesh


@dataclasses.dataclass(frozen=True)
class Layout:
    """The Explicit mesh axes that split a matmul's rows, contracted axis and features.

    Weight's first axis is split like x's columns. Weight is gathered if it is stored in another
    sharding (FSDP), or if its features are split over mesh axes that also split x.
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


def layout_of(x: jax.Array, weight: jax.Array) -> Layout | None:
    """Return the layout given by the types of x and weight; None without Explicit axes.

    If the size of a mesh axis does not divide an array axis, the array axis counts as not split.
    """
    x_type, weight_type = jax.typeof(x), jax.typeof(weight)
    mesh = sharding.explicit_mesh([x_type, weight_type])
    if mesh is None:
        return None
    *rows, cols = (sharding.axes_over(x_type, axis, mesh) for axis in range(x.ndim))
    features = sharding.axes_over(weight_type, 1, mesh)
    split = {*sum(rows, ()), *cols}
    return Layout(mesh, tuple(rows), cols, () if split & {*features} else features)
