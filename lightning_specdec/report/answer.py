"""The answer: whether speculation pays, with which draft and window, for each pair and setting.

Only lossless cases count in which no run failed and whose tokens are standard decoding's, unless
the dtype is so coarse that rounding explains other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_specdec.bench.records import HUGGING_FACE, SPECULATIVE, Comparison
from lightning_specdec.bench.statistics import Interval
from lightning_specdec.bench.verdict import (
    Verdict,
    judge,
    level_among,
    ranked,
    rows_within_noise,
)

Workload = tuple[str, str, float, int, int]
"""Pair, domain, temperature, batch size, new tokens."""

MAX_NAMED = 3
"""Equally fast choices that a sentence names."""


@dataclass(frozen=True)
class Advice:
    """The answer for one pair, domain and setting.

    Args:
        best: the choice that the evidence favors, among those proven faster. Without any, among
            those that may be faster; if all are slower, among these. None if no case counts.
        verdict: of `best`, for other prompts too and corrected for being the best of several.
        equals: other choices that may be as fast as `best`.
        theirs: the fastest of transformers' methods, if its speedup is above that of `best`.
    """

    workload: Workload
    best: Comparison | None = None
    verdict: Verdict | None = None
    equals: tuple[Comparison, ...] = ()
    theirs: Comparison | None = None

    @property
    def pays(self) -> bool:
        """Whether `best` is faster than standard decoding by more than noise."""
        return self.verdict is not None and self.verdict.kind == "faster"

    @property
    def choice(self) -> str:
        """What to use, in a few words."""
        if self.best is None or self.verdict is None:
            return "nothing to say"
        if self.verdict.kind == "faster":
            return choice_of(self.best)
        if self.verdict.kind == "slower":
            return f"off (best: {choice_of(self.best)})"
        return f"undecided (best: {choice_of(self.best)})"

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        if self.best is None or self.verdict is None:
            return (
                "nothing to say: no lossless method finished with the tokens of standard decoding"
            )
        choice = choice_of(self.best)
        if self.verdict.kind == "faster":
            sentence = f"use {choice}: {shown(self.best.walltime_speedup)}"
            return sentence + self._equals_clause() + self._theirs_clause()
        if self.verdict.kind == "slower":
            return f"do not speculate: the best is {choice}: {shown(self.best.walltime_speedup)}"
        return f"{choice}: {self.verdict.text}; measure more prompts"

    def _equals_clause(self) -> str:
        """The choices that may be as fast, as the end of a sentence."""
        if not self.equals:
            return ""
        names = [choice_of(comparison) for comparison in self.equals[:MAX_NAMED]]
        num_unnamed = len(self.equals) - len(names)
        if num_unnamed:
            names.append(f"{num_unnamed} more")
        return f"; too noisy to choose between this and {', '.join(names)}"

    def _theirs_clause(self) -> str:
        """The fastest of transformers' methods, as the end of a sentence."""
        if self.best is None or self.theirs is None:
            return ""
        is_proven = _is_above(self.theirs.walltime_speedup, self.best.walltime_speedup)
        relation = "faster" if is_proven else "perhaps faster"
        speedup = shown(self.theirs.walltime_speedup)
        return f"; {relation}: transformers' {self.theirs.case.label}, {speedup}"


def advise(comparisons: Sequence[Comparison], dtypes: Mapping[str, str | None]) -> list[Advice]:
    """The answers, in the order measured.

    Args:
        dtypes: the dtype that each pair computes in.
    """
    comparisons_by_workload: dict[Workload, list[Comparison]] = {}
    for comparison in comparisons:
        comparisons_by_workload.setdefault(comparison.case.workload, []).append(comparison)

    advice = []
    for workload_comparisons in comparisons_by_workload.values():
        case = workload_comparisons[0].case
        allows_rounding = rounds(dtypes.get(case.pair))
        usable = [
            comparison
            for comparison in workload_comparisons
            if _is_usable(comparison, allows_rounding=allows_rounding)
        ]
        advice.append(_advise(case.workload, usable))
    return advice


def _is_usable(comparison: Comparison, *, allows_rounding: bool) -> bool:
    """Whether a case finished, and its tokens are standard decoding's or differ by rounding."""
    if comparison.error is not None or not comparison.timings:
        return False
    return allows_rounding or comparison.same_tokens is not False


def _advise(workload: Workload, comparisons: Sequence[Comparison]) -> Advice:
    """The answer for one workload, from its usable cases."""
    candidates = []
    baselines = []
    for comparison in comparisons:
        if comparison.case.method in HUGGING_FACE:
            baselines.append(comparison)
        elif comparison.case.method == SPECULATIVE and comparison.case.lossless:
            candidates.append(comparison)
    if not candidates:
        return Advice(workload)

    proven = []
    undecided = []
    verdicts = {}
    for row in candidates:
        verdict = corrected_verdict(row, len(candidates))
        verdicts[id(row)] = verdict
        if verdict.kind == "faster":
            proven.append(row)
        elif not verdict.is_decided:
            undecided.append(row)

    # A proven choice precedes one that seems faster. While one may be faster, nothing is advised
    # against.
    best = ranked(proven or undecided or candidates)[0]
    equals = rows_within_noise(best, ranked(candidates))

    faster_baselines = [row for row in baselines if _speedup(row) > _speedup(best)]
    theirs = max(faster_baselines, key=_speedup, default=None)
    return Advice(workload, best, verdicts[id(best)], equals, theirs)


def corrected_verdict(comparison: Comparison, num_cases: int) -> Verdict:
    """The verdict on a case that was chosen as the best of several, for other prompts too.

    A single prompt or batch is too few: it does not show how much prompts differ, however often it
    is run.
    """
    level = level_among(num_cases)
    return judge(comparison.speedup(level), comparison.num_units, level=level)


def rounds(dtype: str | None) -> bool:
    """Whether a dtype is so coarse that the same model, computed differently, may generate other
    tokens."""
    return dtype in ("bfloat16", "float16")


def choice_of(comparison: Comparison) -> str:
    """What a user would choose, in words."""
    case = comparison.case
    if case.num_draft_tokens == "auto":
        choice = f"{case.draft} with windows that adapt"
    else:
        choice = f"{case.draft} with window {case.num_draft_tokens}"
    # Greedy, all lossless rules do the same.
    if case.temperature:
        choice += f" ({case.rule})"
    return choice


def shown(interval: Interval | None) -> str:
    """A ratio with its interval."""
    if interval is None:
        return "-"
    if interval.ends is None:
        return f"{interval.value:.2f}x (no interval)"
    low, high = interval.ends
    return f"{interval.value:.2f}x [{low:.2f}, {high:.2f}]"


def _is_above(speedup: Interval | None, other_speedup: Interval | None) -> bool:
    """Whether one interval is above the other; False without intervals."""
    if speedup is None or other_speedup is None:
        return False
    return speedup.low > other_speedup.high


def _speedup(comparison: Comparison) -> float:
    if comparison.walltime_speedup is None:
        return 0.0
    return comparison.walltime_speedup.value
