"""h = residual + branch_scale x, y = norm(h): in float64 numpy, with derived bounds; its passes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from reference import SAFETY, Norm, arithmetic, assert_within, exact, rounding
from specs import build_spec, changed

from benchmarks import contract
from jaxnorm_kernels import xla

PARAMETERS = ("scale", "bias", "branch_scale")


@dataclasses.dataclass
class ScaledSum:
    """Rows (M, N), the norm of h as it was stored, and gradients of all, with their bounds."""

    x: np.ndarray
    residual: np.ndarray
    h: np.ndarray
    gain: np.ndarray  # scale + scale_offset, (N,) as the two that follow, or (M, N)
    bias: np.ndarray
    branch_scale: np.ndarray
    dy: np.ndarray
    dh: np.ndarray
    subtract_mean: bool
    saved: str
    dtypes: tuple[str, str, str]  # of x, of the residual and of y
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        self.u = arithmetic(*self.dtypes)
        # The norm's gradient is rounded where it is stored: in what becomes of it.
        wide = "float64" if "float64" in self.dtypes else "float32"
        options = self.subtract_mean, self.epsilon, self.saved, wide, self.dtypes[2]
        self.norm = Norm(self.h, self.gain, self.bias, self.dy, *options)
        self.norm.u = self.u
        self.y, self.dresidual = self.norm.y, self.norm.dx + self.dh
        self.dx = self.branch_scale * self.dresidual
        self.dscale, self.dbias = self.norm.dscale, self.norm.dbias
        self.dbranch_scale = np.sum(self.dresidual * self.x, 0)

    def check_h(self, h) -> None:
        """A product and a sum, then it is stored."""
        product = self.branch_scale * self.x
        expected = self.residual + product
        error = 2 * self.u * (np.abs(product) + np.abs(expected))
        assert h.dtype == self.dtypes[1]
        assert_within(h, expected, error + rounding(np.abs(expected) + error, self.dtypes[1]))

    def check_y(self, y) -> None:
        assert y.dtype == self.dtypes[2]
        assert_within(y, self.y, self.norm.y_bound())

    def check_rstd(self, rstd) -> None:
        """A mean that is off adds its square to the variance."""
        walk = SAFETY * self.u * (math.sqrt(self.h.shape[-1]) + 4)
        mean = np.abs(self.h).max(-1) * walk * self.subtract_mean
        r = self.norm.r[:, 0]
        assert_within(rstd, r, r * (walk + np.square(mean * r)))

    def check_rows(self, dx, dresidual) -> None:
        bound = self._bound()
        product, of_x = np.abs(self.dx), np.abs(self.branch_scale) * bound
        of_x = of_x + 2 * self.u * product
        for actual, expected, error, dtype in zip(
            (dx, dresidual), (self.dx, self.dresidual), (of_x, bound), self.dtypes
        ):
            assert actual.dtype == dtype
            assert_within(actual, expected, error + rounding(np.abs(expected) + error, dtype))

    def sums(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The parameters' gradients and what each errs by, before it is stored."""
        _, dscale, dbias = self.norm.gradient_bounds()
        walk = SAFETY * self.u * (math.sqrt(len(self.x)) + 2)
        of_x = np.sum(self._bound() * np.abs(self.x), 0)
        of_x = of_x + walk * np.sum(np.abs(self.dresidual * self.x), 0)
        return {
            "scale": (self.dscale, dscale),
            "bias": (self.dbias, dbias),
            "branch_scale": (self.dbranch_scale, of_x),
        }

    def _bound(self) -> np.ndarray:
        """Of dresidual, before it is stored."""
        few = 8 * self.u * (np.abs(self.dresidual) + np.abs(self.dh))
        return self.norm.gradient_bounds()[0] + few


# ------------------------------------------------------------------------- passes of the contract


def make_spec(direction, rows, cols, mix, kind="layer_norm", groups=(1, 1, 1), **given):
    """`mix`: dtypes of x, of the residual and of y; `groups`: of scale, bias and branch_scale."""
    x, residual, y = mix
    float32 = np.dtype("float32")
    of_layer = {"bias_dtype": float32, "subtract_mean": True} if kind == "layer_norm" else {}
    options = {"scale_dtype": float32, "branch_scale_dtype": float32, **of_layer, **given}
    options |= {f"{name}_groups": n for name, n in zip(PARAMETERS, groups)}
    return build_spec(
        "scaled_add_norm",
        direction,
        rows,
        cols,
        x,
        y,
        epsilon=1e-6,
        residual_dtype=residual,
        want_stats=direction == "fwd",
        adds_dh=direction == "bwd",
        **options,
    )


