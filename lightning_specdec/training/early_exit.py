"""Training a model to be left early, so that its lower layers can draft for the whole of it.

Source: Elhoushi et al. 2024, "LayerSkip" (arXiv 2404.16710), section 4.1. Layers are counted from 0 to L - 1; exit
l + 1 is the one behind layer l. All exits learn at every step.

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
    next_token_loss,
    next_token_means,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lightning_specdec.models.huggingface import HuggingFaceLM


def step_scale(step: int, num_steps: int) -> float:
    """S(t) = exp(t ln 2 / (T - 1)) - 1: from 0 at the first step to 1 at the last."""
    return math.expm1(min(step / max(num_steps - 1, 1), 1.0) * math.log(2))


class EarlyExitTraining(SpeculativeTraining):
    """Trains a transformer so that its lower layers can draft for the whole of it, as LayerSkip does.

    Each layer's output goes through the output head and is judged by the next token; while training later layers are
    skipped at random, so that earlier ones do not rely on them. A skipped layer leaves a sample's hidden states as they
    are, unscaled; decoding skips nothing.

    Args:
        target: the model, one whose layers can be called one by one.
        exit_layer: how many layers draft, by default: the others can be chosen when decoding.
        exit_weights: the weight of each exit's loss, the model itself being the last; all alike when None.
        layer_dropout: p_max, how often the last layer is skipped at the end of the run, to which the rate grows from 0;
            0 for never.
        options: those of `SpeculativeTraining`.
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
        self.exit_layer, self.num_layers = (
            exit_layer,
            cast("HuggingFaceLM", target).stack.num_layers,
        )
        weights = [1.0] * self.num_layers if exit_weights is None else list(exit_weights)
        self.exit_weights = [require_number("exit_weights", weight, low=0.0) for weight in weights]
        if not (len(weights) == self.num_layers and weights[exit_layer - 1] and weights[-1]):
            raise ValueError(
                f"exit_weights must be {self.num_layers} numbers, one for each layer, above 0 for exit {exit_layer} "
                f"and the model itself, got {weights}"
            )
        self.layer_dropout = require_number("layer_dropout", layer_dropout, low=0.0, high=1.0)
        super().__init__(target, EarlyExitDrafter(exit_layer), **options)

    def new_metrics(self) -> RoundMetrics:
        exits = [self.exit_prefix(layer) for layer in range(1, self.num_layers)]
        return RoundMetrics(
            ["", *exits], self.num_draft_tokens, main=self.exit_prefix(self.exit_layer)
        )

    @staticmethod
    def exit_prefix(layer: int) -> str:
        """The prefix of an exit's rates, which decoding never measures."""
        return f"exit_{layer}/teacher_forced_"

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], kept: Bool[Tensor, "L B"] | None = None
    ) -> list[Float[Tensor, "B T D"]]:
        """The output of every layer.

        Args:
            kept: which layers read which rows; the others are passed on as they are. All read all when None.
        """
        target = cast("HuggingFaceLM", self.target)
        stack, (hidden, call) = target.stack, target.begin(tokens)
        states = []
        for layer in range(self.num_layers):
            if kept is None or kept[layer].all():
                hidden = stack.run(hidden, call, layer, layer + 1)
            elif kept[layer].any():
                rows = kept[layer].nonzero().squeeze(1).to(hidden.device)
                hidden = hidden.index_copy(0, rows, stack.run(hidden[rows], call, layer, layer + 1))
            states.append(hidden)
        return states

    def total(self, losses: Sequence[Tensor]) -> Tensor:
        """The weighted mean of all exits' losses, the model itself being the last."""
        weights = losses[0].new_tensor(self.exit_weights)
        return (torch.stack(list(losses)) * weights).sum() / weights.sum()

    def measure(self, batch: Batch, split: str) -> Means:
        labels = batch.next_tokens()
        logits = [
            self.target.exit_logits(hidden) for hidden in self.hidden_states(batch.tokens[:, :-1])
        ]
        values = next_token_means("target", logits[-1], labels)
        values |= next_token_means("draft", logits[self.exit_layer - 1], labels)
        losses = [next_token_loss(each, labels) for each in logits]
        num_tokens = values["target_loss"][1]
        for layer, each in enumerate(logits[:-1], start=1):
            self.metrics.count(each, logits[-1], batch, self.exit_prefix(layer))
            values[f"exit_{layer}/loss"] = losses[layer - 1], num_tokens
        return {**values, "loss": (self.total(losses), num_tokens)}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        states = self.hidden_states(batch.tokens[:, :-1], self.draw_layers(len(labels), batch_idx))
        losses = [
            next_token_loss(self.target.exit_logits(hidden), labels)
            if weight
            else hidden.new_zeros(())
            for hidden, weight in zip(states, self.exit_weights, strict=True)
        ]
        num_tokens = int((labels != IGNORED).sum())
        shown = {"draft_loss": losses[self.exit_layer - 1], "target_loss": losses[-1]}
        self.log_losses({name: loss.detach() for name, loss in shown.items()}, num_tokens)
        each = {
            f"exit_{layer}/loss": loss.detach() for layer, loss in enumerate(losses[:-1], start=1)
        }
        self.log_losses(each, num_tokens, prog_bar=False)
        return self.total(losses)

    def draw_layers(self, num_rows: int, batch_idx: int) -> Bool[Tensor, "L B"] | None:
        """Which layers read which rows of a batch; None where nothing is ever skipped.

        The numbers depend on the step alone, so that a resumed run draws what the whole one would have.

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
        # Each sample skips layer l with p_l = S(t) D(l) p_max, where D(l) is S over the layers.
        highest = step_scale(self.global_step, int(num_steps)) * self.layer_dropout
        rates = torch.tensor(
            [highest * step_scale(layer, self.num_layers) for layer in range(self.num_layers)]
        )
        key = (self.global_step * 1_009 + batch_idx) * self.trainer.world_size
        generator = torch.Generator().manual_seed((key + self.global_rank) % 2**32)
        return torch.rand(self.num_layers, num_rows, generator=generator) >= rates[:, None]
