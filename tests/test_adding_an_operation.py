"""An operation is data and formulas: all else that a user meets is derived from them.

`added_operation` has one; here it is added to the table, as CONTRIBUTING.md says, and put through
what every operation goes through.
"""

import dataclasses
import io
import itertools
import re
import tokenize
from pathlib import Path

import added_operation
import jax
import jax.numpy as jnp
import numpy as np
import parts
import pytest
from jax.sharding import PartitionSpec as P
from meshes import KINDS, Case, collectives, on_mesh
from program_error import assert_computes

import jaxnorm
from jaxnorm.operations import norm
from jaxnorm.primitives import remat
from jaxnorm.tools import references, selfcheck
from jaxnorm_kernels import xla
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS

ROOT = Path(__file__).parent.parent
FACTOR = 0.7
X = np.random.default_rng(0).normal(size=(8, 16, 48))
SCALE = np.random.default_rng(1).uniform(0.5, 2, size=48)


@pytest.fixture
def added(monkeypatch):
    """The operation, in the places that CONTRIBUTING.md names."""
    monkeypatch.setitem(OPERATIONS, "norm_scaled", added_operation.OPERATION)
    monkeypatch.setitem(FUNCTIONS, "rms_norm_scaled", added_operation.FUNCTION)
    monkeypatch.setitem(xla.FORMULAS, "norm_scaled", added_operation.FORMULAS)
    monkeypatch.setattr(norm, "NormOptions", added_operation.OptionsWithFactor)
    monkeypatch.setattr(references, "norm_scaled", added_operation.reference, raising=False)
    function = added_operation.rms_norm_scaled
    monkeypatch.setattr(jaxnorm, "rms_norm_scaled", function, raising=False)


def test_it_is_short():
    text = Path(added_operation.__file__).read_text()
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in nothing and not token.string.startswith('"""')
    ]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    assert len(lines) < 60


def ours(x, scale):
    return jaxnorm.rms_norm_scaled(x, scale, factor=FACTOR)


def plain(x, scale):
    return FACTOR * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


@pytest.mark.parametrize("dtype", selfcheck.DTYPES)
def test_values_and_gradients(added, dtype):
    """By the case that the self-check makes of the table's entry, with its bounds."""
    (case,) = selfcheck.cases_of("rms_norm_scaled")
    outcome = selfcheck.check(dataclasses.replace(case, options={"factor": FACTOR}), dtype)
    assert outcome.is_right, outcome
    assert outcome.implementations == ("xla", "xla")


@pytest.mark.parametrize("dtype", selfcheck.DTYPES)
def test_values_and_gradients_of_parts(added, dtype):
    """All operands and cotangents are slices, and all results are written into larger arrays."""
    (case,) = selfcheck.cases_of("rms_norm_scaled")
    case = dataclasses.replace(case, options={"factor": FACTOR})
    outcome = selfcheck.check(case, dtype, parts.of_parts, parts.read)
    assert outcome.is_right, outcome


def loss_of(function):
    return lambda *operands: jnp.sum(jnp.sin(3 * function(*operands)))


def gradients(function):
    return jax.grad(loss_of(function), (0, 1))


def tangent(function):
    return lambda *operands: jax.jvp(function, operands, tuple(map(jnp.cos, operands)))


def checkpointed(function):
    return jax.checkpoint(function, policy=jaxnorm.save_policy)


# Of a function of (8, 16, 48) and (48,).
TRANSFORMED = {
    "value": lambda f: f,
    "gradients": gradients,
    "forward mode": tangent,
    "outside jit": gradients,
    "checkpoint": lambda f: gradients(checkpointed(f)),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
    "forward over reverse": lambda f: tangent(gradients(f)),
    "reverse over reverse": lambda f: gradients(lambda *a: sum(map(jnp.sum, gradients(f)(*a)))),
    "reverse over forward": lambda f: gradients(lambda *a: tangent(f)(*a)[1]),
    "vmap of rows": lambda f: jax.vmap(gradients(f), (0, None)),
    "vmap of both": lambda f: lambda x, scale: jax.vmap(gradients(f))(x, scale * x[:, 0]),
    "vmap of parameters": lambda f: (
        lambda x, scale: jax.vmap(tangent(f), (None, 0))(x, scale * x[0])
    ),
    "gradient of vmap": lambda f: gradients(jax.vmap(f, (1, None), out_axes=1)),
}


