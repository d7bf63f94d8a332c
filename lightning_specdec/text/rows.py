"""Read files of text and of JSON rows: one conversation, prompt or text in each row."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_specdec.text.tokenizer import Message, valid_text

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")

CONVERSATION_FIELDS = ("messages", "conversations", "conversation")
"""Fields with the turns of a chat, in the shape of OpenAI or of ShareGPT."""

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
"""ShareGPT's names of speakers, for those that chat templates name differently."""


class Chat(NamedTuple):
    """A conversation.

    Args:
        messages: its turns, as chat templates expect them.
        tools: descriptions of the functions that the model may call, in OpenAI's shape.
    """

    messages: list[Message]
    tools: list[Any]


class Row(NamedTuple):
    """A row of a file.

    Args:
        value: its text, or the value of its JSON.
        number: its line or its position in a list, from 1.
        where: its file and line, for error messages.
    """

    value: Any
    number: int
    where: str


def read_utf8(path: Path) -> str:
    """The text of a file in UTF-8, without a byte-order mark.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not in UTF-8.
    """
    return decode_utf8(path.read_bytes(), path)


def decode_utf8(content: bytes, path: Path) -> str:
    """As `read_utf8`, for the content of a file that has been read."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        encoding = "not text in UTF-8"
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "text in UTF-16"
        raise ValueError(f"{path} is {encoding}: save it as UTF-8, or leave it out") from None


def read_lines(text: str, source: Path | str) -> list[Row]:
    """The lines of a text that are not blank, as rows."""
    rows = []
    # Only a line feed ends a line: JSON strings may contain the other line ends of Unicode.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            rows.append(Row(line.removesuffix("\r"), number, f"{source}, line {number}"))
    return rows


def read_json_rows(text: str, path: Path) -> list[Row] | None:
    """The rows of a .jsonl file or of a .json list of objects; None for other files.

    Raises:
        ValueError: a line of a .jsonl file is not JSON.
    """
    suffix = path.suffix.lower()
    if suffix in JSON_LINES_SUFFIXES:
        return read_json_lines(text, path)
    if suffix != ".json":
        return None

    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        # Not one JSON value. It may be JSON lines under another name.
        try:
            rows = read_json_lines(text, path)
        except ValueError:
            return None
        return rows if _are_objects([row.value for row in rows]) else None

    if isinstance(values, list) and _are_objects(values):
        return [
            Row(value, number, f"{path}, row {number}") for number, value in enumerate(values, 1)
        ]
    return None


def read_json_lines(text: str, path: Path) -> list[Row]:
    """The rows of a file with one JSON value on each line.

    Raises:
        ValueError: a line is not JSON.
    """
    rows = []
    for row in read_lines(text, path):
        try:
            rows.append(row._replace(value=json.loads(row.value)))
        except (ValueError, RecursionError):
            message = f"{row.where}: this is not JSON: write one object on each line"
            raise ValueError(message) from None
    return rows


def read_conversation(row: Mapping[str, Any], where: str) -> Chat | None:
    """A row's conversation with its system prompt and tools; None if it has no conversation.

    Raises:
        ValueError: the row has a conversation, a system prompt or tools of an unknown shape.
    """
    for field in CONVERSATION_FIELDS:
        if row.get(field) is not None:
            messages = parse_turns(row[field], f'{where}: "{field}"')
            return read_chat(row, messages, where)
    return None


def read_chat(row: Mapping[str, Any], messages: list[Message], where: str) -> Chat:
    """The turns of a row with the system prompt and the tools that it has beside them.

    Args:
        row: the row, which may have "system" (ShareGPT), "tools" or "functions" (OpenAI).
        messages: its turns.
        where: its file and line, for error messages.

    Raises:
        ValueError: the system prompt or the tools have an unknown shape.
    """
    system = row.get("system")
    if not isinstance(system, str | None):
        raise ValueError(f'{where}: "system" must be text, got {str(system)[:40]}')
    if system:
        system = valid_text(system)
        first_turn = messages[0]
        if first_turn["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        elif first_turn["content"] != system:
            raise ValueError(f'{where}: "system" and the system turn differ: keep one of them')
    return Chat(messages, _read_tools(row, where))


def _read_tools(row: Mapping[str, Any], where: str) -> list[Any]:
    """The functions that the model may call. Some data sets store them as text in JSON."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise ValueError(f'{where}: "tools" is not JSON: write a list of objects') from None

    if not tools and row.get("functions"):
        # OpenAI's older name, without the type around each.
        functions = row["functions"]
        tools = functions
        if isinstance(functions, list):
            tools = [{"type": "function", "function": function} for function in functions]
    if not tools:
        return []
    if not isinstance(tools, list) or not _are_objects(tools):
        raise ValueError(f'{where}: "tools" must be a list of objects, got {str(tools)[:40]}')
    return tools


def parse_turns(turns: Any, where: str) -> list[Message]:
    """Turns as chat templates expect them, from OpenAI's shape or ShareGPT's.

    Args:
        turns: a list of `{"role": ..., "content": ...}` or of `{"from": ..., "value": ...}`.
        where: what the turns are, for error messages.

    Raises:
        ValueError: the turns have another shape.
    """
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where} must be a list of turns")
    return [_parse_turn(turn, where) for turn in turns]


def missing_field(row: Mapping[str, Any], known_fields: str, where: str) -> ValueError:
    """The error for a row without a known field. It names the fields that the row has."""
    fields = ", ".join(row)[:80] or "nothing"
    return ValueError(f"{where}: a row needs {known_fields}, this one has {fields}")


def _are_objects(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(isinstance(value, dict) for value in values)


def _parse_turn(turn: Any, where: str) -> Message:
    if isinstance(turn, dict) and "role" in turn:
        message = {**turn, "content": _text_of(turn.get("content"), where)}
    elif isinstance(turn, dict) and "from" in turn:
        speaker = turn["from"]
        if isinstance(speaker, str):
            speaker = SHAREGPT_ROLES.get(speaker, speaker)
        message = {"role": speaker, "content": _text_of(turn.get("value"), where)}
    else:
        raise ValueError(f"{where}: a turn needs role and content, or from and value")

    if not isinstance(message["role"], str):
        raise ValueError(f"{where}: a turn's role must be a name, got {message['role']!r}")
    return message


def _text_of(content: Any, where: str) -> str | None:
    """The text of a turn: a string, or parts of type "text".

    None stays: such a turn calls a tool.
    """
    if content is None:
        return None
    if isinstance(content, str):
        return valid_text(content)

    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: a turn's content must be text, got {str(part)[:40]}")
        texts.append(part["text"])
    return valid_text("".join(texts))
