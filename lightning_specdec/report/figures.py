"""The report's figures, drawn by matplotlib as SVG. Each has a background, so that it can be read
on any page."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from lightning_specdec.bench.records import HUGGING_FACE, SPECULATIVE, Comparison, Record
from lightning_specdec.report.answer import Advice, shown

INK = "#1b1f24"
MUTED = "#5c6570"
GRID = "#d9dee4"
FAILED = "#c2353b"
GROUND = "#fdfdfd"
COLORS = ("#1f6fb4", "#c85a08", "#1a8056", "#b5338a", "#6b56c8", "#856300", "#0a7d8c", "#7a4a2b")
GRAY = " Gray: transformers' own methods on the same model and prompts."
WIDTH = 4.6
"""Inches."""
HEIGHT = 2.9
"""Inches, without the legend."""
TALL = 2.0
"""Error bars end at this multiple of the highest value, so that one does not flatten all others."""

# Vertical distances in the chart of answers, in its own units.
_LABEL_OFFSET = 0.9
_BAR_OFFSET = 1.7
_BAR_HALF_HEIGHT = 0.35
_METHOD_HEIGHT = 1.8
_TITLE_HEIGHT = 1.5

_STYLE: Any = {
    "font.size": 8.5,
    "axes.titlesize": 9.0,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": MUTED,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": GROUND,
    "axes.facecolor": "none",
    "text.parse_math": False,
    "svg.fonttype": "none",
}
_PREDICTION_STYLE: Any = {
    "marker": "D",
    "linestyle": "none",
    "markersize": 3.5,
    "color": "white",
    "markeredgecolor": INK,
}
_SETTING_FORMATS = {
    "temperature": "temperature {:g}",
    "batch_size": "batch size {}",
    "max_new_tokens": "{} new tokens",
    "rule": "{}",
}


@dataclass(frozen=True)
class Chart:
    """A figure, its title as text, and a note for its caption."""

    title: str
    figure: Figure
    note: str = ""

    def svg(self) -> bytes:
        """The drawing as an SVG file."""
        text = io.StringIO()
        # Without dates and versions, equal results give equal files.
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with _styled():
            FigureCanvasSVG(self.figure).print_svg(text, metadata=no_metadata)
        return text.getvalue().encode()


@dataclass(frozen=True)
class _Bar:
    """A bar of the chart of answers, with its label; without a bar if nothing was measured."""

    label: str
    comparison: Comparison
    color: str

    @property
    def line_end(self) -> float:
        """Where the error bar ends on the right."""
        speedup = self.comparison.walltime_speedup
        if speedup is None:
            return 0.0
        _, high = speedup.ends or (1.0, 1.0)
        return min(high, TALL * speedup.value)


def answer_chart(advice: Sequence[Advice], comparisons: Sequence[Comparison]) -> Chart | None:
    """The best choice of each workload as a bar with its interval, with transformers' own methods
    below it; None if there is no choice."""
    answered = []
    best_cases = []
    for answer in advice:
        if answer.best is not None:
            answered.append((answer.choice, answer.best))
            best_cases.append(answer.best.case)
    if not answered:
        return None

    with _styled():
        figure = Figure(layout="constrained")
        axes = figure.add_subplot()
        right_end = 1.0
        has_baselines = False
        y = 0.0
        for title, (choice, best) in zip(_titles(best_cases, "rule"), answered, strict=True):
            axes.text(0, y, _line(title, 64), fontweight="bold", va="center")
            bars = [_Bar(choice, best, COLORS[0])]
            for comparison in comparisons:
                case = comparison.case
                if case.workload == best.case.workload and case.method in HUGGING_FACE:
                    bars.append(_Bar(f"transformers' {case.label}", comparison, GRID))

            for bar in bars:
                _draw_answer(axes, bar, y)
                speedup = bar.comparison.walltime_speedup
                if speedup is not None:
                    right_end = max(right_end, speedup.value, bar.line_end)
                    if bar.color == GRID:
                        has_baselines = True
                y += _METHOD_HEIGHT
            y += _TITLE_HEIGHT

        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_ylim(y - 0.8, -0.7)
        axes.set_xlim(0, 1.05 * right_end)
        axes.set_xlabel("walltime speedup (1: standard decoding)")
        figure.set_size_inches(WIDTH, 0.6 + 0.16 * y)

    if has_baselines:
        return Chart("The best choices, and transformers' own methods", figure, GRAY)
    return Chart("The best choices", figure)


def _draw_answer(axes: Axes, bar: _Bar, y: float) -> None:
    """Draw a method's label, and its bar below it."""
    speedup = bar.comparison.walltime_speedup
    result = "failed" if speedup is None else shown(speedup)
    axes.text(0, y + _LABEL_OFFSET, f"{_line(bar.label, 48)}: {result}", va="center")
    if speedup is None:
        return

    bar_y = y + _BAR_OFFSET
    axes.barh(bar_y, speedup.value, 0.5, color=bar.color)
    # The line of standard decoding.
    axes.vlines(1.0, bar_y - _BAR_HALF_HEIGHT, bar_y + _BAR_HALF_HEIGHT, color=INK, linewidth=1)
    low, _ = speedup.ends or (1.0, 1.0)
    axes.hlines(bar_y, low, bar.line_end, color=INK, linewidth=1)


