"""Matmuls, with or without a function before or after them, that save few residuals.

`dot`, `product` and `activated` have their own derivatives (`recomputation.with_tangent`). These
determine which arrays are saved for the backward pass, and the dtype of cotangents::

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
from jax.sharding import NamedSharding, PartitionSpec

from jaxnorm.meshes import sharding
from jaxnorm.operations import checks
from jaxnorm.primitives.recomputation import linear_map, with_tangent

#: Maps the names of activations, which users can pass, to functions of `jax.nn`. The functions are
#: called with their default arguments.
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

    The result's cotangent is rounded to `dtype`, so the backward pass of a 16-bit matmul uses
    16-bit matmuls. This is so even if a bias or an activation follows, although the result and its
    cotangent are then float32: the cotangent is rounded to 16 bits before these matmuls.

    Args:
      f: function of `arrays` that returns the first operand of the matmul, (..., d). f must be
        hashable. Calls for the same computation must pass functions that compare equal, and not a
        new lambda each time, because f is part of the keys of JAX's caches.
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
    z = options(h, weight, result)
    return with_tangent((_product_tangent, f, options, result), z, h, weight, *arrays)


@dataclasses.dataclass(frozen=True)
class Dot:
    """The matmul ``a @ weight`` with fixed options.

    The attributes are arguments of `product`, which describes them.
    """

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
        """Return a tangent, the sum of `terms`, in the dtype `result`.

        The terms are results of matmuls, and have the dtype of the matmuls' operands. The sum is
        computed in float32 (or float64). When JAX transposes this sum, it casts the cotangent to
        the terms' dtype.
        """
        wide = checks.arithmetic_dtype(self.dtype, np.dtype(result))
        return functools.reduce(jnp.add, [t.astype(wide) for t in terms]).astype(result)


def dot(options: Dot, result: np.dtype, h: jax.Array, weight: jax.Array) -> jax.Array:
    """Return ``h @ weight`` in the dtype `result`.

    The cotangent of the result is rounded to the dtype of the matmul's operands.
    """
    z = options(h, weight, result)
    return with_tangent((_dot_tangent, options, result), z, h, weight)


def _dot_tangent(
    options: Dot,
    result: np.dtype,
    z: jax.Array,
    arrays: Sequence[jax.Array],
    tangents: Sequence[Any],
) -> jax.Array:
    (h, weight), (dh, dweight) = arrays, tangents
    terms = []
    if dh is not None:
        terms.append(options(dh, weight, options.dtype))
    if dweight is not None:
        terms.append(options(h, dweight, options.dtype))
    return options.tangent(terms, result)


def _product_tangent(
    f: Callable[..., jax.Array],
    options: Dot,
    result: np.dtype,
    z: jax.Array,
    arrays: Sequence[jax.Array],
    tangents: Sequence[Any],
) -> jax.Array:
    """Return the tangent of `product`: ``dz = dh @ weight + h @ dweight``.

    h is f's result, and JAX has computed its tangent dh from the tangents of f's arguments. In the
    second term, h is recomputed from f's arguments.

    `linear_map` saves only its list of residuals: the original weight for the first term, and f's
    arguments for the second. So neither h nor a cast or gathered copy of weight is saved.
    """
    (_, weight, *of_f), (dh, dweight, *_) = arrays, tangents
    terms = []
    if dh is not None:
        # There is no barrier here, so XLA may reuse the forward pass's cast or gathered copy of
        # weight, as in plain JAX. With a barrier, the backward pass would cast and gather weight
        # again.
        along_h = linear_map(lambda weight, dh: options(dh, weight, options.dtype), [weight], dh)
        terms.append(along_h)
    if dweight is not None:

        def times_h(*operands: jax.Array) -> jax.Array:
            *of_f, dweight = operands
            return options(f(*of_f), dweight, options.dtype)

        # `waiting` puts f's arguments behind a barrier. Without it, XLA could save the forward
        # pass's h and use it here.
        terms.append(linear_map(times_h, of_f, dweight, waiting=len(of_f)))
    return options.tangent(terms, result)


def activated(
    activation: Callable[[jax.Array], jax.Array], z: jax.Array, rounded: jax.Array
) -> jax.Array:
    """Return ``activation(z)``; save only `rounded` for the backward pass.

    `rounded` is z, rounded to the output's dtype. The derivative of the activation is evaluated at
    `rounded`.
    """
    y = activation(z)
    return with_tangent((_activated_tangent, activation), y, z, rounded)


def _activated_tangent(
    activation: Callable[[jax.Array], jax.Array],
    y: jax.Array,
    arrays: Sequence[jax.Array],
    tangents: Sequence[Any],
) -> jax.Array:
    (z, rounded), (dz, _) = arrays, tangents

    def tangent(rounded: jax.Array, dz: jax.Array) -> jax.Array:
        return jax.jvp(activation, (rounded.astype(z.dtype),), (dz,))[1]

    # `linear_map` is called without a barrier around `rounded`, so that XLA can fuse this tangent
    # with the computation of dz. In unrolled layers, a barrier also changes what XLA stores: one
    # array less in an MLP without a gate, and the gate in a gated MLP, which XLA recomputes
    # otherwise.
    return linear_map(tangent, [rounded], dz)


# ------------------------------------------------------------------------------- the mesh


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of a matmul of x (..., d) and weight (d, n) on a mesh with Explicit axes.

    In the matmul, weight's axis d is sharded like x's axis d. The user's weight may be sharded
    differently, or n may be sharded over mesh axes that also shard x. Weight is gathered in these
    cases, both of which occur with FSDP.

    Attributes:
      mesh: the mesh.
      rows: for each axis of x but the last, a tuple of the names of the mesh axes that shard it.
      cols: a tuple of the names of the mesh axes that shard d.
      features: a tuple of the names of the mesh axes that shard n in the matmul.
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
    """Return the layout of the matmul of x and weight; None without Explicit mesh axes.

    The layout follows from the shardings of x and weight. An axis counts as not sharded if its size
    is not a multiple of the number of its shards.
    """
    x_type, weight_type = jax.typeof(x), jax.typeof(weight)
    mesh = sharding.explicit_mesh([x_type, weight_type])
    if mesh is None:
        return None
    *rows, cols = (sharding.axes_over(x_type, axis, mesh) for axis in range(x.ndim))
    features = sharding.axes_over(weight_type, 1, mesh)
    split = {*sum(rows, ()), *cols}
    return Layout(mesh, tuple(rows), cols, () if split & {*features} else features)
