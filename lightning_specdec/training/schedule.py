"""How fast a run learns at each of its steps, and what it has cost so far."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any


def warmup_cosine(step: int, num_steps: float, *, warmup_steps: int, final: float) -> float:
    """The learning rate of a step as a share of the highest: it rises linearly, then falls by half a cosine.

    Args:
        num_steps: of the whole run; infinite where nobody knows, and then the rate does not fall.
        warmup_steps: while it rises.
        final: the share at the end.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if not math.isfinite(num_steps):
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))


class Effort:
    """Tokens that a run has learned from, each as often as it was seen, and the seconds that it took.

    Validation counts. A resumed run goes on counting.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._seconds = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        """Let the clock run from now on."""
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """So far."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for the recipe."""
        return {"tokens_seen": self.num_tokens, "training_seconds": round(self.seconds, 1)}

    def go_on_from(self, recipe: Mapping[str, Any]) -> None:
        """Add what an earlier part of the run has cost, as its recipe says, if that says so in numbers."""
        tokens, seconds = recipe.get("tokens_seen"), recipe.get("training_seconds")
        self.num_tokens += tokens if isinstance(tokens, int) else 0
        self._seconds += seconds if isinstance(seconds, int | float) else 0.0
