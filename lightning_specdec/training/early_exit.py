"""Training a model to be left early, so that its lower layers can draft for the whole of it.

Source: Elhoushi et al. 2024, "LayerSkip" (arXiv 2404.16710), section 4.1. Layers are counted from 0 to L - 1 there and
here; exit l + 1 is the one behind layer l. What the paper leaves open is as in its authors' code (torchtune): exit L,
which is the whole model, learns at every step.

Shapes: B rows, T tokens, D hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.data.base import plain_arguments
from lightning_specdec.drafters import EarlyExitDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.metrics import NextToken, PairMetrics, RoundMetrics, Speculation, next_token_loss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lightning_specdec.models.huggingface import HuggingFaceLM


def step_scale(step: int, num_steps: int) -> float:
    """S(t) = exp(t ln 2 / (T - 1)) - 1: from 0 at the first step to 1 at the last, for training from scratch."""
    return math.expm1(min(step / max(num_steps - 1, 1), 1.0) * math.log(2))


def dropout_rates(num_layers: int, max_rate: float, scale: float = 1.0) -> list[float]:
    """p_l = S(t) D(l) p_max: how likely a layer is skipped for one sample, where D(l) is S over the layers."""
    return [scale * step_scale(layer, num_layers) * max_rate for layer in range(num_layers)]


def draw_kept(rates: Sequence[float], num_samples: int, generator: torch.Generator) -> Bool[Tensor, "L B"]:
    """Which layers read which samples: each sample is skipped by itself, with the layer's rate."""
    return torch.rand(len(rates), num_samples, generator=generator) >= torch.tensor(rates)[:, None]


def layer_weights(num_layers: int, exit_scale: float) -> list[float]:
    """e(l), the weight of the exit behind layer l, before the curriculum and not normalized.

    e(l) = e_scale (0 + 1 + ... + l) for l < L - 1, and e(L - 1) = L - 1 + e_scale (0 + 1 + ... + (L - 2)). The first
    exit has the weight 0: it can only learn from what the second one asks of the first layer.

    Args:
        exit_scale: e_scale, the weight of the early exits beside the whole model.
    """
    sums = [layer * (layer + 1) / 2 for layer in range(num_layers)]
    return [exit_scale * each for each in sums[:-1]] + [num_layers - 1 + exit_scale * sums[-2]]


def normalized(weights: Sequence[float], enabled: Sequence[bool]) -> list[float]:
    """C(t, l) e(l) / sum over i of C(t, i) e(i): the weights of a step's exits, which add up to 1."""
    chosen = [weight * on for weight, on in zip(weights, enabled, strict=True)]
    return [weight / sum(chosen) for weight in chosen]


class ExitCurriculum(ABC):
    """Which exits learn at a step: C(t, l) of the paper. Every exit costs an output head over all tokens."""

    @abstractmethod
    def enabled(self, step: int, num_steps: int, num_layers: int) -> list[bool]:
        """For each layer whether the exit behind it learns; that of the last one always does.

        Args:
            step: t, counted from 0.
            num_steps: T, of the whole run.
        """


class EveryExit(ExitCurriculum):
    """All exits learn at every step."""

    def enabled(self, step: int, num_steps: int, num_layers: int) -> list[bool]:
        return [True] * num_layers


class RotatingExits(ExitCurriculum):
    """C_rot,R: every R-th exit learns, one layer further at each step, so that each has its turn every R steps.

    Args:
        period: R.
    """

    def __init__(self, period: int) -> None:
        self.period = require_int("period", period, 1)

    def enabled(self, step: int, num_steps: int, num_layers: int) -> list[bool]:
        return [layer == num_layers - 1 or (layer - step) % self.period == 0 for layer in range(num_layers)]


class GradualExits(ExitCurriculum):
    """C_grad: from the last layer down to the first, one more exit every T / (2 L) steps; all of them by half time."""

    def enabled(self, step: int, num_steps: int, num_layers: int) -> list[bool]:
        return [2 * num_layers * step >= (num_layers - 1 - layer) * num_steps for layer in range(num_layers)]


