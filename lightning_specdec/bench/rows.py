"""Rows of results: one repeat of one case as counts and seconds, and the comparison of its repeats with standard
decoding."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from lightning_specdec.bench.statistics import LEVEL, Interval, ratio_interval
from lightning_specdec.bench.theory import predicted_speedup
from lightning_specdec.decoding.timing import PHASES

STANDARD, SPECULATIVE = OURS = ("standard", "speculative")
"""Methods of this package."""
GENERATE, ASSISTED, PROMPT_LOOKUP = HUGGING_FACE = ("generate", "assisted", "prompt_lookup")
"""Methods of transformers: plain `generate`, with an assistant model, with prompt lookup."""
DRAFTING = (SPECULATIVE, ASSISTED, PROMPT_LOOKUP)
"""Methods with a number of draft tokens."""
FORMAT = 3
"""Counted up when rows or manifests change; other formats are refused."""
_TEXT = ("pair", "method", "domain")
_NUMBERS = ("temperature", "batch_size", "max_new_tokens", "repeat", "seed")


@dataclass(kw_only=True)
class ResultRow:
    """One repeat of one case. Stores counts and seconds; rates are those of a `Comparison`.

    Args:
        draft: name of the drafter.
        rule: with its settings.
        error: why the run failed; such a row has no figures.
        window: of an adaptive window, the costs that it goes by.
        commit: the program that ran it.
        seconds: wall time of all prompts, by the decoding functions' own clocks.
        num_draft_steps: draft tokens one after the other: of each round of a batch, those of its longest draft.
        histogram: row-rounds that accepted 0, 1, ... draft tokens.
        prompt_seconds, prompt_new_tokens: by prompt.
        time_to_first_token: mean over the prompts.
        same_tokens: whether the tokens are standard decoding's; None where they may differ.
        differs_at: prompt and token at which they first differ.
        num_changed: under a lossy rule, tokens that the target would not have drawn.
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

    @property
    def place(self) -> tuple[str, str, float, int, int]:
        """What rows are compared within: pair, domain, temperature, batch size, tokens wanted."""
        return (self.pair, self.domain, self.temperature, self.batch_size, self.max_new_tokens)

    @property
    def cell(self) -> tuple[Any, ...]:
        """All repeats of one case: the place and what a user chooses (method, draft, window, rule)."""
        return (*self.place, self.method, self.draft, self.num_draft_tokens, self.rule)

    @property
    def label(self) -> str:
        """What a user chooses, in a few words."""
        parts = (
            "" if self.method == SPECULATIVE else self.method,
            self.draft,
            self.num_draft_tokens,
            self.rule,
        )
        return " ".join(str(part) for part in parts if part)

    @property
    def failure(self) -> str | None:
        """Why the run failed; one without tokens or seconds has failed too."""
        return self.error or (None if self.num_new_tokens and self.seconds else "gave no tokens")

    def to_dict(self) -> dict[str, Any]:
        """Plain values that are known, for a line of a file; `from_dict` is the inverse."""
        return {
            "format": FORMAT,
            **{name: value for name, value in vars(self).items() if value is not None},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ResultRow:
        """A row of a file.

        Raises:
            ValueError: it has another format, or a field is missing, unknown or wrong.
        """
        known = {each.name for each in fields(cls)}
        if values.get("format") != FORMAT or values.keys() - known != {"format"}:
            raise ValueError(f"is not a row of format {FORMAT}")
        for names, kinds in ((_TEXT, (str,)), (_NUMBERS, (int, float))):
            for name in names:
                if not isinstance(values.get(name), kinds):
                    raise ValueError(f"has a wrong {name}, {str(values.get(name))[:60]!r}")
        return cls(**{name: value for name, value in values.items() if name != "format"})


Timings = tuple[list[list[float]], list[list[float]]]
"""Seconds of standard decoding and of a method beside it, by repeat and unit (prompt or batch)."""


def timings(pairs: Sequence[tuple[ResultRow, ResultRow]]) -> Timings | None:
    """Repeats of standard decoding and of a method beside it.

    Texts may differ in length (sampling, lossy rules), and the shorter text is not the faster method: the method's
    seconds are scaled to as many tokens as standard decoding gave in the same unit. A unit without time or tokens in
    one of the runs is left out of all; None where nothing is left.
    """
    units = [[_units(row) for row in pair] for pair in pairs]
    every = range(len(units[0][0]) if units else 0)
    kept = [i for i in every if all(min(side[i]) > 0 for repeat in units for side in repeat)]
    if not kept:
        return None
    standard = [[one[i][0] for i in kept] for one, _ in units]
    return standard, [[two[i][0] * one[i][1] / two[i][1] for i in kept] for one, two in units]


def seconds(rows: Sequence[ResultRow]) -> float | None:
    """Sum over batches of medians over repeats, as in `walltime_speedup`; None without rows."""
    repeats = [_units(row) for row in rows]
    numbers = range(len(repeats[0]) if repeats else 0)
    return sum(statistics.median(repeat[i][0] for repeat in repeats) for i in numbers) or None


def speed(rows: Sequence[ResultRow]) -> float | None:
    """New tokens / `seconds`; None without rows."""
    whole = seconds(rows)
    return None if whole is None else statistics.median(row.num_new_tokens for row in rows) / whole


def _units(row: ResultRow) -> list[tuple[float, int]]:
    """Seconds and tokens of each batch, which ends with its last prompt. What a run takes besides is shared out."""
    seconds, tokens, size = row.prompt_seconds, row.prompt_new_tokens, row.batch_size
    batches = [
        (max(seconds[i : i + size]), sum(tokens[i : i + size]))
        for i in range(0, len(seconds), size)
    ]
    share = row.seconds / (sum(each for each, _ in batches) or 1.0)
    return [(share * each, number) for each, number in batches]


@dataclass(frozen=True)
class Comparison:
    """The timed repeats of one case beside those of standard decoding.

    Args:
        case: a row with the settings of the case.
        rows: the repeats that finished and gave tokens, in order.
        standard: standard decoding's repeats with the same prompts and settings.
        error: why the first failed repeat failed; None if none failed.
        interrupted: whether Ctrl-C ended the measurement early.
    """

    case: ResultRow
    rows: tuple[ResultRow, ...]
    standard: tuple[ResultRow, ...] = ()
    error: str | None = None
    interrupted: bool = False

    def __repr__(self) -> str:
        return f"Comparison({self.case.label}: {self.error or self.walltime_speedup}, {len(self.rows)} repeats)"

    @cached_property
    def timings(self) -> Timings | None:
        """Timings of the repeats that both have; None for standard decoding itself."""
        if self.case.method == STANDARD:
            return None
        others = {row.repeat: row for row in self.standard}
        return timings([(others[row.repeat], row) for row in self.rows if row.repeat in others])

    def speedup(self, level: float) -> Interval | None:
        """`walltime_speedup` with its confidence interval at another level, such as 0.99."""
        return None if self.timings is None else ratio_interval(*self.timings, level=level)

    @cached_property
    def walltime_speedup(self) -> Interval | None:
        """Seconds of standard decoding / seconds of this method for as many tokens, with a confidence interval."""
        return self.speedup(LEVEL)

    @property
    def latency_reduction(self) -> float | None:
        """1 - 1 / walltime_speedup."""
        return None if self.walltime_speedup is None else 1 - 1 / self.walltime_speedup.value

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
    def cost_ratio(self) -> float | None:
        """Seconds of one draft step / of one target call on one token, means of the run; None without draft steps."""
        draft, target = self._draft_step_seconds, self._each("verify", self.standard)
        return None if draft is None or not target else draft / target

    @property
    def predicted_speedup(self) -> float | None:
        """What theory expects from the acceptance rate and the mean costs of these runs.

        None for adaptive windows, and where drafts are shorter than half the window on average (lookups that find
        nothing): theory assumes whole windows.
        """
        alpha, window, step = (
            self.acceptance_rate,
            self.case.num_draft_tokens,
            self._draft_step_seconds,
        )
        if alpha is None or step is None or not isinstance(window, int) or not self.standard:
            return None
        if 2 * (self.total("num_draft_steps") or 0) < window * (
            self.total("num_target_calls") or 0
        ):
            return None
        lengths = [number for row in self.rows for number in row.prompt_new_tokens]
        return predicted_speedup(
            alpha,
            window,
            draft_step_seconds=step,
            target_seconds=self._each("verify", self.standard),
            verify_seconds=self._each("verify", self.rows),
            round_overhead_seconds=self._each("accept", self.rows) + self._each("rest", self.rows),
            step_overhead_seconds=self._each("accept", self.standard)
            + self._each("rest", self.standard),
            num_new_tokens=max(1, round(statistics.fmean(lengths))),
        )

    @property
    def phase_seconds(self) -> dict[str, float] | None:
        """Mean seconds of each phase of a repeat; None where they are not known."""
        known = [row.phase_seconds for row in self.rows if row.phase_seconds is not None]
        return (
            {phase: statistics.fmean(each[phase] for each in known) for phase in PHASES}
            if known
            else None
        )

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens / seconds, see `speed`."""
        return speed(self.rows)

    @property
    def same_tokens(self) -> bool | None:
        """Whether every repeat gave standard decoding's tokens; None where they may differ."""
        found = [row.same_tokens for row in self.rows if row.same_tokens is not None]
        return all(found) if found else None

    def summary(self) -> dict[str, Any]:
        """Settings, figures and both sides as plain values, for JSON and CSV; None for what is not known."""
        speedup = self.walltime_speedup or Interval(math.nan, math.nan, math.nan)
        ends = {
            f"walltime_speedup{end}": each
            for end, each in zip(("", "_low", "_high"), speedup, strict=True)
        }
        return {
            **{name: getattr(self.case, name) for name in SETTINGS},
            "repeats": len(self.rows),
            **{name: getattr(self, name) for name in ("same_tokens", "error", "interrupted")},
            **{name: each if math.isfinite(each) else None for name, each in ends.items()},
            **{name: getattr(self, name) for name in FIGURES},
            "num_changed": self.total("num_changed"),
            STANDARD: None,
            SPECULATIVE: None,
            STANDARD: _side(self.standard),
            self.case.method: _side(self.rows),
        }

    def total(self, name: str) -> int | None:
        """A count, summed over the repeats; None where it is not known."""
        found = [value for row in self.rows if (value := getattr(row, name)) is not None]
        return sum(found) if found else None

    def _ratio(self, top: str, bottom: str) -> float | None:
        above, below = self.total(top), self.total(bottom)
        return None if above is None or not below else above / below

    @property
    def _draft_step_seconds(self) -> float | None:
        steps, phases = self.total("num_draft_steps"), self.phase_seconds
        return len(self.rows) * phases["draft"] / steps if steps and phases else None

    @staticmethod
    def _each(phase: str, rows: Sequence[ResultRow]) -> float:
        """Mean seconds of a phase for each call of the target."""
        calls = sum(row.num_target_calls for row in rows)
        return (
            sum(row.phase_seconds[phase] for row in rows if row.phase_seconds) / calls
            if calls
            else 0.0
        )


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
FIGURES = (
    *("latency_reduction", "predicted_speedup", "cost_ratio", "tokens_per_second"),
    *("acceptance_rate", "draft_utilization", "block_efficiency"),
)


def _side(rows: Sequence[ResultRow]) -> dict[str, Any] | None:
    """The figures of the repeat whose seconds are the (lower) median, so that they belong together; `speed` of all."""
    if not rows:
        return None
    row = sorted(rows, key=lambda row: row.seconds)[(len(rows) - 1) // 2]
    phases = row.phase_seconds or dict.fromkeys(PHASES)
    names = (
        "seconds",
        "time_to_first_token",
        "num_new_tokens",
        "num_target_calls",
        "num_draft_calls",
    )
    return {
        **{name: getattr(row, name) for name in (*names, "peak_memory_bytes")},
        "tokens_per_second": speed(rows),
        **{f"{phase}_seconds": seconds for phase, seconds in phases.items()},
        "block_efficiency": row.num_new_tokens / row.num_row_rounds if row.num_row_rounds else None,
        "runs": {"seconds": [each.seconds for each in rows]},
    }


def comparisons(rows: Iterable[ResultRow]) -> list[Comparison]:
    """The cases of all rows, in the order in which they first ran, each beside standard decoding of its place."""
    grouped: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in rows:
        grouped.setdefault(row.cell, []).append(row)
    ordered = [sorted(group, key=lambda row: row.repeat) for group in grouped.values()]
    good = [tuple(row for row in group if row.failure is None) for group in ordered]
    standard = {
        g[0].place: kept for g, kept in zip(ordered, good, strict=True) if g[0].method == STANDARD
    }
    return [
        Comparison(
            group[0],
            kept,
            standard.get(group[0].place, ()),
            next((row.failure for row in group if row.failure), None),
        )
        for group, kept in zip(ordered, good, strict=True)
    ]
