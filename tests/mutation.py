"""Run tests against mutants: copies of the project in which one formula or rule is wrong.

    python tests/mutation.py --list
    python tests/mutation.py --mutants 0-14 --results build/mutants.jsonl
    python tests/mutation.py --mutants 3,7 --tests tests/test_norm.py tests/test_every_derivative.py

The 80 mutants are drawn with a fixed seed from the formulas and rules of XLA's code, the
primitives, Mosaic, Triton, `auto_remat` and the linear losses. A mutant is killed if a test fails,
and survives if all pass. It is equivalent, and not run, if it only turns off a check of lengths or
of assignments (`strict=True`, `frozen=True`). Each run stops at the first failure. Without
``--tests``, `COVERING` names the tests of the mutated file.
Kernels run in interpreters here. Triton's kernels need Triton: set ``--python`` to the path of a
Python that can import Triton. The tests that compile them run after those that interpret them.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SEED, LIMIT = 20, 600
#: Maps the files of an area of the code to the number of mutants in it.
AREAS = {
    "kernels/jaxnorm_kernels/xla/**/*.py": 18,
    "jaxnorm/primitives/**/*.py": 15,
    "kernels/jaxnorm_kernels/mosaic/**/*.py": 15,
    "kernels/jaxnorm_kernels/triton/**/*.py": 12,
    "jaxnorm/remat/*.py": 12,
    "jaxnorm/operations/linear_loss*.py": 8,
}
#: Maps a part of a file's path to the names of test files, separated by spaces. For a mutated file,
#: the first key that its path contains determines which test files run.
COVERING = {
    "xla/norm_rope": "test_norm_rope* test_every_derivative test_parts",
    "xla/softmax": "test_softmax test_logits test_every_derivative test_masked_derivatives",
    "xla/logits": "test_logits test_masked_derivatives test_loss test_linear_loss",
    "xla/log_prob": "test_loss test_linear_loss test_every_derivative",
    "xla/label_sums": "test_loss test_loss_*",
    "xla/cross_entropy": "test_loss test_loss_* test_linear_loss test_every_derivative",
    "xla/kl_divergence": "test_kl_divergence test_every_derivative",
    "xla/formulas": "test_split_masks test_every_derivative test_meshes",
    "xla/reductions": "test_implementation test_norm",
    "xla/": "test_norm test_scaled_sum test_every_derivative",
    "primitives/mistakes": "test_arguments test_errors",
    "primitives/eager": "test_eager test_every_function test_cache_keys",
    "jaxnorm/remat/": "test_auto_remat test_remat_plan test_fit_memory test_remat_*",
    "operations/linear_loss": "test_linear_loss* test_any_linear_loss test_linear_meshes",
    "primitives/remat": "test_remat test_programs",
    "primitives/recomputation": (
        "test_gated_linear_programs test_gated_linear test_norm_linear* test_linear_loss*"
    ),
    "primitives/row_operations": (
        "mosaic/test_losses_mosaic test_implementation test_primitive test_residual_programs "
        "test_set_mesh test_batches test_programs test_meshes"
    ),
    "primitives/": (
        "test_implementation test_set_mesh test_batches test_every_function "
        "test_every_derivative test_programs test_meshes"
    ),
    "mosaic/cross_entropy": "mosaic/test_losses_mosaic mosaic/test_divergence",
    "mosaic/linear": "mosaic/test_product mosaic/test_linear_products",
    "mosaic/softmax": "mosaic/test_interpret mosaic/test_placed",
    "mosaic/norm/rope": "mosaic/test_rope",
    "mosaic/norm/": "mosaic/test_interpret mosaic/test_group_norm mosaic/test_rope",
    "mosaic/": "mosaic/test_interpret mosaic/test_*",
    "triton/norm": "triton/test_norms triton/test_schedules",
    "triton/": "triton/test_*",
}
_PAIRS = [
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)),
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.And, ast.Or)),
]
_OPPOSITES = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}}
#: Maps pytest's exit status to what happened to the mutant.
OUTCOMES = {0: "survived", 1: "killed"}
_FUNCTIONS = {"sum": "mean", "mean": "sum", "max": "min", "min": "max", "maximum": "minimum"}
_FUNCTIONS |= {"exp": "expm1", "log1p": "log", "sqrt": "rsqrt", "rsqrt": "sqrt", "any": "all"}


class Mutant(NamedTuple):
    """A mutated file: the text `code` is replaced by the text `instead`.

    `span` is a pair of indices into the file's text: the start and the end of `code`.
    """

    file: str
    line: int
    span: tuple[int, int]
    code: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}  ->  {self.instead}"


def mutations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield variants of a node.

    In a variant, an operator, a comparison, a constant or a sign is replaced by another one, or a
    sum lacks one of its terms.
    """
    changed = copy.deepcopy(node)
    match changed:
        case ast.BinOp(op=operator):
            if type(operator) in (ast.Add, ast.Sub):
                yield changed.left
            if type(operator) in _OPPOSITES:
                changed.op = _OPPOSITES[type(operator)]()
                yield changed
        case ast.Compare(ops=[operator]) if type(operator) in _OPPOSITES:
            changed.ops = [_OPPOSITES[type(operator)]()]
            yield changed
        case ast.BoolOp(op=operator):
            changed.op = _OPPOSITES[type(operator)]()
            yield changed
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield changed.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not changed.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(changed.value * 2 if changed.value else 1)
        case ast.Attribute(attr=name) if name in _FUNCTIONS:
            changed.attr = _FUNCTIONS[name]
            yield changed


