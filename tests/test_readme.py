"""The Python blocks of the README and the docs run; all blocks of a page form one program."""

import csv
import pkgutil
import re
from pathlib import Path

import jax
import pytest

import jaxnorm
from benchmarks import auto_remat, pictures

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A block may be indented, because it may be inside a list. If a block cannot run, or needs an
# optional package, a comment before it says so.
BLOCK = re.compile(
    r"(?:<!-- (?P<why>needs|not run:) (?P<what>.*?) -->\n)?"
    r"(?P<indent> *)```python\n(?P<code>.*?)\n *```",
    re.DOTALL,
)
# Modules that a block may need and that are not always installed. Other modules must exist.
OPTIONAL = {"jaxnorm.equinox", "jaxnorm.linen.converted", "jaxnorm.nnx.convert"}


def is_here(name: str) -> bool:
    assert name in OPTIONAL
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def blocks(page: Path) -> list[str]:
    """Return the code of each code block of `page` that this machine can run."""
    found = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["why"] is None or (block["why"] == "needs" and is_here(block["what"])):
            found.append(block["code"])
    return found


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the mesh examples want 8 devices")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
def test_the_examples_run(page):
    namespace: dict[str, object] = {}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), namespace)
    assert "jaxnorm" in namespace


def test_the_pages_have_examples():
    """`blocks` finds an example on every page, except on the pages that have no examples.

    `without` lists the pages without examples.
    """
    without = {"benchmarks", "correctness", "errors", "replaces", "results"}
    without |= {"structure", "testing"}
    assert {page.stem for page in PAGES if not blocks(page)} == without
    assert sum(len(blocks(page)) for page in PAGES) >= 30


def test_the_api_reference_has_every_public_name():
    """The API page lists every public name, and each public module has a page."""
    page = (ROOT / "docs" / "api" / "jaxnorm.md").read_text(encoding="utf-8")
    assert set(re.findall(r"auto(?:function|class|data):: (\w+)", page)) == set(jaxnorm.__all__)
    modules = {path.stem for path in (ROOT / "jaxnorm").glob("[a-z]*.py")}
    assert modules <= {path.stem for path in (ROOT / "docs" / "api").glob("*.md")}


def test_every_link_leads_somewhere():
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert "://" in target or (page.parent / target).exists(), (page.name, target)


def test_the_package_begins_like_the_readme():
    _, first, *_ = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")
    words, ours = (re.findall(r"\w+", text) for text in (first, jaxnorm.__doc__))
    assert ours[: len(words)] == words


