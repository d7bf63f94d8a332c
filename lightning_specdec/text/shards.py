"""Texts that are stored as tokens, as `lightning_specdec generate` and `serve --record` write them.

A directory has shards of rows, and a manifest that describes them. Shapes: N rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

MANIFEST = "manifest.json"

FORMAT = 1
"""Version of the files. It is increased when they change, so that no version reads another one."""

FIELD_TYPES: dict[str, type] = {
    "vocab_size": int,
    "target": dict,
    "tokenizer": dict,
    "num_shards": int,
}


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


class Shard:
    """A shard that was written by `write_shard`.

    Args:
        path: the shard's file.
        vocab_size: upper limit of its tokens.

    Attributes:
        starts: `[N + 1]`, the position of each row's first token, and the number of tokens.
        prompt_lengths, prompt_numbers, temperatures: `[N]`, see `GeneratedRow`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or is not a shard.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: run `lightning_specdec generate` again to write it"
            )
        try:
            arrays = load_file(path)
            self.starts = arrays["starts"]
            self._tokens = arrays["tokens"]
            self.prompt_lengths = arrays["prompt_lengths"]
            self.prompt_numbers = arrays["prompt_numbers"]
            self.temperatures = arrays["temperatures"]
            self._check(vocab_size)
        except (ValueError, LookupError, OSError, SafetensorError) as error:
            remedy = "delete it and run `lightning_specdec generate` again to write it"
            raise ValueError(f"the shard {path} is damaged ({error}): {remedy}") from error

    def _check(self, vocab_size: int) -> None:
        """Raise ValueError if the arrays do not fit each other."""
        text_lengths = np.diff(self.starts)
        has_all_tokens = self.starts[0] == 0 and self.starts[-1] == len(self._tokens)
        if not has_all_tokens or (text_lengths <= self.prompt_lengths).any():
            raise ValueError("its rows do not fit its tokens")
        if (self.prompt_lengths < 1).any() or self._tokens.max(initial=0) >= vocab_size:
            raise ValueError("it holds rows that cannot have been generated")

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def row(self, number: int) -> np.ndarray:
        """The tokens of a row."""
        return self._tokens[self.starts[number] : self.starts[number + 1]]


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the description of a directory's shards.

    Raises:
        FileNotFoundError, ValueError: there is no generated text, or it is of another version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no generated text: `lightning_specdec generate` writes it"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        has_all_fields = all(
            isinstance(values[name], field_type) for name, field_type in FIELD_TYPES.items()
        )
        is_valid = values["format"] == FORMAT and has_all_fields
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{path} is not a manifest of format {FORMAT}: generate the text again with this "
            "version"
        )
    return dict(values)


def open_corpus(directory: Path) -> tuple[dict[str, Any], list[Shard]]:
    """The manifest and all shards of a directory.

    Raises:
        FileNotFoundError, ValueError: one of them is missing or damaged.
    """
    manifest = read_manifest(directory)
    paths = [shard_path(directory, number) for number in range(manifest["num_shards"])]
    return manifest, [Shard(path, manifest["vocab_size"]) for path in paths]
