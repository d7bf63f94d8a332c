"""Seconds of two ways of decoding, side by side: what a walltime_speedup is the ratio of.

Theory: two ways need not give texts of the same length (sampled text, lossy rules, ties in rounding), and the shorter
text is not the faster way. So of each unit, a prompt or a batch of them, the way's seconds are scaled to standard
decoding's number of tokens, and a walltime_speedup is the sum of standard decoding's seconds / the sum of these. Where
texts are of one length nothing is scaled, and it is seconds / seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
"""A run of a cell, as results have it."""


class Unit(NamedTuple):
    """What is timed as one: a prompt, a batch, or a whole run."""

    seconds: float
    num_new_tokens: int

    @property
    def timed(self) -> bool:
        """Whether it has a speed at all."""
        return self.seconds > 0 and self.num_new_tokens > 0

    def scaled_to(self, other: Unit) -> Unit:
        """As long as it would have taken for another's number of tokens."""
        return Unit(self.seconds * (other.num_new_tokens / self.num_new_tokens), other.num_new_tokens)

    def speedup(self, standard: Unit) -> float:
        """The `walltime_speedup` of a single unit."""
        return standard.seconds / self.scaled_to(standard).seconds


class Timings(NamedTuple):
    """Two ways on the same units, by repeat and unit.

    Args:
        standard: seconds of standard decoding.
        scaled: seconds of the other way, for as many tokens.
        num_new_tokens: standard decoding's, the mean of all units.
    """

    standard: list[list[float]]
    scaled: list[list[float]]
    num_new_tokens: float

    @property
    def num_units(self) -> int:
        return len(self.standard[0])


def timings(pairs: Sequence[tuple[Row, Row]], *, batch_size: int) -> Timings | None:
    """Runs of standard decoding and of another way beside it, by prompt (by batch, where several are decoded together),
    or by run where the prompts' own seconds are not known.

    A unit that took no time or gave no token in one of the runs is left out of all; None where no unit is left.
    """
    apart = all(_told_apart(*pair) for pair in pairs)
    repeats = [tuple(_units(row, batch_size) if apart else [_whole(row)] for row in pair) for pair in pairs]
    every = range(len(repeats[0][0]) if repeats else 0)
    kept = [i for i in every if all(side[i].timed for repeat in repeats for side in repeat)]
    if not kept:
        return None
    standard = [[repeat[0][i] for i in kept] for repeat in repeats]
    scaled = [[repeat[1][i].scaled_to(repeat[0][i]).seconds for i in kept] for repeat in repeats]
    tokens = statistics.fmean(unit.num_new_tokens for units in standard for unit in units)
    return Timings([[unit.seconds for unit in units] for units in standard], scaled, tokens)


def _told_apart(one: Row, other: Row) -> bool:
    """Whether two runs say how long each of the same prompts took."""
    return bool(one["prompt_seconds"]) and one["prompt_ids"] == other["prompt_ids"] and bool(other["prompt_seconds"])


def _whole(row: Row) -> Unit:
    return Unit(row["seconds"], row["num_new_tokens"])


def _units(row: Row, batch_size: int) -> list[Unit]:
    """Of each batch, which ends with its last prompt: its share of the run's seconds, what the run took besides its
    prompts included."""
    seconds, tokens = row["prompt_seconds"], row["prompt_new_tokens"]
    firsts = range(0, len(seconds), batch_size)
    batches = [max(seconds[first : first + batch_size]) for first in firsts]
    share = row["seconds"] / (sum(batches) or 1.0)
    return [
        Unit(share * each, sum(tokens[first : first + batch_size])) for first, each in zip(firsts, batches, strict=True)
    ]
