"""Writing a directory of generated text: shards of rows, and a manifest that describes them.

`lightning_specdec.text.shards` reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save

from lightning_specdec.config.files import replaced
from lightning_specdec.text.shards import FORMAT as FORMAT
from lightning_specdec.text.shards import MANIFEST
from lightning_specdec.text.shards import Shard as Shard
from lightning_specdec.text.shards import open_corpus as open_corpus
from lightning_specdec.text.shards import read_manifest as read_manifest
from lightning_specdec.text.shards import shard_path as shard_path

SHIPPED_TEXT = Path(__file__).parent / "smollm2_text"
"""Text of SmolLM2-135M-Instruct that ships with this package: one directory for each run."""

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


def shipped_corpora() -> list[str]:
    """The directories of generated text that ship with this package."""
    return sorted(str(path.parent) for path in SHIPPED_TEXT.glob(f"*/{MANIFEST}"))


def tokens_sha256(texts: Sequence[Sequence[int]]) -> str:
    """A hash of all tokens of several texts."""
    return hashlib.sha256(json.dumps([list(text) for text in texts]).encode()).hexdigest()
