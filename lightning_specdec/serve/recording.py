"""What requests asked and what the model answered, kept as text that a draft can be trained on."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_specdec import __version__
from lightning_specdec.config.files import lock_directory
from lightning_specdec.data import corpus
from lightning_specdec.decoding import Request
from lightning_specdec.models import LanguageModel
from lightning_specdec.serve.engine import EngineObserver, Generation

log = logging.getLogger("lightning_specdec")

SHARD_TOKENS = 2**16
"""Tokens after which a shard is written."""
OWNER_ONLY = 0o077
"""The bits of a file's mode that let others than its owner in."""


class Recording(EngineObserver):
    """Writes requests and answers to a directory, in the format of `lightning_specdec generate`.

    A thread writes, so that decoding does not wait for the disk. When the directory is full, new
    text replaces the oldest.

    Args:
        directory: created if it is missing. A directory that others can read is refused.
        target: the model that answers.
        temperature: that of requests which name none.
        max_bytes: size of all shards together, in which there is room for one at least.

    Raises:
        ValueError: the directory holds another model's text, another server writes to it, or
            others can read it.
        OSError: it cannot be created.
    """

    def __init__(
        self,
        directory: Path,
        target: LanguageModel,
        *,
        temperature: float,
        max_bytes: int,
    ) -> None:
        self.directory = directory
        self._temperature = temperature
        bytes_per_token = 2 if target.vocab_size <= 2**16 else 4
        self._max_shards = max(1, max_bytes // (SHARD_TOKENS * bytes_per_token))

        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & OWNER_ONLY:
            raise ValueError(
                f"{directory} would hold what users write, and others can read it: "
                f"run `chmod 700 {directory}`, or name a directory that does not exist"
            )
        self._lock = lock_directory(
            directory, f"another server records to {directory}: name another one"
        )
        try:
            self._manifest = self._open(target)
        except BaseException:
            os.close(self._lock)
            raise

        # What the engine hands over; None ends the thread.
        self._answers: queue.SimpleQueue[corpus.GeneratedRow | None] = queue.SimpleQueue()
        # Rows that are not written yet, which only the thread uses.
        self._rows: list[corpus.GeneratedRow] = []
        self._num_tokens = 0
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def _open(self, target: LanguageModel) -> dict[str, Any]:
        """The manifest of the directory, which is the target's: a new one, or the one there."""
        new_manifest = _new_manifest(target)
        if not (self.directory / corpus.MANIFEST).exists():
            return new_manifest
        manifest = corpus.read_manifest(self.directory)
        for name in ("recorded", "vocab_size", "target", "tokenizer"):
            if manifest.get(name) != new_manifest[name]:
                raise ValueError(
                    f"{self.directory} holds other text (of another {name}): name another directory"
                )
        return manifest

    def answered(self, generation: Generation, row: Request) -> None:
        if not generation.may_record:
            return
        temperature = generation.changes.get("temperature", self._temperature)
        prompt = list(generation.prompt)
        self._answers.put(
            corpus.GeneratedRow(prompt, row.text[len(prompt) :], 0, float(temperature))
        )

    def close(self) -> None:
        """Write what is left, and let other servers write to the directory."""
        if not self._thread.is_alive():
            return
        self._answers.put(None)
        self._thread.join()
        os.close(self._lock)

    # The thread

    def _run(self) -> None:
        while True:
            answer = self._answers.get()
            if answer is None:
                self._write()
                return
            # Rows of one prompt share its number. Here each request counts as another prompt.
            prompt_number = self._manifest["num_prompts"] + len(self._rows)
            self._rows.append(answer._replace(prompt_number=prompt_number))
            self._num_tokens += len(answer.prompt) + len(answer.tokens)
            if self._num_tokens >= SHARD_TOKENS:
                self._write()

    def _write(self) -> None:
        """Write a shard and the manifest. A disk that is full loses the text, and no request."""
        rows = self._rows
        self._rows = []
        self._num_tokens = 0
        if not rows:
            return
        manifest = self._manifest
        number = manifest["next_shard"]
        try:
            corpus.write_shard(self.directory, number, rows, manifest["vocab_size"])
            corpus.shard_path(self.directory, number).chmod(0o600)
            manifest["num_prompts"] += len(rows)
            manifest["num_shards"] = max(manifest["num_shards"], number + 1)
            manifest["next_shard"] = (number + 1) % self._max_shards
            corpus.write_manifest(self.directory, manifest)
        except (OSError, ValueError) as error:
            log.warning("the records lost %d answers: %s", len(rows), error)


def _new_manifest(target: LanguageModel) -> dict[str, Any]:
    """What the text depends on, before any is written."""
    assert target.tokenizer is not None, "a server has text"
    origin = target.origin
    source: Mapping[str, Any] = {
        "source": None if origin is None else str(origin.path),
        "sha256": None if origin is None else origin.sha256,
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    return {
        "format": corpus.FORMAT,
        "recorded": True,
        "target": dict(source),
        "tokenizer": {
            "name": source["source"],
            "fingerprint": target.tokenizer.fingerprint,
        },
        "vocab_size": target.vocab_size,
        "num_prompts": 0,
        "num_shards": 0,
        "next_shard": 0,
        "versions": {"lightning_specdec": __version__, "torch": torch.__version__},
    }
