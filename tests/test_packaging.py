"""The wheel: its contents, and that it works in an otherwise empty environment."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import jaxnorm

ROOT = Path(__file__).parent.parent


def run(*command, **options):
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    # hatchling is installed, so the build needs no isolated environment and no download.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


def test_wheel_holds_both_packages_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"jaxnorm", "jaxnorm_kernels"}
    assert {"jaxnorm/py.typed", "jaxnorm_kernels/py.typed"} <= set(names)
    assert not any("__pycache__" in n or "test" in n for n in names)
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_sdist_holds_what_a_build_needs(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {n.split("/", 1)[1] for n in sdist.getnames() if "/" in n}
    assert {"pyproject.toml", "README.md", "LICENSE", "kernels/jaxnorm_kernels/specs.py"} <= names
    assert "benchmarks/run.py" in names
    assert not any(name.startswith("benchmarks/results/") for name in names)


def test_wheel_and_sdist_in_an_empty_environment(dist, tmp_path):
    """With only jax and numpy, functions work, and other modules say what to install."""
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    # Use the installed pip, and compile only the files that are imported.
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    install = (*pip, "install", "--quiet", "--no-compile")
    run(*install, wheel, f"jax=={version('jax')}", f"numpy=={version('numpy')}")
    program = """
import jax, jax.numpy as jnp, jaxnorm, sys
x = jnp.ones((2, 8))
assert jaxnorm.rms_norm(x, jnp.ones(8)).shape == (2, 8)
assert jax.grad(lambda x: jaxnorm.softmax(x)[0, 0])(x).shape == (2, 8)
assert not {"flax", "jaxnorm.linen"} & set(sys.modules)
for module, extra in (("linen", "flax"), ("nnx", "flax"), ("equinox", "equinox")):
    try:
        __import__("jaxnorm." + module)
    except ImportError as error:
        assert f'from a checkout of jaxnorm, with: pip install -e ".[{extra}]"' in str(error), error
    else:
        raise AssertionError(extra + " is here")
print("works")
"""
    isolated = (python, "-I", "-W", "error")  # ignores PYTHONPATH
    assert run(*isolated, "-c", program) == "works\n"
    report = run(*isolated, "-m", "jaxnorm")
    assert re.search(rf"jaxnorm +{re.escape(jaxnorm.__version__)}\n", report)
    # pip downloads the build's requirements, and builds a wheel from the sdist.
    (sdist,) = dist.glob("*.tar.gz")
    run(*install, "--no-deps", "--force-reinstall", sdist)
    assert run(*isolated, "-c", program) == "works\n"


def entries():
    """Return the (version, date) of each entry of the changelog. A date may be "unreleased"."""
    text = (ROOT / "CHANGELOG.md").read_text()
    heading = r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$"
    found = re.findall(heading, text, re.MULTILINE)
    assert len(found) == len(re.findall(r"^## ", text, re.MULTILINE))
    return found


def test_version_is_that_of_the_changelog(dist):
    """The version is that of the newest dated entry of the changelog, as in a release.

    After a release, the first entry may be of an unreleased version, such as 0.5.0. The version may
    then be 0.5.0.dev0.
    """
    (newest, date), *older = entries()
    released = [entry for entry in entries() if entry[1] != "unreleased"]
    assert released in (older, [(newest, date), *older])  # at most one entry is not released
    versions = {released[0][0]} | ({f"{newest}.dev0"} if date == "unreleased" else set())
    assert jaxnorm.__version__ in versions
    numbers = [tuple(map(int, number.split("."))) for number, _ in entries()]
    assert numbers == sorted(set(numbers), reverse=True)
    dates = [date for _, date in released]
    assert dates == sorted(dates, reverse=True)
    for file in dist.iterdir():
        assert file.name.startswith(f"jaxnorm-{jaxnorm.__version__}")


def test_citation_is_of_the_newest_release():
    """CITATION.cff has the version and the date of the newest dated entry of the changelog."""
    version, date = next(entry for entry in entries() if entry[1] != "unreleased")
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert {f"version: {version}", f"date-released: {date}"} <= {*lines}


def test_workflow_tests_the_supported_versions_of_python():
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    (tested,) = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = re.findall(r"Python :: (3\.\d+)", " ".join(classifiers))
    assert [version.strip('"') for version in tested.split(", ")] == supported
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"run: make ([\w ]+?)(?: \w+=.*)?$", workflow, re.MULTILINE)
    assert commands == ["lint docs", "test"]
    assert {*" ".join(commands).split()} <= {*targets}
