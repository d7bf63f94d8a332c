"""Losses of a draft: how far its distribution is from the text, or from the target's.

In the formulas q is the draft, p the target. Shapes: N positions, W tokens of the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_specdec.data import IGNORED

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LOG_FLOOR = -100.0
"""Least log probability of the target where a loss would be infinite without."""
AT_A_TIME = 2**20
"""Logits that are worked on at once: they fit a processor's cache."""


class DraftLoss(ABC):
    """A loss for each position. The target is a constant."""

    @abstractmethod
    def values(
        self,
        log_draft: Float[Tensor, "N W"],
        log_target: Float[Tensor, "N W"],
        labels: Int[Tensor, "N"],
    ) -> Float[Tensor, "N"]:
        """The losses, in float32 and differentiable.

        Args:
            log_draft: log probabilities, finite.
            log_target: log probabilities, finite or -inf, whose sum may be below 1.
            labels: the next tokens of the text, `IGNORED` where the draft does not have them.
        """

    def __call__(
        self,
        draft_logits: Float[Tensor, "N W"],
        target_log_probs: Float[Tensor, "N W"],
        labels: Int[Tensor, "N"],
    ) -> Float[Tensor, "N"]:
        """The loss of each position in float32: nats, or a probability for `TotalVariation`.

        Computed a few positions at a time, and again in the backward pass, so that no float32 tensors as large as the
        logits are kept.
        """
        step = max(1, AT_A_TIME // draft_logits.shape[1])
        pieces = zip(
            draft_logits.split(step), target_log_probs.split(step), labels.split(step), strict=True
        )
        return torch.cat(
            [checkpoint(self._of_logits, *piece, use_reentrant=False) for piece in pieces]
        )

    def _of_logits(self, logits: Tensor, target_log_probs: Tensor, labels: Tensor) -> Tensor:
        # The difference of two logits may overflow.
        log_draft = logits.float().log_softmax(-1).clamp(min=torch.finfo(torch.float32).min)
        return self.values(log_draft, target_log_probs.float(), labels)


class CrossEntropy(DraftLoss):
    """-log q of the text's own token, 0 where the draft does not have it: learns from the text alone."""

    def values(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> Tensor:
        return -log_draft.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * (labels != IGNORED)


class ForwardKL(DraftLoss):
    """sum p (log p - log q) + 1 - sum p: the draft covers what the target may say (mean-seeking).

    1 - sum p, the target's probability of tokens that the draft does not have, keeps the least value at 0.
    """

    def values(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> Tensor:
        target = log_target.exp()
        return 1 - target.sum(-1) - (target * (log_draft - log_target.clamp(min=LOG_FLOOR))).sum(-1)


class TotalVariation(DraftLoss):
    """1 - sum min(p, q): the probability that a draft token is rejected (Leviathan et al. 2023, corollary 3.6)."""

    def values(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> Tensor:
        return 1 - torch.minimum(log_draft.exp(), log_target.exp()).sum(-1)
