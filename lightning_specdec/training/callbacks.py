"""What a run shows and saves: a progress bar, TensorBoard's curves, and the newest checkpoint."""

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
from lightning.pytorch.utilities import rank_zero_only

from lightning_specdec.config.activity import Activity, show_activity
from lightning_specdec.config.terminal import note_output, say
from lightning_specdec.training.accumulation import rewind_to_step
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.chart_descriptions import describe_chart
from lightning_specdec.training.metrics import SAMPLINGS
from lightning_specdec.training.optimizers import time_share

LINE_SECONDS = 10.0
"""Time between two lines of a progress bar outside a terminal."""
_LONGEST_LIST = 16
"""Lists with more entries, such as a draft's vocabulary, are summarized in the HParams tab."""


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def logged_step(trainer: Trainer) -> int:
    """The step at which Lightning logs a validation's scalars: the last optimizer step, from 0.

    A run that resumes after this validation removes only the events of later steps.
    """
    return max(0, trainer.global_step - 1)


class TensorBoardCurves(TensorBoardLogger):
    """A `TensorBoardLogger` whose tags begin with `train` or `val`.

    The epoch is logged as `train/epoch`, the HParams tab has no placeholder metric, the tab of
    custom scalars has one chart for all losses, and each chart says what it shows.
    """

    def __init__(self, save_dir: str = "logs", name: str = "runs") -> None:
        super().__init__(save_dir, name, default_hp_metric=False)
        self._has_layout = False
        self._described: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        renamed = dict(metrics)
        if "epoch" in renamed:
            renamed["train/epoch"] = renamed.pop("epoch")
        for tag, value in list(renamed.items()):
            # A mapping becomes several curves in one chart, which takes no description.
            if tag not in self._described and not isinstance(value, Mapping):
                self._log_described(tag, float(renamed.pop(tag)), step)
        super().log_metrics(renamed, step)
        if not self._has_layout:
            # One chart for the losses of target and drafts, in the tab of custom scalars.
            self._has_layout = True
            layout = {
                split: {"losses": ["Multiline", [f"{split}/.*loss"]]} for split in ("train", "val")
            }
            self.experiment.add_custom_scalars(layout)

    @rank_zero_only
    def _log_described(self, tag: str, value: float, step: int | None) -> None:
        """Log the first value of a chart with its description, which TensorBoard takes from it."""
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary
        from tensorboard.plugins.scalar.metadata import create_summary_metadata

        self._described.add(tag)
        # TensorBoard's data server drops the description of a value that states no class.
        metadata = create_summary_metadata(display_name="", description=describe_chart(tag))
        metadata.data_class = DATA_CLASS_SCALAR
        described_value = Summary.Value(tag=tag, simple_value=value, metadata=metadata)
        writer = self.experiment._get_file_writer()
        writer.add_summary(Summary(value=[described_value]), step)


