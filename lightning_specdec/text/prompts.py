"""One prompt, and the one function that reads files of them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_specdec.text.tokenizer import Message, Tokenizer

MAX_ARTICLE_TOKENS = 512
INSTRUCTION = "\n\nSummarize the text above in a few sentences.\n"
"""What follows every article."""


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

    def encoded(
        self, tokenizer: Tokenizer, *, raw: bool = False, system: str | None = None
    ) -> Prompt:
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
        return replace(
            self,
            tokens=tuple(tokenizer.encode_chat([*messages, {"role": "user", "content": text}])),
        )


def read_prompts(path: Path, *, as_typed: bool = False) -> list[Prompt]:
    """The prompts of a file: of `.txt` each line's text, of other files each line's JSON object or string.

    An object has a "prompt", `turns` of which the first is taken, an "article" to be summarized, or "tokens", a list of
    integers. Ids and domains that are missing come from the file's name.

    Args:
        as_typed: take an object's "prompt" and any other line as it is, `-` as stdin; ids are the places, for errors.

    Raises:
        ValueError: there is no such file, it has no prompt, or a line is none.
    """
    is_stdin = as_typed and str(path) == "-"
    try:
        text = sys.stdin.read() if is_stdin else path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"there is no prompts file {path}: check the path") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: give one prompt on each line") from error
    found = []
    for number, line in enumerate(
        text.removeprefix("\ufeff").split("\n"), 1
    ):  # JSON may hold other line ends
        where = f"{'stdin' if is_stdin else path}, line {number}"
        if line.strip() and as_typed:
            found.append(Prompt(where, "", text=_typed(line)))
        elif line.strip():
            try:
                value = line.rstrip("\r") if path.suffix == ".txt" else json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(
                    f"{where}: this is not JSON: write one object on each line"
                ) from None
            found.append(_read_row(value, where, path.stem, number))
    if not found and not as_typed:
        raise ValueError(f"{path} holds no prompt: give one JSON object on each line")
    return found


def _typed(line: str) -> str:
    """The "prompt" of a JSON object, empty for null; any other line itself."""
    try:
        value = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        value = line
    return "" if value is None else str(value)


def _read_row(row: Any, where: str, stem: str, number: int) -> Prompt:
    """The prompt of a JSON object or string; `where` is its file and line, for errors."""
    if not isinstance(row, dict | str):
        raise ValueError(f"{where}: this is not a JSON object: write one on each line")
    row = (
        {"prompt": row}
        if isinstance(row, str)
        else {key: value for key, value in row.items() if value is not None}
    )
    domain = row.get("domain", row.get("category", stem))
    name = row.get("id", f"{stem}-{row.get('question_id', number)}")
    for key, value in (("domain", domain), ("id", name)):
        if not isinstance(value, str) or not value.isprintable() or not value.strip():
            raise ValueError(f'{where}: "{key}" must be a name, got {value!r}')
    tokens, turns = row.get("tokens", []), row.get("turns")
    if not isinstance(tokens, list) or not all(
        type(token) is int and token >= 0 for token in tokens
    ):
        raise ValueError(f'{where}: "tokens" must be a list of integers from 0')
    text, instruction = row.get("prompt"), ""
    if text is None and "article" in row:
        text, instruction = row["article"], INSTRUCTION
    elif text is None and isinstance(turns, list) and turns:
        text = turns[0]
    elif text is None and tokens:
        return Prompt(name, domain, tuple(tokens))
    if not isinstance(text, str) or not text.strip():
        listed = ", ".join(row)[:80] or "nothing"
        raise ValueError(
            f"{where}: a row needs a prompt, turns, an article or tokens, this one has {listed}"
        )
    text = text.encode("utf-8", "replace").decode("utf-8")  # what JSON can spell and UTF-8 cannot
    return Prompt(name, domain, text=text, instruction=instruction)
