"""For each rule of the schedule tables, compile a call for three GPUs: H100, B200 and RTX 50.

Schedules are chosen for the sizes of these GPUs, but nothing was timed on the last two. Compiling
needs JAX's CUDA plugin but no GPU (`make compile` installs the plugin in CI). One test needs
neither: it checks that these calls cover every rule.
"""

import functools
import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import contract
import norms
import pytest
from cases import make_spec
from h100 import CONFIGS, SPILLED, Compiled, Compiler, assert_fits
from logits_cases import of_width, operand_types
from specs import BF16, F32, build_spec, changed
from test_losses_mosaic import both_passes, types_of

from jaxnorm_kernels import mosaic
from jaxnorm_kernels.broadcasts import Shared
from jaxnorm_kernels.mosaic import support
from jaxnorm_kernels.mosaic.device import gpu as gpu_module
from jaxnorm_kernels.mosaic.device.gpu import B200, GPUS
from jaxnorm_kernels.mosaic.loops.narrow_rows import PipelinedNarrowRows
from jaxnorm_kernels.mosaic.loops.pipelined import PipelinedRows
from jaxnorm_kernels.mosaic.schedules import forward, norm_backward
from jaxnorm_kernels.mosaic.schedules import strips as strip_schedule
from jaxnorm_kernels.mosaic.schedules.softmax_backward import softmax_schedule
from jaxnorm_kernels.specs import Spec

BF16S, F32S = (BF16, BF16), (F32, F32)
GATED_SUM = "add_layer_norm with a gate"
GELU = {"saved": "input", "activation": "gelu"}

