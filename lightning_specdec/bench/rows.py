"""Rows of results: one repeat of one case as counts and seconds, and the comparison of its repeats with standard
decoding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from lightning_specdec.bench.statistics import Estimate, Interval, finite, mean_std, percentiles, ratio_estimate
from lightning_specdec.bench.theory import predicted_speedup
from lightning_specdec.decoding.timing import PHASES

STANDARD, SPECULATIVE = OURS = ("standard", "speculative")
"""Methods of this package."""
GENERATE, ASSISTED, PROMPT_LOOKUP = HUGGING_FACE = ("generate", "assisted", "prompt_lookup")
"""Methods of transformers: plain `generate`, with an assistant model, with prompt lookup."""
FORMAT = 2
"""Counted up when rows or manifests change. Format 1 is read too."""
_FORMER = {"way": "method"}
"""Fields of format 1 under their present names."""


@dataclass(kw_only=True)
class ResultRow:
    """One repeat of one case. Stores counts and seconds; rates are those of a `Comparison`.

    Args:
        cell: hash of everything that decides the outcome; empty for rows that are not kept.
        draft_kind: the drafter's class.
        rule: with its settings.
        error: why the run failed; such a row has no figures.
        window: of an adaptive window, the costs that it goes by.
        setting: of Hugging Face's methods, the arguments of `generate`.
        commit, versions, date: the program that ran it, and when the run ended (UTC).
        seconds: wall time of all prompts, by the decoding functions' own clocks.
        num_draft_steps: draft tokens one after the other: of each round of a batch, those of its longest draft.
        histogram: row-rounds that accepted 0, 1, ... draft tokens.
        tested_at, accepted_at: counts by position in the window.
        token_seconds: seconds of each token since the one before, by prompt; tokens of a round come together.
        same_tokens: whether the tokens are standard decoding's; None where they may differ.
        differs_at: prompt and token at which they first differ.
        num_changed: under a lossy rule, tokens that the target would not have drawn.
    """

    cell: str = ""
    repeat: int
    pair: str
    method: str
    domain: str
    temperature: float
    batch_size: int
    seed: int
    max_new_tokens: int
    draft: str | None = None
    draft_kind: str | None = None
    num_draft_tokens: int | str | None = None
    rule: str | None = None
    lossless: bool | None = None
    error: str | None = None
    window: dict[str, Any] | None = None
    setting: dict[str, Any] | None = None
    commit: str | None = None
    versions: dict[str, str] | None = None
    date: str | None = None
    seconds: float = 0.0
    num_prompts: int = 0
    num_new_tokens: int = 0
    phase_seconds: dict[str, float] | None = None
    num_target_calls: int = 0
    num_draft_calls: int | None = None
    num_draft_steps: int | None = None
    num_proposed: int | None = None
    num_tested: int | None = None
    num_accepted: int | None = None
    histogram: list[int] | None = None
    tested_at: list[int] | None = None
    accepted_at: list[int] | None = None
    num_row_rounds: int = 0
    prompt_ids: list[str] = field(default_factory=list)
    prompt_seconds: list[float] = field(default_factory=list)
    prompt_new_tokens: list[int] = field(default_factory=list)
    token_seconds: list[list[float]] = field(default_factory=list)
    time_to_first_token: list[float] = field(default_factory=list)
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
    def candidate(self) -> tuple[str, str | None, int | str | None, str | None]:
        """What a user chooses: method, draft, window, rule."""
        return (self.method, self.draft, self.num_draft_tokens, self.rule)

    @property
    def label(self) -> str:
        """`candidate` in a few words."""
        parts = ("" if self.method == SPECULATIVE else self.method, self.draft, self.num_draft_tokens, self.rule)
        return " ".join(str(part) for part in parts if part)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a line of a file; `from_dict` is the inverse."""
        return {"format": FORMAT, **vars(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ResultRow:
        """A row of a file, of this format or the one before.

        Raises:
            ValueError: a field is missing, or one that identifies the row has the wrong type.
        """
        given = {_FORMER.get(name, name): value for name, value in values.items() if value is not None}
        if isinstance(peaks := given.get("peak_memory_bytes"), Mapping):  # of each phase
            given["peak_memory_bytes"] = max(peaks.values(), default=None)
        known = [each.name for each in fields(cls)]
        names = {_FORMER.get(name, name) for name in values}
        if missing := [name for name in known if name not in names and name not in _NEW]:
            raise ValueError(f"has no {', '.join(missing[:3])}")
        for name, kind in _KINDS.items():
            if not isinstance(given.get(name), kind):
                raise ValueError(f"has a wrong {name}, {str(given.get(name))[:60]!r}")
        return cls(**{name: value for name, value in given.items() if name in known})


_NEW = ("num_draft_steps", "differs_at")
"""Fields that format 1 does not have."""
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("cell", "pair", "method", "domain"), str),
    **dict.fromkeys(("repeat", "batch_size", "seed", "max_new_tokens"), int),
    "temperature": (int, float),
}


