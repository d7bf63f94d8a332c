"""What a run shows and leaves behind: a progress bar, TensorBoard's curves, histograms and HParams."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn

from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.metrics import SAMPLINGS
from lightning_specdec.training.optimizers import time_share


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


class TensorBoardCurves(TensorBoardLogger):
    """A `TensorBoardLogger` whose first groups are `train` and `val`: the epoch is `train/epoch`, and there is no
    metric that nobody measured."""

    def __init__(self, save_dir: str = "logs", name: str = "runs") -> None:
        super().__init__(save_dir, name, default_hp_metric=False)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(
            {"train/epoch" if name == "epoch" else name: metrics[name] for name in metrics}, step
        )


def progress_bar(total: int | None, unit: str, *, initial: int = 0, shown: bool = True) -> Tqdm:
    """A bar on stderr; where that is no terminal it prints a line every ten seconds."""
    return Tqdm(
        total=total,
        initial=initial,
        unit=unit,
        disable=not shown,
        dynamic_ncols=True,
        smoothing=0,  # the time left is by the average so far, validations included
        file=sys.stderr,
        mininterval=0.1 if sys.stderr.isatty() else 10,
        bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} {elapsed}<{remaining}{postfix}",
    )


class RunProgressBar(ProgressBar):
    """One bar for the whole run of `fit` or `generate`: time left, the newest losses, and tokens per second.

    A module that reports its own progress, as `GenerateText`, has the attributes `num_rows` and `watch`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Tqdm | None = None
        self._num_tokens: Any = 0  # a tensor on the device once there is one
        self._seconds, self._began, self._shown = 0.0, 0.0, -math.inf

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        total = None if math.isinf(steps) else int(steps)
        self._bar = progress_bar(total, "step", initial=trainer.global_step, shown=self._enabled)
        self._num_tokens, self._seconds, self._shown = 0, 0.0, -math.inf

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if isinstance(lengths := getattr(batch, "lengths", None), torch.Tensor):
            self._num_tokens, self._seconds = (
                self._num_tokens + lengths.sum(),
                self._seconds + now - self._began,
            )
        if self._bar is None or self._bar.disable:
            return
        if now - self._shown >= self._bar.mininterval:  # reading a loss waits for the device
            self._shown = now
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            self._show_metrics(trainer, pl_module, loss)
        if timed := time_share(trainer):  # the steps that the time is enough for
            self._bar.total = max(trainer.global_step, round(trainer.global_step / timed))
        self._bar.update(trainer.global_step - self._bar.n)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_metrics(trainer, pl_module)

    def _show_metrics(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor | None = None
    ) -> None:
        if self._bar is None or self._bar.disable:
            return
        metrics = {
            name.partition("/")[2]: value
            for name, value in self.get_metrics(trainer, pl_module).items()
            if "/" in name
        }
        if loss is not None:
            metrics["loss"] = float(loss) * trainer.accumulate_grad_batches
        if self._seconds:
            metrics["tokens/s"] = f"{float(self._num_tokens) / self._seconds:,.0f}"
        self._bar.set_postfix(metrics, refresh=False)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if not hasattr(module, "watch"):
            return
        bar = self._bar = progress_bar(module.num_rows, "row", shown=self._enabled)
        began, num_tokens = time.perf_counter(), 0

        def watch(num_new_tokens: int, num_ended: int) -> None:
            nonlocal num_tokens
            num_tokens += num_new_tokens
            bar.set_postfix_str(
                f"{num_tokens / (time.perf_counter() - began):,.0f} tokens/s", refresh=False
            )
            bar.update(num_ended)

        module.watch = watch

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    on_predict_end = on_exception = teardown  # a bar ends before the run's last line


