"""RMSNorm, the product with a matrix and an activation: the composition.

    n = rms_norm(x)                rounded to the product's dtype
    z = n weight + bias            summed in the arithmetic dtype
    y = activation(z)

Tangents, from x, rstd and z, of n recomputed; that of n is the norm's own:

    dz = dn weight + n dweight + dbias          dy = activation'(z) dz

And, for kernels, what is as fast here: the product of weight with the norm's gain.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands
from jaxnorm_kernels.specs import Activation, LinearSpec
from jaxnorm_kernels.xla.elementwise import gain
from jaxnorm_kernels.xla.norm import norm_fwd

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}


def rms_norm_linear_fwd(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    spec: LinearSpec,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """y, z and rstd; None for what the spec does not want."""
    n, _, (rstd,) = norm_fwd(Operands(x, scale=scale), spec.norm)
    kept = rstd if spec.want_rstd else None
    if not spec.want_y:
        return None, None, kept
    plain = bias is None and spec.activation is None and not spec.cols_over
    # Nothing but the sums is rounded to y: the product does that itself, in no pass of its own.
    z = _product(n, weight, spec, spec.y_dtype if plain else None)
    if spec.cols_over:
        z = lax.psum(z, spec.cols_over)
    if bias is not None:
        z = z + _of_rows(bias.astype(z.dtype), z)
    y = z if spec.activation is None else _ACTIVATIONS[spec.activation](z)
    return y.astype(spec.y_dtype), z.astype(spec.y_dtype) if spec.want_z else None, kept


def rms_norm_linear_tan(
    x: jax.Array,
    rstd: jax.Array,
    scale: jax.Array | None,
    weight: jax.Array,
    z: jax.Array | None,
    dn: jax.Array | None,
    dweight: jax.Array | None,
    dbias: jax.Array | None,
    spec: LinearSpec,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The tangents of y and z, in ``spec.y_dtype``; None stands for one that is 0.

    `out_sharding` is that of z, where types name mesh axes.
    """
    shape = (*x.shape[:-1], weight.shape[1])
    terms = []
    if dn is not None:
        terms.append(_rounded_product(dn, weight, spec, out_sharding))
    if dweight is not None:
        n = x.astype(spec.norm.compute_dtype) * rstd[..., None]
        if scale is not None:
            n = n * _of_rows(gain(scale, spec.norm), n)
        n = n.astype(spec.product_dtype)
        terms.append(_rounded_product(n, dweight, spec, out_sharding))
    if dbias is not None:
        wide = dbias.astype(spec.compute_dtype)
        terms.append(jnp.broadcast_to(_of_rows(wide, x), shape, out_sharding=out_sharding))
    dz = sum(terms[1:], terms[0])
    dy = dz
    if spec.activation is not None:
        assert z is not None
        _, dy = jax.jvp(_ACTIVATIONS[spec.activation], (z.astype(dz.dtype),), (dz,))
    return dy.astype(spec.y_dtype), dz.astype(spec.y_dtype)


def scaled_weight(
    weight: jax.Array, scale: jax.Array | None, spec: LinearSpec
) -> tuple[jax.Array, jax.Array | None]:
    """c G weight in the product's dtype and, where c is not 1, 1 / c as ``(1,)``.

    1 / c is a power of 2 above the largest |G|. float16 has few exponents: G weight may be none.
    """
    if scale is None:
        return weight.astype(spec.product_dtype), None
    g, power = gain(scale, spec.norm), None
    if spec.product_dtype == np.float16:
        _, exponent = jnp.frexp(jnp.max(jnp.abs(g), keepdims=True))
        g, power = jnp.ldexp(g, -exponent), jnp.ldexp(jnp.ones((), g.dtype), exponent)
    return (weight.astype(g.dtype) * g[:, None]).astype(spec.product_dtype), power


def _of_rows(parameter: jax.Array, like: jax.Array) -> jax.Array:
    """A parameter with as many axes as an array of rows."""
    return jnp.expand_dims(parameter, range(like.ndim - 1))


def _rounded_product(
    a: jax.Array, b: jax.Array, spec: LinearSpec, out_sharding: jax.sharding.NamedSharding | None
) -> jax.Array:
    """The product rounded to its operands' dtype: its transposes then take operands of that dtype.

    Were it of float32, a cotangent of float32 would meet 16-bit operands, in slower products.
    """
    product = _product(a, b, spec, spec.product_dtype, out_sharding)
    return product.astype(spec.compute_dtype)


def _product(
    a: jax.Array,
    b: jax.Array,
    spec: LinearSpec,
    dtype: jax.typing.DTypeLike | None = None,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """a b, of operands in the product's dtype, its sums in the arithmetic dtype."""
    return lax.dot_general(
        a.astype(spec.product_dtype),
        b.astype(spec.product_dtype),
        (((a.ndim - 1,), (0,)), ((), ())),
        precision=spec.precision,
        preferred_element_type=spec.compute_dtype if dtype is None else dtype,
        out_sharding=out_sharding,
    )
