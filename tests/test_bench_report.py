"""Laws of a benchmark's report: every figure has its data, what failed is shown, nothing of the results runs."""

import base64
import csv
import html
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fixtures import Outcome, call, succeed
from matplotlib.axes import Axes
from report_rows import Row, cells_of, drawn, manifest_of, report_of, row, speculative, standard, write_results

from lightning_specdec.bench.results import read
from lightning_specdec.report.figures import Chart, prediction_charts, speedup_charts
from lightning_specdec.report.report import Report, Table, write

EVIL = "</script><script>alert(1)</script><b onclick=x>$\\frac{_%|`=\n"
BARE = {"format": 2, "name": "bare", "config": {}, "pairs": {}, "prompts": {}}
"""As little as a manifest can say."""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
)


def some_rows() -> list[Row]:
    """Two domains, windows 2 and 4 and auto, two temperatures, two batch sizes, and a cell that failed."""
    rows = [standard(domain=domain) for domain in ("code", EVIL)]
    for domain, alpha in (("code", 0.3), (EVIL, 0.8)):
        for window in (2, 4):
            rows.append(speculative([drawn(alpha, window, s) for s in range(6)], window=window, domain=domain))
    auto = [drawn(0.3, 3, seed) for seed in range(6)]
    rows.append(speculative(auto, window=3, num_draft_tokens="auto"))
    rows += [standard(temperature=0.5), speculative(auto, window=3, num_draft_tokens=2, temperature=0.5)]
    rows += [standard(batch_size=2), speculative(auto, window=3, num_draft_tokens=2, batch_size=2)]
    rows.append(row(domain="code", num_draft_tokens=8, error=f"RuntimeError: {EVIL}"))
    return rows


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    manifest = manifest_of({("draft", "code"): 0.3, ("draft", EVIL): 0.8}, name=f"run {EVIL}")
    return write_results(tmp_path_factory.mktemp("results") / "made", manifest, some_rows())


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


def ends(axes: Axes, number: int) -> list[float]:
    """Where an error bar begins and ends."""
    collection: Any = axes.collections[number]
    found: list[float] = np.asarray(collection.get_segments()[0])[:, 1].tolist()
    return found


def test_speedups_are_bars_with_their_intervals_by_window(results: Path) -> None:
    report = Report.of(read(results))
    charts = speedup_charts(report.cells, report.manifest)
    assert [each.title.replace(EVIL, "EVIL") for each in charts] == [
        "pair: code, temperature 0, batch size 1",
        "pair: EVIL, temperature 0, batch size 1",
        "pair: code, temperature 0.5, batch size 1",
        "pair: code, temperature 0, batch size 2",
    ]
    axes = axes_of(charts[0])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8", "auto"]
    assert legend(charts[0]) == ["draft (12.4k)"]
    cell = next(each for each in report.cells if (each.case.num_draft_tokens, each.case.domain) == (4, "code"))
    assert cell.walltime_speedup is not None
    bar: Any = axes.patches[1]
    assert bar.get_height() == pytest.approx(cell.walltime_speedup.value)
    assert ends(axes, 1) == pytest.approx([cell.walltime_speedup.low, cell.walltime_speedup.high])
    assert [text.get_text() for text in axes.texts] == ["failed"]
    assert any(np.asarray(line.get_ydata()).tolist() == [1.0, 1.0] for line in axes.lines), "standard decoding"


def test_predictions_are_points_beside_the_line_where_they_are_exact(results: Path) -> None:
    predictions = Report.of(read(results)).predictions
    (chart,) = prediction_charts(predictions)
    points = axes_of(chart).lines[3]
    measured = predictions[0].measured.walltime_speedup
    assert measured is not None and len(predictions) == 4
    assert (points.get_xdata()[0], points.get_ydata()[0]) == (predictions[0].predicted, measured.value)  # type: ignore[index]
    assert legend(chart) == ["exact", "10% off", "draft"]


