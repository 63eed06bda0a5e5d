"""The bits of a row's results do not depend on other rows (docs/determinism.md).

So a NaN in one row does not affect the results or gradients of other rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import BASIC, FUNCTIONS, Sizes, operands_of
from pairs import on_each_implementation

ROWS = 70
KEPT = [0, 33, ROWS - 1]  # rows that a test does not change; the last one is in a partial tile
LINEAR = [name for name in BASIC if "linear" in name]
# Functions with separate parameters for each row are left out: kernels do not support them.
NAMES = [n for n in BASIC if n not in LINEAR and "of_samples" not in FUNCTIONS[n].kinds]
NAMES += ["layer_norm from input", "softmax with a bias", "add_rms_norm with a gate"]


def sizes_of(name, cols):
    if "rope" in name:  # Mosaic divides heads of these sizes among threads.
        head = 40 if cols % 40 == 0 else 64
        return Sizes((ROWS, cols // head), head)
    return Sizes((ROWS,), cols, cols)


def check(name, sizes, dtype, **options):
    function = functools.partial(FUNCTIONS[name].ours, **options)
    x, *others = operands_of(name, dtype, sizes)
    if "counts" in FUNCTIONS[name].kinds:
        others[-1] = np.ones_like(others[-1])
    values = np.array(x, np.float32)

    @jax.jit
    def results(x):
        y, vjp = jax.vjp(lambda x: function(x, *others), x)
        along = jax.tree.map(
            lambda a: jnp.sin(1 + jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), y
        )
        return *jax.tree.leaves(y), *vjp(along)

    def rows_kept(value=0.0):
        """Return the bits of the rows `KEPT`, in all results and in the gradient of x.

        All other rows of x have been set to `value`. If `value` is NaN, assert that NaN occurs in
        each of these other rows, in all results and in the gradient of x.
        """
        found = [np.asarray(a) for a in results(jnp.asarray(values, dtype))]
        if np.isnan(value).all():
            of_rows = [a[rest].astype("float32").reshape(len(rest), -1) for a in found]
            assert all(np.isnan(a).any(-1).all() for a in of_rows)
        return [a[KEPT].tobytes() for a in found]

    rest = np.setdiff1d(np.arange(ROWS), KEPT)
    expected, random = rows_kept(), np.random.default_rng(1)
    for value in (np.nan, np.inf, 1e4, random.normal(size=(len(rest), *values.shape[1:]))):
        values[rest] = value
        assert rows_kept(value) == expected


@on_each_implementation("name dtype cols", NAMES, ["float32", "bfloat16", "float16"], [256, 1000])
def test_other_rows_do_not_matter(name, dtype, cols, implementation):
    check(name, sizes_of(name, cols), dtype, implementation=implementation)


ROWS_ALONE = ("linear_softmax_cross_entropy of rows", "linear_log_prob_and_entropy")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*ROWS_ALONE, "rms_norm_linear silu"])
def test_other_rows_do_not_matter_to_linear_layers(name, dtype):
    """Rows of linear layers are independent, too. XLA computes the matmuls."""
    check(name, Sizes((ROWS,), 128, 256), dtype)
