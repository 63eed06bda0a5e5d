"""rms_norm_gated in float64 numpy, with derived bounds, and in plain jnp; what its tests share."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from reference import SAFETY, Norm, activated, arithmetic, assert_within, exact, rounding
from specs import build_spec, changed

from benchmarks import contract
from jaxnorm_kernels import xla

ACTIVATIONS = ("silu", "gelu", "relu", "leaky_relu", "sigmoid")


def plain(x, gate, scale=None, *, norm_before_gate=True, activation="silu", epsilon=1e-6):
    """In jnp, in the dtype of x and the gate."""
    a = getattr(jax.nn, activation)(gate)
    t = x if norm_before_gate else x * a
    n = t / jnp.sqrt((t**2).mean(-1, keepdims=True) + epsilon)
    n = n if scale is None else n * scale
    return n * a if norm_before_gate else n


@dataclasses.dataclass
class GatedNorm:
    """Rows (M, N), their gates, the gradients, and the bounds of all, from exact float64 inputs."""

    x: np.ndarray
    gate: np.ndarray
    gain: np.ndarray  # scale + scale_offset, (N,)
    d: np.ndarray  # cotangent of y, (M, N)
    norm_before_gate: bool
    activation: str
    dtypes: tuple[str, str, str]  # of x, of the gate and of y
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        self.u = arithmetic(*self.dtypes)
        self.a, self.slope, self.a_error, self.slope_error = activated(
            self.activation, self.gate, self.u
        )
        before = self.norm_before_gate
        wide = "float64" if "float64" in self.dtypes else "float32"
        self.norm = Norm(
            self.x if before else self.x * self.a,
            self.gain,
            np.zeros(self.x.shape[-1]),
            self.d * self.a if before else self.d,
            False,
            self.epsilon,
            "input",
            wide,  # no result of the norm's own is rounded
            wide,
        )
        if before:
            self.y, self.dx = self.norm.y * self.a, self.norm.dx
            self.dgate = self.d * self.norm.y * self.slope
        else:
            self.y, self.dx = self.norm.y, self.norm.dx * self.a
            self.dgate = self.norm.dx * self.x * self.slope
        self.dscale = self.norm.dscale

    def bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of y, dx, dgate and dscale, this one's as a sum: before it is stored."""
        norm, u, few = self.norm, self.u, 8 * self.u
        n, dt, dscale = norm.y_bound(), *norm.gradient_bounds()[:2]
        if self.norm_before_gate:
            y = np.abs(self.a) * n + (np.abs(norm.y) + n) * self.a_error
            # The norm's cotangent is dy a, of which its gradients are linear.
            error = np.abs(self.d) * self.a_error + u * np.abs(norm.d)
            dx = dt + self._of_cotangent(error)
            dscale = dscale + np.sum(error * np.abs(norm.xh), 0)
            dgate = n * np.abs(self.slope) + (np.abs(norm.y) + n) * self.slope_error
            dgate = np.abs(self.d) * dgate
        else:
            t = np.abs(self.x) * self.a_error + u * np.abs(norm.x)
            # xh = t r, and r errs by the mean of xh r times t's error, as a part of it.
            of_r = np.mean(np.abs(norm.xh) * norm.r * t, -1, keepdims=True)
            xh = norm.r * t + np.abs(norm.xh) * of_r
            y = n + np.abs(norm.gain) * xh
            c2 = np.mean(np.abs(self.d * norm.gain) * xh, -1, keepdims=True)
            dt = dt + np.abs(norm.dx) * of_r
            dt = dt + norm.r * (xh * np.abs(norm.c2) + (np.abs(norm.xh) + xh) * c2)
            dscale = dscale + np.sum(np.abs(self.d) * xh, 0)
            dx = np.abs(self.a) * dt + (np.abs(norm.dx) + dt) * self.a_error
            dgate = dt * np.abs(self.slope) + (np.abs(norm.dx) + dt) * self.slope_error
            dgate = np.abs(self.x) * dgate
        exact_of = (self.y, self.dx, self.dgate)
        of_x, of_gate, of_y = self.dtypes
        rows = [
            bound + few * np.abs(value) + rounding(np.abs(value) + bound, dtype)
            for bound, value, dtype in zip((y, dx, dgate), exact_of, (of_y, of_x, of_gate))
        ]
        return *rows, dscale

    def _of_cotangent(self, error: np.ndarray) -> np.ndarray:
        """What an error of the norm's cotangent adds to that of its gradient of x."""
        norm, error = self.norm, error * np.abs(self.gain)
        c2 = np.mean(error * np.abs(norm.xh), -1, keepdims=True)
        return norm.r * (error + np.abs(norm.xh) * c2) * (1 + SAFETY * self.u)


