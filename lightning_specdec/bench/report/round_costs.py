"""What a round costs beside a step of standard decoding, from the rounds of measured cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_specdec.bench import theory
from lightning_specdec.bench.report.analysis import MeasuredCell

MAX_WINDOW = 16
"""The longest window that is looked at."""


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round.

    Args:
        seconds: of a round without its guesses, by the tokens that it verifies; for one, a step of standard decoding.
        guess_seconds: of each guess.
    """

    seconds: Mapping[int, float]
    guess_seconds: float

    @property
    def cost_ratio(self) -> float:
        """Seconds of a guess / seconds of a step of standard decoding."""
        return self.guess_seconds / self.seconds[1]

    def cheaper(self, share: float) -> RoundCosts:
        """The same with guesses at a share of their seconds."""
        return RoundCosts(self.seconds, share * self.guess_seconds)

    def speedup(self, alpha: float, window: int) -> float:
        """Of an endless text."""
        wide = theory.call_ratio(self.seconds, window + 1)
        return theory.speedup_with_cost_ratio(alpha, window, cost_ratio=self.cost_ratio, call_ratio=wide)

    def best_window(self, alpha: float, *, most: int = MAX_WINDOW) -> int:
        """The window of at most so many tokens with the largest speedup; 0 where none pays."""
        return theory.best_window(alpha, self.cost_ratio, max_window=most, call_seconds=self.seconds)

    def break_even(self, window: int) -> float | None:
        """The acceptance rate below which the window costs time; None where it always does."""
        wide = theory.call_ratio(self.seconds, window + 1)
        return theory.break_even_alpha(window, self.cost_ratio, call_ratio=wide)


def costs_in_place(
    best: MeasuredCell, cells: Sequence[MeasuredCell], standard: MeasuredCell | None
) -> RoundCosts | None:
    """The costs of a cell's rounds and of those of its draft's other windows, the reading of their prompts taken off;
    all of them means.

    Args:
        cells: of the same draft and place, `best` among them.
        standard: standard decoding there.
    """
    step = None if standard is None else standard.seconds_per_token
    if standard is None or not step:
        return None
    firsts = [each for row in standard.rows for each in row["time_to_first_token"] or ()]
    first = statistics.fmean(firsts) if firsts else step
    seconds, guess = {1: step}, None
    for cell in cells:
        phases, calls, window = cell.phase_seconds, cell.total("num_target_calls"), cell.num_draft_tokens
        if phases is None or not calls or not isinstance(window, int):
            continue
        batches = statistics.fmean(math.ceil(row["num_prompts"] / cell.batch_size) for row in cell.rows)
        rounds = sum(phases.values()) - phases["draft"]
        each = max(rounds - batches * max(0.0, first - step), rounds / 10) * len(cell.rows) / calls
        seconds[window + 1] = each
        if cell is best:
            guess = phases["draft"] * len(cell.rows) / calls / window
    return None if guess is None else RoundCosts(seconds, guess)
