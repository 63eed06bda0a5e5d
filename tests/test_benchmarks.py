"""The benchmark harness, without a GPU: what is asked, and how calls and errors are measured."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from benchmarks import accuracy, calls, gradients, options, plots, providers, workloads
from benchmarks.largest import largest
from benchmarks.providers import PROVIDERS
from benchmarks.suites import SUITES, Selection
from benchmarks.workloads import OPERATIONS, Workload

SMALL = Selection(providers=("xla", "jnp"), ops=("rms_norm",), shapes=((4, 32),))
KERNELS = SUITES["kernels"]


# What is asked.


@pytest.mark.parametrize(
    ("direction", "dtypes", "arrays"),
    [
        ("fwd", ("bfloat16", "bfloat16"), 2 * 2),
        ("fwd", ("float32", "bfloat16"), 4 + 2),
        ("bwd", ("bfloat16", "bfloat16"), 3 * 2),
        ("bwd", ("float32", "bfloat16"), 2 * 2 + 4),
        ("fwd+bwd", ("float32", "float32"), 5 * 4),
        ("fwd+bwd", ("float32", "bfloat16"), (4 + 2) + (2 * 2 + 4)),
    ],
)
def test_bytes(direction, dtypes, arrays):
    assert Workload("rms_norm", direction, 10, 30, *dtypes).bytes == 300 * arrays


def test_the_grid():
    shapes = list(itertools.chain(*workloads.GRID.values()))
    assert len(shapes) == len(set(shapes)) == 29
    cells = list(workloads.grid())
    # Two dtypes for each operation, a third for the norms; forward and backward.
    assert len(cells) == len(set(cells)) == 29 * 2 * (4 * 2 + 2)
    assert {w.op for w in cells if w.x_dtype != w.y_dtype} == {"layer_norm", "rms_norm"}


def test_every_suite_asks_what_its_providers_offer():
    for suite in SUITES.values():
        cells = list(suite.cells(Selection()))
        assert cells
        assert len(cells) == len(set(cells))
    kernels = list(KERNELS.cells(Selection()))
    assert {c.op for c in kernels if c.provider == "liger"} == {"softmax", "layer_norm", "rms_norm"}
    assert {c.op for c in kernels if c.provider == "quack" and c.x_dtype != c.y_dtype} == {
        "rms_norm"
    }
    assert {c.rows for c in SUITES["latency"].cells(Selection())} == {1, 128}
    assert {c.direction for c in SUITES["api"].cells(Selection())} == {"fwd+bwd"}
    assert {(c.model, c.stack) for c in SUITES["memory"].cells(Selection())} == {
        ("gpt2-small", "scan"),
        ("gpt2-small", "unrolled"),
        ("llama-1b", "scan"),
        ("llama-1b", "unrolled"),
    }


def test_a_selection_is_a_part():
    cells = list(KERNELS.cells(dataclasses.replace(SMALL, directions=("bwd",))))
    assert {(c.op, c.direction, c.rows, c.cols) for c in cells} == {("rms_norm", "bwd", 4, 32)}
    assert {c.provider for c in cells} == {"xla", "jnp"}
    quick = {(c.rows, c.cols) for c in KERNELS.cells(Selection(quick=True))}
    assert quick == set(workloads.QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "got 'speed'; expected one of kernels, api"),
        (["--shapes", "8192,4096"], "got '8192,4096'; expected ROWSxCOLS"),
        (["--shapes", "0x4096"], "got '0x4096'; expected ROWSxCOLS"),
        (["--providers", "apex"], "invalid choice: 'apex'"),
        (["--dtypes", "int8"], "invalid choice: 'int8'"),
        (["--ops", "batch_norm"], "invalid choice: 'batch_norm'"),
        (["--directions", "sideways"], "invalid choice: 'sideways'"),
        (["--workers", "0"], "got '0'; expected 1 or more processes"),
        (["--workers", "all"], "got 'all'; expected 1 or more processes"),
        (["--limit", "0"], "got '0'; expected seconds, more than 0"),
        (["--limit", "long"], "got 'long'; expected seconds, more than 0"),
        (["--out", "results.csv"], "got 'results.csv'; expected a folder"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(arguments, None)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# How calls are timed.


def test_medians_over_calls():
    timing = calls.of_kernels([1.0, 5.0, 2.0, 6.0, 3.0, 10.0], calls=3)
    assert (timing.us, timing.main_us) == (8.0, 6.0)
    assert timing.gbps(16_000) == pytest.approx(2.0)


def test_calls_that_differ_are_an_error():
    with pytest.raises(RuntimeError, match="7 kernels in 3 calls"):
        calls.of_kernels([1.0] * 7, calls=3)
    with pytest.raises(RuntimeError, match="0 kernels in 3 calls"):
        calls.of_kernels([], calls=3)


def test_rotating_buffers_are_colder_than_the_cache():
    for size in (10_000_000, 100_000_000, 10_000_000_000):
        assert calls.buffers_for(size) >= 2
        assert calls.buffers_for(size) * size >= 5 * calls.L2_BYTES


# The largest batch.


@pytest.mark.parametrize("limit", [0, 99, 100, 101, 1234, 54_321])
@pytest.mark.parametrize(
    "used", [lambda n: 90 + 7 * n, lambda n: 50 + n * n, lambda n: 100 * (1 + n // 16), lambda n: n]
)
@pytest.mark.parametrize("start", [1, 8])
def test_the_largest_that_fits(used, limit, start):
    found = largest(used, limit, {start: used(start)})
    assert found == max((n for n in range(1, limit + 2) if used(n) <= limit), default=0)


def test_a_line_needs_few_questions():
    asked = []

    def used(n):
        asked.append(n)
        return 3_000_000_000 + 700_000_000 * n

    assert largest(used, 80 * 10**9, {8: used(8)}) == 110
    assert len(asked) <= 5


# Gradients in float64.


def plain(op):
    if op in ("softmax", "log_softmax"):
        return getattr(jax.nn, op)
    return lambda x, scale, bias=None: accuracy.plain(x, scale, bias)


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_formulas_are_the_gradients(op, x64):
    problem = gradients.problem(Workload(op, "bwd", 6, 40, "bfloat16", "bfloat16"))
    wide = [a.astype(np.float64) for a in (problem.x, *problem.parameters)]

    _, pullback = jax.vjp(plain(op), *wide)
    actual = [np.asarray(g) for g in pullback(problem.dy.astype(np.float64))]
    errors = gradients.errors(problem, actual)
    assert len(errors) == 1 + workloads.PARAMETERS[op]
    assert max(errors.values()) < 1e-13


def test_problems_are_representable():
    problem = gradients.problem(Workload("layer_norm", "bwd", 6, 40, "bfloat16", "bfloat16"))
    for array in (problem.x, problem.dy, *problem.parameters):
        assert np.array_equal(array, np.asarray(jax.numpy.asarray(array, "bfloat16"), np.float32))


def test_every_provider_has_a_line_of_its_own():
    colours = [colour for colour, _ in plots.STYLES.values()]
    assert plots.STYLES.keys() == PROVIDERS.keys()
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("name", ["jaxnorm", "xla", "jnp", "flax"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_providers_compute_the_operation(name, op):
    """What is compared is the same function, epsilon included, with the output's dtype."""
    workload = Workload(op, "fwd", 4, 32, "float32", "float32")
    if not PROVIDERS[name].offers(workload):
        pytest.skip(f"{name} has no {op}")
    problem = gradients.problem(workload)
    small = 1e-3 * problem.x  # where epsilon counts
    y = providers.function(name, op, "float32")(small, *problem.parameters)
    np.testing.assert_allclose(y, plain(op)(small, *problem.parameters), rtol=1e-5, atol=1e-6)
