"""What the report's pictures show of measured cells.

Where nothing else is said, a picture shows the lowest temperature, the smallest batch, the most tokens and the first
lossless rule of each pair (a lossy one where there is no other), and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_specdec.bench.report.analysis import MeasuredCell
from lightning_specdec.bench.report.picture import Panel, Picture, Series, Value
from lightning_specdec.bench.report.round_pictures import round_pictures
from lightning_specdec.bench.report.scene import Scene
from lightning_specdec.bench.statistics import finite

TEMPERATURE, BATCH = ("temperature", "temperature"), ("batch_size", "batch size (prompts together)")
"""Settings: what a cell calls them, and what an axis does."""


def measured_pictures(scene: Scene) -> list[Picture]:
    """All pictures of measured figures, in the order of the report."""
    return [
        _heatmap(scene),
        _over_windows(scene, "acceptance_window", "Acceptance rate against the window", ACCEPTANCE),
        _over_windows(scene, "efficiency_window", "Block efficiency against the window", EFFICIENCY),
        _over_settings(scene, "acceptance_temperature", "Acceptance rate against temperature", TEMPERATURE, ACCEPTANCE),
        _over_settings(
            scene, "efficiency_temperature", "Block efficiency against temperature", TEMPERATURE, EFFICIENCY
        ),
        *round_pictures(scene),
        _over_settings(scene, "speedup_batch", "Speedup against the size of the batch", BATCH, SPEEDUP),
    ]


@dataclass(frozen=True)
class Figure:
    """A figure of a cell, as an axis shows it.

    Args:
        formula: in words.
        read: the figure, with the ends of its interval where there is one.
        reference: what standard decoding has.
    """

    label: str
    formula: str
    read: Callable[[MeasuredCell], tuple[Value, Value, Value]]
    limits: tuple[float, float] | None = None
    reference: float | None = None


def _interval(cell: MeasuredCell) -> tuple[Value, Value, Value]:
    found = cell.walltime_speedup
    return (None, None, None) if found is None else (found.value, finite(found.low), finite(found.high))


ACCEPTANCE = Figure(
    "acceptance rate", "Accepted / tested tokens", lambda cell: (cell.acceptance_rate, None, None), (0.0, 1.0)
)
EFFICIENCY = Figure(
    "tokens / round", "New tokens / rounds", lambda cell: (cell.block_efficiency, None, None), None, 1.0
)
SPEEDUP = Figure(
    "walltime speedup (x)", "Seconds, standard decoding's / speculation's for as many tokens", _interval, None, 1.0
)


def _heatmap(scene: Scene) -> Picture:
    panels = []
    for pair in scene.pairs:
        domains = scene.domains(pair)
        for draft in scene.drafts(pair):
            cells = {(cell.domain, cell.num_draft_tokens): cell for cell in scene.at(pair, draft=draft)}
            windows = _windows(cells.values())
            if windows:
                rows = tuple(tuple(_shade(cells.get((domain, w))) for w in windows) for domain in domains)
                panels.append(
                    Panel(
                        title=f"{pair}: {scene.label(pair, draft)}",
                        xlabel="window (draft tokens)",
                        ylabel="domain",
                        kind="heatmap",
                        ticks=tuple(map(str, windows)),
                        rows=tuple(domains),
                        cells=rows,
                    )
                )
    caption = f"{SPEEDUP.formula}; above 1 speculation is faster. {scene.told()}"
    return Picture.of("speedup_heatmap", "Speedup by pair, domain and window", caption, panels)


def _shade(cell: MeasuredCell | None) -> float | str | None:
    """What a place of the heatmap says."""
    if cell is None:
        return None
    return "failed" if cell.error is not None else _interval(cell)[0]


def _over_windows(scene: Scene, name: str, title: str, figure: Figure) -> Picture:
    panels = []
    for pair in scene.pairs:
        for domain in scene.domains(pair):
            cells = scene.at(pair, domain=domain)
            windows = _windows(cells)
            series = [
                _series(scene, pair, draft, windows, [c for c in cells if c.draft == draft], "num_draft_tokens", figure)
                for draft in scene.drafts(pair)
            ]
            ticks = tuple(map(str, windows))
            panels += _lines(f"{pair}: {domain}", "window (draft tokens)", figure, series, ticks)
    caption = f"{figure.formula}. One line for each draft, its parameters in brackets. {scene.told()}"
    return Picture.of(name, title, caption, panels)


def _over_settings(scene: Scene, name: str, title: str, setting: tuple[str, str], figure: Figure) -> Picture:
    """A figure against temperature or batch size, each draft with a window that was measured at several of them."""
    panels: list[Panel] = []
    key, axis = setting
    for pair in scene.pairs:
        values = sorted({getattr(cell, key) for cell in scene.at(pair, **{key: ...})})
        if len(values) < 2:
            continue
        for domain in scene.domains(pair):
            series = []
            for draft in scene.drafts(pair):
                cells = scene.at(pair, draft=draft, domain=domain, **{key: ...})
                window = _most_measured(cells, scene.best_window(pair, draft))
                chosen = [cell for cell in cells if cell.num_draft_tokens == window]
                label = f"{scene.label(pair, draft)}, window {window}"
                series.append(_series(scene, pair, draft, values, chosen, key, figure, label=label))
            ticks = tuple(f"{value:g}" for value in values)
            panels += _lines(f"{pair}: {domain}", axis, figure, series, ticks)
    missing = f"Only one {axis.split(' (')[0]} was measured."
    caption = f"{figure.formula}. Each draft with its fastest window among those measured at most of these."
    caption += f" {scene.told(key)}"
    return Picture.of(name, title, caption, panels, missing=missing)


def _most_measured(cells: Sequence[MeasuredCell], best: int | str | None) -> int | str | None:
    """The window with the most cells; of several such the best one, or the first."""
    counts: dict[int | str | None, int] = {}
    for cell in cells:
        counts[cell.num_draft_tokens] = counts.get(cell.num_draft_tokens, 0) + bool(cell.rows)
    return max(counts, key=lambda window: (counts[window], window == best), default=None)


def _windows(cells: Iterable[MeasuredCell]) -> list[int | str]:
    """The windows of cells: numbers in rising order, then words."""
    found = {cell.num_draft_tokens for cell in cells if cell.num_draft_tokens is not None}
    return sorted(found, key=lambda window: (isinstance(window, str), window))


def _series(
    scene: Scene,
    pair: str,
    draft: str,
    values: Sequence[object],
    cells: Sequence[MeasuredCell],
    key: str,
    figure: Figure,
    *,
    label: str | None = None,
) -> Series:
    """A draft's figure at the places of some of these values."""
    found = {getattr(cell, key): figure.read(cell) for cell in cells}
    places = [place for place, value in enumerate(values) if value in found and found[value][0] is not None]
    y, low, high = ([found[values[place]][i] for place in places] for i in range(3))
    shown = label or scene.label(pair, draft)
    return Series(shown, list(map(float, places)), y, scene.color(pair, draft), low, high)


def _lines(title: str, xlabel: str, figure: Figure, series: Sequence[Series], ticks: tuple[str, ...]) -> list[Panel]:
    """One panel, or none where no series has a point."""
    kept = tuple(each for each in series if each.x)
    panel = Panel(title, xlabel, figure.label, kept, ticks=ticks, reference=figure.reference, limits=figure.limits)
    return [panel] if kept else []
