"""The kernel of rms_norm_linear compiles for every GPU, by each line of its table."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_compile import BF16, F16, F32, GPUS, compile_call, cuda, kernels_in  # noqa: F401

from jaxnorm import implementation_for, rms_norm_linear
from jaxnorm_kernels.specs import LinearSpec
from jaxnorm_kernels.triton import linear_schedule as schedules
from jaxnorm_kernels.triton import support
from jaxnorm_kernels.triton.linear_schedule import LINES

# What a kernel has most of, and what it has least of.
FULL = {"scale_dtype": F32, "bias_dtype": F32, "activation": "gelu", "want_z": True}
OPTIONS = {"full": {**FULL, "want_rstd": True}, "bare": {}}
MIXES = {  # x, weight, the product, y
    "bfloat16": (BF16, BF16, BF16, BF16),
    "float16": (F16, F16, F16, F16),
    "float32 weight": (BF16, F32, BF16, F32),
}


def make_spec(rows=8192, cols=4096, features=4096, mix="bfloat16", **options):
    return LinearSpec(rows, cols, features, *MIXES[mix], epsilon=1e-6, **options)


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.tile_rows}x{line.tile_features}")
@pytest.mark.parametrize("gpu", GPUS)
def test_table_compiles(gpu, line):
    """Without spills, and with room for as many programs as a line is made for."""
    # In turn, so that each line and each GPU meets all.
    turn = [*GPUS].index(gpu) + LINES.index(line)
    shape = {"cols": 4095, "features": 4094} if line.unaligned else {}
    spec = make_spec(mix=[*MIXES][turn % 3], **shape, **OPTIONS[[*OPTIONS][turn % 2]])
    schedule = schedules.of_line(line, spec, GPUS[gpu])
    (kernel,) = compile_call(spec, GPUS[gpu], schedule=schedule)
    assert kernel.spilled == 0
    assert (kernel.shared + 1024) * line.per_sm <= GPUS[gpu].smem + 1024
    assert math.ceil(kernel.registers / 8) * 8 * 32 * line.warps * line.per_sm <= 2**16
    assert line.unaligned or schedule.stages >= 3


@pytest.mark.parametrize("cols", [4096, 4100, 4090])
def test_tiles_are_copied_16_bytes_at_a_time(cols):
    """Ahead of the product, where rows are multiples of 16 bytes; else 8, or one by one."""
    spec = make_spec(cols=cols, features=cols, **FULL)
    (kernel,) = compile_call(spec, GPUS["sm_80"])
    sizes = re.findall(
        r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)", kernel.ptx
    )
    assert {*sizes} == {4096: {"0x10"}, 4100: {"0x8"}, 4090: set()}[cols]


@pytest.mark.parametrize("gpu", GPUS)
def test_products_are_tensor_cores(gpu):
    (kernel,) = compile_call(make_spec(**FULL), GPUS[gpu])
    name = "wgmma.mma_async" if gpu == "sm_90" else "mma.sync"
    assert re.search(rf"{name}[\w.]*\.f32\.bf16\.bf16", kernel.ptx)


@pytest.mark.parametrize("mix", MIXES)
def test_tiles_meet_no_register_on_their_way(mix):
    """What Hopper's tensor cores multiply, of x and of weight, they read from shared memory."""
    (kernel,) = compile_call(make_spec(mix=mix, **FULL), GPUS["sm_90"])
    assert re.search(r"wgmma\.mma_async", kernel.ptx)
    assert not re.search(r"ld\.shared|ldmatrix", kernel.ptx.partition("wgmma")[0])
    (product,) = re.findall(r"ttng\.warp_group_dot (%\S+), (%\S+),", kernel.ttgir)
    for operand in product:
        (made,) = re.findall(rf"{re.escape(operand)} = (\S+)", kernel.ttgir)
        assert made == "ttg.memdesc_index"


