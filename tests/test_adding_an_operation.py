"""Adding an operation takes formulas and one entry in a table. Everything else is derived.

`added_operation` defines an operation. These tests add it to the tables, as CONTRIBUTING.md
describes, and run the tests of every operation on it.
"""

import dataclasses
import re
from pathlib import Path

import added_operation
import functions
import jax
import pytest
import test_batches
import test_eager
import test_every_derivative
import test_meshes
import test_programs
import test_remat
from programs import equations, names

import jaxnorm
from jaxnorm.primitives import remat
from jaxnorm.tools import references, selfcheck
from jaxnorm_kernels import xla
from jaxnorm_kernels.operations import FUNCTIONS, OPERATIONS

ROOT = Path(__file__).parent.parent
FACTOR = 0.7


@pytest.fixture
def added(monkeypatch):
    """Register the operation in all tables that CONTRIBUTING.md names."""
    monkeypatch.setitem(OPERATIONS, "norm_scaled", added_operation.OPERATION)
    monkeypatch.setitem(FUNCTIONS, "rms_norm_scaled", added_operation.FUNCTION)
    monkeypatch.setitem(xla.FORMULAS, "norm_scaled", added_operation.FORMULAS)
    monkeypatch.setattr(references, "norm_scaled", added_operation.reference, raising=False)
    function = added_operation.rms_norm_scaled
    monkeypatch.setattr(jaxnorm, "rms_norm_scaled", function, raising=False)
    monkeypatch.setitem(functions.FUNCTIONS, NAME, ENTRY)


NAME = "rms_norm_scaled"
ENTRY = functions.Function(
    lambda x, scale, **o: jaxnorm.rms_norm_scaled(x, scale, factor=FACTOR, **o),
    lambda x, scale: FACTOR * functions.rms_norm(x, scale),
    "x scale",
)


@pytest.mark.parametrize("dtype", selfcheck.DTYPES)
def test_values_and_gradients(added, dtype):
    """Values and gradients pass the self-check (`python -m jaxnorm --check`)."""
    (case,) = selfcheck.cases_of(NAME)
    outcome = selfcheck.check(dataclasses.replace(case, options={"factor": FACTOR}), dtype)
    assert outcome.is_right, outcome
    assert outcome.implementations == ("xla", "xla")


# Maps the name of a test to a function that runs this test on the operation that `added_operation`
# defines. The files in which the tests are defined run them on all existing operations.
SUITES = {
    "formula": lambda: test_programs.test_it_is_the_formula(NAME, None),
    "outside jit": lambda: test_programs.test_outside_jit(NAME),
    "symbolic rows": lambda: test_programs.test_export_with_symbolic_rows(NAME, "bfloat16"),
    "NaNs": lambda: test_eager.test_no_false_alarms_outside_of_jit(NAME),
    "vmap": lambda: test_batches.test_a_batch_is_a_loop(NAME, (0, None), compiled=True),
    "mesh": lambda: test_meshes.test_rows_on_a_mesh(NAME, "FSDP", "explicit", "xla"),
    "columns": lambda: test_meshes.test_rows_on_a_mesh(NAME, "columns", "explicit", "xla"),
}


@pytest.mark.usefixtures("added", "quick_to_compile")
@pytest.mark.parametrize("suite", SUITES)
def test_every_suite(suite):
    with jax.enable_x64(suite == "formula"):
        SUITES[suite]()


DERIVATIVES = test_every_derivative.DERIVATIVES | test_every_derivative.IN_STEPS


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives(added, x64, quick_to_compile, monkeypatch, derivative):
    monkeypatch.setitem(test_every_derivative.FUNCTIONS, NAME, ENTRY)
    test_every_derivative.check(NAME, DERIVATIVES[derivative], None, "xla")


@pytest.mark.remat
def test_rematerialisation(added, quick_to_compile, monkeypatch):
    counts = test_remat.saved(1, 0, 1)
    monkeypatch.setitem(functions.FUNCTIONS, NAME, ENTRY)
    monkeypatch.setitem(test_remat.SAVED, NAME, counts)
    test_remat.test_what_is_saved(NAME, "save_policy", counts["save_policy"])
    test_remat.test_what_runs_again(NAME)


