"""The report's figures, drawn by matplotlib as SVG on a ground of their own, so that they read on any page."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from lightning_specdec.bench.rows import SPECULATIVE, Comparison
from lightning_specdec.bench.statistics import Interval
from lightning_specdec.report.prediction import TOLERANCE, Prediction

INK, MUTED, GRID, FAILED = "#1b1f24", "#5c6570", "#d9dee4", "#c2353b"
COLORS = ("#1f6fb4", "#c85a08", "#1a8056", "#b5338a", "#6b56c8", "#856300", "#0a7d8c", "#7a4a2b")
WIDTH, HEIGHT = 4.6, 2.9
TALL = 2.0
"""Error bars end at this multiple of the highest value, so that one does not flatten all others."""
_STYLE: Any = {
    "font.size": 8.5,
    "axes.titlesize": 9.0,
    "axes.edgecolor": MUTED,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "#fdfdfd",
    "axes.facecolor": "none",
    "text.parse_math": False,
    "svg.fonttype": "none",
}
_STYLE |= dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK)


@dataclass(frozen=True)
class Chart:
    """A figure, and its title as text."""

    title: str
    figure: Figure

    def svg(self) -> bytes:
        """The drawing, as a file of its own."""
        text = io.StringIO()
        with _styled():
            FigureCanvasSVG(self.figure).print_svg(text, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return text.getvalue().encode()


def speedup_charts(found: Sequence[Comparison], manifest: Mapping[str, Any]) -> list[Chart]:
    """Speedups by window, a chart for each pair, setting and domain: a bar for each draft, with its interval."""
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    for each in found:
        if each.case.method == SPECULATIVE:
            groups.setdefault((each.case.place, each.case.rule), []).append(each)
    several = {
        name: len({getattr(each.case, name) for each in found if each.case.method == SPECULATIVE}) > 1
        for name in _SETTINGS
    }
    charts = []
    for cases in groups.values():
        case = cases[0].case
        # At temperature 0 all lossless rules give the same tokens.
        named = [name for name in _SETTINGS if several[name] and (name != "rule" or case.temperature)]
        settings = [_SETTINGS[name].format(getattr(case, name)) for name in named]
        sizes = ((manifest.get("pairs") or {}).get(case.pair) or {}).get("draft_parameters") or {}
        charts.append(_speedup_chart(f"{case.pair}: {', '.join([case.domain, *settings])}", cases, sizes))
    return charts


_SETTINGS = {
    "temperature": "temperature {:g}",
    "batch_size": "batch size {}",
    "max_new_tokens": "{} new tokens",
    "rule": "{}",
}


def _speedup_chart(title: str, cases: Sequence[Comparison], sizes: Mapping[str, int | None]) -> Chart:
    """Windows on the x axis: numbers in order, then "auto"."""
    windows = sorted({each.case.num_draft_tokens or 0 for each in cases}, key=lambda w: (isinstance(w, str), w))
    drafts = list(dict.fromkeys(each.case.draft for each in cases))
    highest = max((each.walltime_speedup.value for each in cases if each.walltime_speedup), default=1.0)
    with _styled():
        axes = _axes(title, "window (draft tokens)", "walltime speedup")
        width = 0.8 / len(drafts)
        for number, draft in enumerate(drafts):
            offset = (number - (len(drafts) - 1) / 2) * width
            own = [
                (windows.index(each.case.num_draft_tokens or 0) + offset, each)
                for each in cases
                if each.case.draft == draft
            ]
            timed = [(x, each.walltime_speedup) for x, each in own if each.walltime_speedup]
            size = sizes.get(str(draft))
            label = _line(f"{draft} ({_count(size)})" if size else str(draft))
            color, hatch = COLORS[number % len(COLORS)], "//" if number >= len(COLORS) else None
            heights = [interval.value for _, interval in timed]
            axes.bar([x for x, _ in timed], heights, width, color=color, hatch=hatch, label=label)
            _error_bars(axes, timed, highest)
            for x, each in own:
                if each.error is not None and not each.walltime_speedup:
                    axes.text(x, 0.03 * highest, "failed", color=FAILED, rotation=90, ha="center", va="bottom")
        axes.axhline(1.0, color=INK, linewidth=1)
        axes.grid(axis="y")
        axes.set_xticks(range(len(windows)), list(map(str, windows)))
        axes.set_xlim(-0.5, len(windows) - 0.5)
        axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
        return Chart(title, _finished(axes))


def prediction_charts(found: Sequence[Prediction]) -> list[Chart]:
    """Measured against predicted speedups, a chart for each pair."""
    charts = []
    for pair in dict.fromkeys(each.measured.case.pair for each in found):
        own = [each for each in found if each.measured.case.pair == pair]
        points = [(each.predicted, each.measured.walltime_speedup) for each in own if each.measured.walltime_speedup]
        top = 1.05 * max(max(x, interval.value) for x, interval in points)
        with _styled():
            axes = _axes(pair, "predicted speedup", "measured speedup")
            axes.plot([0, top], [0, top], "--", color=INK, linewidth=1, label="exact")
            axes.plot([0, top], [0, top / (1 + TOLERANCE)], ":", color=MUTED, linewidth=1, label=f"{TOLERANCE:.0%} off")
            axes.plot([0, top], [0, top / (1 - TOLERANCE)], ":", color=MUTED, linewidth=1)
            for number, draft in enumerate(dict.fromkeys(each.measured.case.draft for each in own)):
                theirs = [point for each, point in zip(own, points, strict=True) if each.measured.case.draft == draft]
                color, label = COLORS[number % len(COLORS)], _line(str(draft))
                axes.plot(
                    [x for x, _ in theirs], [y.value for _, y in theirs], "o", markersize=4, color=color, label=label
                )
                _error_bars(axes, theirs, top, color)
            axes.grid()
            axes.set_xlim(0, top)
            axes.set_ylim(0, 1.1 * top)
            charts.append(Chart(pair, _finished(axes)))
    return charts


@contextmanager
def _styled() -> Iterator[None]:
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names may be of any script
        yield


def _axes(title: str, xlabel: str, ylabel: str) -> Axes:
    axes = Figure(figsize=(WIDTH, HEIGHT), layout="constrained").add_subplot()
    axes.set_title(_line(title, 64), loc="left", fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return axes


def _finished(axes: Axes) -> Figure:
    """The figure, with a legend below the axes."""
    figure, (handles, labels) = axes.get_figure(root=True), axes.get_legend_handles_labels()
    assert figure is not None
    columns = max(1, min(4, 58 // (4 + max(map(len, labels), default=0))))
    figure.set_figheight(HEIGHT + 0.17 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=1.8, columnspacing=1.2)
    return figure


def _error_bars(axes: Axes, points: Sequence[tuple[float, Interval]], highest: float, color: str = INK) -> None:
    """Intervals, cut at a multiple of the highest value; none where a single value shows no spread."""
    for x, interval in points:
        if not math.isnan(interval.low):
            axes.vlines(x, interval.low, min(interval.high, TALL * highest), color=color, linewidth=1)


def _count(number: int) -> str:
    """A number of parameters, as 12.4k for 12,352."""
    unit, letter = next((each for each in ((10**9, "B"), (10**6, "M"), (10**3, "k")) if number >= each[0]), (1, ""))
    return f"{number / unit:.3g}{letter}"


def _line(text: str, longest: int = 30) -> str:
    """Printable text on one line; matplotlib leaves names out of a legend that begin with an underscore."""
    plain = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    plain = plain if len(plain) <= longest else plain[: longest - 1] + "…"
    return f" {plain}" if plain.startswith("_") else plain
