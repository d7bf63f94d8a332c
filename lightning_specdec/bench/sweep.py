"""Every draft with every window against standard decoding of the same target.

Theory: how often a draft is right and what its guesses cost decide together, and the window that pays follows from
both, so what is fastest is found by trying. Each pair of draft and window is measured by itself, its repeats taking
turns with standard decoding (A B A B): a machine that drifts from one to the next does not favour either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lightning_specdec.bench.failures import FAILURES, in_one_line
from lightning_specdec.bench.pair import compare
from lightning_specdec.bench.runner import Benchmark
from lightning_specdec.checks import require_int
from lightning_specdec.drafters import Drafter
from lightning_specdec.inference import DecodeResult, StopStrings
from lightning_specdec.inference.limits import check_context
from lightning_specdec.inference.rows import Prompts, check_batch, check_eos, num_shared
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, ExactMatch, Sampling

FIGURES = ("acceptance_rate", "block_efficiency", "walltime_speedup")
"""What a row that failed has none of."""


@dataclass(frozen=True)
class SweepRow:
    """One draft with one window.

    Args:
        draft: its name.
        num_draft_tokens: the window.
        batch_size: prompts that were decoded together.
        comparable: whether both ways should give the same tokens: under a lossless rule at temperature 0, and with
            `ExactMatch` at every temperature.
        benchmark: both ways' runs; None where it failed.
        error: what it failed by.
    """

    draft: str
    num_draft_tokens: int
    batch_size: int
    comparable: bool
    benchmark: Benchmark | None = None
    error: str | None = None

    @property
    def same_tokens(self) -> bool | None:
        """Whether every run gave standard decoding's tokens; None where they may differ, or it failed."""
        return None if not self.comparable or self.benchmark is None else self.parting is None

    @property
    def parting(self) -> tuple[int, int] | None:
        """The first prompt, and the place among its new tokens, where a run left standard decoding's tokens."""
        if self.benchmark is None or self.benchmark.standard is None or self.benchmark.speculative is None:
            return None
        expected = self.benchmark.standard.results[0].tokens
        for runs in (self.benchmark.standard, self.benchmark.speculative):
            for result in runs.results:
                for prompt, (one, other) in enumerate(zip(expected, result.tokens, strict=True)):
                    if one != other:
                        return prompt, num_shared(one, other)
        return None

    @property
    def walltime_speedup(self) -> float | None:
        """That of its `Benchmark`; None where it failed."""
        return None if self.benchmark is None else self.benchmark.walltime_speedup

    @property
    def cost_ratio(self) -> float | None:
        """Seconds of guessing one token further / seconds of a target call on one token, means over the run.

        Both are those of a whole batch, and hold the prompt's reading. None where nothing was guessed.
        """
        if self.benchmark is None or self.benchmark.standard is None or self.benchmark.speculative is None:
            return None
        standard, result = self.benchmark.standard.result, self.benchmark.speculative.result
        steps = num_draft_steps(result, self.batch_size)
        if not steps:
            return None
        target_seconds = standard.phase_seconds["verify"] / standard.num_target_calls
        return result.phase_seconds["draft"] / steps / target_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the figures of the row, then those of `Benchmark.summary`."""
        found = self.benchmark
        figures: dict[str, Any] = dict.fromkeys(FIGURES) if found is None else found.summary()
        return {
            "draft": self.draft,
            "num_draft_tokens": self.num_draft_tokens,
            "batch_size": self.batch_size,
            "error": self.error,
            "same_tokens": self.same_tokens,
            "cost_ratio": self.cost_ratio,
            "speedup_quartiles": None if found is None else found.speedup_quartiles,
            **figures,
        }


def sweep(
    target: LanguageModel,
    drafts: Mapping[str, Drafter],
    prompts: Prompts,
    *,
    windows: Sequence[int],
    max_new_tokens: int,
    rule: AcceptanceRule | None = None,
    sampling: Sampling | None = None,
    eos: int | Sequence[int] | None = None,
    stop: StopStrings | None = None,
    seed: int = 0,
    repeats: int = 5,
    warmup: int = 1,
    batch_size: int = 1,
) -> Iterator[SweepRow]:
    """Measure every draft with every window that it can fill, and give each row as it is there.

    A row that fails is given with what it failed by. Ctrl-C ends the rows: what both ways have settled of the one in
    progress is given, and its benchmark says that it was interrupted.

    Args:
        target: as it shall decode on both sides.
        drafts: by name, as they shall guess: fused or not, as the target is.
        windows: guesses per round; see `windows_of`.

    The rest are those of `SpeculativeDecoder.benchmark`.

    Raises:
        ValueError: before anything is measured, for what no row could do: prompts, settings or drafts that the target
            cannot take.
    """
    rule, sampling = rule or ExactMatch(), sampling or Sampling()
    for name, given in (("draft", drafts), ("window", windows)):
        if not given:
            raise ValueError(f"there is no {name} to measure: give at least one")
    for window in windows:
        require_int("num_draft_tokens", window, 1)
    require_int("repeats", repeats, 1)
    require_int("batch_size", batch_size, 1)
    batch = check_batch(prompts, target.vocab_size, max_new_tokens=max_new_tokens, indices=None)
    for _, prompt in batch:
        check_context(len(prompt), max_new_tokens, target)
    check_eos(eos, target.vocab_size)
    for drafter in drafts.values():
        drafter.check_target(target)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "rule": rule, "sampling": sampling, "eos": eos}
    settings |= {"stop": stop, "seed": seed, "repeats": repeats, "warmup": warmup, "batch_size": batch_size}
    return _rows(target, drafts, [prompt for _, prompt in batch], windows, settings)


def _rows(
    target: LanguageModel,
    drafts: Mapping[str, Drafter],
    prompts: list[list[int]],
    windows: Sequence[int],
    settings: dict[str, Any],
) -> Iterator[SweepRow]:
    """The rows of a checked sweep."""
    rule, size = settings["rule"], settings["batch_size"]
    comparable = rule.keeps_tokens(greedy=settings["sampling"].greedy)
    for name, drafter in drafts.items():
        for window in windows_of(drafter, windows):
            try:
                found = compare(target, drafter, prompts, num_draft_tokens=window, **settings)
            except FAILURES as error:
                yield SweepRow(name, window, size, comparable, error=in_one_line(error))
                continue
            if found.standard is not None and found.speculative is not None:
                yield SweepRow(name, window, size, comparable, found)
            if found.interrupted:
                return


def windows_of(drafter: Drafter, windows: Sequence[int]) -> list[int]:
    """Of these windows those that differ for a draft: what is more than it can guess in a round is that."""
    return windows_up_to(drafter.max_draft_tokens, windows)


def windows_up_to(most: int | None, windows: Sequence[int]) -> list[int]:
    """`windows_of` a draft that can guess so many tokens in a round; None is any number."""
    return list(dict.fromkeys(windows if most is None else [min(window, most) for window in windows]))


def best(rows: Sequence[SweepRow]) -> SweepRow | None:
    """The row with the largest speedup, of those that did what they should."""
    right = [row for row in rows if row.walltime_speedup is not None and row.same_tokens is not False]
    return max(right, key=lambda row: row.walltime_speedup or 0.0, default=None)


def num_draft_steps(result: DecodeResult, batch_size: int) -> int:
    """How many tokens were guessed one after the other: of every round of a batch, those of its longest guess."""
    guesses = [[len(each.drafted) for each in row.rounds or []] for row in result.rows]
    batches = [guesses[first : first + batch_size] for first in range(0, len(guesses), batch_size)]
    return sum(max(step) for batch in batches for step in zip_longest(*batch, fillvalue=0))
