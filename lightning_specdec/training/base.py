"""What every training of a target and its drafters shares: data, optimizer, metrics, predictions, checkpoints.

Shapes: B rows, T tokens, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_specdec.checkpoints import checkpoint as checkpoint_file
from lightning_specdec.checkpoints.target_reference import forget_origin
from lightning_specdec.config.checks import require_int, require_number
from lightning_specdec.data import Batch, TokenData
from lightning_specdec.data.base import plain_arguments
from lightning_specdec.decoding import speculative_decode
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.metrics import RoundMetrics
from lightning_specdec.training.target_outputs import stored_elsewhere


class SpeculativeTraining(LightningModule, ABC):
    """Trains a target, its drafters, or both, and measures what they save together.

    A subclass builds its drafter, says what is measured of a batch (`measure`) and what is minimized
    (`training_step`). The data are a `TokenData`, or any data module whose batches hold `tokens` and maybe `lengths`.

    Args:
        target: the model whose output is wanted.
        drafters: drafters for it; of several, by name, the first is the one that predicts.
        learning_rate: of AdamW.
        weight_decay: of AdamW, for all weights.
        num_draft_tokens: draft tokens of a round, for the metrics and for predictions.
        max_new_tokens: new tokens of each prediction.

    Attributes:
        first_round: whether there are draft tokens before the target has read anything.
        drafter: the one that predicts.
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
        max_new_tokens: int = 7,
    ) -> None:
        super().__init__()
        self.learning_rate = require_number("learning_rate", learning_rate, low=0.0, low_open=True)
        self.weight_decay = require_number("weight_decay", weight_decay, low=0.0)
        self.num_draft_tokens = require_int("num_draft_tokens", num_draft_tokens, 1)
        self.max_new_tokens = require_int("max_new_tokens", max_new_tokens, 1)
        named = {checkpoint_file.MAIN: drafters} if isinstance(drafters, Drafter) else dict(drafters)
        for drafter in named.values():
            drafter.check_target(target)
        self.draft_name = next(iter(named))
        self.target = target
        self.drafter = named.pop(self.draft_name)
        self.others = nn.ModuleDict(named)
        self.measured: frozenset[str] = frozenset()
        self.val_metrics = self.new_metrics()
        self.test_metrics = self.new_metrics()

    @abstractmethod
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch; `log_losses` shows its parts."""

    @abstractmethod
    def new_metrics(self) -> RoundMetrics:
        """What one split of the data is measured with; called when target and drafters are there."""

    @abstractmethod
    def measure(self, metrics: RoundMetrics, batch: Batch, split: str) -> None:
        """Count one batch of a split of the data."""

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments that are plain values, for the record."""
        return {name: value for name, value in plain_arguments(self).items() if name != "main"}

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the newest loss, within the epoch."""
        if isinstance(outputs, Mapping) and "loss" in outputs:  # divided by Lightning for accumulated gradients
            loss = outputs["loss"].detach() * self.trainer.accumulate_grad_batches
            self.log("train/loss", loss, on_step=True, on_epoch=False, prog_bar=True)

    def log_losses(self, losses: Mapping[str, Tensor], num_tokens: int | Tensor, *, prog_bar: bool = True) -> None:
        """Log losses as `train/NAME`: each epoch's mean over tokens."""
        named = {f"train/{name}": value for name, value in losses.items()}
        size = int(num_tokens)
        self.log_dict(named, on_step=False, on_epoch=True, prog_bar=prog_bar, sync_dist=True, batch_size=size)

    def setup(self, stage: str) -> None:
        data = self._data()
        self.check_data(data)
        if not isinstance(data, TokenData):  # take the batches of any data module
            transferred = data.on_after_batch_transfer
            data.on_after_batch_transfer = lambda batch, index: Batch.of(transferred(batch, index))

    def check_data(self, data: Any) -> None:
        """Raise ValueError for data that these networks cannot learn, or whose prompts they could not continue."""
        if not isinstance(data, TokenData):
            return
        if data.vocab_size > self.target.vocab_size:
            raise ValueError(
                f"the data have a vocabulary of {data.vocab_size} tokens, the models one of {self.target.vocab_size}: "
                "give both the same vocab_size"
            )
        longest = max(map(len, data.prompts()))
        total = longest + self.max_new_tokens
        # The main one last: where it is made of the others, the message names the one at fault.
        names = {name: "draft" if name == checkpoint_file.MAIN else f"draft {name}" for name in self.drafters}
        readers: dict[str, LanguageModel | Drafter] = {"target": self.target}
        readers |= {names[name]: each for name, each in reversed(self.drafters.items())}
        for name, reader in readers.items():
            context = reader.max_positions
            if context is not None and max(data.max_length, total) > context:
                raise ValueError(
                    f"sequences have {data.max_length} tokens, prompts with max_new_tokens {total}, and the {name} "
                    f"reads {context}: shorten them, or raise its max_position_embeddings"
                )

    def configure_optimizers(self) -> Any:
        # Fused: one launch for all weights, where the plain form takes about ten for each.
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.measure(self.val_metrics, batch, "val")

    def on_validation_epoch_start(self) -> None:
        self.val_metrics.reset()

    def on_validation_epoch_end(self) -> None:
        self._log_all("val", self.val_metrics, self.measured)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.measure(self.test_metrics, batch, "test")

    def on_test_epoch_start(self) -> None:
        self.test_metrics.reset()

    def on_test_epoch_end(self) -> None:
        self._log_all("test", self.test_metrics, frozenset())

    def _log_all(self, split: str, metrics: RoundMetrics, measured: frozenset[str]) -> None:
        values, data = metrics.compute(), self._data()
        if isinstance(data, TokenData) and (size := data.bytes_per_token(split)):
            for name, loss in list(values.items()):
                if name.endswith(("_loss", "/loss")):
                    values[f"{name.removesuffix('loss')}bits_per_byte"] = loss / math.log(2) / size
        named = {f"teacher_forced_{name}" if name in measured else name: value for name, value in values.items()}
        self.log_dict({f"{split}/{name}": value for name, value in named.items()}, sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """Continue each row's prompt speculatively; the output is the target's own, token for token."""
        with torch.autocast(self.device.type, enabled=False):  # as the checkpoint decodes
            result = speculative_decode(
                self.target,
                self.drafter,
                batch.prompts(),
                max_new_tokens=self.max_new_tokens,
                num_draft_tokens=self.num_draft_tokens,
            )
        rows = []
        place = (batch_idx * self.trainer.world_size + self.trainer.global_rank) * len(result.rows)
        for number, (index, row) in enumerate(zip(batch.indices.tolist(), result.rows, strict=True), place):
            values = {"index": number if index < 0 else index, "prompt": row.prompt, "tokens": row.tokens}
            values["num_rounds"] = row.num_rounds
            rows.append(values if row.counts is None else {**values, "num_accepted": row.counts.num_accepted})
        return rows

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
            "losses": {name: float(value) for name, value in metrics.items() if name.endswith("loss")},
        }

    @property
    def drafters(self) -> dict[str, Drafter]:
        """All drafters by name, the one that predicts first."""
        others = {name: each for name, each in self.others.items() if isinstance(each, Drafter)}
        return {self.draft_name: self.drafter, **others}

    def describe(
        self,
        *,
        prompts: Sequence[Sequence[int]] = (),
        recipe: dict[str, Any] | None = None,
        tokenizer: str | None = None,
    ) -> dict[str, Any]:
        """What rebuilds the networks: see `checkpoint.describe`."""
        target = stored_elsewhere(self.target) or self.target
        return checkpoint_file.describe(target, self.drafters, prompts=prompts, recipe=recipe, tokenizer=tokenizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what rebuilds the networks, so that the file is enough by itself for decoding, or names its target."""
        data, given = self._data(), {}
        if isinstance(data, TokenData):
            given = {"prompts": data.prompts(), "tokenizer": data.tokenizer}
        checkpoint[checkpoint_file.KEY] = self.describe(recipe=self.recipe(), **given)  # type: ignore[arg-type]
        if stored_elsewhere(self.target) is not None:
            weights = checkpoint["state_dict"].items()
            kept = {name: value for name, value in weights if not name.startswith(checkpoint_file.TARGET)}
            checkpoint["state_dict"] = kept

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the weights of a target that lies elsewhere: this one, which must be the same."""
        reference = checkpoint_file.reference_of(checkpoint)
        if reference is None:
            forget_origin(self.target)
            return
        reference.check(self.target, "the checkpoint")
        own = {checkpoint_file.TARGET + name: value for name, value in self.target.state_dict().items()}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **own}

    def _data(self) -> Any:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if data is None:
            raise ValueError(f"{type(self).__name__} needs a data module: give one as `data`, or as `datamodule`")
        return data
