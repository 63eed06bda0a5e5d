"""The README's Python blocks run, in order, as one program (on eight virtual devices)."""

import re
from pathlib import Path

import jax
import pytest

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the mesh examples want 8 devices")
def test_the_examples_run():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = BLOCK.findall(text)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert len(blocks) >= 6
    assert namespace["dscale"].shape == (512,)
