"""One prompt, and the one function that reads files of them."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_specdec.text.tokenizer import Message, Tokenizer

MAX_ARTICLE_TOKENS = 512
INSTRUCTION = "\n\nSummarize the text above in a few sentences.\n"
"""What follows every article."""
FIELD = "prompt"
_CONVERSATION = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Spec-Bench's categories that are MT-Bench's."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        id: unique in its set, and the same wherever the prompt is used.
        domain: what it is about.
        tokens: as a model reads it; empty for text that has not been encoded.
        text: as it is worded; None where it never was text.
        instruction: what follows the text, which is an article then and cut to `MAX_ARTICLE_TOKENS`.
    """

    id: str
    domain: str
    tokens: tuple[int, ...] = ()
    text: str | None = None
    instruction: str = ""

    @property
    def num_tokens(self) -> int:
        """len(tokens)"""
        return len(self.tokens)

    def encoded(self, tokenizer: Tokenizer, *, raw: bool = False, system: str | None = None) -> Prompt:
        """The prompt with this tokenizer's tokens, as a user's turn if it has a chat template.

        Args:
            raw: leave the chat template out.
            system: content of a system turn before it; the template's own when None.
        """
        if self.text is None:
            return self
        text = self.text
        if self.instruction:
            article = tokenizer.encode_plain(text)
            if len(article) > MAX_ARTICLE_TOKENS:  # the cut may go through a character
                text = tokenizer.decode(article[:MAX_ARTICLE_TOKENS]).rstrip("\ufffd")
            text += self.instruction
        if raw or not tokenizer.has_chat_template:
            return replace(self, tokens=tuple(tokenizer.encode(text)))
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return replace(self, tokens=tuple(tokenizer.encode_chat([*messages, {"role": "user", "content": text}])))


def read_prompts(path: Path, *, field: str = FIELD) -> list[Prompt]:
    """The prompts of a file: of `.txt` each line's text, of other files each line's JSON object or string.

    Objects may be those of Spec-Bench (of `turns` the first is taken), of HumanEval, or have an "article" that is to
    be summarized, or "tokens", a list of integers. Ids and domains that are missing come from the file's name.

    Args:
        field: what the text is called.

    Raises:
        ValueError: there is no such file, it has no prompt, or a line is none.
    """
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".txt")
    if path.suffix == ".txt":
        return [Prompt(f"{stem}-{number}", stem, text=line) for number, line in read_lines(path)]
    rows = read_objects(path)
    if isinstance(first := rows[0][1], dict) and "prompt_set" in first:  # a header, as earlier versions wrote
        rows = rows[1:]
    return [read_row(value, f"{path}, line {n}", stem, n, field=field) for n, value in rows]


def read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a text file, unpacked if its name ends in .gz, with their numbers; blank ones are left out."""
    if not path.is_file():
        raise ValueError(f"there is no prompts file {path}: check the path")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = content.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked, it is broken or no .gz: download it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: give prompts as JSON lines") from error
    found = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not found:
        raise ValueError(f"{path} holds no prompt: give one JSON object on each line")
    return found


def read_objects(path: Path) -> list[tuple[int, Any]]:
    """The JSON value of each line, with the line's number."""
    values = []
    for number, line in read_lines(path):
        try:
            values.append((number, json.loads(line)))
        except (ValueError, RecursionError):
            raise ValueError(f"{path}, line {number}: this is no JSON: write one object on each line") from None
    return values


def read_row(row: Any, where: str, stem: str, number: int, *, field: str = FIELD) -> Prompt:
    """The prompt of a JSON object or string; `where` is its file and line, for errors."""
    if not isinstance(row, dict | str):
        raise ValueError(f"{where}: this is no object of JSON: write one on each line")
    row = {field: row} if isinstance(row, str) else {key: value for key, value in row.items() if value is not None}
    domain = row.get("domain", row.get("category", "code" if "entry_point" in row else stem))
    domain = "conversation" if domain in _CONVERSATION else domain
    name = row.get("id", row.get("task_id", f"{stem}-{row.get('question_id', number)}"))
    name = str(name) if type(name) is int else name
    for key, value in (("domain", domain), ("id", name)):
        if not isinstance(value, str) or not value.isprintable() or not value.strip():
            raise ValueError(f'{where}: "{key}" must be a name, got {value!r}')
    tokens, turns = row.get("tokens", []), row.get("turns")
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError(f'{where}: "tokens" must be a list of integers from 0')
    text, instruction = row.get(field, row.get("text") if tokens else None), row.get("instruction", "")
    if field not in row and "article" in row:
        text, instruction = row["article"], instruction or INSTRUCTION
    elif text is None and isinstance(turns, list) and turns:
        text = turns[0]
    if text is None and tokens:
        return Prompt(name, domain, tuple(tokens))
    if not isinstance(text, str) or not isinstance(instruction, str) or not text.strip():
        listed = ", ".join(row)[:80] or "nothing"
        raise ValueError(f"{where}: a row needs a {field}, turns, an article or tokens, this one has {listed}")
    text = text.encode("utf-8", "replace").decode("utf-8")  # what JSON can spell and UTF-8 cannot
    return Prompt(name, domain, tuple(tokens), text, instruction)
