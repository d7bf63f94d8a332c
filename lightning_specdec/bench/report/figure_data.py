"""What figures choose from: a pair's cells of one rule, its drafts, its domains and its first setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench.config_entries import SPECULATIVE
from lightning_specdec.bench.report.analysis import MeasuredCell, pooled_speedup

_WORDS = {"temperature": "temperature", "batch_size": "batch size", "max_new_tokens": "new tokens wanted:"}


@dataclass(frozen=True)
class FigureData:
    """The cells of one pair that figures show.

    Args:
        cells: those of the first lossless rule (of a lossy one where there is no other), and those without a rule.
        sizes: parameters of the drafts.
    """

    pair: str
    cells: Sequence[MeasuredCell]
    sizes: Mapping[str, int | None]

    @classmethod
    def by_pair(cls, cells: Iterable[MeasuredCell], manifest: Mapping[str, Any]) -> list[FigureData]:
        grouped: dict[str, list[MeasuredCell]] = {}
        for cell in cells:
            grouped.setdefault(cell.pair, []).append(cell)
        found = []
        for pair, own in grouped.items():
            speculative = [cell for cell in own if cell.way == SPECULATIVE]
            rule = next((cell.rule for cell in sorted(speculative, key=lambda cell: not cell.lossless)), None)
            facts = (manifest.get("pairs") or {}).get(pair) or {}
            kept = [cell for cell in own if cell.way != SPECULATIVE or cell.rule == rule]
            found.append(cls(pair, kept, facts.get("draft_parameters") or {}))
        return found

    @property
    def drafts(self) -> list[str]:
        return list(dict.fromkeys(cell.draft for cell in self.cells if cell.way == SPECULATIVE and cell.draft))

    @property
    def domains(self) -> list[str]:
        return list(dict.fromkeys(cell.domain for cell in self.cells))

    @property
    def setting(self) -> dict[str, Any]:
        """The lowest temperature, the smallest batch, the most tokens."""
        return {
            "temperature": min(cell.temperature for cell in self.cells),
            "batch_size": min(cell.batch_size for cell in self.cells),
            "max_new_tokens": max(cell.max_new_tokens for cell in self.cells),
        }

    def at(self, **wanted: Any) -> list[MeasuredCell]:
        """Speculative cells at the first setting, where nothing else is wanted; `...` takes any."""
        chosen = self.setting | {"way": SPECULATIVE} | wanted
        return [cell for cell in self.cells if all(v is ... or getattr(cell, k) == v for k, v in chosen.items())]

    def label(self, draft: str) -> str:
        """A draft with its size, as 12.4k for 12,352 parameters."""
        size = self.sizes.get(draft)
        if size is None:
            return draft
        unit, letter = next((each for each in ((10**9, "B"), (10**6, "M"), (10**3, "k")) if size >= each[0]), (1, ""))
        return f"{draft} ({size / unit:.3g}{letter})"

    def best_window(self, draft: str) -> int | str | None:
        """The window that is fastest over all domains; the first where nothing was timed."""
        groups: dict[int | str | None, list[MeasuredCell]] = {}
        for cell in self.at(draft=draft):
            groups.setdefault(cell.num_draft_tokens, []).append(cell)
        speedups = {window: pooled_speedup([cell.timings for cell in each]) for window, each in groups.items()}
        return max(speedups, key=lambda window: -math.inf if (s := speedups[window]) is None else s.log, default=None)

    def shown(self, *varied: str) -> str:
        """The setting in words, without what a figure varies; with the rule where it makes a difference."""
        parts = [f"{_WORDS[name]} {value:g}" for name, value in self.setting.items() if name not in varied]
        cell = next(iter(self.at(temperature=..., batch_size=..., max_new_tokens=...)), None)
        if cell is not None and not cell.lossless:
            parts.append(f"{cell.rule} (lossy: no lossless rule was measured)")
        elif cell is not None and (self.setting["temperature"] or "temperature" in varied):
            parts.append(str(cell.rule))
        return ", ".join(parts)


def captioned(text: str, data: Sequence[FigureData], *varied: str) -> str:
    """A caption with the setting that is shown of each pair."""
    found: dict[str, list[str]] = {}
    for each in data:
        found.setdefault(each.shown(*varied), []).append(each.pair)
    of = {shown: f" of {', '.join(pairs)}" if len(found) > 1 else "" for shown, pairs in found.items()}
    return " ".join([text, *(f"Shown{pairs}: {shown}." for shown, pairs in of.items())])
