"""The real loop, played with given uniform numbers and watched: what was guessed, scored and settled in one round.

Shapes: R rows of one text, K guesses, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.bench.audit.scores import scores
from lightning_specdec.drafters import Drafter
from lightning_specdec.inference import Session
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import AcceptanceRule, Draft, Purpose, Sampling, Verdict

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Played:
    """One round, as the rule saw it and as the rows came out of it.

    Args:
        draft: None where nobody guessed, and then the rule was not asked.
        logits: the target's K + 1, as processors leave them.
        settled: each row's new tokens.
    """

    draft: Draft | None
    logits: Float[Tensor, "R K1 V"] | None
    settled: list[list[int]]

    @property
    def guesses(self) -> list[list[int]]:
        """Each row's guessed tokens."""
        if self.draft is None:
            return [[] for _ in self.settled]
        rows = self.draft.tokens.tolist()
        if self.draft.lengths is None:
            return rows
        return [row[:length] for row, length in zip(rows, self.draft.lengths.tolist(), strict=True)]


class Stage:
    """A pair of models with a rule and a prompt, on which the same round is played with one noise after the other.

    It is the second one. In the first, whatever was guessed is rejected, and the target's likeliest token follows. So
    the states have gone back once, and drafts have heard the target, without which some guess nothing; and the text is
    the same however rounding falls.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        prompt: Sequence[int],
        *,
        rule: AcceptanceRule,
        sampling: Sampling,
        num_draft_tokens: int,
    ) -> None:
        self.target, self.drafter, self.prompt = target, drafter, list(prompt)
        self.rule, self.sampling, self.width = rule, sampling, num_draft_tokens + 1
        probs = sampling.probs(sampling.process(scores(target, [prompt], 1), [prompt]))[0, 0].cpu()
        self._first = int(probs.argmax())
        self._number = float((probs.cumsum(0) - probs / 2)[self._first] / probs.sum())
        self.text = [*prompt, self._first]
        """What the round goes on from."""

    def play(self, noise: Float[Tensor, "R K1 3"]) -> Played:
        """One round for R rows, each with its numbers."""
        watched, most = _Watched(self.rule), 2 * self.width
        session = _ScriptedSession(
            self.target,
            self.drafter,
            max_length=len(self.prompt) + most,
            rule=watched,
            sampling=self.sampling,
            num_draft_tokens=self.width - 1,
            batch_size=len(noise),
        )
        rows = [session.add(self.prompt, max_new_tokens=most) for _ in noise]
        session.script(torch.full_like(noise, self._number), 0)
        watched.answer = self._first
        session.step()
        watched.answer = watched.asked = None
        session.script(noise, rows[0].num_new)
        events = session.step()
        draft, logits = watched.asked or (None, None)
        return Played(draft, logits, [tokens for _, tokens in events])


class _ScriptedSession(Session):
    """A session whose uniform numbers are given."""

    def script(self, noise: Float[Tensor, "R N 3"], position: int) -> None:
        """The numbers of the next round, whose first new token has this position."""
        table = self._batch.noise
        assert table is not None, "nothing is drawn at random"
        table[:, position : position + noise.shape[1]] = noise.to(self.device)


class _Watched(AcceptanceRule):
    """A rule that remembers what it was asked last, and rejects all guesses for an `answer`; else it is another one."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule
        self.answer: int | None = None
        self.asked: tuple[Draft, Tensor] | None = None

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.rule.lossless

    @property
    def ignores_windows(self) -> bool:  # type: ignore[override]
        return self.rule.ignores_windows

    @property
    def needs_draft_logits(self) -> bool:  # type: ignore[override]
        return self.rule.needs_draft_logits

    @property
    def draft_purpose(self) -> Purpose:  # type: ignore[override]
        return self.rule.draft_purpose

    def judge(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K1 V"],
        sampling: Sampling,
        noise: Float[Tensor, "B K1 3"] | None,
    ) -> Verdict:
        self.asked = draft, target_logits
        if self.answer is not None:
            kept = torch.zeros_like(draft.tokens, dtype=torch.bool)
            endings = torch.full(target_logits.shape[:2], self.answer, device=kept.device)
            return Verdict(kept, endings, None if self.lossless else kept)
        return self.rule.judge(draft, target_logits, sampling, noise)
