"""Fixtures that every test file shares."""

import os
from collections.abc import Iterator

# Pallas' interpreter runs each warpgroup in a thread of XLA's CPU pool, and they wait for each
# other: with fewer threads than warpgroups they would hang. To be set before JAX makes its backend.
os.environ.setdefault("NPROC", "16")

import jax
import pytest

from jaxnorm import _implementation

# GPUs multiply float32 matrices in TF32 by default: its roundings are not what these tests look at.
jax.config.update("jax_default_matmul_precision", "highest")

# Virtual devices, for the tests on a mesh.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types, for the tests that need float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["xla", pytest.param("mosaic", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each implementation in turn, forced by name: they all meet the same bounds."""
    return request.param


@pytest.fixture
def kernels_by_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Mosaic kernels are candidates of the default on CUDA."""
    monkeypatch.setattr(_implementation, "_CANDIDATES", {"cuda": ("mosaic",)})
    jax.clear_caches()
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need one that the kernels support."""
    if any(item.get_closest_marker("gpu") for item in items) and not _has_hopper():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU of compute capability 9.0 or newer")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    for item in items:
        if item.get_closest_marker("multigpu") and jax.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs or more"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A call that an implementation refuses with a reason is no failure of it."""
    try:
        return (yield)
    except ValueError as error:
        if "implementation='mosaic' cannot run" not in str(error):
            raise
        pytest.skip(str(error))


def _has_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) >= 9.0
