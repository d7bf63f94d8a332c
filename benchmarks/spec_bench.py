"""Read `question.jsonl` of Spec-Bench (Xia et al. 2024) as chat prompts for the benchmarks."""

from __future__ import annotations

import itertools
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
        question = json.loads(line)
        tokens = tokenizer.encode_chat([{"role": "user", "content": question["turns"][0]}])
        if len(tokens) <= longest:
            category = question["category"]
            task = category if category in TASKS else "conversation"
            prompts.setdefault(task, []).append(tokens)
    return prompts


def mixed(prompts: dict[str, list[list[int]]], number: int) -> list[list[int]]:
    """A number of prompts, taken from the tasks in turn."""
    mixed_prompts = []
    # A task that has no more prompts yields None.
    for turn in itertools.zip_longest(*prompts.values()):
        mixed_prompts += [prompt for prompt in turn if prompt is not None]
    return mixed_prompts[:number]


def check_same(
    options: Mapping[str, Any],
    manifests: Iterable[Mapping[str, Any]],
    names: Sequence[str],
) -> None:
    """Exit unless runs that are shown together have the same settings.

    Args:
        options: options of the new run.
        manifests: those of the runs that it is shown with.
        names: settings that must be equal.
    """
    for manifest in manifests:
        for name in names:
            recorded_value = manifest["options"].get(name)
            if recorded_value != options[name]:
                raise SystemExit(
                    f"error: the output has figures for {name}={recorded_value}, this run has "
                    f"{options[name]}: give the same, or another --output"
                )
