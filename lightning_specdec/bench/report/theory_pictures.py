"""The theory's curves with the measured points on them, and measured against predicted speedup."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_specdec.bench import theory
from lightning_specdec.bench.report.analysis import MeasuredCell
from lightning_specdec.bench.report.colors import WINDOWS
from lightning_specdec.bench.report.picture import Panel, Picture, Series
from lightning_specdec.bench.report.prediction import TOLERANCE, Prediction
from lightning_specdec.bench.report.round_costs import isolated_calls
from lightning_specdec.bench.report.scene import Scene
from lightning_specdec.bench.statistics import finite

ALPHAS = tuple(i / 50 for i in range(51))
AXIS = "acceptance rate (alpha)"


def theory_pictures(scene: Scene, predictions: Sequence[Prediction]) -> list[Picture]:
    """In the order of the report."""
    return [_tokens(scene), _speedups(scene), _measured(scene, predictions)]


def _tokens(scene: Scene) -> Picture:
    curves = _curves(lambda alpha, window: theory.expected_tokens(alpha, window))
    panels = []
    for pair in scene.pairs:
        points = [_points(scene, pair, draft, lambda cell: cell.block_efficiency) for draft in scene.drafts(pair)]
        panels.append(Panel(pair, AXIS, "tokens / round", (*curves, *(each for each in points if each.x))))
    caption = (
        "Expected tokens of a round of an endless text, windows 2 to 10, and the measured cells: a point lies below "
        "the curve of its colour where acceptance is not independent, guesses are missing, or texts are short. "
        + scene.told()
    )
    return Picture.of("theory_tokens", "Tokens per round against acceptance, theory and measurement", caption, panels)


def _speedups(scene: Scene) -> Picture:
    panels = []
    for pair in scene.pairs:
        for draft in scene.drafts(pair):
            calls = isolated_calls(scene.manifest, pair, draft)
            if calls is None:
                continue
            costs = calls.round_costs
            points = _points(scene, pair, draft, _value)
            series = (*_curves(costs.speedup), *([points] if points.x else []))
            title = f"{pair}: {draft}, a guess costs {costs.cost_ratio:.2g} steps"
            panels.append(Panel(title, AXIS, "walltime speedup (x)", series, reference=1.0))
    caption = (
        "Speedup of an endless text from isolated calls, with what wider calls and rounds cost besides; points are the "
        f"measured cells of these windows, the reading of their prompts included. {scene.told()}"
    )
    title, missing = "Speedup against acceptance, theory and measurement", "The manifest has no isolated calls."
    return Picture.of("theory_speedup", title, caption, panels, missing=missing)


def _measured(scene: Scene, predictions: Sequence[Prediction]) -> Picture:
    panels = []
    for pair in scene.pairs:
        shown = [each for each in predictions if each.cell.pair == pair]
        if not shown:
            continue
        top = 1.05 * max(max(each.predicted, each.measured.value) for each in shown)
        ends: list[float | None] = [0.0, top]
        series = [
            Series("exact", ends, ends, "ink", style="dashed"),
            Series(f"{TOLERANCE:.0%} off", ends, [0.0, top / (1 + TOLERANCE)], "muted", style="dashed"),
            Series("", ends, [0.0, top / (1 - TOLERANCE)], "muted", style="dashed"),
        ]
        for draft in scene.drafts(pair):
            own = [each for each in shown if each.cell.draft == draft]
            series.append(
                Series(
                    scene.label(pair, draft),
                    [each.predicted for each in own],
                    [each.measured.value for each in own],
                    scene.color(pair, draft),
                    [finite(each.measured.low) for each in own],
                    [finite(each.measured.high) for each in own],
                    style="points",
                )
            )
        panels.append(
            Panel(pair, "predicted speedup (x)", "measured speedup (x)", tuple(series), limits=(0.0, 1.1 * top))
        )
    caption = (
        "Predicted from alpha of other prompts and from isolated calls. Above the line it was faster than predicted; "
        "the table says which assumption accounts for what lies outside the 10%. All cells that a prediction was made "
        "for: every temperature and rule, one prompt at a time."
    )
    missing = "No prediction could be made: the manifest has no alpha of other prompts, or no isolated calls."
    return Picture.of("measured_predicted", "Measured against predicted speedup", caption, panels, missing=missing)


def _value(cell: MeasuredCell) -> float | None:
    return None if cell.walltime_speedup is None else cell.walltime_speedup.value


def _curves(compute: Callable[[float, int], float]) -> list[Series]:
    return [
        Series(f"window {window}", ALPHAS, [compute(alpha, window) for alpha in ALPHAS], f"k{window}", style="curve")
        for window in WINDOWS
    ]


def _points(scene: Scene, pair: str, draft: str, figure: Callable[[MeasuredCell], float | None]) -> Series:
    """A draft's cells of the windows with curves, each in its curve's colour."""
    cells = [
        cell
        for cell in scene.at(pair, draft=draft)
        if cell.num_draft_tokens in WINDOWS and cell.acceptance_rate is not None and figure(cell) is not None
    ]
    return Series(
        f"{draft}, measured",
        [cell.acceptance_rate for cell in cells],
        [figure(cell) for cell in cells],
        "ink",
        style="points",
        hues=[f"k{cell.num_draft_tokens}" for cell in cells],
    )
