"""The runs of a results directory as cells with their figures, each beside standard decoding.

Knows nothing of theory, of what should be done, nor of how figures are shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_specdec.bench.statistics import Interval, mean_std, percentiles, ratio_interval
from lightning_specdec.inference import PHASES

Row = Mapping[str, Any]
Timings = tuple[list[list[float]], list[list[float]]]
"""Seconds of standard decoding and of another way, by repeat and prompt (or batch); of the repeats that both have."""
Place = tuple[str, str, float, int, int]
"""What cells are compared within: pair, domain, temperature, batch size, tokens wanted."""

STANDARD, SPECULATIVE = "standard", "speculative"
_KEYS = (
    *("cell", "repeat", "pair", "way", "draft", "draft_kind", "domain", "num_draft_tokens", "temperature"),
    *("batch_size", "rule", "lossless", "max_new_tokens", "error"),
)
_MEASURED = (
    *("seconds", "num_prompts", "num_new_tokens", "phase_seconds", "num_target_calls", "num_draft_calls"),
    *("num_proposed", "num_tested", "num_accepted", "num_row_rounds", "histogram", "tested_at", "accepted_at"),
    *("prompt_ids", "prompt_seconds", "prompt_new_tokens", "token_seconds", "time_to_first_token", "peak_memory_bytes"),
    *("gpu_utilization", "same_tokens", "num_changed"),
)
"""What every row says, and what every row says that did not fail."""


@dataclass(frozen=True)
class Cell:
    """One way of decoding at one place of the matrix, all its repeats.

    Args:
        rows: the finished repeats that did not fail, in order.
        error: what the first repeat that failed did so by.
        timings: None for standard decoding, and where one of both sides is missing.

    The rest are those of a row.
    """

    pair: str
    way: str
    draft: str | None
    draft_kind: str | None
    domain: str
    num_draft_tokens: int | str | None
    temperature: float
    batch_size: int
    rule: str | None
    lossless: bool | None
    max_new_tokens: int
    rows: tuple[Row, ...]
    error: str | None
    timings: Timings | None = None

    @property
    def place(self) -> Place:
        return (self.pair, self.domain, self.temperature, self.batch_size, self.max_new_tokens)

    @property
    def candidate(self) -> tuple[str | None, int | str | None, str | None]:
        """What a user would choose: draft, window, rule."""
        return (self.draft, self.num_draft_tokens, self.rule)

    @cached_property
    def walltime_speedup(self) -> Interval | None:
        """Seconds of standard decoding / seconds of this way; None where one of them is missing."""
        return None if self.timings is None else ratio_interval(*self.timings)

    @property
    def latency_reduction(self) -> float | None:
        """1 - 1 / walltime_speedup."""
        return None if self.walltime_speedup is None else 1 - 1 / self.walltime_speedup.value

    @property
    def acceptance_rate(self) -> float | None:
        """num_accepted / num_tested."""
        return _ratio(self.total("num_accepted"), self.total("num_tested"))

    @property
    def draft_utilization(self) -> float | None:
        """num_accepted / num_proposed."""
        return _ratio(self.total("num_accepted"), self.total("num_proposed"))

    @property
    def block_efficiency(self) -> float | None:
        """New tokens / row-rounds; 1.0 for standard decoding."""
        return _ratio(self.total("num_new_tokens"), self.total("num_row_rounds"))

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens / seconds, of the median repeat."""
        rates = [row["num_new_tokens"] / row["seconds"] for row in self.rows if row["seconds"]]
        return statistics.median(rates) if rates else None

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the repeats, all prompts together."""
        return mean_std([row["seconds"] for row in self.rows]) if self.rows else None

    @cached_property
    def gaps(self) -> list[float]:
        """Seconds between a token and the one before it; tokens that one round gave come together, with 0 between."""
        return [gap for row in self.rows for prompt in row["token_seconds"] or () for gap in prompt[1:]]

    @property
    def gap_percentiles(self) -> tuple[float, ...] | None:
        """p50, p95 and p99 of `gaps`."""
        return percentiles(self.gaps) if self.gaps else None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean of `gaps`."""
        return statistics.fmean(self.gaps) if self.gaps else None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds until a prompt's first new token: the median over prompts and repeats."""
        found = [each for row in self.rows for each in row["time_to_first_token"] or () if each is not None]
        return statistics.median(found) if found else None

    @property
    def phase_seconds(self) -> dict[str, float] | None:
        """Seconds of each phase, the mean over repeats; None where they are not known."""
        known = [row["phase_seconds"] for row in self.rows if row["phase_seconds"] is not None]
        if not known:
            return None
        return {phase: statistics.fmean(each.get(phase) or 0.0 for each in known) for phase in PHASES}

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most that any phase of any repeat held."""
        found: list[int] = []
        for row in self.rows:
            peak = row["peak_memory_bytes"]
            found += [each for each in (peak.values() if isinstance(peak, Mapping) else [peak]) if each is not None]
        return max(found, default=None)

    @property
    def gpu_utilization(self) -> float | None:
        found = [row["gpu_utilization"] for row in self.rows if row["gpu_utilization"] is not None]
        return statistics.fmean(found) if found else None

    @property
    def same_tokens(self) -> bool | None:
        """Whether every repeat gave standard decoding's tokens; None where they may differ."""
        found = [row["same_tokens"] for row in self.rows if row["same_tokens"] is not None]
        return all(found) if found else None

    @property
    def rates(self) -> list[float | None]:
        """The acceptance rate of each position: accepted there / tested there, given that all before were kept."""
        tested, accepted = self.summed("tested_at"), self.summed("accepted_at")
        return [kept / tries if tries else None for kept, tries in zip(accepted, tested, strict=False)]

    def total(self, key: str) -> int | None:
        """A count, summed over the repeats; None where it is not known."""
        found = [row[key] for row in self.rows if row[key] is not None]
        return sum(found) if found else None

    def summed(self, key: str) -> list[int]:
        """Counts by position, summed over the repeats."""
        lists = [row[key] for row in self.rows if row[key] is not None]
        return [sum(each[i] for each in lists if i < len(each)) for i in range(max(map(len, lists), default=0))]


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    """The cells of all rows, in the order in which they first ran.

    Raises:
        ValueError: a row lacks a field.
    """
    grouped: dict[str, list[Row]] = {}
    for number, row in enumerate(rows, start=1):
        wanted = _KEYS if row.get("error") is not None else (*_KEYS, *_MEASURED)
        if missing := [key for key in wanted if key not in row]:
            raise ValueError(f"row {number} of the results has no {', '.join(missing)}: measure again")
        grouped.setdefault(row["cell"], []).append(row)
    found = [_cell(sorted(each, key=lambda row: row["repeat"])) for each in grouped.values()]
    standard = {cell.place: cell for cell in found if cell.way == STANDARD}
    return [_beside(cell, standard.get(cell.place)) for cell in found]


