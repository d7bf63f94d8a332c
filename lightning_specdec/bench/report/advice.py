"""The answer: which draft with which window pays where, which speculation to leave off, and what would help.

Knows nothing of how it is shown. Only lossless ways that gave standard decoding's tokens are advised.

Theory: costs are those of rounds in place, their prompts' reading taken off: seconds of a guess, and of a round of each
window without its guesses, in steps of standard decoding. With them and the measured acceptance rate the closed forms
say what another window, a cheaper draft or a better one would bring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_specdec.bench.report.analysis import SPECULATIVE, STANDARD, Cell, pooled_speedup
from lightning_specdec.bench.report.round_costs import costs_in_place
from lightning_specdec.bench.statistics import Interval

WORTH_SAYING = 1.03
"""A change that would bring less is not mentioned."""
Setting = tuple[str, float, int, int]
"""Pair, temperature, batch size, tokens wanted."""
KINDS = {
    "NGramDrafter": "n-gram look-up",
    "LookupFirstDrafter": "look-up first",
    "EarlyExitDrafter": "early exit",
    "ModelDrafter": "draft model",
}
"""Draft classes in words."""


@dataclass(frozen=True)
class DomainAdvice:
    """What one domain says.

    Args:
        best: the fastest lossless cell that pays, or the fastest where none does; None where none could be measured.
        pays: whether its interval lies above 1.
        break_even: the acceptance rate below which its window costs time; None where no rate would pay.
        window: the best window by theory; None where the costs are not known.
        helps: changes that would help, with the speedup that theory expects; the largest first.
    """

    domain: str
    best: Cell | None
    pays: bool
    break_even: float | None = None
    window: int | None = None
    helps: tuple[tuple[str, float], ...] = ()

    @property
    def choice(self) -> str:
        """What to do, in a few words."""
        if self.best is None:
            return "off (nothing was measured)"
        return phrase(self.best) if self.pays else f"off (best: {phrase(self.best)})"


@dataclass(frozen=True)
class Advice:
    """What to do with one pair under one setting.

    Args:
        choice: a cell of the draft, window and rule to use where no domain says otherwise; None for "off".
        speedup: of the choice, over the domains where it pays.
        own: the choice's speedup in each domain where it pays.
        outside: the fastest of transformers' own ways with its speedup over all domains, where it beats the choice.
    """

    setting: Setting
    choice: Cell | None
    speedup: Interval | None
    own: Mapping[str, Interval]
    domains: tuple[DomainAdvice, ...]
    outside: tuple[Cell, Interval] | None = None

    @property
    def sentence(self) -> str:
        """The answer, in one line."""
        best = max((each.best for each in self.domains if each.best is not None), key=_speedup, default=None)
        if best is None or best.walltime_speedup is None:
            return "nothing to say: no lossless speculative run has finished beside a standard one"
        if self.choice is None or self.speedup is None:
            return f"do not speculate: the best, {phrase(best)}, gives {shown(best.walltime_speedup)} on {best.domain}"
        parts = [f"use {phrase(self.choice)}: {shown(self.speedup)}"]
        for each in self.domains:
            other, own = each.best, self.own.get(each.domain)
            if each.pays and other is not None and other.walltime_speedup is not None:
                if own is None or other.walltime_speedup.low > own.high:
                    parts.append(f"on {each.domain} {phrase(other)}: {shown(other.walltime_speedup)}")
        if off := [each.domain for each in self.domains if not each.pays]:
            parts.append(f"do not speculate on {_listed(off)}")
        return "; ".join(parts)


def advise(cells: Sequence[Cell]) -> list[Advice]:
    """One piece of advice for each pair and setting, in the order measured."""
    settings: dict[Setting, list[Cell]] = {}
    for cell in cells:
        settings.setdefault((cell.pair, cell.temperature, cell.batch_size, cell.max_new_tokens), []).append(cell)
    return [_advice(setting, each) for setting, each in settings.items()]


def phrase(cell: Cell) -> str:
    """What a user would choose, as a reader says it."""
    kind = KINDS.get(cell.draft_kind or "", "")
    name = " ".join(str(cell.draft).split())
    told = kind if kind and _same_word(kind, name) else f"{kind} {name}".strip()
    if cell.num_draft_tokens == "auto":
        return f"{told} with windows that adapt"
    return f"{told} with {cell.num_draft_tokens} token{'' if cell.num_draft_tokens == 1 else 's'}"


def shown(interval: Interval) -> str:
    """A speedup with its interval."""
    if math.isnan(interval.low):
        return f"{interval.value:.2f}x (one run, no interval)"
    return f"{interval.value:.2f}x [{interval.low:.2f}, {interval.high:.2f}]"


def pays(cell: Cell) -> bool:
    """Whether it is surely faster than standard decoding: its interval lies above 1."""
    speedup = cell.walltime_speedup
    return speedup is not None and (speedup.value if math.isnan(speedup.low) else speedup.low) > 1


def _advice(setting: Setting, cells: Sequence[Cell]) -> Advice:
    right = [
        cell
        for cell in cells
        if cell.way == SPECULATIVE and cell.lossless and cell.same_tokens is not False and cell.walltime_speedup
    ]
    standard = {cell.domain: cell for cell in cells if cell.way == STANDARD}
    domains = dict.fromkeys(cell.domain for cell in cells)
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in right:
        groups.setdefault(cell.candidate, []).append(cell)
    chosen = max(groups.values(), key=lambda each: _saved(each, standard), default=[])
    paying = [cell for cell in chosen if pays(cell)]
    by_domain = {domain: [cell for cell in right if cell.domain == domain] for domain in domains}
    return Advice(
        setting=setting,
        choice=paying[0] if paying else None,
        speedup=pooled_speedup(paying),
        own={cell.domain: cell.walltime_speedup for cell in paying if cell.walltime_speedup is not None},
        domains=tuple(_domain(domain, each, standard.get(domain)) for domain, each in by_domain.items()),
        outside=_outside(cells, chosen),
    )


def _saved(cells: Sequence[Cell], standard: Mapping[str, Cell]) -> float:
    """Seconds that one choice saves in the domains where it pays."""
    saved = 0.0
    for cell in cells:
        if pays(cell) and cell.walltime_speedup is not None and (plain := standard[cell.domain].seconds) is not None:
            saved += plain[0] * (1 - 1 / cell.walltime_speedup.value)
    return saved


def _outside(cells: Sequence[Cell], chosen: Sequence[Cell]) -> tuple[Cell, Interval] | None:
    groups: dict[tuple[str, str | None], list[Cell]] = {}
    for cell in cells:
        if cell.way not in (SPECULATIVE, STANDARD) and cell.lossless is not False and cell.walltime_speedup is not None:
            groups.setdefault((cell.way, cell.draft), []).append(cell)
    found = [(each[0], speedup) for each in groups.values() if (speedup := pooled_speedup(each)) is not None]
    best = max(found, key=lambda pair: pair[1].value, default=None)
    ours = pooled_speedup(chosen)
    if best is None or best[1].value <= 1 or (ours is not None and not best[1].low > ours.high):
        return None
    return best


def _domain(domain: str, cells: Sequence[Cell], standard: Cell | None) -> DomainAdvice:
    best = max(cells, key=lambda cell: (pays(cell), _speedup(cell)), default=None)
    if best is None:
        return DomainAdvice(domain, None, False)
    alike = [cell for cell in cells if (cell.draft, cell.rule) == (best.draft, best.rule)]
    costs = costs_in_place(best, alike, standard)
    alpha, window = best.acceptance_rate, best.num_draft_tokens
    if costs is None or alpha is None or not isinstance(window, int) or best.walltime_speedup is None:
        return DomainAdvice(domain, best, pays(best))
    length, base = costs.best_window(alpha), costs.speedup(alpha, window)
    top = costs.speedup(alpha, length)
    halved, better = costs.cheaper(0.5), (1 + alpha) / 2
    changes = []
    for change, speedup in (
        ("a draft at half the cost", halved.speedup(alpha, halved.best_window(alpha))),
        ("a draft that is rejected half as often", costs.speedup(better, costs.best_window(better))),
    ):
        if speedup > WORTH_SAYING * top:  # what the best window alone would bring is not the draft's
            changes.append((change, speedup))
    if length and length not in [cell.num_draft_tokens for cell in alike]:
        changes.append((f"a {'longer' if length > window else 'shorter'} window, of {length}", top))
    scale = best.walltime_speedup.value / base
    helps = [(change, speedup * scale) for change, speedup in changes if speedup > WORTH_SAYING * base]
    return DomainAdvice(
        domain,
        best,
        pays(best),
        break_even=costs.break_even(window),
        window=length,
        helps=tuple(sorted(helps, key=lambda each: -each[1])),
    )


def _speedup(cell: Cell) -> float:
    return 0.0 if cell.walltime_speedup is None else cell.walltime_speedup.value


def _same_word(one: str, other: str) -> bool:
    """Whether a name says no more than a kind: "ngram" and "n-gram look-up"."""
    plain = ["".join(filter(str.isalnum, text.lower())) for text in (one, other)]
    return plain[0].startswith(plain[1])


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
