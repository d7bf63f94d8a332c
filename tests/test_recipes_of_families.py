"""Laws of recipes on other kinds of targets: recurrent, hybrid, and models that read images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import succeed
from families import greedy_tokens
from generated import somewhere
from multimodal import FAMILIES as MULTIMODAL
from multimodal import write_multimodal
from row_families import FAMILIES
from tiny_models import CHAT, write
from tiny_tokenizers import byte_level

from lightning_specdec.models.loading import load_model

__all__ = ["somewhere"]


def written_target(family: str) -> str:
    """A tiny model of a family in the current directory, with a tokenizer."""
    if family in MULTIMODAL:
        return write_multimodal(Path("target"), family, CHAT)
    sizes: dict[str, Any] = {**FAMILIES[family], "vocab_size": 328}
    if "max_position_embeddings" in sizes:
        sizes["max_position_embeddings"] = 256
    return write(Path("target"), family, tokenizer=byte_level(chat_template=CHAT), **sizes)


def written_text() -> str:
    """A text of many short lines, long enough for held-out rows."""
    path = Path("text.txt")
    lines = [
        f"The cat {number} sat on the mat, and the dog sat on the log.\n" for number in range(400)
    ]
    path.write_text("".join(lines))
    return str(path)


@pytest.mark.parametrize("recipe", ["eagle", "medusa"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "mistral3", "gemma3", "qwen3_5"])
def test_a_recipe_trains_a_draft_that_decodes_as_generate_does(family: str, recipe: str) -> None:
    target = written_target(family)
    fit = ["fit", "--recipe", recipe, "--target", target, "--text", written_text()]
    fit += ["--trainer.accelerator", "cpu", "--trainer.max_epochs", "1", "--data.batch_size", "2"]
    fit += ["--trainer.limit_train_batches", "4", "--trainer.limit_val_batches", "2"]
    outcome = succeed(*fit)
    assert "val/block_efficiency" in outcome.out
    (run,) = Path("checkpoints").iterdir()
    succeed("export", "--ckpt", str(run), "--output", "draft.safetensors")

    words = ["decode", "--target", target, "--draft", "draft.safetensors", "--repeats", "0"]
    words += ["--max_new_tokens", "12", "--prompt", "the cat", "--output", "json"]
    (prompt,) = succeed(*words).json["prompts"]
    model = load_model(target).model
    expected = greedy_tokens(model, prompt["prompt"], 12, eos_token_id=None)
    assert prompt["standard"]["tokens"] == prompt["speculative"]["tokens"] == expected
