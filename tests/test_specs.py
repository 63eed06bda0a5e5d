"""A `Spec`, the static description of a pass, has only options of its family of operations.

For example, the spec of a norm has no options that only losses have.
"""

import numpy as np
import pytest
from specs import build_spec

from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm_kernels.operations import OPERATIONS
from jaxnorm_kernels.specs import LossOptions

F32 = np.dtype(np.float32)
OPS = {"norm": "add_norm", "softmax": "log_softmax", "loss": "cross_entropy"}


def test_options_are_those_of_the_family():
    spec = build_spec("add_norm", "fwd", 4, 128, F32, F32)
    with pytest.raises(TypeError, match="add_norm has NormOptions: got LossOptions"):
        spec.replaced(options=LossOptions())


@pytest.mark.parametrize("of", OPS)
def test_a_question_for_another_family_raises(of):
    """A question that every family answers, such as `Spec.has`, does not raise."""
    spec = build_spec(OPS[of], "bwd", 4, 128, F32, F32)
    for family in OPS:
        if family == of:
            getattr(spec, family)
        else:
            with pytest.raises(TypeError, match=f"a {OPS[of]} has no {family.title()}Options"):
                getattr(spec, family)
    for operand in ("bias", "table", "mask", "logits_bias", "logits_scale", "positions"):
        assert not spec.has(operand)
    assert not spec.is_causal


def test_equal_calls_are_one_object():
    """Calls stay equal after more other calls than the caches of calls hold."""

    def call(rows):
        spec = build_spec("softmax", "fwd", rows, 128, F32, F32)
        return Call.of("softmax", spec, RowView.of((rows, 128), (1,)), None)

    first = call(1)
    for rows in range(2, 5000):
        call(rows)
    assert call(1) is first


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_norms_of_a_call(op):
    """`Spec.norms` has a spec for each norm of the call.

    `Spec.last` is the spec of the last norm. For a call without a norm, `Spec.last` is the call's
    spec itself.
    """
    spec = build_spec(op, "bwd", 4, 128, F32, F32)
    norms = spec.norms
    assert len(norms) == len(OPERATIONS[op].norms)
    assert all(norm.op == "norm" for norm in norms)
    assert (spec.last is spec) == (not spec.is_norm)
