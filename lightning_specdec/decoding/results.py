"""What decoding gives back: tokens, counts and seconds, for each row and for all.

Only counts are stored; every rate is a property whose docstring is its formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any


@dataclass
class Counts:
    """What became of the drafted tokens.

    Args:
        num_proposed: drafted. Tokens behind a stop are not counted at all.
        num_tested: those that a verdict was reached on: up to and with the first rejection.
        num_accepted: those kept.
        histogram: how many row-rounds kept 0, 1, 2, ... tokens.
        num_changed: under a lossy rule, tokens kept where the target drew another one; above temperature 0 that happens
            between two equal models too.
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

    def add(self, other: Counts) -> None:
        """Add another row's counts to these."""
        for name in ("num_proposed", "num_tested", "num_accepted", "num_changed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.histogram = list(map(sum, zip_longest(self.histogram, other.histogram, fillvalue=0)))

    @property
    def acceptance_rate(self) -> float | None:
        """num_accepted / num_tested (None when nothing was tested)."""
        return self.num_accepted / self.num_tested if self.num_tested else None

    @property
    def draft_utilization(self) -> float | None:
        """num_accepted / num_proposed (None when nothing was proposed)."""
        return self.num_accepted / self.num_proposed if self.num_proposed else None


@dataclass
class Round:
    """One round of one row: the draft tokens, how many were kept, and the token that followed (None behind a stop)."""

    drafted: list[int]
    num_accepted: int
    next_token: int | None


@dataclass
class RowResult:
    """One prompt's outcome.

    Args:
        index: the prompt's number, which its noise is keyed by.
        tokens: the new tokens only.
        stop_reason: "eos", "stop" (a stop string), "length", "cancelled", "interrupted", or "failed" (the target's
            logits were not finite).
        num_rounds: target calls that this row took part in.
        token_seconds: when each new token was committed, in seconds since decoding began.
        counts, rounds: None for standard decoding.
        logprobs: each new token's log probability under the target, if asked for.
        text: of the new tokens, without a stop string that ended them; None where there is no tokenizer.
        num_hidden: bytes at the end of the tokens' text, from the stop string on, that `text` leaves out.
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
    """A batch's outcome, standard or speculative; fields of speculation are None for standard decoding.

    Args:
        rows: by prompt, in the order given.
        seconds: wall time of the whole, prompts included.
        phase_seconds: the same time by phase: draft, verify, accept, rest.
        num_target_calls, num_draft_calls: passes of the models.
        peak_memory_bytes: most memory held so far, of the device or, on a CPU, of the process.
        lossless: whether the output has exactly the target's distribution.
        num_draft_tokens: the largest window.
        rule: name of the acceptance rule.
        window: how windows were chosen, with the costs that they were planned by: see `window_from_dict`.
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

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each prompt."""
        return [row.tokens for row in self.rows]

    def __repr__(self) -> str:
        shown = f"{len(self.rows)} prompts, {self.num_new_tokens} new tokens, {self.tokens_per_second:.1f} tokens/s"
        if self.rule is not None and self.block_efficiency is not None:
            shown += f", block efficiency {self.block_efficiency:.2f}"
        return f"DecodeResult({shown})"

    @property
    def texts(self) -> list[str | None]:
        """The new text of each prompt; None without a tokenizer."""
        return [row.text for row in self.rows]

    @property
    def text(self) -> str | None:
        """The new text of the only prompt; None without a tokenizer."""
        if len(self.rows) != 1:
            raise ValueError(f"there are {len(self.rows)} prompts: take result.texts")
        return self.rows[0].text

    @property
    def num_new_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows / seconds."""
        return self.num_new_tokens / self.seconds

    @property
    def counts(self) -> Counts | None:
        """The rows' counts added up."""
        if self.rule is None:
            return None
        total = Counts()
        for row in self.rows:
            if row.counts is not None:
                total.add(row.counts)
        return total

    @property
    def acceptance_rate(self) -> float | None:
        """num_accepted / num_tested, over all rows."""
        return self.counts.acceptance_rate if self.counts else None

    @property
    def draft_utilization(self) -> float | None:
        """num_accepted / num_proposed, over all rows."""
        return self.counts.draft_utilization if self.counts else None

    @property
    def block_efficiency(self) -> float | None:
        """New tokens / row-rounds, the correction or bonus included; 1.0 for standard decoding."""
        num_rounds = sum(row.num_rounds for row in self.rows)
        return self.num_new_tokens / num_rounds if num_rounds else None

    @property
    def num_changed(self) -> int | None:
        """Under a lossy rule, tokens kept that the target would not have drawn there (None for a lossless one)."""
        return self.counts.num_changed if self.counts and not self.lossless else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class DecodeInterrupted(KeyboardInterrupt):
    """Ctrl-C while decoding; `result` holds what was committed until then."""

    def __init__(self, result: DecodeResult) -> None:
        super().__init__("decoding was interrupted")
        self.result = result


def merge_results(results: Sequence[DecodeResult]) -> DecodeResult:
    """The outcome of several batches decoded one after the other with the same settings, as one."""
    first = results[0]
    phases = {name: sum(result.phase_seconds[name] for result in results) for name in first.phase_seconds}
    return replace(
        first,
        rows=[row for result in results for row in result.rows],
        seconds=sum(result.seconds for result in results),
        phase_seconds=phases,
        num_target_calls=sum(result.num_target_calls for result in results),
        peak_memory_bytes=max(result.peak_memory_bytes for result in results),
        num_draft_calls=None if first.rule is None else sum(result.num_draft_calls or 0 for result in results),
    )
