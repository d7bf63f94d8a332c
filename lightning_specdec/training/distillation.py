"""Training a draft for a target that stays as it is, from the target's own distributions.

Shapes: B rows, T tokens, M places, N chosen ones, D width of what the output head reads, V tokens of the target,
W of the draft.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.checkpoint import KEY
from lightning_specdec.checks import require_int, require_number
from lightning_specdec.data import IGNORED, Batch, TokenData
from lightning_specdec.data.base import SPLITS
from lightning_specdec.drafters import Drafter, DraftVocabulary
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.distillation_metrics import DistillationMetrics
from lightning_specdec.training.draft_losses import DraftLoss, ForwardKL, masked_mean, position_weights
from lightning_specdec.training.given_target import check_same_tokens
from lightning_specdec.training.guessed import Guessed, token_counts
from lightning_specdec.training.metrics import RoundMetrics
from lightning_specdec.training.muon import MuonAdamW
from lightning_specdec.training.schedule import Effort, warmup_cosine
from lightning_specdec.training.target_reading import OnTheFly, Reading, TargetFeatures

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

OPTIMIZERS = ("adamw", "muon")
BETAS = (0.9, 0.95)
_AT_ONCE = 2**25
"""Numbers of logits that are measured at once."""


class DistillationTraining(SpeculativeTraining):
    """Trains a draft to say what a frozen target would say.

    Theory: a guess is kept with probability sum over the vocabulary of min(draft, target) (Leviathan et al. 2023), so
    the draft needs the target's distribution, of which the text shows one draw. The text is best the target's own
    (`lightning_specdec generate`), since that is what will be drafted. The i-th guess of a round is made where those
    before it were kept, so it counts by `position_decay ** i`.

    Args:
        target: the model whose output is wanted; it stays as it is, to the last bit.
        drafter: what is trained.
        source: where the target came from, for messages; None where it was handed in.
        tokenizer: of the target, as a checkpoint names it.
        loss: how far a guess is from what the target would say; `ForwardKL` when None.
        position_decay: how much less each guess of a round counts than the one before it.
        target_features: what the target made of the texts; `OnTheFly` when None.
        learn_from_prompts: whether prompts are learned from too, which the target has not written.
        warmup_steps: of the optimizer, while the learning rate rises.
        final_learning_rate: what the learning rate falls to by a cosine, as a share of it.
        max_gradient_norm: longer gradients are shortened to this.
        optimizer: "adamw", or "muon" for the matrices of hidden layers (see `MuonAdamW`).
        options: those of `SpeculativeTraining`.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        *,
        source: str | None = None,
        tokenizer: str | None = None,
        loss: DraftLoss | None = None,
        position_decay: float = 0.8,
        target_features: TargetFeatures | None = None,
        learn_from_prompts: bool = False,
        warmup_steps: int = 100,
        final_learning_rate: float = 0.05,
        max_gradient_norm: float = 1.0,
        optimizer: str = "adamw",
        **options: Any,
    ) -> None:
        self.source, self.target_tokenizer = source, tokenizer
        self.loss = ForwardKL() if loss is None else loss
        self.position_decay = require_number("position_decay", position_decay, low=0.0, high=1.0, low_open=True)
        self.target_features = OnTheFly() if target_features is None else target_features
        self.learn_from_prompts = learn_from_prompts
        self.warmup_steps = require_int("warmup_steps", warmup_steps, 0)
        self.final_learning_rate = require_number("final_learning_rate", final_learning_rate, low=0.0, high=1.0)
        self.max_gradient_norm = require_number("max_gradient_norm", max_gradient_norm, low=0.0, low_open=True)
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be {' or '.join(OPTIMIZERS)}, got {optimizer!r}")
        self.optimizer = optimizer
        self.effort = Effort()
        self._begun = False
        super().__init__(target, drafter, **options)
        self.target.requires_grad_(False)
        self.train()

    @abstractmethod
    def layers(self) -> Sequence[int]:
        """The target's layers whose hidden states are read."""

    @abstractmethod
    def guesses(self, batch: Batch, reading: Reading) -> list[Guessed]:
        """Of each guess of a round, in their order, what it is made of; a single one where all are made alike."""

    @abstractmethod
    def guess_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        """What the draft's output head, that of this guess, makes of hidden states."""

    def begin_from_target(self) -> None:  # noqa: B027
        """Give the draft's weights their first values, once its vocabulary is known. As they are by default."""

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The tokens that the draft can say; all when None."""
        return None

    @property
    def num_losses(self) -> int:
        """Guesses that are learned from, each with a loss of its own."""
        return self.num_draft_tokens

    @property
    def position_weights(self) -> list[float]:
        """What each guess's loss counts."""
        return position_weights(self.position_decay, self.num_losses)

    def loss_weights(self, num_guesses: int) -> list[float]:
        """What each guess of a step counts in its loss."""
        weights = position_weights(self.position_decay, num_guesses)
        return [weight / sum(weights) for weight in weights]

    def train(self, mode: bool = True) -> DistillationTraining:
        super().train(mode)
        self.target.eval()
        return self

    def settings(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("position_decay", "learn_from_prompts", "warmup_steps")}
        plain |= {name: getattr(self, name) for name in ("final_learning_rate", "max_gradient_norm", "optimizer")}
        plain |= {"target_checkpoint": self.source, "loss": _named(self.loss)}
        return {**super().settings(), **plain}

    def new_metrics(self) -> DistillationMetrics:
        return DistillationMetrics(self.position_weights, self.num_draft_tokens, first_round=self.first_round)

    def check_data(self, data: TokenData) -> None:
        """See `SpeculativeTraining.check_data`; the draft's vocabulary is chosen by these data, once."""
        super().check_data(data)
        name = None if self.target.tokenizer is None else self.target.tokenizer.name
        check_same_tokens(self.source or "the target", self.target.vocab_size, self.target_tokenizer or name, data)
        if self._begun:
            return
        if (own := self.draft_vocabulary) is not None:
            own.choose(token_counts(data, self.target.vocab_size), self._endings())
        self.begin_from_target()
        self._begun = True

    def _endings(self) -> frozenset[int]:
        """The tokens that end a text."""
        eos = () if self.target.tokenizer is None else self.target.tokenizer.eos
        return frozenset(token for token in eos if token < self.target.vocab_size)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        splits = {"fit": SPLITS[:2], "validate": SPLITS[1:2], "test": SPLITS[2:]}.get(stage, ())
        self.target.to(self.trainer.strategy.root_device)  # where the Trainer moves it next: a GPU makes features there
        self.target_features.prepare(self.target, self._data(), self.layers(), splits)

    def read(self, batch: Batch, split: str) -> Reading:
        """What the target makes of a batch."""
        own = self.draft_vocabulary
        tokens = None if own is None else own.tokens
        return self.target_features.read(self.target, batch, split, layers=self.layers(), tokens=tokens)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        reading = self.read(batch, "train")
        losses, num_places = [], 0
        for number, guess in enumerate(self.guesses(batch, reading)):
            chosen = guess.learned(batch, prompts=self.learn_from_prompts)
            values = self._losses(number, guess, chosen, batch, reading)
            losses.append(masked_mean(values, torch.ones_like(values, dtype=torch.bool)))
            num_places += len(values)
        weights = self.loss_weights(len(losses))
        loss = torch.stack([weight * each for weight, each in zip(weights, losses, strict=True)]).sum()
        self.log_losses({"loss": loss.detach()}, num_places)
        self.effort.num_tokens += int(batch.lengths.sum()) * self.trainer.world_size
        if len(losses) > 1:
            each = {f"position_{i}/loss": value.detach() for i, value in enumerate(losses, start=1)}
            self.log_losses(each, num_places, prog_bar=False)
        return loss

    def _losses(
        self, number: int, guess: Guessed, chosen: Bool[Tensor, "B M"], batch: Batch, reading: Reading
    ) -> Float[Tensor, "N"]:
        """The loss of each chosen place."""
        own, said = self.draft_vocabulary, reading.log_probs[:, guess.before()][chosen]
        labels = batch.tokens[:, guess.first : guess.first + guess.num_places][chosen]
        logits = self.guess_logits(number, guess.hidden[chosen])
        return self.loss(logits, said, labels if own is None else own.to_draft(labels, IGNORED))

    def measure(self, metrics: RoundMetrics, batch: Batch, split: str) -> None:
        assert isinstance(metrics, DistillationMetrics)
        reading = self.read(batch, split)
        greedy: list[Tensor] = []
        sampling: list[Tensor] = []
        for number, guess in enumerate(self.guesses(batch, reading)):
            chosen = guess.learned(batch, prompts=False)  # no prompt is ever drafted
            metrics.count_loss(number, self._losses(number, guess, chosen, batch, reading))
            agreed, overlaps = self._chances(number, guess, chosen, reading)
            for chances, values in ((greedy, agreed), (sampling, overlaps)):
                of_tokens = values.new_zeros(batch.tokens.shape)
                of_tokens[:, guess.first : guess.first + guess.num_places][chosen] = values
                chances.append(of_tokens)
        metrics.count_rounds(greedy[: self.num_draft_tokens], sampling[: self.num_draft_tokens], batch)

    def _chances(
        self, number: int, guess: Guessed, chosen: Bool[Tensor, "B M"], reading: Reading
    ) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
        """How likely a guess is kept at each chosen place: at temperature 0, and at temperature 1."""
        own, before = self.draft_vocabulary, guess.before()
        said, choices = reading.log_probs[:, before][chosen], reading.choices[:, before]
        agreed, overlaps = [], []
        size = max(1, _AT_ONCE // said.shape[-1])
        pieces = zip(guess.hidden[chosen].split(size), said.split(size), choices[chosen].split(size), strict=True)
        for hidden, log_target, choice in pieces:
            log_draft = self.guess_logits(number, hidden).float().log_softmax(-1)
            guessed = log_draft.argmax(-1)
            agreed.append((guessed if own is None else own.tokens[guessed]) == choice)
            overlaps.append(torch.minimum(log_draft, log_target).exp().sum(-1).clamp(max=1.0))
        return torch.cat(agreed).float(), torch.cat(overlaps)

    def recipe(self) -> dict[str, Any]:
        """See `SpeculativeTraining.recipe`; what it has cost and reached too."""
        reached = {
            name: float(value)
            for name, value in self.trainer.callback_metrics.items()
            if name.startswith("val/") and name.endswith(("_rate", "_efficiency", "_speedup"))
        }
        features = {"target_features": _named(self.target_features)}
        return {**super().recipe(), **features, **self.effort.to_dict(), "reached": reached}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        described = checkpoint[KEY]
        self._check_arguments(described["drafter"]["arguments"])
        self.effort.go_on_from(described["recipe"])
        if (own := self.draft_vocabulary) is not None:  # the weights are for these tokens, whatever the data are now
            own.become(described["drafter"]["arguments"]["draft_vocabulary"])

    def _check_arguments(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError where the checkpoint's weights were trained for another draft, which shapes may not tell."""
        for name, own in self.drafter.arguments().items():
            if name == "draft_vocabulary" or not isinstance(own, int | float | str | list | None):
                continue
            if saved.get(name) != own:
                raise ValueError(
                    f"the checkpoint's draft was trained with {name}={saved.get(name)}, the config says {own}: give "
                    "the config that it was trained with, or start anew"
                )

    def on_fit_start(self) -> None:
        self.effort.begin()

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val/tokens_seen", float(self.effort.num_tokens), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=self.learning_rate, betas=BETAS, weight_decay=0.0)
        own = self.draft_vocabulary
        tables = {self.target.vocab_size, self.target.vocab_size if own is None else len(own)}
        matrices = [each for each in trained if each.ndim == 2 and each.shape[0] not in tables]
        if not matrices:
            raise ValueError("muon steps the matrices of hidden layers, and this draft trains none: give adamw")
        chosen = {id(each) for each in matrices}
        others = [each for each in trained if id(each) not in chosen]
        return MuonAdamW(matrices, others, lr=self.learning_rate, betas=BETAS)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Shorten long gradients: to `max_gradient_norm`, or as the Trainer is told."""
        self.clip_gradients(optimizer, gradient_clip_val or self.max_gradient_norm, gradient_clip_algorithm or "norm")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Set the learning rate of this step: a function of its number alone, so that a resumed run goes on with it."""
        share = warmup_cosine(
            self.global_step,
            self.trainer.estimated_stepping_batches,
            warmup_steps=self.warmup_steps,
            final=self.final_learning_rate,
        )
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * self.learning_rate
        self.log("train/learning_rate", share * self.learning_rate, sync_dist=True)


def _named(part: DraftLoss | TargetFeatures) -> dict[str, Any]:
    return {"class": type(part).__name__, **part.arguments()}
