"""Read `question.jsonl` of Spec-Bench (Xia et al. 2024) as chat prompts for the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Categories of Spec-Bench; the eight of MT-Bench count as one task, conversation."""


def load(path: str | Path, tokenizer: Any, *, longest: int = 1024) -> dict[str, list[list[int]]]:
    """First turns by task, as chat tokens; prompts of more than `longest` tokens are left out."""
    prompts: dict[str, list[list[int]]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tokens = tokenizer.encode_chat([{"role": "user", "content": row["turns"][0]}])
        if len(tokens) <= longest:
            task = row["category"] if row["category"] in TASKS else "conversation"
            prompts.setdefault(task, []).append(tokens)
    return prompts


def check_same(
    options: Mapping[str, Any], before: Iterable[Mapping[str, Any]], names: Sequence[str]
) -> None:
    """Exit unless runs that are shown together have the same settings.

    Args:
        options: options of the new run.
        before: manifests of the runs that it is shown with.
        names: settings that must be equal.
    """
    for made in before:
        for name in names:
            if (recorded := made["options"].get(name)) != options[name]:
                raise SystemExit(
                    f"error: the output has figures for {name}={recorded}, this run has {options[name]}: "
                    "give the same, or another --output"
                )


def mixed(prompts: dict[str, list[list[int]]], number: int) -> list[list[int]]:
    """A number of prompts, taken from the tasks in turn."""
    longest = max(map(len, prompts.values()))
    turns = [texts[i] for i in range(longest) for texts in prompts.values() if i < len(texts)]
    return turns[:number]
