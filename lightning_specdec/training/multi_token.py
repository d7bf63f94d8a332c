"""Training heads that predict several tokens ahead: together with their target, or on one that stays as it is.

Shapes: B rows, T tokens, H heads, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_specdec.config.checks import require_number
from lightning_specdec.data import IGNORED, Batch, TokenData
from lightning_specdec.drafters import MultiTokenDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.draft_recipes import check_window, hidden_size_of
from lightning_specdec.training.metrics import NextToken, PairMetrics, RoundMetrics, next_token_loss
from lightning_specdec.training.target_outputs import check_same_tokens, given_target

if TYPE_CHECKING:
    from jaxtyping import Float, Int

DECAY = 0.8
"""Of Medusa-1's weights (Cai et al. 2024): 0.8^k for the head that looks k tokens further than the target itself."""


def labels_ahead(labels: Int[Tensor, "B T"], distance: int) -> Int[Tensor, "B T"]:
    """The labels of a head: those of `distance` places further on, `IGNORED` where the text ends before."""
    return functional.pad(labels[:, distance:], (0, min(distance, labels.shape[1])), value=IGNORED)


def head_losses(logits: Float[Tensor, "H B T V"], labels: Int[Tensor, "B T"]) -> Float[Tensor, "H"]:
    """Each head's cross-entropy in nats; head i at place t is judged by token t + 2 + i, the target by token t + 1.

    Args:
        labels: the target's own: the next token of every place.
    """
    losses = []
    for i, head in enumerate(logits):
        ahead = labels_ahead(labels, i + 1)
        # Texts may be too short for the heads that look far: a sum over no tokens is no loss.
        losses.append(next_token_loss(head, ahead, "sum") / (ahead != IGNORED).sum().clamp(min=1))
    return torch.stack(losses)


def as_drafts(logits: Float[Tensor, "K B T V"]) -> Float[Tensor, "B T K V"]:
    """Heads' logits by where a round starts: `[:, t, i]` score token t + 1 + i of a text that ends with token t.

    The target has read such a text but for its last token, which it wrote itself, so the heads see the hidden state of
    token t - 1. There is none ahead of the first token: no round with draft tokens starts there.
    """
    return functional.pad(logits.movedim(0, 2)[:, :-1], (0, 0, 0, 0, 1, 0))


class HeadMetrics(PairMetrics):
    """The metrics of heads and their target: all heads as one draft, and each head as `head_1/loss` and so on.

    `loss` is what training minimizes; the draft's other figures are those of the first head.

    Args:
        weights: of each head's loss.
        trains_target: whether the target's own loss is minimized too.
        num_draft_tokens: draft tokens of a round.
    """

    def __init__(self, weights: Sequence[float], trains_target: bool, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens, first_round=False)
        self.weights, self.trains_target = list(weights), trains_target
        self.heads = nn.ModuleList(NextToken() for _ in weights)

    def count(self, head_logits: Float[Tensor, "H B T V"], target_logits: Float[Tensor, "B T V"], batch: Batch) -> None:
        """Count one batch."""
        labels = batch.next_tokens()
        drafts = as_drafts(head_logits[: self.greedy.num_draft_tokens])
        for rounds in (self.greedy, self.sampling):
            rounds.update(drafts, target_logits, batch)
        self.target.update(target_logits, labels)
        self.draft.update(head_logits[0], labels_ahead(labels, 1))
        for i, (head, logits) in enumerate(zip(self.heads, head_logits, strict=True)):
            head.update(logits, labels_ahead(labels, i + 1))  # type: ignore[operator]

    def compute(self) -> dict[str, Tensor]:
        rates = super().compute()
        loss = rates["target_loss"] * self.trains_target
        for i, (head, weight) in enumerate(zip(self.heads, self.weights, strict=True), start=1):
            counts = head.compute()  # type: ignore[operator]
            loss = loss + weight * counts.loss_sum / counts.num_tokens.clamp(min=1)
            rates |= {f"head_{i}/loss": counts.loss, f"head_{i}/accuracy": counts.accuracy}
        return {**rates, "loss": loss}


