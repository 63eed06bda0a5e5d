"""Plots and tables made from the committed CSV files, and the docs pages that show them."""

import pytest

from benchmarks import figures, page_tables, report, results
from benchmarks.figures import Figure
from benchmarks.models import LOSS_STEPS, VARIANTS
from benchmarks.report import PAGE, README, SHOWN, Results
from benchmarks.results import Table
from benchmarks.suites import SUITES
from benchmarks.text import notes
from benchmarks.workloads import Workload, grid


@pytest.fixture(scope="module")
def found():
    return Results(*SHOWN)


def test_the_committed_rows_agree_with_themselves(found):
    for r in found.rows["kernels"]:
        if r["status"] != "ok":
            assert r["status"].startswith("failed: ")
            assert r["us"] == r["gbps"] == ""
            continue
        shape = (int(r["rows"]), int(r["cols"]))
        size = Workload(r["op"], r["direction"], *shape, r["x_dtype"], r["y_dtype"]).bytes
        us, gbps = float(r["us"]), float(r["gbps"])
        # us is rounded to 0.01, and gbps to 0.1.
        assert gbps == pytest.approx(size / us / 1e3, abs=0.051 + gbps * 0.0051 / us)


def test_the_committed_rows_cover_the_grid(found):
    for w in grid():
        answers = found.kernels[w.op, w.direction, w.rows, w.cols, w.x_dtype, w.y_dtype]
        assert figures.own(answers) is not None
        assert "xla" in answers


@pytest.mark.parametrize(
    ("file", "section"), [(README, report.readme_section), (PAGE, report.page_section)]
)
def test_the_pages_show_the_committed_figures(found, file, section):
    shown = report.with_section(file, section(found))
    assert shown == file.read_text(), "run python -m benchmarks.report"


@pytest.mark.parametrize("folder", report.committed(), ids=lambda folder: folder.name)
def test_the_committed_reports_are_of_the_committed_figures(folder):
    found = Results(folder)
    shown = (folder / report.REPORT).read_text()
    assert shown == report.full_report(found), "run python -m benchmarks.report"


def test_the_committed_plots_are_those_that_the_pages_show(found):
    plots = {found.plot(suite) for suite in report._PLOTS}
    assert {*report.RESULTS.glob("*/*.png")} == plots
    for plot in plots:
        assert plot.read_bytes().startswith(b"\x89PNG")
        shown = f"{plot.parent.name}/{plot.name})"
        assert any(shown in page.read_text() for page in (README, PAGE))


def test_every_committed_folder_has_a_report():
    assert {*SHOWN} <= {*report.committed()}


def test_the_main_table(found):
    lines = page_tables.kernels(found.kernels).splitlines()
    assert len(lines) == 2 + 4 * 2
    assert "-" not in "".join(lines[2:])
    answers = found.kernels["softmax", "fwd", *page_tables.MAIN[0], "bfloat16", "bfloat16"]
    mine, xla = figures.own(answers), answers["xla"]
    first_cell = lines[2].split("|")[2].strip()
    assert first_cell == f"{mine.roof:.2f} ({xla.us / mine.us:.1f}x)"


def written(folder, rows):
    """Return a folder whose kernels.csv has these rows.

    Each row is (provider, time in microseconds) or (provider, status of the failure).
    """
    table = Table(folder, SUITES["kernels"])
    for provider, us in rows:
        ok = isinstance(us, float)
        figures = {"us": us, "main_us": us, "gbps": 6e3 / us, "roof": 2 / us} if ok else {}
        table.append(
            {
                "device": "some GPU",
                "software": "jax 1",
                "commit": "abc1234",
                "op": "softmax",
                "direction": "fwd",
                "rows": "32768",
                "cols": "1024",
                "x_dtype": "float32",
                "y_dtype": "float32",
                "provider": provider,
                **results.rounded(SUITES["kernels"], figures),
                "status": "ok" if ok else us,
            }
        )
    return Results(folder)


def test_a_peer_is_ahead_by_more_than_two_percent(tmp_path):
    rows = [("mosaic", 9.0), ("jaxnorm", 4.0), ("xla", 3.93), ("quack", 2.0), ("jnp", 8.0)]
    found = written(tmp_path, rows)
    ((question, peer, ratio),) = [(a.question, a.peer, a.ratio) for a in found.ahead]
    assert question == ("softmax", "fwd", 32768, 1024, "float32", "float32")
    assert (peer, ratio) == ("quack", 2.0)
    assert "| softmax forward, 32768 x 1024, f32 | QuACK | 2.00 |" in report.full_report(found)
    compared = page_tables.comparisons(found.kernels, found.api)
    assert "| QuACK | 0.50x (0.50 to 0.5) | 1 of 1 | - | - |" in compared
    assert "| jnp | 2.00x (2.00 to 2.0) | 0 of 1 | - | - |" in compared
    assert "jaxnorm mosaic" not in compared
    assert notes(found.kernels) == ""
    assert "overwrites x with dx" in notes({question: {"tokamax": None, "xla": None}})
    said = page_tables.where_ahead(found.ahead)
    assert said.startswith("In 1 cells, kernels of other libraries are more than 2 % faster than")
    assert "In 0 of these cells, the operation transfers less" in said
    assert "In the other 1 cells, the operation transfers more, and kernels of other" in said
    assert said.endswith("are faster by at most 100 %.")
    nowhere = page_tables.where_ahead([])
    assert nowhere.endswith("In the other 0 cells, the operation transfers more.")
    assert "Measured: jaxnorm, jaxnorm mosaic" in page_tables.who(found.kernels)


