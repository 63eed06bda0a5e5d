"""Rules for imports in the package of kernels.

Only one module imports private parts of JAX, and no backend imports another one. The modules of the
package have an order, and a module imports only earlier modules. First come `specs.py` and
`implementation.py`, then the other modules that backends share, and last the backends. Mosaic's
folders have an order, too.
"""

import ast
import functools
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels"
OPERATIONS = ("norm", "softmax", "cross_entropy")
PRIVATE = ("jax._src", "jaxlib", "jax.experimental.mosaic")


@functools.cache
def imports():
    """Return pairs of a kernel module's name and the name of a module that it imports."""
    found = []
    for path in sorted(KERNELS.rglob("*.py")):
        importer = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [(importer, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{importer}: imports name the whole module"
                found += [(importer, f"{node.module}.{alias.name}") for alias in node.names]
    return found


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


BACKENDS = ("xla", "mosaic", "triton")
#: Groups of Mosaic's folders. A folder may import only folders of earlier groups, and itself.
FLOORS = (("device",), ("rows",), ("loops",), ("schedules",), OPERATIONS)


def test_a_folder_imports_only_those_below_it():
    """A backend imports no other backend, and Mosaic's loops over rows import no operation."""
    forbidden = {f"{a}.": [f"{b}." for b in BACKENDS if a != b] for a in BACKENDS}
    for at, floor in enumerate(FLOORS):
        above = [f"mosaic.{name}." for names in FLOORS[at:] for name in names]
        forbidden |= {f"mosaic.{name}.": [a for a in above if name not in a] for name in floor}
    for importer, others in forbidden.items():
        assert not crossing(importer, tuple(others))


def test_what_backends_share_imports_none():
    shared = {name for importer, name in imports() if not folder(importer)}
    assert not {name for name in shared if name.startswith("jaxnorm_kernels") and folder(name)}


def test_xla_imports_the_contract_alone():
    found = {
        name.split(".")[1]
        for importer, name in imports()
        if folder(importer) == "xla" and name.startswith("jaxnorm_kernels.") and not folder(name)
    }
    assert found <= {"broadcasts", "operations", "specs", "implementation"}


def test_floors_are_the_folders_that_there_are():
    mosaic = KERNELS / "jaxnorm_kernels" / "mosaic"
    assert {path.parent.name for path in mosaic.glob("*/__init__.py")} == set(sum(FLOORS, ()))
