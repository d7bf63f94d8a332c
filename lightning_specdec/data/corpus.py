"""A directory of generated text: shards of rows, and a manifest that describes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from lightning_specdec.config.files import replaced

MANIFEST = "manifest.json"
FORMAT = 1
"""Counted up when the files change, so that a corpus of another version is not misread."""
_SAME = ("vocab_size", "target", "tokenizer", "arguments", "data", "num_prompts", "prompts_sha256")
"""What two runs into one directory must have in common."""
_TYPES: dict[str, type] = {"vocab_size": int, "target": dict, "tokenizer": dict, "num_shards": int}


class GeneratedRow(NamedTuple):
    """A prompt and what the target made of it.

    Args:
        prompt: its tokens.
        tokens: the new ones, with the EOS token that ended them.
        prompt_number: rows of one prompt at several temperatures share it.
        temperature: what the new tokens were drawn at.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    prompt_number: int
    temperature: float


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def write_shard(
    directory: Path, number: int, rows: Sequence[GeneratedRow], vocab_size: int
) -> None:
    """Write the rows of a shard; its file is there whole or not at all."""
    path, texts = shard_path(directory, number), [[*row.prompt, *row.tokens] for row in rows]
    arrays = {
        "tokens": np.concatenate(texts).astype(np.uint16 if vocab_size <= 2**16 else np.uint32),
        "starts": np.cumsum([0, *map(len, texts)], dtype=np.int64),
        "prompt_lengths": np.array([len(row.prompt) for row in rows], np.int64),
        "prompt_numbers": np.array([row.prompt_number for row in rows], np.int64),
        "temperatures": np.array([row.temperature for row in rows], np.float32),
    }
    with replaced(path) as file:
        file.write(save(arrays))


class Shard:
    """A shard as it was written.

    Args:
        path: its file.
        vocab_size: what its tokens are below.

    Attributes:
        starts: `[N + 1]`, where each row begins among the tokens, and where the last one ends.
        prompt_lengths, prompt_numbers, temperatures: `[N]`, see `GeneratedRow`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is torn, or holds something else.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: run `lightning_specdec generate` again, which writes it"
            )
        try:
            arrays = load_file(path)
            self.starts, self._tokens = arrays["starts"], arrays["tokens"]
            self.prompt_lengths, self.prompt_numbers = (
                arrays["prompt_lengths"],
                arrays["prompt_numbers"],
            )
            self.temperatures = arrays["temperatures"]
            sizes = np.diff(self.starts)
            if (
                self.starts[0]
                or self.starts[-1] != len(self._tokens)
                or (sizes <= self.prompt_lengths).any()
            ):
                raise ValueError("its rows do not fit its tokens")
            if (self.prompt_lengths < 1).any() or self._tokens.max(initial=0) >= vocab_size:
                raise ValueError("it holds rows that cannot have been generated")
        except (ValueError, LookupError, OSError, SafetensorError) as error:
            remedy = "delete it and run `lightning_specdec generate` again, which writes it anew"
            raise ValueError(f"the shard {path} is damaged ({error}): {remedy}") from error

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def row(self, number: int) -> np.ndarray:
        """The tokens of a row."""
        return self._tokens[self.starts[number] : self.starts[number + 1]]


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a directory says of its shards.

    Raises:
        FileNotFoundError, ValueError: it holds no generated text, or that of another version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no generated text: `lightning_specdec generate` writes it"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        whole = values["format"] == FORMAT and all(
            isinstance(values[name], kind) for name, kind in _TYPES.items()
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(
            f"{path} is not a manifest of format {FORMAT}: generate the text again with this version"
        )
    return dict(values)


def write_manifest(directory: Path, values: Mapping[str, Any]) -> None:
    with replaced(directory / MANIFEST) as file:
        file.write((json.dumps(values, indent=1) + "\n").encode())


def check_same(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the differences, unless a run may continue what another one has begun."""
    wanted = json.loads(json.dumps(wanted))
    if others := [name for name in _SAME if found.get(name) != wanted[name]]:
        raise ValueError(
            f"{directory} holds another run's text (of another {', '.join(others)}): give the same, or another "
            "model.output"
        )


def open_corpus(directory: Path) -> tuple[dict[str, Any], list[Shard]]:
    """The manifest and all shards of a directory.

    Raises:
        FileNotFoundError, ValueError: one of them is missing or torn.
    """
    manifest = read_manifest(directory)
    return manifest, [
        Shard(shard_path(directory, number), manifest["vocab_size"])
        for number in range(manifest["num_shards"])
    ]


def tokens_sha256(texts: Sequence[Sequence[int]]) -> str:
    """A hash of all tokens of several texts."""
    return hashlib.sha256(json.dumps([list(text) for text in texts]).encode()).hexdigest()
