"""Tests of the matmul benchmarks that need no GPU: selected cells, results and tables."""

import dataclasses
import functools
import io
import json

import jax
import numpy as np
import pytest
from benchmark_cases import eager_torch, results_of_torch, rows_of_run
from reference import SAFETY, assert_within, rounding, unit_roundoff

from benchmarks import (
    figures,
    jax_side,
    page_tables,
    processes,
    report,
    report_tables,
    results,
    run,
    worker,
)
from benchmarks.linear import LINEAR, LinearWorkload
from benchmarks.providers import PROVIDERS, SIDES
from benchmarks.report import Results
from benchmarks.results import Table
from benchmarks.suites import SUITES, Selection, ShapedCell

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SUITE = SUITES["linear"]
BARS = {"8192x2048x3072", "8192x4096x6144", "8192x4096x14336"}
BOTH = ShapedCell("rms_norm_linear", "fwd+bwd", "6x32x48", "bfloat16", "jaxnorm")
PRODUCT = dataclasses.replace(BOTH, op="product", provider="jnp")


def test_flops_and_bytes():
    """A matmul of (M, K) and (K, N) has 2 * M * K * N FLOPs.

    In each pass, the bytes of each array are counted once.
    """
    x, weight, y = 10 * 20 * 2, 20 * 30 * 2, 10 * 30 * 2
    forward = LinearWorkload("product", "fwd", "10x20x30", "bfloat16")
    assert forward.flops == 2 * 10 * 20 * 30
    assert forward.bytes == x + weight + y
    both = dataclasses.replace(forward, direction="fwd+bwd")
    assert both.flops == 3 * forward.flops
    assert both.bytes == 2 * forward.bytes + x + weight
    assert dataclasses.replace(both, op="rms_norm_linear").parameter_shapes == ((20,),)


def test_what_is_asked():
    cells = list(SUITE.cells(Selection()))
    shapes = {c.shape for c in cells}
    assert len(shapes) == 6 + 7
    assert shapes >= BARS | {f"{n}x{n}x{n}" for n in (256, 8192)} | {"8192x8192x57344"}
    assert {c.dtype for c in cells} == {"bfloat16"}
    assert {c.direction for c in cells} == {"fwd", "fwd+bwd"}
    by_op = {op: {c.provider for c in cells if c.op == op} for op in LINEAR}
    compilers = {"jnp", "torch", "torch.compile", "quack"}
    assert by_op == {
        "product": compilers,
        "rms_norm_linear": compilers | {"jaxnorm", "mosaic", "xla", "composed"},
    }
    assert {c.shape for c in SUITE.cells(Selection(quick=True))} == BARS
    few = SUITE.cells(Selection(ops=("product",), shapes=((4, 8), (4, 8, 16))))
    assert {(c.op, c.shape) for c in few} == {("product", "4x8x16")}


@functools.cache
def program(cell):
    return jax_side.compile_cell(cell)


def result(cell):
    inputs = jax_side.random_arrays(0, *jax_side.arguments_of(cell.workload))
    compiled = program(cell)
    return jax.tree.leaves(compiled.call(*compiled.operands(*inputs)))


@pytest.mark.parametrize("name", ["jaxnorm", "xla", "composed"])
def test_the_providers_compute_the_product_of_a_norm(name):
    """All measured implementations compute the same y and gradients as plain JAX."""
    actual = result(dataclasses.replace(BOTH, provider=name))
    expected = result(dataclasses.replace(BOTH, provider="jnp"))
    assert [a.shape for a in actual] == [(6, 48), (6, 32), (32, 48), (32,)]
    assert [a.dtype for a in actual] == ["bfloat16", "bfloat16", "bfloat16", "float32"]
    for a, e in zip(actual, expected):
        a, e = (np.asarray(array, np.float64) for array in (a, e))
        # A few intermediate arrays are rounded to bfloat16, which has a precision of 8 bits. Which
        # arrays these are depends on the implementation.
        assert np.linalg.norm(a - e) <= 4 * 2**-8 * np.linalg.norm(e)


