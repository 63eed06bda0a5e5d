"""The kernels on a mesh of real GPUs: values, collectives, losses, and a training run.

Run these tests one at a time (``pytest -n 0``): processes that share GPUs would deadlock in NCCL.
"""

import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functions import Sizes, operands_of, step_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, Case, collectives, mesh_of, on_mesh
from norm_linear_cases import operands as linear_operands
from program_error import analyse, assert_analysed
from reference import SAFETY, assert_within, exact, rounding, unit_roundoff

import jaxnorm

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]

CALLS = {"mosaic": "mosaic_gpu", "triton": "triton_kernel_call"}  # custom calls in HLO
GPUS = jax.device_count()
SIZES = Sizes((8, 512), 1024)
FUNCTIONS = ["softmax", "log_softmax", "rms_norm", "layer_norm"]
CASES = [
    Case("data", {"data": GPUS}, P("data")),
    Case("sequence", {"seq": GPUS}, P(None, "seq")),
    Case("fsdp", {"fsdp": GPUS}, P("fsdp"), P("fsdp")),
    Case("data x sequence", {"data": GPUS // 2, "seq": 2}, P("data", "seq")),
]


@functools.cache
def on_one_device(name):
    return analyse(step_of(name), *operands_of(name, sizes=SIZES))


def run_on_mesh(name, case, kind, **options):
    """Check the values on a mesh. Return the program, its operands and its results."""
    operands = operands_of(name, sizes=SIZES)
    specs = [case.x, *[case.params] * (len(operands) - 1)]
    step, mesh = step_of(name, **options), mesh_of(case, kind)
    compiled, sharded = on_mesh(step, operands, specs, mesh, kind)
    results = compiled(*sharded)
    assert_analysed(results, on_one_device(name))
    return compiled, sharded, results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_split_over_gpus(name, case, kind):
    compiled, (x, *params), ((y,), (dx, *_)) = run_on_mesh(name, case, kind)
    assert compiled.as_text().count("mosaic_gpu") >= 2
    for array in (y, dx):
        assert array.sharding.is_equivalent_to(x.sharding, x.ndim)
    # Each parameter's gradient is summed once, in one or several collectives. No activation is
    # exchanged.
    sizes = [size for sizes in collectives(compiled).values() for size in sizes]
    moved = sum(math.prod(map(int, size.split(","))) for size in sizes)
    gradients = len(params) * SIZES.cols
    if case.params == P():
        assert moved == gradients
    else:  # The parameters are gathered in both passes.
        assert moved <= 3 * gradients


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_by_name(name, kernels):
    compiled, *_ = run_on_mesh(name, CASES[0], "auto", implementation=kernels)
    assert compiled.as_text().count(CALLS[kernels]) >= 2


# The shardings of logits, or of x and the weight.
LOSSES = {
    "rows": (P("data"), None),
    "vocabulary": (P(None, "data"), None),
    "linear, rows": (P("data"), P()),
    "linear, rows; FSDP": (P("data"), P("data")),
    "linear, vocabulary": (P(), P(None, "data")),
}


def loss_of(labels, x, weight=None, *, has_entropy=False, **options):
    if has_entropy:
        if weight is None:
            of = jaxnorm.log_prob_and_entropy(x, labels, where=labels >= 0, **options)
        else:
            of = jaxnorm.linear_log_prob_and_entropy(
                x, weight, labels, where=labels >= 0, chunk=96, **options
            )
        return sum(map(jnp.mean, of))
    if weight is None:
        loss = jaxnorm.softmax_cross_entropy_with_integer_labels
        return jnp.mean(loss(x, labels, where=labels >= 0, **options))
    return jaxnorm.linear_softmax_cross_entropy(
        x, weight, labels, where=labels >= 0, chunk=96, **options
    )


@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, kind, has_entropy):
    """Losses on the mesh equal those on one GPU, and no array of logits is exchanged.

    If rows are split, kernels run.
    """
    rows, features, classes = 256 * GPUS, 256, 4096
    specs = [spec for spec in LOSSES[name] if spec is not None]
    shapes = [(rows, classes)] if len(specs) == 1 else [(rows, features), (features, classes)]
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]
    labels = jax.random.randint(keys[-1], (rows,), 0, classes).at[1].set(-100)
    function = functools.partial(loss_of, has_entropy=has_entropy)
    step = jax.value_and_grad(function, tuple(range(1, 1 + len(arrays))))
    expected = jax.jit(functools.partial(step, implementation="xla"))(labels, *arrays)
    mesh = mesh_of(CASES[0], kind)
    specs = [P(*specs[0][:1]), *specs]
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((labels, *arrays), specs)
    ]
    compiled = jax.jit(step).lower(*placed).compile()
    for ours, theirs in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(expected)):
        # Matmuls run in TF32, which has float16's unit roundoff. The terms of their sums have both
        # signs and may cancel, so an element can be much smaller than its error. The bound is
        # therefore relative to the largest element.
        theirs = exact(theirs)
        assert_within(ours, theirs, SAFETY * unit_roundoff("float16") * np.abs(theirs).max())
    if specs[1] == P("data"):
        assert compiled.as_text().count("mosaic_gpu") >= 2
    moved = [size for sizes in collectives(compiled).values() for size in sizes]
    assert all(
        math.prod(map(int, size.split(",") if size else [])) < rows * classes for size in moved
    )


# With this many rows, kernels are the default. For fewer rows, the default is XLA's code.
PRODUCT = functools.partial(linear_operands, 8192 * GPUS, 512, 1024, "bfloat16")


def product_of(arrays, **options):
    names = ("x", "weight", "scale", "bias")
    return jaxnorm.rms_norm_linear(**{n: arrays[n] for n in names}, activation="gelu", **options)


def check_product(ours):
    """Assert that the result equals the result of XLA's code on one GPU."""
    expected = jax.jit(functools.partial(product_of, implementation="xla"))(PRODUCT())
    # Each element of a result is a sum of magnitude 1. On the mesh and on one GPU, the terms of the
    # sum are rounded to bfloat16, and then the sum itself.
    bound = SAFETY * unit_roundoff("bfloat16") + 2 * rounding(exact(expected), "bfloat16")
    assert_within(ours, exact(expected), bound)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("weight", [P(), P("data"), P(None, "model")], ids=str)
def test_product(weight, kind):
    """Results on the mesh are correct for three shardings of the weight.

    The weight is replicated, sharded along its rows (FSDP), or sharded along its columns.
    """
    axes = {"data": GPUS // 2, "model": 2} if weight == P(None, "model") else {"data": GPUS}
    mesh = mesh_of(Case("product", axes, P("data")), kind)
    given = PRODUCT()
    specs = {"x": P("data"), "weight": weight, "scale": P(), "bias": P(*weight[1:2])}
    placed = {n: jax.device_put(given[n], NamedSharding(mesh, spec)) for n, spec in specs.items()}
    compiled = jax.jit(product_of).lower(placed).compile()
    assert CALLS["mosaic"] in compiled.as_text()
    ours = compiled(placed)
    assert ours.sharding.is_equivalent_to(NamedSharding(mesh, P("data", *weight[1:2])), 2)
    check_product(ours)


def final_losses(tmp_path, *options):
    """Run the demo, and return the final losses of its three trainings, with 4 decimals."""
    program = Path(__file__).parent.parent / "examples" / "train_transformer.py"
    sizes = ["--layers=2", "--width=256", "--seq=128", "--batch=8", "--steps=60"]
    # Turn autotuning off. Otherwise, each process would first time several algorithms for each
    # matmul. In this short run, this would take more time than the fastest algorithms could save.
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
