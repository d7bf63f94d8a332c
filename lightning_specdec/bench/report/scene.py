"""What pictures choose from: a pair's drafts with their sizes and colours, its domains, its first setting.

Knows nothing of what the pictures show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench.report.analysis import SPECULATIVE, Cell, pooled_speedup

MAX_SERIES = 8
"""As many as have colours of their own."""


@dataclass
class Scene:
    """What all pictures are made from.

    Args:
        cells: those that pictures may show: of one rule, and of standard decoding.
        sizes: parameters of a pair's drafts.
    """

    cells: Sequence[Cell]
    sizes: Mapping[str, Mapping[str, int | None]]
    manifest: Mapping[str, Any]

    @classmethod
    def of(cls, cells: Iterable[Cell], manifest: Mapping[str, Any]) -> Scene:
        every = list(cells)
        rules: dict[str, str | None] = {}
        for cell in every:
            if cell.way == SPECULATIVE and cell.lossless:
                rules.setdefault(cell.pair, cell.rule)
        kept = [cell for cell in every if cell.way != SPECULATIVE or cell.rule == rules.get(cell.pair)]
        pairs = manifest.get("pairs") or {}
        return cls(kept, {name: each.get("draft_parameters") or {} for name, each in pairs.items()}, manifest)

    @property
    def pairs(self) -> list[str]:
        return list(dict.fromkeys(cell.pair for cell in self.cells))

    def drafts(self, pair: str) -> list[str]:
        found = (cell.draft for cell in self.cells if cell.pair == pair and cell.way == SPECULATIVE)
        return list(dict.fromkeys(draft for draft in found if draft is not None))[:MAX_SERIES]

    def domains(self, pair: str) -> list[str]:
        return list(dict.fromkeys(cell.domain for cell in self.cells if cell.pair == pair))

    def color(self, pair: str, draft: str) -> str:
        return f"s{self.drafts(pair).index(draft) + 1}"

    def label(self, pair: str, draft: str) -> str:
        """A draft with its size."""
        size = self.sizes.get(pair, {}).get(draft)
        return draft if size is None else f"{draft} ({short_count(size)})"

    def at(self, pair: str, **wanted: Any) -> list[Cell]:
        """Speculative cells at the pair's first setting, where nothing else is wanted; `...` takes any."""
        own = [cell for cell in self.cells if cell.pair == pair]
        setting = {
            "temperature": min(cell.temperature for cell in own),
            "batch_size": min(cell.batch_size for cell in own),
            "max_new_tokens": max(cell.max_new_tokens for cell in own),
            "way": SPECULATIVE,
        }
        setting |= wanted
        return [cell for cell in own if all(v is ... or getattr(cell, k) == v for k, v in setting.items())]

    def best_window(self, pair: str, draft: str) -> int | str | None:
        """The window that is fastest over all domains; the first where nothing was timed."""
        groups: dict[int | str | None, list[Cell]] = {}
        for cell in self.at(pair, draft=draft):
            groups.setdefault(cell.num_draft_tokens, []).append(cell)
        speedups = {window: pooled_speedup(each) for window, each in groups.items()}
        return max(speedups, key=lambda window: speedups[window].value if speedups[window] else 0.0, default=None)  # type: ignore[union-attr]


def short_count(number: int) -> str:
    """12,352 as 12.4k."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
