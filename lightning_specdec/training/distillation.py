"""Training a draft from its target's own distributions.

Shapes: B rows, T tokens, M predicted positions, N positions that are learned from, K draft tokens,
D width of the output head's input, W tokens of the draft's vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from lightning_specdec.checkpoints import load_pair
from lightning_specdec.checkpoints.checkpoint import KEY
from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.config.models import PairSource
from lightning_specdec.data import IGNORED, Batch, TokenData
from lightning_specdec.data.base import SPLITS
from lightning_specdec.drafters import Drafter, DraftVocabulary
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.draft_losses import CrossEntropy, DraftLoss, ForwardKL
from lightning_specdec.training.metrics import (
    SAMPLINGS,
    Means,
    count_labels,
    next_token_loss,
    next_token_means,
)
from lightning_specdec.training.optimizers import BETAS, MuonAdamW, time_share, warmup_cosine
from lightning_specdec.training.target_outputs import (
    DraftStep,
    OnlineFeatures,
    ShardedTarget,
    TargetOutputs,
    check_same_tokens,
    given_target,
    is_sharded,
    token_counts,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_LOGITS_AT_ONCE = 2**25
"""Logits that are measured at the same time, to limit memory."""
FINAL_RATE = 0.05
"""The learning rate at the end of a run, relative to the highest."""


class LearnedPositions(NamedTuple):
    """What a draft step is trained and measured on: the positions of a batch that it learns from.

    Args:
        hidden: inputs of the draft's output head.
        log_probs: the target's log probabilities of the draft's tokens.
        labels: the tokens of the text; `IGNORED` outside the draft's vocabulary.
        choices: the target's most likely tokens.
    """

    hidden: Float[Tensor, "N D"]
    log_probs: Float[Tensor, "N W"]
    labels: Int[Tensor, "N"]
    choices: Int[Tensor, "N"]


def num_learned(batch: Batch, *, step: DraftStep, prompts: bool) -> int:
    """Number of positions of a batch that a draft step learns from.

    Args:
        batch: any batch of the run, not only the one that `step` belongs to.
        step: the draft step.
        prompts: whether the tokens of prompts count.
    """
    predicted_tokens = batch.tokens[:, step.first_index :: step.stride, None]
    step_of_batch = step._replace(hidden=predicted_tokens)
    return int(step_of_batch.learned(batch, prompts=prompts).sum())


class DistillationTraining(SpeculativeTraining):
    """Trains a draft to predict what a frozen target predicts.

    A draft token is accepted with probability sum(min(draft, target)) (Leviathan et al. 2023), so
    the draft learns the target's distributions, best on the target's own texts (`lightning_specdec
    generate`). Draft token i of a round matters only if those before it were accepted, so its loss
    is weighted by `position_decay ** i`.

    Args:
        make_drafter: builds the drafter for the target.
        target: the target; None if `target_checkpoint` names it.
        target_checkpoint: a checkpoint that contains the target, or the directory of a transformers
            model.
        target_dtype: dtype of a target from a directory; as stored when None.
        target_adapter: an adapter of PEFT to merge into a target from a directory.
        draft: a draft file, or the directory of a head, to start from; it keeps its sizes and its
            vocabulary.
        freeze_target: whether the target stays unchanged, to the last bit. Otherwise it learns from
            the text, and its loss is added to the draft's.
        loss: when None, `ForwardKL` for a frozen target, else `CrossEntropy`.
        position_decay: weight of each draft token relative to the one before it.
        target_features: where the target's outputs come from; `OnlineFeatures` when None.
        learn_from_prompts: whether the draft also learns from prompts, which the target did not
            write.
        warmup_steps: steps over which the learning rate rises. Afterwards it falls by a cosine and
            never rises again. A run that is resumed with more epochs keeps the rate that it had
            reached until the longer cosine falls below it.
        optimizer: "adamw", or "muon" for the matrices of hidden layers.
        options: those of `SpeculativeTraining`.
    """

    def __init__(
        self,
        make_drafter: Callable[[LanguageModel], Drafter],
        target: LanguageModel | None = None,
        *,
        target_checkpoint: str | None = None,
        target_dtype: str | None = None,
        target_adapter: str | None = None,
        draft: str | None = None,
        freeze_target: bool = True,
        loss: DraftLoss | None = None,
        position_decay: float = 0.8,
        target_features: OnlineFeatures | None = None,
        learn_from_prompts: bool = False,
        warmup_steps: int = 100,
        optimizer: str = "adamw",
        **options: Any,
    ) -> None:
        self.target_checkpoint = target_checkpoint
        self.target_adapter = target_adapter
        self.freeze_target = freeze_target
        if loss is None:
            loss = ForwardKL() if freeze_target else CrossEntropy()
        self.loss = loss
        self.position_decay = require_number(
            "position_decay", position_decay, low=0.0, high=1.0, low_open=True
        )
        self.target_features = OnlineFeatures() if target_features is None else target_features
        self.learn_from_prompts = learn_from_prompts
        self.warmup_steps = require_int("warmup_steps", warmup_steps, 0)
        if optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer must be adamw or muon, got {optimizer!r}")
        self.optimizer = optimizer
        self._initialized = draft is not None
        self._sharded = False

        target, self.target_tokenizer = given_target(
            target, target_checkpoint, freeze_target, dtype=target_dtype, adapter=target_adapter
        )
        drafter = make_drafter(target)
        if draft is not None:
            drafter = self._load_drafter(draft, target, type(drafter))

        super().__init__(target, drafter, **options)
        self.target.requires_grad_(not freeze_target)
        self.train()

    @staticmethod
    def _load_drafter(path: str, target: LanguageModel, expected_type: type[Drafter]) -> Drafter:
        """Load the drafter that training starts from, in float32."""
        source = PairSource(target=target, draft=path, draft_dtype="float32")
        drafter = load_pair(source, pack=False).drafter
        if type(drafter) is not expected_type:
            raise ValueError(
                f"{path} is a {type(drafter).__name__}, this trains a {expected_type.__name__}: "
                "give another"
            )
        return drafter

    # What a subclass defines

    def layers(self) -> Sequence[int]:
        """The target's layers whose hidden states are needed: those that the drafter reads."""
        return self.drafter.features(self.target)

    @abstractmethod
    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        """Return the draft steps of a round in order; a single one if all are alike."""

    @abstractmethod
    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        """Return the logits of that draft step."""

    def step_losses(
        self,
        number: int,
        hidden: Float[Tensor, "N D"],
        log_probs: Float[Tensor, "N W"],
        labels: Int[Tensor, "N"],
    ) -> Float[Tensor, "N"]:
        """Return what a training step minimizes at each position of that draft step."""
        return self.loss(self.step_logits(number, hidden), log_probs, labels)

    def init_from_target(self) -> None:  # noqa: B027
        """Initialize the draft's weights, once its vocabulary is known."""

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The reduced vocabulary of the draft; None if it has the target's."""
        return getattr(self.drafter, "draft_vocabulary", None)

    def loss_weights(self, num_steps: int) -> list[float]:
        """Return the weights of that many draft steps in a training step's loss."""
        weights = [self.position_decay**i for i in range(num_steps)]
        total = sum(weights)
        return [weight / total for weight in weights]

    def _weighted_loss(self, step_losses: list[Tensor]) -> Tensor:
        weights = step_losses[0].new_tensor(self.loss_weights(len(step_losses)))
        return (torch.stack(step_losses) * weights).sum()

    # The target and the data

    def train(self, mode: bool = True) -> DistillationTraining:
        super().train(mode)
        if self.freeze_target:
            self.target.eval()
        return self

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "loss": {"class": type(self.loss).__name__}}

    def check_data(self, data: TokenData) -> None:
        """Check the data, and choose the draft's vocabulary from them, once."""
        super().check_data(data)
        tokenizer = self.target.tokenizer
        vocab_size = self.target.vocab_size
        if self.target_checkpoint is not None:
            tokenizer_name = self.target_tokenizer
            if tokenizer_name is None and tokenizer is not None:
                tokenizer_name = tokenizer.name
            check_same_tokens(self.target_checkpoint, vocab_size, tokenizer_name, data)
        if self._initialized:
            return

        if self.draft_vocabulary is not None:
            # The draft must be able to end a text.
            eos_tokens = []
            if tokenizer is not None:
                eos_tokens = [token for token in tokenizer.eos if token < vocab_size]
            self.draft_vocabulary.choose(token_counts(data, vocab_size), eos_tokens)
        self.init_from_target()
        self._initialized = True

    def setup(self, stage: str) -> None:
        super().setup(stage)
        train, validation, test = SPLITS
        splits_by_stage = {
            "fit": (train, validation),
            "validate": (validation,),
            "test": (test,),
        }
        splits = splits_by_stage.get(stage, ())
        if not is_sharded(self.trainer):
            # The Trainer moves the target only after setup, and the features may be computed now.
            self.target.to(self.trainer.strategy.root_device)
        self.target_features.prepare(self.target, self._data(), self.layers(), splits)

    def configure_model(self) -> None:
        """Shard a frozen target's layers (FSDP2) under the strategy `ShardedTarget`."""
        if not is_sharded(self.trainer) or self._sharded:
            return
        from lightning_specdec.models.huggingface import HuggingFaceLM

        if not (self.freeze_target and isinstance(self.target, HuggingFaceLM)):
            raise ValueError(
                "ShardedTarget shards a frozen transformers target alone: give strategy ddp"
            )
        if not isinstance(self.trainer.strategy, ShardedTarget):
            raise ValueError(
                "a run under ModelParallelStrategy cannot resume: give strategy ShardedTarget "
                "instead"
            )
        assert self.device_mesh is not None
        for layer in self.target.stack.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        self._sharded = True

    def read(self, batch: Batch, split: str) -> TargetOutputs:
        """Return the target's outputs for a batch."""
        draft_tokens = None
        if self.draft_vocabulary is not None:
            draft_tokens = self.draft_vocabulary.tokens
        return self.target_features.read(
            self.target, batch, split, layers=self.layers(), tokens=draft_tokens
        )

    def _learned(
        self,
        step: DraftStep,
        mask: Bool[Tensor, "B M"],
        batch: Batch,
        outputs: TargetOutputs,
    ) -> LearnedPositions:
        """Select a step's positions under a mask."""
        labels = batch.tokens[:, step.predicted][mask]
        if self.draft_vocabulary is not None:
            labels = self.draft_vocabulary.to_draft(labels, IGNORED)
        return LearnedPositions(
            hidden=step.hidden[mask],
            log_probs=outputs.log_probs[:, step.before][mask].detach(),
            labels=labels,
            choices=outputs.choices[:, step.before][mask],
        )

    # Training

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self.read(batch, "train")
        prompts = self.learn_from_prompts

        step_losses: list[Tensor] = []
        position_means: list[tuple[Tensor, int]] = []
        for number, step in enumerate(self.draft_steps(batch, outputs)):
            mask = step.learned(batch, prompts=prompts)
            hidden, log_probs, labels, _ = self._learned(step, mask, batch, outputs)
            losses = self.step_losses(number, hidden, log_probs, labels)
            loss_sum = losses.sum()
            num_positions = len(losses)

            # The mean over all batches and processes of an optimizer step, not over this batch.
            count = partial(num_learned, step=step, prompts=prompts)
            step_losses.append(loss_sum / self.mean_count(num_positions, count))
            batch_mean = loss_sum.detach() / max(1, num_positions)
            position_means.append((batch_mean, num_positions))
        loss = self._weighted_loss(step_losses)

        if not self.freeze_target:
            loss = loss + self._target_loss(batch, outputs)

        # The loss of a single step is `train/loss`.
        if len(position_means) > 1:
            for position, (batch_mean, num_positions) in enumerate(position_means, start=1):
                position_loss = {f"position_{position}/loss": batch_mean}
                self.log_losses(position_loss, num_positions, prog_bar=False)
        return loss

    def _target_loss(self, batch: Batch, outputs: TargetOutputs) -> Tensor:
        """The loss of a target that learns from the text; logged as well."""
        labels = batch.next_tokens()
        loss_sum = next_token_loss(outputs.log_probs[:, :-1], labels, "sum")
        num_tokens = count_labels(batch)
        loss = loss_sum / self.mean_count(num_tokens, count_labels)

        batch_mean = loss_sum.detach() / max(1, num_tokens)
        self.log_losses({"target_loss": batch_mean}, num_tokens)
        return loss

    def on_after_backward(self) -> None:
        """Average the draft's gradients over the processes that share a sharded target."""
        if self._sharded:
            for weight in self.parameters():
                if weight.grad is not None:
                    weight.grad = self.trainer.strategy.reduce(weight.grad)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        rate = self.learning_rate
        decay = self.weight_decay
        if self.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=rate, betas=BETAS, weight_decay=decay)

        # Muon is for hidden layers. Embeddings and output heads are not: a step changes few of
        # their rows.
        vocab_sizes = {self.target.vocab_size}
        if self.draft_vocabulary is not None:
            vocab_sizes.add(len(self.draft_vocabulary))
        matrices = []
        other_parameters = []
        for parameter in trained:
            is_matrix = parameter.ndim == 2 and parameter.shape[0] != 1
            if is_matrix and parameter.shape[0] not in vocab_sizes:
                matrices.append(parameter)
            else:
                other_parameters.append(parameter)
        if not matrices:
            raise ValueError(
                "muon steps the matrices of hidden layers, and this draft trains none: give adamw"
            )
        return MuonAdamW(matrices, other_parameters, lr=rate, weight_decay=decay)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        rate = self._scheduled_rate()
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _scheduled_rate(self) -> float:
        """The learning rate of this optimizer step."""
        num_steps = self.trainer.estimated_stepping_batches
        time_used = time_share(self.trainer)
        if time_used:
            num_steps = min(num_steps, self.global_step / time_used)
        rate = self.learning_rate * warmup_cosine(
            self.global_step, num_steps, warmup_steps=self.warmup_steps, final=FINAL_RATE
        )
        if self.global_step < self.warmup_steps:
            return rate
        # The optimizer still holds the rate of the last step, also after a resume. In a run that is
        # resumed with more epochs or minutes, the new cosine starts above it.
        last_rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        return min(rate, last_rate)

    # Evaluation

    def measure(self, batch: Batch, split: str) -> Means:
        outputs = self.read(batch, split)
        step_losses: list[Tensor] = []
        # For each sampling setting and each draft step: the probability that a draft of each token
        # is accepted.
        acceptance: list[list[Tensor]] = [[] for _ in SAMPLINGS]
        for number, step in enumerate(self.draft_steps(batch, outputs)):
            # The tokens of prompts are never drafted.
            mask = step.learned(batch, prompts=False)
            positions = self._learned(step, mask, batch, outputs)
            losses, *step_acceptance = self._judge(number, positions)
            step_losses.append(losses.sum() / max(1, len(losses)))

            # From the step's positions to the tokens that they predict.
            for all_steps, token_acceptance in zip(acceptance, step_acceptance, strict=True):
                by_token = token_acceptance.new_zeros(batch.tokens.shape)
                predicted = by_token[:, step.predicted]
                predicted[mask] = token_acceptance
                all_steps.append(by_token)

        means = self._count_rounds(acceptance, batch)
        loss = self._weighted_loss(step_losses)
        if not self.freeze_target:
            labels = batch.next_tokens()
            means.update(next_token_means("target", outputs.log_probs[:, :-1], labels))
            target_loss, _ = means["target_loss"]
            loss = loss + target_loss
        num_new = int((batch.lengths - batch.prompt_lengths).sum())
        means["loss"] = (loss, num_new)
        return means

    def _judge(
        self,
        number: int,
        positions: LearnedPositions,
    ) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"], Float[Tensor, "N"]]:
        """The loss, and the probability of acceptance at temperature 0 and at temperature 1."""
        num_logits = positions.log_probs.shape[-1]
        positions_at_once = max(1, _LOGITS_AT_ONCE // num_logits)
        splits = [values.split(positions_at_once) for values in positions]
        losses = []
        greedy_acceptance = []
        sampling_acceptance = []
        for hidden, log_probs, labels, choices in zip(*splits, strict=True):
            logits = self.step_logits(number, hidden)
            losses.append(self.loss(logits, log_probs, labels))

            # At temperature 0: whether the most likely tokens of both models agree.
            draft_log_probs = logits.float().log_softmax(-1)
            draft_tokens = draft_log_probs.argmax(-1)
            if self.draft_vocabulary is not None:
                draft_tokens = self.draft_vocabulary.tokens[draft_tokens]
            agrees = draft_tokens == choices
            greedy_acceptance.append(agrees.float())

            # At temperature 1: the sum of min(draft_probs, target_probs).
            overlaps = torch.minimum(draft_log_probs, log_probs).exp().sum(-1)
            sampling_acceptance.append(overlaps.clamp(max=1.0))
        return torch.cat(losses), torch.cat(greedy_acceptance), torch.cat(sampling_acceptance)

    def _count_rounds(self, acceptance: list[list[Float[Tensor, "B T"]]], batch: Batch) -> Means:
        """Count rounds, and average the acceptance rate of each draft step.

        Args:
            acceptance: for each sampling setting and each draft step the probability that a draft
                of token t is accepted. The last step represents all later ones.
        """
        means: Means = {}
        num_new = batch.lengths - batch.prompt_lengths
        num_draft_tokens = self.num_draft_tokens
        round_starts = torch.arange(int(num_new.max()), device=num_new.device)
        for prefix, steps in zip(SAMPLINGS, acceptance, strict=True):
            columns = []
            for i in range(num_draft_tokens):
                # Draft token i of the round from new token j is new token j + i.
                new_tokens = round_starts + i
                token_indices = batch.prompt_lengths[:, None] + new_tokens
                step_acceptance = steps[min(i, len(steps) - 1)]
                padded = functional.pad(step_acceptance, (0, num_draft_tokens))
                last_index = padded.shape[1] - 1
                column = padded.gather(1, token_indices.clamp(max=last_index))
                columns.append(column)

                is_in_text = new_tokens < num_new[:, None]
                rates = column[is_in_text]
                means[f"position_{i + 1}/{prefix}acceptance_rate"] = (rates.mean(), len(rates))
            self.metrics.of(prefix).update(torch.stack(columns, dim=-1), num_new)
        return means

    # Checkpoints

    def training_record(self) -> dict[str, Any]:
        """See `SpeculativeTraining.recipe`; also where the target's outputs came from."""
        return {**super().training_record(), "target_features": type(self.target_features).__name__}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.draft_vocabulary is not None:
            # The weights belong to these tokens, whatever the data.
            arguments = checkpoint[KEY]["drafter"]["arguments"]
            self.draft_vocabulary.become(arguments["draft_vocabulary"])
