"""Texts that were stored as tokens, by `lightning_specdec generate` or `serve --record`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from lightning_specdec.text.tokenizer import Tokenizer


def shard_texts(file: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """The rows of a file of tokens that `generate` or `serve --record` wrote; none of others.

    Raises:
        ValueError: they are tokens of another tokenizer, or the file is damaged.
    """
    manifest_file = file.with_name("manifest.json")
    if not file.name.startswith("shard-") or not manifest_file.is_file():
        return []
    try:
        manifest = json.loads(manifest_file.read_bytes())
        fingerprint = manifest["tokenizer"]["fingerprint"]
        arrays = load_file(file)
        rows = np.split(arrays["tokens"], arrays["starts"][1:-1])
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise ValueError(f"corpus: {file} is damaged ({error})") from error
    if fingerprint != tokenizer.fingerprint:
        raise ValueError(f"corpus: {file} has the tokens of another model")
    return [row.tolist() for row in rows]
