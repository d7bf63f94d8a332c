"""Prompts of Spec-Bench (Xia et al. 2024), for the benchmarks: its `question.jsonl` as chat prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Its categories; the eight of MT-Bench count as one task, conversation."""


def load(path: str | Path, tokenizer: Any, *, longest: int = 1024) -> dict[str, list[list[int]]]:
    """The first turns by task, as tokens of a chat; those of more than `longest` tokens are left out."""
    prompts: dict[str, list[list[int]]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tokens = tokenizer.encode_chat([{"role": "user", "content": row["turns"][0]}])
        if len(tokens) <= longest:
            task = row["category"] if row["category"] in TASKS else "conversation"
            prompts.setdefault(task, []).append(tokens)
    return prompts


def check_same(options: Mapping[str, Any], before: Iterable[Mapping[str, Any]], names: Sequence[str]) -> None:
    """End the program unless runs whose figures stand side by side had the same settings.

    Args:
        options: of the run that begins.
        before: the manifests of those that its figures will stand beside.
        names: the settings that count.
    """
    for made in before:
        for name in names:
            if made["options"][name] != options[name]:
                raise SystemExit(
                    f"error: the output has figures for {name}={made['options'][name]}, this run has {options[name]}: "
                    "give the same, or another --output"
                )


def mixed(prompts: dict[str, list[list[int]]], number: int) -> list[list[int]]:
    """As many prompts, task by task in turn."""
    longest = max(map(len, prompts.values()))
    turns = [texts[i] for i in range(longest) for texts in prompts.values() if i < len(texts)]
    return turns[:number]
