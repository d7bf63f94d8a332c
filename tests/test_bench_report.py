"""Laws of a benchmark's report: every picture has its data, what failed is shown, nothing of the results runs."""

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
from matplotlib.lines import Line2D
from report_rows import Row, drawn, manifest_of, row, speculative, standard, write_results

from lightning_specdec.bench.report.figures import PALETTE, Picture
from lightning_specdec.bench.report.report import Report
from lightning_specdec.bench.report.tables import Column, Table, to_csv, to_markdown
from lightning_specdec.bench.results import Results, read

PICTURES = (
    *("speedup", "measured_predicted", "acceptance_window", "efficiency_window"),
    *("acceptance_temperature", "efficiency_temperature", "accepted_per_round", "acceptance_position"),
    *("latency_cdf", "time_breakdown", "speedup_batch"),
)
EVIL = "</script><script>alert(1)</script><b onclick=x>$\\frac{_%|`=\n"
BARE = {"format": 1, "name": "bare", "config": {}, "pairs": {}, "prompts": {}}
"""As little as a manifest can say."""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
)


def some_rows() -> list[Row]:
    """Two domains, windows 2 and 4 and auto, two temperatures, two sizes of batch, and a cell that failed."""
    rows = [standard(domain=domain) for domain in ("code", EVIL)]
    for domain, alpha in (("code", 0.3), (EVIL, 0.8)):
        for window in (2, 4):
            rounds = [drawn(alpha, window, seed) for seed in range(6)]
            rows.append(speculative(rounds, window=window, domain=domain))
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


@pytest.fixture(scope="module")
def made(results: Path) -> dict[str, Picture]:
    return {picture.name: picture for picture in Report.of(read(results)).pictures}


def pictures_of(rows: list[Row], **facts: Any) -> dict[str, Picture]:
    found = Report.of(Results(Path("made"), {"name": "made", "pairs": {"pair": facts}}, rows))
    return {picture.name: picture for picture in found.pictures}


def axes_of(picture: Picture, number: int = 0) -> Axes:
    return picture.panels[number].axes[0]


def data(line: Line2D) -> tuple[list[float], list[float]]:
    x, y = np.asarray(line.get_data(), dtype=float).tolist()
    return x, y


