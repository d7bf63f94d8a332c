"""What the report's pictures show of rounds: tokens kept, positions, the time of tokens and of phases."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.bench import theory
from lightning_specdec.bench.config_entries import STANDARD
from lightning_specdec.bench.report.analysis import MeasuredCell
from lightning_specdec.bench.report.picture import Panel, Picture, Series
from lightning_specdec.bench.report.scene import Scene, color, parts
from lightning_specdec.bench.statistics import percentiles
from lightning_specdec.inference import PHASES

SHARES = tuple(i / 100 for i in range(101))
"""Where a distribution of latencies is read."""
PHASE_COLORS = {"draft": "s2", "verify": "s1", "accept": "s3", "rest": "muted"}


def round_pictures(scene: Scene) -> list[Picture]:
    """In the order of the report."""
    return [_accepted_per_round(scene), _by_position(scene), _latencies(scene), _breakdown(scene)]


def _accepted_per_round(scene: Scene) -> Picture:
    panels = []
    for pair in scene.pairs:
        for draft in scene.drafts(pair):
            window = scene.best_window(pair, draft)
            found = scene.at(pair, draft=draft, num_draft_tokens=window)
            for cells in parts([cell for cell in found if sum(cell.summed("histogram"))]):
                panels.append(_histograms(f"{pair}: {draft}, window {window}", cells, window))
    caption = (
        "How many guesses a round kept, each draft with its fastest window; ticks show what independent acceptance at "
        f"the same rate would give. The last rounds of a text have shorter windows. {scene.told()}"
    )
    return Picture.of("accepted_per_round", "Accepted tokens per round", caption, panels)


def _histograms(title: str, cells: Sequence[MeasuredCell], window: int | str | None) -> Panel:
    """The rounds of some domains."""
    reached = max(len(cell.summed("histogram")) for cell in cells)
    widest = min([window, *(cell.max_new_tokens - 1 for cell in cells)]) if isinstance(window, int) else 0
    longest = max(reached, widest + 1)
    x = list(map(float, range(longest)))
    series: list[Series] = []
    for place, cell in enumerate(cells):
        counts = cell.summed("histogram")
        shares = [count / sum(counts) for count in counts] + [0.0] * (longest - len(counts))
        series.append(Series(cell.domain, x, shares, color(place), style="bars"))
    for place, cell in enumerate(cells):
        if cell.acceptance_rate is not None and widest:
            law = theory.accepted_distribution(cell.acceptance_rate, widest)
            law += [0.0] * (longest - len(law))
            label = "" if any(each.style == "ticks" for each in series) else "if independent"
            series.append(Series(label, x, law, color(place), style="ticks"))
    axis, ticks = "accepted tokens of a round", tuple(map(str, range(longest)))
    return Panel(title, axis, "share of rounds", tuple(series), "bars", ticks)


def _by_position(scene: Scene) -> Picture:
    panels = []
    for pair in scene.pairs:
        for draft in scene.drafts(pair):
            widest: dict[str, MeasuredCell] = {}  # of each domain, among the windows that finished
            for cell in scene.at(pair, draft=draft):
                if isinstance(cell.num_draft_tokens, int) and any(rate is not None for rate in cell.rates):
                    if cell.num_draft_tokens > _window(widest.get(cell.domain)):
                        widest[cell.domain] = cell
            most = max(map(_window, widest.values()), default=0)
            for cells in parts(list(widest.values())):
                series = []
                for place, cell in enumerate(cells):
                    label = cell.domain if _window(cell) == most else f"{cell.domain}, window {_window(cell)}"
                    series.append(Series(label, list(map(float, range(len(cell.rates)))), cell.rates, color(place)))
                ticks = tuple(str(i + 1) for i in range(max(len(each.x) for each in series)))
                title, axis = f"{pair}: {draft}, window {most}", "position in the window"
                label = "accepted / tested there"
                panels.append(Panel(title, axis, label, tuple(series), ticks=ticks, limits=(0.0, 1.0)))
    caption = (
        "Given that all guesses before were kept; the widest window that finished. A level line means that acceptance "
        f"is independent of position. {scene.told()}"
    )
    return Picture.of("acceptance_position", "Acceptance by position", caption, panels)


def _window(cell: MeasuredCell | None) -> int:
    return int(cell.num_draft_tokens or 0) if cell is not None else 0


def _ways(scene: Scene, pair: str, domain: str) -> list[tuple[str, str, MeasuredCell]]:
    """Standard decoding, each draft with its fastest window, and what else decoded: label, colour, cell."""
    found = [("standard", "ink", cell) for cell in scene.at(pair, domain=domain, way=STANDARD)]
    for draft in scene.drafts(pair):
        window = scene.best_window(pair, draft)
        for cell in scene.at(pair, domain=domain, draft=draft, num_draft_tokens=window):
            found.append((f"{draft}, window {window}", scene.color(pair, draft), cell))
    return [each for each in found if each[2].rows]


def _latencies(scene: Scene) -> Picture:
    panels = []
    for pair in scene.pairs:
        for domain in scene.domains(pair):
            series = []
            for label, hue, cell in _ways(scene, pair, domain):
                if cell.gaps:
                    at = percentiles([1000 * gap for gap in cell.gaps], SHARES[:-1] + (0.999,))
                    series.append(Series(label, list(at), list(SHARES), hue, style="step"))
            if series:
                title, axis = f"{pair}: {domain}", "time since the last token (ms)"
                panels.append(Panel(title, axis, "share of tokens", tuple(series), limits=(0.0, 1.0)))
    caption = (
        "Share of tokens that came within so many milliseconds of the one before; a round's tokens come together, at "
        "0. The slowest token in a thousand is left out, and so is each prompt's first. "
        f"Each draft with its fastest window. {scene.told()}"
    )
    return Picture.of("latency_cdf", "Time per token, cumulative", caption, panels)


def _breakdown(scene: Scene) -> Picture:
    panels = []
    for pair in scene.pairs:
        for domain in scene.domains(pair):
            bars = [each for each in _ways(scene, pair, domain) if each[2].phase_seconds is not None]
            places = list(map(float, range(len(bars))))
            series = [
                Series(phase, places, [_phase(cell, phase) for _, _, cell in bars], PHASE_COLORS[phase])
                for phase in PHASES
            ]
            if bars:
                labels = tuple(label for label, _, _ in bars)
                panels.append(
                    Panel(f"{pair}: {domain}", "time per new token (ms)", "", tuple(series), "stacked", labels)
                )
    caption = (
        "Where the time of a new token goes, reading the prompt included, the mean over the repeats; the phases add up "
        f"to the whole. Each draft with its fastest window. {scene.told()}"
    )
    return Picture.of("time_breakdown", "Time by phase", caption, panels)


def _phase(cell: MeasuredCell, phase: str) -> float:
    """Milliseconds of a phase for each new token."""
    tokens = (cell.total("num_new_tokens") or 0) / len(cell.rows)
    return 1000 * (cell.phase_seconds or {}).get(phase, 0.0) / tokens if tokens else 0.0
