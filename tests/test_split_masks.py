"""Masks, biases and parameters of size 1 along axes that a mesh splits.

Other operands of the same call have the full size along these axes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import eight_devices
from pairs import pairwise
from reference import of_roundings

import jaxnorm

used = pytest.mark.usefixtures("x64", "quick_to_compile")
pytestmark = [pytest.mark.oldest_jax, eight_devices, used]

SHAPE, AXES = (4, 4, 8), (1, 2)
RNG = np.random.default_rng(0)
X = RNG.normal(size=SHAPE)
MASK, BIAS = RNG.random(SHAPE) < 0.7, RNG.normal(size=SHAPE)
LABELS = np.arange(4, dtype=np.int32) * 9

PARTS = [SHAPE, (4, 4, 1), (4, 1, 8), (1, 4, 8), (1, 4, 1), (1, 1, 8), (4, 1, 1), (1, 1, 1)]
SPECS = [P(None, "a", "b"), P(None, ("a", "b")), P("a", "b"), P("a", None, "b"), P(None, "a")]


def part(a, shape):
    return a[tuple(slice(size) for size in shape)]


FUNCTIONS = {
    "softmax": lambda x, mask, bias: jaxnorm.softmax(x, AXES, mask, bias=bias),
    "log_softmax": lambda x, mask, bias: jnp.where(
        mask, jaxnorm.log_softmax(x, AXES, mask, bias=bias), 0
    ),
    "cross_entropy": lambda x, mask, bias: jaxnorm.softmax_cross_entropy_with_integer_labels(
        x, LABELS, AXES, mask
    ),
    "log_prob": lambda x, mask, bias: jaxnorm.log_prob_and_entropy(x, LABELS, AXES, mask),
    "rms_norm": lambda x, mask, bias: jaxnorm.rms_norm(x, bias, axis=AXES),
    "layer_norm": lambda x, mask, bias: jaxnorm.layer_norm(x, bias, bias, axis=AXES),
}


KINDS = [AxisType.Explicit, AxisType.Auto]


@pytest.mark.parametrize(
    ("name", "mask_shape", "bias_shape", "spec", "kind"),
    pairwise([*FUNCTIONS], PARTS, PARTS, SPECS, KINDS),
)
def test_values_and_derivatives(name, mask_shape, bias_shape, spec, kind):
    """Results and derivatives equal those of one device, up to about a hundred roundings.

    The bound is absolute, not relative. The terms that are rounded have magnitudes of about 1, but
    a result may be much smaller: in the softmax's gradient, terms may cancel.
    """
    mask, bias = part(MASK, mask_shape), part(BIAS, bias_shape)

    @jax.jit
    def run(x):
        def function(x, bias):
            return FUNCTIONS[name](x, mask, bias)

        b = jnp.asarray(bias)
        y, pullback = jax.vjp(function, x, b)
        along = jax.jvp(function, (x, b), (jnp.cos(x), jnp.cos(b)))[1]
        return y, pullback(jax.tree.map(jnp.sin, y)), along

    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    expected = run(jnp.asarray(X))
    with jax.set_mesh(mesh):
        results = run(jax.device_put(X, NamedSharding(mesh, spec)))
    for ours, theirs in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        bound = of_roundings(1024, "float64", np.abs(theirs).max(initial=1))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)
