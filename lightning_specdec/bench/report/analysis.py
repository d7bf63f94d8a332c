"""The runs of a results directory as cells with their figures, each beside standard decoding."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from lightning_specdec.bench.config_entries import STANDARD
from lightning_specdec.bench.row import SETTINGS, lacking
from lightning_specdec.bench.speed import Row, Timings, timings
from lightning_specdec.bench.statistics import (
    Estimate,
    Interval,
    mean_interval,
    mean_std,
    median_interval,
    percentiles,
    ratio_estimate,
)
from lightning_specdec.inference import PHASES


@dataclass(frozen=True)
class MeasuredCell:
    """One method of decoding under one setting, all its repeats.

    Args:
        rows: the finished repeats that did not fail, in order.
        error: what the first repeat that failed did so by.
        timings: beside standard decoding, of the repeats that both have; None for standard decoding itself, and where
            one of both sides is missing.

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
    def place(self) -> tuple[str, str, float, int, int]:
        """What cells are compared within: pair, domain, temperature, batch size, tokens wanted."""
        return (self.pair, self.domain, self.temperature, self.batch_size, self.max_new_tokens)

    @property
    def candidate(self) -> tuple[str | None, int | str | None, str | None]:
        """What a user would choose: draft, window, rule."""
        return (self.draft, self.num_draft_tokens, self.rule)

    @cached_property
    def estimate(self) -> Estimate | None:
        """`walltime_speedup` with its error."""
        return None if self.timings is None else ratio_estimate(*self.timings[:2])

    @cached_property
    def walltime_speedup(self) -> Interval | None:
        """Seconds of standard decoding / of this method for as many tokens; None where one of them is missing."""
        return None if self.estimate is None else self.estimate.interval

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

    @cached_property
    def tokens_per_second(self) -> Interval | None:
        """New tokens / seconds, the median over the repeats."""
        rates = [row["num_new_tokens"] / row["seconds"] for row in self.rows]
        return median_interval(rates) if rates else None

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

    @cached_property
    def time_to_first_token(self) -> Interval | None:
        """Seconds until a prompt's first new token: of each prompt the median over the repeats, the mean of these.

        Prompts that are decoded together share their first call, so the interval is over batches.
        """
        found = [row["time_to_first_token"] for row in self.rows if row["time_to_first_token"]]
        if not found or not all(map(all, found)):
            return None
        places = range(0, len(found[0]), self.batch_size)
        batches = [[statistics.fmean(row[i : i + self.batch_size]) for i in places] for row in found]
        return mean_interval(batches)

    @property
    def phase_seconds(self) -> dict[str, float] | None:
        """Seconds of each phase, the mean over repeats; None where they are not known."""
        known = [row["phase_seconds"] for row in self.rows if row["phase_seconds"] is not None]
        if not known:
            return None
        return {phase: statistics.fmean(each.get(phase) or 0.0 for each in known) for phase in PHASES}

    @cached_property
    def phase_memory_bytes(self) -> dict[str, int]:
        """The most that each phase held in any repeat; nothing of phases that could not be told apart."""
        found: dict[str, int] = {}
        for row in self.rows:
            peaks = row["peak_memory_bytes"]
            for phase, peak in peaks.items() if isinstance(peaks, Mapping) else ():
                found[phase] = max(peak, found.get(phase, 0))
        return found

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most that any phase of any repeat held."""
        whole = [row["peak_memory_bytes"] for row in self.rows if isinstance(row["peak_memory_bytes"], int)]
        return max([*whole, *self.phase_memory_bytes.values()], default=None)

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


def cells_of(rows: Iterable[Row]) -> list[MeasuredCell]:
    """The cells of all rows, in the order in which they first ran.

    Raises:
        ValueError: a row lacks a field.
    """
    grouped: dict[str, list[Row]] = {}
    for number, row in enumerate(rows, start=1):
        if missing := lacking(row):
            raise ValueError(f"row {number} of the results has no {', '.join(missing)}: measure again")
        grouped.setdefault(row["cell"], []).append(row)
    found = [_cell(sorted(each, key=lambda row: row["repeat"])) for each in grouped.values()]
    standard = {cell.place: cell for cell in found if cell.way == STANDARD}
    return [_beside(cell, standard.get(cell.place)) for cell in found]


def pooled_speedup(found: Sequence[Timings | None]) -> Estimate | None:
    """The `walltime_speedup` of several cells, the prompts of all of them together."""
    known = [each for each in found if each is not None]
    if not known:
        return None
    repeats = min(len(each.standard) for each in known)
    sides = [
        [[value for timed in side for value in timed[i]] for i in range(repeats)]
        for side in ([each.standard for each in known], [each.scaled for each in known])
    ]
    return ratio_estimate(*sides)


def _cell(rows: Sequence[Row]) -> MeasuredCell:
    first = rows[0]
    values = {
        each.name: first[each.name] for each in fields(MeasuredCell) if each.name in SETTINGS and each.name != "error"
    }
    errors = [_failure(row) for row in rows]
    good = tuple(row for row, error in zip(rows, errors, strict=True) if error is None)
    return MeasuredCell(**values, rows=good, error=next((error for error in errors if error is not None), None))


def _failure(row: Row) -> str | None:
    """What a run failed by; one that has no speed has failed too."""
    if row["error"] is not None:
        return str(row["error"])
    if not row["num_prompts"] or not row["num_new_tokens"]:
        return "gave no tokens"
    return None if row["seconds"] else "took no seconds"


def _beside(cell: MeasuredCell, standard: MeasuredCell | None) -> MeasuredCell:
    """The cell with its timings."""
    if standard is None or cell.way == STANDARD:
        return cell
    others = {row["repeat"]: row for row in standard.rows}
    pairs = [(others[row["repeat"]], row) for row in cell.rows if row["repeat"] in others]
    return replace(cell, timings=timings(pairs, batch_size=cell.batch_size))


def _ratio(top: int | None, bottom: int | None) -> float | None:
    return None if top is None or not bottom else top / bottom


def rounds(dtype: str | None) -> bool:
    """Whether a dtype is so coarse that the same model, computed differently, may give other tokens."""
    return dtype in ("bfloat16", "float16")
