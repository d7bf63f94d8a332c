"""Ways of decoding on the same prompts: warm-up, interleaved repeats, medians."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_specdec.bench.speed import Unit
from lightning_specdec.bench.theory import predicted_speedup
from lightning_specdec.checks import require_int
from lightning_specdec.inference import DecodeResult, merge_results

Way = Callable[[list[list[int]], list[int]], DecodeResult]
"""Decodes prompts, given with their indices."""


@dataclass
class Runs:
    """One way of decoding, repeated.

    Args:
        seconds: of each repeat, all prompts together, in the order they ran.
        results: of each repeat.
    """

    seconds: list[float] = field(default_factory=list)
    results: list[DecodeResult] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """Median of the repeats' seconds, of two in the middle the lower: the seconds of one repeat."""
        return statistics.median_low(self.seconds)

    @property
    def spread_seconds(self) -> tuple[float, float]:
        """First and third quartile of the repeats' seconds."""
        return quartiles(self.seconds)

    @property
    def tokens_per_second(self) -> list[float]:
        """New tokens / seconds of each repeat."""
        return [result.num_new_tokens / s for result, s in zip(self.results, self.seconds, strict=True)]

    @property
    def units(self) -> list[Unit]:
        """Each repeat as one unit, all prompts together."""
        return [Unit(s, result.num_new_tokens) for result, s in zip(self.results, self.seconds, strict=True)]

    @property
    def median_unit(self) -> Unit:
        """The repeat whose seconds are the median."""
        return self.units[self.seconds.index(self.median_seconds)]

    @property
    def result(self) -> DecodeResult:
        """The repeat whose seconds are the median: its figures belong together."""
        return self.results[self.seconds.index(self.median_seconds)]


