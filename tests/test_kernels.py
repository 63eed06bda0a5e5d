"""Kernels of all implementations on a GPU: schedules, random calls, determinism, large arrays."""

import contextlib
import functools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import memcheck
import numpy as np
import pytest
import refused
import test_softmax
import triton_programs
from loss_cases import CrossEntropy
from norms import check, normal
from reference import SAFETY, assert_within, exact, unit_roundoff
from test_kl_divergence import Divergence, check_special_rows, each_direction, special_rows
from test_kl_divergence import operands as divergence_operands

import jaxnorm
from jaxnorm import kl_divergence
from jaxnorm import softmax_cross_entropy_with_integer_labels as cross_entropy

# Numbers of rows and columns. They include narrow rows, rows that fill all fragments, rows whose
# last fragments overlap, rows of odd length, rows whose loads are pipelined, and rows that a
# cluster processes.
SHAPES = [
    *((130, 64), (97, 128), (200, 768), (131, 1000), (70, 1024), (131, 1024), (300, 2048)),
    *((67, 3000), (66, 4088), (66, 4095), (300, 4096), (140, 5120), (140, 8192), (135, 8192)),
    *((70, 12288), (70, 16384), (66, 32768), (66, 50256), (66, 50257), (5, 65536), (3, 131072)),
]
MIXES = [("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16")]
MIXES += [("float16", "float16"), ("bfloat16", "float32")]


FUNCTIONS_OF_ROWS = ["softmax", "log_softmax", "layer_norm", "rms_norm"]


def check_call(kernels, function, rows, cols, mix, save, seed=0):
    """Check the values and gradients of a softmax or a norm. Only a norm uses `save`."""
    x_dtype, y_dtype = mix
    if "softmax" in function:
        x, d = normal((rows, cols), x_dtype, seed, 3.0), normal((rows, cols), y_dtype, seed + 1)
        test_softmax.check(function, x, d, implementation=kernels)
        return
    subtract_mean = function == "layer_norm"
    check(
        function,
        normal((rows, cols), x_dtype, seed, shift=0.3),
        scale=normal((cols,), "float32", seed + 1, scale=0.3, shift=1.0),
        bias=normal((cols,), "float32", seed + 2, scale=0.3) if subtract_mean else None,
        save=save,
        implementation=kernels,
        y_dtype=y_dtype,
    )


@refused.expect(refused.LONG)
@pytest.mark.parametrize("function", FUNCTIONS_OF_ROWS)
@pytest.mark.parametrize("mix", MIXES, ids="-".join)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_values_and_gradients(rows, cols, mix, function, kernels):
    # Successive cases alternate between the two values of `save`. So each width is tested with both
    # values, and so is each combination of dtypes.
    turn = SHAPES.index((rows, cols)) + MIXES.index(mix) + (function == "layer_norm")
    check_call(kernels, function, rows, cols, mix, ("output", "input")[turn % 2])


