"""What a run shows and leaves behind: a progress bar, a histogram, a row of the HParams tab, a file of predictions."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn

from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.terminal import say
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.round_metrics import SpeculationCounts


def speculative(module: LightningModule) -> SpeculativeTraining:
    """The module, if it is one whose metrics these callbacks can read."""
    if not isinstance(module, SpeculativeTraining):
        raise ValueError(
            f"this callback reads the metrics of a SpeculativeTraining, got a {type(module).__name__}: remove it"
        )
    return module


class RunProgressBar(ProgressBar):
    """One bar for the whole run, with the newest losses beside it, on stderr.

    Where stderr is no terminal it prints a line's worth every ten seconds, so that logs stay short.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Tqdm | None = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        self._bar = Tqdm(
            total=None if math.isinf(steps) else int(steps),
            initial=trainer.global_step,
            unit="step",
            disable=not self._enabled,
            dynamic_ncols=True,
            file=sys.stderr,
            mininterval=0.1 if sys.stderr.isatty() else 10,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
            self._bar.set_description_str(f"epoch {trainer.current_epoch + 1}{last}", refresh=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None:
            self._bar.update()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            metrics = self.get_metrics(trainer, pl_module)
            metrics.pop("v_num", None)
            self._bar.set_postfix({name.partition("/")[2]: value for name, value in metrics.items()}, refresh=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class AcceptedPerRound(Callback):
    """Shows in TensorBoard how many guesses the rounds keep, as histograms that move with the epochs.

    Theory: a mean hides why a draft saves little. Mass at 0 means that it is often wrong at once; mass at
    `num_draft_tokens` means that a longer window would save more. Under rejection sampling the counts are expected
    values, so they need not be whole numbers. Tags: `val/accepted_per_round`, `val/sampling_accepted_per_round`.
    """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = speculative(pl_module).val_metrics
        # Every process takes part in the sum, one writes.
        counts = {
            "accepted_per_round": metrics.greedy.compute(),
            "sampling_accepted_per_round": metrics.sampling.compute(),
        }
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                for name, each in counts.items():
                    self._add(logger, f"val/{name}", each, trainer.global_step)

    def _add(self, logger: TensorBoardLogger, tag: str, counts: SpeculationCounts, step: int) -> None:
        rounds = counts.accepted_per_round.double().cpu()
        kept = range(len(rounds))
        logger.experiment.add_histogram_raw(
            tag,
            min=0,
            max=len(rounds) - 1,
            num=float(rounds.sum()),
            sum=float(sum(n * rounds[n] for n in kept)),
            sum_squares=float(sum(n * n * rounds[n] for n in kept)),
            bucket_limits=[n + 0.5 for n in kept],
            bucket_counts=rounds.tolist(),
            global_step=step,
        )


class HyperparameterTable(Callback):
    """Fills TensorBoard's HParams tab: one row for each run, what it was given and what it reached.

    Theory: the tab shows the metrics that were announced when the run began, each by the last value of its scalar. So
    the scalars are announced as `hp/...` at the start and written after every validation.

    Args:
        metrics: names of validation metrics, without `val/`.
    """

    def __init__(
        self, metrics: Sequence[str] = ("draft_loss", "target_loss", "acceptance_rate", "block_efficiency")
    ) -> None:
        self.metrics = list(metrics)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        module = speculative(pl_module)
        recipe = module.recipe()
        given = {**module.settings(), "data": recipe["data"]}
        for name, values in (
            ("data", recipe["data_arguments"]),
            ("draft", module.drafter.arguments()),
            ("target", module.target.arguments()),
        ):
            given |= _flat(name, values)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(given, {f"hp/{name}": 0.0 for name in self.metrics})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        reached = {f"hp/{name}": float(trainer.callback_metrics[f"val/{name}"]) for name in self.metrics}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_metrics(reached, trainer.global_step)


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as one level of names; those of a model within stand beside the others."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = value.arguments() if isinstance(value, LanguageModel | Drafter) else value
        if isinstance(inner, Mapping):
            flat |= _flat(prefix if name == "model" else f"{prefix}/{name}", inner)
        elif isinstance(inner, str | int | float):
            flat[f"{prefix}/{name}"] = inner
        elif inner is not None:
            flat[f"{prefix}/{name}"] = str(inner)
    return flat


class JsonLinesWriter(BasePredictionWriter):
    """Writes predictions as JSON lines, one for each prompt, in the order of the prompts.

    Theory: several processes share the prompts out between them. Each writes its own part; when all have arrived at the
    barrier, the first merges the parts by index and puts the file in its place in one step.

    Args:
        path: the file; an older one is replaced.
    """

    def __init__(self, path: str = "predictions.jsonl") -> None:
        super().__init__(write_interval="epoch")
        self.path = path

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        self._part(trainer.global_rank).parent.mkdir(parents=True, exist_ok=True)
        rows = [row for batch in predictions for row in batch]
        self._write(self._part(trainer.global_rank), rows)
        trainer.strategy.barrier("predictions are written")
        if trainer.is_global_zero:
            parts = [self._part(rank) for rank in range(trainer.world_size)]
            merged = {row["index"]: row for part in parts for row in map(json.loads, part.read_text().splitlines())}
            self._write(self._part(0), [merged[index] for index in sorted(merged)])
            os.replace(self._part(0), self.path)
            say(f"{len(merged)} predictions: {self.path}")
            for part in parts[1:]:
                part.unlink()

    def _part(self, rank: int) -> Path:
        return Path(self.path).with_name(f".{Path(self.path).name}.{rank}")

    def _write(self, path: Path, rows: Sequence[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
