"""Rules with a bias, which an audit must find: a check that misses them would miss others too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_specdec.rules import Draft, ExactMatch, Purpose, RejectionSampling, Sampling, Verdict, column


class KeepsEverything(ExactMatch):
    """Biased: no draft token is ever rejected."""

    def judge(self, draft: Draft, *rest: Any) -> Verdict:
        verdict = super().judge(draft, *rest)
        kept = torch.ones_like(verdict.kept)
        if draft.lengths is not None:
            kept &= torch.arange(kept.shape[1], device=kept.device) < draft.lengths[:, None]
        return Verdict(kept, verdict.endings)


class CorrectsFromTarget(RejectionSampling):
    """Biased, but less: a correction is drawn from the target itself, so that what the draft likes comes twice."""

    def judge(self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(verdict.kept, sampling.sample(target_logits, column(noise, Purpose.CORRECT)))