@refused.expect(refused.FEW_SHORT_ROWS, refused.LONG)
@pytest.mark.parametrize("seed", range(200))
def test_fuzz(seed, kernels):
    rng = np.random.default_rng(seed)
    cols = int(2 ** rng.uniform(3, 15.5))
    if rng.random() < 0.5:
        cols = max(8, cols // 8 * 8)
    rows = int(2 ** rng.uniform(0, min(9, 22 - np.log2(cols))))
    mix, save = MIXES[rng.integers(len(MIXES))], None
    if rng.random() < 0.4:
        function = ["softmax", "log_softmax"][rng.integers(2)]
    else:
        save = ["output", "input"][rng.integers(2)]
        function = ["rms_norm", "layer_norm"][rng.integers(2)]
    check_call(kernels, function, rows, cols, mix, save, seed)


@refused.expect(refused.LONG)
@pytest.mark.parametrize("cols", [256, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_runs_give_the_same_bits(cols, dtype, kernels):
    """Two runs give the same bits, and a NaN in one row does not change the bits of others."""
    x, d = normal((500, cols), dtype, 0), normal((500, cols), dtype, 1)
    scale, bias = normal((cols,), "float32", 2, shift=1.0), normal((cols,), "float32", 3)

    @jax.jit
    def run(x, scale, bias, d):
        y, vjp = jax.vjp(lambda *a: jaxnorm.layer_norm(*a, implementation=kernels), x, scale, bias)
        return y, *vjp(d)

    first, again, broken = (
        [*map(exact, run(each, scale, bias, d))] for each in (x, x, x.at[77, 3].set(jnp.nan))
    )
    for a, b in zip(first, again):
        np.testing.assert_array_equal(a, b)
    others = np.arange(500) != 77
    for a, b in zip(first[:2], broken[:2]):
        np.testing.assert_array_equal(a[others], b[others])
        assert np.isnan(b[77]).all()


def test_more_elements_than_int32_counts(kernels):
    """Arrays of more than 2^31 elements have correct results.

    The input repeats the same 8 rows, so the last 8 rows of the result must equal the first 8.
    """
    rows, cols = 2**19 + 8, 4096
    functions = (jaxnorm.softmax, jaxnorm.rms_norm)
    if triton_programs.are_recorded():  # too large for a CPU
        for function in functions:
            x = jax.ShapeDtypeStruct((rows, cols), jnp.bfloat16)
            jax.jit(functools.partial(function, implementation=kernels)).lower(x)
        return
    x = jnp.broadcast_to(normal((8, cols), "bfloat16", 0), (rows // 8, 8, cols)).reshape(rows, cols)
    for function in functions:
        y = jax.jit(functools.partial(function, implementation=kernels))(x)
        np.testing.assert_array_equal(exact(y[-8:]), exact(y[:8]))


# Arrays small enough for several processes that share a GPU.
LOGITS = [(8192, 4096), (2048, 32768), (1024, 50257), (512, 128256), (256, 262144), (5, 128256)]


def loss_error(x):
    """Return a bound on the error of a row's log-sum-exp, and on the error of its probabilities.

    The bound is the same for both. It includes the rounding errors of sums, and of the arguments of
    exponentials.
    """
    size = 2 * float(jnp.max(jnp.abs(x)))
    return SAFETY * unit_roundoff("float32") * (size + math.sqrt(x.shape[-1]) + 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax_cross_entropy_with_integer_labels", {}),
        (
            "softmax_cross_entropy_with_integer_labels",
            {"label_smoothing": 0.1, "z_loss": 1e-2},
        ),
        ("log_prob_and_entropy", {}),
        ("log_prob_and_entropy", {"logits_scale": 0.7, "logit_softcap": 8.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "cols"), LOGITS)
def test_losses(rows, cols, dtype, name, options, kernels):
    """Results and gradients equal those of XLA's code up to rounding errors.

    The two implementations add sums in different orders, and both round the gradient. An element of
    an entropy's gradient is ``p * (log p + H)``, where H is the entropy. In this test, its
    magnitude is at most 2, so rounding it causes an error of at most 2 unit roundoffs.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    x = (3 * jax.random.normal(keys[0], (rows, cols))).astype(dtype)
    labels = jax.random.randint(keys[1], (rows,), 0, cols).at[0].set(-1)
    cotangents = [jax.random.normal(key, (rows,), jnp.float32) for key in keys[2:]]
    where = jnp.arange(rows) % 5 != 3

    @functools.partial(jax.jit, static_argnames="implementation")
    def step(x, labels, cotangents, where, implementation):
        function = functools.partial(
            getattr(jaxnorm, name), where=where, implementation=implementation, **options
        )
        results, vjp = jax.vjp(lambda x: jax.tree.leaves(function(x, labels)), x)
        return results, vjp(cotangents[: len(results)])[0].astype(jnp.float32)

    @jax.jit
    def differences(x, labels, cotangents, where):
        ours, theirs = (step(x, labels, cotangents, where, name) for name in (kernels, "xla"))
        (results, dx), (expected, expected_dx) = ours, theirs
        size = sum(map(jnp.abs, cotangents[: len(results)]))[1:, None]
        return (
            jnp.max(jnp.abs(jnp.stack(results) - jnp.stack(expected))[:, 1:]),
            jnp.max(jnp.abs(dx - expected_dx)[1:] / size),
            jnp.isnan(results[0][0]) & jnp.all(jnp.isnan(dx[0])),
            jnp.all(jnp.where(where[:, None], 0, dx) == 0),
            jnp.all(~(results[-1] < 0)),
        )

    of_results, of_dx, is_nan, is_zero, is_positive = differences(x, labels, cotangents, where)
    # An entropy is the sum of ``-p * log(p)``. So an error of p is multiplied by ``|log(p)|``,
    # which may be as large as the range of the logits.
    size, roundings = 1.0, 1
    if name == "log_prob_and_entropy":
        size, roundings = float(jnp.max(jnp.abs(x))), 2
    assert of_results <= 2 * size * loss_error(x)
    assert of_dx <= 2 * (size * loss_error(x) + roundings * unit_roundoff(dtype))
    assert is_nan
    assert is_zero
    assert is_positive


def test_losses_of_more_elements_than_int32_counts(kernels):
    """Losses of more than 2^31 logits are correct: the last rows are as accurate as the first."""
    rows, cols = 16500, 131072
    labels = jnp.full(rows, 7)
    step = jax.jit(
        jax.value_and_grad(lambda x: cross_entropy(x, labels, implementation=kernels)[-1])
    )
    if triton_programs.are_recorded():  # too large for a CPU
        step.lower(jax.ShapeDtypeStruct((rows, cols), jnp.bfloat16))
        return
    x = jnp.zeros((rows, cols), jnp.bfloat16).at[-1, 7].set(5).at[-1, -1].set(-5)
    loss, dx = step(x)
    expected = CrossEntropy(np.asarray(x[-1:]), labels[-1:], dtype="bfloat16")
    assert_within(loss, expected.loss[0], expected.loss_bound()[0])
    one = np.ones(1)
    assert_within(dx[-1:], expected.gradient(one), expected.gradient_bound(one))


@each_direction
@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "teacher_dtype"),
    [
        (300, 131, "float32", "float32"),
        (300, 1000, "float16", "bfloat16"),
        (64, 32768, "bfloat16", "bfloat16"),
        (64, 32768, "float32", "float32"),
        (64, 50257, "bfloat16", "float32"),
        (7, 128256, "bfloat16", "bfloat16"),
    ],
    ids=str,
)
def test_divergences(rows, cols, dtype, teacher_dtype, reverse, kernels):
    """Values and gradients are correct, even for equal logits and for masked positions."""
    x, teacher = divergence_operands((rows, cols), dtype, teacher_dtype)
    function = functools.partial(
        kl_divergence, reverse=reverse, implementation=kernels, logits_scale=1.0
    )
    y, vjp = jax.vjp(lambda x: function(x, teacher), x)
    d = jnp.linspace(-1, 2, rows, dtype=jnp.float32)
    of = Divergence(x, teacher, dtype, reverse=reverse)
    assert_within(y, of.value, of.bound)
    assert_within(vjp(d)[0], *of.gradient(d))
    same, vjp = jax.vjp(lambda y: function(y, x), x)
    np.testing.assert_array_equal(same, 0)
    np.testing.assert_array_equal(vjp(d)[0], 0)
    counts = jnp.arange(rows) % 3 > 0
    y, vjp = jax.vjp(lambda x: function(x, teacher, where=counts), jnp.where(counts[:, None], x, 0))
    np.testing.assert_array_equal(y[::3], 0)
    np.testing.assert_array_equal(vjp(d)[0][::3], 0)


@each_direction
def test_divergences_of_special_logits(reverse, kernels):
    y = kl_divergence(*special_rows(200), reverse=reverse, implementation=kernels)
    check_special_rows(y, None, reverse=reverse)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", memcheck.NAMES)
def test_no_access_out_of_bounds(name, dtype, kernels):
    check_accesses(kernels, name, dtype)


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_access_out_of_bounds_by_products(dtype):
    check_accesses("mosaic", "rms_norm_linear", dtype)


def check_accesses(kernels, name, dtype):
    """Run a sample of kernels under compute-sanitizer, which finds accesses out of bounds."""
    if triton_programs.are_recorded():
        for case in memcheck.cases_of(kernels, name, dtype):
            memcheck.lowered(*case)
        return
    checker = shutil.which("compute-sanitizer")
    # Allocate each array separately. In a pool, an access beyond the end of an array could hit the
    # next array, and the checker would not report it.
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    # Check only this program, and not the compilers that it starts, which crash the checker.
    command = [
        checker,
        "--error-exitcode=1",
        "--report-api-errors=no",
        "--target-processes=application-only",
    ]
    command += [sys.executable, str(Path(__file__).with_name("memcheck.py")), kernels, name, dtype]
    command += map(str, triton_programs.replayed())
    # If the checker crashes, the program that it checks keeps running and would keep an output pipe
    # open. Reading from the pipe would then not end. So the output goes to a file, and the whole
    # group of processes is killed.
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as run,
    ):
        try:
            run.wait(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
        log.seek(0)
        said = log.read()
    assert run.returncode == 0, f"exit status {run.returncode}: {said[-8000:]}"
    assert re.search(r"all \d+ cases", said)
    assert "WRONG" not in said
