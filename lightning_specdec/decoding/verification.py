"""The end of a round: the verdict, packed for a single read, and what each row gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.decoding.executor import Executor
from lightning_specdec.decoding.requests import Request, TopLogprobs
from lightning_specdec.decoding.windows import Outcome
from lightning_specdec.models.graphs import Outputs
from lightning_specdec.rules import (
    GREEDY,
    AcceptanceRule,
    Draft,
    Purpose,
    Sampling,
    Verdict,
    column,
)
from lightning_specdec.rules.user_rules import judged

if TYPE_CHECKING:
    from jaxtyping import Float

Events = list[tuple[Request, list[int]]]
"""Each live row with its newly committed tokens."""


class Verification:
    """Judges the draft tokens of a round, and commits what the rule accepts.

    The outcome of a round is one tensor `[B, columns]`, which the host reads once. Its columns
    are, for K draft tokens: whether each draft token is accepted (K), the token that ends the round
    after each number of accepted ones (K + 1), the draft tokens (K); then, if there are any, the
    row's number of draft tokens (1), which of them a lossy rule changed (K), and log probabilities
    of the draft tokens (K) and of the ends (K + 1). Then, if any row requests the N likeliest
    tokens of each position, these tokens and their log probabilities ((K + 1) N each). For K = 0 it
    is the next token only.

    Args:
        rule: decides which draft tokens are accepted.
        vocab_size: the target's. It marks a token that could not be drawn, since no token has
            that number.
    """

    def __init__(self, rule: AcceptanceRule, vocab_size: int) -> None:
        self.rule = rule
        self.vocab_size = vocab_size
        # Of the current round: how its tokens are drawn, and which log probabilities it computes.
        self.sampling: Sampling = GREEDY
        self.logprobs = False
        self.num_top_logprobs = 0

    def judge(
        self,
        rows: Sequence[Request],
        draft: Draft,
        logits: Float[Tensor, "B K1 V"],
        noise: Float[Tensor, "B N 3"] | None,
        executor: Executor,
        sampling: Sampling,
    ) -> Tensor:
        """Judge the draft by the target's logits. Returns the outcome, still on the device.

        `sampling` draws the target's tokens of all rows.
        """
        live_rows = [row for row in rows if row.live]
        self.sampling = sampling
        self.logprobs = any(row.wants_logprobs for row in live_rows)
        requested_counts = [row.num_top_logprobs for row in live_rows]
        self.num_top_logprobs = min(max(requested_counts, default=0), self.vocab_size)

        if sampling.runs_on_host:
            # Processors run on the host and read the draft tokens there, so this is not recorded.
            processed = self._process(rows, draft, logits)
            return self._outcome(draft, logits, processed, noise)

        # A recorded call may run again when the attributes of this object are another round's.
        as_recorded = copy(self)

        def call(logits: Tensor, noise: Tensor | None, *draft_tensors: Any) -> Outputs:
            return (as_recorded._outcome(Draft(*draft_tensors), logits, logits, noise),)

        # Equal rules of other sessions share what is recorded.
        rule_attributes = tuple(sorted(vars(self.rule).items()))
        num_logprobs = (self.logprobs, self.num_top_logprobs)
        key = ("judge", type(self.rule), rule_attributes, sampling, num_logprobs)
        draft_tensors = (draft.tokens, draft.lengths, draft.probs, draft.logits)
        (outcome,) = executor.run(key, call, logits, noise, *draft_tensors)
        assert outcome is not None
        return outcome

    def _process(
        self,
        rows: Sequence[Request],
        draft: Draft,
        logits: Float[Tensor, "B K1 V"],
    ) -> Float[Tensor, "B K1 V"]:
        """The logits after the logits processors."""
        drafted = draft.tokens.tolist()
        if draft.lengths is not None:
            lengths = draft.lengths.tolist()
            drafted = [tokens[:length] for tokens, length in zip(drafted, lengths, strict=True)]
        texts = [row.text if row.live and not row.is_reading else None for row in rows]
        return self.sampling.process(logits, texts, drafted, stop_at_impossible=self.rule.lossless)

    def _outcome(
        self,
        draft: Draft,
        logits: Float[Tensor, "B K1 V"],
        processed: Float[Tensor, "B K1 V"],
        noise: Float[Tensor, "B N 3"] | None,
    ) -> Tensor:
        """The verdict on the processed logits, and all else that the host reads, side by side."""
        num_draft_tokens = draft.tokens.shape[1]
        if noise is not None:
            # A drafter may have drafted fewer tokens than there is noise for.
            noise = noise[:, : num_draft_tokens + 1]
        if num_draft_tokens:
            verdict = judged(self.rule, draft, processed, self.sampling, noise)
            if self.sampling.runs_on_host and not self.rule.lossless:
                # A lossy rule may accept what the target cannot draw, which a processor forbids.
                draft_scores = processed[:, :-1].gather(-1, draft.tokens[..., None])
                verdict.accepted = verdict.accepted & (draft_scores.squeeze(-1) > -torch.inf)
        else:
            # Without a draft every rule draws the target's own token.
            next_tokens = self.sampling.sample(processed, column(noise, Purpose.CORRECT))
            verdict = Verdict(draft.tokens.bool(), next_tokens)

        endings = self.sampling.mark_failed(verdict.endings, processed)

        # The columns in the order that the class describes.
        columns = [endings]
        if num_draft_tokens:
            columns = [verdict.accepted, endings, draft.tokens]
        if draft.lengths is not None:
            columns.append(draft.lengths[:, None])
        if verdict.changed is not None:
            columns.append(verdict.changed)
        if self.logprobs:
            # float64 represents the integers in the same tensor exactly.
            real_endings = verdict.endings.clamp(max=self.vocab_size - 1)
            draft_scores = Sampling.log_probs(logits[:, :-1], draft.tokens)
            ending_scores = Sampling.log_probs(logits, real_endings)
            columns.append(draft_scores.double())
            columns.append(ending_scores.double())
        if self.num_top_logprobs:
            log_probs = logits.float().log_softmax(-1)
            likeliest = log_probs.topk(self.num_top_logprobs, dim=-1)
            columns.append(likeliest.indices.flatten(1).double())
            columns.append(likeliest.values.flatten(1).double())
        if len(columns) == 1:
            return endings
        return torch.cat(columns, dim=1)

    def commit(
        self,
        rows: Sequence[Request],
        values: Sequence[list[Any]],
        draft: Draft,
        windows: Sequence[int],
        seconds: float,
    ) -> tuple[Events, list[Outcome], list[int]]:
        """Commit to every live row the tokens that its verdict accepts; none while it reads a part
        of its prompt.

        Args:
            values: the outcome, read to the host.
            draft: the draft of the round.
            windows: draft tokens that each row requested.
            seconds: time since decoding began.

        Returns:
            The new tokens, what became of the draft tokens, and how many of each row's were
            accepted.
        """
        events: Events = []
        outcomes = []
        accepted_counts = []
        num_draft_tokens = draft.tokens.shape[1]
        has_lengths = draft.lengths is not None
        copied = draft.copied or [False] * len(rows)
        forced = draft.forced or [False] * len(rows)
        for slot, (row, window, row_values) in enumerate(zip(rows, windows, values, strict=True)):
            if not row.live or row.is_reading:
                accepted_counts.append(0)
                if row.is_reading:
                    row.num_prompt_read = len(row.visible_text)
                continue
            verdict = self._unpack(row_values, num_draft_tokens, has_lengths=has_lengths)
            accepted_counts.append(verdict.num_accepted)
            self._end_before_failure(row, verdict)

            added = row.commit(
                verdict.drafted,
                verdict.num_accepted,
                verdict.next_token,
                seconds=seconds,
                changed=verdict.changed,
                logprobs=verdict.logprobs if row.wants_logprobs else None,
                top_logprobs=verdict.top_logprobs(row.num_top_logprobs),
            )
            events.append((row, added))
            outcome = Outcome(
                row,
                window,
                len(verdict.drafted),
                verdict.num_accepted,
                is_copied=copied[slot],
                is_forced=forced[slot],
                num_requested=window,
            )
            if len(added) <= verdict.num_accepted:
                # Nothing is learned from tokens after a stop: the next turn uses their random
                # numbers.
                outcome.window = len(added)
                outcome.num_made = len(added)
                outcome.num_accepted = len(added)
            outcomes.append(outcome)
        return events, outcomes, accepted_counts

    def _unpack(
        self,
        values: list[Any],
        num_draft_tokens: int,
        *,
        has_lengths: bool,
    ) -> _RowVerdict:
        """One row of the outcome, column by column."""
        # Draft tokens are accepted up to the first rejection.
        accepted = values[:num_draft_tokens]
        num_accepted = num_draft_tokens
        if 0 in accepted:
            num_accepted = accepted.index(0)

        likeliest: list[TopLogprobs] = []
        if self.num_top_logprobs:
            values, likeliest = self._unpack_likeliest(values, num_draft_tokens + 1)

        logprobs = None
        if self.logprobs:
            # Those of the accepted draft tokens, and that of the token which ends the round.
            num_scores = 2 * num_draft_tokens + 1
            scores = values[-num_scores:]
            ending_score = scores[num_draft_tokens + num_accepted]
            logprobs = [*scores[:num_accepted], ending_score]
            values = values[:-num_scores]
        if self.logprobs or self.num_top_logprobs:
            # The log probabilities beside them made floats of the integers.
            values = [int(value) for value in values]

        endings_end = 2 * num_draft_tokens + 1
        drafted_end = endings_end + num_draft_tokens
        endings = values[num_draft_tokens:endings_end]
        drafted = values[endings_end:drafted_end]
        changed = values[drafted_end:]
        if has_lengths:
            drafted = drafted[: changed[0]]
            changed = changed[1:]
        return _RowVerdict(num_accepted, endings, drafted, changed, logprobs, likeliest)

    def _unpack_likeliest(
        self,
        values: list[Any],
        num_positions: int,
    ) -> tuple[list[Any], list[TopLogprobs]]:
        """The other columns of a row, and the likeliest tokens of each position."""
        count = self.num_top_logprobs
        num_values = num_positions * count
        tokens = values[-2 * num_values : -num_values]
        log_probs = values[-num_values:]
        likeliest = []
        for start in range(0, num_values, count):
            position_tokens = [int(token) for token in tokens[start : start + count]]
            position_scores = log_probs[start : start + count]
            likeliest.append(list(zip(position_tokens, position_scores, strict=True)))
        return values[: -2 * num_values], likeliest

    def _end_before_failure(self, row: Request, verdict: _RowVerdict) -> None:
        """Drop what follows logits that are not finite: a token that does not exist marks them."""
        num_accepted = verdict.num_accepted
        failed = self.vocab_size
        if failed not in verdict.endings[: num_accepted + 1]:
            return
        if row.sampling.greedy:
            # The target's tokens are certain, so those at the positions of accepted draft tokens
            # count too.
            num_accepted = verdict.endings.index(failed)
        if verdict.endings[num_accepted] == failed:
            verdict.drafted = verdict.drafted[:num_accepted]
            verdict.num_accepted = num_accepted
            verdict.next_token = None


class _RowVerdict:
    """The outcome of a round for one row, on the host.

    Args:
        num_accepted: accepted draft tokens.
        endings: the token that ends the round after each number of accepted draft tokens.
        drafted: the row's draft tokens.
        changed: for each of them, whether the target drew another one; empty under a lossless
            rule.
        logprobs: log probabilities of the accepted draft tokens and of the next one; None unless
            requested.
        likeliest: the likeliest tokens of each position; empty unless requested.
    """

    __slots__ = (
        "changed",
        "drafted",
        "endings",
        "likeliest",
        "logprobs",
        "next_token",
        "num_accepted",
    )

    def __init__(
        self,
        num_accepted: int,
        endings: list[int],
        drafted: list[int],
        changed: list[int],
        logprobs: list[float] | None,
        likeliest: list[TopLogprobs],
    ) -> None:
        self.num_accepted = num_accepted
        self.endings = endings
        self.drafted = drafted
        self.changed = changed
        self.logprobs = logprobs
        self.likeliest = likeliest
        self.next_token: int | None = endings[num_accepted]

    def top_logprobs(self, count: int) -> list[TopLogprobs]:
        """The `count` likeliest tokens of each position; no positions for 0."""
        if count == 0:
            return []
        return [position[:count] for position in self.likeliest]
