"""Imports go one way, from the public modules down (for kernels see `test_kernel_imports.py`)."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Folders of the package. The modules of a folder import only from this folder and earlier ones.
FOLDERS = ["calls", "meshes", "primitives", "operations", "remat", "tools", "models"]


def imported(file: Path) -> set[str]:
    """Return all names that a file imports.

    Imports inside functions and under `if TYPE_CHECKING` count too, and so do calls of
    `importlib.import_module` with a constant name.
    """
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def test_the_pages_list_all_folders_in_the_order_of_imports():
    found = {path.parent.name for path in (ROOT / "jaxnorm").glob("*/__init__.py")}
    assert found == set(FOLDERS)
    for file in ("CONTRIBUTING.md", "docs/structure.md"):
        page = (ROOT / file).read_text()
        rows = [page.find(f"\n| `jaxnorm/{folder}/`") for folder in reversed(FOLDERS)]
        rows.append(page.find("\n| `kernels/jaxnorm_kernels/`"))
        assert -1 not in rows
        assert rows == sorted(rows)  # from top to bottom, as a call passes through them
        assert "imports only" in page
        assert "below" in page


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_those_below(folder):
    below = FOLDERS[: FOLDERS.index(folder) + 1]
    for file in (ROOT / "jaxnorm" / folder).glob("*.py"):
        names = {name for name in imported(file) if name.split(".")[0] == "jaxnorm"}
        above = {name for name in names if name != "jaxnorm" and name.split(".")[1] not in below}
        # The modules of the self-check call the public functions, so they may import `jaxnorm`
        # itself.
        is_check = folder == "tools" and file.stem in ("machine", "plan", "selfcheck", "wall_time")
        assert not above, file
        assert "jaxnorm" not in names or is_check, file


def test_no_file_is_in_a_circle_of_imports():
    """No file is part of an import cycle, even if imports inside functions are counted.

    Imports of `jaxnorm/__init__.py` are not counted. The modules of the self-check need them,
    because they call the public functions.
    """
    folders = {"jaxnorm": ROOT, "kernels": ROOT / "kernels", "benchmarks": ROOT}
    files = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for folder, root in folders.items()
        for file in (ROOT / folder).rglob("*.py")
    }

    def module(name: str) -> str:
        """Return the module of an imported name: its longest prefix that is the name of a file."""
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    graph = {
        importer: {module(n) for n in imported(file)} - {importer, "jaxnorm", "benchmarks", ""}
        for importer, file in files.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_one_module_imports_what_is_private_in_jax():
    """Only one module of the package imports private parts of JAX.

    `test_kernel_imports.py` has the same test for the kernels.
    """
    importers = {
        file.name
        for file in (ROOT / "jaxnorm").rglob("*.py")
        if any(name.startswith(("jax._src", "jaxlib")) for name in imported(file))
    }
    assert importers == {"private_jax.py"}


def test_attributes_that_jax_does_not_document_are_listed():
    """The docstring of `private_jax.py` lists those that other files use."""
    listed = ast.get_docstring(ast.parse((ROOT / "jaxnorm/calls/private_jax.py").read_text()))
    names = {"axis_context", "for_export", "to_concrete_value", "manual_axis_type"}
    names |= {"dce_rules", "fancy_primitive_batchers", "fancy_transposes", "GradAccum"}
    used = {
        node.attr
        for file in (ROOT / "jaxnorm").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and "_accumulators" not in ast.unparse(node)
    }
    assert {name for name in names if f"{name}`" in listed} == names & used


def table_of_files() -> str:
    """Return a line for each file of both packages, with the first line of its docstring."""
    lines = []
    for package in ("jaxnorm", "kernels/jaxnorm_kernels"):
        for folder in sorted({file.parent for file in (ROOT / package).rglob("*.py")}):
            lines += ["", f"`{folder.relative_to(ROOT)}/`", ""]
            for file in sorted(folder.glob("*.py")):
                docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
                first, _, _ = docstring.partition("\n\n")
                lines.append(f"- `{file.name}`: {' '.join(first.split())}")
    return "\n".join(lines).strip()


def test_each_file_has_a_docstring():
    """Run as a program, this file lists all files, as docs/structure.md says."""
    lines = [line for line in table_of_files().splitlines() if line.startswith("- ")]
    assert len(lines) > 100
    assert not [line for line in lines if line.endswith(": ")]


def test_only_public_modules_are_at_the_top():
    private = [path.name for path in (ROOT / "jaxnorm").glob("_*.py")]
    assert sorted(private) == ["__init__.py", "__main__.py"]


def test_a_file_of_tests_has_a_name_of_its_own():
    """No two test files have the same name, because pytest identifies a file by its name only."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert len(names) == len({*names})


if __name__ == "__main__":
    print(table_of_files())