def legend(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def ticks(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def test_every_picture_is_there_with_its_drawings(page: str, results: Path, made: dict[str, Picture]) -> None:
    assert tuple(made) == PICTURES
    for name, picture in made.items():
        section = page.split(f'<section class="picture" id="{name}">')[1].split("</section>")[0]
        assert section.count("<svg ") == len(picture.panels) > 0
        for number, panel in enumerate(picture.panels, start=1):
            axes = panel.axes[0]
            assert axes.get_xlabel() and (axes.get_ylabel() or name == "time_breakdown")
            assert (results / "report" / f"{name}-{number}.png").read_bytes().startswith(b"\x89PNG")


def test_the_pictures_show_the_cells_figures(made: dict[str, Picture], results: Path) -> None:
    cells = Report.of(read(results)).cells
    code = {cell.num_draft_tokens: cell for cell in cells if cell.domain == "code" and cell.batch_size == 1}
    axes = axes_of(made["speedup"])
    speedup = code[4].walltime_speedup
    assert speedup and ticks(axes) == ["2", "4", "8", "auto"] and legend(axes) == ["draft (12.4k)"]
    bar: Any = axes.patches[1]
    assert bar.get_height() == pytest.approx(speedup.value)
    assert [text.get_text() for text in axes.texts] == ["failed"]
    (ends,) = axes.collections
    low, high = np.asarray(ends.get_paths()[1].vertices)[:, 1]
    assert (low, high) == pytest.approx((speedup.low, speedup.high))
    assert any(data(line)[1] == [1.0, 1.0] for line in axes.lines), "standard decoding"
    line, *_ = axes_of(made["acceptance_window"]).lines
    assert data(line)[1][1] == pytest.approx(code[4].acceptance_rate)
    for panel in made["accepted_per_round"].panels:
        assert all(sum(bar.get_height() for bar in bars) == pytest.approx(1) for bars in panel.axes[0].containers)
    for name in ("speedup_batch", "acceptance_temperature"):
        assert len(data(axes_of(made[name]).lines[0])[0]) == 2
    points = axes_of(made["measured_predicted"]).lines[3]
    (first, *_) = Report.of(read(results)).predictions
    assert tuple(each[0] for each in data(points)) == (first.predicted, first.measured.value)


def test_windows_that_adapt_are_not_joined_to_numbers(made: dict[str, Picture]) -> None:
    for name in ("acceptance_window", "efficiency_window"):
        axes = axes_of(made[name])
        place = ticks(axes).index("auto")
        (alone,) = [line for line in axes.lines if place in data(line)[0] and line.get_marker() != "None"]
        assert data(alone)[0] == [place] and alone.get_linestyle() == "None"


def test_every_picture_says_which_setting_it_shows(made: dict[str, Picture]) -> None:
    """A rule is named where it makes a difference: above temperature 0."""
    for name, picture in made.items():
        setting = "" if "temperature" in name else "temperature 0, "
        setting += "" if "batch" in name else "batch size 1, "
        setting = f"Shown: {setting}new tokens wanted: 48{', ExactMatch' if 'temperature' in name else ''}."
        setting = "Every temperature and rule" if name == "measured_predicted" else setting
        assert setting in picture.caption, (name, picture.caption)


def test_where_all_rules_are_lossy_the_pictures_show_one_and_say_so() -> None:
    lossy: dict[str, Any] = {"rule": "EpsilonThreshold", "lossless": False, "same_tokens": None}
    rows = [standard(), *(speculative([drawn(0.5, w, 0)] * 6, window=w, **lossy) for w in (2, 4))]
    pictures = pictures_of(rows)
    for name in ("speedup", "acceptance_window", "accepted_per_round", "time_breakdown"):
        assert pictures[name].panels
        assert "EpsilonThreshold (lossy: no lossless rule was measured)" in pictures[name].caption
    both = pictures_of([*rows, speculative([drawn(0.5, 2, 0)] * 6, window=2)])["speedup"]
    assert ticks(axes_of(both)) == ["2"] and "lossy" not in both.caption


def test_the_ninth_draft_is_in_every_picture_and_looks_like_no_other() -> None:
    names = [f"draft {i}" for i in range(9)]
    rows = [standard(), *(speculative([drawn(0.5, 2, 0)] * 6, window=2, draft=name) for name in names)]
    pictures = pictures_of(rows)
    assert legend(axes_of(pictures["speedup"])) == legend(axes_of(pictures["acceptance_window"])) == names
    bars: list[Any] = list(axes_of(pictures["speedup"]).patches)
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in bars}
    lines = axes_of(pictures["acceptance_window"]).lines[:9]
    assert len(looks) == len({(line.get_color(), line.get_marker()) for line in lines}) == 9
    assert lines[8].get_color() == lines[0].get_color()
    domains = [standard(domain=name) for name in names]
    domains += [speculative([drawn(0.5, 2, 0)] * 6, window=2, domain=name) for name in names]
    for name in ("accepted_per_round", "acceptance_position"):
        shown = [label for panel in pictures_of(domains)[name].panels for label in legend(panel.axes[0])]
        assert [label for label in shown if label != "if independent"] == names


def test_a_domain_whose_widest_window_failed_is_shown_by_the_widest_that_did_not() -> None:
    rows = [speculative([drawn(0.5, w, 0)] * 6, window=w, domain=domain) for domain in ("code", "chat") for w in (2, 4)]
    rows[3] = row(domain="chat", num_draft_tokens=4, error="no memory")
    axes = axes_of(pictures_of(rows)["acceptance_position"])
    assert legend(axes) == ["code", "chat, window 2"] and [len(data(line)[0]) for line in axes.lines] == [4, 2]


def test_a_pair_that_rounds_has_one_warning_and_another_pair_one_for_each_cell() -> None:
    rounds = [drawn(0.5, 2, 0)] * 6
    rows = [standard(), *(speculative(rounds, window=w, same_tokens=False) for w in (2, 4)), speculative(rounds)]
    rows[3] |= {"num_draft_tokens": 1, "cell": "same"}
    for dtype, number in (("bfloat16", 1), ("float32", 2)):
        manifest = {"name": "made", "pairs": {"pair": {"dtype": dtype}}}
        warnings = Report.of(Results(Path("made"), manifest, rows)).warnings
        assert len(warnings) == number and all("`audit`" in line and dtype in line for line in warnings)
        assert ("in 2 of 3 cells" in warnings[0]) == (number == 1) != ("is not advised" in warnings[0])


def test_a_failed_cell_is_shown_with_its_error(page: str, results: Path) -> None:
    assert 'class="failed"' in page and "RuntimeError: " in page.split('id="warnings"')[1].split("</section>")[0]
    table = list(csv.DictReader(io.StringIO((results / "report" / "cells.csv").read_text())))
    (failed,) = [each for each in table if each["error"]]
    assert (failed["window"], failed["walltime speedup"]) == ("8", "")


def test_a_cell_without_a_prediction_says_why(page: str) -> None:
    told = re.findall(r"<p>No prediction of (.*?)\.</p>", page)
    assert told == [
        "1 cell: the window adapts to what it meets",
        "1 cell: there are no other prompts to take alpha from",
        "1 cell: isolated calls are of one row, not of a batch",
    ]
    untimed = manifest_of({("draft", "code"): 0.3}) | {
        "calls": {"pair": {"draft_step_seconds": {}, "error": "too short a context"}}
    }
    rows = [standard(), speculative([drawn(0.3, 4, seed) for seed in range(6)])]
    assert Report.of(Results(Path("made"), untimed, rows)).without_prediction == [
        "1 cell: no isolated calls were timed: too short a context"
    ]


def test_memory_is_shown_by_phase() -> None:
    peaks = ({"verify": 2_000_000, "draft": 3_000_000}, {"verify": 4_000_000, "draft": 1_000_000})
    rows = [{**standard(), "repeat": i, "peak_memory_bytes": each} for i, each in enumerate(peaks)]
    table = Report.of(Results(Path("made"), {"name": "made"}, rows)).tables["cells"]
    named = dict(zip((column.name for column in table.columns), table.rows[0], strict=True))
    assert named["peak memory, MB"] == named["peak memory in verify, MB"] == 4
    assert (named["peak memory in draft, MB"], named["peak memory in rest, MB"]) == (3, None)


def test_nothing_of_the_results_can_run_or_load(page: str) -> None:
    assert "<script>alert" not in page and "<b onclick" not in page
    assert html.escape("</script><script>alert(1)</script>") in page
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!#)[^"]', page)
    assert "default-src 'none'" in page


def test_the_drawings_take_their_colours_from_the_page(page: str) -> None:
    light, dark = PALETTE["light"], PALETTE["dark"]
    assert light.keys() == dark.keys() and len(set(light.values())) == len(light)
    for drawing in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) <= {"#000000"}  # what matplotlib paints in no colour of ours
    for name in light:
        assert f"--{name}: {light[name]}" in page and f"--{name}: {dark[name]}" in page


