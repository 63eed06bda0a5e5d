"""The benchmarks of losses without a GPU: selected cells, providers' programs, and the table."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from benchmark_cases import eager_torch, results_of_torch, rows_of_run
from reference import SAFETY, assert_within, exact, unit_roundoff

from benchmarks import calls, jax_side, report_tables
from benchmarks.losses import LossWorkload
from benchmarks.providers import PROVIDERS
from benchmarks.suites import SUITES, Selection, ShapedCell

pytestmark = pytest.mark.usefixtures("quick_to_compile")

LOSS = SUITES["loss"]
POSITIONS = ShapedCell("cross_entropy", "fwd+bwd", "6x40", "float32", "jaxnorm")
MEAN = ShapedCell("linear_cross_entropy", "fwd+bwd", "6x8x40", "bfloat16", "jaxnorm")
CELLS = [
    POSITIONS,
    MEAN,
    *(dataclasses.replace(c, op=f"capped_{c.op}") for c in (POSITIONS, MEAN)),
    dataclasses.replace(POSITIONS, op="log_prob_and_entropy"),
    dataclasses.replace(MEAN, op="linear_log_prob_and_entropy"),
    dataclasses.replace(POSITIONS, op="kl_divergence"),
    dataclasses.replace(POSITIONS, op="reverse_kl_divergence"),
    dataclasses.replace(MEAN, op="linear_kl_divergence"),
]


def of(cell, provider):
    """Return the benchmark's case (cell), changed to another provider (measured implementation)."""
    return dataclasses.replace(cell, provider=provider)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_bytes(dtype, size):
    """`LossWorkload.bytes` is the number of bytes that a loss loads and stores.

    Each pass loads the logits. The backward pass also stores their gradient.
    """
    forward = 10 * 30 * size + 10 * (4 + 4)  # also labels and losses
    assert LossWorkload("cross_entropy", "fwd", "10x30", dtype).bytes == forward
    both = LossWorkload("cross_entropy", "fwd+bwd", "10x30", dtype).bytes
    assert both == 2 * forward + 10 * 30 * size
    # log_prob_and_entropy has a second result per position. The forward stores it, and the backward
    # loads its cotangent.
    two = LossWorkload("log_prob_and_entropy", "fwd+bwd", "10x30", dtype)
    assert two.bytes == both + 2 * 10 * 4
    assert two.cotangents == two.results == (((10,), "float32"),) * 2
    # In both passes, a divergence loads the teacher's logits instead of labels. The teacher's
    # logits get no gradient.
    divergence = LossWorkload("kl_divergence", "fwd", "10x30", dtype)
    assert divergence.bytes == 2 * 10 * 30 * size + 10 * 4
    of_both = dataclasses.replace(divergence, direction="fwd+bwd")
    assert of_both.bytes == 2 * divergence.bytes + 10 * 30 * size


def test_a_teacher():
    """A teacher's arrays have the same shapes as the student's, and no gradients."""
    logits = LossWorkload("kl_divergence", "fwd+bwd", "10x30", "bfloat16")
    assert logits.row_operands == (((10, 30), "bfloat16"),) * 2
    assert (logits.gradients, logits.constants) == ((0,), (1,))
    linear = LossWorkload("linear_kl_divergence", "fwd+bwd", "10x20x30", "bfloat16")
    x, weight, *of_teacher = linear.row_operands
    assert (x, weight[:2]) == (((10, 20), "bfloat16"), ((20, 30), "bfloat16"))
    assert of_teacher == [x, weight]
    assert (linear.gradients, linear.constants) == ((0, 1), (2, 3))
    assert LossWorkload("cross_entropy", "fwd", "10x30", "bfloat16").constants == ()


def test_flops():
    """A linear loss with gradients has the FLOPs of three matmuls.

    Some losses need a fourth matmul. It recomputes logits that were not saved, or it computes a
    teacher's logits.
    """
    for op, products, of_logits in [
        ("linear_cross_entropy", 3, 1),
        ("linear_log_prob_and_entropy", 4, 1),
        ("linear_kl_divergence", 4, 2),
    ]:
        workload = LossWorkload(op, "fwd+bwd", "2x3x5", "bfloat16")
        assert workload.flops == products * 2 * 2 * 3 * 5
        assert dataclasses.replace(workload, direction="fwd").flops == of_logits * 2 * 2 * 3 * 5
    for loss in ("cross_entropy", "kl_divergence"):
        assert LossWorkload(loss, "fwd", "3x5", "bfloat16").flops == 0


