"""Prompts as a user types them: from options, files and stdin."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

Placed = tuple[str, str]
"""Where a prompt came from, and what it says."""

OWN = (
    "Summarize in two sentences: The lighthouse at Cape Verity was built in 1874, after three ships were lost on the "
    "reef in one winter. Its lamp burned whale oil, then kerosene, and since 1931 electricity. The last keeper left in "
    "1968, and the lighthouse has worked by itself since then. Every summer the town opens it to visitors, who climb "
    "its 112 steps to see the reef and, on clear days, the mountains behind the bay.",
    "Add a docstring and type hints to this function, and give the whole function back:\n\n"
    "def mean_by_key(rows, key):\n"
    "    totals, counts = {}, {}\n"
    "    for row in rows:\n"
    "        name = row[key]\n"
    "        totals[name] = totals.get(name, 0) + row['value']\n"
    "        counts[name] = counts.get(name, 0) + 1\n"
    "    return {name: totals[name] / counts[name] for name in totals}\n",
    "I have an hour in a city that I do not know, and it is raining. What would you suggest?",
)
"""For models of text, where the user gives none: a summary, code to edit, a question."""

_TOKEN = re.compile(r"[+-]?[0-9]{1,40}")


def read_prompts(prompts: list[str], path: str | None) -> list[Placed] | None:
    """The prompts of the options with their places, as they were typed; None when there are none."""
    lines: list[tuple[str, str]] = []
    for i, text in enumerate(prompts, start=1):
        lines += _lines("stdin", sys.stdin.read()) if text == "-" else [(f"--prompt {i}", text)]
    if path == "-":
        lines += _lines("stdin", sys.stdin.read())
    elif path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text: give one prompt a line") from error
        lines += _lines(path, text)
    if not prompts and path is None:
        return None
    if not lines:
        raise ValueError("there is no prompt: give at least one line")
    return lines


def as_tokens(lines: list[Placed]) -> list[tuple[str, list[int]]]:
    """The prompts as tokens: numbers, or JSON lists of them."""
    return [(where, _parse_prompt(where, text)) for where, text in lines]


def as_texts(lines: list[Placed]) -> list[Placed]:
    """The prompts as text; a line of a file that is a JSON object is its "prompt"."""
    texts = [(where, text if where.startswith("--prompt ") else _of_json(where, text)) for where, text in lines]
    for where, text in texts:
        if not text.strip():
            raise ValueError(f"{where}: the prompt is empty, give some text")
    return texts


def _of_json(where: str, line: str) -> str:
    """A line's prompt: that of a JSON object, or the line itself."""
    if not line.lstrip().startswith("{"):
        return line
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return line  # text that begins with a brace
    prompt = values.get("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: a JSON object needs its text under "prompt", this one has {", ".join(values)[:80]}')
    return prompt


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
