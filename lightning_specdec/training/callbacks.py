"""What a run shows and leaves behind: a progress bar, TensorBoard's histograms and HParams, a file of predictions."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn

from lightning_specdec.config.terminal import say
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.base import SpeculativeTraining


def speculative(module: LightningModule) -> SpeculativeTraining:
    """The module, if it is one whose metrics these callbacks can read."""
    if not isinstance(module, SpeculativeTraining):
        raise ValueError(
            f"this callback reads the metrics of a SpeculativeTraining, got a {type(module).__name__}: remove it"
        )
    return module


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The run's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def progress_bar(total: int | None, unit: str, *, initial: int = 0, shown: bool = True) -> Tqdm:
    """A bar on stderr; where that is no terminal it prints a line every ten seconds."""
    return Tqdm(
        total=total,
        initial=initial,
        unit=unit,
        disable=not shown,
        dynamic_ncols=True,
        file=sys.stderr,
        mininterval=0.1 if sys.stderr.isatty() else 10,
        bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} {elapsed}<{remaining}{postfix}",
    )


class RunProgressBar(ProgressBar):
    """One bar for the whole run of `fit` or `generate`, with the newest losses or the tokens per second beside it.

    A module that reports its own progress, as `GenerateText`, has a method `progress` and an attribute `watch`.
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
        total = None if math.isinf(steps) else int(steps)
        self._bar = progress_bar(total, "step", initial=trainer.global_step, shown=self._enabled)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
            self._bar.set_description_str(f"epoch {trainer.current_epoch + 1}{last}", refresh=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None:
            self._bar.update(trainer.global_step - self._bar.n)
            # Reading a loss waits for the device.
            if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
                self._show_metrics(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_metrics(trainer, pl_module)

    def _show_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            metrics = self.get_metrics(trainer, pl_module)
            metrics.pop("v_num", None)
            self._bar.set_postfix({name.partition("/")[2]: value for name, value in metrics.items()}, refresh=False)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        if not hasattr(module, "progress"):
            return
        num_done, total = module.progress() if self._enabled else (0, 0)
        bar = self._bar = progress_bar(total, "row", initial=num_done, shown=self._enabled)
        began, num_tokens = time.perf_counter(), 0

        def watch(num_new_tokens: int, num_ended: int) -> None:
            nonlocal num_tokens
            num_tokens += num_new_tokens
            bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - began):,.0f} tokens/s", refresh=False)
            bar.update(num_ended)

        module.watch = watch

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()  # before the run's last line

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class AcceptedPerRound(Callback):
    """Shows in TensorBoard how many draft tokens the rounds accept, as histograms that move with the epochs.

    Mass at 0: the draft is often wrong at once. Mass at `num_draft_tokens`: a longer window would save more. Tags:
    `val/accepted_per_round`, `val/sampling_accepted_per_round` (expected counts, not whole numbers).
    """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = speculative(pl_module).val_metrics
        # Every process takes part in the sum, one writes.
        counts = {"accepted_per_round": metrics.greedy.compute()}
        counts["sampling_accepted_per_round"] = metrics.sampling.compute()
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        for name, each in counts.items():
            rounds = each.accepted_per_round.double().cpu()
            kept = range(len(rounds))
            for logger in tensorboards(trainer):
                logger.experiment.add_histogram_raw(
                    f"val/{name}",
                    min=0,
                    max=len(rounds) - 1,
                    num=float(rounds.sum()),
                    sum=float(sum(n * rounds[n] for n in kept)),
                    sum_squares=float(sum(n * n * rounds[n] for n in kept)),
                    bucket_limits=[n + 0.5 for n in kept],
                    bucket_counts=rounds.tolist(),
                    global_step=trainer.global_step,
                )


class HyperparameterTable(Callback):
    """Fills TensorBoard's HParams tab: one row for each run, with its arguments and the newest validation metrics.

    The row is announced at the first validation and shows the `val/...` scalars themselves, so a run that was stopped
    before has none, and nothing is shown that was not reached.

    Args:
        metrics: names of validation metrics, without `val/`.
    """

    def __init__(
        self, metrics: Sequence[str] = ("draft_loss", "target_loss", "acceptance_rate", "block_efficiency")
    ) -> None:
        self.metrics = list(metrics)
        self._announced = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._announced or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        from torch.utils.tensorboard.summary import hparams

        self._announced = True
        module = speculative(pl_module)
        recipe = module.recipe()
        given = {**module.settings(), "data": recipe["data"], **_flat("data", recipe["data_arguments"])}
        given |= {**_flat("draft", module.drafter.arguments()), **_flat("target", module.target.arguments())}
        plain = {name: value if isinstance(value, str | int | float) else str(value) for name, value in given.items()}
        reached = {f"val/{name}": float(trainer.callback_metrics[f"val/{name}"]) for name in self.metrics}
        for logger in tensorboards(trainer) if trainer.is_global_zero else ():
            logger.hparams.update(plain)
            for summary in hparams(plain, reached):
                logger.experiment._get_file_writer().add_summary(summary)


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as one level of names; those of a model within stand beside the others."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = value.arguments() if isinstance(value, LanguageModel | Drafter) else value
        if isinstance(inner, Mapping):
            flat |= _flat(prefix if name == "model" else f"{prefix}/{name}", inner)
        elif inner is not None:
            flat[f"{prefix}/{name}"] = inner
    return flat


class JsonLinesWriter(BasePredictionWriter):
    """Writes predictions as JSON lines, one for each prompt, in the order of the prompts.

    Of several processes each writes its own part; the first merges them by index and replaces the file in one step.

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
        whole = Path(self.path)
        parts = [whole.with_name(f".{whole.name}.{rank}") for rank in range(trainer.world_size)]
        own = parts[trainer.global_rank]
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text("".join(json.dumps(row) + "\n" for batch in predictions for row in batch))
        trainer.strategy.barrier("predictions are written")
        if trainer.is_global_zero:
            merged = {row["index"]: row for part in parts for row in map(json.loads, part.read_text().splitlines())}
            own.write_text("".join(json.dumps(merged[index]) + "\n" for index in sorted(merged)))
            os.replace(own, whole)
            say(f"{len(merged)} predictions: {self.path}")
            for part in parts[1:]:
                part.unlink()
