"""The benchmark harness without a GPU: selections, timing and errors."""

import dataclasses
import itertools
import sys
import unittest.mock

import jax
import pytest
from program_error import assert_computes

from benchmarks import against_plain, calls, hlo, jax_side, plots, providers, run, save, workloads
from benchmarks.blocks import BLOCKS, BlockWorkload
from benchmarks.providers import PROVIDERS
from benchmarks.results import ROOT
from benchmarks.suites import SUITES, Selection, ShapedCell
from benchmarks.training import largest
from benchmarks.workloads import OPERATIONS, Workload

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SMALL = Selection(providers=("xla", "jnp"), ops=("rms_norm",), shapes=((4, 32),))
KERNELS = SUITES["kernels"]


# The cases (cells) that a command line selects.


@pytest.mark.parametrize(
    ("direction", "dtypes", "arrays"),
    [
        ("fwd", ("bfloat16", "bfloat16"), 2 * 2),
        ("fwd", ("float32", "bfloat16"), 4 + 2),
        ("bwd", ("bfloat16", "bfloat16"), 3 * 2),
        ("bwd", ("float32", "bfloat16"), 2 * 2 + 4),
        ("fwd+bwd", ("float32", "float32"), 5 * 4),
        ("fwd+bwd", ("float32", "bfloat16"), (4 + 2) + (2 * 2 + 4)),
    ],
)
def test_bytes(direction, dtypes, arrays):
    assert Workload("rms_norm", direction, 10, 30, *dtypes).bytes == 300 * arrays


@pytest.mark.parametrize(
    ("op", "dtype", "forward", "backward"),
    [
        # The number of bytes per element counts all arrays that are loaded or stored. Forward: x,
        # residual, y, h. Backward: y, dy, dh, and one gradient for both x and the residual.
        ("add_rms_norm", "bfloat16", 4 * 2, 4 * 2),
        ("residual_layer_norm", "float32", 4 * 4, 4 * 4),
        # As in the previous case, except that the residual, h and dh are float32. dx and the
        # gradient of the residual have different dtypes, so both are stored.
        ("add_layer_norm", "mixed", 2 + 4 + 2 + 4, 2 + 2 + 4 + 2 + 4),
        # Forward: x, residual, y. Backward: x, dy, dx; the residual's gradient is dy itself.
        ("post_norm", "bfloat16", 3 * 2, 3 * 2),
        # Forward: x, residual, y, h. Backward: x, y, dy, dh and two gradients.
        ("sandwich", "float32", 4 * 4, 6 * 4),
        # Forward: x, y. Backward: x, dy, dx.
        ("group_norm_silu", "bfloat16", 2 * 2, 3 * 2),
        # Forward: x, residual, y, h. Backward: x, y, dy, dh and two gradients.
        ("gated_add_layer_norm", "bfloat16", 4 * 2, 6 * 2),
        # Forward: x, gate, y. Backward: x, gate, dy and two gradients.
        ("gated_rms_norm", "bfloat16", 3 * 2, 5 * 2),
    ],
)
def test_bytes_of_blocks(op, dtype, forward, backward):
    assert BlockWorkload(op, "fwd", "10x30", dtype).bytes == 300 * forward
    assert BlockWorkload(op, "fwd+bwd", "10x30", dtype).bytes == 300 * (forward + backward)


def test_a_block_with_parameters_of_each_sample():
    workload = BlockWorkload("ada_layer_norm", "fwd+bwd", "2x5x30", "bfloat16")
    assert workload.bytes == 300 * (2 + 3) * 2  # x, y in the forward; y, dy, dx in the backward
    assert workload.parameter_shapes == ((2, 1, 30), (2, 1, 30))
    assert workload.row_operands == (((2, 5, 30), "bfloat16"),)


def test_a_block_with_operands_that_are_broadcast():
    masked = BlockWorkload("masked_softmax", "fwd", "2x3x5x7", "bfloat16")
    assert masked.row_operands == (((2, 3, 5, 7), "bfloat16"), ((2, 1, 5, 7), "bool"))
    assert masked.bytes == 210 * 2 * 2 + 70  # x and y, and the mask of 70 bytes
    biased = BlockWorkload("biased_softmax", "fwd+bwd", "2x3x5x7", "float32")
    assert biased.bytes == (210 * 5 + 105 * 2) * 4  # x and y; y, dy and dx; bias and dbias
    channels = BlockWorkload("channel_layer_norm", "fwd", "2x8x5x7", "float32")
    assert channels.cols == 8
    assert channels.parameter_shapes == ((8,), (8,))
    groups = BlockWorkload("group_norm", "fwd+bwd", "2x4x8x64", "float32")
    assert groups.parameter_shapes == ((64,), (64,))
    assert groups.bytes == 2 * 4 * 8 * 64 * 5 * 4
    assert groups.constants == ()
    rotated = BlockWorkload("rms_norm_rope", "fwd+bwd", "2x4x8x64", "bfloat16")
    assert rotated.constants == (1, 2)  # the rotary tables are operands 1 and 2


