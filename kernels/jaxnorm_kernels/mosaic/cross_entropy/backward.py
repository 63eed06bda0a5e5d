"""Backward pass of cross-entropy, and of log-probability and entropy, from the logits.

With d = dloss and p = exp(x - m - log(s)):

    dx = d (p - targets + 2 b lse p)      lse = m + log(s)      targets = (1 - a) [j = l] + a / V

With d = dlog_prob, e = dentropy and the entropy H:

    dx = d ([j = l] - p) - e p (log(p) + H)

With a scale or a cap that is the gradient of f g(x), and x - m is f (g(x) - m).

No element needs another one: each block takes a part of a row, and may write dx over x. In a row
without an entry, where log(s) = -inf, dx is 0. In one whose label is no column log(s) is NaN, and
so is dx.
"""

from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxnorm_kernels.implementation import Operands, Residuals, Results
from jaxnorm_kernels.mosaic.cross_entropy.forward import most_elements, read_label
from jaxnorm_kernels.mosaic.cross_entropy.logits import f_times, g, times_slope
from jaxnorm_kernels.mosaic.device import numerics
from jaxnorm_kernels.mosaic.device.launch import BLOCK, launch
from jaxnorm_kernels.mosaic.device.layouts import Ref, load
from jaxnorm_kernels.mosaic.device.registers import widen
from jaxnorm_kernels.mosaic.rows.units import Unit, Units
from jaxnorm_kernels.specs import Spec

# Of a block, which is a warpgroup: an SM has room for many blocks, and more units of one would take
# registers, and with these blocks, from it.
UNITS = 2


def cross_entropy_bwd(
    residuals: Residuals, cotangents: Results, spec: Spec, *, units: int = UNITS
) -> Operands:
    """The gradient of x; `units` of a block."""
    assert residuals.mask is None, "of classes: `support` refuses it"
    of_rows = Units.of(spec.cols, most_elements(spec))
    parts, units = parts_of_a_row(spec, units), min(units, of_rows.count)
    exp = numerics.exp(is_wide=spec.x_dtype.itemsize > 2)
    even = spec.label_smoothing / spec.classes
    of_rows_alone = [*residuals.stats, cotangents.y]
    if spec.returns_entropy:
        of_rows_alone += [residuals.entropy, cotangents.entropy]

    def slope_of(
        p: jax.Array, log_p: jax.Array, is_label: jax.Array, numbers: Sequence[jax.Array]
    ) -> jax.Array:
        top, log_sum, d, *of_entropy = numbers
        if of_entropy:
            entropy, e = of_entropy
            above_mean = jnp.maximum(log_p, numerics.LOWEST) + entropy
            return jnp.where(is_label, d, 0.0) - p * (d + e * above_mean)
        q = jnp.where(is_label, jnp.float32(1 - spec.label_smoothing + even), even)
        slope = p - q
        if spec.z_loss:
            slope = slope + 2 * spec.z_loss * (f_times(top, spec) + log_sum) * p
        return d * slope

    def body(x: Ref, labels: Ref, *refs: Ref) -> None:
        of_row, (dx,) = refs[: len(of_rows_alone)], refs[len(of_rows_alone) :] or (x,)
        block = lax.axis_index(BLOCK)
        row, part = lax.div(block, parts), lax.rem(block, parts)

        def write(of_block: Sequence[Unit]) -> None:
            # The logits first: the numbers of the row are small, and on their way meanwhile.
            raw = [unit.load(x, row) for unit in of_block]
            label = read_label(labels, row)
            top, log_sum, *_ = numbers = [load(ref.at[row], None) for ref in of_row]
            layout = of_block[0].layout
            for unit, value in zip(of_block, raw):
                g_x = g(widen(value, layout), spec)
                log_p = f_times(g_x - top, spec) - log_sum
                is_label = unit.columns() == label - unit.start
                slope = slope_of(exp(log_p), log_p, is_label, numbers)
                counts = lax.broadcast(log_sum != -jnp.inf, unit.shape)
                if spec.padding:
                    is_class = unit.columns() < spec.classes - unit.start
                    counts = jnp.logical_and(counts, is_class)
                gradient = times_slope(slope, g_x, spec)
                unit.store(dx, row, jnp.where(counts, gradient, 0.0))

        write([of_rows.unit(row, part * units + k) for k in range(units)])
        if of_rows.has_edges:
            pl.when(part == 0)(lambda: write(of_rows.edges(row)))

    (dx,) = launch(
        body,
        [residuals.saved, residuals.labels, *of_rows_alone],
        name=f"jaxnorm_{spec.op}_bwd",
        outputs=[] if spec.overwrites_x else [((spec.rows, spec.cols), spec.dx_dtype)],
        overwritten=int(spec.overwrites_x),
        blocks=spec.rows * parts,
        auto_barriers=False,
    )
    return Operands(dx)


def parts_of_a_row(spec: Spec, units: int = UNITS) -> int:
    """Blocks of a row."""
    return -(-Units.of(spec.cols, most_elements(spec)).count // units)