def test_what_is_asked():
    cells = list(LOSS.cells(Selection()))
    plain = [c for c in cells if c.op == "cross_entropy"]
    assert len({c.workload for c in plain}) == 5 * 2 * 2
    assert not any(c.workload.flops for c in plain)
    assert {c.provider for c in plain} == {
        *("jaxnorm", "mosaic", "triton", "triton_sm80", "triton_sm90", "xla", "jnp", "optax"),
        *("quack", "liger", "torch.compile"),
    }
    chunks = [f"chunk_{rows}" for rows in (1024, 2048, 4096, 8192)]
    linear = [c for c in cells if c.op == "linear_cross_entropy"]
    assert {c.workload for c in linear} == {
        LossWorkload("linear_cross_entropy", "fwd+bwd", shape, "bfloat16")
        for shape in (
            *("8192x4096x128256", "8192x2048x128256", "16384x2048x50257"),
            "4096x8192x32000",
        )
    }
    assert {c.provider for c in linear} == {
        *("jaxnorm", "mosaic", "triton", "triton_sm80", "triton_sm90", "xla", "jnp", "optax"),
        *("products", *chunks),
        *("tokamax", "quack", "quack_chunks", "liger", "liger_cute", "liger_sm90"),
        *("cce", "cce_unfiltered", "torch.compile"),
    }
    log_probs = [c for c in cells if c.op == "log_prob_and_entropy"]
    assert len({c.workload for c in log_probs}) == 2 * 2 * 2
    assert {c.provider for c in log_probs} == {
        *("jaxnorm", "mosaic", "triton", "triton_sm80", "triton_sm90", "xla", "jnp"),
        "torch.compile",
    }
    linear = [c for c in cells if c.op == "linear_log_prob_and_entropy"]
    assert len({c.workload for c in linear}) == 4
    assert {c.provider for c in linear} == {*(c.provider for c in log_probs), "products", *chunks}
    for pair in (
        (log_probs, [c for c in cells if c.op == "kl_divergence"]),
        (linear, [c for c in cells if c.op == "linear_kl_divergence"]),
    ):
        of_log_probs, divergences = ([dataclasses.replace(c, op="") for c in each] for each in pair)
        assert of_log_probs == divergences
    few = LOSS.cells(Selection(providers=("jnp",), shapes=((4, 32), (4, 8, 32)), quick=True))
    assert {(c.op, c.shape) for c in few} == {
        ("cross_entropy", "4x32"),
        ("capped_cross_entropy", "4x32"),
        ("linear_cross_entropy", "4x8x32"),
        ("capped_linear_cross_entropy", "4x8x32"),
        ("log_prob_and_entropy", "4x32"),
        ("linear_log_prob_and_entropy", "4x8x32"),
        ("kl_divergence", "4x32"),
        ("reverse_kl_divergence", "4x32"),
        ("linear_kl_divergence", "4x8x32"),
    }
    assert {c.shape for c in LOSS.cells(Selection(providers=("jnp",), quick=True))} == {
        "8192x32768",
        "8192x4096x128256",
    }


def test_a_copy_fits_beside_the_operands():
    assert calls.words_for(8_000) == (1_000, 1.0)
    assert calls.words_for(int(2.5 * calls.COPY_BYTES)) == (calls.COPY_BYTES // 8, 2.5)
    assert calls.Timing(3.0, 2.0, 1).times(2.0) == calls.Timing(6.0, 4.0, 1)


def test_labels_are_classes_and_logits_near_normal():
    workload = LossWorkload("linear_cross_entropy", "fwd+bwd", "256x64x40", "bfloat16")
    inputs = jax_side.random_arrays(0, *jax_side.arguments_of(workload))
    (x, weight, labels), parameters, cotangents = inputs
    assert (parameters, cotangents) == ((), ())
    assert x.dtype == weight.dtype == "bfloat16"
    assert set(np.asarray(labels).tolist()) == set(range(40))
    logits = np.asarray(x, np.float32) @ np.asarray(weight, np.float32)
    assert logits.std() == pytest.approx(1, rel=0.1)


@functools.cache
def program(cell):
    return jax_side.compile_cell(cell)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        (name, cell)
        for cell in CELLS
        for name in ("jaxnorm", "optax", "chunk_1024")
        if PROVIDERS[name].offers(cell.workload)
    ],
)
def test_the_providers_compute_the_loss(name, cell):
    """All measured implementations compute the same loss and gradients as jnp.

    Their dtypes are the same, too.
    """
    inputs = jax_side.random_arrays(0, *jax_side.arguments_of(cell.workload))
    expected, actual = (
        jax.tree.leaves(each.call(*each.operands(*inputs)))
        for each in (program(of(cell, provider)) for provider in ("jnp", name))
    )
    results, gradients = len(cell.workload.results), len(cell.workload.gradients)
    assert [a.dtype for a in actual] == ["float32"] * results + [cell.dtype] * gradients
    # This bounds the difference between the two implementations. They round logits, or gradients of
    # logits, to the cell's dtype at different points. The results are sums of such numbers, so
    # their error grows with the square root of the number of terms. The number of terms of a sum is
    # at most the length of an operand's last axis. The largest such length is used.
    walk = 2 * SAFETY * unit_roundoff(cell.dtype) * np.sqrt(max(a.shape[-1] for a in inputs[0]))
    for a, e in zip(actual, expected):
        assert_within(a, exact(e), walk * np.abs(exact(e)).max())