def test_the_product_has_three_products():
    y, dx, dweight = result(PRODUCT)
    (x, weight), parameters, (dy,) = jax_side.random_arrays(
        0, *jax_side.arguments_of(PRODUCT.workload)
    )
    assert parameters == ()
    wide = [np.asarray(a, np.float64) for a in (x, weight, dy)]
    x, weight, dy = wide
    for actual, left, right in ((y, x, weight), (dx, dy, weight.T), (dweight, x.T, dy)):
        expected = left @ right
        walk = SAFETY * unit_roundoff("float32") * np.sqrt(left.shape[-1])
        bound = walk * (np.abs(left) @ np.abs(right)) + rounding(expected, "bfloat16")
        assert_within(actual, expected, bound)
    assert y.astype("float32").std() == pytest.approx(1, rel=0.2)


def test_figures_are_by_flops():
    measured = jax_side.prepare("linear", PRODUCT)()
    assert measured["tflops"] == pytest.approx(PRODUCT.workload.flops / measured["us"] / 1e6)
    assert measured["gbps"] is measured["roof"] is None
    row = results.rounded(SUITE, measured)
    assert row.keys() == SUITE.figures.keys()
    assert all(row[name] for name in ("us", "tflops", "compile_s", "extra_passes", "temp_bytes"))


@pytest.mark.parametrize("op", LINEAR)
@pytest.mark.parametrize("name", ["torch", "torch.compile"])
def test_torch_products(op, name, monkeypatch):
    torch, torch_side = eager_torch(monkeypatch)
    cell = dataclasses.replace(BOTH, op=op, provider=name)
    leaves, (y,), gradients = results_of_torch(torch_side, cell)
    assert y.dtype == torch.bfloat16
    assert [g.shape for g in gradients] == [a.shape for a in leaves]
    x, weight, *scale = (a.detach().double() for a in leaves)
    if scale:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale[0]
    expected = (x @ weight).numpy()
    # Each term has an error from rounding the norm to bfloat16. These errors add up as a random
    # walk.
    walk = SAFETY * unit_roundoff("bfloat16") * (x.square() @ weight.square()).sqrt().numpy()
    assert_within(y.detach().double().numpy(), expected, walk + rounding(expected, "bfloat16"))
    measured = torch_side.prepare("linear", cell)()
    assert measured["tflops"] == pytest.approx(cell.workload.flops / measured["us"] / 1e6)


def test_one_process_compiles(monkeypatch):
    """Only one process compiles matmuls, because XLA and torch time matmuls when they compile.

    Several processes would disturb each other's timings.
    """
    asked = []
    monkeypatch.setattr(
        processes, "outcomes", lambda *_, workers, **__: asked.append(workers) or []
    )
    for suite in (SUITE, SUITES["loss"]):
        list(run._on_each_side(suite, [PRODUCT], workers=4, limit_s=1.0))
    sides = len(SIDES)
    assert asked == [1] * sides + [4] * sides


@pytest.mark.parametrize(("suite", "expected"), [("linear", 1), ("loss", 16)])
def test_one_thread_compiles(suite, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "prepared", lambda *given: asked.append(given[-1]) or [])
    requests = io.StringIO(json.dumps({"suite": suite, "cells": []}) + "\n")
    assert worker.work(jax_side, requests, io.StringIO(), threads=16) == 0
    assert asked == [expected]


def test_a_run(tmp_path):
    arguments = ["linear", "--shapes", "4x16x32", "--directions", "fwd"]
    rows = rows_of_run(tmp_path, SUITE, [*arguments, "--providers", "jaxnorm", "jnp"])
    assert [(r["op"], r["provider"], r["status"]) for r in rows] == [
        ("product", "jnp", "ok"),
        ("rms_norm_linear", "jaxnorm", "ok"),
        ("rms_norm_linear", "jnp", "ok"),
    ]
    assert all(float(r["us"]) > 0 and int(r["temp_bytes"]) >= 0 for r in rows)
    assert (
        "| rms_norm_linear forward, 4 x 16 x 32, bf16 | jnp |"
        in (tmp_path / "report.md").read_text()
    )


# Reports of the times of a matmul, and of a norm followed by a matmul.


