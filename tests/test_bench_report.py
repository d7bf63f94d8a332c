"""Laws of a benchmark's report: every figure has its data, what failed is shown, nothing of the results runs."""

import base64
import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fixtures import Outcome, refused, succeed
from matplotlib.axes import Axes
from report_rows import MANIFEST, faster, report_of, row, standard, write_results

from lightning_specdec.bench.rows import ResultRow
from lightning_specdec.report.figures import Chart, answer_chart, speedup_charts

EVIL = "</script><script>alert(1)</script><b onclick=x>$\\frac{_%|`=\n"


def some_rows() -> list[ResultRow]:
    """Two domains, windows 2 and 4 and auto, two temperatures, two batch sizes, and a cell that failed."""
    rows = [standard(domain=domain) for domain in ("code", EVIL)]
    rows += [
        faster([1.5, 1.6] * 4, domain=d, num_draft_tokens=w) for d in ("code", EVIL) for w in (2, 4)
    ]
    rows.append(faster([1.5] * 8, num_draft_tokens="auto"))
    rows += [
        each for t in (0.5,) for each in (standard(temperature=t), faster([0.9] * 8, temperature=t))
    ]
    rows += [standard(batch_size=2), faster([0.9] * 8, batch_size=2)]
    rows.append(row(num_draft_tokens=8, error=f"RuntimeError: {EVIL}"))
    return rows


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    manifest = {**MANIFEST, "name": f"run {EVIL}"}
    return write_results(tmp_path_factory.mktemp("results") / "made", some_rows(), manifest)


@pytest.fixture(scope="module")
def said(results: Path) -> Outcome:
    """What the verb says when it writes the report."""
    return succeed("report", str(results))


@pytest.fixture(scope="module")
def page(said: Outcome, results: Path) -> str:
    return (results / "report" / "report.html").read_text(encoding="utf-8")


def axes_of(chart: Chart) -> Axes:
    return chart.figure.axes[0]


def legend(chart: Chart) -> list[str]:
    return axes_of(chart).get_legend_handles_labels()[1]


def test_speedups_are_bars_with_their_intervals_and_predictions_by_window() -> None:
    report = report_of(some_rows())
    charts = speedup_charts(report.cells)
    assert [each.title.replace(EVIL, "EVIL") for each in charts] == [
        "pair: code, temperature 0, batch size 1",
        "pair: EVIL, temperature 0, batch size 1",
        "pair: code, temperature 0.5, batch size 1",
        "pair: code, temperature 0, batch size 2",
    ]
    axes = axes_of(charts[0])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8", "auto"]
    assert legend(charts[0]) == ["predicted", "ngram"]
    cell = next(
        each
        for each in report.cells
        if (each.case.num_draft_tokens, each.case.domain) == (4, "code")
    )
    assert cell.walltime_speedup is not None
    bar: Any = axes.patches[1]
    assert bar.get_height() == pytest.approx(cell.walltime_speedup.value)
    line: Any = axes.collections[1]
    ends = np.asarray(line.get_segments()[0])[:, 1].tolist()
    assert ends == pytest.approx([cell.walltime_speedup.low, cell.walltime_speedup.high])
    assert [text.get_text() for text in axes.texts] == ["failed"]
    points = [np.asarray(each.get_ydata()).tolist() for each in axes.lines]
    assert [cell.predicted_speedup] in points and [1.0, 1.0] in points, "and standard decoding"


def test_the_first_chart_has_each_places_best_choice_and_transformers_own_methods() -> None:
    rows = [standard(), faster([1.5, 1.6] * 4), faster([1.2, 1.3] * 4, num_draft_tokens=2)]
    rows += [
        faster([1.1, 1.2] * 4, "generate"),
        standard(batch_size=2),
        faster([0.8] * 8, batch_size=2),
    ]
    report = report_of(rows)
    chart = answer_chart(report.advice, report.cells)
    assert chart is not None and answer_chart([], report.cells) is None
    assert [text.get_text().partition("x ")[0] for text in axes_of(chart).texts] == [
        *("pair: code, batch size 1", "ngram with window 4: 1.55", "transformers' generate: 1.15"),
        *("pair: code, batch size 2", "off (best: ngram with window 4): 0.80"),
    ]
    widths = [bar.get_width() for bar in axes_of(chart).patches]  # type: ignore[attr-defined]
    assert widths == pytest.approx([1.55, 1.15, 0.8], abs=0.006)
    segments = [each.get_segments()[0] for each in axes_of(chart).collections]  # type: ignore[attr-defined]
    ends = [segment[:, 0].tolist() for segment in segments]
    speedup = report.advice[0].best and report.advice[0].best.walltime_speedup
    assert speedup and ends[0] == [1.0, 1.0] and ends[1] == pytest.approx(list(speedup.ends or ()))
    assert "transformers" in chart.title and "transformers" in chart.note
    alone = answer_chart(
        report.advice, [each for each in report.cells if each.case.method != "generate"]
    )
    assert alone is not None and "transformers" not in alone.title + alone.note


def test_nothing_of_the_results_can_run_or_load(page: str) -> None:
    assert "<script" not in page and "<b onclick" not in page and "default-src 'none'" in page
    assert html.escape("</script><script>alert(1)</script>") in page
    assert "Gray" not in page and re.search(
        r"prefers-color-scheme: dark\) {\n.*\nimg { filter: invert", page
    )
    images = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(images) == 5
    for image in images:
        kind, content = image.split(",")
        assert kind == "data:image/svg+xml;base64" and b"<script" not in base64.b64decode(content)


@pytest.mark.parametrize(
    "rows", [[], [row(error="no memory")], [standard()]], ids=["empty", "failed", "standard"]
)
def test_results_without_figures_still_give_a_page(rows: list[ResultRow], tmp_path: Path) -> None:
    directory = write_results(tmp_path / "r", rows)
    told = succeed("report", str(directory), "--output", str(tmp_path / "out")).out
    page = (tmp_path / "out" / "report.html").read_text()
    assert ("<img" in page) == ("no memory" in page) == bool(rows and rows[0].error)
    assert (
        ("nothing has been measured yet" in page)
        == (not rows)
        == ("nothing has been measured yet" in told)
    )


def test_the_verb_says_the_answer_and_where_the_page_is(said: Outcome, results: Path) -> None:
    lines = said.out.splitlines()
    assert lines[0].startswith(
        "pair, code (temperature 0, batch size 1, 48 new tokens): use ngram with window 2: "
    )
    assert lines[-1] == f"report: {results / 'report' / 'report.html'}" and len(lines) == 5
    assert said.err.startswith("warning: failed: pair, ngram 8 ExactMatch, code")


def test_bad_input_of_the_verb_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = write_results(tmp_path / "other", [], {**MANIFEST, "format": 1})
    blocked = write_results(tmp_path / "blocked", [])
    (blocked / "report").write_text("a file where the directory should be")
    refused("report", "nowhere", told="holds no results")
    refused("report", str(other), told="another version wrote it; measure again")
    refused("report", str(blocked), told="blocked/report")
    refused("report", str(blocked), "--ouput", "x", told="did you mean --output")