def test_the_rule_is_named_where_there_are_several_and_tokens_are_drawn() -> None:
    rows = [standard(temperature=each) for each in (0.0, 1.0)]
    for temperature in (0.0, 1.0):
        for rule in ("ExactMatch", "RejectionSampling"):
            rows.append(speculative([drawn(0.5, 2, 0)] * 6, window=2, temperature=temperature, rule=rule))
    titles = [each.title for each in speedup_charts(cells_of(rows), {})]
    assert titles[:2] == ["pair: code, temperature 0"] * 2
    assert titles[2:] == [f"pair: code, temperature 1, {rule}" for rule in ("ExactMatch", "RejectionSampling")]


def test_nine_drafts_look_unlike_each_other() -> None:
    names = [f"draft {i}" for i in range(9)]
    rows = [standard(), *(speculative([drawn(0.5, 2, 0)] * 6, window=2, draft=name) for name in names)]
    (chart,) = speedup_charts(cells_of(rows), {})
    bars: list[Any] = list(axes_of(chart).patches)
    assert legend(chart) == names and len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars}) == 9


def test_a_wide_interval_flattens_no_figure_and_is_a_dash() -> None:
    """Two repeats of one prompt, one of them ten times as slow."""
    rows = [standard(prompts=1, repeat=i) for i in range(2)]
    rows += [speculative([drawn(0.5, 4, 0)], drift=drift, repeat=i) for i, drift in enumerate((1.0, 10.0))]
    report = report_of(rows)
    speedup = report.cells[1].walltime_speedup
    assert speedup is not None and speedup.ends is None
    table = report.cells_table()
    assert table.rows[1][table.heads.index("95% interval")] == "-"
    (chart,) = speedup_charts(report.cells, {})
    assert axes_of(chart).get_ylim()[1] <= 2.2 * max(speedup.value, 1.0)


def test_a_pair_that_rounds_has_one_warning_and_another_pair_one_for_each_cell() -> None:
    rounds = [drawn(0.5, 2, 0)] * 6
    rows = [standard(), *(speculative(rounds, window=w, same_tokens=False) for w in (2, 4))]
    rows.append(speculative(rounds, num_draft_tokens=1))
    for dtype, number in (("bfloat16", 1), ("float32", 2)):
        warnings = report_of(rows, pairs={"pair": {"dtype": dtype}}).warnings
        assert len(warnings) == number and all("`audit`" in line for line in warnings)
        assert ("in 2 of 4 cells" in warnings[0]) == (number == 1)


def test_a_failed_cell_is_shown_with_its_error(page: str, results: Path) -> None:
    assert 'class="failed"' in page and "RuntimeError: " in page.split('id="warnings"')[1].split("</section>")[0]
    table = list(csv.DictReader(io.StringIO((results / "report" / "cells.csv").read_text())))
    (failed,) = [each for each in table if each["error"]]
    assert (failed["num_draft_tokens"], failed["walltime_speedup"]) == ("8", "")


def test_nothing_of_the_results_can_run_or_load(page: str) -> None:
    assert "<script" not in page and "<b onclick" not in page and "default-src 'none'" in page
    assert html.escape("</script><script>alert(1)</script>") in page
    images = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(images) == 5
    for image in images:
        kind, content = image.split(",")
        assert kind == "data:image/svg+xml;base64" and b"<script" not in base64.b64decode(content)


