"""No test has a number as its tolerance: `reference` and `program_error` compute all bounds."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_error import analyse, assert_computes

import jaxnorm

TESTS = Path(__file__).parent
TOLERANCES = {"rtol", "atol", "rel", "abs", "tolerance"}

#: Files whose tolerances do not bound rounding errors. Each value says what the tolerances bound.
EXCEPTIONS = {
    "advice_cases.py": "advice promises its bytes to within 10 %",
    "test_memory_report.py": "advice promises its bytes to within 10 %; JAX prints rounded sizes",
    "test_memory_report_meshes.py": "a device has its part, but for small arrays",
    "test_multigpu.py": "the final losses of two trainings, which drift apart",
}


def literal_tolerances(path):
    """Return the lines of a file in which a tolerance is a literal number other than 0."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            given = [(k.arg, k.value) for k in node.keywords]
            if "assert" in ast.unparse(node.func):
                given += [("tolerance", a) for a in node.args[2:] if isinstance(a, ast.Constant)]
        elif isinstance(node, ast.FunctionDef):
            named = reversed(node.args.args)
            given = [(a.arg, value) for a, value in zip(named, reversed(node.args.defaults))]
        else:
            continue
        for name, value in given:
            constants = [c.value for c in ast.walk(value) if isinstance(c, ast.Constant)]
            if name in TOLERANCES and any(isinstance(c, (int, float)) and c for c in constants):
                lines.append(value.lineno)
    return sorted(lines)


def test_no_tolerance_is_a_literal():
    found = {
        path.name: lines
        for path in sorted(TESTS.rglob("*.py"))
        if (lines := literal_tolerances(path))
    }
    new = {name: lines for name, lines in found.items() if name not in EXCEPTIONS}
    assert not new, f"derive these bounds, as program_error.assert_computes does: {new}"
    assert found.keys() == EXCEPTIONS.keys(), "an exception that is no longer needed"


def test_a_literal_is_found(tmp_path):
    path = tmp_path / "test_literal.py"
    path.write_text(
        "f(a, rtol=1e-6)\nf(a, rtol=0, atol=2**-7 * n)\nf(a, rtol=u)\ndef f(tolerance=1): 0"
    )
    assert literal_tolerances(path) == [1, 2, 4]


# ------------------------------------------------------------------------- tests of `program_error`


def program(x, scale):
    def loss(x, scale):
        return jnp.sum(jnp.sin(jax.nn.silu(jaxnorm.layer_norm(x, scale))))

    return jaxnorm.softmax(x), jax.value_and_grad(loss, (0, 1))(x, scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bound_holds_and_is_near(dtype):
    """The computed bounds accept the results, and they are tight.

    The test adds a small number to all elements of a result: 100 epsilons (bfloat16) or 1000
    epsilons (float32), times the largest magnitude. The bounds reject this result.
    """
    rng = np.random.default_rng(0)
    x, scale = (jnp.asarray(rng.normal(size=s), dtype) for s in ((8, 32), (32,)))
    results = jax.jit(program)(x, scale)
    assert_computes(results, program, x, scale)
    change = {"float32": 1000, "bfloat16": 100}[dtype] * float(jnp.finfo(dtype).eps)
    for i, leaf in enumerate(jax.tree.leaves(results)):
        leaves, tree = jax.tree.flatten(results)
        leaves[i] = (leaf + change * jnp.max(jnp.abs(leaf))).astype(dtype)
        with pytest.raises(AssertionError, match="out of bounds"):
            assert_computes(tree.unflatten(leaves), program, x, scale)


def test_float64_is_the_value(x64):
    """In float64, results are within the much smaller bounds of float64."""
    rng = np.random.default_rng(1)
    x, scale = (jnp.asarray(rng.normal(size=s)) for s in ((8, 32), (32,)))
    assert_computes(jax.jit(program)(x, scale), program, x, scale)


def loops(x):
    def body(carry, row):
        return carry + jnp.exp(row) * jnp.cumsum(row), jax.lax.rsqrt(1 + row**2)

    carry, rows = jax.lax.scan(body, jnp.zeros(x.shape[1:]), x, reverse=True)
    twice = jax.lax.fori_loop(0, 2, lambda i, a: jnp.tanh(a) + x[i], carry)
    chosen = jax.lax.cond(jnp.any(twice > 0), jnp.flip, jnp.negative, twice)
    return chosen, rows.at[1].add(carry), jnp.pad(rows, 1), x[jnp.array([2, 0])]


def test_control_flow():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 6)), jnp.float32)
    assert_computes(jax.jit(loops)(x), loops, x)


def test_errors_that_change_a_comparison():
    """The bound covers both cases of a choice if, and only if, rounding may change the choice.

    ``x - (x + t)`` is -t in exact arithmetic, but rounds to 0 in float32 if t is small. Masked
    elements are exact zeros, for which the comparison is certain.
    """

    def step(x, t, mask):
        rounded = jnp.where(mask, x - (x + t), 0)
        return jnp.where((rounded >= 0) & mask, 1.0, -1.0)

    x, t = jnp.ones(3, jnp.float32), jnp.asarray([2.0**-30, 2.0**-30, 0.5], jnp.float32)
    mask = jnp.asarray([True, False, True])
    result = analyse(step, x, t, mask)
    np.testing.assert_array_equal(result.value, -1)
    np.testing.assert_array_equal(result.error, [2, 0, 0])
    assert_computes(jax.jit(step)(x, t, mask), step, x, t, mask)


def test_an_unknown_equation_is_named():
    with pytest.raises(NotImplementedError, match="no rule for lgamma"):
        analyse(jax.lax.lgamma, jnp.ones(2))


def test_what_float32_does_not_hold_is_infinite():
    x = jnp.array([3e38, 1.0], jnp.float32)
    assert_computes(x * 2, lambda x: x * 2, x)
