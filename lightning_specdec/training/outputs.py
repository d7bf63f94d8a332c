"""Where a run's checkpoints will lie, and what of earlier runs they take the place of."""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_specdec.terminal import say


class ReplacedCheckpoints(Callback):
    """Says that a new run takes the place of an earlier one's checkpoints, once nothing can refuse it any more."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path or not trainer.is_global_zero:
            return
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath and callback.filename == "last":
                if (Path(callback.dirpath) / f"last{callback.FILE_EXTENSION}").is_file():
                    note = "replaces the checkpoints of an earlier run (--ckpt_path last would go on with it)"
                    say(f"note: {note}: {seen_from_here(callback.dirpath)}", file=sys.stderr)


def check_source(trainer: Trainer, source: str) -> None:
    """Raise ValueError where a run would write over the checkpoint that it takes its target from."""
    path = Path(source).resolve()
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or not callback.dirpath:
            continue
        names = [callback.filename or "{epoch}-{step}"]
        names += [callback.CHECKPOINT_NAME_LAST] if callback.save_last else []
        patterns = [re.sub(r"\{[^}]*\}", "*", name) + callback.FILE_EXTENSION for name in names]
        folder = escape(str(Path(callback.dirpath).resolve()))
        # Names may have folders in them, which stand below the callback's own.
        if any(fnmatchcase(str(path), f"{folder}/{pattern}") for pattern in patterns):
            raise ValueError(
                f"the run would write over {source}, which it takes its target from: run it in another directory, "
                "give its ModelCheckpoint another dirpath, or copy that checkpoint elsewhere first"
            )


def seen_from_here(path: str | Path) -> str:
    """The path as seen from the current directory, where it is below that."""
    here, whole = Path.cwd(), Path(path).absolute()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)
