"""The kernels on a mesh of real GPUs: values, collectives, and a training run.

Run them one at a time (``pytest -n 0``): processes that share GPUs wait for each other in NCCL.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import FUNCTIONS, KINDS, Case, check_values, collectives, on_mesh, operands, step

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]

CALLS = {"mosaic": "mosaic_gpu", "triton": "triton_kernel_call"}  # names in HLO
GPUS = jax.device_count()
SHAPE = (8, 512, 1024)
CASES = [
    Case("data", {"data": GPUS}, P("data")),
    Case("sequence", {"seq": GPUS}, P(None, "seq")),
    Case("fsdp", {"fsdp": GPUS}, P("fsdp"), P("fsdp")),
    Case("data x sequence", {"data": GPUS // 2, "seq": 2}, P("data", "seq")),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_split_over_gpus(name, case, kind):
    compiled, sharded = on_mesh(step(name), operands(name, SHAPE), case, kind)
    check_values(compiled, sharded, name)
    assert compiled.as_text().count("mosaic_gpu") >= 2
    x = sharded[1]
    for y in compiled(*sharded)[:2]:
        assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
    # Each parameter's gradient is summed once, in one collective or several; no activation moves.
    sizes = [size for sizes in collectives(compiled).values() for size in sizes]
    moved = sum(math.prod(map(int, size.split(","))) for size in sizes)
    gradients = (len(sharded) - 2) * SHAPE[-1]
    if case.params == P():
        assert moved == gradients
    else:  # gathered for the forward, and for the backward
        assert moved <= 3 * gradients


@pytest.mark.parametrize("save", ["output", "input"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_both_save_modes(name, save):
    compiled, sharded = on_mesh(step(name, save), operands(name, SHAPE), CASES[0], "auto")
    check_values(compiled, sharded, name, save)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_by_name(name, kernels):
    function = step(name, implementation=kernels)
    compiled, sharded = on_mesh(function, operands(name, SHAPE), CASES[0], "auto")
    check_values(compiled, sharded, name)
    assert compiled.as_text().count(CALLS[kernels]) >= 2


def final_losses(tmp_path, *options):
    """Of the demo's three trainings, as printed to 4 decimals."""
    program = Path(__file__).parent.parent / "examples" / "train_transformer.py"
    sizes = ["--layers=2", "--width=256", "--seq=128", "--batch=8", "--steps=60"]
    # The choice among matrix products is timed in each process, and longer than it is of use here.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    done = subprocess.run(
        [sys.executable, program, *sizes, "--markdown=table.md", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = (tmp_path / "table.md").read_text().splitlines()[2:5]
    return [float(re.split(r"\s*\|\s*", row)[2]) for row in rows]


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory):
    return final_losses(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("axes", ["data={}", "fsdp={}"])
def test_training_equals_the_run_on_one_gpu(axes, losses_alone, tmp_path):
    spread = final_losses(tmp_path, "--mesh", axes.format(GPUS))
    assert spread == pytest.approx(losses_alone, rel=2e-3)
