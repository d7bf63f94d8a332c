"""Losses of a draft: how far its distribution is from the text, or from the target's.

Each loss computes its value and its gradient with respect to the logits in one pass, in float32, a few positions at a
time: of tensors as large as the vocabulary only the gradient is kept. In the formulas q is the draft, p the target.

Shapes: N positions, W tokens of the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.data import IGNORED

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LOG_FLOOR = -100.0
"""Least log probability of the target where a loss would be infinite without."""
AT_A_TIME = 2**20
"""Numbers that are worked on at once: they fit a processor's cache."""


class DraftLoss(ABC):
    """A loss for each position. The target is a constant."""

    @abstractmethod
    def closed_form(
        self, log_draft: Float[Tensor, "N W"], log_target: Float[Tensor, "N W"], labels: Int[Tensor, "N"]
    ) -> tuple[Float[Tensor, "N"], Float[Tensor, "N W"]]:
        """The losses, and their gradients with respect to the logits.

        Args:
            log_draft: log probabilities, finite.
            log_target: log probabilities, finite or -inf.
            labels: the next tokens of the text, `IGNORED` where the draft does not have them.
        """

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments as plain values."""
        return {}

    def __call__(
        self, draft_logits: Float[Tensor, "N W"], target_log_probs: Float[Tensor, "N W"], labels: Int[Tensor, "N"]
    ) -> Float[Tensor, "N"]:
        """The loss of each position in float32: nats, or a probability for `TotalVariation`.

        Args:
            draft_logits: of any floating dtype, which gradients have too.
            target_log_probs: log probabilities of these W tokens, whose sum may be below 1.
            labels: the next tokens of the text, `IGNORED` where the draft does not have them.
        """
        differentiable = torch.is_grad_enabled() and draft_logits.requires_grad
        values: Tensor = _ClosedForm.apply(draft_logits, target_log_probs, labels, self, differentiable)
        return values


class _ClosedForm(torch.autograd.Function):
    """Computes the gradient in the forward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, target_log_probs: Tensor, labels: Tensor, loss: DraftLoss, backward: bool
    ) -> Tensor:
        values = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        gradients = torch.empty_like(logits) if backward else None
        step = max(1, AT_A_TIME // max(1, logits.shape[1]))
        least = torch.finfo(torch.float32).min  # the difference of two logits may overflow
        for first in range(0, len(logits), step):
            rows = slice(first, first + step)
            log_draft = logits[rows].float().log_softmax(-1).clamp_(min=least)
            values[rows], gradient = loss.closed_form(log_draft, target_log_probs[rows].float(), labels[rows])
            if gradients is not None:
                gradients[rows] = gradient
        if gradients is not None:
            ctx.save_for_backward(gradients)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * above.to(gradients.dtype)[:, None], None, None, None, None


class CrossEntropy(DraftLoss):
    """-log q of the text's own token, 0 where the draft does not have it: learns from the text alone.

    Gradient: q - 1 at that token, q elsewhere.
    """

    def closed_form(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        known = (labels != IGNORED).float()
        labels = labels.clamp(min=0)[:, None]
        gradient = (log_draft.exp() * known[:, None]).scatter_add_(1, labels, -known[:, None])
        return -log_draft.gather(1, labels).squeeze(1) * known, gradient


class ForwardKL(DraftLoss):
    """sum p (log p - log q) + 1 - sum p: the draft covers what the target may say (mean-seeking).

    1 - sum p, the target's probability of tokens that the draft does not have, keeps the least value at 0.
    Gradient: q sum(p) - p.
    """

    def closed_form(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        target = log_target.exp()
        mass = target.sum(-1, keepdim=True)
        log_ratio = log_draft - log_target.clamp(min=LOG_FLOOR)
        return 1 - mass.squeeze(-1) - (target * log_ratio).sum(-1), (log_draft.exp() * mass).sub_(target)


class ReverseKL(DraftLoss):
    """sum q (log q - log p): the draft says nothing that the target would not (mode-seeking).

    log p is at least `LOG_FLOOR`. Gradient: q (log q - log p - value).
    """

    def closed_form(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        draft = log_draft.exp()
        parts = draft * (log_draft - log_target.clamp(min=LOG_FLOOR))
        values = parts.sum(-1)
        return values, parts.addcmul_(draft, values[:, None], value=-1.0)


class TotalVariation(DraftLoss):
    """1 - sum min(p, q): the probability that a draft token is rejected (Leviathan et al. 2023, corollary 3.6).

    Gradient: -q (s - sum(q s)) with s = 1 where q < p, 0 where q > p, and 1/2 at the kink q = p.
    """

    def closed_form(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        draft, target = log_draft.exp(), log_target.exp()
        values = (1 - torch.minimum(draft, target).sum(-1)).clamp_(0, 1)
        rising = torch.heaviside(target - draft, draft.new_tensor(0.5)).mul_(draft)
        return values, (draft * rising.sum(-1, keepdim=True)).sub_(rising)


class Mixture(DraftLoss):
    """A weighted sum of losses.

    Args:
        losses: at least one.
        weights: one for each loss, at least 0, not all 0.
    """

    def __init__(self, losses: Sequence[DraftLoss], weights: Sequence[float]) -> None:
        self.losses = list(losses)
        self.weights = [require_number("weights", weight, low=0.0) for weight in weights]
        if len(losses) != len(weights) or not any(weights):
            raise ValueError(
                f"a mixture needs a weight for each loss, one of them above 0, got {len(losses)} losses and the "
                f"weights {self.weights}"
            )

    def closed_form(self, log_draft: Tensor, log_target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        values, gradients = torch.zeros_like(log_draft[:, 0]), torch.zeros_like(log_draft)
        for loss, weight in zip(self.losses, self.weights, strict=True):
            value, gradient = loss.closed_form(log_draft, log_target, labels)
            values.add_(value, alpha=weight)
            gradients.add_(gradient, alpha=weight)
        return values, gradients

    def arguments(self) -> dict[str, Any]:
        parts = [{"class": type(loss).__name__, **loss.arguments()} for loss in self.losses]
        return {"losses": parts, "weights": self.weights}


def position_weights(decay: float, num_positions: int) -> list[float]:
    """decay^i for i = 0, 1, ...: draft token i is judged only if all before it were accepted.

    Args:
        decay: in [0, 1].
    """
    decay = require_number("decay", decay, low=0.0, high=1.0)
    return [decay**i for i in range(require_int("num_positions", num_positions, 1))]
