"""A directory of generated text: shards of rows, and a manifest that describes them.

Shapes: N rows.
"""

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

SHIPPED_TEXT = Path(__file__).parent / "smollm2_text"
"""Text of SmolLM2-135M-Instruct that ships with this package: one directory for each run."""

FORMAT = 1
"""Version of the files. It is increased when they change, so that no version reads another one."""

COMMON_FIELDS = (
    "vocab_size",
    "target",
    "tokenizer",
    "arguments",
    "data",
    "num_prompts",
    "prompts_sha256",
)
"""Fields of the manifest that must be equal for two runs into one directory."""

FIELD_TYPES: dict[str, type] = {
    "vocab_size": int,
    "target": dict,
    "tokenizer": dict,
    "num_shards": int,
}


class GeneratedRow(NamedTuple):
    """A prompt and the target's answer.

    Args:
        prompt: tokens of the prompt.
        tokens: tokens of the answer, with the EOS token that ended it.
        prompt_number: number of the prompt. Rows of one prompt at several temperatures share it.
        temperature: the temperature of the answer.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    prompt_number: int
    temperature: float


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def write_shard(
    directory: Path,
    number: int,
    rows: Sequence[GeneratedRow],
    vocab_size: int,
) -> None:
    """Write the rows of a shard. Its file appears only when it is complete."""
    texts = [[*row.prompt, *row.tokens] for row in rows]
    text_lengths = [len(text) for text in texts]
    token_dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    arrays = {
        "tokens": np.concatenate(texts).astype(token_dtype),
        "starts": np.cumsum([0, *text_lengths], dtype=np.int64),
        "prompt_lengths": np.array([len(row.prompt) for row in rows], np.int64),
        "prompt_numbers": np.array([row.prompt_number for row in rows], np.int64),
        "temperatures": np.array([row.temperature for row in rows], np.float32),
    }
    with replaced(shard_path(directory, number)) as file:
        file.write(save(arrays))


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


def write_manifest(directory: Path, values: Mapping[str, Any]) -> None:
    with replaced(directory / MANIFEST) as file:
        file.write((json.dumps(values, indent=1) + "\n").encode())


def check_same(directory: Path, existing: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the differences, if a run cannot continue an existing one.

    Args:
        directory: the directory of the run, for the error.
        existing: the manifest that is there.
        new: the manifest that the run would write.
    """
    new_values = json.loads(json.dumps(new))
    differences = [name for name in COMMON_FIELDS if existing.get(name) != new_values[name]]
    if differences:
        raise ValueError(
            f"{directory} holds another run's text (of another {', '.join(differences)}): give the "
            "same, or another model.output"
        )


def open_corpus(directory: Path) -> tuple[dict[str, Any], list[Shard]]:
    """The manifest and all shards of a directory.

    Raises:
        FileNotFoundError, ValueError: one of them is missing or damaged.
    """
    manifest = read_manifest(directory)
    paths = [shard_path(directory, number) for number in range(manifest["num_shards"])]
    return manifest, [Shard(path, manifest["vocab_size"]) for path in paths]


def shipped_corpora() -> list[str]:
    """The directories of generated text that ship with this package."""
    return sorted(str(path.parent) for path in SHIPPED_TEXT.glob(f"*/{MANIFEST}"))


def tokens_sha256(texts: Sequence[Sequence[int]]) -> str:
    """A hash of all tokens of several texts."""
    return hashlib.sha256(json.dumps([list(text) for text in texts]).encode()).hexdigest()
