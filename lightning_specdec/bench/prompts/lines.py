"""Files of prompts as JSON lines, read so that each fault names its file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(path: Path, advice: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its line's number; blank lines are passed over.

    Raises:
        ValueError: there is no such file, or a line of it is no object of JSON.
    """
    if not path.exists():
        raise ValueError(f"there is no prompts file {path}: check the path; {advice}")
    if path.is_dir():
        raise ValueError(f"{path} is a directory, and prompts are in files: name one; {advice}")
    try:
        text = _opened(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: give prompts as JSON lines") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{path}, line {number}: this is no JSON: write one object on each line") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path}, line {number}: this is no object of JSON: write one on each line")
        yield number, values


def _opened(path: Path) -> bytes:
    """What a file holds, unpacked if its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked, it is broken or no .gz: download it again") from error


def tokens_of(where: str, values: dict[str, Any]) -> tuple[int, ...]:
    """The tokens of a row."""
    tokens = values.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError(f'{where}: "tokens" must be a list of integers from 0, with one at least')
    return tuple(tokens)
