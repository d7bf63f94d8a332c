"""Directories as `save_pretrained` writes them, of tiny random models, with and without a tokenizer; and ways to
spoil them."""

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
    """A directory with a random model of that family; with a tokenizer the vocabulary is the tokenizer's."""
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
    path: Path, family: str = "llama", *, chat: bool = False, seed: int = 1, **sizes: Any
) -> str:
    """A directory with a random model and a byte-level tokenizer, with a chat template on demand."""
    tokenizer = byte_level(chat_template=CHAT) if chat else byte_level()
    return write(path, family, seed=seed, tokenizer=tokenizer, max_position_embeddings=512, **sizes)


def write_drafts(path: Path, first: str) -> str:
    """A checkpoint of a transformer with two drafts, `exit` and `small`; the first one guesses unless told."""
    target = cases.MODELS["llama"]()
    drafts = {
        "exit": EarlyExitDrafter(1),
        "small": ModelDrafter(cases.MODELS["llama"](2, num_hidden_layers=1)),
    }
    names = [first, *drafts.keys() - {first}]
    decoder = SpeculativeDecoder(
        target, drafts[first], prompts=cases.PROMPTS, drafts={name: drafts[name] for name in names}
    )
    decoder.save(path)
    return str(path)


def edit_config(**values: Any) -> Callable[[Path], None]:
    """Change entries of config.json; None takes one away."""

    def change(path: Path) -> None:
        file = path / "config.json"
        config = json.loads(file.read_text()) | values
        file.write_text(
            json.dumps({key: value for key, value in config.items() if value is not None})
        )

    return change


def cut(fraction: float) -> Callable[[Path], None]:
    """Keep that part of the file of weights."""

    def change(path: Path) -> None:
        file = path / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * fraction)])

    return change


def put(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Write a file."""

    def change(path: Path) -> None:
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def drop(name: str) -> Callable[[Path], None]:
    """Delete a file."""
    return lambda path: (path / name).unlink()
