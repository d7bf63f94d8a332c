"""Prompts by domain, as what is measured is given them: with an id, their text where they have one, and their tokens.

Knows nothing of models but their tokenizer, nor of where the prompts came from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_specdec.bench.prompts.lines import json_lines, tokens_of
from lightning_specdec.files import replaced
from lightning_specdec.text.base import Tokenizer

SEQUENCES = "sequences"
DOMAINS = ("code", "conversation", "summarization", SEQUENCES)
"""What a prompt may be about; a file may bring others."""
MAX_ARTICLE_TOKENS = 512
FORMAT = 1
_FORMAT_KEY = "prompt_set"
"""What the first line of a prompt set says its format under, and is known by."""


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
    """A prompt as a model reads it; `text` is None where it never was text."""

    id: str
    domain: str
    tokens: tuple[int, ...]
    text: str | None = None

    @property
    def num_tokens(self) -> int:
        """len(tokens)"""
        return len(self.tokens)


@dataclass(frozen=True)
class PromptDataset:
    """Prompts of one or more domains, under one name: their sha256.

    Args:
        prompts: in the order in which they are measured.
        tokenizer: whose tokens they are, as `text.named.named_tokenizer` finds it; None if none of them is text.
        fingerprint: of that tokenizer.
        raw: text is given to models as it is, without the chat template that goes round it otherwise.
        recipe: how the prompts were chosen, as plain values.
    """

    prompts: tuple[Prompt, ...]
    tokenizer: str | None = None
    fingerprint: str | None = None
    raw: bool = False
    recipe: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids: set[str] = set()
        for prompt in self.prompts:
            if prompt.id in ids:
                raise ValueError(f"two prompts are called {prompt.id!r}: give each an id of its own")
            if not prompt.tokens:
                raise ValueError(f"prompt {prompt.id!r} is empty: give it a token at least, or leave it out")
            ids.add(prompt.id)
        if not self.prompts:
            raise ValueError("there is no prompt: a prompt set holds one at least")

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains that have prompts, in the order of their first ones."""
        return tuple(dict.fromkeys(prompt.domain for prompt in self.prompts))

    def by_domain(self, domain: str) -> list[Prompt]:
        """The prompts of a domain.

        Raises:
            ValueError: it has none.
        """
        found = [prompt for prompt in self.prompts if prompt.domain == domain]
        if not found:
            raise ValueError(missing(domain, self.domains, "the prompt set"))
        return found

    @property
    def sha256(self) -> str:
        """Of the prompts as they are written, a line each: `tail -n +2 FILE | sha256sum` gives it too."""
        return hashlib.sha256(self._lines()).hexdigest()

    def _lines(self) -> bytes:
        return b"".join(_line(_described(prompt)) for prompt in self.prompts)

    @classmethod
    def encode(
        cls,
        wordings: Sequence[Wording | Prompt],
        tokenizer: Tokenizer | None,
        *,
        raw: bool = False,
        recipe: dict[str, Any] | None = None,
    ) -> PromptDataset:
        """The tokens of texts; what has tokens already stays as it is.

        Args:
            wordings: the prompts.
            tokenizer: for texts.
            raw: leave the chat template out; it goes round each text where the tokenizer has one otherwise.
            recipe: how the prompts were chosen.

        Raises:
            ValueError: there is text and no tokenizer, or the prompts are no prompt set.
        """
        texts = [each for each in wordings if isinstance(each, Wording)]
        if texts and tokenizer is None:
            raise ValueError(
                f"prompts of {texts[0].domain} are text: name the tokenizer that they are for, as --tokenizer gpt2 "
                "(a directory, a name on the hub, or bytes)"
            )
        prompts = []
        for each in wordings:
            if isinstance(each, Wording):
                assert tokenizer is not None
                text = each.said(tokenizer)
                prompts.append(Prompt(each.id, each.domain, tuple(_encoded(tokenizer, text, raw=raw)), text))
            else:
                prompts.append(each)
        used = tokenizer if texts else None
        name, fingerprint = (None, None) if used is None else (used.name, used.fingerprint)
        return cls(tuple(prompts), name, fingerprint, raw, recipe or {})

    def for_tokenizer(self, tokenizer: Tokenizer) -> PromptDataset:
        """The same texts as tokens of another tokenizer; itself if it is the same one."""
        if tokenizer.fingerprint == self.fingerprint or all(prompt.text is None for prompt in self.prompts):
            return self
        prompts = (
            prompt
            if prompt.text is None
            else replace(prompt, tokens=tuple(_encoded(tokenizer, prompt.text, raw=self.raw)))
            for prompt in self.prompts
        )
        return replace(self, prompts=tuple(prompts), tokenizer=tokenizer.name, fingerprint=tokenizer.fingerprint)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the prompt set, whole or not at all, over nothing but another prompt set.

        Raises:
            ValueError: something else is there.
        """
        path = Path(path).expanduser()
        check_output(path)
        first = {
            _FORMAT_KEY: FORMAT,
            "sha256": self.sha256,
            "num_prompts": len(self),
            "tokenizer": self.tokenizer,
            "fingerprint": self.fingerprint,
            "raw": self.raw,
            "recipe": self.recipe,
        }
        with replaced(path) as file:
            file.write(_line(first) + self._lines())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PromptDataset:
        """A prompt set that `save` wrote.

        Raises:
            ValueError: there is none, or it is not as it was written.
        """
        path = Path(path).expanduser()
        rows = json_lines(path, "`lightning_specdec prompts build` writes one")
        _, first = next(rows, (0, {}))
        if first.get(_FORMAT_KEY) != FORMAT:
            version = "of another version" if _FORMAT_KEY in first else "none"
            raise ValueError(
                f"{path} should be a prompt set and is {version}: `lightning_specdec prompts build --source {path} "
                "--output NEW` makes one of a file of prompts"
            )
        prompts = tuple(_read(f"{path}, line {number}", values) for number, values in rows)
        named = {key: first.get(key) for key in ("tokenizer", "fingerprint")}
        try:
            found = cls(prompts, **named, raw=bool(first.get("raw")), recipe=first.get("recipe") or {})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if found.sha256 != first.get("sha256"):
            raise ValueError(f"the prompts of {path} are not those that its first line names: build it again")
        return found


def check_output(path: Path) -> None:
    """Raise ValueError where a prompt set must not be written."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline())
        if isinstance(first, dict) and _FORMAT_KEY in first:
            return
    except (OSError, ValueError, RecursionError):
        pass
    raise ValueError(f"{path} is kept as it is, for it is no prompt set: choose another --output")


def missing(domain: str, there: Sequence[str], where: str) -> str:
    """Why there are no prompts of a domain: it is empty, or unknown."""
    listed = ", ".join(there)
    if domain in DOMAINS:
        return f"{where} has no prompt of {domain}: choose from {listed}"
    return f"{domain!r} is no domain of {where}: choose from {listed}"


def _encoded(tokenizer: Tokenizer, text: str, *, raw: bool) -> list[int]:
    """The tokens of a text, as a user's turn where the tokenizer knows chats."""
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def _described(prompt: Prompt) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "num_tokens": prompt.num_tokens,
        "tokens": list(prompt.tokens),
        "text": prompt.text,
    }


def _read(where: str, values: dict[str, Any]) -> Prompt:
    name, domain, text = (values.get(key) for key in ("id", "domain", "text"))
    if not (isinstance(name, str) and isinstance(domain, str) and isinstance(text, str | None)):
        raise ValueError(f"{where}: a prompt needs an id, a domain and its tokens: build the set again")
    return Prompt(name, domain, tokens_of(where, values), text)


def _line(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, ensure_ascii=False) + "\n").encode("utf-8")
