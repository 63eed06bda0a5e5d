"""On CUDA, kernels are the default for calls that they support and for which they are faster.

The choice is made when a program is lowered.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from programs import kernels_in, text_for_cuda
from specs import F32, build_spec

import jaxnorm
from jaxnorm.calls.call import Call
from jaxnorm.calls.rows import RowView
from jaxnorm.tools.plan import calls_in

pytestmark = pytest.mark.oldest_jax

SHAPE = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)


def rms_norm(x):
    return jaxnorm.rms_norm(x, jnp.ones(x.shape[-1]))


def gradient(function):
    return jax.grad(lambda x: function(x).astype(jnp.float32).sum())


@pytest.mark.parametrize("function", [jaxnorm.softmax, jaxnorm.log_softmax, rms_norm])
def test_layers_have_the_passes_of_the_first(function):
    """Equal calls in several layers share two objects.

    One object describes the forward of the call, and the other one describes its backward. Each
    caches the result types of its pass, so they are computed only once.
    """
    program = jax.make_jaxpr(gradient(lambda x: function(function(function(x)))))(SHAPE)
    passes = [*calls_in(program.jaxpr)]
    assert len(passes) == 6
    assert len({*map(id, passes)}) == len({*passes}) == 2


def test_equal_calls_are_one_object():
    """Calls stay equal after more other calls than the caches of calls hold."""

    def call(rows):
        spec = build_spec("softmax", "fwd", rows, 128, F32, F32)
        return Call.of("softmax", spec, RowView.of((rows, 128), (1,)), None)

    first = call(1)
    for rows in range(2, 5000):
        call(rows)
    assert call(1) is first


def test_printed_programs_show_the_call():
    """They show options that differ from their defaults, and axes that are not the last one."""
    x = jax.ShapeDtypeStruct((4, 8, 2), jnp.float32)
    norm = functools.partial(jaxnorm.layer_norm, axis=(1, 2), implementation="xla")
    shown = "[4, 8, 2] -> float32 axis=(1, 2) save=output implementation=xla)"
    assert shown in str(jax.make_jaxpr(norm)(x))
    softmax = functools.partial(jaxnorm.softmax, axis=1, scale=0.5)
    shown = "[4, 8, 2] -> float32 axis=(1,) scale=0.5 wrt=x)"
    assert shown in str(jax.make_jaxpr(gradient(softmax))(x))


def kernel_shapes(function, *operands):
    """Return the type of the first result of each Mosaic kernel, as text."""
    text = text_for_cuda(function, *operands)
    return re.findall(r"custom_call @mosaic_gpu.*-> \(?tensor<([^>]*)>", text)


@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_a_batch_of_rows_has_the_kernels_of_the_whole_array(implementation):
    """Under `jax.vmap`, the same kernels run as for one array with the rows of the whole batch.

    This holds for gradients outside of `jax.vmap` and for gradients of each example inside it.
    """
    x = jax.ShapeDtypeStruct((64, 128, 1024), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((1024,), jnp.float32)

    def loss(x, scale, bias):
        y = jaxnorm.layer_norm(x, scale, bias, implementation=implementation)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def summed(vmaps):
        function = loss
        for _ in range(vmaps):
            function = jax.vmap(function, (0, None, None))
        return jax.grad(lambda *a: jnp.sum(function(*a)), (0, 1, 2))

    whole = kernel_shapes(summed(0), x, scale, scale)
    assert whole == ["8192x1024xbf16"] * 2
    for vmaps in (1, 2):
        assert kernel_shapes(summed(vmaps), x, scale, scale) == whole
    # Gradients of each example, with each example's gradients of the parameters.
    of_each = jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, None))
    assert kernel_shapes(of_each, x, scale, scale) == whole


@pytest.mark.parametrize("function", [jaxnorm.softmax, jaxnorm.log_softmax, jaxnorm.layer_norm])
def test_an_axis_that_is_not_the_last_has_kernels(function):
    """Kernels reduce over an axis that is not the last one, too.

    For most of these calls, x must be transposed first, and kernels run only on request. For a
    layer norm over one axis, x need not be transposed, and kernels run by default.
    """
    x = jax.ShapeDtypeStruct((64, 128, 1024), jnp.bfloat16)
    for axis in (0, 1, (0, 2)):
        forced = functools.partial(function, axis=axis, implementation="mosaic")
        assert kernels_in(gradient(forced), x) == 2
        chosen = functools.partial(function, axis=axis)
        takes_strips = function is jaxnorm.layer_norm and axis != (0, 2)
        assert kernels_in(gradient(chosen), x) == (2 if takes_strips else 0)
    plan = jaxnorm.implementation_for(
        function.__name__, x.shape, x.dtype, axis=(0, 2), platform="cuda"
    )
    assert "not the last" in str(plan)
    # A last axis of size 1 needs no transpose.
    x = jax.ShapeDtypeStruct((64, 128, 1024, 1), jnp.bfloat16)
    assert kernels_in(gradient(functools.partial(function, axis=2)), x) == 2


def named(x):
    return jaxnorm.rms_norm(x, implementation="mosaic")


def masked(x):
    return jaxnorm.softmax(x, where=x > 0)


# A function, the shape of x, and the number of kernels by default, without and with a gradient.
CHOICES = [
    # If a small norm is not differentiated, XLA's code runs. For a tiny norm, it always runs.
    (rms_norm, (2048, 2048), 1, 2),
    (rms_norm, (1024, 2048), 0, 2),
    (rms_norm, (129, 1024), 0, 2),
    (rms_norm, (128, 1024), 0, 0),
    (named, (128, 1024), 1, 2),
    (jaxnorm.log_softmax, (128, 1024), 1, 2),
    # The backward of a few very long rows is faster in XLA's code.
    (rms_norm, (4, 65536), 0, 1),
    (masked, (4096, 1024), 1, 2),
    (masked, (4096, 4), 0, 0),
]


@pytest.mark.parametrize(("function", "shape", "forward", "both"), CHOICES)
def test_where_kernels_are_the_default(function, shape, forward, both):
    """XLA's code runs if kernels do not support a call, or if it is faster than kernels."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert kernels_in(function, x) == forward
    assert kernels_in(gradient(function), x) == both


def test_float64_has_no_kernel():
    with jax.enable_x64(True):
        assert kernels_in(rms_norm, jax.ShapeDtypeStruct((4096, 1024), jnp.float64)) == 0


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda", "tpu")])
def test_an_export_holds_no_kernel(platforms):
    exported = jax.export.export(jax.jit(rms_norm), platforms=platforms)(SHAPE)
    assert "mosaic" not in exported.mlir_module()
    assert jax.export.deserialize(exported.serialize()).platforms == platforms
