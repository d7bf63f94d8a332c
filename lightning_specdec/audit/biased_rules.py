"""Biased acceptance rules: controls that an audit of an engine must catch.

Each makes one mistake that engines have made, and is rejection sampling otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_specdec.rules import Draft, Purpose, RejectionSampling, Sampling, Verdict, draw
from lightning_specdec.rules.acceptance import within

UNSEEN_SHARE = 0.1
"""Share of draft tokens that `AcceptsSomeUnseen` does not test."""
LARGEST_NUMBER = 1 - 2.0**-24
"""The largest number below 1 in float32."""
TEMPERATURE_FACTOR = 0.95
"""The temperature of `WrongTemperature` / the requested one."""


class AcceptsSomeUnseen(RejectionSampling):
    """Biased: accepts one draft token in ten without a test."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        if noise is None:
            return super().judge(draft, target_logits, sampling, noise)
        # A correction's number is not used if its token is accepted, so it decides this, too. What
        # is left of it is spread over [0, 1) again for the correction.
        is_drafted = within(torch.ones_like(draft.tokens, dtype=torch.bool), draft.lengths)
        numbers = noise[:, :-1, Purpose.CORRECT]
        is_unseen = is_drafted & (numbers < UNSEEN_SHARE)
        spread_numbers = ((numbers - UNSEEN_SHARE) / (1 - UNSEEN_SHARE)).clamp(0, LARGEST_NUMBER)
        noise = noise.clone()
        noise[:, :-1, Purpose.CORRECT] = torch.where(is_drafted, spread_numbers, numbers)

        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(verdict.accepted | is_unseen, verdict.endings)


class AcceptsFirst(RejectionSampling):
    """Biased: accepts the first draft token of every round without a test."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        accepted = verdict.accepted.clone()
        accepted[:, 0] = True
        return Verdict(within(accepted, draft.lengths), verdict.endings)


class DrawsBonusFromDraft(RejectionSampling):
    """Biased: draws the bonus token from the draft's distribution of the last draft token."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        if draft.probs is None or noise is None:
            return verdict
        num_draft_tokens = draft.tokens.shape[1]
        lengths = draft.lengths
        if lengths is None:
            lengths = torch.full(draft.tokens.shape[:1], num_draft_tokens)
        endings = verdict.endings.clone()
        rows = torch.arange(len(endings), device=endings.device)
        lengths = lengths.to(endings.device)
        last_probs = draft.probs[rows, (lengths - 1).clamp(min=0)]
        bonus_noise = noise[rows, lengths, Purpose.CORRECT].contiguous()
        has_draft = lengths > 0
        bonus_tokens = draw(last_probs[has_draft], bonus_noise[has_draft])
        endings[rows[has_draft], lengths[has_draft]] = bonus_tokens
        return Verdict(verdict.accepted, endings)


class WrongTemperature(RejectionSampling):
    """Biased: judges and draws at a temperature that is 5% too low."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        if not sampling.greedy:
            temperature = sampling.temperature * TEMPERATURE_FACTOR
            sampling = replace(sampling, temperature=temperature)
        return super().judge(draft, target_logits, sampling, noise)


BIASED_RULES: dict[str, type[RejectionSampling]] = {
    "accepts one draft token in ten unseen": AcceptsSomeUnseen,
    "accepts the first draft token unseen": AcceptsFirst,
    "draws the bonus token from the draft": DrawsBonusFromDraft,
    "temperature too low by 5%": WrongTemperature,
}
"""The controls, by what they do."""
