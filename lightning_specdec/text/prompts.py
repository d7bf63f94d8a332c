"""Prompts, and how they are read from files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_specdec.text.datasets import dataset_source, read_dataset
from lightning_specdec.text.rows import (
    CONVERSATION_FIELDS,
    JSON_LINES_SUFFIXES,
    Chat,
    Row,
    missing_field,
    parse_turns,
    read_chat,
    read_conversation,
    read_json_lines,
    read_json_rows,
    read_lines,
    read_utf8,
)
from lightning_specdec.text.tokenizer import Message, Tokenizer, valid_text

JSON_SUFFIXES = (*JSON_LINES_SUFFIXES, ".json")

MAX_ARTICLE_TOKENS = 512

INSTRUCTION = "\n\nSummarize the text above in a few sentences.\n"
"""The text after every article."""

SETTING_FIELDS = ("system", "tools", "functions")
"""What a row may have beside its text or its turns."""

PROMPT_FIELDS = "a prompt, turns, messages, conversations, an article or tokens"
"""What a row may have, for the error message about a row that has none of them."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        id: unique in its set of prompts, and always the same for the same prompt.
        domain: what kind of prompt it is.
        tokens: the tokens that a model reads; empty for text that has not been encoded.
        text: the prompt's text, of a conversation the last user turn; None if the prompt was never
            text.
        instruction: text after `text`, which is an article then and is cut to `MAX_ARTICLE_TOKENS`.
        messages: turns of a conversation that ends with a user turn; empty for a single text.
        tools: descriptions of the functions that the model may call, for its chat template.
    """

    id: str
    domain: str
    tokens: tuple[int, ...] = ()
    text: str | None = None
    instruction: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()

    def encoded(
        self,
        tokenizer: Tokenizer,
        *,
        raw: bool = False,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt with a tokenizer's tokens: as a user turn if there is a chat template.

        Args:
            tokenizer: the target's tokenizer.
            raw: do not use the chat template.
            system: content of a system turn at the start, if the prompt has none; the template's
                default if None.
            chat_template_kwargs: variables of the chat template, such as `{"enable_thinking":
                False}`.

        Raises:
            ValueError: the prompt is a conversation, and there is no chat template for it.
        """
        if self.text is None:
            return self

        if raw or not tokenizer.has_chat_template:
            if len(self.messages) > 1:
                raise ValueError(
                    f"{self.id} is a conversation of {len(self.messages)} turns, which needs a "
                    "chat template: use a model tuned for chats, or give its text as a prompt"
                )
            if self.tools:
                raise ValueError(
                    f"{self.id} has tools, which need a chat template: use a model tuned for chats"
                )
            return replace(self, tokens=tuple(tokenizer.encode(self._full_text(tokenizer))))

        messages = list(self.messages)
        if not messages:
            messages = [{"role": "user", "content": self._full_text(tokenizer)}]
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        variables = dict(chat_template_kwargs or {})
        if self.tools:
            variables["tools"] = list(self.tools)
        tokens = tokenizer.encode_chat(messages, chat_template_kwargs=variables)
        return replace(self, tokens=tuple(tokens))

    def _full_text(self, tokenizer: Tokenizer) -> str:
        """The text with its instruction, after an article that is not too long."""
        text = self.text or ""
        if not self.instruction:
            return text
        article_tokens = tokenizer.encode_plain(text)
        if len(article_tokens) > MAX_ARTICLE_TOKENS:
            # The cut may go through a character, which leaves a replacement character.
            text = tokenizer.decode(article_tokens[:MAX_ARTICLE_TOKENS]).rstrip("\ufffd")
        return text + self.instruction


def read_prompts(path: Path, *, as_typed: bool = False) -> list[Prompt]:
    """The prompts of a file: each line of a .txt file, or each row of a JSON file.

    A row is a string or an object. An object has a "prompt"; "turns", of which the first is used;
    "messages" or "conversations", which are used up to the last user turn; an "article" to
    summarize; or "tokens", a list of integers. Beside the text or the turns it may have "system"
    and "tools". Missing ids and domains are made from the file's
    name.

    Args:
        path: the file; a .json file may contain one list of rows, other files have one row per
            line. Or a dataset, see `dataset_source`.
        as_typed: the file of a command line. Lines of .txt files and of stdin (`-`) may be objects
            too, lines of other files may be text, prompts may be empty, and ids are the places in
            the file, for error messages.

    Raises:
        ValueError: there is no such file, it has no prompt, or a row is not a prompt.
    """
    dataset = dataset_source(str(path))
    if as_typed and dataset is None:
        return _read_typed_prompts(path)
    if dataset is not None:
        stem = Path(dataset.name).stem
        prompts = [_parse_row(row, stem) for row in read_dataset(dataset)]
        if not as_typed:
            return prompts
        return [
            replace(prompt, id=f"{dataset.name}, row {number}", domain="")
            for number, prompt in enumerate(prompts, 1)
        ]

    text = _read_text(path)
    if path.suffix == ".txt":
        rows = read_lines(text, path)
    else:
        rows = read_json_rows(text, path) or read_json_lines(text, path)
    if not rows:
        raise ValueError(f"{path} holds no prompt: give one JSON object on each line")
    return [_parse_row(row, path.stem) for row in rows]