def speedup_charts(comparisons: Sequence[Comparison]) -> list[Chart]:
    """Measured and predicted speedups by window: a chart for each pair, setting and domain, with a
    bar for each draft."""
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    for comparison in comparisons:
        case = comparison.case
        if case.method == SPECULATIVE:
            groups.setdefault((*case.workload, case.rule), []).append(comparison)

    titles = _titles([group[0].case for group in groups.values()])
    charts = []
    for title, group in zip(titles, groups.values(), strict=True):
        charts.append(_speedup_chart(title, group))
    return charts


def _titles(cases: Sequence[Record], *skipped_settings: str) -> list[str]:
    """Pair and domain of each case, and the settings in which the cases differ."""
    varying_settings = []
    for name in _SETTING_FORMATS:
        values = {getattr(case, name) for case in cases}
        if name not in skipped_settings and len(values) > 1:
            varying_settings.append(name)

    titles = []
    for case in cases:
        parts = [case.domain]
        for name in varying_settings:
            # At temperature 0 all lossless rules generate the same tokens.
            if name == "rule" and not case.temperature:
                continue
            parts.append(_SETTING_FORMATS[name].format(getattr(case, name)))
        titles.append(f"{case.pair}: {', '.join(parts)}")
    return titles


def _speedup_chart(title: str, comparisons: Sequence[Comparison]) -> Chart:
    """One chart: a group of bars for each window, a color for each draft."""
    windows = _windows_in_order(comparisons)
    comparisons_by_draft: dict[str | None, list[Comparison]] = {}
    for comparison in comparisons:
        comparisons_by_draft.setdefault(comparison.case.draft, []).append(comparison)
    num_drafts = len(comparisons_by_draft)
    bar_width = 0.8 / num_drafts
    speedups = [row.walltime_speedup.value for row in comparisons if row.walltime_speedup]
    highest = max(speedups, default=1.0)

    with _styled():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(_line(title, 64), loc="left", fontweight="bold")
        axes.set_xlabel("window (draft tokens)")
        axes.set_ylabel("walltime speedup")

        for draft_index, (draft, rows) in enumerate(comparisons_by_draft.items()):
            # The bars of a window stand side by side around its tick.
            offset = (draft_index - (num_drafts - 1) / 2) * bar_width
            positions = [windows.index(_window(row)) + offset for row in rows]
            _draw_bars(axes, draft_index, str(draft), rows, positions, bar_width)
            for x, row in zip(positions, rows, strict=True):
                _draw_marks(axes, x, row, highest)

        axes.plot([], [], label="predicted", **_PREDICTION_STYLE)
        axes.axhline(1.0, color=INK, linewidth=1)
        axes.grid(axis="y")
        axes.set_xticks(range(len(windows)), [str(window) for window in windows])
        axes.set_xlim(-0.5, len(windows) - 0.5)
        _, top = axes.get_ylim()
        axes.set_ylim(0, max(1.1, top))
        _add_legend(figure, axes)
        return Chart(title, figure)


def _window(comparison: Comparison) -> int | str:
    return comparison.case.num_draft_tokens or 0


def _windows_in_order(comparisons: Sequence[Comparison]) -> list[int | str]:
    """Numbers in order, then "auto"."""
    windows = {_window(comparison) for comparison in comparisons}
    return sorted(windows, key=lambda window: (isinstance(window, str), window))


def _draw_bars(
    axes: Axes,
    draft_index: int,
    draft: str,
    comparisons: Sequence[Comparison],
    positions: Sequence[float],
    bar_width: float,
) -> None:
    """Draw the bars of one draft."""
    heights = []
    for comparison in comparisons:
        speedup = comparison.walltime_speedup
        heights.append(0.0 if speedup is None else speedup.value)
    # Drafts beyond the colors repeat them, hatched.
    hatch = "//" if draft_index >= len(COLORS) else None
    color = COLORS[draft_index % len(COLORS)]
    axes.bar(positions, heights, bar_width, color=color, hatch=hatch, label=_line(draft))


def _draw_marks(axes: Axes, x: float, comparison: Comparison, highest: float) -> None:
    """Draw what belongs to one bar: its interval and prediction, or that it failed."""
    speedup = comparison.walltime_speedup
    if speedup is None:
        axes.text(x, 0.03 * highest, "failed", color=FAILED, rotation=90, ha="center", va="bottom")
        return
    if not math.isnan(speedup.low):
        axes.vlines(x, speedup.low, min(speedup.high, TALL * highest), color=INK, linewidth=1)
    if comparison.predicted_speedup:
        axes.plot([x], [comparison.predicted_speedup], **_PREDICTION_STYLE)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Add the legend below the chart, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    longest_label = max((len(label) for label in labels), default=0)
    # About 58 characters fit, and a handle takes 4.
    num_columns = max(1, min(4, 58 // (4 + longest_label)))
    num_lines = math.ceil(len(labels) / num_columns)
    figure.set_figheight(HEIGHT + 0.17 * num_lines)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=num_columns,
        handlelength=1.8,
        columnspacing=1.2,
    )


@contextmanager
def _styled() -> Iterator[None]:
    """Use the report's style, whatever the user's matplotlib settings."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Names may be of any script, and the page's own font shows them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _line(text: str, max_length: int = 30) -> str:
    """Printable text on one line."""
    line = " ".join(text.split())
    line = "".join(letter for letter in line if letter.isprintable())
    if len(line) > max_length:
        line = line[: max_length - 1] + "…"
    # matplotlib leaves labels that begin with an underscore out of a legend.
    if line.startswith("_"):
        line = f" {line}"
    return line