def test_names(added):
    """All names of an operation are determined by its entry in the table `OPERATIONS`.

    These are the names of its primitives and its saved arrays, and its name in errors and plans.
    """
    operands = functions.operands_of(NAME)
    jaxpr = jax.make_jaxpr(jax.grad(functions.scalar(ENTRY.ours), (0, 1)))(*operands)
    passes = [e.primitive.name for e in equations(jaxpr) if "jaxnorm." in e.primitive.name]
    assert passes == ["jaxnorm.rms_norm_scaled", "jaxnorm.rms_norm_scaled_backward"]
    assert {*names(jaxpr)} == {"jaxnorm_out", "jaxnorm_rstd"}
    with pytest.raises(ValueError, match=r"^rms_norm_scaled: scale has shape \(4,\)"):
        jaxnorm.rms_norm_scaled(operands[0], operands[1][:4])
    plan = jaxnorm.implementation_for(
        "rms_norm_scaled", (4096, 4096), "bfloat16", platform="cuda", factor=FACTOR
    )
    for choice in (plan.forward, plan.backward):
        assert choice.name == "xla"
        assert "mosaic: there is no kernel for this operation yet" in choice.reason
    with pytest.raises(ValueError, match=r"^rms_norm_scaled: .*there is no kernel for this"):
        jaxnorm.rms_norm_scaled(*operands, implementation="mosaic")


# ------------------------------------------------------------- what CONTRIBUTING.md and the docs
# say


def section(page, title):
    """Return the text of a section of CONTRIBUTING.md, or of a page of docs/."""
    return (ROOT / page).read_text().partition(f"# {title}\n")[2].partition("\n#")[0]


def files_in(text):
    """Yield the project's files that a text names."""
    for name in re.findall(r"`([\w/]+\.(?:py|md|json))`", text):
        path = next(
            (p for p in (ROOT / name, ROOT / "kernels/jaxnorm_kernels" / name) if p.exists()), None
        )
        assert path is not None, f"CONTRIBUTING.md names {name}, which there is not"
        yield str(path.relative_to(ROOT))


def test_the_list_of_files_is_that_of_the_operations_that_there_are():
    """CONTRIBUTING.md lists the files that mention an operation with a residual, and no others."""
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
    assert len(sources) <= 12


def test_every_operation_has_formulas_and_a_reference():
    operations = {op for function in FUNCTIONS.values() for op in function.ops}
    assert {*xla.FORMULAS} == {*OPERATIONS} == operations
    for name, formulas in xla.FORMULAS.items():
        is_another_s = OPERATIONS[name].derivative is not None
        assert (formulas.backward is None) == is_another_s
    assert all(callable(getattr(references, function.op)) for function in FUNCTIONS.values())
    assert {case.function for case in selfcheck.CASES} >= {*FUNCTIONS}
    assert {*FUNCTIONS} <= {*jaxnorm.__all__}


def test_the_docs_have_the_names_of_the_table():
    """The docs list the names of all residuals, and say which of them the policy saves."""
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
    assert [name for name in sorted(kept) if kept[name]] == remat._SAVED_NAMES


def test_the_docs_say_what_the_table_s_entries_keep():
    lines = (ROOT / "docs/memory.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:3] == "| `"]
    # The page has two tables. The table of functions with `save=` has a column for save="output"
    # and a column for save="input". The table of functions without `save=` has one column instead.
    # In both tables, the last column is about plain JAX and is not tested.
    said = {name: kept for names, *kept, _ in rows for name in re.findall(r"`(\w+)`", names)}
    for name, function in FUNCTIONS.items():
        operation = OPERATIONS[function.op]
        x = ("x and ",) * operation.starts_from_x
        logits = {"x": "the logits"} if operation.family == "loss" else {}
        of_output, of_input = ("".join([*x, logits.get(a, a)]) for a in operation.saves)
        from_output, *from_input = said[name]
        assert re.match(rf"{of_output}\b", from_output), name
        assert from_input or of_input == of_output, name
        for kept in from_input:
            assert re.match(rf"{of_input}\b", kept), name