def _read_text(path: Path) -> str:
    try:
        text = read_utf8(path)
    except FileNotFoundError:
        raise ValueError(f"there is no prompts file {path}: check the path") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_typed_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file or of stdin, as a person types them. See `read_prompts`."""
    if str(path) == "-":
        rows = read_lines(sys.stdin.read().removeprefix("\ufeff"), "stdin")
        is_json = False
    else:
        text = _read_text(path)
        is_json = path.suffix in JSON_SUFFIXES
        # Lines of a .jsonl file are read one by one, since some may be plain text.
        json_rows = read_json_rows(text, path) if path.suffix == ".json" else None
        rows = json_rows or read_lines(text, path)
    return [_parse_typed_row(row, is_json=is_json) for row in rows]


def _parse_typed_row(row: Row, *, is_json: bool) -> Prompt:
    value = row.value
    if isinstance(value, str):
        value = _parse_typed_line(row, is_json=is_json)

    if isinstance(value, str):
        return Prompt(row.where, "", text=value)
    has_conversation = any(value.get(field) is not None for field in CONVERSATION_FIELDS)
    if value.get("prompt", "") is None and not has_conversation:
        return Prompt(row.where, "", text="")
    has_settings = any(value.get(field) for field in SETTING_FIELDS)
    if isinstance(value.get("prompt"), str | int | float) and not has_settings:
        return Prompt(row.where, "", text=str(value["prompt"]))

    prompt = _parse_row(row._replace(value=value), "")
    if prompt.tokens:
        raise ValueError(f'{row.where}: give tokens as the text of a prompt: {{"prompt": "1 2 3"}}')
    return replace(prompt, id=row.where, domain="")


def _parse_typed_line(row: Row, *, is_json: bool) -> str | dict[str, Any]:
    """The object or the text of a line.

    Args:
        row: the line.
        is_json: whether the file's name indicates JSON. Otherwise only an object with a
            prompt is one.
    """
    line = row.value
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        if is_json and line.lstrip().startswith(("{", "[", '"')):
            raise ValueError(
                f"{row.where}: {line[:40]!r} is not JSON: write one object on each line"
            ) from None
        return str(line)

    if isinstance(value, dict):
        has_prompt = "prompt" in value or any(field in value for field in CONVERSATION_FIELDS)
        if has_prompt or is_json:
            return value
    if isinstance(value, str) and is_json:
        return value
    if isinstance(value, list) and is_json and not all(type(item) is int for item in value):
        raise ValueError(f"{row.where}: this is not a JSON object: write one on each line")
    # Numbers and lists of numbers are tokens, which are typed as text.
    return str(line)


def _parse_row(row: Row, stem: str) -> Prompt:
    """The prompt of a JSON object or string.

    Args:
        row: the row.
        stem: the name of its file, from which a missing id and domain are made.

    Raises:
        ValueError: it is not a prompt.
    """
    if isinstance(row.value, str):
        return _parse_row(row._replace(value={"prompt": row.value}), stem)
    if not isinstance(row.value, dict):
        raise ValueError(f"{row.where}: this is not a JSON object: write one on each line")
    fields = {field: value for field, value in row.value.items() if value is not None}

    default_id = f"{stem}-{fields.get('question_id', row.number)}"
    name = _check_name(fields.get("id", default_id), f'{row.where}: "id"')
    domain = fields.get("domain", fields.get("category", stem))
    if stem:
        domain = _check_name(domain, f'{row.where}: "domain"')
    tokens = _check_tokens(fields.get("tokens", []), row.where)

    chat = _read_messages(fields, row.where)
    if chat is not None:
        return _chat_prompt(name, domain, chat)
    text = _single_text(fields)
    if text is None and tokens:
        return Prompt(name, domain, tokens)
    if not isinstance(text, str) or not text.strip():
        raise missing_field(fields, PROMPT_FIELDS, row.where)

    is_article = "prompt" not in fields and "article" in fields
    if any(fields.get(field) for field in SETTING_FIELDS):
        if is_article:
            raise ValueError(f'{row.where}: an article takes no "system" and no "tools": drop them')
        user_turn: Message = {"role": "user", "content": valid_text(text)}
        return _chat_prompt(name, domain, read_chat(fields, [user_turn], row.where))
    instruction = INSTRUCTION if is_article else ""
    return Prompt(name, domain, text=valid_text(text), instruction=instruction)


def _chat_prompt(name: str, domain: str, chat: Chat) -> Prompt:
    text = chat.messages[-1]["content"]
    messages = tuple(chat.messages)
    return Prompt(name, domain, text=text, messages=messages, tools=tuple(chat.tools))


def _single_text(fields: Mapping[str, Any]) -> Any:
    """The text of a row that is not a conversation; None if it has none."""
    if "prompt" in fields:
        return fields["prompt"]
    if "article" in fields:
        return fields["article"]
    turns = fields.get("turns")
    return turns[0] if isinstance(turns, list) and turns else None


def _read_messages(fields: Mapping[str, Any], where: str) -> Chat | None:
    """A conversation up to its last user turn; None for a row of another kind."""
    chat = None
    if isinstance(fields.get("prompt"), list):
        chat = read_chat(fields, parse_turns(fields["prompt"], f'{where}: "prompt"'), where)
    elif _single_text(fields) is None:
        chat = read_conversation(fields, where)
    if chat is None:
        return None

    messages = list(chat.messages)
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not (messages[-1]["content"] or "").strip():
        raise ValueError(f"{where}: the conversation has no user turn with text")
    return chat._replace(messages=messages)


def _check_name(name: Any, what: str) -> str:
    """A name as text. Many data sets number their rows."""
    if type(name) is int:
        return str(name)
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise ValueError(f"{what} must be a name, got {name!r}")
    return name


def _check_tokens(tokens: Any, where: str) -> tuple[int, ...]:
    is_list = isinstance(tokens, list)
    if not is_list or not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError(f'{where}: "tokens" must be a list of integers from 0')
    return tuple(tokens)
