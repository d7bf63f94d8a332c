"""The report's figures, drawn by matplotlib as SVG on a ground of their own, so that they read on any page."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from lightning_specdec.bench.rows import HUGGING_FACE, SPECULATIVE, Comparison, ResultRow
from lightning_specdec.report.answer import Advice, shown

INK, MUTED, GRID, FAILED, GROUND = "#1b1f24", "#5c6570", "#d9dee4", "#c2353b", "#fdfdfd"
COLORS = ("#1f6fb4", "#c85a08", "#1a8056", "#b5338a", "#6b56c8", "#856300", "#0a7d8c", "#7a4a2b")
GRAY = " Gray: transformers' own methods on the same model and prompts."
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
    "figure.facecolor": GROUND,
    "axes.facecolor": "none",
    "text.parse_math": False,
    "svg.fonttype": "none",
}
_STYLE |= dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK)


@dataclass(frozen=True)
class Chart:
    """A figure, its title as text, and what its caption says besides."""

    title: str
    figure: Figure
    note: str = ""

    def svg(self) -> bytes:
        """The drawing, as a file of its own."""
        text = io.StringIO()
        with _styled():
            FigureCanvasSVG(self.figure).print_svg(
                text, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
            )
        return text.getvalue().encode()


def answer_chart(advice: Sequence[Advice], found: Sequence[Comparison]) -> Chart | None:
    """The best choice of each place as a bar with its interval, transformers' own methods below it; None without."""
    known = [(each.choice, each.best) for each in advice if each.best is not None]
    if not known:
        return None
    with _styled():
        figure, ends, note, y = Figure(layout="constrained"), [1.0], "", 0.0
        axes = figure.add_subplot()
        for title, (choice, best) in zip(
            _titles([best.case for _, best in known], "rule"), known, strict=True
        ):
            axes.text(0, y, _line(title, 64), fontweight="bold", va="center")
            theirs = [
                one
                for one in found
                if one.case.place == best.case.place and one.case.method in HUGGING_FACE
            ]
            named = [
                (choice, best, COLORS[0]),
                *((f"transformers' {one.case.label}", one, GRID) for one in theirs),
            ]
            for name, one, color in named:
                told = "failed" if one.walltime_speedup is None else shown(one.walltime_speedup)
                axes.text(0, y + 0.9, f"{_line(name, 48)}: {told}", va="center")
                if one.walltime_speedup is not None:
                    value, (low, high) = (
                        one.walltime_speedup.value,
                        one.walltime_speedup.ends or (1.0, 1.0),
                    )
                    ends.append(max(value, min(high, TALL * value)))
                    axes.barh(y + 1.7, value, 0.5, color=color)
                    note = GRAY if color == GRID else note
                    axes.vlines(1.0, y + 1.35, y + 2.05, color=INK, linewidth=1)
                    axes.hlines(y + 1.7, low, min(high, TALL * value), color=INK, linewidth=1)
                y += 1.8
            y += 1.5
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_ylim(y - 0.8, -0.7)
        axes.set_xlim(0, 1.05 * max(ends))
        axes.set_xlabel("walltime speedup (1: standard decoding)")
        figure.set_size_inches(WIDTH, 0.6 + 0.16 * y)
        return Chart(
            "The best choices" + ", and transformers' own methods" * bool(note), figure, note
        )


def speedup_charts(found: Sequence[Comparison]) -> list[Chart]:
    """Measured and predicted speedups by window, a chart for each pair, setting and domain: a bar for each draft."""
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    for each in found:
        if each.case.method == SPECULATIVE:
            groups.setdefault((*each.case.place, each.case.rule), []).append(each)
    titles = _titles([several[0].case for several in groups.values()])
    return [
        _speedup_chart(title, several)
        for title, several in zip(titles, groups.values(), strict=True)
    ]


def _titles(cases: Sequence[ResultRow], *skip: str) -> list[str]:
    """Pair and domain of each case, and the settings in which the cases differ."""
    varying = [
        name
        for name in _SETTINGS
        if name not in skip and len({getattr(case, name) for case in cases}) > 1
    ]
    titles = []
    for case in cases:
        # At temperature 0 all lossless rules give the same tokens.
        named = [name for name in varying if name != "rule" or case.temperature]
        settings = [_SETTINGS[name].format(getattr(case, name)) for name in named]
        titles.append(f"{case.pair}: {', '.join([case.domain, *settings])}")
    return titles


_SETTINGS = {
    "temperature": "temperature {:g}",
    "batch_size": "batch size {}",
    "max_new_tokens": "{} new tokens",
    "rule": "{}",
}


def _speedup_chart(title: str, cases: Sequence[Comparison]) -> Chart:
    """Windows on the x axis: numbers in order, then "auto"."""
    windows = sorted(
        {each.case.num_draft_tokens or 0 for each in cases}, key=lambda w: (isinstance(w, str), w)
    )
    drafts = list(dict.fromkeys(each.case.draft for each in cases))
    highest = max(
        (each.walltime_speedup.value for each in cases if each.walltime_speedup), default=1.0
    )
    with _styled():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(_line(title, 64), loc="left", fontweight="bold")
        axes.set_xlabel("window (draft tokens)")
        axes.set_ylabel("walltime speedup")
        width = 0.8 / len(drafts)
        for number, draft in enumerate(drafts):
            own = [each for each in cases if each.case.draft == draft]
            offset = (number - (len(drafts) - 1) / 2) * width
            places = [windows.index(each.case.num_draft_tokens or 0) + offset for each in own]
            heights = [
                each.walltime_speedup.value if each.walltime_speedup else 0.0 for each in own
            ]
            color, hatch = COLORS[number % len(COLORS)], "//" if number >= len(COLORS) else None
            axes.bar(places, heights, width, color=color, hatch=hatch, label=_line(str(draft)))
            for x, each in zip(places, own, strict=True):
                interval, predicted = each.walltime_speedup, each.predicted_speedup
                if interval is None:
                    axes.text(
                        x,
                        0.03 * highest,
                        "failed",
                        color=FAILED,
                        rotation=90,
                        ha="center",
                        va="bottom",
                    )
                elif not math.isnan(interval.low):
                    axes.vlines(
                        x, interval.low, min(interval.high, TALL * highest), color=INK, linewidth=1
                    )
                if interval and predicted:
                    axes.plot(
                        [x], [predicted], "D", markersize=3.5, color="white", markeredgecolor=INK
                    )
        axes.plot(
            [], [], "D", markersize=3.5, color="white", markeredgecolor=INK, label="predicted"
        )
        axes.axhline(1.0, color=INK, linewidth=1)
        axes.grid(axis="y")
        axes.set_xticks(range(len(windows)), list(map(str, windows)))
        axes.set_xlim(-0.5, len(windows) - 0.5)
        axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
        handles, labels = axes.get_legend_handles_labels()
        columns = max(1, min(4, 58 // (4 + max(map(len, labels), default=0))))
        figure.set_figheight(HEIGHT + 0.17 * math.ceil(len(labels) / columns))
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=columns,
            handlelength=1.8,
            columnspacing=1.2,
        )
        return Chart(title, figure)


@contextmanager
def _styled() -> Iterator[None]:
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font"
        )  # names may be of any script
        yield


def _line(text: str, longest: int = 30) -> str:
    """Printable text on one line; matplotlib leaves names out of a legend that begin with an underscore."""
    plain = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    plain = plain if len(plain) <= longest else plain[: longest - 1] + "…"
    return f" {plain}" if plain.startswith("_") else plain
