"""Pictures drawn by matplotlib: as SVG whose colours a page chooses, and as PNG.

Each panel is a drawing of its own: a page lays them out for its width.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from lightning_specdec.bench.report.colors import palette
from lightning_specdec.bench.report.picture import Panel, Series

WIDTH, HEIGHT, DPI = 4.4, 2.9, 130
LETTERS = 58
"""Of a legend's line, about."""
MARKERS = "osD^vPX*"
TALL = 2.0
"""So many times as high as a picture's highest point an error bar may reach, so that it does not flatten them all."""


_LIGHT = palette("light")
_VARIABLES = {color: f"var(--{name})" for name, color in _LIGHT.items()}
_STYLE = {
    "font.size": 8.5,
    "font.family": "sans-serif",
    "axes.titlesize": 9.0,
    "axes.labelsize": 8.5,
    "legend.fontsize": 8.0,
    "axes.edgecolor": _LIGHT["muted"],
    "axes.labelcolor": _LIGHT["ink"],
    "text.color": _LIGHT["ink"],
    "xtick.color": _LIGHT["ink"],
    "ytick.color": _LIGHT["ink"],
    "grid.color": _LIGHT["grid"],
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "axes.facecolor": "none",
}


def draw(panel: Panel, *, salt: str) -> tuple[str, bytes]:
    """A panel as SVG for a page that defines the palette's names as CSS variables, and as PNG in the light theme.

    Args:
        salt: of the names inside the SVG, which a page's drawings must not share.
    """
    with _styled(salt):
        figure = _figure(panel)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it stands: none of the two need find it again
        svg, png = io.StringIO(), io.BytesIO()
        figure.patch.set_alpha(0)
        FigureCanvasSVG(figure).print_svg(svg)
        figure.patch.set(alpha=1, facecolor=_LIGHT["paper"])
        figure.set_dpi(DPI)
        FigureCanvasAgg(figure).print_png(png)
    return _for_page(svg.getvalue()), png.getvalue()


@contextmanager
def _styled(salt: str) -> Iterator[None]:
    style: Any = {**_STYLE, "svg.hashsalt": salt}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names may be of any script
        yield