class SaveNewest(Callback):
    """Saves the newest state after the first step and then every so many seconds, and before validations, which may be
    long: a run that is killed loses no more.

    Args:
        checkpoints: the run's `ModelCheckpoint`s that keep its newest state.
        seconds: between two checkpoints.
    """

    def __init__(self, checkpoints: Sequence[ModelCheckpoint], seconds: float) -> None:
        self.checkpoints, self.seconds = list(checkpoints), seconds
        self._saved = -math.inf

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return  # resumed from there, Lightning skips the validation and the end of the epoch, which save too
        if trainer.strategy.broadcast(time.monotonic() - self._saved >= self.seconds):
            self._save(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fits and trainer.strategy.broadcast(time.monotonic() - self._saved >= self.seconds / 4):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        # Lightning resumes a validation that has begun a batch, and skips one that has not.
        validated: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
        validated.ready = validated.started = validated.completed + 1
        try:
            for each in self.checkpoints:
                trainer.save_checkpoint(
                    Path(str(each.dirpath)) / f"{each.filename}.ckpt", weights_only=False
                )
        finally:
            validated.ready = validated.started = validated.completed
        self._saved = time.monotonic()


class AcceptedPerRound(Callback):
    """Shows in TensorBoard how many draft tokens the rounds accept, as histograms that move with the epochs.

    Mass at 0: the draft is often wrong at once. Mass at `num_draft_tokens`: a longer window would save more. Tags:
    `val/accepted_per_round`, `val/sampling_accepted_per_round` (expected counts, not whole numbers).
    """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = cast("SpeculativeTraining", pl_module).metrics
        for prefix in SAMPLINGS:
            # Every process takes part in the sum, one writes.
            rounds = metrics.of(prefix).compute()["accepted_per_round"].double().cpu()
            if trainer.sanity_checking or not trainer.is_global_zero:
                continue
            kept = torch.arange(len(rounds))
            for logger in tensorboards(trainer):
                logger.experiment.add_histogram_raw(
                    f"val/{prefix}accepted_per_round",
                    min=0,
                    max=len(rounds) - 1,
                    num=float(rounds.sum()),
                    sum=float((kept * rounds).sum()),
                    sum_squares=float((kept * kept * rounds).sum()),
                    bucket_limits=(kept + 0.5).tolist(),
                    bucket_counts=rounds.tolist(),
                    global_step=trainer.global_step,
                )


class HyperparameterTable(Callback):
    """Fills TensorBoard's HParams tab: one row for each run, with its arguments and the newest validation metrics.

    The row is announced at the first validation and shows the `val/...` scalars themselves, so a run that was stopped
    before has none, and nothing is shown that was not reached.
    """

    metrics = ("loss", "draft_loss", "target_loss", "acceptance_rate", "block_efficiency")

    def __init__(self) -> None:
        self._announced = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._announced or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        from torch.utils.tensorboard.summary import hparams

        self._announced = True
        module = cast("SpeculativeTraining", pl_module)
        recipe, networks = module.recipe(), module.describe()
        given = _flat({**module.settings(), "data": recipe["data"], **recipe["data_arguments"]})
        given |= {**_flat(networks["drafter"], "draft"), **_flat(networks["target"], "target")}
        names = (f"val/{name}" for name in self.metrics)
        reached = {
            name: float(value)
            for name in names
            if (value := trainer.callback_metrics.get(name)) is not None
        }
        for logger in tensorboards(trainer) if trainer.is_global_zero else ():
            logger.hparams.update(given)
            for summary in hparams(given, reached):
                logger.experiment._get_file_writer().add_summary(summary)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested arguments as one level of names, with values that TensorBoard takes."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        place = prefix if name in ("arguments", "model") else f"{prefix}/{name}".strip("/")
        if isinstance(value, Mapping):
            flat |= _flat(value, place)
        elif isinstance(value, list | tuple) and len(value) > 16:  # such as a draft's vocabulary
            flat[place] = f"{len(value)} entries"
        elif value is not None:
            flat[place] = value if isinstance(value, str | int | float) else str(value)
    return flat
