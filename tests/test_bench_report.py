"""Laws of a benchmark's report: every figure has its data, failures are shown, nothing in the
results runs."""

import base64
import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fixtures import Outcome, refused, succeed
from matplotlib.axes import Axes
from report_records import MANIFEST, faster, report_of, row, standard, write_results

from lightning_specdec.bench.records import Record
from lightning_specdec.report.figures import Chart, answer_chart, speedup_charts

EVIL = "</script><script>alert(1)</script><b onclick=x>$\\frac{_%|`=\n"


def some_rows() -> list[Record]:
    """Two domains, windows 2 and 4 and auto, two temperatures, two batch sizes, and a failed
    cell."""
    rows = [standard(domain="code"), standard(domain=EVIL)]
    for domain in ("code", EVIL):
        for window in (2, 4):
            rows.append(faster([1.5, 1.6] * 4, domain=domain, num_draft_tokens=window))
    rows.append(faster([1.5] * 8, num_draft_tokens="auto"))
    rows += [standard(temperature=0.5), faster([0.9] * 8, temperature=0.5)]
    rows += [standard(batch_size=2), faster([0.9] * 8, batch_size=2)]
    rows.append(row(num_draft_tokens=8, error=f"RuntimeError: {EVIL}"))
    return rows


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    manifest = {**MANIFEST, "name": f"run {EVIL}"}
    return write_results(tmp_path_factory.mktemp("results") / "made", some_rows(), manifest)


@pytest.fixture(scope="module")
def outcome(results: Path) -> Outcome:
    """The output of the verb, which writes the report."""
    return succeed("report", str(results))


@pytest.fixture(scope="module")
def page(outcome: Outcome, results: Path) -> str:
    return (results / "report" / "report.html").read_text(encoding="utf-8")


def axes_of(chart: Chart) -> Axes:
    return chart.figure.axes[0]


def legend(chart: Chart) -> list[str]:
    _, labels = axes_of(chart).get_legend_handles_labels()
    return labels


def test_each_pair_setting_and_domain_has_a_chart_of_speedups() -> None:
    charts = speedup_charts(report_of(some_rows()).cells)
    assert [chart.title.replace(EVIL, "EVIL") for chart in charts] == [
        "pair: code, temperature 0, batch size 1",
        "pair: EVIL, temperature 0, batch size 1",
        "pair: code, temperature 0.5, batch size 1",
        "pair: code, temperature 0, batch size 2",
    ]
    assert legend(charts[0]) == ["predicted", "ngram"]


def test_speedups_are_bars_with_their_intervals_and_predictions_by_window() -> None:
    report = report_of(some_rows())
    axes = axes_of(speedup_charts(report.cells)[0])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8", "auto"]
    assert [text.get_text() for text in axes.texts] == ["failed"]

    # The second bar, of window 4.
    cell = next(
        cell
        for cell in report.cells
        if cell.case.num_draft_tokens == 4 and cell.case.domain == "code"
    )
    assert cell.walltime_speedup is not None
    bar: Any = axes.patches[1]
    assert bar.get_height() == pytest.approx(cell.walltime_speedup.value)
    error_bar: Any = axes.collections[1]
    error_bar_ends = np.asarray(error_bar.get_segments()[0])[:, 1].tolist()
    interval = [cell.walltime_speedup.low, cell.walltime_speedup.high]
    assert error_bar_ends == pytest.approx(interval)

    points = [np.asarray(line.get_ydata()).tolist() for line in axes.lines]
    assert [cell.predicted_speedup] in points
    assert [1.0, 1.0] in points, "the line of standard decoding"


def answer_rows() -> list[Record]:
    """A place that pays, with a method of transformers, and one that does not."""
    return [
        standard(),
        faster([1.5, 1.6] * 4),
        faster([1.2, 1.3] * 4, num_draft_tokens=2),
        faster([1.1, 1.2] * 4, "generate"),
        standard(batch_size=2),
        faster([0.8] * 8, batch_size=2),
    ]


