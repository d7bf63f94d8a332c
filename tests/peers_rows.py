"""Rows of `benchmarks/peers.py`, and a tokenizer for its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class WordTokenizer:
    """Counts letters: the token of a word is its length."""

    eos = frozenset({2})

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(word) for word in messages[0]["content"].split()]


def measured(
    methods: Mapping[str, Any],
    name: str,
    seconds: Mapping[Any, float],
    **changes: Any,
) -> list[dict[str, Any]]:
    """Rows of a method, with the seconds of each prompt."""
    load, setting = methods[name].candidates()[0]
    rows = []
    for prompt, prompt_seconds in seconds.items():
        row = {
            "part": "prompts",
            "method": name,
            "load": load,
            "setting": setting,
            "prompt": prompt,
            "repeat": 0,
            "tokens": [[5, 6, 7]],
            "num_tokens": 4,
            "calls": 2,
            "seconds": prompt_seconds,
            "first": 0.5,
        }
        row.update(changes)
        rows.append(row)
    return rows
