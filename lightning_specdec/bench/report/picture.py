"""A picture as plain data: panels with their series, axes and units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Value = float | None
"""A number, or None for one that is not known."""
NOTHING = "No cell with these figures has finished."


@dataclass(frozen=True)
class Series:
    """One line, set of points, or set of bars.

    Args:
        label: empty for one that the legend leaves out.
        color: a name of the palette.
        low, high: ends of intervals, where there are any.
        style: line, curve (no points on it), points, dashed, step, bars, or ticks (beside bars of the
            same colour).
        hues: of points, a name of the palette for each.
    """

    label: str
    x: Sequence[Value]
    y: Sequence[Value]
    color: str
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()
    style: str = "line"
    hues: Sequence[str] = ()


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Args:
        kind: lines, bars, stacked, or heatmap.
        ticks: labels of the places 0, 1, ... of the x axis (of a heatmap its columns; of stacked bars the y axis).
        rows, cells: of a heatmap, labels and numbers or words.
        reference: a value of the y axis to mark.
        limits: of the y axis, where they should not follow the data.
    """

    title: str
    xlabel: str
    ylabel: str
    series: tuple[Series, ...] = ()
    kind: str = "lines"
    ticks: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    cells: tuple[tuple[float | str | None, ...], ...] = ()
    reference: float | None = None
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Picture:
    """Panels under one title; `missing` says why there are none."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...] = ()
    missing: str | None = None

    @classmethod
    def of(cls, name: str, title: str, caption: str, panels: Sequence[Panel], *, missing: str = NOTHING) -> Picture:
        """A picture that says why where it has no panels."""
        return cls(name, title, caption, tuple(panels), None if panels else missing)