def pooled_speedup(cells: Sequence[Cell]) -> Interval | None:
    """Seconds of standard decoding / seconds of these cells, the prompts of all of them together."""
    timings = [cell.timings for cell in cells if cell.timings is not None]
    if not timings:
        return None
    repeats = min(len(standard) for standard, _ in timings)
    sides = [[[value for each in timings for value in each[side][i]] for i in range(repeats)] for side in (0, 1)]
    return ratio_interval(*sides)


def _cell(rows: Sequence[Row]) -> Cell:
    first = rows[0]
    values = {key: first[key] for key in _KEYS if key not in ("cell", "repeat", "error")}
    errors = [str(row["error"]) for row in rows if row["error"] is not None]
    good = tuple(row for row in rows if row["error"] is None)
    return Cell(**values, rows=good, error=errors[0] if errors else None)


def _beside(cell: Cell, standard: Cell | None) -> Cell:
    """The cell with its timings."""
    if standard is None or cell.way == STANDARD:
        return cell
    others = {row["repeat"]: row for row in standard.rows}
    pairs = [(others[row["repeat"]], row) for row in cell.rows if row["repeat"] in others]
    if not pairs:
        return cell
    by_prompt = all(_alike(one, other) for one, other in pairs)
    slow = [_units(one, cell.batch_size, by_prompt) for one, _ in pairs]
    fast = [_units(other, cell.batch_size, by_prompt) for _, other in pairs]
    return replace(cell, timings=(slow, fast))


def _alike(one: Row, other: Row) -> bool:
    """Whether two runs say how long each of the same prompts took."""
    return bool(one["prompt_seconds"]) and one["prompt_ids"] == other["prompt_ids"] and bool(other["prompt_seconds"])


def _units(row: Row, batch_size: int, by_prompt: bool) -> list[float]:
    """Seconds of each batch, which ends with its last prompt, its share of what the run took besides; or of the run."""
    if not by_prompt:
        return [row["seconds"]]
    seconds = row["prompt_seconds"]
    batches = [max(seconds[i : i + batch_size]) for i in range(0, len(seconds), batch_size)]
    return [row["seconds"] * each / sum(batches) for each in batches]


def _ratio(top: int | None, bottom: int | None) -> float | None:
    return None if top is None or not bottom else top / bottom


def finite(value: float | None) -> float | None:
    """The number, or None for one that is not known."""
    return None if value is None or not math.isfinite(value) else value
