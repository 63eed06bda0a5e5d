"""LayerNorm and RMSNorm over ``spec.axes``, with backward passes from the output or the input.

For a row x of N elements, let G = scale + scale_offset. For RMSNorm, the mean is 0 in these
formulas:

    r = 1 / sqrt(mean((x - mean)^2) + epsilon)     xh = (x - mean) r     y = xh G + bias

In the backward pass, let d = dy:

    from the output    z = y - bias,  xh = z / G,          c2 = mean(d z)
    from the input     xh = (x - mean) r,                  c2 = mean(d G xh)
    both               dx = r (d G - c1 - xh c2),          c1 = mean(d G)
                       dscale = sum_rows(d xh),            dbias = sum_rows(d)

For RMSNorm, c1 is 0 in these formulas.

With an activation, let n = xh * G + bias. Then y = activation(n), and d = dy * activation'(n).

With a residual, there are three forms: y = norm(x + residual), y = residual + norm(x), and y =
norm(residual + norm(x)). In the first and the third form, h is the sum that is normalised. h may
have a cotangent dh in addition to the cotangent of y. The gradient of h is s = dh + dx(h). Here,
dx(h) is the result of the formula of dx above, with h in place of x. The gradients of the terms of
h = residual + branch_scale * x are:

    dresidual = s       dx = branch_scale * s       dbranch_scale = sum_rows(s x)

With a gate, let A = activation(gate) and A' = activation'(gate). There are two forms. In the first,
the norm's output is multiplied by A, and the formulas above are used with d = A * dy. In the
second, the norm's input is t = x * A. Then th (t normalised) takes the place of xh, and the formula
of dx gives dt, the gradient of t:

    y = xh G A       dx as above        dgate = dy xh G A'
    y = th G         dx = dt A          dgate = dt x A'

The backward pass from the output does not need the mean. It computes c2 without a division by G,
because d G xh = d z. Three measures keep this backward pass accurate:

* In the forward pass, |G| has a lower limit: if it is smaller than ``Spec.scale_floor``, it is
  replaced by ``Spec.scale_floor``. So xh can be recovered from y even if scale is 0.
* The forward and the backward pass use the same bias, rounded to y's dtype.
* |xh| is clipped to its true bound sqrt(N), and |y| to the largest finite number
  (``Spec.y_limit``).

The variance is computed in two passes, because the two terms of E[x^2] - E[x]^2 may cancel.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.operations import Op
from jaxnorm_kernels.specs import Spec, Stats
from jaxnorm_kernels.xla.formulas import Formulas
from jaxnorm_kernels.xla.reductions import along_rows, mean_apart, row_mean, summed_like


def gain(scale: jax.Array, spec: Spec) -> jax.Array:
    """Return G = scale + scale_offset in the arithmetic dtype, with |G| >= `Spec.scale_floor`."""
    g = scale.astype(spec.compute_dtype) + spec.norm.scale_offset
    return g if spec.scale_floor is None else _floor(g, spec.scale_floor)


def effective_bias(bias: jax.Array, spec: Spec) -> jax.Array:
    """Return the bias in the arithmetic dtype.

    If the output is saved, the bias is first rounded to y's dtype.
    """
    b = bias.astype(spec.compute_dtype)
    return _rounded(b, spec.y_dtype.name) if spec.norm.saved == "output" else b


def safe_divide(z: jax.Array, g: jax.Array) -> jax.Array:
    """Return z / g, or 0 where g is 0.

    g is scale + scale_offset. For most dtypes of y, |g| has a positive lower limit. For float16, it
    has none, so g can be 0.
    """
    zero = g == 0
    return jnp.where(zero, 0, z / jnp.where(zero, 1, g))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _floor(g: jax.Array, floor: float) -> jax.Array:
    return jnp.where(jnp.abs(g) < floor, jnp.where(g < 0, -floor, floor).astype(g.dtype), g)


@_floor.defjvp
def _floor_jvp(
    floor: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the result and the tangent of `_floor`, which raises |g| to at least `floor`.

    The tangent is the tangent of g, but NaN where |g| is below `floor`. Only second derivatives use
    this rule. Second derivatives cannot be computed where |g| is below `floor`: there, the
    cotangent of the saved y is the sum of an ordinary term and a huge term of size x_hat / floor.
    The rounding error of the huge term exceeds the ordinary term. NaN is better than a wrong
    number.
    """
    (g,), (t,) = primals, tangents
    return _floor(g, floor), t * jnp.where(jnp.abs(g) < floor, jnp.nan, 1).astype(t.dtype)


