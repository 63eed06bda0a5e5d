"""What modules of kernels may import: JAX's private parts in one place, and no other backend."""

import ast
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels"
PRIVATE = ("jax._src", "jaxlib", "jax.experimental.mosaic")


def imports():
    """Module and what it imports, by their names, of all kernels."""
    for path in sorted(KERNELS.rglob("*.py")):
        importer = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((importer, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{importer}: imports name the whole module"
                yield from ((importer, f"{node.module}.{alias.name}") for alias in node.names)


def test_one_module_has_what_is_private_in_jax():
    private = {importer for importer, name in imports() if name.startswith(PRIVATE)}
    assert private == {"jaxnorm_kernels.mosaic.device.mgpu"}
