"""Rows of results: one repeat of one case as counts and seconds, and the comparison of its repeats
with standard decoding."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from lightning_specdec.bench.statistics import (
    LEVEL,
    Interval,
    Pair,
    piece_interval,
    ratio_interval,
)
from lightning_specdec.bench.theory import predicted_speedup
from lightning_specdec.bench.verdict import Verdict, judge
from lightning_specdec.decoding.timing import PHASES

STANDARD = "standard"
SPECULATIVE = "speculative"
OURS = (STANDARD, SPECULATIVE)
"""Methods of this package."""
GENERATE = "generate"
ASSISTED = "assisted"
PROMPT_LOOKUP = "prompt_lookup"
HUGGING_FACE = (GENERATE, ASSISTED, PROMPT_LOOKUP)
"""Methods of transformers: plain `generate`, with an assistant model, with prompt lookup."""
DRAFTING = (SPECULATIVE, ASSISTED, PROMPT_LOOKUP)
"""Methods with a number of draft tokens."""
FORMAT = 3
"""Increased when rows or manifests change; other formats are refused."""
_TEXT_FIELDS = ("pair", "method", "domain")
_NUMBER_FIELDS = ("temperature", "batch_size", "max_new_tokens", "repeat", "seed")


@dataclass(kw_only=True)
class Record:
    """One repeat of one case. Stores counts and seconds; rates are those of a `Comparison`.

    Args:
        draft: name of the drafter.
        rule: name of the rule, with its settings.
        error: why the run failed; such a row has no figures.
        window: costs that an adaptive window goes by.
        commit: git commit of the program that ran it.
        seconds: wall time of all prompts, by the decoding functions' own clocks.
        num_draft_steps: sequential draft tokens: in each round of a batch, those of the longest
            draft.
        histogram: row-rounds that accepted 0, 1, ... draft tokens.
        prompt_seconds, prompt_new_tokens: by prompt.
        time_to_first_token: mean over the prompts.
        same_tokens: whether the tokens are standard decoding's; None if they may differ.
        differs_at: prompt and token at which they first differ.
        num_changed: for a lossy rule, tokens that the target would not have drawn.
        pieces: seconds of standard decoding and of this method for the same few tokens, in turn;
            empty for standard decoding itself; None if the methods took turns after whole repeats.
    """

    pair: str
    method: str
    domain: str
    temperature: float
    batch_size: int
    max_new_tokens: int
    repeat: int
    seed: int
    draft: str | None = None
    num_draft_tokens: int | str | None = None
    rule: str | None = None
    lossless: bool | None = None
    error: str | None = None
    window: dict[str, Any] | None = None
    commit: str | None = None
    seconds: float = 0.0
    num_new_tokens: int = 0
    phase_seconds: dict[str, float] | None = None
    num_target_calls: int = 0
    num_draft_calls: int | None = None
    num_draft_steps: int | None = None
    num_proposed: int | None = None
    num_tested: int | None = None
    num_accepted: int | None = None
    histogram: list[int] | None = None
    num_row_rounds: int = 0
    prompt_seconds: list[float] = field(default_factory=list)
    prompt_new_tokens: list[int] = field(default_factory=list)
    time_to_first_token: float | None = None
    peak_memory_bytes: int | None = None
    same_tokens: bool | None = None
    differs_at: list[int] | None = None
    tokens_sha256: str | None = None
    num_changed: int | None = None
    pieces: list[Pair] | None = None

    @property
    def workload(self) -> tuple[str, str, float, int, int]:
        """Pair, domain, temperature, batch size, requested tokens: rows are compared within it."""
        return (self.pair, self.domain, self.temperature, self.batch_size, self.max_new_tokens)

    @property
    def cell(self) -> tuple[Any, ...]:
        """The workload and the choices (method, draft, window, rule), equal in all repeats."""
        return (*self.workload, self.method, self.draft, self.num_draft_tokens, self.rule)

    @property
    def label(self) -> str:
        """What a user chooses, in a few words."""
        words = [self.draft, self.num_draft_tokens, self.rule]
        if self.method != SPECULATIVE:
            words.insert(0, self.method)
        return " ".join(str(word) for word in words if word)

    @property
    def failure(self) -> str | None:
        """Why the run failed; a run without tokens or seconds has failed too."""
        if self.error:
            return self.error
        if not self.num_new_tokens or not self.seconds:
            return "gave no tokens"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Known values, plain, for a line of a file; `from_dict` is the inverse."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return {"format": FORMAT, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """A row of a file.

        Raises:
            ValueError: it has another format, or a field is missing, unknown or wrong.
        """
        expected_names = {field.name for field in fields(cls)} | {"format"}
        if values.get("format") != FORMAT or not values.keys() <= expected_names:
            raise ValueError(f"is not a row of format {FORMAT}")
        for name in _TEXT_FIELDS:
            _check_type(values, name, str)
        for name in _NUMBER_FIELDS:
            _check_type(values, name, int, float)
        row = cls(**{name: value for name, value in values.items() if name != "format"})
        if row.pieces is not None:
            # JSON has lists instead of pairs.
            row.pieces = [(standard_seconds, seconds) for standard_seconds, seconds in row.pieces]
        return row


def _check_type(values: Mapping[str, Any], name: str, *types: type) -> None:
    value = values.get(name)
    if not isinstance(value, types):
        raise ValueError(f"has a wrong {name}, {str(value)[:60]!r}")


class Unit(NamedTuple):
    """Seconds and new tokens of one prompt, or of one batch of prompts."""

    seconds: float
    num_tokens: int


Timings = tuple[list[list[float]], list[list[float]]]
"""Seconds of standard decoding and of another method, by repeat and unit (prompt or batch)."""


def timings(pairs: Sequence[tuple[Record, Record]]) -> Timings | None:
    """Seconds of paired repeats, scaled to equally many tokens.

    Texts may differ in length (sampling, lossy rules), and a method is not faster because its text
    is shorter. Its seconds are therefore scaled to the tokens that standard decoding generated in
    the same unit. A unit without time or tokens in one of the runs is left out of all.

    Args:
        pairs: for each repeat, the rows of standard decoding and of the other method.

    Returns:
        The seconds of both; None if no unit is left.
    """
    if not pairs:
        return None
    standard_runs = [_units(standard) for standard, _ in pairs]
    method_runs = [_units(row) for _, row in pairs]

    usable_units = []
    for unit_index in range(len(standard_runs[0])):
        units = [run[unit_index] for run in (*standard_runs, *method_runs)]
        if all(unit.seconds > 0 and unit.num_tokens > 0 for unit in units):
            usable_units.append(unit_index)
    if not usable_units:
        return None

    standard_seconds = []
    method_seconds = []
    for standard_run, method_run in zip(standard_runs, method_runs, strict=True):
        standard_seconds.append([standard_run[i].seconds for i in usable_units])
        scaled_seconds = []
        for i in usable_units:
            num_tokens = standard_run[i].num_tokens
            scaled_seconds.append(method_run[i].seconds * num_tokens / method_run[i].num_tokens)
        method_seconds.append(scaled_seconds)
    return standard_seconds, method_seconds


def seconds(rows: Sequence[Record]) -> float | None:
    """Seconds of a repeat, as in `walltime_speedup`; None without rows.

    The mean of repeats that took turns within a text, since the ratio of their pieces is one of
    sums. Of other repeats, it is the sum over batches of medians over repeats.
    """
    if not rows:
        return None
    if all(row.pieces is not None for row in rows):
        return statistics.fmean(row.seconds for row in rows) or None
    runs = [_units(row) for row in rows]
    total_seconds = 0.0
    for unit_index in range(len(runs[0])):
        total_seconds += statistics.median(run[unit_index].seconds for run in runs)
    return total_seconds or None


def speed(rows: Sequence[Record]) -> float | None:
    """New tokens of a repeat / `seconds`; None without rows."""
    total_seconds = seconds(rows)
    if total_seconds is None:
        return None
    token_counts = [row.num_new_tokens for row in rows]
    if all(row.pieces is not None for row in rows):
        return statistics.fmean(token_counts) / total_seconds
    return statistics.median(token_counts) / total_seconds


def _units(row: Record) -> list[Unit]:
    """Seconds and tokens of each batch, in order.

    A batch ends with its last prompt. Time that belongs to no batch is shared out among them.
    """
    batches = []
    for start in range(0, len(row.prompt_seconds), row.batch_size):
        stop = start + row.batch_size
        batch_seconds = max(row.prompt_seconds[start:stop])
        batches.append(Unit(batch_seconds, sum(row.prompt_new_tokens[start:stop])))

    total_seconds = sum(batch.seconds for batch in batches) or 1.0
    scale = row.seconds / total_seconds
    return [Unit(scale * batch.seconds, batch.num_tokens) for batch in batches]


@dataclass(frozen=True)
class Comparison:
    """The timed repeats of one case, with those of standard decoding.

    Args:
        case: a row with the settings of the case.
        rows: the repeats that finished and generated tokens, in order.
        standard: standard decoding's repeats with the same prompts and settings.
        error: why the first failed repeat failed; None if none failed.
        interrupted: whether Ctrl-C ended the measurement early.
        level: confidence level of its interval and its verdict.
    """

    case: Record
    rows: tuple[Record, ...]
    standard: tuple[Record, ...] = ()
    error: str | None = None
    interrupted: bool = False
    level: float = LEVEL

    def __repr__(self) -> str:
        result = self.error or self.walltime_speedup
        return f"Comparison({self.case.label}: {result}, {len(self.rows)} repeats)"

    @cached_property
    def timings(self) -> Timings | None:
        """Timings of the repeats that both have; None for standard decoding itself."""
        if self.case.method == STANDARD:
            return None
        standard_by_repeat = {row.repeat: row for row in self.standard}
        pairs = []
        for row in self.rows:
            if row.repeat in standard_by_repeat:
                pairs.append((standard_by_repeat[row.repeat], row))
        return timings(pairs)

    @property
    def num_units(self) -> int:
        """Prompts, or batches of prompts, that the timings distinguish."""
        if self.timings is None:
            return 0
        standard_seconds, _ = self.timings
        return len(standard_seconds[0])

    @cached_property
    def pieces(self) -> list[Pair]:
        """Paired seconds of all repeats, if the methods took turns within a text; else none."""
        pairs: list[Pair] = []
        for row in self.rows:
            pairs += row.pieces or []
        return pairs

    @property
    def num_pairs(self) -> int:
        """Paired timings that the speedup is computed from: pieces, or repeats x units."""
        if self.pieces:
            return len(self.pieces)
        if self.timings is None:
            return 0
        standard_seconds, _ = self.timings
        return len(standard_seconds) * self.num_units

    def speedup(self, level: float) -> Interval | None:
        """`walltime_speedup` with its confidence interval at another level, such as 0.99."""
        if self.pieces:
            return piece_interval(self.pieces, level=level)
        if self.timings is None:
            return None
        standard_seconds, method_seconds = self.timings
        return ratio_interval(standard_seconds, method_seconds, level=level)

    @cached_property
    def walltime_speedup(self) -> Interval | None:
        """Seconds of standard decoding / seconds of this method for equally many tokens, with a
        confidence interval."""
        return self.speedup(self.level)

    @property
    def verdict(self) -> Verdict:
        """Whether the method is faster than standard decoding on these prompts."""
        return judge(self.walltime_speedup, self.num_pairs, level=self.level)

    @property
    def latency_reduction(self) -> float | None:
        """1 - 1 / walltime_speedup."""
        if self.walltime_speedup is None:
            return None
        return 1 - 1 / self.walltime_speedup.value

    @property
    def acceptance_rate(self) -> float | None:
        """num_accepted / num_tested."""
        return self._ratio("num_accepted", "num_tested")

    @property
    def draft_utilization(self) -> float | None:
        """num_accepted / num_proposed."""
        return self._ratio("num_accepted", "num_proposed")

    @property
    def block_efficiency(self) -> float | None:
        """New tokens / row-rounds; 1.0 for standard decoding."""
        return self._ratio("num_new_tokens", "num_row_rounds")

    @property
    def needed_block_efficiency(self) -> float | None:
        """Tokens per round with which this method would be as fast as standard decoding, at the
        present cost of a round: block_efficiency / walltime_speedup."""
        if self.block_efficiency is None or self.walltime_speedup is None:
            return None
        return self.block_efficiency / self.walltime_speedup.value

    @property
    def cost_ratio(self) -> float | None:
        """Seconds of one draft step / of one target call on one token, means of the run; None
        without draft steps."""
        draft_step_seconds = self._draft_step_seconds
        target_seconds = _phase_seconds_per_call("verify", self.standard)
        if draft_step_seconds is None or not target_seconds:
            return None
        return draft_step_seconds / target_seconds

    @property
    def predicted_speedup(self) -> float | None:
        """What theory expects from the acceptance rate and the mean costs of these runs.

        None for adaptive windows, and if drafts are shorter than half the window on average, as for
        lookups that find nothing: theory assumes full windows.
        """
        alpha = self.acceptance_rate
        num_draft_tokens = self.case.num_draft_tokens
        draft_step_seconds = self._draft_step_seconds
        if alpha is None or draft_step_seconds is None:
            return None
        if not isinstance(num_draft_tokens, int) or not self.standard:
            return None

        num_draft_steps = self.total("num_draft_steps") or 0
        num_target_calls = self.total("num_target_calls") or 0
        if 2 * num_draft_steps < num_draft_tokens * num_target_calls:
            return None

        text_lengths = []
        for row in self.rows:
            text_lengths += row.prompt_new_tokens
        return predicted_speedup(
            alpha,
            num_draft_tokens,
            draft_step_seconds=draft_step_seconds,
            target_seconds=_phase_seconds_per_call("verify", self.standard),
            verify_seconds=_phase_seconds_per_call("verify", self.rows),
            round_overhead_seconds=_overhead_seconds_per_call(self.rows),
            step_overhead_seconds=_overhead_seconds_per_call(self.standard),
            num_new_tokens=max(1, round(statistics.fmean(text_lengths))),
        )

    @property
    def phase_seconds(self) -> dict[str, float] | None:
        """Mean seconds of each phase of a repeat; None if they are not known."""
        runs = [row.phase_seconds for row in self.rows if row.phase_seconds is not None]
        if not runs:
            return None
        return {phase: statistics.fmean(run[phase] for run in runs) for phase in PHASES}

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens / seconds, see `speed`."""
        return speed(self.rows)

    @property
    def standard_tokens_per_second(self) -> float | None:
        """Tokens per second of standard decoding on the same text: tokens_per_second /
        walltime_speedup.

        The texts of both may differ in length. The two speeds and the speedup agree all the same.
        Without a speedup, it is the speed of standard decoding on its own text.
        """
        if self.walltime_speedup is None or self.tokens_per_second is None:
            return speed(self.standard)
        return self.tokens_per_second / self.walltime_speedup.value

    @property
    def same_tokens(self) -> bool | None:
        """Whether every repeat generated standard decoding's tokens; None if they may differ."""
        checks = [row.same_tokens for row in self.rows if row.same_tokens is not None]
        return all(checks) if checks else None

    def summary(self) -> dict[str, Any]:
        """Settings, figures and both sides as plain values, for JSON and CSV; None for what is not
        known."""
        settings = {name: getattr(self.case, name) for name in SETTINGS}
        figures = {name: getattr(self, name) for name in FIGURES}
        standard_side = _side(self.standard)
        if standard_side is not None:
            standard_side["tokens_per_second"] = self.standard_tokens_per_second
        sides = {STANDARD: standard_side, SPECULATIVE: None}
        # For standard decoding itself this is its only side.
        sides[self.case.method] = _side(self.rows)
        return {
            **settings,
            "repeats": len(self.rows),
            "same_tokens": self.same_tokens,
            "error": self.error,
            "interrupted": self.interrupted,
            **_speedup_fields(self.walltime_speedup),
            **figures,
            "num_changed": self.total("num_changed"),
            **sides,
        }

    def total(self, name: str) -> int | None:
        """A count, summed over the repeats; None if it is not known."""
        counts = []
        for row in self.rows:
            count = getattr(row, name)
            if count is not None:
                counts.append(count)
        return sum(counts) if counts else None

    def _ratio(self, numerator_name: str, denominator_name: str) -> float | None:
        """A ratio of two totals; None if one is not known or the denominator is 0."""
        numerator = self.total(numerator_name)
        denominator = self.total(denominator_name)
        if numerator is None or not denominator:
            return None
        return numerator / denominator

    @property
    def _draft_step_seconds(self) -> float | None:
        num_steps = self.total("num_draft_steps")
        phase_seconds = self.phase_seconds
        if not num_steps or not phase_seconds:
            return None
        return len(self.rows) * phase_seconds["draft"] / num_steps