@pytest.mark.remat
@pytest.mark.parametrize("name", TRANSFORMED)
def test_every_transformation(added, x64, quick_to_compile, name):
    """In float64, where a wrong formula is far off."""
    runs = map(TRANSFORMED[name], (ours, plain))
    if name != "outside jit":
        runs = map(jax.jit, runs)
    operands = jnp.asarray(X), jnp.asarray(SCALE)
    run, expected = runs
    results = run(*operands)
    assert {a.dtype for a in jax.tree.leaves(results)} == {np.dtype("float64")}
    assert_computes(results, expected, *operands, like=run)


def test_over_other_axes(added, x64):
    operands = jnp.asarray(X), jnp.asarray(SCALE[:16])
    y = jaxnorm.rms_norm_scaled(*operands, factor=FACTOR, axis=1)
    assert_computes(y, lambda x, s: plain(x.swapaxes(1, 2), s).swapaxes(1, 2), *operands)


CASES = [Case("rows", {"a": 4, "b": 2}, P("a", "b")), Case("columns", {"a": 8}, P(None, None, "a"))]


# Inside `jax.shard_map` a shard of columns is a row of its own.
@pytest.mark.parametrize(
    ("case", "kind"),
    [*itertools.product(CASES[:1], KINDS), (CASES[1], "auto"), (CASES[1], "explicit")],
    ids=lambda a: getattr(a, "name", a),
)
def test_on_a_mesh(added, x64, case, kind):
    """Eight devices: rows and columns stay where they are; sums and the parameter travel."""

    def run(d, x, scale):
        y, pullback = jax.vjp(ours, x, scale)
        return y, *pullback(d)

    operands = jnp.asarray(np.sin(X)), jnp.asarray(X), jnp.asarray(SCALE)
    compiled, sharded = on_mesh(run, operands, case, kind)
    results = compiled(*sharded)
    assert_computes(results, run, *operands)
    for a in results[:2]:
        assert a.sharding.is_equivalent_to(sharded[1].sharding, a.ndim)
    found = collectives(compiled)
    assert {*found} <= {"all-reduce", "all-gather"}
    assert {*found.get("all-gather", [])} <= {"48"}  # The gradient of scale, which is whole.


def test_names(added):
    """Its primitives', what is kept by, and what an error and a plan say."""
    operands = jnp.asarray(X, jnp.float32), jnp.asarray(SCALE, jnp.float32)
    program = str(jax.make_jaxpr(gradients(checkpointed(ours)))(*operands))
    assert program.count("jaxnorm.rms_norm_scaled[") == 1  # The backward makes no norm again.
    assert program.count("jaxnorm.rms_norm_scaled_backward[") == 1
    assert set(re.findall(r"\[name=(jaxnorm_\w+)", program)) == {"jaxnorm_out", "jaxnorm_rstd"}
    with pytest.raises(ValueError, match=r"^rms_norm_scaled: scale has shape \(4,\)"):
        jaxnorm.rms_norm_scaled(operands[0], operands[1][:4])
    plan = jaxnorm.implementation_for(
        "rms_norm_scaled", (4096, 4096), "bfloat16", platform="cuda", factor=FACTOR
    )
    for choice in (plan.forward, plan.backward):
        assert choice.name == "xla"
        assert "mosaic: there is no kernel of this operation yet" in choice.reason
    with pytest.raises(ValueError, match=r"^rms_norm_scaled: .*there is no kernel of this"):
        jaxnorm.rms_norm_scaled(*operands, implementation="mosaic")


