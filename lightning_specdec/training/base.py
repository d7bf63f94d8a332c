"""Training of a target and its drafters: what all training modules share.

Shapes: B rows, T tokens, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_specdec.checkpoints import checkpoint as checkpoint_file
from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.config.kinds import path_of
from lightning_specdec.data import Batch, TokenData
from lightning_specdec.data.base import plain_arguments
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.accumulation import (
    gradient_settings,
    rewind_to_step,
    upcoming_batches,
)
from lightning_specdec.training.data_digest import data_digest
from lightning_specdec.training.metrics import Means, RoundMetrics
from lightning_specdec.training.target_outputs import stored_elsewhere


class SpeculativeTraining(LightningModule, ABC):
    """Trains a target, its drafters, or both, and measures how much speculation saves.

    A subclass builds its drafters and implements `measure` and `training_step`. The data module is
    a `TokenData`, or any data module whose batches contain `tokens` and optionally `lengths`.

    Args:
        target: the model whose output is wanted.
        drafters: one drafter, or several by name. A checkpoint decodes with the first one by
            default.
        learning_rate: of AdamW.
        weight_decay: of AdamW, for all weights.
        num_draft_tokens: draft tokens of a round, for the metrics.

    Attributes:
        first_round: whether the drafter proposes tokens before the target has read anything.
        drafter: the first drafter.
        others: the other drafters, by name.
        measured: names of validation metrics that a callback measures by decoding. Their estimates
            from known texts are logged as `val/teacher_forced_NAME`.
    """

    first_round: ClassVar[bool] = True

    def __init__(
        self,
        target: LanguageModel,
        drafters: Drafter | Mapping[str, Drafter],
        *,
        learning_rate: float = 0.001,
        weight_decay: float = 0.0,
        num_draft_tokens: int = 3,
    ) -> None:
        super().__init__()
        self.learning_rate = require_number("learning_rate", learning_rate, low=0.0, low_open=True)
        self.weight_decay = require_number("weight_decay", weight_decay, low=0.0)
        self.num_draft_tokens = require_int("num_draft_tokens", num_draft_tokens, 1)

        if isinstance(drafters, Drafter):
            named_drafters = {checkpoint_file.MAIN: drafters}
        else:
            named_drafters = dict(drafters)
        for drafter in named_drafters.values():
            drafter.check_target(target)
        self.draft_name = next(iter(named_drafters))
        self.target = target
        self.drafter = named_drafters.pop(self.draft_name)
        self.others = nn.ModuleDict(named_drafters)

        self.measured: frozenset[str] = frozenset()
        self.metrics = self.new_metrics()
        self._step_batches: list[Batch] = []
        self._step_loss: Tensor | float = 0.0

    @abstractmethod
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return a batch's part of the loss of its optimizer step.

        Divide sums over tokens by `mean_count`, so that the parts of all batches and processes
        together are a mean over all tokens of the step. `log_losses` logs single losses.
        """

    @abstractmethod
    def measure(self, batch: Batch, split: str) -> Means:
        """Count a batch's rounds in `metrics`; return its accuracies and losses, with `loss`."""

    def new_metrics(self) -> RoundMetrics:
        """Return the metrics of expected rounds; called when target and drafters are set."""
        return RoundMetrics([""], self.num_draft_tokens, first_round=self.first_round)

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments that are plain values, for the record."""
        return plain_arguments(self)

    # Optimizer steps

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Read ahead to the other batches of an optimizer step when its first batch begins."""
        num_accumulated = self.trainer.accumulate_grad_batches
        if batch_idx % num_accumulated == 0:
            upcoming = upcoming_batches(self.trainer, self._data(), num_accumulated - 1)
            self._step_batches = [batch, *upcoming]
            self._step_loss = 0.0

    def mean_count(self, num_tokens: int, count: Callable[[Batch], int]) -> float:
        """Return the mean of a count over all batches of this optimizer step and all processes.

        Lightning divides every batch's loss by `accumulate_grad_batches`, and gradients are
        averaged over the processes. So a sum over a batch's tokens, divided by this mean count,
        trains exactly as the mean over all tokens of the step: gradients equal those of one large
        batch, even if the batches differ in length.

        Args:
            num_tokens: the number of tokens that the current batch's loss sums over.
            count: returns this number for any batch.
        """
        total: float = num_tokens
        if len(self._step_batches) > 1:
            total = sum(count(batch) for batch in self._step_batches)
        if self.trainer.world_size > 1:
            local_total = torch.tensor(float(total), device=self.device)
            total = float(self.trainer.strategy.reduce(local_total, reduce_op="mean"))
        if total == 0:
            return 1.0  # no process has a token to learn from, and all sums are 0
        return total / self.trainer.accumulate_grad_batches

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the loss of an optimizer step after its last batch."""
        if not (isinstance(outputs, Mapping) and "loss" in outputs):
            return
        self._step_loss = self._step_loss + outputs["loss"].detach()
        num_finished = batch_idx % self.trainer.accumulate_grad_batches + 1
        if num_finished == len(self._step_batches):
            self.log(
                "train/loss",
                self._step_loss,
                on_step=True,
                on_epoch=False,
                prog_bar=True,
                sync_dist=True,
            )
            self._log_learning_rate()

    def _log_learning_rate(self) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("train/learning_rate", float(rate), on_step=True, on_epoch=False)

    def log_losses(
        self,
        losses: Mapping[str, Tensor],
        num_tokens: int | Tensor,
        *,
        prog_bar: bool = True,
    ) -> None:
        """Log `train/NAME`, the mean over an epoch's tokens, of means over `num_tokens` tokens."""
        named_losses = {f"train/{name}": loss for name, loss in losses.items()}
        self.log_dict(
            named_losses,
            on_step=False,
            on_epoch=True,
            prog_bar=prog_bar,
            sync_dist=True,
            batch_size=max(1, int(num_tokens)),
        )

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        # The fused form launches one kernel for all weights, the plain form about ten for each.
        return torch.optim.AdamW(
            trained, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )

    # Data

    def setup(self, stage: str) -> None:
        data = self._data()
        self.check_data(data)
        if not isinstance(data, TokenData):
            # Convert the batches of any other data module.
            transfer = data.on_after_batch_transfer
            data.on_after_batch_transfer = lambda batch, index: self._converted(
                transfer(batch, index), path_of(type(data))
            )

    def _converted(self, batch: Any, origin: str) -> Batch:
        """A batch of a user's data module, checked as far as that does not wait for a GPU."""
        converted = Batch.of(batch, origin=origin)
        tokens = converted.tokens
        if tokens.device.type == "cpu" and tokens.numel():
            for token in (int(tokens.min()), int(tokens.max())):
                if not 0 <= token < self.target.vocab_size:
                    raise ValueError(
                        f"a batch of {origin} has token {token}, and the models have the tokens "
                        f"0 to {self.target.vocab_size - 1}"
                    )
        return converted

    def check_data(self, data: Any) -> None:
        """Raise ValueError for data that these networks cannot learn."""
        if not isinstance(data, TokenData):
            return
        if data.vocab_size > self.target.vocab_size:
            raise ValueError(
                f"the data have a vocabulary of {data.vocab_size} tokens, the models one of "
                f"{self.target.vocab_size}: give both the same vocab_size"
            )
        readers: dict[str, LanguageModel | Drafter] = {"target": self.target, **self.drafters}
        for name, reader in readers.items():
            context = _shortest_context(reader)
            if context is not None and data.max_length > context:
                advice = "shorten them, or raise its max_position_embeddings"
                if _has_position_switch(reader):
                    advice = "shorten them, since longer ones have other positions"
                raise ValueError(
                    f"sequences have {data.max_length} tokens, and {name} reads {context}: {advice}"
                )

    def _data(self) -> Any:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if data is None:
            raise ValueError(
                f"{type(self).__name__} needs a data module: give one as `data`, or as `datamodule`"
            )
        return data

    # Evaluation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def on_validation_epoch_start(self) -> None:
        self.metrics.reset()

    def on_validation_epoch_end(self) -> None:
        self._log_rates("val", self.measured)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def on_test_epoch_start(self) -> None:
        self.metrics.reset()

    def on_test_epoch_end(self) -> None:
        self._log_rates("test", frozenset())

    def _evaluate(self, split: str, batch: Batch) -> None:
        """Log the metrics of a batch, and bits per byte of each loss if the tokens are text."""
        data = self._data()
        means = self.measure(batch, split)

        bytes_per_token = data.bytes_per_token(split) if isinstance(data, TokenData) else None
        if bytes_per_token:
            for name, (loss, count) in list(means.items()):
                if name.endswith("loss"):
                    bits_name = f"{name.removesuffix('loss')}bits_per_byte"
                    means[bits_name] = (loss / math.log(2) / bytes_per_token, count)

        for name, (mean, count) in means.items():
            if count:
                self.log(f"{split}/{name}", mean, sync_dist=True, batch_size=count)

    def _log_rates(self, split: str, measured: frozenset[str]) -> None:
        named_rates = {}
        for name, rate in self.metrics.compute().items():
            if name in measured:
                name = f"teacher_forced_{name}"
            named_rates[f"{split}/{name}"] = rate
        self.log_dict(named_rates, sync_dist=True)

    # Checkpoints

    @property
    def drafters(self) -> dict[str, Drafter]:
        """All drafters by name, the main one first."""
        drafters = {self.draft_name: self.drafter}
        for name, drafter in self.others.items():
            if isinstance(drafter, Drafter):
                drafters[name] = drafter
        return drafters

    def training_record(self) -> dict[str, Any]:
        """Return plain values that are enough to repeat this training, and how far it has come."""
        data = self._data()
        trainer = self.trainer
        seed = os.environ.get("PL_GLOBAL_SEED")
        reached = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/")
        }
        return {
            "training": type(self).__name__,
            **self.settings(),
            "data": type(data).__name__,
            "data_arguments": data.arguments() if isinstance(data, TokenData) else {},
            "data_digest": self.data_digest(data),
            "gradients": gradient_settings(trainer),
            "seed": int(seed) if seed else None,
            "epochs": trainer.fit_loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
            "steps": trainer.global_step,
            "reached": reached,
        }

    def data_digest(self, data: Any) -> str | None:
        """Return a digest of all tokens; None if `data` is no `TokenData`."""
        return data_digest(data) if isinstance(data, TokenData) else None

    def describe(self, **entries: Any) -> dict[str, Any]:
        """Return what rebuilds the networks: see `checkpoint.describe`."""
        target = stored_elsewhere(self.target) or self.target
        return checkpoint_file.describe(target, self.drafters, **entries)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add a description of the networks: decoding needs only this file, and a frozen target."""
        data = self._data()
        prompts = {}
        if isinstance(data, TokenData):
            prompts = {"prompts": data.prompts(), "tokenizer": data.tokenizer}
        checkpoint[checkpoint_file.KEY] = self.describe(recipe=self.training_record(), **prompts)

        if stored_elsewhere(self.target) is not None:
            checkpoint["state_dict"] = {
                name: weight
                for name, weight in checkpoint["state_dict"].items()
                if not name.startswith(checkpoint_file.TARGET)
            }
        rewind_to_step(checkpoint, self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the weights of a target that is stored elsewhere, from this module's target."""
        reference = checkpoint_file.reference_of(checkpoint)
        if reference is None:
            self.target.origin = None
            return
        reference.check(self.target, "the checkpoint")
        target_weights = {
            checkpoint_file.TARGET + name: weight
            for name, weight in self.target.state_dict().items()
        }
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **target_weights}


def _shortest_context(network: nn.Module) -> int | None:
    """The shortest context of the models in a network, in tokens; None if there is no limit.

    A draft may decode texts that exceed its context, but training reads whole sequences.
    """
    limits = []
    for model in _models_in(network):
        # The texts of a batch share their positions, so they have to be on one side of a switch.
        limit = model.positions_of_one_side
        if limit is not None:
            limits.append(limit)
    return min(limits, default=None)


def _has_position_switch(network: nn.Module) -> bool:
    return any(model.position_switch is not None for model in _models_in(network))


def _models_in(network: nn.Module) -> list[LanguageModel]:
    return [module for module in network.modules() if isinstance(module, LanguageModel)]
