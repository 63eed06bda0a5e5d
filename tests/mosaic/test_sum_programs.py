"""Norms of sums as XLA compiles its own code of them for an H100."""

import functools
from typing import Any

import jax
import pytest
from h100 import Compiler

import jaxnorm

pytestmark = pytest.mark.compiles


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["add_rms_norm", "rms_norm_add_rms_norm"])
def test_the_sum_stays_rounded(name: str, dtype: str, compiler: Compiler) -> None:
    """In each of two passes, and which platform it is for costs no branch."""
    x = jax.ShapeDtypeStruct((64, 256), dtype, sharding=compiler.sharding)
    function: Any = functools.partial(getattr(jaxnorm, name), implementation="xla")
    text = jax.jit(function).lower(x, x).compile().as_text()
    entry = text.partition("ENTRY")[2]
    assert entry.count(" fusion(") == 2
    assert text.count(" reduce-precision(") == 2
    assert "conditional" not in text
