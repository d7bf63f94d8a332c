"""Speedups predicted from the acceptance on other prompts and from isolated calls, beside the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench import theory
from lightning_specdec.bench.rows import SPECULATIVE, Comparison

TOLERANCE = 0.10
"""A prediction holds that comes within this share of the measured speedup."""


@dataclass(frozen=True)
class Prediction:
    """A predicted speedup beside the measured one.

    Args:
        alpha: acceptance rate on other prompts, of `num_tested` draft tokens.
        cost_ratio: seconds of one draft step / of the target's call on one token, isolated.
        call_ratio: seconds of the target's call on window + 1 tokens / on one, isolated.
        predicted: for prompts and texts of this length.
    """

    measured: Comparison
    alpha: float
    num_tested: int
    cost_ratio: float
    call_ratio: float
    predicted: float

    @property
    def deviation(self) -> float:
        """predicted / measured - 1."""
        assert self.measured.walltime_speedup is not None
        return self.predicted / self.measured.walltime_speedup.value - 1

    @property
    def holds(self) -> bool:
        """Whether it comes within `TOLERANCE`."""
        return abs(self.deviation) <= TOLERANCE


def predict(each: Comparison, manifest: Mapping[str, Any]) -> Prediction | str | None:
    """The prediction for a case, or why there is none; None for what is not speculation, or failed."""
    case, timings = each.case, each.timings
    if case.method != SPECULATIVE or each.error is not None:
        return None
    calls, prompts, known = (
        (manifest.get(name) or {}).get(case.pair) or {} for name in ("calls", "prompts", "alpha_at")
    )
    wanted = {name: getattr(case, name) for name in ("draft", "domain", "temperature", "rule")}
    tested = next((found for found in known if wanted.items() <= found.items()), None)
    own_prompts, window = prompts.get(case.domain) or {}, case.num_draft_tokens
    if timings is None:
        return "there is no speedup to compare with"
    if case.batch_size > 1:
        return "isolated calls are of one row, not of a batch"
    if not isinstance(window, int):
        return "the window adapts to what it meets"
    if case.draft not in (calls.get("draft_step_seconds") or {}):
        return "no isolated calls were timed" + (f": {calls['error']}" if calls.get("error") else "")
    if tested is None or not tested["num_tested"]:
        return "no draft token was tested on other prompts"
    if not own_prompts or timings.num_units != each.rows[0].num_prompts:
        return "prompts are not known one by one"
    draft, one = case.draft, calls["one_token_seconds"]
    wide = {1: one} | {int(width): seconds for width, seconds in calls["wide_seconds"].items()}
    overhead = {int(width): seconds for width, seconds in calls["round_overhead_seconds"][draft].items()}
    alpha = tested["num_accepted"] / tested["num_tested"]
    predicted = theory.predicted_speedup(
        alpha,
        window,
        draft_step_seconds=calls["draft_step_seconds"][draft],
        target_seconds=one,
        verify_seconds=theory.between(wide, window + 1),
        round_overhead_seconds=theory.between(overhead, window + 1) + calls["draft_fixed_seconds"][draft],
        step_overhead_seconds=calls["step_overhead_seconds"],
        prompt_seconds=calls["prompt_token_seconds"] * statistics.fmean(map(len, own_prompts.values())),
        num_new_tokens=max(1, round(timings.num_new_tokens)),
    )
    ratios = (calls["draft_step_seconds"][draft] / one, theory.call_ratio(wide, window + 1))
    return Prediction(each, alpha, tested["num_tested"], *ratios, predicted)