def test_what_is_not_wanted_is_not_written():
    def stores(**options):
        spec = make_spec(**{**FULL, "want_rstd": True, **options})
        return compile_call(spec, GPUS["sm_80"])[0].ptx.count("st.global")

    assert stores(want_z=True) == 2 * stores(want_z=False)


@pytest.mark.parametrize(("rows", "features"), [(2**20, 16384), (64, 2**20)])
def test_large_arrays_are_addressed_with_64_bits(rows, features):
    (kernel,) = compile_call(make_spec(rows, 4096, features), GPUS["sm_80"])
    assert "arith.extsi" in kernel.ttgir
    assert not re.search(rf"muli [^\n]*\bc{features}_i32", kernel.ttgir)


def test_every_line_is_used():
    rows, cols, features = (1, 30, 60, 500, 8192), (512, 4095), (256, 1200, 2500, 4096, 8192)
    for gpu in GPUS.values():
        chosen = {
            schedules.choose_line(make_spec(*shape), gpu)
            for shape in itertools.product(rows, cols, features)
        }
        assert chosen == {*LINES}
    assert all(line.tile_rows * line.tile_features >= support.LEAST_TILE for line in LINES)


@pytest.mark.parametrize(
    ("rows", "features", "tile"),
    [(1, 8192, (16, 64)), (1, 1024, (16, 32)), (1024, 1024, (64, 128)), (8192, 4096, (128, 256))],
)
def test_few_rows_and_features_have_small_tiles(rows, features, tile):
    schedule = schedules.choose(make_spec(rows, 4096, features), GPUS["sm_80"])
    assert (schedule.tile_rows, schedule.tile_features) == tile


# ----------------------------------------------------------------------------------- as JAX sees it


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("setting", [jax.enable_x64, jax.check_tracer_leaks])
def test_calls_lower(setting):
    x, weight = jax.ShapeDtypeStruct((2, 6, 300), BF16), jax.ShapeDtypeStruct((300, 72), BF16)
    scale, bias = jax.ShapeDtypeStruct((300,), F32), jax.ShapeDtypeStruct((72,), F32)

    def loss(x, weight, scale, bias):
        y = rms_norm_linear(x, weight, scale, bias=bias, activation="silu", implementation="triton")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    with setting(True):
        assert kernels_in(loss, x, weight, scale, bias) == 1
        assert kernels_in(jax.grad(loss, (0, 1, 2, 3)), x, weight, scale, bias) == 2
        batch = jax.ShapeDtypeStruct((3, *x.shape), BF16)
        batched = jax.vmap(loss, (0, None, None, None))
        assert kernels_in(batched, batch, weight, scale, bias) == 1


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind", ["Explicit", "Manual"])
def test_meshes(kind):
    """Rows and features are split; results vary over what x and weight vary over."""
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    axis_types = explicit if kind == "Explicit" else None
    mesh = jax.make_mesh((2, 2), ("rows", "features"), axis_types=axis_types)
    specs = jax.P("rows", None), jax.P(None, "features")
    step = functools.partial(rms_norm_linear, activation="gelu", implementation="triton")
    if kind == "Manual":
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P("rows", "features"))
    with jax.set_mesh(mesh):
        x, weight = (
            jax.ShapeDtypeStruct(shape, BF16, sharding=jax.NamedSharding(mesh, spec))
            for shape, spec in zip(((64, 512), (512, 256)), specs)
        )
        assert kernels_in(step, x, weight) == 1


def test_the_default_is_not_it():
    plan = implementation_for("rms_norm_linear", (8192, 4096), BF16, features=1024, platform="cuda")
    assert plan.forward.name == "xla"
    assert "triton: XLA's norm and product are faster than its kernel" in plan.forward.reason
    named = implementation_for(
        "rms_norm_linear", (8192, 4096), np.dtype("float16"), implementation="triton"
    )
    assert named.forward.name == "triton"
