"""The report's figures, drawn by matplotlib as SVG whose colours a page chooses, and as PNG."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from lightning_specdec.bench import theory
from lightning_specdec.bench.config_entries import STANDARD
from lightning_specdec.bench.report.analysis import MeasuredCell
from lightning_specdec.bench.report.figure_data import FigureData, captioned
from lightning_specdec.bench.report.prediction import TOLERANCE, Prediction
from lightning_specdec.bench.statistics import Interval, percentiles
from lightning_specdec.inference import PHASES

_NAMES = ("s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "ink", "muted", "grid", "paper")
_LIGHT = "#1f6fb4 #c85a08 #1a8056 #b5338a #6b56c8 #856300 #0a7d8c #c2353b #1b1f24 #5c6570 #d9dee4 #fefefe"
_DARK = "#6cb1ef #f59a4a #56c596 #ea83c4 #a99bf2 #d9b13f #4cc9d8 #f2797e #e6e8eb #9aa4b0 #333a43 #14171b"
PALETTE = {theme: dict(zip(_NAMES, c.split(), strict=True)) for theme, c in (("light", _LIGHT), ("dark", _DARK))}
"""Colours by their names, of a light and of a dark page."""
COLORS = PALETTE["light"]
NUM_COLORS = 8
"""Series with a colour of their own; the ninth has the first's, and another mark."""
PHASE_COLORS = {"draft": COLORS["s2"], "verify": COLORS["s1"], "accept": COLORS["s3"], "rest": COLORS["muted"]}
MARKERS = "osD^vPX*"
WIDTH, HEIGHT, DPI = 4.4, 2.9, 130
LETTERS = 58
"""Of a legend's line, about."""
TALL = 2.0
"""So many times as high as the highest value an error bar may reach, so that it does not flatten all others."""
NOTHING = "No cell with these figures has finished."
WINDOW_AXIS = "window (draft tokens)"
SPEEDUP_AXIS = "walltime speedup (x)"
_INK = dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), COLORS["ink"])
_STYLE: Any = _INK | {
    "font.size": 8.5,
    "font.family": "sans-serif",
    "axes.titlesize": 9.0,
    "axes.labelsize": 8.5,
    "axes.edgecolor": COLORS["muted"],
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": COLORS["grid"],
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "text.parse_math": False,
    "svg.fonttype": "none",
}
Points = Mapping[Any, Interval]
"""Values by their places on the x axis; NaN as ends where there is no interval."""


@dataclass(frozen=True)
class Picture:
    """Panels under one title; `missing` says why there are none."""

    name: str
    title: str
    caption: str
    panels: Sequence[Figure]
    missing: str = NOTHING


def pictures(cells: Sequence[MeasuredCell], manifest: Mapping[str, Any], found: Sequence[Prediction]) -> list[Picture]:
    """All figures, in the order of the report."""
    data = FigureData.by_pair(cells, manifest)
    with _styled():
        return [
            _speedups(data),
            _predicted(data, found),
            _over_windows(data, "acceptance_window", "Acceptance rate against the window", _ACCEPTANCE),
            _over_windows(data, "efficiency_window", "Block efficiency against the window", _EFFICIENCY),
            _over(data, "acceptance_temperature", "Acceptance rate against temperature", "temperature", _ACCEPTANCE),
            _over(data, "efficiency_temperature", "Block efficiency against temperature", "temperature", _EFFICIENCY),
            _accepted_per_round(data),
            _by_position(data),
            _latencies(data),
            _time_by_phase(data),
            _over(data, "speedup_batch", "Speedup against the batch size", "batch_size", _SPEEDUP),
        ]


