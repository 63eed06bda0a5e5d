"""Triton kernels that are compiled on one machine and run on another.

Each launch must run the kernel that was compiled for it.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_programs
from triton_programs import Launch

from jaxnorm_kernels.specs import Shared

# A script with a function `kernels()`. It lowers a norm for a GPU and returns the code of all
# kernels in the program, in order.
PROGRAM = """
import hashlib, sys, zlib
from pathlib import Path
import jax, jax.numpy as jnp
from jax.extend.mlir import ir
import jaxnorm
import triton_programs

def step(x, scale):
    y, vjp = jax.vjp(lambda *a: jaxnorm.rms_norm(*a, implementation="triton"), x, scale)
    return y, vjp(y)

operands = jnp.ones((64, 256), jnp.bfloat16), jnp.ones(256)

def kernels():
    module = jax.jit(step).trace(*operands).lower(lowering_platforms=("cuda",)).compiler_ir()
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "mhlo.backend_config" in op.attributes:
            found.append(zlib.decompress(triton_programs.opaque(op)))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found
"""


def run(code, *arguments):
    """Run `PROGRAM` followed by `code` in a new process, and return its output."""
    command = [sys.executable, "-c", PROGRAM + textwrap.dedent(code), *map(str, arguments)]
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def about(folder, **changes):
    sources = triton_programs.sources()
    found = {"gpu": triton_programs.GPUS["h100"], "sources": sources, "software": "none"}
    (folder / triton_programs.ABOUT).write_text(json.dumps({**found, **changes}))


def test_kernels_come_from_the_folder(tmp_path):
    """Without Triton, a launch runs code that was compiled before and saved in a folder.

    It raises an error if the folder has no code for this launch.
    """
    about(tmp_path)
    code = """
    folder = Path(sys.argv[1])
    triton_programs.replay(folder)
    for code in (b"the forward", b"the backward"):
        try:
            kernels()
        except ValueError as missing:
            while not isinstance(missing, triton_programs.MissingProgramError):
                missing = missing.__cause__ or missing.__context__
            print(missing)
            (folder / missing.launch.file).write_bytes(code)
    print(kernels(), "triton" in sys.modules)
    """
    first, second, last = run(code, tmp_path).splitlines()
    assert "norm_fwd_in_registers" in first
    assert "x_ptr=bfloat16[64, 256]" in first
    assert "compute_capability=90" in first
    assert "norm_bwd" in second
    assert last == "[b'the forward', b'the backward'] False"


@pytest.mark.cuda_plugin
def test_a_recorded_kernel_is_the_one_that_triton_compiles(tmp_path):
    record = """
    with triton_programs.recording(Path(sys.argv[1]), triton_programs.GPUS["a100"]):
        y, _ = jax.jit(step)(*operands)
    print(float(y.sum()))
    """
    digests = "print([hashlib.sha256(kernel).hexdigest() for kernel in kernels()])"
    assert float(run(record, tmp_path)) == 64 * 256
    replayed = run(f"triton_programs.replay(Path(sys.argv[1])); {digests}", tmp_path)
    # Without a GPU, kernels are lowered for an A100 by default.
    assert replayed == run(digests)
    assert replayed.count(",") == 1


def test_a_launch_has_a_name_of_all_that_it_depends_on():
    def kernel(x_ptr, y_ptr, rows, tiling):
        raise NotImplementedError

    rows = Shared(((4, True), (3, False)), has_columns=True)
    call = {"name": "norm", "x_ptr": jnp.ones((3, 4)), "rows": 3, "tiling": rows, "grid": (3,)}
    changes = [
        {},
        {"x_ptr": jnp.ones((4, 3))},
        {"x_ptr": jnp.ones((3, 4), jnp.bfloat16)},
        {"x_ptr": jax.new_ref(jnp.ones((3, 4)))},
        {"x_ptr": None},
        {"rows": 4},
        {"rows": 3.0},
        {"rows": True},
        {"tiling": Shared(((4, True), (3, True)), has_columns=True)},
        {"tiling": np.dtype(np.float32)},
    ]
    names = {Launch(kernel, {**call, **change}).file for change in changes}
    assert len(names) == len(changes)
    assert Launch(kernel, dict(reversed(call.items()))).file in names


def test_kernels_of_other_sources_are_refused(tmp_path):
    about(tmp_path, sources="others")
    code = """
    try:
        triton_programs.replay(Path(sys.argv[1]))
    except ValueError as error:
        print(error)
    """
    assert "other sources" in run(code, tmp_path)


def test_gpus_by_name_and_by_numbers():
    assert triton_programs.gpu_of("a100") == triton_programs.gpu_of("80,108,166912")
    with pytest.raises(Exception, match="'v100'; expected one of a100, l4, h100, or"):
        triton_programs.gpu_of("v100")
