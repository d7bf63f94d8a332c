"""Biased rules, each with the mistake that its name says: what an audit must find out.

Every mistake is one that has been made somewhere, or that a slip of one line would make.
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


class Mutant(RejectionSampling):
    """Rejection sampling taken apart, so that each mistake replaces one piece."""

    def keeps(self, noise: Tensor, target: Tensor, guessing: Tensor, tokens: Tensor) -> Tensor:
        """Which of the K guesses are kept."""
        of = (tokens[..., None],)
        draft_prob, target_prob = guessing.gather(-1, *of), target[:, :-1].gather(-1, *of)
        return noise[:, :-1, Purpose.ACCEPT] * draft_prob[..., 0] < target_prob[..., 0]

    def residual(self, target: Tensor, guessing: Tensor) -> Tensor:
        """What a correction is drawn from, at K positions."""
        left = (target[:, :-1] - guessing).clamp(min=0)
        return torch.where(left.sum(-1, keepdim=True) > 1e-30, left, target[:, :-1])

    def bonus(self, target: Tensor, guessing: Tensor) -> Tensor:
        """What the bonus is drawn from."""
        return target[:, -1]

    def drawn(self, weights: Tensor, noise: Tensor) -> Tensor:
        """The K + 1 tokens that may end the round."""
        return draw(weights, noise[..., Purpose.CORRECT])

    def target_probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """The probabilities that draft tokens are kept by."""
        return sampling.probs(logits)

    def correcting_probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """What corrections are made of."""
        return sampling.probs(logits)

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        target, correcting = (
            self.target_probs(target_logits, sampling),
            self.correcting_probs(target_logits, sampling),
        )
        guessing = draft.probs
        if guessing is None:
            guessing = torch.zeros_like(target[:, :-1]).scatter_(-1, draft.tokens[..., None], 1.0)
        if noise is None:
            noise = target.new_zeros(*target.shape[:2], len(Purpose))
        kept = self.keeps(noise, target, guessing, draft.tokens)
        if draft.lengths is not None:
            kept &= torch.arange(kept.shape[1]) < draft.lengths[:, None]
        weights = torch.cat(
            (self.residual(correcting, guessing), self.bonus(correcting, guessing)[:, None]), dim=1
        )
        return Verdict(kept, self.drawn(weights, noise))


class ResidualNotSubtracted(Mutant):
    def residual(self, target: Tensor, guessing: Tensor) -> Tensor:
        return target[:, :-1]


class ResidualTheOtherWay(Mutant):
    def residual(self, target: Tensor, guessing: Tensor) -> Tensor:
        left = (guessing - target[:, :-1]).clamp(min=0)
        return torch.where(left.sum(-1, keepdim=True) > 1e-30, left, target[:, :-1])


class ResidualNotRenormalized(Mutant):
    """Compares the uniform number with cumulative sums that end below 1; what is left goes to the last token."""

    def drawn(self, weights: Tensor, noise: Tensor) -> Tensor:
        numbers = noise[..., Purpose.CORRECT, None].contiguous()
        found = torch.searchsorted(weights.cumsum(-1), numbers, right=True).squeeze(-1)
        return found.clamp(max=weights.shape[-1] - 1)


class CorrectionFromDraft(Mutant):
    def residual(self, target: Tensor, guessing: Tensor) -> Tensor:
        return guessing


class CorrectionOfTheNextPosition(Mutant):
    def residual(self, target: Tensor, guessing: Tensor) -> Tensor:
        left = (target[:, 1:] - guessing).clamp(min=0)
        return torch.where(left.sum(-1, keepdim=True) > 1e-30, left, target[:, 1:])


class BonusFromDraft(Mutant):
    def bonus(self, target: Tensor, guessing: Tensor) -> Tensor:
        return guessing[:, -1]


class BonusOfTheLastGuess(Mutant):
    def bonus(self, target: Tensor, guessing: Tensor) -> Tensor:
        return target[:, -2]


class AcceptanceShifted(Mutant):
    """Tests each guess against the target's probabilities of the position behind it."""

    def keeps(self, noise: Tensor, target: Tensor, guessing: Tensor, tokens: Tensor) -> Tensor:
        return super().keeps(
            noise, torch.cat((target[:, 1:], target[:, -1:]), dim=1), guessing, tokens
        )