def _straight_through[T](
    f: Callable[[jax.Array, T], jax.Array],
) -> Callable[[jax.Array, T], jax.Array]:
    """Return a function with the values of `f` and the derivative of the identity.

    `f` must only round or clip its first argument. Second derivatives need the derivative of the
    identity, because the derivative of `jnp.clip` is 0 beyond the bound. For example, x_hat of a
    one-hot row is at its bound, so rounding errors decide whether it is clipped. The derivative of
    x_hat must not depend on that.
    """
    wrapped = jax.custom_jvp(f, nondiff_argnums=(1,))
    wrapped.defjvp(lambda arg, primals, tangents: (f(primals[0], arg), tangents[0]))
    return wrapped


@_straight_through
def clip(v: jax.Array, bound: float | jax.Array) -> jax.Array:
    """Clip v to the range from -`bound` to `bound`.

    For example, x_hat may exceed its mathematical bound if it is recovered from a rounded y.
    """
    return jnp.clip(v, -bound, bound)


def round_to(v: jax.Array, dtype: np.dtype) -> jax.Array:
    """Cast v to `dtype`, and ensure that this rounds v.

    If a cast to a narrower dtype is followed by a cast back to a wider dtype, XLA may remove both.
    So v is rounded before the cast.
    """
    if dtype.itemsize < v.dtype.itemsize:
        v = _rounded_where_casts_are_dropped(v, dtype.name)
    return v.astype(dtype)


@_straight_through
def _rounded_where_casts_are_dropped(v: jax.Array, dtype: str) -> jax.Array:
    """Round v to values that `dtype` can represent. On a CPU, return v unchanged.

    `round_to` casts the result to `dtype`. On other platforms, XLA may remove this cast, so v must
    be rounded explicitly. On a CPU, XLA does not remove this cast. There, the explicit rounding is
    not needed, and in float16 it would double the time.
    """
    return lax.platform_dependent(v, cpu=lambda v: v, default=lambda v: _rounded(v, dtype))


