"""A `Spec` is of one family of operations, and says nothing that only another one has."""

import dataclasses

import numpy as np
import pytest

from jaxnorm_kernels.operations import OPERATIONS
from jaxnorm_kernels.specs import Spec

F32 = np.dtype(np.float32)
#: A field of each family, with a value that it may have.
OF_ONE = {
    "norm": {
        "epsilon": 1e-6,
        "scale_dtype": F32,
        "subtract_mean": True,
        "saved": "input",
        "gate_dtype": F32,
        "branch_scale_dtype": F32,
    },
    "softmax": {"causal": True, "logits_bias_dtype": F32, "masked_logit": -1e9},
    "loss": {"label_smoothing": 0.1, "z_loss": 1e-4, "padding": 3, "logit_softcap": 30.0},
}
OPS = {"norm": "add_norm", "softmax": "log_softmax", "loss": "cross_entropy"}
CASES = [(op, family, name) for op in OPS for family in OF_ONE for name in OF_ONE[family]]


@pytest.mark.parametrize(("of", "family", "name"), CASES)
def test_a_call_says_what_its_family_has(of, family, name):
    value = OF_ONE[family][name]
    spec = Spec(OPS[of], "fwd", 4, 128, F32, F32, ("y",))
    if of == family:
        assert getattr(dataclasses.replace(spec, **{name: value}), name) == value
    else:
        with pytest.raises(ValueError, match=f"{OPS[of]} has no {name}: got .*; expected "):
            dataclasses.replace(spec, **{name: value})


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_norms_of_a_call(op):
    """Of no norm, a call is its own last one."""
    spec = Spec(op, "bwd", 4, 128, F32, F32, ("y",))
    norms = spec.norms
    assert len(norms) == len(OPERATIONS[op].norms)
    assert all(norm.op == "norm" for norm in norms)
    assert (spec.last is spec) == (not spec.is_norm)
