"""What every training of a target and its drafters shares: data, optimizer, metrics, checkpoints.

Shapes: B rows, T tokens, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_specdec.checkpoints import checkpoint as checkpoint_file
from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.data import Batch, TokenData
from lightning_specdec.data.base import plain_arguments
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.metrics import Means, RoundMetrics
from lightning_specdec.training.target_outputs import stored_elsewhere


class SpeculativeTraining(LightningModule, ABC):
    """Trains a target, its drafters, or both, and measures what they save together.

    A subclass builds its drafter, says what is measured of a batch (`measure`) and what is minimized
    (`training_step`). The data are a `TokenData`, or any data module whose batches hold `tokens` and maybe `lengths`.

    Args:
        target: the model whose output is wanted.
        drafters: drafters for it; of several, by name, the first is the one that a checkpoint decodes with.
        learning_rate: of AdamW.
        weight_decay: of AdamW, for all weights.
        num_draft_tokens: draft tokens of a round, for the metrics.

    Attributes:
        first_round: whether there are draft tokens before the target has read anything.
        drafter: the first one.
        others: the other drafters, by name.
        measured: names of validation metrics that a callback measures by decoding. Their estimates from known texts
            are logged as `val/teacher_forced_NAME`.
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
        named = (
            {checkpoint_file.MAIN: drafters} if isinstance(drafters, Drafter) else dict(drafters)
        )
        for drafter in named.values():
            drafter.check_target(target)
        self.draft_name = next(iter(named))
        self.target = target
        self.drafter = named.pop(self.draft_name)
        self.others = nn.ModuleDict(named)
        self.measured: frozenset[str] = frozenset()
        self.metrics = self.new_metrics()

    @abstractmethod
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch; `log_losses` shows its parts."""

    @abstractmethod
    def measure(self, batch: Batch, split: str) -> Means:
        """Count the rounds of a batch of a split in `metrics`; returns losses and accuracies, `loss` among them."""

    def new_metrics(self) -> RoundMetrics:
        """What counts expected rounds; called when target and drafters are there."""
        return RoundMetrics([""], self.num_draft_tokens, first_round=self.first_round)

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments that are plain values, for the record."""
        return plain_arguments(self)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the newest loss, within the epoch."""
        if (
            isinstance(outputs, Mapping) and "loss" in outputs
        ):  # divided by Lightning for accumulated gradients
            loss = outputs["loss"].detach() * self.trainer.accumulate_grad_batches
            self.log(
                "train/loss", loss, on_step=True, on_epoch=False, prog_bar=True, sync_dist=True
            )

    def log_losses(
        self, losses: Mapping[str, Tensor], num_tokens: int | Tensor, *, prog_bar: bool = True
    ) -> None:
        """Log losses as `train/NAME`: each epoch's mean over tokens."""
        named = {f"train/{name}": value for name, value in losses.items()}
        size = int(num_tokens)
        self.log_dict(
            named, on_step=False, on_epoch=True, prog_bar=prog_bar, sync_dist=True, batch_size=size
        )

    def setup(self, stage: str) -> None:
        data = self._data()
        self.check_data(data)
        if not isinstance(data, TokenData):  # take the batches of any data module
            transferred = data.on_after_batch_transfer
            data.on_after_batch_transfer = lambda batch, index: Batch.of(transferred(batch, index))

    def check_data(self, data: Any) -> None:
        """Raise ValueError for data that these networks cannot learn."""
        if not isinstance(data, TokenData):
            return
        if data.vocab_size > self.target.vocab_size:
            raise ValueError(
                f"the data have a vocabulary of {data.vocab_size} tokens, the models one of {self.target.vocab_size}: "
                "give both the same vocab_size"
            )
        readers: dict[str, LanguageModel | Drafter] = {"target": self.target, **self.drafters}
        for name, reader in readers.items():
            if reader.max_positions is not None and data.max_length > reader.max_positions:
                raise ValueError(
                    f"sequences have {data.max_length} tokens, and {name} reads {reader.max_positions}: shorten them, "
                    "or raise its max_position_embeddings"
                )

    def configure_optimizers(self) -> Any:
        # Fused: one launch for all weights, where the plain form takes about ten for each.
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(
            trained, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def on_validation_epoch_start(self) -> None:
        self.metrics.reset()

    def on_validation_epoch_end(self) -> None:
        self._log_rates("val", self.measured)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    on_test_epoch_start = on_validation_epoch_start

    def on_test_epoch_end(self) -> None:
        self._log_rates("test", frozenset())

    def _evaluate(self, split: str, batch: Batch) -> None:
        data, values = self._data(), self.measure(batch, split)
        if isinstance(data, TokenData) and (size := data.bytes_per_token(split)):
            for name, (loss, count) in list(values.items()):
                if name.endswith("loss"):
                    values[f"{name.removesuffix('loss')}bits_per_byte"] = (
                        loss / math.log(2) / size,
                        count,
                    )
        for name, (value, count) in values.items():
            if count:
                self.log(f"{split}/{name}", value, sync_dist=True, batch_size=count)

    def _log_rates(self, split: str, measured: frozenset[str]) -> None:
        values = self.metrics.compute()
        named = {
            f"teacher_forced_{name}" if name in measured else name: value
            for name, value in values.items()
        }
        self.log_dict({f"{split}/{name}": value for name, value in named.items()}, sync_dist=True)

    def recipe(self) -> dict[str, Any]:
        """How this is being trained, in plain values: what it takes to do it again, and how far it has come."""
        data = self._data()
        metrics = self.trainer.callback_metrics
        return {
            "training": type(self).__name__,
            **self.settings(),
            "data": type(data).__name__,
            "data_arguments": data.arguments() if isinstance(data, TokenData) else {},
            "seed": int(seed) if (seed := os.environ.get("PL_GLOBAL_SEED")) else None,
            "epochs": self.trainer.fit_loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
            "steps": self.trainer.global_step,
            "reached": {
                name: float(value) for name, value in metrics.items() if name.startswith("val/")
            },
        }

    @property
    def drafters(self) -> dict[str, Drafter]:
        """All drafters by name, the main one first."""
        others = {name: each for name, each in self.others.items() if isinstance(each, Drafter)}
        return {self.draft_name: self.drafter, **others}

    def describe(self, **given: Any) -> dict[str, Any]:
        """What rebuilds the networks: see `checkpoint.describe`."""
        return checkpoint_file.describe(
            stored_elsewhere(self.target) or self.target, self.drafters, **given
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what rebuilds the networks, so that the file is enough by itself for decoding, or names its target."""
        data = self._data()
        given = (
            {"prompts": data.prompts(), "tokenizer": data.tokenizer}
            if isinstance(data, TokenData)
            else {}
        )
        checkpoint[checkpoint_file.KEY] = self.describe(recipe=self.recipe(), **given)
        if stored_elsewhere(self.target) is not None:
            weights = checkpoint["state_dict"].items()
            kept = {
                name: value
                for name, value in weights
                if not name.startswith(checkpoint_file.TARGET)
            }
            checkpoint["state_dict"] = kept

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the weights of a target that lies elsewhere: this one, which must be the same."""
        reference = checkpoint_file.reference_of(checkpoint)
        if reference is None:
            self.target.origin = None
            return
        reference.check(self.target, "the checkpoint")
        own = {
            checkpoint_file.TARGET + name: value for name, value in self.target.state_dict().items()
        }
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **own}

    def _data(self) -> Any:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if data is None:
            raise ValueError(
                f"{type(self).__name__} needs a data module: give one as `data`, or as `datamodule`"
            )
        return data
