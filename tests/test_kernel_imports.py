"""Rules for imports in the package of kernels.

Only one module imports private parts of JAX, and no backend imports another one. The modules of the
package have an order, and a module imports only earlier modules. First come `specs.py` and
`implementation.py`, then the other modules that backends share, and last the backends. Mosaic's
folders have an order, too.
"""

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent.parent / "kernels"
OPERATIONS = ("norm", "softmax", "cross_entropy")
PRIVATE = ("jax._src", "jaxlib", "jax.experimental.mosaic")


def imports():
    """Yield pairs of a kernel module's name and the name of a module that it imports."""
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


def folder(module):
    """Return a module's folder, such as ``mosaic.rows``, or "" for a shared module."""
    path = KERNELS / Path(*module.split("."))
    while not path.is_dir():
        path = path.parent
    return ".".join(path.relative_to(KERNELS).parts[1:])


def crossing(importers, others):
    """Return the imports in which a module of `importers` imports a module of `others`.

    Both arguments are folders. Each import is a text, "importer <- imported module".
    """
    return {
        f"{importer} <- {name}"
        for importer, name in imports()
        if name.startswith("jaxnorm_kernels")
        and f"{folder(importer)}.".startswith(importers)
        and f"{folder(name)}.".startswith(others)
    }


@pytest.mark.parametrize("backend", ["xla", "mosaic", "triton"])
def test_a_backend_imports_no_other_one(backend):
    others = tuple(f"{name}." for name in ("xla", "mosaic", "triton") if name != backend)
    assert not crossing(f"{backend}.", others)


def test_what_backends_share_imports_none():
    shared = {name for importer, name in imports() if not folder(importer)}
    assert not {name for name in shared if name.startswith("jaxnorm_kernels") and folder(name)}


def test_xla_imports_the_contract_alone():
    found = {
        name.split(".")[1]
        for importer, name in imports()
        if folder(importer) == "xla" and name.startswith("jaxnorm_kernels.") and not folder(name)
    }
    assert found <= {"operations", "specs", "implementation"}


#: Groups of Mosaic's folders. A folder may import only folders of earlier groups, and itself.
FLOORS = (("device",), ("rows",), ("loops",), ("schedules",), OPERATIONS)


@pytest.mark.parametrize(
    ("importer", "others"),
    [
        (importer, {name for above in FLOORS[at:] for name in above} - {importer})
        for at, floor in enumerate(FLOORS)
        for importer in floor
    ],
)
def test_what_walks_rows_knows_no_operation(importer, others):
    assert not crossing(f"mosaic.{importer}.", tuple(f"mosaic.{name}." for name in others))


def test_floors_are_the_folders_that_there_are():
    mosaic = KERNELS / "jaxnorm_kernels" / "mosaic"
    assert {path.parent.name for path in mosaic.glob("*/__init__.py")} == set(sum(FLOORS, ()))
