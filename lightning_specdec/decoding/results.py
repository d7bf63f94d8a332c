"""Results of decoding: tokens, counts and seconds, for each row and for all.

Only counts are stored; every rate is a property whose docstring is its formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any


@dataclass
class Counts:
    """Counts of draft tokens. Tokens after a stop (EOS, stop string) are in none of them.

    Args:
        num_proposed: draft tokens that the drafter made.
        num_tested: draft tokens that the rule decided on: in each round up to and including the
            first rejection.
        num_accepted: draft tokens that the output holds.
        histogram: entry i is the number of row-rounds that accepted i draft tokens.
        num_changed: under a lossy rule, accepted tokens where the target drew another token. Above
            temperature 0 two equal models differ in this way too.
    """

    num_proposed: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    num_changed: int = 0

    def record(self, proposed: int, tested: int, accepted: int, changed: int = 0) -> None:
        """Count one round of one row."""
        self.num_proposed += proposed
        self.num_tested += tested
        self.num_accepted += accepted
        self.num_changed += changed
        self.histogram += [0] * (accepted + 1 - len(self.histogram))
        self.histogram[accepted] += 1

    def add(self, counts: Counts) -> None:
        """Add the counts of another row."""
        self.num_proposed += counts.num_proposed
        self.num_tested += counts.num_tested
        self.num_accepted += counts.num_accepted
        self.num_changed += counts.num_changed
        bins = zip_longest(self.histogram, counts.histogram, fillvalue=0)
        self.histogram = [num_rounds + num_more for num_rounds, num_more in bins]

    @property
    def acceptance_rate(self) -> float | None:
        """num_accepted / num_tested; None if nothing was tested."""
        return self.num_accepted / self.num_tested if self.num_tested else None

    @property
    def draft_utilization(self) -> float | None:
        """num_accepted / num_proposed; None if nothing was proposed."""
        return self.num_accepted / self.num_proposed if self.num_proposed else None


@dataclass
class Round:
    """One round of one row: its draft tokens, how many were accepted, and the token after them
    (None after a stop).
    """

    drafted: list[int]
    num_accepted: int
    next_token: int | None


@dataclass
class RowResult:
    """The result of one prompt.

    Args:
        index: the prompt's number, which with the seed decides its random numbers.
        prompt: the prompt's tokens.
        tokens: the new tokens, EOS included.
        stop_reason: "eos", "stop" (a stop string), "length", "cancelled", "interrupted", or
            "failed" (the target's logits were not finite).
        num_rounds: target calls that this row took part in.
        token_seconds: seconds from the start of decoding until each new token was there.
        counts: counts of draft tokens; None for standard decoding.
        rounds: the rounds in order; None for standard decoding.
        logprobs: each new token's log probability under the target at temperature 1; None unless
            requested.
        text: text of the new tokens up to a stop string; None without a tokenizer.
        num_hidden: bytes at the end of the new tokens' text that `text` leaves out: a stop string
            and what follows.
    """

    index: int
    prompt: list[int]
    tokens: list[int]
    stop_reason: str
    num_rounds: int
    token_seconds: list[float]
    counts: Counts | None = None
    rounds: list[Round] | None = None
    logprobs: list[float] | None = None
    text: str | None = None
    num_hidden: int = 0


@dataclass(repr=False)
class DecodeResult:
    """The result of a decoding call, speculative or standard.

    Args:
        rows: one result per prompt, in the order of the prompts.
        seconds: wall time of decoding all rows, including their prompts.
        phase_seconds: the same seconds by phase: "draft", "verify", "accept", "rest".
        num_target_calls: forward passes of the target.
        peak_memory_bytes: highest memory use so far, of the GPU or, on a CPU, of the process.
        lossless: whether the output has exactly the target's distribution: the rule keeps it, and
            the target computes the same logits in calls of all widths.
        num_draft_calls: forward passes of the draft; None for standard decoding, like the fields
            below.
        num_draft_tokens: most draft tokens per round.
        rule: class name of the acceptance rule.
        window: how the draft tokens per round were chosen, as plain values.
        lossy_reason: why the target's own calls make the result not lossless; None if only the rule
            decides.
    """

    rows: list[RowResult]
    seconds: float
    phase_seconds: dict[str, float]
    num_target_calls: int
    peak_memory_bytes: int
    lossless: bool = True
    num_draft_calls: int | None = None
    num_draft_tokens: int | None = None
    rule: str | None = None
    window: dict[str, Any] | None = None
    lossy_reason: str | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each prompt, in the order of the prompts."""
        return [row.tokens for row in self.rows]

    def __repr__(self) -> str:
        num_prompts = len(self.rows)
        parts = [
            "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts",
            f"{self.num_new_tokens} new tokens",
            f"{self.tokens_per_second:.1f} tokens/s",
        ]
        if self.rule is not None and self.block_efficiency is not None:
            parts.append(f"block efficiency {self.block_efficiency:.2f}")
        return f"DecodeResult({', '.join(parts)})"

    @property
    def texts(self) -> list[str | None]:
        """The new text of each prompt, in their order; None without a tokenizer."""
        return [row.text for row in self.rows]

    @property
    def text(self) -> str | None:
        """The new text of a single prompt (None without a tokenizer).

        Raises ValueError if there are several.
        """
        if len(self.rows) != 1:
            raise ValueError(f"there are {len(self.rows)} prompts: take result.texts")
        return self.rows[0].text

    @property
    def num_new_tokens(self) -> int:
        """Number of new tokens, summed over the rows."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        """num_new_tokens / seconds."""
        return self.num_new_tokens / self.seconds

    @property
    def counts(self) -> Counts | None:
        """Counts of draft tokens, summed over the rows; None for standard decoding."""
        if self.rule is None:
            return None
        total = Counts()
        for row in self.rows:
            if row.counts is not None:
                total.add(row.counts)
        return total

    @property
    def acceptance_rate(self) -> float | None:
        """num_accepted / num_tested, over all rows; None if nothing was tested."""
        counts = self.counts
        return counts.acceptance_rate if counts else None

    @property
    def draft_utilization(self) -> float | None:
        """num_accepted / num_proposed, over all rows; None if nothing was proposed."""
        counts = self.counts
        return counts.draft_utilization if counts else None

    @property
    def block_efficiency(self) -> float | None:
        """num_new_tokens / row-rounds, the correction or bonus token included; 1.0 for standard
        decoding.
        """
        num_rounds = sum(row.num_rounds for row in self.rows)
        return self.num_new_tokens / num_rounds if num_rounds else None

    @property
    def num_changed(self) -> int | None:
        """Accepted tokens where the target drew another one, see `Counts`; None under a lossless
        rule.
        """
        counts = self.counts
        if counts is None or self.lossless:
            return None
        return counts.num_changed

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON; without the rates."""
        return asdict(self)


class DecodeInterrupted(KeyboardInterrupt):
    """Raised on Ctrl-C while decoding; `result` is the `DecodeResult` so far."""

    def __init__(self, result: DecodeResult) -> None:
        super().__init__("decoding was interrupted")
        self.result = result


def merge_results(results: Sequence[DecodeResult]) -> DecodeResult:
    """The results of several batches that were decoded one after the other with the same settings,
    as one.
    """
    rows: list[RowResult] = []
    phase_seconds = dict.fromkeys(results[0].phase_seconds, 0.0)
    for result in results:
        rows += result.rows
        for phase, seconds in result.phase_seconds.items():
            phase_seconds[phase] += seconds

    num_draft_calls = None
    if results[0].rule is not None:
        num_draft_calls = sum(result.num_draft_calls or 0 for result in results)
    return replace(
        results[0],
        rows=rows,
        seconds=sum(result.seconds for result in results),
        phase_seconds=phase_seconds,
        num_target_calls=sum(result.num_target_calls for result in results),
        peak_memory_bytes=max(result.peak_memory_bytes for result in results),
        num_draft_calls=num_draft_calls,
    )
