"""Speedups predicted from the acceptance on other prompts and from isolated calls, beside the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench import theory
from lightning_specdec.bench.config_entries import SPECULATIVE
from lightning_specdec.bench.report.analysis import MeasuredCell
from lightning_specdec.bench.statistics import Interval

TOLERANCE = 0.10
"""A prediction holds that comes within this share of the measured speedup."""


@dataclass(frozen=True)
class Prediction:
    """A predicted speedup beside the measured one.

    Args:
        alpha: from other prompts, at the same temperature and under the same rule: of `num_tested` draft tokens.
        cost_ratio: seconds of one draft step / of the target's call on one token, isolated.
        call_ratio: seconds of the target's call on k + 1 tokens / on one, isolated.
        predicted: for prompts and texts of this length.
    """

    cell: MeasuredCell
    alpha: float
    num_tested: int
    cost_ratio: float
    call_ratio: float
    predicted: float
    measured: Interval

    @property
    def deviation(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured.value - 1

    @property
    def holds(self) -> bool:
        """Whether it comes within `TOLERANCE`."""
        return abs(self.deviation) <= TOLERANCE


def predictions(cells: Sequence[MeasuredCell], manifest: Mapping[str, Any]) -> list[Prediction]:
    """The predictions for all speculative cells that `unpredicted` has no objection to."""
    return [
        _prediction(each, manifest) for each in cells if each.way == SPECULATIVE and not unpredicted(each, manifest)
    ]


def unpredicted(cell: MeasuredCell, manifest: Mapping[str, Any]) -> str:
    """Why no prediction can be made for a speculative cell; empty where one can."""
    if cell.walltime_speedup is None or cell.timings is None:
        return "there is no speedup to compare it with"
    if cell.batch_size > 1:
        return "isolated calls are of one row, not of a batch"
    if not isinstance(cell.num_draft_tokens, int):
        return "the window adapts to what it meets"
    calls = _of_pair(manifest, "calls", cell) or {}
    if cell.draft not in (calls.get("draft_step_seconds") or {}):
        return "no isolated calls were timed" + (f": {calls['error']}" if calls.get("error") else "")
    if (tested := _other_prompts(manifest, cell)) is None:
        return "there are no other prompts to take alpha from"
    if not tested["num_tested"]:
        return "no draft token was tested on other prompts"
    if not _prompts(manifest, cell) or cell.timings.num_units != cell.rows[0]["num_prompts"]:
        return "prompts are not known one by one"
    return ""


def _prediction(cell: MeasuredCell, manifest: Mapping[str, Any]) -> Prediction:
    calls, tested = _of_pair(manifest, "calls", cell), _other_prompts(manifest, cell)
    window, measured, timings = cell.num_draft_tokens, cell.walltime_speedup, cell.timings
    assert tested is not None and measured is not None and timings is not None and isinstance(window, int)
    alpha, one, guess = (
        tested["num_accepted"] / tested["num_tested"],
        calls["one_token_seconds"],
        calls["draft_step_seconds"],
    )
    wide = {1: one} | {int(width): seconds for width, seconds in calls["wide_seconds"].items()}
    overhead = {int(width): seconds for width, seconds in calls["round_overhead_seconds"][cell.draft].items()}
    predicted = theory.predicted_speedup(
        alpha,
        window,
        draft_step_seconds=guess[cell.draft],
        target_seconds=one,
        verify_seconds=theory.between(wide, window + 1),
        round_overhead_seconds=theory.between(overhead, window + 1) + calls["draft_fixed_seconds"][cell.draft],
        step_overhead_seconds=calls["step_overhead_seconds"],
        prompt_seconds=calls["prompt_token_seconds"] * statistics.fmean(map(len, _prompts(manifest, cell).values())),
        num_new_tokens=max(1, round(timings.num_new_tokens)),
    )
    ratios = guess[cell.draft] / one, theory.call_ratio(wide, window + 1)
    return Prediction(cell, alpha, tested["num_tested"], *ratios, predicted, measured)


def _of_pair(manifest: Mapping[str, Any], name: str, cell: MeasuredCell) -> Any:
    """What the manifest says of a cell's pair; None where it says nothing."""
    return (manifest.get(name) or {}).get(cell.pair)


def _prompts(manifest: Mapping[str, Any], cell: MeasuredCell) -> Mapping[str, Sequence[int]]:
    """The prompts of a cell's domain, by their names."""
    return (_of_pair(manifest, "prompts", cell) or {}).get(cell.domain) or {}


def _other_prompts(manifest: Mapping[str, Any], cell: MeasuredCell) -> Mapping[str, Any] | None:
    """What was tested and accepted on other prompts of the domain; None where there were none."""
    names = ("draft", "domain", "temperature", "rule")
    found = _of_pair(manifest, "alpha_at", cell) or ()
    return next((each for each in found if all(each[name] == getattr(cell, name) for name in names)), None)