class ExitMetrics(PairMetrics):
    """The metrics of a model, the target, and of its chosen exit, the draft; those of every exit as `exit_1/...`.

    `loss` is the sum that training minimizes with all exits enabled.

    Args:
        weights: of the losses of all exits, the model itself being the last; they add up to 1.
        exit_layer: the exit that was chosen.
        num_draft_tokens: draft tokens of a round.
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
            rates[f"exit_{i + 1}/loss"] = counts.loss
            rates[f"exit_{i + 1}/accuracy"] = counts.accuracy
            rates[f"exit_{i + 1}/teacher_forced_acceptance_rate"] = kept.acceptance_rate
            rates[f"exit_{i + 1}/teacher_forced_block_efficiency"] = kept.block_efficiency
        return {**rates, "loss": loss}


class EarlyExitTraining(SpeculativeTraining):
    """Trains a transformer so that its lower layers can draft for the whole of it, as LayerSkip does.

    Each layer's output goes through the output head and is judged by the next token; while training later layers are
    skipped at random, so that earlier ones do not rely on them. A skipped layer leaves a sample's hidden states as they
    are, unscaled; decoding skips nothing.

    Args:
        target: the model, one whose layers can be called one by one.
        exit_layer: how many layers draft, by default: the others can be chosen when decoding.
        head_layers: the exits that get an output head of their own; the others share the model's final norm and head.
        exit_scale: e_scale, the weight of the early exits beside the model itself.
        exit_weights: the weight of each exit instead, the model itself being the last.
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
        drafting = (exit_layer, *head_layers)
        for layer in drafting:
            target.check_exit(layer)
        self.num_layers = cast("HuggingFaceLM", target).stack.num_layers
        self.exit_layer, self.head_layers = exit_layer, list(head_layers)
        scale = require_number("exit_scale", exit_scale, low=0.0)
        weights = layer_weights(self.num_layers, scale) if exit_weights is None else list(exit_weights)
        self.exit_weights = [require_number("exit_weights", weight, low=0.0) for weight in weights]
        if len(weights) != self.num_layers:
            raise ValueError(f"exit_weights must be {self.num_layers} numbers, one for each layer, got {len(weights)}")
        for layer in (self.num_layers, *drafting):
            if not weights[layer - 1]:
                raise ValueError(
                    f"exit {layer} is to draft, or is the model itself, and its loss has the weight 0: give "
                    "exit_weights that are above 0 there (by the paper's formula the first exit has 0)"
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
        own = {"curriculum": type(self.curriculum).__name__, **plain_arguments(self.curriculum)}
        return {**super().settings(), **own}

    def new_metrics(self) -> ExitMetrics:
        weights = normalized(self.exit_weights, [True] * self.num_layers)
        return ExitMetrics(weights, self.exit_layer, self.num_draft_tokens)

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
        """Logits of the output head behind that many layers; behind all of them, the model's own."""
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
        enabled = self.curriculum.enabled(self.global_step, self.num_steps, self.num_layers)
        weights = normalized(self.exit_weights, enabled)
        states = self.hidden_states(batch.tokens[:, :-1], self.draw_layers(len(labels), batch_idx))
        losses = {
            exit_layer: next_token_loss(self.exit_logits(hidden, exit_layer), labels)
            for exit_layer, (hidden, weight) in enumerate(zip(states, weights, strict=True), start=1)
            if weight
        }
        num_tokens = int((labels != IGNORED).sum())
        named = {"draft_loss": self.exit_layer, "target_loss": self.num_layers}
        shown = {name: losses[layer].detach() for name, layer in named.items() if layer in losses}
        self.log_losses(shown, num_tokens)
        each = {f"exit_{layer}/loss": loss.detach() for layer, loss in losses.items() if layer < self.num_layers}
        self.log_losses(each, num_tokens, prog_bar=False)
        return torch.stack([weights[layer - 1] * loss for layer, loss in losses.items()]).sum()

    def draw_layers(self, num_rows: int, batch_idx: int) -> Bool[Tensor, "L B"] | None:
        """Which layers read which rows of a batch; None where nothing is ever skipped.

        The numbers depend on the step alone, so that a resumed run draws what the whole one would have.
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
            raise ValueError("LayerSkip depends on the length of the run: give it a max_epochs or max_steps")
        return int(steps)