class MultiTokenTraining(SpeculativeTraining):
    """Trains heads that predict the tokens after the next from the target's last hidden state.

    With their target, the sum of all cross-entropies is minimized (Gloeckle et al. 2024, equation 2). On a target that
    stays as it is only the heads learn, each by the weight 0.8^k (Cai et al. 2024, "Medusa": Medusa-1).

    Args:
        target: the model whose output is wanted; None where `target_checkpoint` says it.
        num_heads: draft tokens of a round at most.
        target_checkpoint: a checkpoint whose target is taken, or the directory of a transformers model.
        freeze_target: whether the target stays as it is, to the last bit.
        head_weights: weight of each head's loss beside the target's; all 1 when None, 0.8^k on a frozen target.
        num_blocks: residual blocks of each head.
        shared_output: whether the heads end in the target's own output head.
        options: those of `SpeculativeTraining`.
    """

    drafter: MultiTokenDrafter
    first_round = False

    def __init__(
        self,
        target: LanguageModel | None = None,
        num_heads: int = 4,
        *,
        target_checkpoint: str | None = None,
        freeze_target: bool = False,
        head_weights: Sequence[float] | None = None,
        num_blocks: int = 1,
        shared_output: bool = False,
        **options: Any,
    ) -> None:
        target, self.target_tokenizer = given_target(target, target_checkpoint, freeze_target)
        drafter = MultiTokenDrafter(
            num_heads,
            hidden_size=hidden_size_of(target),
            vocab_size=target.vocab_size,
            num_blocks=num_blocks,
            shared_output=shared_output,
        )
        self.num_heads, self.freeze_target, self.target_checkpoint = num_heads, freeze_target, target_checkpoint
        weights = [DECAY**k if freeze_target else 1.0 for k in range(1, num_heads + 1)]
        if head_weights is not None:
            weights = [require_number("head_weights", weight, low=0.0) for weight in head_weights]
        if len(weights) != num_heads:
            raise ValueError(f"head_weights must be {num_heads} numbers, one for each head, got {len(weights)}")
        self.head_weights = weights
        super().__init__(target, drafter.init_from(target), **options)
        check_window(self.num_draft_tokens, num_heads)
        self.target.requires_grad_(not freeze_target)
        self.train()

    def train(self, mode: bool = True) -> MultiTokenTraining:
        super().train(mode)
        if self.freeze_target:
            self.target.eval()
        return self

    def check_data(self, data: Any) -> None:
        super().check_data(data)
        source = self.target_checkpoint
        if source is not None and not Path(source).is_dir() and isinstance(data, TokenData):
            check_same_tokens(source, self.target.vocab_size, self.target_tokenizer, data)

    def new_metrics(self) -> HeadMetrics:
        return HeadMetrics(self.head_weights, not self.freeze_target, self.num_draft_tokens)

    def score_heads(self, batch: Batch) -> tuple[Float[Tensor, "H B T V"], Float[Tensor, "B T V"]]:
        """All heads' logits and the target's, for every token of the batch but the last."""
        (layer,) = self.drafter.features(self.target)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_target):
            output = self.target(batch.tokens[:, :-1], features=(layer,))
        return self.drafter.logits(output.features[layer], self.target), output.logits

    def measure(self, metrics: RoundMetrics, batch: Batch, split: str) -> None:
        assert isinstance(metrics, HeadMetrics)
        metrics.count(*self.score_heads(batch), batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        head_logits, target_logits = self.score_heads(batch)
        losses = head_losses(head_logits, labels)
        loss = (losses * losses.new_tensor(self.head_weights)).sum()
        target_loss = next_token_loss(target_logits, labels)
        num_tokens = int((labels != IGNORED).sum())
        self.log_losses({"draft_loss": losses[0].detach(), "target_loss": target_loss.detach()}, num_tokens)
        each = {f"head_{i}/loss": value.detach() for i, value in enumerate(losses, start=1)}
        self.log_losses(each, num_tokens, prog_bar=False)
        return loss if self.freeze_target else loss + target_loss