class LastNeverTested(Mutant):
    def keeps(self, noise: Tensor, target: Tensor, guessing: Tensor, tokens: Tensor) -> Tensor:
        kept = super().keeps(noise, target, guessing, tokens)
        kept[:, -1] = True
        return kept


class FirstAlwaysKept(Mutant):
    def keeps(self, noise: Tensor, target: Tensor, guessing: Tensor, tokens: Tensor) -> Tensor:
        kept = super().keeps(noise, target, guessing, tokens)
        kept[:, 0] = True
        return kept


class RatioSwapped(Mutant):
    def keeps(self, noise: Tensor, target: Tensor, guessing: Tensor, tokens: Tensor) -> Tensor:
        of = (tokens[..., None],)
        draft_prob, target_prob = guessing.gather(-1, *of), target[:, :-1].gather(-1, *of)
        return noise[:, :-1, Purpose.ACCEPT] * target_prob[..., 0] < draft_prob[..., 0]


class KeptWhereTargetIsSurer(Mutant):
    """Keeps no guess that the draft likes more than the target does."""

    def keeps(self, noise: Tensor, target: Tensor, guessing: Tensor, tokens: Tensor) -> Tensor:
        of = (tokens[..., None],)
        return (guessing.gather(-1, *of) <= target[:, :-1].gather(-1, *of))[..., 0]


class KeepsAHundredThousandthMore(Mutant):
    def keeps(self, noise: Tensor, target: Tensor, guessing: Tensor, tokens: Tensor) -> Tensor:
        return super().keeps(noise, target + 1e-5, guessing, tokens)


class TemperatureIgnoredOnCorrection(Mutant):
    def correcting_probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        return SOFTMAX.probs(logits)


class TemperatureIgnoredOnAcceptance(Mutant):
    def target_probs(self, logits: Tensor, sampling: Sampling) -> Tensor:
        return SOFTMAX.probs(logits)


class AcceptsByTheDraftsNumber(Mutant):
    """Keeps by the number that the guess was drawn with."""

    def keeps(self, noise: Tensor, target: Tensor, guessing: Tensor, tokens: Tensor) -> Tensor:
        read = noise.clone()
        read[..., Purpose.ACCEPT] = noise[..., Purpose.DRAFT]
        return super().keeps(read, target, guessing, tokens)


class CorrectsByTheAcceptingNumber(Mutant):
    """Draws the correction with the number that rejected the guess."""

    def drawn(self, weights: Tensor, noise: Tensor) -> Tensor:
        return draw(weights, noise[..., Purpose.ACCEPT])


class KeepsTheSecondBest(ExactMatch):
    """Keeps a guess too where it is the target's second choice."""

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        second = sampling.probs(target_logits[:, :-1]).topk(2).indices[..., 1]
        return Verdict(verdict.kept | (draft.tokens == second), verdict.endings)


class DecidesAtRandom(RejectionSampling):
    """Decides and corrects as it should, with random numbers that nobody gave it."""

    own = torch.Generator().manual_seed(0)

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        other = None if noise is None else torch.rand(noise.shape, generator=self.own)
        return super().judge(draft, target_logits, sampling, other)


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
    "bonus token of the last guess": BonusOfTheLastGuess(),
    "kept only where the target is surer": KeptWhereTargetIsSurer(),
    "temperature ignored on acceptance": TemperatureIgnoredOnAcceptance(),
    "keeps a hundred-thousandth more": KeepsAHundredThousandthMore(),
    "corrects by the accepting number": CorrectsByTheAcceptingNumber(),
    "decides at random": DecidesAtRandom(),
}
"""Others, for fewer seeds."""
