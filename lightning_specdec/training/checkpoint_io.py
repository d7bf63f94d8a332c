"""Checkpoint files that are whole at every moment, and that cannot run code when they are opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_specdec import archive

VERSION_KEY = "pytorch-lightning_version"
"""What the Trainer wants to find in every checkpoint."""


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes beside the old file and swaps the two in one step; reads tensors and plain values only.

    Theory: within one directory a rename replaces a file as a whole or not at all, so a run that is killed at any
    moment leaves the checkpoint of before or the one after, never half of one. A temporary file elsewhere, as
    Lightning writes it, is copied over the old one wherever it lies on another file system. Each write has a temporary
    name of its own, so that two runs into one directory never write into the same file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[Path] = set()
        """The files of this run."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes local files: it takes no storage_options")
        archive.write(path, checkpoint)
        self.written.add(Path(path).resolve())

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        content = torch.load(path, map_location=map_location or "cpu", weights_only=True)
        # A checkpoint exported for decoding holds no trainer's state; its models can be validated all the same.
        return {VERSION_KEY: lightning.__version__, **content}

    def remove_checkpoint(self, path: str | Path) -> None:
        # The path may come from a resumed checkpoint, which may be a stranger's: delete only what this run has written.
        if Path(path).resolve() in self.written:
            Path(path).unlink(missing_ok=True)
