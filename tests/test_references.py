"""The float64 references are correct, and independent of the code that they check.

There are two sets of references. `jaxnorm.tools.references` belongs to the package, because the
self-check uses it on a user's machine. The tests have their own references, with more options and
tighter bounds. This file compares both sets with formulas in jnp, which JAX differentiates in
float64. It also tests that the package's references do not import the code that they check.
"""

import ast
import functools
from pathlib import Path

import functions
import jax
import jax.numpy as jnp
import linear_loss_cases
import log_prob_cases
import loss_cases
import numpy as np
import pytest
import reference
from functions import divergences, of_candidates

from jaxnorm.tools import references, running_error
from jaxnorm.tools.running_error import Bounded
from jaxnorm_kernels.operations import OPERATIONS

ROWS, COLS, FEATURES = 6, 40, 24
X, PARAMETER, LABELS = (ROWS, COLS), (COLS,), (ROWS,)


@pytest.mark.parametrize("module", [references, running_error], ids=lambda m: m.__name__)
def test_they_share_nothing_with_what_they_check(module):
    """The references import only NumPy and each other."""
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [f"{node.module}.{alias.name}" for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    ours = {name for name in imported if name.startswith("jaxnorm")}
    assert all(name.startswith("jaxnorm.tools.running_error") for name in ours)
    others = {name.partition(".")[0] for name in imported - ours}
    assert others <= {"collections", "dataclasses", "math", "numpy", "typing"}


# ----------------------------------------------------------------------- the functions in jnp


def softmax(x, bias=0.0, where=True, *, scale=1.0, causal=False, log=False):
    kept = where & jnp.tri(*x.shape, dtype=bool) if causal else jnp.broadcast_to(where, x.shape)
    z = jnp.where(kept, scale * x + bias, -jnp.inf)
    return (jax.nn.log_softmax if log else jax.nn.softmax)(z)


def norm(x, scale, bias=None, *, activation=None):
    centred = x if bias is None else x - x.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale
    y = y if bias is None else y + bias
    return y if activation is None else getattr(jax.nn, activation)(y)


def add_norm(x, residual, scale, bias=None, gate=1.0):
    h = residual + gate * x
    return norm(h, scale, bias), h


def gated(x, gate, scale, norm_before_gate):
    return functions.gated(x, gate, scale, norm_before_gate)


cross_entropy = functools.partial(functions.losses, counts=1.0)
log_prob_and_entropy = functools.partial(functions.log_prob_and_entropy, counts=1.0)


def of_layer(function):
    """Return a function that computes logits by a linear layer and applies `function` to them."""
    return lambda x, weight, bias, labels: function(x @ weight + bias, labels)


_NORMS = [{"scale": PARAMETER}, {"scale": PARAMETER, "bias": PARAMETER}]
_LINEAR = {"x": X, "weight": (COLS, COLS), "bias": PARAMETER, "labels": LABELS}
_SUM = {"x": X, "residual": X}
_ROTATIONS = [{"cos": (ROWS, n // 2), "sin": (ROWS, n // 2)} for n in (COLS, COLS // 2)]

#: For each reference: its name, its formula in jnp, the shapes of operands, and options.
CASES = [
    *(
        (name, functools.partial(softmax, log=name == "log_softmax"), {"x": X, **others}, options)
        for name in ("softmax", "log_softmax")
        for options in ({}, {"scale": 0.7}, {"causal": True})
        for others in ({}, {"where": X, "bias": X})
    ),
    *(
        ("norm", norm, {"x": X, **parameters}, options)
        for parameters in _NORMS
        for options in ({}, {"activation": "silu"})
    ),
    *(("add_norm", add_norm, {**_SUM, **parameters}, {}) for parameters in _NORMS),
    *(
        ("scaled_add_norm", add_norm, {**_SUM, **parameters, "gate": PARAMETER}, {})
        for parameters in _NORMS
    ),
    ("norm_add", lambda x, residual, scale: residual + norm(x, scale), {**_SUM, **_NORMS[0]}, {}),
    ("norm_add_norm", functions.two_norms, {**_SUM, **_NORMS[0], "next_scale": PARAMETER}, {}),
    *(
        (
            "norm_rope",
            functions.rope,
            {"x": X, "scale": PARAMETER, **tables},
            {"interleaved": interleaved},
        )
        for tables in _ROTATIONS
        for interleaved in (False, True)
    ),
    *(
        ("norm_gated", gated, {"x": X, "gate": X, "scale": PARAMETER}, {"norm_before_gate": before})
        for before in (True, False)
    ),
    (
        "norm_linear",
        lambda x, scale, weight, bias: norm(x, scale) @ weight + bias,
        {"x": X, "scale": PARAMETER, "weight": (COLS, FEATURES), "bias": (FEATURES,)},
        {},
    ),
    ("cross_entropy", cross_entropy, {"logits": X, "labels": LABELS}, {}),
    ("log_prob_and_entropy", log_prob_and_entropy, {"logits": X, "labels": LABELS}, {}),
    *(
        ("kl_divergence", divergences, {"logits": X, "teacher_logits": X}, {"reverse": reverse})
        for reverse in (False, True)
    ),
    (
        "log_probs_and_entropy",
        lambda logits, labels: of_candidates(logits, labels, jnp.ones(labels.shape[:-1])),
        {"logits": X, "labels": (*LABELS, 3)},
        {},
    ),
    (
        "linear_kl_divergence",
        lambda x, weight, bias, teacher_x, teacher_weight: divergences(
            x @ weight + bias, teacher_x @ teacher_weight
        ).mean(),
        {
            **{name: shape for name, shape in _LINEAR.items() if name != "labels"},
            "teacher_x": _LINEAR["x"],
            "teacher_weight": _LINEAR["weight"],
        },
        {},
    ),
    (
        "linear_cross_entropy",
        of_layer(lambda *operands: cross_entropy(*operands).mean()),
        _LINEAR,
        {},
    ),
    ("linear_log_prob_and_entropy", of_layer(log_prob_and_entropy), _LINEAR, {}),
]


def evaluated(name, shapes, types, **options):
    """Call the function `name` of the module `references`, which also computes error bounds.

    Return its operands, the cotangents of its results, its results, and its gradients. The error
    bounds are left out.
    """
    given = references.operands(shapes, COLS, seed=0)
    along = references.operands({str(i): shape for i, shape in enumerate(types)}, 0, seed=1)
    results, gradients = getattr(references, name)(
        {n: Bounded.exact(a) if a.dtype == np.float64 else a for n, a in given.items()},
        [Bounded.exact(d) for d in along.values()],
        "float32",
        **options,
    )
    values = {name: gradient.value for name, gradient in gradients.items()}
    return given, [*along.values()], [result.value for result in results], values


def agree(ours, theirs):
    """Assert that values are equal up to float64's rounding errors.

    The bound is that of eight successive sums of COLS terms each.
    """
    for a, b in zip(ours, theirs, strict=True):
        b = np.asarray(b)
        infinite = np.isinf(b)
        size = np.max(np.abs(b[~infinite]))
        roundings = 8 * reference.SAFETY * COLS * reference.unit_roundoff("float64")
        reference.assert_within(np.reshape(a, b.shape), b, roundings * size)


@pytest.mark.parametrize(
    ("name", "plain", "shapes", "options"),
    CASES,
    ids=lambda a: a if isinstance(a, str) else "-".join(map(str, a)) if isinstance(a, dict) else "",
)
def test_results_and_gradients(name, plain, shapes, options, x64):
    function = functools.partial(plain, **options)
    operands = references.operands(shapes, COLS, seed=0)
    types = jax.tree.leaves(jax.eval_shape(lambda: function(**operands)))
    given, along, results, gradients = evaluated(name, shapes, [t.shape for t in types], **options)
    constants = {n: a for n, a in given.items() if n not in gradients}
    arrays = {n: jnp.asarray(given[n]) for n in gradients}
    expected, pullback = jax.vjp(lambda arrays: function(**arrays, **constants), arrays)
    # For a masked entry, the logarithm is -inf and its cotangent is ignored.
    expected, tree = jax.tree.flatten(expected)
    along = [np.where(np.isinf(y), 0, d) for y, d in zip(expected, along, strict=True)]
    (wanted,) = pullback(jax.tree.unflatten(tree, map(jnp.asarray, along)))
    agree(results, expected)
    agree(gradients.values(), [wanted[name] for name in gradients])


def test_every_reference_has_a_case():
    assert {name for name, *_ in CASES} >= {*OPERATIONS}


# ------------------------------------------- the losses of the tests' references, with all options


def test_losses_of_the_tests():
    given, (d,), (loss,), gradients = evaluated(
        "cross_entropy", {"logits": X, "labels": LABELS}, [LABELS]
    )
    expected = loss_cases.CrossEntropy(given["logits"], given["labels"])
    agree([loss, gradients["logits"]], [expected.loss, expected.gradient(d)])
    given, (a, b), results, gradients = evaluated(
        "log_prob_and_entropy", {"logits": X, "labels": LABELS}, [LABELS] * 2
    )
    expected = log_prob_cases.LogProbs(given["logits"], given["labels"])
    agree([*results, gradients["logits"]], [*expected.results, expected.gradient(a, b)])


def test_losses_of_a_linear_layer_of_the_tests():
    names = ("x", "weight", "bias")
    given, (d,), (loss,), gradients = evaluated("linear_cross_entropy", _LINEAR, [()])
    expected = linear_loss_cases.Linear(*map(given.get, (*names, "labels")))
    wanted = [value for value, _ in expected.gradients(np.full(ROWS, d / ROWS))]
    agree([loss, *map(gradients.get, names)], [expected.losses.mean(), *wanted])
    given, d, results, gradients = evaluated("linear_log_prob_and_entropy", _LINEAR, [LABELS] * 2)
    expected = log_prob_cases.Linear(*map(given.get, (*names, "labels")))
    wanted = [value for value, _ in expected.gradients(*d)]
    agree([*results, *map(gradients.get, names)], [*expected.results, *wanted])