def types_of(spec):
    """Of the operands of a pass."""
    rows = spec.rows, spec.cols

    def array(dtype, shape=rows):
        return None if dtype is None else jax.ShapeDtypeStruct(shape, dtype)

    params = (array(spec.dtype(name), _shape(spec, name)) for name in PARAMETERS)
    x, residual, dy = map(array, (spec.x_dtype, spec.norm.residual_dtype, spec.y_dtype))
    if spec.direction == "fwd":
        return x, residual, *params
    stats = (array(np.dtype("float32"), rows[:1]),) * (1 + spec.returns_mean)
    return x, dy if spec.norm.saved == "output" else residual, stats, *params, dy, residual


def make_operands(spec):
    """x, residual, scale, bias, branch_scale, dy, dh; by their names."""
    rng = np.random.default_rng(0)
    arrays = {"x": spec.x_dtype, "residual": spec.norm.residual_dtype}
    arrays |= {"dy": spec.y_dtype, "dh": spec.norm.residual_dtype}
    shape = spec.rows, spec.cols
    rows = {n: jnp.asarray(rng.normal(size=shape).astype(t)) for n, t in arrays.items()}
    centres = {"scale": 1.0, "bias": 0.0, "branch_scale": 0.5}
    params = {
        name: None
        if (dtype := spec.dtype(name)) is None
        else jnp.asarray((centre + 0.3 * rng.normal(size=_shape(spec, name))).astype(dtype))
        for name, centre in centres.items()
    }
    return rows | params


def _shape(spec, name):
    groups = getattr(spec.norm, f"{name}_groups")
    return (spec.cols,) if groups == 1 else (groups, spec.cols)


def references_of(spec, given, h):
    """For each group of rows, which they are, and what is expected of them."""
    size, absent = spec.rows // spec.groups, {"scale": 1.0, "bias": 0.0}
    for group in range(spec.groups):
        at = np.s_[group * size : (group + 1) * size]
        params = [
            np.full(spec.cols, absent[name])
            if given[name] is None
            else exact(given[name]).reshape(-1, spec.cols)[group % _groups(spec, name)]
            for name in PARAMETERS
        ]
        params[0] = params[0] + (spec.norm.scale_offset if given["scale"] is not None else 0)
        rows = [exact(a)[at] for a in (given["x"], given["residual"], h)]
        cotangents = [exact(given[name])[at] for name in ("dy", "dh")]
        dtypes = (spec.x_dtype.name, spec.norm.residual_dtype.name, spec.y_dtype.name)
        options = spec.norm.subtract_mean, spec.norm.saved, dtypes, spec.norm.epsilon
        yield at, ScaledSum(*rows, *params, *cotangents, *options)


def _groups(spec, name):
    return getattr(spec.norm, f"{name}_groups")


def check_forward(call, spec):
    """``call(spec, *operands)`` is a pass of the contract."""
    given = make_operands(spec)
    operands = [given[name] for name in spec.operation.operands]
    y, h, (rstd, *_) = call(spec, *operands)
    for at, ref in references_of(spec, given, h):
        ref.check_h(h[at])
        ref.check_y(y[at])
        ref.check_rstd(rstd[at])


def check_backward(call, spec):
    """The same of a backward."""
    given = make_operands(spec)
    forward = changed(spec, direction="fwd", want_stats=True, adds_dh=False)
    operands = [given[name] for name in spec.operation.operands]
    y, h, stats = jax.jit(functools.partial(contract.call, xla, forward))(*operands)
    params = [given[name] for name in PARAMETERS]
    saved = y if spec.norm.saved == "output" else h
    results = call(spec, given["x"], saved, stats, *params, given["dy"], given["dh"])
    dx, dresidual, *gradients = results
    sums = {name: [] for name in PARAMETERS}
    for at, ref in references_of(spec, given, h):
        ref.check_rows(dx[at], dresidual[at])
        for name, of_group in ref.sums().items():
            sums[name].append(of_group)
    for name, gradient in zip(PARAMETERS, gradients):
        parameter = given[name]
        if parameter is None:
            assert gradient is None
            continue
        assert (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
        values, bounds = map(np.stack, zip(*sums[name]))
        if _groups(spec, name) == 1:  # The sum of those of all groups.
            values, bounds = values.sum(0), bounds.sum(0)
            bounds = bounds + SAFETY * 2.0**-24 * (math.sqrt(spec.groups) + 2) * np.abs(values)
        values, bounds = values.reshape(parameter.shape), bounds.reshape(parameter.shape)
        stored = rounding(np.abs(values) + bounds, parameter.dtype.name)
        assert_within(gradient, values, bounds + stored)