# ----------------------------------------------------------------------------- what is written


def section(page, title):
    """Of CONTRIBUTING.md, or of a page of docs/."""
    return (ROOT / page).read_text().partition(f"# {title}\n")[2].partition("\n#")[0]


def files_in(text):
    """Files that a text names: of the project, or of the kernels'."""
    for name in re.findall(r"`([\w/]+\.(?:py|md|json))`", text):
        path = next(
            (p for p in (ROOT / name, ROOT / "kernels/jaxnorm_kernels" / name) if p.exists()), None
        )
        assert path is not None, f"CONTRIBUTING.md names {name}, which there is not"
        yield str(path.relative_to(ROOT))


def test_the_list_of_files_is_that_of_the_operations_that_there_are():
    """Those where a name of an operation with a residual occurs, and no others."""
    text = section("CONTRIBUTING.md", "Adding an operation")
    always, _, others = text.partition("\nOnly where")
    sources = {name for name in files_in(always) if name.startswith(("jaxnorm/", "kernels/"))}
    operations = ("add_norm", "norm_add", "norm_add_norm")
    functions = [name for name, function in FUNCTIONS.items() if function.op in operations[1:]]
    words = re.compile(rf"\b(?:{'|'.join((*operations, *functions))})\b")
    needed, _, last = others.partition("\nIts tests")
    for name in (*files_in(needed), *files_in(last)):
        assert name not in sources
    for name in files_in(last):
        assert words.search((ROOT / name).read_text()), name
    found = {
        str(path.relative_to(ROOT))
        for folder in ("jaxnorm", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if words.search(path.read_text())
    }
    assert found == sources
    assert len(sources) <= 15


def test_every_operation_has_formulas_and_a_reference():
    operations = {op for function in FUNCTIONS.values() for op in function.ops}
    assert {*xla.FORMULAS} == {*OPERATIONS} == operations
    for name, formulas in xla.FORMULAS.items():
        is_another_s = OPERATIONS[name].derivative is not None
        assert (formulas.backward is None) == is_another_s
        assert callable(getattr(references, name))
    assert {case.function for case in selfcheck.CASES} >= {*FUNCTIONS}
    assert {*FUNCTIONS} <= {*jaxnorm.__all__}


def test_the_docs_have_the_names_of_the_table():
    """Names for policies of `jax.checkpoint`, and whether the library's keeps them."""
    text = section("docs/transformations.md", "Rematerialisation")
    rows = re.findall(r"^\| `(jaxnorm_\w+)` \| (.*) \| (yes|no) \|$", text, re.MULTILINE)
    kept = {name: is_kept == "yes" for name, _, is_kept in rows}
    named = {
        name
        for operation in OPERATIONS.values()
        for name in (operation.out_name, operation.statistics_name)
        if name is not None
    }
    composed = {name for name, of, _ in rows if re.match(r"`\w*linear", of)}
    assert {*kept} == named | composed
    assert [name for name in sorted(kept) if kept[name]] == remat._KEPT


def test_the_docs_say_what_the_table_s_entries_keep():
    lines = (ROOT / "docs/memory.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if line[:3] == "| `"]
    said = {name: kept for names, *kept in rows for name in re.findall(r"`(\w+)`", names)}
    for name, function in FUNCTIONS.items():
        operation = OPERATIONS[function.op]
        x = ("x and ",) * operation.starts_from_x
        logits = {"x": "the logits"} if operation.family == "loss" else {}
        of_output, of_input = ("".join([*x, logits.get(a, a)]) for a in operation.saves)
        from_output, from_input = said[name]
        assert re.match(rf"{of_output}\b", from_output), name
        if of_input == of_output:
            assert from_input in ("", "the same"), name
        else:
            assert re.match(rf"{of_input}\b", from_input), name
