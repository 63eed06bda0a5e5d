"""The wheel: its contents, and that it works in an otherwise empty environment."""

import os
import re
import subprocess
import sys
import tarfile
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


def test_wheel_says_what_it_is_for(dist):
    """The wheel has the correct classifiers. The build itself rejects nonexistent ones."""
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (path,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = files.read(path).decode()
    for classifier in (
        "Environment :: GPU :: NVIDIA CUDA :: 13",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Typing :: Typed",
    ):
        assert f"Classifier: {classifier}\n" in metadata


def test_wheel_in_an_empty_environment(dist, tmp_path):
    """With only jax and numpy, functions work, and other modules say what to install."""
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    # Use the installed pip, and compile only the files that are imported.
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    needed = (wheel, f"jax=={version('jax')}", f"numpy=={version('numpy')}")
    run(*pip, "install", "--quiet", "--no-compile", *needed)
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
    assert run(python, "-W", "error", "-c", program, cwd=tmp_path) == "works\n"


def test_version_is_that_of_the_newest_release_in_the_changelog(dist):
    """The version is that of the newest dated entry of the changelog.

    Entries of unreleased versions come before it.
    """
    heading = r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$"
    text = (ROOT / "CHANGELOG.md").read_text()
    entries = re.findall(heading, text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^## ", text, re.MULTILINE))
    unreleased = [number for number, date in entries if date == "unreleased"]
    released = [(number, date) for number, date in entries if date != "unreleased"]
    assert [number for number, _ in entries[: len(unreleased)]] == unreleased
    assert jaxnorm.__version__ == released[0][0]
    assert [date for _, date in released] == sorted((date for _, date in released), reverse=True)
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.startswith(f"jaxnorm-{jaxnorm.__version__}-")


def test_import_costs_no_extra():
    """Importing jaxnorm imports neither Flax nor a kernel backend."""
    program = "import jaxnorm, sys; print([m for m in sys.modules if m.startswith(('flax', "
    program += "'jax.experimental.pallas', 'jaxnorm_kernels.'))])"
    names = ("launching", "operations", "specs", "implementation")
    contract = [f"jaxnorm_kernels.{name}" for name in names]
    assert run(sys.executable, "-c", program) == f"{contract}\n"