@_straight_through
def _rounded(v: jax.Array, dtype: str) -> jax.Array:
    """Round v to values that `dtype` can represent, without changing v's dtype.

    Casting v to `dtype` and back is not reliable: XLA may remove both casts
    (`xla_allow_excess_precision`) in the forward pass but not in the backward pass. XLA never
    removes `reduce_precision`, but this operation flushes subnormal numbers to 0. In float16,
    subnormal numbers are common. So they are rounded to multiples of the smallest one instead.
    """
    info, own = jnp.finfo(dtype), jnp.finfo(v.dtype)
    if info.bits >= own.bits:
        return v
    rounded = lax.reduce_precision(v, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if info.nexp == own.nexp:
        return rounded
    normal, quantum = float(info.smallest_normal), float(info.smallest_subnormal)
    return jnp.where(jnp.abs(v) < normal, jnp.round(v / quantum) * quantum, rounded)


def norm_fwd(operands: Operands, spec: Spec) -> Results:
    """Compute y = norm(x), or activation(norm(x))."""
    y, stats = normalised(operands.x, operands.scale, operands.bias, spec)
    if spec.norm.activation is not None:
        y = _activation(spec)(y)
    return Results(y.astype(spec.y_dtype), stats=stats)


def norm_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Compute the backward pass of `norm_fwd`."""
    if spec.norm.activation is not None:
        _, pullback = jax.vjp(_activation(spec), _normalised_again(residuals, spec))
        (d,) = pullback(cotangents.y.astype(spec.compute_dtype))
        cotangents = cotangents._replace(y=d)
    return backward(residuals, cotangents, spec)


def add_norm_fwd(operands: Operands, spec: Spec) -> Results:
    """Compute h = x + residual and y = norm(h)."""
    h = _sum(operands.residual, operands.x, spec)
    return _with_norm_of(h, (operands.scale, operands.bias), (), spec)


def add_norm_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Compute the backward pass of `add_norm_fwd`."""
    of_norm = backward(residuals, cotangents, _unrounded(spec.last))
    dresidual = _stored(round_to(of_norm.x, spec.last.x_dtype), spec)
    return of_norm._replace(x=dresidual.astype(spec.x_dtype), residual=dresidual)


def scaled_add_norm_fwd(operands: Operands, spec: Spec) -> Results:
    """Compute h = residual + branch_scale * x and y = norm(h)."""
    return add_norm_fwd(operands._replace(x=_scaled(operands.x, operands, spec)), spec)


def scaled_add_norm_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Compute the backward pass of `scaled_add_norm_fwd`."""
    if "y" not in spec.outputs:
        assert cotangents.h is not None
        of_norm = Operands(cotangents.h.astype(spec.compute_dtype))
    else:
        of_norm = backward(residuals, cotangents, _unrounded(spec.last))
    of_h = of_norm.x
    of_scale = summed_like(residuals.branch_scale, of_h * residuals.x.astype(of_h.dtype), spec)
    return of_norm._replace(
        x=_scaled(of_h, residuals, spec).astype(spec.x_dtype),
        residual=_stored(of_h.astype(spec.norm.residual_dtype), spec),
        branch_scale=of_scale.astype(spec.norm.branch_scale_dtype),
    )


def norm_add_fwd(operands: Operands, spec: Spec) -> Results:
    """Compute y = residual + norm(x)."""
    u, stats = normalised(operands.x, operands.scale, None, spec.first)
    return Results(_sum(operands.residual, u, spec), stats=stats)


def norm_add_norm_fwd(operands: Operands, spec: Spec) -> Results:
    """Compute h = residual + norm(x) and y = norm(h)."""
    u, stats = normalised(operands.x, operands.scale, None, spec.first)
    h = _sum(operands.residual, u, spec)
    return _with_norm_of(h, (operands.next_scale, None), stats, spec)


def norm_add_norm_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Compute the backward pass of `norm_add_norm_fwd`."""
    rstd, next_rstd = residuals.stats
    first = Residuals(residuals.x, stats=(rstd,), scale=residuals.scale)
    last = Residuals(residuals.saved, stats=(next_rstd,), scale=residuals.next_scale)
    dstats = cotangents.stats
    of_last = backward(last, cotangents._replace(stats=dstats[1:]), _unrounded(spec.last))
    of_first = backward(first, Results(of_last.x, stats=dstats[:1]), spec.first)
    dresidual = _stored(of_last.x.astype(spec.norm.residual_dtype), spec)
    return of_first._replace(residual=dresidual, next_scale=of_last.scale)


def norm_gated_fwd(operands: Operands, spec: Spec) -> Results:
    """Compute y = norm(x) * activation(gate), or norm(x * activation(gate))."""
    x, a = operands.x.astype(spec.compute_dtype), _activation(spec)(operands.gate)
    of = x if spec.norm.norm_before_gate else x * a
    y, stats = normalised(of, operands.scale, None, spec.last)
    return Results((y * a if spec.norm.norm_before_gate else y).astype(spec.y_dtype), stats=stats)


def norm_gated_bwd(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Compute the backward pass of `norm_gated_fwd`."""
    x, last = residuals.saved.astype(spec.compute_dtype), _unrounded(spec.last)
    residuals = residuals._replace(saved=x)
    a, pullback = jax.vjp(_activation(spec), residuals.gate)
    if spec.norm.norm_before_gate:
        d = cotangents.y.astype(x.dtype)
        of_norm = backward(residuals, cotangents._replace(y=d * a), last)
        dx, (dgate,) = of_norm.x, pullback(d * _normalised_again(residuals, last))
    else:
        of_norm = backward(residuals._replace(saved=x * a), cotangents, last)
        dx, (dgate,) = of_norm.x * a, pullback(of_norm.x * x)
    return of_norm._replace(x=dx.astype(spec.x_dtype), gate=dgate)


FORMULAS: dict[Op, Formulas] = {
    "norm": Formulas(norm_fwd, norm_bwd),
    "add_norm": Formulas(add_norm_fwd, add_norm_bwd),
    "scaled_add_norm": Formulas(scaled_add_norm_fwd, scaled_add_norm_bwd),
    "norm_add": Formulas(norm_add_fwd),
    "norm_add_norm": Formulas(norm_add_norm_fwd, norm_add_norm_bwd),
    "norm_gated": Formulas(norm_gated_fwd, norm_gated_bwd),
}


def _with_norm_of(
    h: jax.Array, params: tuple[jax.Array | None, jax.Array | None], stats: Stats, spec: Spec
) -> Results:
    """Return the results in ``spec.outputs``: h, y = norm(h), and statistics.

    `stats` are the statistics of an earlier norm of the call. In the results, these statistics come
    before the statistics of norm(h).
    """
    if "y" not in spec.outputs:
        return Results(h=h)
    y, of_h = normalised(h, *params, spec.last)
    return Results(y.astype(spec.y_dtype), h if "h" in spec.outputs else None, (*stats, *of_h))


def _unrounded(norm: Spec) -> Spec:
    """Return the spec of a norm, changed so that its dx is not rounded.

    dx then has the arithmetic dtype.
    """
    return dataclasses.replace(norm, x_dtype=norm.compute_dtype)


def _scaled(x: jax.Array, of: Operands | Residuals, spec: Spec) -> jax.Array:
    """Return the product branch_scale * x in the arithmetic dtype."""
    scale = of.branch_scale.astype(spec.compute_dtype)
    return x.astype(spec.compute_dtype) * along_rows(scale, x, spec)


def _stored(dx: jax.Array, spec: Spec) -> jax.Array:
    """Return dx, the gradient of a residual stream, as an array that XLA stores.

    A matmul and the next norm's backward pass load dx. Suppose that dx has 16 bits. Without the
    barrier, XLA removes the next norm's cast to float32 together with the cast to 16 bits. It then
    computes dx a second time, in float32, from all arrays that dx depends on.
    """
    return dx if dx.dtype == spec.compute_dtype else lax.optimization_barrier(dx)


def backward(residuals: Residuals, cotangents: Results, spec: Spec) -> Operands:
    """Return the gradients of x, scale and bias of a norm that has no activation and no gate."""
    dh, dstats = cotangents.h, cotangents.stats
    scale, bias = residuals.scale, residuals.bias
    d = cotangents.y.astype(spec.compute_dtype)
    g, xh, (rstd, *_), z = _recovered(residuals, spec)
    dg = d if g is None else d * g
    c2 = mean_apart(dg * xh if z is None else d * z, spec)
    if dstats:
        drstd, *dmean = (jnp.expand_dims(stat, spec.axes) for stat in dstats)
        c2 = c2 + rstd * drstd / spec.cols
    dx = dg - xh * c2
    if spec.norm.subtract_mean:
        dx = dx - row_mean(dg, spec)
    dx = dx * rstd
    if dstats and dmean:
        dx = dx + dmean[0] / spec.cols
    if dh is not None:
        dx = _stored((dx + dh.astype(spec.compute_dtype)).astype(spec.x_dtype), spec)
    dscale = (
        None if scale is None else summed_like(scale, d * xh, spec).astype(spec.norm.scale_dtype)
    )
    dbias = None if bias is None else summed_like(bias, d, spec).astype(spec.norm.bias_dtype)
    return Operands(dx.astype(spec.x_dtype), scale=dscale, bias=dbias)


def normalised(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, spec: Spec
) -> tuple[jax.Array, Stats]:
    """Return y in the arithmetic dtype, and the statistics that the spec requests.

    The statistics are a tuple of arrays, without the normalised axes.
    """
    x = x.astype(spec.compute_dtype)
    mean = row_mean(x, spec) if spec.norm.subtract_mean else None
    centred = x if mean is None else x - mean
    rstd = lax.rsqrt(row_mean(jnp.square(centred), spec) + spec.norm.epsilon)
    y = centred * rstd
    if scale is not None:
        y = y * along_rows(gain(scale, spec), y, spec)
    if bias is not None:
        y = y + along_rows(effective_bias(bias, spec), y, spec)
    if not spec.has_stats:
        return y, ()
    stats = (rstd, mean) if mean is not None and spec.returns_mean else (rstd,)
    return y, tuple(jnp.squeeze(stat, spec.axes) for stat in stats)


def _sum(residual: jax.Array, y: jax.Array, spec: Spec) -> jax.Array:
    """Return residual + y, rounded to the residual's dtype. A later norm uses the rounded sum."""
    total = residual.astype(spec.compute_dtype) + y.astype(spec.compute_dtype)
    assert spec.norm.residual_dtype is not None
    return round_to(total, spec.norm.residual_dtype)


def _recovered(
    residuals: Residuals, spec: Spec
) -> tuple[jax.Array | None, jax.Array, list[jax.Array], jax.Array | None]:
    """Return G, x_hat, the statistics, and z = x_hat * G, for the elements of the saved array.

    G is None without a scale. z is None if the input is saved. The normalised axes have size 1 in
    the statistics.
    """
    saved, scale, bias = residuals.saved.astype(spec.compute_dtype), residuals.scale, residuals.bias
    along = [jnp.expand_dims(stat, spec.axes) for stat in residuals.stats]
    g = None if scale is None else along_rows(gain(scale, spec), saved, spec)
    if spec.norm.saved == "input":
        rstd, *mean = along
        return g, (saved - mean[0] if mean else saved) * rstd, along, None
    z = saved if spec.y_limit is None else clip(saved, spec.y_limit)
    if bias is not None:
        z = z - along_rows(effective_bias(bias, spec), z, spec)
    is_number = isinstance(spec.cols, int)  # `cols` may be symbolic when a program is exported
    bound = math.sqrt(spec.cols) if is_number else jnp.sqrt(jnp.asarray(spec.cols, z.dtype))
    xh = clip(z if g is None else safe_divide(z, g), bound)
    return g, xh, along, z


def _activation(spec: Spec) -> Callable[[jax.Array], jax.Array]:
    """Return the activation as a function that first casts its argument to the arithmetic dtype."""
    assert spec.norm.activation is not None
    of_wide = getattr(jax.nn, spec.norm.activation)
    return lambda a: of_wide(a.astype(spec.compute_dtype))


def _normalised_again(residuals: Residuals, spec: Spec) -> jax.Array:
    """Recompute the norm's result in the arithmetic dtype, without the activation."""
    bias, (g, xh, _, _) = residuals.bias, _recovered(residuals, spec)
    n = xh if g is None else xh * g
    return n if bias is None else n + along_rows(effective_bias(bias, spec), n, spec)
