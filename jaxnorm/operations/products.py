"""Matmuls, with or without a function before or after them, that save few residuals.

`dot`, `product` and `activated` are each a `jax.custom_jvp`. Their JVP rules determine which arrays
are saved, and the dtype of cotangents::

    z = h @ weight          `dot`           saves h and weight, like any matmul
    z = f(x) @ weight       `product`       saves x, weight and the residuals of f; recomputes f(x)
    y = activation(z)       `activated`     saves z, rounded to y's dtype

None of them is a primitive, so JAX handles forward mode, `jax.vmap`, meshes and rematerialisation
policies as for any function in plain JAX.
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

#: The activations that users can name. Each is the function of `jax.nn` with its default options.
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

    The result's cotangent is rounded to `dtype`. So the backward pass of a 16-bit matmul uses
    16-bit matmuls, even if the result is float32 because a bias or an activation follows.

    Args:
      f: function of `arrays` that returns the first operand, (..., d). It must be hashable. Two
        calls for the same computation must pass functions that compare equal (not a new lambda).
      arrays: arguments of f.
      weight: array (d, n) of any dtype.
      dtype: dtype of the matmul's operands, to which f's result and weight are rounded.
      result: dtype of the matmul's result.
      precision: precision of the matmul, as for ``jax.default_matmul_precision``.
      weight_sharding: sharding to which weight is gathered before the matmul, in the forward pass
        and again in the backward pass; None without Explicit mesh axes.
      out_sharding: sharding of the result; None without Explicit mesh axes.

    Returns:
      Array (..., n) of dtype `result`.
    """
    options = Dot(dtype, precision, weight_sharding, out_sharding)
    h = f(*arrays)
    return _product((f, options, result), options(h, weight, result), h, weight, *arrays)


@dataclasses.dataclass(frozen=True)
class Dot:
    """The matmul ``a @ weight`` with fixed options. `product` documents the options."""

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
        """Return the sum of the terms of a tangent, cast to the dtype `result`.

        The terms are results of matmuls, in the dtype of the matmuls' operands. The sum is computed
        in float32 (or float64). When this sum is transposed, the cotangent is cast to the terms'
        dtype.
        """
        wide = checks.arithmetic_dtype(self.dtype, np.dtype(result))
        return functools.reduce(jnp.add, [t.astype(wide) for t in terms]).astype(result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def dot(options: Dot, result: np.dtype, h: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``h @ weight`` in the dtype `result`.

    The cotangent of the result is rounded to the dtype of the matmul's operands.
    """
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
    """Return the argument z unchanged, with a derivative that does not save h.

    The caller must pass ``h = f(*arrays)`` and ``z = h @ weight``. They are computed outside this
    function, so that rematerialisation policies see the matmul and the names of arrays in f. The
    JVP rule below computes z's tangent from h, weight and arrays. It ignores the tangent of the
    argument z, so JAX does not compute that tangent.
    """
    del static, h, weight, arrays
    return z


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _(static: _Static, primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
    """The JVP rule of `_product`: return z and ``dz = dh @ weight + h @ dweight``.

    dh is the tangent of h, which JAX has computed from the tangents of `arrays`. In the second
    term, h is recomputed from `arrays`. `linear` saves exactly the arrays that it is given, so
    neither h nor a cast or gathered copy of weight is saved.
    """
    f, options, result = static
    (z, _, weight, *arrays), (_, dh, dweight, *_) = primals, tangents
    terms = []
    if nonzero(dh) is not None:
        # There is no barrier here, so XLA may reuse the cast or gathered copy of weight that the
        # forward pass has made. Plain JAX allows this as well.
        along_h = linear(lambda weight, dh: options(dh, weight, options.dtype), [weight], dh)
        terms.append(along_h)
    if nonzero(dweight) is not None:

        def times_h(*operands: jax.Array) -> jax.Array:
            *arrays, dweight = operands
            return options(f(*arrays), dweight, options.dtype)

        # The barrier prevents XLA from saving the forward pass's h and using it here.
        terms.append(linear(times_h, arrays, dweight, barrier=True))
    return z, options.tangent(terms, result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def activated(
    activation: Callable[[jax.Array], jax.Array], z: jax.Array, kept: jax.Array
) -> jax.Array:
    """Return ``activation(z)``; save only `kept`, which is z rounded to the output's dtype.

    The derivative of the activation is evaluated at `kept`.
    """
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

    # There is no barrier around `kept`, so that XLA can fuse this tangent with the computation of
    # dz. A barrier would have a mixed effect on memory in unrolled layers: XLA would store one
    # array less for each MLP without a gate. For each gated MLP, it would store one array more: the
    # gate, which it recomputes if there is no barrier.
    return activated(activation, z, kept), linear(tangent, [kept], dz)


def nonzero(tangent: Any) -> jax.Array | None:
    """Return a tangent; None if it is a symbolic zero."""
    return None if isinstance(tangent, SymbolicZero) else tangent


# ------------------------------------------------------------------------------- the mesh


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of a matmul of x (..., d) and weight (d, n) on a mesh with Explicit axes.

    Weight's first axis is sharded like the last axis of x. Weight is gathered if its own sharding
    differs (FSDP), or if n is sharded over mesh axes that also shard x.

    Attributes:
      mesh: the mesh.
      rows: for each axis of x except the last one, the names of the mesh axes that shard it.
      cols: names of the mesh axes that shard d.
      features: names of the mesh axes that shard n.
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
    """Return the layout that the types of x and weight define; None without Explicit mesh axes.

    An axis of an array counts as not sharded if the number of shards does not divide its size.
    """
    x_type, weight_type = jax.typeof(x), jax.typeof(weight)
    mesh = sharding.explicit_mesh([x_type, weight_type])
    if mesh is None:
        return None
    *rows, cols = (sharding.axes_over(x_type, axis, mesh) for axis in range(x.ndim))
    features = sharding.axes_over(weight_type, 1, mesh)
    split = {*sum(rows, ()), *cols}
    return Layout(mesh, tuple(rows), cols, () if split & {*features} else features)