@pytest.mark.parametrize(
    "rows", [[], [row(error="no memory")], [standard()]], ids=["empty", "failed", "standard alone"]
)
def test_results_without_figures_still_give_a_page(rows: list[Row], tmp_path: Path) -> None:
    directory = write_results(tmp_path / "r", BARE, rows)
    succeed("report", str(directory), "--output", str(tmp_path / "out"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert ("<img" in page) == ("no memory" in page) == bool(rows and rows[0]["error"])
    assert ("Nothing has been measured yet." in page) == (not rows) and "There is nothing to predict." in page


def test_the_page_names_all_that_a_run_was_resumed_with(tmp_path: Path) -> None:
    later = {"commit": "b2", "torch": "2.9", "date": "2020-01-02"}
    directory = write_results(tmp_path / "r", manifest_of({}, commit="a1", torch="2.8", resumed=[later]), [])
    page = write(Report.of(read(directory)), tmp_path / "out").read_text()
    assert "torch 2.8, then 2.9, commit a1, then b2, 2020-01-01" in page.split('class="machine">')[1].split("</p>")[0]


def test_tables_escape_what_other_programs_would_read() -> None:
    lines = Table(["a|b", "c"], [("=1+1", "0.50"), ("x|<b>\n`", "-")]).markdown().splitlines()
    assert lines[2:] == ["| =1+1 | 0.50 |", "| x\\|&lt;b&gt; \\` | - |"]


def test_the_verb_says_the_answer_and_where_the_page_is(said: Outcome, results: Path) -> None:
    lines = said.out.splitlines()
    assert lines[0].startswith("pair (temperature 0, batch size 1, 48 new tokens): use draft with window 2: ")
    assert lines[1].startswith("pair (temperature 0.5, batch size 1, 48 new tokens): ")
    assert lines[-1] == f"report: {results / 'report' / 'report.html'}"
    assert said.err.startswith("warning: failed: pair, draft 8 ExactMatch, code")


def test_bad_input_of_the_verb_is_one_line(tmp_path: Path) -> None:
    other = write_results(tmp_path / "other", {"format": 99}, [])
    blocked = write_results(tmp_path / "blocked", BARE, [])
    (blocked / "report").write_text("a file where the directory should be")
    for arguments, message in (
        (["nowhere"], "holds no results"),
        ([str(other)], "format 99"),
        ([str(blocked)], "blocked/report"),
        ([str(blocked), "--ouput", "x"], "did you mean --output"),
    ):
        outcome = call("report", *arguments)
        assert outcome.code == 2 and message in outcome.err and outcome.err.count("\n") == 1


PROBE = """<!DOCTYPE html><body><script>
const found = {};
function light(color) {  // relative luminance, WCAG 2
  const [r, g, b] = color.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255).map(
    part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function look(frame, width) {
  const page = frame.contentDocument, root = page.documentElement;
  const images = [...page.querySelectorAll("img")].filter(
    each => each.complete && each.naturalWidth > 100 && each.getBoundingClientRect().height > 100);
  const out = [...page.querySelectorAll("main *")].filter(
    each => !each.closest(".scroll, pre") && each.getBoundingClientRect().right > width + 1);
  const ground = light(getComputedStyle(page.body).backgroundColor);
  const contrasts = [...page.querySelectorAll("p, h1, h2, td, th, summary")].filter(
    each => each.textContent.trim() && !each.closest(".answer, .warning")).map(each => {
      const ink = light(getComputedStyle(each).color);
      return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    });
  found[width] = {scroll: root.scrollWidth, out: out.map(each => each.outerHTML.slice(0, 80)), images: images.length,
                  ground, contrast: Math.min(...contrasts),
                  columns: getComputedStyle(page.querySelector(".charts")).gridTemplateColumns.split(" ").length};
  if (Object.keys(found).length == 2) document.body.innerHTML = "<pre id=found>" + JSON.stringify(found) + "</pre>";
}
</script>FRAMES</body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_in_a_browser(page: str, tmp_path: Path, theme: str) -> None:
    """Wide and narrow: no console error, all drawings there, nothing wider than the window, all text readable."""
    frame = '<iframe srcdoc="{}" style="border:0;height:900px;width:{}px" onload="look(this, {})"></iframe>'
    frames = "".join(frame.format(html.escape(page), width, width) for width in (1400, 400))
    (tmp_path / "probe.html").write_text(PROBE.replace("FRAMES", frames), encoding="utf-8")
    chosen = f"--blink-settings=preferredColorScheme={('dark', 'light').index(theme)}"
    command = [str(CHROMIUM), *FLAGS, chosen, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1900,1000"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "probe.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    told = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None, done.stderr
    found = json.loads(html.unescape(told[1]))
    for width in ("1400", "400"):
        seen = found[width]
        assert seen["scroll"] <= int(width) and seen["out"] == [] and seen["images"] == 5
        assert seen["contrast"] >= 4.5 and (seen["ground"] < 0.1) == (theme == "dark")
    assert found["1400"]["columns"] == 3 and found["400"]["columns"] == 1
