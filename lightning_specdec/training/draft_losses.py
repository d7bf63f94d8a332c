"""Losses of a draft: how far its distribution is from the text, or from the target's.

In the formulas q is the draft and p the target. Shapes: N positions, W tokens of the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_specdec.config.kinds import described, is_user_class, path_of
from lightning_specdec.data import IGNORED

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LOG_FLOOR = -100.0
"""Minimum log probability of the target where a loss would otherwise be infinite."""
AT_A_TIME = 2**20
"""Maximum logits that are processed at once, so that they fit the processor's cache."""


class DraftLoss(ABC):
    """A loss for each position. The target's distribution is a constant."""

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
            log_target: log probabilities, finite or -inf. The probabilities of a position may sum
                to less than 1.
            labels: the next tokens of the text; `IGNORED` where they are outside the draft's
                vocabulary.
        """

    def __call__(
        self,
        draft_logits: Float[Tensor, "N W"],
        target_log_probs: Float[Tensor, "N W"],
        labels: Int[Tensor, "N"],
    ) -> Float[Tensor, "N"]:
        """The loss of each position in float32: nats, or a probability for `TotalVariation`.

        It is computed a few positions at a time, and again in the backward pass. So no float32
        tensors of the size of the logits stay in memory.
        """
        num_positions = max(1, AT_A_TIME // draft_logits.shape[1])
        pieces = zip(
            draft_logits.split(num_positions),
            target_log_probs.split(num_positions),
            labels.split(num_positions),
            strict=True,
        )
        losses = [
            checkpoint(self._values_of_logits, *piece, use_reentrant=False) for piece in pieces
        ]
        return torch.cat(losses)

    def _values_of_logits(
        self,
        draft_logits: Tensor,
        target_log_probs: Tensor,
        labels: Tensor,
    ) -> Tensor:
        log_draft = draft_logits.float().log_softmax(-1)
        # The difference of two large logits may overflow to -inf.
        log_draft = log_draft.clamp(min=torch.finfo(torch.float32).min)
        losses = self.values(log_draft, target_log_probs.float(), labels)
        if is_user_class(type(self)):
            self._check(losses, labels)
        return losses

    def _check(self, losses: object, labels: Tensor) -> None:
        """Raise ValueError unless a user's loss returned a differentiable value per position."""
        where = f"{path_of(type(self))}.values"
        if not isinstance(losses, Tensor) or losses.shape != labels.shape:
            raise ValueError(
                f"{where} must return one loss for each position, {list(labels.shape)}, "
                f"got {described(losses)}"
            )
        if torch.is_grad_enabled() and not losses.requires_grad:
            raise ValueError(
                f"{where} must return losses that are differentiable by log_draft, got constants"
            )


class CrossEntropy(DraftLoss):
    """-log q of the text's next token: learns from the text only.

    It is 0 where that token is outside the draft's vocabulary.
    """

    def values(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> Tensor:
        token_indices = labels.clamp(min=0)[:, None]
        losses = -log_draft.gather(1, token_indices).squeeze(1)
        return losses.masked_fill(labels == IGNORED, 0.0)


class ForwardKL(DraftLoss):
    """sum p (log p - log q) + 1 - sum p: mean-seeking, q covers all that p may generate.

    1 - sum p is the target's probability of tokens outside the draft's vocabulary. It makes 0 the
    minimum.
    """

    def values(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> Tensor:
        target_probs = log_target.exp()
        probs_outside = 1 - target_probs.sum(-1)
        # Where p is 0, so is the term: log p must only be finite.
        log_ratio = log_draft - log_target.clamp(min=LOG_FLOOR)
        return probs_outside - (target_probs * log_ratio).sum(-1)


class TotalVariation(DraftLoss):
    """1 - sum min(p, q): the probability that a draft token is rejected.

    Leviathan et al. 2023, corollary 3.6.
    """

    def values(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> Tensor:
        acceptance_probs = torch.minimum(log_draft.exp(), log_target.exp()).sum(-1)
        return 1 - acceptance_probs
