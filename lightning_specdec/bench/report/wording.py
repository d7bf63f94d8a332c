"""A choice, a speedup and a list as a reader says them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.bench.report.analysis import MeasuredCell
from lightning_specdec.bench.statistics import Interval

KINDS = {
    "NGramDrafter": "n-gram look-up",
    "LookupFirstDrafter": "look-up first",
    "EarlyExitDrafter": "early exit",
    "ModelDrafter": "draft model",
}
"""Draft classes in words."""


def phrase(cell: MeasuredCell, *, rule: bool = False) -> str:
    """What a user would choose, as a reader says it; with its rule where there are several to choose from."""
    kind = KINDS.get(cell.draft_kind or "", "")
    name = " ".join(str(cell.draft).split())
    told = kind if kind and _same_word(kind, name) else f"{kind} {name}".strip()
    under = f" under {cell.rule}" if rule else ""
    if cell.num_draft_tokens == "auto":
        return f"{told} with windows that adapt{under}"
    return f"{told} with {cell.num_draft_tokens} token{'' if cell.num_draft_tokens == 1 else 's'}{under}"


def shown(interval: Interval, *, unit: str = "x") -> str:
    """A ratio with its interval, where that says something."""
    between = "(no interval)" if interval.ends is None else "[{:.2f}, {:.2f}]".format(*interval.ends)
    return f"{interval.value:.2f}{unit} {between}"


def listed(words: Sequence[str]) -> str:
    """Words with "and" before the last."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _same_word(one: str, other: str) -> bool:
    """Whether a name says no more than a kind: "ngram" and "n-gram look-up"."""
    plain = ["".join(filter(str.isalnum, text.lower())) for text in (one, other)]
    return plain[0].startswith(plain[1])
