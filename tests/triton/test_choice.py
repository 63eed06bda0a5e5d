"""The choice of Triton's kernels, and the messages if they are not available.

These tests do not need Triton.
"""

import importlib
import re
import subprocess
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from conftest import load_alone
from specs import build_spec, changed

import jaxnorm
from jaxnorm.calls import backends
from jaxnorm_kernels import mosaic
from jaxnorm_kernels.implementation import Implementation
from jaxnorm_kernels.operations import OPERATIONS
from jaxnorm_kernels.specs import Shared

BF16, F16, F32, F64 = (
    np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)
)


NORM = build_spec("norm", "bwd", 4, 128, BF16, F32, F32, F32, subtract_mean=True, want_stats=True)

CALLS = {
    "norm": NORM,
    "softmax": build_spec("softmax", "bwd", 4, 128, BF16, F32),
    "loss": build_spec("cross_entropy", "bwd", 4, 128, BF16, F32, want_stats=True),
}

ROWS = Shared(((4, True),), has_columns=True)

ROPE = {"op": "norm_rope", "subtract_mean": False, "bias_dtype": None}
ROPE |= {"table_dtype": F32, "table_rows": ROWS, "rotated": 64}

KL = {"op": "kl_divergence", "teacher_dtype": BF16}

LOSSES = ("softmax_cross_entropy_with_integer_labels", "log_prob_and_entropy", "kl_divergence")

WIDE = build_spec("norm", "bwd", 8192, 8192, BF16, BF16, F32, want_stats=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"x_dtype": F64}, "float64"),
        ({"bias_dtype": F64}, "float64"),
        ({"rows": 0}, "size 0"),
        ({"cols": 0}, "size 0"),
        ({"rows": 2**31}, "32-bit indices"),
        ({"cols": 2**31}, "32-bit indices"),
        ({"rows": "b"}, "symbolic"),
        ({"cols": 2**24}, None),
        ({"op": "softmax", "cols": 2**24}, None),
        ({"direction": "fwd", "cols": 16385}, "support no rows of this length"),
        ({"op": "cross_entropy"}, None),
        ({"op": "cross_entropy", "has_mask": True, "mask_rows": ROWS}, "no mask of classes"),
        ({"op": "cross_entropy", "rows": 2**20, "cols": 2**22}, "parts than"),
        ({"op": "cross_entropy", "rows": 2**30, "cols": 2048}, None),
        (KL, None),
        (KL | {"teacher_dtype": F64}, "float64"),
        (KL | {"has_mask": True, "mask_rows": ROWS}, "no mask of classes"),
        (KL | {"rows": 2**30, "cols": 2048}, "parts than"),
        ({"op": "softmax", "has_mask": True}, "some normalised axes but not all"),
        ({"op": "softmax", "has_mask": True, "mask_rows": ROWS}, None),
        (
            {"op": "softmax", "has_mask": True, "mask_rows": ROWS, "masked_logit": -1e9},
            "exclude masked logits",
        ),
        ({"op": "softmax", "logits_bias_dtype": BF16}, "some normalised axes but not all"),
        ({"op": "softmax", "logits_bias_dtype": F64, "logits_bias_rows": ROWS}, "float64"),
        ({"op": "softmax", "causal": True, "queries": 4}, None),
        ({"op": "softmax", "causal": True, "queries": 4, "queries_over": ("i",)}, "are sharded"),
        ({"adds_dh": True, "scale_groups": 4, "bias_groups": 4}, None),
        ({"op": "add_norm", "direction": "fwd", "residual_dtype": F32, "bias_groups": 4}, None),
        ({"op": "add_norm", "direction": "fwd", "residual_dtype": F64}, "float64"),
        ({"op": "norm_add_norm", "direction": "fwd", "residual_dtype": F32}, "only for RMSNorm"),
        (ROPE, None),
        (ROPE | {"cols": 1024, "rotated": 2, "interleaved": True, "scale_groups": 2}, None),
        (ROPE | {"cols": 1025}, "at most 1024 columns"),
        (ROPE | {"rotated": 0}, "tables of size 0"),
        (ROPE | {"table_dtype": F64}, "float64"),
        (ROPE | {"wants_tables": True}, "gradients of rotary tables"),
    ],
    ids=str,
)
def test_supports(change, reason):
    spec = CALLS[OPERATIONS[change.get("op", "norm")].family]
    refusal = load_alone("triton", "support").why_unsupported(changed(spec, **change))
    assert refusal is None if reason is None else reason in refusal


def test_needs_ampere(monkeypatch):
    support = load_alone("triton", "support")
    for capability, refused in [(75, True), (80, False), (89, False), (None, False)]:
        monkeypatch.setattr(support, "local_capability", lambda c=capability: c)
        assert ("8.0 (Ampere)" in (support.why_unsupported(NORM) or "")) == refused


def test_not_imported_unless_mosaic_leaves_a_call():
    assert backends._CANDIDATES["cuda"] == ("mosaic", "triton")
    program = "import jaxnorm, sys; jaxnorm.implementation_for('softmax', (64, 64), 'float32', "
    program += "platform='cuda'); print([m for m in sys.modules "
    program += "if m.split('.')[0] in ('triton', 'jax_triton') or 'kernels.triton' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"[]\n"