class Timings(NamedTuple):
    """Two methods on the same units (prompts or batches), by repeat and unit.

    Texts may differ in length (sampling, lossy rules), and the shorter text is not the faster method: `scaled` holds
    the seconds for as many tokens as standard decoding gave in the same unit.

    Args:
        standard: seconds of standard decoding.
        scaled: seconds of the other method, scaled.
        num_new_tokens: mean number of standard decoding's tokens in a unit.
    """

    standard: list[list[float]]
    scaled: list[list[float]]
    num_new_tokens: float

    @property
    def num_units(self) -> int:
        return len(self.standard[0])


def timings(pairs: Sequence[tuple[ResultRow, ResultRow]]) -> Timings | None:
    """Repeats of standard decoding and of a method beside it, by prompt or batch.

    A unit without time or tokens in one of the runs is left out of all; None where nothing is left.
    """
    units = [[_units(row) for row in pair] for pair in pairs]
    every = range(len(units[0][0]) if units else 0)
    kept = [i for i in every if all(min(side[i]) > 0 for repeat in units for side in repeat)]
    if not kept:
        return None
    standard = [[one[i][0] for i in kept] for one, _ in units]
    scaled = [[two[i][0] * (one[i][1] / two[i][1]) for i in kept] for one, two in units]
    return Timings(standard, scaled, statistics.fmean(one[i][1] for one, _ in units for i in kept))


def _units(row: ResultRow) -> list[tuple[float, int]]:
    """Seconds and tokens of each batch, which ends with its last prompt. What a run takes besides is shared out."""
    seconds, tokens, size = row.prompt_seconds, row.prompt_new_tokens, row.batch_size
    batches = [(max(seconds[i : i + size]), sum(tokens[i : i + size])) for i in range(0, len(seconds), size)]
    share = row.seconds / (sum(each for each, _ in batches) or 1.0)
    return [(share * each, number) for each, number in batches]


@dataclass(frozen=True)
class Comparison:
    """The repeats of one case beside standard decoding's.

    Args:
        case: a row that says what was measured.
        rows: the repeats that finished and gave tokens, in order.
        standard: standard decoding's rows of the same place.
        error: why the first repeat that failed did so.
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
        """Beside standard decoding, of the repeats that both have; None for standard decoding itself."""
        if self.case.method == STANDARD:
            return None
        others = {row.repeat: row for row in self.standard}
        return timings([(others[row.repeat], row) for row in self.rows if row.repeat in others])

    @cached_property
    def estimate(self) -> Estimate | None:
        """`walltime_speedup` with its variances."""
        return None if self.timings is None else ratio_estimate(self.timings.standard, self.timings.scaled)

    @cached_property
    def walltime_speedup(self) -> Interval | None:
        """Seconds of standard decoding / of this method for as many tokens, with its interval."""
        return None if self.estimate is None else self.estimate.interval

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
        draft, target = self._draft_step_seconds, self._each("verify", "num_target_calls", self.standard)
        return None if draft is None or not target else draft / target

    @property
    def predicted_speedup(self) -> float | None:
        """What theory expects from the acceptance rate and the mean costs of these runs; None for adaptive windows."""
        alpha, window, step = self.acceptance_rate, self.case.num_draft_tokens, self._draft_step_seconds
        if alpha is None or step is None or not isinstance(window, int) or not self.standard:
            return None
        target, verify = (self._each("verify", "num_target_calls", rows) for rows in (self.standard, self.rows))
        loops = [
            self._each("accept", "num_target_calls", rows) + self._each("rest", "num_target_calls", rows)
            for rows in (self.rows, self.standard)
        ]
        lengths = [number for row in self.rows for number in row.prompt_new_tokens]
        return predicted_speedup(
            alpha,
            window,
            draft_step_seconds=step,
            target_seconds=target,
            verify_seconds=verify,
            round_overhead_seconds=loops[0],
            step_overhead_seconds=loops[1],
            num_new_tokens=max(1, round(statistics.fmean(lengths))),
        )

    @property
    def phase_seconds(self) -> dict[str, float] | None:
        """Mean seconds of each phase of a repeat; None where they are not known."""
        known = [row.phase_seconds for row in self.rows if row.phase_seconds is not None]
        return {phase: statistics.fmean(each[phase] for each in known) for phase in known[0]} if known else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens / seconds, the median of the repeats."""
        return self.median_of(lambda row: row.num_new_tokens / row.seconds)

    @property
    def same_tokens(self) -> bool | None:
        """Whether every repeat gave standard decoding's tokens; None where they may differ."""
        found = [row.same_tokens for row in self.rows if row.same_tokens is not None]
        return all(found) if found else None

    def summary(self) -> dict[str, Any]:
        """Settings, figures and both sides as plain values, for JSON and CSV; None for what is not known."""
        case = self.case
        found: dict[str, Any] = {name: getattr(case, name) for name in SETTINGS}
        found |= {"repeats": len(self.rows), "lossless": case.lossless, "same_tokens": self.same_tokens}
        found |= {"error": self.error, "interrupted": self.interrupted}
        speedup = self.walltime_speedup or (None, None, None)
        found |= {
            f"walltime_speedup{end}": finite(each) for end, each in zip(("", "_low", "_high"), speedup, strict=True)
        }
        for name in FIGURES:
            found[name] = getattr(self, name)
        found["num_changed"] = self.total("num_changed")
        for name, figure in SPREAD.items():
            mean, deviation = mean_std([figure(row) for row in self.rows]) if self.rows else (None, None)
            found |= {f"{name}_mean": mean, f"{name}_std": finite(deviation)}
        gaps = [gap for row in self.rows for prompt in row.token_seconds for gap in prompt[1:]]
        shares = percentiles(gaps) if gaps else (None, None, None)
        found |= {f"seconds_per_token_{name}": each for name, each in zip(("p50", "p95", "p99"), shares, strict=True)}
        sides = {STANDARD: _side(self.standard), case.method: _side(self.rows)}
        return found | {STANDARD: None, SPECULATIVE: None} | sides

    def median_of(self, figure: Callable[[ResultRow], float]) -> float | None:
        """The median of a figure over the repeats; None without a repeat."""
        return statistics.median(map(figure, self.rows)) if self.rows else None

    def total(self, name: str) -> int | None:
        """A count, summed over the repeats; None where it is not known."""
        found = [value for row in self.rows if (value := getattr(row, name)) is not None]
        return sum(found) if found else None

    def _ratio(self, top: str, bottom: str) -> float | None:
        above, below = self.total(top), self.total(bottom)
        return None if above is None or not below else above / below

    @property
    def _draft_step_seconds(self) -> float | None:
        steps = self.total("num_draft_steps")
        return sum(row.phase_seconds["draft"] for row in self.rows if row.phase_seconds) / steps if steps else None

    @staticmethod
    def _each(phase: str, count: str, rows: Sequence[ResultRow]) -> float:
        """Mean seconds of a phase for each call."""
        calls = sum(getattr(row, count) or 0 for row in rows)
        return sum(row.phase_seconds[phase] for row in rows if row.phase_seconds) / calls if calls else 0.0


