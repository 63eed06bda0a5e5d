"""The float64 reference of the package beside that of the tests: two, which check each other.

`jaxnorm.tools.references` comes with the package, for the self-check on a user's machine: it has no
more than the public functions promise, and bounds by running error analysis, which nobody has to
derive. `reference` and the cases over it know every option of the tests, and bounds derived by
hand, which are closer. Kernels are held against either; a slip in one formula would be seen here.
"""

import functools
import operator

import gated_cases
import linear_loss_cases
import log_prob_cases
import loss_cases
import norm_linear_cases
import norm_rope_cases
import numpy as np
import pytest
import reference

from jaxnorm.tools import references
from jaxnorm.tools.running_error import Bounded

ROWS, COLS, FEATURES = 6, 40, 24
X, PARAMETER = (ROWS, COLS), (COLS,)
OPTIONS = "output", "float32", "float32"


def evaluated(function, shapes, *cotangents, **options):
    """Operands, cotangents, and what the package says: results and gradients, without bounds."""
    given = references.operands(shapes, COLS, seed=0)
    along = references.operands({str(i): shape for i, shape in enumerate(cotangents)}, 0, seed=1)
    given_, along_ = (
        {n: Bounded.exact(a) if a.dtype == np.float64 else a for n, a in arrays.items()}
        for arrays in (given, along)
    )
    results, gradients = function(given_, list(along_.values()), "float32", **options)
    values = {name: gradient.value for name, gradient in gradients.items()}
    return given, [*along.values()], [result.value for result in results], values


def agree(ours, theirs):
    """But for float64's roundings: eight sums of COLS terms, one after the other."""
    for a, b in zip(ours, theirs, strict=True):
        b = np.asarray(b)
        infinite = np.isinf(b)
        size = np.max(np.abs(b[~infinite]))
        roundings = 8 * reference.SAFETY * COLS * reference.unit_roundoff("float64")
        reference.assert_within(np.reshape(a, b.shape), b, roundings * size)


def norm(x, given, d, activation=None):
    bias = given.get("bias")
    zero = np.zeros(COLS)
    gain, shift = given["scale"], zero if bias is None else bias
    return reference.Norm(
        x, gain, shift, d, bias is not None, 1e-6, *OPTIONS, activation=activation
    )


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"causal": True}], ids=str)
@pytest.mark.parametrize("others", [{}, {"where": X, "bias": X}], ids=str)
def test_softmaxes(log, options, others):
    call = functools.partial(references.softmax, log=log, **options)
    given, (d,), (y,), gradients = evaluated(call, {"x": X, **others}, X)
    kept = np.tri(*X, dtype=bool) if "causal" in options else np.ones(X, bool)
    kept = kept & given.get("where", True)
    z = options.get("scale", 1) * given["x"] + given.get("bias", 0)
    function, gradient = (
        (reference.log_softmax, reference.log_softmax_gradient)
        if log
        else (reference.softmax, reference.softmax_gradient)
    )
    expected = function(z, -1, kept)
    dz = gradient(expected, np.where(kept, d, 0), -1)
    agree([y, gradients["x"]], [expected, options.get("scale", 1) * dz])
    if others:
        agree([gradients["bias"]], [dz])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("parameters", [("scale",), ("scale", "bias")])
def test_norms(parameters, activation):
    shapes = {"x": X} | dict.fromkeys(parameters, PARAMETER)
    call = functools.partial(references.norm, activation=activation)
    given, (d,), (y,), gradients = evaluated(call, shapes, X)
    expected = norm(given["x"], given, d, activation)
    wanted = {"x": expected.dx, "scale": expected.dscale, "bias": expected.dbias}
    agree([y, *gradients.values()], [expected.y, *map(wanted.get, gradients)])


@pytest.mark.parametrize("parameters", [("scale",), ("scale", "bias")])
def test_norms_of_sums(parameters):
    shapes = {"x": X, "residual": X} | dict.fromkeys(parameters, PARAMETER)
    given, (d, dh), (y, h), gradients = evaluated(references.add_norm, shapes, X, X)
    expected = norm(given["x"] + given["residual"], given, d)
    both = dict.fromkeys(("x", "residual"), expected.dx + dh)
    wanted = both | {"scale": expected.dscale, "bias": expected.dbias}
    agree([y, *gradients.values()], [expected.y, *map(wanted.get, gradients)])
    agree([h], [given["x"] + given["residual"]])


@pytest.mark.parametrize("parameters", [("scale",), ("scale", "bias")])
def test_norms_of_sums_with_a_gate(parameters):
    shapes = {"x": X, "residual": X, "gate": PARAMETER} | dict.fromkeys(parameters, PARAMETER)
    given, (d, dh), (y, h), gradients = evaluated(references.scaled_add_norm, shapes, X, X)
    total = given["residual"] + given["gate"] * given["x"]
    expected = norm(total, given, d)
    dresidual = expected.dx + dh
    wanted = {
        "x": given["gate"] * dresidual,
        "residual": dresidual,
        "gate": (dresidual * given["x"]).reshape(-1, COLS).sum(0),
        "scale": expected.dscale,
        "bias": expected.dbias,
    }
    agree([y, h, *gradients.values()], [expected.y, total, *map(wanted.get, gradients)])


