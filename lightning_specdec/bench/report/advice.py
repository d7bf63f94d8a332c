"""The answer: which draft with which window pays where, where speculation stays off, and what would help.

Only lossless cells are advised of which no run failed, and only where they gave standard decoding's tokens or the dtype
is so coarse that rounding may give others. What would help is theory, with the costs of the measured rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_specdec.bench import theory
from lightning_specdec.bench.config_entries import OUTSIDE, SPECULATIVE, STANDARD
from lightning_specdec.bench.report.analysis import MeasuredCell, pooled_speedup
from lightning_specdec.bench.report.judged import lower_bound, missing, pays, sound
from lightning_specdec.bench.report.wording import listed, phrase, shown
from lightning_specdec.bench.speed import Timings
from lightning_specdec.bench.statistics import Interval

MAX_WINDOW = 16
"""The longest window that is looked at."""
WORTH_SAYING = 1.03
"""A change that would bring less is not mentioned."""
FILLED = 0.7
"""Of its windows a draft must fill so much for the closed forms to speak of it."""
Setting = tuple[str, float, int, int]
"""Pair, temperature, batch size, tokens wanted."""


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


@dataclass(frozen=True)
class FasterBaseline:
    """A Hugging Face baseline that is faster than what is advised.

    Args:
        speedup: its `walltime_speedup` over its domains, each as large as its standard decoding's seconds.
        advised: that of the advice over the same, where standard decoding goes on wherever speculation is off; None
            where it is off everywhere.
        domains: those that it was measured in; none where it is all.
    """

    cell: MeasuredCell
    speedup: Interval
    advised: Interval | None
    domains: tuple[str, ...] = ()


@dataclass(frozen=True)
class DomainAdvice:
    """What one domain says.

    Args:
        best: the fastest lossless cell that pays, or the fastest where none does; None where there is none.
        pays: whether it is faster than standard decoding, by more than chance among all that were measured.
        bound: the lower bound that this goes by; None where there is no spread.
        unproven: a faster cell that may not pay, where the best one does.
        missing: why there is none.
        break_even: the acceptance rate below which its window (or the fastest fixed one) costs time; None where no rate
            would pay.
        window: the best window by theory, of those that the draft can fill; None where the costs are not known, or the
            draft guesses in some of its rounds alone, which the closed forms do not know of.
        helps: changes that would help, with the speedup that theory expects; the largest first.
        name_rule: whether there are several rules to choose from.
    """

    domain: str
    best: MeasuredCell | None
    pays: bool
    missing: str = ""
    bound: float | None = None
    unproven: MeasuredCell | None = None
    break_even: float | None = None
    window: int | None = None
    helps: tuple[tuple[str, float], ...] = ()
    name_rule: bool = False

    @property
    def choice(self) -> str:
        """What to do, in a few words."""
        if self.best is None:
            return f"nothing to say: {self.missing}"
        told = phrase(self.best, rule=self.name_rule)
        return told if self.pays else f"off (best: {told})"


@dataclass(frozen=True)
class Advice:
    """What to do with one pair under one setting.

    Args:
        choice: a cell of the draft, window and rule to use where no domain says otherwise; None for "off".
        speedup: of the choice, over the domains where it pays.
        advised: what to use in each domain where something pays: the choice, or another cell where the choice does not
            pay or is slower by more than both intervals.
        num_judged: how many cells there were to choose from.
        name_rule: whether they are of several rules.
        outside: the fastest Hugging Face baseline, where it beats all this.
    """

    setting: Setting
    choice: MeasuredCell | None
    speedup: Interval | None
    advised: Mapping[str, MeasuredCell]
    domains: tuple[DomainAdvice, ...]
    num_judged: int
    name_rule: bool = False
    outside: FasterBaseline | None = None

    @property
    def sentence(self) -> str:
        """The answer, in one line."""
        best = max((each.best for each in self.domains if each.best is not None), key=_speedup, default=None)
        if best is None or best.walltime_speedup is None:
            return f"nothing to say: {'; '.join(dict.fromkeys(each.missing for each in self.domains))}"
        if self.choice is None or self.speedup is None:
            told = f"the best, {self._told(best)}, gives {shown(best.walltime_speedup)} on {best.domain}"
            if best.walltime_speedup.value <= 1:
                return f"do not speculate: {told}"
            if best.estimate is not None and best.estimate.prompts is None:
                return f"do not speculate yet: {told}, of one {_unit(best)} alone: measure several"
            of_all = f", being the best of {self.num_judged}" if self.num_judged > 1 else ""
            return f"do not speculate yet: {told}, which may be chance{of_all}"
        parts = [f"use {self._told(self.choice)}: {shown(self.speedup)}"]
        for domain, cell in self.advised.items():
            if cell.candidate != self.choice.candidate and cell.walltime_speedup is not None:
                parts.append(f"on {domain} {self._told(cell)}: {shown(cell.walltime_speedup)}")
        if off := [each.domain for each in self.domains if each.best is not None and not each.pays]:
            parts.append(f"do not speculate on {listed(off)}")
        if unknown := [each.domain for each in self.domains if each.best is None]:
            parts.append(f"nothing to say on {listed(unknown)}")
        return "; ".join(parts)

    def _told(self, cell: MeasuredCell) -> str:
        return phrase(cell, rule=self.name_rule)


def advise(cells: Sequence[MeasuredCell], dtypes: Mapping[str, str | None]) -> list[Advice]:
    """One piece of advice for each pair and setting, in the order measured.

    Args:
        dtypes: what each pair computes in.
    """
    settings: dict[Setting, list[MeasuredCell]] = {}
    for cell in cells:
        settings.setdefault((cell.pair, cell.temperature, cell.batch_size, cell.max_new_tokens), []).append(cell)
    return [_advice(setting, each, dtypes.get(setting[0])) for setting, each in settings.items()]


def _advice(setting: Setting, cells: Sequence[MeasuredCell], dtype: str | None) -> Advice:
    right = [cell for cell in cells if cell.way == SPECULATIVE and cell.lossless and sound(cell, dtype)]
    paid = {id(cell) for cell in right if pays(cell.estimate, len(right))}
    standard = {cell.domain: cell for cell in cells if cell.way == STANDARD}
    groups: dict[tuple[object, ...], list[MeasuredCell]] = {}
    for cell in right:
        groups.setdefault(cell.candidate, []).append(cell)
    gaining = [[cell for cell in each if id(cell) in paid] for each in groups.values()]
    paying = max(gaining, key=lambda each: _saved(each, standard), default=[])
    domains, several = [], len({cell.rule for cell in right}) > 1
    widest = max((cell.num_draft_tokens for cell in right if isinstance(cell.num_draft_tokens, int)), default=0)
    for domain in dict.fromkeys(cell.domain for cell in cells):
        if own := [cell for cell in right if cell.domain == domain]:
            found = _domain(domain, own, standard.get(domain), paid, widest)
            best = found.best
            bound = None if best is None else lower_bound(best.estimate, len(right))
            faster = max(own, key=_speedup)
            found = replace(found, bound=bound, unproven=faster if found.pays and faster is not best else None)
        else:
            found = DomainAdvice(domain, None, False, missing([cell for cell in cells if cell.domain == domain]))
        domains.append(replace(found, name_rule=several))
    theirs = [cell for cell in cells if cell.way in OUTSIDE and sound(cell, dtype)]
    advised = _advised(domains, {cell.domain: cell for cell in paying})
    speedup = pooled_speedup([cell.timings for cell in paying])
    return Advice(
        setting=setting,
        choice=paying[0] if paying else None,
        speedup=None if speedup is None else speedup.interval,
        advised=advised,
        domains=tuple(domains),
        num_judged=len(right),
        name_rule=several,
        outside=_faster_baseline(theirs, advised, num_domains=len(domains)),
    )


def _advised(domains: Sequence[DomainAdvice], chosen: Mapping[str, MeasuredCell]) -> dict[str, MeasuredCell]:
    """What to use where something pays."""
    found = {}
    for each in domains:
        if each.pays and each.best is not None:
            own, best = chosen.get(each.domain, each.best), each.best
            assert own.walltime_speedup is not None and best.walltime_speedup is not None
            found[each.domain] = best if best.walltime_speedup.low > own.walltime_speedup.high else own
    return found


def _saved(cells: Sequence[MeasuredCell], standard: Mapping[str, MeasuredCell]) -> float:
    """Seconds that one choice saves in these domains."""
    saved = 0.0
    for cell in cells:
        if cell.walltime_speedup is not None and (plain := standard[cell.domain].seconds) is not None:
            saved += plain[0] * (1 - 1 / cell.walltime_speedup.value)
    return saved


def _domain(
    domain: str, cells: Sequence[MeasuredCell], standard: MeasuredCell | None, paid: Container[int], widest: int
) -> DomainAdvice:
    """What one domain says.

    Args:
        widest: the widest window of any draft; one that has no such cell cannot fill it.
    """
    best = max(cells, key=lambda cell: (id(cell) in paid, _speedup(cell)))
    alike = [cell for cell in cells if (cell.draft, cell.rule) == (best.draft, best.rule)]
    fixed = max((cell for cell in alike if isinstance(cell.num_draft_tokens, int)), key=_speedup, default=None)
    if isinstance(best.num_draft_tokens, int):
        fixed = best  # that it pays may have made it the best
    costs = None if fixed is None else _measured_costs(fixed, alike, standard)
    if fixed is None or costs is None or fixed.acceptance_rate is None or not _guesses_always(fixed):
        return DomainAdvice(domain, best, id(best) in paid)
    alpha, window = fixed.acceptance_rate, int(fixed.num_draft_tokens or 0)
    filled = max(cell.num_draft_tokens for cell in alike if isinstance(cell.num_draft_tokens, int))
    most = MAX_WINDOW if filled == widest else filled
    length, base = costs.best_window(alpha, most=most), costs.speedup(alpha, window)
    top = costs.speedup(alpha, length)
    halved, better = costs.cheaper(0.5), (1 + alpha) / 2
    changes = []
    for change, speedup in (
        ("a draft at half the cost", halved.speedup(alpha, halved.best_window(alpha, most=most))),
        ("a draft that is rejected half as often", costs.speedup(better, costs.best_window(better, most=most))),
    ):
        if speedup > WORTH_SAYING * top:  # what the best window alone would bring is not the draft's
            changes.append((change, speedup))
    if length and length not in [cell.num_draft_tokens for cell in alike]:
        changes.append((f"a {'longer' if length > window else 'shorter'} window, of {length}", top))
    scale = _speedup(fixed) / base
    helps = [
        (change, speedup * scale) for change, speedup in changes if speedup * scale > WORTH_SAYING * _speedup(best)
    ]
    return DomainAdvice(
        domain,
        best,
        id(best) in paid,
        break_even=costs.break_even(window),
        window=length,
        helps=tuple(sorted(helps, key=lambda each: -each[1])),
    )


def _guesses_always(cell: MeasuredCell) -> bool:
    """Whether nearly all rounds guess a whole window; each text's last one has no room for it, and is not counted."""
    proposed, rounds, texts = (cell.total(name) for name in ("num_proposed", "num_row_rounds", "num_prompts"))
    if not proposed or rounds is None or texts is None:
        return False
    return proposed >= FILLED * int(cell.num_draft_tokens or 0) * (rounds - texts)


