"""The answer: whether speculation pays, with which draft and window, for each pair and setting.

Only lossless cases count of which no run failed and whose tokens are standard decoding's, unless the dtype is so coarse
that rounding explains other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_specdec.bench.rows import HUGGING_FACE, SPECULATIVE, STANDARD, Comparison, Timings
from lightning_specdec.bench.statistics import LEVEL, Estimate, Interval, ratio_estimate

Setting = tuple[str, float, int, int]
"""Pair, temperature, batch size, new tokens."""


@dataclass(frozen=True)
class DomainAnswer:
    """The answer for one domain.

    Args:
        best: the fastest case that is proven to pay; the fastest of all where none is; None where there is none.
        missing: why there is none.
        bound: lower bound of its speedup, corrected for being the best of several.
    """

    domain: str
    best: Comparison | None
    missing: str = ""
    bound: float = math.nan

    @property
    def pays(self) -> bool:
        """Whether it is faster than standard decoding by more than chance."""
        return self.bound > 1

    @property
    def advice(self) -> str:
        """What to do, in a few words."""
        if self.best is None:
            return f"nothing to say: {self.missing}"
        return choice_of(self.best) if self.pays else f"off (best: {choice_of(self.best)})"


@dataclass(frozen=True)
class Answer:
    """The answer for one pair under one setting.

    Args:
        choice: what to use wherever it pays: a case of one domain; None where nothing pays.
        speedup: of the choice, over the domains where it pays.
        faster: a Hugging Face baseline that is faster than the choice, and its speedup.
    """

    setting: Setting
    choice: Comparison | None
    speedup: Interval | None
    domains: tuple[DomainAnswer, ...]
    num_cases: int
    faster: tuple[Comparison, Interval] | None = None

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        found = [each for each in self.domains if each.best is not None]
        if not found:
            return f"nothing to say: {'; '.join(dict.fromkeys(each.missing for each in self.domains))}"
        if self.choice is None or self.speedup is None:
            best = max((each.best for each in found if each.best is not None), key=_speedup)
            told = f"the best, {choice_of(best)}, gives {shown(best.walltime_speedup)} on {best.case.domain}"
            if _speedup(best) <= 1:
                return f"do not speculate: {told}"
            if best.estimate is not None and best.estimate.prompts is None:
                unit = "prompt" if best.case.batch_size == 1 else "batch"
                return f"do not speculate yet: {told}, of one {unit} alone: measure several"
            return f"do not speculate yet: {told}, which may be chance, being the best of {self.num_cases}"
        parts = [f"use {choice_of(self.choice)}: {shown(self.speedup)}"]
        for each in found:
            if each.pays and each.best is not None and each.best.case.candidate != self.choice.case.candidate:
                told = f"{choice_of(each.best)}, {shown(each.best.walltime_speedup)}"
                parts.append(f"fastest on {each.domain}: {told}")
        if off := [each.domain for each in found if not each.pays]:
            parts.append(f"do not speculate on {' and '.join(off)}")
        if unknown := [each.domain for each in self.domains if each.best is None]:
            parts.append(f"nothing to say on {' and '.join(unknown)}")
        return "; ".join(parts)

    @property
    def warning(self) -> str:
        """That a Hugging Face baseline is faster; empty where none is."""
        if self.faster is None:
            return ""
        return f"faster than this: transformers' {self.faster[0].case.label}, {shown(self.faster[1])}"


def answers(found: Sequence[Comparison], dtypes: Mapping[str, str | None]) -> list[Answer]:
    """An answer for each pair and setting, in the order measured.

    Args:
        dtypes: what each pair computes in.
    """
    settings: dict[Setting, list[Comparison]] = {}
    for each in found:
        case = each.case
        settings.setdefault((case.pair, case.temperature, case.batch_size, case.max_new_tokens), []).append(each)
    return [_answer(setting, cases, dtypes.get(setting[0])) for setting, cases in settings.items()]


def _answer(setting: Setting, cases: Sequence[Comparison], dtype: str | None) -> Answer:
    sound = [each for each in cases if each.timings is not None and each.error is None and _same(each, dtype)]
    ours = [each for each in sound if each.case.method == SPECULATIVE and each.case.lossless]
    bounds = {id(each): lower_bound(each.estimate, len(ours)) for each in ours}
    domains = []
    for domain in dict.fromkeys(each.case.domain for each in cases):
        own = [each for each in ours if each.case.domain == domain]
        if own:
            best = max(own, key=lambda each: (bounds[id(each)] > 1, _speedup(each)))
            domains.append(DomainAnswer(domain, best, bound=bounds[id(best)]))
        else:
            domains.append(DomainAnswer(domain, None, _missing([each for each in cases if each.case.domain == domain])))
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    for each in ours:
        if bounds[id(each)] > 1:
            groups.setdefault(each.case.candidate, []).append(each)
    chosen = max(groups.values(), key=lambda group: sum(map(_saved_seconds, group)), default=[])
    speedup = pooled_speedup([each.timings for each in chosen])
    return Answer(
        setting,
        chosen[0] if chosen else None,
        None if speedup is None else speedup.interval,
        tuple(domains),
        len(ours),
        _faster(
            [each for each in sound if each.case.method in HUGGING_FACE], {each.case.domain: each for each in chosen}
        ),
    )


def pays(estimate: Estimate | None, num_cases: int) -> bool:
    """Whether a speedup is above 1 by more than chance, as the best of so many cases."""
    return lower_bound(estimate, num_cases) > 1


def lower_bound(estimate: Estimate | None, num_cases: int) -> float:
    """The lower bound of a speedup that is the best of so many (Bonferroni): where nothing gains, one is said to pay
    with probability 1 - `LEVEL` at most. NaN for a single prompt or batch, which shows no spread."""
    if estimate is None or estimate.prompts is None:
        return math.nan
    return estimate.bound((1 - LEVEL) / max(2, num_cases))


def pooled_speedup(found: Sequence[Timings | None]) -> Estimate | None:
    """The `walltime_speedup` over the prompts of several cases together; None without any."""
    known = [each for each in found if each is not None]
    if not known:
        return None
    repeats = min(len(each.standard) for each in known)
    sides = ([each.standard for each in known], [each.scaled for each in known])
    return ratio_estimate(*([[value for rows in side for value in rows[i]] for i in range(repeats)] for side in sides))


def rounds(dtype: str | None) -> bool:
    """Whether a dtype is so coarse that the same model, computed differently, may give other tokens."""
    return dtype in ("bfloat16", "float16")


def choice_of(each: Comparison) -> str:
    """What a user would choose, in words."""
    case = each.case
    window = "windows that adapt" if case.num_draft_tokens == "auto" else f"window {case.num_draft_tokens}"
    name = " ".join(str(case.draft).split())
    return f"{name} with {window}" + (f" ({case.rule})" if case.temperature else "")


def shown(interval: Interval | None) -> str:
    """A ratio with its interval."""
    if interval is None:
        return "-"
    return f"{interval.value:.2f}x " + (
        "(no interval)" if interval.ends is None else "[{:.2f}, {:.2f}]".format(*interval.ends)
    )


def _same(each: Comparison, dtype: str | None) -> bool:
    return each.same_tokens is not False or rounds(dtype)


def _speedup(each: Comparison) -> float:
    return 0.0 if each.walltime_speedup is None else each.walltime_speedup.value


def _saved_seconds(each: Comparison) -> float:
    assert each.timings is not None
    return sum(map(sum, each.timings.standard)) / len(each.timings.standard) * (1 - 1 / _speedup(each))


def _faster(theirs: Sequence[Comparison], ours: Mapping[str, Comparison]) -> tuple[Comparison, Interval] | None:
    """The fastest Hugging Face baseline whose interval lies above that of the choice on the same prompts."""
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    for each in theirs:
        groups.setdefault(each.case.candidate, []).append(each)
    found = []
    for group in groups.values():
        speedup = pooled_speedup([each.timings for each in group])
        # Where nothing of ours pays, standard decoding goes on.
        own = pooled_speedup(
            [ours[each.case.domain].timings if each.case.domain in ours else _idle(each) for each in group]
        )
        if speedup and own and pays(speedup, len(groups)) and speedup.interval.low > own.interval.high:
            found.append((group[0], speedup.interval))
    return max(found, key=lambda each: each[1].value, default=None)


def _idle(each: Comparison) -> Timings | None:
    """Standard decoding beside itself."""
    return None if each.timings is None else each.timings._replace(scaled=each.timings.standard)


def _missing(cases: Sequence[Comparison]) -> str:
    """Why no case of a domain counts."""
    tried = [each for each in cases if each.case.method == SPECULATIVE]
    if not tried:
        return "no speculation was measured"
    if not any(each.rows for each in cases if each.case.method == STANDARD):
        return "no run of standard decoding has finished"
    if not any(each.case.lossless for each in tried):
        return "no lossless rule was measured"
    if any(each.case.lossless and each.error is None and each.rows for each in tried):
        return "every lossless method gave other tokens than standard decoding"
    return "a run of every lossless method has failed"