def written(folder, rows):
    table = Table(folder, SUITE)
    for op, direction, shape, provider, us in rows:
        workload = LinearWorkload(op, direction, shape, "bfloat16")
        ok = isinstance(us, float)
        tflops = workload.flops / us / 1e6 if ok else None
        measured = {"us": us, "main_us": us, "tflops": tflops, "temp_bytes": 2**20} if ok else {}
        row = {"device": "some GPU", "software": "jax 1", "commit": "abc1234"}
        row |= dataclasses.asdict(workload) | {"provider": provider}
        row |= results.rounded(SUITE, measured)
        table.append(row | {"status": "ok" if ok else us})
    return Results(folder)


SHAPE = "8192x4096x6144"
ROWS = [
    ("product", "fwd", SHAPE, "torch", 550.0),
    ("product", "fwd", SHAPE, "jnp", 600.0),
    ("rms_norm_linear", "fwd", SHAPE, "quack", 800.0),
    ("rms_norm_linear", "fwd", SHAPE, "jaxnorm", 625.0),
    ("rms_norm_linear", "fwd", SHAPE, "mosaic", "failed: no"),
    ("rms_norm_linear", "fwd+bwd", SHAPE, "jaxnorm", 2000.0),
    *(
        (op, "fwd", f"{n}x{n}x{n}", provider, us * (n / 256) ** 2)
        for n in (256, 1024)
        for op, provider, us in (("product", "jnp", 4.0), ("rms_norm_linear", "jaxnorm", 5.0))
    ),
]


def test_the_tables(tmp_path):
    found = written(tmp_path, ROWS)
    mine = PROVIDERS["jaxnorm"].label
    asked = "8192 x 4096 x 6144, bf16"
    # The matmul has 412.3 GFLOP. In 600 us, this is 687 TFLOP/s.
    assert report_tables.linear(found.rows["linear"]).splitlines()[:7] == [
        "| cell | provider | us | TFLOP/s | of the product | jaxnorm's speed | temp MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        f"| product forward, {asked} | jnp | 600 | 687 | 1.00 | - | 1 |",
        f"| product forward, {asked} | torch eager | 550 | 750 | 1.09 | - | 1 |",
        f"| rms_norm_linear forward, {asked} | {mine} | 625 | 660 | 0.96 | 1.00x | 1 |",
        f"| rms_norm_linear forward, {asked} | QuACK | 800 | 515 | 0.75 | 1.28x | 1 |",
        f"| rms_norm_linear forward and backward, {asked} | {mine} | 2000 | 618 | - | 1.00x | 1 |",
    ]
    forward, both = page_tables.by_product(found.linear).split("\n\n")
    assert forward.splitlines()[:1] + forward.splitlines()[2:4] == [
        f"| M x K x N, bf16, forward | matmul alone | {mine} | QuACK |",
        "| 8192 x 4096 x 6144 | 687 | 660 (0.96) | 515 (0.75) |",
        "| 256 x 256 x 256 | 8.40 | 6.70 (0.80) | - |",
    ]
    assert both.splitlines()[2:] == ["| 8192 x 4096 x 6144 | - | 618 (-) |"]


def test_lines_of_the_plot(tmp_path):
    found = written(tmp_path, ROWS).linear
    squares = figures.along_squares(found, "rms_norm_linear", "fwd", "bfloat16")
    assert list(squares) == [256, 1024]
    assert squares[256]["jaxnorm"].roof_speed == pytest.approx(2 * 256**3 / 4.0 / 1e6, rel=0.01)
    models = figures.along_projections(found, "rms_norm_linear", "fwd", "bfloat16")
    assert [name.split("\n") for name in models] == [["8B", "4096x6144"]]
    assert models["8B\n4096x6144"].keys() == {"quack", "jaxnorm"}


def test_a_report(tmp_path):
    found = written(tmp_path, ROWS)
    (file,), (plot,) = report.write(tmp_path), report.draw(found)
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = file.read_text()
    assert "| jaxnorm mosaic: failed: no | 1 |" in text
    shown = report.page_section(found)
    assert "A norm and the matmul after it, in TFLOP/s" in shown
    assert "![Speed of matmuls, alone and with a norm, against their size, bfloat16]" in shown
    assert "linear_bfloat16.png)" in shown
    assert "| 8192 x 4096 x 6144 | 687 | 660 (0.96) | 515 (0.75) |" in shown
    others = report.page_section(Results(*report.SHOWN))
    assert ("linear_bfloat16.png" in others) == bool(Results(*report.SHOWN).rows["linear"])