SETTINGS = ("pair", "domain", "temperature", "batch_size", "method", "draft", "num_draft_tokens", "rule")
FIGURES = (
    *("latency_reduction", "predicted_speedup", "cost_ratio"),
    *("acceptance_rate", "draft_utilization", "block_efficiency"),
)
SPREAD: dict[str, Callable[[ResultRow], float]] = {
    "seconds": lambda row: row.seconds,
    "tokens_per_second": lambda row: row.num_new_tokens / row.seconds,
    "time_to_first_token": lambda row: statistics.fmean(row.time_to_first_token or [0.0]),
}
"""Figures with a mean and a standard deviation over the repeats."""


def _side(rows: Sequence[ResultRow]) -> dict[str, Any] | None:
    """The figures of the repeat whose seconds are the (lower) median, so that they belong together."""
    if not rows:
        return None
    row = sorted(rows, key=lambda row: row.seconds)[(len(rows) - 1) // 2]
    phases = row.phase_seconds or dict.fromkeys(PHASES)
    names = ("num_new_tokens", "num_target_calls", "num_draft_calls", "peak_memory_bytes")
    return {
        **{name: figure(row) for name, figure in SPREAD.items()},
        **{f"{phase}_seconds": seconds for phase, seconds in phases.items()},
        **{name: getattr(row, name) for name in names},
        "block_efficiency": row.num_new_tokens / row.num_row_rounds if row.num_row_rounds else None,
        "runs": {"seconds": [each.seconds for each in rows]},
    }


def comparisons(rows: Iterable[ResultRow]) -> list[Comparison]:
    """The cases of all rows, in the order in which they first ran, each beside standard decoding of its place."""
    grouped: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in rows:
        grouped.setdefault((row.place, row.candidate), []).append(row)
    ordered = [sorted(group, key=lambda row: row.repeat) for group in grouped.values()]
    good = [tuple(row for row in group if _failure(row) is None) for group in ordered]
    standard = {g[0].place: kept for g, kept in zip(ordered, good, strict=True) if g[0].method == STANDARD}
    return [
        Comparison(group[0], kept, standard.get(group[0].place, ()), next(filter(None, map(_failure, group)), None))
        for group, kept in zip(ordered, good, strict=True)
    ]


def _failure(row: ResultRow) -> str | None:
    """Why a run failed; one without tokens or seconds has failed too."""
    if row.error is not None:
        return row.error
    if not row.num_prompts or not row.num_new_tokens:
        return "gave no tokens"
    return None if row.seconds else "took no seconds"
