"""Fixtures that every test file shares."""

from collections.abc import Iterator

import jax
import pytest

# GPUs multiply float32 matrices in TF32 by default: its roundings are not what these tests look at.
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types, for the tests that need float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["xla"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each implementation in turn, forced by name: they all meet the same bounds."""
    return request.param
