"""What a draft is taught by: how far its distribution is from the text, or from its target's, place by place.

Theory: a vocabulary of 49,152 tokens makes every tensor of its size dear, so each loss has a closed form for its
gradient: with z the draft's logits, q their softmax and p the target's probabilities, one pass gives the value and
d(value) / dz together, in float32, a few places at a time. Nothing of that size is kept but the gradient.

Shapes: N places, n of them at a time, W tokens that the draft can say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightning_specdec.checks import require_int, require_number
from lightning_specdec.data import IGNORED

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LOG_FLOOR = -100.0
"""What a log probability of the target counts at the least, where its size counts: at -inf nothing could be learnt."""
AT_A_TIME = 2**20
"""Numbers that are worked on at once: few enough to stay in a processor's cache."""

Outcome = tuple[Tensor, Tensor]
"""The values, `[n]`, and their gradients with respect to the logits, `[n, W]`: a tensor that nobody else holds."""


@dataclass
class Places:
    """Some places' distributions, in float32.

    Args:
        log_draft: log of the draft's probabilities, finite.
        log_target: log of the target's, -inf where there is none.
        labels: the text's own next tokens, `IGNORED` where the draft cannot say them.
    """

    log_draft: Float[Tensor, "n W"]
    log_target: Float[Tensor, "n W"]
    labels: Int[Tensor, "n"]

    @cached_property
    def draft(self) -> Float[Tensor, "n W"]:
        """The draft's probabilities."""
        return self.log_draft.exp()

    @cached_property
    def target(self) -> Float[Tensor, "n W"]:
        """The target's probabilities; their sum is less than 1 where the draft cannot say all that the target may."""
        return self.log_target.exp()

    @cached_property
    def log_ratio(self) -> Float[Tensor, "n W"]:
        """log (draft / target), the target's part at least `LOG_FLOOR`."""
        return self.log_draft - self.log_target.clamp(min=LOG_FLOOR)


