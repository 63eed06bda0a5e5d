"""Matrix products with what precedes and follows them: what is kept of them, and in which dtypes.

Nothing here is a primitive. `dot`, `product` and `activated` are a `jax.custom_jvp` each, whose
rules say what is kept, and in which dtype cotangents are:

    z = h weight            `dot`                        keeps h and weight, as any product
    z = f(x) weight         `product`                    keeps x, weight and what f's own rule
                                                         keeps; it makes f(x) again
    y = activation(z)       `activated`                  keeps z, rounded to y's dtype

So forward mode, `jax.vmap`, meshes and policies of rematerialisation are JAX's.
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
from jaxnorm.primitives.linear import linear

#: Elementwise functions by their names: those of `jax.nn` with their defaults.
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
    options = Dot(dtype, precision, weight_sharding, out_sharding)
    h = f(*arrays)
    return _product((f, options, result), options(h, weight, result), h, weight, *arrays)


@dataclasses.dataclass(frozen=True)
class Dot:
    """A product of rows with a weight: the options of `product`."""

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
        """The sum of products in this dtype, added up in the arithmetic dtype.

        It is rounded here, so that cotangents are, before they come in.
        """
        wide = checks.arithmetic_dtype(self.dtype, np.dtype(result))
        return functools.reduce(jnp.add, [t.astype(wide) for t in terms]).astype(result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def dot(options: Dot, result: np.dtype, h: jax.Array, weight: jax.Array) -> jax.Array:
    """``h @ weight`` in `result`, whose cotangent is rounded to the product's dtype."""
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
    """Return z = h weight for h = f(*arrays), with a derivative that does not save h.

    h and z are computed by the caller, so that policies of rematerialisation see the names in f,
    and the matmul. The rule replaces the tangent of z; nothing computes the one that it ignores.
    """
    del static, h, weight, arrays
    return z


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _(static: _Static, primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
    """dz = dh weight + h dweight, with h recomputed from `arrays`.

    The tangent of h has the tangents of `arrays` in it. `linear` saves what it is applied to: no h,
    and no copy of weight that is cast or gathered.
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

        # The barrier: without it XLA would compute h beside the forward's, and keep it.
        terms.append(linear(times_h, arrays, dweight, barrier=True))
    return z, options.tangent(terms, result)


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

    def tangent(kept: jax.Array, dz: jax.Array) -> jax.Array:
        return jax.jvp(activation, (kept.astype(z.dtype),), (dz,))[1]

    # No barrier: XLA fuses this with what computes dz. A barrier around `kept` alone costs unrolled
    # layers of a gated MLP an array each (the gate, which XLA recomputes), and saves one without a
    # gate.
    return activated(activation, z, kept), linear(tangent, [kept], dz)


def nonzero(tangent: Any) -> jax.Array | None:
    """A tangent; None for one that is 0 by its type."""
    return None if isinstance(tangent, SymbolicZero) else tangent


def jvp(
    f: Callable[..., jax.Array], primals: Sequence[jax.Array], tangents: Sequence[Any]
) -> tuple[jax.Array, jax.Array | None]:
    """`jax.jvp` along the tangents that are not 0; None for a tangent that is."""
    at = [i for i, t in enumerate(tangents) if nonzero(t) is not None]
    if not at:
        return f(*primals), None

    def function(*arrays: jax.Array) -> jax.Array:
        operands = list(primals)
        for i, a in zip(at, arrays):
            operands[i] = a
        return f(*operands)

    return jax.jvp(function, [primals[i] for i in at], [tangents[i] for i in at])


# ------------------------------------------------------------------------------- the mesh


@dataclasses.dataclass(frozen=True)
class Layout:
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


def layout_of(x: jax.Array, weight: jax.Array) -> Layout | None:
    """By types; None without Explicit axes. What does not divide an axis does not split it."""
    x_type, weight_type = jax.typeof(x), jax.typeof(weight)
    mesh = sharding.explicit_mesh([x_type, weight_type])
    if mesh is None:
        return None
    *rows, cols = (sharding.axes_over(x_type, axis, mesh) for axis in range(x.ndim))
    features = sharding.axes_over(weight_type, 1, mesh)
    split = {*sum(rows, ()), *cols}
    return Layout(mesh, tuple(rows), cols, () if split & {*features} else features)
