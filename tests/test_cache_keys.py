"""Keys of programs in JAX's persistent compilation cache.

Equal programs must have the same key in all processes. Different programs must have different keys.

With Auto axes, a program contains the address of a Python function, which differs between
processes. The setting `jax_remove_custom_partitioning_ptr_from_cache_key` omits the address from
the key. So other parts of the program must contain everything that distinguishes two calls.
"""

import os
import py_compile
import shutil
import subprocess
import sys
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from meshes import eight_devices

from jaxnorm.calls import backends
from jaxnorm.meshes import auto_axes

pytestmark = [pytest.mark.oldest_jax, eight_devices]

# A script (`python programs.py DIRECTORY`) that compiles programs that differ only in a call's
# options.
PROGRAMS = """
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

for name, value in {
    "jax_num_cpu_devices": 8,
    "jax_compilation_cache_dir": sys.argv[1],
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_remove_custom_partitioning_ptr_from_cache_key": True,
}.items():
    jax.config.update(name, value)

import jaxnorm
from stand_in import Kernels, as_default

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.cos(jnp.arange(16.0 * 64).reshape(16, 64)), NamedSharding(mesh, P("data")))
weight, labels = jnp.ones((64, 32)), jnp.zeros(16, jnp.int32)
programs = [
    *[lambda x, e=e: jaxnorm.rms_norm(x, epsilon=e) for e in (1e-6, 1e-2)],
    lambda x: jaxnorm.rms_norm(x, save="input"),
    *[lambda x, a=a: jaxnorm.rms_norm(x, activation=a) for a in ("silu", "relu")],
    *[lambda x, s=s: jaxnorm.softmax(x, scale=s) for s in (1.0, 0.5)],
    *[
        lambda x, z=z: jaxnorm.linear_softmax_cross_entropy(x, weight, labels, z_loss=z)
        for z in (0.0, 0.1)
    ],
    *[
        lambda x, s=s: sum(jaxnorm.log_prob_and_entropy(x, labels, logits_scale=s))
        for s in (1.0, 0.5)
    ],
    lambda x: sum(jaxnorm.linear_log_prob_and_entropy(x, weight, labels)),
    *[
        lambda x, o=o: jaxnorm.rms_norm_gated(x, x, **o)
        for o in ({}, {"activation": "gelu"}, {"norm_before_gate": False})
    ],
    *[
        lambda x, a=a: jaxnorm.rms_norm_linear(x, weight, activation=a)
        for a in ("silu", "gelu")
    ],
]
with as_default(Kernels()):
    for program in programs:

        def run(x):
            return jax.grad(lambda x: jnp.sum(jnp.sin(program(x))))(x)

        lowered = jax.jit(run).lower(x)
        assert "CustomSPMDPartitioning" in lowered.as_text()  # Plain JAX's code has keys anyway.
        lowered.compile()
print(len(programs))
"""


def keys_of(directory: Path) -> tuple[int, set[str]]:
    """Run the script, and return the number of its programs and their keys in the cache."""
    directory.mkdir()
    script = directory.parent / "programs.py"
    script.write_text(PROGRAMS)
    tests = Path(__file__).parent
    paths = [str(tests), str(tests.parent), str(tests.parent / "kernels")]
    done = subprocess.run(
        [sys.executable, script, directory],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout), {file.name for file in directory.glob("jit_run-*-cache")}


def test_keys_of_two_processes(tmp_path):
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(keys_of, [tmp_path / "first", tmp_path / "second"])
    assert first == second
    programs, keys = first
    assert len(keys) == programs


def test_what_else_decides_which_kernels_run_is_in_the_name(monkeypatch):
    """The digest of a call depends on the preferred implementation and on compilers' versions.

    If one of these changes, the call may run other kernels, so its digest must change too.
    """
    names = [auto_axes._digest("call")]
    for preferred in ("mosaic", "triton"):
        monkeypatch.setattr(backends, "_PREFERRED", preferred)
        names.append(auto_axes._digest("call"))
    monkeypatch.setattr(backends, "importable", lambda platform: ("triton",))
    for version in ("3.7.0", "3.8.0"):
        for module in ("triton", "jax_triton"):
            monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(__version__=version))
        names.append(auto_axes._digest("call"))
    assert len({*names}) == len(names)


@pytest.mark.parametrize("form", ["sources", "compiled", "zip"])
def test_the_code_is_in_the_name_however_it_is_installed(form, tmp_path):
    """The digest of a call depends on the code, even without source files."""

    def digest(code):
        folder = tmp_path / f"{form}{len(code)}"
        inner = folder / "package" / "inner"
        inner.mkdir(parents=True)
        for file in (inner / "first.py", inner.parent / "second.py"):
            file.write_text(code)
            if form == "compiled":
                py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")))
                file.unlink()
        if form == "zip":
            archive = shutil.make_archive(str(folder), "zip", folder)
            return [*auto_axes._code_of(zipfile.Path(archive, "package/"))]
        return [*auto_axes._code_of(folder / "package")]

    first, second = digest("x = 1"), digest("x = 22")
    assert len(first) == 2
    assert first != second
