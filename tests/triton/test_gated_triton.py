"""A norm and a gate against float64 numpy: Triton's interpreter, or a GPU."""

import functools

import gated_cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gated_cases import ACTIVATIONS, make_spec
from needs import INTERPRETED
from pairs import pairwise
from test_norm import normal
from test_schedules import SCHEDULES, make_schedule

import jaxnorm
from benchmarks import contract

pytestmark = pytest.mark.triton

BF16, F16, F32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))
SHAPE = (9, 100)
# x, gate, y
MIXES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16), (F32, BF16, F16)]
CHANGES = [
    {"scale_dtype": None},
    {"scale_offset": 1.0},
    {"scale_dtype": BF16},
    {"scale_groups": 3},
]


@pytest.fixture
def call(monkeypatch):
    """``call(spec, *operands)`` runs that pass, by the schedule of a name or of the tables."""
    from jaxnorm_kernels import triton

    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.install(monkeypatch)

    def run(spec, *operands, schedule=None):
        assert triton.why_unsupported(spec) is None
        options = {} if schedule is None else {"schedule": make_schedule(schedule)}
        return contract.call(triton, spec, *operands, **options)

    return run


def check(call, mix, schedule=None, **given):
    """Both passes."""
    call = functools.partial(call, schedule=schedule)
    gated_cases.check_forward(call, make_spec("fwd", *SHAPE, mix, **given))
    gated_cases.check_backward(call, make_spec("bwd", *SHAPE, mix, **given))


@pytest.mark.parametrize(
    ("schedule", "mix", "before", "activation"),
    pairwise([None, *SCHEDULES], MIXES, [True, False], ACTIVATIONS),
    ids=str,
)
def test_values_and_gradients(schedule, mix, before, activation, call):
    check(call, mix, schedule, norm_before_gate=before, activation=activation)


@pytest.mark.parametrize("before", [True, False], ids=["norm first", "gate first"])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_variants(change, before, call):
    check(call, MIXES[1], norm_before_gate=before, **change)


@pytest.mark.parametrize("batched", ["x", "x and scale"])
@pytest.mark.parametrize("before", [True, False], ids=["norm first", "gate first"])
@pytest.mark.usefixtures("call")
def test_as_users_call_it(before, batched):
    """Under vmap a scale belongs to groups of rows; gates and scales in bfloat16."""
    x, gate = normal((3, 2, 5, 48), "float32", 0), normal((3, 2, 5, 48), "bfloat16", 1)
    scale = normal((3, 48), "bfloat16", 2, 0.3, 1.0)
    in_axes = (0, 0, 0 if "scale" in batched else None)
    operands = x, gate, scale if "scale" in batched else scale[0]

    def run(implementation):
        def loss(*operands):
            options = {"norm_before_gate": before, "implementation": implementation}
            return jnp.sum(jnp.sin(3 * jaxnorm.rms_norm_gated(*operands, **options)))

        return jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes)(*operands)

    for ours, theirs in zip(run("triton"), run("xla"), strict=True):
        assert ours.dtype == theirs.dtype
        # Sums of 10 rows of terms that are at most a few times as large; rounded where both are.
        u = 2.0**-8 if ours.dtype == jnp.bfloat16 else 2.0**-15
        bound = u * np.abs(theirs.astype("float32")).max()
        np.testing.assert_allclose(*(a.astype("float32") for a in (ours, theirs)), 0, bound)