def test_the_grid():
    shapes = list(itertools.chain(*workloads.GRID.values()))
    assert len(shapes) == len(set(shapes)) == 29
    cells = list(workloads.grid())
    # There are 29 shapes and 2 directions. 4 operations have two dtypes each, and the 2 norms also
    # have mixed dtypes.
    assert len(cells) == len(set(cells)) == 29 * 2 * (4 * 2 + 2)
    assert {w.op for w in cells if w.x_dtype != w.y_dtype} == {"layer_norm", "rms_norm"}


def test_every_suite_asks_what_its_providers_offer():
    for suite in SUITES.values():
        cells = list(suite.cells(Selection()))
        assert cells
        assert len(cells) == len(set(cells))
    kernels = list(KERNELS.cells(Selection()))
    assert {c.op for c in kernels if c.provider == "liger"} == {"softmax", "layer_norm", "rms_norm"}
    assert {c.op for c in kernels if c.provider == "quack" and c.x_dtype != c.y_dtype} == {
        "rms_norm"
    }
    assert {c.direction for c in SUITES["api"].cells(Selection())} == {"fwd+bwd"}
    for name in ("training", "capacity"):
        cells = list(SUITES[name].cells(Selection()))
        assert len(cells) == 3 * 3 * 2 * 6  # models, remats, layers, variants
        few = SUITES[name].cells(Selection(ops=("llama-1b",), quick=True))
        assert {(c.model, c.remat) for c in few} == {("llama-1b", "none")}