def _unit(cell: MeasuredCell) -> str:
    return "prompt" if cell.batch_size == 1 else "batch"


def _speedup(cell: MeasuredCell) -> float:
    return 0.0 if cell.walltime_speedup is None else cell.walltime_speedup.value


def _measured_costs(
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


def _faster_baseline(
    cells: Sequence[MeasuredCell], advised: Mapping[str, MeasuredCell], *, num_domains: int
) -> FasterBaseline | None:
    """The fastest Hugging Face baseline that beats what is advised, on all prompts that it was measured on."""
    groups: dict[tuple[str, str | None], list[MeasuredCell]] = {}
    for cell in cells:
        groups.setdefault((cell.way, cell.draft), []).append(cell)
    found = []
    for group in groups.values():
        theirs = pooled_speedup([cell.timings for cell in group])
        ours = pooled_speedup([_policy(cell, advised.get(cell.domain)) for cell in group])
        if theirs is None or ours is None or not pays(theirs, len(groups)):
            continue
        if theirs.interval.low > ours.interval.high:
            domains = tuple(cell.domain for cell in group)
            on = () if len(domains) == num_domains else domains
            found.append(FasterBaseline(group[0], theirs.interval, ours.interval if advised else None, on))
    return max(found, key=lambda each: each.speedup.value, default=None)


def _policy(cell: MeasuredCell, advised: MeasuredCell | None) -> Timings | None:
    """What is advised in a cell's domain, or standard decoding against itself."""
    if advised is not None or cell.timings is None:
        return None if advised is None else advised.timings
    return cell.timings._replace(scaled=cell.timings.standard)
