"""A norm and an activation after it against float64 numpy: Triton's interpreter, or a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs import INTERPRETED
from pairs import pairwise
from test_norm import normal
from test_residuals import check_backward, check_norm, make_spec, parameters
from test_schedules import SCHEDULES, make_schedule

import jaxnorm
from benchmarks import contract

pytestmark = pytest.mark.triton

NORMS, ACTIVATIONS = ("layer_norm", "rms_norm"), ("silu", "gelu", "relu")
# x, parameters, y
MIXES = [
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "float32", "float16"),
]
CHANGES = [
    {"scale_dtype": None},
    {"bias_dtype": None},
    {"scale_offset": 1.0},
    {"scale_groups": 3, "bias_groups": 3},
    {"adds_dh": True},
]


@pytest.fixture
def call(monkeypatch):
    """``call(*operands, spec=spec)`` runs that pass, by the schedule of a name or of the tables."""
    from jaxnorm_kernels import triton

    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)

    def run(*operands, spec, schedule=None):
        assert triton.why_unsupported(spec) is None
        options = {} if schedule is None else {"schedule": make_schedule(schedule)}
        return contract.call(triton, spec, *operands, **options)

    return run


def check(call, norm, mix, schedule=None, **given):
    """Both passes."""
    call = functools.partial(call, schedule=schedule)
    x_dtype, parameter, y_dtype = mix
    given = {"activation": "silu", **given}
    adds_dh = given.pop("adds_dh", False)
    spec = make_spec("norm", x_dtype, x_dtype, parameter, y_dtype, "input", norm, **given)
    check_backward(call, spec, adds_dh)
    if not adds_dh:
        x, params = normal((spec.rows, spec.cols), x_dtype, 0, shift=0.3), parameters(spec)
        check_norm(*call(x, *params, spec=spec), spec, x, *params)


@pytest.mark.parametrize(
    ("schedule", "norm", "mix", "activation"),
    pairwise([None, *SCHEDULES], NORMS, MIXES, ACTIVATIONS),
    ids=str,
)
def test_values_and_gradients(schedule, norm, mix, activation, call):
    check(call, norm, mix, schedule, activation=activation)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_variants(change, call):
    check(call, "layer_norm", MIXES[1], **change)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.usefixtures("call")
def test_columns_beyond_a_row(activation):
    """Rows whose numbers are as one: columns that fill a tile, of which x_hat is huge, add none."""
    x = jnp.full((9, 100), 2.0**60, jnp.float32)
    norm = functools.partial(jaxnorm.layer_norm, activation=activation, implementation="triton")
    y, vjp = jax.vjp(norm, x)
    (dx,) = vjp(jnp.ones_like(x))
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(dx, 0)


@pytest.mark.parametrize("batched", ["x", "x and parameters"])
@pytest.mark.usefixtures("call")
def test_as_users_call_it(batched):
    """Under vmap parameters belong to groups of rows."""
    x = normal((3, 2, 5, 48), "float32", 0)
    scale, bias = normal((3, 48), "bfloat16", 1, 0.3, 1.0), normal((3, 48), "float32", 2, 0.3)
    in_axes = (0, *[0 if "param" in batched else None] * 2)
    operands = (x, scale, bias) if "param" in batched else (x, scale[0], bias[0])

    def run(implementation):
        def loss(*operands):
            options = {"activation": "silu", "implementation": implementation}
            return jnp.sum(jnp.sin(3 * jaxnorm.layer_norm(*operands, **options)))

        return jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes)(*operands)

    for ours, theirs in zip(run("triton"), run("xla"), strict=True):
        assert ours.dtype == theirs.dtype
        # Sums of 10 rows of terms that are at most a few times as large; rounded where both are.
        u = 2.0**-8 if ours.dtype == jnp.bfloat16 else 2.0**-15
        bound = u * np.abs(theirs.astype("float32")).max()
        np.testing.assert_allclose(*(a.astype("float32") for a in (ours, theirs)), 0, bound)