def measured_steps() -> set[tuple[str, str]]:
    """Return pairs: the milliseconds and the GB of temporary memory of each step on the H200."""
    folder = ROOT / "benchmarks/results/nvidia_h200"
    with (folder / "auto_remat.csv").open(encoding="utf-8") as file:
        steps = {(float(r["ms"]), float(r["temp_gb"])) for r in csv.DictReader(file)}
    with (folder / "training.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    steps |= {(float(r["ms"]), float(r["temp_bytes"]) / 1e9) for r in rows}
    return {(f"{ms:.1f}", f"{gb:.1f}") for ms, gb in steps}


@pytest.mark.parametrize(
    ("page", "header", "least"),
    [("README.md", "| your layers are |", 8), ("docs/results.md", "| layers, remat |", 5)],
)
def test_training_steps_have_committed_figures(page, header, least):
    """In each row, columns with milliseconds and with GB alternate; a → b stands for two steps."""
    _, _, table = (ROOT / page).read_text(encoding="utf-8").partition(header)
    rows = table.partition("\n\n")[0].splitlines()[2:]
    assert len(rows) >= least
    for row in rows:
        cells = [cell.split(" → ") for cell in re.findall(r"(?<=\| )[\d.→ ]+(?= \|)", row)]
        steps = [pair for ms, gb in zip(*[iter(cells)] * 2) for pair in zip(ms, gb, strict=True)]
        assert steps
        assert {*steps} <= measured_steps(), row


# A measured time, size or share, outside of links. (Limits of the code are in MiB and GiB.)
FIGURE = re.compile(r"\b\d[\d.]* ?(?:ms|us|seconds|GB|MB|%|of the time|times as)(?!\w)")
# A source: a commit, a file of results, or tests, which compare the figures of their section.
SOURCE = re.compile(r"\b[0-9a-f]{7,8}\b|\.csv|\b[Tt]ests? ")


def test_each_section_with_measurements_names_their_source():
    """A figure in the text of a link belongs to the page to which the link leads."""
    for page in PAGES:
        if page.stem in ("benchmarks", "testing"):  # sizes of GPUs and of downloads
            continue
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        text = re.sub(r"\[[^]]*\]\([^)]*\)", "", text)
        for section in re.split(r"\n(?=##+ )", text):
            found = FIGURE.search(section)
            assert not found or SOURCE.search(section), (page.name, section[:40], found)


H100 = "nvidia_h100_80gb_hbm3"
_LOSS = "us .1f 1e3, temp_bytes .2f 1e9"
CELL, PAIR = r"(?<=\| )([\d.]+)(?= \|)", r"([\d.]+) (?:/|\|) ([\d.]+)(?= \|)"


@pytest.mark.parametrize(
    ("page", "header", "file", "columns", "pattern"),
    [
        ("implementations", "| training step |", f"{H100}/compile", "total_s .1f 1", CELL),
        ("losses", "| model; largest", f"{H100}/capacity", "batch_in_80gb .0f 1", CELL),
        ("losses", "| loss in", f"{H100}/training", "ms .1f 1, temp_bytes .1f 1e9", PAIR),
        ("losses", "| ms / GB |", f"{H100}/loss", _LOSS, PAIR),
        ("losses", "| ms / GB on an H200", "nvidia_h200/linear_loss", _LOSS, PAIR),
        ("losses", "| vocabulary | dtype | pass |", f"{H100}/loss", "us .0f 1", r"ward \| (\d+)"),
        ("platforms", "| function and shape |", "cpu/cpu", "ratio .2f 1", r"(\d\.\d\d)"),
    ],
    ids=str,
)
def test_tables_have_committed_figures(page, header, file, columns, pattern):
    """Each figure, or pair of figures, is in a row of the file: its name, format and unit."""
    with (ROOT / "benchmarks/results" / f"{file}.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    taken = [column.split() for column in columns.split(", ")]
    known = {
        tuple(format(float(row[n]) / float(unit), form) for n, form, unit in taken)
        for row in rows
        if all(row[n] for n, *_ in taken)
    }
    _, _, table = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").partition(header)
    body = "\n".join(table.partition("\n\n")[0].splitlines()[2:])
    found = [m.groups() for m in re.finditer(pattern, body)]
    assert len(found) >= 3
    assert {*found} <= known


def test_the_docs_are_short():
    """The README has at most 100 lines, and the other pages have at most 38,000 words.

    The index links each page.
    """
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
    pages = [page for page in PAGES if page.parent == ROOT / "docs"]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    assert sum(len(text.split()) for text in texts) <= 38_000
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert [page for page in pages if page.stem != "index" and f"]({page.name})" not in index] == []


@pytest.mark.parametrize("layers", ["scan", "unrolled", "scan, 2 GPUs"])
def test_figures_of_auto_remat_are_those_of_committed_results(layers):
    table = auto_remat.table(layers)
    assert table in (ROOT / "docs" / "auto_remat.md").read_text()


def test_pictures_are_drawn_from_committed_results():
    """`python -m benchmarks.pictures` draws the only picture of the README and the docs."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = re.findall(r"!\[[^]]*\]\((.+?)\)", text)
    assert shown == [str(pictures.PICTURE.relative_to(ROOT))]
    found = pictures.digest() in pictures.PICTURE.read_text(encoding="utf-8")
    assert found, "the picture is old: run python -m benchmarks.pictures"
