"""Every operation in every JAX configuration that changes how code is traced."""

import contextlib
import functools
import gc
import itertools

import functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairs import pairwise
from program_error import analyse, assert_analysed

import jaxnorm


@contextlib.contextmanager
def leaks_raise():
    """Raise an error if a tracer leaks.

    To find leaks, JAX runs Python's garbage collector in each trace. `gc.freeze` makes this fast,
    because it excludes all existing objects from the collection.
    """
    gc.freeze()
    try:
        with jax.check_tracer_leaks(True):
            yield
    finally:
        gc.unfreeze()


TYPES = {"default": contextlib.nullcontext, "x64": lambda: jax.enable_x64(True)}
CHECKS = {
    "strict dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion raises": lambda: jax.numpy_rank_promotion("raise"),
    "checks": lambda: setting("jax_enable_checks", True),
    "NaNs raise": lambda: jax.debug_nans(True),
    "leaks raise": leaks_raise,
}
CONFIGURATIONS = TYPES | CHECKS
FUNCTIONS = {
    "softmax": lambda x, scale, bias, **o: jaxnorm.softmax(x, **o),
    "log_softmax": lambda x, scale, bias, **o: jaxnorm.log_softmax(x, **o),
    "layer_norm": jaxnorm.layer_norm,
    "layer_norm from input": lambda *a, **o: jaxnorm.layer_norm(*a, save="input", **o),
    "rms_norm": lambda x, scale, bias, **o: jaxnorm.rms_norm(x, scale, **o),
    "layer_norm silu": lambda *a, **o: jaxnorm.layer_norm(*a, activation="silu", **o),
    "rms_norm_gated": lambda x, scale, bias, **o: jaxnorm.rms_norm_gated(x, x, scale, **o),
}
# Functions whose kernels do not support all of `SHAPES`.
OTHERS = {
    "log_prob_and_entropy": lambda x, scale, bias, **o: jaxnorm.log_prob_and_entropy(
        x, jnp.arange(len(x)), **o
    ),
    "rms_norm_rope": lambda x, scale, bias, **o: jaxnorm.rms_norm_rope(
        x, scale, bias[::2], bias[1::2].astype("bfloat16"), **o
    ),
    # The first scale is shared by all rows; the second has a row for each row of x.
    "rms_norm_add_rms_norm": lambda x, scale, bias, **o: jaxnorm.rms_norm_add_rms_norm(
        x, x, scale.astype("bfloat16"), x.astype("float32"), **o
    )[0],
}
# Shapes for each kind of kernel. In the first four shapes, a row is processed by a part of a warp,
# a warp, a warpgroup and a cluster, respectively. In the last shape, rows have an odd length.
SHAPES = [(65536, 64), (8192, 1024), (1024, 8192), (256, 65536), (2048, 4095)]
WIDTHS = [(shape, dtype) for shape, dtype in zip(SHAPES, itertools.cycle(["bfloat16", "float32"]))]


@contextlib.contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def forward_and_gradient(function):
    def run(x, *parameters):
        y, vjp = jax.vjp(function, x, *parameters)
        return y, vjp(y)

    return run


def kernels_of(lowered):
    return lowered.as_text().count("stablehlo.custom_call @mosaic_gpu")


def with_gradient(name, shape):
    """Return the number of kernels in a program that computes a function and its gradient.

    The number is 2: a forward kernel and a backward kernel. It is 1 for a norm of unaligned rows,
    because there is no backward kernel for unaligned rows.
    """
    return 1 if "norm" in name and shape[1] % 8 else 2


