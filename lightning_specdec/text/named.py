"""A tokenizer by the name that data and checkpoints keep of it."""

from __future__ import annotations

from lightning_specdec.text import bytes as of_bytes
from lightning_specdec.text.base import Tokenizer
from lightning_specdec.text.tokenizer import TextTokenizer


def named_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name: "bytes", or the directory or hub id of one of transformers.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    return of_bytes.ByteTokenizer() if name == of_bytes.NAME else TextTokenizer.load(name)