def draw(figure: Figure, *, salt: str) -> tuple[str, bytes]:
    """A figure as SVG for a page that defines the palette's names as CSS variables, and as PNG in the light theme.

    Args:
        salt: of the names inside the SVG, which two drawings of a page must not share.
    """
    svg, png = io.StringIO(), io.BytesIO()
    with _styled() as style:
        style["svg.hashsalt"] = salt
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout is found: neither format needs to find it again
        figure.patch.set_alpha(0)
        FigureCanvasSVG(figure).print_svg(svg, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        figure.patch.set(alpha=1, facecolor=COLORS["paper"])
        figure.set_dpi(DPI)
        FigureCanvasAgg(figure).print_png(png)
    names = {color: f"var(--{name})" for name, color in COLORS.items()}
    text = svg.getvalue()
    return re.sub("|".join(names), lambda color: names[color[0]], text[text.index("<svg") :].strip()), png.getvalue()


@contextmanager
def _styled() -> Iterator[Any]:
    with matplotlib.rc_context({**_STYLE}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names may be of any script
        yield matplotlib.rcParams


# --- speedups ---


def _speedups(data: Sequence[FigureData]) -> Picture:
    panels = []
    for each in data:
        for domain in each.domains:
            windows = _values(each.at(domain=domain), "num_draft_tokens")
            if windows:
                panels.append(_bars_of_speedups(each, domain, windows))
    text = (
        "Seconds of standard decoding / of speculation for as many tokens, with the 95% interval; above the line at 1 "
        "speculation is faster."
    )
    return Picture("speedup", "Speedup by window", captioned(text, data), panels)


def _bars_of_speedups(data: FigureData, domain: str, windows: Sequence[int | str]) -> Figure:
    axes = _axes(f"{data.pair}: {domain}", WINDOW_AXIS, SPEEDUP_AXIS)
    cells = data.at(domain=domain)
    highest = max((cell.walltime_speedup.value for cell in cells if cell.walltime_speedup), default=1.0)
    width = 0.8 / len(data.drafts)
    error_style = {"color": COLORS["ink"], "ecolor": COLORS["ink"], "elinewidth": 1, "capsize": 2}
    for number, draft in enumerate(data.drafts):
        offset = (number - (len(data.drafts) - 1) / 2) * width
        own = [(windows.index(c.num_draft_tokens or 0) + offset, c) for c in cells if c.draft == draft]
        timed = {x: cell.walltime_speedup for x, cell in own if cell.walltime_speedup}
        axes.bar(
            list(timed),
            [interval.value for interval in timed.values()],
            width,
            yerr=_errors(axes, list(timed.values()), highest),
            error_kw=error_style,
            color=_color(number),
            hatch="//" if number >= NUM_COLORS else None,
            label=_cut(data.label(draft)),
        )
        for x, cell in own:
            if cell.error is not None and not cell.walltime_speedup:
                axes.text(x, 0.03 * highest, "failed", color=COLORS["s8"], rotation=90, ha="center", va="bottom")
    axes.axhline(1.0, color=COLORS["ink"], linewidth=1)
    axes.grid(visible=False, axis="x")
    axes.set_xticks(range(len(windows)), list(map(str, windows)))
    axes.set_xlim(-0.5, len(windows) - 0.5)
    axes.set_ylim(bottom=0)
    return _with_legend(axes)


def _predicted(data: Sequence[FigureData], found: Sequence[Prediction]) -> Picture:
    panels = []
    for each in data:
        shown = [prediction for prediction in found if prediction.cell.pair == each.pair]
        if not shown:
            continue
        top = 1.05 * max(max(prediction.predicted, prediction.measured.value) for prediction in shown)
        axes = _axes(each.pair, "predicted speedup (x)", "measured speedup (x)")
        axes.plot([0, top], [0, top], "--", color=COLORS["ink"], label="exact")
        axes.plot([0, top], [0, top / (1 + TOLERANCE)], "--", color=COLORS["muted"], label=f"{TOLERANCE:.0%} off")
        axes.plot([0, top], [0, top / (1 - TOLERANCE)], "--", color=COLORS["muted"])
        for number, draft in enumerate(each.drafts):
            points = [(each.predicted, each.measured) for each in shown if each.cell.draft == draft]
            _points_with_intervals(axes, points, number, each.label(draft), "none", top)
        axes.set_ylim(0, 1.1 * top)
        panels.append(_with_legend(axes))
    caption = (
        "Predicted from the acceptance on other prompts and from isolated calls; above the line speculation was faster "
        "than predicted. Every temperature and rule, fixed windows, one prompt at a time."
    )
    missing = "No prediction could be made: see the reasons under the tables."
    return Picture("measured_predicted", "Measured beside predicted speedup", caption, panels, missing)


# --- one figure against a setting ---


@dataclass(frozen=True)
class _Measure:
    """A figure of a cell, as an axis shows it.

    Args:
        formula: in words.
        reference: what standard decoding has.
    """

    label: str
    formula: str
    read: Callable[[MeasuredCell], float | Interval | None]
    limits: tuple[float, float] | None = None
    reference: float | None = None


_ACCEPTANCE = _Measure("acceptance rate", "Accepted / tested tokens.", lambda cell: cell.acceptance_rate, (-0.02, 1.04))
_EFFICIENCY = _Measure("tokens / round", "New tokens / rounds.", lambda cell: cell.block_efficiency, reference=1.0)
_SPEEDUP = _Measure(
    SPEEDUP_AXIS,
    "Seconds of standard decoding / of speculation for as many tokens.",
    lambda cell: cell.walltime_speedup,
    reference=1.0,
)


def _over_windows(data: Sequence[FigureData], name: str, title: str, measure: _Measure) -> Picture:
    panels = []
    for each in data:
        for domain in each.domains:
            cells = {draft: each.at(domain=domain, draft=draft) for draft in each.drafts}
            series = {each.label(draft): _points(own, "num_draft_tokens", measure) for draft, own in cells.items()}
            panels += _lines(f"{each.pair}: {domain}", WINDOW_AXIS, measure, series)
    text = f"{measure.formula} One line for each draft, its parameters in brackets; auto adapts its windows."
    return Picture(name, title, captioned(text, data), panels)


def _over(data: Sequence[FigureData], name: str, title: str, key: str, measure: _Measure) -> Picture:
    """A figure against temperature or batch size, each draft with a window that was measured at several of them."""
    panels: list[Figure] = []
    axis = key.replace("_", " ")
    for each in data:
        if len(_values(each.at(**{key: ...}), key)) < 2:
            continue
        for domain in each.domains:
            series = {}
            for draft in each.drafts:
                cells = each.at(draft=draft, domain=domain, **{key: ...})
                window = _most_measured(cells, each.best_window(draft))
                chosen = [cell for cell in cells if cell.num_draft_tokens == window]
                series[f"{each.label(draft)}, window {window}"] = _points(chosen, key, measure)
            panels += _lines(f"{each.pair}: {domain}", axis, measure, series)
    text = f"{measure.formula} Each draft with its fastest window among those measured at most of these."
    return Picture(name, title, captioned(text, data, key), panels, f"Only one {axis} was measured.")


def _lines(title: str, xlabel: str, measure: _Measure, series: Mapping[str, Points]) -> list[Figure]:
    """One panel, or none where no series has a point; a line joins numbers, a word stands by itself."""
    values = _sorted({value for points in series.values() for value in points})
    if not values:
        return []
    axes = _axes(title, xlabel, measure.label)
    highest = max(interval.value for points in series.values() for interval in points.values())
    for number, (name, points) in enumerate(series.items()):
        label = name
        for words in (False, True):
            own = [value for value in values if value in points and isinstance(value, str) == words]
            if own:
                placed = [(float(values.index(value)), points[value]) for value in own]
                _points_with_intervals(axes, placed, number, label, "none" if words else "-", highest)
                label = ""
    if measure.reference is not None:
        axes.axhline(measure.reference, color=COLORS["muted"], linewidth=1, linestyle=":")
    if measure.limits is not None:
        axes.set_ylim(*measure.limits)
    axes.set_xticks(range(len(values)), [v if isinstance(v, str) else f"{v:g}" for v in values])
    axes.set_xlim(-0.3, len(values) - 0.7)
    return [_with_legend(axes)]


def _points(cells: Sequence[MeasuredCell], key: str, measure: _Measure) -> Points:
    found = {getattr(cell, key): measure.read(cell) for cell in cells}
    return {
        at: each if isinstance(each, Interval) else Interval(each, math.nan, math.nan)
        for at, each in found.items()
        if each is not None
    }


def _most_measured(cells: Sequence[MeasuredCell], best: int | str | None) -> int | str | None:
    """The window with the most cells; of several such the best one, or the first."""
    windows = [cell.num_draft_tokens for cell in cells if cell.rows]
    return max(windows, key=lambda window: (windows.count(window), window == best), default=best)


def _values(cells: Iterable[MeasuredCell], key: str) -> list[Any]:
    return _sorted({value for cell in cells if (value := getattr(cell, key)) is not None})


def _sorted(values: Iterable[Any]) -> list[Any]:
    """Numbers in rising order, then words."""
    return sorted(values, key=lambda value: (isinstance(value, str), value))


# --- rounds and their time ---


def _accepted_per_round(data: Sequence[FigureData]) -> Picture:
    panels = []
    for each in data:
        for draft in each.drafts:
            window = each.best_window(draft)
            found = [c for c in each.at(draft=draft, num_draft_tokens=window) if sum(c.summed("histogram"))]
            for first in range(0, len(found), NUM_COLORS):
                title = f"{each.pair}: {draft}, window {window}"
                panels.append(_histograms(title, found[first : first + NUM_COLORS]))
    text = (
        "How many draft tokens a round accepts, of each draft with its fastest window; ticks show what independent "
        "acceptance at the same rate would give. The last rounds of a text have shorter windows."
    )
    return Picture("accepted_per_round", "Accepted tokens per round", captioned(text, data), panels)


def _histograms(title: str, cells: Sequence[MeasuredCell]) -> Figure:
    axes = _axes(title, "accepted tokens of a round", "share of rounds")
    width, longest = 0.8 / len(cells), 0
    for number, cell in enumerate(cells):
        counts = cell.summed("histogram")
        offset = (number - (len(cells) - 1) / 2) * width
        shares = [count / sum(counts) for count in counts]
        axes.bar([i + offset for i in range(len(counts))], shares, width, color=_color(number), label=_cut(cell.domain))
        longest = max(longest, len(counts))
        if cell.acceptance_rate is not None and isinstance(cell.num_draft_tokens, int) and cell.max_new_tokens > 1:
            law = theory.accepted_distribution(
                cell.acceptance_rate, min(cell.num_draft_tokens, cell.max_new_tokens - 1)
            )
            x, label = [i + offset for i in range(len(law))], "" if number else "if independent"
            axes.plot(x, law, "_", color=COLORS["ink"], markersize=24 * width + 3, label=label)
            longest = max(longest, len(law))
    axes.set_xticks(range(longest))
    return _with_legend(axes)


def _by_position(data: Sequence[FigureData]) -> Picture:
    panels = []
    for each in data:
        for draft in each.drafts:
            widest: dict[str, tuple[int, list[float | None]]] = {}  # of each domain, among the windows that finished
            for cell in each.at(draft=draft):
                window = cell.num_draft_tokens if isinstance(cell.num_draft_tokens, int) else 0
                if any(rate is not None for rate in cell.rates) and window > widest.get(cell.domain, (0,))[0]:
                    widest[cell.domain] = (window, cell.rates)
            most = max((window for window, _ in widest.values()), default=0)
            for first in range(0, len(widest), NUM_COLORS):
                axes = _axes(
                    f"{each.pair}: {draft}, window {most}", "position in the window", "accepted / tested there"
                )
                for number, (domain, (window, rates)) in enumerate(list(widest.items())[first : first + NUM_COLORS]):
                    label = _cut(domain if window == most else f"{domain}, window {window}")
                    known = [math.nan if rate is None else rate for rate in rates]
                    x = range(1, len(known) + 1)
                    axes.plot(x, known, marker=_marker(number), color=_color(number), label=label)
                axes.set_xticks(range(1, most + 1))
                axes.set_ylim(-0.02, 1.04)
                panels.append(_with_legend(axes))
    text = (
        "Given that all draft tokens before were accepted; the widest window that finished. A level line means that "
        "acceptance is independent of position."
    )
    return Picture("acceptance_position", "Acceptance by position", captioned(text, data), panels)


def _methods(data: FigureData, domain: str) -> list[tuple[str, str, MeasuredCell]]:
    """Standard decoding, then each draft with its fastest window: label, colour, cell."""
    found = [("standard", COLORS["ink"], cell) for cell in data.at(domain=domain, way=STANDARD)]
    for number, draft in enumerate(data.drafts):
        window = data.best_window(draft)
        cells = data.at(domain=domain, draft=draft, num_draft_tokens=window)
        found += [(f"{draft}, window {window}", _color(number), cell) for cell in cells]
    return [each for each in found if each[2].rows]


def _latencies(data: Sequence[FigureData]) -> Picture:
    panels = []
    shares = [*(i / 100 for i in range(100)), 0.999]
    for each in data:
        for domain in each.domains:
            timed = [(label, color, cell.gaps) for label, color, cell in _methods(each, domain) if cell.gaps]
            if timed:
                axes = _axes(f"{each.pair}: {domain}", "time since the last token (ms)", "share of tokens")
                for number, (label, color, gaps) in enumerate(timed):
                    x = percentiles([1000 * gap for gap in gaps], shares)
                    dash = "--" if number > NUM_COLORS else "-"
                    axes.step(x, shares, where="post", color=color, linestyle=dash, label=_cut(label))
                axes.set_ylim(-0.02, 1.04)
                panels.append(_with_legend(axes))
    text = (
        "Share of tokens that came within so many milliseconds of the one before; a round's tokens come together, at "
        "0. The slowest token in a thousand is left out, and so is each prompt's first. Each draft with its fastest "
        "window."
    )
    return Picture("latency_cdf", "Time per token, cumulative", captioned(text, data), panels)


def _time_by_phase(data: Sequence[FigureData]) -> Picture:
    """Horizontal bars, the first one on top, each made of all phases."""
    panels = []
    for each in data:
        for domain in each.domains:
            timed = [(label, cell) for label, _, cell in _methods(each, domain) if cell.phase_seconds is not None]
            if timed:
                height = 1.17 + 0.34 * len(timed)
                axes = _axes(f"{each.pair}: {domain}", "time per new token (ms)", "", height=height)
                left = [0.0] * len(timed)
                for phase, color in PHASE_COLORS.items():
                    widths = [_milliseconds(cell, phase) for _, cell in timed]
                    axes.barh(range(len(timed)), widths, 0.66, left=left, color=color, label=phase)
                    left = [start + width for start, width in zip(left, widths, strict=True)]
                axes.grid(visible=False, axis="y")
                axes.set_yticks(range(len(timed)), [_cut(label) for label, _ in timed])
                axes.invert_yaxis()
                panels.append(_with_legend(axes))
    text = (
        "Where the time of a new token goes, reading the prompt included, the mean over the repeats; the phases add up "
        "to the whole. Each draft with its fastest window."
    )
    assert tuple(PHASE_COLORS) == tuple(PHASES)
    return Picture("time_breakdown", "Time by phase", captioned(text, data), panels)


def _milliseconds(cell: MeasuredCell, phase: str) -> float:
    """Of a phase for each new token."""
    tokens = (cell.total("num_new_tokens") or 0) / len(cell.rows)
    return 1000 * (cell.phase_seconds or {}).get(phase, 0.0) / tokens if tokens else 0.0


# --- what all figures share ---


def _axes(title: str, xlabel: str, ylabel: str, *, height: float = HEIGHT) -> Axes:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(_cut(title, 60), loc="left", fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return axes


def _with_legend(axes: Axes) -> Figure:
    """The figure, made higher by a legend below its axes."""
    figure, (handles, labels) = axes.get_figure(root=True), axes.get_legend_handles_labels()
    assert figure is not None
    columns = max(1, min(len(labels), 4, LETTERS // (4 + max(map(len, labels), default=0))))
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=1.8, columnspacing=1.2)
    return figure


def _points_with_intervals(
    axes: Axes, points: Sequence[tuple[float, Interval]], number: int, label: str, line: str, highest: float
) -> None:
    """A series by its places on the x axis, with intervals; its number gives its colour and mark."""
    x, intervals = [x for x, _ in points], [interval for _, interval in points]
    y, errors = [each.value for each in intervals], _errors(axes, intervals, highest)
    style: dict[str, Any] = {"linestyle": line, "marker": _marker(number), "color": _color(number)}
    axes.errorbar(x, y, errors, label=_cut(label), elinewidth=1, capsize=2, **style)


def _errors(axes: Axes, intervals: Sequence[Interval], highest: float) -> list[list[float]] | None:
    """How far the error bars reach down and up; one that leaves the picture is cut, and the picture ends there."""
    if all(math.isnan(each.low) for each in intervals):
        return None
    top = TALL * highest
    lows = [each.value if math.isnan(each.low) else each.low for each in intervals]
    highs = [each.value if math.isnan(each.low) else each.high for each in intervals]
    if any(high > top for high in highs):
        axes.set_ylim(top=top)
    down = [max(0.0, each.value - low) for each, low in zip(intervals, lows, strict=True)]
    return [down, [max(0.0, min(high, top) - each.value) for each, high in zip(intervals, highs, strict=True)]]


def _color(number: int) -> str:
    return COLORS[f"s{number % NUM_COLORS + 1}"]


def _marker(number: int) -> str:
    return MARKERS[(number + number // len(MARKERS)) % len(MARKERS)]


def _cut(text: str, most: int = 30) -> str:
    """A label on one line, not too long; matplotlib leaves out of legends what begins with an underscore."""
    plain = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    plain = plain if len(plain) <= most else plain[: most - 1] + "…"
    return f" {plain}" if plain.startswith("_") else plain
