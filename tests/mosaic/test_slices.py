"""Slices of one array, as queries and keys of one projection: which a kernel reads where they lie.

XLA gives a kernel the address of an operand that is dense in memory. A slice of leading axes is:
XLA makes a *dynamic-slice fusion* of slice and kernel, which passes an address inside the array.
One of columns is not, and is copied first. So a projection whose parts are to be normalised puts
them on its first axis.
"""

import jax
import jax.numpy as jnp
import pytest
from h100 import Compiler

import jaxnorm

pytestmark = pytest.mark.compiles


def compiled(compiler: Compiler, function, shape: tuple[int, ...]) -> str:
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=compiler.sharding)
    return jax.jit(function).lower(x).compile().as_text()


def norm(x: jax.Array) -> jax.Array:
    return jaxnorm.rms_norm(x, implementation="mosaic")


def test_a_part_on_the_first_axis_is_read_where_it_lies(compiler: Compiler):
    """(q, k, v) of 8192 tokens, 32 heads of 128."""
    text = compiled(compiler, lambda qkv: (norm(qkv[0]), norm(qkv[1])), (3, 8192, 32, 128))
    entry = text[text.index("ENTRY") :]
    assert entry.count("dynamic-slice-fusion") >= 2
    assert not any(f" {op}(" in entry for op in ("copy", "slice"))
    assert "kind=kLoop" not in entry


def test_a_part_of_the_columns_is_copied_once(compiler: Compiler):
    """What XLA does today; where this fails, the docs' advice can go."""
    text = compiled(compiler, lambda qkv: norm(qkv[..., :32, :]), (8192, 96, 128))
    assert text[text.index("ENTRY") :].count("kind=kLoop") == 1