def _for_page(svg: str) -> str:
    """The drawing alone, at the width that it is given, its colours the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg)
    svg = re.sub(r'^(<svg [^>]*?)height="[^"]*"', r"\1", svg)
    svg = re.sub("|".join(_VARIABLES), lambda found: _VARIABLES[found[0]], svg)
    return svg.strip()


def _figure(panel: Panel) -> Figure:
    handles = [each for each in panel.series if each.label]
    columns = max(1, min(len(handles), 4, LETTERS // (4 + max((len(_cut(each.label)) for each in handles), default=0))))
    lines = math.ceil(len(handles) / columns) if len(handles) > 1 or panel.kind != "lines" else 0
    rows = len(panel.rows) if panel.kind == "heatmap" else len(panel.ticks) if panel.kind == "stacked" else 0
    height = 1.0 + 0.34 * rows if rows else HEIGHT
    figure = Figure(figsize=(WIDTH, height + 0.17 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(_cut(panel.title, 60), loc="left", fontweight="bold")
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    {"lines": _lines, "bars": _bars, "stacked": _stacked, "heatmap": _heatmap}[panel.kind](axes, panel)
    if lines:
        shown = [_handle(each, place, panel.kind) for place, each in enumerate(panel.series) if each.label]
        figure.legend(
            handles=shown,
            labels=[_cut(each.label) for each in handles],
            loc="outside lower center",
            ncols=columns,
            handlelength=1.8,
            columnspacing=1.2,
        )
    return figure


def _lines(axes: Axes, panel: Panel) -> None:
    _frame(axes, panel)
    tall, cut = (
        TALL * max((value for each in panel.series for value in each.y if value is not None), default=1.0),
        False,
    )
    for place, each in enumerate(panel.series):
        color = _LIGHT[each.color]
        x, y = list(map(_number, each.x)), list(map(_number, each.y))
        if each.low and any(low is not None for low in each.low):
            errors, over = _errors(each, y, tall)
            cut = cut or over
            axes.errorbar(x, y, errors, fmt="none", color=color, ecolor=color, elinewidth=1, capsize=2, zorder=2)
        if each.style == "points":
            hues = [_LIGHT[hue] for hue in each.hues] or color
            axes.scatter(x, y, s=26, c=hues, marker=_marker(place), edgecolors=_LIGHT["ink"], linewidths=0.7, zorder=4)
        elif each.style == "step":
            axes.plot(x, y, color=color, drawstyle="steps-post", linestyle=_dash(each, place), zorder=3)
        else:
            marker = _marker(place) if each.style == "line" else ""
            axes.plot(x, y, color=color, marker=marker, linestyle=_dash(each, place), zorder=3)
    if panel.ticks:
        axes.set_xlim(-0.3, len(panel.ticks) - 0.7)
    if cut:
        axes.set_ylim(top=tall)


def _errors(series: Series, y: Sequence[float], tall: float) -> tuple[list[list[float]], bool]:
    """How far the error bars reach down and up, and whether one was cut where it leaves the picture; an end that is
    not finite is None."""
    lows = [value - _number(low, value) for value, low in zip(y, series.low, strict=True)]
    highs = [
        0.0 if low is None else _number(high, math.inf) - value
        for value, low, high in zip(y, series.low, series.high, strict=True)
    ]
    cut = [min(high, tall - value) for value, high in zip(y, highs, strict=True)]
    return [[max(0.0, length) for length in lengths] for lengths in (lows, cut)], cut != highs


def _bars(axes: Axes, panel: Panel) -> None:
    _frame(axes, panel)
    bars = [each for each in panel.series if each.style == "bars"]
    width, at = 0.8 / max(1, len(bars)), {}
    for place, each in enumerate(bars):
        offset = (place - (len(bars) - 1) / 2) * width
        at[each.color] = offset
        axes.bar([_number(x) + offset for x in each.x], list(map(_number, each.y)), width, color=_LIGHT[each.color])
    for each in panel.series:
        if each.style == "ticks":
            x, y = [_number(value) + at.get(each.color, 0.0) for value in each.x], list(map(_number, each.y))
            axes.plot(x, y, color=_LIGHT["ink"], linestyle="none", marker="_", markersize=24 * width + 3)


def _stacked(axes: Axes, panel: Panel) -> None:
    """Bars that lie, the first one on top, each made of all series."""
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    left = [0.0] * len(panel.ticks)
    for each in panel.series:
        widths = list(map(_number, each.y))
        axes.barh(range(len(left)), widths, 0.66, left=left, color=_LIGHT[each.color])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(left)), [_cut(tick) for tick in panel.ticks])
    axes.invert_yaxis()


def _heatmap(axes: Axes, panel: Panel) -> None:
    """Places tinted by how far their number lies above or below 1, three times as much in full colour."""
    for row, cells in enumerate(panel.cells):
        for column, cell in enumerate(cells):
            if isinstance(cell, float) and cell > 0:
                strength = min(1.0, abs(math.log(cell)) / math.log(3))
                place = Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, linewidth=0, alpha=0.08 + 0.5 * strength)
                place.set_facecolor(_LIGHT["s1" if cell >= 1 else "s2"])
                axes.add_patch(place)
            text = f"{cell:.2f}x" if isinstance(cell, float) else cell or "-"
            color = _LIGHT["muted" if cell is None else "s8" if isinstance(cell, str) else "ink"]
            axes.text(column, row, text, ha="center", va="center", color=color)
    axes.set_xlim(-0.5, len(panel.ticks) - 0.5)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_xticks(range(len(panel.ticks)), panel.ticks)
    axes.set_yticks(range(len(panel.rows)), [_cut(row, 18) for row in panel.rows])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _frame(axes: Axes, panel: Panel) -> None:
    axes.grid()
    axes.set_axisbelow(True)
    if panel.reference is not None:
        axes.axhline(panel.reference, color=_LIGHT["muted"], linewidth=1, linestyle=":")
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
    if panel.limits is not None:
        low, high = panel.limits
        axes.set_ylim(low - 0.02 * (high - low), high + 0.04 * (high - low))


def _handle(series: Series, place: int, kind: str) -> Any:
    """What stands for a series in the legend."""
    color = _LIGHT[series.color]
    if kind == "stacked" or series.style == "bars":
        return Patch(facecolor=color)
    if series.style == "ticks":
        return Line2D([], [], color=_LIGHT["ink"], marker="_", linestyle="none")
    if series.style == "points":
        face = "none" if series.hues else color
        return Line2D([], [], color=_LIGHT["ink"], marker=_marker(place), markerfacecolor=face, linestyle="none")
    marker = _marker(place) if series.style == "line" else ""
    return Line2D([], [], color=color, marker=marker, linestyle=_dash(series, place))


def _dash(series: Series, place: int) -> Literal["--", "-"]:
    """Steps have no marks: behind the first eight and standard decoding, colours come again, and are dashed."""
    return "--" if series.style == "dashed" or (series.style == "step" and place > len(MARKERS)) else "-"


def _marker(place: int) -> str:
    return MARKERS[(place + place // len(MARKERS)) % len(MARKERS)]  # the ninth has the first's colour, and another mark


def _number(value: float | None, otherwise: float = math.nan) -> float:
    return otherwise if value is None else float(value)


def _cut(text: str, most: int = 30) -> str:
    """A label on one line, not too long; matplotlib leaves out of legends what begins with an underscore."""
    plain = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    plain = plain if len(plain) <= most else plain[: most - 1] + "…"
    return f" {plain}" if plain.startswith("_") else plain
