"""One prompt: as it is worded, as a model reads it, and as a line of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench.prompts.lines import tokens_of
from lightning_specdec.text.base import Tokenizer

MAX_ARTICLE_TOKENS = 512


@dataclass(frozen=True)
class Wording:
    """A prompt that has no tokens yet.

    Args:
        id: unlike all others of its set, and the same wherever the prompt is used.
        domain: what it is about.
        text: what is said.
        instruction: what follows the text, which is an article then and cut to `MAX_ARTICLE_TOKENS`.
    """

    id: str
    domain: str
    text: str
    instruction: str = ""

    def encoded(self, tokenizer: Tokenizer, *, raw: bool) -> Prompt:
        """The prompt as tokens; as a user's turn where the tokenizer knows chats, unless it is to be `raw`."""
        text = self.said(tokenizer)
        if raw or not tokenizer.has_chat_template:
            tokens = tokenizer.encode(text)
        else:
            tokens = tokenizer.encode_chat([{"role": "user", "content": text}])
        article = self.text if self.instruction else None
        return Prompt(self.id, self.domain, tuple(tokens), text, article, self.instruction)

    def said(self, tokenizer: Tokenizer) -> str:
        """The whole text."""
        if not self.instruction:
            return self.text
        tokens = tokenizer.encode_plain(self.text)
        if len(tokens) <= MAX_ARTICLE_TOKENS:
            return self.text + self.instruction
        # The cut may go through a character.
        return tokenizer.decode(tokens[:MAX_ARTICLE_TOKENS]).rstrip("\ufffd") + self.instruction


@dataclass(frozen=True)
class Prompt:
    """A prompt as a model reads it.

    Args:
        text: what the tokens say; None where it never was text.
        article: the whole article where the text is one, cut for its tokenizer, and an `instruction`.
    """

    id: str
    domain: str
    tokens: tuple[int, ...]
    text: str | None = None
    article: str | None = None
    instruction: str = ""

    @property
    def num_tokens(self) -> int:
        """len(tokens)"""
        return len(self.tokens)

    @property
    def wording(self) -> Wording | Prompt:
        """What another tokenizer has to encode; itself where it never was text."""
        if self.text is None:
            return self
        return Wording(self.id, self.domain, self.text if self.article is None else self.article, self.instruction)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = {
            "id": self.id,
            "domain": self.domain,
            "num_tokens": self.num_tokens,
            "tokens": list(self.tokens),
            "text": self.text,
        }
        return values if self.article is None else {**values, "article": self.article, "instruction": self.instruction}

    @classmethod
    def from_dict(cls, where: str, values: dict[str, Any]) -> Prompt:
        """What `to_dict` gave.

        Args:
            where: file and line, for errors.

        Raises:
            ValueError: it is something else.
        """
        name, domain, text, article = (values.get(key) for key in ("id", "domain", "text", "article"))
        instruction = values.get("instruction", "")
        if not (
            isinstance(name, str)
            and isinstance(domain, str)
            and isinstance(text, str | None)
            and isinstance(article, str | None)
            and isinstance(instruction, str)
        ):
            raise ValueError(f"{where}: a prompt needs an id, a domain and its tokens: build the set again")
        return cls(name, domain, tokens_of(where, values), text, article, instruction)
