"""Triton's kernels compile for Ampere, Ada and Hopper GPUs that need not be present.

The kernels have the schedules of the schedule tables. Triton's own compiler generates the machine
code, so the numbers of registers and bytes of shared memory are those on the GPU. Further tests
lower JAX programs with these kernels. They need JAX's CUDA plugin, but no GPU.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from compiling import compile_call
from functions import FUNCTIONS, Sizes, floats_in, gradients, operands_of
from specs import BF16, F32, build_spec

import jaxnorm
from jaxnorm_kernels.triton.launch import Gpu
from jaxnorm_kernels.triton.schedule import choose

# A100, RTX 4090 and H100: compute capability, SMs, and bytes of shared memory that a program may
# use.
GPUS = {
    "sm_80": Gpu(80, 108, 163 * 1024),
    "sm_89": Gpu(89, 128, 99 * 1024),
    "sm_90": Gpu(90, 132, 227 * 1024),
}
OPS = ("softmax", "log_softmax", "rms_norm", "layer_norm")
# Short rows, a width for each rule of the tables, widths that no block divides, and widths that
# need a loop over the row.
COLS = [1, 64, 1000, 2048, 3000, 4095, 4096, 5120, 8192, 12288, 16384, 32768, 50257, 131072]


#: The entries of the table of functions whose calls Triton's kernels support.
NAMES = [
    name
    for name, function in FUNCTIONS.items()
    if not {"classes", "candidates", "of_groups", "of_heads", "branch"} & {*function.kinds.split()}
    and "linear" not in name
    and not name.endswith(("of scales", "h alone is used"))
]
NAMES.append("add_rms_norm with a gate")


def make_spec(op, direction, rows, cols, x=BF16, y=BF16, **changes):
    if "softmax" in op:
        return build_spec(op, direction, rows, cols, x, y)
    layer = {"subtract_mean": True, "bias_dtype": F32} if op == "layer_norm" else {}
    norm = {"scale_dtype": F32, "epsilon": 1e-6, "want_stats": True, **layer, **changes}
    return build_spec("norm", direction, rows, cols, x, y, **norm)


def check(spec, gpu):
    """Assert that the call compiles, and needs no more memory and registers than planned."""
    for kernel in compile_call(spec, gpu):
        assert kernel.shared <= gpu.smem
        schedule = choose(spec, gpu)
        assert kernel.registers <= schedule.registers
        # Some values of each column may spill: d, the saved value, the gain, the bias, two sums
        # over rows, and dx. Addresses and whole arrays may not.
        tile = schedule.pieces * schedule.block * schedule.tile_rows
        columns = tile / (32 * schedule.warps)
        assert kernel.spilled <= 7 * 4 * max(columns, 1)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    ("op", "direction", "cols"),
    [
        (op, direction, cols)
        for op, direction, cols in itertools.product(OPS, ["fwd", "bwd"], COLS)
        if "softmax" in op or direction == "bwd" or cols <= 16384
    ],
)
@pytest.mark.parametrize("gpu", GPUS)
def test_tables_compile(gpu, op, direction, cols, dtype):
    check(make_spec(op, direction, 4096, cols, dtype, dtype), GPUS[gpu])


def test_statistics_are_written_only_where_they_are_wanted():
    def stores(**changes):
        (kernel,) = compile_call(make_spec("layer_norm", "fwd", 64, 256, **changes), GPUS["sm_80"])
        return kernel.ptx.count("st.global")

    none, rstd, both = stores(want_stats=False), stores(), stores(saved="input")
    assert none < rstd < both


@pytest.mark.parametrize("cols", [256, 1000, 4096, 16384])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_elements_are_read_and_written_16_bytes_at_a_time(op, dtype, cols):
    for direction in ("fwd", "bwd"):
        spec = make_spec(op, direction, 32768, cols, dtype, dtype)
        for kernel in compile_call(spec, GPUS["sm_80"]):
            # Vectors consist of 4-byte words. Numbers that are loaded once per row have 4 bytes,
            # too.
            kinds = re.findall(r"(?:ld|st)\.global[\w.:]*", kernel.ptx)
            assert {kind.split(".")[-1] for kind in kinds} == {"b32"}
            assert any(".v4." in kind for kind in kinds)


def test_large_arrays_are_addressed_with_64_bits():
    """Offsets in arrays of more than 2^31 elements are computed in 64 bits."""
    spec = make_spec("softmax", "fwd", 70000, 65536)
    assert spec.rows * spec.cols > 2**31
    (kernel,) = compile_call(spec, GPUS["sm_80"])
    assert "arith.extsi" in kernel.ttgir
    assert "i64" in kernel.ttgir


def test_wide_rows_are_read_ahead_where_shared_memory_has_room():
    """Wide rows are prefetched by asynchronous copies if shared memory has room for them.

    For 16-bit types, each tested GPU has enough shared memory. For float32, the 99 KiB of the sm_89
    GPU are not enough.
    """
    copies = {
        (name, dtype): compile_call(make_spec("rms_norm", "bwd", 4096, 8192, dtype, dtype), gpu)[
            0
        ].ptx.count("cp.async")
        for name, gpu in GPUS.items()
        for dtype in (BF16, F32)
    }
    assert [key for key, count in copies.items() if count == 0] == [("sm_89", F32)]


# ------------------------------------------------------------------------------ programs in JAX


def kernels_in(function, *shapes):
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("custom_call @triton_kernel_call_ffi")


def assert_lowers(name, sizes, passes=2):
    """Assert that a function of the table and its gradient lower to one kernel for each pass.

    The gradient is also lowered for a batch, in which each entry has its own operands.
    """
    function = functools.partial(FUNCTIONS[name].ours, implementation="triton")
    operands = operands_of(name, "float32", sizes)
    gradient = gradients(function, floats_in(operands))
    assert kernels_in(gradient, *operands) == passes
    assert kernels_in(jax.vmap(gradient), *(jnp.stack([a, a]) for a in operands)) == passes


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("name", NAMES)
def test_functions_lower_for_cuda(name):
    # The backward of two norms runs a kernel for each norm. Only plain JAX computes gradients of
    # rotary tables.
    passes = {"rms_norm_add_rms_norm": 3, "rms_norm_rope": 1, "rms_norm_rope from input": 1}
    assert_lowers(name, Sizes((32, 6), 64, 300), passes.get(name, 2))


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("setting", [jax.enable_x64, jax.check_tracer_leaks])
@pytest.mark.parametrize("name", ["softmax with a bias", "layer_norm", "kl_divergence"])
def test_functions_lower_with_other_settings(name, setting):
    with setting(True):
        assert_lowers(name, Sizes((32, 6), 64, 50257))


@pytest.mark.cuda_plugin
def test_the_backward_of_a_norm_of_long_rows_is_two_kernels():
    x = jax.ShapeDtypeStruct((6, 16384), BF16)
    norm = functools.partial(jaxnorm.layer_norm, implementation="triton")
    assert kernels_in(jax.grad(lambda x: norm(x).astype("float32").sum()), x) == 3


@pytest.mark.cuda_plugin
def test_a_dead_call_is_dropped():
    """A call whose result is unused is dropped from the program.

    jax-triton registers a rule for unused operations. If JAX cannot call this rule, JAX's default
    rule drops the call.
    """
    x = jax.ShapeDtypeStruct((6, 300), BF16)
    softmax = functools.partial(jaxnorm.softmax, implementation="triton")
    assert kernels_in(lambda x: (softmax(x), 2 * x)[1], x) == 0


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("kind", ["Explicit", "Manual"])
def test_meshes(kind):
    """In `shard_map`, outputs vary over the same mesh axes as the inputs."""
    axis_type = jax.sharding.AxisType.Explicit if kind == "Explicit" else None
    mesh = jax.make_mesh((2,), ("rows",), axis_types=axis_type and (axis_type,))
    rows = jax.P("rows", None)

    def step(x, scale):
        def loss(x, scale):
            y = jaxnorm.rms_norm(x, scale, implementation="triton")
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(x, scale)

    if kind == "Manual":
        step = jax.shard_map(step, mesh=mesh, in_specs=(rows, jax.P()), out_specs=(rows, jax.P()))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((8, 512), BF16, sharding=jax.NamedSharding(mesh, rows))
        scale = jax.ShapeDtypeStruct((512,), F32, sharding=jax.NamedSharding(mesh, jax.P()))
        assert kernels_in(step, x, scale) == 2