def test_failures_are_listed(tmp_path):
    text = report.full_report(written(tmp_path, [("mosaic", 2.0), ("quack", "failed: a | b")]))
    assert "| QuACK: failed: a / b | 1 |" in text


def test_a_report_of_another_folder(tmp_path):
    written(tmp_path, [("jaxnorm", 2.0), ("torch", 3.0)])
    before = README.read_text(), PAGE.read_text()
    files = report.write(tmp_path)
    assert [f.name for f in files] == ["report.md"]
    (plot,) = report.draw(Results(tmp_path))
    assert plot == tmp_path / "kernels_bfloat16.png"
    assert plot.stat().st_size > 0
    assert "| softmax: torch eager | 2000 |" in files[0].read_text()
    assert (README.read_text(), PAGE.read_text()) == before


def test_a_report_of_blocks(tmp_path):
    table = Table(tmp_path, SUITES["blocks"])
    # Each row has four items: a shape, a provider, its time in microseconds (or why it failed), and
    # the number of extra copies of whole arrays (`extra_passes`). A copy of the bytes that the
    # measured function must load and store would take 4 microseconds.
    for shape, provider, us, extra_passes in [
        ("8192x4096", "jaxnorm", 5.0, 0),
        ("8192x4096", "jnp", 6.0, 1),
        ("8192x4096", "quack", 4.0, None),
        ("32768x768", "jaxnorm", 8.0, 0),
        ("32768x768", "jnp", 16.0, 0),
        ("32768x1024", "jnp", 16.0, 0),
        ("32768x1024", "jaxnorm", "failed: no", 0),
    ]:
        ok = isinstance(us, float)
        figures = {"us": us, "main_us": us, "gbps": 1.0, "roof": 4 / us} if ok else {}
        row = {"device": "some GPU", "software": "jax 1", "commit": "abc1234"}
        cell = {"op": "add_rms_norm", "direction": "fwd+bwd", "shape": shape, "dtype": "mixed"}
        measured = results.rounded(table.suite, figures | {"extra_passes": extra_passes})
        status = "ok" if ok else us
        table.append(row | cell | {"provider": provider} | measured | {"status": status})
    files = report.write(tmp_path)
    assert [f.name for f in files] == ["report.md"]
    text = files[0].read_text()
    title = "bf16 beside an f32 residual stream, forward and backward"
    assert (
        f"| {title} | of a copy | against jnp | against QuACK |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| add_rms_norm, 32768 x 768 | 0.50 | 2.00x | - |\n"
        "| add_rms_norm, 8192 x 4096 | 0.80 | 1.20x* | 0.80x |\n"
        "| add_rms_norm, median | 0.65 | 1.60x | 0.80x |\n"
    ) in text
    assert "*: the program also copies" in text
    assert "| jaxnorm: failed: no | 1 |" in text
    short = report.page_section(Results(tmp_path))
    assert "| add_rms_norm, median | 0.65 | 1.60x | 0.80x |" in short
    assert "32768 x 768" not in short


def test_of_two_shapes_with_one_n_the_larger_counts():
    small, large = (Figure(us=1.0, speed=s, roof=0.9) for s in (1.0, 2.0))
    measured = {
        ("softmax", "fwd", rows, 5120, "float32", "float32"): {"xla": figure}
        for rows, figure in ((8192, large), (4096, small))
    }
    by_n = figures.along_n(measured, "softmax", "fwd", "float32", "float32")
    assert by_n == {5120: {"xla": large}}


def training_row(provider, **figures):
    row = {"device": "some GPU", "software": "jax 1", "commit": "abc1234"}
    row |= {
        "model": "llama-1b",
        "remat": "dots",
        "layers": "scan",
        "dtype": "bfloat16",
        "batch": "4",
        "mesh": "",
    }
    row |= {"provider": provider, "status": figures.pop("status", "ok")}
    return row | results.rounded(SUITES["training"], figures)


