"""Norms with a residual where some array is float64: then all arithmetic is float64.

`test_norm` tests values and gradients of such calls.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import FUNCTIONS, scalar
from norms import normal
from program_error import assert_computes
from reference import DTYPES
from specs import build_spec

import jaxnorm
from jaxnorm_kernels import mosaic

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("x64", "quick_to_compile")]

SHAPE = (5, 16)
# Dtypes of x, residual and y, of which one or all are float64. They have every pair of dtypes of
# two of these arrays. A function with a single norm has fewer.
MIXES = [
    mix
    for mix in itertools.product((*DTYPES, "float64"), repeat=3)
    if mix.count("float64") in {1, 3}
]
ALONE = [mix for mix in MIXES if mix.count("float64") == 1 and "float16" not in mix]


@pytest.mark.parametrize(
    ("name", "mix", "save"),
    [
        pytest.param(name, mix, ("output", "input")[i % 2], id=f"{name}-{' '.join(mix)}")
        for name, mixes in (("rms_norm_add_rms_norm", MIXES), ("add_rms_norm", ALONE))
        for i, mix in enumerate(mixes)
    ],
)
def test_derivatives(name, mix, save):
    """Tangents, and derivatives of gradients, have the accuracy of float64 arithmetic."""
    x_dtype, r_dtype, y_dtype = mix
    operands = [normal(SHAPE, x_dtype, 0), normal(SHAPE, r_dtype, 1)]
    operands += [
        normal(SHAPE[1:], "float32", seed, 0.2, 1.0)
        for seed in range(2, len(FUNCTIONS[name].kinds.split()))
    ]
    along = tuple(map(jnp.cos, operands))

    def ours(*operands):
        return getattr(jaxnorm, name)(*operands, dtype=y_dtype, save=save)

    def plain(*operands):
        y, h = FUNCTIONS[name].plain(*(a.astype("float64") for a in operands))
        return y.astype(y_dtype), h.astype(r_dtype)

    def derivatives(function):
        def wide(*operands):
            return [a.astype("float64") for a in function(*operands)]

        gradient = jax.grad(scalar(wide), range(len(operands)))
        return jax.jit(lambda *a: (jax.jvp(function, a, along)[1], jax.jvp(gradient, a, along)[1]))

    got = derivatives(ours)(*operands)
    assert_computes(got, derivatives(plain), *operands, like=derivatives(ours))


def test_no_kernel_takes_a_norm_of_such_a_call():
    """The norms inside a float64 call run no kernel, even if their own arrays are float32.

    The reason is that the norms compute their statistics in float64.
    """
    float32, float64 = np.dtype("float32"), np.dtype("float64")
    spec = build_spec("norm_add_norm", "bwd", 256, 1024, float32, float64, residual_dtype=float32)
    assert spec.first.x_dtype == spec.first.y_dtype == float32
    assert spec.first.compute_dtype == spec.last.compute_dtype == float64
    assert "an array is float64" in str(mosaic.why_unsupported(spec.first))