def _formulas(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions in functions, except annotations, decorators and error messages."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                yield from _formulas(statement)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _formulas(node.value)
        elif not isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign):
            if isinstance(node, ast.expr):
                yield node
            yield from _formulas(node)


def _mutants_of(path: Path) -> list[Mutant]:
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _formulas(ast.parse(text)):
        span = (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1])
        span = (span[0], span[1] + node.end_col_offset)
        for changed in mutations(node):
            instead = f"({ast.unparse(changed)})"
            name = str(path.relative_to(ROOT))
            found.append(Mutant(name, node.lineno, span, text[slice(*span)], instead))
    return found


def mutants(seed: int = SEED) -> list[Mutant]:
    """Draw a fixed number of mutants from each area.

    First a file is drawn, with equal chances, and then a mutant in it.
    """
    rng = random.Random(seed)
    chosen: list[Mutant] = []
    for area, count in AREAS.items():
        files = [_mutants_of(path) for path in sorted(ROOT.glob(area))]
        files = [found for found in files if found]
        of_area: list[Mutant] = []
        while len(of_area) < count:
            mutant = rng.choice(rng.choice(files))
            if mutant not in of_area:
                of_area.append(mutant)
        chosen += of_area
    return chosen


def tests_of(mutant: Mutant) -> list[str]:
    """Return the existing test files of the mutated file, in the order of `COVERING`."""
    (names, *_) = [names.split() for part, names in COVERING.items() if part in mutant.file]
    files = [path for name in names for path in sorted((ROOT / "tests").glob(f"{name}.py"))]
    return [str(path.relative_to(ROOT)) for path in dict.fromkeys(files)]


def is_equivalent(mutant: Mutant) -> bool:
    """Return True if the mutant only turns off a check that never fails.

    These are ``strict=True`` of a `zip`, because lengths are equal in every call, and
    ``frozen=True`` of a dataclass.
    """
    before = (ROOT / mutant.file).read_text()[: mutant.span[0]]
    return before.endswith(("strict=", "frozen="))


def run(mutant: Mutant | None, tests: list[str], args: argparse.Namespace) -> dict[str, object]:
    """Run tests in a copy of the project.

    The copy contains the mutant. If `mutant` is None, the copy is unchanged.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("jaxnorm", "kernels", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, Path(folder, name))
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        if mutant is not None:
            path = Path(folder, mutant.file)
            text = path.read_text()
            path.write_text(text[: mutant.span[0]] + mutant.instead + text[mutant.span[1] :])
        environment = os.environ | {"PYTHONPATH": f"{folder}:{folder}/kernels"}
        environment |= {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [args.python, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        command += ["--every", str(args.every)] if args.every > 1 else []
        command += ["-k", args.match] if args.match else []
        start, output, outcome = time.monotonic(), "", "survived"
        # Triton cannot compile in a process in which it interprets, and the reverse.
        compiled = [test for test in tests if "triton/test_compile" in test]
        for files, interpret in (([t for t in tests if t not in compiled], "1"), (compiled, "0")):
            if not files or outcome != "survived":
                continue
            environment["TRITON_INTERPRET"] = interpret
            try:
                done = subprocess.run(
                    [*command, *files], cwd=folder, env=environment, capture_output=True,
                    text=True, timeout=args.limit,
                )  # fmt: skip
                output = done.stdout
                outcome = OUTCOMES.get(done.returncode, f"error {done.returncode}")
            except subprocess.TimeoutExpired:
                outcome = "over the limit"
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    seconds = round(time.monotonic() - start)
    return {"outcome": outcome, "seconds": seconds, "by": failed[0][:200] if failed else ""}


def _numbers(text: str) -> list[int]:
    parts = [part.partition("-") for part in text.split(",")]
    return [i for low, dash, high in parts for i in range(int(low), int(high or low) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--mutants", type=_numbers, help="numbers, e.g. 0-14 or 3,7")
    parser.add_argument("--tests", nargs="+", help="files, instead of those that COVERING names")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one mutant")
    parser.add_argument("--every", type=int, default=1, help="of each test, one case of so many")
    parser.add_argument("--match", help="of these tests, those whose names match, as pytest's -k")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--results", type=Path, help="a file that gets a line of JSON for each")
    args = parser.parse_args()
    found = mutants(args.seed)
    for i in args.mutants or range(len(found)):
        tests = args.tests or tests_of(found[i])
        print(f"{i:2} {found[i]}", flush=True)
        if args.list:
            print("  ", *tests)
            continue
        if is_equivalent(found[i]):
            print("   equivalent")
            continue
        result = {"mutant": i, "what": str(found[i]), **run(found[i], tests, args), "tests": tests}
        print("  ", result["outcome"], result["seconds"], "s", result["by"], flush=True)
        if args.results:
            args.results.parent.mkdir(parents=True, exist_ok=True)
            with args.results.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
