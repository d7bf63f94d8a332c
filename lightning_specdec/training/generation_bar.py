"""How far a `generate` run has come: rows, tokens per second, time left."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_specdec.data.prompt_sources import PromptSource
from lightning_specdec.training.generate import GenerateText


class GenerationBar(ProgressBar):
    """One bar over the rows of the first process, those of an earlier run included, on stderr.

    Tokens per second are those of this process since it began. Where stderr is no terminal it prints a line's worth
    every thirty seconds, so that logs stay short.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Tqdm | None = None
        self._began = 0.0
        self._num_tokens = 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(pl_module, GenerateText) or not isinstance(data, PromptSource):
            raise ValueError(f"GenerationBar shows GenerateText at work, got a {type(pl_module).__name__}: remove it")
        own = data.shards[trainer.global_rank :: trainer.world_size]
        kinds = len(pl_module.temperatures)
        self._bar = Tqdm(
            total=kinds * sum(len(shard.prompts) for shard in own),
            initial=kinds * sum(len(shard.prompts) for shard in own if self._enabled and pl_module.is_there(shard)),
            unit="row",
            disable=not self._enabled,
            dynamic_ncols=True,
            file=sys.stderr,
            mininterval=0.2 if sys.stderr.isatty() else 30,
            bar_format="rows {n_fmt}/{total_fmt} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        )
        self._began, self._num_tokens = time.perf_counter(), 0
        pl_module.watch = self._watch

    def _watch(self, num_tokens: int, num_ended: int) -> None:
        self._num_tokens += num_tokens
        if self._bar is not None:
            rate = self._num_tokens / max(time.perf_counter() - self._began, 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            self._bar.update(num_ended)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()  # before the run's last line

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {}

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
