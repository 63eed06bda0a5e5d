"""RMSNorm over the last axis, and the rotation of pairs of columns after it (RoPE).

A row has pairs of columns, which are rotated. A pair is columns i and i + rotated / 2, or columns
2i and 2i + 1, among the first `NormOptions.rotated` columns. With n = norm(x):

    y = (a cos - b sin, b cos + a sin)      for each pair (a, b) of n
    y = n                                   in the other columns

Let R be this rotation. Its transpose R' maps (a, b) to (a cos + b sin, b cos - a sin). In the
backward pass, let d = dy, and let (na, nb) and (da, db) be a pair of columns of n and of d:

    from the output    n = R' y / (cos^2 + sin^2)
    from the input     n = norm(x)
    in both cases      dx is the gradient of x in n = norm(x), given the cotangent R' d of n
                       dcos = sum(da * na + db * nb),  dsin = sum(db * na - da * nb)

If cos^2 + sin^2 is 0 for a pair, n cannot be recovered from y, and is taken to be 0.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec
from jaxnorm_kernels.xla import norm
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.norm import clip, gain, safe_divide
from jaxnorm_kernels.xla.reductions import along_rows


def norm_rope_fwd(operands: Operands, spec: Spec) -> Results:
    """Compute y = rotation(norm(x), cos, sin)."""
    n, stats = norm.normalised(operands.x, operands.scale, None, spec.last)
    y = rotated(n, operands.cos, operands.sin, spec)
    return Results(y.astype(spec.y_dtype), stats=stats)


def norm_rope_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Compute the backward pass of `norm_rope_fwd`."""
    cos, sin = residuals.cos, residuals.sin
    saved, last = _saved_of_norm(residuals, spec)
    d = cotangents.y.astype(spec.compute_dtype)
    dn = _rotated_in_backward(d, cos, -sin, spec)
    of_n = Results(dn, stats=cotangents.stats)
    gradients = norm.backward(residuals._replace(saved=saved), of_n, last)
    if not spec.returns_tables:
        return gradients
    na, nb = _pairs(_normalised_again(saved, residuals, spec), spec)
    da, db = _pairs(d, spec)
    dcos, dsin = _summed_like(cos, da * na + db * nb), _summed_like(sin, db * na - da * nb)
    return gradients._replace(cos=dcos.astype(cos.dtype), sin=dsin.astype(sin.dtype))


def rotated(n: jax.Array, cos: jax.Array, sin: jax.Array, spec: Spec) -> jax.Array:
    """Rotate the pairs of columns of n, and return the result in the arithmetic dtype."""
    cos, sin = cos.astype(n.dtype), sin.astype(n.dtype)
    a, b = _pairs(n, spec)
    return _joined(_from_pairs(a * cos - b * sin, b * cos + a * sin, spec), n, spec)


def _rotated_in_backward(v: jax.Array, cos: jax.Array, sin: jax.Array, spec: Spec) -> jax.Array:
    """Return `rotated(v, cos, sin)`. On a CPU, compute it by swapping the elements of each pair.

    `rotated` concatenates arrays. On a CPU, XLA does not fuse concatenations. The backward pass has
    several rotations, and XLA would store the result of each concatenation. The forward pass has a
    single rotation, for which the concatenation is faster.
    """

    def swapping(v: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        head, half = v[..., : spec.norm.rotated], spec.norm.rotated // 2
        pairs = head.reshape(*head.shape[:-1], *((half, 2) if spec.norm.interleaved else (2, half)))
        swapped = lax.rev(pairs, (v.ndim if spec.norm.interleaved else v.ndim - 1,))
        both_cos, both_sin = _from_pairs(cos, cos, spec), _from_pairs(-sin, sin, spec)
        return _joined(head * both_cos + swapped.reshape(head.shape) * both_sin, v, spec)

    def by_halves(v: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        return rotated(v, cos, sin, spec)

    tables = cos.astype(v.dtype), sin.astype(v.dtype)
    return lax.platform_dependent(v, *tables, cpu=swapping, default=by_halves)


def _unrotated(y: jax.Array, cos: jax.Array, sin: jax.Array, spec: Spec) -> jax.Array:
    """Undo the rotation: return n, given y = R n (see the module docstring for R)."""
    cos, sin = cos.astype(y.dtype), sin.astype(y.dtype)
    square = cos * cos + sin * sin
    # Divide the tables instead of y, because they are smaller.
    tables = safe_divide(cos, square), safe_divide(-sin, square)
    return _rotated_in_backward(y, *tables, spec)


def _saved_of_norm(residuals: Residuals, spec: Spec) -> tuple[jax.Array, Spec]:
    """Return the array from which the derivative of the norm is computed, and the norm's spec.

    If the input is saved, this array is x. If the output is saved, it is n = norm(x), which is
    recovered from y and not rounded.
    """
    saved = residuals.saved.astype(spec.compute_dtype)
    if spec.norm.saved == "input":
        return saved, spec.last
    saved = saved if spec.y_limit is None else clip(saved, spec.y_limit)
    return _unrotated(saved, residuals.cos, residuals.sin, spec), spec.last


def _normalised_again(saved: jax.Array, residuals: Residuals, spec: Spec) -> jax.Array:
    """Return n = norm(x), given `saved`, which is x or n; see `_saved_of_norm`."""
    if spec.norm.saved == "output":
        return saved
    (rstd,) = residuals.stats
    n = saved * rstd[..., None]
    if residuals.scale is None:
        return n
    return n * along_rows(gain(residuals.scale, spec.last), n, spec.last)


def _pairs(v: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Return two arrays with one element for each pair of columns.

    The first array has the first elements of the pairs, the second array has the second elements.
    """
    head = v[..., : spec.norm.rotated]
    if spec.norm.interleaved:
        return head[..., ::2], head[..., 1::2]
    half = spec.norm.rotated // 2
    return head[..., :half], head[..., half:]


def _from_pairs(a: jax.Array, b: jax.Array, spec: Spec) -> jax.Array:
    """Return the columns that are rotated, given their pairs.

    `a` has the first elements of all pairs, and `b` the second elements. This is the inverse of
    `_pairs`.
    """
    if spec.norm.interleaved:
        return jnp.stack([a, b], axis=-1).reshape(*a.shape[:-1], spec.norm.rotated)
    return jnp.concatenate([a, b], axis=-1)


def _joined(head: jax.Array, rest: jax.Array, spec: Spec) -> jax.Array:
    """Return `rest` with its first columns replaced by `head`.

    `head` has the first ``spec.norm.rotated`` columns, after the rotation.
    """
    return jnp.concatenate([head, rest[..., spec.norm.rotated :]], axis=-1)


def _summed_like(table: jax.Array, v: jax.Array) -> jax.Array:
    """Sum v over the axes along which `table` is broadcast."""
    axes = [axis for axis, (n, size) in enumerate(zip(table.shape, v.shape)) if n != size]
    return jnp.sum(v, axis=tuple(axes), keepdims=True)


FORMULAS: dict[Op, Formulas] = {"norm_rope": Formulas(norm_rope_fwd, norm_rope_bwd)}
