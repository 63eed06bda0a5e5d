"""The default on CUDA: the kernels where they may run and pay, decided when a call is lowered."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxnorm
from jaxnorm import _implementation

SHAPE = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)


def rms_norm(x):
    return jaxnorm.rms_norm(x, jnp.ones(x.shape[-1]))


def gradient(function):
    return jax.grad(lambda x: function(x).astype(jnp.float32).sum())


def kernels(function, *operands):
    """How many Mosaic kernels `function` has when it is lowered for CUDA."""
    lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("stablehlo.custom_call @mosaic_gpu")


@pytest.mark.parametrize("function", [jaxnorm.softmax, jaxnorm.log_softmax, rms_norm])
def test_lowered_for_cuda_a_call_is_a_kernel(function):
    assert kernels(function, SHAPE) == 1
    assert kernels(gradient(function), SHAPE) == 2


def test_what_the_kernels_cannot_or_should_not_do_is_xla():
    """A mask, float64, a shape that XLA is measured to be faster at; none of them is an error."""
    assert kernels(lambda x: jaxnorm.softmax(x, where=x > 0), SHAPE) == 0
    # The forward alone is a kernel.
    assert kernels(gradient(rms_norm), jax.ShapeDtypeStruct((1, 65536), jnp.bfloat16)) == 1
    with jax.enable_x64(True):
        assert kernels(rms_norm, jax.ShapeDtypeStruct((4096, 1024), jnp.float64)) == 0


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda", "tpu")])
def test_an_export_holds_no_kernel(platforms):
    exported = jax.export.export(jax.jit(rms_norm), platforms=platforms)(SHAPE)
    assert "mosaic" not in exported.mlir_module()
    assert jax.export.deserialize(exported.serialize()).platforms == platforms


def test_another_gpu_runs_no_mosaic(monkeypatch):
    from jaxnorm_kernels.mosaic import support

    monkeypatch.setattr(support, "local_capability", lambda: 80)
    plan = jaxnorm.implementation_for("rms_norm", (4096, 1024), "bfloat16", platform="cuda")
    assert plan.forward.name != "mosaic"  # Triton's, where its extra and a GPU are there
    assert "compute capability 9.0" in plan.forward.reason
    assert kernels(rms_norm, jax.ShapeDtypeStruct((4096, 1032), jnp.bfloat16)) == 0


def test_a_jaxlib_without_the_backend_runs_xla(monkeypatch):
    monkeypatch.setitem(_implementation._MODULES, "mosaic", "jaxnorm_kernels.no_such_backend")
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
