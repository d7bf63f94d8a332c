"""The target that a training begins with: a model, that of a checkpoint, or that of a transformers directory."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_specdec import checkpoint as checkpoint_file
from lightning_specdec.data import TokenData
from lightning_specdec.models import LanguageModel
from lightning_specdec.target_reference import TargetReference, forget_origin, origin_of
from lightning_specdec.text.named import named_tokenizer


def the_target(
    target: LanguageModel | None, path: str | os.PathLike[str] | None, freeze: bool, *, dtype: str | None = None
) -> tuple[LanguageModel, str | None]:
    """The model that is given, or that of a checkpoint or a directory, and the tokenizer that a checkpoint names.

    Args:
        freeze: whether it will stay as it is.
        dtype: what a directory's model computes in if it stays as it is; as it is stored when None.

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
        found: LanguageModel = load_model(path, dtype=dtype if freeze else "float32")
        tokenizer = None
    else:
        made = checkpoint_file.load(path)
        found, tokenizer = made.target, made.tokenizer
        if made.reference is not None and not freeze:
            found = found.float()
    if not freeze:
        forget_origin(found)
    return found, tokenizer


def stored_elsewhere(target: LanguageModel) -> TargetReference | None:
    """Which target it is, where a checkpoint need not hold it: one from files of weights that are not trained."""
    if origin_of(target) is None or any(weight.requires_grad for weight in target.parameters()):
        return None
    return TargetReference.of(target)


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