@dataclass
class Benchmark:
    """Both ways on the same prompts with the same settings; None for a way that was not asked for.

    Args:
        standard: the target alone, one call for each token.
        speculative: the target called the same way, once a round; the draft fused or compiled.
        rolled_standard: equal treatment: the target as fused as the draft, and its roll-out without a read per token.
        rolled_speculative: equal treatment: speculation over that fused target.
        warmup_seconds: what ran before the clock did: warm-up repeats, and compilation if there was any.
        num_draft_tokens: the window; None where it changed from round to round.
        interrupted: whether Ctrl-C cut the repeats short.
    """

    standard: Runs | None
    speculative: Runs | None
    rolled_standard: Runs | None
    rolled_speculative: Runs | None
    warmup_seconds: float
    num_draft_tokens: int | None
    interrupted: bool = False

    @property
    def walltime_speedup(self) -> float | None:
        """Seconds of standard decoding / of speculative decoding for as many tokens, each of its median repeat."""
        return _ratio(self.standard, self.speculative)

    @property
    def speedup_quartiles(self) -> tuple[float, float] | None:
        """First and third quartile, over the repeats, of a repeat's `walltime_speedup` by the speculative decoding that
        ran beside it: what drifts between repeats is not in them."""
        if self.standard is None or self.speculative is None:
            return None
        pairs = zip(self.standard.units, self.speculative.units, strict=False)
        return quartiles([speculative.speedup(standard) for standard, speculative in pairs])

    @property
    def latency_reduction(self) -> float | None:
        """1 - 1 / walltime_speedup."""
        return None if self.walltime_speedup is None else 1 - 1 / self.walltime_speedup

    @property
    def equal_treatment_speedup(self) -> float | None:
        """The `walltime_speedup` over rolled-out standard decoding of speculation over the same fused target."""
        return _ratio(self.rolled_standard, self.rolled_speculative)

    @property
    def equal_treatment_ceiling(self) -> float | None:
        """The same with as few rounds as the window allows, and with no time outside the calls of draft and target:
        seconds of the rolled-out standard decoding / (fewest rounds * mean seconds of a round's calls), for as many
        tokens."""
        if self.rolled_standard is None or self.rolled_speculative is None or self.num_draft_tokens is None:
            return None
        result = self.rolled_speculative.result
        calls = result.phase_seconds["draft"] + result.phase_seconds["verify"]
        rounds = sum(row.num_rounds for row in result.rows)
        most = self.num_draft_tokens + 1
        fewest = sum(math.ceil(len(row.tokens) / most) for row in result.rows)
        if not rounds or not result.num_draft_calls:
            return None
        return Unit(calls * fewest / rounds, result.num_new_tokens).speedup(self.rolled_standard.median_unit)

    @property
    def predicted_speedup(self) -> float | None:
        """What theory expects from alpha and this run's mean costs, for independent acceptance and this length."""
        if self.standard is None or self.speculative is None or self.num_draft_tokens is None:
            return None
        standard, result = self.standard.result, self.speculative.result
        if result.acceptance_rate is None or not result.num_draft_calls:
            return None
        lengths = [len(row.tokens) for row in result.rows]
        return predicted_speedup(
            result.acceptance_rate,
            self.num_draft_tokens,
            draft_step_seconds=result.phase_seconds["draft"] / result.num_draft_calls,
            target_seconds=standard.phase_seconds["verify"] / standard.num_target_calls,
            verify_seconds=result.phase_seconds["verify"] / result.num_target_calls,
            round_overhead_seconds=_overhead(result) / result.num_target_calls,
            step_overhead_seconds=_overhead(standard) / standard.num_target_calls,
            num_new_tokens=max(1, round(statistics.mean(lengths))),
        )

    def summary(self) -> dict[str, Any]:
        """The table's rows by their names: single figures, or one for each way under `standard` and `speculative`."""
        sides = {"standard": self.standard, "speculative": self.speculative}
        rows: dict[str, Any] = {
            "walltime_speedup": self.walltime_speedup,
            "latency_reduction": self.latency_reduction,
            "predicted_speedup": self.predicted_speedup,
            "equal_treatment_speedup": self.equal_treatment_speedup,
            "equal_treatment_ceiling": self.equal_treatment_ceiling,
            "warmup_seconds": self.warmup_seconds,
        }
        if self.speculative is not None:
            result = self.speculative.result
            for name in ("acceptance_rate", "draft_utilization", "block_efficiency", "lossless", "num_changed"):
                rows[name] = getattr(result, name)
        return rows | {name: None if runs is None else _side(runs) for name, runs in sides.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile, each one of the values: at least half of them lie between, `median_low` too."""
    ordered = sorted(values)
    outside = (len(ordered) - 1) // 4
    return ordered[outside], ordered[-1 - outside]


def _side(runs: Runs) -> dict[str, Any]:
    """The figures of one way of decoding: those of its median repeat."""
    result = runs.result
    first, third = runs.spread_seconds
    names = ("num_new_tokens", "block_efficiency", "num_target_calls", "num_draft_calls", "peak_memory_bytes")
    return {
        "seconds": runs.median_seconds,
        "seconds_quartiles": [first, third],
        "tokens_per_second": result.num_new_tokens / runs.median_seconds,
        "time_to_first_token": statistics.mean(row.token_seconds[0] for row in result.rows if row.token_seconds)
        if any(row.token_seconds for row in result.rows)
        else None,
        **{f"{phase}_seconds": seconds for phase, seconds in result.phase_seconds.items()},
        **{name: getattr(result, name) for name in names},
        "runs": {"seconds": runs.seconds, "tokens_per_second": runs.tokens_per_second},
    }


def _ratio(standard: Runs | None, other: Runs | None) -> float | None:
    return None if standard is None or other is None else other.median_unit.speedup(standard.median_unit)


def _overhead(result: DecodeResult) -> float:
    return result.phase_seconds["accept"] + result.phase_seconds["rest"]


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection meanwhile, as timeit does: it would fall on whichever way happens to run."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def in_batches(way: Way, prompts: Sequence[Sequence[int]], batch_size: int) -> list[DecodeResult]:
    """What a way makes of prompts that are decoded so many together."""
    numbers = list(range(len(prompts)))
    batches = [numbers[i : i + batch_size] for i in range(0, len(numbers), batch_size)]
    return [way([list(prompts[i]) for i in batch], batch) for batch in batches]


def interleave(
    ways: Mapping[str, Way], prompts: Sequence[Sequence[int]], *, repeats: int, warmup: int, batch_size: int
) -> tuple[dict[str, Runs], float, bool]:
    """Decode the prompts `repeats` times each way, in turn (A B A B), so that a drifting machine hurts all alike.

    Args:
        warmup: passes before the clock runs.
        batch_size: prompts that are decoded together.

    Returns:
        the runs of each way, the seconds of the warm-up, and whether Ctrl-C cut the repeats short.
    """
    require_int("repeats", repeats, 1)
    require_int("batch_size", batch_size, 1)
    require_int("warmup", warmup, 0)
    runs, interrupted = {name: Runs() for name in ways}, False
    warm = started = time.perf_counter()
    try:
        with no_collection():
            for i in range(warmup + repeats):
                if i == warmup:
                    warm = time.perf_counter()
                for name, way in ways.items():
                    begin = time.perf_counter()
                    results = in_batches(way, prompts, batch_size)
                    seconds = time.perf_counter() - begin
                    if i >= warmup:
                        runs[name].seconds.append(seconds)
                        runs[name].results.append(merge_results(results))
    except KeyboardInterrupt:
        interrupted = True
        for each in runs.values():
            del each.seconds[len(each.results) :]  # it may come between the two
    return {name: each for name, each in runs.items() if each.seconds}, warm - started, interrupted
