"""What pictures choose from: a pair's drafts with their sizes and colours, its domains, its first setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench.config_entries import SPECULATIVE
from lightning_specdec.bench.report.analysis import MeasuredCell, pooled_speedup

MAX_SERIES = 8
"""As many as have colours of their own."""
_WORDS = {"temperature": "temperature", "batch_size": "batch size", "max_new_tokens": "new tokens wanted:"}


@dataclass
class Scene:
    """What all pictures are made from.

    Args:
        cells: those that pictures may show: of one rule, and of ways without one.
        rules: of each pair the one that is shown, and whether it is lossless.
        sizes: parameters of a pair's drafts.
    """

    cells: Sequence[MeasuredCell]
    rules: Mapping[str, tuple[str | None, bool]]
    sizes: Mapping[str, Mapping[str, int | None]]
    manifest: Mapping[str, Any]

    @classmethod
    def of(cls, cells: Iterable[MeasuredCell], manifest: Mapping[str, Any]) -> Scene:
        every = list(cells)
        rules: dict[str, tuple[str | None, bool]] = {}
        for lossless in (True, False):
            for cell in every:
                if cell.way == SPECULATIVE and bool(cell.lossless) == lossless:
                    rules.setdefault(cell.pair, (cell.rule, lossless))
        kept = [cell for cell in every if cell.way != SPECULATIVE or cell.rule == rules[cell.pair][0]]
        pairs = manifest.get("pairs") or {}
        return cls(kept, rules, {name: each.get("draft_parameters") or {} for name, each in pairs.items()}, manifest)

    @property
    def pairs(self) -> list[str]:
        return list(dict.fromkeys(cell.pair for cell in self.cells))

    def drafts(self, pair: str) -> list[str]:
        found = (cell.draft for cell in self.cells if cell.pair == pair and cell.way == SPECULATIVE)
        return list(dict.fromkeys(draft for draft in found if draft is not None))

    def domains(self, pair: str) -> list[str]:
        return list(dict.fromkeys(cell.domain for cell in self.cells if cell.pair == pair))

    def color(self, pair: str, draft: str) -> str:
        return color(self.drafts(pair).index(draft))

    def label(self, pair: str, draft: str) -> str:
        """A draft with its size."""
        size = self.sizes.get(pair, {}).get(draft)
        return draft if size is None else f"{draft} ({short_count(size)})"

    def at(self, pair: str, **wanted: Any) -> list[MeasuredCell]:
        """Speculative cells at the pair's first setting, where nothing else is wanted; `...` takes any."""
        setting = self._setting(pair) | {"way": SPECULATIVE} | wanted
        own = [cell for cell in self.cells if cell.pair == pair]
        return [cell for cell in own if all(v is ... or getattr(cell, k) == v for k, v in setting.items())]

    def told(self, *varied: str) -> str:
        """What pictures show of all that was measured, in words; without what they vary."""
        found: dict[str, list[str]] = {}
        for pair in self.pairs:
            setting = self._setting(pair)
            parts = [f"{_WORDS[name]} {setting[name]:g}" for name in _WORDS if name not in varied]
            rule, lossless = self.rules.get(pair, (None, True))
            if rule is not None:
                parts.append(rule if lossless else f"{rule} (lossy: no lossless rule was measured)")
            found.setdefault(", ".join(parts), []).append(pair)
        if len(found) == 1:
            return f"Shown: {next(iter(found))}."
        return " ".join(f"Shown of {', '.join(pairs)}: {setting}." for setting, pairs in found.items())

    def _setting(self, pair: str) -> dict[str, Any]:
        """What is shown of a pair where nothing else is said."""
        own = [cell for cell in self.cells if cell.pair == pair]
        return {
            "temperature": min(cell.temperature for cell in own),
            "batch_size": min(cell.batch_size for cell in own),
            "max_new_tokens": max(cell.max_new_tokens for cell in own),
        }

    def best_window(self, pair: str, draft: str) -> int | str | None:
        """The window that is fastest over all domains; the first where nothing was timed."""
        groups: dict[int | str | None, list[MeasuredCell]] = {}
        for cell in self.at(pair, draft=draft):
            groups.setdefault(cell.num_draft_tokens, []).append(cell)
        speedups = {window: pooled_speedup([cell.timings for cell in each]) for window, each in groups.items()}
        return max(speedups, key=lambda window: speedups[window].log if speedups[window] else -math.inf, default=None)  # type: ignore[union-attr]


def color(place: int) -> str:
    """The palette's name of a series; the ninth has the first's, and another mark."""
    return f"s{place % MAX_SERIES + 1}"


def parts(cells: Sequence[MeasuredCell]) -> list[Sequence[MeasuredCell]]:
    """Cells by so many as have colours of their own."""
    return [cells[first : first + MAX_SERIES] for first in range(0, len(cells), MAX_SERIES)]


def short_count(number: int) -> str:
    """12,352 as 12.4k."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
