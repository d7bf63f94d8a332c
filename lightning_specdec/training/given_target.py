"""The target that a training begins with: a model, that of a checkpoint, or that of a transformers directory.

Knows nothing of what is trained on it.
"""

from __future__ import annotations

import os
from pathlib import Path

from lightning_specdec import checkpoint as checkpoint_file
from lightning_specdec.data import TokenData
from lightning_specdec.models import LanguageModel
from lightning_specdec.text.named import named_tokenizer


def the_target(
    target: LanguageModel | None, path: str | os.PathLike[str] | None, freeze: bool
) -> tuple[LanguageModel, str | None]:
    """The model that is given, or that of a checkpoint or a directory, and the tokenizer that a checkpoint names.

    Raises:
        ValueError: both are named or neither; or the file holds no model that can be used.
        FileNotFoundError: there is no such file.
    """
    if (target is None) == (path is None):
        given = "neither" if path is None else "both"
        raise ValueError(f"heads need one target, got {given}: give either `target` or `target_checkpoint`")
    if target is not None:
        return target, None
    assert path is not None
    if Path(path).is_dir():
        from lightning_specdec.models.loading import load_model

        # What is trained has to be able to take small steps; what is not may stay as it is stored.
        return load_model(path, dtype=None if freeze else "float32"), None
    made = checkpoint_file.load(path)
    return made.target, made.tokenizer


def check_same_tokens(source: str, vocab_size: int, tokenizer: str | None, data: TokenData) -> None:
    """Raise ValueError unless a checkpoint's tokens mean what the data's do, as far as both can say.

    Args:
        source: the checkpoint.
        vocab_size: of its target.
        tokenizer: its name of one, None where its tokens are no text.
    """
    remedy = "give the data that its target was trained on"
    if vocab_size != data.vocab_size:
        raise ValueError(
            f"{source} has a vocabulary of {vocab_size} tokens, the data one of {data.vocab_size}: {remedy}"
        )
    if not _same_tokenizer(tokenizer, data.tokenizer):
        had, has = (name or "none" for name in (tokenizer, data.tokenizer))
        raise ValueError(f"{source} has the tokenizer {had}, the data have {has}: {remedy}")


def _same_tokenizer(name: str | None, other: str | None) -> bool:
    """Whether two names mean one tokenizer, which may lie in two places."""
    if name is None or other is None or name == other:
        return name == other
    return named_tokenizer(name).fingerprint == named_tokenizer(other).fingerprint
