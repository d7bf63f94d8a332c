"""How a round ends: the verdict, its one way from the device to the host, and what each row gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.inference.limits import flag_undrawable
from lightning_specdec.inference.rows import Row, check_drawn
from lightning_specdec.inference.windows import Outcome
from lightning_specdec.models.graphs import GraphCache, Outputs
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling, Verdict, column

if TYPE_CHECKING:
    from jaxtyping import Float

Events = list[tuple[Row, list[int]]]
"""Each live row's newly settled tokens."""


class Settlement:
    """Judges a round, reads the outcome in one piece, and gives each row its part.

    Args:
        rule: what decides.
        sampling: how the target's tokens are drawn.
        vocab_size: the target's.
        logprobs: whether each token's log probability under the target is wanted.
    """

    def __init__(self, rule: AcceptanceRule, sampling: Sampling, vocab_size: int, *, logprobs: bool) -> None:
        self.rule, self.sampling, self.vocab_size, self.logprobs = rule, sampling, vocab_size, logprobs
        self._greedy = sampling.greedy

    def judge(
        self, rows: Sequence[Row], draft: Draft, logits: Float[Tensor, "B K1 V"], noise: Float[Tensor, "B N 3"] | None
    ) -> tuple[Verdict, Float[Tensor, "B K1 V"]]:
        """The rule's verdict; where nobody guessed, the target's own token, which every rule would give.

        Args:
            noise: the uniform numbers of the K + 1 positions; more, where nobody guessed as much as was allowed.

        Returns:
            The verdict, and the logits that it was reached by: as processors leave them.
        """
        if self.sampling.processors:
            logits = self._processed(rows, draft, logits)
        num_guesses = draft.tokens.shape[1]
        if noise is not None:
            noise = noise[:, : num_guesses + 1]
        if num_guesses:
            return self.rule.judge(draft, logits, self.sampling, noise), logits
        own = self.sampling.sample(logits, column(noise, Purpose.CORRECT))
        return Verdict(draft.tokens.bool(), own), logits

    def _processed(self, rows: Sequence[Row], draft: Draft, logits: Float[Tensor, "B K1 V"]) -> Float[Tensor, "B K1 V"]:
        """The logits as processors leave them for each text and each of its guesses.

        Processors are asked from the host, so with them it reads the guesses ahead of the verdict.
        """
        guesses = draft.tokens.tolist()
        if draft.lengths is not None:
            guesses = [row[:length] for row, length in zip(guesses, draft.lengths.tolist(), strict=True)]
        texts = [row.text if row.live else None for row in rows]
        return self.sampling.process(logits, texts, guesses, stop_at_impossible=self.rule.lossless)

    def outcome(
        self,
        rows: Sequence[Row],
        draft: Draft,
        logits: Float[Tensor, "B K1 V"],
        noise: Float[Tensor, "B N 3"] | None,
        graphs: GraphCache | None,
    ) -> Tensor:
        """What the round's only read of the device takes, see `pack`; judged in a recorded call where there are any."""
        if graphs is None or self.sampling.processors:
            return self.pack(draft, *self.judge(rows, draft, logits, noise), logits)

        def judge(logits: Tensor, noise: Tensor | None, tokens: Tensor, lengths: Tensor | None, *rest: Any) -> Outputs:
            given = Draft(tokens, lengths, *rest)
            return (self.pack(given, *self.judge((), given, logits, noise), logits),)

        key = "judge", type(self.rule), tuple(sorted(vars(self.rule).items())), self.sampling, self.logprobs
        packed = graphs.run(key, judge, logits, noise, draft.tokens, draft.lengths, draft.probs, draft.logits)[0]
        assert packed is not None
        return packed

    def pack(
        self, draft: Draft, verdict: Verdict, judged: Float[Tensor, "B K1 V"], logits: Float[Tensor, "B K1 V"]
    ) -> Tensor:
        """All that the host wants to know of a round, in one tensor.

        Args:
            logits: the target's own.
            judged: those that the rule judged by.
        """
        endings = verdict.endings
        if self._greedy:  # a draw has found it out already
            endings = flag_undrawable(endings, judged)
        columns = [verdict.kept, endings, draft.tokens] if draft.tokens.shape[1] else [endings]
        if draft.lengths is not None:
            columns.append(draft.lengths[:, None])
        if verdict.changed is not None:
            columns.append(verdict.changed)
        if self.logprobs:
            # float64 holds the integers beside them exactly.
            columns.append(Sampling.log_probs(logits[:, :-1], draft.tokens).double())
            known = verdict.endings.clamp(max=self.vocab_size - 1)
            columns.append(Sampling.log_probs(logits, known).double())
        return torch.cat(columns, dim=1) if len(columns) > 1 else endings

    def settle(
        self,
        rows: Sequence[Row],
        values: Sequence[list[Any]],
        draft: Draft,
        windows: Sequence[int],
        seconds: float,
    ) -> tuple[Events, list[Outcome], list[int]]:
        """Give every live row what its verdict kept; `values` as `pack` lays them out.

        Returns:
            What was settled, what became of the guesses, and how many of each row's were accepted.
        """
        num_guesses = draft.tokens.shape[1]
        events, outcomes, counts = [], [], []
        for row, window, numbers in zip(rows, windows, values, strict=True):
            num_accepted = next((i for i in range(num_guesses) if not numbers[i]), num_guesses)
            if not row.live:
                counts.append(0)
                continue
            counts.append(num_accepted)
            logprobs = None
            if self.logprobs:
                numbers, scores = numbers[: -2 * num_guesses - 1], numbers[-2 * num_guesses - 1 :]
                logprobs = [*scores[:num_accepted], scores[num_guesses + num_accepted]]
                numbers = [int(number) for number in numbers]
            ending = numbers[num_guesses + num_accepted]
            drafted, changed = numbers[2 * num_guesses + 1 : 3 * num_guesses + 1], numbers[3 * num_guesses + 1 :]
            if draft.lengths is not None:
                length, *changed = changed
                drafted, changed = drafted[:length], changed[:length]
            # Where the draw is certain, the guesses that were kept count too; what lies behind EOS never does.
            first = 0 if self._greedy else num_accepted
            last = next((i for i, token in enumerate(drafted[:num_accepted]) if token in row.eos), num_accepted)
            drawn = numbers[num_guesses + first : num_guesses + last + 1]
            check_drawn(max(drawn, default=0), self.vocab_size)
            added = row.settle(drafted, num_accepted, ending, seconds=seconds, changed=changed, logprobs=logprobs)
            events.append((row, added))
            num_made = len(drafted)
            if len(added) <= num_accepted:  # nothing is learnt of guesses behind a stop: a next turn has their noise
                window = num_made = num_accepted = len(added)
            outcomes.append(Outcome(row, window, num_made, num_accepted))
        return events, outcomes, counts
