"""Writes tiny random models as `save_pretrained` does, and damages them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
from families import tiny
from tiny_tokenizers import byte_level

from lightning_specdec import ModelDrafter, SpeculativeDecoder
from lightning_specdec.drafters import EarlyExitDrafter
from lightning_specdec.models.model_config import quiet

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"


def write(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 1,
    tokenizer: Any = None,
    shard_size: str | None = None,
    dtype: Any = None,
    **sizes: Any,
) -> str:
    """Write a random model to a directory and return its path.

    Args:
        path: the directory.
        family: a family of `families.tiny`.
        seed: seed of the weights.
        tokenizer: written beside the model; the model gets its vocabulary size.
        shard_size: largest file of weights, as "20KB".
        dtype: type of the stored weights.
        sizes: entries of the model's config.
    """
    if tokenizer is not None:
        sizes = {"vocab_size": len(tokenizer), **sizes}
    model = tiny(family, seed, **sizes)
    if dtype is not None:
        model = model.to(dtype)
    with quiet():
        model.save_pretrained(path, max_shard_size=shard_size or "50GB")
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
    return str(path)


def write_text_model(
    path: Path,
    family: str = "llama",
    *,
    chat: bool = False,
    seed: int = 1,
    **sizes: Any,
) -> str:
    """Write a random model with a byte-level tokenizer, and a chat template if `chat` is True."""
    tokenizer = byte_level(chat_template=CHAT) if chat else byte_level()
    return write(path, family, seed=seed, tokenizer=tokenizer, max_position_embeddings=512, **sizes)


def write_drafts(path: Path, first: str) -> str:
    """Write a checkpoint with the drafts `exit` and `small`; `first` names the default draft."""
    target = cases.MODELS["llama"]()
    drafts = {
        "exit": EarlyExitDrafter(1),
        "small": ModelDrafter(cases.MODELS["llama"](2, num_hidden_layers=1)),
    }
    ordered_drafts = {first: drafts.pop(first), **drafts}
    decoder = SpeculativeDecoder(
        target, ordered_drafts[first], prompts=cases.PROMPTS, drafts=ordered_drafts
    )
    decoder.save(path)
    return str(path)


def edit_config(**values: Any) -> Callable[[Path], None]:
    """Return a change of config.json entries; a value of None removes its entry."""

    def change(path: Path) -> None:
        file = path / "config.json"
        config = json.loads(file.read_text())
        config.update(values)
        remaining = {key: value for key, value in config.items() if value is not None}
        file.write_text(json.dumps(remaining))

    return change


def cut(fraction: float) -> Callable[[Path], None]:
    """Return a change that truncates the weights file to this fraction."""

    def change(path: Path) -> None:
        file = path / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * fraction)])

    return change


def put(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Return a change that writes a file."""

    def change(path: Path) -> None:
        encoded = content.encode() if isinstance(content, str) else content
        (path / name).write_bytes(encoded)

    return change


def drop(name: str) -> Callable[[Path], None]:
    """Return a change that deletes a file."""
    return lambda path: (path / name).unlink()