@pytest.mark.parametrize("cell", [c for c in CELLS if c.workload.flops])
def test_the_products_are_those_of_the_loss(cell):
    """The provider "products" of the benchmarks runs only the matmuls of a linear loss.

    Its results have the shapes and dtypes of the loss and its gradients.
    """
    theirs, products = program(of(cell, "jnp")), program(of(cell, "products"))
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), theirs.call.out_info)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), products.call.out_info) == shapes
    count = len(re.findall(r" = \S+ dot\(", products.call.as_text()))
    assert count == cell.workload.loss.products


@pytest.mark.parametrize("cell", CELLS)
def test_torch_losses(cell, monkeypatch):
    torch, torch_side = eager_torch(monkeypatch)
    cell = of(cell, "torch.compile")
    leaves, results, gradients = results_of_torch(torch_side, cell)
    assert [(r.shape, r.dtype) for r in results] == [
        (s, torch.float32) for s, _ in cell.workload.results
    ]
    assert [g.shape for g in gradients] == [leaves[i].shape for i in cell.workload.gradients]
    figures = torch_side.prepare("loss", cell)()
    assert figures["us"] > 0
    assert (figures["roof"] is None) == (cell.workload.flops > 0)


def test_a_run(tmp_path):
    arguments = ["loss", "--dtypes", "bfloat16", "--shapes", "4x32", "4x8x32", "--workers", "1"]
    arguments += ["--ops", "cross_entropy", "linear_cross_entropy", "linear_log_prob_and_entropy"]
    arguments += ["--providers", "jaxnorm", "products"]
    rows = rows_of_run(tmp_path, LOSS, arguments)
    assert [(r["op"], r["direction"], r["provider"]) for r in rows] == [
        ("cross_entropy", "fwd", "jaxnorm"),
        ("cross_entropy", "fwd+bwd", "jaxnorm"),
        ("linear_cross_entropy", "fwd+bwd", "jaxnorm"),
        ("linear_cross_entropy", "fwd+bwd", "products"),
        ("linear_log_prob_and_entropy", "fwd+bwd", "jaxnorm"),
        ("linear_log_prob_and_entropy", "fwd+bwd", "products"),
    ]
    assert {r["status"] for r in rows} == {"ok"}
    assert all(float(r["us"]) > 0 and int(r["temp_bytes"]) >= 0 for r in rows)
    assert [r["roof"] == "" for r in rows] == [False] * 2 + [True] * 4
    text = (tmp_path / "report.md").read_text()
    asked = "linear_cross_entropy forward and backward, 4 x 8 x 32, bf16"
    assert f"| {asked} | matrix products |" in text
    assert f"| {asked} | matrix products and the bytes of the logits |" in text


def test_the_table():
    def row(op, shape, provider, us, roof, temp_bytes):
        asked = {"op": op, "direction": "fwd+bwd", "shape": shape, "dtype": "bfloat16"}
        figures = {"us": us, "gbps": "1.0", "roof": roof, "temp_bytes": temp_bytes}
        return {**asked, "provider": provider, **figures, "status": "ok"}

    linear = ("linear_cross_entropy", "8192x4096x128256")
    rows = [
        row("cross_entropy", "8192x32768", "quack", "600.0", "0.9000", ""),
        row("cross_entropy", "8192x32768", "jaxnorm", "500.0", "1.0800", "0"),
        row(*linear, "liger", "60000.0", "", str(3 * 2**20)),
        {**row(*linear, "products", "40000.0", "", ""), "gbps": "2000.0"},
        row(*linear, "jaxnorm", "41812.0", "", str(2**20)),
        {**row(*linear, "jnp", "", "", ""), "status": "failed: no"},
    ]
    plain = "cross_entropy forward and backward, 8192 x 32768, bf16"
    whole = "linear_cross_entropy forward and backward, 8192 x 4096 x 128256, bf16"
    assert report_tables.losses(rows).splitlines()[2:] == [
        f"| {plain} | {PROVIDERS['jaxnorm'].label} | 500 | 1.08 | 1.00x | 0 |",
        f"| {plain} | QuACK | 600 | 0.90 | 1.20x | - |",
        f"| {whole} | {PROVIDERS['jaxnorm'].label} | 41812 | 0.96 | 1.00x | 1 |",
        f"| {whole} | matrix products | 40000 | 1.00 | 0.96x | - |",
        f"| {whole} | Liger | 60000 | 0.67 | 1.43x | 3 |",
        f"| {whole} | matrix products and the bytes of the logits | 43625 | 0.92 | 1.04x | - |",
    ]