def test_a_sum_with_a_norm():
    shapes = {"x": X, "residual": X, "scale": PARAMETER}
    given, (d,), (y,), gradients = evaluated(references.norm_add, shapes, X)
    expected = norm(given["x"], given, d)
    wanted = {"x": expected.dx, "residual": d, "scale": expected.dscale}
    agree([y, *gradients.values()], [given["residual"] + expected.y, *map(wanted.get, gradients)])


def test_two_norms():
    shapes = {"x": X, "residual": X, "scale": PARAMETER, "next_scale": PARAMETER}
    given, (dy, dh), (y, h), gradients = evaluated(references.norm_add_norm, shapes, X, X)
    sum_ = given["residual"] + norm(given["x"], given, dy).y
    gains = given["scale"], given["next_scale"]
    both = reference.TwoNorms(
        given["x"], sum_, *gains, dy, dh, "output", "float32", "float32", "float32"
    )
    wanted = {
        "x": both.first.dx,
        "residual": both.dresidual,
        "scale": both.first.dscale,
        "next_scale": both.last.dscale,
    }
    agree([y, h, *gradients.values()], [both.last.y, sum_, *map(wanted.get, gradients)])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [COLS, COLS // 2])
def test_a_norm_and_a_rotation(rotated, interleaved):
    shapes = {"x": X, "scale": PARAMETER} | dict.fromkeys(("cos", "sin"), (ROWS, rotated // 2))
    options = {"interleaved": interleaved}
    given, (d,), (y,), gradients = evaluated(references.norm_rope, shapes, X, **options)
    zero, tables = np.zeros(COLS), (given["cos"], given["sin"])
    expected = norm_rope_cases.RotatedNorm(
        given["x"], given["scale"], zero, d, False, 1e-6, *OPTIONS, *tables, interleaved
    )
    wanted = {"x": expected.dx, "scale": expected.dscale}
    agree([y, *gradients.values()], [expected.y, *map(wanted.get, gradients)])


@pytest.mark.parametrize("before", [True, False])
def test_a_norm_and_a_gate(before):
    shapes, options = {"x": X, "gate": X, "scale": PARAMETER}, {"norm_before_gate": before}
    given, (d,), (y,), gradients = evaluated(references.norm_gated, shapes, X, **options)
    expected = gated_cases.GatedNorm(
        *(given[name] for name in shapes), d, before, "silu", ("float32",) * 3
    )
    wanted = {"x": expected.dx, "gate": expected.dgate, "scale": expected.dscale}
    agree([y, *gradients.values()], [expected.y, *map(wanted.get, gradients)])


def test_a_norm_and_a_product():
    shapes = {"x": X, "scale": PARAMETER, "weight": (COLS, FEATURES), "bias": (FEATURES,)}
    given, (d,), (y,), gradients = evaluated(references.norm_linear, shapes, (ROWS, FEATURES))
    arrays = operator.itemgetter("x", "weight", "scale", "bias")(given)
    expected = norm_linear_cases.NormLinear(*arrays, d, np.zeros(X), *("float32",) * 4)
    wanted = {name: value for name, (value, _) in expected.gradients().items()}
    agree([y, *gradients.values()], [expected.y, *map(wanted.get, gradients)])


def test_losses():
    shapes = {"logits": X, "labels": (ROWS,)}
    given, (d,), (loss,), gradients = evaluated(references.cross_entropy, shapes, (ROWS,))
    expected = loss_cases.CrossEntropy(given["logits"], given["labels"])
    agree([loss, gradients["logits"]], [expected.loss, expected.gradient(d)])


def test_losses_of_a_linear_layer():
    shapes = {"x": X, "weight": (COLS, COLS), "bias": PARAMETER, "labels": (ROWS,)}
    given, (d,), (loss,), gradients = evaluated(references.linear_cross_entropy, shapes, ())
    expected = linear_loss_cases.Linear(*map(given.get, ("x", "weight", "bias", "labels")))
    wanted = [value for value, _ in expected.gradients(np.full(ROWS, d / ROWS))]
    agree([loss], [expected.losses.mean()])
    agree(map(gradients.get, ("x", "weight", "bias")), wanted)


def test_log_probabilities_and_entropies():
    shapes = {"logits": X, "labels": (ROWS,)}
    given, (a, b), results, gradients = evaluated(
        references.log_prob_and_entropy, shapes, (ROWS,), (ROWS,)
    )
    expected = log_prob_cases.LogProbs(given["logits"], given["labels"])
    agree([*results, gradients["logits"]], [*expected.results, expected.gradient(a, b)])


def test_log_probabilities_and_entropies_of_a_linear_layer():
    shapes = {"x": X, "weight": (COLS, COLS), "bias": PARAMETER, "labels": (ROWS,)}
    given, d, results, gradients = evaluated(
        references.linear_log_prob_and_entropy, shapes, (ROWS,), (ROWS,)
    )
    names = ("x", "weight", "bias")
    expected = log_prob_cases.Linear(*map(given.get, (*names, "labels")))
    wanted = [value for value, _ in expected.gradients(*d)]
    agree([*results, *map(gradients.get, names)], [*expected.results, *wanted])
