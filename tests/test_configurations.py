"""Every operation in every JAX configuration that changes how code is traced."""

import contextlib
import functools
import gc
import itertools

import functions
import jax
import jax.numpy as jnp
import pytest
from program_error import analyse, assert_analysed

import jaxnorm

pytestmark = [pytest.mark.oldest_jax, pytest.mark.usefixtures("quick_to_compile")]


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


@contextlib.contextmanager
def checks():
    before = jax.config.jax_enable_checks
    jax.config.update("jax_enable_checks", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_checks", before)


@contextlib.contextmanager
def no_implicit_promotion():
    """Raise an error for an implicit promotion of dtypes or ranks, with 64-bit types enabled.

    Integers are then 64-bit by default, while labels have 32 bits.
    """
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


CONFIGURATIONS = {
    "no implicit promotion": no_implicit_promotion,
    "checks": checks,
    "NaNs raise": lambda: jax.debug_nans(True),
    "leaks raise": leaks_raise,
}


def in_turn(configurations):
    """Return all functions, each with one of the configurations."""
    return [*zip(functions.BASIC, itertools.cycle(configurations))]


expected_of = functools.cache(
    lambda name: analyse(functions.step_of(name), *functions.operands_of(name))
)


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        *((name, "no implicit promotion") for name in functions.FUNCTIONS),
        *in_turn(["checks", "NaNs raise", "leaks raise"]),
    ],
)
def test_values(name, configuration):
    """Values and gradients are the same in all configurations."""
    step, operands = functions.step_of(name), functions.operands_of(name)
    dtypes = [a.dtype for a in jax.tree.leaves(jax.eval_shape(step, *operands))]
    with CONFIGURATIONS[configuration]():
        for run in (jax.jit(step), step) if configuration == "NaNs raise" else (jax.jit(step),):
            got = run(*operands)
            assert [a.dtype for a in jax.tree.leaves(got)] == dtypes
            assert_analysed(got, expected_of(name))


def kernels_of(lowered):
    return lowered.as_text().count("stablehlo.custom_call @mosaic_gpu")


@pytest.mark.parametrize(
    ("name", "configuration"),
    [
        *((name, "leaks raise") for name in [*functions.BASIC, "rms_norm_linear silu"]),
        *in_turn(["no implicit promotion", "checks"]),
    ],
)
def test_lowering(name, configuration):
    """Programs for CUDA have kernels, and programs for a CPU have none.

    In the configuration "leaks raise", neither the body of a kernel, nor a rematerialised function,
    nor a scan leaks a tracer.
    """
    step, operands = functions.step_of(name), functions.operands_of(name)
    sizes = functions.Sizes((512, 32), 128, 32768)
    large = [
        jax.ShapeDtypeStruct(functions.SHAPES[kind](sizes), a.dtype)
        for kind, a in zip(functions.FUNCTIONS[name].kinds.split(), operands, strict=True)
    ]

    def layers(*operands):
        def layer(total, _):
            return total + jax.tree.leaves(step(*operands))[0].sum(), None

        return jax.lax.scan(layer, jnp.zeros((), jnp.float32), None, length=2)[0]

    with CONFIGURATIONS[configuration]():
        for run in (jax.checkpoint(step), layers):
            jax.jit(run).trace(*operands)
        traced = jax.jit(step).trace(*large)
        kernels = kernels_of(traced.lower(lowering_platforms=("cuda",)))
        assert (kernels > 0) == (name not in ("gated_linear", "activation_linear"))
        assert kernels_of(traced.lower(lowering_platforms=("cpu",))) == 0


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