@pytest.mark.parametrize(
    "rows", [[], [row(error="no memory")], [standard()]], ids=["empty", "failed", "standard alone"]
)
def test_results_without_figures_still_give_a_page(rows: list[Row], tmp_path: Path) -> None:
    directory = write_results(tmp_path / "r", BARE, rows)
    (stale := tmp_path / "out" / "speedup-2.png").parent.mkdir()
    stale.write_bytes(b"of earlier results")
    succeed("report", str(directory), "--output", str(tmp_path / "out"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert tuple(re.findall(r'<section class="picture" id="(\w+)">', page)) == PICTURES and not stale.exists()
    for section in page.split('<section class="picture"')[1:]:
        assert "<svg " in section or re.search(r"<p>(No|Only one) .*</p>", section)
    assert ("no memory" in page) == (len(rows) == 1 and rows[0]["error"] is not None)


def test_the_page_names_all_that_a_run_was_resumed_with(tmp_path: Path) -> None:
    later = {"commit": "b2", "torch": "2.9", "date": "2020-01-02"}
    directory = write_results(tmp_path / "r", manifest_of({}, commit="a1", torch="2.8", resumed=[later]), [])
    succeed("report", str(directory))
    page = (directory / "report" / "report.html").read_text()
    assert "torch 2.8, then 2.9, commit a1, then b2, 2020-01-01" in page.split('class="machine">')[1].split("</p>")[0]


def test_an_interval_that_says_nothing_is_a_dash_and_flattens_no_picture() -> None:
    """Two repeats of one prompt, one of them ten times as slow."""
    rows = [standard(prompts=1, drift=drift, repeat=i) for i, drift in enumerate((1.0, 1.0))]
    rows += [speculative([drawn(0.5, 4, 0)], drift=drift, repeat=i) for i, drift in enumerate((1.0, 10.0))]
    made = Report.of(Results(Path("made"), {"name": "made"}, rows))
    table = made.tables["cells"]
    places = [[column.name for column in table.columns].index(name) for name in ("walltime speedup", "from", "to")]
    value, *ends = (table.rows[1][place] for place in places)
    assert isinstance(value, float) and ends == [None, None]
    calm = [standard(repeat=i) for i in range(2)] + [speculative([drawn(0.5, 4, s) for s in range(6)], repeat=0)]
    for found, most in ((rows, 2.0), (calm, 2.0)):
        made = Report.of(Results(Path("made"), {"name": "made"}, found))
        highest = next(cell.walltime_speedup.value for cell in made.cells if cell.walltime_speedup)
        assert axes_of(made.pictures[0]).get_ylim()[1] <= most * max(highest, 1.0)


def test_tables_escape_what_other_programs_would_read() -> None:
    table = Table((Column("a|b"), Column("c"), Column("empty")), (("=1+1", 0.5, None), ("x|<b>\n`", None, None)))
    assert next(csv.reader(io.StringIO(to_csv(table).split("\n", 1)[1]))) == ["'=1+1", "0.5", ""]
    lines = to_markdown(table).splitlines()
    assert lines[2:] == ["| =1+1 | 0.50 |", "| x\\|&lt;b&gt; \\` | - |"]


def test_the_verb_says_the_answer_and_where_the_page_is(said: Outcome, results: Path) -> None:
    lines = said.out.splitlines()
    assert lines[0].startswith("pair (temperature 0, batch size 1, 48 new tokens): use draft model with 2 tokens: ")
    assert lines[1].startswith("pair (temperature 0.5, batch size 1, 48 new tokens): ")
    assert lines[-1] == f"report: {results / 'report' / 'report.html'}"
    assert said.err.startswith("warning: failed: pair, speculative, draft, window 8, ExactMatch, code")


def test_bad_input_of_the_verb_is_one_line(tmp_path: Path) -> None:
    other = write_results(tmp_path / "other", {"format": 99}, [])
    blocked = write_results(tmp_path / "blocked", BARE, [])
    (blocked / "report").write_text("a file where the directory should be")
    for arguments, message in (
        (["nowhere"], "holds no results"),
        ([str(other)], "results of format 99"),
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
  const page = frame.contentDocument, root = page.documentElement, sizes = {};
  for (const each of page.querySelectorAll("section.picture")) {
    const panels = each.querySelectorAll("figure").length;
    const shown = [...each.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().height > 50).length;
    sizes[each.id] = [panels, shown];
  }
  const out = [...page.querySelectorAll("main *")].filter(
    each => !each.closest(".scroll, pre, svg") && each.getBoundingClientRect().right > width + 1);
  const ground = light(getComputedStyle(page.body).backgroundColor);
  const words = "p, h1, h2, td, th, summary, svg text";
  const contrasts = [...page.querySelectorAll(words)].filter(
    each => each.textContent.trim() && !each.closest(".answer, .warning")).map(each => {
      const style = getComputedStyle(each), ink = light(each.closest("svg") ? style.fill : style.color);
      return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    });
  const small = [...page.querySelectorAll("svg text")].map(each => each.getBoundingClientRect().height).filter(Boolean);
  found[width] = {scroll: root.scrollWidth, out: out.map(each => each.outerHTML.slice(0, 80)), sizes,
                  smallest: Math.min(...small), ground, contrast: Math.min(...contrasts),
                  columns: getComputedStyle(page.querySelector(".panels"))
                  .gridTemplateColumns.split(" ").length};
  if (Object.keys(found).length == 2) document.body.innerHTML = "<pre id=found>" + JSON.stringify(found) + "</pre>";
}
</script>FRAMES</body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_in_a_browser(page: str, tmp_path: Path, theme: str) -> None:
    """Wide and narrow: no console error, all drawings there, nothing wider than the window, and all
    text to be told from its ground."""
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
        assert seen["scroll"] <= int(width) and seen["out"] == []
        assert tuple(seen["sizes"]) == PICTURES
        assert all(panels == shown > 0 for panels, shown in seen["sizes"].values())
        assert seen["smallest"] > 9 and seen["contrast"] >= 4.5
        assert (seen["ground"] < 0.1) == (theme == "dark")
    assert found["1400"]["columns"] == 3 and found["400"]["columns"] == 1
