"""Acceptance of draft tokens, from an engine's metrics for Prometheus.

vLLM and llama.cpp share their names. SGLang reports only a running average, which covers other
times than the audit, so it is not read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
POSITION = re.compile(r'position="(\d+)"')

ENGINE_PREFIXES = ("vllm:", "llamacpp:")
OWN_PREFIX = "lightning_specdec_"


@dataclass(frozen=True)
class DraftCounts:
    """What happened to draft tokens.

    Args:
        num_rounds: rounds, or drafts: calls of the target with draft tokens.
        num_drafted: draft tokens.
        num_accepted: accepted draft tokens.
        num_new_tokens: new tokens of all rounds; None if the engine does not count them.
        drafted: draft tokens by their position in the round, if counted.
        accepted: accepted draft tokens by their position.
    """

    num_rounds: float
    num_drafted: float
    num_accepted: float
    num_new_tokens: float | None = None
    drafted: Mapping[int, float] = field(default_factory=dict)
    accepted: Mapping[int, float] = field(default_factory=dict)

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """The counts without those of an earlier time."""
        num_new_tokens = None
        if self.num_new_tokens is not None:
            num_new_tokens = self.num_new_tokens - (earlier.num_new_tokens or 0)
        return DraftCounts(
            num_rounds=self.num_rounds - earlier.num_rounds,
            num_drafted=self.num_drafted - earlier.num_drafted,
            num_accepted=self.num_accepted - earlier.num_accepted,
            num_new_tokens=num_new_tokens,
            drafted=_difference(self.drafted, earlier.drafted),
            accepted=_difference(self.accepted, earlier.accepted),
        )

    @property
    def acceptance_length(self) -> float | None:
        """New tokens per round: accepted draft tokens / rounds + 1, if they are not counted."""
        if self.num_rounds <= 0:
            return None
        if self.num_new_tokens is not None:
            return self.num_new_tokens / self.num_rounds
        return 1 + self.num_accepted / self.num_rounds

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens / draft tokens."""
        return self.num_accepted / self.num_drafted if self.num_drafted > 0 else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position in the round: accepted draft tokens / draft tokens, or / rounds."""
        rates = []
        for position in sorted(self.accepted):
            num_drafted = self.drafted.get(position, self.num_rounds)
            if num_drafted > 0:
                rates.append(self.accepted[position] / num_drafted)
        return rates

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rounds": self.num_rounds,
            "draft_tokens": self.num_drafted,
            "accepted_tokens": self.num_accepted,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
        }


def _difference(counts: Mapping[int, float], earlier: Mapping[int, float]) -> dict[int, float]:
    return {position: count - earlier.get(position, 0.0) for position, count in counts.items()}


def read_draft_counts(text: str) -> DraftCounts | None:
    """The counts in an engine's metrics; None if it does not draft, or does not count."""
    totals, by_position = _read_samples(text)
    for prefix in ENGINE_PREFIXES:
        name = f"{prefix}spec_decode_num"
        if f"{name}_drafts_total" in totals:
            return DraftCounts(
                num_rounds=totals[f"{name}_drafts_total"],
                num_drafted=totals.get(f"{name}_draft_tokens_total", 0.0),
                num_accepted=totals.get(f"{name}_accepted_tokens_total", 0.0),
                accepted=by_position.get(f"{name}_accepted_tokens_per_pos_total", {}),
            )

    # Before the first draft, our server has no counter of draft tokens yet.
    length = f"{OWN_PREFIX}acceptance_length"
    if f"{length}_count" not in totals:
        return None
    return DraftCounts(
        num_rounds=totals[f"{length}_count"],
        num_drafted=totals.get(f"{OWN_PREFIX}draft_tokens_total", 0.0),
        num_accepted=totals.get(f"{OWN_PREFIX}accepted_tokens_total", 0.0),
        num_new_tokens=totals[f"{length}_sum"],
        drafted=by_position.get(f"{OWN_PREFIX}draft_tokens_total", {}),
        accepted=by_position.get(f"{OWN_PREFIX}accepted_tokens_total", {}),
    )


def _read_samples(text: str) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Metrics summed over all labels, and over all labels but the position."""
    totals: dict[str, float] = defaultdict(float)
    by_position: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        totals[name] += value
        position = POSITION.search(labels or "")
        if position is not None:
            by_position[name][int(position[1])] += value
    return dict(totals), {name: dict(counts) for name, counts in by_position.items()}
