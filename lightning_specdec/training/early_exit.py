"""Training a model to be left early: all of its layers learn to say the next token, so that the lower ones can draft.

Shapes: B rows, T tokens, D hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_specdec.checks import require_int, require_number
from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.drafters import EarlyExitDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.exit_losses import (
    EveryExit,
    ExitCurriculum,
    checked_weights,
    draw_kept,
    dropout_rates,
    layer_weights,
    normalized,
    step_scale,
)
from lightning_specdec.training.metrics import NextToken, PairMetrics, RoundMetrics, Speculation, next_token_loss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lightning_specdec.models.huggingface import HuggingFaceLM


class ExitMetrics(PairMetrics):
    """The metrics of a model and of all its exits: which one is worth drafting with stands side by side.

    `exit_1/...` is of what the first layer alone says, and so on; the model itself is the target. What an exit keeps
    is read off known texts, and the names say so. The draft's figures are those of the exit that was chosen. `loss` is
    the sum that training minimizes with all exits enabled.

    Args:
        weights: of the losses of all exits, the model itself being the last; they add up to 1.
        exit_layer: the exit that was chosen.
        num_draft_tokens: guesses of a round.
    """

    def __init__(self, weights: Sequence[float], exit_layer: int, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        self.weights, self.exit_layer = list(weights), exit_layer
        num_exits = len(weights) - 1
        self.exits = nn.ModuleList(NextToken() for _ in range(num_exits))
        self.rounds = nn.ModuleList(Speculation(num_draft_tokens, Sampling()) for _ in range(num_exits))

    def count(self, exit_logits: Sequence[Float[Tensor, "B T V"]], batch: Batch) -> None:
        """Count one batch.

        Args:
            exit_logits: of every exit, the model itself being the last.
        """
        *early, full = exit_logits
        self.update(early[self.exit_layer - 1], full, batch)
        for tokens, rounds, logits in zip(self.exits, self.rounds, early, strict=True):
            tokens.update(logits, batch.next_tokens())  # type: ignore[operator]
            rounds.update(logits, full, batch)  # type: ignore[operator]

    def compute(self) -> dict[str, Tensor]:
        rates = super().compute()
        loss = self.weights[-1] * rates["target_loss"]
        for i, (tokens, rounds) in enumerate(zip(self.exits, self.rounds, strict=True)):
            counts, kept = tokens.compute(), rounds.compute()  # type: ignore[operator]
            loss = loss + self.weights[i] * counts.loss
            own = {
                "loss": counts.loss,
                "accuracy": counts.accuracy,
                "bits_per_token": counts.loss / math.log(2),
                "teacher_forced_acceptance_rate": kept.acceptance_rate,
                "teacher_forced_block_efficiency": kept.block_efficiency,
            }
            rates |= {f"exit_{i + 1}/{name}": value for name, value in own.items()}
        return {**rates, "loss": loss, "target_bits_per_token": rates["target_loss"] / math.log(2)}


class EarlyExitTraining(SpeculativeTraining):
    """Trains a transformer so that its lower layers can draft for the whole of it, as LayerSkip does.

    Theory: two things make lower layers say what the last one will. Each layer's output is put through the output head
    and judged by the next token, later layers counting more; and in training later layers are skipped at random, so
    that the earlier ones do not rely on them (Elhoushi et al. 2024, "LayerSkip", arXiv 2404.16710, section 4.1; its
    formulas are in exit_losses.py). A layer that is skipped for a sample leaves that sample's hidden states as they
    are; what is not skipped is not scaled, and when decoding nothing is skipped.

    Args:
        target: the model, one whose layers can be called one by one.
        exit_layer: how many layers draft, by default: the others can be chosen when decoding.
        head_layers: the exits that get an output head of their own; the others share the model's final norm and head.
        exit_scale: e_scale, how much the early exits count beside the model itself.
        exit_weights: what each exit counts instead, the model itself being the last: for other rules than the paper's.
        curriculum: which exits learn at a step; `EveryExit` when None.
        layer_dropout: p_max, how often the last layer is skipped; 0 for never.
        growing_dropout: whether it grows over the run from 0 to that, for training from scratch.
        seed: of what is skipped.
        options: those of `SpeculativeTraining`.
    """

    drafter: EarlyExitDrafter

    def __init__(
        self,
        target: LanguageModel,
        exit_layer: int,
        *,
        head_layers: Sequence[int] = (),
        exit_scale: float = 1.0,
        exit_weights: Sequence[float] | None = None,
        curriculum: ExitCurriculum | None = None,
        layer_dropout: float = 0.1,
        growing_dropout: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        for layer in (exit_layer, *head_layers):
            target.check_exit(layer)
        stack = cast("HuggingFaceLM", target).stack
        self.num_layers = stack.num_layers
        self.exit_scale = require_number("exit_scale", exit_scale, low=0.0)
        self.exit_weights = (
            layer_weights(self.num_layers, self.exit_scale)
            if exit_weights is None
            else checked_weights(exit_weights, self.num_layers)
        )
        for layer in (exit_layer, *head_layers):
            if not self.exit_weights[layer - 1]:
                raise ValueError(
                    f"exit {layer} is to draft and its loss counts nothing: give exit_weights that are above 0 there "
                    "(by the paper's the first exit never learns, and none does where exit_scale is 0)"
                )
        self.curriculum = curriculum or EveryExit()
        self.layer_dropout = require_number("layer_dropout", layer_dropout, low=0.0, high=1.0)
        self.growing_dropout = growing_dropout
        self.seed = require_int("seed", seed, 0, 2**32 - 1)
        drafter = EarlyExitDrafter(
            exit_layer, head_layers=head_layers, hidden_size=target.hidden_size, vocab_size=target.vocab_size
        )
        super().__init__(target, drafter, **options)

    def settings(self) -> dict[str, Any]:
        own = {
            "exit_layer": self.drafter.exit_layer,
            "head_layers": [int(layer) for layer in self.drafter.heads],
            "exit_weights": self.exit_weights,
            "curriculum": type(self.curriculum).__name__,
            **self.curriculum.arguments(),
            "layer_dropout": self.layer_dropout,
            "growing_dropout": self.growing_dropout,
        }
        return {**super().settings(), **own}

    def new_metrics(self) -> ExitMetrics:
        weights = normalized(self.exit_weights, [True] * self.num_layers)
        return ExitMetrics(weights, self.drafter.exit_layer, self.num_draft_tokens)

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

    def exit_logits(self, hidden: Float[Tensor, "B T D"], exit_layer: int) -> Float[Tensor, "B T V"]:
        """What the output head behind that many layers says; behind all of them, the model's own."""
        head = self.drafter.head_of(exit_layer)
        return self.target.exit_logits(hidden) if head is None else head(hidden)

    def all_logits(self, batch: Batch) -> list[Float[Tensor, "B T V"]]:
        """The logits of every exit, the model itself being the last, for every token of the batch but the first."""
        states = self.hidden_states(batch.tokens[:, :-1])
        return [self.exit_logits(hidden, exit_layer) for exit_layer, hidden in enumerate(states, start=1)]

    def measure(self, metrics: RoundMetrics, batch: Batch, split: str) -> None:
        assert isinstance(metrics, ExitMetrics)
        metrics.count(self.all_logits(batch), batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.next_tokens()
        weights = normalized(
            self.exit_weights, self.curriculum.enabled(self.global_step, self.num_steps, self.num_layers)
        )
        states = self.hidden_states(batch.tokens[:, :-1], self.draw_layers(len(labels), batch_idx))
        losses = {
            exit_layer: next_token_loss(self.exit_logits(hidden, exit_layer), labels)
            for exit_layer, (hidden, weight) in enumerate(zip(states, weights, strict=True), start=1)
            if weight
        }
        num_tokens = int((labels != IGNORED).sum())
        named = {"draft_loss": self.drafter.exit_layer, "target_loss": self.num_layers}
        shown = {name: losses[layer].detach() for name, layer in named.items() if layer in losses}
        self.log_losses(shown, num_tokens)
        each = {f"exit_{layer}/loss": loss.detach() for layer, loss in losses.items() if layer < self.num_layers}
        self.log_losses(each, num_tokens, prog_bar=False)
        return torch.stack([weights[layer - 1] * loss for layer, loss in losses.items()]).sum()

    def draw_layers(self, num_rows: int, batch_idx: int) -> Bool[Tensor, "L B"] | None:
        """Which layers read which rows of a batch; None where nothing is ever skipped.

        The numbers depend on the step and not on those before it, so a resumed run draws what the whole one would have.
        """
        if not self.layer_dropout:
            return None
        scale = step_scale(self.global_step, self.num_steps) if self.growing_dropout else 1.0
        key = ((self.seed * 1_000_003 + self.global_step) * 1_009 + batch_idx) * self.trainer.world_size
        generator = torch.Generator().manual_seed((key + self.global_rank) % 2**32)
        return draw_kept(dropout_rates(self.num_layers, self.layer_dropout, scale), num_rows, generator)

    @property
    def num_steps(self) -> int:
        """T, steps of the whole run.

        Raises:
            ValueError: the run has no end.
        """
        steps = self.trainer.estimated_stepping_batches
        if math.isinf(steps):
            raise ValueError("what LayerSkip does depends on how far the run is: give it a max_epochs or max_steps")
        return int(steps)
