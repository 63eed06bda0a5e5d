"""The float64 references are independent of the code that they check, and of each other.

There are two sets of references. `jaxnorm.tools.references` belongs to the package, because the
self-check uses it on a user's machine: formulas in plain JAX, which JAX differentiates. The tests
have their own references in NumPy, with more options and with bounds of each rounding.
"""

import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import log_prob_cases
import loss_cases
import numpy as np
import pytest
import reference

from jaxnorm.tools import references

ROWS, COLS = 6, 40
X, PARAMETER, LABELS = (ROWS, COLS), (COLS,), (ROWS,)
_LINEAR = {"x": X, "weight": (COLS, COLS), "bias": PARAMETER, "labels": LABELS}


def test_they_share_nothing_with_what_they_check():
    """The references import only JAX, NumPy and the standard library."""
    tree = ast.parse(Path(references.__file__).read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported <= {"collections", "functools", "jax", "math", "numpy", "typing"}


def evaluated(name, shapes, **options):
    """Call the reference `name` in float64.

    Return its operands, the cotangents of its results, its results, and its gradients.
    """
    given = references.operands(shapes, COLS, seed=0)
    labels = {n: a for n, a in given.items() if a.dtype != np.float64}
    floats = {n: jnp.asarray(a) for n, a in given.items() if n not in labels}
    function = functools.partial(getattr(references, name), **labels, **options)
    y, pullback = jax.vjp(lambda floats: jax.tree.leaves(function(**floats)), floats)
    along = references.operands({str(i): a.shape for i, a in enumerate(y)}, 0, seed=1)
    (gradients,) = pullback([jnp.asarray(d) for d in along.values()])
    return given, [*along.values()], y, gradients


def agree(ours, theirs):
    """Assert that values are equal up to float64's rounding errors.

    The bound is that of eight successive sums of COLS terms each.
    """
    for a, b in zip(ours, theirs, strict=True):
        b = np.asarray(b)
        roundings = 8 * reference.SAFETY * COLS * reference.unit_roundoff("float64")
        reference.assert_within(np.reshape(a, b.shape), b, roundings * np.max(np.abs(b)))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmaxes(x64, name):
    given, (d,), (y,), gradients = evaluated(name, {"x": X})
    expected = getattr(reference, name)(given["x"], -1)
    agree([y, gradients["x"]], [expected, getattr(reference, f"{name}_gradient")(expected, d, -1)])


@pytest.mark.parametrize("has_bias", [True, False])
def test_norms(x64, has_bias):
    parameters = dict.fromkeys(("scale", "bias") if has_bias else ("scale",), PARAMETER)
    given, (d,), (y,), gradients = evaluated("norm", {"x": X, **parameters})
    bias = given.get("bias", np.zeros(COLS))
    of = reference.Norm(
        given["x"], given["scale"], bias, d, has_bias, 1e-6, "input", "float64", "float64"
    )
    agree([y, gradients["x"], gradients["scale"]], [of.y, of.dx, of.dscale])


def test_losses(x64):
    given, (d,), (loss,), gradients = evaluated("cross_entropy", {"logits": X, "labels": LABELS})
    expected = loss_cases.CrossEntropy(given["logits"], given["labels"])
    agree([loss, gradients["logits"]], [expected.loss, expected.gradient(d)])
    shapes = {"logits": X, "labels": LABELS}
    given, (a, b), results, gradients = evaluated("log_prob_and_entropy", shapes)
    expected = log_prob_cases.LogProbs(given["logits"], given["labels"])
    agree([*results, gradients["logits"]], [*expected.results, expected.gradient(a, b)])


def test_losses_of_a_linear_layer(x64):
    names = ("x", "weight", "bias")

    def gradients_of(dlogits):
        return dlogits @ weight.T, x.T @ dlogits, dlogits.sum(0)

    given, (d,), (loss,), gradients = evaluated("linear_softmax_cross_entropy", _LINEAR)
    x, weight, bias = map(given.get, names)
    expected = loss_cases.CrossEntropy(x @ weight + bias, given["labels"])
    wanted = gradients_of(expected.gradient(np.full(ROWS, d / ROWS)))
    agree([loss, *map(gradients.get, names)], [expected.loss.mean(), *wanted])
    _, d, results, gradients = evaluated("linear_log_prob_and_entropy", _LINEAR)
    expected = log_prob_cases.LogProbs(x @ weight + bias, given["labels"])
    wanted = gradients_of(expected.gradient(*d))
    agree([*results, *map(gradients.get, names)], [*expected.results, *wanted])
