"""How a round ends: the verdict, its single read by the host, and what each row gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.decoding.rows import Row, flag_undrawable
from lightning_specdec.decoding.windows import Outcome
from lightning_specdec.models.graphs import GraphCache, Outputs
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling, Verdict, column

if TYPE_CHECKING:
    from jaxtyping import Float

Events = list[tuple[Row, list[int]]]
"""Each live row's newly committed tokens."""


class Verification:
    """Judges a round, reads the outcome in one piece, and gives each row its part."""

    def __init__(
        self, rule: AcceptanceRule, sampling: Sampling, vocab_size: int, *, logprobs: bool
    ) -> None:
        self.rule, self.sampling, self.vocab_size, self.logprobs = (
            rule,
            sampling,
            vocab_size,
            logprobs,
        )

    def outcome(
        self,
        rows: Sequence[Row],
        draft: Draft,
        logits: Float[Tensor, "B K1 V"],
        noise: Float[Tensor, "B N 3"] | None,
        graphs: GraphCache | None,
    ) -> Tensor:
        """All that the host needs of the round, `[B, columns]` as `commit` reads them; judged in a recorded call where
        there are any. With processors, which are asked from the host, the draft tokens are read beforehand."""
        scored = logits
        if self.sampling.processors:
            drafted = draft.tokens.tolist()
            if draft.lengths is not None:
                drafted = [
                    row[:length]
                    for row, length in zip(drafted, draft.lengths.tolist(), strict=True)
                ]
            texts = [row.text if row.live else None for row in rows]
            scored = self.sampling.process(
                logits, texts, drafted, stop_at_impossible=self.rule.lossless
            )
        elif graphs is not None:

            def judge(logits: Tensor, noise: Tensor | None, *parts: Any) -> Outputs:
                return (self._packed(Draft(*parts), logits, logits, noise),)

            key = (
                "judge",
                type(self.rule),
                tuple(sorted(vars(self.rule).items())),
                self.sampling,
                self.logprobs,
            )
            packed = graphs.run(
                key, judge, logits, noise, draft.tokens, draft.lengths, draft.probs, draft.logits
            )[0]
            assert packed is not None
            return packed
        return self._packed(draft, logits, scored, noise)

    def _packed(
        self,
        draft: Draft,
        logits: Float[Tensor, "B K1 V"],
        scored: Float[Tensor, "B K1 V"],
        noise: Float[Tensor, "B N 3"] | None,
    ) -> Tensor:
        """The verdict on the processed logits, and all else that the host reads, side by side."""
        width = draft.tokens.shape[1]
        if noise is not None:  # of more positions, where fewer tokens were drafted than allowed
            noise = noise[:, : width + 1]
        if width:
            verdict = self.rule.judge(draft, scored, self.sampling, noise)
        else:  # the target's own token, which every rule would give
            own = self.sampling.sample(scored, column(noise, Purpose.CORRECT))
            verdict = Verdict(draft.tokens.bool(), own)
        endings = verdict.endings
        if self.sampling.greedy:  # a draw finds out by itself
            endings = flag_undrawable(endings, scored)
        columns = [verdict.kept, endings, draft.tokens] if width else [endings]
        if draft.lengths is not None:
            columns.append(draft.lengths[:, None])
        if verdict.changed is not None:
            columns.append(verdict.changed)
        if self.logprobs:  # float64 holds the integers beside them exactly
            known = verdict.endings.clamp(max=self.vocab_size - 1)
            scores = (
                Sampling.log_probs(logits[:, :-1], draft.tokens),
                Sampling.log_probs(logits, known),
            )
            columns += [each.double() for each in scores]
        return torch.cat(columns, dim=1) if len(columns) > 1 else endings

    def commit(
        self,
        rows: Sequence[Row],
        values: Sequence[list[Any]],
        draft: Draft,
        windows: Sequence[int],
        seconds: float,
    ) -> tuple[Events, list[Outcome], list[int]]:
        """Give every live row what its verdict kept; `values` as `outcome` lays them out.

        Returns:
            The new tokens, what became of the draft tokens, and how many of each row's were accepted.
        """
        width = draft.tokens.shape[1]
        judged, num_scores = 3 * width + 1, (2 * width + 1) * self.logprobs
        events, outcomes, counts = [], [], []
        for row, window, numbers in zip(rows, windows, values, strict=True):
            if not row.live:
                counts.append(0)
                continue
            num_accepted, logprobs = [*numbers[:width], 0].index(0), None
            counts.append(num_accepted)
            if num_scores:
                scores = numbers[-num_scores:]
                logprobs = [*scores[:num_accepted], scores[width + num_accepted]]
                numbers = list(map(int, numbers[:-num_scores]))
            endings, drafted, changed = (
                numbers[width : 2 * width + 1],
                numbers[2 * width + 1 : judged],
                numbers[judged:],
            )
            if draft.lengths is not None:
                length, *changed = changed
                drafted = drafted[:length]
            ending: int | None = endings[num_accepted]
            if self.vocab_size in endings[: num_accepted + 1]:
                # Where the draw is certain, the positions of accepted tokens count too.
                first = endings.index(self.vocab_size) if self.sampling.greedy else num_accepted
                if endings[first] == self.vocab_size:
                    drafted, num_accepted, ending = drafted[:first], first, None
            added = row.commit(
                drafted, num_accepted, ending, seconds=seconds, changed=changed, logprobs=logprobs
            )
            events.append((row, added))
            num_made = len(drafted)
            if (
                len(added) <= num_accepted
            ):  # nothing is learnt of tokens behind a stop: a next turn has their noise
                window = num_made = num_accepted = len(added)
            outcomes.append(Outcome(row, window, num_made, num_accepted))
        return events, outcomes, counts
