"""The answer: whether speculation pays, with which draft and window, for each pair, domain and setting.

Only lossless cases count of which no run failed and whose tokens are standard decoding's, unless the dtype is so coarse
that rounding explains other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_specdec.bench.rows import HUGGING_FACE, SPECULATIVE, Comparison
from lightning_specdec.bench.statistics import LEVEL, Interval

Place = tuple[str, str, float, int, int]
"""Pair, domain, temperature, batch size, new tokens."""


@dataclass(frozen=True)
class Advice:
    """The answer for one pair, domain and setting.

    Args:
        best: the fastest case that is proven to pay; the fastest of all where none is; None where no case counts.
        bound: lower bound of its speedup, corrected for being the best of several; NaN where there is none.
        theirs: the fastest of transformers' methods, where it is faster than that.
    """

    place: Place
    best: Comparison | None = None
    bound: float = math.nan
    theirs: Comparison | None = None

    @property
    def pays(self) -> bool:
        """Whether it is faster than standard decoding by more than chance."""
        return self.bound > 1

    @property
    def choice(self) -> str:
        """What to use, in a few words."""
        if self.best is None:
            return "nothing to say"
        return choice_of(self.best) if self.pays else f"off (best: {choice_of(self.best)})"

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        if self.best is None:
            return (
                "nothing to say: no lossless method finished with the tokens of standard decoding"
            )
        told = f"{choice_of(self.best)}: {shown(self.best.walltime_speedup)}"
        if self.pays:
            if (theirs := self.theirs) is not None:
                told += (
                    f"; faster: transformers' {theirs.case.label}, {shown(theirs.walltime_speedup)}"
                )
            return f"use {told}"
        if _speedup(self.best) <= 1:
            return f"do not speculate: the best is {told}"
        return (
            f"do not speculate yet: the best is {told}, which may be chance: measure more prompts"
        )


def advise(found: Sequence[Comparison], dtypes: Mapping[str, str | None]) -> list[Advice]:
    """The answers, in the order measured.

    Args:
        dtypes: what each pair computes in.
    """
    places: dict[Place, list[Comparison]] = {}
    for each in found:
        places.setdefault(each.case.place, []).append(each)
    return [_advice(place, cases, rounds(dtypes.get(place[0]))) for place, cases in places.items()]


def _advice(place: Place, cases: Sequence[Comparison], rounding: bool) -> Advice:
    sound = [
        each
        for each in cases
        if each.error is None and each.timings and (rounding or each.same_tokens is not False)
    ]
    ours = [each for each in sound if each.case.method == SPECULATIVE and each.case.lossless]
    if not ours:
        return Advice(place)
    bounds = {id(each): lower_bound(each, len(ours)) for each in ours}
    best = max(ours, key=lambda each: (bounds[id(each)] > 1, _speedup(each)))
    theirs = [
        each
        for each in sound
        if each.case.method in HUGGING_FACE and _speedup(each) > _speedup(best)
    ]
    return Advice(place, best, bounds[id(best)], max(theirs, key=_speedup, default=None))


def lower_bound(each: Comparison, num_cases: int) -> float:
    """The lower bound of a speedup that is the best of so many (Bonferroni): where nothing gains, one is said to pay
    with probability 1 - `LEVEL` at most. NaN for a single prompt or batch, which shows no spread."""
    speedup = each.speedup(1 - 2 * (1 - LEVEL) / max(2, num_cases))
    return (
        math.nan
        if speedup is None or each.timings is None or len(each.timings[0][0]) == 1
        else speedup.low
    )


def rounds(dtype: str | None) -> bool:
    """Whether a dtype is so coarse that the same model, computed differently, may give other tokens."""
    return dtype in ("bfloat16", "float16")


def choice_of(each: Comparison) -> str:
    """What a user would choose, in words."""
    case = each.case
    window = (
        "windows that adapt"
        if case.num_draft_tokens == "auto"
        else f"window {case.num_draft_tokens}"
    )
    return f"{case.draft} with {window}" + (f" ({case.rule})" if case.temperature else "")


def shown(interval: Interval | None) -> str:
    """A ratio with its interval."""
    if interval is None:
        return "-"
    ends = "(no interval)" if interval.ends is None else "[{:.2f}, {:.2f}]".format(*interval.ends)
    return f"{interval.value:.2f}x {ends}"


def _speedup(each: Comparison) -> float:
    return 0.0 if each.walltime_speedup is None else each.walltime_speedup.value