def test_the_first_chart_has_each_places_best_choice_and_transformers_own_methods() -> None:
    report = report_of(answer_rows())
    chart = answer_chart(report.advice, report.cells)
    assert chart is not None
    axes = axes_of(chart)
    assert [text.get_text().partition("x ")[0] for text in axes.texts] == [
        "pair: code, batch size 1",
        "ngram with window 4: 1.55",
        "transformers' generate: 1.15",
        "pair: code, batch size 2",
        "off (best: ngram with window 4): 0.80",
    ]
    bars: list[Any] = list(axes.patches)
    assert [bar.get_width() for bar in bars] == pytest.approx([1.55, 1.15, 0.8], abs=0.006)

    lines: list[Any] = list(axes.collections)
    line_ends = [line.get_segments()[0][:, 0].tolist() for line in lines]
    best = report.advice[0].best
    assert best is not None
    assert best.walltime_speedup is not None
    assert best.walltime_speedup.ends is not None
    assert line_ends[0] == [1.0, 1.0], "the line of standard decoding"
    assert line_ends[1] == pytest.approx(list(best.walltime_speedup.ends))
    assert "transformers" in chart.title
    assert "transformers" in chart.note


def test_the_first_chart_mentions_transformers_only_if_it_was_measured() -> None:
    report = report_of(answer_rows())
    cells = [cell for cell in report.cells if cell.case.method != "generate"]
    chart = answer_chart(report.advice, cells)
    assert chart is not None
    assert "transformers" not in chart.title + chart.note
    assert answer_chart([], report.cells) is None


def test_nothing_of_the_results_can_run_or_load(page: str) -> None:
    assert "<script" not in page
    assert "<b onclick" not in page
    assert "default-src 'none'" in page
    assert html.escape("</script><script>alert(1)</script>") in page
    assert "Gray" not in page
    assert re.search(r"prefers-color-scheme: dark\) {\n.*\nimg { filter: invert", page)

    images = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(images) == 5
    for image in images:
        kind, content = image.split(",")
        assert kind == "data:image/svg+xml;base64"
        assert b"<script" not in base64.b64decode(content)


@pytest.mark.parametrize(
    ("rows", "has_image"),
    [([row(error="no memory")], True), ([standard()], False)],
    ids=["failed", "standard"],
)
def test_results_without_figures_still_give_a_page(
    rows: list[Record],
    has_image: bool,
    tmp_path: Path,
) -> None:
    directory = write_results(tmp_path / "r", rows)
    succeed("report", str(directory), "--output", str(tmp_path / "out"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert ("<img" in page) == has_image
    assert ("no memory" in page) == has_image


def test_without_any_row_there_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = write_results(tmp_path / "r", [])
    refused("report", str(directory), message="nothing has been measured yet")
    assert not (directory / "report").exists()


def test_the_verb_says_the_answer_and_where_the_page_is(outcome: Outcome, results: Path) -> None:
    lines = outcome.out.splitlines()
    assert lines[0].startswith(
        "pair, code (temperature 0, batch size 1, 48 new tokens): use ngram with window 2: "
    )
    assert lines[-1] == f"report: {results / 'report' / 'report.html'}"
    assert len(lines) == 5
    assert outcome.err.startswith("warning: failed: pair, ngram 8 ExactMatch, code")


def test_bad_input_of_the_verb_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other_version = write_results(tmp_path / "other", [], {**MANIFEST, "format": 1})
    blocked = write_results(tmp_path / "blocked", [standard()])
    (blocked / "report").write_text("a file where the directory should be")
    refused("report", "nowhere", message="holds no results")
    refused("report", str(other_version), message="another version wrote it; measure again")
    refused("report", str(blocked), message="blocked/report")
    refused("report", str(blocked), "--ouput", "x", message="did you mean --output")
