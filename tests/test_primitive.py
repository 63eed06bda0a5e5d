"""On CUDA, kernels are the default for calls that they support and for which they are faster.

The choice is made when a program is lowered.
"""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from programs import kernels_in, text_for_cuda
from stand_in import StandIn, as_default

import jaxnorm
from jaxnorm.calls import backends
from jaxnorm.primitives.rules import in_one_chunk
from jaxnorm.tools.plan import calls_in
from jaxnorm_kernels import xla

pytestmark = pytest.mark.oldest_jax

SHAPE = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)


def rms_norm(x):
    return jaxnorm.rms_norm(x, jnp.ones(x.shape[-1]))


def gradient(function):
    return jax.grad(lambda x: function(x).astype(jnp.float32).sum())


@pytest.mark.parametrize("function", [jaxnorm.softmax, jaxnorm.log_softmax, rms_norm])
def test_lowered_for_cuda_a_call_is_a_kernel(function):
    assert kernels_in(function, SHAPE) == 1
    assert kernels_in(gradient(function), SHAPE) == 2


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


def kernel_shapes(function, *operands):
    """Return the type of the first result of each Mosaic kernel, as text."""
    text = text_for_cuda(function, *operands)
    return re.findall(r"custom_call @mosaic_gpu.*-> \(?tensor<([^>]*)>", text)


@pytest.mark.parametrize("implementation", [None, "mosaic"])
def test_a_batch_of_rows_has_the_kernels_of_the_whole_array(implementation):
    """Under `jax.vmap`, the same kernels run as for one array with the rows of the whole batch.

    The gradient is taken outside of `jax.vmap`.
    """

    def loss(x, scale, bias):
        y = jaxnorm.layer_norm(x, scale, bias, implementation=implementation)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def summed(vmaps):
        function = loss
        for _ in range(vmaps):
            function = jax.vmap(function, (0, None, None))
        return jax.grad(lambda *a: jnp.sum(function(*a)), (0, 1, 2))

    x = jax.ShapeDtypeStruct((64, 128, 1024), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((1024,), jnp.float32)
    whole = kernel_shapes(summed(0), x, scale, scale)
    assert whole == ["8192x1024xbf16"] * 2
    for vmaps in (1, 2):
        assert kernel_shapes(summed(vmaps), x, scale, scale) == whole


def test_gradients_for_each_example_are_kernels():
    """Gradients of each example (inside `jax.vmap`) run kernels, too.

    Each example is then a group of rows with its own parameters.
    """

    def loss(x, scale):
        return jnp.sum(jaxnorm.rms_norm(x, scale).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((64, 128, 1024), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((1024,), jnp.float32)
    of_x, of_both = (jax.vmap(jax.grad(loss, wrt), (0, None)) for wrt in (0, (0, 1)))
    assert kernels_in(of_x, x, scale) == 2
    assert kernels_in(of_both, x, scale) == 2


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


@pytest.mark.parametrize("rows", [1024, 2048])
def test_a_small_norm_with_no_backward_to_come_is_xla_s(rows):
    x = jax.ShapeDtypeStruct((rows, 2048), jnp.bfloat16)
    assert kernels_in(rms_norm, x) == (rows > 1024)
    assert kernels_in(gradient(rms_norm), x) == 2
    assert kernels_in(jaxnorm.softmax, x) == 1


@pytest.mark.parametrize("rows", [128, 129])
def test_a_tiny_norm_is_xla_s_in_both_passes(rows):
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
    assert kernels_in(gradient(rms_norm), x) == (2 if rows > 128 else 0)
    named = functools.partial(jaxnorm.rms_norm, implementation="mosaic")
    assert kernels_in(gradient(named), x) == 2
    assert kernels_in(gradient(jaxnorm.softmax), x) == 2


def test_what_the_kernels_cannot_or_should_not_do_is_xla():
    """XLA's code runs if kernels do not support a call, or if it is faster than kernels.

    Examples are masked softmaxes of rows with few columns, float64 arrays, and the gradient of a
    norm of a few very long rows.
    """
    few = jax.ShapeDtypeStruct((4096, 4), jnp.bfloat16)
    assert kernels_in(lambda x: jaxnorm.softmax(x, where=x > 0), SHAPE) == 1
    assert kernels_in(lambda x: jaxnorm.softmax(x, where=x > 0), few) == 0
    # Only the forward runs a kernel. For the backward of a few rows, XLA's code is faster than a
    # kernel.
    assert kernels_in(gradient(rms_norm), jax.ShapeDtypeStruct((4, 65536), jnp.bfloat16)) == 1
    with jax.enable_x64(True):
        assert kernels_in(rms_norm, jax.ShapeDtypeStruct((4096, 1024), jnp.float64)) == 0


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda", "tpu")])
def test_an_export_holds_no_kernel(platforms):
    exported = jax.export.export(jax.jit(rms_norm), platforms=platforms)(SHAPE)
    assert "mosaic" not in exported.mlir_module()
    assert jax.export.deserialize(exported.serialize()).platforms == platforms


def test_another_gpu_runs_no_mosaic(monkeypatch):
    from jaxnorm_kernels.mosaic import support

    monkeypatch.setattr(support, "local_capability", lambda: 80)
    plan = jaxnorm.implementation_for("rms_norm", (4096, 1024), "bfloat16", platform="cuda")
    assert plan.forward.name != "mosaic"  # Triton runs if it is installed.
    assert "compute capability 9.0" in plan.forward.reason
    assert kernels_in(rms_norm, jax.ShapeDtypeStruct((4096, 1032), jnp.bfloat16)) == 0


def test_a_jaxlib_without_the_backend_runs_xla(monkeypatch):
    monkeypatch.setitem(backends.MODULES, "mosaic", "jaxnorm_kernels.no_such_backend")
    plan = jaxnorm.implementation_for("rms_norm", (4096, 1024), "bfloat16", platform="cuda")
    assert plan.forward.name == "xla"
    assert "cannot be imported: No module named" in plan.forward.reason


def test_a_cpu_never_imports_the_kernels():
    program = (
        "import sys, jax, jax.numpy as jnp, jaxnorm\n"
        "jax.jit(jax.grad(lambda x: jaxnorm.rms_norm(x).sum()))(jnp.ones((8, 16)))\n"
        "assert not [m for m in sys.modules if m.startswith('jaxnorm_kernels.mosaic')]\n"
    )
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_lowering_has_room_on_the_stack():
    """The function that lowers kernels is called by `in_one_chunk`.

    `in_one_chunk` first allocates a large chunk of memory for Python's stack. This makes lowering
    faster, as its docstring explains.
    """
    found = []

    class Kernels(StandIn):
        def why_unsupported(self, spec):
            return None

        def forward(self, operands, spec):
            frame = sys._getframe()
            while frame is not None and frame.f_code is not in_one_chunk.__code__:
                frame = frame.f_back
            found.append(frame)
            return xla.forward(operands, spec)

    with as_default(Kernels()):
        jax.jit(rms_norm).lower(jnp.ones((8, 64)))
    assert found
    assert None not in found
    assert 8 * in_one_chunk.__code__.co_stacksize > 2**14
