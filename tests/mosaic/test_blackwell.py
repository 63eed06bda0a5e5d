"""For each rule of the schedule tables, compile a call for two Blackwell GPUs: B200 and RTX 50.

Schedules are chosen for the sizes of these GPUs, but nothing was timed on them. Compiling needs
JAX's CUDA plugin but no GPU (`make compile` installs the plugin in CI). Two tests need neither: one
checks that these calls cover every rule, the other that schedules fit into shared memory.
"""

import functools
import itertools
import math
import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import backward_cases
import contract
import forward_cases
import jax
import norms
import numpy as np
import pytest
import test_divergence
from h100 import CONFIGS, SPILLED, Compiled, Compiler
from logits_cases import of_width, operand_types
from specs import BF16, F32, build_spec, changed
from test_rope import QUERIES, make_spec

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.implementation import Operands, Results
from jaxnorm_kernels.mosaic import support
from jaxnorm_kernels.mosaic.device import gpu as gpu_module
from jaxnorm_kernels.mosaic.device.gpu import B200, GPUS, RTX_5090, Gpu
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import forward, norm_backward
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule
from jaxnorm_kernels.specs import Spec


def in_strips(cases: Any, op: str, outer: int, cols: int, inner: int, dtype: np.dtype) -> Spec:
    """Return the spec of a norm of an array ``(outer, cols, inner)`` over its middle axis.

    Each inner element has its own parameters.
    """
    spec = cases.make_spec(op, outer * inner, cols, dtype, dtype)
    return changed(spec, inner=inner, inner_params=True)


