"""What every training of a target and what guesses for it shares: data, optimizer, metrics, predictions, checkpoints.

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

from lightning_specdec import checkpoint as checkpoint_file
from lightning_specdec.checks import require_int, require_number
from lightning_specdec.data import Batch, TokenData
from lightning_specdec.drafters import Drafter
from lightning_specdec.inference import speculative_decode
from lightning_specdec.models import LanguageModel
from lightning_specdec.target_reference import forget_origin
from lightning_specdec.training.given_target import stored_elsewhere
from lightning_specdec.training.metrics import RoundMetrics


class SpeculativeTraining(LightningModule, ABC):
    """Trains a target, what guesses for it, or both, and measures what they save together.

    A kind of training is a subclass that makes its drafter and hands it on with `target`, and says what is measured of
    a batch (`measure`) and what is minimized (`training_step`). One Adam takes all parameters that want gradients: it
    treats every weight by itself, so one for several losses is as many as there are losses, at the cost of one.

    Args:
        target: the model whose output is wanted.
        drafters: what guesses for it; of several, by name, the first is the one that predicts.
        learning_rate: of Adam.
        num_draft_tokens: guesses of a round, for the metrics and for predictions.
        max_new_tokens: new tokens of each prediction.

    Attributes:
        first_round: whether there are guesses before the target has read anything; without, the metrics count a first
            round that guesses nothing.
        drafter: the one that predicts.
        others: the other drafters, by name.
        measured: names of validation metrics that a callback measures by decoding. What is read off known texts then
            goes under `val/teacher_forced_NAME`, and the callback's figures have the plain names.
    """

    first_round: ClassVar[bool] = True

    def __init__(
        self,
        target: LanguageModel,
        drafters: Drafter | Mapping[str, Drafter],
        *,
        learning_rate: float = 0.001,
        num_draft_tokens: int = 3,
        max_new_tokens: int = 7,
    ) -> None:
        super().__init__()
        self.learning_rate = require_number("learning_rate", learning_rate, low=0.0, low_open=True)
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

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments that are plain values, for the record; a subclass adds its own."""
        return {
            "learning_rate": self.learning_rate,
            "num_draft_tokens": self.num_draft_tokens,
            "max_new_tokens": self.max_new_tokens,
        }

    @abstractmethod
    def new_metrics(self) -> RoundMetrics:
        """What one split of the data is measured with; called when target and drafters are there."""

    @abstractmethod
    def measure(self, metrics: RoundMetrics, batch: Batch, split: str) -> None:
        """Count one batch of a split of the data."""

    def log_losses(self, losses: Mapping[str, Tensor], num_tokens: int | Tensor, *, prog_bar: bool = True) -> None:
        """Show losses as `train/NAME`, each epoch's mean over tokens; those of the parts of a draft not in the bar."""
        named = {f"train/{name}": value for name, value in losses.items()}
        size = int(num_tokens)
        self.log_dict(named, on_step=False, on_epoch=True, prog_bar=prog_bar, sync_dist=True, batch_size=size)

    def setup(self, stage: str) -> None:
        self.check_data(self._data())

    def check_data(self, data: TokenData) -> None:
        """Raise ValueError for data that these networks cannot learn, or whose prompts they could not continue."""
        if data.vocab_size > self.target.vocab_size:
            raise ValueError(
                f"the data have a vocabulary of {data.vocab_size} tokens, the models one of {self.target.vocab_size}: "
                "give both the same vocab_size"
            )
        contexts = {"target": self.target.max_positions}
        # The main one last: where it is made of the others, the message names the one at fault.
        contexts |= {_called(name): drafter.max_positions for name, drafter in reversed(self.drafters.items())}
        longest = max(map(len, data.prompts()))
        total = longest + self.max_new_tokens
        for name, context in contexts.items():
            if context is not None and data.max_length > context:
                raise ValueError(
                    f"the data have sequences of {data.max_length} tokens, the {name} reads {context}: "
                    "shorten them, or raise its max_position_embeddings"
                )
            if context is not None and total > context:
                raise ValueError(
                    f"prompts of {longest} tokens and max_new_tokens {self.max_new_tokens} make {total}, the {name} "
                    f"reads {context}: lower prompt_length or max_new_tokens, or raise its max_position_embeddings"
                )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Fused: one launch for all weights, where the plain form takes about ten for each.
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=self.learning_rate, fused=True)

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
        values = metrics.compute()
        if size := self._data().bytes_per_token(split):
            bits = {
                name: loss / math.log(2) / size for name, loss in values.items() if name.endswith(("_loss", "/loss"))
            }
            values |= {f"{name.removesuffix('loss')}bits_per_byte": value for name, value in bits.items()}
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
        for index, row in zip(batch.indices.tolist(), result.rows, strict=True):
            values = {"index": index, "prompt": row.prompt, "tokens": row.tokens, "num_rounds": row.num_rounds}
            rows.append(values if row.counts is None else {**values, "num_accepted": row.counts.num_accepted})
        return rows

    def recipe(self) -> dict[str, Any]:
        """How this is being trained, in plain values: what it takes to do it again, and how far it has come."""
        data = self._data()
        shown = {name: float(value) for name, value in self.trainer.callback_metrics.items() if name.endswith("loss")}
        return {
            "training": type(self).__name__,
            **self.settings(),
            "data": type(data).__name__,
            "data_arguments": data.arguments(),
            "seed": int(seed) if (seed := os.environ.get("PL_GLOBAL_SEED")) else None,
            "epochs": self.trainer.fit_loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
            "steps": self.trainer.global_step,
            "losses": shown,
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
        others = {name: each for name, each in self.drafters.items() if name != self.draft_name}
        return checkpoint_file.describe(
            stored_elsewhere(self.target) or self.target,
            self.drafter,
            others=others,
            name=self.draft_name,
            prompts=prompts,
            recipe=recipe or {},
            tokenizer=tokenizer,
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what rebuilds the networks, so that the file is enough by itself for decoding, or names its target."""
        data = self._data()
        checkpoint[checkpoint_file.KEY] = self.describe(
            prompts=data.prompts(), recipe=self.recipe(), tokenizer=data.tokenizer
        )
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

    def _data(self) -> TokenData:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TokenData):
            raise ValueError(f"{type(self).__name__} needs a TokenData as its data, got {type(data).__name__}")
        return data


def _called(name: str) -> str:
    """A drafter's name as a message says it."""
    return "draft" if name == checkpoint_file.MAIN else f"draft {name}"