class Lines:
    """A stream in the place of stderr that prints each state of a bar as a line.

    A bar returns to the start of its line, which only a terminal can do.
    """

    def __init__(self) -> None:
        self._last_line = ""

    def write(self, text: str) -> None:
        line = text.strip()
        if line and line != self._last_line:
            self._last_line = line
            say(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Lines are flushed when they are printed."""


def progress_bar(total: int | None, unit: str, *, initial: int = 0, shown: bool = True) -> Tqdm:
    """A bar on stderr; if stderr is no terminal, it prints a line every ten seconds."""
    is_terminal = sys.stderr.isatty()
    bar = "|{bar}|" if is_terminal else ""
    return Tqdm(
        total=total,
        initial=initial,
        unit=unit,
        disable=not shown,
        dynamic_ncols=True,
        smoothing=0,  # estimate the time left from the whole run, validations included
        file=sys.stderr if is_terminal else Lines(),
        mininterval=0.1 if is_terminal else LINE_SECONDS,
        bar_format=(
            f"{{desc}} {{percentage:3.0f}}%{bar} {{n_fmt}}/{{total_fmt}} {{unit}} "
            "{elapsed}<{remaining}{postfix}"
        ),
    )


class RunProgressBar(ProgressBar):
    """One bar for the whole run of `fit` or `generate`.

    It shows the time left, the newest losses, and tokens per second.

    A module that reports its own progress, such as `GenerateText`, has the attributes `num_rows`
    and `watch`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Tqdm | None = None
        # The count becomes a tensor on the device, so that counting does not wait for the device.
        self._num_tokens: Any = 0
        self._training_seconds = 0.0
        self._batch_start = 0.0
        self._last_refresh = -math.inf

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_steps = trainer.estimated_stepping_batches
        total = None if math.isinf(num_steps) else int(num_steps)
        self._bar = progress_bar(total, "step", initial=trainer.global_step, shown=self._enabled)
        self._num_tokens = 0
        self._training_seconds = 0.0
        self._last_refresh = -math.inf

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batch_start = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        now = time.perf_counter()
        lengths = getattr(batch, "lengths", None)
        if isinstance(lengths, torch.Tensor):
            self._num_tokens = self._num_tokens + lengths.sum()
            self._training_seconds += now - self._batch_start
        if self._bar is None or self._bar.disable:
            return

        if now - self._last_refresh >= self._bar.mininterval:
            # Reading a loss waits for the device, so metrics are read no more often than they are
            # shown.
            self._last_refresh = now
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            if trainer.accumulate_grad_batches > 1:
                loss = None  # a part of the step's loss, which the module logs
            self._show_metrics(trainer, pl_module, loss)

        time_used = time_share(trainer)
        if time_used:
            # Extrapolate the number of steps that the run has time for.
            self._bar.total = max(trainer.global_step, round(trainer.global_step / time_used))
        is_printed = self._bar.update(trainer.global_step - self._bar.n)
        if is_printed:
            note_output()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_metrics(trainer, pl_module)

    def _show_metrics(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        loss: torch.Tensor | None = None,
    ) -> None:
        if self._bar is None or self._bar.disable:
            return
        metrics = {}
        for tag, value in self.get_metrics(trainer, pl_module).items():
            _, separator, name = tag.partition("/")
            if separator:
                metrics[name] = value
        if loss is not None:
            metrics["loss"] = float(loss)
        if self._training_seconds:
            tokens_per_second = float(self._num_tokens) / self._training_seconds
            metrics["tokens/s"] = f"{tokens_per_second:,.0f}"
        self._bar.set_postfix(metrics, refresh=False)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if not hasattr(module, "watch"):
            return
        bar = progress_bar(module.num_rows, "row", shown=self._enabled)
        self._bar = bar
        start = time.perf_counter()
        num_tokens = 0

        def watch(num_new_tokens: int, num_finished_rows: int) -> None:
            nonlocal num_tokens
            num_tokens += num_new_tokens
            tokens_per_second = num_tokens / (time.perf_counter() - start)
            bar.set_postfix_str(f"{tokens_per_second:,.0f} tokens/s", refresh=False)
            bar.update(num_finished_rows)

        module.watch = watch

    def _close(self) -> None:
        """End the bar before the run prints its last line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        exception: BaseException,
    ) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()


class ShowActivity(Callback):
    """Tells the command line's reporter what a run does while no progress bar shows it."""

    def __init__(self) -> None:
        self._activity: Activity | None = None

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        show_activity("measuring how long a validation takes")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        has_bar = trainer.progress_bar_callback is not None
        # The lines of the bar are enough while they come.
        show_activity(
            "training",
            is_shown_elsewhere=has_bar,
            report_seconds=2 * LINE_SECONDS if has_bar else None,
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        show_activity("finishing")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        show_activity("generating", is_shown_elsewhere=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.should_stop:
            show_activity("the last validation")
        self._begin("validating", trainer.num_val_batches)

    def on_validation_batch_end(self, *args: Any) -> None:
        self._advance()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("testing", trainer.num_test_batches)

    def on_test_batch_end(self, *args: Any) -> None:
        self._advance()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        exception: BaseException,
    ) -> None:
        self._end()

    def _begin(self, text: str, num_batches: Sequence[int | float]) -> None:
        total = sum(num_batches)
        self._activity = Activity(text, None if math.isinf(total) else int(total), unit="batches")
        self._activity.__enter__()

    def _advance(self) -> None:
        if self._activity is None:
            return
        self._activity.advance()
        if self._activity.num_done == self._activity.total:
            # What follows is not about batches: callbacks decode, and checkpoints are written.
            self._end()

    def _end(self) -> None:
        if self._activity is not None:
            self._activity.__exit__(None, None, None)
            self._activity = None


class SaveNewest(Callback):
    """Saves the newest state after the first step, then at intervals, and before validations.

    A validation may take long. A run that is killed loses no more than one interval.

    Args:
        checkpoints: the run's `ModelCheckpoint`s that keep its newest state.
        seconds: time between two checkpoints.
    """

    def __init__(self, checkpoints: Sequence[ModelCheckpoint], seconds: float) -> None:
        self.checkpoints = list(checkpoints)
        self.seconds = seconds
        self._last_save = -math.inf
        self._is_saving = False
        self._is_validating = False
        self._save_on_exception = [checkpoint.save_on_exception for checkpoint in self.checkpoints]

    def on_before_optimizer_step(self, *args: Any) -> None:
        # Until the Trainer has counted the step, an interrupted run must not save: the weights may
        # have changed already, and the resumed run would repeat the step.
        for checkpoint in self.checkpoints:
            checkpoint.save_on_exception = False

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        for checkpoint, is_enabled in zip(self.checkpoints, self._save_on_exception, strict=True):
            checkpoint.save_on_exception = is_enabled
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            # The end of the epoch saves too. A run that resumed from here would skip the
            # validation.
            return
        if self._is_due(trainer, self.seconds):
            self._save(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        self._is_validating = is_training
        if is_training and self._is_due(trainer, self.seconds / 4):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_validating = False

    def on_save_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        # Without a mark, Lightning would skip a validation that has not begun a batch.
        is_validation_open = self._is_saving or self._is_validating
        rewind_to_step(checkpoint, trainer, is_validation_open=is_validation_open)

    def _is_due(self, trainer: Trainer, interval: float) -> bool:
        """Whether the last save is that many seconds ago, by the clock of the first process."""
        is_due = time.monotonic() - self._last_save >= interval
        return bool(trainer.strategy.broadcast(is_due))

    def _save(self, trainer: Trainer) -> None:
        self._is_saving = True
        try:
            for checkpoint in self.checkpoints:
                path = Path(str(checkpoint.dirpath)) / f"{checkpoint.filename}.ckpt"
                trainer.save_checkpoint(path, weights_only=False)
        finally:
            self._is_saving = False
        self._last_save = time.monotonic()


class AcceptedPerRound(Callback):
    """Logs how many draft tokens the rounds accept, as histograms that change over the epochs.

    Mass at 0: the first draft token is often wrong. Mass at `num_draft_tokens`: more draft tokens
    would save more. Tags: `val/accepted_per_round`, `val/sampling_accepted_per_round` (expected
    counts, not whole numbers).
    """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = cast("SpeculativeTraining", pl_module).metrics
        for prefix in SAMPLINGS:
            # All processes take part in the sum, and the first one writes.
            rounds = metrics.of(prefix).compute()["accepted_per_round"].double().cpu()
            if trainer.sanity_checking or not trainer.is_global_zero:
                continue
            num_accepted = torch.arange(len(rounds))
            for logger in tensorboards(trainer):
                logger.experiment.add_histogram_raw(
                    f"val/{prefix}accepted_per_round",
                    min=0,
                    max=len(rounds) - 1,
                    num=float(rounds.sum()),
                    sum=float((num_accepted * rounds).sum()),
                    sum_squares=float((num_accepted * num_accepted * rounds).sum()),
                    bucket_limits=(num_accepted + 0.5).tolist(),
                    bucket_counts=rounds.tolist(),
                    global_step=logged_step(trainer),
                )


class HyperparameterTable(Callback):
    """Fills TensorBoard's HParams tab: a row per run with its arguments and validation metrics.

    The row is written at the first validation and shows the `val/...` scalars themselves. So a run
    that stopped before has no row, and no metric is shown that was not measured.
    """

    metrics = ("loss", "draft_loss", "target_loss", "acceptance_rate", "block_efficiency")

    def __init__(self) -> None:
        self._is_written = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_written or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._is_written = True
        arguments = self._arguments(cast("SpeculativeTraining", pl_module))
        reached = {}
        for name in self.metrics:
            value = trainer.callback_metrics.get(f"val/{name}")
            if value is not None:
                reached[f"val/{name}"] = float(value)
        if trainer.is_global_zero:
            for logger in tensorboards(trainer):
                _write_row(logger, arguments, reached)

    def _arguments(self, module: SpeculativeTraining) -> dict[str, Any]:
        """The arguments of the training, its data and its networks, on one level."""
        recipe = module.training_record()
        networks = module.describe()
        training_arguments = {
            **module.settings(),
            "data": recipe["data"],
            **recipe["data_arguments"],
        }
        return {
            **_flat(training_arguments),
            **_flat(networks["drafter"], "draft"),
            **_flat(networks["target"], "target"),
        }


def _write_row(
    logger: TensorBoardLogger,
    arguments: dict[str, Any],
    metrics: dict[str, float],
) -> None:
    """Write a row of the HParams tab, which refers to metrics by name.

    `TensorBoardLogger.log_hyperparams` would also log the metrics as scalars, a second time.
    """
    from torch.utils.tensorboard.summary import hparams

    logger.hparams.update(arguments)
    for summary in hparams(arguments, metrics):
        logger.experiment._get_file_writer().add_summary(summary)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested arguments as one level of names, with values that TensorBoard accepts."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        # `arguments` and `model` only group what is below them.
        tag = prefix if name in ("arguments", "model") else f"{prefix}/{name}".strip("/")
        if isinstance(value, Mapping):
            flat.update(_flat(value, tag))
        elif isinstance(value, list | tuple) and len(value) > _LONGEST_LIST:
            flat[tag] = f"{len(value)} entries"
        elif isinstance(value, str | int | float):
            flat[tag] = value
        elif value is not None:
            flat[tag] = str(value)
    return flat