# Each line: the operation, the numbers of rows and columns, and the dtypes of x and y.
FORWARD = [
    forward_cases.make_spec(op, rows, cols, x, y)
    for op, rows, cols, x, y in (
        ("layer_norm", 8192, 512, BF16, BF16),  # pipelined_tile
        ("softmax", 8192, 1000, BF16, BF16),  # row_tile
        ("rms_norm", 8, 8192, BF16, BF16),  # split_row, for few rows
        ("layer_norm", 8192, 4096, BF16, BF16),  # pipelined_row
        ("layer_norm", 4096, 65536, F32, BF16),  # pipelined_row, wide
        ("rms_norm", 8192, 4096, F32, F32),  # warpgroup_row
        ("log_softmax", 8192, 16384, F32, F32),  # pipelined_row that rereads shared memory
        ("softmax", 8192, 32768, BF16, BF16),  # split_row
        ("softmax", 1024, 2**18, BF16, BF16),  # split_row with rows of half a MiB
        # Rows whose length is not a multiple of 16 bytes.
        ("softmax", 8, 8199, BF16, BF16),
        ("softmax", 8192, 4095, F32, F32),
        ("softmax", 8192, 50257, BF16, BF16),
        ("softmax", 1024, 140001, F32, F32),
        # With a residual.
        ("add_layer_norm", 8192, 4096, BF16, BF16),
        ("add_rms_norm", 8192, 12288, BF16, BF16),
        ("rms_norm_add", 8192, 5120, F32, F32),
        ("rms_norm_add_rms_norm", 8192, 4096, BF16, BF16),
    )
]
BACKWARD = [
    backward_cases.make_spec(op, rows, cols, x, y, **change)
    for op, rows, cols, x, y, change in (
        ("layer_norm", 8192, 128, BF16, BF16, {}),
        ("layer_norm", 8192, 512, F32, F32, {}),
        ("layer_norm", 8192, 1024, BF16, BF16, {}),
        ("rms_norm", 8192, 4096, BF16, BF16, {"adds_dh": True}),
        ("layer_norm", 8192, 8192, F32, F32, {"saved": "input"}),
        ("layer_norm", 4096, 32768, BF16, BF16, {}),
        ("rms_norm", 4096, 65536, F32, F32, {}),
        ("layer_norm", 8192, 4096, BF16, BF16, {"scale_groups": 16, "bias_groups": 16}),
        ("layer_norm", 8192, 1000, BF16, BF16, {}),
        ("layer_norm", 8192, 4088, BF16, BF16, {"adds_dh": True}),
        ("softmax", 8192, 512, BF16, BF16, {}),
        ("softmax", 8192, 4096, BF16, BF16, {}),
        ("log_softmax", 8192, 8192, F32, F32, {}),
        ("softmax", 8192, 50257, BF16, BF16, {}),
        ("log_softmax", 1024, 65536, F32, F32, {}),
    )
]
STRIPS = [
    in_strips(cases, op, outer, cols, inner, x)
    for cases, op, outer, cols, inner, x in (
        (forward_cases, "layer_norm", 64, 49, 1024, BF16),  # strips of 128 inner elements
        (forward_cases, "layer_norm", 64, 48, 4096, F32),  # strips of 64
        (forward_cases, "layer_norm", 32, 512, 4096, BF16),  # strips of 32
        (forward_cases, "rms_norm", 8, 4096, 4096, BF16),  # strips shared by a cluster
        (backward_cases, "layer_norm", 32, 256, 4096, BF16),
        (backward_cases, "layer_norm", 8, 4096, 4096, F32),
        (backward_cases, "rms_norm", 8, 4096, 784, F32),
    )
]
LOSSES = [
    build_spec(op, "fwd", rows, cols, x, F32, want_stats=True, **options)
    for op, rows, cols, x, options in (
        ("cross_entropy", 8192, 4096, BF16, {}),
        ("cross_entropy", 5, 128256, BF16, {}),
        ("cross_entropy", 4096, 50257, F32, {"label_smoothing": 0.1, "z_loss": 1e-2}),
        ("log_prob_and_entropy", 5, 128256, BF16, {}),
        ("log_prob_and_entropy", 4096, 50257, F32, {"logit_softcap": 30.0}),
    )
]
# Both passes of a loss in one kernel. The logits of a divergence are float32, and its gradient
# bfloat16, as in `linear_kl_divergence`.
IN_ONE_KERNEL = [
    *(
        changed(
            build_spec("cross_entropy", "fwd", 2048, cols, BF16, F32, **options),
            wrt=("x",),
            gradient_dtype=BF16,
        )
        for cols, options in [
            (4096, {}),
            (50264, {"label_smoothing": 0.1, "z_loss": 1e-2}),
            (128256, {"logit_softcap": 30.0}),
        ]
    ),
    *(
        test_divergence.both_spec(
            test_divergence.specs_of(2048, cols, F32, F32, reverse=reverse)[0], BF16
        )
        for cols, reverse in [(4096, False), (50264, True), (128256, False)]
    ),
]
TWO_NORMS = norms.make_spec("norm_add_norm", "bwd", 8192, 4096, (BF16,) * 3)
HEADS = [
    make_spec(direction, QUERIES[heads], size, mix)
    for heads, size, mix in [
        (32, (128, 128), (BF16, F32, BF16)),
        (5, (80, 32), (F32, F32, F32)),
        (32, (512, 512), (F32, F32, BF16)),
    ]
    for direction in ("fwd", "bwd")
]
GATED = [
    norms.make_spec("norm_gated", direction, 8192, cols, (x,) * 3, norm_before_gate=before)
    for cols, x, before in [(128, BF16, True), (4096, F32, False), (1001, BF16, True)]
    for direction in ("fwd", "bwd")
]
ACTIVATED = [
    cases.make_spec(op, 8192, cols, x, x, saved="input", activation="gelu")
    for op, cols, x in [
        ("layer_norm", 128, BF16),
        ("rms_norm", 4096, F32),
        ("layer_norm", 1001, BF16),
    ]
    for cases in (forward_cases, backward_cases)
]
SCALED = [
    norms.make_spec(
        "scaled_add_norm", direction, 8192, cols, (x, residual, x), "layer_norm", **norms.grouped(n)
    )
    for cols, x, residual, n in [
        (256, F32, F32, 1),
        (1152, BF16, BF16, 1),
        (1152, BF16, BF16, 8),
        (4096, BF16, F32, 1),
        (65536, BF16, BF16, 1),
    ]
    for direction in ("fwd", "bwd")
]
# Each entry: the function, the kind (a key of `logits_cases.KINDS`), the number of columns, and the
# dtype. Each entry is compiled forward and backward.
PLACED = [
    ("softmax", "mask", 512, BF16),
    ("softmax", "causal", 2048, BF16),
    ("softmax", "bias", 4096, BF16),
    ("log_softmax", "all", 8192, F32),
]


