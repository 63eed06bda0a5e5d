"""The models of the training benchmarks, without a GPU.

All variants of a model compute the same function.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import language_models, models, profile, training
from benchmarks.language_models import Model, train_step
from benchmarks.models import LAYERS, LOSS_STEPS, MODELS, REMATS, Size, TrainingCell
from benchmarks.variants import VARIANTS

LLAMA = Size("llama", 2, 32, 4, 2, 64, 97, seq=24, batch=4)
TINY = {
    "gpt2": Size("gpt2", 2, 32, 4, 4, 64, 97, seq=24, batch=4),
    "llama": LLAMA,
    "llama-qk": dataclasses.replace(LLAMA, qk_norm=True),
}


# Each case: the variant, remat (a policy of rematerialisation), the kind of layers and the dtype.
# The variant "jaxnorm-products" runs with every remat, every kind of layers and every dtype. The
# other variants run with some of them.
CASES = [
    ("jaxnorm-norms", "none", "scan", "float32"),
    ("jaxnorm-everything", "dots", "scan", "float32"),
    ("jaxnorm-everything", "none", "scan", "bfloat16"),
    *(("jaxnorm-products", remat, "scan", "float32") for remat in REMATS),
    ("jaxnorm-products", "none", "unrolled", "float32"),
    ("jaxnorm-products", "dots", "unrolled", "float32"),
    ("jaxnorm-products", "none", "scan", "bfloat16"),
]


@functools.cache
def loss_and_gradients(kind, variant=models.PLAIN, remat="none", layers="scan", dtype="float32"):
    """Return the loss and the gradients of a model; gradients of layers are always stacked."""
    size = TINY[kind]
    model = Model(size, VARIANTS[variant], remat, dtype, layers)
    shape = (size.batch, size.seq + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, size.vocabulary)
    params = model.init(jax.random.key(0))
    loss, gradients = jax.jit(jax.value_and_grad(model.loss))(params, tokens)
    if layers == "unrolled":
        gradients |= {"layers": jax.tree.map(lambda *each: jnp.stack(each), *gradients["layers"])}
    return loss, gradients


def bound(size, dtype):
    """Return a bound on the relative error of the loss, and on ||error|| / ||gradient||.

    In both passes together, a layer has some 20 operations. Each operation either rounds its result
    once or is a sum. The number of terms of a sum is at most the largest of three numbers: the
    hidden features, the tokens and the classes. Errors are assumed to be independent, so they add
    up as a random walk.
    """
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-9}[dtype]
    # For bfloat16, sums are computed in float32 and rounded once.
    terms = max(size.hidden, size.batch * size.seq, size.vocabulary) if dtype == "float32" else 1
    return unit * math.sqrt(20 * 2 * (size.layers + 1) * terms)


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize(
    ("kind", "variant", "remat", "layers", "dtype"),
    [
        # Each kind of model runs with every variant, remat, kind of layers and dtype.
        *(("gpt2", *case) for case in [CASES[0], *CASES[1::2], CASES[-1]]),
        *(("llama", *case) for case in [*CASES[::2], CASES[3], CASES[5]]),
        *(("llama-qk", *case) for case in (CASES[0], CASES[3], CASES[-1])),
    ],
)
def test_variants_are_one_function(kind, variant, remat, layers, dtype):
    loss, gradients = loss_and_gradients(kind, variant, remat, layers, dtype)
    expected, expected_gradients = loss_and_gradients(kind)
    allowed = bound(TINY[kind], dtype)
    assert abs(loss - expected) <= allowed * expected
    assert abs(expected - math.log(TINY[kind].vocabulary)) < 0.1  # The model is untrained.
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        assert ours.dtype == theirs.dtype == "float32"
        assert np.linalg.norm(theirs) > 0
        error = np.linalg.norm(ours - theirs)
        assert error <= allowed * np.linalg.norm(theirs), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("name", "variant", "remat", "kernels"),
    [
        ("llama-1b", "jnp", "none", ""),
        ("gpt2-small", "jaxnorm-norms", "none", "layer_norm_fwd norm_bwd"),
        *(
            (name, "jaxnorm-everything", remat, f"{norm}_fwd add_{norm}_fwd norm_bwd")
            for name, norm, remat in [
                ("llama-1b", "rms_norm", "none"),
                ("gpt2-small", "layer_norm", "dots"),
            ]
        ),
    ],
)
def test_kernels_in_programs_for_a_gpu(name, variant, remat, kernels):
    """Models of the benchmarked sizes run the expected kernels of norms on a GPU.

    Kernels of losses are not checked, because jaxnorm's default for a loss need not be a kernel.
    """
    size = MODELS[name]
    model = Model(size, VARIANTS[variant], remat)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((size.batch, size.seq + 1), "int32")
    traced = jax.jit(jax.value_and_grad(model.loss)).trace(params, tokens)
    text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    found = re.findall(r"jaxnorm_(\w+)/mpmd_map", text)
    assert {kernel for kernel in found if "cross_entropy" not in kernel} == set(kernels.split())


@pytest.fixture
def cell(monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", TINY["llama"])
    return TrainingCell("tiny", "dots", "scan", "float32", 4, "jaxnorm-everything")


@pytest.mark.usefixtures("quick_to_compile")
def test_a_training_step(cell):
    measure = training.prepare("training", cell)
    (small,) = measure.args
    state = jax.tree.leaves(jax.eval_shape(small.initial))
    state_bytes = sum(a.size * a.dtype.itemsize for a in state)
    assert small.peak_bytes >= state_bytes + small.temp_bytes
    figures = measure()
    assert figures["tokens_per_s"] == pytest.approx(4 * 24 / figures["ms"] * 1e3)
    assert figures["temp_bytes"] == small.temp_bytes
    losses = [figures[f"loss_{n}"] for n in LOSS_STEPS]
    assert losses[-1] < losses[0] - 0.05
    tokens = np.asarray(small.batch(0))
    assert tokens.min() == 0
    assert 60 < tokens.max() < 97
    # Token 0 is about as frequent as tokens 1 and 2 together.
    assert np.mean(np.concatenate([small.batch(i) for i in range(20)]) == 0) == pytest.approx(
        math.log(2) / math.log(98), rel=0.1
    )


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="for CPU devices")
def test_a_training_step_on_a_mesh(cell, monkeypatch):
    """Losses on a mesh equal the losses on one device.

    The parameters, the optimiser's moments and the batches are sharded.
    """
    monkeypatch.setattr(training, "_SPLIT_FROM", 1000)
    monkeypatch.setattr(training, "LOSS_STEPS", LOSS_STEPS[:2])
    alone, over_two = (
        training.prepare("training", dataclasses.replace(cell, mesh=mesh))
        for mesh in ("", "fsdp=2")
    )
    (step,) = over_two.args
    state = step.initial()
    split = {a.shape for a in jax.tree.leaves(state) if not a.sharding.is_fully_replicated}
    assert split == {a.shape for a in jax.tree.leaves(state) if a.size >= 1000}
    assert step.batch(0).sharding.shard_shape((4, 25)) == (2, 25)
    ours, expected = over_two(), alone()
    assert ours["tokens_per_s"] == pytest.approx(4 * 24 / ours["ms"] * 1e3)
    for n in LOSS_STEPS[:2]:
        # On the mesh, the losses of the rows are added in another order. So the results differ by
        # rounding errors. A rounding error is proportional to the loss, which is about log(97) for
        # 97 classes.
        loss = expected[f"loss_{n}"]
        assert ours[f"loss_{n}"] == pytest.approx(loss, abs=1e-4)


def test_more_devices_than_there_are(cell):
    cell = dataclasses.replace(cell, mesh=f"fsdp={jax.device_count() + 1}")
    with pytest.raises(ValueError, match=r"got \d+ devices; expected \d+ for this mesh"):
        training.prepare("training", cell)


def test_what_fits(cell, monkeypatch):
    class Line:
        def __init__(self, cell, batch, shardings):
            self.peak_bytes = 100 + 7 * batch

    monkeypatch.setattr(training, "Step", Line)
    monkeypatch.setattr(models, "BUDGET_BYTES", 200)
    assert training.prepare("capacity", cell)() == {"batch_in_80gb": 14}


@pytest.mark.parametrize("layers", LAYERS)
def test_the_step_trains_in_place(layers):
    """A training step returns a state with the shapes and dtypes of its argument.

    So the argument can be donated.
    """
    model = Model(TINY["gpt2"], VARIANTS["jnp"], layers=layers)
    params = jax.eval_shape(model.init, jax.random.key(0))
    state = params, jax.eval_shape(language_models.OPTIMIZER.init, params)
    tokens = jax.ShapeDtypeStruct((4, 25), "int32")
    after, loss = jax.eval_shape(functools.partial(train_step, model), state, tokens)
    assert after == state
    assert loss.dtype == "float32"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("jaxnorm_add_rms_norm_fwd", "norms"),
        ("jaxnorm_cross_entropy_bwd", "loss"),
        ("input_reduce_fusion_5", "norms"),
        ("loop_add_fusion", "optimiser"),
        ("input_reduce_fusion", "loss"),
        ("loop_dynamic_update_slice_fusion_3", "copies and slices"),
        ("loop_convert_fusion", "mlp"),
        ("loop_multiply_fusion", "other fusions"),
    ],
)
def test_classes_of_kernels(name, kind):
    scopes = {
        "input_reduce_fusion_5": "jit(step)/transpose(jvp())/while/body/jaxnorm.rms_norm_backward",
        "loop_add_fusion": "jit(train_step)/optimizer/add",
        "input_reduce_fusion": "jit(train_step)/transpose(jvp(loss))/reduce_sum",
        "loop_convert_fusion": "jit(train_step)/jvp(mlp)/while/body/checkpoint/mlp/mul",
        "loop_multiply_fusion": "jit(train_step)/jvp()/while/body/mul",
    }
    assert profile.kernel_class(name, scopes) == kind
    ms = profile.by_class([(name, 3000.0), ("fusion", 1000.0)], scopes, steps=2)
    assert sum(ms.values()) == 2.0
    assert ms[kind] == (2.0 if kind == profile.OTHER else 1.5)
    assert kind in profile.longest([(name, 3000.0)], scopes, steps=1)[0]


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="for CPU devices")
def test_a_profile(cell, monkeypatch, capsys):
    ran = [("jaxnorm_rms_norm_fwd", 3000.0)] * training.KERNEL_STEPS
    monkeypatch.setattr(training.Step, "kernels", lambda step, state: ran)
    monkeypatch.setattr(profile, "LOSS_STEPS", (training.WARMUP + 2,))  # enough steps for a median
    figures = profile.column(cell, list_kernels=True)
    assert figures["norms"] == figures["all"] == pytest.approx(3.0)
    assert figures["tokens/s"] == pytest.approx(4 * 24 / figures["step"] * 1e3)
    assert capsys.readouterr().out.split()[:2] == ["3.000", "1"]