def test_without_jaxs_cuda_plugin_the_default_is_xla(monkeypatch):
    support = load_alone("triton", "support")
    monkeypatch.setattr(support, "can_lower", lambda: True)
    assert support.why_not_default(WIDE) is None
    monkeypatch.setattr(support, "can_lower", lambda: False)
    assert "CUDA plugin" in support.why_not_default(WIDE)


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("classes", [30522, 50257, 50265, 51865])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_ampere_losses_over_any_vocabulary_run_kernels(function, classes, dtype, monkeypatch):
    """Triton's kernels are the default for vocabularies that are not a multiple of 16 bytes.

    The numbers of classes are those of BERT, GPT-2, RoBERTa and Whisper.
    """
    module, triton = types.ModuleType("triton"), load_alone("triton", "support")
    module.IMPLEMENTATION = Implementation(
        None, None, triton.why_unsupported, triton.why_not_default, caveat=triton.caveat
    )
    monkeypatch.setitem(sys.modules, "jaxnorm_kernels.triton", module)
    monkeypatch.setattr(backends, "_failures", {})
    monkeypatch.setattr(triton, "can_lower", lambda: True)
    for support in (triton, mosaic.support):
        monkeypatch.setattr(support, "local_capability", lambda: 80)
    plan = jaxnorm.implementation_for(function, (8192, classes), dtype, platform="cuda")
    assert (plan.forward.name, plan.backward.name) == ("triton", "triton"), plan


@pytest.mark.triton
def test_the_default_where_mosaic_leaves_a_call(monkeypatch):
    """If Mosaic does not support a backward, Triton's kernel is the default.

    In this test, the length of the norm's rows is not a multiple of 16 bytes.
    """
    from jaxnorm_kernels.triton import support

    monkeypatch.setattr(support, "can_lower", lambda: True)
    plan = jaxnorm.implementation_for("rms_norm", (8192, 300001), BF16, platform="cuda")
    assert (plan.forward.name, plan.backward.name) == ("xla", "triton")
    reason = "the default for norm bwd on cuda; .*; mosaic: .* multiple of 16 bytes"
    assert re.search(reason, str(plan))
    assert re.search("forward: .* support no rows of this length", str(plan))


@pytest.fixture
def installed(monkeypatch):
    """Simulate that these versions are installed; None means that a package is missing."""
    kept = {m: sys.modules.pop(m) for m in [*sys.modules] if m.startswith("jaxnorm_kernels.triton")}

    def install(**versions):
        modules = dict.fromkeys(("triton", "jax_triton"))
        modules |= {name: types.ModuleType(name) for name in versions}
        if "jax_triton" in versions:
            triton_lib = modules["jax_triton.triton_lib"] = types.ModuleType("triton_lib")
            triton_lib.triton_kernel_call_p = None
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)

    yield install
    for name in [m for m in sys.modules if m.startswith("jaxnorm_kernels.triton")]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.parametrize(
    ("versions", "complaint"),
    [
        ({}, r"needs Triton \(.*\)"),
        ({"triton": "3.6.0", "jax_triton": "0.4.1"}, r"needs Triton 3\.7 or newer, not 3\.6\.0"),
        ({"triton": "3.9.0"}, r"needs jax-triton \(.*\)"),
        (
            {"triton": "3.9.0", "jax_triton": "0.4.0"},
            r"needs jax-triton 0\.4\.1 or newer, not 0\.4\.0",
        ),
        (
            {"triton": "3.9.0", "jax_triton": "0.4.0rc2"},
            r"needs jax-triton 0\.4\.1 or newer, not 0\.4\.0rc2",
        ),
    ],
    ids=str,
)
def test_a_missing_or_unfit_extra(versions, complaint, installed, monkeypatch):
    """If Triton is missing or unsuitable, requesting it raises an error that names the fix.

    If Triton is not requested, another implementation runs. Its plan says why Triton does not run.
    """
    monkeypatch.setattr(backends, "_failures", {})
    installed(**versions)
    said = complaint + r'; from a checkout of jaxnorm: pip install -e "\.\[triton\]"'
    x = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="softmax: implementation='triton' .*" + said):
        jaxnorm.softmax(x, implementation="triton")
    with pytest.raises(ValueError, match=said):
        jaxnorm.implementation_for("softmax", x.shape, x.dtype, implementation="triton")
    monkeypatch.setattr(backends, "_CANDIDATES", {"cuda": ("triton",)})
    forward = jaxnorm.implementation_for("softmax", x.shape, x.dtype, platform="cuda").forward
    assert forward.name == "xla"
    assert re.search("^triton: it cannot be imported: .*" + said, forward.reason)


@pytest.mark.parametrize("version", ["0.4.1", "0.4.2rc1", "0.4.2.dev3+g1a2b3c4", "0.5", "1.0b2"])
def test_a_new_version_of_jax_triton_is_taken(version, installed):
    """The import of the kernels passes the check of versions, and fails later.

    The simulated Triton is empty, so the first kernel cannot be imported.
    """
    installed(triton="3.9.0", jax_triton=version)
    with pytest.raises(ImportError, match=r"No module named 'triton\.language'"):
        importlib.import_module("jaxnorm_kernels.triton")


@pytest.mark.triton
def test_a_name_is_honoured_or_refused_with_the_reason():
    plan = jaxnorm.implementation_for("softmax", (4, 8), "float32", implementation="triton")
    assert plan.forward == backends.Choice("triton", "asked for by name")
    x, where = np.ones((2, 3, 4), np.float32), np.ones((2, 1, 4), bool)
    with pytest.raises(ValueError, match=r"'triton' cannot run the forward of .*for a row; leave"):
        jaxnorm.softmax(x, (1, 2), where, implementation="triton")
