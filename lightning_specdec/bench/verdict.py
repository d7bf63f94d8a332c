"""One rule for every claim about speed: only an interval that excludes 1 decides.

`decode`, `sweep`, `bench`, `report`, `fit` and TensorBoard take their words from here, so that they
never disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_specdec.bench.statistics import LEVEL, Interval

if TYPE_CHECKING:
    from lightning_specdec.bench.records import Comparison

Kind = Literal["faster", "slower", "too noisy", "too few"]

WORDS: dict[Kind, str] = {
    "faster": "faster",
    "slower": "slower",
    "too noisy": "too noisy to tell",
    "too few": "too few runs to tell",
}
"""What every verb calls a verdict."""
MIN_PAIRS = 2
"""Paired timings without which no spread is visible."""


@dataclass(frozen=True)
class Verdict:
    """What the measurements prove about a method's speed.

    Args:
        kind: "faster" or "slower" if the interval excludes 1, "too noisy" if it contains 1, and
            "too few" if there is no interval.
        text: the verdict in a few words, with the speedup and its interval.
    """

    kind: Kind
    text: str

    @property
    def word(self) -> str:
        """The verdict without its figures."""
        return WORDS[self.kind]

    @property
    def is_decided(self) -> bool:
        """Whether the method can be recommended or advised against."""
        return self.kind in ("faster", "slower")


def judge(speedup: Interval | None, num_pairs: int, *, level: float = LEVEL) -> Verdict:
    """Judge a speedup by its interval.

    Args:
        speedup: seconds of standard decoding / seconds of the method; None if nothing was timed.
        num_pairs: paired timings that the interval is computed from, such as repeats x prompts. To
            generalize to other prompts, pass the number of prompts.
        level: confidence level of the interval.
    """
    if speedup is None:
        return Verdict("too few", WORDS["too few"])

    has_interval = not math.isnan(speedup.low) and not math.isnan(speedup.high)
    if num_pairs < MIN_PAIRS or not has_interval:
        kind: Kind = "too few"
    elif speedup.low > 1:
        kind = "faster"
    elif speedup.high < 1:
        kind = "slower"
    else:
        kind = "too noisy"

    text = f"{WORDS[kind]}: {speedup.value:.2f}x"
    # The ends of a very wide interval say nothing.
    is_shown = kind in ("faster", "slower") or speedup.ends is not None
    if kind != "too few" and is_shown:
        text += f" [{speedup.low:.2f}, {speedup.high:.2f}]"
        if level != LEVEL:
            text += f" ({100 * level:.3g}% interval)"
    return Verdict(kind, text)


def draft_verdict(comparison: Comparison) -> str:
    """Whether a draft pays, in a sentence, and what it lacks if it is not proven to pay."""
    verdict = comparison.verdict
    if verdict.kind == "faster":
        window = comparison.case.num_draft_tokens
        return f"pays: {verdict.text} with {comparison.case.draft}, {window} draft tokens"

    word = "does not pay yet" if verdict.kind == "slower" else "not proven to pay"
    sentence = f"{word}: {verdict.text}"
    length = comparison.block_efficiency
    needed_length = comparison.needed_block_efficiency
    if length is not None and needed_length is not None:
        sentence += f": acceptance length {length:.2f}, it needs {needed_length:.2f} here"
    return sentence


def level_among(num_candidates: int) -> float:
    """The level of the interval of a candidate that was chosen as the best of several.

    The best of several looks good by chance. The level is raised (Bonferroni) so that, if no
    candidate gains, one is called faster with a probability of at most 1 - `LEVEL`.
    """
    return 1 - 2 * (1 - LEVEL) / max(2, num_candidates)


@dataclass(frozen=True)
class BestChoice:
    """The comparison that the evidence favors, and those that may be as fast.

    Args:
        best: the comparison with the highest lower end of its interval; None if none can be chosen.
        equals: other comparisons whose intervals reach that lower end, or that have no interval.
    """

    best: Comparison | None
    equals: tuple[Comparison, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Whether `best` is faster than standard decoding by more than noise."""
        return self.best is not None and self.best.verdict.kind == "faster"

    @property
    def text(self) -> str:
        """The choice as a sentence."""
        if self.best is None:
            return "nothing to choose from"
        if not self.is_proven:
            return f"nothing here is proven faster than standard decoding: {self.best.verdict.text}"
        if not self.equals:
            return f"best: {self.best.case.label}"
        labels = ", ".join(row.case.label for row in (self.best, *self.equals))
        return f"too noisy to choose between them: {labels}"

    def remark(self, row: Comparison) -> str:
        """The mark of a row of a table; empty unless the row is a proven best or may equal it."""
        if not self.is_proven:
            return ""
        if row is self.best:
            return "<- best"
        if any(row is equal for equal in self.equals):
            return "<- may be as fast"
        return ""


def choose(rows: Sequence[Comparison]) -> BestChoice:
    """Choose a comparison. Those with other tokens than standard decoding's do not count, unless
    their tokens may differ."""
    candidates = [
        row for row in rows if row.walltime_speedup is not None and row.same_tokens is not False
    ]
    if not candidates:
        return BestChoice(None)

    best_row = ranked(candidates)[0]
    return BestChoice(best_row, rows_within_noise(best_row, candidates))


def rows_within_noise(best_row: Comparison, rows: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """The other rows that may be as fast: their intervals do not end below that of the best."""
    best_speedup = best_row.walltime_speedup
    equal_rows = []
    for row in rows:
        speedup = row.walltime_speedup
        if row is best_row or speedup is None or best_speedup is None:
            continue
        # A comparison with NaN is false: without an interval, nothing is excluded.
        is_slower = speedup.high < best_speedup.low
        if not is_slower:
            equal_rows.append(row)
    return tuple(equal_rows)


def best(rows: Sequence[Comparison]) -> Comparison | None:
    """The comparison that the evidence favors, faster or not; see `BestChoice`."""
    return choose(rows).best


def ranked(rows: Sequence[Comparison]) -> list[Comparison]:
    """Sort comparisons by the lower end of the speedup's interval, the highest first.

    Comparisons without an interval come after those with one, by the speedup itself.
    """

    def sort_key(row: Comparison) -> tuple[float, float]:
        speedup = row.walltime_speedup
        if speedup is None:
            return -1.0, 0.0
        if not math.isfinite(speedup.low):
            return 0.0, speedup.value
        return speedup.low, speedup.value

    return sorted(rows, key=sort_key, reverse=True)
