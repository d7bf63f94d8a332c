"""What requests asked and what the model answered, kept as text that a draft can be trained on."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
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
"""Tokens of a shard, after which the next one begins."""
WRITE_SECONDS = 30.0
"""Longest time until an answer is in a file, so that a draft can be trained while the server runs.
"""
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
        # Only the thread uses what follows: the rows of the present shard, how many of them its
        # file has, its number once it has a file, and the time at which the others are due.
        self._rows: list[corpus.GeneratedRow] = []
        self._num_written = 0
        self._num_tokens = 0
        self._shard: int | None = None
        self._due: float | None = None
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
            timeout = None
            if self._due is not None:
                timeout = max(0.0, self._due - time.monotonic())
            try:
                answer = self._answers.get(timeout=timeout)
            except queue.Empty:
                self._write()
                continue
            if answer is None:
                self._write()
                return
            self._add(answer)
            if self._num_tokens >= SHARD_TOKENS:
                self._write()
                self._begin_shard()

    def _add(self, answer: corpus.GeneratedRow) -> None:
        """Add an answer to the present shard."""
        # Rows of one prompt share its number. Here each request counts as another prompt.
        num_unwritten = len(self._rows) - self._num_written
        prompt_number = self._manifest["num_prompts"] + num_unwritten
        self._rows.append(answer._replace(prompt_number=prompt_number))
        self._num_tokens += len(answer.prompt) + len(answer.tokens)
        if self._due is None:
            self._due = time.monotonic() + WRITE_SECONDS

    def _begin_shard(self) -> None:
        self._rows = []
        self._num_written = 0
        self._num_tokens = 0
        self._shard = None

    def _write(self) -> None:
        """Write the shard so far and the manifest.

        A disk that is full loses the new text, and no request.
        """
        self._due = None
        num_new = len(self._rows) - self._num_written
        if num_new == 0:
            return
        manifest = self._manifest
        number = manifest["next_shard"] if self._shard is None else self._shard
        try:
            corpus.write_shard(self.directory, number, self._rows, manifest["vocab_size"])
            corpus.shard_path(self.directory, number).chmod(0o600)
            manifest["num_prompts"] += num_new
            manifest["num_shards"] = max(manifest["num_shards"], number + 1)
            # Should this server be killed, the next one leaves what is written.
            manifest["next_shard"] = (number + 1) % self._max_shards
            corpus.write_manifest(self.directory, manifest)
        except (OSError, ValueError) as error:
            log.warning("the records lost %d answers: %s", num_new, error)
            del self._rows[self._num_written :]
            return
        self._shard = number
        self._num_written = len(self._rows)


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
