"""Rules with a bias, which an audit must find out: else it would not have found another one either."""

from __future__ import annotations

from typing import Any

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


class KeepsEverything(RejectionSampling):
    """Biased: no draft token is ever rejected."""

    def judge(self, draft: Draft, *rest: Any) -> Verdict:
        return _all_kept(super().judge(draft, *rest), draft)


class KeepsEverythingCoupled(ExactMatch):
    """Biased in the same way, with a draft that draws with the target's numbers."""

    def judge(self, draft: Draft, *rest: Any) -> Verdict:
        return _all_kept(super().judge(draft, *rest), draft)


class CorrectsFromTarget(RejectionSampling):
    """Biased, but less: a correction is drawn from the target itself, so that what the draft likes comes twice."""

    def judge(self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(verdict.kept, sampling.sample(target_logits, column(noise, Purpose.CORRECT)))


def _all_kept(verdict: Verdict, draft: Draft) -> Verdict:
    kept = torch.ones_like(verdict.kept)
    if draft.lengths is not None:
        kept &= torch.arange(kept.shape[1], device=kept.device) < draft.lengths[:, None]
    return Verdict(kept, verdict.endings)


KEEPS_DRAWN, KEEPS_COUPLED, CORRECTS = KeepsEverything(), KeepsEverythingCoupled(), CorrectsFromTarget()


def control_of(rule: AcceptanceRule) -> AcceptanceRule:
    """The biased rule that stands beside a rule in the check of one round."""
    return KEEPS_COUPLED if rule.ignores_windows else CORRECTS