class DraftLoss(ABC):
    """What a place costs, and how that changes with the draft's logits. The target is a teacher: it learns nothing."""

    @abstractmethod
    def closed_form(self, places: Places) -> Outcome:
        """Each place's loss, and its gradient with respect to the draft's logits."""

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments as plain values, for the record."""
        return {}

    def __call__(
        self,
        draft_logits: Float[Tensor, "N W"],
        target_log_probs: Float[Tensor, "N W"],
        labels: Int[Tensor, "N"],
    ) -> Float[Tensor, "N"]:
        """Each place's loss in float32: nats, or between 0 and 1 for `TotalVariation`.

        Args:
            draft_logits: of any floating type; gradients have it too.
            target_log_probs: log of the target's probabilities of these W tokens, finite or -inf; they sum to less than
                1 where the target has more tokens.
            labels: the text's own next token among the W, `IGNORED` where the draft cannot say it.
        """
        wanted = torch.is_grad_enabled() and draft_logits.requires_grad
        values: Tensor = _ClosedForm.apply(draft_logits, target_log_probs, labels, self, wanted)
        return values


class _ClosedForm(torch.autograd.Function):
    """A loss whose gradient is made on the way forward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, target_log_probs: Tensor, labels: Tensor, loss: DraftLoss, wanted: bool
    ) -> Tensor:
        values = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        gradients = torch.empty_like(logits) if wanted else None
        step = max(1, AT_A_TIME // max(1, logits.shape[1]))
        least = torch.finfo(torch.float32).min  # logits may be so far apart that their difference is none
        for first in range(0, len(logits), step):
            rows = slice(first, first + step)
            log_draft = logits[rows].float().log_softmax(-1).clamp_(min=least)
            places = Places(log_draft, target_log_probs[rows].float(), labels[rows])
            values[rows], gradient = loss.closed_form(places)
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
    """-log q of the text's own token, 0 where the draft cannot say it: to learn from the text, not from the target.

    The gradient is q less 1 at that token.
    """

    def closed_form(self, places: Places) -> Outcome:
        known = (places.labels != IGNORED).float()
        labels = places.labels.clamp(min=0)[:, None]
        gradient = places.draft * known[:, None]
        gradient.scatter_add_(1, labels, -known[:, None])
        return -places.log_draft.gather(1, labels).squeeze(1) * known, gradient


class ForwardKL(DraftLoss):
    """sum p (log p - log q) + 1 - sum p, target || draft: the draft is to cover what the target may say (mean-seeking).

    1 - sum p is what the target says beyond the W tokens: with it the divergence of what is no whole distribution is 0
    at its best, and never less. The gradient is q sum(p) - p.
    """

    def closed_form(self, places: Places) -> Outcome:
        target = places.target
        mass = target.sum(-1, keepdim=True)
        gradient = (places.draft * mass).sub_(target)
        return 1 - mass.squeeze(-1) - (target * places.log_ratio).sum(-1), gradient


class ReverseKL(DraftLoss):
    """sum q (log q - log p), draft || target: the draft is to say nothing that the target would not (mode-seeking).

    Where the target has less than e^-100 of probability (`LOG_FLOOR`), or none, it counts as having that: a token that
    the draft says for certain and the target never costs 100 nats. The gradient is q (log q - log p - value).
    """

    def closed_form(self, places: Places) -> Outcome:
        parts = places.draft * places.log_ratio
        values = parts.sum(-1)
        return values, parts.addcmul_(places.draft, values[:, None], value=-1.0)


class TotalVariation(DraftLoss):
    """1 - sum min(p, q): exactly the probability that the target rejects a guess that is drawn from the draft.

    What the draft cannot say, the target's probability beyond the W tokens, counts as rejected, as it is. The gradient
    is -q (s - sum(q s)) with s = 1 where q < p, and 0 where q > p. Where q = p the loss has a kink, and 1/2 is
    taken, the middle of what s may be there: so two equal distributions have a gradient of 0.

    Source: Leviathan et al. 2023, theorem 3.5 and corollary 3.6.
    """

    def closed_form(self, places: Places) -> Outcome:
        draft, target = places.draft, places.target
        values = (1 - torch.minimum(draft, target).sum(-1)).clamp_(0, 1)
        grown = torch.heaviside(target - draft, draft.new_tensor(0.5)).mul_(draft)
        return values, (draft * grown.sum(-1, keepdim=True)).sub_(grown)


class Mixture(DraftLoss):
    """A weighted sum of losses, from one softmax.

    Args:
        losses: at least one.
        weights: what each counts, at least 0, not all 0.
    """

    def __init__(self, losses: Sequence[DraftLoss], weights: Sequence[float]) -> None:
        if not losses or len(losses) != len(weights):
            raise ValueError(
                f"a mixture needs one loss or more and a weight for each, got {len(losses)} losses and {len(weights)} "
                "weights: give as many of both"
            )
        self.losses = list(losses)
        self.weights = [require_number("weights", weight, low=0.0) for weight in weights]
        if not any(self.weights):
            raise ValueError(f"weights must have a number above 0, got {self.weights}: with these nothing is learnt")

    def closed_form(self, places: Places) -> Outcome:
        values, gradients = torch.zeros_like(places.log_draft[:, 0]), torch.zeros_like(places.log_draft)
        for loss, weight in zip(self.losses, self.weights, strict=True):
            value, gradient = loss.closed_form(places)
            values.add_(value, alpha=weight)
            gradients.add_(gradient, alpha=weight)
        return values, gradients

    def arguments(self) -> dict[str, Any]:
        parts = [{"class": type(loss).__name__, **loss.arguments()} for loss in self.losses]
        return {"losses": parts, "weights": self.weights}


def position_weights(decay: float, num_positions: int) -> list[float]:
    """What each place of a rollout counts: decay^i for i = 0, 1, ...

    Theory: place i of a draft is judged only if all before it were kept, so with an acceptance rate of alpha it matters
    alpha^i as much as the first.

    Args:
        decay: in [0, 1]; 1 counts all places alike, 0 the first alone.
    """
    decay = require_number("decay", decay, low=0.0, high=1.0)
    return [decay**i for i in range(require_int("num_positions", num_positions, 1))]


def masked_mean(values: Float[Tensor, "*N"], mask: Bool[Tensor, "*N"]) -> Float[Tensor, ""]:
    """The mean over the places where `mask` is true, 0 where there are none. What the others hold does not matter."""
    return values.where(mask, 0).sum() / mask.sum().clamp(min=1)