@pytest.fixture(params=[100, 120], ids=["B200", "RTX 50"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the library choose schedules for one GPU, and return that GPU's compute capability.

    The schedules depend on the GPU's number of multiprocessors and on the sizes of its memories.
    """
    monkeypatch.setattr(gpu_module, "_local_gpu", lambda: GPUS[request.param])
    return request.param


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[int, ProcessPoolExecutor]]:
    """Yield a dict from each compute capability to a pool with a single process.

    A process can compile for only one architecture, which its first compilation determines.
    """
    spawn = multiprocessing.get_context("spawn")
    pools = {capability: ProcessPoolExecutor(1, spawn) for capability in CONFIGS}
    yield pools
    for pool in pools.values():
        pool.shutdown()


def check(work: Any, capability: int, processes: dict[int, ProcessPoolExecutor]) -> None:
    """Assert that the kernels compile, and that they spill hardly any registers.

    `processes` has one process for each compute capability. The kernels are compiled in the process
    for `capability`.
    """
    kernels = processes[capability].submit(compiled, work, capability).result()
    assert kernels
    assert max(kernel.spilled for kernel in kernels) <= SPILLED


def compiled(work: Any, capability: int) -> list[Compiled]:
    """Compile the kernels of a spec, or of an entry of `PLACED`."""
    gpu_module._local_gpu = lambda: GPUS[capability]
    compiler = compiler_for(capability)
    if isinstance(work, Spec):
        return compiler.compile(*function_of(work))
    op, kind, cols, x = work
    call = of_width(kind, 2048, cols).call(op, x)
    calls = call, call.backward(call.differentiable)
    return [k for c in calls for k in compiler.compile(c.kernel("mosaic"), operand_types(c))]


@functools.cache
def compiler_for(capability: int) -> Compiler:
    return Compiler(Path(tempfile.mkdtemp()), CONFIGS[capability])


def function_of(spec: Spec) -> tuple[Any, Any]:
    """Return a function that calls the kernel, and the types (shapes, dtypes) of its operands."""
    if spec.returns_both:
        return in_one_kernel(spec)
    if spec.operation.family == "loss":
        return loss_of(spec)
    results = slice(2 if spec.op == "norm_rope" else None)
    return (lambda *operands: contract.call(mosaic, spec, *operands)[results]), norms.types_of(spec)


def in_one_kernel(spec: Spec) -> tuple[Any, Any]:
    """Return a function and the types (shapes, dtypes) of its operands.

    The function runs both passes of a loss in one kernel.
    """
    logits = jax.ShapeDtypeStruct((spec.rows, spec.cols), spec.x_dtype)
    name, other = "labels", jax.ShapeDtypeStruct((spec.rows,), np.int32)
    if spec.op == "kl_divergence":
        name, other = "teacher_logits", logits

    def both(x: Any, other: Any, d: Any) -> Any:
        results, gradients = mosaic.both(Operands(x, **{name: other}), Results(d), spec)
        return results.y, gradients.x

    return both, [logits, other, jax.ShapeDtypeStruct((spec.rows,), F32)]


def loss_of(spec: Spec) -> tuple[Any, Any]:
    """Return a function and the types (shapes, dtypes) of its operands.

    The function runs the forward and the backward pass of a loss.
    """
    of_backward = changed(spec, direction="bwd", want_stats=False)

    def both(x: Any, labels: Any, *cotangents: Any) -> Any:
        loss, *entropy, stats = contract.call(mosaic, spec, x, labels)
        kept = x, stats, labels, None, *entropy
        return loss, entropy, contract.call(mosaic, of_backward, *kept, *cotangents)

    x, labels, *_ = norms.types_of(spec)
    row = jax.ShapeDtypeStruct((spec.rows,), F32)
    return both, [x, labels, *[row] * len(spec.operation.results)]


def name(spec: Spec) -> str:
    inner = f"x{spec.inner}" if spec.inner > 1 else ""
    direction = "both" if spec.returns_both else spec.direction
    return f"{spec.op}-{direction}-{spec.rows}x{spec.cols}{inner}-{spec.x_dtype}"


@pytest.mark.compiles
@pytest.mark.parametrize(
    "spec",
    [
        *FORWARD,
        *BACKWARD,
        TWO_NORMS,
        *STRIPS,
        *LOSSES,
        *IN_ONE_KERNEL,
        *HEADS,
        *GATED,
        *ACTIVATED,
        *SCALED,
    ],
    ids=name,
)
def test_kernels_compile(
    spec: Spec, capability: int, processes: dict[int, ProcessPoolExecutor]
) -> None:
    if capability == 120 and spec.direction == "bwd" and spec.cols == 65536 and spec.is_norm:
        # This kernel stores one row of each of two arrays in shared memory. Here, a row takes 256
        # KiB. Each block of a cluster stores a part of both rows. Both rows would fit only if a
        # cluster had at least 16 blocks, or if a block had more shared memory than on this GPU.
        assert "no rows of this length" in (support.why_unsupported(spec) or "")
        return
    if spec.direction == "bwd" and spec.is_norm and spec.cols == 1001:
        assert "multiple of 16 bytes" in (support.why_unsupported(spec) or "")
        return
    assert support.why_unsupported(spec) is None
    check(spec, capability, processes)


@pytest.mark.compiles
@pytest.mark.parametrize("line", PLACED, ids=str)
def test_softmaxes_of_logits_compile(
    line: Any, capability: int, processes: dict[int, ProcessPoolExecutor]
) -> None:
    check(line, capability, processes)


# ------------------------------------------------------------------- tests that need no CUDA plugin


def test_the_calls_meet_every_line() -> None:
    def lines(table: Any, specs: Any) -> set[Any]:
        return {next(line for line in table if line.fits(spec, B200)) for spec in specs}

    forwards = [*FORWARD, *(spec for spec in SCALED if spec.direction == "fwd")]
    assert lines(forward.TABLE, forwards) == set(forward.TABLE)

    of_norms = [norm_backward.norm_schedule(spec, B200) for spec in BACKWARD if spec.op == "norm"]
    assert {type(schedule) for schedule in of_norms} == {PipelinedRows, PipelinedNarrowRows}
    rings = [schedule for schedule in of_norms if isinstance(schedule, PipelinedRows)]
    assert {ring.cluster for ring in rings} >= {1, 4, 16}
    softmaxes = [softmax_schedule(spec, B200) for spec in BACKWARD if spec.op != "norm"]
    assert {schedule.cluster > 1 for schedule in softmaxes} == {True, False}
    assert {schedule.kind for schedule in softmaxes} == {"row_tile", "warpgroup_row", "split_row"}

    strips = [strip_schedule.strips_of(spec, B200) for spec in STRIPS]
    assert {found.width for found in strips} >= {line.width for line in strip_schedule.TABLE[:3]}
    assert {found.cluster > 1 for found in strips} == {True, False}


def norm_backwards() -> Iterator[Spec]:
    widths = [64, 512, 640, 760, 768, 1000, 1024, 2048, 3000, 4088, 4096, 5120, 8192, 16384, 32768]
    for op, cols, x, adds_dh in itertools.product(
        ("layer_norm", "rms_norm"), widths, (BF16, F32), (False, True)
    ):
        for given in ({}, {"saved": "input", "activation": "silu"}):
            yield backward_cases.make_spec(op, 8192, cols, x, x, adds_dh=adds_dh, **given)
    for cols, x, gate in itertools.product(widths, (BF16, F32), (BF16, F32)):
        yield norms.make_spec("norm_gated", "bwd", 8192, cols, (x, gate, x))


@pytest.mark.parametrize("gpu", [B200, RTX_5090], ids=["B200", "RTX 50"])
def test_backwards_fit_shared_memory(gpu: Gpu) -> None:
    """The scheduled number of blocks per SM fits into the SM's shared memory."""
    for spec in norm_backwards():
        schedule = norm_backward.norm_schedule(spec, gpu)
        if not isinstance(schedule, PipelinedRows | PipelinedNarrowRows):
            continue
        columns = spec.cols
        if isinstance(schedule, PipelinedRows):
            assert schedule.cluster == 1 or schedule.cluster in gpu.clusters
            columns = schedule.warpgroups * schedule.partition(spec.cols).width
        held = sum(dtype.itemsize for dtype in norm_backward.row_dtypes(spec))
        used = schedule.stages * schedule.rows * columns * held + 1024
        assert schedule.stages >= 2
        assert used <= gpu.smem
        assert schedule.blocks_per_sm * (used + 1024) <= gpu.shared_bytes


def test_strips_fit_shared_memory_of_99_kib() -> None:
    refused = 0
    for direction, cols, inner, x in itertools.product(
        (forward_cases, backward_cases), range(8, 24000, 179), (16, 784, 4096), (BF16, F32)
    ):
        spec = in_strips(direction, "layer_norm", 64, cols, inner, x)
        strips = strip_schedule.strips_of(spec, RTX_5090)
        refused += strips is None
        if strips is not None:
            arrays = strips.scratch([x] * (1 if spec.direction == "fwd" else 2))
            held = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays if hasattr(a, "dtype"))
            assert held + 1024 <= RTX_5090.smem
            assert strips.cluster <= 8
    assert refused < 1000  # The loop above has 1620 calls.


@pytest.mark.parametrize("capability", [90, 100, 103, 120, None])
def test_where_they_are_the_default(capability: int | None, monkeypatch) -> None:
    monkeypatch.setattr(support, "local_capability", lambda: capability)
    spec = forward_cases.make_spec("layer_norm", 8192, 4096, BF16, BF16)
    assert (support.why_not_default(spec) is None) == (capability in (90, None))


def test_older_gpus_are_refused(monkeypatch) -> None:
    """On older GPUs, the kernels are unsupported, even if they are requested explicitly."""
    monkeypatch.setattr(support, "local_capability", lambda: 89)
    for spec in (FORWARD[0], STRIPS[0]):
        assert "9.0 (Hopper) or newer" in (support.why_unsupported(spec) or "")
