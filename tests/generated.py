"""A tiny target with a chat template, and its own text as `generate` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from tiny_models import write_text_model

from lightning_specdec.data import PromptFiles, PromptSource
from lightning_specdec.training import GenerateText

PROMPTS = [
    "the cat",
    "a guess is kept when the target would",
    "naïve cafés",
    "the dog sat on the log and",
    "said",
]
PROMPTS += [f"{prompt} {number}" for number in range(2) for prompt in PROMPTS[:3]]
"""Eleven, of different lengths."""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model whose rows end at different times. Read it, do not write to it."""
    path = tmp_path_factory.mktemp("model") / "target"
    write_text_model(path, chat=True)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(40, 70)]}))
    return str(path)


def prompt_file(directory: Path, prompts: list[str] | None = None) -> str:
    path = directory / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in prompts or PROMPTS), encoding="utf-8")
    return str(path)


def trainer(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", enable_checkpointing=False, **{**quiet, **arguments})


def generate(
    target: str,
    output: Path,
    data: PromptSource,
    *,
    devices: int = 1,
    limit: int | None = None,
    **arguments: Any,
) -> Path:
    """Write the text of a target to `output`; by `devices` processes, of which each writes at most
    `limit` shards.
    """
    options = {
        "max_new_tokens": 9,
        "temperatures": [0.0, 1.0],
        "batch_size": 3,
        "shard_size": 4,
        "seed": 5,
        **arguments,
    }
    strategy = "auto" if devices == 1 else "ddp_fork"
    runner = trainer(devices=devices, strategy=strategy, limit_predict_batches=limit)
    runner.predict(
        GenerateText(target, str(output), **options), datamodule=data, return_predictions=False
    )
    return output


@pytest.fixture(scope="session")
def corpus(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text of `PROMPTS`, greedy and at temperature 1. Read it, do not write to it."""
    home = tmp_path_factory.mktemp("corpus")
    return generate(target, home / "text", PromptFiles(prompt_file(home)))


def contents(directory: Path) -> dict[str, bytes]:
    """Every shard's bytes, and nothing else that lies there but the manifest."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.name != "manifest.json"
    }


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory and cache, and recipes that decode little of a held-out text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lightning_specdec.training.draft_recipes.NUM_DECODED_TOKENS", 4)