# Pairwise testing: there are three parameters (configuration, operation and shape). For any two of
# them, every pair of their values occurs in some case.
@pytest.mark.parametrize(
    ("configuration", "name", "shape", "dtype"),
    [
        (*of, *width)
        for configurations in (TYPES, CHECKS)
        for *of, width in pairwise([*configurations], [*FUNCTIONS], WIDTHS)
    ],
)
def test_lowering(configuration, name, shape, dtype):
    """Programs for CUDA have the expected kernels, and programs for a CPU have none."""
    x, parameter = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:], jnp.float32)
    forward = FUNCTIONS[name]
    programs = {forward_and_gradient(forward): with_gradient(name, shape)}
    if configuration in TYPES:
        programs[forward] = 1
    with CONFIGURATIONS[configuration]():
        for function, kernels in programs.items():
            traced = jax.jit(function).trace(x, parameter, parameter)
            assert kernels_of(traced.lower(lowering_platforms=("cuda",))) == kernels
            assert kernels_of(traced.lower(lowering_platforms=("cpu",))) == 0


@functools.cache
def by_default(name):
    """Return three things for a function, computed in JAX's default configuration.

    These are operands, the dtypes of results and gradients, and the expected results and gradients
    with bounds on their errors.
    """
    function = (FUNCTIONS | OTHERS)[name]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(6, 40)), "bfloat16")
    arrays = x, *(jnp.asarray(rng.normal(size=40), "float32") for _ in range(2))
    run = forward_and_gradient(function)
    dtypes = [a.dtype for a in jax.tree.leaves(jax.eval_shape(run, *arrays))]
    return arrays, dtypes, analyse(run, *arrays)


@pytest.mark.oldest_jax
@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", FUNCTIONS | OTHERS)
def test_values(name, configuration):
    function = (FUNCTIONS | OTHERS)[name]
    arrays, dtypes, expected = by_default(name)
    with CONFIGURATIONS[configuration]():
        for run in (jax.jit, lambda f: f):
            got = run(forward_and_gradient(function))(*arrays)
            assert [a.dtype for a in jax.tree.leaves(got)] == dtypes
            assert_analysed(got, expected)


@pytest.mark.oldest_jax
@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("name", [*functions.BASIC, "rms_norm_linear silu"])
def test_no_tracer_leaks(name):
    """No function leaks a tracer: outside of `jax.jit`, in derivatives, or in a kernel's body."""
    step, operands = functions.step_of(name), functions.operands_of(name)
    sizes = functions.Sizes((512, 32), 128, 32768)
    large = [
        jax.ShapeDtypeStruct(functions.SHAPES[kind](sizes), a.dtype)
        for kind, a in zip(functions.FUNCTIONS[name].kinds.split(), operands, strict=True)
    ]

    def layers(*operands):
        def layer(total, _):
            return total + jax.tree.leaves(step(*operands))[0].sum(), None

        return jax.lax.scan(layer, jnp.zeros(()), None, length=2)[0]

    with leaks_raise():
        functions.FUNCTIONS[name].ours(*operands)
        for run in (jax.checkpoint(step), layers):
            jax.jit(run).trace(*operands)
        lowered = jax.jit(step).trace(*large).lower(lowering_platforms=("cuda",))
    assert kernels_of(lowered) or name in ("gated_linear", "activation_linear")


@pytest.mark.oldest_jax
def test_no_tracer_leaks_from_the_kernel_of_a_product():
    shapes = [(4096, 1024), (1024, 2048), (1024,), (2048,)]
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]

    def total(x, weight, scale, bias):
        y = jaxnorm.rms_norm_linear(x, weight, scale, bias=bias, implementation="mosaic")
        return jnp.sum(y.astype("float32"))

    with leaks_raise():
        lowered = (
            jax.jit(jax.value_and_grad(total)).trace(*arrays).lower(lowering_platforms=("cuda",))
        )
    assert kernels_of(lowered)


@pytest.mark.oldest_jax
@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_no_implicit_promotion(name):
    """No function relies on an implicit promotion of dtypes or ranks, with 64-bit types enabled.

    Integers are then 64-bit by default, while labels have 32 bits.
    """
    step, operands = functions.step_of(name), functions.operands_of(name)
    expected = analyse(step, *operands)
    with (
        jax.enable_x64(True),
        CHECKS["strict dtype promotion"](),
        CHECKS["rank promotion raises"](),
    ):
        assert_analysed(jax.jit(step)(*operands), expected)