def reference_of(x, gate, scale, d, *, y_dtype, scale_offset=0.0, epsilon=1e-6, **options):
    """Of arrays as a call gets them, seen as rows."""
    cols = x.shape[-1]
    rows = (exact(a).reshape(-1, cols) for a in (x, gate, d))
    x_rows, gate_rows, d_rows = rows
    return GatedNorm(
        x_rows,
        gate_rows,
        np.ones(cols) if scale is None else exact(scale) + scale_offset,
        d_rows,
        **{"norm_before_gate": True, "activation": "silu", **options},
        dtypes=(x.dtype.name, gate.dtype.name, y_dtype),
        epsilon=epsilon,
    )


# ------------------------------------------------------------------------- passes of the contract


def make_spec(direction, rows, cols, mix, **given):
    """`mix`: dtypes of x, of the gate and of y."""
    x, gate, y = mix
    options = {"scale_dtype": np.dtype("float32"), "norm_before_gate": True, "activation": "silu"}
    options |= given
    return build_spec(
        "norm_gated",
        direction,
        rows,
        cols,
        x,
        y,
        epsilon=1e-6,
        saved="input",
        gate_dtype=gate,
        want_stats=direction == "fwd",
        **options,
    )


def types_of(spec):
    """Of the operands of a pass."""

    def array(shape, dtype):
        return None if dtype is None else jax.ShapeDtypeStruct(shape, dtype)

    rows = spec.rows, spec.cols
    x, gate, dy = (
        array(rows, dtype) for dtype in (spec.x_dtype, spec.norm.gate_dtype, spec.y_dtype)
    )
    scale = array(_scale_shape(spec), spec.norm.scale_dtype)
    if spec.direction == "fwd":
        return x, gate, scale
    return x, (array(rows[:1], np.dtype("float32")),), gate, scale, dy


def make_operands(spec):
    """x, gate, scale and dy."""
    rng = np.random.default_rng(0)
    shape, scale = (spec.rows, spec.cols), None
    x, gate, dy = (
        jnp.asarray((deviation * rng.normal(size=shape)).astype(dtype))
        for dtype, deviation in ((spec.x_dtype, 1), (spec.norm.gate_dtype, 2), (spec.y_dtype, 1))
    )
    if spec.norm.scale_dtype is not None:
        scale = jnp.asarray(1 + 0.3 * rng.normal(size=_scale_shape(spec)), spec.norm.scale_dtype)
    return x, gate, scale, dy


def _scale_shape(spec):
    return (spec.cols,) if spec.norm.scale_groups == 1 else (spec.norm.scale_groups, spec.cols)


def references_of(spec, x, gate, scale, dy):
    """For each group of rows, which they are, and what is expected of them."""
    rows = spec.rows // spec.groups
    for group in range(spec.groups):
        at = np.s_[group * rows : (group + 1) * rows]
        of_group = scale if scale is None or spec.groups == 1 else scale[group]
        options = {
            "norm_before_gate": spec.norm.norm_before_gate,
            "activation": spec.norm.activation,
        }
        options |= {"scale_offset": spec.norm.scale_offset, "y_dtype": spec.y_dtype.name}
        yield at, reference_of(x[at], gate[at], of_group, dy[at], **options)


def check_forward(call, spec):
    """``call(spec, *operands)`` is a pass of the contract."""
    x, gate, scale, dy = make_operands(spec)
    y, (rstd,) = call(spec, x, gate, scale)
    assert y.dtype == spec.y_dtype
    for at, ref in references_of(spec, x, gate, scale, dy):
        assert_within(y[at], ref.y, ref.bounds()[0])
        few = SAFETY * (math.sqrt(spec.cols) + 4) * ref.u
        np.testing.assert_allclose(exact(rstd)[at], ref.norm.r[:, 0], rtol=few)


def check_backward(call, spec):
    """The same of a backward."""
    x, gate, scale, dy = make_operands(spec)
    forward = changed(spec, direction="fwd", want_stats=True)
    _, stats = jax.jit(functools.partial(contract.call, xla, forward))(x, gate, scale)
    dx, dgate, dscale = call(spec, x, stats, gate, scale, dy)
    assert (dx.dtype, dgate.dtype) == (spec.x_dtype, spec.norm.gate_dtype)
    assert (dscale is None) == (scale is None)
    for group, (at, ref) in enumerate(references_of(spec, x, gate, scale, dy)):
        _, dx_bound, dgate_bound, dscale_bound = ref.bounds()
        assert_within(dx[at], ref.dx, dx_bound)
        assert_within(dgate[at], ref.dgate, dgate_bound)
        if scale is not None:
            of_group = dscale if spec.groups == 1 else dscale[group]
            assert of_group.dtype == scale.dtype
            stored = rounding(np.abs(ref.dscale) + dscale_bound, scale.dtype.name)
            assert_within(of_group, ref.dscale, dscale_bound + stored)