def test_a_selection_is_a_part():
    cells = list(KERNELS.cells(dataclasses.replace(SMALL, directions=("bwd",))))
    assert {(c.op, c.direction, c.rows, c.cols) for c in cells} == {("rms_norm", "bwd", 4, 32)}
    assert {c.provider for c in cells} == {"xla", "jnp"}
    blocks = list(SUITES["blocks"].cells(dataclasses.replace(SMALL, ops=("rms_norm", "post_norm"))))
    assert {(c.op, c.direction, c.shape, c.dtype, c.provider) for c in blocks} == {
        ("post_norm", direction, "4x32", dtype, provider)
        for direction in ("fwd", "fwd+bwd")
        for dtype in ("bfloat16", "float32")
        for provider in ("xla", "jnp")
    }
    by_samples = SUITES["blocks"].cells(Selection(providers=("jnp",), shapes=((2, 4, 32),)))
    assert {(c.op, c.shape) for c in by_samples} == {
        ("ada_layer_norm", "2x4x32"),
        ("gated_add_layer_norm", "2x4x32"),
        ("column_softmax", "2x4x32"),
    }
    assert not list(KERNELS.cells(Selection(shapes=((2, 4, 32),))))
    few = {c.shape for c in SUITES["blocks"].cells(Selection(quick=True))}
    assert few == {"8192x4096", "8x2048x4096", "8x4096x4096"}
    quick = {(c.rows, c.cols) for c in KERNELS.cells(Selection(quick=True))}
    assert quick == set(workloads.QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "got 'speed'; expected one of kernels, api"),
        (["--shapes", "8192,4096"], "got '8192,4096'; expected ROWSxCOLS"),
        (["--shapes", "0x4096"], "got '0x4096'; expected ROWSxCOLS"),
        (["--providers", "apex"], "invalid choice: 'apex'"),
        (["--dtypes", "int8"], "invalid choice: 'int8'"),
        (["--ops", "batch_norm"], "invalid choice: 'batch_norm'"),
        (["--directions", "sideways"], "invalid choice: 'sideways'"),
        (["--workers", "0"], "got '0'; expected a number, 1 or more"),
        (["--workers", "all"], "got 'all'; expected a number, 1 or more"),
        (["--limit", "0"], "got '0'; expected seconds, more than 0"),
        (["--limit", "long"], "got 'long'; expected seconds, more than 0"),
        (["--out", "results.csv"], "got 'results.csv'; expected a folder"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        run.parse(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# How calls are timed.


def test_medians_over_calls():
    timing = calls.of_kernels([1.0, 5.0, 2.0, 6.0, 3.0, 10.0], calls=3)
    assert (timing.us, timing.main_us) == (8.0, 6.0)
    assert timing.gbps(16_000) == pytest.approx(2.0)


def test_calls_that_differ_are_an_error():
    with pytest.raises(RuntimeError, match="7 kernels in 3 calls"):
        calls.of_kernels([1.0] * 7, calls=3)
    with pytest.raises(RuntimeError, match="0 kernels in 3 calls"):
        calls.of_kernels([], calls=3)


def test_rotating_buffers_are_colder_than_the_cache():
    for size in (10_000_000, 100_000_000, 10_000_000_000):
        assert calls.buffers_for(size) >= 2
        assert calls.buffers_for(size) * size >= 5 * calls.L2_BYTES


# The search for the largest batch that fits into memory.


@pytest.mark.parametrize("limit", [0, 99, 100, 101, 1234, 54_321])
@pytest.mark.parametrize(
    "used", [lambda n: 90 + 7 * n, lambda n: 50 + n * n, lambda n: 100 * (1 + n // 16), lambda n: n]
)
@pytest.mark.parametrize("start", [1, 8])
def test_the_largest_that_fits(used, limit, start):
    found = largest(used, limit, {start: used(start)})
    assert found == max((n for n in range(1, limit + 2) if used(n) <= limit), default=0)


def test_a_line_needs_few_questions():
    asked = []

    def used(n):
        asked.append(n)
        return 3_000_000_000 + 700_000_000 * n

    assert largest(used, 80 * 10**9, {8: used(8)}) == 110
    assert len(asked) <= 5


# What the measured implementations ("providers") compute.


def plain(op):
    if op in ("softmax", "log_softmax"):
        return getattr(jax.nn, op)
    return lambda x, scale, bias=None: save.plain(x, scale, bias)


def test_the_docs_have_the_cases_of_their_tables():
    numerics, memory = ((ROOT / "docs" / f"{n}.md").read_text() for n in ("numerics", "memory"))
    assert all(f"| {case.label} |" in numerics for case in save.cases())
    assert all(block.removesuffix(" norms") in memory for block in save.BLOCKS)


def test_every_provider_has_a_line_of_its_own():
    colours = [colour for colour, _ in plots.STYLES.values()]
    assert plots.STYLES.keys() == PROVIDERS.keys()
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("name", ["jaxnorm", "xla", "jnp", "flax"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_providers_compute_the_operation(name, op):
    """All measured libraries compute the same function, with the same epsilon and dtype of y."""
    workload = Workload(op, "fwd", 4, 32, "float32", "float32")
    if not PROVIDERS[name].offers(workload):
        pytest.skip(f"{name} has no {op}")
    (x,), parameters, _ = jax_side.random_arrays(0, *jax_side.arguments_of(workload))
    operands = 1e-3 * x, *parameters  # x^2 is near epsilon, so that epsilon matters.
    function = providers.function(name, op, "float32")
    assert_computes(function(*operands), plain(op), *operands, like=function)


_LIGER_CUTE = (
    *("liger_kernel", "liger_kernel.functional", "liger_kernel.ops", "liger_kernel.ops.cutedsl"),
    "liger_kernel.ops.cutedsl.ops",
    "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
)
_QUACK = (
    "quack",
    *(
        f"quack.{m}"
        for m in ("cross_entropy", "linear", "linear_cross_entropy", "rmsnorm", "softmax")
    ),
)
LIBRARIES = {
    "cce": ("cut_cross_entropy",),
    "cce_unfiltered": ("cut_cross_entropy",),
    "fla": ("fla", "fla.modules", "fla.modules.fused_norm_gate", "fla.modules.layernorm_gated"),
    "liger": ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"),
    "liger_cute": _LIGER_CUTE,
    "liger_sm90": _LIGER_CUTE,
    "quack": _QUACK,
    "quack_chunks": _QUACK,
}


@pytest.fixture
def mocked(name, monkeypatch):
    """Replace torch and the library of the provider `name` by mocks."""
    adapter = f"benchmarks.providers.{PROVIDERS[name].adapter}"
    for module in ("torch", *LIBRARIES[name]):
        monkeypatch.setitem(sys.modules, module, unittest.mock.MagicMock())
    sys.modules["torch"].autograd.Function = type("Function", (), {"apply": callable})
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    yield
    sys.modules.pop(adapter, None)  # Do not leave mocks to other tests.


@pytest.mark.usefixtures("mocked")
@pytest.mark.parametrize("name", LIBRARIES)
def test_adapters_have_what_the_table_offers(name):
    """Each adapter has all functions that the table `PROVIDERS` lists for it.

    An adapter is a module that calls the functions of a measured library. Libraries that need a GPU
    are replaced by mocks.
    """
    provider = PROVIDERS[name]
    for op in (*provider.operations, *provider.blocks, *provider.losses, *provider.linear):
        assert callable(providers.function(name, op, "float32"))


@pytest.mark.parametrize(
    ("name", "module", "function", "given"),
    [
        ("quack", "quack.linear_cross_entropy", "chunked_linear_cross_entropy", {"tuned": False}),
        (
            "quack_chunks",
            "quack.linear_cross_entropy",
            "chunked_linear_cross_entropy",
            {"tuned": False, "use_scaled_exp": False},
        ),
        (
            "liger_sm90",
            "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
            "liger_fused_linear_cross_entropy_sm90",
            {},
        ),
        ("cce", "cut_cross_entropy", "linear_cross_entropy", {}),
        ("cce_unfiltered", "cut_cross_entropy", "linear_cross_entropy", {"filter_eps": None}),
    ],
)
@pytest.mark.usefixtures("mocked")
def test_linear_losses_get_the_weight_as_torch_stores_it(name, module, function, given):
    """The benchmarks call a library's loss with the weight transposed, as torch stores it.

    Variants of the benchmark for the same library differ in the options that they pass.
    """
    x, weight, labels = (unittest.mock.MagicMock() for _ in range(3))
    providers.function(name, "linear_cross_entropy", "float32")(x, weight, labels)
    called = getattr(sys.modules[module], function)
    called.assert_called_once_with(x, weight.t(), labels, **given)


#: Maps the number of axes of a block's arrays to a small shape.
SMALL_SHAPES = {2: "4x32", 3: "2x4x32", 4: "2x3x4x32"}


@pytest.mark.parametrize("name", ["jaxnorm", "xla", "composed", "jnp"])
@pytest.mark.parametrize("op", BLOCKS)
def test_the_providers_compute_the_block(name, op):
    """All measured implementations compute jnp's results.

    The results have the dtypes that the benchmark assumes when it counts bytes.
    """
    shape = SMALL_SHAPES[len(BLOCKS[op].shapes[0])]
    for dtype in ("float32", "mixed"):
        workload = BlockWorkload(op, "fwd", shape, dtype)
        if not PROVIDERS[name].offers(workload):
            continue
        rows, parameters, _ = jax_side.random_arrays(0, *jax_side.arguments_of(workload))
        parameters = [p.astype("bfloat16").astype("float32") for p in parameters]
        expected, ours = (providers.function(n, op, workload.y_dtype) for n in ("jnp", name))
        actual = jax.tree.leaves(ours(*rows, *parameters))
        assert [a.dtype for a in actual] == [d for _, d in workload.cotangents]
        assert_computes(actual, expected, *rows, *parameters, like=ours)


def test_gradients_that_are_arrays_of_their_own_are_returned():
    for op, dtype, count in [
        ("add_rms_norm", "float32", 1),
        ("add_rms_norm", "mixed", 2),
        ("post_norm", "float32", 1),
        ("sandwich", "float32", 2),
        ("masked_softmax", "bfloat16", 1),
        ("biased_softmax", "float32", 2),
    ]:
        shape = SMALL_SHAPES[len(BLOCKS[op].shapes[0])]
        cell = ShapedCell(op, "fwd+bwd", shape, dtype, "jaxnorm")
        program = jax_side.compile_cell(cell)
        inputs = jax_side.random_arrays(0, *jax_side.arguments_of(cell.workload))
        results, of_rows, of_parameters = program.call(*program.operands(*inputs))
        assert len(results) == len(BLOCKS[op].results)
        assert len(of_rows) == count
        assert len(of_parameters) == len(BLOCKS[op].parameters)


# Additional operations of a compiled program.

PROGRAM = """HloModule jit_step, entry_computation_layout={(bf16[8,4]{1,0})->f32[8,4]{1,0}}

%wrapped_convert_computation (param_0: bf16[8,4]) -> f32[8,4] {
  %param_0 = bf16[8,4]{1,0} parameter(0)
  ROOT %convert.1 = f32[8,4]{1,0} convert(%param_0)
}

%fused_add (param_0.1: bf16[8,4]) -> f32[8,4] {
  %param_0.1 = bf16[8,4]{1,0} parameter(0)
  %convert.2 = f32[8,4]{1,0} convert(%param_0.1)
  ROOT %add.1 = f32[8,4]{1,0} add(%convert.2, %convert.2)
}

%command_buffer (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %copy.1 = bf16[8,4]{1,0} copy(%p)
}

ENTRY %main.1 (x.1: bf16[8,4]) -> (f32[8,4], bf16[8,4], f32[8,4]) {
  %x.1 = bf16[8,4]{1,0} parameter(0), metadata={op_name="x"}
  %copy.2 = f32[4]{0} copy(%scale)
  %wrapped_convert = f32[8,4]{1,0} fusion(%x.1), kind=kLoop, calls=%wrapped_convert_computation
  %loop_add_fusion = f32[8,4]{1,0} fusion(%x.1), kind=kLoop, calls=%fused_add
  %call = bf16[8,4]{1,0} call(%x.1), to_apply=%command_buffer
  %copy-start.1 = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) copy-start(%loop_add_fusion)
  %copy-done.1 = f32[8,4]{1,0} copy-done(%copy-start.1)
  ROOT %tuple.1 = (f32[8,4]{1,0}, bf16[8,4]{1,0}, f32[8,4]{1,0}) tuple(%wrapped_convert, %call)
}
"""


def test_extra_passes():
    """Two things count as extra passes: fusions that only convert dtypes, and copies.

    Asynchronous copies count, too.
    """
    assert hlo.extra_passes(PROGRAM, 32) == 3
    assert hlo.extra_passes(PROGRAM, 4) == 4  # also the copy of 4 elements
    assert hlo.extra_passes(PROGRAM, 33) == 0


def test_extra_passes_of_a_compiled_program():
    x = jax.ShapeDtypeStruct((64, 32), "float32")
    for function, passes in [(lambda x: x.T, 1), (lambda x: jax.numpy.sin(x) + x, 0)]:
        assert hlo.extra_passes(jax.jit(function).lower(x).compile().as_text(), x.size) == passes


def test_scopes_of_kernels():
    assert hlo.scopes(PROGRAM) == {"x_1": "x"}


COLLECTIVES = """
%body.1 (param: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-reduce.1 = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}
ENTRY %main.2 (param.1: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%tuple), body=%body.1, backend_config={"known_trip_count":{"n":"3"}}
  %s = ((bf16[4,2]{1,0}), bf16[8,2]{1,0}) all-gather-start(%y), replica_groups=[4,2]<=[8]
  %d = bf16[8,2]{1,0} all-gather-done(%s)
  %p = f32[16]{0} all-reduce(%z), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %r = f32[8]{0} reduce-scatter(%v), replica_groups=mesh['data'=4,'model'=2] {'data'}
}
"""


def test_collectives_of_a_program():
    """`hlo.collectives` returns two numbers for each collective of a program.

    The first is the number of bytes that a device sends when the collective runs once. The second
    is how often the collective runs (more than once in a loop). All-reduces use a ring.
    """
    found = hlo.collectives(COLLECTIVES, 8)
    assert [(each.name, each.size, each.runs) for each in found] == [
        ("all-reduce", 2 * 32 * 3 // 4, 3),
        ("all-gather", 32 // 2, 1),
        ("all-reduce", 2 * 64 * 7 // 8, 1),
        ("reduce-scatter", 32 * 3, 1),
    ]
    assert found[0].bytes == 3 * found[0].size
    assert found[1].array == "bf16[8,2]"


# Calls that are timed against plain JAX.


def test_against_plain_jax(monkeypatch, capsys):
    """All variants of a case compute the same, and the table has a ratio for each direction."""
    found = [
        against_plain._scaled_losses("float32", 8, 256),
        against_plain._attentions(1, 2, 8),
        against_plain._linear_losses("float32", 8, 16, 256),
        against_plain._vmapped(8, 32, 2),
        against_plain._scans(8, 32, 2),
    ]
    cases = dict(itertools.chain(*found))
    for case in cases.values():
        operands = against_plain._arrays(0, case.operands, case.classes)
        types = {
            name: [(a.shape, a.dtype) for a in jax.tree.leaves(jax.eval_shape(f, *operands))]
            for name, f in case.variants.items()
        }
        assert all(each == types["plain"] for each in types.values()), types
    divergence, *_, scan = cases
    monkeypatch.setattr(against_plain, "cases", lambda: cases)
    monkeypatch.setattr(calls, "REPEATS", 1)
    monkeypatch.setattr(sys, "argv", ["against_plain", divergence, scan])
    against_plain.main()
    _, *tables = capsys.readouterr().out.split("\n\n")
    assert [text.splitlines()[0] for text in tables] == [divergence, scan]
    for text, passes in zip(tables, (3, 1), strict=True):
        plain, *others = [line.split() for line in text.splitlines()[2:]]
        assert plain.count("1.00") == 2 * passes
        assert others