def test_a_report_of_training_steps(tmp_path):
    losses = {f"loss_{step}": 12.0 - step / 10 for step in LOSS_STEPS}
    plain = {"ms": 200.0, "kernels_ms": 198.0, "tokens_per_s": 1.0, "peak_bytes": 50e9}
    table = Table(tmp_path, SUITES["training"])
    table.append(training_row("jnp", **plain, temp_bytes=20e9, **losses))
    ours = plain | losses | {"ms": 170.0, "kernels_ms": None, "loss_20": losses["loss_20"] - 0.25}
    table.append(training_row("jaxnorm-everything", **ours, temp_bytes=11e9))
    table.append(training_row("jaxnorm-norms", status="failed: no memory"))
    on_two = {"batch": "8", "mesh": "fsdp=2"}
    for name, ms in {"jnp": 210.0, "jaxnorm-everything": 189.0}.items():
        of_mesh = plain | losses | {"ms": ms}
        table.append(training_row(name, **of_mesh, temp_bytes=10e9) | on_two)
    fits = Table(tmp_path, SUITES["capacity"])
    cell = {k: v for k, v in training_row("jnp").items() if k in fits.suite.columns}
    fits.append(cell | {"batch_in_80gb": "9"})
    another = {"provider": "jaxnorm-products", "layers": "unrolled", "batch_in_80gb": "14"}
    fits.append(cell | another)
    files = report.write(tmp_path)
    assert [f.name for f in report.draw(Results(tmp_path))] == ["training_bfloat16.png"]
    text = files[0].read_text()
    name = "| llama-1b, 4 x 2048 | dots |"
    assert (
        f"{name} plain JAX and optax | 200.0 | 1.00 | 198.00 | 1.00 | 20.0 | 1.00 | 50.0 |" in text
    )
    figures = "170.0 | 0.85 | - | - | 11.0 | 0.55 | 50.0 |"
    assert f"{name} jaxnorm's residual norms and loss | {figures}" in text
    assert f"{name} jaxnorm's norms | failed: no memory |" in text
    assert "| 11.900 to 8.000 |" in text
    assert "| llama-1b, 8 x 2048, fsdp=2 | dots | plain JAX and optax | 210.0 | 1.00 |" in text
    assert "jaxnorm's residual norms and loss | 189.0 | 0.90 |" in text
    assert "losses differ by at most 0.2500 nats from" in text
    # The table lists only cells that were measured.
    assert "| llama-1b, length 2048 | dots | 9 | - |\n" in text
    assert "| llama-1b, length 2048, unrolled | dots | - | 14 |\n" in text
    assert "| bar |" not in text
    rows = [row for row in table.rows() if not row["mesh"]]
    assert page_tables.steps(rows, fits.rows()) == (
        "| model, batch x length | remat | ms, without | ms, jaxnorm | temp GB, without "
        "| temp GB, jaxnorm | largest batch, without | largest batch, jaxnorm |\n"
        f"| --- |{' ---: |' * 7}\n"
        "| llama-1b, 4 x 2048 | dots | 200.0 | - | 20.0 | - | 9 | - |"
    )
    assert page_tables.steps(rows, []).count("\n") == 1  # only the header: the table has no row


def test_a_report_of_bars(tmp_path):
    """A bar is an upper limit for the ratio of two measured numbers, e.g. of two times.

    The report compares each ratio with its bar before it rounds the ratio. One of the two numbers
    is measured with jaxnorm. The report lists a bar only if the results include this number.
    """
    table = Table(tmp_path, SUITES["training"])

    def step(provider, ms, temp, **cell):
        losses = dict.fromkeys((f"loss_{step}" for step in LOSS_STEPS), 12.0)
        figures = {"ms": ms, "temp_bytes": temp, "tokens_per_s": 1.0, "peak_bytes": 50e9}
        table.append(training_row(provider, **figures, **losses) | cell)

    step("jnp", 150.0, 30e9, remat="none")
    step("jnp", 147.0, 13e9, remat="dots")
    step("jaxnorm-products", 135.02, 12e9, remat="none")
    step("jaxnorm-products", 10.0, 1e9, remat="none", layers="unrolled")
    step("jaxnorm-products", 140.0, 12e9, remat="none", model="gpt2-small", batch="16")
    text = report.full_report(Results(tmp_path))
    assert text.rstrip().endswith(
        "| bar | measured | at most |  |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| llama-1b: time, of plain JAX | 0.900 | 0.90 | missed |\n"
        "| llama-1b: time, of plain JAX with products saved | 0.919 | 0.94 | holds |\n"
        "| llama-1b: temp, of plain JAX | 0.400 | 0.45 | holds |\n"
        "| llama-1b: temp, of plain JAX with products saved | 0.923 | 1.05 | holds |\n"
        "| gpt2-small: time, of plain JAX | - | 0.83 | plain JAX was not measured |\n"
        "| gpt2-small: time, of plain JAX with products saved | - | 0.92 | plain JAX was not "
        "measured |\n"
        "| gpt2-small: temp, of plain JAX | - | 0.25 | plain JAX was not measured |\n"
        "| gpt2-small: temp, of plain JAX with products saved | - | 0.54 | plain JAX was not "
        "measured |"
    )
    variant = VARIANTS["jaxnorm-products"]
    assert f"| llama-1b, 4 x 2048, unrolled | none | {variant} | 10.0 | - |" in text


def test_a_page_without_markers_is_an_error(tmp_path):
    (tmp_path / "page.md").write_text("# jaxnorm")
    with pytest.raises(
        ValueError, match=r"page.md: expected the markers <!-- benchmarks:begin -->"
    ):
        report.with_section(tmp_path / "page.md", "a table")


def test_a_folder_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        report.main(["no/such/folder"])
    assert "got 'no/such/folder'; expected a folder with CSV files" in capsys.readouterr().err
