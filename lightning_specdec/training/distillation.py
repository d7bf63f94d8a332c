"""Training a draft from its target's own distributions.

Shapes: B rows, T tokens, M positions, N chosen ones, K draft tokens, D width of what the output head reads, W tokens of
the draft.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
from lightning_specdec.training.metrics import SAMPLINGS, Means, next_token_loss, next_token_means
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
    from jaxtyping import Float, Int

_AT_ONCE = 2**25
"""Logits that are measured at once."""
FINAL_RATE = 0.05
"""The learning rate at the end of a run, relative to the highest."""


class DistillationTraining(SpeculativeTraining):
    """Trains a draft to predict what a frozen target predicts.

    A draft token is accepted with probability sum(min(draft, target)) (Leviathan et al. 2023), so the draft learns the
    target's distributions, best on the target's own texts (`lightning_specdec generate`). Draft token i of a round
    matters only if those before it were accepted, so its loss counts `position_decay ** i`.

    Args:
        make_drafter: builds the drafter for the target.
        target: the target; None where `target_checkpoint` names it.
        target_checkpoint: a checkpoint that contains the target, or the directory of a transformers model.
        target_dtype: dtype of a target from a directory; as stored when None.
        draft: a draft file, or the directory of a head, to go on from; it keeps its sizes and its vocabulary.
        freeze_target: whether the target stays as it is, to the last bit. Otherwise it learns from the text, and its
            loss is added to the draft's.
        loss: when None, `ForwardKL` for a frozen target, else `CrossEntropy`.
        position_decay: weight of each draft token relative to the one before it.
        target_features: where the target's outputs come from; `OnlineFeatures` when None.
        learn_from_prompts: whether prompts, which the target did not write, are learned from too.
        warmup_steps: steps over which the learning rate rises; it falls by a cosine afterwards.
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
        self.target_checkpoint, self.freeze_target = target_checkpoint, freeze_target
        self.loss = loss or (ForwardKL() if freeze_target else CrossEntropy())
        self.position_decay = require_number(
            "position_decay", position_decay, low=0.0, high=1.0, low_open=True
        )
        self.target_features = OnlineFeatures() if target_features is None else target_features
        self.learn_from_prompts = learn_from_prompts
        self.warmup_steps = require_int("warmup_steps", warmup_steps, 0)
        if optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer must be adamw or muon, got {optimizer!r}")
        self.optimizer = optimizer
        self._initialized, self._sharded = draft is not None, False
        target, self.target_tokenizer = given_target(
            target, target_checkpoint, freeze_target, dtype=target_dtype
        )
        drafter = make_drafter(target)
        if draft is not None:
            source = PairSource(target=target, draft=draft, draft_dtype="float32")
            kind, drafter = type(drafter), load_pair(source, pack=False).drafter
            if type(drafter) is not kind:
                raise ValueError(
                    f"{draft} is a {type(drafter).__name__}, this trains a {kind.__name__}: give another"
                )
        super().__init__(target, drafter, **options)
        self.target.requires_grad_(not freeze_target)
        self.train()

    def layers(self) -> Sequence[int]:
        """The target's layers whose hidden states are read: those that the drafter reads."""
        return self.drafter.features(self.target)

    @abstractmethod
    def draft_steps(self, batch: Batch, outputs: TargetOutputs) -> list[DraftStep]:
        """The draft steps of a round in order; a single one where all are alike."""

    @abstractmethod
    def step_logits(self, number: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N W"]:
        """Logits of that draft step."""

    def step_losses(
        self,
        number: int,
        hidden: Float[Tensor, "N D"],
        log_probs: Float[Tensor, "N W"],
        labels: Int[Tensor, "N"],
    ) -> Float[Tensor, "N"]:
        """What a training step minimizes at each position of that draft step."""
        return self.loss(self.step_logits(number, hidden), log_probs, labels)

    def init_from_target(self) -> None:  # noqa: B027
        """Initialize the draft's weights, once its vocabulary is known."""

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The reduced vocabulary of the draft; None where it has the target's."""
        return getattr(self.drafter, "draft_vocabulary", None)

    def loss_weights(self, num_steps: int) -> list[float]:
        """The weights of that many draft steps in a training step's loss."""
        weights = [self.position_decay**i for i in range(num_steps)]
        return [weight / sum(weights) for weight in weights]

    def train(self, mode: bool = True) -> DistillationTraining:
        super().train(mode)
        if self.freeze_target:
            self.target.eval()
        return self

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "loss": {"class": type(self.loss).__name__}}

    def check_data(self, data: TokenData) -> None:
        """See `SpeculativeTraining.check_data`; also chooses the draft's vocabulary by these data, once."""
        super().check_data(data)
        own = self.target.tokenizer
        if self.target_checkpoint is not None:
            name = self.target_tokenizer or (None if own is None else own.name)
            check_same_tokens(self.target_checkpoint, self.target.vocab_size, name, data)
        if self._initialized:
            return
        if (vocabulary := self.draft_vocabulary) is not None:
            eos = (
                ()
                if own is None
                else [token for token in own.eos if token < self.target.vocab_size]
            )
            vocabulary.choose(token_counts(data, self.target.vocab_size), eos)
        self.init_from_target()
        self._initialized = True

    def setup(self, stage: str) -> None:
        super().setup(stage)
        splits = {"fit": SPLITS[:2], "validate": SPLITS[1:2], "test": SPLITS[2:]}.get(stage, ())
        if not is_sharded(self.trainer):
            self.target.to(
                self.trainer.strategy.root_device
            )  # where the Trainer moves it after setup
        self.target_features.prepare(self.target, self._data(), self.layers(), splits)

    def configure_model(self) -> None:
        """Shard a frozen target's layers under `ShardedTarget` (FSDP2), where it does not fit one device."""
        if not is_sharded(self.trainer) or self._sharded:
            return
        from lightning_specdec.models.huggingface import HuggingFaceLM

        if not (self.freeze_target and isinstance(self.target, HuggingFaceLM)):
            raise ValueError(
                "ShardedTarget shards a frozen transformers target alone: give strategy ddp"
            )
        if not isinstance(self.trainer.strategy, ShardedTarget):
            raise ValueError(
                "a run under ModelParallelStrategy cannot resume: give strategy ShardedTarget instead"
            )
        assert self.device_mesh is not None
        for layer in self.target.stack.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        self._sharded = True

    def on_after_backward(self) -> None:
        """Average the draft's gradients over the processes that share a sharded target."""
        if self._sharded:
            for weight in self.parameters():
                if weight.grad is not None:
                    weight.grad = self.trainer.strategy.reduce(weight.grad)

    def read(self, batch: Batch, split: str) -> TargetOutputs:
        """The target's outputs for a batch."""
        tokens = None if self.draft_vocabulary is None else self.draft_vocabulary.tokens
        return self.target_features.read(
            self.target, batch, split, layers=self.layers(), tokens=tokens
        )

    def _chosen(
        self, step: DraftStep, batch: Batch, outputs: TargetOutputs, *, prompts: bool
    ) -> tuple[
        Tensor,
        tuple[Float[Tensor, "N D"], Float[Tensor, "N W"], Int[Tensor, "N"], Int[Tensor, "N"]],
    ]:
        """The mask of what a step learns from; the hidden states, log probabilities, labels and choices there."""
        mask = step.learned(batch, prompts=prompts)
        labels = batch.tokens[:, step.predicted][mask]
        if self.draft_vocabulary is not None:
            labels = self.draft_vocabulary.to_draft(labels, IGNORED)
        log_probs, choices = (
            outputs.log_probs[:, step.before][mask].detach(),
            outputs.choices[:, step.before][mask],
        )
        return mask, (step.hidden[mask], log_probs, labels, choices)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self.read(batch, "train")
        losses, num_positions = [], 0
        for number, step in enumerate(self.draft_steps(batch, outputs)):
            _, (hidden, log_probs, labels, _) = self._chosen(
                step, batch, outputs, prompts=self.learn_from_prompts
            )
            values = self.step_losses(number, hidden, log_probs, labels)
            losses.append(values.sum() / self._num_learned(values))
            num_positions += len(values)
        loss = (torch.stack(losses) * losses[0].new_tensor(self.loss_weights(len(losses)))).sum()
        if not self.freeze_target:
            target_loss = next_token_loss(outputs.log_probs[:, :-1], batch.next_tokens())
            loss = loss + target_loss
            self.log_losses({"target_loss": target_loss.detach()}, num_positions)
        if len(losses) > 1:
            each = {f"position_{i}/loss": value.detach() for i, value in enumerate(losses, start=1)}
            self.log_losses(each, num_positions, prog_bar=False)
        return loss

    def _num_learned(self, values: Tensor) -> float:
        """How many values each process has on average: then the mean over processes is the mean over all values."""
        if self.trainer.world_size == 1:
            return max(1, len(values))
        return max(0.5, float(self.trainer.strategy.reduce(values.new_tensor(float(len(values))))))

    def measure(self, batch: Batch, split: str) -> Means:
        outputs = self.read(batch, split)
        losses = list[Tensor]()
        chances: list[list[Tensor]] = [[] for _ in SAMPLINGS]
        for number, step in enumerate(self.draft_steps(batch, outputs)):
            mask, values = self._chosen(
                step, batch, outputs, prompts=False
            )  # prompts are never drafted
            pieces = zip(
                *(each.split(max(1, _AT_ONCE // values[1].shape[-1])) for each in values),
                strict=True,
            )
            of_step, *accepted = map(
                torch.cat, zip(*(self._judged(number, *each) for each in pieces), strict=True)
            )
            losses.append(of_step.sum() / max(1, len(of_step)))
            for of_sampling, of_tokens in zip(chances, accepted, strict=True):
                placed = of_tokens.new_zeros(batch.tokens.shape)
                placed[:, step.predicted][mask] = of_tokens
                of_sampling.append(placed)
        means = self._count(chances, batch)
        num_new = int((batch.lengths - batch.prompt_lengths).sum())
        loss = (torch.stack(losses) * losses[0].new_tensor(self.loss_weights(len(losses)))).sum()
        if not self.freeze_target:
            means |= next_token_means("target", outputs.log_probs[:, :-1], batch.next_tokens())
            loss = loss + means["target_loss"][0]
        return {**means, "loss": (loss, num_new)}

    def _count(self, chances: list[list[Float[Tensor, "B T"]]], batch: Batch) -> Means:
        """Count rounds, and average the acceptance rate of each draft step.

        Args:
            chances: for each way of sampling and each draft step the probability that a draft of token t is accepted;
                the last step stands for all that follow.
        """
        means: Means = {}
        num_new, window = batch.lengths - batch.prompt_lengths, self.num_draft_tokens
        offsets = torch.arange(int(num_new.max()), device=num_new.device)
        for prefix, of_steps in zip(SAMPLINGS, chances, strict=True):
            columns = []
            for i in range(window):
                padded = functional.pad(of_steps[min(i, len(of_steps) - 1)], (0, window))
                starts = batch.prompt_lengths[:, None] + offsets + i
                columns.append(padded.gather(1, starts.clamp(max=padded.shape[1] - 1)))
                found = columns[i][offsets + i < num_new[:, None]]
                means[f"position_{i + 1}/{prefix}acceptance_rate"] = found.mean(), len(found)
            self.metrics.of(prefix).update(torch.stack(columns, dim=-1), num_new)
        return means

    def _judged(
        self, number: int, hidden: Tensor, log_probs: Tensor, labels: Tensor, choices: Tensor
    ) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"], Float[Tensor, "N"]]:
        """The loss, and the probability of acceptance at temperature 0 and at temperature 1."""
        logits = self.step_logits(number, hidden)
        log_draft = logits.float().log_softmax(-1)
        drafted = log_draft.argmax(-1)
        if self.draft_vocabulary is not None:
            drafted = self.draft_vocabulary.tokens[drafted]
        overlaps = torch.minimum(log_draft, log_probs).exp().sum(-1).clamp(max=1.0)
        return self.loss(logits, log_probs, labels), (drafted == choices).float(), overlaps

    def recipe(self) -> dict[str, Any]:
        """See `SpeculativeTraining.recipe`; also where the target's outputs came from."""
        return {**super().recipe(), "target_features": type(self.target_features).__name__}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if (
            vocabulary := self.draft_vocabulary
        ) is not None:  # the weights are for these tokens, whatever the data
            vocabulary.become(checkpoint[KEY]["drafter"]["arguments"]["draft_vocabulary"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        rate, decay = self.learning_rate, self.weight_decay
        if self.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=rate, betas=BETAS, weight_decay=decay)
        # Embeddings and output heads are no hidden layers: a step touches few of their rows.
        sizes = {
            self.target.vocab_size,
            len(self.draft_vocabulary or range(self.target.vocab_size)),
        }
        matrices = {
            each: None for each in trained if each.ndim == 2 and each.shape[0] not in sizes | {1}
        }
        if not matrices:
            raise ValueError(
                "muon steps the matrices of hidden layers, and this draft trains none: give adamw"
            )
        others = (each for each in trained if each not in matrices)
        return MuonAdamW(matrices, others, lr=rate, weight_decay=decay)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        num_steps, warmup = self.trainer.estimated_stepping_batches, self.warmup_steps
        if share := time_share(self.trainer):
            num_steps = min(num_steps, self.global_step / share)
        rate = self.learning_rate * warmup_cosine(
            self.global_step, num_steps, warmup_steps=warmup, final=FINAL_RATE
        )
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.log("train/learning_rate", rate, sync_dist=True)
