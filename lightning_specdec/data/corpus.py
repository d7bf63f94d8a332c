"""A directory of generated text: shards of rows, and a manifest that describes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lightning_specdec.config.files import replaced

MANIFEST = "manifest.json"
FORMAT = 1
"""Counted up when the files change, so that a corpus of another version is not misread."""
_SAME = ("format", "vocab_size", "target", "tokenizer", "arguments", "data", "num_prompts", "prompts_sha256")
"""What two runs into one directory must have in common."""
_MOVABLE = ("target.source", "tokenizer.name")
"""Names of what is compared by its content instead."""
_TYPES: dict[str, type] = {"vocab_size": int, "target": dict, "tokenizer": dict, "num_shards": int}
_ARRAYS = ("starts", "prompt_lengths", "prompt_numbers", "temperatures")


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
    """The file of a shard."""
    return directory / f"shard-{number:05d}.safetensors"


def write_shard(directory: Path, number: int, rows: Sequence[GeneratedRow], vocab_size: int) -> None:
    """Write the rows of a shard; its file is there whole or not at all.

    Raises:
        ValueError: the disk is full, or nothing can be written there.
    """
    path, texts = shard_path(directory, number), [[*row.prompt, *row.tokens] for row in rows]
    arrays = {
        "tokens": np.concatenate(texts).astype(np.uint16 if vocab_size <= 2**16 else np.uint32),
        "starts": np.cumsum([0, *map(len, texts)], dtype=np.int64),
        "prompt_lengths": np.array([len(row.prompt) for row in rows], np.int64),
        "prompt_numbers": np.array([row.prompt_number for row in rows], np.int64),
        "temperatures": np.array([row.temperature for row in rows], np.float32),
    }
    try:
        with replaced(path) as file:
            file.write(save(arrays))
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror or error})"
        raise ValueError(f"{reason}: the finished shards stay, make room and run it again") from error


class Shard:
    """A shard as it is on the disk: the tokens are read where they are asked for.

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
            raise FileNotFoundError(f"{path} is missing: run `lightning_specdec generate` again, which writes it")
        remedy = "delete it and run `lightning_specdec generate` again, which writes it anew"
        try:
            file = safe_open(path, "np")
            self.starts, self.prompt_lengths, self.prompt_numbers, self.temperatures = map(file.get_tensor, _ARRAYS)
            self._tokens = file.get_slice("tokens")
            largest = int(file.get_tensor("tokens").max(initial=0))
        except (ValueError, OSError, SafetensorError) as error:
            raise ValueError(f"the shard {path} is torn or damaged ({type(error).__name__}): {remedy}") from error
        sizes, prompts = np.diff(self.starts), self.prompt_lengths
        whole = self.starts[:1].tolist() == [0] and self.starts[-1:].tolist() == self._tokens.get_shape()
        shapes = {array.shape for array in (sizes, prompts, self.prompt_numbers, self.temperatures)}
        if not whole or len(shapes) != 1 or (prompts < 1).any() or (sizes <= prompts).any() or largest >= vocab_size:
            raise ValueError(f"the shard {path} holds rows that cannot have been generated: {remedy}")

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def row(self, number: int, size: int | None = None) -> np.ndarray:
        """The first `size` tokens of a row, all of them when None."""
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        tokens: np.ndarray = self._tokens[start : end if size is None else min(end, start + size)]
        return tokens


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a directory says of its shards.

    Raises:
        FileNotFoundError, ValueError: it holds no generated text, or that of another version.
    """
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{directory} holds no generated text: `lightning_specdec generate` writes it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}): restore it, or generate anew") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{path} is no manifest of format {FORMAT}: generate the text anew with this version")
    for name, kind in _TYPES.items():
        if not isinstance(values.get(name), kind):
            raise ValueError(f"{path} says nothing of {name}: restore it, or generate anew")
    return values


def write_manifest(directory: Path, values: Mapping[str, Any]) -> None:
    """Write the manifest of a directory."""
    with replaced(directory / MANIFEST) as file:
        file.write((json.dumps(values, indent=1) + "\n").encode())


def check_same(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the first difference, unless a run may continue what another one has begun."""
    had, has = _flat(found), _flat(json.loads(json.dumps(wanted)))
    for name in dict.fromkeys((*has, *had)):
        if name not in _MOVABLE and had.get(name) != has.get(name):
            before, now = (json.dumps(each.get(name))[:60] for each in (had, has))
            raise ValueError(
                f"{directory} holds another run's text ({name} was {before} there and is {now} now): give the same, "
                "or another model.output"
            )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name in _SAME:
        value = values.get(name)
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def open_corpus(directory: Path) -> tuple[dict[str, Any], list[Shard]]:
    """The manifest and all shards of a directory.

    Raises:
        FileNotFoundError, ValueError: one of them is missing or torn.
    """
    manifest = read_manifest(directory)
    return manifest, [
        Shard(shard_path(directory, number), manifest["vocab_size"]) for number in range(manifest["num_shards"])
    ]


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """Changes with any token of any prompt."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.array([len(prompt), *prompt], np.int64).tobytes())
    return digest.hexdigest()
