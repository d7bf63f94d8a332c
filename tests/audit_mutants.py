"""Biased rules, each with the mistake that its name says: an audit must find them all.

Each mistake has been made somewhere, or is what a slip of one line would make.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_specdec.drafters import Draft
from lightning_specdec.rules import (
    SOFTMAX,
    AcceptanceRule,
    ExactMatch,
    Purpose,
    RejectionSampling,
    Sampling,
    Verdict,
    draw,
)

MIN_MASS = 1e-30
"""A residual with less mass is replaced by the target's probabilities."""


def prob_of(tokens: Tensor, probs: Tensor) -> Tensor:
    """The probability `[B, K]` of each token `[B, K]` under probabilities `[B, K, V]`."""
    return probs.gather(-1, tokens[..., None])[..., 0]


def positive_part(difference: Tensor, fallback: Tensor) -> Tensor:
    """Positive differences of probabilities, or the fallback where none has mass."""
    weights = difference.clamp(min=0)
    return torch.where(weights.sum(-1, keepdim=True) > MIN_MASS, weights, fallback)


class Mutant(RejectionSampling):
    """Rejection sampling in pieces, so that each mistake replaces one.

    `target_probs` is `[B, K + 1, V]`, `draft_probs` is `[B, K, V]`.
    """

    def keeps(
        self,
        noise: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Which of the K draft tokens are kept."""
        draft_prob = prob_of(tokens, draft_probs)
        target_prob = prob_of(tokens, target_probs[:, :-1])
        return noise[:, :-1, Purpose.ACCEPT] * draft_prob < target_prob

    def residual(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """The weights that corrections are drawn from, at K positions."""
        return positive_part(target_probs[:, :-1] - draft_probs, fallback=target_probs[:, :-1])

    def bonus(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """The weights that the bonus token is drawn from."""
        return target_probs[:, -1]

    def draw_endings(self, weights: Tensor, noise: Tensor) -> Tensor:
        """The K + 1 tokens that may end the round."""
        return draw(weights, noise[..., Purpose.CORRECT])

    def accepting_probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """The target's probabilities for keeping draft tokens."""
        return sampling.probs(logits)

    def correcting_probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """The target's probabilities for corrections and the bonus token."""
        return sampling.probs(logits)

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        accepting_probs = self.accepting_probs(target_logits, sampling)
        correcting_probs = self.correcting_probs(target_logits, sampling)
        draft_probs = draft.probs
        if draft_probs is None:
            # Drafted without a draw: one-hot.
            draft_probs = torch.zeros_like(accepting_probs[:, :-1])
            draft_probs.scatter_(-1, draft.tokens[..., None], 1.0)
        if noise is None:
            noise = accepting_probs.new_zeros(*accepting_probs.shape[:2], len(Purpose))

        kept = self.keeps(noise, accepting_probs, draft_probs, draft.tokens)
        if draft.lengths is not None:
            kept &= torch.arange(kept.shape[1]) < draft.lengths[:, None]
        residual = self.residual(correcting_probs, draft_probs)
        bonus = self.bonus(correcting_probs, draft_probs)
        weights = torch.cat((residual, bonus[:, None]), dim=1)
        return Verdict(kept, self.draw_endings(weights, noise))


class ResidualNotSubtracted(Mutant):
    def residual(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return target_probs[:, :-1]


class ResidualTheOtherWay(Mutant):
    def residual(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return positive_part(draft_probs - target_probs[:, :-1], fallback=target_probs[:, :-1])


class ResidualNotRenormalized(Mutant):
    """Compares the uniform number with cumulative sums that end below 1; the last token gets the
    missing mass."""

    def draw_endings(self, weights: Tensor, noise: Tensor) -> Tensor:
        numbers = noise[..., Purpose.CORRECT, None].contiguous()
        tokens = torch.searchsorted(weights.cumsum(-1), numbers, right=True).squeeze(-1)
        return tokens.clamp(max=weights.shape[-1] - 1)


class CorrectionFromDraft(Mutant):
    def residual(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return draft_probs


class CorrectionOfTheNextPosition(Mutant):
    def residual(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return positive_part(target_probs[:, 1:] - draft_probs, fallback=target_probs[:, 1:])


class BonusFromDraft(Mutant):
    def bonus(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return draft_probs[:, -1]


class BonusOfTheLastDraftToken(Mutant):
    def bonus(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        return target_probs[:, -2]


class AcceptanceShifted(Mutant):
    """Tests each draft token against the target's probabilities of the next position."""

    def keeps(
        self,
        noise: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        shifted_probs = torch.cat((target_probs[:, 1:], target_probs[:, -1:]), dim=1)
        return super().keeps(noise, shifted_probs, draft_probs, tokens)


class LastNeverTested(Mutant):
    def keeps(
        self,
        noise: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        kept = super().keeps(noise, target_probs, draft_probs, tokens)
        kept[:, -1] = True
        return kept


class FirstAlwaysKept(Mutant):
    def keeps(
        self,
        noise: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        kept = super().keeps(noise, target_probs, draft_probs, tokens)
        kept[:, 0] = True
        return kept


class RatioSwapped(Mutant):
    def keeps(
        self,
        noise: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        draft_prob = prob_of(tokens, draft_probs)
        target_prob = prob_of(tokens, target_probs[:, :-1])
        return noise[:, :-1, Purpose.ACCEPT] * target_prob < draft_prob


class KeptIfTargetIsSurer(Mutant):
    """Keeps no draft token that the draft prefers more than the target does."""

    def keeps(
        self,
        noise: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        return prob_of(tokens, draft_probs) <= prob_of(tokens, target_probs[:, :-1])


class KeepsAHundredThousandthMore(Mutant):
    def keeps(
        self,
        noise: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        return super().keeps(noise, target_probs + 1e-5, draft_probs, tokens)


class TemperatureIgnoredOnCorrection(Mutant):
    def correcting_probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        return SOFTMAX.probs(logits)


class TemperatureIgnoredOnAcceptance(Mutant):
    def accepting_probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        return SOFTMAX.probs(logits)


class AcceptsByTheDraftsNumber(Mutant):
    """Keeps by the number that the draft token was drawn with."""

    def keeps(
        self,
        noise: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        wrong_noise = noise.clone()
        wrong_noise[..., Purpose.ACCEPT] = noise[..., Purpose.DRAFT]
        return super().keeps(wrong_noise, target_probs, draft_probs, tokens)


class CorrectsByTheAcceptingNumber(Mutant):
    """Draws the correction with the number that rejected the draft token."""

    def draw_endings(self, weights: Tensor, noise: Tensor) -> Tensor:
        return draw(weights, noise[..., Purpose.ACCEPT])


class KeepsTheSecondBest(ExactMatch):
    """Also keeps a draft token that is the target's second choice."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        second_choices = sampling.probs(target_logits[:, :-1]).topk(2).indices[..., 1]
        return Verdict(verdict.accepted | (draft.tokens == second_choices), verdict.endings)


class DecidesAtRandom(RejectionSampling):
    """Decides and corrects correctly, but with random numbers that were not passed to it."""

    generator = torch.Generator().manual_seed(0)

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        if noise is not None:
            noise = torch.rand(noise.shape, generator=self.generator)
        return super().judge(draft, target_logits, sampling, noise)


RULES: dict[str, AcceptanceRule] = {
    "residual not subtracted": ResidualNotSubtracted(),
    "residual not renormalized": ResidualNotRenormalized(),
    "correction from the draft": CorrectionFromDraft(),
    "bonus token from the draft": BonusFromDraft(),
    "acceptance shifted by one position": AcceptanceShifted(),
    "last token never tested": LastNeverTested(),
    "first token always kept": FirstAlwaysKept(),
    "acceptance ratio swapped": RatioSwapped(),
    "temperature ignored on correction": TemperatureIgnoredOnCorrection(),
    "accepts by the draft's number": AcceptsByTheDraftsNumber(),
    "keeps the second best": KeepsTheSecondBest(),
}
MORE_RULES: dict[str, AcceptanceRule] = {
    "residual the other way": ResidualTheOtherWay(),
    "correction of the next position": CorrectionOfTheNextPosition(),
    "bonus token of the last draft token": BonusOfTheLastDraftToken(),
    "kept only if the target is surer": KeptIfTargetIsSurer(),
    "temperature ignored on acceptance": TemperatureIgnoredOnAcceptance(),
    "keeps a hundred-thousandth more": KeepsAHundredThousandthMore(),
    "corrects by the accepting number": CorrectsByTheAcceptingNumber(),
    "decides at random": DecidesAtRandom(),
}
"""Others, for fewer seeds."""
