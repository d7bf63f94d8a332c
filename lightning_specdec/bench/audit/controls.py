"""Rules with a bias, which an audit must find out: else it would not have found another one either."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.rules import (
    AcceptanceRule,
    Draft,
    ExactMatch,
    Purpose,
    RejectionSampling,
    Sampling,
    Verdict,
    column,
)

if TYPE_CHECKING:
    from jaxtyping import Float


class _Keeping(AcceptanceRule):
    """What the rule behind it in a class's bases decides, but for its rejections."""

    def judge(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K1 V"],
        sampling: Sampling,
        noise: Float[Tensor, "B K1 3"] | None,
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)  # type: ignore[safe-super]
        kept = torch.ones_like(verdict.kept)
        if draft.lengths is not None:
            kept &= torch.arange(kept.shape[1], device=kept.device) < draft.lengths[:, None]
        return Verdict(kept, verdict.endings)


class KeepsEverything(_Keeping, RejectionSampling):
    """Biased: no guess is ever rejected."""


class KeepsEverythingCoupled(_Keeping, ExactMatch):
    """Biased in the same way, with a draft that draws with the target's numbers."""


class CorrectsFromTarget(RejectionSampling):
    """Biased, but less: a correction is drawn from the target itself, so that what the draft likes comes twice."""

    def judge(
        self,
        draft: Draft,
        target_logits: Float[Tensor, "B K1 V"],
        sampling: Sampling,
        noise: Float[Tensor, "B K1 3"] | None,
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(verdict.kept, sampling.sample(target_logits, column(noise, Purpose.CORRECT)))


def control_of(rule: AcceptanceRule) -> AcceptanceRule:
    """The biased rule that stands beside a rule in the check of one round."""
    return KeepsEverythingCoupled() if rule.ignores_windows else CorrectsFromTarget()
