"""Training a model for early exits, so that its lower layers can draft for the whole model.

Source: Elhoushi et al. 2024, "LayerSkip" (arXiv 2404.16710), section 4.1. Layers are numbered from
0 to L - 1; exit l + 1 is after layer l, so exit L is the model itself. All exits are trained at
every step.

Shapes: B rows, T tokens, D hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lightning_specdec.config.checks import require_number
from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.drafters import EarlyExitDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.metrics import (
    Means,
    RoundMetrics,
    count_labels,
    next_token_loss,
    next_token_means,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lightning_specdec.models.huggingface import HuggingFaceLM


def step_scale(step: int, num_steps: int) -> float:
    """S(t) = exp(t ln 2 / (T - 1)) - 1: rises from 0 at the first of T steps to 1 at the last."""
    progress = min(step / max(num_steps - 1, 1), 1.0)
    return math.expm1(progress * math.log(2))


class EarlyExitTraining(SpeculativeTraining):
    """Trains a transformer whose lower layers can draft for the whole model (LayerSkip).

    Each layer's output goes through the output head and is trained to predict the next token.
    During training, layers are skipped at random, later ones more often, so that earlier layers do
    not rely on them. A skipped layer leaves a row's hidden states unchanged and unscaled. Decoding
    skips nothing.

    Args:
        target: a model whose layers can be called one by one.
        exit_layer: number of layers that draft by default. Decoding can choose another number.
        exit_weights: the weight of each exit's loss, from exit 1 to exit L, the model itself; equal
            when None.
        layer_dropout: p_max, the probability to skip the last layer at the end of the run. Rates
            grow from 0; with 0 nothing is skipped.
        options: see `SpeculativeTraining`.
    """

    drafter: EarlyExitDrafter

    def __init__(
        self,
        target: LanguageModel,
        exit_layer: int,
        *,
        exit_weights: Sequence[float] | None = None,
        layer_dropout: float = 0.1,
        **options: Any,
    ) -> None:
        target.check_exit(exit_layer)
        self.exit_layer = exit_layer
        self.num_layers = cast("HuggingFaceLM", target).stack.num_layers

        weights = [1.0] * self.num_layers
        if exit_weights is not None:
            weights = list(exit_weights)
        self.exit_weights = [require_number("exit_weights", weight, low=0.0) for weight in weights]
        has_right_length = len(weights) == self.num_layers
        if not (has_right_length and weights[exit_layer - 1] and weights[-1]):
            raise ValueError(
                f"exit_weights must be {self.num_layers} numbers, one for each layer, above 0 for "
                f"exit {exit_layer} and the model itself, got {weights}"
            )
        self.layer_dropout = require_number("layer_dropout", layer_dropout, low=0.0, high=1.0)
        super().__init__(target, EarlyExitDrafter(exit_layer), **options)

    def new_metrics(self) -> RoundMetrics:
        """See `SpeculativeTraining`; rounds are counted for every exit but the model itself."""
        prefixes = [self.exit_prefix(layer) for layer in range(1, self.num_layers)]
        main_prefix = self.exit_prefix(self.exit_layer)
        return RoundMetrics(["", *prefixes], self.num_draft_tokens, main=main_prefix)

    @staticmethod
    def exit_prefix(layer: int) -> str:
        """The prefix of an exit's rates, which no callback measures by decoding."""
        return f"exit_{layer}/teacher_forced_"

    def hidden_states(
        self,
        tokens: Int[Tensor, "B T"],
        is_run: Bool[Tensor, "L B"] | None = None,
    ) -> list[Float[Tensor, "B T D"]]:
        """The output of every layer.

        Args:
            is_run: whether each layer runs on each row; the other rows skip it. All layers run when
                None.
        """
        target = cast("HuggingFaceLM", self.target)
        stack = target.stack
        hidden, call_arguments = target.begin(tokens)
        states = []
        for layer in range(self.num_layers):
            if is_run is None or is_run[layer].all():
                hidden = stack.run(hidden, call_arguments, layer, layer + 1)
            elif is_run[layer].any():
                # The hidden states of the other rows pass this layer unchanged.
                rows = is_run[layer].nonzero().squeeze(1).to(hidden.device)
                row_states = stack.run(hidden[rows], call_arguments, layer, layer + 1)
                hidden = hidden.index_copy(0, rows, row_states)
            states.append(hidden)
        return states

    def total(self, losses: Sequence[Tensor]) -> Tensor:
        """The weighted mean of all exits' losses, from exit 1 to the model itself."""
        weights = losses[0].new_tensor(self.exit_weights)
        weighted_losses = torch.stack(list(losses)) * weights
        return weighted_losses.sum() / weights.sum()

    def measure(self, batch: Batch, split: str) -> Means:
        """See `SpeculativeTraining`; also the loss of every exit."""
        labels = batch.next_tokens()
        states = self.hidden_states(batch.tokens[:, :-1])
        all_logits = [self.target.exit_logits(hidden) for hidden in states]
        losses = [next_token_loss(logits, labels) for logits in all_logits]
        *exit_logits, target_logits = all_logits

        means = next_token_means("target", target_logits, labels)
        draft_logits = all_logits[self.exit_layer - 1]
        means.update(next_token_means("draft", draft_logits, labels))
        _, num_tokens = means["target_loss"]

        for layer, logits in enumerate(exit_logits, start=1):
            self.metrics.count(logits, target_logits, batch, self.exit_prefix(layer))
            means[f"exit_{layer}/loss"] = (losses[layer - 1], num_tokens)
        means["loss"] = (self.total(losses), num_tokens)
        return means

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        is_run = self.draw_layers(len(labels), batch_idx)
        states = self.hidden_states(batch.tokens[:, :-1], is_run)

        losses = []
        for hidden, weight in zip(states, self.exit_weights, strict=True):
            if weight:
                logits = self.target.exit_logits(hidden)
                losses.append(next_token_loss(logits, labels))
            else:
                # An output head over the whole vocabulary is expensive.
                losses.append(hidden.new_zeros(()))

        num_tokens = int((labels != IGNORED).sum())
        main_losses = {
            "draft_loss": losses[self.exit_layer - 1].detach(),
            "target_loss": losses[-1].detach(),
        }
        exit_losses = {}
        for layer, loss in enumerate(losses[:-1], start=1):
            exit_losses[f"exit_{layer}/loss"] = loss.detach()
        self.log_losses(main_losses, num_tokens)
        self.log_losses(exit_losses, num_tokens, prog_bar=False)
        # The mean over this batch's tokens counts by its share of the whole optimizer step.
        share = num_tokens / self.mean_count(num_tokens, count_labels)
        return self.total(losses) * share

    def draw_layers(self, num_rows: int, batch_idx: int) -> Bool[Tensor, "L B"] | None:
        """Draw which layers run on which rows of a batch; None if no layer is ever skipped.

        The draws depend on the step only, so a resumed run draws the same as an uninterrupted one.

        Raises:
            ValueError: the run has no end.
        """
        if not self.layer_dropout:
            return None
        num_steps = self.trainer.estimated_stepping_batches
        if math.isinf(num_steps):
            raise ValueError(
                "LayerSkip depends on the length of the run: give it a max_epochs or max_steps"
            )

        # Each row skips layer l with probability S(t) D(l) p_max, where D(l) is S over the layers.
        max_rate = step_scale(self.global_step, int(num_steps)) * self.layer_dropout
        layer_scales = [step_scale(layer, self.num_layers) for layer in range(self.num_layers)]
        skip_rates = torch.tensor([max_rate * scale for scale in layer_scales])

        # A seed for each batch of accumulated gradients, and for each process.
        batch_key = (self.global_step * 1_009 + batch_idx) * self.trainer.world_size
        seed = (batch_key + self.global_rank) % 2**32
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(self.num_layers, num_rows, generator=generator)
        return noise >= skip_rates[:, None]