# Each entry: the function, the numbers of rows and columns, the dtypes, and options.
FORWARD = [
    make_spec(function, "fwd", rows, cols, mix, **options)
    for function, rows, cols, mix, options in (
        ("layer_norm", 8192, 512, BF16S, {}),  # pipelined_tile
        ("softmax", 8192, 1000, BF16S, {}),  # row_tile
        ("rms_norm", 8, 8192, BF16S, {}),  # split_row, for few rows
        ("layer_norm", 8192, 4096, BF16S, {}),  # pipelined_row
        ("layer_norm", 4096, 65536, (F32, BF16), {}),  # pipelined_row, wide
        ("rms_norm", 8192, 4096, F32S, {}),  # warpgroup_row
        ("log_softmax", 8192, 16384, F32S, {}),  # pipelined_row that rereads shared memory
        ("softmax", 8192, 32768, BF16S, {}),  # split_row
        ("softmax", 1024, 2**18, BF16S, {}),  # split_row with rows of half a MiB
        # Rows whose length is not a multiple of 16 bytes.
        ("softmax", 8, 8199, BF16S, {}),
        ("softmax", 8192, 4095, F32S, {}),
        ("softmax", 8192, 50257, BF16S, {}),
        ("softmax", 1024, 140001, F32S, {}),
        ("layer_norm", 8192, 1001, BF16S, GELU),
        ("rms_norm_gated", 8192, 1001, BF16S, {}),
        # With a residual, a branch scale or a gate.
        ("add_layer_norm", 8192, 4096, BF16S, {}),
        ("add_rms_norm", 8192, 12288, BF16S, {}),
        ("rms_norm_add", 8192, 5120, F32S, {}),
        ("rms_norm_add_rms_norm", 8192, 4096, BF16S, {}),
        (GATED_SUM, 8192, 1152, BF16S, norms.grouped(8)),
        (GATED_SUM, 8192, 65536, BF16S, {}),
        ("rms_norm_gated", 8192, 128, BF16S, {}),
        ("rms_norm_gated", 8192, 4096, F32S, {"norm_before_gate": False}),
        ("layer_norm", 8192, 128, BF16S, GELU),
        ("rms_norm", 8192, 4096, F32S, GELU),
    )
]
BACKWARD = [
    make_spec(function, "bwd", rows, cols, mix, **options)
    for function, rows, cols, mix, options in (
        ("layer_norm", 8192, 128, BF16S, {}),
        ("layer_norm", 8192, 512, F32S, {}),
        ("layer_norm", 8192, 1024, BF16S, {}),
        ("rms_norm", 8192, 4096, BF16S, {"adds_dh": True}),
        ("layer_norm", 8192, 8192, F32S, {"saved": "input"}),
        ("layer_norm", 4096, 32768, BF16S, {}),
        ("rms_norm", 4096, 65536, F32S, {}),
        ("layer_norm", 8192, 4096, BF16S, {"scale_groups": 16, "bias_groups": 16}),
        ("layer_norm", 8192, 4088, BF16S, {"adds_dh": True}),
        ("softmax", 8192, 512, BF16S, {}),
        ("softmax", 8192, 4096, BF16S, {}),
        ("log_softmax", 8192, 8192, F32S, {}),
        ("softmax", 8192, 50257, BF16S, {}),
        ("log_softmax", 1024, 65536, F32S, {}),
        ("rms_norm_add_rms_norm", 8192, 4096, BF16S, {}),
        (GATED_SUM, 8192, 256, F32S, {}),
        (GATED_SUM, 8192, 1152, BF16S, norms.grouped(8)),
        (GATED_SUM, 8192, 4096, (BF16, F32, BF16), {}),
        ("rms_norm_gated", 8192, 128, BF16S, {}),
        ("rms_norm_gated", 8192, 4096, F32S, {"norm_before_gate": False}),
        ("layer_norm", 8192, 128, BF16S, GELU),
        ("rms_norm", 8192, 4096, F32S, GELU),
    )
]
# Norms of arrays (outer, cols, inner) over their middle axis, with parameters per inner element.
STRIPS = [
    changed(make_spec(op, direction, outer * inner, cols, (x, x)), inner=inner, inner_params=True)
    for direction, op, outer, cols, inner, x in (
        ("fwd", "layer_norm", 64, 49, 1024, BF16),  # strips of 128 inner elements
        ("fwd", "layer_norm", 64, 48, 4096, F32),  # strips of 64
        ("fwd", "layer_norm", 32, 512, 4096, BF16),  # strips of 32
        ("fwd", "rms_norm", 8, 4096, 4096, BF16),  # strips shared by a cluster
        ("bwd", "layer_norm", 32, 256, 4096, BF16),
        ("bwd", "layer_norm", 8, 4096, 4096, F32),
        ("bwd", "rms_norm", 8, 4096, 784, F32),
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
        # The logits of `linear_kl_divergence` are float32.
        ("kl_divergence", 2048, 128256, F32, {"teacher_dtype": F32}),
        ("kl_divergence", 2048, 50257, F32, {"teacher_dtype": F32, "reverse": True}),
    )
]
HEADS = [
    make_spec(
        *("rms_norm_rope", direction, 4 * 2048 * heads, cols, mix),
        rotated=rotated,
        table_rows=Shared(((4, False), (2048, True), (heads, False)), has_columns=True),
    )
    for heads, cols, rotated, mix in [
        (32, 128, 128, (BF16, F32, BF16)),
        (5, 80, 32, (F32, F32, F32)),
        (32, 512, 512, (F32, F32, BF16)),
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


@pytest.fixture(params=[90, 100, 120], ids=["H100", "B200", "RTX 50"])
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
    """Return a function that calls the kernel, and the types (shapes, dtypes) of its operands.

    The function of a loss runs both passes.
    """
    if spec.is_loss:
        return both_passes(spec, parts=None), types_of(spec)
    results = slice(2 if spec.op == "norm_rope" else None)
    return (lambda *operands: contract.call(mosaic, spec, *operands)[results]), norms.types_of(spec)


def name(spec: Spec) -> str:
    inner = f"x{spec.inner}" if spec.inner > 1 else ""
    return f"{spec.op}-{spec.direction}-{spec.rows}x{spec.cols}{inner}-{spec.x_dtype}"


SPECS = [*FORWARD, *BACKWARD, *STRIPS, *LOSSES, *HEADS]


@pytest.mark.compiles
@pytest.mark.parametrize(
    "work", [*SPECS, *PLACED], ids=lambda a: name(a) if isinstance(a, Spec) else str(a)
)
def test_kernels_compile(
    work: Any, capability: int, processes: dict[int, ProcessPoolExecutor]
) -> None:
    """Kernels compile, and spill hardly any registers.

    An H100 also has registers for the scheduled number of blocks.
    """
    if isinstance(work, Spec):
        refusal = support.why_unsupported(work)
        if capability == 120 and work.direction == "bwd" and work.cols == 65536 and work.is_norm:
            # This kernel stores one row of each of two arrays in shared memory. Here, a row takes
            # 256 KiB. Each block of a cluster stores a part of both rows. Both rows would fit only
            # if a cluster had at least 16 blocks, or if a block had more shared memory.
            assert "no rows of this length" in (refusal or "")
            return
        assert refusal is None
    kernels = processes[capability].submit(compiled, work, capability).result()
    assert kernels
    assert max(kernel.spilled for kernel in kernels) <= SPILLED
    if capability == 90 and isinstance(work, Spec):
        for kernel in kernels:
            assert_fits(kernel, work)


def test_the_calls_meet_every_line() -> None:
    def lines(table: Any, specs: Any) -> set[Any]:
        return {next(line for line in table if line.fits(spec, B200)) for spec in specs}

    assert lines(forward.TABLE, FORWARD) == set(forward.TABLE)

    of_norms = [norm_backward.norm_schedule(spec, B200) for spec in BACKWARD if spec.op == "norm"]
    assert {type(schedule) for schedule in of_norms} == {PipelinedRows, PipelinedNarrowRows}
    rings = [schedule for schedule in of_norms if isinstance(schedule, PipelinedRows)]
    assert {ring.cluster for ring in rings} >= {1, 4, 16}
    softmaxes = [softmax_schedule(spec, B200) for spec in BACKWARD if not spec.is_norm]
    assert {schedule.cluster > 1 for schedule in softmaxes} == {True, False}
    assert {schedule.kind for schedule in softmaxes} == {"row_tile", "warpgroup_row", "split_row"}

    strips = [strip_schedule.strips_of(spec, B200) for spec in STRIPS]
    assert {found.width for found in strips} >= {line.width for line in strip_schedule.TABLE[:3]}
    assert {found.cluster > 1 for found in strips} == {True, False}
