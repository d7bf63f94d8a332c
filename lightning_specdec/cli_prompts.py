"""Prompts as a user types them: from options, files and stdin.

Knows nothing of models; each prompt keeps the place that it came from, for the errors that only a model can find.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_TOKEN = re.compile(r"[+-]?[0-9]{1,40}")


def read_prompts(prompts: list[str], path: str | None) -> list[tuple[str, list[int]]] | None:
    """The prompts of the options with their places, None when there are none: lines of tokens, or of JSON lists."""
    lines: list[tuple[str, str]] = []
    for i, text in enumerate(prompts, start=1):
        lines += _lines("stdin", sys.stdin.read()) if text == "-" else [(f"--prompt {i}", text)]
    if path == "-":
        lines += _lines("stdin", sys.stdin.read())
    elif path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text: give one prompt a line, as `1 2 3`") from error
        lines += _lines(path, text)
    if not prompts and path is None:
        return None
    if not lines:
        raise ValueError("there is no prompt: give at least one line of tokens, as `1 2 3`")
    return [(where, _parse_prompt(where, text)) for where, text in lines]


def _lines(name: str, text: str) -> list[tuple[str, str]]:
    return [(f"{name}, line {i}", line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _parse_prompt(where: str, text: str) -> list[int]:
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if not words:
        raise ValueError(f"{where}: the prompt is empty, give at least one token, as `1 2 3`")
    for word in words:
        if not _TOKEN.fullmatch(word):
            raise ValueError(f"{where}: {word[:40]!r} is no token, give integers, as `1 2 3`")
    return [int(word) for word in words]