SETTINGS = (
    "pair",
    "domain",
    "temperature",
    "batch_size",
    "method",
    "draft",
    "num_draft_tokens",
    "rule",
    "lossless",
)
"""Fields of a case in a summary."""
FIGURES = (
    "latency_reduction",
    "predicted_speedup",
    "cost_ratio",
    "tokens_per_second",
    "acceptance_rate",
    "draft_utilization",
    "block_efficiency",
)
"""Properties of a comparison in a summary."""


def _phase_seconds_per_call(phase: str, rows: Sequence[Record]) -> float:
    """Mean seconds of a phase for each call of the target."""
    num_calls = sum(row.num_target_calls for row in rows)
    if not num_calls:
        return 0.0
    return sum(row.phase_seconds[phase] for row in rows if row.phase_seconds) / num_calls


def _overhead_seconds_per_call(rows: Sequence[Record]) -> float:
    """Mean seconds outside drafting and the target, for each call of the target."""
    return _phase_seconds_per_call("accept", rows) + _phase_seconds_per_call("rest", rows)


def _speedup_fields(speedup: Interval | None) -> dict[str, float | None]:
    """A speedup and the ends of its interval as plain values; None for what is not finite."""
    if speedup is None:
        speedup = Interval(math.nan, math.nan, math.nan)
    values = {
        "walltime_speedup": speedup.value,
        "walltime_speedup_low": speedup.low,
        "walltime_speedup_high": speedup.high,
    }
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _side(rows: Sequence[Record]) -> dict[str, Any] | None:
    """The figures of one side of a comparison.

    All are those of the repeat with the (lower) median of the seconds, so that they belong
    together, except for the tokens per second, which are those of all repeats.
    """
    if not rows:
        return None
    sorted_rows = sorted(rows, key=lambda row: row.seconds)
    median_row = sorted_rows[(len(rows) - 1) // 2]
    phase_seconds = median_row.phase_seconds or dict.fromkeys(PHASES)

    block_efficiency = None
    if median_row.num_row_rounds:
        block_efficiency = median_row.num_new_tokens / median_row.num_row_rounds
    return {
        "seconds": median_row.seconds,
        "time_to_first_token": median_row.time_to_first_token,
        "num_new_tokens": median_row.num_new_tokens,
        "num_target_calls": median_row.num_target_calls,
        "num_draft_calls": median_row.num_draft_calls,
        "peak_memory_bytes": median_row.peak_memory_bytes,
        "tokens_per_second": speed(rows),
        **{f"{phase}_seconds": phase_seconds[phase] for phase in phase_seconds},
        "block_efficiency": block_efficiency,
        "runs": {"seconds": [row.seconds for row in rows]},
    }


def comparisons(rows: Iterable[Record]) -> list[Comparison]:
    """The cells of all rows, in the order in which they first ran, each with standard decoding of
    its workload."""
    rows_by_cell: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        rows_by_cell.setdefault(row.cell, []).append(row)

    groups = []
    standard_by_workload: dict[tuple[Any, ...], tuple[Record, ...]] = {}
    for cell_rows in rows_by_cell.values():
        sorted_rows = sorted(cell_rows, key=lambda row: row.repeat)
        groups.append(sorted_rows)
        case = sorted_rows[0]
        if case.method == STANDARD:
            standard_by_workload[case.workload] = _finished(sorted_rows)

    cells = []
    for sorted_rows in groups:
        case = sorted_rows[0]
        failures = [row.failure for row in sorted_rows if row.failure is not None]
        cells.append(
            Comparison(
                case,
                _finished(sorted_rows),
                standard_by_workload.get(case.workload, ()),
                failures[0] if failures else None,
            )
        )
    return cells


def _finished(rows: Sequence[Record]) -> tuple[Record, ...]:
    return tuple(row for row in rows if row.failure is None)
